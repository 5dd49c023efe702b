"""How a job travels: one JSON object, with Sidekiq's member names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import orjson

from asynctask.brokers.base import Copy
from asynctask.clock import SECOND
from asynctask.ledger.reservations import Ready
from asynctask.wire.activejob import is_wrapped, unwrap
from asynctask.wire.payload import dump, parse, presentable, read_time, write_time

__all__ = [
    "arguments_of",
    "build",
    "buried",
    "decode",
    "job_of",
    "options_of",
    "poisoned",
    "tracked_copy",
    "worker_name",
]

CAME: Final = "came"
"""The one option of an Event whose job another program pushed: the members that it came with, as text."""

_CAME_FIRST: Final = f'{{"{CAME}":'


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

    The item's JSON is put in as the text that the ledger holds: it is not parsed and written again for each job. A job that
    another program pushed has the members with which it came, see :func:`options_of`.
    """
    if ready.options is not None and ready.options.startswith(_CAME_FIRST):
        return _as_it_came(ready, now)
    before, between, after, options = _frame(
        ready.worker_name, ready.queue, ready.options, ready.created_at, ready.attempt, ready.task_id, ready.retries, now
    )
    args, jid = ready.params or "[]", ready.job_id
    if ready.task_id is not None:
        args = f"[{args}]"  # the item of a Task is its one argument
    name = f'"{jid}"' if jid.isalnum() and jid.isascii() else orjson.dumps(jid).decode()
    text = f"{before}{args}{between}{name}{after}"
    priority = options.get("priority", ready.priority)
    return Copy(jid, ready.attempt, ready.queue, text, int(priority or 0), ready.task_id)


def options_of(came: Mapping[str, Any]) -> str:
    """The options of the Event of a job that another program pushed: its members, for they are written again.

    As a text in the text: whoever reads options does not change its numbers. The arguments are the Event's own.
    """
    kept = {name: None if name == "args" else value for name, value in came.items() if name != "asynctask"}
    return orjson.dumps({CAME: dump(kept)}).decode()


def _as_it_came(ready: Ready, now: int) -> Copy:
    """The copy of a job that another program pushed, with the members that it brought, in their order and with their own
    numbers. Ruby's own members say how often it was retried: it goes on counting from there."""
    job = parse(orjson.loads(ready.options or "{}")[CAME], keep_numbers=True)
    job["args"] = parse(f'{{"args":{ready.params or "[]"}}}', keep_numbers=True)["args"]
    job["queue"], job["jid"] = ready.queue, ready.job_id
    if ready.retries:
        count = job.get("retry_count")
        before = count + 1 if isinstance(count, int) and not isinstance(count, bool) else 0
        job["retry_count"] = before + ready.retries - 1
        if read_time(job.get("failed_at")) is None:  # it was tried first when its Event was made
            job["failed_at"] = write_time(ready.created_at)
    job["enqueued_at"] = write_time(now)
    presentable(job, queue=ready.queue)
    return Copy(ready.job_id, ready.attempt, ready.queue, dump(job), 0, None)


@lru_cache(maxsize=64)
def _frame(
    worker: str, queue: str, options: str | None, created_at: int, attempt: int, task_id: int | None, retries: int, now: int
) -> tuple[str, str, str, Mapping[str, Any]]:
    """What the copies of a round of one Task have in common, as JSON text: (before the arguments, between them and the job
    id, after it); and the options."""
    said = _options(options) if options else {}
    frame = build(
        worker, (), "", queue, said.get("retry", True), created_at,
        enqueued_at=now / SECOND, use_task_event=True, attempt=attempt,
    )  # fmt: skip
    if task_id is not None:
        frame["task_id"] = task_id
    if retries:
        frame["retry_count"] = retries - 1
    frame["args"], frame["jid"] = orjson.Fragment(b"\0"), orjson.Fragment(b"\0")  # no JSON text holds such a byte
    before, between, after = orjson.dumps(frame).decode().split("\0")
    return before, between, after, said


@lru_cache(maxsize=64)
def _options(text: str) -> Mapping[str, Any]:
    """Read once for all jobs of a Task; whoever has it changes nothing in it."""
    found: Mapping[str, Any] = orjson.loads(text)
    return found


def decode(payload: str | bytes) -> Mapping[str, Any]:
    """The job of a payload. Raises ValueError for text that is no job: no JSON as Ruby reads it, no class, no args."""
    return _checked(parse(payload))


def job_of(copy: Copy) -> Mapping[str, Any]:
    """The job of a fetched copy, not parsed again if the broker has. Raises as :func:`decode`."""
    return decode(copy.payload) if copy.job is None else _checked(copy.job)


def _checked(job: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(job.get("class"), str) or not isinstance(job.get("args"), list):
        raise ValueError('a job is a JSON object with a string "class" and an array "args"')
    return job


def worker_name(job: Mapping[str, Any]) -> str:
    """The name of the worker of a decoded job: its class, or what ActiveJob's wrapper says that it carries."""
    if not is_wrapped(job):
        return str(job["class"])
    carried = job.get("wrapped")
    if not isinstance(carried, str):  # old versions wrote no such member
        data = job["args"][0] if job["args"] else None
        carried = data.get("job_class") if isinstance(data, dict) else None
    return carried if isinstance(carried, str) else str(job["class"])


def poisoned(copy: Copy, now: int) -> Copy:
    """An untracked job that processes died of, as it goes to the dead at ``now`` (microseconds)."""
    return buried(
        copy, now, "ProcessDied",
        f"{copy.deaths} processes died while they held this job, so no other is given it:"
        " see what it does to memory and to native code, then retry it",
    )  # fmt: skip


def buried(copy: Copy, now: int, error_class: str, message: str) -> Copy:
    """A job that is given up without having raised, as it goes to the dead at ``now`` (microseconds): it says why itself.

    What is no job stays as it is.
    """
    try:
        job = parse(copy.payload, keep_numbers=True)
    except ValueError:
        return copy
    for name, value in (("jid", copy.jid), ("queue", copy.queue)):  # tools name an entry by the one, and list the other
        if not (isinstance(job.get(name), str) and job[name]):
            job[name] = value
    job["error_class"], job["error_message"] = error_class, message
    if read_time(job.get("failed_at")) is None:  # tools cannot show an entry without it
        job["failed_at"] = write_time(now)
    return Copy(copy.jid, copy.attempt, copy.queue, dump(job), copy.priority, copy.task_id, copy.deaths, copy.handle)


def arguments_of(job: Mapping[str, Any], worker: str) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """What the worker of a decoded job is called with: (arguments, keyword arguments).

    A job of ActiveJob that is tracked comes back from the ledger under its worker's own name, its data as they were. Raises
    :class:`~asynctask.errors.InputError` for data of ActiveJob that cannot be read.
    """
    args: Sequence[Any] = job["args"]
    if is_wrapped(job) or (len(args) == 1 and _is_job_data(args[0], worker)):
        inner = unwrap(job)
        return inner.arguments, inner.keywords
    return args, {}


def _is_job_data(value: Any, worker: str) -> bool:
    return isinstance(value, dict) and value.get("job_class") == worker and {"job_id", "arguments"} <= value.keys()
