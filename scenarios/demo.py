"""The whole project in one go, on this machine: two methods, one preference shift, a table.

    make demo          or      python scenarios/demo.py --help

For SAO, then for the running mean: starts a real endpoint from the same start weights, runs
preference_shift against it over HTTP, stops it. Then sets both side by side. What an earlier
demo finished is not run again; a changed program or setting is (give --fresh to force it).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import live

from online_sao.errors import OnlineSAOError, ScenarioError

ROOT = Path(__file__).resolve().parent.parent
PRESETS = ("sao", "running_mean")
PHASE_ROLLOUTS = 80
START_TIMEOUT_S = 900
STOP_TIMEOUT_S = 150
LOOK_S = 1.0  # between looks at whether the endpoint still runs
FREED_WITHIN_S = 30.0  # an endpoint of ours that has ended may hold its port for a moment

# A simulation takes rollouts in order, learns from each, and needs no way back.
SIMULATION = (
    "learner.order=oldest",
    "learner.max_policy_lag=64",
    "learner.checkpoint_every=0",
    "guards.probe_every=0",  # the scenario asks about held-out topics itself
    "learner.publish_every=4",  # the four that were asked at once: nobody asks in between
)


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    # Both end the endpoint too; a shell starts background jobs with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: _raise_interrupt())
    out = Path(options.out).absolute()
    started = time.monotonic()
    again = "the same command"
    try:
        live.check_keys(*_keys())
        if options.fresh:
            _refuse_taken(options.port)  # before anything is gone
            for preset in options.presets:
                _forget(preset, out)
            # All of it, and only now: what is made from here on is worth keeping.
            again = "the same command without --fresh"
        for number, preset in enumerate(options.presets, start=1):
            _say(f"[{number}/{len(options.presets)}] {preset}")
            _run_preset(preset, out, options, is_first=number == 1)
        _say("comparing")
        folders = [str(out / preset) for preset in options.presets]
        _call([sys.executable, "scenarios/compare.py", *folders, "--out", str(out / "comparison")])
    except KeyboardInterrupt:
        _say(f"demo: stopped; {again} goes on from here")
        return 130
    except OnlineSAOError as error:
        _say(f"demo: {error}")
        return 2
    except subprocess.CalledProcessError as error:
        _say(
            f"demo: {Path(str(error.cmd[1])).name} ended with exit code {error.returncode}. When "
            f"the cause is gone, {again} goes on from here."
        )
        return 2
    _say(
        f"done in {(time.monotonic() - started) / 60:.0f} minutes; figures in {out / 'comparison'}"
    )
    _say(_what_next(options, out))
    return 0


def _run_preset(preset: str, out: Path, options: argparse.Namespace, *, is_first: bool) -> None:
    """One endpoint from the start weights, one scenario against it."""
    folder, run_dir = out / preset, out / f"{preset}-endpoint"
    made_with = _made_with(preset, options)
    finished = _finished_with(folder)
    if finished == made_with:
        _say(f"finished earlier: {folder} (--fresh runs it again)")
        return
    _refuse_taken(options.port, 0.0 if is_first else FREED_WITHIN_S)
    if finished is not None:
        _say(f"{folder} was finished with another program or other settings: it is run again")
        _forget(preset, out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "begun").write_text(made_with)
    url = f"http://127.0.0.1:{options.port}"
    serve = [sys.executable, "-m", "online_sao.cli", "serve", "--preset", preset]
    serve += ["--port", str(options.port), "--run-dir", str(run_dir), "--seed", str(options.seed)]
    for setting in (*SIMULATION, *options.set):
        serve += ["--set", setting]
    # In its own process group, so that Ctrl-C reaches it once, from us.
    server = subprocess.Popen(serve, cwd=ROOT, start_new_session=True)
    try:
        _wait_ready(url, server)
        scenario = [sys.executable, "scenarios/preference_shift.py", "--url", url]
        scenario += ["--preset", preset, "--out", str(folder), "--seed", str(options.seed)]
        scenario += ["--phase-rollouts", str(options.phase_rollouts)]
        scenario += ["--heldout-every", str(options.heldout_every)]
        scenario += ["--heldout-answers", str(options.heldout_answers)]
        _call(scenario, server)
        (folder / "begun").rename(folder / "finished")
    finally:
        _stop(server)
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)  # over 2 GiB, and of no more use


def _forget(preset: str, out: Path) -> None:
    shutil.rmtree(out / preset, ignore_errors=True)
    shutil.rmtree(out / f"{preset}-endpoint", ignore_errors=True)


def _finished_with(folder: Path) -> str | None:
    """What the finished run in `folder` was made with; None if there is none.

    One that was stopped after its last line was written, and before we heard of it, counts: the
    scenario would refuse to run over it.
    """
    if (folder / "finished").is_file():
        return (folder / "finished").read_text()
    begun, summary = folder / "begun", folder / "summary.json"
    if not (begun.is_file() and summary.is_file()) or (folder / "journal.jsonl").exists():
        return None
    return begun.read_text() if json.loads(summary.read_text("utf-8"))["complete"] else None


def _made_with(preset: str, options: argparse.Namespace) -> str:
    """All that a run's numbers depend on, as text to compare."""
    from online_sao.offline import method_version  # torch is imported with it

    lengths = [options.phase_rollouts, options.heldout_every, options.heldout_answers]
    about = [method_version(), preset, options.seed, *lengths, *SIMULATION, *options.set]
    return json.dumps(about)


def _call(command: list[str], server: subprocess.Popen[bytes] | None = None) -> None:
    """Run a script to its end; interrupted, let it write what it has before we go on.

    So it is when the endpoint that it needs, `server`, has ended.
    """
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(LOOK_S if server else None)
                break
            if server:
                _need_running(server)
    except BaseException:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
        raise
    if code:
        raise subprocess.CalledProcessError(code, command)


def _refuse_taken(port: int, patience_s: float = 0.0) -> None:
    """ScenarioError if something listens at `port`: we would measure that, and not our own."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=LOOK_S).close()
        except (OSError, OverflowError):  # nothing there, or a number that is no port
            return
        if time.monotonic() >= deadline:
            raise ScenarioError(
                f"Something answers at port {port} already, an endpoint that was left running "
                "perhaps. End it, or choose another port with --port."
            )
        time.sleep(LOOK_S)


def _need_running(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is not None:
        raise subprocess.CalledProcessError(server.returncode, ["", "online-sao serve"])


def _wait_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    """Returns when the endpoint is ready, asked with the keys that it was started with."""
    api_key, admin_key = _keys()
    key = api_key or admin_key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        _need_running(server)
        with contextlib.suppress(httpx.HTTPError):
            status = httpx.get(f"{url}/ready", headers=headers, timeout=10).status_code
            if status == 200:
                _need_running(server)  # else another has answered in its place
                return
            if status in (401, 403):
                raise ScenarioError(
                    f"What answers at {url} refuses the key that our endpoint was started with, so "
                    "it is another. End it, or choose another port with --port."
                )
        time.sleep(LOOK_S)
    raise subprocess.CalledProcessError(1, ["", "online-sao serve (not ready in time)"])


def _keys() -> tuple[str | None, str | None]:
    """The endpoint that we start finds the same ones."""
    return os.environ.get("ONLINE_SAO_API_KEY"), os.environ.get("ONLINE_SAO_ADMIN_KEY")


def _stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _what_next(options: argparse.Namespace, out: Path) -> str:
    store = out / f"{options.presets[0]}-endpoint"
    return f"""
Look at the learned drift:     online-sao dashboard --run-dir {store}
Serve and learn yourself:      make serve
  then, with curl:             curl -s http://127.0.0.1:8000/v1/chat/completions \\
                                 -H 'Content-Type: application/json' \\
                                 -d '{{"messages": [{{"role": "user", "content": "Rain."}}]}}'
  or with the openai client:   OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
(the command online-sao lies in {os.path.relpath(Path(sys.executable).parent)})"""


def _raise_interrupt() -> None:
    raise KeyboardInterrupt


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Serve, learn, switch the preference twice, and compare SAO with the running "
        "mean, from the same start weights."
    )
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), help="default: %(default)s")
    parser.add_argument("--phase-rollouts", type=int, default=PHASE_ROLLOUTS, metavar="N")
    parser.add_argument("--heldout-every", type=int, default=40, metavar="N")
    parser.add_argument("--heldout-answers", type=int, default=24, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8199)
    parser.add_argument("--out", default=str(ROOT / "runs" / "demo"), metavar="DIR")
    parser.add_argument("--fresh", action="store_true", help="forget what was finished earlier")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
