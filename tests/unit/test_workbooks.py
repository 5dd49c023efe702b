"""Workbooks as programs write them, and as nobody should: every kind of cell, every odd way to write it."""

# ruff: noqa: DTZ001 - the times of a sheet have no zone
from __future__ import annotations

import datetime as dt
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openpyxl
import orjson
import pytest
import xlsxwriter
from openpyxl.worksheet.table import Table
from support.sheets import (
    MAIN,
    bof,
    inline,
    label,
    number,
    ods,
    ods_cell,
    ole,
    read,
    record,
    rows_xml,
    sheet_xml,
    styles,
    table,
    table_rows,
    xls,
    xls_cells,
    xls_stream,
    xlsx,
    zipped,
)

from asynctask.errors import InputError
from asynctask.lists.coerce import Unclear, text_of_cell
from asynctask.lists.readers import CellError, Limits, RawRow
from asynctask.lists.readers.base import Formatted
from asynctask.lists.readers.opening import open_source
from asynctask.lists.readers.workbook import classify, from_serial
from asynctask.lists.uploads import list_file
from asynctask.lists.written_cells import dump, unpacked

NO_VALUE = CellError("(a formula without a saved value)")
HEAD = f'<row r="1">{inline("A1", "a")}{inline("B1", "b")}</row>'
Rows = list[list[Any]]


def refusal(path: Path, **options: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        read(path, **options)
    return caught.value


def values(path: Path, **options: Any) -> list[tuple[int, list[Any]]]:
    return [(row.number, list(row.values.values())) for row in read(path, **options)[1]]


def as_xlsx(path: Path, rows: Rows) -> Path:
    return xlsx(path, sheet_xml(rows_xml(rows)))


def as_ods(path: Path, rows: Rows) -> Path:
    return ods(path, table(table_rows(rows)))


def as_xls(path: Path, rows: Rows) -> Path:
    return xls(path, xls_cells(rows))


EVERY = pytest.mark.parametrize("write", [as_xlsx, as_ods, as_xls])
Write = Callable[[Path, Rows], Path]


@contextmanager
def little_memory(most: int = 8_000_000) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


@EVERY
class TestEveryFormat:
    def test_numbers_of_rows_are_those_of_the_sheet(self, tmp_path: Path, write: Write) -> None:
        rows: Rows = [
            [],
            [None, "Spring sale"],
            [],
            [None, "a", "b"],
            [],
            [None, "x", 1],
            [None, " ", None],
            [None, None, 2],
        ]
        path = write(tmp_path / "f", rows)
        with open_source(path, "f", limits=Limits()) as source:
            assert (source.headers, source.places, source.planned) == (("a", "b"), (1, 2), 2)
            assert list(source.rows()) == [RawRow(6, {"a": "x", "b": 1}), RawRow(8, {"a": None, "b": 2})]
            assert [row.number for row in source.rows(after=6)] == [8]

    def test_numbers_and_texts_stay_what_they_are(self, tmp_path: Path, write: Write) -> None:
        digits = "1234567890123456789"
        rows: Rows = [
            ["a", "b", "c"],
            [digits, "00123", " 春🎉\u3000"],
            [2**53 - 1, 1e300, -0.1],
            [1234567890123456789, 1e15, 0],
        ]
        assert values(write(tmp_path / "f", rows)) == [
            (2, [digits, "00123", "春🎉"]),
            (3, [2**53 - 1, 1e300, -0.1]),
            (4, [1234567890123460000, 10**15, 0]),
        ]

    def test_what_nobody_sees_at_the_ends_of_a_text_is_not_read(self, tmp_path: Path, write: Write) -> None:
        ends = "\ufeff\u200b\u2060\u00ad \u200e\u202c"
        rows: Rows = [[f"{ends}sku{ends}", f"b{ends}"], [f"{ends}a\u200bb{ends}", f" {ends}"], [f"7{ends}", 1]]
        headers, found = read(write(tmp_path / "f", rows), expect={"SKU"})
        assert headers == ("sku", "b")
        assert [list(row.values.values()) for row in found] == [["a\u200bb", None], ["7", 1]]

    def test_a_closed_source_gives_no_rows(self, tmp_path: Path, write: Write) -> None:
        source = open_source(write(tmp_path / "f", [["a", "b"], [1, 2]]), "f", limits=Limits())
        source.close()
        source.close()
        with pytest.raises(ValueError, match="closed"):
            list(source.rows())

    def test_the_name_of_the_file_decides_nothing(self, tmp_path: Path, write: Write) -> None:
        path = write(tmp_path / "f", [["a", "b"], [1, 2]])
        for name in ("f.csv", "f.xlsx", "f.xls", "f.ods", "f.json", "f", "f.pdf"):
            assert values(path, filename=name) == [(2, [1, 2])]

    def test_title_rows_over_the_header_do_no_harm(self, tmp_path: Path, write: Write) -> None:
        rows: Rows = [["Campaigns", "of", "spring"], [], ["as of", "today"], ["code", "budget", None], ["x", 1, None]]
        headers, found = read(write(tmp_path / "f", rows), expect={"code", "budget"})
        assert headers == ("code", "budget")
        assert found == [RawRow(5, {"code": "x", "budget": 1})]

    def test_a_file_cut_off_anywhere_is_refused(self, tmp_path: Path, write: Write) -> None:
        whole = write(tmp_path / "f", [["a", "b"], *[["x", n] for n in range(50)]]).read_bytes()
        for size in range(1, len(whole) - 600, max(1, len(whole) // 40)):
            (tmp_path / "g").write_bytes(whole[:size])
            assert refusal(tmp_path / "g", filename="f.xlsx").status == 415


class TestXlsxCells:
    def test_every_kind_of_cell(self, tmp_path: Path) -> None:
        cells = (
            '<c r="A2" t="b"><v>1</v></c><c r="B2" t="b"><v>0</v></c><c r="C2" t="e"><v>#SPILL!</v></c>'
            '<c r="D2" t="str"><f>"a"&amp;"b"</f><v>ab</v></c><c r="E2"><f>1+1</f><v>2</v></c>'
            '<c r="F2" t="n"><v>1.50E+3</v></c>'
            '<c r="G2" t="d" s="1"><v>2026-03-05T00:00:00</v></c><c r="H2" t="d" s="2"><v>2026-03-05T00:00:00</v></c>'
            '<c r="I2" t="d"><v>T10:10:10</v></c><c r="J2" t="b"><v></v></c><c r="K2"/><c r="L2"><v/></c>'
        )
        head = "".join(inline(f"{letter}1", letter.lower()) for letter in "ABCDEFGHIJKL")
        path = xlsx(
            tmp_path / "f",
            sheet_xml(f'<row r="1">{head}</row><row r="2">{cells}</row>'),
            styles=styles("yyyy-mm-dd", "yyyy-mm-dd hh:mm"),
        )
        assert values(path) == [
            (2, [True, False, CellError("#SPILL!"), "ab", 2, 1500, dt.date(2026, 3, 5), dt.datetime(2026, 3, 5),
                 dt.time(10, 10, 10), None, None, None]),
        ]  # fmt: skip

    def test_a_formula_without_a_saved_value_is_an_error_and_one_that_came_to_nothing_is_empty(
        self, tmp_path: Path
    ) -> None:
        rows = (
            '<row r="2"><c r="A2"><f>B2*2</f></c><c r="B2"><f>C2</f><v></v></c></row>'
            '<row r="3"><c r="A3"><f t="shared" si="0"/></c><c r="B3" t="str"><f>""</f><v></v></c></row>'
        )
        assert values(xlsx(tmp_path / "f", sheet_xml(HEAD + rows))) == [(2, [NO_VALUE, NO_VALUE]), (3, [NO_VALUE, None])]
        book = openpyxl.Workbook()
        book.active.append(["a", "b"])
        book.active.append(["=1+1", "x"])
        book.save(tmp_path / "g")
        book.close()
        assert values(tmp_path / "g") == [(2, [NO_VALUE, "x"])]

    @pytest.mark.parametrize(
        ("written", "read_as"),
        [
            ("a&amp;b &lt;c&gt; &quot;d&quot; &apos;", 'a&b <c> "d" \''),
            ("&#26149;&#x6625;&#x1F389;", "春春🎉"),
            ("_x0041__x000D_\n_x005F_x0041_", "A\r\n_x0041_"),
            ("_xD83C__xDF89_ _xD83C_", "🎉 \ufffd"),
            ("a\r\nb\rc", "a\nb\nc"),
            ("_x00_ _xZZZZ_", "_x00_ _xZZZZ_"),
            ("&#x3000; x &#10;", "x"),
        ],
    )
    def test_texts_are_what_they_stand_for_however_they_are_kept(self, tmp_path: Path, written: str, read_as: str) -> None:
        table = f'<sst xmlns="{MAIN}"><si><t xml:space="preserve">{written}</t></si><si><t/></si></sst>'
        cells = (
            f'<row r="2"><c r="A2" t="s"><v>0</v></c><c r="B2" t="str"><f>X</f><v>{written}</v></c></row>'
            f'<row r="3"><c r="A3" t="inlineStr"><is><t>{written}</t></is></c><c r="B3" t="s"><v>1</v></c></row>'
            f'<row r="4"><c r="A4" t="inlineStr"><is><r><t>{written}</t></r></is></c></row>'
        )
        path = xlsx(tmp_path / "f", sheet_xml(HEAD + cells), strings=table)
        assert values(path) == [(2, [read_as, read_as]), (3, [read_as, None]), (4, [read_as, None])]

    def test_rich_text_is_its_text_and_readings_beside_it_are_not(self, tmp_path: Path) -> None:
        table = (
            f'<sst xmlns="{MAIN}"><si><r><t>ri</t></r><r><rPr><b/></rPr><t xml:space="preserve">ch </t></r></si>'
            '<si><t>東京</t><rPh sb="0" eb="2"><t>トウキョウ</t></rPh><phoneticPr fontId="1"/></si>'
            "<si><r><t>大</t></r><r><t>阪</t></r><rPh sb='0' eb='2'><t>オオサカ</t></rPh></si><si/>"
            "<si><t>end</t></si></sst>"
        )
        cells = "".join(f'<row r="{n}"><c r="A{n}" t="s"><v>{n - 2}</v></c></row>' for n in range(2, 7))
        path = xlsx(tmp_path / "f", sheet_xml(HEAD + cells), strings=table)
        assert [row[0] for _, row in values(path)] == ["rich", "東京", "大阪", "end"]

    @pytest.mark.parametrize("epoch", ["", 'date1904="1"', 'date1904="true"'])
    def test_dates_of_both_epochs(self, tmp_path: Path, epoch: str) -> None:
        def fill(number: int, serial: Any) -> str:
            cells = (f'<c r="{letter}{number}" s="{style}"><v>{serial}</v></c>' for style, letter in enumerate("AB", 1))
            return f'<row r="{number}">{"".join(cells)}</row>'

        shift = 1462 if epoch else 0
        rows = fill(2, 46086 - shift) + fill(3, 46086.604340277781 - shift) + fill(4, 1) + fill(5, 0.25) + fill(6, -1)
        path = xlsx(
            tmp_path / "f", sheet_xml(HEAD + rows), workbook=epoch, styles=styles('yyyy"年"m"月"d"日"', "yyyy/m/d h:mm:ss")
        )
        first = dt.date(1904, 1, 2) if epoch else dt.date(1900, 1, 1)
        quarter: list[Any] = [dt.time(6), dt.datetime(1904, 1, 1, 6) if epoch else dt.time(6)]
        if epoch:
            quarter[0] = dt.datetime(1904, 1, 1, 6)
        assert [row for _, row in values(path)] == [
            [dt.date(2026, 3, 5), dt.datetime(2026, 3, 5)],
            [dt.datetime(2026, 3, 5, 14, 30, 15)] * 2,
            [first, dt.datetime.combine(first, dt.time())],
            quarter,
            [-1, -1],
        ]

    @pytest.mark.parametrize(
        ("code", "kind"),
        [
            ("General", ""), ("0.00", ""), ("0.00E+00", ""), ("#,##0;[Red]-#,##0", ""), ("@", ""), ('0.0" days"', ""),
            ("0%", ""),
            (r"0\d", ""), ("[$¥-804]#,##0", ""), ('"Days:" 0', ""), ("_-* #,##0.00_-", ""), ("", ""), ("[Blue]0_)", ""),
            ("yyyy-mm-dd", "date"), ("d.m.yy", "date"), ('yyyy"年"m"月"', "date"), ("mmm", "date"),
            ("[$-411]ggge年m月d日", "date"),
            ("m/d/yy h:mm", "moment"), ("yyyy-mm-ddThh:mm", "moment"), ("h:mm AM/PM", "time"), ("mm:ss.0", "time"),
            ("[h]:mm:ss", "duration"), ("[mm]:ss", "duration"), ("[s]", "duration"), ("[Red][h]:mm;@", "duration"),
            ("YYYY-MM-DD;@", "date"), ("aaaa", ""),
        ],
    )  # fmt: skip
    def test_a_number_format_says_what_the_number_is(self, code: str, kind: str) -> None:
        assert classify(code) == kind

    @pytest.mark.parametrize(
        ("code", "number", "wanted"),
        [
            ("[<1]h:mm;yyyy-mm-dd", 0.5, dt.time(12, 0)),
            ("[<1]h:mm;yyyy-mm-dd", 46_086, dt.date(2026, 3, 5)),
            ('[=0]"-";yyyy-mm-dd', 46_086, dt.date(2026, 3, 5)),
            ('[=0]"-";yyyy-mm-dd', 0, 0),
            ("[Red][>=50000]0;[>=40000]d.m.yyyy;0.00", 46_086, dt.date(2026, 3, 5)),
            ("[Red][>=50000]0;[>=40000]d.m.yyyy;0.00", 50_000, 50_000),
            ("[Red][>=50000]0;[>=40000]d.m.yyyy;0.00", 3.5, 3.5),
            ("[>100]yyyy-mm-dd;0;General", 7, 7),
            ("[<=9999999]###-####;(###) ###-####", 5_551_234, 5_551_234),
            ("[$-409][<>0]mmm yyyy;0", 46_086, dt.date(2026, 3, 5)),
        ],
    )
    def test_a_format_with_conditions_asks_the_number(self, tmp_path: Path, code: str, number: Any, wanted: Any) -> None:
        row = f'<row r="2"><c r="A2" s="1"><v>{number}</v></c></row>'
        path = xlsx(tmp_path / "f", sheet_xml(HEAD + row), styles=styles(code))
        assert values(path) == [(2, [wanted, None])]

    def test_a_number_that_is_no_day_stays_a_number(self) -> None:
        for serial in (0, -1, 60, 2_958_466, 10**12, -0.5, 1e300):
            assert from_serial(serial, "date", epoch_1904=False) == serial
        assert from_serial(59, "date", epoch_1904=False) == dt.date(1900, 2, 28)
        assert from_serial(61, "date", epoch_1904=False) == dt.date(1900, 3, 1)
        assert from_serial(2_958_465, "date", epoch_1904=False) == dt.date(9999, 12, 31)
        assert from_serial(0.25, "time", epoch_1904=False) == dt.time(6)
        assert from_serial(2, "time", epoch_1904=False) == dt.datetime(1900, 1, 2)
        assert from_serial(1.25, "duration", epoch_1904=False) == dt.timedelta(hours=30)
        assert from_serial(1e300, "duration", epoch_1904=False) == 1e300
        assert from_serial(CellError("#NUM!"), "date", epoch_1904=False) == CellError("#NUM!")

    def test_percentages_and_currencies_are_numbers(self, tmp_path: Path) -> None:
        rows = '<row r="2"><c r="A2" s="1"><v>0.125</v></c><c r="B2" s="2"><v>12.5</v></c></row>'
        path = xlsx(tmp_path / "f", sheet_xml(HEAD + rows), styles=styles("0.00%", '"¥"#,##0.00'))
        assert values(path) == [(2, [0.125, 12.5])]


def xlsx_with_totals(path: Path) -> None:
    with xlsxwriter.Workbook(str(path)) as book:
        names = [{"header": "sku", "total_string": "Total"}, {"header": "n", "total_function": "sum", "total_value": 3}]
        book.add_worksheet().add_table("A1:B4", {"data": [["a", 1], ["b", 2]], "columns": names, "total_row": True})


def openpyxl_with_totals(path: Path) -> None:
    book = openpyxl.Workbook()
    for row in (["sku", "n"], ["a", 1], ["b", 2], ["Total", 3]):
        book.active.append(row)
    made = Table(displayName="Goods", ref="A1:B4", totalsRowCount=1)
    made._initialise_columns()
    book.active.add_table(made)
    book.save(path)


NUMBERS: list[tuple[str, float, str | None]] = [
    ("00000", 1234, "01234"), ("00000", 123456, "123456"), ("00000", -5, "-00005"), ("00000", 12.5, None),
    ("000-000", 1234, "001-234"), ('"SKU-"0000', 34, "SKU-0034"), ("000-00-0000", 123456789, "123-45-6789"),
    ("000 000", 1234, "001 234"), (r"\#0000", 7, "#0007"), ("[Red]0000", 5, "0005"), ('0" pcs"', 12, "12 pcs"),
    ("0.00", 12.5, "12.50"), ("0.00", 1.239, "1.239"), ("0.00", 12, "12.00"), ('"V"0.0', 1, "V1.0"),
    ("000.00", 1.5, "001.50"),
    ("#,##0", 1234567, "1234567"), ("#,##0.00", 1234.5, "1234.50"), ("0%", 0.125, "0.125"), ("0.00E+00", 1234, "1234"),
    ('#,##0.00\\ "kr"', 12.5, "12.50"), ("[$€-407] #,##0", 12, "12"), ("General", 1.5, "1.5"), ("@", 5, "5"),
    ("aaaa", 5, "5"),
    ("_-* #,##0.00_-", 12.5, "12.50"), ("0.00;[Red](0.00)", -12.5, "-12.50"), ('0000;-0000;"none"', 0, "none"),
    (";;;", 5, "5"),
    ('[<=9999999]###-####;(###) ###-####', 5551234, "555-1234"),
    ('[<=9999999]###-####;(###) ###-####', 8005551234, "(800) 555-1234"), ("[DBNum1]000", 5, None),
    ('0000" of "0000;@', 12345678, "1234 of 5678"), ("0", 10**17, "100000000000000000"),
]  # fmt: skip


def shown(path: Path, **options: Any) -> list[Any]:
    """What a field of text gets of the first column; None where that is refused."""
    found = [(cell, text_or_none(cell)) for _, (cell, *_) in values(path, **options)]
    assert all(isinstance(cell, int | float) for cell, _ in found), "any other field gets the number"
    return [text for _, text in found]


def text_or_none(cell: Any) -> str | None:
    try:
        return str(text_of_cell(cell))
    except Unclear:
        return None


class TestNumbersAsText:
    """Fails where a cell's number format is forgotten."""

    def test_of_an_excel_workbook(self, tmp_path: Path) -> None:
        cells = "".join(
            f'<row r="{row}"><c r="A{row}" s="{row - 1}"><v>{value!r}</v></c></row>'
            for row, (_, value, _) in enumerate(NUMBERS, 2)
        )
        path = xlsx(tmp_path / "f", sheet_xml(HEAD + cells), styles=styles(*(code for code, _, _ in NUMBERS)))
        assert shown(path) == [text for _, _, text in NUMBERS]

    def test_of_an_old_workbook(self, tmp_path: Path) -> None:
        extra, cells = record(0x00E0, struct.pack("<HH16x", 0, 0)), label(0, 0, "a") + label(0, 1, "b")
        for row, (code, value, _) in enumerate(NUMBERS, 1):
            text = code.encode("utf-16-le")
            extra += record(0x041E, struct.pack("<HHB", 200 + row, len(code), 1) + text)
            extra += record(0x00E0, struct.pack("<HH16x", 0, 200 + row))
            cells += number(row, 0, value, row)
        assert shown(xls(tmp_path / "f", cells, extra=extra)) == [text for _, _, text in NUMBERS]

    def test_of_an_open_document_where_the_text_is_in_the_cell(self, tmp_path: Path) -> None:
        cells = [
            (1234, "01234", "01234"), (1234, "001-234", "001-234"), (34, "SKU-0034", "SKU-0034"),
            (34, "A1-0034", "A1-0034"),
            (12.5, "12,50", "12.50"), (12.5, "12.50", "12.50"), (12, "12,00", "12.00"), (1234567, "1.234.567", "1234567"),
            (1234567, "1,234,567", "1234567"), (1.239, "1.24", "1.239"), (-5, "-00005", "-00005"), (12, "12 pcs", "12 pcs"),
            (1234.5, "1,234.50", "1234.50"), (5, "5", "5"), (1234, "1.23E+03", "1234"), (0, "000", "000"),
            (12.5, "12.50 €", "12.5"),
        ]  # fmt: skip
        rows = "".join(
            f'<table:table-row><table:table-cell office:value-type="float" office:value="{value}"><text:p>{text}</text:p>'
            "</table:table-cell></table:table-row>"
            for value, text, _ in cells
        )
        path = ods(tmp_path / "f", table(table_rows([["a", "b"]]) + rows))
        assert shown(path) == [text for _, _, text in cells]

    @pytest.mark.parametrize("value", [Formatted(1234, "000-000", "001-234"), Formatted(12.5, "00000", None)])
    def test_between_processes_they_stay_as_they_are(self, value: Formatted) -> None:
        ((found,),) = orjson.loads(dump([[value]]))
        again = unpacked(found)
        assert (again, again.code, again.text) == (value, value.code, value.text)


class TestTotals:
    """Fails where the last row of a table is taken for one of its rows."""

    def test_the_totals_of_a_table_are_no_row_and_what_is_below_it_is(self, tmp_path: Path) -> None:
        book = xlsxwriter.Workbook(str(tmp_path / "f"))
        sheet = book.add_worksheet()
        names = [{"header": "sku", "total_string": "Total"}, {"header": "n", "total_function": "sum", "total_value": 3}]
        sheet.add_table("B3:C6", {"data": [["a", 1], ["b", 2]], "columns": names, "total_row": True})
        sheet.add_table("E3:F5", {"data": [["x", 7], ["y", 8]], "columns": [{"header": "p"}, {"header": "q"}]})
        sheet.write_row("B9", ["c", 5])
        sheet.write("A6", "aside")
        book.close()
        with open_source(tmp_path / "f", "f.xlsx", limits=Limits()) as source:
            found = list(source.rows())
            assert source.planned == len(found) == 4
        assert [(row.number, row.values["sku"], row.values["n"]) for row in found] == [
            (4, "a", 1), (5, "b", 2), (6, None, None), (9, "c", 5),
        ]  # fmt: skip

    @pytest.mark.parametrize("engine", [xlsx_with_totals, openpyxl_with_totals])
    @pytest.mark.parametrize("report", [False, True])
    def test_a_row_of_totals_alone_is_not_there(self, tmp_path: Path, engine: Callable[[Path], None], report: bool) -> None:
        engine(tmp_path / "f.xlsx")
        with list_file(tmp_path / "f.xlsx", "f.xlsx", Limits()) as file, file.open(None, (), report=report) as source:
            assert [list(row.values.values()) for row in source.rows()] == [["a", 1], ["b", 2]]
            assert source.planned == (None if report else 2)


class TestXlsxWriters:
    def test_what_wps_writes(self, tmp_path: Path) -> None:
        sheet = (
            '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'
            f'<worksheet xmlns="{MAIN}" xmlns:xdr="x"><sheetPr/><sheetViews><sheetView workbookViewId="0"/></sheetViews>'
            '<cols><col min="1" max="2" width="9"/></cols><sheetData><row r="1" spans="1:2" ht="14.25">'
            f'{inline("A1", "编号")}{inline("B1", "名称")}</row><row r="2" spans="1:2"><c r="A2"><v>1</v></c>'
            f'{inline("B2", "红")}</row></sheetData><pageMargins left="0.7"/></worksheet>'
        )
        assert values(xlsx(tmp_path / "f", sheet)) == [(2, [1, "红"])]

    def test_what_google_sheets_writes(self, tmp_path: Path) -> None:
        sheet = (
            f'<?xml version="1.0" encoding="UTF-8" standalone="yes"?><worksheet xmlns="{MAIN}" xmlns:mx="x"><sheetPr>'
            '<outlinePr summaryBelow="0" summaryRight="0"/></sheetPr><sheetData><row r="1" ht="15.75" customHeight="1">'
            '<c r="A1" s="1" t="s"><v>0</v></c><c r="B1" s="1" t="s"><v>1</v></c><c r="C1" s="2"/></row><row r="2">'
            '<c r="A2" s="1"><v>1.0</v></c>'
            '<c r="B2" s="2" t="str"><f>IFERROR(__xludf.DUMMYFUNCTION("X"),"y")</f><v>y</v></c>'
            "</row></sheetData><drawing r:id='rId1'/></worksheet>"
        )
        table = f'<sst xmlns="{MAIN}" count="2" uniqueCount="2"><si><t>a</t></si><si><t>b</t></si></sst>'
        assert values(xlsx(tmp_path / "f", sheet, strings=table)) == [(2, [1, "y"])]

    def test_what_pandas_writes_with_either_engine(self, tmp_path: Path) -> None:
        book = openpyxl.Workbook()
        book.active.append([None, "a", "when"])
        book.active.append([0, "x", dt.datetime(2026, 3, 5, 14, 30)])
        book.active.append([1, None, None])
        book.save(tmp_path / "f")
        book.close()
        headers, rows = read(tmp_path / "f")
        assert headers == ("a", "when")
        assert rows == [
            RawRow(2, {"a": "x", "when": dt.datetime(2026, 3, 5, 14, 30), "Column A": 0}),
            RawRow(3, {"a": None, "when": None, "Column A": 1}),
        ]

    def test_prefixes_comments_and_other_encodings_are_read_by_the_parser(self, tmp_path: Path) -> None:
        plain = sheet_xml(HEAD + '<row r="2"><c r="A2"><v>1</v></c><c r="B2" t="str"><v>春</v></c></row>')
        prefixed = plain.replace("<", "<x:").replace("<x:/", "</x:").replace("xmlns=", "xmlns:x=")
        variants: list[str | bytes] = [
            prefixed,
            plain.replace("<v>1</v>", "<v><!-- one -->1</v>"),
            plain.replace("<v>春</v>", "<v><![CDATA[春]]></v>"),
            ('<?xml version="1.0" encoding="UTF-16"?>' + plain).encode("utf-16"),
            ('<?xml version="1.0" encoding="UTF-16"?>' + plain).encode("utf-16-be"),
            "\ufeff" + plain,
            plain.replace('<row r="2">', "<row\n  r='2' >").replace("</row>", "</row >"),
            plain.replace('<c r="A2">', '<c s="0" r="A2">'),
            plain.replace(' r="2"', "").replace(' r="A2"', "").replace(' r="B2"', ""),
            plain.replace(
                "</row></sheet", '<c r="C2" t="inlineStr"><is><t> </t></is></c><extLst><ext/></extLst></row></sheet'
            ),
        ]
        for number_, variant in enumerate(variants):
            assert values(xlsx(tmp_path / f"f{number_}", variant)) == [(2, [1, "春"])], variant

    def test_parts_may_lie_anywhere(self, tmp_path: Path) -> None:
        sheet = sheet_xml(HEAD + '<row r="2"><c r="A2"><v>1</v></c></row>')
        assert values(xlsx(tmp_path / "f", sheet, prefix="")) == [(2, [1, None])]
        assert values(xlsx(tmp_path / "g", sheet, prefix="Xl/deep/")) == [(2, [1, None])]

    def test_parts_with_backslashes_in_their_names_are_found(self, tmp_path: Path) -> None:
        names = ["_rels/.rels", "xl/workbook.xml", "xl/_rels/workbook.xml.rels", "xl/worksheets/sheet1.xml"]
        with zipfile.ZipFile(xlsx(tmp_path / "f", sheet_xml(HEAD + '<row r="2"><c r="A2"><v>1</v></c></row>'))) as whole:
            parts = {name.replace("/", "\\"): whole.read(name) for name in names}
        assert values(zipped(tmp_path / "g", parts)) == [(2, [1, None])]

    def test_wrong_dimensions_are_not_believed(self, tmp_path: Path) -> None:
        for claim in ("A1", "A1:XFD1048576", "nonsense", "B7:C9"):
            sheet = sheet_xml(HEAD + '<row r="2"><c r="A2"><v>1</v></c></row>', before=f'<dimension ref="{claim}"/>')
            assert values(xlsx(tmp_path / "f", sheet)) == [(2, [1, None])]

    def test_extensions_with_the_same_names_change_nothing(self, tmp_path: Path) -> None:
        rows = '<row r="2"><c r="A2" s="1"><v>46086</v></c></row>'
        after = '<extLst><ext xmlns:x14="x"><x14:cfRule><x14:row r="1"/><f>1</f><v>9</v></x14:cfRule></ext></extLst>'
        path = xlsx(tmp_path / "f", sheet_xml(HEAD + rows, after=after), styles=styles("yyyy-mm-dd"))
        assert values(path) == [(2, [dt.date(2026, 3, 5), None])]

    def test_formatted_empty_rows_at_the_end_cost_no_memory(self, tmp_path: Path) -> None:
        rows = "".join(f'<row r="{n}" s="1" customFormat="1"><c r="A{n}" s="1"/></row>' for n in range(3, 100_000))
        path = xlsx(tmp_path / "f", sheet_xml(HEAD + '<row r="2"><c r="A2"><v>1</v></c></row>' + rows))
        with little_memory(), open_source(path, "f", limits=Limits()) as source:
            assert source.planned == 1
            assert [row.number for row in source.rows()] == [2]

    def test_what_stands_after_very_many_empty_rows_is_read(self, tmp_path: Path) -> None:
        def fill(book: Any) -> None:
            sheet = book.add_worksheet()
            sheet.write_row(0, 0, ["a", "b"])
            sheet.write_row(900_000, 0, [1, 2])

        book = xlsxwriter.Workbook(str(tmp_path / "f"))
        fill(book)
        book.close()
        assert values(tmp_path / "f") == [(900_001, [1, 2])]

    def test_a_merged_title_and_a_blank_row_over_the_header_are_no_header(self, tmp_path: Path) -> None:
        with xlsxwriter.Workbook(str(tmp_path / "f")) as book:
            sheet = book.add_worksheet()
            sheet.merge_range(0, 0, 1, 2, "Spring campaigns")
            sheet.write_row(3, 0, ["code", "name", "budget"])
            sheet.write_row(4, 0, ["x", "y", 5])
            sheet.merge_range(5, 0, 6, 0, "z")
            sheet.write_row(6, 1, ["w", 7])
        headers, rows = read(tmp_path / "f")
        assert headers == ("code", "name", "budget")
        assert [(row.number, list(row.values.values())) for row in rows] == [
            (5, ["x", "y", 5]),
            (6, ["z", None, None]),
            (7, [None, "w", 7]),
        ]


class TestHostileXlsx:
    @pytest.mark.parametrize(
        "rows",
        [
            '<row r="3"><c r="A3"><v>1</v></c></row><row r="2"><c r="A2"><v>1</v></c></row>',
            '<row r="2"><c r="A2"><v>1</v></c></row><row r="2"><c r="A2"><v>1</v></c></row>',
            '<row r="2"><c r="A3"><v>1</v></c></row>',
            '<row r="0"><c r="A0"><v>1</v></c></row>',
            '<row r="1048577"><c><v>1</v></c></row>',
            '<row r="2"><c r="XFE2"><v>1</v></c></row>',
            '<row r="2"><c r="A2"><v>1_0</v></c></row>',
            '<row r="2"><c r="A2"><v>one</v></c></row>',
            '<row r="2"><c r="A2" t="b"><v>2</v></c></row>',
            '<row r="2"><c r="A2" t="zz"><v>2</v></c></row>',
            '<row r="2"><c r="A2" t="s"><v>0</v></c></row>',
            '<row r="2"><c r="A2" t="s"><v>-1</v></c></row>',
            '<row r="2"><c r="A2" t="str"><v>&nbsp;</v></c></row>',
            '<row r="2"><c r="A2" t="str"><v>&#0;</v></c></row>',
            '<row r="2"><c r="A2" t="str"><v>&#xD800;</v></c></row>',
            '<row r="2"><c r="A2" t="str"><v>a & b</v></c></row>',
            '<row r="2"><c r="A2"><v>1</v></row>',
            '<row r="2"><c r="A2"><v>1</v></c>',
            "<a>" * 300 + "</a>" * 300,
            f"<!-- {'x' * 3_000_000} -->",
        ],
    )
    def test_nonsense_is_a_damaged_file(self, tmp_path: Path, rows: str) -> None:
        error = refusal(xlsx(tmp_path / "f", sheet_xml(HEAD + rows)), limits=Limits(max_unzip_ratio=10_000))
        assert (error.code, error.status) == ("damaged_file", 415)

    def test_a_sheet_that_is_nowhere_is_named(self, tmp_path: Path) -> None:
        path = xlsx(tmp_path / "f", sheet_xml(HEAD), **{"xl/_rels/workbook.xml.rels": "<Relationships/>"})
        error = refusal(path)
        assert error.code == "damaged_file"
        assert "it does not say which of its parts is sheet 'Data'" in str(error)

    def test_deep_xml_costs_no_memory_wherever_it_is(self, tmp_path: Path) -> None:
        deep = "<a>" * 2_000_000
        limits = Limits(max_unzip_ratio=100_000)
        parts = {"styles": deep, "strings": deep, "xl/workbook.xml": deep, "_rels/.rels": deep}
        for name, content in parts.items():
            path = xlsx(tmp_path / "f", sheet_xml(HEAD + '<row r="2"/>'), **{name: content})
            with little_memory(16_000_000):
                assert refusal(path, limits=limits).code == "damaged_file"
        for sheet in (deep, f"<!-- -->{deep}", sheet_xml(HEAD) + deep):
            with little_memory(16_000_000):
                path = xlsx(tmp_path / "g", sheet)
                try:
                    read(path, limits=limits)
                except InputError as error:
                    assert error.code == "damaged_file"  # noqa: PT017 - what lies behind the table need not be looked at

    def test_entities_are_never_expanded(self, tmp_path: Path) -> None:
        laughs = '<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;">]>'
        sheet = sheet_xml(HEAD + '<row r="2"><c r="A2" t="str"><v>&b;</v></c></row>')
        for part in ("sheet", "strings", "styles", "xl/workbook.xml"):
            content = laughs + (sheet if part == "sheet" else "<x>&b;</x>")
            path = xlsx(tmp_path / "f", content) if part == "sheet" else xlsx(tmp_path / "f", sheet, **{part: content})
            assert refusal(path).code == "damaged_file"

    def test_a_part_that_was_altered_is_found_out_by_its_checksum(self, tmp_path: Path) -> None:
        path = tmp_path / "f"
        with zipfile.ZipFile(
            xlsx(tmp_path / "g", sheet_xml(HEAD + '<row r="2"><c r="A2"><v>12345</v></c></row>'))
        ) as whole:
            parts = {name: whole.read(name) for name in whole.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name, content in parts.items():
                archive.writestr(name, content)
        assert values(path) == [(2, [12345, None])]
        path.write_bytes(path.read_bytes().replace(b"<v>12345<", b"<v>92345<"))
        assert refusal(path).code == "damaged_file"

    def test_a_row_or_text_of_megabytes_is_refused(self, tmp_path: Path) -> None:
        limits = Limits(max_unzip_ratio=100_000)
        long = "x" * 9_000_000
        for sheet in (
            f'<row r="2"><c r="A2" t="str"><v>{long}</v></c></row>',
            f'<row r="2"><!-- --><c r="A2" t="str"><v>{long}',
        ):
            assert refusal(xlsx(tmp_path / "f", sheet_xml(HEAD + sheet)), limits=limits).code == "too_large"
        rows = HEAD + '<row r="2"><c r="A2" t="s"><v>0</v></c></row>'
        for texts in (f"<sst><si><t>{long}</t></si></sst>", f"<sst><!-- --><si><t>{long}</t></si></sst>"):
            assert refusal(xlsx(tmp_path / "f", sheet_xml(rows), strings=texts), limits=limits).code == "too_large"

    def test_a_great_many_texts_stay_out_of_memory(self, tmp_path: Path) -> None:
        count, text = 25_000, "春" * 1_000
        table = f"<sst>{''.join(f'<si><t>{text}{n}</t></si>' for n in range(count))}</sst>"
        rows = "".join(f'<row r="{n}"><c r="A{n}" t="s"><v>{count - n}</v></c></row>' for n in range(2, 50))
        path = xlsx(tmp_path / "f", sheet_xml(HEAD + rows), strings=table)
        del table
        with little_memory(150_000_000):
            found = values(path, limits=Limits(max_unzip_ratio=10_000))
        assert [row[0] for _, row in found] == [f"{text}{count - n}" for n in range(2, 50)]


class TestOds:
    def test_every_kind_of_cell(self, tmp_path: Path) -> None:
        head = "".join(map(ods_cell, "abcdefghijk"))
        cells = (
            '<table:table-cell office:value-type="boolean" office:boolean-value="true"/>'
            '<table:table-cell office:value-type="percentage" office:value="0.125"><text:p>13%</text:p></table:table-cell>'
            '<table:table-cell office:value-type="currency" office:value="12.50"><text:p>¥12.50</text:p></table:table-cell>'
            '<table:table-cell office:value-type="date" office:date-value="2026-03-05"/>'
            '<table:table-cell office:value-type="date" office:date-value="2026-03-05T14:30:15.5"/>'
            '<table:table-cell office:value-type="time" office:time-value="PT08H05M01.5S"/>'
            '<table:table-cell office:value-type="time" office:time-value="PT31H00M00S"/>'
            '<table:table-cell table:formula="of:=NA()" office:value-type="string" office:string-value=""'
            ' calcext:value-type="error"><text:p>#N/A</text:p></table:table-cell>'
            '<table:table-cell table:formula="of:=X" office:value-type="string"><text:p>Err:502</text:p></table:table-cell>'
            '<table:table-cell table:formula="of:=X"/>'
            '<table:table-cell table:formula="of:=&quot;&quot;"><text:p/></table:table-cell>'
        )
        path = ods(
            tmp_path / "f", table(f"<table:table-row>{head}</table:table-row><table:table-row>{cells}</table:table-row>")
        )
        assert values(path) == [
            (2, [True, 0.125, 12.5, dt.date(2026, 3, 5), dt.datetime(2026, 3, 5, 14, 30, 15, 500_000),
                 dt.time(8, 5, 1, 500_000), dt.timedelta(hours=31), CellError("#N/A"), CellError("Err:502"), NO_VALUE,
                 None]),
        ]  # fmt: skip

    def test_rows_and_cells_that_repeat_stand_where_they_stand(self, tmp_path: Path) -> None:
        blank = (
            '<table:table-row table:number-rows-repeated="{}"><table:table-cell table:number-columns-repeated="16384"/>'
            "</table:table-row>"
        )
        twice = '<table:table-cell office:value-type="float" office:value="7" table:number-columns-repeated="2"/>'
        rows = (
            blank.format(4)
            + table_rows([["a", "b", "c", "d"]])
            + f'<table:table-row table:number-rows-repeated="3">{twice}<table:table-cell/>{ods_cell("x")}</table:table-row>'
            + blank.format(1_000_000)
        )
        path = ods(tmp_path / "f", table(rows))
        with open_source(path, "f", limits=Limits()) as source:
            assert source.planned == 3
            assert [(row.number, list(row.values.values())) for row in source.rows()] == [
                (number_, [7, 7, None, "x"]) for number_ in (6, 7, 8)
            ]

    def test_repeating_for_ever_is_no_way_to_take_memory(self, tmp_path: Path) -> None:
        many = (
            '<table:table-row table:number-rows-repeated="1048000">' + ods_cell("x") + ods_cell("y") + "</table:table-row>"
        )
        path = ods(tmp_path / "f", table(table_rows([["a", "b"]]) + many))
        with little_memory():
            assert "(max_rows)" in str(refusal(path))
            with open_source(path, "f", limits=Limits(max_rows=2_000_000)) as source:
                assert source.planned == 1_048_000
        wide = '<table:table-cell office:value-type="float" office:value="1" table:number-columns-repeated="16384"/>'
        path = ods(tmp_path / "g", table(table_rows([["a", "b"]]) + f"<table:table-row>{wide}</table:table-row>"))
        assert "(max_columns)" in str(refusal(path))
        for claim in ("99999999999", "-1", "x", "20000000"):
            row = f'<table:table-row table:number-rows-repeated="{claim}">{ods_cell(1)}</table:table-row>'
            assert refusal(ods(tmp_path / "h", table(row))).code == "damaged_file"
        spaces = (
            '<table:table-cell office:value-type="string"><text:p><text:s text:c="16000000"/></text:p></table:table-cell>'
        )
        path = ods(tmp_path / "i", table(f"<table:table-row>{spaces}</table:table-row>"))
        assert refusal(path).code == "too_large"

    def test_text_is_what_stands_in_the_cell_and_not_beside_it(self, tmp_path: Path) -> None:
        cell = (
            '<table:table-cell office:value-type="string"><office:annotation><text:p>a comment</text:p></office:annotation>'
            '<draw:frame xmlns:draw="d"><draw:text-box><text:p>a box</text:p></draw:text-box></draw:frame>'
            "<text:p>one <text:span>two</text:span><text:s text:c='2'/>three<text:tab/>four</text:p>"
            "<text:p>five<text:line-break/>six</text:p></table:table-cell>"
        )
        path = ods(tmp_path / "f", table(table_rows([["a", "b"]]) + f"<table:table-row>{cell}</table:table-row>"))
        assert values(path) == [(2, ["one two  three\tfour\nfive\nsix", None])]

    def test_hidden_sheets_are_passed_over(self, tmp_path: Path) -> None:
        style = (
            '<style:style style:name="h" style:family="table"><style:table-properties table:display="false"/></style:style>'
        )
        data = table_rows([["a", "b"], [1, 2]])
        other = table_rows([["c", "d"], [3, 4]])
        path = ods(tmp_path / "f", table("", "Empty") + table(data, "Hidden", "h") + table(other, "Shown"), styles=style)
        assert read(path)[0] == ("c", "d")
        assert read(path, sheet="hidden")[0] == ("a", "b")
        assert refusal(path, sheet="Empty").code == "empty_sheet"
        assert "'Empty', 'Hidden', 'Shown'" in str(refusal(path, sheet="Other"))

    def test_what_is_no_spreadsheet_is_named(self, tmp_path: Path) -> None:
        path = ods(tmp_path / "f", table(table_rows([["a", "b"]])), mimetype="application/vnd.oasis.opendocument.text")
        assert "no spreadsheet" in str(refusal(path))

    @pytest.mark.parametrize(
        "cell",
        [
            '<table:table-cell office:value-type="float" office:value="x"/>',
            '<table:table-cell office:value-type="float"/>',
            '<table:table-cell office:value-type="boolean" office:boolean-value="maybe"/>',
            '<table:table-cell office:value-type="time" office:time-value="soon"/>',
            '<table:table-cell office:value-type="time" office:time-value="PT999999999H999999999M"/>' * 2 + "<a>",
            "<a>" * 400,
        ],
    )
    def test_nonsense_is_a_damaged_file(self, tmp_path: Path, cell: str) -> None:
        path = ods(tmp_path / "f", table(table_rows([["a", "b"]]) + f"<table:table-row>{cell}</table:table-row>"))
        assert refusal(path).code == "damaged_file"


class TestXls:
    def test_every_kind_of_cell(self, tmp_path: Path) -> None:
        head = b"".join(label(0, column, name) for column, name in enumerate("abcdefgh"))
        cells = (
            record(0x0205, struct.pack("<HHHBB", 1, 0, 0, 1, 0))
            + record(0x0205, struct.pack("<HHHBB", 1, 1, 0, 0x2A, 1))
            + record(0x027E, struct.pack("<HHHI", 1, 2, 0, (7 << 2) | 3))
            + record(0x00BD, struct.pack("<HHHIHIH", 1, 3, 1, (46086 << 2) | 2, 0, (2**30 - 5) << 2 | 2, 4))
            + record(0x0006, struct.pack("<HHHBBBBBBHHIH", 1, 5, 0, 0, 0, 0, 0, 0, 0, 0xFFFF, 0, 0, 0))
            + record(0x04BC, b"shared formula")
            + record(0x0207, struct.pack("<HB", 4, 0) + b"abc")
            + record(0x003C, b"\x01" + "春".encode("utf-16-le"))
            + record(0x0006, struct.pack("<HHHBBBBBBHHIH", 1, 6, 0, 2, 0, 7, 0, 0, 0, 0xFFFF, 0, 0, 0))
            + record(0x0006, struct.pack("<HHHdHIH", 1, 7, 0, 2.5, 0, 0, 0))
        )
        styled = record(0x00E0, bytes(20)) + record(0x00E0, struct.pack("<HH", 0, 14) + bytes(16))
        assert values(xls(tmp_path / "f", head + cells, extra=styled)) == [
            (2, [True, CellError("#N/A"), 0.07, dt.date(2026, 3, 5), -5, "abc春", CellError("#DIV/0!"), 2.5])
        ]

    def test_charts_in_a_sheet_and_rows_out_of_order_do_no_harm(self, tmp_path: Path) -> None:
        chart = bof(32) + number(9, 9, 9) + record(0x0A)
        cells = label(3, 0, "x") + chart + number(3, 1, 1) + label(0, 0, "a") + label(0, 1, "b") + number(2, 0, 5)
        assert values(xls(tmp_path / "f", cells)) == [(3, [5, None]), (4, ["x", 1])]

    def test_hidden_sheets_and_sheets_that_are_none(self, tmp_path: Path) -> None:
        cells = xls_cells([["a", "b"], [1, 2]])
        path = ole(tmp_path / "f", {"Workbook": xls_stream(cells, state=2)})
        assert refusal(path).code == "empty_sheet"
        assert values(path, sheet="data") == [(2, [1, 2])]
        assert refusal(path, sheet="x").code == "unknown_sheet"
        path = ole(tmp_path / "g", {"Workbook": xls_stream(cells, kind=2)})
        assert refusal(path).code == "empty_sheet"

    def test_what_is_not_read_is_refused_and_told_how_to_mend(self, tmp_path: Path) -> None:
        text = "春🎉".encode("utf-16-le")
        formula = record(0x0006, struct.pack("<HHHBBBBBBHHIH", 1, 0, 0, 0, 0, 0, 0, 0, 0, 0xFFFF, 0, 0, 0))
        beyond = xls_stream(xls_cells([["a", "b"]]) + formula + record(0x0207, struct.pack("<HB", 3, 1) + text))
        no_table = xls_stream(xls_cells([["a", "b"], [1, 2]])).replace(bof(16), bof(32))
        for stream in (beyond, no_table):
            error = refusal(ole(tmp_path / "f", {"Workbook": stream}))
            assert error.code == "damaged_file"
            assert "save as .xlsx" in str(error)

    @pytest.mark.parametrize("kind", [0x0006, 0x0206, 0x0406])
    def test_formulas_of_every_version_have_their_values(self, tmp_path: Path, kind: int) -> None:
        def formula(row: int, column: int, result: bytes) -> bytes:
            return record(kind, struct.pack("<HHH", row, column, 0) + result + bytes(8))

        follows = struct.pack("<BBBBHH", 0, 0, 0, 0, 0, 0xFFFF)
        text = record(0x0207, struct.pack("<HB", 2, 0) + b"ok")
        cells = xls_cells([["a", "b"]]) + formula(1, 0, struct.pack("<d", 2.5)) + formula(1, 1, follows) + text
        assert values(xls(tmp_path / "f", cells)) == [(2, [2.5, "ok"])]

    @pytest.mark.parametrize(
        ("page", "data", "wanted"),
        [(10007, b"\xdf\xe1", "яб"), (737, b"\x98\x99", "αβ"), (32769, b"5 \x80", "5 €"), (None, b"5 \x80", "5 €")],
    )
    def test_texts_of_old_workbooks_have_a_code_page(
        self, tmp_path: Path, page: int | None, data: bytes, wanted: str
    ) -> None:
        assert values(self.old(tmp_path / "f", page, data)) == [(2, [wanted, 1])]

    def test_a_code_page_that_is_not_known_is_refused(self, tmp_path: Path) -> None:
        error = refusal(self.old(tmp_path / "f", 12_345, b"x"))
        assert (error.code, error.status) == ("encoding", 422)
        assert "code page 12345" in str(error)
        later = xls(tmp_path / "g", xls_cells([["a", "b"], ["é", 1]]), extra=record(0x42, struct.pack("<H", 12_345)))
        assert values(later) == [(2, ["é", 1])], "Unicode, whatever it claims"

    def old(self, path: Path, page: int | None, data: bytes) -> Path:
        """A workbook of Excel 5 with a text in a code page."""
        begin = record(0x0809, struct.pack("<HHHH", 0x0500, 5, 0, 0))
        sheet = record(0x0809, struct.pack("<HHHH", 0x0500, 16, 0, 0))

        def text(row: int, column: int, said: bytes) -> bytes:
            return record(0x0204, struct.pack("<HHHH", row, column, 0, len(said)) + said)

        codepage = b"" if page is None else record(0x42, struct.pack("<H", page))
        at = len(begin) + len(codepage) + 4 + 8 + 4 + 3
        globals_ = begin + codepage + record(0x85, struct.pack("<IBBB", at, 0, 0, 4) + b"Data") + record(0x0A)
        cells = text(0, 0, b"a") + text(0, 1, b"b") + text(1, 0, data) + number(1, 1, 1)
        return ole(path, {"Book": globals_ + sheet + cells + record(0x0A)})

    def test_texts_break_off_anywhere_and_go_on_in_the_next_record(self, tmp_path: Path) -> None:
        texts = ["a", "b", "", "_x000D_", "日本", "x" * 40, "", "é", "日" * 30]
        whole = b""
        for text in texts:
            wide = any(ord(letter) > 255 for letter in text)
            whole += struct.pack("<HB", len(text), wide) + text.encode("utf-16-le" if wide else "latin-1")
        head = struct.pack("<II", len(texts), len(texts))
        cells = b"".join(
            record(0x00FD, struct.pack("<HHHI", row, column, 0, n))
            for n, (row, column) in enumerate([(0, 0), (0, 1), *((1 + n // 2, n % 2) for n in range(7))])
        )
        wanted = [(2, [None, "_x000D_"]), (3, ["日本", "x" * 40]), (4, [None, "é"]), (5, ["日" * 30, None])]
        starts = [0]
        for text in texts:
            starts.append(starts[-1] + 3 + len(text) * (1 + any(ord(letter) > 255 for letter in text)))
        for cut in starts[1:]:
            extra = record(0xFC, head + whole[:cut]) + record(0x3C, whole[cut:])
            assert values(xls(tmp_path / "f", cells, extra=extra)) == wanted

    def test_a_password_is_named(self, tmp_path: Path) -> None:
        path = xls(tmp_path / "f", xls_cells([["a", "b"]]), extra=record(0x002F, bytes(6)))
        assert refusal(path).code == "encrypted"

    @pytest.mark.parametrize(
        ("streams", "words"),
        [
            ({"WordDocument": b"x"}, "Word"),
            ({"PowerPoint Document": b"x"}, "presentation"),
            ({"Other": b"x"}, "without a workbook"),
            ({"EncryptedPackage": b"x"}, "encrypted"),
        ],
    )
    def test_other_old_files_are_named(self, tmp_path: Path, streams: dict[str, bytes], words: str) -> None:
        error = refusal(ole(tmp_path / "f.xls", streams))
        assert error.status == 415
        assert words in str(error)

    @pytest.mark.parametrize(
        "stream",
        [
            b"",
            b"\x09\x08",
            bof(5),
            record(0x0809, b"\x00\x06"),
            record(0x0809, struct.pack("<HH", 0x0400, 5)),
            bof(5) + record(0x85, b"\x00") + record(0x0A),
            bof(5) + record(0x85, struct.pack("<IBBBB", 10**6, 0, 0, 1, 0) + b"x") + record(0x0A),
            bof(5) + record(0x00FC, b"\x00") + record(0x0A),
            xls_stream(record(0x0203, b"\x00")),
            xls_stream(record(0x00FD, struct.pack("<HHHI", 0, 0, 0, 5))),
            xls_stream(record(0x0204, b"\x00\x00\x00\x00\x00\x00")),
            xls_stream(xls_cells([["a", "b"], [1, 2]]))[:-4],
            xls_stream(b"\x03\x02\xff\xff"),
        ],
    )
    def test_broken_records_are_refused(self, tmp_path: Path, stream: bytes) -> None:
        error = refusal(ole(tmp_path / "f.xls", {"Workbook": stream}))
        assert error.code in {"damaged_file", "empty_sheet", "unsupported_format"}
        assert error.status in {415, 422}

    def test_chains_of_sectors_that_go_round_are_refused(self, tmp_path: Path) -> None:
        whole = xls(tmp_path / "f", xls_cells([["a", "b"], *[["x", n] for n in range(100)]])).read_bytes()
        (at,) = struct.unpack_from("<I", whole, 76)
        for sector in range(20):
            data = bytearray(whole)
            struct.pack_into("<I", data, 512 + at * 512 + 4 * sector, 0)
            (tmp_path / "g").write_bytes(bytes(data))
            try:
                read(tmp_path / "g")
            except InputError as error:
                assert error.status in {415, 422}  # noqa: PT017 - a chain that nobody follows may be what it likes
