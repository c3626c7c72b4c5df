"""A Llama decoder with the forward and backward pass of a layer written out, for the CPU.

The same mathematics and parameters as the transformers model (tests compare values and all
gradients); only done in fewer and larger steps. On a CPU an update of one rollout spends as
much time in thousands of small operations as in its matrix products: here a layer is one
autograd node, query, key and value are one product, gate and up another, keys are not
repeated per query head, and nothing is computed for what is frozen.

Notation: B sequences of T tokens, M = B * T; H hidden size, F inner size, D head size,
K key-value heads, G query heads per key-value head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MAX_SCORES = 1 << 20
"""B * T * T up to which it is used: it keeps a layer's attention probabilities for the backward
pass. Beyond, the fused kernel of PyTorch, which recomputes them, is the better choice."""


class FusedDecoder:
    """Computes the last hidden states of a transformers Llama body.

    The parameters stay the model's own: joined ones become views into one tensor, so whoever
    writes to a parameter in place writes to the joined tensor too.
    """

    def __init__(self, body: Any) -> None:
        self._body = body
        self._layers = [_Layer.of(layer, body.config) for layer in body.layers]

    @staticmethod
    def supports(body: Any) -> bool:
        """Whether `body` computes what is written here, and on a CPU."""
        config = body.config
        return (
            getattr(config, "model_type", None) == "llama"
            and config.hidden_act == "silu"
            and not config.attention_bias
            and not config.mlp_bias
            and next(body.parameters()).device.type == "cpu"
        )

    def fits(self, token_ids: Tensor) -> bool:
        batch, length = token_ids.shape
        return batch * length * length <= MAX_SCORES

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[B, T] to [B, T, H]. Rows may be padded at the right: causal attention never looks
        there, and what comes out there means nothing."""
        body = self._body
        batch, length = token_ids.shape
        hidden = body.embed_tokens(token_ids)
        cos, sin = body.rotary_emb(hidden, torch.arange(length)[None])
        half = cos.shape[-1] // 2  # both halves of transformers' cos and sin are the same
        shape = _Shape(
            batch,
            length,
            cos[0, :, None, :half].contiguous(),
            sin[0, :, None, :half].contiguous(),
            torch.full((length, length), -math.inf, dtype=hidden.dtype).triu_(1),
        )
        states = hidden.flatten(0, 1)
        for layer in self._layers:
            states = _LayerFunction.apply(states, layer, shape, *layer.parameters)
        return body.norm(states.view(batch, length, -1))


@dataclass(frozen=True)
class _Shape:
    """What all layers share in one pass."""

    batch: int
    length: int
    cos: Tensor  # [T, 1, D / 2]
    sin: Tensor
    mask: Tensor  # [T, T], -inf above the diagonal


@dataclass(frozen=True)
class _Layer:
    """One layer's weights, as transformers names them and joined."""

    parameters: tuple[nn.Parameter, ...]  # norm, query, key, value, out, norm, gate, up, down
    qkv: Tensor  # [(K * G + 2 K) * D, H]
    gate_up: Tensor  # [2 F, H]
    eps: float
    num_kv_heads: int
    group: int  # G
    head_size: int

    @classmethod
    def of(cls, layer: Any, config: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        query, key, value = (
            attention.q_proj.weight,
            attention.k_proj.weight,
            attention.v_proj.weight,
        )
        head_size = attention.head_dim
        num_kv_heads = key.shape[0] // head_size
        return cls(
            (
                layer.input_layernorm.weight,
                query,
                key,
                value,
                attention.o_proj.weight,
                layer.post_attention_layernorm.weight,
                mlp.gate_proj.weight,
                mlp.up_proj.weight,
                mlp.down_proj.weight,
            ),
            _join(query, key, value),
            _join(mlp.gate_proj.weight, mlp.up_proj.weight),
            config.rms_norm_eps,
            num_kv_heads,
            query.shape[0] // key.shape[0],
            head_size,
        )


class _LayerFunction(torch.autograd.Function):
    """states [M, H] -> states [M, H]: attention and MLP, each with its norm and residual."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, layer: _Layer, shape: _Shape, *weights: Tensor) -> Tensor:
        norm_1, _, _, _, out, norm_2, _, _, down = weights
        normed_1, scale_1 = _rms_norm(states, layer.eps)
        qkv = (normed_1 * norm_1) @ layer.qkv.T
        query, key, value = _split_heads(qkv, layer, shape)
        scores = torch.baddbmm(
            shape.mask.repeat(layer.group, 1),
            query,
            key.transpose(1, 2),
            alpha=layer.head_size**-0.5,
        )
        probs = scores.softmax(-1)  # [B K, G T, T]
        attended = _merge_heads(probs @ value, layer, shape)
        middle = torch.addmm(states, attended, out.T)

        normed_2, scale_2 = _rms_norm(middle, layer.eps)
        gate_up = (normed_2 * norm_2) @ layer.gate_up.T
        gate, up = gate_up.chunk(2, dim=-1)
        activated = nn.functional.silu(gate)
        inner = activated * up
        result = torch.addmm(middle, inner, down.T)
        ctx.layer, ctx.shape = layer, shape
        ctx.save_for_backward(
            *(normed_1, scale_1, query, key, value, probs, attended),
            *(normed_2, scale_2, gate_up, activated, inner, *weights),
        )
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, shape = ctx.layer, ctx.shape
        normed_1, scale_1, query, key, value, probs, attended = ctx.saved_tensors[:7]
        normed_2, scale_2, gate_up, activated, inner, *weights = ctx.saved_tensors[7:]
        norm_1, _, _, _, out, norm_2, _, _, down = weights
        needs_states, _, _, *needs = ctx.needs_input_grad
        needs_attention = needs_states or any(needs[:5])
        grads: list[Tensor | None] = [None] * 9

        # MLP
        if needs[8]:
            grads[8] = grad.T @ inner
        if not (needs_attention or any(needs[5:8])):
            return None, None, None, *grads
        grad_inner = grad @ down
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad_inner, activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_inner.mul_(up), gate, grad_input=grad_gate)
        if needs[6] or needs[7]:
            joined = grad_gate_up.T @ (normed_2 * norm_2)
            grads[6], grads[7] = joined.chunk(2)
        if not (needs_attention or needs[5]):
            return None, None, None, *grads
        grad_middle, grads[5] = _rms_norm_backward(
            grad, grad_gate_up @ layer.gate_up, normed_2, scale_2, norm_2, needs[5]
        )
        if not needs_attention:
            return None, None, None, *grads

        # attention
        if needs[4]:
            grads[4] = grad_middle.T @ attended
        grad_attended = _split(grad_middle @ out, layer, shape)  # [B K, G T, D]
        grad_probs = grad_attended @ value.transpose(1, 2)
        grad_value = probs.transpose(1, 2) @ grad_attended
        grad_scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
        scale = layer.head_size**-0.5
        grad_query = (grad_scores @ key).mul_(scale)
        grad_key = (grad_scores.transpose(1, 2) @ query).mul_(scale)
        grad_qkv = _join_heads(grad_query, grad_key, grad_value, layer, shape)
        if any(needs[1:4]):
            joined = grad_qkv.T @ (normed_1 * norm_1)
            sizes = [weight.shape[0] for weight in weights[1:4]]
            grads[1], grads[2], grads[3] = joined.split(sizes)
        if not (needs_states or needs[0]):
            return None, None, None, *grads
        grad_states, grads[0] = _rms_norm_backward(
            grad_middle, grad_qkv @ layer.qkv, normed_1, scale_1, norm_1, needs[0]
        )
        return grad_states, None, None, *grads


def _join(*parameters: nn.Parameter) -> Tensor:
    """One tensor with the rows of all; the parameters become views into it."""
    joined = torch.cat([parameter.detach() for parameter in parameters])
    start = 0
    for parameter in parameters:
        end = start + parameter.shape[0]
        parameter.data = joined[start:end]
        start = end
    return joined


def _rms_norm(states: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """states / rms(states), before the weight, and 1 / rms [M, 1] in float32."""
    wide = states.float()
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = (scale.square_() / states.shape[-1] + eps).rsqrt_()
    if wide is states:
        return states * scale, scale
    return wide.mul_(scale).to(states.dtype), scale


def _rms_norm_backward(
    residual: Tensor, grad: Tensor, normed: Tensor, scale: Tensor, weight: Tensor, needs: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the states (with that of the residual path added) and of the weight."""
    grad_weight = (grad * normed).sum(0) if needs else None
    wide_grad, wide_normed = (grad * weight).float(), normed.float()
    along = (wide_grad * wide_normed).mean(-1, keepdim=True)
    inner = torch.addcmul(wide_grad, wide_normed, along, value=-1).mul_(scale)
    return inner.to(residual.dtype).add_(residual), grad_weight


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [B, T, heads, D]; with -sin it is undone."""
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.empty(heads.shape, dtype=heads.dtype)
    out_1, out_2 = rotated.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_1).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_2).addcmul_(first, sin)
    return rotated


def _split_heads(qkv: Tensor, layer: _Layer, shape: _Shape) -> tuple[Tensor, Tensor, Tensor]:
    """[M, (K G + 2 K) D] to query [B K, G T, D], key and value [B K, T, D], rotated."""
    num_kv, group = layer.num_kv_heads, layer.group
    heads = qkv.view(shape.batch, shape.length, -1, layer.head_size)
    turned = _rotate(heads[:, :, : num_kv * (group + 1)], shape.cos, shape.sin)
    query = _split(turned[:, :, : num_kv * group], layer, shape)
    key = turned[:, :, num_kv * group :].transpose(1, 2)
    value = heads[:, :, num_kv * (group + 1) :].transpose(1, 2)
    return query, key.flatten(0, 1), value.flatten(0, 1)


def _join_heads(query: Tensor, key: Tensor, value: Tensor, layer: _Layer, shape: _Shape) -> Tensor:
    """The gradient of `_split_heads`: back to [M, (K G + 2 K) D], the rotation undone."""
    num_kv, group = layer.num_kv_heads, layer.group
    heads = torch.empty(
        (shape.batch, shape.length, num_kv * (group + 2), layer.head_size), dtype=query.dtype
    )
    heads[:, :, : num_kv * group] = _merge_heads(query, layer, shape).view(
        shape.batch, shape.length, -1, layer.head_size
    )
    per_head = (shape.batch, num_kv, shape.length, layer.head_size)
    turned = heads[:, :, : num_kv * (group + 1)]
    turned[:, :, num_kv * group :] = key.view(per_head).transpose(1, 2)
    heads[:, :, num_kv * (group + 1) :] = value.view(per_head).transpose(1, 2)
    turned.copy_(_rotate(turned, shape.cos, -shape.sin))
    return heads.view(shape.batch * shape.length, -1)


def _split(merged: Tensor, layer: _Layer, shape: _Shape) -> Tensor:
    """[B, T, K G, D] or [M, K G D] to [B K, G T, D]."""
    heads = merged.reshape(
        shape.batch, shape.length, layer.num_kv_heads, layer.group, layer.head_size
    )
    return heads.permute(0, 2, 3, 1, 4).reshape(
        shape.batch * layer.num_kv_heads, layer.group * shape.length, layer.head_size
    )


def _merge_heads(split: Tensor, layer: _Layer, shape: _Shape) -> Tensor:
    """[B K, G T, D] to [M, K G D]."""
    heads = split.view(shape.batch, layer.num_kv_heads, layer.group, shape.length, layer.head_size)
    return heads.permute(0, 3, 1, 2, 4).reshape(shape.batch * shape.length, -1)
