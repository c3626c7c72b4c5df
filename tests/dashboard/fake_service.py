"""A stand-in for the service, for pages that ask one: for tests, and for pictures:

python tests/dashboard/fake_service.py 8598 429       # port, and the version it serves
"""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeService:
    """Answers the routes that the dashboard asks, and remembers what it was told."""

    def __init__(self, version: int = 12) -> None:
        self.url = ""
        self.version = version
        self.key: str | None = None
        self.paused = False
        self.reason = "operator"
        self.told: list[tuple[str, str, Any]] = []
        self.refuse: tuple[int, dict[str, Any]] | None = None

    def answer(
        self, method: str, path: str, key: str | None, body: Any
    ) -> tuple[int, dict[str, Any]]:
        if path == "/health":
            return 200, {}
        if self.key is not None and key != f"Bearer {self.key}":
            return 401, {"error": {"message": "wrong key"}}
        if method != "GET":
            self.told.append((method, path, body))
            if self.refuse is not None:
                return self.refuse
        if path == "/v1/learning/pause":
            self.paused = True
        if path == "/v1/learning/resume":
            self.paused = False
        if path == "/v1/learning/rollback":
            return 200, {"version": 77}
        if path == "/v1/learning/checkpoint":
            return 200, {"version": 12}
        return 200, {
            "weight_version": self.version,
            "serving_version": self.version,
            "paused": self.paused,
            "pause_reason": self.reason,
        }


@contextlib.contextmanager
def served(fake: FakeService, port: int = 0) -> Iterator[FakeService]:
    """`fake` behind a port of this machine; its `url` says which."""

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, data = fake.answer(
                self.command, self.path, self.headers.get("Authorization"), body
            )
            text = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = handle_any

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    fake.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("version", type=int)
    options = parser.parse_args()
    with served(FakeService(options.version), options.port), contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()


if __name__ == "__main__":
    main()
