"""Lending: a process borrows a range of a Task's Events, or claims single ones, in one transaction. Nobody else has them.

A **loan** is a range ``[low, high)`` of a Task's ``seq`` that a process holds (``loans``), a **claim** the process that an
Event names; :mod:`asynctask.core.transitions` has their rules. What lies beyond the pointer ``tasks.next_seq`` is borrowed
under the lock of the Task's row, and what was given back, a free loan, before it. Claimed are rows with a ``due_at``
(retries, what was recovered or given back one by one, jobs whose key has come free), and jobs without a Task. Loans of one
Task never overlap. Of a loan of a Task with keys, those rows whose turn it is not wait with a ``due_at``, which takes them
out of it.

A loan has no clock: it ends with its last outcome (:func:`end_loans`, in the outcome's transaction), is given back
(:func:`give_back`), or is recovered with its process (:func:`asynctask.ledger.processes.recover_events`). A foreign queue
is a holder, too (:mod:`asynctask.ledger.foreign`).

The hints of a Task (:mod:`asynctask.core.readiness`) say whether it is worth a borrow. Writers of outcomes do not lock
Tasks: they have the hints settled after their commit (:func:`announce`), and keep those of a locked row for later
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
from asynctask.core.readiness import Hints
from asynctask.core.states import TERMINAL, State, Status
from asynctask.core.transitions import BLOCKED, Delta, Row, Transition, at_once, claim, interval_of
from asynctask.core.transitions import give_back as give_back_one
from asynctask.database import batches
from asynctask.database.notify import notify
from asynctask.database.retrying import TransactionConflict, repeatable
from asynctask.database.tables import events, loans, places, queues, tasks
from asynctask.errors import LedgerUnavailable
from asynctask.ledger import hints, sessions
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, chunks, dumps, each_free, loads, lock_now
from asynctask.ledger.events import IN_LOAN, IS_OPEN, UNHELD, Change, EventRecord, Write, apply, move_counts
from asynctask.logs import get_logger

PAGE: Final = 100
"""Tasks of a queue that one query reads."""

MOST_OF_ROUND: Final = 10_000
"""Jobs of one round of a Task with an interval: they are lent in one transaction."""

RECHECK_S: Final = 0.4
"""Seconds between two checks of what a process has borrowed. Below half a second: no job begins by an older one."""

_t, _e, _l, _p, _q = tasks.c, events.c, loans.c, places.c, queues.c

# -- which Tasks may start something


@dataclass(frozen=True, slots=True)
class Offer:
    """A Task that may start jobs now.

    ``limit``: how many of its jobs may run at once, None for any number; ``left``: its jobs beyond the pointer;
    ``is_plain``: a borrow at the pointer needs no other check than its state, and that of ``has_keys``: jobs of equal keys
    run one after the other; ``options`` (JSON text) and ``slots`` are the Task's columns.
    """

    task_id: int
    queue: str
    priority: int
    worker_name: str
    owner: str
    limit: int | None
    has_rounds: bool
    left: int
    is_plain: bool
    has_keys: bool
    options: str | None
    slots: int


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
)
_RUNS: Final = ~sa.exists().where(_q.name == sa.bindparam("of"), _q.paused > 0)
_OFFERED: Final = (
    _t.id, _t.queue, _t.priority, _t.worker_name, _t.owner, _LIMIT, _HAS_ROUNDS, _t.created_jobs - _t.next_seq, _IS_PLAIN,
    _t.key_field.is_not(None), _t.options, _t.slots,
)  # fmt: skip


class _Queries(NamedTuple):
    """What :func:`pick` reads of a queue: the first ready Tasks, those that are due, those that are ready after a Task of a
    priority, or after a priority, and the newest ready one of a priority."""

    ready: Any
    due: Any
    beyond: Any
    lower: Any
    newest: Any


@cache
def _queries(dialect: str, named: bool) -> _Queries:
    may = sa.and_(_t.queue == sa.bindparam("of"), _NOT_FULL, _RUNS)
    if named:
        may = sa.and_(may, sa.or_(_t.worker_name == "*", batches.among_given(dialect, _t.worker_name, "names")))
    found = sa.select(*_OFFERED).where(may).limit(sa.bindparam("count"))
    # Otherwise MariaDB also reads the Tasks that are not ready.
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
    place: float = 0.0,
) -> list[Offer]:
    """The first Tasks that may start jobs in each of the queues ``names``, by priority, then in the order submitted.

    ``workers``: only Tasks of these, and mixed ones; None: of all. Reads at most ``limit`` per queue, and where these are
    all of them of one priority, as many that are ready at a larger one. Of the last priority for which there is no room for
    every Task, those after the id that ``after`` names for (queue, priority) come first, so that all have their turn; where
    it names none, those from ``place`` on, from 0 for the oldest to 1 for the newest, so that a thousand processes do not
    all begin with the oldest. Tasks of paused queues, and those whose places are taken, are left out.
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
        rows = [*read(queries.due), *_page(read, queries, limit, served, place)]
        found += [Offer(int(i), *rest) for i, *rest in rows]
    return sorted(found, key=lambda each: each.priority)


def _page(
    read: Callable[..., list[Any]], queries: _Queries, limit: int, served: Mapping[int, int], place: float
) -> list[Any]:
    """The ready Tasks of one queue for :func:`pick`. ``served``: the Task of a priority that got jobs last."""
    found = read(queries.ready)
    if len(found) < limit:
        return found
    last = int(found[-1][2])
    if last in served or place > 0:
        firm = [row for row in found if row[2] != last]
        count, after = len(found) - len(firm), served.get(last)
        if after is None:
            oldest, newest = int(found[len(firm)][0]), int(read(queries.newest, priority=last)[0][0])
            after = oldest + int(place * (newest - oldest))
        # Those after the last one that was served, then from the first on.
        turned = read(queries.beyond, priority=last, after=after, count=count)
        found = firm + (turned + [row for row in found if row[2] == last and row[0] <= after])[:count]
    return found + (read(queries.lower, priority=last) if int(found[0][2]) == last else [])


# -- borrow


@dataclass(frozen=True, slots=True)
class Job:
    """A job as the ledger has it when it is lent. ``params`` and ``options``: JSON text; ``row``: its row in the list;
    ``items``: number of items, 0 of an untracked job; ``slots``: number of counter slots of its Task; ``seq``: its number
    in the Task; ``line``: that of its key; ``started_at``: when it first began (microseconds), of claimed jobs."""

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


@dataclass(frozen=True, slots=True)
class Loan:
    """A range of a Task that this process holds. ``asked``: a user stopped one of its jobs, at that time."""

    id: int
    task_id: int
    low: int
    high: int
    asked: int | None = None


@dataclass(slots=True)
class Borrowed:
    """What a borrow gave: loans with their jobs, and claimed jobs. ``limit``: that of the Task at that moment, see
    :class:`Offer`; ``is_locked``: another transaction holds the Task's row; ``next_at``: when its next round may begin
    (microseconds), if that is later."""

    loans: list[tuple[Loan, list[Job]]] = field(default_factory=list)
    claimed: list[Job] = field(default_factory=list)
    limit: int | None = None
    is_locked: bool = False
    next_at: int | None = None

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
"""Free loans that one borrow takes."""

# A borrow that does not reach the end of the list changes no hint. One that may is made step by step: it reads whether a
# free loan is there, after the lock. A statement that locks sees a newer row of the Task than of other tables.
_PLAIN: Final = (
    "id = :task_id AND state IN ('splitting', 'running') AND (session_key IS NULL OR session_holder IS NOT NULL)"
    " AND parallel IS NULL AND interval_s <= 0 AND tolerated_failures IS NULL"
    " AND next_seq + :count < created_jobs FOR UPDATE SKIP LOCKED"
)
_AT_POINTER_POSTGRESQL: Final = sa.text(
    f"WITH t AS MATERIALIZED (SELECT id, next_seq AS low, next_seq + :count AS high FROM tasks WHERE {_PLAIN}),"  # noqa: S608
    " u AS (UPDATE tasks SET next_seq = t.high, started_at = coalesce(tasks.started_at, :now) FROM t WHERE tasks.id = t.id)"
    " INSERT INTO loans (task_id, low, high, process, at) SELECT id, low, high, :me, :now FROM t RETURNING id, low, high"
)
# One packet: with a round trip for each step under the lock, a hundred processes wait for the network.
_AT_POINTER_MARIADB: Final = sa.text(
    "BEGIN NOT ATOMIC DECLARE l BIGINT; DECLARE k BIGINT;"  # noqa: S608
    " DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;"
    f" START TRANSACTION; SELECT next_seq INTO l FROM tasks WHERE {_PLAIN};"
    " IF l IS NULL THEN ROLLBACK; SELECT 0, 0, 0 FROM DUAL WHERE FALSE; ELSE"
    " UPDATE tasks SET next_seq = l + :count, started_at = COALESCE(started_at, :now) WHERE id = :task_id;"
    " INSERT INTO loans (task_id, low, high, process, at) VALUES (:task_id, l, l + :count, :me, :now);"
    " SET k = LAST_INSERT_ID(); COMMIT; SELECT k, l, l + :count; END IF; END"
)


def borrow(ledger: Ledger, offer: Offer, wanted: int, *, workers: Collection[str] | None = None) -> Borrowed:
    """Borrows up to ``wanted`` jobs of a Task for this process: due ones first, then what was given back, then at the
    pointer.

    Of a Task with an interval it takes what is left of its round, or begins the next one if its time has come. Limits are
    kept by places (:func:`lease_places`). ``workers``: of a mixed Task, those that this process performs: what was put off
    for want of its worker comes in the way of nothing else; None: all. Raises LedgerUnavailable; what is borrowed and never
    arrives here is given back by the next check.
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
        found = _borrow_at_pointer(ledger, offer.task_id, wanted)
        if offer.has_keys:
            _have_wait(ledger, found)
        lent = [_read_range(ledger, offer, loan) for loan in found]
        count = sum(len(jobs) for _, jobs in lent)
        if not offer.has_keys or not lent or count * 2 > wanted:
            return Borrowed(lent)
        wanted -= count  # most of them wait for others: those after them may go
    names = sorted(workers) if workers is not None and offer.worker_name == "*" else None
    done = _borrow(ledger, offer, wanted, names)
    if done is None:
        return Borrowed(lent, is_locked=True)
    if offer.has_keys and done.free:
        _have_wait(ledger, done.free)
    hints.settle_free(ledger, sessions.free(ledger, done.blocked))
    if done.is_idle:
        sessions.step_aside(ledger, offer.task_id)
    done.result.loans = lent + [_read_range(ledger, offer, loan) for loan in done.loans]
    done.result.claimed = read_jobs(ledger, done.claimed) if done.claimed else []
    return done.result


def _borrow_at_pointer(ledger: Ledger, task_id: int, count: int) -> list[Loan]:
    """One round trip. A second try after a lost answer borrows anew: what the first one borrowed is given back as
    unknown."""
    statement = _AT_POINTER_POSTGRESQL if ledger.database.dialect == "postgresql" else _AT_POINTER_MARIADB
    given = {"task_id": task_id, "count": count, "me": ledger.identity, "now": ledger.now()}
    with ledger.database.write_alone() as connection:
        return [Loan(int(i), task_id, int(low), int(high)) for i, low, high in connection.execute(statement, given)]


def _have_wait(ledger: Ledger, lent: Sequence[Loan]) -> None:
    """Has those jobs of these loans wait whose turn it is not, which takes them out of the loans."""
    blocked = sessions.block_lent(ledger, [(loan.task_id, loan.low, loan.high) for loan in lent])
    hints.settle_free(ledger, sessions.free(ledger, blocked))


@repeatable
def _borrow(ledger: Ledger, offer: Offer, wanted: int, names: Sequence[str] | None) -> _Borrow | None:
    """None if another transaction holds the Task's row."""
    with ledger.database.write() as connection:
        task = lock_now(connection, offer.task_id)
        if task is None:
            return None
        step = _Borrow(connection, ledger, task, names)
        step.run(wanted)
    return step


class _Borrow:
    """A borrow from a locked Task, step by step in one transaction. ``names``: the workers of those that are due.

    ``loans`` and ``claimed`` are what it lends; ``free``: those of the loans that were free before; ``left``: how many more
    jobs may be lent; ``blocked``: lines of which a job waits for its turn from now on; ``is_idle``: the Task holds its
    session, with nothing to lend.
    """

    def __init__(self, connection: Connection, ledger: Ledger, task: dict[str, Any], names: Sequence[str] | None) -> None:
        self.connection, self.ledger, self.task, self.names = connection, ledger, task, names
        self.now = ledger.now()
        self.loans: list[Loan] = []
        self.free: list[Loan] = []
        self.claimed: list[int] = []
        self.blocked: set[int] = set()
        self.left = 0
        self.is_idle = False
        self.result = Borrowed()

    def run(self, wanted: int) -> None:
        """Asks the gates, lends, and settles the hints."""
        connection, task, gate = self.connection, self.task, None
        if not readiness.may_start(task["state"], hints.in_session(task)):
            hints.settle(connection, self.ledger, task)
            return
        if task["key_field"] is not None and (gate := sessions.gate(connection, task["id"], task["worker_name"])).waits:
            self.result.next_at = self.now + _SOON
            hints.write(connection, task, Hints(None, self.result.next_at), self.now)
            return
        interval, round_ = interval_of(task["interval_s"]), None
        limit = self.result.limit = at_once(task["parallel"], interval)
        if (opens := hints.opens_at(connection, task, self.now)) is not None and opens > self.now:
            self.result.next_at = opens
            hints.settle(connection, self.ledger, task)
            return
        if interval:
            round_ = hints.round_of(task)
            if not round_["left"]:
                round_ = {"ranges": [], "again": [], "left": limit, "at": self.now}
            wanted = min(wanted, round_["left"], limit or 1, MOST_OF_ROUND)
        if task["turning"] is None and task["tolerated_failures"] is not None:  # a retry takes failures back meanwhile
            wanted = _tolerated(connection, task, wanted)
        self.left = wanted
        if wanted > 0:
            self._lend(gate)
        values = self._noted(round_, wanted - self.left)
        task |= values
        found = hints.settle(connection, self.ledger, task, **values)
        self.result.next_at = None if round_ is None else found.due_next
        self.is_idle = task["session_holder"] is not None and not (self.loans or self.claimed) and found.ready is None

    def _noted(self, round_: Mapping[str, Any] | None, lent: int) -> dict[str, Any]:
        """The columns of the Task that a borrow changes beside its pointer and its hints."""
        task = self.task
        if round_ is None and task["round_at"] is not None:
            return {"round_at": None, "round_jobs": None}
        if not (self.loans or self.claimed):
            return {}
        values: dict[str, Any] = {} if task["started_at"] is not None else {"started_at": self.now}
        if round_ is not None:
            jobs = {
                "ranges": [*round_["ranges"], *([each.low, each.high] for each in self.loans)],
                "again": [*round_["again"], *self.claimed],
                "left": round_["left"] - lent,
            }
            values |= {"round_at": round_.get("at", task["round_at"]), "round_jobs": dumps(jobs)}
        return values

    def _lend(self, gate: sessions.KeysGate | None) -> None:
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
            sessions.postpone(self.connection, turns.early, self.now + _SOON)
            self.blocked |= set(turns.wait.values())
            due = [i for i in due if i in turns.go]
        self.claimed = _claim(self.connection, self.ledger, due, _e.due_at <= self.now)
        self.result.is_locked = len(self.claimed) < len(due)
        self.left -= len(self.claimed)

    def _take_free(self) -> None:
        """Takes free loans; cuts the last one, if that is larger than what is left to take."""
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
        """Moves the pointer of a Task with keys for up to ``left`` jobs whose turn it is, and lends what it passes; the
        others wait for their turn, which takes them out of the loan.

        It passes rows that have to wait only while the Task has too few jobs that go: where there are enough, the turn of
        those at the pointer comes while these run, and to pass one costs four updates.
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
        """Moves the pointer, and lends what it passes, if any of these are jobs to perform (``count``)."""
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


_SOON: Final = 400_000
"""Microseconds until a Task with keys is looked at again while one that was submitted earlier is being split."""

_LEAST_PASSED: Final = 256
"""Rows that are read at once to find jobs whose turn it is. Below :data:`_MOST_PASSED`."""

_MOST_PASSED: Final = 2_000
"""Rows that the pointer of a Task with keys passes in one borrow, if hardly any has its turn."""


def _tolerated(connection: Connection, task: Mapping[str, Any], wanted: int) -> int:
    """As many as may be lent of a locked Task with tolerated failures.

    What is lent is read before what failed: writers of outcomes do not lock the Task, and each statement sees what is
    committed by then. So one that ends meanwhile counts twice; the other way round it would not count at all.
    """
    room = wanted
    for exactly in (False, True):
        lent = holders(connection, task["id"], exactly=exactly).total()
        room = readiness.tolerated(wanted, task_rows.tolerated_left(connection, task), lent)
        if room == wanted:
            break
    return room


def _of_loans(count: Any) -> Any:
    found = sa.select(_l.process, sa.func.sum(count)).where(_l.task_id == sa.bindparam("of"), _l.process.is_not(None))
    return found.group_by(_l.process)


_LENT_AT_MOST: Final = _of_loans(_l.high - _l.low)
# Not a join, which may read all Events of the Task.
_LENT_OPEN: Final = _of_loans(sa.select(sa.func.count()).where(*IN_LOAN, UNHELD).correlate(loans).scalar_subquery())
# The Task comes by a function: by its index, every Event of it would be read for the few that name a process.
_CLAIMED: Final = (
    sa.select(_e.process, sa.func.count())
    .with_hint(events, "FORCE INDEX (ix_events_process)", "mariadb")
    .where(_e.process.is_not(None), sa.func.coalesce(_e.task_id, 0) == sa.bindparam("of"), IS_OPEN)
    .group_by(_e.process)
)


def holders(connection: Connection, task_id: int, *, exactly: bool = False) -> Counter[str]:
    """Who holds jobs of a Task by loans and claims, and how many at most. ``exactly``: without those of its loans that have
    ended, which costs a read of their ranges: one long job must not count for all that were lent with it."""
    found = Counter[str]()
    for each in (_LENT_OPEN if exactly else _LENT_AT_MOST, _CLAIMED):
        found.update({str(process): int(count) for process, count in connection.execute(each, {"of": task_id})})
    return found


# -- small Tasks, borrowed many per transaction: one by one, each costs as many statements and commits as a large one

_SMALL_JOBS: Final = 20
"""Most jobs of a small Task: it is borrowed whole. Far below what a process borrows for :data:`RECHECK_S`."""


def is_small(offer: Offer) -> bool:
    """Whether a Task may be borrowed whole, with others."""
    return offer.is_plain and not offer.has_keys and 0 < offer.left <= _SMALL_JOBS and offer.worker_name != "*"


def borrow_small(ledger: Ledger, offers: Sequence[Offer]) -> dict[int, Borrowed]:
    """Borrows all jobs of those of these small Tasks that are still as they were offered, by their ids; :func:`borrow`
    handles the rest. Raises LedgerUnavailable."""
    lent = _borrow_small(ledger, [offer.task_id for offer in offers])
    if not lent:
        return {}
    jobs: dict[int, list[Job]] = {loan.id: [] for loan in lent}
    by_id = {offer.task_id: offer for offer in offers}
    with ledger.database.read() as connection:
        for loan_id, task_id, *row in _OF_LOANS.fetch(connection, sorted(jobs)):
            jobs[loan_id].append(_job(by_id[task_id], row))
    return {loan.task_id: Borrowed([(loan, sorted(jobs[loan.id], key=lambda job: job.event_id))]) for loan in lent}


@repeatable
def _borrow_small(ledger: Ledger, task_ids: Sequence[int]) -> list[Loan]:
    now = ledger.now()
    with ledger.database.write() as connection:
        free: Sequence[Any] = _SMALL.execute(connection, sorted(task_ids)).all()
        found = {int(i): (int(low), int(high)) for i, low, high in free}
        if found:  # after the lock, as of a borrow that reaches the end of the list
            for task_id in _WITH_FREE.execute(connection, list(found)).scalars().all():
                del found[int(task_id)]
        if not found:
            return []
        rows = [
            {"task_id": i, "low": low, "high": high, "process": ledger.identity, "at": now}
            for i, (low, high) in found.items()
        ]
        connection.execute(loans.insert(), rows)
        made: Sequence[Any] = _MADE.execute(connection, list(found), me=ledger.identity).all()
        hints.all_lent(connection, list(found), now)
    return [Loan(int(i), int(of), int(low), int(high)) for i, of, low, high in made if found[of] == (low, high)]


_SMALL: Final = batches.ByValues(
    _t.id,
    lambda its: sa.select(_t.id, _t.next_seq, _t.created_jobs)
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


def _read_range(ledger: Ledger, offer: Offer, loan: Loan) -> tuple[Loan, list[Job]]:
    """The jobs of a loan, read after its commit: only then is nothing of it written by others any more."""
    with ledger.database.read() as connection:
        found = batches.fetch_small(connection, _RANGE, {"of": loan.task_id, "low": loan.low, "high": loan.high})
    # The ids of a Task's Events ascend with ``seq``.
    return loan, sorted((_job(offer, row) for row in found), key=lambda job: job.event_id)


def _job(offer: Offer, row: Sequence[Any]) -> Job:
    """The job of a row of :data:`_LENT`."""
    i, job_id, attempt, retries, worker, queue, params, options, created_at, first_row, items, seq, line = row
    return Job(
        i, job_id, offer.task_id, attempt, retries, worker or offer.worker_name, queue or offer.queue, offer.priority,
        params, offer.options if options is None else options, created_at, first_row, items, offer.slots, seq, line,
    )  # fmt: skip


def read_jobs(ledger: Ledger, event_ids: Sequence[int]) -> list[Job]:
    """These jobs, as claimed."""
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
    """Applies :func:`~asynctask.core.transitions.claim` to those of these Events that wait and nobody has locked, in one
    statement: it changes no column but the two, and of the counts only ``retrying``."""
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
        turn = claim(Row(Status.ENQUEUE, attempt, due_at, retries, 0, True, items, *done), ledger.identity)
        if task_id is not None and due_at is not None:
            moved.setdefault((task_id, ledger.slot(slots)), Delta()).add(turn.delta)
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
    # Longer options that do not begin with a priority belong to a job that another program pushed, which has none.
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
    """Jobs without a Task that are due in these queues, in the order of their due times. ``workers``: only of these; None:
    tracked ones of any, for a foreign queue, where untracked ones are never pushed.

    If more than ``limit`` are due, the first and the last ``limit``: an urgent job that came last is seen behind any number
    of others, without reading all of them.
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
    """The priority in the options, or in their beginning if they begin with it; 0 for an invalid one, which is reported
    when the job is made."""
    if options is not None and (first := _PRIORITY_FIRST.match(options)) is not None:
        return int(first[1])
    try:
        return int((loads(options) or {}).get("priority") or 0)
    except (AttributeError, TypeError, ValueError, OverflowError):
        return 0


def claim_alone(ledger: Ledger, event_ids: Sequence[int]) -> list[Job]:
    """Claims those of these jobs without a Task that are still due and nobody else claims now. Raises LedgerUnavailable."""
    claimed = _claim_due(ledger, event_ids)
    return read_jobs(ledger, claimed) if claimed else []


@repeatable
def _claim_due(ledger: Ledger, event_ids: Sequence[int]) -> list[int]:
    with ledger.database.write() as connection:
        return _claim(connection, ledger, event_ids, _e.due_at <= ledger.now())


def next_due(connection: Connection, now: int) -> int | None:
    """The due time after ``now`` of the next job that waits in the ledger, of a Task or without one."""
    of_tasks = sa.select(_t.due_next).where(_t.due_next > now).order_by(_t.due_next).limit(1)
    alone = sa.select(_e.due_at).where(_e.task_id.is_(None), _e.due_at > now).order_by(_e.due_at).limit(1)
    times = connection.execute(sa.select(of_tasks.scalar_subquery(), alone.scalar_subquery())).one()
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
    """When there may first be something to borrow or to claim, in one statement: an idle process asks no more. 0 if a Task
    of these queues is ready; None if nothing waits at all."""
    found = connection.execute(_FIRST, {"queues": sorted(names)}).one()
    return min((int(at) for at in found if at is not None), default=None)


# -- the end of a loan


_END: Final = batches.ByValues(_l.id, lambda its: loans.delete().where(its, _l.process == sa.bindparam("me")))


def end_loans(connection: Connection, ledger: Ledger, ids: Collection[int]) -> None:
    """Ends loans of this process of which nothing is left, in the transaction of their last outcomes."""
    if ids:
        _END.execute(connection, sorted(ids), me=ledger.identity)


@repeatable
def end_empty(ledger: Ledger, ids: Collection[int]) -> None:
    """The same, for loans without a job to perform."""
    with ledger.database.write() as connection:
        end_loans(connection, ledger, ids)


def give_back(ledger: Ledger, parts: Sequence[tuple[Loan, int]]) -> list[bool]:
    """Gives back what this process has not begun of its loans: of each the jobs from a ``seq`` on. They are free loans
    then, which the next borrow takes; no Event is written. Other processes are notified.

    Returns for each whether this process still held it, and holds what it did not give back: one that was declared dead
    must not free what recovery has made due. Raises LedgerUnavailable.
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
            else:  # an earlier try may have cut it, and its answer was lost
                cut = sa.select(_l.id).where(_l.id == loan.id, _l.process == ledger.identity, _l.high == seq)
                had = connection.execute(cut).first() is not None
            given[n] = had
        notify(connection)
    return given


def unclaim(ledger: Ledger, claims: Mapping[int, int]) -> None:
    """Gives back held Events (id -> attempt) that nobody begins: the answer to their claim was lost, or their copies were
    taken out of a foreign queue. An attempt that waits for no ``due_at`` has the holder that it had. Raises
    LedgerUnavailable."""

    def decide(record: EventRecord) -> Transition | None:
        row = record.row
        if row.attempt != claims[record.id] or row.status is not Status.ENQUEUE or row.due_at is not None:
            return None
        return give_back_one(row, record.task_state, now=ledger.now())

    change(ledger, lambda connection: [Change(event_id, decide) for event_id in sorted(claims)])


@repeatable
def leave(ledger: Ledger) -> set[int]:
    """Frees every loan and place of this process, which ends normally and performs nothing any more. Claimed jobs are given
    back one by one before. Returns the Tasks."""
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
    """By what a process holds a job: its loan, or its claim."""

    def ended(self) -> None:
        """The job has ended for this process: recorded, or given back by itself."""
        ...

    def ending(self, count: int) -> int | None:
        """The id of the loan if it ends with ``count`` more of its jobs, in a transaction that is about to be committed."""
        ...


def ending(held: Iterable[Holding | None]) -> list[int]:
    """The loans that end with one job each of these, in a transaction that is about to be committed."""
    ends = Counter(each for each in held if each is not None)
    return [loan_id for each, count in ends.items() if (loan_id := each.ending(count)) is not None]


# -- what a process holds, checked again and again


@dataclass(frozen=True, slots=True)
class HeldTask:
    """A Task of which a process holds jobs: what may keep them from beginning. ``places``: those of this process, None if
    it has none; ``is_paused``: its queue is."""

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
    """What :func:`check` read. ``claims``: the claimed Events that have not begun, as far as the ledger knows, with their
    attempts; ``stopping``: those of them that a user stopped; ``working``: the Events that have begun, with their
    attempts."""

    loans: Mapping[int, Loan]
    claims: Mapping[int, int]
    stopping: frozenset[int]
    working: frozenset[tuple[int, int]]
    tasks: Mapping[int, HeldTask]
    paused: frozenset[str]


def check(ledger: Ledger, task_ids: Collection[int]) -> Check:
    """What the ledger says of this process's loans and of these Tasks, of which it holds jobs; and the paused queues.
    Raises LedgerUnavailable."""
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
def heard(ledger: Ledger, held: Collection[Loan]) -> None:
    """This process has stopped what users stopped in these loans until they were read."""
    with ledger.database.write() as connection:
        for each in held:
            same = (_l.id == each.id) & (_l.process == ledger.identity) & (_l.asked == each.asked)
            connection.execute(loans.update().where(same).values(asked=None))


def ask(connection: Connection, ledger: Ledger, task_id: int, seq: int) -> bool:
    """Whether a row of a locked Task lies in a loan that a process holds; tells that process that a user stopped it."""
    held = loans.update().where(_l.task_id == task_id, _l.process.is_not(None), _l.low <= seq, _l.high > seq)
    return bool(connection.execute(held.values(asked=ledger.now())).rowcount)


def lent_ranges(connection: Connection, task_id: int) -> list[tuple[int, int]]:
    """The ranges of a locked Task that processes hold."""
    found = sa.select(_l.low, _l.high).where(_l.task_id == task_id, _l.process.is_not(None))
    return [(int(low), int(high)) for low, high in connection.execute(found)]


def is_lent(ranges: Iterable[tuple[int, int]], seq: int | None) -> bool:
    """Whether a row lies in one of these ranges. One without a Task counts as lent: an engine keeps it."""
    return seq is None or any(low <= seq < high for low, high in ranges)


# -- places: how many jobs of a Task with a limit a process may run at once


class PlacesLease(NamedTuple):
    """The answer to :func:`lease_places`. ``places``: of this process, None for a Task without a limit; ``is_locked``:
    another transaction holds the Task's row, and nothing was changed."""

    places: int | None
    is_locked: bool = False


@repeatable
def lease_places(ledger: Ledger, task_id: int, want: int, running: int, *, holds: bool = True) -> PlacesLease:
    """Sets this process's places of a Task to ``want``, as far as they are free; it keeps at least ``running``, the jobs of
    it that run here and until the answer.

    ``holds``: it holds jobs of the Task; then it has a row of 0 places, too: that says that it knows of the limit, and no
    other process gets a place before everybody does. Raises LedgerUnavailable.
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
            is_open = set(filter(has_places, holders(connection, task_id))) <= {*rows, ledger.identity}
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


# -- foreign queues, as holders

QUEUE_HOLDER: Final = "queue/"
AFTER_QUEUE_HOLDERS: Final = "queue0"
"""The names of foreign queues as holders begin with the first, and sort before the second: an index finds them."""


def queue_holder(engine: str | None) -> str:
    """The holder of what lies in the queues of an engine; None: in Redis, for workers in other languages."""
    return f"{QUEUE_HOLDER}{engine or 'redis'}"


def is_queue_holder(holder: str) -> bool:
    """Whether a holder is a foreign queue, not a process."""
    return holder.startswith(QUEUE_HOLDER)


PUSHER: Final = "+d"
"""How the names of dispatchers as holders end (:func:`asynctask.ledger.foreign.pusher`)."""


def has_places(holder: str) -> bool:
    """Whether a holder of jobs has places of its own: a worker process, or a dispatcher. Those of an engine's processes
    are among the places of their queue."""
    return not is_queue_holder(holder) and ("@" not in holder or holder.endswith(PUSHER))


# -- paused queues


def paused_queues(connection: Connection) -> frozenset[str]:
    """The queues that people paused in the ledger."""
    return frozenset(str(name) for name in connection.execute(sa.select(_q.name).where(_q.paused > 0)).scalars())


# -- what committed outcomes make possible


def announce(ledger: Ledger, applied: Collection[Write]) -> int | None:
    """Settles what committed changes of Events made possible; call it after their transaction.

    Returns when the first of their jobs is due (microseconds; the past: now), None if none is. Does not wait for locked
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
    except LedgerUnavailable as error:  # the changes are committed; maintenance finds missing hints
        get_logger("asynctask.ready").warning("announce_put_off", error=str(error))
        return None
    return min([*due, *([0] if woken else [])], default=None)


def change(ledger: Ledger, make: Callable[[Connection], Sequence[Change]]) -> list[Change]:
    """Writes the changes that ``make`` returns, in a transaction of their own, and settles what they make possible.

    ``make`` is called again if the transaction is repeated. Raises LedgerUnavailable.
    """
    applied = _change(ledger, make)
    announce(ledger, applied)
    return applied


@repeatable
def _change(ledger: Ledger, make: Callable[[Connection], Sequence[Change]]) -> list[Change]:
    with ledger.database.write() as connection:
        return apply(connection, ledger, make(connection))


_WATCHED: Final = sa.select(
    _t.id,
    _t.interval_s,
    _t.session_holder,
    _t.tolerated_failures,
    _t.generation_sealed,
    _t.next_seq,
    _t.created_jobs,
).where(_t.id.in_(sa.bindparam("ids", expanding=True)))


def _announce(ledger: Ledger, waits: set[int], ended: set[int]) -> None:
    """``waits``: Tasks of which a row waits with a ``due_at`` now; ``ended``: others of which rows ended or began."""
    rounds, holders = set[int](), list[int]()
    if both := sorted(waits | ended):
        with ledger.database.read() as connection:
            found = [row for part in chunks(both) for row in connection.execute(_WATCHED, {"ids": part})]
        if tolerant := [int(row.id) for row in found if row.tolerated_failures is not None]:
            task_rows.pause_failing(ledger, tolerant)
        # The next round counts from the start of the last job of this one.
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
    """Retries the hints and promotions that this process kept because a Task's row was locked. Raises LedgerUnavailable."""
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
    """Puts Tasks that have something to start, and stand beside the line of their session, at its end: their retry is due
    now, or something went wrong. Returns their number."""
    now = ledger.now()
    with ledger.database.read() as connection:
        found = [int(i) for i in connection.execute(sessions.ASIDE.limit(1_000), {"now": now}).scalars()]
    each_free(ledger, found, lambda connection, free: sessions.join_again(connection, ledger, free, now))
    return len(found)
