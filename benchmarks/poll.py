"""One look at the progress of a Task, in the server: of 5,000 items, and of N.

    python -m benchmarks.poll [-n N] [--json]

Both Tasks lie in one ledger and hold every status: done, refused, broken, cancelled, stopped, at work, waiting for a
retry, in flight, not reached yet; 100 samples; failures in 100 groups, recorded by 32 processes. Of the rows that these
groups are summed from, one for each group and slot at most, a larger Task has more; ``settings`` tells how many. Polls of
the two alternate, through ``task.progress()`` and through ``GET /api/tasks/ID`` of the real Flask application without a
network. ``ours`` is the median GET of the large one; ``ratio`` is large to small, 1 where the size costs nothing. No peer
is run.

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

from asynctask import AsyncTask
from asynctask.clock import SystemClock
from asynctask.ledger.models import task_errors
from benchmarks import common
from benchmarks.common import Result, Unaccounted
from benchmarks.fill import fill
from webapi import create_app

__all__ = ["main"]

SMALL = 5_000
WARM_UP = 20


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
        common.audit(app, small, **expected_small)
        common.audit(app, large, **expected_large)
        group_rows = _group_rows(app, small), _group_rows(app, large)
    settings: dict[str, Any] = {
        **common.setting(),
        "polls": options.polls,
        "counts": expected_large,
        "small_n": small_n,
        "failure_group_rows_small": group_rows[0],
        "failure_group_rows_large": group_rows[1],
        **_figures("get_small", asked[0]),
        **_figures("get_large", asked[1]),
        **_figures("progress_small", direct[0]),
        **_figures("progress_large", direct[1]),
        "progress_ratio": round(statistics.median(direct[1]) / statistics.median(direct[0]), 3),
        "ours_is": "the median GET of the large Task, in the server, without a network",
        "ratio_is": "large to small, medians of GET",
    }
    ours, beside = statistics.median(asked[1]), statistics.median(asked[0])
    return Result("poll", options.n, round(ours, 3), None, round(ours / beside, 3), "ms", settings)


def _group_rows(app: AsyncTask, task_id: int) -> int:
    """Rows that the grouped failures of a Task are summed from: at most one for each group and slot, whatever its size."""
    found = sa.select(sa.func.count()).where(task_errors.c.task_id == task_id)
    with app.ledger.database.read() as connection:
        return int(connection.execute(found).scalar_one())


def _figures(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_median_ms": round(statistics.median(values), 3), f"{name}_p95_ms": round(common.p95(values), 3)}


def _alternate(one: Callable[[], None], other: Callable[[], None], count: int) -> tuple[list[float], list[float]]:
    """Milliseconds of ``count`` calls of each, in turn, after a few that do not count."""
    clock, found = SystemClock(), ([], [])  # type: tuple[Any, tuple[list[float], list[float]]]
    for i in range(WARM_UP + count):
        for call, values in zip((one, other), found, strict=True):
            begun = clock.monotonic()
            call()
            if i >= WARM_UP:
                values.append((clock.monotonic() - begun) * 1e3)
    return found


def _progress(app: AsyncTask, task_id: int) -> Callable[[], None]:
    task = app.task(task_id)

    def look() -> None:
        task.progress()

    return look


def _get(app: AsyncTask, task_id: int) -> Callable[[], None]:
    client, path = create_app(app).test_client(), f"/api/tasks/{task_id}"

    def look() -> None:
        answer = client.get(path)
        if answer.status_code != 200:
            raise Unaccounted(f"GET {path}: {answer.status_code}")

    return look


if __name__ == "__main__":
    sys.exit(main())
