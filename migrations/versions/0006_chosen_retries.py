"""Retries of chosen rows.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0006"
down_revision = "0005"
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
