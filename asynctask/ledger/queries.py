"""Queries of the ledger besides progress (Events, failures, rejected rows, the log, the backlog), and operations on single
jobs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, Final, NamedTuple, TypedDict, cast

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.clock import Time, rfc3339
from asynctask.core.states import OPEN, PROBLEM, TERMINAL, Reason, State, Status
from asynctask.core.transitions import (
    BLOCKED,
    MERGE,
    Transition,
    ask_stop,
    at_rest,
    cancel,
    explicit_retry,
    hurry,
    recorded,
    start,
    stop,
)
from asynctask.database.batches import MEASURED, among, fetch_wide, for_update
from asynctask.database.engine import Database
from asynctask.database.notify import notify
from asynctask.database.retrying import repeatable
from asynctask.database.tables import (
    events,
    item_errors,
    loans,
    queues,
    resubmitted_rows,
    task_errors,
    task_log,
    task_rejects,
    task_samples,
    task_tallies,
    tasks,
)
from asynctask.errors import Conflict, NotFound, OtherEngine
from asynctask.iterable import item_statuses, unpack
from asynctask.ledger import corrections, foreign, lending, processes, search, sessions
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, Reject, chunks, dumps, in_range, loads, stamp
from asynctask.ledger.events import (
    IN_LOAN,
    IS_OPEN,
    LAST_ERROR,
    RESUMABLE,
    UNHELD,
    Change,
    EventRecord,
    Failure,
    Note,
    apply,
    read_events,
    with_rows,
)
from asynctask.ledger.progress import shown_template
from asynctask.ledger.standalone import ENGINE
from asynctask.ledger.tasks import close_after
from asynctask.messages import SECRET, is_storable, masked

_t, _e, _x, _n, _l, _s = tasks.c, events.c, task_errors.c, task_tallies.c, loans.c, task_samples.c

Take = Callable[[Iterator[Any]], list[Any]]
"""Consumes the rows of a page: ``list``, or a reader that ends the page at a size. Rows are read as they are consumed."""


# -- Events


class Outcomes(TypedDict):
    """The current outcomes of the items of one job."""

    finish: int
    failed: int
    error: int
    cancelled: int


class JobProgress(TypedDict):
    """The progress of one job."""

    done: float
    total: float | None
    percent: float | None


class LastError(TypedDict):
    """The error of the last attempt of a job that raised."""

    code: str
    message: Annotated[str, "Its first 1,000 characters."]
    process: Annotated[str | None, "The process that performed that attempt, or recorded it."]


class ListedEvent(TypedDict):
    """The record of one job in a list; for a job of several items, one record per item."""

    id: int
    job_id: str
    task_id: int | None
    worker_name: str | None
    worker: Annotated[str | None, "The same as worker_name, by the name of earlier releases."]
    queue: str | None
    status: Status
    attempt: int
    retries: int
    row: int | None
    items: Annotated[int, "How many items the job has."]
    outcomes: Outcomes
    params: Any
    added_messages: Annotated[list[dict[str, Any]], "That of the begin of an attempt names its `process`."]
    messages: Annotated[list[dict[str, Any]], "The same as added_messages, by the name of earlier releases."]
    result: Any
    problem: str | None
    due_at: Time | None
    waits_for: Annotated[str | None, "`key`: it waits for earlier jobs of its key."]
    created_at: Time | None
    started_at: Time | None
    finished_at: Time | None
    process: str | None
    callback_of: Annotated[int | None, "The Task whose callback it is."]
    checkpoint: Annotated[Any, "The last checkpoint, from which its next attempt continues."]
    progress: Annotated[JobProgress | None, "How far it said to be, in units of its own."]
    stopping: Annotated[bool, "A person stopped it, and its worker has not let go of it yet."]
    dismissed: Annotated[bool, "It ended in an error, and a person dismissed it from the dead jobs."]


def loads_shown(text: str | None) -> Any:
    """A job's arguments from their JSON text, as they are displayed; None for None."""
    value = loads(text)
    return value if text is None or SECRET not in text else masked(value)


def _event_object(row: dict[str, Any]) -> dict[str, Any]:
    """An Event's record, as Python, the command line and the API return it."""
    messages = loads(row["added_messages"]) or []
    blocked = row["due_at"] == BLOCKED
    saved = loads(row["checkpoint"]) or {}
    found: ListedEvent = {
        "id": row["id"],
        "job_id": row["job_id"],
        "task_id": row["task_id"],
        "worker_name": row["worker"],
        "worker": row["worker"],
        "queue": row["in_queue"],
        "status": row["status"],
        "attempt": row["attempt"],
        "retries": row["retries"],
        "row": row["first_row"],
        "items": row["items"],
        "outcomes": cast("Outcomes", {status: row[f"n_{status}"] for status in Outcomes.__annotations__}),
        "params": loads_shown(row["params"]),
        "added_messages": messages,
        "messages": messages,
        "result": loads(row["result"]),
        "problem": row["problem"],
        "process": row["process"],
        "callback_of": row["callback_of"],
        "checkpoint": saved.get("state"),
        "progress": _progress_of(saved),
        "stopping": bool(row["stopping"]) and row["status"] in OPEN,
        "dismissed": row["status"] == Status.ERROR and row["dismissed"] == row["finished_at"],
        "due_at": None if blocked else rfc3339(row["due_at"]),
        "waits_for": "key" if blocked else None,
        "created_at": rfc3339(row["created_at"]),
        "started_at": rfc3339(row["started_at"]),
        "finished_at": rfc3339(row["finished_at"]),
    }
    return dict(found)


def _progress_of(saved: Mapping[str, Any]) -> JobProgress | None:
    """The progress that a single job reported with its last checkpoint."""
    done, total = saved.get("done"), saved.get("total")
    if done is None:
        return None
    percent = None if not total else min(100.0, math.floor(done * 10_000 / total) / 100)
    return {"done": done, "total": total, "percent": percent}


_NAME: Final[Any] = sa.func.coalesce(_e.worker_name, _t.worker_name)
_EVENT = sa.select(
    *(column for column in events.c if column.name not in LAST_ERROR),
    _NAME.label("worker"),
    sa.func.coalesce(_e.queue, _t.queue).label("in_queue"),
).select_from(events.outerjoin(tasks, _t.id == _e.task_id))
_TEXTS: Final = (_e.params, _e.options, _e.added_messages, _e.result, _e.checkpoint)
"""The columns of an Event that may be long."""


def _item_objects(
    row: dict[str, Any], statuses: Collection[str], failures: Mapping[tuple[int, int | None], Failure]
) -> Iterator[dict[str, Any]]:
    """The record of an Event (:func:`_event_object`) for each of its items with one of these statuses; without statuses,
    for each item. The record of a slice's item has the messages of its job and of its own row. If it failed (``failures``),
    its last message is the reason, and its ``problem`` the code.
    """
    found = _event_object(row)
    if row["items"] == 1:
        if not statuses or row["status"] in statuses:
            yield found
        return
    for item in _items(row):
        if statuses and item.status not in statuses:
            continue
        said = [message for message in found["messages"] if message.get("row") in (None, item.row)]
        problem = None if item.status in TERMINAL else found["problem"]
        if (why := failures.get((row["id"], item.row))) is not None:
            at, problem = row["finished_at"] or row["started_at"] or row["created_at"], why.code
            said.append(stamp(at, item.status, why.message, row["attempt"], item.row))
        own = {"row": item.row, "status": item.status, "params": item.params, "result": item.result, "problem": problem}
        yield {**found, **own, "added_messages": said, "messages": said}


class _Item(NamedTuple):
    row: int | None
    status: str
    params: Any
    result: Any


def _items(row: Mapping[str, Any]) -> list[_Item]:
    """The items of an Event; ``row``: its columns, in which ``params`` is None if it was not read."""
    params, result = loads_shown(row["params"]), loads(row["result"])
    if row["items"] == 1:
        return [_Item(row["first_row"], row["status"], params, result)]
    rows, items = unpack(params)
    results = result or {}
    each = zip(rows, item_statuses(row["marks"], row["items"], row["status"]), items, strict=True)
    return [_Item(number, status, item, results.get(str(number))) for number, status, item in each]


def _has_item(statuses: Collection[str]) -> Any:
    """The condition that an Event has an item with one of these statuses."""
    c = events.c
    ended = [c[f"n_{status}"] > 0 for status in statuses if str(status) not in OPEN]
    whole = c.status.in_([str(status) for status in statuses])
    return whole | ((c["items"] > 1) & sa.or_(*ended)) if ended else whole


def event(connection: Connection, job_id: str) -> dict[str, Any]:
    """One Event by its job id. Raises :class:`NotFound`."""
    row = None
    if is_storable(job_id):
        wanted = _EVENT.add_columns(_e.last_error, _e.traceback).where(_e.job_id == job_id, _e["items"] > 0)
        row = connection.execute(wanted).mappings().one_or_none()
    if row is None:
        raise NotFound(f"there is no job {job_id[:64]!r}")
    return {**_event_object(dict(row)), "last_error": loads(row["last_error"]), "traceback": row["traceback"]}


def failed_beside(connection: Connection, task_id: int | None, event_id: int) -> tuple[str | None, str | None]:
    """The job ids of the failed jobs of a Task next to an Event, before and behind it; None without such."""
    if task_id is None:
        return None, None
    failed = sa.select(_e.job_id).where(_e.task_id == task_id, _e.problem.is_not(None), _has_item(PROBLEM)).limit(1)
    before = connection.scalar(failed.where(_e.id < event_id).order_by(_e.id.desc()))
    return before, connection.scalar(failed.where(_e.id > event_id).order_by(_e.id))


def event_page(
    database: Database,
    task_id: int,
    statuses: Collection[str] = (),
    *,
    after: int | None = None,
    after_row: int | None = None,
    limit: int = 100,
    text: str | None = None,
) -> Iterator[dict[str, Any]]:
    """The records of a Task's items, in the order of their Events' ids and their rows, read as they are consumed.
    ``statuses``: only items with one of these; ``after``: behind that Event, or within it behind ``after_row``; ``text``:
    only items whose JSON contains it, in any case."""
    left, is_last = limit, False
    escaped = None if text is None else dumps(text)[1:-1]
    while left > 0 and not is_last:
        with database.read() as connection:
            statement = _listed(task_id, statuses, after, after_row).limit(left)
            if escaped is not None:
                statement = statement.where(holds(connection, _e.params, escaped))
            listed = connection.execute(statement).all()
        enough = bisect_left(list(accumulate(int(each.matching) for each in listed)), left) + 1
        is_last = len(listed) < left and enough >= len(listed)
        for row in fetch_wide(database, _EVENT, _e.id, _TEXTS, [int(each.id) for each in listed[:enough]]):
            failures: Mapping[tuple[int, int | None], Failure] = {}
            if row["items"] > 1:
                with database.read() as connection:
                    failures = _failures(connection, [row["id"]])
            behind = after_row if row["id"] == after else None
            for item in _item_objects(row, statuses, failures):
                if behind is not None and (item["row"] or 0) <= behind:
                    continue
                # Of one item of several, and as it is shown: a secret is not found by its text.
                if escaped is not None and escaped.lower() not in dumps(item["params"]).lower():
                    continue
                yield item
                left -= 1
                if not left:
                    return
        if not is_last:
            after, after_row = int(listed[:enough][-1].id), None


def holds(connection: Connection, column: Any, text: str) -> Any:
    """The condition that a text column contains a text, in any case."""
    position = sa.func.strpos if connection.dialect.name == "postgresql" else sa.func.instr
    return position(sa.func.lower(sa.func.coalesce(column, "")), sa.func.lower(text)) > 0


def _listed(task_id: int, statuses: Collection[str], after: int | None, after_row: int | None) -> Any:
    """A query for the Events of a page, in order: id, number of items, and number of items with the wanted statuses."""
    ended = [_e[f"n_{status}"] for status in statuses if str(status) not in OPEN]
    is_open = [str(status) for status in statuses if str(status) in OPEN]
    over = _e.n_finish + _e.n_failed + _e.n_error + _e.n_cancelled
    wanted = sum(ended, sa.case((_e.status.in_(is_open), _e["items"] - over), else_=0) if is_open else sa.literal(0))
    matching = sa.case((_e["items"] == 1, 1), else_=wanted) if statuses else _e["items"]
    # Both orders are that of the list; each has an index, so that a page of any Task costs the same.
    by_id = bool(statuses) and set(statuses) <= {Status.FAILED, Status.ERROR}
    statement = (
        sa.select(_e.id, _e["items"].label("size"), matching.label("matching"))
        .where(_e.task_id == task_id)
        .order_by(_e.id if by_id else _e.seq)
    )
    if statuses:
        statement = statement.where(_has_item(statuses))
    if by_id:
        statement = statement.where(_e.problem.is_not(None))  # the partial index
    if after is None:
        return statement
    column, place = (_e.id, in_range(after)) if by_id else (_e.seq, _seq_of(task_id, in_range(after)))
    return statement.where(column > place if after_row is None else column >= place)


def _seq_of(task_id: int, event_id: int) -> Any:
    """The place of an Event in its Task; if it is none of this Task, that of the last one before it."""
    own = events.alias("own").c
    found = sa.select(own.seq).where(own.id == event_id, own.task_id == task_id).scalar_subquery()
    before = sa.select(sa.func.max(own.seq)).where(own.task_id == task_id, own.id <= event_id).scalar_subquery()
    return sa.func.coalesce(found, before, -1)


def jobs_page(
    database: Database,
    *,
    resumable: bool = False,
    worker: str | None = None,
    statuses: Collection[str] = (),
    after: int | None = None,
    limit: int = 100,
) -> Iterator[dict[str, Any]]:
    """Events without a Task, or stopped ones (``resumable``), newest first, before the id ``after``; of one worker and with
    these statuses, if given. They are read as they are consumed."""
    statement: Any = sa.select(_e.id).where(_e.task_id.is_(None), _e["items"] > 0)
    its_worker: Any = _e.worker_name
    if resumable:
        stopped = (_e.problem == RESUMABLE) & (_e.status == str(Status.STOPPED))
        statement, its_worker = _EVENT.with_only_columns(_e.id).where(stopped), _NAME
    statement = statement.order_by(_e.id.desc()).limit(limit)
    if worker is not None:
        statement = statement.where(its_worker == worker)
    if statuses:
        statement = statement.where(_e.status.in_(list(statuses)))
    if after is not None:
        statement = statement.where(_e.id < in_range(after))
    with database.read() as connection:
        found = [int(i) for i in connection.execute(statement).scalars()]
    return (_event_object(row) for row in fetch_wide(database, _EVENT, _e.id, _TEXTS, found))


# -- the search over all Tasks


class FoundEvent(ListedEvent):
    """The record of a job that a search found, and by what."""

    place: Annotated[str, "For `after`: what follows."]
    field: Annotated[str, "The field of the item."]
    value: Annotated[str, "Its value: as the item has it, or in the form that is compared."]
    task_title: str | None


class Found(NamedTuple):
    """A page of a search: the records of jobs, and the place behind which the next page begins; None on the last page. A
    page may be short of its limit, or empty, before the last one."""

    events: list[Any]
    after: str | None


_READ_AT_ONCE: Final = 1_000
_MOST_READ: Final = 10_000
"""Most values that are read for one page, however few of them are of the field, the worker and the owner asked for."""


def search_page(
    database: Database,
    wanted: search.Wanted,
    *,
    field: str | None = None,
    worker: str | None = None,
    owner: str | None = None,
    after: str | None = None,
    limit: int = 50,
    take: Take = list,
) -> Found:
    """The jobs that have a value: of this field and worker, and of Tasks of this owner, if given. In the order of
    :class:`~asynctask.ledger.search.Place`."""
    place = search.Place.first(wanted) if after is None else search.Place.read(after, wanted)
    hits: list[search.Hit] = []
    read, size, more = 0, limit + 1, True
    while more and len(hits) < limit and read < _MOST_READ:
        with database.read() as connection:
            rows = search.behind(connection, wanted, place, size)
            its = [row for row in rows if field is None or row.field == field]
            hits += search.visible(connection, its, worker=worker, owner=owner)
        if rows:
            place = search.Place(int(rows[-1].id), rows[-1].value)
        read, more, size = read + len(rows), len(rows) == size, _READ_AT_ONCE
    if len(hits) > limit:
        hits, place, more = hits[:limit], hits[limit - 1].place, True
    return Found(take(_found_events(database, hits)), str(place) if more else None)


def _found_events(database: Database, hits: Sequence[search.Hit]) -> Iterator[dict[str, Any]]:
    left = iter(hits)
    for row in fetch_wide(database, _EVENT, _e.id, _TEXTS, [hit.event_id for hit in hits]):
        hit = next(each for each in left if each.event_id == row["id"])
        failures: Mapping[tuple[int, int | None], Failure] = {}
        if row["items"] > 1:
            with database.read() as connection:
                failures = _failures(connection, [row["id"]])
        for item in _item_objects(row, (), failures):
            if hit.row in (None, item["row"]):
                value = search.as_given(item["params"], hit.field, hit.place.value)
                found = {"place": str(hit.place), "field": hit.field, "value": value, "task_title": hit.title}
                yield {**item, **found}
                break


def error_groups(connection: Connection, task_id: int, samples: int = 5) -> list[dict[str, Any]]:
    """The failures of a Task grouped by code, or by the template of their message, most frequent first, with up to
    ``samples`` sample rows each."""
    statement = (
        sa.select(
            _x.digest,
            sa.func.max(_x.message),
            sa.func.max(_x.status),
            sa.func.sum(_x["count"]),
            sa.func.max(_x.sample_job_id),
        )
        .where(_x.task_id == task_id)
        .group_by(_x.digest)
        .having(sa.func.sum(_x["count"]) > 0)
        .order_by(sa.func.sum(_x["count"]).desc(), _x.digest)
    )
    groups = []
    for digest, message, status, count, job_id in connection.execute(statement).all():
        c = item_errors.c
        rows = sa.select(c.row).where(c.task_id == task_id, c.digest == digest).order_by(c.row).limit(samples)
        groups.append(
            {
                "template": shown_template(digest, status, message),
                "message": message,
                "status": status,
                "count": int(count),
                "sample_job_id": job_id,
                "sample_rows": [row for (row,) in connection.execute(rows)],
            }
        )
    return groups


def log(database: Database, task_id: int, limit: int = 1_000) -> Iterator[dict[str, Any]]:
    """The actions on a Task with their authors, latest first, read as they are consumed."""
    c = task_log.c
    with database.read() as connection:
        newest = sa.select(c.id).where(c.task_id == task_id).order_by(c.id.desc()).limit(limit)
        ids = [int(i) for i in connection.execute(newest).scalars()]
    for row in fetch_wide(database, sa.select(task_log), c.id, [c.detail], ids):
        yield {"at": rfc3339(row["at"]), "who": row["who"], "action": row["action"], "detail": loads(row["detail"])}


# -- reports

_PAGE = 2_000
_FIRST_PAGE = 100
_PAGE_BYTES = 2_000_000


def _page_size(page: Sequence[Any]) -> int:
    """Number of rows of the next page, from the size of this one, to bound a page's memory: rows vary a thousandfold in
    size."""
    size = sum(len(cell) for row in page for cell in row.values() if isinstance(cell, str))
    return max(10, min(_PAGE, _PAGE_BYTES * len(page) // max(size, 1)))


@dataclass(frozen=True, slots=True)
class EndedRow:
    """An item as a report shows it, with the id of its Event. ``params`` is None if it was not requested."""

    id: int
    seq: int
    first_row: int | None
    status: str
    retries: int
    started_at: int | None
    result: Any
    params: Any


def rows_by_status(
    database: Database,
    task_id: int,
    statuses: Collection[str],
    *,
    params: bool = True,
    only_rows: Collection[int] | None = None,
) -> Iterator[EndedRow]:
    """The items of a Task with these statuses, in row order, for a report; ``only_rows``: with these numbers. Each page
    is read in a transaction of its own, so that a slow consumer keeps none open.
    """
    after, size = -1, _FIRST_PAGE
    columns: list[Any] = [
        _e.id, _e.seq, _e.first_row, _e.status, _e.retries, _e.started_at, _e.result, _e["items"], _e.marks,
    ]  # fmt: skip
    columns.append(_e.params if params else sa.case((_e["items"] > 1, _e.params)).label("params"))
    while True:
        statement = (
            sa.select(*columns)
            .where(_e.task_id == task_id, _e.seq > after, _has_item(statuses))
            .order_by(_e.seq)
            .limit(size)
        )
        if only_rows is not None:
            statement = statement.where(with_rows(only_rows))
        with database.read(once=True) as connection:
            page = connection.execute(statement).mappings().all()
        for row in page:
            for item in _items(dict(row)):
                if item.status in statuses and (only_rows is None or item.row in only_rows):
                    yield EndedRow(
                        row["id"], row["seq"], item.row, item.status, row["retries"], row["started_at"], item.result,
                        item.params,
                    )  # fmt: skip
        if len(page) < size:
            return
        after, size = page[-1]["seq"], _page_size(page)


def failures_by_row(connection: Connection, event_ids: Collection[int]) -> dict[tuple[int, int | None], str]:
    """The final message of each failed item, by Event and row."""
    return {item: failure.message for item, failure in _failures(connection, event_ids).items()}


def _failures(connection: Connection, event_ids: Collection[int]) -> dict[tuple[int, int | None], Failure]:
    c = item_errors.c
    found = sa.select(c.event_id, c.row, c.code, c.message).where(c.event_id.in_(list(event_ids))).order_by(c.id)
    return {(int(i), row): Failure(str(code), str(message)) for i, row, code, message in connection.execute(found)}


def rejects(
    database: Database, task_id: int, *, after: int = 0, limit: int | None = None, cells: bool = True
) -> Iterator[Reject]:
    """The rejected rows of a Task, in row order. Without ``cells``, the largest part, the rows' cells are None."""
    c = task_rejects.c
    statement = sa.select(c.row, c.errors, c.cells if cells else sa.null().label("cells")).where(c.task_id == task_id)
    texts = (c.errors, c.cells) if cells else (c.errors,)
    measured = _PAGE if limit is None else MEASURED  # a page may end early: do not measure many rows that are not read
    after, left = in_range(after), limit
    while left is None or left > 0:
        size = _PAGE if left is None else min(_PAGE, left)
        numbers = statement.with_only_columns(c.row).where(c.row > after).order_by(c.row).limit(size)
        with database.read() as connection:
            page = [int(number) for number in connection.execute(numbers).scalars()]
        for row in fetch_wide(database, statement, c.row, texts, page, measured=measured):
            yield Reject(row["row"], loads(row["errors"]), loads_shown(row["cells"]))
        if len(page) < size:
            return
        after, left = page[-1], None if left is None else left - len(page)


def corrected_numbers(connection: Connection, task_id: int, first: int, last: int) -> dict[int, int]:
    """For the rows of a corrected list from ``first`` to ``last``: the numbers of the rows that they correct, by row."""
    c = resubmitted_rows.c
    found = sa.select(c.row, c.number).where(c.task_id == task_id, c.row.between(first, last))
    return {int(row): int(number) for row, number in connection.execute(found)}


# -- lists of the ledger's jobs, the counterpart of the sets in Redis, which contain only untracked jobs
#
# =============  ====================================================================================================
# ``retry``      ``enqueue`` with ``due_at``, after at least one retry; untracked jobs only until ``due_at``, from which
# they wait in their queue ``schedule``   ``enqueue`` with ``due_at`` in the future, without a retry ``dead``
# ``error``, not dismissed =============
# ====================================================================================================

RETRY: Final = "retry"
SCHEDULE: Final = "schedule"
DEAD: Final = "dead"

COUNTED: Final = 100_000
"""Largest number of jobs that are counted, to bound the cost on a long list."""

_REST_FACTOR: Final = 20  # at most a twentieth of the time is spent on counting the dead

_BATCH: Final = 500  # limits how long SQLite's only write lock is held

_SEARCHED = sa.select(
    _e.id, _e.job_id, _e.params, _e.options, _e.due_at, _e.finished_at, _NAME.label("worker")
).select_from(events.outerjoin(tasks, _t.id == _e.task_id))
_LISTED = sa.select(
    _e.id, _e.job_id, _e.task_id, _e.attempt, _e.retries, _e.params, _e.added_messages, _e.problem, _e.due_at,
    _e.created_at, _e.finished_at, _e.first_row, _e["items"], _NAME.label("worker"),
    sa.func.coalesce(_e.queue, _t.queue).label("in_queue"),
).select_from(events.outerjoin(tasks, _t.id == _e.task_id))  # fmt: skip


_IN_ERROR: Final = _e.problem.is_not(None) & (_e.status == str(Status.ERROR))
IS_DISMISSED: Final[Any] = sa.func.coalesce(_e.dismissed == _e.finished_at, sa.false())


def in_list(set_name: str, now: int) -> Any:
    """The condition that a job is in a list."""
    if set_name == DEAD:
        return _IN_ERROR & ~IS_DISMISSED
    waits = (_e.status == str(Status.ENQUEUE)) & _e.due_at.is_not(None)
    scheduled = (_e.retries == 0) & (_e.due_at > now) & (_e.due_at < BLOCKED)
    retried = (_e.retries > 0) & ((_e["items"] > 0) | (_e.due_at > now))
    return waits & (retried if set_name == RETRY else scheduled)


def _order(set_name: str) -> tuple[Any, Any]:
    return (_e.finished_at.desc(), _e.id.desc()) if set_name == DEAD else (_e.due_at, _e.id)


def listed_ids(
    connection: Connection, set_name: str, now: int, *, offset: int = 0, limit: int = 100, text: str | None = None
) -> list[tuple[int, int]]:
    """The jobs of a list as (when it is due or died, Event id): the first due one first, or the last dead one first.
    ``text``: only jobs with it in their id, worker, parameters or options (no wildcards), among the first 100,000."""
    listed: Any = _SEARCHED.where(in_list(set_name, now)).order_by(*_order(set_name))
    c: Any = _e
    if text is not None:
        position = sa.func.strpos if connection.dialect.name == "postgresql" else sa.func.instr
        first = listed.limit(COUNTED).subquery()
        c = first.c
        holds = [position(sa.func.coalesce(column, ""), text) > 0 for column in (c.job_id, c.worker, c.params, c.options)]
        at = (c.finished_at.desc(), c.id.desc()) if set_name == DEAD else (c.due_at, c.id)
        listed = sa.select(first).where(sa.or_(*holds)).order_by(*at)
    listed = listed.with_only_columns(sa.func.coalesce(c.finished_at, c.due_at), c.id, maintain_column_froms=True)
    return [(int(at or 0), int(i)) for at, i in connection.execute(listed.offset(offset).limit(limit)).all()]


def listed_rows(database: Database, event_ids: Sequence[int]) -> Iterator[dict[str, Any]]:
    """What is shown of these jobs of a list or a queue, in this order, read as it is consumed."""
    return fetch_wide(database, _LISTED, _e.id, (_e.params, _e.added_messages), event_ids)


def count(connection: Connection, set_name: str, now: int) -> int:
    """The length of a list; 100,000 may mean more."""
    first = sa.select(_e.id).where(in_list(set_name, now)).limit(COUNTED).subquery()
    return int(connection.execute(sa.select(sa.func.count()).select_from(first)).scalar_one())


class DeadCount:
    """The length of the dead list in the ledger, for whoever asks again and again. No index tells dead jobs from refused
    ones, so a count may read many rows: it is repeated only after :data:`_REST_FACTOR` times as long as it took."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._counted = (0, 0.0)  # the length, and until when it is good

    def read(self) -> int:
        """The length as of the last count."""
        begun, (length, until) = self._ledger.clock.monotonic(), self._counted
        if begun < until:
            return length
        with self._ledger.database.read() as connection:
            length = count(connection, DEAD, self._ledger.now())
        ended = self._ledger.clock.monotonic()
        self._counted = (length, ended + _REST_FACTOR * (ended - begun))
        return length


# -- what the jobs of a list failed with

SCANNED: Final = 10_000
"""Largest number of rows that :func:`failing_ids` reads, of Tasks and of jobs without one each."""

SCANNED_TASKS: Final = 1_000
"""Largest number of Tasks of which it reads rows."""

_FAILING = sa.select(
    _e.id, _e.job_id, _e.task_id, _e["items"], _e.problem, _e.created_at, _e.started_at, _e.finished_at, _e.last_error,
    _NAME.label("worker"),
).select_from(events.outerjoin(tasks, _t.id == _e.task_id))  # fmt: skip


class FailingJob(NamedTuple):
    """A job of the retries or the dead. ``at``: when it ended, or its last attempt began (microseconds); ``message``: that
    of its last error, None if only its code is known."""

    id: int
    job_id: str
    task_id: int | None
    tracked: bool
    worker: str | None
    at: int
    code: str
    message: str | None


def failing_ids(connection: Connection, set_name: str, now: int) -> tuple[list[int], bool]:
    """The Event ids of the retries or the dead, those of the newest Tasks first, and whether these are all.

    No index tells dead jobs from refused ones, or retries from other jobs that wait. So it reads the newest
    :data:`SCANNED_TASKS` Tasks whose counts have some, and at most :data:`SCANNED` rows of them that may be one; of jobs
    without a Task as many.
    """
    is_dead = set_name == DEAD
    has = sa.func.sum(_n.error if is_dead else _n.retrying) > 0
    newest = sa.select(_n.task_id).group_by(_n.task_id).having(has).order_by(_n.task_id.desc()).limit(SCANNED_TASKS)
    of_tasks = [int(i) for i in connection.execute(newest).scalars()]
    found, is_whole, left = list[int](), len(of_tasks) < SCANNED_TASKS, SCANNED
    for task_id in of_tasks:
        ids, read = _failing_of(connection, set_name, _e.task_id == task_id, now, left)
        found += ids
        left -= read
        if not left:
            break
    alone, read = _failing_of(connection, set_name, _e.task_id.is_(None), now, SCANNED)
    return found + alone, is_whole and left > 0 and read < SCANNED


def _failing_of(connection: Connection, set_name: str, where: Any, now: int, limit: int) -> tuple[list[int], int]:
    """The Event ids of a list among at most ``limit`` rows that may be in it, the latest first, and how many were read."""
    if set_name == DEAD:
        where, order, index = where & _e.problem.is_not(None), _e.id, "ix_events_problem"
    else:
        where, order, index = where & (_e.due_at < BLOCKED), _e.due_at, "ix_events_task_due"
    statement = (
        sa.select(_e.id, sa.case((in_list(set_name, now), 1), else_=0))
        .with_hint(events, f"FORCE INDEX ({index})", "mariadb")
        .where(where)
        .order_by(order.desc())
        .limit(limit)
    )
    rows = connection.execute(statement).all()
    return [int(event_id) for event_id, is_listed in rows if is_listed], len(rows)


def failing_jobs(database: Database, event_ids: Sequence[int]) -> Iterator[FailingJob]:
    """These jobs with their last errors, read as they are consumed; those that are gone meanwhile are left out."""
    for part in chunks(event_ids, _READ_AT_ONCE):
        with database.read() as connection:
            rows = {row.id: row for row in connection.execute(_FAILING.where(among(connection, _e.id, part)))}
        for row in (rows[event_id] for event_id in part if event_id in rows):
            said = loads(row.last_error) or {}
            # A person, or the death of its process, may have ended it after the attempt whose error is kept.
            if row.items <= 1 and row.problem not in (None, said.get("code")):
                said = {}
            yield FailingJob(
                int(row.id), str(row.job_id), row.task_id, row.items > 0, row.worker,
                int(row.finished_at or row.started_at or row.created_at),
                str(said.get("code") or row.problem or Status.ERROR), said.get("message"),
            )  # fmt: skip


def group_message(connection: Connection, task_id: int, digest: str) -> str | None:
    """The message by which a retry of a Task (:func:`asynctask.ledger.control.retry`) finds this group of its errors. None
    if the Task has no such group, or has dismissed jobs, which the retry would run again."""
    c = events.c
    dismissed = sa.select(c.id).where(c.task_id == task_id, _IN_ERROR, IS_DISMISSED).limit(1)
    if connection.execute(dismissed).first() is not None:
        return None
    its = sa.select(sa.func.max(_x.message)).where(_x.task_id == task_id, _x.digest == digest)
    found = connection.execute(its).scalar()
    return None if found is None else str(found)


def running_jobs(connection: Connection) -> list[Any]:
    """The tracked jobs that are recorded as running, the longest first, at most 1,000: process, job id, Task, worker and
    start. A job that runs for less than a tenth of a second is not recorded."""
    running = sa.select(_e.process, _e.job_id, _e.task_id, _NAME.label("worker"), _e.started_at)
    running = running.select_from(events.outerjoin(tasks, _t.id == _e.task_id))
    running = running.where(_e.process.is_not(None), _e.status == str(Status.WORKING), _e["items"] > 0)
    return list(connection.execute(running.order_by(_e.started_at, _e.id).limit(_READ_AT_ONCE)).all())


def find(connection: Connection, where: Any, job_ids: Sequence[str]) -> dict[str, int]:
    """Those of these jobs that are in a list (:func:`in_list`) or queue (:func:`in_queue`), as job id -> Event id."""
    named = among(connection, _e.job_id, list(job_ids))
    found = connection.execute(sa.select(_e.job_id, _e.id).where(named, where))
    return {str(job_id): int(i) for job_id, i in found}


def has_queue(connection: Connection, queue: str) -> bool:
    """Whether a Task, or a waiting job without a Task, has this queue."""
    waits = (_e.status == str(Status.ENQUEUE)) & _e.due_at.is_not(None)
    of_task, alone = sa.select(_t.id).where(_t.queue == queue), sa.select(_e.id).where(waits, _e.queue == queue)
    return any(connection.execute(found.limit(1)).first() is not None for found in (of_task, alone))


def performers(connection: Connection, event_ids: Iterable[int]) -> dict[int, tuple[str, str]]:
    """Event id -> the worker and the queue of its job; without untracked jobs."""
    queue = sa.func.coalesce(_e.queue, _t.queue)
    found = sa.select(_e.id, _NAME, queue).select_from(events.outerjoin(tasks, _t.id == _e.task_id))
    rows = connection.execute(found.where(among(connection, _e.id, list(event_ids)), _e["items"] > 0))
    return {int(i): (str(worker or ""), str(queue or "")) for i, worker, queue in rows}


def ids(connection: Connection, where: Any, *, after: int, limit: int) -> list[int]:
    """The Event ids of a list or queue in the order of ids, after ``after``, to visit each once."""
    found = sa.select(_e.id).where(where, _e.id > after).order_by(_e.id).limit(limit)
    return [int(i) for (i,) in connection.execute(found)]


def engines(connection: Connection, event_ids: Collection[int]) -> dict[int, str]:
    """Event id -> the other program that alone can run the job again, for those of these Events that have one. Jobs for the
    queues of attached engines, whose names have a slash, are not among them: the dispatcher pushes these.
    """
    kept = _e.options.like(f'{{"{ENGINE}":%') & sa.func.coalesce(_e.queue, "").not_like("%/%")
    found = connection.execute(sa.select(_e.id, _e.options).where(among(connection, _e.id, list(event_ids)), kept))
    return {int(i): str(loads(options)[ENGINE]) for i, options in found}


# -- the backlog: the jobs that could start now, with enough workers

MOST_TASKS: Final = 10_000
"""Largest number of open Tasks that are counted, the oldest first."""

_MOST_OVERDUE: Final = 10_000  # counted jobs of Tasks that are due and not claimed


@dataclass(slots=True)
class Backlog:
    """The jobs that wait in a queue for one worker at one priority, and may start now.

    ``waiting``: jobs that have not begun as far as the ledger knows, lent or not; ``of_tasks``: the largest possible number
    of them that are of Tasks and in a foreign queue; ``oldest_at``: since when the oldest has been ready (microseconds,
    None if unknown); ``limited``: (waiting, ``parallel``) of each Task with a limit, included in ``waiting``.
    """

    queue: str
    worker: str
    priority: int
    waiting: int = 0
    of_tasks: int = 0
    oldest_at: int | None = None
    limited: list[tuple[int, int]] = field(default_factory=list)

    def add(self, waiting: int, at: int | None) -> None:
        """Adds jobs, of which the oldest is ready since ``at``."""
        self.waiting += waiting
        if at is not None and (self.oldest_at is None or at < self.oldest_at):
            self.oldest_at = at


def _tallied(value: Any) -> Any:
    return sa.select(sa.func.coalesce(sa.func.sum(value), 0)).where(_n.task_id == _t.id).scalar_subquery()


def _lent(which: Any) -> Any:
    """A subquery for the number of jobs in a Task's loans, including ended ones."""
    its = sa.select(sa.func.coalesce(sa.func.sum(_l.high - _l.low), 0)).where(_l.task_id == _t.id, which)
    return its.scalar_subquery()


# Lookups by an index for each Task, whatever the planner's statistics: a join might read all Events.
_FIRST: Final = (
    sa.select(_e.created_at)
    .where(_e.task_id == _t.id, _e.seq == sa.case((_t.next_seq < _t.created_jobs, _t.next_seq), else_=_t.created_jobs - 1))
    .scalar_subquery()
)
_COULD_START: Final = (
    sa.select(
        _t.id, _t.queue, _t.worker_name, _t.priority, _t.parallel, _t.start_at, (_t.chunk_size != 1).label("in_slices"),
        (_t.created_jobs - _t.next_seq).label("left"), (_t.generation > 1).label("is_again"),
        _tallied(_n.enqueue - _n.retrying).label("waiting"),
        _tallied(_n.retrying).label("retrying"),
        _lent((_l.process >= lending.QUEUE_HOLDER) & (_l.process < lending.AFTER_QUEUE_HOLDERS)).label("queued"),
        _FIRST.label("first_at"),
    )
    .with_hint(tasks, "FORCE INDEX (ix_tasks_open)", "mariadb")  # otherwise it may read finished Tasks, too
    .where(_t.finished_at.is_(None), lending.MAY, _t.start_at.is_(None) | (_t.start_at <= sa.bindparam("now")))
    .order_by(_t.id)
    .limit(MOST_TASKS)
)  # fmt: skip
_ALONE_FIRST: Final = (
    sa.select(
        sa.func.coalesce(_e.queue, "default").label("queue"),
        sa.func.coalesce(_e.worker_name, "").label("worker"),
        # The beginning, which contains the priority; foreign jobs have none.
        sa.func.substr(_e.options, 1, 255).label("options"),
        _e.due_at,
    )
    .where(_e.due_at <= sa.bindparam("now"), _e.task_id.is_(None))
    .order_by(_e.due_at)
    .limit(COUNTED)
    .subquery("first")
)
_ALONE_WAITING: Final = sa.select(
    _ALONE_FIRST.c.queue, _ALONE_FIRST.c.worker, _ALONE_FIRST.c.options, sa.func.count(), sa.func.min(_ALONE_FIRST.c.due_at)
).group_by(_ALONE_FIRST.c.queue, _ALONE_FIRST.c.worker, _ALONE_FIRST.c.options)


def backlog(connection: Connection, now: int) -> list[Backlog]:
    """The jobs that could start now, by queue, priority and worker: those of Tasks that may start jobs, and jobs without a
    Task that are due and not lent.

    Counts the oldest 10,000 open Tasks by their counters, the first 100,000 jobs without a Task, and the first 10,000 due
    retries. Jobs due later, and jobs of Tasks that are paused or wait for their session or start time, do not count. A job
    that runs for less than a tenth of a second may count as waiting, because its start is not recorded.
    """
    found: dict[tuple[str, int, str], Backlog] = {}

    def group(queue: str, worker: str, priority: int) -> Backlog:
        return found.setdefault((queue, priority, worker), Backlog(queue, worker, priority))

    rows = connection.execute(_COULD_START, {"now": now}).all()
    overdue = _overdue(connection, [int(row.id) for row in rows if row.retrying > 0 or row.is_again or row.in_slices], now)
    in_slices = [int(row.id) for row in rows if row.in_slices]
    held, in_loans = (_held(connection), _waiting_in_loans(connection, in_slices)) if in_slices else ({}, {})
    for row in rows:
        due = overdue.get(int(row.id), _NONE_DUE)
        waiting, queued = _jobs_of(row, due, held.get(int(row.id), Counter()), in_loans.get(int(row.id), 0))
        if waiting <= 0:
            continue
        there = group(row.queue, row.worker_name, int(row.priority))
        # Rows of a later generation were created long before they could start.
        times = [at for at in (due.since, row.first_at if row.left > 0 or not row.is_again else None) if at is not None]
        there.add(waiting, max(min(times), row.start_at or 0) if times else None)
        there.of_tasks += max(0, queued)
        if row.parallel is not None:
            there.limited.append((waiting, int(row.parallel)))
    for queue, worker, options, count, due_at in connection.execute(_ALONE_WAITING, {"now": now}):
        group(queue, worker, lending.options_priority(options)).add(int(count), int(due_at))
    return [found[key] for key in sorted(found)]


def open_tasks(connection: Connection) -> dict[str, int]:
    """How many Tasks are not over, by state."""
    found = sa.select(_t.state, sa.func.count()).where(_t.finished_at.is_(None)).group_by(_t.state)
    return {str(state): int(count) for state, count in connection.execute(found)}


class _Due(NamedTuple):
    """The due jobs of a Task: their number, the number of items of retries among them, and since when the first is due."""

    jobs: int
    retries: int
    since: int | None


_NONE_DUE: Final = _Due(0, 0, None)


def _jobs_of(row: Any, due: _Due, held: Counter[str], in_loans: int) -> tuple[int, int]:
    """How many jobs of a Task could start, and the largest possible number of them in a foreign queue. ``held``: the number
    of its Events that name a process, by status.

    The counters of outcomes count items, which suffice if each job has one. For slices, the jobs are those that the pointer
    has not reached, those in loans (``in_loans``) that have not begun, and those that are claimed or due again.
    """
    items, queued = int(row.waiting) + due.retries, int(row.queued)
    if not row.in_slices:
        return items, min(items, queued)
    return min(items, int(row.left) + in_loans + held[Status.ENQUEUE] + due.jobs), min(items, queued)


def _waiting_in_loans(connection: Connection, task_ids: Sequence[int]) -> dict[int, int]:
    """Task -> number of jobs in its loans, including free loans, that are not known to have begun."""
    if not task_ids:
        return {}
    waits = (_e.status == Status.ENQUEUE) & _e.due_at.is_(None) & _e.process.is_(None)
    found = sa.select(_l.task_id, sa.func.count()).select_from(loans.join(events, sa.and_(*IN_LOAN)))
    found = found.where(among(connection, _l.task_id, task_ids), waits).group_by(_l.task_id)
    return {int(i): int(count) for i, count in connection.execute(found)}


def _held(connection: Connection) -> dict[int, Counter[str]]:
    """Task -> number of its Events that name a process, by status; these are few, at most as many as there are threads."""
    held: dict[int, Counter[str]] = defaultdict(Counter)
    found = sa.select(_e.task_id, _e.status).where(_e.process.is_not(None)).limit(COUNTED)
    for task_id, status in connection.execute(found):
        if task_id is not None:
            held[int(task_id)][status] += 1
    return held


def _overdue(connection: Connection, task_ids: Sequence[int], now: int) -> dict[int, _Due]:
    """The due jobs of these Tasks, by Task; Tasks without any are left out."""
    if not task_ids:
        return {}
    first = (
        sa.select(_e.task_id, _e.due_at, sa.case((_e.retries > 0, _e["items"]), else_=0).label("retries"))
        .with_hint(events, "FORCE INDEX (ix_events_task_due)", "mariadb")
        .where(among(connection, _e.task_id, task_ids), _e.due_at <= now)
        .limit(_MOST_OVERDUE)
        .subquery("overdue")
    )
    c = first.c
    sums = sa.select(c.task_id, sa.func.count(), sa.func.sum(c.retries), sa.func.min(c.due_at)).group_by(c.task_id)
    return {int(i): _Due(*map(int, sums)) for i, *sums in connection.execute(sums)}


_OF_TASK: Final = _e.task_id == sa.bindparam("task_id")
_PUT_OFF: Final = (
    sa.select(_e.added_messages)
    .where(_OF_TASK, _e.status == Status.ENQUEUE, _e.retries == 0)
    .where(_e.due_at > sa.bindparam("now"), _e.due_at < BLOCKED)
    .order_by(_e.due_at)
    .limit(20)
)
_BLOCKED: Final = sa.select(_e.id).where(_OF_TASK, _e.due_at == BLOCKED).limit(1)


def rows_held_by(connection: Connection, task_id: int, identities: Collection[str]) -> dict[str, tuple[int, int]]:
    """How many open rows of a Task, or callbacks of it, each of these processes holds, and how many of them are running."""
    if not identities:
        return {}
    left = _e["items"] - _e.n_finish - _e.n_failed - _e.n_error - _e.n_cancelled
    working = sa.func.sum(sa.case((_e.status == str(Status.WORKING), left), else_=0))
    of_task = sa.or_(_e.task_id == task_id, _e.callback_of == task_id)
    claimed = sa.select(_e.process, sa.func.sum(left), working).where(_e.process.in_(identities), of_task, IS_OPEN)
    lent = (
        sa.select(_l.process, sa.func.sum(left), working)
        .select_from(loans.join(events, (_e.task_id == _l.task_id) & (_e.seq >= _l.low) & (_e.seq < _l.high)))
        .where(_l.task_id == task_id, _l.process.in_(identities), UNHELD)
    )
    found: dict[str, tuple[int, int]] = {}
    for held in (claimed.group_by(_e.process), lent.group_by(_l.process)):
        for process, rows, running in connection.execute(held):
            before = found.get(process, (0, 0))
            found[str(process)] = (before[0] + int(rows), before[1] + int(running))
    return found


def put_off(connection: Connection, task_id: int, now: int) -> list[str]:
    """Why the next jobs of a Task were deferred: the last messages of the first 20, each once. A job that waits for a retry
    is not deferred."""
    rows = connection.execute(_PUT_OFF, {"task_id": task_id, "now": now}).scalars()
    said = [loads(messages) for messages in rows]
    return list(dict.fromkeys(str(each[-1].get("message", "")) for each in said if each))


def due_later(connection: Connection, task_id: int, after: int) -> int | None:
    """The earliest ``due_at`` after ``after`` (microseconds) of a job of a Task that was never retried: a clock was ahead
    when the job was given back."""
    waits = (_e.task_id == task_id) & (_e.due_at > after) & (_e.due_at < BLOCKED) & (_e.retries == 0)
    found = connection.execute(sa.select(sa.func.min(_e.due_at)).where(waits, _e.status == Status.ENQUEUE)).scalar()
    return None if found is None else int(found)


def ended_rows(connection: Connection, task_id: int, since: int) -> bool:
    """Whether rows of a Task ended after ``since`` (microseconds), or after the last sample before it."""
    ended = sa.func.coalesce(sa.func.sum(_n.finish + _n.failed + _n.error + _n.cancelled), 0)
    at_work = sa.select(sa.func.max(_n.updated_at), ended).where(_n.task_id == task_id)
    before = sa.select(_s.done).where(_s.task_id == task_id, _s.at <= since).order_by(_s.at.desc()).limit(1)
    moved_at, done = connection.execute(at_work).one()
    return (moved_at or 0) > since and done > (connection.execute(before).scalar() or 0)


def is_blocked(connection: Connection, task_id: int) -> bool:
    """Whether a job of a Task waits for earlier jobs of its key."""
    return connection.execute(_BLOCKED, {"task_id": task_id}).first() is not None


# -- operations on waiting jobs


def act_on_waiting(ledger: Ledger, action: str, event_ids: Sequence[int], *, who: str = "") -> int:
    """Makes waiting jobs due now (``restart``), cancels them (``delete``) or ends them in ``error`` (``kill``); returns how
    many. Skips jobs that no longer wait, and those of another program.
    """
    done = 0
    for part in chunks(list(dict.fromkeys(event_ids)), _BATCH):
        applied = _act_on_part(ledger, action, part, who)
        done += _after_commit(ledger, applied)
    return done


@repeatable
def _act_on_part(ledger: Ledger, action: str, event_ids: Sequence[int], who: str) -> list[Change]:
    make = {"restart": _hurry_change, "delete": _cancel_change, "kill": _kill_change}[action]
    with ledger.database.write() as connection:
        _lock_tasks(connection, event_ids)
        elsewhere = engines(connection, event_ids)
        applied = apply(connection, ledger, [make(ledger, event_id) for event_id in event_ids if event_id not in elsewhere])
        _log(connection, ledger, applied, {"restart": "restarted", "delete": "cancelled", "kill": "killed"}[action], who)
    return applied


def _lock_tasks(connection: Connection, event_ids: Collection[int]) -> None:
    """Locks the rows of these Events' Tasks, so that between the read and the write no Event is claimed or passed by the
    pointer."""
    its = sa.select(_e.task_id).where(among(connection, _e.id, list(event_ids)), _e.task_id.is_not(None)).distinct()
    for task_id in sorted(connection.execute(its).scalars().all()):
        task_rows.lock(connection, int(task_id))


def _waits(record: EventRecord) -> bool:
    return record.row.status is Status.ENQUEUE and record.row.due_at is not None


def _hurry_change(ledger: Ledger, event_id: int) -> Change:
    now = ledger.now()
    return Change(event_id, lambda seen: hurry(seen.row, now=now) if _waits(seen) else None)


def _cancel_change(ledger: Ledger, event_id: int) -> Change:
    return Change(event_id, lambda seen: cancel(seen.row) if _waits(seen) else None)


def _kill_change(ledger: Ledger, event_id: int) -> Change:
    text = ledger.catalogue("discarded", "killed")
    return Change(
        event_id,
        lambda seen: recorded(seen.row, Status.ERROR, on_loan=False, now=ledger.now()) if _waits(seen) else None,
        notes=[Note("error", text)],
        failure=Failure("killed", text),
    )


def cancel_removed(ledger: Ledger, keys: Sequence[tuple[str, int]], *, who: str = "") -> int:
    """Cancels the items of copies, (job id, attempt), that a user removed from a foreign queue; returns how many.

    Call it after the removal, when no process can run them. Skips items that another holder has by the ledger.
    """
    attempts = dict(keys)
    done = 0
    for part in chunks(sorted(attempts), _BATCH):
        done += _after_commit(ledger, _cancel_removed(ledger, part, attempts, who))
    return done


@repeatable
def _cancel_removed(ledger: Ledger, job_ids: Sequence[str], attempts: dict[str, int], who: str) -> list[Change]:
    def decide(seen: EventRecord) -> Transition | None:
        holds_attempt = seen.row.attempt == attempts[seen.job_id] and seen.row.status is Status.ENQUEUE
        return cancel(seen.row) if holds_attempt and seen.row.due_at is None else None

    with ledger.database.write() as connection:
        records = read_events(connection, among(connection, _e.job_id, list(job_ids)))
        applied = apply(connection, ledger, [Change(record.id, decide) for record in records])
        _log(connection, ledger, applied, "cancelled", who)
    return applied


def cancel_resting(ledger: Ledger, event_id: int, *, who: str = "") -> bool:
    """Cancels a job that waits in the ledger without a holder. False if a process holds it, or it has ended."""
    return bool(_after_commit(ledger, _cancel_resting(ledger, event_id, who)))


@repeatable
def _cancel_resting(ledger: Ledger, event_id: int, who: str) -> list[Change]:
    with ledger.database.write() as connection:
        _lock_tasks(connection, [event_id])
        on_loan = holder(connection, event_id) is not None

        def decide(seen: EventRecord) -> Transition | None:
            return cancel(seen.row) if seen.row.status is Status.ENQUEUE and at_rest(seen.row, on_loan) else None

        applied = apply(connection, ledger, [Change(event_id, decide)])
        _log(connection, ledger, applied, "cancelled", who)
    return applied


def holder(connection: Connection, event_id: int) -> str | None:
    """The process or the foreign queue that holds a job, by a claim or a loan; an empty text for a lone job that its engine
    keeps; None for a job without a holder."""
    of_loan = sa.select(_l.process).where(*IN_LOAN, _l.process.is_not(None))
    found = sa.select(_e.task_id, _e.due_at, _e.process, of_loan.limit(1).scalar_subquery()).where(
        _e.id == event_id, IS_OPEN
    )
    row = connection.execute(found).one_or_none()
    if row is None or row.due_at is not None:
        return None
    named = row[2] if row[2] is not None else row[3]
    return "" if named is None and row.task_id is None else named


def lenders(connection: Connection, records: Collection[EventRecord]) -> dict[int, str]:
    """The holders of the loans in which these Events lie, by the Events' ids; Events outside a held loan are left out."""
    of_tasks = {record.task_id for record in records if record.task_id is not None}
    if not of_tasks:
        return {}
    lent = sa.select(_l.task_id, _l.low, _l.high, _l.process).where(
        among(connection, _l.task_id, sorted(of_tasks)), _l.process.is_not(None)
    )
    found = connection.execute(lent).all()
    return {
        record.id: str(process)
        for record in records
        for task_id, low, high, process in found
        if record.seq is not None and record.task_id == task_id and low <= record.seq < high
    }


def is_queue(holder: str) -> bool:
    """Whether a holder is a foreign queue, or a dispatcher that may have pushed to one and not handed over yet."""
    return lending.is_queue_holder(holder) or foreign.process_of(holder) != holder


def _log(connection: Connection, ledger: Ledger, applied: Sequence[Change], action: str, who: str) -> None:
    """Logs one entry per Task: the author, the action, the number of jobs, and the first of them."""
    records = [each.record for each in applied if each.transition is not None and each.record is not None]
    jobs = [(each.task_id, each.job_id) for each in records if each.task_id is not None]
    _log_jobs(connection, ledger, jobs, action, who)


def _log_jobs(connection: Connection, ledger: Ledger, jobs: Iterable[tuple[int, str]], action: str, who: str) -> None:
    changed: dict[int, list[str]] = {}
    for task_id, job_id in jobs:
        changed.setdefault(task_id, []).append(job_id)
    for task_id, job_ids in sorted(changed.items()):
        task_rows.log(connection, ledger, task_id, f"jobs {action}", {"jobs": len(job_ids), "first": job_ids[0]}, who)


def _after_commit(ledger: Ledger, applied: Sequence[Change]) -> int:
    """Announces committed changes, and closes the Tasks that they ended; returns the number of changes."""
    lending.announce(ledger, applied)
    won = [each for each in applied if each.transition is not None and each.record is not None]
    over = [each.record for each in won if each.record and each.transition and each.transition.after.status in TERMINAL]
    for record in {(each.task_id, each.callback_of): each for each in over}.values():
        close_after(ledger, record)
    return len(won)


# -- stopping and starting one job


def ask_stop_one(ledger: Ledger, event_id: int, *, who: str = "") -> bool:
    """Stops a job without a holder, or requests its process to stop it. False if it is stopped, has ended, or has this
    request already. Raises :class:`OtherEngine` for a job that another program keeps."""
    return bool(_after_commit(ledger, _ask_stop(ledger, event_id, who)))


@repeatable
def _ask_stop(ledger: Ledger, event_id: int, who: str) -> list[Change]:
    with ledger.database.write() as connection:
        _refuse_elsewhere(connection, event_id)
        _lock_tasks(connection, [event_id])
        task_id, seq = connection.execute(sa.select(_e.task_id, _e.seq).where(_e.id == event_id)).one_or_none() or (
            None,
            None,
        )
        on_loan = task_id is None or lending.ask(connection, ledger, int(task_id), int(seq or 0))
        applied = apply(connection, ledger, [Change(event_id, lambda seen: ask_stop(seen.row, on_loan))])
        _log(connection, ledger, applied, "stopped", who)
    return applied


def _refuse_elsewhere(connection: Connection, event_id: int) -> None:
    if (engine := engines(connection, [event_id]).get(event_id)) is not None:
        raise OtherEngine(engine)


def stop_removed(ledger: Ledger, event_id: int, attempt: int) -> bool:
    """Stops a job whose copy of this attempt was removed from its queue, so that no process can run it."""

    def decide(seen: EventRecord) -> Transition | None:
        waits = seen.row.attempt == attempt and seen.row.status is Status.ENQUEUE and seen.row.due_at is None
        return stop(seen.row) if waits else None

    return bool(_after_commit(ledger, _change_one(ledger, event_id, decide, None, "")))


def start_one(ledger: Ledger, event_id: int, *, who: str = "") -> bool:
    """Starts a stopped job again. False if it is not stopped."""
    now = ledger.now()

    def decide(seen: EventRecord) -> Transition | None:
        return start(seen.row, now=now) if seen.row.status is Status.STOPPED else None

    return bool(_after_commit(ledger, _change_one(ledger, event_id, decide, "started", who)))


@repeatable
def _change_one(
    ledger: Ledger, event_id: int, decide: Callable[[EventRecord], Transition | None], action: str | None, who: str
) -> list[Change]:
    with ledger.database.write() as connection:
        _refuse_elsewhere(connection, event_id)
        _lock_tasks(connection, [event_id])
        applied = apply(connection, ledger, [Change(event_id, decide)])
        if action is not None:
            _log(connection, ledger, applied, action, who)
    return applied


# -- jobs that ended in error


_sibling: Final = events.alias()
AMID_DISMISSED: Final = sa.exists().where(
    _sibling.c.task_id == _e.task_id,
    _sibling.c.problem.is_not(None),
    _sibling.c.status == str(Status.ERROR),
    _sibling.c.dismissed == _sibling.c.finished_at,
)
"""The condition that a job's Task has a dismissed job, which a retry of the whole Task would run again."""


def dismiss(ledger: Ledger, event_ids: Collection[int], *, who: str = "") -> int:
    """Dismisses dead tracked jobs: their outcome stays recorded, and they leave the list until they end in ``error`` again.
    Returns how many; leaves those that were retried meanwhile, and untracked ones."""
    return sum(_dismiss(ledger, part, who) for part in chunks(sorted(event_ids), _BATCH))


@repeatable
def _dismiss(ledger: Ledger, event_ids: Sequence[int], who: str) -> int:
    with ledger.database.write() as connection:
        dead = among(connection, _e.id, event_ids) & in_list(DEAD, ledger.now()) & ~IS_UNTRACKED
        locked = for_update(connection, sa.select(_e.id, _e.task_id, _e.job_id).where(dead).order_by(_e.id))
        found = connection.execute(locked).all()
        own = among(connection, _e.id, [int(each.id) for each in found])
        connection.execute(events.update().where(own).values(dismissed=_e.finished_at))
        of_tasks = [(int(each.task_id), str(each.job_id)) for each in found if each.task_id is not None]
        _log_jobs(connection, ledger, of_tasks, "dismissed", who)
    return len(found)


def dead_tasks(connection: Connection, now: int, *, limit: int = 1_000) -> list[tuple[int, int]]:
    """Tasks whose jobs in ``error`` are all dead, none dismissed, as (Task id, number of these jobs)."""
    found = sa.select(_e.task_id, sa.func.count()).where(in_list(DEAD, now), ~AMID_DISMISSED, _e.task_id.is_not(None))
    return [(int(i), int(n)) for i, n in connection.execute(found.group_by(_e.task_id).order_by(_e.task_id).limit(limit))]


def retry_one(ledger: Ledger, event_id: int, *, who: str = "", refused_too: bool = False) -> bool:
    """Retries one job that ended in ``error``, in a new generation of its Task; a callback in the same generation.

    ``refused_too``: also a job without a Task that ended ``failed``. A lone job of an attached engine waits in the ledger
    until the dispatcher pushes it to its queue. Returns False if the job has another status. Raises :class:`Conflict` if
    the Task's state forbids it or the ledger lacks the job's arguments, :class:`OtherEngine` for a job of another program.
    """
    applied = _retry_one(ledger, event_id, who, refused_too)
    lending.announce(ledger, applied)
    return any(each.transition is not None for each in applied)


@repeatable
def _retry_one(ledger: Ledger, event_id: int, who: str, refused_too: bool) -> list[Change]:
    now = ledger.now()

    def reopen(seen: EventRecord) -> Transition | None:
        chosen = PROBLEM if refused_too and seen.task_id is None else (Status.ERROR,)
        return explicit_retry(seen.row, now=now) if seen.row.status in chosen else None

    change = Change(event_id, reopen, notes=[Note("enqueue", ledger.catalogue("retried"))])
    with ledger.database.write() as connection:
        found = sa.select(_e.task_id, _e.params.is_(None), _e.callback_of).where(_e.id == event_id)
        task_id, is_bare, callback_of = connection.execute(found).one_or_none() or (None, False, None)
        if callback_of is not None:
            return _retry_callback(connection, ledger, int(callback_of), event_id, who)
        if task_id is None:
            _refuse_elsewhere(connection, event_id)
            if is_bare:
                raise Conflict("its arguments were not kept, so it cannot run again: push a new job")
            return apply(connection, ledger, [change])
        task = task_rows.lock(connection, int(task_id))
        # Only an explicit retry leaves ``error``, and needs the lock of the Task's row: this status cannot change.
        status = connection.execute(sa.select(_e.status).where(_e.id == event_id)).scalar()
        if status != Status.ERROR:
            return []
        if corrections.any_taken(connection, task["id"], event_id):
            raise Conflict("its row was corrected and sent again with another Task; retry that one")
        # Sealed at once, because its one row is reopened in this transaction.
        task_rows.open_generation(connection, ledger, task, generation_sealed=1)
        applied = apply(connection, ledger, [change])
        _log(connection, ledger, applied, "retried", who)
    return applied


def _retry_callback(connection: Connection, ledger: Ledger, task_id: int, event_id: int, who: str) -> list[Change]:
    task = task_rows.lock(connection, task_id)
    applied = reopen_callbacks(connection, ledger, task, [event_id])
    if any(each.transition is not None for each in applied):
        task_rows.log(connection, ledger, task_id, "callbacks retried", {"callbacks": 1}, who)
    return applied


@repeatable
def call_back_again(ledger: Ledger, task_id: int, *, who: str = "") -> bool:
    """Runs the failed callbacks of the Task's generation again. Returns False while they run. Raises :class:`Conflict` if
    the Task is not closed, or none of its callbacks has failed.
    """
    with ledger.database.write() as connection:
        task = task_rows.lock(connection, task_id)
        if task["closed_at"] is not None and task["finished_at"] is None:
            return False
        if task["state"] not in (State.FINISHED, State.CANCELLED) or task["closed_at"] is None:
            raise Conflict(f"Task {task_id} is {task['state']}; its callbacks run when its last item has ended")
        failed = [
            i for _, i, status in task_rows.callbacks_of(connection, task) if i is not None and status != Status.FINISH
        ]
        if not failed:
            raise Conflict(f"no callback of Task {task_id} has failed, so none runs again")
        reopen_callbacks(connection, ledger, task, failed)
        task_rows.log(connection, ledger, task_id, "callbacks retried", {"callbacks": len(failed)}, who)
        notify(connection)
    return True


@repeatable
def log_link(ledger: Ledger, task_id: int, detail: dict[str, Any], *, who: str) -> None:
    """Logs that somebody made a link to a Task, whose version says that its log has grown. Raises :class:`NotFound`."""
    with ledger.database.write() as connection:
        task_rows.lock(connection, task_id)
        connection.execute(tasks.update().where(_t.id == task_id).values(version=_t.version + 1))
        task_rows.log(connection, ledger, task_id, "linked", detail, who)


def reopen_callbacks(
    connection: Connection, ledger: Ledger, task: dict[str, Any], event_ids: Sequence[int]
) -> list[Change]:
    """Reopens these callbacks of a locked Task; a finished Task waits for them again. Raises :class:`Conflict` for a
    callback of an earlier generation.
    """
    now = ledger.now()

    def reopen(seen: EventRecord) -> Transition | None:
        ended_badly = seen.row.status in (Status.FAILED, Status.ERROR, Status.CANCELLED)
        return explicit_retry(seen.row, now=now) if ended_badly and seen.callback_of == task["id"] else None

    if not {i for _, i, _ in task_rows.callbacks_of(connection, task)} >= set(event_ids):
        raise Conflict(
            f"this is a callback of an earlier generation of Task {task['id']}; it calls back again when this one closes"
        )
    notes = [Note("enqueue", ledger.catalogue("retried"))]
    applied = apply(connection, ledger, [Change(event_id, reopen, notes=notes) for event_id in event_ids])
    if any(each.transition is not None for each in applied) and task["finished_at"] is not None:
        reason = "split_failed" if task["split_state"] == "failed" else None
        task_rows.change_state_unless_cancelled(
            connection, ledger, task, State.FINALIZING, Reason.CALLED_AGAIN, finished_at=None, state_reason=reason
        )
    return applied


# -- untracked jobs of a program without Redis
#
# Rows of ``events`` without an item (:func:`asynctask.core.transitions.is_kept`), which are claimed, recovered, retried and
# recorded like single tracked jobs, but are not found by their ids. Those in ``error`` form the dead list.

LISTED: Final = 100_000
"""Largest number of jobs of a queue, the oldest ones, that are sorted for a page."""

_AHEAD: Final = 1_000
"""Number of the oldest jobs of a queue among which the next one is chosen, as in a borrow."""

_QUEUE: Final[Any] = sa.func.coalesce(_e.queue, "default")
IS_ALONE: Final = _e.task_id.is_(None)
IS_UNTRACKED: Final = IS_ALONE & (_e["items"] == 0)
_WAITS_UNTRACKED: Final = IS_UNTRACKED & (_e.status == str(Status.ENQUEUE)) & (_e.due_at <= sa.bindparam("now"))
_HEAD: Final = sa.func.substr(_e.options, 1, 64)  # the priority comes first


@dataclass(frozen=True, slots=True)
class UntrackedQueue:
    """A queue in which untracked jobs wait: their number by worker, since when the oldest waits (microseconds), and the
    worker of the next one."""

    name: str
    workers: Mapping[str, int]
    oldest_at: int
    next_worker: str | None


def untracked_queues(connection: Connection, now: int) -> list[UntrackedQueue]:
    """The queues in which untracked jobs wait, by name."""
    worker = sa.func.coalesce(_e.worker_name, "")
    counted = (
        sa.select(_QUEUE, worker, sa.func.count(), sa.func.min(_e.due_at)).where(_WAITS_UNTRACKED).group_by(_QUEUE, worker)
    )
    found: dict[str, list[tuple[str, int, int]]] = {}
    for queue, name, count, at in connection.execute(counted, {"now": now}):
        found.setdefault(str(queue), []).append((str(name), int(count), int(at)))
    return [
        UntrackedQueue(
            queue,
            {name: count for name, count, _ in found[queue]},
            min(at for *_, at in found[queue]),
            _next_worker(connection, queue, now),
        )
        for queue in sorted(found)
    ]


def _next_worker(connection: Connection, queue: str, now: int) -> str | None:
    first = sa.select(_e.due_at, _e.id, _HEAD, _e.worker_name).where(_WAITS_UNTRACKED, queue == _QUEUE)
    found = connection.execute(first.order_by(_e.due_at, _e.id).limit(_AHEAD), {"now": now}).all()
    return min(((lending.options_priority(said), at, i, name) for at, i, said, name in found), default=(None,))[-1]


def single_tracked(connection: Connection, now: int) -> dict[str, int]:
    """By queue, how many tracked jobs without a Task wait, among the first 100,000."""
    waits = IS_ALONE & (_e["items"] > 0) & (_e.status == str(Status.ENQUEUE)) & (_e.due_at <= now)
    first = sa.select(_QUEUE.label("queue")).where(waits).order_by(_e.due_at).limit(COUNTED).subquery()
    found = connection.execute(sa.select(first.c.queue, sa.func.count()).group_by(first.c.queue))
    return {str(queue): int(count) for queue, count in found}


def queue_length(connection: Connection, queue: str, now: int) -> int:
    """How many jobs without a Task wait in a queue of the ledger."""
    counted = sa.select(sa.func.count()).select_from(events).where(in_queue(queue, now))
    return int(connection.execute(counted).scalar_one())


def queue_page(
    connection: Connection, queue: str, now: int, *, offset: int, limit: int, newest: bool = False
) -> list[tuple[int, int]]:
    """A page of the jobs without a Task that wait in a queue, as (id, priority), in the order in which they run, or with
    ``newest`` in the reverse. Of more than :data:`LISTED` jobs, only the oldest are sorted."""
    waiting = sa.select(_e.due_at, _e.id, _HEAD).where(in_queue(queue, now)).order_by(_e.due_at, _e.id).limit(LISTED)
    found = connection.execute(waiting).all()
    ordered = sorted(((lending.options_priority(said), at, i) for at, i, said in found), reverse=newest)
    return [(int(i), priority) for priority, _, i in ordered[offset : offset + limit]]


def in_queue(queue: str, now: int) -> Any:
    """The condition that a job without a Task waits in a queue of the ledger."""
    return IS_ALONE & (_e.status == str(Status.ENQUEUE)) & (_e.due_at <= now) & (queue == _QUEUE)


def delete_dead(ledger: Ledger, event_ids: Collection[int]) -> int:
    """Deletes dead untracked jobs; returns how many. Leaves those that were retried meanwhile, and tracked ones."""
    return sum(_delete_dead(ledger, part) for part in chunks(sorted(event_ids), 500))


@repeatable
def _delete_dead(ledger: Ledger, event_ids: Sequence[int]) -> int:
    with ledger.database.write() as connection:
        is_dead = IS_UNTRACKED & (_e.status == str(Status.ERROR))
        return connection.execute(events.delete().where(among(connection, _e.id, event_ids), is_dead)).rowcount


# -- processes and queues


def other_language(connection: Connection, queue: str, now: int) -> str | None:
    """The identity of a living process in another language that works this queue of the own broker, and only records here.
    Processes of attached engines never match, because their queues have a prefix (``celery/emails``).
    """
    found = (p for p in processes.performing(connection, now) if _only_records(p, queue))
    return next((str(process["identity"]) for process in found), None)


def own_queues(connection: Connection, now: int) -> set[str]:
    """The queues that living worker processes of the own runtime work."""
    own = (p for p in processes.performing(connection, now) if not processes.is_engine(str(p["identity"])))
    return {str(queue) for process in own for queue in loads(process["queues"])}


def _only_records(process: Mapping[str, Any], queue: str) -> bool:
    """Whether a process, a row of :func:`asynctask.ledger.processes.performing`, works this queue in another language."""
    return processes.is_engine(str(process["identity"])) and queue in loads(process["queues"])


@repeatable
def pause_queue(ledger: Ledger, name: str, paused: bool) -> bool:
    """Pauses a queue, of which no process begins a job then, or resumes it. Returns whether it was changed."""
    with ledger.database.write() as connection:
        was = connection.execute(sa.select(queues.c.paused).where(queues.c.name == name)).scalar()
        if bool(was) is paused:
            return False
        if was is None:
            connection.execute(queues.insert(), {"name": name, "paused": 1})
        else:
            connection.execute(queues.update().where(queues.c.name == name).values(paused=int(paused)))
        notify(connection)
    return True


def session_holder(connection: Connection, key: str) -> tuple[int, str] | None:
    """The id and the state of the Task that holds a session; None if none does."""
    found = connection.execute(sa.select(_t.id, _t.state).where(_t.session_holder == key)).one_or_none()
    return None if found is None else (int(found[0]), str(found[1]))


def earlier_list(connection: Connection, task: Mapping[str, Any]) -> tuple[int, int | None] | None:
    """The Task whose list comes before all rows of a Task with keys (its columns), as long as it may still get rows, and
    when it is sealed if nobody adds to it, None while its list is read; None if there is no such Task."""
    first = sessions.GROWING_FIRST.scalar_subquery()
    sealed_at = sa.case((_t.split_state == "open", _t.split_until))
    found = sa.select(_t.id, sealed_at).where(_t.id == first, _t.id < task["id"])
    row = connection.execute(found, {"worker": task["worker_name"]}).one_or_none() if task["key_field"] else None
    return None if row is None else (int(row[0]), row[1])


# -- stored lists

_SOURCES: Final = (
    sa.select(_t.id, _t.split_state, _t.split_source)
    .where(_t.id > sa.bindparam("after"), _t.split_source.is_not(None))
    .order_by(_t.id)
    .limit(sa.bindparam("count"))
)


def split_sources(connection: Connection, after: int, limit: int) -> list[tuple[int, str, Any]]:
    """The next Tasks by id with a stored list: (id, state of the split, source of the list)."""
    rows = connection.execute(_SOURCES, {"after": after, "count": limit})
    return [(int(task_id), str(state), loads(source)) for task_id, state, source in rows]


_LOOKED_THROUGH: Final = 2_000
_REMEMBERED: Final = 100


class ReadList(NamedTuple):
    """How the list of a Task was read: the Task, its worker, the columns of the list (empty if unknown), and the option
    ``columns``."""

    task_id: int
    worker: str
    headers: Sequence[str]
    columns: Mapping[str, str]


def read_lists(connection: Connection, owner: str) -> list[ReadList]:
    """How the last stored lists of an owner were read, newest first: up to 100, of the last 2,000 Tasks of the ledger."""
    last = sa.select(sa.func.max(_t.id)).scalar_subquery()
    rows = connection.execute(
        sa.select(_t.id, _t.worker_name, _t.headers, _t.split_source)
        .where(_t.id > last - _LOOKED_THROUGH, _t.owner == owner, _t.split_source.is_not(None))
        .order_by(_t.id.desc())
        .limit(_REMEMBERED)
    )
    return [
        ReadList(int(i), worker, (loads(headers) or {}).get("list") or (), (loads(source) or {}).get("columns") or {})
        for i, worker, headers, source in rows
    ]


# -- exports: the parameters of the merge, and the shards


def _merge_said(callbacks: Any) -> dict[str, Any] | None:
    for each in loads(callbacks) or ():
        if each["name"] == MERGE:
            found: dict[str, Any] = each["args"][0]
            return found
    return None


def export_of(connection: Connection, task_id: int) -> dict[str, Any] | None:
    """The parameters of an export's merge; None for a Task that is not an export."""
    return _merge_said(connection.execute(sa.select(tasks.c.callbacks).where(tasks.c.id == task_id)).scalar())


def merge_of(connection: Connection, job_id: str, task_id: int) -> dict[str, Any] | None:
    """The parameters of an export's merge, if this job is a callback of its Task; else None."""
    own = sa.select(_e.id).where(_e.job_id == job_id, _e.callback_of == task_id)
    return None if connection.execute(own).first() is None else export_of(connection, task_id)


def shard_of(connection: Connection, job_id: str) -> tuple[int | None, dict[str, Any] | None]:
    """The number of the shard that a job exports, and the parameters of its Task's merge."""
    statement = sa.select(_e.seq, tasks.c.callbacks).join(tasks, tasks.c.id == _e.task_id).where(_e.job_id == job_id)
    seq, callbacks = connection.execute(statement).one_or_none() or (None, None)
    return (None, None) if seq is None else (int(seq), _merge_said(callbacks))


def shards(connection: Connection, task_id: int) -> tuple[list[int], list[int]]:
    """The numbers of the shards that ended in ``finish``, and of the others, in order."""
    found = connection.execute(sa.select(_e.seq, _e.status).where(_e.task_id == task_id).order_by(_e.seq)).all()
    done = [int(seq) for seq, status in found if status == Status.FINISH]
    return done, [int(seq) for seq, status in found if status != Status.FINISH]
