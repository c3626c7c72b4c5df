"""Where each metric stops being well, and who says so."""

import pytest

from dashboard.metrics import GUARDS, METRICS, OURS, Bound, bounds


@pytest.mark.parametrize(
    ("bound", "well", "beyond", "said"),
    [
        (Bound(high=0.25), 0.25, 0.26, "at most 0.25"),
        (Bound(low=0.02), 0.02, 0.01, "at least 0.02"),
        (Bound(low=1, high=2), 1.5, 2.5, "at least 1, at most 2"),
    ],
)
def test_a_bound_holds_up_to_itself(bound, well, beyond, said):
    assert bound.holds(well)
    assert not bound.holds(beyond)
    assert str(bound) == said


def test_a_run_without_guard_rails_is_held_against_our_bounds():
    found = bounds({})
    assert set(found) == set(GUARDS)
    assert {bound.source for bound in found.values()} == {OURS}
    assert all(bound.advice for bound in found.values())


def test_a_runs_own_guard_rails_go_before():
    guards = {"kl_to_start_max": 0.5, "entropy_min": 0.1, "action": "warn"}
    found = bounds({"guards": guards, "learner": {"max_policy_lag": 16}})
    kl, entropy = found["policy/kl_to_start"], found["policy/entropy"]
    assert (kl.low, kl.high, kl.source) == (None, 0.5, "guards.kl_to_start_max")
    assert (entropy.low, entropy.high, entropy.source) == (0.1, None, "guards.entropy_min")
    assert "roll back" in kl.advice
    assert found["policy/masked_fraction"].source == OURS
    assert found["rollout/policy_lag_max"].high == 16


def test_a_guard_rail_that_is_off_leaves_no_bound():
    found = bounds({"guards": {"kl_to_start_max": None}, "learner": {"max_policy_lag": None}})
    assert set(found) == set(GUARDS) - {"policy/kl_to_start"}


def test_what_is_guarded_is_shown():
    assert set(GUARDS) <= set(METRICS)
