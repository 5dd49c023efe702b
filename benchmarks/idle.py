"""What a worker process with nothing to do costs: `asynctask worker`, for N seconds, from five seconds after it came up.

It is two processes, the worker and its supervisor. Their memory is what is resident at the end: the pages of their own, and
once those of programs and libraries, which they share. Their share of one processor is that of the N seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from asynctask.clock import SystemClock
from asynctask.config import ENV_PREFIX
from benchmarks import common
from benchmarks.children import ROOT, await_worker
from benchmarks.common import Place, Refused, Result
from benchmarks.processes import Unaccounted, end_kindly, started

__all__ = ["main", "measure"]

SETTLED_S = 5.0
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return common.run(common.arguments(__doc__, n=20), argv, measure)


def measure(options: argparse.Namespace) -> Result:
    """Starts the worker process and looks at it."""
    if not Path("/proc/self/statm").exists():
        raise Refused("what a process costs is read from /proc, which this system does not have")
    with common.place(options) as place, closing(place.app()) as app:
        clock, pause = SystemClock(), threading.Event()
        with _worker(place) as process:
            await_worker(app, process)
            pause.wait(SETTLED_S)
            pids = (process.pid, *_children(process.pid))
            begun, used = clock.monotonic(), sum(map(_processor_s, pids))
            pause.wait(options.n)
            if process.poll() is not None:
                raise Unaccounted(f"the worker process ended with {process.returncode}")
            share = (sum(map(_processor_s, pids)) - used) / (clock.monotonic() - begun)
            memory = [_memory_mb(pid) for pid in pids]
    own, shared = sum(resident - shared for resident, shared in memory), max(shared for _, shared in memory)
    settings: dict[str, Any] = {
        **common.setting(options),
        "processes": 1,
        "threads": 5,
        "cpu_percent": round(100 * share, 2),
        "own_mb": round(own, 1),
        "of_supervisor_mb": round(memory[0][0] - memory[0][1], 1),
        "shared_mb": round(shared, 1),
        "worker": "one, of plain dicts",
    }
    return Result("idle", options.n, round(own + shared, 1), None, None, "MB", settings)


@contextmanager
def _worker(place: Place) -> Iterator[Any]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    settings = {ENV_PREFIX + name.upper(): value for name, value in place.settings().items()}
    argv = [sys.executable, "-m", "asynctask", "-A", "benchmarks.idle_app:app", "worker", "-c", "5"]
    with (
        (place.folder / "worker.log").open("w+") as log,
        started(
            argv, end_kindly, cwd=place.folder, env={**kept, **settings, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log
        ) as process,
    ):
        yield process


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _memory_mb(pid: int) -> tuple[float, float]:
    """Resident and, of that, shared, in MB of 1,048,576 bytes."""
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return int(resident) * _PAGE / 1_048_576, int(shared) * _PAGE / 1_048_576


if __name__ == "__main__":
    sys.exit(main())
