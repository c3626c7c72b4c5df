"""The critic: a copy of the start policy's body with a scalar head; attention frozen."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from online_sao.config import LearnerConfig
from online_sao.errors import ModelError
from online_sao.learner.batch import Batch
from online_sao.learner.decoder import Decoder
from online_sao.learner.parameters import TrainedParameters
from online_sao.learner.policy import load_causal_lm

# Parameter names by role, over the architectures that transformers names in these ways.
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)$")
_MLP = re.compile(r"^(?:mlp|block_sparse_moe|feed_forward|ffn)\.")
_ATTENTION = re.compile(r"^(?:self_attn|attn|attention|self_attention|linear_attn)\.")
_NORM = re.compile(r"norm|^ln_")
# A router picks experts; it is neither an expert nor a dense projection.
_ROUTER = re.compile(r"\.(?:gate|router|shared_expert_gate)\.|\.e_score_correction_bias$")


def mlp_parameter_names(backbone: nn.Module) -> set[str]:
    """Names of the MLP or MoE expert projections of a decoder; routers are left out.

    Raises ModelError for an architecture whose roles cannot be told apart: a decoder layer
    without MLP or attention weights, or weights in a layer that are neither of these.
    """
    chosen: set[str] = set()
    roles: dict[str, set[str]] = {}
    for name, _ in backbone.named_parameters():
        in_layer = _LAYER.search(name)
        if in_layer is None:
            continue  # embeddings and the final norm
        layer, rest = in_layer.groups()
        found = roles.setdefault(layer, set())
        if _MLP.match(rest):
            found.add("mlp")
            if not _ROUTER.search(f".{rest}"):
                chosen.add(name)
        elif _ATTENTION.match(rest):
            found.add("attention")
        elif not _NORM.search(rest):
            raise ModelError(
                f"The critic cannot tell what {name} does, so it cannot freeze attention only; "
                'set learner.critic_trainable = "all" for this architecture.'
            )
    if not roles or any(found != {"mlp", "attention"} for found in roles.values()):
        raise ModelError(
            f"{type(backbone).__name__} has layers in which the critic finds no MLP or no "
            'attention weights; set learner.critic_trainable = "all" for this architecture.'
        )
    return chosen


class Critic:
    """V, the expected return at a state. Zero everywhere before it is first trained."""

    def __init__(self, model: str, config: LearnerConfig, device: torch.device) -> None:
        dtype = getattr(torch, config.compute_dtype)
        self.backbone = load_causal_lm(model, dtype, device).base_model
        self._decoder = Decoder(self.backbone)
        hidden_size = self.backbone.config.get_text_config().hidden_size
        # float32: values are compared with rewards at a precision that bfloat16 lacks.
        self.head = nn.Linear(hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if config.critic_trainable == "mlp":
            trained = mlp_parameter_names(self.backbone)
            for name, parameter in self.backbone.named_parameters():
                parameter.requires_grad_(name in trained)
        named = [
            *((f"backbone.{n}", p) for n, p in self.backbone.named_parameters() if p.requires_grad),
            *((f"head.{n}", p) for n, p in self.head.named_parameters()),
        ]
        self.parameters = TrainedParameters(
            named,
            betas=config.adam_betas,
            weight_decay=config.weight_decay,
            clip_quantile=config.grad_clip_quantile,
            clip_window=config.window,
        )

    def values(self, batch: Batch) -> Tensor:
        """V(a_t) [B, T] float32: the head's output at t - 1, the state before action token t.

        Zero, without gradient, outside the action mask: only states before an action count.
        """
        rows, columns = batch.state_index
        states = self._decoder(batch)[rows, columns]
        return batch.scatter(self.head(states.float())[:, 0])
