"""Reports: the rows of a Task with their results, in the user's own columns, ready to be corrected and uploaded again."""

from __future__ import annotations

import fcntl
import heapq
import os
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol

from asynctask.core.states import Status
from asynctask.database.engine import Database
from asynctask.errors import InputError
from asynctask.ledger import queries
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, Reject
from asynctask.lists.items import ItemShape
from asynctask.lists.original_rows import KeptRows, all_columns, remove_drafts
from asynctask.lists.problems import render
from asynctask.lists.readers import Limits, Source, open_source
from asynctask.lists.readers.base import normalise
from asynctask.lists.rows import ListSource
from asynctask.lists.uploads import Uploads, Workbook, is_workbook
from asynctask.logs import get_logger
from asynctask.reports.files import ReportRow

KINDS: Mapping[str, frozenset[str]] = {
    "failed": frozenset({Status.FAILED, Status.ERROR}),
    "succeeded": frozenset({Status.FINISH}),
    "unprocessed": frozenset({Status.ENQUEUE, Status.WORKING, Status.STOPPED, Status.CANCELLED}),
    "rejected": frozenset(),
    "all": frozenset(str(status) for status in Status),
}
"""``rows=`` of a report -> its statuses; ``failed``, ``rejected`` and ``all`` include the refused rows."""

_FAILED = (Status.FAILED, Status.ERROR)
_WITH_REJECTS = frozenset({"failed", "rejected", "all"})
_PAGE = 500
_ALIVE_EVERY = 500
_MAX_NAMES = 16_384
_NO_MORE = 2**63


@dataclass(slots=True)
class Report:
    """A report. ``headers`` are the user's own columns; ``rows`` can be read once, in the order of the list.

    ``locale``: language of the report's own headers. Close ``rows`` if they are not read to the end.
    """

    headers: list[str]
    rows: Generator[ReportRow, None, None]
    locale: str = "en"


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
) -> Report:
    """The current report of a Task, streamed in constant memory.

    Arguments: ``kind``, one of :data:`KINDS`; ``locale``, the language of its texts; ``alive``, called now and then, also
    while rows are read: an exception it raises ends the work. Rows are read in pages, each at its own moment. If the
    original list is gone, the columns are the items' fields.

    Raises :class:`InputError` for an unknown ``kind``, NotFound, and :class:`Unavailable` if a workbook must be read again
    and no process can be started for it.
    """
    if kind not in KINDS:
        raise InputError(f"rows={kind!r} is none; choose of {', '.join(KINDS)}", code="unknown_rows")
    task = task_rows.read(ledger, task_id)
    kept, known = task.source, task.headers or {}
    original = None
    if kept:
        source = ListSource.from_json(kept)
        expect = (shape.expected if shape else frozenset()) | frozenset(source.columns)
        original = open_original(uploads, source, limits, expect, alive, known.get("list"))
    ledger_rows = _LedgerRows(ledger.database, task_id, kind, locale)
    if original is None:
        headers = ledger_rows.fields(shape, None if kept else known.get("items"))
        rows = _ledger_rows(ledger_rows, headers, alive)
    else:
        headers = list(original.headers)
        rows = _original_rows(original, ledger_rows, headers, _columns(shape, headers), alive)
    return Report(headers, rows if task.resubmit_of is None else _corrected(ledger.database, task_id, rows), locale)


def _corrected(
    database: Database, task_id: int, rows: Generator[ReportRow, None, None]
) -> Generator[ReportRow, None, None]:
    """The rows of a corrected list under the numbers of the first Task's list, so that each can be corrected once more."""
    with closing(rows):
        while page := list(islice(rows, _PAGE)):
            with database.read(once=True) as connection:
                numbers = queries.corrected_numbers(connection, task_id, page[0].number or 0, page[-1].number or 0)
            yield from (replace(row, number=numbers.get(row.number or 0)) for row in page)


def _columns(shape: ItemShape | None, headers: list[str]) -> dict[str, str]:
    """Field -> header, for rows whose cells come from the item."""
    if shape is None or shape.model is None:
        return {}
    try:
        return {field: header for header, field in shape.bind(headers).fields.items()}
    except InputError:
        return {}


def _ledger_rows(
    ledger_rows: _LedgerRows, headers: list[str], alive: Callable[[], None]
) -> Generator[ReportRow, None, None]:
    for count, (row, _) in enumerate(ledger_rows.rows(headers, values=True)):
        if count % _ALIVE_EVERY == 0:
            alive()
        yield row


def _original_rows(
    original: Original, ledger_rows: _LedgerRows, headers: list[str], columns: Mapping[str, str], alive: Callable[[], None]
) -> Generator[ReportRow, None, None]:
    """The ledger's rows with the cells of the original list, both read in step."""
    with closing(_Cells(original, alive)) as cells:
        for count, (row, event_id) in enumerate(ledger_rows.rows(headers, values=False)):
            if count % _ALIVE_EVERY == 0:
                alive()
            values = cells.at(row.number)
            if values is None:  # the list cannot be read that far; the item has the values
                kept = ledger_rows.values(row.number, event_id)
                values = {columns.get(name, name): value for name, value in kept.items()}
            yield row.with_values(values)


class _Cells:
    """The rows of the original, by increasing number."""

    def __init__(self, original: Original, alive: Callable[[], None]) -> None:
        self._rows, self._alive = original.rows(), alive
        self._number, self._count = 0, 0
        self._values: Mapping[str, Any] | None = None

    def at(self, number: int | None) -> Mapping[str, Any] | None:
        """The cells of a row; None if the list has no such row or cannot be read that far."""
        while number is not None and self._number < number:
            self._next()
        return self._values if self._number == number else None

    def _next(self) -> None:
        self._count += 1
        if self._count % _ALIVE_EVERY == 0:
            self._alive()
        try:
            self._number, self._values = next(self._rows, (_NO_MORE, None))
        except (InputError, OSError) as error:
            get_logger("asynctask.report").warning("original_unreadable", after=self._number, error=str(error))
            self._number, self._values = _NO_MORE, None

    def close(self) -> None:
        self._rows.close()


class _LedgerRows:
    """The ledger's data of the report's rows."""

    def __init__(self, database: Database, task_id: int, kind: str, locale: str) -> None:
        self._database, self._task_id, self._locale = database, task_id, locale
        self._statuses, self._with_rejects = KINDS[kind], kind in _WITH_REJECTS

    def fields(self, shape: ItemShape | None, known: Collection[str] | None) -> list[str]:
        """The columns without an original list: the fields of the model or the items, and of the refused rows.

        ``known``: those of all items, if the split kept them; else all rows are read for them.
        """
        names: dict[str, None] = {}
        if shape is not None and shape.model is not None:
            names.update(dict.fromkeys(shape.model.model_fields))
        if known is not None:
            return [*names, *(name for name in known if name not in names)]
        if not names:
            for event in self._events(params=True):
                names.update(dict.fromkeys(_cells(event.params)))
                if len(names) > _MAX_NAMES:
                    break
        for reject in self._rejects(cells=True):
            if len(names) > _MAX_NAMES:
                break
            names.update(dict.fromkeys(_cells(reject.cells)))
        return list(names)

    def rows(self, headers: Sequence[str], *, values: bool) -> Iterator[tuple[ReportRow, int | None]]:
        """The rows in the order of the list, each with the id of its Event (None if refused)."""
        ended = self._ended(values)
        refused = ((self._refused(reject, _by_name(headers)), None) for reject in self._rejects(cells=values))
        return heapq.merge(ended, refused, key=lambda found: found[0].number or 0)

    def values(self, number: int | None, event_id: int | None) -> Mapping[str, Any]:
        if event_id is None:
            found = next(queries.rejects(self._database, self._task_id, after=(number or 1) - 1, limit=1), None)
            return _cells(found.cells) if found is not None else {}
        with self._database.read() as connection:
            after, row = (event_id - 1, None) if number is None else (event_id, number - 1)
            events = queries.event_page(connection, self._task_id, after=after, after_row=row, limit=1)
        own = next((each for each in events if each["id"] == event_id and number in (None, each["row"])), None)
        return _cells(own["params"]) if own is not None else {}

    def _events(self, *, params: bool) -> Iterator[queries.EndedRow]:
        if not self._statuses:
            return iter(())
        return queries.rows_by_status(self._database, self._task_id, self._statuses, params=params)

    def _rejects(self, *, cells: bool) -> Iterator[Reject]:
        return queries.rejects(self._database, self._task_id, cells=cells) if self._with_rejects else iter(())

    def _ended(self, values: bool) -> Iterator[tuple[ReportRow, int | None]]:
        events = self._events(params=values)
        while page := list(islice(events, _PAGE)):
            failed = {event.id for event in page if event.status in _FAILED}
            messages = {}
            if failed:
                with self._database.read(once=True) as connection:
                    messages = queries.failures_by_row(connection, failed)
            for event in page:
                # As the retry policy counts them; a job redelivered for other reasons is not counted again.
                attempts = event.retries + (event.started_at is not None)
                error = messages.get((event.id, event.first_row)) if event.status in _FAILED else None
                row = ReportRow(_cells(event.params), event.first_row, event.status, error, attempts, event.result)
                yield row, event.id

    def _refused(self, reject: Reject, names: Mapping[str, str]) -> ReportRow:
        bad: dict[str, str] = {}
        row_messages, messages = [], []
        for problem in reject.errors:
            column, text = problem["column"], render(problem, self._locale)
            header = _header(column, names) if column else None
            if header is None:
                row_messages.append(text if not column else f"{column}: {text}")
            else:
                bad[header] = f"{bad[header]}\n{text}" if header in bad else text
            messages.append(f"{column}: {text}" if column else text)
        return ReportRow(
            _cells(reject.cells),
            reject.row,
            "rejected",
            "; ".join(messages),
            0,
            None,
            bad,
            "\n".join(row_messages) or None,
        )


def _by_name(headers: Sequence[str]) -> dict[str, str]:
    return {normalise(header): header for header in headers}


def _header(column: str, names: Mapping[str, str]) -> str | None:
    """The header of a problem's column, which may be a path into a cell: address.city is in address."""
    return names.get(normalise(column)) or names.get(normalise(column.partition(".")[0]))


def _cells(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"value": value}


# -- the original list
#
# Text is read again from the upload itself. A workbook is read once, by a child process that caches its rows.

_ALIVE_EVERY_READ: Final = 1_000


class Original(Protocol):
    """The original list. ``headers``: all columns in order, those without a header too ("Column C")."""

    headers: tuple[str, ...]

    def rows(self) -> Generator[tuple[int, Mapping[str, Any]], None, None]:
        """Row number and cells by header, in order. Raises :class:`InputError` where the rest cannot be read."""
        ...


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
    then, and an exception it raises ends the work; ``names``, the columns of a text's rows, None if it must be read for
    them. Raises :class:`Unavailable` if no child can be started.
    """
    try:
        path = uploads.find(source.name)
        if is_workbook(path):
            return _cached_rows(uploads, path, source, limits, expect, alive)
        return _Text(path, source, limits, expect, alive, names)
    except (InputError, OSError) as error:
        get_logger("asynctask.report").warning("original_unreadable", name=source.name, error=str(error))
        return None


class _Text:
    """A text list: its rows, and before them its columns, for which it is read once more unless ``known`` has them."""

    def __init__(
        self,
        path: Path,
        source: ListSource,
        limits: Limits,
        expect: Collection[str],
        alive: Callable[[], None],
        known: Sequence[str] | None,
    ) -> None:
        self._path, self._source, self._limits, self._expect = path, source, limits, expect
        names: dict[str, None] = dict.fromkeys(known or ())
        with self._open() as opened:
            for number, values in _original_cells(opened, quiet=True) if known is None else ():
                if number % _ALIVE_EVERY_READ == 0:
                    alive()
                if values.keys() - names.keys() and len(names) < _MAX_NAMES:
                    names.update(dict.fromkeys(values))
            self.headers: tuple[str, ...] = tuple(all_columns(opened, list(names)))

    def rows(self) -> Generator[tuple[int, Mapping[str, Any]], None, None]:
        with self._open() as opened:
            yield from _original_cells(opened)

    def _open(self) -> Source:
        return open_source(
            self._path,
            self._source.filename,
            sheet=self._source.sheet,
            encoding=self._source.encoding,
            limits=self._limits,
            expect=self._expect,
        )


def _original_cells(opened: Source, *, quiet: bool = False) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """With ``quiet`` a list that is broken in the middle ends there."""
    try:
        for row in opened.rows():
            yield row.number, row.values if isinstance(row.values, Mapping) else {"value": row.values}
    except InputError:
        if not quiet:
            raise


def _cached_rows(
    uploads: Uploads,
    path: Path,
    source: ListSource,
    limits: Limits,
    expect: Collection[str],
    alive: Callable[[], None],
) -> KeptRows:
    target = uploads.kept_rows(path.name)
    if (found := _readable(target)) is not None:
        return found
    # One at a time on a machine, for reading a workbook is costly; a waiting process finds the rows cached.
    with _one_process(path.with_name(".reading"), alive):
        if (found := _readable(target)) is None:
            remove_drafts(target)  # left by a killed child
            try:
                with Workbook(path, source.filename, limits, alive=alive) as workbook:
                    workbook.keep(target, source.sheet, expect)
            finally:
                remove_drafts(target)
            found = KeptRows(target)
    return found


def _readable(target: Path) -> KeptRows | None:
    try:
        return KeptRows(target)
    except InputError:
        return None


@contextmanager
def _one_process(lock: Path, alive: Callable[[], None]) -> Iterator[None]:
    """Holds a lock between processes; the kernel releases it when its holder dies."""
    pause = threading.Event()
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                alive()
                pause.wait(0.05)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # explicit: a process forked meanwhile holds the open file too
        os.close(descriptor)
