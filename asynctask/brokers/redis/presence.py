"""A worker process as Sidekiq's tools see it: in the set of processes, with what it runs, its counts and its signals.

====================================  ======  ======================================================================
key                                   type    what
====================================  ======  ======================================================================
``processes``                         set     identities
``ID``                                hash    what the process is and how it does; gone 60 s after its last beat
``ID:work`` and ``ID:workers``        hash    thread -> what it runs; the second name is of Sidekiq up to 6.4.1
``ID-signals``                        list    signals that tools left; one is taken at each beat
``process_cleanup``                   string  who prunes ``processes`` holds it for 60 s
``stat:processed`` ``stat:failed``    string  jobs that ended, and those that raised; also with ``:YYYY-MM-DD``
====================================  ======  ======================================================================

The metrics have keys of their own, see :mod:`asynctask.brokers.redis.metrics`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

from asynctask.brokers.presence import About, Running
from asynctask.brokers.redis.metrics import Figures, commands
from asynctask.brokers.redis.server import Command, Server
from asynctask.brokers.redis.statistics import Counters, Statistics
from asynctask.clock import SECOND, Clock
from asynctask.errors import BrokerUnavailable
from asynctask.logs import get_logger
from asynctask.wire.ruby_json import dump_any

__all__ = ["RedisPresence"]

SEEN_S: Final = 60
"""Seconds after the last beat for which a process is seen."""

MAX_SHOWN: Final = 65_536
"""Characters of a payload that is shown as what runs; of a longer one only what it is."""

MAX_SHOWN_IN_ALL: Final = 4_194_304
MAX_PRUNED: Final = 10_000
_AT_ONCE: Final = 500  # commands of one round trip
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

    def beat(self, running: Sequence[Running], *, quiet: bool, rss_kib: int) -> str | None:
        """One beat, see :class:`~asynctask.brokers.presence.Presence`."""
        before = self._clock.monotonic()
        self._server.ask(("PING",))
        rtt_us = round((self._clock.monotonic() - before) * SECOND)
        state = (
            "info", self._info, "concurrency", self._about.concurrency, "busy", len(running),
            "beat", repr(self._clock.now() / SECOND), "rtt_us", rtt_us, "quiet", "true" if quiet else "false",
            "rss", rss_kib,
        )  # fmt: skip
        answers = self._at_once(
            *self._shown(running),
            ("SADD", self._server.keys("processes"), self._about.identity),
            ("HSET", self._key, *state),
            ("EXPIRE", self._key, SEEN_S),
            ("RPOP", f"{self._key}-signals"),
        )
        try:
            self.send()
        except BrokerUnavailable as error:  # it is seen all the same, and a signal is taken once
            self._log.warning("counts_put_off", error=str(error))
        return _signal(answers[-1])

    def _shown(self, running: Sequence[Running]) -> list[Command]:
        """The work hash anew, under both names."""
        entries: list[str] = []
        room = MAX_SHOWN_IN_ALL
        for each in running:
            payload = each.payload if len(each.payload) <= min(MAX_SHOWN, room) else _stand_in(each)
            room -= len(payload)
            entry = {"queue": _plain(each.queue), "payload": _plain(payload), "run_at": each.began_at // SECOND}
            entries += (each.thread, dump_any(entry))
        shown: list[Command] = [("UNLINK", *self._work)]
        if entries:
            for key in self._work:
                shown += [("HSET", key, *entries), ("EXPIRE", key, SEEN_S)]
        return shown

    def leave(self) -> None:
        """Sends the last counts; the hash of the process is left to expire, as Ruby does."""
        gone = ("SREM", self._server.keys("processes"), self._about.identity)
        self._server.ask(gone, ("UNLINK", *self._work))
        self.send()

    # -- the others

    def processes(self) -> int:
        """How many processes are in the set, at least this one."""
        (count,) = self._server.ask(("SCARD", self._server.keys("processes")))
        return max(1, int(count))

    def prune(self) -> None:
        """Takes those out of the set whose hash is gone; once a minute for all processes together."""
        keys = self._server.keys
        (mine,) = self._server.ask(("SET", keys("process_cleanup"), 1, "NX", "EX", SEEN_S), repeat=False)
        if not mine:
            return
        seen: Iterator[Any] = self._server.guarded(
            lambda: iter(list(islice(self._server.redis.sscan_iter(keys("processes"), count=1000), MAX_PRUNED)))
        )
        while members := list(islice(seen, _AT_ONCE)):
            prefix = keys.prefix.encode()
            # EXISTS, for a member may be the name of anything; a key of another type is no reason to forget the others.
            there = self._server.ask(*(("EXISTS", prefix + member) for member in members))
            gone = [member for member, exists in zip(members, there, strict=True) if not exists]
            if gone:
                self._server.ask(("SREM", keys("processes"), *gone))

    # -- the counts

    def send(self) -> None:
        """Sends every count; what does not arrive is kept. A call whose answer is lost counts again."""
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
                self._at_once(*ups)
            except BrokerUnavailable:
                self._counters.put_back(taken)
                raise

    def _send_metrics(self) -> None:
        taken = self._statistics.take()
        minutes: dict[int, dict[str, Figures]] = defaultdict(dict)
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

    def _send_minute(self, minute: int, figures: dict[str, Figures]) -> None:
        prefix = self._server.keys.prefix
        wanted = ((verb, f"{prefix}{key}", *rest) for verb, key, *rest in commands(minute, figures))
        while part := list(islice(wanted, _AT_ONCE)):
            self._at_once(*part)

    def _at_once(self, *wanted: Command) -> list[Any]:
        """The answers of one transaction. A key that holds something else is told of, and the rest of it is done."""

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
    """In every form that a version of Sidekiq reads: without ``concurrency`` some show no page at all."""
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


def _stand_in(running: Running) -> str:
    """Of a job that is too large to be shown: what it is, without its arguments."""
    args = [f"({len(running.payload):,} characters, not shown)"]
    name, jid, queue = (_plain(each[:255]) for each in (running.name, running.jid, running.queue))
    return dump_any({"class": name, "args": args, "jid": jid, "queue": queue})


def _plain(text: str) -> str:
    """Text that has a form in UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _signal(popped: Any) -> str | None:
    if popped is None or isinstance(popped, Exception):
        return None
    name = popped.decode("ascii", "replace") if isinstance(popped, bytes) else str(popped)
    return name[:_MAX_SIGNAL]
