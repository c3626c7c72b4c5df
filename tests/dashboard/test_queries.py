"""Figures from small stores whose answers can be counted by hand."""

import math
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa

from dashboard import queries
from dashboard.metrics import PER_MINUTE
from dashboard.queries import Filters, StoreReader
from online_sao.errors import NotFoundError, StoreError
from online_sao.store import RolloutStore
from online_sao.store.models import versions
from online_sao.types import Preference, Purpose, RolloutState, StoredVerdict, WeightSpan


@pytest.fixture
def reader(small):
    found = StoreReader(small.url)
    yield found
    found.close()


def test_a_store_that_is_not_there_is_not_made(tmp_path):
    reader = StoreReader(f"sqlite:///{tmp_path}/store.sqlite")
    assert reader.is_there() is False
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreError, match="cannot be opened"):
        reader.situation()
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_made_anew_is_read_anew(small, reader):
    small.begin("cute")
    assert reader.situation().phase.style == "cute"
    small.store.close()
    path = Path(small.url.removeprefix("sqlite:///"))
    for file in path.parent.iterdir():
        file.unlink()
    assert reader.is_there() is False
    small.store = RolloutStore(small.url)
    small.begin("classical")
    assert reader.is_there() is True
    assert reader.situation().phase.style == "classical"


def test_another_schema_is_refused(small, reader, monkeypatch):
    assert reader.is_there() is True
    monkeypatch.setattr(queries, "SCHEMA_VERSION", 99)
    with pytest.raises(StoreError, match=r"has schema \d+; this dashboard reads schema 99"):
        reader.is_there()


def test_the_reader_cannot_write(small, reader):
    with reader._engine.connect() as conn, pytest.raises(sa.exc.OperationalError, match="readonly"):
        conn.exec_driver_sql("DELETE FROM counters")


def test_an_empty_store(reader):
    now = reader.situation()
    assert (now.num_rollouts, now.phase, now.reward_now, now.version) == (0, None, None, None)
    assert not len(reader.series(1, 1).marks)
    assert not len(reader.health(None))
    assert reader.distinct_share() is None
    assert not len(reader.states())
    assert not len(reader.rollouts(Filters()))
    assert not len(reader.versions())
    assert reader.events() == []
    assert reader.known() == {"reasons": [], "styles": []}


def test_the_situation_counts_from_the_last_switch(small, reader):
    epoch = small.begin("cute")
    for number in range(3):
        small.add(f"old{number}", seen="cute", reward=1.0)
    small.store.set_preference(Preference("classical", ("cute", "classical")), 3)
    small.add("a", seen="cute", reward=0.0)
    small.add("b", seen="classical", reward=1.0)
    small.add("p", seen="classical", purpose=Purpose.PRETRAINING)
    small.add("u")
    small.store.set_unscored("u", "timeout")
    small.add("w")
    small.train(epoch, 1, 0.25, **{"rollout/policy_lag_max": 2.0})
    now = reader.situation()
    assert (now.num_rollouts, now.num_scored) == (8, 2)
    assert (now.phase.style, now.phase.first_seq, now.phase.weight_version) == ("classical", 4, 3)
    assert (now.reward_at_switch, now.reward_now, now.preferred_share) == (0.5, 0.5, 0.5)
    assert (now.quality_share, now.num_graded, now.num_styled) == (1.0, 2, 2)
    assert now.settled_after is None
    assert (now.waiting_for_judge, now.waiting_for_learner) == (1, 4)
    assert now.unscored_share == pytest.approx(1 / 6)  # old0-2, a, b judged; u not; w waits
    assert (now.version, now.policy_lag, now.run, now.preset) == (1, 2.0, "run", "sao")
    assert now.warnings == []
    small.store.add_event("error", {"what": "a"})
    assert [event.data["what"] for event in reader.situation().warnings] == ["a"]


def test_a_long_phase_is_counted_up_to_a_bound(shift_url, monkeypatch):
    reader = StoreReader(shift_url)
    assert reader.situation().num_scored > 140
    monkeypatch.setattr(queries, "COUNTED", 100)
    assert reader.situation().num_scored == 100
    reader.close()


def test_when_a_preference_settled_is_counted_in_judged_answers(small, reader, monkeypatch):
    monkeypatch.setattr(queries, "RECENT", 5)
    small.begin()
    small.store.set_preference(Preference("classical", ("cute", "classical")), 0)
    for number, reward in enumerate([1.0, 0.0, 0.0, 1.0, 1.0, 1.0]):
        small.add(f"r{number}", seen="classical", reward=reward)
    small.add("u")
    assert reader.situation().settled_after is None
    small.add("v", seen="classical")
    small.add("w", seen="cute", reward=0.0)
    small.add("x", seen="cute", reward=0.0)
    assert reader.situation().settled_after == 7  # 0 1 1 1 1; that it fell again changes nothing
    monkeypatch.setattr(queries, "SETTLING", 6)
    assert reader.situation().settled_after is None


def test_a_quality_below_1_counts_as_not_well(small, reader):
    small.begin()
    for name, quality in (("a", 1.0), ("b", 0.5), ("c", 0.0), ("d", 1.0)):
        small.add(name)
        small.store.set_verdict(name, StoredVerdict(quality, 1.0, quality, detected_style="cute"))
    small.add("e")
    small.store.add_feedback("e", 1.0)  # a reward without a quality or a style
    now = reader.situation()
    assert (now.quality_share, now.num_graded, now.num_styled) == (0.5, 4, 4)
    assert now.num_scored == 5


def test_a_pause_holds_until_learning_goes_on_and_outlives_a_restart(small, reader):
    small.begin()
    assert reader.situation().paused_since is None
    small.store.add_event("pause", {"reason": "operator"})
    small.store.add_event("resume", {"from_version": 0})  # the learner was started again
    assert reader.situation().pause_reason == "operator"
    small.store.add_event("resume_learning", {})
    assert reader.situation().paused_since is None


def test_series_of_single_rollouts(small, reader):
    epoch = small.begin()
    rewards = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    for number, reward in enumerate(rewards):
        small.add(f"r{number}", seen="cute" if reward else "classical", reward=reward)
    for number in range(5):
        small.train(epoch, number + 1, value=0.2 * number)
    series = reader.series(1, 6)
    assert series.points["reward"].tolist() == rewards
    assert series.marks["reward"].tolist()[:4] == pytest.approx([math.nan] * 4, nan_ok=True)
    assert series.marks["reward"].tolist()[4:] == pytest.approx([3 / 5, 4 / 6])
    assert series.marks["quality"].tolist()[4:] == [1.0, 1.0]
    assert series.values["value"].tolist()[4] == pytest.approx((0.0 + 0.2 + 0.4 + 0.6 + 0.8) / 5)
    assert series.values["reward"].tolist()[4] == pytest.approx(3 / 5)
    shares = {row.style: row.share for row in series.shares.itertuples()}
    assert shares == pytest.approx({"cute": 4 / 6, "classical": 2 / 6})
    assert reader.series(3, 4).points["rollout"].tolist() == [3, 4]


def test_long_series_are_means_of_groups(small, reader, monkeypatch):
    epoch = small.begin()
    for number in range(9):
        style = ("cute", "classical", "none")[number % 3]
        small.add(f"r{number}", seen=style, reward=float(number % 3 == 0))
    small.store.add_feedback("r4", 0.5)  # a reward without marks
    small.train(epoch, 1, value=0.75)
    monkeypatch.setattr(queries, "POINTS", 4)
    monkeypatch.setattr(queries, "GROUPS", 3)
    series = reader.series(1, 9)
    assert series.width == 3
    assert not len(series.points)
    assert series.marks["rollout"].tolist() == [2, 5, 8]
    assert series.marks["reward"].tolist() == pytest.approx([1 / 3, 1.5 / 3, 1 / 3])
    assert series.marks["quality"].tolist() == pytest.approx([1, 1, 1])
    assert series.marks["style_match"].tolist() == pytest.approx([1 / 3, 1 / 2, 1 / 3])
    assert series.values["rollout"].tolist() == [2]
    assert series.values["value"].tolist() == [0.75]
    assert series.values["reward"].tolist() == [1.0]
    table = series.shares.pivot(index="rollout", columns="style", values="share")
    assert table["cute"].tolist() == pytest.approx([1 / 3, 1 / 2, 1 / 3])
    assert table["classical"].tolist() == pytest.approx([1 / 3, 0, 1 / 3])
    assert table.sum(axis=1).tolist() == pytest.approx([1, 1, 1])


@pytest.mark.parametrize(("points", "sampled"), [(2000, 400), (4, 400), (4, 3)])
def test_no_group_of_shares_straddles_a_switch(small, reader, monkeypatch, points, sampled):
    monkeypatch.setattr(queries, "POINTS", points)
    monkeypatch.setattr(queries, "GROUPS", 3)
    monkeypatch.setattr(queries, "SAMPLED", sampled)
    small.begin("cute")
    for number in range(13):
        small.add(f"c{number}", seen="cute")
    small.store.set_preference(Preference("classical", ("cute", "classical")), 0)
    for number in range(14):
        small.add(f"k{number}", seen="classical")
    series = reader.series(3, 27)
    width = 10 if points == 2000 else 9
    assert series.width == width
    seen = series.shares[series.shares["answers"] > 0]
    assert seen[["start", "end", "style"]].to_numpy().tolist() == [
        [3, 2 + width, "cute"],
        [3 + width, 13, "cute"],
        [14, 13 + width, "classical"],
        [14 + width, 27, "classical"],  # the newest, which is not full yet
    ]
    assert seen["share"].tolist() == [1.0] * 4
    if sampled == 400:
        assert seen["answers"].tolist() == [width, 11 - width, width, 14 - width]
    else:
        assert seen["answers"].tolist() == [3, 2, 3, 3]
    if points == 4:
        assert series.marks["rollout"].tolist() == seen["rollout"].tolist()


def test_a_preference_without_an_answer_makes_no_group(small, reader):
    small.begin("cute")
    small.add("a", seen="cute")
    for style in ("classical", "cute"):
        small.store.set_preference(Preference(style, ("cute", "classical")), 0)
    small.add("b", seen="cute")
    small.store.set_preference(Preference("classical", ("cute", "classical")), 0)
    assert reader.series(1, 2).shares[["start", "end"]].to_numpy().tolist() == [[1, 1], [2, 2]]


def test_both_forms_of_a_series_agree(shift_url, monkeypatch):
    reader = StoreReader(shift_url)
    single = reader.series(1, 450)
    monkeypatch.setattr(queries, "POINTS", 10)
    grouped = reader.series(1, 450)
    answers = single.shares.groupby("style")["answers"].sum().to_dict()
    assert grouped.shares.groupby("style")["answers"].sum().to_dict() == answers
    total = (grouped.marks["reward"] * grouped.marks["answers"]).sum()
    assert total == pytest.approx(single.points["reward"].sum())
    reader.close()


def test_a_sample_of_a_long_series_stands_for_it(shift_url, monkeypatch):
    reader = StoreReader(shift_url)
    monkeypatch.setattr(queries, "POINTS", 10)
    monkeypatch.setattr(queries, "GROUPS", 3)
    whole = reader.series(1, 450)
    monkeypatch.setattr(queries, "SAMPLED", 80)
    sample = reader.series(1, 450)
    reader.close()
    assert (whole.sampled, sample.sampled, sample.width) == (None, 80, 150)
    assert whole.marks["answers"].sum() > 430
    assert sample.marks["answers"].between(70, 80).all()
    assert sample.marks["rollout"].tolist() == whole.marks["rollout"].tolist()
    assert (sample.marks["reward"] - whole.marks["reward"]).abs().max() < 0.1


def test_health_is_thinned_evenly_and_ends_with_the_newest(small, reader, monkeypatch):
    epoch = small.begin()
    for number in range(1, 12):
        small.add(f"r{number}", seen="cute")
        small.train(epoch, number, 0.5, **{"policy/entropy": number / 10, "critic/loss": None})
    table = reader.health(None)
    assert table.index.tolist() == list(range(1, 12))
    assert table["policy/entropy"].tolist()[:2] == [0.1, 0.2]
    assert table["critic/loss"].isna().all()
    assert reader.health(3).index.tolist() == [9, 10, 11]
    monkeypatch.setattr(queries, "VERSIONS_SHOWN", 4)
    assert reader.health(None).index.tolist() == [2, 5, 8, 11]
    assert reader.run_config()["learner"]["max_policy_lag"] == 4


def test_updates_per_minute_come_from_the_times_between_them(small, reader, monkeypatch):
    epoch = small.begin()
    for number in range(1, 6):
        small.add(f"r{number}", seen="cute")
        small.train(epoch, number, 0.5)
    with sa.create_engine(small.url).begin() as conn:
        for number in range(1, 6):  # two seconds apart, then ten
            second = 2 * number if number < 5 else 18
            at = datetime(2026, 1, 1, 12, 0, second, tzinfo=UTC)
            conn.execute(
                versions.update().where(versions.c.version == number).values(created_at=at)
            )
    rate = reader.health(None)[PER_MINUTE].tolist()
    assert math.isnan(rate[0])
    assert rate[1:] == [30.0, 30.0, 30.0, 6.0]
    monkeypatch.setattr(queries, "VERSIONS_SHOWN", 3)  # versions 1, 3, 5
    assert reader.health(None)[PER_MINUTE].tolist()[1:] == [30.0, 10.0]


def test_states_and_reasons(small, reader):
    small.begin()
    small.add("a", seen="cute")
    small.add("b", state=RolloutState.EXCLUDED, reason="top_p")
    small.add("c", state=RolloutState.EXCLUDED, reason="top_k")
    small.add("d", state=RolloutState.EXCLUDED, reason="top_p")
    small.add("e")
    assert reader.states().to_numpy().tolist() == [
        ["pending", "", 1],
        ["rewarded", "", 1],
        ["excluded", "top_k", 1],
        ["excluded", "top_p", 2],
    ]


def test_every_filter(small, reader):
    epoch = small.begin("cute")
    small.add("a", seen="cute", session_id="s1")
    small.add("b", seen="classical", reward=0.0, answer="100% off_topic")
    small.add("c", state=RolloutState.EXCLUDED, reason="top_p", answer="Grün wie Gras")
    small.store.set_preference(Preference("classical", ("classical",)), 0)
    small.add("d", seen="none", reward=0.0)
    small.store.add_feedback("d", 0.5)
    small.train(epoch, 1, 0.5)

    def ids(**filters):
        return "".join(reader.rollouts(Filters(**filters))["id"])

    assert ids() == "dcba"
    assert ids(state="trained") == "a"
    assert ids(reason="top_p") == "c"
    assert ids(detected_style="classical") == "b"
    assert ids(preferred_style="cute") == "cba"
    assert ids(reward="1") == "a"
    assert ids(reward="0") == "b"
    assert ids(reward="between") == "d"
    assert ids(reward="none") == "c"
    assert ids(version=1) == "a"
    assert ids(version=0) == "dcba"
    assert ids(session="s1") == "a"
    assert ids(text="answer") == "da"
    assert ids(text="question b") == "b"
    assert ids(text="grün") == "c"
    assert ids(text="100% off_") == "b"
    assert ids(text="1__%") == ""
    assert "".join(reader.rollouts(Filters(), before_seq=4, limit=2)["id"]) == "cb"


def test_text_search_is_bounded(small, reader, monkeypatch):
    small.begin()
    for name in "abcd":
        small.add(name)
    monkeypatch.setattr(queries, "SEARCHED", 2)
    assert "".join(reader.rollouts(Filters(text="answer"))["id"]) == "dc"


def test_one_rollout_with_its_feedback(small, reader):
    epoch = small.begin()
    small.add("a", seen="cute")
    small.train(epoch, 1, 0.25)
    small.store.add_feedback("a", 0.0, "no")
    rollout = reader.rollout(1)
    assert rollout.importance_ratios.tolist() == pytest.approx([1.0, 0.7, 6.0])
    assert rollout.trained_version == 1
    kept = reader.feedback(1)
    assert kept[["source", "reward", "comment", "used"]].to_numpy().tolist() == [
        ["feedback", 0.0, "no", False]
    ]
    with pytest.raises(NotFoundError, match="no rollout 9"):
        reader.rollout(9)


def test_versions_and_their_answers(small, reader):
    epoch = small.begin()
    small.add("a", seen="cute")
    small.train(epoch, 1, 0.5, **{"rollout/reward": 1.0, "policy/loss": 0.25})
    small.store.set_checkpoint(1, "/somewhere")
    small.store.pin(1)
    small.add("b", seen="cute", weight_spans=small.store.get("a").weight_spans)
    spans = (type(small.store.get("a").weight_spans[0])(1, 0, 3),)
    small.add("c", seen="classical", reward=0.0, weight_spans=spans)
    table = reader.versions()
    assert table["version"].tolist() == [1, 0]
    assert table["checkpoint"].tolist() == [True, False]
    assert table["pinned"].tolist() == [True, False]
    assert table["reward"].tolist()[0] == 1.0
    assert [(k.version, k.pinned) for k in reader.kept_versions()] == [(1, True)]
    assert reader.version_metrics(1)["policy/loss"] == 0.25
    answers = reader.answers_of(1)
    assert answers[["rollout", "style", "reward"]].to_numpy().tolist() == [[3, "classical", 0.0]]
    for ask in (reader.version_metrics, reader.answers_of):
        with pytest.raises(NotFoundError, match="no weight version 5"):
            ask(5)


def test_distinct_share(small, reader):
    for name in "abcd":
        small.add(name, answer="same" if name in "abc" else "other")
    assert reader.distinct_share() == 0.5
    assert reader.distinct_share(last=2) == 1.0


def test_the_newest_updates_are_averaged_on_the_line_that_serves(small, reader):
    epoch = small.begin()
    for number in range(3):
        small.add(f"r{number}", seen="cute")
    small.train(epoch, 1, 0.5, **{"policy/entropy": 0.2, "not/explained": 1.0})
    small.train(epoch, 2, 0.5, **{"policy/entropy": 0.4, "policy/kl_to_start": None})
    now = reader.situation()
    assert now.num_updates == 2
    assert now.recent["policy/entropy"] == pytest.approx(0.3)
    assert "policy/kl_to_start" not in now.recent
    assert "not/explained" not in now.recent
    assert now.config["learner"]["max_policy_lag"] == 4


def test_held_out_rounds_come_from_their_events(small, reader):
    small.begin()
    assert not len(reader.probes())
    for version, quality in ((0, 1.0), (100, 0.5)):
        small.store.add_event(
            "probe", {"version": version, "quality": quality, "reward": 0.25, "num_answers": 8}
        )
    assert reader.probes().to_numpy().tolist() == [[0, 1.0, 0.25, 8], [100, 0.5, 0.25, 8]]
    assert reader.probes(limit=1)["version"].tolist() == [100]


def test_answers_for_pretraining_do_not_begin_the_charts(small, reader):
    small.begin()
    small.add("p", seen="cute", purpose=Purpose.PRETRAINING)
    assert reader.situation().num_rollouts == 0  # none to a client
    small.add("a", seen="cute")
    now = reader.situation()
    assert (now.first_rollout, now.num_rollouts) == (2, 2)


def ask(small, name, question, version, **fields):
    messages = [{"role": "system", "content": name}, {"role": "user", "content": question}]
    small.add(name, messages=messages, weight_spans=(WeightSpan(version, 0, 3),), **fields)


def test_two_versions_answer_the_same_question(small, reader):
    epoch = small.begin()
    ask(small, "old tea", "Tea?", 0, seen="cute", reward=0.0)
    ask(small, "old rain", "Rain?", 0)
    small.train(epoch, 1, 0.5)
    ask(small, "new tea", "Tea?", 1, seen="classical")
    ask(small, "other", "Snow?", 1)
    same = reader.same_prompts(0, 1)
    assert (same.questions, same.held_out) == (1, False)
    (row,) = same.answers.to_dict("records")
    assert (row["question"], row["answer_one"], row["answer_two"]) == (
        "Tea?",
        "Answer old tea.",
        "Answer new tea.",
    )
    assert (row["version_one"], row["version_two"]) == (0, 1)
    assert (row["style_one"], row["reward_one"]) == ("cute", 0.0)
    assert reader.same_prompts(1, 1).questions == 0
    with pytest.raises(NotFoundError, match="There is no weight version 7"):
        reader.same_prompts(0, 7)


def test_of_several_answers_the_nearest_versions_count(small, reader):
    epoch = small.begin()
    ask(small, "at 0", "Tea?", 0, seen="cute")
    small.train(epoch, 1, 0.5)
    ask(small, "at 1", "Tea?", 1, seen="cute")
    small.train(epoch, 2, 0.5)
    ask(small, "at 2", "Tea?", 2, seen="cute")
    (row,) = reader.same_prompts(1, 2).answers.to_dict("records")
    assert (row["answer_one"], row["answer_two"]) == ("Answer at 1.", "Answer at 2.")


def test_held_out_answers_go_before_those_to_clients(small, reader):
    epoch = small.begin()
    ask(small, "client 0", "Tea?", 0, seen="cute")
    ask(small, "probe 0", "Snow?", 0, seen="cute")
    small.train(epoch, 1, 0.5)
    ask(small, "client 1", "Tea?", 1)
    ask(small, "probe 1", "Snow?", 1)
    with sa.create_engine(small.url).begin() as conn:
        conn.exec_driver_sql("UPDATE rollouts SET purpose = 'probe' WHERE id LIKE 'probe%'")
    same = reader.same_prompts(0, 1)
    assert same.held_out is True
    assert same.answers["question"].tolist() == ["Snow?"]
