"""The ties between a supervisor and its children, and how a signal handler wakes the thread that waits.

A child holds the reading end of a pipe whose other end only its supervisor has: when the supervisor dies, however it dies,
the child reads the end of file and stops. The other way, a worker process writes a pulse into a pipe of its own as long as
its interpreter runs Python code; where the pulse stops, its supervisor has its lease renewed.
"""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Callable, Mapping
from typing import Final

__all__ = ["LIFELINE", "PULSE", "Pulse", "Wakeup", "watch_parent"]

LIFELINE: Final = "_ASYNCTASK_LIFELINE"
"""Environment variable with the file descriptor that a child watches."""

PULSE: Final = "_ASYNCTASK_PULSE"
"""Environment variable with the file descriptor that a worker process writes its pulse to."""


class Wakeup:
    """An event that a signal handler may set.

    A handler runs on the main thread between any two bytecodes. :class:`threading.Event` takes a lock that this very thread
    may hold just then, in its own wait; this takes none.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._set = False

    def fileno(self) -> int:
        """What to poll for reading, beside other descriptors."""
        return self._read

    @property
    def is_set(self) -> bool:
        """Whether :meth:`set` was called."""
        return self._set

    def set(self) -> None:
        """Ends this wait and every later one."""
        self._set = True
        self.notify()

    def notify(self) -> None:
        """Ends this wait, or the next one."""
        try:
            os.write(self._write, b"x")
        except OSError:  # it is full, so it is readable; or nobody waits any more
            pass

    def wait(self, seconds: float) -> bool:
        """Waits for at most so many seconds; returns whether it is set."""
        if not self._set:
            poll = select.poll()
            poll.register(self._read, select.POLLIN)
            poll.poll(seconds * 1_000)
            self.clear()
        return self._set

    def clear(self) -> None:
        """Forgets past notifications."""
        try:
            os.read(self._read, 4_096)
        except OSError:
            pass

    def close(self) -> None:
        """Gives the pipe back; whoever sets it afterwards wakes nobody."""
        read, write, self._read, self._write = self._read, self._write, -1, -1
        for descriptor in (read, write):
            if descriptor >= 0:
                os.close(descriptor)


class Pulse:
    """What a worker process tells its supervisor: who it is, and that its interpreter runs. Nothing without a supervisor.

    A line each: the first is a JSON object, the others are empty.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._descriptor = _descriptor(environ, PULSE)
        if self._descriptor is not None:
            os.set_blocking(self._descriptor, False)

    def registered(self, identity: str, database_url: str, lease_s: float) -> None:
        """The process is in the ledger under this identity, with a lease of ``lease_s`` seconds."""
        self._write(json.dumps({"identity": identity, "database_url": database_url, "lease_s": lease_s}).encode())

    def beat(self) -> None:
        """Python code runs."""
        self._write(b"")

    def _write(self, line: bytes) -> None:
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, line + b"\n")
        except OSError:  # full, for the supervisor is stopped; or it is gone
            pass


def watch_parent(environ: Mapping[str, str], on_end: Callable[[], None]) -> bool:
    """In a child: calls ``on_end`` when the supervisor is gone. Returns False where there is no supervisor."""
    descriptor = _descriptor(environ, LIFELINE)
    if descriptor is None:
        return False

    def wait() -> None:
        try:
            os.read(descriptor, 1)
        except OSError:
            pass
        on_end()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
    return True


def _descriptor(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else None
