"""A worker process as Sidekiq's tools see it: its state, running jobs, signals, counters and metrics.

====================================  ======  ======================================================================
key                                   type    value
====================================  ======  ======================================================================
``processes``                         set     identities
``ID``                                hash    state of the process; expires 60 s after its last beat
``ID:work`` and ``ID:workers``        hash    thread -> its job; the second name is of Sidekiq up to 6.4.1
``ID-signals``                        list    signals left by tools; one is taken at each beat
``process_cleanup``                   string  lock for 60 s of the process that prunes ``processes``
``stat:processed`` ``stat:failed``    string  jobs that ended, and those that raised; also with ``:YYYY-MM-DD``
====================================  ======  ======================================================================

The keys of the metrics are described at :data:`BOUNDS`.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

from asynctask.brokers.admin import peeked
from asynctask.brokers.base import About, RunningJob
from asynctask.clock import SECOND, Clock, micros
from asynctask.errors import BrokerUnavailable
from asynctask.logs import get_logger
from asynctask.messages import SECRET, masked
from asynctask.sidekiq.payload import dump_any
from asynctask.sidekiq.server import Command, Server

SEEN_S: Final = 60
"""Seconds after its last beat until a process disappears."""

MAX_SHOWN: Final = 65_536
"""Characters of the longest payload shown for a running job; a longer one is replaced by a summary."""

MAX_SHOWN_IN_ALL: Final = 4_194_304
MAX_PRUNED: Final = 10_000
_BATCH: Final = 500  # commands of one round trip
_MAX_SIGNAL: Final = 64


class RedisPresence:
    """One process. ``counters`` and ``statistics`` are its broker's; :meth:`beat` and :meth:`leave` are for one thread."""

    def __init__(self, server: Server, clock: Clock, counters: Counters, statistics: Statistics, about: About) -> None:
        self._server = server
        self._clock = clock
        self._counters = counters
        self._statistics = statistics
        self._about = about
        self._key = server.keys(about.identity)
        self._work = (f"{self._key}:work", f"{self._key}:workers")
        self._info = dump_any(_info(about))
        self._log = get_logger("asynctask.presence")
        self.ended = statistics.ended

    def beat(self, running: Sequence[RunningJob], *, quiet: bool, rss_kib: int) -> str | None:
        """See :meth:`asynctask.brokers.base.Presence.beat`."""
        before = self._clock.monotonic()
        self._server.ask(("PING",))
        rtt_us = round((self._clock.monotonic() - before) * SECOND)
        state = (
            "info", self._info, "concurrency", self._about.concurrency, "busy", len(running),
            "beat", repr(self._clock.now() / SECOND), "rtt_us", rtt_us, "quiet", "true" if quiet else "false",
            "rss", rss_kib,
        )  # fmt: skip
        answers = self._transaction(
            *self._work_commands(running),
            ("SADD", self._server.keys("processes"), self._about.identity),
            ("HSET", self._key, *state),
            ("EXPIRE", self._key, SEEN_S),
            ("RPOP", f"{self._key}-signals"),
        )
        try:
            self.send()
        except BrokerUnavailable as error:  # the beat succeeded, and the signal it took must not be lost
            self._log.warning("counts_put_off", error=str(error))
        return _signal(answers[-1])

    def _work_commands(self, running: Sequence[RunningJob]) -> list[Command]:
        """Commands that rewrite the work hash, under both names."""
        entries: list[str] = []
        room = MAX_SHOWN_IN_ALL
        for each in running:
            payload = each.payload if len(each.payload) <= min(MAX_SHOWN, room) else _summary(each)
            if SECRET in payload:
                payload = dump_any(masked(peeked(payload)))
            room -= len(payload)
            entry = {"queue": _plain(each.queue), "payload": _plain(payload), "run_at": each.began_at // SECOND}
            entries += (each.thread, dump_any(entry))
        shown: list[Command] = [("UNLINK", *self._work)]
        if entries:
            for key in self._work:
                shown += [("HSET", key, *entries), ("EXPIRE", key, SEEN_S)]
        return shown

    def leave(self) -> None:
        """Sends the last counts; the process's hash expires, as with Ruby."""
        gone = ("SREM", self._server.keys("processes"), self._about.identity)
        self._server.ask(gone, ("UNLINK", *self._work))
        self.send()

    # -- other processes

    def processes(self) -> int:
        """The number of processes in the set, at least 1."""
        (count,) = self._server.ask(("SCARD", self._server.keys("processes")))
        return max(1, int(count))

    def prune(self) -> None:
        """Removes processes from the set whose hash is gone; once a minute among all processes."""
        keys = self._server.keys
        (won,) = self._server.ask(("SET", keys("process_cleanup"), 1, "NX", "EX", SEEN_S), repeat=False)
        if not won:
            return
        seen: Iterator[Any] = self._server.guarded(
            lambda: iter(list(islice(self._server.redis.sscan_iter(keys("processes"), count=1000), MAX_PRUNED)))
        )
        while members := list(islice(seen, _BATCH)):
            prefix = keys.prefix.encode()
            # EXISTS, because a member may name a key of any type, which must not stop the pruning of others.
            there = self._server.ask(*(("EXISTS", prefix + member) for member in members))
            gone = [member for member, exists in zip(members, there, strict=True) if not exists]
            if gone:
                self._server.ask(("SREM", keys("processes"), *gone))

    # -- counters

    def send(self) -> None:
        """Sends every count; keeps those that could not be sent. A call whose answer is lost counts again."""
        self._statistics.fold(at_once=True)
        self._send_counters()
        self._send_metrics()

    def _send_counters(self) -> None:
        taken = self._counters.take()
        ups: list[Command] = []
        for (name, keep_s), by in taken.items():
            key = self._server.keys(name)
            ups.append(("INCRBY", key, by))
            if keep_s:
                ups.append(("EXPIRE", key, keep_s))
        if ups:
            try:
                self._transaction(*ups)
            except BrokerUnavailable:
                self._counters.put_back(taken)
                raise

    def _send_metrics(self) -> None:
        taken = self._statistics.take()
        minutes: dict[int, dict[str, MinuteFigures]] = defaultdict(dict)
        for (minute, name), figures in taken.items():
            minutes[minute][name] = figures
        try:
            for minute, figures_of in minutes.items():
                self._send_minute(minute, figures_of)
                for name in figures_of:
                    del taken[minute, name]
        except BrokerUnavailable:
            self._statistics.put_back(taken)
            raise

    def _send_minute(self, minute: int, figures: dict[str, MinuteFigures]) -> None:
        prefix = self._server.keys.prefix
        wanted = ((verb, f"{prefix}{key}", *rest) for verb, key, *rest in commands(minute, figures))
        while part := list(islice(wanted, _BATCH)):
            self._transaction(*part)

    def _transaction(self, *wanted: Command) -> list[Any]:
        """The answers of one transaction. Logs commands that met a key of another type; the others are executed."""

        def call() -> list[Any]:
            pipeline = self._server.redis.pipeline(transaction=True)
            for command in wanted:
                pipeline.execute_command(*command)
            return list(pipeline.execute(raise_on_error=False))

        answers = self._server.guarded(call, [str(command[1]) for command in wanted])
        for command, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, Exception):
                self._log.warning("key_not_ours", key=str(command[1]), error=str(answer)[:300])
        return answers


def _info(about: About) -> dict[str, Any]:
    """The facts in the forms of all versions of Sidekiq: some show no page at all without ``concurrency``."""
    weights = {name: 0 if about.strict else weight for name, weight in about.weights.items()}
    mode = "strict" if about.strict else "random" if set(weights.values()) == {1} else "weighted"
    return {
        "hostname": _plain(about.hostname),
        "started_at": about.started_at / SECOND,
        "pid": about.pid,
        "tag": _plain(about.tag),
        "concurrency": about.concurrency,
        "queues": list(weights),
        "weights": [weights],
        "capsules": {"default": {"concurrency": about.concurrency, "mode": mode, "weights": weights}},
        "labels": [],
        "identity": about.identity,
        "version": about.version,
        "embedded": False,
    }


def _summary(running: RunningJob) -> str:
    """Replaces a payload that is too large to show: the job without its arguments."""
    args = [f"({len(running.payload):,} characters, not shown)"]
    name, jid, queue = (_plain(each[:255]) for each in (running.name, running.jid, running.queue))
    return dump_any({"class": name, "args": args, "jid": jid, "queue": queue})


def _plain(text: str) -> str:
    """The text with unencodable characters replaced."""
    return text.encode("utf-8", "replace").decode()


def _signal(popped: Any) -> str | None:
    if popped is None or isinstance(popped, Exception):
        return None
    name = popped.decode("ascii", "replace") if isinstance(popped, bytes) else str(popped)
    return name[:_MAX_SIGNAL]


# -- facts that processes of any language write about themselves: untrusted input

_MOST_QUEUES = 1_000


def process_facts(identity: str, answer: Sequence[bytes | None]) -> dict[str, Any]:
    """The facts of a process, in the form of the ledger's own processes.

    ``answer``: the values of ``info``, ``busy``, ``beat``, ``quiet``, ``rss`` (KiB) and ``concurrency``.
    """
    info_text, busy, beat, quiet, rss, concurrency = [
        None if value is None else bytes(value).decode("utf-8", "replace") for value in answer
    ]
    info = peeked(info_text or "")
    queues = info.get("queues")
    kib = _number(rss)
    return {
        "identity": identity,
        "hostname": _short(info.get("hostname")),
        "pid": _number(info.get("pid")),
        "started_at": _time(info.get("started_at")),
        "beat_at": _time(beat),
        "concurrency": _number(info.get("concurrency") if concurrency is None else concurrency) or 0,
        "busy": _number(busy) or 0,
        "quiet": quiet == "true",
        "rss": None if kib is None else kib * 1024,
        "queues": [str(name)[:255] for name in queues[:_MOST_QUEUES]] if isinstance(queues, list) else [],
    }


def _short(value: object) -> str:
    return value[:255] if isinstance(value, str) else ""


def _number(value: object) -> int | None:
    seconds = _seconds(value)
    return None if seconds is None else int(seconds)


def _time(value: object) -> int | None:
    seconds = _seconds(value)
    return None if seconds is None else micros(seconds)


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if 0 <= found < 1e12 else None


# -- counts until they are sent: totals and days with the next exchange, all with the next beat

STAT_S: Final = 157_680_000
"""Seconds for which a day's counts are kept: five years, as in Sidekiq."""

_FOLD_S: Final = 1.0


class Counters:
    """Pending increments of counters. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, int], int] = {}

    def add(self, name: str, by: int, keep_s: int = 0) -> None:
        """Adds to a counter; ``name``: its key without the namespace; ``keep_s``: expiry in seconds, 0 for none. An
        exchange whose answer is lost counts again."""
        with self._lock:
            self._counts[name, keep_s] = self._counts.get((name, keep_s), 0) + by

    def take(self) -> dict[tuple[str, int], int]:
        """Returns and clears the increments: (name, keep_s) -> increment."""
        with self._lock:
            taken, self._counts = self._counts, {}
        return taken

    def put_back(self, taken: Mapping[tuple[str, int], int]) -> None:
        """Adds increments again that could not be sent."""
        for (name, keep_s), by in taken.items():
            self.add(name, by, keep_s)


class Statistics:
    """Ended jobs. Adds the totals and days to ``counters``; keeps the metrics until :meth:`take`."""

    def __init__(self, clock: Clock, counters: Counters) -> None:
        self._clock = clock
        self._counters = counters
        self._ended: deque[tuple[str, float, bool]] = deque()
        self._lock = threading.Lock()
        self._metrics = Metrics()
        self._folded: float | None = None

    def ended(self, name: str, seconds: float, failed: bool) -> None:
        """Notes an ended job, without a lock: every job of every thread is noted."""
        self._ended.append((name, seconds, failed))

    def fold(self, *, at_once: bool = False) -> None:
        """Adds up the noted jobs, at most once a second unless ``at_once``."""
        if not self._ended:
            return
        with self._lock:
            now = self._clock.monotonic()
            if not at_once and self._folded is not None and now - self._folded < _FOLD_S:
                return
            self._folded = now
            second = self._clock.now() // SECOND
            take = self._ended.popleft
            ended = [take() for _ in range(len(self._ended))]  # those that end meanwhile are for the next call
            self._metrics.add(second // 60, ended)
        count, failures = len(ended), sum(failed for _, _, failed in ended)
        today = day(second)
        for name, by in (("processed", count), ("failed", failures)):
            if by:
                self._counters.add(f"stat:{name}", by)
                self._counters.add(f"stat:{name}:{today}", by, STAT_S)

    def take(self) -> dict[tuple[int, str], MinuteFigures]:
        """Returns and clears the metrics."""
        with self._lock:
            return self._metrics.take()

    def put_back(self, taken: Mapping[tuple[int, str], MinuteFigures]) -> None:
        """Adds metrics again that could not be sent."""
        with self._lock:
            self._metrics.put_back(taken)


# -- metrics of each worker, in the keys that Sidekiq's metrics page reads
#
# The pages of versions 7 and 8 read different keys, so both are written.
#
# =====================  ========================  ======================  ==============================================
# value                  version 7                 version 8               data
# =====================  ========================  ======================  ==============================================
# a minute, 8 h          ``j|YYYYMMDD|H:M``        ``j|YYMMDD|H:MM``       hash: ``NAME|p`` runs, ``NAME|f`` failures,
#                                                                          ``NAME|ms`` milliseconds of the others
# ten minutes, 3 days                              ``j|YYMMDD|H:M``        the same; the minute's key less its last digit
# histogram, 8 h         ``NAME-DD-HH:M``          ``h|NAME-D-H:M``        26 counters of 16 bits
# =====================  ========================  ======================  ==============================================

BOUNDS: Final = (
    20, 30, 45, 65, 100, 150, 225, 335, 500, 750, 1_100, 1_700, 2_500, 3_800, 5_750, 8_500, 13_000, 20_000, 30_000, 45_000,
    65_000, 100_000, 150_000, 225_000, 335_000,
)  # fmt: skip
"""Upper bounds in milliseconds of the counters of a histogram; one more counter holds the rest."""

MAX_FIGURES: Final = 5_000
"""Pairs of worker and minute kept while they cannot be sent; the oldest are dropped."""

_SHORT_S: Final = 8 * 3600
_LONG_S: Final = 3 * 24 * 3600
_MAX_NAME: Final = 255

Increment = tuple[str | int, ...]


@dataclass(slots=True)
class MinuteFigures:
    """The metrics of one worker in one minute."""

    runs: int = 0
    failures: int = 0
    ms: int = 0
    histogram: dict[int, int] = field(default_factory=dict)

    def add(self, seconds: float, failed: bool) -> None:
        """Counts a job; the duration of a failed one does not count."""
        self.runs += 1
        if failed:
            self.failures += 1
            return
        ms = int(seconds * 1000 + 0.5)
        self.ms += ms
        counter = bisect_right(BOUNDS, ms)
        self.histogram[counter] = self.histogram.get(counter, 0) + 1

    def merge(self, other: MinuteFigures) -> None:
        """Adds the counts of another."""
        self.runs += other.runs
        self.failures += other.failures
        self.ms += other.ms
        for counter, by in other.histogram.items():
            self.histogram[counter] = self.histogram.get(counter, 0) + by


class Metrics:
    """Figures by minute (of the epoch) and worker, bounded. Not thread-safe."""

    def __init__(self) -> None:
        self._figures: dict[tuple[int, str], MinuteFigures] = {}

    def add(self, minute: int, ended: Iterable[tuple[str, float, bool]]) -> None:
        """Counts jobs of a minute: name, seconds and whether it raised, each. Skips names that the page cannot read."""
        known: dict[str, MinuteFigures] = {}
        for name, seconds, failed in ended:
            figures = known.get(name)
            if figures is None:
                figures = known[name] = self._figures_of(minute, name)
            figures.add(seconds, failed)
        self._bound()

    def _figures_of(self, minute: int, name: str) -> MinuteFigures:
        """The stored figures of a worker, or a throw-away object for an unreadable name."""
        if not name or len(name) > _MAX_NAME or "|" in name or not name.isprintable():
            return MinuteFigures()
        return self._figures.setdefault((minute, name), MinuteFigures())

    def take(self) -> dict[tuple[int, str], MinuteFigures]:
        """Returns and clears the figures."""
        taken, self._figures = self._figures, {}
        return taken

    def put_back(self, taken: Mapping[tuple[int, str], MinuteFigures]) -> None:
        """Merges figures again that could not be sent."""
        since, self._figures = self._figures, dict(taken)
        for key, figures in since.items():
            self._figures.setdefault(key, MinuteFigures()).merge(figures)
        self._bound()

    def _bound(self) -> None:
        while len(self._figures) > MAX_FIGURES:
            del self._figures[next(iter(self._figures))]


def day(seconds: int) -> str:
    """The UTC day as in the names of counters."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")


def commands(minute: int, figures: Mapping[str, MinuteFigures]) -> Iterator[Increment]:
    """The commands that write a minute's figures, by worker; keys without the namespace."""
    at = datetime.fromtimestamp(minute * 60, UTC)
    eight = f"j|{at:%y%m%d}|{at.hour}:{at:%M}"
    hashes = {f"j|{at:%Y%m%d}|{at.hour}:{at.minute}": _SHORT_S, eight: _SHORT_S, eight[:-1]: _LONG_S}
    for key, keep_s in hashes.items():
        for name, each in figures.items():
            for field_name, by in (("p", each.runs), ("f", each.failures), ("ms", each.ms)):
                if by:
                    yield "HINCRBY", key, f"{name}|{field_name}", by
        yield "EXPIRE", key, keep_s
    for name, each in figures.items():
        if each.histogram:
            words = [word for n, by in sorted(each.histogram.items()) for word in ("INCRBY", "u16", f"#{n}", by)]
            histograms = (f"{name}-{at:%d-%H}:{at.minute}", f"h|{name}-{at.day}-{at.hour}:{at.minute}")
            for key in histograms:
                yield ("BITFIELD", key, "OVERFLOW", "SAT", *words)
                yield "EXPIRE", key, _SHORT_S
