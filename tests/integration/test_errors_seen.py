"""Errors while they are retried: in the progress object, with the job, in groups, and in the log."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable
from typing import Any, cast

import pytest
import sqlalchemy as sa
from pydantic import BaseModel, SecretStr
from structlog.testing import capture_logs
from support.world import World, numbers

from asynctask import AsyncTask, NormalException, current_job
from asynctask.cli.root import run
from asynctask.errors import FinalError
from asynctask.ledger.progress import LAST_WAITING
from asynctask.task import TaskHandle
from asynctask.testing import wait_for
from webapi import create_app


def shop_call(n: int) -> None:
    """A frame of a library below the worker's."""
    raise ConnectionError(f"order {n}: the shop is down")


class Login(BaseModel):
    user: str
    password: SecretStr


class Flaky:
    """A worker whose items raise until the shop is up."""

    def __init__(self, app: AsyncTask, retry_in: float = 600.0) -> None:
        self.is_up = False

        @app.worker(retry=9, retry_in=lambda *_: retry_in)
        def flaky(item: dict[str, Any]) -> None:
            if item.get("refuse"):
                raise NormalException(f"seller {item['n']} is not qualified")
            if item.get("final"):
                raise FinalError(f"no such order: {item['n']}")
            if not self.is_up:
                shop_call(item["n"]) if item["n"] % 10 else item["sku"]

        self.worker = flaky


def waiting(app: AsyncTask, world: World, task: TaskHandle, count: int) -> None:
    """Until so many rows wait for a retry."""
    with world.working(app):
        wait_for(lambda: task.progress()["retrying"] == count, "all wait for a retry")


Cli = Callable[..., str]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """What a command prints."""

    def call(app: AsyncTask, *words: str) -> str:
        out = io.StringIO()
        monkeypatch.setenv("ASYNCTASK_DATABASE_URL", app.config.database_url)
        monkeypatch.setenv("ASYNCTASK_DATA_DIR", app.config.data_dir)
        assert run(words, stdout=out) == 0
        return out.getvalue()

    return call


@pytest.mark.each_database(reason="each orders and reads the rows that wait in its own way")
def test_the_errors_of_rows_that_wait_for_a_retry_are_said_wherever_the_task_is_shown(world: World, cli: Cli) -> None:
    app = world.app()
    flaky = Flaky(app)
    task = app.submit(flaky.worker, numbers(8))
    assert task.progress()["retrying_errors"] == []
    waiting(app, world, task, 8)
    down, bug = task.progress()["retrying_errors"]
    assert {name: down[name] for name in ("template", "code", "count")} == {
        "template": "ConnectionError: order ‹n›: the shop is down", "code": "raised", "count": 7
    }  # fmt: skip
    assert down["message"].startswith("ConnectionError: order ")
    assert (bug["template"], bug["message"], bug["count"]) == ("KeyError: ‹text›", "KeyError: 'sku'", 1)
    assert app.event(bug["sample_job_id"])["params"]["n"] == 0

    client: Any = create_app(app).test_client()
    assert client.get(f"/api/tasks/{task.id}").json["retrying_errors"] == [down, bug]
    (listed,) = client.get("/api/tasks").json["tasks"]
    assert listed["retrying_errors"] == [down, bug]
    app.submit("note", [{"n": 1}])
    assert client.get("/api/tasks").json["tasks"][1]["retrying_errors"] == [down, bug]
    assert app.changed({task.id: None})[task.id].progress["retrying_errors"] == [down, bug]  # type: ignore[index]
    text = cli(app, "show", str(task.id))
    assert "8 rows wait for a retry. Their last errors:" in text
    assert "ConnectionError: order ‹n›: the shop is down" in text


def test_a_dismissed_job_says_so(world: World, cli: Cli) -> None:
    app = world.app()
    job_id = str(app.workers["note"].perform_in(3_600, *numbers(1)))
    assert app.operations.act("scheduled", "kill", [job_id]).done == 1
    assert "dismissed" not in cli(app, "job", job_id)
    assert app.operations.act("dead", "dismiss", [job_id]).done == 1
    assert "dismissed" in cli(app, "job", job_id)


@pytest.mark.each_database(reason="each writes the columns of an error in statements of its own")
def test_a_job_keeps_the_traceback_and_the_process_of_its_last_error(world: World, cli: Cli) -> None:
    app = world.app()
    flaky = Flaky(app)
    task = app.submit(flaky.worker, numbers(1, 1))
    (event,) = task.events()
    assert (app.event(event["job_id"])["last_error"], app.event(event["job_id"])["traceback"]) == (None, None)
    waiting(app, world, task, 1)
    job = app.operations.job(event["job_id"])
    assert job["last_error"] == {
        "code": "raised", "message": "ConnectionError: order 1: the shop is down", "process": app.ledger.identity
    }  # fmt: skip
    first, *frames = job["traceback"].split("\n")
    assert first == "Traceback (most recent call last):"
    named = [line.rpartition(", in ")[2] for line in frames if line.startswith("  File ")]
    assert named == ["flaky", "shop_call"], "neither the runtime's frames nor the middleware's"
    assert frames[-1] == "ConnectionError: order 1: the shop is down"
    client: Any = create_app(app).test_client()
    assert client.get(f"/api/jobs/{event['job_id']}").json["traceback"] == job["traceback"]
    assert "shop_call" in cli(app, "job", event["job_id"])
    assert json.loads(cli(app, "--json", "job", event["job_id"]))["last_error"] == job["last_error"]
    assert "traceback" not in task.events()[0], "a list would be long"
    flaky.is_up = True
    app.operations.act_on_all("retries", "restart")
    with world.working(app):
        assert task.wait(60)["counts"]["finish"] == 1
    assert app.event(event["job_id"])["traceback"] == job["traceback"], "a success keeps the error before it"
    assert task.progress()["retrying_errors"] == []
    assert app.doctor() == []


@pytest.mark.each_database(reason="each writes the messages of an attempt in statements of its own")
def test_each_attempt_names_its_process_even_if_that_was_killed(world: World, cli: Cli) -> None:
    app = world.app()
    task = app.submit("gated", numbers(1))
    victim = world.cli("kill_app", "worker", "-c", "1")
    ((killed,),) = wait_for(lambda: world.sql("SELECT process FROM events WHERE status = 'working'"), "it is at work")
    assert f":{victim.pid}:" in killed
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    broken = app.submit("shaky", numbers(1))
    with world.working(app):
        wait_for(lambda: world.shop.performed("began")[0] == 2, "it runs again")
        world.open_gate()
        assert (task.wait(60)["counts"]["finish"], broken.wait(60)["counts"]["finish"]) == (1, 1)
    own, client = app.ledger.identity, cast("Any", create_app(app).test_client())
    for done, processes in ((task, (killed, own)), (broken, (own, own))):
        (job_id,) = (event["job_id"] for event in done.events())
        begun = [each for each in client.get(f"/api/jobs/{job_id}").json["messages"] if "process" in each]
        assert [(each["status"], each["attempt"], each["process"]) for each in begun] == [
            ("working", attempt, process) for attempt, process in enumerate(processes, 1)
        ]
        shown = [line.split() for line in cli(app, "job", job_id).splitlines()]
        assert all([str(each["attempt"]), each["at"], each["process"]] in shown for each in begun)


@pytest.mark.each_database(reason="ends without a retry are written by another statement")
def test_the_last_error_of_a_job_that_ended_in_it_is_kept_and_a_refusal_is_none(world: World) -> None:
    app = world.app()
    task = app.submit(Flaky(app).worker, [{"n": 1, "final": True}, {"n": 2, "refuse": True}])
    with world.working(app):
        task.wait(60)
    ended, refused = (app.event(each["job_id"]) for each in task.events())
    assert ended["last_error"]["message"] == "no such order: 1"
    assert ended["traceback"].endswith("FinalError: no such order: 1")
    assert (refused["last_error"], refused["traceback"]) == (None, None)


@pytest.mark.one_database(reason="a setting of the process")
def test_keep_tracebacks_off_keeps_none(world: World) -> None:
    app = world.app(keep_tracebacks=False)
    task = app.submit(Flaky(app).worker, numbers(1))
    waiting(app, world, task, 1)
    job = app.event(task.events()[0]["job_id"])
    assert (job["last_error"]["message"], job["traceback"]) == ("KeyError: 'sku'", None)


@pytest.mark.one_database(reason="made before it is written")
def test_secrets_of_the_item_are_masked_in_the_traceback(world: World) -> None:
    app = world.app()

    @app.worker(retry=0)
    def log_in(login: Login) -> None:
        raise ValueError(f"refused: {login.password.get_secret_value()}")

    task = app.submit(log_in, [{"user": "ann", "password": "hunter2"}])
    with world.working(app):
        task.wait(60)
    text = app.event(task.events()[0]["job_id"])["traceback"]
    assert text.endswith("ValueError: refused: **********")
    assert "hunter2" not in text


@pytest.mark.each_database(reason="the outcomes of slices are written by statements of their own")
def test_items_of_slices_count_each_and_their_job_has_the_last_error(world: World) -> None:
    app = world.app()

    @app.worker(retry=3, retry_in=lambda *_: 600.0)
    def half(item: dict[str, Any]) -> None:
        if item["n"] % 2:
            shop_call(item["n"])

    @app.worker(batch=True, retry=3, retry_in=lambda *_: 600.0)
    def batch(items: list[dict[str, Any]]) -> None:
        for index, item in enumerate(items):
            if item["n"] % 2:
                try:
                    shop_call(item["n"])
                except ConnectionError as error:
                    current_job().error(index, error)

    for worker in (half, batch):
        task = app.submit(worker, numbers(10), chunk_size=5)
        waiting(app, world, task, 5)
        (group,) = task.progress()["retrying_errors"]
        assert (group["count"], group["template"]) == (5, "ConnectionError: order ‹n›: the shop is down")
        job = app.event(group["sample_job_id"])
        assert job["traceback"].endswith(job["last_error"]["message"])
        assert "in shop_call" in job["traceback"]


@pytest.mark.each_database(reason="each compares texts in its own way")
def test_failures_are_grouped_by_what_they_have_in_common_and_retried_by_any_of_their_messages(world: World) -> None:
    app = world.app()
    flaky = Flaky(app)
    task = app.submit(flaky.worker, [*numbers(6, refuse=True), *numbers(3, 6, final=True)])
    with world.working(app):
        task.wait(60)
    first, second = task.error_groups()
    assert (first["template"], first["count"], first["sample_rows"]) == ("seller ‹n› is not qualified", 6, [1, 2, 3, 4, 5])
    assert first["message"] in {f"seller {n} is not qualified" for n in range(6)}
    assert (second["template"], second["count"]) == (second["message"], 3), "by code: their messages may be any"
    assert [(each["template"], each["count"]) for each in task.progress()["top_errors"]] == [
        (first["template"], 6), (second["template"], 3)
    ]  # fmt: skip
    assert {each["messages"][-1]["message"] for each in task.events("failed")} == {
        f"Failed: seller {n} is not qualified" for n in range(6)
    }, "the exact texts"
    for message in ("seller 4 is not qualified", first["template"], first["message"]):
        assert not task.retry(status="error", message=message)
        assert task.retry(message=message)
        with world.working(app):
            assert task.wait(60)["counts"]["failed"] == 6
        assert task.error_groups()[0]["count"] == 6
    assert app.doctor() == []


@pytest.mark.each_database(reason="the doctor groups by what each has stored")
def test_groups_of_an_earlier_release_stay_and_are_retried_by_their_message(world: World) -> None:
    app = world.app()
    task = app.submit(Flaky(app).worker, numbers(2, refuse=True))
    with world.working(app):
        task.wait(60)
    for table in ("item_errors", "task_errors"):
        world.sql(f"UPDATE {table} SET digest = 'before', message = 'seller 7 is not qualified'")
    assert app.doctor() == []
    (group,) = task.error_groups()
    assert (group["template"], group["count"]) == ("seller 7 is not qualified", 2)
    assert not task.retry(message="seller 8 is not qualified")
    assert task.retry(message="seller 7 is not qualified")


@pytest.mark.one_database(reason="the statements are the same on each database")
def test_a_poll_reads_the_errors_of_a_few_rows_that_wait_for_a_retry_in_its_one_statement(world: World) -> None:
    app = world.app()
    task = app.submit(Flaky(app).worker, numbers(LAST_WAITING + 20, 1))
    waiting(app, world, task, LAST_WAITING + 20)
    said: list[str] = []
    sa.event.listen(app.ledger.database.engine, "before_cursor_execute", lambda *args: said.append(args[2]))
    assert sum(each["count"] for each in task.progress()["retrying_errors"]) == LAST_WAITING
    assert ["last_error" in each for each in said if "task_tallies" in each] == [True]
    assert len([each for each in said if "last_error" in each]) == 1


@pytest.mark.one_database(reason="it is about the log")
def test_the_log_has_the_traceback_of_each_kind_of_error_once(world: World) -> None:
    app = world.app()
    with capture_logs() as lines:
        task = app.submit(Flaky(app).worker, numbers(21))
        waiting(app, world, task, 21)
    said = [each for each in lines if each["event"] == "job_raised"]
    stacks = [each for each in said if "stack" in each]
    assert sorted(each["stack"].rpartition("\n")[2].strip()[:8] for each in stacks) == ["Connecti", "KeyError"]
    assert {each["log_level"] for each in stacks} == {"warning"}
    others = [each for each in said if "stack" not in each]
    assert {each["log_level"] for each in others} == {"info"}
    assert sorted(each["times"] for each in others) == sorted([*range(2, 4), *range(2, 19)])
