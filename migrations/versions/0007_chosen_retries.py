"""Retries of chosen rows.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Up."""
    json = sa.Text().with_variant(mysql.LONGTEXT(), "mariadb").with_variant(mysql.LONGTEXT(), "mysql")
    op.add_column("tasks", sa.Column("turn_chosen", json, nullable=True))


def downgrade() -> None:
    """Down."""
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.drop_column("turn_chosen")
