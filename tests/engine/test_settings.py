"""What our settings ask of vLLM's environment and processes."""

import pytest

from online_sao.config import Config
from online_sao.engine import settings


@pytest.mark.parametrize(
    ("cores", "threads", "expected"),
    [(2, None, False), (1, None, False), (3, None, True), (8, 1, False), (2, 2, True)],
)
def test_a_single_thread_needs_no_process_of_its_own(monkeypatch, cores, threads, expected):
    monkeypatch.setattr(settings.os, "cpu_count", lambda: cores)
    config = Config.load(overrides={"engine.threads": threads} if threads else {})
    assert settings.has_worker_process(config) is expected


@pytest.mark.parametrize(("threads", "bound"), [(None, None), (1, "0"), (4, "0-3")])
def test_threads_are_bound_from_the_first_core_on(threads, bound):
    config = Config.load(overrides={"engine.threads": threads} if threads else {})
    assert settings.engine_environment(config).get("VLLM_CPU_OMP_THREADS_BIND") == bound
