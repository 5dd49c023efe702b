"""Old Excel workbooks (.xls): read record by record, in plain Python, so that a broken one can do no more than raise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from asynctask.lists.readers.base import Limits, OpenOptions, column_letters, over_limit
from asynctask.lists.readers.biff import Globals, XlsSheet, read_globals
from asynctask.lists.readers.biff_cells import sheet_cells
from asynctask.lists.readers.ole import OleFile
from asynctask.lists.readers.package import damaged
from asynctask.lists.readers.table import Table, TableSource, sheet_source
from asynctask.lists.readers.workbook import choose_sheet, empty_sheet

__all__ = ["STREAMS", "open_xls", "xls_table"]

STREAMS: Final = ("workbook", "book")
_MAX_UNORDERED: Final = 1_000_000


def open_xls(path: Path, options: OpenOptions) -> TableSource:
    """Open the asked sheet, else the first visible one with rows.

    Raises :class:`InputError`: ``unknown_sheet``, ``empty_sheet``, ``no_header``, ``duplicate_column``, ``damaged_file``,
    ``encrypted``, ``too_large``.
    """
    return sheet_source("xls", xls_table(path, options), options)


def xls_table(path: Path, options: OpenOptions) -> Table:
    """The asked sheet, else the first visible one with rows, whatever stands in them."""
    with OleFile(path) as file, file.open(_stream(file)) as stream:
        book = read_globals(stream)
    try:
        empty: dict[int, int] = {}
        for sheet in _wanted(book, options.sheet):
            if sheet.at in empty:
                continue  # several sheets on the same records
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
    """The names of the sheets that can be seen, in the workbook's order. Raises :class:`InputError` as the opener does."""
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
    """The rows of a sheet. Nearly every program writes them in order; one that does not has them sorted in memory."""

    def __init__(self, path: Path, sheet: XlsSheet, book: Globals, limits: Limits) -> None:
        self._path, self._sheet, self._book, self._limits = path, sheet, book, limits
        self._ordered = True
        self.end = 0
        """Where the records of the sheet end; known once they were gone through."""

    def count(self) -> int:
        """How many rows are not empty."""
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
        # Without the empty cells before each: there may be a thousand for one that has a value.
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
        limits = self._limits
        if column >= limits.max_columns:
            what = f"row {row + 1} has a cell in column {column_letters(column)}, which is column {column + 1:,}"
            raise over_limit(what, "max_columns", limits.max_columns)
        if type(value) is str and len(value) > limits.max_cell_chars:
            what = f"a cell of row {row + 1} has {len(value):,} characters"
            raise over_limit(what, "max_cell_chars", limits.max_cell_chars)


def _put(cells: list[Any], column: int, value: Any) -> None:
    if column < len(cells):
        cells[column] = value
    else:
        cells.extend([None] * (column - len(cells)))
        cells.append(value)
