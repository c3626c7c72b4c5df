"""Turns of a session on a real endpoint that learns from a session as a whole, at its end."""

import time

import httpx
import pytest
from conversation import QUESTIONS, check_history, check_mask, converse, stored
from served import TINY_SETTINGS, ServedEndpoint

from online_sao.store import RolloutStore

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PAGE = "https://page.test"


@pytest.fixture(scope="module")
def by_session(tiny_model, tmp_path_factory):
    """An endpoint whose sessions are learned from as a whole."""
    settings = (
        *TINY_SETTINGS,
        "learner.credit=session",
        "service.session_idle_s=15",
        f'service.cors_origins=["{PAGE}"]',
    )
    served = ServedEndpoint(tiny_model, tmp_path_factory.mktemp("run") / "s", *settings)
    try:
        yield served.start()
    finally:
        if served.process is not None:
            served.stop()


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


def test_credit_by_session(by_session, tokenizer):
    ids = converse(by_session, "whole")
    deadline = time.monotonic() + 60
    while {by_session.get(f"/v1/rollouts/{id}").json()["state"] for id in ids} != {"rewarded"}:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    closed = by_session.post("/v1/sessions/whole/close")
    assert (closed.status_code, closed.json()) == (
        200,
        {"id": "whole", "closed": True, "turns": 2},
    )
    shown = [by_session.settled(id) for id in ids]
    assert [r["state"] for r in shown] == ["trained", "trained"]
    assert shown[0]["trained_version"] == shown[1]["trained_version"]
    first, second = stored(by_session, ids)
    check_history(first, second, tokenizer)
    print(f"--- the update of version {first.trained_version}")
    batch = check_mask([first, second], tokenizer)
    number = len(first.token_ids) + len(second.token_ids)
    metrics = shown[0]["metrics"]
    assert metrics["rollout/num_action_tokens"] == batch.num_actions == number
    assert metrics["rollout/num_trajectories"] == 1
    assert metrics["rollout/reward"] == first.reward + second.reward
    assert metrics["policy/logprob_gap"] < 1e-3


def test_an_idle_session_is_closed_and_learned_from(by_session):
    ids = converse(by_session, "idle")
    assert {by_session.settled(id, 90)["state"] for id in ids} == {"trained"}
    # and a turn after that stands by itself, with the same history
    with RolloutStore(f"sqlite:///{by_session.run_dir}/store.sqlite") as store:
        assert store.session("idle").close_reason == "idle"
        last = store.get(ids[-1])
    history = [
        *last.messages,
        {"role": "assistant", "content": last.answer},
        {"role": "user", "content": QUESTIONS[2]},
    ]
    headers = {"X-Session-Id": "idle"}
    id = by_session.chat(headers=headers, messages=history, max_tokens=4).json()["id"]
    (late,) = stored(by_session, [id])
    assert (late.turn, late.new_trajectory, late.parent_id) == (0, "session_closed", ids[-1])


def test_a_page_of_a_named_origin_may_call_it_from_a_browser(by_session):
    asked = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-session-id",
    }
    url = f"{by_session.url}/v1/chat/completions"
    allowed = httpx.options(url, headers=asked, timeout=30)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    refused = httpx.options(url, headers=asked | {"Origin": "https://other.test"}, timeout=30)
    assert refused.status_code == 400
    answer = by_session.chat(max_tokens=2, headers={"Origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "X-Weight-Version" in answer.headers["access-control-expose-headers"]
