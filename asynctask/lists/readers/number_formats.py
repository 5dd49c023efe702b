"""What a number in a cell stands for: spreadsheets keep dates and times as days, and only the cell's format says so."""

# ruff: noqa: DTZ901 - the times of a sheet have no zone
from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from functools import lru_cache
from typing import Any, Final

from asynctask.lists.readers.base import CellError

__all__ = [
    "BUILT_IN",
    "DATE",
    "DURATION",
    "MOMENT",
    "NUMBER",
    "TIME",
    "classify",
    "from_iso",
    "from_serial",
    "plain_number",
    "tidy",
]

NUMBER: Final = ""
DATE: Final = "date"
MOMENT: Final = "moment"
TIME: Final = "time"
DURATION: Final = "duration"

BUILT_IN: Final[dict[int, str]] = {
    **dict.fromkeys([14, 15, 16, 17], DATE),
    **dict.fromkeys([18, 19, 20, 21, 45, 47], TIME),
    22: MOMENT,
    46: DURATION,
    # Dates of East Asian Excels; 32 to 35, 55 and 56 are times there.
    **dict.fromkeys([27, 28, 29, 30, 31, 36, 50, 51, 52, 53, 54, 57, 58], DATE),
    **dict.fromkeys([32, 33, 34, 35, 55, 56], TIME),
}
"""The formats that have a number and no text of their own."""

_LITERALS: Final = re.compile(r'"[^"]*"?|\\.|[_*].')
_ELAPSED: Final = re.compile(r"\[(?:h+|m+|s+)\]", re.IGNORECASE)
_BRACKETS: Final = re.compile(r"\[[^\[\]]*\]")
_CONDITION: Final = re.compile(
    r"\[ *(<=|>=|<>|<|>|=) *([+-]?[0-9]{1,15}(?:\.[0-9]{0,15})?(?:E[+-]?[0-9]{1,2})?) *\]", re.IGNORECASE
)
_COMPARE: Final[dict[str, Callable[[float, float], bool]]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq, "<>": operator.ne,
}  # fmt: skip
_EXACT: Final = 2**53
_INT64: Final = 2**63
_DAY_MS: Final = 86_400_000
_EPOCH_1900, _EPOCH_1904 = date(1899, 12, 30), date(1904, 1, 1)
_LAST_DAY: Final = 2_958_465
_LEAP_BUG: Final = 60
"""Excel counts a 29 February 1900: that day does not exist, and those before it are off by one."""


def classify(code: str) -> str:
    """What a number format shows: :data:`NUMBER`, :data:`DATE`, :data:`MOMENT` (both), :data:`TIME` or :data:`DURATION`.

    Where that depends on the number, ``[<1]h:mm;yyyy-mm-dd`` for instance, it is written the same way, as
    ``[<1]time;[]date``; :func:`from_serial` takes that as well.
    """
    sections = _LITERALS.sub("", code[:1_000]).split(";")[:3]
    if not any(map(_CONDITION.search, sections)):
        return _shows(sections[0])
    kinds = [_shows(section) for section in sections]
    if len(set(kinds)) == 1:
        return kinds[0]
    tests = [f"[{found[1]}{found[2]}]" if (found := _CONDITION.search(section)) else "[]" for section in sections]
    if len(tests) == 3 and tests[1] == "[]":
        tests[1] = "[<0]"  # as spreadsheets have it where a third part is for the rest
    return ";".join(map("".join, zip(tests, kinds, strict=True)))


def _shows(code: str) -> str:
    """What one part of a number format shows."""
    if _ELAPSED.search(code):
        return DURATION
    letters = _BRACKETS.sub("", code).lower()
    if letters.strip() in {"general", "standard", "@"}:
        return NUMBER
    days = any(letter in letters for letter in "dy") or ("g" in letters and "e" in letters and "general" not in letters)
    hours = any(letter in letters for letter in "hs")
    if days:
        return MOMENT if hours else DATE
    if hours:
        return TIME
    return DATE if "m" in letters else NUMBER


def plain_number(text: bytes) -> Any:
    """The number that a workbook has written: an int where it is whole, else a float.

    Beyond 2**53 a spreadsheet keeps 15 digits and shows zeros for the rest, and so do we. What is beyond a double is the
    error that a spreadsheet would show. Raises ValueError for what is no number.
    """
    if len(text) <= 15 and text.isdigit():
        return int(text)
    if b"_" in text:
        raise ValueError("no number")
    return tidy(float(text))


def tidy(value: float) -> Any:
    """A double as it is handed on; see :func:`plain_number`."""
    if not math.isfinite(value):
        return CellError("#NUM!")
    if not value.is_integer():
        return value
    if -_EXACT < value < _EXACT:
        return int(value)
    digits = f"{value:.14e}"
    if abs(value) >= _INT64:
        return float(digits)
    mantissa, _, exponent = digits.partition("e")
    return int(mantissa.replace(".", "")) * 10 ** (int(exponent) - 14)


def from_serial(value: Any, kind: str, *, epoch_1904: bool) -> Any:
    """The date or time that a number of days stands for, under a format of ``kind``.

    A whole number is a date (a datetime where the format shows a time), one with a fraction a datetime, one below 1 a
    time; under a format of elapsed time it is a timedelta. A number that is no day of any calendar stays a number.
    """
    if kind[:1] == "[" and isinstance(value, int | float):
        kind = _kind_of(value, kind)
        if kind == NUMBER:
            return value
    if type(value) is int and kind == DATE and _LEAP_BUG < value <= _LAST_DAY and not epoch_1904:
        return _EPOCH_1900 + timedelta(value)
    if not isinstance(value, int | float):
        return value
    try:
        milliseconds = round(value * _DAY_MS)
        if kind == DURATION:
            return timedelta(milliseconds=milliseconds)
        days, rest = divmod(milliseconds, _DAY_MS)
        if value < 0 or days > _LAST_DAY:
            return value
        clock = (datetime.min + timedelta(milliseconds=rest)).time()
        if value < 1 and (kind != DATE or value > 0) and not (epoch_1904 and kind in (DATE, MOMENT)):
            return clock
        day = _day(days, epoch_1904)
    except (OverflowError, ValueError):
        return value
    if day is None:
        return value
    return day if not rest and kind == DATE else datetime.combine(day, clock)


def _kind_of(value: float, conditions: str) -> str:
    """What a format with conditions shows of a number; one that meets none is shown by the first part."""
    parts = _conditions(conditions)
    return next((kind for compare, bound, kind in parts if compare is None or compare(value, bound)), parts[0][2])


@lru_cache(maxsize=1_000)
def _conditions(text: str) -> list[tuple[Callable[[float, float], bool] | None, float, str]]:
    found: list[tuple[Callable[[float, float], bool] | None, float, str]] = []
    for part in text.split(";"):
        test, _, kind = part[1:].partition("]")
        sign = test.rstrip("0123456789.eE+-")
        found.append((_COMPARE.get(sign), float(test[len(sign) :] or 0), kind))
    return found


def _day(days: int, epoch_1904: bool) -> date | None:
    if epoch_1904:
        return _EPOCH_1904 + timedelta(days)
    if days > _LEAP_BUG:
        return _EPOCH_1900 + timedelta(days)
    return _EPOCH_1900 + timedelta(days + 1) if 0 < days < _LEAP_BUG else None


def from_iso(text: str, kind: str = DATE) -> Any:
    """The date, datetime or time of an ISO 8601 text; the text itself where it is none.

    A midnight under a format that shows no time is a date.
    """
    text = text.strip()
    try:
        if text[:1] == "T" or ":" in text[:6]:
            return time.fromisoformat(text.removeprefix("T")).replace(tzinfo=None)
        if len(text) <= 10:
            return date.fromisoformat(text)
        moment = datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        return text or None
    return moment.date() if kind == DATE and moment.time() == time() else moment
