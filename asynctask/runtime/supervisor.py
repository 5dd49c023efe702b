"""The supervisor: starts processes, replaces the dead, ends them all.

Children hold the reading end of a pipe whose other end only the supervisor has: when it dies, however it dies, they read
the end of file and stop. So no process lingers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asynctask.clock import Clock
from asynctask.logs import get_logger

__all__ = ["LIFELINE", "ChildSpec", "Supervisor", "watch_parent"]

LIFELINE = "_ASYNCTASK_LIFELINE"
"""Environment variable with the file descriptor that a child watches."""

_RESTART_S = (0.0, 0.5, 1.0, 2.0, 5.0)
_STEADY_S = 10.0


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to keep running: a name for the log and its command."""

    name: str
    argv: Sequence[str]


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    restart_at: float = 0.0
    failures: int = 0


class Supervisor:
    """Keeps the children running until it is told to stop.

    Arguments: ``shutdown_s`` is how long children get to end before they are killed; ``on_death`` is called with the pid
    of each child that ended unasked, before it is replaced; ``environ`` is the children's environment.
    """

    def __init__(
        self,
        children: Sequence[ChildSpec],
        *,
        clock: Clock,
        environ: Mapping[str, str],
        shutdown_s: float,
        on_death: Callable[[int], None] = lambda pid: None,
    ) -> None:
        self._children = [_Child(spec) for spec in children]
        self._clock = clock
        self._environ = environ
        self._shutdown_s = shutdown_s
        self._on_death = on_death
        self._stop = threading.Event()
        self._log = get_logger("asynctask.supervisor")
        self._read, self._write = os.pipe()

    def start(self) -> None:
        """Starts every child."""
        for child in self._children:
            self._spawn(child)

    def run(self, on_started: Callable[[], None] = lambda: None, on_look: Callable[[], None] = lambda: None) -> int:
        """Runs in the foreground until TERM or INT; passes TSTP on to the children. Returns the exit code.

        ``on_look`` is called ten times a second. A second INT kills the children: 130.
        """
        interrupts = 0

        def on_stop(number: int, _frame: Any) -> None:
            nonlocal interrupts
            interrupts += number == signal.SIGINT
            if interrupts > 1:
                self._signal(signal.SIGKILL)
            self._stop.set()

        signal.signal(signal.SIGTERM, on_stop)
        signal.signal(signal.SIGINT, on_stop)
        signal.signal(signal.SIGTSTP, lambda number, frame: self._signal(signal.SIGTSTP))
        self.start()
        on_started()
        while not self._stop.wait(0.1):
            self.look()
            on_look()
        code = self.shut_down()
        return 130 if interrupts > 1 else code

    def stop(self) -> None:
        """Has :meth:`run` end."""
        self._stop.set()

    def look(self) -> None:
        """Replaces children that ended: at once the first time, then with growing pauses."""
        for child in self._children:
            if child.process is None:
                if self._clock.monotonic() >= child.restart_at:
                    self._spawn(child)
            elif (code := child.process.poll()) is not None:
                self._died(child, child.process.pid, code)

    def shut_down(self) -> int:
        """Ends every child: TERM, then after ``shutdown_s`` and a margin KILL. Returns 0, or 1 if one had to be killed."""
        self._signal(signal.SIGTERM)
        until = self._clock.monotonic() + self._shutdown_s + 15
        killed = 0
        for child in self._children:
            if child.process is None:
                continue
            try:
                child.process.wait(max(0.1, until - self._clock.monotonic()))
            except subprocess.TimeoutExpired:
                self._log.error("child_killed", name=child.spec.name, pid=child.process.pid)
                child.process.kill()
                child.process.wait()
                killed = 1
        os.close(self._write)
        os.close(self._read)
        return killed

    def pids(self) -> dict[str, int]:
        """The pid of each living child by name."""
        return {c.spec.name: c.process.pid for c in self._children if c.process is not None and c.process.poll() is None}

    def _spawn(self, child: _Child) -> None:
        environ = {**self._environ, LIFELINE: str(self._read)}
        # A session of its own: a Ctrl-C in the terminal reaches the supervisor alone, which ends children in order.
        child.process = subprocess.Popen(child.spec.argv, env=environ, pass_fds=(self._read,), start_new_session=True)
        child.started = self._clock.monotonic()

    def _died(self, child: _Child, pid: int, code: int) -> None:
        now = self._clock.monotonic()
        child.failures = 0 if now - child.started > _STEADY_S else child.failures + 1
        pause = _RESTART_S[min(child.failures, len(_RESTART_S) - 1)]
        self._log.warning("child_died", name=child.spec.name, pid=pid, code=code, restart_in_s=pause)
        child.process, child.restart_at = None, now + pause
        self._on_death(pid)

    def _signal(self, number: int) -> None:
        for child in self._children:
            if child.process is not None and child.process.poll() is None:
                child.process.send_signal(number)


def watch_parent(environ: Mapping[str, str], on_end: Callable[[], None]) -> bool:
    """In a child: calls ``on_end`` when the supervisor is gone. Returns False where there is no supervisor."""
    descriptor = environ.get(LIFELINE)
    if descriptor is None or not descriptor.isdecimal():
        return False

    def wait() -> None:
        try:
            os.read(int(descriptor), 1)
        except OSError:
            pass
        on_end()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
    return True
