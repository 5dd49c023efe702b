"""The report of a Task whose rows all failed, downloaded from a web server: when it begins, how long it takes, its memory.

    python -m benchmarks.reports [-n N] [--sheet] [--format csv|xlsx] [--runs R] [--server KIND] [--json]

The items come from a program, have eight fields and are split as any list; their failures are recorded by the recorder.
With ``--sheet`` they are the seven columns of an uploaded workbook, which every report reads again. A web server in a
process of its own answers ``GET /api/tasks/ID/report.csv`` or ``.xlsx``. ``ours`` is the median time until the first byte
of the file is here; ``total_ms`` and ``peak_mb`` (of the server's process, all runs together, without the one that reads
the workbook) are in ``settings``. The peer is the bare loop over the same rows in memory, with :mod:`csv` or XlsxWriter in
constant memory: it has nothing to send before its last row, so its total time counts.
"""

from __future__ import annotations

import argparse
import csv
import http.client
import io
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import xlsxwriter

from asynctask import AsyncTask
from asynctask.clock import SystemClock
from asynctask.ledger import lending
from asynctask.ledger.events import Failure, Note
from asynctask.ledger.lending import Job
from asynctask.ledger.recorder import Kind, Outcome, Recorder
from benchmarks import common, sheet_files
from benchmarks.children import await_address, child
from benchmarks.common import Result, Unaccounted
from benchmarks.fill import borrowed
from benchmarks.memory import server_peak_mb

__all__ = ["main"]

_PAGE = 1_000
_POLL_S = 0.05
_WHY = "the seller is not qualified for this promotion"


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = common.arguments(__doc__, n=10_000)
    parser.add_argument("--sheet", action="store_true", help="of an uploaded workbook, not of a program's items")
    parser.add_argument("--format", choices=("csv", "xlsx"), default="xlsx", help="of the report (default xlsx)")
    parser.add_argument("--runs", type=int, default=3, help="downloads, in turn with the peer (default 3)")
    return common.run(parser, argv, measure)


def measure(options: argparse.Namespace) -> Result:
    """Makes the Task, then downloads its report and runs the peer in turn."""
    firsts, totals, peers = [], [], []
    with common.place(options) as place, closing(place.app()) as app:
        app.worker(name="job", retry=0)(_elsewhere)
        task_id = _uploaded(app, options.n, place.folder) if options.sheet else app.submit("job", _items(options.n)).id
        _fail_all(app, task_id)
        common.audit(app, task_id, failed=options.n)
        with child("web", place) as process:
            address = await_address(process)
            _download(address, "/healthz")
            before = server_peak_mb(process.pid)
            for _ in range(options.runs):
                first, total, data = _download(address, f"/api/tasks/{task_id}/report.{options.format}")
                _check(data, options)
                firsts.append(first)
                totals.append(total)
                peers.append(_peer(options, place.folder))
            peak = server_peak_mb(process.pid)
    settings: dict[str, Any] = {
        **common.setting(options),
        "runs": options.runs,
        "format": options.format,
        "list": "an uploaded workbook" if options.sheet else "items of a program",
        "total_ms": round(statistics.median(totals)),
        "peak_mb": peak,
        "idle_mb": before,
        "peer": f"the bare loop of {'csv' if options.format == 'csv' else 'XlsxWriter'} over the rows in memory, whole",
        "ours_is": "the time until the first byte of the report is here",
        "ratio_is": "ours to peer, medians: less is better",
    }
    ours, peer = statistics.median(firsts), statistics.median(peers)
    return Result("reports", options.n, ours, peer, ours / peer, "ms", settings)


def _elsewhere(item: dict[str, Any]) -> None:
    """Never called: the outcomes are recorded without it."""


def _items(n: int) -> Iterator[dict[str, Any]]:
    for i in range(n):
        yield {
            "sku": f"SKU-{i:08}", "title": f"Promotion of the spring, number {i}", "price": i / 4, "stock": i % 997,
            "seller": f"seller-{i % 5_003}", "from": "2026-03-05", "until": "2026-04-05", "note": None,
        }  # fmt: skip


def _uploaded(app: AsyncTask, n: int, folder: Path) -> int:
    """The Task of an uploaded workbook, once it is split."""
    with sheet_files.make("xlsx", n, folder).open("rb") as file:
        task = app.submit_file("job", app.uploads.store(file, "orders.xlsx"))
    pause = threading.Event()
    while task.progress()["state"] == "splitting":
        pause.wait(_POLL_S)
    return int(task.id)


def _fail_all(app: AsyncTask, task_id: int) -> None:
    while lent := borrowed(app.ledger, task_id, _PAGE):
        Recorder(app.ledger).flush([_failed(each, app.ledger.now()) for each in lent])
    lending.leave(app.ledger)


def _failed(job: Job, now: int) -> Outcome:
    notes = [Note("working", "In progress", now), Note("failed", f"Failed: {_WHY}")]
    failure = Failure("failed", _WHY)
    return Outcome(job.event_id, job.attempt, Kind.FAILED, notes=notes, failure=failure, values={"started_at": now})


def _download(address: str, path: str) -> tuple[float, float, bytes]:
    """Milliseconds until the first byte of the body and until the last, and the body."""
    clock, where = SystemClock(), urlsplit(address)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=600)
    with closing(connection):
        began = clock.monotonic()
        connection.request("GET", path)
        answer = connection.getresponse()
        if answer.status != 200:
            raise Unaccounted(f"GET {path} was answered {answer.status}: {answer.read()[:500]!r}")
        data = [answer.read(1)]
        first = clock.monotonic() - began
        while piece := answer.read(1 << 16):
            data.append(piece)
        return first * 1e3, (clock.monotonic() - began) * 1e3, b"".join(data)


def _check(data: bytes, options: argparse.Namespace) -> None:
    """Raises :class:`Unaccounted` unless the report has every row."""
    if options.format == "csv":
        found = sum(1 for _ in csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""))) - 1
    else:
        from asynctask.lists.readers import Limits
        from asynctask.lists.readers.opening import open_source

        with tempfile.TemporaryDirectory(prefix="asynctask-benchmark-") as folder:
            path = Path(folder) / "report.xlsx"
            path.write_bytes(data)
            with open_source(path, path.name, limits=Limits()) as source:
                found = sum(1 for _ in source.rows())
    if found != options.n:
        raise Unaccounted(f"the report has {found} rows, expected {options.n}")


def _peer(options: argparse.Namespace, folder: Path) -> float:
    """Milliseconds of the bare loop."""
    own = map(sheet_files.row, range(options.n)) if options.sheet else (item.values() for item in _items(options.n))
    clock, rows = SystemClock(), [[*cells, n, "failed", _WHY, 1] for n, cells in enumerate(own, 1)]
    began = clock.monotonic()
    if options.format == "csv":
        with (folder / "peer.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    else:
        with xlsxwriter.Workbook(str(folder / "peer.xlsx"), {"constant_memory": True}) as book:
            sheet = book.add_worksheet()
            for number, row in enumerate(rows):
                sheet.write_row(number, 0, row)
    return (clock.monotonic() - began) * 1e3


if __name__ == "__main__":
    sys.exit(main())
