"""Jobs of one Task that many processes borrow and record at once, and what that costs.

    python -m benchmarks.claim [-n N] [--processes 15,30,60,120] [--seconds S] [--work-ms W] [--batch B]
                               [--keys K] [--snapshot] [--server KIND | --database-url U] [--json]

A Task has N jobs that wait. Then so many light processes borrow from it for S seconds: each takes what keeps it busy for a
third of a second (or --batch), spends W milliseconds on each job, and records them in one transaction before it borrows
again. Before the next number of processes the Task gets new jobs until N wait again. What is empty before the time is over
is filled and borrowed from again.

The peer is the same with the claim of DelayedJob on a table of its own, with its index (priority, run_at): one job at a
time, locked by an UPDATE of the first row by priority and time, deleted by its id; raw drivers, nothing above them.

Each job must come exactly once: recorded by one process or waiting still, or there is no figure. "ours" is the number of
jobs a second at the most processes.

With ``--snapshot`` another transaction keeps a snapshot of the tables all the time, as a backup does: no version of a row
that is written meanwhile can be removed.

A quick look takes -n 10000 --processes 2,4 --seconds 1, a figure -n 1000000 and the rest as it is.
"""

from __future__ import annotations

import argparse
import array
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from asynctask.database.engine import Database
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, NewItem, dumps
from asynctask.ledger.tasks import NewTask, Throttle
from benchmarks import common
from benchmarks.claimers import QUEUE
from benchmarks.common import Place, Result, Unaccounted

__all__ = ["Table", "main"]

PRIORITY = 240
_ROUNDS = 8
_SLICE = 1_000
_LEASE_S = 86_400.0
_SETTLE_S = 0.2
_TICKS = os.sysconf("SC_CLK_TCK")


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = common.arguments(__doc__, n=10_000)
    parser.add_argument(
        "--processes", default="15,30,60,120", metavar="P,P...", help="how many claim at once (15,30,60,120)"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each number of processes claims (default 4)")
    parser.add_argument("--work-ms", type=float, default=20.0, help="what each job takes (default 20)")
    parser.add_argument("--batch", type=int, default=0, help="jobs of a borrow (default: as the rate asks)")
    parser.add_argument("--keys", type=int, default=0, help="give the jobs so many different keys (default: none)")
    parser.add_argument("--snapshot", action="store_true", help="another transaction keeps a snapshot all the time")
    parser.add_argument("--no-peer", action="store_true", help="leave the peer out")
    return common.run(parser, argv, measure)


def measure(options: argparse.Namespace) -> Result:
    """Runs every number of processes, ours and the peer in turn."""
    if options.broker.redis:
        raise common.Refused("claim measures the ledger: leave --redis and --broker-url out")
    counts = _counts(options)
    sides = ["ours"] if options.no_peer else ["ours", "peer"]
    found: dict[str, dict[int, dict[str, float]]] = {side: {} for side in sides}
    with common.place(options) as place:
        tables = {side: Table(place, side, options.keys) for side in sides}
        with _snapshot(place) if options.snapshot else nullcontext():
            for count in counts:
                for side in sides:
                    found[side][count] = _stage(options, place, tables[side], count)
        settings: dict[str, Any] = {
            **common.setting(options),
            "work_ms": options.work_ms,
            "seconds": options.seconds,
            "batch": options.batch or "what keeps a process busy for a third of a second; at most 1,000",
            "tasks": 1,
            "snapshot": options.snapshot,
            **{f"{side}_{count}": found[side][count] for side in sides for count in counts},
        }
    ours = found["ours"][counts[-1]]["per_s"]
    beside = None if options.no_peer else found["peer"][counts[-1]]["per_s"]
    settings["last_to_best"] = round(ours / max(each["per_s"] for each in found["ours"].values()), 3)
    if beside is not None:
        settings["peer"] = "one UPDATE of the first row by priority and time for each job, as DelayedJob does"
    return Result("claim", options.n, ours, beside, ours / beside if beside else None, "jobs/s", settings)


@contextmanager
def _snapshot(place: Place) -> Iterator[None]:
    """Keeps a snapshot of all tables open."""
    if place.kind == "sqlite":
        raise common.Refused("--snapshot: a server's")
    with closing(Database(place.database_url)) as database, database.snapshot() as connection:
        connection.exec_driver_sql("SELECT COUNT(*) FROM tasks").all()
        yield


def _counts(options: argparse.Namespace) -> list[int]:
    try:
        counts = [int(word) for word in options.processes.split(",")]
    except ValueError:
        counts = []
    if not counts or not all(1 <= count <= 500 for count in counts):
        raise common.Refused("--processes: numbers from 1 to 500 with commas between them, e.g. 15,30,60,120")
    if not 0.1 <= options.seconds <= 600 or not 0 <= options.work_ms <= 60_000 or not 0 <= options.batch <= 1_000:
        raise common.Refused("--seconds from 0.1 to 600, --work-ms from 0 to 60000, --batch from 0 to 1000")
    return counts


def _stage(options: argparse.Namespace, place: Place, table: Table, count: int) -> dict[str, float]:
    """One number of processes on one side: rounds until they claimed for so long."""
    jobs, took, server, claimers = 0, 0.0, 0.0, 0.0
    latencies = array.array("d")
    for _ in range(_ROUNDS):
        table.fill(options.n)
        with tempfile.TemporaryDirectory(dir=place.folder) as name:
            time.sleep(_SETTLE_S)  # what the filling cost is the server's own to add up, when its process has ended
            before = table.server_cpu()
            told = _claim(options, place, table.side, count, Path(name), max(0.1, options.seconds - took))
            server += table.server_cpu() - before
            jobs += table.account(Path(name), count)
            for number in range(count):
                latencies.frombytes((Path(name) / f"{number}.claims").read_bytes())
        took += told["took_s"]
        claimers += told["cpu_s"]
        if took >= 0.8 * options.seconds:
            break
    found = {
        "per_s": round(jobs / took, 1),
        "claims_per_s": round(len(latencies) / took, 1),
        "p50_ms": round(statistics.median(latencies) * 1_000, 2),
        "p95_ms": round(common.p95(latencies) * 1_000, 2),
        "claimers_cpus": round(claimers / took, 2),
    }
    return found | ({"server_cpus": round(server / took, 2)} if place.kind != "sqlite" else {})


def _claim(
    options: argparse.Namespace, place: Place, side: str, count: int, folder: Path, seconds: float
) -> dict[str, float]:
    order = {
        "database_url": place.database_url,
        "kind": place.kind,
        "side": side,
        "processes": count,
        "seconds": seconds,
        "work_ms": options.work_ms,
        "batch": options.batch,
        "folder": str(folder),
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.claimers"], input=json.dumps(order), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Unaccounted(f"{count} claimers ({side}): {done.stderr.strip()[-2_000:]}")
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


class Table:
    """The table of one side, and which of the jobs that were ever put into it have been claimed.

    Jobs are numbered: ours by their ``seq`` in a Task whose split is never over, the peer's in a column.
    """

    def __init__(self, place: Place, side: str, keys: int = 0) -> None:
        self.side = side
        self._keys = keys
        self._place = place
        self._claimed = bytearray()
        self._server: int | None = None
        self._task_id = 0
        if side == "peer":
            key = {"sqlite": "INTEGER PRIMARY KEY", "postgresql": "BIGSERIAL PRIMARY KEY"}.get(
                place.kind, "BIGINT PRIMARY KEY AUTO_INCREMENT"
            )
            self._run(
                f"CREATE TABLE delayed_jobs (id {key}, priority INT NOT NULL, run_at BIGINT NOT NULL,"
                " number BIGINT NOT NULL, locked_by VARCHAR(64), handler TEXT NOT NULL)",
                "CREATE INDEX delayed_jobs_priority ON delayed_jobs (priority, run_at)",
            )

    @contextmanager
    def _ledger(self) -> Iterator[Ledger]:
        with closing(Database(self._place.database_url, pool_size=1)) as database:
            yield Ledger(database, identity="benchmark")

    def fill(self, n: int) -> None:
        """Puts in as many new jobs as are missing to ``n`` that wait."""
        low = len(self._claimed)
        high = low + n - self._left()[0]
        if self.side == "peer":
            for start in range(low, high, 100_000):
                self._run(self._fill_peer(start, min(start + 100_000, high) - 1))
        else:
            self._fill_task(low, high, n)
        self._claimed += bytes(high - low)
        if self._place.kind == "postgresql":
            self._run("VACUUM (ANALYZE) events, tasks" if self.side == "ours" else "VACUUM (ANALYZE) delayed_jobs")

    def _fill_task(self, low: int, high: int, planned: int) -> None:
        item = {"sku": "SKU-00000000", "seller": "Bargain Basement"}
        with self._ledger() as ledger:
            if not self._task_id:
                new = NewTask(
                    worker_name="job", queue=QUEUE, priority=PRIORITY, title="benchmark", planned=planned,
                    throttle=Throttle(key_field="serial" if self._keys else None),
                )  # fmt: skip
                self._task_id = task_rows.create(ledger, [task_rows.First(new)], lease_s=_LEASE_S)[0].task_id
            for start in range(low, high, _SLICE):
                numbers = range(start, min(start + _SLICE, high))
                items = [NewItem(dumps(item), i + 1, key=str(i % self._keys) if self._keys else None) for i in numbers]
                cursor = start + len(items)
                task_rows.add_slice(ledger, self._task_id, items, [], after=start, cursor=cursor, lease_s=_LEASE_S)

    def _fill_peer(self, low: int, high: int) -> str:
        kind = self._place.kind
        source = {
            "sqlite": f"(WITH RECURSIVE s (i) AS (SELECT {low} UNION ALL SELECT i + 1 FROM s WHERE i < {high})"
            " SELECT i FROM s)",
            "postgresql": f"generate_series({low}::bigint, {high}::bigint) AS s (i)",
            "mariadb": f"(SELECT seq AS i FROM seq_{low}_to_{high}) AS s",
        }[kind]
        jid = {
            "sqlite": "printf('%024x', i)",
            "postgresql": "lpad(to_hex(i), 24, '0')",
            "mariadb": "LPAD(LOWER(HEX(i)), 24, '0')",
        }[kind]
        text = '\'{"class":"job","args":[{"sku":"SKU-00000000","seller":"Bargain Basement"}],"jid":"\''
        payload = f"CONCAT({text}, {jid}, '\"}}')" if kind == "mariadb" else f"{text} || {jid} || '\"}}'"
        into = "delayed_jobs (priority, run_at, number, handler)"
        return f"INSERT INTO {into} SELECT {PRIORITY}, 1, i, {payload} FROM {source}"

    def account(self, folder: Path, count: int) -> int:
        """Notes what was claimed; returns how many that were. Raises :class:`Unaccounted`."""
        found = 0
        for number in range(count):
            values = array.array("q")
            values.frombytes((folder / f"{number}.jobs").read_bytes())
            for each in values:
                if self._claimed[each]:
                    raise Unaccounted(f"job {each} was claimed twice")
                self._claimed[each] = 1
            found += len(values)
        left, total = self._left()
        waiting = [number for number, claimed in enumerate(self._claimed) if not claimed]
        if (left, total) != (len(waiting), sum(waiting)):
            raise Unaccounted(f"{len(waiting)} jobs were claimed by nobody, but {left} wait")
        return found

    def _left(self) -> tuple[int, int]:
        """How many wait, and the sum of their numbers; nobody holds any. Raises :class:`Unaccounted`."""
        if self.side == "peer":
            select = "SELECT count(*), coalesce(sum(number), 0), count(locked_by) FROM delayed_jobs"
        else:
            lent = "(SELECT count(*) FROM loans WHERE process IS NOT NULL)"
            select = f"SELECT count(*), coalesce(sum(seq), 0), {lent} FROM events WHERE status = 'enqueue'"
        left, total, held = self._run(select)[0]
        if held:
            raise Unaccounted(f"{held} jobs or loans are still in the hands of a process")
        return int(left), int(total)

    def _run(self, *statements: str) -> list[Any]:
        rows: list[Any] = []
        with closing(Database(self._place.database_url, pool_size=1)) as database:
            opened = database.write() if database.is_sqlite else database.read()
            with opened as connection:
                for statement in statements:
                    result = connection.exec_driver_sql(
                        statement.replace("%", "%%") if not database.is_sqlite else statement
                    )
                    rows = list(result) if result.returns_rows else []
        return rows

    def server_cpu(self) -> float:
        """Processor seconds of the database server so far, where it runs on this machine; else 0."""
        if self._place.kind == "sqlite":
            return 0.0
        if self._server is None:
            self._server = self._find_server()
        return _cpu(self._server) if self._server else 0.0

    def _find_server(self) -> int:
        """The server's main process; 0 where it is on another machine."""
        with closing(Database(self._place.database_url, pool_size=1)) as database, database.read() as connection:
            if self._place.kind == "postgresql":
                backend = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
                fields = _stat(int(backend))
                return int(fields[1]) if fields else 0
            path = Path(str(connection.exec_driver_sql("SELECT @@pid_file").scalar_one()))
            return int(path.read_text()) if path.is_file() else 0


def _stat(pid: int) -> list[str]:
    """The fields of a process behind its name; nothing where it is gone, or on another machine."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _cpu(main: int) -> float:
    """Of a process, the children it has waited for, and those that live."""
    fields = _stat(main)
    ticks = sum(int(value) for value in fields[11:15])
    for path in Path("/proc").glob("[0-9]*/stat"):
        child = _stat(int(path.parent.name))
        if child and child[1] == str(main):
            ticks += int(child[11]) + int(child[12])
    return ticks / _TICKS


if __name__ == "__main__":
    sys.exit(main())
