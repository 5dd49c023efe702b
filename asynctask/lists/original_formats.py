"""Which cells of a workbook are shown as percentages: the fast reader gives their numbers, not how they are shown."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from xml.parsers.expat import XMLParserType

from asynctask.lists.readers.base import Limits
from asynctask.lists.readers.package import Package
from asynctask.lists.readers.workbook import read_workbook

__all__ = ["Percents", "percents_of"]

_BUILTIN: Final = {"9": "0%", "10": "0.00%"}
_PLAIN: Final = re.compile(r"[#0?,. ]{1,40}%")
_USUAL: Final = "0.00%"
_MAX_RUNS: Final = 1_000_000
_MAX_STYLES: Final = 100_000
_MAX_REPEATED: Final = 1_000
_MAX_PATTERNS: Final = 50
_REF: Final = re.compile(r"([A-Z]{1,3})([0-9]{1,7})")


class Percents:
    """The percentages of a sheet, as runs of cells under each other: a column of a million is one run."""

    def __init__(self) -> None:
        self._patterns: dict[str, int] = {_USUAL: 0}
        self._names = [_USUAL]
        self._runs: dict[int, tuple[array[int], array[int], array[int]]] = {}
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    def add(self, row: int, column: int, pattern: str, last: int = 0) -> None:
        """Notes a cell, or those of a column down to the row ``last``: rows from 1, columns from 0, rows in order.

        Beyond a million runs nothing is noted any more.
        """
        if pattern not in self._patterns and len(self._names) < _MAX_PATTERNS:
            self._patterns[pattern] = len(self._names)
            self._names.append(pattern)
        kind, last = self._patterns.get(pattern, 0), max(row, last)
        firsts, lasts, kinds = self._runs.setdefault(column, (array("L"), array("L"), array("L")))
        if lasts and lasts[-1] == row - 1 and kinds[-1] == kind:
            lasts[-1] = last
        elif self._count < _MAX_RUNS and (not lasts or row > lasts[-1]):
            self._count += 1
            firsts.append(row)
            lasts.append(last)
            kinds.append(kind)

    def of(self, row: int, column: int | None) -> str | None:
        """The number format of a cell if that shows a percentage."""
        if column is None or column not in self._runs:
            return None
        firsts, lasts, kinds = self._runs[column]
        place = bisect_right(firsts, row) - 1
        return self._names[kinds[place]] if place >= 0 and row <= lasts[place] else None


def percents_of(path: Path, limits: Limits, kind: str, sheet_name: str | None) -> Percents:
    """The percentages of a sheet of an Excel (``kind`` xlsx) or OpenDocument (ods) workbook; of other files none are known.

    Raises :class:`InputError` for a workbook that is damaged.
    """
    found = Percents()
    if kind == "xlsx":
        with Package(path, limits) as package:
            plan = read_workbook(package)
            part = next((sheet.part for sheet in plan.sheets if sheet.name == sheet_name), None)
            known = plan.styles_part is not None and plan.styles_part.lower() in package.parts
            styles = _percent_styles(package, plan.styles_part or "") if known else {}
            if styles and part is not None:
                package.parse(part, lambda parser: _attach(parser, styles, found))
    elif kind == "ods":
        with Package(path, limits) as package:
            package.parse("content.xml", lambda parser: _attach_ods(parser, sheet_name, found))
    return found


def _percent_styles(package: Package, part: str) -> Mapping[str, str]:
    """Index of a cell style -> number format, of those that show a percentage."""
    codes, styles = dict(_BUILTIN), dict[str, str]()
    count, inside = 0, False

    def start(tag: str, attrs: Mapping[str, str]) -> None:
        nonlocal count, inside
        tag = tag.rpartition(":")[2]
        if tag == "numFmt" and len(codes) < _MAX_STYLES and "%" in _unquoted(attrs.get("formatCode", "")):
            code = attrs["formatCode"]
            codes[attrs.get("numFmtId", "")] = code if _PLAIN.fullmatch(code) else _USUAL
        elif tag == "cellXfs":
            inside = True
        elif tag == "xf" and inside:
            if (pattern := codes.get(attrs.get("numFmtId", ""))) and len(styles) < _MAX_STYLES:
                styles[str(count)] = pattern
            count += 1

    def end(tag: str) -> None:
        nonlocal inside
        inside = inside and tag.rpartition(":")[2] != "cellXfs"

    def attach(parser: XMLParserType) -> None:
        parser.StartElementHandler, parser.EndElementHandler = start, end

    package.parse(part, attach)
    return styles


def _unquoted(code: str) -> str:
    """A number format without the text that it only shows."""
    return re.sub(r'"[^"]*"|\\.', "", code)


def _attach(parser: XMLParserType, styles: Mapping[str, str], found: Percents) -> None:
    row, column = 0, -1

    def start(tag: str, attrs: Mapping[str, str]) -> None:
        nonlocal row, column
        tag = tag.rpartition(":")[2]
        if tag == "row":
            digits = attrs.get("r", "")
            row, column = (int(digits) if digits.isdecimal() else row + 1), -1
        elif tag == "c":
            column += 1
            if match := _REF.fullmatch(attrs.get("r", "")):
                row, column = int(match[2]), _column(match[1])
            pattern = styles.get(attrs.get("s", ""))
            if pattern is not None:
                found.add(row, column, pattern)

    parser.StartElementHandler = start


def _attach_ods(parser: XMLParserType, sheet_name: str | None, found: Percents) -> None:
    """An OpenDocument sheet says how often a row or a cell is repeated instead of where it stands."""
    first, last, column, inside = 1, 0, 0, False

    def start(tag: str, attrs: Mapping[str, str]) -> None:
        nonlocal first, last, column, inside
        if tag == "table:table":
            first, last, inside = 1, 0, attrs.get("table:name") == sheet_name
        elif not inside:
            return
        elif tag == "table:table-row":
            first, column = last + 1, 0
            last += _count(attrs.get("table:number-rows-repeated"))
        elif tag in ("table:table-cell", "table:covered-table-cell"):
            count = _count(attrs.get("table:number-columns-repeated"))
            if attrs.get("office:value-type") == "percentage":
                for place in range(column, column + min(count, _MAX_REPEATED)):
                    found.add(first, place, _USUAL, last)
            column += count

    parser.StartElementHandler = start


def _count(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) <= 7 else 1


def _column(letters: str) -> int:
    column = 0
    for letter in letters:
        column = column * 26 + ord(letter) - 64
    return column - 1
