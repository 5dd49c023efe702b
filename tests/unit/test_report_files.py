"""Reports: complete, safe to open, and ready to be corrected and uploaded again."""

# ruff: noqa: DTZ001 - the times of a sheet have no zone
from __future__ import annotations

import csv
import datetime as dt
import io
import tracemalloc
import zipfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import openpyxl
import pytest
import python_calamine
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from support.drawn import examples

from asynctask.errors import Unavailable
from asynctask.ledger.base import NewItem
from asynctask.lists import workbook_writer
from asynctask.lists.items import ItemShape
from asynctask.lists.readers import CellError, Limits, RawRow
from asynctask.lists.readers.base import COLUMNS, SUFFIX, Percent, normalise, trimmed
from asynctask.lists.readers.opening import open_source
from asynctask.lists.written_cells import csv_cell
from asynctask.messages import CATALOGUE
from asynctask.reports.files import ReportRow, iter_csv, iter_xlsx, report_headers, write_csv, write_xlsx

HEADERS = ("code", "day", "budget", "note")
VALUES = {"code": "=1+1", "day": dt.date(2026, 3, 5), "budget": 12.5, "note": None}


TEXTS = st.one_of(
    st.text(max_size=8), st.sampled_from("=+-@'\t\r").flatmap(lambda start: st.text(max_size=4).map(start.__add__))
)
CELLS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**14), 10**14),
    st.floats(-1e15, 1e15).filter(lambda x: not x.is_integer()),
    st.dates(dt.date(1900, 3, 1)),
    TEXTS,
    st.datetimes(dt.datetime(1900, 3, 1), dt.datetime(2200, 1, 1)).map(lambda moment: moment.replace(microsecond=0)),
)


def line(values: dict[str, Any] | None = None, **more: Any) -> ReportRow:
    fields: dict[str, Any] = {
        "number": 5,
        "status": "failed",
        "error": "seller is not qualified",
        "attempts": 1,
        "result": None,
    } | more
    return ReportRow(VALUES if values is None else values, **fields)


def csv_of(headers: tuple[str, ...], rows: list[ReportRow]) -> list[list[str]]:
    stream = io.BytesIO()
    assert write_csv(stream, headers, rows) == len(rows)
    data = stream.getvalue()
    assert data.startswith(b"\xef\xbb\xbf")
    return list(csv.reader(io.StringIO(data.decode("utf-8-sig"), newline="")))


def read(path: Path, **options: Any) -> list[RawRow]:
    with open_source(path, path.name, limits=Limits(), **options) as source:
        return list(source.rows())


class TestColumns:
    def test_the_original_columns_come_first_then_the_reports_own(self) -> None:
        assert report_headers(HEADERS) == (HEADERS, ("row", "status", "error", "attempts", "result"))

    def test_a_name_that_is_taken_gets_a_suffix(self) -> None:
        assert report_headers(["Status", "x"])[1] == ("row", "status (report)", "error", "attempts", "result")

    @pytest.mark.parametrize("locale", list(CATALOGUE))
    def test_every_language_that_ships_has_its_names_and_a_report_in_any_is_known_again(self, locale: str) -> None:
        first = report_headers(["x", COLUMNS[locale][1]], locale)
        assert len(set(first[1])) == 5
        assert first[1][1] == COLUMNS[locale][1] + SUFFIX[locale]
        assert report_headers([*first[0], *first[1]], "en")[0] == first[0]
        assert all(normalise(name) == name for name in (*COLUMNS[locale], "x" + SUFFIX[locale]))

    def test_a_report_of_a_report_leaves_the_old_columns_out(self) -> None:
        first = report_headers(["status", "x"])
        assert report_headers([*first[0], *first[1]]) == first


class TestCsv:
    def test_rows_have_all_columns(self) -> None:
        assert csv_of(HEADERS, [line(result={"id": 17})]) == [
            ["code", "day", "budget", "note", "row", "status", "error", "attempts", "result"],
            ["'=1+1", "2026-03-05", "12.5", "", "5", "failed", "seller is not qualified", "1", '{"id":17}'],
        ]

    @pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "＝", "'"])
    def test_no_text_is_a_formula(self, start: str) -> None:
        rows = csv_of(("a",), [line({"a": f"{start}cmd"}, error=f"{start}HYPERLINK()", result=f"{start}x")])
        assert rows[1][0] == f"'{start}cmd"
        assert rows[1][3] == f"'{start}HYPERLINK()"
        assert rows[1][5] == f"'{start}x"
        assert csv_of((f"{start}head",), [])[0][0] == f"'{start}head"

    @pytest.mark.parametrize("text", ["-5", "-0.25", "-123456789012345", "00123", "5", "Straße"])
    def test_text_that_is_just_a_number_stays_as_it_is(self, text: str) -> None:
        assert csv_of(("a",), [line({"a": text})])[1][0] == text

    @pytest.mark.parametrize("text", ["-5+1", "-007", "--1", "-1e5", "-1,5", "+49", "-x", "-1234567890123456", "-5 "])
    def test_what_only_looks_like_a_number_does_not(self, text: str) -> None:
        assert csv_of(("a",), [line({"a": text})])[1][0] == "'" + text

    def test_numbers_stay_numbers(self) -> None:
        cells = {
            "a": -5,
            "b": -1.5,
            "c": Decimal("-1.50"),
            "d": True,
            "e": dt.datetime(2026, 3, 5, 14, 30),
            "f": float("inf"),
        }
        assert csv_of(tuple("abcdef"), [line(cells)])[1][:6] == [
            "-5",
            "-1.5",
            "-1.50",
            "TRUE",
            "2026-03-05 14:30:00",
            "inf",
        ]

    def test_a_text_stream_gets_the_same(self) -> None:
        stream = io.StringIO(newline="")
        assert write_csv(stream, HEADERS, [line()]) == 1
        assert stream.getvalue().encode() == b"".join(iter_csv(HEADERS, [line()]))

    def test_pieces_are_whole_rows_of_some_kilobytes(self) -> None:
        pieces = list(iter_csv(HEADERS, (line() for _ in range(5_000))))
        assert len(pieces) > 10
        assert all(piece.endswith(b"\r\n") and len(piece) < 40_000 for piece in pieces)

    def test_memory_stays_constant(self) -> None:
        class Sink(io.RawIOBase):
            def writable(self) -> bool:
                return True

            def write(self, data: Any) -> int:
                return len(data)

        tracemalloc.start()
        try:
            assert write_csv(Sink(), HEADERS, (line() for _ in range(20_000))) == 20_000  # type: ignore[arg-type]
            assert tracemalloc.get_traced_memory()[1] < 2_000_000
        finally:
            tracemalloc.stop()


class TestXlsx:
    def test_types_are_kept_and_text_is_never_a_formula_or_link(self, tmp_path: Path) -> None:
        cells = {
            "a": "=1+1",
            "b": "https://example.com/",
            "c": -5,
            "d": 1.5,
            "e": True,
            "f": dt.date(2026, 3, 5),
            "g": dt.datetime(2026, 3, 5, 14, 30),
            "h": "007",
            "i": None,
            "j": Decimal("2.50"),
            "k": "mailto:x@example.com",
        }
        path = tmp_path / "a.xlsx"
        assert write_xlsx(path, tuple(cells), [line(cells, result=[1])]) == 1
        values = read(path)[0].values
        assert {name: values[name] for name in cells} == cells | {"j": 2.5}
        assert (values["row"], values["status"], values["attempts"], values["result"]) == (5, "failed", 1, "[1]")
        with zipfile.ZipFile(path) as archive:
            sheet = archive.read("xl/worksheets/sheet1.xml")
        assert b"<f>" not in sheet
        assert b"hyperlink" not in sheet

    def test_the_header_is_bold_frozen_and_filtered(self, tmp_path: Path) -> None:
        write_xlsx(tmp_path / "a.xlsx", HEADERS, [line(), line()])
        book = openpyxl.load_workbook(tmp_path / "a.xlsx")
        sheet = book.active
        assert sheet["A1"].font.bold
        assert sheet.freeze_panes == "A2"
        assert sheet.auto_filter.ref == "A1:I3"
        book.close()

    def test_bad_cells_are_highlighted_with_the_reason_even_empty_ones(self, tmp_path: Path) -> None:
        write_xlsx(tmp_path / "a.xlsx", HEADERS, [line(bad_columns={"note": "is required", "day": "is no date"}), line()])
        book = openpyxl.load_workbook(tmp_path / "a.xlsx")
        sheet = book.active
        assert sheet["D2"].comment.text == "is required"
        assert sheet["B2"].comment.text == "is no date"
        assert sheet["B2"].number_format == "yyyy-mm-dd"
        assert sheet["D2"].fill.fgColor.rgb == sheet["B2"].fill.fgColor.rgb == "FFFFC7CE"
        assert sheet["D3"].comment is None
        assert sheet["D3"].fill.fgColor.rgb != "FFFFC7CE"
        book.close()

    @pytest.mark.parametrize(("count", "sheets"), [(0, 1), (3, 1), (4, 2), (7, 3)])
    def test_rows_beyond_a_sheet_go_to_the_next_one(
        self, tmp_path: Path, count: int, sheets: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(workbook_writer, "SHEET_ROWS", 3)
        rows = [line({"code": f"c{n}"}, number=n) for n in range(count)]
        assert write_xlsx(tmp_path / "a.xlsx", HEADERS, iter(rows)) == count
        book = openpyxl.load_workbook(tmp_path / "a.xlsx")
        assert book.sheetnames == ["Rows 1", "Rows 2", "Rows 3"][:sheets]
        found = [row[0] for sheet in book for row in sheet.iter_rows(min_row=2, values_only=True)]
        assert found == [f"c{n}" for n in range(count)]
        assert all(sheet["A1"].value == "code" for sheet in book)
        book.close()

    def test_what_a_sheet_would_spoil_becomes_text(self, tmp_path: Path) -> None:
        cells = {
            "a": 1234567890123456789,
            "b": Decimal("0.1234567890123456789"),
            "c": float("nan"),
            "d": dt.date(1899, 1, 1),
            "e": dt.datetime(2026, 3, 5, tzinfo=dt.UTC),
            "f": dt.timedelta(-1),
        }
        write_xlsx(tmp_path / "a.xlsx", tuple(cells), [line(cells)])
        values = read(tmp_path / "a.xlsx")[0].values
        assert [values[name] for name in cells] == [
            "1234567890123456789",
            "0.1234567890123456789",
            "nan",
            "1899-01-01",
            "2026-03-05 00:00:00+00:00",
            "-24:00:00",
        ]

    @pytest.mark.parametrize(
        "text",
        ["<r></is></c><c><f>1+1</f></c><c><is></r>", "<r></r>", "<r>" + "&" * 32_000 + "</r>", "<b>&amp;</b>", "]]>"],
    )
    def test_markup_in_a_text_stays_text(self, tmp_path: Path, text: str) -> None:
        write_xlsx(tmp_path / "a.xlsx", ("a", text[:100]), [line({"a": text, text[:100]: 1}, bad_columns={"a": text})])
        book = openpyxl.load_workbook(tmp_path / "a.xlsx")
        found = book.active["A2"]
        assert found.data_type == "s"
        assert found.value in (text, text[:-1] + "…")
        assert book.active["B1"].value == text[:100]
        assert found.comment.text == text[:1_000]
        book.close()

    def test_error_cells_and_percentages_are_such_again(self, tmp_path: Path) -> None:
        cells = {"a": CellError("#N/A"), "b": CellError("#SPILL!"), "c": Percent(0.125, "0.0%"), "d": Percent(1, "0%")}
        write_xlsx(tmp_path / "a.xlsx", tuple(cells), [line(cells, bad_columns={"c": "is too much"})])
        assert {k: v for k, v in read(tmp_path / "a.xlsx")[0].values.items() if k in cells} == {
            "a": CellError("#N/A"),
            "b": "#SPILL!",
            "c": 0.125,
            "d": 1,
        }
        book = openpyxl.load_workbook(tmp_path / "a.xlsx")
        assert [book.active[name].number_format for name in ("C2", "D2")] == ["0.0%", "0%"]
        book.close()
        assert csv_of(tuple(cells), [line(cells)])[1][:4] == ["#N/A", "#SPILL!", "0.125", "1"]

    def test_what_is_wrong_with_the_row_is_marked_on_its_error(self, tmp_path: Path) -> None:
        write_xlsx(tmp_path / "a.xlsx", HEADERS, [line(bad_row="has too many cells"), line()], locale="ja")
        book = openpyxl.load_workbook(tmp_path / "a.xlsx")
        sheet = book.active
        assert sheet["G1"].value == COLUMNS["ja"][2]
        assert sheet["G2"].comment.text == "has too many cells"
        assert sheet["G2"].fill.fgColor.rgb == "FFFFC7CE"
        assert sheet["G3"].comment is None
        book.close()

    def test_only_the_first_refused_cells_of_a_sheet_get_comments_and_all_are_marked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(workbook_writer, "SHEET_ROWS", 4)
        monkeypatch.setattr(workbook_writer, "MAX_COMMENTS", 2)
        rows = [line(number=n, bad_columns={"code": "is unknown"}) for n in range(5)]
        write_xlsx(tmp_path / "a.xlsx", HEADERS, rows)
        book = openpyxl.load_workbook(tmp_path / "a.xlsx")
        first, second = book.worksheets
        assert [first.cell(row, 1).comment is not None for row in range(2, 6)] == [True, True, False, False]
        assert {first.cell(row, 1).fill.fgColor.rgb for row in range(2, 6)} == {"FFFFC7CE"}
        assert second["A2"].comment is not None
        book.close()

    def test_a_disk_that_takes_nothing_is_told_as_that(self, tmp_path: Path) -> None:
        with pytest.raises(Unavailable, match="could not be written"):
            write_xlsx(tmp_path / "nowhere" / "a.xlsx", HEADERS, [line()])

    def test_control_characters_and_long_texts_leave_a_sound_file(self, tmp_path: Path) -> None:
        cells = {"a": "x\x00\x0b\x1fy\ud800\uffff", "b": "z" * 40_000, "c": "🎉" * 20_000, "d": "_x0041_"}
        write_xlsx(tmp_path / "a.xlsx", tuple(cells), [line(cells)])
        values = read(tmp_path / "a.xlsx")[0].values
        assert values["a"] == "x\ufffd\x0b\x1fy\ufffd\ufffd"
        assert values["b"] == "z" * 32_766 + "…"
        assert values["c"] == "🎉" * 16_383 + "…"
        assert values["d"] == "_x0041_"
        assert csv_of(tuple(cells), [line(cells)])[1][0] == values["a"]

    def test_rows_that_break_leave_no_file(self, tmp_path: Path) -> None:
        def rows() -> Iterator[ReportRow]:
            yield line()
            raise LookupError("the ledger went away")

        with pytest.raises(LookupError):
            write_xlsx(tmp_path / "a.xlsx", HEADERS, rows())
        assert list(tmp_path.iterdir()) == []

    def test_pieces_leave_while_the_rows_are_read_in_constant_memory(self) -> None:
        read = 0

        def rows() -> Iterator[ReportRow]:
            nonlocal read
            for read in range(1, 20_001):
                yield line({"code": f"c{read * 7919}"}, number=read)

        tracemalloc.start()
        try:
            pieces = iter_xlsx(HEADERS, rows())
            assert len(next(pieces)) >= 16_384
            assert read < 20_000
            assert max(map(len, pieces)) < 100_000
            assert (read, tracemalloc.get_traced_memory()[1] < 4_000_000) == (20_000, True)
        finally:
            tracemalloc.stop()

    def test_what_left_before_an_error_is_no_workbook(self) -> None:
        def rows() -> Iterator[ReportRow]:
            yield from (line({"code": f"c{n * 7919}"}) for n in range(9_000))
            raise LookupError("the ledger went away")

        gone = io.BytesIO()
        with pytest.raises(LookupError):
            gone.writelines(iter_xlsx(HEADERS, rows()))
        assert gone.tell() > 16_384
        assert not zipfile.is_zipfile(gone)

    def test_calamine_reads_the_same_cells(self, tmp_path: Path) -> None:
        cells = {
            "a": " two  spaces ", "b": "line\nbreak", "c": dt.date(2026, 3, 5), "d": dt.datetime(2026, 3, 5, 14, 30),
            "e": True, "f": -0.1, "g": "<r>&amp;</r>", "h": dt.timedelta(hours=30, minutes=1),
        }  # fmt: skip
        write_xlsx(tmp_path / "a.xlsx", tuple(cells), [line(cells), line(cells)])
        rows = python_calamine.CalamineWorkbook.from_path(tmp_path / "a.xlsx").get_sheet_by_index(0).to_python()
        assert rows[0][:8] == list(cells)
        assert rows[1] == rows[2]
        assert rows[1][:8] == list(cells.values())


class Campaign(BaseModel):
    code: str = Field(title="Campaign code")
    day: dt.date
    budget: Decimal
    status: str | None = None


class TestRoundTrip:
    @pytest.mark.parametrize("suffix", [".csv", ".xlsx"])
    @pytest.mark.parametrize("headers", [("Campaign code", "day", "Budget"), ("Campaign code", "day", "Budget", "Status")])
    def test_a_report_can_be_uploaded_again(self, tmp_path: Path, suffix: str, headers: tuple[str, ...]) -> None:
        shape = ItemShape(Campaign)
        cells = {"Campaign code": "-=x", "day": dt.date(2026, 3, 5), "Budget": -1.5, "Status": "new"}
        row = line({name: cells[name] for name in headers}, bad_columns={"day": "too late"})
        path = tmp_path / f"a{suffix}"
        if suffix == ".csv":
            path.write_bytes(b"".join(iter_csv(headers, [row])))
        else:
            write_xlsx(path, headers, [row])
        with open_source(path, path.name, limits=Limits(), expect=shape.expected) as source:
            assert source.headers is not None
            binding = shape.bind(source.headers)
            (again,) = source.rows()
            assert report_headers(source.headers) == report_headers(headers)
        outcome = shape.validate(again, binding)
        assert isinstance(outcome, NewItem)
        status = "new" if "Status" in headers else None
        expected = {"code": "-=x", "day": "2026-03-05", "budget": "-1.5"}
        assert outcome.values == (expected if status is None else {**expected, "status": status})

    @settings(max_examples=examples(40, 150))
    @given(st.lists(st.fixed_dictionaries({"text": TEXTS, "other": CELLS, "error": TEXTS}), min_size=1, max_size=5))
    def test_any_cell_comes_back_from_both_files(
        self, tmp_path_factory: pytest.TempPathFactory, cells: list[dict[str, Any]]
    ) -> None:
        folder = tmp_path_factory.mktemp("r")
        headers = ("text", "other")
        rows = [line(each, error=each["error"], number=n) for n, each in enumerate(cells)]
        write_xlsx(folder / "a.xlsx", headers, rows)
        (folder / "a.csv").write_bytes(b"".join(iter_csv(headers, rows)))
        for path in (folder / "a.xlsx", folder / "a.csv"):
            for row, each in zip(read(path, expect=headers), cells, strict=True):
                assert row.values["text"] == kept(each["text"])
                assert row.values["error"] == kept(each["error"])
                other = kept(each["other"]) if isinstance(each["other"], str) else each["other"]
                if path.suffix == ".csv":
                    other = None if other is None else kept(str(csv_cell(other)).removeprefix("'"))
                assert (type(row.values["other"]), row.values["other"]) == (type(other), other)


def kept(text: str) -> str | None:
    """A text as a reader gives it."""
    return trimmed("".join("\ufffd" if bad(char) else char for char in text)) or None


def bad(char: str) -> bool:
    """Whether a file cannot hold a character."""
    return "\ud800" <= char <= "\udfff" or char in "\0\ufffe\uffff"
