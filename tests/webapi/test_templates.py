"""Templates over HTTP: what they are called, that they come back in, and for which workers there are none."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import openpyxl
import pytest
from support.webshop import Client, Product, client_of

from asynctask import AsyncTask


def test_a_template_that_was_filled_in_can_be_handed_in(client: Client, form: Callable[..., dict[str, Any]]) -> None:
    answer = client.get("/api/workers/enroll/template.xlsx")
    assert answer.status_code == 200
    assert answer.mimetype.endswith("spreadsheetml.sheet")
    assert answer.headers["Content-Disposition"].startswith('attachment; filename="enroll-template.xlsx"; ')
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    book = openpyxl.load_workbook(io.BytesIO(answer.data))
    assert [cell.value for cell in book.worksheets[0][1]] == ["sku", "Quantity", "note"]
    book.worksheets[0].append(["007", 3, None])
    out = io.BytesIO()
    book.save(out)
    book.close()
    sent = client.post("/api/tasks", **form(out.getvalue(), "enroll.xlsx"))
    assert sent.status_code == 202, sent.json
    (event,) = client.get(f"/api/tasks/{sent.json['task_id']}/events").json["events"]
    assert event["params"] == {"sku": "007", "quantity": 3}


def test_as_csv_it_is_the_header(client: Client, form: Callable[..., dict[str, Any]]) -> None:
    answer = client.get("/api/workers/enroll/template.csv")
    assert answer.data == "\ufeffsku,Quantity,note\r\n".encode()
    sent = client.post("/api/tasks", **form(answer.data + b"007,3,\r\n", "enroll.csv"))
    assert sent.status_code == 202, sent.json


def test_an_empty_template_is_refused_as_a_list_without_items(client: Client, form: Callable[..., dict[str, Any]]) -> None:
    for suffix in ("xlsx", "csv"):
        body = client.get(f"/api/workers/enroll/template.{suffix}").data
        sent = client.post("/api/tasks", **form(body, f"enroll.{suffix}"))
        assert (sent.status_code, sent.json["code"]) == (422, "no_items")


@pytest.mark.parametrize(
    ("language", "sheets"), [("zh-CN", ["数据", "说明"]), ("ja", ["データ", "説明"]), ("fr", ["Rows", "Help"])]
)
def test_its_help_is_in_the_readers_language(client: Client, language: str, sheets: list[str]) -> None:
    answer = client.get("/api/workers/enroll/template.xlsx", headers={"Accept-Language": language})
    book = openpyxl.load_workbook(io.BytesIO(answer.data))
    assert book.sheetnames == sheets
    book.close()


@pytest.mark.parametrize("suffix", ["xlsx", "csv"])
def test_a_worker_without_a_model_has_none_and_one_that_nobody_registered_is_not_there(client: Client, suffix: str) -> None:
    refused = client.get(f"/api/workers/anything/template.{suffix}")
    assert (refused.status_code, refused.json["code"]) == (409, "no_template")
    assert "takes any row" in refused.json["detail"]
    missing = client.get(f"/api/workers/os.path/template.{suffix}")
    assert (missing.status_code, missing.json["code"]) == (404, "not_found")
    assert "enroll" in missing.json["detail"]


def test_head_answers_the_same_headers(client: Client) -> None:
    head, get = (call("/api/workers/enroll/template.csv") for call in (client.head, client.get))
    assert head.status_code == 200
    assert head.data == b""
    assert head.headers["Content-Disposition"] == get.headers["Content-Disposition"]


def test_a_name_that_no_file_may_have_is_made_one(app: AsyncTask) -> None:
    def other(item: Product) -> None:
        """Another."""

    app.worker(other, name='報告:"x"\r\n')
    answer = client_of(app).get('/api/workers/報告:"x"%0D%0A/template.csv')
    assert answer.status_code == 200
    header = answer.headers["Content-Disposition"]
    assert header.startswith('attachment; filename="_x_-template.csv"; filename*=UTF-8')
    assert header.endswith("%E5%A0%B1%E5%91%8A__x___-template.csv")
