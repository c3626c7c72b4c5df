"""A small OpenAI-compatible server that answers as providers do, on a real socket.

Which behaviour a request gets is decided by a function of the answer under judgement and of
how often it was asked about before, so that tests can plan faults per answer. Its honest
verdict is a function of the answer too: quality 1 if the answer has the word "good", style 1
if it has "styled".
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from email.utils import formatdate
from time import time
from typing import Any

ENOUGH_TOKENS = 200
"""The behaviours `short_budget` and `reasons_long` need this much budget to finish."""

Plan = Callable[[str, int], str]
"""(answer, times this answer was asked about before) -> name of a behaviour."""


class StandIn:
    """`with StandIn(plan) as server:` listens on 127.0.0.1 at `server.url`."""

    def __init__(self, plan: Plan | str = "normal"):
        self._plan: Plan = (lambda _answer, _times: plan) if isinstance(plan, str) else plan
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.asked: Counter[str] = Counter()
        self.most_at_once = 0
        self._open = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> StandIn:
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        )
        self._server = started.result(5)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        async def stop() -> None:
            self._server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False when the connection is to be closed."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        lines = head.split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:]) if k}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = lines[0].split(" ")[1]
        if not path.endswith("/chat/completions"):
            await _send(writer, 404, {"error": {"message": f"no route {path}"}})
            return True
        request = json.loads(body)
        self.requests.append(request)
        self.headers.append(headers)
        answer = answer_in(request)
        times = self.asked[answer]
        self.asked[answer] += 1
        self._open += 1
        self.most_at_once = max(self.most_at_once, self._open)
        try:
            return await self._behave(self._plan(answer, times), request, answer, writer)
        finally:
            self._open -= 1

    async def _behave(
        self, behaviour: str, request: dict[str, Any], answer: str, writer: asyncio.StreamWriter
    ) -> bool:
        verdict = honest_verdict(request, answer)
        text = json.dumps(verdict)
        budget = request.get("max_tokens") or request.get("max_completion_tokens") or 0
        message: dict[str, Any] = {"content": text}
        finish = "stop"
        match behaviour:
            case "normal":
                pass
            case "fenced":
                message["content"] = f"```json\n{json.dumps(verdict, indent=2)}\n```"
            case "text_around":
                message["content"] = f"Here is my verdict:\n{text}\nI hope this helps."
            case "thinking":
                draft = json.dumps({**verdict, "quality": 1 - verdict["quality"]})
                message["content"] = f"<think>First I thought {draft}, but no.</think>\n{text}"
            case "thinking_closed_only":
                draft = json.dumps({**verdict, "style": 1 - verdict["style"]})
                message["content"] = f"Hm, {draft} perhaps.\n</think>\n{text}"
            case "thinking_unclosed":
                message["content"] = f"<think>I start with {text}"
                finish = "length"
            case "reasoning_content":
                message["reasoning_content"] = f"A draft: {json.dumps({**verdict, 'style': 0})}"
            case "all_in_reasoning":
                message = {"content": None, "reasoning_content": f"So: {text}"}
            case "content_null":
                message["content"] = None
            case "reasons_long":  # null content until the budget is large enough
                if budget < ENOUGH_TOKENS:
                    message = {"content": None, "reasoning_content": "Let me think about"}
                    finish = "length"
            case "short_budget":
                if budget < ENOUGH_TOKENS:
                    message["content"], finish = text[: len(text) // 2], "length"
            case "always_cut":
                message["content"], finish = text[: len(text) // 2], "length"
            case "second_verdict_cut":
                message["content"], finish = f"{text}\nOn reflection: {text[:30]}", "length"
            case "two_objects":
                first = {**verdict, "quality": 1 - verdict["quality"], "style": 1}
                message["content"] = f"{json.dumps(first)}\nNo, rather:\n{text}"
            case "contrary":
                message["content"] = json.dumps({**verdict, "quality": 1 - verdict["quality"]})
            case "all_ones":  # a judge that was bribed
                bribed = {"quality": 1, "style": 1, "detected_style": "cute"}
                message["content"] = json.dumps({**verdict, **bribed})
            case "words_for_marks":
                words = {**verdict, "quality": "yes" if verdict["quality"] else "no"}
                words["style"] = bool(verdict["style"])
                message["content"] = json.dumps(words)
            case "trailing_comma":
                message["content"] = text[:-1] + ",}"
            case "no_code":
                message["content"] = json.dumps({k: v for k, v in verdict.items() if k != "code"})
            case "essay":
                message["content"] = "The answer is charming and on topic. I would pass it."
            case "essay_quoting_answer":
                message["content"] = f"The answer says: {answer}. I cannot decide."
            case "half_marks":
                message["content"] = json.dumps({**verdict, "quality": 0.5})
            case "mark_missing":
                message["content"] = json.dumps({k: v for k, v in verdict.items() if k != "style"})
            case "foreign_code":
                message["content"] = json.dumps({**verdict, "code": "0123456789abcdef"})
            case "no_choices":
                await _send(writer, 200, _completion(request, message, finish) | {"choices": []})
                return True
            case "not_json":
                await _send(writer, 200, "<html><body>Bad gateway</body></html>")
                return True
            case "rate_limited":
                await _send(writer, 429, _error("slow down"), {"Retry-After": "0.2"})
                return True
            case "rate_limited_date":
                later = {"Retry-After": formatdate(time() + 2, usegmt=True)}
                await _send(writer, 429, _error("slow down"), later)
                return True
            case "rate_limited_long":
                await _send(writer, 429, _error("quota"), {"Retry-After": "3600"})
                return True
            case "error_500":
                await _send(writer, 500, _error("internal"))
                return True
            case "error_503":
                await _send(writer, 503, _error("overloaded"))
                return True
            case "refuses_key":
                await _send(writer, 401, _error("bad key"))
                return True
            case "refuses_request":
                await _send(writer, 400, _error("context too long"))
                return True
            case "refuses_response_format":
                if "response_format" in request:
                    await _send(writer, 400, _error("response_format is not supported"))
                    return True
            case "slow":
                await asyncio.sleep(0.3)
            case "hang":
                await asyncio.sleep(3600)
            case "cut_connection":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
                writer.write(b"Content-Length: 5000\r\n\r\n{")
                await writer.drain()
                return False
            case _:
                raise AssertionError(f"unknown behaviour {behaviour}")
        await _send(writer, 200, _completion(request, message, finish))
        return True


def answer_in(request: dict[str, Any]) -> str:
    """The answer under judgement, as a model would find it in the prompt."""
    user = request["messages"][-1]["content"]
    code = code_in(request)
    return user.split(f"<<<ANSWER {code}>>>\n")[1].split(f"\n<<<END ANSWER {code}>>>")[0]


def code_in(request: dict[str, Any]) -> str:
    return re.findall(r"<<<ANSWER ([0-9a-f]+)>>>", request["messages"][-1]["content"])[-1]


def honest_verdict(request: dict[str, Any], answer: str) -> dict[str, Any]:
    words = set(re.findall(r"[a-z]+", answer.lower()))
    return {
        "code": code_in(request),
        "quality_reason": "It has the word." if "good" in words else "It lacks the word.",
        "quality": int("good" in words),
        "style_reason": "It is styled." if "styled" in words else "It is plain.",
        "detected_style": "cute" if "styled" in words else "none",
        "style": int("styled" in words),
    }


def _completion(request: dict[str, Any], message: dict[str, Any], finish: str) -> dict[str, Any]:
    return {
        "id": "chatcmpl-standin",
        "object": "chat.completion",
        "created": 1,
        "model": request["model"],
        "choices": [
            {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
        ],
        "usage": {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150},
    }


def _error(text: str) -> dict[str, Any]:
    return {"error": {"message": text, "type": "standin", "code": None}}


async def _send(
    writer: asyncio.StreamWriter,
    status: int,
    content: dict[str, Any] | str,
    headers: dict[str, str] | None = None,
) -> None:
    body = (content if isinstance(content, str) else json.dumps(content)).encode()
    kind = "text/html" if isinstance(content, str) else "application/json"
    lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    lines += [f"{key}: {value}" for key, value in (headers or {}).items()]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    await writer.drain()
