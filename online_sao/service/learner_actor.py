"""The learner as a named Ray actor: its loop in a thread of its own, control beside it."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import ray
from torch import Tensor

from online_sao.config import Config
from online_sao.engine.weight_file import WeightFile, write_weight_file
from online_sao.errors import (
    ConfigError,
    FencedError,
    OnlineSAOError,
    StoreError,
    WeightUpdateError,
)
from online_sao.learner.learner import Learner, choose_device
from online_sao.learner.loop import LearnerLoop, make_run
from online_sao.service import names
from online_sao.service.board import Announcement
from online_sao.service.logs import start_log
from online_sao.service.memory_watch import memory_problem
from online_sao.service.probes import Messages, Prober
from online_sao.store import RolloutStore
from online_sao.types import Preference, Purpose, Rollout, RolloutState

log = logging.getLogger(__name__)

CONTROL_THREADS = 16
PRETRAINING_POLL_S = 0.3
RESTART_S = 5.0  # after the store or a replica failed while the learner was starting
ANSWER_TIMEOUT_S = 600.0  # of an answer for value pretraining; they are all asked at once
REQUEST_TIMEOUT_S = 120.0  # of a rollback or checkpoint
PROBE_TIMEOUT_S = 600.0  # a round's prompts queue behind those of clients


@ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=0, max_concurrency=CONTROL_THREADS)
class LearnerActor:
    """Everything runs in one background thread, so every method answers at once.

    A killed actor is restarted by Ray and resumes from the newest checkpoint by itself.
    """

    def __init__(self, config: dict[str, Any], model: str, model_hash: str, weights_dir: str):
        self._config = Config.model_validate(config)
        start_log(self._config.service, self._config.run_dir, "learner")
        self._model = model
        self._model_hash = model_hash
        self._weights_dir = Path(weights_dir)
        self._state = "loading"
        self._error: str | None = None
        self._restart_told = False
        self._loop: LearnerLoop | None = None
        self._publisher: BoardPublisher | None = None
        self._stopping = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._main, name="learner", daemon=True)
        self._thread.start()

    # --- control

    def status(self) -> dict[str, Any]:
        loop = self._loop
        return {
            "state": self._state,
            "error": self._error,
            "preset": self._config.learner.preset,
            **(asdict(loop.status()) if loop else {}),
        }

    def wake(self) -> None:
        if self._loop:
            self._loop.wake()

    def pause(self, reason: str) -> None:
        self._require_loop().pause(reason)

    def resume(self) -> None:
        self._require_loop().resume()

    def rollback(self, version: int) -> int:
        return _result(self._require_loop().request_rollback(version))

    def checkpoint(self) -> int:
        return _result(self._require_loop().request_checkpoint())

    def announce_again(self) -> None:
        if self._publisher is not None:
            self._publisher.announce_again()

    def stop(self, timeout_s: float) -> bool:
        """Finish the running update, write a checkpoint, end. False if that took too long."""
        self._stopping.set()
        if self._loop:
            self._loop.stop()
        return self._done.wait(timeout_s)

    def _require_loop(self) -> LearnerLoop:
        if self._loop is None:
            raise OnlineSAOError("The learner is still loading; try again in a few seconds.")
        return self._loop

    # --- the thread

    def _main(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._learn()
                    break
                except FencedError:
                    raise
                except (StoreError, ray.exceptions.RayError, TimeoutError) as error:
                    # What passes must not end serving: the store is down, a replica was lost.
                    self._loop = None
                    self._state, self._error = "loading", f"{error} It is tried again."
                    log.warning("the learner starts again: %s", error)
                    self._stopping.wait(RESTART_S)
            self._state = "stopped"
        except FencedError as error:
            self._state, self._error = "replaced", str(error)
        except Exception as error:
            if self._stopping.is_set():  # in the middle of loading or pretraining
                self._state = "stopped"
                return
            self._state, self._error = "failed", f"{type(error).__name__}: {error}"
            log.error("the learner failed: %s", traceback.format_exc())
        finally:
            self._done.set()

    def _learn(self) -> None:
        """From loading to the end of learning."""
        config = self._config
        learner = Learner(config.learner, self._model, choose_device(config.model.device))
        store = RolloutStore(config.store_url)
        publisher = BoardPublisher(self._weights_dir, config.engine.update_deadline_s)
        self._publisher = publisher
        run = make_run(config, self._model_hash)
        loop = LearnerLoop(config, run, learner, store, publisher)
        loop.start()
        self._loop, self._error = loop, None
        self._tell_of_restart(store, loop.version)
        if self._stopping.is_set():
            loop.stop()
        if loop.serves_start_weights:
            publisher.announce_start(loop.version)
        else:  # before pretraining, which may wait for clients, who wait for an engine with news
            loop.publish_if_due()
        if loop.needs_pretraining():
            self._state = "pretraining"
            self._pretrain(loop, learner, store)
        self._state = "learning"
        self._start_probes(loop, store)
        loop.run()

    def _tell_of_restart(self, store: RolloutStore, version: int) -> None:
        """So that whoever watches sees why no update was made for a while."""
        if self._restart_told or not ray.get_runtime_context().was_current_actor_reconstructed:
            return
        self._restart_told = True
        what = f"The learner's process had ended and was started again, from version {version}."
        problem = memory_problem()
        store.add_event("error", {"what": f"{what} {problem}" if problem else what}, version)

    def _pretrain(self, loop: LearnerLoop, learner: Learner, store: RolloutStore) -> None:
        """Value pretraining (docs/algorithm.md), from topics or from the first live rollouts."""
        count = self._config.learner.value_pretraining_rollouts
        prompts = self._pretraining_prompts(store, count)
        if prompts is None:
            rollouts = self._first_live_rollouts(loop, store, count)
        else:
            rollouts = self._generated_rollouts(loop, store, prompts)
        if len(rollouts) < count / 2:
            store.add_event(
                "error",
                {
                    "what": f"The critic was fitted to {len(rollouts)} of {count} answers: the "
                    "judge marked no more. See why with `online-sao doctor`, and start again with "
                    "a new --run-dir for a critic that knows the start policy."
                },
                loop.version,
            )
        if rollouts:
            metrics = loop.pretrain(rollouts)
            store.add_event("value_pretraining", dict(metrics), loop.version)

    def _pretraining_prompts(self, store: RolloutStore, count: int) -> list[Messages] | None:
        """On training topics, under the pool in force; None where there are none for it."""
        from online_sao.writing import load_topics, pretraining_prompts

        topics, preference = self._config.service.topics, store.preference()
        pool = preference.pool if preference else self._config.preference.pool
        if topics is None:
            return None
        try:
            return pretraining_prompts(
                pool, count, self._config.learner.seed, topics=load_topics(topics)
            )
        except ConfigError as error:  # a preference of other styles was set over HTTP
            log.warning("value pretraining takes the first live rollouts: %s", error)
            return None

    def _generated_rollouts(
        self, loop: LearnerLoop, store: RolloutStore, prompts: Sequence[Messages]
    ) -> Sequence[Rollout]:
        """Judged rollouts of the start policy on `prompts`, asked of the engine itself."""
        from ray import serve

        count = len(prompts)
        loop.note_pretraining("waiting for the engine", 0, count)
        handle = self._engine_handle(serve)
        known = self._pretraining_rollouts(store, loop)
        # What an earlier start of this run has generated counts.
        asked = [
            handle.generate_for_pretraining.remote(messages) for messages in prompts[len(known) :]
        ]
        loop.note_pretraining("generating", len(known), count)
        for done, response in enumerate(asked, start=len(known) + 1):
            self._check_stop()
            response.result(timeout_s=ANSWER_TIMEOUT_S)
            loop.note_pretraining("generating", done, count)
        while True:
            self._check_stop()
            rollouts = self._pretraining_rollouts(store, loop)
            waiting = [r for r in rollouts if r.judge_state == "waiting"]
            loop.note_pretraining("judging", len(rollouts) - len(waiting), count)
            if not waiting:
                break
            time.sleep(PRETRAINING_POLL_S)
        ids = [r.id for r in self._pretraining_rollouts(store, loop) if r.reward is not None]
        return store.get_many(ids)

    def _start_probes(self, loop: LearnerLoop, store: RolloutStore) -> None:
        from ray import serve

        def ask(prompts: Sequence[Messages]) -> list[str]:
            handle = self._engine_handle(serve)
            asked = [handle.generate_probe.remote(messages) for messages in prompts]
            return [response.result(timeout_s=PROBE_TIMEOUT_S) for response in asked]

        def judge_forgeries(preference: Preference) -> list[float]:
            worker = ray.get_actor(names.REWARD_WORKER, namespace=names.NAMESPACE)
            judged = worker.judge_forgeries.remote(preference.style, list(preference.pool))
            return ray.get(judged, timeout=PROBE_TIMEOUT_S)

        prober = Prober(
            self._config, store, lambda: loop.version, ask, judge_forgeries, loop.add_probe
        )
        threading.Thread(target=prober.run, args=(self._done,), name="probes", daemon=True).start()

    def _pretraining_rollouts(self, store: RolloutStore, loop: LearnerLoop) -> Sequence[Rollout]:
        rollouts = store.list(
            purpose=Purpose.PRETRAINING,
            run_id=loop.status().run_id,
            limit=100_000,
            with_tokens=True,
        )
        # Those whose texts were deleted (service.retention_days) are generated anew.
        return [rollout for rollout in rollouts if len(rollout.token_ids)]

    def _first_live_rollouts(
        self, loop: LearnerLoop, store: RolloutStore, count: int
    ) -> Sequence[Rollout]:
        """Without topics: the first rewarded live rollouts fit the critic and are then done."""
        while True:
            self._check_stop()
            rollouts = store.list(
                states=[RolloutState.REWARDED],
                purpose=Purpose.SERVE,
                run_id=loop.status().run_id,
                limit=count,
                with_tokens=True,
            )
            loop.note_pretraining(names.COLLECTING, len(rollouts), count)
            if len(rollouts) >= count:
                store.discard([rollout.id for rollout in rollouts], "value_pretraining")
                return rollouts
            time.sleep(PRETRAINING_POLL_S)

    def _check_stop(self) -> None:
        if self._stopping.is_set():
            raise OnlineSAOError("Stopped before learning began.")

    def _engine_handle(self, serve: Any) -> Any:
        while True:
            self._check_stop()
            try:
                return serve.get_app_handle(names.APP)
            except Exception:  # Serve has no narrower error for "not deployed yet"
                time.sleep(PRETRAINING_POLL_S)


def _result(future: Future[int]) -> int:
    """What the loop made of a request; it may be busy, or wait for the store."""
    try:
        return future.result(REQUEST_TIMEOUT_S)
    except TimeoutError:
        if future.cancel():
            raise OnlineSAOError(
                f"Nothing was done: the learner did not come to it in {REQUEST_TIMEOUT_S:.0f} s."
            ) from None
        raise OnlineSAOError(
            "The learner is still at it; GET /v1/learning/versions shows when it is done."
        ) from None


class BoardPublisher:
    """Writes a weight file to shared memory and announces it on the board.

    The engines load it while the learner goes on: `publish` returns when the file is
    announced, and the next one first waits until the last is served. So what is wrong with a
    version is raised when the next is published, and at most one is on its way.
    """

    def __init__(self, folder: Path, deadline_s: float) -> None:
        self._folder = folder
        self._deadline_s = deadline_s
        self._on_its_way: int | None = None
        self._last: Announcement | None = None

    def announce_start(self, version: int) -> None:
        self._last = Announcement(version)
        ray.get(self._board().announce.remote(self._last))

    def announce_again(self) -> None:
        """A board that was restarted knows nothing; the engines go on with what they have."""
        if self._last is not None:
            ray.get(self._board().announce.remote(self._last), timeout=self._deadline_s)

    def publish(self, version: int, weights: dict[str, Tensor]) -> None:
        self._settle()
        file = write_weight_file(self._folder, version, weights)
        try:
            announcement = Announcement(version, file, _node(), _shared(file))
            self._last = announcement
            ray.get(self._board().announce.remote(announcement), timeout=self._deadline_s)
        except (ray.exceptions.RayError, ValueError) as problem:
            raise WeightUpdateError(f"Version {version} was not published: {problem}.") from None
        self._on_its_way = version

    def _settle(self) -> None:
        version, self._on_its_way = self._on_its_way, None
        if version is None:
            return
        try:
            error = ray.get(
                self._board().wait_applied.remote(version, self._deadline_s),
                timeout=2 * self._deadline_s,
            )
        except (ray.exceptions.RayError, ValueError) as problem:
            error = str(problem)
        if error:
            raise WeightUpdateError(f"Version {version} is not served everywhere: {error}.")

    def _board(self) -> Any:
        return ray.get_actor(names.BOARD, namespace=names.NAMESPACE)


def _node() -> str:
    return ray.get_runtime_context().get_node_id()


def _shared(file: WeightFile) -> list[Any]:
    """The file's bytes in the object store, where there are other nodes that may want them."""
    if sum(node["Alive"] for node in ray.nodes()) < 2:
        return []
    return [ray.put(np.fromfile(file.path, np.uint8))]
