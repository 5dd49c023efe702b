"""The header that a sender names, and the beginning of a list, in every format."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.sheets import read, saved
from test_readers_limits import ALL, SHEETS, Write

from asynctask.errors import InputError
from asynctask.lists.readers import Limits
from asynctask.lists.readers.opening import HEAD_ROWS, read_head
from asynctask.lists.uploads import list_file


@pytest.mark.parametrize("write", SHEETS, ids=lambda each: each.__name__)
def test_the_named_row_is_the_header(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path / "a", [["sku", "n"], ["name", "pieces"], ["A", 1], ["B", 2]])
    headers, rows = read(path, expect=["sku"], header=2)
    assert headers == ("name", "pieces")
    assert [(row.number, row.values["name"]) for row in rows] == [(3, "A"), (4, "B")]
    with list_file(path, path.name, Limits()) as file, file.open(None, ["sku"], header=2) as source:
        assert source.headers == headers
        assert source.planned in (2, None)
    for number in (5, 900):
        with pytest.raises(InputError) as refused:
            read(path, header=number)
        assert (refused.value.code, str(number) in str(refused.value)) == ("empty_header", True)


@pytest.mark.parametrize("write", ALL, ids=lambda each: each.__name__)
def test_the_beginning_of_a_list_is_the_same_here_and_in_the_child(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path / "a", [["title", None], ["sku", "n"], *(["A", number] for number in range(100))])
    here = read_head(path, path.name, limits=Limits())
    with list_file(path, path.name, Limits()) as file:
        there = file.head(None, [])
    assert here == there
    assert len(here.rows) == HEAD_ROWS
    assert here.is_table is (write in SHEETS)
    if here.is_table:
        assert [cells[0] for _, cells in here.rows[:3]] == ["title", "sku", "A"]


def test_a_title_over_one_column_does_not_keep_a_named_header(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.csv", "Report\nJuly,x\nAugust,y\n")
    with pytest.raises(InputError):
        read(path)
    assert read(path, header=2)[0] == ("July", "x")


def test_limits_hold_at_the_beginning_too(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.csv", "a,b\n" + ",".join("x" * 1_001) + "\n")
    head = read_head(path, "a.csv", limits=Limits())
    assert len(head.rows[1][1]) == 1_001
    with pytest.raises(InputError, match="max_columns"):
        read(path, header=2)
    with pytest.raises(InputError, match="max_cell_chars"):
        read_head(saved(tmp_path / "b.csv", "a\n" + "x" * 50 + "\n"), "b.csv", limits=Limits(max_cell_chars=20))
