"""The state machines of Event and Task, as tables, from which the checks, a page of the docs (``scripts/states.py``) and
the tests are generated.

An edge is (from, to, reason) with the roles that may take it; *from* ``None`` is a new row. ``events.status`` and
``tasks.state`` are written only along an edge of these tables, as a compare-and-set on *from*.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from asynctask.errors import TransitionRefused


class Status(StrEnum):
    """The status of an Event."""

    ENQUEUE = "enqueue"
    WORKING = "working"
    STOPPED = "stopped"
    FINISH = "finish"
    FAILED = "failed"
    ERROR = "error"
    CANCELLED = "cancelled"


class State(StrEnum):
    """The state of a Task."""

    SPLITTING = "splitting"
    RUNNING = "running"
    PAUSED = "paused"
    FINALIZING = "finalizing"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


OPEN: Final = frozenset({Status.ENQUEUE, Status.WORKING, Status.STOPPED})
TERMINAL: Final = frozenset({Status.FINISH, Status.FAILED, Status.ERROR, Status.CANCELLED})
PROBLEM: Final = frozenset({Status.FAILED, Status.ERROR})


class Who(StrEnum):
    """The role that may take an edge."""

    SUBMITTER = "submitter"  # the caller who submits the list, and the splitter on the caller's behalf
    WORKER = "worker"  # the middleware and the runtime around one job
    SWEEP = "sweep"  # recovery, closing and other maintenance, in any process
    PERSON = "person"  # a user or program through the API, the command line or the handle


GROWING: Final = ("splitting", "open")
"""``split_state`` of a Task that may get more items: of its list, or by additions."""


class Reason(StrEnum):
    """The reason of an edge; logged, and stored if it adds to the status."""

    SUBMITTED = "submitted"
    STARTED = "started"
    RETURNED = "returned"
    REFUSED = "refused"  # NormalException, or one of the worker's failed_on
    RAISED = "raised"
    TIMEOUT = "timeout"
    INTERRUPTED = "interrupted"
    RETRY = "retry"  # the retry policy allows another attempt
    WORKER_LOST = "worker_lost"
    POISON = "poison"
    GIVEN_BACK = "given_back"  # claimed, fetched or waiting in a foreign queue, and returned unrun
    LENT = "lent"  # a process, or a foreign queue, has claimed it
    REDISPATCHED = "redispatched"  # the foreign queue lost its copy
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    RESUMED = "resumed"
    RETRIED = "retried"  # a user's explicit retry: a new generation
    SENT_AGAIN = "sent_again"  # a program sent a job under the id of one that has ended
    RECORDED = "recorded"  # through the public app.record
    DISCARDED = "discarded"  # the runtime gave the job up outside the middleware (undecodable, killed, no such worker)
    SEALED = "sealed"
    SPLIT_FAILED = "split_failed"
    PAUSED = "paused"
    TOO_MANY_FAILURES = "too_many_failures"  # more than the Task's ``tolerated_failures``
    CLOSED = "closed"
    CALLED_BACK = "called_back"
    CALLBACK_FAILED = "callback_failed"
    CALLED_AGAIN = "called_again"  # a user runs the failed callbacks again
    NOTHING_ACCEPTED = "nothing_accepted"
    ROWS_REJECTED = "rows_rejected"  # a rejected row rejects a strict list


@dataclass(frozen=True, slots=True)
class Edge:
    """A legal transition; ``why`` is a sentence for the docs."""

    source: str | None
    target: str
    reason: Reason
    who: frozenset[Who]
    why: str


def _edges(rows: Iterable[tuple[Iterable[str | None], str, Reason, Iterable[Who], str]]) -> tuple[Edge, ...]:
    return tuple(
        Edge(source, target, reason, frozenset(who), why)
        for sources, target, reason, who, why in rows
        for source in sources
    )


_S, _R, _W = Status, Reason, Who
_RUNNABLE = (_S.ENQUEUE, _S.WORKING)

EVENT_EDGES: Final[tuple[Edge, ...]] = _edges(
    [
        (
            (None,),
            _S.ENQUEUE,
            _R.SUBMITTED,
            (_W.SUBMITTER, _W.WORKER),
            "an item was accepted, or a single job was sent",
        ),
        ((_S.ENQUEUE,), _S.WORKING, _R.STARTED, (_W.WORKER,), "the job has run for a tenth of a second"),
        (_RUNNABLE, _S.FINISH, _R.RETURNED, (_W.WORKER,), "the worker returned"),
        (_RUNNABLE, _S.FAILED, _R.REFUSED, (_W.WORKER,), "the worker refused the item"),
        (_RUNNABLE, _S.ERROR, _R.RAISED, (_W.WORKER,), "the worker raised and no retry is left"),
        (_RUNNABLE, _S.ERROR, _R.TIMEOUT, (_W.WORKER,), "the job exceeded its timeout and no retry is left"),
        (_RUNNABLE, _S.ERROR, _R.DISCARDED, (_W.WORKER, _W.SWEEP), "the runtime gave the job up, outside the middleware"),
        (
            _RUNNABLE,
            _S.ENQUEUE,
            _R.RETRY,
            (_W.WORKER,),
            "the job raised, or sent itself again; the next attempt is due at due_at",
        ),
        (_RUNNABLE, _S.ENQUEUE, _R.INTERRUPTED, (_W.WORKER,), "the runtime shut down; the job waits again"),
        (_RUNNABLE, _S.ENQUEUE, _R.GIVEN_BACK, (_W.WORKER, _W.SWEEP), "a process or foreign queue returned it unstarted"),
        ((_S.ENQUEUE,), _S.ENQUEUE, _R.LENT, (_W.WORKER,), "a process claimed the job, which waits there for a thread"),
        (_RUNNABLE, _S.ENQUEUE, _R.WORKER_LOST, (_W.SWEEP,), "its process died; the job waits again"),
        (_RUNNABLE, _S.ENQUEUE, _R.REDISPATCHED, (_W.SWEEP,), "its foreign queue lost it; the job waits again"),
        (
            _RUNNABLE,
            _S.ERROR,
            _R.POISON,
            (_W.SWEEP,),
            "three processes died while they ran the job, or six that ran other jobs too",
        ),
        (
            _RUNNABLE,
            _S.STOPPED,
            _R.STOPPED,
            (_W.WORKER, _W.SWEEP, _W.PERSON),
            "a person stopped the job, and no thread runs it; its checkpoint is kept",
        ),
        ((_S.STOPPED,), _S.ENQUEUE, _R.RESUMED, (_W.PERSON,), "a person started the job again"),
        (
            (*_RUNNABLE, _S.STOPPED),
            _S.CANCELLED,
            _R.CANCELLED,
            (_W.WORKER, _W.SWEEP, _W.PERSON),
            "the Task or job was cancelled",
        ),
        (
            (*_RUNNABLE, _S.STOPPED),
            _S.FAILED,
            _R.CANCELLED,
            (_W.WORKER, _W.SWEEP, _W.PERSON),
            "the Task of a slice was cancelled after an item of the slice had failed",
        ),
        (
            (*_RUNNABLE, _S.STOPPED),
            _S.ERROR,
            _R.CANCELLED,
            (_W.WORKER, _W.SWEEP, _W.PERSON),
            "the Task of a slice was cancelled after an item of the slice had ended in error",
        ),
        (
            (*_RUNNABLE, _S.STOPPED),
            _S.FINISH,
            _R.CANCELLED,
            (_W.WORKER, _W.SWEEP, _W.PERSON),
            "the Task of a slice was cancelled after every item had finished, but before the slice had",
        ),
        (
            (_S.FAILED, _S.ERROR, _S.CANCELLED),
            _S.ENQUEUE,
            _R.RETRIED,
            (_W.PERSON,),
            "an explicit retry opened a new generation",
        ),
        (
            (_S.FINISH, _S.FAILED, _S.ERROR, _S.CANCELLED),
            _S.ENQUEUE,
            _R.SENT_AGAIN,
            (_W.SUBMITTER, _W.WORKER),
            "a job without a Task was sent again under its id",
        ),
        ((_S.ENQUEUE,), _S.WORKING, _R.RECORDED, (_W.PERSON,), "recorded with app.record: the job runs"),
        (_RUNNABLE, _S.FINISH, _R.RECORDED, (_W.PERSON,), "recorded with app.record: finished"),
        (_RUNNABLE, _S.FAILED, _R.RECORDED, (_W.PERSON,), "recorded with app.record: refused"),
        (_RUNNABLE, _S.ERROR, _R.RECORDED, (_W.PERSON,), "recorded with app.record: an error"),
        ((_S.WORKING,), _S.ENQUEUE, _R.RECORDED, (_W.PERSON,), "recorded with app.record: the job waits again"),
    ]
)

_T = State
_ACTIVE = (_T.SPLITTING, _T.RUNNING, _T.PAUSED)

TASK_EDGES: Final[tuple[Edge, ...]] = _edges(
    [
        ((None,), _T.SPLITTING, _R.SUBMITTED, (_W.SUBMITTER,), "a list was submitted"),
        ((_T.SPLITTING,), _T.RUNNING, _R.SEALED, (_W.SUBMITTER, _W.SWEEP), "every item is in the ledger"),
        (
            (_T.SPLITTING,),
            _T.RUNNING,
            _R.SPLIT_FAILED,
            (_W.SUBMITTER, _W.SWEEP),
            "the split failed; the rows that were written run on",
        ),
        ((_T.SPLITTING,), _T.REJECTED, _R.NOTHING_ACCEPTED, (_W.SUBMITTER, _W.SWEEP), "no item was accepted"),
        ((_T.PAUSED,), _T.REJECTED, _R.NOTHING_ACCEPTED, (_W.SUBMITTER, _W.SWEEP), "no item was accepted"),
        (
            (_T.SPLITTING, _T.PAUSED),
            _T.REJECTED,
            _R.ROWS_REJECTED,
            (_W.SUBMITTER, _W.SWEEP),
            "a row of a strict list was rejected, so no row of the list was accepted",
        ),
        ((_T.SPLITTING, _T.RUNNING), _T.PAUSED, _R.PAUSED, (_W.PERSON,), "no row starts until the Task is resumed"),
        (
            (_T.SPLITTING, _T.RUNNING),
            _T.PAUSED,
            _R.TOO_MANY_FAILURES,
            (_W.WORKER, _W.SWEEP),
            "more items failed than the Task tolerates; a person raises that limit, or retries the items",
        ),
        ((_T.PAUSED,), _T.SPLITTING, _R.RESUMED, (_W.PERSON,), "a person resumed the Task during its split"),
        ((_T.PAUSED,), _T.RUNNING, _R.RESUMED, (_W.PERSON,), "a person resumed the Task after its split"),
        (_ACTIVE, _T.CANCELLED, _R.CANCELLED, (_W.PERSON,), "no row starts; open rows become cancelled"),
        (
            (_T.RUNNING, _T.PAUSED),
            _T.FINALIZING,
            _R.CLOSED,
            (_W.WORKER, _W.SWEEP),
            "every row has ended; the callbacks are queued",
        ),
        (
            (_T.FINALIZING,),
            _T.FINISHED,
            _R.CALLED_BACK,
            (_W.WORKER, _W.SWEEP),
            "the callbacks have run, or there are none",
        ),
        ((_T.FINALIZING,), _T.FINISHED, _R.CALLBACK_FAILED, (_W.WORKER, _W.SWEEP), "a callback failed five times"),
        ((_T.FINISHED,), _T.FINALIZING, _R.CALLED_AGAIN, (_W.PERSON,), "the failed callbacks run again"),
        (
            (_T.RUNNING, _T.PAUSED, _T.FINISHED, _T.CANCELLED),
            _T.RUNNING,
            _R.RETRIED,
            (_W.PERSON,),
            "an explicit retry opened a new generation",
        ),
    ]
)

_EVENT_INDEX: Final = {(e.source, e.target, e.reason): e for e in EVENT_EDGES}
_TASK_INDEX: Final = {(e.source, e.target, e.reason): e for e in TASK_EDGES}


def check_event(source: str | None, target: str, reason: Reason) -> Edge:
    """The edge of an Event. Raises :class:`TransitionRefused` if there is none."""
    try:
        return _EVENT_INDEX[source, target, reason]
    except KeyError:
        raise TransitionRefused(f"an Event cannot go from {source or 'nothing'} to {target} ({reason})") from None


def check_task(source: str | None, target: str, reason: Reason) -> Edge:
    """The edge of a Task. Raises :class:`TransitionRefused` if there is none."""
    try:
        return _TASK_INDEX[source, target, reason]
    except KeyError:
        raise TransitionRefused(f"a Task cannot go from {source or 'nothing'} to {target} ({reason})") from None
