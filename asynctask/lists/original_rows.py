"""The typed rows of a workbook, cached beside it: written once, streamed for every report.

The file is a gzip of JSON lines. The first describes the columns; then each row is ``[number, [cell, ...]]``, cells as in
:mod:`asynctask.lists.written_cells`. Only this module reads and writes it.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
from array import array
from bisect import bisect_right
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final
from xml.parsers.expat import XMLParserType

import orjson

from asynctask.errors import InputError
from asynctask.lists.readers.base import Limits, Source, column_letters
from asynctask.lists.readers.workbook import Package, read_workbook
from asynctask.lists.written_cells import Percent, packed, unpacked

_VERSION: Final = 1
_BATCH: Final = 500
_DAMAGED: Final = (OSError, EOFError, ValueError, KeyError, IndexError, TypeError)


class KeptRows:
    """The rows that :func:`keep_rows` wrote. Raises :class:`InputError` for any other file.

    ``headers``: all columns of the list in order, those without a header too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with gzip.open(path, "rb") as file:
                first = orjson.loads(file.readline())
            if first["version"] != _VERSION:
                raise ValueError("another version")
            self._cells: list[str] = first["cells"]
            self.headers: tuple[str, ...] = tuple(first["headers"])
        except _DAMAGED as error:
            raise InputError(f"{path.name} cannot be read: {error}", code="damaged_file") from error

    def rows(self) -> Generator[tuple[int, Mapping[str, Any]], None, None]:
        """Row number and cells by header, in order. Raises :class:`InputError` for a damaged file."""
        names = self._cells
        try:
            with gzip.open(self._path, "rb") as file:
                file.readline()
                for line in file:
                    number, cells = orjson.loads(line)
                    yield (
                        number,
                        {
                            name: _decoded(cell) if type(cell) is dict else cell
                            for name, cell in zip(names, cells, strict=False)
                        },
                    )
        except _DAMAGED as error:
            raise InputError(f"{self._path.name} cannot be read: {error}", code="damaged_file") from error


def keep_rows(source: Source, percents: Percents, target: Path) -> None:
    """Writes the rows of an open list to ``target`` atomically. One caller at a time.

    Raises what the source raises, and OSError.
    """
    body, made = _drafts(target)
    with body.open("w+b") as rows:
        names = _write_rows(source, percents, rows)
        headers = all_columns(source, names)
        first = {"version": _VERSION, "cells": names, "headers": headers}
        with made.open("wb") as out:
            # The columns are known last and needed first: a gzip file may have several members.
            out.write(gzip.compress(orjson.dumps(first) + b"\n", 1))
            rows.seek(0)
            shutil.copyfileobj(rows, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
    made.replace(target)


def remove_drafts(target: Path) -> None:
    """Removes the temporary files of an interrupted :func:`keep_rows`."""
    for path in _drafts(target):
        path.unlink(missing_ok=True)


def _drafts(target: Path) -> tuple[Path, Path]:
    return target.with_suffix(".body"), target.with_suffix(".new")


def all_columns(source: Source, names: list[str]) -> list[str]:
    """All columns of a list in the order of the sheet; ``names`` are the keys of its rows, in any order."""
    headers, places = list(source.headers or ()), source.places or ()
    at = dict(zip(headers, places, strict=False))
    known = set(headers)
    for name in names:
        if name not in known:
            place = _column_index(name)
            if place is not None:
                at[name] = place
            headers.append(name)
    return sorted(headers, key=lambda name: at[name]) if len(at) == len(headers) else headers


def _column_index(name: str) -> int | None:
    """The index of the column for a name such as "Column C"; None for any other."""
    letters = name.removeprefix("Column ").rstrip("*")
    if not (name.startswith("Column ") and letters.isascii() and letters.isalpha() and len(letters) <= 3):
        return None
    place = _column(letters)
    return place if column_letters(place) == letters else None


def _write_rows(source: Source, percents: Percents, out: BinaryIO) -> list[str]:
    index = {name: place for place, name in enumerate(source.headers or ())}
    columns = dict(zip(source.headers or (), source.places or (), strict=False))
    lines: list[bytes] = []
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1, mtime=0) as packed:
        for row in source.rows():
            cells: list[Any] = [None] * len(index)
            for name, value in row.values.items():
                if name not in index:
                    index[name], columns[name] = len(index), _column_index(name) or 0
                    cells.append(None)
                kind = type(value)
                if percents and (kind is int or kind is float):
                    pattern = percents.of(row.number, columns[name])
                    value = Percent(value, pattern) if pattern else value
                cells[index[name]] = _encoded(value)
            lines.append(orjson.dumps([row.number, cells]))
            if len(lines) >= _BATCH:
                packed.write(b"\n".join(lines) + b"\n")
                lines.clear()
        packed.write(b"".join(line + b"\n" for line in lines))
    return list(index)


def _encoded(value: Any) -> Any:
    kind = type(value)
    if value is None or kind is str or kind is int or kind is float or kind is bool:
        return value
    return {"p": [float(value), value.pattern]} if kind is Percent else packed(value)


def _decoded(value: dict[str, Any]) -> Any:
    return Percent(*value["p"]) if "p" in value else unpacked(value)


# -- percentages: the fast readers give numbers without their formats

_BUILTIN: Final = {"9": "0%", "10": "0.00%"}
_PLAIN: Final = re.compile(r"[#0?,. ]{1,40}%")
_USUAL: Final = "0.00%"
_MAX_RUNS: Final = 1_000_000
_MAX_STYLES: Final = 100_000
_MAX_REPEATED: Final = 1_000
_MAX_PATTERNS: Final = 50
_REF: Final = re.compile(r"([A-Z]{1,3})([0-9]{1,7})")


class Percents:
    """The percentages of a sheet, as vertical runs of cells: a column of a million is one run."""

    def __init__(self) -> None:
        self._patterns: dict[str, int] = {_USUAL: 0}
        self._names = [_USUAL]
        self._runs: dict[int, tuple[array[int], array[int], array[int]]] = {}
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    def add(self, row: int, column: int, pattern: str, last: int = 0) -> None:
        """Adds a cell, or those of a column down to the row ``last``: rows from 1, columns from 0, rows in order.

        Beyond a million runs it ignores further cells.
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
        """The number format of a cell that shows a percentage, else None."""
        if column is None or column not in self._runs:
            return None
        firsts, lasts, kinds = self._runs[column]
        place = bisect_right(firsts, row) - 1
        return self._names[kinds[place]] if place >= 0 and row <= lasts[place] else None


def percents_of(path: Path, limits: Limits, kind: str, sheet_name: str | None) -> Percents:
    """The percentages of a sheet of an Excel (``kind`` xlsx) or OpenDocument (ods) workbook; empty for other formats.

    Raises :class:`InputError` for a damaged workbook.
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
    """Index of a cell style -> number format, for percentages."""
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
    """A number format without its literal text."""
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
    """An OpenDocument sheet repeats rows and cells by number instead of giving their position."""
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
