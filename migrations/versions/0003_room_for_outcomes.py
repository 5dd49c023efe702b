"""Room beside each Event on PostgreSQL, where its outcome is written.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Up. Of rows that are there already nothing moves."""
    if op.get_context().dialect.name == "postgresql":
        op.execute("ALTER TABLE events SET (fillfactor = 35)")


def downgrade() -> None:
    """Down."""
    if op.get_context().dialect.name == "postgresql":
        op.execute("ALTER TABLE events RESET (fillfactor)")
