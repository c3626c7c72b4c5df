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


class Store:
    """Holds a preference, and the feedback that it was given."""

    def __init__(self):
        self.current = None
        self.given = []

    def preference(self):
        return self.current

    def set_preference(self, wanted, version):
        self.current = wanted
        return wanted

    def add_feedback(self, *given):
        self.given.append(given)
        return False, "already_trained"


class Replica:
    keys = Keys(user=None, admin=None)
    engine = SimpleNamespace(errored=False, weight_version=3)
    problem: Exception | None = None
    store = Store()

    async def check_health(self):
        if self.problem:
            raise self.problem


@pytest.fixture(scope="module")
def replica():
    return Replica()


@pytest.fixture(scope="module")
def app(replica):
    return build_app(replica, Config())


async def ask(app, method, path, **body):
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return await http.request(method, path, json=body or None)


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
    answer = await ask(app, "GET", "/health")
    assert answer.status_code == status
    if problem:
        assert answer.json()["error"]["message"] == str(problem)


@pytest.mark.parametrize(
    ("body", "id"),
    [({}, "chatcmpl-1"), ({"choice": 0}, "chatcmpl-1"), ({"choice": 2}, "chatcmpl-1.2")],
)
async def test_feedback_is_for_the_choice_it_names(app, replica, monkeypatch, body, id):
    monkeypatch.setattr(replica, "store", Store())
    answer = await ask(app, "POST", "/v1/feedback", id="chatcmpl-1", reward=0.5, **body)
    assert (answer.status_code, answer.json()["reason"]) == (202, "already_trained")
    assert replica.store.given == [(id, 0.5, None)]


async def test_a_preference_keeps_its_pool_unless_it_brings_one(app, replica, monkeypatch):
    monkeypatch.setattr(replica, "store", Store())
    first = ["academic", "cute"]
    assert (await ask(app, "PUT", "/v1/preference", style="cute", pool=first)).json()[
        "pool"
    ] == first
    assert (await ask(app, "PUT", "/v1/preference", style="academic")).json()["pool"] == first
    other = ["classical", "cute"]
    assert (await ask(app, "PUT", "/v1/preference", style="cute", pool=other)).json()[
        "pool"
    ] == other
    assert replica.store.current.pool == tuple(other)
    assert (await ask(app, "PUT", "/v1/preference", style="academic")).status_code == 400


def test_what_the_judge_has_cost():
    status = {"in_flight": 1, "scored": 5, "unscored": 2, "cost": 0.25}
    assert b"online_sao_judge_cost 0.25" in Metrics().render(judge_samples(status))
