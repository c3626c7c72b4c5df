"""Each estimator on rewards written out by hand, and what it remembers."""

import json
import math

import numpy as np
import pytest
import torch
from learning import make_learner, make_rollout, next_turn, on_policy, settings

from online_sao.errors import LearnerError
from online_sao.learner import estimators
from online_sao.learner.batch import make_batch, prompt_key
from online_sao.learner.estimators import make_estimator

OTHER = (1, 50, 51)  # another prompt


def never(rollout):
    raise AssertionError("only SPO asks for log-probs")


def estimator(advantage, logprobs=never, **changes):
    return make_estimator(settings(advantage=advantage, **changes), logprobs)


def batch_of(*rewards, **fields):
    """Two-token answers to one prompt, one for each reward."""
    fields = {"name": "a", "tokens": [60, 2]} | fields
    return make_batch([[make_rollout(reward=reward, **fields)] for reward in rewards])


def advantage(made, reward, values=None, **fields):
    """The advantage of one rollout, the same on all of its tokens."""
    batch = batch_of(reward, **fields)
    found = made.advantages(batch, values)
    assert torch.equal(found[~batch.action_mask], torch.zeros(len(found[~batch.action_mask])))
    first, second = found[batch.action_mask].tolist()
    assert first == second
    return first


def learn(made, reward, **fields):
    """What the learner does with a rollout; its advantage."""
    found = advantage(made, reward, **fields)
    made.observe(batch_of(reward, **fields))
    return found


class TestCritic:
    def values(self, batch, *numbers):
        return batch.scatter(torch.tensor(numbers))

    def test_token_level(self):
        batch = batch_of(1.0)
        found = estimator("critic").advantages(batch, self.values(batch, 0.2, 0.4))
        # lambda = 1 - 1/(1.5*2) = 2/3; the last: 1 - 0.4; before it: 0.4 - 0.2 + 2/3 * 0.6
        assert found[batch.action_mask].tolist() == pytest.approx([0.6, 0.6], abs=1e-6)

    def test_settings_reach_the_recursion(self):
        batch = batch_of(1.0)
        made = estimator("critic", gamma=0.5, lambda_alpha=1.0)
        found = made.advantages(batch, self.values(batch, 0.2, 0.4))
        # lambda = 1/2; 0.6; 0.5*0.4 - 0.2 + 0.5*0.5*0.6
        assert found[batch.action_mask].tolist() == pytest.approx([0.15, 0.6], abs=1e-6)

    def test_a_session_bridges_the_observation(self):
        first = make_rollout("t0", tokens=[60, 2], reward=0.5)
        second = next_turn(first, "t1", [7, 8, 9], [61], reward=1.0)
        batch = make_batch([[first, second]])
        found = estimator("critic").advantages(batch, self.values(batch, 0.2, 0.4, 0.7))
        # lambda = 1 - 1/(1.5*3) = 7/9
        # 1 - 0.7 = 0.3; 0.5 + 0.7 - 0.4 + 7/9*0.3 = 1.0333; 0.4 - 0.2 + 7/9*1.0333 = 1.0037
        assert found[batch.action_mask].tolist() == pytest.approx(
            [1.003704, 1.033333, 0.3], abs=1e-5
        )

    @pytest.mark.parametrize(
        ("name", "first", "second"),
        [
            # lambda = 1 - 1/(1.5*2) = 2/3; V(S_0) = mean(0.2, 0.4) = 0.3, V(S_1) = 0.7
            # 1 - 0.7 = 0.3; 0.5 + 0.7 - 0.3 + 2/3*0.3 = 1.1
            ("step_average", 1.1, 0.3),
            # V(S_0) = 0.4: 0.5 + 0.7 - 0.4 + 0.2 = 1.0
            ("step_last", 1.0, 0.3),
        ],
    )
    def test_step_level(self, name, first, second):
        turn = make_rollout("t0", tokens=[60, 2], reward=0.5)
        batch = make_batch([[turn, next_turn(turn, "t1", [7, 8], [61], reward=1.0)]])
        found = estimator(name).advantages(batch, self.values(batch, 0.2, 0.4, 0.7))
        assert found[batch.action_mask].tolist() == pytest.approx([first, first, second], abs=1e-6)


class TestRunningMean:
    def test_the_baseline_is_the_mean_of_the_rewards_before(self):
        made = estimator("running_mean")
        assert (learn(made, 1.0), made.first_visits) == (0.0, 1)  # nothing to compare with
        assert (learn(made, 0.0), made.first_visits) == (-1.0, 0)
        assert learn(made, 1.0, prompt=OTHER) == 0.5  # of all prompts
        assert advantage(made, 0.0) == pytest.approx(-2 / 3)

    def test_over_a_window(self):
        made = estimator("running_mean", running_mean_window=2)
        for reward in (1.0, 0.0, 0.0):
            learn(made, reward)
        assert advantage(made, 1.0) == 1.0

    def test_a_batch_is_compared_with_what_came_before_it(self):
        made = estimator("running_mean")
        learn(made, 0.5)
        batch = batch_of(1.0, 0.0)
        assert made.advantages(batch, None)[batch.action_mask].tolist() == [0.5, 0.5, -0.5, -0.5]
        made.observe(batch)
        assert made.state_dict() == {"rewards": [0.5, 1.0, 0.0]}


class TestPerPrompt:
    def test_the_baseline_is_the_prompts_own(self):
        made = estimator("running_mean_per_prompt")
        assert (learn(made, 1.0), made.first_visits) == (0.0, 1)
        assert (learn(made, 0.0, prompt=OTHER), made.first_visits) == (0.0, 1)
        assert (learn(made, 0.5), made.first_visits) == (-0.5, 0)
        assert advantage(made, 1.0) == 0.25
        assert advantage(made, 1.0, prompt=OTHER) == 1.0

    def test_over_a_window(self):
        made = estimator("running_mean_per_prompt", per_prompt_window=1)
        for reward in (1.0, 0.0):
            learn(made, reward)
        assert advantage(made, 1.0) == 1.0

    def test_the_prompt_not_seen_for_longest_is_forgotten(self, monkeypatch):
        monkeypatch.setattr(estimators, "MAX_PROMPTS", 2)
        made = estimator("running_mean_per_prompt")
        for prompt in ((1,), (2,), (1,), (3,)):
            learn(made, 1.0, prompt=prompt)
        assert [advantage(made, 0.0, prompt=p) for p in ((1,), (2,), (3,))] == [-1.0, 0.0, -1.0]


class TestSPO:
    def test_first_visits(self):
        made = estimator("spo", lambda rollout: rollout.behavior_logprobs)
        assert (learn(made, 1.0), made.first_visits) == (0.0, 1)
        assert (learn(made, 0.0), made.first_visits) == (-1.0, 0)
        assert (learn(made, 0.0, prompt=OTHER), made.first_visits) == (0.0, 1)

    @pytest.mark.parametrize(
        ("shift", "rho"),
        [
            (0.0, 0.96),  # not moved: k3 = 0, so 2^0, cut to rho_max
            # k3 = e^d - 1 - d per token
            (0.1, 2 ** -((math.exp(0.1) - 1.1) / 0.06)),  # 0.9420
            (-0.1, 2 ** -((math.exp(-0.1) - 0.9) / 0.06)),  # 0.9456
            (1.0, 0.875),  # far: 2^-11.97, cut to rho_min
            (100.0, 0.875),  # exp(100) does not fit
            (-100.0, 0.875),
        ],
    )
    def test_forgets_as_far_as_the_policy_has_moved(self, shift, rho):
        asked = []

        def logprobs(rollout):
            asked.append(rollout.id)
            return rollout.behavior_logprobs + np.float32(shift)

        made = estimator("spo", logprobs)
        learn(made, 1.0, name="first", logprobs=-0.75)
        assert asked == []
        learn(made, 0.0)
        assert asked == ["first"]  # measured on the answer of the last visit
        # a = 8 * 1, b = 8 * 0 at the first visit, as 1/(1 - 0.875) = 8; then R = 0
        a, b = rho * 8, rho * 0 + 1
        assert advantage(made, 1.0) == pytest.approx(1 - a / (a + b), abs=1e-5)

    def test_measured_on_all_tokens_of_the_answer(self):
        shifts = np.array([0.1, -0.1], np.float32)
        made = estimator("spo", lambda rollout: rollout.behavior_logprobs + shifts)
        learn(made, 1.0, logprobs=[-0.5, -1.0])
        learn(made, 0.0, logprobs=[-0.5, -1.0])
        mean = (math.exp(0.1) - 1.1 + math.exp(-0.1) - 0.9) / 2
        a = 8 * 2 ** (-mean / 0.06)
        assert advantage(made, 1.0) == pytest.approx(1 / (a + 1), abs=1e-5)

    @pytest.mark.parametrize(
        ("shift", "rho"),
        [(0.0, 0.9), (0.1, 2 ** -((math.exp(0.1) - 1.1) / 0.01)), (1.0, 0.5)],  # 0.6988 between
    )
    def test_settings_reach_the_tracker(self, shift, rho):
        made = estimator(
            "spo",
            lambda rollout: rollout.behavior_logprobs + np.float32(shift),
            spo_rho_min=0.5,
            spo_rho_max=0.9,
            spo_kl_half_life=0.01,
        )
        learn(made, 1.0, logprobs=-0.75)
        learn(made, 0.0)
        a = rho * 2  # 1/(1 - 0.5) = 2
        assert advantage(made, 1.0) == pytest.approx(1 - a / (a + 1), abs=1e-5)

    @pytest.mark.parametrize("moves", [False, True])
    def test_the_measure_of_a_real_policy(self, tiny_model, moves):
        learner = make_learner(tiny_model, "spo", policy_lr=1e-2 if moves else 0.0)
        for reward in (1.0, 0.0, 1.0, 0.0):
            rollout = on_policy(learner, make_rollout(reward=reward))
            assert learner.update([[rollout]]).applied
        ((_, a, b),) = learner.estimator.state_dict()["inner"]["tracker"]["counts"]
        # without a move each visit forgets by exactly 0.96: ((8*0.96 + 0)*0.96 + 1)*0.96
        still = ((8 * 0.96 * 0.96 + 1) * 0.96, (1 * 0.96 + 0) * 0.96 + 1)
        if moves:
            assert a < still[0] - 0.1
            assert b < still[1] - 0.01
        else:
            assert (a, b) == pytest.approx(still, abs=1e-12)

    def test_prompts_are_bounded(self, monkeypatch):
        monkeypatch.setattr(estimators, "MAX_PROMPTS", 2)
        made = estimator("spo", lambda rollout: rollout.behavior_logprobs)
        for prompt in ((1,), (2,), (1,), (3,)):
            learn(made, 1.0, prompt=prompt)
        kept = [prompt_key(make_rollout(prompt=p)) for p in ((1,), (3,))]
        state = made.state_dict()
        assert [key for key, _ in state["last"]] == kept
        assert [key for key, *_ in state["tracker"]["counts"]] == kept

    def test_returns_beyond_its_range_are_refused_before_anything_moves(self):
        first = make_rollout("t0")
        batch = make_batch([[first, next_turn(first, "t1", [7], [8])]])
        with pytest.raises(LearnerError, match=r"returns in \[0, 1\]"):
            estimator("spo").advantages(batch, None)


class TestGroup:
    def test_normalised_within_the_answers_to_one_prompt(self):
        made = estimator("group", rollouts_per_update=8)
        rollouts = [
            make_rollout("a", reward=1.0, tokens=[60, 2]),
            make_rollout("b", reward=1.0, tokens=[2], prompt=OTHER),
            make_rollout("c", reward=0.0, tokens=[2]),
            make_rollout("d", reward=1.0, tokens=[2], prompt=OTHER),
            make_rollout("e", reward=0.0, tokens=[2]),
            make_rollout("f", reward=0.0, tokens=[2]),
        ]
        batch = make_batch([[rollout] for rollout in rollouts])
        found = dict(batch.per_rollout(made.advantages(batch, None)))
        # rewards 1 0 0 0: mean 1/4, spread sqrt(3)/4, so sqrt(3) and -1/sqrt(3)
        assert found["a"].tolist() == pytest.approx([math.sqrt(3)] * 2, abs=1e-5)
        for name in ("c", "e", "f"):
            assert found[name].tolist() == pytest.approx([-1 / math.sqrt(3)], abs=1e-5)
        assert found["b"].tolist() == found["d"].tolist() == [0.0]  # all alike

    def test_a_single_answer_has_nothing_to_be_compared_with(self):
        made = estimator("group", rollouts_per_update=8)
        rollouts = [
            make_rollout("a", reward=1.0),
            make_rollout("b", reward=0.0),
            make_rollout("c", reward=1.0, prompt=OTHER),  # the others have no verdict
        ]
        batch = make_batch([[rollout] for rollout in rollouts])
        found = dict(batch.per_rollout(made.advantages(batch, None)))
        assert found["a"][0] == pytest.approx(1.0, abs=1e-5)
        assert set(found["c"].tolist()) == {0.0}
        assert made.first_visits == 1


class TestNormalised:
    def made(self, window=128):
        made = estimator("running_mean", normalize_advantage_window=window)
        made.observe(batch_of(0.5))  # as pretraining does; a baseline, but no advantage yet
        return made

    def test_one_rollout_at_a_time_is_never_all_zero_or_nan(self):
        """C5: normalised by itself, a single rollout would always give 0/0."""
        made = self.made()
        found = [learn(made, float(step % 2)) for step in range(40)]
        assert all(math.isfinite(x) and abs(x) > 0.1 for x in found)
        assert [x > 0 for x in found] == [bool(step % 2) for step in range(40)]

    def test_divides_by_the_spread_of_the_advantages_before(self):
        made = self.made(window=8)
        raw = []
        rewards = [0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]
        baselines = [0.5, 0.25, 0.5, 0.375, 0.5, 3.5 / 6, 0.5, 3.5 / 8]
        for reward, baseline in zip(rewards, baselines, strict=True):
            raw.append(reward - baseline)
            assert learn(made, reward) == pytest.approx(raw[-1], abs=1e-6)  # too few to divide by
        wanted = (1.0 - 4.5 / 9) / np.std(raw)
        assert learn(made, 1.0) == pytest.approx(wanted, abs=1e-6)
        # the window now holds this advantage as it was before the division, and not the oldest
        raw = [*raw[1:], 0.5]
        assert advantage(made, 0.0) == pytest.approx((0.0 - 5.5 / 10) / np.std(raw), abs=1e-6)

    def test_a_refused_update_leaves_no_trace(self):
        made = self.made()
        learn(made, 1.0)
        before = json.dumps(made.state_dict())
        advantage(made, 0.0)  # refused afterwards: nothing is observed
        assert json.dumps(made.state_dict()) == before
        learn(made, 1.0)
        assert len(made.state_dict()["scale"]["samples"]) == 2


CRITICS = ("critic", "step_average", "step_last")


@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize(
    "name", [*CRITICS, "running_mean", "running_mean_per_prompt", "spo", "group"]
)
def test_what_it_remembers_survives_json(name, window):
    prompts = [(1,), (2, 3), (4,)]
    rng = np.random.default_rng(0)

    def logprobs(rollout):
        return rollout.behavior_logprobs + np.float32(0.05) * rollout.token_ids[0] / 100

    def fresh():
        return estimator(
            name,
            logprobs if name == "spo" else never,
            normalize_advantage_window=window,
            rollouts_per_update=8,
        )

    def batches(number):
        for _ in range(number):
            rows = [
                [
                    make_rollout(
                        prompt=prompts[rng.integers(3) if name != "group" else 0],
                        tokens=rng.integers(3, 500, 3).tolist(),
                        logprobs=rng.normal(-3, 1, 3).tolist(),
                        reward=float(rng.integers(2)),
                    )
                ]
                for _ in range(2)
            ]
            batch = make_batch(rows)
            values = batch.scatter(torch.from_numpy(rng.normal(0.5, 0.2, 6)).float())
            yield batch, values if name in CRITICS else None

    first = fresh()
    for batch, values in batches(12):
        first.advantages(batch, values)
        first.observe(batch)
    second = fresh()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    some = 0.0
    for batch, values in batches(6):
        wanted = first.advantages(batch, values)
        assert torch.equal(second.advantages(batch, values), wanted)
        some += wanted.abs().sum().item()
        first.observe(batch)
        second.observe(batch)
    assert some > 0.5
    assert second.state_dict() == first.state_dict()
