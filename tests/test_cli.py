"""The command line: bad input ends with one clear sentence and exit code 2, before any start."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from online_sao import sweep
from online_sao.cli import main
from online_sao.config import Config

PREFERENCE_SHIFT = Path(__file__).parents[1] / "scenarios" / "preference_shift.toml"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "online_sao.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of complaint; there must be no stack trace."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("online-sao: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "nope"), "Unknown model 'nope'"),
        (("--model", "/no/such/folder"), "not a model folder"),
        (("--config", "missing.toml"), "no config file"),
        (("--set", "learner.gamma=2"), "learner.gamma"),
        (("--set", "learner.nonsense=1"), "learner.nonsense"),
        (("--set", "nonsense=1"), "section.setting"),
        (("--set", "service.port=99999"), "service.port"),
        (("--set", "preference.style=pirate"), "pirate"),
        (("--set", "service.topics=missing.toml"), "missing.toml"),
        (("--judge", "no-such-provider/model"), "no-such-provider"),
        (("--judge", "zai/glm-4.7"), "ZAI_API_KEY"),
        (("--preset", "grpo"), "online-sao train"),
        (("--host", "0.0.0.0"), "ONLINE_SAO_API_KEY"),
        (("--run-dir", "/proc/nowhere"), "cannot be written"),
    ],
)
def test_serve_refuses(arguments, says, tiny_model):
    if "--model" not in arguments:
        arguments = (*arguments, "--model", str(tiny_model))
    assert says in complaint(run("serve", "--port", "0", *arguments))


def test_a_taken_port_is_named(tiny_model, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run(
            "serve", "--model", str(tiny_model), "--port", port, "--run-dir", str(tmp_path / "r")
        )
    assert port in complaint(done)


def test_a_cache_that_cannot_be_written_is_named():
    done = run("prepare", ONLINE_SAO_HOME="/proc/nowhere")
    assert "ONLINE_SAO_HOME" in complaint(done)


def test_an_unknown_preset_lists_the_known_ones():
    done = run("serve", "--preset", "nope")
    assert done.returncode == 2
    assert "running_mean" in done.stderr


def test_train_refuses_a_missing_scenario():
    assert "no scenario file" in complaint(run("train", "--scenario", "missing.toml"))


def test_train_refuses_more_runs_at_once_than_cores():
    too_many = len(os.sched_getaffinity(0)) + 1
    seeds = [str(seed) for seed in range(too_many)]
    for jobs in (0, too_many):
        arguments = ["train", "--scenario", str(PREFERENCE_SHIFT), "--jobs", str(jobs)]
        assert "cores" in complaint(run(*arguments, "--seeds", *seeds))


@pytest.fixture
def planned(monkeypatch):
    """The runs that `train` plans, which are not done."""
    runs = []
    monkeypatch.setattr(sweep, "sweep", lambda planned, jobs, tell: runs.extend(planned))
    return runs


@pytest.mark.parametrize(
    ("definition", "arguments", "seeds"),
    [
        ("seed = 7", [], [7]),
        ("", [], [0]),
        ("seed = 7", ["--seed", "0"], [0]),
        ("seed = 7", ["--seeds", "0", "1"], [0, 1]),
        ("seed = 7", ["--set", "learner.seed=0"], [0]),
        ("seed = 7", ["--config", "my.toml"], [0]),
        ("seed = 7\n[settings]\n'learner.seed' = 0", [], [0]),
    ],
)
def test_train_takes_the_definitions_seed_where_none_is_given(
    planned, tmp_path, monkeypatch, definition, arguments, seeds
):
    monkeypatch.chdir(tmp_path)
    shipped = PREFERENCE_SHIFT.read_text()
    assert shipped.count("seed = 0\n") == 1
    name, _, rest = shipped.replace("seed = 0\n", "").partition("[heldout]")
    Path("mine.toml").write_text(f"{name}{definition}\n[heldout]{rest}")
    Path("my.toml").write_text("[learner]\nseed = 0\n")
    assert main(["train", "--scenario", "mine.toml", *arguments]) == 0
    assert [run.config.learner.seed for run in planned] == seeds
    assert [run.scenario.seed for run in planned] == seeds
    assert [run.folder.name for run in planned] == [f"sao-seed{seed}" for seed in seeds]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--seeds", "0", "0"], "Two of these runs would work in runs/offline/sao-seed0; name"),
        (["--seeds", "0", "1", "--set", "learner.seed=5"], "runs/offline/sao-seed5; name"),
        (["--presets", "sao", "spo", "sao"], "runs/offline/sao-seed0; name each preset"),
        (["--seed", "-1"], "learner.seed"),
        (["--seeds", "0", "-1"], "learner.seed"),
    ],
)
def test_train_refuses_runs_that_cannot_be_done(planned, capsys, arguments, says):
    assert main(["train", "--scenario", str(PREFERENCE_SHIFT), *arguments]) == 2
    assert says in capsys.readouterr().err
    assert planned == []


def test_train_offers_no_folder_of_an_endpoint(planned, capsys):
    with pytest.raises(SystemExit):
        main(["train", "--scenario", str(PREFERENCE_SHIFT), "--run-dir", "here"])
    assert "unrecognized arguments: --run-dir" in capsys.readouterr().err
    assert main(["train", "--scenario", str(PREFERENCE_SHIFT)]) == 0
    assert len(planned) == 1


@pytest.mark.parametrize("command", [[], ["prepare"], ["serve"], ["train"], ["dashboard"]])
def test_help_teaches(command, capsys):
    try:
        code = main([*command, "--help"] if command else [])
    except SystemExit as ended:
        code = ended.code
    assert code == 0
    assert len(capsys.readouterr().out) > 200


def test_settings_are_printed_as_a_config_file(tmp_path):
    done = run("settings", "--preset", "vapo", "--set", "service.port=8123")
    file = tmp_path / "my.toml"
    file.write_text(done.stdout)
    config = Config.load(file)
    assert (config.learner.preset, config.learner.objective) == ("vapo", "ppo_clip")
    assert config.service.port == 8123
    assert "learner.nonsense" in complaint(run("settings", "--set", "learner.nonsense=1"))
