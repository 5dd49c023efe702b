"""The client middleware, where jobs leave for the broker: single jobs when they are pushed, those of a Task at dispatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from asynctask.brokers.base import Copy
from asynctask.dispatch.payload import decode
from asynctask.job import CurrentJob
from asynctask.ledger.base import Ledger, dumps
from asynctask.ledger.standalone import discard
from asynctask.logs import get_logger
from asynctask.messages import clean
from asynctask.middleware.chain import Chain
from asynctask.worker import Worker

__all__ = ["Outgoing", "encoded", "passes"]


def passes(chain: Chain, worker: Worker, job: CurrentJob) -> bool:
    """Whether a job gets through the client middleware; it may have changed ``job.payload``."""
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
    """The text of a payload as the client middleware left it.

    Raises TypeError for what JSON cannot say, ValueError for what is no job any more.
    """
    text = dumps(payload)
    decode(text)
    return text


class Outgoing:
    """Applies the client middleware to the jobs of Tasks as they are dispatched.

    A single job was asked when it was pushed. A job of a Task that a middleware stops, whose middleware raises or leaves
    what is no job any more, ends in ``error`` with the reason: an accepted item never just vanishes.
    """

    def __init__(self, ledger: Ledger, chain: Chain, workers: Mapping[str, Worker]) -> None:
        self._ledger = ledger
        self._chain = chain
        self._workers = workers

    def __call__(self, copies: Sequence[Copy]) -> Sequence[Copy]:
        kept: list[Copy] = []
        stopped: dict[tuple[str, int], str] = {}
        for copy in copies:
            worker = self._workers.get(str(decode(copy.payload)["class"])) if copy.task_id is not None else None
            if worker is None:
                kept.append(copy)
                continue
            reason = self._ask(worker, copy, kept)
            if reason:
                stopped[copy.key] = reason
        if stopped:
            discard(self._ledger, stopped)
        return kept

    def _ask(self, worker: Worker, copy: Copy, kept: list[Copy]) -> str:
        job = CurrentJob(
            copy.jid, task_id=copy.task_id, attempt=copy.attempt, queue=copy.queue, payload=dict(decode(copy.payload))
        )
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
            return clean(f"a client middleware left what is no job: {error}")
        return ""
