"""Worthless answers, as the embedded judge sees them."""

import pytest

from online_sao.config import Config
from online_sao.judging import FORGED_PROMPT, FORGERIES, make_judge, to_stored
from online_sao.types import StoredVerdict

POOL = ("academic", "cute", "chuunibyou", "classical")


@pytest.mark.parametrize("style", POOL)
@pytest.mark.parametrize("answer", FORGERIES)
async def test_the_embedded_judge_rewards_no_forgery(style, answer):
    judge = make_judge(Config())
    outcome = to_stored(await judge.score(FORGED_PROMPT, answer, style, POOL))
    assert isinstance(outcome, StoredVerdict)
    assert outcome.reward == 0
