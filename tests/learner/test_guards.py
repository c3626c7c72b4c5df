"""Each guard's decision by itself, on numbers written out; then runs made to break."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from learning import make_rollout

from online_sao.config import GuardConfig
from online_sao.learner.guards import (
    GUARDS,
    GuardRails,
    ProbeResult,
    Sample,
    distinct_share,
    make_samples,
    repeated_share,
)
from online_sao.types import Preference

WINDOW = 4
HONEST = {
    "policy/kl_to_start": 0.1,
    "policy/entropy": 0.4,
    "policy/masked_fraction": 0.005,
    "policy/logprob_gap": 0.02,
    "critic/explained_variance": 0.1,
}
"""What runs of the embedded model show (docs/operations.md)."""


def sample(number=1, *, reward=1.0, preference_id=1, metrics=None, **fields):
    return Sample(
        **{
            "version": number,
            "preference_id": preference_id,
            "reward": reward,
            "num_tokens": 40,
            "cut_off": False,
            "repetition": 0.01,
            "prompt": b"p%d" % number,
            "answer": b"a%d" % number,
            "metrics": HONEST | (metrics or {}),
        }
        | fields
    )


def rails(**settings):
    return GuardRails(
        GuardConfig.model_validate({"window": WINDOW, "grace_rollouts": 6} | settings)
    )


def firings(guards, samples):
    return [f.guard.name for s in samples if (f := guards.observe([s])) is not None]


def test_an_honest_run_touches_nothing():
    guards = rails()
    rewards = [0, 1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1]
    assert firings(guards, [sample(n, reward=r) for n, r in enumerate(rewards)]) == []
    assert guards.status()["rollouts_seen"] == WINDOW


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("kl_to_start", {"metrics": {"policy/kl_to_start": 1.1}}),
        ("entropy", {"metrics": {"policy/entropy": 0.01}}),
        ("masked_fraction", {"metrics": {"policy/masked_fraction": 0.3}}),
        ("logprob_gap", {"metrics": {"policy/logprob_gap": 0.4}}),
        ("answer_tokens", {"num_tokens": 1}),
        ("distinct_answers", {"answer": b"the same"}),
        ("repetition", {"repetition": 0.4}),
    ],
)
class TestOneNumber:
    bounds: ClassVar = {"distinct_answers_min": 0.3}  # of four prompts, one answer is 0.25

    def test_fires_once_its_window_is_full(self, name, broken):
        guards = rails(**self.bounds)
        samples = [sample(n, **broken) for n in range(1, WINDOW + 1)]
        for early in samples[:-1]:
            assert guards.observe([early]) is None
        fired = guards.observe(samples[-1:])
        assert fired.guard.name == name
        assert fired.good_version == 0  # all four versions, 1 to 4, were bad
        assert fired.guard.meaning in fired.describe()

    def test_begins_anew_after_it_fired(self, name, broken):
        guards = rails(**self.bounds)
        samples = [sample(n, **broken) for n in range(3 * WINDOW - 1)]
        assert firings(guards, samples) == [name, name]

    def test_can_be_switched_off(self, name, broken):
        (guard,) = (g for g in GUARDS if g.name == name)
        samples = [sample(n, **broken) for n in range(2 * WINDOW)]
        assert firings(rails(**self.bounds | {guard.setting: None}), samples) == []
        assert firings(rails(**self.bounds, action="off"), samples) == []


class TestReward:
    def test_a_fall_from_its_best(self):
        guards = rails()
        good = [sample(n, reward=1.0) for n in range(WINDOW)]
        bad = [sample(n, reward=0.0) for n in range(WINDOW, 2 * WINDOW)]
        assert firings(guards, [*good, *bad[:3]]) == []  # 1/4 of it is left: not less
        assert firings(guards, bad[3:]) == ["reward_drop"]

    def test_what_chance_may_do_is_noise(self):
        """12 rewards: 6 of 12 to 1 of 12 is 0.42, and four standard errors are 0.66."""
        guards = rails(window=12)
        lucky = [sample(n, reward=float(n % 2)) for n in range(12)]
        unlucky = [sample(n, reward=float(n == 12)) for n in range(12, 24)]
        assert firings(guards, [*lucky, *unlucky]) == []
        assert guards.values()["reward_drop"] is None

    def test_a_low_level_is_noise(self):
        guards = rails()
        low = [sample(n, reward=float(n == 0)) for n in range(WINDOW)]
        none = [sample(n, reward=0.0) for n in range(WINDOW, 4 * WINDOW)]
        assert firings(guards, [*low, *none]) == []

    def test_a_preference_switch_is_expected_to_cost_reward(self):
        guards = rails()
        before = [sample(n, reward=1.0) for n in range(2 * WINDOW)]
        after = [sample(n, reward=0.0, preference_id=2) for n in range(100, 100 + 4 * WINDOW)]
        assert firings(guards, [*before, *after]) == []

    def test_stragglers_of_the_old_preference_do_not_count(self):
        guards = rails()
        new = [sample(n, reward=1.0, preference_id=2) for n in range(8)]
        assert firings(guards, [sample(0, preference_id=1), *new]) == []
        old = [sample(n, reward=0.0, preference_id=1) for n in range(20, 30)]
        assert firings(guards, old) == []

    def test_a_fall_within_the_grace_does_not_count(self):
        guards = rails(grace_rollouts=2 * WINDOW + 2)
        samples = [
            sample(0, preference_id=1),
            *(sample(n, reward=1.0, preference_id=2) for n in range(1, WINDOW + 2)),
            *(sample(n, reward=0.0, preference_id=2) for n in range(WINDOW + 2, 4 * WINDOW)),
        ]
        assert firings(guards, samples) == []

    def test_a_fall_after_the_grace_counts_again(self):
        guards = rails(grace_rollouts=6)
        samples = [
            sample(0, preference_id=1),
            *(sample(n, reward=1.0, preference_id=2) for n in range(1, 7)),
            *(sample(n, reward=0.0, preference_id=2) for n in range(7, 11)),
        ]
        assert firings(guards, samples[:-1]) == []
        assert firings(guards, samples[-1:]) == ["reward_drop"]

    def test_the_critic_is_judged_only_where_rewards_vary(self):
        bad = {"critic/explained_variance": -5.0}
        same = [sample(n, reward=1.0, metrics=bad) for n in range(8)]
        assert firings(rails(), same) == []
        mixed = [sample(n, reward=float(n % 2), metrics=bad) for n in range(WINDOW)]
        assert firings(rails(), mixed) == ["explained_variance"]


class TestProbes:
    def test_held_out_quality_is_compared_with_the_first_round(self):
        guards = rails(probe_rounds=2)
        assert guards.observe_probe(ProbeResult(0, 8, quality=1.0, reward=0.3)) is None
        assert guards.observe_probe(ProbeResult(100, 8, quality=0.75, reward=0.9)) is None
        assert guards.status()["values"]["probe_quality_drop"] == pytest.approx(0.125)
        # (0.75 + 0.125) / 2 = 0.4375, 0.5625 below the first: the reward may say what it likes
        fired = guards.observe_probe(ProbeResult(200, 8, quality=0.125, reward=1.0))
        assert (fired.guard.name, fired.good_version) == ("probe_quality_drop", 100)

    def test_a_round_without_marks_is_no_quality_of_zero(self):
        guards = rails(probe_rounds=1)
        guards.observe_probe(ProbeResult(0, 8, quality=1.0, reward=1.0))
        assert guards.observe_probe(ProbeResult(100, 0, quality=None, reward=None)) is None

    def test_few_marks_of_a_round_are_no_round(self):
        guards = rails(probe_rounds=1, probe_prompts=8)
        guards.observe_probe(ProbeResult(0, 3, quality=1.0, reward=1.0))  # a judge at its limit
        assert guards.reference is None
        guards.observe_probe(ProbeResult(100, 4, quality=0.5, reward=0.5))
        assert guards.reference.version == 100
        assert guards.observe_probe(ProbeResult(200, 3, quality=0.0, reward=0.0)) is None

    def test_a_judge_that_rewards_worthless_answers(self):
        guards = rails()
        good = ProbeResult(0, 8, quality=1.0, reward=1.0, forgeries_rewarded=0.0)
        assert guards.observe_probe(good) is None
        fired = guards.observe_probe(replace(good, version=100, forgeries_rewarded=1.0))
        assert (fired.guard.name, fired.good_version) == ("forgeries", 0)
        assert not fired.guard.rollback_helps


def test_repeated_share():
    def share(*ids):
        return repeated_share(np.array(ids, np.int32))

    assert share(1, 2, 3, 4, 5) == 0
    assert share(7, 7, 7, 7, 7) == pytest.approx(2 / 3)  # three runs, one of them new
    assert share(1, 2, 1, 2, 1, 2) == pytest.approx(2 / 4)  # 121 212 121 212
    assert share(1, 2) == share() == 0


def test_distinct_share_asks_for_different_prompts():
    same_prompt = [sample(n, prompt=b"p", answer=b"a") for n in range(5)]
    assert distinct_share(same_prompt) is None
    assert distinct_share([sample(n, answer=b"a") for n in range(5)]) == pytest.approx(0.2)


class TestFewOfTheWindow:
    """What only some answers have is judged where half of the window has it."""

    def test_one_answer_that_ended_does_not_speak_for_all_that_were_cut_off(self):
        guards = rails()
        cut_off = [sample(n, num_tokens=6, cut_off=True) for n in range(3 * WINDOW)]
        cut_off[WINDOW] = sample(WINDOW, num_tokens=1)
        assert firings(guards, cut_off) == []
        assert guards.values()["answer_tokens"] is None

    def test_half_of_the_window_does(self):
        cut_off = [sample(n, num_tokens=6, cut_off=True) for n in range(WINDOW // 2)]
        ended = [sample(n, num_tokens=1) for n in range(WINDOW // 2)]
        assert firings(rails(), cut_off + ended) == ["answer_tokens"]

    def test_short_answers_may_be_the_same(self):
        guards = rails(distinct_answers_min=1.0)
        short = [sample(n, answer=b"yes", num_tokens=2) for n in range(WINDOW)]
        assert firings(guards, short) == []
        long = [sample(n, answer=b"a long one") for n in range(WINDOW // 2)]
        assert firings(guards, long[:-1]) == []
        assert firings(guards, long[-1:]) == ["distinct_answers"]


def test_samples_are_made_from_what_was_trained_on():
    rollout = make_rollout(
        tokens=[5, 5, 5, 5], reward=0.5, preference=Preference("cute", ("cute",), event_id=7)
    )
    (made,) = make_samples(3, [rollout], HONEST)
    assert (made.version, made.preference_id, made.reward) == (3, 7, 0.5)
    assert (made.num_tokens, made.cut_off, made.repetition) == (4, False, 0.5)


def test_every_guard_has_its_bound_and_its_value():
    guards = rails()
    settings = GuardConfig.model_fields
    assert [guard.name for guard in GUARDS] == list(guards.values())
    for guard in GUARDS:
        assert guard.setting in settings
        assert guard.setting.endswith("_max" if guard.is_upper else "_min")
