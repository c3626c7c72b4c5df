"""An endpoint that keeps the HTTP contract (DESIGN.md section 5) and learns by a rule.

Its "policy" is one number per style; it answers out of the phrasebook in a style drawn from
their softmax over the pool that the system prompt names. Its "judge" knows the style it
drew. Its "learner" moves the number of the drawn style by reward minus the style's own
running value. It remembers all it was asked, so that tests can look at the other side.
"""

from __future__ import annotations

import asyncio
import math
import random
import socket
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from online_sao.writing import load_topics, styled_answer

TOPICS = load_topics()


class FakeEndpoint:
    def __init__(self, preset: str = "sao", rate: float = 2.0, *, update_s: float = 0.002) -> None:
        self.preset = preset
        self.rate = rate
        self.update_s = update_s
        self.keys: tuple[str, str] | None = None  # (api, admin)
        self.fail_next: list[tuple[int, dict[str, str]]] = []  # answered to the next chats
        self.not_ready_polls = 0
        self.preference: dict[str, Any] = {"style": "cute", "pool": ["academic", "cute"]}
        self.preferences: list[dict[str, Any]] = []  # every PUT
        self.records: list[dict[str, Any]] = []
        self.opted_out: set[str] = set()
        self.paused = False
        self.pauses = 0
        self.trained_while_paused = 0
        self.version = 0
        self.publish_s = 0.0  # from an update to its weights serving
        self._trained_at: list[float] = []
        self.max_in_flight = 0
        self._asking = 0
        self._logits = dict.fromkeys(TOPICS.styles, 0.0)
        self._values = dict.fromkeys(TOPICS.styles, 0.4)
        self._rng = random.Random(7)
        self.app = self._make_app()

    @property
    def by_id(self) -> dict[str, dict[str, Any]]:
        return {record["id"]: record for record in self.records}

    @property
    def serving(self) -> int:
        """The version that answers."""
        return bisect_right(self._trained_at, time.monotonic() - self.publish_s)

    @property
    def training(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["id"] not in self.opted_out]

    def _make_app(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> Any:
            worker = asyncio.create_task(self._work())
            yield
            worker.cancel()

        app = FastAPI(lifespan=lifespan)

        @app.middleware("http")
        async def guard(request: Request, call_next: Any) -> Any:
            if self.keys:
                admin = not request.url.path.startswith(("/v1/chat", "/v1/models", "/ready"))
                allowed = self.keys[1:] if admin else self.keys
                if request.headers.get("authorization") not in [f"Bearer {k}" for k in allowed]:
                    return _error(401, "This route needs a key.")
            return await call_next(request)

        @app.get("/ready")
        async def ready() -> Any:
            if self.not_ready_polls > 0:
                self.not_ready_polls -= 1
                body = {"ready": False, "learner": "pretraining", "error": None}
                return JSONResponse({**body, "pretraining": {"done": 3, "total": 32}}, 503)
            return {"ready": True}

        @app.get("/v1/models")
        async def models() -> Any:
            return {"object": "list", "data": [{"id": "fake-writer"}]}

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            body = await request.json()
            if self.fail_next:
                code, headers = self.fail_next.pop(0)
                return JSONResponse(
                    {"error": {"message": "queue is full", "code": code}}, code, headers
                )
            assert body["model"] == "fake-writer"
            assert set(body) == {"model", "messages", "max_tokens", "temperature", "seed"}
            opted_out = request.headers.get("x-learning") == "off"
            self._asking += not opted_out
            self._count_in_flight()
            await asyncio.sleep(0.002)
            record = self._answer(body["messages"], opted_out)
            self._asking -= not opted_out
            return {
                "id": record["id"],
                "object": "chat.completion",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": record["answer"]},
                        "finish_reason": "stop",
                    }
                ],
            }

        @app.get("/v1/rollouts")
        async def rollouts(after: int = 0, limit: int = 100) -> Any:
            data = self.records[after : after + limit]  # record n has seq n + 1
            return {"data": data, "last_seq": data[-1]["seq"] if data else after}

        @app.get("/v1/rollouts/{rollout_id}")
        async def rollout(rollout_id: str) -> Any:
            record = self.by_id.get(rollout_id)
            return record or _error(404, f"There is no rollout {rollout_id}.")

        @app.get("/v1/preference")
        async def preference() -> Any:
            return self.preference

        @app.put("/v1/preference")
        async def prefer(request: Request) -> Any:
            self.preference = await request.json()
            self.preferences.append(self.preference)
            return self.preference

        @app.get("/v1/learning")
        async def learning() -> Any:
            states: dict[str, int] = {}
            for record in self.records:
                states[record["state"]] = states.get(record["state"], 0) + 1
            return {
                "weight_version": self.version,
                "serving_version": self.serving,
                "updates": self.version,
                "paused": self.paused,
                "pause_reason": "paused by hand" if self.paused else None,
                "queue": states,
                "preset": self.preset,
                "run_id": f"{self.preset}-0-abc",
                "metrics": {},
                "pretraining": {"done": 32, "total": 32},
            }

        @app.post("/v1/learning/pause")
        async def pause(request: Request) -> Any:
            assert set(await request.json()) == {"reason"}
            self.paused = True
            self.pauses += 1
            return {"paused": True}

        @app.post("/v1/learning/resume")
        async def resume() -> Any:
            self.paused = False
            return {"paused": False}

        return app

    def _answer(self, messages: list[dict[str, str]], opted_out: bool) -> dict[str, Any]:
        system, user = messages[0]["content"], messages[1]["content"]
        pool = [style for style, name in TOPICS.styles.items() if name in system]
        weights = [math.exp(self._logits[style]) for style in pool]
        style = self._rng.choices(pool, weights)[0]
        topics = (*TOPICS.training, *TOPICS.heldout)
        topic = max((t for t in topics if t in user), key=len)
        answer = styled_answer(topic, style, self._rng)
        seq = len(self.records) + 1
        record = {
            "id": f"chatcmpl-{seq:05d}",
            "seq": seq,
            "state": "excluded" if opted_out else "pending",
            "reason": "opted_out" if opted_out else None,
            "judge_state": "waiting",
            "purpose": "serve",
            "created_at": time.time(),
            "session_id": None,
            "preference": {"style": self.preference["style"], "pool": self.preference["pool"]},
            "verdict": None,
            "reward": None,
            "answer": answer,
            "messages": messages,
            "finish_reason": "stop",
            "num_action_tokens": len(answer.split()),
            "weight_version_start": self.serving,
            "weight_version_end": self.serving,
            "trained_version": None,
            "metrics": None,
            "topic": topic,
            "drawn": style,
        }
        self.records.append(record)
        if opted_out:
            self.opted_out.add(record["id"])
        return record

    def _count_in_flight(self) -> None:
        waiting = sum(record["state"] in ("pending", "rewarded") for record in self.training)
        self.max_in_flight = max(self.max_in_flight, self._asking + waiting)

    async def _work(self) -> None:
        """Judge and train, oldest first."""
        settled = 0
        while True:
            await asyncio.sleep(self.update_s)
            for record in self.records[settled:]:
                if record["judge_state"] == "waiting":
                    self._judge(record)
                elif record["state"] == "rewarded" and not self.paused:
                    self._train(record)
                    break
            while settled < len(self.records) and self._settled(self.records[settled]):
                settled += 1

    @staticmethod
    def _settled(record: dict[str, Any]) -> bool:
        return record["judge_state"] != "waiting" and record["state"] in ("trained", "excluded")

    def _judge(self, record: dict[str, Any]) -> None:
        quality, style = 1, int(record["drawn"] == record["preference"]["style"])
        record["verdict"] = {
            "quality": quality,
            "style": style,
            "reward": quality * style,
            "detected_style": record["drawn"],
            "rationale": "by rule",
            "model": "fake",
            "source": "judge",
        }
        record["reward"] = quality * style
        record["judge_state"] = "scored"
        if record["state"] == "pending":
            record["state"] = "rewarded"

    def _train(self, record: dict[str, Any]) -> None:
        self.trained_while_paused += self.paused
        value = sum(
            self._values[style] * math.exp(self._logits[style]) for style in TOPICS.styles
        ) / sum(map(math.exp, self._logits.values()))
        style = record["drawn"]
        self._logits[style] += self.rate * (record["reward"] - 0.3)
        self._logits[style] = max(-2.5, min(2.5, self._logits[style]))
        self._values[style] += 0.2 * (record["reward"] - self._values[style])
        lag = self.version - record["weight_version_start"]
        self.version += 1
        self._trained_at.append(time.monotonic())
        record["state"] = "trained"
        record["trained_version"] = self.version
        record["metrics"] = {
            "policy/masked_fraction": 0.25 if self.version % 2 else 0.0,
            "critic/value_first": value,
            "critic/explained_variance": 0.5 - 1 / self.version if self.version > 4 else None,
            "critic/grad_norm": 2.0 + self._rng.random() * 50,
            "rollout/policy_lag_max": lag,
            "seconds/total": self.update_s,
        }


def _error(code: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "error", "code": code}}, code)


@contextmanager
def served(endpoint: FakeEndpoint, port: int = 0) -> Iterator[str]:
    """Serve on 127.0.0.1 while the block runs; gives the URL."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    server = uvicorn.Server(
        uvicorn.Config(
            endpoint.app, log_level="warning", lifespan="on", timeout_graceful_shutdown=1
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()
