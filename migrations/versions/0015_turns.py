"""A job that runs again after its end has a place in the line of its key from then on, and lines go on without a lock.

Revision ID: 0015
Revises: 0014
"""

from __future__ import annotations

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

# The jobs of Task n had the place 2 n, what ran again after it 2 n + 1, and what had begun to 0.
_WIDER = "UPDATE key_places SET place = (place - place % 2) / 2 * 1048576 + place % 2"
_MISSING = (
    "INSERT INTO key_places (event_id, line, place)"
    " SELECT id, line, (SELECT MAX(id) FROM tasks) * 1048576 + 1 FROM events WHERE line IS NOT NULL"
    " AND status IN ('enqueue', 'working', 'stopped')"
    " AND NOT EXISTS (SELECT 1 FROM key_places k WHERE k.event_id = events.id)"
)
_NARROWER = (
    "UPDATE key_places SET place = (place - place % 1048576) / 1048576 * 2"
    " + CASE WHEN place % 1048576 > 0 THEN 1 ELSE 0 END"
)


def upgrade() -> None:
    """Up."""
    op.execute(_WIDER)
    op.execute(_MISSING)


def downgrade() -> None:
    """Down."""
    op.execute(_NARROWER)
