"""Dramatiq with the tracker attached: every message of a tracked actor leaves an Event.

Where the middleware stands, and why: first of all. Dramatiq calls ``before_...`` from the first to the last and
``after_...`` from the last to the first. So :meth:`TaskEvents.after_process_message` runs when Retries has decided, when
TimeLimit watches this thread no more, and right before the acknowledgement, which therefore waits for the commit.

What an actor raises is seen by every middleware alike. A business refusal must not reach Retries, so it is caught where
the actor's function is called: that function is wrapped when the actor is declared.

Messages carry no fence of ours (``attempt=None``). Dramatiq delivers a dead worker's copy again as it was, and the ledger
has raised the Event's attempt meanwhile: a fence in the message would have the only copy dropped.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from asynctask.core.states import Status
from asynctask.core.transitions import Begin
from asynctask.errors import ConfigError, JobInterrupted, JobTimeout, NormalException, Unavailable, not_installed
from asynctask.integrations.engine import EngineProcess
from asynctask.job import CurrentJob, reset_current_job, set_current_job
from asynctask.ledger.base import dumps
from asynctask.ledger.standalone import ENGINE, NewJob, enqueue
from asynctask.logs import get_logger
from asynctask.middleware.tracker import TICKET, Arrival, Ticket
from asynctask.runtime.launcher import Tracked
from asynctask.worker import Worker

try:
    import dramatiq
    from dramatiq.middleware import (
        Middleware,
        MiddlewareError,
        Shutdown,
        ShutdownNotifications,
        SkipMessage,
        TimeLimit,
        TimeLimitExceeded,
    )
    from dramatiq.results import Results
    from dramatiq.worker import _ConsumerThread as ConsumerThread  # the name that older releases know too
except ModuleNotFoundError as error:
    if error.name != "dramatiq":
        raise
    raise ModuleNotFoundError(not_installed("dramatiq", "dramatiq"), name="dramatiq") from None

__all__ = ["TaskEvents", "TrackingUnavailable", "attach"]

NAME = "dramatiq"
"""This engine, in the identities of its processes and in its Events."""

MAX_JOB_ID = 64
_ANSWERED = ("on_success", "on_failure", "pipe_target")
"""Options that make Dramatiq do something with what a message came to."""


class TrackingUnavailable(Unavailable, MiddlewareError):
    """Nothing could be recorded, so nothing is sent or begun. (Dramatiq swallows every error but its own kind.)"""

    code = "ledger_unavailable"


def attach(broker: dramatiq.Broker, app: Tracked, *, actors: Collection[str] | None = None) -> TaskEvents:
    """Has every message of ``broker``'s tracked actors recorded as an Event of ``app``. One call, in the module that makes
    the broker, before actors are declared that use the options below.

    Arguments: ``actors`` names the actors that are tracked; None tracks all. An actor's own option ``use_task_event=True``
    or ``False`` decides before that; ``failed_on=(MyError, ...)`` names exceptions that mean "the business said no".
    Returns the middleware. Raises :class:`ConfigError` if it is attached already.
    """
    if any(isinstance(each, TaskEvents) for each in broker.middleware):
        raise ConfigError("asynctask is attached to this broker already; attach it once, where the broker is made")
    middleware = TaskEvents(app, actors=actors)
    if broker.middleware:
        broker.add_middleware(middleware, before=type(broker.middleware[0]))
    else:
        broker.add_middleware(middleware)
    return middleware


@dataclass(slots=True)
class _Message:
    """The message that a thread of the worker is at."""

    message: Any
    actor: dramatiq.Actor[Any, Any]
    worker: Worker
    ticket: Ticket
    job: CurrentJob
    called: bool = False  # the actor's function was called for it
    performing: bool = False  # ... and has not come back
    retry_sent: bool = False

    @property
    def message_id(self) -> str:
        return str(self.message.message_id)

    @property
    def limit_s(self) -> float:
        """The time limit that Dramatiq holds it to, in seconds."""
        general = next((each.time_limit for each in self.actor.broker.middleware if isinstance(each, TimeLimit)), 0.0)
        limit = self.message.options.get("time_limit") or self.actor.options.get("time_limit", general)
        return float(limit) / 1_000

    @property
    def answered(self) -> bool:
        """Whether Dramatiq does something with what it comes to."""
        here, actor = self.message.options, self.actor.options
        kept = any(isinstance(each, Results) and each.store_results for each in self.actor.broker.middleware)
        return any(here.get(name) or actor.get(name) for name in _ANSWERED) or bool(
            here.get("store_results", actor.get("store_results", kept))
        )


class TaskEvents(Middleware):  # type: ignore[misc,unused-ignore]
    """The middleware that :func:`attach` adds."""

    def __init__(self, app: Tracked, *, actors: Collection[str] | None = None) -> None:
        self._app = app
        self._actors = None if actors is None else frozenset(actors)
        self._process: EngineProcess | None = None
        self._here = threading.local()
        self._workers: dict[str, Worker] = {}
        self._claims: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self._log = get_logger("asynctask.dramatiq")

    @property
    def actor_options(self) -> set[str]:
        """The options of an actor that belong to this middleware."""
        return {"use_task_event", "failed_on"}

    def tracks(self, actor: dramatiq.Actor[Any, Any]) -> bool:
        """Whether messages of this actor leave Events."""
        chosen = actor.options.get("use_task_event")
        if chosen is not None:
            return bool(chosen)
        return self._actors is None or actor.actor_name in self._actors

    # -- actors

    def after_declare_actor(self, broker: dramatiq.Broker, actor: dramatiq.Actor[Any, Any]) -> None:
        if not self.tracks(actor):
            return
        function, worker = actor.fn, _worker(actor)
        self._workers[actor.actor_name] = worker
        # Where a refusal is raised on (see _perform), Retries must know it for an end.
        actor.options["throws"] = (*_kinds(actor.options.get("throws")), NormalException, *worker.failed_on)

        @functools.wraps(function)
        def tracked(*args: Any, **kwargs: Any) -> Any:
            at: _Message | None = getattr(self._here, "message", None)
            if at is None or at.called or at.actor is not actor:
                return function(*args, **kwargs)  # called as a plain function, by a program or by another job
            return self._perform(at, lambda: function(*args, **kwargs))

        actor.fn = tracked

    # -- sending

    def before_enqueue(self, broker: dramatiq.Broker, message: dramatiq.Message[Any], delay: int | None) -> None:
        actor = broker.actors.get(message.actor_name)
        if actor is None or not self.tracks(actor):
            return
        at = self._at_retry(message)
        if at is not None:
            self._say_retry(at, delay)
        elif _is_id(message.message_id) and not isinstance(threading.current_thread(), ConsumerThread):
            # (A consumer moves a delayed message to its queue: that one has its Event since it was sent.)
            job = NewJob(message.message_id, actor.actor_name, actor.queue_name, self._params(message))
            try:
                enqueue(self._app.ledger, [job], options={ENGINE: NAME})
            except Exception as error:
                raise TrackingUnavailable(f"{actor.actor_name} was not sent: its Event cannot be made: {error}") from error

    def after_enqueue(self, broker: dramatiq.Broker, message: dramatiq.Message[Any], delay: int | None) -> None:
        at = self._at_retry(message)
        if at is not None:
            at.retry_sent = True

    def _at_retry(self, message: dramatiq.Message[Any]) -> _Message | None:
        """The message this thread is at, if that is the one being sent again: by Retries, after the actor is done."""
        at: _Message | None = getattr(self._here, "message", None)
        return at if at is not None and at.message_id == message.message_id and not at.performing else None

    def _say_retry(self, at: _Message, delay: int | None) -> None:
        """Recorded before the message is on the queue, or the next attempt could begin before this one has ended."""
        for each in at.actor.broker.middleware:  # those who interrupt this thread must not do so while it waits
            if isinstance(each, TimeLimit | ShutdownNotifications):
                watcher: Middleware = each
                watcher.after_process_message(at.actor.broker, at.message)
        self._judge(at, sys.exception())
        self._settle(at, retry_at=self._app.ledger.now() + (delay or 0) * 1_000)

    def _params(self, message: Any) -> Any:
        params = {"args": list(message.args), "kwargs": dict(message.kwargs)} if message.kwargs else list(message.args)
        try:
            kept = len(dumps(params)) <= self._app.config.max_item_bytes
        except TypeError:  # an encoder of the user's own
            kept = False
        if not kept:
            self._log.info("params_not_kept", job_id=message.message_id, actor=message.actor_name)
        return params if kept else None

    # -- performing

    def before_process_message(self, broker: dramatiq.Broker, message: Any) -> None:
        self._here.message = None
        actor = broker.actors.get(message.actor_name)
        if actor is None or not self.tracks(actor) or self._process is None or not _is_id(message.message_id):
            return
        self._claim(message.message_id)
        try:
            self._here.message = self._begin(self._process, message, actor)
        except SkipMessage:
            self._unclaim(message.message_id)
            raise
        except Exception as error:
            self._unclaim(message.message_id)
            raise TrackingUnavailable(f"{actor.actor_name} was not begun: it cannot be recorded: {error}") from error

    def _claim(self, message_id: str) -> None:
        """Two copies of one message in one process: the second waits until the first is recorded."""
        while True:
            with self._lock:
                ended = self._claims.get(message_id)
                if ended is None:
                    self._claims[message_id] = threading.Event()
                    return
            ended.wait()

    def _unclaim(self, message_id: str) -> None:
        with self._lock:
            self._claims.pop(message_id).set()

    def _begin(self, process: EngineProcess, message: Any, actor: dramatiq.Actor[Any, Any]) -> _Message:
        ticket = process.begin(Arrival(message.message_id, None, actor.actor_name, actor.queue_name, self._params(message)))
        if ticket.verdict is Begin.DROP:
            raise SkipMessage(f"message {message.message_id} has its outcome already")
        if ticket.task_id is not None:
            message.fail()
            raise SkipMessage(f"message {message.message_id} has the id of a job of Task {ticket.task_id}, which it is not")
        ticket.job = CurrentJob(
            message.message_id, attempt=ticket.attempt, queue=actor.queue_name, payload=dict(message.asdict()),
            should_stop=lambda: process.should_stop,
        )  # fmt: skip
        ticket.job.state[TICKET] = ticket
        return _Message(message, actor, self._workers[actor.actor_name], ticket, ticket.job)

    def _perform(self, at: _Message, function: Callable[[], Any]) -> Any:
        """Calls the actor's function through the middleware; a refusal ends here."""
        assert self._process is not None
        at.called = at.performing = True
        raised: list[BaseException] = []

        def inner() -> Any:
            try:
                return function()
            except BaseException as error:
                raised.append(error)
                raise

        token = set_current_job(at.job)
        try:
            result = self._process.chain.invoke(at.worker, at.job, at.job.queue, inner)
        except BaseException as error:
            raised.append(error)
            self._judge(at, error, last_word=True)
            if at.ticket.status is not Status.FAILED:
                raise
        finally:
            reset_current_job(token)
            at.performing = False
        if at.ticket.status is not Status.FAILED:
            return result
        if at.answered and raised:  # Dramatiq would take it for a success and act on that
            raise raised[-1]
        return None

    def _judge(self, at: _Message, error: BaseException | None, *, last_word: bool = False) -> None:
        """Notes what was raised, in the words of the ledger.

        ``last_word``: it came out of the chain, so it counts whatever the job itself came to.
        """
        ticket = at.ticket
        if error is None or (not last_word and ticket.status in (Status.FAILED, Status.ERROR)):
            return
        if at.worker.refuses(error):
            ticket.fail(error)
        elif isinstance(error, TimeLimitExceeded):
            ticket.raised(JobTimeout(at.limit_s))
        elif isinstance(error, Shutdown):
            ticket.raised(JobInterrupted())
        else:
            ticket.raised(error)

    # -- what it came to

    def after_process_message(
        self, broker: dramatiq.Broker, message: Any, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        at = self._take()
        if at is None:
            return
        try:
            if not at.ticket.settled:
                self._judge(at, exception)
                never = not at.called and exception is None
                self._settle(at, discarded="a middleware of Dramatiq failed it before it began" if never else None)
            elif not at.retry_sent:
                self._retry_lost(at)
        finally:
            self._unclaim(at.message_id)

    def after_skip_message(self, broker: dramatiq.Broker, message: Any) -> None:
        at = self._take()
        if at is None:  # not tracked, or skipped by ourselves
            return
        try:
            self._settle(at, discarded=str(getattr(message, "_exception", None) or "a middleware of Dramatiq skipped it"))
        finally:
            self._unclaim(at.message_id)

    def _take(self) -> _Message | None:
        at: _Message | None = getattr(self._here, "message", None)
        self._here.message = None
        return at

    def _settle(self, at: _Message, *, retry_at: int | None = None, discarded: str | None = None) -> None:
        assert self._process is not None
        self._process.settle(at.ticket, retry_at=retry_at, discarded=discarded)

    def _retry_lost(self, at: _Message) -> None:
        """The retry was recorded, but Dramatiq could not put it on its queue, and acknowledges the message all the same."""
        assert self._process is not None
        again = self._process.known(at.message_id)
        if again is not None and again.verdict is Begin.RUN:
            self._process.settle(again, discarded="Dramatiq could not put its retry on the queue")

    def before_nack(self, broker: dramatiq.Broker, message: Any) -> None:
        """A message that no actor of this process is for goes to the dead letters: the Event it may have says so."""
        if message.actor_name in broker.actors or self._process is None or not _is_id(message.message_id):
            return
        ticket = self._process.known(message.message_id)
        if ticket is not None and ticket.verdict is Begin.RUN and ticket.task_id is None:
            self._process.settle(ticket, discarded=f"no actor is declared as {message.actor_name!r}")

    # -- the worker process

    def before_worker_boot(self, broker: dramatiq.Broker, worker: Any) -> None:
        queues = sorted(broker.get_declared_queues())
        try:
            process = EngineProcess(self._app, NAME, concurrency=worker.worker_threads, queues=queues)
            process.start()
        except Exception as error:
            raise TrackingUnavailable(f"the worker cannot start, for it could record nothing: {error}") from error
        self._process = process

    def before_worker_shutdown(self, broker: dramatiq.Broker, worker: Any) -> None:
        if self._process is not None:
            self._process.quiet()

    def after_worker_shutdown(self, broker: dramatiq.Broker, worker: Any) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.stop()


def _is_id(message_id: object) -> bool:
    return isinstance(message_id, str) and 0 < len(message_id) <= MAX_JOB_ID


def _worker(actor: dramatiq.Actor[Any, Any]) -> Worker:
    """The actor as middleware sees it."""
    return Worker(actor.actor_name, actor.fn, queue=actor.queue_name, failed_on=_kinds(actor.options.get("failed_on")))


def _kinds(option: Any) -> tuple[type[BaseException], ...]:
    return tuple(option) if isinstance(option, tuple | list) else (option,) if option else ()
