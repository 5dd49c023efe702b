"""Clock, ids and randomness: the only module that reads them from the machine.

All other modules take a :class:`Clock` and an :class:`Ids` as arguments, so that tests control both. Times inside the
program are integers, microseconds since 1970-01-01 UTC; at its interfaces they are RFC 3339 text.
"""

from __future__ import annotations

import os
import random
import re
import socket
import time
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Annotated, Final, Protocol, overload

SECOND: Final = 1_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_S: Final = -30_610_224_000  # the year 1000, the first one with four digits
_LAST_S: Final = 253_402_300_799  # 9999-12-31T23:59:59
_BOOTTIME: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # only Linux has the former


class Clock(Protocol):
    """A source of time."""

    def now(self) -> int:
        """The wall clock: microseconds since 1970-01-01 UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back, for measuring durations within one process."""
        ...

    def boottime(self) -> int:
        """Microseconds of a clock that never goes back and, unlike :meth:`monotonic`, runs while the machine is suspended;
        for leases, which other machines measure in real time."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> int:
        return time.time_ns() // 1000

    def monotonic(self) -> float:
        return time.monotonic()

    def boottime(self) -> int:
        return time.clock_gettime_ns(_BOOTTIME) // 1000


class Ids(Protocol):
    """A source of ids and random numbers."""

    def jid(self) -> str:
        """A job id: 24 lower-case hex digits."""
        ...

    def jids(self, count: int) -> list[str]:
        """``count`` job ids at once."""
        ...

    def nonce(self) -> str:
        """12 lower-case hex digits, once per process life."""
        ...

    def random(self) -> float:
        """A number in [0, 1)."""
        ...


class SystemIds:
    """Ids from the operating system's randomness.

    A jid is 8 hex digits of seconds and 16 random ones, so jobs of the same time are adjacent in the index on ``job_id``,
    and inserts stay cheap with a million rows.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._random = random.SystemRandom()

    def jid(self) -> str:
        return self.jids(1)[0]

    def jids(self, count: int) -> list[str]:
        prefix = f"{self._clock.now() // SECOND & 0xFFFFFFFF:08x}"
        noise = os.urandom(8 * count).hex()
        return [prefix + noise[i : i + 16] for i in range(0, 16 * count, 16)]

    def nonce(self) -> str:
        return os.urandom(6).hex()

    def random(self) -> float:
        return self._random.random()


def micros(seconds: float) -> int:
    """Seconds as whole microseconds."""
    return round(seconds * SECOND)


def from_datetime(when: datetime) -> int:
    """An aware datetime as microseconds since 1970-01-01 UTC. Raises ValueError for a naive one."""
    if when.tzinfo is None:
        raise ValueError("a time without a zone is ambiguous: give an aware datetime, e.g. datetime.now(UTC)")
    return (when - _EPOCH) // timedelta(microseconds=1)


_RFC3339: Final = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def read_rfc3339(text: str) -> datetime:
    """A time of RFC 3339, aware. Raises ValueError."""
    if _RFC3339.fullmatch(text) is None:
        raise ValueError("must be a time of RFC 3339, such as 2026-11-21T05:12:31.000Z")
    return datetime.fromisoformat(text.upper())


Time = Annotated[str, "RFC 3339, UTC"]


@overload
def rfc3339(at: int) -> str: ...


@overload
def rfc3339(at: int | None) -> str | None: ...


def rfc3339(at: int | None) -> str | None:
    """Microseconds since the epoch as RFC 3339 text in UTC with milliseconds; None stays None."""
    return None if at is None else _to_the_millisecond(at // 1000)


@lru_cache(maxsize=256)
def _to_the_millisecond(milliseconds: int) -> str:
    # Cached: many messages have the same millisecond.
    seconds, rest = divmod(milliseconds, 1000)
    return f"{_to_the_second(seconds)}.{rest:03d}Z"


@lru_cache(maxsize=256)
def _to_the_second(seconds: int) -> str:
    # Another program may write an invalid time: use the nearest valid one, so that one entry does not hide a whole list.
    return (_EPOCH + timedelta(seconds=min(max(seconds, _FIRST_S), _LAST_S))).strftime("%Y-%m-%dT%H:%M:%S")


def hostname() -> str:
    """This machine's name; on platforms that name dynos, the dyno's name."""
    return os.environ.get("DYNO") or socket.gethostname()


LONGEST_BACKOFF_S: Final = 5.0
"""Longest delay, in seconds, after which a process notices that a server is available again."""

_FIRST_BACKOFF_S: Final = 0.2
_MAX_DOUBLINGS: Final = 10  # attempts may continue for days, and a float overflows at 2 to the power of 1,024


def backoff_s(tries: int) -> float:
    """Seconds to wait after ``tries`` (at least one) failed requests to a server; doubles up to
    :data:`LONGEST_BACKOFF_S`."""
    return min(_FIRST_BACKOFF_S * (1 << min(tries - 1, _MAX_DOUBLINGS)), LONGEST_BACKOFF_S)
