"""A store per test, once for each backend: SQLite, and a real PostgreSQL (tests/postgres.py)."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from postgres import own_schema

from online_sao.store import RolloutStore
from online_sao.types import Rollout, Run, StoredVerdict, WeightSpan, WeightVersion

BACKENDS = ["sqlite", "postgresql"]

GOOD = StoredVerdict(
    quality=1.0,
    style=1.0,
    reward=1.0,
    detected_style="cute",
    rationale="plenty of hearts",
    model="offline/archetypes",
    latency_s=0.25,
    cost=0.0,
    raw='{"style": 1}',
)


def rollout(name: str = "a", *, version: int = 0, tokens: int = 3, **fields: Any) -> Rollout:
    """A rollout as the service records it, sampled under one version."""
    defaults: dict[str, Any] = {
        "id": name,
        "response_id": f"chatcmpl-{name}",
        "choice": 0,
        "prompt_token_ids": np.array([1, 2, 70_000], np.int32),
        "token_ids": np.arange(10, 10 + tokens, dtype=np.int32),
        "behavior_logprobs": np.linspace(-0.5, -1.5, tokens, dtype=np.float32),
        "weight_spans": (WeightSpan(version, 0, tokens),),
        "temperature": 1.0,
        "messages": [{"role": "user", "content": "A line on rain?"}],
        "answer": "Drip, drop.",
        "finish_reason": "stop",
    }
    return Rollout(**(defaults | fields))


class Kit:
    """The store under test, and the usual moves on it."""

    good = GOOD
    rollout = staticmethod(rollout)

    def __init__(self, store: RolloutStore, open_again: Callable[[], RolloutStore]) -> None:
        self.store = store
        self.open_again = open_again

    def begin(self) -> int:
        """A run, its start version 0, and a learner's epoch."""
        self.store.start_run(Run("run", "sao", 0, "model", "hash"))
        self.store.add_version(WeightVersion(0, None, "run", "start"))
        return self.store.new_epoch()

    def rewarded(self, *names: str, **fields: Any) -> None:
        for name in names:
            self.store.add(rollout(name, **fields))
            self.store.set_verdict(name, GOOD)

    def claim(self, epoch: int, **settings: Any) -> list[Rollout]:
        defaults: dict[str, Any] = {
            "limit": 10,
            "current_version": 0,
            "max_policy_lag": 16,
            "max_claims": 3,
            "run_id": "run",
        }
        return self.store.claim(epoch=epoch, **(defaults | settings))

    def train(self, epoch: int, version: int, *names: str) -> None:
        array = np.full(3, 0.5, np.float32)
        parent = version - 1
        self.store.finish_update(
            epoch=epoch,
            version=WeightVersion(version, parent, "run", "update", {"policy/loss": 0.1}),
            rollouts=[(name, array, array * 2, array * 3) for name in names],
        )

    def to_first_schema(self) -> None:
        """Make the database what it was before there were migrations."""
        with self.store._engine.begin() as conn:
            for statement in (
                "DROP INDEX ix_rollouts_probe",
                "DROP TABLE turns",
                "DROP TABLE sessions",
                "UPDATE counters SET value = 1 WHERE name = 'schema'",
            ):
                conn.exec_driver_sql(statement)

    def states(self) -> dict[str, str]:
        return {r.id: r.state.value for r in self.store.list(limit=10_000)}


@pytest.fixture(params=BACKENDS)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'store.sqlite'}"
        return
    with own_schema(request.getfixturevalue("postgres_server")) as url:
        yield url


@pytest.fixture
def kit(store_url: str) -> Iterator[Kit]:
    opened = [RolloutStore(store_url)]

    def open_again() -> RolloutStore:
        opened.append(RolloutStore(store_url))
        return opened[-1]

    yield Kit(opened[0], open_again)
    for store in opened:
        store.close()


@pytest.fixture
def store(kit: Kit) -> RolloutStore:
    return kit.store


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A database that no other fixture opens."""
    return f"sqlite:///{tmp_path / 'alone' / 'store.sqlite'}"
