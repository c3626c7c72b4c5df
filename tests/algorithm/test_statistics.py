import math

import pytest
import torch

from online_sao.algorithm.statistics import explained_variance, masked_mean, masked_sum

X = torch.tensor([[1.0, 2.0, math.nan], [4.0, math.inf, -math.inf]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_masked_sum_and_mean_by_hand():
    # 1 + 2 + 4 = 7, over three positions
    assert masked_sum(X, MASK).item() == 7.0
    assert masked_mean(X, MASK).item() == pytest.approx(7 / 3, rel=1e-7)


def test_nothing_leaks_from_outside_the_mask_into_the_gradient():
    x = X.clone().requires_grad_()
    masked_sum(x, MASK).backward()
    assert x.grad.tolist() == MASK.float().tolist()
    y = X.clone().requires_grad_()
    masked_mean(y, MASK).backward()
    torch.testing.assert_close(y.grad, MASK.float() / 3)


def test_an_empty_mask_gives_zero():
    nothing = torch.zeros_like(MASK)
    assert masked_sum(X, nothing).item() == 0.0
    assert masked_mean(X, nothing).item() == 0.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # R − V = ±1/4, variance ratio (1/4)² / (1/2)² = 1/4
        ([0.75, 0.25, 0.75, 0.25], 0.75),
        ([1.0, 0.0, 1.0, 0.0], 1.0),  # V = R
        ([0.3, 0.3, 0.3, 0.3], 0.0),  # a constant explains nothing
        ([0.0, 1.0, 0.0, 1.0], -3.0),  # R − V = ±1, variance 4 times that of R
        ([11.0, 10.0, 11.0, 10.0], 1.0),  # a constant offset does not count
    ],
)
def test_explained_variance_by_hand(values, expected):
    rewards = [1.0, 0.0, 1.0, 0.0]
    assert explained_variance(values, rewards) == pytest.approx(expected, abs=1e-12)
    assert explained_variance(torch.tensor(values), torch.tensor(rewards)) == pytest.approx(
        expected, abs=1e-6
    )


@pytest.mark.parametrize(
    "rewards", [[], [1.0], [0.0] * 8, [1.0] * 8, [0.1] * 7], ids=lambda r: f"{len(r)}x{r[:1]}"
)
def test_explained_variance_is_undefined_without_varying_rewards(rewards):
    """Case C17: the critic's first steps on rewards that are all 0 or all 1."""
    values = [0.1 * i for i in range(len(rewards))]
    assert explained_variance(values, rewards) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_explained_variance_of_broken_numbers_is_undefined(bad):
    assert explained_variance([bad, 0.0], [1.0, 0.0]) is None
    assert explained_variance([0.0, 0.0], [bad, 0.0]) is None


def test_explained_variance_refuses_unequal_lengths():
    with pytest.raises(ValueError, match="3 values for 2 rewards"):
        explained_variance([1.0, 2.0, 3.0], [1.0, 0.0])
