"""Inspection and cleanup of the queues and sets on a Redis server, compatible with Ruby's tools.

The key of a set's entry is ``SCORE-JID``, as in the URLs of Ruby's tools. Those take all entries of a score out and put the
others back; here a script removes the one member by its text, and nothing else moves.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from asynctask.brokers.admin import (
    COUNTED_OTHERS,
    LOOKED_THROUGH,
    MOST_NAMES,
    PAGE_BYTES,
    SETS,
    Entry,
    Found,
    Page,
    QueueFacts,
    Removed,
    checked_text,
    checked_window,
    class_of,
    distinct,
    enqueued_at,
    first_of,
    job_key,
    pushed_again,
)
from asynctask.brokers.base import DEAD, Copy, SetEntry
from asynctask.clock import SECOND, Clock, micros
from asynctask.errors import InputError
from asynctask.sidekiq.envelope import MALFORMED, held_key, key_of, opened, sealed_for_set, shown
from asynctask.sidekiq.payload import Malformed, dump, parse, write_time
from asynctask.sidekiq.presence import process_facts
from asynctask.sidekiq.server import Command, RedisKeys, Server, count_of

_SCAN_BATCH: Final = 500
_PART: Final = 10  # of at most 4 MB each, if our own programs pushed them
_SAME_SCORE: Final = 10_000
_SIGNAL_S: Final = 60
_MAX_KEY: Final = 255
# Any score as Python formats it: 1700000000.5, 5e-07, -inf.
_KEY: Final = re.compile(r"(-?(?:[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|inf))-(.+)", re.DOTALL)
_GLOB: Final = str.maketrans({c: f"\\{c}" for c in "*?[]\\^-"})


T = TypeVar("T")


class RedisOperations:
    """Operations on one server. ``dead_max``, ``dead_timeout_s``: how many dead jobs are kept, and for how many seconds."""

    def __init__(self, server: Server, clock: Clock, *, dead_max: int, dead_timeout_s: int) -> None:
        self._server = server
        self._keys = server.keys
        self._clock = clock
        self._dead_max = dead_max
        self._dead_timeout_s = dead_timeout_s

    # -- queues

    def queues(self) -> list[QueueFacts]:
        found, paused_names = self._server.ask(("SMEMBERS", self._keys.queues), ("SMEMBERS", self._keys.paused))
        paused = {text_of(name) for name in paused_names}
        names = sorted({text_of(name) for name in found} | paused)[:MOST_NAMES]
        commands = [command for name in names for command in self._facts_commands(name)]
        answers = iter(self._server.ask(*commands)) if commands else iter(())
        facts = []
        for name in names:
            length, oldest, others = next(answers), next(answers), count_of(next(answers))
            text = opened(oldest, name).payload if oldest else ""
            at, next_class = (enqueued_at(text), class_of(text)) if text else (None, None)
            facts.append(QueueFacts(name, int(length), at, name in paused, next_class, others=min(others, length)))
        return facts

    def _facts_commands(self, name: str) -> tuple[Command, ...]:
        key = self._keys.queue(name)
        return ("LLEN", key), ("LINDEX", key, -1), ("GET", self._keys.passed(name))

    def others(self, queue: str) -> Mapping[str, int]:
        """They are the next to run: a fetch passes them."""
        key = self._keys.queue(queue)
        (found,) = self._server.ask(("GET", self._keys.passed(queue)))

        def part(first: int, size: int) -> list[bytes]:
            (texts,) = self._server.ask(("LRANGE", key, -first - size, -first - 1))
            return list(texts[::-1])

        texts = _bounded(part, len, 0, min(count_of(found), COUNTED_OTHERS))
        return Counter(class_of(opened(raw, queue).payload) or "" for raw in texts)

    def jobs(self, queue: str, *, offset: int = 0, limit: int = 100, newest: bool = False) -> Page:
        checked_window(offset, limit)
        key = self._keys.queue(queue)
        (length,) = self._server.ask(("LLEN", key))

        def part(first: int, size: int) -> list[bytes]:
            bounds = (first, first + size - 1) if newest else (-first - size, -first - 1)
            (texts,) = self._server.ask(("LRANGE", key, *bounds))
            return list(texts if newest else texts[::-1])  # the right end runs next

        return Page([_job(raw, queue) for raw in _bounded(part, len, offset, limit)], int(length))

    def delete_job(self, queue: str, key: str) -> Copy | None:
        """Searches from the newest to the oldest, up to 100,000 jobs: concurrent fetches do not move those not yet seen."""
        name = self._keys.queue(queue)
        for first in range(0, LOOKED_THROUGH, _SCAN_BATCH):
            (texts,) = self._server.ask(("LRANGE", name, first, first + _SCAN_BATCH - 1))
            for raw in texts:
                job = _job(raw, queue)
                if job.key == key:
                    held = held_key(job.copy.key) if job.copy.attempt else ""
                    taken = self._server.run("take_out", (name, self._keys.held), (raw, held))
                    return job.copy if taken else None
            if len(texts) < _SCAN_BATCH:
                return None
        return None

    def clear_some(self, queue: str, limit: int) -> Removed:
        keys = (self._keys.queue(queue), self._keys.held, self._keys.queues)
        count, *tracked = self._server.run("clear", keys, (max(1, limit), queue))
        return Removed(int(count), [key_of(text_of(key)) for key in tracked])

    def pause(self, queue: str) -> bool:
        _check_queue(queue)
        (added,) = self._server.ask(("SADD", self._keys.paused, queue))
        return bool(added)

    def unpause(self, queue: str) -> bool:
        _check_queue(queue)
        (removed,) = self._server.ask(("SREM", self._keys.paused, queue))
        return bool(removed)

    def paused(self, queues: Collection[str]) -> set[str]:
        names = list(queues)
        (answers,) = self._server.ask(("SMISMEMBER", self._keys.paused, *names)) if names else ((),)
        return {name for name, is_paused in zip(names, answers, strict=True) if is_paused}

    # -- sets

    def entries(self, set_name: str, *, offset: int = 0, limit: int = 100, newest: bool = False) -> Page:
        checked_window(offset, limit)
        key = _set_key(self._keys, set_name)
        (total,) = self._server.ask(("ZCARD", key))
        found = _bounded(
            lambda first, size: self._members(key, first, first + size - 1, newest=newest),
            lambda each: len(each[0]),
            offset,
            limit,
        )
        return Page([_entry(raw, at) for raw, at in found], int(total))

    def _members(self, key: str, first: int, last: int, *, newest: bool = False) -> list[tuple[bytes, float]]:
        redis = self._server.redis
        found: list[tuple[bytes, float]] = self._server.guarded(
            lambda: redis.zrange(key, first, last, desc=newest, withscores=True), (key,), repeat=True
        )
        return [(raw, float(at)) for raw, at in found]

    def find(self, set_name: str, text: str, *, limit: int = 100) -> Found:
        checked_window(0, limit)
        pattern = f"*{checked_text(text).translate(_GLOB)}*"
        key = _set_key(self._keys, set_name)
        found: dict[bytes, float] = {}
        cursor, commands = 0, 0
        while True:
            cursor, part = self._scan(key, cursor, pattern)
            found.update(part)
            commands += 1
            size = sum(map(len, found))
            if cursor == 0 or len(found) > limit or size > PAGE_BYTES or commands * _SCAN_BATCH >= LOOKED_THROUGH:
                break
        ordered = sorted(found.items(), key=lambda each: (each[1], each[0]))
        shown = first_of(((each, len(each[0])) for each in ordered), limit)
        return Found([_entry(raw, at) for raw, at in shown], cursor == 0 and len(found) == len(shown))

    def _scan(self, key: str, cursor: int, pattern: str) -> tuple[int, dict[bytes, float]]:
        redis = self._server.redis
        at, part = self._server.guarded(lambda: redis.zscan(key, cursor, pattern, _SCAN_BATCH), (key,), repeat=True)
        return int(at), {raw: float(member_score) for raw, member_score in part}

    def entry(self, set_name: str, key: str) -> Entry | None:
        name = _set_key(self._keys, set_name)
        at, _ = _split(key)
        redis = self._server.redis
        there = self._server.guarded(
            lambda: redis.zrangebyscore(name, repr(at), repr(at), start=0, num=_SAME_SCORE), (name,), repeat=True
        )
        return next((found for raw in there if (found := _entry(raw, at)).key == key), None)

    def restart(self, set_name: str, entries: Sequence[Entry]) -> int:
        name, now = _set_key(self._keys, set_name), self._clock.now()
        numbers: dict[str, int] = {}
        moves: list[Any] = []
        for each in distinct(entries):
            copy = pushed_again(set_name, each, now)
            moves += (numbers.setdefault(copy.queue, len(numbers) + 1), _raw(each), sealed_for_set(copy))
        if not moves:
            return 0
        keys = (name, self._keys.queues, self._keys.dead, *map(self._keys.queue, numbers))
        return int(self._server.run("release", keys, (score(now), len(numbers), *numbers, *moves)))

    def kill(self, set_name: str, entries: Sequence[Entry]) -> int:
        name, now = _set_key(self._keys, set_name), self._clock.now()
        if set_name == DEAD:
            raise InputError("dead jobs cannot be killed; delete or restart them", code="bad_action")
        moves = [text for each in distinct(entries) for text in (_raw(each), _encoded(shown(each.raw, each.copy.queue)))]
        if not moves:
            return 0
        oldest = score(now - self._dead_timeout_s * SECOND)
        args = (score(now), oldest, self._dead_max - 1, *moves)  # one less than the limit, as in Ruby
        return int(self._server.run("bury", (name, self._keys.dead), args))

    def delete(self, set_name: str, entries: Sequence[Entry]) -> int:
        name = _set_key(self._keys, set_name)
        members = [_raw(each) for each in distinct(entries)]
        if not members:
            return 0
        (gone,) = self._server.ask(("ZREM", name, *members), repeat=False)
        return int(gone)

    def clear(self, set_name: str) -> int:
        (gone,) = self._server.ask(("ZREMRANGEBYRANK", _set_key(self._keys, set_name), 0, -1), repeat=False)
        return int(gone)

    # -- processes

    def processes(self) -> list[dict[str, Any]]:
        """The members of the set ``processes`` whose own key has not expired."""
        (names,) = self._server.ask(("SMEMBERS", self._keys("processes")))
        identities = sorted(text_of(name) for name in names)[:MOST_NAMES]
        queries = [
            ("HMGET", self._keys(name), "info", "busy", "beat", "quiet", "rss", "concurrency") for name in identities
        ]
        answers = self._server.ask(*queries) if queries else []
        return [
            process_facts(identity, answer)
            for identity, answer in zip(identities, answers, strict=True)
            if answer[0] is not None
        ]

    def signal(self, identity: str, name: str) -> bool:
        (known,) = self._server.ask(("SISMEMBER", self._keys("processes"), identity))
        if not known:
            return False
        key = self._keys(f"{identity}-signals")
        self._server.ask(("LPUSH", key, name), ("EXPIRE", key, _SIGNAL_S), repeat=False)
        return True


def _bounded(part: Callable[[int, int], list[T]], size_of: Callable[[T], int], offset: int, limit: int) -> list[T]:
    """A page, read in small parts."""

    def read() -> Iterator[tuple[T, int]]:
        for first in range(0, limit, _PART):
            wanted = min(_PART, limit - first)
            batch = part(offset + first, wanted)
            yield from ((each, size_of(each)) for each in batch)
            if len(batch) < wanted:
                return

    return first_of(read(), limit)


def _set_key(keys: RedisKeys, set_name: str) -> str:
    if set_name not in SETS:
        raise InputError(f"there is no set {set_name!r}; there are {', '.join(SETS)}")
    return keys(set_name)


def _check_queue(queue: str) -> None:
    if not 1 <= len(queue) <= 255 or not queue.isprintable():
        raise InputError("a queue's name has 1 to 255 printable characters", code="bad_name")


def _job(raw: bytes, queue: str) -> Entry:
    copy = opened(raw, queue)
    return Entry(job_key(copy), copy, None, text_of(raw), not copy.jid.startswith(MALFORMED))


def _entry(raw: bytes, at: float) -> Entry:
    copy = opened(raw, None)
    return Entry(f"{at!r}-{copy.jid}", copy, time_of(at), text_of(raw), not copy.jid.startswith(MALFORMED))


def _split(key: str) -> tuple[float, str]:
    """(score, jid) of a key. Raises :class:`InputError`."""
    found = _KEY.fullmatch(key) if len(key) <= _MAX_KEY else None
    if found is None:
        raise InputError(f"{key[:100]!r} is no entry: write SCORE-JID as the list shows it", code="bad_key")
    return float(found[1]), found[2]


def _raw(entry: Entry) -> bytes:
    return _encoded(entry.raw)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def text_of(raw: bytes | str) -> str:
    """What Redis answered as text; bytes that are no UTF-8 come back the same."""
    return raw.decode("utf-8", "surrogateescape") if isinstance(raw, bytes) else raw


# -- the sets ``schedule``, ``retry`` and ``dead``: payloads by the second in which they are due (or died), as in Sidekiq
#
# A score is float seconds to the microsecond: Ruby's tools find an entry by its score, so neighbours should not share one.

_LAST_S: Final = 253_402_300_799.0


def score(at: int) -> str:
    """Microseconds as a score."""
    return repr(at / SECOND)


def time_of(at: float) -> int:
    """A score as microseconds, clamped to the years 1970 to 9999: clients can write any score."""
    return micros(min(max(at, 0.0), _LAST_S))


class Sets:
    """The sets of one server; arguments as of :class:`RedisOperations`."""

    def __init__(self, server: Server, clock: Clock, *, dead_max: int, dead_timeout_s: int) -> None:
        self._server = server
        self._clock = clock
        self._dead_max = dead_max
        self._dead_timeout_s = dead_timeout_s

    def hold(self, set_name: str, copies: Sequence[SetEntry], process: str | None) -> None:
        """Puts copies into a set; those of a process only if still in its list, so that a repeat does nothing."""
        if not copies:
            return
        keys = self._server.keys
        key = _set_key(keys, set_name)
        oldest = score(self._clock.now() - self._dead_timeout_s * SECOND) if set_name == DEAD else ""
        args: list[Any] = [process or "", oldest, self._dead_max - 1]  # one less than the limit, as in Ruby
        for held in copies:
            tracked = held_key(held.copy.key) if held.copy.attempt else ""
            text = sealed_for_set(held.copy).encode("utf-8", "surrogateescape")
            args += (score(held.at), text, held.copy.handle or "", tracked)
        self._server.run("hold", (key, keys.fetched(process or ""), keys.held, keys.holders), args, repeat=True)

    def release_due(self, set_name: str, now: int, limit: int) -> int:
        """Moves due members to their queues: read and rewritten here, moved by a script if still there.

        So after a crash a member is in the set or in its queue, and concurrent pollers of any language move it once. Client
        middleware does not run. A text that is no job goes to the dead set unchanged. Returns how many were due.
        """
        keys = self._server.keys
        key = _set_key(keys, set_name)
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

    def members(self, set_name: str, limit: int) -> list[SetEntry]:
        """The first members, by score."""
        key = _set_key(self._server.keys, set_name)
        if limit <= 0:
            return []
        found = self._server.guarded(
            lambda: self._server.redis.zrange(key, 0, limit - 1, withscores=True), (key,), repeat=True
        )
        return [SetEntry(opened(member, None), time_of(float(at))) for member, at in found]


def _renewed(member: bytes, now: int) -> tuple[str, str | bytes]:
    """(queue, payload to push): the member with a new ``enqueued_at``; for a text that is no job, no queue, and the text
    for the dead set."""
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
