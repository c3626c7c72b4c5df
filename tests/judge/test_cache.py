"""Verdicts are kept by content; failures are not."""

import sqlite3
from importlib.resources import files

import pytest
from standin import StandIn

from judge import Judge, JudgeError, Unscored, Verdict

CHAT = [{"role": "user", "content": "Write about tea."}]


def make(server, path, model="openai/x", **settings):
    return Judge(
        model, api_base=server.url, cache_path=path, max_retries=0, timeout_s=60, **settings
    )


async def test_a_repeated_question_is_not_paid_twice(tmp_path):
    path = tmp_path / "cache" / "verdicts.sqlite"
    other_rubric = tmp_path / "mine.toml"
    shipped = (files("judge") / "data" / "archetypes.toml").read_text()
    other_rubric.write_text(shipped.replace("Scholarly prose", "Learned prose"))
    with StandIn() as server:
        judge = make(server, path)
        one = await judge.score(CHAT, "A good styled tea.", "cute")
        two = await judge.score(CHAT, "A good styled tea.", "cute")
        assert judge.stats()["cache_hits"] == 1
        three = await make(server, path).score(CHAT, "A good styled tea.", "cute")
        assert len(server.requests) == 1
        for changed in (
            judge.score(CHAT, "A good tea.", "cute"),
            judge.score(CHAT, "A good styled tea.", "academic"),
            judge.score([], "A good styled tea.", "cute"),
            judge.score(CHAT, "A good styled tea.", "cute", ["cute", "academic"]),
            make(server, path, "openai/y").score(CHAT, "A good styled tea.", "cute"),
            make(server, path, preferences=str(other_rubric)).score(
                CHAT, "A good styled tea.", "cute"
            ),
            make(server, path, votes=3).score(CHAT, "A good styled tea.", "cute"),
        ):
            assert isinstance(await changed, Verdict)
        assert len(server.requests) == 1 + 6 + 3
    assert (one.quality, one.style) == (two.quality, two.style) == (three.quality, three.style)
    assert two.rationale == one.rationale


async def test_failures_are_asked_again(tmp_path):
    plan = lambda _answer, times: "essay" if times == 0 else "normal"  # noqa: E731
    with StandIn(plan) as server:
        judge = make(server, tmp_path / "c.sqlite")
        assert isinstance(await judge.score(CHAT, "A good tea.", "cute"), Unscored)
        assert isinstance(await judge.score(CHAT, "A good tea.", "cute"), Verdict)


async def test_a_broken_cache_is_counted_and_does_no_harm(tmp_path):
    path = tmp_path / "c.sqlite"
    with StandIn() as server:
        judge = make(server, path)
        with sqlite3.connect(path) as db:
            db.execute("DROP TABLE verdicts")
        assert isinstance(await judge.score(CHAT, "A good tea.", "cute"), Verdict)
        assert judge.stats()["cache_faults"] == 2


def test_a_file_that_is_no_database(tmp_path):
    path = tmp_path / "c.sqlite"
    path.write_text("not a database, but long enough to look like one" * 50)
    with pytest.raises(JudgeError, match="cannot be opened"):
        Judge("openai/x", cache_path=path)
