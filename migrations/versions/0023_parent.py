"""A Task that a job of another Task submitted has that Task as its parent.

Revision ID: 0023
Revises: 0022
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None
processes_go_on = True

_INDEX = "ix_tasks_parent"


def _columns() -> list[sa.Column[object]]:
    return [
        sa.Column("parent", sa.BigInteger),
        sa.Column("children", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("going_down", sa.String(16)),
    ]


def upgrade() -> None:
    """Up. Processes of 0022 go on: what their jobs submit has no parent, and they close a parent without its children."""
    columns, indexes = _known()
    for column in _columns():
        if column.name not in columns:
            op.add_column("tasks", column)
    if _INDEX not in indexes:
        where = sa.text("parent IS NOT NULL")
        op.create_index(_INDEX, "tasks", ["parent", "finished_at"], postgresql_where=where, sqlite_where=where)


def downgrade() -> None:
    """Down. Children go on as Tasks of their own."""
    columns, indexes = _known()
    if _INDEX in indexes:
        op.drop_index(_INDEX, table_name="tasks")
    for column in _columns():
        if column.name in columns:
            op.drop_column("tasks", str(column.name))


def _known() -> tuple[set[str], set[str | None]]:
    # MariaDB commits each change by itself: after a failure, what is done is found done.
    of_tasks = sa.inspect(op.get_bind())
    columns = {str(each["name"]) for each in of_tasks.get_columns("tasks")}
    return columns, {each["name"] for each in of_tasks.get_indexes("tasks")}
