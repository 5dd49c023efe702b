"""Items handed in by a program: from just before ``app.submit`` until the last is in the ledger and the split is sealed.

    python -m benchmarks.submit [-n N] [--runs R] [--server KIND | --database-url URL] [--json]

No worker runs. The peer is the raw driver on the same table of the same database: the very same rows, prepared before its
clock starts, a thousand in each transaction, in the fastest way that the driver has without a file (COPY on PostgreSQL, an
INSERT of many rows on MariaDB, executemany on SQLite), and nothing else. Runs of both alternate; the figures are medians.

A quick look takes -n 50000, a figure -n 300000.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from asynctask.clock import SystemClock, SystemIds
from asynctask.ledger.base import dumps
from benchmarks import common
from benchmarks.common import Place, Result, Unaccounted
from benchmarks.raw import LOADS, raw

__all__ = ["main"]

SLICE = 1_000
_COLUMNS = ("job_id", "task_id", "seq", "status", "params", "first_row", "last_row", "created_at")


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = common.arguments(__doc__, n=50_000)
    parser.add_argument("--runs", type=int, default=3, help="runs of each (default 3)")
    return common.run(parser, argv, measure)


def measure(options: argparse.Namespace) -> Result:
    """Runs both sides ``--runs`` times in turn."""
    if options.runs < 1:
        raise common.Refused("--runs must be at least 1")
    ours, peer = [], []
    for _ in range(options.runs):
        with common.place(options) as place:
            ours.append(options.n / _ours(place, options.n))
        with common.place(options) as place:
            peer.append(options.n / _peer(place, options.n))
    settings: dict[str, Any] = {
        **common.setting(options),
        "runs": options.runs,
        "item": dumps(_item(0)),
        "clock": "from just before submit until it returns: every item committed, the split sealed",
        **common.spread("ours", ours),
        "peer": f"raw {LOADS[options.source.kind]}: same table, rows prepared before, {SLICE:,} in each transaction",
        **common.spread("peer", peer),
    }
    middle, beside = statistics.median(ours), statistics.median(peer)
    return Result("submit", options.n, middle, beside, middle / beside, "items/s", settings)


def _item(i: int) -> dict[str, object]:
    return {"sku": f"SKU-{i:08d}", "seller": "Bargain Basement", "quantity": i % 100}


def _items(n: int) -> Iterator[dict[str, object]]:
    return (_item(i) for i in range(n))


def _ours(place: Place, n: int) -> float:
    clock = SystemClock()
    with closing(place.app(max_rows=max(n, 1_000_000))) as app:

        @app.worker
        def job(item: dict[str, object]) -> None:
            """Never performed here."""

        app.ensure_schema()
        begun = clock.monotonic()
        task = app.submit("job", _items(n), title="benchmark")
        seconds = clock.monotonic() - begun
        common.audit(app, task.id, enqueue=n)
        split = task.progress()["split"]
        if (split["state"], split["created"], split["rejected"]) != ("sealed", n, 0):
            raise Unaccounted(f"the split says {split}")
    return seconds


def _peer(place: Place, n: int) -> float:
    clock, jids = SystemClock(), SystemIds().jids(n)
    now = clock.now()
    rows = [(jids[i], 1, i, "enqueue", dumps(item), i + 1, i + 1, now) for i, item in enumerate(_items(n))]
    with raw(place) as driver:
        begun = clock.monotonic()
        for start in range(0, n, SLICE):
            driver.load("events", _COLUMNS, rows[start : start + SLICE])
        seconds = clock.monotonic() - begun
        if driver.rows("SELECT count(*) FROM events") != [(n,)]:
            raise Unaccounted("the peer did not insert every row")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
