"""Applications whose jobs wait in Redis, with workers in this process, beside whatever else writes to that server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.databases import migrated_file
from support.servers import RedisServer

from asynctask import AsyncTask
from asynctask.runtime.launcher import Launcher


class RedisWorld:
    """An emptied server and a folder for ledgers. ``raw`` is a connection of the test's own."""

    def __init__(self, folder: Path, server: RedisServer) -> None:
        self.folder = folder
        self.server = server
        self.raw: Any = server.client()
        self.raw.flushall()
        self._apps: list[AsyncTask] = []

    def app(self, **more: Any) -> AsyncTask:
        """An application with a ledger of its own, unless ``database_url`` says another."""
        n = len(self._apps)
        if "database_url" not in more:
            migrated_file(self.folder / f"{n}.db")
        settings: dict[str, Any] = {
            "database_url": f"sqlite:///{self.folder}/{n}.db",
            "broker_url": self.server.url,
            "lease_s": 2.0,
            "heartbeat_s": 0.5,
            "data_dir": str(self.folder / f"data{n}"),
            "environ": {},
            **more,
        }
        self._apps.append(AsyncTask(**settings))
        return self._apps[-1]

    @contextmanager
    def working(self, app: AsyncTask, *queues: str, concurrency: int = 2, shutdown_s: float = 5.0) -> Iterator[Launcher]:
        """A worker process in this one, of the queue ``default`` or of these, in their order."""
        weights = dict.fromkeys(queues or ("default",), 1)
        launcher = app.launcher(concurrency=concurrency, queues=weights, strict=True, shutdown_s=shutdown_s)
        launcher.start()
        try:
            yield launcher
        finally:
            launcher.stop()

    # -- what lies in the server

    def push(self, name: str, *args: Any, queue: str = "default", **members: Any) -> str:
        """Pushes a job as any client does; returns its text."""
        n = self.raw.incr("test:jobs")
        text = json.dumps(
            {"class": name, "args": args, "jid": f"{n:024x}", "queue": queue, "retry": True, **members},
            separators=(",", ":"),
            ensure_ascii=False,
        )
        self.push_text(text, queue)
        return text

    def push_text(self, text: str | bytes, queue: str = "default") -> None:
        """Pushes whatever it is."""
        self.raw.sadd("queues", queue)
        self.raw.lpush(f"queue:{queue}", text)

    def waiting(self, queue: str = "default") -> list[str]:
        """The texts in a queue, the next to run first."""
        return [raw.decode() for raw in reversed(self.raw.lrange(f"queue:{queue}", 0, -1))]

    def members(self, name: str) -> list[bytes]:
        """The texts in a set."""
        return list(self.raw.zrange(name, 0, -1))

    def fetched(self) -> int:
        """How many jobs lie in lists of processes."""
        return sum(self.raw.hlen(key) for key in self.raw.scan_iter("asynctask:fetched:*"))

    def close(self) -> None:
        for app in self._apps:
            app.close()
        self.raw.close()
