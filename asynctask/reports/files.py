"""Reports as CSV and Excel files: the user's own columns unchanged, and beside them the result of each row.

A report is safe to open (no text becomes a formula, a link or a command) and can be corrected and uploaded again.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, TextIO
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import xlsxwriter
from xlsxwriter.utility import xl_col_to_name, xl_range

from asynctask.errors import Unavailable
from asynctask.lists.readers.base import COLUMNS, SUFFIX, CellError, Formatted, Percent, normalise, of_locale, report_block
from asynctask.lists.written_cells import SHEET_ROWS, csv_cell, cut, sheet_value

MAX_COMMENTS: Final = 5_000
"""Comments of a sheet: XlsxWriter keeps them in memory, and spreadsheets are slow with more."""
_CHUNK: Final = 16_384
_MAX_COMMENT: Final = 1_000
_SHORT: Final = 16_000
_SAFE: Final = 10**15
_REFUSED: Final = {"bg_color": "#FFC7CE"}
_ERROR: Final = 2
"""Index of the error among the report's own columns."""


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One row of a report.

    ``values``: the original cells by header. ``number``: the row in the original sheet, from 1. ``result``: the worker's
    JSON result. ``bad_columns``: header -> fault of that cell. ``bad_row``: fault of the row but of none of its cells.
    """

    values: Mapping[str, Any]
    number: int | None
    status: str
    error: str | None
    attempts: int
    result: Any
    bad_columns: Mapping[str, str] = field(default_factory=dict)
    bad_row: str | None = None

    def with_values(self, values: Mapping[str, Any]) -> ReportRow:
        return ReportRow(
            values, self.number, self.status, self.error, self.attempts, self.result, self.bad_columns, self.bad_row
        )


def report_headers(headers: Sequence[str], locale: str = "en") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The original columns, and the names of the report's own five in a language.

    A name that an original column has too gets a suffix, " (report)" in English. Columns that an earlier report added to
    an uploaded sheet are dropped: they show older results.
    """
    locale = of_locale(locale)
    old = report_block(headers)
    kept = tuple(header for header in headers if header not in old)
    kept_names = {normalise(header) for header in kept}
    return kept, tuple(name + SUFFIX[locale] if normalise(name) in kept_names else name for name in COLUMNS[locale])


def write_csv(stream: TextIO | BinaryIO, headers: Sequence[str], rows: Iterable[ReportRow], *, locale: str = "en") -> int:
    """Writes a report as CSV in UTF-8 with a byte order mark, streaming.

    Arguments: a text stream (opened with ``newline=""``) or a binary one, left open; the original headers; the rows; the
    language of the report's own headers. Returns the number of rows.
    """
    counted = _Counted(rows)
    for chunk in iter_csv(headers, counted, locale=locale):
        if isinstance(stream, io.TextIOBase):
            stream.write(chunk.decode())
        else:
            stream.write(chunk)  # type: ignore[arg-type]
    return counted.count


def iter_csv(headers: Sequence[str], rows: Iterable[ReportRow], *, locale: str = "en") -> Generator[bytes, None, None]:
    """The CSV of :func:`write_csv` in pieces of about 16 KiB, each of whole rows."""
    kept, added = report_headers(headers, locale)
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\r\n")
    buffer.write("\ufeff")
    writer.writerow([csv_cell(name) for name in (*kept, *added)])
    for row in rows:
        writer.writerow([csv_cell(row.values.get(name)) for name in kept] + [csv_cell(each) for each in _outcome(row)])
        if buffer.tell() >= _CHUNK:
            yield buffer.getvalue().encode()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue().encode()


def write_xlsx(
    path: Path,
    headers: Sequence[str],
    rows: Iterable[ReportRow],
    *,
    locale: str = "en",
    rows_per_sheet: int = SHEET_ROWS,
    comments_per_sheet: int = MAX_COMMENTS,
) -> int:
    """Writes the workbook of :func:`iter_xlsx` to a file.

    Arguments: the target, and those of :func:`iter_xlsx`. Returns the number of rows. If ``rows`` raises, this raises at
    once and leaves no file. Raises :class:`Unavailable` if writing fails.
    """
    counted = _Counted(rows)
    pieces = iter_xlsx(
        headers, counted, locale=locale, rows_per_sheet=rows_per_sheet, comments_per_sheet=comments_per_sheet
    )
    try:
        with closing(pieces), _opened(path) as out:
            for piece in pieces:
                try:
                    out.write(piece)
                except OSError as error:
                    raise _unwritten(path, error) from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return counted.count


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        # Unbuffered: the pieces are large, and nothing is left to fail when the file is closed.
        out = path.open("wb", buffering=0)
    except OSError as error:
        raise _unwritten(path, error) from error
    with out:
        yield out


def _unwritten(path: Path, error: OSError) -> Unavailable:
    return Unavailable(f"the report could not be written in {path.parent}: {error}; is the disk full?")


def iter_xlsx(
    headers: Sequence[str],
    rows: Iterable[ReportRow],
    *,
    locale: str = "en",
    rows_per_sheet: int = SHEET_ROWS,
    comments_per_sheet: int = MAX_COMMENTS,
) -> Generator[bytes, None, None]:
    """A report as a workbook in pieces that leave while ``rows`` are read; memory is constant except for the comments.

    Arguments: the original headers; the rows; the language of the report's own headers; the most rows of a sheet beside
    its header, after which the next one begins; its most comments. If ``rows`` raises, the pieces so far cannot be taken
    for a workbook: its directory is in the last one. Raises ValueError for a ``rows_per_sheet`` that no sheet has.
    """
    if not 1 <= rows_per_sheet <= SHEET_ROWS:
        raise ValueError(f"rows_per_sheet must be between 1 and {SHEET_ROWS}, not {rows_per_sheet}")
    return _book_pieces(_Book(*report_headers(headers, locale), comments_per_sheet), iter(rows), rows_per_sheet)


# -- workbooks
#
# The rows are written here, as they come: XlsxWriter makes nothing of the file before the last cell. All else (styles,
# comments, what a sheet has before and after its rows) comes from a workbook without rows that XlsxWriter makes. The zip is
# written without seeking: each part's size follows its content (a data descriptor).

_BATCH: Final = 50
_MAX_SHEET_BYTES: Final = 2_000_000_000
"""The next row begins another sheet: a larger part needs zip64, which some programs do not read with a data descriptor."""
_PATTERNS: Final[Mapping[type, str]] = {
    date: "yyyy-mm-dd",
    datetime: "yyyy-mm-dd hh:mm:ss",
    time: "hh:mm:ss",
    timedelta: "[h]:mm:ss",
}
_DAY: Final = timedelta(days=1)
_EPOCH: Final = datetime(1899, 12, 30)  # noqa: DTZ001 - a sheet's times have no zone
_HEADER_STYLE: Final = 1
_ESCAPED: Final = re.compile("[\x00-\x08\x0b-\x1f]|_(?=x[0-9a-fA-F]{4}_)")
"""Stands in a cell as ``_xHHHH_``: a control character, and the underscore of a text that reads like such an escape."""


def _book_pieces(book: _Book, rows: Iterator[ReportRow], rows_per_sheet: int) -> Generator[bytes, None, None]:
    sink = _Sink()
    with ZipFile(sink, "w", ZIP_DEFLATED) as archive:
        ahead = next(rows, None)  # decides whether another sheet is needed
        while ahead is not None or not book.sheets:
            sheet = book.add_sheet()
            with archive.open(_entry(sheet.part), "w") as part:
                part.write(sheet.head)
                while ahead is not None and sheet.rows < rows_per_sheet and sheet.size < _MAX_SHEET_BYTES:
                    batch = [ahead, *islice(rows, min(_BATCH, rows_per_sheet - sheet.rows) - 1)]
                    part.write(sheet.add(batch))
                    if sink.size >= _CHUNK:
                        yield sink.take()
                    ahead = next(rows, None)
                part.write(sheet.tail)
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
    """A workbook: its columns, its sheets so far, and the styles that their cells have."""

    def __init__(self, kept: Sequence[str], added: Sequence[str], most_comments: int) -> None:
        self.kept, self.names, self.most_comments = kept, (*kept, *added), most_comments
        self.letters = [xl_col_to_name(column) for column in range(len(self.names))]
        self.sheets: list[_Sheet] = []
        self._styles: dict[tuple[str, bool], int] = {}

    def style(self, value: Any, bad: bool) -> int:
        """The index of the style of a cell, 0 for none."""
        if isinstance(value, Percent | Formatted):
            pattern = value.pattern if isinstance(value, Percent) else value.code
        else:
            pattern = _PATTERNS.get(type(value), "")
        if not pattern and not bad:
            return 0
        return self._styles.setdefault((pattern, bad), len(self._styles) + _HEADER_STYLE + 1)

    def add_sheet(self) -> _Sheet:
        sheet = _Sheet(self, f"xl/worksheets/sheet{len(self.sheets) + 1}.xml")
        self.sheets.append(sheet)
        return sheet

    def around(self, part: str) -> tuple[bytes, bytes]:
        """What a sheet has before and after its rows."""
        with self._without_rows() as archive:
            head, _, rest = archive.read(part).partition(b"<sheetData>")
        # The dimension is known last, and optional.
        return re.sub(rb"<dimension [^>]*/>", b"", head) + b"<sheetData>", b"</sheetData>" + rest.partition(
            b"</sheetData>"
        )[2]

    def other_parts(self) -> Iterator[tuple[str, bytes]]:
        """The parts that are no sheets."""
        sheets = {sheet.part for sheet in self.sheets}
        with self._without_rows() as archive:
            for name in archive.namelist():
                if name not in sheets:
                    yield name, archive.read(name)

    def _without_rows(self) -> ZipFile:
        file = io.BytesIO()
        with xlsxwriter.Workbook(file, {"in_memory": True}) as book:
            formats = [book.add_format({"bold": True, "bottom": 1})]
            for pattern, bad in self._styles:
                shape = ({"num_format": pattern} if pattern else {}) | (_REFUSED if bad else {})
                formats.append(book.add_format(shape))
            for number, sheet in enumerate(self.sheets, 1):
                made = book.add_worksheet(f"Rows {number}")
                for column, style in enumerate(formats):  # numbered from 1 as they are met
                    made.write_blank(0, column, None, style)
                sheet.furnish(made)
        return ZipFile(file)


class _Sheet:
    """One sheet of a workbook; its rows become XML in order."""

    def __init__(self, book: _Book, part: str) -> None:
        self.part, self.rows, self.size = part, 0, 0
        self._book = book
        self._comments: list[tuple[int, int, str]] = []

    @property
    def head(self) -> bytes:
        names = zip(self._book.letters, self._book.names, strict=True)
        cells = "".join(_text_cell(f'{letter}1" s="{_HEADER_STYLE}', cut(name)) for letter, name in names)
        return self._book.around(self.part)[0] + f'<row r="1">{cells}</row>'.encode()

    @property
    def tail(self) -> bytes:
        return self._book.around(self.part)[1]

    def furnish(self, made: Any) -> None:
        """Gives XlsxWriter's sheet everything but the rows."""
        last = len(self._book.names) - 1
        made.freeze_panes(1, 0)
        for column, name in enumerate(self._book.names):
            made.set_column(column, column, min(max(len(name) + 4, 12), 60))
        made.autofilter(0, 0, self.rows, last)
        if self.rows:  # no warning at texts such as 00123
            made.ignore_errors({"number_stored_as_text": xl_range(1, 0, self.rows, last)})
        for row, column, text in self._comments:
            made.write_comment(row, column, text, {"x_scale": 2})

    def add(self, rows: Iterable[ReportRow]) -> bytes:
        """The XML of the next rows."""
        data = "".join(map(self._row, rows)).encode()
        self.size += len(data)
        return data

    def _row(self, row: ReportRow) -> str:
        self.rows += 1
        number, kept = self.rows + 1, self._book.kept
        bad = {column: row.bad_columns[name] for column, name in enumerate(kept) if name in row.bad_columns}
        if row.bad_row is not None:
            bad[len(kept) + _ERROR] = row.bad_row
        cells = [f'<row r="{number}">']
        for column, value in enumerate((*map(row.values.get, kept), *_outcome(row))):
            place, kind = f"{self._book.letters[column]}{number}", type(value)
            if column in bad:
                cells.append(_cell(place, value, self._book, bad=True))
                if len(self._comments) < self._book.most_comments:
                    self._comments.append((self.rows, column, cut(bad[column])[:_MAX_COMMENT]))
            elif kind is str and value.isprintable() and len(value) <= _SHORT:  # nearly all cells
                cells.append(_text_cell(place, value))
            elif kind is int and -_SAFE < value < _SAFE:
                cells.append(f'<c r="{place}"><v>{value}</v></c>')
            elif value is not None:
                cells.append(_cell(place, value, self._book))
        cells.append("</row>")
        return "".join(cells)


def _cell(place: str, value: Any, book: _Book, *, bad: bool = False) -> str:
    value = sheet_value(value)
    style = book.style(value, bad)
    attributes = f'{place}" s="{style}' if style else place
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


class _Counted:
    def __init__(self, rows: Iterable[ReportRow]) -> None:
        self._rows, self.count = rows, 0

    def __iter__(self) -> Iterator[ReportRow]:
        for row in self._rows:
            self.count += 1
            yield row


def _outcome(row: ReportRow) -> tuple[Any, ...]:
    return row.number, row.status, row.error, row.attempts, row.result
