"""Reads Excel 5 to 2003 workbooks (.xls) record by record, in plain Python: a broken file can only raise."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from asynctask.errors import InputError, TooLarge, UnsupportedFormat
from asynctask.lists.readers.base import CellError, Limits, OpenOptions, too_long, too_wide, trimmed
from asynctask.lists.readers.shared_texts import Texts, escaped
from asynctask.lists.readers.table import Table, TableSource, sheet_source
from asynctask.lists.readers.workbook import (
    BUILT_IN,
    MAX_SHEETS,
    MAX_STYLES,
    NUMBER,
    OleFile,
    choose_sheet,
    damaged,
    empty_sheet,
    from_serial,
    kind_of_format,
    tidy,
)

STREAMS: Final = ("workbook", "book")
_MAX_UNORDERED: Final = 1_000_000


def open_xls(path: Path, options: OpenOptions) -> TableSource:
    """Opens the named sheet, else the first visible one with rows.

    Raises :class:`InputError`: ``unknown_sheet``, ``empty_sheet``, ``no_header``, ``duplicate_column``, ``damaged_file``,
    ``encrypted``, ``too_large``.
    """
    return sheet_source("xls", xls_table(path, options), options)


def xls_table(path: Path, options: OpenOptions) -> Table:
    """The named sheet, else the first visible one with rows, without looking for a header."""
    with OleFile(path) as file, file.open(_stream(file)) as stream:
        book = read_globals(stream)
    try:
        empty: dict[int, int] = {}
        for sheet in _wanted(book, options.sheet):
            if sheet.at in empty:
                continue  # another sheet on the same records
            if any(begin < sheet.at < end for begin, end in empty.items()):
                raise damaged(f"sheet {sheet.name!r} lies within another one")
            rows = _Rows(path, sheet, book, options.limits)
            if filled := rows.count():
                return Table(rows.cells, sheet.name, filled, book.texts.close)
            empty[sheet.at] = rows.end
        raise empty_sheet(options.sheet)
    except BaseException:
        book.texts.close()
        raise


def xls_sheets(path: Path, limits: Limits) -> list[str]:
    """The visible sheets in the workbook's order. Raises :class:`InputError` as the opener does."""
    with OleFile(path) as file, file.open(_stream(file)) as stream:
        book = read_globals(stream)
    book.texts.close()
    return [sheet.name for sheet in book.sheets if sheet.visible]


def _wanted(book: Globals, name: str | None) -> list[XlsSheet]:
    if name is None:
        return [sheet for sheet in book.sheets if sheet.visible]
    return [book.sheets[choose_sheet(name, [sheet.name for sheet in book.sheets])]]


def _stream(file: OleFile) -> str:
    for name in STREAMS:
        if name in file.streams:
            return name
    raise damaged("it has no workbook in it")


class _Rows:
    """The rows of a sheet. Nearly every program writes them in order; otherwise they are sorted in memory."""

    def __init__(self, path: Path, sheet: XlsSheet, book: Globals, limits: Limits) -> None:
        self._path, self._sheet, self._book, self._limits = path, sheet, book, limits
        self._ordered = True
        self.end = 0
        """Offset of the end of the sheet's records; known after they were read."""

    def count(self) -> int:
        """The number of non-empty rows."""
        count, last = 0, -1
        for row, _, _ in self._found():
            if row > last:
                count, last = count + 1, row
            elif row < last:
                self._ordered = False
                return sum(1 for _ in self.cells())
        return count

    def cells(self) -> Iterator[tuple[int, list[Any]]]:
        """See :data:`~asynctask.lists.readers.table.Cells`."""
        if not self._ordered:
            yield from self._sorted()
            return
        number, cells = -1, list[Any]()
        for row, column, value in self._found():
            if row != number:
                if cells:
                    yield number + 1, cells
                number, cells = row, []
            self._check(row, column, value)
            _put(cells, column, value)
        if cells:
            yield number + 1, cells

    def _sorted(self) -> Iterator[tuple[int, list[Any]]]:
        # Kept without empty cells: a row may have a thousand for each value.
        rows: dict[int, list[tuple[int, Any]]] = {}
        for count, (row, column, value) in enumerate(self._found()):
            if count >= _MAX_UNORDERED:
                raise damaged(f"the rows of sheet {self._sheet.name!r} are in no order")
            self._check(row, column, value)
            rows.setdefault(row, []).append((column, value))
        for row in sorted(rows):
            cells: list[Any] = []
            for column, value in rows.pop(row):
                _put(cells, column, value)
            yield row + 1, cells

    def _found(self) -> Iterator[tuple[int, int, Any]]:
        with OleFile(self._path) as file, file.open(_stream(file)) as stream:
            yield from sheet_cells(stream, self._sheet, self._book)
            self.end = stream.tell()

    def _check(self, row: int, column: int, value: Any) -> None:
        if column >= self._limits.max_columns:
            raise too_wide(row + 1, column, self._limits)
        if type(value) is str and len(value) > self._limits.max_cell_chars:
            raise too_long(row + 1, value, self._limits)


def _put(cells: list[Any], column: int, value: Any) -> None:
    if column < len(cells):
        cells[column] = value
    else:
        cells.extend([None] * (column - len(cells)))
        cells.append(value)


# -- records of the globals

BOF, EOF, CONTINUE = 0x0809, 0x000A, 0x003C
_SHEET, _CODEPAGE, _DATES, _FORMAT, _STYLE, _SST, _PASSWORD = 0x0085, 0x0042, 0x0022, 0x041E, 0x00E0, 0x00FC, 0x002F
_CODEPAGES: Final = {
    367: "ascii", 932: "cp932", 936: "gbk", 949: "cp949", 950: "cp950", 1200: "utf-16-le", 1361: "johab",
    10000: "mac_roman", 10001: "shift_jis", 10002: "big5", 10003: "euc_kr", 10006: "mac_greek", 10007: "mac_cyrillic",
    10008: "gb2312", 10029: "mac_latin2", 10079: "mac_iceland", 10081: "mac_turkish", 32768: "mac_roman", 32769: "cp1252",
    **{number: f"cp{number}" for number in (
        437, 720, 737, 775, 850, 852, 855, 857, 858, 860, 861, 862, 863, 864, 865, 866, 869, 874, *range(1250, 1259)
    )},
}  # fmt: skip
_VERSION_5, _VERSION_8 = 0x0500, 0x0600


class Record(NamedTuple):
    """A record of the stream."""

    kind: int
    data: bytes


class XlsSheet(NamedTuple):
    """A worksheet: its name, the offset of its records, whether it is visible."""

    name: str
    at: int
    visible: bool


class Globals(NamedTuple):
    """Context for reading cells. ``old``: Excel 5 or 95, with texts in a code page (``codec``)."""

    sheets: list[XlsSheet]
    texts: Texts
    kinds: list[str]
    epoch_1904: bool
    old: bool
    codec: str


def records(stream: io.BufferedReader, at: int = 0) -> Iterator[Record]:
    """The records from an offset to the end of the stream."""
    stream.seek(at)
    while len(head := stream.read(4)) == 4:
        kind, size = struct.unpack("<HH", head)
        data = stream.read(size)
        if len(data) != size:
            raise damaged("a record of it is cut off")
        yield Record(kind, data)


def read_globals(stream: io.BufferedReader) -> Globals:
    """The records before the sheets. Raises InputError for an encrypted or damaged workbook."""
    reader = _Globals()
    try:
        found = records(stream)
        first = next(found, Record(0, b""))
        if first.kind != BOF or len(first.data) < 4:
            raise damaged("its first record is missing")
        (version,) = struct.unpack_from("<H", first.data)
        if version not in (_VERSION_5, _VERSION_8):
            raise UnsupportedFormat(
                "the workbook is older than Excel 5; open it in a spreadsheet program and save as .xlsx"
            )
        reader.old = version == _VERSION_5
        for record in found:
            if record.kind == EOF:
                return reader.result()
            reader.take(record)
        raise damaged("the end of its globals is missing")
    except (struct.error, IndexError, UnicodeDecodeError):
        reader.texts.close()
        raise damaged("a record of its globals is too short") from None
    except BaseException:
        reader.texts.close()
        raise


class _Globals:
    def __init__(self) -> None:
        self.texts = Texts()
        self.old = False
        self._codec = "cp1252"
        self._epoch_1904 = False
        self._formats: dict[int, str] = dict(BUILT_IN)
        self._styles: list[int] = []
        self._sheets: list[tuple[bytes, int, bool]] = []
        self._shared: _SharedTexts | None = None
        self._handlers: dict[int, Callable[[bytes], None]] = {
            _SHEET: self._sheet, _CODEPAGE: self._codepage, _DATES: self._dates, _FORMAT: self._format,
            _STYLE: self._style, _PASSWORD: self._password, _SST: self._texts,
        }  # fmt: skip

    def take(self, record: Record) -> None:
        if record.kind == CONTINUE:
            if self._shared is not None:
                self._shared.feed(record.data)
            return
        self._shared = None
        handler = self._handlers.get(record.kind)
        if handler is not None:
            handler(record.data)

    def result(self) -> Globals:
        sheets = [XlsSheet(self._name(name), at, visible) for name, at, visible in self._sheets]
        kinds = [self._formats.get(number, NUMBER) for number in self._styles]
        return Globals(sheets, self.texts, kinds, self._epoch_1904, self.old, self._codec)

    def _name(self, data: bytes) -> str:
        if self.old:
            return data[1 : 1 + data[0]].decode(self._codec, "replace")
        return characters(data, 2, data[0], data[1])

    def _sheet(self, data: bytes) -> None:
        at, state, kind = struct.unpack_from("<IBB", data)
        if kind == 0:
            if len(self._sheets) >= MAX_SHEETS:
                raise TooLarge(f"the workbook has more than {MAX_SHEETS:,} sheets; split it into several")
            self._sheets.append((data[6:], at, state & 3 == 0))

    def _codepage(self, data: bytes) -> None:
        number = struct.unpack_from("<H", data)[0]
        if self.old and number not in _CODEPAGES:  # Excel 97 and later use Unicode whatever code page they claim
            raise InputError(
                f"the texts of the workbook are in code page {number}, which is not known; open it in a spreadsheet program"
                " and save as .xlsx",
                code="encoding",
            )
        self._codec = _CODEPAGES.get(number, "cp1252")

    def _dates(self, data: bytes) -> None:
        self._epoch_1904 = struct.unpack_from("<H", data)[0] == 1

    def _format(self, data: bytes) -> None:
        if self.old:
            number, size = struct.unpack_from("<HB", data)
            code = data[3 : 3 + size].decode(self._codec, "replace")
        else:
            number, size, flags = struct.unpack_from("<HHB", data)
            code = characters(data, 5, size, flags)
        self._formats[number] = kind_of_format(code)

    def _style(self, data: bytes) -> None:
        if len(self._styles) < MAX_STYLES:
            self._styles.append(struct.unpack_from("<H", data, 2)[0])

    def _password(self, _: bytes) -> None:
        raise UnsupportedFormat(
            "the workbook is protected with a password; remove the password in the spreadsheet program, save it and"
            " upload it again",
            code="encrypted",
        )

    def _texts(self, data: bytes) -> None:
        self._shared = _SharedTexts(self.texts, struct.unpack_from("<I", data, 4)[0])
        self._shared.feed(data[8:])


class _SharedTexts:
    """The table of shared strings. It spans several records, and a string may be split between two anywhere."""

    def __init__(self, texts: Texts, count: int) -> None:
        self._texts, self._left = texts, count
        self._data, self._at = b"", 0
        self._parts: list[str] = []
        self._characters = self._skip = self._size = 0
        self._wide = False

    def feed(self, data: bytes) -> None:
        if self._characters:
            # A string continued in the next record has a new flag there: one or two bytes a character.
            self._wide, data = bool(data[0] & 1) if data else False, data[1:]
        self._data, self._at = self._data[self._at :] + data, 0
        while self._left and self._step():
            pass
        if self._left and len(self._data) - self._at > 64:
            raise damaged("its table of texts cannot be read")

    def _step(self) -> bool:
        if self._characters:
            return self._take_characters()
        if self._skip:
            skipped = min(self._skip, len(self._data) - self._at)
            self._at += skipped
            self._skip -= skipped
            if self._skip or not skipped:
                return False
        if self._parts:
            self._texts.add([_literal("".join(self._parts))])
            self._parts.clear()
            self._left -= 1
            return True
        self._take_whole()
        return bool(self._left) and self._begin()

    def _take_whole(self) -> None:
        """Parses the plain strings that end within this record in one pass: nearly all are such."""
        data, at, found = self._data, self._at, list[bytes]()
        end, left = len(data), self._left
        while len(found) < left and end - at >= 3:
            flags = data[at + 2]
            size = (data[at] | data[at + 1] << 8) << (flags & 1)
            if flags & 0x0C or at + 3 + size > end:
                break
            piece = data[at + 3 : at + 3 + size]
            found.append(_literal(piece.decode("utf-16-le", "replace") if flags & 1 else piece.decode("latin-1")))
            at += 3 + size
        self._at, self._left = at, left - len(found)
        self._texts.add(found)

    def _begin(self) -> bool:
        if len(self._data) - self._at < 3:
            return False
        count, flags = struct.unpack_from("<HB", self._data, self._at)
        runs, extra, size = 0, 0, 3
        if len(self._data) - self._at < 3 + 2 * bool(flags & 8) + 4 * bool(flags & 4):
            return False
        if flags & 8:
            (runs,) = struct.unpack_from("<H", self._data, self._at + size)
            size += 2
        if flags & 4:
            (extra,) = struct.unpack_from("<I", self._data, self._at + size)
            size += 4
        self._at += size
        self._characters, self._wide, self._skip = count, bool(flags & 1), 4 * runs + extra
        self._parts.append("")
        return True

    def _take_characters(self) -> bool:
        width = 2 if self._wide else 1
        count = min(self._characters, (len(self._data) - self._at) // width)
        piece = self._data[self._at : self._at + count * width]
        self._parts.append(piece.decode("utf-16-le", "replace") if self._wide else piece.decode("latin-1"))
        self._at += count * width
        self._characters -= count
        return not self._characters


def _literal(text: str) -> bytes:
    """A string as :meth:`Texts.add` takes it. This table has no escapes, so what looks like one is escaped."""
    return escaped(text.replace("_x", "_x005F_x")) if text else b""


def characters(data: bytes, at: int, count: int, flags: int) -> str:
    """Characters of one byte, or of two if bit 0 of the flags is set."""
    if flags & 1:
        return data[at : at + 2 * count].decode("utf-16-le", "replace")
    return data[at : at + count].decode("latin-1")


# -- cells

_NUMBER, _RK, _MULRK, _SHARED, _LABEL, _RICH = 0x0203, 0x027E, 0x00BD, 0x00FD, 0x0204, 0x00D6
_TRUTH, _STRING = 0x0205, 0x0207
_FORMULAS: Final = frozenset({0x0006, 0x0206, 0x0406})
"""Excel 5 and later write the first; other programs write those of Excel 3 and 4, with values at the same offsets."""
_ERRORS: Final = {
    0x00: "#NULL!", 0x07: "#DIV/0!", 0x0F: "#VALUE!", 0x17: "#REF!", 0x1D: "#NAME?", 0x24: "#NUM!", 0x2A: "#N/A",
    0x2B: "#GETTING_DATA",
}  # fmt: skip
_TABLE: Final = 0x0010


def sheet_cells(stream: io.BufferedReader, sheet: XlsSheet, book: Globals) -> Iterator[tuple[int, int, Any]]:
    """Row and column, both from 0, and value of each cell that has one, in file order."""
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
    """The records of a sheet to its end, without charts embedded in it; none for a sheet that is no worksheet."""
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
    """The text result of a formula; it may span several records."""

    def __init__(self, data: bytes, book: Globals) -> None:
        (self._left,) = struct.unpack_from("<H", data)
        self._old, self._codec, self._parts = book.old, book.codec, list[str]()
        if self._old:
            self._take(data[2:])
        else:
            self.feed(data[2:])

    def feed(self, data: bytes) -> None:
        """Adds a piece, with its own flag of one or two bytes a character."""
        if self._old:
            self._take(data)
        elif data and self._left:
            text = characters(data, 1, self._left, data[0])
            self._left -= len(text)
            self._parts.append(text)

    def value(self) -> str | None:
        return trimmed("".join(self._parts)) or None

    def _take(self, data: bytes) -> None:
        piece = data[: self._left]
        self._left -= len(piece)
        self._parts.append(piece.decode(self._codec, "replace"))


_FOLLOWS: Final = object()
"""The value of a formula whose text result is in the next record."""


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
    """A number in four bytes: a 30-bit integer or the upper half of a double, possibly multiplied by 100."""
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
    return trimmed(text) or None
