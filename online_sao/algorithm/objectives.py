"""Losses. Each returns a scalar to be minimised and its metrics, detached.

The caller adds them up:
    policy_loss + kl_coef · Σ kl_to_reference / N − entropy_coef · entropy / N
    (or kl_from_reference, the anchor that holds on to what the policy has stopped doing)
with N the action tokens of the whole update. Pass that N as `normalizer` when an update is
computed in parts, so that the parts' gradients add up to the gradient of the whole.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from online_sao.algorithm.importance import (
    effective_sample_size,
    importance_ratio,
    k3_kl,
    log_importance_ratio,
    trust_region_mask,
)
from online_sao.algorithm.statistics import masked_mean, masked_sum

Objective = Literal["dis", "ppo_clip", "tis", "icepop", "none"]
Metrics = dict[str, Tensor]


def policy_loss(
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    objective: Objective,
    eps_low: float,
    eps_high: float,
    tis_cap: float = 2.0,
    icepop_low: float = 0.5,
    icepop_high: float = 5.0,
    normalizer: float | None = None,
) -> tuple[Tensor, Metrics]:
    """L = −(1/N) Σ_t sg(w(r_t)·A_t)·log π_θ(a_t|s_t)   (equation 1, with w as named below)

    dis        w = r inside (1 − eps_low, 1 + eps_high), else 0 (equation 3)
    none       w = r
    tis        w = min(r, tis_cap)
    icepop     w = r inside [icepop_low, icepop_high], else 0; the old policy of the original
               is the detached current one, whose clip term has the gradient of log π
    ppo_clip   no w: −(1/N) Σ min(r·A, clamp(r, 1 − eps_low, 1 + eps_high)·A), and here alone
               the gradient flows through r

    sg is the stop-gradient: without it the gradient would be f·A·(1 + log π)·∇log π, whose
    sign depends on how likely the token was (DESIGN: equation 1 leaves this open).
    Arguments [B, T]. N = the action tokens, masked ones included, so that masking shrinks a
    step and never amplifies the rest; or `normalizer`.

    r is bounded by exp(20). A token whose log-ratio or advantage is not finite takes no part
    under any objective, and is counted in policy/non_finite_tokens: the caller decides.
    Metrics (0-d tensors) are over action tokens; see docs/algorithm.md.
    Raises ValueError for an unknown objective or bounds without meaning.
    """
    log_ratio = log_importance_ratio(policy_logprobs, behavior_logprobs, action_mask)
    usable = action_mask & log_ratio.isfinite() & advantages.isfinite()
    log_ratio = log_ratio.masked_fill(~usable, 0.0)
    advantages = advantages.detach().float().masked_fill(~usable, 0.0)
    ratio = importance_ratio(log_ratio)
    if objective == "ppo_clip":
        clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
        gains = torch.minimum(ratio * advantages, clipped * advantages)
        altered = clipped * advantages < ratio * advantages
    else:
        bounds = (eps_low, eps_high, tis_cap, icepop_low, icepop_high)
        weights, altered = _ratio_weights(objective, log_ratio.detach(), usable, bounds)
        gains = weights * advantages * policy_logprobs.float().masked_fill(~usable, 0.0)
    num_tokens = action_mask.sum().clamp(min=1)
    loss = -masked_sum(gains, usable) / (num_tokens if normalizer is None else normalizer)
    metrics = {
        "policy/loss": loss.detach(),
        "policy/masked_fraction": (altered | ~usable)[action_mask].sum() / num_tokens,
        "policy/non_finite_tokens": (action_mask & ~usable).sum(),
        **_drift_metrics(log_ratio.detach(), ratio.detach(), usable),
    }
    return loss, metrics


def _ratio_weights(
    objective: str,
    log_ratio: Tensor,
    usable: Tensor,
    bounds: tuple[float, float, float, float, float],
) -> tuple[Tensor, Tensor]:
    """w(r_t) of `policy_loss`, a constant, and the tokens on which it is not r_t."""
    eps_low, eps_high, tis_cap, icepop_low, icepop_high = bounds
    ratio = importance_ratio(log_ratio)
    if objective == "dis":
        trusted = trust_region_mask(log_ratio, usable, eps_low, eps_high)
        return ratio.masked_fill(~trusted, 0.0), ~trusted
    if objective == "icepop":
        trusted = (ratio >= icepop_low) & (ratio <= icepop_high)
        return ratio.masked_fill(~trusted, 0.0), ~trusted
    if objective == "tis":
        return ratio.clamp(max=tis_cap), ratio > tis_cap
    if objective == "none":
        return ratio, torch.zeros_like(usable)
    raise ValueError(f"unknown objective {objective!r}")


def _drift_metrics(log_ratio: Tensor, ratio: Tensor, mask: Tensor) -> Metrics:
    """How far the policy is from the one that sampled, over `mask`."""
    return {
        "policy/importance_ratio_mean": masked_mean(ratio, mask),
        "policy/importance_ratio_max": ratio.masked_fill(~mask, 0.0).amax(),
        "policy/logprob_gap": masked_mean(log_ratio.abs(), mask),
        "policy/k3_kl": k3_kl(log_ratio, mask),
        "policy/effective_sample_size": effective_sample_size(log_ratio, mask),
    }


def value_loss(
    values: Tensor, targets: Tensor, action_mask: Tensor, normalizer: float | None = None
) -> tuple[Tensor, Metrics]:
    """(1/N) Σ (V_t − G_t)²/2 over action positions; arguments [B, T].

    N = the action tokens, or `normalizer`. The targets are constants. Outputs at positions
    that precede no action token get exactly zero gradient.
    """
    num_tokens = action_mask.sum().clamp(min=1)
    # Masked before it is squared: the gradient of a square at infinity would be infinite.
    errors = (values.float() - targets.detach().float()).masked_fill(~action_mask, 0.0)
    loss = errors.square().sum() / 2 / (num_tokens if normalizer is None else normalizer)
    metrics = {
        "critic/loss": loss.detach(),
        "critic/value_mean": masked_mean(values.detach().float(), action_mask),
        "critic/value_target_mean": masked_mean(targets.detach().float(), action_mask),
    }
    return loss, metrics


def entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """Σ over the mask of H(π_t) = −Σ_a π(a) log π(a), in nats; differentiable.

    `logits` [..., V] finite inside the mask, `mask` [...]. Scalar.
    """
    logprobs = logits[mask].float().log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum()


def kl_to_reference(policy_logits: Tensor, reference_logits: Tensor) -> Tensor:
    """KL(π ‖ π_ref) = Σ_a π(a)·(log π(a) − log π_ref(a)) per token, exact: [N, V], [N, V] to [N].

    In nats, float32. Gradient to `policy_logits` only. Logits must be finite.
    """
    # The gradient is Σ_a ∇π·(log π − log π_ref); the part through log π is Σ_a π ∇log π = 0,
    # so the bracket may be a constant, and autograd keeps two [N, V] tensors, not three.
    gap = policy_logits.detach().float().log_softmax(-1)
    gap -= reference_logits.detach().float().log_softmax(-1)
    return (policy_logits.float().softmax(-1) * gap).sum(-1)


def kl_from_reference(policy_logits: Tensor, reference_logits: Tensor) -> Tensor:
    """KL(π_ref ‖ π) = Σ_a π_ref(a)·(log π_ref(a) − log π(a)) per token: [N, V], [N, V] to [N].

    In nats, float32, exact. Its gradient to the policy's logits is π − π_ref. That does not
    fade where π has come to do one thing only, whereas the gradient of `kl_to_reference`
    is weighted with π(a) and does: with π(a) = 0.001 next to nothing brings a back.
    Gradient to `policy_logits` only. Logits must be finite.
    """
    reference = reference_logits.detach().float().log_softmax(-1)
    gap = reference - policy_logits.float().log_softmax(-1)
    return (reference.exp() * gap).sum(-1)
