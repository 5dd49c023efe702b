"""The handle of a Task, for programs, the web API and the command line."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from asynctask.brokers.admin import MAX_PAGE
from asynctask.clock import Clock
from asynctask.core.states import State, Status
from asynctask.dispatch.control import TaskControls
from asynctask.errors import Conflict, InputError, NotFound, Problem
from asynctask.exports.run import MERGER
from asynctask.job import context_of
from asynctask.ledger import additions, queries
from asynctask.ledger import progress as progress_rows
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger
from asynctask.ledger.foreign import engine_of
from asynctask.ledger.progress import Counts, Progress
from asynctask.ledger.queries import ListedEvent, Take
from asynctask.lists.items import MIXED, ItemShape
from asynctask.lists.problems import localised, refusal, revived
from asynctask.lists.readers import Limits
from asynctask.lists.uploads import Uploads
from asynctask.worker import WEBHOOK, Worker

if TYPE_CHECKING:
    from asynctask.reports.report import ListColumn, Report

__all__ = ["ListedEvent", "Progress", "Services", "TaskHandle", "event_cursor"]

_PROBLEMS = (str(Status.FAILED), str(Status.ERROR))

MOST_ROWS: Final = 200
"""Most rows that a retry or a report takes by their numbers."""


_POSITION: Final = re.compile(r"([0-9]{1,19})(?:\.([0-9]{1,19}))?", re.ASCII)


def event_cursor(event: Mapping[str, Any]) -> str:
    """The ``after`` for the page that follows an Event from :meth:`TaskHandle.events`: its id; for a job of several items,
    the id, a point and the row."""
    return str(event["id"]) if event["items"] == 1 else f"{event['id']}.{event['row']}"


def _after(position: int | str | None) -> tuple[int | None, int | None]:
    """The Event and the row of a :func:`event_cursor`."""
    if position is None or isinstance(position, int):
        return position, None
    if (found := _POSITION.fullmatch(position)) is None:
        raise InputError("a position in a list of Events is ID or ID.ROW", code="invalid_query_parameter")
    return int(found[1]), None if found[2] is None else int(found[2])


class NobodyPerforms(Conflict):
    """No process is known that performs a job, so the job is not run again."""

    code = "nobody_performs"


@dataclass(frozen=True, slots=True)
class Addition:
    """What was added to an open Task: the number of its first row in the Task, how many rows were accepted and rejected,
    and the ``problems`` of the first 1,000 rejected ones. ``replayed``: it was added before, under the same idempotency
    key."""

    first_row: int
    accepted: int
    rejected: int
    problems: tuple[Problem, ...] = ()
    replayed: bool = False


@dataclass(frozen=True)
class Services:
    """What a handle works with; made by the application. ``workers``: the registered ones, those of attached engines
    included; ``is_shared``: there is a broker, from which other programs can take jobs; ``waits_for``: code and message of
    the first reason for which a Task waits, empty if it has none; ``add``: as of the application's ``add_items``."""

    ledger: Ledger
    clock: Clock
    control: TaskControls
    uploads: Uploads
    limits: Limits
    workers: Callable[[], Mapping[str, Worker]]
    is_shared: bool
    waits_for: Callable[[int], str]
    add: Callable[..., Addition]

    def refuse_unperformed(self, worker: str, queue: str) -> None:
        """Raises :class:`NobodyPerforms` for a job that would wait for ever: its worker is not registered here, and no
        living process of an engine or in another language works its queue. A program without registered workers, such as
        the command line without ``-A``, cannot know, so nothing is raised there."""
        known = self.workers()
        if not known or worker in known or worker in (MIXED, MERGER, WEBHOOK):
            return
        if engine_of(queue) is not None or self.is_shared:
            with self.ledger.database.read() as connection:
                if queries.other_language(connection, queue, self.ledger.now()) is not None:
                    return
        raise NobodyPerforms(
            f"no worker is registered here as {worker[:200]!r}, and no other program works its queue {queue[:200]!r}:"
            " restart it with the application that has the worker (asynctask -A module:app), or while such a program runs"
        )


def checked_statuses(status: str | Collection[str]) -> tuple[str, ...]:
    """One status or several, as a tuple. Raises :class:`InputError` for an unknown one."""
    statuses = (status,) if isinstance(status, str) else tuple(status)
    if wrong := set(statuses) - {str(s) for s in Status}:
        raise InputError(f"no such status: {', '.join(sorted(wrong))}; there are {', '.join(Status)}")
    return statuses


def checked_rows(rows: Collection[int] | None) -> frozenset[int] | None:
    """Numbers of rows; None for None. Raises :class:`InputError` for none, too many, or what is no number of a row."""
    if rows is None:
        return None
    if not 1 <= len(rows) <= MOST_ROWS:
        raise InputError(f"only_rows: name 1 to {MOST_ROWS} rows, not {len(rows):,}", code="invalid_option")
    for row in rows:
        if not isinstance(row, int) or isinstance(row, bool) or not 1 <= row < 2**63:
            raise InputError(f"only_rows: {row!r} is no number of a row", code="invalid_option")
    return frozenset(rows)


class TaskHandle:
    """One Task. Every method and property may raise :class:`NotFound` and LedgerUnavailable.

    The handle from a submission also has ``created``, False if a Task existed under the idempotency key; ``problems`` of
    its first 1,000 rejected rows, empty during the validation; and ``first_progress``, the progress object as it was
    written, if that is known without a query. Methods that return a list have an argument ``take``, which makes the result
    from an iterator over the rows, which are read as they are consumed; the default ``list`` takes all.
    """

    def __init__(
        self,
        services: Services,
        task_id: int,
        shape: ItemShape | None = None,
        *,
        created: bool = False,
        problems: tuple[Problem, ...] = (),
        first_progress: dict[str, Any] | None = None,
    ) -> None:
        self._s = services
        self._shape = shape
        self.id = task_id
        self.created = created
        self.problems = problems
        self.first_progress = first_progress

    def __repr__(self) -> str:
        return f"<Task {self.id}>"

    def progress(self, errors: bool = False, *, take: Take = list) -> dict[str, Any]:
        """The progress object (docs/reference/http.md).

        ``errors`` adds the first 20 failures as ``errors``, and why a list was rejected as ``refusal``
        (:meth:`refusal_object`).
        """
        with self._s.ledger.database.read() as connection:
            found = progress_rows.progress(connection, [self.id], self._s.ledger.now())
        if not found:
            raise NotFound(f"there is no Task {self.id}")
        if errors:
            found[0]["errors"] = take(queries.event_page(self._s.ledger.database, self.id, _PROBLEMS, limit=20))
            found[0]["refusal"] = self.refusal_object() if found[0]["state"] == State.REJECTED else None
        return found[0]

    @property
    def state(self) -> str:
        """The current state, as in :meth:`progress`: one statement."""
        return str(self.progress()["state"])

    @property
    def context(self) -> dict[str, Any]:
        """The constants that the submission gave to all jobs of the Task; empty without any: one statement."""
        with self._s.ledger.database.read() as connection:
            return context_of(task_rows.get(connection, self.id)["context"])

    @property
    def counts(self) -> Counts:
        """The current number of items by status, and their ``total``, as in :meth:`progress`: one statement."""
        counts: Counts = self.progress()["counts"]
        return counts

    def wait(self, timeout: float | None = None, poll_s: float = 0.1) -> dict[str, Any]:
        """Waits until the Task is done, and returns its progress object. Polls every ``poll_s`` seconds.

        Raises TimeoutError, with state, counts and why it waits, if it is not done after ``timeout`` seconds;
        :class:`InputError` for a ``timeout`` or a pause that is no number.
        """
        clock = self._s.clock
        if poll_s != poll_s or (timeout is not None and timeout != timeout):
            raise InputError("NaN is no time: give seconds")
        until = None if timeout is None else clock.monotonic() + timeout
        pause = threading.Event()
        while True:
            progress = self.progress()
            if progress["done"]:
                return progress
            if until is not None and clock.monotonic() >= until:
                said = ", ".join(f"{name} {count:,}" for name, count in progress["counts"].items() if count)
                said = "; ".join(each for each in (said or "no items yet", self._s.waits_for(self.id)) if each)
                raise TimeoutError(f"Task {self.id} is {progress['state']} after {timeout:g} s: {said}")
            left = threading.TIMEOUT_MAX if until is None else until - clock.monotonic()
            pause.wait(max(0.0, min(poll_s, left, threading.TIMEOUT_MAX)))

    def events(
        self,
        status: str | Collection[str] = (),
        after: int | str | None = None,
        limit: int = 100,
        *,
        text: str | None = None,
        take: Take = list,
    ) -> list[Any]:
        """Events in the order of their creation, only with these statuses if given; for a job of several items, one per
        item.

        ``after``: only those behind the Event of this id, or behind the item that :func:`event_cursor` names; ``limit`` is
        at most 1,000; ``text``: only items whose JSON contains it, in any case. Raises :class:`InputError` for an unknown
        status or an invalid ``after``.
        """
        statuses, (event_id, row) = checked_statuses(status), _after(after)
        with self._s.ledger.database.read() as connection:
            task_rows.get(connection, self.id)
        database, limit = self._s.ledger.database, max(1, min(limit, MAX_PAGE))
        return take(queries.event_page(database, self.id, statuses, after=event_id, after_row=row, limit=limit, text=text))

    def columns(self) -> list[ListColumn]:
        """The columns of the list, in its order: ``name``, the field of the items, and ``header``, its title in the sheet.
        Those known so far, while the list is read; empty if they are too many to be kept."""
        from asynctask.reports.report import columns_of  # as in report()

        return columns_of(task_rows.read(self._s.ledger, self.id), self._shape)

    def error_groups(self) -> list[dict[str, Any]]:
        """Failures grouped by message, the most frequent first, with sample rows."""
        with self._s.ledger.database.read() as connection:
            task_rows.get(connection, self.id)
            return queries.error_groups(connection, self.id)

    def rejects(self, after: int = 0, limit: int = 100, locale: str | None = None, *, take: Take = list) -> list[Any]:
        """Rows that were rejected before queueing: ``row``, ``errors`` ([{column, code, message, value}]), ``cells``.

        The messages are in the language ``locale``, by default the application's.
        """
        with self._s.ledger.database.read() as connection:
            task_rows.get(connection, self.id)
        found = queries.rejects(self._s.ledger.database, self.id, after=after, limit=max(1, min(limit, MAX_PAGE)))
        return take(
            {"row": each.row, "errors": [self._said(problem, locale) for problem in each.errors], "cells": each.cells}
            for each in found
        )

    def _said(self, kept: Mapping[str, Any], locale: str | None) -> dict[str, Any]:
        problem = revived(None, kept, locale or self._s.ledger.catalogue.locale).as_dict()
        return {name: problem[name] for name in ("column", "code", "message", "value")}

    def refusal(self) -> InputError | None:
        """The error of a rejected Task, with the problems of its rows; None if it is not rejected."""
        return refusal(self._s.ledger, self.id)

    def refusal_object(self, locale: str | None = None) -> dict[str, Any] | None:
        """Why a list was rejected: ``code``, ``message`` and the first 20 ``errors`` ([{row, column, code, message,
        value}]), in the language ``locale``, by default the application's; None if the Task is not rejected."""
        error = self.refusal()
        if error is None:
            return None
        said = localised(error, locale or self._s.ledger.catalogue.locale)
        return {"code": said.code, "message": str(said), "errors": [each.as_dict() for each in said.errors[:20]]}

    def log(self, *, take: Take = list) -> list[Any]:
        """The last 1,000 actions on the Task and their authors, the latest first."""
        with self._s.ledger.database.read() as connection:
            task_rows.get(connection, self.id)
        return take(queries.log(self._s.ledger.database, self.id))

    def report(
        self,
        rows: str = "failed",
        locale: str | None = None,
        alive: Callable[[], None] = lambda: None,
        *,
        only_rows: Collection[int] | None = None,
    ) -> Report:
        """The rows ``failed``, ``succeeded``, ``unprocessed``, ``rejected`` or ``all``, in the user's own columns.

        ``only_rows``: of these only the ones with these numbers, at most 200. The texts are in the language ``locale``, by
        default the application's. ``alive`` is called regularly; an exception from it ends the work.
        """
        from asynctask.reports.report import make_report  # imports the writer of workbooks, which few processes need

        said, only = locale or self._s.ledger.catalogue.locale, checked_rows(only_rows)
        how: dict[str, Any] = {"locale": said, "alive": alive, "only_rows": only}
        return make_report(self._s.ledger, self._s.uploads, self._s.limits, self._shape, self.id, rows, **how)

    # -- control: each method returns whether the Task was changed, and raises Conflict if its state forbids that

    def pause(self, who: str = "") -> bool:
        """Pauses the Task: no job starts until it is resumed; running jobs continue."""
        return self._s.control.pause(self.id, who)

    def resume(self, who: str = "") -> bool:
        """Resumes the Task, which starts jobs again."""
        return self._s.control.resume(self.id, who)

    def cancel(self, who: str = "") -> bool:
        """Cancels the Task: no more jobs start, and those that have not begun are cancelled."""
        return self._s.control.cancel(self.id, who)

    def retry(
        self,
        status: Collection[str] = (),
        who: str = "",
        *,
        message: str | None = None,
        limit: int | None = None,
        only_rows: Collection[int] | None = None,
    ) -> bool:
        """Runs items that are ``failed`` or ``error`` (or have the given statuses) again, as a new generation.

        ``message``: only failures of its group (:meth:`error_groups`); ``limit``: at most this many, in the order of the
        list; ``only_rows``: only those with these numbers, at most 200. Returns False if there are none. Raises
        :class:`NobodyPerforms` if no process is known that performs its worker.
        """
        task = task_rows.read(self._s.ledger, self.id)
        self._s.refuse_unperformed(task.worker_name, task.queue)
        statuses = (status,) if isinstance(status, str) else status
        how: dict[str, Any] = {"message": message, "limit": limit, "only_rows": checked_rows(only_rows)}
        return self._s.control.retry(self.id, statuses, who, **how)

    def add(self, items: Iterable[Any], *, idempotency_key: str | None = None, who: str = "") -> Addition:
        """Adds items to an open Task, in one transaction: at most 10,000, and 4 MB of them. Their rows continue the list.

        Items that the worker's model refuses are rejected, as those of a submission. The same ``idempotency_key`` adds the
        same items once. Raises :class:`Conflict` if the Task is sealed, cancelled or was never open; :class:`InputError`,
        :class:`UnknownWorker`.
        """
        return self._s.add(self.id, items, idempotency_key=idempotency_key, who=who)

    def seal(self, who: str = "") -> bool:
        """Ends the additions to an open Task, which ends once its items have."""
        return additions.seal(self._s.ledger, self.id, who=who)

    def run_callbacks(self, who: str = "") -> bool:
        """Runs the failed callbacks again; the Task is ``finalizing`` meanwhile. Returns False while they run."""
        return queries.call_back_again(self._s.ledger, self.id, who=who)

    def update(self, who: str = "", **knobs: Any) -> dict[str, Any]:
        """Sets the knobs ``parallel``, ``interval`` (seconds), ``priority``, ``tolerated_failures`` (10, "5%", "failed:10";
        None: no limit) and ``title``; returns the progress object. A Task that paused itself continues once its failures
        are tolerated."""
        from asynctask.lists.options import checked_knobs  # imports pydantic, which a worker process may not need

        self._s.control.update(self.id, checked_knobs(knobs), who)
        return self.progress()


@dataclass(frozen=True, slots=True)
class Verb:
    """One thing that people do to a Task: the API has a route of it, the command line a command. ``call``: with the handle
    and ``who``; ``title``, ``more``: what it does; ``done``: what was done, for people."""

    name: str
    call: Callable[..., bool]
    title: str
    more: str
    done: str


VERBS: Final = {
    verb.name: verb
    for verb in (
        Verb(
            "pause", TaskHandle.pause, "Start no more jobs of a Task until it is resumed",
            "Running jobs continue. Pausing a paused Task changes nothing.", "paused",
        ),
        Verb("resume", TaskHandle.resume, "Resume a paused Task", "", "resumed"),
        Verb(
            "cancel", TaskHandle.cancel, "Cancel the items of a Task that have not begun",
            "Waiting items become `cancelled`; running ones keep their own outcome.", "cancelled",
        ),
        Verb(
            "retry", TaskHandle.retry, "Run the failed items of a Task again, in a new generation",
            "Without such items nothing changes.", "runs again",
        ),
        Verb(
            "seal", TaskHandle.seal, "Seal an open Task: nothing more is added to it",
            "It ends once its items have. Sealing a sealed Task changes nothing.", "sealed",
        ),
        Verb(
            "callbacks", TaskHandle.run_callbacks, "Run the failed callbacks of a Task again",
            "The Task is `finalizing` until they have ended. While they run, nothing changes.", "its callbacks run again",
        ),
    )
}  # fmt: skip
