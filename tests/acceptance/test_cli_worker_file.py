"""Worker processes that take their settings from Sidekiq's file: what runs is what the file says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_process import Desk, read_document
from support.drawn import examples

from asynctask.testing import wait_for

FILE = """
:concurrency: 3
:timeout: 4
:queues:
  - [default, 2]
  - slow
:lease_s: 30
:require: ./app.rb
production:
  :processes: 2
"""


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    (tmp_path / "sidekiq.yml").write_text(FILE)
    yield desk
    wait_for(lambda: not desk.processes(), f"the end of every process: {desk.processes()}")


def workers(desk: Desk) -> list[dict[str, Any]]:
    return [each for each in desk.json("processes", "--json")["processes"] if each["kind"] == "worker"]


@pytest.mark.parametrize(("flags", "count"), examples([(("-e", "production"), 2)], [((), 1), (("-e", "production"), 2)]))
def test_a_worker_runs_as_the_file_says_and_a_flag_wins(desk: Desk, flags: tuple[str, ...], count: int) -> None:
    with desk.started("worker", "-C", "sidekiq.yml", "-c", 4, *flags, "--json") as process:
        said = read_document(process)
        wait_for(lambda: desk.registered("worker") == count, "they have all started")
        found = workers(desk)
    assert {name: said[name] for name in ("processes", "concurrency", "queues", "strict_queues", "shutdown_s")} == {
        "processes": count,
        "concurrency": 4,
        "queues": "default,2 slow,1",
        "strict_queues": False,
        "shutdown_s": 4.0,
    }
    assert {(each["concurrency"], tuple(each["queues"])) for each in found} == {(4, ("default", "slow"))}


def test_up_hands_the_file_on_to_its_workers(desk: Desk) -> None:
    with desk.started("up", "-C", "sidekiq.yml", "--port", 0, "--json") as process:
        assert read_document(process)["processes"] == 1
        wait_for(lambda: desk.registered("worker"), "the worker has started")
        (found,) = workers(desk)
    assert (found["concurrency"], found["queues"]) == (3, ["default", "slow"])


def test_what_was_passed_over_is_told(desk: Desk) -> None:
    done = desk.run("config", "-C", "sidekiq.yml")
    assert "passed over what is Ruby's alone: require" in done.stderr
    assert desk.run("worker", "-C", "none.yml", code=2).stderr.startswith("error: none.yml cannot be read")
