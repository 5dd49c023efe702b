"""Opens a list of any format: finds the format of a file by its content, then by its name. Imports every reader."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import closing
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, Final, NamedTuple

import orjson

from asynctask.errors import UnsupportedFormat
from asynctask.lists.readers.base import Limits, OpenOptions, Source, over_limit
from asynctask.lists.readers.csv import csv_table, tsv_table
from asynctask.lists.readers.encodings import bytes_of, head_text
from asynctask.lists.readers.json import open_json, open_ndjson
from asynctask.lists.readers.ods import MIMETYPE, ods_sheets, ods_table
from asynctask.lists.readers.table import Table, TableSource
from asynctask.lists.readers.workbook import OLE, OleFile, Package, encrypted, office_document
from asynctask.lists.readers.xls import STREAMS, xls_sheets, xls_table
from asynctask.lists.readers.xlsx import xlsx_sheets, xlsx_table


class Format(NamedTuple):
    """A readable format: ``title`` for people, its ``suffixes``, what opens it (a table's header is not found yet), and
    what lists its visible ``sheets``."""

    title: str
    suffixes: tuple[str, ...]
    open: Callable[[Path, OpenOptions], Table | Source]
    sheets: Callable[[Path, Limits], list[str]] | None = None


FORMATS: Final = {
    "xlsx": Format("Excel workbooks", (".xlsx", ".xlsm"), xlsx_table, xlsx_sheets),
    "xls": Format("old Excel workbooks", (".xls",), xls_table, xls_sheets),
    "ods": Format("OpenDocument spreadsheets", (".ods",), ods_table, ods_sheets),
    "csv": Format("CSV text", (".csv", ".txt"), csv_table),
    "tsv": Format("tab-separated text", (".tsv", ".tab"), tsv_table),
    "json": Format("JSON lists", (".json",), open_json),
    "ndjson": Format("JSON lines", (".ndjson", ".jsonl"), open_ndjson),
}


def open_source(
    path: Path,
    filename: str,
    *,
    sheet: str | None = None,
    limits: Limits,
    expect: Collection[str] = (),
    encoding: str | None = None,
    report: bool = False,
    header: int | None = None,
) -> Source:
    """Opens a list. Close the result, or use it in a ``with``.

    Arguments: ``path``, the file; ``filename``, the name it was sent under (a tie-breaker, never a path); ``sheet``, the
    sheet of a workbook, by default the first visible one with rows; ``limits``; ``expect``, names that a header may have,
    which tell the header row from titles above it; ``encoding`` of a text, by default detected; ``report`` and ``header``
    as of :class:`~asynctask.lists.readers.base.OpenOptions`.

    Raises :class:`UnsupportedFormat` (415) for an unreadable format, :class:`TooLarge` (413) beyond a limit,
    :class:`InputError` (422) for any other fault. docs/reference/sheets.md lists the codes.
    """
    options = OpenOptions(sheet, limits, frozenset(expect), encoding, report, header)
    name, found = _opened(path, filename, options)
    return TableSource(name, found, options) if isinstance(found, Table) else found


def _opened(path: Path, filename: str, options: OpenOptions) -> tuple[str, Table | Source]:
    """A list and the name of its format."""
    limits, size = options.limits, path.stat().st_size
    if size > limits.max_file_bytes:
        raise over_limit(f"the file has {size:,} bytes", "max_file_bytes", limits.max_file_bytes)
    name = _sniff(path, filename, limits)
    return name, FORMATS[name].open(path, options)


class Head(NamedTuple):
    """The beginning of a list: its ``format``; its ``sheet``, or the ``encoding`` of a text; and its first non-empty rows,
    of JSON its first items, with their numbers."""

    format: str
    sheet: str | None
    encoding: str | None
    rows: list[tuple[int, Any]]

    @property
    def is_table(self) -> bool:
        """Whether the list has columns; JSON has none."""
        return FORMATS[self.format].open not in (open_json, open_ndjson)


HEAD_ROWS: Final = 60


def read_head(
    path: Path,
    filename: str,
    *,
    sheet: str | None = None,
    limits: Limits,
    expect: Collection[str] = (),
    encoding: str | None = None,
) -> Head:
    """The beginning of a list, with its header among the rows. Arguments and errors as of :func:`open_source`."""
    options = OpenOptions(sheet, limits, frozenset(expect), encoding, report=True, header=0)
    name, found = _opened(path, filename, options)
    if isinstance(found, Table):
        with closing(found):
            rows = [(number, list(cells)) for number, cells in islice(found.cells(), HEAD_ROWS)]
        return Head(name, found.sheet_name, found.encoding, rows)
    with found:
        return Head(name, None, None, [(row.number, row.values) for row in islice(found.rows(), HEAD_ROWS)])


def sheet_names(path: Path, filename: str, limits: Limits) -> list[str]:
    """The visible sheets of a workbook, in order; empty for a file without sheets.

    Arguments and errors as of :func:`open_source`.
    """
    sheets = FORMATS[_sniff(path, filename, limits)].sheets
    return [] if sheets is None else sheets(path, limits)


# -- format detection: by content, then by file name

_HEAD: Final = 65_536
_ENCRYPTED: Final = "EncryptedPackage".encode("utf-16-le")
_MAGIC: Final = {
    b"%PDF": "a PDF",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"\x1f\x8b": "a gzip archive",
    b"7z\xbc\xaf": "a 7-Zip archive",
    b"Rar!": "a RAR archive",
    b"{\\rtf": "a rich text document",
    b"PAR1": "a Parquet file",
    b"SQLite format 3": "an SQLite database",
    b"\x09\x00\x04\x00": "an Excel workbook of the eighties",
    b"\x09\x02\x06\x00": "an Excel workbook older than Excel 5",
    b"\x09\x04\x06\x00": "an Excel workbook older than Excel 5",
}
_JSON: Final = re.compile(rb'\s*(?:\[\s*(?:[\[{"\]]|-?\d|true\b|false\b|null\b|\Z)|\{\s*(?:["}]|\Z))')
_MARKUP: Final = re.compile(rb"\s*<(?:!doctype|!--|html|\?xml|\?mso|table|head|body|meta|style|script)\b", re.IGNORECASE)
_MAIL: Final = re.compile(rb"\s*MIME-Version:", re.IGNORECASE)
_CONTROLS: Final = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f]")
_DELIMITER: Final = re.compile(rb"[,;\t|]")
_WORKBOOK_NAMES: Final = {suffix for known in FORMATS.values() if known.sheets is not None for suffix in known.suffixes}
_BINARY_NAMES: Final = frozenset({".xlsb", ".pdf", ".zip", ".numbers", ".doc", ".docx", ".ppt", ".pptx", ".parquet"})
_HINTS: Final = {suffix: name for name, known in FORMATS.items() if known.sheets is None for suffix in known.suffixes}
_READABLE: Final = "what can be read: " + ", ".join(
    f"{known.title} ({', '.join(known.suffixes)})" for known in FORMATS.values()
)


def _sniff(path: Path, filename: str, limits: Limits) -> str:
    """The name of a file's format. Raises :class:`UnsupportedFormat` for any other one, ``empty_file`` for no content."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if head[:4] in {b"PK\x03\x04", b"PK\x05\x06"}:
        return _zip_format(path, limits)
    if head.startswith(OLE):
        return _ole_format(path)
    for magic, what in _MAGIC.items():
        if head.startswith(magic):
            raise _unsupported(what)
    return _text_format(path, head, PurePath(filename).suffix.lower())


def _unsupported(what: str) -> UnsupportedFormat:
    return UnsupportedFormat(f"the file is {what}; {_READABLE}")


def _text_format(path: Path, head: bytes, suffix: str) -> str:
    text = head_text(head)
    if not text.strip() and not any(head_text(chunk).strip() for chunk in bytes_of(path)):
        raise UnsupportedFormat(f"the file is empty; {_READABLE}", code="empty_file")
    if _MARKUP.match(text) or _MAIL.match(text):
        raise _unsupported("a web page or XML; open it in a spreadsheet program and save as .xlsx")
    # Many programs export text under the name of a workbook.
    if suffix in _BINARY_NAMES or (suffix in _WORKBOOK_NAMES and (_CONTROLS.search(text) or not _is_table(text))):
        raise _unsupported(f"named {suffix} but holds something else")
    hint = _HINTS.get(suffix)
    if _JSON.match(text):
        return "ndjson" if _is_lines(text, hint) else "json"
    return hint or "csv"


def _is_table(text: bytes) -> bool:
    """Whether a whole line contains a delimiter; in linear time."""
    *lines, _ = re.split(rb"[\r\n]", text)
    return any(map(_DELIMITER.search, lines))


def _is_lines(text: bytes, hint: str | None) -> bool:
    """Whether a JSON text is JSON lines: its first line is a whole object, and another follows."""
    first, ended, rest = text.lstrip().partition(b"\n")
    try:
        orjson.loads(first)
    except orjson.JSONDecodeError:
        # A first line that does not parse may be one broken line of JSON lines.
        return hint == "ndjson" and (not ended or rest.lstrip()[:1] == first[:1] == b"{")
    return hint == "ndjson" or (first[:1] == b"{" and rest.lstrip()[:1] == b"{")


def _zip_format(path: Path, limits: Limits) -> str:
    with Package(path, limits) as package:
        main = office_document(package)
        if "content.xml" in package.parts and main.lower() not in package.parts:
            kind = _mimetype(package)
            if kind.startswith(MIMETYPE) or not kind:
                return "ods"
            what = "an OpenDocument file, but no spreadsheet (.ods)"
        elif "xl/workbook.bin" in package.parts:
            what = "a binary workbook (.xlsb)"
        elif "word/document.xml" in package.parts:
            what = "a Word document"
        elif "ppt/presentation.xml" in package.parts:
            what = "a presentation"
        elif main.lower() in package.parts:
            return "xlsx"
        else:
            what = "a zip archive without a workbook"
    raise _unsupported(what)


def _mimetype(package: Package) -> bytes:
    info = package.parts.get("mimetype")
    if info is None or info.file_size > _HEAD:
        return b""
    return b"".join(package.chunks("mimetype")).strip()


def _ole_format(path: Path) -> str:
    rest = b""
    for chunk in bytes_of(path):
        if _ENCRYPTED in rest + chunk:
            raise encrypted()
        rest = chunk[-len(_ENCRYPTED) :]
    with OleFile(path) as container:
        if any(name in container.streams for name in STREAMS):
            return "xls"
        if "worddocument" in container.streams:
            what = "a Word document"
        elif "powerpoint document" in container.streams:
            what = "a presentation"
        else:
            what = "an old Office file without a workbook"
    raise _unsupported(what)
