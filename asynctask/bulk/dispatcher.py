"""The dispatcher: moves jobs from the ledger to the broker, little by little, under each Task's knobs.

It pushes only as many jobs as will be used soon. So a knob acts within a second, the broker stays small, and losing the
broker loses nothing.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from asynctask.bookkeeping import target
from asynctask.brokers.base import Broker, Copy, Key
from asynctask.bulk.payload import tracked_copy
from asynctask.errors import Unavailable
from asynctask.ledger import dispatch
from asynctask.ledger.base import Ledger, loads
from asynctask.ledger.dispatch import Alone, Ready, Runnable
from asynctask.ledger.record import discard
from asynctask.ledger.recovery import living
from asynctask.messages import clean

__all__ = ["Dispatcher", "Load"]

LEASE_S = 5.0
"""How long a reservation is held for its push. Longer than any push that works; a crashed one is taken over after it."""

LOOK_AGAIN_S = 30.0
IDLE_S = 1.0
ACTIVE_S = 0.1
_BATCH = 1_000


@dataclass(frozen=True, slots=True)
class Load:
    """What one worker process can use: its queues, its idle threads, and how many jobs it finishes in a second."""

    identity: str
    queues: Sequence[str]
    free: int
    rate: float


PushFilter = Callable[[Sequence[Copy]], Sequence[Copy]]
_Send = Callable[[int], int]
"""Dispatches up to so many jobs of one source; returns how many it did."""


class Dispatcher:
    """One dispatcher; any number may run, in any process, and any one suffices.

    Arguments: ``ahead_s`` is how many seconds of consumption wait in the queue; ``outgoing`` is the client side's last word
    on what is pushed. What this very process can use is asked of whoever was attached; of others the last heartbeat counts.
    """

    def __init__(
        self,
        ledger: Ledger,
        broker: Broker,
        *,
        ahead_s: float = 0.25,
        outgoing: PushFilter | None = None,
    ) -> None:
        self._ledger = ledger
        self._broker = broker
        self._ahead_s = ahead_s
        self._local: Callable[[], Load] | None = None
        self._outgoing = outgoing
        self._round_lock = threading.Lock()
        self._unasked: list[Copy] = []  # reserved, and not past the client side's last word
        self._unpushed: list[Copy] = []  # past it, but the broker did not take them
        self._refused: dict[Key, str] = {}  # copies that cannot be pushed, and why
        self._alone_first = False
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._more = True
        self._log = structlog.get_logger("asynctask.dispatcher")

    # -- the thread

    def start(self) -> None:
        """Runs rounds in a thread of its own until :meth:`stop`."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(10)

    def attach(self, local: Callable[[], Load] | None) -> None:
        """Tells what performs jobs in this very process, or (None) that nothing does any more."""
        self._local = local

    def nudge(self) -> None:
        """Something changed: a round at once."""
        self._wake.set()

    def dry(self, worked: bool) -> None:
        """This process found less in its queues than it could use; ``worked``: it had jobs since it last said so.

        A round at once where there may be more; an idle process that looks again and again costs nothing.
        """
        if worked or self._more:
            self._wake.set()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.round()
            except Unavailable as error:
                self._log.warning("dispatch_put_off", error=str(error))
            except Exception:
                self._log.exception("dispatch_failed")
            self._wake.wait(ACTIVE_S if self._more else IDLE_S)
            self._wake.clear()

    # -- one round

    def round(self) -> int:
        """Looks once at what may go and what is wanted, and pushes it. Returns how many jobs were pushed.

        Raises :class:`Unavailable` where the ledger or the broker does not answer; any other fault is told and costs only
        the part of the round that it is in.
        """
        with self._round_lock:
            now = self._ledger.now()
            with self._ledger.database.read() as connection:
                tasks = dispatch.runnable(connection, now)
                again = dispatch.unconfirmed(connection, now)
                soon = self._soon(living(connection, now))
                # Jobs whose queue nobody works wait in the ledger, and no other job waits behind them.
                alone = dispatch.alone_due(connection, now, [queue for queue, count in soon.items() if count > 0])
            self._more = bool(tasks)
            pushed = self._part(self._push_again)
            for task_id in again:
                pushed += self._part(partial(self._take_again, task_id))
            if tasks or alone:
                pushed += self._part(partial(self._dispatch, tasks, alone, soon))
            return pushed

    def _part(self, act: Callable[[], int]) -> int:
        try:
            return act()
        except Unavailable:
            raise
        except Exception:
            self._log.exception("dispatch_failed")
            return 0

    def _soon(self, workers: Iterable[Mapping[str, object]]) -> dict[str, int]:
        """How many jobs of each queue its workers can use soon."""
        soon: dict[str, int] = defaultdict(int)
        for load in self._loads(workers):
            for queue in set(load.queues):
                soon[queue] += target(load.free, load.rate, self._ahead_s)
        return soon

    def _loads(self, workers: Iterable[Mapping[str, object]]) -> list[Load]:
        loads_ = [
            Load(
                str(w["identity"]),
                loads(str(w["queues"])),
                int(str(w["concurrency"])) - int(str(w["busy"])),
                float(str(w["rate"])),
            )
            for w in workers
            if not w["quiet"]
        ]
        if self._local is not None:
            mine = self._local()
            loads_ = [load for load in loads_ if load.identity != mine.identity] + [mine]
        return loads_

    def _dispatch(self, tasks: Sequence[Runnable], alone: Sequence[Alone], soon: Mapping[str, int]) -> int:
        sources: dict[tuple[str, int], list[_Send]] = defaultdict(list)
        for task in tasks:
            if task.parallel is None or task.flying < task.parallel:
                sources[task.queue, task.priority].append(partial(self._dispatch_task, task.task_id))
        single: dict[tuple[str, int], list[int]] = defaultdict(list)
        for job in alone:
            single[job.queue, job.priority].append(job.event_id)
        # Where there is room for one only, neither the single jobs nor the Tasks of a priority may always come first.
        self._alone_first = not self._alone_first
        for key, ids in single.items():
            sources[key].insert(0 if self._alone_first else len(sources[key]), partial(self._dispatch_alone, ids))
        waiting = self._broker.waiting({queue for queue, _ in sources}) if sources else {}
        room = _Room(soon, waiting, ordered=self._broker.capabilities.priority)
        pushed = sum(self._share(room, *key, sources[key]) for key in sorted(sources))
        self._more = self._more or any(single.values())
        return pushed

    def _share(self, room: _Room, queue: str, priority: int, sources: list[_Send]) -> int:
        """Tasks of one priority share alike, and the single jobs of that priority count as one of them."""
        pushed = 0
        while sources and (wanted := room.at(queue, priority)) > 0:
            share = max(1, wanted // len(sources))
            for send in list(sources):
                count = min(share, room.at(queue, priority), _BATCH)
                sent = self._part(partial(send, count)) if count > 0 else 0
                room.take(queue, priority, sent)
                pushed += sent
                if sent < count or sent == 0:
                    sources.remove(send)
        return pushed

    def _dispatch_task(self, task_id: int, count: int) -> int:
        ready = dispatch.reserve(self._ledger, task_id, count, lease_s=LEASE_S)
        if not ready:
            return 0
        self._push(ready)
        dispatch.confirm(self._ledger, [task_id])
        return len(ready)

    def _dispatch_alone(self, ids: list[int], count: int) -> int:
        """Takes what it dispatches out of ``ids``; those that another dispatcher took meanwhile are passed over."""
        sent = 0
        while ids and sent < count:
            part = ids[: count - sent]
            del ids[: len(part)]
            ready = dispatch.reserve_alone(self._ledger, part, look_again_s=LOOK_AGAIN_S)
            self._push(ready)
            sent += len(ready)
        return sent

    def _take_again(self, task_id: int) -> int:
        pushed = self._push(dispatch.take_again(self._ledger, task_id, lease_s=LEASE_S))
        dispatch.confirm(self._ledger, [task_id])
        return pushed

    # -- to the broker

    def _push(self, ready: Sequence[Ready]) -> int:
        now = self._ledger.now()
        for each in ready:
            try:
                self._unasked.append(tracked_copy(each, now))
            except Exception as error:
                self._refuse((each.job_id, each.attempt), error)
        return self._push_again()

    def _push_again(self) -> int:
        """What is reserved goes to the broker before anything else is reserved: a later confirmation covers it too."""
        if self._unasked:
            asked = self._unasked if self._outgoing is None else self._sift(self._unasked, self._outgoing)
            self._unpushed += asked
            self._unasked = []
        pushed = len(self._sift(self._unpushed, self._pushed)) if self._unpushed else 0
        self._unpushed = []
        if self._refused:
            self._give_up()
        return pushed

    def _pushed(self, copies: Sequence[Copy]) -> Sequence[Copy]:
        self._broker.push(copies)
        return copies

    def _sift(self, copies: Sequence[Copy], act: PushFilter) -> list[Copy]:
        """What of these gets through ``act``. Where it fails, each half is tried: one bad copy must not keep the others."""
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
        self._log.error("copy_not_pushed", job_id=key[0], attempt=key[1], error=repr(error))
        self._refused[key] = clean(f"it cannot be put on its queue: {type(error).__name__}: {error}")

    def _give_up(self) -> None:
        """What no broker takes ends in ``error``; it is remembered until the ledger took that."""
        try:
            discard(self._ledger, self._refused)
        except Unavailable:
            raise
        except Exception:  # the sweep finds it lost and it comes by again
            self._log.exception("copies_not_discarded", count=len(self._refused))
        self._refused = {}


class _Room:
    """How many jobs are still wanted: what a queue's workers can use soon, less what waits there and would go first.

    What waits at a larger priority does not count, for it would be passed: a pile of upkeep must not keep an urgent job in
    the ledger. In a broker that is not ``ordered`` by priority, everything goes first.
    """

    def __init__(self, soon: Mapping[str, int], waiting: Mapping[str, Mapping[int, int]], *, ordered: bool) -> None:
        self._soon = soon
        self._waiting = {queue: dict(counts) for queue, counts in waiting.items()}
        self._ordered = ordered

    def at(self, queue: str, priority: int) -> int:
        counts = self._waiting.get(queue, {})
        first = sum(count for other, count in counts.items() if other <= priority or not self._ordered)
        return max(0, self._soon.get(queue, 0) - first)

    def take(self, queue: str, priority: int, count: int) -> None:
        counts = self._waiting.setdefault(queue, {})
        counts[priority] = counts.get(priority, 0) + count
