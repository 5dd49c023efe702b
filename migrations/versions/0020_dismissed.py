"""A job that ended in an error may be dismissed from the dead ones.

Revision ID: 0020
Revises: 0019
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None
processes_go_on = True


def upgrade() -> None:
    """Up. Processes of 0019 go on: they list what is dismissed."""
    op.add_column("events", sa.Column("dismissed", sa.BigInteger))


def downgrade() -> None:
    """Down. What was dismissed is listed again."""
    op.drop_column("events", "dismissed")
