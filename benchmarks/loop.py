"""Trained rollouts per minute, end to end, for several splits of the cores.

    python benchmarks/loop.py [--requests 24] [--splits 1x2 1x1 2x2] [--out loop.json]

A split ExL gives the engine E threads and the learner L. For each, `online-sao serve` is started
and `scenarios/live.py` lets four users ask at once, as in the reward-shift experiment; then the
same requests are played in one process (`online-sao train`), with one and with all threads, and
with one thread per core in as many processes. The clock runs from the first wave's last outcome
to the last rollout's, so starts do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from servers import free_port, running

from online_sao.progress import make_progress
from online_sao.scenario import read_results

ROOT = Path(__file__).parents[1]
SCENARIO = ROOT / "scenarios" / "single_preference.toml"
WAVE = 4  # requests at once, in the scenario
PRETRAINING = ("--set", "learner.value_pretraining_rollouts=8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--splits", nargs="+", default=["1x2", "1x1", "2x1", "2x2"])
    parser.add_argument("--presets", nargs="+", default=["sao", "running_mean"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    rows = []
    with tempfile.TemporaryDirectory() as name, make_progress() as bar:
        folder = Path(name)
        task = bar.add_task("loop", total=len(args.presets) * (len(args.splits) + 3))
        for preset in args.presets:
            for split in args.splits:
                bar.update(task, description=f"{preset}, live, {split}")
                rate = live(folder, preset, split, args.requests)
                rows.append({"preset": preset, "how": "live", "threads": split, "rate": rate})
                bar.advance(task)
            for threads in (1, len(cores)):
                bar.update(task, description=f"{preset}, one process, {threads} threads")
                rate = offline(folder, preset, [cores[:threads]], args.requests)
                rows.append(
                    {"preset": preset, "how": "one process", "threads": threads, "rate": rate}
                )
                bar.advance(task)
            rate = offline(folder, preset, [[core] for core in cores], args.requests)
            how = f"{len(cores)} processes"
            rows.append({"preset": preset, "how": how, "threads": 1, "rate": rate})
            bar.advance(task)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    print("| preset | how | threads | trained rollouts per minute |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['preset']} | {row['how']} | {row['threads']} | {row['rate']:.1f} |")


def live(folder: Path, preset: str, split: str, requests: int) -> float:
    """`split` is engine threads x learner threads."""
    engine, learner = split.split("x")
    port, run = free_port(), folder / f"live-{preset}-{split}"
    url = f"http://127.0.0.1:{port}"
    serve = [sys.executable, "-m", "online_sao.cli", "serve", "--port", str(port)]
    serve += ["--run-dir", str(run), "--preset", preset, *PRETRAINING]
    serve += ["--set", f"engine.threads={engine}", "--set", f"learner.threads={learner}"]
    serve += ["--set", "learner.order=oldest", "--set", "guards.probe_every=0"]
    drive = [sys.executable, str(ROOT / "scenarios" / "live.py"), str(SCENARIO), "--url", url]
    drive += ["--phase-rollouts", str(requests), "--heldout-every", "0", "--final-answers", "1"]
    with running(serve, folder / "serve.log", f"{url}/ready", {}):
        _quietly([*drive, "--out", str(run / "results")], folder / "drive.log")
    rate = rollouts_per_minute(run / "results")
    shutil.rmtree(run)
    return rate


def offline(folder: Path, preset: str, cores: list[list[int]], requests: int) -> float:
    """One run per entry of `cores`, at the same time, each on those cores; their rates' sum."""
    runs = []
    for number, mine in enumerate(cores):
        out = folder / f"offline-{preset}-{number}"
        command = [sys.executable, "-m", "online_sao.cli", "train", "--scenario", str(SCENARIO)]
        command += ["--presets", preset, "--seeds", str(number), "--out", str(out), *PRETRAINING]
        command += ["--phase-rollouts", str(requests), "--heldout-answers", "1"]
        log = (folder / f"offline-{number}.log").open("wb")
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            preexec_fn=lambda mine=mine: os.sched_setaffinity(0, mine),
        )
        runs.append((process, out, number))
    rate = 0.0
    for process, out, number in runs:
        if process.wait(1800):
            raise SystemExit((folder / f"offline-{number}.log").read_text()[-3000:])
        rate += rollouts_per_minute(out / f"{preset}-seed{number}")
        shutil.rmtree(out)
    return rate


def rollouts_per_minute(folder: Path) -> float:
    at = sorted(row["elapsed_s"] for row in read_results(folder).rows)
    return 60 * (len(at) - WAVE) / (at[-1] - at[WAVE - 1])


def _quietly(command: list[str], log: Path) -> None:
    with log.open("wb") as stream:
        if subprocess.run(command, stdout=stream, stderr=stream, cwd=ROOT, timeout=1800).returncode:
            raise SystemExit(log.read_text()[-3000:])


if __name__ == "__main__":
    main()
