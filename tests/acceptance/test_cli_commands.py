"""The command line from end to end: real processes on a real database."""

from __future__ import annotations

import csv
import json
import os
import pty
import signal
import sqlite3
import subprocess
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openpyxl
import pytest
import python_calamine
from cli_process import Desk, read_document
from support.databases import migrated_file
from support.drawn import examples

from asynctask.testing import wait_for


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    migrated_file(tmp_path / "asynctask.db")  # test_cli_submit.py begins with none
    yield desk
    wait_for(lambda: not desk.processes(), f"the end of every process: {desk.processes()}")


def numbered(count: int) -> list[tuple[str, int]]:
    return [(f"S-{n}", n) for n in range(1, count + 1)]


def get(url: str) -> int:
    with urllib.request.urlopen(url, timeout=120) as answer:
        return int(answer.status)


def answers(url: str) -> bool:
    try:
        return get(url) == 200
    except OSError:
        return False


# --- submit, watch, look, report ---


def test_a_file_is_handed_over_watched_to_its_end_and_its_bad_rows_come_back_as_a_report(desk: Desk) -> None:
    rows: list[tuple[str, object]] = [*numbered(30), ("S-31", "many")]
    file = desk.table("products.csv", rows)
    with desk.working("-c", 4):
        progress = desk.json("submit", file.name, "--worker", "enrol", "--watch", code=1)
    assert progress["state"] == "finished"
    assert progress["title"] == "products.csv"
    assert {k: progress["counts"][k] for k in ("total", "finish", "failed", "error")} == {
        "total": 30,
        "finish": 26,
        "failed": 3,
        "error": 1,
    }
    assert progress["split"]["rejected"] == 1
    task_id = progress["task_id"]

    written = desk.json("report", task_id, "-o", "failed.xlsx")
    assert written["written"] == 5
    with python_calamine.load_workbook(str(desk.folder / "failed.xlsx")) as book:
        header, *lines = book.get_sheet_by_index(0).to_python()
    assert header[:2] == ["sku", "n"]
    assert sorted(line[0] for line in lines) == ["S-10", "S-13", "S-20", "S-30", "S-31"]

    desk.run("report", task_id, "-o", "good.csv", "--rows", "succeeded")
    with (desk.folder / "good.csv").open(encoding="utf-8-sig", newline="") as stream:
        assert len(list(csv.DictReader(stream))) == 26

    shown = desk.json("show", task_id, "--failed")
    assert sorted(event["row"] for event in shown["events"]) == [11, 14, 21, 31]
    assert {group["count"] for group in shown["error_groups"]} == {1, 3}
    text = desk.run("show", task_id, "--failed").stdout
    assert "the seller is not qualified" in text
    assert all(event["job_id"] in text for event in shown["events"])
    assert "\x1b" not in text


def test_a_list_without_a_fault_ends_with_0(desk: Desk) -> None:
    file = desk.table("products.csv", numbered(5))
    with desk.working():
        text = desk.run("submit", file.name, "--worker", "enrol", "--watch").stdout
    assert "finish 5" in text
    assert "100.00 %" in text


def test_submit_alone_hands_over_and_ends_and_the_bad_rows_are_told(desk: Desk) -> None:
    file = desk.table("products.csv", [("S-1", 1), ("", 2), ("S-3", "x")])
    taken = desk.json(
        "submit", file.name, "--worker", "enrol", "--title", "Spring", "--parallel", 2, "--priority", "ADMIN_HIGH"
    )
    assert (taken["created"], taken["title"], taken["counts"]["total"]) == (True, "Spring", 1)
    assert taken["control"]["parallel"] == 2
    assert taken["control"]["priority"] == 120
    assert {(fault["row"], fault["column"]) for fault in taken["errors"]} == {(3, "sku"), (4, "n")}


def test_the_same_idempotency_key_and_file_are_one_task(desk: Desk) -> None:
    file = desk.table("products.csv", numbered(3))
    first = desk.json("submit", file.name, "--worker", "enrol", "--idempotency-key", "k1")
    again = desk.json("submit", file.name, "--worker", "enrol", "--idempotency-key", "k1")
    assert (first["created"], again["created"]) == (True, False)
    assert first["task_id"] == again["task_id"]


def test_columns_and_sheets_can_be_named(desk: Desk) -> None:
    file = desk.folder / "odd.csv"
    file.write_text("Article no.,How many\nS-1,1\nS-2,2\n")
    columns = ("--column", "Article no.=sku", "--column", "How many=n")
    taken = desk.json("submit", file.name, "--worker", "enrol", *columns)
    assert taken["counts"]["total"] == 2
    told = desk.run("submit", file.name, "--worker", "enrol", "--column", "sku", code=2).stderr
    assert "write the header of the sheet, =, and the field" in told


def test_a_header_row_is_named_and_a_check_writes_the_marked_list(desk: Desk) -> None:
    file = desk.folder / "odd.csv"
    file.write_text("sku,n\nArticle=no,n\nS-1,1\nS-2,many\n")
    command = ("submit", file.name, "--worker", "enrol", "--header-row", 2, "--column", "Article=no=sku")
    found = desk.json(*command, "--dry-run", "--marked", "marked.xlsx", code=1)
    assert (found["accepted"], [fault["row"] for fault in found["errors"]]) == (1, [4])
    book = openpyxl.load_workbook(desk.folder / "marked.xlsx")
    assert [[cell.value for cell in row][:4] for row in book.worksheets[0].iter_rows()] == [
        ["Article=no", "n", "row", "status"],
        ["S-1", "1", 3, "accepted"],
        ["S-2", "many", 4, "rejected"],
    ]
    assert "--dry-run" in desk.run(*command, "--marked", "marked.xlsx", code=2).stderr


def test_bad_input_ends_with_2_and_says_what_is_wrong(desk: Desk) -> None:
    (desk.folder / "empty.csv").write_text("")
    desk.table("bad.csv", [("", "x")])
    assert "empty" in desk.run("submit", "empty.csv", "--worker", "enrol", code=2).stderr
    assert "row 2" in desk.run("submit", "bad.csv", "--worker", "enrol", code=2).stderr
    file = desk.table("products.csv", numbered(1))
    told = desk.run("submit", file.name, "--worker", "enroll", "--json", code=2)
    assert told.stdout == ""
    assert "enrol" in json.loads(told.stderr)["error"]["message"]
    assert "7" in desk.run("show", 7, code=2).stderr
    assert "max_rows" in desk.run(
        "--max-rows", 2, "submit", desk.table("long.csv", numbered(9)).name, "--worker", "enrol", code=2
    ).stderr.replace("MAX_ROWS", "max_rows")


def test_the_example_of_the_readme_does_what_it_says(desk: Desk) -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    (desk.folder / "shop.py").write_text(readme.partition("```python\n# shop.py\n")[2].partition("```")[0])
    (desk.folder / "products.csv").write_text("sku,seller\nS-1,Nordwind\nS-2,Bargain Basement\n")
    with desk.started("-A", "shop:app", "worker"):
        words = ("-A", "shop:app", "submit", "products.csv", "--worker", "enroll_product", "--watch")
        counts = desk.json(*words, code=1)["counts"]
    assert (counts["finish"], counts["failed"]) == (1, 1)
    assert "1 row (failed)" in desk.run("-A", "shop:app", "report", 1, "-o", "failed.xlsx").stdout


# --- steering ---


def test_a_task_is_steered_without_a_worker_and_without_the_code(desk: Desk) -> None:
    file = desk.table("products.csv", numbered(20))
    task_id = desk.json("submit", file.name, "--worker", "enrol")["task_id"]
    desk.environ.pop("ASYNCTASK_APP")
    assert desk.json("pause", task_id)["state"] == "paused"
    assert desk.json("pause", task_id)["changed"] is False
    knobs = desk.json("set", task_id, "parallel=5", "priority=USER_LOW", "title=Renamed")
    assert (knobs["control"]["parallel"], knobs["control"]["priority"], knobs["title"]) == (5, 340, "Renamed")
    assert desk.json("set", task_id, "parallel=none")["control"]["parallel"] is None
    assert desk.json("set", task_id, "interval=1.5")["control"]["interval"] == 1.5
    assert "interval" in desk.run("set", task_id, "interval=often", code=2).stderr
    assert desk.json("set", task_id, "tolerated_failures=failed:10")["control"]["tolerated_failures"] == "failed:10"
    assert desk.json("set", task_id, "tolerated_failures=none", "interval=0")["control"]["tolerated_failures"] is None
    assert "5%" in desk.run("set", task_id, "tolerated_failures=many", code=2).stderr
    assert desk.json("resume", task_id)["state"] == "running"
    assert [each["task_id"] for each in desk.json("tasks", "--state", "running")["tasks"]] == [task_id]
    assert desk.json("tasks", "--group", "running", "--since", "2026-01-01T00:00:00Z")["tasks"][0]["task_id"] == task_id
    assert desk.json("tasks", "--group", "attention")["tasks"] == desk.json("tasks", "--group", "finished")["tasks"] == []
    assert "--since must be a time of RFC 3339" in desk.run("tasks", "--since", "yesterday", code=2).stderr
    assert "Renamed" in desk.run("tasks").stdout
    cancelled = desk.json("cancel", task_id)
    assert (cancelled["state"], cancelled["counts"]["cancelled"]) == ("cancelled", 20)
    assert "error:" in desk.run("pause", task_id, code=2).stderr


def test_rows_that_failed_are_run_again(desk: Desk) -> None:
    file = desk.table("products.csv", numbered(20))
    with desk.working():
        first = desk.json("submit", file.name, "--worker", "enrol", "--watch", code=1)
        jobs = desk.folder / "jobs.py"
        assert first["counts"]["failed"] == 2
        assert jobs.exists()
        again = desk.json("retry", first["task_id"], "--status", "error")
        assert (again["changed"], again["generation"]) == (True, 2)
        ended = desk.json("watch", first["task_id"], code=1)
    assert ended["counts"] | {"failed": 2, "error": 1} == ended["counts"]


def test_a_callback_that_failed_is_told_and_run_again(desk: Desk) -> None:
    file = desk.table("products.csv", numbered(3))
    (desk.folder / "untold").touch()
    assert "on_failure" in desk.run("submit", file.name, "--worker", "enrol", "--on-failure", "nobody", code=2).stderr
    with desk.working():
        call = json.dumps({"worker": "tell", "args": [7]})
        flags = ("--on-complete", call, "--on-success", "tell", "--on-failure", "tell")
        ended = desk.json("submit", file.name, "--worker", "enrol", *flags, "--watch", code=1)
        assert (ended["state"], ended["state_reason"]) == ("finished", "callback_failed")
        task_id = ended["task_id"]
        assert f"asynctask callbacks {task_id}" in desk.run("watch", task_id, code=1).stdout
        (desk.folder / "untold").unlink()
        assert desk.json("callbacks", task_id)["changed"] is True
        assert desk.json("watch", task_id)["state_reason"] is None
    shown = desk.run("show", task_id).stdout
    assert "on_complete" in shown
    assert "no callback" in desk.run("callbacks", task_id, code=2).stderr


def test_ctrl_c_leaves_the_task_running_and_says_how_to_look_on(desk: Desk) -> None:
    file = desk.table("products.csv", numbered(3))
    task_id = desk.json("submit", file.name, "--worker", "gated")["task_id"]
    with desk.started("watch", task_id) as watching:
        assert watching.stdout is not None
        assert f"Task {task_id}" in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        assert watching.wait(120) == 130
    assert f"asynctask watch {task_id}" in (desk.folder / "stderr.log").read_text()
    assert desk.json("show", task_id)["state"] == "running"


def test_a_submission_that_waits_for_a_worker_or_a_person_says_so(desk: Desk) -> None:
    file = desk.table("products.csv", numbered(3))
    assert (
        "Nothing of it begins yet. No process works the queue" in desk.run("submit", file.name, "--worker", "gated").stdout
    )
    held = desk.run("submit", file.name, "--worker", "gated", "--paused", "--start-at", "2999-01-01T00:00:00Z").stdout
    assert "Nothing of it begins yet. It is paused: asynctask resume 2" in held
    assert "paused (not before 2999-01-01 00:00)" in desk.run("tasks").stdout
    desk.run("resume", 2)
    assert "starts at" in desk.run("show", 2).stdout
    assert "running (not before 2999-01-01 00:00)" in desk.run("tasks").stdout
    desk.run("set", 2, "start_at=now")
    assert desk.json("show", 2)["control"]["start_at"] is None
    assert "not before" not in desk.run("tasks").stdout


def test_a_child_is_handed_over_shown_listed_and_cancelled_with_its_parent(desk: Desk) -> None:
    submit = ("submit", desk.table("products.csv", numbered(3)).name, "--worker", "gated")
    desk.run(*submit)
    assert desk.json(*submit, "--parent", 1)["parent"] == 1
    assert "1 Task, 1 not done: 3 rows (asynctask tasks --parent 1)" in desk.run("show", 1).stdout
    assert "Task 1" in desk.run("show", 2).stdout
    assert [each["task_id"] for each in desk.json("tasks", "--parent", 1)["tasks"]] == [2]
    desk.run("cancel", 1)
    assert desk.json("show", 2)["state"] == "cancelled"
    assert "takes no children any more" in desk.run(*submit, "--parent", 1, code=2).stderr


def test_a_context_is_given_as_json_and_shown(desk: Desk) -> None:
    file = desk.table("products.csv", numbered(3))
    submit = ("submit", file.name, "--worker", "gated", "--context")
    desk.run(*submit, '{"seller": 7, "name": "é"}')
    assert desk.json("show", 1)["context"] == {"seller": 7, "name": "é"}
    assert '{"seller": 7, "name": "é"}' in desk.run("show", 1).stdout
    assert "no JSON" in desk.run(*submit, "{seller: 7}", code=2).stderr
    assert "must be a JSON object" in desk.run(*submit, "[7]", code=2).stderr


def test_a_list_from_the_standard_input_with_owner_and_queue(desk: Desk) -> None:
    file = desk.table("products.csv", numbered(3))
    given = ("submit", "-", "--worker", "gated", "--owner", "ann", "--queue", "night")
    subprocess.run(desk.argv(*given), cwd=desk.folder, env=desk.environ, input=file.read_bytes(), check=True)
    found = desk.json("show", 1)
    assert (found["title"], found["owner"], found["counts"]["total"]) == ("standard input", "ann", 3)
    assert "No process works the queue night" in desk.run("show", 1).stdout


def test_one_job_is_sent_by_hand(desk: Desk) -> None:
    sent = desk.json("perform", "gated", "--args", '[{"sku": "A-1", "n": 1}]', "--in", 3600)
    assert desk.run("jobs", "--worker", "asynctask.webhook").stdout == "No job found.\n"
    assert "no worker is registered as 'nobody'" in desk.run("jobs", "--worker", "nobody").stdout
    (event,) = desk.json("jobs")["jobs"]
    listed = desk.run("jobs").stdout
    assert sent["job_id"] in listed
    assert event["due_at"][:19].replace("T", " ") in listed
    assert "no worker is registered as 'nobody'" in desk.run("perform", "nobody", code=2).stderr
    assert "no JSON" in desk.run("perform", "gated", "--args", "[1", code=2).stderr
    assert "must be a list" in desk.run("perform", "gated", "--args", "{}", code=2).stderr
    assert "must be an object" in desk.run("perform", "gated", "--args", "[1]", code=2).stderr
    for wrong, given in (("[]", "0 arguments"), ("[{}, 2, 3]", "3 arguments")):
        refused = desk.run("perform", "gated", "--args", wrong, code=2).stderr
        assert f"--args has {given}, and worker 'gated' takes (item" in refused


def test_watching_ends_with_3_after_its_limit_and_the_task_goes_on(desk: Desk) -> None:
    file = desk.table("products.csv", numbered(3))
    ended = desk.run("submit", file.name, "--worker", "gated", "--watch", "--timeout", 0.1, code=3)
    assert "running. To watch it again: asynctask watch 1" in ended.stderr
    assert desk.run("watch", 1, "--timeout", 0, code=3).stdout.count("Task 1") == 1
    progress = desk.json("watch", 1, "--timeout", 0, code=3)
    assert (progress["done"], progress["state"], progress["counts"]["enqueue"]) == (False, "running", 3)
    desk.run("cancel", 1)
    assert desk.json("watch", 1, "--timeout", 120, code=1)["state"] == "cancelled"


def test_a_flag_that_is_overruled_does_not_show_the_password(desk: Desk) -> None:
    text = (desk.folder / "jobs.py").read_text()
    url = "postgresql://shop:s3cret@h/a"
    (desk.folder / "jobs.py").write_text(text.replace("AsyncTask()", f'AsyncTask(database_url="{url}")'))
    told = desk.run("tasks", "--database-url", "sqlite:///asynctask.db", code=2).stderr
    assert "postgresql://***@h/a" in told
    assert "s3cret" not in told


def test_on_a_terminal_a_bar_is_drawn(desk: Desk) -> None:
    file = desk.table("products.csv", [(f"S-{n}", n * 10) for n in range(1, 4)])
    with desk.working():
        task_id = desk.json("submit", file.name, "--worker", "enrol", "--watch", code=1)["task_id"]
    ours, theirs = pty.openpty()
    environ = {**desk.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    with subprocess.Popen(
        desk.argv("watch", task_id), cwd=desk.folder, env=environ, stdin=theirs, stdout=theirs, stderr=theirs
    ) as watching:
        os.close(theirs)
        drawn = b""
        try:
            while chunk := os.read(ours, 4096):
                drawn += chunk
        except OSError:  # what Linux says when the other end is closed
            pass
        finally:
            os.close(ours)
        assert watching.wait(120) == 1
    text = drawn.decode()
    assert "━" in text
    assert "failed 3" in text
    assert "\x1b[" in text


# --- operators ---


def test_an_unusable_database_is_3_and_a_bad_target_2(desk: Desk) -> None:
    (desk.folder / "folder.db").mkdir()
    assert "error:" in desk.run("tasks", "--database-url", "sqlite:///folder.db", code=3).stderr
    assert "nowhere" in desk.run("-A", "nowhere:app", "config", code=2).stderr
    assert "jobs:app" in desk.run("-A", "jobs:ap", "config", code=2).stderr
    (desk.folder / "broken.py").write_text("import no_such_thing\n")
    told = desk.run("-A", "broken:app", "config", code=2).stderr
    assert "no_such_thing" in told
    assert "line 1" in told
    assert desk.json("-A", "jobs.py", "config")["settings"]


def test_a_flag_that_the_application_overrules_is_refused_not_ignored(desk: Desk) -> None:
    text = (desk.folder / "jobs.py").read_text()
    (desk.folder / "jobs.py").write_text(text.replace("AsyncTask()", 'AsyncTask(locale="ja")'))
    assert "--locale" in desk.run("tasks", "--locale", "en", code=2).stderr
    found = {each["name"]: each for each in desk.json("config", "--max-rows", 9)["settings"]}
    assert (found["locale"]["value"], found["locale"]["origin"]) == ("ja", "argument")
    assert (found["max_rows"]["value"], found["max_rows"]["origin"]) == (9, "flag")


def test_the_doctor_finds_counts_that_differ_from_the_rows_and_repairs_them(desk: Desk) -> None:
    desk.json("submit", desk.table("products.csv", numbered(4)).name, "--worker", "enrol")
    assert desk.json("doctor") == {"findings": []}
    with sqlite3.connect(desk.folder / "asynctask.db") as database:
        columns = [row[1] for row in database.execute("pragma table_info(task_tallies)")]
        database.execute(f"update task_tallies set {next(c for c in columns if 'finish' in c)} = 3")
    database.close()
    assert desk.json("doctor", code=1)["findings"]
    assert "doctor --repair" in desk.run("doctor", code=1).stdout
    assert all(finding["repaired"] for finding in desk.json("doctor", "--repair")["findings"])
    assert desk.json("doctor") == {"findings": []}


def test_the_chains_of_middleware_are_listed(desk: Desk) -> None:
    with (desk.folder / "jobs.py").open("a") as jobs:
        jobs.write(
            "\ndef timed(worker, job, queue, call_next):\n    return call_next()\n\napp.server_middleware.add(timed)\n"
        )
    assert desk.json("middleware", "list") == {"client": [], "server": ["timed", "TaskEventMiddleware"]}


def test_the_workers_are_listed_with_the_fields_of_their_items(desk: Desk) -> None:
    listed = desk.run("workers").stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["worker", "enrol", "gated", "tell"]
    assert "sku, n" in listed[1]
    assert desk.json("workers")["workers"][0] == desk.json("workers", "enrol")
    shown = desk.run("workers", "enrol").stdout
    assert "queue     default" in shown
    assert "sku    sku" in shown
    known = "no worker is registered as 'enroll'; registered: enrol, gated, tell"
    assert known in desk.run("workers", "enroll", code=2).stderr
    assert desk.run("jobs", "--worker", "enroll").stdout == f"No job found: {known}.\n"
    assert desk.run("tasks", "--worker", "enroll").stdout == f"No Task found: {known}.\n"
    assert desk.run("tasks", "--worker", "enrol").stdout == "No Task found.\n"


# --- processes that stay ---


def test_up_runs_everything_says_where_and_stops_it_all_on_term(desk: Desk) -> None:
    """With the short flags of ``worker``; and its port is taken then, which others are told with what to do."""
    flags = ("-p", 2, "-c", 3, "-q", "default", "-q", "slow", "--strict", "-t", 4)
    with desk.started("up", "--port", 0, "-A", "jobs:app", *flags, "--json") as up:
        document = read_document(up)
        url = document["url"]
        assert document["processes"] == 2
        wait_for(lambda: answers(url + "/readyz"), "readiness")
        assert get(url) == 200
        wait_for(lambda: desk.registered("worker") == 2, "both workers have started")
        workers = [each for each in desk.json("processes")["processes"] if each["kind"] == "worker"]
        assert {(each["concurrency"], tuple(each["queues"])) for each in workers} == {(3, ("default", "slow"))}
        argv = [line for line in desk.processes().values() if "--queues" in line]
        assert all("--strict-queues" in line and "--shutdown-s 4.0" in line for line in argv)
        assert len(argv) == 2
        ended = desk.json("submit", desk.table("products.csv", numbered(5)).name, "--worker", "enrol", "--watch")
        assert ended["counts"]["finish"] == 5
        port = int(url.rstrip("/").rpartition(":")[2])
        for command in ("web", "up"):
            assert "--port" in desk.run(command, "--port", port, code=2).stderr
        up.send_signal(signal.SIGTERM)
        assert up.wait(120) == 0
        assert up.stdout is not None
        assert up.stdout.read() == ""
    assert not desk.processes()


def test_when_up_is_killed_its_processes_end_by_themselves(desk: Desk) -> None:
    with desk.started("up", "--port", 0, "--json") as up:
        url = read_document(up)["url"]
        wait_for(lambda: answers(url + "/readyz"), "readiness")
        up.kill()
        up.wait()
        wait_for(lambda: not desk.processes(), "the end of every process")


def test_several_worker_processes_run_under_one_supervisor(desk: Desk) -> None:
    with desk.started("worker", "-p", 2, "-c", 3, "-q", "default,2", "-q", "slow", "--json") as workers:
        started = read_document(workers)
        assert started | {"processes": 2, "concurrency": 3, "queues": "default,2 slow"} == started
        ended = desk.json("submit", desk.table("products.csv", numbered(9)).name, "--worker", "enrol", "--watch")
        assert ended["counts"]["finish"] == 9
        wait_for(lambda: sum("worker" in line for line in desk.processes().values()) >= 3, "two children")


def test_a_bad_flag_of_a_worker_is_refused_before_it_starts(desk: Desk) -> None:
    assert "concurrency" in desk.run("worker", "-c", 0, code=2).stderr
    assert "queues" in desk.run("worker", "-q", "a,b", code=2).stderr


# -- started without standard streams


def without(desk: Desk, closed: str, *words: Any) -> subprocess.Popen[bytes]:
    """A command that is started without these standard streams (``"02"``: neither stdin nor stderr), as by a daemon."""
    script = f'exec "$@" {" ".join(f"{number}<&-" for number in closed)}'
    return subprocess.Popen(["sh", "-c", script, "sh", *desk.argv(*words)], cwd=desk.folder, env=desk.environ)


def streams_of(pids: Iterable[int], closed: str) -> set[str]:
    """Where those streams of these processes lead now."""
    found = set()
    for pid in pids:
        with suppress(OSError):  # it has ended meanwhile
            found |= {str(Path(f"/proc/{pid}/fd/{number}").readlink()) for number in closed}
    return found


@pytest.mark.parametrize(
    ("command", "closed"),
    [("up", "012"), *examples([], [("worker", "1"), ("worker -p 2", "012"), ("up", "12"), ("worker", "2"), ("up", "0")])],
)
def test_what_stays_runs_without_standard_streams(desk: Desk, command: str, closed: str) -> None:
    count = {"worker": 2, "worker -p 2": 3, "up": 4}[command]  # supervisor and children; the web server has a child
    more = ("--port", "0") if command == "up" else ()
    process = without(desk, closed, *command.split(), *more)
    try:
        wait_for(lambda: len(desk.processes()) >= count, "its processes run")
        own = list(desk.processes())
        desk.run("submit", desk.table("list.csv", numbered(1)), "--worker", "enrol", "--watch")
        assert streams_of(own, closed) == {"/dev/null"}
        assert process.poll() is None
    finally:
        process.terminate()
        code = process.wait(120)
    assert code == 0
    assert (desk.folder / "asynctask.db").read_bytes().startswith(b"SQLite format 3\0")


def test_a_command_does_its_work_without_standard_streams(desk: Desk) -> None:
    table = desk.table("list.csv", numbered(2))
    streams = examples(("0", "012"), ("0", "1", "2", "012"))
    for closed in streams:
        assert without(desk, closed, "submit", table, "--worker", "enrol").wait(120) == 0, closed
    for closed in examples(("1",), streams):
        assert without(desk, closed, "show", "1", "--json").wait(120) == 0, closed
    for closed in examples(("2",), streams):
        assert without(desk, closed, "show", "9").wait(120) == 2, f"{closed}: there is none"
    tasks = desk.json("tasks")["tasks"]
    assert [task["counts"]["total"] for task in tasks] == [2] * len(streams)


def test_a_web_server_runs_without_standard_streams(desk: Desk) -> None:
    process = without(desk, "012", "web", "--port", "0")
    try:
        wait_for(lambda: len(desk.processes()) >= 2, "it has its child")
        wait_for(lambda: desk.registered("web"), "it is registered")
        assert streams_of(desk.processes(), "012") == {"/dev/null"}
    finally:
        process.terminate()
        assert process.wait(120) == 0


# --- logs ---

NOTES = """
import logging

from asynctask import AsyncTask

app = AsyncTask({settings})
logging.getLogger("shop").info("loaded")


@app.worker(retry=0)
def note(n: int) -> None:
    logging.getLogger("shop").info("noted %s", n)
"""


@pytest.mark.parametrize(
    ("settings", "flags"),
    [("", ("--log-level", "debug", "--log-format", "json")), ("log_level='debug', log_format='json'", ())],
)
def test_a_worker_logs_what_its_jobs_log_with_their_ids(desk: Desk, settings: str, flags: tuple[str, ...]) -> None:
    (desk.folder / "notes.py").write_text(NOTES.format(settings=settings))
    desk.environ["ASYNCTASK_APP"] = "notes:app"
    with desk.started("worker", "-p", 1, *flags):
        job_id = desk.json("perform", "note", "--args", "[5]")["job_id"]
        wait_for(lambda: "job_ended" in (desk.folder / "stderr.log").read_text(), "the job has ended")
    lines = [json.loads(line) for line in (desk.folder / "stderr.log").read_text().splitlines()]
    of_job = {line["event"]: line for line in lines if line.get("job_id") == job_id}
    assert of_job["noted 5"].items() >= {"logger": "shop", "level": "info", "attempt": 1}.items()
    assert of_job["job_began"].items() >= {"worker": "note", "queue": "default", "level": "debug"}.items()
    assert of_job["job_ended"]["raised"] is None
    assert of_job["job_ended"]["seconds"] >= 0


def test_the_supervisor_logs_as_the_application_says(desk: Desk) -> None:
    (desk.folder / "notes.py").write_text(NOTES.format(settings="log_format='console'"))
    desk.environ["ASYNCTASK_APP"] = "notes:app"
    with desk.started("worker", "-p", 1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_for(lambda: desk.registered("worker") == 1, "the worker has registered")
        worker = next(each for each in desk.json("processes")["processes"] if each["kind"] == "worker")
        os.kill(worker["pid"], signal.SIGKILL)
        wait_for(lambda: "child_died" in (desk.folder / "stderr.log").read_text(), "the supervisor says so")
    lines = (desk.folder / "stderr.log").read_text().splitlines()
    assert [line for line in lines if line.startswith("{")] == []


def test_rows_are_added_to_an_open_task_until_it_is_sealed(desk: Desk) -> None:
    file = desk.table("products.csv", numbered(3))
    made = desk.json("submit", file.name, "--worker", "enrol", "--open", "--open-limit-s", 600)
    assert (made["split"]["state"], made["counts"]["total"]) == ("open", 3)
    more = desk.table("more.csv", [("S-40", 40), ("", 41)])
    added = desk.json("add", 1, more.name, "--idempotency-key", "k", code=1)
    assert {name: added[name] for name in ("accepted", "rejected", "replayed")} == {
        "accepted": 1, "rejected": 1, "replayed": False
    }  # fmt: skip
    assert desk.json("add", 1, more.name, "--idempotency-key", "k", code=1)["replayed"]
    assert "1 row was rejected" in desk.run("add", 1, more.name, code=1).stdout
    with desk.working():
        assert desk.json("seal", 1)["changed"]
        assert desk.json("watch", 1, code=1)["counts"]["total"] == 5
    assert not desk.json("seal", 1)["changed"]
    assert "takes no more items" in desk.run("add", 1, more.name, code=2).stderr
