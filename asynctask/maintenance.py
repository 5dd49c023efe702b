"""Maintenance: recovery, closing and cleaning that no request triggers. One process at a time does it, as the leader.

Every process can lead. Repeating a step is harmless. An idle system costs one query every few seconds.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from asynctask.brokers.base import DEAD, Broker, Copy, Key, SetEntry
from asynctask.core.states import Reason
from asynctask.database.notify import Waker
from asynctask.dispatch.control import TaskControls
from asynctask.dispatch.outbox import EngineQueues, Router
from asynctask.errors import Unavailable
from asynctask.ledger import additions, control, doctor, foreign, leases, lending, processes, progress
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, is_held, loads
from asynctask.ledger.events import EventRecord
from asynctask.ledger.lending import queue_holder
from asynctask.ledger.schedules import Ticker
from asynctask.ledger.tasks import called_back, candidates, try_close, try_finish
from asynctask.lists.cleaning import Cleaning
from asynctask.logs import get_logger
from asynctask.sidekiq.copies import poisoned

EVERY_S: Final = {"find_lost": 10.0, "recover_strays": 10.0, "history": 30.0, "clear_uploads": 3_600.0}
"""Smallest number of seconds between two runs of a step. A job that two searches do not find is lost, because no job is in
transit for so long; each minute of the history has a sample; stored lists that no Task needs are rare."""

SAMPLE_S = 5.0
"""Seconds between two samples of a Task, for its rate and chart."""

_REST_FACTOR: Final = 20
"""Pause after any other step, as a multiple of its duration, so that no step takes more than a twentieth of the time. The
shorter of its last two durations counts, because a single long one was spent waiting for an unavailable database."""

_RECOVERY_RESTS_S: Final = 1.0
"""Longest pause, in seconds, of the recovery of dead processes, whose jobs wait for it."""

_AWAY_RESTS_S: Final = 10.0
"""Longest pause, in seconds, after a step that got no answer, because waiting for an answer is no work."""

_ALWAYS: Final = ("recover_strays", "history", "clear_uploads", "purge")
"""Steps that find their work themselves, because the query for work does not cover it."""

_WORK: Final = ("rejoin", "change_rows")
"""Steps without a pause: users wait for their end, and each run makes progress."""

POISON_COPIES: Final = 3
"""Deaths of processes after which an untracked job is moved to the dead set."""


class Maintenance:
    """Recovers dead processes, pauses failing Tasks, closes finished ones, resumes stalled splits, continues bulk edits,
    finds lost copies, takes samples, and removes stored lists.

    ``resume_split`` continues the split of a Task in a way that suits this process; ``keep_history`` samples what waits and
    removes what is old; ``cleaning`` removes stored lists.
    ``engines``: the attached engines by name. ``every_s``: seconds between two rounds while a Task is open. ``waker``
    reports new work for maintenance. ``ticker``: submits the Tasks of schedules, beside the leader, too.
    """

    def __init__(
        self,
        ledger: Ledger,
        broker: Broker | None,
        host: processes.Host,
        controls: TaskControls,
        *,
        resume_split: Callable[[int], None],
        keep_history: Callable[[], object],
        cleaning: Cleaning,
        ticker: Ticker,
        waker: Waker,
        every_s: float,
        engines: Mapping[str, EngineQueues],
    ) -> None:
        self._ledger = ledger
        self._broker = broker
        self._host = host
        self._controls = controls
        self._resume_split = resume_split
        self._ticker = ticker
        self._schedule = Schedule(ledger, host, waker, every_s=every_s)
        self._steps: dict[str, Callable[[], object]] = {
            "recover_dead": self.recover_dead,
            "take_stalled": self.take_stalled,
            "rejoin": partial(lending.rejoin, ledger),  # Tasks that left their session and whose retry is due
            "change_rows": self.change_rows,
            "resume_splits": self.resume_splits,
            "seal_overdue": partial(additions.seal_overdue, ledger),
            "pause_failing": self.pause_failing,
            "close": self.close,
            "find_lost": self.find_lost,
            "sample": self.sample,
            "history": keep_history,
            "clear_uploads": cleaning.clear_uploads,
            "purge": cleaning.purge,
        }
        if broker is not None:
            self._steps["recover_strays"] = partial(self.recover_strays, broker)
        self._lost = LostJobs(ledger, broker, engines)
        self._unknown: set[str] = set()  # unregistered processes that the last query found
        self._strays: set[str] = set()  # the same at the broker
        self._rests: dict[str, float] = {}
        self._took: dict[str, float] = {}  # seconds that each step took at its last run
        self._thread: threading.Thread | None = None
        self._log = get_logger("asynctask.sweep")

    def start(self) -> None:
        """Runs due steps in a thread until :meth:`stop`."""
        self._thread = threading.Thread(target=self._run, name="maintenance", daemon=True)
        self._thread.start()
        self._ticker.start()

    def stop(self) -> None:
        """Ends the thread and gives up leadership."""
        self._ticker.stop()
        self._schedule.stop()
        if self._thread is not None:
            self._thread.join(10)

    def _run(self) -> None:
        while not self._schedule.stopped:
            wanted: Sequence[str] = ()
            try:
                if self._ledger.held.keeps:
                    lending.catch_up(self._ledger)
                wanted = self._schedule.due_steps(self._steps)
            except Unavailable as error:
                self._log.retrying("sweep_put_off", part="look", error=str(error))
            except Exception:
                self._log.exception("sweep_failed", part="look")
            self._do(wanted)
            self._schedule.pause()
        self._schedule.leave()

    def _do(self, steps: Sequence[str]) -> None:
        clock = self._ledger.clock
        for name in steps:
            begun, longest = clock.monotonic(), _RECOVERY_RESTS_S if name == "recover_dead" else math.inf
            earlier_s = self._took.get(name, 0.0)
            if begun < self._rests.get(name, 0.0):
                continue
            try:
                self._steps[name]()
            except Unavailable as error:
                longest, earlier_s = min(longest, _AWAY_RESTS_S), math.inf  # retried soon, but not at once
                self._log.retrying("sweep_put_off", part=name, error=str(error))
            except Exception:
                self._log.exception("sweep_failed", part=name)
            if name in _WORK:
                continue
            ended = clock.monotonic()
            rest = min(_REST_FACTOR * min(ended - begun, earlier_s), longest)
            self._rests[name] = ended + max(rest, EVERY_S.get(name, 0.0))
            self._took[name] = ended - begun

    # -- dead processes

    def recover_dead(self) -> int:
        """Recovers the jobs of dead processes. Returns the number of recovered processes."""
        with self._ledger.database.read() as connection:
            registered = processes.list_processes(connection)
            unknown = processes.unknown_workers(connection)
        self._schedule.sightings.note(registered)
        dead = [
            str(each["identity"]) for each in registered if processes.is_dead(self._host, each, self._schedule.sightings)
        ]
        known = {str(each["identity"]) for each in registered}
        unknown = {identity for identity in unknown if foreign.process_of(identity) not in known}
        orphans = [identity for identity in unknown if identity in self._unknown and identity != self._ledger.identity]
        self._unknown = unknown
        for identity in {*dead, *orphans} - {self._ledger.identity}:
            self.recover(identity)
        return len(dead) + len(orphans)

    def recover_strays(self, broker: Broker) -> None:
        """Recovers owners of held copies that two queries found unregistered: they were recovered in part, died before the
        registration, or are from a restored broker. Skips owners with a current presence in the broker, which belong to
        another application."""
        strays = broker.holders()
        with self._ledger.database.read() as connection:
            strays -= {str(each["identity"]) for each in processes.list_processes(connection)}
        if strays:
            strays -= {each["identity"] for each in broker.operations.processes()}
        known, self._strays = self._strays, strays
        for identity in strays & known - {self._ledger.identity}:
            self.recover(identity)

    def recover(self, identity: str) -> None:
        """Recovers the jobs that a dead process held: rows wait in the ledger again, untracked copies in their queues."""
        if not processes.condemn(self._ledger, self._host, identity, self._schedule.sightings):
            return
        if processes.is_engine(identity):
            with self._ledger.database.read() as connection:
                registered = processes.list_processes(connection)
            queues = {name for each in registered if each["identity"] == identity for name in loads(each["queues"])}
            foreign.watch_in_flight(self._ledger, queues)
        held = [] if self._broker is None else self._broker.held_by(identity)
        applied = processes.recover_events(self._ledger, identity, [copy.key for copy in held])
        applied += processes.recover_events(self._ledger, foreign.pusher(identity))
        # A foreign job with an Event is tracked: the Event decides whether it runs again.
        recovered = {each.record.job_id for each in applied if each.record is not None and each.transition is not None}
        if self._broker is not None:
            self._broker.drop(identity, [copy for copy in held if copy.attempt > 0 or copy.jid in recovered])
            self._put_back(
                self._broker, identity, [copy for copy in held if copy.attempt == 0 and copy.jid not in recovered]
            )
        processes.forget(self._ledger, identity, dead=True)
        turned = sum(each.transition is not None for each in applied)
        self._log.warning("process_recovered", identity=identity, jobs=len(held), recovered=turned)

    def take_stalled(self) -> None:
        """Makes jobs due again that have not begun in processes whose interpreter is held, although their leases are
        renewed."""
        with self._ledger.database.read() as connection:
            stalled = processes.stalled(connection)
        for identity in stalled:
            if processes.take_unbegun(self._ledger, identity):
                self._log.warning("process_stalled", identity=identity)

    def _put_back(self, broker: Broker, identity: str, copies: Sequence[Copy]) -> None:
        now = self._ledger.now()
        for copy in copies:
            copy.deaths += 1
        poison = [copy for copy in copies if copy.deaths >= POISON_COPIES]
        broker.hold(DEAD, [SetEntry(poisoned(copy, now), now) for copy in poison], process=identity)
        broker.put_back(identity, [copy for copy in copies if copy.deaths < POISON_COPIES])

    # -- Tasks

    def change_rows(self) -> None:
        """Continues the row updates of cancels and retries, and what goes down to the children of Tasks."""
        with self._ledger.database.read() as connection:
            turning, handing = control.changing_tasks(connection), control.handing_down(connection)
        for task_id in handing:
            self._controls.hand_down(task_id)
        for task_id, end in turning:
            if end != "cancel" or self._controls.withdrawn(task_id):
                self._controls.change_rows(task_id)

    def resume_splits(self) -> None:
        """Resumes splits whose lease has expired; ends those as failed whose source was lost with its process."""
        with self._ledger.database.read() as connection:
            stalled = task_rows.stalled_splits(connection, self._ledger.now())
        for task_id, again in stalled:
            if not again:
                why = "the program that handed in the items ended before it had handed in all"
                task_rows.end_split(self._ledger, task_id, Reason.SPLIT_FAILED, why=why, anyone=True)
            elif not is_held(self._ledger, task_id):
                self._resume_split(task_id)

    def close(self) -> None:
        """Closes every Task whose items have ended, and finishes every Task whose callbacks have ended."""
        with self._ledger.database.read() as connection:
            over, called = candidates(connection), called_back(connection)
        for task_id in over:
            try_close(self._ledger, task_id)
        for task_id in called:
            try_finish(self._ledger, task_id)

    def pause_failing(self) -> None:
        """Pauses every Task with more failed items than it tolerates; the recording of failures does so, too."""
        task_rows.pause_failing(self._ledger)

    # -- lost copies, and jobs that no process reaches

    def find_lost(self) -> int:
        """Makes jobs due again that this search and the one before did not find in their foreign queue, and repairs hints,
        sessions and lines that a process left unsettled at its end. Returns the number of lost jobs."""
        doctor.mend(self._ledger)
        return self._lost.find()

    def sample(self) -> None:
        """Samples the progress of each running Task, for rate and chart."""
        with self._ledger.database.read() as connection:
            wanted = progress.unsampled(connection, self._ledger.now(), SAMPLE_S)
        if wanted:
            with self._ledger.database.write() as connection:
                progress.sample(connection, self._ledger.now(), SAMPLE_S)


class LostJobs:
    """The search for lost copies: jobs that a foreign queue holds by the ledger, and lacks."""

    def __init__(self, ledger: Ledger, broker: Broker | None, engines: Mapping[str, EngineQueues]) -> None:
        self._ledger = ledger
        self._router = Router(broker, engines, ledger.clock)
        self._queues = [queue_holder(engine) for engine in engines]
        self._queues += [] if broker is None else [queue_holder(None)]
        self._missed: frozenset[Key] = frozenset()  # jobs that the last search did not find in their queues

    def find(self) -> int:
        """Makes jobs due again that neither this search nor the one before found. Returns their number."""
        with self._ledger.database.read() as connection:
            flying = {
                (record.job_id, record.row.attempt): record
                for queue in self._queues
                for record in foreign.held_in_queues(connection, queue)
            }
            pushers = foreign.pushers(connection)
            pushed = [record for each in pushers for record in foreign.held_in_queues(connection, each)]
        held = self._held(flying)
        missing = {key: record for key, record in flying.items() if key not in held}
        missing |= {(record.job_id, record.row.attempt): record for record in pushed}
        gone = [(record.id, key[1]) for key, record in missing.items() if key in self._missed]
        self._missed = frozenset(missing)
        if gone:
            foreign.redispatch_lost(self._ledger, gone)
            get_logger("asynctask.sweep").warning("copies_lost", count=len(gone))
            for each in [*self._queues, *pushers]:
                foreign.end_empty(self._ledger, each)
        return len(gone)

    def _held(self, flying: Mapping[Key, EventRecord]) -> set[Key]:
        """Those of these jobs whose copies are in a queue or held by a process."""
        if not flying:
            return set()
        with self._ledger.database.read() as connection:
            workers = processes.performing(connection, self._ledger.now())
        busy = {queue for each in workers if each["busy"] for queue in loads(each["queues"])}
        return self._router.held({key: (record.queue, record.worker_name) for key, record in flying.items()}, busy)


# -- which process leads, and which steps are due

_QUIET: Final = 3
"""Number of pauses between two queries of an idle leader; other processes check the leader after twice as many."""

_NOTIFIED: Final = 0.25
"""Pause before a query caused by a notification, as a share of the usual pause; the first :data:`_AT_ONCE` have none."""

_AT_ONCE: Final = 2
"""Number of notifications that cause a query at once, because the query before may have been too early."""


class Schedule:
    """Determines which steps are due in this process; none while another process leads.

    Between two queries it checks the processes of its own machine: a dead one is recovered at once, and if that was the
    leader, another process takes over.
    """

    def __init__(
        self,
        ledger: Ledger,
        host: processes.Host,
        waker: Waker,
        *,
        every_s: float,
    ) -> None:
        self._ledger = ledger
        self._host = host
        self._waker = waker
        self._every_s = every_s
        self._leadership = leases.Leadership(ledger, leases.MAINTENANCE)
        self.sightings = processes.Sightings(ledger)
        """When this process saw the leases of others; updated when it lists them."""
        self._known: list[dict[str, object]] = []
        self._queried_at = -1e9
        self._due_at = -1e9  # when the next query is due without a notification (monotonic)
        self._listed = -1e9
        self._newest: int | None = None
        self._active = True
        self._stop = threading.Event()

    # -- waiting

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Ends the current pause and all later ones."""
        self._stop.set()
        self._waker.wake()

    def pause(self) -> None:
        """Waits for the next query."""
        if not self._leadership.held:
            self._stop.wait(self._every_s)
        elif not self._stop.is_set() and self._waker.wait(self._every_s):
            # A process left work in the ledger for the leader. The first few notifications cause a query each, because the
            # query before may have been too early; under load, one query serves many notifications.
            distance = self._every_s * _NOTIFIED
            early = self._due_at - self._ledger.clock.monotonic()
            self._stop.wait(max(0.0, min(early - _AT_ONCE * distance, distance)))
            self._due_at = max(self._due_at, self._ledger.clock.monotonic()) + distance
            self._queried_at = -1e9

    def leave(self) -> None:
        """Gives up leadership."""
        self._leadership.resign()

    # -- due steps

    def due_steps(self, steps: Iterable[str]) -> Sequence[str]:
        """The ``steps`` that this process should run now; none if it does not lead. Raises LedgerUnavailable."""
        if not self._leads():
            return ()
        now = self._ledger.clock.monotonic()
        died = any(self._host.knows_dead(process) for process in self._known)
        if not (died or self._active) and now - self._queried_at < _QUIET * self._every_s:
            return ()
        found = self._query(now)
        if not found.leads:
            self._leadership.lose()
            return ()
        return [step for step in steps if self._is_due(step, found, died)]

    def _is_due(self, step: str, found: leases.Work, died: bool) -> bool:
        if step == "recover_dead":
            return found.dead or found.lost or died
        return step in _ALWAYS or found.open or (step == "find_lost" and found.alone)

    def _query(self, now: float) -> leases.Work:
        found = leases.query_work(self._ledger)
        self._queried_at = now
        self._active = not found.quiet
        rests = self._every_s if self._active else _QUIET * 3 * self._every_s
        if found.newest != self._newest or now - self._listed >= rests:
            self._newest = found.newest
            with self._ledger.database.read() as connection:
                self._known = processes.list_processes(connection)
            self.sightings.note(self._known)
            self._listed = now
        return found

    def _leads(self) -> bool:
        if self._leadership.held:
            return True
        now = self._ledger.clock.monotonic()
        if now - self._queried_at < 2 * _QUIET * self._every_s and not self._leadership.holder.is_dead(self._host):
            return False
        self._queried_at = now
        if self._leadership.take_over(self._host):
            self._active = True
        return self._leadership.held
