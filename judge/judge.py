"""Judge: one answer in, one Verdict or Unscored out, through litellm whatever the model."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from judge import parsing, rubric
from judge.cache import VerdictCache
from judge.preferences import PreferenceSet, load_preferences
from judge.verdict import NO_STYLE, JudgeError, Unscored, Verdict

OFFLINE_PREFIX = "offline/"

BREAKER_FAILURES = 8
"""Verdicts in a row lost to the provider (not to what it wrote) that open the circuit."""

BREAKER_COOLDOWN_S = 30.0
"""An open circuit refuses at once for this long, then lets a single verdict try."""

BACKOFF_S = 0.5
"""First wait before a retry; doubles, with jitter, up to BACKOFF_MAX_S."""

BACKOFF_MAX_S = 20.0

TIMEOUT_GRACE_S = 0.5
"""The client's own timeout, which ends a call cleanly, gets this much time to act before
the call is cancelled from outside (a server that drips bytes never trips it)."""

VOTE_TEMPERATURE = 0.7
"""Temperature when several votes are taken; a single vote is taken at 0."""


@dataclass
class _Reply:
    """One readable reply of the model."""

    marks: parsing.Marks
    raw: str


class Judge:
    """Marks answers by one model and one set of styles.

    `timeout_s` bounds one vote with all its retries and waits, from the moment it gets one
    of the `concurrency` places. `votes` are taken side by side and decided by majority per
    mark. `flip_probability` flips each mark at random (reproducible by `seed`): only for
    simulating a noisy judge. `cache_path` is an SQLite file that keeps verdicts of models
    that cost money or time. `thinking` switches the reasoning of models that have a switch
    (GLM among them); None leaves it to the provider.

    Safe to use from several event loops and threads.
    """

    def __init__(
        self,
        model: str = "offline/archetypes",
        preferences: str | Path | PreferenceSet = "archetypes",
        *,
        api_base: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        max_tokens: int = 1024,
        max_retries: int = 3,
        concurrency: int = 4,
        votes: int = 1,
        flip_probability: float = 0.0,
        seed: int = 0,
        cache_path: str | Path | None = None,
        thinking: bool | None = None,
        backoff_s: float = BACKOFF_S,
        breaker_failures: int = BREAKER_FAILURES,
        breaker_cooldown_s: float = BREAKER_COOLDOWN_S,
    ):
        for name, value, low in (
            ("timeout_s", timeout_s, 1e-3),
            ("max_tokens", max_tokens, 16),
            ("max_retries", max_retries, 0),
            ("concurrency", concurrency, 1),
            ("votes", votes, 1),
            ("breaker_failures", breaker_failures, 1),
        ):
            if not value >= low:
                raise JudgeError(f"The judge's {name} must be at least {low:g}, not {value!r}.")
        if not 0 <= flip_probability <= 0.5:
            raise JudgeError(
                f"flip_probability must lie between 0 and 0.5, not {flip_probability!r}."
            )
        if not isinstance(model, str) or not model.strip():
            raise JudgeError("The judge needs a model name, for example offline/archetypes.")
        self.model = model.strip()
        self.preferences = (
            preferences if isinstance(preferences, PreferenceSet) else load_preferences(preferences)
        )
        self.api_base = api_base
        self.timeout_s = timeout_s
        self.max_tokens = max_tokens
        self.max_retries = max_retries
        self.concurrency = concurrency
        self.votes = 1 if self.is_offline else votes  # a deterministic judge agrees with itself
        self.flip_probability = flip_probability
        self.seed = seed
        self.thinking = thinking
        self.backoff_s = backoff_s
        self._api_key = api_key
        self._label = self.model
        self._request: dict[str, Any] | None = None
        self._cache = VerdictCache(cache_path) if cache_path and not self.is_offline else None
        self._breaker = _Breaker(breaker_failures, breaker_cooldown_s)
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._cost = 0.0
        self._times_seen: Counter[str] = Counter()

    @property
    def is_offline(self) -> bool:
        """Whether the embedded judge marks."""
        return self.model.startswith(OFFLINE_PREFIX)

    # -- at start ---------------------------------------------------------------------

    def check(self) -> None:
        """Raise JudgeError with one clear sentence if this judge cannot work."""
        self._prepare()

    def check_style(self, style: str, pool: Sequence[str] = ()) -> None:
        """Raise JudgeError if a preference for `style` among `pool` cannot be judged."""
        known = ", ".join(self.preferences.styles)
        for name in (style, *pool):
            if name not in self.preferences.styles:
                raise JudgeError(
                    f"Unknown style '{name}'; the preference set '{self.preferences.name}' "
                    f"has {known}."
                )
        if pool and style not in pool:
            raise JudgeError(f"The style '{style}' is not in its pool ({', '.join(pool)}).")

    def _prepare(self) -> dict[str, Any]:
        """The parts of a litellm call that are the same for every verdict."""
        if self._request is not None:
            return self._request
        if self.is_offline:
            self._request = self._prepare_offline()
        else:
            self._request = self._prepare_remote()
        return self._request

    def _prepare_offline(self) -> dict[str, Any]:
        from judge import offline, provider

        name = self.model.removeprefix(OFFLINE_PREFIX)
        if name not in offline.MODELS:
            raise JudgeError(
                f"Unknown embedded judge '{self.model}'; there are "
                f"{', '.join(OFFLINE_PREFIX + known for known in offline.MODELS)}."
            )
        provider.load_litellm()
        embedded = offline.register(self.preferences, name)
        embedded.check()
        self._label = f"{self.model}{embedded.label_suffix}"
        return {"model": self.model}

    def _prepare_remote(self) -> dict[str, Any]:
        from judge import provider

        provider.check_model(self.model, self.api_base, self._api_key)
        request: dict[str, Any] = {
            "model": self.model,
            "temperature": 0.0 if self.votes == 1 else VOTE_TEMPERATURE,
            "drop_params": True,
        }
        if self.api_base is not None:
            request["api_base"] = self.api_base
        key = provider.placeholder_key(self.model, self.api_base, self._api_key)
        if key is not None:
            request["api_key"] = key
        json_format = provider.response_format(self.model, rubric.VERDICT_SCHEMA)
        if json_format is not None:
            request["response_format"] = json_format
        if self.thinking is not None:
            if "thinking" not in provider.supported_params(self.model):
                raise JudgeError(
                    f"litellm knows no thinking switch for '{self.model}': leave thinking unset."
                )
            request["thinking"] = {"type": "enabled" if self.thinking else "disabled"}
        return request

    # -- in service -------------------------------------------------------------------

    async def score(
        self,
        messages: Sequence[Mapping[str, Any]],
        answer: str,
        style: str,
        pool: Sequence[str] = (),
    ) -> Verdict | Unscored:
        """Mark `answer` to `messages` (OpenAI's form) against `style`.

        `pool` are the styles to tell apart; empty: all of the set. Never raises (except
        when cancelled): what cannot be marked comes back as Unscored with its reason.
        """
        start = time.monotonic()
        try:
            outcome = await self._score(messages, answer, style, tuple(pool))
        except Exception as error:
            outcome = Unscored("internal_error", f"{type(error).__name__}: {error}"[:300])
        outcome = replace(
            outcome, model=outcome.model or self._label, latency_s=time.monotonic() - start
        )
        with self._lock:
            self._cost += outcome.cost
            if isinstance(outcome, Verdict):
                self._counts[f"verdicts_{outcome.reward}"] += 1
            else:
                self._counts[f"unscored_{outcome.reason}"] += 1
        return outcome

    def score_sync(
        self,
        messages: Sequence[Mapping[str, Any]],
        answer: str,
        style: str,
        pool: Sequence[str] = (),
    ) -> Verdict | Unscored:
        """`score` for code without an event loop; blocks the calling thread."""
        future = asyncio.run_coroutine_threadsafe(
            self.score(messages, answer, style, pool), _background_loop()
        )
        return future.result()

    def stats(self) -> dict[str, float]:
        """Counts since the start: verdicts_1, verdicts_0, unscored_REASON, calls, retries,
        cache_hits, cache_faults, and cost in US dollars."""
        with self._lock:
            stats: dict[str, float] = {**self._counts, "cost": self._cost}
        if self._cache is not None:
            stats["cache_faults"] = self._cache.num_faults
        return stats

    async def _score(
        self,
        messages: Sequence[Mapping[str, Any]],
        answer: str,
        style: str,
        pool: tuple[str, ...],
    ) -> Verdict | Unscored:
        pool = pool or tuple(self.preferences.styles)
        try:
            self.check_style(style, pool)
            request = self._prepare()
        except JudgeError as error:
            return Unscored("bad_input", str(error))
        if not isinstance(answer, str):
            return Unscored("bad_input", f"The answer is {type(answer).__name__}, not a text.")
        if not answer.strip():
            return Verdict(0, 0, NO_STYLE, "The answer is empty.")
        key = self._key(messages, answer, style, pool)
        if self._cache is not None and (known := self._cache.get(key)) is not None:
            self._count("cache_hits")
            return self._flipped(replace(known, cost=0.0), key)
        results = await asyncio.gather(
            *(self._vote(request, messages, answer, style, pool) for _ in range(self.votes))
        )
        outcome = self._majority(results)
        if isinstance(outcome, Verdict):
            if self._cache is not None:
                self._cache.put(key, outcome)
            return self._flipped(outcome, key)
        return outcome

    def _majority(self, results: Sequence[tuple[_Reply | Unscored, float]]) -> Verdict | Unscored:
        """One verdict from the votes, or Unscored if they decide nothing."""
        cost = sum(spent for _, spent in results)
        replies = [reply for reply, _ in results if isinstance(reply, _Reply)]
        needed = len(results) // 2 + 1
        if len(replies) < needed:
            lost = next(reply for reply, _ in results if isinstance(reply, Unscored))
            return replace(lost, cost=cost)
        quality = _majority_bit([reply.marks.quality for reply in replies])
        style = _majority_bit([reply.marks.style for reply in replies])
        raw = "\n".join(reply.raw for reply in replies)
        if quality is None or style is None:
            return Unscored("split_vote", "The votes are tied.", cost=cost, raw=raw)
        agreeing = [r for r in replies if (r.marks.quality, r.marks.style) == (quality, style)]
        speaker = (agreeing or replies)[0].marks
        seen = Counter(reply.marks.detected_style for reply in replies).most_common(1)[0][0]
        return Verdict(
            quality,
            style,
            seen if seen in self.preferences.styles else NO_STYLE,
            speaker.rationale,
            cost=cost,
            raw=raw,
        )

    async def _vote(
        self,
        request: dict[str, Any],
        messages: Sequence[Mapping[str, Any]],
        answer: str,
        style: str,
        pool: tuple[str, ...],
    ) -> tuple[_Reply | Unscored, float]:
        """One readable reply, with retries; and what it cost."""
        async with self._slot():
            if not self._breaker.allows():
                return Unscored(
                    "circuit_open", "The provider failed repeatedly; it is left alone for a while."
                ), 0.0
            outage = True  # until a reply or a refusal of this one request shows otherwise
            try:
                nonce = rubric.new_nonce()
                chat = rubric.build_messages(
                    self.preferences, self.preferences.styles[style], pool, messages, answer, nonce
                )
                reply, cost, outage = await self._ask(request, chat, nonce, answer)
            except asyncio.CancelledError:
                self._breaker.forget()
                raise
            except Exception:
                self._breaker.forget()
                raise
            self._breaker.report(not outage)
            return reply, cost

    async def _ask(
        self, request: dict[str, Any], chat: list[dict[str, str]], nonce: str, answer: str
    ) -> tuple[_Reply | Unscored, float, bool]:
        """(reply or reason, cost, whether the provider was out) of one vote."""
        from judge import provider

        litellm = provider.load_litellm()
        deadline = time.monotonic() + self.timeout_s
        budget, cost = self.max_tokens, 0.0
        failure = Unscored("timeout", "No time left.")
        outage = True
        json_format = True
        attempt = 0
        while attempt <= self.max_retries:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            call = {**request, "messages": chat, "max_tokens": budget, "timeout": remaining}
            if not json_format:
                call.pop("response_format", None)
            self._count("calls")
            attempt += 1
            try:
                response = await asyncio.wait_for(
                    litellm.acompletion(**call, num_retries=0, max_retries=0),
                    remaining + TIMEOUT_GRACE_S,
                )
            except Exception as error:
                fault = provider.fault_of(error)
                failure, outage = Unscored(fault.reason, fault.detail), fault.is_outage
                if fault.reason == "bad_request" and json_format and "response_format" in request:
                    json_format = False  # some servers refuse it, whatever litellm believes
                    attempt -= 1
                    continue
                if not fault.retry or attempt > self.max_retries:
                    break
                wait = self._backoff(attempt, fault.retry_after_s)
                if time.monotonic() + wait >= deadline:
                    break
                self._count("retries")
                await asyncio.sleep(wait)
                continue
            outage = False
            cost += _cost_of(response)
            text, reasoning, finish = _contents(response)
            marks = _read(text, reasoning, finish, nonce, answer)
            if marks is not None:
                return _Reply(marks, text or reasoning), cost, False
            failure = _unread(text, finish)
            if failure.reason in ("cut", "empty"):
                budget *= 2
            if attempt <= self.max_retries:
                self._count("retries")
        return failure, cost, outage

    def _backoff(self, attempt: int, retry_after_s: float | None) -> float:
        wait = min(BACKOFF_MAX_S, self.backoff_s * 2 ** (attempt - 1))
        wait *= 0.5 + random.random() / 2
        return max(wait, retry_after_s) if retry_after_s is not None else wait

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._slots:
                self._slots[loop] = asyncio.Semaphore(self.concurrency)
            return self._slots[loop]

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _key(
        self,
        messages: Sequence[Mapping[str, Any]],
        answer: str,
        style: str,
        pool: tuple[str, ...],
    ) -> str:
        content = [
            rubric.RUBRIC_VERSION,
            self.model,
            self.api_base,
            self.votes,
            self.thinking,
            self.preferences.fingerprint,
            style,
            sorted(pool),
            rubric.turns_of(messages),
            answer,
        ]
        return hashlib.sha256(
            json.dumps(content, ensure_ascii=True, default=str).encode()
        ).hexdigest()

    def _flipped(self, verdict: Verdict, key: str) -> Verdict:
        """The verdict of a noisy judge. The same seed and the same sequence of verdicts on
        one answer give the same flips, in whatever order other answers come between."""
        if not self.flip_probability:
            return verdict
        with self._lock:
            self._times_seen[key] += 1
            times = self._times_seen[key]
        chance = random.Random(f"{self.seed}/{key}/{times}")
        flips = [chance.random() < self.flip_probability for _ in range(2)]
        return replace(verdict, quality=verdict.quality ^ flips[0], style=verdict.style ^ flips[1])


class _Breaker:
    """Refuses for a while after `failures` outages in a row, then tries with one."""

    def __init__(self, failures: int, cooldown_s: float):
        self._failures = failures
        self._cooldown_s = cooldown_s
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._closed_at = 0.0
        self._probing = False

    def allows(self) -> bool:
        with self._lock:
            if self._in_a_row < self._failures:
                return True
            if self._probing or time.monotonic() < self._closed_at:
                return False
            self._probing = True
            return True

    def report(self, success: bool) -> None:
        with self._lock:
            self._probing = False
            if success:
                self._in_a_row = 0
                return
            self._in_a_row += 1
            if self._in_a_row >= self._failures:
                self._closed_at = time.monotonic() + self._cooldown_s

    def forget(self) -> None:
        """The attempt ended without telling anything about the provider."""
        with self._lock:
            self._probing = False


def _majority_bit(bits: Sequence[int]) -> int | None:
    ones = sum(bits)
    if 2 * ones == len(bits):
        return None
    return int(2 * ones > len(bits))


def _contents(response: Any) -> tuple[str, str, str]:
    """(content, reasoning, finish reason) of a response; whatever is missing is empty."""
    choice = response.choices[0] if response.choices else None
    message = getattr(choice, "message", None)
    text = rubric.text_of(getattr(message, "content", None))
    reasoning = rubric.text_of(getattr(message, "reasoning_content", None))
    return text, reasoning, str(getattr(choice, "finish_reason", "") or "")


def _read(text: str, reasoning: str, finish: str, nonce: str, answer: str) -> parsing.Marks | None:
    visible = parsing.without_thinking(text)
    if finish == "length" and parsing.ends_in_open_object(visible):
        return None  # a later verdict was cut: the last complete one is not the last
    marks = parsing.read_marks(visible, nonce, answer)
    if marks is None and finish != "length" and not visible.strip():
        # Some servers file the whole reply under reasoning. It ended by itself, so its
        # last verdict is the model's.
        marks = parsing.read_marks(f"{reasoning}\n{text}", nonce, answer)
    return marks


def _unread(text: str, finish: str) -> Unscored:
    if finish == "length":
        return Unscored("cut", "The reply was cut at its token limit.", raw=text)
    if not parsing.without_thinking(text).strip():
        return Unscored("empty", "The reply has no content.", raw=text)
    return Unscored("unreadable", "The reply has no readable verdict.", raw=text)


def _cost_of(response: Any) -> float:
    cost = (getattr(response, "_hidden_params", None) or {}).get("response_cost")
    return float(cost) if isinstance(cost, int | float) else 0.0


_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def _background_loop() -> asyncio.AbstractEventLoop:
    """One event loop in a daemon thread: HTTP clients are bound to the loop that made
    them, so a new loop per call would lose them."""
    global _loop
    with _loop_lock:
        if _loop is None or _loop.is_closed():
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="judge", daemon=True).start()
        return _loop
