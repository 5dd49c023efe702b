"""What the operations show of jobs and processes: plain objects, bounded in size, whatever was written by whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from asynctask.brokers.admin import Entry, class_of, enqueued_at, peeked
from asynctask.clock import rfc3339
from asynctask.ledger.base import loads
from asynctask.wire.payload import read_time

__all__ = ["job_object", "plain", "process_object", "tracked_object", "untracked_object"]

SHOWN: Final = 16_384
"""Characters of arguments up to which they are shown; of longer ones it is said that they are (``args_cut``)."""

_MESSAGE: Final = 2_000
_RAW: Final = 1_000


def tracked_object(row: Mapping[str, Any]) -> dict[str, Any]:
    """An Event of one of the ledger's lists."""
    params = row["params"] or "null"
    whole = len(params) <= SHOWN
    args = loads(params) if whole else None
    messages = loads(row["added_messages"]) or []
    errors = [str(each.get("message", "")) for each in messages if each.get("status") in ("error", "failed")]
    return {
        "key": row["job_id"],
        "tracked": True,
        "job_id": row["job_id"],
        "task_id": row["task_id"],
        "row": row["first_row"],
        "worker": row["worker"],
        "queue": row["in_queue"],
        "at": rfc3339(row["due_at"] if row["finished_at"] is None else row["finished_at"]),
        "retries": row["retries"],
        "args": args if row["task_id"] is None or not whole else [args],
        "args_cut": not whole,
        "error": errors[-1][:_MESSAGE] if errors else None,
        "error_class": row["problem"],
        "created_at": rfc3339(row["created_at"]),
        "raw": None,
    }


def untracked_object(entry: Entry) -> dict[str, Any]:
    """A member of one of the broker's sets."""
    job = peeked(entry.copy.payload)
    count = job.get("retry_count")
    message, name = job.get("error_message"), job.get("error_class")
    return {
        "key": plain(entry.key),
        "tracked": False,
        "job_id": plain(entry.copy.jid),
        "task_id": None,
        "row": None,
        "worker": class_of(entry.copy.payload),
        "queue": plain(entry.copy.queue),
        "at": rfc3339(_shown_time(entry.at)),
        "retries": count + 1 if isinstance(count, int) and not isinstance(count, bool) and -1 <= count < 2**31 else 0,
        **_args(entry, job),
        "error": message[:_MESSAGE] if isinstance(message, str) else None,
        "error_class": name[:255] if isinstance(name, str) else None,
        "created_at": rfc3339(_shown_time(read_time(job.get("created_at")))),
        "raw": None if entry.sound else plain(entry.raw[:_RAW]),
    }


def job_object(entry: Entry) -> dict[str, Any]:
    """A job that waits in a queue of the broker."""
    copy = entry.copy
    return {
        "key": plain(entry.key),
        "tracked": copy.attempt > 0,
        "job_id": plain(copy.jid),
        "task_id": copy.task_id,
        "worker": class_of(copy.payload),
        "priority": copy.priority,
        **_args(entry, peeked(copy.payload)),
        "enqueued_at": rfc3339(_shown_time(enqueued_at(copy.payload))),
        "raw": None if entry.sound else plain(entry.raw[:_RAW]),
    }


def process_object(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A process, ours or of another program."""
    names = ("identity", "kind", "hostname", "pid", "concurrency", "busy", "rss")
    return {
        **{name: plain(value) if isinstance(value := facts.get(name), str) else value for name in names},
        "quiet": bool(facts.get("quiet")),
        "alive": bool(facts["alive"]),
        "queues": [plain(str(name)) for name in facts.get("queues") or ()],
        "started_at": rfc3339(_shown_time(facts.get("started_at"))),
        "beat_at": rfc3339(_shown_time(facts.get("beat_at"))),
    }


def plain(text: str) -> str:
    """Text that can be written as UTF-8, whatever bytes it was made of."""
    return text.encode("utf-8", "replace").decode()


def _args(entry: Entry, job: Mapping[str, Any]) -> dict[str, Any]:
    whole = len(entry.raw) <= SHOWN
    return {"args": job.get("args") if whole else None, "args_cut": not whole}


def _shown_time(at: int | None) -> int | None:
    """Times that RFC 3339 has words for; anybody can write others."""
    return at if at is not None and 0 <= at < 253_402_300_800_000_000 else None
