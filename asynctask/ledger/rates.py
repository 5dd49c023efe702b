"""Rate limits: how many jobs of a worker's Tasks may start in a time, in all processes together.

A limit is a row of ``rates``, which workers share by its name (``rated_workers``). A borrow takes from it, in its own
transaction, as many starts as the limit permits now (:func:`asynctask.core.readiness.permitted`); while it permits none,
the Tasks of its workers are not offered (:data:`CLOSED`). Processes declare the limits of their code when they register; a
rate that people set stays until the code declares another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Annotated, Any, Final, NamedTuple, Protocol, TypedDict

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from asynctask.clock import SECOND, Time, rfc3339
from asynctask.core.readiness import RATE_AHEAD, permitted, rate_opens, taken
from asynctask.core.transitions import CLOCKS_DIFFER
from asynctask.database.notify import notify
from asynctask.database.retrying import TransactionConflict, repeatable
from asynctask.database.tables import rated_workers, rates, tasks
from asynctask.errors import ConfigError, InputError, NotFound, Problem
from asynctask.ledger.base import Ledger
from asynctask.ledger.gates import BorrowGate, Lent
from asynctask.messages import clean

MAX_NAME: Final = 128
"""Characters of the name of a limit."""

LEAST_EVERY: Final = 10
"""Smallest number of microseconds between two starts: a higher rate limits nothing."""

MOST_EVERY: Final = 7 * 86_400 * SECOND
"""Largest number of microseconds between two starts: a week."""

_UNITS: Final = {"s": 1, "min": 60, "h": 3_600}
_RATE: Final = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)/(s|min|h)")
_r, _w = rates.c, rated_workers.c


def every(rate: object) -> int:
    """The microseconds between two starts at a rate such as ``5/s``, ``300/min``, ``1000/h`` or ``0.5/s``. Raises
    :class:`ValueError`, with a text that says what is accepted."""
    found = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    number = Fraction(found[1]) if found is not None else Fraction(0)
    if found is None or not number:
        raise ValueError(f"write a rate as 5/s, 300/min, 1000/h or 0.5/s, not {rate!r:.80}")
    between = -int(-_UNITS[found[2]] * SECOND / number // 1)  # rounded up, so that the rate is never exceeded
    if not LEAST_EVERY <= between <= MOST_EVERY:
        raise ValueError(f"a rate is at most {SECOND // LEAST_EVERY}/s, and at least one start in a week, not {rate!r:.80}")
    return between


# -- what a process declares


class Rated(Protocol):
    """The fields of a worker that declare its limit."""

    @property
    def name(self) -> str: ...

    @property
    def rate(self) -> str | None: ...

    @property
    def limit(self) -> str | None: ...


def declared(workers: Mapping[str, Rated]) -> dict[str, tuple[str, str]]:
    """The limit and the rate that each of these workers declares, for those that have one. Raises :class:`ConfigError` for
    an invalid one, or if two workers of one limit declare different rates."""
    found, of = dict[str, tuple[str, str]](), dict[str, tuple[str, str]]()
    for worker in workers.values():
        if worker.rate is None:
            if worker.limit is not None:
                raise ConfigError(f"worker {worker.name}: limit={worker.limit!r:.80} needs a rate, such as rate='5/s'")
            continue
        name = worker.name if worker.limit is None else worker.limit
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or clean(name) != name or "/" in name:
            raise ConfigError(f"worker {worker.name}: limit has 1 to {MAX_NAME} characters, without /: {name!r:.200}")
        try:
            every(worker.rate)
        except ValueError as error:
            raise ConfigError(f"worker {worker.name}: rate: {error}") from None
        first, rate = of.setdefault(name, (worker.name, worker.rate))
        if rate != worker.rate:
            raise ConfigError(
                f"the workers {first} and {worker.name} share the limit {name!r}, but declare the rates {rate} and"
                f" {worker.rate}: declare the same rate, or give one of them another limit="
            )
        found[worker.name] = (name, worker.rate)
    return found


def declare(ledger: Ledger, workers: Mapping[str, Rated]) -> None:
    """Writes the limits of these workers, when a process registers. A limit whose rate in the code has changed gets the new
    one; others keep the rate that people have set. Raises :class:`ConfigError`, LedgerUnavailable."""
    wanted = declared(workers)
    with ledger.database.read() as connection:
        if _is_declared(connection, wanted, workers.keys()):
            return
    _declare(ledger, wanted, sorted(workers))


def _is_declared(connection: Connection, wanted: Mapping[str, tuple[str, str]], own: Any) -> bool:
    found = sa.select(_w.worker_name, _w.limit_name, _r.declared).join(rates, _r.name == _w.limit_name)
    kept = {str(worker): (str(name), str(rate)) for worker, name, rate in connection.execute(found)}
    return {worker: limit for worker, limit in kept.items() if worker in own} == wanted


@repeatable
def _declare(ledger: Ledger, wanted: Mapping[str, tuple[str, str]], own: list[str]) -> None:
    try:
        with ledger.database.write() as connection:
            for name, rate in sorted(set(wanted.values())):
                values = {"rate": rate, "declared": rate, "every": every(rate)}
                kept = connection.execute(sa.select(_r.declared).where(_r.name == name)).scalar()
                if kept is None:
                    connection.execute(rates.insert().values(name=name, free_at=0, **values))
                elif kept != rate:
                    connection.execute(rates.update().where(_r.name == name).values(values))
            before = {str(worker) for worker in connection.execute(sa.select(_w.worker_name)).scalars()}
            for worker in sorted(before & set(own)):
                connection.execute(rated_workers.delete().where(_w.worker_name == worker))
            for worker, (name, _) in sorted(wanted.items()):
                connection.execute(rated_workers.insert().values(worker_name=worker, limit_name=name))
            connection.execute(rates.delete().where(_r.name.not_in(sa.select(_w.limit_name))))
    except exc.IntegrityError as error:
        raise TransactionConflict("another process has declared these limits") from error


# -- the gate

_IS_CLOSED: Final = sa.and_(
    _r.free_at > sa.bindparam("now") + RATE_AHEAD,
    # Further ahead it was set by a clock that was set back since, or at a lower rate.
    _r.free_at <= sa.bindparam("now") + RATE_AHEAD + _r.every + CLOCKS_DIFFER,
)
CLOSED: Final = sa.select(_w.worker_name).join(rates, _r.name == _w.limit_name).where(_IS_CLOSED)
"""The workers whose limit permits no start at ``now``."""

LIMIT_OF_TASK: Final = sa.select(_w.limit_name).where(_w.worker_name == tasks.c.worker_name).scalar_subquery()
"""The limit of a Task's worker; NULL without one."""

NEXT_OPENING: Final = sa.select(sa.func.min(_r.free_at) - RATE_AHEAD).where(_IS_CLOSED).scalar_subquery()
"""When the next of the closed limits permits a start."""


_ROW: Final = sa.select(_r.name, _r.every, _r.free_at).where(_r.name == sa.bindparam("name"))
_FREE: Final = _ROW.with_for_update(skip_locked=True)


class RateGate(BorrowGate):
    """The rate limit ``name`` permits a start. Its row is locked without a wait until the end of the transaction."""

    every = free_at = 0

    def permits(self, wanted: int) -> int:
        """None while another transaction holds the limit, or if it is gone."""
        if self.name is None:
            return wanted
        row = self.connection.execute(
            _ROW if self.connection.dialect.name == "sqlite" else _FREE, {"name": self.name}
        ).first()
        if row is None:
            self.is_locked = True
            return 0
        self.every, self.free_at = int(row.every), int(row.free_at)
        self._note()
        return min(wanted, permitted(self.free_at, self.every, self.now))

    def take(self, lent: Lent) -> dict[str, Any]:
        if lent.number and self.name is not None:
            self.free_at = taken(self.free_at, self.every, self.now, lent.number)
            self.connection.execute(rates.update().where(_r.name == self.name).values(free_at=self.free_at))
            self._note()
        return {}

    def _note(self) -> None:
        opens = rate_opens(self.free_at, self.every, self.now)
        self.opens = opens if opens > self.now else None


# -- what people see and do


class RateInfo(TypedDict):
    """A rate limit."""

    name: str
    rate: Annotated[str, "Starts in a time, such as 5/s, 300/min or 1000/h."]
    declared: Annotated[str, "The rate in the code; `rate` differs from it if somebody has set another one."]
    workers: Annotated[list[str], "The workers that share it."]
    next_at: Annotated[Time | None, "When it permits the next start; null: now."]


class Closed(NamedTuple):
    """A limit that permits no start now. ``opens``: when it permits the next (microseconds)."""

    name: str
    rate: str
    opens: int


class Rates:
    """The rate limits of a database, as ``app.rates``. ``ledger`` returns the ledger of this process. Every method may
    raise LedgerUnavailable."""

    def __init__(self, ledger: Callable[[], Ledger]) -> None:
        self._ledger = ledger

    def all(self) -> list[RateInfo]:
        """Every limit that a process has declared, by name."""
        ledger = self._ledger()
        with ledger.database.read() as connection:
            found = connection.execute(sa.select(rates).order_by(_r.name)).all()
            workers = connection.execute(sa.select(_w.limit_name, _w.worker_name).order_by(_w.worker_name)).all()
        now, shown = ledger.now(), list[RateInfo]()
        for row in found:
            opens = rate_opens(row.free_at, row.every, now)
            shown.append(
                {
                    "name": row.name,
                    "rate": row.rate,
                    "declared": row.declared,
                    "workers": [worker for limit, worker in workers if limit == row.name],
                    "next_at": rfc3339(opens) if opens > now else None,
                }
            )
        return shown

    def find(self, name: str) -> RateInfo:
        """One limit. Raises :class:`NotFound`."""
        for each in self.all():
            if each["name"] == name:
                return each
        raise NotFound(f"there is no rate limit {clean(name)[:MAX_NAME]!r}; asynctask rates lists them")

    def set(self, name: str, rate: str) -> RateInfo:
        """Sets the rate of a limit, for all processes at once, until the code declares another rate than it does now.
        Raises :class:`NotFound`, :class:`InputError`."""
        self.find(name)
        try:
            between = every(rate)
        except ValueError as error:
            problem = Problem(None, "rate", "invalid_rate", str(error), rate)
            raise InputError(f"rate: {error}", code="invalid_rate", errors=[problem]) from None
        _set(self._ledger(), name, {"rate": rate, "every": between})
        return self.find(name)


@repeatable
def _set(ledger: Ledger, name: str, values: Mapping[str, Any]) -> None:
    with ledger.database.write() as connection:
        connection.execute(rates.update().where(_r.name == name).values(values))
        notify(connection)


def closed(connection: Connection, worker: str, now: int) -> Closed | None:
    """The limit of a worker if it permits no start now."""
    found = sa.select(_r.name, _r.rate, _r.every, _r.free_at).join(rated_workers, _r.name == _w.limit_name)
    row = connection.execute(found.where(_w.worker_name == worker)).first()
    if row is None or (opens := rate_opens(row.free_at, row.every, now)) <= now:
        return None
    return Closed(row.name, row.rate, opens)
