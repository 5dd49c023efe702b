"""Operations: queues, retries, scheduled and dead jobs, processes.

One view over the ledger's lists, which without Redis have the untracked jobs, too, and the queues and sets in Redis, which
have these with it. A job of the ledger is named by its job id, one in Redis by the broker's key.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple, TypedDict

from asynctask.brokers.admin import (
    ACTED_AT_ONCE,
    MAX_PAGE,
    MAX_TEXT,
    BrokerOperations,
    Entry,
    Found,
    QueueFacts,
    checked_text,
    checked_window,
    class_of,
    enqueued_at,
    peeked,
    pushed_again,
)
from asynctask.brokers.base import DEAD, RETRY, SCHEDULE, Broker
from asynctask.clock import SECOND, Time, micros, rfc3339
from asynctask.core.states import State, Status
from asynctask.core.transitions import interval_of, next_round
from asynctask.dispatch.outbox import Router
from asynctask.errors import AsyncTaskError, BrokerUnavailable, Conflict, InputError, NormalException, NotFound, OtherEngine
from asynctask.integrations.base import EARLY_S, Engine
from asynctask.job import refuse_work
from asynctask.ledger import additions, history, lending, queries, rates, tasks
from asynctask.ledger import processes as recovery
from asynctask.ledger import progress as progress_rows
from asynctask.ledger.base import chunks, loads
from asynctask.ledger.children import HELD
from asynctask.ledger.events import Failure, group_of
from asynctask.ledger.foreign import engine_of
from asynctask.ledger.progress import shown_template
from asynctask.ledger.queries import LastError, ListedEvent, Take, loads_shown
from asynctask.messages import masked
from asynctask.sidekiq.payload import read_time
from asynctask.task import Services
from asynctask.worker import Worker

MAX_WINDOW: Final = 10_000
"""The furthest end of a page of two merged lists."""

PUT_OFF_MOST_S: Final = 60
"""Seconds for which a job is put off, at most."""

MOVES_S: Final = 5
"""Seconds since its last row ended for which a Task counts as moving."""

_SAID: Final = 300
"""Characters of an error that a reason shows."""

TARGET_S: Final = 60.0
"""Default seconds within which the wanted processes finish what waits."""

_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))

OTHERS_NAMED: Final = 10
"""The most workers that are named of jobs that are left to others, and the most workers and Tasks of a template."""

MOST_TEMPLATES: Final = 100
"""The most templates of errors that are shown."""

HOURS: Final = 24
"""Hours in each of which the jobs of a template are counted."""

MIN_TARGET_S: Final = 1
MAX_TARGET_S: Final = 86_400


# -- what is shown, each kind declared once: for Python, the command line, the API and its document


class BacklogPart(TypedDict):
    """What waits in a queue for one worker at one priority."""

    worker: Annotated[str | None, "Null: jobs without a Task in a foreign queue."]
    priority: Annotated[int | None, "Null: a foreign queue has none."]
    waiting: int
    oldest_s: float | None


class QueueInfo(TypedDict):
    """A queue."""

    name: str
    length: Annotated[
        int, "Jobs in the queue in Redis, or without it the untracked ones in the ledger; others are in `waiting`."
    ]
    latency_s: Annotated[float | None, "Seconds since the job that waits longest was pushed, where it says so."]
    paused: bool
    processes: Annotated[int, "Live processes that work it."]
    unattended: Annotated[bool, "No live process works it."]
    mend: Annotated[str | None, "What to start if no live process works it."]
    engine: Annotated[str | None, "The attached engine that keeps it: it is neither paused nor cleared here."]
    next_worker: Annotated[str | None, "The worker of the next of these jobs."]
    jobs_of_others: Annotated[int, "Of these, jobs that the live processes leave to others. Not in `waiting`."]
    other_workers: Annotated[list[str], "Up to ten workers of these, which the processes do not have."]
    waiting: Annotated[int, "Jobs that could start now, in the ledger and in a foreign queue."]
    tracked: Annotated[int, "Of these, tracked jobs without a Task, in the ledger: listed and cleared with the queue."]
    limited: Annotated[int, "Of these, jobs of Tasks with a `parallel`, which want no more threads than that."]
    oldest_s: Annotated[float | None, "Seconds since the first of these could start, where it is known."]
    rate_per_s: Annotated[float, "Jobs that the processes which work it finish in a second, with those of other queues."]
    workers_wanted: Annotated[int, "Worker processes that would finish `waiting` within `target_s`."]
    backlog: Annotated[list[BacklogPart], "`waiting` by worker and priority."]


class _WaitingJob(TypedDict):
    key: str
    tracked: bool
    job_id: str
    task_id: int | None
    worker: str | None
    args: Any
    args_cut: Annotated[bool, "They are too long to be shown."]
    raw: Annotated[str | None, "The beginning of what is no job."]


class QueuedJob(_WaitingJob):
    """A job in a queue."""

    priority: int
    enqueued_at: Time | None


class WaitingEntry(_WaitingJob):
    """A job that waits for a retry or its time, or that is dead."""

    row: int | None
    queue: str | None
    at: Annotated[Time | None, "When it is due, or died."]
    retries: int
    error: str | None
    error_class: str | None
    created_at: Time | None


class FailureTemplate(TypedDict):
    """Jobs of the retries or the dead whose last errors are alike."""

    id: Annotated[str, "Names the template in actions."]
    template: Annotated[str, "What their messages have in common, with placeholders such as ‹n›."]
    message: Annotated[str, "Of the latest of them."]
    code: str
    count: int
    first_at: Annotated[Time | None, "When the first of them ended; of retries: when its last attempt began."]
    last_at: Annotated[Time | None, "When the latest of them did."]
    hours: Annotated[list[int], "How many of them in each of the last 24 hours, the latest hour last."]
    workers: Annotated[list[str], "Up to ten, the most frequent first."]
    tasks: Annotated[list[int], "Up to ten, the newest first."]
    task_count: int
    sample_job_id: Annotated[str | None, "The latest that is tracked."]


class FailureTemplates(TypedDict):
    """The retries or the dead, grouped by the templates of their errors."""

    templates: Annotated[list[FailureTemplate], "At most 100, the most frequent first."]
    jobs: Annotated[int, "How many jobs were grouped."]
    complete: Annotated[bool, "False if the list may have more."]


class RunningJob(TypedDict):
    """A tracked job that a process runs."""

    job_id: str
    task_id: int | None
    worker: str | None
    started_at: Time | None


class ProcessInfo(TypedDict):
    """A process."""

    identity: str
    kind: Annotated[str, "worker, web, an engine's name; sidekiq: of another program."]
    hostname: str | None
    pid: int | None
    concurrency: int
    busy: int
    jobs: Annotated[
        list[RunningJob], "Tracked jobs that it is known to run, the longest first; one that runs for 0.1 s may be missing."
    ]
    rss: Annotated[int | None, "Bytes."]
    version: Annotated[str | None, "Of AsyncTask, where the process says so."]
    quiet: bool
    alive: bool
    held_s: Annotated[
        float | None,
        "Seconds since its last heartbeat, while it does not answer (`held`): its supervisor says that it exists.",
    ]
    queues: list[str]
    started_at: Time | None
    beat_at: Time | None


class Skipped(TypedDict):
    """An entry that was skipped."""

    key: str
    code: str
    reason: str


class ActionOutcome(TypedDict):
    """The result of an action."""

    done: int
    skipped: Annotated[list[Skipped], "At most 100."]


class Event(ListedEvent):
    """The record of one job, and what can be done about it."""

    last_error: Annotated[LastError | None, "Of the last attempt that raised, which a later one may have mended."]
    traceback: Annotated[str | None, "Of that error, from the worker's own frames on: at most 4 KB."]
    actions: Annotated[
        list[Literal["restart", "kill", "delete", "dismiss", "stop", "start"]], "Those that apply to it now."
    ]
    previous_failed: Annotated[str | None, "The job before it in its Task with an item that ended failed or error."]
    next_failed: Annotated[str | None, "The next such job behind it."]


class ToldEvent(Event):
    """The record of a job that was to be stopped or started."""

    changed: Annotated[bool, "Whether anything changed."]
    detail: Annotated[str, "What is the case."]


class PauseState(TypedDict):
    """A queue after it was paused or unpaused."""

    queue: str
    paused: bool
    changed: bool


class Signalled(TypedDict):
    """The signal that was left for a process."""

    identity: str
    signal: str


@dataclass(slots=True)
class ActionResult:
    """The result of an action: ``done``, the number of jobs it was applied to; ``skipped``: key -> why, at most 100."""

    done: int = 0
    skipped: dict[str, AsyncTaskError] = field(default_factory=dict)

    def skip(self, key: str, reason: AsyncTaskError) -> None:
        """Adds a skipped entry; beyond 100 it does nothing."""
        if len(self.skipped) < 100:
            self.skipped[key] = reason

    def as_dict(self) -> ActionOutcome:
        skipped: list[Skipped] = [{"key": key, "code": e.code, "reason": str(e)} for key, e in self.skipped.items()]
        return {"done": self.done, "skipped": skipped}


@dataclass(frozen=True, slots=True)
class WaitReason:
    """Why no row of a Task begins."""

    code: str
    message: str
    mend: Annotated[str, "What a person can do about it."]


class Operations:
    """The operations of one application. ``dead``: its count of dead jobs; ``engines``: the attached ones by name, whose
    queues are counted; ``workers``: the registered ones by name, whose checks are asked; ``queues``: those that its
    settings name.

    Every method may raise :class:`Unavailable`, and :class:`InputError` for an invalid name, limit or text. ``who`` is
    written to the log of the Tasks concerned. ``take``: as of :class:`TaskHandle`.
    """

    def __init__(
        self,
        services: Services,
        broker: Broker | None,
        dead: queries.DeadCount,
        engines: Mapping[str, Engine] = MappingProxyType({}),
        workers: Mapping[str, Worker] = MappingProxyType({}),
        queues: Collection[str] = (),
    ) -> None:
        self._services = services
        self._dead = dead
        self._queues = queues
        self._workers = workers
        self._engines = engines
        self._router = Router(broker, engines, services.clock)
        self._ledger = services.ledger
        self._admin = None if broker is None else broker.operations

    # -- queues

    def queues(self, *, target_s: float = TARGET_S, only: str | None = None) -> list[QueueInfo]:
        """Every queue that is paused, that a live process works, or in which something waits, those of attached engines at
        the end. ``only``: that one, whatever it is; ``target_s``: the seconds within which the wanted processes would
        finish what waits.

        Raises :class:`InputError` for a ``target_s`` that is not from 1 to 86,400.
        """
        if not MIN_TARGET_S <= target_s <= MAX_TARGET_S:
            raise InputError(
                f"target_s must be from {MIN_TARGET_S:,} to {MAX_TARGET_S:,} seconds, not {target_s:g}", code="out_of_range"
            )
        now = self._ledger.now()
        works = Counter(name for each in self._registered() if each["alive"] for name in set(each["queues"]))
        # The brokers first: jobs pushed after the ledger's count would look unknown to the ledger.
        foreign = {} if self._admin is None else {each.name: each for each in self._admin.queues()}
        foreign |= self._engine_queues(works)
        here, left = self._ledger_queues(now)
        waiting = self._backlog(now, left)
        with self._ledger.database.read() as connection:
            performing = _performing(recovery.list_processes(connection), now)
            paused = lending.paused_queues(connection)
            tracked = queries.single_tracked(connection, now)
        facts = {**here, **foreign}
        facts |= {name: replace(facts.get(name) or QueueFacts(name), paused=True) for name in paused}
        names = facts.keys() | performing.keys() | {each.queue for each in waiting} if only is None else {_queue_name(only)}
        parts = defaultdict[str, list[queries.Backlog]](list)
        for part in waiting:
            parts[part.queue].append(part)

        def shown(name: str) -> QueueInfo:
            its = facts.get(name) or QueueFacts(name)
            backlog = _parts(its if name in foreign else None, parts[name], now)
            count = sum(part["waiting"] for part in backlog)
            processes = performing.get(name, ())
            limited = [each for part in parts[name] for each in part.limited]
            return {
                "name": plain(name),
                "length": its.length,
                "latency_s": _waited_s(its.oldest_at, now),
                "paused": its.paused,
                "processes": works[name],
                "unattended": not works[name],
                "mend": None if works[name] else _to_start(name),
                "engine": engine_of(name),
                "next_worker": its.next_class,
                "jobs_of_others": its.others,
                "other_workers": list(self._others(name, left)) if its.others else [],
                "waiting": count,
                "tracked": tracked.get(name, 0),
                "limited": sum(jobs for jobs, _ in limited),
                "oldest_s": max((part["oldest_s"] for part in backlog if part["oldest_s"] is not None), default=None),
                "rate_per_s": round(sum(each.rate for each in processes), 3),
                "workers_wanted": workers_wanted(count, processes, target_s, limited),
                "backlog": backlog,
            }

        return [shown(name) for name in sorted(names, key=lambda name: (engine_of(name) is not None, name))]

    def keep_history(self, keep_s: float) -> None:
        """Removes a part of the history that is older than ``keep_s`` seconds, and adds what waits and runs now; for
        maintenance."""
        history.purge(self._ledger, keep_s)
        live = [each for each in self._registered() if each["alive"] and each["held_s"] is None and each["concurrency"]]
        waiting = {each["name"]: each["waiting"] for each in self.queues()}
        history.sample(self._ledger, waiting, sum(each["busy"] for each in live), len(live))

    def _ledger_queues(self, now: int) -> tuple[dict[str, QueueFacts], dict[str, dict[str, int]]]:
        """Without Redis, the queues in which untracked jobs wait in the ledger; and by queue and worker how many of them no
        process that works the queue performs."""
        if self._admin is not None:
            return {}, {}
        with self._ledger.database.read() as connection:
            found = queries.untracked_queues(connection, now)
            processes = recovery.list_processes(connection)
        facts, left = dict[str, QueueFacts](), dict[str, dict[str, int]]()
        for each in found:
            others = {
                worker: count
                for worker, count in each.workers.items()
                if _is_registered_nowhere(processes, each.name, worker, now)
            }
            length = sum(each.workers.values())
            facts[each.name] = QueueFacts(
                each.name, length, each.oldest_at, False, each.next_worker or None, sum(others.values())
            )
            left[each.name] = others
        return facts, left

    def _backlog(self, now: int, left: Mapping[str, Mapping[str, int]]) -> list[queries.Backlog]:
        """The jobs that could start now, without those of the ledger that are ``left`` to others."""
        with self._ledger.database.read() as connection:
            found = queries.backlog(connection, now)
        for part in found:
            part.waiting -= left.get(part.queue, {}).get(part.worker, 0)
        return [part for part in found if part.waiting > 0]

    def _others(self, queue: str, left: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
        """The workers of the first jobs of a queue that are left to others, the most frequent first, with their numbers.
        ``left``: those of the ledger, as of :meth:`_ledger_queues`."""
        counts = left.get(queue, {}) if self._admin is None else self._admin.others(queue)
        found = Counter(counts).most_common(OTHERS_NAMED)
        return {plain(name)[:MAX_TEXT]: count for name, count in found}

    def _engine_queues(self, names: Iterable[str]) -> dict[str, QueueFacts]:
        """The queues of attached engines that a process works. Only their lengths are known."""
        queues = {name for name in names if engine_of(name) is not None and self._router.reaches(name)}
        waiting = self._router.waiting(queues) if queues else {}
        return {
            name: QueueFacts(name, sum(waiting.get(name, {}).values())) for name in queues if self._router.reaches(name)
        }

    def jobs(
        self, queue: str, *, after: int = 0, limit: int = 100, newest: bool = False, take: Take = list
    ) -> dict[str, Any]:
        """A page of the jobs without a Task in a queue, the next to run first, and those in Redis before those in the
        ledger: ``jobs``, ``total``, ``next`` (``after`` of the next page, None on the last)."""
        name = self._own_queue(queue)
        checked_window(after, limit)
        there = None if self._admin is None else self._admin.jobs(name, offset=after, limit=limit, newest=newest)
        entries, before = ((), 0) if there is None else (there.entries, there.total)
        count, kept = self._kept_jobs(name, max(0, after - before), limit - len(entries), newest=newest)
        total = before + count
        jobs = take(chain(map(_queued_entry, entries), kept))
        end = after + len(jobs)
        return {"jobs": jobs, "total": total, "next": end if jobs and end < total else None}

    def _kept_jobs(self, queue: str, after: int, limit: int, *, newest: bool) -> tuple[int, Iterator[QueuedJob]]:
        """How many jobs wait in a queue of the ledger, and a page of them; they are read as they are consumed."""
        now = self._ledger.now()
        with self._ledger.database.read() as connection:
            total = queries.queue_length(connection, queue, now)
            found = queries.queue_page(connection, queue, now, offset=after, limit=limit, newest=newest)
        priorities = dict(found)
        rows = queries.listed_rows(self._ledger.database, list(priorities))
        return total, (_queued_row(row, priorities[row["id"]]) for row in rows)

    def delete_jobs(self, queue: str, keys: Sequence[str], *, who: str = "") -> ActionResult:
        """Removes jobs from a queue for good; the items of tracked ones are cancelled."""
        result, queue, wanted = ActionResult(), self._own_queue(queue), wanted_keys(keys)
        with self._ledger.database.read() as connection:
            found = queries.find(connection, queries.in_queue(queue, self._ledger.now()), job_ids(wanted))
        result.done = queries.act_on_waiting(self._ledger, "delete", list(found.values()), who=who)
        for key in wanted:
            if key in found:
                continue
            copy = None if self._admin is None else self._admin.delete_job(queue, key)
            if copy is None:
                result.skip(key, NotFound("it is not in the queue (any more)"))
                continue
            result.done += 1
            if copy.attempt:
                queries.cancel_removed(self._ledger, [copy.key], who=who)
        return result

    def clear_queue(self, queue: str, *, who: str = "") -> ActionResult:
        """Removes all jobs present at the start from a queue, without those of Tasks in the ledger; the items of tracked
        ones are cancelled."""
        queue, result = self._own_queue(queue), ActionResult()
        for ids in self._pages(queries.in_queue(queue, self._ledger.now())):
            result.done += queries.act_on_waiting(self._ledger, "delete", ids, who=who)
        if self._admin is None:
            return result
        left = self._admin.jobs(queue, limit=1).total
        while True:  # at least once: it also removes an empty queue
            removed = self._admin.clear_some(queue, max(1, min(left, ACTED_AT_ONCE)))
            queries.cancel_removed(self._ledger, removed.tracked, who=who)
            result.done += removed.count
            left -= removed.count
            if left <= 0 or not removed.count:
                return result

    def pause(self, queue: str) -> bool:
        """Stops the start of jobs of the queue until :meth:`unpause`: of Tasks, single ones, and those that lie in the
        broker. False if paused already. Raises :class:`NotFound` for a queue that nobody knows."""
        return self._set_paused(self._known_queue(queue), True)

    def unpause(self, queue: str) -> bool:
        """Undoes :meth:`pause`. Raises as it does."""
        return self._set_paused(self._known_queue(queue), False)

    def _set_paused(self, queue: str, paused: bool) -> bool:
        changed = queries.pause_queue(self._ledger, queue, paused)
        if self._admin is not None:  # where tools of other programs see it
            changed |= self._admin.pause(queue) if paused else self._admin.unpause(queue)
        return changed

    def _known_queue(self, queue: str) -> str:
        """The name of a queue of the broker that a setting, a registered worker, a living process, the broker or a job
        names. Raises :class:`NotFound` for any other, which may be misspelt."""
        name = self._own_queue(queue)
        if name in self._queues or any(name in (w.queue, w.options.get("retry_queue")) for w in self._workers.values()):
            return name
        if name in self._paused([name]):
            return name
        if self._admin is not None and any(each.name == name for each in self._admin.queues()):
            return name
        if any(each["alive"] and name in each["queues"] for each in self._registered()):
            return name
        with self._ledger.database.read() as connection:
            if queries.has_queue(connection, name):
                return name
        raise NotFound(
            f"there is no queue {plain(name)!r}: no worker is registered for it, no process works it, and no job is in it"
        )

    def _paused(self, names: Collection[str]) -> set[str]:
        """Those of these queues that are paused: in the ledger, or by another tool in the broker."""
        with self._ledger.database.read() as connection:
            paused = lending.paused_queues(connection)
        return {*names} & paused | (set() if self._admin is None else self._admin.paused(names))

    def _own_queue(self, queue: str) -> str:
        """The name of a queue of the broker. Raises :class:`Conflict` for one that an engine keeps."""
        name, engine = _queue_name(queue), engine_of(queue)
        if engine is not None and (engine in self._engines or any(name in each["queues"] for each in self._registered())):
            raise Conflict(f"{engine} keeps the queue {name}: use its own tools; of a Task, asynctask pause and cancel")
        return name

    # -- why a Task stands still

    def wait_reasons(self, task_id: int) -> list[WaitReason]:
        """Why no row of a Task begins, what is to be mended first.

        Empty while rows run, if none is left, and if nothing keeps the next one from its worker. Of a Task whose callbacks
        wait: why these do not begin. Raises :class:`NotFound`.
        """
        now = self._ledger.now()
        with self._ledger.database.read() as connection:
            task = tasks.get(connection, task_id)
            found = progress_rows.progress(connection, [task_id], now)
            processes = recovery.list_processes(connection)
            silent = {str(each["identity"]): each for each in processes if _held_s(each, now) is not None}
            held = queries.rows_held_by(connection, task_id, silent)
        if not found or found[0]["done"] or found[0]["counts"]["working"] > sum(running for _, running in held.values()):
            return []
        reasons = [_held(silent[identity], rows, now) for identity, (rows, _) in sorted(held.items())]
        return reasons + self._standstill(task, found[0], now)

    def _standstill(self, task: Mapping[str, Any], progress: Mapping[str, Any], now: int) -> list[WaitReason]:
        """Why no further row of a Task (its columns) begins."""
        task_id = task["id"]
        if called := [str(each["job_id"]) for each in progress["callbacks"] if each["status"] == Status.ENQUEUE]:
            return list(dict.fromkeys(reason for job_id in called for reason in self._not_called(job_id)))
        if progress["state"] == State.PAUSED or progress_rows.waits_for_session(task):
            with self._ledger.database.read() as connection:
                waits = progress_rows.waits_for_session(task)
                holder = queries.session_holder(connection, task["session_key"]) if waits else None
            return [_held_back(progress, holder)]
        if progress["state_reason"] == "stopped_jobs":
            mend = "asynctask jobs --resumable lists them, asynctask start JOB starts one"
            return [WaitReason("stopped_jobs", "Only stopped jobs are left", mend)]
        if progress["state_reason"] == progress_rows.WAITS:
            mend = f"asynctask tasks --parent {task_id} lists them"
            return [
                WaitReason(
                    "children", f"Its rows have ended; it waits for {progress['children']['open']:,} Tasks below it", mend
                )
            ]
        if not progress["counts"]["enqueue"]:
            return [_open(task, now)] if progress["split"]["state"] == "open" else []
        queue = str(task["queue"])
        if reasons := self._not_taken(queue) or self._not_due(task, progress, now):
            return reasons
        with self._ledger.database.read() as connection:
            if queries.ended_rows(connection, task_id, now - MOVES_S * SECOND):
                return []  # the start of a short job is not recorded
        reasons = self._of_jobs(task, now) or self._behind_others(queue, task["priority"])
        return reasons + self._beside_others(queue)

    def _not_called(self, job_id: str) -> list[WaitReason]:
        """Why a callback does not begin."""
        event, _ = self._event(job_id)
        if event["due_at"] is None or event["due_at"] <= str(rfc3339(self._ledger.now())):
            return self._not_taken(str(event["queue"]))
        text = f"Its callback {plain(str(event['worker']))} waits for a retry until {event['due_at']}"
        return [WaitReason("retry", text, f"asynctask retries restart {job_id} runs it at once")]

    def _not_taken(self, queue: str) -> list[WaitReason]:
        """Why no process takes jobs of a queue."""
        name, engine = plain(queue), engine_of(queue)
        try:
            alive = [each for each in self._registered() if each["alive"]]
            there = [each for each in alive if queue in each["queues"]]
            paused = engine is None and bool(self._paused([queue]))
        except BrokerUnavailable as error:
            return [WaitReason("broker_away", str(error), "see that it runs")]
        found = []
        if engine is not None and engine in self._engines:
            try:
                self._engines[engine].waiting([queue])
            except BrokerUnavailable as error:
                found.append(WaitReason("broker_away", str(error), "see that it runs"))
        if not there:
            others = ", ".join(sorted({plain(other) for each in alive for other in each["queues"]})[:OTHERS_NAMED])
            text = f"No process works the queue {name}" + (f"; those that run work only {others}" if others else "")
            found.append(WaitReason("no_process", text, _to_start(queue)))
        elif paused:
            found.append(WaitReason("queue_paused", f"The queue {name} is paused", f"asynctask queues unpause {name}"))
        elif all(each["held_s"] is not None for each in there):
            text = f"The processes that work the queue {name} do not answer"
            found.append(WaitReason("held", text, "end them (kill -9), or set held_limit_s, and start others"))
        elif all(each["quiet"] for each in there):
            text = f"The processes that work the queue {name} take no more jobs"
            found.append(WaitReason("quiet", text, "stop them, and start others"))
        return found

    def _not_due(self, task: Mapping[str, Any], progress: Mapping[str, Any], now: int) -> list[WaitReason]:
        """Why no job of a Task (its columns) is due."""
        if task["start_at"] is not None and task["start_at"] > now:
            mend = f"asynctask set {task['id']} start_at=now starts it"
            return [WaitReason("start_at", f"It starts at {rfc3339(task['start_at'])}", mend)]
        interval = interval_of(task["interval_s"])
        at = next_round(task["round_at"], None, 0, interval, now) if interval and task["round_at"] is not None else now
        if at > now:
            mend = f"asynctask set {task['id']} interval=0, for no more rounds"
            return [WaitReason("interval", f"The next round begins at {rfc3339(at)}", mend)]
        with self._ledger.database.read() as connection:
            closed = rates.closed(connection, task["worker_name"], now)
        if closed is not None:
            text = f"The limit {closed.name} permits {closed.rate}; next start in {(closed.opens - now) / SECOND:.1f} s"
            return [WaitReason("rate", text, f"asynctask rates set {closed.name} RATE permits more")]
        if progress["counts"]["enqueue"] != progress["retrying"]:
            return []
        at, count = progress["next_retry_at"], progress["retrying"]
        text = f"The rows that are left ({count:,}) wait for a retry, the first until {at}"
        if errors := progress["retrying_errors"]:
            text += f"; most frequent error: {plain(errors[0]['message'])[:_SAID]}"
        mend = "repair the cause, they go on by themselves; asynctask retries lists them and restarts them at once"
        return [WaitReason("retry", text, mend)]

    def _of_jobs(self, task: Mapping[str, Any], now: int) -> list[WaitReason]:
        """Why jobs of a Task (its columns) were put off, or are held back."""
        with self._ledger.database.read() as connection:
            messages = queries.put_off(connection, task["id"], now)
            blocked = queries.is_blocked(connection, task["id"])
            earlier = queries.earlier_list(connection, task)
            late = queries.due_later(connection, task["id"], now + PUT_OFF_MOST_S * SECOND)
            processes = recovery.list_processes(connection)
        found = [WaitReason("put_off", message, "they are tried again every few seconds") for message in messages]
        queue, worker = str(task["queue"]), str(task["worker_name"])
        if not self._router.knows(queue, worker):
            text = f"{engine_of(queue)} has no {plain(worker)} here"
            found.append(WaitReason("unknown_worker", text, "start a release that has it, or cancel the Task"))
        elif worker != "*" and _is_registered_nowhere(processes, queue, worker, now):
            text = f"No process that works the queue {plain(queue)} registers {plain(worker)}"
            found.append(
                WaitReason("unknown_worker", text, "restart the workers with the code that has it, or cancel the Task")
            )
        if late is not None:
            text = f"Rows wait until {rfc3339(late)}: a clock that was set back since said that it was that late"
            found.append(WaitReason("due_later", text, "asynctask scheduled restart --all starts them"))
        if earlier is not None:
            found.append(_behind(*earlier))
        if blocked:
            mend = "they begin when those have ended; a stopped job has not, nor one whose Task is paused or starts later"
            found.append(WaitReason("key", "Rows wait for earlier jobs of their key", mend))
        return found

    def _behind_others(self, queue: str, priority: int) -> list[WaitReason]:
        """What the processes of a queue do first."""
        now = self._ledger.now()
        backlog = self._backlog(now, self._ledger_queues(now)[1])
        with self._ledger.database.read() as connection:
            those = _performing(recovery.list_processes(connection), now).get(queue, [])
        if before := sum(part.waiting for part in backlog if part.queue == queue and part.priority < priority):
            text = f"Jobs of a smaller priority than {priority} wait in the queue {plain(queue)}, and go first: {before:,}"
            return [WaitReason("priority", text, "give this Task a smaller priority, or start more workers")]
        if those and all(each.busy >= each.concurrency for each in those):
            text = f"All threads that work the queue {plain(queue)} are busy"
            return [WaitReason("busy", text, "wait for them, or start more workers")]
        return []

    def _beside_others(self, queue: str) -> list[WaitReason]:
        """What waits in a queue for workers that its processes lack. It keeps no row of ours, but may be meant for them."""
        here, left = self._ledger_queues(self._ledger.now())
        known = here.values() if self._admin is None else self._admin.queues()
        count = next((each.others for each in known if each.name == queue), 0)
        if not count:
            return []
        names = ", ".join(f"{name or '?'} ({number:,})" for name, number in self._others(queue, left).items())
        text = f"In the queue {plain(queue)} wait jobs that its processes do not perform: {count:,}, for {names}"
        mend = "register these workers, start the program that performs them, or delete the jobs (asynctask queues delete)"
        return [WaitReason("jobs_of_others", text, mend)]

    # -- one tracked job

    def job(self, job_id: str) -> dict[str, Any]:
        """An :class:`Event`. Raises :class:`NotFound`."""
        event, foreign = self._event(job_id)
        actions = [] if foreign else [*self._actions(event), *_stop_or_start(event)]
        with self._ledger.database.read() as connection:
            before, behind = queries.failed_beside(connection, event["task_id"], event["id"])
        found = {**event, "actions": [*actions, "dismiss"] if _is_dead(event) else actions}
        return {**found, "previous_failed": before, "next_failed": behind}

    def _event(self, job_id: str) -> tuple[dict[str, Any], str | None]:
        """An Event, and the other program that alone can run its job, if any."""
        with self._ledger.database.read() as connection:
            event = queries.event(connection, job_id)
            return event, queries.engines(connection, [event["id"]]).get(event["id"])

    def _actions(self, event: Mapping[str, Any]) -> list[str]:
        lone = event["task_id"] is None
        match event["status"]:
            case "enqueue" if event["due_at"] is not None:
                return list(VERBS)
            case "enqueue" if event["waits_for"] is not None:
                return [action for action in VERBS if action != "restart"]
            case "enqueue":
                engine = engine_of(str(event["queue"]))
                return ["delete"] if engine is None or (lone and engine in self._engines) else []
            case "error":
                return ["restart"]
            case "failed" if lone:
                return ["restart"]
        return []

    def act_on_job(self, job_id: str, action: str, *, who: str = "") -> dict[str, Any]:
        """:meth:`act` for one tracked job, wherever it waits; a job that ended ``failed`` without a Task is restarted, too.
        ``dismiss``: of a dead one.

        One that waits in a queue is deleted there: in a queue of an attached engine, through that engine. Returns the Event
        as :meth:`job`. Raises :class:`NotFound`, and :class:`Conflict` with the reason if the action does not apply.
        """
        _refuse_unknown(action, (*VERBS, DISMISS), "action")
        event = self.job(job_id)
        if action == "restart" and action in event["actions"]:
            self._services.refuse_unperformed(str(event["worker"]), str(event["queue"]))
        if action == "restart" and event["status"] in ("error", "failed"):
            done = queries.retry_one(self._ledger, event["id"], who=who, refused_too=True)
        elif action == DISMISS:
            done = bool(queries.dismiss(self._ledger, [event["id"]], who=who))
        elif event["waits_for"] is not None and action == "restart":
            raise Conflict("it waits for earlier jobs of its key, and starts when its turn comes")
        elif event["status"] == "enqueue" and (event["due_at"] or event["waits_for"]) is not None:
            done = bool(queries.act_on_waiting(self._ledger, action, [event["id"]], who=who))
        elif event["status"] == "enqueue" and action == "delete":
            done = self._delete(event, who)
        else:
            raise Conflict(_refusal(event, action))
        if not done:
            raise Conflict(_refusal(self.job(job_id), action))
        return self.job(job_id)

    # -- stopping one tracked job, and starting it again where it was

    def stop_job(self, job_id: str, *, who: str = "") -> dict[str, Any]:
        """Stops one tracked job, until :meth:`start_job`.

        A waiting job is stopped at once. A running one is asked to stop (``stopping``): it does at its next
        ``should_stop()``, and keeps its checkpoint; one that never calls it runs to its end. Returns the Event as
        :meth:`job`, with ``changed`` and ``detail``: if there was nothing to stop, ``detail`` describes the state. Raises
        :class:`NotFound`; :class:`Conflict` if a check of its worker refuses, or another program keeps the job.
        """
        event, foreign = self._event(job_id)
        if (engine := foreign or _kept_by(event)) is not None:
            raise OtherEngine(engine, "stopped")
        if event["status"] not in ("enqueue", "working") or event["stopping"]:
            return self._told(job_id, False)
        self._check("stop", event)
        changed = queries.ask_stop_one(self._ledger, event["id"], who=who)
        event, _ = self._event(job_id)
        # Either this removes it from the foreign queue, or a worker has it, which stops it.
        lies_there = event["status"] == "enqueue" and event["stopping"] and engine_of(str(event["queue"])) is None
        if lies_there and self._removed(event):
            queries.stop_removed(self._ledger, event["id"], event["attempt"])
        return self._told(job_id, changed)

    def start_job(self, job_id: str, *, who: str = "") -> dict[str, Any]:
        """Starts a stopped job again from its checkpoint, and a job that waits for its time now.

        Returns as :meth:`stop_job`. Raises :class:`NotFound`, and :class:`NotNow` for a job that was asked to stop and
        still runs, that runs or has ended, or that a check refuses to start.
        """
        event, foreign = self._event(job_id)
        if (engine := foreign or _kept_by(event)) is not None:
            raise OtherEngine(engine, "started")
        changed = False
        match event["status"]:
            case _ if event["stopping"]:
                raise NotNow("stopping", "it was asked to stop, and its worker has not let go of it yet: try again later")
            case "working":
                raise NotNow("running", "a worker performs it")
            case "stopped":
                self._services.refuse_unperformed(str(event["worker"]), str(event["queue"]))
                self._check("start", event)
                changed = queries.start_one(self._ledger, event["id"], who=who)
            case "enqueue" if event["due_at"] is not None:
                self._services.refuse_unperformed(str(event["worker"]), str(event["queue"]))
                self._check("start", event)
                changed = bool(queries.act_on_waiting(self._ledger, "restart", [event["id"]], who=who))
            case "finish" | "failed" | "error" | "cancelled":
                again = "; restart it to run it again" if "restart" in self._actions(event) else ""
                raise NotNow("finished", f"it ended {event['status']}, and only a stopped job can be started{again}")
        return self._told(job_id, changed)

    def _check(self, action: str, event: Mapping[str, Any]) -> None:
        """Calls the checks of its worker. Raises :class:`Conflict` with the reason of the first that refuses."""
        worker = self._workers.get(str(event["worker"]))
        for check in () if worker is None else worker.checks:
            try:
                reason = refuse_work(check(action, event))
            except NormalException as error:
                reason = str(error)
            if reason:
                raise NotNow("refused", reason)

    def _told(self, job_id: str, changed: bool) -> dict[str, Any]:
        event = self.job(job_id)
        return {**event, "changed": changed, "detail": _standing(event)}

    def _delete(self, event: Mapping[str, Any], who: str) -> bool:
        """Cancels a job that has not begun: in the ledger, or after it was removed from the foreign queue that holds it.
        Raises :class:`Conflict` if a process holds it."""
        with self._ledger.database.read() as connection:
            holder = queries.holder(connection, event["id"])
        if holder is None:
            return queries.cancel_resting(self._ledger, event["id"], who=who)
        if holder and not lending.is_queue_holder(holder):
            raise Conflict(_HELD)
        self._take_back(event)
        return bool(queries.cancel_removed(self._ledger, [(event["job_id"], event["attempt"])], who=who))

    def _take_back(self, event: Mapping[str, Any]) -> None:
        """Removes a job from its foreign queue before it begins. Raises :class:`Conflict` with the reason if it cannot."""
        job_id, queue = event["job_id"], str(event["queue"])
        name = engine_of(queue)
        if name is None:
            if not self._removed(event):
                raise Conflict(_HELD)
            return
        if event["task_id"] is not None:
            raise Conflict(f"it waits in a queue of {name}, and its Task {event['task_id']} with it: cancel the Task")
        engine = self._engines.get(name)
        if engine is None:
            raise Conflict(f"{name} is not attached here: name the application that attaches it (-A module:app)")
        why = f"{name} cannot take back what waits in a queue that its workers work"
        if engine.capabilities.revokes:
            why = engine.revoke(job_id, queue) or ""
        if not why:
            return
        # Without a worker of the queue it cannot have begun. A later one finds it cancelled, unless its message is so young
        # that it begins by that alone.
        if any(each["alive"] and queue in each["queues"] for each in self._registered()):
            raise Conflict(why)
        if str(event["created_at"]) > str(rfc3339(self._ledger.now() - micros(EARLY_S))):
            raise Conflict(f"it was sent just now, and a worker of {name} that starts may begin it: try again in a second")

    def _removed(self, event: Mapping[str, Any]) -> bool:
        """Removes a job from its queue in Redis; returns whether it was there."""
        key = f"{event['job_id']}:{event['attempt']}"
        return self._admin is not None and self._admin.delete_job(str(event["queue"]), key) is not None

    # -- retries, scheduled and dead

    def listed(self, list_name: str, *, after: int = 0, limit: int = 100, take: Take = list) -> dict[str, Any]:
        """A page of ``retries``, ``scheduled`` (next due first) or ``dead`` (latest first): ``entries``, ``total``,
        ``next`` (``after`` of the next page, None on the last).

        Two lists are merged, so a page ends at most 10,000 from the beginning; use :meth:`search` beyond.
        """
        set_name = set_of(list_name)
        checked_window(after, limit)
        if after + limit > MAX_WINDOW:
            raise InputError(f"a page ends at most {MAX_WINDOW:,} from the beginning: search instead", code="out_of_range")
        in_broker = 0 if self._admin is None else self._admin.entries(set_name, limit=1).total
        now = self._ledger.now()
        with self._ledger.database.read() as connection:
            in_ledger = queries.count(connection, set_name, now)
            first = 0 if in_broker else after  # a merge starts at the beginning
            rows = queries.listed_ids(connection, set_name, now, offset=first, limit=after + limit - first)
        found: Iterator[_Listed] = iter(rows)
        if in_broker and self._admin is not None:
            found = self._merged(self._admin, set_name, rows, after, limit)
        entries = take(self._shown(found))
        end, total = after + len(entries), in_ledger + in_broker
        following = bool(entries) and end < min(total, MAX_WINDOW)
        return {"entries": entries, "total": total, "next": end if following else None}

    def _merged(
        self, admin: BrokerOperations, set_name: str, rows: Sequence[_Listed], after: int, limit: int
    ) -> Iterator[_Listed]:
        """The ``limit`` jobs behind the first ``after`` of both lists, which are in order; entries are read as they are
        consumed."""
        newest = set_name == DEAD
        if not rows:
            return self._entries(admin, set_name, after, limit, newest=newest)
        entries = self._entries(admin, set_name, 0, after + limit, newest=newest)
        return islice(heapq.merge(rows, entries, key=_time_of, reverse=newest), after, after + limit)

    def _entries(
        self, admin: BrokerOperations, set_name: str, offset: int, limit: int, *, newest: bool
    ) -> Iterator[_Listed]:
        end = offset + limit
        while offset < end:
            page = admin.entries(set_name, offset=offset, limit=min(MAX_PAGE, end - offset), newest=newest)
            yield from ((each.at, each) for each in page.entries)
            offset += len(page.entries)
            if not page.entries:
                return

    def _shown(self, found: Iterator[_Listed]) -> Iterator[WaitingEntry]:
        """What is shown of these jobs, read as it is consumed; those that are gone meanwhile are left out."""
        while some := list(islice(found, _SHOWN_AT_ONCE)):
            ids = [each for _, each in some if not isinstance(each, Entry)]
            rows = {row["id"]: _listed_row(row) for row in queries.listed_rows(self._ledger.database, ids)}
            for _, each in some:
                if isinstance(each, Entry):
                    yield _listed_entry(each)
                elif each in rows:
                    yield rows[each]

    def search(self, list_name: str, text: str, *, limit: int = 100, take: Take = list) -> dict[str, Any]:
        """Entries of a list that contain ``text``, case-sensitive: ``entries``, and ``complete``, False if there may be
        more."""
        set_name, text = set_of(list_name), checked_text(text)
        checked_window(0, limit)
        found = Found([], True) if self._admin is None else self._admin.find(set_name, text, limit=limit)
        with self._ledger.database.read() as connection:
            now = self._ledger.now()
            rows = queries.listed_ids(connection, set_name, now, limit=limit + 1, text=text)
            complete = found.complete and queries.count(connection, set_name, now) < queries.COUNTED
        both: list[_Listed] = [*rows, *((each.at, each) for each in found.entries)]
        both.sort(key=_time_of, reverse=set_name == DEAD)
        entries = take(self._shown(iter(both[:limit])))
        return {"entries": entries, "complete": complete and len(entries) == len(both)}

    def act(self, list_name: str, action: str, keys: Sequence[str], *, who: str = "") -> ActionResult:
        """Runs entries of a list now (``restart``), moves them to the dead (``kill``) or deletes them (``delete``).

        For a tracked job these are a retry of this job, an end in ``error``, and cancelling its item. ``dismiss`` takes
        tracked jobs, whose outcome stays recorded, from the dead; it skips untracked ones. A lone job of an attached engine
        is pushed to its queue there. Jobs of another program are skipped; raises :class:`OtherEngine` if all are. A restart
        skips jobs of the ledger that nobody performs.
        """
        set_name = checked(list_name, action)
        result, wanted = ActionResult(), wanted_keys(keys)
        if action == DISMISS:
            return self._dismiss(wanted, who)
        with self._ledger.database.read() as connection:
            found = queries.find(connection, queries.in_list(set_name, self._ledger.now()), job_ids(wanted))
            elsewhere = queries.engines(connection, found.values())
        if elsewhere and len(elsewhere) == len(wanted):
            raise OtherEngine(min(elsewhere.values()))
        for job_id, event_id in found.items():
            if event_id in elsewhere:
                result.skip(job_id, OtherEngine(elsewhere[event_id]))
        ours = {job_id: event_id for job_id, event_id in found.items() if event_id not in elsewhere}
        self._act_on_rows(set_name, action, ours, result, who)
        for key in wanted:
            if key not in found:
                self._act_on_entry(set_name, action, key, result)
        return result

    def act_on_all(self, list_name: str, action: str, *, who: str = "") -> ActionResult:
        """:meth:`act` for all entries present at the start. A tracked job's outcome stays recorded: deleting the dead
        removes untracked ones only, and dismissing them takes tracked ones from the list."""
        set_name = checked(list_name, action)
        result, where = ActionResult(), queries.in_list(set_name, self._ledger.now())
        if action == DISMISS:
            for ids in self._pages(where & ~queries.IS_UNTRACKED):
                result.done += queries.dismiss(self._ledger, ids, who=who)
            return result
        if set_name == DEAD and action == "delete":
            for ids in self._pages(where & queries.IS_UNTRACKED):
                result.done += queries.delete_dead(self._ledger, ids)
        else:
            if set_name == DEAD:
                self._retry_dead_tasks(result, who)
                where &= queries.IS_ALONE | queries.AMID_DISMISSED
            for ids in self._pages(where):
                self._act_on_rows(set_name, action, {str(event_id): event_id for event_id in ids}, result, who)
        if self._admin is not None:
            if action == "delete":
                result.done += self._admin.clear(set_name)
            else:
                self._act_on_entries(self._admin, set_name, action, result)
        return result

    def _dismiss(self, keys: Sequence[str], who: str) -> ActionResult:
        """Dismisses dead jobs, whoever ran them: it concerns their records alone."""
        result, dead = ActionResult(), queries.in_list(DEAD, self._ledger.now())
        with self._ledger.database.read() as connection:
            recorded = queries.find(connection, dead & ~queries.IS_UNTRACKED, job_ids(keys))
            others = queries.find(connection, dead & queries.IS_UNTRACKED, job_ids(keys))
        result.done = queries.dismiss(self._ledger, recorded.values(), who=who)
        for key in keys:
            if key not in recorded:
                gone = NotFound("no tracked job of this key is among the dead (any more)")
                result.skip(key, InputError(_UNRECORDED, code="no_record", status=409) if key in others else gone)
        return result

    def _act_on_rows(self, set_name: str, action: str, ids: Mapping[str, int], result: ActionResult, who: str) -> None:
        """Acts on jobs of the ledger, key -> Event id; a restart skips those that nobody performs."""
        if action == "restart":
            ids = self._performed(ids, result)
        if set_name != DEAD:
            result.done += queries.act_on_waiting(self._ledger, action, list(ids.values()), who=who)
            return
        for job_id, event_id in ids.items():
            try:
                if action == "restart":
                    result.done += queries.retry_one(self._ledger, event_id, who=who)
                elif queries.delete_dead(self._ledger, [event_id]):
                    result.done += 1
                else:
                    result.skip(job_id, InputError(_RECORDED, code="outcome_recorded", status=409))
            except Conflict as error:
                result.skip(job_id, error)

    def _performed(self, ids: Mapping[str, int], result: ActionResult) -> dict[str, int]:
        """Those of these jobs, key -> Event id, that somebody performs; skips the others."""
        with self._ledger.database.read() as connection:
            found = queries.performers(connection, ids.values())
        reasons: dict[tuple[str, str], Conflict] = {}
        for each in set(found.values()):
            try:
                self._services.refuse_unperformed(*each)
            except Conflict as error:
                reasons[each] = error
        unperformed = {key: reasons[found[i]] for key, i in ids.items() if i in found and found[i] in reasons}
        for key, reason in unperformed.items():
            result.skip(key, reason)
        return {key: event_id for key, event_id in ids.items() if key not in unperformed}

    def _retry_dead_tasks(self, result: ActionResult, who: str) -> None:
        with self._ledger.database.read() as connection:
            found = queries.dead_tasks(connection, self._ledger.now())
        for task_id, jobs in found:
            try:
                task = tasks.read(self._ledger, task_id)
                self._services.refuse_unperformed(task.worker_name, task.queue)
                if self._services.control.retry(task_id, ("error",), who):
                    result.done += jobs
            except Conflict as error:
                result.skip(f"Task {task_id}", error)

    def _pages(self, where: Any) -> Iterator[list[int]]:
        """The ids of all jobs of the ledger in a list or queue, by id."""
        after = 0
        while True:
            with self._ledger.database.read() as connection:
                ids = queries.ids(connection, where, after=after, limit=ACTED_AT_ONCE)
            if not ids:
                return
            yield ids
            after = ids[-1]

    def _act_on_entry(self, set_name: str, action: str, key: str, result: ActionResult) -> None:
        try:
            entry = None if self._admin is None else self._admin.entry(set_name, key)
            done = 0 if self._admin is None or entry is None else _action(self._admin, action)(set_name, [entry])
        except InputError as error:
            result.skip(key, error)
            return
        result.done += done
        if not done:
            result.skip(key, NotFound("it is not there (any more)"))

    def _act_on_entries(self, admin: BrokerOperations, set_name: str, action: str, result: ActionResult) -> None:
        left, offset = admin.entries(set_name, limit=1).total, 0
        while left > 0 and (entries := admin.entries(set_name, offset=offset, limit=min(left, ACTED_AT_ONCE)).entries):
            sound = [each for each in entries if action != "restart" or self._restartable(set_name, each, result)]
            result.done += _action(admin, action)(set_name, sound)
            left -= len(entries)
            offset += len(entries) - len(sound)

    def _restartable(self, set_name: str, entry: Entry, result: ActionResult) -> bool:
        try:
            pushed_again(set_name, entry, 0)
        except InputError as error:
            result.skip(entry.key, error)
            return False
        return True

    # -- retries and dead, by the templates of their errors

    def templates(self, list_name: str) -> FailureTemplates:
        """The jobs of ``retries`` or ``dead``, grouped by the templates of their last errors.

        Looks at no more than 10,000 rows of the newest 1,000 Tasks that have some, 10,000 jobs without a Task and 10,000 in
        Redis.
        """
        set_name, now = _failing_set(list_name), self._ledger.now()
        found, is_whole = self._failing(set_name)
        groups: dict[str, _Group] = {}
        for each in found:
            if (group := groups.get(each.template_id)) is None:
                group = groups[each.template_id] = _Group(each)
            group.add(each, now)
        largest = sorted(groups.items(), key=lambda item: (-item[1].count, item[0]))
        shown = [group.as_dict(name, self._said(group)) for name, group in largest[:MOST_TEMPLATES]]
        return {"templates": shown, "jobs": sum(group.count for group in groups.values()), "complete": is_whole}

    def act_on_template(
        self, list_name: str, action: str, template: str, *, first: int | None = None, who: str = ""
    ) -> ActionResult:
        """:meth:`act` for the jobs of a template (:meth:`templates`); ``first``: for at most so many, of the newest Tasks.

        Dead jobs of one Task are retried together, as :meth:`TaskHandle.retry` does with ``message``, unless the Task has
        dismissed ones. Raises :class:`NotFound` if no job of the list has the template.
        """
        set_name = _failing_set(list_name, action)
        if first is not None and not 1 <= first <= queries.SCANNED:
            raise InputError(f"first must be from 1 to {queries.SCANNED:,}, not {first}", code="out_of_range")
        chosen = list(islice((each for each in self._failing(set_name)[0] if each.template_id == template), first))
        if not chosen:
            raise NotFound(f"no job of the template {template[:100]!r} is among the {LISTS[list_name].jobs} (any more)")
        result = ActionResult()
        ours = [each for each in chosen if each.entry is None]
        if action == DISMISS:
            return self._dismiss([each.key for each in chosen], who)
        if action == "restart" and set_name == DEAD:
            ours = self._retry_groups(template, ours, first is not None, result, who)
        self._act_on_rows(set_name, action, {each.key: each.event_id for each in ours}, result, who)
        if self._admin is not None:
            entries = [each.entry for each in chosen if each.entry is not None]
            sound = [each for each in entries if action != "restart" or self._restartable(set_name, each, result)]
            for part in chunks(sound, ACTED_AT_ONCE):
                result.done += _action(self._admin, action)(set_name, part)
        return result

    def _retry_groups(
        self, template: str, jobs: Sequence[_Failing], is_limited: bool, result: ActionResult, who: str
    ) -> list[_Failing]:
        """Retries dead jobs of a template Task by Task; returns those that are to be retried one by one."""
        of_tasks: dict[int | None, list[_Failing]] = {}
        for each in jobs:
            of_tasks.setdefault(each.task_id, []).append(each)
        alone = of_tasks.pop(None, [])
        for task_id, its in of_tasks.items():
            assert task_id is not None
            with self._ledger.database.read() as connection:
                message = queries.group_message(connection, task_id, template) if len(its) > 1 else None
            if message is None:
                alone += its
                continue
            try:
                task = tasks.read(self._ledger, task_id)
                self._services.refuse_unperformed(task.worker_name, task.queue)
                limit = len(its) if is_limited else None
                if self._services.control.retry(task_id, ("error",), who, message=message, limit=limit):
                    result.done += len(its)
            except Conflict as error:
                result.skip(f"Task {task_id}", error)
        return alone

    def _failing(self, set_name: str) -> tuple[Iterator[_Failing], bool]:
        """The jobs of the retries or the dead with their last errors, read as they are consumed, and whether these are
        all."""
        with self._ledger.database.read() as connection:
            ids, is_whole = queries.failing_ids(connection, set_name, self._ledger.now())
        found = map(_failing_row, queries.failing_jobs(self._ledger.database, ids))
        if self._admin is None:
            return found, is_whole
        is_whole = is_whole and self._admin.entries(set_name, limit=1).total <= queries.SCANNED
        entries = self._entries(self._admin, set_name, 0, queries.SCANNED, newest=True)
        return chain(found, (_failing_entry(each) for _, each in entries if isinstance(each, Entry))), is_whole

    def _said(self, group: _Group) -> str:
        """The message of the latest error of a group; where only its code is known, that of its last message."""
        latest = group.latest
        if latest.message is not None or latest.entry is not None:
            return latest.message or latest.code
        rows = queries.listed_rows(self._ledger.database, [latest.event_id])
        return next((_listed_row(row)["error"] for row in rows), None) or latest.code

    # -- processes

    def processes(self) -> list[ProcessInfo]:
        """This application's processes, and those of other programs (``kind`` is ``sidekiq``) at the same broker, with the
        jobs that they run."""
        running: dict[str, list[RunningJob]] = {}
        with self._ledger.database.read() as connection:
            for each in queries.running_jobs(connection):
                its = running.setdefault(str(each.process), [])
                its.append(
                    {"job_id": each.job_id, "task_id": each.task_id, "worker": each.worker,
                     "started_at": rfc3339(each.started_at)}
                )  # fmt: skip
        return [{**each, "jobs": running.get(each["identity"], [])} for each in self._registered()]

    def _registered(self) -> list[ProcessInfo]:
        """:meth:`processes`, without their jobs."""
        now = self._ledger.now()
        with self._ledger.database.read() as connection:
            ours = {each["identity"]: each for each in recovery.list_processes(connection)}
        there = () if self._admin is None else self._admin.processes()
        others = {each["identity"]: each for each in there if each["identity"] not in ours}
        return [
            # A process of another program that records here is in both lists; the broker's entry has more members.
            *(
                _process(each, each["kind"], each["lease_until"] > now, loads(each["queues"]), _held_s(each, now))
                for name, each in ours.items()
                if name.removeprefix("sidekiq@") not in others
            ),
            *(_process(each, "sidekiq", True, each["queues"]) for each in others.values()),
        ]

    def monitored(self, *, target_s: float = TARGET_S) -> dict[str, Any]:
        """What there is to monitor: ``queues`` as :meth:`queues`, ``tasks`` (open ones by state), ``dead`` (the length of
        that list), and ``processes`` of this application with their totals, as of their last heartbeats."""
        queues = self.queues(target_s=target_s)
        now = self._ledger.now()
        with self._ledger.database.read() as connection:
            states = queries.open_tasks(connection)
            ours = recovery.list_processes(connection)
        return {
            "queues": queues,
            "tasks": states,
            "dead": self.dead(),
            "processes": [_monitored_process(each, now) for each in ours],
        }

    def dead(self) -> int:
        """How many jobs are dead, as of the last count, which is repeated at most for a twentieth of the time; 100,000 may
        mean more."""
        return self._dead.read() + (0 if self._admin is None else self._admin.entries(DEAD, limit=1).total)

    def signal(self, identity: str, verb: str) -> None:
        """Makes a worker process take no more jobs (``quiet``) or end (``stop``), at its next heartbeat.

        Raises :class:`NotFound`; :class:`Conflict` for a process that takes no jobs.
        """
        _refuse_unknown(verb, SIGNALS, "action")
        found = next((each for each in self._registered() if each["identity"] == identity), None)
        if found is None or not found["alive"]:
            raise NotFound(f"there is no live process {identity[:100]!r}; `asynctask processes` lists them")
        if recovery.is_engine(identity) and found["kind"] != "sidekiq":
            raise Conflict(f"{identity[:100]} is a process of {found['kind']}: quiet and stop it as {found['kind']} has it")
        if found["kind"] not in ("worker", "sidekiq"):
            raise Conflict(f"{identity[:100]} is a {found['kind']} process: it takes no jobs; end it where it was started")
        name, is_foreign = SIGNALS[verb], found["kind"] == "sidekiq" and not recovery.is_engine(identity)
        if self._admin is not None and is_foreign:
            sent = self._admin.signal(identity, name)
        else:
            sent = recovery.signal(self._ledger, identity, name)
        if not sent:
            raise NotFound(f"the process {identity[:100]!r} has just ended")


def _action(admin: BrokerOperations, action: str) -> Callable[[str, Sequence[Entry]], int]:
    return {"restart": admin.restart, "kill": admin.kill, "delete": admin.delete}[action]


class NotNow(Conflict):
    """A job cannot be stopped or started now; ``code``: ``stopping``, ``running``, ``finished``, or ``refused`` by a check
    of its worker."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def _is_dead(event: Mapping[str, Any]) -> bool:
    return event["status"] == Status.ERROR and not event["dismissed"]


def _kept_by(event: Mapping[str, Any]) -> str | None:
    """The engine that keeps a lone job and delivers it whatever the ledger says."""
    is_lone = event["task_id"] is None and event["callback_of"] is None
    return engine_of(str(event["queue"])) if is_lone else None


def _stop_or_start(event: Mapping[str, Any]) -> list[str]:
    if _kept_by(event) is not None:
        return []
    if event["status"] in ("enqueue", "working"):
        return [] if event["stopping"] else ["stop"]
    return ["start"] if event["status"] == "stopped" else []


def _standing(event: Mapping[str, Any]) -> str:
    """The state of a job, for people."""
    match event["status"]:
        case _ if event["stopping"]:
            return "it was asked to stop, and stops at its next opportunity"
        case "enqueue" if event["waits_for"] is not None:
            return "it waits for earlier jobs of its key"
        case "enqueue":
            return "it waits" if event["due_at"] is None else f"it waits until {event['due_at']}"
        case "working":
            return "a worker performs it"
        case "stopped":
            return "it is stopped, until it is started"
        case status:
            return f"it ended {status}"


def _refusal(event: Mapping[str, Any], action: str) -> str:
    """Why an action does not apply to a job."""
    if action == DISMISS:
        standing = "it was dismissed already" if event["dismissed"] else _standing(event)
        return f"{standing}: only a job that ended in an error can be dismissed, once"
    match event["status"]:
        case "enqueue" if (engine := _kept_by(event)) is not None:
            return f"{engine} keeps it, on its queue or until its time, and it cannot be {_DONE[action]} from here"
        case "enqueue" if action == "restart":
            return "it begins when its turn comes"
        case "enqueue":
            return "it waits for its turn, or a worker is about to begin it: delete it, or wait for its outcome"
        case "working":
            return "a worker performs it"
        case "stopped":
            return "it is stopped"
        case "failed" | "cancelled" if action == "restart" and event["task_id"] is not None:
            return f"it belongs to Task {event['task_id']}: retry the Task, which runs such rows again"
        case status if action == "restart":
            return f"it ended {status}: only a job that ended in an error or was refused can be restarted"
    return _RECORDED


_HELD: Final = "a worker has it, or is about to"
_DONE: Final = {"restart": "started", "kill": "moved to the dead", "delete": "deleted"}
_RECORDED: Final = "a tracked job's outcome stays recorded until a purge: restart it, dismiss it if it is dead, or leave it"
_UNRECORDED: Final = "an untracked job has no record that could stay: restart or delete it"


# -- why the rows of a Task wait


def _held(process: Mapping[str, Any], rows: int, now: int) -> WaitReason:
    """Rows of a Task are held by a registered process that does not answer."""
    text = (
        f"{rows:,} {'row is' if rows == 1 else 'rows are'} held by the process {plain(process['identity'])}, which has not"
    )
    text += f" answered for {_held_s(process, now):.0f} s"
    mend = f"wait; or end it (kill -9 {process['pid']} on {plain(process['hostname'])}), and they run again elsewhere;"
    return WaitReason("held", text, f"{mend} with held_limit_s its supervisor does so")


def _open(task: Mapping[str, Any], now: int) -> WaitReason:
    """Of an open Task (its columns) all of whose rows have ended."""
    times = (_span((now - at) / SECOND) for at in (task["created_at"], additions.last_added(task)))
    text = "Open for {}, and nobody has added anything for {}".format(*times)
    mend = f"seal it (asynctask seal {task['id']}) or cancel it; it is sealed at {rfc3339(task['split_until'])}"
    return WaitReason("open", text, mend)


def _behind(task_id: int, sealed_at: int | None) -> WaitReason:
    """Of a Task with keys. ``task_id``: the one before it, for which it waits; ``sealed_at``: None while that is read."""
    if sealed_at is None:
        text = f"The list of Task {task_id}, which has keys too and was submitted before, is still being read"
        return WaitReason("earlier_list", text, "it begins once that is read")
    text = f"Task {task_id}, which has keys too and was submitted before, is open: what is added to it goes first"
    mend = f"seal that (asynctask seal {task_id}) or cancel it; it is sealed at {rfc3339(sealed_at)} if nobody adds to it"
    return WaitReason("earlier_list", text, mend)


def _span(seconds: float) -> str:
    """A time for people, in its largest unit that is not below 1."""
    size, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{max(0, seconds) // size:.0f} {unit}"


def _held_back(progress: Mapping[str, Any], holder: tuple[int, str] | None) -> WaitReason:
    """Of a paused Task, or one that waits for its session; ``holder``: the Task that has it, and its state."""
    task_id = progress["task_id"]
    if progress["state"] != State.PAUSED:
        text, mend = (
            f"It waits for its session {plain(str(progress['control']['session']))}",
            "it begins when its turn comes",
        )
        if holder is not None:
            text, mend = f"{text}, which Task {holder[0]} has", f"it begins when Task {holder[0]} has ended"
            if holder[1] == State.PAUSED:
                text, mend = f"{text}, which is paused", f"asynctask resume {holder[0]}"
        return WaitReason("session", text, mend)
    if progress["state_reason"] == "too_many_failures":
        text = f"It paused itself: more rows failed than it tolerates ({progress['control']['tolerated_failures']})"
        return WaitReason("too_many_failures", text, f"asynctask set {task_id} tolerated_failures=none, or retry its rows")
    if progress["state_reason"] == HELD:
        text = f"It is paused with Task {progress['parent']}, whose job submitted it"
        return WaitReason("paused", text, f"asynctask resume {progress['parent']}, or {task_id} alone")
    return WaitReason("paused", "It is paused", f"asynctask resume {task_id}")


def _is_registered_nowhere(processes: Iterable[Mapping[str, Any]], queue: str, worker: str, now: int) -> bool:
    """Whether every process that works a queue performs other workers only. One that reports none may perform any."""
    named = [_info(row).get("workers") for row in processes if row["lease_until"] > now and queue in loads(row["queues"])]
    return bool(named) and all(names is not None and worker not in names for names in named)


# -- how many worker processes are wanted


@dataclass(frozen=True, slots=True)
class Performing:
    """A live worker process by its last heartbeat: running jobs, threads, jobs per second (0: unknown), and whether it is
    quiet."""

    busy: int
    concurrency: int
    rate: float
    is_quiet: bool = False


def workers_wanted(
    waiting: int, processes: Sequence[Performing], target_s: float, limited: Sequence[tuple[int, int]] = ()
) -> int:
    """How many worker processes would finish within ``target_s`` seconds what waits in a queue.

    ``waiting``: jobs of that queue; ``limited``: for each Task with a ``parallel``, its part of ``waiting``, and
    ``parallel``: it counts for no more threads than it may use. A process without a measured rate counts with the average
    of the others; if none is measured, one process is wanted if anything waits. The result is at most a thread per job, and
    at least the number of processes with running jobs. Quiet processes do not count: they are about to end.
    """
    staying = [each for each in processes if not each.is_quiet]
    busy = sum(1 for each in staying if each.busy)
    if waiting <= 0:
        return busy
    rates = [each.rate for each in staying if each.rate > 0]
    if not rates:
        return max(1, busy)
    jobs_each = sum(rates) / len(rates) * target_s
    threads_each = sum(max(1, each.concurrency) for each in staying) / len(staying)
    needed = (waiting - sum(jobs for jobs, _ in limited)) / jobs_each
    needed += sum(min(jobs / jobs_each, parallel / threads_each) for jobs, parallel in limited)
    most = (waiting + sum(each.busy for each in staying)) / threads_each
    return max(1, busy, math.ceil(min(needed, most)))


# -- queues


def _performing(processes: Iterable[Mapping[str, Any]], now: int) -> dict[str, list[Performing]]:
    """The live processes that work each queue."""
    found: dict[str, list[Performing]] = {}
    for each in processes:
        if not each["concurrency"] or each["lease_until"] <= now:
            continue
        rate = float(_info(each).get("pace", 0.0))
        one = Performing(int(each["busy"]), int(each["concurrency"]), rate, bool(each["quiet"]))
        for name in set(loads(each["queues"])):
            found.setdefault(name, []).append(one)
    return found


def _parts(foreign: QueueFacts | None, parts: Sequence[queries.Backlog], now: int) -> list[BacklogPart]:
    """What could start in a queue: jobs as counted in the ledger, and those of a foreign queue that belong to no Task."""
    found: list[BacklogPart] = [
        {
            "worker": part.worker or None,
            "priority": part.priority,
            "waiting": part.waiting,
            "oldest_s": _waited_s(part.oldest_at, now),
        }
        for part in parts
    ]
    if foreign is not None:
        # As a process may hold some of the Tasks' jobs, this is a lower bound.
        alone = foreign.length - foreign.others - sum(part.of_tasks for part in parts)
        age_s = None if foreign.others else _waited_s(foreign.oldest_at, now)  # the oldest may be one of theirs
        if alone > 0:
            found.append({"worker": None, "priority": None, "waiting": alone, "oldest_s": age_s})
    return found


def _to_start(queue: str) -> str:
    """What to start so that somebody works a queue."""
    name, engine = plain(queue), engine_of(queue)
    if engine is not None:
        return f"start a worker of {engine} that has it"
    if name in ("default", "callbacks"):
        return "start a worker: asynctask -A module:app worker"
    return f"start one (asynctask -A module:app worker -q {name}), or the program that performs its jobs"


def _age_s(at: int | None, now: int) -> float | None:
    return None if at is None else max(0, now - at) / SECOND


def _waited_s(at: int | None, now: int) -> float | None:
    """An age in steps of a second, from a minute on of 10 s, from an hour on of a minute: an answer with finer ones would
    never equal the one before, for which its reader asks (``If-None-Match``)."""
    age_s = _age_s(at, now)
    if age_s is None:
        return None
    return age_s // (step := 1 if age_s < 60 else 10 if age_s < 3_600 else 60) * step


# -- jobs and processes, bounded in size, for they may come from any program

_Listed = tuple[int | None, int | Entry]
"""When a job of a list is due, or died, in microseconds; and its Event's id, or its entry in the broker."""

_SHOWN_AT_ONCE: Final = 50
"""Jobs of a list whose rows are read at once."""


def _time_of(listed: _Listed) -> str:
    return str(rfc3339(_shown_time(listed[0])))


SHOWN: Final = 16_384
"""Longest arguments that are shown, in characters; ``args_cut`` marks longer ones."""

_MESSAGE: Final = 2_000
_RAW: Final = 1_000


def _ledger_job(row: Mapping[str, Any]) -> _WaitingJob:
    params = row["params"] or "null"
    args, args_cut = (loads_shown(params), False) if len(params) <= SHOWN else (None, True)
    return {
        "key": row["job_id"],
        "tracked": row["items"] > 0,
        "job_id": row["job_id"],
        "task_id": row["task_id"],
        "worker": row["worker"],
        "args": args if row["task_id"] is None or args_cut else [args],
        "args_cut": args_cut,
        "raw": None,
    }


def _listed_row(row: Mapping[str, Any]) -> WaitingEntry:
    """A job of one of the ledger's lists."""
    messages = loads(row["added_messages"]) or []
    errors = [str(each.get("message", "")) for each in messages if each.get("status") in ("error", "failed")]
    return {
        **_ledger_job(row),
        "row": row["first_row"],
        "queue": row["in_queue"],
        "at": rfc3339(row["due_at"] if row["finished_at"] is None else row["finished_at"]),
        "retries": row["retries"],
        "error": errors[-1][:_MESSAGE] if errors else None,
        "error_class": row["problem"],
        "created_at": rfc3339(row["created_at"]),
    }


def _queued_row(row: Mapping[str, Any], priority: int) -> QueuedJob:
    """A job without a Task that waits in a queue of the ledger."""
    return {**_ledger_job(row), "priority": priority, "enqueued_at": rfc3339(row["due_at"])}


@dataclass(frozen=True, slots=True)
class _Failing:
    """A job of the retries or the dead with its last error: of the ledger (``event_id``), or an ``entry`` of the broker."""

    template_id: str
    key: str
    job_id: str | None
    task_id: int | None
    worker: str | None
    at: int | None
    code: str
    message: str | None
    event_id: int = 0
    entry: Entry | None = None


def _failing_row(job: queries.FailingJob) -> _Failing:
    template_id = group_of(Failure(job.code, job.message or ""), Status.ERROR)
    job_id = job.job_id if job.tracked else None
    return _Failing(template_id, job.job_id, job_id, job.task_id, job.worker, job.at, job.code, job.message, job.id)


def _failing_entry(entry: Entry) -> _Failing:
    job = peeked(entry.copy.payload)
    kind, text = (job[name] if isinstance(job.get(name), str) else "" for name in ("error_class", "error_message"))
    message = plain(": ".join(part for part in (kind[:255], text[:_MESSAGE]) if part)) or "error"
    times = (read_time(job.get(name)) for name in ("retried_at", "failed_at"))
    at = _shown_time(next((each for each in times if each is not None), entry.at))
    template_id = group_of(Failure("raised", message), Status.ERROR)
    return _Failing(template_id, entry.key, None, None, class_of(entry.copy.payload), at, "raised", message, entry=entry)


@dataclass(slots=True)
class _Group:
    """What is known of the jobs of a template."""

    latest: _Failing
    sample: str | None = None
    count: int = 0
    first_at: int | None = None
    hours: list[int] = field(default_factory=lambda: [0] * HOURS)
    workers: Counter[str] = field(default_factory=Counter)
    tasks: set[int] = field(default_factory=set)

    def add(self, each: _Failing, now: int) -> None:
        """Counts a job."""
        self.count += 1
        if each.worker is not None:
            self.workers[each.worker] += 1
        if each.task_id is not None:
            self.tasks.add(each.task_id)
        if (each.at or 0) >= (self.latest.at or 0):
            self.latest = each
            self.sample = each.job_id or self.sample
        if each.at is None:
            return
        self.first_at = each.at if self.first_at is None else min(self.first_at, each.at)
        hours_ago = max(0, now - each.at) // (3_600 * SECOND)
        if hours_ago < HOURS:
            self.hours[HOURS - 1 - hours_ago] += 1

    def as_dict(self, template_id: str, message: str) -> FailureTemplate:
        """``message``: of the latest of its jobs."""
        return {
            "id": template_id,
            "template": shown_template(template_id, Status.ERROR, message),
            "message": message,
            "code": self.latest.code,
            "count": self.count,
            "first_at": rfc3339(self.first_at),
            "last_at": rfc3339(self.latest.at),
            "hours": self.hours,
            "workers": [plain(name) for name, _ in self.workers.most_common(OTHERS_NAMED)],
            "tasks": sorted(self.tasks, reverse=True)[:OTHERS_NAMED],
            "task_count": len(self.tasks),
            "sample_job_id": self.sample,
        }


def _listed_entry(entry: Entry) -> WaitingEntry:
    """An entry of one of the broker's sets."""
    job = peeked(entry.copy.payload)
    count = job.get("retry_count")
    message, name = job.get("error_message"), job.get("error_class")
    return {
        **_entry(entry, tracked=False, task_id=None),
        "row": None,
        "queue": plain(entry.copy.queue),
        "at": rfc3339(_shown_time(entry.at)),
        "retries": count + 1 if isinstance(count, int) and not isinstance(count, bool) and -1 <= count < 2**31 else 0,
        "error": message[:_MESSAGE] if isinstance(message, str) else None,
        "error_class": name[:255] if isinstance(name, str) else None,
        "created_at": rfc3339(_shown_time(read_time(job.get("created_at")))),
    }


def _queued_entry(entry: Entry) -> QueuedJob:
    """A job in a queue of the broker."""
    copy = entry.copy
    return {
        **_entry(entry, tracked=copy.attempt > 0, task_id=copy.task_id),
        "priority": copy.priority,
        "enqueued_at": rfc3339(_shown_time(enqueued_at(copy.payload))),
    }


def _entry(entry: Entry, *, tracked: bool, task_id: int | None) -> _WaitingJob:
    whole = len(entry.raw) <= SHOWN
    return {
        "key": plain(entry.key),
        "tracked": tracked,
        "job_id": plain(entry.copy.jid),
        "task_id": task_id,
        "worker": class_of(entry.copy.payload),
        "args": masked(peeked(entry.copy.payload).get("args")) if whole else None,
        "args_cut": not whole,
        "raw": None if entry.sound else plain(entry.raw[:_RAW]),
    }


def _held_s(row: Mapping[str, Any], now: int) -> float | None:
    """For how long a registered process has not answered although its supervisor renews its lease; None if it answers."""
    return None if row["held_at"] is None or row["lease_until"] <= now else _age_s(row["beat_at"], now)


def _process(
    facts: Mapping[str, Any], kind: str, alive: bool, queues: Iterable[str], held_s: float | None = None
) -> ProcessInfo:
    return {
        "identity": plain(facts["identity"]),
        "kind": kind,
        "hostname": plain(facts["hostname"]),
        "pid": facts["pid"],
        "concurrency": facts["concurrency"],
        "busy": facts["busy"],
        "jobs": [],
        "rss": facts["rss"],
        "version": _version(facts),
        "quiet": bool(facts["quiet"]),
        "alive": alive,
        "held_s": held_s,
        "queues": [plain(name) for name in queues],
        "started_at": rfc3339(_shown_time(facts["started_at"])),
        "beat_at": rfc3339(_shown_time(facts["beat_at"])),
    }


def _version(facts: Mapping[str, Any]) -> str | None:
    found = _info(facts).get("version")
    return plain(found)[:64] if isinstance(found, str) else None


def _info(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The facts that a process reports beside its columns; other versions may report other members."""
    info = loads(row.get("info"))
    return info if isinstance(info, dict) else {}


def _monitored_process(row: Mapping[str, Any], now: int) -> dict[str, Any]:
    return {
        **{name: row[name] for name in ("identity", "kind", "concurrency", "busy", "rss")},
        "alive": row["lease_until"] > now,
        "lease_age_s": _age_s(row["beat_at"], now),
        "held_s": _held_s(row, now) or 0,
        "figures": _info(row).get("figures") or {},
    }


def plain(text: str) -> str:
    """Text without lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def _shown_time(at: int | None) -> int | None:
    """A time within RFC 3339's range, else None: any program may have written it."""
    return at if at is not None and 0 <= at < 253_402_300_800_000_000 else None


# -- names of lists, actions and signals; validation of names and keys


class JobList(NamedTuple):
    """A list of jobs that are in no queue: the broker's set, its jobs for people, and which of them are first."""

    set_name: str
    jobs: str
    first: str = "those due"


LISTS: Final = {
    "retries": JobList(RETRY, "jobs that wait for a retry"),
    "scheduled": JobList(SCHEDULE, "jobs that wait for their time"),
    "dead": JobList(DEAD, "jobs that ended in an error", "the last"),
}
VERBS: Final = ("restart", "kill", "delete")
DISMISS: Final = "dismiss"
"""What is done to dead jobs alone."""

SIGNALS: Final = {"quiet": "TSTP", "stop": "TERM"}

_MAX_KEYS: Final = 1_000


def _refuse_unknown(name: str, known: Collection[str], what: str) -> None:
    if name not in known:
        raise InputError(f"there is no {what} {name!r}; there are {', '.join(known)}", code=f"bad_{what}")


def set_of(list_name: str) -> str:
    """The broker's set of a list. Raises :class:`InputError`."""
    _refuse_unknown(list_name, LISTS, "list")
    return LISTS[list_name].set_name


def checked(list_name: str, action: str) -> str:
    """The broker's set of a list, if the action suits it. Raises :class:`InputError`."""
    set_name = set_of(list_name)
    _refuse_unknown(action, (*VERBS, DISMISS), "action")
    if action == "kill" and set_name == DEAD:
        raise InputError("dead jobs cannot be killed; restart, dismiss or delete them", code="bad_action")
    if action == DISMISS and set_name != DEAD:
        raise InputError("only dead jobs can be dismissed; restart, kill or delete these", code="bad_action")
    return set_name


FAILING: Final = ("retries", "dead")
"""The lists whose jobs have an error."""


def _failing_set(list_name: str, action: str = "restart") -> str:
    """The broker's set of a list whose jobs have an error, if the action suits it. Raises :class:`InputError`."""
    _refuse_unknown(list_name, FAILING, "list")
    return checked(list_name, action)


def _queue_name(queue: str) -> str:
    return checked_text(queue, "a queue's name has", "bad_name")


def wanted_keys(keys: Sequence[str]) -> list[str]:
    """The distinct keys, 1 to 1,000. Raises :class:`InputError`."""
    if not 1 <= len(keys) <= _MAX_KEYS:
        raise InputError(f"name 1 to {_MAX_KEYS:,} entries, not {len(keys):,}", code="out_of_range")
    return [checked_text(key, "a key has", "bad_name", nul=True) for key in dict.fromkeys(keys)]


def job_ids(keys: Sequence[str]) -> list[str]:
    """The keys that may be job ids."""
    return [key for key in keys if len(key) <= 64 and "\0" not in key]


# -- what people do about it: the API has a route of each, the command line a command

Call = Callable[[Operations, str, Sequence[str] | None, str], Any]


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that people do. It changes something: a token that only reads is refused.

    ``on``: one of :data:`LISTS`, or ``queues``, ``processes``, ``jobs``, of which one is named; ``takes_keys``: it is done
    to jobs of the list or queue by their keys, of a list also to all; ``title``, ``more``: what it does, ``{0}`` being the
    list's jobs; ``call``: with the operations, the name of the list or the thing, the keys (None: all), and who does it;
    ``answer``: what that returns; ``done``: what was done, for people; ``asks``: what cannot be undone, if anything.
    """

    on: str
    name: str
    title: str
    more: str
    call: Call
    answer: type
    done: str = ""
    takes_keys: bool = False
    asks: str = ""


def _on_list(verb: str) -> Call:
    def call(operations: Operations, name: str, keys: Sequence[str] | None, who: str) -> ActionOutcome:
        if keys is None:
            return operations.act_on_all(name, verb, who=who).as_dict()
        return operations.act(name, verb, keys, who=who).as_dict()

    return call


def _on_job(verb: str) -> Call:
    return lambda operations, job_id, _, who: operations.act_on_job(job_id, verb, who=who)


def _pausing(paused: bool) -> Call:
    def call(operations: Operations, queue: str, _keys: Sequence[str] | None, _who: str) -> PauseState:
        changed = operations.pause(queue) if paused else operations.unpause(queue)
        return {"queue": queue, "paused": paused, "changed": changed}

    return call


def _signalling(verb: str) -> Call:
    def call(operations: Operations, identity: str, _keys: Sequence[str] | None, _who: str) -> Signalled:
        operations.signal(identity, verb)
        return {"identity": identity, "signal": verb}

    return call


_CANCELS: Final = "The items of tracked ones are cancelled."
_OBEYS: Final = "It obeys at its next heartbeat."

ACTIONS: Final = (
    Action(
        "queues", "delete", "Delete jobs of a queue", _CANCELS,
        lambda operations, queue, keys, who: operations.delete_jobs(queue, keys or (), who=who).as_dict(),
        ActionOutcome, "deleted", takes_keys=True,
    ),
    Action(
        "queues", "clear", "Delete all jobs of a queue", _CANCELS,
        lambda operations, queue, _, who: operations.clear_queue(queue, who=who).as_dict(),
        ActionOutcome, "deleted", asks="clearing {0}",
    ),
    Action(
        "queues", "pause", "Begin no jobs of a queue until it is unpaused",
        "Of every Task of it, limited or not, and of single jobs. Refused for a queue that an attached engine keeps.",
        _pausing(True), PauseState, "paused",
    ),
    Action("queues", "unpause", "Resume a paused queue", "", _pausing(False), PauseState, "unpaused"),
    *(
        action
        for name in LISTS
        for action in (
            Action(
                name, "restart", "Have {0} run now",
                "An untracked one goes to the end of its queue; a tracked one is due now, a dead one is retried"
                " explicitly.",
                _on_list("restart"), ActionOutcome, "started again", takes_keys=True,
            ),
            Action(
                name, "kill", "Give up {0}", "An untracked one moves to the dead; a tracked one ends in `error`.",
                _on_list("kill"), ActionOutcome, "moved to the dead", takes_keys=True, asks="killing all {0}",
            ),
            Action(
                name, "delete", "Delete {0}",
                "The item of a tracked one that waits is cancelled; an outcome stays recorded, and is skipped.",
                _on_list("delete"), ActionOutcome, "deleted", takes_keys=True, asks="deleting all {0}",
            ),
        )
        if (name, action.name) != ("dead", "kill")
    ),
    Action(
        "dead", DISMISS, "Dismiss {0}",
        "Their outcome stays recorded; they leave this list, and come back if they end in an error again. Only tracked ones"
        " have a record, others are skipped.",
        _on_list(DISMISS), ActionOutcome, "dismissed", takes_keys=True,
    ),
    Action(
        "processes", "quiet", "Make a worker process finish its running jobs and take no more", _OBEYS,
        _signalling("quiet"), Signalled, "take nothing more",
    ),
    Action("processes", "stop", "Stop a worker process", _OBEYS, _signalling("stop"), Signalled, "stop"),
    Action(
        "jobs", "stop", "Stop a job, until it is started again",
        "A waiting job is stopped at once. A running one is asked to stop: it saves a checkpoint at its next call of"
        " `should_stop()`. One that never calls it runs to its end. If there is nothing to stop, `detail` describes the"
        " state.",
        lambda operations, job_id, _, who: operations.stop_job(job_id, who=who), ToldEvent,
    ),
    Action(
        "jobs", "start", "Start a stopped job again, from its checkpoint",
        "The same job, its next attempt. Refused with the code `stopping` while it still runs after a stop, `running` or"
        " `finished` if there is nothing to start, `refused` if a check of its worker refuses.",
        lambda operations, job_id, _, who: operations.start_job(job_id, who=who), ToldEvent,
    ),
    Action(
        "jobs", "restart", "Restart a job",
        "A job that ended in an error, or was refused without a Task, is retried; one that waits in the ledger is due now.",
        _on_job("restart"), Event, "started again",
    ),
    Action("jobs", "kill", "End a job that waits in the ledger", "It ends in `error`.", _on_job("kill"), Event),
    Action(
        "jobs", "delete", "Cancel a job that has not begun",
        "It is removed from its queue; an attached engine removes it if it can.",
        _on_job("delete"), Event,
    ),
    Action(
        "jobs", DISMISS, "Dismiss a job that ended in an error",
        "Its outcome stays recorded; it leaves the dead jobs until it ends in an error again.",
        _on_job(DISMISS), Event,
    ),
)  # fmt: skip
