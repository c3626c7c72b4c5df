"""What the driver does to the store from time to time."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from online_sao.config import ServiceConfig
from online_sao.service import housekeeping
from online_sao.service.housekeeping import Housekeeper
from online_sao.store import RolloutStore
from online_sao.types import Rollout, WeightSpan


@pytest.fixture
def store(tmp_path):
    with RolloutStore(f"sqlite:///{tmp_path}/store.sqlite") as made:
        for name, age in (("old", timedelta(days=3)), ("new", timedelta())):
            made.add(
                Rollout(
                    id=name,
                    response_id=name,
                    choice=0,
                    prompt_token_ids=np.array([1], np.int32),
                    token_ids=np.array([2], np.int32),
                    behavior_logprobs=np.array([-1], np.float32),
                    weight_spans=(WeightSpan(0, 0, 1),),
                    temperature=1.0,
                    messages=[],
                    answer="text",
                    finish_reason="stop",
                    session_id=name,
                    created_at=datetime.now(UTC) - age,
                )
            )
        yield made


def test_idle_sessions_close_and_nothing_is_forgotten_unasked(store):
    Housekeeper(store, ServiceConfig(session_idle_s=60)).run_due()
    assert store.session("old").close_reason == "idle"
    assert store.session("new").closed_at is None
    assert {rollout.answer for rollout in store.list()} == {"text"}


def test_texts_are_removed_by_age(store):
    Housekeeper(store, ServiceConfig(retention_days=1)).run_due()
    assert {rollout.id: rollout.answer for rollout in store.list()} == {"old": "", "new": "text"}


def test_not_more_often_than_it_must(store, monkeypatch):
    keeper = Housekeeper(store, ServiceConfig(session_idle_s=1e-9))
    monkeypatch.setattr(store, "close_idle_sessions", lambda _: calls.append(1))
    calls = []
    for now in (100.0, 101.0, 100.0 + housekeeping.SESSIONS_PERIOD_S):
        monkeypatch.setattr(housekeeping.time, "monotonic", lambda now=now: now)
        keeper.run_due()
    assert len(calls) == 2


def test_a_store_that_refuses_is_asked_again(store, monkeypatch):
    from online_sao.errors import StoreError

    real, failures = store.close_idle_sessions, [StoreError("locked")]

    def close(idle_s):
        if failures:
            raise failures.pop()
        return real(idle_s)

    monkeypatch.setattr(store, "close_idle_sessions", close)
    keeper = Housekeeper(store, ServiceConfig(session_idle_s=60))
    keeper.run_due()
    keeper.run_due()
    assert store.session("old").closed_at is not None
