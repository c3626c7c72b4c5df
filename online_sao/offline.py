"""A scenario in one process, without HTTP: generate, judge, update, over presets and seeds.

The same learner, judge, scenario definitions and result folders as the live service; only
the rollout's life between them is missing (no store, no Ray). With `--lag 0` each request is
answered by weights that have learned from every rollout before it; with `--lag L`, L requests
are answered at a time, so the last of them is L - 1 versions old when it is learned from.

In lockstep (same lag) with a float32 engine and learner, the same seed gives the same numbers
wherever the number of threads is the same (`learner.threads`, by default one per core; a run of
`--jobs` has its share of them).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import heapq
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from online_sao.config import EMBEDDED_MODEL, Config
from online_sao.engine.offline_engine import OfflineEngine
from online_sao.engine.weight_file import process_folder
from online_sao.errors import CheckpointError, ScenarioError
from online_sao.judging import checked_judge, to_stored
from online_sao.learner.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from online_sao.learner.learner import Learner, UpdateResult, choose_device
from online_sao.learner.loop import make_run
from online_sao.prepare import model_hash, resolve_model
from online_sao.scenario import (
    Request,
    Scenario,
    differing_settings,
    heldout_requests,
    prompt_stream,
    rollout_row,
    topics_of,
    write_results,
)
from online_sao.types import Rollout, RolloutState
from online_sao.writing import pretraining_prompts

JOURNAL = "journal.json"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
METHOD = (
    "online_sao/algorithm/*.py",
    "online_sao/learner/batch.py",
    "online_sao/learner/critic.py",
    "online_sao/learner/decoder.py",
    "online_sao/learner/estimators.py",
    "online_sao/learner/fused_decoder.py",
    "online_sao/learner/learner.py",
    "online_sao/learner/parameters.py",
    "online_sao/learner/policy.py",
    "online_sao/writing.py",
    "online_sao/data/*",
    "judge/*.py",
    "judge/data/*",
)
"""What a run's numbers come from, beside its settings and the start weights."""

OnProgress = Callable[[int, int, str], None]
"""Called with (rollouts done, rollouts in all, what is happening)."""


def method_version() -> str:
    """A hash of the code and data of METHOD: runs with another one are not to be pooled."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for pattern in METHOD:
        for path in sorted(root.glob(pattern)):
            if path.is_file():
                digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@contextlib.contextmanager
def only_here(folder: Path) -> Iterator[None]:
    """Keeps a run's other starts out of its folder: they would prune one another's checkpoints.

    Raises ScenarioError when another process works there. An error within leaves the lock's file
    for the next start.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise ScenarioError(
            f"Another process works in {folder}; wait until it has ended, or end it, then give "
            "the same command again."
        ) from None
    except OSError as error:
        raise ScenarioError(
            f"{folder} cannot be written ({error.strerror}); choose another folder with --out."
        ) from None
    try:
        yield
    finally:
        lock.release()
    # Finished: whoever comes between finds nothing to do, so that two locks do no harm.
    (folder / LOCK).unlink(missing_ok=True)


def is_finished(config: Config, scenario: Scenario, folder: Path, lag: int) -> bool:
    """Whether `folder` holds just this run, finished.

    Raises ScenarioError when it holds a finished run of other settings, definition or code.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except FileNotFoundError:
        return False
    except ValueError:
        raise ScenarioError(f"{folder / 'summary.json'} is damaged; remove the folder.") from None
    if not summary.get("complete"):
        return False
    run = make_run(config, model_hash(resolve_model(config.model.name)))
    wanted = {
        "settings": run.id,
        "judge": judge_identity(config),
        "lag": max(1, lag) - 1,
        "code": method_version(),
    }
    found = {
        "settings": summary.get("run_id"),
        "judge": summary.get("judge"),
        "lag": summary.get("lag"),
        "code": summary.get("method_version"),
    }
    differing = [name for name in wanted if wanted[name] != found[name]]
    definition = scenario.model_dump(mode="json", by_alias=True)
    if names := differing_settings(summary.get("definition") or {}, definition):
        differing.append(f"definition ({', '.join(names)})")
    if differing:
        raise ScenarioError(
            f"{folder} holds a finished run with another {' and another '.join(differing)}: choose "
            "another folder with --out, or remove it."
        )
    return True


def judge_identity(config: Config) -> dict[str, Any]:
    """The settings on which a verdict depends."""
    judge = config.judge
    return judge.model_dump(
        mode="json", include={"model", "preferences", "votes", "flip_probability"}
    )


class OfflineRunner:
    """One run of `scenario` with `config.learner`; results in `folder`, kept by `only_here`.

    Raises ScenarioError when the folder holds another run.
    """

    def __init__(self, config: Config, scenario: Scenario, folder: Path, lag: int = 0) -> None:
        self._config = config
        self._scenario = scenario
        self._folder = folder
        self._partial_journal = folder / f".{JOURNAL}.partial"
        self._batch = max(1, lag)
        self._method_version = method_version()
        self._rows: list[dict[str, Any]] = []
        self._heldout: list[dict[str, Any]] = []
        self._answered = itertools.count()
        self._evaluations = 0
        self._saved = 0  # rows in the journal
        self._tried = 0  # rows when a save was last tried
        self._said_unsaved = False
        self._version = 0
        self._earlier_s = 0.0
        self._began = time.monotonic()
        model = resolve_model(config.model.name)
        self._start_weights = model_hash(model)
        self._run = make_run(config, self._start_weights)
        one_seed = config.model_copy(
            update={"learner": config.learner.model_copy(update={"seed": 0})}
        )
        # The same for every seed, and on every machine: the warm start rounds as its CPU does.
        recipe = Path(model).name if config.model.name == EMBEDDED_MODEL else self._start_weights
        self._settings_id = make_run(one_seed, recipe).id
        self._judge = checked_judge(config, [(p.style, p.pool) for p in scenario.phases])
        # Before anything large is loaded: the folder may hold another run.
        self._journal = self._read_journal()
        self._weights_dir = process_folder()
        # The engine first: it measures how much memory is free for its cache.
        self._engine = OfflineEngine(config, model, self._weights_dir)
        self._learner = Learner(config.learner, model, choose_device(config.model.device))
        self._dtype = getattr(torch, config.engine.dtype)
        self._published = 0

    def run(self, on_progress: OnProgress = lambda done, total, what: None) -> dict[str, Any]:
        """All phases, from where an interrupted run of the same settings stopped."""
        total = sum(phase.rollouts for phase in self._scenario.phases)
        try:
            self._resume_or_start(total, on_progress)
            for number, phase in enumerate(self._scenario.phases):
                done = self._num_requests(number)
                if done == phase.rollouts:
                    continue
                before = self._scenario.phases[number - 1].pool if number else ()
                if done == 0 and set(phase.pool) != set(before):
                    # Another choice is offered: the last evaluation does not say where it begins.
                    self._evaluate(number, final=False)
                self._play_phase(number, done, total, on_progress)
            summary = self._write(complete=True)
            shutil.rmtree(self._folder / CHECKPOINTS, ignore_errors=True)
            (self._folder / JOURNAL).unlink(missing_ok=True)
            self._partial_journal.unlink(missing_ok=True)  # of a full disk
            return summary
        except KeyboardInterrupt:
            self._write(complete=False)
            raise
        finally:
            shutil.rmtree(self._weights_dir, ignore_errors=True)

    # --- a phase

    def _play_phase(self, number: int, done: int, total: int, on_progress: OnProgress) -> None:
        """Train on the phase's requests from number `done` on, with evaluations in between."""
        phase, every = self._scenario.phases[number], self._scenario.heldout.every
        borders = [*range(every, phase.rollouts, every)] if every else []
        held_back: list[tuple[int, int, Request, Rollout]] = []
        waiting: list[tuple[Request, Rollout]] = []  # until an update is full
        for border in (*(b for b in borders if b > done), phase.rollouts):
            requests = prompt_stream(self._scenario, number, start=done)
            for batch in _batches(itertools.islice(requests, border - done), self._batch):
                is_last = batch[-1].position + 1 == border
                waiting += self._ready(batch, held_back, is_last=is_last)
                size = self._config.learner.rollouts_per_update
                # Before an evaluation none waits any longer: a checkpoint follows.
                while len(waiting) >= size or (is_last and waiting):
                    self._learn(waiting[:size])
                    del waiting[:size]
                self._publish()
                on_progress(self._num_requests(), total, f"{phase.name}: {self._recent():.2f}")
                # At a border once it is evaluated; elsewhere only where all that was answered is in
                # the rows, for a journal holds nothing else.
                if self._is_due() and not (is_last or waiting or held_back):
                    self._save()
            done = border
            self._evaluate(number, final=border == phase.rollouts)
            self._save()

    def _is_due(self) -> bool:
        """Whether so many rollouts came after the last save that another is worth its time (12 s
        for the real model)."""
        every = self._config.learner.checkpoint_every
        return 0 < every <= len(self._rows) - self._tried

    def _ready(
        self,
        batch: Sequence[Request],
        held_back: list[tuple[int, int, Request, Rollout]],
        *,
        is_last: bool,
    ) -> list[tuple[Request, Rollout]]:
        """Answers whose reward has arrived by the end of this batch.

        Before an evaluation none is held back any longer: a checkpoint follows.
        """
        for request, rollouts in self._answer(batch):
            for rollout in rollouts:
                # The number decides between two that arrive together: first come, first out.
                number = next(self._answered)
                entry = (request.position + request.delay, number, request, rollout)
                heapq.heappush(held_back, entry)
        ready = []
        while held_back and (is_last or held_back[0][0] <= batch[-1].position):
            _, _, request, rollout = heapq.heappop(held_back)
            ready.append((request, rollout))
        return ready

    def _num_requests(self, phase: int | None = None) -> int:
        """Requests of `phase` (of all phases) whose answers were dealt with."""
        return len(
            {
                (row["phase"], row["position"])
                for row in self._rows
                if phase is None or row["phase"] == phase
            }
        )

    def _answer(self, requests: Sequence[Request]) -> list[tuple[Request, list[Rollout]]]:
        """Generate and judge; several answers per request for group methods."""
        config = self._config.learner
        per_prompt = config.group_size if config.advantage == "group" else 1
        rollouts = self._engine.generate(
            [request.messages for request in requests],
            [f"{self._run.id}-{r.phase}-{r.position}" for r in requests],
            [request.seed for request in requests],
            max_tokens=self._scenario.max_tokens,
            temperature=self._scenario.temperature,
            answers_per_prompt=per_prompt,
        )
        repeated = [request for request in requests for _ in range(per_prompt)]
        judged = self._judge_all(repeated, rollouts)
        return [
            (request, judged[start : start + per_prompt])
            for request, start in zip(requests, range(0, len(judged), per_prompt), strict=True)
        ]

    def _judge_all(self, requests: Sequence[Request], rollouts: Sequence[Rollout]) -> list[Rollout]:
        async def score() -> list[Any]:
            return await asyncio.gather(
                *(
                    self._judge.score(request.messages, rollout.answer, request.style, request.pool)
                    for request, rollout in zip(requests, rollouts, strict=True)
                )
            )

        judged = []
        for rollout, outcome in zip(rollouts, asyncio.run(score()), strict=True):
            stored = to_stored(outcome)
            if isinstance(stored, str):
                judged.append(replace(rollout, state=RolloutState.UNSCORED, reason=stored))
            elif rollout.state is RolloutState.EXCLUDED:
                judged.append(replace(rollout, verdict=stored))
            else:
                judged.append(replace(rollout, verdict=stored, state=RolloutState.REWARDED))
        return judged

    def _learn(self, pairs: Sequence[tuple[Request, Rollout]]) -> None:
        """One update from what is trainable of `pairs`; a row for each of them."""
        trainable = [r for _, r in pairs if r.state is RolloutState.REWARDED]
        result: UpdateResult | None = None
        if trainable:
            lag = self._version - min(r.weight_version_start for r in trainable)
            result = self._learner.update([[r] for r in trainable], policy_lag=lag)
            if result.applied:
                self._version += 1
        for request, rollout in pairs:
            self._rows.append(self._row(request, rollout, result))

    def _row(
        self, request: Request, rollout: Rollout, result: UpdateResult | None
    ) -> dict[str, Any]:
        learned = rollout.state is RolloutState.REWARDED and result is not None
        applied = learned and result is not None and result.applied
        state = rollout.state
        if learned:
            state = RolloutState.TRAINED if applied else RolloutState.EXCLUDED
        verdict = rollout.verdict
        record = {
            "id": rollout.id,
            "seq": len(self._rows) + 1,
            "state": str(state),
            "reason": rollout.reason if not learned or applied else "non_finite",
            "verdict": None
            if verdict is None
            else {
                "quality": verdict.quality,
                "style": verdict.style,
                "detected_style": verdict.detected_style,
            },
            "reward": rollout.reward,
            "finish_reason": rollout.finish_reason,
            "num_action_tokens": len(rollout.token_ids),
            "weight_version_start": rollout.weight_version_start,
            "trained_version": self._version if applied else None,
            "metrics": result.metrics if learned and result is not None else None,
        }
        return rollout_row(record, request, len(self._rows) + 1, self._elapsed_s)

    def _publish(self) -> None:
        if self._version != self._published:
            self._engine.load_weights(self._version, self._learner.policy.weights(self._dtype))
            self._published = self._version

    def _recent(self) -> float:
        rewards = [row["reward"] for row in self._rows[-20:] if row["reward"] is not None]
        return sum(rewards) / len(rewards) if rewards else 0.0

    # --- held-out answers

    def _evaluate(self, number: int, *, final: bool) -> None:
        count = self._scenario.final_answers if final else self._scenario.heldout.answers
        done = self._num_requests(number)
        requests = heldout_requests(self._scenario, number, count, position=done)
        rollouts = self._engine.generate(
            [request.messages for request in requests],
            [f"heldout-{self._evaluations}-{request.position}" for request in requests],
            [request.seed for request in requests],
            max_tokens=self._scenario.max_tokens,
            temperature=self._scenario.temperature,
        )
        for request, rollout in zip(requests, self._judge_all(requests, rollouts), strict=True):
            verdict = rollout.verdict
            self._heldout.append(
                {
                    "evaluation": self._evaluations,
                    "index": len(self._rows),
                    "phase": number,
                    "final": int(final),
                    "weight_version": self._published,
                    "id": rollout.id,
                    "topic": request.topic,
                    "audience": request.audience,
                    "preferred_style": request.style,
                    "detected_style": verdict.detected_style if verdict else None,
                    "quality": verdict.quality if verdict else None,
                    "style_mark": verdict.style if verdict else None,
                    "reward": rollout.reward,
                    "num_action_tokens": len(rollout.token_ids),
                    "answer": rollout.answer,
                }
            )
        self._evaluations += 1

    # --- start, resume, results

    @property
    def _elapsed_s(self) -> float:
        return self._earlier_s + time.monotonic() - self._began

    def _resume_or_start(self, total: int, on_progress: OnProgress) -> None:
        journal, self._journal = self._journal, None
        if journal is not None:
            # Not just the newest: a stop between checkpoint and journal leaves one too many.
            path = dict(list_checkpoints(self._folder / CHECKPOINTS)).get(journal["version"])
            try:
                if path is None:
                    raise CheckpointError("there is none")
                self._version = load_checkpoint(path, self._learner)
            except CheckpointError as error:
                raise ScenarioError(
                    f"{self._folder} holds an interrupted run whose checkpoint of version "
                    f"{journal['version']} is lost ({error}); remove the folder to start over."
                ) from None
            self._rows, self._heldout = journal["rows"], journal["heldout"]
            self._saved = self._tried = len(self._rows)
            self._evaluations = journal["evaluations"]
            self._earlier_s = journal["elapsed_s"]
            self._publish()
            return
        self._pretrain(total, on_progress)

    def _pretrain(self, total: int, on_progress: OnProgress) -> None:
        count = self._config.learner.value_pretraining_rollouts
        if not count:
            return
        phase = self._scenario.phases[0]
        prompts = pretraining_prompts(
            phase.pool,
            count,
            self._config.learner.seed,
            topics=topics_of(self._scenario),
        )
        on_progress(0, total, "value pretraining")
        requests = [
            Request(0, i, "", messages, phase.style, phase.pool, seed=i)
            for i, messages in enumerate(prompts)
        ]
        rollouts = self._engine.generate(
            prompts,
            [f"pretraining-{i}" for i in range(count)],
            [self._config.learner.seed * 1_000_003 + i for i in range(count)],
            max_tokens=self._scenario.max_tokens,
            temperature=self._scenario.temperature,
        )
        judged = self._judge_all(requests, rollouts)
        self._learner.pretrain(
            [r for r in judged if r.state is RolloutState.REWARDED],
            lambda done, steps: on_progress(0, total, f"value pretraining {done}/{steps}"),
        )

    def _identity(self) -> dict[str, Any]:
        return {
            "run_id": self._run.id,
            "judge": judge_identity(self._config),
            "lag": self._batch,
            "method_version": self._method_version,
            "definition": self._scenario.model_dump(mode="json", by_alias=True),
        }

    def _read_journal(self) -> dict[str, Any] | None:
        try:
            journal = json.loads((self._folder / JOURNAL).read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            raise ScenarioError(f"{self._folder / JOURNAL} is damaged; remove it.") from None
        found, wanted = dict(journal["identity"]), self._identity()
        definitions = found.pop("definition", {}), wanted.pop("definition")
        if found != wanted or differing_settings(*definitions):
            raise ScenarioError(
                f"{self._folder} holds an interrupted run of other settings or code; choose "
                "another folder with --out, or remove it."
            )
        return journal

    def _save(self) -> None:
        """A point to go on from. Where it cannot be written the one before is kept: a full disk
        must not cost the hours of a run, whose results are small."""
        self._tried = len(self._rows)
        try:
            self._save_point()
        except (CheckpointError, OSError) as error:
            if not self._said_unsaved:
                # What a CheckpointError says after its semicolon is meant for the service.
                text = getattr(error, "strerror", None) or str(error).partition(";")[0]
                print(
                    f"online-sao: {self._folder}: the run could not be saved at rollout "
                    f"{len(self._rows)} ({text.rstrip('.')}). It goes on, but if it is stopped it "
                    f"begins again from rollout {self._saved}: free some space.",
                    file=sys.stderr,
                )
            self._said_unsaved = True
        with contextlib.suppress(ScenarioError):  # of a full disk too; at the end it is an error
            self._write(complete=False)

    def _save_point(self) -> None:
        """A checkpoint and the rows up to it. Raises CheckpointError or OSError."""
        checkpoints = self._folder / CHECKPOINTS
        save_checkpoint(checkpoints, self._learner, self._version, self._run.id)
        journal = {
            "identity": self._identity(),
            "version": self._version,
            "rows": self._rows,
            "heldout": self._heldout,
            "evaluations": self._evaluations,
            "elapsed_s": self._elapsed_s,
        }
        self._partial_journal.write_text(json.dumps(journal))
        os.replace(self._partial_journal, self._folder / JOURNAL)
        self._saved = len(self._rows)
        # By its version, not as the newest: a journal that could not be written leaves a newer.
        prune_checkpoints(checkpoints, keep=0, pinned={self._version})

    def _write(self, *, complete: bool) -> dict[str, Any]:
        try:
            return write_results(
                self._folder,
                self._scenario,
                self._rows,
                self._heldout,
                preset=self._config.learner.preset,
                complete=complete,
                source="offline",
                run_id=self._run.id,
                settings_id=self._settings_id,
                start_weights=self._start_weights,
                dtype=[self._config.engine.dtype, self._config.learner.compute_dtype],
                judge=judge_identity(self._config),
                lag=self._batch - 1,
                method_version=self._method_version,
            )
        except OSError as error:
            raise ScenarioError(
                f"The results cannot be written to {self._folder} ({error.strerror}); free some "
                "space, then the same command goes on from the last checkpoint."
            ) from None


def _batches(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while batch := list(itertools.islice(items, size)):
        yield batch
