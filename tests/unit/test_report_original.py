"""The original list of a report: a child reads a workbook once more, at the report's pace, and it comes back as it was."""

# ruff: noqa: DTZ001 - the times of a sheet have no zone
from __future__ import annotations

import datetime as dt
import io
import signal
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import orjson
import pytest
import xlsxwriter
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drawn import examples
from support.sheets import rows_xml, sheet_xml, xlsx

from asynctask.clock import SystemClock, SystemIds
from asynctask.errors import InputError
from asynctask.lists import uploads as lists
from asynctask.lists.readers import CellError, Limits, RawRow
from asynctask.lists.readers.base import Percent
from asynctask.lists.rows import ListSource
from asynctask.lists.uploads import ListFile, StoredFile, Uploads, list_file
from asynctask.lists.written_cells import dump, unpacked
from asynctask.reports.report import Original, open_original

LONG = 10_000
"""Rows that no pipe has room for: a child that has sent them has had a reader."""


class Gone(Exception):
    """What stops the work in these tests."""


@cache
def workbook(rows: int) -> bytes:
    """``rows`` rows that hardly compress, with a percentage, a date and a column without a header."""
    out = io.BytesIO()
    book = xlsxwriter.Workbook(out, {"constant_memory": True})
    percent, day = book.add_format({"num_format": "0.0%"}), book.add_format({"num_format": "yyyy-mm-dd"})
    sheet = book.add_worksheet("Data")
    sheet.write_row(0, 0, ["sku", "rate", None, "day"])
    for row in range(1, rows + 1):
        sheet.write_string(row, 0, f"{row * 7919 % 1_000_003:07}-{row * 104_729 % 999_983}")
        sheet.write_number(row, 1, row / 8, percent)
        sheet.write_boolean(row, 2, row % 2 == 0)
        sheet.write_datetime(row, 3, dt.datetime(2026, 1, 1) + dt.timedelta(days=row % 300), day)
    book.close()
    return out.getvalue()


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    return Uploads(tmp_path, 100_000_000, SystemIds(SystemClock()))


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that were started to read a workbook."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def noted(*args: Any, **more: Any) -> Any:
        started.append(popen(*args, **more))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    return started


def stored(uploads: Uploads, body: bytes, filename: str = "list.xlsx") -> StoredFile:
    return uploads.store(io.BytesIO(body), filename)


def opened(uploads: Uploads, file: StoredFile, names: list[str] | None = None, **more: Any) -> Original | None:
    source = ListSource(name=file.name, filename=file.filename)
    return open_original(uploads, source, Limits(), ["sku"], names=names, **more)


def sure(original: Original | None) -> Original:
    assert original is not None
    return original


NAMES = ["sku", "rate", "day", "Column C"]


@pytest.mark.parametrize("names", [None, NAMES], ids=["columns unknown", "columns known"])
def test_a_workbook_comes_back_as_it_was_and_leaves_nothing_behind(
    uploads: Uploads, tmp_path: Path, children: list[subprocess.Popen[bytes]], names: list[str] | None
) -> None:
    file = stored(uploads, workbook(LONG))
    with closing(sure(opened(uploads, file, names))) as original:
        assert original.headers == ("sku", "rate", "Column C", "day")
        rows = list(original.rows())
    assert len(rows) == LONG
    number, cells = rows[7]
    assert (number, cells["rate"], cells["Column C"], cells["day"]) == (9, 1.0, True, dt.date(2026, 1, 9))
    assert cells["rate"].pattern == "0.0%"
    assert [path.name for path in (tmp_path / "uploads").iterdir()] == [file.name]
    assert [child.poll() is None for child in children] == [False]


def test_rows_arrive_while_the_child_still_reads(uploads: Uploads, children: list[subprocess.Popen[bytes]]) -> None:
    with closing(sure(opened(uploads, stored(uploads, workbook(LONG)), NAMES))) as original:
        rows = original.rows()
        assert next(rows)[0] == 2
        (child,) = children
        child.send_signal(signal.SIGSTOP)
        held = [next(rows)[0] for _ in range(50)]
        child.send_signal(signal.SIGCONT)
        assert held + [number for number, _ in rows] == list(range(3, LONG + 2))


def test_two_reports_of_one_workbook_read_it_each_by_itself(
    uploads: Uploads, children: list[subprocess.Popen[bytes]]
) -> None:
    file = stored(uploads, workbook(LONG))
    with closing(sure(opened(uploads, file, NAMES))) as first:
        one = first.rows()
        assert next(one)[0] == 2
        with closing(sure(opened(uploads, file, NAMES))) as second:
            assert next(second.rows())[0] == 2
        assert [child.poll() is None for child in children] == [True, False]
        assert len(list(one)) == LONG - 1


def test_a_child_that_dies_is_replaced_once(uploads: Uploads, children: list[subprocess.Popen[bytes]]) -> None:
    with closing(sure(opened(uploads, stored(uploads, workbook(LONG)), NAMES))) as original:
        rows = original.rows()
        found = [next(rows)[0]]
        children[-1].kill()
        found += [next(rows)[0] for _ in range(LONG - 10)]
        assert len(children) == 2
        assert found == list(range(2, LONG - 7))


@pytest.mark.parametrize(
    ("number", "deaths", "code"), [(signal.SIGKILL, 2, "reader_died"), (signal.SIGXCPU, 1, "too_costly")]
)
def test_a_child_that_ends_for_good_is_an_error_and_no_end_of_the_list(
    uploads: Uploads, children: list[subprocess.Popen[bytes]], number: int, deaths: int, code: str
) -> None:
    with closing(sure(opened(uploads, stored(uploads, workbook(2 * LONG)), NAMES))) as original:
        rows = original.rows()
        for death in range(deaths):
            next(row for row in rows if row[0] > death * LONG)
            children[-1].send_signal(number)
        with pytest.raises(InputError) as caught:
            list(rows)
    assert caught.value.code == code


def test_columns_that_cannot_be_read_to_the_end_are_no_columns(
    uploads: Uploads, children: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = lists.UploadedWorkbook.stream

    def ended(*order: Any) -> Iterator[list[Any]]:
        for row in stream(*order):
            yield row
            children[-1].send_signal(signal.SIGXCPU)

    monkeypatch.setattr(lists.UploadedWorkbook, "stream", ended)
    assert opened(uploads, stored(uploads, workbook(LONG))) is None
    assert len(children) == 1


def test_who_has_gone_ends_the_child(uploads: Uploads, children: list[subprocess.Popen[bytes]]) -> None:
    def alive() -> None:
        raise Gone

    with pytest.raises(Gone):
        opened(uploads, stored(uploads, workbook(LONG)), alive=alive)
    assert [child.poll() is None for child in children] == [False]


def test_a_workbook_that_cannot_be_read_is_none_and_kills_nobody(
    uploads: Uploads, children: list[subprocess.Popen[bytes]]
) -> None:
    whole = workbook(LONG)
    for body in (whole[: len(whole) // 2], b"PK\x03\x04" + b"x" * 200_000, b"\xd0\xcf\x11\xe0" + b"x" * 200_000):
        assert opened(uploads, stored(uploads, body)) is None
    assert [child.poll() is None for child in children] == [False] * 3


def test_rows_that_an_earlier_version_cached_go_with_their_workbook(uploads: Uploads, tmp_path: Path) -> None:
    file = stored(uploads, workbook(3))
    (tmp_path / "uploads" / f"{file.name}.rows").write_bytes(b"x")
    assert uploads.remove(file.name)
    assert list((tmp_path / "uploads").iterdir()) == []


class Listed(ListFile):
    """A list whose rows are given: the file, and its only sheet."""

    format, headers, places, sheet_name, planned = "xlsx", ("a", "b"), (0, 2), None, None

    def __init__(self, *rows: dict[str, Any]) -> None:
        self._rows = rows

    def open(self, *_: Any, **__: Any) -> Any:
        return self

    def rows(self, after: int = 0) -> Iterator[RawRow]:
        return (RawRow(number, values) for number, values in enumerate(self._rows, 2))


@pytest.mark.parametrize("known", [None, ["a", "b", "Column D", "Column B"]])
def test_columns_without_a_header_stand_in_their_places(known: list[str] | None) -> None:
    rows = [{"a": 1, "b": 2}, {"a": 1, "b": 2, "Column D": 3}, {"a": 1, "b": 2, "Column B": 4}]
    original = Original(Listed(*rows), ListSource(), [], lambda: None, known)
    assert original.headers == ("a", "Column B", "b", "Column D")
    assert list(original.rows()) == list(enumerate(rows, 2))


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    st.dates(),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.datetimes(),
    st.times(),
    st.timedeltas(),
    st.builds(CellError, st.sampled_from(["#N/A", "#SPILL!"])),
    st.builds(Percent, st.floats(-1, 1), st.sampled_from(["0%", "0.00%"])),
)


@settings(max_examples=examples(40, 100))
@given(values=st.lists(VALUES))
def test_every_value_passes_between_processes_with_its_type(values: list[Any]) -> None:
    found = [unpacked(each) if type(each) is dict else each for each in orjson.loads(dump(values))]
    assert found == values
    assert list(map(type, found)) == list(map(type, values))
    patterns = [[each.pattern for each in cells if isinstance(each, Percent)] for cells in (found, values)]
    assert patterns[0] == patterns[1]


def percents(path: Path, sheet: str) -> list[tuple[int, dict[str, str | None]]]:
    """Of each row of a sheet, as a report reads it: header -> the number format of a percentage, None for another cell."""
    with list_file(path, path.name, Limits()) as file, file.open(sheet, (), report=True) as source:
        rows = [(row.number, dict(row.values)) for row in source.rows()]
    with list_file(path, path.name, Limits()) as file, file.open(sheet, ()) as source:
        plain = [(row.number, dict(row.values)) for row in source.rows()]
    assert rows == plain, "a percentage is its number"
    assert Percent not in {type(cell) for _, cells in plain for cell in cells.values()}, "only a report asks for them"
    return [(number, {name: getattr(cell, "pattern", None) for name, cell in cells.items()}) for number, cells in rows]


def test_a_format_with_a_percent_sign_that_it_only_shows_is_none_and_an_odd_one_becomes_plain(tmp_path: Path) -> None:
    book = xlsxwriter.Workbook(tmp_path / "a.xlsx")
    sheet = book.add_worksheet("Data")
    sheet.write_row(0, 0, ["rate", "whole"])
    codes = ['0" %"', r"0\%", "0_%", "0.00%", '[Red]0%;"x"', "#,##0.0%", "0%"]
    for row, code in enumerate(codes, 1):
        sheet.write_number(row, 0, 0.5, book.add_format({"num_format": code}))
        sheet.write_number(row, 1, 1, book.add_format({"num_format": code}))
    book.close()
    expected = [None, None, None, "0.00%", "0.00%", "#,##0.0%", "0%"]
    assert percents(tmp_path / "a.xlsx", "Data") == [
        (row, {"rate": pattern, "whole": pattern}) for row, pattern in enumerate(expected, 2)
    ]


def test_a_sheet_that_turns_out_unusual_in_its_middle_gives_each_row_once(tmp_path: Path) -> None:
    rows = rows_xml([["a", "b"], *([f"x{n}", n] for n in range(LONG))])
    path = xlsx(tmp_path / "f", sheet_xml(f"{rows}<!-- -->"))
    with list_file(path, path.name, Limits()) as file, file.open(None, (), report=True) as source:
        assert [row.values["b"] for row in source.rows()] == list(range(LONG))


def test_a_fault_in_the_middle_is_one_where_a_report_reads_it(tmp_path: Path) -> None:
    rows: list[list[Any]] = [["a", "b"], *([f"x{n}", n] for n in range(LONG))]
    path = xlsx(tmp_path / "f", sheet_xml(rows_xml(rows).replace(f"<v>{LONG - 1}</v>", "<v>none</v>")))
    with list_file(path, path.name, Limits()) as file, file.open(None, (), report=True) as source:
        found = source.rows()
        assert [next(found).number for _ in range(LONG // 2)] == list(range(2, LONG // 2 + 2))
        with pytest.raises(InputError) as caught:
            list(found)
    assert caught.value.code == "damaged_file"


def test_percentages_of_an_opendocument_sheet_are_found_where_rows_and_cells_are_repeated(tmp_path: Path) -> None:
    def text(value: str) -> str:
        return f'<table:table-cell office:value-type="string"><text:p>{value}</text:p></table:table-cell>'

    def cell(kind: str, more: str = "") -> str:
        return f'<table:table-cell office:value-type="{kind}" office:value="0.5"{more}/>'

    head = f"<table:table-row>{text('a')}{text('b')}{text('c')}</table:table-row>"
    twice = cell("percentage", ' table:number-columns-repeated="2"')
    content = (
        '<office:document-content xmlns:office="o" xmlns:table="t" xmlns:text="x"><office:body><office:spreadsheet>'
        f'<table:table table:name="Data">{head}<table:table-row table:number-rows-repeated="3">{cell("float")}'
        f"{twice}</table:table-row></table:table>"
        "</office:spreadsheet></office:body></office:document-content>"
    )
    with zipfile.ZipFile(tmp_path / "a.ods", "w") as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
        archive.writestr("content.xml", content)
    assert percents(tmp_path / "a.ods", "Data") == [(row, {"a": None, "b": "0.00%", "c": "0.00%"}) for row in (2, 3, 4)]
