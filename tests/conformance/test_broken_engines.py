"""The suite of engines finds what it is for: each engine that is broken on purpose fails the test that is named beside it,
and the same engine unbroken passes it.

Dramatiq's worker threads on its broker for tests, in this process; and RQ, which performs in processes of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from support import engine_suite, engines
from support.databases import Databases
from support.engine_suite import EngineConformance, EngineHarness
from support.engine_worker import RQ, Harness
from support.engines import partial_of
from support.servers import RedisServer
from support.world import settings

from asynctask import AsyncTask
from asynctask.core.transitions import Begin
from asynctask.integrations import base
from asynctask.integrations import dramatiq as integration
from asynctask.integrations import rq as on_rq
from asynctask.integrations.base import pushed_job
from asynctask.integrations.dramatiq import attach
from asynctask.middleware.tracker import Attempt, Ticket, Tracker
from asynctask.testing import wait_for
from asynctask.worker import Worker

pytestmark = pytest.mark.full(reason="it proves the suite, not the program")

Break = Callable[[pytest.MonkeyPatch], None]


class StubHarness:
    """Dramatiq in this process. Nobody can kill it."""

    def __init__(self, folder: Path) -> None:
        self._broker = StubBroker(fail_fast_default=False)
        self.app = AsyncTask(**settings(folder))
        attach(self._broker, self.app)
        actor: Any = dramatiq.actor
        actor(partial_of(folder), actor_name="act", broker=self._broker, max_retries=0)
        actor(partial_of(folder), actor_name="again", broker=self._broker, max_retries=2, min_backoff=1, max_backoff=2)
        self.app.ensure_schema()
        self._worker: dramatiq.Worker | None = None

    def send(self, worker: str, item: Mapping[str, Any]) -> str:
        return engines.send("dramatiq", self._broker, Path(), worker, item)

    def start(self, threads: int = 2) -> None:
        self._worker = dramatiq.Worker(self._broker, worker_timeout=20, worker_threads=threads)
        self._worker.start()

    def stop(self) -> None:
        assert self._worker is not None
        self._worker.stop(timeout=10_000)

    def kill(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        if self._worker is not None:
            self._worker.stop(timeout=10_000)
        self._broker.close()
        self.app.close()


class Suite(EngineConformance):
    def make_harness(self, folder: Path) -> EngineHarness:
        return StubHarness(folder)


# -- engines that are broken


def blind(patch: pytest.MonkeyPatch) -> None:
    """Performs whatever arrives."""
    begin = base.EngineProcess.begin

    def always(self: base.EngineProcess, arrival: Any, **how: Any) -> Ticket:
        return replace(begin(self, arrival, **how), verdict=Begin.RUN)

    patch.setattr(base.EngineProcess, "begin", always)


def stubborn(patch: pytest.MonkeyPatch) -> None:
    """Takes a refusal for an error."""
    patch.setattr(Worker, "refuses", lambda self, error: False)


def mute(patch: pytest.MonkeyPatch) -> None:
    """Loses what a job says."""
    opening = Tracker._opening

    def silent(self: Tracker, attempt: Attempt, **named: bool) -> Any:
        attempt.job = None
        return opening(self, attempt, **named)

    patch.setattr(Tracker, "_opening", silent)


def hasty(patch: pytest.MonkeyPatch) -> None:
    """Acknowledges without a record."""
    patch.setattr(base.EngineProcess, "settle", lambda self, attempt, **how: None)
    patch.setattr(base.EngineProcess, "settle_later", lambda self, attempt, then=lambda: None: then())


def fenceless(patch: pytest.MonkeyPatch) -> None:
    """Does not carry the attempt of a job of a Task."""
    message = integration._message

    def bare(job: Any) -> Any:
        made = message(job)
        made.options.pop(integration.ATTEMPT, None)
        return made

    patch.setattr(integration, "_message", bare)


def final(patch: pytest.MonkeyPatch) -> None:
    """Does not say that a retry follows."""
    settle = base.EngineProcess.settle

    def without(self: base.EngineProcess, current: Any, **how: Any) -> None:
        settle(self, current, discarded=how.get("discarded"))

    patch.setattr(base.EngineProcess, "settle", without)


def forgetful(patch: pytest.MonkeyPatch) -> None:
    """Takes a callback for a job that a program has sent."""
    pushed_job = base.pushed_job

    def lone(copy: Any) -> Any:
        job = pushed_job(copy)
        return job if copy.task_id is not None else replace(job, attempt=None)

    patch.setattr(base, "pushed_job", lone)


def eventless(patch: pytest.MonkeyPatch) -> None:
    """Leaves the Event of a message to the worker that takes it."""
    patch.setattr(base.LoneEvents, "announce", lambda self, job, **how: None)


CAUGHT: dict[Break, str] = {
    blind: "test_a_job_that_is_over_is_not_performed_again",
    stubborn: "test_a_refusal_is_failed_and_not_retried",
    mute: "test_a_success_leaves_its_result_and_its_messages",
    hasty: "test_a_success_leaves_its_result_and_its_messages",
    fenceless: "test_a_success_leaves_its_result_and_its_messages",
    final: "test_an_error_is_retried_and_its_retry_finishes_it",
    eventless: "test_a_lone_job_has_its_event_before_any_worker_runs",
    forgetful: "test_the_callbacks_of_an_outcome_are_called_once_and_counted_nowhere",
}


@pytest.mark.parametrize("broken", CAUGHT, ids=lambda broken: broken.__name__)
def test_a_broken_engine_fails_the_test_that_is_for_it(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_suite, "wait_for", partial(wait_for, timeout=5.0))
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        getattr(Suite(), CAUGHT[broken])()


@pytest.mark.parametrize("name", sorted(set(CAUGHT.values())))
def test_an_engine_that_is_whole_passes_it(name: str) -> None:
    getattr(Suite(), name)()


# -- RQ


def in_worker(broken: Callable[[], None]) -> Break:
    """A break of :mod:`support.engines`, which the worker finds by its name."""

    def patch_environ(patch: pytest.MonkeyPatch) -> None:
        patch.setenv(engines.BREAK, broken.__name__)

    patch_environ.__name__ = broken.__name__
    return patch_environ


def fenceless_rq(patch: pytest.MonkeyPatch) -> None:
    """Does not carry the attempt of a job of a Task, whichever process dispatches it: this one, or the worker's."""
    patch.setattr(on_rq, "pushed_job", pushed_job)  # restored, whatever the break sets
    engines.fenceless()
    in_worker(engines.fenceless)(patch)


CAUGHT_RQ: dict[Break, str] = {
    fenceless_rq: "test_a_success_leaves_its_result_and_its_messages",
    in_worker(engines.hasty): "test_a_success_leaves_its_result_and_its_messages",
    in_worker(engines.final): "test_an_error_is_retried_and_its_retry_finishes_it",
}


class RqSuite(EngineConformance):
    def __init__(self, databases: Databases, broker_url: str) -> None:
        self._databases, self._broker_url = databases, broker_url

    def make_harness(self, folder: Path) -> EngineHarness:
        store = self._databases.fresh("sqlite", folder)
        return Harness("rq", (*RQ, "asynctask.integrations.rq.TrackedWorker"), folder, store, self._broker_url)


@pytest.mark.needs_redis
@pytest.mark.parametrize("broken", CAUGHT_RQ, ids=lambda broken: broken.__name__)
def test_a_broken_rq_fails_the_test_that_is_for_it(
    broken: Break, databases: Databases, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole it passes all of them: tests/conformance/test_engines.py."""
    monkeypatch.setattr(engine_suite, "wait_for", partial(wait_for, timeout=5.0))
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        getattr(RqSuite(databases, redis_server.url), CAUGHT_RQ[broken])()
