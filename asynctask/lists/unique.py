"""Rows that say what an earlier row of the same list said already, in the fields that the submission calls unique."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import orjson

from asynctask.errors import InputError
from asynctask.lists.items import Accepted, Binding, ItemShape, Refused
from asynctask.lists.problems import fault, jsonable
from asynctask.lists.readers import RawRow
from asynctask.lists.readers.base import normalise, shorten

__all__ = ["FirstRows", "Twins", "refuse_absent"]

_SMALLEST: Final = 1_024
_LAST_ROW: Final = 2**32 - 1


class Twins:
    """The values of the unique fields of every row of a list that was accepted so far."""

    def __init__(self, unique: Sequence[str], shape: ItemShape, binding: Binding | None) -> None:
        self._unique = tuple(unique)
        self._shape = shape
        self._binding = binding
        headers = {field: header for header, field in binding.fields.items()} if binding else {}
        self._names = {field: headers.get(field, field) for field in self._unique}
        self._plain = {field: _PLAIN.get(shape.kind(field)) for field in self._unique}
        self._first = FirstRows()

    def refuse_second(self, raw: RawRow, row: Accepted) -> Accepted | Refused:
        """The row itself, or its refusal, which names the first row with these values."""
        key = self._key(raw, row.item)
        first = row.row if key is None else self._first.put(key, row.row)
        if first == row.row:
            return row
        values = self._shape.values(raw)
        column = self._names[self._unique[0]]
        text, params = "duplicate_in_upload", dict[str, Any](first=first)
        if len(self._unique) > 1:
            text, params["columns"] = "duplicates_in_upload", ", ".join(map(self._shown, self._unique))
        value = shorten(jsonable(values.get(column))) if isinstance(values, Mapping) else None
        problem = fault(row.row, column, "duplicate_in_upload", text, params, value)
        return Refused(
            row.row, (problem,), jsonable(values) if isinstance(values, Mapping) else {"value": jsonable(values)}
        )

    def _shown(self, field: str) -> str:
        return repr(shorten(self._names[field], 80))

    def _key(self, raw: RawRow, item: Any) -> bytes | None:
        """What is compared; None where a value is missing, for nothing can be said of such a row."""
        if not isinstance(item, Mapping):
            return None
        values = []
        for field in self._unique:
            value = item.get(field)
            if value is None or not self._shape.is_given(raw, field, value, self._binding):
                return None
            plain = self._plain[field]
            values.append(value if plain is None else plain(value))
        return orjson.dumps(values, option=orjson.OPT_SORT_KEYS)


def refuse_absent(unique: Sequence[str], headers: Sequence[str], binding: Binding, shape: ItemShape) -> None:
    """A worker without a model takes every header for a key: one that unique names and no column has is a mistake.

    Raises :class:`InputError` ``unknown_column``.
    """
    if shape.model is not None:
        return
    keys = {binding.fields.get(header, header) for header in headers if header not in binding.ignored}
    for name in unique:
        if name not in keys:
            near = {normalise(key): key for key in keys}.get(normalise(name))
            params = {"name": repr(name), "headers": ", ".join(shorten(each, 40) for each in headers[:50])}
            problem = fault(None, near, "unknown_column", "column.unique", params)
            raise InputError(
                problem.message, code="unknown_column", errors=[problem], text=problem.text, params=problem.params
            )


class FirstRows:
    """Which row a key came from first: 20 bytes a slot, 30 to 60 for each key, where a dict would need 150.

    Keys are known by a digest of 128 bits, rows are numbers from 1; open addressing, at most two thirds full.
    """

    __slots__ = ("_count", "_high", "_low", "_rows")

    def __init__(self) -> None:
        self._count = 0
        self._low, self._high, self._rows = _slots(_SMALLEST)

    def __len__(self) -> int:
        return self._count

    def put(self, key: bytes, row: int) -> int:
        """The row under which ``key`` is known; ``row`` itself where it was not known until now."""
        low, high = struct.unpack("<QQ", hashlib.blake2b(key, digest_size=16).digest())
        at = self._find(low, high)
        if known := self._rows[at]:
            return known
        self._low[at], self._high[at], self._rows[at] = low, high, min(row, _LAST_ROW)
        self._count += 1
        if self._count * 3 > len(self._rows) * 2:
            self._grow()
        return row

    def _find(self, low: int, high: int) -> int:
        lows, highs, rows = self._low, self._high, self._rows
        mask = len(rows) - 1
        at = low & mask
        while rows[at] and (lows[at] != low or highs[at] != high):
            at = (at + 1) & mask
        return at

    def _grow(self) -> None:
        lows, highs, rows = self._low, self._high, self._rows
        self._low, self._high, self._rows = _slots(len(rows) * 2)
        for old in range(len(rows)):
            if row := rows[old]:
                at = self._find(lows[old], highs[old])
                self._low[at], self._high[at], self._rows[at] = lows[old], highs[old], row


def _slots(count: int) -> tuple[array[int], array[int], array[int]]:
    return array("Q", bytes(8 * count)), array("Q", bytes(8 * count)), array("I", bytes(4 * count))


def _plain_decimal(value: Any) -> Any:
    """1.0 and 1.00 are one number."""
    try:
        return str(Decimal(value).normalize()) if isinstance(value, str) else value
    except InvalidOperation:
        return value


def _plain_moment(value: Any) -> Any:
    """14:30 in one zone may be 6:30 in another."""
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return value
    return moment.astimezone(UTC).isoformat() if moment.tzinfo is not None else value


_PLAIN: Final[Mapping[Any, Callable[[Any], Any]]] = {Decimal: _plain_decimal, datetime: _plain_moment}
