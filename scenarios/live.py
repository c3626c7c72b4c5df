"""Runs a scenario definition against a live endpoint, over HTTP only.

    online-sao serve &                                      # or an endpoint elsewhere
    python scenarios/live.py scenarios/preference_shift.toml

For each phase it sets the preference, then lets a number of users ask, each request from a
training topic. `concurrency` users ask at once, and the next ones when no more than
`max_in_flight` answers would be generated or wait for their update, so that the weights that
answer are never many versions older than those that are trained. Between, and at the phases'
borders, it pauses learning and asks about held-out topics with `X-Learning: off`: judged,
never trained on.

Results go to a folder (see --out); a journal in it is written as things happen, so that a
run that was stopped goes on with the same command (without --fresh, which forgets it). Ctrl-C
leaves learning resumed and writes what there is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from online_sao.errors import OnlineSAOError, ScenarioError
from online_sao.progress import make_progress
from online_sao.scenario import (
    Request,
    Scenario,
    heldout_requests,
    load_scenario,
    mark_text,
    prompt_stream,
    rollout_row,
    write_results,
)

FINISHED = frozenset({"trained", "unscored", "excluded", "stale", "discarded"})
"""States of a rollout from which it does not go on (docs/architecture.md)."""
COLLECTING = "collecting live rollouts"
"""What an endpoint says while it fits its critic to its clients' answers, for want of topics."""
MARKED = frozenset({"scored", "unscored", "skipped"})
"""Judge states from which no verdict will come any more."""
POLL_S = 0.4  # default of --poll: below an update's time; a look costs the endpoint 40 ms
PAGE = 200  # rollouts per listing
EVALUATION_USERS = 16  # learning is paused meanwhile, so all cores may generate
SERVED_WITHIN_S = 10.0  # a publish takes about a second
SERVED_POLL_S = 0.1
STALL_S = 600.0  # nothing at all finished for this long: give up
NOTICE_S = 15.0  # nothing finished for this long: say why, if the endpoint knows
READY_S = 3600.0  # model preparation and value pretraining come before /ready
SAY_S = 5.0  # between lines that say what is waited for
CLEANUP_S = 10.0  # for resuming learning on the way out
AGAIN = "repeat the command"  # what makes a run go on that was stopped
RETRIED = frozenset({429, 502, 503, 504})


class Endpoint:
    """The routes (docs/http.md) that a scenario needs. Errors are ScenarioErrors."""

    def __init__(
        self, url: str, api_key: str | None, admin_key: str | None, patience_s: float
    ) -> None:
        self.url = url.rstrip("/")
        self.again = AGAIN
        check_keys(api_key, admin_key)
        self._keys = {False: api_key or admin_key, True: admin_key or api_key}
        self._patience_s = patience_s
        self._model = ""
        limits = httpx.Limits(max_connections=64, keepalive_expiry=60)
        try:
            self._client = httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits)
        except httpx.InvalidURL as error:
            raise ScenarioError(
                f"{url} is no address of an endpoint ({error}). Give one as --url http://HOST:PORT."
            ) from None

    async def close(self) -> None:
        await self._client.aclose()

    async def wait_until_ready(self, connect_s: float, tell: Callable[[str], None]) -> None:
        """Returns when /ready says so; raises if nothing listens for `connect_s` seconds."""
        began, answered = time.monotonic(), False
        while True:
            waited = time.monotonic() - began
            try:
                response = await self._client.get("/ready", headers=self._headers(admin=False))
                answered = True
            except httpx.TransportError as error:
                if waited >= (READY_S if answered else connect_s):
                    raise ScenarioError(
                        f"No endpoint answers at {self.url} ({_reason(error)}). Start one with "
                        "`online-sao serve`, or give its address with --url."
                    ) from None
            else:
                if response.status_code == 200:
                    return
                if response.status_code in (401, 403):
                    raise _refused("GET", "/ready", response)
                if response.status_code == 404:
                    raise ScenarioError(
                        f"What answers at {self.url} has no /ready: it is not this endpoint."
                    )
                if waited >= READY_S:
                    raise ScenarioError(
                        f"The endpoint at {self.url} was not ready within {READY_S:.0f} s: "
                        f"{_readiness(response)}"
                    )
                tell(f"waiting for the endpoint: {_readiness(response)}")
            await asyncio.sleep(min(1.0, max(POLL_S, connect_s / 10)))

    async def chat(self, request: Request, scenario: Scenario, *, learn: bool) -> tuple[str, str]:
        """Ask; returns the receipt and the answer."""
        if not self._model:
            listed = await self._call("GET", "/v1/models")
            self._model = listed["data"][0]["id"]
        body = {
            "model": self._model,
            "messages": request.messages,
            "max_tokens": scenario.max_tokens,
            "temperature": scenario.temperature,
            "seed": request.seed,
        }
        headers = {} if learn else {"X-Learning": "off"}
        answer = await self._call("POST", "/v1/chat/completions", json=body, headers=headers)
        return answer["id"], answer["choices"][0]["message"]["content"] or ""

    async def prefer(self, style: str, pool: tuple[str, ...], note: str) -> None:
        """Set the preference; one that is in force already makes no new event."""
        now = await self._call("GET", "/v1/preference", admin=True)
        if now["style"] == style and set(now["pool"]) == set(pool):
            return
        body = {"style": style, "pool": list(pool), "note": note}
        await self._call("PUT", "/v1/preference", admin=True, json=body)

    async def learning(self) -> dict[str, Any]:
        return await self._call("GET", "/v1/learning", admin=True)

    async def pause(self, reason: str) -> None:
        await self._call("POST", "/v1/learning/pause", admin=True, json={"reason": reason})

    async def resume(self) -> None:
        await self._call("POST", "/v1/learning/resume", admin=True)

    async def rollout(self, rollout_id: str) -> dict[str, Any] | None:
        """What became of an answer; None if the endpoint does not know it."""
        return await self._call("GET", f"/v1/rollouts/{rollout_id}", admin=True, missing=None)

    async def rollouts_after(self, seq: int) -> AsyncIterator[dict[str, Any]]:
        while True:
            page = await self._call(
                "GET", "/v1/rollouts", admin=True, params={"after": seq, "limit": PAGE}
            )
            for record in page["data"]:
                yield record
            if len(page["data"]) < PAGE:
                return
            seq = page["data"][-1]["seq"]

    async def _call(
        self, method: str, path: str, *, admin: bool = False, missing: Any = ..., **options: Any
    ) -> Any:
        """One request; failures that may pass are tried again for `patience_s` seconds."""
        headers = {**self._headers(admin), **options.pop("headers", {})}
        deadline = time.monotonic() + self._patience_s
        pause = 0.25
        while True:
            try:
                response = await self._client.request(method, path, headers=headers, **options)
            except httpx.TransportError as error:
                problem, wait = _reason(error), pause
            else:
                if response.is_success:
                    return response.json()
                if response.status_code == 404 and missing is not ...:
                    return missing
                if response.status_code not in RETRIED:
                    raise _refused(method, path, response)
                problem, wait = _message(response), _retry_after(response, pause)
            if time.monotonic() + wait > deadline:
                raise ScenarioError(
                    f"The endpoint at {self.url} stopped answering {method} {path} ({problem}), "
                    f"tried for {self._patience_s:.0f} s. When it runs again, {self.again}: the "
                    "run goes on from its journal."
                )
            await asyncio.sleep(wait)
            pause = min(2 * pause, 5.0)

    def _headers(self, admin: bool) -> dict[str, str]:
        key = self._keys[admin]
        return {"Authorization": f"Bearer {key}"} if key else {}


def check_keys(api_key: str | None, admin_key: str | None) -> None:
    """ScenarioError for a key that cannot be sent."""
    for name, key in (("api", api_key), ("admin", admin_key)):
        if key and not (key.isascii() and key.isprintable()):
            raise ScenarioError(
                f"The {name} key has characters that no request can carry (only plain ASCII ones "
                f"can be sent). Correct ONLINE_SAO_{name.upper()}_KEY, or --{name}-key."
            )


def _refused(method: str, path: str, response: httpx.Response) -> ScenarioError:
    message = f"The endpoint refused {method} {path} ({response.status_code}): {_message(response)}"
    if response.status_code in (401, 403):
        message += " Give the keys with --api-key and --admin-key."
    return ScenarioError(message)


def _message(response: httpx.Response) -> str:
    """What the endpoint says, in one line, whatever form it has."""
    try:
        body = response.json()
    except ValueError:
        body = response.text
    for key in ("error", "message", "detail", "reason"):
        if isinstance(body, dict) and body.get(key):
            body = body[key]
    text = " ".join(str(body).split())
    return text[:300] or response.reason_phrase


def _readiness(response: httpx.Response) -> str:
    """What /ready is waiting for, in one line."""
    try:
        body = response.json()
        stage = body["pretraining"] or {}
        state = body["error"] or f"the learner is {body['learner']}"
    except (ValueError, KeyError, TypeError):
        return _message(response)
    if stage.get("total"):
        state += f", value pretraining {stage.get('done', 0)}/{stage['total']}"
    return state


def _reason(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__


def _retry_after(response: httpx.Response, default: float) -> float:
    try:
        return max(0.0, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):
        return default


class Journal:
    """What has happened in a result folder's run, one JSON object a line, oldest first."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        # A kill may cut a line short, in a character too; what the line said is lost.
        with self.path.open(encoding="utf-8", errors="replace") as stream:
            for line in stream:
                with contextlib.suppress(ValueError):
                    yield json.loads(line)

    def add(self, kind: str, **entry: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"kind": kind, **entry}, ensure_ascii=False) + "\n"
        with self.path.open("a+b") as stream:
            if end := stream.seek(0, os.SEEK_END):
                stream.seek(end - 1)
                if stream.read(1) != b"\n":  # cut short: this entry must not become part of it
                    line = "\n" + line
            stream.write(line.encode())

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class Run:
    """One run of a scenario: sends, watches, evaluates, and keeps the rows."""

    def __init__(
        self,
        endpoint: Endpoint,
        scenario: Scenario,
        folder: Path | None,
        preset: str | None,
        fresh: bool = False,
        poll_s: float = POLL_S,
    ) -> None:
        self.endpoint = endpoint
        self.scenario = scenario
        self.preset = preset
        self.run_id: str | None = None
        self._chosen_folder = folder
        self._fresh = fresh
        self._poll_s = poll_s
        self.rows: list[dict[str, Any]] = []
        self.heldout: list[dict[str, Any]] = []
        self._sent: set[tuple[int, int]] = set()  # (phase, position) of requests answered
        self._evaluated: set[tuple[int, int]] = set()  # (phase, rollouts of it before)
        self._open: dict[str, Request] = {}  # answered, and waiting for their update
        self._early: dict[str, dict[str, Any]] = {}  # finished before we knew they were ours
        self._asking = 0  # requests whose receipt has not come yet
        self._after: int | None = None  # all rollouts up to this number are settled
        self._settled = asyncio.Event()  # one of the open was dealt with
        self._paused = False
        self._earlier_s = 0.0  # elapsed before this sitting
        self._began = time.monotonic()
        self._moved = time.monotonic()  # when something last finished
        self._progress: Any = None
        self._bar: Any = None
        self._weight_version: int | None = None
        self._said = float("-inf")  # when a waiting line was last written

    @property
    def folder(self) -> Path:
        """Named after the preset, which the endpoint may be the one to say."""
        name = f"{self.preset or 'unnamed'}-seed{self.scenario.seed}"
        return self._chosen_folder or Path("runs") / self.scenario.name / name

    @property
    def journal(self) -> Journal:
        return Journal(self.folder / "journal.jsonl")

    @property
    def elapsed_s(self) -> float:
        return self._earlier_s + time.monotonic() - self._began

    async def run(self, connect_s: float) -> None:
        """All phases, from wherever the journal says the run stands."""
        with make_progress() as self._progress:
            self._bar = self._progress.add_task("waiting for the endpoint", total=None)
            await self.endpoint.wait_until_ready(connect_s, self._say)
            await self._begin()
            total = sum(phase.rollouts for phase in self.scenario.phases)
            self._progress.update(self._bar, total=total, completed=len(self.rows))
            tasks = [asyncio.create_task(self._play()), asyncio.create_task(self._watch())]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._leave_learning()

    def write(self, *, complete: bool) -> dict[str, Any]:
        """Write the result folder, all but the figures."""
        self.rows.sort(key=lambda row: row["seq"])
        for index, row in enumerate(self.rows, 1):
            row["index"] = index
        return write_results(
            self.folder,
            self.scenario,
            self.rows,
            self.heldout,
            preset=self.preset or "unnamed",
            complete=complete,
            source="live",
            run_id=self.run_id,
        )

    # Beginning and going on

    async def _begin(self) -> None:
        learning = await self.endpoint.learning()
        served = learning.get("preset")
        if self.preset and served and self.preset != served:
            raise ScenarioError(
                f"The endpoint runs preset {served}, not {self.preset}; restart it with that "
                "preset, or leave --preset out."
            )
        self.preset = self.preset or served
        self.run_id = learning.get("run_id")
        self._prepare_folder()
        entries = list(self.journal.read())
        if entries:
            await self._go_on(entries, learning)
        else:
            self.journal.add(
                "start",
                definition=self._definition(),
                preset=self.preset,
                run_id=self.run_id,
            )
            if learning.get("updates"):
                self._note(
                    f"The endpoint has made {learning['updates']} updates before: this run does "
                    "not begin from the start weights."
                )
        if (learning.get("pretraining") or {}).get("state") == COLLECTING:
            raise ScenarioError(
                "The endpoint fits its critic to the first live answers, and waits for more of "
                "them than a scenario leaves open. Start it with service.topics (a topics file) "
                "or with --set learner.value_pretraining_rollouts=0."
            )
        if self.scenario.settings:
            listed = " ".join(
                f"--set {key}={value}" for key, value in self.scenario.settings.items()
            )
            self._note(f"This scenario needs an endpoint started with {listed}.")
        if learning.get("paused"):
            self._note(f"Learning was paused ({learning.get('pause_reason')}); it is resumed.")
            await self.endpoint.resume()

    async def _go_on(self, entries: list[dict[str, Any]], learning: dict[str, Any]) -> None:
        start = entries[0]
        same = (
            start.get("definition") == self._definition()
            and start.get("preset") == self.preset
            and start.get("run_id") == self.run_id
        )
        if not same:
            raise ScenarioError(
                f"{self.folder} holds an unfinished run of another scenario, preset or endpoint; "
                "choose another --out, or replace it with --fresh."
            )
        asked: dict[str, tuple[int, int]] = {}
        for entry in entries[1:]:
            self._earlier_s = max(self._earlier_s, entry.get("elapsed_s", 0.0))
            if entry["kind"] == "asked":
                asked[entry["id"]] = (entry["phase"], entry["position"])
            elif entry["kind"] == "rollout":
                row = entry["row"]
                self.rows.append(row)
                asked.pop(row["id"], None)  # the line that said so may have been cut short
                self._sent.add((row["phase"], row["position"]))
            elif entry["kind"] == "heldout":
                self.heldout += entry["rows"]
                self._evaluated.add((entry["phase"], entry["at"]))
        # Not the version: it rises again even when a crash took updates back.
        made = len({row["trained_version"] for row in self.rows if row["trained_version"]})
        if (learning.get("updates") or 0) < made:
            raise ScenarioError(
                f"The endpoint has made {learning.get('updates')} updates, and the run in "
                f"{self.folder} had seen {made}: its weights are not those that the run had "
                "reached. Start over with --fresh, and an endpoint from the start weights."
            )
        self._began = time.monotonic()
        # Answers that came before the stop and were not settled then.
        for rollout_id, (phase, position) in asked.items():
            record = await self.endpoint.rollout(rollout_id)
            if record is None:
                continue
            self._sent.add((phase, position))
            request = next(prompt_stream(self.scenario, phase, start=position))
            self._open[rollout_id] = request
        self._note(f"Going on after {len(self.rows)} rollouts.")

    def _prepare_folder(self) -> None:
        summary = self.folder / "summary.json"
        if self._fresh:
            self.journal.remove()
            summary.unlink(missing_ok=True)
            # With --fresh again, what this run has by then would be forgotten as well.
            self.endpoint.again = f"{AGAIN} without --fresh"
        elif summary.exists() and not self.journal.path.exists():
            raise ScenarioError(
                f"{self.folder} already holds a finished run; choose another --out, or replace it "
                "with --fresh."
            )

    def _definition(self) -> dict[str, Any]:
        return self.scenario.model_dump(mode="json", by_alias=True)

    # The run

    async def _play(self) -> None:
        every = self.scenario.heldout.every
        pool: tuple[str, ...] = ()
        for number, phase in enumerate(self.scenario.phases):
            await self._until_open(0)
            borders = [*range(every, phase.rollouts, every)] if every else []
            borders.append(phase.rollouts)
            done = sum(1 for place in self._sent if place[0] == number)
            if done == phase.rollouts and (number, phase.rollouts) in self._evaluated:
                pool = phase.pool
                continue
            await self.endpoint.prefer(
                phase.style, phase.pool, f"{self.scenario.name}: {phase.name}"
            )
            if set(phase.pool) != set(pool):
                # Another choice is offered, so the last evaluation does not say where it begins.
                await self._evaluate(number, 0)
            pool = phase.pool
            for border in borders:
                await self._train(number, border)
                await self._evaluate(number, border)

    async def _train(self, number: int, until: int) -> None:
        """Ask the phase's requests up to `until`; returns when all of them are settled."""
        phase = self.scenario.phases[number]
        requests = (
            request
            for request in itertools.islice(prompt_stream(self.scenario, number), until)
            if (number, request.position) not in self._sent
        )
        # A preference that changes with every request allows one generation at a time: the
        # one in force when an answer is finished is the one it is judged by.
        users = 1 if phase.mixed else min(self.scenario.concurrency, self.scenario.max_in_flight)

        async def ask(request: Request) -> None:
            self._asking += 1
            try:
                rollout_id, _ = await self.endpoint.chat(request, self.scenario, learn=True)
            finally:
                self._asking -= 1
            self._opened(rollout_id, request)

        # All users at once, then the next wave: an engine answers four requests together in
        # about the time of one.
        while wave := list(itertools.islice(requests, users)):
            await self._until_open(self.scenario.max_in_flight - len(wave))
            if not self._open:
                await self._until_served()
            if phase.mixed:
                await self.endpoint.prefer(wave[0].style, wave[0].pool, f"request of {phase.name}")
            await _together([ask(request) for request in wave])
        await self._until_open(0)
        await self._until_served()

    async def _until_open(self, count: int) -> None:
        """Returns when at most `count` answers wait for their update."""
        while len(self._open) > count:
            self._settled.clear()
            await self._settled.wait()

    async def _until_served(self) -> None:
        """Returns when the weights that were trained last answer: a publish takes a moment.

        Else each wave would be answered by the weights from before the last one. An endpoint
        that does not get to it in SERVED_WITHIN_S (a publish failed, say) is not waited for.
        """
        deadline = time.monotonic() + SERVED_WITHIN_S
        while self._weight_version is not None and time.monotonic() < deadline:
            serving = (await self.endpoint.learning()).get("serving_version")
            if serving is None or serving >= self._weight_version:
                return
            await asyncio.sleep(min(SERVED_POLL_S, self._poll_s))

    def _opened(self, rollout_id: str, request: Request) -> None:
        self._moved = time.monotonic()
        self._sent.add((request.phase, request.position))
        self.journal.add("asked", id=rollout_id, phase=request.phase, position=request.position)
        self._open[rollout_id] = request
        early = self._early.pop(rollout_id, None)
        if early is not None:
            self._settle(early)

    async def _watch(self) -> None:
        """The one poller: looks what became of all open rollouts."""
        while True:
            await asyncio.sleep(self._poll_s)
            if not self._open:
                self._moved = time.monotonic()
                continue
            if self._after is None:
                self._after = await self._listing_start()
            settled = True  # all listed so far are
            async for record in self.endpoint.rollouts_after(self._after):
                finished = record["state"] in FINISHED
                if finished and record["id"] in self._open:
                    self._settle(record)
                elif finished and self._asking:
                    self._early[record["id"]] = record
                ours = record["id"] in self._open or self._asking > 0
                settled = settled and (finished or not ours)
                if settled:
                    self._after = record["seq"]
            if not self._asking:
                self._early.clear()
            await self._check_stall()

    async def _listing_start(self) -> int:
        """The number after which every open rollout is listed."""
        records = [await self.endpoint.rollout(rollout_id) for rollout_id in list(self._open)]
        seqs = [record["seq"] for record in records if record]
        if not seqs:
            raise ScenarioError(
                "The endpoint does not know the answers it has just given; is its store down?"
            )
        # Answers whose receipts are still on their way may have lower numbers.
        return max(0, min(seqs) - 1 - self.scenario.concurrency)

    def _settle(self, record: dict[str, Any]) -> None:
        request = self._open.pop(record["id"])
        row = rollout_row(record, request, len(self.rows) + 1, self.elapsed_s)
        self.rows.append(row)
        self.journal.add("rollout", row=row, elapsed_s=self.elapsed_s)
        self._weight_version = row["trained_version"] or self._weight_version
        self._moved = time.monotonic()
        self._settled.set()
        self._show(request.phase, row)

    async def _check_stall(self) -> None:
        idle = time.monotonic() - self._moved
        if idle < NOTICE_S:
            return
        learning = await self.endpoint.learning()
        why = f"queue {learning.get('queue')}"
        if learning.get("paused"):
            why = f"learning is paused: {learning.get('pause_reason')}"
        if idle >= STALL_S:
            raise ScenarioError(f"No rollout was finished for {idle:.0f} s ({why}).")
        self._say(f"nothing finished for {idle:.0f} s ({why})")

    async def _evaluate(self, number: int, at: int) -> None:
        """Ask about held-out topics with the weights as they are."""
        if (number, at) in self._evaluated:
            return
        phase = self.scenario.phases[number]
        final = at == phase.rollouts
        count = self.scenario.final_answers if final else self.scenario.heldout.answers
        requests = heldout_requests(self.scenario, number, count, position=at)
        bar = self._progress.add_task(f"held-out topics, {phase.name} at {at}", total=2 * count)
        self._paused = True  # before the call: it may be cut off after it took effect
        await self.endpoint.pause(f"{self.scenario.name} asks about held-out topics")
        answers: dict[int, tuple[str, str]] = {}  # request number to receipt and answer
        waiting = iter(requests)

        async def ask() -> None:
            for request in waiting:
                if phase.mixed:
                    await self.endpoint.prefer(request.style, request.pool, "held-out topic")
                answers[request.position] = await self.endpoint.chat(
                    request, self.scenario, learn=False
                )
                self._progress.update(bar, advance=1)

        await _together([ask() for _ in range(1 if phase.mixed else EVALUATION_USERS)])
        rows = []
        for request in requests:
            rollout_id, answer = answers[request.position]
            record = await self._verdict(rollout_id)
            self._progress.update(bar, advance=1)
            row = rollout_row(record, request, 0, 0.0)
            rows.append(
                {
                    "evaluation": len({r["evaluation"] for r in self.heldout}),
                    "index": len(self.rows),
                    "phase": number,
                    "final": int(final),
                    "weight_version": record.get("weight_version_end"),
                    **{
                        name: row[name]
                        for name in (
                            "id",
                            "topic",
                            "audience",
                            "preferred_style",
                            "detected_style",
                            "quality",
                            "style_mark",
                            "reward",
                            "num_action_tokens",
                        )
                    },
                    "answer": answer,
                }
            )
        self._progress.remove_task(bar)
        if phase.mixed:
            await self.endpoint.prefer(
                phase.style, phase.pool, f"{self.scenario.name}: {phase.name}"
            )
        await self.endpoint.resume()
        self._paused = False
        self._moved = time.monotonic()
        self.heldout += rows
        self._evaluated.add((number, at))
        self.journal.add("heldout", phase=number, at=at, rows=rows, elapsed_s=self.elapsed_s)

    async def _verdict(self, rollout_id: str) -> dict[str, Any]:
        """A held-out rollout once the judge is done with it."""
        deadline = time.monotonic() + STALL_S
        while True:
            record = await self.endpoint.rollout(rollout_id)
            if record is None:
                raise ScenarioError(
                    f"The endpoint gave the receipt {rollout_id} and does not know it any more; "
                    "is its store down?"
                )
            if record.get("judge_state") in MARKED:
                return record
            if time.monotonic() > deadline:
                raise ScenarioError(
                    f"Held-out answer {rollout_id} was not judged in {STALL_S:.0f} s."
                )
            await asyncio.sleep(self._poll_s)

    async def _leave_learning(self) -> None:
        if not self._paused:
            return
        try:
            async with asyncio.timeout(CLEANUP_S):
                await self.endpoint.resume()
            self._paused = False
        except (TimeoutError, ScenarioError) as error:
            self._note(
                f"Learning could not be resumed ({error or 'no answer'}): "
                f"POST {self.endpoint.url}/v1/learning/resume does it."
            )

    # What the user sees

    def _show(self, number: int, row: dict[str, Any]) -> None:
        phase = self.scenario.phases[number]
        window = self.scenario.thresholds.window
        rewards = [
            r["reward"] for r in self.rows if r["phase"] == number and r["reward"] is not None
        ][-window:]
        mean = f"{sum(rewards) / len(rewards):.2f}" if rewards else "none yet"
        self._progress.update(
            self._bar,
            completed=len(self.rows),
            description=(
                f"{number + 1}/{len(self.scenario.phases)} {phase.name}: reward {mean} over "
                f"{len(rewards)}, version {self._weight_version}, lag {row['policy_lag']}"
            ),
        )

    def _say(self, text: str) -> None:
        """What is waited for: in place of the bar's text, in a log a line now and then."""
        self._progress.update(self._bar, description=text)
        now = time.monotonic()
        if not sys.stderr.isatty() and now - self._said >= SAY_S:
            self._said = now
            self._note(text)

    def _note(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)


async def _together(coroutines: list[Any]) -> None:
    """Run all; the first failure stops the others and is raised as it is."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """The table at the end of a run; scenarios/README.md explains its columns."""
    table = Table(title=f"{summary['scenario']}: {summary['preset']}, seed {summary['seed']}")
    window = summary["window"]
    for heading in (
        "phase",
        "n",
        "reward",
        f"last {window}",
        f"to {summary['mark']:g}",
        "held-out",
        "masked",
        "seconds",
    ):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for phase in summary["phases"]:
        heldout = phase["heldout"]
        table.add_row(
            phase["name"],
            f"{phase['rollouts']}/{phase['planned']}",
            _number(phase["mean_reward"]),
            _number(phase["last_mean"]),
            mark_text(phase, window),
            _number(heldout and heldout["preferred_share"]),
            _number(phase["masked_fraction"], ".4f"),
            _number(phase["seconds"], ".0f"),
        )
    console.print(table)


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def parser(default: Path | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=(
            "Run a scenario against a live endpoint: switch the preferred style from phase to "
            "phase, let users ask, measure on held-out topics how the answers follow."
        ),
        epilog=(
            "Start the endpoint first (`online-sao serve`, for a baseline with `--preset "
            "running_mean`) and give each preset an endpoint of its own, from the start weights. "
            "A run that was stopped goes on when the same command is given again, without --fresh. "
            "`python scenarios/compare.py FOLDER...` sets several runs side by side."
        ),
    )
    if default is None:
        made.add_argument("scenario", type=Path, help="the scenario definition, a TOML file")
    else:
        made.add_argument(
            "--scenario", type=Path, default=default, help=f"definition (default: {default.name})"
        )
    made.add_argument(
        "--preset",
        help="name of this run; must be the endpoint's preset (default: what the endpoint says)",
    )
    made.add_argument("--phase-rollouts", type=int, metavar="N", help="rollouts in each phase")
    made.add_argument(
        "--heldout-every", type=int, metavar="N", help="rollouts between held-out evaluations"
    )
    made.add_argument(
        "--heldout-answers", type=int, metavar="N", help="held-out answers per evaluation"
    )
    made.add_argument(
        "--final-answers",
        type=int,
        metavar="N",
        help="held-out answers at each phase's end (default: --heldout-answers if given)",
    )
    made.add_argument("--seed", type=int, help="seed of topics, wording and sampling")
    made.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    made.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="result folder (default: runs/SCENARIO/PRESET-seedSEED)",
    )
    made.add_argument("--fresh", action="store_true", help="replace what is in the result folder")
    made.add_argument(
        "--wait",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds to wait for an endpoint that does not accept connections (default: 10)",
    )
    made.add_argument(
        "--patience",
        type=float,
        default=180.0,
        metavar="S",
        help="seconds to go on trying when the endpoint stops answering (default: 180)",
    )
    made.add_argument(
        "--poll",
        type=float,
        default=POLL_S,
        metavar="S",
        help="seconds between looks at what became of the answers (default: %(default)s)",
    )
    made.add_argument("--api-key", help="default: environment ONLINE_SAO_API_KEY")
    made.add_argument("--admin-key", help="default: environment ONLINE_SAO_ADMIN_KEY")
    return made


def main(argv: list[str] | None = None, default: Path | None = None) -> int:
    """Exit codes: 0 done, 2 an error that one sentence explains, 130 stopped by the user."""
    options = parser(default).parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 100)
    try:
        return _main(options, console)
    except OnlineSAOError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2


def _main(options: argparse.Namespace, console: Console) -> int:
    scenario = load_scenario(options.scenario).replace(
        seed=options.seed,
        phase_rollouts=options.phase_rollouts,
        heldout_every=options.heldout_every,
        heldout_answers=options.heldout_answers,
        final_answers=options.final_answers or options.heldout_answers,
    )
    if scenario.delay:
        raise ScenarioError(
            f"Scenario {scenario.name} holds rewards back, which only the offline runner can do: "
            f"online-sao train --scenario {options.scenario}"
        )
    run: Run | None = None

    async def go() -> None:
        nonlocal run
        endpoint = Endpoint(
            options.url,
            options.api_key or os.environ.get("ONLINE_SAO_API_KEY"),
            options.admin_key or os.environ.get("ONLINE_SAO_ADMIN_KEY"),
            options.patience,
        )
        run = Run(endpoint, scenario, options.out, options.preset, options.fresh, options.poll)
        current = asyncio.current_task()
        assert current is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, current.cancel)
        try:
            await run.run(options.wait)
        finally:
            await endpoint.close()

    complete, code = False, 0
    try:
        asyncio.run(go())
        complete = True
    except (KeyboardInterrupt, asyncio.CancelledError):
        code = _stopped(run)
    finally:
        if run and (run.rows or run.heldout):
            try:
                _report(run, complete, console)
            except KeyboardInterrupt:
                code = _stopped(run)
    return code


def _stopped(run: Run | None) -> int:
    """Say how to go on; the exit code."""
    again = run.endpoint.again if run else AGAIN
    print(
        f"{Path(sys.argv[0]).name}: stopped; learning goes on. To go on with this run, {again}.",
        file=sys.stderr,
    )
    return 130


def _report(run: Run, complete: bool, console: Console) -> None:
    import figures  # matplotlib takes a second, so only when there is something to draw

    summary = run.write(complete=complete)
    drawn = figures.draw_run(run.folder)
    if complete:
        # Last: stopped while it draws, the same command draws anew, and does not find a
        # finished run that it may not touch.
        run.journal.remove()
    print_summary(summary, console)
    console.print(f"Results: {run.folder} ({', '.join(path.name for path in drawn)}, answers.md)")


if __name__ == "__main__":
    sys.exit(main())
