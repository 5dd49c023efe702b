"""Rows of a sheet of any format: finds the header row and maps the cells below it to headers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final, NamedTuple

from asynctask.errors import InputError, Problem
from asynctask.lists.readers.base import Limits, OpenOptions, RawRow, Source, column_letters, normalise, over_limit, shorten

Cells = Callable[[], Iterator[tuple[int, list[Any]]]]
"""Iterates over the non-empty rows: their numbers, and their cells from column A on, empty ones None."""


class Torn(list[Any]):
    """The cells of a row that cannot be cut into cells with certainty; ``problem`` says why."""

    def __init__(self, cells: Sequence[Any], problem: Problem) -> None:
        super().__init__(cells)
        self.problem = problem


class Table(NamedTuple):
    """A sheet before its header is found: cells, its name, the number of non-empty rows (None if unknown), and what closes
    its workbook. A text has a ``delimiter`` and an ``encoding``."""

    cells: Cells
    sheet_name: str | None = None
    filled: int | None = None
    close: Callable[[], None] = lambda: None
    delimiter: str | None = None
    encoding: str | None = None


class TableSource(Source):
    """A sheet, its header found.

    Arguments: ``name``, the format; the table, which is closed after an error. A row may have more cells than the header;
    in a text, which has a ``delimiter``, that is a problem, for a stray one has shifted the cells.
    Raises :class:`InputError`: ``no_header``, ``duplicate_column``, ``too_large``.
    """

    def __init__(self, name: str, table: Table, options: OpenOptions) -> None:
        self.format, self.sheet_name, self.delimiter = name, table.sheet_name, table.delimiter
        self._cells: Cells | None = table.cells
        self._limits, self._close = options.limits, table.close
        try:
            first = list(islice(table.cells(), HEADER_ROWS if options.header is None else options.header))
            self._header = find_header(first, options.expect, options.limits, options.header)
            self.headers, self.places = self._header.headers, self._header.places
            if table.filled is not None:
                self.planned = table.filled - sum(number <= self._header.number for number, _ in first)
                if self.planned > self._limits.max_rows:
                    raise over_limit(f"the sheet has {self.planned:,} rows", "max_rows", self._limits.max_rows)
        except BaseException as error:
            if isinstance(error, InputError) and table.sheet_name is not None:
                error.params["sheet"] = table.sheet_name  # names the sheet that was chosen
            table.close()
            raise

    def rows(self, after: int = 0) -> Iterator[RawRow]:
        """See :meth:`Source.rows`."""
        if self._cells is None:
            raise ValueError("the source is closed")
        header, most, count = self._header, self._limits.max_rows, 0
        for number, cells in self._cells():
            if number <= header.number:
                continue
            row = header.row(number, cells, extra_is_problem=self.delimiter is not None)
            if row is None:
                continue
            if type(cells) is Torn:
                row = replace(row, problems=(cells.problem,))
            count += 1
            if count > most:
                raise over_limit("the list has more rows", "max_rows", most)
            if number > after:
                yield row

    def close(self) -> None:
        """See :meth:`Source.close`."""
        self._cells = None
        self._close()


# -- header row

HEADER_ROWS: Final = 20
_SHOWN: Final = 20
FIGURES: Final = re.compile(r"[\d\s.,:/+%-]*")
"""A number or a date: in CSV every cell is text, and a row of figures is no header."""


class Header:
    """The header row.

    ``number``: its row. ``names[i]``: the name of column ``i`` of the cells, None if blank. ``headers``: the names without
    blank ones; ``places``: their columns in the sheet, 0 is A.
    """

    __slots__ = ("_spare", "headers", "names", "number", "places")

    def __init__(self, number: int, names: Sequence[str | None]) -> None:
        self.number = number
        self.names = tuple(names)
        self.headers = tuple(name for name in names if name is not None)
        self.places = tuple(index for index, name in enumerate(names) if name is not None)
        self._spare: dict[int, str] = {}

    def row(self, number: int, cells: Sequence[Any], *, extra_is_problem: bool) -> RawRow | None:
        """A row of cells by header; None if all are empty.

        A cell without a header is kept as "Column C", for instance; beyond the last header and with ``extra_is_problem``
        it is a problem of the row.
        """
        names, width = self.names, len(self.names)
        if len(cells) <= width == len(self.headers):
            if cells.count(None) == len(cells):
                return None
            return RawRow(number, dict(zip(names, (*cells, *(None,) * (width - len(cells))), strict=True)))
        values: dict[str, Any] = dict.fromkeys(self.headers)
        extra = None
        filled = [index for index, cell in enumerate(cells) if cell is not None]
        for index in filled:
            cell = cells[index]
            name = names[index] if index < width else None
            if name is not None:
                values[name] = cell
            else:
                values[self._spare_name(index)] = cell
                if index >= width and extra_is_problem:
                    extra = index
        if not filled:
            return None
        return RawRow(number, values, () if extra is None else (self._too_many(number, extra, cells[extra]),))

    def _spare_name(self, index: int) -> str:
        name = self._spare.get(index)
        if name is None:
            name = f"Column {column_letters(index)}"
            while name in self.names:
                name += "*"
            self._spare[index] = name
        return name

    def _too_many(self, number: int, last: int, cell: Any) -> Problem:
        text = (
            f"the row has cells up to column {last + 1}, the header has {len(self.names)};"
            " put text that contains the delimiter in double quotes"
        )
        return Problem(number, None, "too_many_cells", text, shorten(str(cell)))


def find_header(
    rows: Sequence[tuple[int, Sequence[Any]]], expect: frozenset[str], limits: Limits, number: int | None = None
) -> Header:
    """The header among the first rows of a sheet.

    Arguments: ``rows``, about the first :data:`HEADER_ROWS` rows with their numbers, text cells stripped and empty ones
    None; ``expect``, the names known to the worker; ``number``, the row of the header if its sender names it.

    The header is the first of the rows with most expected names; without expected names, the first row with two or more
    texts (one, in a sheet of one column). Raises :class:`InputError` ``no_header`` if there is none,
    ``duplicate_column`` for a name over two columns, :class:`TooLarge` for too many columns.
    """
    if number is not None:
        chosen = next((row for row in rows if row[0] == number), None)
        if chosen is None:
            raise refused_header(number)
    else:
        chosen = _most_expected(rows, expect) if expect else _first_texts(rows)
    if chosen is None:
        raise _no_header(rows, expect)
    number, cells = chosen
    if type(cells) is Torn:
        raise InputError(f"row {number}, the header: {cells.problem.message}", code="invalid_csv")
    last = max(i for i, cell in enumerate(cells) if cell is not None)
    if last >= limits.max_columns:
        raise over_limit(f"the header in row {number} has {last + 1:,} columns", "max_columns", limits.max_columns)
    names = tuple(None if cell is None else " ".join(str(cell).split()) for cell in cells[: last + 1])
    _refuse_duplicates(number, names)
    return Header(number, names)


def refused_header(number: int) -> InputError:
    """The error for a row that cannot be the header, because it is empty or does not exist."""
    return InputError(
        f"row {number} (header_row) has no cells, so it is not the header; give the number of the row with the names of the"
        " columns",
        code="empty_header",
    )


def matches(cells: Sequence[Any], expect: frozenset[str]) -> int:
    """How many of the expected (normalised) names these cells contain."""
    return len(expect.intersection(normalise(cell) for cell in cells if isinstance(cell, str)))


def _most_expected(rows: Sequence[tuple[int, Sequence[Any]]], expect: frozenset[str]) -> tuple[int, Sequence[Any]] | None:
    wanted = frozenset(map(normalise, expect))
    scored = [(matches(row[1], wanted), row) for row in rows[:HEADER_ROWS]]
    best = max((score for score, _ in scored), default=0)
    return next((row for score, row in scored if score == best), None) if best else None


def _first_texts(rows: Sequence[tuple[int, Sequence[Any]]]) -> tuple[int, Sequence[Any]] | None:
    used = {i for _, cells in rows for i, cell in enumerate(cells) if cell is not None}
    least = 1 if len(used) == 1 else 2
    for row in rows[:HEADER_ROWS]:
        filled = [cell for cell in row[1] if cell is not None]
        texts = [normalise(cell) for cell in filled if isinstance(cell, str) and not FIGURES.fullmatch(cell)]
        if len(texts) >= least and len(texts) * 2 > len(filled) and len(set(texts)) * 2 > len(texts):
            return row
    return None


def _no_header(rows: Sequence[tuple[int, Sequence[Any]]], expect: frozenset[str]) -> InputError:
    first = next(((n, cells) for n, cells in rows if any(cell is not None for cell in cells)), None)
    found = "the sheet is empty"
    if first is not None:
        shown = [shorten(str(cell), 40) for cell in first[1] if cell is not None]
        found = f"row {first[0]} has: {', '.join(shown[:_SHOWN])}{', …' if len(shown) > _SHOWN else ''}"
    wanted = ", ".join(sorted(expect)[:_SHOWN]) + (", …" if len(expect) > _SHOWN else "")
    reason = f"none of these columns is in the first {HEADER_ROWS} rows: {wanted}" if expect else "no row looks like one"
    return InputError(
        f"the sheet has no header: {reason}; {found}. Put one row with the names of the columns over the data",
        code="no_header",
        params={"found": found},
    )


def _refuse_duplicates(number: int, names: Sequence[str | None]) -> None:
    seen: dict[str, int] = {}
    problems = []
    for index, name in enumerate(names):
        if name is None:
            continue
        first = seen.setdefault(normalise(name), index)
        if first != index:
            where = f"columns {column_letters(first)} and {column_letters(index)}"
            text = f"{shorten(name, 80)!r} stands over {where}; rename or delete one of them"
            problems.append(Problem(number, name, "duplicate_column", text, shorten(name)))
    if problems:
        raise InputError(
            "the header has a name twice: " + "; ".join(p.message for p in problems[:5]),
            code="duplicate_column",
            errors=problems,
        )
