"""Dramatiq with the tracker attached: every message of a tracked actor leaves an Event, and Tasks run on its workers.

The middleware is the first. Dramatiq calls ``before_...`` from first to last and ``after_...`` from last to first, so
its ``after_process_message`` runs after Retries has decided, after TimeLimit has stopped watching the thread, and right
before the acknowledgement, which thereby waits for the commit.

Every middleware sees what an actor raises. A business refusal must not reach Retries, so the actor's function is wrapped
when the actor is declared, and the wrapper catches it.

A message that a program sends carries no fence (``attempt=None``). Dramatiq redelivers a dead worker's copy unchanged, and
by then the ledger has raised the Event's attempt: a fence in the message would drop the only copy. A job of a Task carries
its attempt as an option of its message. The ledger dispatches it again with the next attempt, when it is due; the copy that
Retries queues has the old attempt and is dropped on arrival.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from asynctask.core.transitions import Begin
from asynctask.errors import (
    BrokerUnavailable,
    ConfigError,
    FinalError,
    IdInUse,
    JobInterrupted,
    JobTimeout,
    NormalException,
    SchemaOutdated,
    Unavailable,
    not_installed,
)
from asynctask.exports.run import MERGER
from asynctask.integrations.base import (
    AT_ONCE,
    PUT_OFF_S,
    SENT,
    Attachable,
    Engine,
    EngineCapabilities,
    EngineProcess,
    Fence,
    HeldAcks,
    IdTaken,
    Performed,
    PushedJob,
    Unwanted,
    revived_arguments,
)
from asynctask.ledger.base import chunks
from asynctask.ledger.standalone import Arrival, is_job_id
from asynctask.middleware.tracker import Attempt, SentRun

try:
    import dramatiq
    from dramatiq import errors
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

NAME: Final = "dramatiq"
"""The name of this engine: the prefix of its queues, in the identities of its processes and in its Events."""

ATTEMPT: Final = "asynctask_attempt"
"""The option of a message that is a job of a Task: its attempt."""

MAX_NAME: Final = 8

_CLOSE_S: Final = 5.0
"""Seconds that a closing consumer waits for outcomes; messages not acknowledged by then are delivered again."""

_NO_QUEUE: Final = 404
"""RabbitMQ's reply for a missing queue."""

_CONNECTION: Final = ("connection", "channel")
"""What Dramatiq's broker on RabbitMQ keeps for each thread."""

_ANSWERED = ("on_success", "on_failure", "pipe_target")
"""Options that make Dramatiq use the result of a message."""


class TrackingUnavailable(Unavailable, MiddlewareError):
    """Nothing could be recorded, so nothing is sent or begun. (Dramatiq swallows errors of other kinds.)"""

    code = "ledger_unavailable"


class SendRefused(IdInUse, MiddlewareError):
    """A message cannot be sent under the id of another job."""


class ActorRefused(ConfigError, MiddlewareError):
    """An actor cannot be declared with these options."""


def attach(
    broker: dramatiq.Broker,
    app: Attachable,
    *,
    actors: Collection[str] | None = None,
    failed_on: Collection[type[BaseException]] = (),
    name: str = NAME,
) -> DramatiqEngine:
    """Records every message of ``broker``'s tracked actors as an Event of ``app``, and makes those actors workers of
    ``app``: lists can be submitted for them. Call it once, in the module that creates the broker. Dramatiq takes the
    options of an actor below from then on; actors that are declared before may have none of them.

    Arguments: ``actors``, the names of the tracked actors; None tracks all. ``failed_on=(MyError, ...)``: exceptions
    that are business refusals, of all actors. An actor's own options: ``use_task_event=True`` or ``False`` takes
    precedence over ``actors``; ``failed_on`` adds to those of all; ``export_columns=["sku", ...]`` makes an actor that
    yields rows an export; ``rate``, ``limit`` and ``search`` are those of :meth:`asynctask.AsyncTask.worker`. ``name``:
    1 to 8 small letters, for a second Dramatiq broker of the application. Returns the middleware. Raises
    :class:`ConfigError` if it is attached already.
    """
    if any(isinstance(each, DramatiqEngine) for each in broker.middleware):
        raise ConfigError("asynctask is attached to this broker already; attach it once, where the broker is made")
    engine = DramatiqEngine(app, broker, actors=actors, failed_on=failed_on, name=name)
    app.attach(engine)
    consume = broker.consume
    broker.consume = lambda *args, **options: _Consumer(consume(*args, **options), engine)  # type: ignore[method-assign]
    if broker.middleware:
        broker.add_middleware(engine, before=type(broker.middleware[0]))
    else:
        broker.add_middleware(engine)
    return engine


def _message(job: PushedJob) -> dramatiq.Message[Any]:
    options: dict[str, Any] = {"retries": job.retries} if job.retries else {}
    if job.attempt is not None:
        options[ATTEMPT] = job.attempt
    if job.sent is not None:
        options[SENT] = job.sent
    return dramatiq.Message(job.queue, job.name, tuple(job.args), dict(job.kwargs), options, message_id=job.job_id)


class _Server:
    """Access of the dispatcher to a broker's queues; this one for those on Redis and in memory."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker
        if hasattr(broker, "client") and hasattr(broker, "namespace"):  # on Redis
            self.count: Callable[[str], int] | None = lambda name: int(broker.client.llen(f"{broker.namespace}:{name}"))
        elif hasattr(broker, "queues") and hasattr(broker, "dead_letters"):  # in memory, for tests
            self.count = lambda name: int(broker.queues[name].qsize())
        else:
            self.count = None

    def push(self, messages: Sequence[dramatiq.Message[Any]]) -> None:
        for message in messages:
            self._broker.enqueue(message)

    def acknowledge(self, consumer: Any, messages: Sequence[Any]) -> None:
        """Acknowledges messages of one consumer; raises if any could not be."""
        failed: list[Exception] = []
        for message in messages:
            try:
                consumer.ack(message)
            except Exception as error:  # the others can be
                failed.append(error)
        if failed:
            raise failed[0]


class _RedisServer(_Server):
    """The same for a broker on Redis: messages go there :data:`AT_ONCE` at a time, as the broker itself queues one."""

    def push(self, messages: Sequence[dramatiq.Message[Any]]) -> None:
        for part in chunks(messages, AT_ONCE):
            sent = [message.copy(options={"redis_message_id": str(uuid4())}) for message in part]
            with self._pipeline() as line:
                for message in sent:
                    self._broker.emit_before("enqueue", message, None)
                    line.do_enqueue(message.queue_name, message.options["redis_message_id"], message.encode())
            for message in sent:
                self._broker.emit_after("enqueue", message, None)

    def acknowledge(self, consumer: Any, messages: Sequence[Any]) -> None:
        if type(consumer).ack is sys.modules["dramatiq.brokers.redis"]._RedisConsumer.ack:
            with self._pipeline() as line:  # they are taken out of what is prefetched already
                for message in messages:
                    line.do_ack(consumer.queue_name, message.options["redis_message_id"])
        else:
            super().acknowledge(consumer, messages)

    @contextmanager
    def _pipeline(self) -> Iterator[Any]:
        """The broker, whose commands in the block go to Redis at its end, in one round trip."""
        with self._broker.client.pipeline(transaction=False) as pipeline:
            line = copy.copy(self._broker)
            script = functools.partial(self._broker.scripts["dispatch"], client=pipeline)
            line.scripts = {**self._broker.scripts, "dispatch": script}
            yield line
            pipeline.execute()


class _RabbitServer(_Server):
    """The same for a broker on RabbitMQ, over one connection for all threads.

    The broker itself opens one for each thread and closes none before its own end, and does not reopen a closed connection
    to count messages; RabbitMQ closes one that sends no heartbeat while idle after a minute or two.
    """

    def __init__(self, broker: Any) -> None:
        super().__init__(broker)
        self.count = self._count_messages
        self._kept: dict[str, Any] = {}
        self._pid = 0
        self._lock = threading.RLock()  # what hooks into sending may dispatch by itself

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Makes the shared connection the broker's connection of this thread, within the block."""
        with self._lock:
            if self._pid != os.getpid():  # a forked child: the connection is its parent's
                self._kept, self._pid = {}, os.getpid()
            state = vars(self._broker.state)
            own = {name: state.pop(name) for name in _CONNECTION if name in state}
            state.update(self._kept)
            try:
                yield
            finally:
                self._kept = {name: state.pop(name) for name in _CONNECTION if name in state}
                state.update(own)

    def push(self, messages: Sequence[dramatiq.Message[Any]]) -> None:
        with self._connected():
            for is_last in (False, True):
                try:
                    if self._has_pushed(messages):
                        return
                except _away():
                    self._reconnect(messages)
                    if is_last:
                        raise
            raise BrokerUnavailable("the connection to RabbitMQ broke twice while messages were sent")

    def _has_pushed(self, messages: Sequence[dramatiq.Message[Any]]) -> bool:
        """Whether all have arrived. Messages to a connection that the server has closed are lost without an error; RabbitMQ
        does not answer messages, but answers a query behind them on the same channel."""
        channel = self._broker.channel
        super().push(messages)
        for queue in {message.queue_name for message in messages}:
            self._broker.channel.queue_declare(queue, passive=True)
        return channel is self._broker.channel  # or the broker has reconnected between two of them

    def _reconnect(self, messages: Sequence[dramatiq.Message[Any]]) -> None:
        self._broker.queues_pending.update(message.queue_name for message in messages)  # one may be gone
        del self._broker.connection

    def _count_messages(self, queue: str) -> int:
        with self._connected():
            for is_last in (False, True):
                try:
                    return int(self._broker.channel.queue_declare(queue, passive=True).method.message_count)
                except _away() as error:
                    if getattr(error, "reply_code", None) == _NO_QUEUE:
                        del self._broker.channel
                        return 0
                    del self._broker.connection
                    if is_last:
                        raise
        raise AssertionError("the second look returns or raises")


def _server_of(broker: Any) -> _Server:
    if hasattr(broker, "get_queue_message_counts"):
        return _RabbitServer(broker)
    redis = sys.modules.get("dramatiq.brokers.redis")
    is_known = redis is not None and type(broker).enqueue is redis.RedisBroker.enqueue  # not one that does more
    return _RedisServer(broker) if is_known else _Server(broker)


def _away() -> tuple[type[BaseException], ...]:
    """The exceptions of a broker whose server does not answer; imports its client's only with that broker."""
    redis = getattr(sys.modules.get("dramatiq.brokers.redis"), "redis", None)
    pika = getattr(sys.modules.get("dramatiq.brokers.rabbitmq"), "pika", None)
    name = "BrokerConnectionError" if hasattr(errors, "BrokerConnectionError") else "ConnectionError"  # before 2.2
    found: list[type[BaseException]] = [getattr(errors, name), OSError]
    if redis is not None:
        found.append(redis.RedisError)
    if pika is not None:
        found.append(pika.exceptions.AMQPError)
    return tuple(found)


@dataclass(slots=True, kw_only=True, eq=False)
class _Message(Performed):
    """The message that a worker thread processes."""

    actor: Any = None
    sent_run: SentRun | None = None  # its next run, once the broker has it
    retry_sent: bool = False

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

    @property
    def is_watched(self) -> bool:
        """Whether a middleware of the application's own may use its result."""
        modules = (type(each).__module__.partition(".")[0] for each in self.actor.broker.middleware)
        return any(module not in ("dramatiq", "asynctask") for module in modules)


class _Consumer(dramatiq.Consumer):
    """A consumer of Dramatiq whose messages are expected, and acknowledged after the commit of their outcome.

    Its worker threads do not wait for that commit: an earlier acknowledgement is held back.
    """

    def __init__(self, inner: Any, events: DramatiqEngine) -> None:
        self._inner = inner
        self._events = events
        self._held = 0
        self._condition = threading.Condition()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __next__(self) -> Any:
        message = next(self._inner)
        if message is not None:
            self._events.expect(message)
        return message

    def ack(self, message: Any) -> None:
        with self._condition:
            self._held += 1
        if self._events.acks.hold(message.message_id, (self, message)):
            # On Redis, the prefetch counts running messages; this one no longer runs.
            getattr(self._inner, "queued_message_ids", set()).discard(message.message_id)
        else:
            with self._condition:
                self._held -= 1
            self._inner.ack(message)

    def release(self, messages: Sequence[Any]) -> None:
        """Acknowledges messages that were held."""
        try:
            self._events.server.acknowledge(self._inner, messages)
        finally:
            with self._condition:
                self._held -= len(messages)
                self._condition.notify_all()

    def nack(self, message: Any) -> None:
        self._inner.nack(message)

    def requeue(self, messages: Any) -> None:
        self._inner.requeue(messages)

    def close(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: not self._held, _CLOSE_S)
        self._inner.close()


def _release(held: Sequence[tuple[_Consumer, Any]]) -> None:
    """Acknowledges messages, each with its consumer."""
    by_consumer: dict[_Consumer, list[Any]] = defaultdict(list)
    for consumer, message in held:
        by_consumer[consumer].append(message)
    with ExitStack() as stack:  # one after the other, whatever the others raise
        for consumer, messages in by_consumer.items():
            stack.callback(consumer.release, messages)


class DramatiqEngine(Engine, Middleware):  # type: ignore[misc,unused-ignore]
    """The broker as an engine, and its middleware, added by :func:`attach`: its actors are workers, and the dispatcher puts
    jobs of Tasks on its queues."""

    title = "Dramatiq"
    attempts = _Message

    def __init__(
        self,
        app: Attachable,
        broker: dramatiq.Broker,
        *,
        actors: Collection[str] | None = None,
        failed_on: Collection[type[BaseException]] = (),
        name: str = NAME,
    ) -> None:
        if not (name.isalpha() and name.isascii() and name.islower() and len(name) <= MAX_NAME):
            raise ConfigError(f"the name of an engine has 1 to {MAX_NAME} letters from a to z, not {name!r}")
        self.server = _server_of(broker)
        capabilities = EngineCapabilities(
            late_ack=True,
            redelivers=True,
            counts=self.server.count is not None,
            asynchronous=True,
            hard_limit=False,
            revokes=False,
            exports=True,
        )
        super().__init__(app, name, capabilities)
        self.broker = broker
        self._actors = None if actors is None else frozenset(actors)
        self._failed_on = tuple(failed_on)
        self._works = False  # this process is a worker
        self._claims: dict[str, threading.Event] = {}
        self.acks = HeldAcks(_release)
        self._lock = threading.Lock()

    # -- the port

    def name_of(self, target: object) -> str | None:
        return target.actor_name if isinstance(target, dramatiq.Actor) and target.broker is self.broker else None

    def put(self, jobs: Sequence[PushedJob]) -> None:
        self.server.push([_message(job) for job in jobs])

    def count(self, queues: Sequence[str]) -> Sequence[int]:
        assert self.server.count is not None, "no list is taken for a broker that cannot count"
        return [self.server.count(queue) for queue in queues]

    def away(self) -> tuple[type[BaseException], ...]:
        return _away()

    @property
    def actor_options(self) -> set[str]:
        """This middleware's options of an actor."""
        return {"use_task_event", "failed_on", "export_columns", "rate", "limit", "search"}

    def tracks(self, actor: dramatiq.Actor[Any, Any]) -> bool:
        """Whether messages of this actor leave Events."""
        chosen = actor.options.get("use_task_event")
        if chosen is not None:
            return bool(chosen)
        return self._actors is None or actor.actor_name in self._actors

    # -- actors

    def before_declare_actor(self, broker: dramatiq.Broker, actor: dramatiq.Actor[Any, Any]) -> None:
        """Refuses here, because Dramatiq swallows later exceptions."""
        about = _about(actor)
        if all(each is None for each in about.values()):
            return
        try:
            self.declared(actor.actor_name, _declared(actor.fn), actor.queue_name, **about)
        except ConfigError as error:
            raise ActorRefused(str(error)) from None
        if not self.tracks(actor):
            raise ActorRefused(
                f"actor {actor.actor_name}: an export, a rate and a search are of tracked jobs, so it must be tracked"
            )

    def after_declare_actor(self, broker: dramatiq.Broker, actor: dramatiq.Actor[Any, Any] | str) -> None:
        if isinstance(actor, str):  # before 2.0: one that was declared before this middleware was added
            actor = broker.get_actor(actor)
        if not self.tracks(actor):
            return
        function = actor.fn
        worker = self.declared(
            actor.actor_name,
            _declared(function),
            actor.queue_name,
            failed_on=(*self._failed_on, *_kinds(actor.options.get("failed_on"))),
            **_about(actor),
        )
        self.tracked.add(worker)
        written = self.writing(worker, function)
        # Where _perform re-raises a refusal, Retries must treat it as final; and what another attempt would not change.
        actor.options["throws"] = (*_kinds(actor.options.get("throws")), NormalException, FinalError, *worker.failed_on)

        @functools.wraps(function)
        def tracked(*args: Any, **kwargs: Any) -> Any:
            current: _Message | None = self.current
            if current is None or current.is_called or current.actor is not actor:
                return function(*args, **kwargs)  # a plain call, by a program or another job
            # An item of a Task is converted to its model.
            own = args if current.ticket.task_id is None else revived_arguments(worker, args)
            return self._perform(current, lambda: written(*own, **kwargs))

        actor.fn = tracked
        if worker.columns and MERGER not in self.tracked:
            self._declare_merger(broker, actor.queue_name)

    def _declare_merger(self, broker: dramatiq.Broker, queue: str) -> None:
        """Declares the actor that merges, on the queue of an export, because another queue may belong to other programs.
        Messages to it may be on any queue."""
        options: dict[str, Any] = {"max_retries": 0, "time_limit": math.inf, "store_results": False, "use_task_event": True}
        known = {name: value for name, value in options.items() if name in broker.actor_options}
        dramatiq.actor(actor_name=MERGER, queue_name=queue, broker=broker, **known)(self.merging())

    # -- sending

    def before_enqueue(self, broker: dramatiq.Broker, message: dramatiq.Message[Any], delay: int | None) -> None:
        actor, running = broker.actors.get(message.actor_name), self.current
        current, is_tracked = self.performs(message.message_id), actor is not None and self.tracks(actor)
        if current is not None and current.is_performing and not self.is_pushing:
            self._put_back(current, message, delay, is_tracked=is_tracked)
        if actor is None or not is_tracked:
            return
        if current is not None and not self.is_pushing:
            if not current.is_performing:
                self._record_retry(current, delay)
            return
        if running is not None and running.is_performing and not self.is_pushing:
            message.options.pop(ATTEMPT, None)  # of the job that sends this one, with its options
        if self._has_no_event(message):
            # Beside the function of a job, Dramatiq sends by itself: the next message of a pipeline.
            by_engine = running is not None and not running.is_performing
            is_second_try = getattr(self.thread, "sending", None) == message.message_id  # the broker was away
            try:
                sent = self.announce(
                    message.message_id, self.tracked[actor.actor_name], _queue_of(message), message.args, message.kwargs,
                    by_engine=by_engine or is_second_try,
                )  # fmt: skip
            except IdInUse as error:
                raise SendRefused(str(error)) from None
            except Exception as error:
                raise TrackingUnavailable(f"{actor.actor_name} was not sent: its Event cannot be made: {error}") from error
            self.thread.sending = message.message_id
            if sent is not None:
                message.options[SENT] = sent

    def _put_back(self, current: _Message, message: Any, delay: int | None, *, is_tracked: bool) -> None:
        """A running job sends a message under its own id: its next run."""
        if not is_tracked:
            raise SendRefused(
                f"{message.actor_name} leaves no Events, so its run under the id of this job would not be recorded: send it"
                " with another id, or track it"
            )
        try:
            self.send_itself(
                current, message.actor_name, _queue_of(message), message.args, message.kwargs, current.message.args,
                delay_s=(delay or 0) / 1_000, retries=int(message.options.get("retries") or 0),
            )  # fmt: skip
        except Exception as error:  # Dramatiq would send it nevertheless
            raise SendRefused(str(error)) from error
        if not current.ticket.elsewhere:
            message.options[ATTEMPT] = current.ticket.attempt  # dropped on arrival: the ledger dispatches the next one

    def _has_no_event(self, message: dramatiq.Message[Any]) -> bool:
        """Whether a program sends this message. Messages of the dispatcher have an Event, and so do delayed ones that a
        consumer moves to their queue."""
        pushed = ATTEMPT in message.options or self.is_pushing
        return is_job_id(message.message_id) and not pushed and not isinstance(threading.current_thread(), ConsumerThread)

    def after_enqueue(self, broker: dramatiq.Broker, message: dramatiq.Message[Any], delay: int | None) -> None:
        self.thread.sending = None
        current = self.performs(message.message_id)
        if current is not None and current.is_performing:
            current.sent_run = current.next_run
        elif current is not None:
            current.retry_sent = True

    def _record_retry(self, current: _Message, delay: int | None) -> None:
        """Records the retry before the message is queued; otherwise the next attempt could begin before this one has
        ended."""
        for each in current.actor.broker.middleware:  # nothing may interrupt this thread while it waits for the commit
            if isinstance(each, TimeLimit | ShutdownNotifications):
                watcher: Middleware = each
                watcher.after_process_message(current.actor.broker, current.message)
        if not current.has_failed and (error := sys.exception()) is not None:
            self.conclude(current, error)
        current.performer.settle(current, delay_s=(delay or 0) / 1_000)

    # -- performing

    def before_process_message(self, broker: dramatiq.Broker, message: Any) -> None:
        self.thread.current = None
        actor = broker.actors.get(message.actor_name)
        if actor is None or not self.tracks(actor) or not self._works or not is_job_id(message.message_id):
            return
        process: Any = self.started()
        arrival = self._arrival(message)
        if arrival.broken:  # before it waits for another copy
            process.refuse(arrival)
            raise SkipMessage(f"message {message.message_id} names no valid attempt")
        self._claim(message.message_id)
        try:
            self.thread.current = self.begin(
                arrival, self.tracked[actor.actor_name], message, dict(message.asdict()),
                redelivered=getattr(message, "redelivered", False),  # on RabbitMQ
            )  # fmt: skip
            self.thread.current.actor = actor
        except (Unwanted, IdTaken) as error:
            self._unclaim(message)
            if isinstance(error, IdTaken):
                message.fail()
            raise SkipMessage(f"message {message.message_id} is not to be performed: {error}") from None
        except Exception as error:
            self._unclaim(message)
            raise TrackingUnavailable(f"{actor.actor_name} was not begun: it cannot be recorded: {error}") from error

    def expect(self, message: Any) -> None:
        """Notes that a consumer has a message that soon begins."""
        actor, process = self.broker.actors.get(message.actor_name), self.performer
        if actor is None or not isinstance(process, EngineProcess) or "eta" in message.options or not self.tracks(actor):
            return
        if is_job_id(message.message_id):
            process.expect(self._arrival(message))

    def _arrival(self, message: Any) -> Arrival:
        return self.arrival(
            self.tracked[message.actor_name], message.message_id, _fence(message), _queue_of(message), message.args,
            message.kwargs, sent=message.options.get(SENT),
        )  # fmt: skip

    def _claim(self, message_id: str) -> None:
        """Makes a second copy of a message in this process wait until the first is recorded."""
        while True:
            with self._lock:
                ended = self._claims.get(message_id)
                if ended is None:
                    self._claims[message_id] = threading.Event()
                    return
            ended.wait()

    def _unclaim(self, message: Any) -> None:
        with self._lock:
            self._claims.pop(message.message_id).set()

    def _perform(self, current: _Message, function: Callable[[], Any]) -> Any:
        """Calls the actor's function; catches a refusal."""
        current.is_called, result = True, None
        try:
            result = self.call(current, function)
        except BaseException as error:
            if isinstance(error, JobInterrupted) and not current.ticket.elsewhere:
                return None  # it stopped between two steps, and the ledger dispatches it again
            if not current.is_refused:
                raise
        finally:
            current.next_run = current.sent_run
        if not current.is_refused:
            return result if current.answered or current.is_watched else None  # Dramatiq warns of one that it does not use
        if current.answered and current.error is not None:  # Dramatiq would treat it as a success and use the result
            raise current.error
        return None

    def understood(self, current: Any, error: BaseException) -> BaseException:
        if isinstance(error, TimeLimitExceeded):
            return JobTimeout(current.limit_s)
        return JobInterrupted() if isinstance(error, Shutdown) else error

    # -- outcome

    def after_process_message(
        self, broker: dramatiq.Broker, message: Any, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        current = self._pop_message()
        if current is None:
            return
        if exception is None and current.is_called and not current.is_settled and not current.answered:
            self.settle_later(current, lambda: self._unclaim(current.message))
            return
        try:
            if not current.is_settled:
                if exception is not None and not current.has_failed:
                    self.conclude(current, exception)
                never = not current.is_called and exception is None and message.failed
                why = "a middleware of Dramatiq failed it before it began" if never else None
                current.performer.settle(current, discarded=why)
            elif not current.retry_sent and current.ticket.elsewhere:
                self._discard_lost_retry(current)
        finally:
            self._unclaim(current.message)

    def after_skip_message(self, broker: dramatiq.Broker, message: Any) -> None:
        current = self._pop_message()
        if current is None:  # not tracked, or skipped by this middleware
            return
        try:
            why = str(getattr(message, "_exception", None) or "a middleware of Dramatiq skipped it")
            current.performer.settle(current, discarded=why)
        finally:
            self._unclaim(current.message)

    def _pop_message(self) -> _Message | None:
        current: _Message | None = self.current
        self.thread.current = None
        return current

    def _discard_lost_retry(self, current: _Message) -> None:
        """The retry is recorded, but Dramatiq could not queue it and acknowledges the message nevertheless."""
        again = current.performer.known(current.ticket.job_id)
        if again is not None and again.verdict is Begin.RUN:
            current.performer.settle(Attempt(again), discarded="Dramatiq could not put its retry on the queue")

    def before_nack(self, broker: dramatiq.Broker, message: Any) -> None:
        """A message without an actor in this process goes to the dead letters; its Event, if any, is discarded."""
        if message.actor_name in broker.actors or not self._works or not is_job_id(message.message_id):
            return
        process: Any = self.started()
        attempt, why = _fence(message).attempt, f"no actor is declared as {message.actor_name!r}"
        if attempt is not None:
            process.put_off(Arrival(message.message_id, attempt, message.actor_name, ""), why, PUT_OFF_S)
            return
        ticket = process.known(message.message_id)
        if ticket is not None and ticket.verdict is Begin.RUN and ticket.is_lone:
            process.settle(Attempt(ticket), discarded=why)

    # -- the worker process

    def before_worker_boot(self, broker: dramatiq.Broker, worker: Any) -> None:
        """Starts what records. While the ledger is unavailable, the worker takes messages and begins none of them."""
        declared = set(broker.get_declared_queues())
        self.queue_names = sorted(declared & set(worker.consumer_whitelist or declared))
        self.concurrency = worker.worker_threads
        self._works = True
        self.acks.start()
        try:
            self.start()
        except (SchemaOutdated, ConfigError) as error:
            raise SystemExit(str(error)) from error
        except Exception as error:
            raise TrackingUnavailable(f"the worker cannot start, for it could record nothing: {error}") from error

    def before_worker_shutdown(self, broker: dramatiq.Broker, worker: Any) -> None:
        if isinstance(self.performer, EngineProcess):
            self.performer.quiet()

    def after_worker_shutdown(self, broker: dramatiq.Broker, worker: Any) -> None:
        self._works = False
        self.stop()
        self.acks.stop()


def _queue_of(message: Any) -> str:
    """The queue that a message was sent to, which need not be that of its actor; a delayed one waits beside it."""
    return str(message.queue_name).removesuffix(".DQ")


def _about(actor: dramatiq.Actor[Any, Any]) -> dict[str, Any]:
    """The options of an actor about lists and their jobs, as :meth:`Engine.declared` takes them; None: not given."""
    names = {"columns": "export_columns", "rate": "rate", "limit": "limit", "search": "search"}
    return {name: actor.options.get(option) for name, option in names.items()}


def _declared(function: Any) -> Callable[..., Any]:
    """The function of an actor whose parameters count: of an actor that is a class, its ``perform``."""
    declared: Callable[..., Any] = function.perform if isinstance(function, dramatiq.GenericActor) else function
    return declared


def _fence(message: Any) -> Fence:
    """The fence in a message."""
    return Fence.parse(message.options[ATTEMPT]) if ATTEMPT in message.options else Fence()


def _kinds(option: Any) -> tuple[type[BaseException], ...]:
    return tuple(option) if isinstance(option, tuple | list) else (option,) if option else ()
