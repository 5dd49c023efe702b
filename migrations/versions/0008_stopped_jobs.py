"""Jobs that a user asked to stop.

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Up."""
    op.add_column("events", sa.Column("stopping", sa.Integer(), server_default=sa.text("0"), nullable=False))


def downgrade() -> None:
    """Down."""
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.drop_column("stopping")
