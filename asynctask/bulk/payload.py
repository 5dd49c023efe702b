"""How a job travels: one JSON object, with Sidekiq's member names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from asynctask.brokers.base import Copy
from asynctask.clock import SECOND
from asynctask.ledger.dispatch import Ready
from asynctask.wire.payload import parse

__all__ = ["build", "decode", "tracked_copy"]


def build(
    worker: str, args: Sequence[Any], jid: str, queue: str, retry: int | bool, created_at: int, **members: Any
) -> dict[str, Any]:
    """A job as a dict. Times are float seconds, the one form that every reader of this format understands."""
    return {
        "class": worker,
        "args": list(args),
        "jid": jid,
        "queue": queue,
        "retry": retry,
        "created_at": created_at / SECOND,
        **members,
    }


def tracked_copy(ready: Ready, now: int) -> Copy:
    """The copy of a reserved job that goes to the broker.

    The item's JSON is put in as the text that the ledger holds: it is not parsed and written again for each job.
    """
    options = orjson.loads(ready.options) if ready.options else {}
    frame = build(
        ready.worker_name, (), ready.job_id, ready.queue, options.get("retry", True), ready.created_at,
        enqueued_at=now / SECOND, use_task_event=True, attempt=ready.attempt, task_id=ready.task_id,
        retry_count=ready.retries - 1,
    )  # fmt: skip
    if ready.retries == 0:
        del frame["retry_count"]
    if ready.task_id is None:
        del frame["task_id"]
    priority = options.get("priority", ready.priority)
    text = orjson.dumps(frame).decode()
    params = ready.params or "[]"
    args = params if ready.task_id is None else f"[{params}]"  # the item of a Task is its one argument
    payload = text.replace('"args":[]', f'"args":{args}', 1)
    return Copy(ready.job_id, ready.attempt, ready.queue, payload, int(priority or 0), ready.task_id)


def decode(payload: str | bytes) -> Mapping[str, Any]:
    """The job of a payload. Raises ValueError for text that is no job: no JSON as Ruby reads it, no class, no args."""
    job = parse(payload)
    if not isinstance(job.get("class"), str) or not isinstance(job.get("args"), list):
        raise ValueError('a job is a JSON object with a string "class" and an array "args"')
    return job
