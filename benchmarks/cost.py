"""What a tracked job that does nothing costs the database, from its submit until its Task is done.

    python -m benchmarks.cost [-n N] [--server KIND | --database-url URL] [--json]

This process submits; one worker process performs. ``ours`` is the bytes per item that the database logs: the WAL of
PostgreSQL, the redo log of MariaDB; on SQLite, which is a part of the worker process, what that process has written. A
server counts what all its databases log: it must do nothing else. ``settings`` has the row writes per item on PostgreSQL
(inserted, updated and deleted rows, of all tables), and what is allowed. The peer is the design before the ledger lent,
measured in November 2026 with lists of 100,000; it is not run.

There is no figure where more is written than is allowed: 900 bytes of WAL and 2 row writes on PostgreSQL, 700 bytes on
SQLite, with 1 % for what does not grow with the list.

A quick look takes -n 10000, a figure -n 100000.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple

from asynctask.database.engine import Database
from asynctask.testing import wait_for
from benchmarks import common
from benchmarks.children import Job, await_worker, build, child
from benchmarks.common import Result, Unaccounted

__all__ = ["main"]

BEFORE: Final = {"sqlite": 2_280.0, "postgresql": 2_665.0, "mariadb": 5_895.0}
"""Bytes per item of the design before: the middle of 2,100 to 2,460, of 2,450 to 2,880, and of 5,750 to 6,040."""

BYTES: Final = {"sqlite": 700.0, "postgresql": 900.0}
ROWS: Final = {"postgresql": 2.0}
"""The most that an item may cost."""

FIXED: Final = 1.01
"""Allowance for what a run costs however many items it has."""

_LIMIT_S: Final = 3_600.0


class Written(NamedTuple):
    """What was written so far: bytes of the log, rows; None where the database does not count them."""

    log: int
    rows: int | None


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return common.run(common.arguments(__doc__, n=20_000), argv, measure)


def measure(options: argparse.Namespace) -> Result:
    """One run."""
    with common.place(options) as place, closing(build(place, Job())) as app, child("worker", place) as worker:
        await_worker(app, worker)
        database = app.ledger.database
        before = _written(database, worker)
        task = app.submit("job", ({"n": n} for n in range(options.n)), title="benchmark")
        task.wait(timeout=_LIMIT_S, poll_s=0.05)
        size = (_written(database, worker).log - before.log) / options.n
        rows = None if before.rows is None else _rows(database, worker, before.rows, 2 * options.n) / options.n
        common.audit(app, task.id, finish=options.n)
    kind = place.kind
    settings: dict[str, Any] = {
        **common.setting(options),
        "row_writes_per_item": None if rows is None else round(rows, 3),
        "bytes_allowed": BYTES.get(kind),
        "row_writes_allowed": ROWS.get(kind),
        "peer": "the design before the ledger lent, as measured in November 2026",
        "peer_kind": "before",
    }
    for name, found, most in (("bytes", size, BYTES.get(kind)), ("row writes", rows, ROWS.get(kind))):
        if most is not None and found is not None and found > most * FIXED:
            raise Unaccounted(f"an item costs {found:,.2f} {name}, and may cost {most:g}")
    return Result("cost", options.n, size, BEFORE[kind], size / BEFORE[kind], "bytes/item", settings)


def _written(database: Database, worker: subprocess.Popen[str]) -> Written:
    if database.dialect == "sqlite":
        fields = dict(line.split(": ") for line in Path(f"/proc/{worker.pid}/io").read_text().splitlines())
        return Written(int(fields["write_bytes"]), None)
    with database.read() as connection:
        if database.dialect == "postgresql":
            log = connection.exec_driver_sql("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')").scalar_one()
            rows = connection.exec_driver_sql("SELECT sum(n_tup_ins + n_tup_upd + n_tup_del) FROM pg_stat_user_tables")
            return Written(int(log), int(rows.scalar_one() or 0))
        log = connection.exec_driver_sql("SHOW GLOBAL STATUS LIKE 'Innodb_os_log_written'").one()[1]
        return Written(int(log), None)


def _rows(database: Database, worker: subprocess.Popen[str], before: int, least: int) -> int:
    """The rows written since; PostgreSQL counts those of a session soon after its transactions."""
    found: list[int] = []

    def all_counted() -> bool:
        found.append((_written(database, worker).rows or 0) - before)
        return found[-1] >= least and found[-2:-1] == found[-1:]  # it does not grow any more

    wait_for(all_counted, "the server counted the rows", every=1.0)
    return found[-1]


if __name__ == "__main__":
    sys.exit(main())
