"""The allow-list: what is trained on, and why the rest is not (case C2)."""

import math

import pytest

from online_sao.engine.trainable import numbers_exclusion, request_exclusion, sampling_exclusion

DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "n": 1, "max_tokens": 16}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"temperature": 0.6, "n": 3, "max_tokens": 5}, None),
        ({"top_p": 0.9}, "sampling:top_p"),
        ({"top_k": 20}, "sampling:top_k"),
        ({"min_p": 0.1}, "sampling:min_p"),
        ({"a_setting_of_a_later_vllm": 1}, "sampling:a_setting_of_a_later_vllm"),
        ({"temperature": 0.0}, "temperature_too_low"),
        ({"temperature": 0.29}, "temperature_too_low"),
        ({"temperature": 0.3}, None),
    ],
)
def test_sampling_exclusion(changed, reason):
    assert sampling_exclusion({**DEFAULTS, **changed}, DEFAULTS, 0.3) == reason


def test_every_other_setting_of_this_vllm_excludes():
    from vllm.sampling_params import SamplingParams

    from online_sao.engine.trainable import ALLOWED_SAMPLING

    plain = SamplingParams()
    defaults = {name: getattr(plain, name) for name in plain.__struct_fields__}
    assert set(defaults) >= ALLOWED_SAMPLING, "a name in the allow-list is no setting"
    for name in set(defaults) - ALLOWED_SAMPLING:
        changed = {**defaults, name: object()}
        assert sampling_exclusion(changed, defaults, 0.3) == f"sampling:{name}"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, None),
        ({"tools": []}, None),
        ({"tools": [{"type": "function"}]}, "request:tools"),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, "request:response_format"),
        ({"echo": True}, "request:echo"),
        ({"echo": False}, None),
        ({"use_beam_search": True}, "request:use_beam_search"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "request:kv_transfer_params"),
    ],
)
def test_request_exclusion(body, reason):
    assert request_exclusion(body) == reason


@pytest.mark.parametrize(
    ("ids", "logprobs", "total", "reason"),
    [
        ([1, 2], [-0.5, 0.0], 4, None),
        ([], [], 2, "empty_answer"),
        ([1, 2], [-0.5], 4, "missing_logprobs"),
        ([1], [math.nan], 2, "non_finite"),  # case C16
        ([1], [-math.inf], 2, "non_finite"),
        ([1], [math.inf], 2, "non_finite"),
        ([1], [0.5], 2, "non_finite"),  # no log-probability is positive
        ([1], [-0.5], 11, "too_long"),
    ],
)
def test_numbers_exclusion(ids, logprobs, total, reason):
    assert numbers_exclusion(ids, logprobs, total, max_tokens=10) == reason
