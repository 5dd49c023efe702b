"""What each item of a slice came to.

Revision ID: 0011
Revises: 0010
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.mysql import LONGTEXT

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Up."""
    op.add_column("events", sa.Column("marks", sa.Text().with_variant(LONGTEXT(), "mysql", "mariadb"), nullable=True))


def downgrade() -> None:
    """Down."""
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.drop_column("marks")
