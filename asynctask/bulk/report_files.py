"""Reports as files: the user's own columns as they were, and beside them what became of each row.

A report is safe to open (no text in it becomes a formula, a link or a command) and can be corrected and uploaded again.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Final, TextIO

import orjson
import xlsxwriter

from asynctask.bulk.problems import jsonable
from asynctask.bulk.readers.base import REPORT_COLUMNS, normalise, report_block
from asynctask.bulk.readers.csv import FORMULA_STARTS

__all__ = ["ReportRow", "iter_csv", "report_headers", "write_csv", "write_xlsx"]

_CHUNK: Final = 16_384
_MAX_TEXT: Final = 32_767
_MAX_COMMENT: Final = 1_000
_MAX_COMMENTS: Final = 5_000
"""A sheet's comments are kept in memory until it is written; cells beyond are highlighted all the same."""
_EXACT_DIGITS: Final = 15
_FIRST_DAY: Final = date(1900, 3, 1)
"""Excel's days before it are off by one."""
_CONTROLS: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_GUARDED: Final = (*FORMULA_STARTS, "'")


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One row of a report.

    ``values``: the original cells by header. ``number``: the row in the original sheet, from 1. ``result``: what the worker
    returned, anything that JSON can carry. ``bad_columns``: header -> what is wrong with that cell.
    """

    values: Mapping[str, Any]
    number: int | None
    status: str
    error: str | None
    attempts: int
    result: Any
    bad_columns: Mapping[str, str] = field(default_factory=dict)


def report_headers(headers: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The original columns, and the report's own five as they are called beside them.

    Where an original column has the very name, the report's gets the suffix " (report)". The columns that an earlier report
    added to an uploaded sheet are left out: they say what became of the rows then.
    """
    old = report_block(headers)
    kept = tuple(header for header in headers if header not in old)
    taken = {normalise(header) for header in kept}
    return kept, tuple(f"{name} (report)" if name in taken else name for name in REPORT_COLUMNS)


def write_csv(stream: TextIO | BinaryIO, headers: Sequence[str], rows: Iterable[ReportRow]) -> int:
    """Write a report as CSV in UTF-8 with a byte order mark; memory stays constant.

    Arguments: a text stream (open it with ``newline=""``) or a binary one, left open; the original headers; the rows.
    Returns the number of rows written.
    """
    counted = _Counted(rows)
    for chunk in iter_csv(headers, counted):
        if isinstance(stream, io.TextIOBase):
            stream.write(chunk.decode())
        else:
            stream.write(chunk)  # type: ignore[arg-type]
    return counted.count


def iter_csv(headers: Sequence[str], rows: Iterable[ReportRow]) -> Iterator[bytes]:
    """The report as :func:`write_csv` writes it, in pieces of some KB, each of whole rows."""
    kept, added = report_headers(headers)
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\r\n")
    buffer.write("\ufeff")
    writer.writerow([_csv_cell(name) for name in (*kept, *added)])
    for row in rows:
        writer.writerow([_csv_cell(row.values.get(name)) for name in kept] + [_csv_cell(each) for each in _outcome(row)])
        if buffer.tell() >= _CHUNK:
            yield buffer.getvalue().encode()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue().encode()


def write_xlsx(path: Path, headers: Sequence[str], rows: Iterable[ReportRow], *, rows_per_sheet: int = 1_048_575) -> int:
    """Write a report as a workbook; memory stays constant but for the comments, of which a sheet has 5,000 at most.

    Arguments: where to; the original headers; the rows; how many rows a sheet takes beside its header before the next
    one begins. Returns the number of rows written. If ``rows`` raises, so does this, and leaves no file.
    """
    if not 1 <= rows_per_sheet <= 1_048_575:
        raise ValueError(f"rows_per_sheet must be between 1 and 1048575, not {rows_per_sheet}")
    options = {
        "constant_memory": True,
        "tmpdir": str(path.parent),
        "strings_to_formulas": False,
        "strings_to_urls": False,
        "strings_to_numbers": False,
    }
    book = xlsxwriter.Workbook(str(path), options)
    try:
        count = _write_sheets(book, headers, rows, rows_per_sheet)
    except BaseException:
        book.close()
        path.unlink(missing_ok=True)
        raise
    book.close()
    return count


def _write_sheets(book: Any, headers: Sequence[str], rows: Iterable[ReportRow], rows_per_sheet: int) -> int:
    formats = _Formats(book)
    iterator, count, sheets = iter(rows), 0, 0
    ahead = next(iterator, None)
    while ahead is not None or sheets == 0:
        sheets += 1
        sheet = _Sheet(book.add_worksheet("Report" if sheets == 1 else f"Report {sheets}"), headers, formats)
        # None ends the rows: what is left beyond this sheet is looked at once, to know whether another one is needed.
        for row in islice(chain([ahead] if ahead is not None else [], iterator), rows_per_sheet):
            sheet.add(row)
        count += sheet.rows
        sheet.finish()
        ahead = next(iterator, None)
    return count


class _Formats:
    """The cell formats of a workbook."""

    def __init__(self, book: Any) -> None:
        self.header = book.add_format({"bold": True, "bottom": 1})
        self._patterns = {
            date: "yyyy-mm-dd",
            datetime: "yyyy-mm-dd hh:mm:ss",
            time: "hh:mm:ss",
            timedelta: "[h]:mm:ss",
            None: "",
        }
        self._made = {
            (kind, bad): book.add_format(
                ({"num_format": pattern} if pattern else {}) | ({"bg_color": "#FFC7CE"} if bad else {})
            )
            for kind, pattern in self._patterns.items()
            for bad in (False, True)
        }

    def of(self, value: Any, bad: bool) -> Any:
        kind = type(value) if type(value) in self._patterns else None
        return self._made[kind, bad] if kind or bad else None


class _Sheet:
    """One sheet of a report, written row by row."""

    def __init__(self, sheet: Any, headers: Sequence[str], formats: _Formats) -> None:
        self._sheet, self._formats = sheet, formats
        self._kept, added = report_headers(headers)
        self._comments = self.rows = 0
        self._width = len(self._kept) + len(added)
        sheet.freeze_panes(1, 0)
        for column, name in enumerate((*self._kept, *added)):
            sheet.set_column(column, column, min(max(len(name) + 4, 12), 60))
            sheet.write_string(0, column, _xlsx_text(name), formats.header)

    def add(self, row: ReportRow) -> None:
        self.rows += 1
        for column, name in enumerate(self._kept):
            reason = row.bad_columns.get(name)
            self._cell(column, row.values.get(name), reason is not None)
            if reason is not None and self._comments < _MAX_COMMENTS:
                self._comments += 1
                self._sheet.write_comment(self.rows, column, _xlsx_text(reason)[:_MAX_COMMENT])
        for column, value in enumerate(_outcome(row), len(self._kept)):
            self._cell(column, value, False)

    def finish(self) -> None:
        self._sheet.autofilter(0, 0, self.rows, self._width - 1)

    def _cell(self, column: int, value: Any, bad: bool) -> None:
        sheet, row = self._sheet, self.rows
        value = _xlsx_value(value)
        style = self._formats.of(value, bad)
        if value is None:
            if bad:
                sheet.write_blank(row, column, None, style)
        elif isinstance(value, str):
            sheet.write_string(row, column, value, style)
        elif isinstance(value, bool):
            sheet.write_boolean(row, column, value, style)
        elif isinstance(value, int | float | Decimal):
            sheet.write_number(row, column, value, style)
        else:
            sheet.write_datetime(row, column, value, style)


class _Counted:
    def __init__(self, rows: Iterable[ReportRow]) -> None:
        self._rows, self.count = rows, 0

    def __iter__(self) -> Iterator[ReportRow]:
        for row in self._rows:
            self.count += 1
            yield row


def _outcome(row: ReportRow) -> tuple[Any, ...]:
    return row.number, row.status, row.error, row.attempts, row.result


def _csv_cell(value: Any) -> Any:
    if value is None or isinstance(value, float):
        return value if value is None or math.isfinite(value) else str(value)
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int | Decimal):
        return str(value)
    if isinstance(value, datetime):
        return value.isoformat(" ")
    if isinstance(value, date | time):
        return value.isoformat()
    text = _shown(value).replace("\0", "\ufffd")
    return f"'{text}" if text.startswith(_GUARDED) else text


def _xlsx_value(value: Any) -> Any:
    """A value of a type that a workbook has; everything that it would change or lose becomes text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float | Decimal):
        plain = not isinstance(value, int) or len(str(abs(value))) <= _EXACT_DIGITS
        fits = (
            math.isfinite(value) and len(value.as_tuple().digits) <= _EXACT_DIGITS if isinstance(value, Decimal) else plain
        )
        return value if fits and math.isfinite(value) else str(value)
    if isinstance(value, datetime):
        return value if value.tzinfo is None and value.date() >= _FIRST_DAY else value.isoformat(" ")
    if isinstance(value, date):
        return value if value >= _FIRST_DAY else value.isoformat()
    if isinstance(value, time):
        return value if value.tzinfo is None else value.isoformat()
    if isinstance(value, timedelta):
        return value if value >= timedelta(0) else str(value)
    return _xlsx_text(_shown(value))


def _shown(value: Any) -> str:
    """A value as text: itself, or JSON for lists and objects; cut to what a cell may hold."""
    if isinstance(value, Mapping | list | tuple):
        text = orjson.dumps(jsonable(value)).decode()
    else:
        text = value if isinstance(value, str) else str(jsonable(value))
    return _cut(_CONTROLS.sub("\ufffd", text) if not text.isprintable() else text)


def _xlsx_text(text: str) -> str:
    return _cut(_CONTROLS.sub("\ufffd", text))


def _cut(text: str) -> str:
    """At most 32,767 characters as a spreadsheet counts them: one beyond the basic plane is two."""
    if len(text) * 2 <= _MAX_TEXT or len(text.encode("utf-16-le", "replace")) // 2 <= _MAX_TEXT:
        return text
    return text.encode("utf-16-le", "replace")[: (_MAX_TEXT - 1) * 2].decode("utf-16-le", "ignore") + "…"
