"""A look at a list before it is submitted: its sheets, its header, its columns with sample cells, the workers they fit.

Only the beginning of the list is read. Nothing is validated and nothing is written: see :mod:`asynctask.lists.dry_run`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, NamedTuple

from asynctask.errors import InputError
from asynctask.ledger.queries import ReadList
from asynctask.lists.items import ItemShape
from asynctask.lists.problems import refused_list, render_whole
from asynctask.lists.readers import Limits
from asynctask.lists.readers.base import column_letters, normalise, report_block, shorten
from asynctask.lists.readers.opening import Head
from asynctask.lists.readers.table import HEADER_ROWS, Header, find_header, matches
from asynctask.lists.uploads import ListFile
from asynctask.lists.written_cells import jsonable
from asynctask.worker import Worker

_SAMPLES: Final = 3
_SAMPLE_CHARS: Final = 80
_ROW_CELLS: Final = 8
"""Cells that are shown of a row that may be the header."""
_SEARCHED_SHEETS: Final = 10
_COMPARED: Final = 200
"""Headers for which similar fields are looked for, and fields of one worker; their product is the work."""
_ALIKE: Final = 0.6
"""The least likeness of a header and a field that is proposed for it: the share of pairs of letters in common."""
_WITHIN: Final = 0.8
"""The likeness of a name that is among the words of the other, or short for it alone."""
_SHORT: Final = (3, 5)
"""Letters of a name that may be short for another."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a list: its header, its place in the sheet (``C``, empty for JSON), and its first different cells as
    text."""

    header: str
    letters: str
    samples: list[str]


@dataclass(frozen=True, slots=True)
class Fit:
    """How the columns of a list fit a worker.

    ``fields``: of an item, as of :meth:`~asynctask.worker.Worker.as_dict`; empty for a worker that takes any columns.
    ``matched``: header -> field, for headers that are names of fields. ``columns``: a proposal for the option ``columns``,
    from the Task ``remembered``, or of similar names if that is None. ``missing``: required fields that no column has, with
    the proposal.
    """

    worker: str
    doc: str
    fields: list[dict[str, Any]]
    matched: dict[str, str]
    columns: dict[str, str]
    remembered: int | None
    missing: list[str]

    @property
    def rank(self) -> tuple[bool, float, int]:
        """The larger, the better the columns fit: a list of these columns was submitted to the worker before, the share of
        the required fields that have a column by name, and the columns with a field."""
        required = [each["name"] for each in self.fields if each["required"]]
        named = set(self.matched.values()) | (set(self.columns.values()) if self.remembered else set())
        share = sum(name in named for name in required) / len(required) if required else float(bool(named))
        return self.remembered is not None, share, len(named)


@dataclass(frozen=True, slots=True)
class Preview:
    """What the beginning of a list shows.

    ``sheet`` is one of ``sheets``, None for a file without sheets; ``encoding`` is that of a text. ``header_row``: None for
    JSON; ``first_rows``: the rows that may be the header. ``error``: why the row cannot be the header. ``workers``: best
    first; ``suggested``: the first, if it fits and no other fits as well.
    """

    format: str
    sheets: list[str]
    sheet: str | None
    encoding: str | None
    header_row: int | None
    first_rows: list[dict[str, Any]]
    columns: list[Column] = field(default_factory=list)
    error: InputError | None = None
    workers: list[Fit] = field(default_factory=list)
    suggested: str | None = None

    def as_dict(self, locale: str = "en") -> dict[str, Any]:
        """JSON-ready, with the message of ``error`` in a language."""
        error = None if self.error is None else {"code": self.error.code, "message": render_whole(self.error, locale)}
        return {**asdict(replace(self, error=None)), "error": error}


def preview(
    file: ListFile,
    limits: Limits,
    workers: Sequence[Worker],
    before: Sequence[ReadList],
    *,
    sheet: str | None = None,
    header_row: int | None = None,
    columns: Collection[str] = (),
    search: bool = True,
) -> Preview:
    """Looks at the beginning of a list.

    Arguments: ``workers``, those that take lists; ``before``, how lists were read before, newest first; ``sheet`` of a
    workbook, None to find it: if ``search``, the one with most known columns, else the first with several; ``header_row``,
    None to find it; ``columns``, headers that are known beside those of the workers and of the lists before.
    Raises :class:`InputError` for a file or a sheet that cannot be read.
    """
    expect = _names(workers, before) | frozenset(columns)
    sheets = file.sheets()
    head = file.head(sheet, expect)
    if sheet is None and search and len(sheets) > 1:
        head = _best_sheet(file, head, sheets, expect)
    if not head.is_table:
        return _of_json(head, workers)
    header, error = _header(head, expect, limits, header_row)
    found = [] if error is not None else _columns(head, header)
    number = header.number if header_row is None else header_row
    encoding = head.encoding and head.encoding.removesuffix("-sig")
    fits = [] if error is not None else _fits(workers, [each.header for each in found], before)
    return Preview(
        head.format, sheets, head.sheet, encoding, number, _first_rows(head, number), found,
        error, fits, _suggested(fits),
    )  # fmt: skip


def _names(workers: Iterable[Worker], before: Iterable[ReadList]) -> frozenset[str]:
    """All names that a header may have."""
    shapes = [each.shape for each in workers if isinstance(each.shape, ItemShape)]
    return frozenset().union(*(shape.expected for shape in shapes), *(each.columns for each in before))


def _best_sheet(file: ListFile, first: Head, sheets: Sequence[str], expect: Collection[str]) -> Head:
    best, most = first, _likeness(first, expect)
    for name in sheets[:_SEARCHED_SHEETS]:
        if name == first.sheet:
            continue
        try:
            head = file.head(name, expect)
        except InputError:  # an empty one, for example
            continue
        if (found := _likeness(head, expect)) > most:
            best, most = head, found
    return best


def _likeness(head: Head, expect: Collection[str]) -> tuple[int, bool]:
    """How many names of the likeliest row are expected; where none is, whether there are several columns, which a cover
    sheet rarely has."""
    wanted = frozenset(map(normalise, expect))
    rows = [cells for _, cells in head.rows[:HEADER_ROWS]]
    most = max((matches(cells, wanted) for cells in rows), default=0)
    return most, most == 0 and any(sum(cell is not None for cell in cells) > 1 for cells in rows)


def _header(head: Head, expect: frozenset[str], limits: Limits, number: int | None) -> tuple[Header, InputError | None]:
    """The header, and why it cannot be one; without a likely row, the first one. Raises :class:`InputError` for a list
    without rows."""
    if not head.rows:
        raise refused_list("list.no_items", {})
    first = Header(head.rows[0][0], ())
    tries: list[tuple[frozenset[str], int | None]] = [(expect, number)]
    if number is None:
        tries += [(frozenset(), None), (expect, first.number)]
    error: InputError | None = None
    for names, row in tries:
        try:
            return find_header(head.rows, names, limits, row), None
        except InputError as found:
            error = found
            if found.code != "no_header":
                break
    assert error is not None
    faulty = error.errors[0].row if error.errors else None
    return Header(faulty or first.number, ()), error


def _columns(head: Head, header: Header) -> list[Column]:
    below = [cells for number, cells in head.rows if number > header.number]
    old = report_block(header.headers)
    return [
        Column(name, column_letters(place), _samples(cells[place] for cells in below if place < len(cells)))
        for name, place in zip(header.headers, header.places, strict=True)
        if name not in old
    ]


def _samples(cells: Iterable[Any]) -> list[str]:
    shown: list[str] = []
    for cell in cells:
        if cell is not None and len(shown) < _SAMPLES and (text := _shown(cell)) not in shown:
            shown.append(text)
    return shown


def _shown(cell: Any) -> str:
    found = jsonable(cell)
    return str(shorten(found if isinstance(found, str) else str(found), _SAMPLE_CHARS))


def _first_rows(head: Head, header: int) -> list[dict[str, Any]]:
    return [
        {"row": number, "cells": [_shown(cell) for cell in cells if cell is not None][:_ROW_CELLS]}
        for at, (number, cells) in enumerate(head.rows)
        if at < HEADER_ROWS or number == header
    ]


def _of_json(head: Head, workers: Sequence[Worker]) -> Preview:
    items = [item for _, item in head.rows if isinstance(item, Mapping)]
    names = dict.fromkeys(str(name) for item in items for name in item)
    columns = [Column(name, "", _samples(item.get(name) for item in items)) for name in list(names)[:_COMPARED]]
    fits = [replace(each, columns={}) for each in _fits(workers, list(names), ())]
    return Preview(head.format, [], None, head.encoding, None, [], columns, workers=fits, suggested=_suggested(fits))


# -- which workers the columns fit


def _fits(workers: Sequence[Worker], headers: Sequence[str], before: Sequence[ReadList]) -> list[Fit]:
    fits = [_fit(worker, headers, before) for worker in workers]
    return sorted(fits, key=lambda fit: fit.rank, reverse=True)


def _fit(worker: Worker, headers: Sequence[str], before: Sequence[ReadList]) -> Fit:
    shape = worker.shape if isinstance(worker.shape, ItemShape) else ItemShape(None)
    matched = shape.by_name(headers)
    known = _remembered(worker.name, shape, headers, before)
    columns = _similar(shape.names(), headers, matched) if known is None else known[1]
    used = {columns.get(header, matched.get(header)) for header in headers}
    missing = [name for name in shape.required if name not in used]
    described = worker.as_dict()["fields"]
    return Fit(worker.name, worker.doc or "", described, matched, columns, None if known is None else known[0], missing)


def _remembered(
    worker: str, shape: ItemShape, headers: Sequence[str], before: Sequence[ReadList]
) -> tuple[int, dict[str, str]] | None:
    """The last Task of the worker whose list had these columns, with its mapping; None if it had none."""
    present = {normalise(header): header for header in headers}
    for each in before:
        had = set(map(normalise, each.headers or each.columns))
        mapped = {present.get(normalise(header)): name for header, name in each.columns.items()}
        # The columns of a short list are not kept: of one without a mapping it is unknown which they were.
        if each.worker != worker or not had or None in mapped or (each.headers and not present.keys() <= had):
            continue
        if not mapped:
            return None
        if shape.model is None or all(name in shape.field_names for name in mapped.values() if name):
            return each.task_id, {header: name for header, name in mapped.items() if header is not None}
    return None


def _similar(names: Mapping[str, Sequence[str]], headers: Sequence[str], matched: Mapping[str, str]) -> dict[str, str]:
    """Header -> field, for fields without a column and the headers most similar to one of their names."""
    free = {each: [_Spelling.of(name) for name in names[each]] for each in names if each not in matched.values()}
    spelled = {header: _Spelling.of(header) for header in headers[:_COMPARED] if header not in matched}
    short = _short_for(spelled, free)
    scores = [
        (max(_WITHIN if short.get(header) == each else 0, *map(found.likeness, free[each])), header, each)
        for each in list(free)[:_COMPARED]
        for header, found in spelled.items()
    ]
    proposed: dict[str, str] = {}
    for score, header, name in sorted(scores, key=lambda each: -each[0]):
        if score >= _ALIKE and header not in proposed and name not in proposed.values():
            proposed[header] = name
    return proposed


def _short_for(spelled: Mapping[str, _Spelling], free: Mapping[str, Sequence[_Spelling]]) -> dict[str, str]:
    """Header -> field, where the header is short for the names of this field alone, and no other header is."""
    found = [(h, each) for h, said in spelled.items() for each, names in free.items() if any(map(said.shortens, names))]
    headers, fields = Counter(header for header, _ in found), Counter(each for _, each in found)
    return {header: each for header, each in found if headers[header] == fields[each] == 1}


class _Spelling(NamedTuple):
    """A name for comparison: its words, its letters without what stands between words, and their adjacent pairs."""

    words: frozenset[str]
    letters: str
    pairs: frozenset[str]

    @classmethod
    def of(cls, name: str) -> _Spelling:
        words = re.findall(r"[^\W_]+", normalise(name)[:_SAMPLE_CHARS])
        text = f" {''.join(words)} "
        return cls(frozenset(words), text[1:-1], frozenset(text[at : at + 2] for at in range(len(text) - 1)))

    def likeness(self, other: _Spelling) -> float:
        """From 0 to 1. A name that is among the words of the other is nearly the same: `SKU no.` and `sku`."""
        shared = 2 * len(self.pairs & other.pairs) / (len(self.pairs) + len(other.pairs))
        few, many = sorted((self.words, other.words), key=len)
        return max(shared, _WITHIN) if few and few <= many else shared

    def shortens(self, other: _Spelling) -> bool:
        """Whether it is the beginning of the other or, as `Qty` of `quantity`, its first, some and its last letter."""
        own, rest = self.letters, iter(other.letters)
        if not _SHORT[0] <= len(own) <= _SHORT[1] or own[0] != other.letters[:1]:
            return False
        return other.letters.startswith(own) or (own[-1] == other.letters[-1] and all(each in rest for each in own))


def _suggested(fits: Sequence[Fit]) -> str | None:
    if not fits:
        return None
    if len(fits) == 1:
        return fits[0].worker
    remembered, share, count = fits[0].rank
    if fits[0].rank == fits[1].rank or not count or not (remembered or share >= 0.5):
        return None
    return fits[0].worker
