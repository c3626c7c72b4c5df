"""What the package gives away, and how little importing it costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import online_sao

HEAVY = {
    "torch",
    "vllm",
    "ray",
    "transformers",
    "litellm",
    "sqlalchemy",
    "pandas",
    "streamlit",
    "safetensors",
}


def loaded_by(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `code`."""
    script = f"{code}\nimport sys; print(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "online_sao",
        "online_sao.config",
        "online_sao.errors",
        "online_sao.prepare",
        "online_sao.scenario",
        "online_sao.types",
        "online_sao.writing",
        "online_sao.optimizer_state",
    ],
)
def test_importing_loads_nothing_heavy(module):
    loaded = loaded_by(f"import {module}")
    assert "online_sao" in loaded
    assert loaded & HEAVY == set()


def test_heavy_modules_would_be_seen():
    assert "sqlalchemy" in loaded_by("import online_sao.store")


def test_all_names_everything_that_is_given_away():
    tree = ast.parse(Path(online_sao.__file__).read_text())
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    assert set(online_sao.__all__) == imported | {"__version__"}
    assert sorted(online_sao.__all__) == online_sao.__all__
    assert all(hasattr(online_sao, name) for name in online_sao.__all__)


def test_the_version_is_the_projects():
    import tomllib

    project = Path(__file__).parents[1] / "pyproject.toml"
    with project.open("rb") as stream:
        assert online_sao.__version__ == tomllib.load(stream)["project"]["version"]


def test_errors_are_one_tree_and_cross_process_borders():
    import pickle

    from online_sao import errors

    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert errors.FencedError in classes
    for error in classes:
        assert issubclass(error, online_sao.OnlineSAOError)
        assert error.__name__ in errors.__doc__
        copy = pickle.loads(pickle.dumps(error("one sentence.")))
        assert (type(copy), str(copy)) == (error, "one sentence.")
