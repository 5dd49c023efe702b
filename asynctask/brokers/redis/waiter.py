"""Waiting for news of queues without taking anything from them, and without asking again and again.

Redis tells a connection which keys change (CLIENT TRACKING in broadcast mode, from version 6 on): that takes no setting of
the server, and hears what any client of any language pushes. Where a server or a proxy does not offer it, the wait is cut
into short ones, and whoever waits looks for itself.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Sequence
from typing import Any, Final

import redis

from asynctask.brokers.redis.server import Server
from asynctask.clock import Clock
from asynctask.errors import BrokerUnavailable
from asynctask.logs import get_logger

__all__ = ["Waiter"]

LOOK_S: Final = 0.5
"""Seconds of one wait at a server that tells no news."""


class Waiter:
    """The one connection of a process that waits. :meth:`wait` is for one thread at a time, :meth:`wake` for any."""

    def __init__(self, server: Server, clock: Clock) -> None:
        self._server = server
        self._clock = clock
        self._lock = threading.Lock()
        self._connection: Any = None
        self._moves = 0  # of the server, when it was connected
        self._unread = 0  # answers that were not waited for
        self._tells = True  # whether this server tells news at all
        self.told = False  # whether the last wait ended with news, not with :meth:`wake`
        self._woken = False
        self._closed = False
        self._ear, self._bell = socket.socketpair()
        self._ear.setblocking(False)
        self._bell.setblocking(False)

    def wait(self, timeout: float, queues: Sequence[str], empty: Sequence[str]) -> bool:
        """Waits for a change of one of these queues (none: of any), for :meth:`wake`, or ``timeout`` seconds.

        ``empty`` are queues that were seen empty: if one is not any more, that is news. Returns whether there was any.
        Raises :class:`BrokerUnavailable`.
        """
        until = self._clock.monotonic() + timeout
        with self._lock:
            self.told = False
            if self._closed:
                return True
            try:
                found = self._listen(queues, empty) if self._tells else False
                if not self._tells:
                    self._rest(min(until, self._clock.monotonic() + LOOK_S))
                    return self._was_woken() or bool(empty)
                self.told = found
                news = found or self._heard(until)
                self._connection.send_command("CLIENT", "TRACKING", "OFF")
                self._unread += 1
                return news
            except (redis.exceptions.RedisError, OSError) as error:
                self._disconnect()
                raise BrokerUnavailable(
                    f"Redis at {self._server.name} does not answer: start it, or mend broker_url ({error})"
                ) from error

    def rest(self, seconds: float) -> None:
        """Rests for so long, or until :meth:`wake`, which still ends the next wait."""
        with self._lock:
            if not self._closed:
                self._rest(self._clock.monotonic() + seconds)

    def doze(self, seconds: float) -> bool:
        """Waits for :meth:`wake` alone; returns whether it came."""
        with self._lock:
            self.told = False
            if self._closed:
                return True
            self._rest(self._clock.monotonic() + seconds)
            return self._was_woken()

    def wake(self) -> None:
        """Ends the wait, or the next one."""
        self._woken = True
        try:
            self._bell.send(b"!")
        except OSError:  # it rings already, or is closed
            pass

    def close(self) -> None:
        """Ends the connection, and every wait from now on."""
        self._closed = True
        self.wake()
        with self._lock:
            self._disconnect()
            self._ear.close()
            self._bell.close()

    # -- the connection

    def _listen(self, queues: Sequence[str], empty: Sequence[str]) -> bool:
        """Asks to be told; returns whether there is news already."""
        keys = self._server.keys
        if self._connection is not None and self._moves != self._server.moves:
            self._disconnect()  # it may listen to the primary that was
        if self._connection is None:
            self._moves = self._server.moves
            self._connection, self._unread = self._server.listener(), 0
        connection = self._connection
        prefixes = _shortest(keys.queue(name) for name in queues) if queues else [keys.queue("")]
        words = [word for prefix in prefixes for word in ("PREFIX", prefix)]
        connection.send_command("CLIENT", "TRACKING", "ON", "BCAST", *words)
        if empty:  # looked at after it listens, lest a push falls between
            connection.send_command("SMISMEMBER", keys.paused, *empty)
        for name in empty:
            connection.send_command("LLEN", keys.queue(name))
        for _ in range(self._unread):
            self._answer()
        self._unread = 0
        listening = self._answer()
        paused = self._answer() if empty else []
        lengths = [self._answer() for _ in empty]
        if isinstance(listening, Exception):
            self._tells = False
            get_logger("asynctask.redis").warning("redis_tells_no_news", error=str(listening), look_s=LOOK_S)
            return False
        if isinstance(paused, Exception) or any(isinstance(length, Exception) for length in lengths):
            return True  # whoever fetches now is told what is wrong
        return any(length > 0 and not stopped for length, stopped in zip(lengths, paused, strict=True))

    def _answer(self) -> Any:
        """The next answer, past all news; an error is returned too."""
        try:
            return self._connection.read_response()
        except redis.exceptions.ResponseError as error:
            return error

    def _heard(self, until: float) -> bool:
        """Whether anything was told before ``until``, or :meth:`wake` was called."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._ear, selectors.EVENT_READ)
            selector.register(self._connection._sock, selectors.EVENT_READ)
            while True:
                news = False
                while self._connection.can_read(timeout=0):
                    self._connection.read_response(push_request=True)
                    news = True
                if self._was_woken() or news:
                    self.told = news
                    return True
                left = until - self._clock.monotonic()
                if left <= 0:
                    return False
                selector.select(left)

    def _rest(self, until: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._ear, selectors.EVENT_READ)
            if not self._woken:
                selector.select(max(0.0, until - self._clock.monotonic()))

    def _was_woken(self) -> bool:
        woken, self._woken = self._woken, False
        try:
            while self._ear.recv(64):
                pass
        except BlockingIOError:
            pass
        return woken

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.disconnect()
            self._connection = None


def _shortest(prefixes: Any) -> list[str]:
    """Prefixes without those that begin with another one: Redis refuses what overlaps."""
    kept: list[str] = []
    for prefix in sorted(prefixes):
        if not kept or not prefix.startswith(kept[-1]):
            kept.append(prefix)
    return kept
