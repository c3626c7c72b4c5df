"""Result folders as `write_results` leaves them, and what the page makes of them."""

import ast
import json
import os
import re
import sys
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import runs
from online_sao.errors import ScenarioError
from online_sao.scenario import Scenario, read_results, write_results

APP = Path(__file__).parents[2] / "dashboard" / "app.py"


def scenario(seed=0, first_rollouts=20, name="shift", claim="The policy follows.", **more):
    return Scenario.model_validate(
        {
            "name": name,
            "claim": claim,
            "seed": seed,
            **more,
            "thresholds": {"window": 10},
            "phase": [
                {
                    "name": "A",
                    "style": "cute",
                    "pool": ["cute", "classical"],
                    "rollouts": first_rollouts,
                },
                {"name": "B", "style": "classical", "pool": ["cute", "classical"], "rollouts": 20},
            ],
        }
    )


def write(folder, preset, seed=0, complete=True, about=None, **kwargs):
    """40 rollouts: all cute, so all rewards of phase A are 1 and all of phase B 0.

    `about`: what else is to stand in the summary.
    """
    rows = [
        {
            "index": index,
            "phase": int(index > 20),
            "detected_style": "cute" if index != 5 else None,
            "reward": float(index <= 20) if index != 5 else None,
            "state": "trained" if index != 5 else "unscored",
            "elapsed_s": 3.0 * index,
        }
        for index in range(1, 41)
    ]
    definition = scenario(seed, **kwargs)
    about = about or {}
    write_results(folder, definition, rows, [], preset=preset, complete=complete, **about)


@pytest.fixture
def place(tmp_path):
    write(tmp_path / "shift" / "rm-seed0", "running_mean")
    write(tmp_path / "shift" / "sao-seed1", "sao", 1, complete=False)
    write(tmp_path / "shift" / "sao-seed0", "sao")
    return tmp_path


def test_runs_are_found_and_the_method_comes_first(place):
    found, refused = runs.find_runs(place)
    assert [run.name for run in found] == ["shift/sao-seed0", "shift/sao-seed1", "shift/rm-seed0"]
    assert [run.complete for run in found] == [True, False, True]
    assert refused == []
    assert runs.find_runs(place / "nowhere") == ([], [])


@pytest.mark.parametrize(
    ("text", "why"), [("{", "Expecting"), ("{}", "no 'scenario'"), ("[]", "indices")]
)
def test_what_cannot_be_read_is_said_and_the_rest_is_shown(place, text, why):
    broken = place / "broken" / "summary.json"
    broken.parent.mkdir()
    broken.write_text(text)
    found, (sentence,) = runs.find_runs(place)
    assert len(found) == 3
    assert str(broken) in sentence
    assert why in sentence


def test_the_table_has_what_came_of_each_phase(place):
    table = runs.runs_table(runs.find_runs(place)[0])
    first = table.iloc[0]
    assert (first["preset"], first["seed"], first["rollouts"]) == ("sao", 0, 40)
    assert (first["A: last mean"], first["B: last mean"]) == (1.0, 0.0)
    assert first["A: rollouts to 0.8"] == "10"
    assert first["B: rollouts to 0.8"] == "never"
    assert first["minutes"] == 2.0


def test_rewards_and_shares_are_those_of_the_rollouts(place):
    results = [read_results(run.folder) for run in runs.find_runs(place)[0]]
    rewards = runs.rolling_rewards(results, 10)
    one = rewards[(rewards["preset"] == "sao") & (rewards["seed"] == 0)].set_index("rollout")
    assert one["reward"][20] == 1.0
    assert one["reward"][25] == 0.0  # of phase B alone
    assert one["reward"][40] == 0.0
    assert one["reward"][10] == 1.0  # the one without a verdict counts for nothing
    shares = runs.style_shares(results)
    assert shares["rollout"].tolist() == [5.5, 15.5, 25.5, 35.5]
    assert list(zip(shares["start"], shares["end"], strict=True)) == [
        (1, 10),
        (11, 20),
        (21, 30),
        (31, 40),
    ]
    assert shares["share"].tolist() == [1.0] * 4
    assert shares["answers"].tolist() == [27, 30, 30, 30]
    assert [(p.style, p.first_seq) for p in runs.phases_of(results[0])] == [
        ("cute", 1),
        ("classical", 21),
    ]


def test_groups_of_shares_begin_anew_at_a_switch(tmp_path):
    write(tmp_path / "short", "sao", 0, first_rollouts=13)
    results = [read_results(run.folder) for run in runs.find_runs(tmp_path)[0]]
    shares = runs.style_shares(results)
    bars = sorted(set(zip(shares["start"], shares["end"], strict=True)))
    assert bars == [(1, 10), (11, 13), (14, 23), (24, 33), (34, 40)]


def test_runs_of_other_phases_are_not_drawn_together(place):
    write(place / "longer", "sao", 2, first_rollouts=30)
    results = [read_results(run.folder) for run in runs.find_runs(place)[0]]
    with pytest.raises(ScenarioError, match="differ in their phases"):
        runs.same_phases(results)


MADE = {"method_version": "m", "lag": 0, "judge": "j", "settings_id": "s"}


def unlike(place):
    return runs.unlike(runs.find_runs(place)[0])


def test_seeds_of_one_making_belong_together(tmp_path):
    write(tmp_path / "a" / "sao-seed0", "sao", 0, about=MADE)
    write(tmp_path / "b" / "sao-seed1", "sao", 1, about=MADE, claim="Said anew.")
    write(tmp_path / "b" / "live", "sao", 2, about={**MADE, "settings_id": None})
    write(tmp_path / "b" / "rm-seed0", "running_mean", 0, about={**MADE, "settings_id": "other"})
    assert not unlike(tmp_path)


@pytest.mark.parametrize(
    ("about", "more", "what"),
    [
        ({"settings_id": "s2"}, {}, "settings"),
        ({"method_version": "m2"}, {}, "code version"),
        ({"method_version": None}, {}, "code version"),
        ({"lag": 3}, {}, "lag"),
        ({"judge": "j2"}, {}, "judge"),
        ({}, {"max_tokens": 9}, "definition (max_tokens)"),
        ({}, {"first_rollouts": 30, "temperature": 0.5}, "definition (phase, temperature)"),
        ({}, {"heldout": {"every": 7}}, "definition (heldout.every)"),
        ({"lag": 3, "judge": "j2"}, {}, "lag and judge"),
    ],
)
def test_what_differs_between_runs_of_a_preset_is_named(tmp_path, about, more, what):
    write(tmp_path / "a", "sao", 0, about=MADE)
    write(tmp_path / "b", "sao", 1, about={**MADE, **about}, **more)
    write(tmp_path / "c", "running_mean", 0, about=MADE)
    found = unlike(tmp_path)
    words = sorted(re.findall(r"\w+", found.presets.pop("sao")))
    assert words == sorted(re.findall(r"\w+", f"they differ in {what}"))
    assert not found  # it is said once, and of the other preset nothing


def test_two_runs_of_one_preset_and_seed_are_named(tmp_path):
    write(tmp_path / "tune-a" / "sao-seed1000", "sao", 1000, about=MADE)
    write(tmp_path / "tune-b" / "sao-seed1000", "sao", 1000, about={**MADE, "settings_id": "x"})
    assert unlike(tmp_path).presets == {
        "sao": "they differ in settings; tune-a/sao-seed1000 and tune-b/sao-seed1000 have the "
        "same seed 1000"
    }


def test_presets_that_were_made_differently_are_said(tmp_path):
    write(tmp_path / "a", "sao", 0, about=MADE)
    write(tmp_path / "b", "running_mean", 0, about={**MADE, "judge": "j2"}, max_tokens=9)
    found = unlike(tmp_path)
    assert found.presets == {}
    assert found.between == "they differ in judge and definition (max_tokens)"


def test_what_must_be_alike_is_what_compare_asks():
    compare = Path(__file__).parents[2] / "scenarios" / "compare.py"
    for name in ("MADE_ALIKE", "MAY_DIFFER"):
        (asked,) = (
            ast.literal_eval(node.value)
            for node in ast.parse(compare.read_text()).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
        )
        assert set(asked) == set(getattr(runs, name))


# ---- the page


@pytest.fixture
def open_runs(monkeypatch):
    def opened(place):
        monkeypatch.setattr(sys, "argv", ["app.py", "--store", "none", "--runs", str(place)])
        test = AppTest.from_file(str(APP), default_timeout=60)
        test.query_params["page"] = "Runs"
        return ran(test.run())

    return opened


def ran(test):
    assert not test.exception, test.exception
    return test


def shown(element):
    """What a reader sees: without what keeps the text from being read as markdown."""
    return re.sub(r"\\([!-/:-@\[-`{-~])|\u2060", r"\1", element.value)


def charts_on(test):
    return len(test.get("vega_lite_chart"))


def test_without_results_the_page_says_how_to_make_some(open_runs, tmp_path):
    test = open_runs(tmp_path)
    assert "online-sao train --scenario" in test.info[0].value
    assert charts_on(test) == 0


def test_presets_and_seeds_are_chosen(open_runs, place):
    test = open_runs(place)
    assert test.dataframe[0].value["run"].tolist() == [
        "shift/sao-seed0",
        "shift/sao-seed1",
        "shift/rm-seed0",
    ]
    assert charts_on(test) == 3  # the reward of all, and what each preset wrote
    assert "The policy follows." in map(shown, test.caption)
    test.multiselect(key="presets").set_value(["sao"])
    ran(test.run())
    assert charts_on(test) == 2
    test.multiselect(key="seeds").set_value([1])
    ran(test.run())
    assert test.dataframe[0].value["run"].tolist() == ["shift/sao-seed1"]
    test.multiselect(key="seeds").set_value([])
    ran(test.run())
    assert "No run has such a preset and seed" in test.info[0].value


def test_two_runs_of_one_seed_are_neither_one_line_nor_averaged(open_runs, tmp_path):
    for number, folder in enumerate(("tune-a", "tune-b")):
        for preset in ("sao", "running_mean"):
            about = MADE if preset == "running_mean" else {**MADE, "settings_id": folder}
            run = tmp_path / folder / f"{preset}-seed1000"
            write(run, preset, 1000 + number * (preset != "sao"), about=about)
            os.utime(run / "summary.json", (number, number))
    test = open_runs(tmp_path)
    # At first what was written last, which belongs together.
    assert test.multiselect(key="folders").options == ["tune-a", "tune-b"]
    assert test.multiselect(key="folders").value == ["tune-b"]
    assert test.dataframe[0].value["run"].tolist() == [
        "tune-b/sao-seed1000",
        "tune-b/running_mean-seed1000",
    ]
    assert charts_on(test) == 3
    assert not test.warning
    test.multiselect(key="folders").set_value(["tune-a", "tune-b"])
    ran(test.run())
    (warning,) = (shown(element) for element in test.warning)
    assert warning.startswith(
        "The runs of sao are not averaged: they differ in settings; tune-a/sao-seed1000 and "
        "tune-b/sao-seed1000 have the same seed 1000. Choose folders"
    )
    assert charts_on(test) == 2  # the reward, and what the other preset wrote
    assert "Styles the judge saw, seeds 1000, 1001 together." in map(shown, test.caption)
    test.multiselect(key="folders").set_value([])
    ran(test.run())
    assert "No folder is chosen" in shown(test.info[0])


def test_folders_that_belong_together_are_all_shown(open_runs, place):
    write(place / "later" / "sao-seed2", "sao", 2)
    test = open_runs(place)
    assert test.multiselect(key="folders").value == ["later", "shift"]
    assert len(test.dataframe[0].value) == 4
    assert not test.warning


def test_presets_of_another_judge_are_drawn_and_it_is_said(open_runs, tmp_path):
    write(tmp_path / "sao", "sao", 0, about=MADE)
    write(tmp_path / "rm", "running_mean", 0, about={**MADE, "judge": "j2"})
    test = open_runs(tmp_path)
    assert "The presets are not to be set against each other: they differ in judge." in shown(
        test.warning[0]
    )
    assert charts_on(test) == 3


def test_names_and_claims_are_no_markdown(open_runs, tmp_path):
    nasty = "![x](evil.png)"
    write(tmp_path / nasty, nasty, claim=nasty)
    broken = tmp_path / f"{nasty}2" / "summary.json"
    broken.parent.mkdir()
    broken.write_text("{")
    test = open_runs(tmp_path)
    elements = [*test.markdown, *test.caption, *test.warning]
    assert not any("![x](" in element.value for element in elements)
    assert sum(nasty in shown(element) for element in elements) == 3


def test_nor_are_they_in_what_is_said_of_differing_runs(open_runs, tmp_path):
    nasty = "![x](evil.png)"
    write(tmp_path / f"{nasty}1", nasty)
    write(tmp_path / f"{nasty}2", nasty)
    (warning,) = open_runs(tmp_path).warning
    assert "![x](" not in warning.value
    assert f"The runs of {nasty} are not averaged: {nasty}1 and {nasty}2 have" in shown(warning)


def test_a_folder_that_lost_a_file_is_said(open_runs, place):
    (place / "shift" / "sao-seed0" / "rollouts.csv.gz").unlink()
    test = open_runs(place)
    assert "it has no rollouts.csv.gz" in shown(test.warning[0])
    assert len(test.dataframe) == 1


def test_another_scenario_is_another_choice(open_runs, place):
    write(place / "drift", "sao", name="drift")
    data = json.loads((place / "drift" / "summary.json").read_text())
    assert data["scenario"] == "drift"
    test = open_runs(place)
    assert test.selectbox(key="scenario").options == ["drift", "shift"]
    assert test.dataframe[0].value["run"].tolist() == ["drift"]
