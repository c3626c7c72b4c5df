"""Sets finished runs of one scenario side by side: presets against each other, over seeds.

    python scenarios/compare.py runs/preference_shift --out runs/compared

takes result folders, or folders that contain some. It prints a table and writes it as
comparison.md, the numbers as comparison.json, and the figures: figure_5a.png (styles of the
held-out answers, one panel a preset), figure_5b.png (reward, one line a preset with a band
over its seeds) and figure_4.png (explained variance, critic gradient norm, masked tokens).

Numbers over several seeds are medians with the quartiles in brackets. "never" counts as
longer than any number of rollouts.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from online_sao.errors import OnlineSAOError, ScenarioError
from online_sao.scenario import Results, differing_settings, has_window, read_results

NEVER = math.inf
MADE_ALIKE = {"method_version": "code", "lag": "lag", "judge": "judge"}
"""What all runs of a comparison must share (of their summaries), beside the definition."""
MAY_DIFFER = {"seed", "claim"}
"""In definitions. Nothing else: `heldout.every` too says where an update is made of what waits,
and so what was learned, and of another number of held-out answers a median says less."""
MADE_DIFFERENTLY = {
    "start_weights": "The runs began from start weights of more than one making: the warm start is "
    "done on each machine, and rounds as its CPU does.",
    "dtype": "Not all runs computed in the same dtypes.",
}
"""What runs of a comparison need not share, and is said. Older folders do not tell."""


def collect(places: Sequence[Path], scenario: str | None = None) -> dict[str, list[Results]]:
    """The finished runs in these folders: preset to its runs by seed.

    ScenarioError if there is none, or if they cannot be compared.
    """
    folders = sorted({found for place in places for found in _result_folders(place)})
    if not folders:
        listed = ", ".join(str(place) for place in places)
        raise ScenarioError(f"There is no result folder (with a summary.json) in {listed}.")
    every = [read_results(folder) for folder in folders]
    names = sorted({results.scenario.name for results in every})
    if scenario is None and len(names) > 1:
        raise ScenarioError(
            f"The folders hold runs of several scenarios ({', '.join(names)}); choose one with "
            "--scenario."
        )
    wanted = scenario or names[0]
    every = [results for results in every if results.scenario.name == wanted]
    if not every:
        raise ScenarioError(f"There is no run of scenario {wanted}; there are {', '.join(names)}.")
    finished = [results for results in every if results.summary["complete"]]
    if not finished:
        raise ScenarioError(f"None of the {len(every)} runs of {wanted} is finished.")
    first = finished[0]
    runs: dict[str, list[Results]] = {}
    for results in finished:
        found = differing_settings(_definition(first), _definition(results))
        if differing := [name for name in found if name not in MAY_DIFFER]:
            raise ScenarioError(
                f"The definitions of {results.folder} and {first.folder} differ in "
                f"{', '.join(differing)}; compare runs of one definition and length."
            )
        for name, what in MADE_ALIKE.items():
            if results.summary.get(name) != first.summary.get(name):
                raise ScenarioError(
                    f"{results.folder} and {first.folder} were made with another {what}; run "
                    "one of them anew."
                )
        group = runs.setdefault(results.preset, [])
        # Older result folders, and those of live runs, do not have it.
        settings = {r.summary.get("settings_id") for r in (*group, results)} - {None}
        if len(settings) > 1:
            raise ScenarioError(
                f"{results.folder} was made with other settings than the other runs of preset "
                f"{results.preset}; compare seeds of the same settings."
            )
        if any(other.seed == results.seed for other in group):
            raise ScenarioError(
                f"Two runs have preset {results.preset} and seed {results.seed}: {results.folder} "
                "is one of them."
            )
        group.append(results)
    for group in runs.values():
        group.sort(key=lambda results: results.seed)
    # The method itself first, then as listed.
    return dict(sorted(runs.items(), key=lambda item: (not item[0].startswith("sao"), item[0])))


def _definition(results: Results) -> dict[str, Any]:
    """With what an older folder does not tell, at its default."""
    return results.scenario.model_dump(mode="json", by_alias=True)


def _result_folders(place: Path) -> list[Path]:
    if (place / "summary.json").exists():
        return [place]
    return [path.parent for path in place.rglob("summary.json")]


def compare(runs: dict[str, list[Results]]) -> dict[str, Any]:
    """All numbers of the comparison, over seeds, ready for JSON."""
    first = next(iter(runs.values()))[0]
    window = first.scenario.thresholds.window
    presets = {}
    for name, group in runs.items():
        phases = []
        for number, phase in enumerate(first.scenario.phases):
            mine = [results.summary["phases"][number] for results in group]
            phases.append(
                {
                    "name": phase.name,
                    "style": mine[0]["style"],
                    "mean_reward": spread([p["mean_reward"] for p in mine]),
                    "last_mean": spread([p["last_mean"] for p in mine]),
                    "rollouts_to_mark": spread_to_mark(
                        [p["rollouts_to_mark"] for p in mine if has_window(p, window)]
                    ),
                    "preferred_share": spread(
                        [p["heldout"] and p["heldout"]["preferred_share"] for p in mine]
                    ),
                    "heldout_answers": sum(p["heldout"]["answers"] for p in mine if p["heldout"]),
                    "quality": spread([p["quality"] for p in mine]),
                    "audiences": {
                        audience.name: spread([p["audiences"][audience.name] for p in mine])
                        for audience in phase.audiences
                    },
                }
            )
        presets[name] = {
            "seeds": [results.seed for results in group],
            "folders": [str(results.folder) for results in group],
            "mean_reward": spread([r.summary["mean_reward"] for r in group]),
            "masked_fraction": spread([r.summary["masked_fraction"] for r in group]),
            "seconds": spread([r.summary["seconds"] for r in group]),
            "phases": phases,
        }
    return {
        "scenario": first.scenario.name,
        "claim": first.scenario.claim,
        "window": first.summary["window"],
        "mark": first.summary["mark"],
        "phase_rollouts": [phase.rollouts for phase in first.scenario.phases],
        "presets": presets,
        "notes": [
            note
            for name, note in MADE_DIFFERENTLY.items()
            if len(
                {json.dumps(r.summary.get(name)) for group in runs.values() for r in group}
                - {"null"}
            )
            > 1
        ],
    }


def spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Median and quartiles of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    low, middle, high = (float(v) for v in np.percentile(known, (25, 50, 75)))
    return {"median": middle, "low": low, "high": high, "values": known}


def spread_to_mark(values: Sequence[int | None]) -> dict[str, Any] | None:
    """Like `spread`, with None for never, which counts as longer than any number."""
    if not values:
        return None
    ordered = sorted(NEVER if value is None else value for value in values)

    def quantile(share: float) -> float | None:
        place = share * (len(ordered) - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        if math.isinf(high):
            # Between a number and never lies no number; on a number itself it does.
            return None if place != math.floor(place) or math.isinf(low) else low
        return low + (place - math.floor(place)) * (high - low)

    return {
        "median": quantile(0.5),
        "low": quantile(0.25),
        "high": quantile(0.75),
        "reached": sum(value is not None for value in values),
        "runs": len(values),
        "values": list(values),
    }


# How it is shown


Rows = tuple[list[str], list[list[str]]]  # headings, and one list of cells per row


def phase_rows(comparison: dict[str, Any]) -> Rows:
    """One row per preset and phase, and one for each of its audiences."""
    headings = [
        "preset",
        "phase",
        "reward",
        f"last {comparison['window']}",
        f"rollouts to {comparison['mark']:g}",
        "held-out share",
        "quality",
    ]
    rows = []
    for name, preset in comparison["presets"].items():
        for number, phase in enumerate(preset["phases"]):
            rows.append(
                [
                    "" if number else name,
                    phase["name"],
                    _cell(phase["mean_reward"]),
                    _cell(phase["last_mean"]),
                    _until(phase["rollouts_to_mark"]),
                    _cell(phase["preferred_share"]),
                    _cell(phase["quality"]),
                ]
            )
            for audience, reward in phase["audiences"].items():
                rows.append(["", f"- {audience}", _cell(reward), *[""] * 4])
    return headings, rows


def run_rows(comparison: dict[str, Any]) -> Rows:
    """One row per preset, over whole runs."""
    rows = [
        [
            name,
            ", ".join(map(str, preset["seeds"])),
            _cell(preset["mean_reward"]),
            _cell(preset["masked_fraction"], "{:.4f}".format),
            _cell(preset["seconds"], "{:.0f}".format),
        ]
        for name, preset in comparison["presets"].items()
    ]
    return ["preset", "seeds", "reward, all phases", "masked tokens", "seconds"], rows


def _cell(value: dict[str, Any] | None, form: Callable[[float], str] = "{:.2f}".format) -> str:
    if value is None:
        return "-"
    if len(value["values"]) == 1:
        return form(value["median"])
    return f"{form(value['median'])} ({form(value['low'])}–{form(value['high'])})"


def _until(value: dict[str, Any] | None) -> str:
    if value is None:
        return "-"

    def form(number: float | None) -> str:
        return "never" if number is None else f"{number:.0f}"

    middle = form(value["median"])
    if value["runs"] == 1:
        return middle
    if value["low"] is not None:
        middle += f" ({form(value['low'])}–{form(value['high'])})"
    return f"{middle}, {value['reached']}/{value['runs']}"


def markdown(comparison: dict[str, Any], figures: Sequence[Path]) -> str:
    lines = [
        f"# {comparison['scenario']}",
        "",
        comparison["claim"],
        "",
        f"Phases of {', '.join(map(str, comparison['phase_rollouts']))} rollouts. Over several "
        "seeds: median (lower–upper quartile). Rollouts until the mean reward of the last "
        f"{comparison['window']} is at least {comparison['mark']:g} are counted from the phase's "
        "first rollout, with how many of the runs reached it.",
        "",
    ]
    for headings, rows in (phase_rows(comparison), run_rows(comparison)):
        lines += [
            "| " + " | ".join(headings) + " |",
            "|" + "|".join("---" if n < 2 else "---:" for n in range(len(headings))) + "|",
            *("| " + " | ".join(row) + " |" for row in rows),
            "",
        ]
    lines += [f"{note}\n" for note in comparison["notes"]]
    lines += [f"![{path.stem}]({path.name})\n" for path in figures]
    return "\n".join(lines)


def print_tables(comparison: dict[str, Any], console: Console) -> None:
    shown = (("by phase", phase_rows(comparison)), ("whole runs", run_rows(comparison)))
    for title, (headings, rows) in shown:
        table = Table(title=f"{comparison['scenario']}: {title}", title_justify="left")
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="left" if number < 2 else "right")
        for number, row in enumerate(rows):
            last = number + 1 == len(rows) or bool(rows[number + 1][0])
            table.add_row(*row, end_section=last and title == "by phase")
        console.print(table)
    for note in comparison["notes"]:
        console.print(note)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description="Compare finished runs of a scenario: presets side by side, over seeds.",
        epilog="Runs come from the scripts in scenarios/ and from `online-sao train`.",
    )
    made.add_argument(
        "folders", type=Path, nargs="+", help="result folders, or folders that contain some"
    )
    made.add_argument("--scenario", help="name of the scenario, if the folders hold several")
    made.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where table and figures go (default: `comparison` in the first folder)",
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 2 an error that one sentence explains."""
    options = parser().parse_args(argv)
    # A log is not a narrow terminal: its lines may be as long as the table's.
    console = Console(width=None if sys.stdout.isatty() else 130)
    try:
        runs = collect(options.folders, options.scenario)
        comparison = compare(runs)
    except OnlineSAOError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    import figures  # matplotlib takes a second, so only when there is something to draw

    folder = options.out or options.folders[0] / "comparison"
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures.draw_comparison(runs, folder)
    text = json.dumps(comparison, indent=2, ensure_ascii=False)
    (folder / "comparison.json").write_text(text + "\n", "utf-8")
    (folder / "comparison.md").write_text(markdown(comparison, drawn), "utf-8")
    print_tables(comparison, console)
    console.print(f"Comparison: {folder} ({', '.join(path.name for path in drawn)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
