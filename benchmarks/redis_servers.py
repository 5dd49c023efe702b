"""Private Redis servers for benchmarks: nothing on disk, gone with the run."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from asynctask.clock import SystemClock
from asynctask.testing.servers import free_port
from benchmarks.common import Unaccounted, started
from benchmarks.databases import NotHere

__all__ = ["redis_server"]

_START_S = 20.0


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """The URL of a server that runs while the block does. Raises :class:`NotHere` where the program is not installed."""
    program = shutil.which("redis-server")
    if program is None:
        raise NotHere("redis-server is not installed here: apt-get install redis-server")
    port = free_port()
    command = [
        program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder),
        "--logfile", str(folder / "redis.log"),
    ]  # fmt: skip
    with started(command, _end, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        _await(port, process)
        yield f"redis://127.0.0.1:{port}/0"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _await(port: int, process: subprocess.Popen[bytes]) -> None:
    clock, pause = SystemClock(), threading.Event()
    until = clock.monotonic() + _START_S
    with redis.Redis(port=port) as client:
        while True:
            try:
                client.ping()
            except redis.ConnectionError:
                if process.poll() is not None or clock.monotonic() > until:
                    raise Unaccounted("redis-server did not come up") from None
                pause.wait(0.02)
            else:
                return
