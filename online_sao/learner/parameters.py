"""Float32 masters under a bfloat16 model: gradients in, AdamW, rounded weights out.

bfloat16 alone loses small updates (8 bits of mantissa against steps of 1e-5), so every
trained tensor has a float32 master that the optimiser moves and the model's copy follows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from online_sao.optimizer_state import adamw_tensors, load_adamw_tensors

CLIP_MIN_SAMPLES = 8  # a quantile of fewer norms is no guide

Snapshot = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, list[float]]]
"""Masters, optimiser tensors and `state_dict` of a model's trained parameters."""


class TrainedParameters:
    """The trained tensors of one model, by name, with their optimiser.

    A tensor that is float32 in the model is its own master.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Parameter]],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        clip_quantile: float | None = None,
        clip_window: int = 128,
    ) -> None:
        self._compute: dict[str, Parameter] = dict(named)
        self._masters: dict[str, Parameter] = {
            name: p if p.dtype == torch.float32 else Parameter(p.detach().float().clone())
            for name, p in self._compute.items()
        }
        self._pairs = [
            (self._compute[name], master)
            for name, master in self._masters.items()
            if master is not self._compute[name]
        ]
        self._names = {master: name for name, master in self._masters.items()}
        self._optimizer = torch.optim.AdamW(
            self._masters.values(), lr=0.0, betas=betas, weight_decay=weight_decay, fused=True
        )
        self._clip_quantile = clip_quantile
        self._norms: deque[float] = deque(maxlen=clip_window)

    def collect_gradients(self) -> float:
        """Move the model's gradients to the masters (adding); return their global L2 norm."""
        for compute, master in self._pairs:
            if compute.grad is not None:
                if master.grad is None:
                    master.grad = compute.grad.float()
                else:
                    master.grad += compute.grad
                compute.grad = None
        gradients = [m.grad for m in self._masters.values() if m.grad is not None]
        if not gradients:
            return 0.0
        return float(torch.stack(torch._foreach_norm(gradients)).norm())

    def step(
        self,
        lr: float,
        grad_norm: float,
        decay: float = 0.0,
        decay_target: Mapping[str, Tensor] | None = None,
    ) -> None:
        """One AdamW step at learning rate `lr`, then round the masters into the model.

        Before it the masters move by the share `decay` toward `decay_target` (by name): like
        AdamW's own decay this bypasses the moments, and unlike it the learning rate.
        """
        limit = self._clip_limit()
        if limit is not None and grad_norm > limit:
            gradients = [m.grad for m in self._masters.values() if m.grad is not None]
            torch._foreach_mul_(gradients, limit / grad_norm)
        self._norms.append(grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if decay > 0 and decay_target is not None:
            with torch.no_grad():
                for name, master in self._masters.items():
                    master.lerp_(decay_target[name].to(master.dtype), decay)
        self._optimizer.step()
        self.drop_gradients()
        self._round()

    def drop_gradients(self) -> None:
        for parameter in (*self._compute.values(), *self._masters.values()):
            parameter.grad = None

    def masters(self) -> dict[str, Tensor]:
        """Name to float32 master (the tensors themselves, not copies)."""
        return {name: master.detach() for name, master in self._masters.items()}

    def load_masters(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` into the masters and the model. KeyError when one is missing."""
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(tensors[name])
        self._round()

    def optimizer_tensors(self) -> dict[str, Tensor]:
        return adamw_tensors(self._optimizer, self._names)

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        load_adamw_tensors(self._optimizer, self._names, dict(tensors))

    def snapshot(self) -> Snapshot:
        """A copy of everything that `step` changes, for `restore`."""
        return (
            {name: tensor.clone() for name, tensor in self.masters().items()},
            {name: tensor.clone() for name, tensor in self.optimizer_tensors().items()},
            self.state_dict(),
        )

    def restore(self, snapshot: Snapshot) -> None:
        masters, optimizer, state = snapshot
        self.load_masters(masters)
        self.load_optimizer_tensors(optimizer)
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, list[float]]:
        """What is not in the tensors (JSON)."""
        return {"norms": list(self._norms)}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        self._norms.clear()
        self._norms.extend(state["norms"])

    def _clip_limit(self) -> float | None:
        if self._clip_quantile is None or len(self._norms) < CLIP_MIN_SAMPLES:
            return None
        ordered = sorted(self._norms)
        return ordered[math.ceil(self._clip_quantile * len(ordered)) - 1]

    @torch.no_grad()
    def _round(self) -> None:
        if self._pairs:
            torch._foreach_copy_(
                [compute for compute, _ in self._pairs], [master for _, master in self._pairs]
            )
