"""The outbox: the jobs that a dispatcher has borrowed, until they are pushed to a foreign queue and handed over.

A queue of an engine has the engine's name as a prefix, as in ``celery/emails``; no queue of the own broker has a slash.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from asynctask.brokers.base import Broker, Copy, Key
from asynctask.clock import Clock, micros
from asynctask.dispatch.control import TaskControls
from asynctask.errors import BrokerUnavailable, Unavailable, UnknownWorker
from asynctask.ledger import foreign, lending
from asynctask.ledger.base import Ledger
from asynctask.ledger.control import give_back_copies
from asynctask.ledger.foreign import engine_of
from asynctask.ledger.lending import Borrowed, Loan, queue_holder
from asynctask.ledger.standalone import discard, put_off_elsewhere
from asynctask.ledger.tasks import try_close
from asynctask.logs import get_logger
from asynctask.messages import clean
from asynctask.sidekiq.copies import PushFilter, tracked_copy
from asynctask.worker import Worker

_UNKNOWN_S: Final = 5.0
"""Seconds after which a job that this process could not push is dispatched again, by any process."""


# -- the queues of engines, and the own broker

AWAY_S: Final = 1.0
"""Seconds for which an engine's broker that did not answer is not queried again."""


def engine_queue(engine: str, name: str) -> str:
    """The ledger's name of the queue ``name`` of an engine."""
    return f"{engine}/{name}"


def own_name(queue: str) -> str:
    """The engine's own name of a queue."""
    return queue.partition("/")[2]


class EngineQueues(Protocol):
    """The queues of one engine, under the names of :func:`engine_queue`.

    Every method may raise :class:`~asynctask.errors.BrokerUnavailable`.
    """

    @property
    def workers(self) -> Mapping[str, Worker]:
        """The workers that the engine can perform, by name, as this process knows them: a live mapping, to which more may
        be added. It lacks the merge of exports, which only the close of an export calls."""
        ...

    def push(self, copies: Sequence[Copy]) -> None:
        """Pushes jobs to their queues under their ids. If it raises, any of them may be in their queues: they are pushed
        again, and the ledger counts the outcome of one copy only."""
        ...

    def waiting(self, queues: Collection[str]) -> Mapping[str, int]:
        """How many jobs wait in each of these queues; every queue has an entry."""
        ...

    def may_hold(self, queue: str, worker: str) -> bool:
        """Whether idle workers of this queue may hold jobs of this worker that they have not begun, for example because of
        a rate limit."""
        ...


class Router:
    """Pushes, counts and searches copies at the engine or broker of their queue. Without a broker, only engines have
    foreign queues.

    ``engines``: the attached engines by name; more may be attached at any time.
    """

    def __init__(self, broker: Broker | None, engines: Mapping[str, EngineQueues], clock: Clock) -> None:
        self._broker = broker
        self._engines = engines
        self._clock = clock
        self._away_until: dict[str, float] = {}
        self._log = get_logger("asynctask.engines")

    def push(self, engine: str | None, copies: Sequence[Copy]) -> None:
        """Pushes copies of one engine, or of the own broker (None). Raises BrokerUnavailable."""
        if engine is None:
            if self._broker is not None:
                self._broker.push(copies)
            return
        try:
            self._engines[engine].push(copies)
        except Unavailable as error:
            self._put_off(engine, error)
            raise

    def reaches(self, queue: str) -> bool:
        """Whether this process can push to a queue: its engine is attached here, and the engine's broker answered last."""
        engine = engine_of(queue)
        if engine is None:
            return self._broker is not None
        return engine in self._engines and self._clock.monotonic() >= self._away_until.get(engine, 0.0)

    def is_any_away(self) -> bool:
        """Whether an engine is not queried now, because it did not answer."""
        return any(self._clock.monotonic() < until for until in self._away_until.values())

    def knows(self, queue: str, worker: str) -> bool:
        """Whether the engine of a queue, as attached to this process, has this worker (``*``: several). Another release of
        the program may have it."""
        engine = self._engines.get(engine_of(queue) or "")
        return engine is None or worker == "*" or worker in engine.workers

    def waiting(self, queues: Collection[str]) -> dict[str, Mapping[int, int]]:
        """The number of waiting copies, queue -> priority -> count, as :meth:`Broker.waiting`.

        An engine that does not answer is not :meth:`reached <reaches>` for a second. Raises BrokerUnavailable for the own
        broker.
        """
        by_engine: dict[str, list[str]] = defaultdict(list)
        own = set()
        for queue in queues:
            if (engine := engine_of(queue)) is None:
                own.add(queue)
            elif self.reaches(queue):
                by_engine[engine].append(queue)
        found = dict(self._broker.waiting(own)) if own and self._broker is not None else {}
        for engine, its in by_engine.items():
            found |= {queue: {0: count} for queue, count in self._counted(engine, its).items() if count}
        return found

    def _counted(self, engine: str, queues: Collection[str]) -> Mapping[str, int]:
        try:
            return self._engines[engine].waiting(queues)
        except Unavailable as error:
            self._put_off(engine, error)
            return {}

    def _put_off(self, engine: str, error: Exception) -> None:
        self._away_until[engine] = self._clock.monotonic() + AWAY_S
        self._log.retrying("engine_away", engine=engine, error=str(error))

    def held(self, keys: Mapping[Key, tuple[str, str]], busy: Collection[str]) -> set[Key]:
        """Which of these copies, with the queue and the worker of each, are held or may be. ``busy``: queues whose workers
        perform jobs.

        An engine does not list its jobs. It may hold any copy while its queue is not empty or a worker of that queue is
        busy; an engine that is not attached here, or does not answer, may hold all of them.
        """
        own = {key for key, (queue, _) in keys.items() if engine_of(queue) is None}
        held = self._broker.holds(own) if own and self._broker is not None else set()
        apart = {queue for queue, _ in keys.values() if engine_of(queue) is not None}
        empty = {queue for queue in apart if queue not in busy and self._is_empty(queue)}
        return held | {
            key
            for key, (queue, name) in keys.items()
            if queue in apart and not (queue in empty and self._gives(queue, name))
        }

    def _is_empty(self, queue: str) -> bool:
        engine = engine_of(queue)
        if engine is None or not self.reaches(queue):
            return False
        return self._counted(engine, [queue]).get(queue, 1) == 0

    def _gives(self, queue: str, worker: str) -> bool:
        """Whether idle workers of an engine's queue never hold jobs of this worker that have not begun."""
        return not self._engines[engine_of(queue) or ""].may_hold(queue, worker)


# -- jobs on their way


class Outbox:
    """The jobs that this process has borrowed for the queues of one engine, or of the own broker, until they are pushed and
    handed over. From here they go only to the queues, or back to the ledger.

    Arguments: ``holder``: the holder name of those queues in the ledger; ``push`` puts copies on the queues; ``outgoing``
    applies the client middleware; ``control`` withdraws pushed copies of a Task that was paused or cancelled, or got
    another priority, meanwhile.
    """

    def __init__(
        self,
        ledger: Ledger,
        holder: str,
        push: Callable[[Sequence[Copy]], None],
        outgoing: PushFilter | None,
        control: TaskControls,
    ) -> None:
        self._ledger = ledger
        self._holder = holder
        self._put = push
        self._outgoing = outgoing
        self._control = control
        self._copies: list[Copy] = []  # borrowed and not pushed
        self._loans: list[Loan] = []
        self._claimed: dict[int, Key] = {}  # by the Event's id
        self._limited: Counter[int] = Counter()  # jobs of Tasks with a limit
        self._priorities: dict[int, int | None] = {}  # by Task
        self._refused: dict[Key, str] = {}  # copies that cannot be pushed, with the reason
        self._unknown: dict[Key, str] = {}  # copies that another process may be able to push, with the reason
        self._log = get_logger("asynctask.dispatcher")

    def add(
        self,
        found: Borrowed,
        now: int,
        task_id: int | None = None,
        *,
        limited: bool = False,
        at: int | None = None,
    ) -> None:
        """Adds borrowed jobs; ``task_id``: their Task, ``limited``: it has a limit. ``now``: a time (microseconds) before
        the borrow, which read the Task; ``at``: a priority that replaces their own."""
        self._loans += [loan for loan, _ in found.loans]
        self._claimed.update((job.event_id, (job.job_id, job.attempt)) for job in found.claimed)
        if limited and task_id is not None:
            self._limited[task_id] += found.count
        for job in [*found.claimed, *(job for _, jobs in found.loans for job in jobs)]:
            if task_id is not None:
                self._priorities.setdefault(task_id, job.priority)
            try:
                self._copies.append(tracked_copy(job if at is None else replace(job, priority=at), now))
            except Exception as error:
                self._refuse((job.job_id, job.attempt), error)

    def settle(self) -> int:
        """Pushes the borrowed jobs and hands them over. Returns the number pushed. Raises :class:`Unavailable`; if an
        engine's broker does not answer, all jobs are given back before.

        Jobs for Redis are handed over first: its workers in other languages perform any copy, so none may be pushed twice;
        and Redis lists its jobs, so the search for lost jobs finds those that never arrived. Jobs for an engine are pushed
        first: its workers drop a copy whose attempt is over, and so no job must wait for that search.
        """
        if not (self._loans or self._claimed):
            return 0
        if self._is_listed:
            self._hand_over()
        try:
            pushed = self._push()
        except Unavailable as error:
            if self._is_listed or isinstance(error, BrokerUnavailable):
                self._give_back()
            raise
        self._hand_over()
        tasks, self._priorities = self._priorities, {}
        if self._is_listed:
            for task_id in foreign.changed_tasks(self._ledger, tasks):
                if self._control.withdrawn(task_id):
                    try_close(self._ledger, task_id)  # a cancelled Task may have no worker that closes it
        return pushed

    @property
    def _is_listed(self) -> bool:
        return self._holder == queue_holder(None)

    def _hand_over(self) -> None:
        if self._loans or self._claimed:
            foreign.hand_over(self._ledger, self._holder, [loan.id for loan in self._loans], self._claimed, self._limited)
        self._loans, self._claimed, self._limited = [], {}, Counter()

    def leave(self) -> None:
        """Gives all jobs back; if the ledger is unavailable, they are recovered with this process."""
        try:
            self._give_back()
        except Unavailable as error:
            self._log.warning("outbox_not_given_back", error=str(error))

    def _give_back(self) -> None:
        """Gives back jobs that are not handed over; if a copy was pushed nevertheless, Begin drops it."""
        if self._loans:
            lending.give_back(self._ledger, [(loan, loan.low) for loan in self._loans])
        if self._claimed:
            give_back_copies(self._ledger, sorted(self._claimed.values()))
        for task_id in self._limited:
            foreign.lease(self._ledger, self._holder, task_id, 0)
        self._copies, self._refused, self._unknown = [], {}, {}
        self._loans, self._claimed, self._limited, self._priorities = [], {}, Counter(), {}

    def _push(self) -> int:
        asked = self._copies if self._outgoing is None else self._sift(self._copies, self._outgoing)
        pushed = len(self._sift(asked, self._pushed)) if asked else 0
        self._copies = []
        self._give_up()
        return pushed

    def _pushed(self, copies: Sequence[Copy]) -> Sequence[Copy]:
        self._put(copies)
        return copies

    def _sift(self, copies: Sequence[Copy], act: PushFilter) -> list[Copy]:
        """The copies that pass ``act``. If it raises, each half is tried, so that one bad copy does not stop the others."""
        try:
            return list(act(copies))
        except Unavailable:
            raise
        except Exception as error:
            if len(copies) == 1:
                self._refuse(copies[0].key, error)
                return []
        half = len(copies) // 2
        return self._sift(copies[:half], act) + self._sift(copies[half:], act)

    def _refuse(self, key: Key, error: Exception) -> None:
        if isinstance(error, UnknownWorker):
            self._log.warning("worker_missing", job_id=key[0], worker=error.name[:100])
            self._unknown[key] = (
                f"Waiting for a process that can dispatch it: one of them does not know {error.name[:200]!r}"
            )
            return
        self._log.error("copy_not_pushed", job_id=key[0], attempt=key[1], error=repr(error))
        self._refused[key] = clean(f"it cannot be put on its queue: {type(error).__name__}: {error}")

    def _give_up(self) -> None:
        """Ends jobs in ``error`` whose copies no broker accepts, and defers those that this process cannot push; keeps both
        until the ledger has recorded that."""
        if not self._refused and not self._unknown:
            return
        try:
            put_off_elsewhere(self._ledger, self._unknown, self._ledger.now() + micros(_UNKNOWN_S))
            self._unknown = {}
            discard(self._ledger, self._refused)
        except Unavailable:
            raise
        except Exception:  # maintenance finds the job lost, and dispatches it again
            self._log.exception("copies_not_discarded", count=len(self._refused) + len(self._unknown))
        self._refused, self._unknown = {}, {}
