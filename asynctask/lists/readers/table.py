"""Rows of any sheet: what is the same for every format once its cells can be gone through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple, Self

from asynctask.errors import InputError
from asynctask.lists.readers.base import OpenOptions, RawRow, over_limit
from asynctask.lists.readers.headers import HEADER_ROWS, find_header

__all__ = ["Cells", "Table", "TableSource", "sheet_source"]

Cells = Callable[[], Iterator[tuple[int, list[Any]]]]
"""Goes through the rows that are not empty: their numbers, and their cells from column A on, empty ones None."""


class Table(NamedTuple):
    """A sheet as it lies there: its cells, its name, how many rows are not empty, and what lets go of its workbook."""

    cells: Cells
    sheet_name: str
    filled: int | None
    close: Callable[[], None]


class TableSource:
    """A sheet; see :class:`~asynctask.lists.readers.base.Source`.

    Arguments: ``name``, the format; ``cells``; ``options``; ``sheet_name``; ``filled``, how many rows are not empty, titles
    and header included, None where that is not known; ``close``, what lets go of the file. A row may have more cells than
    the header, but for text (``extra_is_problem``), where a stray delimiter has shifted them.
    Raises :class:`InputError`: ``no_header``, ``duplicate_column``, ``too_large``.
    """

    def __init__(
        self,
        name: str,
        cells: Cells,
        options: OpenOptions,
        *,
        sheet_name: str | None = None,
        filled: int | None = None,
        extra_is_problem: bool = False,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.format, self.sheet_name = name, sheet_name
        self._cells: Cells | None = cells
        self._limits, self._extra_is_problem, self._close = options.limits, extra_is_problem, close
        first = list(islice(cells(), HEADER_ROWS))
        self._header = find_header(first, options.expect, options.limits)
        self.headers: tuple[str, ...] | None = self._header.headers
        self.places: tuple[int, ...] | None = self._header.places
        self.planned: int | None = None
        if filled is not None:
            self.planned = filled - sum(number <= self._header.number for number, _ in first)
            if self.planned > self._limits.max_rows:
                raise over_limit(f"the sheet has {self.planned:,} rows", "max_rows", self._limits.max_rows)

    def rows(self, after: int = 0) -> Iterator[RawRow]:
        """See :meth:`Source.rows`."""
        if self._cells is None:
            raise ValueError("the source is closed")
        header, most, count = self._header, self._limits.max_rows, 0
        for number, cells in self._cells():
            if number <= header.number:
                continue
            row = header.row(number, cells, extra_is_problem=self._extra_is_problem)
            if row is None:
                continue
            count += 1
            if count > most:
                raise over_limit("the list has more rows", "max_rows", most)
            if number > after:
                yield row

    def close(self) -> None:
        """See :meth:`Source.close`."""
        self._cells = None
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def sheet_source(name: str, table: Table, options: OpenOptions) -> TableSource:
    """A sheet of a workbook, with its header found."""
    try:
        return TableSource(name, table.cells, options, sheet_name=table.sheet_name, filled=table.filled, close=table.close)
    except InputError as error:
        error.params["sheet"] = table.sheet_name  # nobody could tell otherwise which one was looked at
        table.close()
        raise
    except BaseException:
        table.close()
        raise
