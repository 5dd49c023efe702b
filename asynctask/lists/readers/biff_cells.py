"""The cells of a sheet of an old Excel workbook, record by record."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final

from asynctask.lists.readers.base import CellError
from asynctask.lists.readers.biff import BOF, CONTINUE, EOF, Globals, Record, XlsSheet, characters, records
from asynctask.lists.readers.number_formats import NUMBER, from_serial, tidy
from asynctask.lists.readers.package import damaged

__all__ = ["sheet_cells"]

_NUMBER, _RK, _MULRK, _SHARED, _LABEL, _RICH = 0x0203, 0x027E, 0x00BD, 0x00FD, 0x0204, 0x00D6
_TRUTH, _STRING = 0x0205, 0x0207
_FORMULAS: Final = frozenset({0x0006, 0x0206, 0x0406})
"""Excel 5 and later write the first; other programs write those of Excel 3 and 4, whose values stand at the same places."""
_ERRORS: Final = {
    0x00: "#NULL!", 0x07: "#DIV/0!", 0x0F: "#VALUE!", 0x17: "#REF!", 0x1D: "#NAME?", 0x24: "#NUM!", 0x2A: "#N/A",
    0x2B: "#GETTING_DATA",
}  # fmt: skip
_TABLE: Final = 0x0010


def sheet_cells(stream: io.BufferedReader, sheet: XlsSheet, book: Globals) -> Iterator[tuple[int, int, Any]]:
    """Row from 0, column from 0 and value of each cell of a sheet that has one, in the order of the file."""
    try:
        yield from _cells(stream, sheet, book)
    except (struct.error, IndexError):
        raise damaged(f"a record of sheet {sheet.name!r} is too short") from None


def _cells(stream: io.BufferedReader, sheet: XlsSheet, book: Globals) -> Iterator[tuple[int, int, Any]]:
    waiting = (-1, -1)
    text: _LongText | None = None
    for kind, data in _table_records(stream, sheet):
        if text is not None and kind == CONTINUE:
            text.feed(data)
            continue
        if text is not None:
            if (value := text.value()) is not None:
                yield *waiting, value
            text = None
        if kind == _STRING and waiting[0] >= 0:
            text = _LongText(data, book)
        elif kind in _FORMULAS:
            row, column = struct.unpack_from("<HH", data)
            value = _formula_value(data, book)
            waiting = (row, column) if value is _FOLLOWS else (-1, -1)
            if value is not _FOLLOWS and value is not None:
                yield row, column, value
        elif kind in _VALUES:
            yield from _VALUES[kind](data, book)


def _table_records(stream: io.BufferedReader, sheet: XlsSheet) -> Iterator[Record]:
    """The records of a sheet to its end, without those of charts within it; none where it is no table."""
    depth = 0
    for record in records(stream, sheet.at):
        if record.kind == BOF:
            depth += 1
            if depth == 1 and struct.unpack_from("<H", record.data, 2)[0] != _TABLE:
                return
        elif depth == 0:
            raise damaged(f"sheet {sheet.name!r} is not where the workbook says")
        elif record.kind == EOF:
            depth -= 1
        if depth <= 1:
            yield record
        if depth == 0:
            return
    raise damaged(f"the end of sheet {sheet.name!r} is missing")


class _LongText:
    """The text that a formula came to: it may go on in further records."""

    def __init__(self, data: bytes, book: Globals) -> None:
        (self._left,) = struct.unpack_from("<H", data)
        self._old, self._codec, self._parts = book.old, book.codec, list[str]()
        if self._old:
            self._take(data[2:])
        else:
            self.feed(data[2:])

    def feed(self, data: bytes) -> None:
        """Another piece, with its own flag of one byte or two for a character."""
        if self._old:
            self._take(data)
        elif data and self._left:
            text = characters(data, 1, self._left, data[0])
            self._left -= len(text)
            self._parts.append(text)

    def value(self) -> str | None:
        """The whole of it."""
        return "".join(self._parts).strip() or None

    def _take(self, data: bytes) -> None:
        piece = data[: self._left]
        self._left -= len(piece)
        self._parts.append(piece.decode(self._codec, "replace"))


_FOLLOWS: Final = object()
"""The value of a formula that is a text: it has a record of its own."""


def _formula_value(data: bytes, book: Globals) -> Any:
    (style,) = struct.unpack_from("<H", data, 4)
    if data[12:14] != b"\xff\xff":
        return _styled(struct.unpack_from("<d", data, 6)[0], style, book)
    kind, value = data[6], data[8]
    if kind == 0:
        return _FOLLOWS
    if kind == 1:
        return bool(value)
    return CellError(_ERRORS.get(value, "#ERROR")) if kind == 2 else None


def _number(data: bytes, book: Globals) -> Iterator[tuple[int, int, Any]]:
    row, column, style, value = struct.unpack_from("<HHHd", data)
    yield row, column, _styled(value, style, book)


def _rk(data: bytes, book: Globals) -> Iterator[tuple[int, int, Any]]:
    row, column, style, value = struct.unpack_from("<HHHI", data)
    yield row, column, _styled(_unpacked(value), style, book)


def _many_rk(data: bytes, book: Globals) -> Iterator[tuple[int, int, Any]]:
    row, column = struct.unpack_from("<HH", data)
    for index in range((len(data) - 6) // 6):
        style, value = struct.unpack_from("<HI", data, 4 + 6 * index)
        yield row, column + index, _styled(_unpacked(value), style, book)


def _shared(data: bytes, book: Globals) -> Iterator[tuple[int, int, Any]]:
    row, column, _, number = struct.unpack_from("<HHHI", data)
    text = book.texts.get(b"%d" % number)
    if text is not None:
        yield row, column, text


def _label(data: bytes, book: Globals) -> Iterator[tuple[int, int, Any]]:
    row, column = struct.unpack_from("<HH", data)
    text = _text(data, 6, book)
    if text is not None:
        yield row, column, text


def _truth(data: bytes, book: Globals) -> Iterator[tuple[int, int, Any]]:
    row, column, _, value, error = struct.unpack_from("<HHHBB", data)
    yield row, column, CellError(_ERRORS.get(value, "#ERROR")) if error else bool(value)


_VALUES: Final[dict[int, Callable[[bytes, Globals], Iterator[tuple[int, int, Any]]]]] = {
    _NUMBER: _number, _RK: _rk, _MULRK: _many_rk, _SHARED: _shared, _LABEL: _label, _RICH: _label, _TRUTH: _truth,
}  # fmt: skip


def _styled(value: float, style: int, book: Globals) -> Any:
    found = tidy(value)
    kind = book.kinds[style] if style < len(book.kinds) else NUMBER
    return from_serial(found, kind, epoch_1904=book.epoch_1904) if kind else found


def _unpacked(packed: int) -> float:
    """A number in four bytes: an integer of 30 bits, or the upper half of a double; perhaps a hundred times too large."""
    if packed & 2:
        whole = packed >> 2
        value = float(whole - (1 << 30) if whole & 0x20000000 else whole)
    else:
        value = struct.unpack("<d", struct.pack("<II", 0, packed & 0xFFFFFFFC))[0]
    return value / 100 if packed & 1 else value


def _text(data: bytes, at: int, book: Globals) -> str | None:
    (size,) = struct.unpack_from("<H", data, at)
    if book.old:
        text = data[at + 2 : at + 2 + size].decode(book.codec, "replace")
    else:
        flags = data[at + 2] if size else 0
        text = characters(data, at + 3 + 2 * bool(flags & 8) + 4 * bool(flags & 4), size, flags)
    return text.strip() or None
