"""Charts are checked for what they say, by their data and encodings; looks by eye."""

import ast
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest

from dashboard import charts
from dashboard.metrics import GROUPS, Bound, Metric
from dashboard.queries import Phase, StoreReader


def phase(style: str, first: int) -> Phase:
    return Phase(style, (style,), None, first, datetime.now(UTC), 0, first)


def test_a_style_has_one_colour_everywhere():
    some = charts.style_colors(["cute", "noir", "academic"])
    more = charts.style_colors(["cute", "noir", "academic", "haiku", "classical"])
    assert {style: more[style] for style in some} == some
    assert len(set(more.values())) == len(more)
    assert more["none"] == charts.NONE_COLOR


def test_there_are_colours_for_more_styles_than_spares():
    many = charts.style_colors([f"style{number}" for number in range(20)])
    assert len(many) == 21


def test_colours_are_the_scenario_figures():
    figures = Path(__file__).parents[2] / "scenarios" / "figures.py"
    (colors,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(figures.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "STYLE_COLORS"
    )
    assert colors == charts.STYLE_COLORS


def test_bands_are_cut_to_the_range():
    phases = [phase("cute", 1), phase("classical", 11), phase("cute", 31), phase("noir", 99)]
    band = charts.bands(phases, 5, 40)
    assert band[["start", "end", "style", "is_switch"]].to_numpy().tolist() == [
        [5, 11, "cute", False],
        [11, 31, "classical", True],
        [31, 41, "cute", True],
    ]
    assert charts.bands(phases[:1], 5, 40)["end"].tolist() == [41]
    assert not len(charts.bands([], 1, 10))


def test_a_narrow_band_has_no_label():
    band = charts.bands([phase("cute", 1), phase("noir", 98)], 1, 100)
    assert band["label"].tolist() == ["Cute", ""]


@pytest.mark.parametrize("points", [10, 10_000])
def test_live_charts_of_a_real_store(shift_url, points, monkeypatch):
    monkeypatch.setattr("dashboard.queries.POINTS", points)
    reader = StoreReader(shift_url)
    series, phases = reader.series(1, 450), reader.phases()
    styles = reader.known()["styles"]
    reader.close()
    which = (series, phases, 1, 450, styles)
    shares = charts.shares_chart(series.shares, *which[1:]).to_dict()
    totals = pd.DataFrame(_rows(shares, "share")).groupby("rollout")["share"].sum()
    assert totals.tolist() == pytest.approx([1.0] * len(totals))
    bars = _rows(shares, "bottom")
    assert all(row["right"] <= 151 or row["start"] >= 151 for row in bars)  # of a switch
    assert max(row["right"] for row in bars) >= 446  # up to the newest judged answers
    strip = _rows(shares, "low")
    assert [row["style"] for row in strip] == ["cute", "chuunibyou", "classical"]
    domain = shares["layer"][0]["encoding"]["color"]["scale"]
    assert domain["range"][domain["domain"].index("Classical")] == "#009E73"
    reward = charts.reward_chart(*which).to_dict()
    dots = [row for rows in reward["datasets"].values() for row in rows if "shown" in row]
    assert len(dots) == (0 if points == 10 else len(series.points))
    assert {row["what"] for row in _rows(reward, "what")} == {"reward", "quality", "style match"}
    value = charts.value_chart(*which).to_dict()
    assert {row["what"] for row in _rows(value, "what")} == {"expected (V)", "earned (reward)"}


def test_shares_are_bars_as_wide_as_their_groups():
    shares = pd.DataFrame(
        [
            (1, 10, 5.5, "cute", 0.25, 2),
            (1, 10, 5.5, "noir", 0.75, 6),
            (11, 13, 12.0, "cute", 0.0, 0),
            (11, 13, 12.0, "noir", 1.0, 3),
        ],
        columns=["start", "end", "rollout", "style", "share", "answers"],
    )
    drawn = charts.shares_chart(shares, [phase("cute", 1)], 1, 20, ["cute", "noir"]).to_dict()
    assert drawn["layer"][0]["mark"]["type"] == "rect"
    bars = [
        (r["start"], r["right"], r["style"], r["bottom"], r["top"]) for r in _rows(drawn, "top")
    ]
    assert bars == [
        (1, 11, "cute", 0, 0.25),
        (1, 11, "noir", 0.25, 1),
        (11, 14, "noir", 0, 1),
    ]


def test_without_a_style_seen_there_are_no_bars():
    none = pd.DataFrame(columns=["start", "end", "rollout", "style", "share", "answers"])
    drawn = charts.shares_chart(none, [phase("cute", 1)], 1, 20, ["cute"]).to_dict()
    assert _rows(drawn, "top") == []


def test_of_two_equal_lines_both_are_seen_and_one_legend_names_them(shift_url):
    reader = StoreReader(shift_url)
    series = reader.series(1, 450)
    reader.close()
    drawn = charts.value_chart(series, [phase("cute", 1)], 1, 450, ["cute"]).to_dict()
    assert list(dict.fromkeys(row["what"] for row in _rows(drawn, "what"))) == [
        "earned (reward)",  # drawn first, so below
        "expected (V)",
    ]
    lines = drawn["layer"][1]["encoding"]
    earned, expected = lines["strokeWidth"]["scale"]["range"]
    assert earned > expected
    assert lines["strokeDash"]["legend"] is None  # Vega would draw a second one
    assert lines["strokeDash"]["scale"]["domain"] == lines["color"]["scale"]["domain"]


def test_a_metric_with_gaps_and_a_bound():
    table = pd.DataFrame({"x": [1.0, None, 3.0, -1.0]}, index=[4, 5, 6, 7])
    drawn = charts.metric_chart(
        table, Metric("x", "X", "Read it."), bound=Bound(high=2.5)
    ).to_dict()
    assert [row["bound"] for row in _rows(drawn, "bound")] == [2.5]
    assert [row["version"] for row in _rows(drawn, "version")] == [4, 5, 6, 7]
    log = charts.metric_chart(table, Metric("x", "X", "Read it.", log=True)).to_dict()
    assert [row["version"] for row in _rows(log, "version")] == [4, 6]


def test_a_bound_far_from_the_data_is_named_and_does_not_flatten_them():
    table = pd.DataFrame({"x": [1.0, 3.0]}, index=[4, 5])
    metric = Metric("x", "X", "Read it.")
    near, far = (
        charts.metric_chart(table, metric, bound=Bound(high=high)).to_dict() for high in (12, 13)
    )
    assert [layer["mark"]["type"] for layer in near["layer"]] == ["circle", "line", "rule"]
    assert [layer["mark"]["type"] for layer in far["layer"]] == ["circle", "line", "text"]
    assert [row["label"] for row in _rows(far, "label")] == ["↑ bound 13"]


def test_switches_within_the_chart_are_marked():
    table = pd.DataFrame({"x": [1.0, 3.0, 2.0]}, index=[4, 5, 8])
    drawn = charts.metric_chart(table, Metric("x", "X", "Read it."), switches=[2, 6, 9]).to_dict()
    assert drawn["layer"][2]["mark"]["type"] == "rule"
    (rows,) = (rows for rows in drawn["datasets"].values() if "value" not in rows[0])
    assert [row["version"] for row in rows] == [6]


def test_held_out_rounds_without_a_verdict_are_left_out():
    probes = pd.DataFrame({"version": [0, 50, 100], "quality": [1.0, None, 0.5], "reward": 0.25})
    drawn = charts.probes_chart(probes, [0, 60]).to_dict()
    rows = [(r["version"], r["what"], r["mean"]) for r in _rows(drawn, "what")]
    assert (100, "quality", 0.5) in rows
    assert (50, "quality", None) not in rows
    assert len(rows) == 5
    (marks,) = (rows for rows in drawn["datasets"].values() if rows and "what" not in rows[0])
    assert [row["version"] for row in marks] == [60]


def test_each_run_is_a_line_and_only_like_ones_have_a_mean():
    rows = [
        ("sao", 0, "a/sao", 1, 0.2),
        ("sao", 0, "b/sao", 1, 0.8),  # the same preset and seed
        ("rm", 0, "a/rm", 1, 0.1),
        ("rm", 1, "b/rm", 1, 0.3),
    ]
    table = pd.DataFrame(rows, columns=["preset", "seed", "run", "rollout", "reward"])
    drawn = charts.runs_chart(table, [phase("cute", 1)], 10, ["cute"], 5, ["sao"]).to_dict()
    single, mean = (layer for layer in drawn["layer"] if layer["mark"]["type"] == "line")
    assert single["encoding"]["detail"]["field"] == "run"
    assert len(drawn["datasets"][single["data"]["name"]]) == 4
    means = drawn["datasets"][mean["data"]["name"]]
    assert means == [{"preset": "rm", "rollout": 1, "reward": pytest.approx(0.2)}]
    drawn = charts.runs_chart(table[:2], [phase("cute", 1)], 10, ["cute"], 5, ["sao"]).to_dict()
    assert not any(row.get("reward") == pytest.approx(0.5) for row in _rows(drawn, "reward"))


def test_lags_are_counted():
    table = pd.DataFrame({"rollout/policy_lag_max": [0.0, 2.0, 2.0, None]})
    drawn = charts.lag_chart(table).to_dict()
    assert [(row["lag"], row["updates"]) for row in _rows(drawn, "lag")] == [(0, 1), (2, 2)]


def test_no_parts_no_chart_of_seconds():
    assert charts.seconds_chart(pd.DataFrame({"seconds/total": [1.0]})) is None


def test_every_metric_is_explained_in_one_sentence():
    metrics = [metric for group in GROUPS for metric in group.metrics]
    assert len({metric.key for metric in metrics}) == len(metrics)
    assert all(metric.reading.endswith(".") for metric in metrics)


def _rows(chart: dict, column: str) -> list[dict]:
    """The rows of the chart's data that have a column."""
    return [row for rows in chart["datasets"].values() for row in rows if column in row]
