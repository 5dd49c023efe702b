"""The progress object of a Task, read by one statement whose cost does not grow with the Task; and samples for the rate."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Final, Literal, NamedTuple, TypedDict, cast

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.clock import SECOND, Time, micros, rfc3339
from asynctask.core.states import PROBLEM, State, Status
from asynctask.core.transitions import BLOCKED, MERGE, at_once, interval_of, next_round
from asynctask.database import batches
from asynctask.database.engine import Database
from asynctask.database.tables import (
    events,
    loans,
    task_ancestors,
    task_callbacks,
    task_errors,
    task_samples,
    task_tallies,
    tasks,
)
from asynctask.ledger import children
from asynctask.ledger.base import PURGING, chunks, in_range, loads
from asynctask.ledger.events import BY_MESSAGE, Failure, group_of
from asynctask.messages import is_storable, template_of

_t, _e, _n, _x, _s, _c = tasks.c, events.c, task_tallies.c, task_errors.c, task_samples.c, task_callbacks.c
_l = loans.c
_COUNTS = tuple(str(status) for status in Status)
_TALLIED = (*_COUNTS, "retrying", "jobs", "version")
RATE_WINDOW_S = 30
TOP_ERRORS = 5
LAST_WAITING: Final = 10
"""Number of jobs that wait for a retry whose errors a progress object groups."""
_ERROR_FIELDS = ("count", "digest", "message", "status", "job")


# -- the progress object, which Python, the command line and the API return; the API's schema is generated from these types


class Split(TypedDict):
    """Progress of the split of the list, in rows."""

    state: str
    reason: str | None
    planned: int | None
    created: int
    rejected: int
    open_until: Annotated[Time | None, "Of an open Task: when it is sealed, unless somebody adds to it before."]


class Counts(TypedDict):
    """Items by status; they sum to ``total``."""

    total: int
    enqueue: int
    working: int
    stopped: int
    finish: int
    failed: int
    error: int
    cancelled: int


class Done(TypedDict):
    """The number of items that have ended, the rate, and the estimated time to the end."""

    done: int
    remaining: int
    percent: float | None
    rate_per_s: float | None
    eta_s: float | None


class Control(TypedDict):
    """The knobs, and the number of jobs in flight."""

    parallel: Annotated[int | None, "null: no limit; with an interval, 1."]
    in_flight: Annotated[int, "About how many jobs run, or are about to: those that processes hold, up to `parallel`."]
    interval: Annotated[float, "Seconds from round to round; 0 for none."]
    priority: int
    session: str | None
    key: Annotated[str | None, "The field whose equal values run one after the other; `*`: each worker's own."]
    tolerated_failures: int | str | None
    start_at: Annotated[Time | None, "Nothing begins before."]


class TopError(TypedDict):
    """One of the most frequent failures."""

    template: Annotated[str, "What the messages of the group have in common, with placeholders such as ‹n›."]
    message: Annotated[str, "One of these messages."]
    status: str
    count: int
    sample_job_id: str | None


class RetryingError(TypedDict):
    """An error for which rows wait for a retry."""

    template: Annotated[str, "What the messages of these errors have in common, with placeholders such as ‹n›."]
    message: Annotated[str, "The newest of them, its first 1,000 characters."]
    code: str
    count: Annotated[int, "Rows, of the 100 jobs that are due last."]
    sample_job_id: str


class CallbackState(TypedDict):
    """A callback; it has a job once its generation has closed with the outcome that triggers it."""

    name: Literal["merge", "on_complete", "on_success", "on_failure"]
    worker: str
    status: Status | None
    job_id: str | None


class Children(TypedDict):
    """The Tasks below a Task, which its jobs submitted, or jobs of those."""

    count: int
    open: Annotated[int, "Those that are not done."]
    done: int
    counts: Annotated[Counts, "Their items."]


class ExportResult(TypedDict):
    """The file of an export."""

    rows: int
    bytes: int
    sha256: str
    format: str
    partial: Annotated[bool, "Whether shards are missing in it."]


class Progress(TypedDict):
    """The progress of a Task."""

    task_id: int
    title: str
    worker: str
    owner: str | None
    state: State
    state_reason: str | None
    done: bool
    split: Split
    counts: Counts
    retrying: int
    next_retry_at: Time | None
    retrying_errors: Annotated[list[RetryingError], "The last errors of rows that wait for a retry, most frequent first."]
    jobs: int
    progress: Done
    control: Control
    top_errors: list[TopError]
    callbacks: list[CallbackState]
    result: Annotated[ExportResult | None, "Of an export, once it is merged."]
    resubmit_of: Annotated[int | None, "The Task whose failed rows this list corrects."]
    resubmitted_by: Annotated[list[int], "The Tasks that correct failed rows of this one."]
    resubmitted: Annotated[int, "Its rows that those Tasks took; neither a retry nor another list runs them."]
    parent: Annotated[int | None, "The Task whose job submitted this one; it is done after this one."]
    children: Annotated[Children | None, "The Tasks below this one; null without any."]
    mended: Annotated[int, "Failed rows of this Task that have succeeded since in a Task that corrects them."]
    generation: int
    version: int
    poll_after_ms: int
    created_at: Time
    started_at: Time | None
    updated_at: Time
    finished_at: Time | None


def _next_due(chosen: Any, lookup: str) -> Any:
    """When the next job of a Task is due, as a subquery that uses the index on each database.

    ``lookup``: ``each`` correlates per Task. MariaDB would read every due row for that; so there it is ``one`` for a single
    Task, evaluated before planning, or ``many``: a loose index scan, if the table has statistics.
    """
    is_due = _e.due_at.is_not(None)
    if lookup == "each":
        # Not min(): with old statistics, PostgreSQL may read every due row for it.
        soonest = sa.select(_e.due_at).where(_e.task_id == _t.id, is_due).order_by(_e.due_at).limit(1)
        return soonest.scalar_subquery()
    if lookup == "one":
        return sa.select(sa.func.min(_e.due_at)).where(_e.task_id == chosen).scalar_subquery()
    first = sa.select(_e.task_id.label("of_task"), sa.func.min(_e.due_at).label("due_at"))
    due = first.where(is_due, _e.task_id.in_(chosen)).group_by(_e.task_id).subquery("due")
    return sa.select(due.c.due_at).where(due.c.of_task == _t.id).scalar_subquery()


# Texts are neither grouped nor sorted, because MariaDB would write a temporary table to disk for each poll.
_TEXT_SLOT = sa.func.min(sa.case((_x.message != "", _x.slot)))
_FAILED = sa.func.sum(_x["count"])


def _sums(of_these: Any) -> Any:
    return (
        sa.select(
            _n.task_id.label("of_task"),
            sa.func.max(_n.updated_at).label("moved_at"),
            *(sa.func.sum(_n[name]).label(f"n_{name}") for name in _TALLIED),
        )
        .where(of_these)
        .group_by(_n.task_id)
        .subquery("sums")
    )


def _queued(dialect: str) -> Any:
    """A subquery for the queued callbacks of the Task's generation: a JSON text of [name, job id, status]."""
    own = (_c.task_id == _t.id) & (_c.generation == _t.generation)
    listed = batches.json_list(dialect, (_c.name, _c.job_id, _e.status, sa.case((_c.name == MERGE, _e.result))))
    joined = task_callbacks.outerjoin(events, _e.job_id == _c.job_id)
    return listed.select_from(joined).where(own).correlate(tasks).scalar_subquery()


def _corrections(dialect: str) -> Any:
    """A subquery for the Tasks that correct this one, directly or indirectly: a JSON text of [id, the Task that it
    corrects, state, items, finished items, its version, the version of its counts]."""
    other, n = tasks.alias("other"), task_tallies.alias("n")
    sums = [
        sa.select(sa.func.sum(column)).where(n.c.task_id == other.c.id).correlate(other).scalar_subquery()
        for column in (n.c.finish, n.c.version)
    ]
    named = (other.c.id, other.c.resubmit_of, other.c.state, other.c.created)
    listed = batches.json_list(dialect, (*named, sums[0], other.c.version, sums[1]))
    joined = task_ancestors.join(other, other.c.id == task_ancestors.c.task_id)
    own = task_ancestors.c.ancestor_id == _t.id
    return listed.select_from(joined).where(own).correlate(tasks).scalar_subquery()


_LENT: Final = (
    sa.select(sa.func.coalesce(sa.func.sum(_l.high - _l.low), 0))
    .where(_l.task_id == _t.id, _l.process.is_not(None))
    .correlate(tasks)
    .scalar_subquery()
)
# The function keeps the index of ``task_id`` out: by it, all rows of the Task would be read for the few that processes
# hold. The range has both ends: before it has analyzed the table, PostgreSQL expects an open range to match a third of all
# rows, and reads the whole table.
_NAMED: Final = (
    sa.select(sa.func.count())
    .select_from(events)
    .with_hint(events, "FORCE INDEX (ix_events_process)", "mariadb")
    .where(_e.process > "", _e.process < "z" * 64, sa.func.coalesce(_e.task_id, 0) == _t.id)
    .correlate(tasks)
    .scalar_subquery()
)


def _columns(dialect: str, sums: Any, next_due: Any) -> list[Any]:
    recent = (_s.task_id == _t.id, _s.at >= sa.bindparam("since"))
    sampled_at = sa.select(_s.at).where(*recent).order_by(_s.at).limit(1).correlate(tasks).scalar_subquery()
    sampled = sa.select(_s.done).where(*recent).order_by(_s.at).limit(1).correlate(tasks).scalar_subquery()
    return [
        *(column for column in tasks.c if not isinstance(column.type, sa.Text)),
        *(sums.c[f"n_{name}"] for name in _TALLIED),
        sums.c.moved_at,
        next_due.label("next_due_at"),
        _LENT.label("lent"),
        _NAMED.label("named"),
        sampled_at.label("sampled_at"),
        sampled.label("sampled_done"),
        _t.callbacks,
        _queued(dialect).label("queued_callbacks"),
        _corrections(dialect).label("corrections"),
    ]


def _of_one(dialect: str) -> sa.Select[Any]:
    """The progress of one Task: one row, with its most frequent failures as one JSON text."""
    only: Any = sa.bindparam("only", type_=sa.BigInteger)
    sums, next_due = _sums(_n.task_id == only), _next_due(only, "one" if dialect == "mariadb" else "each")
    top = (
        sa.select(_x.digest, _TEXT_SLOT.label("of_slot"), _FAILED.label("error_count"))
        .where(_x.task_id == only)
        .group_by(_x.digest)
        .having(_FAILED > 0)
        .order_by(_FAILED.desc(), _x.digest)
        .limit(TOP_ERRORS)
        .subquery("top")
    )
    sample = task_errors.alias("sample")
    is_its_sample = sa.and_(sample.c.task_id == only, sample.c.slot == top.c.of_slot, sample.c.digest == top.c.digest)
    entries = (top.c.error_count, top.c.digest, sample.c.message, sample.c.status, sample.c.sample_job_id)
    listed = batches.json_list(dialect, entries).select_from(top.outerjoin(sample, is_its_sample)).scalar_subquery()
    return (
        sa.select(*_columns(dialect, sums, next_due), listed.label("top"), _waiting(dialect, only).label("waiting"))
        .select_from(tasks.outerjoin(sums, sums.c.of_task == _t.id))
        .where(_t.id == only)
    )


def _waiting(dialect: str, only: Any) -> Any:
    """A subquery for the rows that wait for a retry of a Task: a JSON text of [job id, last error, items left], of the
    :data:`LAST_WAITING` jobs that are due last, so that the cost does not grow with the number of jobs."""
    left = _e["items"] - _e.n_finish - _e.n_failed - _e.n_error - _e.n_cancelled
    last = (
        sa.select(_e.job_id, _e.last_error, _e.retries, _e.status, left.label("left"))
        .with_hint(events, "FORCE INDEX (ix_events_task_due)", "mariadb")
        .where(_e.task_id == only, _e.due_at.is_not(None), _e.due_at < BLOCKED)
        .order_by(_e.due_at.desc())
        .limit(LAST_WAITING)
        .subquery("waiting")
    )
    c = last.c
    wait = (c.retries > 0) & (c.status == str(Status.ENQUEUE)) & c.last_error.is_not(None)
    return batches.json_list(dialect, (c.job_id, c.last_error, c.left)).select_from(last).where(wait).scalar_subquery()


def _of_many(dialect: str) -> sa.Select[Any]:
    """The progress of several Tasks, one row per frequent failure."""
    lookup = "many" if dialect == "mariadb" else "each"
    chosen: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
    sums = _sums(_n.task_id.in_(chosen))
    grouped = (
        sa.select(
            _x.task_id.label("of_task"),
            _x.digest.label("digest"),
            _TEXT_SLOT.label("of_slot"),
            _FAILED.label("error_count"),
        )
        .where(_x.task_id.in_(chosen))
        .group_by(_x.task_id, _x.digest)
        .having(_FAILED > 0)
        .subquery("grouped")
    )
    rank = sa.func.row_number().over(
        partition_by=grouped.c.of_task, order_by=(grouped.c.error_count.desc(), grouped.c.digest)
    )
    ranked = sa.select(grouped, rank.label("rank")).subquery("ranked")
    sample = task_errors.alias("sample")
    return (
        sa.select(
            *_columns(dialect, sums, _next_due(chosen, lookup)),
            ranked.c.error_count,
            ranked.c.digest.label("error_digest"),
            sample.c.message.label("error_message"),
            sample.c.status.label("error_status"),
            sample.c.sample_job_id.label("error_job"),
        )
        .select_from(
            tasks.outerjoin(sums, sums.c.of_task == _t.id)
            .outerjoin(ranked, sa.and_(ranked.c.of_task == _t.id, ranked.c.rank <= TOP_ERRORS))
            .outerjoin(
                sample,
                sa.and_(
                    sample.c.task_id == ranked.c.of_task,
                    sample.c.slot == ranked.c.of_slot,
                    sample.c.digest == ranked.c.digest,
                ),
            )
        )
        .where(_t.id.in_(chosen))
    )


@cache
def _statement(dialect: str, *, one: bool) -> tuple[Any, list[str]]:
    """The statement, whose cost does not depend on a Task's size (a few index lookups and at most 32 slots), and its column
    names. On a server each row is packed into one value, because the driver takes longer for the descriptions of so many
    columns than the server for the answer.
    """
    found = _of_one(dialect) if one else _of_many(dialect)
    names = [str(column.key) for column in found.selected_columns]
    return (found if dialect == "sqlite" else batches.packed(found, dialect)), names


def _rows(connection: Connection, task_ids: Sequence[int], since: int) -> list[dict[str, Any]]:
    dialect, one = connection.dialect.name, len(task_ids) == 1
    statement, names = _statement(dialect, one=one)
    parameters: dict[str, Any] = {"since": since, **({"only": task_ids[0]} if one else {"ids": list(task_ids)})}
    answer = connection.execute(statement, parameters)
    rows: Any = answer.all() if dialect == "sqlite" else batches.json_rows(answer.scalars())
    return [dict(zip(names, row, strict=True)) for row in rows]


def progress(connection: Connection, task_ids: Sequence[int], now: int) -> list[dict[str, Any]]:
    """The progress objects of these Tasks, newest first; unknown ids are left out. One statement reads those of one Task
    or of several. Of several, one more reads the errors of each Task with rows that wait for a retry. If any has children,
    one more reads the sums of all these."""
    found: dict[int, dict[str, Any]] = {}
    task_ids = [in_range(task_id) for task_id in task_ids]
    failures: dict[int, list[Any]] = {}
    parents: list[int] = []
    for row in _rows(connection, task_ids, now - micros(RATE_WINDOW_S)):
        if row["turning"] == PURGING:
            continue
        if row["id"] not in found:
            found[row["id"]] = _progress_object(row, now)
            if row["children"]:
                parents.append(row["id"])
        if "top" in row:
            failures[row["id"]] = _listed(row["top"])
            found[row["id"]]["retrying_errors"] = _retrying_errors(_listed(row["waiting"]))
        elif row["error_count"]:
            failures.setdefault(row["id"], []).append([row[f"error_{name}"] for name in _ERROR_FIELDS])
    for task_id, entries in failures.items():
        found[task_id]["top_errors"] = [
            {
                "template": shown_template(digest, status or "", message or ""),
                "message": message or "",
                "status": status,
                "count": int(count),
                "sample_job_id": job,
            }
            for count, digest, message, status, job in sorted(entries, key=lambda each: (-int(each[0]), each[1]))
        ]
    for task_id, each in found.items():
        if each["retrying"] and len(task_ids) > 1:
            rows = connection.execute(_waiting_rows(connection.dialect.name), {"only": task_id}).scalar()
            each["retrying_errors"] = _retrying_errors(_listed(rows))
    for task_id, known in children.below(connection, parents).items():
        _add_children(found[task_id], known)
    return [found[task_id] for task_id in sorted(found, reverse=True)]


def _add_children(found: dict[str, Any], known: children.Below) -> None:
    done, total = known.tasks - known.open, sum(known.counts.values())
    summed: Children = {
        "count": known.tasks, "open": known.open, "done": done,
        "counts": cast("Counts", {"total": total, **known.counts}),
    }  # fmt: skip
    found["children"] = summed
    found["version"] += known.version
    counts, sealed = found["counts"], found["split"]["state"] == "sealed"
    is_over = sealed and not counts["enqueue"] + counts["working"] + counts["stopped"]
    if known.open and is_over and found["state"] == State.RUNNING:
        found["state_reason"] = WAITS


WAITS: Final = "waiting_for_children"
"""``state_reason`` of a Task of which no item is open, and that waits for its children."""


@cache
def _waiting_rows(dialect: str) -> Any:
    return sa.select(_waiting(dialect, sa.bindparam("only", type_=sa.BigInteger)))


def _listed(value: Any) -> list[Any]:
    """The rows of a :func:`~asynctask.database.batches.json_list`."""
    return (orjson.loads(value) if isinstance(value, str) else value) or []


def shown_template(digest: str, status: str, message: str) -> str:
    """What the messages of a group have in common, from one of them: its template, or the message of a group by code."""
    return template_of(message) if digest in groups_of(message, (status,)) else message


def groups_of(message: str, statuses: Collection[str] = PROBLEM) -> set[str]:
    """The digests of the groups by template to which this message may belong."""
    return {group_of(Failure(code, message), status) for code in BY_MESSAGE for status in statuses}


def _retrying_errors(waiting: list[list[Any]]) -> list[RetryingError]:
    """Groups the last errors of rows that wait for a retry, most frequent first."""
    groups: dict[tuple[str, str], RetryingError] = {}
    for job_id, text, left in sorted(waiting):  # each statement lists them in its own order
        said = loads(text)
        message, code = str(said["message"]), str(said["code"])
        template = template_of(message)
        first: RetryingError = {
            "template": template, "message": message, "code": code, "count": 0, "sample_job_id": job_id
        }  # fmt: skip
        groups.setdefault((code, template), first)["count"] += int(left)
    return sorted(groups.values(), key=lambda each: (-each["count"], each["template"]))[:TOP_ERRORS]


def first_progress(row: dict[str, Any]) -> dict[str, Any] | None:
    """The progress object of a Task that was just created with all its items; None for a Task of a session, for which it
    may wait. ``row``: the Task's columns as written.
    """
    if row["session"] is not None:
        return None
    counts: dict[str, int] = dict.fromkeys((f"n_{name}" for name in _TALLIED), 0)
    if row["created"]:
        counts |= {"n_enqueue": row["created"], "n_jobs": row["created_jobs"], "n_version": 1}
    return _progress_object({**_NEW_TASK, **row, **counts}, row["created_at"])


_NEW_TASK: dict[str, Any] = {
    "split_reason": None, "interval_s": 0.0, "tolerated_failures": None, "generation": 1, "version": 1, "started_at": None,
    "round_at": None, "next_due_at": None, "moved_at": None, "sampled_at": None, "sampled_done": None,
    "queued_callbacks": None, "corrections": None, "children": 0, "mended": 0, "lent": 0, "named": 0, "turning": None,
}  # fmt: skip
"""Default values of a new Task's other columns."""


_DONE: Final = ("finish", "failed", "error", "cancelled")


def _progress_object(row: dict[str, Any], now: int) -> dict[str, Any]:
    counts = {name: int(row[f"n_{name}"] or 0) for name in _COUNTS}
    total = sum(counts.values())
    # Rows that a retry is about to reopen have not ended in its generation, although they still have their old status.
    reopened = str(row["turn_statuses"]).split(",") if row["turning"] == "retry" else ()
    done = sum(counts[name] for name in _DONE if name not in reopened)
    rate = _rate(row, done, now)
    sealed, is_open, is_paused = (
        row["split_state"] != "splitting",
        row["split_state"] == "open",
        row["state"] == State.PAUSED,
    )
    retrying = int(row["n_retrying"] or 0)
    over = row["finished_at"] is not None
    tolerated = row["tolerated_failures"]
    moved = max(row["updated_at"], row["moved_at"] or 0)
    corrections = _json(row["corrections"] or [])
    # One list at a time takes a row, and none after it finished, so the sum counts each row once.
    mended = row["mended"] + sum(int(finish or 0) for *_, finish, _, _ in corrections)
    found: Progress = {
        "task_id": row["id"],
        "title": row["title"],
        "worker": row["worker_name"],
        "owner": row["owner"] or None,
        "state": row["state"],
        "state_reason": row["state_reason"] or _reason(row, counts),
        "done": over,
        "split": {
            "state": row["split_state"],
            "reason": row["split_reason"],
            "planned": row["planned"],
            "created": row["created"],
            "rejected": row["rejected"],
            "open_until": rfc3339(row["split_until"]) if is_open else None,
        },
        "counts": cast("Counts", {"total": total, **counts}),
        "retrying": retrying,
        "next_retry_at": rfc3339(row["next_due_at"]) if retrying else None,
        "retrying_errors": [],
        "jobs": int(row["n_jobs"] or 0),
        "progress": {
            "done": done,
            "remaining": total - done,
            "percent": percent(done, total) if sealed and (row["generation_sealed"] or is_open) else None,
            "rate_per_s": rate,
            "eta_s": _eta_s(row, done, total - done, retrying, now) if not over and sealed and not is_paused else None,
        },
        "control": {
            "parallel": row["parallel"],
            "in_flight": _in_flight(row),
            "interval": float(row["interval_s"]),
            "priority": row["priority"],
            "session": row["session"],
            "key": row["key_field"],
            "tolerated_failures": int(tolerated) if tolerated is not None and tolerated.isdecimal() else tolerated,
            "start_at": rfc3339(row["start_at"]),
        },
        "top_errors": [],
        "callbacks": _callbacks(row),
        "result": _result(row),
        "resubmit_of": row["resubmit_of"],
        "resubmitted_by": sorted(i for i, of, state, *_ in corrections if of == row["id"] and state != State.REJECTED),
        # Of a Task that is purged, only the rows that it mended are known.
        "resubmitted": max(mended, sum(int(items) for _, of, _, items, *_ in corrections if of == row["id"])),
        "parent": row["parent"],
        "children": None,
        "mended": mended,
        "generation": row["generation"],
        "version": int(row["version"] + (row["n_version"] or 0) + sum(own + int(n or 0) for *_, own, n in corrections)),
        "poll_after_ms": _poll_after(row["state"], over),
        "created_at": rfc3339(row["created_at"]),
        "started_at": rfc3339(row["started_at"]),
        "updated_at": rfc3339(moved),
        "finished_at": rfc3339(row["finished_at"]),
    }
    return dict(found)


def _json(value: Any) -> Any:
    """A value of JSON, which only some drivers have read."""
    return orjson.loads(value) if isinstance(value, str) else value


def _callbacks(row: dict[str, Any]) -> list[CallbackState]:
    """The Task's callbacks; ``job_id`` and ``status`` are those of the job queued in the current generation, if any."""
    if row["callbacks"] is None:
        return []
    jobs = {name: (job_id, status) for name, job_id, status, _ in _json(row["queued_callbacks"] or [])}
    found: list[CallbackState] = []
    for each in loads(row["callbacks"]):
        job_id, status = jobs.get(each["name"], (None, None))
        found.append({"name": each["name"], "worker": each["worker"], "status": status, "job_id": job_id})
    return found


def _result(row: dict[str, Any]) -> ExportResult | None:
    """The result of an export's merge in the current generation; None before the merge, and for other Tasks."""
    for name, _, status, result in _json(row["queued_callbacks"] or []):
        if name == MERGE and status == Status.FINISH:
            found = _json(result)
            return (
                None if found is None else cast("ExportResult", {key: found[key] for key in ExportResult.__annotations__})
            )
    return None


def percent(done: int, total: int) -> float | None:
    """The percentage, floored to two decimals; 100 only when no item remains; None without items."""
    if total == 0:
        return None
    return 100.0 if done >= total else math.floor(done * 10_000 / total) / 100


def _in_flight(row: dict[str, Any]) -> int:
    """How many jobs run or are about to: open jobs that processes hold, at most the limit."""
    not_due = int(row["n_enqueue"] or 0) - int(row["n_retrying"] or 0) + int(row["n_working"] or 0)
    held = min(int(row["lent"]) + int(row["named"]), not_due)
    limit = at_once(row["parallel"], interval_of(row["interval_s"]))
    return held if limit is None else min(held, limit)


def waits_for_session(task: Mapping[str, Any]) -> bool:
    """Whether a Task (its columns) waits for its session."""
    return task["session_waits"] is not None and task["state"] in (State.SPLITTING, State.RUNNING)


def _reason(row: dict[str, Any], counts: dict[str, int]) -> str | None:
    if waits_for_session(row):
        return "waiting_for_session"
    only_stopped = counts["stopped"] > 0 and counts["enqueue"] == counts["working"] == 0
    return "stopped_jobs" if only_stopped and row["state"] == State.RUNNING else None


def _rate(row: dict[str, Any], done: int, now: int) -> float | None:
    """Items per second over the last 30 s; over the Task's whole time if it is closed or has no sample."""
    measured = _measured(row, done, now)
    return None if measured is None else round(measured[0], 1)


def _measured(row: dict[str, Any], done: int, now: int) -> tuple[float, float] | None:
    """The rate, and the seconds over which it was measured."""
    if row["started_at"] is None:
        return None
    until, since, before = row["closed_at"] or now, row["started_at"], 0
    if row["closed_at"] is None and row["sampled_at"] is not None:
        since, before = row["sampled_at"], row["sampled_done"] or 0
    seconds = (until - since) / SECOND
    return (max(0.0, (done - before) / seconds), seconds) if seconds > 0 else None


def _eta_s(row: dict[str, Any], done: int, remaining: int, retrying: int, now: int) -> float | None:
    """Estimated seconds until no item remains: by the current rate, or by the rounds if these are the limit. Items that
    wait for a retry begin when the next one is due."""
    pause_s = max(0, (row["next_due_at"] or now) - now) / SECOND if retrying else 0.0
    rate, seconds = _measured(row, done, now) or (0.0, 0.0)
    by_rate = max(remaining / rate, pause_s + retrying / rate) if rate > 0 else None
    interval, began = interval_of(row["interval_s"]), row["round_at"]
    if not interval or began is None or row["state"] != State.RUNNING:
        return None if by_rate is None else round(by_rate, 1)
    most = at_once(row["parallel"], interval) or 1
    to_next_s = max(0, next_round(began, None, 0, interval, now) - now) / SECOND
    by_rounds = max(
        eta_by_rounds(remaining - _in_flight(row), most, interval / SECOND, to_next_s),
        pause_s + eta_by_rounds(retrying, most, interval / SECOND, 0.0),
    )
    if are_late(rate * seconds, seconds, most, interval / SECOND):  # workers or jobs are slower than the rounds
        return None if by_rate is None else round(max(by_rate, by_rounds), 1)
    return round(by_rounds, 1)


def eta_by_rounds(left: int, most: int, interval_s: float, to_next_s: float) -> float:
    """Seconds until the last round begins that ``left`` items need, with at most ``most`` items each; the first begins in
    ``to_next_s`` seconds."""
    return to_next_s + (math.ceil(left / most) - 1) * interval_s if left > 0 else 0.0


def are_late(done: float, seconds: float, most: int, interval_s: float) -> bool:
    """Whether fewer items (``done``) ended in these ``seconds`` than the rounds of that time had, without the last two
    rounds, which may still run."""
    rounds = math.floor(seconds / interval_s) - 2
    return rounds > 0 and done < 0.8 * rounds * most


def _poll_after(state: str, over: bool) -> int:
    if over:
        return 10_000
    return 3_000 if state == State.PAUSED else 1_000


_AT_ONCE: Final = 50
"""Number of progress objects that one statement reads, because the messages in each may have 50,000 characters."""


GROUPS: Final = ("running", "attention", "finished")
"""Of Tasks: those that are not done, those that need a person (:func:`_needs_attention`), and those that are done."""

_ATTENTION_AMONG: Final = 10_000
"""The newest Tasks, done or not, among which those that need a person are found, so that the cost does not grow with the
number of Tasks. Older ones are found as long as they are not done."""


def _of_group(group: str | None) -> sa.Select[Any]:
    """A query for the ids of the Tasks of a group, of all without one."""
    found = sa.select(_t.id)
    if group != "attention":
        is_done = {"running": _t.finished_at.is_(None), "finished": _t.finished_at.is_not(None)}
        return found if group is None else found.where(is_done[group])
    oldest = sa.select(sa.func.coalesce(sa.func.max(_t.id), 0) - _ATTENTION_AMONG).scalar_subquery()
    open_before = sa.select(_t.id).where(_t.finished_at.is_(None), _t.id <= oldest)
    among = sa.union_all(sa.select(_t.id).where(_t.id > oldest), open_before).subquery("among")
    return found.select_from(among.join(tasks, _t.id == among.c.id)).where(_needs_attention())


def _needs_attention() -> Any:
    """Whether a Task has rows that failed or were not accepted, and have not succeeded since in a Task that corrects them;
    or was not accepted, or not read to its end; or paused itself, or what should have followed it failed. A correction that
    was not accepted does not: what it should have corrected does as long as it is not mended."""

    def sums(found: sa.Select[Any]) -> Any:
        return sa.func.coalesce(found.correlate(tasks).scalar_subquery(), 0)

    unsuccessful = sums(sa.select(sa.func.sum(_n.failed + _n.error)).where(_n.task_id == _t.id)) + _t.rejected
    finished = sa.select(sa.func.sum(_n.finish)).join_from(
        task_ancestors, task_tallies, _n.task_id == task_ancestors.c.task_id
    )
    mended = _t.mended + sums(finished.where(task_ancestors.c.ancestor_id == _t.id))
    return (_t.resubmit_of.is_(None) | (_t.state != str(State.REJECTED))) & sa.or_(
        _t.state_reason.in_(("too_many_failures", "callback_failed")),
        _t.split_state == "failed",
        (_t.state == str(State.REJECTED)) & (_t.rejected == 0),
        unsuccessful > mended,
    )


def progress_page(
    database: Database,
    now: int,
    *,
    ids: Collection[int] | None = None,
    group: str | None = None,
    since: int | None = None,
    state: str | None = None,
    worker: str | None = None,
    owner: str | None = None,
    parent: int | None = None,
    after: int | None = None,
    limit: int = 50,
) -> Iterator[dict[str, Any]]:
    """Progress objects by filters, newest first, read as they are consumed. ``group``: of :data:`GROUPS`; ``since``:
    created then or later; ``after``: the last id of the previous page."""
    if not all(map(is_storable, filter(None, (state, worker, owner)))):
        return
    statement = _of_group(group).order_by(_t.id.desc()).limit(limit)
    if since is not None:
        # The search for enough of them ends at the first that is older.
        older = sa.select(_t.id).where(_t.created_at < since).order_by(_t.id.desc()).limit(1).scalar_subquery()
        statement = statement.where(_t.created_at >= since, _t.id > sa.func.coalesce(older, 0))
    if ids is not None:
        statement = statement.where(_t.id.in_([in_range(task_id) for task_id in ids]))
    if state is not None:
        statement = statement.where(_t.state == state)
    if worker is not None:
        statement = statement.where(_t.worker_name == worker)
    if owner is not None:
        statement = statement.where(_t.owner == owner)
    if parent is not None:
        statement = statement.where(_t.parent == in_range(parent))
    if after is not None:
        statement = statement.where(_t.id < in_range(after))
    with database.read() as connection:
        found = [int(i) for (i,) in connection.execute(statement)]
    for some in chunks(found, _AT_ONCE):
        with database.read() as connection:
            objects = progress(connection, some, now)
        yield from objects


# -- changes, for many readers of the same Tasks


class Changed(NamedTuple):
    """A Task that has changed: its current mark and its progress object; both None if it was removed."""

    mark: str | None
    progress: dict[str, Any] | None


_MARKS_AT_ONCE: Final = 500
"""Number of Tasks whose marks one statement reads."""


@cache
def _marks(dialect: str) -> Any:
    """A query for the marks of several Tasks: all values on which a progress object depends, except the time."""
    chosen: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
    moved = sa.select(_n.task_id.label("of_task"), sa.func.sum(_n.version).label("n_version"))
    sums = moved.where(_n.task_id.in_(chosen)).group_by(_n.task_id).subquery("sums")
    return (
        sa.select(
            _t.id,
            _t.turning,
            _t.children,
            _t.generation,
            _t.version,
            sums.c.n_version,
            _queued(dialect),
            _corrections(dialect),
        )
        .select_from(tasks.outerjoin(sums, sums.c.of_task == _t.id))
        .where(_t.id.in_(chosen))
    )


def changed(connection: Connection, known: Mapping[int, str | None], now: int) -> dict[int, Changed]:
    """The Tasks of ``known`` (id -> mark) whose mark has changed.

    The cost is one cheap statement for up to 500 Tasks, and :func:`progress` of the changed ones. The marks are read first,
    so a progress object is at least as new as its mark.
    """
    ids, found = list(known), dict[int, Changed]()
    for start in range(0, len(ids), _MARKS_AT_ONCE):
        part = ids[start : start + _MARKS_AT_ONCE]
        rows = connection.execute(_marks(connection.dialect.name), {"ids": part})
        seen = {int(row[0]): tuple(row) for row in rows if row[1] != PURGING}
        for task_id, known_below in children.below(connection, [i for i, row in seen.items() if row[2]]).items():
            seen[task_id] += (known_below.tasks, known_below.open, known_below.version)
        marks = {task_id: str(mark) for task_id, mark in seen.items()}
        moved = [task_id for task_id in part if task_id not in marks or known[task_id] != marks[task_id]]
        objects = {each["task_id"]: each for each in (progress(connection, moved, now) if moved else ())}
        for task_id in moved:
            each = objects.get(task_id)
            found[task_id] = Changed(marks.get(task_id), each) if each is not None else Changed(None, None)
    return found


# -- samples

_LAST = sa.select(sa.func.max(_s.at)).where(_s.task_id == _t.id).scalar_subquery()


def unsampled(connection: Connection, now: int, every_s: float) -> bool:
    """Whether any running Task has no sample of the last ``every_s`` seconds."""
    old = sa.or_(_LAST.is_(None), now - micros(every_s) >= _LAST)
    return connection.execute(sa.select(_t.id).where(_t.finished_at.is_(None), old).limit(1)).first() is not None


def measure_anew(connection: Connection, task_id: int, now: int) -> None:
    """Restarts the measurement of a Task's rate: earlier values, under other knobs or while it was paused, do not predict
    its end."""
    done = sa.func.coalesce(sa.func.sum(_n.finish + _n.failed + _n.error + _n.cancelled), 0)
    problems = sa.func.coalesce(sa.func.sum(_n.failed + _n.error), 0)
    n_done, n_problems = connection.execute(sa.select(done, problems).where(_n.task_id == task_id)).one()
    recent = task_samples.delete().where(_s.task_id == task_id, _s.at >= now - micros(RATE_WINDOW_S))
    connection.execute(recent)
    connection.execute(task_samples.insert().values(task_id=task_id, at=now, done=int(n_done), problems=int(n_problems)))


def sample(connection: Connection, now: int, every_s: float, keep: int = 100) -> int:
    """Stores a sample of each running Task, at most once in ``every_s`` seconds each; returns how many were stored.

    Keeps the last ``keep`` samples of a Task.
    """
    done = sa.func.sum(_n.finish + _n.failed + _n.error + _n.cancelled)
    problems = sa.func.sum(_n.failed + _n.error)
    statement = (
        sa.select(_t.id, done, problems)
        .join(task_tallies, _n.task_id == _t.id)
        .where(_t.finished_at.is_(None), sa.or_(_LAST.is_(None), now - micros(every_s) >= _LAST))
        .group_by(_t.id)
    )
    rows = [
        {"task_id": task_id, "at": now, "done": int(n_done), "problems": int(n_problems)}
        for task_id, n_done, n_problems in connection.execute(statement)
    ]
    if rows:
        connection.execute(task_samples.insert(), rows)
        connection.execute(
            task_samples.delete().where(
                _s.task_id.in_([row["task_id"] for row in rows]), _s.at < now - micros(every_s * keep)
            )
        )
    return len(rows)
