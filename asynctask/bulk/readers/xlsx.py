"""Excel workbooks (.xlsx, .xlsm): python-calamine reads, after the workbook is proved to be harmless.

Of merged cells only the top left one has the value. A formula gives the value that was saved with it. The dimension that a
sheet claims is not believed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import python_calamine

from asynctask.bulk.readers.base import CellError, OpenOptions, RawRow, over_limit
from asynctask.bulk.readers.headers import HEADER_ROWS, find_header
from asynctask.bulk.readers.package import Package, damaged
from asynctask.bulk.readers.sheet_scan import SheetPart, SheetScan, prove_parts, scan_sheet, sheet_parts
from asynctask.errors import InputError, UnsupportedFormat

__all__ = ["XlsxSource", "open_xlsx"]

_EXACT: Final = 2.0**53


class XlsxSource:
    """A sheet of a workbook; see :class:`~asynctask.bulk.readers.base.Source`."""

    format = "xlsx"

    def __init__(self, sheet: Any, scan: SheetScan, options: OpenOptions) -> None:
        self._sheet, self._errors, self._limits = sheet, scan.errors, options.limits
        # Its own idea of the first column: a cell with an empty value is in the XML, but may not be in its rectangle.
        self._left: int = sheet.start[1] if sheet.start else 0
        first = list(islice(self._cells(), HEADER_ROWS))
        self._header = find_header(first, options.expect, options.limits, offset=self._left)
        self.headers: tuple[str, ...] | None = self._header.headers
        self.planned: int | None = self._count()
        if self.planned > self._limits.max_rows:
            raise over_limit(f"the sheet has {self.planned:,} rows", "max_rows", self._limits.max_rows)

    def rows(self, after: int = 0) -> Iterator[RawRow]:
        """See :meth:`Source.rows`."""
        count = 0
        for number, cells in self._cells():
            if number <= self._header.number:
                continue
            row = self._header.row(number, cells, extra_is_problem=False)
            if row is None:
                continue
            count += 1
            if count > self._limits.max_rows:
                raise over_limit("the sheet has more rows", "max_rows", self._limits.max_rows)
            if number > after:
                yield row

    def close(self) -> None:
        """See :meth:`Source.close`."""
        self._sheet = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _count(self) -> int:
        """How many rows :meth:`rows` will give: the first filled cell of each settles it, so this is quick."""
        count = empty = 0
        for number, cells in enumerate(self._sheet.iter_rows(), 1):
            for cell in cells:
                if cell != "" and (type(cell) is not str or not cell.isspace()):
                    break
            else:
                if number not in self._errors:
                    empty += 1
                    if empty >= self._limits.max_empty_rows:
                        break
                    continue
            empty = 0
            count += number > self._header.number
        return count

    def _cells(self) -> Iterator[tuple[int, list[Any]]]:
        """The rows that are not empty, with their numbers, until ``max_empty_rows`` empty ones follow each other."""
        if self._sheet is None:
            raise ValueError("the source is closed")
        empty, limit, chars = 0, self._limits.max_empty_rows, self._limits.max_cell_chars
        for number, cells in enumerate(self._sheet.iter_rows(), 1):
            row = [_value(cell, number, chars) for cell in cells]
            for column, text in self._errors.get(number, {}).items():
                place = column - self._left
                if 0 <= place < len(row) and row[place] is None:
                    row[place] = CellError(text)
            if any(cell is not None for cell in row):
                empty = 0
                yield number, row
            else:
                empty += 1
                if empty >= limit:
                    return


def open_xlsx(path: Path, options: OpenOptions) -> XlsxSource:
    """Open the asked sheet, else the first visible one with rows.

    Raises :class:`InputError`: ``unknown_sheet``, ``empty_sheet``, ``no_header``, ``duplicate_column``, ``damaged_file``,
    ``encrypted``, ``zip_bomb``, ``too_large``.
    """
    with Package(path, options.limits) as package:
        longest = prove_parts(package)
        parts = sheet_parts(package)
        with _sound():
            book = _open(path)
            try:
                part, scan = _choose(book, parts, package, longest, options)
                sheet = book.get_sheet_by_name(part.name)
            finally:
                book.close()
    with _sound():
        return XlsxSource(sheet, scan, options)


def _open(path: Path) -> Any:
    """By its path where the name tells the fast reader the right format: else it takes a copy of the file into memory."""
    if path.suffix.lower() in {".xlsx", ".xlsm"}:
        return python_calamine.CalamineWorkbook.from_path(path)
    with path.open("rb") as file:
        return python_calamine.CalamineWorkbook.from_filelike(file)


def _choose(
    book: Any, parts: list[SheetPart], package: Package, longest: int, options: OpenOptions
) -> tuple[SheetPart, SheetScan]:
    """The sheet to read, and what the look through it found."""
    metadata = list(book.sheets_metadata)
    if [each.name for each in metadata] != [part.name for part in parts]:
        raise damaged("its list of sheets is ambiguous")
    tables = [
        (part, each.visible == python_calamine.SheetVisibleEnum.Visible)
        for part, each in zip(parts, metadata, strict=True)
        if each.typ == python_calamine.SheetTypeEnum.WorkSheet
    ]
    if options.sheet is not None:
        wanted = [_by_name(options.sheet, [part for part, _ in tables])]
    else:
        wanted = [part for part, visible in tables if visible]
    for part in wanted:
        scan = scan_sheet(package, part, longest, options.limits)
        if scan.cells:
            return part, scan
    if options.sheet is not None:
        what = f"sheet {options.sheet!r} is empty"
    else:
        what = "no visible sheet of the workbook has a row"
    raise InputError(f"{what}; put the data under a row with the names of the columns", code="empty_sheet")


def _by_name(name: str, parts: list[SheetPart]) -> SheetPart:
    for compare in (str, lambda text: text.strip().casefold()):
        for part in parts:
            if compare(part.name) == compare(name):
                return part
    names = ", ".join(repr(part.name) for part in parts[:50]) or "none"
    raise InputError(f"the workbook has no sheet {name!r}; its sheets: {names}", code="unknown_sheet")


def _value(cell: Any, number: int, max_chars: int) -> Any:
    """A cell as it is handed on: text stripped, nothing as None, whole numbers as integers."""
    kind = type(cell)
    if kind is str:
        if len(cell) > max_chars:
            raise over_limit(f"a cell of row {number} has {len(cell):,} characters", "max_cell_chars", max_chars)
        return cell.strip() or None
    if kind is float:
        if not math.isfinite(cell):
            return CellError("#NUM!")
        if cell.is_integer() and -_EXACT < cell < _EXACT:
            return int(cell)
    return cell


@contextmanager
def _sound() -> Iterator[None]:
    """Whatever the fast reader says about a broken workbook becomes an InputError."""
    try:
        yield
    except InputError:
        raise
    except python_calamine.PasswordError:
        raise UnsupportedFormat(
            "the workbook is protected with a password; remove it and upload again", code="encrypted"
        ) from None
    except (python_calamine.CalamineError, ValueError, OverflowError, OSError) as error:
        raise damaged(str(error) or type(error).__name__) from None
    except BaseException as error:
        # A panic of the native code is no Exception; everything else that is none must pass.
        if type(error).__name__ != "PanicException":
            raise
        raise damaged("the reader gave up on it") from None
