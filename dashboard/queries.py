"""What the dashboard asks of the store: read-only, aggregated in SQL. No streamlit here.

Every method is one short read. Ranges are of rollout numbers (`seq`), both ends included.
Only answers to clients count (not those made for value pretraining).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from dashboard.metrics import ABANDONED, METRICS, PER_MINUTE, RECENT_UPDATES
from online_sao.errors import NotFoundError, StoreError
from online_sao.store.database import make_engine, parse_url, place_of, store_errors
from online_sao.store.models import (
    SCHEMA_VERSION,
    counters,
    events,
    feedback,
    rollout_details,
    rollouts,
    runs,
    versions,
)
from online_sao.store.store import load_rollouts
from online_sao.types import Event, Purpose, Rollout, RolloutState

T = TypeVar("T")

POINTS = 2000  # up to so many rollouts are drawn one by one, more as means of groups
GROUPS = 120  # groups of rollouts across a chart
SAMPLED = 400  # rollouts looked at in each group; larger groups are sampled
COUNTED = 10_000  # answers of a phase are counted up to here
VERSIONS_SHOWN = 400  # versions across a chart of metrics; more are thinned evenly
RECENT = 40  # rollouts that "now" means
FIRST = 20  # rollouts that "at the switch" means
SETTLED = 0.8  # mean reward over the last RECENT rollouts from which a preference is learned
SETTLING = 2000  # rollouts of a phase among which the first such mean is looked for
SEARCHED = 50_000  # answers that a search without an index looks through

SAME_LOOKED = 400  # answers of a version that are looked at for questions another has answered
PROBE = "probe"  # purpose of answers to held-out questions, where the service asks them

_served = rollouts.c.purpose == Purpose.SERVE.value
_scored = rollouts.c.reward.isnot(None)


@dataclass(frozen=True)
class Phase:
    """A preference and the rollouts made under it, from `first_seq` on."""

    style: str
    pool: tuple[str, ...]
    note: str | None
    event_id: int
    started_at: datetime
    weight_version: int | None
    first_seq: int


@dataclass(frozen=True)
class Situation:
    """What is going on, as far as the store knows."""

    num_rollouts: int  # the number of the newest; 0 while no client has asked
    first_rollout: int = 1  # the first answer to a client
    run: str | None = None
    preset: str | None = None
    phase: Phase | None = None
    num_scored: int = 0  # rollouts with a reward in this phase, counted up to COUNTED
    reward_at_switch: float | None = None
    reward_now: float | None = None
    preferred_share: float | None = None
    num_styled: int = 0  # of the last RECENT, those whose style the judge named
    quality_share: float | None = None  # of answers with quality 1
    num_graded: int = 0  # of the last RECENT, those with a quality
    settled_after: int | None = None  # judged answers of the phase until SETTLED was first reached
    waiting_for_judge: int = 0
    waiting_for_learner: int = 0
    unscored_share: float = 0.0  # of the last RECENT answers
    last_answer_at: datetime | None = None
    version: int | None = None
    policy_lag: float | None = None
    updates_per_minute: float | None = None
    num_updates: int = 0  # counted up to RECENT_UPDATES
    recent: Mapping[str, float] = field(default_factory=dict)  # means over those updates
    config: Mapping[str, Any] = field(default_factory=dict)  # the run's settings
    paused_since: datetime | None = None
    pause_reason: str | None = None
    warnings: list[Event] = field(default_factory=list)  # guards and errors in this phase


@dataclass(frozen=True)
class Series:
    """Figures over a range of rollouts."""

    shares: pd.DataFrame  # start, end, rollout (the middle), style, share, answers
    marks: pd.DataFrame  # rollout, at, reward, quality, style_match, answers
    values: pd.DataFrame  # rollout, at, value, reward (trained rollouts only)
    points: pd.DataFrame  # rollout, at, reward, style; empty for long ranges
    width: int  # rollouts in a group; fewer before a switch and in the newest
    sampled: int | None = None  # rollouts looked at in each group, if not all


class Kept(NamedTuple):
    """A version with a checkpoint."""

    version: int
    created_at: datetime
    pinned: bool


@dataclass(frozen=True)
class Comparison:
    """Answers of two versions to the same questions, a row per question."""

    answers: pd.DataFrame  # question; rollout, version, style, reward, answer of _one and _two
    held_out: bool  # asked for the comparison, and not by clients
    questions: int  # that both answered


@dataclass(frozen=True)
class Filters:
    state: str | None = None
    reason: str | None = None
    detected_style: str | None = None
    preferred_style: str | None = None
    reward: str | None = None  # "1", "0", "between", "none"
    version: int | None = None  # that wrote it or was made from it
    session: str | None = None
    text: str | None = None


class StoreReader:
    def __init__(self, url: str) -> None:
        """Raises StoreError for a URL that cannot be one. Nothing is opened yet."""
        parsed = parse_url(url)
        self.place = place_of(parsed)
        self._file = parsed.database if parsed.get_backend_name() == "sqlite" else None
        self._engine = make_engine(parsed, read_only=True)
        self._inode: int | None = None  # of the file that is open

    def close(self) -> None:
        self._engine.dispose()

    def is_there(self) -> bool:
        """Whether there is a store. False before the service's first start."""
        if self._file is not None and not Path(self._file).exists():
            return False

        def work(conn: Connection) -> bool:
            if not sa.inspect(conn).has_table(counters.name):
                return False
            schema = conn.execute(
                sa.select(counters.c.value).where(counters.c.name == "schema")
            ).scalar()
            if schema != SCHEMA_VERSION:
                raise StoreError(
                    f"The store at {self.place} has schema {schema}; this dashboard reads "
                    f"schema {SCHEMA_VERSION}. Use the dashboard of the same online_sao."
                )
            return True

        return self._read(work)

    # ---- live

    def num_rollouts(self) -> int:
        return self._read(_num_rollouts)

    def phases(self) -> list[Phase]:
        """All preferences, oldest first, each with its first rollout."""
        return self._read(_phases)

    def situation(self) -> Situation:
        def work(conn: Connection) -> Situation:
            c = rollouts.c
            first_served = _first_served(conn)
            run = conn.execute(runs.select().order_by(runs.c.started.desc()).limit(1)).first()
            phases = _phases(conn)
            phase = phases[-1] if phases else None
            since = phase.first_seq if phase else 1
            scored = [_served, _scored, c.seq >= since]
            newest = sa.select(c.reward, c.quality, c.detected_style).where(*scored)
            last = conn.execute(newest.order_by(c.seq.desc()).limit(RECENT)).all()
            first = conn.execute(newest.order_by(c.seq).limit(FIRST)).all()
            version = conn.execute(
                versions.select().order_by(versions.c.version.desc()).limit(1)
            ).first()
            latest = conn.execute(
                sa.select(c.created_at, c.state).where(_served).order_by(c.seq.desc()).limit(RECENT)
            ).all()
            paused = _paused(conn)
            updates = _recent_updates(conn)
            warned = (
                events.select()
                .where(events.c.kind.in_(("guard", "error")))
                .where(events.c.id > (phase.event_id if phase else 0))
                .order_by(events.c.id.desc())
                .limit(20)
            )
            judged = [r for r in latest if r.state != RolloutState.PENDING]
            failed = sum(r.state == RolloutState.UNSCORED for r in judged)
            styled = [r.detected_style for r in last if r.detected_style is not None]
            graded = [r.quality for r in last if r.quality is not None]
            return Situation(
                num_rollouts=_num_rollouts(conn) if first_served else 0,
                first_rollout=first_served or 1,
                run=run.id if run else None,
                preset=run.preset if run else None,
                phase=phase,
                num_scored=_count(conn, *scored, limit=COUNTED),
                reward_at_switch=_mean([r.reward for r in first]),
                reward_now=_mean([r.reward for r in last]),
                preferred_share=_mean([float(style == phase.style) for style in styled])
                if phase
                else None,
                num_styled=len(styled),
                quality_share=_mean([float(quality == 1) for quality in graded]),
                num_graded=len(graded),
                settled_after=_settled_after(conn, scored),
                waiting_for_judge=_count(conn, _served, c.state == RolloutState.PENDING.value),
                waiting_for_learner=_count(
                    conn,
                    _served,
                    c.state.in_([RolloutState.REWARDED.value, RolloutState.CLAIMED.value]),
                ),
                unscored_share=failed / len(judged) if judged else 0.0,
                last_answer_at=latest[0].created_at if latest else None,
                version=version.version if version else None,
                policy_lag=(version.metrics or {}).get("rollout/policy_lag_max")
                if version
                else None,
                updates_per_minute=_updates_per_minute(conn),
                num_updates=len(updates),
                recent=_means(updates),
                config=dict(run.config or {}) if run else {},
                paused_since=paused.created_at if paused else None,
                pause_reason=str(paused.data.get("reason", "")) if paused else None,
                warnings=[_event(row) for row in conn.execute(warned)],
            )

        return self._read(work)

    def series(self, first: int, last: int) -> Series:
        """Style shares, marks and values between two rollout numbers.

        Groups begin anew at a switch: none holds answers made under two preferences.
        """
        c = rollouts.c
        count = max(last - first + 1, 1)
        width = max(1, math.ceil(count / GROUPS)) if count > POINTS else max(10, count // 60)
        where = [c.seq >= first, c.seq <= last, _served]
        sampled = SAMPLED if width > SAMPLED else None

        def points(conn: Connection) -> tuple[pd.DataFrame, dict[int, int]]:
            columns = (
                c.seq,
                c.created_at,
                c.reward,
                c.quality,
                c.style_match,
                c.value_first,
                c.detected_style,
            )
            rows = conn.execute(sa.select(*columns).where(*where, _scored).order_by(c.seq)).all()
            names = ["rollout", "at", "reward", "quality", "style_match", "value", "style"]
            table = pd.DataFrame([tuple(row) for row in rows], columns=names)
            return table, _groups(_phases(conn), first, last, width)

        def groups(conn: Connection) -> tuple[pd.DataFrame, dict[int, int]]:
            def grouped(start: int) -> sa.Select[Any]:
                group = (start + ((c.seq - start) // width) * width).label("group")
                return sa.select(
                    group,
                    c.detected_style,
                    sa.func.count(),
                    sa.func.min(c.created_at),
                    sa.func.sum(c.reward),
                    sa.func.sum(c.quality),
                    sa.func.count(c.quality),
                    sa.func.sum(c.style_match),
                    sa.func.sum(c.value_first),
                    sa.func.count(c.value_first),
                    sa.func.sum(sa.case((c.value_first.isnot(None), c.reward))),
                ).where(_served, _scored)

            phases = _phases(conn)
            ends = _groups(phases, first, last, width)
            rows: list[Any] = []
            if sampled is None:
                for start, end in _between_switches(phases, first, last):
                    query = grouped(start).where(c.seq.between(start, end))
                    rows += conn.execute(query.group_by("group", c.detected_style))
            else:  # the middle of each group: reading all of a million would take seconds
                for start, end in ends.items():
                    begin = start + max(0, (end - start + 1 - sampled) // 2)
                    query = grouped(start).where(
                        c.seq.between(begin, min(begin + sampled - 1, end))
                    )
                    rows += conn.execute(query.group_by("group", c.detected_style))
            names = ["group", "style", "answers", "at", "reward", "quality", "marked"]
            names += ["style_match", "value", "valued", "valued_reward"]
            return pd.DataFrame([tuple(row) for row in rows], columns=names), ends

        if count > POINTS:
            return _grouped(*self._read(groups), width, sampled)
        return _pointwise(*self._read(points), width)

    # ---- learning health

    def health(self, last: int | None) -> pd.DataFrame:
        """Metrics of the newest `last` versions (None: all), a column per metric.

        Index: version. Thinned evenly to VERSIONS_SHOWN rows. PER_MINUTE: updates per minute
        since the row before. ABANDONED: left by a rollback, so not on the line that serves.
        """

        def work(conn: Connection) -> pd.DataFrame:
            v = versions.c
            newest = conn.execute(sa.select(sa.func.max(v.version))).scalar()
            if newest is None:
                return pd.DataFrame()
            oldest = conn.execute(sa.select(sa.func.min(v.version))).scalar() or 0
            if last is not None:
                oldest = max(oldest, newest - last + 1)
            step = max(1, math.ceil((newest - oldest + 1) / VERSIONS_SHOWN))
            wanted = range(newest, oldest - 1, -step)
            rows = conn.execute(
                sa.select(v.version, v.created_at, v.metrics, v.abandoned)
                .where(v.version.in_(wanted), v.kind == "update")
                .order_by(v.version)
            ).all()
            table = pd.DataFrame(
                [
                    {
                        "version": r.version,
                        "at": r.created_at,
                        ABANDONED: r.abandoned,
                        **(r.metrics or {}),
                    }
                    for r in rows
                ]
            )
            if not len(table):
                return table
            made = table["version"].diff() / table["at"].diff().dt.total_seconds() * 60
            table[PER_MINUTE] = made.replace(math.inf, math.nan)
            return table.set_index("version")

        return self._read(work)

    def probes(self, limit: int = 400) -> pd.DataFrame:
        """Rounds of held-out questions, oldest first: version, quality, reward, answers."""
        query = (
            events.select()
            .where(events.c.kind == "probe")
            .order_by(events.c.id.desc())
            .limit(limit)
        )
        rounds = self._read(lambda conn: [_event(row) for row in conn.execute(query)])[::-1]
        return pd.DataFrame(
            [
                {
                    "version": probe.data.get("version"),
                    "quality": probe.data.get("quality"),
                    "reward": probe.data.get("reward"),
                    "answers": probe.data.get("num_answers"),
                }
                for probe in rounds
            ],
            columns=["version", "quality", "reward", "answers"],
        )

    def run_config(self) -> dict[str, Any]:
        """The settings of the current run, a dict per section; empty if unknown."""
        query = sa.select(runs.c.config).order_by(runs.c.started.desc()).limit(1)
        return dict(self._read(lambda conn: conn.execute(query).scalar()) or {})

    def distinct_share(self, last: int = 200) -> float | None:
        """Share of different texts among the newest answers."""

        def work(conn: Connection) -> float | None:
            newest = (
                sa.select(rollout_details.c.answer)
                .where(rollout_details.c.answer != "")
                .order_by(rollout_details.c.seq.desc())
                .limit(last)
                .subquery()
            )
            different, total = conn.execute(
                sa.select(sa.func.count(newest.c.answer.distinct()), sa.func.count())
            ).one()
            return different / total if total else None

        return self._read(work)

    def states(self) -> pd.DataFrame:
        """How many rollouts are in each state, for each reason."""
        c = rollouts.c

        def work(conn: Connection) -> pd.DataFrame:
            total = conn.execute(sa.select(c.state, sa.func.count()).group_by(c.state)).all()
            reasons = conn.execute(
                sa.select(c.state, c.reason, sa.func.count())
                .where(c.reason.isnot(None))
                .group_by(c.state, c.reason)
            ).all()
            left = {state: number for state, number in total}  # noqa: C416
            for state, _, number in reasons:
                left[state] -= number
            rows = [(state, reason, number) for state, reason, number in reasons]
            rows += [(state, "", number) for state, number in left.items() if number]
            order = {state.value: position for position, state in enumerate(RolloutState)}
            rows.sort(key=lambda row: (order[row[0]], row[1]))
            return pd.DataFrame(rows, columns=["state", "reason", "rollouts"])

        return self._read(work)

    # ---- rollouts

    def rollouts(
        self, filters: Filters, *, before_seq: int | None = None, limit: int = 50
    ) -> pd.DataFrame:
        """A page of rollouts that pass `filters`, newest first."""
        c = rollouts.c
        where: list[sa.ColumnElement[bool]] = []
        for column, wanted in (
            (c.state, filters.state),
            (c.reason, filters.reason),
            (c.detected_style, filters.detected_style),
            (c.style, filters.preferred_style),
            (c.session_id, filters.session),
        ):
            if wanted:
                where.append(column == wanted)
        if filters.reward:
            where.append(
                {
                    "1": c.reward == 1,
                    "0": c.reward == 0,
                    "between": sa.and_(c.reward > 0, c.reward < 1),
                    "none": c.reward.is_(None),
                }[filters.reward]
            )
        if filters.version is not None:
            number = filters.version
            where.append(
                sa.or_(
                    c.trained_version == number,
                    sa.and_(c.weight_version_start <= number, c.weight_version_end >= number),
                )
            )
        if before_seq is not None:
            where.append(c.seq < before_seq)
        if filters.text:
            pattern = f"%{_escaped(filters.text)}%"
            where.append(
                rollout_details.c.answer.ilike(pattern, escape="\\")
                | sa.type_coerce(rollout_details.c.messages, sa.Text).ilike(pattern, escape="\\")
            )

        def work(conn: Connection) -> pd.DataFrame:
            if filters.text:
                where.append(c.seq > _num_rollouts(conn) - SEARCHED)
            rows = conn.execute(
                sa.select(
                    c.seq,
                    c.id,
                    c.created_at,
                    c.state,
                    c.reason,
                    c.style,
                    c.detected_style,
                    c.reward,
                    c.quality,
                    c.style_match,
                    c.reward_source,
                    c.value_first,
                    c.num_action_tokens,
                    c.weight_version_start,
                    c.weight_version_end,
                    c.trained_version,
                    c.latency_s,
                    c.session_id,
                    c.purpose,
                    rollout_details.c.answer,
                )
                .select_from(rollouts.join(rollout_details))
                .where(*where)
                .order_by(c.seq.desc())
                .limit(limit)
            )
            names = list(rows.keys())
            return pd.DataFrame([tuple(row) for row in rows], columns=names)

        return self._read(work)

    def rollout(self, seq: int) -> Rollout:
        """One rollout with its tokens."""

        def work(conn: Connection) -> Rollout:
            known = conn.execute(sa.select(rollouts.c.seq).where(rollouts.c.seq == seq)).scalar()
            if known is None:
                raise NotFoundError(f"There is no rollout {seq}.")
            return load_rollouts(conn, [seq], with_tokens=True)[0]

        return self._read(work)

    def feedback(self, seq: int) -> pd.DataFrame:
        """Feedback on one rollout, and verdicts that came too late to count."""
        f = feedback.c
        query = (
            sa.select(f.created_at, f.source, f.reward, f.comment, f.used)
            .where(f.seq == seq)
            .order_by(f.id)
        )

        def work(conn: Connection) -> pd.DataFrame:
            rows = conn.execute(query).all()
            names = ["at", "source", "reward", "comment", "used"]
            return pd.DataFrame([tuple(row) for row in rows], columns=names)

        return self._read(work)

    def known(self) -> dict[str, list[str]]:
        """What the filters can choose from: reasons, and styles of all preferences."""

        def work(conn: Connection) -> dict[str, list[str]]:
            c = rollouts.c
            reasons = conn.execute(
                sa.select(c.reason).where(c.reason.isnot(None)).distinct().order_by(c.reason)
            ).scalars()
            return {"reasons": [str(r) for r in reasons], "styles": _styles(_phases(conn))}

        return self._read(work)

    # ---- versions

    def versions(self, limit: int = 200) -> pd.DataFrame:
        """The newest versions, with a few of their metrics."""
        v = versions.c

        def work(conn: Connection) -> pd.DataFrame:
            rows = conn.execute(versions.select().order_by(v.version.desc()).limit(limit)).all()
            return pd.DataFrame([_version_row(row) for row in rows])

        return self._read(work)

    def kept_versions(self) -> list[Kept]:
        """Versions that have a checkpoint to roll back to, newest first."""
        v = versions.c
        query = (
            sa.select(v.version, v.created_at, v.pinned)
            .where(v.checkpoint.isnot(None))
            .order_by(v.version.desc())
        )
        return self._read(lambda conn: [Kept(*row) for row in conn.execute(query)])

    def version_metrics(self, version: int) -> dict[str, Any]:
        query = versions.select().where(versions.c.version == version)
        row = self._read(lambda conn: conn.execute(query).first())
        if row is None:
            raise NotFoundError(f"There is no weight version {version}.")
        return {**_version_row(row), **(row.metrics or {})}

    def answers_of(self, version: int, limit: int = 3) -> pd.DataFrame:
        """The first answers recorded after `version` was made, written by it or a later one."""
        c = rollouts.c

        def work(conn: Connection) -> pd.DataFrame:
            made = conn.execute(
                sa.select(versions.c.created_at).where(versions.c.version == version)
            ).scalar()
            if made is None:
                raise NotFoundError(f"There is no weight version {version}.")
            rows = conn.execute(
                sa.select(
                    c.seq,
                    c.weight_version_end,
                    c.detected_style,
                    c.reward,
                    rollout_details.c.answer,
                )
                .select_from(rollouts.join(rollout_details))
                .where(c.created_at >= made, c.weight_version_end >= version, _served)
                .order_by(c.created_at)
                .limit(limit)
            ).all()
            names = ["rollout", "version", "style", "reward", "answer"]
            return pd.DataFrame([tuple(row) for row in rows], columns=names)

        return self._read(work)

    def same_prompts(self, one: int, two: int, limit: int = 4) -> Comparison:
        """Answers of two versions to the same questions.

        Held-out answers if the store has them; else answers to clients who asked the same at
        both times. Looked for among the SAME_LOOKED answers around each version's making; of
        several, the one whose version is nearest. NotFoundError for an unknown version.
        """

        def work(conn: Connection) -> Comparison:
            for purpose in (PROBE, Purpose.SERVE.value):
                sides = [_answers_by_question(conn, number, purpose) for number in (one, two)]
                rows = []
                for question, first in sides[0].items():
                    second = sides[1].get(question)
                    if second is None or second["rollout"] == first["rollout"]:
                        continue
                    row = {"question": question, "far": first["distance"] + second["distance"]}
                    for side, answer in (("one", first), ("two", second)):
                        row |= {f"{k}_{side}": v for k, v in answer.items() if k != "distance"}
                    rows.append(row)
                if rows:
                    rows.sort(key=lambda row: row.pop("far"))
                    return Comparison(pd.DataFrame(rows[:limit]), purpose == PROBE, len(rows))
            return Comparison(pd.DataFrame(), False, 0)

        return self._read(work)

    def events(self, limit: int = 200) -> list[Event]:
        """The newest events, newest first."""
        query = events.select().order_by(events.c.id.desc()).limit(limit)
        return self._read(lambda conn: [_event(row) for row in conn.execute(query)])

    def model(self) -> str | None:
        """Name or folder of the current run's model."""
        query = sa.select(runs.c.model).order_by(runs.c.started.desc()).limit(1)
        return self._read(lambda conn: conn.execute(query).scalar())

    def _read(self, work: Callable[[Connection], T]) -> T:
        self._notice_another_file()
        with store_errors(self.place), self._engine.connect() as conn:
            return work(conn)

    def _notice_another_file(self) -> None:
        """A store that was deleted and made anew: open connections still read the old one."""
        if self._file is None:
            return
        try:
            inode = os.stat(self._file).st_ino
        except OSError:
            inode = None
        if inode != self._inode:
            self._engine.dispose()
            self._inode = inode


# ---- pieces


def _num_rollouts(conn: Connection) -> int:
    return conn.execute(sa.select(sa.func.max(rollouts.c.seq))).scalar() or 0


def _count(conn: Connection, *where: sa.ColumnElement[bool], limit: int | None = None) -> int:
    found = sa.select(rollouts.c.seq).where(*where).limit(limit).subquery()
    return conn.execute(sa.select(sa.func.count()).select_from(found)).scalar_one()


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


def _settled_after(conn: Connection, scored: Sequence[sa.ColumnElement[bool]]) -> int | None:
    """How many rollouts it took until the mean of the last RECENT was SETTLED, if it ever was.

    Looked for among the first SETTLING of them.
    """
    c = rollouts.c
    first = sa.select(c.seq, c.reward).where(*scored).order_by(c.seq).limit(SETTLING).subquery()
    means = sa.select(
        sa.func.row_number().over(order_by=first.c.seq).label("number"),
        sa.func.avg(first.c.reward).over(order_by=first.c.seq, rows=(1 - RECENT, 0)).label("mean"),
    ).subquery()
    reached = (means.c.number >= RECENT) & (means.c.mean >= SETTLED - 1e-9)
    return conn.execute(sa.select(sa.func.min(means.c.number)).where(reached)).scalar()


def _phases(conn: Connection) -> list[Phase]:
    c = rollouts.c
    first = (
        sa.select(c.seq)
        .where(c.created_at >= events.c.created_at)
        .order_by(c.created_at)
        .limit(1)
        .scalar_subquery()
    )
    rows = conn.execute(
        sa.select(events, first.label("first_seq"))
        .where(events.c.kind == "preference")
        .order_by(events.c.id)
    ).all()
    coming = _num_rollouts(conn) + 1
    return [
        Phase(
            style=row.data["style"],
            pool=tuple(row.data["pool"]),
            note=row.data.get("note"),
            event_id=row.id,
            started_at=row.created_at,
            weight_version=row.weight_version,
            first_seq=coming if row.first_seq is None else row.first_seq,
        )
        for row in rows
    ]


def _styles(phases: Sequence[Phase]) -> list[str]:
    """Every style there was, in order of first appearance."""
    named = [style for phase in phases for style in (*phase.pool, phase.style)]
    return list(dict.fromkeys(named))


def _paused(conn: Connection) -> Event | None:
    """The pause in force, if any: it outlives a restart."""
    row = conn.execute(
        events.select()
        .where(events.c.kind.in_(("pause", "resume_learning")))
        .order_by(events.c.id.desc())
        .limit(1)
    ).first()
    return _event(row) if row is not None and row.kind == "pause" else None


def _updates_per_minute(conn: Connection) -> float | None:
    """Over the last two dozen updates; None when they are long ago."""
    v = versions.c
    times = list(
        conn.execute(
            sa.select(v.created_at).where(v.kind == "update").order_by(v.version.desc()).limit(24)
        ).scalars()
    )
    if len(times) < 2 or (datetime.now(UTC) - times[0]).total_seconds() > 120:
        return None
    seconds = (times[0] - times[-1]).total_seconds()
    return 60 * (len(times) - 1) / seconds if seconds > 0 else None


def _first_served(conn: Connection) -> int | None:
    first = sa.select(rollouts.c.seq).where(_served).order_by(rollouts.c.seq).limit(1)
    return conn.execute(first).scalar()


def _recent_updates(conn: Connection) -> list[dict[str, Any]]:
    """Metrics of the newest updates on the line of weights that serves."""
    v = versions.c
    newest = (
        sa.select(v.metrics)
        .where(v.kind == "update", v.abandoned == sa.false())
        .order_by(v.version.desc())
        .limit(RECENT_UPDATES)
    )
    return [metrics or {} for metrics in conn.execute(newest).scalars()]


def _means(updates: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean of each metric that the dashboard explains, over the updates that have it."""
    found = {}
    for key in METRICS:
        known = [u[key] for u in updates if isinstance(u.get(key), int | float)]
        if known:
            found[key] = sum(known) / len(known)
    return found


def _event(row: sa.Row[Any]) -> Event:
    return Event(row.id, row.kind, row.data, row.created_at, row.weight_version)


def _version_row(row: sa.Row[Any]) -> dict[str, Any]:
    metrics = row.metrics or {}
    return {
        "version": row.version,
        "parent": row.parent,
        "kind": row.kind,
        "created_at": row.created_at,
        "published_at": row.published_at,
        "checkpoint": row.checkpoint is not None,
        "pinned": row.pinned,
        "abandoned": row.abandoned,
        "reward": metrics.get("rollout/reward"),
        "kl_to_start": metrics.get("policy/kl_to_start"),
        "masked_fraction": metrics.get("policy/masked_fraction"),
        "explained_variance": metrics.get("critic/explained_variance"),
        "seconds": metrics.get("seconds/total"),
        "run_id": row.run_id,
    }


def _answers_by_question(conn: Connection, version: int, purpose: str) -> dict[str, dict[str, Any]]:
    """To each last message the answer whose version is nearest to `version`."""
    c = rollouts.c
    made = conn.execute(
        sa.select(versions.c.created_at).where(versions.c.version == version)
    ).scalar()
    if made is None:
        raise NotFoundError(f"There is no weight version {version}.")
    near = conn.execute(
        sa.select(c.seq).where(c.created_at >= made).order_by(c.created_at).limit(1)
    ).scalar()
    middle = _num_rollouts(conn) + 1 if near is None else near
    columns = (c.seq, c.weight_version_start, c.detected_style, c.reward)
    query = (
        sa.select(*columns, rollout_details.c.messages, rollout_details.c.answer)
        .select_from(rollouts.join(rollout_details))
        .where(c.purpose == purpose)
        .limit(SAME_LOOKED // 2)
    )
    around = SEARCHED // 2  # held-out answers are rare: not all are looked through for them
    after = conn.execute(query.where(c.seq.between(middle, middle + around)).order_by(c.seq)).all()
    before = conn.execute(
        query.where(c.seq.between(middle - around, middle - 1)).order_by(c.seq.desc())
    ).all()
    found: dict[str, dict[str, Any]] = {}
    for seq, written_by, style, reward, messages, answer in [*after, *before]:
        question = messages[-1].get("content") if messages else None
        if not answer or not isinstance(question, str):
            continue
        distance = abs(written_by - version)
        if question not in found or distance < found[question]["distance"]:
            found[question] = {
                "rollout": seq,
                "version": written_by,
                "style": style,
                "reward": reward,
                "answer": answer,
                "distance": distance,
            }
    return found


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


# ---- figures from rows

ROLLING = 20  # rollouts in a rolling mean, when rollouts are drawn one by one
ROLLING_FEWEST = 5


def _between_switches(phases: Sequence[Phase], first: int, last: int) -> list[tuple[int, int]]:
    """First and last rollout of each stretch under one preference."""
    begins = sorted({first} | {p.first_seq for p in phases if first < p.first_seq <= last})
    return list(zip(begins, [begin - 1 for begin in begins[1:]] + [last], strict=True))


def _groups(phases: Sequence[Phase], first: int, last: int, width: int) -> dict[int, int]:
    """Groups of up to `width` rollouts: the last rollout of each, by its first."""
    return {
        start: min(start + width - 1, end)
        for begin, end in _between_switches(phases, first, last)
        for start in range(begin, end + 1, width)
    }


def _pointwise(rows: pd.DataFrame, ends: dict[int, int], width: int) -> Series:
    def rolling(table: pd.DataFrame, *names: str) -> pd.DataFrame:
        means = table[list(names)].astype(float).rolling(ROLLING, min_periods=ROLLING_FEWEST)
        return table[["rollout", "at"]].join(means.mean())

    marks = rolling(rows, "reward", "quality", "style_match")
    trained = rows[rows["value"].notna()].reset_index(drop=True)
    named = rows[rows["style"].notna()]
    starts = np.array(list(ends))
    groups = starts[np.searchsorted(starts, named["rollout"], side="right") - 1]
    counted = named.assign(group=groups).groupby(["group", "style"]).size().rename("answers")
    return Series(
        shares=_shares(counted.reset_index(), ends),
        marks=marks,
        values=rolling(trained, "value", "reward"),
        points=rows[["rollout", "at", "reward", "style"]],
        width=width,
    )


def _grouped(rows: pd.DataFrame, ends: dict[int, int], width: int, sampled: int | None) -> Series:
    sums = rows.groupby("group").agg(
        {name: "sum" for name in rows.columns if name not in ("group", "style", "at")}
        | {"at": "min"}
    )
    middle = (sums.index + sums.index.map(ends)).to_numpy() / 2
    marks = pd.DataFrame(
        {
            "rollout": middle,
            "at": sums["at"].to_numpy(),
            "reward": (sums["reward"] / sums["answers"]).to_numpy(),
            "quality": (sums["quality"] / sums["marked"].where(sums["marked"] > 0)).to_numpy(),
            "style_match": (
                sums["style_match"] / sums["marked"].where(sums["marked"] > 0)
            ).to_numpy(),
            "answers": sums["answers"].to_numpy(),
        }
    )
    valued = sums["valued"].where(sums["valued"] > 0)
    values = pd.DataFrame(
        {
            "rollout": middle,
            "at": sums["at"].to_numpy(),
            "value": (sums["value"] / valued).to_numpy(),
            "reward": (sums["valued_reward"] / valued).to_numpy(),
        }
    ).dropna(subset=["value"])
    named = rows[rows["style"].notna()][["group", "style", "answers"]]
    return Series(
        shares=_shares(named, ends),
        marks=marks,
        values=values,
        points=pd.DataFrame(columns=["rollout", "at", "reward", "style"]),
        width=width,
        sampled=sampled,
    )


def _shares(counted: pd.DataFrame, ends: dict[int, int]) -> pd.DataFrame:
    """Every style in every group, zeros included."""
    columns = ["start", "end", "rollout", "style", "share", "answers"]
    if not len(counted):
        return pd.DataFrame(columns=columns)
    table = counted.pivot_table(
        index="group", columns="style", values="answers", aggfunc="sum", fill_value=0
    )
    total = table.sum(axis=1)
    long = table.stack().rename("answers").reset_index().rename(columns={"group": "start"})
    long["share"] = long["answers"] / long["start"].map(total)
    long["end"] = long["start"].map(ends)
    long["rollout"] = (long["start"] + long["end"]) / 2
    return long[columns]
