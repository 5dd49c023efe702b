"""The retry policy: what follows a job that raised. Pure; the runtime asks once, before anything is recorded."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from asynctask.clock import micros
from asynctask.job import CurrentJob, interrupted
from asynctask.logs import get_logger
from asynctask.worker import TRACKED_RETRIES, Worker

__all__ = ["MAX_PAUSE_S", "Decision", "Follow", "backoff", "decide", "retries_of"]

MAX_PAUSE_S = 366 * 24 * 3600
"""No pause before a retry is longer, whoever says so: it must fit a column, and somebody should live to see it."""


class Follow(Enum):
    """What follows an attempt that raised."""

    RETRY = "retry"
    DEAD = "dead"  # no retry is left, or the policy says so: kept, shown, hooks run
    DISCARD = "discard"  # dropped without the hooks
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
