"""Splitting: from rows to Events, slice by slice, so that jobs of the first slices run while later ones are still read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

from asynctask.bulk.items import Accepted, ItemShape, Refused
from asynctask.bulk.readers import Limits, RawRow, open_source
from asynctask.bulk.uploads import Uploads
from asynctask.clock import Clock
from asynctask.errors import InputError, LedgerUnavailable, Problem
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, dumps
from asynctask.ledger.tasks import NewItem, Reject, SplitLost

__all__ = ["Splitter", "Tally"]

FIRST_SLICE = 100
SLICE = 1_000
MAX_SLICE_BYTES = 4_000_000
SLICE_S = 0.5
KEPT_PROBLEMS = 1_000


@dataclass(slots=True)
class Tally:
    """What a split came to, for whoever waits for it: ``problems`` are the first thousand."""

    accepted: int = 0
    rejected: int = 0
    problems: list[Problem] = field(default_factory=list)
    error: InputError | None = None


@dataclass(slots=True)
class _Slice:
    items: list[NewItem] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    cursor: int = 0
    size: int = 0
    begun: float = 0.0


class Splitter:
    """Splits lists into the ledger.

    ``on_slice`` is called after each committed slice (the dispatcher's nudge). ``lease_s`` is how long a split may be
    silent before somebody else takes it up.
    """

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        uploads: Uploads,
        limits: Limits,
        *,
        lease_s: float,
        on_slice: Callable[[], None] = lambda: None,
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._uploads = uploads
        self._limits = limits
        self._lease_s = lease_s
        self._on_slice = on_slice
        self._log = structlog.get_logger("asynctask.split")

    def split_source(
        self, task_id: int, source: Mapping[str, Any], shape_of: Callable[[Mapping[str, str]], ItemShape], *, after: int = 0
    ) -> Tally:
        """Splits a stored list from the row after ``after`` on, and ends the split: sealed, or failed with the reason.

        ``source`` is what :func:`describe` made. Raises :class:`SplitLost` where another process took over, and
        LedgerUnavailable: then the split stays as it is and is taken up again.
        """
        tally = Tally()
        with self._lease(task_id):
            try:
                shape = shape_of(source.get("columns") or {})
                path = self._uploads.find(str(source["name"]))
                with open_source(
                    path, str(source["filename"]), sheet=source.get("sheet"), limits=self._limits, expect=shape.expected
                ) as opened:
                    binding = shape.bind(opened.headers) if opened.headers is not None else None
                    if opened.planned is not None:
                        task_rows.plan(self._ledger, task_id, opened.planned)
                    self._split(task_id, (shape.validate(row, binding) for row in opened.rows(after)), tally, after)
                task_rows.seal(self._ledger, task_id)
            except InputError as error:
                tally.error = error
                task_rows.fail_split(self._ledger, task_id, f"{error.code}: {error}")
        self._on_slice()
        return tally

    def split_items(self, task_id: int, items: Iterable[Any], shape: ItemShape) -> Tally:
        """Splits items of a program, consumed one by one, in the caller's thread; what the iterable raises is raised on."""
        tally = Tally()
        rows = (shape.validate(RawRow(i, item), None) for i, item in enumerate(items, 1))
        with self._lease(task_id):
            try:
                self._split(task_id, rows, tally)
            except (SplitLost, LedgerUnavailable):
                raise
            except BaseException as error:
                task_rows.fail_split(self._ledger, task_id, f"the items ended with {type(error).__name__}: {error}")
                raise
            task_rows.seal(self._ledger, task_id)
        self._on_slice()
        return tally

    # -- slices

    def _split(self, task_id: int, rows: Iterable[Accepted | Refused], tally: Tally, after: int = 0) -> None:
        current = _Slice(begun=self._clock.monotonic())
        largest = FIRST_SLICE
        for row in rows:
            _add(current, row, tally)
            if self._full(current, largest):
                self._commit(task_id, current, after)
                after = current.cursor
                current = _Slice(begun=self._clock.monotonic())
                largest = SLICE
            if tally.accepted + tally.rejected > self._limits.max_rows:
                raise InputError(
                    f"more than {self._limits.max_rows:,} items (max_rows); split the list, or have the operator raise"
                    " ASYNCTASK_MAX_ROWS",
                    code="too_many_rows",
                    status=413,
                )
        if current.items or current.rejects:
            self._commit(task_id, current, after)

    def _full(self, current: _Slice, largest: int) -> bool:
        count = len(current.items) + len(current.rejects)
        slow = count % 16 == 0 and self._clock.monotonic() - current.begun > SLICE_S
        return count >= largest or current.size > MAX_SLICE_BYTES or slow

    def _commit(self, task_id: int, current: _Slice, after: int) -> None:
        task_rows.add_slice(
            self._ledger, task_id, current.items, current.rejects,
            after=after, cursor=current.cursor, lease_s=self._lease_s,
        )  # fmt: skip
        self._on_slice()

    @contextmanager
    def _lease(self, task_id: int) -> Iterator[None]:
        """Renews the split's lease while rows are slow in coming: a large workbook is silent while it is unpacked."""
        stop = threading.Event()

        def renew() -> None:
            while not stop.wait(self._lease_s / 3):
                try:
                    if task_rows.claim_split(self._ledger, task_id, lease_s=self._lease_s) is None:
                        return
                except LedgerUnavailable as error:
                    self._log.warning("split_lease_not_renewed", task_id=task_id, error=str(error))

        thread = threading.Thread(target=renew, name="split-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(5)


def _add(current: _Slice, row: Accepted | Refused, tally: Tally) -> None:
    current.cursor = row.row
    if isinstance(row, Accepted):
        params = dumps(row.item)
        current.items.append(NewItem(params, row.row))
        current.size += len(params)
        tally.accepted += 1
        return
    errors = [{k: v for k, v in problem.as_dict().items() if k != "row"} for problem in row.problems]
    current.rejects.append(Reject(row.row, errors, row.values))
    tally.rejected += 1
    if len(tally.problems) < KEPT_PROBLEMS:
        tally.problems += row.problems
