"""The tables. Times are integers: microseconds since 1970-01-01 UTC; JSON is text.

Lookups use nullable columns that are usually NULL (``due_at``, ``problem``, ``process``), with partial indexes on databases
that have them. No index contains ``status``, because on PostgreSQL every outcome would rewrite it. Events and tallies have
no foreign keys, which cost a third of the load rate; ``doctor`` finds orphans.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    DDL,
    BigInteger,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.event import listen

metadata: Final = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite gives a rowid only to a column whose type is exactly INTEGER.
Key: Final = BigInteger().with_variant(Integer, "sqlite")
Json: Final = Text()

_WHERE: Final = "where"


def _id() -> Column[int]:
    return Column("id", Key, primary_key=True, autoincrement=True)


def _count(name: str, default: int = 0) -> Column[int]:
    return Column(name, BigInteger, nullable=False, server_default=text(str(default)))


def _partial(name: str, *columns: str, where: str) -> Index:
    return Index(name, *columns, info={_WHERE: where})


tasks: Final = Table(
    "tasks",
    metadata,
    _id(),
    Column("worker_name", String(255), nullable=False),
    Column("queue", String(255), nullable=False),
    Column("title", String(255), nullable=False, server_default=""),
    Column("owner", String(255), nullable=False, server_default=""),
    Column("session", String(255)),
    Column("state", String(16), nullable=False),
    Column("state_reason", String(255)),
    # An explicit retry opens a generation. A generation closes once, when it is sealed and every row is terminal.
    _count("generation", 1),
    _count("generation_sealed", 0),
    _count("version", 1),
    _count("slots", 1),
    # Knobs. parallel NULL: no limit; with an interval: 1.
    Column("parallel", Integer),
    Column("interval_s", Float, nullable=False, server_default=text("0")),
    Column("start_at", BigInteger),  # nothing begins before
    Column("priority", Integer, nullable=False),
    Column("tolerated_failures", String(16)),
    _count("chunk_size", 1),
    Column("options", Json),  # retry, timeout, ... as submitted, JSON
    Column("context", Json),  # constants for all its jobs, as submitted; NULL: none
    _count("next_seq"),  # the pointer: rows with a smaller seq have been lent once
    # The last round of a Task with an interval: when it began, and its jobs (JSON: from, to: seq; again: ids).
    Column("round_at", BigInteger),
    Column("round_jobs", Json),
    # The split: its source, its progress, and its lease.
    Column("split_state", String(16), nullable=False),
    Column("split_reason", String(1024)),
    Column("split_source", Json),
    Column("headers", Json),
    Column("split_by", String(64)),
    Column("split_until", BigInteger),
    _count("split_cursor"),
    _count("split_tries"),  # claims of the split since the cursor last moved
    Column("planned", BigInteger),
    Column("additions", Json),  # how an open Task takes them, {limit_s, unique}; NULL: it takes none
    _count("created"),  # items
    _count("created_jobs"),
    _count("rejected"),
    # A cancel or retry in progress: which rows it updates, and how far it has come.
    Column("turning", String(16)),
    Column("turn_statuses", String(64)),
    Column("turn_chosen", Json),  # of a retry: {"digests": [...] or null, "left": number or null, "rows": [...] or null}
    _count("turn_cursor"),
    # A Task that a job of another Task submitted: that Task. Tasks below it, at any depth. What still goes down to them.
    Column("parent", BigInteger),
    _count("children"),
    Column("going_down", String(16)),
    Column("resubmit_of", BigInteger),
    _count("mended"),  # rows that finished in correcting Tasks that are purged; others are summed when read
    Column("idempotency_key", String(255)),
    Column("body_digest", String(64)),
    Column("origin", String(255)),  # the uploaded file's name
    Column("created_at", BigInteger, nullable=False),
    Column("started_at", BigInteger),
    Column("updated_at", BigInteger, nullable=False),
    Column("closed_at", BigInteger),
    Column("finished_at", BigInteger),
    # The hints, see asynctask.core.readiness.
    Column("ready", Integer),
    Column("due_next", BigInteger),
    # The session: its key; the key again while the Task holds it; priority and position while the Task waits.
    Column("session_key", String(32)),
    Column("session_holder", String(32)),
    Column("session_waits", Integer),
    _count("session_position"),
    Column("callbacks", Json),  # [{name, worker, queue, args}], as submitted
    Column("key_field", String(255)),  # the key field of its items; '*': each worker's own; NULL: no job has a key
    UniqueConstraint("owner", "idempotency_key", name="uq_tasks_owner_idempotency_key"),
    _partial("ix_tasks_open", "finished_at", "id", where="finished_at IS NULL"),
    _partial("ix_tasks_parent", "parent", "finished_at", where="parent IS NOT NULL"),
    _partial("ix_tasks_ready", "queue", "ready", "id", where="ready IS NOT NULL"),
    _partial("ix_tasks_due_next", "due_next", where="due_next IS NOT NULL"),
    _partial("ix_tasks_split_until", "split_until", where="split_until IS NOT NULL"),
    _partial("ix_tasks_line", "session_key", "session_waits", "session_position", "id", where="session_waits IS NOT NULL"),
    Index("uq_tasks_session_holder", "session_holder", unique=True),
)

events: Final = Table(
    "events",
    metadata,
    _id(),
    Column("job_id", String(64), nullable=False),
    Column("task_id", BigInteger),
    Column("seq", BigInteger),
    Column("worker_name", String(255)),  # NULL: the Task's
    Column("queue", String(255)),  # NULL: the Task's
    Column("status", String(9), nullable=False),
    Column("attempt", Integer, nullable=False, server_default=text("1")),
    Column("retries", Integer, nullable=False, server_default=text("0")),
    Column("deaths", Integer, nullable=False, server_default=text("0")),
    Column("watched", Integer, nullable=False, server_default=text("0")),
    Column("items", Integer, nullable=False, server_default=text("1")),  # 0: untracked, see core.transitions.is_kept
    Column("n_finish", Integer, nullable=False, server_default=text("0")),
    Column("n_failed", Integer, nullable=False, server_default=text("0")),
    Column("n_error", Integer, nullable=False, server_default=text("0")),
    Column("n_cancelled", Integer, nullable=False, server_default=text("0")),
    Column("params", Json),
    Column("options", Json),  # without a Task: the other members of its payload
    Column("added_messages", Json),
    Column("result", Json),
    Column("checkpoint", Json),
    Column("first_row", BigInteger),
    Column("last_row", BigInteger),
    Column("due_at", BigInteger),  # waits in the ledger until then
    Column("problem", String(64)),
    Column("process", String(64)),
    Column("created_at", BigInteger, nullable=False),
    Column("started_at", BigInteger),
    Column("finished_at", BigInteger),
    Column("callback_of", BigInteger),  # without a Task: the Task whose callback it is
    Column("line", BigInteger),  # digest of its key: Events of one line run one after the other
    Column("stopping", Integer, nullable=False, server_default=text("0")),  # 1: a user requested its stop
    Column("marks", Json),  # of a slice: the outcomes of its items, one letter each; NULL: all are open
    Column("dismissed", BigInteger),  # the finished_at of the error that a user dismissed: a later one is not dismissed
    Column("last_error", Json),  # {"code", "message" (its beginning), "process"} of the last attempt that raised
    Column("traceback", Json),  # of that error
    UniqueConstraint("job_id", name="uq_events_job_id"),
    UniqueConstraint("task_id", "seq", name="uq_events_task_id_seq"),
    _partial("ix_events_task_due", "task_id", "due_at", where="due_at IS NOT NULL"),
    _partial("ix_events_problem", "task_id", "id", "problem", where="problem IS NOT NULL"),
    _partial("ix_events_process", "process", where="process IS NOT NULL"),
)

# An outcome lengthens a row, of which PostgreSQL writes a new version: on the same page, no index must change.
_FILLFACTOR: Final[Any] = DDL("ALTER TABLE events SET (fillfactor = 35)")  # type: ignore[no-untyped-call]
listen(events, "after_create", _FILLFACTOR.execute_if(dialect="postgresql"))

# A borrow moves the pointer of a Task: the new version of the row stays on the same page.
_TASKS_FILLFACTOR: Final[Any] = DDL("ALTER TABLE tasks SET (fillfactor = 50)")  # type: ignore[no-untyped-call]
listen(tasks, "after_create", _TASKS_FILLFACTOR.execute_if(dialect="postgresql"))

# A range of a Task's Events that one process holds; process NULL: a free loan, for the next borrow. A loan does not expire:
# it ends with its last outcome, or with its process. asked: when a user stopped one of its jobs.
loans: Final = Table(
    "loans",
    metadata,
    _id(),
    Column("task_id", BigInteger, nullable=False),
    Column("low", BigInteger, nullable=False),
    Column("high", BigInteger, nullable=False),
    Column("process", String(64)),
    Column("at", BigInteger, nullable=False),
    Column("asked", BigInteger),
    Index("ix_loans_task", "task_id", "process", "low"),
    Index("ix_loans_process", "process"),
)

# How many jobs of a Task with a limit each process may run at once.
places: Final = Table(
    "places",
    metadata,
    Column("task_id", BigInteger, primary_key=True, autoincrement=False),
    Column("process", String(64), primary_key=True),
    Column("n", Integer, nullable=False),
    Index("ix_places_process", "process"),
)

# The queues that users have paused.
queues: Final = Table(
    "queues",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("paused", Integer, nullable=False, server_default=text("0")),
)

# The open Events with a key, each with its position in the line of that key. A separate table has narrow rows, and Events
# without a key need no index.
key_positions: Final = Table(
    "key_positions",
    metadata,
    Column("event_id", Key, primary_key=True, autoincrement=False),
    Column("line", BigInteger, nullable=False),
    Column("position", BigInteger, nullable=False),  # the smallest first; of equal ones the smallest event_id
    # In the order of digests, in which the keys of a list of serial numbers are adjacent.
    Index("ix_key_positions_line", "line", "position", "event_id"),
)

# Values of items by which people find jobs, see asynctask.ledger.search. Compared byte for byte, so that the values that
# begin with a text are a range.
search_values: Final = Table(
    "search_values",
    metadata,
    _id(),
    Column("value", String(100).with_variant(String(100, collation="C"), "postgresql"), nullable=False),
    Column("field", String(100), nullable=False),
    Column("task_id", BigInteger),
    Column("seq", BigInteger, nullable=False),  # without a Task: the id of the Event
    Column("row", BigInteger),  # of a job of several items: the row of the item
    Index("ix_search_values_value", "value", "id"),
    Index("ix_search_values_event", "task_id", "seq"),
)

task_tallies: Final = Table(
    "task_tallies",
    metadata,
    Column("task_id", BigInteger, primary_key=True, autoincrement=False),
    Column("slot", Integer, primary_key=True, autoincrement=False),
    _count("version"),
    Column("updated_at", BigInteger),
    *(
        _count(name)
        for name in (
            "enqueue", "working", "stopped", "finish", "failed", "error", "cancelled",
            "retrying", "jobs",
        )
    ),
)  # fmt: skip

task_rejects: Final = Table(
    "task_rejects",
    metadata,
    Column("task_id", BigInteger, primary_key=True, autoincrement=False),
    Column("row", BigInteger, primary_key=True, autoincrement=False),
    Column("errors", Json, nullable=False),  # [{column, code, message, value}]
    Column("cells", Json),
)

# The additions to open Tasks that had an idempotency key, with their answers.
task_additions: Final = Table(
    "task_additions",
    metadata,
    Column("task_id", BigInteger, primary_key=True, autoincrement=False),
    Column("idempotency_key", String(255), primary_key=True),
    Column("body_digest", String(64), nullable=False),
    Column("first_row", BigInteger, nullable=False),
    Column("accepted", BigInteger, nullable=False),
    Column("rejected", BigInteger, nullable=False),
)

# The rows of corrected lists. An accepted row takes the row that it corrects, which no other Task and no retry runs then.
# The id of a purged Task becomes NULL, because it may be used again.
resubmitted_rows: Final = Table(
    "resubmitted_rows",
    metadata,
    _id(),
    Column("task_id", BigInteger),  # the corrected Task
    Column("number", BigInteger, nullable=False),  # in the row-number column: the row in the first Task's list
    Column("row", BigInteger, nullable=False),  # in the corrected list
    Column("of_task", BigInteger),  # the Task in which the row failed, was refused or cancelled
    Column("of_row", BigInteger, nullable=False),
    Column("taken", Integer),  # 1; NULL: it was refused
    UniqueConstraint("task_id", "number", name="uq_resubmitted_rows_number"),
    UniqueConstraint("of_task", "of_row", "taken", name="uq_resubmitted_rows_taken"),
    Index("ix_resubmitted_rows_row", "task_id", "row"),
)

# Each correcting Task with its ancestors: the Task that it corrects, the Task that the former corrects, and so on.
task_ancestors: Final = Table(
    "task_ancestors",
    metadata,
    Column("ancestor_id", BigInteger, primary_key=True, autoincrement=False),
    Column("task_id", BigInteger, primary_key=True, autoincrement=False),
    Index("ix_task_ancestors_task_id", "task_id"),
)

item_errors: Final = Table(
    "item_errors",
    metadata,
    _id(),
    Column("task_id", BigInteger, nullable=False),
    Column("event_id", BigInteger, nullable=False),
    Column("row", BigInteger),
    Column("status", String(9), nullable=False),
    Column("code", String(64)),
    Column("message", Json),
    Column("digest", String(32), nullable=False),
    Column("attempt", Integer, nullable=False),
    Index("ix_item_errors_task_id_row", "task_id", "row"),
    Index("ix_item_errors_event_id", "event_id"),
)

task_errors: Final = Table(
    "task_errors",
    metadata,
    Column("task_id", BigInteger, primary_key=True, autoincrement=False),
    Column("slot", Integer, primary_key=True, autoincrement=False),
    Column("digest", String(32), primary_key=True),
    Column("status", String(9), nullable=False),
    Column("message", Json, nullable=False),
    _count("count"),
    Column("sample_job_id", String(64)),
    Column("sample_row", BigInteger),
)

# The queued callbacks by Task; an index on events would cost every item.
task_callbacks: Final = Table(
    "task_callbacks",
    metadata,
    Column("task_id", BigInteger, primary_key=True, autoincrement=False),
    Column("generation", BigInteger, primary_key=True, autoincrement=False),
    Column("name", String(16), primary_key=True),
    Column("worker_name", String(255), nullable=False),
    Column("job_id", String(64), nullable=False),
)

task_samples: Final = Table(
    "task_samples",
    metadata,
    Column("task_id", BigInteger, primary_key=True, autoincrement=False),
    Column("at", BigInteger, primary_key=True, autoincrement=False),
    _count("done"),
    _count("problems"),
)

DURATIONS: Final = 35
"""Columns of the histogram of run times in ``history``; :mod:`asynctask.ledger.history` has its bounds."""

# What ended in each minute, and in the rows without a worker what waited, see asynctask.ledger.history.
history: Final = Table(
    "history",
    metadata,
    Column("at", BigInteger, primary_key=True, autoincrement=False),  # when the minute began
    Column("queue", String(255), primary_key=True),
    Column("worker_name", String(255), primary_key=True),
    Column("waiting", BigInteger),
    Column("running", BigInteger),  # of all queues: jobs that ran, and live processes
    Column("processes", BigInteger),
    *(
        Column(name, Integer, nullable=False, server_default=text("0"))
        for name in ("finish", "failed", "error", "retried", *(f"took_{i}" for i in range(DURATIONS)))
    ),
)

task_log: Final = Table(
    "task_log",
    metadata,
    _id(),
    Column("task_id", BigInteger, nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("who", String(255), nullable=False, server_default=""),
    Column("action", String(32), nullable=False),
    Column("detail", Json),
    Index("ix_task_log_task_id", "task_id", "id"),
)

processes: Final = Table(
    "processes",
    metadata,
    Column("identity", String(64), primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("hostname", String(255), nullable=False),
    Column("boot_id", String(64), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("pid_started", BigInteger, nullable=False),
    Column("started_at", BigInteger, nullable=False),
    Column("beat_at", BigInteger, nullable=False),
    Column("lease_until", BigInteger, nullable=False),
    Column("held_at", BigInteger),  # since when its supervisor gets no pulse, because job code holds its interpreter
    Column("held_jobs", Json),  # then, the Events whose jobs it began last
    _count("concurrency"),
    _count("busy"),
    Column("rss", BigInteger),
    _count("quiet"),
    Column("signal", String(8)),
    Column("queues", Json, nullable=False),
    Column("info", Json),
)


# Duties of one process at a time: the leader and (unless bound to its process's lease) the lease.
duties: Final = Table(
    "duties",
    metadata,
    Column("name", String(16), primary_key=True),
    Column("holder", String(64)),
    Column("held_until", BigInteger),
)


# Periodic tasks, see asynctask.ledger.schedules.
schedules: Final = Table(
    "schedules",
    metadata,
    Column("name", String(255), primary_key=True),
    # As a process declared it last.
    Column("worker_name", String(255), nullable=False),
    Column("schedule", String(255), nullable=False),
    Column("timezone", String(64), nullable=False),
    Column("missed", String(8), nullable=False),
    _count("overlap"),
    Column("registered_at", BigInteger, nullable=False),  # since when it ticks at these times
    Column("seen_at", BigInteger, nullable=False),  # when a process last said that it declares it so
    _count("enabled", 1),
    Column("next_at", BigInteger),  # the next tick; NULL: it is switched off
    Column("last_at", BigInteger),  # the tick of the last Task
    Column("last_task", BigInteger),
    _count("skipped"),
    Column("skipped_at", BigInteger),
    Column("skip_reason", String(16)),
    Column("error", String(1024)),
)


# Rate limits, see asynctask.ledger.rates.
rates: Final = Table(
    "rates",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("rate", String(32), nullable=False),  # such as 5/s
    Column("declared", String(32), nullable=False),  # the rate in the code; people may have set another one
    Column("every", BigInteger, nullable=False),  # microseconds from one start to the next
    _count("free_at"),  # when the starts that were taken so far are over, at that rate
)


# The limit of each worker that has one.
rated_workers: Final = Table(
    "rated_workers",
    metadata,
    Column("worker_name", String(255), primary_key=True),
    Column("limit_name", String(255), nullable=False),
)


# The last write of each connection, on servers that do not report the status of a transaction (MariaDB).
write_marks: Final = Table(
    "write_marks",
    metadata,
    Column("owner", String(32), primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("at", BigInteger, nullable=False),  # seconds
)


def full_metadata() -> MetaData:
    """The tables with the options of each database: conditions of indexes, storage engines, lengths of texts.

    For creating or comparing a schema. The options are separate because the first one makes SQLAlchemy load the whole
    dialect, and other processes do not need all three dialects.
    """
    from sqlalchemy.dialects.mysql import LONGTEXT

    loans.dialect_kwargs.update(sqlite_autoincrement=True)  # the id of an ended loan is never used again
    for table in metadata.tables.values():
        # Names are compared byte for byte, as on other databases; MariaDB's default is case-insensitive.
        table.dialect_kwargs.update(
            mariadb_engine="InnoDB",
            mariadb_row_format="DYNAMIC",
            mariadb_charset="utf8mb4",
            mariadb_collate="utf8mb4_nopad_bin",
        )
        for index in table.indexes:
            if (where := index.info.get(_WHERE)) is not None:
                index.dialect_kwargs.update(sqlite_where=text(where), postgresql_where=text(where))
        for column in table.columns:
            if column.type is Json:
                column.type = Text().with_variant(LONGTEXT(), "mysql", "mariadb")
    return metadata


def as_dict(row: Any) -> dict[str, Any]:
    """A result row as a dict."""
    return dict(row._mapping)
