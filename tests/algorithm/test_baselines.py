import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from online_sao.algorithm.baselines import (
    PerPromptRunningMean,
    RunningMean,
    SPOTracker,
    WindowedScale,
)


def restored(state):
    """A state as it comes back from a checkpoint's JSON."""
    return json.loads(json.dumps(state))


# running means


def test_running_mean_by_hand():
    mean = RunningMean(3)
    assert mean.baseline() is None
    seen = []
    for reward in (1.0, 0.0, 1.0, 1.0, 0.0):
        mean.observe(reward)
        seen.append(mean.baseline())
    # 1; (1+0)/2; (1+0+1)/3; then the first drops out: (0+1+1)/3; (1+1+0)/3
    assert seen == pytest.approx([1, 1 / 2, 2 / 3, 2 / 3, 2 / 3])
    mean.observe(0.0)
    assert mean.baseline() == pytest.approx(1 / 3)  # (1+0+0)/3


@given(st.lists(st.floats(0, 1), max_size=20), st.integers(1, 6))
def test_running_mean_is_the_mean_of_the_last_rewards(rewards, window):
    mean = RunningMean(window)
    for i, reward in enumerate(rewards):
        before = rewards[max(0, i - window) : i]
        assert mean.baseline() == (pytest.approx(sum(before) / len(before)) if before else None)
        mean.observe(reward)


def test_per_prompt_means_are_apart():
    means = PerPromptRunningMean(2)
    assert means.baseline("a") is None
    for key, reward in (("a", 1.0), ("b", 0.0), ("a", 0.0), ("a", 0.5)):
        means.observe(key, reward)
    assert means.baseline("a") == 0.25  # (0 + 0.5)/2; the first reward has dropped out
    assert means.baseline("b") == 0.0  # a mean of 0 is not "no mean"
    assert means.baseline("c") is None


def test_the_prompt_observed_longest_ago_is_forgotten():
    means = PerPromptRunningMean(8, max_prompts=2)
    tracker = SPOTracker(0.5, 0.9, 1.0, max_prompts=2)
    for key in ("a", "b", "a", "c"):
        means.observe(key, 1.0)
        tracker.observe(key, 1.0, 0.0)
    for memory in (means, tracker):
        assert memory.baseline("b") is None
        assert memory.baseline("a") == memory.baseline("c") == 1.0
    for i in range(100):
        means.observe(str(i), 0.0)
    assert len(means.state_dict()["rewards"]) == 2


# SPO


def test_spo_tracker_by_hand():
    # ρ in [0.5, 0.9], half life 0.1. N₀ = 1/(1 − 0.5) = 2.
    tracker = SPOTracker(0.5, 0.9, 0.1)
    assert tracker.baseline("p") is None
    # first reward 1: a = 2, b = 0
    tracker.observe("p", 1.0, 123.0)
    assert tracker.baseline("p") == 1.0
    # KL 0.05: ρ = 2^−0.5 = 0.70711. a = 1.41421, b = 1; v = 0.585786
    tracker.observe("p", 0.0, 0.05)
    assert tracker.baseline("p") == pytest.approx(math.sqrt(2) / (math.sqrt(2) + 1))
    # KL 0: ρ = 1, clamped to 0.9. a = 0.9·1.41421 + 1 = 2.27279, b = 0.9; v = 0.716336
    tracker.observe("p", 1.0, 0.0)
    assert tracker.baseline("p") == pytest.approx(2.2727922 / 3.1727922)
    # KL 1: ρ = 2^−10, clamped to 0.5. a = 1.13640, b = 0.45 + 1; v = 0.439371
    tracker.observe("p", 0.0, 1.0)
    assert tracker.baseline("p") == pytest.approx(1.1363961 / 2.5863961)
    tracker.observe("p", 0.25, math.inf)
    # a = 0.5·1.13640 + 0.25 = 0.818198, b = 0.5·1.45 + 0.75 = 1.475
    assert tracker.baseline("p") == pytest.approx(0.8181981 / 2.2931981)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 2)), min_size=1, max_size=20),
)
def test_spo_baseline_stays_between_the_rewards_seen(visits):
    tracker = SPOTracker(0.875, 0.96, 0.06)
    for reward, kl in visits:
        tracker.observe("p", reward, kl)
    rewards = [reward for reward, _ in visits]
    assert min(rewards) - 1e-9 <= tracker.baseline("p") <= max(rewards) + 1e-9


def test_spo_forgets_faster_when_the_policy_has_moved():
    near, far = (SPOTracker(0.5, 0.96, 0.06) for _ in range(2))
    for tracker, kl in ((near, 0.001), (far, 0.05)):
        for reward in (1.0, 1.0, 0.0):
            tracker.observe("p", reward, kl)
    assert far.baseline("p") < near.baseline("p")


@pytest.mark.parametrize(
    ("reward", "kl"), [(-0.1, 0.0), (1.1, 0.0), (math.nan, 0.0), (0.5, -1.0), (0.5, math.nan)]
)
def test_spo_refuses_numbers_without_meaning(reward, kl):
    tracker = SPOTracker(0.5, 0.9, 0.1)
    tracker.observe("p", 1.0, 0.0)
    with pytest.raises(ValueError, match=r"SPO needs rewards|kl must"):
        tracker.observe("p", reward, kl)
    assert tracker.baseline("p") == 1.0


# spread


def test_scale_by_hand():
    scale = WindowedScale(8)
    for x in (1.0, -1.0) * 3 + (1.0,):
        scale.observe(x)
        assert scale.scale() == 1.0  # seven samples are too few
    scale.observe(-1.0)
    assert scale.scale() == 1.0  # and now it is the standard deviation of ±1
    for x in (3.0, -3.0) * 4:
        scale.observe(x)
    assert scale.scale() == pytest.approx(3.0)  # the ±1 have left the window
    for x in (2.0, 0.0, 0.0, 0.0) * 2:
        scale.observe(x)
    # mean 1/2, deviations 3/2 and −1/2: √((2·9/4 + 6·1/4)/8) = √(6/8)
    assert scale.scale() == pytest.approx(math.sqrt(0.75))


@pytest.mark.parametrize("x", [0.0, 1.0, 0.1])
def test_without_spread_the_scale_is_one(x):
    scale = WindowedScale(128)
    for _ in range(20):
        scale.observe(x)
    assert scale.scale() == 1.0


def test_a_small_spread_does_not_make_the_next_advantage_explode():
    scale = WindowedScale(128)
    for i in range(64):
        scale.observe(1e-6 * (-1) ** i)
    assert scale.scale() == WindowedScale.MIN_SCALE


# all of them


def filled(kind):
    memory = kind()
    for i in range(30):
        reward = (i % 3) / 2
        match memory:
            case PerPromptRunningMean():
                memory.observe(f"p{i % 4}", reward)
            case SPOTracker():
                memory.observe(f"p{i % 4}", reward, 0.01 * i)
            case _:
                memory.observe(reward)
    return memory


def says(memory):
    if isinstance(memory, WindowedScale):
        return memory.scale()
    if isinstance(memory, RunningMean):
        return memory.baseline()
    return [memory.baseline(f"p{i}") for i in range(6)]


KINDS = {
    "running_mean": lambda: RunningMean(16),
    "per_prompt": lambda: PerPromptRunningMean(8, max_prompts=3),
    "spo": lambda: SPOTracker(0.875, 0.96, 0.06, max_prompts=3),
    "scale": lambda: WindowedScale(16),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_state_survives_a_checkpoint_and_goes_on_alike(kind):
    original = filled(kind)
    copy = kind()
    assert says(copy) != says(original)
    copy.load_state_dict(restored(original.state_dict()))
    assert copy.state_dict() == original.state_dict()
    for memory in (original, copy):  # the bounds hold after loading, and eviction goes on
        for _ in range(3):
            if isinstance(memory, SPOTracker):
                memory.observe("p5", 0.25, 0.1)
            elif isinstance(memory, PerPromptRunningMean):
                memory.observe("p5", 0.25)
            else:
                memory.observe(0.25)
    assert says(copy) == says(original)
    assert copy.state_dict() == original.state_dict()


def test_a_state_is_a_copy():
    mean = RunningMean(4)
    mean.observe(1.0)
    state = mean.state_dict()
    mean.observe(0.0)
    assert state == {"rewards": [1.0]}


def test_a_smaller_memory_keeps_the_newest():
    mean = RunningMean(4)
    for reward in (0.0, 0.0, 1.0, 1.0):
        mean.observe(reward)
    smaller = RunningMean(2)
    smaller.load_state_dict(restored(mean.state_dict()))
    assert smaller.baseline() == 1.0
    tracker = SPOTracker(0.5, 0.9, 0.1)
    means = PerPromptRunningMean(4)
    for key in "abc":
        tracker.observe(key, 1.0, 0.0)
        means.observe(key, 1.0)
    fewer = SPOTracker(0.5, 0.9, 0.1, max_prompts=2)
    fewer.load_state_dict(restored(tracker.state_dict()))
    fewer_means = PerPromptRunningMean(4, max_prompts=2)
    fewer_means.load_state_dict(restored(means.state_dict()))
    for memory in (fewer, fewer_means):
        assert [memory.baseline(key) for key in "abc"] == [None, 1.0, 1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_before_it_spreads(bad):
    for memory in (RunningMean(4), WindowedScale(4)):
        with pytest.raises(ValueError, match="must be finite"):
            memory.observe(bad)
    with pytest.raises(ValueError, match="must be finite"):
        PerPromptRunningMean(4).observe("p", bad)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RunningMean(0),
        lambda: PerPromptRunningMean(0),
        lambda: PerPromptRunningMean(8, max_prompts=0),
        lambda: WindowedScale(0),
        lambda: SPOTracker(0.9, 0.5, 0.1),
        lambda: SPOTracker(0.0, 0.5, 0.1),
        lambda: SPOTracker(0.5, 1.0, 0.1),
        lambda: SPOTracker(0.5, 0.9, 0.0),
        lambda: SPOTracker(0.5, 0.9, 0.1, max_prompts=0),
    ],
)
def test_settings_without_meaning_are_refused(make):
    with pytest.raises(ValueError, match=r"at least 1|rho_min|kl_half_life"):
        make()
