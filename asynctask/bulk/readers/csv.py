"""CSV and other delimited text: streamed, in constant memory."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TextIO

from asynctask.bulk.readers.base import Limits, OpenOptions, RawRow, normalise, over_limit
from asynctask.bulk.readers.headers import HEADER_ROWS, find_header, matches
from asynctask.errors import InputError

__all__ = ["DELIMITERS", "FORMULA_STARTS", "CsvSource", "open_csv"]

DELIMITERS: Final = ",;\t|"
FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""What a spreadsheet may take for a formula; a report puts ' before such text, and reading takes it away again."""
_CHUNK: Final = 1 << 20
_DEFAULT_FIELD: Final = 131_072
_ENCODINGS: Final = ("utf-8-sig",)
"""What is tried, in order."""
_GUARDED: Final = tuple("'" + start for start in (*FORMULA_STARTS, "'"))


class CsvSource:
    """A delimited text; see :class:`~asynctask.bulk.readers.base.Source`. A row is a record, whatever lines it spans."""

    format = "csv"

    def __init__(self, path: Path, encoding: str, options: OpenOptions) -> None:
        self._path, self._encoding, self._limits = path, encoding, options.limits
        self._directive, self._delimiter = self._sniff(options.expect)
        first = list(islice(self._records(), HEADER_ROWS))
        self._header = find_header(first, options.expect, options.limits)
        self.headers: tuple[str, ...] | None = self._header.headers
        self.planned: int | None = None

    def rows(self, after: int = 0) -> Iterator[RawRow]:
        """See :meth:`Source.rows`."""
        count = 0
        for number, cells in self._records():
            if number <= self._header.number:
                continue
            row = self._header.row(number, cells, extra_is_problem=True)
            if row is None:
                continue
            count += 1
            if count > self._limits.max_rows:
                raise over_limit("the file has more rows", "max_rows", self._limits.max_rows)
            if number > after:
                yield row

    def close(self) -> None:
        """See :meth:`Source.close`. The file is open only while rows are read."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _records(self) -> Iterator[tuple[int, list[str | None]]]:
        """The records that are not blank, with their numbers."""
        limit, empty = self._limits.max_cell_chars, 0
        with self._path.open(encoding=self._encoding, newline="") as file:
            lines = _Lines(file, self._limits)
            if self._directive:
                next(lines, None)
            for number, record in enumerate(_parsed(lines, self._delimiter, limit), 1):
                if not any(record):
                    empty += 1
                    if empty >= self._limits.max_empty_rows:
                        return
                    continue
                empty = 0
                yield number, [_value(cell, number, limit) if cell else None for cell in record]

    def _sniff(self, expect: frozenset[str]) -> tuple[bool, str]:
        """Whether the first line only names the delimiter (``sep=;``), and the delimiter."""
        with self._path.open(encoding=self._encoding, newline="") as file:
            lines = list(islice(_Lines(file, self._limits), HEADER_ROWS * 2))
        first = lines[0].strip().strip('"') if lines else ""
        if len(first) == 5 and first[:4].lower() == "sep=" and first[4] in DELIMITERS:
            return True, first[4]
        if lines and lines[0].strip("\r\n").lower() == "sep=\t":
            return True, "\t"
        wanted = frozenset(map(normalise, expect))
        return False, max(DELIMITERS, key=lambda each: _score(lines, each, wanted))


def open_csv(path: Path, options: OpenOptions) -> CsvSource:
    """Open a delimited text.

    Raises :class:`InputError`: ``encoding``, ``nul_byte``, ``no_header``, ``duplicate_column``, ``invalid_csv``,
    ``too_large``.
    """
    _prove_text(path)
    if options.limits.max_cell_chars > csv.field_size_limit():
        csv.field_size_limit(options.limits.max_cell_chars)
    return CsvSource(path, _ENCODINGS[0], options)


class _Lines:
    """The lines of a text, none longer than an item could ever be; remembers when the text has ended."""

    def __init__(self, file: TextIO, limits: Limits) -> None:
        self._file, self._limits = file, limits
        self._longest = 16 * max(limits.max_item_bytes, limits.max_cell_chars)
        self._number = 0
        self.ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        line = self._file.readline(self._longest + 1)
        self._number += 1
        if len(line) > self._longest:
            raise over_limit(
                f"line {self._number} is longer than {self._longest:,} characters, 16 times the largest item",
                "max_item_bytes",
                self._limits.max_item_bytes,
            )
        if not line:
            self.ended = True
            raise StopIteration
        return line


def _parsed(lines: _Lines, delimiter: str, max_chars: int) -> Iterator[list[str]]:
    reader = csv.reader(lines, delimiter=delimiter)
    number = 0
    while True:
        number += 1
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "field limit" in str(error):
                what = f"a cell of row {number} is too long (a double quote that is never closed?)"
                raise over_limit(what, "max_cell_chars", max_chars) from None
            raise InputError(
                f"row {number} cannot be read: {error}; save the file as CSV again", code="invalid_csv"
            ) from None
        if lines.ended:
            raise InputError(
                f"row {number} opens a double quote that is never closed; close it, or delete it", code="invalid_csv"
            )
        yield record


def _value(cell: str, number: int, max_chars: int) -> str | None:
    if len(cell) > max_chars:
        raise over_limit(f"a cell of row {number} has {len(cell):,} characters", "max_cell_chars", max_chars)
    if cell[0] == "'" and cell.startswith(_GUARDED):
        return cell[1:].strip() or None
    return cell.strip() or None


def _score(lines: list[str], delimiter: str, wanted: frozenset[str]) -> tuple[int, int, int]:
    """How well a delimiter explains the first lines: names found, rows of the commonest width, that width."""
    try:
        records: list[Any] = [record for record in csv.reader(lines, delimiter=delimiter) if any(record)]
    except csv.Error:
        return (0, 0, 0)
    widths = [len(record) for record in records if len(record) > 1]
    usual = max(widths, key=widths.count, default=1)
    return (max((matches(record, wanted) for record in records), default=0), widths.count(usual), usual)


def _prove_text(path: Path) -> None:
    """Raise :class:`InputError` unless the file is UTF-8 text without NUL, before a single row is taken from it."""
    decoder, place, lines = codecs.getincrementaldecoder("utf-8")(), 0, 1
    with path.open("rb") as file:
        while True:
            chunk = file.read(_CHUNK)
            if place == 0 and chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise InputError("the text is UTF-16; save it as 'CSV UTF-8'", code="encoding")
            if (nul := chunk.find(b"\0")) >= 0:
                line = lines + chunk.count(b"\n", 0, nul)
                raise InputError(
                    f"line {line} (byte {place + nul + 1}) contains a NUL byte: the file is damaged or no text;"
                    " save it as 'CSV UTF-8'",
                    code="nul_byte",
                )
            held = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                at = error.start - held
                line = lines + chunk.count(b"\n", 0, max(at, 0))
                raise InputError(
                    f"line {line} (byte {place + at + 1}) is not UTF-8 text; save the file as 'CSV UTF-8'", code="encoding"
                ) from None
            if not chunk:
                return
            lines += chunk.count(b"\n")
            place += len(chunk)
