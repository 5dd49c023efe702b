"""An attack on a running system: workers, servers and people do what they should not, and everything is accounted for.

    python -m benchmarks.chaos [-n N] [--minutes M] [--server KIND] [--redis] [--seed S] [--json]

Four worker processes perform lists of every sort while faults are drawn at random: processes killed or stopped past their
lease, a clock that is a minute off, jobs that fork, a database and a Redis that are killed, silent or cut off, a web server
killed while it splits a list, and people who turn knobs. A fault counts only if it hit jobs that were being performed. The
jobs keep a book of their own of when they were performed, which is held against the ledger at the end.

Exit code: 0, all promises held; 1, one is broken; 2, the run is void: a kind of fault never hit, or it could not be run.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from asynctask import AsyncTask
from asynctask.clock import SystemIds
from asynctask.core.states import TERMINAL
from asynctask.database import schema
from asynctask.database.engine import Database
from asynctask.errors import AsyncTaskError, Unavailable
from asynctask.task import TaskHandle
from asynctask.testing import wait_for
from benchmarks import databases
from benchmarks.chaos_arena import THREADS, WORKERS, Arena, arena, clock, patiently
from benchmarks.chaos_audit import Audit, Expected, audit
from benchmarks.chaos_faults import Fault, Faults, said
from benchmarks.processes import Unaccounted

__all__ = ["main"]

KEYS = 50
PER_SESSION = 5
SESSION_ITEMS = 10
INTERVAL_S = 0.5
ROUND = 3
BUSY = 0.4
"""The share of the threads' time that the jobs of a run take: the rest is for the faults."""

LEAST_N = 500
LEAST_ROWS = 4_000
"""Of an upload: fewer are split before anybody could be killed."""

LEASE_S = 2.0
"""Short, so that much happens in a minute. A machine that is so busy that it keeps a process from running for as long needs
more: nobody can tell that one from a dead one."""

LATE_S = 120.0
"""So long after its time the run still waits for a kind of fault to hit."""

_MAX_N = 1_000_000
_STILL_S = 300.0
"""A run in which nothing ends for so long has come to a halt: how long it takes in all depends on the machine."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=100_000, metavar="N", help="items (default 100000)")
    parser.add_argument("--minutes", type=float, default=5.0, metavar="M", help="how long faults happen (default 5)")
    parser.add_argument("--server", choices=databases.KINDS, default="sqlite", help="a private one is started")
    parser.add_argument("--redis", action="store_true", help="with a private Redis as broker")
    parser.add_argument("--seed", type=int, help="of the faults (default: another one each time; it is printed)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new folder for book and logs, which is kept")
    parser.add_argument("--lease", type=float, default=LEASE_S, metavar="S", help="of the processes (default %(default)g)")
    parser.add_argument("--json", action="store_true", help="make the last line one JSON object")
    options = parser.parse_args(argv)
    if not LEAST_N <= options.n <= _MAX_N or not 0.05 <= options.minutes <= 600:
        parser.error(f"-n must be from {LEAST_N} to {_MAX_N:,}, --minutes from 0.05 to 600")
    if not 1 <= options.lease <= 60:
        parser.error("--lease must be from 1 to 60")
    if options.seed is None:
        options.seed = int(SystemIds().nonce()[:8], 16)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with tempfile.TemporaryDirectory(prefix="asynctask-chaos-") as folder:
            if options.keep is not None:
                options.keep.mkdir(parents=True)
            return run(options, (options.keep or Path(folder)).absolute())
    except (databases.Refused, Unaccounted, AsyncTaskError, AssertionError, OSError) as error:
        print(f"{parser.prog}: not run as asked: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace, folder: Path) -> int:
    """One run; returns the exit code."""
    rows = max(LEAST_ROWS, options.n // 20)
    work_ms = min(200.0, max(1.0, BUSY * options.minutes * 60_000 * WORKERS * THREADS / (options.n + 2 * rows)))
    print(f"seed {options.seed}, {options.server}{' and Redis' * options.redis}, jobs of {work_ms:.1f} ms", flush=True)
    draw = random.Random(options.seed)
    ground = arena(folder, options.server, with_redis=options.redis, work_ms=work_ms, lease_s=options.lease)
    with ground as place, closing(place.app()) as app:
        with closing(Database(place.direct_url)) as database:
            schema.upgrade(database)
            _watch(database)
        lists = Lists(app)
        faults = Faults(place, app, draw, rows, lists.submit, lists.take)
        place.start_web()
        place.start_poller()
        place.start_workers(draw.choice([60.0, -60.0]))
        wait_for(
            lambda: sum(each["kind"] == "worker" for each in app.processes()) == WORKERS, "every worker has registered"
        )
        lists.submit_all(options.n, options.minutes, faults)
        since = clock.monotonic()
        _attack(place, faults, options, since)
        expected = lists.made + [Expected(task_id, range(first, first + faults.rows)) for task_id, first in faults.uploads]
        _await_end(app, [*(each.task_id for each in expected), *faults.corrections.tasks])
        seconds = clock.monotonic() - since
        _await_idle(place, app)
        unclean = place.end_workers()
        found = audit(place, app, faults, expected)
        found.put("workers that did not end in order", unclean)
        hits = _hits(place, faults, found)
        return _show(options, found, hits, faults.log, seconds)


_SEEN = "INSERT INTO chaos_seen VALUES (NEW.id, OLD.status, NEW.status);"
_MARKED = "COALESCE(OLD.marks, '') <> COALESCE(NEW.marks, '')"
_MARKS = "INSERT INTO chaos_marks VALUES (NEW.id, COALESCE(OLD.marks, ''), COALESCE(NEW.marks, ''));"


def _watch(database: Database) -> None:
    """Has the database note by itself every change of a status from or to a terminal one, and of what items came to."""
    names = ", ".join(f"'{status}'" for status in TERMINAL)
    ends = f"OLD.status <> NEW.status AND (OLD.status IN ({names}) OR NEW.status IN ({names}))"
    dialect = database.dialect
    statements = ["CREATE TABLE chaos_seen (event_id BIGINT, was VARCHAR(9), became VARCHAR(9))",
                  "CREATE TABLE chaos_marks (event_id BIGINT, was TEXT, became TEXT)"]  # fmt: skip
    for name, column, when, note in (("chaos", "status", ends, _SEEN), ("chaos_slices", "marks", _MARKED, _MARKS)):
        if dialect == "sqlite":
            statements.append(f"CREATE TRIGGER {name} AFTER UPDATE OF {column} ON events WHEN {when} BEGIN {note} END")
        elif dialect == "postgresql":
            body = f"BEGIN {note} RETURN NULL; END"
            statements.append(f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $${body}$$")
            each = f"FOR EACH ROW WHEN ({when}) EXECUTE FUNCTION {name}()"
            statements.append(f"CREATE TRIGGER {name} AFTER UPDATE OF {column} ON events {each}")
        else:
            body = f"BEGIN IF {when} THEN {note} END IF; END"
            statements.append(f"CREATE TRIGGER {name} AFTER UPDATE ON events FOR EACH ROW {body}")
    for statement in statements:
        with database.write() as connection:
            connection.exec_driver_sql(statement)


# -- the lists


class Lists:
    """Submits lists, and knows what has to become of them."""

    def __init__(self, app: AsyncTask) -> None:
        self._app = app
        self._next = 0
        self.made: list[Expected] = []

    def take(self, count: int) -> int:
        """Takes so many numbers of items; returns the first."""
        self._next += count
        return self._next - count

    def submit(self, worker: str, count: int, *, chunk_size: int = 1, **options: Any) -> int:
        """A list of so many items; returns its Task."""
        first = self.take(count)
        numbers = range(first, first + count)
        items = [_item(worker, number) for number in numbers]
        told = {"worker": "told", "args": ["complete"]}
        promised = dict(options)
        key = SystemIds().nonce()  # a database that falls may have taken it
        options |= {"on_complete": told, "idempotency_key": key, "chunk_size": chunk_size}
        task = patiently(partial(self._app.submit, worker, items, **options), "a list is taken")
        assert isinstance(task, TaskHandle)
        task_id = task.id
        self.made.append(Expected(task_id, numbers, keys=KEYS if worker == "keyed" else 0, **promised))
        return task_id

    def submit_all(self, n: int, minutes: float, faults: Faults) -> None:
        """Lists of every sort, with ``n`` items in all."""
        before = self._next
        rounds = min(n // 50, int(minutes * 60 / INTERVAL_S * ROUND * 0.4))
        self.submit("once", max(rounds, ROUND), parallel=ROUND, interval=INTERVAL_S)
        self.submit("once", n // 10, parallel=5)
        self.submit("keyed", n // 10)
        for number in range(max(2, n // 10 // (PER_SESSION * SESSION_ITEMS))):
            for _ in range(PER_SESSION):
                self.submit("once", SESSION_ITEMS, session=f"user:{number}")
        self.submit("once", n // 20, parallel=3, chunk_size=10)
        self.submit("work", n // 20, chunk_size=50)
        faults.doomed += [self.submit("work", max(50, n // 200), parallel=1, chunk_size=size) for size in (1, 1, 7, 7)]
        faults.turned += [self.submit("work", n // 20, parallel=8) for _ in range(2)]
        faults.timed += [self.submit("work", n // 50, parallel=4)]
        faults.retriable += [self.submit("work", max(20, n // 200), chunk_size=size) for size in (1, 10)]
        self.submit("work", max(100, n - (self._next - before)))


def _item(worker: str, number: int) -> dict[str, Any]:
    if worker == "keyed":
        return {"n": number, "key": number % KEYS}
    if number % 97 == 0:
        return {"n": number, "kind": "fork"}
    if number % 13 == 0:
        return {"n": number, "kind": "refuse"}
    if worker == "work" and number % 17 == 0:
        return {"n": number, "kind": "shaky"}
    return {"n": number, "kind": "bug" if number % 101 == 0 else "ok"}


# -- the attack


def _attack(place: Arena, faults: Faults, options: argparse.Namespace, since: float) -> None:
    """Every kind once, in a drawn order, then any at random until the time is over; with new work where there is none."""
    left, void = list(faults.kinds), set[str]()
    faults.draw.shuffle(left)
    until, last = since + options.minutes * 60, since + 3 * options.minutes * 60 + LATE_S
    while clock.monotonic() < until or (left and clock.monotonic() < last):
        _keep_at_work(place, faults, options.n)
        waits = clock.monotonic() < until and void.issuperset(left)  # none of them is tried again at once
        kind = left.pop() if left and not waits else faults.draw.choice(list(faults.kinds))
        fault = faults.strike(kind)
        void = set() if fault.hit else {*void, kind}
        print(said(fault, since), flush=True)
        if not fault.hit and not any(each.hit for each in faults.log if each.kind == kind):
            left = [kind, *(each for each in left if each != kind)]  # later there may be something to hit
        faults.pause(0.5)


def _keep_at_work(place: Arena, faults: Faults, n: int) -> None:
    """Until jobs are performed, of another list where all are over."""
    wait_for(lambda: place.at_work() or _nothing_left(faults), "jobs are performed again", 300)
    if _nothing_left(faults):
        faults.submit("work", max(500, n // 10))
        wait_for(place.at_work, "jobs are performed again", 300)


def _nothing_left(faults: Faults) -> bool:
    try:
        with faults.app.ledger.database.read() as connection:
            statement = sa.text("SELECT count(*) FROM tasks WHERE finished_at IS NULL")
            return bool(connection.execute(statement).scalar_one() == 0)
    except Unavailable:
        return False


def _await_end(app: AsyncTask, ids: Sequence[int]) -> None:
    """Until every Task is over, or no item has come to anything for :data:`_STILL_S`."""
    left, before = list(ids), -1

    def over() -> bool:
        while left and app.task(left[-1]).progress()["done"]:
            left.pop()
        return not left

    while (now := _done(app)) != before:
        before = now
        with suppress(AssertionError):
            patiently(over, "every Task is over", _STILL_S)
            return
    print(f"Tasks {left[-20:]} are not over: {app.task(left[-1]).progress()}", file=sys.stderr)


def _done(app: AsyncTask) -> int:
    statement = sa.text("SELECT count(*) FROM chaos_seen")

    def read() -> tuple[int]:
        with app.ledger.database.read() as connection:
            return (int(connection.execute(statement).scalar_one()),)

    return patiently(read, "outcomes are counted")[0]


def _await_idle(place: Arena, app: AsyncTask) -> None:
    """Until nobody performs, every worker has registered and the poller has seen the end.

    A worker that replaces another could be told to end before it has its signal handlers, and then ends with -15.
    """
    wait_for(lambda: not place.at_work(), "nothing is performed", 120)
    wait_for(lambda: place.have_registered(app), "every worker has registered", 120)
    pause_over = clock.monotonic() + 1.0
    wait_for(lambda: clock.monotonic() > pause_over, "the last poll")


# -- the end


def _hits(place: Arena, faults: Faults, found: Audit) -> dict[str, int]:
    """How many faults of each kind hit something."""
    hits = dict.fromkeys(faults.kinds, 0)
    hits.update(Counter(fault.kind for fault in faults.log if fault.hit))
    wrong_clock = {str(pid) for slot in place.slots if slot.ahead_s for pid in slot.pids}
    texts = {path.name: path.read_text() for path in place.book.iterdir()}
    hits["jobs under a clock a minute off"] = sum(texts.get(pid, "").count("B ") for pid in wrong_clock)
    hits["jobs that forked"] = sum(text.count("\nF ") for text in texts.values())
    found.table["faults"] = dict(hits)
    found.table["void faults"] = sum(not fault.hit for fault in faults.log)
    return hits


def _show(options: argparse.Namespace, found: Audit, hits: dict[str, int], log: list[Fault], seconds: float) -> int:
    found.table["seconds"] = round(seconds, 1)
    never = [kind for kind, count in hits.items() if not count]
    for name, value in found.table.items():
        print(f"  {name}: {value}")
    for line in found.broken:
        print(f"BROKEN  {line}")
    for kind in never:
        print(f"VOID    never hit: {kind}")
    code = 1 if found.broken else 2 if never else 0
    print({0: "all promises held", 1: "a promise is broken", 2: "void"}[code])
    if options.json:
        where = {"kind": options.server, "broker": "Redis" if options.redis else "the database", "seed": options.seed}
        settings = {**where, "code": code, "minutes": options.minutes, "lease_s": options.lease, "table": found.table,
                    "broken": found.broken, "never_hit": never, "log": [vars(fault) for fault in log]}  # fmt: skip
        print(json.dumps({"name": "chaos", "n": found.table["items"], "ours": len(found.broken), "peer": None,
                          "ratio": None, "unit": "broken", "settings": settings}))  # fmt: skip
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
