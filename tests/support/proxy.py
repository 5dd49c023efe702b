"""A TCP proxy in front of a database server that loses what it is told to lose."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

BEFORE, AFTER = "before", "after"


class Proxy:
    """Forwards connections to a port of 127.0.0.1. Each is known by the port of its client.

    ``cut(port, BEFORE)`` closes the connection when the client sends its next words, which do not arrive. With ``AFTER``
    they arrive and are obeyed; the answer is lost. ``watch`` does so to whoever says certain words. Every answer takes
    ``slow_s`` seconds longer.
    """

    def __init__(self, target: int, address: str = "127.0.0.1") -> None:
        """``address``: of this machine, on which it listens."""
        self._target = target
        self._listener = socket.create_server((address, 0), backlog=100)
        self.port = int(self._listener.getsockname()[1])
        self._cuts: dict[int, str | Callable[[], None]] = {}
        self._every = False
        self._watched: tuple[tuple[bytes, ...], str | Callable[[], None], int] | None = None
        self._lock = threading.Lock()
        self.slow_s = 0.0
        self.fell = threading.Event()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def _start(self, what: object, *args: object) -> None:
        thread = threading.Thread(target=what, args=args, name="proxy", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(120)
        self._listener.close()

    def aim(self, target: int) -> None:
        """Leads to another port from now on; who is connected stays where he is."""
        self._target = target

    def cut(self, port: int, when: str) -> None:
        """Loses the next words of a client, or their answer."""
        self._cuts[port] = when

    def watch(self, words: tuple[bytes, ...], act: str | Callable[[], None], *, port: int = 0, every: bool = False) -> None:
        """Waits for a client (of that port, if given) that says any of ``words``: it is cut off, or ``act`` is called.

        The first to say them meets it, and nobody after that: ``fell`` is set. With ``every`` all meet it until ``relent``.
        Words of prepared statements are not seen here.
        """
        self._every = every
        self._watched = (words, act, port)

    def relent(self) -> None:
        """Watches for nothing any more."""
        with self._lock:
            self._watched = None

    def _what_falls(self, port: int, said: bytes) -> str | Callable[[], None] | None:
        with self._lock:
            if self._watched is not None and (self._every or not self.fell.is_set()):
                words, act, only = self._watched
                if any(each in said for each in words) and only in (0, port):
                    self.fell.set()
                    return act
            falls = self._cuts.pop(port, None)
            if falls is not None:
                self.fell.set()
            return falls

    def _accept(self) -> None:
        while not self._closing.is_set():
            if select.select([self._listener], [], [], 0.05)[0]:
                client, (_, port) = self._listener.accept()
                self._start(self._serve, client, port)

    def _serve(self, client: socket.socket, port: int) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as server:
            while not self._closing.is_set():
                readable = select.select([client, server], [], [], 0.05)[0]
                if client in readable and not self._forward(client, server, port):
                    return
                if server in readable:
                    words = server.recv(1 << 16)
                    if not words:
                        return
                    self._closing.wait(self.slow_s)
                    client.sendall(words)

    def _forward(self, client: socket.socket, server: socket.socket, port: int) -> bool:
        words = client.recv(1 << 16)
        falls = self._what_falls(port, words)
        if callable(falls):
            falls()
        if not words or falls == BEFORE:
            return False
        server.sendall(words)
        if falls == AFTER:
            server.recv(1 << 16)  # it is done: the answer was on its way
            return False
        return True
