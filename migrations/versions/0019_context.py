"""A Task keeps the constants that its submission gave to all of its jobs.

Revision ID: 0019
Revises: 0018
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.mysql import LONGTEXT

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Up. Processes of 0018 go on: the jobs that they perform have no context."""
    op.add_column("tasks", sa.Column("context", sa.Text().with_variant(LONGTEXT(), "mysql", "mariadb")))


def downgrade() -> None:
    """Down. Jobs that begin from now on have no context."""
    op.drop_column("tasks", "context")
