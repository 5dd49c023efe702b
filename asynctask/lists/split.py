"""Splitting: from rows to Events, slice by slice, so that jobs of the first slices run while later ones are still read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from asynctask.clock import Clock
from asynctask.errors import InputError, LedgerUnavailable, Problem
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, dumps
from asynctask.ledger.tasks import NewItem, Reject, SplitLost
from asynctask.lists.items import Accepted, ItemShape, Refused
from asynctask.lists.problems import stored
from asynctask.lists.readers import Limits
from asynctask.lists.rows import open_list, too_many_items
from asynctask.lists.uploads import Uploads, is_for_split_only
from asynctask.logs import get_logger
from asynctask.messages import clean

__all__ = ["WHOLE_S", "Splitter", "Tally", "WholeList", "Writing"]

FIRST_SLICE = 100
SLICE = 1_000
MAX_SLICE_BYTES = 4_000_000
SLICE_S = 0.5

MAX_WHOLE_BYTES = 256_000
"""Larger lists are never gone through before their Task is made."""
WHOLE_S = 0.25
"""Nor are those that take so long to be gone through: whoever sent them gets the answer that the validation goes on."""

KEPT_PROBLEMS = 1_000
KEPT_FAULTS = 100
"""Faults of a list as a whole, columns that are missing for instance, that are kept with the reason why it was refused."""


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
    after: int = 0
    tell: bool = False


@dataclass(frozen=True, slots=True)
class WholeList:
    """A list that fits one slice, gone through before anything of it is written.

    ``total``: its rows; ``cursor``: the last of them; ``refused``: it is strict, so that its ``rejects`` refuse it.
    """

    items: list[NewItem]
    rejects: list[Reject]
    problems: list[Problem]
    total: int
    cursor: int
    refused: bool


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
        self._log = get_logger("asynctask.split")

    def split_source(
        self,
        task_id: int,
        source: Mapping[str, Any],
        shape_of: Callable[[Mapping[str, str]], ItemShape],
        *,
        after: int = 0,
        created: int = 0,
    ) -> Tally:
        """Splits a stored list from the row after ``after`` on, and ends the split: sealed, or failed with the reason.

        ``source`` is what the submission kept of the list. ``created``: how many jobs there are already; of a strict list
        that says that every row was found good before. Raises :class:`SplitLost` where another process took over, and
        LedgerUnavailable: then the split stays as it is and is taken up again.
        """
        tally = Tally()
        with self._lease(task_id):
            try:
                shape = shape_of(source.get("columns") or {})
                with open_list(self._uploads, self._limits, source, shape) as opened:
                    if opened.planned is not None:
                        task_rows.plan(self._ledger, task_id, opened.planned)
                    rows = partial(opened.checked, unique=source.get("unique") or ())
                    if source.get("strict") and not created and not self._all_good(task_id, rows(0), tally, after):
                        task_rows.refuse_list(self._ledger, task_id, tally.accepted + tally.rejected)
                        self._clear(task_id, source)
                        return tally
                    tally = Tally()
                    checked = rows(after)
                    self._split(task_id, _still_good(checked) if source.get("strict") else checked, tally, after)
                task_rows.seal(self._ledger, task_id)
            except InputError as error:
                tally.error = error
                said: dict[str, Any] = {}
                if error.text or error.params:
                    said = {"text": error.text, "params": error.params}
                if error.errors:
                    said["errors"] = [{"row": each.row, **stored(each)} for each in error.errors[:KEPT_FAULTS]]
                task_rows.fail_split(self._ledger, task_id, f"{error.code}: {error}", said=said or None)
        self._clear(task_id, source)
        self._on_slice()
        return tally

    def _clear(self, task_id: int, source: Mapping[str, Any]) -> None:
        """Removes a list that was stored only to be split. What fails here is done by the sweep."""
        if not is_for_split_only(source):
            return
        try:
            self._uploads.remove(str(source["name"]))
            task_rows.forget_sources(self._ledger, [task_id])
        except (OSError, LedgerUnavailable) as error:
            self._log.warning("upload_not_removed", task_id=task_id, error=str(error))

    def split_items(self, task_id: int, rows: Iterable[Accepted | Refused]) -> Tally:
        """Splits items of a program, consumed one by one, in the caller's thread; what the iterable raises is raised on."""
        tally = Tally()
        with self._lease(task_id):
            try:
                self._split(task_id, rows, tally)
            except (SplitLost, LedgerUnavailable):
                raise
            except BaseException as error:
                task_rows.fail_split(self._ledger, task_id, f"the items ended with {_said_of(error)}")
                raise
            task_rows.seal(self._ledger, task_id)
        self._on_slice()
        return tally

    # -- lists that fit one slice

    def may_fit(self, count: int | None, size: int | None) -> bool:
        """Whether a list of so many rows and bytes (None: not known before it is gone through) may be one for
        :meth:`gather`."""
        return (count is None or count <= min(SLICE, self._limits.max_rows)) and (size is None or size <= MAX_WHOLE_BYTES)

    def gather(self, rows: Iterable[Accepted | Refused], *, strict: bool) -> WholeList | None:
        """The whole list, if it fits one slice and is gone through at once; writes nothing.

        None where it has to be split: it is too large or too slow, or broken, which the split will find again and record.
        Of a ``strict`` list with a refused row there are only the refused ones.
        """
        current, tally = _Slice(begun=self._clock.monotonic()), Tally()
        try:
            for row in rows:
                count = tally.accepted + tally.rejected
                if count and self._clock.monotonic() - current.begun > WHOLE_S:
                    return None
                _add(current, row, tally)
                if count >= min(SLICE, self._limits.max_rows) or current.size > MAX_SLICE_BYTES:
                    return None
        except Exception:  # the split meets it again, and keeps what it says
            return None
        refused = strict and bool(current.rejects)
        items = [] if refused else current.items
        return WholeList(items, current.rejects, tally.problems, tally.accepted + tally.rejected, current.cursor, refused)

    # -- strict lists

    def _all_good(self, task_id: int, rows: Iterable[Accepted | Refused], tally: Tally, after: int) -> bool:
        """Whether every row of a list is accepted. Refused ones go into the ledger, nothing else does.

        ``rows`` are all rows of the list; what was refused up to the row ``after`` stands in the ledger already.
        """
        current, begun_before = _Slice(begun=self._clock.monotonic()), after > 0
        for row in rows:
            if isinstance(row, Accepted):
                tally.accepted += 1
            elif row.row <= after:
                tally.rejected += 1
            else:
                _add(current, row, tally)
                if self._full(current, SLICE):
                    self._commit(task_id, current, after)
                    after, current = current.cursor, _Slice(begun=self._clock.monotonic())
            self._refuse_too_many(tally)
        if current.rejects:
            self._commit(task_id, current, after)
        # A cursor that has moved while there is no job has moved over refused rows.
        return not tally.rejected and not begun_before

    # -- slices

    def _split(self, task_id: int, rows: Iterable[Accepted | Refused], tally: Tally, after: int = 0) -> None:
        current = _Slice(begun=self._clock.monotonic(), after=after)
        sizes = self._sizes()
        largest = next(sizes)
        ahead = not self._ledger.database.is_sqlite
        told = False
        with Writing[_Slice](lambda each: self._commit(task_id, each, each.after), ahead=ahead) as writing:
            for row in rows:
                _add(current, row, tally)
                if self._full(current, largest):
                    # Who submits dispatches when it is done, which is long after the first jobs could begin.
                    current.tell = bool(current.items) and not told
                    told |= current.tell
                    writing.add(current)
                    current = _Slice(begun=self._clock.monotonic(), after=current.cursor)
                    largest = next(sizes)
                self._refuse_too_many(tally)
            if current.items or current.rejects:
                writing.add(current)

    def _sizes(self) -> Iterator[int]:
        """How large slices are: the first is there soon; where a server writes one while the next is gathered, later ones
        are large, for the writer then waits less often for the gatherer to let it run."""
        yield FIRST_SLICE
        if self._ledger.database.is_sqlite:
            yield from repeat(SLICE)  # who writes keeps every other writer out
        yield SLICE
        yield from repeat(SLICE * 4)

    def _refuse_too_many(self, tally: Tally) -> None:
        if tally.accepted + tally.rejected > self._limits.max_rows:
            raise too_many_items(self._limits.max_rows)

    def _full(self, current: _Slice, largest: int) -> bool:
        count = len(current.items) + len(current.rejects)
        slow = count % 16 == 0 and self._clock.monotonic() - current.begun > SLICE_S
        return count >= largest or current.size > MAX_SLICE_BYTES or slow

    def _commit(self, task_id: int, current: _Slice, after: int) -> None:
        task_rows.add_slice(
            self._ledger, task_id, current.items, current.rejects,
            after=after, cursor=current.cursor, lease_s=self._lease_s, tell=current.tell,
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


def _said_of(error: BaseException) -> str:
    """An error as people read it, with whatever its text holds."""
    return clean(f"{type(error).__name__}: {error}")


def _still_good(rows: Iterable[Accepted | Refused]) -> Iterator[Accepted]:
    """The rows of a strict list, on their way into the ledger after each was found good."""
    for row in rows:
        if isinstance(row, Refused):
            first = row.problems[0]
            raise InputError(
                f"row {row.row} was accepted when the list was checked and is refused now ({first.column}:"
                f" {first.message}); what the worker's model says of a row must not depend on anything else"
            )
        yield row


def _add(current: _Slice, row: Accepted | Refused, tally: Tally) -> None:
    current.cursor = row.row
    if isinstance(row, Accepted):
        params = dumps(row.item)
        current.items.append(NewItem(params, row.row))
        current.size += len(params)
        tally.accepted += 1
        return
    current.rejects.append(Reject(row.row, [stored(problem) for problem in row.problems], row.values))
    tally.rejected += 1
    if len(tally.problems) < KEPT_PROBLEMS:
        tally.problems += row.problems


# -- Writes slices one after the other, each while the next is gathered.

T = TypeVar("T")


class Writing(Generic[T]):
    """Calls ``write`` for each thing that is added, in their order; at most one is being written, and none waits.

    The first is written by :meth:`add` itself, for most lists have no second. With ``ahead`` a thread writes the others:
    what ``write`` raises is raised by the next :meth:`add`, or by the end of the block, and nothing is written after it.

    .. code-block:: python

        with Writing(commit, ahead=True) as writing:
            for each in slices:
                writing.add(each)
    """

    def __init__(self, write: Callable[[T], None], *, ahead: bool) -> None:
        self._write = write
        self._ahead = ahead
        self._first = True
        self._pool: ThreadPoolExecutor | None = None
        self._begun: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def add(self, thing: T) -> None:
        """Waits for the one before, then writes this one or has it written."""
        self._wait()
        if self._first or not self._ahead:
            self._first = False
            self._write(thing)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="split-writer")
        self._begun = self._pool.submit(self._write, thing)

    def _wait(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.result()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None) -> None:
        try:
            # What could not be written says more than what ended the gathering, unless that is the end of the program.
            if error is None or isinstance(error, Exception):
                self._wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
