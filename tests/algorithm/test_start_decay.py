"""The share of the way back to the start weights."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from online_sao.algorithm.start_decay import StartDecay

advantages = st.lists(st.floats(-2, 2), min_size=1, max_size=40)


def after(decay, *seen):
    for advantage in seen:
        decay.observe(advantage)
    return decay


def test_by_hand():
    decay = StartDecay(0.4, 0.5)
    # s = 0.5 * 1; 0.5 * 0.5 + 0.5 * 1; 0.5 * 0.75 + 0.5 * 0; 0.5 * 0.375 - 0.5 * 1
    for advantage, share in ((-1.0, 0.2), (-1.0, 0.3), (0.0, 0.15), (1.0, 0.0)):
        assert decay.share(advantage) == pytest.approx(share)
        decay.observe(advantage)
    assert decay.state_dict() == {"shortfall": pytest.approx(-0.3125)}
    # what was earned beyond what was expected has to be lost first: -0.15625 + 0.5
    assert decay.share(-1.0) == pytest.approx(0.4 * 0.34375)


def test_what_is_asked_is_not_remembered():
    decay = StartDecay(1.0, 0.1)
    assert [decay.share(-1.0) for _ in range(3)] == [pytest.approx(0.1)] * 3
    assert decay.state_dict() == {"shortfall": 0.0}


def test_never_beyond_the_start():
    assert StartDecay(5.0, 1.0).share(-1.0) == 1.0


def test_noise_averages_out_and_a_fall_does_not():
    """Rewards 0 and 1 in turns of which 0.5 was expected; then 0.9 was, and nothing comes."""
    decay = after(StartDecay(1.0, 0.1), *[0.5, -0.5] * 50)
    assert decay.share(-0.5) < 0.08  # a single answer: 0.5
    assert after(decay, *[-0.9] * 10).share(-0.9) > 0.6


@given(advantages, st.floats(0, 3), st.floats(0.01, 1))
def test_it_is_the_weighted_sum(seen, coef, rate):
    total = sum(rate * (1 - rate) ** age * -a for age, a in enumerate(reversed(seen)))
    share = after(StartDecay(coef, rate), *seen[:-1]).share(seen[-1])
    assert share == pytest.approx(min(1.0, coef * max(0.0, total)), abs=1e-9)
    assert 0 <= share <= 1


@given(advantages)
def test_it_goes_on_from_its_state(seen):
    decay, other = after(StartDecay(0.4, 0.1), *seen), StartDecay(0.4, 0.1)
    other.load_state_dict(decay.state_dict())
    assert other.share(-1.0) == decay.share(-1.0)
