"""Worthless answers, as the embedded judge sees them."""

import pytest

from online_sao.config import Config
from online_sao.errors import ConfigError
from online_sao.judging import (
    FORGED_PROMPT,
    FORGERIES,
    checked_judge,
    make_judge,
    to_stored,
)
from online_sao.types import StoredVerdict

POOL = ("academic", "cute", "chuunibyou", "classical")


@pytest.mark.parametrize("style", POOL)
@pytest.mark.parametrize("answer", FORGERIES)
async def test_the_embedded_judge_rewards_no_forgery(style, answer):
    judge = make_judge(Config())
    outcome = to_stored(await judge.score(FORGED_PROMPT, answer, style, POOL))
    assert isinstance(outcome, StoredVerdict)
    assert outcome.reward == 0


def test_every_setting_reaches_the_judge(tmp_path):
    chosen = {
        "model": "openai/x",
        "api_base": "http://127.0.0.1:9",
        "timeout_s": 7.0,
        "max_tokens": 77,
        "max_retries": 5,
        "concurrency": 3,
        "votes": 5,
        "flip_probability": 0.2,
    }
    judge = make_judge(Config.model_validate({"judge": chosen, "learner": {"seed": 9}}))
    made = {name: getattr(judge, name) for name in (*chosen, "seed")}
    assert made == {**chosen, "seed": 9}
    assert set(Config().judge.model_dump()) == {*chosen, "preferences"}


def test_a_judge_that_could_mark_nothing_is_refused_before_anything_is_started(monkeypatch):
    checked_judge(Config(), [("cute", POOL)])
    with pytest.raises(ConfigError, match="Unknown style 'pirate'"):
        checked_judge(Config(), [("cute", POOL), ("pirate", ("pirate",))])
    monkeypatch.delenv("ZAI_API_KEY", raising=False)
    remote = Config.model_validate({"judge": {"model": "zai/glm-4.7"}})
    with pytest.raises(ConfigError, match="ZAI_API_KEY"):
        checked_judge(remote, [("cute", POOL)])
