"""A dry run: the validation of a submission without any writing.

A large list is validated in a child process, where it would be split too: its memory does not stay with the server, and it
can be ended at any point.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import orjson

from asynctask.errors import InputError, Problem, Unavailable
from asynctask.ledger.base import Ledger, NewItem
from asynctask.lists.items import ItemShape, Rejected
from asynctask.lists.problems import refused_list, render
from asynctask.lists.readers import Limits, RawRow, Source
from asynctask.lists.readers.base import normalise
from asynctask.lists.rows import ListSource, open_list, still_failed, too_many_items
from asynctask.lists.uploads import Uploads
from asynctask.lists.written_cells import SHEET_COLUMNS
from asynctask.messages import MASK

KEPT_PROBLEMS: Final = 1_000
"""Largest number of problems that a response names."""

FIRST_ITEMS: Final = 5
_ALIVE_EVERY: Final = 500


class DryRunTimeout(Unavailable):
    """A dry run took longer than ``dry_run_s``."""

    code = "dry_run_timeout"
    status = 504

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the list could not be checked within {seconds:g} s (dry_run_s); check a part of it, hand it in without"
            " dry_run, or have the operator raise ASYNCTASK_DRY_RUN_S"
        )


class Elsewhere(Protocol):
    """Validates in a child process: order and answer are one JSON object each; None if no child is available. ``alive`` is
    called meanwhile, and an exception that it raises ends the child."""

    def __call__(self, order: bytes, seconds: float, alive: Callable[[], None]) -> bytes | None: ...


class CheckedRow(NamedTuple):
    """A row of a list with its cells by header, secrets masked, and what validation made of it."""

    cells: Any
    found: NewItem | Rejected


class Marking(NamedTuple):
    """A copy of the list that a check writes: to ``path``, with the faults in the language ``locale``."""

    path: str
    locale: str


Mark = Callable[[Marking, Sequence[str], Iterator[CheckedRow]], None]
"""Writes the copy: the headers of the list, and its rows, all of which it has to read."""


@dataclass(slots=True)
class DryRun:
    """The result that a list would have.

    ``accepted`` and ``rejected`` count rows; ``problems`` are the first 1,000, ``truncated`` if there are more;
    ``first_items`` are up to five items as the worker would get them (of a model, a dict by field name), with secrets
    masked.
    ``strict``: one rejected row refuses all.
    """

    accepted: int = 0
    rejected: int = 0
    problems: list[Problem] = field(default_factory=list)
    truncated: bool = False
    first_items: list[Any] = field(default_factory=list)
    strict: bool = False

    def add(self, row: NewItem | Rejected, shape: ItemShape) -> None:
        if isinstance(row, NewItem):
            self.accepted += 1
            if len(self.first_items) < FIRST_ITEMS:
                self.first_items.append(shape.preview(row))
            return
        self.rejected += 1
        room = KEPT_PROBLEMS - len(self.problems)
        self.problems += row.problems[:room]
        self.truncated = self.truncated or len(row.problems) > room

    @property
    def taken(self) -> int:
        """The number of rows that would become items of a Task."""
        return 0 if self.strict and self.rejected else self.accepted

    def as_dict(self, locale: str = "en") -> dict[str, Any]:
        """JSON-ready, with the problems in a language."""
        return {
            "dry_run": True,
            "accepted": self.taken,
            "rejected": self.rejected,
            "errors": [{**problem.as_dict(), "message": render(problem, locale)} for problem in self.problems],
            "errors_truncated": self.truncated,
            "first_items": self.first_items,
        }


def check_rows(
    rows: Iterable[NewItem | Rejected],
    shape: ItemShape,
    max_rows: int,
    *,
    strict: bool,
    check_time: Callable[[], None] = lambda: None,
) -> DryRun:
    """Validates a list and writes nothing. ``check_time`` is called for each row and may raise.

    Raises :class:`InputError` for a list that is rejected as a whole.
    """
    found = DryRun(strict=strict)
    deque(_counted(rows, found, shape, max_rows, check_time), maxlen=0)
    return _not_empty(found)


def _counted(
    rows: Iterable[NewItem | Rejected], found: DryRun, shape: ItemShape, max_rows: int, check_time: Callable[[], None]
) -> Iterator[NewItem | Rejected]:
    """The rows, which ``found`` has counted."""
    for row in rows:
        check_time()
        found.add(row, shape)
        if found.accepted + found.rejected > max_rows:
            raise too_many_items(max_rows)
        yield row


def _not_empty(found: DryRun) -> DryRun:
    if not found.accepted and not found.rejected:
        raise refused_list("list.no_items", {})
    return found


def _columns(source: Source, shape: ItemShape, check_time: Callable[[], None]) -> list[str]:
    """The columns of a copy of the list. Those without a header are in it only where the worker gets them too."""
    names = dict.fromkeys(source.headers or ())
    if source.headers is None or shape.model is None:
        for raw in source.rows():
            check_time()
            if len(names) < SHEET_COLUMNS:
                names.update(dict.fromkeys(raw.values if isinstance(raw.values, Mapping) else ("value",)))
    return [str(name) for name in names]


def _with_cells(rows: Iterable[NewItem | Rejected], raws: deque[RawRow], shape: ItemShape) -> Iterator[CheckedRow]:
    """The rows with their cells; ``raws`` are those that were read, up to the current one or somewhat further."""
    for row in rows:
        while (raw := raws.popleft()).number != row.row:
            pass
        cells = raw.values if isinstance(raw.values, Mapping) else {"value": raw.values}
        hidden = [name for name in cells if normalise(str(name)) in shape.secret_names] if shape.secret_names else ()
        yield CheckedRow({**cells, **{name: MASK for name in hidden if cells[name] is not None}}, row)


class Checker:
    """Validates stored lists; one may take at most ``seconds``."""

    def __init__(
        self, ledger: Ledger, uploads: Uploads, limits: Limits, *, seconds: float, elsewhere: Elsewhere, mark: Mark
    ) -> None:
        self._ledger, self._uploads, self._limits, self._clock = ledger, uploads, limits, ledger.clock
        self._seconds = seconds
        self._elsewhere = elsewhere
        self._mark = mark

    def check(
        self,
        source: ListSource,
        worker_name: str,
        shape: ItemShape,
        *,
        large: bool,
        marking: Marking | None = None,
        alive: Callable[[], None] = lambda: None,
    ) -> DryRun:
        """Validates a stored list, a ``large`` one in a child process; with ``marking`` it also writes a copy. ``alive`` is
        called meanwhile, and an exception that it raises ends the check.

        Raises :class:`InputError` for a list that is rejected as a whole, :class:`DryRunTimeout`, and
        :class:`Unavailable` if the child ended without an answer.
        """
        if large:
            order = orjson.dumps({"worker": worker_name, "source": source.as_json(), "marking": marking and [*marking]})
            answer = self._elsewhere(order, self._seconds, alive)
            if answer is not None:
                return _from_json(answer)
        return self.check_here(source, shape, marking, alive)

    def check_here(
        self,
        source: ListSource,
        shape: ItemShape,
        marking: Marking | None = None,
        alive: Callable[[], None] = lambda: None,
    ) -> DryRun:
        """Validates a stored list in this process. Raises as :meth:`check`; checks the time after each row."""
        until, count = self._clock.monotonic() + self._seconds, 0

        def check_time() -> None:
            nonlocal count
            if self._clock.monotonic() > until:
                raise DryRunTimeout(self._seconds)
            if (count := count + 1) % _ALIVE_EVERY == 1:
                alive()

        raws: deque[RawRow] = deque()
        with open_list(self._uploads, self._limits, source, shape, check_time) as opened:
            rows = opened.checked(seen=None if marking is None else raws.append)
            if source.resubmit_of is not None:
                rows = still_failed(self._ledger, source.resubmit_of, rows)
            found = DryRun(strict=source.strict)
            counted = _counted(rows, found, shape, self._limits.max_rows, check_time)
            if marking is None:
                deque(counted, maxlen=0)
            else:
                self._mark(marking, _columns(opened.source, shape, check_time), _with_cells(counted, raws, shape))
            return _not_empty(found)

    def answer(self, source: ListSource, shape: ItemShape, marking: Sequence[str] | None) -> bytes:
        """The child's answer: the result of :meth:`check_here`, or its error, as JSON."""
        try:
            found = self.check_here(source, shape, None if marking is None else Marking(*marking))
        except InputError as error:
            return orjson.dumps(error.as_json())
        except DryRunTimeout:
            return orjson.dumps({"seconds": self._seconds})
        return orjson.dumps(found)


def _from_json(answer: bytes) -> DryRun:
    try:
        result = orjson.loads(answer)
    except orjson.JSONDecodeError:
        raise Unavailable(
            "the process that checked the list ended without an answer; is the list too large for this machine's memory?"
        ) from None
    if "seconds" in result:
        raise DryRunTimeout(result["seconds"])
    if "code" in result:
        raise InputError.from_json(result)
    problems = [Problem(**each) for each in result["problems"]]
    return DryRun(**{**result, "problems": problems})
