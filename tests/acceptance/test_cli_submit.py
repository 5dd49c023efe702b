"""What a submission may ask for on the command line: real processes on a real database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import Desk

from asynctask.testing import wait_for


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    wait_for(lambda: not desk.processes(), f"the end of every process: {desk.processes()}")


def test_a_dry_run_tells_what_a_file_would_come_to_and_writes_nothing(desk: Desk) -> None:
    good = desk.table("good.csv", [("S-1", 1), ("S-2", 2)]).name
    mixed = desk.table("mixed.csv", [("S-1", 1), ("S-2", "many"), ("S-1", 3)]).name
    bad = desk.table("bad.csv", [("S-1", "many")]).name
    command = ("submit", "--worker", "enrol", "--dry-run", "--unique", "sku")
    assert "2 of 2 rows would be accepted" in desk.run(*command, good).stdout
    told = desk.run(*command, mixed, code=1).stdout
    assert "1 of 3 rows would be accepted; nothing was written" in told
    assert "is the same as in row 2" in told
    desk.run(*command, bad, code=2)
    assert "0 of 3 rows would be accepted" in desk.run(*command, mixed, "--strict", code=2).stdout
    found = desk.json(*command, mixed, "--locale", "zh_CN", code=1)
    assert (found["dry_run"], found["accepted"], found["rejected"]) == (True, 1, 2)
    assert found["errors"][1]["message"] == "与第 2 行相同，请修改，或删除其中一行"
    assert desk.json("tasks")["tasks"] == []
    assert not list((desk.folder / "asynctask-data").glob("uploads/*"))


def test_a_strict_file_with_a_bad_row_is_refused_as_a_whole_in_the_language_of_the_locale(desk: Desk) -> None:
    mixed = desk.table("mixed.csv", [("S-1", 1), ("S-2", "many")]).name
    told = desk.run("submit", mixed, "--worker", "enrol", "--strict", "--locale", "ja", code=2).stderr
    assert "2 行のうち 1 行が拒否されたため" in told
    assert "row 3, n: 1200 や 12.5 のような数値で入力してください" in told
    (task,) = desk.json("tasks")["tasks"]
    assert (task["state"], task["counts"]["total"]) == ("rejected", 0)
    good = desk.table("good.csv", [("S-1", 1), ("S-2", 2)]).name
    assert desk.json("submit", good, "--worker", "enrol", "--strict")["counts"]["total"] == 2


def test_unique_that_names_no_field_is_refused_with_the_fields(desk: Desk) -> None:
    good = desk.table("good.csv", [("S-1", 1)]).name
    assert "no field of the item" in desk.run("submit", good, "--worker", "enrol", "--unique", "skew", code=2).stderr


def test_a_file_is_read_in_the_encoding_that_is_named(desk: Desk) -> None:
    (desk.folder / "korean.csv").write_bytes("sku,n\n서울,1\n".encode("cp949"))
    command = ("submit", "korean.csv", "--worker", "enrol", "--dry-run")
    assert desk.json(*command, "--encoding", "euc-kr")["first_items"][0]["sku"] == "서울"
    assert "give one of: euc-kr, utf-8" in desk.run(*command, "--encoding", "eucc-kr", code=2).stderr


def test_a_doubtful_encoding_is_refused_with_flags_to_choose_from(desk: Desk) -> None:
    (desk.folder / "list.csv").write_bytes("sku,n\nIt’s,1\n79 €,2\n".encode("cp1252"))
    command = ("submit", "list.csv", "--worker", "enrol", "--dry-run")
    told = desk.run(*command, code=2).stderr
    assert "--encoding windows-1252  It’s, 79 €" in told
    assert desk.json(*command, "--encoding", "windows-1252")["first_items"][0]["sku"] == "It’s"
