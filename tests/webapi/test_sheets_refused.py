"""A workbook without the columns that are needed: the refusal names the sheet that was read, and the one to choose."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import xlsxwriter
from pydantic import BaseModel, Field
from support.webshop import Client, client_of

from asynctask import AsyncTask

Form = Callable[..., dict[str, Any]]
GOOD: list[list[Any]] = [["sku", "Quantity"], ["A", 1]]


def workbook(sheets: Mapping[str, Sequence[Sequence[Any]]]) -> bytes:
    out = io.BytesIO()
    with xlsxwriter.Workbook(out) as book:
        for name, rows in sheets.items():
            sheet = book.add_worksheet(name)
            for number, row in enumerate(rows):
                sheet.write_row(number, 0, row)
    return out.getvalue()


def refusal(client: Client, form: Form, book: bytes, **fields: str) -> Any:
    answer = client.post("/api/tasks", **form(book, "list.xlsx", **fields))
    assert answer.status_code == 422, answer.json
    return answer.json


@pytest.mark.parametrize("cover", [[["Please see sheet Data"]], [["Quantity", "Price"], [1, 2]]])
def test_the_sheet_that_has_the_header_is_named_first(client: Client, form: Form, cover: list[list[Any]]) -> None:
    book = workbook({"Cover": cover, "Notes": [["nothing"]], "Data": GOOD})
    found = refusal(client, form, book)
    assert found["code"] == ("no_header" if len(cover) == 1 else "missing_columns")
    assert "Sheet 'Cover' was read; choose another with the option sheet: 'Data', 'Notes'" in found["detail"]
    assert found["sheets"] == ["Data", "Notes"]
    assert client.post("/api/tasks", **form(book, "list.xlsx", sheet="Data")).status_code == 202


@pytest.mark.parametrize(("language", "words"), [("zh", "读取的是工作表 'Cover'"), ("ja", "シート 'Cover' を")])
def test_it_is_said_in_the_readers_language(client: Client, form: Form, language: str, words: str) -> None:
    book = workbook({"Cover": [["Quantity", "Price"], [1, 2]], "Data": GOOD})
    answer = client.post("/api/tasks", **form(book, "list.xlsx"), headers={"Accept-Language": language})
    assert words in answer.json["detail"]
    assert "'Data'" in answer.json["detail"]


def test_of_a_workbook_with_one_sheet_no_other_is_offered(client: Client, form: Form) -> None:
    found = refusal(client, form, workbook({"Only": [["x"]]}))
    assert "option sheet" not in found["detail"]
    assert "sheets" not in found


@pytest.mark.parametrize(
    ("chosen", "code", "others"),
    [("Blank", "empty_sheet", ["Data", "Cover"]), ("Dta", "unknown_sheet", ["Cover", "Blank", "Data"])],
)
def test_a_chosen_sheet_that_is_empty_or_not_there_is_refused_with_the_others(
    client: Client, form: Form, chosen: str, code: str, others: list[str]
) -> None:
    book = workbook({"Cover": [["Please see sheet Data"]], "Blank": [], "Data": GOOD})
    found = refusal(client, form, book, sheet=chosen)
    assert (found["code"], found["sheets"]) == (code, others)


def test_a_header_of_columns_that_is_not_there_is_an_unknown_column(client: Client, form: Form) -> None:
    columns = json.dumps({"sku no": "sku"})
    for header in (["Sku-No", "Price"], ["Sku-No", "Quantity"]):
        found = refusal(client, form, workbook({"Data": [header, ["A", 1]]}), columns=columns)
        assert found["code"] == "unknown_column"
        assert "the sheet has no column 'sku no'" in found["detail"]
        assert "Sku-No" in found["detail"]


def test_every_required_column_is_named_once_and_first(app: AsyncTask, form: Form) -> None:
    fields: dict[str, Any] = {f"a{n:02}": (int, Field(0, title=f"Optional {n:02}")) for n in range(30)}
    fields |= {f"z{n:02}": (int, Field(title=f"Needed {n:02}")) for n in range(25)}
    wide = type(
        "Wide",
        (BaseModel,),
        {"__annotations__": {k: v[0] for k, v in fields.items()}, **{k: v[1] for k, v in fields.items()}},
    )

    def take(item: Any) -> None:
        """Take it."""

    take.__annotations__["item"] = wide
    app.worker(take)
    detail = refusal(client_of(app), form, workbook({"Data": [["x"]]}), worker="take")["detail"]
    listed = detail.partition("20 rows: ")[2].partition("; row 1")[0].split(", ")
    assert listed == [*(f"Needed {n:02}" for n in range(25)), "…"]
