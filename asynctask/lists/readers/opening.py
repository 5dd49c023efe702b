"""The opener of each format, and detection of a file's format. Imports every reader."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Final

import orjson

from asynctask.errors import UnsupportedFormat
from asynctask.lists.readers.base import Limits, OpenOptions, Source
from asynctask.lists.readers.csv import open_csv, open_tsv
from asynctask.lists.readers.encodings import head_text
from asynctask.lists.readers.json import open_json, open_ndjson
from asynctask.lists.readers.ods import MIMETYPE, ods_sheets, open_ods
from asynctask.lists.readers.workbook import OLE, OleFile, Package, encrypted, office_document
from asynctask.lists.readers.xls import STREAMS, open_xls, xls_sheets
from asynctask.lists.readers.xlsx import open_xlsx, xlsx_sheets

OPENERS: Final[Mapping[str, Callable[[Path, OpenOptions], Source]]] = {
    "xlsx": open_xlsx,
    "xls": open_xls,
    "ods": open_ods,
    "csv": open_csv,
    "tsv": open_tsv,
    "json": open_json,
    "ndjson": open_ndjson,
}
"""The reader of each of :data:`asynctask.lists.readers.FORMATS`."""

SHEETS: Final[Mapping[str, Callable[[Path, Limits], list[str]]]] = {
    "xlsx": xlsx_sheets, "xls": xls_sheets, "ods": ods_sheets,
}  # fmt: skip
"""Lists the visible sheets, for the formats that have sheets."""


# -- format detection: by content, then by media type and file name

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
_WORKBOOK_NAMES: Final = frozenset({".xlsx", ".xlsm", ".xls", ".ods"})
_BINARY_NAMES: Final = frozenset({".xlsb", ".pdf", ".zip", ".numbers", ".doc", ".docx", ".ppt", ".pptx", ".parquet"})
_HINTS: Final = {
    ".json": "json",
    ".ndjson": "ndjson",
    ".jsonl": "ndjson",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".csv": "csv",
    "application/json": "json",
    "text/json": "json",
    "application/x-ndjson": "ndjson",
    "application/ndjson": "ndjson",
    "application/jsonl": "ndjson",
    "application/x-jsonlines": "ndjson",
    "text/csv": "csv",
    "application/csv": "csv",
    "text/tab-separated-values": "tsv",
}


def sniff(path: Path, filename: str, limits: Limits, readable: str, media_type: str | None = None) -> str:
    """The name of the file's format in the registry.

    Arguments: the file, the name it was sent under, the limits, the end of a message that lists the readable formats, and
    the media type it was sent as. Raises :class:`UnsupportedFormat` for any other format, ``empty_file`` for no content.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if head[:4] in {b"PK\x03\x04", b"PK\x05\x06"}:
        return _zip_format(path, limits, readable)
    if head.startswith(OLE):
        return _ole_format(path, readable)
    for magic, what in _MAGIC.items():
        if head.startswith(magic):
            raise UnsupportedFormat(f"the file is {what}; {readable}")
    return _text_format(path, head, PurePath(filename).suffix.lower(), media_type, readable)


def _text_format(path: Path, head: bytes, suffix: str, media_type: str | None, readable: str) -> str:
    text = head_text(head)
    if not text.strip() and _blank(path):
        raise UnsupportedFormat(f"the file is empty; {readable}", code="empty_file")
    if _MARKUP.match(text) or _MAIL.match(text):
        raise UnsupportedFormat(
            f"the file is a web page or XML; open it in a spreadsheet program and save as .xlsx; {readable}"
        )
    # Many programs export text under the name of a workbook.
    if suffix in _BINARY_NAMES or (suffix in _WORKBOOK_NAMES and (_CONTROLS.search(text) or not _is_table(text))):
        raise UnsupportedFormat(f"the file is named {suffix} but holds something else; {readable}")
    declared = (media_type or "").partition(";")[0].strip().lower()
    hint = _HINTS.get(declared) or _HINTS.get(suffix)
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


def _zip_format(path: Path, limits: Limits, readable: str) -> str:
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
    raise UnsupportedFormat(f"the file is {what}; {readable}")


def _mimetype(package: Package) -> bytes:
    info = package.parts.get("mimetype")
    if info is None or info.file_size > _HEAD:
        return b""
    return b"".join(package.chunks("mimetype")).strip()


def _ole_format(path: Path, readable: str) -> str:
    with path.open("rb") as file:
        rest = b""
        while chunk := file.read(1 << 20):
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
    raise UnsupportedFormat(f"the file is {what}; {readable}")


def _blank(path: Path) -> bool:
    with path.open("rb") as file:
        return all(not head_text(chunk).strip() for chunk in iter(lambda: file.read(1 << 20), b""))
