"""Dramatiq with the tracker attached: every message of a tracked actor leaves an Event.

The middleware is the first. Dramatiq calls ``before_...`` from first to last and ``after_...`` from last to first, so
:meth:`TaskEvents.after_process_message` runs after Retries has decided, after TimeLimit has stopped watching the thread,
and right before the acknowledgement, which thereby waits for the commit.

Every middleware sees what an actor raises. A business refusal must not reach Retries, so the actor's function is wrapped
when the actor is declared, and the wrapper catches it.

Messages carry no fence (``attempt=None``). Dramatiq redelivers a dead worker's copy unchanged, and by then the ledger has
raised the Event's attempt: a fence in the message would drop the only copy.
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
from asynctask.runtime.process import Tracked
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
"""This engine's name, in the identities of its processes and in its Events."""

MAX_JOB_ID = 64
_ANSWERED = ("on_success", "on_failure", "pipe_target")
"""Options that make Dramatiq use the result of a message."""


class TrackingUnavailable(Unavailable, MiddlewareError):
    """Nothing could be recorded, so nothing is sent or begun. (Dramatiq swallows errors of any other kind.)"""

    code = "ledger_unavailable"


def attach(broker: dramatiq.Broker, app: Tracked, *, actors: Collection[str] | None = None) -> TaskEvents:
    """Records every message of ``broker``'s tracked actors as an Event of ``app``. Call it once, in the module that makes
    the broker, before actors are declared that use the options below.

    Arguments: ``actors``, the names of the tracked actors; None tracks all. An actor's own option ``use_task_event=True``
    or ``False`` takes precedence; ``failed_on=(MyError, ...)`` names exceptions that are business refusals. Returns the
    middleware. Raises :class:`ConfigError` if it is attached already.
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
    """The message that a worker thread processes."""

    message: Any
    actor: dramatiq.Actor[Any, Any]
    worker: Worker
    ticket: Ticket
    job: CurrentJob
    called: bool = False  # the actor's function was called
    performing: bool = False  # it has not returned yet
    retry_sent: bool = False

    @property
    def message_id(self) -> str:
        return str(self.message.message_id)

    @property
    def limit_s(self) -> float:
        """Dramatiq's time limit for it, in seconds."""
        general = next((each.time_limit for each in self.actor.broker.middleware if isinstance(each, TimeLimit)), 0.0)
        limit = self.message.options.get("time_limit") or self.actor.options.get("time_limit", general)
        return float(limit) / 1_000

    @property
    def answered(self) -> bool:
        """Whether Dramatiq uses its result."""
        options, actor = self.message.options, self.actor.options
        kept = any(isinstance(each, Results) and each.store_results for each in self.actor.broker.middleware)
        return any(options.get(name) or actor.get(name) for name in _ANSWERED) or bool(
            options.get("store_results", actor.get("store_results", kept))
        )


class TaskEvents(Middleware):  # type: ignore[misc,unused-ignore]
    """The middleware that :func:`attach` adds."""

    def __init__(self, app: Tracked, *, actors: Collection[str] | None = None) -> None:
        self._app = app
        self._actors = None if actors is None else frozenset(actors)
        self._process: EngineProcess | None = None
        self._thread = threading.local()
        self._workers: dict[str, Worker] = {}
        self._claims: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self._log = get_logger("asynctask.dramatiq")

    @property
    def actor_options(self) -> set[str]:
        """This middleware's options of an actor."""
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
        # Where _perform re-raises a refusal, Retries must treat it as final.
        actor.options["throws"] = (*_kinds(actor.options.get("throws")), NormalException, *worker.failed_on)

        @functools.wraps(function)
        def tracked(*args: Any, **kwargs: Any) -> Any:
            current: _Message | None = getattr(self._thread, "message", None)
            if current is None or current.called or current.actor is not actor:
                return function(*args, **kwargs)  # a plain call, by a program or another job
            return self._perform(current, lambda: function(*args, **kwargs))

        actor.fn = tracked

    # -- sending

    def before_enqueue(self, broker: dramatiq.Broker, message: dramatiq.Message[Any], delay: int | None) -> None:
        actor = broker.actors.get(message.actor_name)
        if actor is None or not self.tracks(actor):
            return
        current = self._message_to_retry(message)
        if current is not None:
            self._record_retry(current, delay)
        elif _is_id(message.message_id) and not isinstance(threading.current_thread(), ConsumerThread):
            # (A consumer moves a delayed message to its queue: its Event exists since it was sent.)
            job = NewJob(message.message_id, actor.actor_name, actor.queue_name, self._params(message))
            try:
                enqueue(self._app.ledger, [job], options={ENGINE: NAME})
            except Exception as error:
                raise TrackingUnavailable(f"{actor.actor_name} was not sent: its Event cannot be made: {error}") from error

    def after_enqueue(self, broker: dramatiq.Broker, message: dramatiq.Message[Any], delay: int | None) -> None:
        current = self._message_to_retry(message)
        if current is not None:
            current.retry_sent = True

    def _message_to_retry(self, message: dramatiq.Message[Any]) -> _Message | None:
        """This thread's message, if Retries is sending it again after the actor is done."""
        current: _Message | None = getattr(self._thread, "message", None)
        return (
            current if current is not None and current.message_id == message.message_id and not current.performing else None
        )

    def _record_retry(self, current: _Message, delay: int | None) -> None:
        """Recorded before the message is queued, or the next attempt could begin before this one has ended."""
        for each in current.actor.broker.middleware:  # nothing may interrupt this thread while it waits for the commit
            if isinstance(each, TimeLimit | ShutdownNotifications):
                watcher: Middleware = each
                watcher.after_process_message(current.actor.broker, current.message)
        self._set_outcome(current, sys.exception())
        self._settle(current, retry_at=self._app.ledger.now() + (delay or 0) * 1_000)

    def _params(self, message: Any) -> Any:
        params = {"args": list(message.args), "kwargs": dict(message.kwargs)} if message.kwargs else list(message.args)
        try:
            kept = len(dumps(params)) <= self._app.config.max_item_bytes
        except TypeError:  # the message has its own encoder
            kept = False
        if not kept:
            self._log.info("params_not_kept", job_id=message.message_id, actor=message.actor_name)
        return params if kept else None

    # -- performing

    def before_process_message(self, broker: dramatiq.Broker, message: Any) -> None:
        self._thread.message = None
        actor = broker.actors.get(message.actor_name)
        if actor is None or not self.tracks(actor) or self._process is None or not _is_id(message.message_id):
            return
        self._claim(message.message_id)
        try:
            self._thread.message = self._begin(self._process, message, actor)
        except SkipMessage:
            self._unclaim(message.message_id)
            raise
        except Exception as error:
            self._unclaim(message.message_id)
            raise TrackingUnavailable(f"{actor.actor_name} was not begun: it cannot be recorded: {error}") from error

    def _claim(self, message_id: str) -> None:
        """Makes a second copy of a message in this process wait until the first is recorded."""
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
            message.message_id,
            attempt=ticket.attempt,
            queue=actor.queue_name,
            payload=dict(message.asdict()),
            should_stop=lambda: process.should_stop,
        )
        ticket.job.state[TICKET] = ticket
        return _Message(message, actor, self._workers[actor.actor_name], ticket, ticket.job)

    def _perform(self, current: _Message, function: Callable[[], Any]) -> Any:
        """Calls the actor's function through the middleware; catches a refusal."""
        assert self._process is not None
        current.called = current.performing = True
        raised: list[BaseException] = []

        def inner() -> Any:
            try:
                return function()
            except BaseException as error:
                raised.append(error)
                raise

        token = set_current_job(current.job)
        try:
            result = self._process.chain.invoke(current.worker, current.job, current.job.queue, inner)
        except BaseException as error:
            raised.append(error)
            self._set_outcome(current, error, last_word=True)
            if current.ticket.status is not Status.FAILED:
                raise
        finally:
            reset_current_job(token)
            current.performing = False
        if current.ticket.status is not Status.FAILED:
            return result
        if current.answered and raised:  # Dramatiq would treat it as a success and use the result
            raise raised[-1]
        return None

    def _set_outcome(self, current: _Message, error: BaseException | None, *, last_word: bool = False) -> None:
        """Sets the ticket's outcome from an exception.

        ``last_word``: it came out of the whole chain, so it overrides the job's own outcome.
        """
        ticket = current.ticket
        if error is None or (not last_word and ticket.status in (Status.FAILED, Status.ERROR)):
            return
        if current.worker.refuses(error):
            ticket.fail(error)
        elif isinstance(error, TimeLimitExceeded):
            ticket.raised(JobTimeout(current.limit_s))
        elif isinstance(error, Shutdown):
            ticket.raised(JobInterrupted())
        else:
            ticket.raised(error)

    # -- outcome

    def after_process_message(
        self, broker: dramatiq.Broker, message: Any, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        current = self._pop_message()
        if current is None:
            return
        try:
            if not current.ticket.settled:
                self._set_outcome(current, exception)
                never = not current.called and exception is None
                self._settle(current, discarded="a middleware of Dramatiq failed it before it began" if never else None)
            elif not current.retry_sent:
                self._discard_lost_retry(current)
        finally:
            self._unclaim(current.message_id)

    def after_skip_message(self, broker: dramatiq.Broker, message: Any) -> None:
        current = self._pop_message()
        if current is None:  # not tracked, or skipped by this middleware
            return
        try:
            self._settle(
                current, discarded=str(getattr(message, "_exception", None) or "a middleware of Dramatiq skipped it")
            )
        finally:
            self._unclaim(current.message_id)

    def _pop_message(self) -> _Message | None:
        current: _Message | None = getattr(self._thread, "message", None)
        self._thread.message = None
        return current

    def _settle(self, current: _Message, *, retry_at: int | None = None, discarded: str | None = None) -> None:
        assert self._process is not None
        self._process.settle(current.ticket, retry_at=retry_at, discarded=discarded)

    def _discard_lost_retry(self, current: _Message) -> None:
        """The retry is recorded, but Dramatiq could not queue it and acknowledges the message nevertheless."""
        assert self._process is not None
        again = self._process.known(current.message_id)
        if again is not None and again.verdict is Begin.RUN:
            self._process.settle(again, discarded="Dramatiq could not put its retry on the queue")

    def before_nack(self, broker: dramatiq.Broker, message: Any) -> None:
        """A message without an actor in this process goes to the dead letters; its Event, if any, is discarded."""
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
    """The actor as a worker for middleware."""
    return Worker(actor.actor_name, actor.fn, queue=actor.queue_name, failed_on=_kinds(actor.options.get("failed_on")))


def _kinds(option: Any) -> tuple[type[BaseException], ...]:
    return tuple(option) if isinstance(option, tuple | list) else (option,) if option else ()
