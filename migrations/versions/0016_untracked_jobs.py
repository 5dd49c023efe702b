"""Untracked jobs of a program without Redis are rows of ``events``; the table ``jobs`` goes.

Revision ID: 0016
Revises: 0015
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
down_revision = "0015"
branch_labels = None
depends_on = None

_SLICE = 1_000
_SECOND = 1_000_000
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


def upgrade() -> None:
    """Up."""
    connection = op.get_bind()
    if "jobs" in sa.inspect(connection).get_table_names():  # not so far yet
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


def downgrade() -> None:
    """Down. What a process holds waits from now on."""
    op.create_table(
        "jobs",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("jid", sa.String(64), nullable=False),
        sa.Column("attempt", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("queue", sa.String(255), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("task_id", sa.BigInteger()),
        sa.Column("held_in", sa.String(8)),
        sa.Column("run_at", sa.BigInteger()),
        sa.Column("process", sa.String(64)),
        sa.Column("deaths", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("payload", sa.Text().with_variant(LONGTEXT(), "mysql", "mariadb"), nullable=False),
        sa.Column("waits", sa.BigInteger()),
        sa.UniqueConstraint("jid", "attempt", name="uq_jobs_jid_attempt"),
        mariadb_engine="InnoDB",
        mariadb_row_format="DYNAMIC",
        mariadb_charset="utf8mb4",
        mariadb_collate="utf8mb4_nopad_bin",
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
