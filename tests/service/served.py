"""A real endpoint with a tiny model, started as a user starts it: by the command line."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

READY_S = 240
STOP_S = 120


class ServedEndpoint:
    """`online-sao serve` in a process of its own."""

    def __init__(
        self,
        model: Path,
        run_dir: Path,
        *settings: str,
        env: dict | None = None,
        key: str | None = None,
    ):
        self.model, self.run_dir, self.settings = model, run_dir, settings
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.env = {**os.environ, **(env or {})}
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.log = run_dir.with_suffix(".log")
        self.process: subprocess.Popen | None = None

    def start(self) -> "ServedEndpoint":
        command = [sys.executable, "-m", "online_sao.cli", "serve"]
        command += ["--model", str(self.model), "--run-dir", str(self.run_dir)]
        command += ["--port", str(self.port)]
        for setting in self.settings:
            command += ["--set", setting]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.env, start_new_session=True
            )
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"serve ended:\n{self.log.read_text()[-3000:]}"
            with contextlib.suppress(httpx.HTTPError):
                if self.get("/ready").status_code == 200:
                    return self
            time.sleep(0.5)
        raise AssertionError(f"not ready in {READY_S} s:\n{self.log.read_text()[-3000:]}")

    def stop(self, number: int = signal.SIGINT) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(STOP_S)
        self.process = None
        return code

    def get(self, path: str, **kwargs):
        return self._send("GET", path, 30, **kwargs)

    def post(self, path: str, json=None, **kwargs):
        return self._send("POST", path, 60, json=json, **kwargs)

    def put(self, path: str, json=None, **kwargs):
        return self._send("PUT", path, 30, json=json, **kwargs)

    def _send(self, method: str, path: str, timeout_s: float, headers=None, **kwargs):
        headers = self.headers | (headers or {})
        return httpx.request(method, self.url + path, headers=headers, timeout=timeout_s, **kwargs)

    def chat(self, text="Write about rain.", headers=None, **body):
        body = {
            "model": self.model.name,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 12,
            **body,
        }
        return self.post("/v1/chat/completions", body, headers=headers or {})

    def reaches(self, rollout_id: str, state: str, timeout_s: float = 60) -> None:
        """Wait until the rollout is in `state`."""
        deadline = time.monotonic() + timeout_s
        while (now := self.get(f"/v1/rollouts/{rollout_id}").json()["state"]) != state:
            assert time.monotonic() < deadline, f"still {now}"
            time.sleep(0.1)

    def settled(self, rollout_id: str, timeout_s: float = 60) -> dict:
        """The rollout once it has gone as far as it goes."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            rollout = self.get(f"/v1/rollouts/{rollout_id}").json()
            final = rollout["state"] not in ("pending", "rewarded", "claimed")
            if final and rollout["judge_state"] != "waiting":
                return rollout
            time.sleep(0.2)
        raise AssertionError(f"still {rollout}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


TINY_SETTINGS = (
    "engine.dtype=float32",
    "engine.max_model_len=512",
    "learner.compute_dtype=float32",
    "learner.value_pretraining_rollouts=4",
    "learner.value_pretraining_epochs=1",
    "learner.order=oldest",
    "learner.max_policy_lag=1000",
)
