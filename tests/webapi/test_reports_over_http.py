"""Reports: what is in them, what they are called, and that they come back in."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import openpyxl
from flask.testing import FlaskClient

from asynctask import AsyncTask

Form = Callable[..., dict[str, Any]]


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff"))))


def uploaded(app: AsyncTask, client: FlaskClient, form: Form, working: Callable[[], Any], sheet: str, **fields: Any) -> int:
    answer = client.post("/api/tasks", **form(sheet, **fields))
    assert answer.status_code == 202, answer.json
    with working():
        assert app.task(answer.json["task_id"]).wait(timeout=30)["done"]
    return int(answer.json["task_id"])


SHEET = "sku,Quantity,Colour\nA,1,red\nNO-1,2,blue\nB,many,green\nBUG-1,3,black\n"


def test_a_report_has_the_original_columns_and_what_became_of_each_row(
    app: AsyncTask, client: FlaskClient, form: Form, working: Callable[[], Any]
) -> None:
    task_id = uploaded(app, client, form, working, SHEET)
    answer = client.get(f"/api/tasks/{task_id}/report.csv")
    assert answer.mimetype == "text/csv"
    rows = rows_of(answer.get_data(as_text=True))
    assert [(r["row"], r["sku"], r["Quantity"], r["Colour"], r["status"]) for r in rows] == [
        ("3", "NO-1", "2", "blue", "failed"),
        ("4", "B", "many", "green", "rejected"),
        ("5", "BUG-1", "3", "black", "error"),
    ]
    assert "NO-1 is not qualified" in rows[0]["error"]
    done = rows_of(client.get(f"/api/tasks/{task_id}/report.csv?rows=succeeded").get_data(as_text=True))
    assert [(r["sku"], r["status"]) for r in done] == [("A", "finish")]


def test_a_workbook_says_the_same_and_can_be_handed_in_again(
    app: AsyncTask, client: FlaskClient, form: Form, working: Callable[[], Any]
) -> None:
    task_id = uploaded(app, client, form, working, SHEET)
    answer = client.get(f"/api/tasks/{task_id}/report.xlsx?rows=all")
    assert answer.mimetype.endswith("spreadsheetml.sheet")
    assert int(answer.headers["Content-Length"]) == len(answer.data)
    book = openpyxl.load_workbook(io.BytesIO(answer.data))
    found = list(book.worksheets[0].iter_rows(values_only=True))
    book.close()
    assert found[0][:3] == ("sku", "Quantity", "Colour")
    assert [row[0] for row in found[1:]] == ["A", "NO-1", "B", "BUG-1"]
    again = client.post("/api/tasks", **form(answer.data, "report.xlsx"))
    assert again.status_code == 202, again.json
    assert again.json["counts"]["total"] == 3


def test_a_report_of_nothing_is_its_header(
    app: AsyncTask, client: FlaskClient, form: Form, working: Callable[[], Any]
) -> None:
    task_id = uploaded(app, client, form, working, "sku,Quantity\nA,1\n")
    assert rows_of(client.get(f"/api/tasks/{task_id}/report.csv").get_data(as_text=True)) == []
    assert client.get(f"/api/tasks/{task_id}/report.xlsx").status_code == 200


def test_formulas_in_cells_and_messages_stay_text(
    app: AsyncTask, client: FlaskClient, form: Form, working: Callable[[], Any]
) -> None:
    evil = '=HYPERLINK("http://evil","x")'
    sheet = io.StringIO()
    csv.writer(sheet).writerows([["sku", "note"], ["NO-1", evil], ["NO-2", "@SUM(1)"]])
    task_id = uploaded(app, client, form, working, sheet.getvalue())
    for row in rows_of(client.get(f"/api/tasks/{task_id}/report.csv").get_data(as_text=True)):
        assert row["note"][0] == "'"
        assert not row["error"].startswith(("=", "@", "+", "-"))
    book = openpyxl.load_workbook(io.BytesIO(client.get(f"/api/tasks/{task_id}/report.xlsx").data))
    kinds = {cell.data_type for row in book.worksheets[0].iter_rows() for cell in row if cell.value is not None}
    book.close()
    assert "f" not in kinds


def test_the_name_of_a_report_is_safe_in_file_systems_and_headers(client: FlaskClient, ended: Callable[..., int]) -> None:
    titles = {
        "Été 春 🌸": "Été 春 🌸 - ",
        '../../etc/passwd"; x=1\r\nSet-Cookie: a=b': "etc passwd ; x=1 Set-Cookie a=b - ",
        "invoice\u202excod.exe": "invoice xcod.exe - ",
        "": "",
        "  ... ": "",
        "x" * 255: "x" * 80 + " - ",
    }
    for title, start in titles.items():
        task_id = ended("A", title=title)
        for suffix in ("csv", "xlsx"):
            answer = client.get(f"/api/tasks/{task_id}/report.{suffix}?rows=succeeded")
            plain = f"task-{task_id}-succeeded.{suffix}"
            header = answer.headers["Content-Disposition"]
            match = re.fullmatch(rf"attachment; filename=\"{plain}\"; filename\*=UTF-8''([A-Za-z0-9%._~-]+)", header)
            assert match, header
            assert unquote(match[1]) == start + plain


def test_rows_that_are_none_are_refused_with_those_there_are(client: FlaskClient, ended: Callable[..., int]) -> None:
    answer = client.get(f"/api/tasks/{ended('A')}/report.csv?rows=bad")
    assert answer.status_code == 422
    assert "succeeded" in answer.json["detail"]


def test_a_report_that_is_not_read_to_its_end_lets_go_of_everything(
    app: AsyncTask, client: FlaskClient, form: Form
) -> None:
    sheet = "sku\n" + "".join(f"S{n}\n" for n in range(5_000))
    task_id = client.post("/api/tasks", **form(sheet)).json["task_id"]
    for _ in range(20):  # more than there are connections
        answer = client.get(f"/api/tasks/{task_id}/report.csv?rows=unprocessed", buffered=False)
        assert next(iter(answer.response)).startswith(b"\xef\xbb\xbfsku")
        answer.close()
    assert client.get("/readyz").status_code == 200
