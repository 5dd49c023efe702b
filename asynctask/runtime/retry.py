"""The retry policy: what follows a job that raised. Pure; the runtime asks once, before anything is recorded."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any, Final

from asynctask.brokers.base import Copy
from asynctask.clock import SECOND, micros
from asynctask.job import CurrentJob, interrupted
from asynctask.logs import get_logger
from asynctask.messages import clean
from asynctask.wire.payload import dump, encode_backtrace, parse, read_time, retries, write_time
from asynctask.worker import TRACKED_RETRIES, Worker

__all__ = [
    "MAX_PAUSE_S",
    "MAX_RETRY_COUNT",
    "Decision",
    "Follow",
    "after_failure",
    "backoff",
    "decide",
    "decide_foreign",
    "decide_untracked",
    "limit_of",
    "retries_of",
    "text_of",
]

MAX_PAUSE_S = 366 * 24 * 3600
"""No pause before a retry is longer, whoever says so: it must fit a column, and somebody should live to see it."""


class Follow(Enum):
    """What follows an attempt."""

    FINISH = "finish"  # it returned
    FAILED = "failed"  # a business refusal: recorded, and not retried
    DROP = "drop"  # it is not the attempt that counts: nothing is recorded
    RETRY = "retry"
    DEAD = "dead"  # no retry is left, or the policy says so: kept, shown, hooks run
    DISCARD = "discard"  # dropped, and the worker is not asked what to do about it
    AGAIN = "again"  # the runtime stopped under it: it was not its fault


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows, and for a retry after how many microseconds."""

    follow: Follow
    delay: int = 0


def backoff(count: int, noise: float) -> float:
    """Sidekiq's pause before retry number ``count`` (0 is the first), in seconds: count^4 + 15, and jitter.

    ``noise`` is a number in [0, 1). Source: sidekiq 8, job_retry.rb.
    """
    return float(count**4 + 15 + _jitter(count, noise))


def _jitter(count: int, noise: float) -> int:
    return int(noise * 10 * (count + 1))


def retries_of(retry: object) -> int:
    """How many retries of a tracked job the payload member ``retry`` means.

    The truth table is Ruby's: only false and null are false.
    """
    if retry is None or retry is False:
        return 0
    if isinstance(retry, int) and not isinstance(retry, bool):
        return retry
    return TRACKED_RETRIES


def decide(
    error: BaseException,
    job: CurrentJob,
    worker: Worker | None,
    *,
    retries: int,
    limit: int,
    noise: float,
    always_spread: bool = False,
) -> Decision:
    """What follows ``error``, after ``retries`` retries of at most ``limit``.

    ``always_spread``: a pause that the worker chose is lengthened by chance as well, as Sidekiq does it.
    """
    if interrupted(job, error):
        return Decision(Follow.AGAIN)
    if retries >= limit:
        return Decision(Follow.DEAD)
    seconds: float | None = None
    if worker is not None and worker.retry_in is not None:
        answer = _ask(worker, retries, error, job)
        if answer == "kill":
            return Decision(Follow.DEAD)
        if answer == "discard":
            return Decision(Follow.DISCARD)
        # By comparison, which also leaves out what is no number and what is without end.
        if isinstance(answer, int | float) and 0 < answer <= MAX_PAUSE_S:
            seconds = min(answer + (_jitter(retries, noise) if always_spread else 0), MAX_PAUSE_S)
    return Decision(Follow.RETRY, micros(min(backoff(retries, noise), MAX_PAUSE_S) if seconds is None else seconds))


def _ask(worker: Worker, retries: int, error: BaseException, job: CurrentJob) -> float | str | None:
    assert worker.retry_in is not None
    try:
        return worker.retry_in(retries, error, job)
    except Exception:  # a broken policy must not lose the retry
        get_logger("asynctask.retry").exception("retry_in_failed", worker=worker.name)
        return None


# -- untracked jobs: a retry or a death, written as Ruby's workers write it
#
# The payload is parsed anew, so that changes by middleware do not last and unknown members are kept. Sources: sidekiq 8,
# job_retry.rb, and for the forms of the members the readers of all versions.

MAX_RETRY_COUNT: Final = 10_000
"""What a payload says of its retries is believed up to here."""

MAX_BACKTRACE: Final = 1_000
"""Lines kept of a backtrace."""

_MAX_QUEUE: Final = 255


def limit_of(job: Mapping[str, Any], worker: Worker | None) -> int | None:
    """How often a job is retried; None: never, and it is not kept either. One that does not say is as its worker says."""
    said = job.get("retry")
    return retries(worker.retry if said is None and worker is not None else said)


def decide_untracked(
    error: BaseException, job: Mapping[str, Any], current: CurrentJob, worker: Worker | None, *, now: int, noise: float
) -> Decision:
    """What follows ``error`` in the parsed ``job``; ``now`` in microseconds, ``noise`` in [0, 1)."""
    if interrupted(current, error):
        return Decision(Follow.AGAIN)
    limit = limit_of(job, worker)
    if limit is None:
        return Decision(Follow.DEAD)
    count = _count(job)
    most = count if _is_over(job, count, limit, now) else count + 1
    return decide(error, current, worker, retries=count, limit=most, noise=noise, always_spread=True)


def decide_foreign(
    error: BaseException, job: Mapping[str, Any], current: CurrentJob, worker: Worker | None, *, now: int, noise: float
) -> Decision:
    """What follows ``error`` in a tracked job that another program pushed: as many retries as the job and its worker both
    allow, those that the job had elsewhere counted. ``now`` in microseconds, ``noise`` in [0, 1)."""
    count, limit = _count(job), limit_of(job, worker)
    own = TRACKED_RETRIES if worker is None else worker.max_retries
    over = limit is None or count >= own or _is_over(job, count, limit, now)
    return decide(error, current, worker, retries=count, limit=count if over else count + 1, noise=noise)


def _is_over(job: Mapping[str, Any], count: int, limit: int, now: int) -> bool:
    """Whether a job that was retried ``count`` times is retried no more."""
    retry_for = job.get("retry_for")
    if isinstance(retry_for, int | float) and not isinstance(retry_for, bool):  # it stands in the place of the count
        failed_at = read_time(job.get("failed_at"))
        return failed_at is not None and failed_at + retry_for * SECOND < now
    return count >= limit


def after_failure(copy: Copy, error: BaseException, now: int) -> Copy:
    """The copy as it lies in a set after ``error``, at ``now`` (microseconds): the same members in the same order, and
    those that a failure adds. Raises :class:`~asynctask.wire.payload.Malformed` for a payload that is no job."""
    job = parse(copy.payload, keep_numbers=True)
    queue = job.get("retry_queue")
    if not (isinstance(queue, str) and 0 < len(queue) <= _MAX_QUEUE):
        queue = copy.queue
    job["queue"] = queue
    if not (isinstance(job.get("jid"), str) and job["jid"]):  # tools name an entry by it
        job["jid"] = copy.jid
    job["error_message"] = text_of(error)
    job["error_class"] = clean(type(error).__name__)
    again = _is_count(job.get("retry_count"))
    job["retry_count"] = _count(job)
    if again:
        job["retried_at"] = write_time(now)
    if not again or read_time(job.get("failed_at")) is None:  # tools cannot show an entry without it
        job["failed_at"] = write_time(now)
    lines = _backtrace(error, job.get("backtrace"))
    if lines is not None:
        job["error_backtrace"] = encode_backtrace(lines)
    return Copy(copy.jid, copy.attempt, queue, dump(job), copy.priority, None, 0, copy.handle)


def text_of(error: BaseException) -> str:
    """What an error says, as far as it is kept."""
    try:
        return clean(str(error))
    except Exception:  # an error of the job's own that cannot say what it is
        return f"({clean(type(error).__name__)} without a readable text)"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(job: Mapping[str, Any]) -> int:
    """Which retry comes next: 0 is the first. What is written there comes from outside, whatever it is."""
    count = job.get("retry_count")
    return max(0, min(count, MAX_RETRY_COUNT) + 1) if isinstance(count, int) and _is_count(count) else 0


def _backtrace(error: BaseException, wanted: Any) -> list[str] | None:
    """The lines of an error, the innermost first, as many as ``wanted`` says; None where none are wanted."""
    if wanted is None or wanted is False:
        return None
    most = max(0, min(wanted, MAX_BACKTRACE)) if _is_count(wanted) else MAX_BACKTRACE
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = (f"{code.co_filename}:{line}:in `{code.co_qualname}'" for code, line in reversed(frames))
    return [line.encode("utf-8", "replace").decode() for line in islice(lines, most)]
