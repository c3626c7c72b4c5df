"""The worker's handling of a judge and a store that fail; the whole is in test_operations.py."""

import asyncio
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from online_sao.config import Config
from online_sao.errors import StoreError
from online_sao.service import reward_worker
from online_sao.types import StoredVerdict

VERDICT = StoredVerdict(quality=1.0, style=1.0, reward=1.0)


class Store:
    """Refuses the first `refusals` writes."""

    def __init__(self, waiting=(), refusals=0):
        self.waiting = waiting
        self.refusals = refusals
        self.written = []

    def set_verdict(self, id, verdict):
        if self.refusals:
            self.refusals -= 1
            raise StoreError("the disk is full")
        self.written.append((id, verdict))

    set_unscored = set_verdict

    def waiting_for_judge(self, limit, clients_before):
        self.clients_before = clients_before
        return self.waiting[:limit]


def make_worker(store, outcomes, monkeypatch):
    """The actor's class without Ray; its judge says `outcomes`, one after another."""
    made = object.__new__(reward_worker.RewardWorker.__ray_metadata__.modified_class)
    made._config = Config.model_validate({"judge": {"concurrency": 2}})
    made._store = store
    made._wake = asyncio.Event()
    made._in_flight = set()
    made._slots = asyncio.Semaphore(2)
    made._counts = {"scored": 0, "unscored": 0}
    made._failure = None
    made.asked = []

    async def score(rollout):
        made.asked.append(rollout.id)
        outcome = outcomes[min(len(made.asked), len(outcomes)) - 1]
        if outcome is None:
            await asyncio.sleep(3600)
        return outcome

    monkeypatch.setattr(made, "_score", score)
    monkeypatch.setattr(reward_worker, "_notify_learner", lambda: None)
    monkeypatch.setattr(reward_worker, "CIRCUIT_RETRY_S", 0.01)
    monkeypatch.setattr(reward_worker, "STORE_RETRY_S", 0.01)
    return made


def rollout(id="a"):
    return SimpleNamespace(id=id, weight_version_end=0)


def test_an_answer_that_the_judge_was_not_asked_about_waits_for_it(monkeypatch):
    store = Store()
    made = make_worker(store, ["circuit_open", "circuit_open", VERDICT], monkeypatch)
    asyncio.run(made._judge_one(rollout()))
    assert store.written == [("a", VERDICT)]
    assert made._counts == {"scored": 1, "unscored": 0}
    assert made._failure is None


@pytest.mark.parametrize("outcome", [VERDICT, "timeout"])
def test_a_verdict_is_written_once_the_store_takes_it_and_not_asked_for_again(outcome, monkeypatch):
    store = Store(refusals=3)
    made = make_worker(store, [outcome], monkeypatch)
    asyncio.run(made._judge_one(rollout()))
    assert store.written == [("a", outcome)]
    assert made.asked == ["a"]


class TestRewardsFromUsers:
    """Which answers of clients the judge is given: those recorded before `clients_before`."""

    def asked_for(self, monkeypatch, **service):
        store = Store()
        made = make_worker(store, [], monkeypatch)
        made._config = Config.model_validate({"service": service})
        asyncio.run(made._one_round())
        return store.clients_before

    def test_all_where_the_judge_alone_rewards(self, monkeypatch):
        assert self.asked_for(monkeypatch) is None

    def test_none_where_only_feedback_does(self, monkeypatch):
        before = self.asked_for(monkeypatch, reward_source="feedback")
        assert before < datetime.now(UTC) - timedelta(days=3650)

    def test_those_that_have_waited_long_enough_for_feedback(self, monkeypatch):
        began = datetime.now(UTC)
        before = self.asked_for(
            monkeypatch, reward_source="feedback_then_judge", feedback_wait_s=90
        )
        assert began - timedelta(seconds=90) <= before
        assert before <= datetime.now(UTC) - timedelta(seconds=90)


def test_a_slow_judge_is_not_given_the_whole_queue_at_once(monkeypatch):
    """Twice as many as it works on are held here, however often the store is asked."""
    made = make_worker(Store([rollout(str(n)) for n in range(100)]), [None], monkeypatch)

    async def rounds():
        for _ in range(5):
            await made._one_round()
            await asyncio.sleep(0.01)
        return set(made._in_flight)

    assert asyncio.run(rounds()) == {"0", "1", "2", "3"}
    assert made.asked == ["0", "1"]
