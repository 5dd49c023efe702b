"""Workbooks that real programs have written, cell by cell as LibreOffice shows them."""

# ruff: noqa: DTZ001 - the times of a sheet have no zone
from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import python_calamine
from support.sheets import read

from asynctask.errors import InputError, UnsupportedFormat
from asynctask.lists.readers import CellError, Limits
from asynctask.lists.readers.base import OpenOptions
from asynctask.lists.readers.ods import ods_table
from asynctask.lists.readers.opening import open_source
from asynctask.lists.readers.table import Table
from asynctask.lists.readers.xls import xls_table
from asynctask.lists.readers.xlsx import xlsx_table

FOLDER = Path(__file__).parents[1] / "data/workbooks"
TABLES: dict[str, Callable[[Path, OpenOptions], Table]] = {".xlsx": xlsx_table, ".xls": xls_table, ".ods": ods_table}

DATES: dict[int, list[Any]] = {
    1: [dt.date(2021, 1, 1), 15],
    2: [dt.date(2021, 1, 2), 16],
    3: [dt.timedelta(hours=255, minutes=10, seconds=10), 17],
}
NUMBERS: dict[int, list[Any]] = {
    1: [1, 2],
    2: [3, 4],
    3: [5, 6],
    5: ["This workbook contains 4 sheets: Visible, Hidden, VeryHidden and Chart"],
}
ISO = "Created with openpyxl, see https://openpyxl.readthedocs.io/en/latest/datetime.html#using-the-iso-8601-format"
SHOWN: dict[tuple[str, str | None], dict[int, list[Any]]] = {
    ("date.xls", None): DATES,
    ("date_1904.xlsx", None): DATES,
    ("date_iso.xlsx", None): {
        1: [dt.date(2021, 1, 1)],
        2: [dt.datetime(2021, 1, 1, 10, 10, 10)],
        3: [dt.time(10, 10, 10)],
        4: ["This workbook contains datetime in ISO 8601"],
        5: ["Please, check source code of the file, if you resave it"],
        6: [ISO],
    },
    ("any_sheets.xlsx", None): NUMBERS,
    ("any_sheets.ods", None): NUMBERS,
    ("encoded_entities.xlsx", None): {1: ["&"]},
    # What Excel saved; LibreOffice computes anew, and comes to other errors of its own for three of them.
    ("errors.xlsx", None): {
        number: [CellError(text)]
        for number, text in enumerate(["#DIV/0!", "#NAME?", "#VALUE!", "#NULL!", "#REF!", "#NUM!", "#N/A"], 1)
    },
    ("has_x000D_.xlsx", None): {1: ["ABC\r\nDEF"]},
    ("header-row.xlsx", None): {
        3: [None, None, "Note 1"],
        9: ["Columns", "Column A", "Column B", "Column C"],
        10: ["put data here", 1, 2, 3],
    },
    ("inlineStr_cdata.xlsx", None): {1: ["Hello CDATA", "World"], 2: ["12345", "NormalText"]},
    ("merged_range.xlsx", None): {
        1: ["A1", "B1", "C1", None, "E1", "F1", "G1", "H1"],
        3: ["A3", "B3", "C3", None, "E3", "F3", "G3", "H3"],
        4: ["A4", "B4", "C4", None, "E4", "F4", "G4", "H4"],
    },
    ("merged_range.xlsx", "Sheet2"): {
        1: ["A1", "B1", "C1", None, "E1", "F1"],
        3: [None, "B3", "C3", None, "E3"],
        4: [None, "B4", None, None, "E4"],
    },
    ("no-header.xlsx", None): {3: ["a", 0], 4: ["b", 1]},
    ("number_rows_repeated.ods", "Sheet1"): {1: ["A", "B"], 2: ["C", "D"], 3: ["C", "D"], 6: ["C", "D"], 8: ["C", "D"]},
    ("number_rows_repeated.ods", "Sheet2"): {2: ["A", "B"], 3: ["C", "D"], 4: ["C", "D"], 7: ["C", "D"], 9: ["C", "D"]},
    ("number_rows_repeated.ods", "Sheet3"): {3: ["A", "B"], 4: ["C", "D"], 5: ["C", "D"], 8: ["C", "D"], 10: ["C", "D"]},
    ("special_cells.ods", None): {
        1: ["Split\nLine"],
        2: ["Value  With spaces"],
        3: ["Value   With 3 spaces"],
        4: ["Value   With spaces before and after"],
        5: ["Value   With 2 spaces before and after"],
    },
}


def cells(name: str, sheet: str | None = None) -> dict[int, list[Any]]:
    path = FOLDER / name
    table = TABLES[path.suffix](path, OpenOptions(sheet, Limits(), frozenset()))
    try:
        found = dict(table.cells())
        assert table.filled == len(found)
        return found
    finally:
        table.close()


@pytest.mark.parametrize(("name", "sheet"), SHOWN)
def test_a_workbook_has_the_cells_that_are_shown(name: str, sheet: str | None) -> None:
    assert cells(name, sheet) == SHOWN[name, sheet]


def test_texts_go_on_over_the_records_of_an_old_workbook() -> None:
    found = cells("sst_continue.xls")
    text = "This is a long string with a serial number at the end {:04d}"
    assert [found[number] for number in range(1, 135)] == [[text.format(number)] for number in range(1, 135)]
    assert found[135] == ["This is a long string with a serial num"]
    assert found[136] == ["New CONTINUE block"]


def test_an_empty_workbook_is_said_to_be_empty() -> None:
    with pytest.raises(InputError) as caught:
        cells("empty_sheet.xlsx")
    assert caught.value.code == "empty_sheet"


@pytest.mark.parametrize("name", ["pass_protected.xlsx", "pass_protected.ods"])
def test_a_password_is_named(name: str) -> None:
    with pytest.raises(UnsupportedFormat) as caught:
        read(FOLDER / name)
    assert caught.value.code == "encrypted"
    assert "remove the password" in str(caught.value)


@pytest.mark.parametrize("name", ["any_sheets.xlsx", "any_sheets.ods"])
def test_hidden_sheets_are_passed_over_and_read_only_when_asked_for(name: str) -> None:
    for sheet, code in (("Hidden", "empty_sheet"), ("VeryHidden", "empty_sheet"), ("Nope", "unknown_sheet")):
        with pytest.raises(InputError) as caught:
            cells(name, sheet)
        assert caught.value.code == code
    assert cells(name, " visible ") == NUMBERS


def test_the_header_is_found_under_a_note() -> None:
    headers, rows = read(FOLDER / "header-row.xlsx")
    assert headers == ("Columns", "Column A", "Column B", "Column C")
    assert [(row.number, list(row.values.values())) for row in rows] == [(10, ["put data here", 1, 2, 3])]
    with pytest.raises(InputError) as caught:
        read(FOLDER / "no-header.xlsx", expect={"name"})
    assert caught.value.code == "no_header"
    assert "row 3 has: a, 0" in str(caught.value)


@pytest.mark.parametrize("suffix", ["xls", "ods"])
def test_every_kind_of_cell_comes_back_from_what_libreoffice_saves(suffix: str) -> None:
    path = FOLDER / f"made_by_libreoffice.{suffix}"
    with open_source(path, "x", limits=Limits()) as source:
        assert (source.format, source.sheet_name, source.planned) == (suffix, "One", 7)
        rows = list(source.rows())
    assert [row.number for row in rows] == [2, 3, 7, 8, 9, 13, 15]
    for count, row in enumerate(rows[:5], 1):
        assert row.values == {
            "int": count,
            "float": pytest.approx(count * 1.37, rel=1e-15),
            "text": f"Text {count} 春🎉",
            "date": dt.date(2026, 3, 5 + count),
            "moment": dt.datetime(2026, 3, 5 + count, 14, 30, 15),
            "time": dt.time(8, 5, count),
            "dur": dt.timedelta(hours=30 + count),
            "pct": 0.125 * count,
            "bool": count % 2 == 0,
            "err": CellError("#N/A"),
            "formula": 2 * count,
            "digits": "1234567890123456789",
            "zeros": "00123",
            "money": 12.5 * count,
            "cjk": dt.date(2026, 3, 5),
        }
        assert type(row.values["int"]) is int
        assert type(row.values["bool"]) is bool
    last = {name: value for name, value in rows[6].values.items() if value is not None}
    # ="a"&"b": LibreOffice computes it when it opens the old format, but has saved 0.
    assert last == {"text": "ab" if suffix == "ods" else 0, "date": "rich text"}
    assert cells(path.name, "Hid") == {1: ["x"]}
    other = cells(path.name, "日本 Two")
    assert [other[number] for number in range(3, 8)] == [
        [None, None, "a", "b"],
        [None, None, 1, 10_000_000_000],
        [None, None, -5, 1.5e-7],
        [None, None, 1_073_741_823, -1_073_741_824],
        [None, None, 123_456_789_012_346_000, pytest.approx(0.3)],
    ]
    assert other[206] == [None, None, 199 * 1000.25, "é" * 597]


def plain(value: Any) -> Any:
    """A value as both readers have it: the other one has no error cells, and no digits beyond fifteen."""
    if isinstance(value, CellError):
        return None
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, dt.datetime) and value.time() == dt.time():
        return value.date()
    if isinstance(value, dt.timedelta):
        hours, rest = divmod(value // dt.timedelta(seconds=1), 3600)
        return f"PT{hours:02d}H{rest // 60:02d}M{rest % 60:02d}S"
    return value if isinstance(value, bool) or not isinstance(value, int | float) else float(f"{value:.14g}")


OPEN = sorted(path for path in FOLDER.glob("*.[xo]*") if "protected" not in path.name)


@pytest.mark.parametrize("path", OPEN, ids=lambda path: path.name)
def test_another_reader_sees_the_same_cells(path: Path) -> None:
    book = python_calamine.CalamineWorkbook.from_path(str(path))
    for name in book.sheet_names:
        if name == "Chart":
            continue
        try:
            mine = cells(path.name, name)
        except InputError as error:
            assert error.code == "empty_sheet"  # noqa: PT017 - not every sheet has rows
            mine = {}
        sheet = book.get_sheet_by_name(name)
        left = [None] * (sheet.start[1] if sheet.start else 0)
        for number, row in enumerate(sheet.iter_rows() if sheet.start else (), 1):
            theirs = [*left, *map(plain, row)]
            ours = [plain(value) for value in mine.get(number, [])]
            assert ours + [None] * (len(theirs) - len(ours)) == theirs, f"{name}, row {number}"
    book.close()
