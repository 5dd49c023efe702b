"""Reads Excel 5 to 2003 workbooks (.xls): the records by xlrd, formats and dates as in every workbook."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import xlrd

from asynctask.errors import InputError, TooLarge, UnsupportedFormat
from asynctask.lists.readers.base import CellError, Limits, OpenOptions, put, trimmed
from asynctask.lists.readers.table import Table
from asynctask.lists.readers.workbook import (
    BUILT_IN,
    MAX_SHEETS,
    NUMBER,
    OleFile,
    choose_sheet,
    damaged,
    empty_sheet,
    encrypted,
    from_serial,
    kind_of_format,
    tidy,
)

STREAMS: Final = ("workbook", "book")
_BOF: Final = 0x0809
_VERSION_5, _VERSION_8 = 0x0500, 0x0600
_ERRORS: Final = {**xlrd.error_text_from_code, 0x2B: "#GETTING_DATA"}


def xls_table(path: Path, options: OpenOptions) -> Table:
    """The named sheet, else the first visible one with rows; its header is not looked for.

    Raises :class:`InputError`: ``unknown_sheet``, ``empty_sheet``, ``damaged_file``, ``encrypted``, ``encoding``,
    ``too_large``.
    """
    book = _open(path)
    names = book.sheet_names()
    wanted = _visible(book) if options.sheet is None else [choose_sheet(options.sheet, names)]
    kinds = _kinds(book)
    empty = set[int]()
    for place in wanted:
        if book._sh_abs_posn[place] in empty:
            continue  # another sheet on the same records
        with _refusals():
            sheet = book.sheet_by_index(place)

        def cells(sheet: Any = sheet) -> Iterator[tuple[int, list[Any]]]:
            return _cells(sheet, kinds, options.limits, epoch_1904=book.datemode == 1)

        if filled := sum(1 for _ in cells()):
            return Table(cells, names[place], filled)
        book.unload_sheet(place)
        empty.add(book._sh_abs_posn[place])
    raise empty_sheet(options.sheet)


def xls_sheets(path: Path, limits: Limits) -> list[str]:
    """The visible sheets in the workbook's order. Raises :class:`InputError` as the opener does."""
    book = _open(path)
    names = book.sheet_names()
    return [names[place] for place in _visible(book)]


class _Nowhere(io.TextIOBase):
    """Takes what xlrd prints; the standard output of a process that reads workbooks is for its answers."""

    def write(self, text: str) -> int:
        return len(text)


def _open(path: Path) -> Any:
    """The workbook without its sheets. Raises InputError for an encrypted, damaged or too old one."""
    with OleFile(path) as file:
        name = next((name for name in STREAMS if name in file.streams), None)
        data = b"" if name is None else file.read(name)
    if len(data) < 8 or struct.unpack_from("<H", data)[0] != _BOF:
        raise damaged("its first record is missing")
    (version,) = struct.unpack_from("<H", data, 4)
    if version not in (_VERSION_5, _VERSION_8):
        raise UnsupportedFormat("the workbook is older than Excel 5; open it in a spreadsheet program and save as .xlsx")
    # Texts of Excel 97 and later are Unicode whatever code page they claim.
    book = _book(data, "latin-1" if version == _VERSION_8 else None)
    if version == _VERSION_5 and book.codepage is None:
        book = _book(data, "cp1252")
    if book.nsheets > MAX_SHEETS:
        raise TooLarge(f"the workbook has more than {MAX_SHEETS:,} sheets; split it into several")
    return book


def _book(data: bytes, codec: str | None) -> Any:
    with _refusals():
        return xlrd.open_workbook(
            file_contents=data,
            encoding_override=codec,
            formatting_info=True,
            on_demand=True,
            ragged_rows=True,
            logfile=_Nowhere(),
        )


@contextmanager
def _refusals() -> Iterator[None]:
    """Makes an InputError of what xlrd raises: for a broken record that may be any exception."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        text = str(error)
        if text == "Workbook is encrypted":
            raise encrypted() from None
        if type(error) is LookupError and text.startswith("unknown encoding"):
            page = text.rpartition("_")[2].rpartition("cp")[2]
            raise InputError(
                f"the texts of the workbook are in code page {page}, which is not known; open it in a spreadsheet program"
                " and save as .xlsx",
                code="encoding",
            ) from None
        raise UnsupportedFormat(
            "the workbook is damaged, or in a form of .xls that cannot be read; open it in a spreadsheet program, save as"
            " .xlsx and upload that",
            code="damaged_file",
        ) from None


def _visible(book: Any) -> list[int]:
    return [place for place, state in enumerate(book._sheet_visibility) if state & 3 == 0]


def _kinds(book: Any) -> list[str]:
    """The kind of number of each cell style. xlrd adds American formats for the numbers that have no format code."""
    formats = BUILT_IN | {each.format_key: kind_of_format(each.format_str) for each in book.format_list}
    return [formats.get(style.format_key, NUMBER) for style in book.xf_list]


def _cells(sheet: Any, kinds: list[str], limits: Limits, *, epoch_1904: bool) -> Iterator[tuple[int, list[Any]]]:
    """See :data:`~asynctask.lists.readers.table.Cells`."""
    for row in range(sheet.nrows):
        cells: list[Any] = []
        for column, (kind, raw) in enumerate(zip(sheet.row_types(row), sheet.row_values(row), strict=True)):
            if kind in (xlrd.XL_CELL_NUMBER, xlrd.XL_CELL_DATE):
                style = sheet.cell_xf_index(row, column)
                shown = kinds[style] if style < len(kinds) else NUMBER
                value = from_serial(tidy(raw), shown, epoch_1904=epoch_1904) if shown else tidy(raw)
            elif kind == xlrd.XL_CELL_TEXT:
                value = trimmed(raw) or None
            elif kind == xlrd.XL_CELL_BOOLEAN:
                value = bool(raw)
            elif kind == xlrd.XL_CELL_ERROR:
                value = CellError(_ERRORS.get(raw, "#ERROR"))
            else:
                continue
            if value is not None:
                put(cells, column, value, row + 1, limits)
        if cells:
            yield row + 1, cells
