"""The first schema, as it was (releases before migrations had no other)."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "counters",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "events",
        sa.Column("id", SEQ, autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("weight_version", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_events_kind", "events", ["kind", "id"])
    op.create_table(
        "rollouts",
        sa.Column("seq", SEQ, autoincrement=False, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("response_id", sa.Text(), nullable=False),
        sa.Column("choice", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("judge_state", sa.String(length=16), nullable=False),
        sa.Column("purpose", sa.String(length=16), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=True),
        sa.Column("style", sa.Text(), nullable=True),
        sa.Column("preference_id", sa.BigInteger(), nullable=False),
        sa.Column("temperature", sa.Double(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("latency_s", sa.Double(), nullable=True),
        sa.Column("weight_version_start", sa.BigInteger(), nullable=False),
        sa.Column("weight_version_end", sa.BigInteger(), nullable=False),
        sa.Column("num_prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("num_action_tokens", sa.Integer(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("quality", sa.Double(), nullable=True),
        sa.Column("style_match", sa.Double(), nullable=True),
        sa.Column("reward_source", sa.String(length=16), nullable=True),
        sa.Column("detected_style", sa.Text(), nullable=True),
        sa.Column("num_claims", sa.Integer(), nullable=False),
        sa.Column("claimed_epoch", sa.BigInteger(), nullable=True),
        sa.Column("trained_version", sa.BigInteger(), nullable=True),
        sa.Column("trained_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("value_first", sa.Double(), nullable=True),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("seq"),
        sa.UniqueConstraint("id"),
    )
    op.create_index("ix_rollouts_created_at", "rollouts", ["created_at"])
    op.create_index(
        "ix_rollouts_pretraining",
        "rollouts",
        ["state", "seq"],
        sqlite_where=sa.text("purpose = 'pretraining'"),
        postgresql_where=sa.text("purpose = 'pretraining'"),
    )
    op.create_index(
        "ix_rollouts_reason",
        "rollouts",
        ["state", "reason"],
        sqlite_where=sa.text("reason IS NOT NULL"),
        postgresql_where=sa.text("reason IS NOT NULL"),
    )
    op.create_index("ix_rollouts_response_id", "rollouts", ["response_id"])
    op.create_index("ix_rollouts_run", "rollouts", ["run_id", "seq"])
    op.create_index("ix_rollouts_session", "rollouts", ["session_id", "seq"])
    op.create_index("ix_rollouts_state", "rollouts", ["state", "seq"])
    op.create_index("ix_rollouts_style", "rollouts", ["style", "seq"])
    op.create_index("ix_rollouts_trained", "rollouts", ["trained_version"])
    op.create_index(
        "ix_rollouts_waiting",
        "rollouts",
        ["seq"],
        sqlite_where=sa.text("judge_state = 'waiting'"),
        postgresql_where=sa.text("judge_state = 'waiting'"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("started", sa.BigInteger(), nullable=False),
        sa.Column("preset", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("model_hash", sa.Text(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_runs_started", "runs", ["started"])
    op.create_table(
        "versions",
        sa.Column("version", SEQ, autoincrement=False, nullable=False),
        sa.Column("parent", sa.BigInteger(), nullable=True),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("published_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("checkpoint", sa.Text(), nullable=True),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("abandoned", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("version"),
    )
    op.create_index(
        "ix_versions_abandoned",
        "versions",
        ["version"],
        sqlite_where=sa.text("abandoned = 1"),
        postgresql_where=sa.text("abandoned = true"),
    )
    op.create_index(
        "ix_versions_checkpoint",
        "versions",
        ["version"],
        sqlite_where=sa.text("checkpoint IS NOT NULL"),
        postgresql_where=sa.text("checkpoint IS NOT NULL"),
    )
    op.create_index("ix_versions_run", "versions", ["run_id", "version"])
    op.create_table(
        "feedback",
        sa.Column("id", SEQ, autoincrement=True, nullable=False),
        sa.Column("seq", SEQ, nullable=False),
        sa.Column("source", sa.String(length=16), nullable=False),
        sa.Column("reward", sa.Double(), nullable=False),
        sa.Column("quality", sa.Double(), nullable=True),
        sa.Column("style_match", sa.Double(), nullable=True),
        sa.Column("comment", sa.Text(), nullable=True),
        sa.Column("used", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["seq"], ["rollouts.seq"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_feedback_seq", "feedback", ["seq"])
    op.create_table(
        "rollout_details",
        sa.Column("seq", SEQ, autoincrement=False, nullable=False),
        sa.Column("messages", sa.Text(), nullable=True),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.Column("client_metadata", sa.Text(), nullable=False),
        sa.Column("preference", sa.Text(), nullable=True),
        sa.Column("weight_spans", sa.LargeBinary(), nullable=False),
        sa.Column("rationale", sa.Text(), nullable=True),
        sa.Column("judge_model", sa.Text(), nullable=True),
        sa.Column("judge_latency_s", sa.Double(), nullable=True),
        sa.Column("judge_cost", sa.Double(), nullable=True),
        sa.Column("judge_raw", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["seq"], ["rollouts.seq"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_table(
        "rollout_tokens",
        sa.Column("seq", SEQ, autoincrement=False, nullable=False),
        sa.Column("prompt_token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("behavior_logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("values", sa.LargeBinary(), nullable=True),
        sa.Column("advantages", sa.LargeBinary(), nullable=True),
        sa.Column("importance_ratios", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["seq"], ["rollouts.seq"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("seq"),
    )
