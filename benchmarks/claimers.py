"""Many light processes that take jobs of one table at once: a program of its own, started by ``benchmarks.claim``.

It reads what to do as one JSON object from its standard input, imports what a claim needs and nothing else, and forks the
claimers from there, so that 120 of them share their memory. Each connects for itself and waits for the common start. What
it claimed goes into a file: the numbers of the jobs and the seconds of each claim. The last line printed is the sum.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import resource
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from asynctask.database.engine import Database
from asynctask.ledger import lending
from asynctask.ledger.base import Ledger
from asynctask.ledger.events import Note
from asynctask.ledger.lending import Job, Offer
from asynctask.ledger.recorder import Kind, Outcome, Recorder, Stage
from asynctask.middleware.tracker import Ticket, Tracker
from asynctask.runtime.loans import OwnLoans

__all__ = ["QUEUE", "main"]

QUEUE = "default"
AHEAD_S = 0.33
MOST = 1_000
_READY_S = 60.0
_START_S = 0.25
_EMPTY = 3
_LOCKED_S = 0.005
_TRIES = 10_000
_PDEATHSIG = 1

Claim = Callable[[], list[int]]


def main() -> int:
    """The program: forks, starts all at once, waits for all."""
    order: dict[str, Any] = json.load(sys.stdin)
    folder = Path(order["folder"])
    ready_r, ready_w = os.pipe()
    start_r, start_w = os.pipe()
    children = []
    for number in range(order["processes"]):
        child = os.fork()
        if child == 0:
            os.close(start_w)
            os._exit(_claimer(order, number, ready_w, start_r))
        children.append(child)
    os.close(ready_w)
    os.close(start_r)
    signal.alarm(int(_READY_S + 10 * order["seconds"] + 120))  # none of this may outlive a run that hangs
    ready = 0
    while ready < len(children):
        came = len(os.read(ready_r, 1_000))
        if not came:
            break
        ready += came
    begin = time.monotonic() + _START_S
    os.write(start_w, json.dumps(begin).encode().ljust(64) * len(children))
    failed = 0
    for child in children:
        failed += os.waitpid(child, 0)[1] != 0
    if failed or ready < len(children):
        return 1
    told = [json.loads((folder / f"{number}.told").read_text()) for number in range(order["processes"])]
    took = max(each["last"] for each in told) - begin
    print(json.dumps({"cpu_s": sum(each["cpu_s"] for each in told), "took_s": max(took, 0.001)}), flush=True)
    return 0


def _claimer(order: dict[str, Any], number: int, ready: int, start: int) -> int:
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)  # none outlives the program, however that ends
    try:
        opened = _ours if order["side"] == "ours" else _naive
        with opened(order, f"claimer-{number}") as (claim, close):
            os.write(ready, b"x")
            begin = float(json.loads(os.read(start, 64)))
            used = time.process_time()
            taken, latencies, last = _loop(order, claim, begin)
            used = time.process_time() - used
            close()
        folder = Path(order["folder"])
        (folder / f"{number}.jobs").write_bytes(array.array("q", taken).tobytes())
        (folder / f"{number}.claims").write_bytes(latencies.tobytes())
        (folder / f"{number}.told").write_text(json.dumps({"last": last, "cpu_s": used}))
        return 0
    except BaseException as error:
        print(f"claimer {number}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1


def _loop(order: dict[str, Any], claim: Claim, begin: float) -> tuple[list[int], array.array[float], float]:
    """The numbers of the jobs, the seconds of each claim that gave any, and when the last one was there."""
    taken: list[int] = []
    latencies, last = array.array("d"), begin
    work = order["work_ms"] / 1_000
    time.sleep(max(0.0, begin - time.monotonic()))
    until = begin + order["seconds"]
    empty = 0
    while (now := time.monotonic()) < until and empty < _EMPTY:
        numbers = claim()
        if numbers:
            empty, last = 0, time.monotonic()
            latencies.append(last - now)
            taken += numbers
            if work:
                time.sleep(work * len(numbers))
        else:
            empty += 1
            time.sleep(0.005)
    return taken, latencies, last


@contextmanager
def _ours(order: dict[str, Any], name: str) -> Iterator[tuple[Claim, Callable[[], None]]]:
    """A process that borrows what keeps it busy for a third of a second, and records it before it borrows again."""
    with closing(Database(order["database_url"], pool_size=1)) as database:
        borrower = Borrower(Ledger(database, identity=name), order["work_ms"] / 1_000, order["batch"])
        yield borrower.claim, borrower.close


class Borrower:
    """One process: a thread that borrows, and records by the recorder's own flush.

    ``work``: seconds of a job; ``batch``: jobs of a borrow, 0 for as many as last :data:`AHEAD_S`.
    """

    def __init__(self, ledger: Ledger, work: float, batch: int) -> None:
        self._ledger = ledger
        self._wanted = batch or min(MOST, 1 + int(AHEAD_S / work) if work else MOST)
        self._recorder = Recorder(ledger)
        self._tracker = Tracker(ledger, self._recorder)
        self._own = OwnLoans()
        self._held: list[Ticket] = []
        self._offers = self._pick()

    def _pick(self) -> list[Offer]:
        with self._ledger.database.read() as connection:
            return lending.pick(connection, self._ledger, [QUEUE])

    def claim(self) -> list[int]:
        """Records the last ones and borrows the next; returns their numbers. Only a Task without any gives none."""
        self._record()
        while not (numbers := self._borrow()) and self._offers:
            time.sleep(_LOCKED_S)
            self._offers = self._pick()
        return numbers

    def _borrow(self) -> list[int]:
        numbers: list[int] = []
        for offer in self._offers:
            found = lending.borrow(self._ledger, offer, self._wanted)
            numbers += self._claimed(found.claimed)
            for loan, jobs in found.loans:
                self._held += self._tracker.borrowed(jobs, self._own.add(loan, len(jobs)), 0.0)
                numbers += [job.seq for job in jobs if job.seq is not None]
        return numbers

    def _claimed(self, jobs: Sequence[Job]) -> list[int]:
        """Jobs whose key has come free, each of which is claimed."""
        if not jobs:
            return []
        tickets = self._tracker.begin([(job.job_id, job.attempt) for job in jobs])
        self._held += [ticket for ticket in tickets if ticket is not None]
        return [job.row - 1 for job in jobs if job.row is not None]

    def _record(self) -> None:
        now, done = self._ledger.now(), self._held
        notes = [Note("working", "In progress", now), Note("finish", "Done", now)]
        outcomes = [
            Outcome(
                ticket.event_id, ticket.attempt, Kind.FINISH, notes=notes, values={"started_at": now}, record=ticket.record,
                stage=Stage.UNREAD if ticket.is_untouched else Stage.READ, loan=ticket.loan,
            )
            for ticket in done
        ]  # fmt: skip
        if outcomes:
            self._recorder.flush(outcomes)
        self._held = []

    def close(self) -> None:
        """Records the last ones."""
        self._record()
        lending.leave(self._ledger)


class Naive:
    """The shape of DelayedJob: each job is locked by an UPDATE of the first row by priority and time, then deleted."""

    def __init__(self, kind: str, connection: Any, name: str) -> None:
        self._kind = kind
        self._cursor = connection.cursor()
        self._name = name
        self._mine = 0

    def claim(self) -> list[int]:
        """Deletes the last one and locks the next."""
        self.forget()
        row = self._claim_mariadb() if self._kind == "mariadb" else self._claim_returning()
        if row is None:
            return []
        self._mine = row[0]
        return [int(json.loads(row[1])["jid"], 16)]

    def forget(self) -> None:
        """Deletes the last one."""
        if self._mine:
            self._run("DELETE FROM delayed_jobs WHERE id = ?", self._mine)
            self._mine = 0

    def _claim_returning(self) -> Any:
        lock = " FOR UPDATE" if self._kind == "postgresql" else ""
        self._run(f"UPDATE delayed_jobs SET locked_by = ? WHERE id IN ({_FIRST}{lock}) RETURNING id, handler", self._name)
        return (self._cursor.fetchall() or [None])[0]

    def _claim_mariadb(self) -> Any:
        # Without RETURNING the row is found again in the cheapest way that there is.
        self._run(f"UPDATE delayed_jobs SET locked_by = IF((@claimed := id) > 0, ?, NULL) WHERE {_FREE}", self._name)
        if not self._cursor.rowcount:
            return None
        self._run("SELECT id, handler FROM delayed_jobs WHERE id = @claimed")
        return self._cursor.fetchone()

    def _run(self, statement: str, *values: Any) -> None:
        statement = statement if self._kind == "sqlite" else statement.replace("?", "%s")
        for tried in range(_TRIES):
            try:
                self._cursor.execute(statement, values)
            except Exception as error:
                if error.args[0] not in (1205, 1213) or tried == _TRIES - 1:  # a deadlock of MariaDB: the same again
                    raise
            else:
                return


@contextmanager
def _naive(order: dict[str, Any], name: str) -> Iterator[tuple[Claim, Callable[[], None]]]:
    with closing(_connect(order)) as connection:
        naive = Naive(order["kind"], connection, name)
        yield naive.claim, naive.forget


_FREE = "run_at <= 1 AND locked_by IS NULL ORDER BY priority, run_at LIMIT 1"
_FIRST = f"SELECT id FROM delayed_jobs WHERE {_FREE}"


def _connect(order: dict[str, Any]) -> Any:
    database = Database(order["database_url"], pool_size=1)
    url = database.url
    database.close()
    if order["kind"] == "sqlite":
        connection = sqlite3.connect(str(url.database), timeout=60, isolation_level=None)
        connection.execute("PRAGMA synchronous=FULL")
        return connection
    if order["kind"] == "postgresql":
        import psycopg

        text = url.set(drivername="postgresql").render_as_string(hide_password=False)
        return psycopg.connect(text, autocommit=True)
    import pymysql

    return pymysql.connect(
        host=url.host,
        port=url.port or 3306,
        user=url.username,
        password=url.password or "",
        database=url.database,
        autocommit=True,
    )


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.exit(main())
