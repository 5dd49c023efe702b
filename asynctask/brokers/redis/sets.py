"""The sets ``schedule``, ``retry`` and ``dead``, as Sidekiq has them: payloads by the second they are due (or died).

A score is float seconds to the microsecond, so that neighbours rarely share one: Ruby's tools find an entry by its score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from asynctask.brokers.base import DEAD, RETRY, SCHEDULE, Held
from asynctask.brokers.redis.envelope import MALFORMED, held_key, opened, sealed_for_set, shown
from asynctask.brokers.redis.server import Server
from asynctask.clock import SECOND, Clock, micros
from asynctask.errors import InputError
from asynctask.wire.payload import Malformed, dump, parse, write_time

__all__ = ["Sets", "score", "time_of"]

_SETS: Final = (SCHEDULE, RETRY, DEAD)
_LAST_S: Final = 253_402_300_799.0


def score(at: int) -> str:
    """Microseconds as the score of a set's member."""
    return repr(at / SECOND)


def time_of(at: float) -> int:
    """The score of a member as microseconds. Anybody can write one that is no time: then the nearest that is, from 1970 to
    the year 9999."""
    return micros(min(max(at, 0.0), _LAST_S))


class Sets:
    """The sets of one server. ``dead_max``, ``dead_timeout_s``: how many dead jobs are kept, and for how many seconds."""

    def __init__(self, server: Server, clock: Clock, *, dead_max: int, dead_timeout_s: int) -> None:
        self._server = server
        self._clock = clock
        self._dead_max = dead_max
        self._dead_timeout_s = dead_timeout_s

    def _key(self, set_name: str) -> str:
        if set_name not in _SETS:
            raise InputError(f"there is no set {set_name!r}; there are {', '.join(_SETS)}")
        return self._server.keys(set_name)

    def hold(self, set_name: str, copies: Sequence[Held], process: str | None) -> None:
        """Puts copies into a set; those of a process only if they are still in its list, so that a repeat does nothing."""
        if not copies:
            return
        keys, key = self._server.keys, self._key(set_name)
        oldest = score(self._clock.now() - self._dead_timeout_s * SECOND) if set_name == DEAD else ""
        args: list[Any] = [process or "", oldest, self._dead_max - 1]  # one less than the limit, as Ruby trims it
        for held in copies:
            tracked = held_key(held.copy.key) if held.copy.attempt else ""
            text = sealed_for_set(held.copy).encode("utf-8", "surrogateescape")
            args += (score(held.at), text, held.copy.handle or "", tracked)
        self._server.run("hold", (key, keys.fetched(process or ""), keys.held, keys.holders), args, repeat=True)

    def release_due(self, set_name: str, now: int, limit: int) -> int:
        """Moves due members to their queues: read here, changed here, and moved by a script only where still there.

        So a crash at any moment leaves a member in the set or in its queue, and two pollers of whatever language move it
        once. Client middleware does not run. What is no job goes to the dead, unchanged. Returns how many were due.
        """
        keys, key = self._server.keys, self._key(set_name)
        due = ("ZRANGEBYSCORE", key, "-inf", score(now), "LIMIT", 0, limit)
        (members,) = self._server.ask(due)
        if not members:
            return 0
        numbers: dict[str, int] = {}
        moves: list[Any] = []
        for member in members:
            queue, text = _renewed(member, now)
            number = numbers.setdefault(queue, len(numbers) + 1) if queue else 0
            moves += (number, member, text)
        names = list(numbers)
        lists = [keys.queue(name) for name in names]
        args = (score(now), len(names), *names, *moves)
        self._server.run("release", (key, keys.queues, keys.dead, *lists), args, repeat=True)
        return len(members)

    def members(self, set_name: str, limit: int) -> list[Held]:
        """The first members, in the order of their scores."""
        key = self._key(set_name)
        if limit <= 0:
            return []
        found = self._server.guarded(
            lambda: self._server.redis.zrange(key, 0, limit - 1, withscores=True), (key,), repeat=True
        )
        return [Held(opened(member, None), time_of(float(at))) for member, at in found]


def _renewed(member: bytes, now: int) -> tuple[str, str | bytes]:
    """(queue, payload to push): the member with a new ``enqueued_at``; no queue, and what the dead get, for what is no
    job."""
    copy = opened(member, None)
    if not copy.jid.startswith(MALFORMED):
        try:
            job = parse(copy.payload, keep_numbers=True)
            job["enqueued_at"] = write_time(now)
            copy.payload = dump(job)
            return copy.queue, sealed_for_set(copy)
        except (Malformed, InputError):
            pass
    return "", shown(member.decode("utf-8", "surrogateescape"), copy.queue).encode("utf-8", "surrogateescape")
