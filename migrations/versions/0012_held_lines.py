"""Who holds the line of a key, apart from those that wait for it.

Revision ID: 0012
Revises: 0011
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_PASSED = (
    "UPDATE key_places SET passed = 1 WHERE holds = 0 AND EXISTS (SELECT 1 FROM events e JOIN tasks t ON t.id = e.task_id"
    " WHERE e.id = key_places.event_id AND e.seq < t.next_seq)"
)
_COLUMNS = ["line", "holds", "place", "event_id"]


def _has_partial_indexes() -> bool:
    return op.get_bind().dialect.name != "mariadb"


def upgrade() -> None:
    """Up."""
    op.add_column("key_places", sa.Column("passed", sa.Integer(), server_default=sa.text("0"), nullable=False))
    op.execute(_PASSED)
    if _has_partial_indexes():
        free, held = sa.text("holds = 0"), sa.text("holds = 1")
        op.drop_index("ix_key_places_line", table_name="key_places")
        op.create_index("ix_key_places_line", "key_places", _COLUMNS, sqlite_where=free, postgresql_where=free)
        op.create_index("ix_key_places_held", "key_places", ["line"], sqlite_where=held, postgresql_where=held)


def downgrade() -> None:
    """Down."""
    if _has_partial_indexes():
        op.drop_index("ix_key_places_held", table_name="key_places")
        op.drop_index("ix_key_places_line", table_name="key_places")
        op.create_index("ix_key_places_line", "key_places", _COLUMNS)
    with op.batch_alter_table("key_places", schema=None) as batch_op:
        batch_op.drop_column("passed")
