"""CSV and other delimited text: streamed, in constant memory."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self, TextIO

from asynctask.errors import InputError, Problem
from asynctask.lists.readers.base import Limits, OpenOptions, normalise, over_limit, shorten, too_long, trimmed
from asynctask.lists.readers.encodings import decoded, prove_encoding
from asynctask.lists.readers.table import FIGURES, HEADER_ROWS, Table, Torn, matches

DELIMITERS: Final = ",;\t|"
FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""Beginnings that a spreadsheet may take for a formula; a report prefixes such text with ', and reading removes it."""
_CHUNK: Final = 1 << 20
_NO_DELIMITER: Final = "\x1f"
"""A control character that no text has between its cells."""
_BACKSLASH: Final = "\\"
_ESCAPED_QUOTE: Final = '\\"'
_ESCAPES: Final = re.compile(r'\\[\\"]')
_TEXT_FORMULA: Final = re.compile(r'="((?:[^"]|"")*+)"')
_BAD_QUOTES: Final = (
    "the double quotes of the row do not match: text stands behind a closing one; write each double quote within a cell"
    ' twice, as in "5"" pipe"'
)
_GUARDED: Final = tuple("'" + start for start in (*FORMULA_STARTS, "'"))


class _Text:
    """A delimited text: its records by number. A record is a row, over any number of lines."""

    def __init__(self, path: Path, encoding: str, options: OpenOptions, delimiters: str) -> None:
        self._path, self._encoding, self._limits = path, encoding, options.limits
        self._directive, self.delimiter = self._sniff(options, delimiters)
        self._escape: str | None = None
        if self._has_escapes() and not self._is_sound(None) and self._is_sound(_BACKSLASH):
            self._escape = _BACKSLASH

    def records(self) -> Iterator[tuple[int, list[Any]]]:
        """The non-blank records, with their numbers; one whose quotes are wrong is a :class:`Torn`."""
        empty = 0
        for number, record in self._parsed(self._escape):
            if not any(record):
                empty += 1
                if empty >= self._limits.max_empty_rows:
                    return
                continue
            empty = 0
            cells = [_value(cell, number, self._limits) if cell else None for cell in record]
            yield number, Torn(cells, record.problem) if isinstance(record, Torn) else cells

    def _parsed(self, escape: str | None) -> Iterator[tuple[int, list[str] | Torn]]:
        with self._path.open(encoding=self._encoding, newline="") as file:
            taken: list[str] = []
            lines = _Lines(file, self._limits, taken)
            if self._directive:
                next(lines, None)
            yield from enumerate(_parsed(lines, taken, self.delimiter, escape, self._limits.max_cell_chars), 1)

    def _sniff(self, options: OpenOptions, delimiters: str) -> tuple[bool, str]:
        """Whether the first line only names the delimiter (``sep=;``), and the delimiter."""
        with self._path.open(encoding=self._encoding, newline="") as file:
            lines = list(islice(_Lines(file, self._limits), HEADER_ROWS * 2))
        first = lines[0].strip().strip('"') if lines else ""
        if len(first) == 5 and first[:4].lower() == "sep=" and first[4] in DELIMITERS:
            return True, first[4]
        if lines and lines[0].strip("\r\n").lower() == "sep=\t":
            return True, "\t"
        wanted = frozenset(map(normalise, options.expect))
        best = max(delimiters, key=lambda each: _score(lines, each, wanted))
        known = bool(wanted) or options.header is not None
        return False, best if known or not _is_one_column(lines, best) else _NO_DELIMITER

    def _has_escapes(self) -> bool:
        last = ""
        for piece in decoded(self._path, self._encoding):
            if _ESCAPED_QUOTE in last + piece:
                return True
            last = piece[-1:]
        return False

    def _is_sound(self, escape: str | None) -> bool:
        """Whether the whole text has sound quotes; with ``escape`` also one width, and no other backslash."""
        with self._path.open(encoding=self._encoding, newline="") as file:
            if escape is not None and any(escape in _ESCAPES.sub("", line) for line in _Lines(file, self._limits)):
                return False
        widths = set[int]()
        try:
            for _, record in self._parsed(escape):
                if type(record) is Torn:
                    return False
                if len(record) > 1 and any(record):
                    widths.add(len(record))
        except InputError:  # met again where it stands
            return False
        return escape is None or len(widths) < 2


def csv_table(path: Path, options: OpenOptions, delimiters: str = DELIMITERS) -> Table:
    """A delimited text; its header is not looked for.

    Raises :class:`InputError`: ``encoding``, ``nul_byte``, ``no_header``, ``invalid_csv``, ``too_large``.
    """
    encoding = prove_encoding(path, options.encoding, options.expect)
    if options.limits.max_cell_chars > csv.field_size_limit():
        csv.field_size_limit(options.limits.max_cell_chars)
    text = _Text(path, encoding, options, delimiters)
    return Table(text.records, delimiter=text.delimiter, encoding=encoding)


def tsv_table(path: Path, options: OpenOptions) -> Table:
    """A tab-separated text; one without a tab as :func:`csv_table`."""
    return csv_table(path, options, "\t" if _has_tab(path) else DELIMITERS)


def _has_tab(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\t" in file.read(_CHUNK)


class _Lines:
    """The lines of a text, limited in length; they are added to ``taken``, if that is given."""

    def __init__(self, file: TextIO, limits: Limits, taken: list[str] | None = None) -> None:
        self._file, self._limits, self._taken = file, limits, taken
        self._longest = 16 * max(limits.max_item_bytes, limits.max_cell_chars)
        self._number = 0

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
            raise StopIteration
        if self._taken is not None:
            self._taken.append(line)
        return line


def _parsed(
    lines: _Lines, taken: list[str], delimiter: str, escape: str | None, max_chars: int
) -> Iterator[list[str] | Torn]:
    """The records; ``taken`` has the lines of the last one. One with text behind a closing quote is a :class:`Torn`, and
    so is what may be its continuation."""
    reader = csv.reader(lines, delimiter=delimiter, escapechar=escape, strict=True)
    mark = re.escape(delimiter)
    stray = re.compile(rf'(?:^|{mark})[^"{mark}\r\n][^{mark}\r\n"]*"', re.MULTILINE)  # a quote within an unquoted cell
    number, width, torn = 0, 0, False
    while True:
        number += 1
        taken.clear()
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "field limit" in str(error):
                what = f"a cell of row {number} is too long (a double quote that is never closed?)"
                raise over_limit(what, "max_cell_chars", max_chars) from None
            if "end of data" in str(error):
                raise InputError(
                    f"row {number} opens a double quote that is never closed; close it, or delete it", code="invalid_csv"
                ) from None
            if "expected after" not in str(error):
                raise InputError(
                    f"row {number} cannot be read: {error}; save the file as CSV again", code="invalid_csv"
                ) from None
            torn = True
            yield _torn(number, taken, delimiter, max_chars)
            continue
        torn = torn and (len(record) != width or stray.search("".join(taken)) is not None)
        width = width if torn else len(record)
        yield _torn(number, taken, delimiter, max_chars) if torn else record


def _torn(number: int, lines: list[str], delimiter: str, max_chars: int) -> Torn:
    """A row with wrong quotes, cut into cells as well as they allow."""
    try:
        cells = next(csv.reader(lines, delimiter=delimiter), [])
    except csv.Error:
        raise over_limit(f"a cell of row {number} is too long", "max_cell_chars", max_chars) from None
    problem = Problem(number, None, "bad_quotes", _BAD_QUOTES, shorten("".join(lines).strip()), "bad_quotes")
    return Torn(cells, problem)


def _value(cell: str, number: int, limits: Limits) -> str | None:
    if len(cell) > limits.max_cell_chars:
        raise too_long(number, cell, limits)
    if cell[0] == "'" and cell.startswith(_GUARDED):
        return trimmed(cell[1:]) or None
    text = cell.strip() if cell.isascii() else trimmed(cell)
    if text[:1] == "=" and (found := _TEXT_FORMULA.fullmatch(text)):  # how programs keep Excel from reading a number
        text = trimmed(found[1].replace('""', '"'))
    return text or None


def _score(lines: list[str], delimiter: str, wanted: frozenset[str]) -> tuple[int, int, int]:
    """How well a delimiter fits the first lines: expected names, rows of the commonest width, that width."""
    try:
        records: list[Any] = [record for record in csv.reader(lines, delimiter=delimiter) if any(record)]
    except csv.Error:
        return (0, 0, 0)
    widths = [len(record) for record in records if len(record) > 1]
    usual = max(widths, key=widths.count, default=1)
    return (max((matches(record, wanted) for record in records), default=0), widths.count(usual), usual)


def _is_one_column(lines: list[str], delimiter: str) -> bool:
    """Whether the delimiter is only punctuation within the texts of a single column, for a worker that knows no names.

    Raises :class:`InputError` ``no_header`` if the first row may as well be a title over a table.
    """
    try:
        records = list(csv.reader(lines, delimiter=delimiter))[:HEADER_ROWS]
    except csv.Error:
        return False
    first = next((at for at, record in enumerate(records) if any(record)), len(records))
    rest = [record for record in records[first + 1 :] if any(record)]
    if first == len(records) or len(records[first]) > 1 or all(len(record) < 2 for record in rest):
        return False
    if all(cell[:1] == " " for record in rest for cell in record[1:]):
        return True
    if not any(records[first + 1]) or _is_header(rest[0], rest[1:]):
        return False  # a title over a table
    raise InputError(
        f"row {first + 1} has one cell and others have several: it may be the header of a single column, or a title. Put"
        f" texts that contain {delimiter!r} in double quotes, or delete the title",
        code="no_header",
    )


def _is_header(names: list[str], rows: list[list[str]]) -> bool:
    """Whether a row names columns: texts over figures."""
    return len(names) > 1 and any(
        not FIGURES.fullmatch(name) and any(values) and all(map(FIGURES.fullmatch, values))
        for at, name in enumerate(names)
        if (values := [row[at] for row in rows if at < len(row)])
    )
