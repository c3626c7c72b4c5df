"""The edge on a stand-in app: whose session a request is a turn of, and pages in browsers."""

import httpx
import pytest

from online_sao.config import ServiceConfig
from online_sao.service.http import MAX_SESSION_ID_CHARS, Edge, Keys, session_key

KEY, ADMIN = "ONLINE_SAO_API_KEY", "ONLINE_SAO_ADMIN_KEY"
OPEN = Keys(user=None, admin=None)


class TestSessionKey:
    def test_without_keys_in_force_it_is_what_the_client_calls_it(self):
        assert session_key("s", "Bearer whatever the client sends", OPEN) == "s"
        assert session_key(None, "", OPEN) is None

    def test_with_keys_each_client_has_its_own(self, monkeypatch):
        monkeypatch.setenv(KEY, "secret")
        keys = Keys.from_environment()
        one, other = (session_key("s", f"Bearer {key}", keys) for key in ("secret", "admin"))
        assert one != other
        assert one == session_key("s", "Bearer secret", keys)
        assert "secret" not in one

    def test_long_ones_are_told_apart(self):
        long = "x" * MAX_SESSION_ID_CHARS
        assert session_key(long, "", OPEN) == long
        assert session_key(long + "a", "", OPEN) != session_key(long + "b", "", OPEN)
        assert len(session_key(long * 100, "", OPEN)) <= MAX_SESSION_ID_CHARS

    def test_lone_surrogates(self):
        assert session_key("\ud800" * 200, "", OPEN)


@pytest.fixture
def seen():
    return []


@pytest.fixture
def edge(seen):
    class Context:
        weight_version, recorded, store_ok = 3, True, True

    def make_context(**fields):
        seen.append(fields)
        return Context()

    async def app(scope, receive, send):
        body = await receive()
        assert body["type"] == "http.request"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    return Edge(app, ServiceConfig(), make_context)


def client(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({}, {}, None),
        ({"X-Session-Id": "a"}, {}, "a"),
        ({}, {"metadata": {"session_id": "b"}}, "b"),
        ({"X-Session-Id": "a"}, {"metadata": {"session_id": "b"}}, "a"),
        ({}, {"metadata": {"session_id": 5}}, None),
        ({}, {"metadata": "b"}, None),
        ({"X-Session-Id": ""}, {}, None),
    ],
)
async def test_which_session_a_request_names(edge, seen, headers, body, session):
    async with client(edge) as http:
        answer = await http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.headers["x-weight-version"] == "3"
    assert seen[0]["session_id"] == session
