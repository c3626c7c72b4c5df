"""What benchmarks that start servers share."""

from __future__ import annotations

import socket

import httpx


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
