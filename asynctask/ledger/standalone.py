"""Events created or changed outside the runtimes: jobs without a Task, and the public ``app.record``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeGuard

import orjson
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from asynctask.core.states import PROBLEM, TERMINAL, Reason, State, Status, check_event
from asynctask.core.transitions import Transition, give_back, outcome, recorded, send_again
from asynctask.database.batches import MAX_BYTES, insert_new
from asynctask.database.notify import notify
from asynctask.database.retrying import repeatable
from asynctask.database.tables import events
from asynctask.errors import IdInUse, InputError, JobTimeout
from asynctask.ledger import lending
from asynctask.ledger.base import BATCH, Ledger, chunks, dumps
from asynctask.ledger.events import LAST_ERROR, Change, EventRecord, Failure, Note
from asynctask.ledger.search import SearchValue, add_alone
from asynctask.ledger.tasks import close_after, lock
from asynctask.messages import clean

ENGINE: Final = "engine"
"""The option that names the engine which holds an Event's job; the only option of such an Event."""

MAX_JOB_ID: Final = 64
"""Largest number of characters of a job id."""

_ALONE: Final = 100
"""Number of Events that every database accepts in one statement."""

_SHOWN: Final = 500

_RECORDABLE = (Status.ENQUEUE, Status.WORKING, Status.FINISH, Status.FAILED, Status.ERROR)
_e = events.c


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job that arrives at the ledger: an engine fetched it, or a program sends it.

    ``attempt``: the fence in its copy, 0 in a copy without one; None for a job that its engine keeps and retries. For a new
    Event: ``params``, its arguments, JSON-ready, and ``options``, its other members, JSON text. ``sent_at`` (microseconds,
    the ledger's clock): when this run of a lone job was sent, if its message contains that. ``anew``: it was sent without
    an Event and has not begun before; if the Event of its id has ended, this is another run. ``broken``: the invalid
    attempt in its message, with which no job begins. ``is_tracked``: false for an untracked job, which has only the row
    that it needs to be performed, see :func:`asynctask.core.transitions.is_kept`. ``search``: what a search finds the new
    Event by.
    """

    job_id: str
    attempt: int | None
    worker_name: str
    queue: str
    params: Any = None
    options: str | None = None
    sent_at: int | None = None
    anew: bool = False
    broken: str = ""
    is_tracked: bool = True
    search: Sequence[SearchValue] = ()


def is_job_id(value: object) -> TypeGuard[str]:
    """Whether every database can store this id of an Event."""
    return isinstance(value, str) and 0 < len(value) <= MAX_JOB_ID and clean(value) == value


def enqueue(
    ledger: Ledger, jobs: Sequence[Arrival], *, due_at: int | None = None, options: Mapping[str, Any] | None = None
) -> dict[str, int]:
    """Creates stand-alone Events; skips ids that exist. Returns the creation times (microseconds) of the new ones, by job
    id.

    ``due_at`` (microseconds): when they may begin; None: they are in a queue already. ``options``: members of their payload
    (``retry``, ``priority``). Raises :class:`InputError` for values that the database cannot store.
    """
    check_event(None, Status.ENQUEUE, Reason.SUBMITTED)
    return _enqueue_all(ledger, jobs, due_at, options, ledger.now())


def send(
    ledger: Ledger,
    jobs: Sequence[Arrival],
    *,
    due_at: int | None = None,
    options: Mapping[str, Any] | None = None,
    open_too: bool = False,
) -> dict[str, int | IdInUse]:
    """As :func:`enqueue`, for jobs that a program sends: a job under the id of a lone job that has ended reopens its Event,
    as a new run with the new arguments.

    For a job that must not be sent, because its id is that of an open job or of a job of a Task, the result has an error
    in place of the time; with ``open_too`` such a job is skipped, because an engine sends it by itself.
    """
    now = ledger.now()  # the same in each attempt, to recognize what an earlier one has written
    found: dict[str, int | IdInUse] = {**_enqueue_all(ledger, jobs, due_at, options, now)}
    rest = [job for job in jobs if job.job_id not in found]
    return found | _send_again(ledger, rest, due_at, options, now, open_too) if rest else found


def _enqueue_all(
    ledger: Ledger, jobs: Sequence[Arrival], due_at: int | None, options: Mapping[str, Any] | None, now: int
) -> dict[str, int]:
    unique = {job.job_id: job for job in jobs}
    rest = dumps(dict(options)) if options else None
    created: dict[str, int] = {}
    try:
        for part in _slices([_row(job, rest) for job in unique.values()]):
            created |= _enqueue(ledger, part, due_at, now)
    except (TypeError, UnicodeError, exc.DataError) as error:
        cause = getattr(error, "orig", None) or error
        raise InputError(f"no Event can be made: {clean(str(cause))[:_SHOWN]}", code="not_recordable") from error
    return created


def _send_again(
    ledger: Ledger,
    jobs: Sequence[Arrival],
    due_at: int | None,
    options: Mapping[str, Any] | None,
    now: int,
    open_too: bool,
) -> dict[str, int | IdInUse]:
    rest = dumps(dict(options)) if options else None
    by_id = {job.job_id: job for job in jobs}

    def make(connection: Connection) -> list[Change]:
        found = connection.execute(sa.select(_e.id, _e.job_id).where(_e.job_id.in_(list(by_id)))).all()
        if due_at is not None:
            notify(connection)
        return [_new_run(ledger, int(i), _row(by_id[job_id], rest), due_at, now) for i, job_id in found]

    sent: dict[str, int | IdInUse] = {}
    for change in lending.change(ledger, make):
        if (record := change.record) is None:
            continue
        if (
            change.transition is not None or record.created_at == now
        ):  # an earlier attempt has written it, and its answer was lost
            sent[record.job_id] = now
        elif not open_too:
            sent[record.job_id] = _in_use(record)
    return sent


def _new_run(ledger: Ledger, event_id: int, row: Mapping[str, Any], due_at: int | None, now: int) -> Change:
    def decide(record: EventRecord) -> Transition | None:
        if not record.is_lone or not record.row.items or record.row.status not in TERMINAL or record.created_at == now:
            return None
        return send_again(record.row, due_at=due_at)

    values = {name: row[name] for name in ("params", "options", "worker_name", "queue")}
    values |= {"created_at": now, **dict.fromkeys(("result", "checkpoint", "started_at", *LAST_ERROR))}
    return Change(event_id, decide, notes=[Note("enqueue", ledger.catalogue("sent_again"))], values=values)


def _in_use(record: EventRecord) -> IdInUse:
    if record.task_id is not None:
        return IdInUse(
            f"{record.job_id} is the id of a job of Task {record.task_id}, so nothing was sent: send with another id, or"
            " have the job run again by retrying the Task"
        )
    if not record.is_lone:
        return IdInUse(
            f"{record.job_id} is the id of a callback of Task {record.callback_of}, so nothing was sent: take another id"
        )
    return IdInUse(
        f"a job with the id {record.job_id} is in {record.row.status} (worker {record.worker_name!r}, queue"
        f" {record.queue!r}), so nothing was sent: wait for its end, cancel it, or send with another id"
    )


def reopen(
    ledger: Ledger,
    job: Arrival,
    *,
    due_at: int | None = None,
    options: Mapping[str, Any] | None = None,
    is_new: Callable[[str | None], bool] = lambda options: True,
) -> bool:
    """Reopens the Event of a lone job that has ended, for a job that arrives under its id without an announcement; returns
    whether it did. ``is_new``: from the Event's options, whether the arriving job is another one than the Event's."""
    with ledger.database.read() as connection:
        found = connection.execute(sa.select(_e.options).where(_e.job_id == job.job_id)).first()
    if found is None or not is_new(found.options):
        return False
    return bool(_send_again(ledger, [job], due_at, options, ledger.now(), True))


def _row(job: Arrival, options: str | None) -> dict[str, Any]:
    return {
        "job_id": job.job_id,
        "worker_name": job.worker_name,
        "queue": job.queue,
        "status": str(Status.ENQUEUE),
        "attempt": job.attempt or 1,
        "params": None if job.params is None else dumps(job.params),
        "options": job.options or options,
        "items": int(job.is_tracked),
        "search": job.search,
    }


def _slices(rows: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Slices that fit one statement of every database."""
    part: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        length = len(row["params"] or "") + len(row["options"] or "")
        if part and (len(part) == BATCH or size + length > MAX_BYTES):
            yield part
            part, size = [], 0
        part.append(row)
        size += length
    if part:
        yield part


@repeatable
def _enqueue(ledger: Ledger, part: Sequence[dict[str, Any]], due_at: int | None, now: int) -> dict[str, int]:
    if due_at is None and len(part) <= _ALONE and not any(row["search"] for row in part):
        with ledger.database.write_alone() as connection:
            return _insert(connection, part, due_at, now)
    with ledger.database.write() as connection:
        created = _insert(connection, part, due_at, now)
        if due_at is not None:
            notify(connection)
    return created


def _insert(connection: Connection, rows: Sequence[dict[str, Any]], due_at: int | None, now: int) -> dict[str, int]:
    rows = [{**row, "due_at": due_at, "created_at": now} for row in rows]
    values = {row["job_id"]: row.pop("search") for row in rows}
    found = insert_new(connection, events, "job_id", rows, ("job_id", "created_at"))
    created = {job_id: now for job_id, created_at in found if created_at == now}
    add_alone(connection, {job_id: values[job_id] for job_id in created if values[job_id]})
    return created


def record(ledger: Ledger, job_id: str, status: str, message: str) -> bool:
    """Records a status and a message; see ``AsyncTask.record``."""
    if status not in _RECORDABLE:
        raise InputError(f"no status to record: {status!r}; there are {', '.join(_RECORDABLE)}")
    if not is_job_id(job_id):
        raise InputError(f"a job id has 1 to {MAX_JOB_ID} characters, and no NUL or half a character among them")
    wanted = Status(status)

    def make(connection: Connection) -> list[Change]:
        event_id = _find(connection, ledger, job_id)
        return [_change(ledger, event_id, wanted, message, _is_lent(connection, event_id))]

    return _is_changed(ledger, lending.change(ledger, make), is_over=wanted in TERMINAL)


def _is_changed(ledger: Ledger, applied: Sequence[Change], *, is_over: bool) -> bool:
    """Whether an Event was changed; closes the Tasks of Events that ended."""
    won = [each.record for each in applied if each.transition is not None and each.record is not None]
    for record in won if is_over else ():
        close_after(ledger, record)
    return bool(won)


def _find(connection: Connection, ledger: Ledger, job_id: str) -> int:
    found = connection.execute(sa.select(_e.id).where(_e.job_id == job_id)).scalar()
    if found is None:
        _insert(connection, [_row(Arrival(job_id, 1, "", "default"), None)], None, ledger.now())
        found = connection.execute(sa.select(_e.id).where(_e.job_id == job_id)).scalar_one()
    return int(found)


def _is_lent(connection: Connection, event_id: int) -> bool:
    """Whether an Event is in a loan that a process holds; locks its Task's row, so that this does not change."""
    task_id, seq = connection.execute(sa.select(_e.task_id, _e.seq).where(_e.id == event_id)).one()
    if task_id is None:
        return True
    lock(connection, int(task_id))
    return lending.is_lent(lending.lent_ranges(connection, int(task_id)), seq)


def _change(ledger: Ledger, event_id: int, wanted: Status, message: str, on_loan: bool) -> Change:
    text = clean(message) or ledger.catalogue("retry" if wanted is Status.ENQUEUE else str(wanted), "")

    def decide(seen: EventRecord) -> Transition | None:
        row = seen.row
        if row.status in TERMINAL:
            return None
        if not row.items:  # an untracked job whose code records a status becomes tracked
            row, change.values = row._replace(items=1), {"items": 1}
        transition = recorded(row, wanted, on_loan=on_loan, now=ledger.now())
        return transition._replace(before=seen.row)

    failure = Failure("recorded", text) if wanted in PROBLEM else None
    change = Change(event_id, decide, notes=[Note(str(wanted), text)], failure=failure)
    return change


def end_elsewhere(
    ledger: Ledger, job_id: str, why: str, *, timeout_s: float | None = None, lone_only: bool = False
) -> bool:
    """Ends an open job in ``error`` that an attached engine gave up without running the middleware; returns whether it did.

    ``why``: the reason shown; ``timeout_s``: the time limit (seconds) over which the engine ended it; ``lone_only``: skips
    jobs and callbacks of Tasks, which the ledger dispatches again.
    """
    error = JobTimeout(timeout_s) if timeout_s is not None else None
    reason, code = (Reason.TIMEOUT, "timeout") if error else (Reason.DISCARDED, "discarded")
    text = ledger.catalogue(code, why if error is None else str(error))

    def decide(record: EventRecord) -> Transition | None:
        if record.row.status not in (Status.ENQUEUE, Status.WORKING) or (lone_only and not record.is_lone):
            return None
        return outcome(record.row, Status.ERROR, reason)

    def make(connection: Connection) -> list[Change]:
        found = connection.execute(sa.select(_e.id).where(_e.job_id == job_id)).scalars().all()
        return [Change(int(i), decide, notes=[Note("error", text)], failure=Failure(code, text)) for i in found]

    return _is_changed(ledger, lending.change(ledger, make), is_over=True)


def last_message_is(messages: str | None, text: str) -> bool:
    """Whether a job's last message is this text."""
    said = orjson.loads(messages) if messages else []
    return bool(said) and said[-1].get("message") == text


def put_off(ledger: Ledger, event_id: int, attempt: int, why: str, until: int) -> Change:
    """The change that defers a job which cannot be performed where it was fetched: it waits in the ledger until ``until``
    (microseconds), without using a retry. The message ``why`` is not repeated while it is the Event's last one."""

    def decide(record: EventRecord) -> Transition | None:
        if record.row.status is not Status.ENQUEUE or record.row.attempt != attempt:
            return None
        if record.task_state != State.CANCELLED and not last_message_is(record.messages, why):
            change.notes = [Note("enqueue", why)]
        return give_back(record.row, record.task_state, now=until)

    change = Change(event_id, decide)
    return change


def put_off_elsewhere(ledger: Ledger, reasons: Mapping[tuple[str, int], str], until: int) -> None:
    """As :func:`put_off`, for jobs that were deferred outside the middleware: (job id, attempt) -> reason."""
    _change_each(ledger, reasons, lambda i, attempt, why: put_off(ledger, i, attempt, clean(why), until))


def discard(ledger: Ledger, reasons: Mapping[tuple[str, int], str]) -> None:
    """Ends jobs in ``error`` that were given up outside the middleware: (job id, attempt) -> reason."""
    _change_each(ledger, reasons, lambda i, attempt, why: _discarded(ledger, i, attempt, why))


def _change_each(ledger: Ledger, reasons: Mapping[tuple[str, int], str], made: Callable[[int, int, str], Change]) -> None:
    def make(connection: Connection, part: Sequence[tuple[str, int]]) -> list[Change]:
        found = connection.execute(sa.select(_e.id, _e.job_id).where(_e.job_id.in_([jid for jid, _ in part]))).all()
        attempts = dict(part)
        return [made(int(i), attempts[jid], reasons[jid, attempts[jid]]) for i, jid in found]

    for part in chunks(sorted(reasons)):
        lending.change(ledger, partial(make, part=part))


def send_from_ledger(ledger: Ledger, job_id: str, why: str, until: int) -> None:
    """Makes a lone job that its engine holds wait in the ledger until ``until`` (microseconds), because a message with the
    job could not be used, and may have been the only one. The ledger sends it again, with the arguments of its Event; if
    these are not kept, it ends in ``error``. ``why``: the message for the Event.

    Skips a job that is known to run. A job that runs and is not known to ends by its own outcome, which needs no fence.
    """
    unbegun = _e.process.is_(None) | ((_e.process >= lending.QUEUE_HOLDER) & (_e.process < lending.AFTER_QUEUE_HOLDERS))
    waits = (_e.status == str(Status.ENQUEUE)) & unbegun & _e.due_at.is_(None)
    is_lone = _e.task_id.is_(None) & _e.callback_of.is_(None)

    def make(connection: Connection) -> list[Change]:
        chosen = sa.select(_e.id, _e.attempt, _e.params.is_not(None)).where(_e.job_id == job_id, waits, is_lone)
        return [
            put_off(ledger, i, attempt, why, until) if is_kept else _discarded(ledger, i, attempt, why)
            for i, attempt, is_kept in connection.execute(chosen).all()
        ]

    lending.change(ledger, make)


def _discarded(ledger: Ledger, event_id: int, attempt: int, reason: str) -> Change:
    text = ledger.catalogue("discarded", reason)

    def decide(seen: EventRecord) -> Transition | None:
        if seen.row.attempt != attempt or seen.row.status not in (Status.ENQUEUE, Status.WORKING):
            return None
        return outcome(seen.row, Status.ERROR, Reason.DISCARDED)

    return Change(event_id, decide, notes=[Note("error", text)], failure=Failure("discarded", text))
