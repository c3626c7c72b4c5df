"""What benchmarks that start servers share."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

READY_S = 300


def status(url: str) -> int | None:
    """The HTTP status of a GET; None if nothing answers."""
    try:
        return httpx.get(url, timeout=5).status_code
    except httpx.HTTPError:
        return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running(
    command: list[str], log: Path, ready: str, environment: dict[str, str]
) -> Iterator[None]:
    """A server in a process group of its own; ended, with all its children, on the way out."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=stream,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + READY_S
        while status(ready) != 200:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command[0]} did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
