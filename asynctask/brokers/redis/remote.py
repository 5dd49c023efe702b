"""What a process, in whatever language, says of itself in Redis: read with care, for anybody can write it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asynctask.brokers.admin import peeked
from asynctask.clock import micros

__all__ = ["process_facts"]

_MOST_QUEUES = 1_000


def process_facts(identity: str, answer: Sequence[bytes | None]) -> dict[str, Any]:
    """The facts of a process as the ledger's own are listed.

    Arguments: its ``identity``; the values of ``info``, ``busy``, ``beat``, ``quiet``, ``rss`` (KiB) and ``concurrency``.
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
        "tag": _short(info.get("tag")),
        "version": _short(info.get("version")),
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
