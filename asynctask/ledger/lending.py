"""Lending: a process borrows a range of a Task's Events, or claims single ones, in one transaction, and holds them alone.

A **loan** is a range ``[low, high)`` of a Task's ``seq`` that a process holds (table ``loans``). A **claim** is the process
that an Event names. :mod:`asynctask.core.transitions` has their rules. A borrow locks the Task's row; it takes free loans,
the ranges that were given back, before the rows beyond the pointer ``tasks.next_seq``. Rows with a ``due_at`` are claimed:
retries, jobs that were recovered or given back one by one, jobs whose key is free again; so are jobs without a Task. Loans
of one Task never overlap. In a loan of a Task with keys, rows whose turn has not come get a ``due_at``, which removes them
from the loan.

A loan does not expire: it ends with its last outcome (:func:`end_loans`, in the outcome's transaction), is given back
(:func:`give_back`), or is recovered with its process (:func:`asynctask.ledger.processes.recover_events`). A foreign queue
can hold loans, too (:mod:`asynctask.ledger.foreign`).

The hints of a Task (:mod:`asynctask.core.readiness`) say whether it is worth a borrow. Writers of outcomes do not lock
Tasks: they settle the hints after their commit (:func:`announce`), and postpone those of a locked row
(:func:`catch_up`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.core import readiness
from asynctask.core.states import TERMINAL, State, Status
from asynctask.core.transitions import BLOCKED, Delta, Row, Transition, at_once, claim, interval_of
from asynctask.core.transitions import give_back as give_back_one
from asynctask.database import batches
from asynctask.database.notify import notify
from asynctask.database.retrying import TransactionConflict, repeatable
from asynctask.database.tables import events, loans, places, queues, tasks
from asynctask.errors import LedgerUnavailable
from asynctask.job import JobTask
from asynctask.ledger import gates, hints, history, rates, sessions
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, chunks, each_free, loads, lock_now
from asynctask.ledger.events import IN_LOAN, IS_OPEN, UNHELD, Change, EventRecord, Write, apply, move_counts
from asynctask.logs import get_logger

PAGE: Final = 100
"""Largest number of Tasks of a queue that one query reads."""

RECHECK_S: Final = 0.4
"""Seconds between two checks of the jobs that a process has borrowed. Below the half second after which no job begins
without a new check."""

_t, _e, _l, _p, _q = tasks.c, events.c, loans.c, places.c, queues.c

# -- which Tasks may start something


@dataclass(frozen=True, slots=True)
class Offer:
    """A Task that may start jobs now.

    ``limit``: how many of its jobs may run at once, None for any number; ``left``: its jobs beyond the pointer;
    ``is_plain``: a borrow at the pointer needs no check but the state, and with ``has_keys`` the keys; ``has_keys``: jobs
    of equal keys run one after the other; ``options`` (JSON text) and ``slots``: columns of the Task; ``rate``: its rate
    limit.
    """

    task_id: int
    queue: str
    priority: int
    worker_name: str
    title: str
    owner: str
    limit: int | None
    has_rounds: bool
    left: int
    is_plain: bool
    has_keys: bool
    options: str | None
    slots: int
    rate: str | None = None

    @property
    def begins_at_once(self) -> bool:
        """Whether its jobs count from their borrow on, so that none is borrowed ahead."""
        return self.has_rounds or self.rate is not None


MAY: Final = _t.state.in_([str(State.SPLITTING), str(State.RUNNING)]) & (
    _t.session_key.is_(None) | _t.session_holder.is_not(None)
)
_HAS_ROUNDS: Final = _t.interval_s > 0
_LIMIT: Final = sa.case((_HAS_ROUNDS & _t.parallel.is_(None), 1), else_=_t.parallel)
_TAKEN: Final = sa.select(sa.func.coalesce(sa.func.sum(_p.n), 0)).where(_p.task_id == _t.id).scalar_subquery()
_OWN_PLACES: Final = sa.exists().where(_p.task_id == _t.id, _p.process == sa.bindparam("me"))
_NOT_FULL: Final = sa.or_(_LIMIT.is_(None), _LIMIT > _TAKEN, _OWN_PLACES)
_HAS_FREE: Final = sa.exists().where(_l.task_id == _t.id, _l.process.is_(None))
_IS_DUE: Final = sa.func.coalesce(_t.due_next <= sa.bindparam("now"), sa.false())
_IS_PLAIN: Final = (
    _t.parallel.is_(None) & sa.not_(_HAS_ROUNDS) & _t.tolerated_failures.is_(None) & sa.not_(_HAS_FREE) & sa.not_(_IS_DUE)
    & rates.LIMIT_OF_TASK.is_(None)
)  # fmt: skip
_RUNS: Final = ~sa.exists().where(_q.name == sa.bindparam("of"), _q.paused > 0)
_OFFERED: Final = (
    _t.id, _t.queue, _t.priority, _t.worker_name, _t.title, _t.owner, _LIMIT, _HAS_ROUNDS, _t.created_jobs - _t.next_seq,
    _IS_PLAIN, _t.key_field.is_not(None), _t.options, _t.slots, rates.LIMIT_OF_TASK,
)  # fmt: skip


class _Queries(NamedTuple):
    """The queries of :func:`pick` for a queue: the first ready Tasks; those that are due; the ready ones after a Task of
    the same priority; the ready ones of larger priorities; the newest ready one of a priority."""

    ready: Any
    due: Any
    beyond: Any
    lower: Any
    newest: Any


@cache
def _queries(dialect: str, named: bool) -> _Queries:
    may = sa.and_(_t.queue == sa.bindparam("of"), _NOT_FULL, _RUNS, _t.worker_name.not_in(rates.CLOSED))
    if named:
        may = sa.and_(may, sa.or_(_t.worker_name == "*", batches.among_given(dialect, _t.worker_name, "names")))
    found = sa.select(*_OFFERED).where(may).limit(sa.bindparam("count"))
    # Without the hint MariaDB also reads the Tasks that are not ready.
    ready = found.with_hint(tasks, "FORCE INDEX (ix_tasks_ready)", "mariadb").order_by(_t.ready, _t.id)
    due = found.where(_t.due_next <= sa.bindparam("now"), _t.ready.is_(None), MAY).order_by(_t.priority, _t.id)
    same = _t.ready == sa.bindparam("priority")
    return _Queries(
        ready.where(_t.ready.is_not(None)),
        due,
        ready.where(same, _t.id > sa.bindparam("after")),
        ready.where(_t.ready > sa.bindparam("priority")),
        sa.select(_t.id).where(_t.queue == sa.bindparam("of"), same).order_by(_t.id.desc()).limit(1),
    )


def pick(
    connection: Connection,
    ledger: Ledger,
    names: Collection[str],
    *,
    workers: Collection[str] | None = None,
    limit: int = PAGE,
    after: Mapping[tuple[str, int], int] = MappingProxyType({}),
    share: float = 0.0,
) -> list[Offer]:
    """The first Tasks that may start jobs in each of the queues ``names``, by priority, then in the order submitted.

    ``workers``: only Tasks of these workers, and mixed ones; None: all. Reads at most ``limit`` Tasks per queue; if these
    all have one priority, also as many of larger ones. Where the last priority has more Tasks than fit, those after the id
    in ``after[queue, priority]`` come first, so that each Task gets its turn. Without such an id, the Tasks from ``share``
    of them on come first (0: the oldest, 1: the newest), so that a thousand processes do not all begin with the oldest.
    Leaves out Tasks of paused queues, Tasks whose places are taken, and those whose rate limit permits no start now.
    """
    dialect, found = connection.dialect.name, list[Offer]()
    given: dict[str, Any] = {"me": ledger.identity, "now": ledger.now(), "count": limit}
    if workers is not None:
        if not workers:
            return []
        given["names"] = batches.given(dialect, sorted(workers))
    queries = _queries(dialect, workers is not None)
    for name in sorted(names):
        here = {**given, "of": name}

        def read(statement: Any, here: Mapping[str, Any] = here, **more: Any) -> list[Any]:
            return [tuple(row) for row in connection.execute(statement, {**here, **more})]

        served = {priority: task_id for (queue, priority), task_id in after.items() if queue == name}
        rows = [*read(queries.due), *_page(read, queries, limit, served, share)]
        found += [Offer(int(i), *rest) for i, *rest in rows]
    return sorted(found, key=lambda each: each.priority)


def _page(
    read: Callable[..., list[Any]], queries: _Queries, limit: int, served: Mapping[int, int], share: float
) -> list[Any]:
    """The ready Tasks of one queue for :func:`pick`. ``served``: the Task of a priority that got jobs last."""
    found = read(queries.ready)
    if len(found) < limit:
        return found
    last = int(found[-1][2])
    if last in served or share > 0:
        firm = [row for row in found if row[2] != last]
        count, after = len(found) - len(firm), served.get(last)
        if after is None:
            oldest, newest = int(found[len(firm)][0]), int(read(queries.newest, priority=last)[0][0])
            after = oldest + int(share * (newest - oldest))
        # The Tasks after the last one served, then from the first on.
        turned = read(queries.beyond, priority=last, after=after, count=count)
        found = firm + (turned + [row for row in found if row[2] == last and row[0] <= after])[:count]
    return found + (read(queries.lower, priority=last) if int(found[0][2]) == last else [])


# -- borrow


@dataclass(frozen=True, slots=True)
class Job:
    """A job as the ledger lends it. ``params`` and ``options``: JSON text; ``row``: its row in the list; ``items``: number
    of items, 0 for an untracked job; ``slots``: number of counter slots of its Task; ``seq``: its number in the Task;
    ``line``: the line of its key; ``started_at``: when it first began (microseconds), if claimed; ``task``: if lent."""

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
    seq: int | None = None
    line: int | None = None
    started_at: int | None = None
    task: JobTask | None = None


@dataclass(frozen=True, slots=True)
class Loan:
    """A range of a Task that this process holds. ``asked``: when a user stopped one of its jobs (microseconds), else
    None."""

    id: int
    task_id: int
    low: int
    high: int
    asked: int | None = None


@dataclass(slots=True)
class Borrowed:
    """The result of a borrow: loans with their jobs, and claimed jobs. ``limit``: the Task's limit at the borrow, see
    :class:`Offer`; ``is_locked``: another transaction holds the Task's row, or that of one of its gates; ``next_at``: when
    the Task is worth the next borrow (microseconds), for example for its next round; None if that is not known; ``closed``:
    the rate limits that permit no more starts until then."""

    loans: list[tuple[Loan, list[Job]]] = field(default_factory=list)
    claimed: list[Job] = field(default_factory=list)
    limit: int | None = None
    is_locked: bool = False
    next_at: int | None = None
    closed: frozenset[str | None] = frozenset()

    @property
    def count(self) -> int:
        """The number of jobs."""
        return len(self.claimed) + sum(len(jobs) for _, jobs in self.loans)


_LENT: Final = (
    _e.id, _e.job_id, _e.attempt, _e.retries, _e.worker_name, _e.queue, _e.params, _e.options, _e.created_at, _e.first_row,
    _e["items"], _e.seq, _e.line,
)  # fmt: skip
_IN_RANGE: Final = (
    _e.task_id == sa.bindparam("of"),
    _e.seq >= sa.bindparam("low"),
    _e.seq < sa.bindparam("high"),
)
_RANGE: Final = sa.select(*_LENT).where(*_IN_RANGE, UNHELD).order_by(_e.seq)


@cache
def _due_of_task(dialect: str, named: bool) -> Any:
    found = sa.select(_e.id).where(_e.task_id == sa.bindparam("of"), _e.due_at <= sa.bindparam("now"))
    if named:
        found = found.where(sa.or_(_e.worker_name.is_(None), batches.among_given(dialect, _e.worker_name, "names")))
    return found.order_by(_e.due_at, _e.id).limit(sa.bindparam("count"))


_FREE_LOANS: Final = (
    sa.select(_l.id, _l.low, _l.high)
    .where(_l.task_id == sa.bindparam("of"), _l.process.is_(None))
    .order_by(_l.low)
    .limit(sa.bindparam("count"))
)
_MOST_FREE: Final = 100
"""Largest number of free loans that one borrow takes."""

# A borrow that does not reach the end of the list changes no hint, and is one statement. One that may reach it takes
# several: it reads the free loans after the lock, because a locking statement sees a newer row of the Task than of other
# tables.
_PLAIN: Final = (
    "id = :task_id AND state IN ('splitting', 'running') AND (session_key IS NULL OR session_holder IS NOT NULL)"
    " AND parallel IS NULL AND interval_s <= 0 AND tolerated_failures IS NULL"
    " AND next_seq + :count < created_jobs FOR UPDATE SKIP LOCKED"
)
_AT_POINTER_POSTGRESQL: Final = sa.text(
    "WITH t AS MATERIALIZED"  # noqa: S608
    f" (SELECT id, next_seq AS low, next_seq + :count AS high, context FROM tasks WHERE {_PLAIN}),"
    " u AS (UPDATE tasks SET next_seq = t.high, started_at = coalesce(tasks.started_at, :now) FROM t WHERE tasks.id = t.id)"
    " INSERT INTO loans (task_id, low, high, process, at) SELECT id, low, high, :me, :now FROM t"
    " RETURNING id, low, high, (SELECT context FROM t)"
)
# One packet: with a round trip for each step under the lock, a hundred processes would wait for the network.
_AT_POINTER_MARIADB: Final = sa.text(
    "BEGIN NOT ATOMIC DECLARE l BIGINT; DECLARE k BIGINT; DECLARE c LONGTEXT;"  # noqa: S608
    " DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;"
    f" START TRANSACTION; SELECT next_seq, context INTO l, c FROM tasks WHERE {_PLAIN};"
    " IF l IS NULL THEN ROLLBACK; SELECT 0, 0, 0, NULL FROM DUAL WHERE FALSE; ELSE"
    " UPDATE tasks SET next_seq = l + :count, started_at = COALESCE(started_at, :now) WHERE id = :task_id;"
    " INSERT INTO loans (task_id, low, high, process, at) VALUES (:task_id, l, l + :count, :me, :now);"
    " SET k = LAST_INSERT_ID(); COMMIT; SELECT k, l, l + :count, c; END IF; END"
)


def borrow(ledger: Ledger, offer: Offer, wanted: int, *, workers: Collection[str] | None = None) -> Borrowed:
    """Borrows up to ``wanted`` jobs of a Task for this process: due ones first, then free loans, then at the pointer.

    Of a Task with an interval it borrows the rest of the round, or begins the next round once that is due. Places keep
    limits (:func:`lease_places`). ``workers``: of a mixed Task, due jobs of these workers only, so that deferred jobs of
    other workers do not block them; None: all. Raises LedgerUnavailable; the next check gives back jobs that were borrowed
    but never arrived here.
    """
    if wanted <= 0:
        return Borrowed()
    lent: list[tuple[Loan, list[Job]]] = []
    if (
        offer.is_plain
        and offer.left > wanted
        and not ledger.database.is_sqlite
        and (not offer.has_keys or sessions.goes(ledger, offer.task_id, offer.worker_name))
    ):
        found, context = _borrow_at_pointer(ledger, offer.task_id, wanted)
        if offer.has_keys:
            _have_wait(ledger, found)
        lent = [_read_range(ledger, offer, loan, context) for loan in found]
        count = sum(len(jobs) for _, jobs in lent)
        if not offer.has_keys or not lent or count * 2 > wanted:
            return Borrowed(lent)
        wanted -= count  # most of this range waits for other jobs: later ones may be ready
    names = sorted(workers) if workers is not None and offer.worker_name == "*" else None
    done = _borrow(ledger, offer, wanted, names)
    if done is None:
        return Borrowed(lent, is_locked=True)
    if offer.has_keys and done.free:
        _have_wait(ledger, done.free)
    hints.settle_free(ledger, sessions.free(ledger, done.blocked))
    if done.is_idle:
        sessions.step_aside(ledger, offer.task_id)
    done.result.loans = lent + [_read_range(ledger, offer, loan, done.task["context"]) for loan in done.loans]
    done.result.claimed = read_jobs(ledger, done.claimed) if done.claimed else []
    return done.result


def _borrow_at_pointer(ledger: Ledger, task_id: int, count: int) -> tuple[list[Loan], str | None]:
    """Borrows in one round trip; also returns the context of the Task. A retry after a lost answer borrows another range;
    the next check gives back the first one, which this process does not know."""
    statement = _AT_POINTER_POSTGRESQL if ledger.database.dialect == "postgresql" else _AT_POINTER_MARIADB
    given = {"task_id": task_id, "count": count, "me": ledger.identity, "now": ledger.now()}
    with ledger.database.write_alone() as connection:
        found: Sequence[Any] = connection.execute(statement, given).all()
    return [Loan(int(i), task_id, int(low), int(high)) for i, low, high, _ in found], found[0][3] if found else None


def _have_wait(ledger: Ledger, lent: Sequence[Loan]) -> None:
    """Makes jobs of these loans wait whose turn has not come, which removes them from the loans."""
    blocked = sessions.block_lent(ledger, [(loan.task_id, loan.low, loan.high) for loan in lent])
    hints.settle_free(ledger, sessions.free(ledger, blocked))


@repeatable
def _borrow(ledger: Ledger, offer: Offer, wanted: int, names: Sequence[str] | None) -> _Borrow | None:
    """None if another transaction holds the Task's row."""
    with ledger.database.write() as connection:
        task = lock_now(connection, offer.task_id)
        if task is None:
            return None
        step = _Borrow(connection, ledger, task, names, offer.rate)
        step.run(wanted)
    return step


class _Borrow:
    """A borrow from a locked Task, in one transaction. ``names``: only due jobs of these workers; None: all; ``rate``: the
    name of its rate limit, None without one.

    ``loans`` and ``claimed``: what it lends; ``free``: those of ``loans`` that were free loans before; ``left``: how many
    more jobs may be lent; ``blocked``: lines of the jobs that it made wait for their turn; ``is_idle``: the Task holds its
    session, and has nothing to lend.
    """

    def __init__(
        self, connection: Connection, ledger: Ledger, task: dict[str, Any], names: Sequence[str] | None, rate: str | None
    ) -> None:
        self.connection, self.ledger, self.task, self.names = connection, ledger, task, names
        self.now = ledger.now()
        asked = (connection, task, self.now)
        self.order = gates.OrderGate(*asked)
        self.gates: list[gates.BorrowGate] = [
            gates.StateGate(*asked), self.order, gates.RoundGate(*asked), gates.FailureGate(*asked),
            rates.RateGate(*asked, name=rate),
        ]  # fmt: skip
        self.loans: list[Loan] = []
        self.free: list[Loan] = []
        self.claimed: list[int] = []
        self.blocked: set[int] = set()
        self.left = 0
        self.is_idle = False
        self.result = Borrowed(limit=at_once(task["parallel"], interval_of(task["interval_s"])))

    def run(self, wanted: int) -> None:
        """Asks the gates, lends what they permit, and settles the hints."""
        connection, task, permitted = self.connection, self.task, wanted
        for gate in self.gates:
            permitted = gate.permits(permitted) if permitted > 0 else 0
        self.left, values = permitted, dict[str, Any]()
        if permitted > 0:
            self._lend()
            lent = gates.Lent(permitted - self.left, [(each.low, each.high) for each in self.loans], self.claimed)
            for gate in self.gates:
                values |= gate.take(lent)
        task |= values
        own = max((gate.opens or 0 for gate in self.gates if gate.name is None), default=0)
        found = hints.settle(connection, self.ledger, task, not_before=own, **values)
        closed = {gate.name: gate.opens for gate in self.gates if gate.name is not None and gate.opens is not None}
        self.result.closed = frozenset(closed)
        self.result.next_at = max(closed.values(), default=found.due_next)
        self.result.is_locked |= any(gate.is_locked for gate in self.gates)
        has_none = not (self.loans or self.claimed or found.ready is not None)
        self.is_idle = task["session_holder"] is not None and has_none and permitted > 0

    def _lend(self) -> None:
        gate = self.order.turns
        self._claim_due(gate)
        if self.left > 0:
            self._take_free()
        if self.left <= 0:
            return
        if gate is not None:
            self._pass(gate)
            return
        low = self.task["next_seq"]
        high = min(self.task["created_jobs"], low + self.left)
        if high > low:
            self._lend_at_pointer(high, high - low)

    def _claim_due(self, gate: sessions.KeysGate | None) -> None:
        dialect = self.connection.dialect.name
        given: dict[str, Any] = {"of": self.task["id"], "now": self.now, "count": self.left}
        if self.names is not None:
            given["names"] = batches.given(dialect, self.names)
        due = [int(i) for (i,) in self.connection.execute(_due_of_task(dialect, self.names is not None), given)]
        if gate is not None and due:
            turns = sessions.turns(sessions.asking(self.connection, due), gate.before)
            sessions.postpone(self.connection, turns.wait, BLOCKED)
            sessions.postpone(self.connection, turns.early, self.now + gates.SOON)
            self.blocked |= set(turns.wait.values())
            due = [i for i in due if i in turns.go]
        self.claimed = _claim(self.connection, self.ledger, due, _e.due_at <= self.now)
        self.result.is_locked |= len(self.claimed) < len(due)
        self.left -= len(self.claimed)

    def _take_free(self) -> None:
        """Takes free loans; cuts the last one if it is larger than ``left``."""
        found = self.connection.execute(_FREE_LOANS, {"of": self.task["id"], "count": _MOST_FREE}).all()
        for i, low, high in found:
            cut = min(int(high), int(low) + self.left)
            own = loans.update().where(_l.id == i, _l.process.is_(None))
            if cut < high:
                if self.connection.execute(own.values(low=cut)).rowcount == 1:
                    self.free.append(self._insert_loan(int(low), cut))
            elif self.connection.execute(own.values(process=self.ledger.identity, at=self.now, asked=None)).rowcount == 1:
                self.free.append(Loan(int(i), self.task["id"], int(low), cut))
            self.left -= cut - int(low)
            if self.left <= 0:
                break
        self.loans += self.free

    def _pass(self, gate: sessions.KeysGate) -> None:
        """Moves the pointer of a Task with keys past up to ``left`` jobs whose turn has come, and lends that range; the
        other rows in it are made to wait, which removes them from the loan.

        It passes rows that have to wait only while too few jobs may go. If enough may go, the turn of the rows at the
        pointer comes while those run; and each row that is made to wait costs four updates.
        """
        low, created, count = int(self.task["next_seq"]), int(self.task["created_jobs"]), self.left
        if low >= created or ((self.claimed or self.free) and not gate.goes):
            return
        going, high = 0, low
        most = min(created, low + max(count, _MOST_PASSED))
        while going < count and high < most:
            top = min(most, high + max(count - going, _LEAST_PASSED))
            rows, turns = sessions.read_turns(self.connection, self.task["id"], high, top, lock=True)
            wait = list[int]()
            for seq, i in rows:
                if going == count:
                    top = seq
                    break
                if i in turns.go:
                    going += 1
                elif i in turns.wait:
                    wait.append(int(i))
            sessions.postpone(self.connection, wait, BLOCKED)
            self.blocked |= {turns.wait[i] for i in wait}
            high = top
        self._lend_at_pointer(high, going)

    def _lend_at_pointer(self, high: int, count: int) -> None:
        """Moves the pointer to ``high``, and lends the range that it passes if ``count`` of its jobs are to be
        performed."""
        if count:
            self.loans.append(self._insert_loan(self.task["next_seq"], high))
            self.left -= count
        self.task["next_seq"] = high
        self.connection.execute(tasks.update().where(_t.id == self.task["id"]).values(next_seq=high))

    def _insert_loan(self, low: int, high: int) -> Loan:
        task_id = self.task["id"]
        values = {"task_id": task_id, "low": low, "high": high, "process": self.ledger.identity, "at": self.now}
        key = self.connection.execute(loans.insert(), values).inserted_primary_key
        assert key is not None
        return Loan(int(key[0]), task_id, low, high)


_LEAST_PASSED: Final = 256
"""Smallest number of rows read at once to find jobs whose turn has come. Below :data:`_MOST_PASSED`."""

_MOST_PASSED: Final = 2_000
"""Most rows that the pointer of a Task with keys passes in one borrow, unless more jobs are wanted."""


# -- small Tasks, many per transaction: alone, each would cost as many statements and commits as a large one

_SMALL_JOBS: Final = 20
"""Most jobs of a small Task, which is borrowed whole. Far fewer than a process borrows for :data:`RECHECK_S`."""


def is_small(offer: Offer) -> bool:
    """Whether a Task may be borrowed whole, together with others."""
    return offer.is_plain and not offer.has_keys and 0 < offer.left <= _SMALL_JOBS and offer.worker_name != "*"


def borrow_small(ledger: Ledger, offers: Sequence[Offer]) -> dict[int, Borrowed]:
    """Borrows all jobs of these small Tasks; returns what was borrowed, by Task id. Leaves out Tasks that have changed
    since their offer, which :func:`borrow` handles. Raises LedgerUnavailable."""
    lent, contexts = _borrow_small(ledger, [offer.task_id for offer in offers])
    if not lent:
        return {}
    jobs: dict[int, list[Job]] = {loan.id: [] for loan in lent}
    by_id = {each.task_id: each for each in offers}
    of = {i: JobTask(i, each.title, each.owner, each.worker_name, contexts.get(i)) for i, each in by_id.items()}
    with ledger.database.read() as connection:
        for loan_id, task_id, *row in _OF_LOANS.fetch(connection, sorted(jobs)):
            jobs[loan_id].append(_job(by_id[task_id], of[task_id], row))
    return {loan.task_id: Borrowed([(loan, sorted(jobs[loan.id], key=lambda job: job.event_id))]) for loan in lent}


@repeatable
def _borrow_small(ledger: Ledger, task_ids: Sequence[int]) -> tuple[list[Loan], dict[int, str | None]]:
    now = ledger.now()
    with ledger.database.write() as connection:
        free: Sequence[Any] = _SMALL.execute(connection, sorted(task_ids)).all()
        found = {int(i): (int(low), int(high)) for i, low, high, _ in free}
        if found:  # after the lock, as in a borrow that reaches the end of the list
            for task_id in _WITH_FREE.execute(connection, list(found)).scalars().all():
                del found[int(task_id)]
        if not found:
            return [], {}
        own = {"process": ledger.identity, "at": now}
        rows = [{"task_id": i, "low": low, "high": high, **own} for i, (low, high) in found.items()]
        connection.execute(loans.insert(), rows)
        made: Sequence[Any] = _MADE.execute(connection, list(found), me=ledger.identity).all()
        hints.all_lent(connection, list(found), now)
    lent = [Loan(int(i), int(of), int(low), int(high)) for i, of, low, high in made if found[of] == (low, high)]
    return lent, {int(i): context for i, *_, context in free}


_SMALL: Final = batches.ByValues(
    _t.id,
    lambda its: sa.select(_t.id, _t.next_seq, _t.created_jobs, _t.context)
    .where(
        its, MAY, _t.session_key.is_(None), _t.parallel.is_(None), sa.not_(_HAS_ROUNDS), _t.tolerated_failures.is_(None),
        _t.due_next.is_(None), _t.round_at.is_(None), _t.next_seq < _t.created_jobs,
        _t.created_jobs - _t.next_seq <= _SMALL_JOBS,
    )
    .order_by(_t.id),
    skip_locked=True,
)  # fmt: skip
_WITH_FREE: Final = batches.ByValues(
    _l.task_id, lambda its: sa.select(_l.task_id).where(its, _l.process.is_(None)).distinct()
)
_MADE: Final = batches.ByValues(
    _l.task_id, lambda its: sa.select(_l.id, _l.task_id, _l.low, _l.high).where(its, _l.process == sa.bindparam("me"))
)
_OF_LOANS: Final = batches.ByValues(
    _l.id,
    lambda its: (
        sa.select(_l.id, _e.task_id, *_LENT).select_from(loans.join(events, IN_LOAN[0])).where(its, *IN_LOAN, UNHELD)
    ),
)


def _read_range(ledger: Ledger, offer: Offer, loan: Loan, context: str | None) -> tuple[Loan, list[Job]]:
    """The jobs of a loan, read after its commit: from then on no other process writes them. ``context``: of the Task."""
    task = JobTask(offer.task_id, offer.title, offer.owner, offer.worker_name, context)
    with ledger.database.read() as connection:
        found = batches.fetch_small(connection, _RANGE, {"of": loan.task_id, "low": loan.low, "high": loan.high})
    # The ids of a Task's Events ascend with ``seq``.
    return loan, sorted((_job(offer, task, row) for row in found), key=lambda job: job.event_id)


def _job(offer: Offer, task: JobTask, row: Sequence[Any]) -> Job:
    """The job in a row of the columns :data:`_LENT`."""
    i, job_id, attempt, retries, worker, queue, params, options, created_at, first_row, items, seq, line = row
    return Job(
        i, job_id, offer.task_id, attempt, retries, worker or offer.worker_name, queue or offer.queue, offer.priority,
        params, options or offer.options, created_at, first_row, items, offer.slots, seq, line, task=task,
    )  # fmt: skip


def read_jobs(ledger: Ledger, event_ids: Sequence[int]) -> list[Job]:
    """Reads these jobs, as far as this process has claimed them, in the order of ``seq``."""
    statement = (
        sa.select(
            _e.id, _e.job_id, _e.task_id, _e.attempt, _e.retries, sa.func.coalesce(_e.worker_name, _t.worker_name),
            sa.func.coalesce(_e.queue, _t.queue, "default"), _t.priority, _e.params,
            sa.func.coalesce(_e.options, _t.options), _e.created_at, _e.first_row, _e["items"],
            sa.func.coalesce(_t.slots, 1), _e.seq, _e.line, _e.started_at,
        )
        .select_from(events.outerjoin(tasks, _t.id == _e.task_id))
        .order_by(_e.seq, _e.id)
    )  # fmt: skip
    with ledger.database.read() as connection:
        found = statement.where(batches.among(connection, _e.id, event_ids), _e.process == ledger.identity)
        return [Job(*each) for each in batches.fetch(connection, found)]


# -- claims

_CLAIMABLE: Final = (
    _e.id, _e.task_id, _e.attempt, _e.due_at, _e.retries, _e["items"], _e.n_finish, _e.n_failed, _e.n_error, _e.n_cancelled,
    sa.func.coalesce(_t.slots, 1),
)  # fmt: skip
_WAITS: Final = (_e.status == str(Status.ENQUEUE)) & _e.process.is_(None)
_TO_CLAIM: Final = batches.ByValues(
    _e.id, lambda its: sa.select(_e.id).where(its, _WAITS).order_by(_e.id), skip_locked=True
)
_CLAIM: Final = batches.ByValues(
    _e.id, lambda its: events.update().where(its, _WAITS).values(process=sa.bindparam("me"), due_at=None)
)


def _claim(connection: Connection, ledger: Ledger, event_ids: Sequence[int], where: Any = None) -> list[int]:
    """Applies :func:`~asynctask.core.transitions.claim` to those of these Events that wait and are not locked; returns
    their ids. One UPDATE serves all: a claim changes only ``process`` and ``due_at``, and of the counts only
    ``retrying``."""
    if not event_ids:
        return []
    free = _TO_CLAIM.execute(connection, event_ids).scalars().all()
    if not free:
        return []
    found = sa.select(*_CLAIMABLE).select_from(events.outerjoin(tasks, _t.id == _e.task_id))
    chosen = batches.among(connection, _e.id, free)
    rows = connection.execute(found.where(chosen if where is None else chosen & where).order_by(_e.id)).all()
    moved: dict[tuple[int, int], Delta] = {}
    for _, task_id, attempt, due_at, retries, items, *done, slots in rows:
        transition = claim(Row(Status.ENQUEUE, attempt, due_at, retries, 0, True, items, *done), ledger.identity)
        if task_id is not None and due_at is not None:
            moved.setdefault((task_id, ledger.slot(slots)), Delta()).add(transition.delta)
    ids = [int(row[0]) for row in rows]
    if ids:
        if _CLAIM.execute(connection, ids, me=ledger.identity).rowcount != len(ids):
            raise TransactionConflict("rows changed under their lock; the transaction is rolled back and tried again")
        move_counts(connection, moved, ledger.now())
    return ids


# -- jobs without a Task

_QUEUE: Final = sa.func.coalesce(_e.queue, "default")


@cache
def _alone(dialect: str, named: bool) -> tuple[Any, Any]:
    # Options without a priority in their first 255 characters are those of a foreign job, which has none.
    found = (
        sa.select(_e.id, _QUEUE, sa.func.substr(_e.options, 1, 255))
        .where(_e.task_id.is_(None), _e.due_at <= sa.bindparam("now"), _QUEUE.in_(sa.bindparam("queues", expanding=True)))
        .limit(sa.bindparam("count"))
    )
    found = found.where(batches.among_given(dialect, _e.worker_name, "names") if named else _e["items"] > 0)
    return found.order_by(_e.due_at, _e.id), found.order_by(_e.due_at.desc(), _e.id.desc())


@dataclass(frozen=True, slots=True)
class Alone:
    """A job without a Task that is due."""

    event_id: int
    queue: str
    priority: int


def alone_due(
    connection: Connection, now: int, names: Collection[str], *, workers: Collection[str] | None = None, limit: int = 1_000
) -> list[Alone]:
    """Jobs without a Task that are due in these queues, in the order of their due times. ``workers``: only jobs of these;
    None: tracked jobs of any worker, for a foreign queue, to which untracked jobs are never pushed.

    If more than ``limit`` are due, returns the first and the last ``limit``: so an urgent job that arrived last is found
    behind any number of others, without reading all of them.
    """
    if not names or (workers is not None and not workers):
        return []
    dialect = connection.dialect.name
    given: dict[str, Any] = {"now": now, "queues": sorted(names), "count": limit}
    if workers is not None:
        given["names"] = batches.given(dialect, sorted(workers))
    first, last = _alone(dialect, workers is not None)
    found = connection.execute(first, given).all()
    if len(found) == limit:
        found = list(dict.fromkeys([*found, *reversed(connection.execute(last, given).all())]))
    return [Alone(int(i), name, options_priority(options)) for i, name, options in found]


_PRIORITY_FIRST: Final = re.compile(r'\{"priority":(-?[0-9]{1,10})[,}]')


def options_priority(options: str | None) -> int:
    """The priority in a job's options, or in their beginning, if that contains it; 0 for an invalid one, which is reported
    when the job is made."""
    if options is not None and (first := _PRIORITY_FIRST.match(options)) is not None:
        return int(first[1])
    try:
        return int((loads(options) or {}).get("priority") or 0)
    except (AttributeError, TypeError, ValueError, OverflowError):
        return 0


def claim_alone(ledger: Ledger, event_ids: Sequence[int]) -> list[Job]:
    """Claims those of these jobs without a Task that are due and that no other process is claiming. Raises
    LedgerUnavailable."""
    claimed = _claim_due(ledger, event_ids)
    return read_jobs(ledger, claimed) if claimed else []


@repeatable
def _claim_due(ledger: Ledger, event_ids: Sequence[int]) -> list[int]:
    with ledger.database.write() as connection:
        return _claim(connection, ledger, event_ids, _e.due_at <= ledger.now())


def next_due(connection: Connection, now: int) -> int | None:
    """When, after ``now``, the next job that waits in the ledger is due, or the next rate limit opens."""
    of_tasks = sa.select(_t.due_next).where(_t.due_next > now).order_by(_t.due_next).limit(1)
    alone = sa.select(_e.due_at).where(_e.task_id.is_(None), _e.due_at > now).order_by(_e.due_at).limit(1)
    found = sa.select(of_tasks.scalar_subquery(), alone.scalar_subquery(), rates.NEXT_OPENING)
    times = connection.execute(found, {"now": now}).one()
    return min((int(at) for at in times if at is not None), default=None)


_FIRST: Final = sa.select(
    sa.select(sa.literal(0))
    .select_from(tasks)
    .with_hint(tasks, "FORCE INDEX (ix_tasks_ready)", "mariadb")
    .where(_t.queue.in_(sa.bindparam("queues", expanding=True)), _t.ready.is_not(None))
    .limit(1)
    .scalar_subquery(),
    sa.select(_t.due_next).where(_t.due_next.is_not(None)).order_by(_t.due_next).limit(1).scalar_subquery(),
    sa.select(_e.due_at).where(_e.task_id.is_(None), _e.due_at.is_not(None)).order_by(_e.due_at).limit(1).scalar_subquery(),
)


def first_due(connection: Connection, names: Collection[str]) -> int | None:
    """When a job may be borrowed or claimed at the earliest; 0 if a Task of these queues is ready, None if no job waits.
    One statement: it is all that an idle process queries."""
    found = connection.execute(_FIRST, {"queues": sorted(names)}).one()
    return min((int(at) for at in found if at is not None), default=None)


# -- the end of a loan

_END: Final = batches.ByValues(_l.id, lambda its: loans.delete().where(its, _l.process == sa.bindparam("me")))


def end_loans(connection: Connection, ledger: Ledger, ids: Collection[int]) -> None:
    """Deletes loans of this process whose jobs have all ended, in the transaction of their last outcomes."""
    if ids:
        _END.execute(connection, sorted(ids), me=ledger.identity)


@repeatable
def end_empty(ledger: Ledger, ids: Collection[int]) -> None:
    """The same, for loans without a job to perform."""
    with ledger.database.write() as connection:
        end_loans(connection, ledger, ids)


def give_back(ledger: Ledger, parts: Sequence[tuple[Loan, int]]) -> list[bool]:
    """Gives back the end of each of these loans: the jobs from a ``seq`` on, which this process has not begun. They become
    free loans, which the next borrow takes; no Event is written. Notifies other processes.

    Returns for each loan whether this process still held it: a process that was declared dead must not free jobs that
    recovery has made due. Raises LedgerUnavailable.
    """
    given = _give_back(ledger, parts)
    hints.settle_free(ledger, {loan.task_id for loan, _ in parts})
    return [given[n] for n in range(len(parts))]


@repeatable
def _give_back(ledger: Ledger, parts: Sequence[tuple[Loan, int]]) -> dict[int, bool]:
    given = dict[int, bool]()
    with ledger.database.write() as connection:
        now = ledger.now()
        for n, (loan, seq) in sorted(enumerate(parts), key=lambda part: part[1][0].id):
            own = loans.update().where(_l.id == loan.id, _l.process == ledger.identity, _l.high == loan.high)
            if seq <= loan.low:
                had = connection.execute(own.values(process=None, asked=None)).rowcount == 1
            elif had := connection.execute(own.values(high=seq)).rowcount == 1:
                connection.execute(
                    loans.insert(), {"task_id": loan.task_id, "low": seq, "high": loan.high, "process": None, "at": now}
                )
            else:  # an earlier attempt may have cut the loan, and its answer was lost
                cut = sa.select(_l.id).where(_l.id == loan.id, _l.process == ledger.identity, _l.high == seq)
                had = connection.execute(cut).first() is not None
            given[n] = had
        notify(connection)
    return given


def unclaim(ledger: Ledger, claims: Mapping[int, int]) -> None:
    """Gives back claimed Events (id -> attempt) that nobody will begin: the answer to their claim was lost, or their copies
    were removed from a foreign queue. The same attempt without a ``due_at`` still has the same holder. Raises
    LedgerUnavailable."""

    def decide(record: EventRecord) -> Transition | None:
        row = record.row
        if row.attempt != claims[record.id] or row.status is not Status.ENQUEUE or row.due_at is not None:
            return None
        return give_back_one(row, record.task_state, now=ledger.now())

    change(ledger, lambda connection: [Change(event_id, decide) for event_id in sorted(claims)])


@repeatable
def leave(ledger: Ledger) -> set[int]:
    """Frees every loan and place of this process, which ends normally; its claimed jobs were given back before. Returns the
    ids of the Tasks."""
    with ledger.database.write() as connection:
        own = _l.process == ledger.identity
        found = {int(i) for (i,) in connection.execute(sa.select(_l.task_id).where(own).distinct())}
        connection.execute(loans.update().where(own).values(process=None, asked=None))
        connection.execute(places.delete().where(_p.process == ledger.identity))
        if found:
            notify(connection)
    hints.settle_free(ledger, found)
    return found


class Holding(Protocol):
    """The right by which a process holds a job: its loan, or its claim."""

    def ended(self) -> None:
        """Notes that the job has ended for this process: it is recorded, or given back alone."""
        ...

    def ending(self, count: int) -> int | None:
        """The loan's id if it ends with ``count`` more of its jobs, whose transaction is about to be committed; else
        None."""
        ...


def ending(held: Iterable[Holding | None]) -> list[int]:
    """The ids of the loans that end with one job for each entry, in a transaction that is about to be committed."""
    ends = Counter(each for each in held if each is not None)
    return [loan_id for each, count in ends.items() if (loan_id := each.ending(count)) is not None]


# -- the periodic check of the jobs that a process holds


@dataclass(frozen=True, slots=True)
class HeldTask:
    """The values of a Task that decide whether jobs of it that a process holds may begin. ``places``: those of this
    process, None if it has none; ``is_paused``: the Task's queue is paused; ``knobs``: priority, ``parallel`` and
    interval."""

    state: str
    in_session: bool
    priority: int
    limit: int | None
    places: int | None
    is_paused: bool
    knobs: tuple[float | None, ...]


_HELD_LOANS: Final = sa.select(_l.id, _l.task_id, _l.low, _l.high, _l.asked).where(_l.process == sa.bindparam("me"))
_HELD_CLAIMS: Final = sa.select(_e.id, _e.attempt, _e.status, _e.stopping).where(_e.process == sa.bindparam("me"), IS_OPEN)
_HELD_TASKS: Final = batches.ByValues(
    _t.id,
    sa.select(
        _t.id, _t.state, _t.session_key.is_(None) | _t.session_holder.is_not(None), _t.priority, _LIMIT, _p.n,
        _q.name.is_not(None), _t.parallel, _t.interval_s,
    )
    .select_from(
        tasks.outerjoin(places, (_p.task_id == _t.id) & (_p.process == sa.bindparam("me")))
        .outerjoin(queues, (_q.name == _t.queue) & (_q.paused > 0))
    ).where,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """The result of :func:`check`. ``claims``: the claimed Events that have not begun by the ledger (id -> attempt);
    ``stopping``: those of them that a user stopped; ``working``: the Events that have begun, as (id, attempt)."""

    loans: Mapping[int, Loan]
    claims: Mapping[int, int]
    stopping: frozenset[int]
    working: frozenset[tuple[int, int]]
    tasks: Mapping[int, HeldTask]
    paused: frozenset[str]


def check(ledger: Ledger, task_ids: Collection[int]) -> Check:
    """Reads this process's loans and claims, these Tasks and those of its loans, and the paused queues. Raises
    LedgerUnavailable."""
    with ledger.database.read() as connection:
        held = {int(row[0]): Loan(*row) for row in connection.execute(_HELD_LOANS, {"me": ledger.identity})}
        named = connection.execute(_HELD_CLAIMS, {"me": ledger.identity}).all()
        ids = sorted({*task_ids, *(each.task_id for each in held.values())})
        rows: Sequence[Any] = _HELD_TASKS.execute(connection, ids, me=ledger.identity).all() if ids else ()
        paused = paused_queues(connection)
    found = {
        int(i): HeldTask(state, bool(session), priority, limit, n, bool(is_paused), (priority, parallel, interval_s))
        for i, state, session, priority, limit, n, is_paused, parallel, interval_s in rows
    }
    claims = {int(i): int(attempt) for i, attempt, status, _ in named if status == Status.ENQUEUE}
    stopping_ = frozenset(int(i) for i, _, status, asked in named if asked and status == Status.ENQUEUE)
    working = frozenset((int(i), int(attempt)) for i, attempt, status, _ in named if status != Status.ENQUEUE)
    return Check(held, claims, stopping_, working, found, paused)


def stopping(ledger: Ledger, event_ids: Collection[int]) -> set[int]:
    """Those of these Events that a user stopped. Raises LedgerUnavailable."""
    with ledger.database.read() as connection:
        chosen = batches.among(connection, _e.id, list(event_ids)) & (_e.stopping > 0)
        return {int(i) for i in connection.execute(sa.select(_e.id).where(chosen)).scalars()}


@repeatable
def acknowledge_stops(ledger: Ledger, held: Collection[Loan]) -> None:
    """Acknowledges that this process has stopped the jobs that users stopped in these loans before the loans were read."""
    with ledger.database.write() as connection:
        for each in held:
            same = (_l.id == each.id) & (_l.process == ledger.identity) & (_l.asked == each.asked)
            connection.execute(loans.update().where(same).values(asked=None))


def ask(connection: Connection, ledger: Ledger, task_id: int, seq: int) -> bool:
    """If a process holds the loan of a row of a locked Task, notes there that a user stopped it; whether one does."""
    held = loans.update().where(_l.task_id == task_id, _l.process.is_not(None), _l.low <= seq, _l.high > seq)
    return bool(connection.execute(held.values(asked=ledger.now())).rowcount)


def lent_ranges(connection: Connection, task_id: int) -> list[tuple[int, int]]:
    """The ranges of a locked Task that processes hold."""
    found = sa.select(_l.low, _l.high).where(_l.task_id == task_id, _l.process.is_not(None))
    return [(int(low), int(high)) for low, high in connection.execute(found)]


def is_lent(ranges: Iterable[tuple[int, int]], seq: int | None) -> bool:
    """Whether a row lies in one of these ranges. A row without a Task counts as lent: an engine holds it."""
    return seq is None or any(low <= seq < high for low, high in ranges)


# -- places: how many jobs of a Task with a limit a process may run at once


class PlacesLease(NamedTuple):
    """The result of :func:`lease_places`. ``places``: those of this process, None for a Task without a limit;
    ``is_locked``: another transaction holds the Task's row, and nothing was changed."""

    places: int | None
    is_locked: bool = False


@repeatable
def lease_places(ledger: Ledger, task_id: int, want: int, running: int, *, holds: bool = True) -> PlacesLease:
    """Sets this process's places of a Task to ``want``, as far as they are free, but at least to ``running``: the number of
    the Task's jobs that run here now or may begin before the answer.

    ``holds``: this process holds jobs of the Task. It then gets a row even with 0 places, which states that it knows the
    limit: no process gets a place before all holders know it. Raises LedgerUnavailable.
    """
    with ledger.database.write() as connection:
        task = lock_now(connection, task_id)
        if task is None:
            return PlacesLease(0, is_locked=True)
        rows = {str(process): int(n) for process, n in connection.execute(PLACES, {"of": task_id})}
        own = rows.pop(ledger.identity, None)
        limit = at_once(task["parallel"], interval_of(task["interval_s"]))
        may = readiness.may_start(task["state"], hints.in_session(task))
        n: int | None = None
        if limit is not None:
            is_open = set(filter(has_places, gates.holders(connection, task_id))) <= {*rows, ledger.identity}
            n = readiness.granted(want if may else 0, running, limit, sum(rows.values()), is_open=is_open)
            n = n if n or holds else None
        mine = (_p.task_id == task_id) & (_p.process == ledger.identity)
        if n is None:
            connection.execute(places.delete().where(mine))
        elif own is None:
            connection.execute(places.insert(), {"task_id": task_id, "process": ledger.identity, "n": n})
        elif n != own:
            connection.execute(places.update().where(mine).values(n=n))
        if (n or 0) < (own or 0):
            notify(connection)
    return PlacesLease(None if limit is None else n or 0)


PLACES: Final = sa.select(_p.process, _p.n).where(_p.task_id == sa.bindparam("of"))


# -- foreign queues as holders

QUEUE_HOLDER: Final = "queue/"
AFTER_QUEUE_HOLDERS: Final = "queue0"
"""Holder names of foreign queues begin with QUEUE_HOLDER and sort before AFTER_QUEUE_HOLDERS, so an index finds them."""


def queue_holder(engine: str | None) -> str:
    """The holder name for jobs in the queues of an engine; None: in Redis, for workers in other languages."""
    return f"{QUEUE_HOLDER}{engine or 'redis'}"


def is_queue_holder(holder: str) -> bool:
    """Whether a holder is a foreign queue, not a process."""
    return holder.startswith(QUEUE_HOLDER)


PUSHER: Final = "+d"
"""Suffix of the holder names of dispatchers (:func:`asynctask.ledger.foreign.pusher`)."""


def has_places(holder: str) -> bool:
    """Whether a holder of jobs has places of its own: a worker process or a dispatcher has; the processes of an engine use
    the places of their queue."""
    return not is_queue_holder(holder) and ("@" not in holder or holder.endswith(PUSHER))


# -- paused queues


def paused_queues(connection: Connection) -> frozenset[str]:
    """The queues that people paused in the ledger."""
    return frozenset(str(name) for name in connection.execute(sa.select(_q.name).where(_q.paused > 0)).scalars())


# -- after the commit of outcomes


def announce(ledger: Ledger, applied: Collection[Write]) -> int | None:
    """Settles hints, lines of keys and sessions after changes of Events; call it after their commit.

    Returns when the first of their jobs is due (microseconds; if past, now), None if none is. Does not wait for locked
    rows of Tasks.
    """
    due: list[int] = []
    waits: set[int] = set()
    ended: set[int] = set()
    lines: set[int] = set()
    for each in applied:
        if each.transition is None or each.record is None:
            continue
        record, after = each.record, each.transition.after
        if record.line is not None and after.status in TERMINAL:
            lines.add(record.line)
        if after.due_at is not None:
            due.append(after.due_at)
        if record.task_id is None:
            continue
        if after.due_at is not None:
            waits.add(record.task_id)
        else:
            ended.add(record.task_id)
    try:
        woken = sessions.free(ledger, lines) if lines else set()
        _announce(ledger, waits | woken, ended)
    except LedgerUnavailable as error:  # the changes are committed; maintenance restores the hints
        get_logger("asynctask.ready").warning("announce_put_off", error=str(error))
        return None
    return min([*due, *([0] if woken else [])], default=None)


def change(ledger: Ledger, make: Callable[[Connection], Sequence[Change]]) -> list[Change]:
    """Writes the changes that ``make`` returns, in a transaction of their own; then counts and announces them.

    ``make`` is called again if the transaction is repeated. Raises LedgerUnavailable.
    """
    applied = _change(ledger, make)
    history.count(ledger, applied)
    announce(ledger, applied)
    return applied


@repeatable
def _change(ledger: Ledger, make: Callable[[Connection], Sequence[Change]]) -> list[Change]:
    with ledger.database.write() as connection:
        return apply(connection, ledger, make(connection))


_WATCHED: Final = sa.select(
    _t.id, _t.interval_s, _t.session_holder, _t.tolerated_failures, _t.generation_sealed, _t.next_seq, _t.created_jobs
).where(_t.id.in_(sa.bindparam("ids", expanding=True)))


def _announce(ledger: Ledger, waits: set[int], ended: set[int]) -> None:
    """``waits``: Tasks with rows that now wait with a ``due_at``; ``ended``: Tasks with rows that ended or began."""
    rounds, holders = set[int](), list[int]()
    if both := sorted(waits | ended):
        with ledger.database.read() as connection:
            found = [row for part in chunks(both) for row in connection.execute(_WATCHED, {"ids": part})]
        if tolerant := [int(row.id) for row in found if row.tolerated_failures is not None]:
            task_rows.pause_failing(ledger, tolerant)
        # The interval to the next round counts from the start of the last job of this round.
        rounds = {int(row.id) for row in found if row.interval_s > 0}
        holders = [
            int(row.id)
            for row in found
            if row.session_holder is not None and row.generation_sealed and row.next_seq >= row.created_jobs
        ]
    hints.settle_free(ledger, waits | rounds)
    for task_id in holders:
        sessions.step_aside(ledger, task_id)


def catch_up(ledger: Ledger) -> None:
    """Retries the hints and promotions that this process postponed because a Task's row was locked. Raises
    LedgerUnavailable."""
    kept, keys = ledger.held.take()
    try:
        hints.settle_free(ledger, kept)
        for key in keys:
            sessions.promote_alone(ledger, key)
    except LedgerUnavailable:
        ledger.held.keep_hints(kept)
        for key in keys:
            ledger.held.keep_session(key)
        raise


def rejoin(ledger: Ledger) -> int:
    """Returns Tasks with something to start that stopped waiting for their session (their retry is due, or an
    error kept them out), as the last. Returns their number."""
    now = ledger.now()
    with ledger.database.read() as connection:
        found = [int(i) for i in connection.execute(sessions.ASIDE.limit(1_000), {"now": now}).scalars()]
    each_free(ledger, found, lambda connection, free: sessions.join_again(connection, ledger, free, now))
    return len(found)
