"""Opens a stored list and validates its rows against the worker's model and the options of the submission."""

from __future__ import annotations

import hashlib
import math
import struct
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final, Self

import orjson

from asynctask.errors import InputError, Problem, TooLarge
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, NewItem, chunks, dumps, loads
from asynctask.ledger.corrections import find_corrected, originals, row_problem
from asynctask.lists.coerce import BETWEEN, COMMA, POINT, Notation, Unclear, coercer_for, flags_of, plain_notation
from asynctask.lists.items import Binding, ItemShape, MixedShape, Rejected, listed
from asynctask.lists.problems import (
    MAX_ROWS,
    fault,
    refused_list,
    refused_with,
    revived,
    rows_rejected,
    say,
)
from asynctask.lists.readers import Limits, RawRow, Source
from asynctask.lists.readers.base import normalise, row_number_header, shorten
from asynctask.lists.readers.table import HEADER_ROWS
from asynctask.lists.uploads import ITEMS, ListFile, Uploads, list_file
from asynctask.lists.written_cells import jsonable
from asynctask.messages import is_storable


@dataclass(frozen=True, slots=True)
class ListSource:
    """How a list is read. It is kept with its Task as JSON, so that any process can split the list.

    ``sheet``: of a workbook; ``header_row``: the row of the header, None to find it; ``columns``: header -> field, empty
    for a column that is not used; ``encoding``: a codec, None to detect it; ``unique``: fields in
    which no two rows may be the same; ``strict``: one rejected row refuses the list; ``name``: of the file in ``data_dir``;
    ``filename``: the name it was sent under; ``items``: JSON items, stored only until they are split; ``key``: the field
    whose equal values run one after the other; ``resubmit_of``: the Task whose rows it corrects; ``masked``: the names of
    the columns with secrets, normalised.
    """

    sheet: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    encoding: str | None = None
    unique: tuple[str, ...] = ()
    strict: bool = False
    name: str = ""
    filename: str = ""
    items: bool = False
    key: str | None = None
    resubmit_of: int | None = None
    masked: tuple[str, ...] = ()
    header_row: int | None = None

    @classmethod
    def checked(
        cls,
        sheet: str | None = None,
        columns: Mapping[str, str] | None = None,
        encoding: str | None = None,
        header_row: int | None = None,
    ) -> Self:
        """What a sender says of a list. Raises :class:`InputError` for an unknown encoding, a text no database stores, or a
        row in which no header can be."""
        if header_row is not None and not 1 <= header_row <= MAX_HEADER_ROW:
            raise refused_option("header_row", "option.header_row", {"limit": MAX_HEADER_ROW}, header_row)
        said = [("sheet", sheet or ""), *(("columns", text) for pair in (columns or {}).items() for text in pair)]
        for name, text in said:
            if not is_storable(text):
                raise InputError(f"{name}: {text[:100]!r} holds a NUL or half a character (a lone surrogate): take it out")
        used = [field for field in (columns or {}).values() if field]
        if twice := sorted(field for field in set(used) if used.count(field) > 1):
            headers = ", ".join(repr(header[:80]) for header, field in (columns or {}).items() if field == twice[0])
            params = {"field": repr(twice[0][:80]), "headers": headers}
            raise refused_option("columns", "option.columns_twice", params, None)
        codec = None if encoding is None else encoding_option(encoding)
        return cls(sheet, dict(columns or {}), codec, header_row=header_row)

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Self:
        """What :meth:`as_json` made. Earlier versions kept no ``items``; there a file named so without options says it."""
        bare = kept.get("filename") == ITEMS and not any(map(kept.get, ("sheet", "columns", "encoding")))
        known = {name: kept[name] for name in cls.__dataclass_fields__ if kept.get(name) is not None}
        lists = {name: tuple(kept.get(name) or ()) for name in ("unique", "masked")}
        return cls(**{"items": bare, **known, **lists})

    def as_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {name: value for name, value in asdict(self).items() if value or name in _ALWAYS_KEPT}


_ALWAYS_KEPT: Final = ("name", "filename", "sheet", "columns", "items")
MAX_HEADER_ROW: Final = 1_000
_MAX_NAMES: Final = 1_000
_MAX_NAMES_CHARS: Final = 15_000
"""In the row of a Task, which is read often."""


class Names:
    """The columns of a list, gathered while it is split, so that its reports know them without reading it all first.

    Arguments: ``kind``, ``list`` for the columns of the sheet and ``items`` for the fields of the items; ``known``, what
    :meth:`as_json` gave for the rows before, None if that is unknown.
    """

    def __init__(self, kind: str, known: Mapping[str, Any] | None) -> None:
        self._kind = kind
        self._names: dict[str, None] | None = None if known is None else dict.fromkeys(known.get(kind, ()))
        self._json = known

    def add(self, row: Any) -> None:
        """Adds the names of a row; a row that is no object has one, ``value``."""
        if self._names is None or row is None:
            return
        names = row.keys() if isinstance(row, Mapping) else ("value",)
        if not self._names.keys() >= set(names):
            self._names.update(dict.fromkeys(names))
            if len(self._names) > _MAX_NAMES or sum(map(len, self._names)) > _MAX_NAMES_CHARS:
                self._names = None
            self._json = None if self._names is None else {self._kind: list(self._names)}

    def as_json(self) -> Mapping[str, Any] | None:
        """JSON-ready; None if the names are unknown, or too many to keep."""
        return self._json  # never changed, only replaced: slices are written in another thread


def remove_list(uploads: Uploads, kept: Mapping[str, Any]) -> bool:
    """Removes the stored file that a Task's source (as JSON) names. Returns whether it was there. Raises OSError."""
    return uploads.remove(ListSource.from_json(kept).name)


@dataclass(frozen=True, slots=True)
class OpenList:
    """A stored list, its columns bound to the worker's shape. ``planned`` as of a Source."""

    source: Source
    shape: ItemShape
    binding: Binding | None
    unique: tuple[str, ...]
    key: str | None
    resubmit_of: int | None = None

    @property
    def planned(self) -> int | None:
        return self.source.planned

    def checked(
        self, after: int = 0, names: Names | None = None, seen: Callable[[RawRow], None] | None = None
    ) -> Iterator[NewItem | Rejected]:
        """See :func:`checked`; ``names`` gets those of every row that is read, ``seen`` the row itself."""
        if self.binding is not None and self.source.headers is not None:
            refuse_absent(self.unique, self.source.headers, self.binding, self.shape)
            refuse_absent([self.key] if self.key else [], self.source.headers, self.binding, self.shape, "column.key")
        binding, header = self.binding, None
        if self.resubmit_of is not None:
            header = row_number_header(self.source.headers or (), binding.fields if binding else ())
            if header is None or binding is None:
                raise refused_list("list.no_row_column", {"task": self.resubmit_of})
            binding = replace(binding, ignored=binding.ignored | {header})

        def noted(after: int) -> Iterator[RawRow]:
            for raw in self.source.rows(after):
                if names is not None:
                    names.add(raw.values)
                if seen is not None:
                    seen(raw)
                yield raw

        rows = self.source.rows if names is None and seen is None else noted
        return checked(rows, self.shape, binding, self.unique, after, self.key, header)


@contextmanager
def open_list(
    uploads: Uploads,
    limits: Limits,
    source: ListSource,
    shape: ItemShape,
    alive: Callable[[], None] = lambda: None,
) -> Iterator[OpenList]:
    """Opens a stored list; ``alive`` as of :func:`~asynctask.lists.uploads.list_file`.

    Raises :class:`InputError` for a list that is refused as a whole.
    """
    path = uploads.find(source.name)
    small = path.stat().st_size <= SMALL_FILE

    def listed() -> ListFile:
        return list_file(path, source.filename, limits, encoding=source.encoding, alive=alive)

    def again() -> Iterator[RawRow]:  # a workbook gets a second child process, with limits of its own
        with listed() as other, other.open(source.sheet, shape.expected, header=source.header_row) as reread:
            yield from reread.rows()

    with ExitStack() as stack:
        file, sheet = stack.enter_context(listed()), None
        try:
            opened = stack.enter_context(file.open(source.sheet, shape.expected, header=source.header_row))
            sheet = opened.sheet_name
            notation = Notations(again, BETWEEN if opened.delimiter == "," else 0).of
            binding = shape.bind(opened.headers, notation) if opened.headers is not None else None
        except InputError as error:
            raise explained(error, error.params.get("sheet", sheet), file, shape, small=small) from None
        yield OpenList(opened, shape, binding, source.unique, source.key, source.resubmit_of)


class Notations:
    """How the columns of a list write numbers.

    A cell such as ``1,200`` has two readings, and only the other cells of its column tell which. The first such cell makes
    this read the list once, for all columns of numbers; a list without one is not read twice.

    Arguments: ``rows``, which reads the list again; ``known``, the flags that hold for every column.
    """

    def __init__(self, rows: Callable[[], Iterator[RawRow]], known: int) -> None:
        self._rows, self._known = rows, known
        self._headers: list[str] = []
        self._found: dict[str, int] | None = None

    def of(self, header: str) -> Notation:
        """The flags of a column, to be called once every column is asked for."""
        self._headers.append(header)
        return lambda: self._flags()[header]

    def _flags(self) -> Mapping[str, int]:
        if self._found is None:
            self._found = dict.fromkeys(self._headers, self._known)
            for row in self._rows():
                for header in self._headers:
                    cell = row.values.get(header)
                    if type(cell) is str and not (cell.isascii() and cell.isdecimal()):
                        self._found[header] |= flags_of(cell)
                if all(flags & POINT and flags & COMMA for flags in self._found.values()):
                    break
        return self._found


def checked(
    rows: Callable[[int], Iterator[RawRow]],
    shape: ItemShape,
    binding: Binding | None,
    unique: Sequence[str] = (),
    after: int = 0,
    key: str | None = None,
    numbers: str | None = None,
) -> Iterator[NewItem | Rejected]:
    """Validates the rows after ``after``; with ``unique``, also against the rows before them. Each needs a value of
    ``key``, or of the key of its own worker, and a row number in the column ``numbers``.

    ``rows(n)`` gives the rows after the n-th. With ``unique`` it is read from the first row, also where a split resumes in
    the middle: the values of rows up to ``after`` count as well.
    """
    compared = unique if key is None else (*unique, key)
    keyed = key is not None or isinstance(shape, MixedShape)
    twins = Twins(unique, shape, binding) if unique else None
    for raw in rows(after if twins is None else 0):
        outcome = shape.validate(raw, binding, compared)
        if keyed and isinstance(outcome, NewItem):
            outcome = _with_key(outcome, key, raw, shape, binding)
        if numbers is not None:
            outcome = _with_number(outcome, numbers, raw)
        if twins is not None and isinstance(outcome, NewItem):
            outcome = twins.refuse_second(raw, outcome)
        if raw.number > after:
            yield outcome


def _with_number(found: NewItem | Rejected, header: str, raw: RawRow) -> NewItem | Rejected:
    """A row of a corrected report with the number in the column ``header``, or refused without one."""
    cell = raw.values.get(header) if isinstance(raw.values, Mapping) else None
    if (number := _whole(cell)) is not None:
        return replace(found, number=number)
    shown = None if cell is None else shorten(jsonable(cell))
    text = "resubmit.no_number" if shown is None else "resubmit.bad_number"
    problem = fault(raw.number, header, "bad_row_number", text, {}, shown)
    if isinstance(found, Rejected):
        return replace(found, problems=(*found.problems, problem))
    return Rejected(raw.number, (problem,), jsonable(raw.values))


def _whole(cell: Any) -> int | None:
    """A row number, from 1; None for a cell that has none."""
    if isinstance(cell, str):
        text = cell.strip()
        cell = int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None
    elif isinstance(cell, float | Decimal) and 0 < cell < 2**53 and cell == int(cell):
        cell = int(cell)
    return cell if type(cell) is int and 0 < cell < 2**53 else None


def still_failed(ledger: Ledger, task_id: int, rows: Iterable[NewItem | Rejected]) -> Iterator[NewItem | Rejected]:
    """The rows of a corrected list as :func:`~asynctask.ledger.tasks.add_slice` would take them now; takes none of them.
    What it refuses has no number any more."""
    first: dict[int, int] = {}
    for batch in chunks(rows, _AT_ONCE):
        numbers = {row.number for row in batch if row.number is not None}
        with ledger.database.read() as connection:
            _, problems = find_corrected(connection, task_rows.get(connection, task_id), numbers)
        for row in batch:
            if row.number is None:
                yield row
                continue
            problem = problems.get(row.number)
            if first.setdefault(row.number, row.row) != row.row:
                params = {"number": row.number, "first": first[row.number]}
                problem = row_problem("duplicate_row", "resubmit.twice", params, row.number)
            if problem is None:
                yield row
            elif isinstance(row, Rejected):
                yield replace(row, problems=(*row.problems, revived(row.row, problem, "en")), number=None)
            else:
                values = row.values if isinstance(row.values, dict) else {"value": row.values}
                yield Rejected(row.row, (revived(row.row, problem, "en"),), values)


def restored(ledger: Ledger, task_id: int, rows: Iterable[NewItem | Rejected]) -> Iterator[NewItem | Rejected]:
    """The rows of a corrected list without a model, with the types of the values that were submitted first: in a cell,
    numbers, lists and objects may be text."""
    for batch in chunks(rows, _AT_ONCE):
        numbers = {row.number for row in batch if isinstance(row, NewItem) and row.number is not None}
        with ledger.database.read() as connection:
            places, _ = find_corrected(connection, task_rows.get(connection, task_id), numbers)
            before = originals(connection, set(places.values()))
        for row in batch:
            place = places.get(row.number) if row.number is not None else None
            yield row if isinstance(row, Rejected) or place not in before else _with_types(row, before[place])


def _with_types(row: NewItem, original: Any) -> NewItem:
    item = row.values
    if not isinstance(original, Mapping):  # any other JSON value is reported as an object of one member
        return replace(row, params=dumps(_typed(item.get("value"), original)))
    return replace(row, params=dumps({key: _typed(value, original.get(key)) for key, value in item.items()}))


def _typed(value: Any, original: Any) -> Any:
    """A cell as a value of the type that it had; unchanged if it is no such value."""
    if value is None or original is None or isinstance(original, str):
        return value
    # A report writes decimals with points; how the program that saved it since writes them is unknown.
    coerce = coercer_for(type(original), sheet=True, notation=plain_notation)
    try:
        found = value if coerce is None else coerce(value)
    except Unclear:
        return value
    return float(found) if isinstance(original, float) and isinstance(found, str) else found


_AT_ONCE: Final = 1_000

MAX_KEY: Final = 255
"""Largest number of characters of a key."""


def _with_key(row: NewItem, key: str | None, raw: RawRow, shape: ItemShape, binding: Binding | None) -> NewItem | Rejected:
    """An accepted row with its key, the field ``key`` or that of its own worker; refused without a value of it."""
    field = key or (shape.key_field(row) if isinstance(shape, MixedShape) else None)
    if field is None:
        return row
    value = (row.compared or {}).get(field)
    if (text := _key_text(value)) is not None:
        # Not dataclasses.replace(), which takes as long as all the rest.
        return NewItem(
            row.params, row.row, row.worker_name, row.options, f"{field}\0{text}", row.items, row.last_row, row.number,
            row.compared, row.search,
        )  # fmt: skip
    column = binding.headers.get(field, field) if binding else field
    absent = value is None or (isinstance(value, str) and not value.strip())
    why = ("missing", "key.missing") if absent else ("bad_key", "key.unfit")
    shown = None if absent else shorten(jsonable(value) if isinstance(value, str) else dumps(jsonable(value)))
    return shape.refused(raw, [fault(row.row, column, *why, {"limit": MAX_KEY}, shown)], binding)


def _key_text(value: Any) -> str | None:
    """The key in a value of an item: a text without blanks around it, or a number as text, so 7, 7.0 and "7" are one key.

    None for other values, and for a text that is empty or longer than :data:`MAX_KEY`.
    """
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if isinstance(value, str):
        text = value.strip()
    else:
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        text = str(value) if number else ""
    return text if 0 < len(text) <= MAX_KEY else None


def refused_option(option: str, text: str, params: Mapping[str, Any], value: Any) -> InputError:
    """The refusal of a value of an option; ``text`` and ``params`` as of :func:`fault`."""
    problem = fault(None, option, "invalid_option", text, params, value)
    return InputError(f"option {option!r}: {problem.message}", code="invalid_options", errors=[problem])


def encoding_option(name: str) -> str:
    """The codec named by the option ``encoding``. Raises :class:`InputError` that offers the nearest names."""
    from asynctask.lists.readers.encodings import encoding_names, known_encoding  # large tables, rarely needed

    try:
        return known_encoding(name)
    except InputError:
        params = {"name": repr(name[:40]), "names": encoding_names(name)}
        raise refused_option("encoding", "option.encoding", params, name[:200]) from None


def too_many_items(limit: int) -> InputError:
    """The error for a list of more than ``limit`` rows."""
    return refused_list("list.too_many_items", {"limit": limit}, code="too_many_rows", kind=TooLarge)


# -- refusals that name the columns and the other sheets

_SHEET_ERRORS: Final = frozenset({"no_header", "missing_columns", "unknown_column", "empty_sheet"})
_NAMED_SHEETS: Final = 20
# Searching the other sheets must not cost more than reading the list itself.
_SEARCHED_SHEETS: Final = 10
SMALL_FILE: Final = 5_000_000
"""Bytes; the other sheets of a larger file are not searched."""
_SMALL_UNZIPPED: Final = 16_000_000


def explained(error: InputError, sheet: str | None, file: ListFile, shape: ItemShape, *, small: bool) -> InputError:
    """The refusal of a sheet for its columns or its lack of rows, naming the worker's columns and the other sheets.

    Arguments: ``sheet``, the one that was read, None for a file without sheets; ``small``, whether the file has at most
    :data:`SMALL_FILE` bytes. A sheet that has the columns is named first.
    """
    if error.code not in _SHEET_ERRORS:
        return error
    message = _without_header(error, shape) if error.code == "no_header" else str(error)
    code = "unknown_column" if error.code == "no_header" and shape.mapped else error.code
    others = _other_sheets(sheet, file, shape, small=small) if sheet is not None else []
    if not others:
        return InputError(message, code=code, errors=error.errors, text=error.text, params=error.params)
    sheet_params = {
        "sheet": repr(sheet),
        "sheets": ", ".join(map(repr, others[:_NAMED_SHEETS])) + (", …" if len(others) > _NAMED_SHEETS else ""),
        "other_sheets": others[:_NAMED_SHEETS],
    }
    hint = say("list.other_sheets", sheet_params, "en")
    text = "list.missing_columns_in_sheet" if error.text == "list.missing_columns_named" else ""
    return InputError(
        f"{message.rstrip('.')}. {hint}", code=code, errors=error.errors, text=text, params={**error.params, **sheet_params}
    )


def _without_header(error: InputError, shape: ItemShape) -> str:
    found = error.params.get("found", "")
    if shape.mapped:
        return f"columns: the sheet has no column {listed(sorted(map(repr, shape.mapped)))}; {found}"
    if not (wanted := shape.wanted()):
        return str(error)
    return (
        f"the sheet has no header: none of these columns is in the first {HEADER_ROWS} rows: {wanted}; {found}. Put one row"
        " with the names of the columns over the data"
    )


def _other_sheets(sheet: str, file: ListFile, shape: ItemShape, *, small: bool) -> list[str]:
    try:
        others = [name for name in file.sheets() if name != sheet]
    except InputError:
        return []
    if small:
        fits = next((name for name in others[:_SEARCHED_SHEETS] if _fits(name, file, shape)), None)
        others.sort(key=lambda name: name != fits)
    return others


def _fits(name: str, file: ListFile, shape: ItemShape) -> bool:
    try:
        shape.bind(file.open(name, shape.expected, unzipped=_SMALL_UNZIPPED).headers or ())
    except InputError:
        return False
    return True


# -- strict lists


@contextmanager
def all_good(rows: Iterable[NewItem | Rejected], max_rows: int) -> Iterator[tuple[int, Iterator[NewItem]]]:
    """Validates every row before the first is used. Yields their number, and the rows from a temporary file.

    Raises :class:`InputError` ``rows_rejected`` with the problems of the rejected rows, or ``too_many_rows``.
    """
    with tempfile.TemporaryFile(prefix="asynctask-strict-") as spool:
        total = rejected = 0
        problems: list[Problem] = []
        for row in rows:
            total += 1
            if total > max_rows:
                raise too_many_items(max_rows)
            if isinstance(row, NewItem):
                said = [row.params, row.row, row.worker_name, row.options, row.key, row.search]
                spool.write(dumps(said).encode() + b"\n")
                continue
            rejected += 1
            if rejected <= MAX_ROWS:
                problems += row.problems
        if rejected:
            raise rows_rejected(rejected, total, tuple(problems))
        spool.seek(0)
        kept = map(loads, spool)
        yield (
            total,
            (NewItem(params, row, job, options, key, search=found) for params, row, job, options, key, found in kept),
        )


# -- duplicates in the fields of the option unique

_SMALLEST: Final = 1_024
_LAST_ROW: Final = 2**32 - 1


class Twins:
    """The values of the unique fields of all rows accepted so far."""

    def __init__(self, unique: Sequence[str], shape: ItemShape, binding: Binding | None) -> None:
        self._unique = tuple(unique)
        self._shape = shape
        self._binding = binding
        headers = binding.headers if binding else {}
        self._names = {field: headers.get(field, field) for field in self._unique}
        self._plain = {field: _PLAIN.get(shape.kind(field)) for field in self._unique}
        self._first = FirstRows()

    def refuse_second(self, raw: RawRow, row: NewItem) -> NewItem | Rejected:
        """``row``, or its refusal, which names the first row with the same values."""
        key = self._key(raw, row.compared or {})
        first = row.row if key is None else self._first.put(key, row.row)
        if first == row.row:
            return row
        values = self._shape.values(raw)
        column = self._names[self._unique[0]]
        text, params = "duplicate_in_upload", dict[str, Any](first=first)
        if len(self._unique) > 1:
            text, params["columns"] = (
                "duplicates_in_upload",
                ", ".join(repr(shorten(self._names[field], 80)) for field in self._unique),
            )
        value = shorten(jsonable(values.get(column))) if isinstance(values, Mapping) else None
        problem = fault(row.row, column, "duplicate_in_upload", text, params, value)
        return replace(self._shape.refused(raw, [problem], self._binding), number=row.number)

    def _key(self, raw: RawRow, item: Mapping[str, Any]) -> bytes | None:
        """The values to compare, as JSON; None where one is missing: such a row is never a duplicate."""
        values = []
        for name in self._unique:
            value = item.get(name)
            if value is None or not self._shape.is_given(raw, name, value, self._binding):
                return None
            plain = self._plain[name]
            values.append(value if plain is None else plain(value))
        return orjson.dumps(values, option=orjson.OPT_SORT_KEYS)


def refuse_absent(
    unique: Sequence[str], headers: Sequence[str], binding: Binding, shape: ItemShape, text: str = "column.unique"
) -> None:
    """Refuses a name in ``unique`` that no column has, for a worker without a model: there every header is a key. ``text``:
    what it is told with.

    Raises :class:`InputError` ``unknown_column``.
    """
    if shape.model is not None:
        return
    keys = {binding.fields.get(header, header) for header in headers if header not in binding.ignored}
    for name in unique:
        if name not in keys:
            near = {normalise(key): key for key in keys}.get(normalise(name))
            params = {"name": repr(name), "headers": ", ".join(shorten(each, 40) for each in headers[:50])}
            raise refused_with([fault(None, near, "unknown_column", text, params)])


class FirstRows:
    """A hash table from key to the first row that had it: 20 bytes a slot, 30 to 60 a key (a dict needs 150).

    Keys are 128-bit digests, rows are numbered from 1. Open addressing, at most two thirds full.
    """

    __slots__ = ("_count", "_high", "_low", "_rows")

    def __init__(self) -> None:
        self._count = 0
        self._low, self._high, self._rows = _slots(_SMALLEST)

    def __len__(self) -> int:
        return self._count

    def put(self, key: bytes, row: int) -> int:
        """The row stored for ``key``; stores and returns ``row`` for a new key."""
        low, high = struct.unpack("<QQ", hashlib.blake2b(key, digest_size=16).digest())
        at = self._find(low, high)
        if known := self._rows[at]:
            return known
        self._low[at], self._high[at], self._rows[at] = low, high, min(row, _LAST_ROW)
        self._count += 1
        if self._count * 3 > len(self._rows) * 2:
            self._grow()
        return row

    def _find(self, low: int, high: int) -> int:
        lows, highs, rows = self._low, self._high, self._rows
        mask = len(rows) - 1
        at = low & mask
        while rows[at] and (lows[at] != low or highs[at] != high):
            at = (at + 1) & mask
        return at

    def _grow(self) -> None:
        lows, highs, rows = self._low, self._high, self._rows
        self._low, self._high, self._rows = _slots(len(rows) * 2)
        for old in range(len(rows)):
            if row := rows[old]:
                at = self._find(lows[old], highs[old])
                self._low[at], self._high[at], self._rows[at] = lows[old], highs[old], row


def _slots(count: int) -> tuple[array[int], array[int], array[int]]:
    return array("Q", bytes(8 * count)), array("Q", bytes(8 * count)), array("I", bytes(4 * count))


def _plain_decimal(value: Any) -> Any:
    """1.0 and 1.00 are equal."""
    try:
        return str(Decimal(value).normalize()) if isinstance(value, str) else value
    except InvalidOperation:
        return value


def _plain_moment(value: Any) -> Any:
    """Times of different zones are compared in UTC."""
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return value
    return moment.astimezone(UTC).isoformat() if moment.tzinfo is not None else value


_PLAIN: Final[Mapping[Any, Callable[[Any], Any]]] = {Decimal: _plain_decimal, datetime: _plain_moment}
