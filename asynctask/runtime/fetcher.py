"""What a fetched copy is: a job for a worker of this process, a job of others, or no job at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import orjson

from asynctask.brokers.base import DEAD, Broker, Copy, Held
from asynctask.clock import Clock
from asynctask.core.transitions import Begin
from asynctask.dispatch.outbox import buried, job_of, options_of, worker_name
from asynctask.errors import InputError
from asynctask.job import CurrentJob
from asynctask.ledger.reservations import Ready
from asynctask.ledger.standalone import NewJob, fitted, is_job_id
from asynctask.logs import get_logger
from asynctask.messages import clean
from asynctask.middleware.tracker import TICKET, Arrival, Ticket, Tracker
from asynctask.runtime.deferral import Stranger, Strangers, why_not_ours
from asynctask.runtime.execution import Assignment
from asynctask.wire.payload import parse
from asynctask.wire.ruby_json import dump_any
from asynctask.worker import Worker

__all__ = ["LOOKS_S", "Doubt", "Intake", "Mine"]


class Intake:
    """Makes assignments of fetched copies.

    Arguments: ``mine``, what the broker holds for this process; ``strangers``, who takes what is others'; ``stopping``,
    whether the process is; ``acknowledge``, told of a copy whose outcome is recorded although it never was an assignment.
    """

    def __init__(
        self,
        *,
        identity: str,
        broker: Broker,
        tracker: Tracker,
        clock: Clock,
        workers: Mapping[str, Worker],
        mine: Mine,
        strangers: Strangers,
        stopping: Callable[[], bool],
        acknowledge: Callable[[Copy], None],
    ) -> None:
        self._identity = identity
        self._broker = broker
        self._tracker = tracker
        self._clock = clock
        self._workers = workers
        self._mine = mine
        self._strangers = strangers
        self._stopping = stopping
        self._acknowledge = acknowledge
        self._log = get_logger("asynctask.intake")

    def take(self, copies: Sequence[Copy]) -> list[Assignment]:
        """The jobs among a fetched batch, each with its ticket if it is tracked. Raises Unavailable."""
        found = [self._assign(copy) for copy in copies]
        assignments = [each for each in found if isinstance(each, Assignment)]
        if len(assignments) < len(found):
            strangers = [each for each in found if isinstance(each, Stranger)]
            self._strangers.defer(strangers)
            self._mine.forget([each.copy for each in strangers])
            ours = {each.copy.queue for each in assignments}
            self._strangers.gave(ours, strangers)
        else:
            self._strangers.gave({each.copy.queue for each in assignments}, ())
        tracked = [each for each in assignments if each.is_tracked]
        refused = self._begin(tracked) if tracked else ()
        return [each for each in assignments if id(each) not in refused] if refused else assignments

    def take_lent(self, lent: Sequence[tuple[Copy, Ready]], asked: float) -> list[Assignment]:
        """Jobs that this process was lent, each with its ticket. ``asked``: when, on the monotonic clock."""
        found = []
        for copy, job in lent:
            assignment = self._assign(copy)
            if isinstance(assignment, Assignment):
                _bind(assignment, self._tracker.lent(job), asked)
                found.append(assignment)
        return found

    def _begin(self, tracked: Sequence[Assignment]) -> set[int]:
        """Gives each its ticket; returns (by ``id``) those that no Event can hold, which have ended with that reason."""
        asked = self._clock.monotonic()
        refused: set[int] = set()
        arrivals: list[tuple[Assignment, Arrival, str | None]] = []
        for each in tracked:
            if each.copy.attempt == 0 and not is_job_id(each.copy.jid):
                self._bury(each, "it cannot be recorded: its jid is none that a database can keep")
                refused.add(id(each))
            else:
                arrivals.append((each, *_arrival(each)))
        for (each, _, unfit), ticket in zip(arrivals, self._tickets(arrivals), strict=True):
            if ticket is not None:
                _bind(each, ticket, asked)
            if ticket is None or (unfit is not None and self._refuse(each.copy, ticket, f"it cannot be recorded: {unfit}")):
                refused.add(id(each))
        return refused

    def _tickets(self, arrivals: Sequence[tuple[Assignment, Arrival, str | None]]) -> list[Ticket | None]:
        """The tracker's answer; None for a job of which the database takes no Event: that one is buried."""
        try:
            return list(self._tracker.begin([arrival for _, arrival, _ in arrivals]))
        except InputError as error:
            if len(arrivals) > 1:  # one by one: a job must not cost its neighbours
                return [ticket for each in arrivals for ticket in self._tickets([each])]
            ((assignment, _, _),) = arrivals
            if assignment.copy.attempt > 0:
                raise
            self._bury(assignment, str(error))
            return [None]

    def ask_again(self, assignment: Assignment) -> None:
        """A ticket that says what is so now, for a job that was not begun since it got its first. Raises Unavailable."""
        asked = self._clock.monotonic()
        arrival, _ = _arrival(assignment)
        (ticket,) = self._tracker.begin([arrival])
        _bind(assignment, ticket, asked)

    def _assign(self, copy: Copy) -> Assignment | Stranger | None:
        try:
            payload = job_of(copy)
        except ValueError as error:
            self._log.error("undecodable_job", jid=copy.jid, queue=copy.queue, error=str(error)[:500])
            self._give_up(copy, error)
            return None
        name = worker_name(payload)
        worker = self._workers.get(name)
        if copy.attempt == 0:
            why = why_not_ours(payload, worker)
            if why is not None:
                return Stranger(copy, name, why)

        state: dict[str, Any] = {}
        job = CurrentJob(
            copy.jid,
            task_id=copy.task_id,
            attempt=max(1, copy.attempt),
            queue=copy.queue,
            payload=dict(payload),
            should_stop=partial(self._must_stop, state),
            state=state,
        )
        return Assignment(copy, payload, job, worker, None)

    def _must_stop(self, state: Mapping[str, Any]) -> bool:
        ticket: Ticket | None = state.get(TICKET)
        return self._stopping() or (ticket is not None and ticket.lost)

    def _give_up(self, copy: Copy, error: ValueError) -> None:
        """A copy that is no job: where it is tracked its Event ends so, for nobody would ever look into ``dead`` for it."""
        if copy.attempt == 0:
            self._broker.hold(DEAD, [Held(copy, self._clock.now())], process=self._identity)
            self._mine.forget([copy])
            return
        (ticket,) = self._tracker.begin([Arrival(copy.jid, copy.attempt, "", copy.queue)])
        if ticket.verdict is Begin.DROP:
            self._mine.done(copy)
        elif not self._refuse(copy, ticket, f"it cannot be decoded: {error}"):
            self._tracker.release(ticket, lambda won: self._acknowledge(copy))

    def _refuse(self, copy: Copy, ticket: Ticket, reason: str) -> bool:
        """Ends a job whose Event could run, in ``error`` with the reason; False for one that it would not run anyway."""
        if ticket.verdict is not Begin.RUN:
            return False
        self._log.error("job_refused", jid=copy.jid, queue=clean(copy.queue), reason=reason[:500])
        self._tracker.settle(ticket, discarded=reason, then=lambda won: self._acknowledge(copy))
        return True

    def _bury(self, assignment: Assignment, reason: str) -> None:
        """A job that can have no Event: among the broker's dead it is seen, with the reason. Raises BrokerUnavailable."""
        copy, now = assignment.copy, self._clock.now()
        self._log.error("job_refused", jid=clean(copy.jid), queue=clean(copy.queue), reason=reason[:500])
        self._broker.hold(DEAD, [Held(buried(copy, now, "NotRecordable", reason), now)], process=self._identity)
        self._mine.forget([copy])


def _arrival(assignment: Assignment) -> tuple[Arrival, str | None]:
    """What the tracker is asked about it, and what of it an Event cannot hold. Only others push what it cannot."""
    copy, name, args = assignment.copy, assignment.name, assignment.payload["args"]
    if copy.attempt > 0:
        return Arrival(copy.jid, copy.attempt, name, copy.queue, args), None
    came = parse(copy.payload, keep_numbers=True)
    job, unfit = fitted(NewJob(copy.jid, name, copy.queue, args, options=options_of(came)))
    # The arguments as they came: what an Event can keep of them was seen by their values.
    params = None if job.params is None else orjson.Fragment(dump_any(came["args"]))
    return Arrival(job.job_id, copy.attempt, job.worker_name, job.queue, params, job.options), unfit


def _bind(assignment: Assignment, ticket: Ticket, asked: float) -> None:
    assignment.ticket, assignment.asked = ticket, asked
    ticket.job = assignment.job
    assignment.job.task_id = ticket.task_id
    assignment.job.attempt = ticket.attempt
    assignment.job.state[TICKET] = ticket


# -- What a process knows of the copies that the broker holds for it.

LOOKS_S: Final = (0.0, 10.0, 60.0, 180.0)
"""Seconds after a fetch broke off at which it is looked what it moved: the network may deliver it minutes later."""


class Doubt:
    """A fetch broke off: the broker may have given, or may yet give, what never arrives here. For the fetching thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looks: list[float] = []  # when, the next one first

    def rise(self) -> None:
        """A fetch broke off just now."""
        now = self._clock.monotonic()
        self._looks = [now + seconds for seconds in LOOKS_S]

    def is_due(self) -> bool:
        """Whether it is time to look."""
        return bool(self._looks) and self._looks[0] <= self._clock.monotonic()

    def looked(self) -> None:
        """The broker was asked just now."""
        now = self._clock.monotonic()
        self._looks = [at for at in self._looks if at > now]


class Mine:
    """The copies that arrived here and are not given back, and those of them that may be acknowledged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: list[Copy] = []
        self._handles: set[Any] = set()  # of whatever kind the broker's are

    def __contains__(self, copy: Copy) -> bool:
        with self._lock:
            return copy.handle in self._handles

    @property
    def waiting(self) -> int:
        """How many may be acknowledged."""
        return len(self._done)

    def done(self, copy: Copy) -> int:
        """It may be acknowledged; returns how many wait for that."""
        with self._lock:
            self._done.append(copy)
            return len(self._done)

    def take_done(self) -> list[Copy]:
        """What may be acknowledged, for whoever does it now."""
        with self._lock:
            taken, self._done = self._done, []
            return taken

    def keep_done(self, copies: Sequence[Copy]) -> None:
        """They could not be acknowledged; they come first the next time."""
        with self._lock:
            self._done[:0] = copies

    def exchanged(self, done: Sequence[Copy], copies: Sequence[Copy]) -> None:
        """``done`` were acknowledged and ``copies`` arrived."""
        with self._lock:
            self._handles.difference_update(copy.handle for copy in done)
            self._handles.update(copy.handle for copy in copies)

    def forget(self, copies: Sequence[Copy]) -> None:
        """They went back or into a set, or count as never arrived."""
        with self._lock:
            self._handles.difference_update(copy.handle for copy in copies)
