"""Reports as CSV and Excel files: the user's own columns unchanged, and beside them the result of each row.

A report is safe to open (no text becomes a formula, a link or a command) and can be corrected and uploaded again.
"""

from __future__ import annotations

import csv
import io
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Final, TextIO

import xlsxwriter
from xlsxwriter.exceptions import XlsxFileError

from asynctask.errors import Unavailable
from asynctask.lists.cells import SHEET_ROWS, Percent, csv_cell, cut, sheet_text, sheet_value
from asynctask.lists.readers.base import COLUMNS, SUFFIX, CellError, normalise, of_locale, report_block

__all__ = ["SHEET_ROWS", "ReportRow", "iter_csv", "report_headers", "write_csv", "write_xlsx"]

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


def iter_csv(headers: Sequence[str], rows: Iterable[ReportRow], *, locale: str = "en") -> Iterator[bytes]:
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
    """Writes a report as a workbook, in constant memory except for the comments.

    Arguments: the target; the original headers; the rows; the language of the report's own headers; the most rows of a
    sheet beside its header, after which the next one begins; its most comments. Returns the number of rows.
    If ``rows`` raises, this raises at once and leaves no file. Raises :class:`Unavailable` if writing fails.
    """
    if not 1 <= rows_per_sheet <= SHEET_ROWS:
        raise ValueError(f"rows_per_sheet must be between 1 and {SHEET_ROWS}, not {rows_per_sheet}")
    try:
        with tempfile.TemporaryDirectory(prefix=".report-", dir=path.parent) as folder:
            book = xlsxwriter.Workbook(str(path), {"constant_memory": True, "tmpdir": folder, **_PLAIN})
            book.use_zip64()
            try:
                count = _write_sheets(book, headers, rows, locale, rows_per_sheet, comments_per_sheet)
                book.close()
            except BaseException:
                _abandon(book, path)
                raise
    except (OSError, XlsxFileError) as error:
        raise Unavailable(f"the report could not be written in {path.parent}: {error}; is the disk full?") from error
    return count


_PLAIN: Final = {"strings_to_formulas": False, "strings_to_urls": False, "strings_to_numbers": False}


def _abandon(book: Any, path: Path) -> None:
    """Closes and removes the files; closing the book would finish it first."""
    book.fileclosed = True
    for sheet in book.worksheets():
        sheet._opt_close()
    path.unlink(missing_ok=True)


def _write_sheets(
    book: Any, headers: Sequence[str], rows: Iterable[ReportRow], locale: str, rows_per_sheet: int, comments: int
) -> int:
    formats = _Formats(book)
    names = report_headers(headers, locale)
    iterator, count, sheets = iter(rows), 0, 0
    ahead = next(iterator, None)
    while ahead is not None or sheets == 0:
        sheets += 1
        sheet = _Sheet(book.add_worksheet(f"Rows {sheets}"), *names, formats, comments)
        for row in islice(chain([ahead] if ahead is not None else [], iterator), rows_per_sheet):
            sheet.add(row)
        count += sheet.rows
        sheet.finish()
        # Read one row ahead: it decides whether another sheet is needed.
        ahead = next(iterator, None)
    return count


class _Formats:
    """The cell formats of a workbook, made on demand."""

    _PATTERNS: Final[Mapping[type, str]] = {
        date: "yyyy-mm-dd",
        datetime: "yyyy-mm-dd hh:mm:ss",
        time: "hh:mm:ss",
        timedelta: "[h]:mm:ss",
    }

    def __init__(self, book: Any) -> None:
        self._book = book
        self._made: dict[tuple[str, bool], Any] = {}
        self.header = book.add_format({"bold": True, "bottom": 1})

    def of(self, value: Any, bad: bool) -> Any:
        pattern = value.pattern if type(value) is Percent else self._PATTERNS.get(type(value), "")
        if not pattern and not bad:
            return None
        if (pattern, bad) not in self._made:
            shape = ({"num_format": pattern} if pattern else {}) | (_REFUSED if bad else {})
            self._made[pattern, bad] = self._book.add_format(shape)
        return self._made[pattern, bad]


class _Exact(float):
    """A number that XlsxWriter writes with all digits; it formats others with 16."""

    def __format__(self, _spec: str) -> str:
        return repr(float(self))


class _Sheet:
    def __init__(
        self, sheet: Any, kept: Sequence[str], added: Sequence[str], formats: _Formats, most_comments: int
    ) -> None:
        self._sheet, self._kept, self._formats = sheet, kept, formats
        self._comments, self.rows = most_comments, 0
        self._width = len(kept) + len(added)
        sheet.freeze_panes(1, 0)
        for column, name in enumerate((*kept, *added)):
            sheet.set_column(column, column, min(max(len(name) + 4, 12), 60))
            sheet.write_string(0, column, sheet_text(name), formats.header)

    def add(self, row: ReportRow) -> None:
        self.rows += 1
        bad, values, number = row.bad_columns, row.values, self.rows
        for column, name in enumerate(self._kept):
            value = values.get(name)
            reason = bad.get(name) if bad else None
            if reason is not None or not self._simple(number, column, value):
                self._cell(column, value, reason)
        for column, value in enumerate(_outcome(row), len(self._kept)):
            reason = row.bad_row if column == len(self._kept) + _ERROR else None
            if reason is not None or not self._simple(number, column, value):
                self._cell(column, value, reason)

    def _simple(self, row: int, column: int, value: Any) -> bool:
        """Fast path: writes a cell that needs no conversion, as nearly all do; False for others."""
        kind = type(value)
        if kind is str:
            if len(value) > _SHORT or not value.isprintable() or value[:1] == "<":
                return False
            self._sheet.write_string(row, column, value)
        elif kind is int:
            if not -_SAFE < value < _SAFE:
                return False
            self._sheet.write_number(row, column, value)
        else:
            return value is None
        return True

    def finish(self) -> None:
        self._sheet.autofilter(0, 0, self.rows, self._width - 1)
        if self.rows:  # no warning at texts such as 00123
            letters = xlsxwriter.utility.xl_range(1, 0, self.rows, self._width - 1)
            self._sheet.ignore_errors({"number_stored_as_text": letters})

    def _cell(self, column: int, value: Any, reason: str | None) -> None:
        sheet, row, bad = self._sheet, self.rows, reason is not None
        value = sheet_value(value)
        style = self._formats.of(value, bad)
        if value is None:
            if bad:
                sheet.write_blank(row, column, None, style)
        elif isinstance(value, str):
            sheet.write_string(row, column, sheet_text(value), style)
        elif isinstance(value, bool):
            sheet.write_boolean(row, column, value, style)
        elif isinstance(value, float):
            exact = float(f"{value:.16G}") == value
            sheet.write_number(row, column, value if exact else _Exact(value), style)
        elif isinstance(value, int | Decimal):
            sheet.write_number(row, column, value, style)
        elif isinstance(value, CellError):
            # The only formula of a report: a constant, one of seven, never a text of the list.
            sheet.write_formula(row, column, "=" + value.text, style, value.text)
        else:
            sheet.write_datetime(row, column, value, style)
        if reason is not None and self._comments > 0:
            self._comments -= 1
            sheet.write_comment(row, column, cut(reason)[:_MAX_COMMENT], {"x_scale": 2})


class _Counted:
    def __init__(self, rows: Iterable[ReportRow]) -> None:
        self._rows, self.count = rows, 0

    def __iter__(self) -> Iterator[ReportRow]:
        for row in self._rows:
            self.count += 1
            yield row


def _outcome(row: ReportRow) -> tuple[Any, ...]:
    return row.number, row.status, row.error, row.attempts, row.result
