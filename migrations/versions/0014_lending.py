"""The ledger lends: processes borrow ranges of Events, and nothing of a Task's jobs lies in a queue of our own.

Revision ID: 0014
Revises: 0013
"""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.mysql import LONGTEXT

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

# What was in a queue, or lent to follow another job, waits again under a new attempt: a copy that is left is dropped.
_OUT = (
    "UPDATE events SET attempt = attempt + 1, due_at = :now, process = NULL WHERE status = 'enqueue' AND due_at IS NULL AND"
    " (EXISTS (SELECT 1 FROM tasks t WHERE t.id = events.task_id AND events.seq < t.next_seq)"
    " OR (task_id IS NULL AND {column} IS NOT NULL))"
)
_DUE = (
    "UPDATE tasks SET due_next = :now WHERE finished_at IS NULL AND EXISTS"
    " (SELECT 1 FROM events e WHERE e.task_id = tasks.id AND e.due_at = :now)"
)
# Hints of Tasks whose ``parallel`` was used up were taken away.
_READY = (
    "UPDATE tasks SET ready = priority WHERE state IN ('splitting', 'running') AND next_seq < created_jobs"
    " AND interval_s <= 0 AND (session_key IS NULL OR session_holder IS NOT NULL)"
)
# What runs is in flight, by the counts.
_FLYING = (
    "UPDATE task_tallies SET dispatched = (SELECT COUNT(*) FROM events e JOIN tasks t ON t.id = e.task_id"
    " WHERE e.task_id = task_tallies.task_id AND e.status = 'working' AND e.seq < t.next_seq)"
    " WHERE slot = (SELECT f.slot FROM (SELECT task_id, MIN(slot) AS slot FROM task_tallies GROUP BY task_id) f"
    " WHERE f.task_id = task_tallies.task_id)"
)
_GONE = ("low_seq", "reserved_from", "dispatch_by", "dispatch_until")


def upgrade() -> None:
    """Up."""
    key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "loans",
        sa.Column("id", key, primary_key=True, autoincrement=True),
        sa.Column("task_id", sa.BigInteger(), nullable=False),
        sa.Column("low", sa.BigInteger(), nullable=False),
        sa.Column("high", sa.BigInteger(), nullable=False),
        sa.Column("process", sa.String(64)),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("asked", sa.BigInteger()),
        sqlite_autoincrement=True,  # the id of a loan that ended is never given again
        **_options(),
    )
    op.create_index("ix_loans_task", "loans", ["task_id", "process", "low"])
    op.create_index("ix_loans_process", "loans", ["process"])
    op.create_table(
        "places",
        sa.Column("task_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("process", sa.String(64), primary_key=True),
        sa.Column("n", sa.Integer(), nullable=False),
        **_options(),
    )
    op.create_index("ix_places_process", "places", ["process"])
    op.create_table(
        "queues",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("paused", sa.Integer(), server_default=sa.text("0"), nullable=False),
        **_options(),
    )
    op.add_column("processes", sa.Column("held_at", sa.BigInteger()))
    op.add_column("processes", sa.Column("held_jobs", sa.Text().with_variant(LONGTEXT(), "mysql", "mariadb")))
    now = {"now": time.time_ns() // 1_000}
    connection = op.get_bind()
    if "look_at" in {each["name"] for each in sa.inspect(connection).get_columns("events")}:  # not so far yet
        for statement in (_OUT.format(column="look_at"), _DUE):
            connection.execute(sa.text(statement), now)
    connection.execute(sa.text(_READY))
    connection.execute(sa.text("DELETE FROM jobs WHERE attempt > 0"))
    op.drop_index("ix_events_look", table_name="events")
    op.drop_column("events", "look_at")
    op.drop_index("ix_tasks_dispatch_until", table_name="tasks")
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        for name in _GONE:
            batch_op.drop_column(name)
    with op.batch_alter_table("task_tallies", schema=None) as batch_op:
        for name in ("dispatched", "returned"):
            batch_op.drop_column(name)
    if connection.dialect.name == "postgresql":
        op.execute("ALTER TABLE tasks SET (fillfactor = 50)")


def downgrade() -> None:
    """Down. What is on loan waits from now on."""
    if op.get_context().dialect.name == "postgresql":
        op.execute("ALTER TABLE tasks RESET (fillfactor)")
    connection = op.get_bind()
    now = {"now": time.time_ns() // 1_000}
    for statement in (_OUT.format(column="process"), _DUE):
        connection.execute(sa.text(statement), now)
    op.add_column("events", sa.Column("look_at", sa.BigInteger()))
    op.create_index("ix_events_look", "events", ["look_at"], **_where(connection.dialect.name, "look_at"))
    for table, name in (("tasks", "low_seq"), ("task_tallies", "dispatched"), ("task_tallies", "returned")):
        op.add_column(table, sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False))
    op.add_column("tasks", sa.Column("reserved_from", sa.BigInteger()))
    op.add_column("tasks", sa.Column("dispatch_by", sa.String(64)))
    op.add_column("tasks", sa.Column("dispatch_until", sa.BigInteger()))
    connection.execute(sa.text(_FLYING))
    where = _where(connection.dialect.name, "dispatch_until")
    op.create_index("ix_tasks_dispatch_until", "tasks", ["dispatch_until"], **where)
    with op.batch_alter_table("processes", schema=None) as batch_op:
        batch_op.drop_column("held_at")
        batch_op.drop_column("held_jobs")
    for name in ("queues", "places", "loans"):
        op.drop_table(name)


def _where(dialect: str, column: str) -> dict[str, sa.TextClause]:
    """Of a partial index; MariaDB has none."""
    where = sa.text(f"{column} IS NOT NULL")
    return {} if dialect == "mariadb" else {"sqlite_where": where, "postgresql_where": where}


def _options() -> dict[str, str]:
    return {
        "mariadb_engine": "InnoDB",
        "mariadb_row_format": "DYNAMIC",
        "mariadb_charset": "utf8mb4",
        "mariadb_collate": "utf8mb4_nopad_bin",
    }
