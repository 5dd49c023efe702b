"""CSV and other delimited text: streamed, in constant memory."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self, TextIO

from asynctask.errors import InputError
from asynctask.lists.readers.base import Limits, OpenOptions, normalise, over_limit
from asynctask.lists.readers.encodings import prove_encoding
from asynctask.lists.readers.table import HEADER_ROWS, TableSource, matches

DELIMITERS: Final = ",;\t|"
FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""Beginnings that a spreadsheet may take for a formula; a report prefixes such text with ', and reading removes it."""
_CHUNK: Final = 1 << 20
_GUARDED: Final = tuple("'" + start for start in (*FORMULA_STARTS, "'"))


class _Text:
    """A delimited text: its records by number. A record is a row, over any number of lines."""

    def __init__(self, path: Path, encoding: str, options: OpenOptions, delimiters: str) -> None:
        self._path, self._encoding, self._limits = path, encoding, options.limits
        self._directive, self._delimiter = self._sniff(options.expect, delimiters)

    def records(self) -> Iterator[tuple[int, list[str | None]]]:
        """The non-blank records, with their numbers."""
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

    def _sniff(self, expect: frozenset[str], delimiters: str) -> tuple[bool, str]:
        """Whether the first line only names the delimiter (``sep=;``), and the delimiter."""
        with self._path.open(encoding=self._encoding, newline="") as file:
            lines = list(islice(_Lines(file, self._limits), HEADER_ROWS * 2))
        first = lines[0].strip().strip('"') if lines else ""
        if len(first) == 5 and first[:4].lower() == "sep=" and first[4] in DELIMITERS:
            return True, first[4]
        if lines and lines[0].strip("\r\n").lower() == "sep=\t":
            return True, "\t"
        wanted = frozenset(map(normalise, expect))
        return False, max(delimiters, key=lambda each: _score(lines, each, wanted))


def open_csv(path: Path, options: OpenOptions) -> TableSource:
    """Opens a delimited text.

    Raises :class:`InputError`: ``encoding``, ``nul_byte``, ``no_header``, ``duplicate_column``, ``invalid_csv``,
    ``too_large``.
    """
    return _open("csv", DELIMITERS, path, options)


def open_tsv(path: Path, options: OpenOptions) -> TableSource:
    """Opens a tab-separated text; one without a tab as :func:`open_csv`."""
    return _open("tsv", "\t", path, options) if _has_tab(path) else open_csv(path, options)


def _open(name: str, delimiters: str, path: Path, options: OpenOptions) -> TableSource:
    encoding = prove_encoding(path, options.encoding, options.expect)
    if options.limits.max_cell_chars > csv.field_size_limit():
        csv.field_size_limit(options.limits.max_cell_chars)
    text = _Text(path, encoding, options, delimiters)
    return TableSource(name, text.records, options, extra_is_problem=True)


def _has_tab(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\t" in file.read(_CHUNK)


class _Lines:
    """The lines of a text, limited in length; ``ended`` is set at its end."""

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
        if self._number == 1:
            line = line.removeprefix("\ufeff")
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
    """How well a delimiter fits the first lines: expected names, rows of the commonest width, that width."""
    try:
        records: list[Any] = [record for record in csv.reader(lines, delimiter=delimiter) if any(record)]
    except csv.Error:
        return (0, 0, 0)
    widths = [len(record) for record in records if len(record) > 1]
    usual = max(widths, key=widths.count, default=1)
    return (max((matches(record, wanted) for record in records), default=0), widths.count(usual), usual)
