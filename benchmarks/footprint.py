"""What jobs take up: the size of the tables after N of them, or with ``--redis`` the memory of Redis while lists wait.

    python -m benchmarks.footprint [-n N] [--server KIND | --database-url URL] [--json]
    python -m benchmarks.footprint --redis [-n N] [--few N] [--work-ms MS] [--server KIND] [--json]

One worker process performs the jobs, which do nothing, or wait for MS. Without ``--redis`` all N are done first; ``ours``
is the bytes that a job takes in all tables with their indexes, ``settings`` has each table's, and on PostgreSQL the share
of HOT updates: those that touch no index. A size on MariaDB is its own estimate.

With ``--redis`` a list of ``--few`` items and one of N are submitted, each to a Redis of its own. ``ours`` is the most
memory that Redis held, beyond what it held empty, until the whole list was accepted and a few thousand of its jobs were
done; the peer is the same of the short list.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import redis

from asynctask import AsyncTask
from asynctask.clock import SystemClock
from asynctask.database.engine import Database
from asynctask.database.tables import metadata
from benchmarks import common
from benchmarks.children import Job, await_worker, build, child
from benchmarks.common import Refused, Result, Unaccounted

__all__ = ["main"]

_MILLION = 1_000_000
_MB = 1_048_576
_LIMIT_S = 3_600.0
_DONE = 2_000
"""So many jobs are done before the memory of Redis is read: what is fetched ahead has settled by then."""

_ROWS = {
    "sqlite": (
        "SELECT m.tbl_name, sum(CASE m.type WHEN 'table' THEN d.pgsize ELSE 0 END),"
        " sum(CASE m.type WHEN 'index' THEN d.pgsize ELSE 0 END)"
        " FROM dbstat d JOIN sqlite_master m ON m.name = d.name GROUP BY m.tbl_name"
    ),
    "postgresql": (
        "SELECT relname, pg_table_size(relid), pg_indexes_size(relid) FROM pg_stat_user_tables WHERE schemaname = 'public'"
    ),
    "mariadb": (
        "SELECT table_name, data_length, index_length FROM information_schema.tables WHERE table_schema = database()"
    ),
}
"""Table, bytes of its rows, bytes of its indexes."""

_UPDATES = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'events'"


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = common.arguments(__doc__, n=200_000)
    parser.add_argument("--few", type=int, default=10_000, help="with --redis: items of the short list (default 10,000)")
    parser.add_argument("--work-ms", type=float, default=0.0, metavar="MS", help="each job waits so long (default 0)")
    return common.run(parser, argv, measure)


def measure(options: argparse.Namespace) -> Result:
    """Measures the tables, or Redis."""
    if options.broker_url:
        raise Refused("--broker-url: the memory of a Redis that others use says nothing; give --redis")
    return _redis(options) if options.redis else _tables(options)


# -- tables


def _tables(options: argparse.Namespace) -> Result:
    with common.place(options) as place, closing(build(place, Job(work_ms=options.work_ms))) as app:
        with child("worker", place, "--work-ms", str(options.work_ms)) as process:
            await_worker(app, process)
            task = app.submit("job", _items(options.n), title="benchmark")
            _await(lambda: task.progress()["done"], "the jobs did not end")
        common.audit(app, task.id, finish=options.n)
        sizes = _sizes(app.ledger.database)
        updates = _updates(app.ledger.database, options.n) if place.kind == "postgresql" else {}
    total = sum(rows + indexes for rows, indexes in sizes.values())
    settings: dict[str, Any] = {
        **common.setting(options),
        "mb": {
            name: {"rows": round(rows / _MB, 1), "indexes": round(indexes / _MB, 1)}
            for name, (rows, indexes) in sorted(sizes.items(), key=lambda each: -sum(each[1]))
            if rows + indexes >= total / 100
        },
        "total_mb": round(total / _MB, 1),
        "mb_per_million": round(total / options.n * _MILLION / _MB),
        **updates,
    }
    return Result("footprint", options.n, total / options.n, None, None, "bytes/job", settings)


def _items(n: int) -> Iterator[dict[str, object]]:
    return ({"n": i} for i in range(n))


def _sizes(database: Database) -> dict[str, tuple[int, int]]:
    with database.read() as connection:
        if database.dialect == "mariadb":  # else the figures are of the last time that the server looked
            names = ", ".join(metadata.tables)
            connection.exec_driver_sql(f"ANALYZE TABLE {names}").all()
        found = connection.exec_driver_sql(_ROWS[database.dialect]).all()
    return {str(name): (int(rows), int(indexes)) for name, rows, indexes in found if name in metadata.tables}


def _updates(database: Database, n: int) -> dict[str, Any]:
    """Of the Events' updates: how many, and which share were HOT. A session's are counted soon after it ended."""
    found: list[int] = []

    def all_counted() -> bool:
        with database.read() as connection:
            found[:] = map(int, connection.exec_driver_sql(_UPDATES).one())
        return found[0] >= n

    _await(all_counted, "the server did not count the updates")
    return {"updates_per_job": round(found[0] / n, 2), "hot_share": round(found[1] / found[0], 4)}


# -- Redis


def _redis(options: argparse.Namespace) -> Result:
    if not 1 <= options.few <= options.n:
        raise Refused(f"--few must be from 1 to {options.n:,}, the items of the long list")
    few, many = (_memory(options, n) for n in (options.few, options.n))
    settings: dict[str, Any] = {
        **common.setting(options),
        "few": options.few,
        "job": f"waits for {options.work_ms:g} ms" if options.work_ms else "nothing",
        "empty_mb": round(many[0] / _MB, 2),
        "peer": f"the same of a list of {options.few:,} items",
        "ours_is": "the most memory that Redis held beyond what it held empty",
        "waiting": many[2],
    }
    ours, peer = (most - empty for empty, most, _ in (many, few))
    return Result("footprint", options.n, ours / _MB, peer / _MB, ours / peer, "MB", settings)


def _memory(options: argparse.Namespace, n: int) -> tuple[int, int, int]:
    """Bytes that Redis held with a worker process that had nothing to do, the most that it held then, and how many items
    still waited."""
    with common.place(options) as place, closing(build(place, Job(work_ms=options.work_ms))) as app:
        assert place.redis is not None
        with (
            child("worker", place, "--work-ms", str(options.work_ms)) as process,
            redis.Redis.from_url(place.redis.url) as client,
        ):
            await_worker(app, process)
            empty = int(client.info("memory")["used_memory"])
            task = app.submit("job", _items(n), title="benchmark")
            wanted = min(n, _DONE)
            _await(lambda: _ended(app, task.id) >= wanted, "the jobs did not end")
            counts = task.progress()["counts"]
            peak = int(client.info("memory")["used_memory_peak"])
        if counts["total"] != n:
            raise Unaccounted(f"the Task has {counts['total']} items, expected {n}")
    return empty, peak, counts["enqueue"]


def _ended(app: AsyncTask, task_id: int) -> int:
    return int(app.task(task_id).progress()["counts"]["finish"])


def _await(fact: Callable[[], bool], otherwise: str) -> None:
    clock, pause = SystemClock(), threading.Event()
    until = clock.monotonic() + _LIMIT_S
    while not fact():
        if clock.monotonic() > until:
            raise Unaccounted(otherwise)
        pause.wait(0.1)


if __name__ == "__main__":
    sys.exit(main())
