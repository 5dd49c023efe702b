"""A foreign queue in memory, for tests of the dispatcher: an engine whose broker is a list, its worker the test."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from support.clocks import SettableClock

from asynctask import AsyncTask
from asynctask.brokers.base import Copy
from asynctask.core.states import Reason, Status
from asynctask.core.transitions import outcome
from asynctask.database.tables import events
from asynctask.dispatch.demand import Rates
from asynctask.integrations.base import EngineCapabilities
from asynctask.ledger import processes
from asynctask.ledger.events import Change, apply, read_events
from asynctask.ledger.lending import announce
from asynctask.ledger.tasks import try_close
from asynctask.worker import Worker

QUEUE = "shop/default"


def works(app: AsyncTask, identity: str, queues: Sequence[str], threads: int) -> None:
    """A process of this name works these queues; without threads, it has ended."""
    ledger = replace(app.ledger, identity=identity)
    processes.forget(ledger, identity)
    if threads:
        kind, pid = identity.partition("@")[0], os.getpid()
        processes.register(
            ledger, app.host, kind=kind, pid=pid, lease_s=3600.0, concurrency=threads, queues=tuple(queues), info={}
        )


class Shop:
    """An engine of one queue. ``refuses`` says of a push why it fails; ``pushed`` has every copy since the beginning."""

    name = "shop"
    capabilities = EngineCapabilities(True, True, True, False, False, False)

    def __init__(self, app: AsyncTask, *, free: int = 0, workers: Collection[str] = ("sold", "sent")) -> None:
        self.app = app
        self.process = f"shop@here:1:{app.ids.nonce()}"
        self.queues: dict[str, list[Copy]] = {}
        self.pushed: list[Copy] = []
        self.refuses: Callable[[Sequence[Copy]], BaseException | None] = lambda copies: None
        self.workers: Mapping[str, Worker[Any, Any]] = {
            name: Worker(name, lambda item: None, queue=QUEUE, engine="shop") for name in workers
        }
        app.attach(self)  # type: ignore[arg-type]
        app.dispatcher.queues.rates = Rates(SettableClock())  # how fast a test takes jobs says nothing
        self.uses(free)

    # -- what the dispatcher calls

    def push(self, copies: Sequence[Copy]) -> None:
        if (error := self.refuses(copies)) is not None:
            raise error
        self.pushed += copies
        for copy in copies:
            self.queues.setdefault(copy.queue, []).append(copy)

    def waiting(self, queues: Collection[str]) -> Mapping[str, int]:
        return {queue: len(self.queues.get(queue, [])) for queue in queues}

    def may_hold(self, queue: str, worker: str) -> bool:
        return False

    # -- what its worker does

    def uses(self, free: int, *queues: str) -> None:
        """Its one process can use so many jobs."""
        works(self.app, self.process, queues or (QUEUE,), free)

    def takes(self, count: int | None = None) -> list[Copy]:
        """Takes jobs out of its queue."""
        waiting = self.queues.get(QUEUE, [])
        taken, self.queues[QUEUE] = waiting[:count], waiting[len(waiting[:count]) :]
        return taken

    def ends(self, copies: Sequence[Copy]) -> None:
        """Records that these jobs returned."""
        ledger = self.app.ledger
        with ledger.database.write() as connection:
            found = read_events(connection, events.c.job_id.in_([copy.jid for copy in copies]))
            changes = [
                Change(record.id, lambda record: outcome(record.row, Status.FINISH, Reason.RETURNED)) for record in found
            ]
            applied = apply(connection, ledger, changes)
        announce(ledger, applied)
        for task_id in {copy.task_id for copy in copies if copy.task_id is not None}:
            try_close(ledger, task_id)
