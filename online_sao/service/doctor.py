"""What is wrong, and what to do: one look at each part, with one request each.

Nothing is started, trained on or repaired. The endpoint is asked by HTTP like by any client;
model, store and judge are tried from here, with the same settings as `serve` would use.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from online_sao.config import Config, native_dtype
from online_sao.errors import ConfigError, ModelError, StoreError
from online_sao.service.memory_watch import available_memory, memory_problem
from online_sao.service.serve import address

REQUEST_TIMEOUT_S = 60.0
TEST_FILE_BYTES = 1 << 20  # enough that a full disk shows
SMALLEST_FREE_BYTES = 256 << 20  # below this, logs and the store's log soon fill the rest


@dataclass(frozen=True)
class Finding:
    """About one part. `remedy` is empty where nothing is wrong."""

    part: str
    what: str
    remedy: str = ""

    @property
    def is_fault(self) -> bool:
        return bool(self.remedy)


def examine(config: Config, url: str | None = None) -> list[Finding]:
    """All findings, in the order in which an endpoint needs its parts."""
    checks: list[Callable[[], Finding]] = [
        lambda: check_model(config),
        lambda: check_disk(config),
        check_memory,
        lambda: check_dtype(config),
        lambda: check_store(config),
        lambda: check_judge(config),
        lambda: check_engine(config, url or address(config.service)),
    ]
    return [check() for check in checks]


# --- model


def check_model(config: Config) -> Finding:
    """Whether the model's files are there and its tokenizer can write a chat prompt."""
    from online_sao.prepare import resolve_model

    part = "model"
    try:
        place = resolve_model(config.model.name, prepare=False)
    except ModelError as error:
        what, _, remedy = str(error).partition("; ")
        return Finding(part, what, remedy or "Name a model with --model, or leave it out.")
    folder = Path(place)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        return Finding(
            part,
            f"{folder} has no weights (*.safetensors).",
            "Copy the whole model folder; no other weight format is loaded.",
        )
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(place)
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": "hello"}], add_generation_prompt=True
        )
    except Exception as error:  # transformers has no error of its own for a folder cut short
        return Finding(
            part,
            f"The tokenizer of {place} does not work ({_first_line(error)}).",
            "Copy the model folder again, with tokenizer files and chat template.",
        )
    return Finding(part, f"{config.model.name}: a prompt of one word has {len(ids)} tokens")


# --- disk, memory and store


def check_disk(config: Config) -> Finding:
    """Whether the run's folder takes a file, and a checkpoint more."""
    part, folder = "disk", config.run_dir
    there = next(p for p in (folder, *folder.parents) if p.exists())
    probe = there / f".doctor-{uuid.uuid4().hex}"
    try:
        with probe.open("wb") as stream:
            stream.write(os.urandom(TEST_FILE_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        return Finding(
            part,
            f"{there} does not take a file of 1 MiB ({error.strerror}).",
            "Free some space, make the folder writable, or choose another with --run-dir.",
        )
    finally:
        probe.unlink(missing_ok=True)
    free = shutil.disk_usage(there).free
    need = max(SMALLEST_FREE_BYTES, _newest_checkpoint_bytes(folder))
    if free < need:
        return Finding(
            part,
            f"{there} has {free / 2**20:.0f} MiB free; the next checkpoint and the store need "
            f"{need / 2**20:.0f} MiB.",
            "Free some space, or lower learner.checkpoint_keep.",
        )
    return Finding(part, f"{there} has {free / 2**30:.1f} GiB free")


def check_memory() -> Finding:
    """Whether Ray is about to end processes for want of memory."""
    problem = memory_problem()
    if problem is None:
        available, total = available_memory()
        return Finding("memory", f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB are free")
    what, _, remedy = problem.partition("; ")
    return Finding("memory", f"{what}.", _sentence(remedy))


def check_dtype(config: Config) -> Finding:
    """Whether engine and learner compute in what this machine is quick at."""
    part = "dtype"
    chosen = {
        "engine.dtype": config.engine.dtype,
        "learner.compute_dtype": config.learner.compute_dtype,
    }
    slow = [name for name, dtype in chosen.items() if dtype == "bfloat16"]
    if slow and native_dtype() == "float32" and config.model.device != "cuda":
        return Finding(
            part,
            "This CPU has no instructions for bfloat16: float32 is several times as quick here.",
            f"Leave {' and '.join(slow)} out of the settings, or take a CPU with AVX-512 or a GPU.",
        )
    return Finding(part, ", ".join(f"{name} {dtype}" for name, dtype in chosen.items()))


def _newest_checkpoint_bytes(folder: Path) -> int:
    sizes = [
        sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        for path in (folder / "checkpoints").glob("v*")
    ]
    return max(sizes, default=0)


def check_store(config: Config) -> Finding:
    """Whether the database opens, has this program's schema, and takes an event."""
    import sqlalchemy as sa

    from online_sao.store import RolloutStore
    from online_sao.store.database import make_engine, parse_url, place_of, store_errors
    from online_sao.store.migration import older_schema, schema_of
    from online_sao.store.models import SCHEMA_VERSION

    part = "store"
    try:
        parsed = parse_url(config.store_url)
        place = place_of(parsed)
        if parsed.get_backend_name() == "sqlite" and not Path(place).exists():
            return Finding(part, f"{place} is not there yet; `online-sao serve` makes it")
        engine = make_engine(parsed, read_only=True)
        try:
            with store_errors(place), engine.connect() as conn:
                found = schema_of(conn)
                if found is not None and found < SCHEMA_VERSION:
                    what, _, remedy = older_schema(place, found).partition(". ")
                    return Finding(part, f"{what}.", remedy)
        finally:
            engine.dispose()
        if found is None:
            return Finding(part, f"{place} has no tables yet; `online-sao serve` makes them")
        with RolloutStore(config.store_url) as store:
            store.add_event("doctor", {})
            rollouts = sum(store.counts().values())
    except StoreError as error:
        what, _, remedy = str(error).partition("; ")
        return Finding(part, what, _sentence(remedy) or "Check store.url and the database.")
    except sa.exc.SQLAlchemyError as error:
        return Finding(part, _first_line(error), "Check store.url and the database.")
    return Finding(part, f"{place}: schema {SCHEMA_VERSION}, {rollouts} rollouts, takes writes")


# --- judge


JUDGE_REMEDIES = {
    "no_key": "Set the key that the judge's provider wants to a valid one (zai/...: ZAI_API_KEY).",
    "connection": "Check judge.api_base and the network.",
    "timeout": "Check judge.api_base and the network, or raise judge.timeout_s.",
    "rate_limited": "Wait, lower judge.concurrency, or ask the provider for a higher limit.",
    "bad_request": "Check the model's name in judge.model and judge.api_base.",
    "cut": "Raise judge.max_tokens.",
}


def _preference(config: Config) -> tuple[str, Sequence[str]]:
    """The one in force: the store's, if an endpoint was started there before."""
    from online_sao.store import RolloutStore
    from online_sao.store.database import make_engine, parse_url, place_of, store_errors
    from online_sao.store.migration import schema_of

    with contextlib.suppress(StoreError):
        parsed = parse_url(config.store_url)
        engine = make_engine(parsed, read_only=True)
        try:
            with store_errors(place_of(parsed)), engine.connect() as conn:
                is_made = schema_of(conn) is not None
        finally:
            engine.dispose()
        if is_made:
            with RolloutStore(config.store_url) as store:
                kept = store.preference()
            if kept is not None:
                return kept.style, kept.pool
    return config.preference.style, config.preference.pool


def check_judge(config: Config) -> Finding:
    """One answer is marked, as any answer would be."""
    from judge import Unscored
    from online_sao.judging import FORGED_PROMPT, checked_judge

    part = "judge"
    style, pool = _preference(config)
    try:
        judge = checked_judge(config, [(style, pool)])
    except ConfigError as error:
        return Finding(part, str(error), "Mend the settings under [judge] and [preference].")
    answer = "Rain taps softly on the window, and the street below turns to silver."
    outcome = asyncio.run(judge.score(FORGED_PROMPT, answer, style, pool))
    if isinstance(outcome, Unscored):
        return Finding(
            part,
            f"{judge.model} gave no verdict: {outcome.reason} ({outcome.detail or 'no detail'})",
            JUDGE_REMEDIES.get(outcome.reason, "Try again; see docs/judge.md for the reasons."),
        )
    return Finding(
        part, f"{judge.model}: a verdict in {outcome.latency_s:.1f} s, reward {outcome.reward}"
    )


# --- engine


def check_engine(config: Config, url: str) -> Finding:
    """One short answer from the running endpoint, and what it says about its parts."""
    import httpx

    from online_sao.service.http import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE

    part = "engine"
    key = os.environ.get(ADMIN_KEY_VARIABLE) or os.environ.get(API_KEY_VARIABLE)
    headers = {"X-Learning": "off"} | ({"Authorization": f"Bearer {key}"} if key else {})
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=REQUEST_TIMEOUT_S) as client:
            health = client.get("/health")
            if health.status_code != 200:
                return Finding(
                    part,
                    f"{url} is up, but its engine is not healthy (HTTP {health.status_code}).",
                    "Ray Serve restarts it by itself; if it stays so, restart `online-sao serve`.",
                )
            answer = client.post("/v1/chat/completions", json=body)
            if answer.status_code == 401:
                return Finding(
                    part,
                    f"{url} refuses the key.",
                    f"Set {API_KEY_VARIABLE} to the key that the endpoint was started with.",
                )
            if answer.status_code != 200:
                return Finding(
                    part,
                    f"{url} does not answer a chat request (HTTP {answer.status_code}: "
                    f"{_message(answer)}).",
                    "See RUN_DIR/logs and, with ONLINE_SAO_DEBUG=1, the engine's own output.",
                )
            ready = client.get("/ready").json()
    except httpx.HTTPError as error:
        return Finding(
            part,
            f"Nothing answers at {url} ({type(error).__name__}).",
            "Start it with `online-sao serve`, or give its address with --url.",
        )
    if not ready.get("ready"):
        reason = ready.get("error") or ready.get("learner") or "not ready"
        return Finding(
            part,
            f"{url} answers, but the learner does not learn: {reason}.",
            "Wait if it is loading or pretraining; else see GET /v1/learning and RUN_DIR/logs.",
        )
    if ready.get("paused"):
        return Finding(
            part,
            f"{url} answers, but learning is paused: {ready['paused']}",
            "When that is mended, POST /v1/learning/resume (docs/operations.md).",
        )
    return Finding(part, f"{url} answers with weight version {ready['weight_version']}")


def _message(answer: Any) -> str:
    try:
        return str(answer.json()["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
