"""Faults that users of comparable systems met, each by its number: those that need no engine.

C1 to C4, C6, C7, C9, C11 to C13 need one: test_cases_engine.py, test_cases_endpoint.py,
test_cases_judge.py.
"""

import math
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import torch
from learning import make_learner, make_rollout, next_turn
from standin import StandIn
from test_loop import Publisher, bench  # noqa: F401

from judge import Judge, Unscored, Verdict
from online_sao.algorithm.importance import log_importance_ratio
from online_sao.algorithm.objectives import policy_loss
from online_sao.config import PRESETS, Config
from online_sao.errors import CheckpointError, ConfigError
from online_sao.store import RolloutStore
from online_sao.types import Rollout, WeightSpan
from online_sao.types import RolloutState as S

NORMALISED = [
    name
    for name, changes in PRESETS.items()
    if changes.get("advantage") == "group" or "normalize_advantage_window" in changes
]


@pytest.mark.parametrize("preset", NORMALISED)
def test_c05_one_rollout_per_update_is_never_normalised_by_itself(preset, tiny_model):
    """It would always be all zeros (or 0/0): refused, or normalised over a window."""
    overrides = {"learner.rollouts_per_update": 1}
    if PRESETS[preset].get("advantage") == "group":
        with pytest.raises(ConfigError, match="rollouts_per_update to be a multiple of group_size"):
            Config.load(preset=preset, overrides=overrides)
        return
    learner = make_learner(tiny_model, preset, rollouts_per_update=1)
    means = []
    for step in range(30):
        result = learner.update([[make_rollout(str(step), reward=float(step % 2))]])
        assert result.applied
        (advantages,) = result.advantages.values()
        assert np.isfinite(advantages).all()
        means.append(float(advantages.mean()))
    # the first visit to a prompt has nothing to compare with; after it each has its sign
    assert [mean > 0 for mean in means[1:]] == [step % 2 == 1 for step in range(1, 30)]
    assert min(abs(mean) for mean in means[1:]) > 0.01


C8 = [
    # what the judge writes, how often it is asked, what comes of it
    ("reasons_long", 2, (1, 1)),  # content null, finish_reason length: asked again with more tokens
    ("fenced", 1, (1, 1)),
    ("thinking", 1, (1, 1)),  # the draft inside the thinking block says otherwise
    ("two_objects", 1, (1, 1)),  # the first says quality 0: the last one wins
]


@pytest.mark.parametrize(("behaviour", "calls", "marks"), C8)
async def test_c08_what_judges_write_around_a_verdict(behaviour, calls, marks):
    with StandIn(behaviour) as server:
        judge = Judge("openai/standin", api_base=server.url, max_tokens=100)
        outcome = await judge.score(
            [{"role": "user", "content": "Write about tea."}],
            "A good styled tea.",
            "cute",
            ["academic", "cute"],
        )
    assert isinstance(outcome, Verdict), outcome
    assert (outcome.quality, outcome.style) == marks
    budgets = [request["max_tokens"] for request in server.requests]
    assert len(budgets) == calls
    assert budgets == sorted(set(budgets))  # each time a larger one


async def test_c07_three_outcomes_of_the_judge_are_three_things():
    """In store, metrics and dashboard: test_cases_judge.py."""
    kinds = {}
    for behaviour in ("essay", "normal", "error_500"):
        with StandIn(behaviour) as server:
            judge = Judge("openai/standin", api_base=server.url, max_retries=0)
            chat = [{"role": "user", "content": "Write about tea."}]
            kinds[behaviour] = await judge.score(chat, "A tea.", "cute", ["academic", "cute"])
    assert isinstance(kinds["normal"], Verdict)
    assert kinds["normal"].reward == 0
    assert isinstance(kinds["essay"], Unscored)
    assert isinstance(kinds["error_500"], Unscored)
    assert (kinds["essay"].reason, kinds["error_500"].reason) == ("unreadable", "provider_error")


def test_c10_ten_thousand_sessions_are_opened_and_never_closed(tmp_path):
    """They lie in the store alone, close when idle, and every answer can be learned from."""
    number = 10_000
    with RolloutStore(f"sqlite:///{tmp_path}/store.sqlite") as store:
        before = datetime.now(UTC) - timedelta(hours=1)
        for index in range(number):
            store.add(
                Rollout(
                    id=f"r{index}",
                    response_id=f"r{index}",
                    choice=0,
                    prompt_token_ids=np.array([1], np.int32),
                    token_ids=np.array([2, 3], np.int32),
                    behavior_logprobs=np.full(2, -1, np.float32),
                    weight_spans=(WeightSpan(0, 0, 2),),
                    temperature=1.0,
                    messages=[],
                    answer="Drip.",
                    finish_reason="stop",
                    session_id=f"s{index}",
                    created_at=before,
                )
            )
        # nothing of a session is held by the process that serves it
        assert not [value for value in vars(store).values() if isinstance(value, list | dict)]
        assert store.session("s0").closed_at is None
        assert store.close_idle_sessions(60) == number
        assert store.session(f"s{number - 1}").close_reason == "idle"
        counts = store.counts()
        assert counts[S.PENDING] == sum(counts.values()) == number


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_c14_a_restart_without_its_position(bench, damage):  # noqa: F811
    """The position is the store's; a checkpoint's `state.json` says which version it is of.

    Cut short or missing, the checkpoint before it is taken, said so, and what was learned since
    returns to be learned again: never silently from zero.
    """
    loop = bench.loop(checkpoint_every=1, checkpoint_keep=2)
    loop.start()
    bench.learn(loop, "a", "b", "c")
    state = bench.checkpoints / "v3" / "state.json"
    state.write_bytes(state.read_bytes()[:-40]) if damage == "cut" else state.unlink()
    again = bench.loop()
    assert again.start() == "resume"
    assert bench.store.get_version(again.version).parent == 2
    (event,) = bench.store.events("resume")
    assert event.data == {"from_version": 2, "rollouts_returned": 1}
    assert bench.states() == {"a": S.TRAINED, "b": S.TRAINED, "c": S.REWARDED}
    if damage == "cut":
        assert "Checkpoint of version 3" in bench.errors()[0]
    bench.learn(again)
    assert set(bench.states().values()) == {S.TRAINED}


def test_c14_a_restart_without_its_store(bench):  # noqa: F811
    loop = bench.loop()
    loop.start()
    bench.learn(loop, "a")
    for store in bench.opened:
        store.close()
    for file in bench.folder.glob("store.sqlite*"):
        file.unlink()
    bench.opened.clear()
    bench.open()
    with pytest.raises(CheckpointError, match="knows nothing of"):
        bench.loop().start()


def test_c15_huge_log_ratios_outside_the_action_tokens():
    """exp(88.8) overflows float32, and inf * 0 is NaN: in the loss, and in its gradient."""
    mask = torch.tensor([[False, True, True, False, False]])
    behavior = torch.tensor([[-200.0, -1.0, -2.0, -1e30, -math.inf]])
    logprobs = torch.tensor([[-1.0, -1.1, -2.2, 0.0, 0.0]], requires_grad=True)
    loss, metrics = policy_loss(
        logprobs, behavior, torch.ones(1, 5), mask, objective="dis", eps_low=0.3, eps_high=5.0
    )
    loss.backward()
    assert bool(loss.isfinite())
    assert bool(logprobs.grad.isfinite().all())
    assert logprobs.grad[~mask].tolist() == [0, 0, 0]
    assert bool((logprobs.grad[mask] != 0).all())
    assert all(math.isfinite(float(value)) for value in metrics.values())
    assert log_importance_ratio(logprobs, behavior, mask)[~mask].tolist() == [0, 0, 0]


def test_c15_a_padded_batch_with_an_observation(tiny_model):
    """The same through the whole update: a short trajectory beside a long one with two turns."""
    learner = make_learner(tiny_model)
    first = make_rollout("long", logprobs=-90.0)  # so unlikely that its ratio is e^84: masked
    long = [first, next_turn(first, "more", [5, 6, 7], [9, 2])]
    result = learner.update([[make_rollout("short", tokens=[8])], long])
    assert result.applied
    assert all(v is None or math.isfinite(v) for v in result.metrics.values())
    for tensor in learner.policy.parameters.masters().values():
        assert bool(tensor.isfinite().all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_c16_a_behavior_logprob_that_is_not_finite(bench, tiny_model, bad):  # noqa: F811
    from transformers import AutoModelForCausalLM, AutoTokenizer

    publisher = Publisher()
    loop = bench.loop(publisher)
    loop.start()
    bench.store.add(make_rollout("bad", logprobs=[-1.0, bad, -1.0, -1.0, -1.0]))
    bench.learn(loop, "good")
    bad_one = bench.store.get("bad")
    assert (bad_one.state, bad_one.reason) == (S.EXCLUDED, "non_finite")
    assert bench.states()["good"] is S.TRAINED
    weights = publisher.weights[publisher.published[-1]]
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())
    # and what the published weights write is text
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = tokenizer("Rain", return_tensors="pt").input_ids
    with torch.no_grad():
        written = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(written[0, ids.shape[1] :])
    assert len(set(written[0].tolist())) > 1


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_c17_the_critics_first_steps_on_rewards_all_alike(tiny_model, reward):
    learner = make_learner(tiny_model)
    for step in range(5):
        result = learner.update([[make_rollout(str(step), reward=reward)]])
        assert result.applied
        # there is no variance to explain: undefined, not minus infinity
        assert result.metrics["critic/explained_variance"] is None
        assert all(v is None or math.isfinite(v) for v in result.metrics.values())
        (values,) = result.values.values()
        assert np.isfinite(values).all()
