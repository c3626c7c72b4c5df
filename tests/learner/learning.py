"""Rollouts, settings and learners for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from online_sao.config import LearnerConfig, preset_settings
from online_sao.learner.batch import make_batch
from online_sao.learner.learner import Learner
from online_sao.types import Rollout, RolloutState, StoredVerdict, WeightSpan

PROMPT = (1, 45, 46, 47, 2, 201, 1)
ANSWER = (60, 300, 61, 33, 2)
SETTINGS: dict[str, Any] = {
    "compute_dtype": "float32",
    "threads": 1,
    "policy_lr": 1e-3,
    "critic_lr": 1e-3,
    "critic_warmup_updates": 0,
}
"""On top of a preset: exact arithmetic, and steps that a test can see."""


def make_rollout(
    name: str = "a",
    *,
    prompt: Sequence[int] = PROMPT,
    tokens: Sequence[int] = ANSWER,
    logprobs: Iterable[float] | float = -6.0,
    reward: float | None = 1.0,
    temperature: float = 1.0,
    version: int = 0,
    **fields: Any,
) -> Rollout:
    """A rewarded rollout (pending without a reward); one number of `logprobs` is for all."""
    if isinstance(logprobs, float):
        logprobs = [logprobs] * len(tokens)
    return Rollout(
        id=name,
        response_id=f"chatcmpl-{name}",
        choice=0,
        prompt_token_ids=np.array(prompt, np.int32),
        token_ids=np.array(tokens, np.int32),
        behavior_logprobs=np.array(list(logprobs), np.float32),
        weight_spans=(WeightSpan(version, 0, len(tokens)),),
        temperature=temperature,
        messages=None,
        answer="",
        finish_reason="stop",
        **{
            "state": RolloutState.PENDING if reward is None else RolloutState.REWARDED,
            "verdict": None if reward is None else verdict(reward),
        }
        | fields,
    )


def verdict(reward: float) -> StoredVerdict:
    return StoredVerdict(quality=1.0, style=reward, reward=reward)


def next_turn(
    before: Rollout, name: str, observation: Sequence[int], tokens: Sequence[int], **fields: Any
) -> Rollout:
    """The rollout that follows `before` in its session, after `observation`."""
    history = [*before.prompt_token_ids.tolist(), *before.token_ids.tolist()]
    return make_rollout(name, prompt=[*history, *observation], tokens=tokens, **fields)


def settings(preset: str = "sao", **changes: Any) -> LearnerConfig:
    return LearnerConfig.model_validate(
        {**preset_settings(preset), "preset": preset, **SETTINGS, **changes}
    )


def make_learner(model: Path, preset: str = "sao", **changes: Any) -> Learner:
    return Learner(settings(preset, **changes), str(model))


def on_policy(learner: Learner, rollout: Rollout) -> Rollout:
    """`rollout` with the behavior log-probs of the learner's own policy, now."""
    from dataclasses import replace

    batch = make_batch([[rollout]])
    logprobs = learner.policy.logprobs(batch)[batch.action_mask]
    return replace(rollout, behavior_logprobs=logprobs.numpy().astype(np.float32))


def everything(learner: Learner) -> dict[str, torch.Tensor]:
    """Copies of all tensors that an update may change: masters, models, moments."""
    parts = {"policy": learner.policy.parameters, "policy_model": learner.policy.model}
    if learner.critic is not None:
        parts |= {"critic": learner.critic.parameters, "critic_model": learner.critic.backbone}
    found = {}
    for part, holder in parts.items():
        if isinstance(holder, torch.nn.Module):
            tensors = dict(holder.named_parameters())
        else:
            tensors = holder.masters() | {
                f"optimizer.{name}": tensor for name, tensor in holder.optimizer_tensors().items()
            }
        found |= {f"{part}.{name}": tensor.detach().clone() for name, tensor in tensors.items()}
    return found


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    """Names of what is not bit-identical, and of what is in one of the two only."""
    both = before.keys() & after.keys()
    return (before.keys() ^ after.keys()) | {
        name for name in both if not torch.equal(before[name], after[name])
    }
