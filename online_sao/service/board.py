"""Where the learner announces weights and the engine replicas fetch them.

Replicas pull: a replica that starts late or returns from a crash asks for the current
version like any other, and one that hangs never blocks the learner for longer than its
deadline.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import ray

from online_sao.engine.weight_file import WeightFile

HEARD_WITHIN_S = 20.0  # a replica that has not asked for so long is not waited for


@dataclass
class ReplicaState:
    version: int = -1  # newest version it serves
    error: str | None = None
    heard_at: float = 0.0


@ray.remote(num_cpus=0, max_concurrency=1000)
class WeightBoard:
    """Holds the current version and what each replica serves. Methods never block one another."""

    def __init__(self) -> None:
        self._version = 0
        self._file: WeightFile | None = None
        self._replicas: dict[str, ReplicaState] = {}
        self._changed = asyncio.Condition()

    async def announce(self, version: int, file: WeightFile | None) -> None:
        """From now on `version` is current; no file means the start weights."""
        async with self._changed:
            self._version, self._file = version, file
            self._changed.notify_all()

    async def current(self) -> tuple[int, WeightFile | None]:
        return self._version, self._file

    async def fetch(
        self, replica: str, have: int, timeout_s: float
    ) -> tuple[int, WeightFile | None] | None:
        """The current version once it is not `have`; None after `timeout_s`."""
        self._heard(replica)
        async with self._changed:
            try:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: self._version != have), timeout_s
                )
            except TimeoutError:
                return None
            finally:
                self._heard(replica)
        return self._version, self._file

    async def report(self, replica: str, version: int, error: str | None = None) -> None:
        """`replica` serves `version` now, or could not load it because of `error`."""
        async with self._changed:
            state = self._heard(replica)
            state.error = error
            if error is None:
                state.version = version
            self._changed.notify_all()

    async def leave(self, replica: str) -> None:
        async with self._changed:
            self._replicas.pop(replica, None)
            self._changed.notify_all()

    async def wait_applied(self, version: int, timeout_s: float) -> str | None:
        """None once every replica in touch serves `version`; otherwise what went wrong."""

        def settled() -> bool:
            return all(r.version >= version or r.error for r in self._in_touch().values())

        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(settled), timeout_s)
            except TimeoutError:
                late = [n for n, r in self._in_touch().items() if r.version < version]
                return f"no answer from {', '.join(late)} within {timeout_s:g} s"
        errors = [r.error for r in self._in_touch().values() if r.error and r.version < version]
        return errors[0] if errors else None

    async def replicas(self) -> dict[str, ReplicaState]:
        return dict(self._replicas)

    def _heard(self, replica: str) -> ReplicaState:
        state = self._replicas.setdefault(replica, ReplicaState())
        state.heard_at = time.monotonic()
        return state

    def _in_touch(self) -> dict[str, ReplicaState]:
        limit = time.monotonic() - HEARD_WITHIN_S
        return {name: state for name, state in self._replicas.items() if state.heard_at >= limit}
