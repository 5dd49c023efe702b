"""What pydantic finds wrong, as stable codes and plain sentences; and cells as JSON.

The codes are listed in docs/sheets.md. An error type that is not in the table keeps pydantic's own type and text.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Final

from asynctask.bulk.readers.base import CellError, shorten

__all__ = ["TABLE", "describe", "jsonable"]

TABLE: Final[Mapping[str, tuple[str, str]]] = {
    "missing": ("missing", "is required; fill it in"),
    "none_required": ("missing", "must be left empty"),
    "string_type": ("wrong_type", "must be text"),
    "int_type": ("wrong_type", "must be a whole number"),
    "int_parsing": ("wrong_type", "must be a whole number"),
    "int_parsing_size": ("wrong_type", "is too long for a number"),
    "int_from_float": ("wrong_type", "must be a whole number, without decimals"),
    "float_type": ("wrong_type", "must be a number"),
    "float_parsing": ("wrong_type", "must be a number"),
    "finite_number": ("wrong_type", "must be a finite number"),
    "decimal_type": ("wrong_type", "must be a number"),
    "decimal_parsing": ("wrong_type", "must be a number"),
    "decimal_max_digits": ("too_long", "must have at most {max_digits} digits"),
    "decimal_max_places": ("too_long", "must have at most {decimal_places} decimals"),
    "decimal_whole_digits": ("too_long", "must have at most {whole_digits} digits before the point"),
    "bool_type": ("wrong_type", "must be yes or no"),
    "bool_parsing": ("wrong_type", "must be yes or no"),
    "list_type": ("wrong_type", "must be a list"),
    "dict_type": ("wrong_type", "must be an object"),
    "model_type": ("wrong_type", "must be an object"),
    "model_attributes_type": ("wrong_type", "must be an object"),
    "date_type": ("wrong_type", "must be a date, such as 2026-03-05"),
    "date_parsing": ("wrong_type", "must be a date, such as 2026-03-05"),
    "date_from_datetime_parsing": ("wrong_type", "must be a date, such as 2026-03-05"),
    "date_from_datetime_inexact": ("wrong_type", "is a date with a time; only the date is wanted"),
    "date_past": ("not_allowed", "must be a day in the past"),
    "date_future": ("not_allowed", "must be a day in the future"),
    "datetime_type": ("wrong_type", "must be a date and time, such as 2026-03-05 14:30"),
    "datetime_parsing": ("wrong_type", "must be a date and time, such as 2026-03-05 14:30"),
    "datetime_from_date_parsing": ("wrong_type", "must be a date and time, such as 2026-03-05 14:30"),
    "datetime_past": ("not_allowed", "must be in the past"),
    "datetime_future": ("not_allowed", "must be in the future"),
    "time_type": ("wrong_type", "must be a time, such as 14:30"),
    "time_parsing": ("wrong_type", "must be a time, such as 14:30"),
    "greater_than": ("too_small", "must be greater than {gt}"),
    "greater_than_equal": ("too_small", "must be at least {ge}"),
    "less_than": ("too_large", "must be less than {lt}"),
    "less_than_equal": ("too_large", "must be at most {le}"),
    "multiple_of": ("not_allowed", "must be a multiple of {multiple_of}"),
    "string_too_short": ("too_short", "must have at least {min_length} characters"),
    "string_too_long": ("too_long", "must have at most {max_length} characters"),
    "too_short": ("too_short", "must have at least {min_length} entries"),
    "too_long": ("too_long", "must have at most {max_length} entries"),
    "string_pattern_mismatch": ("bad_format", "does not have the form that is wanted: {pattern}"),
    "literal_error": ("not_allowed", "must be one of {expected}"),
    "enum": ("not_allowed", "must be one of {expected}"),
    "extra_forbidden": ("unknown_field", "is not a field of the item; take it out"),
    "url_parsing": ("bad_format", "must be a web address, such as https://example.com/"),
    "url_scheme": ("bad_format", "must be a web address that starts with one of {expected_schemes}"),
    "uuid_parsing": ("bad_format", "must be a UUID"),
}


def describe(error: Mapping[str, Any]) -> tuple[str, str]:
    """Code and message of one of pydantic's errors (an entry of ``ValidationError.errors()``)."""
    kind, context = str(error["type"]), error.get("ctx") or {}
    if kind in {"value_error", "assertion_error"}:
        return "invalid", str(context.get("error") or "") or "is not valid"
    if kind in TABLE:
        code, template = TABLE[kind]
        try:
            return code, template.format_map(context)
        except (KeyError, ValueError, IndexError):
            pass
        return code, str(error["msg"])
    return kind, str(error["msg"])


def jsonable(value: Any) -> Any:
    """A cell or JSON value as JSON can carry it and a database can store it: dates as ISO text, errors as they show."""
    if value is None or isinstance(value, bool | int):
        return value if not isinstance(value, int) or -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, str):
        return _storable(value)
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {_storable(str(key)): jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(each) for each in value]
    if isinstance(value, Enum):
        return jsonable(value.value)
    if isinstance(value, CellError | Decimal | timedelta):
        return _storable(str(value))
    return shorten(_storable(str(value)))


def _storable(text: str) -> str:
    """Without NUL, which PostgreSQL has no place for, and without halves of characters, which UTF-8 has none for."""
    if "\0" in text:
        text = text.replace("\0", "\ufffd")
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
