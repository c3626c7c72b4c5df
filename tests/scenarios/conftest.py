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
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    return finished
