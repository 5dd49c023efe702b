"""Reads OpenDocument spreadsheets (.ods), streaming.

A formula gives its saved value. Repeated rows and cells are expanded, empty ones at no cost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import time, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from asynctask.errors import TooLarge
from asynctask.lists.readers.base import CellError, Limits, OpenOptions, Percent, put, trimmed
from asynctask.lists.readers.table import Table
from asynctask.lists.readers.workbook import (
    MAX_SHEETS,
    MAX_STYLES,
    MOMENT,
    NO_VALUE,
    PERCENT,
    Package,
    choose_sheet,
    damaged,
    empty_sheet,
    encrypted,
    feed,
    formatted,
    from_iso,
    plain_number,
    shown_format,
)

MIMETYPE: Final = b"application/vnd.oasis.opendocument.spreadsheet"
_CONTENT: Final = "content.xml"
_MANIFEST: Final = "meta-inf/manifest.xml"
_COUNTED_BYTES: Final = 33_554_432
"""Size of the XML up to which the rows are counted beforehand."""
_MAX_TEXT: Final = 8_388_608
_MAX_REPEAT: Final = 16_777_216
_ROWS: Final = 1_048_576
_NUMBERS: Final = frozenset({"float", "currency", "percentage"})
_SHOWN_TRUTH: Final = {"TRUE": True, "FALSE": False}
"""LibreOffice writes the result of =TRUE() as the number 1, displayed as TRUE."""
_ERROR_TEXT: Final = re.compile(r"#[A-Z0-9/_]{1,30}[!?]?|Err:[0-9]{3}")
_DURATION: Final = re.compile(
    r"(-?)P(?:([0-9]{1,9})D)?T?(?:([0-9]{1,9})H)?(?:([0-9]{1,9})M)?(?:([0-9]{1,9}(?:[.,][0-9]{1,12})?)S)?"
)
_DAY: Final = timedelta(days=1)


class _Sheet(NamedTuple):
    """The start of a sheet."""

    name: str
    visible: bool


class _Row(NamedTuple):
    """A non-empty row that stands ``repeat`` times from ``number`` on."""

    number: int
    repeat: int
    cells: list[Any]


def ods_table(path: Path, options: OpenOptions) -> Table:
    """The named sheet, else the first visible one with rows; its header is not looked for.

    Raises :class:`InputError`: ``unknown_sheet``, ``empty_sheet``, ``damaged_file``, ``encrypted``, ``zip_bomb``,
    ``too_large``.
    """
    limits = options.limits
    with Package(path, limits) as package:
        _refuse_encrypted(package)
        for _ in package.chunks(_CONTENT):
            pass  # size and checksum are verified at the end of the part
        place, name = _choose(_events(package, limits), options.sheet)
        counted = not options.report and package.parts[_CONTENT].file_size <= _COUNTED_BYTES

    def cells() -> Iterator[tuple[int, list[Any]]]:
        with Package(path, limits) as again:
            for row in _rows(_events(again, limits, percents=options.report), place):
                for number in range(row.number, row.number + row.repeat):
                    yield number, list(row.cells)

    filled = None
    if counted:
        with Package(path, limits) as package:
            filled = sum(row.repeat for row in _rows(_events(package, limits), place))
    return Table(cells, name, filled)


def ods_sheets(path: Path, limits: Limits) -> list[str]:
    """The visible sheets in the workbook's order. Raises :class:`InputError` as the opener does."""
    with Package(path, limits) as package:
        return [each.name for each in _events(package, limits) if isinstance(each, _Sheet) and each.visible]


def _refuse_encrypted(package: Package) -> None:
    if _MANIFEST not in package.parts:
        return
    found = False

    def start(tag: str, _: Mapping[str, str]) -> None:
        nonlocal found
        found = found or tag.endswith("encryption-data")

    package.parse(_MANIFEST, start)
    if found:
        raise encrypted()


def _choose(events: Iterator[_Sheet | _Row], wanted: str | None) -> tuple[int, str]:
    """Index and name of the sheet to read."""
    sheets: list[_Sheet] = []
    filled: list[bool] = []
    for event in events:
        if isinstance(event, _Sheet):
            sheets.append(event)
            filled.append(False)
            continue
        filled[-1] = True
        if (wanted is None and sheets[-1].visible) or wanted == sheets[-1].name:
            return len(sheets) - 1, sheets[-1].name
    if wanted is not None:
        place = choose_sheet(wanted, [sheet.name for sheet in sheets])
        if filled[place]:
            return place, sheets[place].name
    raise empty_sheet(wanted)


def _rows(events: Iterator[_Sheet | _Row], wanted: int) -> Iterator[_Row]:
    place = -1
    for event in events:
        if isinstance(event, _Sheet):
            place += 1
            if place > wanted:
                return
        elif place == wanted:
            yield event


def _events(package: Package, limits: Limits, *, percents: bool = False) -> Iterator[_Sheet | _Row]:
    parser = _Parser(limits, percents)
    for _ in feed(package.chunks(_CONTENT), _CONTENT, parser.start, parser.end, parser.text):
        yield from parser.take()


class _Parser:
    """Handlers for an XML parser that collect sheets and rows."""

    def __init__(self, limits: Limits, percents: bool) -> None:
        self._limits, self._percents = limits, percents
        self._events: list[_Sheet | _Row] = []
        self._path: list[str] = []
        self._style = ""
        self._hidden: set[str] = set()
        self._number, self._repeat, self._column = 1, 1, 0
        self._row: list[Any] = []
        self._cell: Mapping[str, str] | None = None
        self._sheets = self._table_depth = self._cell_depth = self._text_depth = 0
        self._texts: list[str] = []
        self._size, self._shown = 0, False
        self._starts: dict[str, Callable[[Mapping[str, str]], None]] = {
            "table-cell": self._open_cell, "covered-table-cell": self._open_cell, "table-row": self._open_row,
            "table": self._open_table, "style": self._open_style, "table-properties": self._table_properties,
            "p": self._open_paragraph,
            "s": lambda attrs: self._add_blank(" " * min(_repeat(attrs, "text:c"), _MAX_TEXT + 1)),
            "tab": lambda _: self._add_blank("\t"), "line-break": lambda _: self._add_blank("\n"),
        }  # fmt: skip

    def take(self) -> list[_Sheet | _Row]:
        events, self._events = self._events, []
        return events

    def start(self, tag: str, attrs: Mapping[str, str]) -> None:
        tag = tag.rpartition(":")[2]
        handler = self._starts.get(tag)
        if handler is not None:
            handler(attrs)
        self._path.append(tag)

    def end(self, tag: str) -> None:
        tag = self._path.pop()
        depth = len(self._path)
        if self._cell is not None:
            if depth == self._cell_depth:
                self._close_cell(self._cell)
            elif depth == self._text_depth:
                self._text_depth = 0
        elif tag == "table-row" and self._table_depth:
            if self._row:
                self._close_row()
            self._number += self._repeat
        elif depth == self._table_depth:
            self._table_depth = 0

    def text(self, data: str) -> None:
        if self._text_depth:
            # A line end in the XML is a space; those of the text are elements.
            self._add(_in_one_line(data) if "\n" in data else data)

    def _add(self, text: str) -> None:
        self._size += len(text)
        if self._size > _MAX_TEXT:
            raise TooLarge(f"a text of the workbook has more than {_MAX_TEXT:,} characters; shorten it")
        self._texts.append(text)

    # -- tables and rows

    def _open_style(self, attrs: Mapping[str, str]) -> None:
        self._style = attrs.get("style:name", "") if attrs.get("style:family") == "table" else ""

    def _table_properties(self, attrs: Mapping[str, str]) -> None:
        if attrs.get("table:display") == "false" and self._style and len(self._hidden) < MAX_STYLES:
            self._hidden.add(self._style)

    def _open_table(self, attrs: Mapping[str, str]) -> None:
        if self._path and self._path[-1] == "spreadsheet":
            self._sheets += 1
            if self._sheets > MAX_SHEETS:
                raise TooLarge(f"the workbook has more than {MAX_SHEETS:,} sheets; split it into several")
            self._table_depth = len(self._path)
            visible = attrs.get("table:style-name", "") not in self._hidden
            self._events.append(_Sheet(attrs.get("table:name", ""), visible))
            self._number = 1

    def _open_row(self, attrs: Mapping[str, str]) -> None:
        if self._cell is None and self._table_depth:
            self._repeat = _repeat(attrs, "table:number-rows-repeated")
            self._column, self._row = 0, []

    def _close_row(self) -> None:
        if self._number + self._repeat - 1 > _ROWS:
            raise damaged("a row stands outside the sheet")
        self._events.append(_Row(self._number, self._repeat, self._row))
        self._row = []

    # -- cells

    def _open_cell(self, attrs: Mapping[str, str]) -> None:
        if self._cell is None and self._table_depth:
            self._cell, self._cell_depth, self._text_depth = attrs, len(self._path), 0
            self._texts.clear()
            self._size, self._shown = 0, False

    def _open_paragraph(self, _: Mapping[str, str]) -> None:
        # The cell's text is in its direct paragraphs; others belong to comments and drawings.
        if self._cell is not None and len(self._path) == self._cell_depth + 1 and not self._text_depth:
            self._text_depth = len(self._path)
            self._shown = True
            if self._texts:
                self._add("\n")

    def _add_blank(self, text: str) -> None:
        if self._text_depth:
            self._add(text)

    def _close_cell(self, attrs: Mapping[str, str]) -> None:
        repeat = _repeat(attrs, "table:number-columns-repeated")
        text = trimmed("".join(self._texts)) or None
        self._cell, self._text_depth = None, 0
        value = _value(attrs, text)
        if value is None and "table:formula" in attrs and "office:value-type" not in attrs and not self._shown:
            value = CellError(NO_VALUE)  # an empty text as a saved result has an empty paragraph
        if self._percents and attrs.get("office:value-type") == "percentage" and type(value) in (int, float):
            value = Percent(value, PERCENT)
        if text is not None and attrs.get("office:value-type") == "float" and type(value) in (int, float):
            value = formatted(value, shown_format(value, text))
        if value is not None:
            put(self._row, self._column, value, self._number, self._limits, repeat)
        self._column += repeat


def _in_one_line(data: str) -> str:
    """Replaces each run of line ends, with the blanks around it, by one space; in linear time."""
    first, *others = data.split("\n")
    last = others.pop()
    within = [line for line in (other.strip(" \t") for other in others) if line]
    return " ".join([first.rstrip(" \t"), *within, last.lstrip(" \t")])


def _repeat(attrs: Mapping[str, str], name: str) -> int:
    text = attrs.get(name)
    if text is None:
        return 1
    if not (text.isascii() and text.isdecimal() and len(text) <= 8 and int(text) <= _MAX_REPEAT):
        raise damaged("something in it repeats more often than a sheet has room for")
    return max(int(text), 1)


def _value(attrs: Mapping[str, str], text: str | None) -> Any:
    """The value of a cell, by its declared type."""
    kind = attrs.get("office:value-type")
    if attrs.get("calcext:value-type") == "error":
        return CellError((text or "#ERROR")[:40])
    try:
        if kind in _NUMBERS and text in _SHOWN_TRUTH:
            return _SHOWN_TRUTH[text]
        if kind in _NUMBERS:
            return plain_number(attrs["office:value"].strip().encode())
        if kind == "boolean":
            return {"true": True, "false": False}[attrs["office:boolean-value"]]
        if kind == "date":
            return from_iso(attrs["office:date-value"][:60], MOMENT)
        if kind == "time":
            return _duration(attrs["office:time-value"])
    except (KeyError, ValueError, UnicodeEncodeError):
        raise damaged(f"a cell is said to be a {kind} and is none") from None
    if text is None:
        text = trimmed(attrs.get("office:string-value", "")) or None
    if "table:formula" in attrs and text is not None and _ERROR_TEXT.fullmatch(text):
        return CellError(text)
    return text


def _duration(text: str) -> time | timedelta:
    """A time of day, or a timedelta if negative or of a day or more."""
    match = _DURATION.fullmatch(text.strip()[:60])
    if match is None:
        raise ValueError("no duration")
    sign, days, hours, minutes, seconds = match.groups()
    seconds = (seconds or "0").replace(",", ".")
    try:
        found = timedelta(days=int(days or 0), hours=int(hours or 0), minutes=int(minutes or 0))
        found += timedelta(milliseconds=round(float(seconds) * 1_000))
    except OverflowError:
        raise ValueError("too long") from None
    if sign or found >= _DAY:
        return -found if sign else found
    rest, microsecond = divmod(found // timedelta(microseconds=1), 1_000_000)
    return time(rest // 3600, rest // 60 % 60, rest % 60, microsecond)
