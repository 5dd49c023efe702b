"""Periodic tasks: when a schedule ticks, and the one Task of each tick.

A schedule is declared in code (:meth:`asynctask.AsyncTask.every`); its row in ``schedules`` has the next tick. Every
process of the application looks at the rows of its schedules. It submits the Task of a due tick, and then moves the row on
by compare-and-set. The Task's idempotency key names the tick, so one Task is made of it whatever number of processes submit
it; and where a process dies between the two steps, the next one finds the Task.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal, NamedTuple, TypedDict
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import sqlalchemy as sa
from cronsim import CronSim, CronSimError
from sqlalchemy import exc

from asynctask.clock import SECOND, Ids, Time, from_datetime, micros, rfc3339
from asynctask.database.retrying import repeatable
from asynctask.database.tables import as_dict, schedules, tasks
from asynctask.errors import ConfigError, Conflict, InputError, NotFound, Unavailable
from asynctask.ledger.base import Ledger
from asynctask.logs import get_logger
from asynctask.messages import clean

Missed = Literal["skip", "once", "all"]
MISSED: Final = ("skip", "once", "all")

LATE_S: Final = 60.0
"""Seconds after which a tick is missed if no process has submitted its Task, as during a deployment."""

MAX_TICKS: Final = 1_000
"""The most missed ticks that ``missed="all"`` makes up for: the last ones."""

MIN_INTERVAL_S: Final = 1
MAX_INTERVAL_S: Final = 366 * 86_400

MAX_NAME: Final = 128
"""Characters of a name, so that it fits into the idempotency key of a tick."""

KEYS: Final = "schedule|"
"""What the idempotency keys of schedules begin with; over HTTP nobody else may use one, and so take a tick away."""

SEEN_S: Final = 20.0
"""Seconds after which a process writes again that it declares a schedule."""

GONE_S: Final = 90.0
"""Seconds after which a schedule that no process has declared is free: for another declaration, or to be removed."""

LOOK_S: Final = 5.0
"""Longest pause, in seconds, between two looks at the rows, which people may have changed."""

SPREAD_S: Final = 0.25
"""Longest random delay, in seconds, of a look for a due tick, so that not all processes submit its Task at once."""

_STOP_S: Final = 2.0
_NAMES: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


# -- when a schedule ticks: times alone, without a database


class Due(NamedTuple):
    """The ticks that are due: the last :data:`MAX_TICKS` of them, how many there are, and the tick after them (None: there
    is none)."""

    ticks: Sequence[int]
    total: int
    following: int | None


class Ticks:
    """The times at which a schedule ticks, in microseconds.

    ``schedule``: a number of seconds, or a cron expression of five fields, or one of the names ``@hourly``, ``@daily``,
    ``@midnight``, ``@weekly``, ``@monthly``, ``@yearly``, ``@annually``. A cron expression follows the local time of
    ``timezone``, as Debian's cron does: a fixed time that the clock skips ticks right after the gap, one that comes twice
    ticks the first time. ``text`` is the schedule as it is kept. Raises :class:`ConfigError`.
    """

    def __init__(self, schedule: float | timedelta | str, timezone: str = "UTC") -> None:
        self.timezone = timezone
        self._zone = _zone(timezone)
        self._step: int | None = None
        if isinstance(schedule, str):
            self.text = " ".join(schedule.split())
            self._cron = _NAMES.get(self.text.lower(), self.text)
            if len(self._cron.split()) != 5:
                raise ConfigError(
                    f"schedule {schedule[:80]!r}: write a cron expression of five fields (minute, hour, day of the month,"
                    f" month, day of the week), one of {', '.join(_NAMES)}, or a number of seconds"
                )
            try:
                first = next(self.after(0), None)
            except CronSimError as error:
                raise ConfigError(f"schedule {schedule[:80]!r}: {error}") from None
            if first is None:
                raise ConfigError(f"schedule {schedule[:80]!r}: there is no such day")
            return
        seconds = schedule.total_seconds() if isinstance(schedule, timedelta) else schedule
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not _is_interval(seconds):
            raise ConfigError(
                f"schedule {schedule!r}: an interval is a number of seconds, from {MIN_INTERVAL_S} to {MAX_INTERVAL_S:,}"
            )
        self._step = micros(seconds)
        self.text = str(int(seconds)) if seconds == int(seconds) else repr(seconds)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Ticks:
        """Those of a kept schedule."""
        text = str(row["schedule"])
        return cls(float(text) if text[0].isdigit() and " " not in text else text, row["timezone"])

    def local(self, at: int) -> datetime:
        """A time in the zone of the schedule."""
        return (_EPOCH + timedelta(microseconds=at)).astimezone(self._zone)

    def after(self, at: int) -> Iterator[int]:
        """The ticks after ``at``, in order."""
        if self._step is not None:
            yield from itertools.count(at + self._step, self._step)
        for each in CronSim(self._cron, self.local(at)):
            tick = from_datetime(each)
            if tick > at:  # in an hour that comes twice, an expression may go back to the first one
                yield (at := tick)

    def due(self, first: int, now: int) -> Due:
        """The ticks from ``first``, which is one, to ``now``."""
        if self._step is not None:
            count = (now - first) // self._step + 1
            last = first + (count - 1) * self._step
            kept = min(count, MAX_TICKS)
            return Due([last - n * self._step for n in reversed(range(kept))], count, last + self._step)
        ticks, count = deque([first], maxlen=MAX_TICKS), 1
        for tick in self.after(first):
            if tick > now:
                return Due(list(ticks), count, tick)
            ticks.append(tick)
            count += 1
        return Due(list(ticks), count, None)


def _is_interval(seconds: float) -> bool:
    return math.isfinite(seconds) and MIN_INTERVAL_S <= seconds <= MAX_INTERVAL_S


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError):
        raise ConfigError(
            f"timezone {name!r:.80}: write the name of a zone, such as Asia/Shanghai. A machine without a database of zones"
            " needs the package tzdata"
        ) from None


def chosen(missed: Missed, due: Due, on_time: int) -> Sequence[int]:
    """The due ticks whose Tasks are submitted: under ``skip`` the last one unless it was before ``on_time``, under ``once``
    the last one, under ``all`` the last :data:`MAX_TICKS`."""
    if missed == "all":
        return due.ticks
    last = due.ticks[-1]
    return [last] if missed == "once" or last >= on_time else []


# -- a schedule, as it is declared and as it is shown


@dataclass(frozen=True, slots=True)
class Schedule:
    """A declared schedule. ``worker``: the name of that of its Tasks; ``items`` returns the items of a tick (None: one,
    with the tick); ``options``: those of the submission."""

    name: str
    worker: str
    ticks: Ticks
    missed: Missed
    overlap: bool
    items: Callable[[datetime], Iterable[Any]] | None
    options: Mapping[str, Any]

    @property
    def columns(self) -> dict[str, Any]:
        """What its row has of the declaration."""
        return {
            "worker_name": self.worker, "schedule": self.ticks.text, "timezone": self.ticks.timezone,
            "missed": self.missed, "overlap": int(self.overlap),
        }  # fmt: skip

    @property
    def owner(self) -> str:
        """The owner of its Tasks."""
        return str(self.options.get("owner") or f"schedule:{self.name}")

    @property
    def keys(self) -> str:
        """What the idempotency keys of its Tasks begin with."""
        return f"{KEYS}{self.name}|"

    def items_of(self, at: int) -> list[Any]:
        """The items of a tick. Raises :class:`ItemsFailed`."""
        if self.items is None:
            return [{"tick": rfc3339(at)}]
        try:
            return list(self.items(self.ticks.local(at)))
        except Exception as error:
            raise ItemsFailed(f"items of schedule {self.name} raised {type(error).__name__}: {error}") from error


class ItemsFailed(Conflict):
    """The function that returns the items of a tick raised an exception."""


class ScheduleInfo(TypedDict):
    """A schedule."""

    name: str
    worker: str
    schedule: Annotated[str, "A cron expression, or a number of seconds."]
    timezone: str
    missed: Annotated[str, "Which missed ticks are made up for: skip (none), once (the last one), all."]
    overlap: Annotated[bool, "Whether a tick submits its Task while the one before is open."]
    enabled: bool
    declared: Annotated[bool, "A running process declares it."]
    next_at: Annotated[Time | None, "The next tick; null: it is switched off."]
    last_at: Annotated[Time | None, "The tick of the last Task."]
    last_task_id: int | None
    skipped: Annotated[int, "Ticks without a Task."]
    skipped_at: Annotated[Time | None, "The last of them."]
    skip_reason: Annotated[
        Literal["missed", "overlap", "empty", "refused"] | None,
        "Why: no process ran, the Task before was open, there was no item, or the items were refused.",
    ]
    error: Annotated[str | None, "Why the last tick has no Task, if it failed."]
    registered_at: Annotated[Time, "Since when it ticks as it does."]


_s, _t = schedules.c, tasks.c


def _shown(row: Mapping[str, Any], now: int) -> ScheduleInfo:
    return {
        "name": row["name"],
        "worker": row["worker_name"],
        "schedule": row["schedule"],
        "timezone": row["timezone"],
        "missed": row["missed"],
        "overlap": bool(row["overlap"]),
        "enabled": bool(row["enabled"]),
        "declared": _is_declared(row, now),
        "next_at": rfc3339(row["next_at"]),
        "last_at": rfc3339(row["last_at"]),
        "last_task_id": row["last_task"],
        "skipped": row["skipped"],
        "skipped_at": rfc3339(row["skipped_at"]),
        "skip_reason": row["skip_reason"],
        "error": row["error"],
        "registered_at": rfc3339(row["registered_at"]),
    }


def _is_declared(row: Mapping[str, Any], now: int) -> bool:
    return bool(row["seen_at"] >= now - micros(GONE_S))


# -- the schedules of an application


class Schedules:
    """The schedules that an application declares, and their rows; as ``app.schedules``.

    Arguments: ``ledger`` returns the ledger of this process; ``submit`` submits a list as
    :meth:`asynctask.AsyncTask.submit_items` does. Every method may raise LedgerUnavailable.
    """

    def __init__(self, ledger: Callable[[], Ledger], ids: Ids, submit: Callable[..., Any]) -> None:
        self._ledger = ledger
        self._ids = ids
        self._submit = submit
        self._log = get_logger("asynctask.schedules")
        self.declared: dict[str, Schedule] = {}
        """Those of this application's code, by name."""

    def add(self, schedule: Schedule) -> None:
        """Adds a declared schedule. Raises :class:`ConfigError` for an invalid name, or one that another has."""
        name = schedule.name
        if not 0 < len(name) <= MAX_NAME or clean(name) != name or "|" in name or "/" in name:
            raise ConfigError(f"a schedule's name has 1 to {MAX_NAME} characters, without | and /: {name!r:.200}")
        if name in self.declared:
            raise ConfigError(f"two schedules are named {name!r}; give one of them another name=")
        self.declared[name] = schedule

    # -- what people see and do

    def all(self) -> list[ScheduleInfo]:
        """Every schedule that a process has declared, by name."""
        ledger = self._ledger()
        with ledger.database.read() as connection:
            found = connection.execute(sa.select(schedules).order_by(_s.name)).all()
        return [_shown(as_dict(row), ledger.now()) for row in found]

    def find(self, name: str) -> ScheduleInfo:
        """One schedule. Raises :class:`NotFound`."""
        return _shown(self._row(name), self._ledger().now())

    def run(self, name: str, *, who: str = "") -> Any:
        """Submits a Task of a schedule now, whether it is switched on or not; returns the Task's handle. ``items`` is
        called with the current time.

        Raises :class:`NotFound`; :class:`Conflict` if this application does not declare it, if a Task of it is open and may
        not overlap, or if there are no items; as :meth:`asynctask.AsyncTask.submit_items`.
        """
        schedule = self.declared.get(name)
        if schedule is None:
            self._row(name)
            raise Conflict(f"this application does not declare the schedule {name}: run it from one that does")
        now = self._ledger().now()
        if not schedule.overlap and (task_id := self._open_task(schedule)) is not None:
            raise Conflict(f"Task {task_id} of schedule {name} is open: wait for its end, or cancel it")
        if not (items := schedule.items_of(now)):
            raise Conflict(f"schedule {name} has no items now")
        handle = self._submitted(schedule, items, f"run|{self._ids.jid()}", who)
        self._write(_s.name == name, last_at=now, last_task=handle.id, error=None)
        return handle

    def switch(self, name: str, enabled: bool) -> bool:
        """Switches a schedule on or off. Ticks while it is off are not missed ones. Returns False if it was so already.
        Raises :class:`NotFound`."""
        row = self._row(name)
        if bool(row["enabled"]) == enabled:
            return False
        following = next(Ticks.of_row(row).after(self._ledger().now()), None) if enabled else None
        return self._write((_s.name == name) & (_s.enabled != int(enabled)), enabled=int(enabled), next_at=following)

    def remove(self, name: str) -> None:
        """Removes a schedule that no process declares any more. Raises :class:`NotFound`, :class:`Conflict`."""
        row, ledger = self._row(name), self._ledger()
        if _is_declared(row, ledger.now()):
            raise Conflict(
                f"a process declares the schedule {name}: remove it from the code and restart; {GONE_S:g} s later it can be"
                " removed. To keep it from ticking, switch it off"
            )
        _remove(ledger, name, row["seen_at"])

    def _row(self, name: str) -> dict[str, Any]:
        found = self._rows([name]).get(name) if 0 < len(name) <= MAX_NAME and "\0" not in name else None
        if found is None:
            raise NotFound(f"there is no schedule {clean(name)[:MAX_NAME]!r}")
        return found

    def _rows(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        with self._ledger().database.read() as connection:
            found = connection.execute(sa.select(schedules).where(_s.name.in_(list(names)))).all()
        return {row.name: as_dict(row) for row in found}

    def _write(self, where: Any, **values: Any) -> bool:
        return _update(self._ledger(), where, values)

    # -- the ticks

    def register(self, now: int) -> None:
        """Writes the declared schedules, at the start of a process. One that ticks at other times than before gets its next
        tick anew. Whether it is switched on is kept."""
        rows = self._rows(self.declared)
        for schedule in self.declared.values():
            self._declare(schedule, rows.get(schedule.name), now)

    def tick(self, now: int, since: int | None = None) -> int | None:
        """Submits the Tasks of the ticks that are due at ``now`` (microseconds). Returns when the next is due, None if none
        is known. The failure of one schedule is recorded, and does not keep the others.

        ``since``: the ``now`` of this process's look before. A tick after it is on time: where it is late, the items of
        another one took long.
        """
        rows, on_time = self._rows(self.declared), now - micros(LATE_S)
        on_time = on_time if since is None else min(on_time, since)
        upcoming = []
        for schedule in self.declared.values():
            row = rows.get(schedule.name)
            if row is None or any(row[name] != value for name, value in schedule.columns.items()):
                if row is None or not _is_declared(row, now):  # else a process with other code declares it
                    self._declare(schedule, row, now)
                continue
            if row["seen_at"] < now - micros(SEEN_S):
                self._write((_s.name == schedule.name) & (_s.seen_at < now), seen_at=now)
            following: int | None = row["next_at"]
            if following is not None and following <= now:
                following = self._advance_or_note(schedule, following, now, on_time)
            if following is not None:
                upcoming.append(following)
        return min(upcoming, default=None)

    def _declare(self, schedule: Schedule, row: Mapping[str, Any] | None, now: int) -> None:
        values = {**schedule.columns, "seen_at": now}
        moved = row is None or any(row[name] != values[name] for name in ("schedule", "timezone"))
        if moved:
            is_on = row is None or row["enabled"]
            values |= {"registered_at": now, "next_at": next(schedule.ticks.after(now), None) if is_on else None}
        if row is None:
            _insert(self._ledger(), {"name": schedule.name, **values})
        else:
            as_read = (schedules.c[name] == row[name] for name in schedule.columns)
            self._write(sa.and_(_s.name == schedule.name, *as_read), **values)

    def _advance_or_note(self, schedule: Schedule, first: int, now: int, on_time: int) -> int | None:
        try:
            return self._advance(schedule, first, now, on_time)
        except Unavailable:
            raise
        except Exception as error:  # of its items, for example: tried again with the next look
            self._log.exception("schedule_failed", schedule=schedule.name)
            self._write(_s.name == schedule.name, error=_text(error))
            return now + micros(LOOK_S)

    def _advance(self, schedule: Schedule, first: int, now: int, on_time: int) -> int | None:
        """Submits what is due from the tick ``first`` on, and moves the row after each Task. Returns the next tick."""
        due = schedule.ticks.due(first, now)
        wanted = chosen(schedule.missed, due, on_time)
        if missed := due.total - len(wanted):
            self._log.warning("ticks_missed", schedule=schedule.name, count=missed)
            resumed = wanted[0] if wanted else due.following
            last = next((tick for tick in reversed(due.ticks) if tick not in wanted), first)
            if not self._move(schedule, first, next_at=resumed, **_skip(last, "missed", missed)):
                return now  # another process has moved it: look again
        for tick, following in zip(wanted, [*wanted[1:], due.following], strict=False):
            if not self._move(schedule, tick, next_at=following, **self._outcome(schedule, tick)):
                return now
        return due.following

    def _outcome(self, schedule: Schedule, tick: int) -> dict[str, Any]:
        """Submits the Task of a tick, unless one was submitted or it is skipped. Returns what its row then has."""
        key = rfc3339(tick)
        task_id, reason = self._task_of(schedule, key), ""
        if task_id is None and not schedule.overlap and schedule.missed != "all":
            reason = "overlap" if self._open_task(schedule) is not None else ""
        if task_id is None and not reason:
            try:
                items = schedule.items_of(tick)
                reason = "" if items else "empty"
                task_id = self._submitted(schedule, items, key).id if items else None
            except ItemsFailed:
                raise
            except (InputError, Conflict) as error:
                # Another process may have submitted it with other items. An error of the list comes with each attempt.
                if (task_id := self._task_of(schedule, key)) is None:
                    self._log.warning("schedule_refused", schedule=schedule.name, tick=key, error=str(error))
                    return {**_skip(tick, "refused"), "error": _text(error)}
        if task_id is None:
            self._log.info("tick_skipped", schedule=schedule.name, tick=key, reason=reason)
            return _skip(tick, reason)
        self._log.info("tick_submitted", schedule=schedule.name, tick=key, task_id=task_id)
        return {"last_at": tick, "last_task": task_id, "error": None}

    def _submitted(self, schedule: Schedule, items: Sequence[Any], key: str, who: str = "") -> Any:
        options = {"title": schedule.name, **schedule.options, "owner": schedule.owner}
        if schedule.missed == "all" and not schedule.overlap:  # no tick is skipped: they run one after the other
            options.setdefault("session", f"schedule:{schedule.name}")
        who = who or f"schedule {schedule.name}"
        return self._submit(schedule.worker, items, wait_s=0.0, who=who, **options, idempotency_key=schedule.keys + key)

    def _task_of(self, schedule: Schedule, key: str) -> int | None:
        mine = (_t.owner == schedule.owner) & (_t.idempotency_key == schedule.keys + key)
        with self._ledger().database.read() as connection:
            return connection.execute(sa.select(_t.id).where(mine)).scalar()

    def _open_task(self, schedule: Schedule) -> int | None:
        """A Task of the schedule that is not done."""
        mine = (_t.owner == schedule.owner) & _t.idempotency_key.startswith(schedule.keys, autoescape=True)
        statement = sa.select(_t.id, _t.idempotency_key).where(_t.finished_at.is_(None), mine)
        with self._ledger().database.read() as connection:
            found = connection.execute(statement).all()
        return next((int(i) for i, key in found if key.startswith(schedule.keys)), None)  # SQLite's LIKE ignores case

    def _move(self, schedule: Schedule, tick: int, **values: Any) -> bool:
        """Moves the row on from a tick; False if another process has done so, or declares other times."""
        times = (_s.schedule == schedule.ticks.text) & (_s.timezone == schedule.ticks.timezone)
        its = (_s.name == schedule.name) & times
        if self._write(its & (_s.next_at == tick), **values):
            return True
        if "last_task" in values:  # the other one may have skipped the tick, because the Task before had not ended then
            values.pop("next_at")
            self._write(its & (_s.last_at.is_(None) | (_s.last_at < tick)), **values)
        return False


def _skip(tick: int, reason: str, count: int = 1) -> dict[str, Any]:
    return {"skipped": _s.skipped + count, "skipped_at": tick, "skip_reason": reason}


def _text(error: Exception) -> str:
    return clean(f"{type(error).__name__}: {error}")[:1_000]


@repeatable
def _update(ledger: Ledger, where: Any, values: Mapping[str, Any]) -> bool:
    with ledger.database.write() as connection:
        return connection.execute(schedules.update().where(where).values(values)).rowcount == 1


def _insert(ledger: Ledger, values: Mapping[str, Any]) -> None:
    try:
        _insert_one(ledger, values)
    except exc.IntegrityError:  # another process was first; if it declares another one, the next look says so
        pass


@repeatable
def _insert_one(ledger: Ledger, values: Mapping[str, Any]) -> None:
    with ledger.database.write() as connection:
        connection.execute(schedules.insert().values(values))


@repeatable
def _remove(ledger: Ledger, name: str, seen_at: int) -> None:
    with ledger.database.write() as connection:
        connection.execute(schedules.delete().where(_s.name == name, _s.seen_at == seen_at))


# -- the thread of a process


class Ticker:
    """Looks for due ticks in a thread of its own, because the items of a tick are made by the application's code. Without a
    declared schedule there is no thread."""

    def __init__(self, found: Schedules, ledger: Ledger, ids: Ids) -> None:
        self._schedules = found
        self._ledger = ledger
        self._ids = ids
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._log = get_logger("asynctask.schedules")

    def start(self) -> None:
        """Starts the thread."""
        if self._schedules.declared:
            self._thread = threading.Thread(target=self._run, name="schedules", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread. A tick that it is submitting is left to other processes."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        since: int | None = None
        while not self._stop.is_set():
            pause_s = LOOK_S
            try:
                now = self._ledger.now()
                if since is None:
                    self._schedules.register(now)
                following = self._schedules.tick(now, since)
                since = now
                if following is not None:
                    until_s = (following - self._ledger.now()) / SECOND + self._ids.random() * SPREAD_S
                    pause_s = min(max(until_s, 0.0), LOOK_S)
            except Unavailable as error:
                self._log.retrying("schedules_put_off", error=str(error))
            except Exception:
                self._log.exception("schedules_failed")
            self._stop.wait(pause_s)
