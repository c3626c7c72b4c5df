"""vLLM's side of a weight update on CPU: a weight transfer engine that reads shared memory.

vLLM ships transports for GPUs only (NCCL, CUDA IPC). This one receives the path of a
safetensors file, normally in /dev/shm, and loads it through vLLM's own layerwise reload, part
by part while the old weights go on serving; only the exchange of the two needs a pause. Its
worker process finds it by the entry point `vllm.general_plugins` (see pyproject.toml).

Facts that shape it (vllm 0.32):
- CPU linears are prepacked and their plain weights emptied, so weights can only be loaded
  between `initialize_layerwise_reload` and `finalize_layerwise_reload`; what computes is the
  packed copy in `cpu_linear`. Packing is most of the time that an update takes.
- With tied embeddings the packed lm_head is not repacked by that; it would go on with the
  old weights, silently. It is repacked here.
- The base class synchronises an accelerator after loading; on CPU there is none.
"""

from __future__ import annotations

from collections.abc import Callable
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
NUM_PARTS = 8
"""Parts of a weight update: between two of them running requests get their turn."""
ABANDON = -1
"""In place of a part: give up the update that was begun (always answered by an error)."""
_CONTAINERS = frozenset({"_parameters", "_buffers", "_modules"})
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
    part: int
    """Which of NUM_PARTS parts of the model to load from it, from 0; all must be, in order."""


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Loads a whole checkpoint from a memory-mapped file, between forward passes.

    Each part is loaded in place, taken out again, and kept beside what serves; so a part that
    fails changes nothing, and generation may go on between the parts. The caller has checked
    the file, and pauses generation for `finish_weight_update`, which exchanges all at once.
    """

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo
    supports_draft_weight_update = False
    _next: list[_Computed]
    """What computes with the new weights, of the parts loaded so far."""

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """No data plane to set up."""

    def start_weight_update(self) -> None:
        self._next = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Not the base method: it ends with torch.accelerator.synchronize(), which fails on CPU.
        self.receive_weights(self.parse_update_info(update_info))

    @torch.no_grad()
    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        if update_info.part == ABANDON:
            self._next = []
            # Only after an error does vLLM let another update begin.
            raise RuntimeError("the weight update was abandoned")
        sections = _sections(self.model)
        first = update_info.part * len(sections) // NUM_PARTS
        last = (update_info.part + 1) * len(sections) // NUM_PARTS
        with safe_open(update_info.path, framework="pt") as tensors:
            for section in sections[first:last]:
                names = [name for name in tensors.keys() if section.owns(name)]  # noqa: SIM118
                loaded = ((name, tensors.get_tensor(name)) for name in names)
                self._next += self._load_aside(section, loaded)

    def _load_aside(self, section: _Section, tensors: Any) -> list[_Computed]:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        serving = [_Computed.of(module) for module in section.modules]
        for computed in serving:
            computed.make_room()
        try:
            for module in section.roots:
                initialize_layerwise_reload(module)
            self.model.load_weights(tensors)
            for module in section.roots:
                finalize_layerwise_reload(module, self.model_config)
            if section.is_last:
                _repack_tied_head(self.model)
            return [_Computed.of(module) for module in section.modules]
        except BaseException:
            _abandon_reload(section.modules)
            raise
        finally:
            for computed in serving:
                computed.install()

    def finish_weight_update(self) -> None:
        for computed in self._next:
            computed.install()
        self._next = []

    def shutdown(self) -> None:
        """Nothing is held between updates."""


@dataclass(frozen=True)
class _Computed:
    """What a module computes with: its tensors, and what was made of them (`cpu_linear`)."""

    module: torch.nn.Module
    parameters: dict[str, torch.nn.Parameter]
    data: dict[str, torch.Tensor]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, module: torch.nn.Module) -> _Computed:
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        data = {name: parameter.data for name, parameter in parameters.items()}
        own = {key: value for key, value in vars(module).items() if key not in _CONTAINERS}
        return cls(module, parameters, data, own)

    def make_room(self) -> None:
        """Let what is loaded next be written elsewhere: vLLM writes to the same storage."""
        for name, parameter in self.parameters.items():
            parameter.data = self.data[name].clone()

    def install(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.data = self.data[name]
            self.module._parameters[name] = parameter
        vars(self.module).update(self.attributes)


@dataclass(frozen=True)
class _Section:
    """What is loaded at a time: one decoder layer, or all that is in none."""

    roots: list[torch.nn.Module]
    owns: Callable[[str], bool]  # whether a tensor of the file belongs to it
    is_last: bool = False

    @property
    def modules(self) -> list[torch.nn.Module]:
        return [module for root in self.roots for module in root.modules()]


def _sections(model: torch.nn.Module) -> list[_Section]:
    """Each decoder layer, then the rest; the whole model if it is not built like that.

    The rest comes last: a tied head is packed from embeddings that have been loaded.
    """
    found = dict(model.named_modules()).get("model.layers")
    layers = list(found) if isinstance(found, torch.nn.ModuleList) else []
    within = {id(module) for layer in layers for module in layer.modules()}
    rest = [
        m
        for m in model.modules()
        if id(m) not in within and any(True for _ in m.parameters(recurse=False))
    ]
    if not layers or any(id(inner) in within for module in rest for inner in module.modules()):
        return [_Section([model], lambda name: True, is_last=True)]
    prefixes = [f"model.layers.{index}." for index in range(len(layers))]
    return [
        *(
            _Section([layer], lambda name, prefix=prefix: name.startswith(prefix))  # type: ignore[misc]
            for layer, prefix in zip(layers, prefixes, strict=True)
        ),
        _Section(rest, lambda name: not name.startswith(tuple(prefixes)), is_last=True),
    ]


def _abandon_reload(modules: list[torch.nn.Module]) -> None:
    """Undo what a failed load left begun: each such module gets its own tensors back.

    vLLM keeps the weights that a failed load had buffered and counts on from there, so the
    next, good load would fail as well.
    """
    from vllm.model_executor.model_loader.reload.layerwise import (
        _place_kernel_tensors,
        get_layerwise_info,
    )

    for layer in modules:
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
