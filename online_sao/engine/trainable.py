"""Which rollouts may be trained on (docs/http.md): an allow-list, not a block-list.

A rollout is trained only if the learner can recompute the distribution that was sampled.
Pure functions on plain values, testable without vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# Sampling settings that leave the sampled distribution at softmax(logits / temperature).
# Everything else must be at its default, so a setting that a new vLLM adds is excluded
# until somebody has looked at it.
ALLOWED_SAMPLING = frozenset(
    {
        "n",
        "temperature",
        "max_tokens",
        "stop",
        "stop_token_ids",
        "seed",
        "logprobs",
        # How the answer is returned, not how it is sampled:
        "output_kind",
        "stream_interval",
        "flat_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "skip_clone",
        "output_text_buffer_length",
        # Derived by vLLM:
        "_eos_token_id",
        "_all_stop_token_ids",
        "_bad_words_token_ids",
        "_watermarking_skipped",
        "skip_reading_prefix_cache",
    }
)

# Request fields outside the sampling settings that change what the model may emit.
EXCLUDING_FIELDS = (
    "tools",
    "functions",
    "response_format",
    "suffix",
    "echo",
    "prompt_embeds",
    "use_beam_search",  # the answer is searched for, not sampled
    "kv_transfer_params",  # may hold a prompt that is not what the messages say
)


def sampling_exclusion(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], min_temperature: float
) -> str | None:
    """Why a rollout sampled with `settings` is not trainable; None if it is.

    `settings` and `defaults` map the names of vLLM's SamplingParams to their values.
    """
    for name, value in settings.items():
        if name not in ALLOWED_SAMPLING and value != defaults.get(name):
            return f"sampling:{name}"
    if settings["temperature"] < min_temperature:
        return "temperature_too_low"
    return None


def request_exclusion(body: Mapping[str, Any]) -> str | None:
    """Why a request's answers are not trainable, whatever its sampling; None if they are."""
    for name in EXCLUDING_FIELDS:
        value = body.get(name)
        if name == "response_format" and isinstance(value, Mapping) and value.get("type") == "text":
            continue
        if value:
            return f"request:{name}"
    return None


def numbers_exclusion(
    token_ids: Iterable[int], behavior_logprobs: Iterable[float], num_tokens: int, max_tokens: int
) -> str | None:
    """Why the recorded arrays of a finished answer are not trainable; None if they are."""
    ids, logprobs = list(token_ids), list(behavior_logprobs)
    if not ids:
        return "empty_answer"
    if len(ids) != len(logprobs):
        return "missing_logprobs"
    # NaN fails the comparison, and so do both infinities.
    if not all(-float("inf") < value <= 1e-3 for value in logprobs):
        return "non_finite"
    if num_tokens > max_tokens:
        return "too_long"
    return None
