"""Which format a file has: its content decides, its name only where the content leaves it open."""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import Final

from asynctask.bulk.readers.base import Limits
from asynctask.bulk.readers.package import Package
from asynctask.errors import UnsupportedFormat

__all__ = ["BOM", "sniff"]

BOM: Final = b"\xef\xbb\xbf"
_HEAD: Final = 65_536
_OLE: Final = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
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
}
_JSON: Final = re.compile(rb'\s*(?:\[\s*(?:[\[{"\]]|-?\d|true\b|false\b|null\b|\Z)|\{\s*(?:["}]|\Z))')
_MARKUP: Final = re.compile(rb"\s*<(?:!doctype|html|\?xml|table|head|body|meta)\b", re.IGNORECASE)
_BINARY_NAMES: Final = frozenset({".xlsx", ".xlsm", ".xls", ".xlsb", ".ods", ".pdf", ".zip", ".numbers", ".doc", ".docx"})


def sniff(path: Path, filename: str, limits: Limits, readable: str) -> str:
    """``xlsx``, ``csv`` or ``json``.

    Arguments: the file, the name that it was sent under, the limits, and the formats that can be read as one sentence.
    Raises :class:`UnsupportedFormat` for everything else, ``empty_file`` when nothing is in it.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD)
    suffix = PurePath(filename).suffix.lower()
    if head[:4] in {b"PK\x03\x04", b"PK\x05\x06"}:
        return _zip_format(path, limits, readable)
    if head.startswith(_OLE):
        raise _ole(path, readable)
    for magic, what in _MAGIC.items():
        if head.startswith(magic):
            raise UnsupportedFormat(f"the file is {what}; {readable}")
    text = head.removeprefix(BOM)
    if not text.strip() and _blank(path):
        raise UnsupportedFormat(f"the file is empty; {readable}", code="empty_file")
    if _MARKUP.match(text):
        raise UnsupportedFormat(
            f"the file is a web page or XML; open it in a spreadsheet program and save as .xlsx; {readable}"
        )
    if suffix in _BINARY_NAMES:
        raise UnsupportedFormat(f"the file is named {suffix} but holds something else; {readable}")
    return "json" if suffix == ".json" or _JSON.match(text) else "csv"


def _zip_format(path: Path, limits: Limits, readable: str) -> str:
    with Package(path, limits) as package:
        if "xl/workbook.xml" in package.parts:
            return "xlsx"
        if "xl/workbook.bin" in package.parts:
            what = "a binary workbook (.xlsb)"
        elif "mimetype" in package.parts and "content.xml" in package.parts:
            what = "an OpenDocument file (.ods)"
        elif "word/document.xml" in package.parts:
            what = "a Word document"
        else:
            what = "a zip archive without a workbook"
    raise UnsupportedFormat(f"the file is {what}; {readable}")


def _ole(path: Path, readable: str) -> UnsupportedFormat:
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            if _ENCRYPTED in rest + chunk:
                return UnsupportedFormat(
                    "the workbook is encrypted with a password; remove the password in the spreadsheet program,"
                    " save it and upload it again",
                    code="encrypted",
                )
            rest = chunk[-len(_ENCRYPTED) :]
    return UnsupportedFormat(f"the file is an old Office file (.xls); save it as .xlsx; {readable}")


def _blank(path: Path) -> bool:
    with path.open("rb") as file:
        return all(not chunk.removeprefix(BOM).strip() for chunk in iter(lambda: file.read(1 << 20), b""))
