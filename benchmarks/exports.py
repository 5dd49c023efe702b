"""Half a million rows to one file: how fast, how large the processes get, and whether every cell is right.

    python -m benchmarks.exports [-n N] [--shards N] [--format FORMAT] [--processes N] [--runs N] [--server KIND] [--json]

The figure is rows a second from just before the submit until the Task is done, with ``--processes`` worker processes that
run already; the peer is one process that reads the same rows and writes them with ``csv.writer`` (``csv.gz``: through
``gzip``), XlsxWriter, orjson or pyarrow. Runs alternate, and the medians count. Then every cell of the file is compared
with the table; one that differs, or a digest that does, means no figure.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import io
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import orjson

from asynctask.clock import SystemClock
from asynctask.config import ENV_PREFIX
from asynctask.exports.rows import FORMATS
from benchmarks import common
from benchmarks.children import ROOT, await_worker
from benchmarks.common import Place, Result, Unaccounted
from benchmarks.exports_app import COLUMNS, SOURCE, add_export, fill, rows_between
from benchmarks.memory import Memory
from benchmarks.processes import end_kindly, started

__all__ = ["main"]

_LIMIT_S = 900.0
Row = tuple[Any, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = common.arguments(__doc__, n=500_000)
    parser.add_argument("--shards", type=int, default=20, help="shards (default 20)")
    parser.add_argument("--format", choices=tuple(FORMATS), default="csv", help="of the file (default csv)")
    parser.add_argument("--processes", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each (default 3)")
    return common.run(parser, argv, measure)


def measure(options: argparse.Namespace) -> Result:
    """Runs the export and the peer in turn, and compares each file with the table."""
    ours: list[float] = []
    peers: list[float] = []
    peaks: dict[str, float] = {}
    size = 0
    for _ in range(options.runs):
        with common.place(options) as place:
            source = place.folder / "source.db"
            fill(source, options.n)
            seconds, run_peaks, size = _exported(options, place, source)
            ours.append(options.n / seconds)
            peaks = {name: max(peak, peaks.get(name, 0.0)) for name, peak in run_peaks.items()}
            peers.append(options.n / _peer(options, source, place.folder / "peer"))
    settings: dict[str, Any] = {
        **common.setting(options),
        "format": options.format,
        "shards": options.shards,
        "processes": options.processes,
        "runs": options.runs,
        "bytes": size,
        "peak_mb": peaks,
        **common.spread("ours", ours),
        "peer": f"one process that reads the same rows and writes them with {_PEERS[options.format]}",
        "compared": "every cell with the table, and the digest",
    }
    rate, peer = statistics.median(ours), statistics.median(peers)
    return Result("exports", options.n, rate, peer, rate / peer, "rows/s", settings)


# -- ours


def _exported(options: argparse.Namespace, place: Place, source: Path) -> tuple[float, dict[str, float], int]:
    """Seconds of one export that was right to the last cell, the memory of each worker process, and the bytes."""
    edges = [options.n * i // options.shards for i in range(options.shards + 1)]
    clock = SystemClock()
    with closing(add_export(place.app())) as app, ExitStack() as stack:
        app.ensure_schema()
        roots = {}
        for number in range(options.processes):
            process = stack.enter_context(_worker(place, source))
            roots[process.pid] = f"worker {number + 1}"
            await_worker(app, process, number + 1)
        memory = Memory(f"{SOURCE}={source}", roots)
        with memory.watched():
            begun = clock.monotonic()
            task = app.submit_export("promotions", list(map(list, itertools.pairwise(edges))), format=options.format)
            done = task.wait(timeout=_LIMIT_S, poll_s=0.05)
            seconds = clock.monotonic() - begun
        if done["result"] is None:
            raise Unaccounted(f"the export is not done after {seconds:.0f} s: {done}")
        common.audit(app, task.id, finish=options.shards)
        found = app.result(task.id)
        manifest = found.manifest
        _compare(Path(found.location), manifest, source, options)
        return seconds, memory.peaks_mb(), int(manifest["bytes"])


@contextmanager
def _worker(place: Place, source: Path) -> Iterator[subprocess.Popen[str]]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    settings = {ENV_PREFIX + name.upper(): value for name, value in place.settings().items()}
    environ = {**inherited, **settings, "PYTHONPATH": str(ROOT), SOURCE: str(source)}
    argv = [sys.executable, "-m", "asynctask", "-A", "benchmarks.exports_app:app", "worker", "-c", "1"]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "text": True}
    with started(argv, end_kindly, cwd=place.folder, env=environ, **quiet) as process:
        yield process


# -- the file against the table


def _compare(path: Path, manifest: Mapping[str, Any], source: Path, options: argparse.Namespace) -> None:
    with path.open("rb") as body:
        digest = hashlib.file_digest(body, "sha256").hexdigest()
    if (manifest["rows"], manifest["sha256"]) != (options.n, digest):
        raise Unaccounted(f"the manifest says {manifest['rows']} rows and {manifest['sha256']}, the file has {digest}")
    wanted: Iterator[Row] = rows_between(source, 0, options.n)
    read, as_read = _READERS[options.format]
    for number, (found, row) in enumerate(itertools.zip_longest(read(path), map(as_read, wanted)), 1):
        if found != row:
            raise Unaccounted(f"row {number} of the file is {found}, of the table {row}")


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        body = gzip.GzipFile(fileobj=raw) if packed else raw
        yield from _without_header(map(tuple, csv.reader(io.TextIOWrapper(body, "utf-8-sig", newline=""))))


def _read_ndjson(path: Path) -> Iterator[Row]:
    with path.open("rb") as body:
        for line in body:
            found = orjson.loads(line)
            yield tuple(found[name] for name in COLUMNS)


def _read_xlsx(path: Path) -> Iterator[Row]:
    from python_calamine import load_workbook

    book = load_workbook(str(path))
    for name in book.sheet_names:
        yield from _without_header(map(tuple, book.get_sheet_by_name(name).iter_rows()))


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(path).iter_batches(10_000, columns=list(COLUMNS)):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _without_header(rows: Iterable[Row]) -> Iterator[Row]:
    found = iter(rows)
    if next(found, None) != COLUMNS:
        raise Unaccounted("the file has no header")
    return found


def _as_csv(row: Row) -> Row:
    return tuple("" if value is None else str(value) for value in row)


def _as_sheet(row: Row) -> Row:
    # The reader has a number for every number, and an empty text for every empty cell.
    return tuple("" if value is None else value for value in row)


_READERS: dict[str, tuple[Callable[[Path], Iterator[Row]], Callable[[Row], Row]]] = {
    "csv": (_read_csv, _as_csv),
    "csv.gz": (_read_csv, _as_csv),
    "ndjson": (_read_ndjson, tuple),
    "xlsx": (_read_xlsx, _as_sheet),
    "parquet": (_read_parquet, tuple),
}

# -- the peer

_PEERS = {
    "csv": "csv.writer",
    "csv.gz": "csv.writer and gzip",
    "ndjson": "orjson",
    "xlsx": "XlsxWriter in constant memory",
    "parquet": "pyarrow, 65,536 rows a group",
}


def _peer(options: argparse.Namespace, source: Path, path: Path) -> float:
    """Seconds of a process that writes the same rows."""
    clock = SystemClock()
    argv = [sys.executable, "-m", "benchmarks.exports_peer", options.format, str(source), str(options.n), str(path)]
    begun = clock.monotonic()
    done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, check=False)
    if done.returncode or not path.stat().st_size:
        raise Unaccounted("the peer failed")
    return clock.monotonic() - begun


if __name__ == "__main__":
    sys.exit(main())
