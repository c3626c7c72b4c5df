"""The policy under its current weights, and the start policy that anchors it."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from online_sao.config import LearnerConfig
from online_sao.errors import ModelError
from online_sao.learner.batch import Batch
from online_sao.learner.decoder import Decoder
from online_sao.learner.parameters import TrainedParameters

HEAD_TOLERANCE = 0.02  # of the largest logit; above the rounding of bfloat16


def load_causal_lm(model: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A transformers causal language model in evaluation mode (no dropout anywhere).

    Raises ModelError.
    """
    from transformers import AutoModelForCausalLM

    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation="sdpa"
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(f"The model {model} cannot be loaded: {first}") from None
    return loaded.to(device).eval()


class Policy:
    """pi, trained in full; with the start weights beside it when they anchor it."""

    def __init__(self, model: str, config: LearnerConfig, device: torch.device) -> None:
        dtype = getattr(torch, config.compute_dtype)
        self.model = load_causal_lm(model, dtype, device)
        _check_head(self.model)
        self._decoder = Decoder(self.model.base_model)
        self.parameters = TrainedParameters(
            self.model.named_parameters(),  # tied tensors appear once
            betas=config.adam_betas,
            weight_decay=config.weight_decay,
            clip_quantile=config.grad_clip_quantile,
            clip_window=config.window,
        )
        self._start: Any = None
        self.start_weights: dict[str, Tensor] = {}
        """Under the names of `parameters`; empty if nothing leads back to the start policy."""
        if config.kl_coef > 0 or config.start_decay > 0:
            self._start = load_causal_lm(model, dtype, device).requires_grad_(False)
            self._start_decoder = Decoder(self._start.base_model)
            self.start_weights = {n: p.detach() for n, p in self._start.named_parameters()}

    def action_logits(self, batch: Batch) -> Tensor:
        """Float32 logits [N, V] of the distributions that the action tokens were drawn from.

        At each request's temperature; only at the N positions that precede an action token,
        because the vocabulary makes the head as dear as several layers.
        """
        return _action_logits(self.model.lm_head, self._decoder, batch)

    @torch.no_grad()
    def start_logits(self, batch: Batch) -> Tensor:
        """`action_logits` of the start policy, without gradient."""
        return _action_logits(self._start.lm_head, self._start_decoder, batch)

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """log pi of the action tokens, [B, T], without gradient."""
        return action_logprobs(self.action_logits(batch), batch)

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The current weights under their Hugging Face names, on the CPU, in `dtype`."""
        return {
            name: parameter.detach().to(device="cpu", dtype=dtype).contiguous()
            for name, parameter in self.model.named_parameters()
        }


def action_logprobs(logits: Tensor, batch: Batch) -> Tensor:
    """log pi(a_t|s_t) [B, T] from `action_logits`; zero outside the action mask."""
    actions = batch.token_ids[batch.action_mask]
    chosen = logits.gather(-1, actions[:, None])[:, 0]
    return batch.scatter(chosen - logits.logsumexp(-1))


@torch.no_grad()
def _check_head(model: Any) -> None:
    """ModelError unless the logits are what the head makes of the last hidden states.

    Some architectures scale or cap them afterwards, which `_action_logits` would leave out.
    """
    ids = torch.arange(4, device=model.device)[None]
    logits = model(input_ids=ids, use_cache=False).logits.float()
    head = getattr(model, "lm_head", None)
    if head is not None:
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        gap = (head(states).float() - logits).abs().max()
        if gap <= HEAD_TOLERANCE * logits.abs().max():
            return
    raise ModelError(
        f"{type(model).__name__} does more to its logits than its head (it scales or caps "
        "them, or the head has another name), which the learner cannot repeat; take another model."
    )


def _action_logits(head: Any, decoder: Decoder, batch: Batch) -> Tensor:
    rows, columns = batch.state_index
    states = decoder(batch)[rows, columns]
    return head(states).float() / batch.temperature[batch.action_mask][:, None]
