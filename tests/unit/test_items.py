"""From rows to items: which header is which field, what people may type, and every problem of a row at once."""

# ruff: noqa: DTZ001 - the times of a sheet have no zone
from __future__ import annotations

import datetime as dt
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NewType
from uuid import UUID

import pydantic
import pytest
import xlsxwriter
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    NaiveDatetime,
    PastDate,
    PastDatetime,
    create_model,
    field_validator,
)
from support.drawn import examples

from asynctask.clock import SystemIds
from asynctask.errors import InputError, Problem
from asynctask.ledger.base import NewItem
from asynctask.lists.coerce import BETWEEN, Unclear, coercer_for, flags_of
from asynctask.lists.items import Binding, ItemShape, Rejected, UnfitItem
from asynctask.lists.problems import from_pydantic
from asynctask.lists.readers import CellError, Limits, RawRow
from asynctask.lists.readers.base import Formatted
from asynctask.lists.rows import ListSource, open_list
from asynctask.lists.uploads import Uploads


class Campaign(BaseModel):
    code: str = Field(title="Campaign code", max_length=10)
    title: str = Field(alias="campaignTitle")
    starts_on: dt.date = Field(validation_alias=pydantic.AliasChoices("starts", "from"), title="開始日")
    budget: Decimal = Field(ge=0, decimal_places=2)
    discount: int = Field(ge=1, le=90)
    active: bool = True
    note: str | None = None


SHAPE = ItemShape(Campaign)
HEADERS = ("CAMPAIGN  code", "campaigntitle", "開始日", "Budget", "discount", "note", "something else")
GOOD = {
    "CAMPAIGN  code": "c1",
    "campaigntitle": "Spring",
    "開始日": dt.date(2026, 3, 5),
    "Budget": 1200,
    "discount": 10,
    "note": None,
    "something else": CellError("#N/A"),
}


def refused(row: RawRow, binding: Binding | None = None, shape: ItemShape = SHAPE) -> Rejected:
    outcome = shape.validate(row, binding)
    assert isinstance(outcome, Rejected)
    assert outcome.problems
    return outcome


def accepted(row: RawRow, binding: Binding | None = None, shape: ItemShape = SHAPE) -> dict[str, Any]:
    outcome = shape.validate(row, binding)
    assert isinstance(outcome, NewItem), outcome
    return dict(outcome.values)


def of_sheet(**cells: Any) -> RawRow:
    return RawRow(7, GOOD | cells)


class TestBinding:
    def test_headers_match_titles_aliases_and_names_however_they_are_written(self) -> None:
        binding = SHAPE.bind(HEADERS)
        assert binding.fields == {
            "CAMPAIGN  code": "code",
            "campaigntitle": "title",
            "開始日": "starts_on",
            "Budget": "budget",
            "discount": "discount",
            "note": "note",
        }

    def test_expected_holds_every_name_that_a_header_may_have(self) -> None:
        shape = ItemShape(Campaign, {"Kode": "code"})
        assert shape.expected == {
            "Kode", "Campaign code", "code", "campaignTitle", "title", "開始日", "starts", "from", "starts_on", "budget",
            "discount", "active", "note",
        }  # fmt: skip

    def test_missing_columns_are_named_with_what_is_there(self) -> None:
        with pytest.raises(InputError, match=r"開始日, budget.*its columns are: code, title, discount") as caught:
            SHAPE.bind(["code", "title", "discount"])
        assert caught.value.code == "missing_columns"
        assert [problem.column for problem in caught.value.errors] == ["開始日", "budget"]

    def test_the_option_columns_goes_before_the_names_of_the_model(self) -> None:
        shape = ItemShape(Campaign, {"title": "code"})
        binding = shape.bind(["title", "code", "campaignTitle", "from", "budget", "discount"])
        assert binding.fields["title"] == "code"
        assert binding.fields["campaignTitle"] == "title"
        assert "code" not in binding.fields

    def test_the_option_columns_cannot_name_what_is_not_there(self) -> None:
        with pytest.raises(InputError, match="cod is no field") as caught:
            ItemShape(Campaign, {"Kode": "cod"})
        assert caught.value.code == "unknown_column"
        with pytest.raises(InputError, match="no column 'Kode'") as caught:
            ItemShape(Campaign, {"Kode": "code"}).bind(HEADERS)
        assert caught.value.code == "unknown_column"

    def test_two_columns_for_one_field_are_refused(self) -> None:
        with pytest.raises(InputError, match="both stand for code") as caught:
            SHAPE.bind([*HEADERS, "code"])
        assert caught.value.code == "duplicate_column"

    def test_the_columns_of_a_report_are_no_columns_of_the_item(self) -> None:
        class Order(BaseModel):
            sku: str
            status: str = "new"

        shape = ItemShape(Order)
        assert shape.bind(["sku", "row", "status", "error", "attempts", "result"]).fields == {"sku": "sku"}
        assert shape.bind(["sku", "status", "row", "status (report)", "error", "attempts", "result"]).fields == {
            "sku": "sku",
            "status": "status",
        }
        binding = ItemShape(None).bind(["sku", "row", "status", "error", "attempts", "result"])
        row = RawRow(
            2, {"sku": "a", "row": 2, "status": "failed", "error": CellError("#N/A"), "attempts": 1, "result": None}
        )
        assert accepted(row, binding, ItemShape(None)) == {"sku": "a"}


class TestAccepted:
    def test_an_item_is_ready_for_json_and_comes_back_as_the_model(self) -> None:
        item = accepted(of_sheet(), SHAPE.bind(HEADERS))
        assert item == {
            "code": "c1",
            "title": "Spring",
            "starts_on": "2026-03-05",
            "budget": 1200,
            "discount": 10,
        }
        again = SHAPE.revive(item)
        assert isinstance(again, Campaign)
        assert again.starts_on == dt.date(2026, 3, 5)
        assert again.budget == Decimal(1200)

    def test_json_items_may_use_names_or_aliases(self) -> None:
        base = {"code": "c", "budget": 1, "discount": "5"}
        assert accepted(RawRow(1, base | {"title": "t", "starts_on": "2026-03-05"}))["title"] == "t"
        assert accepted(RawRow(1, base | {"campaignTitle": "t", "from": "2026/3/5"}))["from"] == "2026-03-05"

    def test_a_model_may_be_strict_and_nested_and_forbid_other_fields(self) -> None:
        class Line(BaseModel):
            sku: str = Field(alias="SKU")

        class Order(BaseModel):
            model_config = ConfigDict(strict=True, extra="forbid")
            day: dt.date
            lines: tuple[Line, ...]

            @pydantic.computed_field  # type: ignore[prop-decorator]
            @property
            def size(self) -> int:
                return len(self.lines)

        shape = ItemShape(Order)
        model = Order(day=dt.date(2026, 3, 5), lines=(Line(SKU="a"),))
        item = accepted(RawRow(1, model), None, shape)
        assert item == {"day": "2026-03-05", "lines": [{"sku": "a"}]}
        assert shape.revive(item) == model

    def test_without_a_model_the_cells_are_the_item(self) -> None:
        shape = ItemShape(None)
        row = RawRow(2, {"a": dt.date(2026, 3, 5), "b": 1.5, "c": None})
        assert accepted(row, shape.bind(["a", "b", "c"]), shape) == {"a": "2026-03-05", "b": 1.5, "c": None}
        assert shape.revive({"a": 1}) == {"a": 1}
        renaming = ItemShape(None, {"A": "code"})
        assert accepted(RawRow(2, {"a": 1, "b": 2}), renaming.bind(["a", "b"]), renaming) == {"code": 1, "b": 2}

    def test_an_empty_cell_is_the_default_or_none(self) -> None:
        class Item(BaseModel):
            a: int | None
            b: int | None = 5
            c: str = "x"

        shape = ItemShape(Item)
        assert accepted(RawRow(2, dict.fromkeys("abc")), shape.bind("abc"), shape) == {"a": None}
        assert accepted(RawRow(1, {"a": " ", "b": "", "c": ""}), None, shape) == {"a": None, "c": ""}
        assert shape.revive({"a": None}) == Item(a=None, b=5, c="x")


class TestRefused:
    def test_all_problems_of_a_row_come_at_once_under_the_users_own_headers(self) -> None:
        cells = {"CAMPAIGN  code": None, "開始日": "3/4/2026", "Budget": CellError("#N/A"), "discount": "９５"}
        outcome = refused(of_sheet(**cells), SHAPE.bind(HEADERS))
        assert sorted((p.column, p.code, p.value) for p in outcome.problems) == [
            ("Budget", "cell_error", "#N/A"),
            ("CAMPAIGN  code", "missing", None),
            ("discount", "too_large", "９５"),
            ("開始日", "ambiguous_date", "3/4/2026"),
        ]
        assert {problem.row for problem in outcome.problems} == {7}
        assert outcome.values["Budget"] == "#N/A"
        assert outcome.values["開始日"] == "3/4/2026"
        assert not any("pydantic" in p.message or "http" in p.message for p in outcome.problems)

    @pytest.mark.parametrize(
        ("cells", "code", "words"),
        [
            ({"CAMPAIGN  code": "x" * 11}, "too_long", "at most 10 characters"),
            ({"discount": 0}, "too_small", "at least 1"),
            ({"discount": "ten"}, "wrong_type", "must be a number"),
            ({"discount": 1.5}, "wrong_type", "whole number"),
            ({"discount": "1.5"}, "wrong_type", "whole number"),
            ({"discount": True}, "wrong_type", "not yes or no"),
            ({"Budget": "nan"}, "wrong_type", "number"),
            ({"Budget": "1.234"}, "too_long", "at most 2 decimals"),
            ({"開始日": "soon"}, "wrong_type", "2026-03-05"),
            ({"開始日": "2026-02-30"}, "wrong_type", "does not exist"),
            ({"開始日": 86_400}, "wrong_type", "format the cell as a date"),
            ({"開始日": "86400"}, "wrong_type", "2026-03-05"),
            ({"開始日": dt.datetime(2026, 3, 5, 1)}, "wrong_type", "only the date"),
            ({"開始日": dt.timedelta(1)}, "wrong_type", "no date"),
        ],
    )
    def test_a_cell_is_refused_with_a_stable_code(self, cells: dict[str, Any], code: str, words: str) -> None:
        outcome = refused(of_sheet(**cells), SHAPE.bind(HEADERS))
        assert [problem.code for problem in outcome.problems] == [code]
        assert words in outcome.problems[0].message
        assert outcome.problems[0].column == next(iter(cells))

    def test_json_problems_have_the_users_keys_and_dotted_paths(self) -> None:
        class Line(BaseModel):
            sku: str
            count: int

        class Order(BaseModel):
            lines: list[Line] = Field(alias="Lines")
            kind: Literal["a", "b"]

        row = RawRow(3, {"lines": [{"sku": "x", "count": "many"}, {"count": 1}], "kind": "c"})
        outcome = refused(row, None, ItemShape(Order))
        assert [(p.column, p.code) for p in outcome.problems] == [
            ("lines.0.count", "wrong_type"),
            ("lines.1.sku", "missing"),
            ("kind", "not_allowed"),
        ]

    @pytest.mark.parametrize("value", [None, 1, "x", [1], True])
    def test_what_is_no_object_is_refused(self, value: Any) -> None:
        outcome = refused(RawRow(1, value), None, SHAPE)
        assert [problem.code for problem in outcome.problems] == ["not_an_object"]
        assert outcome.values == {"value": value}

    @pytest.mark.parametrize("value", [None, 1, "x", [1], True])
    def test_a_worker_without_a_model_takes_any_json_value(self, value: Any) -> None:
        outcome = ItemShape(None).validate(RawRow(1, value), None)
        assert isinstance(outcome, NewItem)
        assert outcome.values == value

    def test_problems_that_the_reader_found_refuse_the_row(self) -> None:
        problem = Problem(2, None, "too_many_cells", "x")
        assert refused(RawRow(2, dict(GOOD), (problem,)), SHAPE.bind(HEADERS)).problems == (problem,)

    def test_the_models_own_checks_speak_in_their_own_words(self) -> None:
        class Item(BaseModel):
            a: int
            b: int

            @pydantic.field_validator("a")
            @classmethod
            def even(cls, value: int) -> int:
                if value % 2:
                    raise ValueError("must be even")
                return {0: 0, 2: 2}[value]

            @pydantic.model_validator(mode="after")
            def order(self) -> Item:
                if self.a > self.b:
                    raise AssertionError("a must come before b")
                return self

        shape = ItemShape(Item)
        assert [(p.column, p.code, p.message) for p in refused(RawRow(1, {"a": 1, "b": 2}), None, shape).problems] == [
            ("a", "invalid", "must be even")
        ]
        assert [(p.column, p.message) for p in refused(RawRow(1, {"a": 2, "b": 1}), None, shape).problems] == [
            (None, "a must come before b")
        ]
        # A check that stumbles refuses the row and no other.
        assert [p.code for p in refused(RawRow(1, {"a": 4, "b": 5}), None, shape).problems] == ["invalid"]

    def test_forbidden_fields_are_named(self) -> None:
        class Item(BaseModel):
            model_config = ConfigDict(extra="forbid")
            a: int

        outcome = refused(RawRow(1, {"a": 1, "x": 2}), None, ItemShape(Item))
        assert [(p.column, p.code) for p in outcome.problems] == [("x", "unknown_field")]

    def test_an_item_that_cannot_be_kept_is_refused(self) -> None:
        small = ItemShape(None, max_item_bytes=20)
        assert refused(RawRow(1, {"a": "x" * 30}), None, small).problems[0].code == "item_too_large"
        for value in ("a\0b", "\ud800"):
            outcome = refused(RawRow(1, {"a": value, "b": "\\u0000"}), None, ItemShape(None))
            assert outcome.problems[0].code == "invalid"
            assert "\0" not in outcome.values["a"]
            outcome.values["a"].encode()
        assert accepted(RawRow(1, {"a": "\\u0000"}), None, ItemShape(None)) == {"a": "\\u0000"}

    def test_a_long_value_is_shortened_in_the_problem_only(self) -> None:
        outcome = refused(of_sheet(**{"CAMPAIGN  code": "x" * 500}), SHAPE.bind(HEADERS))
        assert len(outcome.problems[0].value) == 200
        assert outcome.values["CAMPAIGN  code"] == "x" * 500

    def test_an_error_without_an_entry_keeps_its_own_type(self) -> None:
        def describe(error: dict[str, Any]) -> tuple[str, str]:
            problem = from_pydantic(None, None, error)
            return problem.code, problem.message

        assert describe({"type": "strange", "msg": "is strange"}) == ("strange", "is strange")
        assert describe({"type": "greater_than", "msg": "Input should be greater"}) == (
            "too_small",
            "Input should be greater",
        )


def coerced(annotation: Any, value: Any, *, sheet: bool = True) -> Any:
    coercer = coercer_for(annotation, sheet=sheet)
    assert coercer is not None
    return coercer(value)


def read_in(column: list[str], text: str, annotation: Any = float, *, between: int = 0) -> Any:
    """A text as a number of a column; the code of its refusal."""
    flags = between
    for each in column:
        flags |= flags_of(each)
    coercer = coercer_for(annotation, sheet=True, notation=lambda: flags)
    assert coercer is not None
    try:
        return float(coercer(text))
    except Unclear as error:
        return error.code


class TestDecimalsAndThousands:
    """Fails where a comma before three digits is taken for thousands whatever the column says."""

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("1200", 1200), ("1.5", 1.5), ("1234.500", 1234.5), ("0.250", 0.25), ("1,234.50", 1234.5),
            ("1,234,567", 1234567),
            ("-1,234,567.8", -1234567.8), ("1,5", 1.5), ("0,250", 0.25), ("-0,250", -0.25), ("1.234,50", 1234.5),
            ("1.234.567", 1234567), ("1234,500", 1234.5), ("1 234,50", 1234.5), ("1 234", 1234),
            ("1\u00a0234\u202f567", 1234567),
            ("1'234.50", 1234.5), ("1’234’567", 1234567), ("1'234,5", 1234.5), ("12,34,567", 1234567),
            ("1,23,45,678.5", 12345678.5),
            ("1.355e3", 1355), ("1,355E3", 1355), ("１，５", 1.5),
        ],
    )  # fmt: skip
    def test_a_number_with_one_reading_has_it(self, text: str, value: float) -> None:
        assert read_in([text], text) == value

    @pytest.mark.parametrize("text", ["1,200", "173,900", "1.355", "-12.000", "１，２００", "1.200"])
    @pytest.mark.parametrize("kind", [int, float, Decimal, int | float, float | None])
    def test_one_with_two_readings_needs_its_column(self, text: str, kind: Any) -> None:
        assert read_in([text, "7", "x", "200"], text, kind) == "ambiguous_number"
        assert read_in([text, "0,5", "12.50"], text, kind) == "ambiguous_number"
        plain = float(text.translate(str.maketrans("，１２０", ",120")).replace(",", "."))
        if kind is not int:
            points, commas = (plain * 1000, plain) if "," in text or "，" in text else (plain, plain * 1000)
            assert read_in([text, "12.50"], text, kind) == pytest.approx(points)
            assert read_in([text, "12,50"], text, kind) == pytest.approx(commas)

    def test_commas_between_cells_leave_a_point_for_decimals(self) -> None:
        assert read_in(["1,200"], "1,200", between=BETWEEN) == read_in(["1,200"], "1,200", int, between=BETWEEN) == 1200
        assert read_in(["1.355"], "1.355", between=BETWEEN) == 1.355
        assert read_in(["12.000"], "12.000", int, between=BETWEEN) == "ambiguous_number", "a whole number has no decimals"
        assert read_in(["12.000", "7.0"], "12.000", int, between=BETWEEN) == 12
        for text in ("0,250", "1,5", "1.234,50"):
            assert read_in([text], text, between=BETWEEN) == "ambiguous_number"
            assert read_in([text, "2.5"], text) == "ambiguous_number"

    @pytest.mark.parametrize(
        "text", ["1,2,3", "0,123,456", "1.2.3", "1,23,4", "00,5", "1,234 567", "12 34", "1234,567,890", ",5", "030 123"]
    )
    def test_what_is_grouped_otherwise_is_no_number(self, text: str) -> None:
        assert read_in([text], text) == "wrong_type"

    def test_a_text_of_json_is_never_guessed(self) -> None:
        for text, value in (("1.355", "1.355"), ("1,234.5", "1234.5"), ("12", "12")):
            assert coerced(float, text, sheet=False) == value
        for kind in (int, float, Decimal):
            for text in ("173,900", "1,5", "0,250", *(["12.000", "-1.200", "１.200"] if kind is int else [])):
                with pytest.raises(Unclear) as caught:
                    coerced(kind, text, sheet=False)
                assert caught.value.code == "ambiguous_number"

    def test_digits_that_a_spreadsheet_has_dropped_are_missed(self) -> None:
        for text in ("4.01235E+12", "4,01235E+12", "1E+2", "-4.01235e12", "4E+12"):
            assert read_in(["0,5"] if "," in text else [], text, int) == "lost_digits"
            assert isinstance(read_in([], text), float)
        for text, value in (("1e3", 1000), ("1.25E2", 125), ("4.012350000001E+12", 4012350000001)):
            assert read_in([], text, int) == value

    def test_a_computed_number_is_what_its_15_digits_show(self) -> None:
        assert coerced(int, 434.99999999999994) == 435
        assert type(coerced(int, 434.99999999999994)) is int
        assert coerced(int, -0.99999999999999989) == -1
        for value in (435.4, 1234567890123456.5):
            assert coerced(int, value) == value
        assert coerced(int, 434.99999999999994, sheet=False) == 434.99999999999994


def sheet(name: str, *cells: Any) -> bytes:
    """A list of one column of numbers ``n``, and of numbers of rows, in the format of its name."""
    delimiter = {".csv": ";", ".tsv": "\t", ".txt": ","}.get(name[-4:])
    if delimiter is not None:
        lines = [["row", "n"], *([str(row), f'"{cell}"'] for row, cell in enumerate(cells))]
        return "\n".join(map(delimiter.join, lines)).encode()
    made = io.BytesIO()
    with xlsxwriter.Workbook(made) as book:
        sheet = book.add_worksheet()
        sheet.write_row(0, 0, ["row", "n"])
        for row, cell in enumerate(cells):
            sheet.write_row(row + 1, 0, [row, cell])
    return made.getvalue()


class Amount(BaseModel):
    n: float


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.xlsx"])
class TestColumnsOfAStoredList:
    """Fails where each cell is read by itself."""

    def numbers(self, tmp_path: Path, name: str, *cells: Any, after: int = 0, model: Any = Amount) -> list[Any]:
        uploads = Uploads(tmp_path, 10**9, SystemIds())
        stored = uploads.store(io.BytesIO(sheet(name, *cells)), name)
        source, limits = ListSource(name=stored.name, filename=name), Limits()
        with open_list(uploads, limits, source, ItemShape(model)) as opened:
            rows = list(opened.checked(after))
        return [row.problems[0].code if isinstance(row, Rejected) else row.values["n"] for row in rows]

    def test_a_cell_far_below_tells_how_the_first_is_read(self, tmp_path: Path, name: str) -> None:
        many = ["7"] * 1_500
        assert self.numbers(tmp_path, name, "173,900", *many, "12,50")[0] == 173.9
        assert self.numbers(tmp_path, name, "173,900", *many, "12.50")[0] == 173_900
        assert self.numbers(tmp_path, name, "173,900", *many, "0,250", "1.355")[-3:] == [7, 0.25, 1355]

    def test_without_one_and_where_two_contradict_each_other_it_is_refused(self, tmp_path: Path, name: str) -> None:
        unclear = "ambiguous_number"
        assert self.numbers(tmp_path, name, "173,900", "1.200", "7") == [unclear, unclear, 7]
        assert self.numbers(tmp_path, name, "173,900", "1,5", "2.5") == [unclear, unclear, 2.5]

    def test_a_split_that_goes_on_in_the_middle_reads_as_its_beginning_did(self, tmp_path: Path, name: str) -> None:
        cells = ["12,50", *["7"] * 1_200, "173,900"]
        assert self.numbers(tmp_path, name, *cells, after=1_202) == [173.9]

    def test_a_number_of_a_workbook_tells_nothing_and_is_not_told(self, tmp_path: Path, name: str) -> None:
        if name == "a.xlsx":
            assert self.numbers(tmp_path, name, 1.5, "1,200", 1200) == [1.5, "ambiguous_number", 1200]


def test_commas_between_the_cells_of_a_list_tell(tmp_path: Path) -> None:
    columns = TestColumnsOfAStoredList()
    assert columns.numbers(tmp_path, "a.txt", "1,200", "1.355") == [1200, 1.355]
    assert columns.numbers(tmp_path, "a.txt", "1,200", "0,250") == ["ambiguous_number"] * 2


def american(said: Any) -> Any:
    month, day, year = map(int, said.split("/")) if isinstance(said, str) and "/" in said else (0, 0, 0)
    return dt.date(year, month, day) if year else said


class Own(BaseModel):
    """Fields that read texts by themselves, and fields that only look like it."""

    size: ByteSize = ByteSize(0)
    least: ByteSize | None = None
    code: Annotated[int, BeforeValidator(lambda said: str(said).strip("#"))] = 0
    day: Annotated[dt.date, BeforeValidator(american)] = dt.date(2026, 1, 1)
    rate: float = 0
    count: Annotated[int, Field(gt=0), AfterValidator(lambda said: said + 1)] = 1

    @field_validator("rate", mode="before")
    @classmethod
    def _of_percent(cls, said: Any) -> Any:
        return float(said.rstrip("%")) / 100 if isinstance(said, str) and said.endswith("%") else said


class TestOwnSyntax:
    def test_a_field_that_reads_texts_by_itself_sees_them(self) -> None:
        shape, names = ItemShape(Own), ("size", "least", "code", "day", "rate", "count")
        cells = dict(zip(names, ("1 KiB", "2MB", "#7", "3/4/2026", "25%", "1,200"), strict=True))
        wanted = {"size": 1024, "least": 2_000_000, "code": 7, "day": dt.date(2026, 3, 4), "rate": 0.25, "count": 1201}
        assert dict(shape.revive(accepted(RawRow(2, cells), shape.bind(names), shape))) == wanted
        assert dict(shape.revive(accepted(RawRow(1, {**cells, "count": "1200"}), None, shape))) == wanted

    @pytest.mark.parametrize("text", ["1,200", "1,5 GB", "0,250", "1.200.000", "1 200 kB"])
    def test_a_size_of_which_only_the_beginning_would_be_read_is_refused(self, text: str) -> None:
        """Without it 1 of "1,5 GB": pydantic reads the beginning."""
        shape = ItemShape(Own)
        for field in ("size", "least"):
            for binding in (shape.bind([field]), None):
                (problem,) = refused(RawRow(2, {field: text}), binding, shape).problems
                assert (problem.column, problem.code) == (field, "wrong_type")

    @pytest.mark.parametrize("kind", [PastDate, PastDatetime, AwareDatetime, NaiveDatetime, PastDate | None])
    def test_a_number_is_no_timestamp_for_a_day_of_pydantic_either(self, kind: Any) -> None:
        """Without it 86400 is the second of January 1970."""
        shape = ItemShape(create_model("Dated", day=(kind, ...)))
        binding = shape.bind(["day"])
        for value in (86_400, 46_000.5, "05/03/2024"):
            (problem,) = refused(RawRow(2, {"day": value}), binding, shape).problems
            assert problem.code == ("wrong_type" if not isinstance(value, str) else "ambiguous_date")
        if kind is not AwareDatetime:
            assert accepted(RawRow(2, {"day": "13.03.2024"}), binding, shape)["day"].startswith("2024-03-13")

    def test_and_the_numbers_and_days_of_a_workbook_too(self) -> None:
        shape = ItemShape(Own)
        found = accepted(RawRow(2, {"size": 1024, "day": dt.date(2026, 3, 4)}), shape.bind(["size", "day"]), shape)
        assert (found["size"], found["day"]) == (1024, "2026-03-04")
        assert refused(RawRow(2, {"day": 46_000}), shape.bind(["day"]), shape).problems[0].code == "wrong_type"


class TestFormats:
    def test_a_format_is_part_of_a_text_and_of_nothing_else(self) -> None:
        class Goods(BaseModel):
            sku: str
            count: int = 0
            price: Decimal = Decimal(0)
            any: Any = None

        shape, cell = ItemShape(Goods), Formatted(1234, "00000", "01234")
        binding = shape.bind(["sku", "count", "price", "any"])
        found = accepted(RawRow(2, dict.fromkeys(("sku", "count", "price", "any"), cell)), binding, shape)
        assert found == {"sku": "01234", "count": 1234, "price": 1234, "any": 1234}
        assert accepted(RawRow(2, {"sku": cell}), ItemShape(None).bind(["sku"]), ItemShape(None)) == {"sku": 1234}
        outcome = refused(RawRow(2, {"sku": Formatted(12.5, "00000", None)}), binding, shape)
        assert [(each.column, each.code, each.value) for each in outcome.problems] == [("sku", "number_format", 12.5)]

    def test_a_key_twice_in_the_json_of_a_cell_is_refused(self) -> None:
        class Tagged(BaseModel):
            tags: dict[str, Any]

        shape = ItemShape(Tagged)
        for text, key in (('{"a": 1, "a": 2}', "a"), ('{"x": [{"b:c": 1, "b:c": 1}], "y": "d:e"}', "b:c")):
            (problem,) = refused(RawRow(2, {"tags": text}), shape.bind(["tags"]), shape).problems
            assert (problem.code, problem.params) == ("duplicate_key", {"key": key})
        assert accepted(RawRow(2, {"tags": '{"a:b": {"a:b": "c:d"}}'}), shape.bind(["tags"]), shape) == {
            "tags": {"a:b": {"a:b": "c:d"}}
        }


class TestWhatPeopleType:
    @pytest.mark.parametrize(
        ("annotation", "text", "value"),
        [
            (int, " 12 ", 12),
            (int, "1,200", 1200),
            (int, "１２", 12),
            (int, "１，２００", 1200),
            (int, "−5", -5),
            (int, "12.0", 12),
            (int, "1e3", 1000.0),
            (int, 10**30, 10**30),
            (float, "1,234.5", "1234.5"),
            (Decimal, "1,234.50", "1234.50"),
            (Decimal, 0.1 + 0.2, Decimal("0.3")),
            (str, 123, "123"),
            (str, 1.5, "1.5"),
            (str, True, "TRUE"),
            (str, dt.date(2026, 3, 5), "2026-03-05"),
            (str, "007", "007"),
            (bool, "はい", True),
            (bool, "いいえ", False),
            (bool, "是", True),
            (bool, "否", False),
            (bool, "YES", True),
            (bool, "False", False),
            (Literal["1", "2"], 1, "1"),
        ],
    )
    def test_a_cell_becomes_what_the_field_wants(self, annotation: Any, text: Any, value: Any) -> None:
        result = coerced(annotation, text)
        assert result == value
        assert type(result) is type(value)

    @pytest.mark.parametrize(
        "text",
        ["2026-03-05", "2026/3/5", "2026/03/05", "2026.3.5", "2026年3月5日", "05.03.2026", "5.3.2026", " 2026-3-5 ",
         "２０２６年３月５日",
         "2026-03-05T00:00", dt.date(2026, 3, 5), dt.datetime(2026, 3, 5)],
    )  # fmt: skip
    def test_a_date_has_many_forms(self, text: Any) -> None:
        assert coerced(dt.date, text) == dt.date(2026, 3, 5)
        assert coerced(dt.datetime, text) == dt.datetime(2026, 3, 5)

    def test_slashes_are_taken_where_only_one_day_is_meant(self) -> None:
        assert coerced(dt.date, "25/12/2026") == coerced(dt.date, "12/25/2026") == dt.date(2026, 12, 25)
        assert coerced(dt.date, "4/4/2026") == dt.date(2026, 4, 4)
        for text in ("3/4/2026", "12-11-2026"):
            with pytest.raises(Unclear) as caught:
                coerced(dt.date, text)
            assert caught.value.code == "ambiguous_date"

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("2026-03-05 14:30", dt.datetime(2026, 3, 5, 14, 30)),
            ("2026/3/5 9:05:07", dt.datetime(2026, 3, 5, 9, 5, 7)),
            ("2026年3月5日 14:30", dt.datetime(2026, 3, 5, 14, 30)),
            ("2026-03-05T14:30:00Z", dt.datetime(2026, 3, 5, 14, 30, tzinfo=dt.UTC)),
            ("2026-03-05T14:30:00.25+00:00", dt.datetime(2026, 3, 5, 14, 30, 0, 250_000, tzinfo=dt.UTC)),
        ],
    )
    def test_a_moment_is_a_date_with_a_time(self, text: str, value: dt.datetime) -> None:
        assert coerced(dt.datetime, text) == value

    @pytest.mark.parametrize("text", ["25:00", "2026-03-05 25:00", "2026-03-05 x", "20260305", "5.3.26", "", "٣/٤/٢٠٢٦x"])
    def test_what_is_no_date_is_refused(self, text: str) -> None:
        for kind in (dt.date, dt.datetime):
            with pytest.raises(Unclear) as caught:
                coerced(kind, text)
            assert caught.value.code == "wrong_type"

    @pytest.mark.parametrize(
        "text", ["14:30", "14:30:00", " 1４：30 ", "2:30 PM", "02:30:00 pm", "2:30 p.m.", dt.time(14, 30)]
    )
    def test_a_time_has_many_forms(self, text: Any) -> None:
        assert coerced(dt.time, text) == dt.time(14, 30)

    def test_the_hours_about_midnight_and_noon_are_told_apart(self) -> None:
        assert [coerced(dt.time, text).hour for text in ("12:05 AM", "12:05 PM", "0:05", "9:05")] == [0, 12, 0, 9]

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("1:30", dt.timedelta(hours=1, minutes=30)),
            ("30:00:00", dt.timedelta(hours=30)),
            ("0:00:00.25", dt.timedelta(milliseconds=250)),
            (dt.time(1, 30), dt.timedelta(hours=1, minutes=30)),
            (dt.timedelta(hours=30), dt.timedelta(hours=30)),
        ],
    )
    def test_a_duration_is_what_a_spreadsheet_shows_for_it(self, text: Any, value: dt.timedelta) -> None:
        assert coerced(dt.timedelta, text) == value

    @pytest.mark.parametrize("cell", [0.5, 1, 46086, True, "0.5", "25:00", "13:00 PM", "0:00 AM", "1:60"])
    def test_a_number_in_a_sheet_is_no_time(self, cell: Any) -> None:
        model = pydantic.create_model("Item", field=(dt.time, ...))
        shape = ItemShape(model)
        assert refused(RawRow(1, {"field": cell}), shape.bind(["field"]), shape).problems[0].code == "wrong_type"

    @pytest.mark.parametrize("cell", [1.25, 1, True, "1.25", "1:60", "1:30:99"])
    def test_a_number_in_a_sheet_is_no_duration(self, cell: Any) -> None:
        model = pydantic.create_model("Item", field=(dt.timedelta, ...))
        shape = ItemShape(model)
        assert refused(RawRow(1, {"field": cell}), shape.bind(["field"]), shape).problems[0].code == "wrong_type"

    @pytest.mark.parametrize("sheet", [True, False])
    @pytest.mark.parametrize("text", ["1e999", "-1e400", "9" * 400])
    def test_a_number_beyond_all_floats_is_refused(self, text: str, sheet: bool) -> None:
        with pytest.raises(Unclear) as caught:
            coerced(float, text, sheet=sheet)
        assert caught.value.code == "wrong_type"
        assert coerced(Decimal, text, sheet=sheet) == text

    def test_annotations_are_seen_through(self) -> None:
        class Kind(Enum):
            one = "1"

        Sku = NewType("Sku", int)
        for annotation in (int | None, Annotated[int | None, Field(ge=1)], Annotated[int, 1] | None, Sku):
            assert coerced(annotation, "１２") == 12
        assert coerced(Kind, 1) == "1"
        for other in (int | str, int | list[int], str | list[int], Any, bytes):
            assert coercer_for(other, sheet=True) is None
        for holder in (list[int], dict[str, int] | None, tuple[int, ...], set[int], Campaign):
            assert coercer_for(holder, sheet=False) is None
            assert [coerced(holder, text) for text in (' {"a": [1]}', "[1, 2]", "[1", "a", "[" * 40 + "]" * 40)] == [
                {"a": [1]}, [1, 2], "[1", "a", "[" * 40 + "]" * 40,
            ]  # fmt: skip

    def test_numbers_in_json_stay_time_stamps_where_the_model_takes_them(self) -> None:
        assert coerced(dt.datetime, 86_400, sheet=False) == 86_400

    @settings(max_examples=examples(100, 300))
    @given(
        st.sampled_from([int, float, Decimal, bool, str, dt.date, dt.datetime, dt.time, dt.timedelta]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=30)
        | st.from_regex(r"[0-9１-９]{1,4}[-/.年][0-9]{1,2}[-/.月][0-9]{1,4}日?( [0-9]{1,2}:[0-9]{2})?", fullmatch=True)
        | st.from_regex(r"[+-]?[0-9,]{1,12}(\.[0-9]*)?(e[+-]?[0-9]{1,4})?", fullmatch=True)
        | st.from_regex(r"[0-9]{1,7}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,7})?)?( ?[aApP]\.?[mM])?", fullmatch=True)
        | st.dates()
        | st.datetimes()
        | st.times()
        | st.timedeltas()
        | st.just(CellError("#N/A")),
        st.booleans(),
    )
    def test_any_cell_is_accepted_or_refused_never_more(self, kind: type, value: Any, sheet: bool) -> None:
        model = pydantic.create_model("Item", field=(kind, ...))
        shape = ItemShape(model)
        outcome = shape.validate(RawRow(1, {"field": value}), shape.bind(["field"]) if sheet else None)
        if isinstance(outcome, NewItem):
            shape.revive(outcome.values)
        else:
            assert all(problem.message for problem in outcome.problems)

    @given(st.integers(-(10**15), 10**15))
    def test_a_number_survives_its_spellings(self, number: int) -> None:
        spellings: list[Callable[[int], str]] = [str, "{:,}".format, " {} ".format, "{}.0".format]
        for spelling in spellings:
            assert coerced(int, spelling(number)) == number


def test_rows_that_the_model_of_a_newer_release_refuses_are_one_group_of_errors() -> None:
    class Newer(BaseModel):
        sku: str
        colour: str
        size: int = Field(ge=1)

    said = set()
    for item in ({"sku": "A", "size": 0}, {"sku": "B", "size": -1}):
        with pytest.raises(UnfitItem) as refused:
            ItemShape(Newer).revive(item)
        said.add(str(refused.value))
    words = "the item does not fit Newer: colour: Field required; size: Input should be greater than or equal"
    assert said == {f"{words} to 1"}


class Weight(Enum):
    HEAVY = 7


@dataclass
class Box:
    width: int


class Crate(BaseModel):
    size: int


class TestValuesOfAProgram:
    """Of a worker without a model: what JSON can represent is kept; anything else refuses the row, and is not replaced by
    its ``repr``."""

    @pytest.mark.parametrize(
        ("value", "kept"),
        [
            (2**64 - 1, 2**64 - 1), (1.5, 1.5), (Decimal("1.10"), "1.10"), (dt.date(2026, 3, 5), "2026-03-05"),
            ((1, {2}), [1, [2]]), (Weight.HEAVY, 7), (Box(3), {"width": 3}), ({1: {"a": None}}, {"1": {"a": None}}),
            (UUID(int=5), "00000000-0000-0000-0000-000000000005"), (Crate(size=2), {"size": 2}),
        ],
    )  # fmt: skip
    def test_what_json_can_represent_is_kept(self, value: Any, kept: Any) -> None:
        for item, expected in (({"n": value, "other": 1}, {"n": kept, "other": 1}), ([value], [kept])):
            found = ItemShape(None).validate(RawRow(1, item), None)
            assert isinstance(found, NewItem)
            assert json.loads(found.params) == expected

    @pytest.mark.parametrize(
        ("value", "says"),
        [
            (object(), "type object"), (b"ab", "type bytes"), (float("nan"), "number nan"), (float("-inf"), "number -inf"),
            (2**64, "64"), (lambda: 1, "type function"), (iter([1]), "type list_iterator"),
            (1 + 2j, "type complex"), ({(1, 2): 3}, "key of type tuple"), ([{"deep": object()}], "type object"),
            (Box, "type type"),
        ],
    )  # fmt: skip
    def test_anything_else_refuses_the_row_by_its_field_and_type(self, value: Any, says: str) -> None:
        for item, column in (({"other": 1, "n": value}, "n"), ([value], None)):
            found = ItemShape(None).validate(RawRow(1, item), None)
            assert isinstance(found, Rejected)
            ((problem,),) = [found.problems]
            assert (problem.column, problem.code) == (column, "invalid")
            assert says in problem.message
