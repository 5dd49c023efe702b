"""A look from outside at what a broker holds, whichever it is: not by the program's own words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import redis
from support.databases import Store

Copies = set[tuple[str, int]]
"""(jid, attempt) of each."""


class BrokerLook(Protocol):
    """What tests ask of a broker from outside."""

    def copies(self) -> Copies:
        """The tracked copies that it holds, waiting or in a process's list."""
        ...

    def held(self) -> Mapping[str, int]:
        """How many copies each process holds."""
        ...

    def left(self) -> int:
        """How much there is that somebody still has to do, or to acknowledge."""
        ...

    def lose(self) -> None:
        """It forgets everything."""
        ...

    def close(self) -> None: ...


_UNTRACKED = "FROM events WHERE items = 0 AND task_id IS NULL"


class LedgerLook:
    """Without Redis there is no broker, and what untracked jobs have to do are rows of the ledger."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def copies(self) -> Copies:
        return set()

    def held(self) -> Mapping[str, int]:
        found = self._store.sql(f"SELECT process, COUNT(*) {_UNTRACKED} AND process IS NOT NULL GROUP BY process")
        return {str(process): int(count) for process, count in found}

    def left(self) -> int:
        return int(self._store.sql(f"SELECT COUNT(*) {_UNTRACKED} AND status <> 'error'")[0][0])

    def lose(self) -> None: ...

    def close(self) -> None: ...


class RedisLook:
    """The keys of a Redis server, without a namespace."""

    def __init__(self, url: str) -> None:
        self.raw: Any = redis.Redis.from_url(url)

    def copies(self) -> Copies:
        parted = (key.decode().rpartition(":") for key in self.raw.hkeys("asynctask:held"))
        return {(jid, int(attempt)) for jid, _, attempt in parted}

    def held(self) -> Mapping[str, int]:
        processes = [process.decode() for process in self.raw.smembers("asynctask:holders")]
        return {process: self.raw.hlen(f"asynctask:fetched:{process}") for process in processes}

    def left(self) -> int:
        queues = [name.decode() for name in self.raw.smembers("queues")]
        # In one transaction: what moves from one place to another meanwhile must not be missed.
        with self.raw.pipeline(transaction=True) as together:
            together.zcard("schedule").zcard("retry").hlen("asynctask:held").scard("asynctask:holders")
            for queue in queues:
                together.llen(f"queue:{queue}")
            return sum(together.execute())

    def lose(self) -> None:
        self.raw.flushall()

    def dead(self) -> list[dict[str, Any]]:
        """The jobs among the dead."""
        return [json.loads(text) for text in self.raw.zrange("dead", 0, -1)]

    def close(self) -> None:
        self.raw.close()
