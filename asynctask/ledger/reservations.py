"""Reservations: the next jobs of a Task to push. The dispatcher pushes them.

Reserve, commit, push, confirm: no lock is held during the push. A reservation has a lease; if the dispatcher dies before
the confirm, the next one pushes the same range again. That is harmless, because a broker holds one copy of each (job id,
attempt). Also here: jobs lent to a process, jobs without a Task, and small Tasks reserved or closed many at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import takewhile
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.clock import micros
from asynctask.core.states import OPEN, Reason, State, Status, check_task
from asynctask.core.transitions import (
    Delta,
    Row,
    Turn,
    at_once,
    cancel,
    give_back,
    in_flight,
    interval_of,
    is_lent,
    is_suspect,
    lead,
    lend,
    may_dispatch,
    next_round,
    release_due,
    room,
)
from asynctask.database import batches
from asynctask.database.retrying import TransactionConflict, repeatable
from asynctask.database.tables import events, task_log, tasks
from asynctask.ledger import dispatchable, sessions
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import MAX_ID, Ledger, dumps, each_free, loads, try_lock
from asynctask.ledger.events import (
    Change,
    EventRecord,
    Note,
    apply,
    has_begun,
    last_start,
    move_counts,
    read_events,
    total_counts,
)
from asynctask.ledger.leases import is_taken

PAGE: Final = 100
"""Tasks of a queue that one round reads."""

MOST_SMALL = 20
"""Jobs of the largest small Task: in a larger one, the cost of its jobs outweighs its own."""

MOST_LENT: Final = 100
"""Largest number of jobs lent for one place."""

MOST_OF_ROUND: Final = 10_000
"""Jobs of one round of a Task with an interval: they are reserved in one transaction."""

_t, _e = tasks.c, events.c

_FLYING = frozenset(str(status) for status in Status if in_flight(Row(status, reserved=True)))
_POINTED: Final = (
    _e.id,
    _e.job_id,
    _e.attempt,
    _e.retries,
    _e.worker_name,
    _e.queue,
    _e.params,
    _e.options,
    _e.created_at,
    _e.first_row,
    _e["items"],
    _e.status,
)
_IN_RANGE: Final = (
    _e.task_id == sa.bindparam("of"),
    _e.seq >= sa.bindparam("low"),
    _e.seq < sa.bindparam("high"),
)
_AT_POINTER = (
    sa.select(*_POINTED)
    .where(*_IN_RANGE, _e.due_at.is_(None))
    .where(_e.process.is_(None) | (_e.status != str(Status.ENQUEUE)))  # a lent job needs no copy
    .order_by(_e.seq, _e.id)
)
_OUT = (
    sa.select(_e.id)
    .where(_e.task_id == sa.bindparam("of"), _e.seq >= sa.bindparam("low"), _e.seq < sa.bindparam("high"))
    .where(_e.status == str(Status.ENQUEUE), _e.due_at.is_(None), _e.process.is_(None))
    .order_by(_e.seq)
    .limit(sa.bindparam("count"))
)

# Statements of every dispatch round are built once: building one costs as much as running it.
_FREE = _t.dispatch_by.is_(None) | (_t.dispatch_by == sa.bindparam("me")) | (_t.dispatch_until <= sa.bindparam("now"))
_HAS_ROUNDS = _t.interval_s > 0
_IS_SMALL = (
    (_t.next_seq == 0)
    & (_t.created_jobs <= MOST_SMALL)
    & _t.parallel.is_(None)
    & _t.session_key.is_(None)
    & (_t.interval_s <= 0)
    & _t.key_limit.is_(None)
)
_READY = (
    sa.select(_t.id, _t.queue, _t.ready, _IS_SMALL, _t.owner, _HAS_ROUNDS, _t.created_jobs - _t.next_seq)
    .with_hint(tasks, "FORCE INDEX (ix_tasks_ready)", "mariadb")  # otherwise it also reads the Tasks that are not ready
    .where(_t.queue == sa.bindparam("of"), _FREE)
    .order_by(_t.ready, _t.id)
    .limit(sa.bindparam("count"))
)
# The queue comes by a function, for SQLite: by its index, every Task that is ready would be read for the few in hand.
_IN_HAND = (
    sa.select(sa.func.min(_t.ready).label("ready"))
    .where(_t.dispatch_until > sa.bindparam("since"), _t.dispatch_by != sa.bindparam("me"))
    .where(sa.func.coalesce(_t.queue, "") == sa.bindparam("of"))
    .subquery()
)
_FIRST_READY = _READY.where(_t.ready.is_not(None)).subquery()
# One statement: a Task is either free, or in another's hand, at one moment.
_RUNNABLE = sa.union_all(
    sa.select(_FIRST_READY),
    sa.select(sa.null(), sa.null(), _IN_HAND.c.ready, *[sa.null()] * 4),
)
_RUNNABLE_AFTER = _READY.where(_t.ready == sa.bindparam("priority"), _t.id > sa.bindparam("after"))
_RUNNABLE_LOWER = _READY.where(_t.ready > sa.bindparam("priority"))
_NEWEST_READY = (
    sa.select(_t.id)
    .where(_t.queue == sa.bindparam("of"), _t.ready == sa.bindparam("priority"))
    .order_by(_t.id.desc())
    .limit(1)
)
_UNCONFIRMED = (
    sa.select(_t.id, _t.queue).where(_t.dispatch_until <= sa.bindparam("now"), _t.dispatch_by.is_not(None)).limit(1_000)
)
_UNCONFIRMED_OF = (
    sa.select(_t.id, _t.queue).where(_t.dispatch_until.is_not(None), _t.dispatch_by == sa.bindparam("late")).limit(1_000)
)
_DUE_OF_TASK = (
    sa.select(_e.id)
    .where(_e.task_id == sa.bindparam("of"), _e.due_at <= sa.bindparam("now"))
    .order_by(_e.due_at, _e.id)
    .limit(sa.bindparam("count"))
)
_QUEUE = sa.func.coalesce(_e.queue, "default")
# Longer options belong to a job that another program pushed, which has no priority.
_ALONE = (
    sa.select(_e.id, _QUEUE, sa.func.substr(_e.options, 1, 255))
    .where(_e.due_at <= sa.bindparam("now"), _e.task_id.is_(None))
    .where(_QUEUE.in_(sa.bindparam("queues", expanding=True)))
    .limit(sa.bindparam("count"))
)
_ALONE_DUE = _ALONE.order_by(_e.due_at, _e.id)
_ALONE_DUE_LAST = _ALONE.order_by(_e.due_at.desc(), _e.id.desc())
_CONFIRMED = (
    tasks.update()
    .where(_t.id.in_(sa.bindparam("ids", expanding=True)), _t.dispatch_by == sa.bindparam("me"))
    .values(reserved_from=None, dispatch_by=None, dispatch_until=None)
)
_STATES = sa.select(_t.id, _t.state, _t.priority).where(_t.id.in_(sa.bindparam("ids", expanding=True)))


@dataclass(frozen=True, slots=True)
class Runnable:
    """A Task that may start jobs now; the dispatcher shares the demand of a queue among these.

    ``small``: a candidate for :func:`reserve_small`; ``has_rounds``: it has an interval; ``left``: its jobs before the
    pointer, without those that are due again.
    """

    task_id: int
    queue: str
    priority: int
    small: bool = False
    owner: str = ""
    has_rounds: bool = False
    left: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """A job reserved for the broker. ``params`` and ``options``: JSON text as in the ledger; ``row``: its row in the list;
    ``items``: number of items; ``slots``: number of counter slots of its Task."""

    event_id: int
    job_id: str
    task_id: int | None
    attempt: int
    retries: int
    worker_name: str
    queue: str
    priority: int | None
    params: str | None
    options: str | None
    created_at: int
    row: int | None
    items: int
    slots: int


@dataclass(frozen=True, slots=True)
class Alone:
    """A job without a Task that is due."""

    event_id: int
    queue: str
    priority: int


def runnable(
    connection: Connection,
    ledger: Ledger,
    queues: Collection[str],
    limit: int = PAGE,
    *,
    after: Mapping[tuple[str, int], int] = MappingProxyType({}),
    since: int = MAX_ID,
    place: float = 0.0,
) -> tuple[list[Runnable], dict[str, int]]:
    """The first Tasks with jobs to dispatch in each of these queues, by priority, then in the order submitted; and, by
    queue, the smallest priority of a ready Task that another dispatcher has reserved under a lease that ends after
    ``since`` (microseconds).

    Reads at most ``limit`` per queue, and where these are all of them of one priority, as many that are ready at a larger
    one. Of the last priority for which there is no room for every Task, those after the id that ``after`` names for
    (queue, priority) come first, so that all have their turn; where it names none, those from ``place`` on, from 0 for the
    oldest to 1 for the newest, so that a thousand dispatchers do not all begin with the oldest. The index leaves out Tasks
    that cannot go now (``parallel`` is used up, another Task holds the session, paused); Tasks reserved by another
    dispatcher are skipped.
    """
    found: list[Runnable] = []
    in_hand: dict[str, int] = {}
    given = {"me": ledger.identity, "now": ledger.now(), "count": limit, "since": since}
    for queue in sorted(queues):
        here = {**given, "of": queue}

        def read(statement: Any, here: Mapping[str, Any] = here, **more: int) -> list[Any]:
            return [tuple(row) for row in connection.execute(statement, {**here, **more})]

        def read_first(queue: str = queue) -> list[Any]:
            rows = read(_RUNNABLE)
            in_hand.update((queue, int(at)) for task_id, _, at, *_ in rows if task_id is None and at is not None)
            return sorted((row for row in rows if row[0] is not None), key=lambda row: (row[2], row[0]))

        ready_there = page(
            limit,
            {priority: task_id for (name, priority), task_id in after.items() if name == queue},
            first=read_first,
            beyond=partial(read, _RUNNABLE_AFTER),
            lower=partial(read, _RUNNABLE_LOWER),
            newest=partial(read, _NEWEST_READY),
            place=place,
        )
        found += [
            Runnable(int(i), name, int(at), bool(small), owner, bool(rounds), int(left))
            for i, name, at, small, owner, rounds, left in ready_there
        ]
    return sorted(found, key=lambda each: each.priority), in_hand


def page(
    limit: int,
    served: Mapping[int, int],
    *,
    first: Callable[[], list[Any]],
    beyond: Callable[..., list[Any]],
    lower: Callable[..., list[Any]],
    newest: Callable[..., list[Any]],
    place: float,
) -> list[Any]:
    """The Tasks of one queue for :func:`runnable`, as rows that begin with id, queue, priority.

    ``served``: the Task of a priority that got jobs last. The queries: ``first``, the first ``limit`` by priority and id;
    ``beyond``, up to ``count`` of a ``priority`` with an id ``after`` another; ``lower``, those after a ``priority``;
    ``newest``, the last of a ``priority``.
    """
    found = first()
    if len(found) < limit:
        return found
    last = int(found[-1][2])
    if last in served or place > 0:
        firm = [row for row in found if row[2] != last]
        count, oldest = len(found) - len(firm), int(found[len(firm)][0])
        after = served[last] if last in served else oldest + int(place * (int(newest(priority=last)[0][0]) - oldest))
        # Those after the last one that was served, then from the first on.
        turned = beyond(priority=last, after=after, count=count)
        found = firm + (turned + [row for row in found if row[2] == last and row[0] <= after])[:count]
    return found + (lower(priority=last) if int(found[0][2]) == last else [])


def reserve(
    ledger: Ledger,
    task_id: int,
    wanted: int,
    *,
    lease_s: float,
    early: bool = True,
    expect: Callable[[int], None] = lambda at: None,
    in_hand: Callable[[int, int], None] = lambda priority, until: None,
) -> list[Ready]:
    """Reserves up to ``wanted`` jobs of a Task within its ``parallel``, due ones first.

    Of a Task with an interval it reserves a round: as many as ``parallel`` allows, though fewer are wanted. If the next
    round may not begin yet, it reserves none; in both cases ``expect`` gets the time of the next check (microseconds).
    ``early``: a round is reserved before its time (:func:`~asynctask.core.transitions.lead`), because its worker waits.
    None while another dispatcher's lease on an unconfirmed reservation runs (``in_hand`` gets the Task's priority and the
    end of the lease), or another transaction holds the Task's row.
    """
    reserved = _reserve(ledger, task_id, wanted, lease_s, early)
    if reserved.in_hand is not None:
        in_hand(*reserved.in_hand)
    if reserved.next_at is not None:
        expect(reserved.next_at)
    if reserved.blocked:
        dispatchable.wake(ledger, sessions.free(ledger, reserved.blocked))
    # The hint of a job that ended while the Task was locked may be lost.
    if reserved.full and _recheck_parallel(ledger, task_id):
        expect(ledger.now())
    if reserved.idle:
        sessions.step_aside(ledger, task_id)
    return reserved.jobs


@dataclass(slots=True)
class _Reserved:
    jobs: list[Ready]
    full: bool = False  # ``parallel`` is used up
    idle: bool = False  # holds its session, with nothing to reserve
    next_at: int | None = None  # when to check whether the next round may begin, or an earlier split has ended
    in_hand: tuple[int, int] | None = None  # the Task's priority, and until when another dispatcher has its reservation
    blocked: set[int] = field(default_factory=set)  # lines of which a job waits for its turn from now on


@repeatable
def _reserve(ledger: Ledger, task_id: int, wanted: int, lease_s: float, early: bool) -> _Reserved:
    with ledger.database.write() as connection:
        task = try_lock(connection, ledger, task_id)
        now = ledger.now()
        if task is None:
            return _Reserved([])
        if _held_by_another(ledger, task, now):
            return _Reserved([], in_hand=(int(task["priority"]), int(task["dispatch_until"])))
        if not may_dispatch(task["state"]) or not sessions.may(task):
            connection.execute(tasks.update().where(_t.id == task_id).values(ready=None))
            return _Reserved([])
        gate = None if task["key_limit"] is None else _gate(connection, ledger, task, now)
        if isinstance(gate, _Reserved):
            return gate
        interval = interval_of(task["interval_s"])
        ahead = lead(interval) if early else 0
        limit, flying = at_once(task["parallel"], interval), _flying(connection, task)
        count = room(task["state"], limit, flying, MOST_OF_ROUND if interval else wanted)
        opens = _round_opens(connection, task, interval, now) if interval and count > 0 else now
        if opens - ahead > now:
            count = 0
        due = sessions.next_due(connection, task_id) if gate is None else gate.due
        ids, blocked = [], set[int]()
        if count > 0 and due is not None and due <= now:
            ids = _release(connection, ledger, task, count, now, blocked)
        low, left = task["next_seq"], max(0, count) - len(ids)
        high, fresh, begun = _pass(connection, task, gate, left, len(ids), blocked)
        if ids or blocked:
            due = sessions.next_due(connection, task_id)
        found = _read_ready(connection, batches.among(connection, _e.id, ids)) if ids else []
        reserved = len(found)
        if high > low:
            move_counts(connection, {(task_id, ledger.slot(task["slots"])): Delta(dispatched=begun)}, now)
            found += fresh
            reserved += begun
        full = limit is not None and flying + reserved >= limit
        begins = max(opens, now)
        if interval and reserved:
            opens = begins + interval
        next_at = opens - ahead
        waits = next_at if next_at > now else None
        values = dispatchable.settled(task, left=high < task["created_jobs"], full=full, due=due, now=now, opens=waits)
        if found or high > low:
            values |= _advanced(ledger, task, low, high, now + micros(lease_s))
        values |= _noted_round(task, interval, reserved, begins, {"from": low, "to": high, "again": ids})
        connection.execute(tasks.update().where(_t.id == task_id).values(values))
    idle = task["session_holder"] is not None and not found and high >= task["created_jobs"]
    return _Reserved(found, full, idle, values["due_next"] if waits is not None else None, blocked=blocked)


# -- jobs with a key: only those whose turn it is are dispatched (:mod:`asynctask.ledger.sessions`)

_LEAST_PASSED: Final = 256
_MOST_PASSED: Final = 2_000
"""Rows that the pointer of a Task with keys passes in one reservation, if hardly any has its turn."""

_ASKS: Final = sa.case((_e.due_at.is_(None) & (_e.status == str(Status.ENQUEUE)), 1))
_PASSED = sa.select(_e.id, _e.seq, _ASKS, *sessions.ASKING).where(*_IN_RANGE).order_by(_e.seq)
_PASSED_WHOLE = sa.select(*_POINTED, _e.seq, _ASKS, *sessions.ASKING).where(*_IN_RANGE).order_by(_e.seq)


def _gate(connection: Connection, ledger: Ledger, task: Mapping[str, Any], now: int) -> sessions.Gate | _Reserved:
    """The gate of a Task with keys, which are locked then; or the result of one that may not dispatch now."""
    again = now + micros(dispatchable.RECHECK_S)
    if not sessions.lock_keys(connection, ledger):
        return _Reserved([], next_at=again)
    if not (gate := sessions.gate(connection, task)).waits:
        return gate
    connection.execute(tasks.update().where(_t.id == task["id"]).values(ready=None, due_next=again))
    return _Reserved([], next_at=again)


def _pass(
    connection: Connection,
    task: Mapping[str, Any],
    gate: sessions.Gate | None,
    count: int,
    released: int,
    blocked: set[int],
) -> tuple[int, list[Ready], int]:
    """How far the pointer of a locked Task goes for ``count`` jobs; and these, as :func:`_at_pointer`. Of a Task with keys,
    it passes those whose turn has not come, and they wait for it: ``blocked`` gets their lines.

    It does so for as many jobs as the Task has fewer than ``count`` that wait for a thread, with the ``released`` ones.
    Where there are enough, the turn of those at the pointer comes while these run, and to pass one costs four updates.
    """
    low = int(task["next_seq"])
    high = min(int(task["created_jobs"]), low + count)
    if gate is None:
        return high, *_at_pointer(connection, task, low, high)
    needed = count - gate.ahead - released
    if high <= low or (needed <= 0 and not gate.goes):
        return low, [], 0
    rows = batches.fetch_small(connection, _PASSED_WHOLE, {"of": task["id"], "low": low, "high": high}, lock=True)
    rows = sorted(rows, key=itemgetter(len(_POINTED)))
    asking = [sessions.Asking(int(row[0]), *row[-3:]) for row in rows if row[-4]]
    admitted = sessions.admit(connection, task, asking)
    going = list(takewhile(lambda row: row[0] in admitted, rows))
    fresh = _to_push(task, going)
    if len(going) == len(rows):
        return high, fresh, len(fresh)
    stop = rows[len(going)]
    at = int(stop[len(_POINTED)])
    if stop[-4] and needed <= len(going):
        return at, fresh, len(fresh)
    high = _pass_waiting(connection, task, at, count - len(going), needed - len(going), blocked)
    more, begun = _at_pointer(connection, task, at, high)
    return high, fresh + more, len(fresh) + begun


def _pass_waiting(
    connection: Connection, task: Mapping[str, Any], low: int, count: int, needed: int, blocked: set[int]
) -> int:
    """How far the pointer goes from ``low`` on, where a turn has not come."""
    high, created, most = low, int(task["created_jobs"]), low + max(count, _MOST_PASSED)
    while count > 0 and high < min(created, most):
        top = min(created, most, high + max(count, _LEAST_PASSED))
        given = {"of": task["id"], "low": high, "high": top}
        rows = batches.fetch_small(connection, _PASSED, given, lock=True)  # nobody starts or ends one of them meanwhile
        asking = [sessions.Asking(int(i), *rest) for i, _, asks, *rest in rows if asks]
        seqs, lines = {int(i): int(seq) for i, seq, *_ in rows}, {each.id: each.line for each in asking}
        admitted = sessions.admit(connection, task, asking)
        going = sorted(seqs[i] for i in admitted)
        if len(going) > count:
            top = going[count]
        enough = high if needed <= 0 else going[needed - 1] + 1 if needed <= len(going) else top
        waiting = sorted((seqs[i], i) for i in lines if i not in admitted and seqs[i] < top)
        stop = next((seq for seq, _ in waiting if seq >= enough), None)
        high = top if stop is None else stop
        waiting = [(seq, i) for seq, i in waiting if seq < high]
        sessions.block(connection, [i for _, i in waiting])
        blocked |= {line for _, i in waiting if (line := lines[i]) is not None}
        gone = sum(seq < high for seq in going)
        count, needed = count - gone, needed - gone
        if stop is not None:
            break
    return high


# -- rounds of a Task with an interval

_ROUND = sa.select(
    sa.func.max(_e.started_at),
    sa.func.count(
        sa.case(
            (sa.and_(_e.status == str(Status.ENQUEUE), _e.due_at.is_(None)), 1),
            (sa.and_(_e.status == str(Status.WORKING), _e.started_at.is_(None)), 1),  # a suspect, about to begin
        )
    ),
).where(_e.task_id == sa.bindparam("of"), _e.seq >= sa.bindparam("low"), _e.seq < sa.bindparam("high"))


def _round_opens(connection: Connection, task: Mapping[str, Any], interval: int, now: int) -> int:
    """When the next round of a locked Task may begin; reads the jobs of the last one only once its interval is over."""
    began = task["round_at"]
    first = next_round(began, None, 0, interval, now)
    if began is None or first - lead(interval) > now:
        return first
    jobs = loads(task["round_jobs"]) or {"from": 0, "to": 0, "again": []}
    low, high = jobs["from"], jobs["to"]
    started, unbegun = connection.execute(_ROUND, {"of": task["id"], "low": low, "high": high}).one()
    starts = [] if started is None else [int(started)]
    if jobs["again"]:
        for record in read_events(connection, batches.among(connection, _e.id, jobs["again"])):
            unbegun += record.row.status is Status.ENQUEUE and record.row.due_at is None
            unbegun += record.row.status is Status.WORKING and not has_begun(record)
            if (start := last_start(record)) is not None:
                starts.append(start)
    return next_round(began, max(starts, default=None), int(unbegun), interval, now)


def _noted_round(
    task: Mapping[str, Any], interval: int, reserved: int, begins: int, jobs: Mapping[str, Any]
) -> dict[str, Any]:
    """The columns of the round that a reservation began; those of a Task without an interval are cleared."""
    if interval and reserved:
        return {"round_at": begins, "round_jobs": dumps(jobs)}
    return {"round_at": None, "round_jobs": None} if not interval and task["round_at"] is not None else {}


@repeatable
def lend_jobs(ledger: Ledger, task_id: int, wanted: int, places: int) -> list[Ready]:
    """Lends this process up to ``wanted`` jobs of a Task with a ``parallel``, due ones first.

    The process performs them one after the other in ``places`` of its jobs of that Task that are in flight, so its share of
    the waiting jobs is at most ``places / parallel``. None while more jobs are in flight than ``parallel`` allows, of a
    Task with an interval or keys, or while another transaction holds the Task's row; and none if the failure of everything
    lent could take the Task over its ``tolerated_failures``, for a lent job begins without another look at its Task. A due
    suspect is not lent: it runs alone.
    """
    with ledger.database.write() as connection:
        task = try_lock(connection, ledger, task_id)
        if task is None or not task["parallel"] or not may_dispatch(task["state"]) or not sessions.may(task):
            return []
        left = task_rows.tolerated_left(connection, task)
        if (
            task["key_limit"] is not None
            or interval_of(task["interval_s"])
            or (left is not None and left < (MOST_LENT + 1) * task["parallel"])
        ):
            return []
        flying = _flying(connection, task)
        if flying > task["parallel"]:
            return []
        now, low = ledger.now(), task["next_seq"]
        waiting = connection.execute(_DUE_OF_TASK, {"of": task_id, "now": now, "count": wanted}).scalars().all()
        count = min(wanted, (len(waiting) + task["created_jobs"] - low) * places // task["parallel"])
        lent = _lend_due(connection, ledger, waiting[:count])
        found = _read_ready(connection, batches.among(connection, _e.id, lent)) if lent else []
        high = min(task["created_jobs"], low + count - len(lent))
        if high > low:
            fresh, begun = _at_pointer(connection, task, low, high)
            _lend_fresh(connection, ledger, fresh)
            move_counts(connection, {(task_id, ledger.slot(task["slots"])): Delta(dispatched=begun - len(fresh))}, now)
            found += fresh
        values: dict[str, Any] = {"next_seq": high}
        due = sessions.next_due(connection, task_id)
        if high == task["created_jobs"] and (due is None or due > now):
            # Else the hint stays: it may have been written for a job that ended just now.
            values |= dispatchable.settled(task, left=False, full=False, due=due, now=now)
        connection.execute(tasks.update().where(_t.id == task_id).values(values))
    return found


def _lend_due(connection: Connection, ledger: Ledger, event_ids: Sequence[int]) -> list[int]:
    def decide(record: EventRecord) -> Turn | None:
        row = record.row
        may = row.status is Status.ENQUEUE and row.process is None and not is_suspect(row)
        return lend(row, ledger.identity) if may else None

    applied = apply(connection, ledger, [Change(event_id, decide) for event_id in event_ids])
    return [each.event_id for each in applied if each.turn is not None]


def _lend_fresh(connection: Connection, ledger: Ledger, fresh: Sequence[Ready]) -> None:
    """Applies :func:`~asynctask.core.transitions.lend` to the locked rows at the pointer: only ``process`` changes, and no
    count."""
    rows = [
        {"b_id": each.event_id, "b_attempt": each.attempt, "b_status": str(Status.ENQUEUE), "v_process": ledger.identity}
        for each in fresh
    ]
    if batches.update(connection, events, ("id", "attempt", "status"), ("process",), rows) != len(rows):
        raise TransactionConflict("rows changed under their lock; the transaction is rolled back and tried again")


def take_back_loans(ledger: Ledger, known: Collection[int]) -> int:
    """Returns jobs lent to this process that it does not know (``known``: Event ids) to the ledger; returns their number.

    A loan is unknown if the answer to its transaction was lost.
    """
    with ledger.database.read() as connection:
        lent = read_events(connection, (_e.process == ledger.identity) & (_e.status == str(Status.ENQUEUE)))
    applied = _return_loans(ledger, [record.id for record in lent if record.id not in known])
    dispatchable.announce(ledger, applied)
    return len(applied)


@repeatable
def _return_loans(ledger: Ledger, event_ids: Sequence[int]) -> list[Change]:
    def decide(record: EventRecord) -> Turn | None:
        if not is_lent(record.row) or record.row.process != ledger.identity:
            return None
        return cancel(record.row) if record.task_state == State.CANCELLED else give_back(record.row, now=ledger.now())

    note = Note("cancelled", ledger.catalogue("cancelled"))
    with ledger.database.write() as connection:
        return apply(connection, ledger, [Change(event_id, decide, cancelled=note) for event_id in event_ids])


@repeatable
def _recheck_parallel(ledger: Ledger, task_id: int) -> bool:
    """Makes a Task ready again that has free places now; if it has rounds, the next reservation determines when the next
    may begin. Returns whether it did."""
    with ledger.database.read() as connection:
        task = task_rows.get(connection, task_id)
        flying, limit = _flying(connection, task), at_once(task["parallel"], interval_of(task["interval_s"]))
    if task["ready"] is not None or not room(task["state"], limit, flying, 1):
        return False
    with ledger.database.write() as connection:
        if try_lock(connection, ledger, task_id) is None:
            ledger.held.keep_hint(task_id, None)
            return False
        connection.execute(tasks.update().where(_t.id == task_id, dispatchable.MAY).values(ready=_t.priority))
    return True


def _flying(connection: Connection, task: Mapping[str, Any]) -> int:
    """Number of a Task's jobs in flight; 0 without a limit, which does not need it."""
    if task["parallel"] is None and task["interval_s"] <= 0:
        return 0
    counts = total_counts(connection, task["id"])
    return counts.dispatched - counts.returned


def _held_by_another(ledger: Ledger, task: Mapping[str, Any], now: int) -> bool:
    return is_taken(task["dispatch_by"], task["dispatch_until"], ledger.identity, now)


def _release(
    connection: Connection, ledger: Ledger, task: Mapping[str, Any], count: int, now: int, blocked: set[int]
) -> list[int]:
    given = {"of": task["id"], "now": now, "count": count}
    found, simple = [int(i) for (i,) in connection.execute(_DUE_OF_TASK, given)], list[int]()
    if task["key_limit"] is not None:
        asking = sessions.asking(connection, found)
        admitted = sessions.admit(connection, task, asking)
        sessions.block(connection, [each.id for each in asking if each.id not in admitted])
        blocked |= {each.line for each in asking if each.line is not None and each.id not in admitted}
        simple = _release_first(connection, ledger, task, [i for i in found if i in admitted], now)
        found = [i for i in found if i in admitted and i not in set(simple)]
    changes = [Change(event_id, _release_if_due(now)) for event_id in found]
    return simple + [each.event_id for each in apply(connection, ledger, changes) if each.turn is not None]


@cache
def _first(dialect: str) -> Any:
    is_first = (_e.status == str(Status.ENQUEUE)) & (_e.retries == 0) & _e.process.is_(None)
    due = (_e.due_at <= sa.bindparam("now")) & (_e.seq < sa.bindparam("next"))
    found = sa.select(_e.id).where(batches.among_given(dialect, _e.id, "ids"), is_first, due).order_by(_e.id)
    return found if dialect == "sqlite" else found.with_for_update()


@cache
def _released(dialect: str) -> Any:
    return events.update().where(batches.among_given(dialect, _e.id, "ids")).values(due_at=None)


def _release_first(
    connection: Connection, ledger: Ledger, task: Mapping[str, Any], event_ids: Sequence[int], now: int
) -> list[int]:
    """Applies :func:`~asynctask.core.transitions.release_due` to those of these Events that no retry made wait, such as
    those whose turn has come, in one statement: none changes a count but ``dispatched``."""
    if not event_ids:
        return []
    dialect = connection.dialect.name
    given = {"ids": batches.given(dialect, event_ids), "now": now, "next": task["next_seq"]}
    chosen = connection.execute(_first(dialect), given).scalars().all()
    if chosen:
        connection.execute(_released(dialect), {"ids": batches.given(dialect, chosen)})
        moved = {(task["id"], ledger.slot(task["slots"])): Delta(dispatched=len(chosen))}
        move_counts(connection, moved, now)
    return [int(i) for i in chosen]


def _release_if_due(now: int) -> Any:
    def decide(record: EventRecord) -> Any:
        row = record.row
        return release_due(row) if row.status is Status.ENQUEUE and row.due_at is not None and row.due_at <= now else None

    return decide


def _at_pointer(connection: Connection, task: Mapping[str, Any], low: int, high: int) -> tuple[list[Ready], int]:
    """The jobs of a range to push, and how many rows of it are in flight once the pointer is past them.

    The second may be larger: a row recorded as ``working`` before needs no copy, but it runs. The Task is locked; one
    statement locks and reads the rows without the Task.
    """
    if high <= low:
        return [], 0
    found = batches.fetch_small(connection, _AT_POINTER, {"of": task["id"], "low": low, "high": high}, lock=True)
    # The ids of a Task's Events ascend with ``seq``.
    flying = [each for each in sorted(found, key=itemgetter(0)) if each[-1] in _FLYING]
    return _to_push(task, flying), len(flying)


def _to_push(task: Mapping[str, Any], rows: Sequence[Sequence[Any]]) -> list[Ready]:
    """The jobs to push among rows of :data:`_POINTED`."""
    return [
        Ready(
            i, job_id, task["id"], attempt, retries, worker or task["worker_name"], queue or task["queue"] or "default",
            task["priority"], params, task["options"] if options is None else options, created_at, row, items,
            task["slots"],
        )
        for i, job_id, attempt, retries, worker, queue, params, options, created_at, row, items, status, *_ in rows
        if status == Status.ENQUEUE
    ]  # fmt: skip


def _advanced(ledger: Ledger, task: Mapping[str, Any], low: int, high: int, until: int) -> dict[str, Any]:
    reserved_from = task["reserved_from"]
    values: dict[str, Any] = {
        "next_seq": high,
        "reserved_from": low if reserved_from is None else min(low, reserved_from),
        "dispatch_by": ledger.identity,
        "dispatch_until": until,
    }
    if task["started_at"] is None:
        values["started_at"] = ledger.now()
    return values


def _read_ready(connection: Connection, condition: Any) -> list[Ready]:
    statement = (
        sa.select(
            _e.id, _e.job_id, _e.task_id, _e.attempt, _e.retries, sa.func.coalesce(_e.worker_name, _t.worker_name),
            sa.func.coalesce(_e.queue, _t.queue, "default"), _t.priority, _e.params,
            sa.func.coalesce(_e.options, _t.options), _e.created_at, _e.first_row, _e["items"],
            sa.func.coalesce(_t.slots, 1),
        )
        .select_from(events.outerjoin(tasks, _t.id == _e.task_id))
        .where(condition)
        .order_by(_e.seq, _e.id)
    )  # fmt: skip
    return [Ready(*each) for each in batches.fetch(connection, statement)]


@dataclass(frozen=True, slots=True)
class Confirmed:
    """``held``: Tasks whose rows another transaction holds; confirm them again. ``stopped``: Tasks paused, cancelled or of
    another priority since the reservation; take back their pushed copies."""

    held: list[int]
    stopped: list[int]


def confirm(
    ledger: Ledger, task_ids: Sequence[int], priorities: Mapping[int, int | None] = MappingProxyType({})
) -> Confirmed:
    """Confirms that everything this process reserved of these Tasks is in the broker. ``priorities``: of the Tasks when it
    was reserved, as far as it matters."""
    stopped: set[int] = set()

    def act(connection: Connection, free: list[int]) -> None:
        for task_id, state, priority in connection.execute(_STATES, {"ids": free}):
            reserved = priorities.get(task_id)
            if not may_dispatch(state) or (reserved is not None and priority != reserved):
                stopped.add(int(task_id))
        connection.execute(_CONFIRMED, {"ids": free, "me": ledger.identity})

    held = each_free(ledger, task_ids, act)
    return Confirmed(held, sorted(stopped))


def unconfirmed(connection: Connection, now: int, late: str | None = None) -> dict[int, str]:
    """Tasks whose dispatcher's lease expired between reserve and confirm, with their queues; also those of ``late``, a
    dispatcher that lost its leadership, whose leases may still run."""
    found = list(connection.execute(_UNCONFIRMED, {"now": now}))
    if late is not None:
        found += connection.execute(_UNCONFIRMED_OF, {"late": late})
    return {int(i): str(queue) for i, queue in found}


@repeatable
def take_again(
    ledger: Ledger, task_id: int, *, lease_s: float, late: str | None = None, limit: int = 10_000
) -> list[Ready] | None:
    """Takes over an unconfirmed reservation whose lease expired, or which belongs to ``late``; returns the jobs of its
    range, to be pushed again.

    None if it is not taken over: it is confirmed, another dispatcher has it, or another transaction holds the Task's row,
    and a later round retries.
    """
    with ledger.database.write() as connection:
        task = try_lock(connection, ledger, task_id)
        now = ledger.now()
        if task is None or task["dispatch_by"] is None:
            return None
        if task["dispatch_by"] != late and _held_by_another(ledger, task, now):
            return None
        connection.execute(
            tasks.update().where(_t.id == task_id).values(dispatch_by=ledger.identity, dispatch_until=now + micros(lease_s))
        )
        if task["reserved_from"] is None:
            return []
        high = min(task["next_seq"], task["reserved_from"] + limit)
        return _at_pointer(connection, task, task["reserved_from"], high)[0]


def out_before(ledger: Ledger, task_id: int, limit: int = 10_000) -> list[Ready]:
    """Jobs of a Task in flight before the range reserved at its pointer that are not known to have begun: an unconfirmed
    reservation may have released any of them, which were due. The broker knows which of them it holds."""
    with ledger.database.read() as connection:
        task = task_rows.get(connection, task_id)
        high = task["next_seq"] if task["reserved_from"] is None else task["reserved_from"]
        given = {"of": task_id, "low": task["low_seq"], "high": high, "count": limit}
        found = connection.execute(_OUT, given).scalars().all()
        return _read_ready(connection, batches.among(connection, _e.id, found)) if found else []


def alone_due(connection: Connection, now: int, queues: Collection[str], limit: int = 1_000) -> list[Alone]:
    """Jobs without a Task that are due in these queues, in the order of their due times.

    If more than ``limit`` are due, the first and the last ``limit``: an urgent job that came last is seen behind any number
    of others, without reading all of them.
    """
    if not queues:
        return []
    given = {"now": now, "queues": sorted(queues), "count": limit}
    found = connection.execute(_ALONE_DUE, given).all()
    if len(found) == limit:
        last = connection.execute(_ALONE_DUE_LAST, given).all()
        found = list(dict.fromkeys([*found, *reversed(last)]))
    return [Alone(int(i), name, options_priority(options)) for i, name, options in found]


def options_priority(options: str | None) -> int:
    """The priority in the options; 0 for an invalid one, which is reported when the copy is made."""
    try:
        return int((loads(options) or {}).get("priority") or 0)
    except (AttributeError, TypeError, ValueError, OverflowError):
        return 0


@repeatable
def reserve_alone(ledger: Ledger, event_ids: Sequence[int], *, look_again_s: float) -> list[Ready]:
    """Reserves these jobs without a Task, if they are still due.

    No pointer covers an Event without a Task: ``look_at`` is when to check for a copy lost before it began. Every later
    transition clears it.
    """
    with ledger.database.write() as connection:
        now = ledger.now()
        look_at = {"look_at": now + micros(look_again_s)}
        changes = [Change(event_id, _release_if_due(now), values=dict(look_at)) for event_id in event_ids]
        ids = [each.event_id for each in apply(connection, ledger, changes) if each.turn is not None]
        return _read_ready(connection, batches.among(connection, _e.id, ids)) if ids else []


# -- small Tasks, many per transaction
#
# One by one, a small Task costs as many statements and commits as a large one. Batched are only Tasks without limit,
# interval, session or due job whose pointer is at the first row; all others, and locked ones, are reserved and closed one
# by one.

MOST_CLOSED: Final = 100
"""Tasks of more jobs are closed one by one, to keep transactions short."""
AT_ONCE: Final = 200

_TO_RESERVE: Final = (
    "id", "state", "parallel", "interval_s", "session_key", "next_seq", "created_jobs", "reserved_from", "dispatch_by",
    "due_next", "worker_name", "queue", "priority", "options", "slots", "key_limit",
)  # fmt: skip
_TO_CLOSE: Final = (
    "id", "state", "generation", "generation_sealed", "closed_at", "turning", "session_key", "created_jobs",
    "callbacks",
)  # fmt: skip


@repeatable
def reserve_small(ledger: Ledger, task_ids: Collection[int], wanted: int, *, lease_s: float) -> dict[int, list[Ready]]:
    """Reserves all jobs of these Tasks, by id, up to ``wanted`` jobs; returns them by Task.

    Skips Tasks that are not small, not untouched, or locked by another transaction: :func:`reserve` handles them.
    """
    with ledger.database.write() as connection:
        chosen: dict[int, Any] = {}
        for row in _lock_columns(connection, _TO_RESERVE, task_ids):
            if _is_untouched(row) and row.created_jobs <= wanted:
                chosen[int(row.id)] = row
                wanted -= row.created_jobs
        found = _waiting_events(connection, list(chosen))
        by_task: dict[int, list[Any]] = defaultdict(list)
        for each in found:
            by_task[int(each[1])].append(each)
        # Skips a Task with a row recorded beyond ``enqueue`` before its dispatch: reserve() counts those that run.
        whole = {i: by_task[i] for i, row in chosen.items() if _all_wait(row, by_task[i])}
        if not whole:
            return {}
        now = ledger.now()
        connection.execute(
            _advance(connection.dialect.name),
            {
                "ids": batches.given(connection.dialect.name, list(whole)),
                "me": ledger.identity,
                "now": now,
                "until": now + micros(lease_s),
            },
        )
        moved = {(i, ledger.slot(chosen[i].slots)): Delta(dispatched=len(jobs)) for i, jobs in whole.items()}
        move_counts(connection, moved, now)
    return {i: [_ready(chosen[i], job) for job in jobs] for i, jobs in whole.items()}


def _is_untouched(task: Any) -> bool:
    return bool(
        may_dispatch(task.state)
        and task.parallel is None
        and task.interval_s <= 0
        and task.session_key is None
        and task.key_limit is None
        and task.next_seq == 0
        and 0 < task.created_jobs <= MOST_SMALL
        and task.reserved_from is None
        and task.dispatch_by is None
        and task.due_next is None
    )


def _all_wait(task: Any, found: Sequence[Any]) -> bool:
    return len(found) == task.created_jobs and all(each[-1] == Status.ENQUEUE for each in found)


def _ready(task: Any, job: Any) -> Ready:
    id_, _, _, job_id, attempt, retries, worker, queue, params, options, created_at, row, items, _ = job
    return Ready(
        id_, job_id, int(task.id), attempt, retries, worker or task.worker_name, queue or task.queue or "default",
        task.priority, params, task.options if options is None else options, created_at, row, items, task.slots,
    )  # fmt: skip


def _waiting_events(connection: Connection, task_ids: list[int]) -> list[Any]:
    if not task_ids:
        return []
    dialect = connection.dialect.name
    found = batches.fetch_small(connection, _select_waiting(dialect), {"ids": batches.given(dialect, task_ids)}, lock=True)
    return sorted(found, key=lambda each: (each[1], each[2]))


@cache
def _select_waiting(dialect: str) -> Any:
    return (
        sa.select(
            _e.id, _e.task_id, _e.seq, _e.job_id, _e.attempt, _e.retries, _e.worker_name, _e.queue, _e.params, _e.options,
            _e.created_at, _e.first_row, _e["items"], _e.status,
        )
        .where(batches.among_given(dialect, _e.task_id, "ids"), _e.due_at.is_(None))
        .order_by(_e.id)
    )  # fmt: skip


@cache
def _advance(dialect: str) -> Any:
    return (
        tasks.update()
        .where(batches.among_given(dialect, _t.id, "ids"))
        .values(
            next_seq=_t.created_jobs,
            reserved_from=0,
            dispatch_by=sa.bindparam("me"),
            dispatch_until=sa.bindparam("until"),
            started_at=sa.func.coalesce(_t.started_at, sa.bindparam("now")),
            ready=None,
        )
    )


def _lock_columns(connection: Connection, names: tuple[str, ...], task_ids: Collection[int]) -> Sequence[Any]:
    """Locks those of these Tasks whose rows are free, until the transaction ends; returns these columns."""
    if not task_ids:
        return []
    dialect = connection.dialect.name
    return connection.execute(_select_free(dialect, names), {"ids": batches.given(dialect, sorted(task_ids))}).all()


@cache
def _select_free(dialect: str, names: tuple[str, ...]) -> Any:
    found = sa.select(*(_t[name] for name in names)).where(batches.among_given(dialect, _t.id, "ids")).order_by(_t.id)
    return found if dialect == "sqlite" else found.with_for_update(skip_locked=True)


@repeatable
def close_small(ledger: Ledger, task_ids: Collection[int]) -> list[int]:
    """Closes those of these Tasks that run, have no session, no callbacks, few jobs, and no open row; returns their ids.

    ``task_ids``: found by :func:`asynctask.ledger.tasks.candidates`, so no item is open by the counts. No row of a locked
    Task can be opened again, so this transaction checks the rows. :func:`asynctask.ledger.tasks.try_close` handles the
    rest.
    """
    with ledger.database.write() as connection:
        found = {
            int(row.id): row for row in _lock_columns(connection, _TO_CLOSE, sorted(task_ids)[:AT_ONCE]) if _may_close(row)
        }
        if not found:
            return []
        dialect = connection.dialect.name
        open_ = connection.execute(_select_open(dialect), {"ids": batches.given(dialect, list(found))})
        for (task_id,) in open_.all():
            del found[int(task_id)]
        if not found:
            return []
        # They have no callbacks, so the step through finalizing ends in the same statement.
        check_task(State.RUNNING, State.FINALIZING, Reason.CLOSED)
        check_task(State.FINALIZING, State.FINISHED, Reason.CALLED_BACK)
        now = ledger.now()
        connection.execute(_close(dialect), {"ids": batches.given(dialect, list(found)), "now": now})
        entry = {"at": now, "who": "", "action": "closed"}
        logged = [{**entry, "task_id": i, "detail": dumps({"generation": row.generation})} for i, row in found.items()]
        connection.execute(_LOG, logged)
    for task_id in found:
        ledger.closed(task_id)
    return list(found)


def _may_close(task: Any) -> bool:
    return bool(
        task.state == State.RUNNING
        and task.generation_sealed
        and task.closed_at is None
        and task.turning is None
        and task.session_key is None
        and task.callbacks is None
        and task.created_jobs <= MOST_CLOSED
    )


@cache
def _select_open(dialect: str) -> Any:
    statuses = [str(status) for status in sorted(OPEN)]
    found = sa.select(_e.task_id).where(batches.among_given(dialect, _e.task_id, "ids"), _e.status.in_(statuses))
    return found.distinct()


@cache
def _close(dialect: str) -> Any:
    at: Any = sa.bindparam("now")
    return (
        tasks.update()
        .where(batches.among_given(dialect, _t.id, "ids"), _t.state == State.RUNNING)
        .values(
            state=State.FINISHED,
            version=_t.version + 2,
            updated_at=at,
            closed_at=at,
            finished_at=at,
            ready=None,
            due_next=None,
        )
    )


_LOG: Final = task_log.insert()
