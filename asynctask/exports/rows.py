"""Rows of an export as bytes of its format: checked against the columns, encoded, and merged to one file.

Nothing is cut or dropped: a value that the format cannot hold ends the shard as ``failed`` and names the row and column.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, Final

import orjson

from asynctask.errors import NormalException
from asynctask.lists.cells import GUARDED, NEGATIVE, SHEET_ROWS, csv_cell, packed, sheet_text, sheet_value, unpacked

__all__ = ["FORMATS", "MAX_SHEET_COLUMNS", "Format", "RowError", "checked"]

MAX_SHEET_COLUMNS: Final = 16_384
MAX_CELL: Final = 32_767
_CHUNK: Final = 1 << 20
_BATCH: Final = 1_000
_PLAIN: Final = {"strings_to_formulas": False, "strings_to_urls": False, "strings_to_numbers": False}


class RowError(NormalException):
    """A row that cannot be exported as it is: no retry would change that."""

    code = "bad_row"


def checked(rows: Iterable[Any], columns: Sequence[str]) -> Iterator[Sequence[Any]]:
    """The rows as sequences in the order of the columns. Raises :class:`RowError` for one with other columns."""
    width, names = len(columns), frozenset(columns)
    for number, row in enumerate(rows, 1):
        if isinstance(row, Mapping):
            if row.keys() != names:
                missing = sorted(names - row.keys())
                extra = sorted(str(name) for name in row.keys() - names)
                raise RowError(
                    f"row {number} of the shard: columns missing: {_some(missing)}; not declared: {_some(extra)}"
                )
            yield [row[name] for name in columns]
        elif isinstance(row, Sequence) and not isinstance(row, str | bytes):
            if len(row) != width:
                raise RowError(f"row {number} of the shard has {len(row)} values, the export has {width} columns")
            yield row
        else:
            raise RowError(f"row {number} of the shard is a {type(row).__name__}; yield dicts or sequences")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(name[:80] for name in names[:5])
    return (shown or "none") + (f" and {len(names) - 5} more" if len(names) > 5 else "")


@dataclass(frozen=True, slots=True)
class Part:
    """The body of one shard's part: where it lies, from which byte, and how many rows it has."""

    path: Path
    start: int
    rows: int


class Format:
    """How the rows of one format are kept in a part, and how parts become the file."""

    suffix = ""
    media = "application/octet-stream"

    def write_part(self, out: IO[bytes], rows: Iterable[Sequence[Any]], columns: Sequence[str]) -> int:
        """Writes the rows of a shard; returns their number. Raises :class:`RowError`."""
        count = 0
        with self._packing(out) as packing:
            for batch in _batches(rows):
                packing.write(self._encode(batch, columns, count))
                count += len(batch)
        return count

    def merge(self, out: IO[bytes], parts: Sequence[Part], columns: Sequence[str], tmp: Path) -> None:
        """Writes the file, in constant memory; ``tmp`` is a folder for temporary files. Raises :class:`RowError`."""
        with self._packing(out) as packing:
            packing.write(self._head(columns))
        for part in parts:
            with part.path.open("rb") as body:
                body.seek(part.start)
                while chunk := body.read(_CHUNK):
                    out.write(chunk)

    def _packing(self, out: IO[bytes]) -> Any:
        return _Open(out)

    def _head(self, columns: Sequence[str]) -> bytes:
        return b""

    def _encode(self, rows: Sequence[Sequence[Any]], columns: Sequence[str], before: int) -> bytes:
        raise NotImplementedError


class _Open:
    """A stream that a ``with`` leaves open."""

    def __init__(self, out: IO[bytes]) -> None:
        self.write = out.write

    def __enter__(self) -> _Open:
        return self

    def __exit__(self, *_: object) -> None: ...


def _batches(rows: Iterable[Sequence[Any]]) -> Iterator[list[Sequence[Any]]]:
    batch: list[Sequence[Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


# -- csv: UTF-8 with a byte order mark, cells as in reports, but never cut


class Csv(Format):
    """Comma-separated values, as reports have them."""

    suffix = "csv"
    media = "text/csv"

    def _head(self, columns: Sequence[str]) -> bytes:
        return b"\xef\xbb\xbf" + self._encode([columns], columns, 0)

    def _encode(self, rows: Sequence[Sequence[Any]], columns: Sequence[str], before: int) -> bytes:
        buffer = io.StringIO(newline="")
        writer = csv.writer(buffer, lineterminator="\r\n")
        # Plain whole numbers, the commonest beside texts, need no call.
        writer.writerows([[v if type(v) is int else _csv_value(v) for v in row] for row in rows])
        try:
            return buffer.getvalue().encode()
        except UnicodeEncodeError:
            raise _unencodable(rows, columns, before) from None


def _csv_value(value: Any) -> Any:
    if type(value) is str:
        guarded = value.startswith(GUARDED) and not NEGATIVE.fullmatch(value)
        return f"'{value}" if guarded else value
    if isinstance(value, Mapping | list | tuple):
        try:
            return orjson.dumps(value).decode()
        except TypeError as error:
            raise RowError(f"a value cannot be written as JSON: {error}") from None
    return _csv_value(str(value)) if isinstance(value, str) else csv_cell(value)


def _unencodable(rows: Sequence[Sequence[Any]], columns: Sequence[str], before: int) -> RowError:
    for number, row in enumerate(rows, before + 1):
        for name, value in zip(columns, row, strict=True):
            try:
                str(value).encode()
            except UnicodeEncodeError as error:
                return RowError(f"row {number} of the shard, column {name[:80]!r}: no UTF-8 text: {error.reason}")
    return RowError("a row of the shard is no UTF-8 text")


class CsvGz(Csv):
    """The same, packed: each part is a member of its own, and members one after the other are a gzip file."""

    suffix = "csv.gz"
    media = "application/gzip"

    def _packing(self, out: IO[bytes]) -> Any:
        return gzip.GzipFile("", "wb", 6, out, mtime=0)


# -- ndjson: one object a line


class Ndjson(Format):
    """A JSON object for each row, one a line."""

    suffix = "ndjson"
    media = "application/x-ndjson"

    def _encode(self, rows: Sequence[Sequence[Any]], columns: Sequence[str], before: int) -> bytes:
        lines = []
        for number, row in enumerate(rows, before + 1):
            try:
                lines.append(orjson.dumps(dict(zip(columns, row, strict=True)), _json_value, orjson.OPT_APPEND_NEWLINE))
            except TypeError as error:
                raise RowError(f"row {number} of the shard cannot be written as JSON: {error}") from None
        return b"".join(lines)


def _json_value(value: Any) -> Any:
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


# -- xlsx: parts are lines of JSON, the merge writes the workbook


class Xlsx(Format):
    """A workbook of one sheet."""

    suffix = "xlsx"
    media = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"

    def _encode(self, rows: Sequence[Sequence[Any]], columns: Sequence[str], before: int) -> bytes:
        lines = []
        for number, row in enumerate(rows, before + 1):
            if number > SHEET_ROWS:
                raise _too_long(number)
            try:
                cells = [v if type(v) is int and -(10**15) < v < 10**15 else _sheet_cell(v) for v in row]
                lines.append(orjson.dumps(cells, option=orjson.OPT_APPEND_NEWLINE))
            except (TypeError, ValueError) as error:
                raise _bad_cell(number, row, columns, error) from None
        return b"".join(lines)

    def merge(self, out: IO[bytes], parts: Sequence[Part], columns: Sequence[str], tmp: Path) -> None:
        total = sum(part.rows for part in parts)
        if total > SHEET_ROWS:
            raise _too_long(total)
        import xlsxwriter  # a worker that makes no workbook need not load it
        from xlsxwriter.exceptions import XlsxFileError

        with tempfile.TemporaryDirectory(prefix=".sheet-", dir=tmp) as folder:
            book = xlsxwriter.Workbook(out, {"constant_memory": True, "tmpdir": folder, **_PLAIN})
            book.use_zip64()
            try:
                _write_sheet(book, parts, columns)
                book.close()
            except XlsxFileError as error:
                raise OSError(*error.args) from error
            finally:
                book.fileclosed = True  # closing a book that broke off would finish it
                for sheet in book.worksheets():
                    sheet._opt_close()


def _write_sheet(book: Any, parts: Sequence[Part], columns: Sequence[str]) -> None:
    formats = {kind: book.add_format({"num_format": pattern}) for kind, pattern in _PATTERNS.items()}
    sheet = book.add_worksheet("Rows")
    sheet.freeze_panes(1, 0)
    for column, name in enumerate(columns):
        sheet.write_string(0, column, sheet_text(name))
    for number, cells in enumerate(_lines(parts), 1):
        for column, value in enumerate(cells):
            _write_cell(sheet, number, column, value, formats)


_PATTERNS: Final[Mapping[type, str]] = {
    date: "yyyy-mm-dd",
    datetime: "yyyy-mm-dd hh:mm:ss",
    time: "hh:mm:ss",
    timedelta: "[h]:mm:ss",
}


def _too_long(count: int) -> RowError:
    return RowError(f"a sheet has at most {SHEET_ROWS:,} rows below its header, here are {count:,}: export as csv")


def _bad_cell(number: int, row: Sequence[Any], columns: Sequence[str], error: Exception) -> RowError:
    for name, value in zip(columns, row, strict=True):
        try:
            orjson.dumps(_sheet_cell(value))
        except (TypeError, ValueError) as found:
            return RowError(f"row {number} of the shard, column {name[:80]!r}: {found}")
    return RowError(f"row {number} of the shard: {error}")


def _sheet_cell(value: Any) -> Any:
    if isinstance(value, Mapping | list | tuple):
        value = orjson.dumps(value).decode()
    if isinstance(value, str):
        if len(value) > MAX_CELL // 2 and len(value.encode("utf-16-le")) // 2 > MAX_CELL:
            raise ValueError(f"a cell holds at most {MAX_CELL:,} characters, here are {len(value):,}: export as csv")
        value.encode()
        if "\ufffe" in value or "\uffff" in value or "\0" in value:
            raise ValueError("the text holds a character that no workbook can")
        return value
    value = sheet_value(value)
    if isinstance(value, Decimal):
        return float(value) if Decimal(repr(float(value))) == value else str(value)
    return value if value is None or isinstance(value, str | bool | int | float) else packed(value)


def _lines(parts: Sequence[Part]) -> Iterator[list[Any]]:
    for part in parts:
        with part.path.open("rb") as body:
            body.seek(part.start)
            for line in body:
                yield orjson.loads(line)


def _write_cell(sheet: Any, row: int, column: int, value: Any, formats: Mapping[type, Any]) -> None:
    kind = type(value)
    if kind is str:
        sheet.write_string(row, column, sheet_text(value) if value[:1] == "<" else value)
    elif kind is int or (kind is float and math.isfinite(value)):
        sheet.write_number(row, column, value)
    elif kind is bool:
        sheet.write_boolean(row, column, value)
    elif kind is dict:
        found = unpacked(value)
        sheet.write_datetime(row, column, found, formats[type(found)])


FORMATS: Final[Mapping[str, Format]] = {"csv": Csv(), "csv.gz": CsvGz(), "ndjson": Ndjson(), "xlsx": Xlsx()}
"""The formats by name, which is also the extension of the file."""
