"""Cells as JSON, with their types: what JSON has no word for is an object of one key, ``{"d": "2026-03-05"}``."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, datetime, time, timedelta
from typing import Any, Final

import orjson

from asynctask.lists.readers.base import CellError

__all__ = ["dump", "packed", "unpacked"]

_OPTIONS: Final = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_SUBCLASS


def dump(rows: Iterable[Any]) -> bytes:
    """Rows as JSON: lists of numbers, texts, and cells of every type that a reader hands on."""
    return orjson.dumps(rows, default=packed, option=_OPTIONS)


def packed(value: Any) -> Any:
    """A cell that JSON has no word for, as an object of one key."""
    kind = type(value)
    if kind is datetime:
        return {"t": value.isoformat()}
    if kind is date:
        return {"d": value.isoformat()}
    if kind is time:
        return {"h": value.isoformat()}
    if kind is timedelta:
        return {"s": [value.days, value.seconds, value.microseconds]}
    if kind is CellError:
        return {"e": value.text}
    return str(value)


def unpacked(value: dict[str, Any]) -> Any:
    """The cell again that :func:`packed` wrote."""
    ((kind, said),) = value.items()
    if kind == "t":
        return datetime.fromisoformat(said)
    if kind == "d":
        return date.fromisoformat(said)
    if kind == "h":
        return time.fromisoformat(said)
    if kind == "s":
        return timedelta(*said)
    return CellError(str(said))
