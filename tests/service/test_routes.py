"""Our routes on the real app, with a stand-in for the replica behind them. With an engine:
test_endpoint.py, test_operations.py."""

from types import SimpleNamespace

import httpx
import pytest

from online_sao.config import Config
from online_sao.errors import EngineError, StoreError, WeightUpdateError
from online_sao.service.http import Keys
from online_sao.service.metrics import Metrics, judge_samples
from online_sao.service.routes import build_app


class Replica:
    keys = Keys(user=None, admin=None)
    engine = SimpleNamespace(errored=False, weight_version=3)
    problem: Exception | None = None

    async def check_health(self):
        if self.problem:
            raise self.problem


@pytest.fixture(scope="module")
def replica():
    return Replica()


@pytest.fixture(scope="module")
def app(replica):
    return build_app(replica, Config())


@pytest.mark.parametrize(
    ("problem", "status"),
    [
        (None, 200),
        (WeightUpdateError("Version 4 failed half-way."), 503),
        (EngineError("The engine is dead."), 503),
        (StoreError("The database is away."), 503),
    ],
)
async def test_health_says_what_is_wrong(app, replica, monkeypatch, problem, status):
    monkeypatch.setattr(replica, "problem", problem)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.get("/health")
    assert answer.status_code == status
    if problem:
        assert answer.json()["error"]["message"] == str(problem)


def test_what_the_judge_has_cost():
    status = {"in_flight": 1, "scored": 5, "unscored": 2, "cost": 0.25}
    assert b"online_sao_judge_cost 0.25" in Metrics().render(judge_samples(status))
