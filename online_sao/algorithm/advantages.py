"""Advantages and value targets. Only action tokens take part in any recursion here.

Notation: the action tokens of one trajectory, in order and across its actions, are numbered
j = 0 … n−1. Token j + 1 may be the next token of the same action or, over a gap of
observation tokens, the first token of the next one: both are the same step here, which is
what equations 4 and 5 say at the border of two actions. V_j is V of the state in which token
j was chosen, so V_j never looks at token j. V_n = 0 and A_n = 0: nothing is bootstrapped at
the end. All results are constants: no gradient flows to the values they came from.

Clash of notation: the paper writes r_t for the reward in equation 5 and for the importance
ratio in equation 2; here the reward is R.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad


def length_adaptive_lambda(action_mask: Tensor, alpha: float) -> Tensor:
    """λ = clamp(1 − 1/(α·l), 0, 1) per trajectory, l = its action tokens (paper, section 4.1).

    `action_mask` [B, T]; returns float32 [B]. Without the clamp α·l < 1 would give a negative
    λ. A trajectory without action tokens gets 0. Raises ValueError unless alpha > 0.
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, not {alpha}")
    return (1 - 1 / (alpha * action_mask.sum(-1).float())).clamp(0, 1)


def skip_observation_gae(
    values: Tensor,
    rewards: Tensor,
    action_mask: Tensor,
    gamma: float,
    gae_lambda: float | Tensor,
) -> Tensor:
    """A_j = δ_j + γλ·A_{j+1},  δ_j = R_j + γ·V_{j+1} − V_j  (equations 4 and 5).

    `values`, `rewards`, `action_mask` [B, T]; a reward is read at the action token that it
    stands on, by convention the last token of the action that earned it. `gae_lambda` is one
    number or [B]. Returns float32 [B, T], 0 outside the mask.
    """
    order, present = _actions_first(action_mask)
    v = _compact(values, order, present)
    td_errors = _compact(rewards, order, present) + gamma * _next(v) - v
    advantages = _sum_from_the_end(td_errors, gamma * _per_row(gae_lambda, v))
    return _expand(advantages, order, action_mask)


def value_targets(
    values: Tensor,
    rewards: Tensor,
    action_mask: Tensor,
    gamma: float,
    gae_lambda: float | Tensor,
) -> Tensor:
    """G_j = R_j + γ·((1 − λ)·V_{j+1} + λ·G_{j+1}): what the critic is fitted to.

    Equals `skip_observation_gae` plus V_j. With λ = 1 (λ_critic of the paper) it is the
    discounted return, and no value enters. Arguments and result as there.
    """
    order, present = _actions_first(action_mask)
    v = _compact(values, order, present)
    lambdas = _per_row(gae_lambda, v)
    terms = _compact(rewards, order, present) + gamma * (1 - lambdas)[:, None] * _next(v)
    return _expand(_sum_from_the_end(terms, gamma * lambdas), order, action_mask)


def step_level_advantages(
    values: Tensor,
    rewards: Tensor,
    action_mask: Tensor,
    action_index: Tensor,
    gamma: float,
    alpha: float,
    pooling: Literal["mean", "last"],
) -> Tensor:
    """One advantage per action, copied to each of its tokens (paper, appendix A.1).

    δ_i = R_i + γ·V(S_{i+1}) − V(S_i),  A_i = δ_i + γλ·A_{i+1},  λ = clamp(1 − 1/(α·steps), 0, 1)

    Step i is an action with at least one token in the mask; V(S_i) is the mean of its tokens'
    values or the value of its last token, R_i the sum of its rewards. `action_index` [B, T]
    says which action a token belongs to; it must not fall along a trajectory, may leave
    numbers out, and does not matter outside the mask. Returns float32 [B, T], 0 outside.
    Raises ValueError for an unknown pooling, alpha <= 0, or an action_index that is negative
    on an action token or falls.
    """
    if pooling not in ("mean", "last"):
        raise ValueError(f"pooling must be 'mean' or 'last', not {pooling!r}")
    order, present = _actions_first(action_mask)
    step, num_steps = _number_steps(action_index.gather(1, order), present)
    v = _compact(values, order, present)
    if pooling == "last":
        # Only a token that no other of its step follows brings its value into the sum.
        followed = (step[:, 1:] == step[:, :-1]) & present[:, 1:]
        step_values = _sum_per_step(v.masked_fill(pad(followed, (0, 1)), 0.0), step)
    else:
        tokens_per_step = _sum_per_step(present.double(), step)
        step_values = _sum_per_step(v, step) / tokens_per_step.clamp(min=1)
    step_rewards = _sum_per_step(_compact(rewards, order, present), step)
    has_step = torch.arange(step.shape[1], device=step.device) < num_steps[:, None]
    lambdas = length_adaptive_lambda(has_step, alpha)
    per_step = skip_observation_gae(step_values, step_rewards, has_step, gamma, lambdas)
    return _expand(per_step.gather(1, step), order, action_mask)


def broadcast_advantages(advantage_per_trajectory: Tensor, action_mask: Tensor) -> Tensor:
    """The same advantage on every action token of a trajectory: [B] and [B, T] to [B, T]."""
    copied = advantage_per_trajectory.detach().float()[:, None].expand(action_mask.shape)
    return copied.masked_fill(~action_mask, 0.0)


def group_advantages(rewards: Tensor, eps: float = 1e-6) -> Tensor:
    """(R − mean) / (std + eps) over the answers to one prompt (GRPO): [G] to float32 [G].

    std is the group's own (divided by G). All rewards equal: all zeros, exactly.
    Raises ValueError for fewer than two answers, which would always give zero.
    """
    if rewards.ndim != 1 or rewards.numel() < 2:
        raise ValueError(f"a group needs at least two rewards, not shape {tuple(rewards.shape)}")
    r = rewards.detach().double()
    if bool((r == r[0]).all()):
        return torch.zeros_like(r, dtype=torch.float32)
    return ((r - r.mean()) / (r.std(correction=0) + eps)).float()


# Helpers: rows with the action tokens moved to the front, in order. Sums are float64, so that
# a thousand terms lose nothing that float32 results could show.


def _actions_first(action_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions [B, N] of the action tokens, first ones first, and which of them are real.

    N = the largest number of action tokens in a row, at least 1.
    """
    num_actions = action_mask.sum(-1)
    longest = max(1, int(num_actions.max()))
    order = (~action_mask).byte().argsort(dim=1, stable=True)[:, :longest]
    present = torch.arange(longest, device=order.device) < num_actions[:, None]
    return order, present


def _compact(x: Tensor, order: Tensor, present: Tensor) -> Tensor:
    """[B, T] to float64 [B, N], a constant; 0 where a row has no token left."""
    return x.detach().double().gather(1, order).masked_fill(~present, 0.0)


def _expand(compact: Tensor, order: Tensor, action_mask: Tensor) -> Tensor:
    """[B, N] back to float32 [B, T], 0 outside the mask."""
    blank = torch.zeros(action_mask.shape, dtype=torch.float32, device=compact.device)
    return blank.scatter(1, order, compact.float()).masked_fill(~action_mask, 0.0)


def _next(v: Tensor) -> Tensor:
    """V_{j+1} at j; 0 after the last."""
    return pad(v[:, 1:], (0, 1))


def _per_row(gae_lambda: float | Tensor, like: Tensor) -> Tensor:
    return torch.as_tensor(gae_lambda, dtype=like.dtype, device=like.device).expand(like.shape[0])


def _sum_from_the_end(terms: Tensor, factor: Tensor) -> Tensor:
    """x_j = terms_j + factor·x_{j+1}, x_n = 0; terms [B, N], factor [B]."""
    sums = torch.zeros_like(terms)
    running = torch.zeros_like(factor)
    for j in reversed(range(terms.shape[1])):
        running = terms[:, j] + factor * running
        sums[:, j] = running
    return sums


def _number_steps(action_index: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Number the steps of each row 0, 1, 2, ... without gaps: steps [B, N], their count [B].

    `action_index` [B, N] is compact. Tokens that are not present get a number in range.
    """
    falls = (action_index[:, 1:] < action_index[:, :-1]) & present[:, 1:]
    if bool(falls.any()) or bool((action_index < 0)[present].any()):
        raise ValueError("action_index must be at least 0 on action tokens and must not fall")
    starts = present.clone()
    starts[:, 1:] &= action_index[:, 1:] != action_index[:, :-1]
    return (starts.cumsum(1) - 1).clamp(min=0), starts.sum(1)


def _sum_per_step(x: Tensor, step: Tensor) -> Tensor:
    """Sums [B, N] over the tokens of each step; 0 for numbers that no step has."""
    return torch.zeros_like(x).scatter_add(1, step, x)
