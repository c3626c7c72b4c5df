"""Where the learner announces weights and the engine replicas fetch them.

Replicas pull: a replica that starts late or returns from a crash asks for the current
version like any other, and one that hangs never blocks the learner for longer than its
deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import ray

from online_sao.engine.weight_file import WeightFile, copy_weight_file, process_folder

RECHECK_S = 1.0
HEARD_WITHIN_S = 20.0  # a replica that has not asked for so long is not waited for


@dataclass(frozen=True)
class Announcement:
    """What is current. No file means the start weights, which every engine has.

    `data` holds the reference of the file's bytes in Ray's object store, for replicas on other
    nodes than `node`; it is a list because Ray would resolve a bare reference on the way. Empty
    on a cluster of one node.
    """

    version: int
    file: WeightFile | None = None
    node: str | None = None
    data: list[Any] = field(default_factory=list)


async def file_here(announced: Announcement) -> WeightFile:
    """The announced file on this node: itself, or a copy of what another node wrote."""
    assert announced.file is not None
    here = ray.get_runtime_context().get_node_id()
    if announced.node in (None, here) or not announced.data:
        return announced.file
    data = await announced.data[0]
    return await asyncio.to_thread(
        copy_weight_file, announced.file, memoryview(data), process_folder()
    )


@dataclass
class ReplicaState:
    version: int = -1  # newest version it serves
    error: str | None = None
    failed_version: int = -1  # that it could not load because of `error`
    heard_at: float = 0.0
    fetched_at: float | None = None  # while it loads what it fetched, it does not ask


@ray.remote(num_cpus=0, max_concurrency=1000)
class WeightBoard:
    """Holds the current version and what each replica serves. Methods never block one another."""

    def __init__(self) -> None:
        # None also after a restart: what was current is for the learner to say again.
        self._current: Announcement | None = None
        self._replicas: dict[str, ReplicaState] = {}
        self._changed = asyncio.Condition()

    async def announce(self, announcement: Announcement) -> None:
        """From now on this is current."""
        async with self._changed:
            self._current = announcement
            self._changed.notify_all()

    async def current_version(self) -> int | None:
        """None before anything was announced to this board."""
        return self._current.version if self._current else None

    async def fetch(self, replica: str, have: int, timeout_s: float) -> Announcement | None:
        """What is current once that is not `have`; None after `timeout_s`."""

        def is_news() -> bool:
            return self._current is not None and self._current.version != have

        self._heard(replica)
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(is_news), timeout_s)
            except TimeoutError:
                return None
            finally:
                self._heard(replica)
        self._heard(replica).fetched_at = time.monotonic()
        return self._current

    async def report(self, replica: str, version: int, error: str | None = None) -> None:
        """`replica` serves `version` now, or could not load it because of `error`."""
        async with self._changed:
            state = self._heard(replica)
            state.error, state.fetched_at = error, None
            if error is None:
                state.version = version
            else:
                state.failed_version = version
            self._changed.notify_all()

    async def leave(self, replica: str) -> None:
        async with self._changed:
            self._replicas.pop(replica, None)
            self._changed.notify_all()

    async def wait_applied(self, version: int, timeout_s: float) -> str | None:
        """None once every replica in touch serves `version`; otherwise what went wrong."""

        def settled() -> bool:
            return all(max(r.version, r.failed_version) >= version for r in in_touch().values())

        def in_touch() -> dict[str, ReplicaState]:
            return self._in_touch(began - timeout_s)

        began = time.monotonic()
        deadline = began + timeout_s
        async with self._changed:
            while not settled():
                left = deadline - time.monotonic()
                if left <= 0:
                    late = [n for n, r in in_touch().items() if r.version < version]
                    return f"no answer from {', '.join(late)} within {timeout_s:g} s"
                # One that is lost wakes nobody: it only falls out of touch.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(left, RECHECK_S))
        # Of an earlier version it says nothing about this one, which may be on its way.
        errors = [
            r.error
            for r in in_touch().values()
            if r.error and r.version < version <= r.failed_version
        ]
        return errors[0] if errors else None

    def _heard(self, replica: str) -> ReplicaState:
        state = self._replicas.setdefault(replica, ReplicaState())
        state.heard_at = time.monotonic()
        return state

    def _in_touch(self, fetched_after: float) -> dict[str, ReplicaState]:
        """Those that asked a moment ago, or are loading what they fetched after that time."""
        heard_after = time.monotonic() - HEARD_WITHIN_S
        return {
            name: state
            for name, state in self._replicas.items()
            if state.heard_at >= heard_after
            or (state.fetched_at is not None and state.fetched_at > fetched_after)
        }
