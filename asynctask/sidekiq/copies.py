"""Copies of the ledger's jobs: payloads with Sidekiq's member names, for workers here, in Redis and of engines.

:func:`tracked_copy` makes the payload of a lent job, :class:`Outgoing` applies the client middleware to it, and
:func:`decode` and :func:`arguments_of` read one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import orjson

from asynctask.brokers.base import Copy
from asynctask.clock import SECOND
from asynctask.job import CurrentJob
from asynctask.ledger.base import Ledger, dumps
from asynctask.ledger.foreign import engine_of
from asynctask.ledger.lending import Job
from asynctask.ledger.standalone import discard
from asynctask.logs import get_logger
from asynctask.messages import clean
from asynctask.middleware.chain import Chain
from asynctask.sidekiq.activejob import is_wrapped, unwrap
from asynctask.sidekiq.payload import dump, parse, presentable, read_time, write_time
from asynctask.worker import Worker

PushFilter = Callable[[Sequence[Copy]], Sequence[Copy]]

# -- the client middleware: of single jobs when they are pushed, of a Task's jobs when they are borrowed


def passes(chain: Chain, worker: Worker, job: CurrentJob) -> bool:
    """Whether a job passes the client middleware; it may have changed ``job.payload``."""
    if not len(chain):
        return True
    passed = False

    def let_through() -> Mapping[str, object]:
        nonlocal passed
        passed = True
        return job.payload

    chain.invoke(worker, job, job.queue, let_through)
    return passed


def encoded(payload: Mapping[str, object]) -> str:
    """The text of a payload after the client middleware.

    Raises TypeError for values that JSON cannot represent, ValueError for what is no job any more.
    """
    text = dumps(payload)
    decode(text)
    return text


class Outgoing:
    """Applies the client middleware to the jobs of Tasks as they are borrowed, by a worker process or for a foreign queue.

    Single jobs passed it when they were pushed. A job of a Task that a middleware stops, whose middleware raises or returns
    an invalid job, ends in ``error`` with the reason: an accepted item never vanishes.
    """

    def __init__(self, ledger: Ledger, chain: Chain, workers: Mapping[str, Worker]) -> None:
        self._ledger = ledger
        self._chain = chain
        self._workers = workers

    def __call__(self, copies: Sequence[Copy]) -> Sequence[Copy]:
        kept: list[Copy] = []
        stopped: dict[tuple[str, int], str] = {}
        for copy in copies:
            worker = self._worker_of(copy)
            if worker is None:
                kept.append(copy)
                continue
            reason = self._ask(worker, copy, kept)
            if reason:
                stopped[copy.key] = reason
        if stopped:
            discard(self._ledger, stopped)
        return kept

    def _worker_of(self, copy: Copy) -> Worker | None:
        """The worker of a job or a callback of a Task; None for other jobs, and for an unknown worker."""
        job = decode(copy.payload)
        return self._workers.get(str(job["class"])) if copy.task_id is not None or CALLBACK_OF in job else None

    def _ask(self, worker: Worker, copy: Copy, kept: list[Copy]) -> str:
        job = CurrentJob(
            copy.jid, task_id=copy.task_id, attempt=copy.attempt, queue=copy.queue, payload=dict(decode(copy.payload)),
            task=copy.task,
        )  # fmt: skip
        try:
            if not passes(self._chain, worker, job):
                return "stopped by a client middleware"
        except Exception as error:
            get_logger("asynctask.outgoing").exception("client_middleware_failed", job_id=copy.jid)
            return clean(f"a client middleware raised {type(error).__name__}: {error}")
        try:
            kept.append(replace(copy, payload=encoded(job.payload)))
        except (TypeError, ValueError) as error:
            get_logger("asynctask.outgoing").exception("client_middleware_failed", job_id=copy.jid)
            return clean(f"a client middleware returned no valid job: {error}")
        return ""


# -- payloads: one JSON object with Sidekiq's member names

CALLBACK_OF: Final = "callback_of"
"""The member, and the option of an Event, that names the Task whose callback a job is."""

CAME: Final = "came"
"""The one option of an Event whose job another program pushed: its original members, as text."""

AGAIN: Final = "again"
"""The one option of a job of a Task that has sent itself again: its next run, see :class:`~asynctask.arrivals.NextRun`."""

_MEMBERS: Final = "members"
"""The option with the further members of an untracked job's payload."""

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


def tracked_copy(ready: Job, now: int) -> Copy:
    """The copy of a lent job for a queue.

    The item's JSON is inserted as the ledger's text, not parsed and serialized for each job. A job that another program
    pushed has its original members, see :func:`options_of`; an untracked one those with which it was sent.
    """
    if not ready.items:
        return _untracked(ready, now)
    if ready.options is not None and ready.options.startswith(_CAME_FIRST):
        return _as_it_came(ready, now)
    before, between, after, options = _frame(
        ready.worker_name, ready.queue, ready.options, ready.created_at, ready.attempt, ready.task_id, ready.retries, now,
        ready.items,
    )  # fmt: skip
    args, jid = ready.params or "[]", ready.job_id
    if ready.task_id is not None:
        args = f"[{args}]"  # the item of a Task is its one argument
    elif engine_of(ready.queue) is not None and CALLBACK_OF not in options:
        args = _lone_arguments(args)
    if ready.task_id is not None and AGAIN in options:
        return _sent_again(ready, options[AGAIN], now)
    name = f'"{jid}"' if jid.isalnum() and jid.isascii() else orjson.dumps(jid).decode()
    text = f"{before}{args}{between}{name}{after}"
    priority = options.get("priority") if ready.priority is None else ready.priority
    return Copy(jid, ready.attempt, ready.queue, text, int(priority or 0), ready.task_id, task=ready.task)


def _untracked(ready: Job, now: int) -> Copy:
    """The copy of a claimed untracked job: the payload that it would have in Redis, its retries included."""
    said = _options(ready.options or "{}")
    job = {"retry": True, "queue": ready.queue, "class": ready.worker_name, "args": None, **said.get(_MEMBERS, {})}
    job |= {"queue": ready.queue, "args": orjson.Fragment(ready.params or "[]"), "jid": ready.job_id}
    job |= {"created_at": write_time(ready.created_at), "enqueued_at": write_time(now)}
    if ready.retries:
        job |= {"retry_count": ready.retries - 1, "failed_at": write_time(ready.started_at or ready.created_at)}
    text = orjson.dumps(job).decode()
    return Copy(ready.job_id, ready.attempt, ready.queue, text, int(said.get("priority") or 0))


def untracked_options(members: Mapping[str, Any], priority: int) -> str:
    """The options of the row of an untracked job, JSON text. ``members``: those of its payload that no column has. The
    priority comes first, see :func:`asynctask.ledger.lending.options_priority`."""
    return dumps({"priority": priority, _MEMBERS: members})


def _sent_again(ready: Job, run: Mapping[str, Any], now: int) -> Copy:
    """The copy of a job of a Task that has sent itself again: of that run, not of its item."""
    job = build(
        run["class"], run["args"], ready.job_id, ready.queue, True, ready.created_at, enqueued_at=now / SECOND,
        use_task_event=True, attempt=ready.attempt, task_id=ready.task_id, retry_count=ready.retries - 1,
    )  # fmt: skip
    job[AGAIN] = {name: run[name] for name in ("kwargs", "before", "signature")}
    priority = int(ready.priority or 0)
    return Copy(ready.job_id, ready.attempt, ready.queue, encoded(job), priority, ready.task_id, task=ready.task)


def _lone_arguments(params: str) -> str:
    """The arguments of a lone job of an engine: ``[positional, keyword arguments]``. Its Event has keyword arguments only
    if there are any."""
    if not params.startswith("{"):
        return f"[{params},{{}}]"
    both = orjson.loads(params)
    return dumps([both["args"], both["kwargs"]])


def options_of(came: Mapping[str, Any]) -> str:
    """The options of the Event of a job that another program pushed: its members, to be written again.

    Nested as text, so that reading the options does not change its numbers. The arguments are the Event's own.
    """
    kept = {name: None if name == "args" else value for name, value in came.items() if name != "asynctask"}
    return orjson.dumps({CAME: dump(kept)}).decode()


def pushed_at(options: str | None) -> tuple[Any, Any]:
    """When a program pushed the job of these options of an Event, as it wrote it: (``created_at``, ``enqueued_at``). Two
    pushes differ in it, two copies of one push do not; (None, None) for a job that no other program pushed."""
    if options is None or not options.startswith(_CAME_FIRST):
        return None, None
    came = parse(orjson.loads(options)[CAME])
    return came.get("created_at"), came.get("enqueued_at")


def _as_it_came(ready: Job, now: int) -> Copy:
    """The copy of a job that another program pushed, with its original members, in their order and with their own numbers.
    Ruby's own members count its retries, and continue."""
    job = parse(orjson.loads(ready.options or "{}")[CAME], keep_numbers=True)
    job["args"] = parse(f'{{"args":{ready.params or "[]"}}}', keep_numbers=True)["args"]
    job["queue"], job["jid"] = ready.queue, ready.job_id
    if ready.retries:
        count = job.get("retry_count")
        before = count + 1 if isinstance(count, int) and not isinstance(count, bool) else 0
        job["retry_count"] = before + ready.retries - 1
        if read_time(job.get("failed_at")) is None:  # the first try was when its Event was made
            job["failed_at"] = write_time(ready.created_at)
    job["enqueued_at"] = write_time(now)
    presentable(job, queue=ready.queue)
    return Copy(ready.job_id, ready.attempt, ready.queue, dump(job), ready.priority or 0, None)


@lru_cache(maxsize=64)
def _frame(
    worker: str, queue: str, options: str | None, created_at: int, attempt: int, task_id: int | None, retries: int,
    now: int, items: int,
) -> tuple[str, str, str, Mapping[str, Any]]:  # fmt: skip
    """What the copies of a round of one Task have in common, as JSON text: (before the arguments, between them and the job
    id, after it); and the options."""
    said = _options(options) if options else {}
    frame = build(
        worker, (), "", queue, said.get("retry", True), created_at,
        enqueued_at=now / SECOND, use_task_event=True, attempt=attempt,
    )  # fmt: skip
    if task_id is not None:
        frame["task_id"] = task_id
    if CALLBACK_OF in said:
        frame[CALLBACK_OF] = said[CALLBACK_OF]
    if retries:
        frame["retry_count"] = retries - 1
    if items > 1:
        frame["items"] = items  # workers in another language must not take them for one item
    frame["args"], frame["jid"] = orjson.Fragment(b"\0"), orjson.Fragment(b"\0")  # no JSON text holds such a byte
    before, between, after = orjson.dumps(frame).decode().split("\0")
    return before, between, after, said


@lru_cache(maxsize=64)
def _options(text: str) -> Mapping[str, Any]:
    """Parsed once for all jobs of a Task; callers must not change it."""
    found: Mapping[str, Any] = orjson.loads(text)
    return found


def decode(payload: str | bytes) -> Mapping[str, Any]:
    """The job of a payload. Raises ValueError for text that is no job: invalid JSON (as Ruby reads it), no class, no
    args."""
    return _checked(parse(payload))


def job_of(copy: Copy) -> Mapping[str, Any]:
    """The job of a fetched copy, not parsed again if the broker has done so. Raises as :func:`decode`."""
    return decode(copy.payload) if copy.job is None else _checked(copy.job)


def _checked(job: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(job.get("class"), str) or not isinstance(job.get("args"), list):
        raise ValueError('a job is a JSON object with a string "class" and an array "args"')
    return job


def poisoned(copy: Copy, now: int) -> Copy:
    """An untracked job whose processes died, as an entry of the dead set at ``now`` (microseconds)."""
    return buried(
        copy,
        now,
        "ProcessDied",
        f"{copy.deaths} processes died while they held this job, so it is not given to another:"
        " see what it does to memory and to native code, then retry it",
    )


def buried(copy: Copy, now: int, error_class: str, message: str) -> Copy:
    """A job that is given up without having raised, as an entry of the dead set at ``now`` (microseconds), with the reason.

    What is no job stays unchanged.
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
    """The arguments with which the worker of a decoded job is called: (arguments, keyword arguments).

    A tracked job of ActiveJob comes back from the ledger under its worker's own name, with unchanged data. Raises
    :class:`~asynctask.errors.InputError` for data of ActiveJob that cannot be read.
    """
    args: Sequence[Any] = job["args"]
    if is_wrapped(job) or (len(args) == 1 and _is_job_data(args[0], worker)):
        inner = unwrap(job)
        return inner.arguments, inner.keywords
    return args, {}


def _is_job_data(value: Any, worker: str) -> bool:
    return isinstance(value, dict) and value.get("job_class") == worker and {"job_id", "arguments"} <= value.keys()
