"""Sets of processes that share nothing but what they reach over the network: as if each were a machine of its own.

Where this process may, each set has its own network, its own host name and its own view of processes (Linux's namespaces),
and reaches the servers of the test at an address of their link. Elsewhere it has folders and a name of its own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

from support.engine_worker import family
from support.proxy import Proxy

_IN_NAMESPACES = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c")
_NAMED = 'hostname "$0" && exec "$@"'


@cache
def has_namespaces() -> bool:
    """Whether this process may make namespaces."""
    name = f"at-{uuid.uuid4().hex[:8]}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "exec", name, *_IN_NAMESPACES, _NAMED, name, "true")
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        with suppress(OSError):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
    return True


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Machine:
    """A set of processes. ``folder``: its own."""

    def __init__(self, folder: Path) -> None:
        drawn = uuid.uuid4()
        self.name = f"at-{drawn.hex[:8]}"
        # Four addresses of the range that is kept for tests of networks.
        first = drawn.bytes[9] // 4 * 4
        self._address, self._inner = (f"198.18.{drawn.bytes[10]}.{first + last}" for last in (1, 2))
        self.folder = folder
        folder.mkdir(parents=True)
        self._children: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()
        self._apart = has_namespaces()

    def __enter__(self) -> Self:
        if self._apart:
            self._stack.callback(subprocess.run, ["ip", "netns", "delete", self.name], check=False, capture_output=True)
            _run("ip", "netns", "add", self.name)
            _run("ip", "link", "add", self.name, "type", "veth", "peer", "name", "eth0", "netns", self.name)
            _run("ip", "address", "add", f"{self._address}/30", "dev", self.name)
            _run("ip", "link", "set", self.name, "up")
            _run("ip", "-n", self.name, "address", "add", f"{self._inner}/30", "dev", "eth0")
            _run("ip", "-n", self.name, "link", "set", "eth0", "up")
            _run("ip", "-n", self.name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            self.kill(child)
        self._stack.close()

    def reach(self, url: str) -> str:
        """The URL of a server on 127.0.0.1 as the processes of this machine reach it."""
        if not self._apart or not (found := re.search(r"127\.0\.0\.1:(\d+)", url)):
            return url
        proxy = self._stack.enter_context(Proxy(int(found[1]), self._address))
        return url.replace(found[0], f"{self._address}:{proxy.port}")

    def _command(self, argv: Sequence[str]) -> list[str]:
        words = [sys.executable, *argv]
        return ["ip", "netns", "exec", self.name, *_IN_NAMESPACES, _NAMED, self.name, *words] if self._apart else words

    def _environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        return {**os.environ, "DYNO": self.name, **environ}  # what a process takes for the name of its machine

    def spawn(self, *argv: str, **environ: str) -> subprocess.Popen[bytes]:
        """Python with these words; what it says goes to ``log`` in the folder."""
        with (self.folder / "log").open("ab") as log:
            child = subprocess.Popen(
                self._command(argv),
                cwd=self.folder,
                env=self._environ(environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._children.append(child)
        return child

    def run(self, *argv: str, **environ: str) -> bytes:
        """What Python prints with these words. Raises AssertionError with what it says if it fails."""
        done = subprocess.run(
            self._command(argv), cwd=self.folder, env=self._environ(environ), capture_output=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr.decode(errors="replace")[-3_000:]
        return done.stdout

    def kill(self, child: subprocess.Popen[Any]) -> None:
        """kill -9 of a process, and of all that it has started."""
        for pid in family(child.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.wait()

    def said(self) -> str:
        """The last words of its processes."""
        log = self.folder / "log"
        return log.read_text(errors="replace")[-3_000:] if log.exists() else ""
