"""Excel workbooks (.xlsx, .xlsm), streamed: what they are made of is looked at once, and then their rows one by one.

Of merged cells only the top left one has the value. A formula gives the value that was saved with it. The dimension that a
sheet claims is not believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asynctask.lists.readers.base import Limits, OpenOptions
from asynctask.lists.readers.package import Package, damaged
from asynctask.lists.readers.sheet_xml import Book, SheetXml
from asynctask.lists.readers.table import Table, TableSource, sheet_source
from asynctask.lists.readers.texts import load_texts
from asynctask.lists.readers.workbook import SheetPart, choose_sheet, empty_sheet, read_workbook, sheet_kinds

__all__ = ["open_xlsx", "xlsx_sheets", "xlsx_table"]


def open_xlsx(path: Path, options: OpenOptions) -> TableSource:
    """Open the asked sheet, else the first visible one with rows.

    Raises :class:`InputError`: ``unknown_sheet``, ``empty_sheet``, ``no_header``, ``duplicate_column``, ``damaged_file``,
    ``encrypted``, ``zip_bomb``, ``too_large``.
    """
    return sheet_source("xlsx", xlsx_table(path, options), options)


def xlsx_table(path: Path, options: OpenOptions) -> Table:
    """The asked sheet, else the first visible one with rows, whatever stands in them."""
    with Package(path, options.limits) as package:
        plan = read_workbook(package)
        wanted = _wanted(plan.sheets, options.sheet)
        texts = load_texts(package, plan.texts_part)
        try:
            book = Book(texts, sheet_kinds(package, plan.styles_part), plan.epoch_1904, options.limits)
            looked_at: set[str] = set()
            for part in wanted:
                if not part.part:
                    raise damaged(f"it does not say which of its parts is sheet {part.name!r}")
                if part.part.lower() in looked_at:
                    continue  # several sheets on one part, which is known to be empty
                looked_at.add(part.part.lower())
                sheet = SheetXml(lambda: Package(path, options.limits), part.part, book)
                if filled := sheet.prove():
                    return Table(sheet.cells, part.name, filled, texts.close)
            raise empty_sheet(options.sheet)
        except BaseException:
            texts.close()
            raise


def xlsx_sheets(path: Path, limits: Limits) -> list[str]:
    """The names of the sheets that can be seen, in the workbook's order. Raises :class:`InputError` as the opener does."""
    with Package(path, limits) as package:
        return [sheet.name for sheet in read_workbook(package).sheets if sheet.visible]


def _wanted(sheets: Sequence[SheetPart], name: str | None) -> Sequence[SheetPart]:
    if name is None:
        return [sheet for sheet in sheets if sheet.visible]
    return [sheets[choose_sheet(name, [sheet.name for sheet in sheets])]]
