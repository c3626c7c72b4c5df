"""Where advantages come from: the paper's critic, and every baseline it is compared with.

An estimator gives the advantages of a batch from what was known before its rewards, then
observes those rewards. What it remembers is JSON, kept in checkpoints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from online_sao.algorithm.advantages import (
    broadcast_advantages,
    group_advantages,
    length_adaptive_lambda,
    skip_observation_gae,
    step_level_advantages,
)
from online_sao.algorithm.baselines import (
    PerPromptRunningMean,
    RunningMean,
    SPOTracker,
    WindowedScale,
)
from online_sao.config import LearnerConfig
from online_sao.errors import LearnerError
from online_sao.learner.batch import Batch, prompt_key
from online_sao.types import Rollout

MAX_PROMPTS = 10_000  # remembered by a baseline per prompt; the one seen longest ago goes

Logprobs = Callable[[Rollout], np.ndarray]
"""log pi of a rollout's action tokens under the current policy, [N]."""


class Estimator(Protocol):
    @property
    def first_visits(self) -> int:
        """Trajectories of the last batch that had nothing to be compared with: advantage 0."""

    def advantages(self, batch: Batch, values: Tensor | None) -> Tensor:
        """[B, T] from V [B, T] (None without a critic) and what was observed so far."""

    def observe(self, batch: Batch) -> None:
        """Learn the batch's rewards."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def make_estimator(config: LearnerConfig, current_logprobs: Logprobs) -> Estimator:
    """The estimator that `config.advantage` names, normalised over a window if asked to."""
    made: Estimator
    match config.advantage:
        case "critic" | "step_average" | "step_last":
            made = _CriticEstimator(config)
        case "running_mean":
            made = _RunningMeanEstimator(config)
        case "running_mean_per_prompt":
            made = _PerPromptEstimator(config)
        case "spo":
            made = _SPOEstimator(config, current_logprobs)
        case "group":
            made = _GroupEstimator()
    if config.normalize_advantage_window:
        return _Normalized(made, config.normalize_advantage_window)
    return made


class _CriticEstimator:
    """Skip-observation GAE, token- or step-level. The critic itself does the remembering."""

    first_visits = 0

    def __init__(self, config: LearnerConfig) -> None:
        self._config = config

    def advantages(self, batch: Batch, values: Tensor | None) -> Tensor:
        assert values is not None
        config = self._config
        if config.advantage == "critic":
            gae_lambda = length_adaptive_lambda(batch.action_mask, config.lambda_alpha)
            return skip_observation_gae(
                values, batch.rewards, batch.action_mask, config.gamma, gae_lambda
            )
        return step_level_advantages(
            values,
            batch.rewards,
            batch.action_mask,
            batch.action_index,
            config.gamma,
            config.lambda_alpha,
            "mean" if config.advantage == "step_average" else "last",
        )

    def observe(self, batch: Batch) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class _RunningMeanEstimator:
    """R minus the mean of the previous rewards (section 4.5)."""

    def __init__(self, config: LearnerConfig) -> None:
        self._mean = RunningMean(config.running_mean_window)
        self.state_dict = self._mean.state_dict
        self.load_state_dict = self._mean.load_state_dict

    def advantages(self, batch: Batch, values: Tensor | None) -> Tensor:
        returns = batch.returns()
        baseline = self._mean.baseline()
        # Before any reward there is nothing to compare with: no push either way.
        self.first_visits = len(returns) if baseline is None else 0
        gaps = torch.zeros_like(returns) if baseline is None else returns - baseline
        return broadcast_advantages(gaps, batch.action_mask)

    def observe(self, batch: Batch) -> None:
        for value in batch.returns().tolist():
            self._mean.observe(value)


class _PerPromptEstimator:
    """R minus the mean of the prompt's previous rewards; 0 at the first visit (section 4.3)."""

    def __init__(self, config: LearnerConfig) -> None:
        self._means = PerPromptRunningMean(config.per_prompt_window, MAX_PROMPTS)
        self.state_dict = self._means.state_dict
        self.load_state_dict = self._means.load_state_dict

    def advantages(self, batch: Batch, values: Tensor | None) -> Tensor:
        gaps, self.first_visits = _against_prompts(batch, self._means.baseline)
        return gaps

    def observe(self, batch: Batch) -> None:
        for trajectory, value in zip(batch.trajectories, batch.returns().tolist(), strict=True):
            self._means.observe(prompt_key(trajectory[0]), value)


class _SPOEstimator:
    """R minus SPO's tracker of the prompt, which forgets as fast as the policy has moved.

    How far it moved since the prompt's last visit is measured on the answer given then: k3
    of its tokens' log-probs then (recorded by the engine) and now.
    """

    def __init__(self, config: LearnerConfig, current_logprobs: Logprobs) -> None:
        self._tracker = SPOTracker(
            config.spo_rho_min, config.spo_rho_max, config.spo_kl_half_life, MAX_PROMPTS
        )
        self._current_logprobs = current_logprobs
        self._last: OrderedDict[str, Rollout] = OrderedDict()

    def advantages(self, batch: Batch, values: Tensor | None) -> Tensor:
        if bool(((batch.returns() < 0) | (batch.returns() > 1)).any()):
            raise LearnerError("SPO needs returns in [0, 1]: learn from single turns with it.")
        gaps, self.first_visits = _against_prompts(batch, self._tracker.baseline)
        return gaps

    def observe(self, batch: Batch) -> None:
        for trajectory, value in zip(batch.trajectories, batch.returns().tolist(), strict=True):
            key = prompt_key(trajectory[0])
            before = self._last.get(key)
            self._tracker.observe(key, value, 0.0 if before is None else self._moved(before))
            self._last[key] = trajectory[0]
            self._last.move_to_end(key)
            if len(self._last) > MAX_PROMPTS:
                self._last.popitem(last=False)

    def state_dict(self) -> dict[str, Any]:
        return {
            "tracker": self._tracker.state_dict(),
            "last": [[key, _rollout_json(rollout)] for key, rollout in self._last.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tracker.load_state_dict(state["tracker"])
        self._last = OrderedDict((key, _rollout_from_json(data)) for key, data in state["last"])

    def _moved(self, before: Rollout) -> float:
        gap = self._current_logprobs(before) - before.behavior_logprobs
        gap = np.clip(gap.astype(np.float64), None, 20.0)
        return float(np.maximum(np.expm1(gap) - gap, 0.0).mean())


class _GroupEstimator:
    """GRPO: rewards normalised within the answers to one prompt of the same update.

    Where only one answer of a group has a reward there is nothing to compare it with: its
    advantage is 0, and it is counted as a first visit.
    """

    first_visits = 0

    def advantages(self, batch: Batch, values: Tensor | None) -> Tensor:
        returns = batch.returns()
        result = torch.zeros_like(returns)
        groups: dict[str, list[int]] = {}
        for row, trajectory in enumerate(batch.trajectories):
            groups.setdefault(prompt_key(trajectory[0]), []).append(row)
        alone = [rows for rows in groups.values() if len(rows) < 2]
        self.first_visits = len(alone)
        for rows in groups.values():
            if len(rows) > 1:
                result[rows] = group_advantages(returns[rows]).to(result.dtype)
        return broadcast_advantages(result, batch.action_mask)

    def observe(self, batch: Batch) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class _Normalized:
    """Divides another estimator's advantages by their spread over past rollouts.

    One rollout has no spread of its own, so a batch is never normalised by itself.
    """

    def __init__(self, inner: Estimator, window: int) -> None:
        self._inner = inner
        self._scale = WindowedScale(window)
        # Those of the update under way; they count once it is not refused.
        self._given: list[float] = []

    @property
    def first_visits(self) -> int:
        return self._inner.first_visits

    def advantages(self, batch: Batch, values: Tensor | None) -> Tensor:
        raw = self._inner.advantages(batch, values)
        rows = zip(raw, batch.action_mask, strict=True)
        self._given = [float(row[mask].mean()) for row, mask in rows]
        return raw / self._scale.scale()

    def observe(self, batch: Batch) -> None:
        for advantage in self._given:
            self._scale.observe(advantage)
        self._given = []
        self._inner.observe(batch)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self._inner.state_dict(), "scale": self._scale.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inner.load_state_dict(state["inner"])
        self._scale.load_state_dict(state["scale"])


def _against_prompts(batch: Batch, baseline: Callable[[str], float | None]) -> tuple[Tensor, int]:
    """Returns minus each prompt's baseline, 0 where there is none yet; and how many have none."""
    known = [baseline(prompt_key(trajectory[0])) for trajectory in batch.trajectories]
    gaps = [
        0.0 if expected is None else value - expected
        for expected, value in zip(known, batch.returns().tolist(), strict=True)
    ]
    advantages = torch.tensor(gaps, device=batch.rewards.device)
    return broadcast_advantages(advantages, batch.action_mask), known.count(None)


def _rollout_json(rollout: Rollout) -> dict[str, Any]:
    return {
        "prompt": rollout.prompt_token_ids.tolist(),
        "tokens": rollout.token_ids.tolist(),
        "logprobs": [float(x) for x in rollout.behavior_logprobs],
        "temperature": rollout.temperature,
    }


def _rollout_from_json(data: dict[str, Any]) -> Rollout:
    return Rollout(
        id="",
        response_id="",
        choice=0,
        prompt_token_ids=np.asarray(data["prompt"], np.int32),
        token_ids=np.asarray(data["tokens"], np.int32),
        behavior_logprobs=np.asarray(data["logprobs"], np.float32),
        weight_spans=(),
        temperature=data["temperature"],
        messages=None,
        answer="",
        finish_reason=None,
    )
