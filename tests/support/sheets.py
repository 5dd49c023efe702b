"""Workbooks made by hand, part by part and record by record: what programs write, and what nobody should."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from asynctask.lists.readers import Limits, RawRow
from asynctask.lists.readers.opening import open_source

MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006/relationships"
SHEET = "xl/worksheets/sheet1.xml"


def read(path: Path, filename: str | None = None, **options: Any) -> tuple[tuple[str, ...] | None, list[RawRow]]:
    """Headers and rows of a list."""
    limits = options.pop("limits", Limits())
    with open_source(path, filename or path.name, limits=limits, **options) as source:
        return source.headers, list(source.rows())


def saved(path: Path, data: bytes | str, encoding: str = "utf-8") -> Path:
    """A file with this content."""
    path.write_bytes(data.encode(encoding) if isinstance(data, str) else data)
    return path


def letters(column: int) -> str:
    """The letters over a column, 0 is A."""
    return (letters(column // 26 - 1) if column >= 26 else "") + chr(65 + column % 26)


def zipped(path: Path, parts: Mapping[str, str | bytes]) -> Path:
    """A zip with these parts."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return path


def sheet_xml(rows: str, *, before: str = "", after: str = "") -> str:
    """A sheet's part around its rows."""
    return f'<worksheet xmlns="{MAIN}">{before}<sheetData>{rows}</sheetData>{after}</worksheet>'


def xlsx(path: Path, sheet: str | bytes, *, prefix: str = "xl/", **parts: str | bytes) -> Path:
    """A workbook of one sheet, without anything that it could do without.

    ``parts``: ``strings``, ``styles``, ``workbook`` (attributes of workbookPr) and others by name.
    """
    kinds = {"sheet": "worksheets/sheet1.xml"}
    kinds |= {"sharedStrings": "sharedStrings.xml"} if "strings" in parts else {}
    kinds |= {"styles": "styles.xml"} if "styles" in parts else {}
    types = {"sheet": "worksheet"}
    related = "".join(
        f'<Relationship Id="{each}" Type="{_OFFICE}/{types.get(each, each)}" Target="{target}"/>'
        for each, target in kinds.items()
    )
    whole: dict[str, str | bytes] = {
        "[Content_Types].xml": "<Types/>",
        "_rels/.rels": f'<Relationships xmlns="{_PACKAGE}"><Relationship Id="r1" Type="{_OFFICE}/officeDocument"'
        f' Target="{prefix}workbook.xml"/></Relationships>',
        f"{prefix}workbook.xml": f'<workbook xmlns="{MAIN}" xmlns:r="{_OFFICE}"><workbookPr {parts.pop("workbook", "")!s}/>'
        '<sheets><sheet name="Data" sheetId="1" r:id="sheet"/></sheets></workbook>',
        f"{prefix}_rels/workbook.xml.rels": f'<Relationships xmlns="{_PACKAGE}">{related}</Relationships>',
        f"{prefix}worksheets/sheet1.xml": sheet,
    }
    for name, target in (("strings", "sharedStrings.xml"), ("styles", "styles.xml")):
        if name in parts:
            whole[prefix + target] = parts.pop(name)
    return zipped(path, whole | parts)


def inline(ref: str, text: str) -> str:
    """A cell with its text in it."""
    return f'<c r="{ref}" t="inlineStr"><is><t>{escape(text)}</t></is></c>'


def rows_xml(rows: Iterable[Sequence[Any]]) -> str:
    """Rows of texts and numbers."""
    found = []
    for number, row in enumerate(rows, 1):
        cells = [
            inline(f"{letters(column)}{number}", cell)
            if isinstance(cell, str)
            else f'<c r="{letters(column)}{number}"><v>{cell}</v></c>'
            for column, cell in enumerate(row)
            if cell is not None
        ]
        found.append(f'<row r="{number}">{"".join(cells)}</row>')
    return "".join(found)


def styles(*codes: str) -> str:
    """Cell styles 1, 2, ... with these number formats; style 0 is plain."""
    formats = "".join(f'<numFmt numFmtId="{164 + n}" formatCode={quoteattr(code)}/>' for n, code in enumerate(codes))
    cells = "".join(f'<xf numFmtId="{164 + n}"/>' for n in range(len(codes)))
    return (
        f'<styleSheet xmlns="{MAIN}"><numFmts>{formats}</numFmts><cellStyleXfs><xf numFmtId="14"/></cellStyleXfs>'
        f'<cellXfs><xf numFmtId="0"/>{cells}</cellXfs><dxfs><dxf><numFmt numFmtId="164" formatCode="0"/></dxf></dxfs>'
        "</styleSheet>"
    )


# -- OpenDocument

_SPACES = " ".join(
    f'xmlns:{prefix}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"'
    for prefix, name in {"office": "office", "table": "table", "text": "text", "style": "style"}.items()
)
ODS = "application/vnd.oasis.opendocument.spreadsheet"


def ods(path: Path, tables: str, *, styles: str = "", mimetype: str = ODS, **parts: str | bytes) -> Path:
    """An OpenDocument spreadsheet with these tables."""
    content = (
        f"<office:document-content {_SPACES} "
        'xmlns:calcext="urn:org:documentfoundation:names:experimental:calc:xmlns:calcext:1.0">'
        f"<office:automatic-styles>{styles}</office:automatic-styles>"
        f"<office:body><office:spreadsheet>{tables}</office:spreadsheet></office:body></office:document-content>"
    )
    return zipped(path, {"mimetype": mimetype, "content.xml": content} | parts)


def table(rows: str, name: str = "Data", style: str = "") -> str:
    """A table of an OpenDocument spreadsheet."""
    return f'<table:table table:name="{name}" table:style-name="{style}">{rows}</table:table>'


def table_rows(rows: Iterable[Sequence[Any]]) -> str:
    """Rows of texts and numbers."""
    return "".join(f"<table:table-row>{''.join(map(ods_cell, row))}</table:table-row>" for row in rows)


def ods_cell(value: Any) -> str:
    """A cell of an OpenDocument spreadsheet."""
    if value is None:
        return "<table:table-cell/>"
    if isinstance(value, str):
        return f'<table:table-cell office:value-type="string"><text:p>{escape(value)}</text:p></table:table-cell>'
    return f'<table:table-cell office:value-type="float" office:value="{value}"><text:p>{value}</text:p></table:table-cell>'


# -- old workbooks


def record(kind: int, data: bytes = b"") -> bytes:
    """A record of an old workbook."""
    return struct.pack("<HH", kind, len(data)) + data


def label(row: int, column: int, text: str) -> bytes:
    """A cell with its text in it; row and column from 0."""
    return record(0x0204, struct.pack("<HHHHB", row, column, 0, len(text), 1) + text.encode("utf-16-le"))


def number(row: int, column: int, value: float, style: int = 0) -> bytes:
    """A cell with a number."""
    return record(0x0203, struct.pack("<HHHd", row, column, style, value))


def bof(kind: int) -> bytes:
    """The beginning of the globals (5), of a table (16) or of a chart (32)."""
    return record(0x0809, struct.pack("<HHHHII", 0x0600, kind, 0, 0, 0, 0))


def xls_stream(cells: bytes, *, extra: bytes = b"", name: str = "Data", state: int = 0, kind: int = 0) -> bytes:
    """The stream of an old workbook of one sheet, of a chart if ``kind`` is 2; ``extra`` are records of its globals."""
    title = struct.pack("<BB", len(name), 1) + name.encode("utf-16-le")
    size = len(bof(5)) + len(extra) + len(record(0x85, bytes(6) + title)) + len(record(0x0A))
    sheet = record(0x85, struct.pack("<IBB", size, state, kind) + title)
    return bof(5) + extra + sheet + record(0x0A) + bof(32 if kind == 2 else 16) + cells + record(0x0A)


def ole(path: Path, streams: Mapping[str, bytes]) -> Path:
    """An old Office file with these streams, in sectors of 512 bytes and without small ones."""
    sectors: list[bytes] = []
    chains: list[int] = []
    entries = [_entry("Root Entry", 5, 0xFFFFFFFE, 0)]
    for name, data in streams.items():
        pieces = [data[at : at + 512].ljust(512, b"\0") for at in range(0, max(len(data), 1), 512)]
        first = len(sectors)
        entries.append(_entry(name, 2, first, len(data)))
        chains += [*range(first + 1, first + len(pieces)), 0xFFFFFFFE]
        sectors += pieces
    directory = b"".join(entries).ljust(-(-len(entries) // 4) * 512, b"\0")
    at = len(sectors)
    pieces = [directory[place : place + 512] for place in range(0, len(directory), 512)]
    chains += [*range(at + 1, at + len(pieces)), 0xFFFFFFFE]
    sectors += pieces
    maps = -(-(len(sectors) + 3) // 126)
    lists = -(-max(maps - 109, 0) // 127)
    first_map = len(sectors)
    chains += [0xFFFFFFFD] * maps + [0xFFFFFFFC] * lists
    words = struct.pack(f"<{len(chains)}I", *chains).ljust(maps * 512, b"\xff")
    where = [*range(first_map, first_map + maps), *[0xFFFFFFFF] * (109 + 127 * lists - maps)]
    first_list = first_map + maps
    more = b"".join(
        struct.pack("<128I", *where[109 + 127 * n : 236 + 127 * n], first_list + n + 1 if n + 1 < lists else 0xFFFFFFFE)
        for n in range(lists)
    )
    header = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(16)
    header += struct.pack("<HHHHH6xIIIIIIIII", 62, 3, 0xFFFE, 9, 6, 0, maps, at, 0, 0, 0xFFFFFFFE, 0, 0, 0)[:-8]
    header += struct.pack("<II109I", first_list if lists else 0xFFFFFFFE, lists, *where[:109])
    path.write_bytes(header + b"".join(sectors) + words + more)
    return path


def xls(path: Path, cells: bytes, **options: Any) -> Path:
    """An old workbook of one sheet."""
    return ole(path, {"Workbook": xls_stream(cells, **options)})


def xls_cells(rows: Iterable[Sequence[Any]]) -> bytes:
    """Rows of texts and numbers."""
    return b"".join(
        label(row, column, cell) if isinstance(cell, str) else number(row, column, cell)
        for row, cells in enumerate(rows)
        for column, cell in enumerate(cells)
        if cell is not None
    )


def _entry(name: str, kind: int, start: int, size: int) -> bytes:
    encoded = name.encode("utf-16-le") + b"\0\0"
    data = encoded.ljust(64, b"\0") + struct.pack("<HBB", len(encoded), kind, 1)
    return data.ljust(116, b"\0") + struct.pack("<II", start, size) + bytes(4)
