"""Whatever is sent, the answer is never a 5xx, never a hang, and an error has OpenAI's shape."""

import json

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

TIMEOUT_S = 60  # an answer of a few tokens takes a fraction of a second
OUR_ROUTES = r"^/(health|ready|v1/(preference|rollouts|feedback|learning|sessions))"
calls = {"our routes": 0, "OpenAI routes": 0}
FUZZ = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module", autouse=True)
def counted():
    yield
    print(
        f"\nfuzzed: {calls['our routes']} calls of our routes, {calls['OpenAI routes']} of OpenAI's"
    )


def test_our_routes(endpoint):
    """What the endpoint's OpenAPI description allows, and what it does not."""
    description = schemathesis.openapi.from_url(f"{endpoint.url}/openapi.json")
    labels = set()
    for found in description.include(path_regex=OUR_ROUTES).get_all_operations():
        operation = found.ok()
        labels.add(operation.label)
        modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
        cases = st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes])

        @FUZZ
        @given(case=cases)
        def each(case):
            calls["our routes"] += 1
            answer = case.call(timeout=TIMEOUT_S)
            check(answer.status_code, answer.text)

        each()
    assert {"PUT /v1/preference", "POST /v1/feedback", "POST /v1/learning/rollback"} <= labels
    assert {"GET /v1/rollouts", "POST /v1/sessions/{id}/close"} <= labels


def check(status, text):
    assert status < 500, (status, text[:500])
    assert "Traceback" not in text
    if status >= 400:
        error = json.loads(text)["error"]
        assert error["message"], text
        assert error["code"] == status, text


def send(endpoint, path, content):
    calls["OpenAI routes"] += 1
    headers = {"Content-Type": "application/json"}
    with httpx.stream(
        "POST", endpoint.url + path, content=content, headers=headers, timeout=TIMEOUT_S
    ) as answer:
        text = answer.read().decode(errors="replace")
    check(answer.status_code, text)
    return answer.status_code


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Rain."}
GOOD = {
    CHAT: {"messages": [USER], "max_tokens": 2},
    COMPLETION: {"prompt": "Rain", "max_tokens": 2},
}

RAW = [
    b"",
    b"{",
    b"nul",
    b"null",
    b"[]",
    b"5",
    b'"text"',
    b"\x00",
    b"\xff\xfe\x00",
    b'{"messages": "\xff"}',
    b'{"messages": ' + b"[" * 20_000,
    b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}",
    b'{"messages": [], "messages": 5}',
    b'{"max_tokens": NaN}',
    b'{"max_tokens": 1e999}',
    b"{}" * 3,
    b"a=b&c=d",
]

FIELDS = {
    CHAT: {
        "messages": [
            None,
            5,
            "hello",
            {},
            [],
            [None],
            ["hello"],
            [[]],
            [{}],
            [{"role": "user"}],
            [{"content": "x"}],
            [{"role": 5, "content": "x"}],
            [{"role": "nobody", "content": "x"}],
            [{"role": "user", "content": 5}],
            [{"role": "user", "content": [{"type": "nothing"}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "assistant", "content": None}],
            [{"role": "assistant", "tool_calls": [{}]}],
            [{"role": "tool", "content": "x"}],
            [{"role": "user", "content": "\ud800"}],
            [{"role": "user", "content": "a\x00b"}],
            [{"role": "user", "content": "rain " * 5000}],
            [USER] * 300,
        ],
        "tools": [5, [{}], [{"type": "function"}], [{"type": "function", "function": {}}]],
        "tool_choice": [5, "required", "auto", {"type": "function", "function": {"name": "x"}}],
        "response_format": [
            5,
            {},
            {"type": "nothing"},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}},
        ],
        "top_logprobs": [-1, 5, 10**6],
        "logprobs": ["x", 5, True],
        "chat_template": ["{{", "{% for %}", "{{ 1 / 0 }}"],
        "chat_template_kwargs": [5, {"messages": 1}],
        "continue_final_message": [True],
        "add_generation_prompt": [False],
        "echo": [True],
        "documents": [5, [{}]],
        "reasoning_effort": ["much", 5],
    },
    COMPLETION: {
        "prompt": [
            None,
            5,
            {},
            "",
            [],
            [[]],
            [None],
            [-1],
            [10**9],
            [1.5],
            [1, "x"],
            ["", ""],
            ["x"] * 300,
            "\ud800",
            "a\x00b",
            "rain " * 5000,
        ],
        "suffix": ["x"],
        "echo": [True],
        "logprobs": [-1, 1000, "x"],
        "prompt_embeds": ["x", 5],
        "best_of": [-1, 2],
    },
}
SHARED = {
    "model": [5, None, "", "nobody", "x" * 10_000],
    "max_tokens": [-1, 0, 10**9, 10**30, "x", 1.5, None],
    "max_completion_tokens": [-1, 10**9, "x"],
    "min_tokens": [-1, 5, "x"],
    "temperature": [-1, 10**30, "x", None, 0],
    "top_p": [-1, 0, 2, "x"],
    "top_k": [-5, 10**9, "x"],
    "min_p": [-1, 2],
    "n": [-1, 0, 10**6, "x", None],
    "stop": [5, [5], ["x"] * 100, "", [""], [None]],
    "stop_token_ids": [[-1], [10**9], ["x"], 5],
    "seed": ["x", -1, 10**30],
    "stream": ["x", 5, None],
    "stream_options": [5, {"include_usage": True}, {"x": 1}],
    "logit_bias": [5, {"x": 1}, {"-1": 1}, {"10000000": 5}, {"5": 10**30}],
    "presence_penalty": [10**30, "x"],
    "repetition_penalty": [0, -1, 10**30],
    "bad_words": [5, [5], [""]],
    "allowed_token_ids": [[], [-1], [10**9]],
    "guided_json": [5, "{"],
    "structured_outputs": [5, {}, {"regex": "("}, {"json": "{"}, {"choice": []}],
    "metadata": [5, [], {"session_id": 5}, {"session_id": "x\x00"}, {"session_id": "x" * 5000}],
    "kv_transfer_params": [5, {"prompt_token_ids": [-1]}, {"prompt_token_ids": "x"}, {"a": 1}],
    "vllm_xargs": [5, {"x": {}}],
    "priority": [5, "x"],
    "truncate_prompt_tokens": [-5, 0, 10**9],
    "prompt_logprobs": [-5, 5, 10**9],
    "request_id": [5, "x"],
    "use_beam_search": [True, "x"],
    "cache_salt": ["", 5],
    "user": [5],
    "ignore_eos": ["x"],
    "nobody_knows_this": [1],
}


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_bytes_that_are_no_request(endpoint, path):
    for content in RAW:
        assert 400 <= send(endpoint, path, content) < 500, content[:40]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_fields_that_hold_what_they_must_not(endpoint, path, stream):
    for field, values in (SHARED | FIELDS[path]).items():
        for value in values:
            body = GOOD[path] | ({"stream": True} if stream else {}) | {field: value}
            try:
                send(endpoint, path, json.dumps(body).encode())
            except AssertionError as error:
                raise AssertionError(f"{field}: {value!r:.60}: {error}") from None
            except httpx.HTTPError as error:
                raise AssertionError(f"{field}: {value!r:.60} gets no answer: {error!r}") from None
    assert endpoint.chat(max_tokens=2).status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@FUZZ
@given(
    path=st.sampled_from([CHAT, COMPLETION]),
    name=st.sampled_from(sorted({*SHARED, *FIELDS[CHAT], *FIELDS[COMPLETION]})),
    value=JSON,
)
def test_fields_that_hold_anything(endpoint, path, name, value):
    send(endpoint, path, json.dumps(GOOD[path] | {name: value}).encode())


def test_header_values_that_are_no_session(endpoint):
    # Not bytes that are no UTF-8: Ray's proxy reads this header too, and fails on them itself.
    for value in ("", "x y", "x" * 4000, "a/b", "ä".encode()):
        answer = httpx.post(
            endpoint.url + CHAT,
            json=GOOD[CHAT],
            headers=[("X-Session-Id", value)],
            timeout=TIMEOUT_S,
        )
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-rollout-recorded"] == "true"
