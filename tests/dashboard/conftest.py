"""Generated stores, a small store made by hand, and a service that only pretends."""

import importlib.util
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from online_sao.store import RolloutStore
from online_sao.types import Preference, Rollout, Run, StoredVerdict, WeightSpan, WeightVersion


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"loaded_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def generator() -> ModuleType:
    return _load(Path(__file__).with_name("generate.py"))


@pytest.fixture(scope="session")
def load() -> Callable[[Path], ModuleType]:
    """A module from its file: tests are no package."""
    return _load


@pytest.fixture(scope="session")
def shift_url(generator: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> str:
    """450 rollouts through three preferences. Only read from."""
    folder = tmp_path_factory.mktemp("shift")
    generator.write_tokenizer(folder / "tokenizer.json")
    url = f"sqlite:///{folder}/store.sqlite"
    generator.generate(url, 450)
    return url


class Small:
    """A store with what a test says, recorded the way the service does."""

    def __init__(self, path: Path) -> None:
        self.url = f"sqlite:///{path}/store.sqlite"
        self.store = RolloutStore(self.url)

    def begin(self, style: str = "cute") -> int:
        config = {"learner": {"max_policy_lag": 4, "eps_low": 0.3, "eps_high": 5.0}}
        self.store.start_run(Run("run", "sao", 0, "no-such-model", "hash", config))
        self.store.add_version(WeightVersion(0, None, "run", "start"))
        self.store.set_preference(Preference(style, ("cute", "classical")), 0)
        return self.store.new_epoch()

    def add(self, name: str, seen: str | None = None, reward: float = 1.0, **fields: Any) -> None:
        self.store.add(
            Rollout(
                **{
                    "id": name,
                    "response_id": name,
                    "choice": 0,
                    "prompt_token_ids": np.array([1], np.int32),
                    "token_ids": np.array([7, 8, 9], np.int32),
                    "behavior_logprobs": np.array([-0.5, -1.0, -2.0], np.float32),
                    "weight_spans": (WeightSpan(0, 0, 3),),
                    "temperature": 1.0,
                    "messages": [{"role": "user", "content": f"Question {name}?"}],
                    "answer": f"Answer {name}.",
                    "finish_reason": "stop",
                    **fields,
                }
            )
        )
        if seen is not None:
            self.store.set_verdict(
                name,
                StoredVerdict(1.0, reward, reward, detected_style=seen, rationale="because"),
            )

    def train(self, epoch: int, version: int, value: float, **metrics: float) -> str:
        """Claim the oldest rewarded rollout and make `version` from it."""
        (rollout,) = self.store.claim(
            epoch=epoch,
            limit=1,
            current_version=version - 1,
            max_policy_lag=100,
            max_claims=3,
            run_id="run",
        )
        values = np.array([value, 0.5, 0.5], np.float32)
        ratios = np.array([1.0, 0.7, 6.0], np.float32)
        self.store.finish_update(
            epoch=epoch,
            version=WeightVersion(version, version - 1, "run", "update", {**metrics}),
            rollouts=[(rollout.id, values, 1 - values, ratios)],
        )
        return rollout.id


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Small]:
    made = Small(tmp_path)
    yield made
    made.store.close()


class FakeService:
    """Answers the routes that the dashboard asks, and remembers what it was told."""

    def __init__(self, url: str) -> None:
        self.url = url
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
            "weight_version": 12,
            "serving_version": 12,
            "paused": self.paused,
            "pause_reason": self.reason,
        }


@pytest.fixture
def service() -> Iterator[FakeService]:
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

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake = FakeService(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield fake
    server.shutdown()
    server.server_close()


@pytest.fixture
def nobody() -> str:
    """A URL at which nothing listens."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        return f"http://127.0.0.1:{server.server_port}"
