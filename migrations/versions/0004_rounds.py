"""The rounds of Tasks with an interval.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Up."""
    op.add_column("tasks", sa.Column("round_at", sa.BigInteger(), nullable=True))
    op.add_column("tasks", sa.Column("round_jobs", sa.Text(), nullable=True))


def downgrade() -> None:
    """Down."""
    op.drop_column("tasks", "round_jobs")
    op.drop_column("tasks", "round_at")
