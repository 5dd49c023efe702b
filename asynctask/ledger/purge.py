"""Purge: removes Tasks that ended long ago, with their rows and files, and jobs without a Task.

A Task is first marked in ``turning``: from then on no query finds it, and no function can reopen it. Its rows are removed
in slices, in one short transaction each, then its file, and the Task's own row last; so the next purge can continue an
interrupted one.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.core.states import OPEN, State
from asynctask.core.transitions import MERGE
from asynctask.database import batches
from asynctask.database.retrying import repeatable
from asynctask.database.tables import (
    events,
    item_errors,
    loans,
    places,
    resubmitted_rows,
    search_values,
    task_additions,
    task_ancestors,
    task_callbacks,
    task_errors,
    task_log,
    task_rejects,
    task_samples,
    task_tallies,
    tasks,
)
from asynctask.errors import InputError, Unavailable
from asynctask.ledger import children, search
from asynctask.ledger.base import PURGING, Ledger, each_free, loads, try_lock
from asynctask.logs import get_logger

ENDED: Final = (State.FINISHED, State.CANCELLED, State.REJECTED)
"""The states of a Task that may be purged."""

SLICE: Final = 1_000
"""Largest number of rows of one transaction, which takes some ten milliseconds."""

REST: Final = 9
"""Pause after a slice, as a multiple of its duration."""

MOST_TASKS: Final = 100
"""Largest number of Tasks that are removed together."""

_t, _e, _x, _r, _c = tasks.c, events.c, item_errors.c, task_rejects.c, task_callbacks.c
_o, _a, _n, _d = resubmitted_rows.c, task_ancestors.c, task_tallies.c, task_additions.c
# Tables whose number of rows does not grow with the items.
_SMALL: Final = (task_tallies, task_errors, task_samples, task_callbacks, loans, places)


@dataclass(frozen=True, slots=True)
class Old:
    """A selection to purge: Tasks that ended before ``before`` (microseconds), filtered by ``owner`` and ``states``;
    without these filters, also jobs without a Task. Raises :class:`InputError` for a state in which a Task has not ended.
    """

    before: int
    states: Sequence[str] = ()
    owner: str | None = None

    def __post_init__(self) -> None:
        if wrong := set(self.states).difference(ENDED):
            raise InputError(
                f"a Task that is {', '.join(sorted(wrong))} cannot be purged; choose of {', '.join(ENDED)}",
                code="invalid_option",
            )

    @property
    def with_jobs(self) -> bool:
        """Whether jobs without a Task are removed, too."""
        return not self.states and self.owner is None

    @property
    def tasks(self) -> Any:
        """The condition on its Tasks, including those that an earlier purge left incomplete."""
        found = (_t.finished_at < self.before) & (_t.turning.is_(None) | (_t.turning == PURGING))
        if self.states:
            found &= _t.state.in_([str(state) for state in self.states])
        return found if self.owner is None else found & (_t.owner == self.owner)

    @property
    def jobs(self) -> Any:
        """The condition on its jobs without a Task; callbacks are removed with their Task instead."""
        ended = _e.status.not_in([str(status) for status in OPEN]) & (_e.finished_at < self.before)
        return _e.task_id.is_(None) & _e.callback_of.is_(None) & ended


@dataclass(slots=True)
class Purged:
    """How much was removed: Tasks, their items' Events and rejected rows, stored files, and jobs without a Task."""

    tasks: int = 0
    events: int = 0
    rejects: int = 0
    files: int = 0
    jobs: int = 0

    def as_json(self) -> dict[str, int]:
        """The numbers, JSON-ready."""
        return asdict(self)


def count_old(connection: Connection, old: Old) -> Purged:
    """How much a purge would remove. An upload counts as one file, and so do all files of an export, wherever they are."""
    number = sa.func.count
    files = number(_t.split_source) + number(sa.case((_t.callbacks.contains(f'"name":"{MERGE}"'), 1)))
    columns = number(), sa.func.sum(_t.created_jobs), sa.func.sum(_t.rejected), files
    found = connection.execute(sa.select(*columns).where(old.tasks)).one()
    jobs = connection.execute(sa.select(number()).where(old.jobs)).scalar_one() if old.with_jobs else 0
    its_tasks, its_events, its_rejects, its_files = (int(each or 0) for each in found)
    return Purged(its_tasks, its_events, its_rejects, its_files, int(jobs))


@dataclass
class Purge:
    """One purge, slice by slice.

    ``remove_file`` removes the stored list named by a Task's ``split_source`` (as JSON), ``remove_export`` the parts and
    the result of an export; both return whether there were any.
    """

    ledger: Ledger
    old: Old
    remove_file: Callable[[dict[str, Any]], bool]
    remove_export: Callable[[str], bool] = lambda export: False
    removed: Purged = field(default_factory=Purged)
    _after: int = 0  # Tasks up to this id are removed, or locked by other transactions
    _batch: list[int] = field(default_factory=list)  # marked Tasks whose rows are being removed
    _tasks_over: bool = False
    _log: Any = field(default_factory=lambda: get_logger("asynctask.purge"))

    def step(self) -> bool:
        """Removes one slice. Returns whether there may be more.

        Raises LedgerUnavailable; the next call continues.
        """
        if not self._batch and not self._tasks_over:
            self._batch = self._mark()
        if self._batch:
            gone = self._events() or self._rejects() or _forget_corrected(self.ledger, self._batch)
            for table in (search_values, task_log):
                gone = gone or _delete_rows(self.ledger, table, self._batch)
            if not (gone or _delete_additions(self.ledger, self._batch)):
                self._end_batch()
            return True
        if not self.old.with_jobs:
            return False
        gone = _delete_events(self.ledger, [], self.old.jobs)
        self.removed.jobs += gone
        return gone > 0

    def rested_step(self) -> bool:
        """:meth:`step`, then a pause :data:`REST` times as long, so that other writers keep nine tenths of the time."""
        clock = self.ledger.clock
        began = clock.monotonic()
        more = self.step()
        if more:
            threading.Event().wait(REST * (clock.monotonic() - began))
        return more

    def _mark(self) -> list[int]:
        """Marks the next Tasks, oldest first; leaves those with locked rows to a later purge."""
        found = sa.select(_t.id).where(self.old.tasks, _t.id > self._after).order_by(_t.id).limit(MOST_TASKS)
        with self.ledger.database.read() as connection:
            ids = [int(i) for (i,) in connection.execute(found)]
        self._tasks_over = not ids
        if not ids:
            return []
        self._after = ids[-1]
        marked: list[int] = []

        def act(connection: Connection, free: list[int]) -> None:
            # Check again under the lock, because a retry may have reopened a Task.
            its = self.old.tasks & _t.id.in_(free)
            connection.execute(tasks.update().where(its).values(turning=PURGING, version=_t.version + 1))
            marked.extend(int(i) for (i,) in connection.execute(sa.select(_t.id).where(its)))

        each_free(self.ledger, ids, act)
        return sorted(set(marked))

    def _events(self) -> int:
        gone = _delete_events(self.ledger, self._batch, _e.task_id.in_(self._batch))
        self.removed.events += gone
        return gone

    def _rejects(self) -> int:
        gone = _delete_rejects(self.ledger, self._batch)
        self.removed.rejects += gone
        return gone

    def _end_batch(self) -> None:
        with self.ledger.database.read() as connection:
            sources = sa.select(_t.split_source).where(_t.id.in_(self._batch), _t.split_source.is_not(None))
            kept = [loads(source) for (source,) in connection.execute(sources)]
        for source in kept:
            try:
                self.removed.files += self.remove_file(source)
            except OSError as error:  # the Task is removed nevertheless; the log names the file, for an administrator
                self._log.warning("file_not_removed", name=source.get("name"), error=str(error))
        self._exports()
        self.removed.tasks += _delete_tasks(self.ledger, self._batch)
        self._log.info("purged", tasks=self._batch, total=self.removed.as_json())
        self._batch = []

    def _exports(self) -> None:
        with self.ledger.database.read() as connection:
            found = connection.execute(sa.select(_t.callbacks).where(_t.id.in_(self._batch), _t.callbacks.is_not(None)))
            exports = [str(each["args"][0]["export"]) for (said,) in found for each in loads(said) if each["name"] == MERGE]
        for export in exports:
            try:
                self.removed.files += self.remove_export(export)
            except (OSError, Unavailable) as error:
                self._log.warning("export_not_removed", name=export, error=str(error))


@repeatable
def _delete_events(ledger: Ledger, task_ids: Sequence[int], which: Any) -> int:
    """Deletes one slice of Events, with the records of their failures, and the callbacks' Events of these Tasks."""
    with ledger.database.write() as connection:
        ids = [int(i) for (i,) in connection.execute(sa.select(_e.id).where(which).limit(SLICE))]
        gone = len(ids)
        if not ids and task_ids:
            called = sa.select(_c.job_id).where(_c.task_id.in_(task_ids))
            callbacks = sa.select(_e.id).where(_e.job_id.in_(called), _e.callback_of.is_not(None))  # a few per Task
            ids = [int(i) for (i,) in connection.execute(callbacks)]
        if ids:
            if not task_ids:
                search.forget_alone(connection, ids)
            connection.execute(item_errors.delete().where(batches.among(connection, _x.event_id, ids)))
            connection.execute(events.delete().where(batches.among(connection, _e.id, ids)))
    return gone


@repeatable
def _delete_rejects(ledger: Ledger, task_ids: Sequence[int]) -> int:
    with ledger.database.write() as connection:
        found = sa.select(_r.task_id, _r.row).where(_r.task_id.in_(task_ids)).order_by(_r.task_id, _r.row).limit(SLICE)
        keys = connection.execute(found).all()
        for task_id, last in dict(map(tuple, keys)).items():  # the last row of each Task
            connection.execute(task_rejects.delete().where(_r.task_id == task_id, _r.row <= last))
    return len(keys)


@repeatable
def _forget_corrected(ledger: Ledger, task_ids: Sequence[int]) -> int:
    """Deletes one slice of the records of rows that these Tasks corrected, or that corrected them. Keeps what the Task at
    the other end needs: that a row was taken, and its number."""
    with ledger.database.write() as connection:
        its = _o.task_id.in_(task_ids) | _o.of_task.in_(task_ids)
        found = connection.execute(sa.select(_o.id, _o.task_id, _o.of_task, _o.taken).where(its).limit(SLICE)).all()
        gone: list[int] = []
        ends: dict[str, list[int]] = {"task_id": [], "of_task": []}
        for row_id, task_id, of_task, taken in found:
            of_kept = of_task is not None and of_task not in task_ids
            if task_id is not None and task_id not in task_ids:
                ends["of_task"].append(row_id)
            elif of_kept and taken:
                ends["task_id"].append(row_id)
            else:
                gone.append(row_id)
        if gone:
            connection.execute(resubmitted_rows.delete().where(batches.among(connection, _o.id, gone)))
        for name, ids in ends.items():
            if ids:
                connection.execute(
                    resubmitted_rows.update().where(batches.among(connection, _o.id, ids)).values({name: None})
                )
    return len(found)


@repeatable
def _delete_rows(ledger: Ledger, table: sa.Table, task_ids: Sequence[int]) -> int:
    """Deletes one slice of a table whose rows have an id."""
    with ledger.database.write() as connection:
        found = sa.select(table.c.id).where(table.c.task_id.in_(task_ids)).limit(SLICE)
        ids = [int(i) for (i,) in connection.execute(found)]
        if ids:
            connection.execute(table.delete().where(batches.among(connection, table.c.id, ids)))
    return len(ids)


@repeatable
def _delete_additions(ledger: Ledger, task_ids: Sequence[int]) -> int:
    with ledger.database.write() as connection:
        found = sa.select(_d.task_id, _d.idempotency_key).where(_d.task_id.in_(task_ids)).limit(SLICE)
        keys = connection.execute(found).all()
        for task_id in {task_id for task_id, _ in keys}:
            own = _d.idempotency_key.in_([key for of, key in keys if of == task_id])
            connection.execute(task_additions.delete().where(_d.task_id == task_id, own))
    return len(keys)


@repeatable
def _delete_tasks(ledger: Ledger, task_ids: Collection[int]) -> int:
    """Deletes these Tasks, and leaves to a later purge those of which another transaction holds a Task that sums them."""
    with ledger.database.write() as connection:
        above = children.above(connection, task_ids)
        corrected = sa.select(_a.task_id, _a.ancestor_id).where(_a.task_id.in_(task_ids))
        summed = [*above, *((int(i), int(ancestor)) for i, ancestor in connection.execute(corrected))]
        sums = sorted({each for _, each in summed}.difference(task_ids))  # the lock order of every transaction
        held = {each for each in sums if try_lock(connection, ledger, each) is None}
        task_ids = set(task_ids).difference(task_id for task_id, each in summed if each in held)
        _keep_mended(connection, task_ids)
        _keep_versions(connection, task_ids, above)
        for table in _SMALL:
            connection.execute(table.delete().where(table.c.task_id.in_(task_ids)))
        gone = connection.execute(tasks.delete().where(_t.id.in_(task_ids), _t.turning == PURGING))
    return int(gone.rowcount)


def _keep_mended(connection: Connection, task_ids: Collection[int]) -> None:
    """Adds the finished items of these Tasks to ``mended`` of the Tasks that they correct, which summed them until now."""
    left = (_a.task_id.in_(task_ids)) & (_a.ancestor_id.not_in(task_ids))
    counted_for = sa.select(_a.ancestor_id, _a.task_id).where(left).order_by(_a.ancestor_id)
    for ancestor, task_id in connection.execute(counted_for).all():
        sums = sa.select(sa.func.coalesce(sa.func.sum(_n.finish), 0), sa.func.coalesce(sa.func.sum(_n.version), 0))
        finished, counted = connection.execute(sums.where(_n.task_id == task_id)).one()
        own = connection.execute(sa.select(_t.version).where(_t.id == task_id)).scalar() or 0
        more = {"mended": _t.mended + int(finished), "version": _t.version + int(counted) + own + 1}
        connection.execute(tasks.update().where(_t.id == ancestor).values(more))
    connection.execute(task_ancestors.delete().where(_a.task_id.in_(task_ids) | _a.ancestor_id.in_(task_ids)))


def _keep_versions(connection: Connection, task_ids: Collection[int], above: Iterable[tuple[int, int]]) -> None:
    """Adds the versions of these Tasks to those of the locked Tasks ``above`` them (pairs, as of :func:`children.above`),
    which summed them until now: who follows a Task ignores an object with a lower version than the last."""
    tops: dict[int, set[int]] = defaultdict(set)
    for task_id, each in above:
        if task_id in task_ids:
            tops[task_id].add(each)
    tops = {task_id: its for task_id, its in tops.items() if its.isdisjoint(task_ids)}
    # A Task that stays below a removed one leaves the sums, too.
    below = children.below(connection, tops)
    counted = sa.select(sa.func.coalesce(sa.func.sum(_n.version), 0)).where(_n.task_id == _t.id).scalar_subquery()
    more = Counter[int]()
    for task_id, version in connection.execute(sa.select(_t.id, _t.version + counted).where(_t.id.in_(tops))):
        lost = int(version) + (below[task_id].version if task_id in below else 0)
        more.update(dict.fromkeys(tops[task_id], lost + 1))
    for task_id, lost in sorted(more.items()):
        connection.execute(tasks.update().where(_t.id == task_id).values(version=_t.version + lost))
