"""AdamW state as named tensors, so that it travels in safetensors files (no pickle)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_KEYS = ("step", "exp_avg", "exp_avg_sq")


def adamw_tensors(
    optimizer: torch.optim.Optimizer, names: dict[torch.nn.Parameter, str]
) -> dict[str, torch.Tensor]:
    """`{parameter name}.{step | exp_avg | exp_avg_sq}` -> tensor; empty before the first step."""
    return {
        f"{name}.{key}": optimizer.state[parameter][key]
        for parameter, name in names.items()
        if parameter in optimizer.state
        for key in _KEYS
    }


def load_adamw_tensors(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.nn.Parameter, str],
    tensors: dict[str, torch.Tensor],
) -> None:
    """Inverse of adamw_tensors, in place, for a fused optimiser, which keeps its step counts
    beside the parameters. Raises KeyError when a tensor is missing."""
    if not tensors:
        optimizer.state.clear()
        return
    for parameter, name in names.items():
        state = {key: tensors[f"{name}.{key}"] for key in _KEYS}
        optimizer.state[parameter] = {
            "step": state["step"].float().to(parameter.device, copy=True),
            "exp_avg": state["exp_avg"].to(parameter.device, copy=True),
            "exp_avg_sq": state["exp_avg_sq"].to(parameter.device, copy=True),
        }
