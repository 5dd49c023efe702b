"""The first in the line of a key goes: no place says whether it does.

Revision ID: 0013
Revises: 0012
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

# Of what the pointer of its Task has passed, what is due in the year 9999 waits for its turn.
_PASSED = (
    "UPDATE key_places SET passed = 1 WHERE EXISTS (SELECT 1 FROM events e"
    " WHERE e.id = key_places.event_id AND e.due_at = 253402300799000000)"
)
_HOLDS = (
    "UPDATE key_places SET holds = 1 WHERE passed = 0 AND EXISTS (SELECT 1 FROM events e JOIN tasks t ON t.id = e.task_id"
    " WHERE e.id = key_places.event_id AND e.seq < t.next_seq AND (SELECT count(*) FROM key_places w"
    " WHERE w.line = key_places.line AND (w.place < key_places.place"
    " OR (w.place = key_places.place AND w.event_id < key_places.event_id))) = 0)"
)


def _has_partial_indexes() -> bool:
    return op.get_bind().dialect.name != "mariadb"


def upgrade() -> None:
    """Up."""
    if _has_partial_indexes():
        op.drop_index("ix_key_places_held", table_name="key_places")
    op.drop_index("ix_key_places_line", table_name="key_places")
    if "holds" in {each["name"] for each in sa.inspect(op.get_bind()).get_columns("key_places")}:  # not so far yet
        op.execute("UPDATE key_places SET place = 0 WHERE holds = 1")  # before the others of their lines
    with op.batch_alter_table("key_places", schema=None) as batch_op:
        batch_op.drop_column("holds")
        batch_op.drop_column("passed")
    op.create_index("ix_key_places_line", "key_places", ["line", "place", "event_id"])


def downgrade() -> None:
    """Down."""
    op.drop_index("ix_key_places_line", table_name="key_places")
    for name in ("holds", "passed"):
        op.add_column("key_places", sa.Column(name, sa.Integer(), server_default=sa.text("0"), nullable=False))
    op.execute(_PASSED)
    op.execute(_HOLDS)
    columns = ["line", "holds", "place", "event_id"]
    if _has_partial_indexes():
        free, held = sa.text("holds = 0"), sa.text("holds = 1")
        op.create_index("ix_key_places_line", "key_places", columns, sqlite_where=free, postgresql_where=free)
        op.create_index("ix_key_places_held", "key_places", ["line"], sqlite_where=held, postgresql_where=held)
    else:
        op.create_index("ix_key_places_line", "key_places", columns)
