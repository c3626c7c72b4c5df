"""Held-out probes are found without a walk through all rollouts."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_index(
        "ix_rollouts_probe",
        "rollouts",
        ["state", "seq"],
        sqlite_where=sa.text("purpose = 'probe'"),
        postgresql_where=sa.text("purpose = 'probe'"),
    )
