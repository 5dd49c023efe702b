"""Dramatiq with the tracker attached: its own worker command, its own Redis broker, kills included."""

from __future__ import annotations

import io
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import dramatiq
import pytest
from support.charges import CHARGED, GIVEN, Charge, check_events, check_lone
from support.dramatiq_app import build, redis_broker
from support.forked import Program
from support.redis_watch import pipelines
from support.servers import RedisServer
from support.webshop import client_of
from support.world import World

from asynctask.brokers.base import Copy
from asynctask.cli.root import run
from asynctask.errors import Conflict, IdInUse, NotFound, OtherEngine
from asynctask.integrations.base import HeldAcks
from asynctask.integrations.dramatiq import _Consumer as Consumer
from asynctask.integrations.dramatiq import _release as release
from asynctask.testing import wait_for

pytestmark = [
    pytest.mark.needs_redis,
    pytest.mark.one_database(reason="what stands on the ledger is the same on each database"),
]


class Dramatiq:
    """The sending side in this process, and worker processes started by Dramatiq's own command."""

    def __init__(self, world: World, server: RedisServer) -> None:
        self.world, self._server = world, server
        self.namespace, self.broker_url = f"test-{world.folder.name}", server.url
        self.broker = redis_broker(server.url, self.namespace)
        self.app = build(self.broker, world.folder, database_url=world.store.url)
        self.app.ensure_schema()
        world.watch()

    def worker(self, *, threads: int = 2) -> Program:
        """``dramatiq -p 1 -t threads``."""
        return self.world.fork(
            "-m",
            "dramatiq",
            "support.dramatiq_main:broker",
            "-p",
            "1",
            "-t",
            str(threads),
            TEST_REDIS=self._server.url,
            TEST_NAMESPACE=self.namespace,
        )

    def send(self, actor: str, *args: Any, **options: Any) -> dramatiq.Message[Any]:
        return self.broker.get_actor(actor).send_with_options(args=args, **options)

    def event(self, message: dramatiq.Message[Any]) -> dict[str, Any]:
        return self.app.event(message.message_id)

    def ended(self, message: dramatiq.Message[Any], timeout: float = 60) -> dict[str, Any]:
        """The Event once it is terminal."""
        over = ("finish", "failed", "error", "cancelled")
        wait_for(
            lambda: self.event(message)["status"] in over,
            f"{message} ends; workers said: {self.world.said()[-3000:]}",
            timeout,
        )
        return self.event(message)

    def empty(self, queue: str = "default") -> None:
        """Waits until Dramatiq holds nothing of the queue, waiting, delayed or unacknowledged."""
        wait_for(lambda: self.broker.do_qsize(queue) == 0, "everything is acknowledged")

    def dead_letters(self, queue: str = "default") -> int:
        return int(self.broker.client.zcard(f"{self.namespace}:{queue}.XQ"))

    def performers(self) -> list[int]:
        """The pids of worker processes: those that the ledger knows."""
        return [p["pid"] for p in self.app.processes() if p["kind"] == "dramatiq"]

    def recorded(self, message: dramatiq.Message[Any]) -> int:
        """How often its Event became terminal."""
        return int(
            self.world.one(
                "SELECT COUNT(*) FROM seen_status s JOIN events e ON e.id = s.event_id WHERE e.job_id = ?"
                " AND s.became IN ('finish', 'failed', 'error', 'cancelled')",
                message.message_id,
            )
        )

    def close(self) -> None:
        self.app.close()
        self.broker.client.close()
        self.broker.client.connection_pool.disconnect()


@pytest.fixture
def engine(world: World, redis_server: RedisServer) -> Iterator[Dramatiq]:
    found = Dramatiq(world, redis_server)
    yield found
    found.close()


def said(event: dict[str, Any]) -> list[tuple[str, str, int]]:
    return [(m["status"], m["message"], m["attempt"]) for m in event["messages"]]


def test_a_message_has_its_event_before_any_worker_runs_and_its_whole_life_afterwards(engine: Dramatiq) -> None:
    message = engine.send("enroll", "A-1", kwargs={"quantity": 3})
    waiting = engine.event(message)
    assert (waiting["status"], waiting["params"], waiting["task_id"]) == (
        "enqueue",
        {"args": ["A-1"], "kwargs": {"quantity": 3}},
        None,
    )
    engine.worker()
    event = engine.ended(message)
    assert (event["status"], event["result"], event["attempt"]) == ("finish", {"enrolled": "A-1"}, 1)
    assert said(event) == [("working", "In progress", 1), ("working", "3 of A-1 in stock", 1), ("finish", "Done", 1)]
    assert event["started_at"] <= event["finished_at"]
    engine.empty()


@pytest.mark.parametrize(("kind", "text"), [("normal", "seller is not qualified"), ("own", "sold out")])
def test_a_refusal_is_failed_and_dramatiq_neither_retries_nor_buries_it(engine: Dramatiq, kind: str, text: str) -> None:
    message = engine.send("refuse", kind)
    engine.worker()
    event = engine.ended(message)
    assert (event["status"], said(event)[-1][1]) == ("failed", f"Failed: {text}")
    engine.empty()
    assert engine.dead_letters() == 0
    assert len(engine.world.shop.lines()) == 1


def test_an_error_says_that_it_waits_for_its_retry_and_the_retry_finishes_it(engine: Dramatiq) -> None:
    engine.app.start_services()  # its dispatcher must leave the retry to Dramatiq
    message = engine.send("shaky", 1)
    engine.worker()
    assert_retried(engine, message)
    assert engine.world.one("SELECT COUNT(*) FROM events WHERE items = 0") == 0, (
        "a message of Dramatiq's went into our own broker"
    )


def assert_retried(engine: Dramatiq, message: dramatiq.Message[Any]) -> None:
    """It ends with its second attempt."""
    event = engine.ended(message)
    assert (event["status"], event["result"], event["attempt"], event["retries"]) == ("finish", "through", 2, 1)
    assert said(event) == [
        ("working", "In progress", 1),
        ("error", "Error: ValueError: not yet, at 1", 1),
        ("enqueue", "Waiting for retry", 1),
        ("working", "In progress", 2),
        ("finish", "Done", 2),
    ]
    engine.empty()
    assert engine.recorded(message) == 1


def test_a_message_that_begins_as_soon_as_it_is_sent_has_the_same_life(engine: Dramatiq) -> None:
    engine.worker()
    engine.ended(engine.send("enroll", "A-0"))  # the ledger has answered the worker
    shaky, refused, enrolled = engine.send("shaky", 1), engine.send("refuse", "normal"), engine.send("enroll", "A-1")
    assert_retried(engine, shaky)
    assert [engine.ended(each)["status"] for each in (refused, enrolled)] == ["failed", "finish"]
    assert said(engine.event(enrolled)) == [
        ("working", "In progress", 1),
        ("working", "1 of A-1 in stock", 1),
        ("finish", "Done", 1),
    ]


@pytest.mark.one_of("kind", reason="each way comes up, and so do both")
@pytest.mark.parametrize("kind", ["lone", "list"])
@pytest.mark.parametrize("how", ["at once", "later", "changed"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_message_that_puts_itself_back_ends_with_its_last_run(
    engine: Dramatiq, kind: str, how: str, *, fails: bool
) -> None:
    """It ended with its first run, and the message that it had sent was dropped. Runs that it asked for are no retries."""
    engine.worker()
    event = polled(engine, kind, {"n": 1, "how": how, "fails": fails})
    number, attempt = 3 if how == "changed" else 1, 5 if fails else 3
    assert (event["status"], event["result"], event["attempt"]) == ("finish", number, attempt)
    texts = [text for _, text, _ in said(event)]
    assert texts[:5] == ["In progress", "Sent again", "In progress", "Sent again", "In progress"]
    assert texts.count("Waiting for retry") == (2 if fails else 0)
    if kind == "list":
        assert event["params"] == {"n": 1, "how": how, "fails": fails}
    assert [line[0] for line in engine.world.shop.lines()] == ["polled"] * attempt
    engine.empty()


def polled(engine: Dramatiq, kind: str, item: dict[str, Any]) -> dict[str, Any]:
    """The Event of a job of ``polled`` that has ended: of a lone one, or of the one row of a list."""
    if kind == "lone":
        return engine.ended(engine.send("polled", item))
    task = engine.app.submit("polled", [item])
    wait_for(lambda: task.progress()["done"], f"the list ends; workers said: {engine.world.said()[-3000:]}", 60)
    (row,) = task.events()
    return engine.app.event(row["job_id"])


def test_a_message_under_the_id_of_an_ended_one_is_another_run_of_it(engine: Dramatiq) -> None:
    engine.worker()
    actor = engine.broker.get_actor("enroll")
    for attempt, sku in ((1, "A"), (2, "B"), (3, "C")):
        message = actor.message(sku).copy(message_id="nightly")
        engine.broker.enqueue(message)
        event = engine.ended(message)
        assert (event["status"], event["attempt"], event["params"]) == ("finish", attempt, [sku])
        assert event["result"] == {"enrolled": sku}
        engine.empty()
    assert engine.world.shop.lines() == [["did", sku, str(n)] for n, sku in enumerate("ABC", 1)]


def test_a_message_under_the_id_of_a_row_is_refused(engine: Dramatiq) -> None:
    task = engine.app.submit("enroll_item", [{"sku": "A-1"}])
    (row,) = wait_for(task.events, "its row")
    with pytest.raises(IdInUse, match=f"of a job of Task {task.id}"):
        engine.broker.enqueue(engine.broker.get_actor("enroll").message("A").copy(message_id=row["job_id"]))
    assert engine.broker.do_qsize("default") == 0


def test_the_second_copy_of_a_message_is_skipped_and_its_outcome_recorded_once(engine: Dramatiq) -> None:
    message = engine.send("enroll", "A-1")
    with pytest.raises(IdInUse, match=f"{message.message_id} is in enqueue"):  # a program cannot send one
        engine.broker.enqueue(message)
    engine.broker.do_enqueue("default", "second", message.copy(options={"redis_message_id": "second"}).encode())
    engine.worker(threads=4)
    assert engine.ended(message)["status"] == "finish"
    engine.empty()
    assert engine.world.shop.lines() == [["did", "A-1", "1"]]
    assert engine.recorded(message) == 1


def test_a_message_over_its_time_limit_ends_as_timed_out(engine: Dramatiq) -> None:
    message = engine.send("slow")
    engine.worker()
    event = engine.ended(message)
    assert (event["status"], event["problem"], said(event)[-1][1]) == ("error", "timeout", "Timed out")


def test_a_delayed_message_waits_with_its_event_and_is_performed_when_it_is_due(engine: Dramatiq) -> None:
    message = engine.send("enroll", "A-1", delay=300)
    assert engine.event(message)["status"] == "enqueue"
    engine.worker()
    assert engine.ended(message)["status"] == "finish"
    engine.empty()


def test_current_job_works_in_an_async_actor(engine: Dramatiq) -> None:
    message = engine.send("later", 7)
    engine.worker()
    event = engine.ended(message)
    assert (event["result"], said(event)[1][1]) == (7, "from the event loop")


def test_an_actor_that_opted_out_leaves_no_event(engine: Dramatiq) -> None:
    message = engine.send("unseen", 1)
    engine.worker()
    wait_for(lambda: engine.world.shop.lines() == [["unseen", "1"]], "it is performed")
    engine.empty()
    with pytest.raises(NotFound):
        engine.event(message)


def test_a_worker_killed_in_mid_job_is_noticed_and_the_message_delivered_again_is_finished(engine: Dramatiq) -> None:
    engine.app.start_services()  # a web process: its maintenance recovers the dead, its dispatcher pushes what is due
    message = engine.send("gated", 1)
    first = engine.worker()
    wait_for(lambda: engine.event(message)["status"] == "working", "the job is seen to run")
    (pid,) = engine.performers()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: first.poll() is not None, "Dramatiq gives up when its worker died")
    engine.worker()
    wait_for(lambda: ["began", "1", "2"] in engine.world.shop.lines(), "the second attempt begins")
    engine.world.open_gate()
    event = engine.ended(message)
    assert (event["status"], event["attempt"], event["result"]) == ("finish", 2, 1)
    assert said(event) == [
        ("working", "In progress", 1),
        ("error", "Worker lost", 1),
        ("enqueue", "Waiting for retry", 1),
        ("working", "In progress", 2),
        ("finish", "Done", 2),
    ]
    engine.empty()
    assert engine.recorded(message) == 1
    assert engine.world.one("SELECT COUNT(*) FROM events WHERE items = 0") == 0, (
        "a message of Dramatiq's went into our own broker"
    )


def test_a_worker_told_to_stop_interrupts_its_job_and_the_next_one_finishes_it(engine: Dramatiq) -> None:
    message = engine.send("gated", 1)
    first = engine.worker()
    wait_for(lambda: engine.event(message)["status"] == "working", "the job is seen to run")
    first.send_signal(signal.SIGTERM)
    wait_for(lambda: first.poll() is not None, "the worker ends")
    event = engine.event(message)
    assert (event["status"], event["attempt"]) == ("enqueue", 2)
    assert said(event)[-2:] == [("error", "Interrupted", 1), ("enqueue", "Waiting for retry", 1)]
    assert engine.performers() == [], "it signed off"
    engine.world.open_gate()
    engine.worker()
    assert engine.ended(message)["status"] == "finish"


def test_nothing_is_acknowledged_before_its_outcome_is_committed(engine: Dramatiq, tmp_path: Path) -> None:
    """The ledger is locked while the job ends: Dramatiq must still hold the message, and both end when it is free."""
    message = engine.send("gated", 1)
    engine.worker()
    wait_for(lambda: engine.event(message)["status"] == "working", "the job is seen to run")
    with engine.world.store.locked():
        engine.world.open_gate()
        wait_for(lambda: ["did", "1", "1"] in engine.world.shop.lines(), "the job ends")
        assert engine.broker.do_qsize("default") > 0
    assert engine.ended(message)["status"] == "finish"
    engine.empty()


@pytest.mark.parametrize("sender", ["tracked", "a program that knows nothing of us"])
def test_a_dead_message_is_queued_again_in_dramatiq_under_its_id(engine: Dramatiq, sender: str) -> None:
    actor = engine.broker.get_actor("shaky")
    message = actor.message_with_options(args=(3,))
    if sender == "tracked":
        engine.broker.enqueue(message)
    else:
        foreign = redis_broker(engine.broker_url, engine.namespace)
        foreign.enqueue(message)
        foreign.client.connection_pool.disconnect()
    engine.worker()
    wait_for(
        lambda: engine.world.sql("SELECT id FROM events"), f"its Event is made; workers said: {engine.world.said()}", 60
    )
    assert engine.ended(message)["status"] == "error"
    answer = client_of(engine.app).post("/api/dead/restart", json={"keys": [message.message_id]})
    assert answer.json == {"done": 1, "skipped": []}
    wait_for(lambda: engine.event(message)["status"] == "finish", f"it runs again: {engine.world.said()[-3000:]}")
    event = engine.event(message)
    assert (event["attempt"], event["result"]) == (4, "through")
    assert [m["message"] for m in event["messages"]][-3:] == ["Retried", "In progress", "Done"]
    assert not engine.world.sql("SELECT job_id FROM events WHERE items = 0"), "nothing of it comes to the own queues"
    engine.empty()


def test_a_message_of_before_its_queue_was_named_is_not_restarted(engine: Dramatiq) -> None:
    """An Event of an earlier release has Dramatiq's own name of the queue: it would wait in ours for ever."""
    message = engine.send("shaky", 9)
    engine.worker()
    engine.ended(message)
    engine.world.sql("UPDATE events SET queue = 'default'")
    before, job_id = engine.event(message), message.message_id
    with pytest.raises(OtherEngine, match=r"one of dramatiq.*send it again by its actor's send\(\)") as refused:
        engine.app.operations.act("dead", "restart", [job_id])
    assert (refused.value.code, refused.value.status) == ("other_engine", 409)
    named_two = engine.app.operations.act("dead", "restart", [job_id, "nothing"])
    assert (named_two.done, "dramatiq" in str(named_two.skipped[job_id])) == (0, True)
    all_dead = engine.app.operations.act_on_all("dead", "restart")
    assert (all_dead.done, ["dramatiq" in str(why) for why in all_dead.skipped.values()]) == (0, [True])
    assert engine.app.operations.job(job_id)["actions"] == ["dismiss"]
    said_to_people = io.StringIO()
    url = ["--database-url", engine.world.store.url, "--data-dir", str(engine.world.folder / "data")]
    assert run([*url, "dead", "restart", job_id], stdout=io.StringIO(), stderr=said_to_people) != 0
    assert "dramatiq" in said_to_people.getvalue()
    assert engine.event(message) == before, "nothing was changed"


def deleted(client: Any, message: dramatiq.Message[Any]) -> Any:
    """The answer to a delete, once it is not refused."""
    answer = client.post(f"/api/jobs/{message.message_id}/delete")
    return answer if answer.status_code == 200 else None


def test_a_waiting_message_is_cancelled_while_nobody_can_have_begun_it(engine: Dramatiq) -> None:
    """Not in its first half second: a worker that starts would begin it by its message, without a look at the ledger."""
    client, never = client_of(engine.app), engine.send("heard", "never")
    engine.world.sql("UPDATE events SET created_at = created_at + 3600000000")
    refused = client.post(f"/api/jobs/{never.message_id}/delete")
    assert (refused.status_code, refused.json["detail"].partition(":")[0]) == (
        409, "it was sent just now, and a worker of dramatiq that starts may begin it",
    )  # fmt: skip
    engine.world.sql("UPDATE events SET created_at = created_at - 3600000000")
    answer = wait_for(lambda: deleted(client, never), "it is old enough")
    assert answer.json["status"] == "cancelled"
    engine.worker(threads=1)
    runs = engine.send("gated", 0)
    wait_for(lambda: ["began", "0", "1"] in engine.world.shop.lines(), "it begins")
    waits = engine.send("heard", "then")
    with pytest.raises(Conflict, match="dramatiq cannot take back"):
        engine.app.operations.act_on_job(waits.message_id, "delete")
    (engine.world.folder / "gate").touch()
    assert (engine.ended(runs)["status"], engine.ended(waits)["status"]) == ("finish", "finish")
    assert ["heard", "never"] not in engine.world.shop.lines()
    engine.empty()


# -- Tasks


def items(count: int) -> list[dict[str, Any]]:
    return [{"sku": f"A-{n}", "quantity": 1 + n % 3} for n in range(count)]


def test_a_list_for_an_actor_is_accounted_for(engine: Dramatiq) -> None:
    engine.worker()
    actor = engine.broker.get_actor("enroll_item")
    task = engine.app.submit(actor, [*items(60), {"sku": "bad-1"}, {"sku": "x", "quantity": 0}])
    task.wait(timeout=120)
    progress = task.progress()
    assert (progress["counts"]["finish"], progress["counts"]["failed"], progress["split"]["rejected"]) == (60, 1, 1)
    assert (progress["state"], progress["worker"]) == ("finished", "enroll_item")
    assert Counter(sku for _, sku, _ in engine.world.shop.lines()) == {f"A-{n}": 1 for n in range(60)} | {"bad-1": 1}
    assert engine.app.doctor() == []


def test_a_job_of_a_task_is_retried_as_dramatiq_says_and_waits_in_the_ledger(engine: Dramatiq) -> None:
    engine.worker()
    task = engine.app.submit("shaky", [1, 9])
    task.wait(timeout=60)
    assert [(e["status"], e["attempt"]) for e in task.events()] == [("finish", 2), ("error", 3)]
    assert Counter(attempt for _, attempt in engine.world.shop.lines()) == {"1": 2, "2": 2, "3": 1}
    engine.empty()
    assert engine.app.doctor() == []


def test_a_job_of_a_task_that_ends_its_process_at_once_ends_as_poison(engine: Dramatiq) -> None:
    """Redis does not say that it was delivered before, and nobody has seen it begin: so it could go on for ever.

    Taken out: the mark on what was in flight when a process of Dramatiq's died.
    """
    engine.app.start_services()
    worker = engine.worker(threads=1)
    task = engine.app.submit("deadly", [1, 0])

    def is_over() -> bool:
        nonlocal worker
        if worker.poll() is not None:  # Dramatiq ends with its process; whatever supervises it starts it anew
            worker = engine.worker(threads=1)
        return bool(task.progress()["done"])

    wait_for(is_over, "it is over", 120)
    poison, well = sorted(task.events(), key=lambda event: event["params"], reverse=True)
    assert (poison["status"], poison["problem"], well["status"]) == ("error", "poison", "finish")
    assert len([line for line in engine.world.shop.lines() if line == ["began", "1"]]) <= 5
    assert engine.app.doctor() == []


def test_jobs_that_the_broker_lost_are_given_again(engine: Dramatiq) -> None:
    """Nobody lists what Dramatiq holds: its queue is empty and no worker is busy, on two looks."""
    worker = engine.worker()
    wait_for(lambda: any(each["kind"] == "dramatiq" for each in engine.app.processes()), "it has registered")
    worker.send_signal(signal.SIGSTOP)  # what is dispatched for its threads stays in the queue
    task = engine.app.submit("gated", list(range(4)))
    wait_for(lambda: task.progress()["control"]["in_flight"] > 0, "some are dispatched")
    worker.kill()
    worker.wait()
    engine.broker.client.flushall()
    (engine.world.folder / "gate").touch()
    engine.worker()
    task.wait(timeout=120)
    assert task.progress()["counts"]["finish"] == 4
    assert engine.app.doctor() == []


def test_jobs_of_a_list_go_to_redis_ten_in_a_round_trip(engine: Dramatiq, monkeypatch: pytest.MonkeyPatch) -> None:
    trips = pipelines(monkeypatch)
    queue = engine.app.workers["enroll"].queue
    payload = json.dumps({"class": "enroll", "args": ["A"]})
    engine.app.engines["dramatiq"].push([Copy(f"job-{n}", 1, queue, payload, task_id=1) for n in range(25)])
    assert trips == [10, 10, 5]
    assert engine.app.engines["dramatiq"].waiting([queue]) == {queue: 25}
    consumer = engine.broker.consume("default", prefetch=25)
    got = [message for _ in range(25) if (message := next(consumer)) is not None]
    assert [message.message_id for message in got] == [f"job-{n}" for n in range(25)]
    for message in got:
        consumer.ack(message)
    engine.empty()
    consumer.close()


def test_messages_whose_outcomes_are_committed_together_are_acknowledged_together(
    engine: Dramatiq, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(12):
        engine.send("enroll", f"A-{n}")
    acks = HeldAcks(release)
    server = cast(Any, engine.app.engines["dramatiq"]).server
    events = SimpleNamespace(acks=acks, server=server, expect=lambda message: None)
    consumer: Any = Consumer(engine.broker.consumer_class(engine.broker, "default", 12, 0), cast(Any, events))
    got = [message for _ in range(12) if (message := next(consumer)) is not None]
    held = engine.broker.do_qsize("default")
    for message in got:
        acks.open(message.message_id)
        consumer.ack(message)
    assert engine.broker.do_qsize("default") == held
    trips = pipelines(monkeypatch)
    for message in got:
        acks.committed(message.message_id)
    acks.start()
    engine.empty()
    assert trips == [12]
    acks.stop()


def test_a_thread_goes_on_before_the_commit_and_the_acknowledgement_does_not(engine: Dramatiq) -> None:
    """With one thread, and no Event to be written: both messages are performed, and the broker still holds both."""
    sent = [engine.send("enroll", f"A-{n}") for n in range(2)]
    with engine.world.store.locked():
        worker = engine.worker(threads=1)
        wait_for(lambda: len(engine.world.shop.lines()) == 2, "both are performed")
        held = list(engine.broker.client.scan_iter("*__acks__*"))
        assert sum(engine.broker.client.scard(key) for key in held) == 2
    for each in sent:
        assert engine.ended(each)["status"] == "finish"
    wait_for(lambda: not list(engine.broker.client.scan_iter("*__acks__*")), "both are acknowledged")
    worker.terminate()
    assert worker.wait(60) == 0


def test_items_reach_the_worker_as_they_were_given(engine: Dramatiq) -> None:
    """Without the input kept, of a ``model_dump`` for example: stars for the password, cents times 100."""
    engine.worker()
    task = engine.app.submit("charge", [GIVEN, Charge(**GIVEN)])
    (refused,) = task.rejects()
    assert (refused["row"], refused["errors"][0]["column"]) == (2, "price")
    task.wait(timeout=60)
    check_events(task.events())
    lone = engine.send("charge", GIVEN)
    check_lone(engine.event(lone))


def test_people_see_no_secret_of_a_message_that_is_put_back(engine: Dramatiq) -> None:
    engine.worker()
    event = engine.ended(engine.send("recharged", GIVEN))
    assert (event["status"], event["result"], event["attempt"]) == ("finish", CHARGED, 3)
    assert GIVEN["password"] not in str(event)


def test_a_message_that_could_not_be_put_back_ends_with_its_run(engine: Dramatiq) -> None:
    """Its Event waited for ever for a run that the broker had not taken."""
    engine.worker()
    event = engine.ended(engine.send("unsent", "a"))
    assert (event["status"], event["attempt"], event["params"]) == ("finish", 1, ["a"])


def test_the_event_of_a_message_names_the_queue_that_it_was_sent_to(engine: Dramatiq) -> None:
    """It named that of the actor, where a person's restart sent it to."""
    actor = engine.broker.get_actor("enroll")
    low = f"{actor.queue_name}-low"
    engine.broker.declare_queue(low)
    message = engine.broker.enqueue(actor.message("a").copy(queue_name=low))
    assert engine.event(message)["queue"] == f"dramatiq/{low}"
    later = engine.broker.enqueue(actor.message("a").copy(queue_name=low), delay=3_600_000)
    assert engine.event(later)["queue"] == f"dramatiq/{low}"


def test_actors_that_no_worker_has_hold_up_no_list(engine: Dramatiq) -> None:
    """Dramatiq's worker moves their messages to its dead letters."""
    for n in range(40):
        engine.broker.enqueue(dramatiq.Message("default", "theirs", (n,), {}, {}))
    engine.worker(threads=2)
    task = engine.app.submit("enroll_item", [{"sku": "A-1"}])
    task.wait(timeout=60)
    assert task.progress()["counts"]["finish"] == 1
    assert engine.dead_letters() == 40
