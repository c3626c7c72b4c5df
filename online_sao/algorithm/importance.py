"""Importance ratio, the trust region in which it is trusted, and what it says about drift.

Notation: d_t = log π_θ(a_t|s_t) − log π_rollout(a_t|s_t), in nats, and r_t = exp(d_t)
(equation 2). π_rollout is what the engine recorded when it sampled: `behavior_logprobs`.
Both must be taken at the temperature of the request.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp of this is 4.9e8: far outside every trust region, and its square fits float32."""


def log_importance_ratio(
    policy_logprobs: Tensor, behavior_logprobs: Tensor, action_mask: Tensor
) -> Tensor:
    """d_t = log π_θ(a_t|s_t) − log π_rollout(a_t|s_t), and 0 outside the mask (equation 2).

    All arguments [B, T]; returns float32 [B, T]. Inside the mask nothing is repaired: a NaN
    stays one, so that the caller's finite check can see it. Differentiable.
    """
    log_ratio = policy_logprobs.float() - behavior_logprobs.float()
    return log_ratio.masked_fill(~action_mask, 0.0)


def importance_ratio(log_ratio: Tensor, max_log_ratio: float = MAX_LOG_RATIO) -> Tensor:
    """r_t = exp(min(d_t, max_log_ratio)): never overflows. NaN stays NaN.

    float32 exp overflows above 88, and infinity times a zero from a mask is NaN.
    """
    return log_ratio.clamp(max=max_log_ratio).exp()


def trust_region_mask(
    log_ratio: Tensor, action_mask: Tensor, eps_low: float, eps_high: float
) -> Tensor:
    """True where 1 − eps_low < r_t < 1 + eps_high, strictly (equation 3), inside the mask.

    Compared as log(1 − eps_low) < d_t < log(1 + eps_high), so no exp is needed; a ratio that
    is NaN, 0 or infinite is outside. eps_low = 1 leaves the lower side open.
    Raises ValueError unless 0 <= eps_low <= 1 and eps_high >= 0.
    """
    if not (0 <= eps_low <= 1 and eps_high >= 0):
        raise ValueError(
            f"need 0 <= eps_low <= 1 and eps_high >= 0, not eps_low={eps_low}, eps_high={eps_high}"
        )
    lower = -math.inf if eps_low == 1 else math.log1p(-eps_low)
    upper = math.log1p(eps_high)
    return action_mask & (log_ratio > lower) & (log_ratio < upper)


def k3_kl(log_ratio: Tensor, action_mask: Tensor) -> Tensor:
    """Mean over the mask of exp(d) − 1 − d: an estimate of KL(behavior ‖ policy) per token.

    Never negative, and unbiased for tokens drawn from the behavior policy. Scalar float32,
    0 for an empty mask. d is bounded as in `importance_ratio`.
    """
    d = log_ratio.detach().double()[action_mask].clamp(max=MAX_LOG_RATIO)
    # For |d| < 1e-8 the rounding of expm1 is larger than the result, and may have either sign.
    per_token = (d.expm1() - d).clamp(min=0)
    return (per_token.sum() / max(d.numel(), 1)).float()


def effective_sample_size(log_ratio: Tensor, action_mask: Tensor) -> Tensor:
    """(Σ r)² / Σ r² over the mask, in tokens: from 1 (one token outweighs all) to their number.

    Scalar float32, 0 for an empty mask.
    """
    d = log_ratio.detach().double()[action_mask]
    if d.numel() == 0:
        return torch.zeros((), device=log_ratio.device)
    # The quotient does not change when all r are scaled, so softmax may stand for r: no
    # overflow. The bounds turn -inf and inf into numbers.
    weights = d.clamp(-1e6, 1e6).softmax(0)
    return (1 / (weights**2).sum()).float()
