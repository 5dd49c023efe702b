"""Reports: the rows of a Task with their results, in the user's own columns, ready to be corrected and uploaded again."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, TypedDict, cast

from asynctask.core.states import Status
from asynctask.database.engine import Database
from asynctask.errors import InputError
from asynctask.ledger import queries
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, Reject, chunks
from asynctask.lists.dry_run import CheckedRow, Marking
from asynctask.lists.items import ItemShape, Rejected
from asynctask.lists.problems import render
from asynctask.lists.readers import Limits, Source
from asynctask.lists.readers.base import column_index, normalise
from asynctask.lists.rows import ListSource
from asynctask.lists.uploads import ListFile, Uploads, list_file
from asynctask.lists.written_cells import SHEET_COLUMNS
from asynctask.logs import get_logger
from asynctask.messages import MASK
from asynctask.reports.files import ReportRow, write_xlsx

KINDS: Mapping[str, frozenset[str]] = {
    "failed": frozenset({Status.FAILED, Status.ERROR}),
    "succeeded": frozenset({Status.FINISH}),
    "unprocessed": frozenset({Status.ENQUEUE, Status.WORKING, Status.STOPPED, Status.CANCELLED}),
    "rejected": frozenset(),
    "all": frozenset(str(status) for status in Status),
}
"""``rows=`` of a report -> its statuses; ``failed``, ``rejected`` and ``all`` include the rejected rows."""

_FAILED = (Status.FAILED, Status.ERROR)
_WITH_REJECTS = frozenset({"failed", "rejected", "all"})
_PAGE = 500
_ALIVE_EVERY = 500
_NO_MORE = 2**63


@dataclass(slots=True)
class Report:
    """A report. ``headers`` are the user's own columns; ``rows`` can be read once, in the order of the list.

    ``locale``: language of the report's own headers. ``original``: the list that the rows are read from, None if there is
    none. Close the report if its rows are not read to the end.
    """

    headers: list[str]
    rows: Generator[ReportRow, None, None]
    locale: str = "en"
    original: Original | None = None

    def close(self) -> None:
        """Ends the rows, and the process that reads a workbook for them; idempotent."""
        self.rows.close()
        if self.original is not None:  # rows that nobody began to read have not closed it
            self.original.close()


def rows_expected(progress: Mapping[str, Any], kind: str) -> int:
    """The rows that a report of ``kind`` (one of :data:`KINDS`) has now, from the progress of its Task."""
    rejected = progress["split"]["rejected"] if kind in _WITH_REJECTS else 0
    return int(rejected + sum(progress["counts"][status] for status in KINDS[kind]))


def make_report(
    ledger: Ledger,
    uploads: Uploads,
    limits: Limits,
    shape: ItemShape | None,
    task_id: int,
    kind: str = "failed",
    *,
    locale: str = "en",
    alive: Callable[[], None] = lambda: None,
    only_rows: Collection[int] | None = None,
) -> Report:
    """The current report of a Task, streamed in constant memory.

    Arguments: ``kind``, one of :data:`KINDS`; ``locale``, the language of its texts; ``alive``, called now and then, also
    while rows are read: an exception it raises ends the work; ``only_rows``: only rows with these numbers. Rows are read in
    pages, each at its own moment. If the original list is gone, the columns are the items' fields; where it cannot be read
    further, the cells are the items'.

    Raises :class:`InputError` for an unknown ``kind``, NotFound, and :class:`Unavailable` if no process can be started to
    read a workbook. Its rows raise :class:`InputError` if that process ends before it has read what they need.
    """
    if kind not in KINDS:
        raise InputError(f"rows={kind!r} is none; choose of {', '.join(KINDS)}", code="unknown_rows")
    task = task_rows.read(ledger, task_id)
    kept, known = task.source, task.headers or {}
    original, masked = None, frozenset[str]()
    if kept:
        source = ListSource.from_json(kept)
        expect = (shape.expected if shape else frozenset()) | frozenset(source.columns)
        original = open_original(uploads, source, limits, expect, alive, known.get("list"))
        masked = frozenset(source.masked)
    ledger_rows = _LedgerRows(ledger.database, task_id, kind, locale, shape, only_rows)
    if original is None:
        headers = ledger_rows.fields(shape, None if kept else known.get("items"))
        columns, hidden = dict[str, str](), frozenset[str]()
    else:
        headers = list(original.headers)
        columns = _columns(shape, headers, source.columns)
        named = ledger_rows.fields(None, None) if task.headers is None else known.get("items", ())
        headers += _added(shape, named, columns, headers)
        hidden = frozenset(header for header in headers if normalise(header) in masked)
    rows = _rows(original, ledger_rows, headers, columns, hidden, alive)
    rows = rows if task.resubmit_of is None else _corrected(ledger.database, task_id, rows)
    return Report(headers, rows, locale, original)


def _corrected(
    database: Database, task_id: int, rows: Generator[ReportRow, None, None]
) -> Generator[ReportRow, None, None]:
    """The rows of a corrected list under the numbers of the first Task's list, so that each can be corrected once more."""
    with closing(rows):
        for page in chunks(rows, _PAGE):
            with database.read(once=True) as connection:
                numbers = queries.corrected_numbers(connection, task_id, page[0].number or 0, page[-1].number or 0)
            yield from (replace(row, number=numbers.get(row.number or 0)) for row in page)


def _columns(shape: ItemShape | None, headers: list[str], mapped: Mapping[str, str]) -> dict[str, str]:
    """Field -> header, for rows whose cells come from the item. ``mapped``: the option ``columns`` of the list."""
    try:
        return ItemShape(shape.model if shape else None, mapped).bind(headers).headers
    except InputError:
        return {}


def _added(
    shape: ItemShape | None, names: Iterable[str], columns: Mapping[str, str], headers: Collection[str]
) -> list[str]:
    """The columns of rows that were added to an open Task, which its list lacks. ``names``: the keys of the added rows."""
    fields = dict.fromkeys((shape and shape.field_of(name)) or name for name in names)
    had = {*columns, *headers}
    return [name for name in fields if name not in had]


def _rows(
    original: Original | None,
    ledger_rows: _LedgerRows,
    headers: list[str],
    columns: Mapping[str, str],
    hidden: Collection[str],
    alive: Callable[[], None],
) -> Generator[ReportRow, None, None]:
    """The ledger's rows, with the cells of the original list if there is one; both are read in step. ``hidden``: headers
    of secrets."""
    with closing(original) if original is not None else nullcontext():
        for count, (row, event_id) in enumerate(ledger_rows.rows(headers, columns, values=original is None)):
            if count % _ALIVE_EVERY == 0:
                alive()
            if original is None:
                yield row
                continue
            values = original.cells(row.number)
            if values is None:  # the row was added, or the list cannot be read that far; the item has the values
                kept = ledger_rows.values(row.number, event_id)
                values = {columns.get(name, name): value for name, value in kept.items()}
            elif hidden:
                values = {name: MASK if name in hidden and each is not None else each for name, each in values.items()}
            yield replace(row, values=values)


class ListColumn(TypedDict):
    """A column of a list."""

    name: Annotated[str, "Of the items' field."]
    header: Annotated[str, "Its title in the sheet."]


def columns_of(task: task_rows.TaskRow, shape: ItemShape | None) -> list[ListColumn]:
    """The columns of a Task's list that its items have, in its order; ``shape``: of the items, None if nobody knows it."""
    known = task.headers or {}
    if "list" not in known:
        named = {name: name for name in known.get("items", ())}
    elif shape is None or shape.model is None:
        mapped = ListSource.from_json(task.source).columns if task.source else {}
        named = {mapped.get(header, header): header for header in known["list"]}
    else:
        mapped = ListSource.from_json(task.source).columns if task.source else {}
        places = {header: at for at, header in enumerate(known["list"])}
        named = dict(sorted(_columns(shape, known["list"], mapped).items(), key=lambda pair: places[pair[1]]))
    if "list" in known:
        named |= {name: name for name in _added(shape, known.get("items", ()), named, known["list"])}
    return [{"name": name, "header": header} for name, header in named.items()]


class _LedgerRows:
    """The ledger's data of the report's rows."""

    def __init__(
        self,
        database: Database,
        task_id: int,
        kind: str,
        locale: str,
        shape: ItemShape | None,
        only_rows: Collection[int] | None,
    ) -> None:
        self._database, self._task_id, self._locale, self._only = database, task_id, locale, only_rows
        self._shape = shape if shape is not None and shape.model is not None else None
        self._columns: dict[str, str] = {}  # of the keys of items and rejected rows: an alias is the column of its field
        self._statuses, self._with_rejects = KINDS[kind], kind in _WITH_REJECTS

    def fields(self, shape: ItemShape | None, known: Collection[str] | None) -> list[str]:
        """The columns without an original list: the fields of the model or the items, and of the rejected rows.

        ``known``: those of all items, if the split kept them; else all rows are read for them.
        """
        names: dict[str, None] = {}
        if shape is not None and shape.model is not None:
            names.update(dict.fromkeys(shape.model.model_fields))
        if known is not None:
            return list(dict.fromkeys([*names, *map(self._column, known)]))
        if not names:
            for event in self._events(params=True):
                names.update(dict.fromkeys(self._cells(event.params)))
                if len(names) > SHEET_COLUMNS:
                    break
        for reject in self._rejects(cells=True):
            if len(names) > SHEET_COLUMNS:
                break
            names.update(dict.fromkeys(self._cells(reject.cells)))
        return list(names)

    def rows(
        self, headers: Sequence[str], columns: Mapping[str, str], *, values: bool
    ) -> Iterator[tuple[ReportRow, int | None]]:
        """The rows in the order of the list, each with the id of its Event (None if rejected). ``columns``: field ->
        header."""
        ended = self._ended(values)
        names = {normalise(header): header for header in headers}
        names |= {normalise(field): header for field, header in columns.items() if normalise(field) not in names}
        rejected = ((self._rejected(reject, names), None) for reject in self._rejects(cells=values))
        return heapq.merge(ended, rejected, key=lambda found: found[0].number or 0)

    def values(self, number: int | None, event_id: int | None) -> Mapping[str, Any]:
        if event_id is None:
            found = next(queries.rejects(self._database, self._task_id, after=(number or 1) - 1, limit=1), None)
            return self._cells(found.cells) if found is not None else {}
        after, row = (event_id - 1, None) if number is None else (event_id, number - 1)
        events = queries.event_page(self._database, self._task_id, after=after, after_row=row, limit=1)
        own = next((each for each in events if each["id"] == event_id and number in (None, each["row"])), None)
        return self._cells(own["params"]) if own is not None else {}

    def _events(self, *, params: bool) -> Iterator[queries.EndedRow]:
        if not self._statuses:
            return iter(())
        only = self._only
        return queries.rows_by_status(self._database, self._task_id, self._statuses, params=params, only_rows=only)

    def _rejects(self, *, cells: bool) -> Iterator[Reject]:
        if not self._with_rejects:
            return iter(())
        found = queries.rejects(self._database, self._task_id, cells=cells)
        return found if self._only is None else (each for each in found if each.row in self._only)

    def _ended(self, values: bool) -> Iterator[tuple[ReportRow, int | None]]:
        events = self._events(params=values)
        for page in chunks(events, _PAGE):
            failed = {event.id for event in page if event.status in _FAILED}
            messages = {}
            if failed:
                with self._database.read(once=True) as connection:
                    messages = queries.failures_by_row(connection, failed)
            for event in page:
                # As the retry policy counts them; a job redelivered for other reasons is not counted again.
                attempts = event.retries + (event.started_at is not None)
                error = messages.get((event.id, event.first_row)) if event.status in _FAILED else None
                row = ReportRow(self._cells(event.params), event.first_row, event.status, error, attempts, event.result)
                yield row, event.id

    def _rejected(self, reject: Reject, names: Mapping[str, str]) -> ReportRow:
        found = ((each["column"], render(each, self._locale)) for each in reject.errors)
        return _rejected(self._cells(reject.cells), reject.row, found, names, self._column)

    def _cells(self, value: Any) -> dict[str, Any]:
        cells = _cells(value)
        return cells if self._shape is None else {self._column(key): each for key, each in cells.items()}

    def _column(self, key: str) -> str:
        if self._shape is None:
            return key
        if key not in self._columns:
            self._columns[key] = self._shape.field_of(key) or key
        return self._columns[key]


def _rejected(
    cells: Mapping[str, Any],
    number: int,
    faults: Iterable[tuple[str | None, str]],
    names: Mapping[str, str],
    column_of: Callable[[str], str] = str,
) -> ReportRow:
    """A rejected row. ``faults``: columns and messages; ``names``: header by normalised name; ``column_of``: another name
    of a column."""
    bad: dict[str, str] = {}
    row_messages, messages = [], []
    for column, text in faults:
        header = _header(column, names) or _header(column_of(column), names) if column else None
        if header is None:
            row_messages.append(text if not column else f"{column}: {text}")
        else:
            bad[header] = f"{bad[header]}\n{text}" if header in bad else text
        messages.append(f"{column}: {text}" if column else text)
    return ReportRow(cells, number, "rejected", "; ".join(messages), 0, None, bad, "\n".join(row_messages) or None)


def mark_list(marking: Marking, headers: Sequence[str], rows: Iterable[CheckedRow]) -> None:
    """Writes the workbook of a checked list: all its rows, the cells that would be rejected marked, with the reason as a
    comment. It can be corrected and submitted. Raises :class:`Unavailable` if writing fails, and what ``rows`` raise."""
    names = {normalise(header): header for header in headers}

    def row(checked: CheckedRow) -> ReportRow:
        if not isinstance(checked.found, Rejected):
            return ReportRow(checked.cells, checked.found.row, "accepted", None, 0, None)
        found = ((each.column, render(each, marking.locale)) for each in checked.found.problems)
        return _rejected(checked.cells, checked.found.row, found, names)

    write_xlsx(Path(marking.path), headers, map(row, rows), locale=marking.locale)


def _header(column: str, names: Mapping[str, str]) -> str | None:
    """The header of a problem's column, which may be a path into a cell: address.city is in address."""
    return names.get(normalise(column)) or names.get(normalise(column.partition(".")[0]))


def _cells(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"value": value}


# -- the original list, read once more: a text here, a workbook by a child process that the report's pace holds up

_UNREAD: Final = frozenset({"too_costly", "reader_died"})
"""The process that reads the workbook has ended. The list itself may be sound, so the rest of its rows is unknown."""


class Original:
    """The original list, open. ``headers``: all columns in order, those without a header too ("Column C").

    Arguments: ``file``, and ``source``, how it is read; ``expect``, names that a header may have; ``alive``, called now and
    then; ``known``, the columns that its rows have, None if all rows must be read for them. Close it.
    """

    def __init__(
        self,
        file: ListFile,
        source: ListSource,
        expect: Collection[str],
        alive: Callable[[], None],
        known: Sequence[str] | None,
    ) -> None:
        names: dict[str, None] = dict.fromkeys(known or ())
        with ExitStack() as stack:
            stack.enter_context(file)
            self._opened = stack.enter_context(file.open(source.sheet, expect, header=source.header_row, report=True))
            for number, values in _original_cells(self._opened, quiet=True) if known is None else ():
                if number % _ALIVE_EVERY == 0:
                    alive()
                if values.keys() - names.keys() and len(names) < SHEET_COLUMNS:
                    names.update(dict.fromkeys(values))
            self.headers: tuple[str, ...] = tuple(_all_columns(self._opened, list(names)))
            self._stack = stack.pop_all()
        self._alive, self._reading, self._count = alive, self.rows(), 0
        self._number, self._values = 0, cast("Mapping[str, Any] | None", None)

    def rows(self) -> Generator[tuple[int, Mapping[str, Any]], None, None]:
        """Row number and cells by header, in order. Raises :class:`InputError` where the rest cannot be read."""
        yield from _original_cells(self._opened)

    def cells(self, number: int | None) -> Mapping[str, Any] | None:
        """The cells of a row, asked for by increasing number; None if the list has no such row or cannot be read that
        far."""
        while number is not None and self._number < number:
            self._next()
        return self._values if self._number == number else None

    def _next(self) -> None:
        self._count += 1
        if self._count % _ALIVE_EVERY == 0:
            self._alive()
        try:
            self._number, self._values = next(self._reading, (_NO_MORE, None))
        except (InputError, OSError) as error:
            if isinstance(error, InputError) and error.code in _UNREAD:
                raise  # an incomplete file says so; one with empty cells would look whole
            get_logger("asynctask.report").warning("original_unreadable", after=self._number, error=str(error))
            self._number, self._values = _NO_MORE, None

    def close(self) -> None:
        """Closes the file and ends the child; idempotent."""
        self._reading.close()
        self._stack.close()


def open_original(
    uploads: Uploads,
    source: ListSource,
    limits: Limits,
    expect: Collection[str],
    alive: Callable[[], None] = lambda: None,
    names: Sequence[str] | None = None,
) -> Original | None:
    """The list of a Task; None if it is gone or unreadable.

    Arguments: ``limits`` and ``expect`` as of :func:`~asynctask.lists.readers.open_source`; ``alive`` is called now and
    then, and an exception it raises ends the work; ``names``, the columns of its rows, None if it must be read for them.
    Raises :class:`Unavailable` if no child can be started.
    """
    try:
        path = uploads.find(source.name)
        file = list_file(path, source.filename, limits, encoding=source.encoding, alive=alive)
        return Original(file, source, expect, alive, names)
    except (InputError, OSError) as error:
        get_logger("asynctask.report").warning("original_unreadable", name=source.name, error=str(error))
        return None


def _original_cells(opened: Source, *, quiet: bool = False) -> Generator[tuple[int, Mapping[str, Any]], None, None]:
    """With ``quiet`` a list that is broken in the middle ends there."""
    try:
        for row in opened.rows():
            yield row.number, row.values if isinstance(row.values, Mapping) else {"value": row.values}
    except InputError as error:
        if not quiet or error.code in _UNREAD:
            raise


_COLUMN: Final = re.compile(r"Column ([A-Z]{1,3})\**")


def _all_columns(source: Source, names: Sequence[str]) -> list[str]:
    """All columns of a list in the order of the sheet; ``names`` are the keys of its rows, in any order."""
    headers, places = list(source.headers or ()), source.places or ()
    at = dict(zip(headers, places, strict=False))
    known = set(headers)
    for name in names:
        if name not in known:
            if (match := _COLUMN.fullmatch(name)) is not None:
                at[name] = column_index(match[1].encode())
            headers.append(name)
    return sorted(headers, key=lambda name: at[name]) if len(at) == len(headers) else headers
