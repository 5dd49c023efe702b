"""When a job is due, as callers say it: a span from now, or a point in time."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import Any, Final

from asynctask.clock import SECOND, from_datetime, micros
from asynctask.errors import InputError

__all__ = ["EPOCH_FROM_S", "BadTime", "When", "due_at"]

EPOCH_FROM_S: Final = 1_000_000_000
"""A number of seconds from here on is a time since 1970, a smaller one is a span from now, as in Sidekiq."""

_LAST_S: Final = 253_402_300_800  # the year 10,000: what no clock and no database can say

When = float | timedelta | datetime
"""Seconds (a span, or since 1970), a timedelta, or an aware datetime."""


class BadTime(InputError, ValueError):
    """What somebody gave as a time is none."""

    code = "bad_time"


def due_at(when: When, now: int) -> int:
    """When a job is due that was asked for at ``now``; both in microseconds since 1970.

    Raises :class:`BadTime` for a naive datetime, for what is no number, and for times after the year 9999.
    """
    at = _moment(when, now)
    if abs(at) >= _LAST_S * SECOND:
        raise BadTime(f"{when!r} is too far away: give a time before the year 10,000, in seconds")
    return at


def _moment(when: Any, now: int) -> int:
    if isinstance(when, timedelta):
        return now + when // timedelta(microseconds=1)
    if isinstance(when, datetime):
        try:
            return from_datetime(when)
        except ValueError as error:
            raise BadTime(str(error)) from None
    if isinstance(when, bool) or not isinstance(when, int | float) or not math.isfinite(when):
        raise BadTime(f"{when!r} is no time: give seconds, a timedelta or an aware datetime")
    return micros(when) + (now if when < EPOCH_FROM_S else 0)
