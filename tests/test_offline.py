"""The offline runner with the real engine: the same numbers twice, and going on after a stop."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from judge import Unscored, Verdict
from online_sao import offline
from online_sao.config import Config, native_dtype
from online_sao.errors import ScenarioError
from online_sao.learner.checkpoint import list_checkpoints
from online_sao.learner.loop import make_run
from online_sao.prepare import model_hash
from online_sao.scenario import Request, load_scenario, read_results, write_results
from online_sao.types import Rollout, RolloutState, WeightSpan
from online_sao.writing import DATA

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


class FakeEngine:
    """Answers that follow from the request's seed and the weights, without vLLM."""

    def __init__(self, config, model, weights_dir):
        self.version, self.weights = 0, 0.0

    def load_weights(self, version, weights):
        self.version = version
        self.weights = sum(tensor.double().sum().item() for tensor in weights.values())

    def generate(self, prompts, ids, seeds, *, max_tokens, temperature, answers_per_prompt=1):
        rollouts = []
        for messages, id, seed in zip(prompts, ids, seeds, strict=True):
            chance = random.Random(f"{seed}/{self.weights}")
            tokens = [chance.randrange(3, 500) for _ in range(6)]
            rollouts.append(
                Rollout(
                    id=id,
                    response_id=id,
                    choice=0,
                    prompt_token_ids=np.array([1, 45, 46], np.int32),
                    token_ids=np.array(tokens, np.int32),
                    behavior_logprobs=np.array([-6 - chance.random() for _ in tokens], np.float32),
                    weight_spans=(WeightSpan(self.version, 0, len(tokens)),),
                    temperature=temperature,
                    messages=messages,
                    answer=f"{tokens}",
                    finish_reason="stop",
                )
            )
        return rollouts


class FakeJudge:
    async def score(self, messages, answer, style, pool):
        return Verdict(quality=1, style=random.Random(answer).randrange(2), detected_style=style)


@pytest.fixture
def make_runner(tiny_model, monkeypatch):
    """An OfflineRunner with the real learner on the tiny model, and the rest fake."""
    monkeypatch.setattr(offline, "OfflineEngine", FakeEngine)
    monkeypatch.setattr(offline, "checked_judge", lambda config, preferences: FakeJudge())

    def made(definition, folder, **settings):
        overrides = {
            "model.name": str(tiny_model),
            "learner.compute_dtype": "float32",
            "learner.threads": 1,
            "learner.value_pretraining_rollouts": 4,
        }
        overrides |= {f"learner.{name}": value for name, value in settings.items()}
        return offline.OfflineRunner(Config.load(overrides=overrides), definition, folder, lag=2)

    return made


@pytest.fixture
def saves(monkeypatch, tmp_path):
    """Copies of a result folder as a kill after each save would leave it: rows to folder."""
    found = {}
    save = offline.OfflineRunner._save

    def save_and_copy(self):
        save(self)
        versions = [version for version, _ in list_checkpoints(self._folder / "checkpoints")]
        assert versions == [self._version]
        copy = tmp_path / "copies" / f"{self._folder.name}-{len(self._rows)}"
        found[len(self._rows)] = shutil.copytree(self._folder, copy)

    monkeypatch.setattr(offline.OfflineRunner, "_save", save_and_copy)
    return found


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


KILLED_AT_4 = """
import shutil, sys
from online_sao import cli, offline, sweep
save = offline.OfflineRunner._save
def save_and_copy(self):
    save(self)
    if len(self._rows) == 4:
        shutil.copytree(self._folder, sys.argv[1])
def here(runs, jobs, tell):
    for run in runs:
        offline.OfflineRunner(run.config, run.scenario, run.folder, run.lag).run()
offline.OfflineRunner._save = save_and_copy
sweep.sweep = here
sys.exit(cli.main(sys.argv[2:]))
"""
"""A run to its end that leaves its folder as a kill after four rollouts would."""


@pytest.mark.long
def test_a_run_killed_between_evaluations_goes_on_to_the_same_numbers(
    tiny_model, scenario, tmp_path
):
    """With the real engine; the tests with a fake one below say where a run is saved."""
    settings = [*tiny(tiny_model, "learner.checkpoint_every=3"), "--heldout-every", "0"]
    settings += ["--lag", "2", "--final-answers", "4"]
    cut = tmp_path / "cut" / "sao-seed0"
    run = command(tmp_path / "whole", scenario, *settings)[3:]
    subprocess.run([sys.executable, "-c", KILLED_AT_4, str(cut), *run], check=True, timeout=300)
    assert len(json.loads((cut / "journal.json").read_text())["rows"]) == 4
    subprocess.run(command(tmp_path / "cut", scenario, *settings), check=True, timeout=300)
    expected = numbers(tmp_path / "whole" / "sao-seed0")
    assert sum(row.get("state") == "trained" for row in expected) == 12
    assert numbers(cut) == expected


@pytest.mark.parametrize(
    ("settings", "changes", "expected"),
    [
        ({"checkpoint_every": 3}, {}, [4, 8, 12]),  # after two batches; then the borders
        ({"checkpoint_every": 2}, {}, [2, 4, 6, 8, 10, 12]),
        ({"checkpoint_every": 0}, {}, [8, 12]),
        # Only after rollout 6 does none of the two of a batch wait for an update of three.
        ({"checkpoint_every": 1, "rollouts_per_update": 3}, {}, [6, 8, 12]),
        # The last of a batch is always held back until the next one.
        ({"checkpoint_every": 1}, {"delay": {"min_rollouts": 1, "max_rollouts": 1}}, [8, 12]),
    ],
)
def test_a_run_goes_on_from_wherever_it_was_saved(
    make_runner, saves, scenario, tmp_path, settings, changes, expected
):
    definition = load_scenario(scenario).replace(heldout_every=0)
    definition = type(definition).model_validate(definition.model_dump(by_alias=True) | changes)
    make_runner(definition, tmp_path / "whole", **settings).run()
    assert list(saves) == expected
    assert not (tmp_path / "whole" / "journal.json").exists()
    rows = numbers(tmp_path / "whole")
    for saved, folder in list(saves.items()):
        saves.clear()
        make_runner(definition, folder, **settings).run()
        assert numbers(folder) == rows
        assert list(saves) == [later for later in expected if later > saved]


def test_a_checkpoint_without_its_journal_does_not_take_the_journals_place(
    make_runner, saves, scenario, tmp_path
):
    """A kill between the two leaves a newer one; then the user wants more of them."""
    definition = load_scenario(scenario).replace(heldout_every=0)
    make_runner(definition, tmp_path / "whole", checkpoint_every=4).run()
    cut = shutil.copytree(saves[4], tmp_path / "cut")
    shutil.copytree(saves[8] / "checkpoints" / "v8", cut / "checkpoints" / "v8")
    make_runner(definition, cut, checkpoint_every=2).run()
    assert numbers(cut) == numbers(tmp_path / "whole")


@pytest.mark.parametrize("what", ["room", "journal"])
def test_a_full_disk_does_not_end_a_run(make_runner, scenario, tmp_path, monkeypatch, capsys, what):
    definition = load_scenario(scenario)  # saves after 4, 8 and 12 rollouts
    make_runner(definition, tmp_path / "whole").run()
    folder, cut = tmp_path / "run", tmp_path / "cut"
    runner = make_runner(definition, folder)
    full = False

    def on_progress(done, total, _):
        nonlocal full
        if done == 6:
            full = True
            if what == "journal":
                runner._partial_journal = tmp_path / "no folder" / "journal"
        if done == 10:
            shutil.copytree(folder, cut)

    usage = shutil.disk_usage
    if what == "room":
        monkeypatch.setattr(
            shutil, "disk_usage", lambda place: usage(place)._replace(free=0 if full else 2**40)
        )
    runner.run(on_progress)
    assert numbers(folder) == numbers(tmp_path / "whole")
    assert read_results(folder).summary["complete"]
    said = capsys.readouterr().err
    assert said.count("could not be saved") == 1
    assert "at rollout 8" in said
    assert "begins again from rollout 4" in said
    assert "free some space" in said
    assert "learning goes on" not in said  # as the service says, which keeps its queue
    # Killed after rollout 10 it goes on from the point before the disk was full.
    assert len(json.loads((cut / "journal.json").read_text())["rows"]) == 4
    assert len(read_results(cut).rows) == 8  # what is small is written all the same
    full = False
    make_runner(definition, cut).run()
    assert numbers(cut) == numbers(tmp_path / "whole")


def test_results_that_cannot_be_written_are_an_error(make_runner, scenario, tmp_path, monkeypatch):
    definition = load_scenario(scenario)

    def refuse(*_, complete, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(offline, "write_results", refuse)
    with pytest.raises(ScenarioError, match=r"No space left on device\); free some space"):
        make_runner(definition, tmp_path / "run").run()
    monkeypatch.undo()
    assert len(json.loads((tmp_path / "run" / "journal.json").read_text())["rows"]) == 12


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
    noisier = Config.load(overrides=overrides | {"judge.flip_probability": 0.1})
    voting = Config.load(overrides=overrides | {"judge.votes": 3})
    for arguments, what in (
        ((other, definition, folder, 4), "another settings"),
        ((elsewhere, definition, folder, 4), "another judge"),
        ((noisier, definition, folder, 4), "another judge"),
        ((voting, definition, folder, 4), "another judge"),
        ((config, definition.replace(phase_rollouts=3), folder, 4), "another definition"),
        ((config, definition, folder, 1), "another lag"),
    ):
        with pytest.raises(ScenarioError, match=what):
            offline.is_finished(*arguments)
    monkeypatch.setattr(offline, "method_version", lambda: "changed")
    with pytest.raises(ScenarioError, match="another code"):
        offline.is_finished(config, definition, folder, 4)


def test_runs_from_before_the_hash_of_a_topics_file_are_known_again(
    tiny_model, make_runner, scenario, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shipped = (DATA / "writing.toml").read_text()
    Path("mine.toml").write_text(shipped)
    scenario.write_text(SCENARIO.replace('"writing"', '"mine.toml"'))
    definition = load_scenario(scenario)
    config = Config.load(overrides={"model.name": str(tiny_model)})
    about = {
        "run_id": make_run(config, model_hash(str(tiny_model))).id,
        "judge": offline.judge_identity(config),
        "lag": 3,
        "method_version": offline.method_version(),
    }
    folder = tmp_path / "sao-seed0"
    before = definition.model_copy(update={"topics": "mine.toml", "topics_hash": None})
    write_results(folder, before, [], [], preset="sao", complete=True, **about)
    assert offline.is_finished(config, definition, folder, 4)
    runner = make_runner(definition, tmp_path / "cut")
    identity = runner._identity() | {"definition": before.model_dump(mode="json", by_alias=True)}
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "journal.json").write_text(json.dumps({"identity": identity}))
    assert runner._read_journal() is not None
    # Since then the content counts.
    write_results(folder, definition, [], [], preset="sao", complete=True, **about)
    Path("mine.toml").write_text(shipped.replace("making tea", "making cocoa"))
    with pytest.raises(ScenarioError, match=r"another definition \(topics\)"):
        offline.is_finished(config, load_scenario(scenario), folder, 4)


def test_a_result_folder_is_worked_in_by_one_process_at_a_time(tiny_model, scenario, tmp_path):
    folder = tmp_path / "sao-seed0"
    with offline.only_here(folder):
        # What is read there would be refused too; but nothing may be read.
        (folder / "journal.json").write_text('{"identity": {"run_id": "another"}}')
        done = subprocess.run(
            command(tmp_path, scenario, *tiny(tiny_model)),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 2
    assert f"Another process works in {folder}; wait until it has ended" in done.stderr
    assert "Traceback" not in done.stderr
    # Finished: nothing is left of the lock.
    assert [path.name for path in folder.iterdir()] == ["journal.json"]
    with pytest.raises(ZeroDivisionError), offline.only_here(folder):
        raise ZeroDivisionError
    write_results(folder, load_scenario(scenario), [], [], preset="sao", complete=True)
    assert read_results(folder).rows == []  # whatever a stopped run has left there
    with offline.only_here(folder):
        pass
    assert not (folder / offline.LOCK).exists()


def test_a_result_folder_that_cannot_be_written_is_named():
    with (
        pytest.raises(ScenarioError, match=r"/proc/nowhere cannot be written .*--out"),
        offline.only_here(Path("/proc/nowhere")),
    ):
        pass


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


NO_METHOD = {"__init__.py", "checkpoint.py", "export.py", "guards.py", "loop.py", "memory.py"}
"""Of the learner's folder: what an offline run's numbers do not come from."""


class TestMethodVersion:
    def test_it_covers_the_algorithm_the_learner_and_the_judge(self):
        root = Path(offline.__file__).parents[1]
        covered = {path for pattern in offline.METHOD for path in root.glob(pattern)}
        for pattern in offline.METHOD:
            assert list(root.glob(pattern)), pattern
        for folder in ("online_sao/algorithm", "online_sao/learner", "judge"):
            others = {path.name for path in root.glob(f"{folder}/*.py")} - {
                path.name for path in covered if path.parent == root / folder
            }
            assert others == (NO_METHOD if folder.endswith("learner") else set())

    def test_another_byte_is_another_version(self, tmp_path, monkeypatch):
        root = tmp_path / "copy"
        for pattern in offline.METHOD:
            for path in Path(offline.__file__).parents[1].glob(pattern):
                if path.is_file():
                    target = root / path.relative_to(Path(offline.__file__).parents[1])
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, target)
        before = offline.method_version()
        monkeypatch.setattr(offline, "__file__", str(root / "online_sao" / "offline.py"))
        assert offline.method_version() == before
        changed = root / "online_sao" / "learner" / "critic.py"
        changed.write_bytes(changed.read_bytes() + b" ")
        assert offline.method_version() != before


def test_seeds_of_the_same_settings_are_known_as_such(make_runner, scenario, tmp_path):
    definition = load_scenario(scenario)
    runners = [
        make_runner(definition, tmp_path / str(n), **settings)
        for n, settings in enumerate(({"seed": 1}, {"seed": 2}, {"seed": 1, "policy_lr": 1e-6}))
    ]
    one, other, unlike = (runner._settings_id for runner in runners)
    assert one == other != unlike
    assert len({runner._run.id for runner in runners}) == 3


def test_what_is_evaluated_when(make_runner, scenario, tmp_path):
    runner = make_runner(load_scenario(scenario), tmp_path / "run")
    runner.run()
    held_out = Counter(
        (row["index"], row["phase"], bool(row["final"]))
        for row in read_results(tmp_path / "run").heldout
    )
    assert held_out == {
        (0, 0, False): 4,  # the start policy
        (4, 0, False): 4,
        (8, 0, True): 4,
        (8, 1, False): 4,  # another pool is offered
        (12, 1, True): 4,
    }


def test_what_must_not_be_trained_on_is_not(make_runner, scenario, tmp_path, monkeypatch):
    generate, score = FakeEngine.generate, FakeJudge.score

    def with_one_excluded(self, prompts, ids, seeds, **settings):
        made = generate(self, prompts, ids, seeds, **settings)
        if ids[0].endswith("-0-0"):
            made[0] = replace(made[0], state=RolloutState.EXCLUDED, reason="too_long")
        return made

    async def silent_once(self, messages, answer, style, pool):
        silent_once.asked += 1
        if silent_once.asked == silent_once.at:
            return Unscored("timeout", "no answer")
        return await score(self, messages, answer, style, pool)

    monkeypatch.setattr(FakeEngine, "generate", with_one_excluded)
    monkeypatch.setattr(FakeJudge, "score", silent_once)
    silent_once.asked, silent_once.at = 0, -1
    runner = make_runner(load_scenario(scenario), tmp_path / "run")
    learn = runner._play_phase

    def from_here(number, *rest):
        if number == 0:
            silent_once.asked, silent_once.at = 0, 2  # the second answer of the first phase
        learn(number, *rest)

    monkeypatch.setattr(runner, "_play_phase", from_here)
    summary = runner.run()
    rows = read_results(tmp_path / "run").rows
    assert [(row["state"], row["reason"]) for row in rows[:3]] == [
        ("excluded", "too_long"),
        ("unscored", "timeout"),
        ("trained", None),
    ]
    assert [row["trained_version"] for row in rows[:3]] == [None, None, 1]
    assert summary["unscored"] == 1
    assert runner._learner.num_updates == len(rows) - 2


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
