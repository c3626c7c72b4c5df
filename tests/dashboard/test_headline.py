from dataclasses import replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from dashboard.headline import (
    advice,
    ago,
    checked,
    checks,
    clock,
    duration,
    headline,
    learning_word,
    progress,
    sample,
    style_name,
    tone,
)
from dashboard.queries import Phase, Situation
from online_sao.types import Event

NOW = datetime.now(UTC)
SWITCH = NOW.replace(hour=12, minute=2, second=0, microsecond=0)
PHASE = Phase("chuunibyou", ("cute", "chuunibyou"), None, 3, SWITCH, 40, 101)
ADAPTING = Situation(
    num_rollouts=146,
    phase=PHASE,
    num_scored=46,
    reward_at_switch=0.12,
    reward_now=0.78,
    policy_lag=2.0,
    version=140,
    last_answer_at=NOW,
    updates_per_minute=20.0,
)
WARNING = Event(9, "error", {"what": "The disk is full."}, NOW)


def test_adapting_in_one_sentence():
    assert headline(ADAPTING, UTC) == (
        "Adapting to Chuunibyou since 12:02: reward 0.12 → 0.78 in 46 answers; "
        "no warning since the switch."
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_rollouts": 0}, "No answer has been recorded yet. Chuunibyou is preferred. Send"),
        ({"num_rollouts": 0, "phase": None}, "No answer has been recorded yet. Send a first"),
        ({"phase": None}, "146 answers are recorded, but no style is preferred yet."),
        ({"num_scored": 0}, "Chuunibyou is preferred since 12:02; no answer has been judged"),
        (
            {"reward_now": 0.8},
            "Settled on Chuunibyou: reward 0.80 over the last 40 of 46 answers since 12:02; no",
        ),
        (
            {"reward_now": 0.8, "settled_after": 43},
            "Settled on Chuunibyou after 43 answers: reward 0.80 over the last 40 of 46 answers",
        ),
        (
            {"reward_at_switch": 0.0, "reward_now": 0.0, "num_scored": 6},
            "since 12:02: no reward yet in 6 answers; a switch usually takes some dozens; no",
        ),
        (
            {"reward_at_switch": 0.0, "reward_now": 0.0, "num_scored": 90},
            "hardly any reward (0.00) in the last 40 of 90 answers; a switch usually takes",
        ),
        (
            {"reward_at_switch": 0.0, "reward_now": 0.0, "num_scored": 150},
            "hardly any reward (0.00) in the last 40 of 150 answers; no warning",
        ),
        (
            {"reward_at_switch": 0.5, "reward_now": 0.5, "num_scored": 6},
            "reward 0.50 in 6 answers, too few to see where it goes",
        ),
        ({"reward_now": 0.2}, "reward 0.12 → 0.20 in 46 answers, no clear rise yet"),
        ({"reward_now": 0.9, "num_scored": 39}, "Adapting to Chuunibyou"),
        ({"warnings": [WARNING]}, "in 46 answers; 1 warning since the switch."),
        ({"warnings": [WARNING] * 3}, "; 3 warnings since the switch."),
        (
            {"paused_since": SWITCH + timedelta(minutes=5), "pause_reason": "operator"},
            "Learning is paused since 12:07 (operator): version 140 goes on answering",
        ),
    ],
)
def test_each_situation_has_its_sentence(change, said):
    assert said in headline(replace(ADAPTING, **change), UTC)


@pytest.mark.parametrize(
    ("rewards", "num_scored", "how", "colour"),
    [
        ((None, None), 0, "unknown", "info"),
        ((0.0, 0.0), 6, "early", "info"),
        ((0.9, 0.9), 20, "early", "info"),  # the same answers: nothing can have risen
        ((0.0, 0.0), 46, "flat", "info"),
        ((0.5, 0.59), 46, "flat", "info"),
        ((0.5, 0.61), 46, "rising", "success"),
        ((0.0, 0.29), 149, "rising", "success"),
        ((0.0, 0.29), 150, "stuck", "warning"),
        ((0.9, 0.8), 40, "settled", "success"),
    ],
)
def test_only_answers_that_are_good_or_get_better_are_good_news(rewards, num_scored, how, colour):
    at_switch, reward = rewards
    now = replace(ADAPTING, reward_at_switch=at_switch, reward_now=reward, num_scored=num_scored)
    assert progress(now) == how
    assert tone(now, advice(now, service_answers=True, at=NOW)) == colour


def test_good_answers_do_not_hide_what_is_wrong():
    assert tone(replace(ADAPTING, reward_now=0.9), ["The service does not answer."]) == "warning"


@pytest.mark.parametrize(
    ("change", "service", "said"),
    [
        ({}, False, "The service does not answer"),
        ({"unscored_share": 0.4}, True, "The judge failed on 40% of the last answers"),
        ({"paused_since": SWITCH}, True, "Resume it under Controls"),
        ({"num_scored": 150, "reward_now": 0.29}, True, "After 150 answers the reward is still"),
        (
            {
                "waiting_for_learner": 7,
                "updates_per_minute": None,
                "last_answer_at": NOW - timedelta(seconds=121),
            },
            True,
            "7 answers wait for the learner, but no update was made for 2 minutes",
        ),
        ({"warnings": [WARNING]}, True, "Last warning: The disk is full."),
        ({"last_answer_at": NOW - timedelta(minutes=12)}, True, "recorded 12 minutes ago"),
    ],
)
def test_each_trouble_has_its_advice(change, service, said):
    (one,) = advice(replace(ADAPTING, **change), service_answers=service, at=NOW)
    assert said in one


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"unscored_share": 0.2},
        {"num_scored": 149, "reward_now": 0.0},
        {"num_scored": 150, "reward_now": 0.3},
        {"waiting_for_learner": 7, "updates_per_minute": None},
    ],
)
def test_no_advice_where_nothing_is_wrong(change):
    assert advice(replace(ADAPTING, **change), service_answers=True, at=NOW) == []


WELL = {"policy/entropy": 0.3, "policy/masked_fraction": 0.01, "rollout/policy_lag_max": 2.0}
HEALTHY = replace(ADAPTING, num_updates=20, recent=WELL, config={"learner": {"max_policy_lag": 16}})


def test_figures_are_held_against_their_bounds():
    found = {c.title: (c.mean, str(c.bound), c.well) for c in checks(HEALTHY) if not c.why_not}
    assert found == {
        "Entropy": (0.3, "at least 0.02", True),
        "Masked fraction": (0.01, "at most 0.25", True),
        "Delay (policy lag)": (2.0, "at most 16", True),
    }


def test_what_is_not_checked_is_named_with_the_reason():
    missing = {c.title: c.why_not for c in checks(HEALTHY) if c.well is None}
    assert set(missing) == {
        "Explained variance",
        "KL to the start policy",
        "Answer length",
        "Train/rollout log-prob gap",
    }
    assert missing["Explained variance"] == (
        "not measured: all rewards were alike, or there is no critic"
    )
    assert checked(HEALTHY) == "3 of 3 figures inside their bounds, 4 not measured"


@pytest.mark.parametrize("num_updates", [7, 12, 19])  # at first, or after a rollback
def test_before_enough_updates_there_is_no_verdict_on_any_figure(num_updates):
    now = replace(HEALTHY, num_updates=num_updates, recent={**WELL, "policy/entropy": 0.001})
    assert {c.well for c in checks(now)} == {None}
    assert {c.why_not for c in checks(now)} == {f"too early: {num_updates} of 20 updates"}
    assert checked(now) == (
        f"too early to say, {num_updates} of the 20 updates that a verdict takes"
    )
    assert learning_word(now, service_answers=True, at=NOW) == "too early to say"
    assert advice(now, service_answers=True, at=NOW) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, "healthy"),
        ({"num_updates": 0}, "not begun"),
        ({"num_updates": 19}, "too early to say"),
        ({"recent": {}}, "too early to say"),
        ({"paused_since": SWITCH}, "paused"),
        ({"warnings": [WARNING]}, "needs a look"),
        ({"recent": {**WELL, "policy/entropy": 0.019}}, "needs a look"),
        ({"recent": {**WELL, "policy/masked_fraction": 0.26}}, "needs a look"),
        ({"recent": {**WELL, "rollout/policy_lag_max": 17.0}}, "needs a look"),
        ({"num_scored": 150, "reward_now": 0.29}, "healthy"),  # the answers are not: said on top
        ({"unscored_share": 0.4}, "needs a look"),
    ],
)
def test_one_word_says_whether_the_machinery_is_healthy(change, word):
    now = replace(HEALTHY, **change)
    assert learning_word(now, service_answers=True, at=NOW) == word
    assert learning_word(now, service_answers=False, at=NOW) == "stopped"


def test_a_figure_beyond_its_bound_says_what_to_do():
    now = replace(HEALTHY, recent={**WELL, "policy/entropy": 0.01})
    (said,) = advice(now, service_answers=True, at=NOW)
    assert said == (
        "Entropy is 0.01 nats per token (at least 0.02 is well). The policy says one thing only: "
        "roll back to a version from before the fall, and raise learner.kl_coef."
    )


def test_times_are_the_viewers():
    today = datetime.now(ZoneInfo("Asia/Tokyo")).replace(hour=9, minute=30)
    assert clock(today.astimezone(UTC), ZoneInfo("Asia/Tokyo")) == "09:30"
    long_ago = datetime(2024, 5, 3, 22, 30, tzinfo=UTC)
    assert clock(long_ago, ZoneInfo("Asia/Tokyo")) == "04 May 07:30"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(59.4, "59 s"), (60, "1 minute"), (7199, "1 hour"), (7200, "2 hours"), (200_000, "2 days")],
)
def test_durations(seconds, said):
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("count", "num_scored", "said"),
    [
        (0, 0, "0 answers since"),
        (1, 1, "1 answer since"),
        (6, 6, "6 answers since"),
        (40, 40, "last 40"),
        (31, 300, "31 of the last 40"),
    ],
)
def test_a_figure_says_of_how_many_answers_it_is(count, num_scored, said):
    assert sample(count, replace(ADAPTING, num_scored=num_scored)) == said


def test_how_long_ago():
    assert ago(NOW - timedelta(seconds=59), NOW) == "just now"
    assert ago(NOW - timedelta(minutes=25), NOW) == "25 minutes ago"


def test_style_names():
    assert [style_name(s) for s in ("cute", "dry_humour", "none")] == [
        "Cute",
        "Dry humour",
        "No style",
    ]
