"""A process that takes a list, splits, dispatches and performs it, and kills itself at a point of that way.

``CRASH_AT`` is ``before|after:point:n``: at the n-th time that the point is reached. The production code has no hooks for
this; its functions are wrapped here. ``CRASH_WORKER`` is the worker of the list; with ``plain`` its jobs are pushed one by
one, and nobody tracks them; with ``CRASH_SMALL`` each item is a Task of its own; with ``CRASH_CALLBACK`` the worker
``told`` is called back; with ``CRASH_KEY`` the items have three keys; with ``CRASH_PUSHED`` the jobs lie in the broker as
another program pushes them. Where the point is ``give_back``, the process becomes quiet soon.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.world import MARK, make_app, mixed

from asynctask import maintenance
from asynctask.brokers.base import Broker, Copy
from asynctask.ledger import lending, recorder, sessions, tasks
from asynctask.ledger.base import dumps
from asynctask.ledger.recorder import Outcome, Recorder
from asynctask.lists import split
from asynctask.middleware.tracker import Tracker
from asynctask.runtime.launcher import Launcher
from asynctask.sidekiq import fetcher

ITEMS = 30
AT_ONCE = 8
"""Jobs of one step: however fast it goes, every step is taken several times."""


def die() -> None:
    """The end, with nothing flushed, closed or given back."""
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


class Trap:
    """Goes off when its point is reached for the n-th time."""

    def __init__(self, at: str) -> None:
        self.when, self.point, count = at.split(":")
        self._left = int(count)
        self._lock = threading.Lock()

    def spring(self, when: str) -> None:
        if when != self.when:
            return
        with self._lock:
            self._left -= 1
            if self._left == 0:
                die()

    def around(self, inner: Callable[..., Any], reached: Callable[..., bool] = lambda *args: True) -> Callable[..., Any]:
        """The function, with the trap before and after it where ``reached`` says so of its arguments."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            here = reached(*args)
            if here:
                self.spring("before")
            answer = inner(*args, **kwargs)
            if here:
                self.spring("after")
            return answer

        return wrapped


PLACES: dict[str, list[tuple[Any, str]]] = {
    "insert": [(tasks, "add_slice")],
    "seal": [(tasks, "end_split")],
    "borrow": [(lending, "borrow")],
    "give_back": [(lending, "give_back")],
    "claim_alone": [(lending, "claim_alone")],
    "create": [(tasks, "_insert")],
    "begin": [(Tracker, "begin")],
    "close": [(recorder, "try_close"), (maintenance, "try_close"), (recorder, "close_small")],
    "queue_callbacks": [(tasks, "_queue_callbacks")],
    "finish": [(recorder, "try_finish"), (maintenance, "try_finish")],
    "admit": [(sessions, "turns")],
    "turn": [(sessions, "_unblock")],
}
"""What a point stands for: the functions, where they are looked up."""


def set_trap(trap: Trap, app: Any) -> None:
    """Wraps what the point names."""
    point = trap.point
    broker: Any = type(app.broker)
    for place, name in PLACES.get(point, []):
        setattr(place, name, trap.around(getattr(place, name)))
    if point == "free":
        patched: Any = lending
        patched.announce = trap.around(lending.announce, _ends_keyed)
    elif point == "fetch":
        broker.exchange = trap.around(broker.exchange, _will_fetch)
    elif point in ("perform", "told"):
        for name, worker in list(app.workers.items()):
            if point in ("perform", name):
                app._workers[name] = replace(worker, function=trap.around(worker.function))
    elif point == "commit":
        _trap_commit(trap)
    elif point == "ack":
        broker.exchange = trap.around(broker.exchange, lambda broker, process, done, *rest: bool(done))
    elif point == "hold":
        broker.hold = trap.around(broker.hold)
    elif point not in PLACES:
        raise ValueError(point)


def _borrow_few() -> None:
    patched: Any = lending
    borrow = patched.borrow
    patched.borrow = lambda ledger, offer, wanted, **more: borrow(ledger, offer, min(wanted, AT_ONCE), **more)


def _quiet_soon(app: Any, launcher: Launcher) -> None:
    """While a part of the third borrow has not begun: each job takes a tenth of a second."""
    worker = app.workers["note"]

    def slow(item: Any) -> Any:
        threading.Event().wait(0.1)
        return worker.function(item)

    app._workers["note"] = replace(worker, function=slow)
    pool: Any = launcher.pool
    make_ready, left = pool.make_ready, [3]

    def made_ready(executions: Any) -> None:
        make_ready(executions)
        left[0] -= 1
        if left[0] == 0:
            threading.Thread(target=launcher.quiet).start()

    pool.make_ready = made_ready


def _ends_keyed(ledger: Any, applied: Any) -> bool:
    return any(each.record is not None and each.record.line is not None for each in applied)


def _will_fetch(broker: Broker, process: str, done: Any, queues: Any, limit: int) -> bool:
    return limit > 0 and any(broker.waiting(queues).values())


def _trap_commit(trap: Trap) -> None:
    """Before: everything is written and nothing committed. After: it is committed and nobody was told."""
    patched: Any = recorder
    apply, put = patched.apply, Recorder.put

    def applied(*args: Any) -> Any:
        answer = apply(*args)
        trap.spring("before")
        return answer

    def told(each: Outcome) -> Outcome:
        then = each.then

        def spring_first(won: bool) -> None:
            trap.spring("after")
            if then is not None:
                then(won)

        each.then = spring_first
        return each

    patched.apply = applied
    patched.Recorder.put = lambda self, outcomes: put(self, [told(each) for each in outcomes])


def items() -> list[dict[str, Any]]:
    return [{**item, "serial": f"key {item['n'] % 3}"} for item in mixed(ITEMS)]


def _push(app: Any) -> None:
    for item in items():
        jid = app.ids.jid()
        job = {"class": "note", "args": [item], "jid": jid, "retry": 0, "use_task_event": True}
        app.broker.push([Copy(jid, 0, "default", dumps(job))])


def _submit(app: Any) -> None:
    worker = app.workers[os.environ.get("CRASH_WORKER", "note")]
    if os.environ.get("CRASH_SMALL"):
        for item in items():
            app.submit_items(worker, [item])
    elif worker.use_task_event:
        key = "serial" if os.environ.get("CRASH_KEY") else None
        app.submit_items(worker, items(), key=key, on_complete="told" if os.environ.get("CRASH_CALLBACK") else None)
    else:
        worker.perform_bulk(items())


def main() -> int:
    """Works until the trap goes off; 3 if it never does."""
    maintenance.EVERY_S["find_lost"] = 0.3
    split.FIRST_SLICE = split.SLICE = 10
    _borrow_few()
    for place, name in ((fetcher, "MAX_FETCH"), (recorder, "_MAX_BATCH")):
        getattr(place, name)  # one that is gone would limit nothing
        setattr(place, name, AT_ONCE)
    app = make_app(Path(os.environ[MARK]), lease_s=1.0, heartbeat_s=0.3)
    set_trap(Trap(os.environ["CRASH_AT"]), app)
    launcher = app.launcher(concurrency=2)
    if ":give_back:" in os.environ["CRASH_AT"]:
        _quiet_soon(app, launcher)
    if os.environ.get("CRASH_PUSHED"):
        _push(app)  # before anything is fetched: a trap that goes off meanwhile would leave some unpushed
        launcher.start()
    else:
        launcher.start()
        _submit(app)
    threading.Event().wait(120)
    return 3


if __name__ == "__main__":
    sys.exit(main())
