"""The whole endpoint with real parts: CLI, Ray Serve, vLLM, judge, learner, store, HTTP."""

import signal
import threading
import time

import httpx
import openai
import psutil
import pytest

from online_sao.engine.weight_file import endpoint_folder
from online_sao.service.cleanup import own_processes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture
def client(endpoint):
    return openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0)


def test_ten_requests_are_ten_rollouts_judged_and_trained(endpoint, client):
    before = endpoint.get("/v1/learning").json()
    ids = []
    for number in range(10):
        messages = [{"role": "user", "content": f"Write about rain, please, number {number}."}]
        if number % 2:
            with client.chat.completions.create(
                model=endpoint.model.name, messages=messages, max_tokens=12, stream=True
            ) as stream:
                chunks = list(stream)
            ids.append(chunks[0].id)
            assert chunks[-1].choices[0].finish_reason in ("stop", "length")
        else:
            answer = client.chat.completions.create(
                model=endpoint.model.name, messages=messages, max_tokens=12
            )
            ids.append(answer.id)
    rollouts = [endpoint.settled(id) for id in ids]
    assert {r["state"] for r in rollouts} == {"trained"}
    assert {r["judge_state"] for r in rollouts} == {"scored"}
    after = endpoint.get("/v1/learning").json()
    assert after["queue"]["trained"] - before["queue"]["trained"] == 10
    assert after["weight_version"] - before["weight_version"] == 10
    deadline = time.monotonic() + 20
    while endpoint.get("/v1/learning").json()["serving_version"] != after["weight_version"]:
        assert time.monotonic() < deadline, "the new weights are not served"
        time.sleep(0.2)
    # Case C1: nothing moved between sampling and learning but what learning itself moved.
    # The judge marks several at once, so the first that was asked need not be the first trained.
    first = min(rollouts, key=lambda rollout: rollout["trained_version"])["metrics"]
    assert first["rollout/policy_lag_max"] == 0
    assert first["policy/importance_ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert first["policy/logprob_gap"] < 1e-3


def test_headers_name_the_version_and_say_that_the_answer_is_recorded(endpoint):
    answer = endpoint.chat()
    assert answer.status_code == 200
    assert answer.headers["x-rollout-recorded"] == "true"
    rollout = endpoint.get(f"/v1/rollouts/{answer.json()['id']}").json()
    assert rollout["weight_version_end"] == int(answer.headers["x-weight-version"])
    # The row is committed before the answer is complete.
    content = answer.json()["choices"][0]["message"]["content"]
    assert rollout["answer"] == content.replace("\0", "\ufffd")


def test_n_choices_are_n_rollouts(endpoint):
    id = endpoint.chat(n=3).json()["id"]
    choices = [endpoint.settled(name) for name in (id, f"{id}.1", f"{id}.2")]
    assert [rollout["choice"] for rollout in choices] == [0, 1, 2]
    assert {rollout["state"] for rollout in choices} == {"trained"}


def test_completions_are_served_and_recorded(endpoint):
    body = {"model": endpoint.model.name, "prompt": ["Rain is", "Snow is"], "max_tokens": 5}
    answer = endpoint.post("/v1/completions", body)
    assert answer.status_code == 200
    id = answer.json()["id"]
    first, second = (endpoint.get(f"/v1/rollouts/{name}").json() for name in (id, f"{id}.1"))
    # A random model writes anything; no database keeps a NUL, so the store replaces it.
    texts = [choice["text"].replace("\0", "\ufffd") for choice in answer.json()["choices"]]
    assert [first["answer"], second["answer"]] == texts


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"top_p": 0.9}, "sampling:top_p"),
        ({"top_k": 20}, "sampling:top_k"),
        ({"frequency_penalty": 0.5}, "sampling:frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "request:response_format"),
        ({"temperature": 0.1}, "temperature_too_low"),
    ],
)
def test_c02_other_settings_are_served_and_excluded(endpoint, body, reason):
    answer = endpoint.chat(**body)
    assert answer.status_code == 200, answer.text
    rollout = endpoint.settled(answer.json()["id"])
    assert (rollout["state"], rollout["reason"]) == ("excluded", reason)


def test_learning_off_is_judged_and_never_trained(endpoint):
    id = endpoint.chat(headers={"X-Learning": "off"}).json()["id"]
    rollout = endpoint.settled(id)
    assert (rollout["state"], rollout["reason"]) == ("excluded", "opted_out")
    assert rollout["verdict"]["detected_style"]


def test_c09_requests_without_a_session_stand_alone(endpoint):
    id = endpoint.chat().json()["id"]
    assert endpoint.settled(id)["state"] == "trained"
    assert endpoint.get(f"/v1/rollouts/{id}").json()["session_id"] is None


def test_a_client_that_leaves_is_recorded_and_generation_ends(endpoint):
    seen = endpoint.get("/v1/rollouts?limit=1").json()["last_seq"]
    body = {
        "model": endpoint.model.name,
        "messages": [{"role": "user", "content": "Go on and on."}],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{endpoint.url}/v1/chat/completions", json=body, timeout=30) as got:
        assert int(got.headers["x-weight-version"]) >= 0  # headers leave before the first token
        for count, _ in enumerate(got.iter_lines()):
            if count > 6:
                break
    deadline = time.monotonic() + 20
    found = []
    while not found and time.monotonic() < deadline:
        listed = endpoint.get(f"/v1/rollouts?after={seen}").json()["data"]
        found = [rollout for rollout in listed if rollout["reason"] == "aborted"]
        time.sleep(0.2)
    assert found[0]["state"] == "excluded"
    assert 0 < found[0]["num_action_tokens"] < 400


def test_feedback(endpoint):
    endpoint.post("/v1/learning/pause", {"reason": "test of feedback"})
    try:
        id = endpoint.chat().json()["id"]
        deadline = time.monotonic() + 20
        while endpoint.get(f"/v1/rollouts/{id}").json()["state"] != "rewarded":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        given = endpoint.post("/v1/feedback", {"id": id, "reward": 0.75, "comment": "nice"})
        assert (given.status_code, given.json()) == (200, {"trained": True})
        rollout = endpoint.get(f"/v1/rollouts/{id}").json()
        assert (rollout["reward"], rollout["verdict"]["source"]) == (0.75, "feedback")
    finally:
        endpoint.post("/v1/learning/resume")
    assert endpoint.settled(id)["metrics"]["rollout/reward"] == 0.75
    late = endpoint.post("/v1/feedback", {"id": id, "reward": 0.0})
    assert late.status_code == 202
    assert late.json()["trained"] is False
    assert endpoint.post("/v1/feedback", {"id": "nobody", "reward": 1}).status_code == 404


def test_pausing_stops_learning_and_resuming_goes_on(endpoint):
    endpoint.post("/v1/learning/pause", {"reason": "lunch"})
    try:
        state = endpoint.get("/v1/learning").json()
        assert (state["paused"], state["pause_reason"]) == (True, "lunch")
        id = endpoint.chat().json()["id"]
        endpoint.reaches(id, "rewarded")
        time.sleep(2)
        assert endpoint.get(f"/v1/rollouts/{id}").json()["state"] == "rewarded"
    finally:
        endpoint.post("/v1/learning/resume")
    assert endpoint.settled(id)["state"] == "trained"


def test_a_preference_switch_is_what_later_answers_are_judged_by(endpoint):
    before = endpoint.get("/v1/preference").json()
    wanted = {"style": "chuunibyou", "pool": ["academic", "cute", "chuunibyou"], "note": "test"}
    try:
        stored = endpoint.put("/v1/preference", wanted)
        assert stored.status_code == 200
        assert stored.json()["style"] == "chuunibyou"
        id = endpoint.chat().json()["id"]
        assert endpoint.get(f"/v1/rollouts/{id}").json()["preference"]["style"] == "chuunibyou"
    finally:
        endpoint.put("/v1/preference", {"style": before["style"], "pool": before["pool"]})


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("POST", "/v1/chat/completions", {"model": "nope", "messages": [1]}, 400, "messages"),
        (
            "POST",
            "/v1/chat/completions",
            {"model": "nope", "messages": [{"role": "user", "content": "x"}]},
            404,
            "does not exist",
        ),
        ("POST", "/v1/chat/completions", {"messages": []}, 400, "message"),
        ("POST", "/v1/chat/completions", {"messages": "hello"}, 400, "list"),
        (
            "POST",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "rain " * 3000}]},
            400,
            "context length",
        ),
        ("PUT", "/v1/preference", {"style": "pirate"}, 400, "pirate"),
        ("PUT", "/v1/preference", {"style": "cute", "pool": ["academic"]}, 400, "cute"),
        ("PUT", "/v1/preference", {"pool": []}, 400, "style"),
        ("POST", "/v1/feedback", {"id": "x", "reward": 2}, 400, "reward"),
        ("POST", "/v1/feedback", {"id": 5, "reward": 1}, 400, "id"),
        ("POST", "/v1/learning/rollback", {"version": 10**6}, 409, "retained"),
        ("GET", "/v1/rollouts/none", None, 404, "none"),
        ("GET", "/v1/rollouts?state=wrong", None, 400, "state"),
        ("GET", "/v1/rollouts?limit=0", None, 400, "limit"),
        ("GET", "/v1/nowhere", None, 404, "Not Found"),
    ],
)
def test_bad_input_gets_one_clear_sentence(endpoint, method, path, body, status, says):
    answer = httpx.request(method, endpoint.url + path, json=body, timeout=30)
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    assert says in message
    assert "Traceback" not in answer.text


def test_broken_bodies(endpoint):
    for body in (b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"messages": ' + b"[" * 20000):
        answer = httpx.post(
            f"{endpoint.url}/v1/chat/completions",
            content=body,
            headers={"Content-Type": "application/json"},
            timeout=30,
        )
        assert 400 <= answer.status_code < 500, (body[:20], answer.status_code, answer.text[:200])
    large = endpoint.post("/v1/chat/completions", {"messages": [], "x": "y" * (1 << 20)})
    assert large.status_code == 413


def test_many_at_once_lose_nothing(endpoint):
    seen = endpoint.get("/v1/rollouts?limit=1").json()["last_seq"]
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(endpoint.chat(max_tokens=6)))
        for _ in range(40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 40
    ids = {answer.json()["id"] for answer in answers}
    listed = endpoint.get(f"/v1/rollouts?after={seen}&limit=1000").json()["data"]
    assert ids == {rollout["id"] for rollout in listed}
    assert {endpoint.settled(id, 120)["state"] for id in ids} == {"trained"}


def test_versions_are_kept_pinned_and_gone_back_to(endpoint):
    kept = endpoint.post("/v1/learning/checkpoint")
    assert kept.status_code == 200, kept.text
    version = kept.json()["version"]
    assert version == endpoint.get("/v1/learning").json()["weight_version"]
    assert endpoint.post("/v1/learning/pin", {"version": version}).json()["pinned"] is True
    shown = endpoint.get("/v1/learning/versions").json()["data"]
    assert [v["version"] for v in shown if v["pinned"]] == [version]
    # what is not retained can be neither pinned nor gone back to, and the answer says what can
    for path in ("pin", "rollback"):
        refused = endpoint.post(f"/v1/learning/{path}", {"version": 10**6})
        assert refused.status_code == 409
        assert version in refused.json()["error"]["retained"]
    assert endpoint.post("/v1/learning/unpin", {"version": 10**6}).status_code == 404
    id = endpoint.chat().json()["id"]
    assert endpoint.settled(id)["trained_version"] > version
    made = endpoint.post("/v1/learning/rollback", {"version": version})
    assert made.status_code == 200, made.text
    assert made.json()["from_version"] == version
    after = endpoint.get(f"/v1/rollouts/{id}").json()
    assert (after["state"], after["reason"]) == ("discarded", "rolled_back")
    assert endpoint.post("/v1/learning/unpin", {"version": version}).json()["pinned"] is False


def test_an_exported_version_answers_as_the_service_does(endpoint, tmp_path):
    """Greedy, in plain transformers, from the folder that the command writes."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from online_sao.cli import main

    version = endpoint.post("/v1/learning/checkpoint").json()["version"]
    arguments = ["export", str(tmp_path / "out"), "--run-dir", str(endpoint.run_dir)]
    assert main([*arguments, "--version", str(version)]) == 0
    deadline = time.monotonic() + 20
    while endpoint.get("/v1/learning").json()["serving_version"] != version:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    messages = [{"role": "user", "content": "Write about rain."}]
    served = endpoint.chat(temperature=0, return_token_ids=True).json()["choices"][0]["token_ids"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        written = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    own = written[0, prompt["input_ids"].shape[1] :].tolist()
    assert own == served
    # and not as the model that it was made from
    start = AutoModelForCausalLM.from_pretrained(endpoint.model, dtype=torch.float32)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    pairs = zip(start.parameters(), trained.parameters(), strict=True)
    assert any(not torch.equal(before, after) for before, after in pairs)


def test_too_many_choices_are_refused(endpoint):
    answer = endpoint.chat(n=10**6)
    assert answer.status_code == 400
    assert "the limit is" in answer.json()["error"]["message"]


def test_deleting_removes_the_text(endpoint):
    id = endpoint.chat(headers={"X-Learning": "off"}).json()["id"]
    endpoint.settled(id)
    assert httpx.delete(f"{endpoint.url}/v1/rollouts/{id}").json()["deleted"] is True
    rollout = endpoint.get(f"/v1/rollouts/{id}").json()
    assert (rollout["answer"], rollout["messages"]) == ("", None)


@pytest.mark.long
def test_stop_leaves_nothing_and_a_restart_goes_on(endpoint):
    """Last in this file: it stops the endpoint and starts it again.

    With SIGTERM, as a supervisor does; every other test's endpoint is stopped with Ctrl-C.
    """
    assert endpoint.settled(endpoint.chat().json()["id"])["state"] == "trained"
    before = endpoint.get("/v1/learning").json()
    assert before["updates"] > 0
    assert own_processes(endpoint.run_dir)
    assert endpoint.stop(signal.SIGTERM) == 130
    assert not own_processes(endpoint.run_dir)
    assert not endpoint_folder(endpoint.run_dir).exists()
    assert not (endpoint.run_dir / "shared_memory.json").exists()
    checkpoints = list((endpoint.run_dir / "checkpoints").glob("v*"))
    newest = max(int(path.name.removeprefix("v")) for path in checkpoints)
    assert newest == before["weight_version"]

    endpoint.start()
    after = endpoint.get("/v1/learning").json()
    assert after["updates"] == before["updates"]
    assert after["weight_version"] == before["weight_version"] + 1  # numbers are never reused
    assert after["queue"]["trained"] == before["queue"]["trained"]
    id = endpoint.chat().json()["id"]
    rollout = endpoint.settled(id)
    assert rollout["state"] == "trained"
    # The engine, started from the model folder, serves the resumed weights.
    assert rollout["metrics"]["policy/logprob_gap"] < 1e-3
    assert psutil.pid_exists(endpoint.process.pid)
