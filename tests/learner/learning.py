"""Rollouts, settings and learners for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from online_sao.config import LearnerConfig, preset_settings
from online_sao.learner.batch import make_batch
from online_sao.learner.learner import Learner
from online_sao.types import Rollout, RolloutState, StoredVerdict, WeightSpan

PROMPT = (1, 45, 46, 47, 2, 201, 1)
ANSWER = (60, 300, 61, 33, 2)
SETTINGS: dict[str, Any] = {
    "compute_dtype": "float32",
    "threads": 1,
    "policy_lr": 1e-3,
    "critic_lr": 1e-3,
    "critic_warmup_updates": 0,
}
"""On top of a preset: exact arithmetic, and steps that a test can see."""


def make_rollout(
    name: str = "a",
    *,
    prompt: Sequence[int] = PROMPT,
    tokens: Sequence[int] = ANSWER,
    logprobs: Iterable[float] | float = -6.0,
    reward: float | None = 1.0,
    temperature: float = 1.0,
    version: int = 0,
    **fields: Any,
) -> Rollout:
    """A rewarded rollout (pending without a reward); one number of `logprobs` is for all."""
    if isinstance(logprobs, float):
        logprobs = [logprobs] * len(tokens)
    return Rollout(
        id=name,
        response_id=f"chatcmpl-{name}",
        choice=0,
        prompt_token_ids=np.array(prompt, np.int32),
        token_ids=np.array(tokens, np.int32),
        behavior_logprobs=np.array(list(logprobs), np.float32),
        weight_spans=(WeightSpan(version, 0, len(tokens)),),
        temperature=temperature,
        messages=None,
        answer="",
        finish_reason="stop",
        **{
            "state": RolloutState.PENDING if reward is None else RolloutState.REWARDED,
            "verdict": None if reward is None else verdict(reward),
        }
        | fields,
    )


def verdict(reward: float) -> StoredVerdict:
    return StoredVerdict(quality=1.0, style=reward, reward=reward)


def next_turn(
    before: Rollout, name: str, observation: Sequence[int], tokens: Sequence[int], **fields: Any
) -> Rollout:
    """The rollout that follows `before` in its session, after `observation`."""
    history = [*before.prompt_token_ids.tolist(), *before.token_ids.tolist()]
    return make_rollout(name, prompt=[*history, *observation], tokens=tokens, **fields)


def settings(preset: str = "sao", **changes: Any) -> LearnerConfig:
    return LearnerConfig.model_validate(
        {**preset_settings(preset), "preset": preset, **SETTINGS, **changes}
    )


def make_learner(model: Path, preset: str = "sao", **changes: Any) -> Learner:
    return Learner(settings(preset, **changes), str(model))


def on_policy(learner: Learner, rollout: Rollout) -> Rollout:
    """`rollout` with the behavior log-probs of the learner's own policy, now."""
    batch = make_batch([[rollout]])
    logprobs = learner.policy.logprobs(batch)[batch.action_mask]
    return replace(rollout, behavior_logprobs=logprobs.numpy().astype(np.float32))


def everything(learner: Learner) -> dict[str, torch.Tensor]:
    """Copies of all tensors that an update may change: masters, models, moments."""
    parts = {"policy": learner.policy.parameters, "policy_model": learner.policy.model}
    if learner.critic is not None:
        parts |= {"critic": learner.critic.parameters, "critic_model": learner.critic.backbone}
    found = {}
    for part, holder in parts.items():
        if isinstance(holder, torch.nn.Module):
            tensors = dict(holder.named_parameters())
        else:
            tensors = holder.masters() | {
                f"optimizer.{name}": tensor for name, tensor in holder.optimizer_tensors().items()
            }
        found |= {f"{part}.{name}": tensor.detach().clone() for name, tensor in tensors.items()}
    return found


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    """Names of what is not equal (NaN equals NaN), and of what is in one of the two only."""
    both = before.keys() & after.keys()
    return (before.keys() ^ after.keys()) | {
        name
        for name in both
        if not torch.allclose(before[name], after[name], rtol=0, atol=0, equal_nan=True)
    }


@contextmanager
def kept_states(backbone: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """The last hidden states of each forward pass inside, with their gradients retained."""
    kept: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        output.retain_grad()
        kept.append(output)

    hook = backbone.norm.register_forward_hook(keep)
    yield kept
    hook.remove()


# Tiny random models of other architectures

SIZES = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def architecture(name: str) -> Any:
    """The transformers config of a tiny model."""
    import transformers as t

    match name:
        case "llama":
            return t.LlamaConfig(**SIZES)
        case "qwen2":
            return t.Qwen2Config(**SIZES)
        case "qwen3":
            return t.Qwen3Config(head_dim=8, **SIZES)
        case "qwen3_moe":
            return t.Qwen3MoeConfig(head_dim=8, num_experts=4, **EXPERTS, **SIZES)
        case "qwen2_moe":
            return t.Qwen2MoeConfig(
                num_experts=4, shared_expert_intermediate_size=32, **EXPERTS, **SIZES
            )
        case "mixtral":
            return t.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **SIZES)
        case "gpt2":
            sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
            return t.GPT2Config(vocab_size=512, bos_token_id=None, eos_token_id=None, **sizes)
        case "opt":  # its MLP has no name of its own
            return t.OPTConfig(ffn_dim=64, word_embed_proj_dim=32, **SIZES)
        case "mamba":  # no attention at all
            return t.MambaConfig(vocab_size=512, hidden_size=32, num_hidden_layers=2)
        case "gemma2":  # caps its logits
            capped = {"final_logit_softcapping": 1.0, "head_dim": 8}
            return t.Gemma2Config(**capped, **SIZES)
        case "granite":  # divides its logits
            return t.GraniteConfig(logits_scaling=8.0, **SIZES)
    raise ValueError(name)


def save_model(name: str, folder: Path) -> Path:
    """A random model of an `architecture`, float32, as a Hugging Face folder."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(architecture(name), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder
