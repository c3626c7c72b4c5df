"""vLLM's environment, as our settings want it. Imports no vllm: it must be set before that."""

from __future__ import annotations

import os

from online_sao.config import Config


def engine_environment(config: Config) -> dict[str, str]:
    """Environment that vLLM's processes need; set before vllm is imported."""
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(config.engine.kv_cache_gib))),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_MAX_N_SEQUENCES": str(config.service.max_choices),
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"),
        "TOKENIZERS_PARALLELISM": "false",
        # At every weight update vLLM warns of the tied head, which we repack ourselves.
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    if config.engine.threads:
        last = config.engine.threads - 1
        environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{last}" if last else "0"
    return environment


def has_worker_process(config: Config) -> bool:
    """Whether vLLM's EngineCore is to compute in a Worker process of its own (CPU only).

    vLLM always starts one, to bind OpenMP threads to cores. With a single thread there is
    nothing to bind: a process less starts ten seconds sooner, takes half a GiB less, and hands
    over nothing at each step.
    """
    return (config.engine.threads or (os.cpu_count() or 1) - 1) > 1
