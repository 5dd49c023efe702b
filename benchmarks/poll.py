"""One look at the progress of a Task, in the server: of 5,000 items, and of N.

    python -m benchmarks.poll [-n N] [--polls P] [--server KIND | --database-url URL] [--json]

Both Tasks lie in one ledger and hold every status: done, refused, broken, cancelled, stopped, at work, waiting for a
retry, in flight, not reached yet; 100 samples; failures in 100 groups, recorded by 32 processes. Of the rows that these
groups are summed from, one for each group and slot at most, a larger Task has more; ``settings`` tells how many. Polls of
the two alternate, through ``task.progress()`` and through ``GET /api/tasks/ID`` of the real Flask application without a
network. ``ours`` is the median GET of the large one; ``large_to_small`` of ``settings`` is 1 where the size costs nothing.
The peer is what one would write without counts that are kept: ``SELECT status, count(*) ... GROUP BY status`` over the
Events of the same large Task on the raw driver, the query alone. ``ratio`` is ours to peer: less is better.

A quick look takes -n 20000, a figure -n 1000000.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import sqlalchemy as sa
from werkzeug.test import EnvironBuilder, run_wsgi_app

from asynctask import AsyncTask
from asynctask.clock import SystemClock
from asynctask.database.tables import task_errors
from benchmarks import common
from benchmarks.common import Result, Unaccounted
from benchmarks.fill import fill
from benchmarks.raw import Raw, raw
from webapi import create_app

__all__ = ["main"]

SMALL = 5_000
WARM_UP = 20
PEER_POLLS = 15
"""The peer reads every row of the Task each time; so many give its median."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = common.arguments(__doc__, n=20_000)
    parser.add_argument("--polls", type=int, default=200, help="polls of each kind (default 200)")
    return common.run(parser, argv, measure)


def measure(options: argparse.Namespace) -> Result:
    """Fills a ledger with both Tasks and polls them in turn."""
    if options.polls < 1:
        raise common.Refused("--polls must be at least 1")
    small_n = min(SMALL, options.n)
    with common.place(options) as place, closing(place.app()) as app:
        small, expected_small = fill(app, small_n)
        large, expected_large = fill(app, options.n)
        direct = _alternate(_progress(app, small), _progress(app, large), options.polls)
        asked = _alternate(_get(app, small), _get(app, large), options.polls)
        with raw(place) as driver:
            counted = _alternate(_count(driver, large, expected_large), _get(app, large), min(options.polls, PEER_POLLS), 1)
        common.audit(app, small, **expected_small)
        common.audit(app, large, **expected_large)
        group_rows = _group_rows(app, small), _group_rows(app, large)
    settings: dict[str, Any] = {
        **common.setting(options),
        "polls": options.polls,
        "counts": expected_large,
        "small_n": small_n,
        "failure_group_rows_small": group_rows[0],
        "failure_group_rows_large": group_rows[1],
        **_figures("get_small", asked[0]),
        **_figures("get_large", asked[1]),
        **_figures("progress_small", direct[0]),
        **_figures("progress_large", direct[1]),
        "progress_large_to_small": _ratio(direct[1], direct[0]),
        "large_to_small": _ratio(asked[1], asked[0]),
        "ours_is": "the median GET of the large Task, in the server, without a network",
        "peer": "SELECT status, count(*) GROUP BY status over the Events of the large Task, raw driver, the query alone",
        **_figures("peer", counted[0]),
        "ratio_is": "ours to peer, medians: less is better",
    }
    ours, peer = statistics.median(asked[1]), statistics.median(counted[0])
    return Result("poll", options.n, ours, peer, ours / peer, "ms", settings)


def _ratio(one: Sequence[float], other: Sequence[float]) -> float:
    return round(statistics.median(one) / statistics.median(other), 3)


def _count(driver: Raw, task_id: int, expected: dict[str, int]) -> Callable[[], None]:
    wanted = {status: count for status, count in expected.items() if count}

    def look() -> None:
        found = driver.rows("SELECT status, count(*) FROM events WHERE task_id = ? GROUP BY status", (task_id,))
        if dict(found) != wanted:
            raise Unaccounted(f"the peer counts {dict(found)}, expected {wanted}")

    return look


def _group_rows(app: AsyncTask, task_id: int) -> int:
    """Rows that the grouped failures of a Task are summed from: at most one for each group and slot, whatever its size."""
    found = sa.select(sa.func.count()).where(task_errors.c.task_id == task_id)
    with app.ledger.database.read() as connection:
        return int(connection.execute(found).scalar_one())


def _figures(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_median_ms": round(statistics.median(values), 3), f"{name}_p95_ms": round(common.p95(values), 3)}


def _alternate(
    one: Callable[[], None], other: Callable[[], None], count: int, warm_up: int = WARM_UP
) -> tuple[list[float], list[float]]:
    """Milliseconds of ``count`` calls of each, in turn, after ``warm_up`` that do not count."""
    clock, found = SystemClock(), ([], [])  # type: tuple[Any, tuple[list[float], list[float]]]
    for i in range(warm_up + count):
        for call, values in zip((one, other), found, strict=True):
            begun = clock.monotonic()
            call()
            if i >= warm_up:
                values.append((clock.monotonic() - begun) * 1e3)
    return found


def _progress(app: AsyncTask, task_id: int) -> Callable[[], None]:
    task = app.task(task_id)

    def look() -> None:
        task.progress()

    return look


def _get(app: AsyncTask, task_id: int) -> Callable[[], None]:
    """As a server calls the application: what comes before, the reading of the request, is not the application's."""
    application, path = create_app(app, allow_unprotected=True), f"/api/tasks/{task_id}"
    environ = EnvironBuilder(path=path).get_environ()

    def look() -> None:
        _, status, _ = run_wsgi_app(application, dict(environ), buffered=True)
        if not status.startswith("200 "):
            raise Unaccounted(f"GET {path}: {status}")

    return look


if __name__ == "__main__":
    sys.exit(main())
