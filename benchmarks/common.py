"""What every benchmark needs: its arguments, a fresh database, the audit of a run, the printed result.

A benchmark is ``common.run(common.arguments(__doc__, n=...), argv, measure)``. Its ``measure(options)`` gets a database
with ``with common.place(options) as place``, as often as it likes, says what it ran on with ``common.setting(options)``,
and returns a :class:`Result`, or raises :class:`Refused` or :class:`Unaccounted`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from asynctask import AsyncTask, AsyncTaskError
from asynctask.clock import SystemClock, rfc3339
from asynctask.logs import log_to_stderr
from benchmarks import databases, redis_servers
from benchmarks.databases import Refused
from benchmarks.processes import Unaccounted
from benchmarks.redis_servers import RedisPlace

__all__ = [
    "Place", "Refused", "Result", "Unaccounted", "arguments", "audit", "p95", "place", "run", "setting", "spread",
]  # fmt: skip

MAX_N = 10_000_000


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
    """Where one run keeps its files, its database and its jobs.

    ``kind`` is ``sqlite``, ``postgresql`` or ``mariadb``. ``redis``: where untracked jobs travel; None: the database.
    """

    folder: Path
    database_url: str
    kind: str = "sqlite"
    redis: RedisPlace | None = None

    @property
    def data_dir(self) -> Path:
        """Where uploads would lie."""
        return self.folder / "data"

    def settings(self) -> dict[str, Any]:
        """What an application is given to work here."""
        found = {"database_url": self.database_url, "data_dir": str(self.data_dir)}
        if self.redis is not None:
            found |= {"broker_url": self.redis.url, "namespace": self.redis.namespace}
        return found

    def app(self, **settings: Any) -> AsyncTask:
        """An application that works here. Nothing of the environment is taken over."""
        return AsyncTask(environ={}, **self.settings(), **settings)


def arguments(doc: str | None, *, n: int) -> argparse.ArgumentParser:
    """The parser of a benchmark: ``doc`` is its module's docstring, ``n`` how many items it takes by default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=_number, default=n, metavar="N", help=f"items (default {n})")
    parser.add_argument(
        "--database-url",
        metavar="URL",
        help="a SQLite file that is not there yet, or a PostgreSQL or MariaDB server, on which a database is made for"
        " the run and dropped",
    )
    parser.add_argument(
        "--server", choices=databases.KINDS, help="start a private one, durable as in production (default: a SQLite file)"
    )
    parser.add_argument(
        "--broker-url",
        metavar="URL",
        help="a Redis for the jobs; its keys have a prefix of the run's own and are removed (default: the database)",
    )
    parser.add_argument("--redis", action="store_true", help="start a private Redis for the jobs")
    parser.add_argument("--json", action="store_true", help="make the last line one JSON object")
    return parser


def _number(text: str) -> int:
    n = int(text)
    if not 1 <= n <= MAX_N:
        raise argparse.ArgumentTypeError(f"must be from 1 to {MAX_N:,}")
    return n


def run(parser: argparse.ArgumentParser, argv: Sequence[str] | None, measure: Callable[[Any], Result]) -> int:
    """Measures and prints.

    Returns 0; 1 where an item is unaccounted for or nothing answers; 2 for what is refused; 3 where the program of the
    server that it should start is not installed.
    """
    options = parser.parse_args(argv)
    options.command = _command(parser, sys.argv[1:] if argv is None else argv)
    options.load = os.getloadavg()[0]  # of what else this machine did in the minute before
    log_to_stderr()
    # A run that is told to end takes its databases, servers and processes with it.
    signal.signal(signal.SIGTERM, _leave)
    try:
        options.broker = redis_servers.source(options)
        with databases.source(options) as options.source:
            result = measure(options)
    except Refused as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 3 if isinstance(error, databases.NotHere) else 2
    except (Unaccounted, AsyncTaskError, TimeoutError) as error:
        print(f"{parser.prog}: no figure: {error}", file=sys.stderr)
        return 1
    _show(result)
    if options.json:
        print(json.dumps(asdict(result)), flush=True)
    return 0


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _command(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """What was typed, as it may be typed again by somebody else: without passwords, and without the options of a folder of
    this machine that ``not_said`` (a default of the parser) names."""
    module = Path(sys.argv[0]).stem if parser.prog.endswith(".py") else parser.prog
    text = " ".join([f"python -m benchmarks.{module}", *(databases.shown(word) for word in words if word != "--json")])
    for name in parser.get_default("not_said") or ():
        text = re.sub(rf" {name}[ =]\S+", "", text)
    return text


@contextmanager
def place(options: argparse.Namespace) -> Iterator[Place]:
    """A fresh database, set up, perhaps a Redis, and a folder that is removed at the end with everything that was made."""
    with tempfile.TemporaryDirectory(prefix="asynctask-benchmark-") as name:
        folder = Path(name)
        with options.source.fresh(folder) as url, options.broker.fresh(folder) as redis:
            yield Place(folder, url, options.source.kind, redis)


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


def setting(options: argparse.Namespace) -> dict[str, Any]:
    """What was run, when, on which machine and database, for ``settings``."""
    return {
        "command": options.command,
        "at": rfc3339(SystemClock().now()),
        **options.source.facts(),
        "kind": options.source.kind,
        **options.broker.facts(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "ram_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1_000_000,
        "os": _os(),
        "load": round(options.load, 2),
    }


def _os() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    return f"{name}, {platform.system()} {platform.release().partition('-')[0]} {platform.machine()}"


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
