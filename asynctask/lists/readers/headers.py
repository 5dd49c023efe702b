"""Finding the header row, and turning the rows under it into header -> cell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from asynctask.errors import InputError, Problem
from asynctask.lists.readers.base import Limits, RawRow, column_letters, normalise, over_limit, shorten

__all__ = ["HEADER_ROWS", "Header", "clean_text", "find_header", "matches"]

HEADER_ROWS: Final = 20
_SHOWN: Final = 20
_FIGURES: Final = re.compile(r"[\d\s.,:/+%-]*")
"""A number or a date: in CSV everything is text, and a row of figures is no header there either."""


def clean_text(text: str) -> str | None:
    """A text cell as it is handed on: stripped, None when nothing is left."""
    return text.strip() or None


class Header:
    """The header row.

    ``number``: its row. ``names[i]``: the name of column ``i`` of the cells, None for a column without one. ``headers``:
    the names without the blank ones; ``places``: the column of the sheet that each of them stands over, 0 is A.
    ``offset``: how many columns of the sheet lie left of the first cell.
    """

    __slots__ = ("_offset", "_spare", "headers", "names", "number", "places")

    def __init__(self, number: int, names: Sequence[str | None], offset: int = 0) -> None:
        self.number = number
        self.names = tuple(names)
        self.headers = tuple(name for name in names if name is not None)
        self.places = tuple(index + offset for index, name in enumerate(names) if name is not None)
        self._offset = offset
        self._spare: dict[int, str] = {}

    def row(self, number: int, cells: Sequence[Any], *, extra_is_problem: bool) -> RawRow | None:
        """A row of cells by header; None when all are empty.

        A cell in a column without a name is kept as "Column C", one beyond the last column too; with
        ``extra_is_problem`` that is a problem of the row as well: a stray delimiter has shifted the cells.
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
            name = f"Column {column_letters(index + self._offset)}"
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
    rows: Sequence[tuple[int, Sequence[Any]]], expect: frozenset[str], limits: Limits, *, offset: int = 0
) -> Header:
    """The header among the first rows of a sheet.

    Arguments: ``rows``, the first :data:`HEADER_ROWS` rows or so with their numbers, text cells stripped and empty
    ones None; ``expect``, the names that the worker knows; ``offset``, see :class:`Header`.

    With expected names, the row that has most of them is the header, the first one of equals. Without, it is the first
    row with two texts or more (one, in a sheet of one column). Raises :class:`InputError` ``no_header`` when there is
    none, ``duplicate_column`` when a name stands over two columns, :class:`TooLarge` for too many columns.
    """
    chosen = _most_expected(rows, expect) if expect else _first_texts(rows)
    if chosen is None:
        raise _no_header(rows, expect)
    number, cells = chosen
    last = max(i for i, cell in enumerate(cells) if cell is not None)
    if last >= limits.max_columns:
        raise over_limit(f"the header in row {number} has {last + 1:,} columns", "max_columns", limits.max_columns)
    names = tuple(None if cell is None else " ".join(str(cell).split()) for cell in cells[: last + 1])
    _refuse_duplicates(number, names, offset)
    return Header(number, names, offset)


def matches(cells: Sequence[Any], expect: frozenset[str]) -> int:
    """How many different expected names (normalised ones) stand in these cells."""
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
        texts = [normalise(cell) for cell in filled if isinstance(cell, str) and not _FIGURES.fullmatch(cell)]
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
    looked = f"none of these columns is in the first {HEADER_ROWS} rows: {wanted}" if expect else "no row looks like one"
    return InputError(
        f"the sheet has no header: {looked}; {found}. Put one row with the names of the columns over the data",
        code="no_header",
        params={"found": found},
    )


def _refuse_duplicates(number: int, names: Sequence[str | None], offset: int) -> None:
    seen: dict[str, int] = {}
    problems = []
    for index, name in enumerate(names):
        if name is None:
            continue
        first = seen.setdefault(normalise(name), index)
        if first != index:
            where = f"columns {column_letters(first + offset)} and {column_letters(index + offset)}"
            text = f"{shorten(name, 80)!r} stands over {where}; rename or delete one of them"
            problems.append(Problem(number, name, "duplicate_column", text, shorten(name)))
    if problems:
        raise InputError(
            "the header has a name twice: " + "; ".join(p.message for p in problems[:5]),
            code="duplicate_column",
            errors=problems,
        )
