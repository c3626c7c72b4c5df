"""The prober with a real store; engine and judge are functions here (the whole in
test_operations.py)."""

import threading
from itertools import pairwise

import numpy as np
import pytest

from online_sao.config import Config
from online_sao.service import probes
from online_sao.service.probes import Prober
from online_sao.store import RolloutStore
from online_sao.types import (
    Preference,
    Purpose,
    Rollout,
    RolloutState,
    StoredVerdict,
    WeightSpan,
)
from online_sao.writing import load_topics

PREFERENCE = Preference("cute", ("academic", "cute"))


class Bench:
    def __init__(self, folder, **guards):
        self.config = Config.model_validate(
            {"guards": {"probe_every": 10, "probe_prompts": 4, **guards}}
        )
        self.store = RolloutStore(f"sqlite:///{folder / 'store.sqlite'}")
        self.store.set_preference(PREFERENCE, None)
        self.version = 0
        self.prompts = []
        self.results = []
        self.ended = threading.Event()
        self.quality = 1.0
        self.rewards = [0.0, 0.0, 1.0]

    def ask(self, prompts):
        self.prompts.append(prompts)
        ids = [f"probe-{len(self.prompts)}-{number}" for number in range(len(prompts))]
        for id in ids:
            self.store.add(
                Rollout(
                    id=id,
                    response_id=id,
                    choice=0,
                    prompt_token_ids=np.array([1], np.int32),
                    token_ids=np.array([2], np.int32),
                    behavior_logprobs=np.array([-1], np.float32),
                    weight_spans=(WeightSpan(self.version, 0, 1),),
                    temperature=1.0,
                    messages=None,
                    answer="x",
                    finish_reason="stop",
                    state=RolloutState.EXCLUDED,
                    reason="probe",
                    purpose=Purpose.PROBE,
                )
            )
        for id in ids[1:]:
            self.store.set_verdict(id, StoredVerdict(self.quality, 0.0, 0.0))
        self.store.set_unscored(ids[0], "timeout")
        return ids

    def report(self, result):
        self.results.append(result)
        if self.version >= 20:
            self.ended.set()
        self.version += 5

    def prober(self):
        return Prober(
            self.config,
            self.store,
            lambda: self.version,
            self.ask,
            lambda preference: self.rewards,
            self.report,
        )

    def run(self):
        thread = threading.Thread(target=self.prober().run, args=(self.ended,))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "POLL_S", 0.01)
    made = []

    def make(**guards):
        made.append(Bench(tmp_path, **guards))
        return made[-1]

    yield make
    for one in made:
        one.ended.set()
        one.store.close()


def test_rounds_are_so_many_versions_apart(bench):
    one = bench()

    def versions():
        one.version += 1  # an update between two looks
        return one.version

    one.ended.clear()
    prober = one.prober()
    prober._current_version = versions
    thread = threading.Thread(target=prober.run, args=(one.ended,))
    thread.start()
    thread.join(60)
    starts = [result.version for result in one.results]
    assert len(starts) >= 2
    assert all(later - earlier >= 10 for earlier, later in pairwise(starts))


def test_the_same_held_out_prompts_every_time(bench):
    one = bench()
    topics = load_topics()
    prompts = one.prober().prompts(PREFERENCE)
    assert prompts == one.prober().prompts(PREFERENCE)
    assert len(prompts) == 4
    for messages in prompts:
        asked = messages[-1]["content"]
        assert any(topic in asked for topic in topics.heldout)
        assert not any(topic in asked for topic in topics.training)


def test_a_failed_verdict_is_left_out_and_forgeries_are_counted(bench):
    one = bench()
    one.version = 20
    one.run()
    (result,) = one.results
    assert (result.version, result.num_answers) == (20, 3)
    assert (result.quality, result.reward) == (1.0, 0.0)
    assert result.forgeries_rewarded == pytest.approx(1 / 3)


def test_a_round_that_fails_costs_nothing_but_itself(bench):
    one = bench()
    one.version = 20
    ask, calls = one.ask, []

    def broken_once(prompts):
        calls.append(1)
        if len(calls) == 1:
            one.version += 10
            raise RuntimeError("the engine is being restarted")
        return ask(prompts)

    one.ask = broken_once
    one.run()
    assert len(one.results) == 1


@pytest.mark.parametrize("off", [{"guards": {"probe_every": 0}}, {"service": {"topics": None}}])
def test_without_topics_or_interval_there_are_no_probes(bench, off):
    one = bench()
    one.config = Config.model_validate(off)
    one.prober().run(threading.Event())  # returns at once
    assert one.prompts == []


def test_probes_are_never_learned_from(bench):
    one = bench()
    one.version = 20
    one.run()
    epoch = one.store.new_epoch()
    claimed = one.store.claim(
        epoch=epoch, limit=10, current_version=20, max_policy_lag=100, max_claims=3, run_id=None
    )
    assert claimed == []
    assert sum(one.store.counts(Purpose.SERVE).values()) == 0
    assert one.store.counts(Purpose.PROBE)[RolloutState.EXCLUDED] == 4
