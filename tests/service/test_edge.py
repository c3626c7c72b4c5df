"""The edge alone, around an app that only answers: keys, limits, what is counted.

With vLLM behind it: test_operations.py.
"""

import asyncio
import json
from types import SimpleNamespace

import pytest

from online_sao.config import ServiceConfig
from online_sao.service.http import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, CLIENT_CLOSED, Edge

USER, ADMIN = "user-key-of-the-tests", "admin-key-of-the-tests"


class Bench:
    def __init__(self, **settings):
        self.reached = []
        self.counted = []
        config = ServiceConfig.model_validate(settings)
        self.edge = Edge(self.app, config, dict, lambda *seen: self.counted.append(seen[:2]))

    async def app(self, scope, receive, send):
        self.reached.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def ask(self, path, method="GET", key=None, parts=(b"",), headers=(), query=b"", delay_s=0.0):
        """(status, parsed body, headers) of the answer."""
        return asyncio.run(self._ask(path, method, key, parts, headers, query, delay_s))

    async def _ask(self, path, method, key, parts, headers, query, delay_s):
        sent, waiting = [], list(parts)
        if key is not None:
            headers = [(b"authorization", b"Bearer " + key.encode("latin-1")), *headers]

        async def receive():
            await asyncio.sleep(delay_s)
            part = waiting.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(waiting)}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "path": path,
            "method": method,
            "headers": list(headers),
            "query_string": query,
        }
        await self.edge(scope, receive, send)
        body = b"".join(m.get("body", b"") for m in sent)
        return sent[0]["status"], json.loads(body or b"{}"), dict(sent[0].get("headers", []))


@pytest.fixture
def keys(monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, USER)
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, ADMIN)


@pytest.mark.usefixtures("keys")
class TestKeys:
    @pytest.mark.parametrize(
        "path", ["/v1/models", "/metrics", "/ready", "/v1/feedback", "/", "/x"]
    )
    @pytest.mark.parametrize(
        "key", [None, "", "wrong", USER + "x", USER[:-1], USER.upper(), "ü", f" {USER}"]
    )
    def test_without_the_key_nothing_is_reached(self, path, key):
        bench = Bench()
        status, body, _ = bench.ask(path, key=key)
        assert (status, body["error"]["type"]) == (401, "authentication_error")
        assert bench.reached == []

    def test_only_health_is_open(self):
        assert Bench().ask("/health")[0] == 200

    @pytest.mark.parametrize("query", [f"api_key={USER}", f"key={ADMIN}", f"authorization={ADMIN}"])
    def test_a_key_in_the_query_is_no_key(self, query):
        assert Bench().ask("/v1/models", query=query.encode())[0] == 401

    @pytest.mark.parametrize(
        "path", ["/v1/learning", "/v1/learning/rollback", "/v1/preference", "/v1/rollouts/x"]
    )
    def test_admin_routes_want_the_admin_key(self, path):
        bench = Bench()
        assert bench.ask(path, key=USER)[0] == 401
        assert bench.reached == []
        assert bench.ask(path, key=ADMIN)[0] == 200

    @pytest.mark.parametrize("key", [USER, ADMIN])
    def test_either_key_opens_the_rest(self, key):
        assert Bench().ask("/v1/models", key=key)[0] == 200

    def test_a_refusal_names_no_key(self):
        _, body, headers = Bench().ask("/v1/models", key="guess-of-a-key")
        assert "guess" not in json.dumps(body) + str(headers)

    @pytest.mark.parametrize(
        "path", ["//v1/learning", "/V1/LEARNING", "/v1/./learning", "/v1//rollouts"]
    )
    def test_other_spellings_of_an_admin_path_reach_no_route(self, path):
        """The edge lets a user pass there; the app has no such route (test_routes.py)."""
        bench = Bench()
        bench.ask(path, key=USER)
        assert bench.reached == [path]  # as it came


def test_without_keys_all_is_open():
    assert Bench().ask("/v1/learning")[0] == 200


@pytest.mark.parametrize(
    ("there", "path", "key", "status"),
    [
        ({API_KEY_VARIABLE: USER}, "/v1/learning", USER, 200),
        ({API_KEY_VARIABLE: USER}, "/v1/learning", None, 401),
        ({API_KEY_VARIABLE: USER, ADMIN_KEY_VARIABLE: USER}, "/v1/learning", USER, 200),
        ({ADMIN_KEY_VARIABLE: ADMIN}, "/v1/chat/completions", None, 200),
        ({ADMIN_KEY_VARIABLE: ADMIN}, "/v1/learning", None, 401),
        ({ADMIN_KEY_VARIABLE: ADMIN}, "/v1/learning", ADMIN, 200),
    ],
)
def test_one_key_alone(monkeypatch, there, path, key, status):
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    assert Bench().ask(path, key=key)[0] == status


class TestLimits:
    def test_a_body_that_says_it_is_too_large_is_not_read(self):
        bench = Bench(max_body_bytes=2000)
        length = [(b"content-length", b"100000000")]
        assert bench.ask("/v1/feedback", "POST", parts=[], headers=length)[0] == 413

    def test_a_body_that_does_not_say_so_is_read_up_to_the_limit(self):
        bench = Bench(max_body_bytes=2000)
        parts = [b"x" * 1000] * 100_000
        status, body, _ = bench.ask("/v1/feedback", "POST", parts=parts)
        assert status == 413
        assert "2000 bytes" in body["error"]["message"]
        assert bench.reached == []

    @pytest.mark.parametrize("length", [b"-1", b"9" * 9000, b"1e9", b"x", b"\xb2"])
    def test_a_length_that_is_no_length_is_not_trusted(self, length):
        bench = Bench(max_body_bytes=2000)
        status, _, _ = bench.ask(
            "/v1/feedback", "POST", parts=[b"x" * 3000], headers=[(b"content-length", length)]
        )
        assert status == 413

    def test_a_body_that_trickles_in(self):
        bench = Bench(body_timeout_s=0.05)
        status, body, _ = bench.ask("/v1/feedback", "POST", parts=[b"x"] * 100, delay_s=0.02)
        assert status == 408
        assert "0.05 s" in body["error"]["message"]

    def test_beyond_the_limit_of_ongoing_requests_the_answer_is_429(self):
        bench = Bench(max_ongoing_requests=3)
        bench.edge.ongoing = 3
        status, body, headers = bench.ask("/v1/chat/completions", "POST", parts=[b"{}"])
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert int(headers[b"retry-after"]) > 0
        assert bench.ask("/v1/feedback", "POST")[0] == 200  # only generating is bounded

    def test_what_was_answered_or_failed_is_no_longer_ongoing(self):
        bench = Bench(max_ongoing_requests=1)
        bench.edge = Edge(bench.app, ServiceConfig(max_ongoing_requests=1), self.context)
        for _ in range(2):
            assert bench.ask("/v1/chat/completions", "POST", parts=(b"{}",))[0] == 200

        async def fails(scope, receive, send):
            raise RuntimeError("inside")

        bench.edge = Edge(fails, ServiceConfig(max_ongoing_requests=1), self.context)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="inside"):
                bench.ask("/v1/chat/completions", "POST", parts=(b"{}",))

    def context(self, **_):
        return SimpleNamespace(weight_version=0, recorded=True, store_ok=True)

    @pytest.mark.parametrize(
        "body",
        [
            {"n": 65},
            {"n": 10**30},
            {"prompt": ["x"] * 65},
            {"prompt": [[1, 2]] * 33, "n": 2},
        ],
    )
    def test_too_many_answers_in_one_request(self, body):
        bench = Bench()
        path = "/v1/completions"
        status, answer, _ = bench.ask(path, "POST", parts=[json.dumps(body).encode()])
        assert status == 400
        assert "64" in answer["error"]["message"]
        assert bench.reached == []


@pytest.mark.parametrize(
    "body", [b'{"stop": ["\\ud800"]}', b'{"x": {"\\uDFFF": 1}}', b'{"y": "\xed\xa0\x80"}']
)
def test_lone_surrogates_are_refused_and_whole_characters_are_not(body):
    bench = Bench()
    status, answer, _ = bench.ask("/v1/completions", "POST", parts=[body])
    assert status == 400
    assert "surrogate" in answer["error"]["message"]
    assert bench.reached == []
    whole = b'{"n": 65, "x": "\\ud83d\\ude00 \xf0\x9f\x98\x80"}'
    assert "64" in bench.ask("/v1/completions", "POST", parts=[whole])[1]["error"]["message"]


def test_what_was_answered_is_counted():
    bench = Bench(max_body_bytes=2000)
    bench.ask("/health")
    bench.ask("/v1/feedback", "POST", parts=[b"x" * 3000])
    assert bench.counted == [("/health", 200), ("/v1/feedback", 413)]


def test_a_client_that_leaves_before_its_answer_is_no_success():
    async def app(scope, receive, send):
        raise asyncio.CancelledError

    bench = Bench()
    bench.edge = Edge(app, ServiceConfig(), dict, lambda *seen: bench.counted.append(seen[:2]))
    with pytest.raises(asyncio.CancelledError):
        bench.ask("/v1/models")
    assert bench.counted == [("/v1/models", CLIENT_CLOSED)]


class TestReceipt:
    """What an answer says of itself: its id, its version, whether it was recorded."""

    def ask(self, *, recorded=True, store_ok=True, headers=()):
        seen = []

        async def app(scope, receive, send):
            seen.append(dict(scope["headers"]).get(b"x-request-id"))
            assert [k for k, _ in scope["headers"]].count(b"x-request-id") == 1
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

        def make_context(response_id, **_):
            seen.append(response_id)
            return SimpleNamespace(weight_version=7, recorded=recorded, store_ok=store_ok)

        bench = Bench()
        bench.edge = Edge(app, ServiceConfig(), make_context)
        answer = bench.ask("/v1/chat/completions", "POST", parts=(b"{}",), headers=headers)
        return answer[2], *seen

    def test_its_id_is_ours_whatever_the_client_sends(self):
        sent = [(b"x-request-id", b"mine"), (b"X-Request-Id", b"mine")]
        _, response_id, request_id = self.ask(headers=sent)
        assert response_id == f"chatcmpl-{request_id.decode()}"
        assert len(request_id) == 32

    @pytest.mark.parametrize(
        ("recorded", "store_ok", "said"),
        [
            (True, True, b"true"),
            (False, True, b"false"),
            (None, True, b"true"),  # a stream: as the last one before it
            (None, False, b"false"),
        ],
    )
    def test_whether_it_was_recorded(self, recorded, store_ok, said):
        headers, *_ = self.ask(recorded=recorded, store_ok=store_ok)
        assert headers[b"x-rollout-recorded"] == said
        assert headers[b"x-weight-version"] == b"7"


class TestFailuresInsideVllm:
    """A value of the wrong type makes vLLM fail inside: whose fault is it?"""

    def answer(self, *, answering, is_well, status=500, body=b'{"error": {"message": "no get"}}'):
        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": body[:5], "more_body": True})
            await send({"type": "http.response.body", "body": body[5:]})

        context = SimpleNamespace(
            answering=answering, weight_version=None, recorded=None, store_ok=True
        )
        bench = Bench()
        bench.edge = Edge(app, ServiceConfig(), lambda **_: context, is_engine_well=lambda: is_well)
        return bench.ask("/v1/chat/completions", "POST", parts=(b"{}",))[:2]

    def test_the_requests_if_the_engine_never_saw_it(self):
        status, body = self.answer(answering=False, is_well=True)
        assert (status, body["error"]["code"]) == (400, 400)
        assert body["error"]["message"] == "The request cannot be answered: no get"

    @pytest.mark.parametrize("body", [b"Internal Server Error", b'{"error": 5}', b"[]"])
    def test_without_a_message(self, body):
        status, body = self.answer(answering=False, is_well=True, body=body)
        assert status == 400
        assert "wrong type" in body["error"]["message"]

    @pytest.mark.parametrize(
        ("answering", "is_well", "status"), [(True, True, 500), (False, False, 500)]
    )
    def test_ours_otherwise(self, answering, is_well, status):
        found, body = self.answer(answering=answering, is_well=is_well, status=status)
        assert (found, body["error"]["message"]) == (status, "no get")

    @pytest.mark.parametrize("status", [200, 400, 503])
    def test_other_answers_pass(self, status):
        assert self.answer(answering=False, is_well=True, status=status)[0] == status
