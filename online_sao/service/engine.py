"""The served policy: vLLM's AsyncLLM with a rollout hook, and weight updates in place.

Imported in the replica's process only (it imports vllm). `RecordingLLM.generate` is the one
place through which every answer passes, streaming or not, whatever route asked for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from online_sao.config import Config
from online_sao.engine import weight_transfer
from online_sao.engine.settings import has_worker_process
from online_sao.engine.trainable import numbers_exclusion, request_exclusion, sampling_exclusion
from online_sao.engine.weight_file import WeightFile
from online_sao.errors import WeightUpdateError
from online_sao.service.sessions import SessionPrompts
from online_sao.types import JudgeState, Purpose, Rollout, RolloutState, WeightSpan

_DEFAULT_SAMPLING = SamplingParams()


@dataclass
class RequestContext:
    """What the HTTP layer knows of a request and the engine does not; filled in on the way back."""

    response_id: str
    body: dict[str, Any]
    session_id: str | None = None
    parent_id: str | None = None  # the session's rollout that this one goes on from
    new_trajectory: str | None = None  # why there is none
    opted_out: bool = False
    purpose: Purpose = Purpose.SERVE
    received_at: float = field(default_factory=time.monotonic)
    weight_version: int | None = None  # of the newest token so far
    answering: bool = False  # the engine has begun to answer
    recorded: bool | None = None  # None until the first choice is finished
    store_ok: bool = True  # whether the store took the last rollout before this request


CURRENT_REQUEST: ContextVar[RequestContext | None] = ContextVar("CURRENT_REQUEST", default=None)

Recorder = Callable[[Rollout], Awaitable[bool]]


@dataclass
class _Choice:
    """One choice of a request as it grows."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    done: bool = False


class RecordingLLM(AsyncLLM):
    """AsyncLLM that hands every finished or aborted answer to `recorder`.

    The recorder is awaited before the last output is passed on, so an answer is complete for
    its client only when its rollout is committed.
    """

    recorder: Recorder | None = None
    min_temperature: float = 0.0
    max_train_tokens: int = 1 << 30
    weight_version: int = 0
    _layout: int | None = None  # of the weight files that were loaded so far

    async def generate(  # type: ignore[override]
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        context = CURRENT_REQUEST.get()
        if context is None or self.recorder is None:
            async for output in super().generate(prompt, sampling_params, request_id, **kwargs):
                yield output
            return
        exclusion = self._exclusion(context, sampling_params)
        if sampling_params.logprobs is None:
            # The behavior log-probs cost little and never reach a client who did not ask.
            sampling_params = sampling_params.clone()
            sampling_params.logprobs = 0
        context.weight_version = self.weight_version
        choices: dict[int, _Choice] = {}
        prompt_ids: list[int] = []
        prompt_index = _prompt_index(request_id, context.response_id)
        try:
            async for output in super().generate(prompt, sampling_params, request_id, **kwargs):
                context.answering = True
                prompt_ids = output.prompt_token_ids or prompt_ids
                for completion in output.outputs:
                    choice = choices.setdefault(completion.index, _Choice())
                    _gather(choice, completion, sampling_params.output_kind)
                    if completion.finish_reason is not None and not choice.done:
                        choice.done = True
                        spans = _spans(completion.weight_versions, len(choice.token_ids))
                        if spans:
                            context.weight_version = spans[-1].version
                        recorded = await self.recorder(
                            self._rollout(
                                context,
                                sampling_params,
                                prompt_ids,
                                choice,
                                prompt_index * max(1, sampling_params.n) + completion.index,
                                spans,
                                completion.finish_reason,
                                exclusion,
                            )
                        )
                        # One of several that was not recorded is one too many.
                        context.recorded = recorded and context.recorded is not False
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            # The client went away: what was generated is recorded, never trained on. Shielded,
            # because this task is being cancelled.
            for index, choice in choices.items():
                if choice.done or not choice.token_ids:
                    continue
                rollout = self._rollout(
                    context,
                    sampling_params,
                    prompt_ids,
                    choice,
                    prompt_index * max(1, sampling_params.n) + index,
                    (WeightSpan(self.weight_version, 0, len(choice.token_ids)),),
                    "abort",
                    "aborted",
                )
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(asyncio.ensure_future(self.recorder(rollout)))
            raise

    def _exclusion(self, context: RequestContext, params: SamplingParams) -> str | None:
        if context.purpose is Purpose.PRETRAINING:
            return "value_pretraining"
        if context.purpose is Purpose.PROBE:
            return "probe"
        if context.opted_out:
            return "opted_out"
        return request_exclusion(context.body) or sampling_exclusion(
            {name: getattr(params, name) for name in params.__struct_fields__},
            {name: getattr(_DEFAULT_SAMPLING, name) for name in params.__struct_fields__},
            self.min_temperature,
        )

    def _rollout(
        self,
        context: RequestContext,
        params: SamplingParams,
        prompt_ids: list[int],
        choice: _Choice,
        index: int,
        spans: tuple[WeightSpan, ...],
        finish_reason: str,
        exclusion: str | None,
    ) -> Rollout:
        aborted = finish_reason == "abort"
        if aborted:  # also by the engine itself, when it is told to end
            exclusion = exclusion or "aborted"
        exclusion = exclusion or numbers_exclusion(
            choice.token_ids,
            choice.logprobs,
            len(prompt_ids) + len(choice.token_ids),
            self.max_train_tokens,
        )
        metadata = context.body.get("metadata")
        messages = context.body.get("messages")
        return Rollout(
            id=context.response_id if index == 0 else f"{context.response_id}.{index}",
            response_id=context.response_id,
            choice=index,
            prompt_token_ids=np.asarray(prompt_ids, np.int32),
            token_ids=np.asarray(choice.token_ids, np.int32),
            behavior_logprobs=np.asarray(choice.logprobs, np.float32),
            weight_spans=spans,
            temperature=float(params.temperature),
            messages=messages if isinstance(messages, list) else None,
            answer="".join(choice.text),
            finish_reason=finish_reason,
            state=RolloutState.EXCLUDED if exclusion else RolloutState.PENDING,
            reason=exclusion,
            judge_state=JudgeState.SKIPPED if aborted else JudgeState.WAITING,
            purpose=context.purpose,
            session_id=context.session_id,
            parent_id=context.parent_id,
            new_trajectory=context.new_trajectory,
            metadata=metadata if isinstance(metadata, dict) else {},
            latency_s=time.monotonic() - context.received_at,
        )

    # --- weights

    async def load_weights(self, file: WeightFile) -> float:
        """Swap in the weights of a checked `file`; return the seconds that serving paused.

        Raises WeightUpdateError, and the old weights serve on; only if the exchange itself
        fails, generation stays paused until a good version is loaded.
        """
        # Everything that can be wrong with a file is found before anything changes.
        await asyncio.to_thread(file.verify)
        if self._layout not in (None, file.layout):
            raise WeightUpdateError(
                f"The weight file of version {file.version} is of another model."
            )
        try:
            await self.start_weight_update()
            for part in range(weight_transfer.NUM_PARTS):
                update = {"path": file.path, "part": part}
                await self.update_weights(WeightTransferUpdateRequest(update))
            # The writer may have needed the file's place while we were reading.
            await asyncio.to_thread(file.verify)
        except Exception as error:
            await self._abandon_update()
            raise WeightUpdateError(
                f"Weight version {file.version} was not loaded ({error}); the old one is served."
            ) from error
        started = time.monotonic()
        await self.pause_generation(mode="keep", clear_cache=True)
        try:
            await self.finish_weight_update(weight_version=str(file.version))
        except Exception as error:
            await self._abandon_update()
            raise WeightUpdateError(
                f"Exchanging weight version {file.version} failed half-way ({error}); generation "
                "stays paused until a good version is loaded."
            ) from error
        # Only on success: a half-loaded model must not generate.
        await self.resume_generation()
        self.weight_version, self._layout = file.version, file.layout
        return time.monotonic() - started

    async def _abandon_update(self) -> None:
        """Let the next update begin: vLLM refuses it while one that was begun is open."""
        with contextlib.suppress(Exception):
            update = {"path": "", "part": weight_transfer.ABANDON}
            await self.update_weights(WeightTransferUpdateRequest(update))


def _prompt_index(request_id: str, response_id: str) -> int:
    """Which prompt of a /v1/completions request with several (vLLM appends "-i")."""
    suffix = request_id.removeprefix(response_id).lstrip("-_")
    return int(suffix) if suffix.isdigit() else 0


def _gather(choice: _Choice, completion: Any, kind: RequestOutputKind) -> None:
    """Add a delta, or replace what was gathered by an output that holds everything so far."""
    if kind is not RequestOutputKind.DELTA:
        choice.token_ids, choice.logprobs, choice.text = [], [], []
    ids = list(completion.token_ids)
    logprobs = [
        float(entry[token].logprob)
        for token, entry in zip(ids, completion.logprobs or [], strict=False)
    ]
    choice.token_ids += ids
    choice.logprobs += logprobs
    choice.text.append(completion.text)


def _spans(reported: Any, num_tokens: int) -> tuple[WeightSpan, ...]:
    if not reported or not num_tokens:
        return ()
    return tuple(WeightSpan(int(span.version), span.start, span.end) for span in reported)


# --- sessions


def join_sessions(chat: Any, prompts: SessionPrompts) -> None:
    """Let vLLM's chat serving `chat` give a session's turns the exact tokens of its history."""
    render_chat_request = chat.render_chat_request

    async def render(request: Any) -> Any:
        context = CURRENT_REQUEST.get()
        if context is not None and context.session_id is not None:
            parent, ids, reason = await prompts.continuation(
                context.session_id, context.body, _template(chat, request)
            )
            context.parent_id, context.new_trajectory = parent, reason
            if ids is not None:
                _check_length(ids, chat.model_config.max_model_len)
                request.kv_transfer_params = {"prompt_token_ids": ids}
        return await render_chat_request(request)

    # On the instance: vLLM builds it, and gives no place to name a class of ours.
    chat.render_chat_request = render


def _template(chat: Any, request: Any) -> Any:
    """The chat template as vLLM applies it to `request`, for any messages, to text."""
    parameters = request.build_chat_params(
        chat.chat_template, chat.chat_template_content_format
    ).with_defaults({**chat.default_chat_template_kwargs, "tokenize": False})

    async def render(messages: Any) -> str:
        # Copied: vLLM's parser changes what it is given.
        _, prompt = await chat.renderer.render_messages_async(
            copy.deepcopy(list(messages)), parameters
        )
        return str(prompt["prompt"])

    return render


def _check_length(ids: list[int], limit: int) -> None:
    """vLLM looks at the length of forwarded ids only once a stream has begun."""
    if len(ids) >= limit:
        raise VLLMValidationError(
            f"This model's maximum context length is {limit} tokens, and the session's history "
            f"and your message take {len(ids)} of them. Begin a new session, or send less.",
            parameter="messages",
            value=len(ids),
        )


# --- building


def server_arguments(config: Config, model: str) -> list[str]:
    """Command line for vLLM's own argument parser."""
    engine = config.engine
    arguments = {
        "--model": model,
        "--served-model-name": config.served_name,
        "--dtype": engine.dtype,
        "--max-model-len": str(engine.max_model_len),
        "--max-num-seqs": str(engine.max_num_seqs),
        # The model folder's own file would change sampling defaults behind the client's back.
        "--generation-config": "vllm",
        # Log-probs of the distribution that was sampled (after temperature).
        "--logprobs-mode": "processed_logprobs",
        "--weight-transfer-config": f'{{"backend": "{weight_transfer.BACKEND}"}}',
        # vLLM's default seed of 0 repeats the same answers after every restart.
        "--seed": str(engine.seed if engine.seed is not None else secrets.randbelow(2**31)),
    }
    if not current_platform.is_cpu():  # also with model.device = "auto"
        arguments["--gpu-memory-utilization"] = str(engine.gpu_memory_utilization)
    flat = [part for pair in arguments.items() for part in pair]
    return [*flat, "--enforce-eager", "--disable-log-stats"]


def parse_server_arguments(arguments: list[str]) -> Any:
    """vLLM's namespace for its serving classes, with all its defaults."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(args)
    return args


async def build_engine(config: Config, args: Any) -> RecordingLLM:
    """Start vLLM's processes; returns when the engine can generate (tens of seconds)."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    vllm_config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    parallel = vllm_config.parallel_config
    if current_platform.is_cpu() and not has_worker_process(config):
        # Only now: vLLM's own checks would set it back.
        parallel.distributed_executor_backend = "uni"
        os.environ["OMP_NUM_THREADS"] = "1"  # for EngineCore, which inherits it
    engine = RecordingLLM.from_vllm_config(
        vllm_config=vllm_config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_log_requests=False,
        disable_log_stats=True,
    )
    engine.min_temperature = config.service.min_trainable_temperature
    engine.max_train_tokens = config.learner.max_train_tokens
    await engine.init_weight_transfer_engine(WeightTransferInitRequest({}))
    await engine.update_weight_version("0")
    return engine
