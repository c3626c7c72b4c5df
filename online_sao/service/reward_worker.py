"""Judge to store: takes what waits for a verdict, asks the judge, records the answer.

Nothing is held only here: what waits is read from the store, so a worker that dies is
replaced by one that goes on where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import ray

from online_sao.config import Config
from online_sao.errors import NotFoundError, StoreError
from online_sao.judging import FORGED_PROMPT, FORGERIES, make_judge, to_stored
from online_sao.service import names
from online_sao.service.logs import start_log
from online_sao.store import RolloutStore
from online_sao.types import Rollout, StoredVerdict

log = logging.getLogger(__name__)

POLL_S = 1.0  # how often the store is asked unprompted
STORE_RETRY_S = 2.0
CIRCUIT_RETRY_S = 5.0  # while the judge leaves a provider alone that failed repeatedly
CIRCUIT_OPEN = "circuit_open"
LONG_AGO = datetime.min.replace(tzinfo=UTC)


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)
class RewardWorker:
    """An actor on one event loop; `run` never returns."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = Config.model_validate(config)
        start_log(self._config.service, self._config.run_dir, "judge")
        self._store = RolloutStore(self._config.store_url)
        self._judge = make_judge(self._config)
        self._wake = asyncio.Event()
        self._in_flight: set[str] = set()
        self._slots = asyncio.Semaphore(self._config.judge.concurrency)
        self._counts = {"scored": 0, "unscored": 0}
        self._failure: str | None = None
        self._task = asyncio.get_event_loop().create_task(self._run())

    async def wake(self) -> None:
        self._wake.set()

    async def status(self) -> dict[str, Any]:
        return {
            **self._counts,
            "in_flight": len(self._in_flight),
            "failure": self._failure,
            "model": self._judge.model,
            "cost": self._judge.stats()["cost"],
        }

    async def judge_forgeries(self, style: str, pool: list[str]) -> list[float]:
        """Rewards of answers made to be worthless; those without a verdict are left out."""
        outcomes = [
            to_stored(await self._judge.score(FORGED_PROMPT, answer, style, pool))
            for answer in FORGERIES
        ]
        return [outcome.reward for outcome in outcomes if isinstance(outcome, StoredVerdict)]

    async def _run(self) -> None:
        while True:
            try:
                await self._one_round()
            except StoreError as error:
                self._failure = str(error)
                log.warning("%s", error)
                await asyncio.sleep(STORE_RETRY_S)
            try:
                await asyncio.wait_for(self._wake.wait(), POLL_S)
            except TimeoutError:
                continue
            finally:
                self._wake.clear()

    async def _one_round(self) -> None:
        most = 2 * self._config.judge.concurrency
        # In flight ones are still "waiting" in the store, so ask for that many more.
        waiting = await asyncio.to_thread(
            self._store.waiting_for_judge,
            most + len(self._in_flight),
            clients_before=self._clients_before(),
        )
        for rollout in waiting:
            if rollout.id in self._in_flight or len(self._in_flight) >= most:
                continue
            self._in_flight.add(rollout.id)
            asyncio.get_running_loop().create_task(self._judge_one(rollout))

    def _clients_before(self) -> datetime | None:
        """Answers to clients recorded since then may still get feedback; None: none waits."""
        service = self._config.service
        if service.reward_source == "judge":
            return None
        if service.reward_source == "feedback":
            return LONG_AGO
        return datetime.now(UTC) - timedelta(seconds=service.feedback_wait_s)

    async def _judge_one(self, rollout: Rollout) -> None:
        try:
            async with self._slots:
                outcome = await self._score(rollout)
                while outcome == CIRCUIT_OPEN:  # it was not asked about this answer
                    self._failure = "The judge's provider failed repeatedly; answers wait for it."
                    await asyncio.sleep(CIRCUIT_RETRY_S)
                    outcome = await self._score(rollout)
            await self._keep(rollout, outcome)
        except NotFoundError:
            pass  # deleted while it was judged
        finally:
            self._in_flight.discard(rollout.id)
            self._wake.set()

    async def _keep(self, rollout: Rollout, outcome: StoredVerdict | str) -> None:
        """Write what the judge said, however long the store refuses: a verdict costs money."""
        about = {"rollout_id": rollout.id, "weight_version": rollout.weight_version_end}
        while True:
            try:
                if isinstance(outcome, StoredVerdict):
                    await asyncio.to_thread(self._store.set_verdict, rollout.id, outcome)
                else:
                    await asyncio.to_thread(self._store.set_unscored, rollout.id, outcome)
                break
            except NotFoundError:
                raise
            except StoreError as error:
                self._failure = str(error)
                await asyncio.sleep(STORE_RETRY_S)
        self._failure = None
        if isinstance(outcome, StoredVerdict):
            log.info("judged", extra={**about, "reward": outcome.reward})
            self._counts["scored"] += 1
            _notify_learner()
        else:
            log.warning("unscored: %s", outcome, extra=about)
            self._counts["unscored"] += 1

    async def _score(self, rollout: Rollout) -> StoredVerdict | str:
        """A verdict, or the reason why there is none."""
        if rollout.preference is None:
            return "no_preference"
        verdict = await self._judge.score(
            rollout.messages or [],
            rollout.answer,
            rollout.preference.style,
            rollout.preference.pool,
        )
        return to_stored(verdict)


def _notify_learner() -> None:
    with contextlib.suppress(ValueError):  # not up yet: it looks into the store by itself
        ray.get_actor(names.LEARNER, namespace=names.NAMESPACE).wake.remote()
