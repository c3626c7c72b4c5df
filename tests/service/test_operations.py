"""An endpoint that people leave running: attacked, overloaded, watched, and with a bad judge.

With keys set, started by the command line, on 127.0.0.1; each attack ends with the same
processes alive and the next request answered.
"""

import importlib.util
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import TINY_SETTINGS, ServedEndpoint

from online_sao.cli import main
from online_sao.service.cleanup import own_processes
from online_sao.service.http import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

USER, ADMIN = "user-key-of-the-tests", "admin-key-of-the-tests"
KEYS = {API_KEY_VARIABLE: USER, ADMIN_KEY_VARIABLE: ADMIN}
BODY_TIMEOUT_S = 15  # under load it takes the edge some seconds to come to a body
NUM_QUEUED = 950


@pytest.fixture(scope="module")
def endpoint(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "e"
    settings = [*TINY_SETTINGS, f"service.body_timeout_s={BODY_TIMEOUT_S}"]
    settings += ["guards.probe_every=20", "guards.probe_prompts=2"]
    served = ServedEndpoint(tiny_model, folder, *settings, env=KEYS, key=ADMIN)
    try:
        yield served.start()
    finally:
        if served.process is not None:
            served.stop()


@pytest.fixture(autouse=True)
def unharmed(endpoint):
    """Nothing was restarted, and the next request is answered."""
    before = {p.pid: p.create_time() for p in own_processes(endpoint.run_dir)}
    yield
    assert endpoint.get("/health").status_code == 200
    assert endpoint.chat(max_tokens=2).status_code == 200
    after = {p.pid: p.create_time() for p in own_processes(endpoint.run_dir)}
    lost = {pid for pid in before if before[pid] != after.get(pid)}
    names = {p.pid: p.name() for p in own_processes(endpoint.run_dir)}
    assert not lost, f"processes ended: {lost}; left: {names}"


def as_user(endpoint, method, path, **kwargs):
    headers = {"Authorization": f"Bearer {USER}"} | kwargs.pop("headers", {})
    return httpx.request(method, endpoint.url + path, headers=headers, timeout=60, **kwargs)


class TestAccess:
    @pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer guess"}, {"X-Key": ADMIN}])
    @pytest.mark.parametrize("path", ["/v1/models", "/v1/learning", "/metrics", "/ready"])
    def test_no_key_and_wrong_keys(self, endpoint, path, headers):
        for place in (path, f"{path}?api_key={ADMIN}", f"{path}?key={USER}"):
            assert httpx.get(endpoint.url + place, headers=headers).status_code == 401

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("GET", "/v1/learning"),
            ("GET", "/v1/learning/"),
            ("GET", "/v1/%6cearning"),
            ("POST", "/v1/learning/rollback"),
            ("POST", "/v1/learning/checkpoint"),
            ("PUT", "/v1/preference"),
            ("GET", "/v1/rollouts"),
            ("DELETE", "/v1/rollouts/x"),
        ],
    )
    def test_admin_routes_with_the_user_key(self, endpoint, method, path):
        assert as_user(endpoint, method, path).status_code == 401

    @pytest.mark.parametrize(
        "path", ["//v1/learning", "/V1/LEARNING", "/x/../v1/learning", "/v1/models/../learning"]
    )
    def test_other_spellings_of_an_admin_path(self, endpoint, path):
        """Sent as they are: httpx would tidy them."""
        answer = raw(endpoint, f"GET {path} HTTP/1.1\r\nAuthorization: Bearer {USER}\r\n")
        assert answer.split()[1] in (b"401", b"404", b"307", b"400"), answer

    def test_the_user_key_opens_what_users_need(self, endpoint):
        assert as_user(endpoint, "GET", "/v1/models").status_code == 200


class TestHostileRequests:
    @pytest.mark.parametrize(
        "version",
        ["../../etc/passwd", "..", "/etc", "v1", "1/../../x", -1, 10**30, 1.5, None, [], {"a": 1}],
    )
    @pytest.mark.parametrize("route", ["rollback", "pin", "unpin"])
    def test_paths_and_numbers_in_place_of_a_version(self, endpoint, route, version):
        answer = endpoint.post(f"/v1/learning/{route}", {"version": version})
        assert 400 <= answer.status_code < 500, answer.text
        assert "Traceback" not in answer.text

    @pytest.mark.parametrize("id", ["..%2f..%2fetc%2fpasswd", "%00", "x" * 5000, "'; DROP TABLE x"])
    def test_ids_that_are_paths(self, endpoint, id):
        assert endpoint.get(f"/v1/rollouts/{id}").status_code in (400, 404)
        assert endpoint.post("/v1/feedback", {"id": id, "reward": 1}).status_code == 404

    @pytest.mark.parametrize("says_so", [True, False])
    def test_a_body_of_100_mb(self, endpoint, says_so):
        size = 100 * 2**20

        def parts():
            for _ in range(100):
                yield b" " * 2**20

        headers = {"Content-Type": "application/json", **endpoint.headers}
        if says_so:
            headers["Content-Length"] = str(size)
        try:
            answer = httpx.post(
                f"{endpoint.url}/v1/chat/completions", content=parts(), headers=headers, timeout=60
            )
            assert answer.status_code == 413
        except httpx.TransportError:
            pass  # refused while it was still being sent

    def test_10_000_messages(self, endpoint):
        messages = [{"role": "user", "content": "x"}] * 10_000
        answer = endpoint.post(
            "/v1/chat/completions", {"model": endpoint.model.name, "messages": messages}
        )
        assert answer.status_code == 400
        assert "context length" in answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        "field",
        [
            {"messages": [{"role": "user", "content": "a\x00b"}]},
            {"metadata": {"session_id": "a\x00b", "x": "\x00"}},
            {"stop": ["\x00"]},
            {"user": "\x00"},
        ],
    )
    def test_nul(self, endpoint, field):
        answer = endpoint.chat(**field)
        assert answer.status_code == 200, answer.text
        assert endpoint.settled(answer.json()["id"])["state"] in ("trained", "excluded")

    @pytest.mark.parametrize(
        "place", ["content", "metadata", "session_id", "stop", "role", "model"]
    )
    def test_lone_surrogates(self, endpoint, place):
        body = {
            "model": endpoint.model.name,
            "messages": [{"role": "user", "content": "rain"}],
            "max_tokens": 2,
        }
        match place:
            case "content" | "role":
                body["messages"][0][place] = "\ud800"
            case "metadata":
                body["metadata"] = {"x": "\udfff"}
            case "session_id":
                body["metadata"] = {"session_id": "\udfff"}
            case "stop":
                body["stop"] = ["\ud800"]
            case "model":
                body["model"] = "\ud800"
        answer = post_raw(endpoint, "/v1/chat/completions", json.dumps(body).encode())
        assert answer.status_code == 400, answer.text
        assert "surrogate" in answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        "body",
        [
            {"style": "\ud800"},
            {"style": "cute", "pool": ["cute"], "note": "\udfff\x00"},
        ],
    )
    def test_texts_that_no_database_takes_in_a_preference(self, endpoint, body):
        before = endpoint.get("/v1/preference").json()
        answer = endpoint._send(
            "PUT",
            "/v1/preference",
            30,
            content=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        assert answer.status_code in (200, 400), answer.text
        endpoint.put("/v1/preference", {"style": before["style"], "pool": before["pool"]})

    @pytest.mark.parametrize(
        "field",
        [
            '"max_tokens": -1',
            '"max_tokens": 1e30',
            '"max_tokens": 1' + "0" * 400,
            '"temperature": -1',
            '"temperature": 1e400',
            '"temperature": NaN',
            '"n": -3',
            '"n": 0',
            '"n": 1000000',
            '"seed": 1' + "0" * 30,
            '"logprobs": true, "top_logprobs": 1000000',
            '"top_p": -Infinity',
            '"min_tokens": 1000000',
            '"priority": -1' + "0" * 40,
        ],
    )
    def test_numbers_out_of_all_bounds(self, endpoint, field):
        body = '{"messages": [{"role": "user", "content": "x"}], "model": "%s", %s}'
        text = body % (endpoint.model.name, field)
        answer = post_raw(endpoint, "/v1/chat/completions", text.encode())
        assert 400 <= answer.status_code < 500, answer.text[:500]

    @pytest.mark.parametrize(
        "query", ["after=-1", f"after={10**30}", "limit=-5", f"limit={10**30}", "limit=NaN"]
    )
    def test_numbers_in_queries(self, endpoint, query):
        assert endpoint.get(f"/v1/rollouts?{query}").status_code == 400

    @pytest.mark.parametrize("reward", [-1, 2, 1e308, "1e400", "NaN", None])
    def test_rewards(self, endpoint, reward):
        body = '{"id": "x", "reward": %s}' % ("null" if reward is None else reward)
        assert post_raw(endpoint, "/v1/feedback", body.encode()).status_code == 400

    def test_slow_loris(self, endpoint):
        """Heads and bodies that never end hold nobody up; the bodies are given up on."""
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {USER}\r\n"
            "Content-Type: application/json\r\n"
        )
        heads = [connect(endpoint, head) for _ in range(100)]
        bodies = [connect(endpoint, f"{head}Content-Length: 1000\r\n\r\n{{") for _ in range(100)]
        try:
            for _ in range(3):
                assert endpoint.chat(max_tokens=2).status_code == 200
            for slow in heads + bodies:
                slow.sendall(b"X")
            assert endpoint.get("/health").status_code == 200
            for slow in bodies:
                slow.settimeout(60)
                assert slow.recv(100).split()[1] == b"408"
        finally:
            for slow in heads + bodies:
                slow.close()


def test_950_queued_requests_fail_no_health_check(endpoint):
    """And restart nothing: see `unharmed`."""
    statuses, health, done = [], [], threading.Event()

    def watch():
        while not done.is_set():
            health.append(httpx.get(f"{endpoint.url}/health", timeout=30).status_code)
            done.wait(0.5)

    def ask(number):
        return endpoint._send(
            "POST",
            "/v1/chat/completions",
            600,
            json={
                "model": endpoint.model.name,
                "messages": [{"role": "user", "content": f"Write about rain {number}."}],
                "max_tokens": 4,
            },
            headers={"X-Learning": "off"},
        ).status_code

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(NUM_QUEUED) as pool:
            statuses = list(pool.map(ask, range(NUM_QUEUED)))
    finally:
        done.set()
        watcher.join()
    assert statuses == [200] * NUM_QUEUED
    assert set(health) == {200}
    assert len(health) > 5


class TestWatching:
    def test_metrics(self, endpoint):
        endpoint.settled(endpoint.chat().json()["id"])
        answer = as_user(endpoint, "GET", "/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        families = {f.name: f for f in text_string_to_metric_families(answer.text)}
        up = {s.labels["part"]: s.value for s in families["online_sao_up"].samples}
        assert up == {"learner": 1, "judge": 1, "store": 1}
        trained = endpoint.get("/v1/learning").json()["queue"]["trained"]
        states = {s.labels["state"]: s.value for s in families["online_sao_rollouts"].samples}
        assert 1 <= states["trained"] <= trained
        chats = [
            s.value
            for s in families["online_sao_requests"].samples
            if s.labels.get("route") == "/v1/chat/completions" and s.labels.get("status") == "200"
        ]
        assert chats[0] >= 1
        guards = {s.labels["guard"] for s in families["online_sao_guard_bound"].samples}
        assert {"kl_to_start", "repetition", "forgeries"} <= guards

    def test_probes_are_asked_and_shown(self, endpoint):
        deadline = time.monotonic() + 120
        while endpoint.get("/v1/learning").json()["guards"]["probe"]["quality"] is None:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        listed = endpoint.get("/v1/rollouts?limit=1000&state=excluded").json()["data"]
        probes = [r for r in listed if r["purpose"] == "probe"]
        assert len(probes) >= 2
        assert {r["reason"] for r in probes} == {"probe"}
        assert all(r["verdict"] for r in probes if r["judge_state"] == "scored")

    def test_logs_name_rollouts_and_versions_and_no_texts_or_keys(self, endpoint):
        secret = "correct horse battery staple"
        id = endpoint.chat(text=f"Write about {secret}.").json()["id"]
        endpoint.settled(id)
        httpx.get(f"{endpoint.url}/v1/models", headers={"Authorization": f"Bearer {ADMIN}x"})
        lines = []
        deadline = time.monotonic() + 20
        while {"recorded", "judged", "trained"} - {line["message"] for line in lines}:
            assert time.monotonic() < deadline, lines
            time.sleep(0.2)
            texts = [p.read_text() for p in (endpoint.run_dir / "logs").glob("*.jsonl")]
            every = [json.loads(line) for text in texts for line in text.splitlines()]
            lines = [line for line in every if line.get("rollout_id") == id]
        assert all(isinstance(line["weight_version"], int) for line in lines)
        everything = "".join(texts) + endpoint.log.read_text()
        for hidden in (secret, USER, ADMIN):
            assert hidden not in everything

    def test_the_doctor_finds_nothing(self, endpoint, monkeypatch, capsys):
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        command = ["doctor", "--model", str(endpoint.model), "--run-dir", str(endpoint.run_dir)]
        code = main([*command, "--port", str(endpoint.port)])
        assert (code, "FAULT" in capsys.readouterr().out) == (0, False)


class TestABadJudge:
    """The last of this file: it has an endpoint of its own."""

    def test_a_judge_that_always_says_one_pauses_learning(self, tiny_model, tmp_path):
        settings = [*TINY_SETTINGS, "judge.model=openai/bribed", "guards.probe_prompts=2"]
        with load_standin()("all_ones") as judge:
            settings.append(f"judge.api_base={judge.url}")
            env = {"OPENAI_API_KEY": "sk-of-the-tests"}
            served = ServedEndpoint(tiny_model, tmp_path / "e", *settings, env=env)
            try:
                served.start()
                deadline = time.monotonic() + 120
                while not (state := served.get("/v1/learning").json())["paused"]:
                    assert time.monotonic() < deadline
                    time.sleep(0.3)
                assert "the judge rewards answers" in state["pause_reason"]
                fired = state["guards"]["last_firing"]
                assert (fired["guard"], fired["value"], fired["action"]) == (
                    "forgeries",
                    1,
                    "pause",
                )
                answer = served.chat()  # still served, and recorded
                assert answer.status_code == 200
                rollout = served.get(f"/v1/rollouts/{answer.json()['id']}").json()
                assert rollout["state"] in ("pending", "rewarded")
                assert served.post("/v1/learning/resume").status_code == 200
                assert not served.get("/v1/learning").json()["paused"]
                assert served.settled(answer.json()["id"])["state"] == "trained"
            finally:
                if served.process is not None:
                    served.stop()


def load_standin():
    path = Path(__file__).parents[1] / "judge" / "standin.py"
    spec = importlib.util.spec_from_file_location("judge_standin", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.StandIn


def post_raw(endpoint, path, content):
    headers = {"Content-Type": "application/json"}
    return endpoint._send("POST", path, 60, content=content, headers=headers)


def connect(endpoint, text):
    connection = socket.create_connection(("127.0.0.1", endpoint.port), timeout=30)
    connection.sendall(text.encode())
    return connection


def raw(endpoint, head):
    with connect(endpoint, head + "Host: x\r\nConnection: close\r\n\r\n") as connection:
        return connection.recv(1000)
