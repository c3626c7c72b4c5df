"""An endpoint without topics of its own: the critic is fitted to its users' first answers."""

import signal
import time

import pytest
from served import TINY_SETTINGS, ServedEndpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SETTINGS = (*TINY_SETTINGS, "service.topics=none")  # of which pretraining takes four rollouts


@pytest.fixture
def served(tiny_model, tmp_path):
    endpoint = ServedEndpoint(tiny_model, tmp_path / "e", *SETTINGS)
    try:
        yield endpoint.start()
    finally:
        if endpoint.process is not None:
            endpoint.stop()


def learning(served):
    return served.get("/v1/learning").json()


def until_learning(served, deadline_s=120):
    deadline = time.monotonic() + deadline_s
    while (status := learning(served))["state"] != "learning":
        assert time.monotonic() < deadline, status
        time.sleep(0.2)


def judged(served, id, deadline_s=60):
    deadline = time.monotonic() + deadline_s
    while (rollout := served.get(f"/v1/rollouts/{id}").json())["judge_state"] == "waiting":
        assert time.monotonic() < deadline, rollout
        time.sleep(0.1)
    return rollout


def test_the_first_answers_fit_the_critic_and_later_ones_are_learned_from(served):
    status = learning(served)
    assert status["state"] == "pretraining"
    first = [served.chat(f"Write about {topic}.").json()["id"] for topic in ("rain", "tea")]
    assert [judged(served, id)["state"] for id in first] == ["rewarded"] * 2
    assert learning(served)["weight_version"] == 0

    # What was collected is not lost with the process.
    served.stop(signal.SIGTERM)
    served.start()
    assert learning(served)["state"] == "pretraining"
    first += [served.chat(f"Write about {topic}.").json()["id"] for topic in ("snow", "bread")]
    until_learning(served)
    rollouts = [served.settled(id) for id in first]
    assert {(r["state"], r["reason"]) for r in rollouts} == {("discarded", "value_pretraining")}

    version = learning(served)["weight_version"]
    later = served.settled(served.chat("Write about the sea.").json()["id"])
    assert later["state"] == "trained"
    assert learning(served)["weight_version"] == version + 1
