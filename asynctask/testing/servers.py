"""A private Redis on a free port, for the demo and for tests.

It is independent of the machine's own server, and dies with the process that started it, even if that is killed.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Self

from asynctask.testing import wait_for


class MissingServer(Exception):
    """A server's program is not installed; the message says how to install it."""


def free_port() -> int:
    """A free TCP port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def redis_command(program: str, port: int, folder: Path, *options: str) -> list[str]:
    """The command line of a redis-server on 127.0.0.1 that keeps nothing on disk but its log, ``folder/redis.log``."""
    settings = {
        "port": str(port), "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": str(folder),
        "logfile": str(folder / "redis.log"),
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    return [program, *words, *options]


_WITH_LIFELINE = 'exec 3<&0; { read -r line <&3; kill "$$"; } 2>/dev/null & exec "$@" </dev/null 3<&-'
"""Runs a program that ends when nobody holds the other end of its standard input any more."""


class RedisServer:
    """A private Redis that keeps nothing on disk; needs Debian's ``redis-server``.

    It ends when no process is left that has :attr:`lifeline`. ``folder``: for its log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def __enter__(self) -> Self:
        """Starts it and waits until it answers. Raises :class:`MissingServer`."""
        program = find_program("redis-server", "redis-server")
        for _ in range(3):  # another program may take the port first
            self.port = free_port()
            command = ["/bin/sh", "-c", _WITH_LIFELINE, "redis", *redis_command(program, self.port, self._folder)]
            with (self._folder / "redis.log").open("ab") as log:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
                )
            try:
                if wait_for(self._state, "redis-server answers or ends", 60) == "answers":
                    return self
            except BaseException:
                self.__exit__()
                raise
            self.__exit__()
        log_text = (self._folder / "redis.log").read_text(errors="replace")
        raise AssertionError(f"redis-server did not start: {log_text[-2000:]}")

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.terminate()
            process.wait()

    def _state(self) -> str:
        assert self._process is not None
        if self._process.poll() is not None:
            return "ended"
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
            probe.sendall(b"PING\r\n")
            return "answers" if probe.recv(64).startswith(b"+PONG") else ""
        return ""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def lifeline(self) -> int:
        """A file descriptor to pass to other processes that need the server: it lives as long as one of them."""
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.stdin.fileno()


def find_program(name: str, package: str, *, first: str = "") -> str:
    """The path of a program, also in Debian's folders outside PATH, and before all in ``first``. Raises
    :class:`MissingServer`."""
    places = [str(path) for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    path = os.pathsep.join([first, os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", *places])
    found = shutil.which(name, path=path)
    if found is None:
        raise MissingServer(f"{name} is not installed; on Debian: apt-get install {package}")
    return found
