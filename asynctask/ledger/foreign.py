"""Foreign queues as holders of loans and claims: the jobs in an engine's broker, or in Redis for workers in other
languages.

The dispatcher borrows in its own name, pushes, and hands over (:func:`hand_over`). From then on the queue holds the jobs
(:func:`asynctask.ledger.lending.queue_holder`), until their workers begin them, which names those processes in the Events,
or record them. No event ends a loan of a queue: :func:`trim` checks for it. Maintenance compares the jobs that a queue
should hold (:func:`held_in_queues`) with the queue, and makes lost ones due again.

The limit of a Task (``parallel``, or its rounds) applies here, too: a dispatcher takes places in its own name before it
borrows (:func:`lease`), and hands them over with the jobs. So the places of the queue and of every dispatcher cover at
least the jobs that are on the way, in the queue, or with its workers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from asynctask.core.readiness import may_start
from asynctask.core.states import Status
from asynctask.core.transitions import Transition, at_once, interval_of, redispatch, watch
from asynctask.database import batches
from asynctask.database.retrying import TransactionConflict, repeatable
from asynctask.database.tables import events, loans, places, tasks
from asynctask.ledger.base import Ledger, chunks, lock_now
from asynctask.ledger.events import IN_LOAN, IS_OPEN, UNHELD, Change, EventRecord, Note, read_events
from asynctask.ledger.gates import holders
from asynctask.ledger.hints import in_session
from asynctask.ledger.lending import PLACES, PUSHER, change, has_places, queue_holder

_t, _e, _l, _p = tasks.c, events.c, loans.c, places.c


def _of_unbegun(which: Any) -> Any:
    return sa.select(which).where(*IN_LOAN, UNHELD).correlate(loans).scalar_subquery()


_OF_HOLDER: Final = sa.select(
    _l.id, _l.task_id, _l.low, _l.high, _of_unbegun(sa.func.min(_e.seq)), _of_unbegun(sa.func.max(_e.seq))
).where(_l.process == sa.bindparam("holder"))


def _held(found: Mapping[str, int], holder: str) -> int:
    """How many jobs of a Task are in a foreign queue or with its workers. ``found``: the Task's
    :func:`~asynctask.ledger.gates.holders`."""
    return sum(count for name, count in found.items() if name == holder or ("@" in name and not has_places(name)))


_WORKING: Final = (
    sa.select(_e.process, sa.func.count())
    .where(_e.process.in_(sa.bindparam("processes", expanding=True)), IS_OPEN, _e.due_at.is_(None))
    .group_by(_e.process)
)


def working(connection: Connection, processes: Collection[str]) -> dict[str, int]:
    """How many jobs each of these processes is known to run: only jobs that run long are recorded."""
    return {str(name): int(count) for name, count in connection.execute(_WORKING, {"processes": sorted(processes)})}


def engine_of(queue: str) -> str | None:
    """The engine to which a queue belongs (``celery/emails``); None for a queue of the own broker."""
    engine, slash, _ = queue.partition("/")
    return engine if slash else None


# -- dispatchers as holders


def pusher(identity: str) -> str:
    """The holder name for jobs that the dispatcher of a process has borrowed and not handed over, apart from the loans of
    the process itself, which may perform jobs."""
    return f"{identity}{PUSHER}"


def process_of(holder: str) -> str:
    """The process of a :func:`pusher`; any other holder unchanged."""
    return holder.removesuffix(PUSHER)


def pushers(connection: Connection) -> set[str]:
    """The dispatchers that hold loans, claims or places now. If one does so for longer than a push lasts, the answer to its
    borrow was lost."""
    named = [sa.select(column).where(column.like(f"%{PUSHER}")).distinct() for column in (_l.process, _e.process)]
    return {str(holder) for each in named for holder in connection.execute(each).scalars()}


def end_empty(ledger: Ledger, holder: str) -> None:
    """Ends the loans of a holder without a waiting job. Raises LedgerUnavailable."""
    with ledger.database.read() as connection:
        found = connection.execute(_OF_HOLDER, {"holder": holder}).all()
    if over := [int(row[0]) for row in found if row[4] is None]:
        _trim(ledger, holder, over, [])


# -- places


@repeatable
def lease(ledger: Ledger, holder: str, task_id: int, want: int) -> int:
    """Takes places of a Task with a limit for up to ``want`` jobs that this process is about to borrow for a foreign queue,
    besides those that it has borrowed and not handed over. ``want`` 0 returns unneeded places.

    Returns for how many jobs: 0 if no place is free, the Task may not start, or another transaction holds its row. Raises
    LedgerUnavailable.
    """
    with ledger.database.write() as connection:
        task = lock_now(connection, task_id)
        if task is None:
            return 0
        had = {str(process): int(n) for process, n in connection.execute(PLACES, {"of": task_id})}
        found = holders(connection, task_id, exactly=True)
        own, on_way = had.pop(ledger.identity, 0), found[ledger.identity]
        held = _settle_places(connection, holder, task_id, had.pop(holder, None), found)
        limit = at_once(task["parallel"], interval_of(task["interval_s"]))
        n = on_way
        is_open = set(filter(has_places, found)) <= {*had, ledger.identity}
        if limit is not None and is_open and may_start(task["state"], in_session(task)):
            n = max(on_way, min(on_way + want, limit - held - sum(had.values())))
        _set_places(connection, ledger.identity, task_id, own or None, n)
    return n - on_way


def _settle_places(connection: Connection, holder: str, task_id: int, had: int | None, found: Mapping[str, int]) -> int:
    """Sets the places of a queue, for a locked Task, to the number of jobs that it holds; returns them. Only under the
    Task's lock, and if no job was handed over since the read, so that there are never fewer places than jobs.
    """
    count = _held(found, holder)
    return count if _set_places(connection, holder, task_id, had, count) else max(count, had or 0)


def _set_places(connection: Connection, process: str, task_id: int, had: int | None, n: int) -> bool:
    if n == (had or 0):
        return True
    same = (_p.task_id == task_id) & (_p.process == process)
    if had is None:
        return _insert(connection, process, task_id, n)
    as_read = same & (_p.n == had)
    change = places.delete().where(as_read) if n == 0 else places.update().where(as_read).values(n=n)
    return connection.execute(change).rowcount == 1


def _insert(connection: Connection, process: str, task_id: int, n: int) -> bool:
    try:
        connection.execute(places.insert(), {"task_id": task_id, "process": process, "n": n})
    except exc.IntegrityError as error:
        raise TransactionConflict("another process has inserted these places") from error
    return True


# -- handing over, and the end of loans


@repeatable
def hand_over(
    ledger: Ledger, holder: str, loan_ids: Collection[int], event_ids: Collection[int], limited: Mapping[int, int]
) -> None:
    """Makes a foreign queue the holder of these loans and claims of this process, and of its places for them.

    ``limited``: the number of jobs of each Task with a limit. If this process dies before, recovery makes all these jobs
    due again under a new attempt. Raises LedgerUnavailable.
    """
    with ledger.database.write() as connection:
        if loan_ids:
            own = batches.among(connection, _l.id, sorted(loan_ids)) & (_l.process == ledger.identity)
            connection.execute(loans.update().where(own).values(process=holder))
        if event_ids:
            mine = batches.among(connection, _e.id, sorted(event_ids)) & (_e.process == ledger.identity)
            waits = _e.status == str(Status.ENQUEUE)
            connection.execute(events.update().where(mine, waits).values(process=holder))
        for task_id, count in sorted(limited.items()):
            of_task = _p.task_id == task_id
            if connection.execute(places.delete().where(of_task, _p.process == ledger.identity)).rowcount == 0:
                continue  # this process was declared dead; its jobs are due again
            more = places.update().where(of_task, _p.process == holder).values(n=_p.n + count)
            if connection.execute(more).rowcount == 0:
                _insert(connection, holder, task_id, count)


def trim(ledger: Ledger, holder: str) -> None:
    """Ends the loans of a foreign queue without a waiting job, cuts the others to their waiting jobs, and sets the places
    of Tasks with a limit to the number of jobs of the queue and its workers. Raises LedgerUnavailable."""
    with ledger.database.read() as connection:
        found = connection.execute(_OF_HOLDER, {"holder": holder}).all()
        had = {int(i): int(n) for i, n in connection.execute(sa.select(_p.task_id, _p.n).where(_p.process == holder))}
        lent_of = {int(task_id) for _, task_id, *_ in found}
        has_limit = sa.or_(_t.parallel.is_not(None), _t.interval_s > 0)
        limited = sa.select(_t.id).where(batches.among(connection, _t.id, sorted(lent_of - had.keys())), has_limit)
        new = [int(i) for i in connection.execute(limited).scalars()] if lent_of - had.keys() else []
        changed = [i for i in sorted({*had, *new}) if _held(holders(connection, i, exactly=True), holder) != had.get(i, 0)]
    over = [int(i) for i, _, _, _, first, _ in found if first is None]
    cut = [
        (int(i), int(first), int(last) + 1)
        for i, _, low, high, first, last in found
        if first is not None and (int(first), int(last) + 1) != (int(low), int(high))
    ]
    if over or cut:
        _trim(ledger, holder, over, cut)
    for task_id in changed:
        _count_places(ledger, holder, task_id)


@repeatable
def _trim(ledger: Ledger, holder: str, over: list[int], cut: list[tuple[int, int, int]]) -> None:
    with ledger.database.write() as connection:
        if over:
            ended = batches.among(connection, _l.id, over) & (_l.process == holder)
            connection.execute(loans.delete().where(ended))
        for i, low, high in cut:
            connection.execute(loans.update().where(_l.id == i, _l.process == holder).values(low=low, high=high))


@repeatable
def _count_places(ledger: Ledger, holder: str, task_id: int) -> None:
    with ledger.database.write() as connection:
        if lock_now(connection, task_id) is None:
            return
        had = connection.scalar(PLACES.with_only_columns(_p.n).where(_p.process == holder), {"of": task_id})
        found = holders(connection, task_id, exactly=True)
        _settle_places(connection, holder, task_id, None if had is None else int(had), found)


_RECALLED: Final = sa.select(_t.id, _t.state, _t.priority).where(_t.id.in_(sa.bindparam("ids", expanding=True)))


def changed_tasks(ledger: Ledger, pushed: Mapping[int, int | None]) -> list[int]:
    """Those of these Tasks that may no longer start jobs, or whose priority differs from the given one."""
    if not pushed:
        return []
    with ledger.database.read() as connection:
        found = connection.execute(_RECALLED, {"ids": sorted(pushed)}).all()
    return [
        int(i)
        for i, state, priority in found
        if not may_start(state) or (pushed[int(i)] is not None and priority != pushed[int(i)])
    ]


# -- lost copies: jobs that a queue should hold and that two searches did not find in it


def held_in_queues(connection: Connection, holder: str, limit: int = 10_000) -> list[EventRecord]:
    """Jobs, of Tasks or without one, that a foreign queue (:func:`asynctask.ledger.lending.queue_holder`) holds and that
    are not known to have begun, in the order of ids."""
    return _records(connection, holder, None, limit)


def _records(connection: Connection, holder: str, queues: Collection[str] | None, limit: int) -> list[EventRecord]:
    waits = (_e.status == str(Status.ENQUEUE)) & _e.due_at.is_(None)
    of_loans = sa.select(_e.id).join(loans, sa.and_(*IN_LOAN))
    of_loans = of_loans.where(_l.process == holder, waits, _e.process.is_(None))
    claimed = sa.select(_e.id).where(_e.process == holder, waits)
    if queues is not None:
        its = sa.select(_t.id).where(_t.queue.in_(sorted(queues)), _t.finished_at.is_(None))
        of_loans, claimed = of_loans.where(_l.task_id.in_(its)), claimed.where(_e.task_id.in_(its))
    found = {int(i) for each in (of_loans, claimed) for i in connection.execute(each.limit(limit)).scalars()}
    return [
        record
        for part in chunks(sorted(found)[:limit])
        for record in read_events(connection, batches.among(connection, _e.id, part))
    ]


def watch_in_flight(ledger: Ledger, queues: Collection[str]) -> None:
    """Marks the jobs of Tasks in these queues of an engine after one of its processes died, which may have held any of
    them.

    An engine does not report which jobs it held, and redelivers them by itself. The start of a marked job is recorded
    before it runs; otherwise a job that kills its process before its start is recorded would be redelivered for ever.
    """
    named = {queue_holder(engine_of(queue)) for queue in queues}
    with ledger.database.read() as connection:
        found = [record for holder in sorted(named) for record in _records(connection, holder, queues, 10_000)]

    def make(_: Connection, part: Sequence[int]) -> list[Change]:
        return [Change(event_id, lambda record: watch(record.row)) for event_id in part]

    for part in chunks([record.id for record in found if not record.row.watched]):
        change(ledger, partial(make, part=part))


def redispatch_lost(ledger: Ledger, lost: Sequence[tuple[int, int]]) -> list[Change]:
    """Makes rows (event id, attempt) due again whose copies were missing from the foreign queue in two checks."""
    attempts, note = dict(lost), Note("enqueue", ledger.catalogue("redispatched"))

    def decide(record: EventRecord) -> Transition | None:
        if record.row.attempt != attempts[record.id]:
            return None
        return redispatch(record.row, record.task_state, now=ledger.now())

    return change(ledger, lambda _: [Change(event_id, decide, notes=[note]) for event_id in attempts])
