"""Scenario definitions, the requests they make, and what is reported of a run.

Shared by the scripts in `scenarios/`, which drive a live endpoint, and by the offline
runner: the same definition gives the same requests, and the same rows the same numbers, in
both. Standard library, numpy, pydantic only; no torch.

    scenario = load_scenario("scenarios/preference_shift.toml").replace(phase_rollouts=60)
    for request in itertools.islice(prompt_stream(scenario, phase_index=0), 60):
        ...  # request.messages, request.style, request.pool
    summary = summarize(rows, scenario, heldout)
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import random
import tomllib
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from online_sao.config import Config
from online_sao.errors import ConfigError, ScenarioError
from online_sao.writing import DATA, Topics, build_messages, load_topics, topic_stream

__all__ = [
    "Audience",
    "Delay",
    "Heldout",
    "Phase",
    "Request",
    "Results",
    "Scenario",
    "Thresholds",
    "differing_settings",
    "heldout_requests",
    "load_scenario",
    "prompt_stream",
    "read_results",
    "rollout_row",
    "rollouts_to_mark",
    "summarize",
    "topics_of",
    "write_results",
]

Row = dict[str, Any]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, use_attribute_docstrings=True
    )


class Audience(_Section):
    """A group of users within a phase, told apart by their system prompt."""

    name: str = Field(min_length=1)
    style: str
    """What this group likes."""
    system: str = Field(min_length=1)
    """A sentence put before the system prompt."""
    share: float = Field(1.0, gt=0)
    """Its part of the requests, relative to the other groups'."""


class Phase(_Section):
    name: str = Field(min_length=1)
    style: str
    """The preferred style."""
    pool: tuple[str, ...]
    """The styles offered in the system prompt and told apart by the judge."""
    rollouts: int = Field(150, ge=1)
    to_style: str | None = None
    """Drift: the chance that a request prefers this style rises from 0 to 1 over the phase."""
    audiences: tuple[Audience, ...] = Field((), alias="audience")
    """Groups with preferences of their own; the phase's style is then the first group's."""

    @model_validator(mode="after")
    def _consistent(self) -> Phase:
        if len(set(self.pool)) < len(self.pool):
            raise ValueError(f"the pool of phase '{self.name}' names a style twice")
        wanted = [self.style, *(audience.style for audience in self.audiences)]
        for style in [*wanted, self.to_style or self.style]:
            if style not in self.pool:
                raise ValueError(
                    f"style '{style}' is not in the pool of phase '{self.name}' "
                    f"({', '.join(self.pool)})"
                )
        if self.audiences and self.to_style:
            raise ValueError(f"phase '{self.name}' has both audiences and to_style; choose one")
        if self.audiences and self.style != self.audiences[0].style:
            raise ValueError(f"the style of phase '{self.name}' must be its first audience's")
        return self

    @property
    def mixed(self) -> bool:
        """Whether requests of this phase differ in the style they prefer."""
        return bool(self.audiences) or self.to_style is not None


class Heldout(_Section):
    every: int = Field(50, ge=0)
    """Rollouts between evaluations within a phase; 0: only at the phases' borders."""
    answers: int = Field(24, ge=1)
    """Held-out answers per evaluation."""
    final_answers: int | None = Field(None, ge=1)
    """Held-out answers at the end of each phase; default: `answers`."""


class Thresholds(_Section):
    window: int = Field(40, ge=1)
    mark: float = Field(0.8, ge=0, le=1)
    """A phase is learned when the mean reward of `window` rollouts in a row reaches this."""


class Delay(_Section):
    """Rewards that come late: each waits for this many later rollouts, drawn evenly."""

    min_rollouts: int = Field(0, ge=0)
    max_rollouts: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> Delay:
        if self.max_rollouts < self.min_rollouts:
            raise ValueError("max_rollouts must not be below min_rollouts")
        return self


class Scenario(_Section):
    name: str = Field(pattern=r"^[A-Za-z0-9_\-]+$")
    claim: str = Field(min_length=1)
    """What a run of this is meant to show."""
    topics: str = "writing"
    """A shipped topic set, or a TOML file beside the definition."""
    topics_hash: str | None = None
    """Of that file's content, taken by load_scenario; None: a shipped set, or older results."""
    seed: int = 0
    max_tokens: int = Field(56, ge=1)
    temperature: float = Field(1.0, ge=0)
    concurrency: int = Field(4, ge=1)
    """Users who ask at the same time."""
    max_in_flight: int = Field(4, ge=1)
    """Rollouts generated or waiting to be trained on at any time: it bounds the policy lag."""
    heldout: Heldout = Heldout()
    thresholds: Thresholds = Thresholds()
    delay: Delay | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the endpoint or offline runner that the scenario depends on, by dotted name."""
    phases: tuple[Phase, ...] = Field(alias="phase", min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        names = [phase.name for phase in self.phases]
        if len(set(names)) < len(names):
            raise ValueError("two phases have the same name")
        return self

    @model_serializer(mode="wrap")
    def _without_an_unset_hash(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A definition without a topics file is stored as it was before there was a hash, so
        that live runs begun then go on."""
        data: dict[str, Any] = serialize(self)
        if data["topics_hash"] is None:
            del data["topics_hash"]
        return data

    @property
    def final_answers(self) -> int:
        return self.heldout.final_answers or self.heldout.answers

    def replace(
        self,
        *,
        seed: int | None = None,
        phase_rollouts: int | None = None,
        heldout_every: int | None = None,
        heldout_answers: int | None = None,
        final_answers: int | None = None,
    ) -> Scenario:
        """The same scenario with another seed or other lengths; None keeps what there is."""
        data = self.model_dump(by_alias=True)
        if seed is not None:
            data["seed"] = seed
        if phase_rollouts is not None:
            for phase in data["phase"]:
                phase["rollouts"] = phase_rollouts
        for key, value in (
            ("every", heldout_every),
            ("answers", heldout_answers),
            ("final_answers", final_answers),
        ):
            if value is not None:
                data["heldout"][key] = value
        return _validated(data, "the scenario with these options")


@dataclass(frozen=True)
class Request:
    """One request of a scenario; `style` is what its answer will be judged by."""

    phase: int
    position: int  # 0, 1, 2... within the phase
    topic: str
    messages: list[dict[str, str]]
    style: str
    pool: tuple[str, ...]
    seed: int  # for sampling the answer
    audience: str | None = None
    delay: int = 0  # rollouts for which its reward is held back


def load_scenario(path: str | Path) -> Scenario:
    """Read a definition. ScenarioError names the file and the setting that is wrong."""
    path = Path(path)
    try:
        with path.open("rb") as stream:
            data = tomllib.load(stream)
    except FileNotFoundError:
        raise ScenarioError(f"There is no scenario file {path}.") from None
    except OSError as error:
        raise ScenarioError(f"The scenario {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"The scenario {path} is not valid TOML: {error}.") from None
    topics = data.get("topics", "writing")
    if isinstance(topics, str) and (file := _topics_file(topics, path.parent)):
        # Its whole path: results are read, and runs go on, wherever one stands then.
        data["topics"] = str(file)
        data["topics_hash"] = _content_hash(file)
    scenario = _validated(data, str(path))
    _check_offers(scenario, str(path))
    return scenario


def _topics_file(topics: str, folder: Path) -> Path | None:
    """The file that `topics` names in a definition of `folder`; None for a shipped set."""
    shipped = (DATA / f"{topics}.toml").is_file()
    places = [folder / topics] if shipped else [folder / topics, Path(topics).expanduser()]
    return next((place.resolve() for place in places if place.is_file()), None)


def _content_hash(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ScenarioError(f"The topics file {file} cannot be read: {error.strerror}.") from None


def topics_of(scenario: Scenario) -> Topics:
    """What a run of `scenario` asks about.

    Raises ScenarioError when its topics file is gone, or was changed after the definition was
    read: the results would tell of other topics than were asked about.
    """
    file = Path(scenario.topics)
    if scenario.topics_hash is not None and _content_hash(file) != scenario.topics_hash:
        raise ScenarioError(
            f"The topics file {file} was changed while the run went on; put it back, or begin "
            "anew with the changed one in another folder."
        )
    try:
        return load_topics(scenario.topics)
    except ConfigError as error:
        raise ScenarioError(str(error)) from None


def differing_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Dotted names in which two definitions differ, as result folders and journals store them.

    A topics file counts by its content, not by where it lies; by its place only where one of
    the two does not tell its content (older results).
    """
    by_content = bool(one.get("topics_hash") and other.get("topics_hash"))
    return _differing(_comparable(one, by_content), _comparable(other, by_content))


def _comparable(definition: Mapping[str, Any], by_content: bool) -> dict[str, Any]:
    """With one form of what can be written in two."""
    data = dict(definition)
    content, place = data.pop("topics_hash", None), str(data.get("topics"))
    # Older results tell the place from where one stood.
    data["topics"] = content if by_content else str(Path(place).expanduser().resolve())
    heldout = dict(data.get("heldout") or {})
    heldout["final_answers"] = heldout.get("final_answers") or heldout.get("answers")
    return data | {"heldout": heldout}


def _differing(one: Any, other: Any, name: str = "") -> list[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return [
            found
            for key in dict.fromkeys([*one, *other])
            for found in _differing(one.get(key), other.get(key), f"{name}.{key}" if name else key)
        ]
    return [] if one == other else [name]


def _validated(data: Any, where: str) -> Scenario:
    try:
        scenario = Scenario.model_validate(data)
    except ValidationError as error:
        faults = []
        for fault in error.errors():
            place = ".".join(str(part) for part in fault["loc"])
            message = fault["msg"].removeprefix("Value error, ")
            faults.append(f"{place}: {message}" if place else message)
        raise ScenarioError(f"Scenario refused in {where}: {'; '.join(faults)}.") from None
    try:
        Config.load(overrides=scenario.settings)
    except ConfigError as error:
        raise ScenarioError(f"Scenario refused in {where}: {error}") from None
    return scenario


def _check_offers(scenario: Scenario, where: str) -> None:
    """Raises ScenarioError unless the topic set is there and has all styles on offer.

    Not asked of results: their topics file may have stayed on another machine.
    """
    try:
        topics = load_topics(scenario.topics)
    except ConfigError as error:
        raise ScenarioError(f"Scenario refused in {where}: {error}") from None
    for phase in scenario.phases:
        for style in phase.pool:
            if style not in topics.styles:
                raise ScenarioError(
                    f"Scenario refused in {where}: unknown style '{style}' in phase "
                    f"'{phase.name}'; topic set {topics.name} has {', '.join(topics.styles)}."
                )


# Requests


def prompt_stream(
    scenario: Scenario, phase_index: int, seed: int | None = None, start: int = 0
) -> Iterator[Request]:
    """The requests of a phase from number `start` on, without end.

    Request i depends on the definition, the seed and i alone, so that runs of all presets
    see the same prompts in the same order, and a resumed run goes on where it stopped.
    """
    seed = scenario.seed if seed is None else seed
    phase = scenario.phases[phase_index]
    topics = topics_of(scenario)
    subjects = topic_stream(topics.training, f"{seed}/{phase_index}")
    for position, topic in enumerate(subjects):
        if position < start:
            continue
        key = f"{seed}/{phase_index}/{position}"
        rng = random.Random(f"request/{key}")
        style, audience = _wanted(phase, position, rng)
        delay = scenario.delay
        yield _request(
            phase,
            topics,
            phase_index,
            position,
            topic,
            f"training/{key}",
            style,
            audience,
            rng.randint(delay.min_rollouts, delay.max_rollouts) if delay else 0,
        )


def heldout_requests(
    scenario: Scenario,
    phase_index: int,
    count: int | None = None,
    seed: int | None = None,
    position: int | None = None,
) -> list[Request]:
    """The held-out requests of a phase: the same ones at every evaluation.

    In a phase with audiences they take turns; in one that drifts, the style that is the
    likelier one at `position` (default: the phase's end) is the preferred one.
    """
    seed = scenario.seed if seed is None else seed
    phase = scenario.phases[phase_index]
    topics = topics_of(scenario)
    listed = itertools.cycle(topics.heldout)
    requests = []
    for number, topic in zip(range(count or scenario.heldout.answers), listed, strict=False):
        audience = phase.audiences[number % len(phase.audiences)] if phase.audiences else None
        style = audience.style if audience else phase.style
        if phase.to_style and _drift(phase, position) >= 0.5:
            style = phase.to_style
        # Not the phase, but its pool: phases that offer the same choice get the same prompts.
        key = f"heldout/{seed}/{'-'.join(sorted(phase.pool))}/{number}"
        requests.append(
            _request(phase, topics, phase_index, number, topic, key, style, audience, delay=0)
        )
    return requests


def _wanted(phase: Phase, position: int, rng: random.Random) -> tuple[str, Audience | None]:
    """Which style the request at `position` prefers, and whose request it is."""
    if phase.audiences:
        shares = [audience.share for audience in phase.audiences]
        audience = rng.choices(phase.audiences, shares)[0]
        return audience.style, audience
    if phase.to_style and rng.random() < _drift(phase, position):
        return phase.to_style, None
    return phase.style, None


def _drift(phase: Phase, position: int | None) -> float:
    """Chance of `to_style`: 0 at the first request of the phase, 1 at its last."""
    last = phase.rollouts - 1
    if position is None or last == 0:
        return 1.0
    return min(1.0, position / last)


def _request(
    phase: Phase,
    topics: Topics,
    phase_index: int,
    position: int,
    topic: str,
    key: str,
    style: str,
    audience: Audience | None,
    delay: int,
) -> Request:
    messages = build_messages(topic, phase.pool, key, topics=topics)
    if audience:
        system = messages[0]
        messages[0] = {**system, "content": f"{audience.system} {system['content']}"}
    return Request(
        phase=phase_index,
        position=position,
        topic=topic,
        messages=messages,
        style=style,
        pool=phase.pool,
        seed=random.Random(f"sampling/{key}").randrange(2**31),
        audience=audience.name if audience else None,
        delay=delay,
    )


# What is reported

ROLLOUT_COLUMNS: dict[str, type] = {
    "index": int,  # 1, 2, 3... over the run, in the order of recording
    "phase": int,  # 0, 1, 2...
    "position": int,  # the request's number in its phase, from 0
    "seq": int,
    "id": str,
    "topic": str,
    "audience": str,
    "preferred_style": str,
    "detected_style": str,
    "quality": float,
    "style_mark": float,
    "reward": float,  # empty: not judged
    "state": str,
    "reason": str,
    "finish_reason": str,
    "num_action_tokens": int,
    "weight_version_start": int,
    "trained_version": int,
    "policy_lag": int,
    "masked_fraction": float,
    "value_first": float,
    "seconds": float,  # of its update
    "elapsed_s": float,  # since the run began, when its outcome was seen
}
"""Columns of rollouts.csv.gz. Every metric of the update follows under its own name."""

HELDOUT_COLUMNS: dict[str, type] = {
    "evaluation": int,  # 0, 1, 2... over the run
    "index": int,  # rollouts before it
    "phase": int,
    "final": int,  # 1: the evaluation at the end of its phase
    "weight_version": int,
    "id": str,
    "topic": str,
    "audience": str,
    "preferred_style": str,
    "detected_style": str,
    "quality": float,
    "style_mark": float,
    "reward": float,
    "num_action_tokens": int,
    "answer": str,
}
"""Columns of heldout.csv."""


def rollout_row(record: Mapping[str, Any], request: Request, index: int, elapsed_s: float) -> Row:
    """One row of rollouts.csv.gz from a rollout as `GET /v1/rollouts/{id}` gives it."""
    verdict = record.get("verdict") or {}
    metrics = {
        name: value
        for name, value in (record.get("metrics") or {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    start, trained = record.get("weight_version_start"), record.get("trained_version")
    lag = metrics.get("rollout/policy_lag_max")
    if lag is None and start is not None and trained is not None:
        lag = trained - 1 - start  # the update of version v starts from version v - 1
    return {
        "index": index,
        "phase": request.phase,
        "position": request.position,
        "seq": record.get("seq"),
        "id": record.get("id"),
        "topic": request.topic,
        "audience": request.audience,
        "preferred_style": request.style,
        "detected_style": verdict.get("detected_style"),
        "quality": verdict.get("quality"),
        "style_mark": verdict.get("style"),
        "reward": record.get("reward"),
        "state": record.get("state"),
        "reason": record.get("reason"),
        "finish_reason": record.get("finish_reason"),
        "num_action_tokens": record.get("num_action_tokens"),
        "weight_version_start": start,
        "trained_version": trained,
        "policy_lag": lag,
        "masked_fraction": metrics.get("policy/masked_fraction"),
        "value_first": metrics.get("critic/value_first"),
        "seconds": metrics.get("seconds/total"),
        "elapsed_s": round(elapsed_s, 2),
        **metrics,
    }


def rollouts_to_mark(rewards: Sequence[float], window: int, mark: float) -> int | None:
    """How many rollouts it took until the mean over the last `window` reached `mark`.

    Counted from the first of `rewards`, whole windows only (so at least `window`); None:
    never.
    """
    if len(rewards) < window:
        return None
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(rewards, dtype=float))])
    means = (sums[window:] - sums[:-window]) / window
    reached = np.flatnonzero(means >= mark - 1e-9)  # 0.1 + 0.2 must count as 0.3
    return int(reached[0]) + window if reached.size else None


def mark_text(phase: Mapping[str, Any], window: int) -> str:
    """When a phase of a summary reached the mark, for people: a number, "never", "not yet" where
    it is unfinished, "-" where fewer rollouts than `window` were rewarded, which tells nothing."""
    reached = phase["rollouts_to_mark"]
    if reached is not None:
        return str(reached)
    if phase["rollouts"] < phase["planned"]:
        return "not yet"
    return "never" if has_window(phase, window) else "-"


def has_window(phase: Mapping[str, Any], window: int) -> bool:
    """Whether a phase of a summary has a whole window of rewards in which to reach the mark."""
    return bool(phase["rollouts"] - phase["unscored"] >= window)


def summarize(
    rows: Sequence[Mapping[str, Any]],
    scenario: Scenario,
    heldout: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The numbers of a run: per phase and over all. What is unknown is None.

    Rewards are taken in the order of `index`. Rollouts without a reward (the judge failed)
    are counted in `unscored` and in nothing else. `masked_fraction` is the share of all
    action tokens that were masked.
    """
    window, mark = scenario.thresholds.window, scenario.thresholds.mark
    ordered = sorted(rows, key=lambda row: row["index"])
    phases = []
    began = 0.0
    for number, phase in enumerate(scenario.phases):
        mine = [row for row in ordered if row["phase"] == number]
        rewards = [row["reward"] for row in mine if row.get("reward") is not None]
        ended = max((row["elapsed_s"] for row in mine if _known(row, "elapsed_s")), default=None)
        phases.append(
            {
                "name": phase.name,
                "style": phase.to_style or phase.style,
                "pool": list(phase.pool),
                "rollouts": len(mine),
                "planned": phase.rollouts,
                "unscored": len(mine) - len(rewards),
                "states": dict(sorted(Counter(row["state"] for row in mine).items())),
                "mean_reward": _mean(rewards),
                "last_mean": _mean(rewards[-window:]),
                "rollouts_to_mark": rollouts_to_mark(rewards, window, mark),
                "quality": _mean(_column(mine, "quality")),
                "style_shares": _shares(mine, phase.pool),
                "masked_fraction": _weighted(mine, "masked_fraction", "num_action_tokens"),
                "policy_lag_max": max(_column(mine, "policy_lag"), default=None),
                "update_seconds": _mean(_column(mine, "seconds")),
                "seconds": None if ended is None else round(ended - began, 2),
                "audiences": {
                    audience.name: _mean(
                        _column([r for r in mine if r.get("audience") == audience.name], "reward")
                    )
                    for audience in phase.audiences
                },
                "heldout": _heldout_summary(heldout, number, phase),
            }
        )
        began = ended if ended is not None else began
    all_rewards = _column(ordered, "reward")
    return {
        "scenario": scenario.name,
        "claim": scenario.claim,
        "window": window,
        "mark": mark,
        "rollouts": len(ordered),
        "unscored": len(ordered) - len(all_rewards),
        "mean_reward": _mean(all_rewards),
        "masked_fraction": _weighted(ordered, "masked_fraction", "num_action_tokens"),
        "seconds": round(began, 2),
        "phases": phases,
    }


def _heldout_summary(
    heldout: Sequence[Mapping[str, Any]], number: int, phase: Phase
) -> dict[str, Any] | None:
    """The last evaluation of a phase."""
    mine = [row for row in heldout if row["phase"] == number]
    if not mine:
        return None
    last = max(row["evaluation"] for row in mine)
    mine = [row for row in mine if row["evaluation"] == last]
    rewards = _column(mine, "reward")
    preferred = [
        float(row["detected_style"] == row["preferred_style"])
        for row in mine
        if row.get("detected_style")
    ]
    return {
        "index": mine[0]["index"],
        "final": bool(mine[0]["final"]),
        "answers": len(preferred),
        "preferred_share": _mean(preferred),
        "shares": _shares(mine, phase.pool),
        "mean_reward": _mean(rewards),
        "quality": _mean(_column(mine, "quality")),
    }


def _shares(rows: Sequence[Mapping[str, Any]], pool: Sequence[str]) -> dict[str, float] | None:
    """Share of each style of the pool among the judged answers; the rest had none of them."""
    seen = [row["detected_style"] for row in rows if row.get("detected_style")]
    return {style: seen.count(style) / len(seen) for style in pool} if seen else None


def _known(row: Mapping[str, Any], name: str) -> bool:
    value = row.get(name)
    return value is not None and math.isfinite(value)


def _column(rows: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if _known(row, name)]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _weighted(rows: Sequence[Mapping[str, Any]], name: str, weight: str) -> float | None:
    pairs = [(row[name], row[weight]) for row in rows if _known(row, name) and _known(row, weight)]
    total = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / total if total else None


# Result folders


@dataclass(frozen=True)
class Results:
    """What a result folder holds."""

    folder: Path
    scenario: Scenario
    rows: list[Row]
    heldout: list[Row]
    summary: dict[str, Any]

    @property
    def preset(self) -> str:
        return self.summary["preset"]

    @property
    def seed(self) -> int:
        return self.summary["seed"]

    @property
    def answers_per_request(self) -> int:
        """1, or a group method's number: its rows are so many times the phases' requests."""
        places = ((row["phase"], row.get("position")) for row in self.rows)
        counts = Counter(place for place in places if place[1] is not None)
        return max(counts.values(), default=1)


def write_results(
    folder: str | Path,
    scenario: Scenario,
    rows: Sequence[Row],
    heldout: Sequence[Row],
    *,
    preset: str,
    complete: bool,
    **about: Any,
) -> dict[str, Any]:
    """Write rollouts.csv.gz, heldout.csv, answers.md and summary.json; returns the summary.

    `about` is kept in the summary as it is (run_id, source, ...). The same rows give the
    same bytes.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    summary = {
        "preset": preset,
        "seed": scenario.seed,
        "complete": complete,
        **about,
        **summarize(rows, scenario, heldout),
        "definition": scenario.model_dump(mode="json", by_alias=True),
    }
    files = {
        "rollouts.csv.gz": gzip.compress(_to_csv(rows, ROLLOUT_COLUMNS).encode(), mtime=0),
        "heldout.csv": _to_csv(heldout, HELDOUT_COLUMNS).encode(),
        "answers.md": _answers(scenario, heldout, preset).encode(),
        "summary.json": (json.dumps(summary, indent=2, ensure_ascii=False) + "\n").encode(),
    }
    for name, data in files.items():  # each whole or not at all, whatever stops us
        partial = folder / f".{name}.partial"
        partial.write_bytes(data)
        os.replace(partial, folder / name)
    return summary


def read_results(folder: str | Path) -> Results:
    """Read a result folder back. ScenarioError if it is none, or not of this program."""
    folder = Path(folder)
    try:
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
        scenario = _validated(summary["definition"], str(folder / "summary.json"))
        with gzip.open(folder / "rollouts.csv.gz", "rt", encoding="utf-8", newline="") as stream:
            rows = _from_csv(stream, ROLLOUT_COLUMNS)
        with (folder / "heldout.csv").open(encoding="utf-8", newline="") as stream:
            heldout = _from_csv(stream, HELDOUT_COLUMNS)
        results = Results(folder, scenario, rows, heldout, summary)
        _ = results.preset, results.seed, summary["phases"]
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise ScenarioError(f"{folder} is not a result folder: it has no {missing}.") from None
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error, csv.Error) as error:
        raise ScenarioError(f"The result folder {folder} cannot be read: {error}.") from None
    return results


def _to_csv(rows: Sequence[Row], columns: Mapping[str, type]) -> str:
    extra = sorted({name for row in rows for name in row} - set(columns))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*columns, *extra])
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in (*columns, *extra)])
    return stream.getvalue()


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, str):
        # csv quotes a line feed but not a lone carriage return, at which a reader splits.
        return value.replace("\r\n", "\n").replace("\r", "\n")
    return f"{value:.6g}" if isinstance(value, float) else value


def _from_csv(stream: Iterable[str], columns: Mapping[str, type]) -> list[Row]:
    rows = []
    for raw in csv.DictReader(stream):
        row: Row = {}
        for name, text in raw.items():
            kind = columns.get(name, float)
            row[name] = None if not text else (kind(float(text)) if kind is not str else text)
        rows.append(row)
    return rows


def _markdown_cell(value: Any) -> str:
    return "" if value is None else " ".join(str(value).split()).replace("|", "\\|")


SHOWN_ANSWERS = 12
"""Held-out answers per phase in answers.md: enough to see what was learned and gamed."""


def _answers(scenario: Scenario, heldout: Sequence[Row], preset: str) -> str:
    """answers.md: what the policy wrote at the end of each phase."""
    lines = [f"# Held-out answers: {scenario.name}, {preset}, seed {scenario.seed}", ""]
    for number, phase in enumerate(scenario.phases):
        mine = [row for row in heldout if row["phase"] == number]
        if not mine:
            continue
        last = max(row["evaluation"] for row in mine)
        mine = [row for row in mine if row["evaluation"] == last]
        when = "end of the phase" if mine[0]["final"] else "not the phase's end: cut short"
        lines += [
            f"## {phase.name}: after {mine[0]['index']} rollouts ({when})",
            "",
            "| topic | preferred | seen | quality | reward | answer |",
            "|---|---|---|---|---|---|",
        ]
        for row in mine[:SHOWN_ANSWERS]:
            cells = (
                row["topic"],
                row["preferred_style"],
                row["detected_style"],
                _cell(row["quality"]),
                _cell(row["reward"]),
                row["answer"],
            )
            lines.append("| " + " | ".join(map(_markdown_cell, cells)) + " |")
        lines.append("")
    return "\n".join(lines)
