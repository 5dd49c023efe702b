"""From 0.1.0: the ledger lends, Tasks have rounds, keys and callbacks, and corrected lists are followed.

Revision ID: 0014
Revises: 0002

It stands for the migrations 0003 to 0014 of the development. Only 0003 was ever released: 0.1.0 is stamped so, and
:mod:`asynctask.database.schema` takes that for 0002. The number is the last of them, because databases of the development
bear it, and have this schema.
"""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.mysql import LONGTEXT

revision = "0014"
down_revision = "0002"
branch_labels = None
depends_on = None

_MARIADB = {
    "mariadb_engine": "InnoDB",
    "mariadb_row_format": "DYNAMIC",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_nopad_bin",
}
_JSON = sa.Text().with_variant(LONGTEXT(), "mysql", "mariadb")
_KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_ZERO = sa.text("0")


def upgrade() -> None:
    """Up. MariaDB commits each statement: all of them may be run again, in this order, after any of them."""
    _create_tables()
    _add_columns()
    _wait_in_the_ledger()
    _drop_columns()
    _set_fillfactor(events=35, tasks=50)


def downgrade() -> None:
    """Down. What is lent waits from now on; rounds, keys, callbacks and corrections are forgotten."""
    _reset_fillfactor("events", "tasks")
    _wait_in_the_queues()
    _restore_columns()
    _remove_columns()
    for name in _TABLES:
        op.drop_table(name)


# -- tables

_TABLES = ("task_ancestors", "resubmitted_rows", "task_callbacks", "key_places", "queues", "places", "loans")


def _create_tables() -> None:
    op.create_table(
        "loans",
        sa.Column("id", _KEY, primary_key=True, autoincrement=True),
        sa.Column("task_id", sa.BigInteger(), nullable=False),
        sa.Column("low", sa.BigInteger(), nullable=False),
        sa.Column("high", sa.BigInteger(), nullable=False),
        sa.Column("process", sa.String(64)),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("asked", sa.BigInteger()),
        sqlite_autoincrement=True,  # the id of a loan that ended is never given again
        **_MARIADB,
    )
    op.create_index("ix_loans_task", "loans", ["task_id", "process", "low"])
    op.create_index("ix_loans_process", "loans", ["process"])
    op.create_table(
        "places",
        sa.Column("task_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("process", sa.String(64), primary_key=True),
        sa.Column("n", sa.Integer(), nullable=False),
        **_MARIADB,
    )
    op.create_index("ix_places_process", "places", ["process"])
    op.create_table(
        "queues",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("paused", sa.Integer(), server_default=_ZERO, nullable=False),
        **_MARIADB,
    )
    op.create_table(
        "key_places",
        sa.Column("event_id", _KEY, primary_key=True, autoincrement=False),
        sa.Column("line", sa.BigInteger(), nullable=False),
        sa.Column("place", sa.BigInteger(), nullable=False),
        **_MARIADB,
    )
    op.create_index("ix_key_places_line", "key_places", ["line", "place", "event_id"])
    op.create_table(
        "task_callbacks",
        sa.Column("task_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("generation", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("name", sa.String(16), primary_key=True),
        sa.Column("worker_name", sa.String(255), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        **_MARIADB,
    )
    op.create_table(
        "resubmitted_rows",
        sa.Column("id", _KEY, primary_key=True, autoincrement=True),
        sa.Column("task_id", sa.BigInteger()),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("row", sa.BigInteger(), nullable=False),
        sa.Column("of_task", sa.BigInteger()),
        sa.Column("of_row", sa.BigInteger(), nullable=False),
        sa.Column("taken", sa.Integer()),
        sa.UniqueConstraint("task_id", "number", name="uq_resubmitted_rows_number"),
        sa.UniqueConstraint("of_task", "of_row", "taken", name="uq_resubmitted_rows_taken"),
        **_MARIADB,
    )
    op.create_index("ix_resubmitted_rows_row", "resubmitted_rows", ["task_id", "row"])
    op.create_table(
        "task_ancestors",
        sa.Column("ancestor_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("task_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        **_MARIADB,
    )
    op.create_index("ix_task_ancestors_task_id", "task_ancestors", ["task_id"])


# -- columns


def _added() -> dict[str, list[sa.Column]]:
    return {
        "tasks": [
            sa.Column("round_at", sa.BigInteger()),
            sa.Column("round_jobs", _JSON),
            sa.Column("callbacks", _JSON),
            sa.Column("key_field", sa.String(255)),
            sa.Column("turn_chosen", _JSON),
            sa.Column("mended", sa.BigInteger(), server_default=_ZERO, nullable=False),
            sa.Column("headers", _JSON),
        ],
        "events": [
            sa.Column("callback_of", sa.BigInteger()),
            sa.Column("line", sa.BigInteger()),
            sa.Column("stopping", sa.Integer(), server_default=_ZERO, nullable=False),
            sa.Column("marks", _JSON),
        ],
        "processes": [sa.Column("held_at", sa.BigInteger()), sa.Column("held_jobs", _JSON)],
    }


def _dropped() -> dict[str, list[sa.Column]]:
    return {
        "tasks": [
            sa.Column("on_complete", sa.String(255)),  # it was never written
            sa.Column("low_seq", sa.BigInteger(), server_default=_ZERO, nullable=False),
            sa.Column("reserved_from", sa.BigInteger()),
            sa.Column("dispatch_by", sa.String(64)),
            sa.Column("dispatch_until", sa.BigInteger()),
        ],
        "events": [sa.Column("look_at", sa.BigInteger())],
        "task_tallies": [
            sa.Column("dispatched", sa.BigInteger(), server_default=_ZERO, nullable=False),
            sa.Column("returned", sa.BigInteger(), server_default=_ZERO, nullable=False),
        ],
    }


def _add_columns() -> None:
    _add(_added())
    _partial_index("ix_tasks_split_until", "tasks", "split_until")


def _drop_columns() -> None:
    op.drop_index("ix_events_look", table_name="events")
    op.drop_index("ix_tasks_dispatch_until", table_name="tasks")
    _drop(_dropped())


def _restore_columns() -> None:
    _add(_dropped())
    _partial_index("ix_events_look", "events", "look_at")
    _partial_index("ix_tasks_dispatch_until", "tasks", "dispatch_until")
    op.execute(_FLYING)


def _remove_columns() -> None:
    op.drop_index("ix_tasks_split_until", table_name="tasks")
    _drop(_added())


def _add(columns: dict[str, list[sa.Column]]) -> None:
    for table, added in columns.items():
        for column in added:
            op.add_column(table, column)


def _drop(columns: dict[str, list[sa.Column]]) -> None:
    for table, dropped in columns.items():
        with op.batch_alter_table(table) as batch_op:  # on SQLite one copy of the table for all of them
            for column in dropped:
                batch_op.drop_column(column.name)


def _partial_index(name: str, table: str, column: str) -> None:
    where = sa.text(f"{column} IS NOT NULL")
    op.create_index(name, table, [column], sqlite_where=where, postgresql_where=where)


# -- rows

# What was in a queue, or lent to follow another job, waits under a new attempt: a copy that is left is dropped.
_OUT = (
    "UPDATE events SET attempt = attempt + 1, due_at = :now, process = NULL WHERE status = 'enqueue' AND due_at IS NULL AND"
    " (EXISTS (SELECT 1 FROM tasks t WHERE t.id = events.task_id AND events.seq < t.next_seq)"
    " OR (task_id IS NULL AND {held} IS NOT NULL))"
)
# As ``asynctask.core.readiness`` decides. 0.1.0 took the hint of a Task whose ``parallel`` was used up.
_HINTS = (
    "UPDATE tasks SET ready = CASE WHEN state IN ('splitting', 'running') AND next_seq < created_jobs"
    " AND (session_key IS NULL OR session_holder IS NOT NULL) THEN priority END,"
    " due_next = CASE WHEN state IN ('splitting', 'running', 'paused') THEN"
    " (SELECT MIN(e.due_at) FROM events e WHERE e.task_id = tasks.id AND e.due_at IS NOT NULL) END"
    " WHERE finished_at IS NULL"
)
# What waits for its turn in the line of a key has the year 9999; 0.1.0 knows no keys.
_UNBLOCKED = "UPDATE events SET due_at = :now WHERE due_at = 253402300799000000"
# What runs is in flight, by the counts.
_FLYING = (
    "UPDATE task_tallies SET dispatched = (SELECT COUNT(*) FROM events e JOIN tasks t ON t.id = e.task_id"
    " WHERE e.task_id = task_tallies.task_id AND e.status = 'working' AND e.seq < t.next_seq)"
    " WHERE slot = (SELECT f.slot FROM (SELECT task_id, MIN(slot) AS slot FROM task_tallies GROUP BY task_id) f"
    " WHERE f.task_id = task_tallies.task_id)"
)


def _wait_in_the_ledger() -> None:
    now = {"now": time.time_ns() // 1_000}
    connection = op.get_bind()
    if "look_at" in {each["name"] for each in sa.inspect(connection).get_columns("events")}:  # else it is done already
        connection.execute(sa.text(_OUT.format(held="look_at")), now)
    connection.execute(sa.text(_HINTS))
    connection.execute(sa.text("DELETE FROM jobs WHERE attempt > 0"))


def _wait_in_the_queues() -> None:
    now = {"now": time.time_ns() // 1_000}
    connection = op.get_bind()
    connection.execute(sa.text(_OUT.format(held="process")), now)
    connection.execute(sa.text(_UNBLOCKED), now)
    connection.execute(sa.text(_HINTS))


# -- room on the pages of PostgreSQL, where an outcome and a borrow write a row anew; rows that are there do not move


def _set_fillfactor(**percent: int) -> None:
    if op.get_context().dialect.name == "postgresql":
        for table, number in percent.items():
            op.execute(f"ALTER TABLE {table} SET (fillfactor = {number})")


def _reset_fillfactor(*tables: str) -> None:
    if op.get_context().dialect.name == "postgresql":
        for table in tables:
            op.execute(f"ALTER TABLE {table} RESET (fillfactor)")
