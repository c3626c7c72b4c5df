"""What is said when memory runs out, and how often."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from online_sao.service import doctor, memory_watch
from online_sao.service.memory_watch import MemoryWatch, available_memory, memory_problem

GIB = 2**30


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """A machine of 100 GiB without cgroups; the fixture sets how many are left."""
    monkeypatch.setattr(memory_watch, "CGROUP", tmp_path)
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


@pytest.mark.parametrize(
    ("limit", "usage", "prefix"),
    [
        ("memory.max", "memory.current", ""),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_"),
    ],
)
class TestContainer:
    """What a container may have counts, not what its host has left."""

    def write(self, folder, limit, usage, prefix, limit_bytes):
        for name, text in (
            (limit, str(limit_bytes)),
            (usage, str(20 * GIB)),
            (
                str(Path(usage).with_name("memory.stat")),
                f"anon 7\n{prefix}inactive_file {GIB}\n{prefix}active_file {2 * GIB}",
            ),
        ):
            file = folder / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(text + "\n")

    def test_its_limit(self, memory, tmp_path, limit, usage, prefix):
        self.write(tmp_path, limit, usage, prefix, 24 * GIB)
        assert available_memory() == (7 * GIB, 24 * GIB)  # 24 - (20 - 1 - 2)
        assert memory_problem() is None
        self.write(tmp_path, limit, usage, prefix, 18 * GIB)
        assert "1.0 of 18.0 GiB are left" in memory_problem()

    @pytest.mark.parametrize("none", ["max", str(2**63 - 4096)])
    def test_no_limit(self, memory, tmp_path, limit, usage, prefix, none):
        self.write(tmp_path, limit, usage, prefix, none)
        assert available_memory() == (50 * GIB, 100 * GIB)


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
