"""One look for every progress bar, and lines instead of bars where there is no terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PLAIN_INTERVAL_S = 5.0  # without a terminal, a task prints a line this often


class _PlainProgress(Progress):
    """For logs and CI: prints "description done/total" now and then, never a control code."""

    def __init__(self) -> None:
        super().__init__(console=Console(file=sys.stderr), disable=True)
        self._last: dict[Any, float] = {}

    def add_task(self, description: str, *args: Any, **kwargs: Any) -> Any:
        print(f"{description} ...", file=sys.stderr, flush=True)
        return super().add_task(description, *args, **kwargs)

    def update(self, task_id: Any, **kwargs: Any) -> None:
        super().update(task_id, **kwargs)
        task = self._tasks[task_id]
        now = time.monotonic()
        if task.total and (
            task.completed >= task.total or now - self._last.get(task_id, 0.0) >= PLAIN_INTERVAL_S
        ):
            self._last[task_id] = now
            line = f"{task.description} {task.completed:.0f}/{task.total:.0f}"
            print(line, file=sys.stderr, flush=True)


def make_progress() -> Progress:
    """A rich progress bar on a terminal, plain lines elsewhere; both on standard error."""
    if not sys.stderr.isatty():
        return _PlainProgress()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
    )
