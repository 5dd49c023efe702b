"""What the readers take, what they refuse, and with which code."""

# ruff: noqa: DTZ001 - the times of a sheet have no zone
from __future__ import annotations

import datetime as dt
import io
import json
import re
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import openpyxl
import pytest
import xlsxwriter
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drawn import examples

from asynctask.config import Config
from asynctask.errors import InputError, TooLarge, UnsupportedFormat
from asynctask.lists.problems import CODES
from asynctask.lists.readers import CellError, Limits, RawRow
from asynctask.lists.readers.base import normalise, trimmed
from asynctask.lists.readers.opening import FORMATS, open_source

LIMITS = Limits()
SHEET = "xl/worksheets/sheet1.xml"
OPEN = '<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><sheetData>'
CLOSE = "</sheetData></worksheet>"
HEADER = "".join(f'<c r="{n}1" t="inlineStr"><is><t>{n.lower()}</t></is></c>' for n in "AB")
HEADER = f'<row r="1">{HEADER}</row>'


def read(path: Path, filename: str | None = None, **options: Any) -> tuple[tuple[str, ...] | None, list[RawRow]]:
    limits = options.pop("limits", LIMITS)
    with open_source(path, filename or path.name, limits=limits, **options) as source:
        return source.headers, list(source.rows())


def refusal(path: Path, filename: str | None = None, **options: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        read(path, filename, **options)
    assert str(caught.value)
    return caught.value


def saved(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def workbook(path: Path, fill: Callable[[Any], None]) -> Path:
    book = xlsxwriter.Workbook(str(path))
    fill(book)
    book.close()
    return path


def grid(path: Path, rows: list[list[Any]]) -> Path:
    def fill(book: Any) -> None:
        sheet = book.add_worksheet("Data")
        for number, row in enumerate(rows):
            for column, cell in enumerate(row):
                if isinstance(cell, str):
                    sheet.write_string(number, column, cell)
                elif cell is not None:
                    sheet.write(number, column, cell)

    return workbook(path, fill)


def altered(path: Path, parts: Mapping[str, str | bytes]) -> Path:
    """A small sound workbook with some parts put in place of its own."""
    base = io.BytesIO(grid(path, [["a", "b"], ["x", 1]]).read_bytes())
    with zipfile.ZipFile(base) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in dict.fromkeys([*old.namelist(), *parts]):
            new.writestr(name, parts[name] if name in parts else old.read(name))
    return path


def sheet_of(path: Path, rows: str, **parts: str) -> Path:
    return altered(path, {SHEET: OPEN + HEADER + rows + CLOSE} | parts)


class TestWorkbooks:
    def test_cells_keep_their_types(self, tmp_path: Path) -> None:
        def fill(book: Any) -> None:
            sheet = book.add_worksheet()
            day, moment = (book.add_format({"num_format": f}) for f in ("yyyy-mm-dd", "yyyy-mm-dd hh:mm:ss"))
            sheet.write_row(0, 0, ["int", "float", "text", "date", "moment", "bool", "formula", "digits", "zeros"])
            sheet.write_number(1, 0, 3)
            sheet.write_number(1, 1, 3.5)
            sheet.write_string(1, 2, "  春 🎉 \u3000")
            sheet.write_datetime(1, 3, dt.datetime(2026, 3, 5), day)
            sheet.write_datetime(1, 4, dt.datetime(2026, 3, 5, 14, 30), moment)
            sheet.write_boolean(1, 5, True)
            sheet.write_formula(1, 6, "=1+1", None, 2)
            sheet.write_string(1, 7, "1234567890123456789")
            sheet.write_string(1, 8, "00123")

        _, rows = read(workbook(tmp_path / "a.xlsx", fill))
        assert rows[0].number == 2
        assert list(rows[0].values.values()) == [
            3,
            3.5,
            "春 🎉",
            dt.date(2026, 3, 5),
            dt.datetime(2026, 3, 5, 14, 30),
            True,
            2,
            "1234567890123456789",
            "00123",
        ]
        assert type(rows[0].values["int"]) is int

    def test_an_error_cell_is_told_from_an_empty_one_and_from_its_text(self, tmp_path: Path) -> None:
        def fill(book: Any) -> None:
            sheet = book.add_worksheet()
            sheet.write_row(3, 2, ["a", "b", "c"])
            sheet.write_formula(5, 2, "=NA()", None, "#N/A")
            sheet.write_string(5, 3, "#N/A")
            sheet.write_formula(6, 4, "=1/0", None, "#DIV/0!")

        _, rows = read(workbook(tmp_path / "a.xlsx", fill))
        assert [(row.number, row.values) for row in rows] == [
            (6, {"a": CellError("#N/A"), "b": "#N/A", "c": None}),
            (7, {"a": None, "b": None, "c": CellError("#DIV/0!")}),
        ]

    def test_blank_rows_are_skipped_and_the_numbers_stay_those_of_the_sheet(self, tmp_path: Path) -> None:
        path = grid(tmp_path / "a.xlsx", [[], ["Spring sale"], [], ["a", "b"], [], [1, 2], [" ", ""], [], [3, None]])
        headers, rows = read(path)
        assert headers == ("a", "b")
        assert [(row.number, row.values) for row in rows] == [(6, {"a": 1, "b": 2}), (9, {"a": 3, "b": None})]

    def test_only_the_top_left_of_merged_cells_has_the_value(self, tmp_path: Path) -> None:
        def fill(book: Any) -> None:
            sheet = book.add_worksheet()
            sheet.write_row(0, 0, ["a", "b"])
            sheet.merge_range(1, 0, 2, 1, "m")
            sheet.write_row(3, 0, ["x", "y"])

        _, rows = read(workbook(tmp_path / "a.xlsx", fill))
        assert [row.values for row in rows] == [{"a": "m", "b": None}, {"a": "x", "b": "y"}]

    def test_the_first_visible_sheet_with_rows_is_read(self, tmp_path: Path) -> None:
        def fill(book: Any) -> None:
            book.add_worksheet("Empty")
            hidden = book.add_worksheet("Hidden")
            hidden.write_row(0, 0, ["no", "nay"])
            hidden.hide()
            book.add_chartsheet("Chart")
            book.add_worksheet("Data").write_row(0, 0, ["a", "b"])

        path = workbook(tmp_path / "a.xlsx", fill)
        assert read(path)[0] == ("a", "b")
        assert read(path, sheet="hidden ")[0] == ("no", "nay")
        assert refusal(path, sheet="Empty").code == "empty_sheet"
        error = refusal(path, sheet="Dta")
        assert error.code == "unknown_sheet"
        assert "'Empty', 'Hidden', 'Data'" in str(error)
        assert "Chart" not in str(error)

    def test_what_openpyxl_writes_is_read_too(self, tmp_path: Path) -> None:
        book = openpyxl.Workbook()
        book.active.append(["a", "b"])
        book.active.append(["x", dt.date(2026, 3, 5)])
        book.save(tmp_path / "a.xlsx")
        book.close()
        _, rows = read(tmp_path / "a.xlsx")
        assert [row.values for row in rows] == [{"a": "x", "b": dt.date(2026, 3, 5)}]

    def test_a_macro_workbook_gives_its_values(self, tmp_path: Path) -> None:
        path = altered(tmp_path / "a.xlsm", {"xl/vbaProject.bin": b"\xd0\xcf\x11\xe0"})
        assert [row.values for row in read(path)[1]] == [{"a": "x", "b": 1}]

    def test_the_planned_rows_are_known_without_reading(self, tmp_path: Path) -> None:
        path = grid(tmp_path / "a.xlsx", [["title"], [], ["a", "b"], [1, 2], [" ", "\u3000"], [], ["x"], ["\n", 4]])
        with open_source(path, "a.xlsx", limits=LIMITS) as source:
            assert source.planned == 3 == len(list(source.rows()))

    def test_rows_can_be_taken_up_after_a_number(self, tmp_path: Path) -> None:
        path = grid(tmp_path / "a.xlsx", [["a", "b"], [1, 2], [], [3, 4], [5, 6]])
        with open_source(path, "a.xlsx", limits=LIMITS) as source:
            assert [row.number for row in source.rows(after=2)] == [4, 5]
            assert [row.number for row in source.rows()] == [2, 4, 5]

    def test_endless_empty_rows_end_the_sheet(self, tmp_path: Path) -> None:
        empty = "".join(f'<row r="{n}"><c r="A{n}" t="str"><f>X</f><v></v></c></row>' for n in range(3, 9000))
        path = sheet_of(tmp_path / "a.xlsx", f'<row r="2"><c r="A2"><v>1</v></c></row>{empty}')
        with open_source(path, "a.xlsx", limits=LIMITS) as source:
            assert source.planned == 1
            assert [row.number for row in source.rows()] == [2]

    def test_cells_that_have_only_a_format_are_no_cells(self, tmp_path: Path) -> None:
        path = sheet_of(tmp_path / "a.xlsx", '<row r="1048576"><c r="XFD1048576" s="1"/></row>')
        assert read(path)[1] == []

    def test_the_claimed_dimension_is_not_believed(self, tmp_path: Path) -> None:
        xml = OPEN.replace("<sheetData>", '<dimension ref="A1"/><sheetData>') + HEADER
        xml += "".join(f'<row r="{n}"><c r="A{n}"><v>{n}</v></c></row>' for n in range(2, 50)) + CLOSE
        assert len(read(altered(tmp_path / "a.xlsx", {SHEET: xml}))[1]) == 48

    def test_cells_without_references_stand_in_order(self, tmp_path: Path) -> None:
        path = sheet_of(tmp_path / "a.xlsx", '<row><c><v>1</v></c><c t="e"><v>#REF!</v></c></row>')
        assert [row.values for row in read(path)[1]] == [{"a": 1, "b": CellError("#REF!")}]

    def test_an_empty_value_left_of_the_table_moves_no_cell(self, tmp_path: Path) -> None:
        names = "".join(f'<c r="{n}2" t="inlineStr"><is><t>{n}</t></is></c>' for n in "CD")
        for kind in ("", ' t="str"', ' t="b"', ' t="e"'):
            rows = f'<row r="2">{names}</row><row r="3"><c r="A3"{kind}><v></v></c><c r="D3" t="e"><v>#N/A</v></c></row>'
            path = altered(tmp_path / "a.xlsx", {SHEET: OPEN + rows + CLOSE})
            try:
                _, found = read(path, expect={"C", "D"})
            except InputError as error:
                assert error.code == "damaged_file"  # noqa: PT017 - an empty truth value or error is none
            else:
                assert [(row.values["C"], row.values["D"]) for row in found] == [(None, CellError("#N/A"))]

    def test_a_number_that_is_none_becomes_an_error_cell(self, tmp_path: Path) -> None:
        path = sheet_of(tmp_path / "a.xlsx", '<row r="2"><c r="A2"><v>1e999</v></c></row>')
        assert read(path)[1][0].values["a"] == CellError("#NUM!")


class TestHostileWorkbooks:
    def test_a_bomb_is_refused_by_its_ratio(self, tmp_path: Path) -> None:
        error = refusal(sheet_of(tmp_path / "a.xlsx", " " * 5_000_000))
        assert isinstance(error, TooLarge)
        assert "max_unzip_ratio" in str(error)

    def test_a_bomb_is_refused_by_its_size(self, tmp_path: Path) -> None:
        error = refusal(sheet_of(tmp_path / "a.xlsx", " " * 100_000), limits=Limits(max_unzipped_bytes=50_000))
        assert isinstance(error, TooLarge)
        assert "max_unzipped_bytes" in str(error)
        assert "ASYNCTASK_MAX_UNZIPPED_BYTES" in str(error)

    @pytest.mark.parametrize("both", [False, True])
    def test_a_size_that_lies_is_found_out(self, tmp_path: Path, both: bool) -> None:
        data = bytearray(sheet_of(tmp_path / "a.xlsx", " " * 3_000_000).read_bytes())
        info = zipfile.ZipFile(io.BytesIO(bytes(data))).getinfo(SHEET)
        struct.pack_into("<I", data, data.rfind(SHEET.encode()) - 46 + 24, 2_000)
        if both:
            struct.pack_into("<I", data, info.header_offset + 22, 2_000)
        assert refusal(saved(tmp_path / "a.xlsx", bytes(data))).code == "zip_bomb"

    def test_a_far_cell_costs_no_memory(self, tmp_path: Path) -> None:
        far = sheet_of(tmp_path / "a.xlsx", '<row r="1048576"><c r="ALL1048576"><v>1</v></c></row>')
        tracemalloc.start()
        try:
            _, rows = read(far)
            assert tracemalloc.get_traced_memory()[1] < 4_000_000
        finally:
            tracemalloc.stop()
        assert rows == [RawRow(1_048_576, {"a": None, "b": None, "Column ALL": 1})]
        wide = sheet_of(tmp_path / "b.xlsx", '<row r="1048576"><c r="XFD1048576"><v>1</v></c></row>')
        assert "max_columns" in str(refusal(wide))

    def test_one_long_text_in_very_many_cells_costs_no_memory(self, tmp_path: Path) -> None:
        table = f"<sst><si><t>{'x' * 30_000}</t></si><si><t>y</t></si></sst>"
        rows = "".join(f'<row r="{n}"><c r="A{n}" t="s"><v>0</v></c></row>' for n in range(2, 4000))
        path = sheet_of(tmp_path / "a.xlsx", rows, **{"xl/sharedStrings.xml": table})
        tracemalloc.start()
        try:
            with open_source(path, "a.xlsx", limits=LIMITS) as source:
                assert sum(len(row.values["a"]) == 30_000 for row in source.rows()) == 3998
            assert tracemalloc.get_traced_memory()[1] < 4_000_000
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize(
        "table",
        [
            '<sst count="4000000000" uniqueCount="4000000000"><si><t>x</t></si></sst>',
            '<sst><si><t>x</t></si><sst uniqueCount="4000000000"/></sst>',
            '<sst><!-- x --><si><t>x</t></si><y:sst xmlns:y="y" uniqueCount="4000000000"/></sst>',
        ],
    )
    def test_a_table_of_texts_cannot_claim_to_be_huge(self, tmp_path: Path, table: str) -> None:
        assert refusal(altered(tmp_path / "a.xlsx", {"xl/sharedStrings.xml": table})).code == "damaged_file"

    @pytest.mark.parametrize(
        "rows",
        [
            '<row r="2"><c r="A0"><v>1</v></c></row>',
            '<row r="2"><c r="ZZZZ1"><v>1</v></c></row>',
            '<row r="99999999"><c><v>1</v></c></row>',
            '<row r="2"><c r="A2" t="s"><v>99999999</v></c></row>',
            '<row r="2"><c r="A2" t="zz"><v>1</v></c></row>',
            '<row r="2"><c r="A2"',
            '<row r="2" <row r="3"><c r="A3"><v>1</v></c></row>',
        ],
    )
    def test_nonsense_in_a_sheet_is_a_damaged_file(self, tmp_path: Path, rows: str) -> None:
        error = refusal(sheet_of(tmp_path / "a.xlsx", rows))
        assert (error.code, error.status) == ("damaged_file", 415)

    def test_a_document_type_is_refused(self, tmp_path: Path) -> None:
        xml = '<!DOCTYPE a [<!ENTITY a "aaaa">]>' + OPEN + HEADER + CLOSE
        assert refusal(altered(tmp_path / "a.xlsx", {SHEET: xml})).code == "damaged_file"

    def test_a_file_cut_off_anywhere_is_an_input_error(self, tmp_path: Path) -> None:
        whole = grid(tmp_path / "whole.xlsx", [["a", "b"], [1, 2]]).read_bytes()
        for size in range(1, len(whole), 97):
            assert isinstance(refusal(saved(tmp_path / "a.xlsx", whole[:size])), InputError)

    def test_a_flipped_byte_is_never_another_exception(self, tmp_path: Path) -> None:
        whole = grid(tmp_path / "whole.xlsx", [["a", "b"], [1, 2]]).read_bytes()
        raised: dict[int, Exception] = {}
        for place in range(0, len(whole), 23):
            data = bytearray(whole)
            data[place] ^= 0x5A
            try:
                read(saved(tmp_path / "a.xlsx", bytes(data)))
            except Exception as error:
                raised[place] = error
        assert raised
        assert not {place: error for place, error in raised.items() if not isinstance(error, InputError)}

    def test_a_zip_with_two_directories_or_too_many_parts_is_refused(self, tmp_path: Path) -> None:
        whole = grid(tmp_path / "whole.xlsx", [["a", "b"], [1, 2]]).read_bytes()
        assert refusal(saved(tmp_path / "a.xlsx", whole + whole)).code == "damaged_file"
        path = altered(tmp_path / "b.xlsx", {f"part{n}": "" for n in range(10_001)})
        assert refusal(path).code == "zip_bomb"


class TestFormats:
    @pytest.mark.parametrize(
        ("data", "name", "code"),
        [
            (b"", "a.xlsx", "empty_file"),
            (b"", "a.csv", "empty_file"),
            (b"\xef\xbb\xbf \r\n\t\n", "a.csv", "empty_file"),
            (b"%PDF-1.7 ...", "a.pdf", "unsupported_format"),
            (b"\x89PNG\r\n\x1a\n...", "a.xlsx", "unsupported_format"),
            (b"\x09\x04\x06\x00\x00\x00\x10\x00" + bytes(50), "a.xls", "unsupported_format"),
            (
                b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(500) + "EncryptedPackage".encode("utf-16-le"),
                "a.xlsx",
                "encrypted",
            ),
            (b"a,b\n1,2\n", "a.pdf", "unsupported_format"),
            (b"no table", "a.xlsx", "unsupported_format"),
            (b"a,b\n\x01,2\n", "a.xls", "unsupported_format"),
            (b"MIME-Version: 1.0\nX-Document-Type: Workbook\n", "a.xls", "unsupported_format"),
            (b'<?xml version="1.0"?><?mso-application progid="Excel.Sheet"?><Workbook/>', "a.xls", "unsupported_format"),
            (b"<html><table><tr><td>1</td></tr></table></html>", "a.xls", "unsupported_format"),
            (b"<!DOCTYPE html>", "a.csv", "unsupported_format"),
        ],
    )
    def test_what_cannot_be_read_is_refused_by_name(self, tmp_path: Path, data: bytes, name: str, code: str) -> None:
        error = refusal(saved(tmp_path / "upload", data), name)
        assert isinstance(error, UnsupportedFormat)
        assert (error.code, error.status) == (code, 415)
        if code != "encrypted":
            assert ".xlsx" in str(error)
            assert ".json" in str(error)

    @pytest.mark.parametrize(
        ("part", "what"), [("content.xml", ".ods"), ("word/document.xml", "Word"), ("xl/workbook.bin", ".xlsb")]
    )
    def test_other_zips_are_told_by_their_content(self, tmp_path: Path, part: str, what: str) -> None:
        with zipfile.ZipFile(tmp_path / "a.xlsx", "w") as archive:
            archive.writestr("mimetype", "application/x")
            archive.writestr(part, "<x/>")
        error = refusal(tmp_path / "a.xlsx")
        assert error.status == 415
        assert what in str(error)

    def test_the_content_decides_not_the_name(self, tmp_path: Path) -> None:
        path = grid(tmp_path / "a.xlsx", [["a", "b"], [1, 2]])
        assert read(path, "a.csv")[1][0].values == {"a": 1, "b": 2}
        assert read(path.rename(tmp_path / "upload.xls"), "upload")[1][0].values == {"a": 1, "b": 2}
        assert read(saved(tmp_path / "b", '[{"a": 1}]'), "b.csv")[1] == [RawRow(1, {"a": 1})]
        assert read(saved(tmp_path / "c", "a,b\n1,2\n"), "whatever")[1][0].values == {"a": "1", "b": "2"}
        assert read(saved(tmp_path / "d", "a\tb\n1\t2\n"), "export.xls")[1][0].values == {"a": "1", "b": "2"}
        assert read(saved(tmp_path / "e", "a,b\n1,2\n"), "list.xlsx")[1][0].values == {"a": "1", "b": "2"}

    def test_a_file_over_the_limit_is_not_even_opened(self, tmp_path: Path) -> None:
        error = refusal(saved(tmp_path / "a.csv", "a,b\n1,2\n"), limits=Limits(max_file_bytes=3))
        assert isinstance(error, TooLarge)
        assert error.status == 413
        assert "max_file_bytes" in str(error)

    def test_the_limits_have_the_names_and_defaults_of_the_configuration(self) -> None:
        config = Config()
        for name in Limits.__slots__:
            if name != "max_empty_rows":
                assert getattr(LIMITS, name) == getattr(config, name)

    def test_every_format_and_code_stands_in_the_docs(self) -> None:
        root = Path(__file__).parents[2]
        text = (root / "docs/reference/sheets.md").read_text(encoding="utf-8")
        sources = [*(root / "asynctask/lists/readers").glob("*.py")]
        sources += [root / "asynctask/lists" / f"{name}.py" for name in ("items", "coerce", "problems")]
        code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
        codes = set(re.findall(r'code="(\w+)"', code)) | set(re.findall(r'Unclear\(\s*"(\w+)"', code))
        codes |= set(re.findall(r'(?:Problem|fault)\(\s*[\w.]+,\s*[^,]+,\s*"(\w+)"', code)) | set(CODES.values())
        assert len(codes) > 25
        assert sorted(each for each in codes if f"`{each}`" not in text) == []
        assert all(f"`{suffix}`" in text for known in FORMATS.values() for suffix in known.suffixes)


class TestHeaders:
    def test_expected_names_tell_the_header_from_the_titles_over_it(self, tmp_path: Path) -> None:
        rows: list[list[Any]] = [
            ["Our campaigns", "of spring"],
            ["as of", "today"],
            [" CAMPAIGN　code ", "Ｂｕｄｇｅｔ", "x"],
            ["c1", 5, 6],
        ]
        headers, found = read(grid(tmp_path / "a.xlsx", rows), expect={"campaign code", "budget"})
        assert headers == ("CAMPAIGN code", "Ｂｕｄｇｅｔ", "x")
        assert [row.number for row in found] == [4]

    def test_without_expected_names_the_first_row_of_texts_is_the_header(self, tmp_path: Path) -> None:
        assert read(grid(tmp_path / "a.xlsx", [["Title"], [1, 2], ["a", "b"], ["x", "y"]]))[0] == ("a", "b")
        assert read(saved(tmp_path / "one.csv", "code\nx\ny\n"))[0] == ("code",)

    def test_no_header_says_what_was_looked_for_and_found(self, tmp_path: Path) -> None:
        error = refusal(grid(tmp_path / "a.xlsx", [["x", 1], ["y", 2]]), expect={"code", "budget"})
        assert error.code == "no_header"
        assert "budget, code" in str(error)
        assert "row 1 has: x, 1" in str(error)
        assert refusal(saved(tmp_path / "a.csv", "1,2\n3,4\n")).code == "no_header"

    def test_a_name_over_two_columns_is_refused(self, tmp_path: Path) -> None:
        error = refusal(grid(tmp_path / "a.xlsx", [["code", "b", "Code "], [1, 2, 3]]))
        assert error.code == "duplicate_column"
        assert "columns A and C" in str(error)
        assert [problem.column for problem in error.errors] == ["Code"]

    def test_a_column_without_a_name_is_kept_where_it_has_cells(self, tmp_path: Path) -> None:
        path = grid(tmp_path / "a.xlsx", [["a", None, "b"], [1, None, 2], [3, "x", 4, "y"]])
        headers, rows = read(path)
        assert headers == ("a", "b")
        assert [row.values for row in rows] == [{"a": 1, "b": 2}, {"a": 3, "Column B": "x", "b": 4, "Column D": "y"}]

    def test_letters_are_those_of_the_sheet_wherever_the_table_stands(self, tmp_path: Path) -> None:
        path = grid(tmp_path / "a.xlsx", [[None, None, "a", None, "b"], [None, None, 1, 2, 3]])
        assert read(path)[1][0].values == {"a": 1, "Column D": 2, "b": 3}


class TestCsv:
    @pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
    def test_the_delimiter_is_found(self, tmp_path: Path, delimiter: str) -> None:
        text = "\n".join(delimiter.join(row) for row in [["code", "price"], ["x1", "1.5"], ["x2", '"a, b; c|d"']])
        _, rows = read(saved(tmp_path / "a.csv", text))
        assert [row.values for row in rows] == [{"code": "x1", "price": "1.5"}, {"code": "x2", "price": "a, b; c|d"}]

    def test_a_comma_in_numbers_does_not_hide_the_semicolon(self, tmp_path: Path) -> None:
        headers, rows = read(saved(tmp_path / "a.csv", "code;price\nx;1,5\ny;2,5\n"), expect={"code"})
        assert headers == ("code", "price")
        assert rows[0].values["price"] == "1,5"

    def test_what_nobody_sees_at_the_ends_of_a_text_is_not_read(self, tmp_path: Path) -> None:
        ends = "\ufeff\u200b\u2060\u00ad \u200e"
        text = f'\ufeff{ends}sku{ends},b{ends}\n{ends}a\u200bb{ends},{ends}\n"{ends}7",\'{ends}\n'
        headers, rows = read(saved(tmp_path / "a.csv", text), expect={"sku"})
        assert headers == ("sku", "b")
        assert [list(row.values.values()) for row in rows] == [["a\u200bb", None], ["7", "'"]]
        assert normalise(f"{ends}S\u00adKU") == "sku", "a name that someone maps or expects is compared so, too"

    def test_quotes_escaped_by_backslashes_are_read_if_that_fits_the_whole_text(self, tmp_path: Path) -> None:
        text = 'code,size\n"5\\" pipe",1\n"a \\"b\\", c\nd \\\\",2\n"",3\n'
        _, rows = read(saved(tmp_path / "a.csv", text))
        assert [row.values["code"] for row in rows] == ['5" pipe', 'a "b", c\nd \\', None]
        assert not any(row.problems for row in rows)

    def test_a_backslash_before_a_closing_quote_is_one(self, tmp_path: Path) -> None:
        _, rows = read(saved(tmp_path / "a.csv", 'folder,size\n"C:\\data\\",1\n"D:\\",2\n'))
        assert [row.values["folder"] for row in rows] == ["C:\\data\\", "D:\\"]

    @pytest.mark.parametrize(
        ("row", "torn"),
        [
            ('"5" pipe,1', 1), ('"5" pipe",1', 1), ('"5\\" pipe",1\nC:\\dir,1', 1), ('"a"b,"c",1', 1),
            ('"5" pipe\nof iron",1', 2), ('"5" pipe\nlong\nof "iron"",1', 3), ('x,"1" "2"', 1),
        ],
    )  # fmt: skip
    def test_text_behind_a_closing_quote_refuses_its_row_and_no_other(self, tmp_path: Path, row: str, torn: int) -> None:
        path = saved(tmp_path / "a.csv", f'code,size\n"a ""b""",0\n{row}\nlast,2\n')
        _, rows = read(path)
        bad = [each for each in rows if each.problems]
        assert [each.problems[0].code for each in bad] == ["bad_quotes"] * torn
        assert [each.number for each in bad] == [*range(3, 3 + torn)]
        assert rows[0].values["code"] == 'a "b"'
        assert rows[-1].values == {"code": "last", "size": "2"}

    def test_a_header_with_text_behind_a_closing_quote_is_refused(self, tmp_path: Path) -> None:
        assert refusal(saved(tmp_path / "a.csv", '"size" in "cm",code\n1,2\n'), expect={"code"}).code == "invalid_csv"

    def test_a_text_that_excel_is_kept_from_reading_as_a_number_is_that_text(self, tmp_path: Path) -> None:
        text = 'code,note\n="00123","=""0""""1"""\n="a"&"b",=1+1\n\'="7",x\n'
        _, rows = read(saved(tmp_path / "a.csv", text))
        assert [list(row.values.values()) for row in rows] == [["00123", '0"1'], ['="a"&"b"', "=1+1"], ['="7"', "x"]]

    @pytest.mark.parametrize("delimiter", [",", ";", "|"])
    def test_the_header_of_a_single_column_is_not_taken_for_a_title(self, tmp_path: Path, delimiter: str) -> None:
        text = f"note\nhello{delimiter} world\nall\na{delimiter} b{delimiter} c\n"
        headers, rows = read(saved(tmp_path / "a.csv", text))
        assert headers == ("note",)
        assert [row.values["note"] for row in rows] == [f"hello{delimiter} world", "all", f"a{delimiter} b{delimiter} c"]
        unclear = f"place\nMain 1{delimiter}Berlin\nSide 2{delimiter}Paris\n"
        assert refusal(saved(tmp_path / "b.csv", unclear)).code == "no_header"
        for title in ("Report\n\n", "Report\n"):
            table = f"{title}sku{delimiter}price\nA{delimiter}1.5\nB{delimiter}2\n"
            assert read(saved(tmp_path / "c.csv", table))[0] == ("sku", "price")

    def test_a_line_that_names_the_delimiter_is_no_row(self, tmp_path: Path) -> None:
        _, rows = read(saved(tmp_path / "a.csv", "sep=;\r\na;b\r\n1;2\r\n"))
        assert rows == [RawRow(2, {"a": "1", "b": "2"})]

    def test_rows_are_numbered_as_the_spreadsheet_shows_them(self, tmp_path: Path) -> None:
        _, rows = read(saved(tmp_path / "a.csv", '\ufeffa,b\r\n"two\r\nlines",1\r\n\r\n,\r\nx,  2  \r\n'))
        assert [(row.number, row.values) for row in rows] == [
            (2, {"a": "two\r\nlines", "b": "1"}),
            (5, {"a": "x", "b": "2"}),
        ]

    def test_too_many_cells_are_a_problem_of_their_row_and_too_few_are_empty(self, tmp_path: Path) -> None:
        _, rows = read(saved(tmp_path / "a.csv", "a,b\n1,2,3\n4\n5,6,,\n"))
        assert [problem.code for problem in rows[0].problems] == ["too_many_cells"]
        assert rows[0].problems[0].row == 2
        assert rows[0].problems[0].value == "3"
        assert rows[1] == RawRow(3, {"a": "4", "b": None})
        assert rows[2].problems == ()

    def test_text_that_is_not_utf8_is_refused_with_its_place(self, tmp_path: Path) -> None:
        error = refusal(saved(tmp_path / "a.csv", "a,b\n1,2\n3,caf\u00e9\n".encode("latin-1")))
        assert error.code == "encoding"
        assert "line 3 (byte 14)" in str(error)
        far = b"a,b\n" + b"x,y\n" * 400_000 + b"\xff,1\n"
        assert "line 400002 (byte 1600005)" in str(refusal(saved(tmp_path / "b.csv", far)))
        assert refusal(saved(tmp_path / "c.csv", "a,b\n1,2\n".encode("utf-32"))).code == "encoding"

    def test_a_character_cut_by_a_block_is_no_error(self, tmp_path: Path) -> None:
        text = "a,b\n" + "x" * ((1 << 20) - 6) + "\n" + "春,1\n"
        limits = Limits(max_cell_chars=2_000_000)
        assert read(saved(tmp_path / "a.csv", text), limits=limits)[1][-1].values == {"a": "春", "b": "1"}
        broken = text.encode()[:-3] + b"\xe6"
        assert refusal(saved(tmp_path / "b.csv", broken), limits=limits).code == "encoding"

    def test_nul_bytes_are_refused(self, tmp_path: Path) -> None:
        error = refusal(saved(tmp_path / "a.csv", b"a,b\n1,\x002\n"))
        assert error.code == "nul_byte"
        assert "line 2" in str(error)

    def test_a_quote_that_is_never_closed_swallows_no_rows(self, tmp_path: Path) -> None:
        error = refusal(saved(tmp_path / "a.csv", 'a,b\n1,2\n3,"4\n5,6\n'))
        assert error.code == "invalid_csv"
        assert "row 3" in str(error)
        long = 'a,b\n1,"2\n' + "x,y\n" * 100_000
        assert "double quote that is never closed" in str(refusal(saved(tmp_path / "b.csv", long)))

    def test_old_line_ends_are_line_ends(self, tmp_path: Path) -> None:
        assert [row.values for row in read(saved(tmp_path / "a.csv", b"a,b\r1,2\r3,4\r"))[1]] == [
            {"a": "1", "b": "2"},
            {"a": "3", "b": "4"},
        ]

    def test_the_guard_that_a_report_puts_before_formulas_is_taken_away(self, tmp_path: Path) -> None:
        _, rows = read(saved(tmp_path / "a.csv", "a,b\n'=1+1,'tis\n''=x,'-5\n"))
        assert [row.values for row in rows] == [{"a": "=1+1", "b": "'tis"}, {"a": "'=x", "b": "-5"}]

    def test_rows_can_be_taken_up_after_a_number(self, tmp_path: Path) -> None:
        with open_source(saved(tmp_path / "a.csv", "a,b\n1,2\n\n3,4\n"), "a.csv", limits=LIMITS) as source:
            assert source.planned is None
            assert [row.number for row in source.rows(after=2)] == [4]

    @pytest.mark.parametrize(
        ("text", "limits", "setting"),
        [
            ("a,b\n" + "1,2\n" * 4, Limits(max_rows=3), "max_rows"),
            ("a,b,c\n1,2,3\n", Limits(max_columns=2), "max_columns"),
            ("a,b\n1,xxxxxxxxxx\n", Limits(max_cell_chars=9), "max_cell_chars"),
            ("a,b\n1," + "x" * 200_000 + "\n", LIMITS, "max_cell_chars"),
            ("a,b\n" + "x" * 2_000_000 + "\n", LIMITS, "max_item_bytes"),
        ],
    )
    def test_a_limit_is_named_with_its_setting(self, tmp_path: Path, text: str, limits: Limits, setting: str) -> None:
        error = refusal(saved(tmp_path / "a.csv", text), limits=limits)
        assert isinstance(error, TooLarge)
        assert f"({setting})" in str(error)
        assert f"ASYNCTASK_{setting.upper()}" in str(error)

    def test_the_same_limits_hold_for_workbooks(self, tmp_path: Path) -> None:
        path = grid(tmp_path / "a.xlsx", [["a", "b"], ["xxxx", 1], ["y", 2], ["z", 3]])
        assert "max_rows" in str(refusal(path, limits=Limits(max_rows=2)))
        assert "max_columns" in str(refusal(path, limits=Limits(max_columns=1)))
        assert "max_cell_chars" in str(refusal(path, limits=Limits(max_cell_chars=3)))


class TestJson:
    def test_a_list_and_an_object_with_items_are_read(self, tmp_path: Path) -> None:
        for text in ('[{"a": 1}, 2]', '\ufeff {"items": [{"a": 1}, 2], "x": 0}'):
            with open_source(saved(tmp_path / "a.json", text), "a.json", limits=LIMITS) as source:
                assert (source.headers, source.planned) == (None, 2)
                assert list(source.rows()) == [RawRow(1, {"a": 1}), RawRow(2, 2)]
                assert [row.number for row in source.rows(after=1)] == [2]

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ('[{"a": 1},\n {"a": ', "line 2"),
            ('[{"a": 1},\n {"a": "x', "line 2"),
            ('[{"a": NaN}]', "NaN"),
            ('[{"a": -Infinity}]', "Infinity"),
            ('{"items": [\n]}\n{"a": 2}\n', "one list"),
            ('{"items": [], "items": []}', "twice"),
            ("[1 2]", "',' is missing"),
            ("[1,]", "line 1, column 4"),
            ('[{"a": 1},\n\n  {"a" 2}]', "line 3, column 8"),
            ("[1]\n[2]", "one list"),
            ('{"items": [1]', "cut off"),
            ('{"a": 1}', "no list"),
            ("[1, 2", "cut off"),
            ('["\\ud800"]', "line 1"),
            ("nonsense", "line 1"),
        ],
    )
    def test_a_broken_text_is_refused_with_the_place(self, tmp_path: Path, text: str, words: str) -> None:
        error = refusal(saved(tmp_path / "a.json", text))
        assert error.code == "invalid_json"
        assert words in str(error)

    def test_an_item_with_a_number_that_is_too_long_is_refused_and_the_others_are_read(self, tmp_path: Path) -> None:
        rows = read(saved(tmp_path / "a.json", '[{"a": 123456789012345678901}, {"a": 1}]'))[1]
        assert [row.values for row in rows][1:] == [{"a": 1}]
        (problem,) = rows[0].problems
        assert (problem.row, problem.code) == (1, "invalid_json")
        assert "double quotes" in problem.message

    def test_text_that_is_not_utf8_is_refused(self, tmp_path: Path) -> None:
        assert refusal(saved(tmp_path / "a.json", b'[\n"\xff"]')).code == "encoding"

    def test_depth_is_limited_before_parsing(self, tmp_path: Path) -> None:
        fits = "[" * 32 + "]" * 32
        assert read(saved(tmp_path / "a.json", fits))[1]
        assert refusal(saved(tmp_path / "b.json", f"[{fits}]")).code == "too_deep"
        assert refusal(saved(tmp_path / "c.json", "[" * 1_000_000)).code == "too_deep"
        assert refusal(saved(tmp_path / "d.json", '[{"a":' * 40 + "1" + "}]" * 40)).code == "too_deep"

    def test_brackets_inside_strings_are_no_depth(self, tmp_path: Path) -> None:
        text = json.dumps(["[" * 100 + '\\"' + "{" * 100])
        assert read(saved(tmp_path / "a.json", text))[1][0].values == json.loads(text)[0]

    def test_too_many_items_are_refused(self, tmp_path: Path) -> None:
        assert "max_rows" in str(refusal(saved(tmp_path / "a.json", "[1,2,3]"), limits=Limits(max_rows=2)))

    @settings(max_examples=examples(40, 100))
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"])),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text("ab[{\"'\\", max_size=3), inner, max_size=3)
            ),
            max_leaves=20,
        )
    )
    def test_what_goes_in_comes_out(self, tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
        path = saved(tmp_path_factory.mktemp("json") / "a.json", json.dumps([value]))
        assert read(path)[1] == [RawRow(1, value)]


# Control characters have no place in a cell's XML; spaces at the ends are taken off by design.
CELLS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff"), max_size=12)
ROWS = st.lists(st.lists(CELLS, min_size=3, max_size=3), max_size=8)


def expected(rows: list[list[str]]) -> list[list[str | None]]:
    kept = [[trimmed(cell) or None for cell in row] for row in rows]
    return [row for row in kept if any(row)]


class TestRoundTrips:
    @settings(max_examples=examples(40, 100))
    @given(ROWS)
    def test_a_workbook_gives_back_its_texts(self, tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]]) -> None:
        path = grid(tmp_path_factory.mktemp("x") / "a.xlsx", [["a", "b", "c"], *rows])
        assert [list(row.values.values()) for row in read(path)[1]] == expected(rows)

    @settings(max_examples=examples(40, 100))
    @given(ROWS, st.sampled_from([",", ";", "\t", "|"]))
    def test_a_csv_gives_back_its_texts(
        self, tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], delimiter: str
    ) -> None:
        lines = [delimiter.join('"' + cell.replace('"', '""') + '"' for cell in row) for row in [["a", "b", "c"], *rows]]
        path = saved(tmp_path_factory.mktemp("c") / "a.csv", "\r\n".join(lines))
        plain = [[re.sub(r"^'(?=['=+\-@\t\r\n＝＋－＠])", "", cell) for cell in row] for row in rows]
        found = read(path, expect={"a", "b", "c"})[1]
        assert [list(row.values.values()) for row in found] == expected(plain)

    @settings(max_examples=examples(60, 200))
    @given(
        st.binary(max_size=200) | st.text(max_size=100).map(str.encode), st.sampled_from(["a.csv", "a.json", "a", "a.txt"])
    )
    def test_any_bytes_are_rows_or_an_input_error(
        self, tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str
    ) -> None:
        try:
            read(saved(tmp_path_factory.mktemp("b") / "upload", data), name)
        except InputError as error:
            refused = error
        else:
            return
        assert 400 <= refused.status < 500


@pytest.mark.parametrize(
    ("item", "key"),
    [
        ('{"a": 1, "a": 1}', "a"),
        ('{"a": {"x": 1, "y": [1, {"b:": "c:d", "b:": 2}]}}', "b:"),
        (r'{"a": 1, "\u0061": 2}', "a"),
        ('{"a": 1, "b": "\\"a\\": 1", "b": 2}', "b"),
        ('["a", {"é": 1, "é": 2}]', "é"),
    ],
)
@pytest.mark.parametrize("name", ["a.json", "a.ndjson", "wrapped.json"])
def test_a_key_twice_refuses_its_item_by_name(tmp_path: Path, item: str, key: str, name: str) -> None:
    good = '{"a": {"a": 1}, "b": [{"a": ":"}, {"a": "x:y"}]}'
    text = f"{good}\n{item}\n{good}" if name == "a.ndjson" else f"[{good}, {item}, {good}]"
    path = saved(tmp_path / name, f'{{"items": {text}}}' if name == "wrapped.json" else text)
    first, second, third = read(path)[1]
    assert first.values == third.values == json.loads(good)
    assert [(each.row, each.code, each.params) for each in second.problems] == [(2, "duplicate_key", {"key": key})]
