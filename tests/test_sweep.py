"""Several runs: what is said of those that fail. Real processes that do no run."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from online_sao import offline, sweep
from online_sao.config import Config
from online_sao.errors import OnlineSAOError
from online_sao.scenario import load_scenario

SCENARIO = load_scenario(Path(__file__).parents[1] / "scenarios" / "preference_shift.toml")


@pytest.fixture
def ended(monkeypatch):
    """Lets runs end as told, by folder: `(function, argument)`, done in their process. The cores
    that each was given are in `make.cores`."""
    given = []

    def make(ends):
        def start(planned, share, cores, bar):
            given.append(cores)
            context = multiprocessing.get_context("spawn")
            reports, theirs = context.Pipe(duplex=False)
            function, argument = ends[planned.folder.name]
            process = context.Process(target=function, args=(argument,), daemon=True)
            process.start()
            theirs.close()
            task = bar.add_task(planned.folder.name, total=None)
            return sweep._Child(process, reports, task, planned, share)

        given.clear()
        monkeypatch.setattr(sweep, "_start", start)
        return [sweep.PlannedRun(Config(), SCENARIO, Path(name), 4) for name in ends]

    make.cores = given
    return make


def test_runs_at_a_time_have_cores_of_their_own(ended, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5, 7})
    sweep.sweep(ended({"a": (os._exit, 0), "b": (os._exit, 0)}), 2, lambda _: None)
    assert ended.cores == [[0, 2, 7], [1, 5]]
    sweep.sweep(ended({"a": (os._exit, 0), "b": (os._exit, 0)}), 1, lambda _: None)
    assert ended.cores == [[0, 1, 2, 5, 7]] * 2


def test_one_that_was_stopped_ends_all(ended):
    runs = ended({"stopped": (os._exit, sweep.EXIT_STOPPED), "next": (os._exit, 0)})
    said = []
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(runs, 1, said.append)
    assert said == []


def test_what_is_finished_is_not_done_again(monkeypatch, tmp_path):
    planned = sweep.PlannedRun(Config(), SCENARIO, tmp_path / "run", 4)
    done = []

    class Runner:
        def __init__(self, config, scenario, folder, lag):
            done.append(folder)

        def run(self, on_progress):
            pass

    monkeypatch.setattr(offline, "OfflineRunner", Runner)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    for is_finished in (True, False):
        monkeypatch.setattr(offline, "is_finished", lambda *_, said=is_finished: said)
        sweep._run(planned, [0], None)
        assert done == ([] if is_finished else [planned.folder])


def test_a_run_that_a_signal_ended_is_named_with_the_signal(ended):
    runs = ended(
        {
            "whole": (os._exit, 0),
            "starved": (signal.raise_signal, signal.SIGKILL),
            "ended": (signal.raise_signal, signal.SIGTERM),
            "refused": (os._exit, sweep.EXIT_ERROR),  # which has said why itself
        }
    )
    said = []
    with pytest.raises(OnlineSAOError) as caught:
        sweep.sweep(runs, 1, said.append)
    assert str(caught.value) == "3 of 4 runs failed, see above: starved, ended, refused"
    assert said[0] == "whole: done"
    assert said[1].startswith("starved: the run was ended by SIGKILL: memory may have run out.")
    assert "fewer --jobs" in said[1]
    assert said[2].startswith("ended: the run was ended by SIGTERM. Give the same command")
    assert len(said) == 3


def test_a_signal_without_a_name_is_numbered():
    assert "ended by signal 40." in sweep._killed(Path("x"), 40)
