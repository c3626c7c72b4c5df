"""docs/algorithm.md names only what exists, and its presets are those of the config."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from online_sao.config import PRESETS, Config

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "algorithm.md").read_text()
CODE = sorted(set(re.findall(r"`([\w/]+\.py):(\w[\w.]*)`", TEXT)))
TESTS = sorted(set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", TEXT)))


def defined_names(path):
    """Functions, classes and `Class.method`s that a file defines."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{f.name}" for f in node.body if isinstance(f, ast.FunctionDef)}
    return names


@pytest.mark.parametrize(("file", "name"), CODE, ids=[f"{f}:{n}" for f, n in CODE])
def test_code_that_is_named_exists(file, name):
    path = ROOT / "online_sao" / (file if "/" in file else f"algorithm/{file}")
    assert name in defined_names(path)


@pytest.mark.parametrize(("file", "name"), TESTS, ids=[n for _, n in TESTS])
def test_tests_that_are_named_exist(file, name):
    assert name in defined_names(ROOT / "tests" / "algorithm" / file)


def test_every_public_function_of_the_mathematics_is_named():
    public = {
        name
        for path in (ROOT / "online_sao" / "algorithm").glob("*.py")
        for name in defined_names(path)
        if not name.startswith("_") and "." not in name
    }
    tools = {"masked_sum", "masked_mean", "broadcast_advantages", "k3_kl", "effective_sample_size"}
    assert public - tools == {name for file, name in CODE if "/" not in file}


def rows(heading):
    """Cells of the first table under a heading, without its two header rows."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_presets_are_those_of_the_config():
    documented = {}
    for name, settings, _ in rows("Presets"):
        lines = re.findall(r"`([^`]+)`", settings)
        documented[name.strip("`")] = tomllib.loads("\n".join(lines))
    assert documented == PRESETS


def test_settings_that_are_named_exist():
    defaults = Config()
    named = [
        setting for row in rows("Hyperparameters") for setting in re.findall("`(.+?)`", row[2])
    ]
    assert len(named) > 20
    for setting in named:
        section, _, field = setting.rpartition(".")
        assert hasattr(getattr(defaults, section or "learner"), field), setting
