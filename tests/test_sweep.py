"""Several runs: what is said of those that fail. Real processes that do no run."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from online_sao import sweep
from online_sao.config import Config
from online_sao.errors import OnlineSAOError
from online_sao.scenario import load_scenario

SCENARIO = load_scenario(Path(__file__).parents[1] / "scenarios" / "preference_shift.toml")


@pytest.fixture
def ended(monkeypatch):
    """Lets runs end as told, by folder: `(function, argument)`, done in their process."""

    def make(ends):
        def start(planned, share, cores, bar):
            context = multiprocessing.get_context("spawn")
            reports, theirs = context.Pipe(duplex=False)
            function, argument = ends[planned.folder.name]
            process = context.Process(target=function, args=(argument,), daemon=True)
            process.start()
            theirs.close()
            task = bar.add_task(planned.folder.name, total=None)
            return sweep._Child(process, reports, task, planned, share)

        monkeypatch.setattr(sweep, "_start", start)
        return [sweep.PlannedRun(Config(), SCENARIO, Path(name), 4) for name in ends]

    return make


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
