"""Says that memory runs out before Ray acts on it.

Beyond a share of the machine's memory Ray ends processes, and those of this endpoint are the
largest: learner and engine are begun anew, and again, and nobody is told why nothing is learned.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
RAY_THRESHOLD_VARIABLE = "RAY_memory_usage_threshold"
RAY_THRESHOLD = 0.95  # Ray's default
MARGIN = 0.05  # below Ray's threshold at which it is said
REPEAT_S = 600.0


def available_memory() -> tuple[int, int]:
    """What is left and what there is in all, bytes; of a container what it may have, as Ray counts
    it (its files in the page cache can be dropped, and are not in use)."""
    memory = psutil.virtual_memory()
    for limit, usage, prefix in (
        ("memory.max", "memory.current", ""),  # cgroup v2
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_"),
    ):
        try:
            total = int((CGROUP / limit).read_text())  # "max" where there is no limit
            used = int((CGROUP / usage).read_text())
            stat = (CGROUP / usage).with_name("memory.stat").read_text()
            counts = dict(line.split(maxsplit=1) for line in stat.splitlines())
            used -= sum(int(counts[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
        except (OSError, ValueError, KeyError):
            continue
        if total < memory.total:
            return total - used, total
    return memory.available, memory.total


def memory_problem() -> str | None:
    """One sentence on what is wrong and what to do; None while there is memory enough."""
    available, total = available_memory()
    used = 1 - available / total
    limit = float(os.environ.get(RAY_THRESHOLD_VARIABLE, RAY_THRESHOLD))
    if used < limit - MARGIN:
        return None
    return (
        f"Memory is nearly used up: {available / 2**30:.1f} of {total / 2**30:.1f} GiB are left, "
        f"and beyond {limit:.0%} Ray ends the endpoint's processes, which then start "
        "again and get nothing done; stop other programs, or choose a smaller model."
    )


class MemoryWatch:
    """Hands `memory_problem` on, and again every REPEAT_S while it lasts."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._quiet_until = 0.0

    def look(self) -> None:
        problem = memory_problem()
        if problem is None:
            self._quiet_until = 0.0
        elif time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + REPEAT_S
            self._tell(problem)
