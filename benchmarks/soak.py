"""Does anything grow? Many requests at a tiny model, with learning on; memory of every process.

    python benchmarks/soak.py [--requests 2000] [--out soak.json]

Starts `online-sao serve` as a user does, on 127.0.0.1, asks, and samples the resident memory of
each process and what lies in /dev/shm every `--every` requests; no more than that many answers wait
to be learned from, so that learning keeps step. Prints, per process, the first and last sample
and the slope by least squares over the second half: what a start-up needs is behind it then.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import psutil
from servers import free_port, status

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tiny import make_tiny_model  # noqa: E402

from online_sao.progress import make_progress  # noqa: E402

CONCURRENCY = 8
READY_S = 300
SETTINGS = (
    "engine.dtype=float32",
    "engine.max_model_len=512",
    "engine.kv_cache_gib=0.25",
    "learner.compute_dtype=float32",
    "learner.value_pretraining_rollouts=4",
    "learner.max_policy_lag=100000",
    "learner.checkpoint_every=200",
    "guards.action=warn",  # a model of random weights learns to stop at once, and that is noticed
)
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50, help="requests between two samples")
    parser.add_argument("--limit-s", type=float, default=3600, help="ask and wait no longer")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = soak(Path(folder), args.requests, args.every, args.limit_s)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))
    print_report(report)


def soak(folder: Path, num_requests: int, every: int, limit_s: float) -> dict:
    model = make_tiny_model(folder / "tiny-llama")
    port = free_port()
    command = [sys.executable, "-m", "online_sao.cli", "serve", "--model", str(model)]
    command += ["--run-dir", str(folder / "run"), "--port", str(port)]
    command += [part for setting in SETTINGS for part in ("--set", setting)]
    log = (folder / "log").open("wb")
    environment = {**os.environ, "ONLINE_SAO_HOME": str(folder / "home")}
    serve = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(lambda: status(f"{url}/ready") == 200, READY_S, serve, folder / "log")
        client = httpx.Client(
            base_url=url, timeout=300, limits=httpx.Limits(max_connections=CONCURRENCY)
        )
        samples, statuses, started = [_sample(serve.pid, 0)], [], time.monotonic()

        def ask(number: int) -> int:
            body = {
                "model": model.name,
                "messages": [{"role": "user", "content": f"Write about rain {number}."}],
                "max_tokens": 12,
            }
            return client.post("/v1/chat/completions", json=body).status_code

        def queue() -> dict[str, int]:
            learning = client.get("/v1/learning").json()
            if learning["paused"]:
                raise SystemExit(f"learning was paused: {learning['pause_reason']}")
            return learning["queue"]

        def waiting() -> int:
            states = queue()
            return sum(states.get(state, 0) for state in ("pending", "rewarded", "claimed"))

        def is_late() -> bool:
            return time.monotonic() - started > limit_s

        with ThreadPoolExecutor(CONCURRENCY) as pool, make_progress() as bar:
            task = bar.add_task("soak", total=num_requests)
            for start in range(0, num_requests, every):
                if is_late():
                    break
                numbers = range(start, min(start + every, num_requests))
                statuses += pool.map(ask, numbers)
                _wait(lambda: waiting() <= every or is_late(), limit_s, serve, folder / "log")
                samples.append(_sample(serve.pid, len(statuses)))
                bar.update(task, completed=len(statuses))
        _wait(lambda: not waiting() or is_late(), limit_s + 60, serve, folder / "log")
        return {
            "requests": len(statuses),
            "answered": statuses.count(200),
            "states": queue(),
            "seconds": time.monotonic() - started,
            "samples": samples,
        }
    finally:
        serve.send_signal(signal.SIGINT)
        serve.wait(120)
        log.close()


def print_report(report: dict) -> None:
    states = ", ".join(f"{count} {state}" for state, count in report["states"].items() if count)
    answered = f"{report['answered']} of {report['requests']} answered"
    print(f"{answered} in {report['seconds']:.0f} s: {states}")
    print(f"{'process':<28} {'first MiB':>9} {'last MiB':>9} {'MiB / 1000 requests':>20}")
    samples = report["samples"]
    names = [n for n in samples[-1]["mib"] if all(n in s["mib"] for s in samples)]
    for name in sorted(names, key=lambda n: -samples[-1]["mib"][n]):
        series = [sample["mib"][name] for sample in samples]
        print(f"{name:<28} {series[0]:9.1f} {series[-1]:9.1f} {_slope(samples, series):20.2f}")


def _slope(samples: list[dict], series: list[float]) -> float:
    """MiB per 1000 requests over the second half."""
    half = len(samples) // 2
    at = [sample["requests"] / 1000 for sample in samples[half:]]
    return float(np.polyfit(at, series[half:], 1)[0])


def _sample(pid: int, requests: int) -> dict:
    mib: dict[str, float] = {}
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            name, rss = _role(process), process.memory_info().rss / MIB
        except psutil.Error:
            continue
        mib[name] = mib.get(name, 0.0) + rss
    usage = [f.stat().st_blocks * 512 for f in Path("/dev/shm").rglob("*") if f.is_file()]
    mib["/dev/shm (whole machine)"] = sum(usage) / MIB
    return {"requests": requests, "mib": mib}


def _role(process: psutil.Process) -> str:
    """The same for the same job, so that idle workers that come and go add up."""
    command = process.cmdline()
    first = Path(command[0]).name if command else process.name()
    if first.startswith(("ray::", "VLLM::")):
        return " ".join(command).split("(")[0][:28]
    if "online_sao.cli" in command:
        return "driver"
    script = next((Path(part).name for part in command[1:] if part.endswith(".py")), "")
    return (script or first)[:28]


def _wait(condition, timeout_s: float, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"gave up:\n{log.read_text()[-3000:]}")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
