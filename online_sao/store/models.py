"""Tables of the store. SQLite and PostgreSQL share them.

A rollout is three rows that share `seq`: `rollouts` holds short columns only, so that
listing, counting and charts stay quick with a million of them; `rollout_details` holds
texts; `rollout_tokens` holds the per-token arrays as little-endian int32 / float32 bytes.
"""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

# Raised together with a new revision in migrations/versions (docs/operations.md, "Upgrade").
SCHEMA_VERSION = 3

metadata = sa.MetaData()


class UtcTime(sa.TypeDecorator[datetime]):
    """A time in UTC. SQLite keeps no zone, so it is taken off there and put back."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("times must carry a time zone")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class CleanText(sa.TypeDecorator[str]):
    """Text that every database takes: NUL and lone surrogates become U+FFFD."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        return None if value is None else clean_text(value)


class Json(sa.TypeDecorator[Any]):
    """JSON as text. Numbers that are not finite become null; numpy scalars are taken."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str | None:
        if value is None:
            return None
        value = _plain(value)
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        try:
            text.encode()
        except UnicodeEncodeError:  # a lone surrogate: only its escape can be stored
            text = json.dumps(value, allow_nan=False, separators=(",", ":"))
        return text

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Any:
        return None if value is None else json.loads(value)


def clean_text(text: str) -> str:
    text = text.replace("\x00", "\ufffd")
    try:
        text.encode()
    except UnicodeEncodeError:
        text = "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in text)
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


# Small integers taken in order: the schema's version, the learner's epoch, the number of
# rollouts, events and run starts. A writer locks the row it needs, so numbers come without
# gaps and become visible in order, on both databases.
counters = sa.Table(
    "counters",
    metadata,
    sa.Column("name", sa.String(32), primary_key=True),
    sa.Column("value", sa.BigInteger, nullable=False),
)
COUNTERS = ("epoch", "rollouts", "events", "run_starts")

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("started", sa.BigInteger, nullable=False, index=True),  # order of (re)starts
    sa.Column("preset", sa.Text, nullable=False),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("model_hash", sa.Text, nullable=False),
    sa.Column("config", Json, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
)

_Seq = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # SQLite: the row's own number

rollouts = sa.Table(
    "rollouts",
    metadata,
    sa.Column("seq", _Seq, primary_key=True, autoincrement=False),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("response_id", sa.Text, nullable=False, index=True),
    sa.Column("choice", sa.Integer, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False, index=True),
    sa.Column("run_id", sa.Text),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("reason", CleanText),
    sa.Column("judge_state", sa.String(16), nullable=False),
    sa.Column("purpose", sa.String(16), nullable=False),
    sa.Column("session_id", CleanText),
    sa.Column("style", CleanText),  # the preferred style when it was made
    sa.Column("preference_id", sa.BigInteger, nullable=False),  # its event; 0: not stored
    sa.Column("temperature", sa.Double, nullable=False),
    sa.Column("finish_reason", sa.Text),
    sa.Column("latency_s", sa.Double),
    sa.Column("weight_version_start", sa.BigInteger, nullable=False),
    sa.Column("weight_version_end", sa.BigInteger, nullable=False),
    sa.Column("num_prompt_tokens", sa.Integer, nullable=False),
    sa.Column("num_action_tokens", sa.Integer, nullable=False),
    # the verdict's marks; reward is null while there is none
    sa.Column("reward", sa.Double),
    sa.Column("quality", sa.Double),
    sa.Column("style_match", sa.Double),
    sa.Column("reward_source", sa.String(16)),
    sa.Column("detected_style", CleanText),
    # the learner's
    sa.Column("num_claims", sa.Integer, nullable=False),
    sa.Column("claimed_epoch", sa.BigInteger),
    sa.Column("trained_version", sa.BigInteger),
    sa.Column("trained_at", UtcTime),
    sa.Column("value_first", sa.Double),  # critic's value at the first action token
    sa.Column("deleted_at", UtcTime),  # when texts and token ids were removed
    sa.Index("ix_rollouts_state", "state", "seq"),
    sa.Index("ix_rollouts_run", "run_id", "seq"),
    sa.Index("ix_rollouts_session", "session_id", "seq"),
    sa.Index("ix_rollouts_style", "style", "seq"),
    sa.Index("ix_rollouts_trained", "trained_version"),
)
sa.Index(
    "ix_rollouts_waiting",
    rollouts.c.seq,
    sqlite_where=rollouts.c.judge_state == sa.literal_column("'waiting'"),
    postgresql_where=rollouts.c.judge_state == sa.literal_column("'waiting'"),
)
sa.Index(
    "ix_rollouts_reason",
    rollouts.c.state,
    rollouts.c.reason,
    sqlite_where=rollouts.c.reason.isnot(None),
    postgresql_where=rollouts.c.reason.isnot(None),
)
sa.Index(
    "ix_rollouts_pretraining",
    rollouts.c.state,
    rollouts.c.seq,
    sqlite_where=rollouts.c.purpose == sa.literal_column("'pretraining'"),
    postgresql_where=rollouts.c.purpose == sa.literal_column("'pretraining'"),
)
sa.Index(
    "ix_rollouts_probe",
    rollouts.c.state,
    rollouts.c.seq,
    sqlite_where=rollouts.c.purpose == sa.literal_column("'probe'"),
    postgresql_where=rollouts.c.purpose == sa.literal_column("'probe'"),
)


def _rollout_key() -> sa.Column[int]:
    return sa.Column(
        "seq",
        _Seq,
        sa.ForeignKey("rollouts.seq", ondelete="CASCADE"),
        primary_key=True,
        autoincrement=False,
    )


rollout_details = sa.Table(
    "rollout_details",
    metadata,
    _rollout_key(),
    sa.Column("messages", Json),
    sa.Column("answer", CleanText, nullable=False),
    sa.Column("client_metadata", Json, nullable=False),
    sa.Column("preference", Json),
    sa.Column("weight_spans", sa.LargeBinary, nullable=False),  # int32 triples
    sa.Column("rationale", CleanText),
    sa.Column("judge_model", sa.Text),
    sa.Column("judge_latency_s", sa.Double),
    sa.Column("judge_cost", sa.Double),
    sa.Column("judge_raw", CleanText),
)

rollout_tokens = sa.Table(
    "rollout_tokens",
    metadata,
    _rollout_key(),
    sa.Column("prompt_token_ids", sa.LargeBinary, nullable=False),
    sa.Column("token_ids", sa.LargeBinary, nullable=False),
    sa.Column("behavior_logprobs", sa.LargeBinary, nullable=False),
    sa.Column("values", sa.LargeBinary),
    sa.Column("advantages", sa.LargeBinary),
    sa.Column("importance_ratios", sa.LargeBinary),
)

# Conversations. One without `closed_at` is open.
sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("id", CleanText, primary_key=True),
    sa.Column("opened_at", UtcTime, nullable=False),
    sa.Column("active_at", UtcTime, nullable=False),
    sa.Column("closed_at", UtcTime),
    sa.Column("close_reason", sa.String(16)),
)
sa.Index(
    "ix_sessions_open",
    sessions.c.active_at,
    sqlite_where=sessions.c.closed_at.is_(None),
    postgresql_where=sessions.c.closed_at.is_(None),
)

# Where a rollout of a session stands. Rollouts of one trajectory continue one another's tokens.
turns = sa.Table(
    "turns",
    metadata,
    _rollout_key(),
    sa.Column("session_id", CleanText, nullable=False, index=True),
    sa.Column("trajectory_seq", sa.BigInteger, nullable=False),  # seq of its first rollout
    sa.Column("trajectory_id", sa.Text, nullable=False),  # id of its first rollout
    sa.Column("turn", sa.Integer, nullable=False),
    sa.Column("parent_id", sa.Text),
    sa.Column("new_trajectory", CleanText),
    sa.Index("ix_turns_trajectory", "trajectory_seq", "turn"),
)

# Every feedback, and every verdict that came too late to be used.
feedback = sa.Table(
    "feedback",
    metadata,
    sa.Column("id", _Seq, primary_key=True, autoincrement=True),
    sa.Column(
        "seq",
        _Seq,
        sa.ForeignKey("rollouts.seq", ondelete="CASCADE"),
        nullable=False,
        index=True,
    ),
    sa.Column("source", sa.String(16), nullable=False),
    sa.Column("reward", sa.Double, nullable=False),
    sa.Column("quality", sa.Double),
    sa.Column("style_match", sa.Double),
    sa.Column("comment", CleanText),
    sa.Column("used", sa.Boolean, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
)

versions = sa.Table(
    "versions",
    metadata,
    sa.Column("version", _Seq, primary_key=True, autoincrement=False),
    sa.Column("parent", sa.BigInteger),
    sa.Column("run_id", sa.Text, nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("metrics", Json, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("published_at", UtcTime),
    sa.Column("checkpoint", CleanText),
    sa.Column("pinned", sa.Boolean, nullable=False),
    # on a line of weights that a rollback left
    sa.Column("abandoned", sa.Boolean, nullable=False, default=False),
    sa.Index("ix_versions_run", "run_id", "version"),
)
sa.Index(
    "ix_versions_abandoned",
    versions.c.version,
    sqlite_where=versions.c.abandoned == sa.true(),
    postgresql_where=versions.c.abandoned == sa.true(),
)

sa.Index(
    "ix_versions_checkpoint",
    versions.c.version,
    sqlite_where=versions.c.checkpoint.isnot(None),
    postgresql_where=versions.c.checkpoint.isnot(None),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("id", _Seq, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("data", Json, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("weight_version", sa.BigInteger),
    sa.Index("ix_events_kind", "kind", "id"),
)
