"""The figures of a run and of a comparison, after figures 5a, 5b and 4a-c of the paper.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; presets differ in
their line pattern too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from online_sao.errors import ConfigError
from online_sao.scenario import Results, Scenario, read_results
from online_sao.writing import load_topics

STYLE_COLORS = {
    "academic": "#0072B2",
    "cute": "#CC79A7",
    "chuunibyou": "#D55E00",
    "classical": "#009E73",
}
SPARE_COLORS = ("#E69F00", "#56B4E9", "#8C6D31", "#5B3A8E", "#444444")
PRESET_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#444444")
PRESET_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 1)))
OTHER_COLOR = "#888888"
SMOOTHING = 20  # rollouts in a rolling mean; half the mark's window, so that dips stay visible
FEWEST = 5  # a rolling mean of fewer rollouts says nothing, so the line begins here
WIDTH_IN = 9.0  # at 100 dots per inch about the width of a README
DPI = 150

FONT: Any = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}

Series = dict[int, np.ndarray]  # phase to one value per rollout of it


def draw_run(folder: str | Path) -> list[Path]:
    """figure_5a.png and figure_5b.png of one result folder."""
    results = read_results(folder)
    with plt.rc_context(FONT):
        drawn = [_save(_reward_figure(results), results.folder / "figure_5b.png")]
        if results.heldout:
            drawn.insert(0, _save(_heldout_figure(results), results.folder / "figure_5a.png"))
    return drawn


def draw_comparison(runs: dict[str, list[Results]], folder: str | Path) -> list[Path]:
    """The overlays over presets (name to its runs, one a seed) into `folder`."""
    folder = Path(folder)
    with plt.rc_context(FONT):
        drawn = [_save(_compared_rewards(runs), folder / "figure_5b.png")]
        if any(results.heldout for group in runs.values() for results in group):
            drawn.insert(0, _save(_compared_heldout(runs), folder / "figure_5a.png"))
        learner = _compared_learner(runs)
        if learner:
            drawn.append(_save(learner, folder / "figure_4.png"))
    return drawn


# Series


def rolling_mean(values: Sequence[float], window: int = SMOOTHING) -> np.ndarray:
    """Mean of the last `window` known values at each place; NaN until FEWEST are known."""
    array = np.asarray(values, dtype=float)
    known = np.isfinite(array)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, array, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    ends = np.arange(1, len(array) + 1)
    starts = np.maximum(0, ends - window)
    number = counts[ends] - counts[starts]
    total = sums[ends] - sums[starts]
    enough = number >= min(FEWEST, window)
    return np.where(enough, total / np.maximum(number, 1), np.nan)


def phase_series(results: Results, column: str) -> Series:
    """A column smoothed within each phase, so that no phase leaks into the next."""
    return {
        number: rolling_mean(_values(results, column, number))
        for number in range(len(results.scenario.phases))
    }


def run_series(results: Results, column: str) -> Series:
    """A column smoothed over the whole run, for what does not begin anew at a switch."""
    return {0: rolling_mean(_values(results, column, None))}


def _values(results: Results, column: str, phase: int | None) -> list[float]:
    return [
        np.nan if row.get(column) is None else row[column]
        for row in results.rows
        if phase is None or row["phase"] == phase
    ]


def band(stack: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Median over runs, and the quartiles (of two runs: both), place by place."""
    length = max(len(values) for values in stack)
    table = np.full((len(stack), length), np.nan)
    for number, values in enumerate(stack):
        table[number, : len(values)] = values
    middle, low, high = (np.full(length, np.nan) for _ in range(3))
    spread = (0, 100) if len(stack) == 2 else (25, 75)
    for place in np.flatnonzero(np.isfinite(table).any(axis=0)):
        seen = table[np.isfinite(table[:, place]), place]
        middle[place] = np.median(seen)
        low[place], high[place] = np.percentile(seen, spread)
    return middle, low, high


def _phase_starts(scenario: Scenario) -> list[int]:
    lengths = [phase.rollouts for phase in scenario.phases]
    return [sum(lengths[:number]) for number in range(len(lengths))]


# One run


def _heldout_figure(results: Results) -> Figure:
    figure, axes = plt.subplots(figsize=(WIDTH_IN, 4.2), layout="constrained")
    _bands(axes, results.scenario)
    _draw_shares(axes, [results])
    _share_axis(axes)
    axes.set_xlabel("training rollouts")
    axes.set_title(
        f"Styles of answers to held-out topics: {_run_name(results)}", loc="left", pad=24
    )
    _legend_below(figure, axes)
    return figure


def _reward_figure(results: Results) -> Figure:
    figure, axes = plt.subplots(figsize=(WIDTH_IN, 4.2), layout="constrained")
    scenario = results.scenario
    _bands(axes, scenario)
    color = PRESET_COLORS[0]
    starts = _phase_starts(scenario)
    for number, values in phase_series(results, "reward").items():
        x = starts[number] + np.arange(1, len(values) + 1) / results.answers_per_request
        axes.plot(
            x, values, color=color, lw=2.2, label="" if number else f"mean of the last {SMOOTHING}"
        )
        rewards = [row["reward"] for row in results.rows if row["phase"] == number]
        for at, reward in zip(x, rewards, strict=True):
            if reward is not None:
                axes.plot(
                    [at], [1.045 if reward > 0.5 else -0.045], "|", ms=6, mew=0.8, color="#555555"
                )
    _mark_line(axes, scenario)
    _share_axis(axes, "training reward")
    axes.plot([], [], "|", ms=6, mew=0.8, color="#555555", label="one rollout: 1 above, 0 below")
    axes.set_xlabel("training rollouts")
    axes.set_title(f"Reward: {_run_name(results)}", loc="left", pad=24)
    _legend_below(figure, axes)
    return figure


# Several runs


def _compared_heldout(runs: dict[str, list[Results]]) -> Figure:
    shown = {name: group for name, group in runs.items() if any(r.heldout for r in group)}
    columns = min(2, len(shown))
    lines = -(-len(shown) // columns)
    figure, grid = plt.subplots(
        lines,
        columns,
        figsize=(WIDTH_IN, 0.9 + 2.9 * lines),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    for axes, (name, group) in zip(grid.flat, shown.items(), strict=False):
        _bands(axes, group[0].scenario, small=columns > 1)
        _draw_shares(axes, group)
        _share_axis(axes, "")
        axes.set_title(f"{name} ({_seeds(group)})", loc="left", pad=22)
    for axes in grid[:, 0]:
        axes.set_ylabel("share of answers")
    for axes in grid.flat[max(0, len(shown) - columns) : len(shown)]:
        axes.set_xlabel("training rollouts")
        axes.tick_params(labelbottom=True)
    _legend_below(figure, *grid.flat[: len(shown)])
    return figure


def _compared_rewards(runs: dict[str, list[Results]]) -> Figure:
    figure, axes = plt.subplots(figsize=(WIDTH_IN, 4.4), layout="constrained")
    scenario = next(iter(runs.values()))[0].scenario
    _bands(axes, scenario)
    _overlay(axes, runs, "reward")
    _mark_line(axes, scenario)
    _share_axis(axes, f"training reward (mean of {SMOOTHING})")
    axes.set_xlabel("training rollouts")
    axes.set_title(f"Reward: {scenario.name}", loc="left", pad=24)
    _legend_below(figure, axes)
    return figure


LEARNER_PANELS = (
    ("critic/explained_variance", "explained variance"),
    ("critic/grad_norm", "critic gradient norm"),
    ("masked_fraction", "masked tokens (share)"),
)


def _compared_learner(runs: dict[str, list[Results]]) -> Figure | None:
    panels = [
        (column, title)
        for column, title in LEARNER_PANELS
        if any(
            row.get(column) is not None
            for group in runs.values()
            for results in group
            for row in results.rows
        )
    ]
    if not panels:
        return None
    figure, grid = plt.subplots(
        1, len(panels), figsize=(WIDTH_IN, 3.6), squeeze=False, layout="constrained"
    )
    for axes, (column, title) in zip(grid[0], panels, strict=True):
        for start in _phase_starts(next(iter(runs.values()))[0].scenario)[1:]:
            axes.axvline(start + 0.5, color="#999999", lw=0.8, ls=":")
        _overlay(axes, runs, column, run_series)
        axes.set_xlim(left=0)
        if column == "critic/grad_norm":
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_locator(NullLocator())
        if column == "masked_fraction":
            axes.set_ylim(bottom=0)
        if column == "critic/explained_variance":
            axes.axhline(0, color="#999999", lw=0.8)
            low, high = axes.get_ylim()
            axes.set_ylim(max(-1.0, low), max(high, 0.1))  # far below 0 all values say the same
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("training rollouts")
    _legend_below(figure, *grid[0])
    return figure


def preset_line(number: int) -> tuple[str, Any]:
    """Color and dashes of preset `number` from 0; no pair comes twice before all have come."""
    rounds, place = divmod(number, len(PRESET_COLORS))
    return PRESET_COLORS[place], PRESET_DASHES[(place + rounds) % len(PRESET_DASHES)]


def _overlay(
    axes: Axes,
    runs: dict[str, list[Results]],
    column: str,
    series_of: Callable[[Results, str], Series] = phase_series,
) -> None:
    """One line per preset with a band over its runs."""
    for number, (name, group) in enumerate(runs.items()):
        color, dashes = preset_line(number)
        answers = group[0].answers_per_request
        label = f"{name} ({_seeds(group)}{f', {answers} answers each' if answers > 1 else ''})"
        every = [series_of(results, column) for results in group]
        for phase, start in enumerate(_phase_starts(group[0].scenario)):
            stack = [series[phase] for series in every if len(series.get(phase, ()))]
            if not stack:
                continue
            middle, low, high = band(stack)
            if not np.isfinite(middle).any():
                continue
            x = start + np.arange(1, len(middle) + 1) / answers
            axes.plot(x, middle, color=color, ls=dashes, lw=2.0, label=label)
            if len(stack) > 1:
                axes.fill_between(x, low, high, color=color, alpha=0.18, lw=0)
            label = ""


# Parts


def _draw_shares(axes: Axes, group: Sequence[Results]) -> None:
    """Share of each style at each evaluation, the mean over runs."""
    scenario = group[0].scenario
    styles = list(dict.fromkeys(style for phase in scenario.phases for style in phase.pool))
    colors = _style_colors(styles)
    names = _style_names(scenario)
    for style in styles:
        # A style that a later pool leaves out has a line that ends there.
        for x, y in _share_pieces(group, style):
            axes.plot(
                x, y, "o-", color=colors[style], lw=2.0, ms=4.5, label=names[style], clip_on=False
            )
    others = _share_pieces(group, None)
    if any(share for _, y in others for share in y):
        for x, y in others:
            axes.plot(
                x, y, "s:", color=OTHER_COLOR, lw=1.4, ms=3, label="none of them", clip_on=False
            )


def _share_pieces(
    group: Sequence[Results], style: str | None
) -> list[tuple[list[float], list[float]]]:
    """Lines of a style's share (None: of no style of the pool); one per run of phases with
    the same pool, for another pool is another question."""
    scenario = group[0].scenario
    points: dict[int, list[dict[str, Any]]] = {}
    for results in group:
        for row in results.heldout:
            if row.get("detected_style"):
                points.setdefault(row["evaluation"], []).append(row)
    pieces: list[tuple[list[float], list[float]]] = []
    pool: frozenset[str] | None = None
    for evaluation in sorted(points):
        rows = points[evaluation]
        here = frozenset(scenario.phases[rows[0]["phase"]].pool)
        if here != pool:
            pieces.append(([], []))
            pool = here
        if style is not None and style not in here:
            continue
        seen = [row["detected_style"] for row in rows]
        count = sum(s not in here for s in seen) if style is None else seen.count(style)
        at = float(np.mean([row["index"] for row in rows]))
        pieces[-1][0].append(at / group[0].answers_per_request)
        pieces[-1][1].append(count / len(seen))
    return [piece for piece in pieces if piece[0]]


def _bands(axes: Axes, scenario: Scenario, *, small: bool = False) -> None:
    """Shade the phases in the colour of the style they prefer, and name it above."""
    names = _style_names(scenario)
    colors = _style_colors([phase.style for phase in scenario.phases])
    starts = _phase_starts(scenario)
    for phase, start in zip(scenario.phases, starts, strict=True):
        end = start + phase.rollouts
        axes.axvspan(start, end, color=colors[phase.style], alpha=0.13, lw=0)
        label = names[phase.style]
        if phase.to_style:
            label = f"{label} → {names[phase.to_style]}"
        if phase.audiences:
            label = " | ".join(names[audience.style] for audience in phase.audiences)
        axes.text(
            (start + end) / 2,
            1.015,
            label if small else f"preferred: {label}",
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize=9 if small else 10,
            color=colors[phase.style],
            fontweight="bold",
        )
    axes.set_xlim(0, starts[-1] + scenario.phases[-1].rollouts)


def _style_names(scenario: Scenario) -> dict[str, str]:
    """What prompts call the styles; their keys, where the topics file is not on this machine."""
    keys = {style: style for phase in scenario.phases for style in phase.pool}
    try:
        return keys | dict(load_topics(scenario.topics).styles)
    except ConfigError:
        return keys


def _style_colors(styles: Sequence[str]) -> dict[str, str]:
    unknown = sorted({style for style in styles if style not in STYLE_COLORS})
    spare = {style: SPARE_COLORS[n % len(SPARE_COLORS)] for n, style in enumerate(unknown)}
    return {style: STYLE_COLORS.get(style) or spare[style] for style in styles}


def _share_axis(axes: Axes, label: str = "share of answers") -> None:
    axes.set_ylim(-0.08, 1.08)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.grid(axis="y", color="#DDDDDD", lw=0.7)
    axes.set_axisbelow(True)
    axes.set_ylabel(label)


def _mark_line(axes: Axes, scenario: Scenario) -> None:
    mark, window = scenario.thresholds.mark, scenario.thresholds.window
    axes.axhline(mark, color="#555555", lw=1, ls=(0, (4, 3)), label=f"mark: {mark:g} over {window}")


def _legend_below(figure: Figure, *every: Axes) -> None:
    handles: dict[str, Any] = {}
    for axes in every:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=min(5 if sum(map(len, handles)) < 70 else 3, len(handles)),
    )


def _run_name(results: Results) -> str:
    cut = "" if results.summary["complete"] else ", cut short"
    return f"{results.scenario.name}, {results.preset}, seed {results.seed}{cut}"


def _seeds(group: Sequence[Results]) -> str:
    return f"{len(group)} seeds" if len(group) > 1 else f"seed {group[0].seed}"


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return path
