"""The files of the benchmark ``sheet``: the same rows in each format, and what they must have become in the ledger.

Seven columns: a 19-digit number as text, text, an integer, a decimal, a date, yes or no, and Chinese text.
"""

from __future__ import annotations

import csv
import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from decimal import Decimal
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any
from xml.sax.saxutils import escape

__all__ = ["HEADERS", "KINDS", "Digest", "make", "row"]

HEADERS = ("order_no", "title", "quantity", "price", "day", "express", "note")
VERSION = 1
"""Raise it when the files change: those that are kept in a cache folder are made anew then."""

_FIRST_ID = 1_000_000_000_000_000_000
_FIRST_DAY = date(2026, 1, 1)
_EPOCH = date(1899, 12, 30)
_NOTES = 10_000

Row = tuple[str, str, int, Decimal, date, bool, str]


def row(i: int) -> Row:
    """Row ``i``, counted from 0."""
    price = Decimal(i % 99_991) / 100
    day = _FIRST_DAY + timedelta(days=i % 730)
    note = f"促销商品，第{i % _NOTES}批，七日内发货，库存充足"
    return str(_FIRST_ID + i * 7_919), f"Linen shirt, style {i:07d}", i % 1_000, price, day, i % 3 == 0, note


class Digest:
    """One checksum over items in their order: equal only if each is there once, in its place, with its values and types."""

    def __init__(self) -> None:
        self._sum = hashlib.sha256()
        self.count = 0

    def add(self, seq: int, first_row: int, values: Row) -> None:
        """Takes the next item."""
        order_no, title, quantity, price, day, express, note = values
        said = (seq, first_row, order_no, title, quantity, str(price.normalize()), day.isoformat(), express, note)
        self._sum.update(repr(said).encode())
        self.count += 1

    def text(self) -> str:
        """The checksum of what was added."""
        return self._sum.hexdigest()


def kept(params: dict[str, Any]) -> Row:
    """A row as the ledger keeps it, as :func:`row` would have given it."""
    price, day = Decimal(str(params["price"])), date.fromisoformat(params["day"])
    return params["order_no"], params["title"], params["quantity"], price, day, params["express"], params["note"]


def make(kind: str, n: int, folder: Path) -> Path:
    """The file of ``n`` rows in ``folder``, made if it is not there yet."""
    path = folder / f"orders-{VERSION}-{n}.{kind}"
    if not path.exists():
        unfinished = path.with_name(f".{path.name}.part")
        with unfinished.open("wb") as file:
            _WRITERS[kind](file, n)
        unfinished.rename(path)
    return path


def _csv(file: IO[bytes], n: int) -> None:
    text = TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text)
    writer.writerow(HEADERS)
    for i in range(n):
        order_no, title, quantity, price, day, express, note = row(i)
        writer.writerow((order_no, title, quantity, price, day.isoformat(), "yes" if express else "no", note))
    text.flush()
    text.detach()


def _ndjson(file: IO[bytes], n: int) -> None:
    for i in range(n):
        order_no, title, quantity, price, day, express, note = row(i)
        values = (order_no, title, quantity, float(price), day.isoformat(), express, note)
        line = json.dumps(dict(zip(HEADERS, values, strict=True)), ensure_ascii=False, separators=(",", ":"))
        file.write(line.encode() + b"\n")


# -- a workbook as Excel saves it: texts in a table of their own, each cell with its address, dates by their style

_MAIN = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
_REL = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_TYPE = "application/vnd.openxmlformats-officedocument.spreadsheetml"
_HEAD = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'
_PARTS = {
    "[Content_Types].xml": f'<Types xmlns="{_PACKAGE}/content-types"><Default Extension="rels" ContentType="application/'
    'vnd.openxmlformats-package.relationships+xml"/><Default Extension="xml" ContentType="application/xml"/>'
    f'<Override PartName="/xl/workbook.xml" ContentType="{_TYPE}.sheet.main+xml"/>'
    f'<Override PartName="/xl/worksheets/sheet1.xml" ContentType="{_TYPE}.worksheet+xml"/>'
    f'<Override PartName="/xl/styles.xml" ContentType="{_TYPE}.styles+xml"/>'
    f'<Override PartName="/xl/sharedStrings.xml" ContentType="{_TYPE}.sharedStrings+xml"/></Types>',
    "_rels/.rels": f'<Relationships xmlns="{_PACKAGE}/relationships"><Relationship Id="rId1" Type="{_REL}/officeDocument"'
    ' Target="xl/workbook.xml"/></Relationships>',
    "xl/workbook.xml": f'<workbook {_MAIN} xmlns:r="{_REL}"><sheets><sheet name="Orders" sheetId="1" r:id="rId1"/></sheets>'
    "</workbook>",
    "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{_PACKAGE}/relationships">'
    f'<Relationship Id="rId1" Type="{_REL}/worksheet" Target="worksheets/sheet1.xml"/>'
    f'<Relationship Id="rId2" Type="{_REL}/styles" Target="styles.xml"/>'
    f'<Relationship Id="rId3" Type="{_REL}/sharedStrings" Target="sharedStrings.xml"/></Relationships>',
    "xl/styles.xml": f'<styleSheet {_MAIN}><fonts count="1"><font/></fonts><fills count="1"><fill/></fills>'
    '<borders count="1"><border/></borders><cellStyleXfs count="1"><xf/></cellStyleXfs><cellXfs count="2"><xf/>'
    '<xf numFmtId="14" applyNumberFormat="1"/></cellXfs></styleSheet>',
}


def _xlsx(file: IO[bytes], n: int) -> None:
    strings: dict[str, int] = {}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as package:
        for name, text in _PARTS.items():
            package.writestr(name, _HEAD + text)
        with package.open("xl/worksheets/sheet1.xml", "w", force_zip64=True) as part:
            for text in _sheet(n, strings):
                part.write(text.encode())
        with package.open("xl/sharedStrings.xml", "w", force_zip64=True) as part:
            part.write(f'{_HEAD}<sst {_MAIN} count="{3 * n + len(HEADERS)}" uniqueCount="{len(strings)}">'.encode())
            for text in strings:
                part.write(f"<si><t>{escape(text)}</t></si>".encode())
            part.write(b"</sst>")


def _sheet(n: int, strings: dict[str, int]) -> Iterator[str]:
    def shared(text: str) -> int:
        return strings.setdefault(text, len(strings))

    yield f'{_HEAD}<worksheet {_MAIN}><dimension ref="A1:G{n + 1}"/><sheetData><row r="1" spans="1:7">'
    yield "".join(
        f'<c r="{column}1" t="s"><v>{shared(name)}</v></c>' for column, name in zip("ABCDEFG", HEADERS, strict=True)
    )
    yield "</row>"
    for i in range(n):
        order_no, title, quantity, price, day, express, note = row(i)
        r = i + 2
        yield (
            f'<row r="{r}" spans="1:7"><c r="A{r}" t="s"><v>{shared(order_no)}</v></c>'
            f'<c r="B{r}" t="s"><v>{shared(title)}</v></c><c r="C{r}"><v>{quantity}</v></c><c r="D{r}"><v>{price}</v></c>'
            f'<c r="E{r}" s="1"><v>{(day - _EPOCH).days}</v></c><c r="F{r}" t="b"><v>{int(express)}</v></c>'
            f'<c r="G{r}" t="s"><v>{shared(note)}</v></c></row>'
        )
    yield "</sheetData></worksheet>"


_WRITERS: dict[str, Callable[[IO[bytes], int], None]] = {"csv": _csv, "xlsx": _xlsx, "ndjson": _ndjson}
KINDS = tuple(_WRITERS)
