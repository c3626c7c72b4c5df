"""Conversations, and where a rollout stands in one."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("active_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("closed_at", sa.DateTime(timezone=True)),
        sa.Column("close_reason", sa.String(16)),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        "ix_sessions_open",
        "sessions",
        ["active_at"],
        sqlite_where=sa.text("closed_at IS NULL"),
        postgresql_where=sa.text("closed_at IS NULL"),
    )
    op.create_table(
        "turns",
        sa.Column("seq", SEQ, autoincrement=False, nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("trajectory_seq", sa.BigInteger(), nullable=False),
        sa.Column("trajectory_id", sa.Text(), nullable=False),
        sa.Column("turn", sa.Integer(), nullable=False),
        sa.Column("parent_id", sa.Text()),
        sa.Column("new_trajectory", sa.Text()),
        sa.ForeignKeyConstraint(["seq"], ["rollouts.seq"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("ix_turns_session_id", "turns", ["session_id"])
    op.create_index("ix_turns_trajectory", "turns", ["trajectory_seq", "turn"])
