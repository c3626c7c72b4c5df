"""The Serve deployment: one engine replica with vLLM's OpenAI routes and ours.

This module imports no vllm at the top: the driver imports it too, to deploy the class.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import ray
from ray import serve

from online_sao.config import Config
from online_sao.engine.settings import engine_environment
from online_sao.engine.weight_file import process_folder
from online_sao.errors import StoreError, WeightUpdateError
from online_sao.service import names
from online_sao.service.board import Announcement, file_here
from online_sao.service.http import Keys
from online_sao.service.logs import KEPT_PARTS, forget_old_logs, start_log
from online_sao.store import RolloutStore
from online_sao.types import Purpose, Rollout

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 5.0  # one long poll of the weight board
CATCH_UP_S = 0.1  # for the answer of a board that knows of nothing newer
RETRY_S = 1.0
RECORD_TIMEOUT_S = 12.0  # an answer waits no longer for a store that hangs (SQLite gives up at 10)
OWN_MAX_TOKENS = 56  # of prompts that we ask ourselves
KEPT_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models")


@serve.deployment(name=names.DEPLOYMENT)
@serve.ingress()
class Endpoint:
    """vLLM, its rollout hook, the task that follows new weights, and the HTTP app."""

    def __init__(self, config: dict[str, Any], model: str, keys: Keys) -> None:
        self._config = Config.model_validate(config)
        self._model = model
        self.keys = keys
        self.replica_id = secrets.token_hex(4)
        start_log(self._config.service, self._config.run_dir, f"replica-{self.replica_id}")
        forget_old_logs(
            self._config.run_dir, "replica-", KEPT_PARTS + self._config.engine.num_replicas
        )
        self.weights_error: str | None = None
        self.weights_broken = False
        self.has_caught_up = False  # has served the version that was current, once
        self.num_unrecorded = 0
        self.store_failed = False
        # One thread writes, so SQLite never sees two writers of this process.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._tasks: set[asyncio.Task[Any]] = set()
        self.engine: Any = None
        self.app_state: Any = None

    def __serve_build_asgi_app__(self) -> Any:
        from online_sao.service.routes import build_app

        # Serve calls this once, after the constructor; the engine is started by the app's
        # lifespan, because starting it needs the replica's event loop.
        return build_app(self, self._config)

    async def start(self, app_state: Any) -> None:
        """Start the engine; called by the app's lifespan before the first request."""
        from online_sao.service.engine import (
            build_engine,
            join_sessions,
            parse_server_arguments,
            server_arguments,
        )

        os.environ.update(engine_environment(self._config))
        self.store = RolloutStore(self._config.store_url)
        args = parse_server_arguments(server_arguments(self._config, self._model))
        self.engine = await build_engine(self._config, args)
        self.engine.recorder = self._record
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state

        from online_sao.service.sessions import SessionPrompts

        await init_app_state(self.engine, app_state, args, await self.engine.get_supported_tasks())
        chat = app_state.openai_serving_chat
        if chat is not None:
            prompts = SessionPrompts(
                self.store, chat.renderer.tokenizer, self._config.service.session_match_turns
            )
            join_sessions(chat, prompts)
        # vLLM's handler of engine errors tells its own server to exit when the engine is dead;
        # here the health check has Serve restart the replica.
        app_state.server = SimpleNamespace(should_exit=False)
        self.app_state = app_state
        # One that was started anew must not answer with the start weights meanwhile.
        await self._take_news(CATCH_UP_S)
        self._keep(asyncio.create_task(self._follow_weights()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(Exception):
            await self._board().leave.remote(self.replica_id)
        if self.engine is not None:
            self.engine.shutdown()
        shutil.rmtree(process_folder(), ignore_errors=True)  # copies from other nodes
        self._writer.shutdown()

    async def check_health(self) -> None:
        """Serve restarts the replica when this raises."""
        if self.engine is None:
            return
        await self.engine.check_health()
        if self.weights_broken:
            raise WeightUpdateError(self.weights_error or "a weight update failed half-way")

    # --- rollouts

    async def _record(self, rollout: Rollout) -> bool:
        """Commit a rollout; False (and serving goes on) when the store refuses."""
        about = {
            "rollout_id": rollout.id,
            "weight_version": rollout.weight_version_end,
            "state": str(rollout.state),
            "seconds": rollout.latency_s,
        }
        writing = asyncio.get_running_loop().run_in_executor(self._writer, self.store.add, rollout)
        try:
            # Shielded: what was begun may still be written, only nobody waits for it.
            await asyncio.wait_for(asyncio.shield(writing), RECORD_TIMEOUT_S)
        except (StoreError, TimeoutError) as error:
            self.num_unrecorded += 1
            self.store_failed = True
            writing.add_done_callback(_seen)
            log.warning("not recorded: %s", error or "the store does not answer", extra=about)
            return False
        log.info("recorded", extra=about)
        self.store_failed = False
        with contextlib.suppress(ValueError):
            ray.get_actor(names.REWARD_WORKER, namespace=names.NAMESPACE).wake.remote()
        return True

    async def generate_for_pretraining(self, messages: list[dict[str, str]]) -> str:
        """One rollout for value pretraining; returns its id. Called by the learner's actor."""
        return await self._generate(messages, Purpose.PRETRAINING)

    async def generate_probe(self, messages: list[dict[str, str]]) -> str:
        """One held-out answer (service.probes); returns its rollout's id."""
        return await self._generate(messages, Purpose.PROBE)

    async def _generate(self, messages: list[dict[str, str]], purpose: Purpose) -> str:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        from online_sao.service.engine import CURRENT_REQUEST, RequestContext

        while self.app_state is None:
            await asyncio.sleep(RETRY_S)
        unique = f"{purpose}-{secrets.token_hex(12)}"
        body: dict[str, Any] = {
            "messages": messages,
            "max_tokens": OWN_MAX_TOKENS,
            "temperature": 1.0,
        }
        context = RequestContext(f"chatcmpl-{unique}", body, purpose=purpose)
        token = CURRENT_REQUEST.set(context)
        try:
            request = ChatCompletionRequest(
                model=self._config.served_name, request_id=unique, **body
            )
            answer = await self.app_state.openai_serving_chat.create_chat_completion(request)
        finally:
            CURRENT_REQUEST.reset(token)
        if not context.recorded:
            detail = getattr(getattr(answer, "error", None), "message", "the store refused it")
            raise RuntimeError(f"A rollout for {purpose} failed: {detail}")
        return context.response_id

    # --- weights

    async def _follow_weights(self) -> None:
        while True:
            try:
                await self._take_news(FETCH_TIMEOUT_S)
            except Exception as error:  # this task is all that brings new weights
                log.exception("following the weights failed")
                self.weights_error = f"{type(error).__name__}: {error}"
                with contextlib.suppress(Exception):
                    self.weights_broken = await self.engine.is_paused()
                await asyncio.sleep(RETRY_S)

    async def _take_news(self, timeout_s: float) -> None:
        """Load what the board says is current, if it is not what serves, within `timeout_s`."""
        try:
            board = self._board()
            fetched = await board.fetch.remote(
                self.replica_id, self.engine.weight_version, timeout_s
            )
            if fetched is not None:
                await self._load(board, fetched)
        except (ray.exceptions.RayError, ValueError) as error:
            log.warning("the weight board does not answer: %s", error)
            await asyncio.sleep(RETRY_S)

    async def _load(self, board: Any, announced: Announcement) -> None:
        version = announced.version
        if announced.file is None:
            # The start weights under a new number: nothing to load.
            await self.engine.update_weight_version(str(version))
            self.engine.weight_version = version
            await board.report.remote(self.replica_id, version)
            return
        about = {"weight_version": version, "replica": self.replica_id}
        try:
            paused_s = await self.engine.load_weights(await file_here(announced))
            log.info("weights loaded", extra={**about, "seconds": paused_s})
        except WeightUpdateError as error:
            log.warning("weights refused: %s", error, extra=about)
            self.weights_error = str(error)
            self.weights_broken = await self.engine.is_paused()
            await board.report.remote(self.replica_id, version, str(error))
            await asyncio.sleep(RETRY_S)
            return
        self.weights_error, self.weights_broken = None, False
        await board.report.remote(self.replica_id, version)

    def _board(self) -> Any:
        return ray.get_actor(names.BOARD, namespace=names.NAMESPACE)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _seen(writing: asyncio.Future[Any]) -> None:
    """A failure that comes after nobody waits any more is no surprise to asyncio."""
    if not writing.cancelled():
        writing.exception()
