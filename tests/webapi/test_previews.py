"""POST /api/lists/preview and /api/lists/marked.xlsx: a list is looked at, mapped and checked before it is submitted."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openpyxl
import pytest
import xlsxwriter
from pydantic import BaseModel
from support.sheets import ods, table, table_rows, xls, xls_cells
from support.webshop import Client, client_of

from asynctask import AsyncTask
from asynctask.access import User
from asynctask.lists.readers.opening import HEAD_ROWS

Form = Callable[..., dict[str, Any]]

ROWS: list[list[Any]] = [["Report of July"], ["SKU", "How many", "Note"], ["A-1", 3, "soon"], ["A-2", 500, None]]


def workbook(*sheets: tuple[str, list[list[Any]]]) -> bytes:
    made = io.BytesIO()
    book = xlsxwriter.Workbook(made)
    for name, rows in sheets:
        page = book.add_worksheet(name)
        for number, row in enumerate(rows):
            page.write_row(number, 0, row)
    book.close()
    return made.getvalue()


def sent(data: bytes, name: str, **fields: Any) -> dict[str, Any]:
    return {"data": {"file": (io.BytesIO(data), name), **fields}, "content_type": "multipart/form-data"}


def look(client: Client, data: bytes, name: str, **fields: Any) -> dict[str, Any]:
    answer = client.post("/api/lists/preview", **sent(data, name, **fields))
    assert answer.status_code == 200, answer.json
    found: dict[str, Any] = answer.json
    return found


def fit(found: dict[str, Any], worker: str = "enroll") -> dict[str, Any]:
    (one,) = [each for each in found["workers"] if each["worker"] == worker]
    return dict(one)


def kept(app: AsyncTask) -> list[Path]:
    folder = Path(app.config.data_dir) / "uploads"
    return list(folder.iterdir()) if folder.is_dir() else []


def test_of_sheets_without_a_known_column_the_first_with_several_columns_is_read(client: Client) -> None:
    cover: list[list[Any]] = [["What this is for"]]
    unknown: list[list[Any]] = [["Artikel", "Menge"], ["A-1", 3]]
    assert look(client, workbook(("Cover", cover), ("Data", unknown), ("More", unknown)), "july.xlsx")["sheet"] == "Data"
    assert look(client, workbook(("Data", unknown), ("One", [["SKU"], ["A-1"]])), "july.xlsx")["sheet"] == "One"
    assert look(client, workbook(("Cover", cover), ("Notes", cover)), "july.xlsx")["sheet"] == "Cover"


def test_a_workbook_behind_a_cover_shows_its_columns_and_the_worker_that_they_fit(app: AsyncTask, client: Client) -> None:
    found = look(client, workbook(("Cover", [["What this is for"]]), ("Data", ROWS)), "july.xlsx")
    assert (found["format"], found["sheets"], found["sheet"], found["encoding"]) == (
        "xlsx",
        ["Cover", "Data"],
        "Data",
        None,
    )
    assert (found["header_row"], found["error"]) == (2, None)
    assert found["first_rows"][0] == {"row": 1, "cells": ["Report of July"]}
    assert found["columns"] == [
        {"header": "SKU", "letters": "A", "samples": ["A-1", "A-2"]},
        {"header": "How many", "letters": "B", "samples": ["3", "500"]},
        {"header": "Note", "letters": "C", "samples": ["soon"]},
    ]
    assert found["suggested"] == "enroll"
    one = fit(found)
    assert (one["matched"], one["columns"], one["missing"]) == ({"SKU": "sku", "Note": "note"}, {}, [])
    assert [each["name"] for each in one["fields"] if each["required"]] == ["sku"]
    assert fit(found, "anything")["fields"] == []
    cover = look(client, workbook(("Cover", [["What this is for"]]), ("Data", ROWS)), "july.xlsx", sheet="Cover")
    assert (cover["sheet"], cover["suggested"]) == ("Cover", None)
    assert kept(app) == []


def written(tmp_path: Path, ending: str) -> bytes:
    if ending == "xlsx":
        return workbook(("Data", ROWS))
    if ending == "xls":
        return xls(tmp_path / "a.xls", xls_cells(ROWS)).read_bytes()
    if ending == "ods":
        return ods(tmp_path / "a.ods", table(table_rows(ROWS))).read_bytes()
    if ending in ("csv", "tsv"):
        mark = ";" if ending == "csv" else "\t"
        return "\n".join(mark.join("" if cell is None else str(cell) for cell in row) for row in ROWS).encode()
    items = [dict(zip(("sku", "How many", "note"), row, strict=False)) for row in ROWS[2:]]
    return (json.dumps(items) if ending == "json" else "\n".join(map(json.dumps, items))).encode()


@pytest.mark.parametrize("ending", ["xlsx", "xls", "ods", "csv", "tsv", "json", "ndjson"])
def test_every_format_shows_its_first_cells(client: Client, tmp_path: Path, ending: str) -> None:
    found = look(client, written(tmp_path, ending), f"a.{ending}")
    is_json = "json" in ending
    assert (found["format"], found["header_row"]) == (ending, None if is_json else 2)
    assert [each["header"].lower() for each in found["columns"]] == ["sku", "how many", "note"]
    assert [each["samples"] for each in found["columns"]] == [["A-1", "A-2"], ["3", "500"], ["soon"]]
    assert found["suggested"] == "enroll"
    assert found["encoding"] == ("utf-8" if ending in ("csv", "tsv") else None)


def test_the_header_row_is_chosen(client: Client) -> None:
    data = b"sku,note\nname,text\nA,x\nA,\n,\n"
    assert look(client, data, "a.csv")["header_row"] == 1
    found = look(client, data, "a.csv", header_row="2")
    assert (found["header_row"], [each["header"] for each in found["columns"]]) == (2, ["name", "text"])
    twice = look(client, b"sku,sku\nA,B\n", "a.csv")
    assert (twice["error"]["code"], twice["columns"], twice["workers"]) == ("duplicate_column", [], [])
    empty = look(client, data, "a.csv", header_row="9")
    assert (empty["error"]["code"], empty["header_row"]) == ("empty_header", 9)
    chinese = client.post("/api/lists/preview", **sent(data, "a.csv", header_row="9"), headers={"Accept-Language": "zh-CN"})
    assert chinese.json["error"]["message"].startswith("指定的行不能作为表头")
    for wrong in ("0", "1001", "first"):
        answer = client.post("/api/lists/preview", **sent(data, "a.csv", header_row=wrong))
        assert (answer.status_code, answer.json["errors"][0]["column"]) == (422, "header_row")


def test_an_encoding_in_doubt_is_told_and_the_chosen_one_is_used(app: AsyncTask, client: Client) -> None:
    data = "sku,note\nA,It’s urgent\n".encode("cp1252")
    answer = client.post("/api/lists/preview", **sent(data, "a.csv"))
    assert (answer.status_code, answer.json["code"]) == (422, "encoding")
    assert answer.json["suggestions"][0]["encoding"] == "windows-1252"
    found = look(client, data, "a.csv", encoding="windows-1252")
    assert (found["columns"][1]["samples"], found["encoding"]) == (["It’s urgent"], "cp1252")
    assert look(client, data, "a.csv", encoding=found["encoding"]) == found
    wrong = client.post("/api/lists/preview", **sent(data, "a.csv", encoding="latin-99"))
    assert (wrong.status_code, wrong.json["errors"][0]["column"]) == (422, "encoding")
    assert kept(app) == []


def test_what_cannot_be_read_is_refused_and_leaves_nothing(app: AsyncTask, client: Client) -> None:
    for data, name, status, code in (
        (b"%PDF-1.7", "a.pdf", 415, "unsupported_format"),
        (b"", "a.csv", 415, "empty_file"),
        (b"sep=;\n", "a.csv", 422, "no_items"),
        (b",,\n,,\n", "a.csv", 422, "no_items"),
        (b'["torn', "a.json", 422, "invalid_json"),
        (b"PK\x03\x04 torn", "a.xlsx", 415, "damaged_file"),
        (workbook(("Empty", [])), "a.xlsx", 422, "empty_sheet"),
        (b"sku\n" + b"x" * 40_000 + b"\n", "a.csv", 413, "too_large"),
    ):
        answer = client.post("/api/lists/preview", **sent(data, name))
        assert (answer.status_code, answer.json["code"]) == (status, code), answer.json
    answer = client.post("/api/lists/preview", **sent(workbook(("Data", ROWS)), "a.xlsx", sheet="Nothing"))
    assert (answer.status_code, answer.json["code"], answer.json["sheets"]) == (422, "unknown_sheet", ["Data"])
    answer = client.post("/api/lists/preview", **sent(b"sku\nA\n", "a.csv", worker="enroll"))
    assert (answer.status_code, answer.json["errors"][0]["column"]) == (422, "worker")
    assert client.post("/api/lists/preview", data={}, content_type="multipart/form-data").status_code == 422
    assert client.post("/api/lists/preview", json={}).status_code == 415
    assert kept(app) == []


def test_hostile_names_and_cells_are_text(client: Client) -> None:
    evil = "<script>alert(1)</script>"
    found = look(client, f'sku,"{evil}"\nA,"{evil * 9}"\n'.encode(), f"../{evil}.csv")
    assert found["columns"][1]["header"] == evil
    (sample,) = found["columns"][1]["samples"]
    assert (len(sample), sample[-1]) == (80, "…")
    with_nul = client.post("/api/lists/preview", **sent(b"sku\nA\n", "a.csv", sheet="a\0b"))
    assert (with_nul.status_code, with_nul.json["code"]) == (422, "invalid_option")


def test_a_long_and_wide_list_is_read_at_its_beginning_only(client: Client) -> None:
    wide = ",".join(f"c{n}" for n in range(1_000))
    text = f"{wide}\n" + f"{','.join('x' * 1_000)}\n" * 200
    found = look(client, text.encode(), "wide.csv")
    assert (len(found["columns"]), len(found["first_rows"]), len(found["first_rows"][0]["cells"])) == (1_000, 20, 8)
    # What stands behind the beginning is not parsed: the row that no reader would take is met by the check.
    torn = b"sku\n" + b"A\n" * (HEAD_ROWS + 1) + b"x" * 40_000
    assert look(client, torn, "a.csv")["columns"][0]["samples"] == ["A"]
    assert look(client, b'[{"sku": "A"}' + b', {"sku": "B"}' * HEAD_ROWS + b", torn", "a.json")["suggested"] == "enroll"


def test_similar_names_are_proposed_and_not_taken_for_a_match(client: Client) -> None:
    found = look(client, b"Article SKU,Notes,Colour\nA,x,y\n", "a.csv")
    one = fit(found)
    assert (one["matched"], one["columns"], one["missing"]) == ({}, {"Article SKU": "sku", "Notes": "note"}, [])
    assert one["remembered"] is None
    assert found["suggested"] is None


def test_a_header_that_is_short_for_one_field_alone_is_proposed(client: Client) -> None:
    assert fit(look(client, b"sku,Qty\nA,1\n", "a.csv"))["columns"] == {"Qty": "quantity"}
    assert fit(look(client, b"sku,Qty,Qnty\nA,1,2\n", "a.csv"))["columns"] == {}, "either could be"


# -- the option columns


def mapped(client: Client, data: bytes, **fields: Any) -> Any:
    said = {
        "worker": "enroll",
        "columns": json.dumps({"Artikel": "sku", "Menge": "Quantity".lower(), "Note": ""}),
        **fields,
    }
    return client.post("/api/tasks", **sent(data, "a.csv", **said))


SHEET = b"Liste\nArtikel,Menge,Note\nA-1,3,soon\nA-2,500,later\n,4,x\n"


def test_a_mapping_is_kept_with_the_task_and_proposed_for_the_next_list(
    client: Client, app: AsyncTask, working: Callable[[], Any]
) -> None:
    answer = mapped(client, SHEET)
    assert answer.status_code == 202, answer.json
    task = app.task(answer.json["task_id"])
    with working():
        assert task.wait(120)["done"]
    (event,) = task.events()
    assert event["params"] == {"sku": "A-1", "quantity": 3}, "a column that maps to nothing is not used"
    assert [(e["row"], e["errors"][0]["column"]) for e in task.rejects()] == [(4, "Menge"), (5, "Artikel")]
    report = client.get(f"/api/tasks/{task.id}/report.csv?rows=failed").get_data(as_text=True).lstrip("\ufeff")
    assert report.splitlines()[0] == "Artikel,Menge,Note,row,status,error,attempts,result"
    # The corrected report is read with the columns of its Task, and proposes them, whatever stands above its header.
    corrected = report.replace(",500,", ",5,").replace("\n,4,", "\nA-3,4,")
    again = client.post("/api/tasks", **sent(corrected.encode(), "b.csv", worker="enroll", resubmit_of=str(task.id)))
    assert again.status_code == 202, again.json
    child = app.task(again.json["task_id"])
    with working():
        assert child.wait(120)["done"]
    assert [each["params"]["sku"] for each in child.events()] == ["A-2", "A-3"]
    assert task.progress()["mended"] == 2

    found = look(client, b"Menge,Artikel,Note\n1,B-1,x\n", "next.csv")
    one = fit(found)
    assert one["columns"] == {"Artikel": "sku", "Menge": "quantity", "Note": ""}
    assert (one["remembered"], one["missing"], found["suggested"]) == (child.id, [], "enroll")
    assert fit(look(client, b"Menge,Artikel,Other\n1,B-1,x\n", "other.csv"))["remembered"] is None


def test_a_mapping_is_remembered_for_its_owner_alone(app: AsyncTask) -> None:
    def of(owner: str) -> Client:
        return client_of(app, authorize=lambda _: User(owner, owner))

    assert mapped(of("ann"), SHEET).status_code == 202
    assert fit(look(of("ann"), SHEET, "a.csv"))["columns"]
    assert fit(look(of("eve"), SHEET, "a.csv"))["remembered"] is None


def test_a_field_that_went_is_not_proposed(app: AsyncTask, client: Client) -> None:
    assert mapped(client, SHEET).status_code == 202

    class Less(BaseModel):
        sku: str

    app.worker(lambda item: None, name="less")  # another worker of the same application knows nothing of it
    assert fit(look(client, SHEET, "a.csv"), "less")["remembered"] is None


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"Artikel": "sku", "Menge": "sku"}, "to the one field 'sku'"),
        ({"Artikel": "nothing"}, "is no field of the item"),
        ({"Artikel": 1}, "columns"),
        ({"Gone": "sku", "Artikel": ""}, "no column 'Gone'"),
    ],
)
def test_a_bad_mapping_is_refused(client: Client, app: AsyncTask, columns: dict[str, Any], said: str) -> None:
    answer = mapped(client, SHEET, columns=json.dumps(columns))
    assert answer.status_code == 422
    assert said in answer.json["detail"]
    assert client.post("/api/lists/marked.xlsx", **sent(SHEET, "a.csv", worker="enroll")).status_code == 422


def test_a_header_row_that_is_named_is_the_header(client: Client, app: AsyncTask) -> None:
    data = b"sku,Quantity\nsku,Quantity\nA,1\nA,1\n"
    answer = client.post("/api/tasks", **sent(data, "a.csv", worker="enroll", header_row="2", dry_run="true"))
    assert (answer.json["accepted"], answer.json["rejected"]) == (2, 0)
    headers = {"Content-Type": "text/csv"}
    raw = client.post("/api/tasks?worker=enroll&header_row=2&dry_run=true", data=data, headers=headers)
    assert (raw.json["accepted"], raw.json["rejected"]) == (2, 0)
    for row, code in (("9", "empty_header"), ("0", "invalid_option")):
        answer = client.post("/api/tasks", **sent(data, "a.csv", worker="enroll", header_row=row))
        assert (answer.status_code, answer.json["code"]) == (422, code)
    same = {"worker": "enroll", "header_row": "1"}
    first = client.post("/api/tasks", **sent(data, "a.csv", **same), headers={"Idempotency-Key": "k"})
    other = client.post("/api/tasks", **sent(data, "a.csv", worker="enroll"), headers={"Idempotency-Key": "k"})
    assert (first.status_code, other.status_code) == (202, 422), "the row belongs to what the key names"


# -- the marked list


def marked(client: Client, data: bytes, name: str = "a.csv", **fields: Any) -> list[list[Any]]:
    answer = client.post("/api/lists/marked.xlsx", **sent(data, name, worker="enroll", **fields))
    assert answer.status_code == 200, answer.json
    assert int(answer.headers["Content-Length"]) == len(answer.data)
    book = openpyxl.load_workbook(io.BytesIO(answer.data))
    return [list(row) for row in book.worksheets[0].iter_rows()]


def test_the_marked_list_has_every_row_and_its_faults(client: Client, app: AsyncTask) -> None:
    columns = json.dumps({"Artikel": "sku", "Menge": "quantity"})
    head, *rows = marked(client, SHEET, columns=columns)
    assert [cell.value for cell in head] == ["Artikel", "Menge", "Note", "row", "status", "error", "attempts", "result"]
    assert [[cell.value for cell in row[:5]] for row in rows] == [
        ["A-1", "3", "soon", 3, "accepted"],
        ["A-2", "500", "later", 4, "rejected"],
        [None, "4", "x", 5, "rejected"],
    ]
    colours = [[cell.fill.fgColor.rgb for cell in row if cell.fill.fill_type] for row in rows]
    assert colours == [[], ["FFFFC7CE"], ["FFFFC7CE"]]
    assert "100" in rows[1][1].comment.text
    assert rows[2][0].comment is not None
    assert kept(app) == []
    assert app.tasks() == []


def test_a_marked_list_of_json_has_its_names_as_columns(client: Client) -> None:
    items = [{"sku": "A", "quantity": 1}, {"sku": "B", "quantity": 900, "extra": "x"}]
    head, first, second = marked(client, json.dumps(items).encode(), "a.json")
    assert [cell.value for cell in head][:3] == ["sku", "quantity", "extra"]
    assert (first[4].value, second[4].value, second[1].fill.fgColor.rgb) == ("accepted", "rejected", "FFFFC7CE")


def test_the_marked_list_of_a_refused_one_is_its_refusal(client: Client) -> None:
    answer = client.post("/api/lists/marked.xlsx", **sent(b"Quantity\n1\n", "a.csv", worker="enroll"))
    assert (answer.status_code, answer.json["code"]) == (422, "missing_columns")
    answer = client.post("/api/lists/marked.xlsx", **sent(b"sku\nA\n", "a.csv", worker="nobody"))
    assert (answer.status_code, answer.json["code"]) == (422, "unknown_worker")


@pytest.mark.parametrize("path", ["/api/lists/preview", "/api/lists/marked.xlsx"])
def test_only_who_may_submit_sends_a_list(app: AsyncTask, path: str) -> None:
    reader = client_of(app, authorize=lambda _: User("eve", "eve", {"read"}))
    assert reader.post(path, **sent(b"sku\nA\n", "a.csv", worker="enroll")).status_code == 403
