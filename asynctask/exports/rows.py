"""Rows of an export as bytes of its format: checked against the columns, encoded, and merged to one file.

Nothing is truncated or dropped: a value that the format cannot hold ends the shard as ``failed`` and names the row and
column.
"""

from __future__ import annotations

import gzip
import importlib.util
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import cache
from typing import IO, Any, Final
from uuid import UUID

import orjson

from asynctask.errors import InputError, NormalException, not_installed
from asynctask.ledger.base import chunks
from asynctask.lists.workbook_writer import iter_workbook, table
from asynctask.lists.written_cells import (
    CELL_CHARS,
    SHEET_COLUMNS,
    csv_cell,
    csv_text,
    guarded,
    packed,
    sheet_value,
    unpacked,
)

_CHUNK: Final = 1 << 20
_BATCH: Final = 1_000


class RowError(NormalException):
    """A row that cannot be exported unchanged: a retry would not help."""

    code = "bad_row"


def checked(rows: Iterable[Any], columns: Sequence[str]) -> Iterator[Sequence[Any]]:
    """The rows as sequences in the order of the columns. Raises :class:`RowError` for a row with other columns."""
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
    """One shard's part: ``open`` returns a stream at the beginning of its body, which ends with the stream."""

    open: Callable[[], IO[bytes]]
    rows: int


class ExportFormat:
    """How rows of one format are stored in a part, and how parts are merged into the file."""

    suffix = ""
    media = "application/octet-stream"

    def check(self, columns: Sequence[str]) -> None:
        """Raises :class:`InputError` for columns that the format cannot hold, or if its library is not installed."""

    def write_part(self, out: IO[bytes], rows: Iterable[Sequence[Any]], columns: Sequence[str]) -> int:
        """Writes the rows of a shard; returns their number. Raises :class:`RowError`."""
        count = 0
        with self._packing(out) as packing:
            for batch in chunks(rows, _BATCH):
                packing.write(self._encode(batch, columns, count))
                count += len(batch)
        return count

    def merge(self, out: IO[bytes], parts: Sequence[Part], columns: Sequence[str]) -> None:
        """Writes the file, in constant memory. Raises :class:`RowError`."""
        with self._packing(out) as packing:
            packing.write(self._head(columns))
        for part in parts:
            with part.open() as body:
                while chunk := body.read(_CHUNK):
                    out.write(chunk)

    def _packing(self, out: IO[bytes]) -> Any:
        return nullcontext(out)

    def _head(self, columns: Sequence[str]) -> bytes:
        return b""

    def _encode(self, rows: Sequence[Sequence[Any]], columns: Sequence[str], before: int) -> bytes:
        raise NotImplementedError


def _refused(
    rows: Iterable[Sequence[Any]], columns: Sequence[str], before: int, encode: Callable[[Any], object], error: Exception
) -> RowError:
    """The error for these rows, which name the row and column of the first value that ``encode`` refuses."""
    for number, row in enumerate(rows, before + 1):
        for name, value in zip(columns, row, strict=True):
            try:
                encode(value)
            except (TypeError, ValueError, OverflowError) as found:
                return RowError(f"row {number} of the shard, column {name[:80]!r}: {found}")
    return RowError(f"a row of the shard from row {before + 1} on: {error}")


# -- csv: UTF-8 with a byte order mark, cells as in reports, but never cut


class Csv(ExportFormat):
    """Comma-separated values, as reports have them."""

    suffix = "csv"
    media = "text/csv"

    def _head(self, columns: Sequence[str]) -> bytes:
        return b"\xef\xbb\xbf" + self._encode([columns], columns, 0)

    def _encode(self, rows: Sequence[Sequence[Any]], columns: Sequence[str], before: int) -> bytes:
        # Plain whole numbers, the commonest beside texts, need no call.
        try:
            return csv_text([v if type(v) is int else _csv_value(v) for v in row] for row in rows).encode()
        except (TypeError, UnicodeEncodeError) as error:
            raise _refused(rows, columns, before, _encoded, error) from None


def _csv_value(value: Any) -> Any:
    if type(value) is str:
        return guarded(value)
    if isinstance(value, Mapping | list | tuple):
        return orjson.dumps(value).decode()
    return _csv_value(str(value)) if isinstance(value, str) else csv_cell(value)


def _encoded(value: Any) -> None:
    try:
        str(_csv_value(value)).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"no UTF-8 text: {error.reason}") from None
    except TypeError as error:
        raise TypeError(f"a value cannot be written as JSON: {error}") from None


class CsvGz(Csv):
    """The same, compressed: each part is a gzip member, and concatenated members are a gzip file."""

    suffix = "csv.gz"
    media = "application/gzip"

    def _packing(self, out: IO[bytes]) -> Any:
        return gzip.GzipFile("", "wb", 6, out, mtime=0)


# -- ndjson: one object a line


class Ndjson(ExportFormat):
    """One JSON object per row and line."""

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


class Xlsx(ExportFormat):
    """A workbook, with a further sheet for each 1,048,575 rows."""

    suffix = "xlsx"
    media = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"

    def check(self, columns: Sequence[str]) -> None:
        if len(columns) > SHEET_COLUMNS:
            raise InputError(
                f"a sheet has at most {SHEET_COLUMNS:,} columns, the export has {len(columns):,}: export as csv",
                code="invalid_format",
            )

    def _encode(self, rows: Sequence[Sequence[Any]], columns: Sequence[str], before: int) -> bytes:
        lines = []
        for number, row in enumerate(rows, before + 1):
            try:
                cells = [v if type(v) is int and -(10**15) < v < 10**15 else _sheet_cell(v) for v in row]
                lines.append(orjson.dumps(cells, option=orjson.OPT_APPEND_NEWLINE))
            except (TypeError, ValueError) as error:
                raise _refused([row], columns, number - 1, lambda value: orjson.dumps(_sheet_cell(value)), error) from None
        return b"".join(lines)

    def merge(self, out: IO[bytes], parts: Sequence[Part], columns: Sequence[str]) -> None:
        for piece in iter_workbook(table("Rows", columns, _sheet_rows(parts))):
            out.write(piece)


def _sheet_cell(value: Any) -> Any:
    if isinstance(value, Mapping | list | tuple):
        value = orjson.dumps(value).decode()
    if isinstance(value, str):
        if len(value) > CELL_CHARS // 2 and len(value.encode("utf-16-le")) // 2 > CELL_CHARS:
            raise ValueError(f"a cell holds at most {CELL_CHARS:,} characters, here are {len(value):,}: export as csv")
        value.encode()
        if "\ufffe" in value or "\uffff" in value or "\0" in value:
            raise ValueError("the text holds a character that no workbook can")
        return value
    value = sheet_value(value)
    if isinstance(value, Decimal):
        return float(value) if Decimal(repr(float(value))) == value else str(value)
    return value if value is None or isinstance(value, str | bool | int | float) else packed(value)


def _sheet_rows(parts: Sequence[Part]) -> Iterator[list[Any]]:
    for part in parts:
        with part.open() as body:
            for line in body:
                yield [unpacked(value) if type(value) is dict else value for value in orjson.loads(line)]


# -- parquet: parts are record batches of Arrow, the merge writes them as row groups of one schema

_GROUP_ROWS: Final = 65_536
_GROUP_BYTES: Final = 32 << 20
_LENGTH: Final = struct.Struct("<Q")


class Parquet(ExportFormat):
    """Columns typed by their values; a column has one type in all shards.

    The body of a part is frames, each a length and a record batch as an Arrow stream; then the types of the columns as
    JSON, and the length of that. A column without a value so far has no type.
    """

    suffix = "parquet"
    media = "application/vnd.apache.parquet"

    def check(self, columns: Sequence[str]) -> None:
        if importlib.util.find_spec("pyarrow") is None:
            raise InputError(not_installed("pyarrow", "parquet"), code="invalid_format")

    def write_part(self, out: IO[bytes], rows: Iterable[Sequence[Any]], columns: Sequence[str]) -> int:
        import pyarrow as pa

        kinds: list[str | None] = [None] * len(columns)
        count = 0
        for batch in chunks(rows, _BATCH):
            arrays = []
            for at, name in enumerate(columns):
                kinds[at], array = _typed([row[at] for row in batch], kinds[at], name, count)
                arrays.append(array)
            made = pa.RecordBatch.from_arrays(arrays, names=list(columns))
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, made.schema) as stream:
                stream.write_batch(made)
            frame = sink.getvalue()
            out.write(_LENGTH.pack(frame.size))
            out.write(frame)
            count += len(batch)
        tail = orjson.dumps(kinds)
        out.write(tail + _LENGTH.pack(len(tail)))
        return count

    def merge(self, out: IO[bytes], parts: Sequence[Part], columns: Sequence[str]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        types = _arrow_types()
        kinds = _common_kinds(parts, columns)
        schema = pa.schema([(name, types[kind or "text"]) for name, kind in zip(columns, kinds, strict=True)])
        with pq.ParquetWriter(out, schema) as writer:
            group: list[Any] = []
            for batch in _record_batches(parts):
                group.append(batch.cast(schema))
                if sum(map(len, group)) >= _GROUP_ROWS or sum(each.nbytes for each in group) >= _GROUP_BYTES:
                    writer.write_table(pa.concat_tables(group))
                    group = []
            if group:
                writer.write_table(pa.concat_tables(group))


@cache
def _arrow_types() -> Mapping[str, Any]:
    import pyarrow as pa

    return {
        "bool": pa.bool_(), "whole number": pa.int64(), "float": pa.float64(), "decimal": pa.decimal128(38, 9),
        "text": pa.string(), "bytes": pa.binary(), "date": pa.date32(), "time": pa.time64("us"),
        "date with time": pa.timestamp("us"), "date with time and zone": pa.timestamp("us", "UTC"),
    }  # fmt: skip


_KINDS: Final = (
    (bool, "bool"), (int, "whole number"), (float, "float"), (Decimal, "decimal"), (str, "text"), (bytes, "bytes"),
    (datetime, "date with time"), (date, "date"), (time, "time"), (timedelta, "float"),
    ((Mapping, list, tuple, UUID), "text"),
)  # fmt: skip
"""What a type becomes; the first that fits."""


@cache
def _kind(kind: Any) -> str | None:
    return next((name for types, name in _KINDS if issubclass(kind, types)), None)


def _kind_of(value: Any) -> str:
    kind = _kind(value.__class__)
    if kind is None:
        raise TypeError(f"a {type(value).__name__} has no form in parquet")
    if kind == "time" and value.tzinfo is not None:
        raise TypeError("a time with a zone has no form in parquet")
    return "date with time and zone" if kind == "date with time" and value.tzinfo is not None else kind


def _arrow_value(value: Any) -> Any:
    if type(value) in (str, int, float):
        return value
    if isinstance(value, Mapping | list | tuple):
        return orjson.dumps(value).decode()
    if isinstance(value, UUID):
        return str(value)
    return value.total_seconds() if isinstance(value, timedelta) else value


def _typed(values: list[Any], kind: str | None, name: str, before: int) -> tuple[str | None, Any]:
    """A column of some rows as an array, and its type, ``kind`` if it already has one. Raises :class:`RowError`."""
    import pyarrow as pa

    fit: list[Any] = []
    number = before
    try:
        for value in values:
            number += 1
            if value is not None and kind != (found := _kind_of(value)):
                if kind is not None:
                    raise TypeError(f"a {found} after a {kind}; a column of parquet has one type")
                kind = found
            fit.append(_arrow_value(value))
        wanted = pa.null() if kind is None else _arrow_types()[kind]
        try:
            return kind, pa.array(fit, wanted)
        except (TypeError, ValueError, OverflowError):
            number = before
            for value in fit:
                number += 1
                pa.scalar(value, wanted)
            raise
    except (TypeError, ValueError, OverflowError) as error:
        raise RowError(f"row {number} of the shard, column {name[:80]!r}: {error}") from None


def _common_kinds(parts: Sequence[Part], columns: Sequence[str]) -> list[str | None]:
    """The types of the columns in all parts. Raises :class:`RowError` if two differ."""
    common: list[str | None] = [None] * len(columns)
    for part in parts:
        with part.open() as body:
            for at, kind in enumerate(orjson.loads(_tail(body)[0])):
                if kind is not None and kind != (common[at] or kind):
                    raise RowError(
                        f"column {columns[at][:80]!r}: some shards yield a {common[at]}, others a {kind}; a column of"
                        " parquet has one type"
                    )
                common[at] = common[at] or kind
    return common


def _tail(body: IO[bytes]) -> tuple[bytes, int]:
    """The types at the end of a part, and the end of the frames before them. Leaves the stream at its frames."""
    first = body.tell()
    end = body.seek(-_LENGTH.size, os.SEEK_END)
    (length,) = _LENGTH.unpack(body.read(_LENGTH.size))
    end = body.seek(end - length)
    tail = body.read(length)
    body.seek(first)
    return tail, end


def _record_batches(parts: Sequence[Part]) -> Iterator[Any]:
    """The batches of the parts, each as a table."""
    import pyarrow as pa

    for part in parts:
        with part.open() as body:
            _, end = _tail(body)
            while body.tell() < end:
                (length,) = _LENGTH.unpack(body.read(_LENGTH.size))
                yield pa.ipc.open_stream(body.read(length)).read_all()


FORMATS: Final[Mapping[str, ExportFormat]] = {
    "csv": Csv(), "csv.gz": CsvGz(), "ndjson": Ndjson(), "xlsx": Xlsx(), "parquet": Parquet(),
}  # fmt: skip
"""The formats by name, which is also the extension of the file."""
