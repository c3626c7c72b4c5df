"""Charts from data frames. No streamlit.

Colours: a style has one colour everywhere (Okabe and Ito's, which colour-blind people tell
apart), and lines that are not styles differ by dashes too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import altair as alt
import numpy as np
import pandas as pd

from dashboard.headline import style_name
from dashboard.metrics import RECENT_UPDATES, Bound, Metric
from dashboard.queries import Phase, Series

AnyChart = TypeVar("AnyChart", alt.Chart, alt.LayerChart)

STYLE_COLORS = {
    "academic": "#0072B2",
    "cute": "#CC79A7",
    "chuunibyou": "#D55E00",
    "classical": "#009E73",
}
SPARE_COLORS = ("#E69F00", "#56B4E9", "#8C6D31", "#9A7FD1", "#B8A000", "#7A8B99")
NONE_COLOR = "#999999"
NEUTRAL = "#7F858F"  # visible on white and on black
LINE_COLOR, BOUND_COLOR = "#4C9ED9", "#D55E00"
# Presets are not styles: other colours, and dashes.
PRESET_COLORS = ("#6D5BD0", "#E69F00", "#2A9DB5", "#8C6D31", "#7F858F", "#B8A000")
PRESET_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 4], [1, 3])
QUALITY_COLOR, MATCH_COLOR, VALUE_COLOR = "#56B4E9", "#B98A2F", "#E69F00"
SHARES_HEIGHT, HEIGHT, SMALL_HEIGHT = 380, 340, 190  # pixels, axes and legend included
LABEL_SHARE = 0.07  # a phase narrower than this share of the chart gets no label


def style_colors(styles: Sequence[str]) -> dict[str, str]:
    """A colour for each style; `styles` in order of first appearance, so colours stay."""
    colors, spare = {}, list(SPARE_COLORS)
    for style in styles:
        if style == "none":
            continue
        if style in STYLE_COLORS:
            colors[style] = STYLE_COLORS[style]
        else:
            colors[style] = spare[0]
            spare = spare[1:] + spare[:1]
    return {**colors, "none": NONE_COLOR}


def bands(phases: Sequence[Phase], first: int, last: int) -> pd.DataFrame:
    """The part of each phase between two rollout numbers."""
    rows = []
    for number, phase in enumerate(phases):
        following = phases[number + 1].first_seq if number + 1 < len(phases) else last + 1
        start, end = max(phase.first_seq, first), min(following, last + 1)
        if start < end:
            wide = (end - start) / (last - first + 1) >= LABEL_SHARE
            rows.append(
                {
                    "start": start,
                    "end": end,
                    "middle": (start + end) / 2,
                    "style": phase.style,
                    "label": style_name(phase.style) if wide else "",
                    "is_switch": phase.first_seq > first,
                    "note": phase.note or "",
                }
            )
    columns = ["start", "end", "middle", "style", "label", "is_switch", "note"]
    return pd.DataFrame(rows, columns=columns)


def shares_chart(
    shares: pd.DataFrame, phases: Sequence[Phase], first: int, last: int, styles: Sequence[str]
) -> alt.LayerChart:
    """Bars of the shares of the styles the judge saw; above them the style that was preferred.

    `shares`: columns start, end, rollout, style, share, answers. A bar is as wide as its group,
    so that nothing is drawn where nothing was counted, nor across a switch.
    """
    colors = style_colors(styles)
    seen = [s for s in colors if s in set(shares["style"])]
    position = {style: number for number, style in enumerate(colors)}
    stacked = shares.assign(
        name=shares["style"].map(style_name),
        share=shares["share"].astype(float),  # of no rows too
        right=shares["end"] + 1,
        position=shares["style"].map(position),
        answered=shares["start"].map(lambda s: f"{s:,}")
        + " to "
        + shares["end"].map(lambda s: f"{s:,}"),
    ).sort_values(["start", "position"])
    stacked["top"] = stacked.groupby("start")["share"].cumsum()
    stacked["bottom"] = stacked["top"] - stacked["share"]
    stacked = stacked[stacked["share"] > 0]
    band = bands(phases, first, last)
    palette = alt.Scale(domain=[style_name(s) for s in colors], range=[colors[s] for s in colors])
    bars = (
        alt.Chart(stacked)
        .mark_rect(clip=True, opacity=0.88, stroke="white", strokeWidth=0.5)
        .encode(
            x=_rollout_axis(first, last, "start"),
            x2="right:Q",
            y=alt.Y(
                "bottom:Q",
                scale=alt.Scale(domain=[0, 1.15]),
                axis=alt.Axis(format="%", values=[0, 0.25, 0.5, 0.75, 1], title="share of answers"),
            ),
            y2="top:Q",
            color=alt.Color(
                "name:N",
                scale=palette,
                legend=_legend(values=[style_name(s) for s in seen]),
            ),
            tooltip=[
                alt.Tooltip("name:N", title="style"),
                alt.Tooltip("share:Q", format=".0%"),
                alt.Tooltip("answers:Q"),
                alt.Tooltip("answered:N", title="of answers"),
            ],
        )
    )
    strip = (
        alt.Chart(band.assign(name=band["style"].map(style_name), low=1.02, high=1.055))
        .mark_rect()
        .encode(
            x=alt.X("start:Q"),
            x2="end:Q",
            y=alt.Y("low:Q"),
            y2="high:Q",
            color=alt.Color("name:N", scale=palette),
            tooltip=[alt.Tooltip("name:N", title="preferred"), alt.Tooltip("note:N")],
        )
    )
    return _tight(alt.layer(bars, strip, _labels(band, 1.07), _switches(band)), SHARES_HEIGHT)


def reward_chart(
    series: Series, phases: Sequence[Phase], first: int, last: int, styles: Sequence[str]
) -> alt.LayerChart:
    """Rolling means of the reward and its two factors, and each rollout's reward as a point."""
    names = {"reward": "reward", "quality": "quality", "style_match": "style match"}
    lines = _long(series.marks, names)
    band = bands(phases, first, last)
    layers: list[alt.Chart] = [_bands(band, styles, first, last)]
    if len(series.points):
        # Points of equal reward would hide one another: spread around their value.
        spread = np.random.default_rng(0).uniform(-0.025, 0.025, len(series.points))
        points = series.points.assign(shown=series.points["reward"] + spread)
        layers.append(
            alt.Chart(points)
            .mark_circle(size=14, opacity=0.45, color=NEUTRAL)
            .encode(
                x=_rollout_axis(first, last),
                y=alt.Y("shown:Q"),
                tooltip=[
                    alt.Tooltip("rollout:Q", format=","),
                    alt.Tooltip("reward:Q", format=".2f"),
                    alt.Tooltip("style:N", title="style seen"),
                ],
            )
        )
    layers.append(
        _mean_lines(lines, first, last, list(names.values()), "mean reward").encode(
            color=alt.Color(
                "what:N",
                scale=alt.Scale(
                    domain=list(names.values()), range=[NEUTRAL, QUALITY_COLOR, MATCH_COLOR]
                ),
                legend=_legend(lines=True),
            ),
            strokeDash=alt.StrokeDash(
                "what:N",
                scale=alt.Scale(domain=list(names.values()), range=[[1, 0], [6, 3], [2, 2]]),
                legend=None,  # a second one, cut off: Vega does not merge it with the colours'
            ),
            strokeWidth=alt.StrokeWidth(
                "what:N",
                scale=alt.Scale(domain=list(names.values()), range=[5, 3, 2]),
                legend=None,
            ),
        )
    )
    layers += [_labels(band, 1.06), _switches(band)]
    return _tight(alt.layer(*layers), HEIGHT)


def value_chart(
    series: Series, phases: Sequence[Phase], first: int, last: int, styles: Sequence[str]
) -> alt.LayerChart:
    """What the critic expected before each trained answer, against what it earned."""
    # What is named first is drawn first: the dashes are seen on the wide line where both are equal.
    names = {"reward": "earned (reward)", "value": "expected (V)"}
    order = list(names.values())
    lines = _long(series.values, names)
    band = bands(phases, first, last)
    drawn = _mean_lines(lines, first, last, order, "mean").encode(
        color=alt.Color(
            "what:N",
            scale=alt.Scale(domain=order, range=[NEUTRAL, VALUE_COLOR]),
            legend=_legend(lines=True),
        ),
        strokeDash=alt.StrokeDash(
            "what:N",
            scale=alt.Scale(domain=order, range=[[1, 0], [6, 3]]),
            legend=None,
        ),
        strokeWidth=alt.StrokeWidth(
            "what:N", scale=alt.Scale(domain=order, range=[5, 2.5]), legend=None
        ),
    )
    layers = (_bands(band, styles, first, last), drawn, _labels(band, 1.06), _switches(band))
    return _tight(alt.layer(*layers), HEIGHT)


def runs_chart(
    rewards: pd.DataFrame,
    phases: Sequence[Phase],
    last: int,
    styles: Sequence[str],
    window: int,
    apart: Collection[str] = (),
) -> alt.LayerChart:
    """Rolling mean reward of several runs: a thin line a run, a thick one a preset's mean.

    `rewards`: columns preset, seed, run, rollout, reward. `apart`: presets without a mean.
    """
    presets = list(dict.fromkeys(rewards["preset"]))
    band = bands(phases, 1, last)
    palette = alt.Scale(
        domain=presets, range=[PRESET_COLORS[i % len(PRESET_COLORS)] for i in range(len(presets))]
    )
    dashes = alt.Scale(
        domain=presets, range=[PRESET_DASHES[i % len(PRESET_DASHES)] for i in range(len(presets))]
    )
    axis = alt.Axis(
        values=[0, 0.25, 0.5, 0.75, 1], format="~g", title=f"mean reward of {window} rollouts"
    )
    y_scale = alt.Scale(domain=[-0.05, 1.15])
    tips = [
        alt.Tooltip("preset:N"),
        alt.Tooltip("reward:Q", format=".2f"),
        alt.Tooltip("rollout:Q", format=",.0f"),
    ]
    single = (
        alt.Chart(rewards)
        .mark_line(strokeWidth=1, opacity=0.45)
        .encode(
            x=_rollout_axis(1, last),
            y=alt.Y("reward:Q", scale=y_scale, axis=axis),
            color=alt.Color("preset:N", scale=palette, legend=_legend(lines=True)),
            detail="run:N",  # not its seed: another run may have the same
            tooltip=[*tips, alt.Tooltip("seed:N"), alt.Tooltip("run:N")],
        )
    )
    alike = rewards[~rewards["preset"].isin(list(apart))]
    means = alike.groupby(["preset", "rollout"], as_index=False)["reward"].mean()
    mean = (
        alt.Chart(means)
        .mark_line(strokeWidth=3)
        .encode(
            x=_rollout_axis(1, last),
            y=alt.Y("reward:Q", scale=y_scale, axis=axis),
            color=alt.Color("preset:N", scale=palette, legend=_legend(lines=True)),
            strokeDash=alt.StrokeDash("preset:N", scale=dashes, legend=None),
            tooltip=tips,
        )
    )
    layers = (_bands(band, styles, 1, last), single, mean, _labels(band, 1.06), _switches(band))
    return _tight(alt.layer(*layers), SHARES_HEIGHT)


def metric_chart(
    table: pd.DataFrame, metric: Metric, bound: Bound | None = None, switches: Sequence[int] = ()
) -> alt.LayerChart:
    """One metric over versions: each update as a point, a rolling mean as a line.

    `switches`: versions at which the preference changed.
    """
    values = table[metric.key].astype(float)
    data = pd.DataFrame(
        {
            "version": table.index,
            "value": values.to_numpy(),
            "mean": values.rolling(RECENT_UPDATES, min_periods=3).mean().to_numpy(),
        }
    )
    log = metric.log and bool((data["value"] > 0).any())
    if log:
        data = data[data["value"] > 0]
    scale = alt.Scale(type="log") if log else alt.Scale(zero=metric.zero)
    axis = alt.Axis(title=metric.unit or None, tickCount=4, format="~r")
    base = alt.Chart(data).encode(
        x=alt.X(
            "version:Q",
            scale=alt.Scale(nice=False, zero=False),
            axis=alt.Axis(format=",d", tickMinStep=1, tickCount=5, title="version", grid=False),
        )
    )
    tips = [alt.Tooltip("version:Q", format=","), alt.Tooltip("value:Q", format=".4g")]
    layers: list[Any] = [
        base.mark_circle(size=9, opacity=0.4, color=NEUTRAL).encode(
            y=alt.Y("value:Q", scale=scale, axis=axis), tooltip=tips
        ),
        base.mark_line(strokeWidth=2, color=LINE_COLOR).encode(y=alt.Y("mean:Q")),
    ]
    shown = [s for s in switches if len(data) and data["version"].min() < s < table.index.max()]
    if shown:
        layers.append(
            alt.Chart(pd.DataFrame({"version": shown}))
            .mark_rule(color=NEUTRAL, strokeDash=[4, 4], strokeWidth=1)
            .encode(x="version:Q")
        )
    if bound is not None and len(data):
        layers += _bound(bound, float(data["value"].min()), float(data["value"].max()))
    return _tight(alt.layer(*layers), SMALL_HEIGHT)


def _bound(bound: Bound, lowest: float, highest: float) -> list[alt.Chart]:
    """A line at each limit; one far outside the data, which it would flatten, is only named."""
    parts = []
    for limit, above in ((bound.low, False), (bound.high, True)):
        if limit is None:
            continue
        far = limit > 4 * highest if above else limit < lowest - 4 * (highest - lowest)
        data = pd.DataFrame(
            {"bound": [limit], "label": [f"{'↑' if above else '↓'} bound {limit:g}"]}
        )
        chart = alt.Chart(data)
        if not far:
            parts.append(
                chart.mark_rule(strokeDash=[5, 3], strokeWidth=1.5, color=BOUND_COLOR).encode(
                    y="bound:Q", tooltip=[alt.Tooltip("bound:Q", title="bound")]
                )
            )
            continue
        parts.append(
            chart.mark_text(
                align="right", baseline="top" if above else "bottom", fontSize=11, dx=-4
            ).encode(x=alt.value("width"), y=alt.value(0 if above else "height"), text="label:N")
        )
    return parts


def probes_chart(probes: pd.DataFrame, switches: Sequence[int] = ()) -> alt.LayerChart:
    """Quality and reward of the held-out rounds over versions.

    `probes`: columns version, quality, reward. `switches`: as in metric_chart.
    """
    order = ["quality", "reward"]
    data = probes.melt("version", order, var_name="what", value_name="mean")
    lines = (
        alt.Chart(data.dropna())
        .mark_line(strokeWidth=2, point=True)
        .encode(
            x=alt.X(
                "version:Q",
                scale=alt.Scale(nice=False, zero=False),
                axis=alt.Axis(format=",d", tickMinStep=1, tickCount=5, grid=False),
            ),
            y=alt.Y(
                "mean:Q",
                scale=alt.Scale(domain=[0, 1]),
                axis=alt.Axis(values=[0, 0.25, 0.5, 0.75, 1], format="~g", title="mean"),
            ),
            color=alt.Color(
                "what:N",
                scale=alt.Scale(domain=order, range=[QUALITY_COLOR, NEUTRAL]),
                legend=_legend(lines=True),
            ),
            strokeDash=alt.StrokeDash(
                "what:N", scale=alt.Scale(domain=order, range=[[6, 3], [1, 0]]), legend=None
            ),
            tooltip=["what:N", alt.Tooltip("mean:Q", format=".2f"), "version:Q"],
        )
    )
    shown = [s for s in switches if probes["version"].min() < s < probes["version"].max()]
    marks = (
        alt.Chart(pd.DataFrame({"version": shown}))
        .mark_rule(color=NEUTRAL, strokeDash=[4, 4], strokeWidth=1)
        .encode(x="version:Q")
    )
    return _tight(alt.layer(lines, marks), SMALL_HEIGHT + 40)


def lag_chart(table: pd.DataFrame) -> alt.Chart:
    counts = table["rollout/policy_lag_max"].dropna().astype(int).value_counts().sort_index()
    data = pd.DataFrame({"lag": counts.index, "updates": counts.to_numpy()})
    bars = (
        alt.Chart(data)
        .mark_bar(color=LINE_COLOR)
        .encode(
            x=alt.X("lag:O", axis=alt.Axis(title="delay (versions)", labelAngle=0)),
            y=alt.Y("updates:Q", axis=alt.Axis(tickCount=4, tickMinStep=1)),
            tooltip=["lag:O", "updates:Q"],
        )
    )
    return _tight(bars, SMALL_HEIGHT)


SECONDS = ("batch", "critic", "policy", "anchor", "optimizer")


def seconds_chart(table: pd.DataFrame) -> alt.Chart | None:
    """Seconds of an update by part, stacked."""
    parts = [part for part in SECONDS if f"seconds/{part}" in table]
    if not parts:
        return None
    wide = table[[f"seconds/{part}" for part in parts]].astype(float)
    smooth = wide.rolling(20, min_periods=1).mean()
    smooth.columns = parts
    long = smooth.rename_axis("version").reset_index().melt("version", var_name="part")
    colors = ("#999999", "#E69F00", "#56B4E9", "#B98A2F", "#9A7FD1")
    areas = (
        alt.Chart(long)
        .mark_area(opacity=0.9)
        .encode(
            x=alt.X(
                "version:Q",
                scale=alt.Scale(nice=False, zero=False),
                axis=alt.Axis(format=",d", tickMinStep=1, tickCount=5, grid=False),
            ),
            y=alt.Y("value:Q", stack="zero", axis=alt.Axis(title="s", tickCount=4)),
            color=alt.Color(
                "part:N",
                scale=alt.Scale(domain=list(SECONDS), range=list(colors)),
                legend=_legend(values=parts),
            ),
            tooltip=["part:N", alt.Tooltip("value:Q", format=".2f", title="s"), "version:Q"],
        )
    )
    return _tight(areas, SMALL_HEIGHT + 40)


def tokens_chart(numbers: pd.DataFrame, column: str, middle: float) -> alt.LayerChart:
    """One number per token of an answer, as bars from `middle`."""
    data = numbers.assign(middle=middle)
    bars = (
        alt.Chart(data)
        .mark_bar()
        .encode(
            x=alt.X("position:O", axis=alt.Axis(labelOverlap=True, title="token", labelAngle=0)),
            y=alt.Y(f"{column}:Q", axis=alt.Axis(title=column.replace("_", " "), tickCount=5)),
            y2="middle:Q",
            color=alt.condition(
                f"datum.{column} < datum.middle", alt.value("#0072B2"), alt.value("#E67700")
            ),
            tooltip=[alt.Tooltip(f"{name}", type="nominal") for name in numbers.columns],
        )
    )
    line = alt.Chart(data.head(1)).mark_rule(color=NEUTRAL).encode(y="middle:Q")
    return _tight(alt.layer(bars, line), SMALL_HEIGHT + 30)


# ---- shared parts


def _tight(chart: AnyChart, height: int) -> AnyChart:
    """Of this height, without the room that streamlit leaves under a chart.

    Marks are kept from screen readers, which would read every dot, or an empty group: the
    axes, the chart's description and the tables say the same.
    """
    padding = {"bottom": 4, "left": 0, "right": 6, "top": 4}
    return chart.properties(height=height, padding=padding).configure_mark(aria=False)


def _rollout_axis(first: int, last: int, field: str = "rollout") -> alt.X:
    return alt.X(
        f"{field}:Q",
        scale=alt.Scale(domain=[first, last + 1], nice=False),
        axis=alt.Axis(
            title="answer (rollout number)", format=",d", grid=False, tickCount=6, tickMinStep=1
        ),
    )


def _legend(values: list[str] | None = None, *, lines: bool = False) -> alt.Legend:
    extra: dict[str, Any] = {} if values is None else {"values": values}
    if lines:
        extra |= {"symbolType": "stroke", "symbolStrokeWidth": 3, "symbolSize": 300}
    return alt.Legend(
        orient="bottom", title=None, columns=3, labelLimit=220, symbolOpacity=1, offset=4, **extra
    )


def _long(wide: pd.DataFrame, names: dict[str, str]) -> pd.DataFrame:
    kept = wide[["rollout", *names]].rename(columns=names)
    return kept.melt("rollout", var_name="what", value_name="mean").dropna()


def _mean_lines(
    lines: pd.DataFrame, first: int, last: int, order: list[str], title: str
) -> alt.Chart:
    return (
        alt.Chart(lines)
        .mark_line(strokeWidth=2.5, interpolate="monotone", clip=True)
        .encode(
            x=_rollout_axis(first, last),
            y=alt.Y(
                "mean:Q",
                scale=alt.Scale(domain=[-0.05, 1.15]),
                axis=alt.Axis(values=[0, 0.25, 0.5, 0.75, 1], format="~g", title=title),
            ),
            tooltip=[
                alt.Tooltip("what:N", title="mean of"),
                alt.Tooltip("mean:Q", format=".2f"),
                alt.Tooltip("rollout:Q", format=",.0f"),
            ],
        )
    )


def _bands(band: pd.DataFrame, styles: Sequence[str], first: int, last: int) -> alt.Chart:
    colors = style_colors(styles)
    data = band.assign(
        name=band["style"].map(style_name),
        color=[colors.get(style, NONE_COLOR) for style in band["style"]],
    )
    return (
        alt.Chart(data)
        .mark_rect(fillOpacity=0.16)
        .encode(
            x=_rollout_axis(first, last, "start"),
            x2="end:Q",
            color=alt.Color("color:N", scale=None),
            tooltip=[alt.Tooltip("name:N", title="preferred"), alt.Tooltip("note:N")],
        )
    )


def _labels(band: pd.DataFrame, height: float) -> alt.Chart:
    return (
        alt.Chart(band.assign(height=height))
        .mark_text(fontWeight="bold", fontSize=12, baseline="bottom")
        .encode(x=alt.X("middle:Q"), y=alt.Y("height:Q"), text="label:N")
    )


def _switches(band: pd.DataFrame) -> alt.Chart:
    return (
        alt.Chart(band[band["is_switch"].astype(bool)])
        .mark_rule(color=NEUTRAL, strokeDash=[4, 4], strokeWidth=1.5)
        .encode(x=alt.X("start:Q"))
    )
