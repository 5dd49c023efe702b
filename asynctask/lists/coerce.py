"""Converts cells as people type them to the type of a field: numbers, dates and booleans written as text.

Only unambiguous text is converted. Anything else reaches the model unchanged, or is refused here if the model would
misread it, the number 86400 as a date for instance.
"""

from __future__ import annotations

import math
import re
import types
import unicodedata
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Union, get_args, get_origin

import orjson

from asynctask.errors import InputError
from asynctask.lists.readers.base import Formatted
from asynctask.lists.readers.json import check_depth, doubled_key

if TYPE_CHECKING:
    from pydantic import BaseModel

Coercer = Callable[[Any], Any]
_YES: Final = frozenset({"yes", "y", "true", "t", "on", "1", "是", "はい"})
_NO: Final = frozenset({"no", "n", "false", "f", "off", "0", "否", "いいえ"})
_EXPONENT: Final = r"[eE][+-]?\d{1,3}"
_POINT: Final = re.compile(
    rf"[+-]?(?:\d{{1,400}}(?:\.\d{{0,400}})?(?:{_EXPONENT})?"
    r"|[1-9]\d{0,2}([, '])\d{3}(?:\1\d{3})*(?:\.\d{0,400})?|[1-9]\d?(?:,\d{2})+,\d{3}(?:\.\d{0,400})?)"
)
"""A number with a decimal point: plain, with thousands, or grouped as in India (12,34,567)."""
_COMMA: Final = re.compile(
    rf"[+-]?(?:\d{{1,400}}|(?:0|[1-9]\d{{0,399}}),\d{{1,400}}(?:{_EXPONENT})?"
    r"|[1-9]\d{0,2}([. '])\d{3}(?:\1\d{3})*(?:,\d{1,400})?)"
)
"""A number with a decimal comma."""
_DROPPED: Final = str.maketrans("", "", ", '"), str.maketrans(",", ".", ". '")
_NUMBERS: Final = (int, float, Decimal)
_DATE_YMD: Final = re.compile(
    r"(\d{4})(?:-(\d{1,2})-(\d{1,2})|/(\d{1,2})/(\d{1,2})|\.(\d{1,2})\.(\d{1,2})|年(\d{1,2})月(\d{1,2})日)"
)
_DATE_DMY: Final = re.compile(r"(\d{1,2})\.(\d{1,2})\.(\d{4})")
_DATE_SLASH: Final = re.compile(r"(\d{1,2})[/-](\d{1,2})[/-](\d{4})")
_TIME: Final = re.compile(r"\d{1,2}:\d{2}(?::\d{2}(?:\.\d{1,6})?)?(?:\s?(?:Z|[+-]\d{2}:?\d{2}))?")
_CLOCK: Final = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2})(?:\.(\d{1,6}))?)?(?:\s?([ap])\.?m\.?)?", re.IGNORECASE)
_SPAN: Final = re.compile(r"([+-]?)(\d{1,6}):(\d{2})(?::(\d{2})(?:\.(\d{1,6}))?)?")
_SEPARATOR: Final = re.compile(r"[Tt]|\s+")
_LONGEST: Final = 1_000
_EXACT: Final = 1e15
"""Below it a spreadsheet's 15 digits include the units."""
_DEEPEST: Final = 32
"""Nesting of JSON in a cell."""
_SIZE: Final = re.compile(r"\s*\d*\.?\d+\s*\w*\s*")
_WITH_TIME: Final = {
    "date_cell": "datetime_cell", "date_unreadable": "datetime_unreadable", "ambiguous_date": "ambiguous_datetime",
}  # fmt: skip


# -- how a column writes numbers: flags of what was found

POINT, COMMA = 1, 2
"""A cell can only be read with a decimal point, or only with a decimal comma."""
BETWEEN: Final = 4
"""Commas stand between the cells of the text: its decimals have points."""
JSON: Final = 8
"""A JSON text: its decimals have points, as JSON numbers have; a group of thousands is uncertain."""
Notation = Callable[[], int]
"""The flags of a column. It is called only for a cell that can be read in two ways, because finding out reads the list."""


class Unclear(Exception):
    """A cell that cannot be converted; ``code``, ``text`` and ``params`` as of a :class:`~asynctask.errors.Problem`."""

    def __init__(self, code: str, text: str, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(text)
        self.code, self.text, self.params = code, text, params or {}


def allows_none(annotation: Any) -> bool:
    """Whether an annotation allows None."""
    found = members(annotation)
    return type(None) in found or None in found or Any in found


def kind_of(annotation: Any) -> Any:
    """The single type of an annotation without None and wrappers: ``int``, ``Decimal``, ``date``...; None for any other."""
    found = kinds_of(annotation)
    return _kind(found[0]) if len(found) == 1 else None


def kinds_of(annotation: Any) -> list[Any]:
    """The alternatives of an annotation but None."""
    return [each for each in members(annotation) if each not in (None, type(None))]


def _with_points() -> int:
    return POINT


def plain_notation() -> int:
    """The :data:`Notation` of JSON, and of any text whose column is unknown."""
    return JSON


def coercer_for(annotation: Any, *, sheet: bool, notation: Notation | None = None) -> Coercer | None:
    """The function that converts a cell to an annotation's type; None if the model should see every cell unchanged.

    ``sheet``: cells of a sheet, where a number is never a timestamp and has at most 15 digits; else values from JSON.
    ``notation``: how the column writes numbers, by default with decimal points. The function raises :class:`Unclear`.
    """
    kind = kind_of(annotation)
    notation = (notation or _with_points) if sheet else plain_notation
    if kind is datetime or kind is date:
        return _moment(kind, sheet)
    if kind in _NUMBERS or is_number(annotation):
        return _numeric(kind, sheet, notation)
    if kind is str:
        return text_of_cell if sheet else _text_of_json
    if sheet and kind in (time, timedelta):
        return _clock if kind is time else _span
    if sheet and _holds_values(annotation):
        return _structure
    return _boolean if kind is bool else None


def is_number(annotation: Any) -> bool:
    """Whether every alternative but None is a number, of one type or several."""
    found = kinds_of(annotation)
    return bool(found) and all(_kind(each) in _NUMBERS for each in found)


def by_model(coerce: Coercer, annotation: Any) -> Coercer:
    """``coerce`` for a field that reads texts by a validator of its own: a text reaches it as it is. But ``ByteSize`` reads
    the beginning of a text: 1 of 1,5 GB."""
    sizes = any(getattr(each, "byte_string_re", None) is not None for each in members(annotation))

    def convert(value: Any) -> Any:
        if not isinstance(value, str):
            return coerce(value)
        if sizes and not _SIZE.fullmatch(value):
            raise Unclear("wrong_type", "number")
        return value

    return convert


def own_syntax(model: type[BaseModel]) -> frozenset[str]:
    """The fields of a model that do not read a text as pydantic does: ``ByteSize``, or one with a validator before it.

    Constraints and validators after the type's own do not count.
    """
    schema: Any = getattr(model, "__pydantic_core_schema__", None)
    known: dict[str, Any] = {}
    while isinstance(schema, Mapping) and schema.get("type") != "model-fields":
        known.update({each["ref"]: each for each in schema.get("definitions", ())})
        schema = known.get(schema["schema_ref"]) if "schema_ref" in schema else schema.get("schema")
    fields = schema["fields"] if isinstance(schema, Mapping) else {}
    return frozenset(name for name, field in fields.items() if not _is_plain(field["schema"], known))


def _is_plain(schema: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    kind = schema["type"]
    if kind == "definition-ref":
        return schema["schema_ref"] in known and _is_plain(known[schema["schema_ref"]], {})
    if kind == "union":
        return all(_is_plain(each[0] if isinstance(each, tuple) else each, known) for each in schema["choices"])
    return _is_plain(schema["schema"], known) if kind in _WRAPPERS else kind in _PLAIN_TYPES


_WRAPPERS: Final = frozenset({"default", "nullable", "function-after"})
_PLAIN_TYPES: Final = frozenset({"int", "float", "decimal", "bool", "date", "datetime", "time", "timedelta", "none"})


def members(annotation: Any) -> list[Any]:
    """The alternatives of an annotation, with Annotated, NewType and type aliases resolved."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif hasattr(annotation, "__value__"):
            annotation = annotation.__value__
        elif hasattr(annotation, "__supertype__"):
            annotation = annotation.__supertype__
        else:
            break
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for each in get_args(annotation) for member in members(each)]
    return [annotation]


_MOMENTS: Final = {
    "PastDate": date, "FutureDate": date, "PastDatetime": datetime, "FutureDatetime": datetime,
    "AwareDatetime": datetime, "NaiveDatetime": datetime,
}  # fmt: skip
"""Pydantic's dates that are no subclass of one."""


def _kind(annotation: Any) -> Any:
    if get_origin(annotation) is Literal:
        return str if all(isinstance(each, str) for each in get_args(annotation)) else None
    if not isinstance(annotation, type):
        return None
    if issubclass(annotation, Enum):
        return str if all(isinstance(each.value, str) for each in annotation) else None
    if annotation.__module__ == "pydantic.types" and annotation.__name__ in _MOMENTS:
        return _MOMENTS[annotation.__name__]
    kinds = (bool, int, float, Decimal, datetime, date, time, timedelta, str)
    return next((kind for kind in kinds if issubclass(annotation, kind)), None)


def _holds_values(annotation: Any) -> bool:
    """Whether every alternative but None is a list, a set, an object or a model: JSON in a sheet."""
    found = [get_origin(each) or each for each in members(annotation) if each not in (None, type(None))]
    kinds = (list, tuple, set, frozenset, Mapping, Sequence, Set)
    return bool(found) and all(
        isinstance(each, type)
        and not issubclass(each, str | bytes)
        and (issubclass(each, kinds) or hasattr(each, "model_fields") or is_dataclass(each))
        for each in found
    )


def _structure(value: Any) -> Any:
    """A list or an object that a cell holds as JSON, as reports write it; anything else unchanged."""
    text = value.strip() if isinstance(value, str) else ""
    if not text.startswith(("[", "{")):
        return value
    try:
        raw = text.encode("utf-8", "replace")
        check_depth(raw, _DEEPEST)
        found = orjson.loads(text)
    except (InputError, orjson.JSONDecodeError):
        return value
    if (key := doubled_key(raw, found)) is not None:
        raise Unclear("duplicate_key", "duplicate_key", {"key": key})
    return found


def _plain(text: str) -> str:
    """Normalises full-width digits and signs, surrounding spaces and the minus sign."""
    text = text.strip() if text.isascii() else unicodedata.normalize("NFKC", text).strip().replace("−", "-")
    return text[:_LONGEST]


def readings(text: str) -> tuple[str | None, str | None]:
    """What a text says as a number with a decimal point, and as one with a decimal comma, both in the form that ``float``
    takes. None where it cannot be read so."""
    text = _plain(text).replace("’", "'")
    point = text.translate(_DROPPED[0]) if _POINT.fullmatch(text) else None
    return point, text.translate(_DROPPED[1]) if _COMMA.fullmatch(text) else None


def flags_of(cell: str) -> int:
    """What a cell says about its column: :data:`POINT`, :data:`COMMA`, or 0."""
    point, comma = readings(cell)
    return (POINT if comma is None else 0) ^ (COMMA if point is None else 0) if point != comma else 0


def _read(text: str, notation: Notation, *, whole: bool) -> str:
    """A text as a number of its column. One that has two readings is never guessed."""
    point, comma = readings(text)
    if point is None and comma is None:
        plain = _plain(text)
        percent = plain.endswith("%") and any(readings(plain[:-1]))
        raise Unclear("wrong_type", "percent" if percent else "number")
    if point is not None and comma in (None, point):
        return point
    found = notation()
    if point is None:
        if found & (POINT | BETWEEN | JSON):
            raise Unclear("ambiguous_number", "mixed_number")
        return str(comma)
    if found == COMMA:
        return str(comma)
    # Whole numbers have no decimals: there 12.000 remains uncertain until another cell of the column tells.
    told = (found & BETWEEN and ("," in text or not whole)) or (found & JSON and "," not in text and not whole)
    if not found & COMMA and (found & POINT or told):
        return point
    raise Unclear("ambiguous_number", "ambiguous_number")


def _numeric(kind: Any, sheet: bool, notation: Notation) -> Coercer:
    """For fields of numbers; ``kind`` is None for several types."""
    finish = {int: _integer if sheet else _integer_of_json, float: _float, Decimal: _decimal if sheet else None}.get(kind)

    def convert(value: Any) -> Any:
        if isinstance(value, str):
            value = _read(value, notation, whole=kind is int)
        elif isinstance(value, bool):
            raise Unclear("wrong_type", "number_not_bool")
        elif isinstance(value, float) and not math.isfinite(value):
            raise Unclear("wrong_type", "finite_number")
        return value if finish is None else finish(value)

    return convert


def _float(value: Any) -> Any:
    if isinstance(value, str) and math.isinf(float(value)):  # 1e999, which JSON cannot represent
        raise Unclear("wrong_type", "finite_number")
    return value


def _decimal(value: Any) -> Any:
    # A spreadsheet computes in binary and displays 15 digits: 0.1 + 0.2 is 0.3 there.
    return Decimal(format(value, ".15g")) if isinstance(value, float) else value


def _integer(value: Any) -> Any:
    if isinstance(value, float) and not value.is_integer() and abs(value) < _EXACT:
        shown = float(format(value, ".15g"))  # as for a decimal: 434.99999999999994 is 435
        return int(shown) if shown.is_integer() else value
    return _integer_of_json(value)


def _integer_of_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    mantissa, exponent, power = value.lower().partition("e")
    whole, _, fraction = mantissa.partition(".")
    if not exponent:
        return float(value) if fraction.strip("0") else int(whole)
    # 4.01235E+12 is what a spreadsheet shows of a long number: its other digits are lost. A plain 1e3 is typed by people.
    if int(power) > len(fraction) and (fraction or power.startswith("+")):
        raise Unclear("lost_digits", "lost_digits")
    return float(value)


def _boolean(value: Any) -> Any:
    if isinstance(value, str):
        word = _plain(value).casefold()
        if word in _YES:
            return True
        if word in _NO:
            return False
        raise Unclear("wrong_type", "yes_or_no")
    return value


def _text_of_json(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def text_of_cell(value: Any) -> Any:
    """The text that a cell shows, as far as its value determines it."""
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Formatted):
        if value.text is None:
            raise Unclear("number_format", "number_format")
        return value.text
    if isinstance(value, float):
        return format(value, ".15g")
    if isinstance(value, datetime):
        return value.isoformat(" ")
    if isinstance(value, date | time):
        return value.isoformat()
    return span_text(value) if isinstance(value, timedelta) else value


def _clock(value: Any) -> Any:
    """For time fields: the model would read a number as seconds; a spreadsheet means a fraction of a day."""
    if isinstance(value, int | float):
        raise Unclear("wrong_type", "time_type")
    match = _CLOCK.fullmatch(_plain(value)) if isinstance(value, str) else None
    if match is None:
        return value
    hours, minutes, seconds, fraction, half = match.groups()
    hour = int(hours)
    if half is not None:
        if not 1 <= hour <= 12:
            raise Unclear("wrong_type", "time_parsing")
        hour = hour % 12 + (12 if half in "pP" else 0)
    try:
        return time(hour, int(minutes), int(seconds or 0), int((fraction or "").ljust(6, "0")))
    except ValueError:
        raise Unclear("wrong_type", "time_parsing") from None


def _span(value: Any) -> Any:
    """For duration fields: a spreadsheet shows an hour and a half as 1:30, both as a time of day and as a duration."""
    if isinstance(value, int | float):
        raise Unclear("wrong_type", "time_delta_type")
    if isinstance(value, time):
        of_day = timedelta(hours=value.hour, minutes=value.minute, seconds=value.second, microseconds=value.microsecond)
        return of_day if value.tzinfo is None else value
    match = _SPAN.fullmatch(_plain(value)) if isinstance(value, str) else None
    if match is None:
        return value
    hours, minutes, seconds, micros = (int(each or 0) for each in (*match.groups()[1:4], (match[5] or "").ljust(6, "0")))
    if minutes > 59 or seconds > 59:
        raise Unclear("wrong_type", "time_delta_parsing")
    span = timedelta(hours=hours, minutes=minutes, seconds=seconds, microseconds=micros)
    return -span if match[1] == "-" else span


def span_text(span: timedelta) -> str:
    """A duration in the form of spreadsheets, which duration fields accept: -1:30:00."""
    seconds, micros = divmod(abs(span) // timedelta(microseconds=1), 1_000_000)
    text = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}" + (f".{micros:06}" if micros else "")
    return f"-{text}" if span < timedelta(0) else text


def _moment(kind: type[date], sheet: bool) -> Coercer:
    """For date and datetime fields."""

    def convert(value: Any) -> Any:
        try:
            return read(value)
        except Unclear as error:  # the text's example must match the field: a date, or a date with a time
            raise Unclear(error.code, _WITH_TIME.get(error.text, error.text) if kind is datetime else error.text) from None

    def read(value: Any) -> Any:
        if isinstance(value, str):
            return _parse_moment(_plain(value), kind)
        if isinstance(value, datetime):
            return _as_date(value) if kind is date else value
        if isinstance(value, date):
            return value if kind is date else datetime(value.year, value.month, value.day)  # noqa: DTZ001 - as written
        if isinstance(value, bool | time | timedelta) or sheet:
            raise Unclear("wrong_type", "date_cell")
        return value

    return convert


def _as_date(moment: datetime) -> date:
    if moment.time() != time():
        raise Unclear("wrong_type", "date_from_datetime_inexact")
    return moment.date()


def _parse_moment(text: str, kind: type[date]) -> date:
    day_text, rest = text, ""
    if match := _SEPARATOR.search(text):
        day_text, rest = text[: match.start()], text[match.end() :].strip()
    day = _parse_day(day_text)
    if not rest:
        return day if kind is date else datetime(day.year, day.month, day.day)  # noqa: DTZ001 - as written
    if not _TIME.fullmatch(rest):
        raise Unclear("wrong_type", "date_unreadable")
    clock = rest.replace(" ", "").rjust(len(rest) + (rest.index(":") == 1), "0")
    try:
        moment = datetime.combine(day, time.fromisoformat(clock))
    except ValueError:
        raise Unclear("wrong_type", "time_unreal") from None
    return _as_date(moment) if kind is date else moment


def _parse_day(text: str) -> date:
    if match := _DATE_YMD.fullmatch(text):
        year, month, day = (int(each) for each in match.groups() if each is not None)
    elif match := _DATE_DMY.fullmatch(text):
        day, month, year = map(int, match.groups())
    elif match := _DATE_SLASH.fullmatch(text):
        first, second, year = map(int, match.groups())
        if first <= 12 and second <= 12 and first != second:
            raise Unclear("ambiguous_date", "ambiguous_date")
        day, month = (first, second) if second <= 12 else (second, first)
    else:
        raise Unclear("wrong_type", "date_unreadable")
    try:
        return date(year, month, day)
    except ValueError:
        raise Unclear("wrong_type", "date_unreal") from None
