"""A sheet of seven columns, sent to a real web server over HTTP: from its last byte until each row is in the ledger.

    python -m benchmarks.sheet [-n N] [--kind csv|xlsx|ndjson] [--work] [--runs R] [--cache FOLDER]
        [--server KIND | --database-url URL] [--json]

``ours`` is rows a second, from the last byte sent until the split is sealed. ``settings`` tells the seconds from the last
byte to the answer with the ``task_id``, to the first row in the ledger and to the seal, and the most memory that each
process of the server held. Every row is looked up afterwards: one checksum over all params, in their order, must equal that
of the rows that were written. With ``--work`` a worker process performs the rows meanwhile, jobs that do nothing, and the
run is over when the last is recorded. The peer is a process that only reads the same file: csv.reader, python-calamine's
iter_rows or json.loads; ``ratio`` is ours to peer.

The file is made once for each N and kept in ``--cache``, else in a folder of the run.

A quick look takes -n 20000, a figure -n 500000.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa

from asynctask import AsyncTask
from asynctask.clock import SystemClock, SystemIds
from asynctask.database.tables import events
from benchmarks import common, sheet_files
from benchmarks.children import ROOT, await_address, await_worker, child
from benchmarks.common import Place, Result, Unaccounted
from benchmarks.memory import PARENT, Memory
from benchmarks.reading import READERS

__all__ = ["check_params", "main"]

MAX_N = 1_000_000
_LIMIT_S = 3_600.0
_BLOCK = 65_536
_PAGE = 5_000
_POLL_S = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = common.arguments(__doc__, n=20_000)
    parser.add_argument("--kind", choices=sheet_files.KINDS, default="csv", help="format of the file (default csv)")
    parser.add_argument("--work", action="store_true", help="a worker process performs the rows meanwhile")
    parser.add_argument("--runs", type=int, default=1, help="runs of each (default 1)")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="where the file is kept for the next time")
    parser.set_defaults(not_said=("--cache",))
    return common.run(parser, argv, measure)


def measure(options: argparse.Namespace) -> Result:
    """Sends the file ``--runs`` times, and has it read as often."""
    if options.runs < 1:
        raise common.Refused("--runs must be at least 1")
    if options.n > MAX_N:
        raise common.Refused(f"-n: at most {MAX_N:,} rows, which is what a sheet can hold")
    ours, peer = [], []
    with _files(options) as path:
        expected = _expected(options.n, options.kind)
        for _ in range(options.runs):
            with common.place(options) as place:
                ours.append(_ours(place, path, expected, options))
            peer.append(_read_alone(path, options.n))
        size = path.stat().st_size
    rates, beside = [options.n / each.sealed_s for each in ours], [options.n / each["seconds"] for each in peer]
    settings: dict[str, Any] = {
        **common.setting(options),
        "format": options.kind,
        "file_bytes": size,
        "columns": len(sheet_files.HEADERS),
        "runs": options.runs,
        "worker": "one process performs meanwhile" if options.work else "none",
        "clock": "from the last byte sent until the split is sealed",
        **_middle(ours),
        "peak_mb": {name: max(each.peaks_mb.get(name, 0.0) for each in ours) for name in ours[-1].peaks_mb},
        **common.spread("ours", rates),
        "checksum": expected,
        "peer": f"a process that only reads the file: {READERS[options.kind]}",
        "peer_peak_mb": max(each["peak_mb"] for each in peer),
        **common.spread("peer", beside),
    }
    middle, reading = statistics.median(rates), statistics.median(beside)
    return Result("sheet", options.n, middle, reading, middle / reading, "rows/s", settings)


@dataclass(frozen=True)
class Sent:
    """One run, in seconds after the last byte of the file was sent. ``done_s`` is None where nobody performed the rows."""

    send_s: float
    answer_s: float
    first_row_s: float
    sealed_s: float
    done_s: float | None
    peaks_mb: dict[str, float] = field(default_factory=dict)


def _middle(runs: Sequence[Sent]) -> dict[str, float]:
    found = {}
    for name in ("send_s", "answer_s", "first_row_s", "sealed_s", "done_s"):
        values = [value for each in runs if (value := getattr(each, name)) is not None]
        if values:
            found[name] = round(statistics.median(values), 3)
    return found


@contextmanager
def _files(options: argparse.Namespace) -> Iterator[Path]:
    if options.cache is not None:
        if not options.cache.is_dir():
            raise common.Refused(f"--cache: there is no folder {options.cache}; make it first")
        yield sheet_files.make(options.kind, options.n, options.cache)
        return
    with tempfile.TemporaryDirectory(prefix="asynctask-benchmark-") as name:
        yield sheet_files.make(options.kind, options.n, Path(name))


def _expected(n: int, kind: str) -> str:
    # Under a header the first item is in row 2; a line of NDJSON is an item.
    first = 1 if kind == "ndjson" else 2
    digest = sheet_files.Digest()
    for i in range(n):
        digest.add(i, i + first, sheet_files.row(i))
    return digest.text()


# -- ours


def _ours(place: Place, path: Path, expected: str, options: argparse.Namespace) -> Sent:
    with closing(place.app()) as app, ExitStack() as stack:
        roots = {}
        if options.work:
            worker = stack.enter_context(child("worker", place, "--sheet"))
            await_worker(app, worker)
            roots[worker.pid] = "worker"
        web = stack.enter_context(child("web", place, "--sheet"))
        roots[web.pid] = "web" + PARENT
        client = _Client(await_address(web))
        stack.callback(client.close)
        memory = Memory(str(place.data_dir), roots)
        with memory.watched():
            task_id, sent = _send_and_follow(client, path, options.work)
        peaks_mb = memory.peaks_mb()
        common.audit(app, task_id, **{"finish" if options.work else "enqueue": options.n})
        check_params(app, task_id, options.n, expected)
    return replace(sent, peaks_mb=peaks_mb)


def _send_and_follow(client: _Client, path: Path, work: bool) -> tuple[int, Sent]:
    clock, pause = SystemClock(), threading.Event()
    begun = clock.monotonic()
    client.send(path)
    last_byte = clock.monotonic()
    task_id = int(client.answer(202)["task_id"])
    answered = clock.monotonic()
    first_row: float | None = None
    sealed: float | None = None
    while True:
        progress = client.get(f"/api/tasks/{task_id}")
        now, split = clock.monotonic(), progress["split"]
        first_row = first_row or (now if split["created"] else None)
        sealed = sealed or (now if split["state"] == "sealed" else None)
        if split["state"] not in ("splitting", "sealed") or now - last_byte > _LIMIT_S:
            raise Unaccounted(f"the split is {split}")
        if sealed and (progress["done"] or not work):
            break
        pause.wait(_POLL_S)
    assert first_row is not None
    done_s = now - last_byte if work else None
    return task_id, Sent(last_byte - begun, answered - last_byte, first_row - last_byte, sealed - last_byte, done_s)


class _Client:
    """A browser that uploads: one connection to send, a connection for each look."""

    def __init__(self, address: str) -> None:
        where = urlsplit(address)
        self._host, self._port = where.hostname or "", where.port or 0
        self._upload = http.client.HTTPConnection(self._host, self._port, timeout=_LIMIT_S)

    def send(self, path: Path) -> None:
        """Sends the file as a form; returns when its last byte is with the kernel."""
        boundary = SystemIds().jid()
        head = "".join(
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
            for name, value in (("worker", "order"), ("title", "benchmark"))
        )
        head += f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{path.name}"\r\n\r\n'
        tail = f"\r\n--{boundary}--\r\n"
        self._upload.putrequest("POST", "/api/tasks")
        self._upload.putheader("Content-Type", f"multipart/form-data; boundary={boundary}")
        self._upload.putheader("Content-Length", str(len(head) + path.stat().st_size + len(tail)))
        self._upload.endheaders(head.encode())
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                self._upload.send(block)
        self._upload.send(tail.encode())

    def answer(self, status: int) -> Any:
        """What the server says to the upload."""
        return _body(self._upload, status)

    def get(self, path: str) -> Any:
        """One look."""
        with closing(http.client.HTTPConnection(self._host, self._port, timeout=60)) as connection:
            connection.request("GET", path)
            return _body(connection, 200)

    def close(self) -> None:
        """Ends the upload's connection."""
        self._upload.close()


def _body(connection: http.client.HTTPConnection, status: int) -> Any:
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != status:
        raise Unaccounted(f"the server answered {answer.status}, expected {status}: {body[:500].decode(errors='replace')}")
    return json.loads(body)


def check_params(app: AsyncTask, task_id: int, n: int, expected: str) -> None:
    """Raises :class:`Unaccounted` unless every row of the file is in the ledger, once, in its place, with its values."""
    digest, columns = sheet_files.Digest(), (events.c.seq, events.c.first_row, events.c.params)
    for start in range(0, n, _PAGE):
        page = events.c.seq.between(start, start + _PAGE - 1)
        with app.ledger.database.read() as connection:
            rows = connection.execute(sa.select(*columns).where(events.c.task_id == task_id, page).order_by(events.c.seq))
            for seq, first_row, params in rows:
                digest.add(seq, first_row, sheet_files.kept(json.loads(params)))
    if digest.text() != expected:
        raise Unaccounted(f"the params of Task {task_id} are not those of the file ({digest.count:,} of {n:,} rows read)")


# -- the peer


def _read_alone(path: Path, n: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.reading", str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Unaccounted(f"the peer ended with {done.returncode}: {done.stderr[-1_000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found["rows"] != n:
        raise Unaccounted(f"the peer read {found['rows']:,} rows of {n:,}")
    return found


if __name__ == "__main__":
    sys.exit(main())
