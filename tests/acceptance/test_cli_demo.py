"""The demo, as the README has it, with fewer rows."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import Desk, read_document

from asynctask.cli.root import run
from asynctask.testing import wait_for


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    desk.environ.pop("ASYNCTASK_APP")
    yield desk
    wait_for(lambda: not desk.processes(), f"the end of every process: {desk.processes()}")


@pytest.mark.full(reason="below with --keep in each run: the same audit of the same Tasks")
def test_the_demo_audits_itself_and_a_second_one_begins_anew_in_its_folder(desk: Desk) -> None:
    for rows in (600, 100):
        said = desk.run("demo", "--rows", rows).stdout
        assert "WRONG" not in said
        assert said.count("\nok ") == 8
        assert "Export: " in said
        assert "Report: " in said
        assert not desk.processes()


def test_a_demo_that_is_kept_audits_itself_and_stays_until_it_is_told_to_stop(desk: Desk) -> None:
    with desk.started("demo", "--rows", 100, "--keep", "--json") as demo:
        found = read_document(demo)
        assert found["ok"]
        assert all(each["holds"] for each in found["audit"])
        assert [each["rows"] for each in found["tasks"]] == [200, 100, 50_000]
        assert found["retried"] > 0
        assert Path(found["report"]).is_file()
        with urllib.request.urlopen(found["url"], timeout=120) as page:
            assert page.status == 200
        assert "is running" in desk.run("demo", code=2).stderr
        demo.send_signal(signal.SIGINT)
        assert demo.wait(120) == 0
    assert not desk.processes()


@pytest.mark.full(reason="below on Celery in each run")
@pytest.mark.needs_redis
@pytest.mark.parametrize("engine", ["celery", "dramatiq", "rq"])
def test_the_demo_runs_on_an_engine_and_audits_itself(desk: Desk, engine: str) -> None:
    found = desk.json("demo", "--engine", engine, "--rows", 150)
    assert (found["ok"], found["engine"]) == (True, engine)
    assert [each["rows"] for each in found["tasks"]] == [200, 150, 10_000]
    assert found["retried"] > 0
    assert not desk.processes()


@pytest.mark.needs_redis
def test_a_kept_demo_on_an_engine_shows_its_queues_and_ends_with_everything_when_it_is_killed(desk: Desk) -> None:
    with desk.started("demo", "--rows", 100, "--engine", "celery", "--keep", "--json") as demo:
        found = read_document(demo)
        assert (found["ok"], found["engine"]) == (True, "celery")
        assert [each["rows"] for each in found["tasks"]] == [200, 100, 10_000]
        assert found["retried"] > 0
        with urllib.request.urlopen(f"{found['url']}/api/queues", timeout=120) as answer:
            assert [queue["name"] for queue in json.load(answer)["queues"]] == ["celery/celery"]
        assert any("redis-server" in command for command in desk.processes().values())
        demo.send_signal(signal.SIGKILL)
        demo.wait(120)
        wait_for(lambda: not desk.processes(), f"the end of every process: {desk.processes()}")


def test_a_demo_on_an_engine_says_what_it_lacks(desk: Desk) -> None:
    said = desk.run("demo", "--engine", "rq", code=2, PATH=str(desk.folder)).stderr
    if not any(os.access(f"{folder}/redis-server", os.X_OK) for folder in ("/usr/sbin", "/usr/local/sbin")):
        assert "apt-get install redis-server" in said
    assert "--engine" in desk.run("demo", "--engine", "rq", "--concurrency", "2", code=2).stderr


def test_a_demo_on_an_engine_that_is_not_installed_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(["demo", "--engine", "rq", "--dir", str(tmp_path / "demo")]) == 2
    assert "asynctask-ledger[rq]" in capsys.readouterr().err


def test_the_demo_touches_no_folder_that_is_not_its_own(desk: Desk) -> None:
    (desk.folder / "mine").mkdir()
    (desk.folder / "mine" / "thesis.txt").write_text("years of work")
    assert "--dir" in desk.run("demo", "--dir", "mine", code=2).stderr
    assert (desk.folder / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_demo_that_is_stopped_or_killed_midway_leaves_no_process(desk: Desk) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with desk.started("demo", "--rows", 5000) as demo:
            wait_for(lambda: sum(" worker " in line + " " for line in desk.processes().values()), "the worker")
            demo.send_signal(number)
            demo.wait(120)
            wait_for(lambda: not desk.processes(), "the end of every process")
