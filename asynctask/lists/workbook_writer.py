"""Workbooks as a stream: the pieces leave while rows are read, and memory is constant except for comments.

The cells are written here, because XlsxWriter makes nothing of the file before the last one. All else (styles, comments,
what a sheet has before and after its rows) comes from a workbook without rows that XlsxWriter makes. The zip is written
without seeking: each part's size follows its content (a data descriptor). No text becomes a formula, a link, a number or
markup.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from functools import lru_cache
from html import escape
from itertools import chain, islice
from typing import Any, Final
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from asynctask.lists.readers.base import CellError, Formatted, Percent
from asynctask.lists.written_cells import SHEET_ROWS, cut, sheet_value

MAX_COMMENTS: Final = 5_000
"""Comments of a sheet: XlsxWriter keeps them in memory, and spreadsheets are slow with more."""
_MAX_COMMENT: Final = 1_000
_CHUNK: Final = 16_384
_BATCH: Final = 50
_MAX_SHEET_BYTES: Final = 2_000_000_000
"""No further row is written: a larger part needs zip64, which some programs do not read with a data descriptor."""
_SHORT: Final = 16_000
_SAFE: Final = 10**15
_HEADER: Final = {"bold": True, "bottom": 1}
_PATTERNS: Final[Mapping[type, str]] = {
    date: "yyyy-mm-dd",
    datetime: "yyyy-mm-dd hh:mm:ss",
    time: "hh:mm:ss",
    timedelta: "[h]:mm:ss",
}
_DAY: Final = timedelta(days=1)
_EPOCH: Final = datetime(1899, 12, 30)  # noqa: DTZ001 - a sheet's times have no zone
_ESCAPED: Final = re.compile("[\x00-\x08\x0b-\x1f]|_(?=x[0-9a-fA-F]{4}_)")
"""Stands in a cell as ``_xHHHH_``: a control character, and the underscore of a text that reads like such an escape."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell that has more than its value: a ``style``, as properties of XlsxWriter's formats, and a ``comment``."""

    value: Any
    style: Mapping[str, Any]
    comment: str = ""


class Sheet:
    """A sheet to write, and what of it is written.

    Arguments: its name; its rows with the header, each of values and :class:`Cell`; of each column its width and style;
    ``furnish``, which gives XlsxWriter's sheet everything else, for a number of rows; its most comments.
    """

    def __init__(
        self,
        name: str,
        rows: Iterable[Sequence[Any]],
        columns: Sequence[tuple[int, Mapping[str, Any]]],
        furnish: Callable[[Any, int], object] = lambda made, count: None,
        most_comments: int = 0,
    ) -> None:
        self.name, self.columns, self.furnish = name, columns, furnish
        self.count, self.size, self.part = 0, 0, ""
        self.comments: list[tuple[str, str]] = []
        self._rows, self._most_comments = iter(rows), most_comments

    def batch(self) -> list[Sequence[Any]]:
        """The next rows; none at the end, or if the sheet has as many bytes as it can."""
        return list(islice(self._rows, _BATCH)) if self.size < _MAX_SHEET_BYTES else []

    def comment(self, place: str, text: str) -> None:
        if len(self.comments) < self._most_comments:
            self.comments.append((place, cut(text)[:_MAX_COMMENT]))


def table(
    first_name: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
) -> Iterator[Sheet]:
    """The sheets of a list below its header, which is frozen and has a filter; one sheet if there are no rows.

    Arguments: the name of the first sheet, the others are ``Rows 2`` and so on; the columns; the rows.
    """

    def furnish(made: Any, count: int) -> None:
        last = len(columns) - 1
        made.freeze_panes(1, 0)
        made.autofilter(0, 0, max(count - 1, 0), last)
        if count > 1:  # no warning at texts such as 00123
            made.ignore_errors({"number_stored_as_text": f"A2:{_letters(len(columns))[last]}{count}"})

    header = [Cell(name, _HEADER) for name in columns]
    widths: list[tuple[int, Mapping[str, Any]]] = [(min(max(len(name) + 4, 12), 60), {}) for name in columns]
    rows = iter(rows)
    for number, first in enumerate(chain([next(rows, None)], rows), 1):
        body = chain([header], () if first is None else [first], islice(rows, SHEET_ROWS - 1))
        yield Sheet(f"Rows {number}" if number > 1 else first_name, body, widths, furnish, MAX_COMMENTS)


def iter_workbook(sheets: Iterable[Sheet]) -> Generator[bytes, None, None]:
    """A workbook in pieces. If the rows raise, the pieces so far cannot be taken for a workbook: its directory is in the
    last one."""
    book, sink = _Book(), _Sink()
    with ZipFile(sink, "w", ZIP_DEFLATED) as archive:
        for sheet in sheets:
            book.add(sheet)
            with archive.open(_entry(sheet.part), "w") as part:
                part.write(book.around(sheet)[0])
                while batch := sheet.batch():
                    part.write(book.written(sheet, batch))
                    if sink.size >= _CHUNK:
                        yield sink.take()
                part.write(book.around(sheet)[1])
        for name, content in book.other_parts():
            archive.writestr(_entry(name), content)
    yield sink.take()


def _entry(name: str) -> ZipInfo:
    entry = ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.compress_type = ZIP_DEFLATED
    return entry


class _Sink(io.RawIOBase):
    """Keeps what is written until it is taken. It cannot seek, and a ZipFile on it does not."""

    def __init__(self) -> None:
        self._written: list[bytes] = []
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._written.append(bytes(data))
        self.size += len(data)
        return len(data)

    def take(self) -> bytes:
        data = b"".join(self._written)
        self._written.clear()
        self.size = 0
        return data


class _Book:
    """The sheets of a workbook so far, and the styles of its cells."""

    def __init__(self) -> None:
        self._sheets: list[Sheet] = []
        self._styles: dict[tuple[tuple[str, Any], ...], int] = {}

    def add(self, sheet: Sheet) -> None:
        self._sheets.append(sheet)
        sheet.part = f"xl/worksheets/sheet{len(self._sheets)}.xml"
        for _, style in sheet.columns:  # XlsxWriter meets these before those of the cells, and numbers styles as it does
            self._style(style)

    def _style(self, style: Mapping[str, Any]) -> int:
        """The index of a style, 0 for none."""
        return self._styles.setdefault(tuple(style.items()), len(self._styles) + 1) if style else 0

    def around(self, sheet: Sheet) -> tuple[bytes, bytes]:
        """What a sheet has before and after its rows."""
        with self._without_rows() as archive:
            head, _, rest = archive.read(sheet.part).partition(b"<sheetData>")
        # The dimension is known last, and optional.
        head = re.sub(rb"<dimension [^>]*/>", b"", head)
        return head + b"<sheetData>", b"</sheetData>" + rest.partition(b"</sheetData>")[2]

    def other_parts(self) -> Iterator[tuple[str, bytes]]:
        """The parts that are no sheets."""
        sheets = {sheet.part for sheet in self._sheets}
        with self._without_rows() as archive:
            for name in archive.namelist():
                if name not in sheets:
                    yield name, archive.read(name)

    def _without_rows(self) -> ZipFile:
        import xlsxwriter  # imported only for workbooks

        file = io.BytesIO()
        with xlsxwriter.Workbook(file, {"in_memory": True}) as book:
            styles = {key: book.add_format(dict(key)) for key in self._styles}
            for sheet in self._sheets:
                made = book.add_worksheet(sheet.name)
                for column, (width, style) in enumerate(sheet.columns):
                    made.set_column(column, column, width, styles.get(tuple(style.items())))
                for row, style in enumerate(styles.values()):
                    made.write_blank(row, 0, None, style)
                made.write_number(len(styles), 0, 0)  # rows there must be, to be cut out
                for place, text in sheet.comments:
                    made.write_comment(place, text, {"x_scale": 2})
                sheet.furnish(made, sheet.count)
        return ZipFile(file)

    def written(self, sheet: Sheet, rows: Iterable[Sequence[Any]]) -> bytes:
        """The next rows of a sheet, as XML."""
        data = "".join(self._row(sheet, row) for row in rows).encode()
        sheet.size += len(data)
        return data

    def _row(self, sheet: Sheet, row: Sequence[Any]) -> str:
        sheet.count += 1
        number = sheet.count
        cells = [f'<row r="{number}">']
        for letter, value in zip(_letters(len(row)), row, strict=True):
            kind = type(value)
            if kind is str and value.isprintable() and len(value) <= _SHORT:  # nearly all cells
                if value:
                    cells.append(_text_cell(f"{letter}{number}", value))
            elif kind is int and -_SAFE < value < _SAFE:
                cells.append(f'<c r="{letter}{number}"><v>{value}</v></c>')
            elif kind is Cell:
                cells.append(self._cell(f"{letter}{number}", value.value, value.style))
                if value.comment:
                    sheet.comment(f"{letter}{number}", value.comment)
            elif value is not None:
                cells.append(self._cell(f"{letter}{number}", value, {}))
        cells.append("</row>")
        return "".join(cells)

    def _cell(self, place: str, value: Any, style: Mapping[str, Any]) -> str:
        value = sheet_value(value)
        if isinstance(value, Percent | Formatted):
            pattern = value.pattern if isinstance(value, Percent) else value.code
        else:
            pattern = _PATTERNS.get(type(value), "")
        index = self._style({"num_format": pattern, **style} if pattern else style)
        attributes = f'{place}" s="{index}' if index else place
        if value is None:
            return f'<c r="{attributes}"/>'
        if isinstance(value, str):
            return _text_cell(attributes, cut(value))
        if isinstance(value, bool):
            return f'<c r="{attributes}" t="b"><v>{value:d}</v></c>'
        if isinstance(value, CellError):
            return f'<c r="{attributes}" t="e"><v>{value.text}</v></c>'
        return f'<c r="{attributes}"><v>{_number(value)}</v></c>'


def _text_cell(attributes: str, text: str) -> str:
    space = ' xml:space="preserve"' if text != text.strip() else ""
    if "_x" in text or not text.isprintable():
        text = _ESCAPED.sub(lambda found: f"_x{ord(found[0]):04X}_", text)
    return f'<c r="{attributes}" t="inlineStr"><is><t{space}>{escape(text, quote=False)}</t></is></c>'


def _number(value: Any) -> str:
    """A number, or a time in days since the epoch of sheets."""
    if isinstance(value, datetime):
        value = (value - _EPOCH) / _DAY
    elif isinstance(value, date):
        return str(value.toordinal() - _EPOCH.toordinal())
    elif isinstance(value, time):
        value = (datetime.combine(_EPOCH, value) - _EPOCH) / _DAY
    elif isinstance(value, timedelta):
        value /= _DAY
    if isinstance(value, float):
        value = float(value)
        return str(int(value)) if value.is_integer() and abs(value) < _SAFE else repr(value)
    return str(value)


@lru_cache(16)
def _letters(width: int) -> list[str]:
    """The names of so many columns."""
    from xlsxwriter.utility import xl_col_to_name

    return [xl_col_to_name(column) for column in range(width)]
