"""What is said when memory runs out, and how often."""

from types import SimpleNamespace

import pytest

from online_sao.service import doctor, memory_watch
from online_sao.service.memory_watch import MemoryWatch, memory_problem

GIB = 2**30


@pytest.fixture
def memory(monkeypatch):
    """A machine of 100 GiB; the fixture sets how many are left."""
    state = SimpleNamespace(total=100 * GIB, available=50 * GIB)
    monkeypatch.setattr(memory_watch.psutil, "virtual_memory", lambda: state)
    monkeypatch.delenv(memory_watch.RAY_THRESHOLD_VARIABLE, raising=False)
    return state


def test_silent_until_little_is_left(memory):
    assert memory_problem() is None
    memory.available = 11 * GIB
    assert memory_problem() is None
    memory.available = 9 * GIB
    assert "9.0 of 100.0 GiB are left, and beyond 95%" in memory_problem()


def test_rays_own_threshold_counts(memory, monkeypatch):
    memory.available = 35 * GIB
    monkeypatch.setenv(memory_watch.RAY_THRESHOLD_VARIABLE, "0.7")
    assert "beyond 70%" in memory_problem()


def test_said_again_after_a_while_or_a_recovery(memory, monkeypatch):
    said, now = [], [1000.0]
    monkeypatch.setattr(memory_watch.time, "monotonic", lambda: now[0])
    watch = MemoryWatch(said.append)
    memory.available = GIB
    watch.look()
    watch.look()
    assert len(said) == 1
    now[0] += memory_watch.REPEAT_S
    watch.look()
    assert len(said) == 2
    memory.available = 50 * GIB
    watch.look()
    memory.available = GIB
    watch.look()
    assert len(said) == 3


def test_the_doctor_says_it_too(memory):
    assert not doctor.check_memory().is_fault
    memory.available = GIB
    finding = doctor.check_memory()
    assert finding.what.startswith("Memory is nearly used up")
    assert finding.remedy.startswith("Stop other programs")
