"""How long the dashboard's pages take on a large store.

    python benchmarks/dashboard_pages.py sqlite:////tmp/large.sqlite --rollouts 1000000

The store is generated if it is not there (tests/dashboard/generate.py: a preference shift, as
many versions as rollouts; a million take some five minutes and 3.1 GB). Pages are rendered by
streamlit's own test harness: the script and its queries run as they do for a viewer, and what
a browser then draws is not counted. Each time is the middle one of several. Figures:
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from streamlit.testing.v1 import AppTest

from dashboard.queries import Filters, StoreReader

ROOT = Path(__file__).parents[1]
PAGES = ("Live", "Learning health", "Rollouts", "Versions", "Controls")
RANGES = {"Live": "live_range", "Learning health": "health_range"}
NOBODY = "http://127.0.0.1:9"  # the service is down: its answer is not what is measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", help="database URL; generated if there is none")
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    reader = StoreReader(arguments.store)
    if not reader.is_there():
        started = time.monotonic()
        _generator().generate(arguments.store, arguments.rollouts)
        print(f"generated in {time.monotonic() - started:.0f} s", file=sys.stderr)
    print(f"{reader.num_rollouts():,} rollouts, {reader.versions(1)['version'][0]:,} versions\n")
    print("| page | first, s | again, s | all rollouts, s |\n|---|---|---|---|")
    sys.argv = ["app.py", "--store", arguments.store, "--url", NOBODY, "--runs", "none"]
    _page("Runs").run()  # the harness and the libraries are loaded
    for page in PAGES:
        print(f"| {page} | {' | '.join(_times(page, arguments.repeat))} |", flush=True)
    print("\n| query | s |\n|---|---|")
    for name, query in _queries(reader).items():
        print(f"| {name} | {_middle(query, arguments.repeat):.2f} |", flush=True)


def _page(name: str) -> AppTest:
    page = AppTest.from_file(str(ROOT / "dashboard" / "app.py"), default_timeout=120)
    page.query_params["page"] = name
    return page


def _times(name: str, repeat: int) -> list[str]:
    page = _page(name)
    first = _seconds(page.run)
    if page.exception or page.error:
        raise SystemExit(f"{name}: {page.exception or page.error}")
    again = _middle(page.run, repeat)
    if name not in RANGES:
        return [f"{first:.2f}", f"{again:.2f}", ""]
    page.button_group(key=RANGES[name]).set_value("all")
    page.run()
    return [f"{first:.2f}", f"{again:.2f}", f"{_middle(page.run, repeat):.2f}"]


def _queries(reader: StoreReader) -> dict[str, Callable[[], object]]:
    """What a filter or a comparison asks, where no index gives the answer away."""
    newest = int(reader.versions(1)["version"][0])
    return {
        "a text that no answer has": lambda: reader.rollouts(Filters(text="no such words")),
        "a session that is not there": lambda: reader.rollouts(Filters(session="none")),
        "a reward between 0 and 1 (none has one)": lambda: reader.rollouts(
            Filters(reward="between")
        ),
        "what the first version wrote": lambda: reader.rollouts(Filters(version=0)),
        "what the newest version wrote": lambda: reader.rollouts(Filters(version=newest)),
        "states and reasons": reader.states,
        "two versions on the same questions": lambda: reader.same_prompts(newest // 2, newest),
    }


def _middle(work: Callable[[], object], repeat: int) -> float:
    return statistics.median(_seconds(work) for _ in range(repeat))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _generator() -> ModuleType:
    path = ROOT / "tests" / "dashboard" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
