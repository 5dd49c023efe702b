"""Begin for jobs that arrive through a foreign queue: an engine's, or one of Redis.

A copy in such a queue proves nothing: its Event may have ended, may be held elsewhere, or may not exist. A job that arrives
without a fence is kept, delivered and retried by its engine: the outcome of any copy counts while the Event is open, only
the engine decides on another attempt, and the job never waits in the ledger for the dispatcher.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from asynctask.core.states import Status
from asynctask.core.transitions import Begin, pause_s
from asynctask.database.batches import MAX_BYTES
from asynctask.errors import IdInUse, InputError
from asynctask.ledger import queries
from asynctask.ledger.base import dumps
from asynctask.ledger.events import EventRecord, Failure
from asynctask.ledger.processes import engine_of
from asynctask.ledger.recorder import Kind, Outcome
from asynctask.ledger.standalone import ENGINE, Arrival, enqueue, reopen
from asynctask.messages import clean
from asynctask.middleware.tracker import INTERRUPTED, Attempt, Ticket, Tracker
from asynctask.sidekiq.copies import AGAIN

MAX_PARAMS: Final = MAX_BYTES
"""Largest size of the parameters of one Event, in bytes."""

MAX_OPTIONS: Final = 1_000_000
"""Largest size of the other members of one Event's job, in bytes."""

_MAX_NAME: Final = 255
_SHOWN: Final = 500

_NO_EVENT: Final = (
    "it is dropped unrun: another ledger dispatched it, or this one was restored or purged since; give all programs of a"
    " queue one database_url, or other ledgers other queues"
)


class ArrivalTracker(Tracker):
    """The tracker of a process that gets jobs from foreign queues."""

    # -- begin

    def begin_fetched(self, keys: Sequence[tuple[str, int | None]]) -> list[Ticket | None]:
        """As :meth:`begin`, for a queue that does not belong to an engine: drops copies of jobs that a process, or no
        holder, holds by now."""
        tickets = self.begin(keys)
        strays = self._strays([each.record for each in tickets if each is not None])
        if not strays:
            return tickets
        return [
            replace(each, verdict=Begin.DROP) if each is not None and each.event_id in strays else each for each in tickets
        ]

    def _strays(self, records: Sequence[EventRecord]) -> set[int]:
        """Those of these Events that wait and that no foreign queue holds."""
        waiting = [each for each in records if each.row.status is Status.ENQUEUE and each.row.due_at is None]
        claimed = {each.id: each.row.process for each in waiting if each.row.process is not None}
        in_loans = [each for each in waiting if each.id not in claimed and each.task_id is not None]
        lenders: Mapping[int, str] = {}
        if in_loans:
            with self._ledger.database.read() as connection:
                lenders = queries.lenders(connection, in_loans)
        held = {**claimed, **{each.id: lenders.get(each.id) for each in in_loans}}
        return {i for i, holder in held.items() if holder is None or not queries.is_queue(holder)}

    def arrive(self, arrivals: Sequence[Arrival]) -> list[Ticket]:
        """Tickets for jobs that the ledger may not know, in order. For a job without an Event (pushed by a person or by
        another program) a stand-alone Event is created. Raises LedgerUnavailable, and InputError as :meth:`enqueue`.

        A copy with an attempt was dispatched by a ledger that has its Event. If this ledger has none, the copy belongs to
        another ledger, or is older than a restored backup or a purge, and is dropped; its own ledger, if any, finds it
        lost.
        """
        keys = [(arrival.job_id, arrival.attempt) for arrival in arrivals]
        tickets = self.begin(keys)
        if None in tickets:
            self.enqueue(
                [each for each, ticket in zip(arrivals, tickets, strict=True) if ticket is None and not each.attempt]
            )
            tickets = self.begin(keys)
        return [
            self._dropped(arrival) if ticket is None else _unless_late(ticket, arrival)
            for arrival, ticket in zip(arrivals, tickets, strict=True)
        ]

    def _dropped(self, arrival: Arrival) -> Ticket:
        self._log.error(
            "copy_of_no_event", job_id=arrival.job_id, attempt=arrival.attempt, worker=arrival.worker_name,
            queue=arrival.queue, hint=_NO_EVENT,
        )  # fmt: skip
        return Ticket.made(Begin.DROP, arrival.job_id, attempt=arrival.attempt or 1)

    def reopen(self, arrival: Arrival, is_new: Callable[[str | None], bool]) -> bool:
        """Reopens the ended Event of a lone job for another job under its id, if ``is_new`` returns true for the Event's
        options; the ledger dispatches the job then. Returns whether it did. Raises LedgerUnavailable."""
        now = self._ledger.now()
        reopened = reopen(self._ledger, arrival, due_at=now, is_new=is_new)
        if reopened:
            self._recorder.due(now)
        return reopened

    def enqueue(self, arrivals: Sequence[Arrival]) -> None:
        """Creates stand-alone Events for jobs that are in their engine's queue already; skips known ids. Raises
        :class:`~asynctask.errors.InputError` for values that the database cannot store."""
        engine = engine_of(self._ledger.identity)
        enqueue(self._ledger, arrivals, options=None if engine is None else {ENGINE: engine})

    # -- settle

    def outcome(
        self,
        attempt: Attempt,
        retry_at: int | None,
        discarded: str | None = None,
        then: Callable[[bool], None] | None = None,
    ) -> Outcome:
        result = attempt.result
        if attempt.ticket.elsewhere and result is not None and result.kind is Kind.INTERRUPTED and retry_at is None:
            # This program's runtime always repeats interrupted jobs; another engine may give them up.
            failure = Failure(INTERRUPTED, self._ledger.catalogue("interrupted"))
            attempt.result = replace(result, kind=Kind.RAISED, failure=failure)
        return super().outcome(attempt, retry_at, discarded, then)

    def _paused(self, ticket: Ticket, retry_at: int) -> int:
        """``retry_at`` as it is, because an engine delays its own jobs."""
        return retry_at if ticket.elsewhere else super()._paused(ticket, retry_at)


def _unless_late(ticket: Ticket, arrival: Arrival) -> Ticket:
    """The ticket of a copy; drops a late copy from an earlier run under the same id."""
    sent_at = ticket.record.created_at if ticket.is_lone else 0
    if ticket.attempt > 1 and arrival.sent_at is not None and arrival.sent_at < sent_at:
        return replace(ticket, verdict=Begin.DROP)
    return ticket


# -- making a job fit an Event


def fitted(job: Arrival) -> tuple[Arrival, str | None]:
    """A job of another program adapted to fit an Event, and a description of the changes; None without changes.

    Names are truncated and cleaned; arguments that cannot be stored are dropped, and the reason quotes their beginning.
    """
    worker_name, queue = clean(job.worker_name)[:_MAX_NAME], clean(job.queue)[:_MAX_NAME]
    params, reasons = job.params, []
    if worker_name != job.worker_name:
        reasons.append(f"the name of its worker {_unfit_name(job.worker_name)}")
    if queue != job.queue:
        reasons.append(f"the name of its queue {_unfit_name(job.queue)}")
    unfit = _unfit_params(params)
    if unfit is not None:
        params = None
        reasons.append(unfit)
    if job.options is not None and (size := len(job.options.encode())) > MAX_OPTIONS:
        job, params = replace(job, options=None), None  # without its options it would be another job
        reasons.append(f"the members beside its arguments have {size:,} bytes, the most is {MAX_OPTIONS:,}")
    if not reasons:
        return job, None
    return replace(job, worker_name=worker_name, queue=queue, params=params), "; ".join(reasons)


def _unfit_name(name: str) -> str:
    if len(name) > _MAX_NAME:
        return f"has {len(name):,} characters, the most is {_MAX_NAME}"
    return "holds a character that a database cannot keep"


def _unfit_params(params: Any) -> str | None:
    try:
        size = len(dumps(params).encode())
    except TypeError as error:  # the encoder's error for all: long integers, depth, lone surrogates
        return f"the ledger cannot keep its arguments ({error}): {repr(params)[:_SHOWN]}"
    if size > MAX_PARAMS:
        return (
            f"its arguments have {size:,} bytes, the most is {MAX_PARAMS:,}: store the data elsewhere and send its location"
        )
    return None


# -- the next run of a job that sends itself again


class NextRun(NamedTuple):
    """The next run of a job, which the running job has sent under its own id.

    ``worker_name``; ``queue`` (the ledger's name for it); JSON-ready ``args`` and ``kwargs``; ``delay_s``: seconds before
    which it does not start; ``retries``: how many of its runs its engine counts as retries; ``signature``: an engine's own
    form of one or several jobs, one of which has the id.
    """

    worker_name: str
    queue: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    delay_s: float = 0.0
    retries: int = 0
    signature: Any = None

    def columns(self, *, is_lone: bool, tries: int) -> dict[str, Any]:
        """The columns of the Event that the next run changes. ``tries``: the Event's new count of runs.

        A lone job becomes the job that was sent; if its arguments are unknown, the Event has none, and a user cannot retry
        it. The Event of a list's item keeps the item in ``params``.
        """
        if is_lone:
            columns = {"worker_name": clean(self.worker_name)[:_MAX_NAME], "queue": clean(self.queue)[:_MAX_NAME]}
            params: Any = {"args": list(self.args), "kwargs": dict(self.kwargs)} if self.kwargs else list(self.args)
            is_known = self.signature is None and not _unfit_params(params)
            return {**columns, "params": dumps(params) if is_known else None}
        run: dict[str, Any] = {"class": self.worker_name, "args": list(self.args), "kwargs": dict(self.kwargs)}
        run |= {"before": tries - self.retries, "signature": self.signature}
        return {"options": dumps({AGAIN: run}), "queue": clean(self.queue)[:_MAX_NAME]}


def send_itself(attempt: Attempt, run: NextRun) -> None:
    """Notes that a running job sends another run under its own id: its Event then waits for that run instead of ending.

    The ledger keeps a job of a Task and dispatches the next run; the engine must not send it. A lone job is sent by its
    engine, which does not limit jobs that send themselves without a delay: such a job waits here, see
    :func:`~asynctask.core.transitions.pause_s`. Raises :class:`~asynctask.errors.IdInUse` for a callback, and InputError
    for arguments that the ledger cannot store.
    """
    ticket = attempt.ticket
    if ticket.record.callback_of is not None:
        raise IdInUse(
            f"{ticket.job_id} is a callback, which ends with its Task: send with another id, or raise to be retried"
        )
    if not ticket.is_lone:
        try:
            size = len(run.columns(is_lone=False, tries=0)["options"].encode())
        except TypeError as error:
            why = f"the ledger cannot keep what {ticket.job_id} sends under its own id ({error}): send JSON values"
            raise InputError(why, code="not_json") from None
        if size > MAX_OPTIONS:
            why = f"what {ticket.job_id} sends under its own id has {size:,} bytes, the most is {MAX_OPTIONS:,}"
            raise InputError(f"{why}: store the data elsewhere and send its location", code="too_large")
    else:
        try:
            dumps([run.args, run.kwargs])
        except TypeError:  # the engine has another serializer
            run = run._replace(args=(), kwargs={}, signature=[])
        if ticket.elsewhere and (pause := pause_s(run.delay_s, ticket.retries)) > run.delay_s:
            threading.Event().wait(pause)
    attempt.next_run = run
