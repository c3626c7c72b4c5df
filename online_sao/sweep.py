"""Offline runs, each in a process of its own; several at a time share the cores between them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from online_sao.config import Config
from online_sao.errors import OnlineSAOError
from online_sao.progress import make_progress
from online_sao.scenario import Scenario

EXIT_ERROR, EXIT_STOPPED = 2, 130


@dataclass(frozen=True)
class PlannedRun:
    """What OfflineRunner is to do, and where its results go."""

    config: Config
    scenario: Scenario
    folder: Path
    lag: int


@dataclass(frozen=True)
class _Child:
    process: BaseProcess
    reports: Connection
    task: Any
    planned: PlannedRun
    share: int


def sweep(runs: Sequence[PlannedRun], jobs: int, tell: Callable[[str], None]) -> None:
    """Do `runs`, `jobs` at a time, each on its share of this process's cores.

    A core to itself is worth more than a share of all: on two cores two runs at once take
    about 1.4 times as long as one alone that has both. Memory is needed for `jobs` runs.

    Raises OnlineSAOError when runs failed, after the others were done; KeyboardInterrupt after
    every run has written what it has.
    """
    cores = sorted(os.sched_getaffinity(0))
    jobs = min(jobs, len(runs))
    if not 1 <= jobs <= len(cores):
        raise OnlineSAOError(f"{jobs} runs at once need as many cores, and there are {len(cores)}.")
    waiting, idle = list(runs), list(range(jobs))
    active: list[_Child] = []
    failed: list[Path] = []
    with make_progress() as bar:
        try:
            while waiting or active:
                while waiting and idle:
                    share = idle.pop(0)
                    active.append(_start(waiting.pop(0), share, cores[share::jobs], bar))
                ready = wait([child.reports for child in active])
                for child in [child for child in active if child.reports in ready]:
                    if _follow(child, bar):
                        continue
                    child.process.join()
                    active.remove(child)
                    idle.append(child.share)
                    bar.remove_task(child.task)
                    if child.process.exitcode == EXIT_STOPPED:
                        raise KeyboardInterrupt
                    if child.process.exitcode:
                        failed.append(child.planned.folder)
                        if child.process.exitcode < 0:  # then it could say nothing itself
                            tell(_killed(child.planned.folder, -child.process.exitcode))
                    else:
                        tell(f"{child.planned.folder}: done")
        except KeyboardInterrupt:
            # A terminal's Ctrl-C reaches all; a SIGTERM only us. They write what they have.
            for child in active:
                if child.process.is_alive() and child.process.pid is not None:
                    os.kill(child.process.pid, signal.SIGINT)
            for child in active:
                child.process.join()
            raise
    if failed:
        raise OnlineSAOError(
            f"{len(failed)} of {len(runs)} runs failed, see above: "
            + ", ".join(str(folder) for folder in failed)
        )


def _killed(folder: Path, number: int) -> str:
    """What is said of a run that a signal has ended."""
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {number}"
    said = f"{folder}: the run was ended by {name}"
    if number == signal.SIGKILL:
        return (
            f"{said}: memory may have run out. Give the same command again with fewer --jobs, or "
            "with more memory free; it goes on from the last checkpoint."
        )
    return f"{said}. Give the same command again: it goes on from the last checkpoint."


def _start(planned: PlannedRun, share: int, cores: list[int], bar: Any) -> _Child:
    # spawn: vLLM and the learner keep their memory until their process ends, and torch's
    # threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    reports, theirs = context.Pipe(duplex=False)
    # daemon: whatever ends us ends it.
    process = context.Process(target=_run, args=(planned, cores, theirs), daemon=True)
    process.start()
    theirs.close()  # the child's is then the only end, and its death is seen here
    task = bar.add_task(f"{planned.folder.name}: loading", total=None)
    return _Child(process, reports, task, planned, share)


def _follow(child: _Child, bar: Any) -> bool:
    """Show what the child reports; False once it has ended."""
    try:
        done, total, what = child.reports.recv()
    except EOFError:
        return False
    name = child.planned.folder.name
    bar.update(child.task, description=f"{name}: {what}", completed=done, total=total)
    return True


def _interrupt_once(*_: object) -> None:
    """A terminal and our parent may both say it; the second must not cut what is written."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run(planned: PlannedRun, cores: list[int], reports: Connection) -> None:
    """In the child."""
    signal.signal(signal.SIGINT, _interrupt_once)
    signal.signal(signal.SIGTERM, _interrupt_once)
    os.sched_setaffinity(0, cores)  # before torch and vllm count them
    warnings.simplefilter("ignore", FutureWarning)  # of the libraries, about one another
    try:
        from online_sao.offline import OfflineRunner, is_finished, only_here

        with only_here(planned.folder):
            if is_finished(planned.config, planned.scenario, planned.folder, planned.lag):
                return
            runner = OfflineRunner(planned.config, planned.scenario, planned.folder, planned.lag)
            runner.run(lambda *progress: reports.send(progress))
    except OnlineSAOError as error:
        print(f"online-sao: {planned.folder}: {error}", file=sys.stderr)
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_STOPPED)
