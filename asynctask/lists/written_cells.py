"""How typed cells are written: as JSON between processes, and as values of a report's file.

A type that JSON lacks is an object of one key, ``{"d": "2026-03-05"}``. In a report a value keeps its type where the file
format has it, and is text where it would be changed; no text becomes a formula, a link, a number or markup.
How a cell becomes a field of an item: :mod:`asynctask.lists.items`.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any, Final
from uuid import UUID

import orjson

from asynctask.lists.coerce import span_text, text_of_cell
from asynctask.lists.readers.base import CellError, Formatted, Percent, shorten
from asynctask.lists.readers.csv import FORMULA_STARTS
from asynctask.worker import is_model

SHEET_ROWS: Final = 1_048_575
"""The rows of a sheet without its header."""
SHEET_COLUMNS: Final = 16_384
CELL_CHARS: Final = 32_767
"""The UTF-16 code units of a cell."""

# -- as JSON

_OPTIONS: Final = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_SUBCLASS


def jsonable(value: Any) -> Any:
    """A cell or JSON value as JSON that every database stores: dates as ISO text, errors as shown."""
    if value is None or isinstance(value, bool | int):
        return value if not isinstance(value, int) or -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, float):
        found = value.number if type(value) is Formatted else value
        return found if value - value == 0 else str(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {storable(str(key)): jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(each) for each in value]
    if isinstance(value, Enum):
        return jsonable(value.value)
    if isinstance(value, timedelta):
        return span_text(value)
    if isinstance(value, CellError | Decimal):
        return storable(str(value))
    return shorten(storable(str(value)))


def item_text(value: Any, default: Callable[[Any], Any]) -> bytes:
    """An item as JSON text. ``default``: :func:`plain_json`, :func:`field_json` or :func:`secret_json`.

    Raises TypeError for a value that JSON cannot represent.
    """
    try:
        body = orjson.dumps(value, default=default, option=orjson.OPT_NON_STR_KEYS)
    except TypeError as error:  # the reason of ``default`` is its cause
        if "tzinfo" not in str(error):
            raise TypeError(str(error.__cause__ or _fault_of(value) or error)) from None
        # A time with a zone, which orjson leaves to ``default`` along with all dates; that takes longer.
        body = orjson.dumps(value, default=default, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATETIME)
    if b"null" in body and (found := _fault_of(value)) is not None:  # orjson writes NaN as null
        raise TypeError(found)
    return body


def plain_json(value: Any) -> Any:
    """A value that orjson does not know, as JSON that shows it: for a worker without a model. Raises TypeError."""
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return span_text(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | set | frozenset | deque):
        return list(value)
    if isinstance(value, Decimal | PurePath | CellError):
        return str(value)
    if callable(getattr(value, "get_secret_value", None)):
        raise TypeError("a secret is kept only in a field of the worker's model that is declared as one")
    if is_model(type(value)):
        computed = type(value).model_computed_fields
        return {**fields_of(value), **{name: getattr(value, name) for name in computed}}
    raise TypeError(f"a value of type {type(value).__name__} is no JSON")


def field_json(value: Any) -> Any:
    """The same for a worker with a model: as JSON that builds an equal value. Raises TypeError."""
    if is_model(type(value)):
        return fields_of(value)
    if isinstance(value, bytes):
        return value.decode()
    try:
        return plain_json(value)
    except TypeError:
        if callable(getattr(value, "get_secret_value", None)) or isinstance(value, Iterator):
            raise  # an iterator has its values once
    from pydantic_core import PydanticSerializationError, to_jsonable_python  # with a model, pydantic is loaded already

    try:
        return to_jsonable_python(value)
    except PydanticSerializationError:
        raise TypeError(f"a value of type {type(value).__name__} is no JSON") from None


def secret_json(value: Any) -> Any:
    """:func:`field_json` for a field that is declared as a secret, or holds one."""
    reveal = getattr(value, "get_secret_value", None)
    return reveal() if callable(reveal) else field_json(value)


def fields_of(instance: Any) -> Any:
    """The values of a model's instance by field name, and its extra ones, as they are: no serializer is asked. Of a root
    model, its root."""
    if type(instance).__pydantic_root_model__:
        return instance.root
    return {**vars(instance), **(instance.__pydantic_extra__ or {})}


def _fault_of(value: Any) -> str | None:
    """The first number or key in a value that JSON does not have."""
    if isinstance(value, float):
        return None if math.isfinite(value) else f"the number {value} is no JSON number"
    if isinstance(value, int):
        large = not -(2**63) <= value < 2**64
        return f"the number {shorten(str(value))} exceeds the 64-bit range of JSON: give it as text" if large else None
    if is_model(type(value)):
        value = fields_of(value)
    elif is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, _KEYS):
                return f"a key of type {type(key).__name__} is no JSON"
        value = value.values()
    elif not isinstance(value, list | tuple | set | frozenset | deque):
        return None
    return next(filter(None, map(_fault_of, value)), None)


_KEYS: Final = (str, int, float, datetime, date, time, Enum, UUID, type(None))


def storable(text: str) -> str:
    """Replaces NUL, which PostgreSQL cannot store, and lone surrogates, which UTF-8 cannot encode."""
    if "\0" in text:
        text = text.replace("\0", "\ufffd")
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


_ISO: Final = {datetime: "t", date: "d", time: "h"}


def dump(rows: Iterable[Any]) -> bytes:
    """Rows as JSON: lists of numbers, texts and cells of every type that readers produce."""
    return orjson.dumps(rows, default=packed, option=_OPTIONS)


def packed(value: Any) -> Any:
    """A cell of a type that JSON lacks, as an object of one key."""
    kind = type(value)
    if kind in _ISO:
        return {_ISO[kind]: value.isoformat()}
    if kind is timedelta:
        return {"s": [value.days, value.seconds, value.microseconds]}
    if kind is CellError:
        return {"e": value.text}
    if kind is Percent:
        return {"p": [float(value), value.pattern]}
    if kind is Formatted:
        return {"f": [float(value), value.code, value.text]}
    return str(value)


def unpacked(value: dict[str, Any]) -> Any:
    """The cell that :func:`packed` converted."""
    ((kind, content),) = value.items()
    return _UNPACKED[kind](content)


_UNPACKED: Final[Mapping[str, Callable[[Any], Any]]] = {
    "t": datetime.fromisoformat, "d": date.fromisoformat, "h": time.fromisoformat, "s": lambda parts: timedelta(*parts),
    "p": lambda parts: Percent(*parts), "f": lambda parts: Formatted(*parts), "e": CellError,
}  # fmt: skip

# -- as values of a report's file

ERROR_CELLS: Final = frozenset({"#DIV/0!", "#N/A", "#NAME?", "#NULL!", "#NUM!", "#REF!", "#VALUE!"})
"""The error values that every spreadsheet has; others become text."""
_EXACT_DIGITS: Final = 15
_FIRST_DAY: Final = date(1900, 3, 1)
"""Excel's days before it are off by one."""
_NO_CHARACTERS: Final = re.compile("[\x00\ud800-\udfff\ufffe\uffff]")
_GUARDED: Final = (*FORMULA_STARTS, "'")
_NEGATIVE: Final = re.compile(r"-(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,15})?")
"""Negative numbers as a spreadsheet reads them exactly."""


def csv_cell(value: Any) -> str | float | None:
    """A value for the csv module. Text that a spreadsheet could take for a formula is prefixed with ``'``."""
    if value is None:
        return None
    if isinstance(value, Formatted):
        return csv_cell(value.number if value.text is None else value.text)
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return int(value) if isinstance(value, Percent) and value.is_integer() else float(value)
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, int | date | time | timedelta):
        return str(text_of_cell(value))
    return guarded(_shown(value))


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """The lines of a CSV file; each value is one that the csv module takes, as :func:`csv_cell` gives them."""
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\r\n").writerows(rows)
    return buffer.getvalue()


def guarded(text: str) -> str:
    """A text of a CSV file, with ``'`` in front if a spreadsheet could take it for a formula."""
    return f"'{text}" if text.startswith(_GUARDED) and not _NEGATIVE.fullmatch(text) else text


def sheet_value(value: Any) -> Any:
    """A value of a type that a workbook has: None, bool, int, float, Decimal, date, datetime, time, timedelta or text.

    Also :class:`CellError`, of :data:`ERROR_CELLS` only.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Decimal):
        return value if value.is_finite() and len(value.as_tuple().digits) <= _EXACT_DIGITS else str(value)
    if isinstance(value, int):
        return value if len(str(abs(value))) <= _EXACT_DIGITS else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, datetime):
        return value if value.tzinfo is None and value.date() >= _FIRST_DAY else value.isoformat(" ")
    if isinstance(value, date):
        return value if value >= _FIRST_DAY else value.isoformat()
    if isinstance(value, time):
        return value if value.tzinfo is None else value.isoformat()
    if isinstance(value, timedelta):
        return value if value >= timedelta(0) else span_text(value)
    if isinstance(value, CellError) and value.text in ERROR_CELLS:
        return value
    return _shown(value)


def _shown(value: Any) -> str:
    """A value as text, lists and objects as JSON; cut to the size of a cell."""
    if isinstance(value, Mapping | list | tuple):
        text = orjson.dumps(jsonable(value)).decode()
    else:
        text = value if isinstance(value, str) else str(jsonable(value))
    return cut(text)


def cut(text: str) -> str:
    """``text`` without non-characters, cut with an ellipsis at :data:`CELL_CHARS`."""
    if not text.isprintable():
        text = _NO_CHARACTERS.sub("\ufffd", text)
    if len(text) * 2 <= CELL_CHARS or len(text.encode("utf-16-le")) // 2 <= CELL_CHARS:
        return text
    return text.encode("utf-16-le")[: (CELL_CHARS - 1) * 2].decode("utf-16-le", "ignore") + "…"
