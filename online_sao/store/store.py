"""RolloutStore: everything the endpoint must not forget.

One instance may be used by many threads, and many processes may open one database. Each
method is one short transaction. States change only along these arrows; every change is
guarded in SQL by the state it starts from:

    pending  -> rewarded, unscored, excluded, stale, discarded
    unscored -> rewarded, excluded, stale, discarded
    rewarded -> claimed, excluded, stale, discarded   (and rewarded: a new verdict)
    claimed  -> trained, rewarded, excluded, discarded (recovered after its text was deleted)
    trained  -> rewarded (its update was lost), discarded (its line was left)

stale, excluded and discarded are final. Database failures are raised as StoreError.
"""

from __future__ import annotations

import heapq
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from online_sao.errors import FencedError, NotFoundError, StoreError
from online_sao.store import database
from online_sao.store.database import is_conflict, make_engine, parse_url, place_of, store_errors
from online_sao.store.models import (
    COUNTERS,
    SCHEMA_VERSION,
    clean_text,
    counters,
    events,
    feedback,
    metadata,
    rollout_details,
    rollout_tokens,
    rollouts,
    runs,
    sessions,
    turns,
    versions,
)
from online_sao.types import (
    Event,
    FloatArray,
    IntArray,
    JudgeState,
    Preference,
    Purpose,
    Rollout,
    RolloutState,
    Run,
    Session,
    Skipped,
    StoredVerdict,
    WeightSpan,
    WeightVersion,
)

EMPTY_LOG_WAIT_MS = 200  # how long a deletion waits for readers of the log
CHUNK = 500  # ids named in one statement; databases bound the number of parameters
MAX_RETRIES = 3  # PostgreSQL may choose a transaction as the victim of a deadlock

S = RolloutState
ADDABLE = (S.PENDING, S.REWARDED, S.UNSCORED, S.EXCLUDED)
OPEN = (S.PENDING, S.UNSCORED, S.REWARDED)  # may still be trained on; no learner holds it

T = TypeVar("T")
Listing = list  # RolloutStore.list hides the builtin in annotations
TrainedArrays = tuple[str, FloatArray | None, FloatArray | None, FloatArray | None]


class RolloutStore:
    def __init__(self, url: str) -> None:
        """Open the database at `url` (SQLAlchemy form); create its tables if there are none."""
        self._pid = os.getpid()
        self._parsed = parse_url(url)
        self._place = place_of(self._parsed)
        self.url = self._parsed.render_as_string(hide_password=False)
        if self._parsed.get_backend_name() == "sqlite":
            folder = Path(self._place).parent
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(
                    f"The folder {folder} of the store cannot be made: {error.strerror}."
                ) from None
        self._engine = make_engine(self._parsed)
        try:
            self._create_or_check()
        except BaseException:
            self._engine.dispose()
            raise

    @property
    def place(self) -> str:
        """The file or the database, for people: without a password."""
        return self._place

    def close(self) -> None:
        self._engine.dispose()

    def __enter__(self) -> RolloutStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[RolloutStore], tuple[str]]:
        return RolloutStore, (self.url,)  # a copy in another process opens its own connections

    # ---- runs and epochs

    def start_run(self, run: Run) -> None:
        """Record `run` and make it the current one; a known run is taken up again."""

        def work(conn: Connection) -> None:
            started = _take_number(conn, "run_starts")
            known = conn.execute(
                runs.update().where(runs.c.id == run.id).values(started=started)
            ).rowcount
            if not known:
                conn.execute(
                    runs.insert().values(
                        id=run.id,
                        started=started,
                        preset=run.preset,
                        seed=run.seed,
                        model=run.model,
                        model_hash=run.model_hash,
                        config=run.config,
                        created_at=run.created_at or _now(),
                    )
                )

        self._write(work)

    def current_run(self) -> Run | None:
        """The run that was started or taken up last."""
        found = self._read(
            lambda conn: conn.execute(
                runs.select().order_by(runs.c.started.desc()).limit(1)
            ).one_or_none()
        )
        return _run(found) if found else None

    def runs(self) -> Listing[Run]:
        """All runs, the one started last at the end."""
        found = self._read(lambda conn: conn.execute(runs.select().order_by(runs.c.started)).all())
        return [_run(row) for row in found]

    def new_epoch(self) -> int:
        """A learner's fencing token: each is larger than all before it."""
        return self._write(lambda conn: _take_number(conn, "epoch"))

    def current_epoch(self) -> int:
        """The newest epoch; 0 before the first learner."""
        return self._read(lambda conn: _counter(conn, "epoch"))

    # ---- recording and reading rollouts

    def add(self, rollout: Rollout) -> Rollout:
        """Record a rollout and return it as stored; one already known is returned unchanged.

        `seq`, `created_at`, `run_id` and `preference` are filled in where they are None. One
        with a `session_id` is put in its place among the turns of that session: it goes on
        with the trajectory of its `parent_id` where it can, or begins one, with the reason.
        """
        _check_new(rollout)

        def work(conn: Connection) -> Rollout:
            seq = _counter(conn, "rollouts", lock=True) + 1
            known = conn.execute(
                sa.select(rollouts.c.seq).where(rollouts.c.id == rollout.id)
            ).scalar()
            if known is not None:
                return load_rollouts(conn, [known], with_tokens=True)[0]
            run_id = rollout.run_id
            if run_id is None:
                run_id = conn.execute(
                    sa.select(runs.c.id).order_by(runs.c.started.desc()).limit(1)
                ).scalar()
            new = replace(
                rollout,
                seq=seq,
                created_at=rollout.created_at or _now(),
                run_id=run_id,
                preference=rollout.preference or _preference(conn),
            )
            conn.execute(rollouts.insert().values(**_short_columns(new)))
            conn.execute(rollout_details.insert().values(**_detail_columns(new)))
            conn.execute(rollout_tokens.insert().values(**_token_columns(new)))
            if new.session_id is not None:
                new = _place_turn(conn, new)
            _set_counter(conn, "rollouts", seq)
            return new

        return self._write(work)

    def get(self, id: str) -> Rollout:
        """The rollout with its tokens; NotFoundError if there is none."""
        return self.get_many([id])[0]

    def get_many(self, ids: Sequence[str]) -> Listing[Rollout]:
        """Rollouts with their tokens, in the order of `ids`; NotFoundError if one is missing."""

        def work(conn: Connection) -> Listing[Rollout]:
            seqs = _seqs(conn, ids)
            return load_rollouts(conn, [seqs[id] for id in ids], with_tokens=True)

        return self._read(work)

    def list(
        self,
        *,
        after_seq: int | None = None,
        before_seq: int | None = None,
        limit: int = 100,
        states: Iterable[RolloutState] | None = None,
        purpose: Purpose | None = None,
        run_id: str | None = None,
        session_id: str | None = None,
        style: str | None = None,
        newest_first: bool = False,
        with_tokens: bool = False,
    ) -> Listing[Rollout]:
        """Rollouts in order of recording, strictly between `after_seq` and `before_seq`.

        `style` is the style that was preferred when they were made. Without `with_tokens`
        the per-token arrays are empty.
        """
        conditions = []
        if after_seq is not None:
            conditions.append(rollouts.c.seq > after_seq)
        if before_seq is not None:
            conditions.append(rollouts.c.seq < before_seq)
        if purpose is not None:
            conditions.append(rollouts.c.purpose == purpose)
        if run_id is not None:
            conditions.append(rollouts.c.run_id == run_id)
        if session_id is not None:
            conditions.append(rollouts.c.session_id == session_id)
        if style is not None:
            conditions.append(rollouts.c.style == style)
        wanted = None if states is None else sorted({S(state) for state in states})

        def work(conn: Connection) -> Listing[Rollout]:
            order = rollouts.c.seq.desc() if newest_first else rollouts.c.seq
            query = sa.select(rollouts.c.seq).where(*conditions).order_by(order).limit(limit)
            if wanted is None:
                seqs: Iterable[int] = conn.execute(query).scalars()
            else:  # one indexed walk per state, merged
                each = [
                    conn.execute(query.where(rollouts.c.state == state)).scalars().all()
                    for state in wanted
                ]
                seqs = heapq.merge(*each, reverse=newest_first)
            return load_rollouts(conn, list(seqs)[:limit], with_tokens=with_tokens)

        return self._read(work)

    def waiting_for_judge(
        self, limit: int, newest_first: bool = False, *, clients_before: datetime | None = None
    ) -> Listing[Rollout]:
        """Rollouts that no judge has answered for, without tokens.

        With `clients_before`, answers to clients only if they were recorded before then; our
        own (pretraining, probes) in any case.
        """
        c = rollouts.c
        order = c.seq.desc() if newest_first else c.seq
        # a literal, so that SQLite recognises the partial index
        wanted = [c.judge_state == sa.literal_column("'waiting'")]
        if clients_before is not None:
            wanted.append(sa.or_(c.purpose != Purpose.SERVE, c.created_at < clients_before))

        def work(conn: Connection) -> Listing[Rollout]:
            seqs = conn.execute(
                sa.select(c.seq).where(*wanted).order_by(order).limit(limit)
            ).scalars()
            return load_rollouts(conn, list(seqs), with_tokens=False)

        return self._read(work)

    # ---- sessions

    def session_turns(self, session_id: str, limit: int) -> Listing[Rollout]:
        """The newest `limit` rollouts of a session, newest first, without tokens."""
        return self.list(session_id=session_id, newest_first=True, limit=limit)

    def session(self, session_id: str) -> Session:
        """NotFoundError if no rollout of that session is kept."""

        def work(conn: Connection) -> Session:
            row = conn.execute(sessions.select().where(sessions.c.id == session_id)).one_or_none()
            if row is None:
                raise NotFoundError(f"There is no session '{session_id}'.")
            count = sa.select(sa.func.count()).where(turns.c.session_id == session_id)
            return Session(**row._mapping, num_turns=conn.execute(count).scalar_one())

        return self._read(work)

    def close_session(self, session_id: str) -> Session:
        """Close a session; one that is closed stays as it is. NotFoundError if there is none."""

        def work(conn: Connection) -> None:
            conn.execute(
                sessions.update()
                .where(sessions.c.id == session_id, sessions.c.closed_at.is_(None))
                .values(closed_at=_now(), close_reason="client")
            )

        self._write(work)
        return self.session(session_id)

    def close_idle_sessions(self, idle_s: float) -> int:
        """Close the sessions without a turn for `idle_s` seconds; returns how many."""
        now = _now()
        c = sessions.c
        idle = (c.closed_at.is_(None), c.active_at < now - timedelta(seconds=idle_s))
        query = sa.select(c.id).where(*idle).limit(1)
        if self._read(lambda conn: conn.execute(query).first()) is None:
            return 0  # without taking the writer's lock
        return self._write(
            lambda conn: (
                conn.execute(
                    sessions.update().where(*idle).values(closed_at=now, close_reason="idle")
                ).rowcount
            )
        )

    # ---- rewards

    def set_verdict(self, id: str, verdict: StoredVerdict) -> RolloutState:
        """Keep a verdict; return the state the rollout is in afterwards.

        A pending or unscored rollout becomes rewarded, a rewarded one takes the new verdict.
        A verdict that can no longer count (a learner has the rollout or had it, or a user's
        feedback outranks a judge) is kept beside it, as a row of feedback.
        """
        _check_reward(verdict.reward)

        def work(conn: Connection) -> RolloutState:
            row = _lock_one(conn, id)
            state = S(row.state)
            in_use = state == S.CLAIMED or row.trained_version is not None
            outranked = verdict.source == "judge" and row.reward_source == "feedback"
            used = not (in_use or outranked)
            if used:
                if state in (S.PENDING, S.UNSCORED):
                    state = S.REWARDED
                _put_verdict(conn, row, verdict, state)
            else:
                _keep_feedback(conn, row, verdict, verdict.rationale, used=False)
                _update_one(conn, row, judge_state=JudgeState.SCORED)
            return state

        return self._write(work)

    def set_unscored(self, id: str, reason: str) -> None:
        """Keep that the judge failed. What already has a reward keeps it."""

        def work(conn: Connection) -> None:
            row = _lock_one(conn, id)
            if row.judge_state == JudgeState.SCORED or row.reward is not None:
                return
            if row.state == S.PENDING:
                _update_one(
                    conn, row, state=S.UNSCORED, reason=reason, judge_state=JudgeState.UNSCORED
                )
            else:
                _update_one(conn, row, judge_state=JudgeState.UNSCORED)

        self._write(work)

    def add_feedback(
        self, id: str, reward: float, comment: str | None = None
    ) -> tuple[bool, str | None]:
        """Keep a user's reward. (True, None) if it will count; else False and why not."""
        _check_reward(reward)
        verdict = StoredVerdict(
            quality=None, style=None, reward=reward, source="feedback", rationale=comment
        )

        def work(conn: Connection) -> tuple[bool, str | None]:
            row = _lock_one(conn, id)
            used = row.state in OPEN and row.purpose == Purpose.SERVE
            _keep_feedback(conn, row, verdict, comment, used=used)
            if used:
                _put_verdict(conn, row, verdict, S.REWARDED)
                return True, None
            state = S(row.state)
            if state in (S.CLAIMED, S.TRAINED):
                return False, f"the answer was already learned from (state {state})"
            return False, f"the answer is not trainable ({state}: {row.reason or row.purpose})"

        return self._write(work)

    # ---- the learner's life with rollouts

    def claim(
        self,
        *,
        epoch: int,
        limit: int,
        order: Literal["oldest", "newest"] = "oldest",
        current_version: int,
        max_policy_lag: int,
        max_claims: int,
        run_id: str | None,
        skipped: Skipped | None = None,
        ids: Sequence[str] | None = None,
    ) -> Listing[Rollout]:
        """Take up to `limit` rewarded rollouts, with tokens, for the learner of `epoch`.

        First sets aside what must not be learned from: made more than `max_policy_lag`
        versions ago (numbers that were `skipped` are none), by abandoned weights or in another
        run (stale), or already claimed `max_claims` times by learners that died over it
        (excluded: poison). Answers to clients only. With `ids` those alone are taken, however
        old: what `rewind` gave back.
        """

        def work(conn: Connection) -> Listing[Rollout]:
            _check_epoch(conn, epoch)
            c = rollouts.c
            lag = None if ids is not None else max_policy_lag
            _set_unfit_aside(conn, current_version, lag, skipped, max_claims, run_id)
            query = (
                sa.select(c.seq)
                .where(*_READY)
                .order_by(c.seq.desc() if order == "newest" else c.seq)
                .with_for_update()
            )
            query = query.limit(limit) if ids is None else query.where(c.id.in_(ids))
            seqs = conn.execute(query).scalars().all()
            _take(conn, seqs, epoch)
            return load_rollouts(conn, seqs, with_tokens=True)

        return self._write(work)

    def claim_trajectories(
        self,
        *,
        epoch: int,
        limit: int,
        order: Literal["oldest", "newest"] = "oldest",
        current_version: int,
        max_policy_lag: int,
        max_claims: int,
        run_id: str | None,
        reward_wait_s: float,
        skipped: Skipped | None = None,
    ) -> Listing[Listing[Rollout]]:
        """As `claim`, for up to `limit` whole trajectories, each in the order of its turns.

        A trajectory is ready when its session is closed and none of its turns still waits for
        a verdict, or `reward_wait_s` have passed since. Turns without a reward, and those set
        aside, are not among those returned: they are what the later ones' prompts hold. A
        rollout without a session is a trajectory of its own.
        """

        def work(conn: Connection) -> Listing[Listing[Rollout]]:
            _check_epoch(conn, epoch)
            _set_unfit_aside(conn, current_version, max_policy_lag, skipped, max_claims, run_id)
            ready = _ready_trajectories(reward_wait_s).subquery()
            newest_first = order == "newest"
            units = conn.execute(
                sa.select(ready.c.unit)
                .order_by(ready.c.newest.desc() if newest_first else ready.c.newest)
                .limit(limit)
            ).scalars()
            found = []
            for unit in units:
                query = (
                    sa.select(rollouts.c.seq)
                    .select_from(_ROLLOUTS_AND_TURNS)
                    .where(*_READY, unit == _UNIT)
                    .order_by(rollouts.c.seq)
                )
                seqs = conn.execute(query).scalars().all()
                _take(conn, seqs, epoch)
                found.append(load_rollouts(conn, seqs, with_tokens=True))
            return found

        return self._write(work)

    def num_rewarded(self, run_id: str) -> int:
        """Rollouts of `run_id` that wait for `claim`."""
        query = sa.select(sa.func.count()).where(*_READY, rollouts.c.run_id == run_id)
        return int(self._read(lambda conn: conn.execute(query).scalar_one()))

    def num_ready_trajectories(self, run_id: str, reward_wait_s: float) -> int:
        """Trajectories of `run_id` that wait for `claim_trajectories`."""
        ready = _ready_trajectories(reward_wait_s, rollouts.c.run_id == run_id).subquery()
        query = sa.select(sa.func.count()).select_from(ready)
        return int(self._read(lambda conn: conn.execute(query).scalar_one()))

    def release(self, epoch: int) -> int:
        """Give back all that is claimed under `epoch`, as if it had not been; returns how many.

        By epoch and not by name: a claim whose answer was lost is known to the store alone.
        """
        c = rollouts.c

        def work(conn: Connection) -> int:
            return _unclaim(conn, (c.claimed_epoch == epoch,), num_claims=c.num_claims - 1)

        return self._write(work)

    def recover(self, epoch: int) -> int:
        """Return what earlier learners left claimed to rewarded; `num_claims` stays."""

        def work(conn: Connection) -> int:
            _check_epoch(conn, epoch)
            return _unclaim(conn, (rollouts.c.claimed_epoch < epoch,))

        return self._write(work)

    def finish_update(
        self, *, epoch: int, version: WeightVersion, rollouts: Sequence[TrainedArrays]
    ) -> None:
        """Record the version an update made and the rollouts it was made from, together.

        `rollouts` holds (id, values, advantages, importance_ratios). All must be claimed
        under `epoch`; nothing is recorded otherwise.
        """
        arrays = {id: rest for id, *rest in rollouts}
        trained_at = _now()

        def work(conn: Connection) -> None:
            _check_epoch(conn, epoch)
            _insert_version(conn, version)
            seqs = _seqs(conn, list(arrays))
            for id, (values, advantages, ratios) in arrays.items():
                seq = seqs[id]
                c = _rollouts.c
                changed = conn.execute(
                    _rollouts.update()
                    .where(c.seq == seq, c.state == S.CLAIMED, c.claimed_epoch == epoch)
                    .values(
                        state=S.TRAINED,
                        trained_version=version.version,
                        trained_at=trained_at,
                        value_first=_first(values),
                    )
                ).rowcount
                if not changed:
                    raise StoreError(
                        f"Rollout {id} is not claimed by learner epoch {epoch}, so the update "
                        f"that made version {version.version} was not recorded."
                    )
                conn.execute(
                    rollout_tokens.update()
                    .where(rollout_tokens.c.seq == seq)
                    .values(
                        values=_pack_floats(values),
                        advantages=_pack_floats(advantages),
                        importance_ratios=_pack_floats(ratios),
                    )
                )

        self._write(work)

    def exclude(self, ids: Sequence[str], reason: str) -> int:
        """Set rollouts aside for good: open or claimed ones. Returns how many changed."""
        return self._move(ids, (*OPEN, S.CLAIMED), S.EXCLUDED, reason)

    def discard(self, ids: Sequence[str], reason: str) -> int:
        """Throw rollouts away: open or trained ones. Returns how many changed."""
        return self._move(ids, (*OPEN, S.TRAINED), S.DISCARDED, reason)

    def rewind(self, to_version: int, run_id: str | None) -> Listing[Listing[str]]:
        """After a crash that lost all versions above `to_version`: their rollouts of this run
        return to rewarded. The claim they were trained under does not count as a failed one.

        Returns their ids by the update that was lost, the oldest first: what `claim` can take
        again in that order.
        """
        c = rollouts.c
        where = [c.state == S.TRAINED, c.trained_version > to_version]
        if run_id is not None:
            where.append(c.run_id == run_id)

        def work(conn: Connection) -> Listing[Listing[str]]:
            seqs = _lock_many(conn, where)
            lost: dict[int, Listing[str]] = {}
            for part in _chunks(seqs):
                for row in conn.execute(
                    sa.select(c.id, c.trained_version).where(c.seq.in_(part)).order_by(c.seq)
                ):
                    lost.setdefault(row.trained_version, []).append(row.id)
                conn.execute(
                    rollout_tokens.update()
                    .where(rollout_tokens.c.seq.in_(part))
                    .values(values=None, advantages=None, importance_ratios=None)
                )
                untrained = {
                    "trained_version": None,
                    "trained_at": None,
                    "value_first": None,
                    "claimed_epoch": None,
                    "num_claims": sa.case((c.num_claims > 0, c.num_claims - 1), else_=0),
                }
                conn.execute(
                    rollouts.update()
                    .where(c.seq.in_(part), c.state == S.TRAINED)
                    .values(
                        state=sa.case((c.deleted_at.is_(None), S.REWARDED), else_=S.DISCARDED),
                        reason=sa.case((c.deleted_at.is_(None), None), else_="deleted"),
                        **untrained,
                    )
                )
            return [lost[version] for version in sorted(lost)]

        return self._write(work)

    def roll_back(self, to_version: int, run_id: str, epoch: int) -> int:
        """Leave the line of weights of `run_id` above `to_version`; the number of the version
        that this makes, of the weights of `to_version`.

        The run's versions since are marked abandoned (and those of other runs that they came
        from), rollouts trained into them become discarded, and open ones made by them stale;
        claim() turns away those that arrive later. Other runs keep what they have. What
        `to_version` itself came from is abandoned no longer: so a rollback can be taken back.
        """
        c, v = rollouts.c, versions.c

        def work(conn: Connection) -> int:
            _check_epoch(conn, epoch)
            parents: dict[int, int | None] = {
                row.version: row.parent for row in conn.execute(sa.select(v.version, v.parent))
            }
            if to_version not in parents:
                raise NotFoundError(f"There is no weight version {to_version}.")
            own = conn.execute(
                sa.select(v.version).where(v.run_id == run_id, v.version > to_version)
            ).scalars()
            left = set(own)
            left |= {number for number in _ancestors(parents, left) if number > to_version}
            for part in _chunks(sorted(left)):
                conn.execute(versions.update().where(v.version.in_(part)).values(abandoned=True))
                conn.execute(
                    rollouts.update()
                    .where(c.state == S.TRAINED, c.trained_version.in_(part))
                    .values(state=S.DISCARDED, reason="rolled_back")
                )
                conn.execute(
                    rollouts.update()
                    .where(
                        c.state.in_(OPEN),
                        c.weight_version_end.in_(part) | c.weight_version_start.in_(part),
                    )
                    .values(state=S.STALE, reason="rolled_back")
                )
            for part in _chunks(sorted({to_version, *_ancestors(parents, {to_version})})):
                back = v.version.in_(part) & (v.abandoned == sa.true())
                conn.execute(versions.update().where(back).values(abandoned=False))
            made = max(parents) + 1
            _insert_version(conn, WeightVersion(made, to_version, run_id, "rollback"))
            return made

        return self._write(work)

    # ---- versions

    def next_version(self) -> int:
        """The number of the next version: one more than any before it, 0 at the start."""
        newest = self._read(
            lambda conn: conn.execute(sa.select(sa.func.max(versions.c.version))).scalar()
        )
        return 0 if newest is None else newest + 1

    def add_version(self, version: WeightVersion) -> None:
        """Record a version; StoreError if its number is taken."""
        self._write(lambda conn: _insert_version(conn, version))

    def set_published(self, version: int) -> None:
        """Record that the engine serves `version` from now on; the first time stands."""

        def work(conn: Connection) -> None:
            _update_version(
                conn,
                version,
                published_at=sa.func.coalesce(
                    versions.c.published_at, sa.literal(_now(), versions.c.published_at.type)
                ),
            )

        self._write(work)

    def set_checkpoint(self, version: int, path: str | None) -> None:
        """Record where the checkpoint of `version` lies; None if it is gone."""
        self._write(lambda conn: _update_version(conn, version, checkpoint=path))

    def release_checkpoint(self, version: int) -> bool:
        """Whether the checkpoint of `version` may be deleted, which from now on has none.

        False if it is pinned. One statement, as `pin` is: what was pinned is never deleted.
        """
        its_own = versions.c.version == version

        def work(conn: Connection) -> bool:
            unpinned = versions.update().where(its_own, versions.c.pinned.is_(False))
            if conn.execute(unpinned.values(checkpoint=None)).rowcount:
                return True
            pinned = sa.select(versions.c.pinned).where(its_own)
            return not conn.execute(pinned).scalar_one_or_none()

        return self._write(work)

    def pin(self, version: int) -> bool:
        """Keep the checkpoint of `version` whatever the retention rule says; False without one."""
        retained = versions.update().where(
            versions.c.version == version, versions.c.checkpoint.isnot(None)
        )
        return self._write(lambda conn: bool(conn.execute(retained.values(pinned=True)).rowcount))

    def unpin(self, version: int) -> None:
        """Leave the checkpoint of `version` to the retention rule again."""
        self._write(lambda conn: _update_version(conn, version, pinned=False))

    def versions(self, limit: int = 100, run_id: str | None = None) -> Listing[WeightVersion]:
        """Versions, newest first."""
        query = versions.select().order_by(versions.c.version.desc()).limit(limit)
        if run_id is not None:
            query = query.where(versions.c.run_id == run_id)
        return [_version(row) for row in self._read(lambda conn: conn.execute(query).all())]

    def retained_versions(self) -> Listing[WeightVersion]:
        """Versions with a checkpoint, newest first."""
        query = versions.select().where(versions.c.checkpoint.isnot(None))
        query = query.order_by(versions.c.version.desc())
        return [_version(row) for row in self._read(lambda conn: conn.execute(query).all())]

    def get_version(self, version: int) -> WeightVersion:
        """NotFoundError if there is none of that number."""
        row = self._read(
            lambda conn: conn.execute(
                versions.select().where(versions.c.version == version)
            ).one_or_none()
        )
        if row is None:
            raise NotFoundError(f"There is no weight version {version}.")
        return _version(row)

    def latest_version(self) -> WeightVersion | None:
        """The version of the highest number."""
        newest = self.versions(limit=1)
        return newest[0] if newest else None

    # ---- preferences and events

    def set_preference(self, preference: Preference, weight_version: int | None) -> Preference:
        """Put a preference in force from now on; return it with its event's number and time."""
        data = {
            "style": preference.style,
            "pool": list(preference.pool),
            "note": preference.note,
        }
        return _event_preference(self.add_event("preference", data, weight_version))

    def preference(self) -> Preference | None:
        """The preference in force; None before the first."""
        return self._read(_preference)

    def preferences(self) -> Listing[Preference]:
        """All preferences that were put in force, oldest first."""
        query = events.select().where(events.c.kind == "preference").order_by(events.c.id)
        rows = self._read(lambda conn: conn.execute(query).all())
        return [_event_preference(_event(row)) for row in rows]

    def add_event(
        self, kind: str, data: dict[str, Any], weight_version: int | None = None
    ) -> Event:
        """Record something an operator, a guard or a part of the program did."""

        def work(conn: Connection) -> Event:
            event = Event(_take_number(conn, "events"), kind, data, _now(), weight_version)
            conn.execute(
                events.insert().values(
                    id=event.id,
                    kind=kind,
                    data=data,
                    created_at=event.created_at,
                    weight_version=weight_version,
                )
            )
            return event

        return self._write(work)

    def events(
        self, kind: str | None = None, after_id: int | None = None, limit: int = 100
    ) -> Listing[Event]:
        """Events in order: the first `limit` after `after_id`, or else the newest `limit`."""
        query = events.select().limit(limit)
        if kind is not None:
            query = query.where(events.c.kind == kind)
        if after_id is not None:
            query = query.where(events.c.id > after_id).order_by(events.c.id)
        else:
            query = query.order_by(events.c.id.desc())
        found = [_event(row) for row in self._read(lambda conn: conn.execute(query).all())]
        return found if after_id is not None else found[::-1]

    # ---- counts

    def counts(self, purpose: Purpose | None = None) -> dict[RolloutState, int]:
        """How many rollouts are in each state, zeros included."""
        c = rollouts.c
        query = sa.select(c.state, sa.func.count()).group_by(c.state)
        # Clients' are counted as all but ours: only ours have an index by purpose.
        ours = {
            own: query.where(c.purpose == sa.literal_column(f"'{own}'"))
            for own in (Purpose.PRETRAINING, Purpose.PROBE)
            if purpose in (own, Purpose.SERVE)
        }

        def work(conn: Connection) -> dict[RolloutState, int]:
            every = dict.fromkeys(S, 0)
            if purpose in (None, Purpose.SERVE):
                every |= {S(state): number for state, number in conn.execute(query)}
            sign = -1 if purpose is Purpose.SERVE else 1
            for own in ours.values():
                for state, number in conn.execute(own):
                    every[S(state)] += sign * number
            return every

        return self._read(work)

    def reason_counts(self) -> dict[tuple[RolloutState, str], int]:
        """How many rollouts are in each state for each reason."""
        c = rollouts.c
        query = (
            sa.select(c.state, c.reason, sa.func.count())
            .where(c.reason.isnot(None))
            .group_by(c.state, c.reason)
        )
        rows = self._read(lambda conn: conn.execute(query).all())
        return {(S(state), reason): number for state, reason, number in rows}

    # ---- privacy

    def delete_text(self, id: str) -> None:
        """Remove a rollout's texts, token ids, session and comments; its marks stay.

        One that is not yet trained on is discarded.
        """

        def work(conn: Connection) -> None:
            _delete_texts(conn, [_lock_one(conn, id).seq])

        self._write(work)
        self._empty_log()

    def delete_older_than(self, days: float) -> int:
        """delete_text for all rollouts recorded more than `days` days ago; returns how many."""
        before = _now() - timedelta(days=days)
        old = [rollouts.c.created_at < before, rollouts.c.deleted_at.is_(None)]
        total = 0
        while True:  # in parts, so that no writer waits long

            def work(conn: Connection) -> int:
                seqs = _lock_many(conn, old, limit=CHUNK)
                _delete_texts(conn, seqs)
                return len(seqs)

            done = self._write(work)
            total += done
            if done < CHUNK:
                break
        if total:
            self._empty_log()
        return total

    # ---- inside

    def _move(
        self, ids: Sequence[str], sources: Sequence[RolloutState], to: RolloutState, reason: str
    ) -> int:
        c = rollouts.c

        def work(conn: Connection) -> int:
            changed = 0
            for part in _chunks(ids):
                seqs = _lock_many(conn, [c.id.in_(part), c.state.in_(sources)])
                changed += conn.execute(
                    rollouts.update()
                    .where(c.seq.in_(seqs), c.state.in_(sources))
                    .values(state=to, reason=reason)
                ).rowcount
            return changed

        return self._write(work)

    def _empty_log(self) -> None:
        """SQLite: take deleted text out of the write-ahead log too, unless others are busy
        there; then it goes with the next deletion or when the last process closes the store."""
        if self._parsed.get_backend_name() != "sqlite":
            return
        with store_errors(self._place):
            connection = self._engine.raw_connection()
            try:
                connection.execute(f"PRAGMA busy_timeout={EMPTY_LOG_WAIT_MS}")  # type: ignore[attr-defined]
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # type: ignore[attr-defined]
                connection.execute(f"PRAGMA busy_timeout={int(database.BUSY_TIMEOUT_S * 1000)}")  # type: ignore[attr-defined]
            finally:
                connection.close()

    def _read(self, work: Callable[[Connection], T]) -> T:
        return self._transaction(work, write=False)

    def _write(self, work: Callable[[Connection], T]) -> T:
        return self._transaction(work, write=True)

    def _transaction(self, work: Callable[[Connection], T], *, write: bool) -> T:
        if self._pid != os.getpid():  # forked: the parent's connections are not ours
            self._engine.dispose(close=False)
            self._pid = os.getpid()
        for attempt in range(1, MAX_RETRIES + 1):
            with store_errors(self._place):
                try:
                    with (
                        self._engine.connect().execution_options(online_sao_write=write) as conn,
                        conn.begin(),
                    ):
                        return work(conn)
                except sa.exc.OperationalError as error:
                    if attempt == MAX_RETRIES or not is_conflict(error):
                        raise
            time.sleep(0.01 * attempt)
        raise AssertionError("unreachable")

    def _create_or_check(self) -> None:
        def work(conn: Connection) -> None:
            if conn.dialect.name == "postgresql":  # two processes may start at once
                conn.execute(sa.select(sa.func.pg_advisory_xact_lock(0x5A0)))
            if not sa.inspect(conn).has_table(counters.name):
                metadata.create_all(conn)
                conn.execute(
                    counters.insert(),
                    [{"name": "schema", "value": SCHEMA_VERSION}]
                    + [{"name": name, "value": 0} for name in COUNTERS],
                )
            found = conn.execute(
                sa.select(counters.c.value).where(counters.c.name == "schema")
            ).scalar()
            if found is None:
                raise StoreError(
                    f"The database at {self._place} has a table 'counters' that is not this "
                    "program's; give the store a database of its own."
                )
            if found != SCHEMA_VERSION:
                # Never in passing: other processes may be using the old schema right now.
                from online_sao.store.migration import newer_schema, older_schema

                wrong = newer_schema if found > SCHEMA_VERSION else older_schema
                raise StoreError(wrong(self._place, found))

        def known(conn: Connection) -> bool:
            if not sa.inspect(conn).has_table(counters.name):
                return False
            return (
                conn.execute(
                    sa.select(counters.c.value).where(counters.c.name == "schema")
                ).scalar()
                == SCHEMA_VERSION
            )

        if not self._read(known):
            self._write(work)


_rollouts = rollouts  # finish_update has a parameter of that name


# Rewarded, and asked for by a client: what a learner may claim.
_READY = (rollouts.c.state == S.REWARDED, rollouts.c.purpose == Purpose.SERVE)
_ROLLOUTS_AND_TURNS = rollouts.outerjoin(turns, turns.c.seq == rollouts.c.seq)
_UNIT = sa.func.coalesce(turns.c.trajectory_seq, rollouts.c.seq)


# ---- pieces of transactions


def _set_unfit_aside(
    conn: Connection,
    current_version: int,
    max_policy_lag: int | None,
    skipped: Skipped | None,
    max_claims: int,
    run_id: str | None,
) -> None:
    """Move what waits for a learner and must not be learned from; see RolloutStore.claim."""
    c = rollouts.c
    left = sa.select(versions.c.version).where(versions.c.abandoned == sa.true())
    made_by: sa.ColumnElement[int] = c.weight_version_start
    if skipped is not None:
        made_by += sa.case((c.weight_version_start < skipped.until, skipped.count), else_=0)
    aside: list[tuple[sa.ColumnElement[bool], RolloutState, str]] = []
    if max_policy_lag is not None:
        aside.append((current_version - made_by > max_policy_lag, S.STALE, "policy_lag"))
    aside += [
        (
            c.weight_version_start.in_(left) | c.weight_version_end.in_(left),
            S.STALE,
            "rolled_back",
        ),
        (c.num_claims >= max_claims, S.EXCLUDED, "poison"),
    ]
    if run_id is not None:
        aside.append((c.run_id != run_id, S.STALE, "other_run"))
    for condition, state, reason in aside:
        conn.execute(rollouts.update().where(*_READY, condition).values(state=state, reason=reason))


def _take(conn: Connection, seqs: Sequence[int], epoch: int) -> None:
    c = rollouts.c
    for part in _chunks(seqs):
        conn.execute(
            rollouts.update()
            .where(c.seq.in_(part), c.state == S.REWARDED)
            .values(state=S.CLAIMED, claimed_epoch=epoch, num_claims=c.num_claims + 1)
        )


def _ready_trajectories(reward_wait_s: float, *where: sa.ColumnElement[bool]) -> sa.Select[Any]:
    """(unit, newest): trajectories that are ready, and the newest seq of each."""
    waited_until = _now() - timedelta(seconds=reward_wait_s)
    other, other_turn = rollouts.alias(), turns.alias()
    unfinished = (
        sa.select(other.c.seq)
        .join(other_turn, other_turn.c.seq == other.c.seq)
        .where(
            other_turn.c.trajectory_seq == turns.c.trajectory_seq,
            (other.c.state == S.CLAIMED)
            | ((other.c.state == S.PENDING) & (sessions.c.closed_at > waited_until)),
        )
    )
    # A session whose row is gone (by age) is closed.
    is_over = sessions.c.id.is_(None) | sessions.c.closed_at.isnot(None)
    return (
        sa.select(_UNIT.label("unit"), sa.func.max(rollouts.c.seq).label("newest"))
        .select_from(_ROLLOUTS_AND_TURNS.outerjoin(sessions, sessions.c.id == turns.c.session_id))
        .where(*_READY, *where, turns.c.seq.is_(None) | (is_over & ~unfinished.exists()))
        .group_by(_UNIT)
    )


def _place_turn(conn: Connection, rollout: Rollout) -> Rollout:
    """Record which trajectory a session's new rollout belongs to; its session is open now."""
    assert rollout.session_id is not None
    known = conn.execute(
        sa.select(sessions.c.closed_at).where(sessions.c.id == rollout.session_id).with_for_update()
    ).one_or_none()
    if known is None:
        conn.execute(
            sessions.insert().values(
                id=rollout.session_id, opened_at=rollout.created_at, active_at=rollout.created_at
            )
        )
    else:
        conn.execute(
            sessions.update()
            .where(sessions.c.id == rollout.session_id)
            .values(active_at=rollout.created_at, closed_at=None, close_reason=None)
        )
    reason = rollout.new_trajectory
    place = {"trajectory_seq": rollout.seq, "trajectory_id": rollout.id, "turn": 0}
    if rollout.parent_id is not None:
        c = turns.c
        before = conn.execute(
            sa.select(c.trajectory_seq, c.trajectory_id, c.turn)
            .join(rollouts, rollouts.c.seq == c.seq)
            .where(rollouts.c.id == rollout.parent_id)
        ).one_or_none()
        if before is None:
            reason = "parent_deleted"
        elif known is not None and known.closed_at is not None:
            reason = "session_closed"  # its turns may have been learned from as a whole
        else:
            last = conn.execute(
                sa.select(sa.func.max(c.turn)).where(c.trajectory_seq == before.trajectory_seq)
            ).scalar_one()
            if before.turn == last:
                place = {**before._mapping, "turn": last + 1}
            else:
                reason = "branched"
    conn.execute(
        turns.insert().values(
            seq=rollout.seq,
            session_id=rollout.session_id,
            parent_id=rollout.parent_id,
            new_trajectory=reason,
            **place,
        )
    )
    return replace(
        rollout,
        new_trajectory=reason,
        trajectory_id=str(place["trajectory_id"]),
        turn=int(place["turn"] or 0),
    )


def _now() -> datetime:
    return datetime.now(UTC)


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), CHUNK):
        yield items[start : start + CHUNK]


def _counter(conn: Connection, name: str, *, lock: bool = False) -> int:
    query = sa.select(counters.c.value).where(counters.c.name == name)
    return conn.execute(query.with_for_update() if lock else query).scalar_one()


def _set_counter(conn: Connection, name: str, value: int) -> None:
    conn.execute(counters.update().where(counters.c.name == name).values(value=value))


def _take_number(conn: Connection, name: str) -> int:
    value = _counter(conn, name, lock=True) + 1
    _set_counter(conn, name, value)
    return value


def _check_epoch(conn: Connection, epoch: int) -> None:
    """Learners' writes pass here one at a time, and only the newest learner's."""
    newest = _counter(conn, "epoch", lock=True)
    if epoch < newest:
        raise FencedError(
            f"Learner epoch {epoch} was replaced by epoch {newest}; this learner must stop."
        )
    if epoch > newest:
        raise StoreError(f"Epoch {epoch} was never given out; call new_epoch() first.")


def _seqs(conn: Connection, ids: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in _chunks(ids):
        known = rollouts.c.id.in_([clean_text(id) for id in part])
        rows = conn.execute(sa.select(rollouts.c.id, rollouts.c.seq).where(known))
        found.update((row.id, row.seq) for row in rows)
    for id in ids:
        if id not in found:
            raise NotFoundError(f"There is no rollout '{clean_text(id)}'.")
    return found


def _lock_one(conn: Connection, id: str) -> sa.Row[Any]:
    query = rollouts.select().where(rollouts.c.id == clean_text(id))
    row = conn.execute(query.with_for_update()).one_or_none()
    if row is None:
        raise NotFoundError(f"There is no rollout '{clean_text(id)}'.")
    return row


def _lock_many(
    conn: Connection, where: Sequence[sa.ColumnElement[bool]], limit: int | None = None
) -> list[int]:
    """Rows always locked in the order of `seq`, so that writers do not wait in a circle."""
    query = sa.select(rollouts.c.seq).where(*where).order_by(rollouts.c.seq).limit(limit)
    return list(conn.execute(query.with_for_update()).scalars())


def _update_one(conn: Connection, row: sa.Row[Any], **columns: Any) -> None:
    """Change a row that is locked; it must still be in the state that was read."""
    changed = conn.execute(
        rollouts.update()
        .where(rollouts.c.seq == row.seq, rollouts.c.state == row.state)
        .values(**columns)
    ).rowcount
    if not changed:
        raise StoreError(f"Rollout {row.id} was changed by another process; try again.")


def _put_verdict(
    conn: Connection, row: sa.Row[Any], verdict: StoredVerdict, state: RolloutState
) -> None:
    _update_one(
        conn,
        row,
        state=state,
        reason=None if state == S.REWARDED else row.reason,
        judge_state=JudgeState.SCORED,
        reward=verdict.reward,
        quality=verdict.quality,
        style_match=verdict.style,
        reward_source=verdict.source,
        detected_style=verdict.detected_style,
    )
    texts = _verdict_texts(verdict)
    if row.deleted_at is not None:
        texts |= {"rationale": None, "judge_raw": None}
    conn.execute(rollout_details.update().where(rollout_details.c.seq == row.seq).values(**texts))


def _keep_feedback(
    conn: Connection, row: sa.Row[Any], verdict: StoredVerdict, comment: str | None, *, used: bool
) -> None:
    conn.execute(
        feedback.insert().values(
            seq=row.seq,
            source=verdict.source,
            reward=verdict.reward,
            quality=verdict.quality,
            style_match=verdict.style,
            comment=comment if row.deleted_at is None else None,
            used=used,
            created_at=_now(),
        )
    )


def _unclaim(conn: Connection, where: Sequence[sa.ColumnElement[bool]], **columns: Any) -> int:
    """claimed -> rewarded; one whose tokens were deleted meanwhile is discarded."""
    c = rollouts.c
    return conn.execute(
        rollouts.update()
        .where(c.state == S.CLAIMED, *where)
        .values(
            state=sa.case((c.deleted_at.is_(None), S.REWARDED), else_=S.DISCARDED),
            reason=sa.case((c.deleted_at.is_(None), None), else_="deleted"),
            claimed_epoch=None,
            **columns,
        )
    ).rowcount


def _delete_texts(conn: Connection, seqs: Sequence[int]) -> None:
    c = rollouts.c
    is_open = c.state.in_(OPEN)
    waiting = c.judge_state == JudgeState.WAITING
    for part in _chunks(seqs):
        conn.execute(
            rollouts.update()
            .where(c.seq.in_(part))
            .values(
                state=sa.case((is_open, S.DISCARDED), else_=c.state),
                reason=sa.case((is_open, "deleted"), else_=c.reason),
                judge_state=sa.case((waiting, JudgeState.SKIPPED), else_=c.judge_state),
                session_id=None,
                deleted_at=_now(),
            )
        )
        conn.execute(
            rollout_details.update()
            .where(rollout_details.c.seq.in_(part))
            .values(
                messages=None,
                answer="",
                client_metadata={},
                rationale=None,
                judge_raw=None,
            )
        )
        conn.execute(rollout_tokens.delete().where(rollout_tokens.c.seq.in_(part)))
        named = sa.select(turns.c.session_id).where(turns.c.seq.in_(part))
        session_ids = conn.execute(named.distinct()).scalars().all()
        conn.execute(turns.delete().where(turns.c.seq.in_(part)))
        left = sa.select(turns.c.seq).where(turns.c.session_id == sessions.c.id)
        for ids in _chunks(session_ids):  # an id may name a person
            conn.execute(sessions.delete().where(sessions.c.id.in_(ids), ~left.exists()))
        conn.execute(feedback.update().where(feedback.c.seq.in_(part)).values(comment=None))


def _ancestors(parents: Mapping[int, int | None], of: Collection[int]) -> set[int]:
    found: set[int] = set()
    for number in of:
        parent = parents.get(number)
        while parent is not None and parent not in found:
            found.add(parent)
            parent = parents.get(parent)
    return found


def _insert_version(conn: Connection, version: WeightVersion) -> None:
    taken = conn.execute(
        sa.select(versions.c.version).where(versions.c.version == version.version)
    ).scalar()
    if taken is not None:
        raise StoreError(f"Weight version {version.version} exists; numbers are never used twice.")
    conn.execute(
        versions.insert().values(
            version=version.version,
            parent=version.parent,
            run_id=version.run_id,
            kind=version.kind,
            metrics=version.metrics,
            created_at=version.created_at or _now(),
            published_at=version.published_at,
            checkpoint=version.checkpoint,
            pinned=version.pinned,
            abandoned=version.abandoned,
        )
    )


def _update_version(conn: Connection, version: int, **columns: Any) -> None:
    changed = conn.execute(
        versions.update().where(versions.c.version == version).values(**columns)
    ).rowcount
    if not changed:
        raise NotFoundError(f"There is no weight version {version}.")


def _preference(conn: Connection) -> Preference | None:
    row = conn.execute(
        events.select().where(events.c.kind == "preference").order_by(events.c.id.desc()).limit(1)
    ).one_or_none()
    return _event_preference(_event(row)) if row else None


# ---- checks on what comes in


def _check_new(rollout: Rollout) -> None:
    if rollout.state not in ADDABLE:
        raise StoreError(
            f"A new rollout cannot be {rollout.state}; it may be {', '.join(ADDABLE)}."
        )
    if rollout.verdict is not None:
        _check_reward(rollout.verdict.reward)
        if rollout.state in (S.PENDING, S.UNSCORED):
            raise StoreError(f"A rollout with a verdict is rewarded, not {rollout.state}.")
    elif rollout.state == S.REWARDED:
        raise StoreError("A rewarded rollout needs its verdict.")
    tokens, logprobs = len(rollout.token_ids), len(rollout.behavior_logprobs)
    if rollout.state != S.EXCLUDED and tokens != logprobs:
        raise StoreError(
            f"Rollout {rollout.id} has {tokens} tokens but {logprobs} behavior log-probs; "
            "record it as excluded."
        )


def _check_reward(reward: float) -> None:
    if not (math.isfinite(reward) and 0 <= reward <= 1):
        raise StoreError(f"A reward is a number from 0 to 1, not {reward}.")


# ---- records to rows and back


def _pack_ints(array: Any) -> bytes:
    return np.asarray(array, dtype="<i4").tobytes()


def _pack_floats(array: Any) -> bytes | None:
    return None if array is None else np.asarray(array, dtype="<f4").tobytes()


def _unpack_ints(data: bytes | None) -> IntArray:
    return np.frombuffer(data or b"", dtype="<i4").astype(np.int32)


def _unpack_floats(data: bytes | None) -> FloatArray:
    return np.frombuffer(data or b"", dtype="<f4").astype(np.float32)


def _maybe_floats(data: bytes | None) -> FloatArray | None:
    return None if data is None else _unpack_floats(data)


def _first(values: FloatArray | None) -> float | None:
    if values is None or len(values) == 0 or not math.isfinite(values[0]):
        return None
    return float(values[0])


def _short_columns(rollout: Rollout) -> dict[str, Any]:
    verdict, preference = rollout.verdict, rollout.preference
    judge_state = rollout.judge_state
    if verdict is not None:
        judge_state = JudgeState.SCORED
    elif rollout.state == S.UNSCORED:
        judge_state = JudgeState.UNSCORED
    return {
        "seq": rollout.seq,
        "id": rollout.id,
        "response_id": rollout.response_id,
        "choice": rollout.choice,
        "created_at": rollout.created_at,
        "run_id": rollout.run_id,
        "state": rollout.state,
        "reason": rollout.reason,
        "judge_state": judge_state,
        "purpose": rollout.purpose,
        "session_id": rollout.session_id,
        "style": preference.style if preference else None,
        "preference_id": preference.event_id if preference else 0,
        "temperature": rollout.temperature,
        "finish_reason": rollout.finish_reason,
        "latency_s": rollout.latency_s,
        "weight_version_start": rollout.weight_version_start,
        "weight_version_end": rollout.weight_version_end,
        "num_prompt_tokens": len(rollout.prompt_token_ids),
        "num_action_tokens": len(rollout.token_ids),
        "reward": verdict.reward if verdict else None,
        "quality": verdict.quality if verdict else None,
        "style_match": verdict.style if verdict else None,
        "reward_source": verdict.source if verdict else None,
        "detected_style": verdict.detected_style if verdict else None,
        "num_claims": 0,
    }


def _detail_columns(rollout: Rollout) -> dict[str, Any]:
    preference = rollout.preference
    return {
        "seq": rollout.seq,
        "messages": rollout.messages,
        "answer": rollout.answer,
        "client_metadata": rollout.metadata,
        "preference": None
        if preference is None
        else {
            "style": preference.style,
            "pool": list(preference.pool),
            "note": preference.note,
            "event_id": preference.event_id,
            "created_at": preference.created_at.isoformat() if preference.created_at else None,
            "weight_version": preference.weight_version,
        },
        "weight_spans": _pack_ints(
            [(span.version, span.start, span.end) for span in rollout.weight_spans]
        ),
        **_verdict_texts(rollout.verdict),
    }


def _verdict_texts(verdict: StoredVerdict | None) -> dict[str, Any]:
    return {
        "rationale": verdict.rationale if verdict else None,
        "judge_model": verdict.model if verdict else None,
        "judge_latency_s": verdict.latency_s if verdict else None,
        "judge_cost": verdict.cost if verdict else None,
        "judge_raw": verdict.raw if verdict else None,
    }


def _token_columns(rollout: Rollout) -> dict[str, Any]:
    return {
        "seq": rollout.seq,
        "prompt_token_ids": _pack_ints(rollout.prompt_token_ids),
        "token_ids": _pack_ints(rollout.token_ids),
        "behavior_logprobs": _pack_floats(rollout.behavior_logprobs),
    }


_TURN_COLUMNS = ("trajectory_id", "turn", "parent_id", "new_trajectory")


def load_rollouts(conn: Connection, seqs: Sequence[int], *, with_tokens: bool) -> list[Rollout]:
    """The rollouts of `seqs`, in that order."""
    source = rollouts.join(rollout_details).outerjoin(turns, turns.c.seq == rollouts.c.seq)
    columns = [*rollouts.c, *(c for c in rollout_details.c if c.name != "seq")]
    columns += [c for c in turns.c if c.name in _TURN_COLUMNS]
    if with_tokens:
        source = source.outerjoin(rollout_tokens, rollout_tokens.c.seq == rollouts.c.seq)
        columns += [c for c in rollout_tokens.c if c.name != "seq"]
    query = sa.select(*columns).select_from(source)
    found: dict[int, Rollout] = {}
    for part in _chunks(seqs):
        for row in conn.execute(query.where(rollouts.c.seq.in_(part))).mappings():
            found[row["seq"]] = _rollout(row, with_tokens)
    return [found[seq] for seq in seqs]


def _rollout(row: Any, with_tokens: bool) -> Rollout:
    tokens: Any = row if with_tokens else {}
    spans = _unpack_ints(row["weight_spans"]).reshape(-1, 3).tolist()
    return Rollout(
        id=row["id"],
        response_id=row["response_id"],
        choice=row["choice"],
        prompt_token_ids=_unpack_ints(tokens.get("prompt_token_ids")),
        token_ids=_unpack_ints(tokens.get("token_ids")),
        behavior_logprobs=_unpack_floats(tokens.get("behavior_logprobs")),
        weight_spans=tuple(WeightSpan(*span) for span in spans),
        temperature=row["temperature"],
        messages=row["messages"],
        answer=row["answer"],
        finish_reason=row["finish_reason"],
        state=S(row["state"]),
        reason=row["reason"],
        judge_state=JudgeState(row["judge_state"]),
        purpose=Purpose(row["purpose"]),
        session_id=row["session_id"],
        parent_id=row["parent_id"],
        new_trajectory=row["new_trajectory"],
        trajectory_id=row["trajectory_id"],
        turn=row["turn"],
        run_id=row["run_id"],
        preference=_kept_preference(row["preference"]),
        verdict=None
        if row["reward"] is None
        else StoredVerdict(
            quality=row["quality"],
            style=row["style_match"],
            reward=row["reward"],
            source=row["reward_source"],
            detected_style=row["detected_style"],
            rationale=row["rationale"],
            model=row["judge_model"],
            latency_s=row["judge_latency_s"],
            cost=row["judge_cost"],
            raw=row["judge_raw"],
        ),
        metadata=row["client_metadata"],
        latency_s=row["latency_s"],
        seq=row["seq"],
        created_at=row["created_at"],
        trained_version=row["trained_version"],
        num_claims=row["num_claims"],
        values=_maybe_floats(tokens.get("values")),
        advantages=_maybe_floats(tokens.get("advantages")),
        importance_ratios=_maybe_floats(tokens.get("importance_ratios")),
    )


def _kept_preference(data: dict[str, Any] | None) -> Preference | None:
    if data is None:
        return None
    at = data["created_at"]
    return Preference(
        style=data["style"],
        pool=tuple(data["pool"]),
        note=data["note"],
        event_id=data["event_id"],
        created_at=datetime.fromisoformat(at) if at else None,
        weight_version=data["weight_version"],
    )


def _event_preference(event: Event) -> Preference:
    return Preference(
        style=event.data["style"],
        pool=tuple(event.data["pool"]),
        note=event.data["note"],
        event_id=event.id,
        created_at=event.created_at,
        weight_version=event.weight_version,
    )


def _event(row: sa.Row[Any]) -> Event:
    return Event(
        id=row.id,
        kind=row.kind,
        data=row.data,
        created_at=row.created_at,
        weight_version=row.weight_version,
    )


def _version(row: sa.Row[Any]) -> WeightVersion:
    return WeightVersion(
        version=row.version,
        parent=row.parent,
        run_id=row.run_id,
        kind=row.kind,
        metrics=row.metrics,
        created_at=row.created_at,
        published_at=row.published_at,
        checkpoint=row.checkpoint,
        pinned=row.pinned,
        abandoned=row.abandoned,
    )


def _run(row: sa.Row[Any]) -> Run:
    return Run(
        id=row.id,
        preset=row.preset,
        seed=row.seed,
        model=row.model,
        model_hash=row.model_hash,
        config=row.config,
        created_at=row.created_at,
    )
