"""Our routes on the real app, with a stand-in for the replica behind them. With an engine:
test_endpoint.py, test_operations.py."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from online_sao.config import Config
from online_sao.errors import EngineError, StoreError, WeightUpdateError
from online_sao.service import names, routes
from online_sao.service.http import Keys
from online_sao.service.metrics import Metrics, judge_samples
from online_sao.service.routes import build_app
from online_sao.store import RolloutStore
from online_sao.types import Preference, Rollout, RolloutState, WeightSpan

TESTS = Path(__file__).parents[1]


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
    weights_error: str | None = None
    has_caught_up = False
    num_unrecorded = 0
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


@pytest.fixture
def stored(replica, monkeypatch, tmp_path):
    """Two rollouts in a real store, the second excluded."""
    store = RolloutStore(f"sqlite:///{tmp_path / 'store.db'}")
    store.set_preference(Preference("cute", ("academic", "cute")), 0)
    for id, state in (("a", RolloutState.PENDING), ("b", RolloutState.EXCLUDED)):
        store.add(
            Rollout(
                id=id,
                response_id=id,
                choice=0,
                prompt_token_ids=np.array([1, 2], np.int32),
                token_ids=np.array([3], np.int32),
                behavior_logprobs=np.array([-0.5], np.float32),
                weight_spans=(WeightSpan(0, 0, 1),),
                temperature=1.0,
                messages=[{"role": "user", "content": "A line on rain?"}],
                answer="Drip.",
                finish_reason="stop",
                state=state,
                reason="opted_out" if state is RolloutState.EXCLUDED else None,
            )
        )
    monkeypatch.setattr(replica, "store", store)


@pytest.fixture
def actors(monkeypatch):
    """What the actors behind the routes answer, by method."""
    answers = {"status": {"state": "learning"}, "current_version": 3}

    class Actor:
        def __getattr__(self, method):
            async def answer():
                given = answers[method]
                if method == "status":
                    given = {"error": None, "preset": "sao", **given}
                return given

            return SimpleNamespace(remote=answer)

    monkeypatch.setattr(routes.ray, "get_actor", lambda name, namespace: Actor())
    return answers


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


@pytest.mark.parametrize(
    "path", ["//v1/learning", "/V1/LEARNING", "/v1//rollouts", "/v1/learning/"]
)
async def test_other_spellings_of_an_admin_path_are_no_routes(app, path):
    assert (await ask(app, "GET", path)).status_code in (307, 404)


async def test_only_rollouts_of_the_state_that_was_asked_for(app, replica, stored):
    assert len((await ask(app, "GET", "/v1/rollouts")).json()["data"]) == 2
    (one,) = (await ask(app, "GET", "/v1/rollouts?state=excluded")).json()["data"]
    assert (one["id"], one["state"]) == ("b", "excluded")
    assert (await ask(app, "GET", "/v1/rollouts?state=pending")).json()["last_seq"] == 1


class TestReady:
    @pytest.mark.parametrize(
        ("learner", "current", "weights_error", "status"),
        [
            ({"state": "learning"}, 3, None, 200),
            ({"state": "learning"}, 4, None, 503),  # the first current version is not there yet
            ({"state": "learning"}, 3, "version 4 is damaged", 503),
            ({"state": "loading", "error": "the store is away"}, 3, None, 503),
            ({"state": "pretraining", "pretraining": {"state": "judging"}}, 3, None, 503),
            ({"state": "pretraining", "pretraining": {"state": names.COLLECTING}}, 3, None, 200),
            ({"state": "learning", "pause_reason": "lunch"}, 3, None, 200),
        ],
    )
    async def test_when(
        self, app, replica, actors, monkeypatch, learner, current, weights_error, status
    ):
        monkeypatch.setattr(replica, "has_caught_up", False)
        monkeypatch.setattr(replica, "weights_error", weights_error)
        actors["status"], actors["current_version"] = learner, current
        answer = await ask(app, "GET", "/ready")
        assert (answer.status_code, answer.json()["ready"]) == (status, status == 200)

    async def test_later_versions_may_be_on_their_way(self, app, replica, actors, monkeypatch):
        monkeypatch.setattr(replica, "has_caught_up", False)
        for current in (3, 9):
            actors["current_version"] = current
            assert (await ask(app, "GET", "/ready")).status_code == 200


class TestStandIns:
    """What the tests of others take for this endpoint gives nothing that it does not."""

    async def test_of_the_scenarios(self, app, stored, actors):
        fake = runpy.run_path(str(TESTS / "scenarios" / "fake_endpoint.py"))["FakeEndpoint"]()
        messages = [{"content": "Classical or Cute."}, {"content": fake_topic()}]
        fake._answer(messages, opted_out=False)
        for path in ("/v1/learning", "/v1/preference", "/v1/rollouts"):
            given, real = (await ask(fake.app, "GET", path)).json(), await ask(app, "GET", path)
            assert set(given) <= set(real.json()), path
        known = set(real.json()["data"][0]) | {"topic", "drawn"}  # its own notes
        assert set(given["data"][0]) <= known
        assert {"ready", "learner", "error", "pretraining"} <= set(
            (await ask(app, "GET", "/ready")).json()
        )

    async def test_of_the_dashboard(self, app, stored, actors):
        fake = runpy.run_path(str(TESTS / "dashboard" / "fake_service.py"))["FakeService"]()
        _, given = fake.answer("GET", "/v1/learning", None, None)
        assert set(given) <= set((await ask(app, "GET", "/v1/learning")).json())


def fake_topic():
    from online_sao.writing import load_topics

    return load_topics().training[0]


def test_what_the_judge_has_cost():
    status = {"in_flight": 1, "scored": 5, "unscored": 2, "cost": 0.25}
    assert b"online_sao_judge_cost 0.25" in Metrics().render(judge_samples(status))
