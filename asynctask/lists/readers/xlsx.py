"""Reads Excel workbooks (.xlsx, .xlsm), streaming their rows.

The value of merged cells is in the top left one. A formula gives its saved value. A sheet's claimed dimension is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from asynctask.errors import TooLarge
from asynctask.lists.readers.base import (
    CellError,
    Limits,
    OpenOptions,
    column_index,
    column_letters,
    over_limit,
    put,
    too_long,
)
from asynctask.lists.readers.shared_texts import TextParser, Texts, canonical, clean, escaped, load_texts
from asynctask.lists.readers.table import Table
from asynctask.lists.readers.workbook import (
    NO_VALUE,
    Package,
    SheetPart,
    Totals,
    choose_sheet,
    damaged,
    empty_sheet,
    feed,
    from_iso,
    from_serial,
    parse_xml,
    plain_number,
    read_workbook,
    sheet_kinds,
    totals_rows,
)


def xlsx_table(path: Path, options: OpenOptions) -> Table:
    """The named sheet, else the first visible one with rows; its header is not looked for.

    Raises :class:`InputError`: ``unknown_sheet``, ``empty_sheet``, ``damaged_file``, ``encrypted``, ``zip_bomb``,
    ``too_large``.
    """
    with Package(path, options.limits) as package:
        plan = read_workbook(package)
        wanted = _wanted(plan.sheets, options.sheet)
        texts = load_texts(package, plan.texts_part)
        try:
            kinds = sheet_kinds(package, plan.styles_part, percents=options.report)
            book = Book(texts, kinds, plan.epoch_1904, options.limits)
            seen: set[str] = set()
            for part in wanted:
                if not part.part:
                    raise damaged(f"it does not say which of its parts is sheet {part.name!r}")
                if part.part.lower() in seen:
                    continue  # another sheet on the same part, known to be empty
                seen.add(part.part.lower())
                sheet = SheetXml(lambda: Package(path, options.limits), part.part, book, totals_rows(package, part.part))
                filled = None if options.report else sheet.prove()
                if any(sheet.cells()) if filled is None else filled:
                    return Table(sheet.cells, part.name, filled, texts.close)
            raise empty_sheet(options.sheet)
        except BaseException:
            texts.close()
            raise


def xlsx_sheets(path: Path, limits: Limits) -> list[str]:
    """The visible sheets in the workbook's order. Raises :class:`InputError` as the opener does."""
    with Package(path, limits) as package:
        return [sheet.name for sheet in read_workbook(package).sheets if sheet.visible]


def _wanted(sheets: Sequence[SheetPart], name: str | None) -> Sequence[SheetPart]:
    if name is None:
        return [sheet for sheet in sheets if sheet.visible]
    return [sheets[choose_sheet(name, [sheet.name for sheet in sheets])]]


# -- sheet XML
#
# Nearly every program writes cells in one form, ``<c r="A1" s="2" t="s"><v>7</v></c>``: a regular expression, which must
# match every cell of a row, reads it. A row, or a sheet, in another form goes through an XML parser.

EXCEL_ROWS, EXCEL_COLUMNS = 1_048_576, 16_384
_ROW_BYTES: Final = 8_388_608
_ROW_END: Final = b"</row>"
# What repeats possessively is an atomic group; json.py says why.
_ROW: Final = re.compile(rb'<row((?> [A-Za-z0-9:._-]+="[^"<>]*+")*+)>')
_EMPTY_ROWS: Final = re.compile(rb'(?>\s*<row(?> [A-Za-z0-9:._-]+="[^"<>]*+")*+ ?/>)*+\s*')
_TABLE: Final = re.compile(rb"<sheetData\s*(/?)>")
_NUMBER: Final = re.compile(rb' r="([^"]*)"')
_CELL: Final = re.compile(
    rb'<c r="([A-Z]{1,3})([1-9][0-9]{0,6})"(?: s="([0-9]{1,6})")?(?: t="([a-zA-Z]+)")?'
    rb"(?:/>|>(?:(<f)[^>]*?(?:/>|>[^<]*+</f>))?"
    rb'(?:<v>([^<]*+)</v>|<v ?/>|<is><t(?: xml:space="preserve")?>([^<]*+)</t></is>)?</c>)'
)
_REF: Final = re.compile(r"([A-Za-z]{1,3})([1-9][0-9]{0,6})")
_TRUTH: Final[Mapping[bytes, bool | None]] = {b"1": True, b"0": False, b"true": True, b"false": False, b"": None}
_CONTENT: Final = re.compile(rb"<(?:[\w.-]+:)?(?:v|is|f)\b")
"""Present in every row except those of formatted empty cells."""
_FILLED: Final = re.compile(rb"<v>[^<\s&_\x80-\xff]")
"""A cell that is certainly not empty: its value begins with neither a space nor a possible escape of one."""

Found = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]
"""Column letters, row digits, style, type, formula (empty if none), value, inline text."""


class Book(NamedTuple):
    """Context for reading cells: shared strings, kind of each style by its number, epoch of dates, limits."""

    texts: Texts
    kinds: Mapping[bytes, str]
    epoch_1904: bool
    limits: Limits


class _Unusual(Exception):
    """The XML is not in the usual form."""


class SheetXml:
    """A sheet without the totals of its tables. ``cells`` gives its rows, any number of times; ``prove`` reads it once
    before, to find faults beforehand."""

    def __init__(self, open_package: Callable[[], Package], part: str, book: Book, totals: Totals) -> None:
        self._open, self._part, self._book, self._totals = open_package, part, book, totals
        self._usual, self._last = True, EXCEL_ROWS

    def prove(self) -> int:
        """The number of non-empty rows. Raises InputError for a truncated, contradictory or too wide sheet."""
        try:
            count, self._last = self._count()
        except _Unusual:
            self._usual, count = False, 0
            for count, (last, _) in enumerate(self.cells(), 1):  # noqa: B007 - last is used after the loop
                pass
            self._last = last if count else 0
        return count

    def cells(self) -> Iterator[tuple[int, list[Any]]]:
        """Number and cells of each non-empty row, from column A to its last value."""
        last = 0
        if self._usual:
            try:
                for last, row in self._filled(self._usual_rows):
                    yield last, row
                return
            except _Unusual:  # of a sheet that was not proven, perhaps in its middle
                self._usual = False
        for number, row in self._filled(self._any_rows):
            if number > last:
                yield number, row

    def _filled(self, rows: Callable[[Package], Iterator[tuple[int, list[Any]]]]) -> Iterator[tuple[int, list[Any]]]:
        with self._open() as package:
            for number, row in rows(package):
                if row:
                    yield number, row
                if number >= self._last:
                    return  # only formatted empty cells follow

    # -- by regular expressions

    def _count(self) -> tuple[int, int]:
        """The count of non-empty rows, and the number of the last."""
        count, last, blank, width = 0, 0, self._book.texts.blank, self._book.limits.max_columns
        with self._open() as package:
            for number, content in self._contents(package):
                certain = not blank and _FILLED.search(content) is not None and number not in self._totals
                if (certain and _last_column(content) < width) or self._row(number, content):
                    count, last = count + 1, number
        return count, last

    def _usual_rows(self, package: Package) -> Iterator[tuple[int, list[Any]]]:
        for number, content in self._contents(package):
            yield number, self._row(number, content)

    def _row(self, number: int, content: bytes) -> list[Any]:
        if not _CONTENT.search(content):
            return []
        found: list[Found] = _CELL.findall(content)
        if not found or len(found) != content.count(b"<c ") + content.count(b"<c>") + content.count(b"<c/"):
            found = _parsed_row(number, content)
        return self._without_totals(number, row_values(number, found, self._book))

    def _without_totals(self, number: int, row: list[Any]) -> list[Any]:
        for first, last in self._totals.get(number, ()):
            row[first : last + 1] = [None] * len(row[first : last + 1])
        return row if number not in self._totals or any(value is not None for value in row) else []

    def _contents(self, package: Package) -> Iterator[tuple[int, bytes]]:
        """Number and inner XML of each row that has cells. Raises _Unusual before it yields anything."""
        number = 0
        for piece in self._pieces(package):
            start = piece.rfind(b"<row")
            match = _ROW.match(piece, start) if start >= 0 else None
            if match is None or not _EMPTY_ROWS.fullmatch(piece, 0, start):
                raise _Unusual
            before = number + piece.count(b"<row", 0, start)
            claimed = _NUMBER.search(match[1])
            number = _row_number(claimed[1] if claimed else b"%d" % (before + 1), number)
            yield number, piece[match.end() :]

    def _pieces(self, package: Package) -> Iterator[bytes]:
        """The XML before each ``</row>`` inside the sheet's table."""
        rest, inside, head = b"", False, True
        chunks = package.chunks(self._part)
        for chunk in chunks:
            if head and not canonical(chunk):
                raise _Unusual
            head = False
            rest += chunk
            if b"<!" in rest:
                raise _Unusual
            if not inside:
                start = _TABLE.search(rest)
                if start is None:
                    rest = rest[-64:]
                    continue
                inside, rest = True, b"</sheetData" if start[1] else rest[start.end() :]
            pieces = rest.split(_ROW_END)
            rest = pieces.pop()
            yield from pieces
            if (end := rest.find(b"</sheetData")) >= 0:
                if not _EMPTY_ROWS.fullmatch(rest, 0, end):
                    raise _Unusual
                for _ in chunks:
                    pass  # size and checksum are verified at the end of the part
                return
            if len(rest) > _ROW_BYTES:
                raise over_limit(
                    f"a row of the sheet has more than {_ROW_BYTES:,} bytes",
                    "max_item_bytes",
                    self._book.limits.max_item_bytes,
                )
        raise _Unusual

    # -- by an XML parser

    def _any_rows(self, package: Package) -> Iterator[tuple[int, list[Any]]]:
        parser = _RowParser()
        for _ in feed(package.chunks(self._part), self._part, parser.start, parser.end, parser.text):
            for number, found in parser.take():
                yield number, self._without_totals(number, row_values(number, found, self._book))


class _RowParser:
    """Handlers for an XML parser that collect the cells of finished rows."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, list[Found]]] = []
        self._number = 0
        self._cells: list[Found] = []
        self._column, self._inside, self._size = -1, False, 0
        self._attrs: Mapping[str, str] = {}
        self._formula = self._has_text = False
        self._value: list[str] | None = None
        self._whole = ""
        self._text = TextParser()

    def take(self) -> list[tuple[int, list[Found]]]:
        rows, self._rows = self._rows, []
        return rows

    def start(self, tag: str, attrs: Mapping[str, str]) -> None:
        tag = tag.rpartition(":")[2]
        if tag == "c" and self._inside:
            self._attrs, self._formula, self._has_text, self._whole = attrs, False, False, ""
        elif tag == "row" and not self._inside:
            claimed = attrs.get("r")
            self._number = _row_number(b"%d" % (self._number + 1) if claimed is None else claimed.encode(), self._number)
            self._cells, self._column, self._inside, self._size = [], -1, True, 0
        elif not self._inside:
            return
        elif tag == "v":
            self._value = []
        elif tag == "f":
            self._formula = True
        elif tag == "is":
            self._has_text = True
        else:
            self._text.start(tag)

    def end(self, tag: str) -> None:
        tag = tag.rpartition(":")[2]
        if tag == "c" and self._inside:
            self._add()
        elif tag == "row":
            self._rows.append((self._number, self._cells))
            self._inside = False
        elif tag == "v" and self._value is not None:
            self._whole, self._value = "".join(self._value), None
        else:
            self._text.end(tag)

    def text(self, data: str) -> None:
        self._size += len(data) if self._inside else 0
        if self._size > _ROW_BYTES:
            raise TooLarge(f"row {self._number} of the sheet has more than {_ROW_BYTES:,} characters; shorten its texts")
        if self._value is not None:
            self._value.append(data)
        else:
            self._text.text(data)

    def _add(self) -> None:
        ref = self._attrs.get("r")
        letters, digits = (
            _split(ref) if ref is not None else (column_letters(self._column + 1).encode(), b"%d" % self._number)
        )
        self._column = _index(letters)
        text = escaped(self._text.take()) if self._has_text else b""
        if len(self._cells) >= EXCEL_COLUMNS:
            raise damaged("a row has more cells than a sheet has columns")
        style, kind = (self._attrs.get(name, "").encode() for name in "st")
        formula = b"<f" if self._formula else b""
        self._cells.append((letters, digits, style, kind, formula, escaped(self._whole), text))


def _parsed_row(number: int, content: bytes) -> list[Found]:
    parser = _RowParser()
    chunks = iter([b'<row r="%d">' % number, content, _ROW_END])
    parse_xml(chunks, "the sheet", parser.start, parser.end, parser.text)
    rows = parser.take()
    return rows[0][1] if rows else []


def row_values(number: int, found: list[Found], book: Book) -> list[Any]:
    """A row's values, from column A to the last one."""
    texts, kinds, width, longest = book.texts, book.kinds, book.limits.max_columns, book.limits.max_cell_chars
    known, row, this = texts.known, list[Any](), b"%d" % number
    for letters, digits, style, kind, formula, raw, inline in found:
        if digits != this:
            raise damaged(f"a cell of row {number} says that it stands in another row")
        if kind == b"s":
            value: Any = known.get(raw) or (texts.get(raw) if raw else None)
        elif not kind or kind == b"n":
            if len(raw) < 16 and raw.isdigit():
                value = int(raw)
            elif raw:
                value = _number_value(raw, number)
            else:
                value = CellError(NO_VALUE) if formula else None
            if style in kinds:
                value = from_serial(value, kinds[style], epoch_1904=book.epoch_1904)
        else:
            value = _other_value(kind, raw, inline, kinds.get(style, ""), number)
        if value is None:
            continue
        if type(value) is str and len(value) > longest:
            raise too_long(number, value, book.limits)
        column = _COLUMNS.get(letters, -1)
        if column == len(row) and column < width:
            row.append(value)
        else:
            put(row, _index(letters), value, number, book.limits)
    return row


def _number_value(raw: bytes, number: int) -> Any:
    try:
        return plain_number(raw)
    except ValueError:
        text = clean(raw)
        if text is None:
            return None
        raise damaged(f"a cell of row {number} is said to be a number and is none") from None


def _other_value(kind: bytes, raw: bytes, inline: bytes, style: str, number: int) -> Any:
    if kind == b"str":
        return clean(raw)
    if kind == b"inlineStr":
        return clean(inline or raw)
    if kind == b"b":
        if raw.strip() in _TRUTH:
            return _TRUTH[raw.strip()]
    elif kind == b"e":
        return CellError((clean(raw) or "#ERROR")[:40])
    elif kind == b"d":
        text = clean(raw)
        return None if text is None else from_iso(text, style)
    raise damaged(f"a cell of row {number} is of a kind that does not exist")


def _row_number(claimed: bytes, previous: int) -> int:
    if not (claimed.isdigit() and len(claimed) <= 7 and 1 <= int(claimed) <= EXCEL_ROWS):
        raise damaged("a row stands outside the sheet")
    if int(claimed) <= previous:
        raise damaged(f"row {int(claimed)} comes after row {previous}")
    return int(claimed)


def _split(ref: str) -> tuple[bytes, bytes]:
    match = _REF.fullmatch(ref)
    if match is None:
        raise damaged("a cell stands outside the sheet")
    return match[1].upper().encode(), match[2].encode()


def _index(letters: bytes) -> int:
    column = column_index(letters)
    if column >= EXCEL_COLUMNS:
        raise damaged("a cell stands outside the sheet")
    return column


def _last_column(content: bytes) -> int:
    """The column of a row's last cell; -1 if written in another form."""
    start = content.rfind(b'<c r="') + 6
    letters = content[start : start + 3].rstrip(b'0123456789"')
    return _COLUMNS.get(letters, EXCEL_COLUMNS) if start >= 6 else -1


_COLUMNS: Final[Mapping[bytes, int]] = {column_letters(column).encode(): column for column in range(1_000)}
"""Cache of the first 1,000 columns by letters."""
