"""Rollouts to padded tensors: the only place where token shift, padding and masks are made."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from online_sao.errors import LearnerError
from online_sao.types import Rollout


@dataclass(frozen=True)
class Batch:
    """B trajectories of up to T tokens, padded on the right. All tensors [B, T] unless said.

    A trajectory holds the exact token ids that the policy saw and sampled: prompt, action,
    further prompt (an observation), further action, ...
    """

    token_ids: Tensor  # int64
    attention_mask: Tensor  # bool; True = a real token
    action_mask: Tensor  # bool; True = sampled by the policy
    action_index: Tensor  # int64; which action of its trajectory, -1 elsewhere
    behavior_logprobs: Tensor  # float32, 0 outside action_mask
    rewards: Tensor  # float32; on the last token of the action that earned it
    temperature: Tensor  # float32; of the request that sampled the token, 1 outside action_mask
    trajectories: tuple[tuple[Rollout, ...], ...]

    @property
    def num_actions(self) -> int:
        """N: action tokens of the whole batch."""
        return int(self.action_mask.sum())

    @property
    def is_padded(self) -> bool:
        return not bool(self.attention_mask.all())

    @property
    def state_index(self) -> tuple[Tensor, Tensor]:
        """(rows, columns) of the positions whose output concerns an action token: t - 1 for t.

        In the row-major order of `action_mask`, N entries each.
        """
        rows, columns = self.action_mask.nonzero(as_tuple=True)
        return rows, columns - 1

    def scatter(self, at_actions: Tensor) -> Tensor:
        """[N] values in the order of `action_mask` to [B, T], zero elsewhere; differentiable."""
        blank = torch.zeros(
            self.action_mask.shape, dtype=at_actions.dtype, device=at_actions.device
        )
        return blank.masked_scatter(self.action_mask, at_actions)

    def returns(self) -> Tensor:
        """Sum of rewards per trajectory, [B]."""
        return self.rewards.sum(-1)

    def first_action_index(self) -> Tensor:
        """Column of each trajectory's first action token, [B]."""
        return self.action_mask.float().argmax(-1)

    def per_rollout(self, at_tokens: Tensor) -> list[tuple[str, np.ndarray]]:
        """(rollout id, [N] float32 array) for a [B, T] tensor, in the order of the trajectories."""
        rows = []
        for row, trajectory in enumerate(self.trajectories):
            for action, rollout in enumerate(trajectory):
                chosen = at_tokens[row][self.action_index[row] == action]
                rows.append((rollout.id, chosen.detach().float().cpu().numpy()))
        return rows


def make_batch(
    trajectories: Sequence[Sequence[Rollout]], device: torch.device | str = "cpu"
) -> Batch:
    """Pad `trajectories`, each the ordered rollouts of one session (often just one).

    The prompt of a later rollout must begin with all tokens before it; what is new in it is
    an observation. Raises LearnerError when it does not, or a rollout has no reward.
    """
    if not trajectories or not all(trajectories):
        raise LearnerError("There is no rollout to learn from.")
    flat = [_flatten(trajectory) for trajectory in trajectories]
    length = max(len(row.token_ids) for row in flat)
    shape = (len(flat), length)
    token_ids = np.zeros(shape, np.int64)
    attention_mask = np.zeros(shape, bool)
    action_index = np.full(shape, -1, np.int64)
    behavior_logprobs = np.zeros(shape, np.float32)
    rewards = np.zeros(shape, np.float32)
    temperature = np.ones(shape, np.float32)
    for row, data in enumerate(flat):
        n = len(data.token_ids)
        token_ids[row, :n] = data.token_ids
        attention_mask[row, :n] = True
        action_index[row, :n] = data.action_index
        behavior_logprobs[row, :n] = data.behavior_logprobs
        rewards[row, :n] = data.rewards
        temperature[row, :n] = data.temperature
    index = torch.from_numpy(action_index).to(device)
    return Batch(
        token_ids=torch.from_numpy(token_ids).to(device),
        attention_mask=torch.from_numpy(attention_mask).to(device),
        action_mask=index >= 0,
        action_index=index,
        behavior_logprobs=torch.from_numpy(behavior_logprobs).to(device),
        rewards=torch.from_numpy(rewards).to(device),
        temperature=torch.from_numpy(temperature).to(device),
        trajectories=tuple(tuple(t) for t in trajectories),
    )


def prompt_key(rollout: Rollout) -> str:
    """What "the same prompt" means for baselines kept per prompt: a hash of its token ids."""
    return hashlib.sha256(rollout.prompt_token_ids.astype("<i4").tobytes()).hexdigest()[:16]


@dataclass
class _Flat:
    token_ids: np.ndarray
    action_index: np.ndarray
    behavior_logprobs: np.ndarray
    rewards: np.ndarray
    temperature: np.ndarray


def _flatten(trajectory: Sequence[Rollout]) -> _Flat:
    ids: list[np.ndarray] = []
    index: list[np.ndarray] = []
    logprobs: list[np.ndarray] = []
    rewards: list[np.ndarray] = []
    temperature: list[np.ndarray] = []
    length = 0
    for number, rollout in enumerate(trajectory):
        if rollout.reward is None:
            raise LearnerError(f"Rollout {rollout.id} has no reward to learn from.")
        if len(rollout.token_ids) == 0 or len(rollout.prompt_token_ids) == 0:
            raise LearnerError(f"Rollout {rollout.id} has no tokens to learn from.")
        if len(rollout.token_ids) != len(rollout.behavior_logprobs):
            raise LearnerError(f"Rollout {rollout.id} has not one behavior log-prob per token.")
        prompt = rollout.prompt_token_ids
        seen = np.concatenate(ids) if ids else prompt[:0]
        if not np.array_equal(prompt[:length], seen):
            raise LearnerError(f"Rollout {rollout.id} does not continue its trajectory.")
        observation = prompt[length:]
        num_actions = len(rollout.token_ids)
        ids += [observation, rollout.token_ids]
        index += [np.full(len(observation), -1), np.full(num_actions, number)]
        logprobs += [np.zeros(len(observation), np.float32), rollout.behavior_logprobs]
        earned = np.zeros(len(observation) + num_actions, np.float32)
        earned[-1] = rollout.reward
        rewards.append(earned)
        temperature += [np.ones(len(observation)), np.full(num_actions, rollout.temperature)]
        length += len(observation) + num_actions
    return _Flat(
        np.concatenate(ids),
        np.concatenate(index),
        np.concatenate(logprobs),
        np.concatenate(rewards),
        np.concatenate(temperature),
    )
