import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from online_sao.algorithm.importance import (
    effective_sample_size,
    importance_ratio,
    k3_kl,
    log_importance_ratio,
    trust_region_mask,
)

INF, NAN = math.inf, math.nan


def row(*numbers):
    return torch.tensor([numbers], dtype=torch.float32)


def every(log_ratio):
    return torch.ones_like(log_ratio, dtype=torch.bool)


# log-ratio and ratio


def test_ratio_by_hand():
    # 0.5 / 0.25 = 2,  0.1 / 0.2 = 0.5
    log_ratio = log_importance_ratio(
        row(0.5, 0.1).log(), row(0.25, 0.2).log(), torch.ones(1, 2, dtype=torch.bool)
    )
    torch.testing.assert_close(log_ratio, row(math.log(2), -math.log(2)))
    torch.testing.assert_close(importance_ratio(log_ratio), row(2.0, 0.5))


def test_log_ratio_is_float32_and_subtracts_in_float32():
    # In bfloat16 4.0 − 1/256 would be rounded back to 4.0
    policy = torch.tensor([[-4.0]], dtype=torch.bfloat16)
    behavior = torch.tensor([[-1 / 256]], dtype=torch.bfloat16)
    log_ratio = log_importance_ratio(policy, behavior, torch.tensor([[True]]))
    assert log_ratio.dtype == torch.float32
    assert log_ratio.item() == -4.0 + 1 / 256


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
def test_outside_the_mask_the_log_ratio_is_zero_and_has_no_gradient(junk):
    mask = torch.tensor([[True, False, False]])
    policy = row(-1.0, junk, -1.0).requires_grad_()
    behavior = row(-2.0, -1.0, junk).requires_grad_()
    log_ratio = log_importance_ratio(policy, behavior, mask)
    assert log_ratio.tolist() == [[1.0, 0.0, 0.0]]
    log_ratio.sum().backward()
    assert policy.grad.tolist() == [[1.0, 0.0, 0.0]]
    assert behavior.grad.tolist() == [[-1.0, 0.0, 0.0]]


def test_inside_the_mask_nothing_is_repaired():
    log_ratio = log_importance_ratio(
        row(NAN, -INF, -1.0, -INF),
        row(-1.0, -1.0, -INF, -INF),
        torch.ones(1, 4, dtype=torch.bool),
    )
    assert log_ratio[0, 0].isnan()
    assert log_ratio[0, 1] == -INF
    assert log_ratio[0, 2] == INF
    assert log_ratio[0, 3].isnan()


def test_the_ratio_never_overflows():
    d = row(0.0, 100.0, 1e4, INF, -100.0, -INF).requires_grad_()
    ratio = importance_ratio(d)
    cap = math.exp(20.0)
    torch.testing.assert_close(ratio, row(1.0, cap, cap, cap, math.exp(-100.0), 0.0))
    ratio.sum().backward()
    torch.testing.assert_close(d.grad, row(1.0, 0.0, 0.0, 0.0, math.exp(-100.0), 0.0))
    assert importance_ratio(row(3.0), max_log_ratio=2.0).item() == pytest.approx(math.exp(2.0))
    assert importance_ratio(row(NAN)).isnan().all()


# trust region


@pytest.mark.parametrize(("eps_low", "eps_high"), [(0.3, 5.0), (0.8, 3.0), (0.2, 0.28)])
def test_the_bounds_are_strict(eps_low, eps_high):
    low = np.float32(math.log1p(-eps_low))
    high = np.float32(math.log1p(eps_high))
    at_and_inside = [
        low,
        np.nextafter(low, np.float32(0)),
        np.nextafter(high, np.float32(0)),
        high,
    ]
    log_ratio = torch.tensor(np.array([at_and_inside]))
    mask = trust_region_mask(log_ratio, every(log_ratio), eps_low, eps_high)
    assert mask.tolist() == [[False, True, True, False]]


def test_the_bounds_are_those_of_the_paper():
    # Math preset: the interval is (0.7, 6.0). Coding preset: (0.2, 4.0).
    log_ratio = row(0.19, 0.21, 0.69, 0.71, 1.0, 3.99, 4.01, 5.99, 6.01).log()
    math_mask = trust_region_mask(log_ratio, every(log_ratio), 0.3, 5.0)
    assert math_mask.int().tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 0]]
    coding_mask = trust_region_mask(log_ratio, every(log_ratio), 0.8, 3.0)
    assert coding_mask.int().tolist() == [[0, 1, 1, 1, 1, 1, 0, 0, 0]]


def test_extreme_and_broken_log_ratios_are_outside():
    log_ratio = row(100.0, -100.0, 1e4, -1e4, INF, -INF, NAN)
    assert not trust_region_mask(log_ratio, every(log_ratio), 0.3, 5.0).any()


def test_eps_low_of_one_leaves_the_lower_side_open():
    log_ratio = row(-100.0, -1e4, 0.0, -INF, NAN)
    mask = trust_region_mask(log_ratio, every(log_ratio), 1.0, 5.0)
    assert mask.tolist() == [[True, True, True, False, False]]


def test_tokens_outside_the_action_mask_are_outside():
    log_ratio = row(0.0, 0.0, NAN)
    mask = trust_region_mask(log_ratio, torch.tensor([[True, False, False]]), 0.3, 5.0)
    assert mask.tolist() == [[True, False, False]]


@pytest.mark.parametrize(("eps_low", "eps_high"), [(-0.1, 5.0), (1.1, 5.0), (0.3, -1.0)])
def test_bounds_without_meaning_are_refused(eps_low, eps_high):
    with pytest.raises(ValueError, match="eps_low"):
        trust_region_mask(row(0.0), torch.tensor([[True]]), eps_low, eps_high)


@given(
    st.lists(st.floats(0.01, 20.0), min_size=1, max_size=8),
    st.floats(0.0, 0.99),
    st.floats(0.0, 10.0),
)
def test_trust_region_agrees_with_equation_3_on_ratios(ratios, eps_low, eps_high):
    lower, upper = 1 - eps_low, 1 + eps_high
    # At a bound float32 rounding decides; strictness there has its own test.
    ratios = [r for r in ratios if min(abs(r / lower - 1), abs(r / upper - 1)) > 1e-5]
    log_ratio = torch.tensor([ratios], dtype=torch.float64).log().float().reshape(1, -1)
    mask = trust_region_mask(log_ratio, every(log_ratio), eps_low, eps_high)
    assert mask[0].tolist() == [lower < r < upper for r in ratios]


# what the ratios say about drift


def test_k3_by_hand():
    # d = ln 2: 2 − 1 − ln 2 = 0.306853; d = 0: 0; d = −ln 2: 0.5 − 1 + ln 2 = 0.193147
    log_ratio = row(math.log(2), 0.0, -math.log(2), NAN)
    mask = torch.tensor([[True, True, True, False]])
    assert k3_kl(log_ratio, mask).item() == pytest.approx((0.306853 + 0.193147) / 3, rel=1e-5)


def test_k3_has_the_divergence_as_its_expectation():
    # Tokens of a vocabulary of three, in proportion to behavior = (4/8, 3/8, 1/8), so that the
    # mean over tokens is the exact expectation under the behavior policy.
    behavior = torch.tensor([4 / 8, 3 / 8, 1 / 8], dtype=torch.float64)
    policy = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    kl = (behavior * (behavior / policy).log()).sum()
    log_ratio = (policy / behavior).log()[[0, 0, 0, 0, 1, 1, 1, 2]].float()[None]
    assert k3_kl(log_ratio, every(log_ratio)).item() == pytest.approx(kl.item(), rel=1e-6)


@pytest.mark.parametrize("d", [1e-10, -1e-10, 3e-9, 1e-4, -30.0, 100.0, 1e4, -1e4, 1e12, INF])
def test_k3_is_finite_and_never_negative(d):
    log_ratio = row(d)
    assert 0 <= k3_kl(log_ratio, every(log_ratio)).item() < INF


def test_k3_shows_a_nan_and_is_zero_on_an_empty_mask():
    assert k3_kl(row(NAN), torch.tensor([[True]])).isnan()
    assert k3_kl(row(NAN), torch.tensor([[False]])).item() == 0.0


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.0, 1.0, 1.0], 3.0),
        ([1.0, 1.0, 2.0], 16 / 6),  # (1 + 1 + 2)² / (1 + 1 + 4)
        ([3.0, 3.0, 6.0], 16 / 6),  # scaling all changes nothing
        ([1e-12, 1e-12, 1.0], 1.0),
        ([5.0], 1.0),
    ],
)
def test_effective_sample_size_by_hand(ratios, expected):
    log_ratio = row(*ratios, NAN).log()
    mask = every(log_ratio)
    mask[0, -1] = False
    assert effective_sample_size(log_ratio, mask).item() == pytest.approx(expected, rel=1e-5)


def test_effective_sample_size_at_the_extremes():
    for d, expected in [
        ([-1e4, -1e4], 2.0),
        ([100.0, 0.0], 1.0),
        ([1e4, 1e4], 2.0),
        ([INF, 0.0], 1.0),
        ([-INF, -INF], 2.0),
    ]:
        log_ratio = row(*d)
        assert effective_sample_size(log_ratio, every(log_ratio)).item() == pytest.approx(expected)
    assert effective_sample_size(row(NAN), torch.tensor([[False]])).item() == 0.0
