"""Reports: the rows of a Task with what they came to, in the user's own columns, ready to correct and hand in again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any

from asynctask.bulk.items import ItemShape
from asynctask.bulk.readers import Limits, Source, open_source
from asynctask.bulk.report_files import ReportRow
from asynctask.bulk.uploads import Uploads
from asynctask.errors import InputError
from asynctask.ledger import queries
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, loads
from asynctask.ledger.database import Database
from asynctask.states import Status

__all__ = ["KINDS", "Report", "make_report"]

KINDS: Mapping[str, frozenset[str]] = {
    "failed": frozenset({Status.FAILED, Status.ERROR}),
    "succeeded": frozenset({Status.FINISH}),
    "unprocessed": frozenset({Status.ENQUEUE, Status.WORKING, Status.STOPPED, Status.CANCELLED}),
    "rejected": frozenset(),
    "all": frozenset(str(status) for status in Status),
}
"""``rows=`` of a report, with the statuses it shows; ``failed``, ``rejected`` and ``all`` show the refused rows too."""

_WITH_REJECTS = frozenset({"failed", "rejected", "all"})
_PAGE = 500


@dataclass(slots=True)
class Report:
    """A report: ``headers`` are the user's own columns; ``rows`` may be gone through once, in the order of the list."""

    headers: list[str]
    rows: Iterator[ReportRow]


def make_report(
    ledger: Ledger, uploads: Uploads, limits: Limits, shape: ItemShape | None, task_id: int, kind: str = "failed"
) -> Report:
    """The report of a Task. ``kind`` is one of :data:`KINDS`. Raises :class:`InputError` for another, NotFound.

    Memory is constant but for what the reader of the original file needs. Where the original is gone, the columns are
    the items' fields.
    """
    if kind not in KINDS:
        raise InputError(f"rows={kind!r} is none; choose of {', '.join(KINDS)}", code="unknown_rows")
    with ledger.database.read() as connection:
        task = task_rows.get(connection, task_id)
    source = loads(task["split_source"])
    stack = ExitStack()
    opened = _open(stack, uploads, limits, shape, source) if source else None
    if opened is not None and opened.headers is not None:
        headers = list(opened.headers)
    else:
        headers = _headers(ledger, task_id, kind, shape)
    return Report(headers, _rows(ledger, task_id, kind, opened, stack))


def _open(
    stack: ExitStack, uploads: Uploads, limits: Limits, shape: ItemShape | None, source: Mapping[str, Any]
) -> Source | None:
    try:
        path = uploads.find(str(source["name"]))
        expect = (shape.expected if shape else frozenset()) | frozenset(source.get("columns") or {})
        return stack.enter_context(
            open_source(path, str(source["filename"]), sheet=source.get("sheet"), limits=limits, expect=expect)
        )
    except (InputError, OSError):
        return None


def _headers(ledger: Ledger, task_id: int, kind: str, shape: ItemShape | None) -> list[str]:
    """Without an original sheet: the fields of the model, or of the first items."""
    if shape is not None and shape.model is not None:
        return list(shape.model.model_fields)
    names: dict[str, None] = {}
    rows = queries.rows_by_status(ledger.database, task_id, KINDS["all"])
    found = [_item(row) for row in islice(rows, 100)]
    if kind in _WITH_REJECTS:
        found += [_cells(reject["cells"]) for reject in queries.rejects(ledger.database, task_id, limit=100)]
    for values in found:
        names.update(dict.fromkeys(values))
    return list(names)


def _rows(ledger: Ledger, task_id: int, kind: str, opened: Source | None, stack: ExitStack) -> Iterator[ReportRow]:
    with stack:
        ended = _Ahead(_ended(ledger.database, task_id, kind))
        refused = _Ahead(_refused(ledger.database, task_id) if kind in _WITH_REJECTS else iter(()))
        if opened is None:
            yield from _merged(ended, refused)
            return
        # The original is read once, in step with what the ledger says of its rows.
        for raw in opened.rows():
            found = ended.take(raw.number) or refused.take(raw.number)
            if found is not None:
                found_values = raw.values if isinstance(raw.values, Mapping) else {"value": raw.values}
                yield _with_values(found, found_values)


def _with_values(row: ReportRow, values: Mapping[str, Any]) -> ReportRow:
    return ReportRow(values, row.number, row.status, row.error, row.attempts, row.result, row.bad_columns)


class _Ahead:
    """An iterator in row order that can be asked for one row at a time."""

    def __init__(self, rows: Iterator[ReportRow]) -> None:
        self._rows = rows
        self.head: ReportRow | None = next(rows, None)

    def take(self, number: int) -> ReportRow | None:
        while self.head is not None and (self.head.number or 0) < number:
            self.head = next(self._rows, None)
        if self.head is None or self.head.number != number:
            return None
        return self.pop()

    def pop(self) -> ReportRow | None:
        taken, self.head = self.head, next(self._rows, None)
        return taken


def _merged(first: _Ahead, second: _Ahead) -> Iterator[ReportRow]:
    while first.head is not None or second.head is not None:
        one, two = first.head, second.head
        first_goes = two is None or (one is not None and (one.number or 0) <= (two.number or 0))
        row = (first if first_goes else second).pop()
        assert row is not None
        yield row


def _ended(database: Database, task_id: int, kind: str) -> Iterator[ReportRow]:
    rows = queries.rows_by_status(database, task_id, KINDS[kind]) if KINDS[kind] else iter(())
    while page := list(islice(rows, _PAGE)):
        failed = [row["id"] for row in page if row["status"] in (Status.FAILED, Status.ERROR)]
        messages = {}
        if failed:
            with database.read() as connection:
                messages = queries.failures_by_row(connection, failed)
        for row in page:
            error = messages.get(row["id"])
            yield ReportRow(_item(row), row["first_row"], row["status"], error, _tries(row), loads(row["result"]))


def _tries(row: Mapping[str, Any]) -> int:
    """How often it was performed by the retry policy's count; that it was handed out anew for other reasons is not its."""
    return int(row["retries"]) + (row["started_at"] is not None)


def _refused(database: Database, task_id: int) -> Iterator[ReportRow]:
    for reject in queries.rejects(database, task_id):
        bad = {e["column"]: e["message"] for e in reject["errors"] if e["column"]}
        text = "; ".join(f"{e['column']}: {e['message']}" if e["column"] else e["message"] for e in reject["errors"])
        yield ReportRow(_cells(reject["cells"]), reject["row"], "rejected", text, 0, None, bad)


def _item(row: Mapping[str, Any]) -> dict[str, Any]:
    return _cells(loads(row["params"]))


def _cells(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"value": value}
