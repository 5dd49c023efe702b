"""The history: what ended in each minute, by queue and worker, with the run times; what waited in each queue; what ran.

No job writes a row for it. A process counts what it has committed in memory (:func:`count`), and its heartbeat adds the
counts to the rows of their minutes (:func:`write`), so that any number of processes share a row. A process that is killed
loses what it has counted since its last heartbeat. The leader of maintenance samples what waits and runs (:func:`sample`).

Run times are counted in buckets whose bounds rise by a constant factor. Buckets of different rows can be added, so a
quantile of any span and any number of processes is known within a quarter of its value.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, NamedTuple, NoReturn, TypedDict

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.clock import SECOND, Time, from_datetime, micros, rfc3339
from asynctask.core.states import Reason
from asynctask.database import batches
from asynctask.database.retrying import OutcomeUnknown, repeatable
from asynctask.database.tables import DURATIONS, history
from asynctask.errors import InputError, LedgerUnavailable, Problem
from asynctask.figures import Minute
from asynctask.ledger.base import Ledger
from asynctask.ledger.events import Write

MINUTE: Final = 60 * SECOND
"""Microseconds of a row's minute."""

BOUNDS_S: Final = tuple(10 ** (i / 5) / 1_000 for i in range(DURATIONS - 1))
"""Upper bounds of the buckets in seconds, five to a decade, from 1 ms to 66 minutes; a last bucket has longer times."""

STEPS: Final = {"1m": 60, "5m": 300, "1h": 3_600}
"""The steps of a series, in seconds."""

MAX_POINTS: Final = 500
"""Points of one series."""

MAX_VALUES: Final = 10_000
"""Points of all series of an answer."""

DEFAULT_S: Final = 3_600
"""The span without a ``since``."""

MAX_SAMPLED: Final = 1_000
"""Queues of one sample: those in which most waits."""

Step = Literal["1m", "5m", "1h"]
By = Literal["queue", "worker"]

_h = history.c
_KEYS: Final = ("at", "queue", "worker_name")
_ENDS: Final = ("finish", "failed", "error", "retried")
_COUNTS: Final = (*_ENDS, *(f"took_{i}" for i in range(DURATIONS)))
_SAMPLED: Final = ("waiting", "running", "processes")
_ALL: Final = ""
"""The queue in the row that has what waited and ran in all queues; without that row nothing was sampled in its minute."""

_BETWEEN: Final = [math.sqrt(low * high) for low, high in pairwise(BOUNDS_S)]
_SHOWN_S: Final = [float(f"{each:.2g}") for each in (BOUNDS_S[0], *_BETWEEN, BOUNDS_S[-1])]
"""The run time by which each bucket is shown."""


# -- counting


def count(ledger: Ledger, written: Iterable[Write]) -> None:
    """Counts what has ended by committed writes of Events: items by outcome, and attempts after which another follows.

    Untracked jobs have no items, and are not counted.
    """
    at = ledger.now() // MINUTE * MINUTE
    rows: dict[Minute, list[int]] = {}
    for each in written:
        record, transition = each.record, each.transition
        if record is None or transition is None or transition.before is None or not transition.after.items:
            continue
        before, after = transition.before, transition.after
        finish, failed = after.n_finish - before.n_finish, after.n_failed - before.n_failed
        error, retried = after.n_error - before.n_error, int(transition.reason is Reason.RETRY)
        if finish <= 0 and failed <= 0 and error <= 0 and not retried:
            continue
        key = (at, record.queue, record.worker_name)
        if (row := rows.get(key)) is None:
            row = rows[key] = [0] * len(_COUNTS)
        row[0] += finish if finish > 0 else 0  # faster than max()
        row[1] += failed if failed > 0 else 0
        row[2] += error if error > 0 else 0
        row[3] += retried
        if each.seconds is not None:
            row[len(_ENDS) + bisect_left(BOUNDS_S, each.seconds)] += 1
    if rows:
        ledger.minutes.add(rows)


def write(ledger: Ledger) -> None:
    """Adds what this process has counted to the history. Raises LedgerUnavailable; then the counts are kept for the next
    call, unless they may be written already."""
    rows = ledger.minutes.take()
    if not rows:
        return
    try:
        _write(ledger, rows)
    except OutcomeUnknown:
        raise
    except LedgerUnavailable:
        ledger.minutes.add(rows)
        raise


@repeatable
def _write(ledger: Ledger, rows: Mapping[Minute, Sequence[int]]) -> None:
    values = [dict(zip((*_KEYS, *_COUNTS), (*key, *rows[key]), strict=True)) for key in sorted(rows)]
    with ledger.database.write() as connection:
        connection.execute(batches.insert_or_add(connection.dialect.name, history, _KEYS, _COUNTS), values)


@repeatable
def sample(ledger: Ledger, waiting: Mapping[str, int], running: int, processes: int) -> None:
    """Notes how many jobs wait in each queue in this minute, how many run, and how many processes are live."""
    at = ledger.now() // MINUTE * MINUTE
    most = sorted((queue for queue in waiting if waiting[queue]), key=lambda queue: -waiting[queue])[:MAX_SAMPLED]
    found = {_ALL: sum(waiting.values()), **{queue: waiting[queue] for queue in sorted(most)}}
    values: list[dict[str, Any]] = [
        {"at": at, "queue": queue, "worker_name": "", "waiting": number, "running": None, "processes": None}
        for queue, number in found.items()
    ]
    values[0] |= {"running": running, "processes": processes}
    with ledger.database.write() as connection:
        connection.execute(history.update().where(_h.at == at, _h.waiting.is_not(None)).values(waiting=None))
        connection.execute(batches.insert_or_add(connection.dialect.name, history, _KEYS, (), _SAMPLED), values)


@repeatable
def purge(ledger: Ledger, keep_s: float) -> None:
    """Removes the oldest hour of what is older than ``keep_s`` seconds."""
    until = ledger.now() - micros(keep_s)
    with ledger.database.read() as connection:
        oldest = connection.execute(sa.select(sa.func.min(_h.at))).scalar()
    if oldest is not None and oldest < until:
        with ledger.database.write() as connection:
            connection.execute(history.delete().where(_h.at < min(until, oldest + 60 * MINUTE)))


# -- reading


class HistoryTotal(TypedDict):
    """The counts of a whole span."""

    finish: int
    failed: int
    error: int
    retried: int
    p50_s: float | None
    p95_s: float | None


class HistorySeries(TypedDict):
    """What ended in each step, the oldest first."""

    name: Annotated[str | None, "The queue or the worker; null: all."]
    finish: Annotated[list[int], "Items that succeeded."]
    failed: Annotated[list[int], "Items that were refused."]
    error: Annotated[list[int], "Items that ended in an error."]
    retried: Annotated[list[int], "Attempts that raised, and after which another follows."]
    p50_s: Annotated[list[float | None], "Seconds within which half of the attempts ended; null: it is not known."]
    p95_s: Annotated[list[float | None], "Seconds within which 95 of 100 attempts ended."]
    waiting: Annotated[list[int | None], "The most jobs that waited; null: it is not known, or of a worker."]
    total: HistoryTotal


class History(TypedDict):
    """What ended in a span of time."""

    since: Annotated[Time, "When the first step begins."]
    until: Annotated[Time, "When the last step ends."]
    step_s: int
    by: Literal["queue", "worker"] | None
    running: Annotated[list[int | None], "The most jobs that ran at once, of all queues; null: it is not known."]
    processes: Annotated[list[int | None], "The most live worker processes."]
    series: Annotated[list[HistorySeries], "With `by` one for each, those in which most ended first."]
    left_off: Annotated[int, "Series that were left off, because an answer has at most 10,000 points."]


class _Span(NamedTuple):
    """A span of whole steps, in microseconds."""

    since: int
    until: int
    step: int

    @property
    def points(self) -> int:
        return (self.until - self.since) // self.step

    @property
    def place(self) -> sa.ColumnElement[Any]:
        """The place of a row in the series: the microseconds to its step."""
        return (_h.at - _h.at % self.step - self.since).label("place")


def moment(name: str, at: datetime | None) -> int | None:
    """A time of a caller, in microseconds. Raises :class:`InputError` for one without a zone."""
    try:
        return None if at is None else from_datetime(at)
    except ValueError as error:
        _refuse(name, str(error), str(at))


def read(
    ledger: Ledger,
    *,
    since: int | None = None,
    until: int | None = None,
    step: str | None = None,
    queue: str | None = None,
    worker: str | None = None,
    by: str | None = None,
) -> History:
    """The history from ``since`` (default: an hour before the end) to ``until`` (default: now), in microseconds.

    ``step``: one of :data:`STEPS`, default the shortest with at most 500 points. ``queue`` and ``worker`` choose; ``by``:
    a series for each ``queue`` or ``worker``. Raises :class:`InputError`, LedgerUnavailable.
    """
    if by not in (None, "queue", "worker"):
        _refuse("by", f"must be queue or worker, not {by!r:.80}", by)
    span = _span(ledger.now() if until is None else until, since, step)
    where = [_h.at >= span.since, _h.at < span.until]
    where += [] if queue is None else [_h.queue == queue]
    where += [] if worker is None else [_h.worker_name == worker]
    with ledger.database.read() as connection:
        names: list[str | None] = [None] if by is None else _names(connection, by, where)
        shown = names[: MAX_VALUES // span.points]
        counts = _counts(connection, span, by, where, shown)
        sampled = _sampled(connection, span, queue)
    waiting = {place: most[0] for place, most in sampled.items()} if worker is None and by != "worker" else {}
    looked = {place for name, place in waiting if name == _ALL}
    chosen, places, unknown = queue or _ALL, range(span.points), (None, None, None)
    return {
        "since": rfc3339(span.since),
        "until": rfc3339(span.until),
        "step_s": span.step // SECOND,
        "by": "queue" if by == "queue" else "worker" if by == "worker" else None,
        "running": [sampled.get((_ALL, place), unknown)[1] for place in places],
        "processes": [sampled.get((_ALL, place), unknown)[2] for place in places],
        "series": [
            _series(
                name,
                [counts.get((name, place), _NOTHING) for place in places],
                [
                    waiting.get((chosen if name is None else name, place), 0 if place in looked else None)
                    for place in places
                ],
            )
            for name in shown
        ],
        "left_off": len(names) - len(shown),
    }


_NOTHING: Final = (0,) * len(_COUNTS)


def _refuse(name: str, text: str, value: object) -> NoReturn:
    problem = Problem(None, name, "out_of_range", text, value)
    raise InputError(f"{name}: {text}", code="out_of_range", errors=[problem])


def _span(until: int, since: int | None, step: str | None) -> _Span:
    """The whole steps that cover a span."""
    if step is not None and step not in STEPS:
        _refuse("step", f"must be one of {', '.join(STEPS)}, not {step!r:.80}", step)
    if since is not None and since >= until:
        _refuse("since", "must be before until", rfc3339(since))
    for name, seconds in STEPS.items():
        size = seconds * SECOND
        end = -(-until // size) * size
        begin = end - max(DEFAULT_S * SECOND, size) if since is None else since // size * size
        if step == name or (step is None and end - begin <= MAX_POINTS * size):
            break
    if end - begin > MAX_POINTS * size:
        longer = f"at most {MAX_POINTS} steps of {name} fit in an answer"
        _refuse("since", f"{longer}: choose a later since{'' if name == '1h' else ', or a longer step'}", rfc3339(begin))
    return _Span(begin, end, size)


def _names(connection: Connection, by: str, where: Sequence[Any]) -> list[str | None]:
    """The queues or the workers of a span, those in which most ended first."""
    name, ended = _h.queue if by == "queue" else _h.worker_name, sa.func.sum(_h.finish + _h.failed + _h.error + _h.retried)
    is_there = (ended > 0) | (sa.func.max(_h.waiting) > 0) if by == "queue" else ended > 0
    found = sa.select(name).where(*where, _h.queue != _ALL).group_by(name).having(is_there).order_by(ended.desc(), name)
    return list(connection.execute(found).scalars())


def _counts(
    connection: Connection, span: _Span, by: str | None, where: Sequence[Any], shown: Collection[str | None]
) -> dict[tuple[str | None, int], Sequence[int]]:
    """The counts, by name and step."""
    name = sa.null() if by is None else _h.queue if by == "queue" else _h.worker_name
    names = () if by is None else (name.in_(shown),)
    sums = [sa.func.sum(_h[each]) for each in _COUNTS]
    found = sa.select(span.place, name.label("name"), *sums).where(*where, *names).group_by("place", "name")
    return {(name, int(place) // span.step): [int(n) for n in row] for place, name, *row in connection.execute(found)}


def _sampled(connection: Connection, span: _Span, queue: str | None) -> dict[tuple[str, int], tuple[int | None, ...]]:
    """The most that waited, by queue and step; as :data:`_ALL` in all queues, there also what ran, and processes."""
    found = sa.select(_h.queue, span.place, *(sa.func.max(_h[each]) for each in _SAMPLED)).where(
        _h.at >= span.since, _h.at < span.until, _h.worker_name == "", _h.waiting.is_not(None)
    )
    if queue is not None:
        found = found.where(_h.queue.in_([_ALL, queue]))
    rows = connection.execute(found.group_by(_h.queue, "place"))
    return {(name, int(place) // span.step): tuple(most) for name, place, *most in rows}


def _series(name: str | None, counts: Sequence[Sequence[int]], waiting: list[int | None]) -> HistorySeries:
    total = [sum(each) for each in zip(*counts, strict=True)]
    finish, failed, error, retried = ([row[place] for row in counts] for place in range(len(_ENDS)))
    return {
        "name": name,
        "finish": finish,
        "failed": failed,
        "error": error,
        "retried": retried,
        "p50_s": [_quantile(row, 0.5) for row in counts],
        "p95_s": [_quantile(row, 0.95) for row in counts],
        "waiting": waiting,
        "total": {
            "finish": total[0],
            "failed": total[1],
            "error": total[2],
            "retried": total[3],
            "p50_s": _quantile(total, 0.5),
            "p95_s": _quantile(total, 0.95),
        },
    }


def _quantile(counts: Sequence[int], share: float) -> float | None:
    took = counts[len(_ENDS) :]
    left = math.ceil(sum(took) * share)
    if not left:
        return None
    for value, number in zip(_SHOWN_S, took, strict=True):
        left -= number
        if left <= 0:
            return value
    return _SHOWN_S[-1]
