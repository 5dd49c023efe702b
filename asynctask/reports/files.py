"""Reports as CSV and Excel files: the user's own columns unchanged, and beside them the result of each row.

A report is safe to open (no text becomes a formula, a link or a command) and can be corrected and uploaded again.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, TextIO

from asynctask.errors import Unavailable
from asynctask.lists.readers.base import COLUMNS, SUFFIX, normalise, of_locale, report_block
from asynctask.lists.workbook_writer import Cell, iter_workbook, table
from asynctask.lists.written_cells import csv_cell

_CHUNK: Final = 16_384
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


def write_xlsx(path: Path, headers: Sequence[str], rows: Iterable[ReportRow], *, locale: str = "en") -> int:
    """Writes the workbook of :func:`iter_xlsx` to a file.

    Arguments: the target, and those of :func:`iter_xlsx`. Returns the number of rows. If ``rows`` raises, this raises at
    once and leaves no file. Raises :class:`Unavailable` if writing fails.
    """
    counted = _Counted(rows)
    pieces = iter_xlsx(headers, counted, locale=locale)
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


def iter_xlsx(headers: Sequence[str], rows: Iterable[ReportRow], *, locale: str = "en") -> Generator[bytes, None, None]:
    """A report as a workbook in pieces that leave while ``rows`` are read; memory is constant except for the comments.

    Arguments: the original headers; the rows; the language of the report's own headers. If ``rows`` raises, the pieces so
    far cannot be taken for a workbook: its directory is in the last one.
    """
    kept, added = report_headers(headers, locale)
    cells = (_marked(row, kept) for row in rows)
    return iter_workbook(table("Rows 1", (*kept, *added), cells))


def _marked(row: ReportRow, kept: Sequence[str]) -> list[Any]:
    """The cells of a row; the rejected ones are marked, with the fault as a comment."""
    cells = [*map(row.values.get, kept), *_outcome(row)]
    faults = {column: row.bad_columns[name] for column, name in enumerate(kept) if name in row.bad_columns}
    if row.bad_row is not None:
        faults[len(kept) + _ERROR] = row.bad_row
    for column, fault in faults.items():
        cells[column] = Cell(cells[column], _REFUSED, fault)
    return cells


class _Counted:
    def __init__(self, rows: Iterable[ReportRow]) -> None:
        self._rows, self.count = rows, 0

    def __iter__(self) -> Iterator[ReportRow]:
        for row in self._rows:
            self.count += 1
            yield row


def _outcome(row: ReportRow) -> tuple[Any, ...]:
    return row.number, row.status, row.error, row.attempts, row.result
