"""Servers that tests start for themselves: private, on a free port, gone with the tests."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import redis

from asynctask.testing.waits import wait_for


def missing(program: str, package: str) -> None:
    """Skips the test at home, fails it where CI is set: there nothing may go untested."""
    reason = f"{program} is not installed; on Debian: apt-get install {package}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """A redis-server that keeps nothing on disk. ``folder`` is for its log and working directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
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
        program = shutil.which("redis-server") or missing("redis-server", "redis-server")
        for _ in range(3):
            self.port = free_port()
            command = [
                str(program), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
                "--dir", str(self._folder), "--logfile", str(self._folder / "redis.log"),
            ]  # fmt: skip
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
