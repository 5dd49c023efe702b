"""The original list of a report: a workbook is read once, by a child, and its rows come back as they were."""

# ruff: noqa: DTZ001 - the times of a sheet have no zone
from __future__ import annotations

import datetime as dt
import fcntl
import io
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xlsxwriter
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drawn import examples

from asynctask.clock import SystemClock, SystemIds
from asynctask.lists.original_rows import KeptRows, Percents, keep_rows, percents_of
from asynctask.lists.readers import CellError, Limits, RawRow
from asynctask.lists.rows import ListSource
from asynctask.lists.uploads import StoredFile, Uploads
from asynctask.lists.written_cells import Percent
from asynctask.reports.report import Original, open_original


class Gone(Exception):
    """What stops the work in these tests."""


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


def stored(uploads: Uploads, body: bytes, filename: str = "list.xlsx") -> StoredFile:
    return uploads.store(io.BytesIO(body), filename)


def opened(uploads: Uploads, file: StoredFile, **more: Any) -> Original | None:
    return open_original(uploads, ListSource(name=file.name, filename=file.filename), Limits(), ["sku"], **more)


def left(tmp_path: Path) -> set[str]:
    """The files beside the uploads and the lock."""
    return {path.suffix for path in (tmp_path / "uploads").iterdir() if path.name != ".reading"}


def test_a_large_workbook_is_read_by_a_child_and_only_once(
    uploads: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = stored(uploads, workbook(5_000))
    assert file.size > 100_000
    looks: list[None] = []
    original = opened(uploads, file, alive=lambda: looks.append(None))
    assert looks, "nobody waited for a child"
    assert original is not None
    assert original.headers == ("sku", "rate", "Column C", "day")
    rows = list(original.rows())
    assert len(rows) == 5_000
    number, cells = rows[7]
    assert (number, cells["rate"], cells["Column C"], cells["day"]) == (9, 1.0, True, dt.date(2026, 1, 9))
    assert cells["rate"].pattern == "0.0%"
    assert left(tmp_path) == {"", ".rows"}

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it was read again"))
    again = opened(uploads, file)
    assert again is not None
    assert list(again.rows()) == rows
    uploads.remove(file.name)
    assert left(tmp_path) == set()


def test_who_has_gone_ends_the_child_and_leaves_nothing_behind(uploads: Uploads, tmp_path: Path) -> None:
    def alive() -> None:
        raise Gone

    file = stored(uploads, workbook(5_000))
    with pytest.raises(Gone):
        opened(uploads, file, alive=alive)
    assert left(tmp_path) == {""}
    assert opened(uploads, file) is not None


def test_only_one_at_a_time_reads_a_workbook_and_who_waits_may_give_up(uploads: Uploads, tmp_path: Path) -> None:
    file = stored(uploads, workbook(3))
    with (tmp_path / "uploads" / ".reading").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def alive() -> None:
            raise Gone

        with pytest.raises(Gone):
            opened(uploads, file, alive=alive)
    assert opened(uploads, file) is not None


@pytest.mark.parametrize("spoilt", [b"", b"\x1f\x8b", b"no gzip", None])
def test_rows_that_were_spoilt_are_read_again_from_the_workbook(uploads: Uploads, spoilt: bytes | None) -> None:
    file = stored(uploads, workbook(3))
    assert opened(uploads, file) is not None
    kept = uploads.kept_rows(file.name)
    kept.write_bytes(kept.read_bytes()[:20] if spoilt is None else spoilt)
    original = opened(uploads, file)
    assert original is not None
    assert len(list(original.rows())) == 3


def test_a_workbook_that_cannot_be_read_is_none_and_kills_nobody(uploads: Uploads, tmp_path: Path) -> None:
    whole = workbook(5_000)
    for body in (whole[: len(whole) // 2], b"PK\x03\x04" + b"x" * 200_000, b"\xd0\xcf\x11\xe0" + b"x" * 200_000):
        assert opened(uploads, stored(uploads, body)) is None
    assert left(tmp_path) == {""}


class Listed:
    """A list whose rows are given."""

    format, headers, places, sheet_name, planned = "xlsx", ("a", "b"), (0, 2), None, None

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def rows(self, after: int = 0) -> Iterator[RawRow]:
        return (RawRow(number, values) for number, values in enumerate(self._rows, 2))


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
)


@settings(max_examples=examples(40, 100))
@given(rows=st.lists(st.fixed_dictionaries({"a": VALUES, "b": VALUES}, optional={"Column D": VALUES, "Column B": VALUES})))
def test_every_value_is_kept_with_its_type(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    target = tmp_path_factory.mktemp("kept") / "list.rows"
    source: Any = Listed(rows)
    keep_rows(source, Percents(), target)
    kept = KeptRows(target)
    used = {name for row in rows for name in row}
    assert kept.headers == tuple(name for name in ("a", "Column B", "b", "Column D") if name in used | {"a", "b"})
    for (number, found), (wanted, values) in zip(kept.rows(), enumerate(rows, 2), strict=True):
        assert number == wanted
        for name in kept.headers:
            assert found.get(name) == values.get(name)
            assert type(found.get(name)) is type(values.get(name))


def test_percentages_are_known_by_runs_of_cells() -> None:
    found = Percents()
    assert not found
    for row in (2, 3, 4, 6):
        found.add(row, 1, "0%")
    found.add(7, 1, "0.0%", 9)
    assert [found.of(row, 1) for row in range(1, 11)] == [None, *["0%"] * 3, None, "0%", *["0.0%"] * 3, None]
    assert found.of(2, 0) is found.of(2, None) is None


def test_a_format_with_a_percent_sign_that_it_only_shows_is_none_and_an_odd_one_becomes_plain(tmp_path: Path) -> None:
    book = xlsxwriter.Workbook(tmp_path / "a.xlsx")
    sheet = book.add_worksheet("Data")
    for row, code in enumerate(['0" %"', r"0\%", "0.00%", '[Red]0%;"x"', "#,##0.0%"]):
        sheet.write_number(row, 0, 0.5, book.add_format({"num_format": code}))
    book.close()
    found = percents_of(tmp_path / "a.xlsx", Limits(), "xlsx", "Data")
    assert [found.of(row, 0) for row in range(1, 6)] == [None, None, "0.00%", "0.00%", "#,##0.0%"]
    assert not percents_of(tmp_path / "a.xlsx", Limits(), "xlsx", "Other")


def test_percentages_of_an_opendocument_sheet_are_found_where_rows_and_cells_are_repeated(tmp_path: Path) -> None:
    cell = '<table:table-cell office:value-type="{}"{}/>'
    twice, thrice = (f' table:number-columns-repeated="{n}"' for n in (2, 3))
    content = (
        '<office:document-content xmlns:office="o" xmlns:table="t">'
        f'<table:table table:name="Other"><table:table-row>{cell.format("percentage", "")}</table:table-row></table:table>'
        '<table:table table:name="Data">'
        f"<table:table-row>{cell.format('string', thrice)}</table:table-row>"
        f'<table:table-row table:number-rows-repeated="4">{cell.format("float", "")}{cell.format("percentage", twice)}'
        "</table:table-row></table:table></office:document-content>"
    )
    with zipfile.ZipFile(tmp_path / "a.ods", "w") as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
        archive.writestr("content.xml", content)
    found = percents_of(tmp_path / "a.ods", Limits(), "ods", "Data")
    assert [[found.of(row, column) is not None for column in range(4)] for row in (1, 2, 5, 6)] == [
        [False] * 4,
        [False, True, True, False],
        [False, True, True, False],
        [False] * 4,
    ]


def test_a_percentage_is_a_number_with_a_format() -> None:
    assert Percent(0.5, "0%") == 0.5
    assert Percent(0.5, "0%").pattern == "0%"
