"""Makes the scripts and the fake endpoint importable, and runs the scripts as users do."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPTS = HERE.parents[1] / "scenarios"
for folder in (HERE, SCRIPTS):
    sys.path.insert(0, str(folder))

import compare  # noqa: E402
import live  # noqa: E402
from fake_endpoint import FakeEndpoint, served  # noqa: E402


@pytest.fixture
def fake() -> FakeEndpoint:
    return FakeEndpoint()


@pytest.fixture
def url(fake: FakeEndpoint):
    with served(fake) as address:
        yield address


@pytest.fixture
def command() -> Callable[..., list[str]]:
    """The command line of a script; short phases and quick looks unless said otherwise."""

    def made(script: str, *arguments: object) -> list[str]:
        return [sys.executable, str(SCRIPTS / script), *map(str, arguments)]

    return made


@pytest.fixture
def start(command, tmp_path):
    """Start a script in a folder of its own; ended with the test if it still runs."""
    started: list[subprocess.Popen] = []

    def begin(script: str, *arguments: object, **environment: str) -> subprocess.Popen:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("ONLINE_SAO_")}
        process = subprocess.Popen(
            command(script, *arguments),
            cwd=tmp_path,
            env={**kept, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def run(start):
    """Run a script to its end: (exit code, standard output, standard error)."""

    def finished(script: str, *arguments: object, **environment: str) -> tuple[int, str, str]:
        process = start(script, *arguments, **environment)
        out, err = process.communicate(timeout=180)
        return process.returncode, out, err

    return finished


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Like `run`, in this process: the start of another one costs more than such a run."""

    def finished(script: str, *arguments: object, **environment: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        for name in ("ONLINE_SAO_API_KEY", "ONLINE_SAO_ADMIN_KEY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", [script])
        capsys.readouterr()
        main = {"live.py": live.main, "compare.py": compare.main}[script]
        code = main([str(argument) for argument in arguments])
        shown, err = capsys.readouterr()
        return code, shown, err

    return finished
