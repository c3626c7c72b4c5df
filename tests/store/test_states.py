"""Random lives of rollouts: states move only along the arrows of store.py's docstring."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from online_sao.errors import FencedError, StoreError
from online_sao.store import RolloutStore
from online_sao.types import (
    JudgeState,
    RolloutState,
    Run,
    StoredVerdict,
    WeightSpan,
    WeightVersion,
)
from online_sao.types import Rollout as RolloutRecord

NAMES = [f"r{number}" for number in range(6)]
names = st.sampled_from(NAMES)
name_lists = st.lists(names, unique=True, max_size=4)
final = {"stale", "excluded", "discarded"}
# what each move may change; "nothing" is always allowed
ARROWS: dict[str, set[tuple[str, str]]] = {
    "nothing": set(),
    "verdict": {("pending", "rewarded"), ("unscored", "rewarded")},
    "unscored": {("pending", "unscored")},
    "feedback": {("pending", "rewarded"), ("unscored", "rewarded")},
    "claim": {("rewarded", "claimed"), ("rewarded", "stale"), ("rewarded", "excluded")},
    "finish": {("claimed", "trained")},
    "release": {("claimed", "rewarded"), ("claimed", "discarded")},
    "recover": {("claimed", "rewarded"), ("claimed", "discarded")},
    "exclude": {(s, "excluded") for s in ("pending", "unscored", "rewarded", "claimed")},
    "discard": {(s, "discarded") for s in ("pending", "unscored", "rewarded", "trained")},
    "rewind": {("trained", "rewarded"), ("trained", "discarded")},
    "rollback": {("trained", "discarded")}
    | {(s, "stale") for s in ("pending", "unscored", "rewarded")},
    "delete": {(s, "discarded") for s in ("pending", "unscored", "rewarded")},
}


class Lives(RuleBasedStateMachine):
    num_trained = 0  # over all lives

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.store = RolloutStore(f"sqlite:///{self.folder}/store.sqlite")
        self.store.start_run(Run("run", "sao", 0, "model", "hash"))
        self.store.add_version(WeightVersion(0, None, "run", "start"))
        self.epochs = [self.store.new_epoch()]
        self.deleted: set[str] = set()
        self.before: dict[str, str] = {}
        self.updates: dict[str, list[int]] = {}
        self.claims: dict[str, int] = {}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)

    def check(self, move: str) -> None:
        after = {r.id: r.state.value for r in self.store.list()}
        for name, state in self.before.items():
            change = (state, after[name])
            assert change[0] == change[1] or change in ARROWS[move], (move, name, change)
        self.before = after

    @property
    def line(self) -> int:
        return self.store.next_version() - 1

    @rule(name=names, excluded=st.booleans(), old=st.integers(0, 3))
    def add(self, name: str, excluded: bool, old: int) -> None:
        version = max(0, self.line - old)
        self.store.add(
            RolloutRecord(
                id=name,
                response_id=name,
                choice=0,
                prompt_token_ids=np.array([1], np.int32),
                token_ids=np.array([2, 3], np.int32),
                behavior_logprobs=np.array([-1, -2], np.float32),
                weight_spans=(WeightSpan(version, 0, 2),),
                temperature=1.0,
                messages=None,
                answer="text",
                finish_reason="stop",
                state=RolloutState.EXCLUDED if excluded else RolloutState.PENDING,
                reason="opted_out" if excluded else None,
            )
        )
        state = self.store.get(name).state.value
        assert self.before.setdefault(name, state) == state

    @rule(name=names, reward=st.sampled_from([0.0, 1.0]))
    def verdict(self, name: str, reward: float) -> None:
        if name in self.before:
            state = self.store.set_verdict(name, StoredVerdict(1.0, reward, reward))
            assert state == self.store.get(name).state
            self.check("verdict")

    @rule(name=names)
    def unscored(self, name: str) -> None:
        if name in self.before:
            self.store.set_unscored(name, "timeout")
            self.check("unscored")

    @rule(name=names)
    def feedback(self, name: str) -> None:
        if name in self.before:
            was = self.before[name]
            trained, reason = self.store.add_feedback(name, 0.5)
            assert trained == (was in ("pending", "unscored", "rewarded")) == (reason is None)
            self.check("feedback")
            if trained:
                assert (self.before[name], self.store.get(name).reward) == ("rewarded", 0.5)

    @rule(limit=st.integers(1, 3), lag=st.integers(0, 3), newest=st.booleans())
    def claim(self, limit: int, lag: int, newest: bool) -> None:
        claimed = self.store.claim(
            epoch=self.epochs[-1],
            limit=limit,
            order="newest" if newest else "oldest",
            current_version=max(0, self.line),
            max_policy_lag=lag,
            max_claims=3,
            run_id="run",
        )
        self.check("claim")
        for rollout in claimed:
            self.claims[rollout.id] = self.epochs[-1]
            assert rollout.id not in self.deleted
            assert rollout.token_ids.tolist() == [2, 3]
            assert rollout.num_claims <= 3
            assert self.line - rollout.weight_version_start <= lag

    @rule(ids=st.none() | name_lists, stale_learner=st.booleans())
    def finish(self, ids: list[str] | None, stale_learner: bool) -> None:
        epoch = self.epochs[0] if stale_learner else self.epochs[-1]
        if ids is None:
            ids = [name for name, state in self.before.items() if state == "claimed"]
        version = WeightVersion(self.store.next_version(), self.line, "run", "update")
        array = np.zeros(2, np.float32)
        may = epoch == self.epochs[-1] and all(
            self.before.get(i) == "claimed" and self.claims[i] == epoch for i in ids
        )
        try:
            self.store.finish_update(
                epoch=epoch, version=version, rollouts=[(i, array, array, array) for i in ids]
            )
            done = True
        except (FencedError, StoreError):
            done = False
        assert done == may
        if done:
            Lives.num_trained += len(ids)
            for name in ids:
                self.updates.setdefault(name, []).append(version.version)
        else:
            assert self.store.next_version() == version.version
        self.check("finish" if done else "nothing")

    @rule(name=names)
    def learn(self, name: str) -> None:
        """What mostly happens: chance alone hardly finds the four moves in their order."""
        self.add(name, excluded=False, old=0)
        self.verdict(name, 1.0)
        self.claim(limit=3, lag=3, newest=False)
        self.finish(None, stale_learner=False)

    @rule()
    def release(self) -> None:
        self.store.release(self.epochs[-1])
        self.check("release")

    @rule(recover=st.booleans())
    def crash(self, recover: bool) -> None:
        self.epochs.append(self.store.new_epoch())
        if recover:
            self.store.recover(self.epochs[-1])
            self.check("recover")
            assert "claimed" not in self.before.values()

    @rule(ids=name_lists)
    def exclude(self, ids: list[str]) -> None:
        self.store.exclude(ids, "non_finite")
        self.check("exclude")

    @rule(ids=name_lists)
    def discard(self, ids: list[str]) -> None:
        self.store.discard(ids, "operator")
        self.check("discard")

    @rule(back=st.integers(0, 3))
    def rewind(self, back: int) -> None:
        to = max(0, self.line - back)
        self.store.rewind(to, "run")
        self.check("rewind")
        for name, made in self.updates.items():
            self.updates[name] = [version for version in made if version <= to]

    @rule(back=st.integers(0, 3))
    def rollback(self, back: int) -> None:
        to = max(0, self.line - back)
        made = self.store.roll_back(to, "run", self.epochs[-1])
        self.check("rollback")
        assert made == self.line

    @rule(name=names)
    def delete(self, name: str) -> None:
        if name in self.before:
            self.store.delete_text(name)
            self.deleted.add(name)
            self.check("delete")

    @invariant()
    def every_row_makes_sense(self) -> None:
        if not hasattr(self, "store"):
            return
        rows = self.store.list(with_tokens=True)
        assert [r.seq for r in rows] == list(range(1, len(rows) + 1))
        for row in rows:
            trained_on = self.updates.get(row.id, [])
            assert len(trained_on) <= 1  # never twice on one line of weights
            if row.state == RolloutState.TRAINED:
                assert [row.trained_version] == trained_on
            if row.state in (RolloutState.REWARDED, RolloutState.CLAIMED, RolloutState.TRAINED):
                assert row.reward is not None
                assert row.judge_state == JudgeState.SCORED
            if row.state == RolloutState.REWARDED:
                assert row.id not in self.deleted
                assert row.reason is None
            if row.state.value in final or row.state == RolloutState.UNSCORED:
                assert row.reason
            if row.state == RolloutState.PENDING:
                assert row.judge_state == JudgeState.WAITING
        counts = self.store.counts()
        assert sum(counts.values()) == len(rows)


Lives.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class TestLives(Lives.TestCase):
    def runTest(self) -> None:
        super().runTest()
        assert Lives.num_trained > 10
