"""Clock, ids and randomness: the only module that asks the machine for them.

Everything else takes a :class:`Clock` and an :class:`Ids` as arguments, so that a test decides what time it is and which
numbers come next. Times inside the program are integers: microseconds since 1970-01-01 UTC. They become RFC 3339 text
only where they leave it.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Annotated, Final, Protocol, overload

SECOND: Final = 1_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_S: Final = -30_610_224_000  # the year 1000: four digits from here
_LAST_S: Final = 253_402_300_799  # 9999-12-31T23:59:59
_BOOTTIME: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux alone has the first


class Clock(Protocol):
    """What time it is."""

    def now(self) -> int:
        """The wall clock: microseconds since 1970-01-01 UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back, for measuring durations within one process."""
        ...

    def boottime(self) -> int:
        """Microseconds of a clock that never goes back and, unlike :meth:`monotonic`, goes on while the machine is
        suspended: for leases, which others count in real time."""
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
    """Where new ids and random numbers come from."""

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

    A jid is 8 hex digits of seconds, then 16 random ones: neighbours in time are neighbours in the index on ``job_id``,
    which keeps inserts cheap when the table holds a million rows.
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
    # Messages come in storms of the same millisecond.
    seconds, rest = divmod(milliseconds, 1000)
    return f"{_to_the_second(seconds)}.{rest:03d}Z"


@lru_cache(maxsize=256)
def _to_the_second(seconds: int) -> str:
    # What others write as a time may be none: the nearest that is, for one of them must not hide a whole list.
    return (_EPOCH + timedelta(seconds=min(max(seconds, _FIRST_S), _LAST_S))).strftime("%Y-%m-%dT%H:%M:%S")


def hostname(names: Iterable[str] = ("DYNO",)) -> str:
    """This machine's name; on platforms that give a dyno a name, that one."""
    for name in names:
        if value := os.environ.get(name):
            return value
    return socket.gethostname()


LONGEST_BACKOFF_S: Final = 5.0
"""Everybody has noticed this long after a server is back."""

_FIRST_BACKOFF_S: Final = 0.2
_MAX_DOUBLINGS: Final = 10  # tries go on for days, and a float ends at 2 to the power of 1,024


def backoff_s(tries: int) -> float:
    """Seconds before a server is asked again after ``tries`` (at least one) failed: doubles, up to
    :data:`LONGEST_BACKOFF_S`."""
    return min(_FIRST_BACKOFF_S * (1 << min(tries - 1, _MAX_DOUBLINGS)), LONGEST_BACKOFF_S)
