"""The columns of a list, for reports.

Revision ID: 0010
Revises: 0008
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Up."""
    json = sa.Text().with_variant(mysql.LONGTEXT(), "mariadb").with_variant(mysql.LONGTEXT(), "mysql")
    op.add_column("tasks", sa.Column("headers", json, nullable=True))


def downgrade() -> None:
    """Down."""
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.drop_column("headers")
