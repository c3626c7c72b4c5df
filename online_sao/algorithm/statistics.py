"""Masked sums and means, and how much of the rewards' spread the critic explains."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of `x` where `mask` is True; both of one shape. Returns a scalar tensor.

    What stands outside the mask is replaced before it is added, because 0 * NaN is NaN, in
    the value and in the gradient alike.
    """
    return x.masked_fill(~mask, 0.0).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` over the positions where `mask` is True; 0 if there are none."""
    return masked_sum(x, mask) / mask.sum().clamp(min=1)


def explained_variance(
    values: Tensor | Sequence[float], rewards: Tensor | Sequence[float]
) -> float | None:
    """EV = 1 − Var(R − V) / Var(R), one value and one reward per rollout (paper, figure 4).

    1: the critic is right each time; 0: no better than a constant; negative: worse than one.
    Take it over a window of rollouts, with V from before the critic saw their rewards.
    Returns None where the quotient has no meaning: fewer than two rollouts, rewards that
    do not vary, or a number that is not finite.
    Raises ValueError if the lengths differ.
    """
    v = torch.as_tensor(values, dtype=torch.float64).flatten()
    r = torch.as_tensor(rewards, dtype=torch.float64).flatten()
    if v.numel() != r.numel():
        raise ValueError(f"{v.numel()} values for {r.numel()} rewards")
    # Compared, not subtracted: the computed variance of equal rewards may differ from 0.
    if r.numel() < 2 or bool((r == r[0]).all()):
        return None
    share = float(1 - (r - v).var() / r.var())
    return share if math.isfinite(share) else None
