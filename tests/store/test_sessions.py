"""Sessions: which trajectory a turn belongs to, when it is over, what a learner then gets."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import sqlalchemy as sa

from online_sao.errors import NotFoundError
from online_sao.store.migration import migrate
from online_sao.store.models import turns as turns_table
from online_sao.types import RolloutState as S
from online_sao.types import Skipped


def turn(kit, name, session="s", parent=None, **fields):
    return kit.store.add(kit.rollout(name, session_id=session, parent_id=parent, **fields))


def place(rollout):
    return rollout.trajectory_id, rollout.turn, rollout.new_trajectory


def claim(kit, epoch, limit=10, wait_s=1000.0, **changes):
    settings = {
        "epoch": epoch,
        "limit": limit,
        "current_version": 0,
        "max_policy_lag": 16,
        "max_claims": 3,
        "run_id": "run",
        "reward_wait_s": wait_s,
    } | changes
    found = kit.store.claim_trajectories(**settings)
    return [[rollout.id for rollout in trajectory] for trajectory in found]


class TestPlaces:
    def test_turns_that_go_on_from_one_another_are_one_trajectory(self, kit, store):
        assert place(turn(kit, "a")) == ("a", 0, None)
        assert place(turn(kit, "b", parent="a")) == ("a", 1, None)
        assert place(turn(kit, "c", parent="b")) == ("a", 2, None)
        assert [place(r) for r in store.list()] == [("a", 0, None), ("a", 1, None), ("a", 2, None)]
        assert store.get("c").parent_id == "b"
        assert store.session("s").num_turns == 3

    def test_without_a_session_there_is_no_place(self, kit, store):
        store.add(kit.rollout("a"))
        assert place(store.get("a")) == (None, None, None)

    def test_a_turn_without_a_parent_begins_one_with_its_reason(self, kit):
        turn(kit, "a")
        assert place(turn(kit, "b", new_trajectory="history_changed")) == (
            "b",
            0,
            "history_changed",
        )

    def test_a_second_answer_to_the_same_history_is_a_branch(self, kit):
        turn(kit, "a")
        turn(kit, "b", parent="a")
        assert place(turn(kit, "c", parent="a")) == ("c", 0, "branched")
        # and each branch goes on by itself
        assert place(turn(kit, "d", parent="c")) == ("c", 1, None)
        assert place(turn(kit, "e", parent="b")) == ("a", 2, None)

    def test_a_closed_session_is_opened_by_a_turn_and_its_trajectory_stays_closed(self, kit, store):
        turn(kit, "a")
        assert store.close_session("s").close_reason == "client"
        assert place(turn(kit, "b", parent="a")) == ("b", 0, "session_closed")
        assert store.session("s").closed_at is None

    def test_a_parent_whose_text_was_deleted(self, kit, store):
        turn(kit, "a")
        store.delete_text("a")
        assert place(turn(kit, "b", parent="a")) == ("b", 0, "parent_deleted")

    def test_recorded_twice_it_has_one_place(self, kit, store):
        turn(kit, "a")
        turn(kit, "a")
        assert store.session("s").num_turns == 1


class TestClosing:
    def test_an_unknown_session(self, store):
        with pytest.raises(NotFoundError, match="no session 'x'"):
            store.close_session("x")

    def test_closing_twice_keeps_the_first_time_and_reason(self, kit, store):
        turn(kit, "a")
        first = store.close_session("s")
        assert store.close_session("s") == first

    def test_idle_ones_close(self, kit, store):
        turn(kit, "old", "old", created_at=datetime.now(UTC) - timedelta(seconds=30))
        turn(kit, "new", "new")
        assert store.close_idle_sessions(10) == 1
        assert store.session("old").close_reason == "idle"
        assert store.session("new").closed_at is None
        assert store.close_idle_sessions(10) == 0

    def test_a_turn_keeps_its_session_from_being_idle(self, kit, store):
        turn(kit, "a", created_at=datetime.now(UTC) - timedelta(seconds=30))
        turn(kit, "b", parent="a")
        assert store.close_idle_sessions(10) == 0
        assert store.session("s").closed_at is None

    def test_a_session_without_texts_is_forgotten(self, kit, store):
        turn(kit, "a")
        turn(kit, "b", parent="a")
        store.delete_text("a")
        assert store.session("s").num_turns == 1
        store.delete_text("b")
        with pytest.raises(NotFoundError):
            store.session("s")


class TestClaims:
    @pytest.fixture
    def epoch(self, kit):
        return kit.begin()

    def reward(self, kit, *names):
        for name in names:
            kit.store.set_verdict(name, kit.good)

    def test_a_session_is_claimed_whole_and_in_order_once_it_is_closed(self, kit, store, epoch):
        for name, parent in (("a", None), ("b", "a"), ("c", "b")):
            turn(kit, name, parent=parent)
        self.reward(kit, "c", "a", "b")
        assert claim(kit, epoch) == []
        assert store.num_ready_trajectories("run", 1000) == 0
        store.close_session("s")
        assert store.num_ready_trajectories("run", 1000) == 1
        assert claim(kit, epoch) == [["a", "b", "c"]]
        assert set(kit.states().values()) == {S.CLAIMED}
        assert claim(kit, epoch) == []

    def test_a_rollout_without_a_session_stands_alone(self, kit, epoch):
        kit.rewarded("a", "b")
        assert claim(kit, epoch, limit=1) == [["a"]]
        assert claim(kit, epoch) == [["b"]]

    def test_the_limit_is_of_trajectories_in_both_orders(self, kit, store, epoch):
        for session in ("x", "y"):
            turn(kit, f"{session}0", session)
            turn(kit, f"{session}1", session, parent=f"{session}0")
            self.reward(kit, f"{session}0", f"{session}1")
            store.close_session(session)
        assert claim(kit, epoch, limit=1, order="newest") == [["y0", "y1"]]
        assert claim(kit, epoch, limit=1) == [["x0", "x1"]]

    def test_a_verdict_that_is_out_is_waited_for_and_not_for_ever(self, kit, store, epoch):
        turn(kit, "a")
        turn(kit, "b", parent="a")
        self.reward(kit, "b")
        store.close_session("s")
        assert claim(kit, epoch, wait_s=1000) == []
        assert claim(kit, epoch, wait_s=0) == [["b"]]
        # what comes late is not lost
        self.reward(kit, "a")
        assert claim(kit, epoch) == []  # its trajectory is in a learner's hands
        kit.train(epoch, 1, "b")
        assert claim(kit, epoch, current_version=1) == [["a"]]

    def test_turns_that_may_not_be_trained_on_are_left_out(self, kit, store, epoch):
        turn(kit, "a")
        turn(kit, "b", parent="a", state=S.EXCLUDED, reason="sampling:top_p")
        turn(kit, "c", parent="b")
        turn(kit, "d", parent="c")
        self.reward(kit, "a", "b", "d")
        store.set_unscored("c", "timeout")
        store.close_session("s")
        assert claim(kit, epoch) == [["a", "d"]]

    def test_turns_too_old_are_set_aside_and_the_others_learned_from(self, kit, store, epoch):
        turn(kit, "a", version=0)
        turn(kit, "b", parent="a", version=5)
        self.reward(kit, "a", "b")
        store.close_session("s")
        assert claim(kit, epoch, current_version=10, max_policy_lag=5) == [["b"]]
        assert kit.states() == {"a": "stale", "b": "claimed"}

    def test_skipped_numbers_are_no_policy_lag(self, kit, store, epoch):
        turn(kit, "a", version=2)
        turn(kit, "b", parent="a", version=4)
        self.reward(kit, "a", "b")
        store.close_session("s")
        skipped = Skipped(until=10, count=6)  # 10 has the weights of 4
        assert claim(kit, epoch, current_version=11, max_policy_lag=2, skipped=skipped) == [["b"]]
        assert kit.states() == {"a": "stale", "b": "claimed"}

    def test_of_another_run_nothing_is_ready(self, kit, store, epoch):
        kit.rewarded("a", run_id="other")
        assert store.num_ready_trajectories("run", 0) == 0
        assert claim(kit, epoch) == []
        assert kit.states() == {"a": "stale"}


def test_a_store_of_the_first_schema_is_brought_up_to_date(kit, store, store_url):
    """Made before there were sessions: its rollouts are there, and new ones have sessions."""
    store.add(kit.rollout("old"))
    kit.to_first_schema()
    migrate(store_url)
    new = kit.open_again()
    assert new.get("old").answer == "Drip, drop."
    added = new.add(kit.rollout("new", session_id="s"))
    assert (added.trajectory_id, added.turn) == ("new", 0)
    assert new.versions() == []
    with new._engine.connect() as conn:
        names = {index["name"] for index in sa.inspect(conn).get_indexes(turns_table.name)}
    assert "ix_turns_trajectory" in names


def test_arrays_of_a_turn_are_its_own(kit, store):
    turn(kit, "a")
    turn(kit, "b", parent="a", prompt_token_ids=np.array([1, 2, 3, 4], np.int32))
    assert store.get("b").prompt_token_ids.tolist() == [1, 2, 3, 4]
