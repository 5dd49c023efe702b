"""The broker on a Redis server, in Sidekiq's keys and format, so that Ruby's tools and workers see its queues and sets.

What Sidekiq does not have lies in separate keys (:mod:`asynctask.sidekiq.server`) and in one member of the payload
(:mod:`asynctask.sidekiq.envelope`):

* a fetched copy lies in the process's own list, moved there by the script that takes it from its queue;
* a tracked copy is held once, by the scripts' set of held copies. Untracked jobs, such as those that Ruby pushes, are not
  in it: a push repeated because its answer was lost makes two. At least once, as in Ruby;
* a queue has no priorities: jobs wait in the ledger until the dispatcher's next round;
* jobs of others stay where they are in a queue: a fetch passes them.
"""

from __future__ import annotations

import itertools
import selectors
import socket
import threading
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis

from asynctask.brokers.admin import BrokerOperations
from asynctask.brokers.base import About, Copy, Key, Presence, SetEntry
from asynctask.clock import SECOND, Clock, Ids, SystemClock, SystemIds
from asynctask.errors import BrokerUnavailable
from asynctask.logs import get_logger
from asynctask.sidekiq.activejob import OLD_WRAPPER, WRAPPER
from asynctask.sidekiq.admin import RedisOperations, Sets, text_of
from asynctask.sidekiq.envelope import MALFORMED, held_key, key_of, keys_in, opened, sealed
from asynctask.sidekiq.presence import Counters, RedisPresence, Statistics
from asynctask.sidekiq.server import Server, count_of

PUSHED_AT_ONCE: Final = 10_000
"""Copies per script call; a larger push takes several calls, each all or none."""

DEATHS_S: Final = 259_200
"""Seconds for which the count of a job's dead processes is kept."""

LOOKED_THROUGH: Final = 10_000
"""The longest queue that is read to check for a tracked copy; a longer one is assumed to hold it."""

PASSED_AT_ONCE: Final = 1_000
"""The most jobs that one fetch looks at in a queue with jobs of others: the server does nothing else for milliseconds."""

PASSING_WAIT_S: Final = 1.0
"""The longest wait beside others' jobs. A pop and a push just before it leave the length of a queue as it was."""

PASSING_BACKOFF_S: Final = 0.1
"""The longest back-off beside others' jobs: each of their pushes and fetches is a change of the queue."""

AGAIN_S: Final = 30.0
"""Seconds after which a queue with others' jobs is looked through from its head, at least; one second for each
:data:`_AGAIN_JOBS` of these. Others may have put something back among what was passed, or the place was the wrong one."""

_AGAIN_JOBS: Final = 100
_ANCHOR_BYTES: Final = 65_536
_WITHDRAWN_AT_ONCE: Final = 2_000
_MAX_BACKOFF_S: Final = 0.015
_BACKOFF_S: Final = 0.001


@dataclass(slots=True)
class _Passed:
    """Of a queue with jobs of others: its first ``count`` jobs are theirs, and ``anchor`` is the text of the last of these.
    ``again_at``: when it is looked through from the head; ``rests_until``: nothing is fetched from it; on the monotonic
    clock."""

    again_at: float
    count: int = 0
    anchor: bytes = b""
    rests_until: float = 0.0


class RedisBroker:
    """Jobs in Redis.

    Arguments: the server's ``url``; the ``namespace`` of every key; ``clock`` and ``ids``; ``connections``, the most that
    it opens, besides the one that waits; ``timeout_s`` of a connect or an answer; ``dead_max`` and ``dead_timeout_s``: how
    many dead jobs are kept, and for how long. Connects on first use. Raises ConfigError for an invalid URL or namespace.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "",
        clock: Clock | None = None,
        ids: Ids | None = None,
        connections: int = 10,
        timeout_s: float = 5.0,
        dead_max: int = 10_000,
        dead_timeout_s: int = 15_552_000,
    ) -> None:
        self._clock = clock or SystemClock()
        self._server = Server(url, namespace, connections=connections, timeout_s=timeout_s)
        self._keys = self._server.keys
        self._sets = Sets(self._server, self._clock, dead_max=dead_max, dead_timeout_s=dead_timeout_s)
        self._operations = RedisOperations(self._server, self._clock, dead_max=dead_max, dead_timeout_s=dead_timeout_s)
        self._waiter = Waiter(self._server, self._clock)
        self._batches = (ids or SystemIds(self._clock)).nonce()  # makes handles unique to this broker object
        self._numbers = itertools.count(1)
        self._counters = Counters()
        self._statistics = Statistics(self._clock, self._counters)
        self._queues: tuple[str, ...] | None = None  # of the last fetch; None before the first one
        self._seen: Mapping[str, int] = {}  # the lengths of the queues that gave no more
        self._passed: dict[str, _Passed] = {}  # the queues with jobs of others
        self._known: Collection[str] = ()  # the workers whose untracked jobs are fetched from these
        self._more = False  # the last fetch did not look through them
        self._notified = False
        self._misses = 0

    # -- jobs in transit

    def push(self, copies: Sequence[Copy]) -> None:
        for first in range(0, len(copies), PUSHED_AT_ONCE):
            self._push(copies[first : first + PUSHED_AT_ONCE])

    def _push(self, copies: Sequence[Copy]) -> None:
        texts = [sealed(copy) for copy in copies]
        queues = list(dict.fromkeys(copy.queue for copy in copies))
        if len(queues) == 1 and not any(copy.attempt for copy in copies):  # the commands of Ruby's client
            (queue,) = queues
            self._server.ask(("SADD", self._keys.queues, queue), ("LPUSH", self._keys.queue(queue), *texts), repeat=False)
            return
        numbers = {queue: n for n, queue in enumerate(queues, 1)}
        args: list[Any] = [len(queues), *queues]
        for copy, text in zip(copies, texts, strict=True):
            args += (numbers[copy.queue], held_key(copy.key) if copy.attempt else "", text)
        keys = (self._keys.queues, self._keys.our_queues, self._keys.held, *map(self._keys.queue, queues))
        self._server.run("push", keys, args, repeat=all(copy.attempt for copy in copies))

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        if limit > 0 and self._passed:
            queues = self._unrested(queues)
        if limit > 0 and not queues:
            self._queues, self._seen = (), {}
        if not done and (limit <= 0 or not queues):
            return []
        if limit > 0:
            self._statistics.fold()
        counters = self._counters.take()
        batch = f"{self._batches}.{next(self._numbers)}"
        keys = (*self._own(process), self._keys.paused, self._keys.deaths, *map(self._keys.queue, queues))
        keys += tuple(map(self._keys.passed, queues))
        keys += tuple(self._keys(name) for name, _ in counters)
        args: list[Any] = [process, max(0, limit), batch, self._clock.now() // SECOND, len(queues), *queues, len(counters)]
        args += [word for (_, keep_s), by in counters.items() for word in (by, keep_s)]
        try:
            # A fetch is not repeated: copies of a lost answer lie in the process's list, and are found there.
            repeat = limit <= 0 and not counters
            args += (*_acknowledged(done), *self._passing(queues))
            *answer, passed = self._server.run("exchange", keys, args, repeat=repeat)
        except BrokerUnavailable:
            self._counters.put_back(counters)
            raise
        copies = self._opened(queues, *answer, batch=batch)
        if limit > 0 and queues:
            exhausted = len(copies) < limit
            lengths = self._note_passed(queues, passed, exhausted=exhausted)
            self._note_fetch(queues, lengths if exhausted else {}, found=bool(copies))
        return copies

    def _unrested(self, queues: Sequence[str]) -> Sequence[str]:
        now = self._clock.monotonic()
        resting = {queue for queue, passed in self._passed.items() if passed.rests_until > now}
        return [queue for queue in queues if queue not in resting]

    def _passing(self, queues: Sequence[str]) -> list[Any]:
        """The last part of an exchange's arguments, if jobs of others stand in a queue."""
        if self._passed.keys().isdisjoint(queues):
            return []
        now, args = self._clock.monotonic(), [PASSED_AT_ONCE, _ANCHOR_BYTES, WRAPPER, OLD_WRAPPER]
        for queue in queues:
            passed = self._passed.get(queue)
            if passed is not None and passed.again_at <= now:
                passed.again_at, passed.count = now + max(AGAIN_S, passed.count / _AGAIN_JOBS), 0
            args += (-1, "") if passed is None else (passed.count, passed.anchor)
        return [*args, *tuple(self._known)]

    def _note_passed(self, queues: Sequence[str], found: Sequence[Sequence[Any]], *, exhausted: bool) -> dict[str, int]:
        """Notes what the script passed in each queue; returns the lengths of the queues."""
        self._more, lengths = False, dict.fromkeys(queues, 0)
        for queue, facts in zip(queues, found, strict=False):
            if not facts:
                continue
            theirs, count, anchor, lengths[queue], more = facts
            self._passed[queue].count, self._passed[queue].anchor = count, anchor
            self._more |= exhausted and bool(more)
            if exhausted and not theirs:
                del self._passed[queue]
        return lengths

    def _own(self, process: str) -> tuple[str, str, str]:
        return self._keys.fetched(process), self._keys.held, self._keys.holders

    def _opened(
        self, queues: Sequence[str], counts: Sequence[int], texts: Sequence[bytes], deaths: Sequence[bytes], *, batch: Any
    ) -> list[Copy]:
        copies: list[Copy] = []
        for queue, count in zip(queues, counts, strict=False):
            for _ in range(count):
                n = len(copies)
                copies.append(opened(texts[n], queue, f"{batch}:{n + 1}:{queue}"))
        if deaths:
            _count_deaths(copies, deaths)
        return copies

    def put_back(self, process: str, copies: Sequence[Copy]) -> None:
        if copies:
            self._return(process, copies)

    def defer(self, process: str, copies: Sequence[Copy], known: Collection[str]) -> None:
        if not copies or not self._return(process, copies):
            return
        now, self._known = self._clock.monotonic(), known
        for queue in {copy.queue for copy in copies}:
            if queue in self._passed:  # the script did not see that it is theirs: it reads JSON otherwise
                self._passed[queue].rests_until = now + PASSING_WAIT_S
            else:
                self._passed[queue] = _Passed(now + AGAIN_S)

    def _return(self, process: str, copies: Sequence[Copy]) -> int:
        queues = list(dict.fromkeys(copy.queue for copy in copies))
        numbers = {queue: n for n, queue in enumerate(queues, 1)}
        args: list[Any] = [process, self._clock.now() // SECOND + DEATHS_S, DEATHS_S, len(queues), *queues]
        for copy in reversed(copies):
            key = held_key(copy.key) if copy.attempt else ""
            args += (numbers[copy.queue], copy.handle or "", key, copy.jid, copy.deaths, _renamed_text(copy))
        keys = (*self._own(process), self._keys.queues, self._keys.deaths, *map(self._keys.queue, queues))
        return int(self._server.run("put_back", keys, args, repeat=True))

    def withdraw(self, task_id: int, limit: int) -> list[Key]:
        taken: list[Key] = []
        (queues,) = self._server.ask(("SMEMBERS", self._keys.our_queues))
        for queue in sorted(text_of(name) for name in queues):
            at = 0  # from the newest to the oldest: concurrent fetches do not move the copies not yet looked at
            while len(taken) < limit:
                looked, found = self._withdraw_from(queue, at, _WITHDRAWN_AT_ONCE, limit - len(taken), task_id)
                if not looked:
                    break
                taken += found
                at += looked - len(found)
        return taken

    def _withdraw_from(self, queue: str, first: int, count: int, limit: int, task_id: int) -> tuple[int, list[Key]]:
        """Of ``count`` copies of a queue, behind the ``first`` newest, removes up to ``limit`` of a Task; returns how many
        it read, and those that it removed."""
        gone = f"withdrawn {self._batches}.{next(self._numbers)}"
        args = (first, count, task_id, limit, gone)
        looked, *found = self._server.run("withdraw", (self._keys.queue(queue), self._keys.held), args)
        return looked, [key_of(text_of(key)) for key in found]

    # -- queries

    def holds(self, keys: Collection[Key]) -> set[Key]:
        asked = [key for key in keys if key[1] > 0]
        places = self._places(asked)
        waiting = defaultdict(list)
        for key, place in places.items():
            if place.startswith("q"):
                waiting[place[1:]].append(key)
        doubtful: list[Key] = []
        for queue, waiting_keys in waiting.items():
            doubtful += self._not_in(queue, waiting_keys)
        # A copy that is not there was fetched just now, or deleted by a tool.
        still = {key for key, place in self._places(doubtful).items() if place == "p"} if doubtful else set()
        return {key for key, place in places.items() if place} - (set(doubtful) - still)

    def _places(self, keys: Sequence[Key]) -> dict[Key, str]:
        places: list[bytes] = []
        for first in range(0, len(keys), PUSHED_AT_ONCE):
            part = [held_key(key) for key in keys[first : first + PUSHED_AT_ONCE]]
            places += self._server.run("holds", (self._keys.held,), (self._keys.prefix, *part), repeat=True)
        return {key: text_of(place) for key, place in zip(keys, places, strict=True)}

    def _not_in(self, queue: str, keys: Sequence[Key]) -> list[Key]:
        name = self._keys.queue(queue)
        (length,) = self._server.ask(("LLEN", name))
        if length > LOOKED_THROUGH:
            return []
        (texts,) = self._server.ask(("LRANGE", name, 0, -1))
        there = keys_in(texts)
        return [key for key in keys if held_key(key) not in there]

    def waiting(self, queues: Collection[str]) -> Mapping[str, Mapping[int, int]]:
        names = list(dict.fromkeys(queues))
        if not names:
            return {}
        asked = [("LLEN", self._keys.queue(name)) for name in names]
        *lengths, passed = self._server.ask(*asked, ("MGET", *map(self._keys.passed, names)))
        counts = (length - count_of(theirs) for length, theirs in zip(lengths, passed, strict=True))
        return {name: {0: count} for name, count in zip(names, counts, strict=True) if count > 0}

    def queues(self) -> Mapping[str, int]:
        (found,) = self._server.ask(("SMEMBERS", self._keys.queues))
        names = sorted(text_of(name) for name in found)
        lengths = self._server.ask(*(("LLEN", self._keys.queue(name)) for name in names)) if names else []
        return {name: length for name, length in zip(names, lengths, strict=True) if length}

    # -- processes

    def held_by(self, process: str) -> list[Copy]:
        name = self._keys.fetched(process)
        fields, deaths = self._server.ask(("HGETALL", name), ("HGETALL", self._keys.deaths))
        found = fields.items() if isinstance(fields, dict) else zip(fields[::2], fields[1::2], strict=True)
        copies = [opened(text, text_of(field).split(":", 2)[2], text_of(field)) for field, text in found]
        copies.sort(key=lambda copy: _fetch_order(copy.handle))
        self._count_all_deaths(copies, deaths)
        return copies

    def _count_all_deaths(self, copies: Sequence[Copy], deaths: Any) -> None:
        now = self._clock.now() // SECOND
        found = deaths.items() if isinstance(deaths, dict) else zip(deaths[::2], deaths[1::2], strict=True)
        counts: list[bytes] = []
        for jid, noted in found:
            count, _, until = noted.partition(b" ")
            if count.isdigit() and until.isdigit() and int(until) > now:
                counts += (jid, count)
        _count_deaths(copies, counts)

    def holders(self) -> set[str]:
        (processes,) = self._server.ask(("SMEMBERS", self._keys.holders))
        return {text_of(process) for process in processes}

    def drop(self, process: str, copies: Sequence[Copy]) -> None:
        self.exchange(process, copies, (), 0)

    def forget(self, keys: Collection[Key]) -> None:
        if keys:
            self._server.ask(("HDEL", self._keys.held, *map(held_key, keys)))

    def presence(self, about: About) -> Presence:
        """Shows a worker process to Sidekiq's tools. One per broker object: they share its counters."""
        return RedisPresence(self._server, self._clock, self._counters, self._statistics, about)

    # -- the sets of untracked jobs

    def hold(self, set_name: str, copies: Sequence[SetEntry], *, process: str | None = None) -> None:
        self._sets.hold(set_name, copies, process)

    def release_due(self, set_name: str, now: int, limit: int) -> int:
        return self._sets.release_due(set_name, now, limit)

    def members(self, set_name: str, limit: int) -> list[SetEntry]:
        return self._sets.members(set_name, limit)

    @property
    def operations(self) -> BrokerOperations:
        return self._operations

    # -- waiting

    def wait(self, timeout: float) -> bool:
        """Waits for changes of the queues of the last fetch, and of which are paused; before the first fetch, for those of
        any queue; after a fetch from no queue, for :meth:`wake` only.

        Every idle process is notified of a job that one gets. After misses it backs off for a few milliseconds, so that not
        a hundred processes run for each job.
        """
        if self._more:
            self._more = False
            return True
        if self._passed:
            timeout = min(timeout, PASSING_WAIT_S)
        if self._misses and self._notified:
            most = PASSING_BACKOFF_S if self._passed else _MAX_BACKOFF_S
            self._waiter.rest(min(_BACKOFF_S * 2 ** min(self._misses, 8), most))
        if self._queues == ():
            return self._waiter.doze(timeout)
        news = self._waiter.wait(timeout, self._queues or (), self._seen)
        if news:
            self._seen = {}
        self._notified = self._waiter.notified
        return news

    def _note_fetch(self, queues: Sequence[str], seen: Mapping[str, int], *, found: bool) -> None:
        self._queues, self._seen = tuple(dict.fromkeys(queues)), seen
        if found:
            self._misses = 0
        elif self._notified:
            self._misses += 1

    def wake(self) -> None:
        self._waiter.wake()

    def close(self) -> None:
        self._waiter.close()
        self._server.close()

    def health_check(self) -> Mapping[str, Any]:
        """Facts about the server and its problems, see :meth:`Server.health_check`."""
        return self._server.health_check()


def _acknowledged(done: Sequence[Copy]) -> list[Any]:
    """The part of an exchange's arguments that says what is recorded."""
    untracked = [copy.handle or "" for copy in done if not copy.attempt]
    tracked = [word for copy in done if copy.attempt for word in (copy.handle or "", held_key(copy.key))]
    return [len(untracked), *untracked, len(tracked) // 2, *tracked]


def _renamed_text(copy: Copy) -> str:
    """The text to put back for a job that came without an id: with its new one. Empty: unchanged."""
    if copy.attempt or copy.jid in copy.payload or copy.jid.startswith(MALFORMED):
        return ""
    return sealed(copy)


def _count_deaths(copies: Sequence[Copy], deaths: Sequence[bytes]) -> None:
    counts = {text_of(jid): int(count) for jid, count in zip(deaths[::2], deaths[1::2], strict=True)}
    for copy in copies:
        copy.deaths = counts.get(copy.jid, 0)


def _fetch_order(handle: str) -> tuple[str, int, int]:
    batch, n, _ = handle.split(":", 2)
    broker, _, number = batch.partition(".")
    return broker, int(number), int(n)


# -- waiting for changes of queues, without fetching and without polling
#
# CLIENT TRACKING in broadcast mode (Redis 6 and later) notifies a connection of changed keys, whatever client changed them,
# and needs no server setting. Where a server or proxy does not offer it, waits are short and the caller polls.

POLL_S: Final = 0.5
"""Seconds of one wait without client tracking."""


class Waiter:
    """The waiting connection of a process. :meth:`wait` is for one thread at a time, :meth:`wake` for any."""

    def __init__(self, server: Server, clock: Clock) -> None:
        self._server = server
        self._clock = clock
        self._lock = threading.Lock()
        self._connection: Any = None
        self._moves = 0  # the server's, when this connection was made
        self._unread_replies = 0  # replies not read yet
        self._tracks = True  # whether the server offers client tracking
        self.notified = False  # whether a notification, not :meth:`wake`, ended the last wait
        self._woken = False
        self._closed = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)

    def wait(self, timeout: float, queues: Sequence[str], seen: Mapping[str, int]) -> bool:
        """Waits for a change of one of these queues (none: of any) or of those that are paused, for :meth:`wake`, or
        ``timeout`` seconds.

        ``seen``: the lengths of queues when last seen; if one is longer, that is a change. Returns whether there was a
        change or a wake-up. Raises :class:`BrokerUnavailable`.
        """
        until = self._clock.monotonic() + timeout
        with self._lock:
            self.notified = False
            if self._closed:
                return True
            try:
                found = self._listen(queues, seen) if self._tracks else False
                if not self._tracks:
                    self._rest(min(until, self._clock.monotonic() + POLL_S))
                    return self._was_woken() or bool(seen)
                self.notified = found
                news = found or self._await_change(until)
                self._connection.send_command("CLIENT", "TRACKING", "OFF")
                self._unread_replies += 1
                return news
            except (redis.exceptions.RedisError, OSError) as error:
                self._disconnect()
                raise BrokerUnavailable(
                    f"Redis at {self._server.name} does not answer: start it, or mend broker_url ({error})"
                ) from error

    def rest(self, seconds: float) -> None:
        """Sleeps, or until :meth:`wake`, which still ends the next wait."""
        with self._lock:
            if not self._closed:
                self._rest(self._clock.monotonic() + seconds)

    def doze(self, seconds: float) -> bool:
        """Waits for :meth:`wake` only; returns whether it came."""
        with self._lock:
            self.notified = False
            if self._closed:
                return True
            self._rest(self._clock.monotonic() + seconds)
            return self._was_woken()

    def wake(self) -> None:
        """Ends the wait, or the next one."""
        self._woken = True
        try:
            self._wake_writer.send(b"!")
        except OSError:  # the socket is full, or closed
            pass

    def close(self) -> None:
        """Closes the connection and ends every wait from now on."""
        self._closed = True
        self.wake()
        with self._lock:
            self._disconnect()
            self._wake_reader.close()
            self._wake_writer.close()

    # -- the connection

    def _listen(self, queues: Sequence[str], seen: Mapping[str, int]) -> bool:
        """Turns tracking on; returns whether there is a change already."""
        keys = self._server.keys
        if self._connection is not None and self._moves != self._server.moves:
            self._disconnect()  # it may be a connection to the former primary
        if self._connection is None:
            self._moves = self._server.moves
            self._connection, self._unread_replies = self._server.listener(), 0
        connection = self._connection
        prefixes = _without_overlaps([keys.paused, *(map(keys.queue, queues) if queues else [keys.queue("")])])
        words = [word for prefix in prefixes for word in ("PREFIX", prefix)]
        connection.send_command("CLIENT", "TRACKING", "ON", "BCAST", *words)
        if seen:  # after tracking is on, so that no push is missed in between
            connection.send_command("SMISMEMBER", keys.paused, *seen)
        for name in seen:
            connection.send_command("LLEN", keys.queue(name))
        for _ in range(self._unread_replies):
            self._read_reply()
        self._unread_replies = 0
        listening = self._read_reply()
        paused = self._read_reply() if seen else []
        lengths = [self._read_reply() for _ in seen]
        if isinstance(listening, Exception):
            self._tracks = False
            get_logger("asynctask.redis").warning("redis_tells_no_news", error=str(listening), look_s=POLL_S)
            return False
        if isinstance(paused, Exception) or any(isinstance(length, Exception) for length in lengths):
            return True  # the fetch reports the error
        found = zip(lengths, seen.values(), paused, strict=True)
        return any(length > before and not stopped for length, before, stopped in found)

    def _read_reply(self) -> Any:
        """The next reply, skipping notifications; returns an error, too."""
        try:
            return self._connection.read_response()
        except redis.exceptions.ResponseError as error:
            return error

    def _await_change(self, until: float) -> bool:
        """Waits for a notification or :meth:`wake`; returns whether one came before ``until``."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ)
            selector.register(self._connection._sock, selectors.EVENT_READ)
            while True:
                news = False
                while self._connection.can_read(timeout=0):
                    self._connection.read_response(push_request=True)
                    news = True
                if self._was_woken() or news:
                    self.notified = news
                    return True
                left = until - self._clock.monotonic()
                if left <= 0:
                    return False
                selector.select(left)

    def _rest(self, until: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ)
            if not self._woken:
                selector.select(max(0.0, until - self._clock.monotonic()))

    def _was_woken(self) -> bool:
        woken, self._woken = self._woken, False
        try:
            while self._wake_reader.recv(64):
                pass
        except BlockingIOError:
            pass
        return woken

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.disconnect()
            self._connection = None


def _without_overlaps(prefixes: Any) -> list[str]:
    """Prefixes without those that begin with another one: Redis refuses overlaps."""
    kept: list[str] = []
    for prefix in sorted(prefixes):
        if not kept or not prefix.startswith(kept[-1]):
            kept.append(prefix)
    return kept
