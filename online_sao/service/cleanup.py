"""Leave nothing behind: processes and shared memory of an endpoint that ended, or crashed.

What is ours is known by the environment variable RUN_DIR_VARIABLE of a process (it is
inherited by vLLM's engine processes), and by the list of shared-memory segments that a
running endpoint writes down. Nothing is ended or removed on any other ground.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import psutil

from online_sao.engine.weight_file import SHARED_MEMORY
from online_sao.service.names import RUN_DIR_VARIABLE

SEGMENTS_FILE = "shared_memory.json"
SEGMENT_PREFIXES = ("psm_", "sem.")  # Python's shared memory and semaphores
TERMINATE_WAIT_S = 5.0


def own_processes(run_dir: Path) -> list[psutil.Process]:
    """Processes started for the endpoint of `run_dir`, this one excepted."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(RUN_DIR_VARIABLE) == str(run_dir):
                found.append(process)
    return found


def end_processes(run_dir: Path) -> int:
    """End what is left of the endpoint of `run_dir`; return how many processes that were."""
    processes = own_processes(run_dir)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=TERMINATE_WAIT_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=TERMINATE_WAIT_S)
    return len(processes)


def note_segments(run_dir: Path) -> None:
    """Write down the shared-memory segments that our processes map, for `remove_segments`."""
    segments = {*_noted(run_dir), *own_segments(run_dir)}
    with contextlib.suppress(OSError):
        (run_dir / SEGMENTS_FILE).write_text(json.dumps(sorted(segments)))


def own_segments(run_dir: Path) -> set[str]:
    """The shared-memory segments that our processes map now."""
    segments: set[str] = set()
    for process in own_processes(run_dir):
        with contextlib.suppress(psutil.Error, OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                path = line.partition("/dev/shm/")[2]
                name = path.removesuffix(" (deleted)")
                if name.startswith(SEGMENT_PREFIXES) and "/" not in name:
                    segments.add(name)
    return segments


def remove_segments(run_dir: Path) -> int:
    """Remove noted segments; call it when no process of ours is left. Returns how many."""
    removed = 0
    for name in _noted(run_dir):
        with contextlib.suppress(OSError):
            (SHARED_MEMORY / name).unlink()
            removed += 1
    with contextlib.suppress(OSError):
        (run_dir / SEGMENTS_FILE).unlink()
    return removed


def wait_for_end(run_dir: Path, timeout_s: float) -> bool:
    """True once no process of ours is left."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not own_processes(run_dir):
            return True
        time.sleep(0.2)
    return False


def _noted(run_dir: Path) -> list[str]:
    try:
        noted = json.loads((run_dir / SEGMENTS_FILE).read_text())
    except (OSError, ValueError):
        return []
    # The file lies in a folder of the user's; take nothing from it but plain segment names.
    return [
        n for n in noted if isinstance(n, str) and n.startswith(SEGMENT_PREFIXES) and "/" not in n
    ]
