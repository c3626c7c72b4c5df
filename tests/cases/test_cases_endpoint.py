"""Faults that users of comparable systems met, each by its number: those of the whole service."""

import contextlib
import signal
import time
from itertools import pairwise

import httpx
import pytest
from served import TINY_SETTINGS, ServedEndpoint

from online_sao.config import Config
from online_sao.engine.settings import has_worker_process
from online_sao.learner.batch import make_batch
from online_sao.service.cleanup import own_processes
from online_sao.store import RolloutStore

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

UPDATE_DEADLINE_S = 10
RECOVERY_S = 180


@pytest.fixture(scope="module")
def endpoint(tiny_model, tmp_path_factory):
    settings = (*TINY_SETTINGS, f"engine.update_deadline_s={UPDATE_DEADLINE_S}")
    served = ServedEndpoint(tiny_model, tmp_path_factory.mktemp("run") / "c", *settings)
    try:
        yield served.start()
    finally:
        if served.process is not None:
            served.stop()


def until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "what was waited for did not come about"
        time.sleep(0.2)
    return found


def stored(endpoint, *ids):
    with RolloutStore(f"sqlite:///{endpoint.run_dir}/store.sqlite") as store:
        return store.get_many(ids)


@pytest.mark.parametrize(
    ("body", "reason"), [({"top_p": 0.9}, "sampling:top_p"), ({"top_k": 20}, "sampling:top_k")]
)
def test_c02_other_settings_are_served_and_excluded(endpoint, body, reason):
    answer = endpoint.chat(**body)
    assert answer.status_code == 200, answer.text
    rollout = endpoint.settled(answer.json()["id"])
    assert (rollout["state"], rollout["reason"]) == ("excluded", reason)
    assert rollout["trained_version"] is None
    assert endpoint.get("/v1/learning").json()["reasons"][f"excluded:{reason}"] >= 1


def test_c04_an_answer_that_was_cut_is_history_as_it_was_sampled(endpoint):
    """Three tokens of many: the answer ends in the middle of a word, and is then used."""
    messages = [{"role": "user", "content": "Write about rain."}]
    headers = {"X-Session-Id": "cut"}
    ids = []
    for text in ("Go on.", "And on.", ""):
        answer = endpoint.chat(
            messages=messages, headers=headers, max_tokens=3, ignore_eos=False, seed=len(ids)
        ).json()
        ids.append(answer["id"])
        said = answer["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": text}]
    shown = [endpoint.settled(id) for id in ids]
    assert {rollout["state"] for rollout in shown} == {"trained"}
    assert "length" in {rollout["finish_reason"] for rollout in shown}
    turns = stored(endpoint, *ids)
    for before, after in pairwise(turns):
        seen = [*before.prompt_token_ids.tolist(), *before.token_ids.tolist()]
        assert after.prompt_token_ids.tolist()[: len(seen)] == seen
    batch = make_batch([turns])  # refuses turns that do not continue one another
    sampled = [int(id) for turn in turns for id in turn.token_ids]
    assert batch.token_ids[batch.action_mask].tolist() == sampled


def test_c09_without_a_session_header_each_request_stands_alone(endpoint):
    ids = [endpoint.chat().json()["id"] for _ in range(2)]
    shown = [endpoint.settled(id) for id in ids]
    assert [r["state"] for r in shown] == ["trained", "trained"]
    assert [r["session_id"] for r in shown] == [r["trajectory_id"] for r in shown] == [None, None]
    assert shown[0]["trained_version"] != shown[1]["trained_version"]


@pytest.mark.long
def test_c11_the_engine_dies_in_the_middle_of_a_weight_update(endpoint):
    """It is stopped before the update comes, and killed while the update waits for it."""
    endpoint.post("/v1/learning/pause", {"reason": "until the engine is stopped"})
    id = endpoint.chat().json()["id"]
    until(lambda: endpoint.get(f"/v1/rollouts/{id}").json()["state"] == "rewarded")
    before = endpoint.get("/v1/learning").json()
    name = "VLLM::Worker" if has_worker_process(Config()) else "VLLM::EngineCore"
    (worker,) = [p for p in own_processes(endpoint.run_dir) if name in _name(p)]
    worker.send_signal(signal.SIGSTOP)
    assert endpoint.post("/v1/learning/resume").status_code == 200
    # The update is made and announced; the engine cannot take it.
    version = endpoint.settled(id)["trained_version"]
    assert version == before["weight_version"] + 1
    time.sleep(1)
    assert endpoint.get("/v1/learning").json()["serving_version"] < version
    worker.kill()

    def serves():
        with contextlib.suppress(httpx.HTTPError):
            answer = endpoint.chat(max_tokens=2)
            return answer.status_code == 200 and answer.json()["id"]
        return False

    # the replica that Serve began anew took the version that was current before it answered
    first = endpoint.settled(until(serves, RECOVERY_S), RECOVERY_S)
    assert first["weight_version_start"] >= version
    # and learning goes on
    until(
        lambda: endpoint.get("/v1/learning").json()["serving_version"] >= first["trained_version"]
    )
    next_id = endpoint.chat().json()["id"]
    shown = endpoint.settled(next_id, RECOVERY_S)
    assert shown["state"] == "trained"
    assert shown["weight_version_start"] >= version
    assert shown["metrics"]["policy/logprob_gap"] < 1e-3
    after = endpoint.get("/v1/learning").json()
    until(
        lambda: endpoint.get("/v1/learning").json()["serving_version"] >= after["weight_version"],
        UPDATE_DEADLINE_S + RECOVERY_S,
    )
    assert endpoint.get("/ready").status_code == 200


def _name(process):
    with contextlib.suppress(Exception):
        return " ".join(process.cmdline())
    return ""


@pytest.mark.long
def test_c13_a_restart_from_a_checkpoint_with_an_empty_queue(endpoint):
    """Last of this endpoint's: it stops it. Serving does not wait for the learner to learn."""
    until(lambda: not _waiting(endpoint))
    before = endpoint.get("/v1/learning").json()
    assert endpoint.stop() == 130
    endpoint.start()
    answer = endpoint.chat(headers={"X-Learning": "off"})
    assert answer.status_code == 200
    status = endpoint.get("/v1/learning").json()
    assert (status["state"], status["error"]) == ("learning", None)
    assert status["updates"] == before["updates"] > 0
    assert _waiting(endpoint) == 0
    assert endpoint.settled(endpoint.chat().json()["id"])["state"] == "trained"


def _waiting(endpoint):
    queue = endpoint.get("/v1/learning").json()["queue"]
    return queue["pending"] + queue["rewarded"] + queue["claimed"]
