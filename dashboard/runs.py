"""Result folders of simulations (`online-sao train`, scenarios/live.py). No streamlit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dashboard.queries import Phase
from online_sao.errors import ScenarioError
from online_sao.scenario import Results, Scenario, differing_settings, mark_text

DEPTH = 3  # folders below the given one that are looked into
STEP = 10  # rollouts in a group of style shares
# What runs must share to be set against each other, by its name in a summary, and what alone
# may differ in their definitions. Of one preset's runs the settings too. scenarios/compare.py
# asks the same.
MADE_ALIKE = {"method_version": "code version", "lag": "lag", "judge": "judge"}
MAY_DIFFER = {"seed", "claim"}


@dataclass(frozen=True)
class Summary:
    """A run as its summary.json tells it."""

    folder: Path
    name: str  # the folder, from the place that was searched
    scenario: str
    preset: str
    seed: int
    complete: bool
    changed: float  # when summary.json was written, seconds since the epoch
    data: dict[str, Any]

    @property
    def group(self) -> str:
        """The folder that the run's own folder lies in, from the place that was searched."""
        return self.name.rpartition("/")[0] or "."


@dataclass(frozen=True)
class Unlike:
    """What stands against taking a number of runs together."""

    presets: dict[str, str]  # those whose runs may not be averaged, and why
    between: str  # why the presets cannot be set against each other; empty if they can

    def __bool__(self) -> bool:
        return bool(self.presets or self.between)


def find_runs(place: str | Path) -> tuple[list[Summary], list[str]]:
    """Runs in the folders below `place`; and a sentence for each that cannot be read.

    The method itself first, then by preset, seed and name.
    """
    place = Path(place)
    found, refused = [], []
    patterns = ["/".join(["*"] * depth + ["summary.json"]) for depth in range(DEPTH + 1)]
    for path in sorted({path for pattern in patterns for path in place.glob(pattern)}):
        try:
            data = json.loads(path.read_text("utf-8"))
            found.append(
                Summary(
                    folder=path.parent,
                    name=str(path.parent.relative_to(place)),
                    scenario=str(data["scenario"]),
                    preset=str(data["preset"]),
                    seed=int(data["seed"]),
                    complete=bool(data["complete"]),
                    changed=path.stat().st_mtime,
                    data=data,
                )
            )
            _ = [(p["name"], p["mean_reward"], mark_text(p, 1)) for p in data["phases"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            found = [run for run in found if run.folder != path.parent]
            why = f"no {error}" if isinstance(error, KeyError) else str(error)
            refused.append(f"{path} cannot be read ({why}).")
    found.sort(key=lambda r: (not r.preset.startswith("sao"), r.preset, r.seed, r.name))
    return found, refused


def runs_table(runs: Sequence[Summary]) -> pd.DataFrame:
    """A row per run: what it is, and what came of it in each phase.

    Columns `<phase>: ...` are empty for runs of scenarios without that phase.
    """
    rows = []
    for run in runs:
        data = run.data
        row: dict[str, Any] = {
            "run": run.name,
            "scenario": run.scenario,
            "preset": run.preset,
            "seed": run.seed,
            "finished": run.complete,
            "written": datetime.fromtimestamp(run.changed, UTC),
            "rollouts": data.get("rollouts"),
            "mean reward": data.get("mean_reward"),
            "masked": data.get("masked_fraction"),
            "minutes": None if data.get("seconds") is None else data["seconds"] / 60,
        }
        for phase in data["phases"]:
            row[f"{phase['name']}: last mean"] = phase.get("last_mean")
            row[f"{phase['name']}: rollouts to {data.get('mark', 0.8):g}"] = mark_text(
                phase, data.get("window", 40)
            )
            heldout = phase.get("heldout") or {}
            row[f"{phase['name']}: held-out share"] = heldout.get("preferred_share")
        rows.append(row)
    return pd.DataFrame(rows)


def unlike(runs: Sequence[Summary]) -> Unlike:
    """What differs between runs of one scenario, and where there are two of one seed."""
    presets, named = {}, set[str]()
    for preset in dict.fromkeys(run.preset for run in runs):
        mine = [run for run in runs if run.preset == preset]
        differing = _differing(mine)
        named.update(differing)
        # Older folders, and those of live runs, do not tell their settings.
        if len({run.data.get("settings_id") for run in mine} - {None}) > 1:
            differing.append("settings")
        why = [f"they differ in {_listed(differing)}"] if differing else []
        for seed in sorted({run.seed for run in mine}):
            same = [run.name for run in mine if run.seed == seed]
            if len(same) > 1:
                why.append(f"{_listed(same)} have the same seed {seed}")
        if why:
            presets[preset] = "; ".join(why)
    between = [what for what in _differing(runs) if what not in named]
    return Unlike(presets, f"they differ in {_listed(between)}" if between else "")


def _differing(runs: Sequence[Summary]) -> list[str]:
    """What of MADE_ALIKE and of the definition is not the same in all."""
    found = [
        what
        for name, what in MADE_ALIKE.items()
        if len({json.dumps(run.data.get(name), sort_keys=True) for run in runs}) > 1
    ]
    first, *others = map(_definition, runs)
    parts = {name for other in others for name in differing_settings(first, other)} - MAY_DIFFER
    return [*found, f"definition ({', '.join(sorted(parts))})"] if parts else found


def _definition(run: Summary) -> dict[str, Any]:
    """With what an older folder does not tell, at its default."""
    try:
        scenario = Scenario.model_validate(run.data.get("definition"))
    except ValueError:  # what is wrong is said when the run's results are read
        return {}
    return scenario.model_dump(mode="json", by_alias=True)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def same_phases(results: Sequence[Results]) -> None:
    """ScenarioError unless all went through the same phases, so that one axis fits them."""
    for other in results[1:]:
        if other.scenario.phases != results[0].scenario.phases:
            raise ScenarioError(
                f"{results[0].folder.name} and {other.folder.name} differ in their phases; choose "
                "runs of one definition and length."
            )


def phases_of(results: Results) -> list[Phase]:
    """The phases of a run as bands over its rollouts, which are counted from 1."""
    phases, first = [], 1
    for number, phase in enumerate(results.scenario.phases):
        note = phase.name
        if phase.audiences:
            note += ": " + ", ".join(f"{a.name} likes {a.style}" for a in phase.audiences)
        if phase.to_style:
            note += f": drifts to {phase.to_style}"
        begun = datetime.fromtimestamp(0, UTC)  # in rollouts; no clock is drawn
        phases.append(Phase(phase.style, phase.pool, note, number, begun, None, first))
        first += phase.rollouts
    return phases


def rolling_rewards(results: Sequence[Results], window: int) -> pd.DataFrame:
    """Mean reward of a phase's last `window` rollouts.

    Columns preset, seed, run (its folder), rollout, reward.
    """
    tables = []
    for run in results:
        table = _rows(run)
        rewards = table["reward"].astype(float).groupby(table["phase"])
        rolling = rewards.rolling(window, min_periods=max(1, window // 4)).mean()
        tables.append(
            pd.DataFrame(
                {
                    "preset": run.preset,
                    "seed": run.seed,
                    "run": str(run.folder),
                    "rollout": table["index"],
                    "reward": rolling.droplevel(0),
                }
            ).drop_duplicates("rollout", keep="last")
        )
    columns = ["preset", "seed", "run", "rollout", "reward"]
    return pd.concat(tables).dropna() if tables else pd.DataFrame(columns=columns)


def style_shares(results: Sequence[Results]) -> pd.DataFrame:
    """Shares of the styles that the judge saw, over all `results`, in groups of STEP rollouts.

    Groups begin anew at a switch. Columns start, end, rollout, style, share, answers: what
    charts.shares_chart takes.
    """
    columns = ["start", "end", "rollout", "style", "share", "answers"]
    rows = pd.concat([_rows(run)[["index", "detected_style"]] for run in results])
    rows = rows[rows["detected_style"].notna() & (rows["detected_style"] != "")]
    if not len(rows):
        return pd.DataFrame(columns=columns)
    last = int(rows["index"].max())
    firsts = [phase.first_seq for phase in phases_of(results[0])]
    starts = [
        start
        for first, following in zip(firsts, [*firsts[1:], last + 1], strict=True)
        for start in range(first, following, STEP)
    ]
    ends = dict(zip(starts, [*(start - 1 for start in starts[1:]), last], strict=True))
    group = np.searchsorted(starts, rows["index"], side="right") - 1
    table = rows.groupby([np.array(starts)[group], "detected_style"]).size().unstack(fill_value=0)
    table.index.name = "start"
    long = table.stack().rename("answers").reset_index()
    long = long.rename(columns={"detected_style": "style"})
    long["share"] = long["answers"] / long["start"].map(table.sum(axis=1))
    long["end"] = long["start"].map(ends)
    long["rollout"] = (long["start"] + long["end"]) / 2
    return long[columns]


def styles_of(results: Sequence[Results]) -> list[str]:
    named = [style for run in results for phase in run.scenario.phases for style in phase.pool]
    return list(dict.fromkeys(named))


def _rows(run: Results) -> pd.DataFrame:
    """In order; a group method's several answers to a request share its place (`index`)."""
    columns = ["index", "phase", "reward", "detected_style"]
    table = pd.DataFrame(run.rows, columns=columns).sort_values("index", ignore_index=True)
    table["index"] = np.ceil(table["index"] / run.answers_per_request).astype(int)
    return table
