"""One update of SAO, top to bottom (paper: arXiv 2607.07508; decisions: docs/algorithm.md).

    1  values of this rollout's states, before the critic sees its reward
    2  advantages                                      skip-observation GAE, equations 4 and 5
    3  policy loss: ratio to the engine's log-probs, masked outside the trust region,
       times advantage, times log pi                                       equations 1 to 3
       (+ the anchor to the start policy: ours)
    4  one policy step
       (+ the decay toward the start weights: ours)
    5  K critic steps toward the return

Left out of the textbook method: the old policy (behavior log-probs stand for it), advantage
whitening and gradient clipping at a constant (both mean nothing for a single rollout).
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from online_sao.algorithm.advantages import value_targets
from online_sao.algorithm.importance import importance_ratio, log_importance_ratio
from online_sao.algorithm.objectives import (
    entropy,
    kl_from_reference,
    kl_to_reference,
    policy_loss,
    value_loss,
)
from online_sao.algorithm.start_decay import StartDecay
from online_sao.algorithm.statistics import explained_variance
from online_sao.config import LearnerConfig
from online_sao.learner.batch import Batch, make_batch
from online_sao.learner.critic import Critic
from online_sao.learner.estimators import Estimator, make_estimator
from online_sao.learner.memory import keep_freed_memory
from online_sao.learner.parameters import Snapshot
from online_sao.learner.policy import Policy, action_logprobs
from online_sao.types import FloatArray, Rollout

Metrics = dict[str, float | None]


@dataclass(frozen=True)
class UpdateResult:
    """What one update did.

    `applied` is False when a number was not finite: then no weight, moment or baseline
    changed. The arrays are per rollout id, [N] each, over its action tokens.
    """

    applied: bool
    metrics: Metrics
    values: dict[str, FloatArray] = field(default_factory=dict)
    advantages: dict[str, FloatArray] = field(default_factory=dict)
    importance_ratios: dict[str, FloatArray] = field(default_factory=dict)


def _leaves_nothing_behind(
    update: Callable[..., UpdateResult],
) -> Callable[..., UpdateResult]:
    """Gradients are added up: what a failed update leaves would be part of the next."""

    @functools.wraps(update)
    def guarded(learner: Learner, *args: Any, **kwargs: Any) -> UpdateResult:
        try:
            return update(learner, *args, **kwargs)
        except BaseException:
            learner._undo()
            raise

    return guarded


def choose_device(setting: str) -> str:
    """What `model.device` means here: `auto` is a GPU if there is one."""
    if setting != "auto":
        return setting
    return "cuda" if torch.cuda.is_available() else "cpu"


class Learner:
    """Policy, critic and everything that an update changes. One process, one thread."""

    def __init__(self, config: LearnerConfig, model: str, device: str = "cpu") -> None:
        self.config = config
        self.device = torch.device(device)
        # Said even for the default: Ray tells its workers to use a single thread.
        torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
        torch.manual_seed(config.seed)
        keep_freed_memory()
        self.policy = Policy(model, config, self.device)
        self.critic = Critic(model, config, self.device) if config.uses_critic else None
        self.estimator: Estimator = make_estimator(config, self._current_logprobs)
        self.num_updates = 0
        self._critic_before: Snapshot | None = None  # during an update that may be undone
        # V at the first token and the return of past rollouts, for explained variance.
        self._window: deque[tuple[float, float]] = deque(maxlen=config.window)
        self._start_decay = StartDecay(config.start_decay, config.start_decay_rate)

    # --- the method

    @_leaves_nothing_behind
    def update(
        self, trajectories: Sequence[Sequence[Rollout]], policy_lag: int = 0
    ) -> UpdateResult:
        """Learn from `trajectories` (each the rollouts of one session, rewarded).

        `policy_lag` is only reported. Raises LearnerError for rollouts that cannot be a batch.
        Whatever is raised before the policy's step leaves all as it was.
        """
        clock = _Clock()
        with clock("batch"):
            batch = make_batch(trajectories, self.device)
        values, critic_step, critic_norm, num_critic_steps = None, None, 0.0, 0
        if self.critic is not None:
            with clock("critic"):
                # With gradient: this forward pass is also the first critic step's.
                critic_step = self._critic_loss(batch)
                values = critic_step.values
                if self.config.value_timing == "after":
                    self._critic_before = self.critic.parameters.snapshot()
                    critic_norm = self._critic_gradient(critic_step)
                    num_critic_steps = self._critic_steps(batch, critic_step, critic_norm)
                    if num_critic_steps < self.config.critic_updates:
                        return self._refused(batch, "critic")
                    with torch.no_grad():
                        values = self.critic.values(batch)
        advantages = self.estimator.advantages(batch, values)

        with clock("policy"):
            logits = self.policy.action_logits(batch)
            logprobs = action_logprobs(logits, batch)
            loss, metrics = policy_loss(
                logprobs,
                batch.behavior_logprobs,
                advantages,
                batch.action_mask,
                objective=self.config.objective,
                eps_low=self.config.eps_low,
                eps_high=self.config.eps_high,
                tis_cap=self.config.tis_cap,
                icepop_low=self.config.icepop_low,
                icepop_high=self.config.icepop_high,
            )
            if int(metrics["policy/non_finite_tokens"]):
                return self._refused(batch, "policy")
        with clock("anchor"):
            anchor, anchor_metrics = self._anchor(logits, batch)
        with clock("policy"):
            (loss + anchor).backward()
            policy_norm = self.policy.parameters.collect_gradients()
        if critic_step is not None and self.config.value_timing == "before":
            with clock("critic"):
                critic_norm = self._critic_gradient(critic_step)
        if not (math.isfinite(policy_norm) and math.isfinite(critic_norm)):
            return self._refused(batch, "gradient")
        mean_advantage = float(advantages[batch.action_mask].mean())
        decay = self._start_decay.share(mean_advantage)
        with clock("optimizer"):
            self.policy.parameters.step(
                self.config.policy_lr, policy_norm, decay, self.policy.start_weights
            )
        self._start_decay.observe(mean_advantage)
        self._critic_before = None
        if critic_step is not None and self.config.value_timing == "before":
            with clock("critic"):
                num_critic_steps = self._critic_steps(batch, critic_step, critic_norm)

        self.estimator.observe(batch)
        # What the critic expected: V from before it saw these rewards, whatever value_timing.
        expected = critic_step.values if critic_step else None
        window_metrics = self._remember(batch, expected)
        critic_lr = self._critic_lr() if self.critic else None
        self.num_updates += 1
        with torch.no_grad():
            log_ratio = log_importance_ratio(logprobs, batch.behavior_logprobs, batch.action_mask)
            ratios = importance_ratio(log_ratio)
        return UpdateResult(
            applied=True,
            metrics=_plain(
                {
                    **metrics,
                    **anchor_metrics,
                    **window_metrics,
                    **(critic_step.metrics if critic_step else {}),
                    "policy/grad_norm": policy_norm,
                    "policy/lr": self.config.policy_lr,
                    "policy/start_decay": decay,
                    "policy/entropy": _mean_entropy(logits, batch),
                    "critic/grad_norm": critic_norm if self.critic else None,
                    "critic/lr": critic_lr,
                    "critic/num_steps": float(num_critic_steps) if self.critic else None,
                    "advantage/mean": mean_advantage,
                    "advantage/abs_mean": advantages[batch.action_mask].abs().mean(),
                    "advantage/first_visits": float(self.estimator.first_visits),
                    "rollout/reward": batch.returns().mean(),
                    "rollout/num_action_tokens": batch.num_actions / len(trajectories),
                    "rollout/policy_lag_max": float(policy_lag),
                    "rollout/num_trajectories": float(len(trajectories)),
                    **clock.seconds(),
                }
            ),
            values={} if values is None else dict(batch.per_rollout(values)),
            advantages=dict(batch.per_rollout(advantages)),
            importance_ratios=dict(batch.per_rollout(ratios)),
        )

    def pretrain(
        self,
        rollouts: Sequence[Rollout],
        on_step: Callable[[int, int], None] = lambda done, total: None,
    ) -> Metrics:
        """Fit critic and baselines to judged rollouts of the start policy.

        The policy does not move. `on_step(done, total)` after every critic step.
        """
        epochs = self.config.value_pretraining_epochs if self.critic is not None else 0
        total = epochs * len(rollouts)
        losses: list[float] = []
        rng = np.random.default_rng(self.config.seed)
        for epoch in range(epochs):
            for position, index in enumerate(rng.permutation(len(rollouts))):
                batch = make_batch([[rollouts[index]]], self.device)
                step = self._critic_loss(batch)
                norm = self._critic_gradient(step)
                assert self.critic is not None
                if math.isfinite(norm):
                    self.critic.parameters.step(self.config.critic_lr, norm)
                    losses.append(float(step.metrics["critic/loss"]))
                else:
                    self.critic.parameters.drop_gradients()
                on_step(epoch * len(rollouts) + position + 1, total)
        for rollout in rollouts:
            self.estimator.observe(make_batch([[rollout]], self.device))
        half = len(losses) // 2
        rewards = [rollout.reward or 0.0 for rollout in rollouts]
        return {
            "pretraining/num_rollouts": float(len(rollouts)),
            "pretraining/reward_mean": float(np.mean(rewards)) if rewards else None,
            "pretraining/loss_first_half": float(np.mean(losses[:half])) if half else None,
            "pretraining/loss_second_half": float(np.mean(losses[half:])) if half else None,
        }

    # --- parts

    def _anchor(self, logits: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        """Terms of the loss that are ours: KL to the start policy, and an entropy bonus."""
        config = self.config
        term = logits.new_zeros(())
        metrics: dict[str, Any] = {"policy/kl_to_start": None}
        if config.kl_coef > 0:
            start = self.policy.start_logits(batch)
            kl = kl_to_reference(logits, start).sum() / batch.num_actions
            pull = kl
            if config.kl_direction == "forward":
                pull = kl_from_reference(logits, start).sum() / batch.num_actions
            term = term + config.kl_coef * pull
            metrics["policy/kl_to_start"] = kl.detach()
        if config.entropy_coef > 0:
            everywhere = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
            term = term - config.entropy_coef * entropy(logits, everywhere) / batch.num_actions
        return term, metrics

    def _critic_loss(self, batch: Batch) -> _CriticStep:
        assert self.critic is not None
        values = self.critic.values(batch)
        targets = value_targets(
            values, batch.rewards, batch.action_mask, self.config.gamma, self.config.lambda_critic
        )
        loss, metrics = value_loss(values, targets, batch.action_mask)
        return _CriticStep(loss, values.detach(), metrics)

    def _critic_gradient(self, step: _CriticStep) -> float:
        assert self.critic is not None
        step.loss.backward()
        return self.critic.parameters.collect_gradients()

    def _critic_steps(self, batch: Batch, first: _CriticStep, first_norm: float) -> int:
        """K critic steps, of which the gradient of `first` is computed and collected; how many
        were taken before one whose gradient was not finite."""
        assert self.critic is not None
        norm = first_norm
        for number in range(self.config.critic_updates):
            if number > 0:
                norm = self._critic_gradient(self._critic_loss(batch))
            if not math.isfinite(norm):
                self.critic.parameters.drop_gradients()
                return number
            self.critic.parameters.step(self._critic_lr(), norm)
        return self.config.critic_updates

    def _critic_lr(self) -> float:
        """Rises linearly over the first updates after value pretraining."""
        warmup = self.config.critic_warmup_updates
        share = min(1.0, (self.num_updates + 1) / warmup) if warmup else 1.0
        return self.config.critic_lr * share

    def _remember(self, batch: Batch, values: Tensor | None) -> dict[str, Any]:
        """Windowed statistics; a single rollout has no variance to explain."""
        if values is None:
            return {}
        first = values.gather(1, batch.first_action_index()[:, None])[:, 0].tolist()
        self._window.extend(zip(first, batch.returns().tolist(), strict=True))
        return {
            "critic/value_first": sum(first) / len(first),
            "critic/explained_variance": explained_variance(
                [value for value, _ in self._window], [reward for _, reward in self._window]
            ),
        }

    def _refused(self, batch: Batch, where: str) -> UpdateResult:
        """A number was not finite: leave everything as it was, and say so."""
        self._undo()
        return UpdateResult(
            applied=False,
            metrics={f"refused/{where}": 1.0, "rollout/reward": float(batch.returns().mean())},
        )

    def _undo(self) -> None:
        """What an update did before the policy's step: gradients, and steps of the critic."""
        self.policy.parameters.drop_gradients()
        if self.critic is not None:
            self.critic.parameters.drop_gradients()
            if self._critic_before is not None:
                self.critic.parameters.restore(self._critic_before)
        self._critic_before = None

    def _current_logprobs(self, rollout: Rollout) -> np.ndarray:
        batch = make_batch([[_with_reward(rollout)]], self.device)
        return batch.per_rollout(self.policy.logprobs(batch))[0][1]

    # --- state that is not in a parameter

    def state_dict(self) -> dict[str, Any]:
        """JSON; together with the parameters' and optimisers' tensors it is everything."""
        return {
            "num_updates": self.num_updates,
            "window": list(self._window),
            "start_decay": self._start_decay.state_dict(),
            "estimator": self.estimator.state_dict(),
            "policy": self.policy.parameters.state_dict(),
            "critic": self.critic.parameters.state_dict() if self.critic else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_updates = state["num_updates"]
        self._window.clear()
        self._window.extend((value, reward) for value, reward in state["window"])
        self._start_decay.load_state_dict(state["start_decay"])
        self.estimator.load_state_dict(state["estimator"])
        self.policy.parameters.load_state_dict(state["policy"])
        if self.critic is not None:
            self.critic.parameters.load_state_dict(state["critic"])


@dataclass
class _CriticStep:
    loss: Tensor
    values: Tensor  # [B, T], detached
    metrics: dict[str, Tensor]


class _Clock:
    """Seconds per named part, and in total since it was made."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._parts: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Any:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._parts[part] = self._parts.get(part, 0.0) + time.perf_counter() - started

    def seconds(self) -> dict[str, float]:
        total = time.perf_counter() - self._started
        return {f"seconds/{part}": s for part, s in self._parts.items()} | {"seconds/total": total}


@torch.no_grad()
def _mean_entropy(logits: Tensor, batch: Batch) -> Tensor:
    everywhere = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    return entropy(logits, everywhere) / batch.num_actions


def _with_reward(rollout: Rollout) -> Rollout:
    from dataclasses import replace

    from online_sao.types import StoredVerdict

    if rollout.verdict is not None:
        return rollout
    return replace(rollout, verdict=StoredVerdict(quality=None, style=None, reward=0.0))


def _plain(metrics: dict[str, Any]) -> Metrics:
    return {
        name: None if value is None else float(value) for name, value in sorted(metrics.items())
    }
