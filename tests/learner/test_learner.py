"""One update: against a slow reference (reference.py), and what it must never do."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from learning import (
    changed,
    everything,
    make_learner,
    make_rollout,
    next_turn,
    on_policy,
    settings,
    verdict,
)
from reference import Reference

from online_sao.algorithm.statistics import explained_variance
from online_sao.config import PRESETS
from online_sao.errors import LearnerError
from online_sao.learner.batch import make_batch
from online_sao.learner.learner import Learner

LR = 1e-3  # of both models, in learning.SETTINGS
GROUPS = ("grpo", "grpo_dis")


def some_rollouts(rng, number, spread=1.0, **fields):
    """Answers of 3 to 8 tokens, with log-probs around what the tiny model gives them."""
    rollouts = []
    for index in range(number):
        n = int(rng.integers(3, 9))
        rollouts.append(
            make_rollout(
                f"r{index}",
                tokens=rng.integers(3, 500, n).tolist(),
                logprobs=rng.normal(-6.3, spread, n).tolist(),
                reward=float(rng.integers(2)),
                **fields,
            )
        )
    return rollouts


def some_session(rng):
    first, other = some_rollouts(rng, 2, temperature=0.8)
    second = next_turn(
        first,
        "turn1",
        [7, 8, 9],
        other.token_ids.tolist(),
        logprobs=other.behavior_logprobs.tolist(),
        reward=0.5,
        temperature=1.25,
    )
    return [first, second]


def fill(preset):
    """How many rollouts an update of this preset takes."""
    return 8 if preset in GROUPS else 1


class TestAgainstTheReference:
    def compare(self, model, config, updates):
        learner, reference = Learner(config, str(model)), Reference(config, str(model))
        for trajectories in updates:
            result, wanted = learner.update(trajectories), reference.update(trajectories)
            assert result.applied
            # What was made of the rollouts, per token
            for name in ("values", "advantages", "ratios"):
                found = list(
                    getattr(result, "importance_ratios" if name == "ratios" else name).values()
                )
                rows = [x for row in wanted[name] for x in row]
                np.testing.assert_allclose(np.concatenate(found), rows, rtol=1e-4, atol=2e-6)
            kl = result.metrics["policy/kl_to_start"]
            if kl is not None:
                assert kl == pytest.approx(wanted["kl"], rel=1e-3, abs=1e-6)
            assert result.metrics["policy/entropy"] == pytest.approx(wanted["entropy"], rel=1e-5)
            decay = result.metrics["policy/start_decay"]
            assert decay == pytest.approx(wanted["decay"], rel=1e-4, abs=1e-6)
        policy = dict(reference.policy.named_parameters())
        critic = {f"backbone.{name}": p for name, p in reference.body.named_parameters()}
        critic |= {f"head.{name}": p for name, p in reference.head.named_parameters()}
        for ours, theirs, optimizer in (
            (learner.policy.parameters, policy, reference.policy_optimizer),
            (learner.critic.parameters, critic, reference.critic_optimizer),
        ):
            self.compare_parameters(ours, theirs, optimizer)

    def compare_parameters(self, ours, theirs, optimizer):
        masters, moments = ours.masters(), ours.optimizer_tensors()
        moved = 0.0
        for name, master in masters.items():
            state = optimizer.state[theirs[name]]
            # The moving average of the gradients: exact up to float32 rounding
            gap = (moments[f"{name}.exp_avg"] - state["exp_avg"]).abs().max()
            assert gap <= 1e-4 * state["exp_avg"].abs().max(), name
            # AdamW divides a gradient by its own size, which blows up the rounding of those
            # near zero; so a few may differ by part of a step, and nearly all by nothing.
            gap = (master - theirs[name]).abs()
            assert gap.max() < 0.5 * LR, name
            assert gap.mean() < 1e-4 * LR, name
            moved = max(moved, moments[f"{name}.exp_avg"].abs().max().item())
        assert moved > 0
        frozen = set(theirs) - set(masters)
        assert all(not optimizer.state[theirs[name]] for name in frozen)

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"kl_coef": 0.0},
            {"kl_coef": 0.0, "start_decay": 0.0},
            {"start_decay": 2.0, "start_decay_rate": 0.7},
            {"kl_coef": 1.0, "entropy_coef": 0.05},
            {"kl_coef": 0.5, "kl_direction": "reverse"},
            {"policy_lr": 2e-4, "critic_lr": 5e-4},
            {"critic_updates": 1},
            {"critic_updates": 3, "critic_warmup_updates": 4},
            {"value_timing": "after"},
            {"value_timing": "after", "critic_updates": 1, "critic_warmup_updates": 2},
            {"gamma": 0.9, "lambda_alpha": 0.3, "lambda_critic": 0.7},
            {"critic_trainable": "all", "weight_decay": 0.1},
            {"eps_low": 0.8, "eps_high": 0.5},
            {"objective": "none"},
            {"objective": "tis", "tis_cap": 1.2},
            {"objective": "icepop"},
            {"objective": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28},
        ],
        ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()) or "sao",
    )
    def test_three_updates_of_one_rollout(self, tiny_model, changes):
        rng = np.random.default_rng(0)
        updates = [[[rollout]] for rollout in some_rollouts(rng, 3)]
        self.compare(tiny_model, settings(**changes), updates)

    def test_at_another_temperature(self, tiny_model):
        rng = np.random.default_rng(1)
        updates = [[[rollout]] for rollout in some_rollouts(rng, 3, temperature=0.6)]
        self.compare(tiny_model, settings(), updates)

    def test_two_trajectories_of_unlike_length_in_one_update(self, tiny_model):
        """The gradient is that of the sum over all N tokens, however they are padded."""
        rng = np.random.default_rng(2)
        updates = [[[rollout] for rollout in some_rollouts(rng, 2)] for _ in range(3)]
        assert len(updates[0][0][0].token_ids) != len(updates[0][1][0].token_ids)
        self.compare(tiny_model, settings(rollouts_per_update=2), updates)

    @pytest.mark.parametrize("timing", ["before", "after"])
    def test_sessions(self, tiny_model, timing):
        rng = np.random.default_rng(3)
        updates = [
            [some_session(rng), [replace(some_rollouts(rng, 1)[0], id="single")]] for _ in range(2)
        ]
        self.compare(tiny_model, settings(value_timing=timing, gamma=0.95), updates)


class TestOneUpdate:
    def test_results_are_per_rollout_and_per_token(self, tiny_model):
        learner = make_learner(tiny_model)
        first, second = make_rollout("a", tokens=[60, 2]), make_rollout("b", tokens=[2, 3, 4])
        result = learner.update([[first], [second]], policy_lag=7)
        for arrays in (result.values, result.advantages, result.importance_ratios):
            assert {name: len(array) for name, array in arrays.items()} == {"a": 2, "b": 3}
            assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}
        assert result.metrics["rollout/num_action_tokens"] == 2.5
        assert result.metrics["rollout/num_trajectories"] == 2
        assert result.metrics["rollout/policy_lag_max"] == 7
        assert result.metrics["rollout/reward"] == 1.0
        assert learner.num_updates == 1

    def test_on_policy_the_ratio_is_one(self, tiny_model):
        """C1, the learner's half: at the request's temperature and at the first token too."""
        learner = make_learner(tiny_model)
        rollout = on_policy(learner, make_rollout(temperature=0.6))
        result = learner.update([[rollout]])
        assert result.importance_ratios["a"].tolist() == pytest.approx([1.0] * 5, abs=1e-5)
        assert result.metrics["policy/masked_fraction"] == 0
        # recorded at another temperature than it is recomputed at, it would not be
        other = make_learner(tiny_model)
        result = other.update([[replace(rollout, temperature=1.0)]])
        assert abs(result.importance_ratios["a"][0] - 1) > 0.05

    def test_a_rewarded_answer_becomes_more_likely_and_a_punished_one_less(self, tiny_model):
        for reward, sign in ((1.0, 1), (0.0, -1)):
            learner = make_learner(tiny_model, "running_mean", policy_lr=1e-4)
            learner.pretrain([make_rollout(reward=0.5)])
            rollout = on_policy(learner, make_rollout(reward=reward))
            learner.update([[rollout]])
            after = on_policy(learner, rollout).behavior_logprobs
            assert sign * (after - rollout.behavior_logprobs).sum() > 0.01

    def test_masked_tokens_shrink_the_step_and_do_not_amplify_the_rest(self, tiny_model):
        """N counts masked tokens too."""
        learner = make_learner(tiny_model, "running_mean", kl_coef=0.0)
        learner.pretrain([make_rollout(reward=0.5)])
        rollout = on_policy(learner, make_rollout())
        far = rollout.behavior_logprobs.copy()
        far[1:] -= 5.0  # ratio e^5: outside
        result = learner.update([[replace(rollout, behavior_logprobs=far)]])
        assert result.metrics["policy/masked_fraction"] == pytest.approx(0.8)
        # loss = -(1/5) * 0.5 * log pi of the first token
        wanted = -0.5 * rollout.behavior_logprobs[0] / 5
        assert result.metrics["policy/loss"] == pytest.approx(wanted, rel=1e-4)

    @pytest.mark.parametrize("preset", ["spo", "running_mean_per_prompt"])
    def test_first_visits_are_counted(self, tiny_model, preset):
        learner = make_learner(tiny_model, preset)
        other = make_rollout("b", prompt=[5, 6], reward=0.0)
        counts = [
            learner.update([[rollout] for rollout in rollouts]).metrics["advantage/first_visits"]
            for rollouts in ([make_rollout()], [make_rollout(), other], [other])
        ]
        assert counts == [1, 1, 0]

    def test_the_critic_warms_up(self, tiny_model):
        learner = make_learner(tiny_model, critic_warmup_updates=4, critic_updates=1)
        for step in range(6):
            before = learner.critic.head.bias.item()
            result = learner.update([[make_rollout(reward=1.0)]])
            lr = LR * min(1.0, (step + 1) / 4)
            assert result.metrics["critic/lr"] == pytest.approx(lr)
            # AdamW on a gradient of steady sign: about one learning rate per step
            assert learner.critic.head.bias.item() - before == pytest.approx(lr, rel=0.1)

    @pytest.mark.parametrize("timing", ["before", "after"])
    def test_explained_variance_is_over_a_window_of_values_from_before(self, tiny_model, timing):
        learner = make_learner(tiny_model, window=3, value_timing=timing, critic_lr=0.05)
        values, rewards = [], [1.0, 0.0, 1.0, 0.0, 0.0]
        for reward in rewards:
            result = learner.update([[make_rollout(reward=reward)]])
            values.append(result.metrics["critic/value_first"])
            wanted = explained_variance(values[-3:], rewards[: len(values)][-3:])
            assert result.metrics["critic/explained_variance"] == pytest.approx(wanted)
        assert values[0] == 0.0  # nothing was known
        assert len(set(values)) == 5

    def test_answers_that_earn_less_than_expected_lead_back_to_the_start(self, tiny_model):
        """The baseline expects 1: after rewards of 0 and 0 the moving average of the shortfall
        is 0.5 and 0.75, its decay 0.2 and 0.3; after a reward of 1, 0.375 and 0.15."""
        changes = {"start_decay": 0.4, "start_decay_rate": 0.5, "policy_lr": 0.0}
        learner = make_learner(tiny_model, "running_mean", **changes)
        learner.pretrain([make_rollout(reward=1.0)] * 128)
        parameters, start = learner.policy.parameters, learner.policy.start_weights
        parameters.load_masters({name: start[name] + 1.0 for name in parameters.masters()})
        left = 1.0
        for reward, decay in ((0.0, 0.2), (0.0, 0.3), (1.0, 0.15)):
            metrics = learner.update([[make_rollout(reward=reward)]]).metrics
            # Not quite: the mean of the window falls by 1/128 with each reward of 0.
            assert metrics["policy/start_decay"] == pytest.approx(decay, abs=0.005)
            left *= 1 - metrics["policy/start_decay"]
            for name, master in parameters.masters().items():
                gap = (master - start[name]) - left
                assert gap.abs().max() < 1e-5, name

    def test_answers_that_earn_what_is_expected_or_more_do_not(self, tiny_model):
        learner = make_learner(tiny_model, "running_mean", start_decay=5.0, start_decay_rate=1.0)
        learner.pretrain([make_rollout(reward=0.5)] * 128)
        for reward, decay in ((1.0, 0.0), (1.0, 0.0), (0.0, 1.0)):  # the last: 5 times a half
            metrics = learner.update([[make_rollout(reward=reward)]]).metrics
            assert metrics["policy/start_decay"] == decay

    def test_noise_about_what_is_expected_averages_out(self, tiny_model):
        """Rewards of 0 and 1 in turns: the average stays within one update's share of 0."""
        learner = make_learner(tiny_model, "running_mean", start_decay=1.0, start_decay_rate=0.1)
        learner.pretrain([make_rollout(reward=0.5)] * 128)
        decays = [
            learner.update([[make_rollout(reward=float(step % 2))]]).metrics["policy/start_decay"]
            for step in range(30)
        ]
        assert 0 < max(decays) < 0.055
        assert decays[1::2] == [0.0] * 15

    def test_the_clip_is_off_by_default_and_reported_norms_are_not_clipped(self, tiny_model):
        assert settings().grad_clip_quantile is None
        learner = make_learner(tiny_model, grad_clip_quantile=0.01)
        norms = [
            learner.update([[make_rollout(reward=float(step % 2))]]).metrics["policy/grad_norm"]
            for step in range(12)
        ]
        assert learner.state_dict()["policy"]["norms"] == norms
        assert len(set(norms)) > 6

    @pytest.mark.parametrize(
        "setting", [{"grad_clip_quantile": 0.01}, {"adam_betas": (0.5, 0.6)}, {"weight_decay": 0.3}]
    )
    @pytest.mark.parametrize(("preset", "part"), [("running_mean", "policy"), ("sao", "critic")])
    def test_the_optimisers_settings_reach_both(self, tiny_model, preset, part, setting):
        """Each where the other has no part in it."""
        masters = []
        for changes in ({}, setting):
            learner = make_learner(tiny_model, preset, **changes)
            for step in range(10):
                learner.update([[make_rollout(reward=float(step % 2))]])
            masters.append(getattr(learner, part).parameters.masters())
        assert any(not torch.equal(masters[0][name], masters[1][name]) for name in masters[0])

    def test_it_computes_on_the_threads_it_is_given(self, tiny_model):
        before = torch.get_num_threads()
        try:
            for threads in (1, 2):
                make_learner(tiny_model, threads=threads)
                assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)

    def test_what_cannot_be_a_batch_raises_and_changes_nothing(self, tiny_model):
        learner = make_learner(tiny_model)
        before = everything(learner)
        with pytest.raises(LearnerError, match="no reward"):
            learner.update([[make_rollout(reward=None)]])
        assert changed(before, everything(learner)) == set()
        assert learner.num_updates == 0

    @pytest.mark.parametrize(("preset", "updates"), [("running_mean", 200), ("sao", 10)])
    def test_the_learning_rates_may_be_zero(self, tiny_model, preset, updates):
        """C3: however often it is updated and published, nothing moves."""
        learner = make_learner(
            tiny_model,
            preset,
            policy_lr=0.0,
            critic_lr=0.0,
            compute_dtype="bfloat16",
            weight_decay=0.1,
        )
        rollout = on_policy(learner, make_rollout())
        start = learner.policy.weights(torch.bfloat16)
        start = {name: tensor.clone() for name, tensor in start.items()}
        masters = {k: v for k, v in everything(learner).items() if ".optimizer." not in k}
        gaps = set()
        for step in range(updates):
            rollout = replace(rollout, verdict=verdict(float(step % 2)))
            gaps.add(learner.update([[rollout]]).metrics["policy/logprob_gap"])
        assert gaps == {0.0}
        assert changed(start, learner.policy.weights(torch.bfloat16)) == set()
        after = {k: v for k, v in everything(learner).items() if ".optimizer." not in k}
        assert changed(masters, after) == set()


def second_gradient_is_bad():
    """A hook that makes the second gradient it sees not finite, and the list of its calls."""
    calls = []

    def hook(gradient):
        calls.append(1)
        return gradient * (math.nan if len(calls) == 2 else 1)

    return calls, hook


class TestRefused:
    """A number that is not finite makes the update a no-op that says so."""

    def refuse(self, learner, trajectories, where):
        before, state = everything(learner), learner.state_dict()
        result = learner.update(trajectories)
        assert not result.applied
        assert result.metrics[f"refused/{where}"] == 1.0
        assert result.values == result.advantages == result.importance_ratios == {}
        assert changed(before, everything(learner)) == set()
        assert learner.state_dict() == state

    @pytest.mark.parametrize("preset", sorted(set(PRESETS) - set(GROUPS)))
    def test_behavior_logprobs(self, tiny_model, preset):
        """C16"""
        learner = make_learner(tiny_model, preset)
        learner.update([[make_rollout(reward=0.5)]])  # so that there are moments to keep
        for bad in (math.nan, math.inf, -math.inf):
            logprobs = [-6.0, -6.0, bad, -6.0, -6.0]
            self.refuse(learner, [[make_rollout("bad", logprobs=logprobs)]], "policy")

    @pytest.mark.parametrize("timing", ["before", "after"])
    def test_one_of_two_rollouts(self, tiny_model, timing):
        learner = make_learner(tiny_model, value_timing=timing)
        bad = make_rollout("bad", logprobs=math.nan)
        self.refuse(learner, [[make_rollout()], [bad]], "policy")

    @pytest.mark.parametrize("timing", ["before", "after"])
    def test_policy_weights(self, tiny_model, timing):
        learner = make_learner(tiny_model, value_timing=timing)
        learner.update([[make_rollout(reward=0.5)]])
        with torch.no_grad():
            next(learner.policy.model.parameters())[60, 0] = math.nan
        self.refuse(learner, [[make_rollout()]], "policy")

    @pytest.mark.parametrize(("timing", "where"), [("before", "policy"), ("after", "critic")])
    def test_critic_weights(self, tiny_model, timing, where):
        learner = make_learner(tiny_model, value_timing=timing)
        with torch.no_grad():
            learner.critic.head.weight[0, 0] = math.nan
        self.refuse(learner, [[make_rollout()]], where)

    @pytest.mark.parametrize("timing", ["before", "after"])
    @pytest.mark.parametrize("whose", ["policy", "critic"])
    def test_gradients(self, tiny_model, timing, whose):
        learner = make_learner(tiny_model, value_timing=timing)
        learner.update([[make_rollout(reward=0.5)]])
        part = learner.policy.model if whose == "policy" else learner.critic.backbone
        *_, parameter = (p for name, p in part.named_parameters() if "mlp" in name)
        hook = parameter.register_hook(lambda gradient: gradient * math.nan)
        where = "critic" if (timing, whose) == ("after", "critic") else "gradient"
        self.refuse(learner, [[make_rollout()]], where)
        hook.remove()
        assert learner.update([[make_rollout()]]).applied

    def test_a_second_critic_step(self, tiny_model):
        """With values taken after it, the first step is undone with it."""
        learner = make_learner(tiny_model, value_timing="after", critic_updates=2)
        calls, second_is_bad = second_gradient_is_bad()
        learner.critic.head.bias.register_hook(second_is_bad)
        self.refuse(learner, [[make_rollout()]], "critic")
        assert len(calls) == 2

    def test_a_second_critic_step_after_the_policy_has_moved(self, tiny_model):
        """Values were taken before: the update stands, and says that the critic stopped short."""
        learner = make_learner(tiny_model, value_timing="before", critic_updates=3)
        _, second_is_bad = second_gradient_is_bad()
        hook = learner.critic.head.bias.register_hook(second_is_bad)
        result = learner.update([[make_rollout()]])
        assert result.applied
        assert result.metrics["critic/num_steps"] == 1.0
        assert all(tensor.isfinite().all() for tensor in everything(learner).values())
        hook.remove()
        assert learner.update([[make_rollout()]]).metrics["critic/num_steps"] == 3.0

    @pytest.mark.parametrize("timing", ["before", "after"])
    def test_an_exception_half_way(self, tiny_model, timing):
        """Out of memory in the policy's backward, say: the next update is as if it had not been."""
        learners = [make_learner(tiny_model, value_timing=timing) for _ in range(2)]
        *_, parameter = learners[0].policy.model.parameters()

        def fails(gradient):
            raise MemoryError("no room")

        hook = parameter.register_hook(fails)
        with pytest.raises(MemoryError):
            learners[0].update([[make_rollout("bad", reward=1.0)]])
        hook.remove()
        for learner in learners:
            assert learner.update([[make_rollout(reward=0.0)]]).applied
        assert changed(*map(everything, learners)) == set()
        assert learners[0].state_dict() == learners[1].state_dict()

    def test_a_reward(self, tiny_model):
        rollout = replace(make_rollout(), verdict=verdict(math.nan))
        self.refuse(make_learner(tiny_model), [[rollout]], "policy")

    def test_the_next_update_is_as_if_it_had_not_been(self, tiny_model):
        learners = [make_learner(tiny_model, "spo") for _ in range(2)]
        learners[0].update([[make_rollout("bad", logprobs=math.nan)]])
        for learner in learners:
            for reward in (1.0, 0.0, 1.0):
                assert learner.update([[make_rollout(reward=reward)]]).applied
        assert changed(*map(everything, learners)) == set()
        assert learners[0].state_dict() == learners[1].state_dict()


class TestExtremes:
    @pytest.mark.parametrize("objective", ["dis", "ppo_clip", "tis", "icepop", "none"])
    def test_a_log_ratio_that_no_exp_can_hold(self, tiny_model, objective):
        """C15: above 88 float32 exp is infinite, and infinity times a mask's zero is NaN."""
        learner = make_learner(tiny_model, objective=objective, eps_low=0.3, eps_high=5.0)
        longer = make_rollout("b", tokens=[5] * 12)  # the first one is padded
        result = learner.update([[make_rollout(logprobs=[-6.0, -1000.0, -6, -6, -6])], [longer]])
        assert result.applied
        bad = {k: v for k, v in result.metrics.items() if v is not None and not math.isfinite(v)}
        assert bad == {}
        assert all(tensor.isfinite().all() for tensor in everything(learner).values())
        assert result.importance_ratios["a"][1] == pytest.approx(math.exp(20), rel=1e-5)

    @pytest.mark.parametrize("reward", [0.0, 1.0])
    @pytest.mark.parametrize("preset", PRESETS)
    def test_rewards_that_are_all_alike(self, tiny_model, preset, reward):
        """C17"""
        learner = make_learner(tiny_model, preset)
        for step in range(10 if fill(preset) == 1 else 3):
            names = [f"{step}-{index}" for index in range(fill(preset))]
            result = learner.update([[make_rollout(name, reward=reward)] for name in names])
            assert result.applied
            numbers = [value for value in result.metrics.values() if value is not None]
            assert all(map(math.isfinite, numbers)), result.metrics
            if learner.critic is not None:
                assert result.metrics["critic/explained_variance"] is None
        assert all(tensor.isfinite().all() for tensor in everything(learner).values())

    def test_one_token_answers(self, tiny_model):
        learner = make_learner(tiny_model)
        result = learner.update([[make_rollout(tokens=[2])]])
        assert result.applied
        assert result.advantages["a"].tolist() == [1.0]


class TestPretraining:
    def rollouts(self):
        rng = np.random.default_rng(0)
        return [replace(r, id=f"p{i}") for i, r in enumerate(some_rollouts(rng, 6))]

    def test_the_critic_learns_the_rewards_and_the_policy_stays(self, tiny_model):
        learner = make_learner(tiny_model, value_pretraining_epochs=20, critic_lr=1e-3)
        before, seen = everything(learner), []
        rollouts = self.rollouts()
        metrics = learner.pretrain(rollouts, lambda done, total: seen.append((done, total)))
        assert seen == [(step + 1, 120) for step in range(120)]
        moved = changed(before, everything(learner))
        assert moved
        assert not any(name.startswith("policy") for name in moved)
        assert learner.num_updates == 0
        mean = float(np.mean([r.reward for r in rollouts]))
        assert 0 < mean < 1
        assert metrics["pretraining/num_rollouts"] == 6
        assert metrics["pretraining/reward_mean"] == mean
        first, second = (metrics[f"pretraining/loss_{half}_half"] for half in ("first", "second"))
        assert second < first / 2
        # it tells the answers apart once it has seen them, which no constant could
        for rollout in rollouts:
            probe = make_learner(tiny_model)
            probe.critic.parameters.load_masters(learner.critic.parameters.masters())
            values = probe.update([[rollout]]).values[rollout.id]
            assert abs(values[-1] - rollout.reward) < 0.25

    def test_its_steps_are_at_the_full_rate(self, tiny_model):
        learner = make_learner(tiny_model, value_pretraining_epochs=1, critic_warmup_updates=10)
        learner.pretrain([make_rollout(reward=1.0)])
        assert learner.critic.head.bias.item() == pytest.approx(LR, rel=1e-4)

    def test_it_fills_the_baselines(self, tiny_model):
        learner = make_learner(tiny_model, "running_mean")
        rollouts = self.rollouts()
        seen = []
        metrics = learner.pretrain(rollouts, lambda *step: seen.append(step))
        rewards = [r.reward for r in rollouts]
        assert learner.estimator.state_dict() == {"rewards": rewards}
        assert seen == []  # no critic to fit
        assert metrics["pretraining/loss_first_half"] is None
        advantage = learner.update([[make_rollout(reward=1.0)]]).advantages["a"]
        assert advantage.tolist() == pytest.approx([1 - np.mean(rewards)] * 5)

    def test_without_rollouts_nothing_happens(self, tiny_model):
        learner = make_learner(tiny_model)
        before = everything(learner)
        metrics = learner.pretrain([])
        assert metrics["pretraining/num_rollouts"] == 0
        assert metrics["pretraining/reward_mean"] is None
        assert changed(before, everything(learner)) == set()

    def test_a_step_that_is_not_finite_is_left_out(self, tiny_model):
        learner = make_learner(tiny_model, value_pretraining_epochs=1)
        bad = replace(make_rollout("bad"), verdict=verdict(math.nan))
        before = everything(learner)
        with pytest.raises(ValueError, match="finite"):
            make_learner(tiny_model, "running_mean").pretrain([bad])
        metrics = learner.pretrain([bad])
        assert changed(before, everything(learner)) == set()
        assert metrics["pretraining/loss_second_half"] is None


def test_the_same_seed_gives_the_same_numbers(tiny_model):
    def run(seed):
        rng = np.random.default_rng(5)
        learner = make_learner(tiny_model, seed=seed, compute_dtype="bfloat16")
        learner.pretrain(some_rollouts(rng, 4))
        results = [learner.update([[r]]) for r in some_rollouts(rng, 4)]
        times = ("seconds/",)
        metrics = [
            {k: v for k, v in result.metrics.items() if not k.startswith(times)}
            for result in results
        ]
        return everything(learner), metrics

    (first, metrics), (again, metrics_again) = run(0), run(0)
    assert changed(first, again) == set()
    assert metrics == metrics_again
    other, _ = run(1)  # the order of value pretraining depends on the seed
    assert any(name.startswith("critic.") for name in changed(first, other))


def test_state_survives_json_and_the_window_with_it(tiny_model):
    learner = make_learner(tiny_model, grad_clip_quantile=0.5)
    for reward in (1.0, 0.0, 1.0):
        learner.update([[make_rollout(reward=reward)]])
    state = json.loads(json.dumps(learner.state_dict()))
    other = make_learner(tiny_model, grad_clip_quantile=0.5)
    other.load_state_dict(state)
    assert other.num_updates == 3
    assert json.loads(json.dumps(other.state_dict())) == state
    assert len(state["window"]) == len(state["policy"]["norms"]) == 3
    assert len(state["critic"]["norms"]) == 6  # two steps per update


TEMPERATURE = 0.3  # sharp enough that a few tokens are likely


def distribution(learner, *before):
    """Probabilities of the token that follows the prompt and `before`."""
    rollout = make_rollout(tokens=[*before, 0], temperature=TEMPERATURE)
    with torch.no_grad():
        return learner.policy.action_logits(make_batch([[rollout]]))[-1].softmax(-1)


def answer(learner, rng, name, wanted):
    """Two tokens drawn from the current policy; rewarded if the first is the wanted one."""
    tokens, logprobs = [], []
    for _ in range(2):
        chances = distribution(learner, *tokens).double()
        tokens.append(int(rng.choice(512, p=chances / chances.sum())))
        logprobs.append(float(chances[tokens[-1]].log()))
    reward = float(tokens[0] == wanted)
    return make_rollout(
        name, tokens=tokens, logprobs=logprobs, temperature=TEMPERATURE, reward=reward
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_learns(tiny_model, preset):
    """The second likeliest first token is rewarded, and soon it comes nearly every time."""
    learner = make_learner(tiny_model, preset, kl_coef=0.0)
    rng = np.random.default_rng(0)
    wanted = int(distribution(learner).argsort(descending=True)[1])
    assert distribution(learner)[wanted] < 0.2
    for step in range(30 if fill(preset) == 1 else 8):
        rollouts = [answer(learner, rng, f"{step}-{i}", wanted) for i in range(fill(preset))]
        assert learner.update([[rollout] for rollout in rollouts]).applied
    assert distribution(learner)[wanted] > 0.9


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_anchor_holds_the_policy_back(tiny_model, direction):
    """The same rewards, with and without the divergence from the start policy in the loss."""

    def divergence(kl_coef):
        learner = make_learner(tiny_model, kl_coef=kl_coef, kl_direction=direction)
        for _ in range(15):
            rollout = on_policy(learner, make_rollout(tokens=[60, 61], reward=1.0))
            result = learner.update([[rollout]])
        return result.metrics["policy/kl_to_start"]

    loose, tight = divergence(1e-9), divergence(1.0)
    assert tight < loose / 2
