"""A look through the XML of a workbook before the fast reader gets it.

The fast reader takes a sheet as one rectangle in memory, ends the process when that does not fit, copies a shared text into
every cell that shows it, and gives an error cell as an empty one. So the rectangle, the texts and the error cells are found
out first, streaming, in constant memory.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from typing import Final, NamedTuple
from xml.parsers.expat import XMLParserType

from asynctask.bulk.readers.base import Limits, over_limit, shorten
from asynctask.bulk.readers.package import Package, damaged
from asynctask.errors import TooLarge

__all__ = ["SheetPart", "SheetScan", "prove_parts", "scan_sheet", "sheet_parts"]

_WORKBOOK, _RELATIONS, _STRINGS = "xl/workbook.xml", "xl/_rels/workbook.xml.rels", "xl/sharedstrings.xml"
_CELL_BYTES: Final = 32
"""What a cell of the rectangle costs in memory, filled or not."""
_TEXT_BYTES: Final = 24
_TABLE: Final = re.compile(rb"<(?:[\w.-]+:)?sst\b")
_EXCEL_ROWS, _EXCEL_COLUMNS = 1_048_576, 16_384
_MAX_SHEETS: Final = 1_000
_MAX_ERRORS: Final = 1_000_000


class SheetPart(NamedTuple):
    """A sheet of the workbook: its name, and the name of the part that holds it."""

    name: str
    part: str


def sheet_parts(package: Package) -> list[SheetPart]:
    """The sheets in the workbook's order. Raises InputError when the workbook contradicts itself."""
    targets: dict[str, str] = {}
    found: list[tuple[str, str]] = []

    def relation(tag: str, attrs: Mapping[str, str]) -> None:
        if _local(tag) == "Relationship":
            targets[attrs.get("Id", "")] = attrs.get("Target", "")

    def sheet(tag: str, attrs: Mapping[str, str]) -> None:
        if _local(tag) == "sheet":
            found.append((attrs.get("name", ""), next((v for k, v in attrs.items() if _local(k) == "id"), "")))

    package.parse(_RELATIONS, lambda parser: setattr(parser, "StartElementHandler", relation))
    package.parse(_WORKBOOK, lambda parser: setattr(parser, "StartElementHandler", sheet))
    if len(found) > _MAX_SHEETS:
        raise TooLarge(f"the workbook has {len(found):,} sheets; {_MAX_SHEETS:,} are the most that is read")
    if len({name for name, _ in found}) != len(found):
        raise damaged("two sheets have the same name")
    return [SheetPart(name, _path(targets.get(relation_id, ""))) for name, relation_id in found]


def prove_parts(package: Package) -> int:
    """Inflate what the fast reader may open beside the sheet. Raises InputError when a size is a lie.

    Returns a size in bytes that no shared text exceeds: an estimate, for most workbooks good enough.
    """
    longest = 0
    for name, info in package.parts.items():
        if name == _STRINGS:
            longest = _longest_text(package, info.file_size)
        elif name.endswith((".xml", ".rels")) and not name.startswith("xl/worksheets/"):
            for _ in package.chunks(info.filename):
                pass
    return longest


def _longest_text(package: Package, size: int) -> int:
    longest = run = tables = 0
    plain, rest = True, b""
    for chunk in package.chunks(_STRINGS):
        seen = rest + chunk
        # A comment or a CDATA section may hide the tag that ends a text: then the estimate is the whole part.
        plain = plain and b"<!" not in seen
        tables += len(_TABLE.findall(seen)) - len(_TABLE.findall(rest))
        rest = seen[-64:]
        first, *others = chunk.split(b"<si")
        run += len(first)
        for piece in others:
            longest, run = max(longest, run), len(piece)
    _refuse_claims(package, only_first=plain and tables <= 1)
    return max(longest, run) if plain else size


def _refuse_claims(package: Package, *, only_first: bool) -> None:
    """The fast reader reserves memory for as many texts as the table of texts claims to have."""
    most = package.limits.max_unzipped_bytes // _TEXT_BYTES

    def attach(parser: XMLParserType) -> None:
        def start(_: str, attrs: Mapping[str, str]) -> None:
            for key, claim in attrs.items():
                if key.lower().endswith("count") and (not claim.isdecimal() or len(claim) > 12 or int(claim) > most):
                    raise damaged("it claims to have more texts than a workbook can have")
            if only_first:
                parser.StartElementHandler = None

        parser.StartElementHandler = start

    package.parse(_STRINGS, attach)


def _text_sizes(package: Package) -> array[int]:
    """The bytes of each shared text."""
    sizes = array("L")
    if _STRINGS not in package.parts:
        return sizes
    size, inside = 0, False

    def start(tag: str, _: Mapping[str, str]) -> None:
        nonlocal size, inside
        inside = _local(tag) == "t"
        if not inside and _local(tag) == "si":
            size = 0

    def end(tag: str) -> None:
        nonlocal inside
        inside = False
        if _local(tag) == "si":
            sizes.append(size)

    def text(data: str) -> None:
        nonlocal size
        if inside:
            size += len(data.encode())

    def attach(parser: XMLParserType) -> None:
        parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, text

    package.parse(_STRINGS, attach)
    return sizes


class SheetScan:
    """What is known of a sheet after one pass over it.

    ``cells``: how many have content. ``shared``: how many of them show a shared text; ``text_bytes``: how many bytes those
    are, if the sizes of the texts were given. ``errors``: row -> column -> text of the error cells, rows from 1, columns
    from 0.
    """

    def __init__(self, sizes: array[int] | None = None) -> None:
        self.cells = self.shared = 0
        self.errors: dict[int, dict[int, str]] = {}
        self.text_bytes = 0
        self.top, self.bottom, self.left, self.right = _EXCEL_ROWS, 0, _EXCEL_COLUMNS, -1
        self._sizes = sizes
        self._columns: dict[str, int] = {}
        self._row, self._column, self._kind, self._digits = 0, -1, "", ""
        self._text: list[str] | None = None
        self._error_count = 0
        self._parser: XMLParserType | None = None

    def attach(self, parser: XMLParserType) -> None:
        """Listen to a parser. Characters are asked for only while they are wanted: that halves the time."""
        self._parser = parser
        parser.StartElementHandler = self._start

    def _start(self, tag: str, attrs: Mapping[str, str]) -> None:
        """A start tag. A cell counts once it has a value: sheets are full of cells that have a format only."""
        if self._text is not None:
            self._take_text()
        if ":" in tag:
            tag = tag.rpartition(":")[2]
        if tag == "v" or tag == "is":
            self._content()
        elif tag == "c":
            self._kind = attrs.get("t", "")
            ref = attrs.get("r")
            if ref is None:
                self._column += 1
                return
            letters = ref.rstrip("0123456789")
            column = self._columns.get(letters)
            self._column = self._new_column(letters) if column is None else column
            digits = ref[len(letters) :]
            if digits != self._digits:
                self._digits, self._row = digits, _number(digits)
        elif tag == "row":
            ref = attrs.get("r")
            self._row = self._row + 1 if ref is None else _number(ref)
            self._column, self._digits = -1, ""

    def finish(self) -> None:
        """The end of the sheet."""
        if self._text is not None:
            self._take_text()

    def _new_column(self, letters: str) -> int:
        column = self._columns[letters] = _column(letters)
        return column

    def _content(self) -> None:
        row, column, kind = self._row, self._column, self._kind
        self.cells += 1
        if row < self.top:
            self.top = row
        if row > self.bottom:
            self.bottom = row
        if column < self.left:
            self.left = column
        if column > self.right:
            self.right = column
        if kind == "s":
            self.shared += 1
        if kind == "e" or (kind == "s" and self._sizes is not None):
            self._text = []
            if self._parser is not None:
                self._parser.CharacterDataHandler = self._text.append

    def _take_text(self) -> None:
        text, self._text = "".join(self._text or ()).strip(), None
        if self._parser is not None:
            self._parser.CharacterDataHandler = None
        if self._kind == "e":
            self._error_count += 1
            if self._error_count <= _MAX_ERRORS:
                self.errors.setdefault(self._row, {})[self._column] = shorten(text, 40) or "#ERROR"
        elif self._sizes is not None:
            if not (text.isdecimal() and len(text) <= 9 and int(text) < len(self._sizes)):
                raise damaged("a cell points at a text that the workbook does not have")
            self.text_bytes += self._sizes[int(text)]


def scan_sheet(package: Package, sheet: SheetPart, longest: int, limits: Limits) -> SheetScan:
    """Look through one sheet; ``longest`` is what :func:`prove_parts` returned.

    Raises InputError when the sheet is damaged or would need more memory than allowed.
    """
    scan = _scan(package, sheet, SheetScan())
    if not scan.cells:
        return scan
    width = scan.right - scan.left + 1
    if width > limits.max_columns:
        raise over_limit(f"sheet {sheet.name!r} spans {width:,} columns", "max_columns", limits.max_columns)
    rectangle = scan.bottom * width * _CELL_BYTES
    texts = scan.shared * longest
    if rectangle + texts > limits.max_unzipped_bytes:
        texts = _scan(package, sheet, SheetScan(_text_sizes(package))).text_bytes
    if rectangle + texts > limits.max_unzipped_bytes:
        what = f"sheet {sheet.name!r}, {scan.bottom:,} rows by {width:,} columns, would take {rectangle + texts:,} bytes"
        raise over_limit(what, "max_unzipped_bytes", limits.max_unzipped_bytes)
    return scan


def _scan(package: Package, sheet: SheetPart, scan: SheetScan) -> SheetScan:
    package.parse(sheet.part, scan.attach)
    scan.finish()
    return scan


def _local(name: str) -> str:
    return name.rpartition(":")[2]


def _path(target: str) -> str:
    target = target.removeprefix("/")
    return target if target.startswith("xl/") else f"xl/{target}"


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 7 and 1 <= int(text) <= _EXCEL_ROWS):
        raise damaged("a cell stands outside the sheet")
    return int(text)


def _column(letters: str) -> int:
    if not (letters.isascii() and letters.isalpha() and len(letters) <= 3):
        raise damaged("a cell stands outside the sheet")
    column = 0
    for letter in letters.upper():
        column = column * 26 + ord(letter) - 64
    if column > _EXCEL_COLUMNS:
        raise damaged("a cell stands outside the sheet")
    return column - 1
