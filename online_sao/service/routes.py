"""The FastAPI app of a replica: vLLM's OpenAI routes as they are, and ours beside them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Annotated, Any

import ray
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from online_sao.config import Config
from online_sao.errors import EngineError, NotFoundError, OnlineSAOError, StoreError
from online_sao.service import names
from online_sao.service.http import Edge, error_body, session_key
from online_sao.service.metrics import (
    CONTENT_TYPE,
    Metrics,
    judge_samples,
    learner_samples,
    store_samples,
)
from online_sao.types import Preference, Rollout, RolloutState

CONTROL_TIMEOUT_S = 10.0  # an actor that does not answer by then counts as down
ROLLBACK_TIMEOUT_S = 150.0
MAX_PAGE = 1000
EXPOSED_HEADERS = ("X-Weight-Version", "X-Rollout-Recorded", "Retry-After")
MAX_NUMBER = 2**53  # what JSON and every database keep exactly


class PreferenceBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    style: str
    pool: list[str] | None = None
    note: str | None = Field(None, max_length=1000)


class FeedbackBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: str
    choice: int = Field(0, ge=0)
    reward: float = Field(ge=0, le=1, allow_inf_nan=False)
    comment: str | None = Field(None, max_length=10_000)


class PauseBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    reason: str = Field("paused by the operator", max_length=1000)


class _Down(Exception):
    """An actor does not answer: it is being restarted, or hangs."""


class VersionBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: int = Field(ge=0, le=MAX_NUMBER)


def build_app(endpoint: Any, config: Config) -> Any:
    """The ASGI app for `endpoint` (service.replica.Endpoint), wrapped in its Edge."""
    from vllm.entrypoints.openai.chat_completion.api_router import attach_router as attach_chat
    from vllm.entrypoints.openai.completion.api_router import attach_router as attach_completion
    from vllm.entrypoints.openai.models.api_router import attach_router as attach_models
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

    from judge import JudgeError
    from online_sao.judging import make_judge
    from online_sao.service.engine import RequestContext
    from online_sao.service.replica import KEPT_ROUTES

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await endpoint.start(app.state)
        try:
            yield
        finally:
            await endpoint.stop()

    app = FastAPI(title="online_sao", lifespan=lifespan)
    for attach in (attach_chat, attach_completion, attach_models):
        attach(app)
    # vLLM attaches more than the contract names (batch and render routes): those bypass ids.
    app.router.routes[:] = [
        route
        for route in app.router.routes
        if not getattr(route, "path", "").startswith("/v1/") or route.path in KEPT_ROUTES  # type: ignore[attr-defined]
    ]
    init_exception_handler(app)
    judge = make_judge(config)
    counters = Metrics()

    def actor(name: str) -> Any:
        try:
            return ray.get_actor(name, namespace=names.NAMESPACE)
        except ValueError:  # there is none of that name, for now
            raise _Down(name) from None

    def learner() -> Any:
        return actor(names.LEARNER)

    def wake() -> None:
        with contextlib.suppress(_Down):  # it looks into the store by itself
            learner().wake.remote()

    async def ask(call: Any, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        """What an actor answers; _Down if it does not. What it raises is raised here."""
        try:
            return await asyncio.wait_for(call, timeout_s)
        except ray.exceptions.RayTaskError as error:
            # Our own one sentence, and not Ray's traceback of it.
            raise error.cause if isinstance(error.cause, OnlineSAOError) else error from None
        except (TimeoutError, ray.exceptions.RayError):
            raise _Down from None

    async def ask_or_none(name: str) -> Any:
        """The status of a named actor; None if it does not answer."""
        try:
            return await ask(actor(name).status.remote())
        except (_Down, ray.exceptions.RayTaskError, OnlineSAOError):
            return None

    def stored_counts() -> tuple[Any, Any]:
        try:
            return endpoint.store.counts(), endpoint.store.reason_counts()
        except StoreError:
            return None, None

    # --- errors in OpenAI's shape

    @app.exception_handler(NotFoundError)
    async def _not_found(_: Request, error: NotFoundError) -> JSONResponse:
        return JSONResponse(error_body(404, str(error), "not_found_error"), 404)

    @app.exception_handler(StoreError)
    async def _store_down(_: Request, error: StoreError) -> JSONResponse:
        return JSONResponse(error_body(503, str(error), "server_error"), 503)

    @app.exception_handler(EngineError)
    async def _engine_down(_: Request, error: EngineError) -> JSONResponse:
        return JSONResponse(error_body(503, str(error), "server_error"), 503)

    @app.exception_handler(OnlineSAOError)
    async def _ours(_: Request, error: OnlineSAOError) -> JSONResponse:
        return JSONResponse(error_body(409, str(error), "conflict_error"), 409)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc'][1:]) or 'body'}: {fault['msg']}"
            for fault in error.errors()
        )
        return JSONResponse(error_body(400, faults), 400)

    @app.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code)

    @app.exception_handler(_Down)
    async def _down(_: Request, error: _Down) -> JSONResponse:
        message = "The learner does not answer; it is being restarted."
        return JSONResponse(error_body(503, message, "server_error"), 503)

    # --- health

    @app.get("/health")
    async def health() -> Response:
        await endpoint.check_health()
        return Response(status_code=200)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Whether the weights served are current and the learner learns."""
        status = await ask(learner().status.remote())
        version = await ask(actor(names.BOARD).current_version.remote())
        # Later versions are always a moment behind; only the first must be there.
        if version is not None and endpoint.engine.weight_version >= version:
            endpoint.has_caught_up = True
        # Without topics value pretraining waits for clients, who wait for this.
        is_collecting = (status.get("pretraining") or {}).get("state") == names.COLLECTING
        is_learning = status["state"] == "learning" or is_collecting
        is_ready = is_learning and endpoint.has_caught_up and endpoint.weights_error is None
        body = {
            "ready": is_ready,
            "learner": status["state"],
            "pretraining": status.get("pretraining"),
            "weight_version": endpoint.engine.weight_version,
            "current_version": version,
            "error": status["error"] or endpoint.weights_error,
            # Serving goes on, so it is ready.
            "paused": status.get("pause_reason"),
        }
        return JSONResponse(body, 200 if is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text; never fails because a part is down."""
        status, judging, stored = await asyncio.gather(
            ask_or_none(names.LEARNER),
            ask_or_none(names.REWARD_WORKER),
            asyncio.to_thread(stored_counts),
        )
        samples = [
            ("online_sao_replica_version", {}, endpoint.engine.weight_version),
            ("online_sao_unrecorded", {}, endpoint.num_unrecorded),
            ("online_sao_ongoing", {}, edge.ongoing),
            *learner_samples(status),
            *judge_samples(judging),
            *store_samples(*stored),
        ]
        return Response(counters.render(samples), media_type=CONTENT_TYPE)

    # --- preference

    @app.get("/v1/preference")
    async def get_preference() -> JSONResponse:
        current = await asyncio.to_thread(endpoint.store.preference)
        return JSONResponse(_preference_json(current))

    @app.put("/v1/preference")
    async def put_preference(body: PreferenceBody) -> JSONResponse:
        current = await asyncio.to_thread(endpoint.store.preference)
        pool = body.pool if body.pool is not None else (list(current.pool) if current else [])
        try:
            judge.check_style(body.style, pool)
        except JudgeError as error:
            return JSONResponse(error_body(400, str(error)), 400)
        wanted = Preference(style=body.style, pool=tuple(pool), note=body.note)
        stored = await asyncio.to_thread(
            endpoint.store.set_preference, wanted, endpoint.engine.weight_version
        )
        return JSONResponse(_preference_json(stored))

    # --- rollouts

    @app.get("/v1/rollouts")
    async def list_rollouts(
        after: Annotated[int | None, Query(ge=0, le=MAX_NUMBER)] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
        state: RolloutState | None = None,
    ) -> JSONResponse:
        """Rollouts in order of recording, after sequence number `after`; else the newest."""

        def read() -> list[dict[str, Any]]:
            found = endpoint.store.list(
                after_seq=after,
                limit=limit,
                states=None if state is None else [state],
                newest_first=after is None,
            )
            return [_rollout_json(endpoint.store, rollout) for rollout in found]

        data = await asyncio.to_thread(read)
        last = max((row["seq"] for row in data), default=after or 0)
        return JSONResponse({"data": data, "last_seq": last})

    @app.get("/v1/rollouts/{id}")
    async def get_rollout(id: str) -> JSONResponse:
        def read() -> dict[str, Any]:
            return _rollout_json(endpoint.store, endpoint.store.get(id))

        return JSONResponse(await asyncio.to_thread(read))

    @app.delete("/v1/rollouts/{id}")
    async def delete_rollout(id: str) -> JSONResponse:
        await asyncio.to_thread(endpoint.store.delete_text, id)
        return JSONResponse({"id": id, "deleted": True})

    @app.post("/v1/feedback")
    async def feedback(body: FeedbackBody) -> JSONResponse:
        id = body.id if body.choice == 0 else f"{body.id}.{body.choice}"
        trained, reason = await asyncio.to_thread(
            endpoint.store.add_feedback, id, body.reward, body.comment
        )
        if trained:
            wake()
            return JSONResponse({"trained": True})
        return JSONResponse({"trained": False, "reason": reason}, 202)

    # --- sessions

    @app.post("/v1/sessions/{id:path}/close")
    async def close_session(id: str, request: Request) -> JSONResponse:
        """No turn follows; with credit = session its turns are learned from now."""
        key = session_key(id, request.headers.get("authorization", ""), endpoint.keys)
        assert key is not None
        session = await asyncio.to_thread(endpoint.store.close_session, key)
        wake()
        return JSONResponse({"id": id, "closed": True, "turns": session.num_turns})

    # --- learning

    @app.get("/v1/learning")
    async def learning() -> JSONResponse:
        status = await ask(learner().status.remote())
        counts = await asyncio.to_thread(endpoint.store.counts)
        reasons = await asyncio.to_thread(endpoint.store.reason_counts)
        return JSONResponse(
            {
                "weight_version": status.get("version", 0),
                "serving_version": endpoint.engine.weight_version,
                "updates": status.get("num_updates", 0),
                "paused": status.get("paused", False),
                "pause_reason": status.get("pause_reason"),
                "state": status["state"],
                "error": status["error"] or status.get("failure") or endpoint.weights_error,
                "preset": status["preset"],
                "run_id": status.get("run_id"),
                "rollouts_per_minute": status.get("rollouts_per_minute", 0.0),
                "queue": {str(key): value for key, value in counts.items()},
                "reasons": {f"{s}:{reason}": n for (s, reason), n in reasons.items()},
                "unrecorded": endpoint.num_unrecorded,
                "metrics": status.get("metrics", {}),
                "pretraining": status.get("pretraining", {}),
                "guards": status.get("guards", {}),
            }
        )

    @app.get("/v1/learning/versions")
    async def versions(limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100) -> JSONResponse:
        found = await asyncio.to_thread(endpoint.store.versions, limit)
        return JSONResponse({"data": [_jsonable(asdict(version)) for version in found]})

    @app.post("/v1/learning/pause")
    async def pause(body: PauseBody | None = None) -> JSONResponse:
        await ask(learner().pause.remote((body or PauseBody()).reason))
        return JSONResponse({"paused": True})

    @app.post("/v1/learning/resume")
    async def resume() -> JSONResponse:
        await ask(learner().resume.remote())
        return JSONResponse({"paused": False})

    async def retained() -> list[int]:
        found = await asyncio.to_thread(endpoint.store.retained_versions)
        return [version.version for version in found]

    async def refused(message: str) -> JSONResponse:
        body = error_body(409, message, "conflict_error")
        body["error"]["retained"] = await retained()
        return JSONResponse(body, 409)

    @app.post("/v1/learning/rollback")
    async def rollback(body: VersionBody) -> JSONResponse:
        try:
            made = await ask(learner().rollback.remote(body.version), ROLLBACK_TIMEOUT_S)
        except (ray.exceptions.RayTaskError, OnlineSAOError) as error:
            # The learner says which versions it could go back to.
            return await refused(str(error))
        return JSONResponse({"version": made, "from_version": body.version})

    @app.post("/v1/learning/checkpoint")
    async def checkpoint() -> JSONResponse:
        """Keep the current version: it can then be exported, pinned, and gone back to."""
        try:
            version = await ask(learner().checkpoint.remote(), ROLLBACK_TIMEOUT_S)
        except (ray.exceptions.RayTaskError, OnlineSAOError) as error:
            return await refused(str(error))
        return JSONResponse({"version": version})

    @app.post("/v1/learning/pin")
    async def pin(body: VersionBody) -> JSONResponse:
        """The checkpoint of a pinned version is never deleted."""
        if await asyncio.to_thread(endpoint.store.pin, body.version):
            return JSONResponse({"version": body.version, "pinned": True})
        return await refused(f"Version {body.version} has no retained checkpoint to pin.")

    @app.post("/v1/learning/unpin")
    async def unpin(body: VersionBody) -> JSONResponse:
        await asyncio.to_thread(endpoint.store.unpin, body.version)
        return JSONResponse({"version": body.version, "pinned": False})

    def make_context(**fields: Any) -> RequestContext:
        return RequestContext(
            **fields,
            store_ok=not endpoint.store_failed,
            # The headers of a stream leave before its first token is asked for.
            weight_version=endpoint.engine.weight_version,
        )

    edge = Edge(
        app,
        config.service,
        make_context,
        counters.count_request,
        lambda: not endpoint.engine.errored,
        endpoint.keys,
    )
    if not config.service.cors_origins:
        return edge
    from starlette.middleware.cors import CORSMiddleware

    # Outside the edge: a browser's preflight carries no key.
    return CORSMiddleware(
        edge,
        allow_origins=config.service.cors_origins,
        allow_methods=["GET", "POST", "PUT", "DELETE"],
        allow_headers=["*"],
        expose_headers=EXPOSED_HEADERS,
    )


def _preference_json(preference: Preference | None) -> dict[str, Any]:
    if preference is None:
        return {"style": None, "pool": [], "note": None}
    return _jsonable(asdict(preference))


def _rollout_json(store: Any, rollout: Rollout) -> dict[str, Any]:
    metrics = None
    if rollout.trained_version is not None:
        metrics = store.get_version(rollout.trained_version).metrics
    return _jsonable(
        {
            "id": rollout.id,
            "response_id": rollout.response_id,
            "choice": rollout.choice,
            "seq": rollout.seq,
            "state": rollout.state,
            "reason": rollout.reason,
            "judge_state": rollout.judge_state,
            "purpose": rollout.purpose,
            "created_at": rollout.created_at,
            "session_id": rollout.session_id,
            "trajectory_id": rollout.trajectory_id,
            "turn": rollout.turn,
            "new_trajectory": rollout.new_trajectory,
            "run_id": rollout.run_id,
            "preference": None
            if rollout.preference is None
            else {"style": rollout.preference.style, "pool": list(rollout.preference.pool)},
            "verdict": None if rollout.verdict is None else asdict(rollout.verdict),
            "reward": rollout.reward,
            "answer": rollout.answer,
            "messages": rollout.messages,
            "finish_reason": rollout.finish_reason,
            "num_action_tokens": sum(span.end - span.start for span in rollout.weight_spans),
            "weight_version_start": rollout.weight_version_start,
            "weight_version_end": rollout.weight_version_end,
            "trained_version": rollout.trained_version,
            "temperature": rollout.temperature,
            "latency_s": rollout.latency_s,
            "metrics": metrics,
        }
    )


def _jsonable(value: Any) -> Any:
    from datetime import datetime

    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float) and value != value:
        return None  # JSON has no NaN
    return value
