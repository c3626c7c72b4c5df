"""Runs the mutation check, and checks that it can fail."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")
STATISTICS = "online_sao/algorithm/statistics.py"


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(RUN), *map(str, arguments)], capture_output=True, text=True
    )


def test_every_fault_is_one_of_todays_code():
    """Quick, so that a change that leaves a fault behind is seen before the long check."""
    check = runpy.run_path(str(RUN))
    faults = runpy.run_path(str(RUN.with_name("faults.py")))["FAULTS"]
    assert len(faults) >= 16
    for fault in faults:
        check["mutant"](fault, check["ROOT"])


@pytest.mark.long
@pytest.mark.timeout(1800)  # minutes on two cores: a pytest run for each fault
def test_every_fault_is_caught():
    result = run()
    assert result.returncode == 0, result.stdout + result.stderr
    num_faults, num_caught = re.fullmatch(
        r"(\d+) faults, (\d+) caught", result.stdout.splitlines()[-1]
    ).groups()
    assert num_faults == num_caught
    assert int(num_faults) >= 16


@pytest.mark.parametrize(
    ("old", "new", "exit_status", "says"),
    [
        # changes nothing that a test could see
        ("x.masked_fill(~mask, 0.0).sum()", "x.masked_fill(~mask, 0).sum()", 1, "NOTHING"),
        ("there is no such text", "anything", 2, "occurs 0 times"),
        ("mask", "mask_", 2, "occurs"),  # more than once
        # a mutant that cannot be imported shows nothing about the tests
        ("def masked_sum(", "def masked_sum((", 2, "could not be run"),
    ],
    ids=["harmless", "stale", "ambiguous", "broken"],
)
def test_the_check_can_fail(tmp_path, old, new, exit_status, says):
    faults = tmp_path / "faults.py"
    test = "tests/algorithm/test_statistics.py"
    faults.write_text(
        "from types import SimpleNamespace\n"
        f"FAULTS = [SimpleNamespace(name='fault', file={STATISTICS!r}, old={old!r}, "
        f"new={new!r}, tests=({test!r},))]\n"
    )
    result = run("--faults", faults)
    assert result.returncode == exit_status
    assert says in result.stdout + result.stderr
    if exit_status == 1:
        assert result.stdout.splitlines()[-1] == "1 faults, 0 caught"
