"""Kill the processes of a real service under traffic, and see what is left.

`make chaos N=40 SEED=0` sets the number of kills and the seed; without them it is a short run.
"""

import contextlib
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from audit import audit
from served import TINY_SETTINGS, ServedEndpoint

from online_sao.config import Config
from online_sao.engine.settings import has_worker_process
from online_sao.engine.weight_file import SHARED_MEMORY, endpoint_folder
from online_sao.service.cleanup import own_processes, own_segments
from online_sao.store import RolloutStore

KILLS = int(os.environ.get("CHAOS_KILLS", "2"))
SEED = int(os.environ.get("CHAOS_SEED", "0"))
RECOVERY_S = 240  # within which a killed part must serve and learn again
DRAIN_S = 60  # in which the backlog must have become smaller
SETTLE_S = 30  # within which what a kill left behind must be gone
TRAFFIC_S = (0.5, 5.0)  # between recovery and the next kill
CLIENTS = 3
PAUSE_S = 0.25  # of each client after an answer: more than the learner takes up is only backlog

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.timeout(600 + KILLS * (RECOVERY_S + 10)),
]

# What each process is called in its command line. `everything` is the driver and all below it.
TARGETS = {
    **({"engine worker": "VLLM::Worker"} if has_worker_process(Config()) else {}),
    "engine core": "VLLM::EngineCore",
    "Serve replica": "ray::ServeReplica",
    "learner": "ray::LearnerActor",
    "judge": "ray::RewardWorker",
    "everything": "",
}


class Traffic:
    """Clients that ask without pause, and keep what they were answered."""

    def __init__(self, endpoint: ServedEndpoint) -> None:
        self.endpoint = endpoint
        self.answers: dict[str, str] = {}
        self.unrecorded: list[str] = []
        self.failures = 0
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, client: int) -> None:
        number = 0
        while not self._stop.wait(PAUSE_S):
            number += 1
            body = {
                "model": self.endpoint.model.name,
                "messages": [{"role": "user", "content": f"Write about rain, {client} {number}."}],
                "max_tokens": 6,
                "stream": client == 0,
            }
            # Every third answer is a turn of a session, so that those are in it too.
            headers = {"X-Session-Id": f"{client}"} if number % 3 == 0 else {}
            try:
                self._one(body, headers)
            except (httpx.HTTPError, ValueError, KeyError):
                self.failures += 1  # it got no whole answer, so there is none to lose

    def _one(self, body, headers) -> None:
        url = f"{self.endpoint.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
            if answer.status_code != 200:
                self.failures += 1
                return
            recorded = answer.headers["x-rollout-recorded"] == "true"
            if body["stream"]:
                id, text, whole = "", "", False
                for line in answer.iter_lines():
                    data = line.removeprefix("data: ")
                    if not data or data == "[DONE]":
                        continue
                    chunk = json.loads(data)
                    id = chunk["id"]
                    text += chunk["choices"][0]["delta"].get("content") or ""
                    whole = whole or chunk["choices"][0]["finish_reason"] is not None
                if not whole:
                    self.failures += 1
                    return
            else:
                answer.read()
                got = answer.json()
                id, text = got["id"], got["choices"][0]["message"]["content"]
        self.answers[id] = text
        if not recorded and not body["stream"]:
            self.unrecorded.append(id)


def processes(endpoint: ServedEndpoint, target: str) -> list[psutil.Process]:
    found = []
    for process in own_processes(endpoint.run_dir):
        with contextlib.suppress(psutil.Error):
            if TARGETS[target] in " ".join(process.cmdline()):
                found.append(process)
    return found


def kill(endpoint: ServedEndpoint, target: str) -> bool:
    """SIGKILL the process of that name; False if there is none just now."""
    assert endpoint.process is not None
    driver = psutil.Process(endpoint.process.pid)
    if target == "everything":
        tree = [driver, *driver.children(recursive=True)]
        known = {process.pid for process in tree}
        tree += [p for p in own_processes(endpoint.run_dir) if p.pid not in known]
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
        endpoint.process.wait(30)
        return True
    for process in processes(endpoint, target):
        process.send_signal(signal.SIGKILL)
        return True
    return False


def left_behind(endpoint: ServedEndpoint) -> list[str]:
    """Parts of which there is more than one: an engine without its replica takes gigabytes."""
    names = [target for target in TARGETS if target != "everything"]
    return [name for name in names if len(processes(endpoint, name)) > 1]


def recovered(endpoint: ServedEndpoint, target: str) -> tuple[float, float]:
    """Seconds until an answer came, and until an update was made from what clients ask."""
    start = time.monotonic()
    if target == "everything":
        endpoint.process = None
        endpoint.start()
    served = updates = None
    while time.monotonic() - start < RECOVERY_S:
        time.sleep(0.2)
        with contextlib.suppress(httpx.HTTPError):
            if served is None:
                if endpoint.chat(max_tokens=1).status_code == 200:
                    served = time.monotonic() - start
                continue
            status = endpoint.get("/v1/learning")
            if status.status_code != 200 or status.json()["state"] != "learning":
                continue
            now = status.json()["updates"]
            updates = now if updates is None else updates
            if now > updates:
                return served, time.monotonic() - start
    raise AssertionError(f"{target} did not come back:\n{endpoint.log.read_text()[-3000:]}")


def drained(endpoint: ServedEndpoint) -> dict[str, int]:
    """The queue once nothing waits in it; a backlog may take long, but must shrink."""
    least, deadline = None, time.monotonic() + DRAIN_S
    while True:
        status = endpoint.get("/v1/learning").json()
        queue = status["queue"]
        waiting = queue["pending"] + queue["rewarded"] + queue["claimed"]
        if not waiting:
            return queue
        if least is None or waiting < least:
            least, deadline = waiting, time.monotonic() + DRAIN_S
        assert time.monotonic() < deadline, f"still waiting: {status}"
        time.sleep(0.5)


def schedule(kills: int, seed: int) -> list[str]:
    """Each target as often as any other, in an order of the seed's."""
    chosen = random.Random(seed)
    order: list[str] = []
    while len(order) < kills:
        names = list(TARGETS)
        chosen.shuffle(names)
        order += names
    return order[:kills]


def test_kills_lose_nothing_and_double_nothing(tiny_model, tmp_path):
    run_dir: Path = tmp_path / "run"
    settings = (*TINY_SETTINGS, "learner.checkpoint_every=5")
    endpoint = ServedEndpoint(tiny_model, run_dir, *settings)
    waits = random.Random(SEED)
    segments: set[str] = set()  # of shared memory, that any process of ours has had
    times: dict[str, list[tuple[float, float]]] = {}
    kills = 0
    endpoint.start()
    traffic = Traffic(endpoint)
    try:
        for target in schedule(KILLS, SEED):
            time.sleep(waits.uniform(*TRAFFIC_S))
            seen = len(traffic.answers)
            segments |= own_segments(run_dir)
            if not kill(endpoint, target):
                raise AssertionError(f"no process of the {target} is running")
            kills += 1
            times.setdefault(target, []).append(recovered(endpoint, target))
            served, learns = times[target][-1]
            deadline = time.monotonic() + SETTLE_S
            while (twice := left_behind(endpoint)) and time.monotonic() < deadline:
                time.sleep(0.5)
            assert not twice, f"after a kill of the {target} there is more than one {twice}"
            print(
                f"kill {kills}: {target}, {seen} answered before; answers after {served:.0f} s, "
                f"learns after {learns:.0f} s",
                flush=True,
            )
        time.sleep(TRAFFIC_S[1])
        traffic.stop()
        queue = drained(endpoint)
        segments |= own_segments(run_dir)
        assert endpoint.stop() == 130
    finally:
        traffic.stop()
        if endpoint.process is not None:
            kill(endpoint, "everything")
    with RolloutStore(f"sqlite:///{run_dir}/store.sqlite") as store:
        found = audit(store, traffic.answers, run_dir / "checkpoints")
        told = [event.data["what"] for event in store.events("error")]
    for target, pairs in times.items():
        worst = max(served for served, _ in pairs), max(learns for _, learns in pairs)
        print(f"{target}: answers within {worst[0]:.0f} s, learns within {worst[1]:.0f} s")
    print(f"queue {queue}; {traffic.failures} requests failed while something was down")
    print(found.line(kills), flush=True)
    assert found.faults == []
    assert traffic.unrecorded == []
    assert len(traffic.answers) >= kills
    assert queue["trained"] > 0
    assert any("was started again" in what for what in told) or "learner" not in times
    assert own_processes(run_dir) == []
    assert not endpoint_folder(run_dir).exists()
    assert segments
    assert [name for name in segments if (SHARED_MEMORY / name).exists()] == []
