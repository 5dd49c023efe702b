"""The web server: a child process answers; its parent keeps the port and replaces a child that died or hangs."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Final

from asynctask.app import AsyncTask
from asynctask.errors import Unavailable
from asynctask.runtime.supervisor import Child, Wakeup, listen
from webapi import create_app
from webapi.http_loop import GRACE_S, HttpLoop
from webapi.reading import longest_body, longest_upload

HELD_S: Final = 60.0
"""Seconds without a turn of the child's loop after which it is killed: something holds its interpreter."""

_STOPS: Final = (signal.SIGTERM, signal.SIGINT)
_log = logging.getLogger(__name__)


def serve(app: AsyncTask, *, host: str, port: int, threads: int, ready: Callable[[str], None] | None = None) -> None:
    """Serves ``app`` until SIGTERM or SIGINT, then finishes current requests (20 s at most).

    ``port`` 0 takes a free one. ``ready`` is called with the address (``http://127.0.0.1:8000``) once connections are
    accepted. A child process answers requests with ``threads`` threads and runs the application's services; it is replaced
    if it dies. Call it in the main thread, before ``app`` is used: open connections do not survive the fork. Returns when
    the server has stopped; raises :class:`Unavailable` if the address is unavailable or the child does not start.
    """
    listener = _listen(host, port)
    address = _address(listener, host)
    _Parent(lambda beat: _answer(app, listener, host, threads, beat), listener, app.clock.monotonic).run(
        lambda: ready(address) if ready else None
    )


def _answer(app: AsyncTask, listener: socket.socket, host: str, threads: int, beat: Callable[[], None]) -> None:
    loop = HttpLoop(
        create_app(app, host=host, threads=threads),
        listener,
        threads=threads,
        body_limit=partial(longest_body, app.config),
        storage=threads * longest_upload(app.config),
        clock=app.clock,
        beat=beat,
    )
    # Ctrl-C in a terminal reaches this process too and has the same effect as the parent's signal.
    for number in _STOPS:
        signal.signal(number, lambda _number, _frame: loop.stop())
    app.start_services()
    try:
        loop.run()
    finally:
        app.stop_services()


class _Parent:
    """Keeps one child at work on the listener: replaces it when it dies or hangs, stops it at the end."""

    def __init__(
        self, child: Callable[[Callable[[], None]], None], listener: socket.socket, monotonic: Callable[[], float]
    ) -> None:
        self._perform = child
        self._listener = listener
        self._monotonic = monotonic
        self._wakeup = Wakeup()
        self._child = Child()
        self._pid = -1
        self._up = self._hopeless = False

    def run(self, started: Callable[[], None]) -> None:
        """Runs until SIGTERM or SIGINT. ``started`` is called after the first fork."""
        for number in _STOPS:
            signal.signal(number, lambda _number, _frame: self._wakeup.set())
        signal.signal(signal.SIGCHLD, lambda _number, _frame: self._wakeup.notify())
        self._start()
        started()
        while not self._wakeup.is_set:
            self._listen(1.0)
            if self._ended():
                self._replace()
            elif self._monotonic() - self._child.heard > HELD_S:
                _log.error("the event loop of the serving process %d is blocked; the process is killed", self._pid)
                os.kill(self._pid, signal.SIGKILL)
        self._listener.close()
        self._stop()

    def _start(self) -> None:
        ours, theirs = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal before the child has its own handlers would be lost in those inherited from the parent.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        pid = os.fork()
        if pid == 0:
            for number in (*_STOPS, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
            os.close(ours)
            self._run_child(theirs)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        os.close(theirs)
        os.set_blocking(ours, False)
        self._pid, self._child.pulse = pid, ours
        self._child.started = self._child.heard = self._monotonic()

    def _run_child(self, pulse: int) -> None:
        """Never returns."""
        self._wakeup.close()
        os.set_blocking(pulse, False)
        parent = os.getppid()

        def beat() -> None:
            try:
                os.write(pulse, b".")
            except (BlockingIOError, BrokenPipeError):
                pass
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)

        self._perform(beat)
        # Do not return into the code after the caller's serve().
        raise SystemExit(0)

    def _listen(self, seconds: float) -> None:
        for child in listen(self._wakeup, [self._child], seconds):
            self._up = bool(child.read(self._monotonic())) or self._up

    def _ended(self) -> bool:
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            # A child that exited by itself before its first turn would do so again; a killed one would not.
            self._hopeless = not self._up and os.waitstatus_to_exitcode(status) >= 0
        return pid != 0

    def _replace(self) -> None:
        pause = self._child.ended(self._monotonic())
        if self._hopeless:
            self._listener.close()
            raise Unavailable("the serving process does not start; its output says why")
        _log.error("the serving process %d died; another one starts in %g s", self._pid, pause)
        until = self._monotonic() + pause
        while not self._wakeup.is_set and (left := until - self._monotonic()) > 0:
            self._wakeup.wait(left)
        self._pid = -1
        if not self._wakeup.is_set:
            self._start()

    def _stop(self) -> None:
        if self._pid < 0:
            return
        until = self._monotonic() + GRACE_S + 10
        ended = self._ended()
        if not ended:
            os.kill(self._pid, signal.SIGTERM)
        while not ended and self._monotonic() < until:
            self._listen(0.5)
            ended = self._ended()
        if not ended:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._child.hang_up()


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise Unavailable(f"{host!r} is no address of this machine: {error}; give another host") from error
    family, kind, protocol, _, where = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on {host}:{port}: {error}; give another port, or 0 for a free one") from error
    return listener


def _address(listener: socket.socket, host: str) -> str:
    port = listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://{f'[{shown}]' if ':' in shown and not shown.startswith('[') else shown}:{port}"
