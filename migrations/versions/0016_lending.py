"""From 0.1.0: the ledger lends, Tasks have rounds, keys and callbacks, corrected lists are followed.

Untracked jobs of a program without Redis are rows of ``events`` from now on.

Revision ID: 0016
Revises: 0002

It stands for the migrations 0003 to 0016 of the development. Only 0003 was ever released: 0.1.0 is stamped so, and
:mod:`asynctask.database.schema` takes that for 0002. The number is the last of them, because databases of the development
bear it; they have one column more, ``processes.rate``, which nothing reads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects.mysql import LONGTEXT

revision = "0016"
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
_SLICE = 1_000
_SECOND = 1_000_000
_ZERO = sa.text("0")


def upgrade() -> None:
    """Up. MariaDB commits each statement: all of them may be run again, in this order, after any of them."""
    _create_tables()
    _add_columns()
    _wait_in_the_ledger()
    _carry_over_jobs()
    _drop_columns()
    _set_fillfactor(events=35, tasks=50)


def downgrade() -> None:
    """Down. What is lent waits from now on; rounds, keys, callbacks and corrections are forgotten."""
    _reset_fillfactor("events", "tasks")
    _restore_jobs()
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
        "processes": [sa.Column("rate", sa.Float(), server_default=_ZERO, nullable=False)],
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


# -- untracked jobs: rows of ``jobs`` until now

_IN_COLUMNS = ("class", "args", "jid", "queue", "created_at", "enqueued_at")
_OF_FAILURES = ("retry_count", "failed_at", "retried_at", "error_class", "error_message", "error_backtrace")

_JOBS = "id jid attempt queue priority held_in run_at process deaths payload waits"
_EVENTS = (
    "id job_id task_id worker_name queue status attempt retries deaths watched items params options added_messages due_at"
    " problem process created_at started_at finished_at"
)
_jobs = sa.table("jobs", *map(sa.column, _JOBS.split()))
_events = sa.table("events", *map(sa.column, _EVENTS.split()))
_j, _e = _jobs.c, _events.c


def _carry_over_jobs() -> None:
    connection = op.get_bind()
    if "jobs" not in sa.inspect(connection).get_table_names():  # it is done already
        return
    now = time.time_ns() // 1_000
    for part in _slices(connection, sa.select(_jobs).where(_j.attempt == 0), _j.id):
        _carry_over(connection, [_event_of(row, now) for row in part], now)
    if connection.dialect.name == "postgresql":
        op.execute("DROP FUNCTION IF EXISTS asynctask_exchange")
    op.drop_table("jobs")


def _carry_over(connection: sa.Connection, rows: list[dict[str, Any]], now: int) -> None:
    """Writes the rows whose id has no Event. A job that had been given one while it lay in ``jobs`` waits as that one."""
    ids = [row["job_id"] for row in rows]
    there = sa.select(_e.job_id).where(_e.job_id.in_(ids))
    known = set(connection.execute(there).scalars())
    if new := [row for row in rows if row["job_id"] not in known]:
        connection.execute(sa.insert(_events), new)
    if known:
        is_open = _e.status.in_(["enqueue", "working"]) & _e.due_at.is_(None) & _e.task_id.is_(None)
        waits = {"status": "enqueue", "due_at": now, "process": None, "attempt": _e.attempt + 1, "watched": 1}
        connection.execute(sa.update(_events).where(_e.job_id.in_(sorted(known)), is_open).values(waits))


def _event_of(row: Any, now: int) -> dict[str, Any]:
    """The row of ``events`` of a job: one that waits or was fetched waits from now on, one of ``schedule`` and ``retry``
    until its time, a dead one is in error."""
    job = _parsed(row.payload)
    is_job = isinstance(job.get("class"), str) and isinstance(job.get("args"), list)
    is_dead = row.held_in == "dead" or not is_job
    count, failed_at = job.get("retry_count"), _micros(job.get("failed_at"))
    retries = count + 1 if isinstance(count, int) and not isinstance(count, bool) and 0 <= count < 2**30 else 0
    why = ": ".join(str(job[name]) for name in ("error_class", "error_message") if job.get(name))
    if not is_job:
        why = f"this is no job: {row.payload[:500]}"
    members = {name: value for name, value in job.items() if name not in (*_IN_COLUMNS, *_OF_FAILURES)}
    at = min(now, _micros(job.get("retried_at")) or failed_at or row.run_at or now)
    return {
        "job_id": row.jid,
        "worker_name": job["class"][:255] if is_job else "",
        "queue": row.queue,
        "status": "error" if is_dead else "enqueue",
        "attempt": retries + 1,
        "retries": retries,
        "deaths": row.deaths,
        "watched": int(row.process is not None or row.deaths > 0),
        "items": 0,
        "params": _text(job["args"]) if is_job else None,
        "options": _text({"priority": row.priority, "members": members}),
        "added_messages": _text([_message(at, why, max(1, retries))]) if why else None,
        "due_at": None if is_dead else now if row.held_in is None else row.run_at,
        "problem": str(job.get("error_class") or "discarded")[:64] if is_dead else None,
        "process": None,
        "created_at": _micros(job.get("created_at")) or now,
        "started_at": failed_at,
        "finished_at": (row.run_at or now) if is_dead else None,
    }


def _restore_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", _KEY, primary_key=True, autoincrement=True),
        sa.Column("jid", sa.String(64), nullable=False),
        sa.Column("attempt", sa.Integer(), server_default=_ZERO, nullable=False),
        sa.Column("queue", sa.String(255), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("task_id", sa.BigInteger()),
        sa.Column("held_in", sa.String(8)),
        sa.Column("run_at", sa.BigInteger()),
        sa.Column("process", sa.String(64)),
        sa.Column("deaths", sa.Integer(), server_default=_ZERO, nullable=False),
        sa.Column("payload", _JSON, nullable=False),
        sa.Column("waits", sa.BigInteger()),
        sa.UniqueConstraint("jid", "attempt", name="uq_jobs_jid_attempt"),
        **_MARIADB,
    )
    connection = op.get_bind()
    dialect, now = connection.dialect.name, time.time_ns() // 1_000
    for name, columns, where in (
        ("waiting", ["queue", "waits", "id"], "waits IS NOT NULL"),
        ("sets", ["held_in", "run_at"], "held_in IS NOT NULL"),
        ("process", ["process"], "process IS NOT NULL"),
        ("task", ["task_id"], "task_id IS NOT NULL AND waits IS NOT NULL"),
    ):
        partial = {"sqlite_where": sa.text(where), "postgresql_where": sa.text(where)} if dialect != "mariadb" else {}
        op.create_index(f"ix_jobs_{name}", "jobs", columns, **partial)
    if dialect == "postgresql":
        op.execute(sa.text(context.script.get_revision("0002").module._EXCHANGE))
    is_untracked = _e.task_id.is_(None) & (_e["items"] == 0)
    for part in _slices(connection, sa.select(_events).where(is_untracked), _e.id):
        ids = [row.job_id for row in part]
        there = set(connection.execute(sa.select(_j.jid).where(_j.jid.in_(ids), _j.attempt == 0)).scalars())
        if new := [_job_of(row, now) for row in part if row.job_id not in there]:
            connection.execute(sa.insert(_jobs), new)
    connection.execute(sa.delete(_events).where(is_untracked))


def _job_of(row: Any, now: int) -> dict[str, Any]:
    """The row of ``jobs`` of an untracked job."""
    options = json.loads(row.options or "{}")
    priority, held_in = int(options.get("priority") or 0), None
    if row.status == "error":
        held_in = "dead"
    elif row.due_at is not None and row.due_at > now:
        held_in = "retry" if row.retries else "schedule"
    job: dict[str, Any] = {
        "retry": True,
        "queue": row.queue,
        "class": row.worker_name,
        "args": json.loads(row.params or "[]"),
    }
    job |= {**options.get("members", {}), "jid": row.job_id, "created_at": row.created_at / _SECOND}
    if row.retries:
        job |= {"retry_count": row.retries - 1, "failed_at": (row.started_at or row.created_at) / _SECOND}
    errors = [each["message"] for each in json.loads(row.added_messages or "[]") if each["status"] == "error"]
    if errors:
        job |= {"error_class": row.problem or "Error", "error_message": errors[-1]}
        job.setdefault("failed_at", (row.started_at or row.created_at) / _SECOND)
    return {
        "jid": row.job_id,
        "attempt": 0,
        "queue": row.queue,
        "priority": priority,
        "held_in": held_in,
        "run_at": None if held_in is None else row.finished_at or row.due_at or now,
        "process": None,
        "deaths": row.deaths,
        "payload": _text(job),
        "waits": 2 * priority + 1 if held_in is None else None,
    }


def _slices(connection: sa.Connection, statement: Any, key: Any) -> Iterator[list[Any]]:
    """The rows of a statement, by their key."""
    after = 0
    while found := list(connection.execute(statement.where(key > after).order_by(key).limit(_SLICE))):
        yield found
        after = found[-1].id


def _parsed(payload: str) -> dict[str, Any]:
    try:
        job = json.loads(payload)
    except ValueError:
        return {}
    return job if isinstance(job, dict) else {}


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _micros(value: Any) -> int | None:
    """A payload's time in microseconds: of seconds, or of whole milliseconds."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e15:
        return None
    return value * 1_000 if isinstance(value, int) and value >= 100_000_000_000 else round(value * _SECOND)


def _message(at: int, text: str, attempt: int) -> dict[str, Any]:
    when = datetime.fromtimestamp(at / _SECOND, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"at": when, "status": "error", "message": text, "attempt": attempt}
