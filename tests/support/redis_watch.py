"""What a Redis server is told, and a clock that stands."""

from __future__ import annotations

import re
from typing import Any, Self

import pytest
from redis.client import Pipeline
from support.servers import RedisServer

NOW = 1_763_700_000_123_456  # 2025-11-21 04:40:00 UTC

_WORDS = re.compile(r'"((?:[^"\\]|\\.)*)"')


class Fixed:
    """A clock that stands, and ids that count: of a test's own choosing."""

    def __init__(self, at: int) -> None:
        self.at = at
        self._count = 0

    def now(self) -> int:
        return self.at

    def monotonic(self) -> float:
        return self.at / 1_000_000

    def boottime(self) -> int:
        return self.at

    def jid(self) -> str:
        return self.jids(1)[0]

    def jids(self, count: int) -> list[str]:
        self._count += count
        return [f"{n:024x}" for n in range(self._count - count + 1, self._count + 1)]

    def nonce(self) -> str:
        return "0123456789ab"

    def random(self) -> float:
        return 0.5


class Monitor:
    """The commands that a server is given, apart from those that connections begin and end with."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._marks = 0

    def __enter__(self) -> Self:
        self._client = self._server.client()
        client: Any = self._client
        self._monitor = client.monitor()
        self._monitor.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._monitor.__exit__(None, None, None)
        self._client.close()

    def commands(self) -> list[list[str]]:
        """Those since the last call, in their order, also of scripts."""
        self._marks += 1
        mark = f"mark {self._marks}"
        with self._server.client() as other:
            other.echo(mark)
        found: list[list[str]] = []
        while True:
            line = self._monitor.connection.read_response()
            words = [_unescaped(word) for word in _WORDS.findall(line.decode() if isinstance(line, bytes) else line)]
            if words[:1] == ["ECHO"]:
                if words[1] == mark:
                    return found
            elif words and words[0].upper() not in ("HELLO", "CLIENT", "SELECT", "PING", "INFO", "COMMAND"):
                found.append(words)


_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def _unescaped(word: str) -> str:
    def plain(match: re.Match[bytes]) -> bytes:
        what = match[1]
        return bytes([int(what[1:], 16)]) if len(what) == 3 else _ESCAPES.get(what, what)

    return re.sub(rb"\\(x[0-9a-f]{2}|.)", plain, word.encode()).decode()


def pipelines(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many commands each pipeline that this process executes has, as they go out."""
    found: list[int] = []
    execute = Pipeline.execute

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        found.append(len(self))
        return execute(self, *args, **options)

    monkeypatch.setattr(Pipeline, "execute", counted)
    return found
