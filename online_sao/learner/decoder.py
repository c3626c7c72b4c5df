"""Last hidden states of a transformers decoder, by the quickest of three equal ways."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from online_sao.learner.batch import Batch
from online_sao.learner.fused_decoder import FusedDecoder

EAGER_ATTENTION_TOKENS = 256
"""Up to here plain attention is quicker on a CPU than PyTorch's fused kernel, whose backward
pass is slow for short sequences; beyond, its [T, T] matrices cost more than they save."""


class Decoder:
    """`body` is a transformers model without its head; its parameters stay its own."""

    def __init__(self, body: Any) -> None:
        self._body = body
        self._fused = FusedDecoder(body) if FusedDecoder.supports(body) else None

    def __call__(self, batch: Batch) -> Tensor:
        """[B, T, H]; what stands at padding means nothing."""
        if self._fused is not None and self._fused.fits(batch.token_ids):
            return self._fused(batch.token_ids)
        mask = batch.attention_mask if batch.is_padded else None
        is_short = batch.token_ids.shape[1] <= EAGER_ATTENTION_TOKENS
        on_cpu = batch.token_ids.device.type == "cpu"
        self._body.set_attn_implementation("eager" if is_short and on_cpu else "sdpa")
        return self._body(
            input_ids=batch.token_ids, attention_mask=mask, use_cache=False
        ).last_hidden_state
