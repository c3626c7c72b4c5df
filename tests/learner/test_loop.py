"""The loop with a real store, a real learner of a tiny model, and a publisher that keeps
what it is given. A crash is an exception that nothing catches."""

import math
import shutil
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from learning import SETTINGS, changed, everything, make_rollout, next_turn

from online_sao.config import Config, preset_settings
from online_sao.errors import (
    CheckpointError,
    FencedError,
    LearnerError,
    NotFoundError,
    StoreError,
    WeightUpdateError,
)
from online_sao.learner import checkpoint
from online_sao.learner import loop as loop_module
from online_sao.learner.guards import ProbeResult
from online_sao.learner.learner import Learner
from online_sao.learner.loop import LearnerLoop, make_run
from online_sao.store import RolloutStore
from online_sao.types import RolloutState as S

WAIT_S = 60  # far longer than anything here takes, even on a busy machine


class Crash(BaseException):
    """The process dies here."""


class Publisher:
    """Keeps each version's weights; `errors` are raised first, in order."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.tried: list[int] = []
        self.published: list[int] = []
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.crash_at: int | None = None

    def publish(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        self.tried.append(version)
        if version == self.crash_at:
            raise Crash
        if self.errors:
            raise self.errors.pop(0)
        self.published.append(version)
        self.weights[version] = {name: tensor.clone() for name, tensor in weights.items()}


@dataclass
class Bench:
    """One endpoint's state on disk, and learners that come and go on it."""

    model: Path
    folder: Path
    changes: dict[str, Any] = field(default_factory=dict)
    store_type: type[RolloutStore] = RolloutStore
    opened: list[RolloutStore] = field(default_factory=list)
    keep_weights: bool = False

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def store(self) -> RolloutStore:
        return self.opened[0]

    def config(self, **changes: Any) -> Config:
        learner = SETTINGS | {"order": "oldest", "checkpoint_every": 0} | self.changes | changes
        return Config.model_validate(
            {
                "model": {"name": str(self.model)},
                "learner": preset_settings(learner.get("preset", "sao")) | learner,
                "service": {"run_dir": str(self.folder), "keep_weights": self.keep_weights},
                "engine": {"dtype": "float32"},
            }
        )

    def open(self) -> RolloutStore:
        self.opened.append(self.store_type(self.config().store_url))
        return self.opened[-1]

    def loop(self, publisher: Publisher | None = None, **changes: Any) -> LearnerLoop:
        """A new learner process: its own store, start weights, and loop, not yet started."""
        config = self.config(**changes)
        learner = Learner(config.learner, str(self.model))
        made = LearnerLoop(
            config, make_run(config, "hash"), learner, self.open(), publisher or Publisher()
        )
        made.learner = learner
        return made

    def add(self, *names: str, reward: float = 1.0, version: int = 0, **fields: Any) -> None:
        for index, name in enumerate(names):
            tokens = [60 + sum(map(ord, name)) % 300, 2, 3 + index]
            rollout = make_rollout(name, tokens=tokens, reward=reward, version=version, **fields)
            self.store.add(rollout)

    def states(self) -> dict[str, S]:
        return {rollout.id: rollout.state for rollout in self.store.list(limit=1000)}

    def errors(self) -> list[str]:
        return [event.data["what"] for event in self.store.events("error")]

    def learn(self, loop: LearnerLoop, *names: str, **fields: Any) -> None:
        """Add rollouts, learn from all that wait, end with a checkpoint."""
        self.add(*names, **fields)
        with running(loop):
            self.drained()

    def drained(self) -> None:
        until(lambda: not {S.REWARDED, S.CLAIMED} & set(self.states().values()))


def until(condition, what="what was waited for"):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about"
        time.sleep(0.005)


@contextmanager
def running(loop, *, ends_with=None):
    """`run` in a thread, until the block ends; it must end by itself with `ends_with`."""
    ended: list[BaseException | None] = []

    def run():
        try:
            loop.run()
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
        if ends_with is not None:
            until(lambda: not thread.is_alive(), "the end of the loop")
    finally:
        loop.stop()
        thread.join(WAIT_S)
    assert not thread.is_alive()
    if ends_with is None:
        assert ended == [None]
    else:
        assert isinstance(ended[0], ends_with), ended


class Held:
    """Holds each update of a learner from when it begins until `go`."""

    def __init__(self, learner: Learner) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        update = learner.update

        def held(*arguments, **named):
            self.begun.set()
            assert self.go.wait(WAIT_S)
            return update(*arguments, **named)

        learner.update = held


@pytest.fixture
def bench(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(loop_module, "POLL_S", 0.01)
    monkeypatch.setattr(loop_module, "STORE_RETRY_S", 0.01)
    monkeypatch.setattr(loop_module, "PUBLISH_RETRY_S", 0.0)
    made = Bench(tiny_model, tmp_path / "run")
    made.open()
    yield made
    for store in made.opened:
        store.close()


class TestLearning:
    def test_one_rollout(self, bench):
        publisher = Publisher()
        loop = bench.loop(publisher)
        assert loop.start() == "start"
        assert (loop.version, loop.serves_start_weights) == (0, True)
        bench.learn(loop, "a")
        rollout = bench.store.get("a")
        assert (rollout.state, rollout.trained_version, rollout.num_claims) == (S.TRAINED, 1, 1)
        for array in (rollout.values, rollout.importance_ratios):
            assert array.shape == (3,)
        # no value yet: 1 at the end, times lambda = 1 - 1/(1.5*3) = 7/9 at each token before
        assert rollout.advantages.tolist() == pytest.approx([49 / 81, 7 / 9, 1.0])
        start, made = bench.store.versions()[::-1]
        assert (start.version, start.kind, start.parent) == (0, "start", None)
        assert (made.version, made.kind, made.parent) == (1, "update", 0)
        assert made.run_id == rollout.run_id == loop.status().run_id
        assert made.metrics["rollout/reward"] == 1.0
        assert made.published_at is not None
        assert publisher.published == [1]
        weights = loop.learner.policy.weights(torch.float32)
        assert changed(weights, publisher.weights[1]) == set()
        status = loop.status()
        assert (status.version, status.published_version, status.num_updates) == (1, 1, 1)
        assert not status.busy
        assert not status.paused
        assert status.failure is None
        assert status.metrics == made.metrics
        assert not loop.serves_start_weights

    def test_each_rollout_once_and_each_version_once(self, bench):
        publisher = Publisher()
        loop = bench.loop(publisher)
        loop.start()
        names = [f"r{index}" for index in range(6)]
        bench.learn(loop, *names)
        trained = bench.store.get_many(names)
        assert [r.trained_version for r in trained] == [1, 2, 3, 4, 5, 6]  # oldest first
        assert {r.num_claims for r in trained} == {1}
        assert [v.version for v in bench.store.versions()] == [6, 5, 4, 3, 2, 1, 0]
        assert [v.parent for v in bench.store.versions()] == [5, 4, 3, 2, 1, 0, None]
        assert publisher.published == [1, 2, 3, 4, 5, 6]
        assert loop.learner.num_updates == 6

    def test_the_newest_first_if_asked_for(self, bench):
        loop = bench.loop(order="newest")
        loop.start()
        bench.learn(loop, "a", "b", "c")
        trained = bench.store.get_many(["a", "b", "c"])
        assert [r.trained_version for r in trained] == [3, 2, 1]

    def test_rollouts_that_come_while_it_waits(self, bench, monkeypatch):
        monkeypatch.setattr(loop_module, "POLL_S", WAIT_S)  # only a wake can end the wait
        loop = bench.loop()
        loop.start()
        with running(loop):
            for name in "ab":
                time.sleep(0.05)
                bench.add(name)
                loop.wake()
                until(lambda name=name: bench.states()[name] is S.TRAINED)

    def test_an_update_of_several_waits_until_it_is_full(self, bench):
        loop = bench.loop(rollouts_per_update=3)
        loop.start()
        bench.add("a", "b")
        with running(loop):
            time.sleep(0.2)
            # a look at what waits claims it for a moment
            until(lambda: bench.states() == {"a": S.REWARDED, "b": S.REWARDED})
            bench.add("c")
            bench.drained()
        trained = bench.store.get_many(["a", "b", "c"])
        assert {r.trained_version for r in trained} == {1}
        assert {r.num_claims for r in trained} == {1}  # waiting is no failed claim

    def test_what_is_too_old_becomes_stale(self, bench):
        loop = bench.loop(max_policy_lag=1)
        loop.start()
        bench.learn(loop, "a", "b", "c")  # all made by version 0
        assert bench.states() == {"a": S.TRAINED, "b": S.TRAINED, "c": S.STALE}
        lags = [v.metrics.get("rollout/policy_lag_max") for v in bench.store.versions()]
        assert lags == [1.0, 0.0, None]

    def test_the_rate(self, bench):
        loop = bench.loop()
        loop.start()
        started = time.monotonic()
        with running(loop):
            bench.add("a", "b", "c")
            bench.drained()
            until(lambda: loop.status().rollouts_per_minute > 0)
            # two intervals between three rollouts
            assert loop.status().rollouts_per_minute >= 60 * 2 / (time.monotonic() - started)

    def test_pretraining(self, bench):
        loop = bench.loop(value_pretraining_rollouts=4, value_pretraining_epochs=3)
        loop.start()
        assert loop.needs_pretraining()
        loop.note_pretraining("judging", 1, 4)
        assert loop.status().pretraining == {"state": "judging", "done": 1, "total": 4}
        loop.pretrain([make_rollout(str(index), reward=index / 4) for index in range(4)])
        status = loop.status().pretraining
        assert (status["state"], status["done"], status["total"]) == ("done", 12, 12)
        assert status["reward_mean"] == 0.375
        bench.learn(loop, "a")
        assert not loop.needs_pretraining()
        assert not bench.loop(value_pretraining_rollouts=0).needs_pretraining()


class TestRefusals:
    def test_a_rollout_that_is_not_finite_is_excluded_and_the_others_are_learned_from(self, bench):
        """C16"""
        loop = bench.loop()
        loop.start()
        bench.add("bad", logprobs=[-1.0, math.nan, -1.0])
        bench.learn(loop, "good")
        assert bench.states() == {"bad": S.EXCLUDED, "good": S.TRAINED}
        assert bench.store.get("bad").reason == "non_finite"
        assert bench.store.get("good").trained_version == 1
        (event,) = bench.store.events("error")
        assert event.data["rollouts"] == ["bad"]
        assert "behavior log-probs are not finite" in event.data["what"]
        assert all(p.isfinite().all() for p in everything(loop.learner).values())
        assert not loop.status().paused

    def test_it_alone_is_excluded_from_an_update_of_several(self, bench):
        loop = bench.loop(rollouts_per_update=2)
        loop.start()
        bench.add("a")
        bench.add("bad", logprobs=-math.inf)
        with running(loop):
            until(lambda: bench.states()["bad"] is S.EXCLUDED)
            assert bench.states()["a"] in (S.REWARDED, S.CLAIMED)
            bench.add("b")
            bench.drained()
        assert bench.states() == {"a": S.TRAINED, "bad": S.EXCLUDED, "b": S.TRAINED}
        assert {r.num_claims for r in bench.store.get_many(["a", "b"])} == {1}

    @pytest.mark.parametrize(
        ("error", "reason"),
        [(LearnerError("no good"), "unusable"), (IndexError("out of range"), "update_failed")],
    )
    def test_an_update_that_raises(self, bench, error, reason):
        loop = bench.loop()
        loop.start()
        update = loop.learner.update

        def fails_on_a(trajectories, policy_lag):
            if trajectories[0][0].id == "a":
                raise error
            return update(trajectories, policy_lag)

        loop.learner.update = fails_on_a
        bench.learn(loop, "a", "b")
        assert bench.states() == {"a": S.EXCLUDED, "b": S.TRAINED}
        assert bench.store.get("a").reason == reason
        assert str(error) in bench.errors()[0]

    def test_token_ids_beyond_the_vocabulary(self, bench):
        loop = bench.loop()
        loop.start()
        bench.store.add(make_rollout("odd", tokens=[100_000, 2], logprobs=-1.0))
        bench.learn(loop, "b")
        assert bench.states() == {"odd": S.EXCLUDED, "b": S.TRAINED}

    def test_five_failures_in_a_row_pause_the_loop_instead_of_eating_the_queue(self, bench):
        loop = bench.loop()
        loop.start()
        embedding = next(loop.learner.policy.model.parameters())
        with torch.no_grad():
            kept = embedding[0, 0].item()
            embedding[0, 0] = math.nan
        names = [f"r{index}" for index in range(7)]
        bench.add(*names)
        with running(loop):
            until(lambda: loop.status().paused)
            time.sleep(0.1)
            states = list(bench.states().values())
            assert states == [S.EXCLUDED] * 5 + [S.REWARDED] * 2
            assert "5 updates in a row failed" in loop.status().pause_reason
            assert "refused/policy" in loop.status().pause_reason
            (event,) = bench.store.events("pause")
            assert event.data["reason"] == loop.status().pause_reason
            with torch.no_grad():
                embedding[0, 0] = kept
            loop.resume()
            bench.drained()
        assert list(bench.states().values())[5:] == [S.TRAINED] * 2
        assert loop.status().failure is None

    def test_a_success_in_between_begins_the_count_anew(self, bench):
        loop = bench.loop()
        loop.start()
        for index in range(8):
            bench.add(f"bad{index}", logprobs=math.nan)
            if index % 4 == 3:
                bench.add(f"good{index}")
        bench.learn(loop)
        assert not loop.status().paused
        assert list(bench.states().values()).count(S.TRAINED) == 2


class TestControl:
    def test_nothing_waits_for_an_update(self, bench):
        loop = bench.loop(checkpoint_every=1)
        loop.start()
        held = Held(loop.learner)
        bench.add("a", "b")
        with running(loop):
            assert held.begun.wait(WAIT_S)
            # Each call returns although the update is held: none of them waits for it.
            assert loop.status().busy
            loop.pause("for a test")
            status = loop.status()
            assert (status.paused, status.pause_reason) == (True, "for a test")
            loop.resume()
            assert not loop.status().paused
            loop.pause("again")
            given_up = loop.request_rollback(0)
            future = loop.request_rollback(1)
            loop.wake()
            assert not future.done()
            assert given_up.cancel()  # whoever asked was told that nothing was done
            assert bench.states() == {"a": S.CLAIMED, "b": S.REWARDED}
            held.go.set()
            # the update under way is finished, and no other begun
            assert future.result(WAIT_S) == 2
            time.sleep(0.1)
            assert bench.states() == {"a": S.TRAINED, "b": S.REWARDED}
            loop.resume()
            bench.drained()
        kinds = [event.kind for event in bench.store.events() if event.kind != "rollback"]
        assert kinds == ["pause", "resume_learning", "pause", "resume_learning"]

    def test_a_pause_outlives_a_crash(self, bench):
        first = bench.loop()
        first.start()
        first.pause("the answers look odd")
        second = bench.loop()
        assert second.start() == "resume"
        assert second.status().pause_reason == "the answers look odd"
        second.resume()
        third = bench.loop()
        third.start()
        assert not third.status().paused
        third.pause("once more")
        other_run = bench.loop(seed=1)
        assert other_run.start() == "start"
        assert not other_run.status().paused
        its_restart = bench.loop(seed=1)
        assert its_restart.start() == "resume"
        assert not its_restart.status().paused

    def test_other_settings_begin_anew(self, bench):
        first = bench.loop()
        first.start()
        bench.learn(first, "a", "b")
        second = bench.loop(policy_lr=7e-4)
        start = everything(second.learner)
        assert second.start() == "start"
        assert second.serves_start_weights
        assert changed(start, everything(second.learner)) == set()
        assert "--keep-weights" in bench.errors()[-1]

    def test_other_settings_go_on_from_what_was_learned(self, bench):
        first = bench.loop()
        first.start()
        first.pause("for a test")
        first.resume()
        bench.learn(first, "a", "b")  # versions 1 and 2
        bench.keep_weights = True
        publisher = Publisher()
        second = bench.loop(publisher, policy_lr=7e-4)
        assert second.start() == "resume"
        assert changed(everything(first.learner), everything(second.learner)) == set()
        assert not second.serves_start_weights
        assert not second.needs_pretraining()
        assert (second.version, bench.store.get_version(3).parent) == (3, 2)
        assert bench.errors() == []
        bench.learn(second, "c", version=3)
        assert publisher.published[-1] == 4
        assert bench.store.get("c").trained_version == 4
        # ... and from there, with or without the option, as any run does.
        bench.keep_weights = False
        third = bench.loop(policy_lr=7e-4)
        assert third.start() == "resume"
        assert changed(everything(second.learner), everything(third.learner)) == set()
        # The version that was taken over is on its line.
        with running(third):
            assert third.request_rollback(2).result(WAIT_S) == 6
        assert changed(everything(first.learner), everything(third.learner)) == set()

    def test_a_crash_before_the_first_version_of_its_own_keeps_the_weights_too(
        self, bench, monkeypatch
    ):
        first = bench.loop()
        first.start()
        bench.learn(first, "a")
        bench.keep_weights = True
        second = bench.loop(policy_lr=7e-4)
        with monkeypatch.context() as crash:
            crash.setattr(second._store, "add_version", Mock(side_effect=Crash))
            with pytest.raises(Crash):
                second.start()
        third = bench.loop(policy_lr=7e-4)
        assert third.start() == "resume"
        assert changed(everything(first.learner), everything(third.learner)) == set()

    def test_what_was_learned_and_cannot_be_kept_is_no_new_beginning(self, bench):
        bench.keep_weights = True
        first = bench.loop()
        assert first.start() == "start"  # there is nothing to keep
        unlearned = bench.loop(policy_lr=7e-4)
        assert unlearned.start() == "start"  # nor was anything learned
        bench.learn(unlearned, "a", version=1)
        known = len(bench.store.versions())
        other = bench.loop(preset="running_mean")  # has no critic
        with pytest.raises(CheckpointError, match="without --keep-weights"):
            other.start()
        other = bench.loop(policy_lr=6e-4)
        other._run = replace(other._run, model_hash="another")
        with pytest.raises(CheckpointError, match="another model"):
            other.start()
        shutil.rmtree(bench.checkpoints)
        with pytest.raises(CheckpointError, match="no checkpoint"):
            bench.loop(policy_lr=6e-4).start()
        assert len(bench.store.versions()) == known

    def test_stop_finishes_the_update_and_keeps_it(self, bench):
        loop = bench.loop()
        loop.start()
        held = Held(loop.learner)
        bench.add("a")
        with running(loop):
            assert held.begun.wait(WAIT_S)
            loop.stop()
            held.go.set()
        assert bench.states() == {"a": S.TRAINED}
        assert [v for v, _ in checkpoint.list_checkpoints(bench.checkpoints)] == [1]

    def test_stop_without_an_update_writes_no_checkpoint(self, bench):
        """C13: no rollouts, nothing to do; it waits and ends when told to."""
        publisher = Publisher()
        loop = bench.loop(publisher)
        loop.start()
        with running(loop) as thread:
            time.sleep(0.1)
            assert thread.is_alive()
            assert not loop.status().busy
        assert not bench.checkpoints.exists()
        assert publisher.tried == []


class TestPublishing:
    def test_before_the_loop_runs_a_resumed_learner_brings_engines_up_to_date(self, bench):
        """Value pretraining on live answers waits for clients, who wait for a ready endpoint."""
        publisher = Publisher()
        loop = bench.loop(publisher)
        loop.start()
        loop.publish_if_due()
        assert publisher.tried == []  # engines begin with the start weights
        again = bench.loop(publisher)
        assert again.start() == "resume"
        again.publish_if_due()
        assert publisher.tried == [again.version]
        again.publish_if_due()
        assert publisher.tried == [again.version]

    @pytest.mark.parametrize("error", [WeightUpdateError("no engine answered"), OSError("full")])
    def test_one_that_fails_does_not_stop_learning(self, bench, error, monkeypatch):
        monkeypatch.setattr(loop_module, "PUBLISH_RETRY_S", WAIT_S)
        publisher = Publisher(error)
        loop = bench.loop(publisher)
        loop.start()
        with running(loop):
            bench.add("a", "b", "c")
            bench.drained()
            until(lambda: loop.status().version == 3)
            status = loop.status()
            assert (status.published_version, publisher.tried) == (0, [1])
            assert bench.errors() == [str(error)]

    def test_a_later_one_brings_all_updates(self, bench):
        publisher = Publisher(*[WeightUpdateError("no engine answered")] * 3)
        loop = bench.loop(publisher)
        loop.start()
        with running(loop):
            bench.add("a", "b")
            bench.drained()
            until(lambda: publisher.published)
        assert publisher.published[-1] == loop.status().published_version == 2
        weights = loop.learner.policy.weights(torch.float32)
        assert changed(weights, publisher.weights[2]) == set()
        assert bench.store.get_version(2).published_at is not None
        assert bench.errors() == ["no engine answered"] * 3

    def test_updates_close_together_share_one(self, bench, monkeypatch):
        clock = SimpleNamespace(now=5.0)
        monkeypatch.setattr(loop_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
        publisher = Publisher()
        loop = bench.loop(publisher, publish_min_interval_s=3600)
        loop.start()
        with running(loop):
            bench.add("a", "b", "c")
            bench.drained()
            until(lambda: loop.status().version == 3)
            assert publisher.published == [1]  # the first at once
            clock.now += 3599
            time.sleep(0.1)
            assert publisher.published == [1]
            clock.now += 1
            until(lambda: loop.status().published_version == 3)  # though nothing new has come
            assert publisher.published == [1, 3]
            bench.add("d")
            bench.drained()
            time.sleep(0.1)
            assert publisher.published == [1, 3]
        assert [v.version for v in bench.store.versions() if v.published_at] == [3, 1]

    def test_several_updates_share_one_while_more_wait(self, bench):
        """Who asks after all waiting rollouts were learned from is answered by the last."""
        publisher = Publisher()
        loop = bench.loop(publisher, publish_every=3)
        loop.start()
        bench.add("a", "b", "c", "d", "e")
        with running(loop):
            bench.drained()
            until(lambda: loop.status().published_version == 5)
            bench.add("f")
            until(lambda: loop.status().published_version == 6)
        assert publisher.published == [3, 5, 6]

    def test_a_pause_does_not_hold_one_back(self, bench):
        publisher = Publisher()
        loop = bench.loop(publisher, publish_every=9)
        loop.start()
        held = Held(loop.learner)
        bench.add("a", "b")
        with running(loop):
            held.begun.wait(WAIT_S)
            loop.pause("held-out topics")
            held.go.set()
            until(lambda: loop.status().published_version == 1)
            assert bench.states()["b"] == S.REWARDED
        assert publisher.published == [1]

    def test_rollouts_too_few_for_an_update_hold_none_back(self, bench):
        publisher = Publisher()
        loop = bench.loop(publisher, publish_every=9, rollouts_per_update=2)
        loop.start()
        bench.add("a", "b", "c")
        with running(loop):
            until(lambda: loop.status().published_version == 1)
            # The loop takes it, finds it alone, and gives it back, again and again.
            until(lambda: bench.states()["c"] == S.REWARDED)
        assert bench.states()["c"] == S.REWARDED
        assert publisher.published == [1]

    def test_in_the_engines_dtype(self, bench):
        publisher = Publisher()
        config = bench.config().model_copy(
            update={"engine": bench.config().engine.model_copy(update={"dtype": "bfloat16"})}
        )
        learner = Learner(config.learner, str(bench.model))
        loop = LearnerLoop(config, make_run(config, "hash"), learner, bench.open(), publisher)
        loop.start()
        bench.learn(loop, "a")
        assert {tensor.dtype for tensor in publisher.weights[1].values()} == {torch.bfloat16}


class TestCheckpoints:
    def test_every_few_updates_and_at_the_end(self, bench):
        loop = bench.loop(checkpoint_every=2, checkpoint_keep=2)
        loop.start()
        bench.learn(loop, *(f"r{index}" for index in range(7)))
        assert [v for v, _ in checkpoint.list_checkpoints(bench.checkpoints)] == [7, 6]
        recorded = {v.version: v.checkpoint for v in bench.store.versions() if v.checkpoint}
        assert recorded == {v: str(bench.checkpoints / f"v{v}") for v in (6, 7)}

    def test_pinned_ones_stay(self, bench):
        loop = bench.loop(checkpoint_every=1, checkpoint_keep=1)
        loop.start()
        bench.learn(loop, "a", "b")
        bench.store.pin(2)
        again = bench.loop(checkpoint_every=1, checkpoint_keep=1)
        again.start()
        bench.learn(again, "c", "d")
        kept = [v for v, _ in checkpoint.list_checkpoints(bench.checkpoints)]
        assert kept == [5, 2]

    def test_a_start_that_learns_nothing_costs_no_older_one(self, bench):
        loop = bench.loop(checkpoint_every=1, checkpoint_keep=2)
        loop.start()
        bench.learn(loop, "a", "b")
        for _ in range(2):
            again = bench.loop(checkpoint_keep=2)
            again.start()
            with running(again):
                pass
        assert [v for v, _ in checkpoint.list_checkpoints(bench.checkpoints)] == [2, 1]

    def test_old_ones_make_room_down_to_the_newest_and_the_pinned(self, bench, monkeypatch):
        settings = {"checkpoint_keep": 10, "checkpoint_min_free_gib": 0}
        loop = bench.loop(checkpoint_every=1, **settings)
        loop.start()
        bench.add("a", "b", "c", "d")
        with running(loop):
            bench.drained()
        bench.store.pin(2)
        usage = checkpoint.shutil.disk_usage("/")
        need = checkpoint.checkpoint_bytes(loop.learner)

        def free(_):
            """Room for one more once two have gone."""
            held = len(checkpoint.list_checkpoints(bench.checkpoints))
            return usage._replace(free=int((4.1 - held) * need))

        monkeypatch.setattr(checkpoint.shutil, "disk_usage", free)
        again = bench.loop(**settings)
        again.start()
        with running(again):
            made = again.request_checkpoint().result(WAIT_S)
        assert not bench.errors()
        held = [version for version, _ in checkpoint.list_checkpoints(bench.checkpoints)]
        assert held == [made, 4, 2]
        assert [v.version for v in bench.store.retained_versions()] == [made, 4, 2]

    def test_old_ones_go_while_less_than_the_reserve_is_free(self, bench, monkeypatch):
        usage = checkpoint.shutil.disk_usage("/")
        free = usage._replace(free=2**29)
        monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: free)
        loop = bench.loop(checkpoint_every=1, checkpoint_keep=9, checkpoint_min_free_gib=1)
        loop.start()
        bench.learn(loop, "a", "b", "c")
        assert not bench.errors()
        assert [v for v, _ in checkpoint.list_checkpoints(bench.checkpoints)] == [3]

    def test_one_on_request(self, bench):
        loop = bench.loop()
        loop.start()
        with running(loop):
            assert loop.request_checkpoint().result(WAIT_S) == 0
        assert [v.version for v in bench.store.retained_versions()] == [0]
        with pytest.raises(LearnerError, match="has ended"):
            loop.request_checkpoint().result(WAIT_S)

    def test_what_a_crash_deleted_without_a_word_is_not_offered(self, bench):
        loop = bench.loop()
        loop.start()
        bench.learn(loop, "a")
        (kept,) = bench.store.retained_versions()
        checkpoint.shutil.rmtree(kept.checkpoint)
        bench.loop().start()
        assert bench.store.retained_versions() == []

    def test_a_full_disk_does_not_stop_learning(self, bench, monkeypatch):
        usage = checkpoint.shutil.disk_usage("/")
        monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage._replace(free=1000))
        loop = bench.loop(checkpoint_every=1)
        loop.start()
        bench.learn(loop, "a", "b")
        assert bench.states() == {"a": S.TRAINED, "b": S.TRAINED}
        assert list(bench.checkpoints.iterdir()) == []
        assert "learning goes on without it" in bench.errors()[0]


class TestSessions:
    """Two turns: prompt, action, observation, action; and a rollout of no session."""

    def turns(self, bench, session="s", prefix=""):
        first = make_rollout(f"{prefix}t0", tokens=[60, 61, 2], reward=0.5, session_id=session)
        second = next_turn(
            first,
            f"{prefix}t1",
            [70, 71],
            [62, 2],
            reward=1.0,
            session_id=session,
            parent_id=first.id,
        )
        for rollout in (first, second):
            bench.store.add(rollout)

    def test_credit_by_turn_learns_from_each_as_it_comes(self, bench):
        loop = bench.loop()
        loop.start()
        self.turns(bench)
        with running(loop):
            bench.drained()
        first, second = bench.store.get_many(["t0", "t1"])
        assert (first.trained_version, second.trained_version) == (1, 2)
        one, two = bench.store.versions()[-2::-1]
        assert [v.metrics["rollout/num_action_tokens"] for v in (one, two)] == [3, 2]
        assert [v.metrics["rollout/reward"] for v in (one, two)] == [0.5, 1.0]

    def test_credit_by_session_waits_for_its_end_and_makes_one_update(self, bench):
        bench.changes = {"credit": "session"}
        loop = bench.loop()
        loop.start()
        self.turns(bench)
        bench.add("alone")
        with running(loop):
            until(lambda: bench.states()["alone"] is S.TRAINED)
            assert bench.states()["t0"] is bench.states()["t1"] is S.REWARDED
            bench.store.close_session("s")
            bench.drained()
        first, second = bench.store.get_many(["t0", "t1"])
        assert first.trained_version == second.trained_version == 2
        made = bench.store.get_version(2).metrics
        assert (made["rollout/num_action_tokens"], made["rollout/reward"]) == (5, 1.5)
        assert made["rollout/num_trajectories"] == 1
        # One recursion across both: the observation is stepped over, the reward of the first
        # turn sits on its own last token.
        lam = 1 - 1 / (1.5 * 5)
        last, (v0, v1) = first.values[-1], second.values
        a1 = 1.0 - v1
        a0 = v1 - v0 + lam * a1
        assert second.advantages.tolist() == pytest.approx([a0, a1], rel=1e-5)
        assert first.advantages[-1] == pytest.approx(0.5 + v0 - last + lam * a0, rel=1e-5)
        assert first.values.shape == (3,)

    @pytest.mark.parametrize(("wait", "learned"), [(300.0, False), (0.0, True)])
    def test_how_long_a_turn_without_a_verdict_is_waited_for(self, bench, wait, learned):
        bench.changes = {"credit": "session", "session_reward_wait_s": wait}
        loop = bench.loop()
        loop.start()
        first = make_rollout("t0", tokens=[60, 61, 2], reward=0.5, session_id="s")
        bench.store.add(first)
        fields = {"session_id": "s", "parent_id": "t0", "reward": None}
        bench.store.add(next_turn(first, "t1", [70, 71], [62, 2], **fields))
        bench.store.close_session("s")
        with running(loop):
            bench.add("alone")
            until(lambda: bench.states()["alone"] is S.TRAINED)
            until(lambda: loop._num_waiting() == 0)
            until(lambda: not learned or bench.states()["t0"] is S.TRAINED)
        expected = S.TRAINED if learned else S.REWARDED
        assert bench.states() == {"t0": expected, "t1": S.PENDING, "alone": S.TRAINED}

    def test_an_update_of_several_sessions(self, bench):
        bench.changes = {"credit": "session", "rollouts_per_update": 2}
        loop = bench.loop()
        loop.start()
        self.turns(bench, "x", "x")
        bench.store.close_session("x")
        with running(loop):
            until(lambda: loop.status().num_updates == 0 and not loop._holds)
            self.turns(bench, "y", "y")
            bench.store.close_session("y")
            bench.drained()
        assert {r.trained_version for r in bench.store.list()} == {1}
        assert {r.num_claims for r in bench.store.list()} == {1}

    def test_a_crash_in_its_update_loses_no_turn(self, bench):
        bench.changes = {"credit": "session"}
        loop = bench.loop()
        loop.start()

        def die(*_, **__):
            raise Crash

        loop.learner.update = die
        self.turns(bench)
        bench.store.close_session("s")
        with running(loop, ends_with=Crash):
            pass
        assert set(bench.states().values()) == {S.CLAIMED}
        again = bench.loop()
        again.start()
        bench.learn(again)
        assert {r.trained_version for r in bench.store.list()} == {again.version}

    def test_one_whose_update_was_lost_is_learned_from_again_as_a_whole(self, bench):
        bench.changes = {"credit": "session"}
        publisher = Publisher()
        publisher.crash_at = 1
        loop = bench.loop(publisher)
        loop.start()
        self.turns(bench)
        bench.store.close_session("s")
        with running(loop, ends_with=Crash):
            pass
        lost = bench.store.get_version(1).metrics
        again = bench.loop()
        assert again.start() == "resume"
        bench.learn(again)
        made = bench.store.get_version(again.version).metrics
        names = ("rollout/num_trajectories", "rollout/reward", "rollout/num_action_tokens")
        assert [made[name] for name in names] == [lost[name] for name in names] == [1, 1.5, 5]


class TestResume:
    def crash(self, bench, at, *names, **changes):
        """Learn from `names`, and die while version `at` is published."""
        publisher = Publisher()
        publisher.crash_at = at
        loop = bench.loop(publisher, **changes)
        loop.start()
        bench.add(*names)
        with running(loop, ends_with=Crash):
            pass
        return loop

    def test_what_was_lost_is_learned_again_and_the_rest_is_not(self, bench):
        self.crash(bench, 3, "a", "b", "c", "d", checkpoint_every=2)
        states = bench.states()
        assert states == {"a": S.TRAINED, "b": S.TRAINED, "c": S.TRAINED, "d": S.REWARDED}
        publisher = Publisher()
        loop = bench.loop(publisher)
        assert loop.start() == "resume"
        # version 3 is never used again: 4 comes from the checkpoint of 2
        assert (loop.version, loop.status().num_updates) == (4, 2)
        made = bench.store.get_version(4)
        assert (made.parent, made.kind) == (2, "resume")
        assert bench.states()["c"] is S.REWARDED
        (event,) = bench.store.events("resume")
        assert event.data == {"from_version": 2, "rollouts_returned": 1}
        bench.learn(loop)
        trained = bench.store.get_many(list("abcd"))
        assert [r.trained_version for r in trained] == [1, 2, 5, 6]
        assert [r.num_claims for r in trained] == [1, 1, 1, 1]
        assert publisher.published == [4, 5, 6]  # the engine gets the resumed weights too
        # the same as if nothing had happened
        calm = Bench(bench.model, bench.folder.with_name("calm"))
        calm.open()
        undisturbed = calm.loop()
        undisturbed.start()
        calm.learn(undisturbed, "a", "b", "c", "d")
        calm.store.close()
        assert changed(everything(loop.learner), everything(undisturbed.learner)) == set()

    @pytest.mark.parametrize("order", ["oldest", "newest"])
    def test_a_crash_costs_no_answer_however_short_the_lag(self, bench, order):
        settings = {"checkpoint_every": 4, "max_policy_lag": 1, "order": order}

        def learn(loop, at):
            """Answers of the newest weights, each learned from at once."""
            for version, name in enumerate("abcdefghij"[at:], start=at):
                bench.add(name, version=version)
                until(lambda name=name: bench.states()[name] is S.TRAINED)

        publisher = Publisher()
        publisher.crash_at = 10
        first = bench.loop(publisher, **settings)
        first.start()
        with running(first, ends_with=Crash):
            learn(first, 0)
        second = bench.loop(**settings)
        assert second.start() == "resume"  # version 11, the weights of 8
        bench.add("waited", version=10)  # made by what was the newest
        bench.add("new", version=11)
        bench.learn(second)
        trained = bench.store.get_many(["i", "j", "waited"])
        assert [r.trained_version for r in trained[:2]] == [12, 13]  # in their order
        lags = [
            bench.store.get_version(r.trained_version).metrics["rollout/policy_lag_max"]
            for r in trained
        ]
        assert lags[:2] == [0, 0]
        # What version 10 was is version 13 now, and that of 11 is too old by then.
        assert lags[2] == 0
        assert bench.store.get("new").reason == "policy_lag"

    def test_a_rollout_over_which_learners_die_is_set_aside(self, bench):
        for number in range(1, 4):
            loop = bench.loop(max_claims=3)
            loop.start()

            def die(*_, **__):
                raise Crash

            loop.learner.update = die
            if number == 1:
                bench.add("a")
            with running(loop, ends_with=Crash):
                pass
            assert bench.store.get("a").state is S.CLAIMED
            assert bench.store.get("a").num_claims == number
        loop = bench.loop(max_claims=3)
        loop.start()
        bench.learn(loop, "b")
        assert bench.states() == {"a": S.EXCLUDED, "b": S.TRAINED}
        assert bench.store.get("a").reason == "poison"

    def test_without_a_checkpoint_all_is_learned_again(self, bench):
        """A crash before the first checkpoint; not in silence."""
        self.crash(bench, 2, "a", "b", "c")
        publisher = Publisher()
        loop = bench.loop(publisher)
        assert loop.start() == "resume"
        assert loop.version == 3
        assert not loop.serves_start_weights  # an engine that lived on has those of version 2
        (event,) = bench.store.events("resume")
        assert event.data == {"from_version": None, "rollouts_returned": 2}
        assert bench.store.get_version(3).parent is None
        bench.learn(loop)
        assert [r.trained_version for r in bench.store.get_many(list("abc"))] == [4, 5, 6]
        assert publisher.published == [3, 4, 5, 6]

    @pytest.mark.parametrize("name", ["state.json", "policy.safetensors"])
    def test_a_checkpoint_that_is_cut_short_is_passed_over(self, bench, name):
        """C14: it says so, and the rollouts since the one before come back."""
        self.crash(bench, 5, "a", "b", "c", "d", "e", checkpoint_every=2)
        file = bench.checkpoints / "v4" / name
        file.write_bytes(file.read_bytes()[:-100])
        loop = bench.loop()
        loop.start()
        assert loop.status().num_updates == 2
        assert bench.store.get_version(loop.version).parent == 2
        assert [e for e in bench.errors() if "Checkpoint of version 4" in e]
        waiting = [name for name, state in bench.states().items() if state is S.REWARDED]
        assert waiting == ["c", "d", "e"]

    def test_all_checkpoints_are_damaged(self, bench):
        self.crash(bench, 5, "a", "b", "c", "d", "e", checkpoint_every=2)
        for version in (2, 4):
            (bench.checkpoints / f"v{version}" / "critic.safetensors").unlink()
        loop = bench.loop()
        loop.start()
        assert loop.status().num_updates == 0
        assert len(bench.errors()) == 2
        (event,) = bench.store.events("resume")
        assert event.data == {"from_version": None, "rollouts_returned": 5}

    def test_a_store_that_is_gone_is_refused(self, bench):
        """C14: never from zero in silence."""
        loop = bench.loop()
        loop.start()
        bench.learn(loop, "a")
        for store in bench.opened:
            store.close()
        for file in bench.folder.glob("store.sqlite*"):
            file.unlink()
        with pytest.raises(CheckpointError, match=r"the store .* knows nothing of"):
            bench.loop().start()

    def test_from_a_checkpoint_with_an_empty_queue(self, bench):
        """C13"""
        first = bench.loop()
        first.start()
        bench.learn(first, "a")
        publisher = Publisher()
        second = bench.loop(publisher)
        assert second.start() == "resume"
        assert not second.serves_start_weights
        with running(second):
            until(lambda: publisher.published == [2])  # serves at once what was learned
            time.sleep(0.05)
            assert not second.status().busy
        assert changed(everything(first.learner), everything(second.learner)) == set()
        assert bench.states() == {"a": S.TRAINED}

    def test_other_settings_begin_a_run_of_their_own(self, bench):
        first = bench.loop()
        first.start()
        bench.learn(first, "a")
        other = bench.loop(eps_high=1.0)
        assert other.start() == "start"
        assert other.learner.num_updates == 0
        assert other.version == 2
        (event,) = bench.store.events("error")  # and not in silence
        assert "A new run begins from the start weights" in event.data["what"]
        assert bench.states() == {"a": S.TRAINED}  # of the other run: left alone
        bench.learn(other, "b")
        # and back: the first run goes on from where it was
        back = bench.loop()
        assert back.start() == "resume"
        assert bench.store.get_version(back.version).parent == 1
        assert changed(everything(first.learner), everything(back.learner)) == set()


class TestRollback:
    def trained(self, bench, publisher=None, **changes):
        """Versions 1 to 4, with checkpoints of each."""
        loop = bench.loop(publisher, checkpoint_every=1, checkpoint_keep=9, **changes)
        loop.start()
        kept = {}
        bench.add("a", "b", "c", "d")
        save = checkpoint.save_checkpoint

        def keep(folder, learner, version, run_id):
            kept[version] = everything(learner)
            return save(folder, learner, version, run_id)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop_module, "save_checkpoint", keep)
            with running(loop):
                bench.drained()
                until(lambda: 4 in kept)
        return kept

    def test_to_a_retained_version(self, bench):
        kept = self.trained(bench)
        publisher = Publisher()
        loop = bench.loop(publisher)
        loop.start()  # resumes as version 5
        bench.add("open", version=4)
        loop.pause("to look at it")
        with running(loop):
            assert loop.request_rollback(2).result(WAIT_S) == 6
            until(lambda: publisher.published[-1] == 6)
            made = bench.store.get_version(6)
            assert (made.parent, made.kind) == (2, "rollback")
            assert changed(kept[2], everything(loop.learner)) == set()
            assert bench.states() == {
                "a": S.TRAINED,
                "b": S.TRAINED,
                "c": S.DISCARDED,
                "d": S.DISCARDED,
                "open": S.STALE,
            }
            assert {bench.store.get(name).reason for name in ("c", "d", "open")} == {"rolled_back"}
            assert bench.store.events("rollback")[0].data == {"to": 2, "made": 6}
            weights = loop.learner.policy.weights(torch.float32)
            assert changed(weights, publisher.weights[6]) == set()
            bench.add("e", version=6)
            loop.resume()
            bench.drained()
        assert bench.store.get_version(7).parent == 6
        assert bench.store.get("e").trained_version == 7

    def test_what_it_left_takes_no_place_of_what_it_went_back_to(self, bench):
        settings = {"checkpoint_every": 1, "checkpoint_keep": 2}
        loop = bench.loop(**settings)
        loop.start()
        with running(loop):
            bench.add("a", "b")
            bench.drained()
            until(lambda: len(checkpoint.list_checkpoints(bench.checkpoints)) == 2)
            assert loop.request_rollback(1).result(WAIT_S) == 3
            bench.add("c", version=3)
            bench.drained()
        held = [v for v, _ in checkpoint.list_checkpoints(bench.checkpoints)]
        assert held == [4, 2, 1]

    def test_what_was_made_before_it_is_no_older_by_it(self, bench):
        self.trained(bench, max_policy_lag=3)
        loop = bench.loop(max_policy_lag=3)
        loop.start()
        bench.add("before", version=1)
        loop.pause("for a test")
        with running(loop):
            assert loop.request_rollback(2).result(WAIT_S) == 6
            loop.resume()
            bench.drained()
        assert bench.store.get("before").trained_version == 7

    def test_guards_forget_what_the_weights_that_were_left_did(self, bench):
        loop = bench.loop(checkpoint_every=1, checkpoint_keep=9)
        loop.start()
        with running(loop):
            bench.add("a", "b")
            bench.drained()
            assert loop.request_rollback(1).result(WAIT_S) == 3
            assert loop.status().guards["rollouts_seen"] == 0
            bench.add("c", version=3)
            bench.drained()
            until(lambda: not loop.status().busy)
            assert loop.status().guards["rollouts_seen"] == 1

    def test_to_one_that_is_not_retained(self, bench):
        self.trained(bench)
        loop = bench.loop()
        loop.start()
        with running(loop):
            future = loop.request_rollback(99)
            with pytest.raises(NotFoundError, match=r"retained: 4, 3, 2, 1"):
                future.result(WAIT_S)
            assert loop.version == 5

    def test_when_none_is_retained(self, bench):
        loop = bench.loop()
        loop.start()
        with running(loop), pytest.raises(NotFoundError, match="retained: none"):
            loop.request_rollback(0).result(WAIT_S)

    def test_to_a_damaged_one(self, bench):
        kept = self.trained(bench)
        (bench.checkpoints / "v2" / "policy.safetensors").write_bytes(b"")
        loop = bench.loop()
        loop.start()
        with running(loop):
            with pytest.raises(CheckpointError, match="damaged"):
                loop.request_rollback(2).result(WAIT_S)
            assert loop.version == 5
            bench.add("e", version=4)
            bench.drained()
        assert changed(kept[4], everything(loop.learner)) != set()
        assert bench.store.get("e").trained_version == 6

    def test_to_one_of_another_run(self, bench):
        self.trained(bench)
        loop = bench.loop(seed=1)
        loop.start()
        with running(loop), pytest.raises(NotFoundError, match="belongs to another run"):
            loop.request_rollback(2).result(WAIT_S)

    def test_a_crash_does_not_undo_it(self, bench):
        """The newest checkpoint is on the line that was left."""
        kept = self.trained(bench)
        loop = bench.loop()
        loop.start()
        publisher_died = Publisher()
        publisher_died.crash_at = 7
        loop._publisher = publisher_died
        with running(loop, ends_with=Crash):
            assert loop.request_rollback(2).result(WAIT_S) == 6
            bench.add("e", version=6)
            loop.wake()
        resumed = bench.loop()
        resumed.start()
        assert changed(kept[2], everything(resumed.learner)) == set()
        assert bench.store.get_version(resumed.version).parent == 2
        states = bench.states()
        assert states["e"] is S.REWARDED
        assert states["c"] is states["d"] is S.DISCARDED

    def test_after_the_end(self, bench):
        loop = bench.loop()
        loop.start()
        with running(loop):
            pass
        with pytest.raises(LearnerError, match="has ended"):
            loop.request_rollback(0).result(WAIT_S)


class TestFencing:
    def test_a_newer_learner_takes_over(self, bench):
        first = bench.loop(checkpoint_every=1)
        first.start()
        held = Held(first.learner)
        bench.add("a", "b")
        with running(first, ends_with=FencedError):
            assert held.begun.wait(WAIT_S)
            second = bench.loop()
            assert second.start() == "resume"
            assert second.status().epoch == first.status().epoch + 1
            held.go.set()
        assert bench.states() == {"a": S.REWARDED, "b": S.REWARDED}
        assert not bench.checkpoints.exists()  # nor did it leave one at its end
        bench.learn(second)
        assert bench.states() == {"a": S.TRAINED, "b": S.TRAINED}
        assert {r.num_claims for r in bench.store.get_many(["a", "b"])} == {1, 2}
        with pytest.raises(LearnerError, match="has ended"):
            first.request_rollback(0).result(WAIT_S)


class Outage(RolloutStore):
    """A store whose methods fail as often as `failing` says, before or after their work."""

    failing: ClassVar[dict[str, int]] = {}
    after: ClassVar[bool] = False


def _fails(name):
    def method(self, *arguments, **named):
        left = self.failing.get(name, 0)
        if left:
            self.failing[name] = left - 1
            if self.after:
                getattr(RolloutStore, name)(self, *arguments, **named)
            raise StoreError("The store cannot be reached.")
        return getattr(RolloutStore, name)(self, *arguments, **named)

    return method


for _name in (
    *("claim", "release", "finish_update", "exclude", "set_published"),
    *("roll_back", "add_event", "preference"),
):
    setattr(Outage, _name, _fails(_name))


class TestStoreOutage:
    @pytest.fixture
    def outage(self, bench, monkeypatch):
        monkeypatch.setattr(Outage, "failing", {})
        monkeypatch.setattr(Outage, "after", False)
        bench.store_type = Outage
        return bench

    def wanted(self, bench, *names):
        """What a learner without an outage makes of the same rollouts."""
        calm = Bench(bench.model, bench.folder.with_name("calm"))
        calm.open()
        loop = calm.loop()
        loop.start()
        calm.learn(loop, *names)
        calm.store.close()
        return everything(loop.learner)

    @pytest.mark.parametrize("after", [False, True])
    @pytest.mark.parametrize("method", ["claim", "finish_update", "set_published"])
    def test_no_update_is_lost_or_made_twice(self, outage, method, after, monkeypatch):
        monkeypatch.setattr(Outage, "after", after)
        loop = outage.loop()
        loop.start()
        outage.add("a", "b")
        Outage.failing[method] = 2
        with running(loop):
            outage.drained()
        assert Outage.failing[method] == 0
        trained = outage.store.get_many(["a", "b"])
        assert [r.trained_version for r in trained] == [1, 2]
        assert [r.num_claims for r in trained] == [1, 1]
        assert [v.version for v in outage.store.versions()] == [2, 1, 0]
        assert changed(self.wanted(outage, "a", "b"), everything(loop.learner)) == set()
        assert loop.status().failure is None

    def test_a_rollback_is_done_whole_or_not_at_all(self, outage):
        first = outage.loop(checkpoint_every=1, checkpoint_keep=9)
        first.start()
        outage.learn(first, "a", "b")
        second = outage.loop()
        second.start()
        with running(second):
            Outage.failing["roll_back"] = 10**9
            future = second.request_rollback(1)
            until(lambda: second.status().failure)
            second.stop()
        with pytest.raises(StoreError):
            future.result(WAIT_S)
        Outage.failing.clear()
        assert outage.states() == {"a": S.TRAINED, "b": S.TRAINED}
        third = outage.loop()
        third.start()
        assert changed(everything(first.learner), everything(third.learner)) == set()

    def test_a_pause_is_recorded_once_the_store_is_back(self, outage):
        loop = outage.loop()
        loop.start()
        Outage.failing["add_event"] = 2
        loop.pause("first")
        loop.resume()  # neither was written
        with running(loop):
            until(lambda: not loop._unsaved)
            loop.pause("second")
        kinds = [event.kind for event in reversed(outage.store.events())]
        assert kinds == ["pause", "resume_learning", "pause"]
        assert outage.loop().start() == "resume"
        again = outage.loop()
        again.start()
        assert again.status().pause_reason == "second"

    def test_a_failure_is_no_longer_shown_once_it_is_over(self, outage):
        first = outage.loop(checkpoint_every=1)
        first.start()
        outage.learn(first, "a")
        loop = outage.loop()
        loop.start()
        with running(loop):
            Outage.failing["roll_back"] = 1
            assert loop.request_rollback(1).result(WAIT_S) == 3
            assert loop.status().failure is None

    def test_it_says_what_is_wrong_while_it_lasts(self, outage):
        loop = outage.loop()
        loop.start()
        outage.add("a")
        Outage.failing["finish_update"] = 10**9
        with running(loop):
            until(lambda: loop.status().failure)
            assert loop.status().failure == "The store cannot be reached."
            assert outage.states() == {"a": S.CLAIMED}
            Outage.failing.clear()
            outage.drained()
        assert outage.states() == {"a": S.TRAINED}

    def test_ended_during_the_outage_the_update_is_forgotten_with_its_weights(self, outage):
        first = outage.loop()
        first.start()
        outage.add("a")
        Outage.failing["finish_update"] = 10**9
        with running(first):
            until(lambda: first.status().failure)
        Outage.failing.clear()
        # A checkpoint would hold an update that the store knows nothing of.
        assert not outage.checkpoints.exists()
        second = outage.loop()
        second.start()
        outage.learn(second)
        assert outage.store.get("a").state is S.TRAINED
        assert changed(self.wanted(outage, "a"), everything(second.learner)) == set()

    def test_a_rollout_that_is_taken_away_during_its_update(self, outage):
        loop = outage.loop(rollouts_per_update=2)
        loop.start()
        held = Held(loop.learner)
        outage.add("a", "b")
        with running(loop):
            assert held.begun.wait(WAIT_S)
            outage.store.exclude(["a"], "opted_out")
            held.go.set()
            outage.drained()
        assert outage.states() == {"a": S.EXCLUDED, "b": S.TRAINED}
        assert [v.version for v in outage.store.versions()] == [1, 0]

    def test_a_text_that_is_deleted_during_its_update(self, outage):
        loop = outage.loop()
        loop.start()
        held = Held(loop.learner)
        outage.add("a")
        with running(loop):
            assert held.begun.wait(WAIT_S)
            outage.store.delete_text("a")
            held.go.set()
            outage.drained()
        assert outage.states() == {"a": S.TRAINED}
        assert outage.store.get("a").values is None

    @pytest.mark.parametrize("method", ["release", "exclude"])
    def test_what_was_claimed_comes_back(self, outage, method):
        loop = outage.loop(rollouts_per_update=2)
        loop.start()
        Outage.failing[method] = 2
        if method == "exclude":
            outage.add("bad", logprobs=math.nan)
        outage.add("a")
        with running(loop):
            until(lambda: Outage.failing[method] == 0)
            outage.add("b")
            outage.drained()
        states = outage.states()
        assert (states["a"], states["b"]) == (S.TRAINED, S.TRAINED)
        assert states.get("bad", S.EXCLUDED) is S.EXCLUDED

    def test_a_rollback_is_carried_out_when_the_store_returns(self, outage):
        loop = outage.loop(checkpoint_every=1, checkpoint_keep=9)
        loop.start()
        with running(loop):
            outage.add("a", "b")
            outage.drained()
            until(lambda: loop.status().version == 2 and not loop.status().busy)
            Outage.failing["roll_back"] = 3
            assert loop.request_rollback(1).result(WAIT_S) == 3
            assert Outage.failing["roll_back"] == 0
        assert outage.store.get_version(3).parent == 1
        assert outage.states() == {"a": S.TRAINED, "b": S.DISCARDED}

    def test_a_guard_that_fires_pauses_though_no_way_back_can_be_looked_for(self, outage):
        loop = outage.loop()
        loop.start()
        loop.add_probe(ProbeResult(0, 8, quality=1.0, reward=1.0, forgeries_rewarded=1.0))
        outage.add("a")
        Outage.failing["preference"] = 1
        with running(loop):
            until(lambda: loop.status().paused or outage.states()["a"] is S.TRAINED)
        assert Outage.failing["preference"] == 0
        assert outage.states() == {"a": S.REWARDED}
        assert "guard forgeries" in loop.status().pause_reason
        (fired,) = outage.store.events("guard")
        assert (fired.data["action"], fired.data["kept_version"]) == ("pause", None)


class TestRun:
    @pytest.mark.parametrize(
        ("changes", "same"),
        [
            ({}, True),
            ({"threads": 2}, True),
            ({"checkpoint_every": 7}, True),
            ({"checkpoint_keep": 7}, True),
            ({"checkpoint_min_free_gib": 7}, True),
            ({"publish_min_interval_s": 7}, True),
            ({"seed": 7}, False),
            ({"objective": "tis"}, False),
            ({"advantage": "running_mean"}, False),
            ({"kl_coef": 0.3}, False),
            ({"policy_lr": 2e-5}, False),
        ],
    )
    def test_is_the_same_while_what_is_learned_is(self, bench, changes, same):
        first, second = make_run(bench.config(), "h"), make_run(bench.config(**changes), "h")
        assert (first.id == second.id) is same

    def test_depends_on_the_start_weights_and_the_engines_dtype(self, bench):
        config = bench.config()
        other = config.model_copy(
            update={"engine": config.engine.model_copy(update={"dtype": "bfloat16"})}
        )
        ids = {make_run(config, "h").id, make_run(config, "g").id, make_run(other, "h").id}
        assert len(ids) == 3

    def test_says_what_it_is(self, bench):
        run = make_run(bench.config(preset="spo", seed=3), "h")
        assert run.id.startswith("spo-seed3-")
        assert (run.preset, run.seed, run.model_hash) == ("spo", 3, "h")
        assert Config.model_validate(run.config) == bench.config(preset="spo", seed=3)
