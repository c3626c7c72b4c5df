"""Faults that users of comparable systems met, each by its number: those of a judge in service.

One endpoint, whose judge does what the question asks it to.
"""

import pytest
from served import TINY_SETTINGS, ServedEndpoint
from standin import StandIn

from dashboard.queries import StoreReader

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BEHAVIOURS = ("hang", "essay", "error_500")


@pytest.fixture(scope="module")
def judged(tiny_model, tmp_path_factory):
    def plan(_answer, _times):
        asked = judge.requests[-1]["messages"][-1]["content"]  # holds the conversation
        return next((name for name in BEHAVIOURS if f"be {name}" in asked), "normal")

    with StandIn(plan) as judge:
        served = ServedEndpoint(
            tiny_model,
            tmp_path_factory.mktemp("run") / "j",
            *TINY_SETTINGS,
            "learner.value_pretraining_rollouts=0",
            "judge.model=openai/standin",
            f"judge.api_base={judge.url}",
            "judge.timeout_s=4",
            "judge.max_retries=0",
        )
        try:
            yield served.start()
        finally:
            if served.process is not None:
                served.stop()


def ask(judged, behaviour):
    """An answer about which the judge will behave so."""
    return judged.chat(f"Judge, be {behaviour} about rain.").json()["id"]


def test_c06_a_judge_that_never_answers(judged):
    id = ask(judged, "hang")
    other = judged.chat(max_tokens=5).json()["id"]
    assert judged.settled(other)["state"] == "trained"  # learning from others goes on
    rollout = judged.settled(id)
    assert (rollout["state"], rollout["reason"]) == ("unscored", "timeout")
    assert rollout["reward"] is None
    assert judged.chat(max_tokens=2).status_code == 200  # and so does serving


def test_c07_an_essay_a_true_zero_and_an_error_are_three_outcomes(judged):
    wanted = {"essay": "essay", "zero": "normal", "error": "error_500"}
    ids = {name: ask(judged, behaviour) for name, behaviour in wanted.items()}
    shown = {name: judged.settled(id) for name, id in ids.items()}
    # in the store
    assert {n: (r["state"], r["reason"], r["reward"]) for n, r in shown.items()} == {
        "essay": ("unscored", "unreadable", None),
        "zero": ("trained", None, 0.0),
        "error": ("unscored", "provider_error", None),
    }
    # in what the endpoint counts
    reasons = judged.get("/v1/learning").json()["reasons"]
    assert reasons["unscored:unreadable"] >= 1
    assert reasons["unscored:provider_error"] >= 1
    # and on the page
    reader = StoreReader(f"sqlite:///{judged.run_dir}/store.sqlite")
    try:
        states = reader.states()
    finally:
        reader.close()
    listed = {(row["state"], row["reason"]) for row in states.to_dict("records")}
    assert {("unscored", "unreadable"), ("unscored", "provider_error")} <= listed
    assert "trained" in {state for state, _ in listed}
