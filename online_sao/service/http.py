"""The HTTP edge as plain ASGI: keys, limits, the request's context, our response headers.

Plain ASGI and not BaseHTTPMiddleware, because the context variable set here must be seen by
the code that iterates the engine's output, streaming included.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from online_sao.config import ServiceConfig

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

GENERATING = ("/v1/chat/completions", "/v1/completions")
OPEN_PATHS = ("/health",)
ADMIN_PREFIXES = ("/v1/preference", "/v1/learning", "/v1/rollouts")
RETRY_AFTER_S = 2
MAX_DIGITS = 18  # of a length that need not be read to be too large
CLIENT_CLOSED = 499  # as other servers log it; never sent
MAX_SESSION_ID_CHARS = 128  # longer ones are known by their hash
API_KEY_VARIABLE = "ONLINE_SAO_API_KEY"
ADMIN_KEY_VARIABLE = "ONLINE_SAO_ADMIN_KEY"


def error_body(status: int, message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


@dataclass(frozen=True)
class Keys:
    """SHA-256 of the keys that are asked for; None where none is.

    The driver reads the keys, and only these digests travel: on a cluster that was joined the
    replica does not have the driver's environment.
    """

    user: bytes | None
    admin: bytes | None

    @classmethod
    def from_environment(cls) -> Keys:
        return cls(*(_digest(os.environ.get(n)) for n in (API_KEY_VARIABLE, ADMIN_KEY_VARIABLE)))

    @property
    def any(self) -> bool:
        return self.user is not None or self.admin is not None


def _digest(key: str | None) -> bytes | None:
    return hashlib.sha256(key.encode()).digest() if key else None


class Edge:
    """Wraps the app. `limit` bounds requests that generate at the same time."""

    def __init__(
        self,
        app: Any,
        config: ServiceConfig,
        make_context: Callable[..., Any],
        on_answer: Callable[[str, int, float], None] = lambda path, status, seconds: None,
        is_engine_well: Callable[[], bool] = lambda: True,
        keys: Keys | None = None,
    ) -> None:
        self._app = app
        self._config = config
        self._make_context = make_context
        self._on_answer = on_answer
        self._is_engine_well = is_engine_well
        self.ongoing = 0
        self._keys = Keys.from_environment() if keys is None else keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, statuses = time.monotonic(), []

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        try:
            await self._answer(scope, receive, noted)
        finally:
            # Without a status the client went away before there was one.
            status = statuses[0] if statuses else CLIENT_CLOSED
            self._on_answer(scope["path"], status, time.monotonic() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, headers = scope["path"], _headers(scope)
        refusal = self._refuse(path, headers)
        if refusal is not None:
            await _respond(send, *refusal)
            return
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(
                self._read_body(receive, headers), self._config.body_timeout_s
            )
        except TimeoutError:
            limit_s = self._config.body_timeout_s
            await _respond(send, 408, f"The request body did not arrive within {limit_s:g} s.")
            return
        if body is None:
            limit = self._config.max_body_bytes
            await _respond(send, 413, f"The request body is larger than {limit} bytes.")
            return
        replay = _Replay(body, receive)
        if path in GENERATING and scope["method"] == "POST":
            await self._generate(scope, headers, body, replay, send)
        else:
            await self._app(scope, replay, send)

    async def _generate(
        self, scope: Scope, headers: dict[str, str], body: bytes, receive: Receive, send: Send
    ) -> None:
        if self.ongoing >= self._config.max_ongoing_requests:
            await _respond(
                send,
                429,
                f"{self.ongoing} requests are being answered, which is the limit; "
                f"try again in {RETRY_AFTER_S} seconds.",
                "rate_limit_error",
                {"retry-after": str(RETRY_AFTER_S)},
            )
            return
        parsed = _json_object(body)
        if not _is_unicode(parsed):
            await _respond(send, 400, "The body has half of a character (a lone surrogate).")
            return
        choices, limit = _num_choices(parsed), self._config.max_choices
        if choices > limit:
            await _respond(send, 400, f"{choices} answers are asked for; the limit is {limit}.")
            return
        from online_sao.service.engine import CURRENT_REQUEST

        unique = secrets.token_hex(16)
        prefix = "chatcmpl" if scope["path"] == GENERATING[0] else "cmpl"
        context = self._make_context(
            response_id=f"{prefix}-{unique}",
            body=parsed,
            session_id=session_key(
                _session_id(parsed, headers), headers.get("authorization", ""), self._keys
            ),
            opted_out=headers.get("x-learning", "").lower() == "off",
        )
        # vLLM takes the request's id from this header; the answer's id is the receipt for
        # feedback, so it must be ours and unique.
        scope = {
            **scope,
            "headers": [
                *((k, v) for k, v in scope["headers"] if k.lower() != b"x-request-id"),
                (b"x-request-id", unique.encode()),
            ],
        }
        token = CURRENT_REQUEST.set(context)
        self.ongoing += 1
        try:
            answer = _with_headers(send, context)
            await self._app(scope, receive, self._refusing(answer, context))
        finally:
            self.ongoing -= 1
            CURRENT_REQUEST.reset(token)

    def _refusing(self, send: Send, context: Any) -> Send:
        """vLLM's failure over a request that its engine never saw, as a 400.

        It checks few types itself: a number where a table belongs makes it fail somewhere
        inside, with a 500. As long as the engine is well, that is the request's fault.
        """
        held = False
        parts: list[bytes] = []

        async def wrapped(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start":
                held = message["status"] == 500 and not context.answering and self._is_engine_well()
            if not held:
                await send(message)
                return
            parts.append(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                reason = _error_message(b"".join(parts))
                log.warning("a request was refused that vLLM failed over: %s", reason)
                await _respond(send, 400, f"The request cannot be answered: {reason}")

        return wrapped

    def _refuse(self, path: str, headers: dict[str, str]) -> tuple[int, str, str] | None:
        keys = self._keys
        if path in OPEN_PATHS or not keys.any:
            return None
        given = hashlib.sha256(headers.get("authorization", "").removeprefix("Bearer ").encode())
        is_admin = keys.admin is not None and hmac.compare_digest(given.digest(), keys.admin)
        is_user = keys.user is not None and hmac.compare_digest(given.digest(), keys.user)
        kind = "authentication_error"
        if path.startswith(ADMIN_PREFIXES):
            # One key alone opens everything; so does the same for both.
            if not (is_admin or (is_user and keys.admin in (None, keys.user))):
                return 401, "This needs the admin key: Authorization: Bearer <key>.", kind
            return None
        if keys.user is not None and not (is_user or is_admin):
            return 401, "This needs an API key: Authorization: Bearer <key>.", kind
        return None

    async def _read_body(self, receive: Receive, headers: dict[str, str]) -> bytes | None:
        """The whole body, or None when it is larger than allowed."""
        limit = self._config.max_body_bytes
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and (len(announced) > MAX_DIGITS or int(announced) > limit):
            return None
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return b"".join(parts)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                return None
            if not message.get("more_body", False):
                return b"".join(parts)


class _Replay:
    """Gives the body that was read once more, then what really comes (a disconnect)."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()


def _with_headers(send: Send, context: Any) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            headers = list(message.get("headers", []))
            if context.weight_version is not None:
                headers.append((b"x-weight-version", str(context.weight_version).encode()))
            # A stream's headers leave before its rollout is complete: there the header says
            # whether the store took the last rollout before it.
            recorded = context.recorded if context.recorded is not None else context.store_ok
            headers.append((b"x-rollout-recorded", b"true" if recorded else b"false"))
            message = {**message, "headers": headers}
        await send(message)

    return wrapped


def _headers(scope: Scope) -> dict[str, str]:
    return {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}


def _json_object(body: bytes) -> dict[str, Any]:
    """The parsed body, or {} (then vLLM's own validation answers)."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _error_message(body: bytes) -> str:
    error = _json_object(body).get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or "it has a value of the wrong type.")


def _is_unicode(parsed: dict[str, Any]) -> bool:
    """Whether every text in a body can be encoded: vLLM fails on one that cannot."""
    try:
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    except RecursionError:  # so deep that vLLM's validation refuses it
        return True
    return True


def _num_choices(body: dict[str, Any]) -> int:
    """Answers that a body asks for; what is no number is left for vLLM to refuse."""
    n, prompts = body.get("n"), body.get("prompt")
    each = n if isinstance(n, int) and n > 0 else 1
    # A list of token ids is one prompt.
    is_many = isinstance(prompts, list) and not all(isinstance(p, int) for p in prompts)
    return each * (len(prompts) if is_many and prompts else 1)


def _session_id(body: dict[str, Any], headers: dict[str, str]) -> str | None:
    metadata = body.get("metadata")
    named = headers.get("x-session-id")
    if not named and isinstance(metadata, dict):
        named = metadata.get("session_id")
    if not isinstance(named, str) or not named:
        return None
    return named


def session_key(session_id: str | None, authorization: str, keys: Keys) -> str | None:
    """The name under which a session is kept: clients with different keys share none.

    Without keys in force whatever a client sends as one says nothing.
    """
    if session_id is None:
        return None
    if len(session_id) > MAX_SESSION_ID_CHARS:
        session_id = hashlib.sha256(session_id.encode(errors="replace")).hexdigest()
    if not keys.any:
        return session_id
    return f"{hashlib.sha256(authorization.encode()).hexdigest()[:12]}:{session_id}"


async def _respond(
    send: Send,
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    headers: dict[str, str] | None = None,
) -> None:
    body = json.dumps(error_body(status, message, kind)).encode()
    fields = {"content-type": "application/json", "content-length": str(len(body))}
    fields |= headers or {}
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(k.encode(), v.encode()) for k, v in fields.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})
