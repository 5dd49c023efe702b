"""A position in a line is named so: *place* means the right to run a job.

Revision ID: 0018
Revises: 0017
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Up. Processes of 0017 do not survive it: they name the old columns."""
    _rename_column("tasks", "session_place", "session_position")
    _rename_table("key_places", "key_positions")
    _rename_column("key_positions", "place", "position")
    _rename_indexes("key_places", "key_positions", "position")


def downgrade() -> None:
    """Down."""
    _rename_column("tasks", "session_position", "session_place")
    _rename_table("key_positions", "key_places")
    _rename_column("key_places", "position", "place")
    _rename_indexes("key_positions", "key_places", "place")


# MariaDB commits each change by itself: after a failure, what is done is found done.


def _rename_table(old: str, new: str) -> None:
    if old in sa.inspect(op.get_bind()).get_table_names():
        op.rename_table(old, new)


def _rename_column(table: str, old: str, new: str) -> None:
    # Not by Alembic, which copies the table on SQLite; SQLite renames columns itself since 3.25.
    if old in {each["name"] for each in sa.inspect(op.get_bind()).get_columns(table)}:
        op.execute(f"ALTER TABLE {table} RENAME COLUMN {old} TO {new}")


def _rename_indexes(old: str, new: str, column: str) -> None:
    connection = op.get_bind()
    names = {each["name"] for each in sa.inspect(connection).get_indexes(new)}
    if f"ix_{new}_line" not in names:
        op.create_index(f"ix_{new}_line", new, ["line", column, "event_id"])
    if f"ix_{old}_line" in names:
        op.drop_index(f"ix_{old}_line", new)
    if connection.dialect.name == "postgresql":
        op.execute(f"ALTER INDEX pk_{old} RENAME TO pk_{new}")
