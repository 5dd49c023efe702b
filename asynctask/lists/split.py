"""Splits lists into Events, slice by slice: jobs of the first slices run while later rows are still read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from asynctask.clock import Clock
from asynctask.core.states import Reason
from asynctask.errors import Conflict, InputError, LedgerUnavailable
from asynctask.iterable import MAX_SLICE_BYTES as MAX_JOB_BYTES
from asynctask.iterable import chunk_of, pack
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, NewItem, Reject
from asynctask.ledger.tasks import First, Made, NewTask, SplitLost
from asynctask.lists.items import ItemShape, Rejected
from asynctask.lists.problems import stored
from asynctask.lists.readers import Limits
from asynctask.lists.rows import ListSource, Names, OpenList, open_list, restored, still_failed, too_many_items
from asynctask.lists.uploads import Uploads
from asynctask.logs import get_logger
from asynctask.messages import clean

FIRST_SLICE = 100
SLICE = 1_000
MAX_SLICE_BYTES = 4_000_000
SLICE_S = 0.5
_JOBS_OF_SLICE: Final = 100
"""Jobs of several items that are written together at least."""

MAX_WHOLE_BYTES = 256_000
"""A larger list is never validated before its Task is made."""
WHOLE_S = 0.25
"""Nor is a list that takes longer than these seconds: its sender is answered that validation goes on."""

KEPT_FAULTS = 100
"""Faults of the list as a whole (missing columns, for instance) kept with the reason of its refusal."""


@dataclass(slots=True)
class _Slice:
    items: list[NewItem] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    cursor: int = 0
    size: int = 0
    begun: float = 0.0
    after: int = 0
    open: list[NewItem] = field(default_factory=list)  # the items of the job that is not full yet
    open_size: int = 0
    count: int = 0  # rows, accepted or refused
    more: bool = True  # False for the last of a list

    def close_job(self) -> None:
        """Makes a job of the open items."""
        if len(self.open) == 1:
            self.items += self.open
        elif self.open:
            rows = [each.row for each in self.open]
            params = pack(rows, [each.params for each in self.open])
            search = [(field, value, each.row) for each in self.open for field, value, _ in each.search]
            self.items.append(NewItem(params, rows[0], items=len(rows), last_row=rows[-1], search=search))
        self.open, self.open_size = [], 0

    def begins(self, new: NewTask, names: Names, *, strict: bool = False) -> First:
        """The Task with this as its first slice; of a ``strict`` list that is all of it, a refused one has no jobs."""
        refused = strict and bool(self.rejects)
        new, items = (new, self.items) if self.more else (replace(new, planned=self.count), () if refused else self.items)
        return First(new, items, self.rejects, self.cursor, names.as_json(), self.more, refused)


class Splitter:
    """Splits lists into the ledger.

    ``lease_s``: seconds without a renewal after which another process may take the split over.
    """

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        uploads: Uploads,
        limits: Limits,
        *,
        lease_s: float,
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._uploads = uploads
        self._limits = limits
        self._lease_s = lease_s
        self._log = get_logger("asynctask.split")

    def split_source(
        self,
        task_id: int,
        source: ListSource,
        shape_of: Callable[[Mapping[str, str]], ItemShape],
        *,
        after: int = 0,
        created: int = 0,
        chunk_size: int = 1,
        planned: int | None = None,
    ) -> None:
        """Splits a stored list after the row ``after``, and ends the split: sealed, or failed with a reason.

        ``created``: items that exist already; for a strict list a number above 0 means that every row was accepted before.
        Raises :class:`SplitLost` where another process took over, and LedgerUnavailable; then the split stays as it is and
        is resumed later.
        """
        names = Names("items" if source.items else "list", task_rows.read(self._ledger, task_id).headers if after else {})

        def read(opened: OpenList, after: int) -> Iterator[NewItem | Rejected]:
            if source.items:
                return noted(opened.checked(after), names)
            rows = opened.checked(after, names)
            if opened.resubmit_of is None or opened.shape.model is not None:
                return rows
            return restored(self._ledger, opened.resubmit_of, rows)

        def whole(opened: OpenList) -> Iterator[NewItem | Rejected]:
            rows = read(opened, 0)
            return rows if opened.resubmit_of is None else still_failed(self._ledger, opened.resubmit_of, rows)

        with self._lease(task_id):
            try:
                with open_list(self._uploads, self._limits, source, shape_of(source.columns)) as opened:
                    planned = opened.planned or planned
                    chunks = _Chunks(chunk_size, planned, created)
                    if opened.planned is not None:
                        task_rows.plan(self._ledger, task_id, opened.planned)
                    if source.strict and not created and (count := self._refused(task_id, whole(opened), names, after)):
                        task_rows.end_split(self._ledger, task_id, Reason.ROWS_REJECTED, planned=count)
                        self._clear(task_id, source)
                        return
                    rows = read(opened, after)
                    slices = self._slices(_still_good(rows) if source.strict else rows, chunks, self._sizes(), after=after)
                    self._write(task_id, slices, names)
                task_rows.end_split(self._ledger, task_id, Reason.SEALED)
            except InputError as error:
                detail: dict[str, Any] = {}
                if error.text or error.params:
                    detail = {"text": error.text, "params": error.params}
                if error.errors:
                    detail["errors"] = [{"row": each.row, **stored(each)} for each in error.errors[:KEPT_FAULTS]]
                why = f"{error.code}: {error}"
                task_rows.end_split(self._ledger, task_id, Reason.SPLIT_FAILED, why=why, detail=detail or None)
        self._clear(task_id, source)

    def _clear(self, task_id: int, source: ListSource) -> None:
        """Removes a list that was stored only to be split. After an error here, maintenance removes it."""
        if not source.items:
            return
        try:
            self._uploads.remove(source.name)
            task_rows.forget_sources(self._ledger, [task_id])
        except (OSError, LedgerUnavailable) as error:
            self._log.warning("upload_not_removed", task_id=task_id, error=str(error))

    def split_items(
        self, new: NewTask, rows: Iterable[NewItem | Rejected], create: Callable[[First], Made]
    ) -> tuple[First, Made]:
        """Makes a Task of a program's items, consumed one by one in the caller's thread: ``create`` writes it with the
        first slice. Re-raises what the iterable raises; raises :class:`Conflict` if another process ended the split."""
        names = Names("items", {})
        broken: Exception | None = None
        sizes = self._sizes(whole=new.planned is not None and self.may_fit(new.planned, None))
        slices = self._slices(noted(rows, names), _Chunks(new.chunk_size, new.planned), sizes, planned=new.planned)
        try:
            first = next(slices).begins(new, names)
        except Exception as error:  # the Task says why it has no item
            first, broken = First(new), error
        made = create(first)
        if not (made.created and first.more):
            return first, made
        with self._lease(made.task_id):
            try:
                if broken is not None:
                    raise broken
                self._write(made.task_id, slices, names)
                task_rows.end_split(self._ledger, made.task_id, Reason.SEALED)
            except SplitLost as lost:
                if lost.reason != "cancelled":  # items are missing: the caller must know
                    raise Conflict(
                        f"Task {made.task_id} did not take every item: {lost.reason}; submit the rest again"
                    ) from lost
                self._log.info("split_ended", task_id=made.task_id, reason=lost.reason)
            except LedgerUnavailable:
                raise
            except BaseException as error:
                why = clean(f"the items ended with {type(error).__name__}: {error}")
                task_rows.end_split(self._ledger, made.task_id, Reason.SPLIT_FAILED, why=why)
                raise
        return first, made

    # -- lists that are one slice

    def may_fit(self, count: int | None, size: int | None) -> bool:
        """Whether a list of ``count`` rows and ``size`` bytes (None: unknown) may suit :meth:`gather`."""
        return (count is None or count <= min(SLICE, self._limits.max_rows)) and (size is None or size <= MAX_WHOLE_BYTES)

    def gather(self, new: NewTask, rows: Iterable[NewItem | Rejected], names: Names, *, strict: bool) -> First | None:
        """A Task with its whole list, validated, if that is one slice and takes at most :data:`WHOLE_S`; writes nothing.

        ``new.planned`` is the number of rows, as far as it is known; ``names``: those of the rows, once they are read. None
        for a list that must be split: too large, too slow, or broken; the split meets the error again and records it.
        """
        chunks, sizes = _Chunks(new.chunk_size, new.planned), self._sizes(whole=True)
        try:
            first = next(self._slices(rows, chunks, sizes, planned=new.planned, seconds=WHOLE_S))
        except Exception:  # the split meets the error again and records it
            return None
        return None if first.more else first.begins(new, names, strict=strict)

    # -- strict lists

    def _refused(self, task_id: int, rows: Iterable[NewItem | Rejected], names: Names, after: int) -> int:
        """The number of rows of a list with refused ones, 0 if all are accepted. Writes rejected rows, and nothing else.

        ``rows`` are all rows; the refused ones up to the row ``after`` are in the ledger already.
        """
        # A cursor above 0 without a job means that an earlier attempt has passed rejected rows.
        current, count, refused = _Slice(begun=self._clock.monotonic()), 0, after > 0
        for count, row in enumerate(rows, 1):
            if isinstance(row, Rejected):
                refused = True
                if row.row > after:
                    _add(current, row)
                    if self._full(current, SLICE):
                        self._commit(task_id, current, after, names)
                        after, current = current.cursor, _Slice(begun=self._clock.monotonic())
            self._refuse_too_many(count)
        if current.rejects:
            self._commit(task_id, current, after, names)
        return count if refused else 0

    # -- slices

    def _slices(
        self,
        rows: Iterable[NewItem | Rejected],
        chunks: _Chunks,
        sizes: Iterator[int],
        *,
        after: int = 0,
        planned: int | None = None,
        seconds: float = SLICE_S,
    ) -> Iterator[_Slice]:
        """The slices of a list after the row ``after``. The last one may be empty; a list of ``planned`` rows has its last
        row in it."""
        current, largest = _Slice(begun=self._clock.monotonic(), after=after), next(sizes)
        for count, row in enumerate(rows, 1):
            self._refuse_too_many(count)
            _add(current, row, chunks)
            if current.open or count == planned:
                continue
            if self._full(current, max(largest, chunks.rows_at_once), seconds):
                yield current
                current, largest = _Slice(begun=self._clock.monotonic(), after=current.cursor), next(sizes)
        current.close_job()
        current.more = False
        yield current

    def _write(self, task_id: int, slices: Iterable[_Slice], names: Names) -> None:
        ahead = not self._ledger.database.is_sqlite
        with Writing[_Slice](lambda each: self._commit(task_id, each, each.after, names), ahead=ahead) as writing:
            for each in slices:
                if each.count:
                    writing.add(each)

    def _sizes(self, *, whole: bool = False) -> Iterator[int]:
        """Sizes of successive slices. The first is small, so that jobs begin soon, unless it may be the ``whole`` list. On
        a server later ones are large: the writer waits less often for the gathering thread to release the interpreter."""
        yield SLICE if whole else FIRST_SLICE
        if self._ledger.database.is_sqlite:
            yield from repeat(SLICE)  # a writer blocks every other one
        yield SLICE
        yield from repeat(SLICE * 4)

    def _refuse_too_many(self, count: int) -> None:
        if count > self._limits.max_rows:
            raise too_many_items(self._limits.max_rows)

    def _full(self, current: _Slice, largest: int, seconds: float = SLICE_S) -> bool:
        return (
            current.count >= largest or current.size > MAX_SLICE_BYTES or self._clock.monotonic() - current.begun > seconds
        )

    def _commit(self, task_id: int, current: _Slice, after: int, names: Names) -> None:
        task_rows.add_slice(
            self._ledger,
            task_id,
            current.items,
            current.rejects,
            after=after,
            cursor=current.cursor,
            lease_s=self._lease_s,
            headers=names.as_json(),
        )

    @contextmanager
    def _lease(self, task_id: int) -> Iterator[None]:
        """Renews the split's lease in a thread, for rows may be slow to come: a large workbook unpacks silently."""
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


def _still_good(rows: Iterable[NewItem | Rejected]) -> Iterator[NewItem]:
    """The accepted rows of a strict list, validated a second time. Raises :class:`InputError` if one is refused now."""
    for row in rows:
        if isinstance(row, Rejected):
            first = row.problems[0]
            raise InputError(
                f"row {row.row} was accepted when the list was checked and is refused now ({first.column}:"
                f" {first.message}); what the worker's model says of a row must not depend on anything else"
            )
        yield row


def noted(rows: Iterable[NewItem | Rejected], names: Names) -> Iterator[NewItem | Rejected]:
    """These rows; ``names`` gets those of their items."""
    for row in rows:
        names.add(row.values)
        yield row


@dataclass(slots=True)
class _Chunks:
    """How many items each job of a Task gets; ``created``: items so far."""

    chunk_size: int
    planned: int | None = None
    created: int = 0

    @property
    def size(self) -> int:
        """Items of the next job."""
        return 1 if self.chunk_size == 1 else chunk_of(self.chunk_size, self.planned, self.created)

    @property
    def rows_at_once(self) -> int:
        """Rows that are written together at least."""
        return 0 if self.chunk_size == 1 else self.size * _JOBS_OF_SLICE


_ONE_EACH: Final = _Chunks(1)


def _add(current: _Slice, row: NewItem | Rejected, chunks: _Chunks = _ONE_EACH) -> None:
    current.cursor = row.row
    current.count += 1
    if isinstance(row, NewItem):
        size = len(row.params)
        current.size += size
        if chunks.chunk_size == 1:
            current.items.append(row)
            return
        current.open.append(row)
        current.open_size += size
        if len(current.open) >= chunks.size or current.open_size > MAX_JOB_BYTES:
            chunks.created += len(current.open)
            current.close_job()
    else:
        current.rejects.append(Reject(row.row, [stored(problem) for problem in row.problems], row.values, row.number))


# -- writing ahead

T = TypeVar("T")


class Writing(Generic[T]):
    """Calls ``write`` for each added thing, in order; at most one write is under way and none is queued.

    :meth:`add` itself writes the first, for most lists have one slice. With ``ahead`` a thread writes the others while the
    next is gathered: an error of ``write`` is raised by the next :meth:`add` or at the end of the block, and ends writing.

    .. code-block:: python

        with Writing(commit, ahead=True) as writing:
            for each in slices:
                writing.add(each)
    """

    def __init__(self, write: Callable[[T], None], *, ahead: bool) -> None:
        self._write, self._ahead, self._first = write, ahead, True
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="split-writer")  # its thread begins with the first write
        self._begun: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def add(self, thing: T) -> None:
        """Waits for the previous write, then writes ``thing`` or starts its write."""
        self._wait()
        if self._first or not self._ahead:
            self._first = False
            self._write(thing)
        else:
            self._begun = self._pool.submit(self._write, thing)

    def _wait(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.result()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None) -> None:
        try:
            # A failed write says more than the error that ended the gathering, except at the end of the program.
            if error is None or isinstance(error, Exception):
                self._wait()
        finally:
            self._pool.shutdown()
