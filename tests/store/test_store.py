"""The contract of RolloutStore, the same on every backend."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import sqlalchemy as sa

from online_sao.errors import FencedError, NotFoundError, StoreError
from online_sao.store import store as store_module
from online_sao.store.models import feedback
from online_sao.types import (
    JudgeState,
    Preference,
    Purpose,
    RolloutState,
    Run,
    Skipped,
    StoredVerdict,
    WeightSpan,
    WeightVersion,
)

S = RolloutState
CUTE = Preference("cute", ("cute", "academic"), note="first")


def same(a, b) -> bool:
    """Equality of records that hold arrays."""
    for name in a.__dataclass_fields__:
        left, right = getattr(a, name), getattr(b, name)
        if isinstance(left, np.ndarray):
            if left.dtype != right.dtype or not np.array_equal(left, right, equal_nan=True):
                return False
        elif left != right:
            return False
    return True


def kept_feedback(store) -> list[tuple]:
    """What is kept beside the rollouts: source, reward, comment, and whether it counted."""
    c = feedback.c
    query = sa.select(c.source, c.reward, c.comment, c.used).order_by(c.id)
    with store._engine.connect() as conn:
        return [tuple(row) for row in conn.execute(query)]


# ---- recording and reading


def test_what_was_recorded_is_read_back_whole(kit, store):
    kit.begin()
    kept = store.set_preference(CUTE, 0)
    given = kit.rollout(
        "x",
        tokens=4,
        behavior_logprobs=np.array([-0.1, np.nan, -np.inf, -3e-7], np.float32),
        weight_spans=(WeightSpan(3, 0, 2), WeightSpan(4, 2, 4)),
        state=S.EXCLUDED,
        reason="non_finite",
        messages=[{"role": "user", "content": [{"type": "text", "text": "päus \x00 \ud800 ☂"}]}],
        answer="naïve ☂",
        session_id="s-1",
        metadata={"user": "7", "n": [1, 2.5, None]},
        latency_s=0.75,
        temperature=0.6,
    )
    added = store.add(given)
    got = store.get("x")
    assert same(added, got)
    assert same(got, replace(given, seq=1, created_at=added.created_at, run_id="run",
                             preference=kept, trajectory_id="x", turn=0))  # fmt: skip
    assert got.created_at.tzinfo is UTC
    assert abs(got.created_at - datetime.now(UTC)) < timedelta(seconds=60)
    assert (got.weight_version_start, got.weight_version_end) == (3, 4)


def test_arrays_read_back_can_be_written_to(kit, store):
    store.add(kit.rollout("x"))
    got = store.get("x")
    got.token_ids[0] = 5
    assert got.token_ids.tolist() == [5, 11, 12]
    assert store.get("x").token_ids.tolist() == [10, 11, 12]


def test_text_that_a_database_refuses_is_recorded_with_replacement_characters(kit, store):
    store.add(kit.rollout("x", answer="a\x00b\ud800c", session_id="s\x00"))
    assert store.get("x").answer == "a\ufffdb\ufffdc"
    assert store.get("x").session_id == "s\ufffd"


def test_sequence_numbers_count_from_one_without_gaps(kit, store):
    for name in "abc":
        store.add(kit.rollout(name))
    with pytest.raises(StoreError):
        store.add(kit.rollout("d", state=S.TRAINED))
    assert store.add(kit.rollout("e")).seq == 4
    assert [r.seq for r in store.list()] == [1, 2, 3, 4]


def test_the_same_id_is_recorded_once(kit, store):
    first = store.add(kit.rollout("x", answer="first"))
    again = store.add(kit.rollout("x", answer="second"))
    assert again.answer == "first"
    assert same(first, again)
    assert store.add(kit.rollout("y")).seq == 2


def test_run_and_preference_in_force_are_filled_in_unless_given(kit, store):
    assert store.add(kit.rollout("before")).run_id is None
    assert store.get("before").preference is None
    kit.begin()
    store.set_preference(CUTE, 0)
    other = Preference("classical", ("classical",), event_id=9)
    store.add(kit.rollout("filled"))
    store.add(kit.rollout("given", run_id="mine", preference=other))
    assert store.get("filled").run_id == "run"
    assert store.get("filled").preference.style == "cute"
    assert store.get("given").run_id == "mine"
    assert store.get("given").preference == other


@pytest.mark.parametrize("state", [S.CLAIMED, S.TRAINED, S.STALE, S.DISCARDED])
def test_a_new_rollout_cannot_claim_a_past(kit, store, state):
    with pytest.raises(StoreError, match=f"cannot be {state}"):
        store.add(kit.rollout("x", state=state))


def test_a_new_rollout_must_be_consistent(kit, store):
    with pytest.raises(StoreError, match="needs its verdict"):
        store.add(kit.rollout("x", state=S.REWARDED))
    with pytest.raises(StoreError, match="is rewarded, not pending"):
        store.add(kit.rollout("x", verdict=kit.good))
    with pytest.raises(StoreError, match="3 tokens but 2 behavior log-probs"):
        store.add(kit.rollout("x", behavior_logprobs=np.zeros(2, np.float32)))
    bad = replace(kit.good, reward=1.5)
    with pytest.raises(StoreError, match="from 0 to 1"):
        store.add(kit.rollout("x", state=S.REWARDED, verdict=bad))
    assert store.list() == []


def test_an_answer_may_be_recorded_with_its_verdict(kit, store):
    store.add(kit.rollout("x", state=S.REWARDED, verdict=kit.good))
    got = store.get("x")
    assert (got.state, got.judge_state, got.verdict) == (S.REWARDED, JudgeState.SCORED, kit.good)


def test_unknown_ids_are_named(kit, store):
    store.add(kit.rollout("x"))
    for ask in (
        lambda: store.get("nope"),
        lambda: store.get_many(["x", "nope"]),
        lambda: store.set_verdict("nope", kit.good),
        lambda: store.set_unscored("nope", "timeout"),
        lambda: store.add_feedback("nope", 1.0),
        lambda: store.delete_text("nope"),
    ):
        with pytest.raises(NotFoundError, match="'nope'"):
            ask()


@pytest.mark.parametrize("id", ["a\x00b", "\ud800"])
def test_an_id_that_no_database_takes_is_unknown(kit, store, id):
    for ask in (store.get, store.delete_text, lambda id: store.add_feedback(id, 1.0)):
        with pytest.raises(NotFoundError):
            ask(id)


def test_get_many_keeps_the_order_asked_for(kit, store):
    for name in "abcd":
        store.add(kit.rollout(name))
    assert [r.id for r in store.get_many(["c", "a", "d"])] == ["c", "a", "d"]
    assert store.get_many([]) == []


def test_list_filters_and_pages(kit, store):
    kit.begin()
    store.set_preference(CUTE, 0)
    kit.rewarded("a", "b")
    store.add(kit.rollout("c", session_id="s"))
    store.set_preference(Preference("classical", ("classical",)), 0)
    store.add(kit.rollout("d", purpose=Purpose.PRETRAINING))
    store.add(kit.rollout("e", state=S.EXCLUDED, reason="top_p", run_id="other"))

    def ids(**filters):
        return "".join(r.id for r in store.list(**filters))

    assert ids() == "abcde"
    assert ids(newest_first=True) == "edcba"
    assert ids(after_seq=2) == "cde"
    assert ids(before_seq=3) == "ab"
    assert ids(after_seq=1, before_seq=5, limit=2) == "bc"
    assert ids(after_seq=1, before_seq=5, limit=2, newest_first=True) == "dc"
    assert ids(states=[S.REWARDED]) == "ab"
    assert ids(states=["rewarded", "excluded"]) == "abe"
    assert ids(states=[S.EXCLUDED, S.REWARDED], newest_first=True, limit=2) == "eb"
    assert ids(states=[]) == ""
    assert ids(purpose=Purpose.PRETRAINING) == "d"
    assert ids(run_id="run") == "abcd"
    assert ids(session_id="s") == "c"
    assert ids(style="cute") == "abc"
    assert ids(style="cute", states=[S.PENDING]) == "c"


def test_a_listing_is_light_but_complete_otherwise(kit, store):
    spans = (WeightSpan(3, 0, 1), WeightSpan(5, 1, 3))
    store.add(kit.rollout("a", weight_spans=spans))
    light = store.list()[0]
    assert light.token_ids.size == light.prompt_token_ids.size == 0
    assert light.behavior_logprobs.size == 0
    assert light.weight_spans == spans
    assert same(store.list(with_tokens=True)[0], store.get("a"))


def test_more_ids_than_one_statement_may_name(kit, store):
    names = [f"r{i}" for i in range(1200)]
    for name in names:
        store.add(kit.rollout(name))
    assert [r.id for r in store.list(limit=1200)] == names
    assert [r.id for r in store.get_many(names[::-1])] == names[::-1]
    assert store.exclude(names, "test") == 1200


# ---- rewards


def test_a_verdict_rewards_a_pending_rollout(kit, store):
    store.add(kit.rollout("a"))
    assert [r.id for r in store.waiting_for_judge(10)] == ["a"]
    assert store.set_verdict("a", kit.good) == S.REWARDED
    got = store.get("a")
    assert (got.state, got.judge_state, got.verdict) == (S.REWARDED, JudgeState.SCORED, kit.good)
    assert store.waiting_for_judge(10) == []


def test_a_true_zero_is_a_reward_and_a_failed_judge_is_not(kit, store):
    for name in "zu":
        store.add(kit.rollout(name))
    store.set_verdict("z", replace(kit.good, style=0.0, reward=0.0))
    store.set_unscored("u", "timeout")
    assert (store.get("z").state, store.get("z").reward) == (S.REWARDED, 0.0)
    got = store.get("u")
    assert (got.state, got.reason, got.reward) == (S.UNSCORED, "timeout", None)
    assert got.judge_state == JudgeState.UNSCORED
    assert store.reason_counts() == {(S.UNSCORED, "timeout"): 1}


def test_waiting_for_judge_in_both_orders(kit, store):
    for name in "abc":
        store.add(kit.rollout(name))
    store.set_verdict("b", kit.good)
    store.add(kit.rollout("d", judge_state=JudgeState.SKIPPED, state=S.EXCLUDED, reason="aborted"))
    store.add(kit.rollout("e", state=S.EXCLUDED, reason="opted_out"))
    assert [r.id for r in store.waiting_for_judge(10)] == ["a", "c", "e"]
    assert [r.id for r in store.waiting_for_judge(2, newest_first=True)] == ["e", "c"]


def test_answers_to_clients_may_wait_for_feedback_and_ours_do_not(kit, store):
    """However many clients' answers wait, what comes after them is found."""
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    for minute in range(5):
        store.add(kit.rollout(f"early{minute}", created_at=noon + timedelta(minutes=minute)))
    store.add(kit.rollout("late", created_at=noon + timedelta(hours=1)))
    store.add(kit.rollout("probe", purpose=Purpose.PROBE, created_at=noon + timedelta(hours=2)))

    def waiting(limit, before):
        return [r.id for r in store.waiting_for_judge(limit, clients_before=before)]

    assert waiting(1, noon) == ["probe"]
    assert waiting(10, noon + timedelta(minutes=2)) == ["early0", "early1", "probe"]
    assert waiting(10, datetime.min.replace(tzinfo=UTC)) == ["probe"]
    assert len(store.waiting_for_judge(10)) == 7


def test_an_excluded_rollout_is_judged_but_stays_excluded(kit, store):
    store.add(kit.rollout("x", state=S.EXCLUDED, reason="opted_out"))
    assert store.set_verdict("x", kit.good) == S.EXCLUDED
    got = store.get("x")
    assert (got.state, got.reason, got.verdict) == (S.EXCLUDED, "opted_out", kit.good)


def test_a_failed_judge_leaves_an_excluded_rollout_and_its_reason(kit, store):
    store.add(kit.rollout("x", state=S.EXCLUDED, reason="opted_out"))
    store.set_unscored("x", "timeout")
    got = store.get("x")
    assert (got.state, got.reason) == (S.EXCLUDED, "opted_out")
    assert got.judge_state == JudgeState.UNSCORED
    assert store.waiting_for_judge(10) == []


def test_an_unclaimed_verdict_is_replaced(kit, store):
    kit.rewarded("x")
    store.set_verdict("x", replace(kit.good, reward=0.0, style=0.0, rationale="second look"))
    assert store.get("x").verdict.rationale == "second look"
    assert store.get("x").reward == 0.0


def test_a_late_verdict_never_changes_the_reward_used(kit, store):
    epoch = kit.begin()
    kit.rewarded("x")
    kit.claim(epoch)
    worse = replace(kit.good, reward=0.0, style=0.0)
    assert store.set_verdict("x", worse) == S.CLAIMED
    assert store.get("x").reward == 1.0
    kit.train(epoch, 1, "x")
    assert store.set_verdict("x", worse) == S.TRAINED
    assert store.get("x").verdict == kit.good


def test_a_verdict_that_can_no_longer_count_is_kept_beside_the_reward(kit, store):
    epoch = kit.begin()
    kit.rewarded("x")
    kit.claim(epoch)
    store.set_verdict("x", replace(kit.good, reward=0.25, rationale="too late"))
    assert kept_feedback(store) == [("judge", 0.25, "too late", False)]


def test_a_failed_judge_takes_no_reward_away(kit, store):
    store.add(kit.rollout("x"))
    store.add_feedback("x", 0.5)
    store.set_unscored("x", "timeout")
    assert (store.get("x").state, store.get("x").reward) == (S.REWARDED, 0.5)


def test_an_unscored_rollout_may_be_judged_again(kit, store):
    store.add(kit.rollout("x"))
    store.set_unscored("x", "rate_limited")
    assert store.set_verdict("x", kit.good) == S.REWARDED
    assert store.get("x").reason is None
    assert store.reason_counts() == {}


@pytest.mark.parametrize("start", ["pending", "unscored", "rewarded"])
def test_feedback_counts_while_no_learner_has_the_rollout(kit, store, start):
    store.add(kit.rollout("x"))
    if start == "unscored":
        store.set_unscored("x", "timeout")
    if start == "rewarded":
        store.set_verdict("x", kit.good)
    assert store.add_feedback("x", 0.25, "meh") == (True, None)
    got = store.get("x")
    assert (got.state, got.reason, got.reward) == (S.REWARDED, None, 0.25)
    assert got.verdict == StoredVerdict(None, None, 0.25, source="feedback", rationale="meh")
    assert got.judge_state == JudgeState.SCORED


def test_a_user_outranks_a_judge_that_comes_later(kit, store):
    store.add(kit.rollout("x"))
    store.add_feedback("x", 0.0, "wrong")
    assert store.set_verdict("x", kit.good) == S.REWARDED
    assert (store.get("x").reward, store.get("x").verdict.source) == (0.0, "feedback")


def test_feedback_that_comes_too_late_is_kept_and_said_so(kit, store):
    epoch = kit.begin()
    kit.rewarded("x")
    store.add(kit.rollout("o", state=S.EXCLUDED, reason="top_p"))
    kit.claim(epoch)
    assert store.add_feedback("x", 0.0)[0] is False
    kit.train(epoch, 1, "x")
    trained, reason = store.add_feedback("x", 0.0)
    assert (trained, reason) == (False, "the answer was already learned from (state trained)")
    trained, reason = store.add_feedback("o", 1.0)
    assert (trained, reason) == (False, "the answer is not trainable (excluded: top_p)")
    assert store.get("x").reward == 1.0
    assert (store.get("o").state, store.get("o").reward) == (S.EXCLUDED, None)


@pytest.mark.parametrize("reward", [-0.01, 1.01, float("nan"), float("inf")])
def test_a_reward_out_of_bounds_is_refused(kit, store, reward):
    store.add(kit.rollout("x"))
    with pytest.raises(StoreError, match="from 0 to 1"):
        store.set_verdict("x", replace(kit.good, reward=reward))
    with pytest.raises(StoreError, match="from 0 to 1"):
        store.add_feedback("x", reward)
    assert store.get("x").state == S.PENDING


# ---- claiming


def test_claims_in_both_orders_with_tokens(kit, store):
    epoch = kit.begin()
    kit.rewarded("a", "b", "c", "d")
    assert [r.id for r in kit.claim(epoch, limit=1)] == ["a"]
    assert [r.id for r in kit.claim(epoch, limit=2, order="newest")] == ["d", "c"]
    claimed = kit.claim(epoch)[0]
    assert (claimed.id, claimed.state, claimed.num_claims) == ("b", S.CLAIMED, 1)
    assert claimed.token_ids.tolist() == [10, 11, 12]
    assert claimed.reward == 1.0
    assert kit.claim(epoch) == []


def test_only_rewarded_answers_to_clients_are_claimed(kit, store):
    epoch = kit.begin()
    kit.rewarded("p", purpose=Purpose.PRETRAINING)
    store.add(kit.rollout("a"))
    store.add(kit.rollout("u"))
    store.set_unscored("u", "timeout")
    store.add(kit.rollout("x", state=S.EXCLUDED, reason="opted_out"))
    store.set_verdict("x", kit.good)
    assert kit.claim(epoch) == []
    assert kit.states() == {"p": "rewarded", "a": "pending", "u": "unscored", "x": "excluded"}


def test_lag_bound_is_inclusive(kit, store):
    epoch = kit.begin()
    kit.rewarded("old", version=3)
    kit.rewarded("fresh", version=4)
    claimed = kit.claim(epoch, current_version=6, max_policy_lag=2)
    assert [r.id for r in claimed] == ["fresh"]
    assert (store.get("old").state, store.get("old").reason) == (S.STALE, "policy_lag")


def test_lag_is_counted_from_the_oldest_token(kit, store):
    epoch = kit.begin()
    kit.rewarded("x", weight_spans=(WeightSpan(1, 0, 1), WeightSpan(6, 1, 3)))
    assert kit.claim(epoch, current_version=6, max_policy_lag=4) == []
    assert store.get("x").reason == "policy_lag"


def test_a_rollout_that_learners_die_over_is_set_aside(kit, store):
    kit.begin()
    kit.rewarded("poison", "fine")
    for _ in range(2):
        epoch = store.new_epoch()
        store.recover(epoch)
        assert [r.id for r in kit.claim(epoch, limit=1, max_claims=2)] == ["poison"]
    epoch = store.new_epoch()
    assert store.recover(epoch) == 1
    assert [r.id for r in kit.claim(epoch, max_claims=2)] == ["fine"]
    assert (store.get("poison").state, store.get("poison").reason) == (S.EXCLUDED, "poison")


def test_rollouts_of_another_run_are_not_learned_from(kit, store):
    epoch = kit.begin()
    kit.rewarded("mine")
    kit.rewarded("theirs", run_id="old")
    assert [r.id for r in kit.claim(epoch)] == ["mine"]
    assert (store.get("theirs").state, store.get("theirs").reason) == (S.STALE, "other_run")


def test_a_clean_stop_gives_claims_back_uncounted(kit, store):
    epoch = kit.begin()
    kit.rewarded("a", "b")
    kit.claim(epoch, limit=1)
    assert store.release(epoch + 1) == 0
    assert kit.states() == {"a": "claimed", "b": "rewarded"}
    assert store.release(epoch) == 1
    assert store.release(epoch) == 0
    assert kit.states() == {"a": "rewarded", "b": "rewarded"}
    assert store.get("a").num_claims == 0


def test_an_older_learner_is_fenced_off(kit, store):
    old = kit.begin()
    kit.rewarded("a", "b")
    kit.claim(old, limit=1)
    new = store.new_epoch()
    assert new > old
    assert store.current_epoch() == new
    with pytest.raises(FencedError, match=f"epoch {old} was replaced by epoch {new}"):
        kit.claim(old)
    with pytest.raises(FencedError):
        store.recover(old)
    with pytest.raises(FencedError):
        kit.train(old, 1, "a")
    assert store.next_version() == 1
    assert kit.states() == {"a": "claimed", "b": "rewarded"}
    assert store.recover(new) == 1
    assert {r.id for r in kit.claim(new)} == {"a", "b"}


def test_an_epoch_nobody_was_given_is_refused(kit, store):
    kit.begin()
    with pytest.raises(StoreError, match="never given out"):
        kit.claim(99)


def test_epochs_rise_across_restarts(kit, store):
    first = store.new_epoch()
    assert kit.open_again().new_epoch() == first + 1


# ---- updates


def test_an_update_records_version_and_rollouts_together(kit, store):
    epoch = kit.begin()
    kit.rewarded("a", "b")
    kit.claim(epoch)
    store.finish_update(
        epoch=epoch,
        version=WeightVersion(1, 0, "run", "update", {"policy/loss": np.float32(0.5)}),
        rollouts=[
            ("a", np.array([0.25, 1, 2], np.float32), np.ones(3, np.float32), None),
            ("b", None, None, None),
        ],
    )
    a, b = store.get_many(["a", "b"])
    assert (a.state, a.trained_version, b.state, b.trained_version) == (S.TRAINED, 1, S.TRAINED, 1)
    assert a.values.tolist() == [0.25, 1, 2]
    assert a.advantages.tolist() == [1, 1, 1]
    assert a.importance_ratios is None
    assert b.values is None
    version = store.get_version(1)
    assert (version.parent, version.kind, version.metrics) == (0, "update", {"policy/loss": 0.5})
    assert version.created_at.tzinfo is UTC
    assert version.published_at is None


def test_an_update_is_recorded_whole_or_not_at_all(kit, store):
    epoch = kit.begin()
    kit.rewarded("a", "b")
    kit.claim(epoch, limit=1)
    with pytest.raises(StoreError, match="Rollout b is not claimed"):
        kit.train(epoch, 1, "a", "b")
    assert kit.states() == {"a": "claimed", "b": "rewarded"}
    assert store.get("a").values is None
    assert store.next_version() == 1
    with pytest.raises(NotFoundError):
        kit.train(epoch, 1, "a", "nope")
    assert store.next_version() == 1


def test_no_rollout_is_trained_on_twice(kit, store):
    epoch = kit.begin()
    kit.rewarded("a")
    kit.claim(epoch)
    kit.train(epoch, 1, "a")
    with pytest.raises(StoreError, match="not claimed"):
        kit.train(epoch, 2, "a")
    assert store.get("a").trained_version == 1
    assert kit.claim(epoch) == []


def test_version_numbers_are_never_used_twice(kit, store):
    epoch = kit.begin()
    kit.rewarded("a")
    kit.claim(epoch)
    with pytest.raises(StoreError, match="Weight version 0 exists"):
        kit.train(epoch, 0, "a")
    assert store.get("a").state == S.CLAIMED
    with pytest.raises(StoreError, match="Weight version 0 exists"):
        store.add_version(WeightVersion(0, None, "run", "start"))


def test_a_claim_of_an_earlier_epoch_cannot_be_finished_by_the_next(kit, store):
    old = kit.begin()
    kit.rewarded("a")
    kit.claim(old)
    new = store.new_epoch()
    with pytest.raises(StoreError, match="not claimed"):
        kit.train(new, 1, "a")


def test_metrics_that_are_not_finite_read_back_as_undefined(kit, store):
    metrics = {"a": float("nan"), "b": -np.inf, "c": np.float32(1.5), "d": [1, np.nan], "e": None}
    store.add_version(WeightVersion(0, None, "run", "start", metrics))
    assert store.get_version(0).metrics == {"a": None, "b": None, "c": 1.5, "d": [1, None],
                                            "e": None}  # fmt: skip


def test_exclude_and_discard_take_only_what_they_may(kit, store):
    epoch = kit.begin()
    kit.rewarded("trained")
    kit.claim(epoch)
    kit.train(epoch, 1, "trained")
    kit.rewarded("claimed")
    kit.claim(epoch, current_version=1)
    kit.rewarded("rewarded", "gone")
    store.add(kit.rollout("pending"))
    store.add(kit.rollout("unscored"))
    store.set_unscored("unscored", "timeout")
    everything = ["trained", "claimed", "rewarded", "gone", "pending", "unscored"]
    assert store.discard(["gone", "gone"], "operator") == 1
    assert store.exclude(everything, "non_finite") == 4
    assert kit.states() == {
        "trained": "trained",
        "claimed": "excluded",
        "rewarded": "excluded",
        "gone": "discarded",
        "pending": "excluded",
        "unscored": "excluded",
    }
    assert store.discard(everything, "operator") == 1
    assert kit.states()["trained"] == "discarded"
    assert store.reason_counts() == {(S.EXCLUDED, "non_finite"): 4, (S.DISCARDED, "operator"): 2}


# ---- versions


def test_version_numbers_start_at_zero_and_follow_the_highest(kit, store):
    assert store.next_version() == 0
    assert store.latest_version() is None
    store.add_version(WeightVersion(0, None, "run", "start"))
    store.add_version(WeightVersion(7, 0, "other", "update"))
    assert store.next_version() == 8
    assert store.latest_version().version == 7
    assert [v.version for v in store.versions()] == [7, 0]
    assert [v.version for v in store.versions(limit=1)] == [7]
    assert [v.version for v in store.versions(run_id="run")] == [0]


def test_versions_are_published_kept_and_pinned(kit, store):
    store.add_version(WeightVersion(0, None, "run", "start"))
    store.set_published(0)
    first = store.get_version(0).published_at
    store.set_published(0)
    assert store.get_version(0).published_at == first
    assert abs(first - datetime.now(UTC)) < timedelta(seconds=60)
    assert not store.pin(0)  # no checkpoint to keep
    assert not store.get_version(0).pinned
    store.set_checkpoint(0, "/checkpoints/0")
    assert store.pin(0)
    assert (store.get_version(0).checkpoint, store.get_version(0).pinned) == (
        "/checkpoints/0",
        True,
    )
    assert not store.release_checkpoint(0)
    assert store.get_version(0).checkpoint == "/checkpoints/0"
    store.unpin(0)
    assert store.release_checkpoint(0)
    assert (store.get_version(0).checkpoint, store.get_version(0).pinned) == (None, False)
    assert not store.pin(0)  # it was deleted
    for ask in (store.get_version, store.set_published, store.unpin):
        with pytest.raises(NotFoundError, match="no weight version 5"):
            ask(5)
    with pytest.raises(NotFoundError):
        store.set_checkpoint(5, "/checkpoints/5")
    store.set_checkpoint(0, "/checkpoints/0")
    store.pin(0)
    store.set_checkpoint(0, None)  # pinned or not, it is gone
    assert store.get_version(0).checkpoint is None
    assert not store.pin(5)
    assert store.release_checkpoint(5)  # nothing of ours speaks for it


def test_rewind_returns_rollouts_whose_update_was_lost(kit, store):
    epoch = kit.begin()
    kit.rewarded("a", "b", "c")
    for version, name in enumerate("abc", start=1):
        kit.claim(epoch, limit=1)
        kit.train(epoch, version, name)
    assert store.rewind(1, "other-run") == []
    assert store.rewind(1, "run") == [["b"], ["c"]]
    assert kit.states() == {"a": "trained", "b": "rewarded", "c": "rewarded"}
    b = store.get("b")
    assert (b.trained_version, b.values, b.num_claims, b.reward) == (None, None, 0, 1.0)
    assert store.next_version() == 4  # the lost numbers stay used
    assert [r.id for r in kit.claim(epoch, current_version=99, ids=["c"])] == ["c"]  # however old
    assert [r.id for r in kit.claim(epoch, current_version=4)] == ["b"]
    kit.train(epoch, 4, "b", "c")


def test_skipped_numbers_are_no_policy_lag(kit, store):
    epoch = kit.begin()
    for version in (2, 3, 4, 9, 10):
        kit.rewarded(f"by{version}", version=version)
    skipped = Skipped(until=10, count=6)  # 10 has the weights of 4
    assert [skipped.lag(v, 11) for v in (2, 3, 4, 9, 10)] == [3, 2, 1, 0, 1]
    claimed = kit.claim(epoch, current_version=11, max_policy_lag=2, skipped=skipped)
    assert [r.id for r in claimed] == ["by3", "by4", "by9", "by10"]
    assert store.get("by2").reason == "policy_lag"


def test_rollback_leaves_the_line_and_all_that_was_made_on_it(kit, store):
    epoch = kit.begin()
    kit.rewarded("kept", "undone")
    kit.claim(epoch, limit=1)
    kit.train(epoch, 1, "kept")
    kit.claim(epoch, limit=1)
    kit.train(epoch, 2, "undone")
    kit.rewarded("by1", version=1)
    kit.rewarded("by2", version=2)
    store.add(kit.rollout("pending2", version=2))
    store.add(kit.rollout("unscored2", version=2))
    store.set_unscored("unscored2", "timeout")
    kit.rewarded("both", weight_spans=(WeightSpan(1, 0, 1), WeightSpan(2, 1, 3)))
    assert store.roll_back(1, "run", epoch) == 3
    made = store.get_version(3)
    assert (made.parent, made.run_id, made.kind) == (1, "run", "rollback")
    assert [v.version for v in store.versions() if v.abandoned] == [2]
    # answers that were on their way are recorded after the rollback
    kit.rewarded("late2", version=2)
    kit.rewarded("late_both", weight_spans=(WeightSpan(2, 0, 1), WeightSpan(3, 1, 3)))
    kit.rewarded("new", version=3)
    assert [r.id for r in kit.claim(epoch, current_version=3)] == ["by1", "new"]
    assert kit.states() == {
        "kept": "trained",
        "undone": "discarded",
        "by1": "claimed",
        "by2": "stale",
        "pending2": "stale",
        "unscored2": "stale",
        "both": "stale",
        "late2": "stale",
        "late_both": "stale",
        "new": "claimed",
    }
    assert store.reason_counts() == {(S.STALE, "rolled_back"): 6, (S.DISCARDED, "rolled_back"): 1}
    assert store.get("undone").trained_version == 2
    trained, reason = store.add_feedback("undone", 1.0)
    assert (trained, reason) == (False, "the answer is not trainable (discarded: rolled_back)")
    store.set_verdict("undone", replace(kit.good, reward=0.0))
    assert store.get("undone").reward == 1.0  # what was used stays on record


def test_rollback_leaves_other_runs_as_they_are(kit, store):
    epoch = kit.begin()  # version 0 of "run"
    store.start_run(Run("other", "sao", 1, "model", "hash"))
    store.add_version(WeightVersion(1, None, "other", "start"))
    kit.rewarded("theirs", version=1, run_id="other")
    kit.claim(epoch, run_id="other", current_version=1)
    store.finish_update(
        epoch=epoch,
        version=WeightVersion(2, 1, "other", "update"),
        rollouts=[("theirs", None, None, None)],
    )
    store.add_version(WeightVersion(3, 0, "run", "resume"))
    assert store.roll_back(0, "run", epoch) == 4
    assert kit.states() == {"theirs": "trained"}
    assert [v.version for v in store.versions() if v.abandoned] == [3]


def test_rollback_over_the_beginning_of_a_run_that_took_another_over(kit, store):
    epoch = kit.begin()
    for version in (1, 2):
        store.add_version(WeightVersion(version, version - 1, "run", "update"))
    store.start_run(Run("tuned", "sao", 0, "model", "hash"))
    store.add_version(WeightVersion(3, 2, "tuned", "resume"))
    assert store.roll_back(1, "tuned", epoch) == 4
    assert [v.version for v in store.versions() if v.abandoned] == [3, 2]


def test_a_rollback_can_be_taken_back(kit, store):
    epoch = kit.begin()
    for version in (1, 2):
        store.add_version(WeightVersion(version, version - 1, "run", "update"))
    assert store.roll_back(0, "run", epoch) == 3
    assert [v.version for v in store.versions() if v.abandoned] == [2, 1]
    assert store.roll_back(2, "run", epoch) == 4
    assert [v.version for v in store.versions() if v.abandoned] == [3]
    kit.rewarded("by2", version=2)
    assert [r.id for r in kit.claim(epoch, current_version=4)] == ["by2"]


def test_a_rollback_is_refused_whole(kit, store):
    epoch = kit.begin()
    with pytest.raises(NotFoundError, match="no weight version 7"):
        store.roll_back(7, "run", epoch)
    store.new_epoch()
    with pytest.raises(FencedError):
        store.roll_back(0, "run", epoch)
    assert store.next_version() == 1


# ---- runs, preferences, events


def test_the_run_taken_up_last_is_the_current_one(kit, store):
    assert store.current_run() is None
    first = Run("one", "sao", 3, "model", "hash", {"policy_lr": 1e-5})
    store.start_run(first)
    store.start_run(Run("two", "running_mean", 3, "model", "hash"))
    assert store.current_run().id == "two"
    store.start_run(first)
    assert [r.id for r in store.runs()] == ["two", "one"]
    got = store.current_run()
    assert replace(got, created_at=None) == first
    assert got.created_at.tzinfo is UTC


def test_the_last_preference_is_in_force_and_all_are_kept(kit, store):
    assert store.preference() is None
    first = store.set_preference(CUTE, 0)
    second = store.set_preference(Preference("chuunibyou", ("cute", "chuunibyou")), 12)
    assert store.preference() == second
    assert store.preferences() == [first, second]
    assert (second.weight_version, second.note, second.pool) == (12, None, ("cute", "chuunibyou"))
    assert second.event_id > first.event_id
    assert kit.open_again().preference() == second


def test_events_page_forwards_and_show_the_newest(kit, store):
    for number in range(5):
        store.add_event("pause" if number % 2 else "guard", {"n": number}, weight_version=number)
    assert [e.data["n"] for e in store.events()] == [0, 1, 2, 3, 4]
    assert [e.data["n"] for e in store.events(limit=2)] == [3, 4]
    assert [e.data["n"] for e in store.events(after_id=1, limit=2)] == [1, 2]
    assert [e.data["n"] for e in store.events(kind="pause")] == [1, 3]
    assert store.events()[4].weight_version == 4
    assert store.events()[0].created_at.tzinfo is UTC


def test_counts_name_every_state(kit, store):
    assert store.counts() == dict.fromkeys(S, 0)
    kit.rewarded("a", "b")
    store.add(kit.rollout("c"))
    kit.rewarded("p", purpose=Purpose.PRETRAINING)
    assert store.counts() == dict.fromkeys(S, 0) | {S.REWARDED: 3, S.PENDING: 1}
    assert store.counts(Purpose.SERVE) == dict.fromkeys(S, 0) | {S.REWARDED: 2, S.PENDING: 1}
    assert store.counts(Purpose.PRETRAINING) == dict.fromkeys(S, 0) | {S.REWARDED: 1}


# ---- privacy


def test_deleting_removes_text_and_ids_and_keeps_marks(kit, store):
    epoch = kit.begin()
    kit.rewarded("done", session_id="s", metadata={"user": "me"})
    kit.claim(epoch)
    kit.train(epoch, 1, "done")
    store.delete_text("done")
    got = store.get("done")
    assert (got.state, got.trained_version, got.reward) == (S.TRAINED, 1, 1.0)
    assert (got.messages, got.answer, got.metadata, got.session_id) == (None, "", {}, None)
    assert got.token_ids.size == got.prompt_token_ids.size == got.behavior_logprobs.size == 0
    assert (got.verdict.rationale, got.verdict.raw) == (None, None)
    assert got.verdict.detected_style == "cute"
    assert got.values is None
    store.delete_text("done")


def test_deleting_removes_comments_and_keeps_the_rewards_given(kit, store):
    store.add(kit.rollout("x"))
    store.add_feedback("x", 0.25, "my words")
    store.delete_text("x")
    assert kept_feedback(store) == [("feedback", 0.25, None, True)]


@pytest.mark.parametrize("start", ["pending", "unscored", "rewarded"])
def test_a_deleted_answer_is_never_learned_from(kit, store, start):
    epoch = kit.begin()
    store.add(kit.rollout("x"))
    if start == "unscored":
        store.set_unscored("x", "timeout")
    if start == "rewarded":
        store.set_verdict("x", kit.good)
    store.delete_text("x")
    assert (store.get("x").state, store.get("x").reason) == (S.DISCARDED, "deleted")
    assert store.waiting_for_judge(1) == []
    assert store.add_feedback("x", 1.0, "my words") == (
        False,
        "the answer is not trainable (discarded: deleted)",
    )
    store.set_verdict("x", kit.good)  # a judge that was under way
    assert store.get("x").verdict.rationale is None
    assert kit.claim(epoch) == []


def test_an_answer_deleted_in_a_learners_hands(kit, store):
    epoch = kit.begin()
    kit.rewarded("released")
    kit.claim(epoch)
    store.delete_text("released")
    store.release(epoch)
    kit.rewarded("finished", "recovered", "rewound")
    kit.claim(epoch)
    for name in ("finished", "recovered", "rewound"):
        store.delete_text(name)
        assert store.get(name).state == S.CLAIMED
    kit.train(epoch, 1, "finished")
    kit.train(epoch, 2, "rewound")
    epoch = store.new_epoch()
    store.recover(epoch)
    store.rewind(1, "run")
    assert kit.states() == {
        "finished": "trained",
        "recovered": "discarded",
        "released": "discarded",
        "rewound": "discarded",
    }
    assert kit.claim(epoch, current_version=2) == []


def test_retention_deletes_by_age(kit, store):
    now = datetime.now(UTC)
    store.add(kit.rollout("old", created_at=now - timedelta(days=31)))
    store.add(kit.rollout("new", created_at=now - timedelta(days=29)))
    assert store.delete_older_than(30) == 1
    assert (store.get("old").answer, store.get("new").answer) == ("", "Drip, drop.")
    assert store.delete_older_than(30) == 0


def test_retention_goes_on_until_all_that_is_old_is_deleted(kit, store, monkeypatch):
    monkeypatch.setattr(store_module, "CHUNK", 2)
    for name in "abcde":
        store.add(kit.rollout(name, created_at=datetime.now(UTC) - timedelta(days=31)))
    assert store.delete_older_than(30) == 5
    assert {r.answer for r in store.list()} == {""}


def test_a_time_without_a_zone_is_refused(kit, store):
    with pytest.raises(StoreError, match="time zone"):
        store.add(kit.rollout("x", created_at=datetime(2026, 1, 1)))
    assert store.list() == []


@pytest.mark.parametrize("id", ["a\x00b", "\ud800", "\x00", "'; DROP TABLE rollouts; --"])
def test_ids_that_no_database_takes_are_unknown(store, id):
    for ask in (store.get, store.delete_text, lambda id: store.add_feedback(id, 1.0)):
        with pytest.raises(NotFoundError, match="There is no rollout"):
            ask(id)
