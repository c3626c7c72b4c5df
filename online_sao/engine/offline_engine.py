"""vLLM in this process, for the offline runner: generate a few rollouts, take new weights.

The weights go the same way as in the service (a file in shared memory, SharedMemoryEngine),
so what the runner measures is what the service does, without HTTP, Ray and a second process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from online_sao.config import Config
from online_sao.engine.settings import engine_environment
from online_sao.engine.trainable import numbers_exclusion
from online_sao.engine.weight_file import write_weight_file
from online_sao.errors import EngineError
from online_sao.types import Rollout, RolloutState, WeightSpan


class OfflineEngine:
    """One vLLM engine on the cores of this process. Imports vllm when it is made.

    It has the learner's number of threads (`learner.threads`): both work in turns in one thread
    of one process, and sums are rounded the same way only where as many threads share them.
    """

    def __init__(self, config: Config, model: str, weights_dir: Path) -> None:
        os.environ.update(engine_environment(config))
        os.environ |= {
            # In this process: the learner's threads must not be bound to the engine's cores.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        from vllm import LLM
        from vllm.config import WeightTransferConfig
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        from online_sao.engine import weight_transfer

        weight_transfer.register()
        from vllm.platforms import current_platform

        memory = {}
        if not current_platform.is_cpu():  # where its memory is engine.kv_cache_gib
            memory["gpu_memory_utilization"] = config.engine.gpu_memory_utilization
        self._config = config
        self._weights_dir = weights_dir
        self.weight_version = 0
        set_num_threads = torch.set_num_threads
        set_num_threads(config.learner.threads or len(os.sched_getaffinity(0)))
        self._llm = LLM(
            model=model,
            dtype=config.engine.dtype,
            max_model_len=config.engine.max_model_len,
            max_num_seqs=config.engine.max_num_seqs,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            seed=config.learner.seed,
            enforce_eager=True,
            distributed_executor_backend="uni",
            weight_transfer_config=WeightTransferConfig(backend=weight_transfer.BACKEND),
            disable_log_stats=True,
            **memory,
        )
        # vLLM's CPU worker has put one in its place that does nothing.
        torch.set_num_threads = set_num_threads
        self._llm.init_weight_transfer_engine(WeightTransferInitRequest({}))

    def generate(
        self,
        prompts: Sequence[list[dict[str, str]]],
        ids: Sequence[str],
        seeds: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        answers_per_prompt: int = 1,
    ) -> list[Rollout]:
        """Answers to `prompts` under the current weights, in order, unjudged.

        `ids` names one rollout per prompt; further answers to it get ".1", ".2", ...
        Raises EngineError when a prompt is refused.
        """
        from vllm.sampling_params import SamplingParams

        sampling = [
            SamplingParams(
                n=answers_per_prompt,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                logprobs=0,
            )
            for seed in seeds
        ]
        try:
            outputs = self._llm.chat(list(prompts), sampling, use_tqdm=False)  # type: ignore[arg-type]
        except ValueError as error:
            raise EngineError(f"The engine refused a prompt: {error}") from None
        return [
            self._rollout(output, answer, messages, id, temperature)
            for output, messages, id in zip(outputs, prompts, ids, strict=True)
            for answer in output.outputs
        ]

    def load_weights(self, version: int, weights: dict[str, Tensor]) -> None:
        """Swap in `weights` as `version`."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        from online_sao.engine.weight_transfer import NUM_PARTS

        file = write_weight_file(self._weights_dir, version, weights)
        self._llm.start_weight_update()
        for part in range(NUM_PARTS):
            update = {"path": file.path, "part": part}
            self._llm.update_weights(WeightTransferUpdateRequest(update))
        self._llm.finish_weight_update(weight_version=str(version))
        # Cached prefixes were computed under the old weights.
        self._llm.reset_prefix_cache()
        self.weight_version = version

    def _rollout(
        self,
        output: Any,
        answer: Any,
        messages: list[dict[str, str]],
        id: str,
        temperature: float,
    ) -> Rollout:
        tokens = list(answer.token_ids)
        logprobs = [
            float(entry[token].logprob)
            for token, entry in zip(tokens, answer.logprobs, strict=True)
        ]
        num_tokens = len(output.prompt_token_ids) + len(tokens)
        reason = numbers_exclusion(
            tokens, logprobs, num_tokens, self._config.learner.max_train_tokens
        )
        return Rollout(
            id=id if answer.index == 0 else f"{id}.{answer.index}",
            response_id=id,
            choice=answer.index,
            prompt_token_ids=np.asarray(output.prompt_token_ids, np.int32),
            token_ids=np.asarray(tokens, np.int32),
            behavior_logprobs=np.asarray(logprobs, np.float32),
            weight_spans=(WeightSpan(self.weight_version, 0, len(tokens)),),
            temperature=temperature,
            messages=messages,
            answer=answer.text,
            finish_reason=answer.finish_reason,
            state=RolloutState.EXCLUDED if reason else RolloutState.PENDING,
            reason=reason,
        )
