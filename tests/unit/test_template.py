"""Templates: an empty sheet that Excel helps to fill in, and that the reader takes as it was filled in."""

# ruff: noqa: DTZ001 - the times of a sheet have no zone
from __future__ import annotations

import datetime as dt
import io
import json
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import openpyxl
import pytest
from pydantic import AliasChoices, BaseModel, Field

from asynctask import AsyncTask
from asynctask.ledger.base import NewItem
from asynctask.lists.problems import texts
from asynctask.lists.readers import Limits
from asynctask.lists.readers.opening import open_source
from asynctask.messages import CATALOGUE
from asynctask.reports.templates import NoTemplate, Template, make_template, template_csv, template_xlsx


class Channel(Enum):
    WEB = "web"
    SHOP = "shop, in town"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


Country = Literal[tuple(f"C{n:03}" for n in range(100))]  # type: ignore[valid-type]


class Campaign(BaseModel):
    code: str = Field(
        title="Campaign code", min_length=3, max_length=8, description="As printed on the flyer.", examples=["00123"]
    )
    budget: Annotated[Decimal, Field(gt=0, le=1000)] | None
    pieces: int = Field(1, ge=1, le=100, validation_alias=AliasChoices("Pieces", "count"))
    parcel: int | None = None
    weight: Annotated[float, Field(gt=0)] | None = None
    begins: dt.date
    sent_at: dt.datetime | None = None
    opens: dt.time | None = None
    lasts: dt.timedelta | None = None
    express: bool = False
    kind: Literal["=a", "b"] = "b"
    channel: Channel = Channel.WEB
    level: Level | None = None
    country: Country = "C000"  # type: ignore[valid-type]
    big: int | None = Field(None, le=10**18)
    tags: list[str] = []


class Twice(BaseModel):
    a: str = Field(title="Name")
    b: str = Field(title="name ")


class Evil(BaseModel):
    a: Literal["=1+1", "<r></is></c>", '"'] = Field(title="=HYPERLINK(1)", description="<r>=1</r>")
    b: str = Field("<r><t>x</t></r>", title="@SUM(1)", pattern=r"^\{low\}$", examples=["=cmd"])


class Own:
    pass


class Strange(BaseModel):
    model_config = {"arbitrary_types_allowed": True}
    a: str
    own: Own | None = None


class Shown(BaseModel):
    model_config = {"json_schema_extra": {"examples": [{"sku": "A-1", "n": 3}]}}
    sku: str
    n: int = 1


FILLED = {
    "Campaign code": "00123", "budget": 12.5, "Pieces": 7, "parcel": 12, "weight": 0.5, "begins": dt.date(2026, 3, 5),
    "sent_at": dt.datetime(2026, 3, 5, 14, 30), "opens": dt.time(9, 30), "lasts": dt.timedelta(hours=30), "express": "yes",
    "kind": "=a", "channel": "shop, in town", "level": 2, "country": "C099", "big": "123456789012345678", "tags": None,
}  # fmt: skip


@pytest.fixture
def app(tmp_path: Path) -> Any:
    app = AsyncTask(environ={}, database_url=f"sqlite:///{tmp_path / 'l.db'}", data_dir=str(tmp_path))

    @app.worker
    def create_campaign(item: Campaign) -> None:
        """Create a campaign."""

    @app.worker
    def anything(item: dict[str, Any]) -> None:
        """Take any row."""

    yield app
    app.close()


@pytest.fixture
def template(app: AsyncTask) -> Template:
    return make_template(app.workers["create_campaign"])


@pytest.fixture
def book(template: Template) -> Any:
    book = openpyxl.load_workbook(io.BytesIO(template_xlsx(template)))
    yield book
    book.close()


def rules(book: Any) -> dict[str, Any]:
    """Header -> data validation of the first sheet."""
    sheet = book.worksheets[0]
    names = {cell.column_letter: cell.value for cell in sheet[1]}
    return {
        names[str(rule.sqref).partition(":")[0].rstrip("0123456789")]: rule
        for rule in sheet.data_validations.dataValidation
    }


class TestWorkbook:
    def test_the_first_sheet_has_a_header_that_the_reader_knows_and_nothing_else(self, book: Any) -> None:
        sheet = book.worksheets[0]
        assert book.sheetnames[:2] == ["Rows", "Help"]
        assert book.active.title == "Rows"
        assert [cell.value for cell in sheet[1]] == list(FILLED)
        assert sheet.max_row == 1
        assert sheet.freeze_panes == "A2"

    def test_columns_have_the_format_of_what_belongs_into_them(self, book: Any) -> None:
        sheet = book.worksheets[0]
        spans = [(span.min, span.max, span.number_format) for span in sheet.column_dimensions.values()]
        shown = {c.value: next(f for low, high, f in spans if low <= c.column <= high) for c in sheet[1]}
        assert shown["Campaign code"] == shown["kind"] == shown["big"] == "@"
        assert (shown["begins"], shown["sent_at"]) == ("yyyy-mm-dd", "yyyy-mm-dd hh:mm")
        assert (shown["Pieces"], shown["level"], shown["budget"]) == ("0", "General", "General")

    def test_required_columns_are_marked_and_every_header_says_what_is_wanted(self, book: Any) -> None:
        sheet = book.worksheets[0]
        colours = {cell.value: cell.fill.fgColor.rgb for cell in sheet[1]}
        required = {name for name, colour in colours.items() if colour == colours["Campaign code"]}
        assert required == {"Campaign code", "budget", "begins"}
        assert sheet["A1"].comment.text == "As printed on the flyer.\ntext, 3 to 8 characters\nRequired"
        assert all(cell.comment is not None for cell in sheet[1])

    def test_limits_are_rules_with_a_message(self, book: Any) -> None:
        found = rules(book)
        pieces = found["Pieces"]
        assert (pieces.type, pieces.operator, pieces.formula1, pieces.formula2) == ("whole", None, "1", "100")
        assert pieces.error == "Pieces: whole number, 1 to 100"
        assert pieces.showErrorMessage
        length = found["Campaign code"]
        assert (length.type, length.formula1, length.formula2) == ("textLength", "3", "8")
        weight = found["weight"]
        assert (weight.type, weight.operator, weight.formula1) == ("decimal", "greaterThan", "0")
        assert found["parcel"].errorStyle == "warning"
        assert str(pieces.sqref) == "C2:C1048576"
        assert {"begins", "tags", "big"}.isdisjoint(found)

    def test_what_can_be_chosen_is_a_list_and_a_long_one_stands_on_a_hidden_sheet(self, book: Any) -> None:
        found = rules(book)
        assert found["express"].formula1 == '"yes,no"'
        assert found["level"].formula1 == '"1,2"'
        assert book["Lists"].sheet_state == "hidden"
        for name, values in (("channel", ["web", "shop, in town"]), ("country", [f"C{n:03}" for n in range(100)])):
            sheet, _, place = found[name].formula1.partition("!")
            assert sheet.lstrip("=") == "Lists"
            assert [row[0].value for row in book["Lists"][place.replace("$", "")]] == values
        kinds = {cell.data_type for sheet in book for row in sheet.iter_rows() for cell in row if cell.value is not None}
        assert "f" not in kinds

    def test_the_help_has_a_line_for_each_field_and_an_example_row(self, book: Any) -> None:
        lines = list(book["Help"].iter_rows(values_only=True))
        assert lines[4][:7] == ("Column", "Required", "Type", "Allowed", "If empty", "Example", "Description")
        assert lines[5][:7] == (
            "Campaign code",
            "yes",
            "text",
            "3 to 8 characters",
            None,
            "00123",
            "As printed on the flyer.",
        )
        assert lines[7][:6] == ("Pieces", "no", "whole number", "1 to 100", 1, 1)
        names, values = lines[-2], lines[-1]
        assert list(names) == list(FILLED)
        example = dict(zip(names, values, strict=True))
        assert (example["Campaign code"], example["express"], example["channel"]) == ("00123", "no", "web")
        assert example["begins"] == dt.datetime(2026, 3, 5)

    @pytest.mark.parametrize("locale", list(CATALOGUE))
    def test_it_speaks_every_language_that_ships(self, template: Template, locale: str) -> None:
        words = {key: texts(locale)[f"template.{key}"] for key in ("rows", "help", "yes", "no")}
        book = openpyxl.load_workbook(io.BytesIO(template_xlsx(template, locale)))
        assert book.sheetnames[:2] == [words["rows"], words["help"]]
        assert rules(book)["express"].formula1 == f'"{words["yes"]},{words["no"]}"'
        assert [cell.value for cell in book.worksheets[0][1]] == list(FILLED)
        book.close()


class TestRoundTrip:
    @pytest.mark.parametrize("locale", list(CATALOGUE))
    def test_a_template_that_was_filled_in_is_taken_as_it_is(
        self, app: AsyncTask, template: Template, tmp_path: Path, locale: str
    ) -> None:
        path = tmp_path / "filled.xlsx"
        book = openpyxl.load_workbook(io.BytesIO(template_xlsx(template, locale)))
        filled = {**FILLED, "express": texts(locale)["template.yes"]}
        book.worksheets[0].append(list(filled.values()))
        book.worksheets[0].append(["ABC", 1, None, None, None, dt.date(2026, 3, 6)])
        for cell in book.worksheets[0][2]:
            cell.data_type = "s" if cell.value == "=a" else cell.data_type
        book.save(path)
        book.close()
        shape: Any = app.workers["create_campaign"].shape
        with open_source(path, "filled.xlsx", limits=Limits(), expect=shape.expected) as source:
            assert source.headers == tuple(FILLED)
            binding = shape.bind(source.headers)
            first, second = (shape.validate(row, binding) for row in source.rows())
        assert isinstance(first, NewItem), first
        assert isinstance(second, NewItem), second
        assert first.values == {
            "code": "00123", "budget": "12.5", "pieces": 7, "parcel": 12, "weight": 0.5, "begins": "2026-03-05",
            "sent_at": "2026-03-05T14:30:00", "opens": "09:30:00", "lasts": "30:00:00", "express": True, "kind": "=a",
            "channel": "shop, in town", "level": 2, "country": "C099", "big": 123456789012345678,
        }  # fmt: skip

    def test_an_example_of_every_field_that_has_limits_fits(self, app: AsyncTask, template: Template) -> None:
        shape: Any = app.workers["create_campaign"].shape
        examples = {c.field: c.example for c in template.columns if c.example is not None}
        assert examples.keys() <= shape.model.model_validate(examples, by_name=True).model_fields_set

    def test_an_empty_template_has_no_rows(self, app: AsyncTask, template: Template, tmp_path: Path) -> None:
        shape: Any = app.workers["create_campaign"].shape
        for name, body in (("a.xlsx", template_xlsx(template)), ("a.csv", template_csv(template))):
            (tmp_path / name).write_bytes(body)
            with open_source(tmp_path / name, name, limits=Limits(), expect=shape.expected) as source:
                assert source.headers == tuple(FILLED)
                assert list(source.rows()) == []


class TestWorkers:
    def test_a_worker_that_takes_any_row_has_none_and_it_is_said_why(self, app: AsyncTask) -> None:
        with pytest.raises(NoTemplate, match="takes any row") as caught:
            make_template(app.workers["anything"])
        assert (caught.value.status, caught.value.code) == (409, "no_template")

    def test_headers_that_the_reader_could_confuse_become_the_names_of_the_fields(self, app: AsyncTask) -> None:
        @app.worker
        def twice(item: Twice) -> None:
            """Twice."""

        assert [column.header for column in make_template(app.workers["twice"]).columns] == ["a", "b"]

    def test_formulas_and_markup_in_a_model_stay_text(self, app: AsyncTask) -> None:
        @app.worker
        def evil(item: Evil) -> None:
            """=1+1"""

        template = make_template(app.workers["evil"])
        book = openpyxl.load_workbook(io.BytesIO(template_xlsx(template)))
        cells = [cell for sheet in book for row in sheet.iter_rows() for cell in row if cell.value is not None]
        assert "f" not in {cell.data_type for cell in cells}
        assert {"=1+1", "<r></is></c>", '"', "=HYPERLINK(1)", "<r>=1</r>", "=cmd", "<r><t>x</t></r>"} <= {
            c.value for c in cells
        }
        book.close()
        assert template_csv(template) == "\ufeff'=HYPERLINK(1),'@SUM(1)\r\n".encode()

    def test_a_type_that_has_no_schema_leaves_a_column_for_anything(self, app: AsyncTask) -> None:
        @app.worker
        def strange(item: Strange) -> None:
            """Strange."""

        columns = make_template(app.workers["strange"]).columns
        assert [(column.header, column.kind, column.required) for column in columns] == [
            ("a", "any", True),
            ("own", "any", False),
        ]

    def test_an_example_of_the_whole_item_is_used(self, app: AsyncTask) -> None:
        @app.worker
        def shown(item: Shown) -> None:
            """Shown."""

        assert json.dumps([column.example for column in make_template(app.workers["shown"]).columns]) == '["A-1", 3]'
