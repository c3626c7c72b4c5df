"""Preference files: shipped ones load, faulty ones are named."""

from dataclasses import replace

import pytest

from judge import JudgeError, load_preferences
from judge.preferences import parse_preferences, shipped_sets


def test_shipped_sets():
    assert shipped_sets() == ("archetypes", "everyday")
    archetypes = load_preferences("archetypes")
    assert list(archetypes.styles) == ["academic", "cute", "chuunibyou", "classical"]
    assert archetypes.exclusive
    everyday = load_preferences("everyday")
    assert set(everyday.styles) == {
        "concise",
        "warm",
        "bullet points",
        "no exclamation marks",
        "first person",
    }
    assert not everyday.exclusive


@pytest.mark.parametrize("name", shipped_sets())
def test_every_shipped_style_has_a_rubric_examples_and_rules(name):
    for style in load_preferences(name).styles.values():
        assert style.description
        assert style.earns_style
        assert style.earns_quality
        assert style.good
        assert style.bad
        assert style.rules


def test_an_own_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[styles.pirate]\ndescription = "Talks like a pirate."\n')
    mine = load_preferences(path)
    assert mine.name == "mine"
    assert mine.styles["pirate"].earns_style == "Talks like a pirate."


FAULTY = {
    "no styles": ("", "no styles"),
    "empty styles": ("[styles]", "no styles"),
    "no rubric": ("[styles.a]\ngood = ['x']", "no rubric"),
    "unknown key": ("[styles.a]\ndescription='x'\ncolour='red'", "unknown key 'colour'"),
    "unknown measure": (
        "[styles.a]\ndescription='x'\nrules.checks=[{measure='weight', max=1}]",
        "unknown measure 'weight'",
    ),
    "check without bound": (
        "[styles.a]\ndescription='x'\nrules.checks=[{measure='words'}]",
        "needs min or max",
    ),
    "bad pattern": (
        "[styles.a]\ndescription='x'\nrules.patterns=[{match='('}]",
        "is not valid",
    ),
    "reserved name": ("[styles.none]\ndescription='x'", "cannot be called 'none'"),
    "bounds": ("min_words=20\nmax_words=10\n[styles.a]\ndescription='x'", "min_words"),
    "toml": ("[styles", "not valid TOML"),
    "type": ("[styles.a]\ndescription=3", "'description' must be a text"),
    "list": ("[styles.a]\ndescription='x'\ngood='y'", "must be a list of texts"),
    "number": (
        "[styles.a]\ndescription='x'\nrules.words=[{any=['y'], weight='big'}]",
        "must be a number",
    ),
    "table": ("styles.a = 3", "must be a table"),
    "flag": ("exclusive='no'\n[styles.a]\ndescription='x'", "'exclusive' must be true or false"),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_faults_are_named(fault, tmp_path):
    text, message = FAULTY[fault]
    path = tmp_path / "faulty.toml"
    path.write_text(text)
    with pytest.raises(JudgeError, match=message) as raised:
        load_preferences(path)
    assert "faulty.toml" in str(raised.value)


def test_unknown_set_lists_the_shipped_ones():
    with pytest.raises(JudgeError, match="archetypes, everyday"):
        load_preferences("nope")
    with pytest.raises(JudgeError, match="no preference file"):
        load_preferences("nope.toml")


def test_fingerprints_follow_the_content():
    one = parse_preferences("[styles.a]\ndescription='x'")
    two = parse_preferences("[styles.a]\ndescription='y'")
    assert one.fingerprint != two.fingerprint
    assert one.rules_fingerprint == two.rules_fingerprint
    ruled = parse_preferences("[styles.a]\ndescription='x'\nrules.words=[{any=['y']}]")
    assert ruled.rules_fingerprint != one.rules_fingerprint
    assert replace(one, weights="elsewhere.npz").fingerprint == one.fingerprint
