"""The commands for what waits and what runs, on an application of their own."""

from __future__ import annotations

import io
import json
import os
import pwd
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import sqlalchemy as sa
from support.broker_suite import untracked
from support.databases import migrated_file
from support.untracked import hold, push

from asynctask import AsyncTask
from asynctask.brokers.base import DEAD, RETRY, Copy, SetEntry
from asynctask.cli.options import next_page
from asynctask.cli.root import run
from asynctask.clock import SECOND
from asynctask.ledger import processes
from asynctask.testing import wait_for


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncTask]:
    monkeypatch.setenv("ASYNCTASK_DATABASE_URL", f"sqlite:///{tmp_path}/a.db")
    monkeypatch.setenv("ASYNCTASK_DATA_DIR", str(tmp_path / "data"))
    migrated_file(tmp_path / "a.db")
    made = AsyncTask()

    @made.worker(use_task_event=False)
    def loose(item: dict[str, Any]) -> None:
        pass

    @made.worker
    def tracked(item: dict[str, Any]) -> None:
        pass

    yield made
    made.close()


class Caller:
    def __call__(self, *argv: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        code = run(argv, stdout=out, stderr=err)
        return code, out.getvalue(), err.getvalue()

    def json(self, *argv: str) -> Any:
        code, out, err = self(*argv, "--json")
        assert code in (0, 1), err
        return json.loads(out)


@pytest.fixture
def call(app: AsyncTask) -> Caller:
    return Caller()


def test_each_lists_without_a_word(app: AsyncTask, call: Caller) -> None:
    app.workers["loose"].perform_async({"n": 1})
    app.workers["tracked"].perform_in(3_600, {"n": 2})
    hold(app, DEAD, [SetEntry(untracked(1, error_message="boom\x1b[31m"), app.clock.now())])
    code, out, _ = call("queues")
    assert code == 0
    assert "default" in out
    assert "unattended" in out
    assert call.json("queues").keys() == call.json("queues", "list").keys()
    assert call.json("--json", "scheduled")["entries"][0]["tracked"]
    code, out, _ = call("dead", "--limit", "5")
    assert code == 0
    assert "boom\\x1b[31m" in out
    assert "1 in all." in out
    assert call("retries")[:2] == (0, "0 in all.\n")
    assert call("processes")[1] == "No process is there.\n"


def test_jobs_that_are_left_to_others_are_marked_with_their_workers(app: AsyncTask, call: Caller) -> None:
    here = {"concurrency": 1, "queues": ["default"], "info": {"workers": ["loose"]}}
    processes.register(app.ledger, app.host, kind="worker", pid=1, lease_s=600, **here)  # type: ignore[arg-type]
    push(app, [Copy(f"{n:024x}", 0, "default", '{"class":"Mail\\u001b[31m","args":[]}') for n in range(3)])
    assert "3 jobs of others (Mail\\x1b[31m)" in call("queues")[1]
    (queue,) = call.json("queues")["queues"]
    assert (queue["jobs_of_others"], queue["other_workers"]) == (3, ["Mail\x1b[31m"])


def test_queues_show_what_waits_in_the_ledger_and_how_many_workers_it_wants(app: AsyncTask, call: Caller) -> None:
    app.submit("tracked", [{"n": n} for n in range(1_234)], priority=5)
    code, out, _ = call("queues", "--target-s", "30")
    assert code == 0
    assert "wanted" in out
    assert "1,234" in out
    (queue,) = call.json("queues", "--target-s", "30")["queues"]
    assert (queue["waiting"], queue["length"], queue["workers_wanted"]) == (1_234, 0, 1)
    (part,) = queue["backlog"]
    assert (part["worker"], part["priority"], part["waiting"]) == ("tracked", 5, 1_234)
    assert call("queues", "--target-s", "0")[0] == 2


def test_pages_lead_on(app: AsyncTask, call: Caller) -> None:
    now = app.clock.now()
    hold(app, RETRY, [SetEntry(untracked(n), now + (n + 60) * SECOND) for n in range(5)])
    _, out, _ = call("retries", "list", "--limit", "2")
    assert out.endswith("The next: asynctask retries list --limit 2 --after 2\n")
    _, out, _ = call(*out.splitlines()[-1].removeprefix("The next: asynctask ").split())
    assert out.endswith("The next: asynctask retries list --limit 2 --after 4\n")
    found = call.json("retries", "--limit", "2", "--after", "4")
    assert [entry["args"] for entry in found["entries"]] == [[4]]
    assert found["next"] is None


def test_the_next_page_has_the_flags_of_this_one(app: AsyncTask, call: Caller) -> None:
    job_ids = [str(app.workers["tracked"].perform_async(n)) for n in range(3)]
    assert all(job_ids)
    _, out, _ = call("jobs", "--worker", "tracked", "--status", "enqueue", "--limit", "2")
    after = app.event(job_ids[1])["id"]
    assert out.endswith(f"The next: asynctask jobs --worker tracked --status enqueue --limit 2 --after {after}\n")


def test_actions_name_what_they_did_and_what_not(app: AsyncTask, call: Caller) -> None:
    now = app.clock.now()
    hold(app, RETRY, [SetEntry(untracked(n), now + (n + 60) * SECOND) for n in range(5)])
    keys = [entry["key"] for entry in call.json("retries")["entries"]]
    assert call("retries", "restart", keys[0])[:2] == (0, "1 job started again.\n")
    code, out, _ = call("retries", "restart", keys[0], keys[1])
    assert code == 1
    assert keys[0] in out
    assert call.json("retries", "kill", keys[2])["done"] == 1
    assert call.json("retries", "delete", keys[3], "nobody")["skipped"][0]["key"] == "nobody"
    assert call.json("dead", "search", keys[2])["entries"][0]["args"] == [2]
    assert call.json("dead", "search", "nothing")["entries"] == []
    assert call.json("queues", "jobs", "default")["total"] == 2
    assert call.json("retries", "restart", "--all") == {"done": 1, "skipped": []}


@pytest.mark.parametrize(
    "command", [("retries", "delete", "--all"), ("retries", "kill", "--all"), ("queues", "clear", "default")]
)
def test_what_cannot_be_undone_needs_a_yes_where_nobody_can_be_asked(
    app: AsyncTask, call: Caller, command: tuple[str, ...]
) -> None:
    hold(app, RETRY, [SetEntry(untracked(1), app.clock.now() + 60 * SECOND)])
    app.workers["loose"].perform_async({"n": 1})
    code, _, err = call(*command)
    assert code == 2
    assert "--yes" in err
    assert call.json("retries")["total"] == call.json("queues", "jobs", "default")["total"] == 1
    assert call(*command, "--yes")[:2] == (0, "1 job deleted.\n" if "kill" not in command else "1 job moved to the dead.\n")


def test_a_job_is_deleted_from_its_queue_by_its_key(app: AsyncTask, call: Caller) -> None:
    app.workers["loose"].perform_async({"n": 1})
    (job,) = call.json("queues", "jobs", "default", "--newest")["jobs"]
    assert call("queues", "delete", "default", job["key"])[:2] == (0, "1 job deleted.\n")
    assert call("queues", "delete", "default", job["key"])[0] == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("retries", "restart"), "name the jobs by their keys, or say --all"),
        (("retries", "restart", "x", "--all"), "name the jobs by their keys, or say --all"),
        (("dead", "kill", "x"), "No such command 'kill'"),
        (("queues", "pause", "defualt"), "there is no queue 'defualt'"),
        (("queues", "unpause", "defualt"), "there is no queue 'defualt'"),
        (("processes", "quiet", "nobody"), "there is no live process"),
        (("retries", "--limit", "0"), "--limit"),
        (("dead", "search", ""), "search for 1 to 255"),
        (("queues", "jobs", ""), "1 to 255 characters"),
        (("dead", "delete", "\udcff"), "half a character"),
    ],
)
def test_what_cannot_be_is_told(app: AsyncTask, call: Caller, argv: tuple[str, ...], says: str) -> None:
    app.ensure_schema()  # a command that looks makes no database
    code, _, err = call(*argv)
    assert code == 2
    assert says in err


def test_a_queue_of_the_database_is_paused_and_goes_on(app: AsyncTask, call: Caller) -> None:
    app.ensure_schema()
    for words in (("pause", True, True), ("pause", False, True), ("unpause", True, False), ("unpause", False, False)):
        verb, changed, paused = words
        code, out, _ = call("queues", verb, "default", "--json")
        assert (code, json.loads(out)["changed"]) == (0, changed)
        (found,) = app.operations.queues(only="default")
        assert found["paused"] is paused


def test_a_process_is_told_to_take_nothing_more(app: AsyncTask, call: Caller) -> None:
    launcher = app.launcher(concurrency=1, shutdown_s=5)
    launcher.start()
    try:
        (process,) = call.json("processes")["processes"]
        code, out, _ = call("processes", "quiet", process["identity"])
        assert code == 0
        assert "take nothing more" in out
        assert call.json("processes", "stop", process["identity"])["signal"] == "stop"
    finally:
        launcher.stop()


def test_a_task_whose_queue_no_process_works_says_so(app: AsyncTask, call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where it is shown, and while it is watched once nothing has changed for some seconds."""
    monkeypatch.setattr("asynctask.cli.submit._STILL_S", 0.0)
    words = "No process works the queue default: start a worker: asynctask -A module:app worker\n"
    task = app.submit("tracked", [{"n": 1}])
    assert words in call("show", str(task.id))[1]
    out = io.StringIO()
    watching = threading.Thread(target=run, args=(("watch", str(task.id)),), kwargs={"stdout": out, "stderr": out})
    watching.start()
    wait_for(lambda: words in out.getvalue(), "it is told why")
    task.pause()
    assert f"It is paused: asynctask resume {task.id}\n" in call("show", str(task.id))[1]
    task.resume()
    launcher = app.launcher(concurrency=1)
    launcher.start()
    watching.join()
    launcher.stop()
    assert out.getvalue().count(words) == 1
    assert words not in call("show", str(task.id))[1]


def test_the_place_of_the_next_page_cannot_write_to_the_terminal() -> None:
    """It may hold the id of a job that any program has queued."""
    with click.Context(click.Command("dead"), info_name="dead"):
        assert next_page("1:\x1b[31m") == "dead --after '1:\\x1b[31m'"


def test_a_repair_is_logged_with_the_user_who_asked_for_it(app: AsyncTask, call: Caller) -> None:
    task = app.submit("tracked", [{"n": 1}])
    with app.ledger.database.write() as connection:
        connection.execute(sa.text("UPDATE task_tallies SET enqueue = enqueue + 1"))
    assert call.json("doctor", "--repair")["findings"][0]["repaired"]
    (entry,) = [each for each in task.log() if each["action"] == "counts repaired"]
    assert entry["who"] == f"{pwd.getpwuid(os.getuid()).pw_name} (command line)"
