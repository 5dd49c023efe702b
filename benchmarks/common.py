"""What every benchmark needs: its arguments, a folder that goes away, the audit of a run, the printed result."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asynctask import AsyncTask, AsyncTaskError
from asynctask.cli.output import log_to_stderr
from asynctask.ledger import schema
from asynctask.ledger.database import Database

__all__ = ["Place", "Refused", "Result", "Unaccounted", "arguments", "audit", "p95", "place", "run", "setting", "spread"]

MAX_N = 10_000_000
_SIDE_FILES = ("", "-wal", "-shm", ".lock")


class Refused(Exception):
    """The command was asked for what it cannot measure."""


class Unaccounted(Exception):
    """An item of the run is missing, or a count is wrong: there is no figure."""


@dataclass(frozen=True)
class Result:
    """What a benchmark came to. ``peer`` is None where none was run; ``settings`` says what was measured beside what."""

    name: str
    n: int
    ours: float
    peer: float | None
    ratio: float | None
    unit: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where one run keeps its files."""

    folder: Path
    database_url: str

    @property
    def data_dir(self) -> Path:
        """Where uploads would lie."""
        return self.folder / "data"

    def app(self, **settings: Any) -> AsyncTask:
        """An application on this place's database. Nothing of the environment is taken over."""
        return AsyncTask(environ={}, database_url=self.database_url, data_dir=str(self.data_dir), **settings)


def arguments(doc: str | None, *, n: int) -> argparse.ArgumentParser:
    """The parser of a benchmark: ``doc`` is its module's docstring, ``n`` how many items it takes by default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=_number, default=n, metavar="N", help=f"items (default {n})")
    parser.add_argument(
        "--database-url", metavar="URL", help="a SQLite file that is not there yet (default: a temporary one)"
    )
    parser.add_argument(
        "--broker-url", metavar="URL", help="the database itself, or left out: there is no other broker yet"
    )
    parser.add_argument("--json", action="store_true", help="make the last line one JSON object")
    return parser


def _number(text: str) -> int:
    n = int(text)
    if not 1 <= n <= MAX_N:
        raise argparse.ArgumentTypeError(f"must be from 1 to {MAX_N:,}")
    return n


def run(parser: argparse.ArgumentParser, argv: Sequence[str] | None, measure: Callable[[Any], Result]) -> int:
    """Measures and prints. Returns 0; 1 where an item is unaccounted for or nothing answers; 2 for what is refused."""
    options = parser.parse_args(argv)
    log_to_stderr()
    try:
        _check_urls(options)
        result = measure(options)
    except Refused as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except (Unaccounted, AsyncTaskError) as error:
        print(f"{parser.prog}: no figure: {error}", file=sys.stderr)
        return 1
    _show(result)
    if options.json:
        print(json.dumps(asdict(result)), flush=True)
    return 0


def _check_urls(options: argparse.Namespace) -> None:
    url = options.database_url
    if url is not None and not url.startswith("sqlite:///"):
        raise Refused(
            f"--database-url {url.partition('://')[0]}://...: this version is measured on SQLite only; leave the option"
            " out, or write sqlite:///path/of/a/new/file.db"
        )
    if options.broker_url and options.broker_url != url:
        raise Refused("--broker-url: this version's only broker is the database itself; leave the option out")


def _file_of(url: str) -> Path:
    return Path(url.removeprefix("sqlite:///").partition("?")[0]).absolute()


@contextmanager
def place(options: argparse.Namespace) -> Iterator[Place]:
    """A fresh database, set up, in a folder that is removed at the end with everything that was made."""
    with tempfile.TemporaryDirectory(prefix="asynctask-benchmark-") as name:
        folder = Path(name)
        path = folder / "ledger.db" if options.database_url is None else _file_of(options.database_url)
        if path.exists():
            raise Refused(f"--database-url: {path} is there already; a benchmark begins with a new file and removes it")
        if not path.parent.is_dir():
            raise Refused(f"--database-url: there is no folder {path.parent}; make it first")
        url = f"sqlite:///{path}"
        try:
            with closing(Database(url)) as database:
                schema.ensure(database)
            yield Place(folder, url)
        finally:
            for suffix in _SIDE_FILES:
                path.with_name(path.name + suffix).unlink(missing_ok=True)


def audit(app: AsyncTask, task_id: int, **expected: int) -> None:
    """Raises :class:`Unaccounted` unless the Task counts ``expected``, and nothing else, and the doctor finds nothing."""
    counts = app.task(task_id).progress()["counts"]
    total = counts.pop("total")
    if {name: count for name, count in counts.items() if count} != {k: v for k, v in expected.items() if v}:
        raise Unaccounted(f"Task {task_id} counts {counts}, expected {expected}")
    if total != sum(expected.values()):
        raise Unaccounted(f"Task {task_id} has {total} items, expected {sum(expected.values())}")
    if findings := app.doctor():
        raise Unaccounted("; ".join(f"{each.code}: {each.message}" for each in findings))


def setting() -> dict[str, Any]:
    """The machine and the libraries, for ``settings``."""
    return {
        "database": f"SQLite {sqlite3.sqlite_version}, WAL, synchronous=FULL",
        "broker": "the database",
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """The least and the most of some runs, for ``settings``."""
    return {f"{name}_min": round(min(values), 3), f"{name}_max": round(max(values), 3)}


def p95(values: Sequence[float]) -> float:
    """The 95th percentile: so many in a hundred were no slower."""
    return statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def _show(result: Result) -> None:
    digits = 3 if result.unit == "ms" else 0
    peer = "" if result.peer is None else f"   peer {result.peer:,.{digits}f} {result.unit}"
    ratio = "" if result.ratio is None else f"   ratio {result.ratio:.2f}"
    print(f"{result.name}   n {result.n:,}   ours {result.ours:,.{digits}f} {result.unit}{peer}{ratio}")
    for name, value in result.settings.items():
        print(f"  {name}: {value}")
    sys.stdout.flush()
