"""The dispatcher: moves jobs from the ledger to the broker, little by little, under each Task's knobs.

It pushes only as many jobs as will be used soon. So a knob acts within a second, the broker stays small, and losing the
broker loses nothing.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import structlog

from asynctask.bookkeeping import target
from asynctask.brokers.base import Broker, Copy
from asynctask.bulk.payload import tracked_copy
from asynctask.errors import Unavailable
from asynctask.ledger import dispatch
from asynctask.ledger.base import Ledger, loads
from asynctask.ledger.dispatch import Ready, Runnable
from asynctask.ledger.recovery import living

__all__ = ["Dispatcher", "Load"]

LEASE_S = 5.0
"""How long a reservation is held for its push. Longer than any push that works; a crashed one is taken over after it."""

LOOK_AGAIN_S = 30.0
ALONE_AT_ONCE = 1_000
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
        self._unpushed: list[Copy] = []  # reserved, but the broker did not take them
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
        """Looks once at what may go and what is wanted, and pushes it. Returns how many jobs were pushed."""
        with self._round_lock:
            now = self._ledger.now()
            with self._ledger.database.read() as connection:
                waiting_tasks = dispatch.runnable(connection, now)
                again = dispatch.unconfirmed(connection, now)
                workers = living(connection, now)
                alone = dispatch.alone_due(connection, now)
            self._more = bool(waiting_tasks)
            pushed = self._push_again()
            if alone:
                pushed += self._push(dispatch.reserve_alone(self._ledger, ALONE_AT_ONCE, look_again_s=LOOK_AGAIN_S))
            for task_id in again:
                pushed += self._push(dispatch.take_again(self._ledger, task_id, lease_s=LEASE_S))
                dispatch.confirm(self._ledger, [task_id])
            if waiting_tasks:
                pushed += self._dispatch(waiting_tasks, self._loads(workers))
            return pushed

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

    def _dispatch(self, waiting: Sequence[Runnable], loads_: Sequence[Load]) -> int:
        wanted = self._wanted({task.queue for task in waiting}, loads_)
        pushed = 0
        for (queue, _priority), group in groupby(sorted(waiting, key=_order), key=lambda t: (t.queue, t.priority)):
            tasks = [task for task in group if task.parallel is None or task.flying < task.parallel]
            while wanted[queue] > 0 and tasks:
                share = max(1, wanted[queue] // len(tasks))  # Tasks of one priority share alike
                for task in list(tasks):
                    count = min(share, wanted[queue], _BATCH)
                    sent = self._dispatch_task(task.task_id, count) if count > 0 else 0
                    wanted[queue] -= sent
                    pushed += sent
                    if sent < count or sent == 0:
                        tasks.remove(task)
        return pushed

    def _wanted(self, queues: set[str], loads_: Sequence[Load]) -> dict[str, int]:
        waiting = self._broker.waiting(queues)
        wanted: dict[str, int] = defaultdict(int)
        for queue in queues:
            using = [load for load in loads_ if queue in load.queues]
            soon = sum(target(load.free, load.rate, self._ahead_s) for load in using)
            wanted[queue] = max(0, soon - waiting.get(queue, 0))
        return wanted

    def _dispatch_task(self, task_id: int, count: int) -> int:
        ready = dispatch.reserve(self._ledger, task_id, count, lease_s=LEASE_S)
        if not ready:
            return 0
        self._push(ready)
        dispatch.confirm(self._ledger, [task_id])
        return len(ready)

    def _push(self, ready: Sequence[Ready]) -> int:
        if not ready:
            return 0
        now = self._ledger.now()
        copies: Sequence[Copy] = [tracked_copy(each, now) for each in ready]
        if self._outgoing is not None:
            copies = self._outgoing(copies)
        self._unpushed = list(copies)
        return self._push_again()

    def _push_again(self) -> int:
        """What is reserved goes to the broker before anything else is reserved: a later confirmation covers it too."""
        copies = self._unpushed
        if copies:
            self._broker.push(copies)
            self._unpushed = []
        return len(copies)


def _order(task: Runnable) -> tuple[str, int, int]:
    return task.queue, task.priority, task.task_id
