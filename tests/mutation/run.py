"""Mutation check: for each deliberate fault of faults.py at least one test must fail.

    python tests/mutation/run.py            all faults
    python tests/mutation/run.py bridge     only those with "bridge" in their name
    python tests/mutation/run.py --faults other.py

Works on a copy of the repository. The tests are first run on the copy as it is, and must
pass; then once for each fault, up to the first failure. A fault counts as caught only if a
test ran and failed, not if the tests could not be collected.

Exit status: 0 all caught; 1 some were not; 2 the check itself is broken (a fault that does
not match exactly once, tests that fail without a fault or cannot run).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import runpy
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "node_modules", "build", "dist", "mutation", "shared"
)
PRELOADED = (
    "torch",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "tokenizers",
    "safetensors.torch",
    "sqlalchemy",
    "pydantic",
    "filelock",
)
TEST_TIMEOUT_S = 300
RUN_TIMEOUT_S = 900  # the run without a fault takes a minute where nothing else runs


class BrokenCheck(Exception):
    """The check cannot say anything about the tests."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation check of the tests.")
    parser.add_argument("names", nargs="*", help="parts of the names of the faults to try")
    parser.add_argument("--faults", default=Path(__file__).with_name("faults.py"), type=Path)
    arguments = parser.parse_args()
    chosen = [
        fault
        for fault in runpy.run_path(str(arguments.faults))["FAULTS"]
        if not arguments.names or any(name in fault.name for name in arguments.names)
    ]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
        try:
            num_caught = check(chosen, copy)
        except BrokenCheck as error:
            print(f"the check is broken: {error}", file=sys.stderr)
            return 2
    print(f"in {time.monotonic() - started:.0f} s")
    print(f"{len(chosen)} faults, {num_caught} caught")
    return 0 if num_caught == len(chosen) else 1


def check(faults: list, copy: Path) -> int:
    """Print a line per fault; return how many were caught."""
    if not faults:
        raise BrokenCheck("there is no such fault")
    mutants = [mutant(fault, copy) for fault in faults]
    all_tests = sorted({test for fault in faults for test in fault.tests})
    failed = first_failure(all_tests, copy, keep_bytecode=True)
    if failed:
        raise BrokenCheck(f"without any fault, {failed} fails")
    width = max(len(fault.name) for fault in faults)
    print(f"{'fault':{width}} | caught by")
    print(f"{'-' * width}-|-{'-' * 40}")
    num_caught = 0
    for fault, text in zip(faults, mutants, strict=True):
        path = copy / fault.file
        original = path.read_text()
        path.write_text(text)
        # Bytecode is matched by size and second, and a mutant may share both.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
        caught_by = first_failure(list(fault.tests), copy)
        path.write_text(original)
        num_caught += caught_by is not None
        print(f"{fault.name:{width}} | {caught_by or 'NOTHING'}", flush=True)
    return num_caught


def mutant(fault, copy: Path) -> str:
    """The text of the file with the fault in it."""
    text = (copy / fault.file).read_text()
    if text.count(fault.old) != 1 or fault.new == fault.old:
        raise BrokenCheck(
            f"'{fault.name}' must change what occurs once in {fault.file}, "
            f"but it occurs {text.count(fault.old)} times: {fault.old!r}"
        )
    return text.replace(fault.old, fault.new)


def first_failure(tests: list[str], copy: Path, keep_bytecode: bool = False) -> str | None:
    """Run the tests in the copy; the id of the first that fails, or None if all pass."""
    report = copy.parent / "report.json"
    report.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(
        target=_run_tests, args=(tests, copy, report, keep_bytecode)
    )
    process.start()
    process.join(RUN_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()
        raise BrokenCheck(f"{tests} took longer than {RUN_TIMEOUT_S} s")
    log = report.with_suffix(".log")
    if not report.exists():
        raise BrokenCheck(f"{tests} could not be run:\n{log.read_text()[-3000:]}")
    result = json.loads(report.read_text())
    if result["exit_code"] == 0:
        return None
    if result["exit_code"] == 1 and result["failed"]:
        return result["failed"]
    raise BrokenCheck(f"{tests} could not be run:\n{log.read_text()[-3000:]}")


class _FirstFailure:
    """A pytest plugin that notes the first test that failed while it ran."""

    failed: str | None = None

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed and report.when == "call" and self.failed is None:
            self.failed = report.nodeid


def _run_tests(tests: list[str], copy: Path, report: Path, keep_bytecode: bool) -> None:
    with report.with_suffix(".log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(copy)
    os.environ.update(HYPOTHESIS_PROFILE="few", PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = not keep_bytecode
    # The copy in place of this script's folder, and before the installed package.
    sys.path[0] = str(copy)
    package = importlib.import_module("online_sao")
    if not Path(package.__file__).is_relative_to(copy):
        raise BrokenCheck(f"the tests would run on {package.__file__}")
    plugin = _FirstFailure()
    options = ["-x", "-q", "-p", "no:cacheprovider", "-o", f"timeout={TEST_TIMEOUT_S}"]
    options += ["-W", "ignore:Module already imported"]
    exit_code = pytest.main([*options, *tests], plugins=[plugin])
    report.write_text(json.dumps({"exit_code": int(exit_code), "failed": plugin.failed}))


def preload() -> None:
    """Import here, once, what every run needs: it takes longer than most runs.

    The runs are forks of this process. Nothing of the repository may be among it.
    """
    for module in PRELOADED:
        importlib.import_module(module)
    for plugin in importlib.metadata.entry_points(group="pytest11"):
        plugin.load()
    gc.freeze()


if __name__ == "__main__":
    preload()
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # what was preloaded has much to say about an ordered end
