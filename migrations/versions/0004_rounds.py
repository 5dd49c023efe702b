"""The rounds of Tasks with an interval.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Up."""
    op.add_column("tasks", sa.Column("round_at", sa.BigInteger(), nullable=True))
    text = sa.Text().with_variant(mysql.LONGTEXT(), "mariadb").with_variant(mysql.LONGTEXT(), "mysql")
    op.add_column("tasks", sa.Column("round_jobs", text, nullable=True))


def downgrade() -> None:
    """Down."""
    op.drop_column("tasks", "round_jobs")
    op.drop_column("tasks", "round_at")
