"""Generated stores, a small store made by hand, and a service that only pretends."""

import importlib.util
import sys
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


@pytest.fixture
def service() -> Iterator[Any]:
    pretending = _load(Path(__file__).with_name("fake_service.py"))
    with pretending.served(pretending.FakeService()) as fake:
        yield fake


@pytest.fixture
def nobody() -> str:
    """A URL at which nothing listens."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        return f"http://127.0.0.1:{server.server_port}"
