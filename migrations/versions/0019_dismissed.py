"""A job that ended in an error may be dismissed from the dead ones.

Revision ID: 0019
Revises: 0018
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None
processes_go_on = True


def upgrade() -> None:
    """Up. Processes of 0018 go on: they list what is dismissed."""
    op.add_column("events", sa.Column("dismissed", sa.BigInteger))


def downgrade() -> None:
    """Down. What was dismissed is listed again."""
    op.drop_column("events", "dismissed")
