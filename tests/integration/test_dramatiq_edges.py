"""What may come between Dramatiq and the record: refusals in pipelines, skipped messages, lost retries, a ledger away.

Dramatiq's own worker threads on its broker for tests, in this process; test_dramatiq.py has the real command.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import AgeLimit, CurrentMessage, Middleware, SkipMessage
from support.dramatiq_app import Product, SoldOutError, build
from support.world import Shop, settings

from asynctask import AsyncTask, NormalException, current_job
from asynctask.errors import ConfigError, IdInUse, InputError, LedgerUnavailable, NotFound, SchemaOutdated
from asynctask.integrations import dramatiq as integration
from asynctask.integrations.base import SENT, EngineProcess, sent_at
from asynctask.integrations.dramatiq import TrackingUnavailable, attach
from asynctask.job import CurrentJob
from asynctask.ledger import processes
from asynctask.testing import wait_for

OVER = ("finish", "failed", "error", "cancelled")


actor: Any = dramatiq.actor
"""Its types know no options."""


class Stub:
    """A broker for tests with an application attached."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.shop = folder, Shop(folder)
        self.broker = StubBroker(fail_fast_default=False)
        self.app: AsyncTask = build(self.broker, folder)

    def actor(self, function: Any, **options: Any) -> dramatiq.Actor[Any, Any]:
        made: dramatiq.Actor[Any, Any] = actor(function, broker=self.broker, **{"max_retries": 0, **options})
        return made

    @contextmanager
    def working(self, threads: int = 2) -> Iterator[dramatiq.Worker]:
        worker = dramatiq.Worker(self.broker, worker_timeout=20, worker_threads=threads)
        worker.start()
        try:
            yield worker
        finally:
            worker.stop(timeout=10_000)

    def ended(self, message: dramatiq.Message[Any]) -> dict[str, Any]:
        wait_for(lambda: self.app.event(message.message_id)["status"] in OVER, f"{message} ends")
        return self.app.event(message.message_id)

    def settled(self) -> None:
        """Waits until the queue is empty and every message acknowledged."""
        self.broker.join("default", timeout=20_000)

    def dead(self) -> list[str]:
        return [message.actor_name for message in self.broker.dead_letters]


class Watching(Middleware):
    """An application's own middleware, which uses results."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def after_process_message(self, broker: Any, message: Any, *, result: Any = None, exception: Any = None) -> None:
        self.results.append(result)


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    made = Stub(tmp_path)
    yield made
    made.broker.flush_all()
    made.broker.close()
    made.app.close()


def last(event: dict[str, Any]) -> str:
    return str(event["messages"][-1]["message"])


# -- attaching


def test_attaching_twice_is_refused(stub: Stub) -> None:
    with pytest.raises(ConfigError, match="attached to this broker already"):
        attach(stub.broker, stub.app)


def test_it_stands_before_every_other_middleware(stub: Stub) -> None:
    assert isinstance(stub.broker.middleware[0], integration.DramatiqEngine)
    bare = StubBroker(middleware=[])
    assert bare.middleware == [attach(bare, stub.app, name="other")]


def test_only_the_named_actors_are_tracked_and_an_actors_own_word_counts_more(stub: Stub) -> None:
    broker = StubBroker()
    attach(broker, stub.app, actors=["named", "named_but_out"], name="other")
    actors = {
        name: actor(lambda: None, actor_name=name, broker=broker, **options)
        for name, options in {
            "named": {},
            "other": {},
            "other_but_in": {"use_task_event": True},
            "named_but_out": {"use_task_event": False},
        }.items()
    }
    sent = {name: actor.send() for name, actor in actors.items()}
    assert stub.app.event(sent["named"].message_id)["status"] == "enqueue"
    assert stub.app.event(sent["other_but_in"].message_id)["worker"] == "other_but_in"
    for name in ("other", "named_but_out"):
        with pytest.raises(NotFound):
            stub.app.event(sent[name].message_id)
    broker.close()


# -- refusals


def test_a_refusal_does_not_go_on_in_a_pipeline_and_is_not_retried(stub: Stub) -> None:
    refusing, heard = stub.broker.get_actor("refuse"), stub.broker.get_actor("heard")
    pipeline = dramatiq.pipeline([refusing.message("own"), heard.message()], broker=stub.broker)
    pipeline.run()
    with stub.working():
        event = stub.ended(pipeline.messages[0])
        stub.settled()
    assert (event["status"], last(event)) == ("failed", "Failed: sold out")
    assert stub.shop.lines() == [["did", "own"]]
    assert stub.dead() == ["refuse"]


def test_a_refusal_is_told_to_on_failure_and_not_to_on_success(stub: Stub) -> None:
    refusing, heard = stub.broker.get_actor("refuse"), stub.broker.get_actor("heard")
    message = refusing.send_with_options(args=("normal",), on_failure=heard, on_success=heard)
    with stub.working():
        assert stub.ended(message)["status"] == "failed"
        wait_for(lambda: len(stub.shop.lines()) == 2, "the callback is performed")
        stub.settled()
    assert [line[0] for line in stub.shop.lines()] == ["did", "heard"]
    assert "NormalException" in " ".join(stub.shop.lines()[1])


def test_a_refusal_without_consequences_is_acknowledged(stub: Stub) -> None:
    message = stub.broker.get_actor("refuse").send("normal")
    with stub.working():
        assert stub.ended(message)["status"] == "failed"
        stub.settled()
    assert (stub.dead(), len(stub.shop.lines())) == ([], 1)


def test_an_actor_called_as_a_function_is_just_that(stub: Stub) -> None:
    refusing = stub.broker.get_actor("refuse")
    with pytest.raises(NormalException):
        refusing("normal")

    def caller() -> str:
        try:
            refusing("normal")
        except NormalException as error:
            return f"saw: {error}"
        return "saw nothing"

    message = stub.actor(caller).send()
    with stub.working():
        assert stub.ended(message)["result"] == "saw: seller is not qualified"


# -- around the actor


def test_the_applications_server_middleware_stands_around_actors_too(stub: Stub) -> None:
    def noting(worker: Any, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        job.message(f"{worker.name} on {queue}")
        return call_next()

    stub.app.server_middleware.add(noting)
    message = stub.broker.get_actor("heard").send("x")
    with stub.working():
        assert [m["message"] for m in stub.ended(message)["messages"]][1] == "heard on default"


def test_a_refusal_of_an_outer_middleware_is_failed_and_not_retried(stub: Stub) -> None:
    def refusing(worker: Any, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        call_next()
        raise NormalException("not after all")

    stub.app.server_middleware.add(refusing)
    message = stub.actor(lambda: 17, actor_name="fine", max_retries=5).send()
    with stub.working():
        event = stub.ended(message)
        stub.settled()
    assert (event["status"], last(event), event["result"], event["attempt"]) == ("failed", "Failed: not after all", None, 1)
    assert stub.dead() == []


def test_should_stop_says_when_the_worker_is_told_to_stop(stub: Stub) -> None:
    def polite() -> str:
        wait_for(current_job().should_stop, "the worker is told to stop")
        return "saved"

    message = stub.actor(polite).send()
    with stub.working():
        wait_for(lambda: stub.app.event(message.message_id)["status"] == "working", "it runs")
    assert stub.app.event(message.message_id)["result"] == "saved"


def test_a_second_copy_waits_while_the_first_one_runs_in_the_same_process(stub: Stub) -> None:
    message = stub.broker.get_actor("gated").send(1)
    stub.broker.queues["default"].put(message.encode())
    with stub.working(threads=2):
        wait_for(lambda: stub.app.event(message.message_id)["status"] == "working", "the first copy runs")
        wait_for(lambda: stub.broker.queues["default"].empty(), "the second copy was fetched")
        (stub.folder / "gate").touch()
        assert stub.ended(message)["status"] == "finish"
        stub.settled()
    assert stub.shop.lines() == [["began", "1", "1"], ["did", "1", "1"]]


def test_a_message_and_its_retry_say_when_the_job_was_sent(stub: Stub) -> None:
    sent: list[Any] = []

    class Noting(Middleware):
        def after_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
            sent.append(sent_at(message.options.get(SENT), message.message_id))

    stub.broker.add_middleware(Noting())
    message = stub.broker.get_actor("shaky").send(1)
    with stub.working():
        stub.ended(message)
    found = stub.app.ledger.database.engine.connect().exec_driver_sql("SELECT created_at FROM events").scalars().all()
    assert list(set(sent)) == found
    assert len(sent) >= 2, "sent, and retried"


def test_the_outcome_of_a_job_counts_though_its_process_was_declared_dead_meanwhile(stub: Stub) -> None:
    message = stub.broker.get_actor("gated").send(1)
    with stub.working():
        wait_for(lambda: stub.app.event(message.message_id)["status"] == "working", "it runs")
        (identity,) = [p["identity"] for p in stub.app.processes() if p["kind"] == "dramatiq"]
        processes.recover_events(stub.app.ledger, identity, [])
        lost = stub.app.event(message.message_id)
        (stub.folder / "gate").touch()
        event = stub.ended(message)
    assert (lost["status"], lost["attempt"], lost["due_at"]) == ("enqueue", 2, None)
    assert (event["status"], event["result"]) == ("finish", 1)


# -- given up outside the actor


def test_a_message_that_a_middleware_skips_ends_in_error_with_the_reason(stub: Stub) -> None:
    class Picky(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            raise SkipMessage("not today")

    stub.broker.add_middleware(Picky())
    message = stub.broker.get_actor("heard").send("x")
    with stub.working():
        event = stub.ended(message)
    assert (event["status"], event["problem"]) == ("error", "discarded")
    assert [m["status"] for m in event["messages"]] == ["error"], "it never began"


def test_a_message_over_its_age_says_so(stub: Stub) -> None:
    message = stub.actor(lambda: None, actor_name="old", max_age=1).message()
    aged = message.copy(message_timestamp=message.message_timestamp - 60_000)
    stub.broker.enqueue(aged)
    assert any(isinstance(each, AgeLimit) for each in stub.broker.middleware)
    with stub.working():
        event = stub.ended(aged)
        stub.settled()
    assert last(event) == "Given up: Message age limit exceeded"
    assert stub.dead() == ["old"]


def test_a_retry_that_cannot_be_queued_does_not_leave_the_event_waiting_for_ever(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = stub.broker.get_actor("shaky").send(9)
    encode = dramatiq.Message.encode

    def broken(each: dramatiq.Message[Any]) -> bytes:
        if each.options.get("retries"):
            raise OSError("the queue is away")
        return encode(each)

    monkeypatch.setattr(dramatiq.Message, "encode", broken)
    with stub.working():
        event = stub.ended(message)
    assert [m["status"] for m in event["messages"]] == ["working", "error", "enqueue", "error"]
    assert last(event) == "Given up: Dramatiq could not put its retry on the queue"


def test_a_message_for_an_actor_that_nobody_declares_says_so_in_its_event(stub: Stub) -> None:
    message = stub.actor(lambda: None, actor_name="gone").send()
    del stub.broker.actors["gone"]
    with stub.working():
        event = stub.ended(message)
    assert (event["status"], last(event)) == ("error", "Given up: no actor is declared as 'gone'")


def test_a_message_with_the_id_of_a_tasks_job_cannot_touch_that_job(stub: Stub) -> None:
    @stub.app.worker
    def enrol(item: dict[str, Any]) -> None: ...

    task = stub.app.submit(enrol, [{"n": 1}])
    (event,) = wait_for(task.events, "the Task has its Event")
    message: dramatiq.Message[Any] = dramatiq.Message("default", "heard", ("x",), {}, {}, message_id=event["job_id"])
    with pytest.raises(IdInUse):
        stub.broker.enqueue(message)
    stub.broker.queues["default"].put(message.encode())  # by a program that records nothing
    with stub.working():
        stub.settled()
    assert stub.app.event(event["job_id"])["status"] == "enqueue"
    assert (stub.shop.lines(), stub.dead()) == ([], ["heard"])


def test_a_message_that_could_not_be_sent_is_sent_at_the_second_try(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Dramatiq's broker on RabbitMQ does by itself. Its id was taken for that of another message."""
    message, put = stub.broker.get_actor("heard").message("x"), stub.broker.queues["default"].put

    def broken(*_: Any) -> None:
        monkeypatch.undo()
        raise OSError("the broker is away")

    monkeypatch.setattr(stub.broker.queues["default"], "put", broken)
    with pytest.raises(OSError, match="away"):
        stub.broker.enqueue(message)
    stub.broker.enqueue(message)
    assert stub.broker.queues["default"].put == put
    with stub.working():
        assert stub.ended(message)["status"] == "finish"


def test_a_message_of_an_untracked_actor_under_the_id_of_the_running_one_is_refused(stub: Stub) -> None:
    """Its run would not be recorded, and the Event would wait for it for ever."""

    def sends() -> str:
        own = CurrentMessage.get_current_message()
        assert own is not None
        try:
            stub.broker.enqueue(stub.broker.get_actor("unseen").message(1).copy(message_id=own.message_id))
        except IdInUse as error:
            return str(error)
        return "sent"

    message = stub.actor(sends).send()
    with stub.working():
        event = stub.ended(message)
    assert (event["status"], event["result"][:23]) == ("finish", "unseen leaves no Events")


def test_an_id_that_is_too_long_for_the_ledger_is_performed_untracked(stub: Stub) -> None:
    stub.broker.enqueue(dramatiq.Message("default", "heard", ("x",), {}, {}, message_id="x" * 65))
    with stub.working():
        stub.settled()
    assert stub.shop.lines() == [["heard", "x"]]


def test_arguments_that_are_too_large_for_the_ledger_are_not_kept(stub: Stub) -> None:
    message = stub.broker.get_actor("heard").message("x" * 70_000)
    stub.broker.enqueue(message)
    assert stub.app.event(message.message_id)["params"] is None


# -- actors of every kind


def test_an_actor_that_is_a_class_is_tracked(stub: Stub) -> None:
    """``attach`` and the declaration raised TypeError."""

    class Enrol(dramatiq.GenericActor):
        class Meta:
            broker = stub.broker
            max_retries = 0

        def perform(self, item: Product) -> str:
            return item.sku

    made: Any = Enrol
    assert stub.app.workers["Enrol"].model is Product
    with stub.working():
        assert stub.ended(made.send({"sku": "A-1"}))["status"] == "error", "a lone message has what it was sent with"
        task = stub.app.submit("Enrol", [{"sku": "A-2"}])
        task.wait(timeout=30)
        (event,) = task.events()
        assert (event["status"], event["result"]) == ("finish", "A-2")


def test_refusals_of_actors_that_are_declared_before_are_named_at_attach(tmp_path: Path) -> None:
    """``failed_on=`` of such an actor is an error of Dramatiq: its broker does not know the option yet."""
    broker = StubBroker(fail_fast_default=False)
    raising: list[type[Exception]] = [SoldOutError, KeyError]

    def refuses(number: int) -> None:
        raise raising[number]("sold out")

    declared: dramatiq.Actor[Any, Any] = actor(refuses, broker=broker, max_retries=0)
    app = AsyncTask(**settings(tmp_path))
    attach(broker, app, failed_on=(SoldOutError,))
    app.ensure_schema()
    worker = dramatiq.Worker(broker, worker_timeout=20, worker_threads=1)
    worker.start()
    try:
        sent = [declared.send(number) for number in (0, 1)]
        listed = app.submit("refuses", [0, 1])
        listed.wait(timeout=30)
        assert [app.event(each.message_id)["status"] for each in sent] == ["failed", "error"]
        assert [event["status"] for event in listed.events()] == ["failed", "error"]
    finally:
        worker.stop()
        app.close()


@pytest.mark.parametrize("place", ["before", "after"])
def test_what_the_class_of_an_actor_raises_is_its_outcome(stub: Stub, place: str) -> None:
    class Careful(dramatiq.Actor):  # type: ignore[type-arg]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if place == "before":
                raise ValueError("before the function")
            super().__call__(*args, **kwargs)
            raise ValueError("after the function")

    made = stub.actor(lambda n: n, actor_name="careful", actor_class=Careful)
    with stub.working():
        sent, listed = made.send(1), stub.app.submit("careful", [1])
        listed.wait(timeout=30)
        for event in (stub.ended(sent), *listed.events()):
            assert (event["status"], event["messages"][-1]["message"]) == (
                "error",
                f"Error: ValueError: {place} the function",
            )


def test_an_actor_that_is_not_called_with_one_item_takes_no_list(stub: Stub) -> None:
    async def pair(item: Any, seller: str) -> None: ...

    def named(item: Any, *, seller: str) -> None: ...

    for function in (pair, named):
        name = stub.actor(function).actor_name
        assert name not in stub.app.list_workers()
        with pytest.raises(InputError, match="its parameters are"):
            stub.app.submit(name, [1])


def test_a_message_of_another_ledger_is_dropped_unrun(stub: Stub) -> None:
    """It was performed and recorded as a lone one."""
    heard = stub.broker.get_actor("heard")
    foreign = heard.message_with_options(args=("foreign",), asynctask_attempt=2)
    with stub.working():
        stub.broker.enqueue(foreign)
        stub.ended(heard.send("own"))
        stub.settled()
    assert "foreign" not in str(stub.shop.lines())
    with pytest.raises(NotFound):
        stub.app.event(foreign.message_id)


def test_a_job_of_a_list_sends_another_one_with_the_options_of_its_own_message(stub: Stub) -> None:
    """It got no Event, and was dropped as a copy that another ledger had dispatched."""
    children: list[str] = []

    def parent(word: str) -> None:
        own = CurrentMessage.get_current_message()
        assert own is not None
        child = stub.broker.get_actor("heard").message_with_options(args=(word,), **own.options)
        children.append(child.message_id)
        stub.broker.enqueue(child)

    stub.actor(parent)
    with stub.working():
        stub.app.submit("parent", ["x"]).wait(timeout=30)
        wait_for(lambda: stub.app.event(children[0])["status"] == "finish", "the child ends")
        stub.settled()
    assert stub.shop.lines() == [["heard", "x"]]
    assert stub.app.doctor() == []


def test_a_message_without_keyword_arguments_is_failed_and_those_behind_it_are_performed(stub: Stub) -> None:
    """Its consumer ended by it, and was started again three seconds later."""
    heard = stub.broker.get_actor("heard")
    none: Any = None
    broken: dramatiq.Message[Any] = dramatiq.Message("default", "heard", ("x",), none, {})
    with stub.working() as worker:
        consumer = worker.consumers["default"].consumer
        stub.broker.queues["default"].put(broken.encode())
        assert stub.ended(heard.send("own"))["status"] == "finish"
        wait_for(lambda: stub.app.event(broken.message_id)["status"] == "error", "it ends")
        assert worker.consumers["default"].consumer is consumer
        stub.settled()
    assert stub.shop.lines() == [["heard", "own"]]


# -- the ledger away


def away(*args: Any, **kwargs: Any) -> Any:
    raise LedgerUnavailable("the database does not answer")


def test_nothing_is_sent_that_has_no_event(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynctask.integrations.base.send", away)
    with pytest.raises(TrackingUnavailable, match="heard was not sent"):
        stub.broker.get_actor("heard").send("x")
    assert stub.broker.queues["default"].empty()


def test_a_worker_that_starts_without_the_ledger_waits_for_it(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """It exited with a traceback."""
    message = stub.broker.get_actor("heard").send("x")
    tried = threading.Event()

    def not_yet(process: EngineProcess) -> None:
        tried.set()
        away()

    monkeypatch.setattr(EngineProcess, "start", not_yet)
    with stub.working():
        wait_for(stub.broker.queues["default"].empty, "a thread has taken the message")
        assert tried.is_set()
        assert (stub.app.event(message.message_id)["status"], stub.shop.lines()) == ("enqueue", [])
        monkeypatch.undo()
        assert stub.ended(message)["status"] == "finish"
        stub.settled()


def test_a_worker_whose_schema_is_old_exits_with_the_command_to_run(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    def outdated(process: EngineProcess) -> None:
        raise SchemaOutdated("run asynctask db upgrade")

    monkeypatch.setattr(EngineProcess, "start", outdated)
    worker = dramatiq.Worker(stub.broker, worker_timeout=20, worker_threads=1)
    with pytest.raises(SystemExit, match="asynctask db upgrade"):
        worker.start()


def test_a_delayed_message_is_performed_when_it_is_due(stub: Stub) -> None:
    message = stub.broker.get_actor("heard").send_with_options(args=("x",), delay=timedelta(milliseconds=50))
    with stub.working():
        assert stub.ended(message)["status"] == "finish"
        stub.settled()


def test_no_thread_is_left_when_the_worker_has_stopped(stub: Stub) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with stub.working():
        stub.ended(stub.broker.get_actor("heard").send("x"))
    left = {"recorder", "heartbeat", "maintenance", "ticker"} & {t.name for t in threading.enumerate()} - before
    assert left == set()
    assert stub.app.processes() == []


def test_a_result_that_dramatiq_does_not_use_is_kept_here_without_a_warning(
    stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    """Dramatiq warned of each job of a list: "returned a value that is not None"."""
    watching = Watching()
    adds = stub.actor(lambda n: {"n": n}, actor_name="adds")
    with stub.working():
        assert stub.ended(adds.send(1))["result"] == {"n": 1}
        stub.settled()
        assert "returned a value" not in caplog.text
        stub.broker.add_middleware(watching)
        assert stub.ended(adds.send(2))["result"] == {"n": 2}
        stub.settled()
    assert watching.results == [{"n": 2}]
