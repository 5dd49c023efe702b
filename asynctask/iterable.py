"""Jobs of many items: worker classes that iterate over elements, and slices, which are several items of a list in one job.

``events.params`` of a slice is ``{"rows": [[first, count], ...], "items": [...]}``: its items, and their rows in the list
as runs of consecutive numbers, since a rejected row leaves a gap. ``events.marks`` has the outcome of each item
(:class:`asynctask.core.transitions.Row`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from collections.abc import Iterable as Several
from contextlib import closing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, final

import orjson

from asynctask.core.states import Status
from asynctask.core.transitions import MARKS, OPEN_MARK, RAISED_MARK, Row, marked, marks_of, worst
from asynctask.job import CurrentJob, current_job, in_this_process, refuse_work, steps_in_this_process
from asynctask.messages import clean


class Iterable:
    """The base of a worker class that processes many elements in one job::

        @app.worker(queue="imports", timeout=None)
        class Import(app.Iterable):
            def items(self, cursor, path):
                for number, line in lines_after(path, cursor or 0):
                    yield line, number

            def each(self, line):
                store(line)

    The job saves its cursor regularly, and stops between two elements when a user stops it, its Task is paused or
    cancelled, or the process must end. Its next attempt, also after a kill, continues behind the last saved cursor: every
    element is performed at least once, and those of the last quarter of a second may be performed twice. The result is
    ``{"items": N}``, the number of elements over all attempts, unless :meth:`on_complete` returns another result.
    """

    NAMES: ClassVar = ("items", "each")

    # -- methods that a worker class defines

    def items(self, cursor: Any, *args: Any) -> Iterator[tuple[Any, Any]]:
        """Yields ``(element, cursor)`` for each element behind ``cursor``, in a fixed order.

        ``cursor`` is None at first, later the cursor yielded with the last finished element: JSON of at most 64 KB, not
        None. ``args`` are those of the job; for a job of a Task, the item.
        """
        raise NotImplementedError

    def each(self, item: Any) -> None:
        """Performs one element. An exception ends the attempt; the retry continues with this element."""
        raise NotImplementedError

    def total(self, *args: Any) -> int | None:
        """The number of elements, shown to users; None: unknown."""
        return None

    def on_start(self) -> None:
        """Called before the first element of the first attempt."""

    def on_resume(self) -> None:
        """Called before the first element of a later attempt that continues from a checkpoint."""

    def on_stop(self) -> None:
        """Called when the attempt stops between two elements, to continue later."""

    def on_complete(self) -> Any:
        """Called after the last element; the return value, if not None, is the job's result."""

    # -- called by the runtime

    @final
    def perform(self, *args: Any) -> Any:
        """Processes the elements; called by the runtime."""
        job = current_job()
        state = job.state if isinstance(job.state, dict) else {}
        cursor, done = state.get("cursor"), int(state.get("items", 0))
        refuse_work(self.on_start() if cursor is None else self.on_resume())  # type: ignore[func-returns-value]
        total = self.total(*args)
        job.progress(done, total)
        with closing(_generator(self.items(cursor, *args))) as elements:
            for element, next_cursor in elements:
                if job.should_stop():  # checked only with another element: after the last one the job just ends
                    self._stop(job)
                refuse_work(in_this_process(self.each, element))
                done += 1
                job.progress(done, total)
                job.checkpoint({"cursor": next_cursor, "items": done})
        result = self.on_complete()
        return {"items": done} if result is None else result

    def _stop(self, job: CurrentJob) -> None:
        refuse_work(self.on_stop())  # type: ignore[func-returns-value]
        job.stop()


def _generator(found: Any) -> Generator[tuple[Any, Any], None, None]:
    """The pairs of :meth:`Iterable.items`, whatever kind of iterable it returned."""
    for pair in steps_in_this_process(found):
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(f"items() must yield (element, cursor), not {type(pair).__name__}")
        yield pair


# -- slices: how many items

AUTO: Final = 0
"""``tasks.chunk_size`` of a Task that was submitted with ``chunk_size="auto"``."""

MAX_CHUNK: Final = 1_000
"""Largest number of items of a slice."""

MAX_SLICE_BYTES: Final = 1_000_000
"""Largest size of the items of a slice as JSON, in bytes, because it is sent as one message."""

_JOBS: Final = 10_000


def chunk_of(chunk_size: int, planned: int | None, created: int) -> int:
    """The number of items of the next job. ``planned``: rows of the list, None if unknown; ``created``: items so far.

    :data:`AUTO` makes about 10,000 jobs, of one item each up to 10,000 items. For a list of unknown length, the first 5,000
    items have a job each, then the slices grow with the list.
    """
    if chunk_size != AUTO:
        return chunk_size
    wanted = created * 2 // _JOBS if planned is None else -(-planned // _JOBS)
    return max(1, min(wanted, MAX_CHUNK))


# -- slices: their stored form


def pack(rows: Sequence[int], params: Several[str]) -> str:
    """The params of a slice, from its rows (ascending) and the JSON text of each item."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and row == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([row, 1])
    return f'{{"rows":{orjson.dumps(runs).decode()},"items":[{",".join(params)}]}}'


def unpack(params: Any) -> tuple[list[int], list[Any]]:
    """The rows and the items of a slice. Raises ValueError for invalid params."""
    try:
        rows = [row for first, count in params["rows"] for row in range(first, first + count)]
        items = list(params["items"])
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"these are not the params of a slice ({type(error).__name__})") from None
    if len(rows) != len(items):
        raise ValueError(f"a slice of {len(items)} items names {len(rows)} rows")
    return rows, items


_STATUSES: Final = {mark: str(status) for status, mark in MARKS.items()}


def item_statuses(marks: str | None, items: int, status: str) -> list[str]:
    """The status of each item of a slice; an open item has that of its job."""
    return [status] * items if marks is None else [_STATUSES.get(mark, status) for mark in marks]


def indexes_of(row: Row, statuses: Collection[str]) -> list[int]:
    """The indexes of a slice's items that ended with one of these statuses."""
    wanted = {MARKS[Status(status)] for status in statuses}
    return [index for index, mark in enumerate(marks_of(row)) if mark in wanted]


# -- one attempt of a slice


class ItemFailure(NamedTuple):
    """Why an item ended ``failed`` or ``error``: its row, a code for programs, a message for users."""

    row: int
    code: str
    message: str


class News(NamedTuple):
    """The current outcomes of a running slice, as states and not as changes, so that writing them twice is harmless. Empty
    for any other job. ``failures``: by index; ``results``: JSON text of row -> result, None if no result was added.
    """

    marks: str | None = None
    failures: Mapping[int, ItemFailure] = MappingProxyType({})
    results: str | None = None


class _Report(NamedTuple):
    item: int
    mark: str
    failure: ItemFailure | None = None
    result: str | None = None
    is_lost: bool = False


@dataclass(slots=True)
class Slice:
    """One attempt of a slice: the items left, and the outcomes of the others.

    ``params``: as sent; ``marks`` and ``kept`` (JSON text of results): from earlier attempts; ``limit``: most bytes of
    results. The worker's thread reports; other threads may :meth:`take` at any time, one at a time.
    """

    params: Any
    marks: str | None
    kept: str | None = None
    limit: int = 65_536
    rows: list[int] = field(init=False)
    items: list[Any] = field(init=False)
    hand: Sequence[int] = ()  # indexes of the items that the worker's function performs now
    delay: int = 0  # of the retry, in microseconds: the longest that the policy gave to an item
    dropped: int = 0  # number of results that were not kept
    begun: bool = False  # an item has an outcome of this attempt
    last_error: tuple[ItemFailure | None, str | None] = None, None  # of an item of this attempt, with its traceback
    _left: dict[int, None] = field(init=False)
    _marks: list[str] = field(init=False)
    _reports: deque[_Report] = field(default_factory=deque)
    _failures: dict[int, ItemFailure] = field(default_factory=dict)
    _results: dict[str, Any] = field(init=False)
    _size: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows, self.items = unpack(self.params)
        self.params = None
        marks = self.marks or OPEN_MARK * len(self.rows)
        if len(marks) != len(self.rows):
            raise ValueError(f"a slice of {len(self.rows)} items has {len(marks)} marks")
        self._marks = list(marks)
        self._left = dict.fromkeys(index for index, mark in enumerate(marks) if mark == OPEN_MARK)
        self._results = orjson.loads(self.kept) if self.kept else {}
        self._size = len(self.kept or "{}")

    # -- the worker's thread

    @property
    def left(self) -> list[int]:
        """The indexes of the items without an outcome that this attempt performs."""
        return list(self._left)

    def is_left(self, index: int) -> bool:
        """Whether an item has no outcome yet."""
        return index in self._left

    def finish(self, index: int, result: str | None = None, *, is_lost: bool = False) -> None:
        """The item returned; ``result``: JSON text; ``is_lost``: the result cannot be stored."""
        self._report(_Report(index, MARKS[Status.FINISH], None, result, is_lost))

    def fail(self, index: int, code: str, message: str) -> None:
        """The business refused the item."""
        self._report(_Report(index, MARKS[Status.FAILED], self._why(index, code, message)))

    def error(self, index: int, code: str, message: str, delay: int | None, traceback: str | None = None) -> None:
        """The item raised; ``delay``: microseconds to its next attempt, None if there is none."""
        self.last_error = self._why(index, code, message), traceback
        if delay is not None:
            self.delay = max(self.delay, delay)
        self._report(_Report(index, MARKS[Status.ERROR] if delay is None else RAISED_MARK, self._why(index, code, message)))

    def _why(self, index: int, code: str, message: str) -> ItemFailure:
        return ItemFailure(self.rows[index], clean(code)[:64] or "failed", clean(message))

    def _report(self, report: _Report) -> None:
        # No lock, because this thread may be interrupted at any step of the worker's function.
        if report.item in self._left:
            self.begun = True
            self._reports.append(report)
            self._left.pop(report.item, None)

    # -- the recording thread

    @property
    def has_news(self) -> bool:
        """Whether an item has an outcome that :meth:`take` has not returned yet."""
        return bool(self._reports)

    def take(self) -> News:
        """The current outcomes of the attempt."""
        added = False
        while self._reports:
            index, mark, failure, result, is_lost = self._reports.popleft()
            self._marks[index] = mark
            self.dropped += is_lost
            if failure is not None:
                self._failures[index] = failure
            if result is not None:
                added |= self._keep(str(self.rows[index]), result)
        results = orjson.dumps(self._results).decode() if added else None
        if len(self.rows) == 1 and results is not None:
            results = orjson.dumps(*self._results.values()).decode()
        return News("".join(self._marks), dict(self._failures), results)

    def _keep(self, row: str, result: str) -> bool:
        size = len(result.encode()) + len(row) + 4
        if self._size + size > self.limit:
            self.dropped += 1
            return False
        self._size += size
        self._results[row] = orjson.Fragment(result)
        return True

    @property
    def waits(self) -> int:
        """How many items wait for the next attempt, by the last :meth:`take` and the reports since."""
        return self._marks.count(RAISED_MARK) + sum(report.mark == RAISED_MARK for report in self._reports.copy())

    @property
    def status(self) -> Status:
        """The status with which the slice ends, by the last :meth:`take`."""
        return worst(marked("".join(self._marks)))

    def count(self, status: Status) -> int:
        """The number of items with this outcome, by the last :meth:`take`."""
        return self._marks.count(MARKS[status])
