"""Runs made to break, with the real learner, loop and store on the tiny model: each must end
in the guard that is there for it, and the same run unbroken in none.

The engine is the policy itself, sampled here; the judges are functions of the tokens.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learning import SETTINGS, make_rollout

from online_sao.config import Config
from online_sao.learner.checkpoint import load_checkpoint
from online_sao.learner.guards import ProbeResult, repeated_share
from online_sao.learner.learner import Learner
from online_sao.learner.loop import LearnerLoop, make_run
from online_sao.store import RolloutStore
from online_sao.types import Preference

WINDOW = 12
HONEST_LR = 2e-4  # no guard comes near its bound
KL_COEF = 0.1  # with less the tiny model's answers become so alike that 12 of them say little
START_DECAY = 0.0  # nothing but what is broken here may lower the rewards of 12 answers
ANSWER_TOKENS = 12
PROMPTS = [[1, 40 + number, 90 + number, 2, 201, 1] for number in range(6)]


class Publisher:
    def __init__(self):
        self.published = []

    def publish(self, version, weights):
        self.published.append(version)


@dataclass
class Endpoint:
    """What the service is to a loop: it asks the policy, judges, records, and lets it learn."""

    model: Path
    folder: Path
    judge: Any
    learner_settings: dict[str, Any] = field(default_factory=dict)
    guard_settings: dict[str, Any] = field(default_factory=dict)
    asked: int = 0

    def __post_init__(self):
        self.config = Config.model_validate(
            {
                "model": {"name": str(self.model)},
                "engine": {"dtype": "float32"},
                "learner": SETTINGS
                | {"order": "oldest", "checkpoint_every": 10, "checkpoint_keep": 3, "window": 32}
                | {"policy_lr": HONEST_LR, "kl_coef": KL_COEF, "start_decay": START_DECAY}
                | self.learner_settings,
                "guards": {"window": WINDOW} | self.guard_settings,
                "service": {"run_dir": str(self.folder)},
            }
        )
        self.store = RolloutStore(self.config.store_url)
        self.store.set_preference(Preference("cute", ("cute",)), None)
        self.learner = Learner(self.config.learner, str(self.model))
        run = make_run(self.config, "hash")
        self.publisher = Publisher()
        self.loop = LearnerLoop(self.config, run, self.learner, self.store, self.publisher)
        self.loop.start()

    def serve(self, count: int) -> list[dict]:
        """`count` answers in waves, each learned from; ends with the first new firing."""
        before = len(self.firings())
        for _ in range(0, count, len(PROMPTS)):
            self.answer()
            while self.loop._one_round():
                fired = self.store.events("guard")[before:]
                if fired:
                    return [event.data for event in fired]
        return []

    def firings(self) -> list[dict]:
        self.loop._one_round()  # takes in what probes there are
        return [event.data for event in self.store.events("guard")]

    @torch.no_grad()
    def answer(self) -> None:
        """One answer to each prompt, all by the same weights."""
        ids = torch.tensor(PROMPTS)
        logprobs = []
        for _ in range(ANSWER_TOKENS):
            logits = self.learner.policy.model(ids).logits[:, -1].float()
            distribution = torch.distributions.Categorical(logits=logits)
            token = distribution.sample()
            ids = torch.cat([ids, token[:, None]], 1)
            logprobs.append(distribution.log_prob(token))
        behavior = torch.stack(logprobs, 1).tolist()
        for prompt, row, measured in zip(PROMPTS, ids.tolist(), behavior, strict=True):
            self.asked += 1
            answer = row[len(prompt) :]
            self.store.add(
                make_rollout(
                    f"r{self.asked}",
                    prompt=prompt,
                    tokens=answer,
                    logprobs=measured,
                    reward=self.judge(answer),
                    version=self.loop.version,
                    preference=self.store.preference(),
                )
            )


@pytest.fixture
def endpoint(tiny_model, tmp_path):
    made = []

    def make(judge, learner=None, **guards):
        made.append(Endpoint(tiny_model, tmp_path / str(len(made)), judge, learner or {}, guards))
        return made[-1]

    yield make
    for one in made:
        one.store.close()


def even_tokens(answer):
    """An honest judge that a tiny model can please: half of what it says at random is even."""
    return float(sum(token % 2 == 0 for token in answer) > len(answer) / 2)


def repetition(answer):
    return 1 - len(set(answer)) / len(answer)


def repeats(judge):
    """Whether a judge rewards one word said over and over."""
    return float(judge([61] * ANSWER_TOKENS) > 0.5)


BREAKS = {"policy_lr": HONEST_LR * 1000}


def break_learning(run):
    """From now on the learning rate is a thousand times too high."""
    run.learner.config = run.learner.config.model_copy(update=BREAKS)


def test_an_honest_run_touches_no_guard(endpoint):
    run = endpoint(even_tokens)
    assert run.serve(80) == []
    assert run.loop.status().guards["rollouts_seen"] == WINDOW
    assert not run.loop.status().paused


def test_a_learning_rate_a_thousand_times_too_high_pauses(endpoint):
    run = endpoint(even_tokens, BREAKS)
    (fired,) = run.serve(80)
    # Whichever its window shows first: far from the start, or far from what was sampled.
    assert fired["guard"] in ("kl_to_start", "logprob_gap", "masked_fraction")
    assert fired["value"] > fired["bound"]
    status = run.loop.status()
    assert status.paused
    assert fired["guard"] in status.pause_reason
    assert status.guards["last_firing"] == fired
    updates = status.num_updates
    run.answer()
    assert not run.loop._one_round()  # serving goes on, learning does not
    assert run.loop.status().num_updates == updates


def test_rollback_goes_to_weights_from_before_the_trouble(endpoint):
    run = endpoint(even_tokens, action="rollback")
    assert run.serve(30) == []
    break_learning(run)
    (fired,) = run.serve(40)
    good = fired["rolled_back_to"]
    assert fired["action"] == "rollback"
    assert good in (20, 30)  # the last of which its window may have held
    status = run.loop.status()
    assert not status.paused
    assert run.publisher.published[-1] == status.version
    assert status.num_updates == good
    before = Learner(run.config.learner, str(run.model))
    load_checkpoint(run.folder / "checkpoints" / f"v{good}", before)
    kept = before.policy.weights(torch.float32)
    for name, tensor in run.learner.policy.weights(torch.float32).items():
        assert torch.equal(tensor, kept[name]), name
    # The cause is still there: the same way back would only bring the same again.
    (again,) = run.serve(60)
    assert (again["action"], again["kept_version"]) == ("pause", good)
    assert run.loop.status().paused


def test_a_rollback_does_not_cross_a_preference_event(endpoint):
    run = endpoint(even_tokens, action="rollback")
    assert run.serve(30) == []
    run.store.set_preference(Preference("academic", ("academic",)), run.loop.version + 1)
    break_learning(run)
    (fired,) = run.serve(40)
    assert (fired["action"], fired["rolled_back_to"]) == ("pause", None)
    assert run.loop.status().paused


def test_warn_only_records(endpoint):
    run = endpoint(even_tokens, BREAKS, action="warn")
    (fired,) = run.serve(80)
    assert fired["action"] == "warn"
    assert not run.loop.status().paused


def test_a_judge_that_always_says_one_is_seen_by_the_forgeries(endpoint):
    def always(answer):
        return 1.0

    run = endpoint(always)
    assert run.serve(40) == []  # its rewards alone look like a run that has learned all
    for judge, version in ((even_tokens, 0), (always, 40)):
        run.loop.add_probe(ProbeResult(version, 4, 1.0, 1.0, forgeries_rewarded=repeats(judge)))
    (fired,) = run.firings()
    assert (fired["guard"], fired["value"]) == ("forgeries", 1.0)
    assert run.loop.status().paused


def test_where_the_judge_is_at_fault_no_weights_are_rolled_back(endpoint):
    run = endpoint(even_tokens, action="rollback")
    assert run.serve(12) == []
    for version, rewarded in ((10, 0.0), (12, 1.0)):
        run.loop.add_probe(ProbeResult(version, 8, 1.0, 1.0, forgeries_rewarded=rewarded))
    (fired,) = run.firings()
    assert fired["kept_version"] == 10  # there was a way back
    assert (fired["action"], fired["rolled_back_to"]) == ("pause", None)
    assert run.loop.status().paused
    assert run.loop.version == 12


def test_a_judge_that_rewards_repetition(endpoint):
    """Reward hacking: the training reward rises to its top, the answers become one token."""
    # Steps large enough to be quick; the guards that watch their size are not what is shown.
    steps = {"masked_fraction_max": None, "logprob_gap_max": None}
    run = endpoint(repetition, {"kl_coef": 0.0, "policy_lr": 2e-3}, **steps)
    (fired,) = run.serve(600)
    assert fired["guard"] == "repetition"
    rewards = [r.reward for r in run.store.list(limit=1000)]
    assert np.mean(rewards[-WINDOW:]) > np.mean(rewards[:WINDOW]) + 0.3
    last = run.store.list(limit=1, newest_first=True, with_tokens=True)[0]
    assert repeated_share(last.token_ids) > 0.3


def test_reward_up_and_held_out_quality_down_is_visible(endpoint):
    run = endpoint(repetition, probe_rounds=1)
    assert run.serve(20) == []
    run.loop.add_probe(ProbeResult(0, 8, quality=0.9, reward=0.2))
    run.loop.add_probe(ProbeResult(20, 8, quality=0.3, reward=0.9))
    (fired,) = run.firings()
    assert fired["guard"] == "probe_quality_drop"
    assert [event.data["quality"] for event in run.store.events("probe")] == [0.9, 0.3]
    shown = run.loop.status().guards["probe"]
    assert (shown["quality_at_first"], shown["quality"], shown["reward"]) == (0.9, 0.3, 0.9)


def restarted(run, model):
    """The learner of a next process on the same state."""
    learner = Learner(run.config.learner, str(model))
    loop = LearnerLoop(run.config, make_run(run.config, "hash"), learner, run.store, Publisher())
    loop.start()
    return loop


def test_a_pause_by_a_guard_outlives_the_learner_and_keeps_the_way_back(endpoint, tiny_model):
    run = endpoint(even_tokens)
    assert run.serve(30) == []
    break_learning(run)
    (fired,) = run.serve(40)
    kept = fired["kept_version"]
    assert kept in (20, 30)
    run.store.pin(kept)  # an operator who has read the reason: it stays his
    again = restarted(run, tiny_model)
    assert again.status().paused
    assert again.status().guards["last_firing"] == fired
    assert again._kept_checkpoints()[0] == {kept}
    run.store.unpin(kept)
    assert again._kept_checkpoints()[0] == {kept}  # the guard's own
    run.store.pin(kept)
    again.resume()
    assert run.store.get_version(kept).pinned
    run.store.unpin(kept)
    assert again._kept_checkpoints()[0] == set()
    # An operator's pause of later does not bring the guard's back.
    again.pause("to upgrade")
    third = restarted(run, tiny_model)
    assert third.status().paused
    assert third._kept_checkpoints()[0] == set()


def test_the_first_probes_are_what_a_next_learner_compares_with(endpoint, tiny_model):
    run = endpoint(even_tokens, probe_rounds=1)
    run.loop.add_probe(ProbeResult(0, 8, quality=0.9, reward=0.2))
    assert run.firings() == []
    again = restarted(run, tiny_model)
    assert again.status().guards["probe"]["quality_at_first"] == 0.9
    again.add_probe(ProbeResult(1, 8, quality=0.3, reward=0.9))
    again._one_round()
    assert [fired.data["guard"] for fired in run.store.events("guard")] == ["probe_quality_drop"]
    assert again.status().paused
