"""Comparison of runs and the figures, on result folders made by hand."""

import itertools
import json
import math

import figures
import matplotlib.image
import numpy as np
import pytest
from compare import collect, compare, markdown, phase_rows, spread, spread_to_mark

from online_sao.config import PRESETS
from online_sao.errors import ScenarioError
from online_sao.scenario import Scenario, read_results, write_results

SCENARIO = Scenario.model_validate(
    {
        "name": "two",
        "claim": "It follows.",
        "thresholds": {"window": 4, "mark": 0.75},
        "phase": [
            {"name": "A", "style": "cute", "pool": ["academic", "cute"], "rollouts": 20},
            {"name": "B", "style": "classical", "pool": ["classical", "cute"], "rollouts": 20},
        ],
    }
)


def make_run(
    folder, preset, seed, zeros, *, scenario=SCENARIO, complete=True, metrics=True, **about
):
    """Each phase: `zeros[phase]` rollouts of reward 0, then rewards of 1."""
    rows, heldout = [], []
    index = itertools.count(1)
    for number, phase in enumerate(scenario.phases):
        for position in range(phase.rollouts):
            reward = float(position >= zeros[number])
            n = next(index)
            row = {
                "index": n,
                "phase": number,
                "position": position,
                "seq": n,
                "id": f"r{n}",
                "state": "trained",
                "preferred_style": phase.style,
                "detected_style": phase.style if reward else "academic",
                "quality": 1.0,
                "reward": reward,
                "num_action_tokens": 40,
                "masked_fraction": 0.001 * (seed + 1),
                "elapsed_s": 2.0 * n,
            }
            if metrics:
                row["critic/grad_norm"] = 50.0 / n
                row["critic/explained_variance"] = 1 - 2.0 / n
            rows.append(row)
        for evaluation, right in ((2 * number, 1), (2 * number + 1, 3)):
            heldout += [
                {
                    "evaluation": evaluation,
                    "index": 20 * number + 20 * (evaluation % 2),
                    "phase": number,
                    "final": evaluation % 2,
                    "preferred_style": phase.style,
                    "detected_style": phase.style if answer < right else "none",
                    "quality": 1.0,
                    "reward": float(answer < right),
                    "answer": "Text.",
                    "topic": "tea",
                }
                for answer in range(4)
            ]
    scenario = scenario.replace(seed=seed)
    write_results(folder, scenario, rows, heldout, preset=preset, complete=complete, **about)
    return folder


@pytest.fixture
def runs(tmp_path):
    """sao needs 2, 4, 6 zeros after the switch; running_mean 10, 18, never in 20."""
    for seed, (ours, theirs) in enumerate(((2, 10), (4, 18), (6, 20))):
        make_run(tmp_path / "runs" / f"sao-{seed}", "sao", seed, (1, ours))
        make_run(tmp_path / "runs" / f"rm-{seed}", "running_mean", seed, (3, theirs))
    return tmp_path / "runs"


def colors(path):
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)
    return {tuple(color) for color in np.unique(pixels.reshape(-1, 3), axis=0).tolist()}


def rgb(text):
    return tuple(int(text[n : n + 2], 16) for n in (1, 3, 5))


# Numbers


def test_spread():
    assert spread([1.0, None, 3.0, 2.0, 4.0]) == {
        "median": 2.5,
        "low": 1.75,  # a quarter of the way from 1 to 4
        "high": 3.25,
        "values": [1.0, 3.0, 2.0, 4.0],
    }
    assert spread([None, None]) is None


def test_never_is_longer_than_any_number():
    three = spread_to_mark([60, None, 50])
    assert (three["median"], three["low"], three["high"]) == (60, 55, None)
    assert (three["reached"], three["runs"]) == (2, 3)
    assert spread_to_mark([50, None, None])["median"] is None
    assert spread_to_mark([None, None])["low"] is None
    # even number of runs: the median lies between 60 and never, which is never
    assert spread_to_mark([60, None])["median"] is None
    assert spread_to_mark([60, 70])["median"] == 65
    # place 0.25 * 4 = 1 is a number itself, its neighbour does not matter
    five = spread_to_mark([10, 20, None, None, None])
    assert (five["low"], five["median"]) == (20, None)


def test_comparison_by_hand(runs):
    comparison = compare(collect([runs]))
    assert list(comparison["presets"]) == ["sao", "running_mean"]
    sao, mean = comparison["presets"].values()
    # phase B of sao: 2, 4, 6 zeros of 20
    assert sao["phases"][1]["mean_reward"]["values"] == pytest.approx([0.9, 0.8, 0.7])
    assert sao["phases"][1]["mean_reward"]["median"] == pytest.approx(0.8)
    assert sao["phases"][1]["last_mean"]["values"] == [1.0, 1.0, 1.0]
    # windows of 4 reach 0.75 three rollouts after the zeros, one of which may still be in it
    assert sao["phases"][1]["rollouts_to_mark"]["values"] == [5, 7, 9]
    assert sao["phases"][0]["rollouts_to_mark"]["values"] == [4, 4, 4]
    assert mean["phases"][1]["rollouts_to_mark"]["values"] == [13, None, None]
    assert mean["phases"][1]["last_mean"]["values"] == [1.0, 0.5, 0.0]
    assert sao["phases"][1]["preferred_share"]["median"] == 0.75
    assert sao["phases"][1]["heldout_answers"] == 12
    assert sao["masked_fraction"]["median"] == pytest.approx(0.002)
    assert sao["seconds"]["median"] == 80.0
    assert sao["seeds"] == [0, 1, 2]

    headings, rows = phase_rows(comparison)
    assert headings[4] == "rollouts to 0.75"
    assert [row[0] for row in rows] == ["sao", "", "running_mean", ""]
    assert rows[1][2:5] == ["0.80 (0.75–0.85)", "1.00 (1.00–1.00)", "7 (6–8), 3/3"]
    assert rows[3][4] == "never, 1/3"


def test_each_audience_has_a_row_below_its_phase(tmp_path):
    definition = SCENARIO.model_dump(by_alias=True)
    definition["phase"][1]["audience"] = [
        {"name": "elders", "style": "classical", "system": "For elders."},
        {"name": "children", "style": "cute", "system": "For children."},
    ]
    scenario = Scenario.model_validate(definition)
    folder = make_run(tmp_path / "run", "sao", 0, (0, 4), scenario=scenario)
    results = read_results(folder)
    for row in results.rows[20:]:  # the zeros are half of what the elders got
        row["audience"] = "elders" if row["position"] < 8 else "children"
    write_results(
        folder, results.scenario, results.rows, results.heldout, preset="sao", complete=True
    )
    comparison = compare(collect([folder]))
    _, rows = phase_rows(comparison)
    assert [row[1:3] for row in rows] == [
        ["A", "1.00"],
        ["B", "0.80"],
        ["- elders", "0.50"],
        ["- children", "1.00"],
    ]
    assert "|  | - elders | 0.50 |" in markdown(comparison, [])


# Which runs


def test_unfinished_runs_are_left_out(runs):
    make_run(runs / "cut", "sao", 3, (1, 1), complete=False)
    assert [r.seed for r in collect([runs])["sao"]] == [0, 1, 2]


def test_what_cannot_be_compared(runs, tmp_path):
    with pytest.raises(ScenarioError, match="There is no result folder"):
        collect([tmp_path / "nothing"])
    make_run(tmp_path / "again", "sao", 1, (1, 1))
    with pytest.raises(ScenarioError, match="Two runs have preset sao and seed 1"):
        collect([runs, tmp_path / "again"])
    longer = SCENARIO.replace(phase_rollouts=21)
    make_run(tmp_path / "longer", "sao", 7, (1, 1), scenario=longer)
    with pytest.raises(ScenarioError, match="differ in phase; compare runs of one definition"):
        collect([runs, tmp_path / "longer"])
    for name, what in (("method_version", "code"), ("lag", "lag"), ("judge", "judge")):
        made = make_run(tmp_path / name, "sao", 7, (1, 1), **{name: "another"})
        with pytest.raises(ScenarioError, match=f"another {what}"):
            collect([runs, made])
    other = SCENARIO.model_copy(update={"name": "other"})
    make_run(tmp_path / "other", "sao", 7, (1, 1), scenario=other)
    with pytest.raises(ScenarioError, match=r"several scenarios \(other, two\)"):
        collect([runs, tmp_path / "other"])
    assert list(collect([runs, tmp_path / "other"], "other")) == ["sao"]
    make_run(tmp_path / "cut", "sao", 7, (1, 1), complete=False)
    with pytest.raises(ScenarioError, match="None of the 1 runs of two is finished"):
        collect([tmp_path / "cut"])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"thresholds": {"window": 10, "mark": 0.5}}, "thresholds.window, thresholds.mark"),
        ({"heldout": {"every": 10}}, "heldout.every"),
        ({"heldout": {"final_answers": 100}}, "heldout.final_answers"),
        ({"max_tokens": 20}, "max_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"topics": "/elsewhere/mine.toml", "topics_hash": "1"}, "topics"),
        ({"delay": {"max_rollouts": 5}}, "delay"),
        ({"settings": {"learner.gamma": 0.5}}, "settings.learner.gamma"),
        ({"concurrency": 8, "max_in_flight": 8}, "concurrency, max_in_flight"),
    ],
)
def test_runs_of_other_definitions_are_not_pooled(tmp_path, changes, named):
    make_run(tmp_path / "a", "sao", 0, (0, 0))
    other = Scenario.model_validate(SCENARIO.model_dump(by_alias=True) | changes)
    make_run(tmp_path / "b", "sao", 1, (0, 0), scenario=other)
    with pytest.raises(ScenarioError, match=f"differ in {named}; compare"):
        collect([tmp_path])


def test_seed_and_claim_are_no_part_of_what_is_compared(tmp_path):
    make_run(tmp_path / "a", "sao", 0, (0, 0))
    said = {"claim": "Said otherwise.", "heldout": {"final_answers": 24}}  # as `answers` is
    other = Scenario.model_validate(SCENARIO.model_dump(by_alias=True) | said)
    make_run(tmp_path / "b", "sao", 1, (0, 0), scenario=other)
    assert [results.seed for results in collect([tmp_path])["sao"]] == [0, 1]


def test_runs_whose_topics_file_is_elsewhere_are_compared(call, tmp_path):
    """The same content at two places, neither of which is on this machine."""
    for seed in (0, 1):
        topics = {"topics": f"/machine-{seed}/mine.toml", "topics_hash": "1"}
        scenario = Scenario.model_validate(SCENARIO.model_dump(by_alias=True) | topics)
        make_run(tmp_path / "runs" / str(seed), "sao", seed, (1, 1), scenario=scenario)
    code, _, err = call("compare.py", tmp_path / "runs", "--out", tmp_path / "compared")
    assert (code, err) == (0, "")
    assert (tmp_path / "compared" / "figure_5a.png").exists()


def test_the_command(run, runs, tmp_path):
    code, shown, err = run("compare.py", runs, "--out", tmp_path / "compared")
    assert code == 0, err
    assert "never, 1/3" in shown
    made = json.loads((tmp_path / "compared" / "comparison.json").read_text())
    assert made["presets"]["running_mean"]["phases"][1]["rollouts_to_mark"]["median"] is None
    text = (tmp_path / "compared" / "comparison.md").read_text()
    for part in ("| running_mean | A |", "never, 1/3", "](figure_5b.png)", "It follows."):
        assert part in text
    both = {rgb(figures.PRESET_COLORS[0]), rgb(figures.PRESET_COLORS[1])}
    assert both <= colors(tmp_path / "compared" / "figure_5b.png")
    assert both <= colors(tmp_path / "compared" / "figure_4.png")
    assert rgb(figures.STYLE_COLORS["classical"]) in colors(tmp_path / "compared" / "figure_5a.png")
    code, shown, err = run("compare.py", tmp_path / "nothing")
    assert (code, shown) == (2, "")
    assert err.startswith("compare.py: There is no result folder")


# Series behind the figures


def test_rolling_mean():
    means = figures.rolling_mean([1, 0, 1, 1, 1, 0, 0], window=6)
    # fewer than five: nothing; then 4/5, 4/6, and 3/6 of the last six
    assert np.isnan(means[:4]).all()
    assert means[4:] == pytest.approx([4 / 5, 4 / 6, 3 / 6])
    with_gap = figures.rolling_mean([1, math.nan, 0], window=2)
    assert np.isnan(with_gap[:2]).all()  # two known values are needed, the first place has one
    assert figures.rolling_mean([1, 0], window=2)[1] == 0.5


def test_smoothing_of_rewards_does_not_cross_a_switch(runs):
    results = read_results(runs / "rm-2")  # phase A ends in rewards of 1, phase B is all 0
    series = figures.phase_series(results, "reward")
    assert series[0][-1] == pytest.approx(17 / 20)
    assert np.nanmax(series[1]) == 0.0
    whole = figures.run_series(results, "reward")
    assert len(whole[0]) == 40
    assert whole[0][20] == pytest.approx(17 / 20)  # rollouts 2 to 21: three zeros, one of B's


def test_no_two_presets_share_a_line():
    lines = {figures.preset_line(number) for number in range(len(PRESETS))}
    assert len(lines) == len(PRESETS) > len(figures.PRESET_COLORS)


def test_band():
    middle, low, high = figures.band(
        [np.array([0.0, 1.0]), np.array([1.0]), np.array([4.0, math.nan])]
    )
    assert middle.tolist() == [1.0, 1.0]
    assert (low[0], high[0]) == (0.5, 2.5)  # half way from 0 to 1, and from 1 to 4
    _, low, high = figures.band([np.array([0.0]), np.array([1.0])])
    assert (low[0], high[0]) == (0.0, 1.0)


def test_figures_without_heldout_answers_or_learner_metrics(tmp_path):
    folder = make_run(tmp_path / "bare", "spo", 0, (1, 1), metrics=False)
    results = read_results(folder)
    write_results(folder, results.scenario, results.rows, [], preset="spo", complete=True)
    (folder / "figure_5b.png").unlink(missing_ok=True)
    assert [path.name for path in figures.draw_run(folder)] == ["figure_5b.png"]
    drawn = figures.draw_comparison({"spo": [read_results(folder)]}, tmp_path / "out")
    assert [path.name for path in drawn] == ["figure_5b.png", "figure_4.png"]
    rows = [{**row, "masked_fraction": None} for row in results.rows]
    write_results(folder, results.scenario, rows, [], preset="spo", complete=True)
    drawn = figures.draw_comparison({"spo": [read_results(folder)]}, tmp_path / "out")
    assert [path.name for path in drawn] == ["figure_5b.png"]


def test_share_lines_break_where_the_pool_changes(runs):
    results = read_results(runs / "sao-0")
    cute = figures._share_pieces([results], "cute")
    # phase A: 1 of 4, then 3 of 4 cute; phase B: never, but it is in the pool
    assert cute == [([0.0, 20.0], [0.25, 0.75]), ([20.0, 40.0], [0.0, 0.0])]
    assert figures._share_pieces([results], "academic") == [([0.0, 20.0], [0.0, 0.0])]
    others = figures._share_pieces([results], None)
    assert others == [([0.0, 20.0], [0.75, 0.25]), ([20.0, 40.0], [0.75, 0.25])]


def test_a_phase_shorter_than_the_window_says_nothing_about_the_mark(tmp_path):
    short = SCENARIO.replace(phase_rollouts=3)
    runs = collect([make_run(tmp_path / "short", "sao", 0, (0, 0), scenario=short)])
    _, rows = phase_rows(compare(runs))
    assert [row[4] for row in rows] == ["-", "-"]


def test_several_answers_to_a_request_share_its_place(tmp_path):
    """A group method's rows are several times the requests, by which phases are counted."""
    folder = make_run(tmp_path / "grpo", "grpo", 0, (0, 0))
    results = read_results(folder)
    assert results.answers_per_request == 1
    rows = [dict(row, index=2 * row["index"] - 1 + n) for row in results.rows for n in (0, 1)]
    heldout = [dict(row, index=2 * row["index"]) for row in results.heldout]
    write_results(folder, SCENARIO, rows, heldout, preset="grpo", complete=True)
    results = read_results(folder)
    assert results.answers_per_request == 2
    pieces = figures._share_pieces([results], "cute")
    assert max(x for xs, _ in pieces for x in xs) <= 40
    figure = figures._compared_rewards({"grpo": [results]})
    drawn = [
        x for line in figure.axes[0].lines for x in line.get_xdata() if len(line.get_xdata()) > 2
    ]
    assert max(drawn) == 40


def test_runs_of_two_machines_are_pooled_and_it_is_said(tmp_path):
    make_run(tmp_path / "a", "sao", 0, (0, 0), start_weights="x", dtype=["float32", "float32"])
    make_run(tmp_path / "b", "sao", 1, (0, 0), start_weights="x", dtype=["float32", "float32"])
    assert compare(collect([tmp_path]))["notes"] == []
    make_run(tmp_path / "c", "sao", 2, (0, 0), start_weights="y", dtype=["float32", "float32"])
    comparison = compare(collect([tmp_path]))
    assert ["more than one making" in note for note in comparison["notes"]] == [True]
    assert comparison["notes"][0] in markdown(comparison, [])
    make_run(tmp_path / "d", "spo", 0, (0, 0), start_weights="y", dtype=["bfloat16", "bfloat16"])
    assert "dtypes" in compare(collect([tmp_path]))["notes"][1]


def test_seeds_of_other_settings_are_not_pooled(tmp_path):
    make_run(tmp_path / "a", "sao", 0, (0, 0))  # an older one that does not say
    make_run(tmp_path / "b", "sao", 1, (0, 0), settings_id="x")
    make_run(tmp_path / "c", "running_mean", 0, (0, 0), settings_id="y")
    assert set(collect([tmp_path])) == {"sao", "running_mean"}
    make_run(tmp_path / "d", "sao", 2, (0, 0), settings_id="z")
    with pytest.raises(ScenarioError, match="other settings than the other runs of preset sao"):
        collect([tmp_path])
