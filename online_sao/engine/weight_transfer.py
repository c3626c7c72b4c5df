"""vLLM's side of a weight update on CPU: a weight transfer engine that reads shared memory.

vLLM ships transports for GPUs only (NCCL, CUDA IPC). This one receives the path of a
safetensors file, normally in /dev/shm, and loads it through vLLM's own layerwise reload.
Its worker process finds it by the entry point `vllm.general_plugins` (see pyproject.toml).

Facts that shape it (vllm 0.32):
- CPU linears are prepacked and their plain weights emptied, so weights can only be loaded
  between `initialize_layerwise_reload` and `finalize_layerwise_reload`.
- With tied embeddings the packed lm_head is not repacked by that; it would go on with the
  old weights, silently. It is repacked here.
- The base class synchronises an accelerator after loading; on CPU there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

BACKEND = "online_sao_shm"


SPIN_S = 0.002  # longer than the gap between two steps of a busy engine


def register() -> None:
    """Entry point `vllm.general_plugins`: make BACKEND known in this vLLM process.

    vLLM may load plugins more than once per process, so a second call does nothing.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if not torch.cuda.is_available():
        _wait_without_spinning()

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryEngine)


def _wait_without_spinning() -> None:
    """Let a waiting engine sleep after SPIN_S instead of spinning for a whole second.

    EngineCore and Worker each poll their message queue without pause for a second after every
    message, and a generation sends messages all the time. On a machine with cores to spare
    that saves microseconds; here it takes half the time of the core that the learner needs.
    What comes after the spinning (a socket that wakes the reader) is vLLM's own.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    original = SpinCondition.__init__
    if getattr(original, "is_ours", False):
        return

    def short_spin(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.busy_loop_s = min(self.busy_loop_s, SPIN_S)

    short_spin.is_ours = True  # type: ignore[attr-defined]
    SpinCondition.__init__ = short_spin


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Nothing to negotiate: a file is found by its path."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    path: str
    """A safetensors file with every tensor of the checkpoint, Hugging Face names."""


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Loads a whole checkpoint from a memory-mapped file between two forward passes.

    The caller has paused generation and has checked the file: a failure in here leaves the
    model half loaded, and only a further, good update repairs it.
    """

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """No data plane to set up."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        _abandon_reload(self.model)  # of an earlier update that failed
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Not the base method: it ends with torch.accelerator.synchronize(), which fails on CPU.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        with safe_open(update_info.path, framework="pt") as tensors:
            self.model.load_weights((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_head(self.model)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def _abandon_reload(model: torch.nn.Module) -> None:
    """Undo what a failed update left begun: each such layer gets its old tensors back.

    vLLM keeps the weights that a failed load had buffered and counts on from there, so the
    next, good load would fail as well. Layers that were complete keep the failed update's
    weights until that load.
    """
    from vllm.model_executor.model_loader.reload.layerwise import (
        _place_kernel_tensors,
        get_layerwise_info,
    )

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
            info.reset()


def _repack_tied_head(model: torch.nn.Module) -> None:
    """Point a tied lm_head at the new embeddings and pack it again for the CPU kernel."""
    config = getattr(model, "config", None)
    head = getattr(model, "lm_head", None)
    if head is None or not getattr(config, "tie_word_embeddings", False):
        return
    embeddings = _embed_tokens(model)
    head.weight = embeddings.weight
    if embeddings.weight.device.type == "cpu":
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def _embed_tokens(model: torch.nn.Module) -> torch.nn.Module:
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "embed_tokens":
            return module
    raise RuntimeError(
        f"{type(model).__name__} ties its head but has no embed_tokens; its lm_head would "
        "keep the old weights."
    )
