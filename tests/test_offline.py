"""The offline runner with the real engine: the same numbers twice, and going on after a stop."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from online_sao import offline
from online_sao.config import Config, native_dtype
from online_sao.errors import ScenarioError
from online_sao.learner.loop import make_run
from online_sao.prepare import model_hash
from online_sao.scenario import Request, load_scenario, read_results, write_results

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SCENARIO = """
name = "tiny"
claim = "the runner works"
topics = "writing"
max_tokens = 12
[heldout]
every = 4
answers = 4
[[phase]]
name = "Cute"
style = "cute"
pool = ["academic", "cute", "chuunibyou"]
rollouts = 8
[[phase]]
name = "Classical"
style = "classical"
pool = ["classical", "cute", "chuunibyou"]
rollouts = 4
"""
FLOAT32 = ("engine.dtype=float32", "learner.compute_dtype=float32", "engine.max_model_len=512")
CLOCKS = ("elapsed_s", "seconds")


def command(folder: Path, scenario: Path, *more: str) -> list[str]:
    arguments = [sys.executable, "-m", "online_sao.cli", "train", "--scenario", str(scenario)]
    return [*arguments, "--out", str(folder), *more]


def tiny(model: Path, *settings: str) -> list[str]:
    chosen = (*FLOAT32, "learner.value_pretraining_rollouts=4", "learner.threads=1", *settings)
    return ["--model", str(model), *(part for setting in chosen for part in ("--set", setting))]


def numbers(folder: Path) -> list[dict]:
    """All rows of a result folder, without what a clock measured."""
    results = read_results(folder)
    rows = [*results.rows, *results.heldout]
    return [
        {key: value for key, value in row.items() if not key.startswith(CLOCKS)} for row in rows
    ]


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """Result folder of an uninterrupted run with that lag, made once."""
    made = {}

    def run(lag: str) -> Path:
        if lag not in made:
            folder = tmp_path_factory.mktemp(f"lag{lag}")
            path = folder / "tiny.toml"
            path.write_text(SCENARIO)
            arguments = command(folder, path, "--lag", lag, *tiny(tiny_model))
            subprocess.run(arguments, check=True, timeout=300)
            made[lag] = folder / "sao-seed0"
        return made[lag]

    return run


@pytest.mark.parametrize("lag", [pytest.param("0", marks=pytest.mark.long), "4"])
def test_the_same_seed_gives_the_same_numbers(tiny_model, scenario, tmp_path, whole, lag):
    more = ()
    if lag == "4":  # and another run beside it changes nothing
        more = ("--seeds", "0", "1", "--jobs", str(min(2, len(os.sched_getaffinity(0)))))
    arguments = command(tmp_path, scenario, "--lag", lag, *tiny(tiny_model), *more)
    subprocess.run(arguments, check=True, timeout=300)
    first = numbers(whole(lag))
    second = numbers(tmp_path / "sao-seed0")
    assert first == second
    if more:
        assert first != numbers(tmp_path / "sao-seed1")
    trained = [row for row in first if row.get("state") == "trained"]
    assert len(trained) == 12
    lags = {row["policy_lag"] for row in trained}
    assert lags == ({0} if lag == "0" else {0, 1, 2, 3})
    # Float32 on both sides: nothing lies between sampling and learning but the lag.
    at_once = [row for row in trained if row["policy_lag"] == 0]
    assert max(row["policy/logprob_gap"] for row in at_once) < 1e-4


@pytest.mark.long
def test_an_interrupted_run_goes_on_to_the_same_numbers(tiny_model, scenario, tmp_path, whole):
    cut = tmp_path / "cut"
    arguments = tiny(tiny_model)
    process = subprocess.Popen(command(cut, scenario, *arguments), start_new_session=True)
    journal = cut / "sao-seed0" / "journal.json"
    deadline = time.monotonic() + 200
    while not journal.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    deadline = time.monotonic() + 20  # Python's own helper processes end a moment later
    while _alive_in_group(process.pid):
        assert time.monotonic() < deadline, "a process of the run is left"
        time.sleep(0.1)
    subprocess.run(command(cut, scenario, *arguments), check=True, timeout=300)
    assert numbers(cut / "sao-seed0") == numbers(whole("4"))


@pytest.mark.long
def test_a_group_method_answers_each_prompt_several_times(tiny_model, scenario, tmp_path):
    settings = tiny(tiny_model, "learner.group_size=4", "learner.rollouts_per_update=4")
    subprocess.run(
        command(tmp_path / "out", scenario, "--preset", "grpo", *settings), check=True, timeout=300
    )
    rows = read_results(tmp_path / "out" / "grpo-seed0").rows
    assert len(rows) == 12 * 4
    assert max(row["trained_version"] or 0 for row in rows) <= 12


@pytest.mark.long
def test_an_update_waits_until_it_is_full(tiny_model, scenario, tmp_path):
    """Four answers at a time, three to an update; what is left is learned at a phase's end."""
    settings = [*tiny(tiny_model, "learner.rollouts_per_update=3"), "--heldout-every", "0"]
    subprocess.run(command(tmp_path, scenario, *settings), check=True, timeout=300)
    rows = read_results(tmp_path / "sao-seed0").rows
    sizes = Counter(row["trained_version"] for row in rows)
    assert [sizes[version] for version in sorted(sizes)] == [3, 3, 2, 3, 1]


def test_another_run_in_the_folder_is_refused(tiny_model, scenario, tmp_path):
    folder = tmp_path / "out" / "sao-seed0"
    folder.mkdir(parents=True)
    (folder / "journal.json").write_text('{"identity": {"run_id": "another"}}')
    (folder / "summary.json").write_text("{}")
    done = subprocess.run(
        command(tmp_path / "out", scenario, *tiny(tiny_model)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert "other settings" in done.stderr


def test_a_finished_run_is_taken_only_for_what_it_is(tiny_model, scenario, tmp_path, monkeypatch):
    definition = load_scenario(scenario)
    overrides = {"model.name": str(tiny_model)}
    config = Config.load(overrides=overrides)
    folder = tmp_path / "sao-seed0"
    assert not offline.is_finished(config, definition, folder, 4)
    about = {
        "run_id": make_run(config, model_hash(str(tiny_model))).id,
        "judge": offline.judge_identity(config),
        "lag": 3,
        "method_version": offline.method_version(),
    }
    write_results(folder, definition, [], [], preset="sao", complete=False, **about)
    assert not offline.is_finished(config, definition, folder, 4)
    write_results(folder, definition, [], [], preset="sao", complete=True, **about)
    assert offline.is_finished(config, definition, folder, 4)
    other = Config.load(overrides=overrides | {"learner.kl_coef": 0.3})
    elsewhere = Config.load(overrides=overrides | {"judge.model": "zai/glm-4.7"})
    for arguments, what in (
        ((other, definition, folder, 4), "another settings"),
        ((elsewhere, definition, folder, 4), "another judge"),
        ((config, definition.replace(phase_rollouts=3), folder, 4), "another definition"),
        ((config, definition, folder, 1), "another lag"),
    ):
        with pytest.raises(ScenarioError, match=what):
            offline.is_finished(*arguments)
    monkeypatch.setattr(offline, "method_version", lambda: "changed")
    with pytest.raises(ScenarioError, match="another code"):
        offline.is_finished(config, definition, folder, 4)


@pytest.mark.parametrize("lag", [1, 4])
def test_rewards_that_come_late_come_in_order_of_arrival(lag):
    runner = object.__new__(offline.OfflineRunner)
    runner._answered = itertools.count()
    runner._answer = lambda batch: [(request, [request.position]) for request in batch]
    delays = random.Random(0)
    requests = [
        Request(0, position, "tea", [], "cute", ("cute",), seed=0, delay=delays.randint(1, 5))
        for position in range(200)
    ]
    held_back, arrived = [], []
    for start in range(0, len(requests), lag):
        batch = requests[start : start + lag]
        ready = runner._ready(batch, held_back, is_last=batch[-1] is requests[-1])
        now = batch[-1].position
        if batch[-1] is not requests[-1]:
            assert all(request.position + request.delay <= now for request, _ in ready)
        keys = [(request.position + request.delay, request.position) for request, _ in ready]
        assert keys == sorted(keys)
        arrived += [position for _, position in ready]
    assert sorted(arrived) == list(range(200))
    assert arrived != sorted(arrived)


def test_the_method_is_all_that_its_patterns_name():
    root = Path(offline.__file__).parents[1]
    for pattern in offline.METHOD:
        assert list(root.glob(pattern)), pattern


@pytest.mark.long
def test_the_embedded_model_learns_from_its_answers(base_model, scenario, tmp_path):
    """The real model (before its warm start), in the dtype of this machine, as users run it."""
    scenario.write_text(scenario.read_text().replace("max_tokens = 12", "max_tokens = 56"))
    arguments = ["--phase-rollouts", "4", "--heldout-every", "0", "--model", str(base_model)]
    arguments += ["--set", "learner.value_pretraining_rollouts=4", "--lag", "1"]
    subprocess.run(command(tmp_path / "out", scenario, *arguments), check=True)
    results = read_results(tmp_path / "out" / "sao-seed0")
    trained = [row for row in results.rows if row["state"] == "trained"]
    assert len(trained) == 8
    assert all(row["quality"] in (0, 1) for row in results.heldout)
    # Each from the newest weights, so what remains is that engine and learner compute with other
    # kernels: rounding in bfloat16, next to nothing in float32.
    gap = 0.2 if native_dtype() == "bfloat16" else 1e-3
    for row in trained:
        assert row["policy_lag"] == 0
        assert row["policy/importance_ratio_mean"] == pytest.approx(1, abs=gap / 2)
        assert row["policy/logprob_gap"] < gap
        assert row["policy/masked_fraction"] < gap / 2


def _alive_in_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
