"""Following a Task: one reader on the server's event loop serves every stream and every long poll.

A view that a client waits for names what it waits for (:class:`Following`), where the server offers :data:`FOLLOW`; the
server answers from the loop, without a thread. Other servers do not offer it; there the view waits in its own thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from asynctask.errors import Unavailable
from asynctask.ledger.progress import Changed
from webapi.context import json_text, progress_tag, with_links

FOLLOW: Final = "asynctask.follow"
"""In the WSGI environment: a function that takes a :class:`Following`; None if the wait is over."""

TICK_S: Final = 0.25
"""Seconds between two reads of the Tasks that clients follow."""

HEARTBEAT_S: Final = 15.0
"""Seconds after which a silent stream sends a comment: proxies close connections on which nothing moves."""

RECONNECT_MS: Final = 2_000
"""Milliseconds after which a browser connects again."""

STREAM_START: Final = b"retry: %d\n\n" % RECONNECT_MS
STREAM_HEARTBEAT: Final = b":\n\n"

_AT_ONCE: Final = 50
"""Followers that are woken before the loop serves other connections."""

_log = logging.getLogger(__name__)


class Following(NamedTuple):
    """What a client waits for."""

    task_id: int
    root: str
    """The prefix of the links."""
    progress: dict[str, Any]
    """The progress object that was read for it."""
    known: str | None
    """The tag of the one that it has."""
    wait_s: float | None = None
    """Seconds that it waits; None: a stream."""
    errors: bool = False
    """Whether the answer to a long poll has more than the progress object, so that it is made for this client alone."""


def stream_event(progress: dict[str, Any], root: str) -> bytes:
    """A progress object as a Server-Sent Event (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
    return b"id: %b\ndata: %b\n\n" % (progress_tag(progress).encode(), json_text(with_links(progress, root)))


class Followed:
    """A Task that clients follow: its last progress object, and what was made of it for all of them."""

    def __init__(self) -> None:
        self.mark: str | None = None
        self.followers = 0
        self.ended = False
        """Whether nothing more will come: the Task was removed, or the server stops."""
        self.progress: dict[str, Any] | None = None
        self.tag = ""
        self._waiting = set[asyncio.Future[None]]()
        self._made: dict[tuple[Callable[..., bytes], str], bytes] = {}

    async def after(self, progress: Mapping[str, Any], tag: str | None, seconds: float) -> bool:
        """Waits for another progress object than the one with this ``tag`` that is no older than ``progress``, or for the
        end. Returns whether it came within so many seconds."""
        seen = _version(progress)
        try:
            async with asyncio.timeout(seconds):
                while not self.ended and (self.progress is None or self.tag == tag or _version(self.progress) < seen):
                    await self._change()
        except TimeoutError:
            return False
        return True

    def made(self, how: Callable[[dict[str, Any], str], bytes], root: str) -> bytes:
        """``how(progress, root)``, called once for each progress object."""
        assert self.progress is not None
        if (how, root) not in self._made:
            self._made[how, root] = how(self.progress, root)
        return self._made[how, root]

    async def publish(self, progress: dict[str, Any] | None) -> None:
        """Tells the followers of a new progress object, or of the end."""
        if progress is None:
            self.ended = True
        else:
            self.progress, self.tag = progress, progress_tag(progress)
            self._made.clear()
        waiting, self._waiting = self._waiting, set()
        for number, future in enumerate(waiting, 1):
            if not future.done():
                future.set_result(None)
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _change(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)


def _version(progress: Mapping[str, Any]) -> tuple[int, int]:
    return progress["generation"], progress["version"]


class Notifier:
    """Reads which of the followed Tasks have changed, every :data:`TICK_S` while there is one, and tells their followers.

    ``read``: the Tasks that have another mark than this one (:meth:`asynctask.app.AsyncTask.changed`).
    """

    def __init__(self, read: Callable[[Mapping[int, str | None]], Awaitable[Mapping[int, Changed]]]) -> None:
        self._read = read
        self._followed: dict[int, Followed] = {}
        self._reader: asyncio.Task[None] | None = None
        self._stopped = False

    @contextmanager
    def follow(self, task_id: int) -> Iterator[Followed]:
        """The Task, read until the block ends."""
        followed = self._followed.setdefault(task_id, Followed())
        followed.followers += 1
        followed.ended |= self._stopped
        if self._reader is None and not self._stopped:
            self._reader = asyncio.get_running_loop().create_task(self._run())
        try:
            yield followed
        finally:
            followed.followers -= 1
            if not followed.followers:
                del self._followed[task_id]

    async def stop(self) -> None:
        """Ends every wait: each follower is told that nothing more comes."""
        self._stopped = True
        for each in list(self._followed.values()):
            await each.publish(None)

    async def _run(self) -> None:
        while self._followed and not self._stopped:
            try:
                await self._tick()
            except Unavailable:  # the database is away; streams stay open
                pass
            except Exception:  # the reader must survive, or no follower hears anything more
                _log.exception("the Tasks that clients follow could not be read")
            await asyncio.sleep(TICK_S)
        self._reader = None

    async def _tick(self) -> None:
        found = await self._read({task_id: each.mark for task_id, each in self._followed.items()})
        for task_id, changed in found.items():
            if (followed := self._followed.get(task_id)) is not None:
                followed.mark = changed.mark
                await followed.publish(changed.progress)
