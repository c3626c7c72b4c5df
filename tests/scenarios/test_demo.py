"""What the demo makes sure of before, while and after an endpoint runs; none is started here."""

import json
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import demo
import pytest

from online_sao.errors import ScenarioError


@contextmanager
def answering(key=None):
    """A server that is ready, to those who have its key; gives its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            allowed = key is None or self.headers.get("Authorization") == f"Bearer {key}"
            self.send_response(200 if allowed else 401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


class Process:
    """A started endpoint: what it says, look by look, of whether it has ended."""

    def __init__(self, *codes):
        self.codes = list(codes)
        self.returncode = None

    def poll(self):
        if len(self.codes) > 1:
            return self.codes.pop(0)
        self.returncode = self.codes[0] if self.codes else None
        return self.returncode

    def terminate(self):
        self.codes = [0]

    def wait(self, timeout):
        return self.codes[0]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No keys, signals as they were, no long waits, and no program is read for its version."""
    for name in ("ONLINE_SAO_API_KEY", "ONLINE_SAO_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(demo, "LOOK_S", 0.05)
    monkeypatch.setattr(demo, "_made_with", lambda preset, options: f"{preset} {options.set}")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Script:
    """In place of the scripts: what each call is to do, and which there were."""

    def __init__(self):
        self.called = []
        self.then = lambda folder: None

    def __call__(self, command, server=None):
        self.called.append((command[1].rpartition("/")[2], command))
        if self.called[-1][0] == "preference_shift.py":
            self.then(demo.Path(command[command.index("--out") + 1]))


@pytest.fixture
def script(monkeypatch):
    made = Script()
    monkeypatch.setattr(demo, "_call", made)
    monkeypatch.setattr(demo, "_wait_ready", lambda url, server: None)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: Process(None))
    return made


@pytest.fixture
def run(tmp_path, free_port, capsys):
    """The demo of one preset: (exit code, what it said)."""

    def finished(*arguments):
        code = demo.main(
            ["--out", str(tmp_path), "--port", str(free_port), "--presets", "sao", *arguments]
        )
        return code, capsys.readouterr().err

    return finished


def write_summary(folder, *, complete, drawn=True):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps({"complete": complete}))
    (folder / "journal.jsonl").unlink(missing_ok=True)
    if not drawn:
        (folder / "journal.jsonl").write_text("{}\n")


def stopped_after(write):
    def then(folder):
        write(folder)
        raise KeyboardInterrupt

    return then


# ---- the port and who answers at it


@pytest.mark.parametrize("more", [(), ("--fresh",)])
def test_a_port_that_is_taken_is_refused_before_anything_is_started_or_gone(
    run, tmp_path, monkeypatch, more
):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    kept = tmp_path / "sao" / "rollouts.csv.gz"
    kept.parent.mkdir()
    kept.write_text("kept")
    with answering() as port:
        code, err = run("--port", str(port), *more)
    assert code == 2
    assert f"demo: Something answers at port {port} already" in err
    assert "choose another port with --port" in err
    assert kept.exists()


def test_a_port_that_is_freed_in_time_is_waited_for(free_port):
    holder = socket.create_server(("127.0.0.1", free_port))
    threading.Timer(0.2, holder.close).start()
    demo._refuse_taken(free_port, 20)
    demo._refuse_taken(free_port)


def test_another_that_answers_for_an_endpoint_that_has_ended_is_noticed():
    with answering() as port, pytest.raises(subprocess.CalledProcessError) as caught:
        demo._wait_ready(f"http://127.0.0.1:{port}", Process(None, 3))
    assert (caught.value.returncode, caught.value.cmd[1]) == (3, "online-sao serve")


def test_an_endpoint_that_ends_in_the_middle_ends_the_scenario(tmp_path):
    asleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(subprocess.CalledProcessError) as caught:
        demo._call(asleep, Process(None, None, 3))
    assert (caught.value.returncode, caught.value.cmd[1]) == (3, "online-sao serve")


@pytest.mark.parametrize(("code", "error"), [(0, None), (4, subprocess.CalledProcessError)])
def test_a_script_is_waited_for(code, error):
    command = [sys.executable, "-c", f"raise SystemExit({code})"]
    if error is None:
        demo._call(command, Process(None))
    else:
        with pytest.raises(error):
            demo._call(command, Process(None))


@pytest.mark.parametrize("variable", ["ONLINE_SAO_API_KEY", "ONLINE_SAO_ADMIN_KEY"])
def test_an_endpoint_with_a_key_is_asked_with_it(monkeypatch, variable):
    monkeypatch.setattr(demo, "START_TIMEOUT_S", 5)
    with answering(key="secret") as port:
        with pytest.raises(ScenarioError, match="refuses the key"):
            demo._wait_ready(f"http://127.0.0.1:{port}", Process(None))
        monkeypatch.setenv(variable, "secret")
        demo._wait_ready(f"http://127.0.0.1:{port}", Process(None))


def test_a_key_that_cannot_be_sent_is_said_at_once(run, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setenv("ONLINE_SAO_API_KEY", "schlüssel")
    code, err = run()
    assert code == 2
    assert "demo: The api key has characters" in err


# ---- what was made before


def test_what_is_finished_is_not_run_again(run, script):
    script.then = lambda folder: write_summary(folder, complete=True)
    assert run()[0] == 0
    code, err = run()
    assert code == 0
    assert "finished earlier" in err
    assert [name for name, _ in script.called] == [
        "preference_shift.py",
        "compare.py",
        "compare.py",
    ]
    code, err = run("--set", "learner.policy_lr=1")
    assert "finished with another program or other settings: it is run again" in err
    assert [name for name, _ in script.called][-2] == "preference_shift.py"


def test_stopped_between_the_last_line_and_the_mark_it_is_finished(run, script):
    script.then = stopped_after(lambda folder: write_summary(folder, complete=True))
    code, err = run()
    assert code == 130
    assert "demo: stopped; the same command goes on from here" in err
    code, err = run()
    assert code == 0
    assert "finished earlier" in err
    assert [name for name, _ in script.called] == ["preference_shift.py", "compare.py"]


@pytest.mark.parametrize(("complete", "drawn"), [(False, False), (False, True), (True, False)])
def test_stopped_before_that_it_goes_on(run, script, tmp_path, complete, drawn):
    script.then = stopped_after(
        lambda folder: write_summary(folder, complete=complete, drawn=drawn)
    )
    run()
    (tmp_path / "sao-endpoint").mkdir()
    script.then = lambda folder: write_summary(folder, complete=True)
    code, err = run()
    assert code == 0
    assert "finished earlier" not in err
    assert (tmp_path / "sao-endpoint").exists()
    assert "finished earlier" in run()[1]


def test_stopped_after_fresh_it_is_told_to_go_on_without(run, script, tmp_path):
    old = [tmp_path / name / "old" for name in ("sao", "sao-endpoint", "rm", "rm-endpoint")]
    for path in old:
        path.mkdir(parents=True)
    script.then = stopped_after(lambda folder: write_summary(folder, complete=False, drawn=False))
    code, err = run("--presets", "sao", "rm", "--fresh")
    assert code == 130
    assert "demo: stopped; the same command without --fresh goes on from here" in err
    # Of all presets: without --fresh an old result of the second would count as finished.
    assert not any(path.exists() for path in old)
    assert (tmp_path / "sao" / "journal.jsonl").exists()


def test_a_script_that_failed_after_fresh_is_not_forgotten_either(run, script):
    def fail(folder):
        raise subprocess.CalledProcessError(2, [sys.executable, "scenarios/preference_shift.py"])

    script.then = fail
    code, err = run("--fresh")
    assert code == 2
    assert "demo: preference_shift.py ended with exit code 2." in err
    assert "the same command without --fresh goes on from here" in err
