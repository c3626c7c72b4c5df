"""Says that memory runs out before Ray acts on it.

Beyond a share of the machine's memory Ray ends processes, and those of this endpoint are the
largest: learner and engine are begun anew, and again, and nobody is told why nothing is learned.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil

RAY_THRESHOLD_VARIABLE = "RAY_memory_usage_threshold"
RAY_THRESHOLD = 0.95  # Ray's default
MARGIN = 0.05  # below Ray's threshold at which it is said
REPEAT_S = 600.0


def memory_problem() -> str | None:
    """One sentence on what is wrong and what to do; None while there is memory enough."""
    memory = psutil.virtual_memory()
    used = 1 - memory.available / memory.total
    limit = float(os.environ.get(RAY_THRESHOLD_VARIABLE, RAY_THRESHOLD))
    if used < limit - MARGIN:
        return None
    return (
        f"Memory is nearly used up: {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} "
        f"GiB are left, and beyond {limit:.0%} Ray ends the endpoint's processes, which then start "
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
