"""A Task may have a time before which nothing of it begins.

Revision ID: 0017
Revises: 0016
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None
processes_go_on = True


def upgrade() -> None:
    """Up. Processes of 0016 go on: they start such a Task at once."""
    op.add_column("tasks", sa.Column("start_at", sa.BigInteger))


def downgrade() -> None:
    """Down. What waits for its time starts with the next borrow."""
    op.drop_column("tasks", "start_at")
