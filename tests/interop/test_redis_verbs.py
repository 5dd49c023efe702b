"""Sidekiq's verbs of an application: what untracked workers and those elsewhere put into Redis, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.redis_ruby import Desk
from support.redis_watch import Fixed, Monitor
from support.redis_world import RedisWorld

from asynctask import AsyncTask, CurrentJob, current_job
from asynctask.client import RemoteWorker, Symbol
from asynctask.errors import ConfigError, InputError
from asynctask.pushing import BATCH
from asynctask.sidekiq.activejob import OLD_WRAPPER, unwrap
from asynctask.testing import wait_for
from asynctask.worker import Worker

pytestmark = pytest.mark.one_redis("what the broker and the client do on each is proved by their own tests")

NOW = 1_763_700_000_123_456
TIMES = '"created_at":1763700000.123456,"enqueued_at":1763700000.123456'


@pytest.fixture
def unopened(world: RedisWorld) -> AsyncTask:
    """An application whose clock stands and whose ids count."""
    fixed = Fixed(NOW)
    return world.app(clock=fixed, ids=fixed)


@pytest.fixture
def app(unopened: AsyncTask) -> AsyncTask:
    """The same with its ledger, where the database's clock stands too."""
    unopened.ledger.time.set(NOW)
    return unopened


@pytest.fixture
def plain(app: AsyncTask) -> Worker:
    worker: Worker = app.worker(name="Plain", use_task_event=False)(lambda *args: None)
    return worker


def jobs(world: RedisWorld, queue: str = "default") -> list[dict[str, Any]]:
    return [json.loads(text) for text in world.waiting(queue)]


def schedule(world: RedisWorld) -> list[tuple[dict[str, Any], float]]:
    return [(json.loads(text), at) for text, at in world.raw.zrange("schedule", 0, -1, withscores=True)]


def nothing_is_there(world: RedisWorld) -> bool:
    return not [key for key in world.raw.scan_iter() if not key.startswith(b"asynctask:")]


# -- untracked workers


def test_a_push_is_the_two_commands_that_ruby_sends(world: RedisWorld, plain: Worker) -> None:
    with Monitor(world.server) as monitor:
        jid = plain.perform_async(1, "é/</script>", {"a": 1e20, "b": [None, True]})
        commands = monitor.commands()
    text = (
        '{"retry":true,"queue":"default","class":"Plain","args":[1,"é/</script>",{"a":1.0e+20,"b":[null,true]}],'
        f'"jid":"{jid}",{TIMES}}}'
    )
    assert commands == [["SADD", "queues", "default"], ["LPUSH", "queue:default", text]]


def test_options_of_the_decorator_and_of_set_are_members_as_sidekiq_has_them(
    world: RedisWorld, app: AsyncTask, desk: Desk
) -> None:
    worker = app.worker(
        lambda: None,
        name="Plain",
        use_task_event=False,
        queue="low",
        retry=7,
        tags=("a", "b"),
        dead=False,
        members={"tenant": 5, "kept": [1.5]},
    )
    worker.perform_async()
    said = worker.set(queue="high", retry=False, retry_for=90, retry_queue="slow", backtrace=3, members={"tenant": 6})
    said.set(tags=["c"]).perform_async()
    ruby = desk(
        "answer(%w[low high].map { |name| Sidekiq::Queue.new(name).map { |job| [job.item, job.tags] } })",
    )
    ((first, tags),), ((second, other_tags),) = ruby
    times = ("jid", "created_at", "enqueued_at")
    assert {name: value for name, value in first.items() if name not in times} == {
        "retry": 7,
        "queue": "low",
        "class": "Plain",
        "args": [],
        "tags": ["a", "b"],
        "dead": False,
        "tenant": 5,
        "kept": [1.5],
    }
    assert {name: value for name, value in second.items() if name not in times} == {
        "retry": False,
        "queue": "high",
        "class": "Plain",
        "args": [],
        "tags": ["c"],
        "dead": False,
        "tenant": 6,
        "kept": [1.5],
        "retry_for": 90,
        "retry_queue": "slow",
        "backtrace": 3,
    }
    assert (tags, other_tags) == (["a", "b"], ["c"])


@pytest.mark.parametrize(("tracked", "retries"), [(True, 3), (False, 25)])
def test_a_worker_that_names_no_retries_has_those_of_its_kind(app: AsyncTask, tracked: bool, retries: int) -> None:
    worker = app.worker(lambda: None, name="any", use_task_event=tracked)
    assert worker.max_retries == retries


@pytest.mark.parametrize(
    ("push", "at"),
    [
        (lambda worker: worker.perform_in(60, 1), 1_763_700_060.123456),
        (lambda worker: worker.perform_in(timedelta(minutes=1), 1), 1_763_700_060.123456),
        (lambda worker: worker.perform_at(1_763_800_000.5, 1), 1_763_800_000.5),
        (lambda worker: worker.perform_at(datetime(2025, 11, 22, 10, 0, tzinfo=UTC), 1), 1_763_805_600.0),
        (lambda worker: worker.set(wait=5).perform_async(1), 1_763_700_005.123456),
        (lambda worker: worker.set(wait_until=1_763_800_000).perform_async(1), 1_763_800_000.0),
        (lambda worker: worker.set(wait=5).perform_in(60, 1), 1_763_700_060.123456),
        (lambda worker: worker.set(wait=5).perform_bulk([1])[0], 1_763_700_005.123456),
        (lambda worker: worker.set(wait=5).set(wait=None).perform_async(1), None),
        (lambda worker: worker.perform_in(0, 1), None),
        (lambda worker: worker.perform_in(-5, 1), None),
        (lambda worker: worker.perform_at(1_763_600_000, 1), None),
    ],
)
def test_what_is_due_later_waits_in_the_schedule_and_what_is_over_runs_now(
    world: RedisWorld, plain: Worker, push: Callable[[Worker], str | None], at: float | None
) -> None:
    jid = push(plain)
    if at is None:
        assert [job["jid"] for job in jobs(world)] == [jid]
        assert schedule(world) == []
    else:
        job = {"retry": True, "queue": "default", "class": "Plain", "args": [1], "jid": jid, "created_at": NOW / 1_000_000}
        assert schedule(world) == [(job, at)]
        assert jobs(world) == []


def test_a_bulk_goes_a_thousand_at_a_time_while_its_items_are_gone_through(world: RedisWorld, plain: Worker) -> None:
    there: list[int] = []

    def items() -> Iterator[Any]:
        for n in range(2 * BATCH + 10):
            if n % BATCH == 0:
                there.append(world.raw.llen("queue:default"))
            yield n if n % 2 else [n, "two"]

    jids = plain.perform_bulk(items())
    assert there == [0, BATCH, 2 * BATCH]
    found = jobs(world)
    assert [job["args"] for job in found] == [[n] if n % 2 else [n, "two"] for n in range(2 * BATCH + 10)]
    assert [job["jid"] for job in found] == jids
    assert len(set(jids)) == len(jids)


def test_each_slice_of_a_bulk_is_one_round_trip(world: RedisWorld, plain: Worker) -> None:
    with Monitor(world.server) as monitor:
        plain.perform_bulk(range(BATCH + 1))
        pushes = [command for command in monitor.commands() if command[0] == "LPUSH"]
    assert [len(command) - 2 for command in pushes] == [BATCH, 1]


def test_a_wrong_job_of_a_bulk_leaves_its_slice_out_and_those_before_it_in(world: RedisWorld, plain: Worker) -> None:
    items: list[Any] = [*range(BATCH + 5), object()]
    with pytest.raises(InputError, match=r"args\[0\]: object is no JSON type"):
        plain.perform_bulk(items)
    assert len(jobs(world)) == BATCH


class Text(str):
    """A text that would come back as another type."""

    __slots__ = ()


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        (object(), "object is no JSON type"),
        ({"a": {1: 2}}, "the key 1 is no text: send str(key)"),
        ([(1, 2)], "tuple is no JSON type: send a list"),
        (Text("a"), "Text is no JSON type"),
        (b"a", "send base64 text"),
        (float("nan"), "nan has no form in JSON"),
        (datetime(2026, 1, 1, tzinfo=UTC), "datetime is no JSON type"),
        ("\ud800", "half a character"),
    ],
)
def test_arguments_that_would_not_come_back_as_they_went_are_refused(
    world: RedisWorld, plain: Worker, argument: Any, told: str
) -> None:
    for push in (lambda: plain.perform_async(argument), lambda: plain.perform_bulk([1, argument])):
        with pytest.raises(InputError) as caught:
            push()
        assert told in str(caught.value)
    assert nothing_is_there(world)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"que": "low"}, ConfigError, "no such job option: que (did you mean queue?)"),
        ({"colour": 1}, ConfigError, "no such job option: colour; there are backtrace, dead, members, priority, queue"),
        ({"at": 5}, ConfigError, "no such job option: at"),
        ({"wait": 5, "wait_until": 6}, ConfigError, "give one of them"),
        ({"wait": "soon"}, InputError, "'soon' is no time"),
        ({"wait": 10**12}, InputError, "too far away"),
        ({"wait_until": datetime(2026, 1, 1)}, InputError, "give an aware datetime"),  # noqa: DTZ001
        ({"queue": "a b"}, InputError, "queue must be"),
        ({"queue": None}, InputError, "queue must be"),
        ({"retry": "5"}, InputError, "retry must be"),
        ({"retry": -1}, InputError, "retry must be"),
        ({"retry_for": 0}, InputError, "retry_for must be seconds"),
        ({"retry_for": 10**10}, InputError, "retry_for must be seconds"),
        ({"retry_for": True}, InputError, "retry_for must be seconds"),
        ({"retry_queue": ""}, InputError, "retry_queue must be"),
        ({"dead": 1}, InputError, "dead must be True or False"),
        ({"backtrace": "all"}, InputError, "backtrace must be"),
        ({"backtrace": -1}, InputError, "backtrace must be"),
        ({"tags": "a"}, InputError, "tags must be a list"),
        ({"tags": ["x" * 300]}, InputError, "tags must be a list"),
        ({"tags": ["x"] * 51}, InputError, "tags must be a list"),
        ({"members": {"jid": "x"}}, InputError, "members may not hold jid"),
        ({"members": {"retry": 1}}, InputError, "members may not hold retry"),
        ({"members": {"when": NOW, "what": {1}}}, InputError, "members.what: set is no JSON type"),
        ({"members": [1]}, InputError, "members must be a dict"),
    ],
)
def test_options_that_cannot_be_are_refused_where_they_are_said(
    world: RedisWorld, app: AsyncTask, plain: Worker, options: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error) as caught:
        plain.set(**options)
    assert told in str(caught.value)
    if "wait" not in str(options) and "at" not in options:
        with pytest.raises(ConfigError) as refused:
            app.worker(lambda: None, name="Other", use_task_event=False, **options)
        assert told.partition(";")[0] in str(refused.value)
        assert "Other" not in app.workers
    assert nothing_is_there(world)


@pytest.mark.parametrize("option", [{"tags": ["a"]}, {"dead": False}, {"retry_queue": "low"}, {"members": {}}])
def test_what_means_nothing_for_a_tracked_worker_is_refused_with_the_reason(app: AsyncTask, option: dict[str, Any]) -> None:
    tracked = app.worker(lambda: None, name="tracked")
    anyhow: Any = app
    for say in (lambda: tracked.set(**option), lambda: anyhow.worker(lambda: None, name="other", **option)):
        with pytest.raises(
            ConfigError, match=r"is tracked, so .* would mean nothing: its retries and its end are in the ledger"
        ):
            say()


def test_a_tracked_job_that_waits_is_in_the_ledger_and_its_bulk_is_all_or_none(world: RedisWorld, app: AsyncTask) -> None:
    tracked = app.worker(lambda n: None, name="tracked")
    jid = tracked.set(wait=timedelta(minutes=1)).perform_async(1)
    assert app.event(str(jid))["due_at"] == "2025-11-21T04:41:00.123Z"
    with pytest.raises(InputError, match="cannot be kept as JSON"):
        tracked.perform_bulk(n if n < BATCH else object() for n in range(BATCH + 1))
    found = tracked.perform_bulk(n for n in range(3))
    with app.ledger.database.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM events").scalar() == 4
    assert len(found) == 3
    assert nothing_is_there(world)


def test_a_task_cannot_wait(app: AsyncTask) -> None:
    tracked = app.worker(lambda item: None, name="tracked")
    with pytest.raises(InputError, match="leave wait out"):
        app.submit(tracked.set(wait=5), [{"n": 1}])


def test_what_was_said_of_a_job_counts_when_it_fails(world: RedisWorld) -> None:
    app = world.app()

    @app.worker(use_task_event=False, retry_queue="later", backtrace=2, tags=["a"])
    def bad(n: int) -> None:
        raise ValueError("wrong")

    with world.working(app) as launcher:
        bad.perform_async(1)
        bad.set(retry=0, dead=False).perform_async(2)
        wait_for(lambda: launcher.performer.performed == 2 and world.fetched() == 0, "both have failed")
    (retried,) = [json.loads(text) for text in world.members("retry")]
    assert (retried["args"], retried["queue"], retried["retry"], retried["tags"]) == ([1], "later", True, ["a"])
    assert retried["error_backtrace"]
    assert world.members("dead") == []


# -- the client middleware


def asking(app: AsyncTask, ask: Callable[[CurrentJob], Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Adds a middleware that stops a job where ``ask`` gives False; returns what it is shown."""
    seen: list[tuple[str, str, dict[str, Any]]] = []

    def middleware(worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        seen.append((worker.name, queue, dict(job.payload)))
        return None if ask(job) is False else call_next()

    app.client_middleware.add(middleware)
    return seen


def test_the_client_middleware_sees_changes_and_stops_jobs_as_rubys_does(
    world: RedisWorld, app: AsyncTask, plain: Worker
) -> None:
    def ask(job: CurrentJob) -> bool:
        job.payload["args"] = [str(arg) for arg in job.payload["args"]]
        job.payload["tenant"] = 7
        job.payload["queue"] = "other" if job.payload["args"] == ["2"] else "default"
        return bool(job.payload["args"] != ["3"])

    seen = asking(app, ask)
    first, second, third = plain.perform_bulk([1, 2, 3])
    later = plain.perform_in(60, datetime(2026, 1, 1, tzinfo=UTC))
    assert third is None
    assert [(job["jid"], job["args"], job["tenant"]) for job in jobs(world)] == [(first, ["1"], 7)]
    assert [(job["jid"], job["queue"]) for job in jobs(world, "other")] == [(second, "other")]
    ((waiting, at),) = schedule(world)
    assert (waiting["jid"], waiting["args"], at) == (later, ["2026-01-01 00:00:00+00:00"], 1_763_700_060.123456)
    assert [(name, queue, payload.get("at")) for name, queue, payload in seen] == [
        *[("Plain", "default", None)] * 3,
        ("Plain", "default", 1_763_700_060.123456),
    ]


@pytest.mark.parametrize("spoil", [{"args": None}, {"class": 7}, {"queue": ""}, {"x": object()}, {"args": [object()]}])
def test_what_a_middleware_spoils_is_refused_as_its_fault(
    world: RedisWorld, app: AsyncTask, plain: Worker, spoil: dict[str, Any]
) -> None:
    asking(app, lambda job: job.payload.update(spoil))
    elsewhere = app.remote_worker("Hard")
    for push in (plain.perform_async, elsewhere.perform_async, lambda: elsewhere.perform_bulk([[]])):
        with pytest.raises(InputError, match="a client middleware left"):
            push()
    assert nothing_is_there(world)


# -- on a database


def test_on_a_database_the_same_options_travel_and_arguments_are_what_json_can_say(tmp_path: Path) -> None:
    app = AsyncTask(environ={}, database_url=f"sqlite:///{tmp_path}/a.db", data_dir=str(tmp_path / "data"))
    found: list[Any] = []

    @app.worker(use_task_event=False, tags=["a"])
    def plain(*args: Any) -> None:
        found.append((args, current_job().payload["tags"]))

    plain.perform_async((1, 2), datetime(2026, 1, 1, tzinfo=UTC))
    plain.set(retry=0, retry_queue="slow").perform_in(3_600, 2)
    with pytest.raises(InputError, match="cannot be kept as JSON"):
        plain.perform_async({1, 2})
    (entry,) = app.operations.search("scheduled", '"retry_queue":"slow"')["entries"]
    assert (entry["args"], entry["tracked"]) == ([2], False)
    launcher = app.launcher(concurrency=1, shutdown_s=5.0)
    launcher.start()
    try:
        wait_for(lambda: found, "it is performed")
    finally:
        launcher.stop()
        app.close()
    assert found == [(([1, 2], "2026-01-01T00:00:00+00:00"), ["a"])]


def test_without_redis_there_is_no_worker_elsewhere(tmp_path: Path) -> None:
    app = AsyncTask(environ={}, database_url=f"sqlite:///{tmp_path}/a.db")
    with pytest.raises(ConfigError, match="through Redis alone: set broker_url"):
        app.remote_worker("Hard")
    assert not (tmp_path / "a.db").exists()


# -- workers elsewhere


def test_ruby_reads_what_is_pushed_for_its_worker_and_no_ledger_is_opened(
    world: RedisWorld, tmp_path: Path, desk: Desk
) -> None:
    fixed = Fixed(NOW)
    app = world.app(clock=fixed, ids=fixed, database_url=f"sqlite:///{tmp_path}/none.db")
    sleeper = app.remote_worker("SleepWorker", queue="slow", retry=False, tags=["a"], members={"unique_for": 60})
    jid = sleeper.perform_async(1, "é")
    later = sleeper.set(wait=60, retry=3).perform_async(2)
    many = sleeper.set(queue="many").perform_bulk([n] for n in range(1_500))
    found = desk(
        """
        job = Sidekiq::Queue.new("slow").first
        entry = Sidekiq::ScheduledSet.new.first
        answer("item" => job.item.slice("class", "args", "jid", "retry", "queue", "tags", "unique_for"),
               "size" => Sidekiq::Queue.new("many").size, "last" => Sidekiq::Queue.new("many").first.args,
               "later" => [entry.jid, entry.at.to_f, entry.args, entry["retry"]])
        """,
    )
    assert found == {
        "item": {
            "class": "SleepWorker",
            "args": [1, "é"],
            "jid": jid,
            "retry": False,
            "queue": "slow",
            "tags": ["a"],
            "unique_for": 60,
        },
        "size": 1_500,
        "last": [1_499],
        "later": [later, 1_763_700_060.123456, [2], 3],
    }
    assert len(set(many)) == 1_500
    assert list(tmp_path.glob("*.db")) == []


def test_the_client_middleware_is_asked_for_workers_elsewhere_too(world: RedisWorld, app: AsyncTask) -> None:
    def ask(job: CurrentJob) -> bool:
        job.payload["tenant"] = 7
        return bool(job.payload["args"] != [2])

    seen = asking(app, ask)
    hard = app.remote_worker("Hard")
    jids = hard.perform_bulk([[1], [2], [3]])
    assert (hard.perform_async(2), jids[1]) == (None, None)
    app.remote_worker("Mail", active_job=True).perform_in(60, 1)
    assert [(job["args"], job["jid"], job["tenant"]) for job in jobs(world)] == [([1], jids[0], 7), ([3], jids[2], 7)]
    assert [name for name, _, _ in seen] == ["Hard"] * 4 + ["Mail"]
    assert seen[-1][2]["at"] == 1_763_700_060.123456


FORKS = """
import os, sys
from asynctask import AsyncTask

app = AsyncTask(environ={}, broker_url=sys.argv[1])
hard = app.remote_worker("Hard")
hard.perform_async("first")
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    hard.perform_async("parent")
    app.close()
    hard.perform_async("closed")
    app.close()
else:
    hard.perform_async("child")
"""


def test_a_closed_application_and_a_forked_child_push_on_connections_of_their_own(world: RedisWorld) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, world.server.url], cwd=world.folder, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [job["args"] for job in jobs(world)] == [["first"], ["child"], ["parent"], ["closed"]]


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"unique_for": 60}, ConfigError, "no such job option: unique_for"),
        ({"retry_qeue": "a"}, ConfigError, "did you mean retry_queue?"),
        ({"priority": 1}, ConfigError, "no such job option: priority"),
        ({"queue": ""}, InputError, "queue must be"),
        ({"queue": "sq|mine"}, InputError, "queue must be"),
        ({"log_level": "loud"}, InputError, "log_level must be one of"),
        ({"members": {"wrapped": "A"}}, InputError, "members may not hold wrapped"),
    ],
)
def test_options_of_a_worker_elsewhere_are_checked_too(
    app: AsyncTask, options: dict[str, Any], error: type[Exception], told: str
) -> None:
    anyhow: Any = app
    say: Callable[[], Any]
    for say in (lambda: anyhow.remote_worker("Hard", **options), lambda: anyhow.remote_worker("Hard").set(**options)):
        with pytest.raises(error) as caught:
            say()
        assert told in str(caught.value)


def test_arguments_by_name_are_for_active_job_alone(world: RedisWorld, app: AsyncTask) -> None:
    with pytest.raises(InputError, match="cannot be given to, at by name"):
        app.remote_worker("Hard").perform_async(1, to="b", at="c")
    assert nothing_is_there(world)


# -- ActiveJob


def test_a_job_of_active_job_is_the_wrapper_that_rails_reads(world: RedisWorld, app: AsyncTask, desk: Desk) -> None:
    mail = app.remote_worker("Shop::MailJob", queue="mail", active_job=True, retry=5)
    jid = mail.perform_async(1, Symbol("now"), {"a": [None]}, to="b@example.com", when=datetime(2026, 1, 1, tzinfo=UTC))
    later = mail.perform_in(60, 2)
    found = desk(
        """
        job = Sidekiq::Queue.new("mail").first
        answer("shown" => job.display_class, "args" => job.display_args, "item" => job.item,
               "later" => Sidekiq::ScheduledSet.new.map { |e| [e.jid, e.at.to_f, e.display_class, e.item["args"][0]] })
        """,
    )
    item = found["item"]
    assert (found["shown"], item["class"], item["wrapped"]) == ("Shop::MailJob", OLD_WRAPPER, "Shop::MailJob")
    assert (item["jid"], item["queue"], item["retry"]) == (jid, "mail", 5)
    (data,) = item["args"]
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", data["job_id"])
    assert (data["queue_name"], data["enqueued_at"], data["executions"]) == ("mail", "2025-11-21T04:40:00.123Z", 0)
    assert data["arguments"] == [
        1,
        {"_aj_serialized": "ActiveJob::Serializers::SymbolSerializer", "value": "now"},
        {"a": [None], "_aj_symbol_keys": []},
        {
            "to": "b@example.com",
            "when": {"_aj_serialized": "ActiveJob::Serializers::TimeSerializer", "value": "2026-01-01T00:00:00.000000000Z"},
            "_aj_ruby2_keywords": ["to", "when"],
        },
    ]
    ((later_jid, at, shown, later_data),) = found["later"]
    assert (later_jid, at, shown) == (later, 1_763_700_060.123456, "Shop::MailJob")
    assert later_data["scheduled_at"] == "2025-11-21T04:41:00.123Z"
    assert later_data["job_id"] != data["job_id"]


def test_many_jobs_of_active_job_go_together_each_with_an_id_of_its_own(world: RedisWorld, app: AsyncTask) -> None:
    mail = app.remote_worker("MailJob", active_job=True)
    assert len(mail.perform_bulk([n, Symbol("a")] for n in range(BATCH + 1))) == BATCH + 1
    found = [unwrap(job) for job in jobs(world)]
    assert [job.arguments for job in found] == [(n, "a") for n in range(BATCH + 1)]
    assert len({job.job_id for job in found}) == BATCH + 1
    with pytest.raises(InputError, match="must be a list"):
        mail.perform_bulk([1])  # type: ignore[list-item]
    with pytest.raises(InputError, match="has no form there"):
        mail.perform_async(object())


def test_our_own_worker_performs_what_is_pushed_so(world: RedisWorld) -> None:
    app = world.app()
    found: list[Any] = []

    @app.worker(name="Shop::MailJob", use_task_event=False)
    def mail(*args: Any, **keywords: Any) -> None:
        found.append((args, keywords))

    remote: RemoteWorker = app.remote_worker("Shop::MailJob", active_job=True)
    with world.working(app):
        remote.perform_async(1, Symbol("a"), to={"b": 2})
        wait_for(lambda: found, "it is performed")
    assert found == [((1, Symbol("a")), {"to": {"b": 2}})]
