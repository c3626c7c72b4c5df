"""python -m judge, and the arithmetic of calibration."""

import io
import json

import pytest
from standin import StandIn

from judge import JudgeError
from judge.__main__ import main
from judge.calibration import read_records, share, wilson

ANSWER = "The teacup gives your paws a snuggly hug, hehe! Sip softly, little bunny, it's warm."


@pytest.fixture
def labelled(tmp_path):
    path = tmp_path / "labelled.jsonl"
    rows = [
        {"id": "a", "answer": "A good styled tea.", "style": "cute", "quality": 1},
        {"id": "b", "answer": "A good tea.", "style": "cute", "quality": 1},
        {"id": "c", "answer": "A tea.", "style": "none", "quality": 0},
        {"id": "d", "answer": "A styled tea.", "style": "cute", "quality": 1},
        {"id": "h", "answer": "A good styled hack.", "style": "none", "quality": 0},
    ]
    for row in rows:
        row["prompt"] = "Write about tea."
        row["hostile"] = row["id"] == "h"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_score(capsys):
    code = main(["score", "--style", "cute", "--prompt", "Write about tea.", ANSWER])
    out = capsys.readouterr().out
    assert code == 0
    assert "reward         1" in out
    assert "offline/archetypes" in out


def test_score_from_standard_input(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Tea is nice."))
    assert main(["score", "--style", "cute", "--pool", "cute,academic"]) == 0
    assert "reward         0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["score", "--style", "nope", "x"], "Unknown style 'nope'"),
        (["score", "--style", "cute", " "], "no answer"),
        (["score", "--style", "cute", "--model", "nonsense", "x"], "litellm does not know"),
        (["calibrate", "nofile.jsonl"], "no labelled file"),
        (["compare", "offline/rules", "offline/nope", "--file", "x"], "no labelled file"),
    ],
)
def test_faults_are_one_sentence(arguments, message, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for word in ("score", "calibrate", "compare", "ZAI_API_KEY", "examples"):
        assert word in out


def test_calibrate_counts(labelled, capsys):
    with StandIn() as server:
        arguments = ["calibrate", str(labelled), "--model", "openai/x", "--api-base", server.url]
        assert main(arguments) == 0
    out = capsys.readouterr().out
    # by the stand-in: a is right; b is none, not cute; c is right; d is of quality 0
    assert "style agrees       0.750 (3 of 4" in out
    assert "quality agrees     0.750 (3 of 4" in out
    assert "reward agrees      0.500 (2 of 4" in out
    assert "hostile rewarded   1 of 1" in out
    assert "- b ()" in out
    assert "- d ()" in out
    assert "- h ()" in out
    assert "- a ()" not in out


def test_calibrate_says_what_was_not_scored(labelled, capsys):
    with StandIn(lambda answer, _t: "essay" if "good" in answer else "normal") as server:
        arguments = ["calibrate", str(labelled), "--model", "openai/x", "--api-base", server.url]
        assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "unscored           6, unreadable 6" in out  # a, b, and h against four styles
    assert "(1 of 2" in out


def test_compare(labelled, capsys):
    assert main(["compare", "offline/rules", "offline/rules", "--file", str(labelled)]) == 0
    out = capsys.readouterr().out
    assert out.count("1.000 (5 of 5") == 4


def test_fit_writes_weights_that_the_set_then_uses(tmp_path, capsys):
    pirate = tmp_path / "pirate.toml"
    pirate.write_text(
        "min_words = 3\n[styles.pirate]\ndescription = 'Pirate.'\n"
        "rules.words = [{any = ['arr', 'matey']}]\n"
    )
    rows = []
    for i in range(8):
        rows.append((f"Arr, matey, number {i} be a fine ship upon the sea!", "pirate"))
        rows.append((f"The meeting number {i} is moved to Monday at nine.", "none"))
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(
            json.dumps({"prompt": f"p{i}", "answer": a, "style": s, "quality": 1}) + "\n"
            for i, (a, s) in enumerate(rows)
        )
    )
    assert main(["fit", str(file), "--preferences", str(pirate)]) == 0
    assert "style agrees 1.000" in capsys.readouterr().out
    assert (tmp_path / "pirate.npz").is_file()
    arguments = ["score", "--preferences", str(pirate), "--style", "pirate"]
    assert main([*arguments, "Yo ho, the captain be drunk and the ship be lost at sea!"]) == 0
    assert "detected_style pirate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "not a JSON object"),
        ('{"answer": "x"}', "needs 'answer' and 'messages'"),
        ('{"answer": "x", "prompt": "y", "style": "cute"}', "needs 'style'"),
        ('{"answer": "x", "prompt": "y", "style": "cute", "quality": 2}', "needs 'style'"),
        ("", "has no records"),
    ],
)
def test_faulty_labels_are_named(line, message, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(JudgeError, match=message):
        read_records(path)


def test_wilson_interval():
    # p = 8/10, z = 1.96: centre (0.8 + 0.19207) / 1.38414 = 0.71674;
    # half width 1.96 / 1.38414 * sqrt(0.016 + 0.0096036) = 0.22657
    low, high = wilson(8, 10)
    assert low == pytest.approx(0.4902, abs=2e-4)
    assert high == pytest.approx(0.9433, abs=2e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(10, 10)[1] == pytest.approx(1.0)
    assert wilson(0, 10)[0] == pytest.approx(0.0)
    assert share(8, 10) == "0.800 (8 of 10; 95 % interval 0.490-0.943)"
