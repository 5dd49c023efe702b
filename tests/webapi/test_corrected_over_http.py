"""Correct and resubmit over HTTP and on the command line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import xlsxwriter
from support.webshop import Client, form_of

from asynctask import AsyncTask
from asynctask.cli.root import run

CSV = "sku,Quantity,note\nA,1,\nNO-1,2,\nNO-2,3,\nB,500,\n"


@pytest.fixture
def parent(client: Client, app: AsyncTask, working: Callable[[], AbstractContextManager[None]]) -> int:
    """Rows 3 and 4 failed, row 5 was refused."""
    made = client.post("/api/tasks", **form_of(CSV)).json
    with working():
        app.task(made["task_id"]).wait(60)
    return int(made["task_id"])


def corrected(client: Client, task_id: int, suffix: str = "csv") -> Any:
    return client.get(f"/api/tasks/{task_id}/report.{suffix}?rows=failed").data


@pytest.mark.parametrize("suffix", ["xlsx", "csv"])
def test_a_number_format_that_is_part_of_a_text_comes_back(
    client: Client, app: AsyncTask, working: Callable[[], AbstractContextManager[None]], suffix: str
) -> None:
    """Fails where a report forgets the formats of cells."""
    body = io.BytesIO()
    with xlsxwriter.Workbook(body) as book:
        sheet, code = book.add_worksheet(), book.add_format({"num_format": '"NO-"000-000'})
        sheet.write_row(0, 0, ["sku", "Quantity"])
        sheet.write_number(1, 0, 1234, code)
        sheet.write_number(1, 1, 3, book.add_format({"num_format": "000"}))
    made = client.post("/api/tasks", **form_of(body.getvalue(), filename="a.xlsx")).json
    with working():
        app.task(made["task_id"]).wait(60)
    report = corrected(client, made["task_id"], suffix)
    answer = client.post(
        "/api/tasks", **form_of(report, filename=f"a.{suffix}", resubmit_of=str(made["task_id"]), dry_run="true")
    )
    assert (answer.json["errors"], answer.json["accepted"]) == ([], 1)
    assert answer.json["first_items"] == [{"sku": "NO-001-234", "quantity": 3, "note": None}]


@pytest.mark.parametrize("door", ["form", "raw"])
def test_a_corrected_report_makes_a_child(client: Client, app: AsyncTask, parent: int, door: str) -> None:
    body = corrected(client, parent).replace(b"NO-1", b"C").replace(b"500", b"5")
    if door == "form":
        answer = client.post("/api/tasks", **form_of(body, resubmit_of=str(parent)))
    else:
        url = f"/api/tasks?worker=enroll&resubmit_of={parent}"
        answer = client.post(url, data=body, headers={"Content-Type": "text/csv"})
    assert answer.status_code == 202, answer.json
    child = answer.json["task_id"]
    assert (answer.json["resubmit_of"], answer.json["counts"]["total"]) == (parent, 3)
    shown = client.get(f"/api/tasks/{parent}")
    assert (shown.json["resubmitted_by"], shown.json["mended"]) == ([child], 0)
    etag = {"If-None-Match": shown.headers["ETag"]}
    assert client.get(f"/api/tasks/{parent}", headers=etag).status_code == 304
    launcher = app.launcher(concurrency=2, shutdown_s=5)
    launcher.start()
    try:
        app.task(child).wait(60)
    finally:
        launcher.stop()
    shown = client.get(f"/api/tasks/{parent}", headers=etag)
    assert (shown.status_code, shown.json["mended"]) == (200, 2)
    again = client.post("/api/tasks", **form_of(body, resubmit_of=str(parent)))
    assert (again.status_code, again.json["code"]) == (422, "all_rejected")
    assert {(each["row"], each["code"]) for each in again.json["errors"]} == {
        (2, "already_resubmitted"), (3, "already_resubmitted"), (4, "already_resubmitted")
    }  # fmt: skip


def test_a_report_of_a_report_needs_no_word_about_columns(client: Client, parent: int) -> None:
    book = corrected(client, parent, "xlsx")
    answer = client.post("/api/tasks", **form_of(book, "failed.xlsx", resubmit_of=str(parent), dry_run="true"))
    assert (answer.status_code, answer.json["accepted"], answer.json["rejected"]) == (200, 2, 1)
    assert client.get(f"/api/tasks/{parent}").json["resubmitted_by"] == []


def test_what_cannot_be_is_refused_with_the_reason(client: Client, parent: int) -> None:
    body = corrected(client, parent)
    for fields, text in (
        ({"resubmit_of": "99"}, "there is no Task 99"),
        ({"resubmit_of": str(parent), "worker": "anything"}, "is of the worker enroll"),
        ({"resubmit_of": str(parent), "owner": "eve"}, "has another owner"),
    ):
        refused = client.post("/api/tasks", **form_of(body, **fields))
        assert (refused.status_code, refused.json["code"]) == (422, "invalid_options"), refused.json
        assert refused.json["errors"][0]["column"] == "resubmit_of"
        assert text in refused.json["detail"]
    items = {"worker": "enroll", "items": [{"sku": "A"}], "resubmit_of": parent}
    refused = client.post("/api/tasks", json=items, headers={"Accept-Language": "ja"})
    assert (refused.status_code, refused.json["code"]) == (422, "invalid_options")
    assert "ファイルが必要です" in refused.json["errors"][0]["message"]
    mixed = {"jobs": [{"worker": "enroll", "item": {"sku": "A"}}], "resubmit_of": parent}
    assert client.post("/api/tasks", json=mixed).status_code == 422
    for bad in ("0", "x", "-1"):
        assert client.post("/api/tasks", **form_of(body, resubmit_of=bad)).status_code == 422
    plain = client.post("/api/tasks", **form_of(CSV, resubmit_of=str(parent)))
    assert (plain.status_code, plain.json["code"]) == (422, "no_row_column")
    assert [each["task_id"] for each in client.get("/api/tasks").json["tasks"]] == [parent + 1, parent]


def test_the_command_line_sends_and_shows(
    client: Client, app: AsyncTask, parent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "failed.csv"
    file.write_bytes(corrected(client, parent).replace(b"NO-1", b"C"))
    out = io.StringIO()
    (tmp_path / "shop_again.py").write_text(
        "from pathlib import Path\nfrom support.webshop import build_app\n"
        f"app = build_app(Path({str(Path(app.config.data_dir).parent)!r}))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def command(*words: str) -> Any:
        out.truncate(out.seek(0))
        code = run(["-A", "shop_again:app", "--json", *words], stdout=out)
        return code, json.loads(out.getvalue())

    code, made = command("submit", str(file), "--worker", "enroll", "--resubmit-of", str(parent))
    assert (code, made["resubmit_of"], made["counts"]["total"]) == (0, parent, 2)
    assert [each["code"] for each in made["errors"]] == ["too_large"]
    assert command("show", str(parent))[1]["resubmitted_by"] == [made["task_id"]]
    out.truncate(out.seek(0))
    assert run(["-A", "shop_again:app", "show", str(parent)], stdout=out) == 0
    assert f"Task {made['task_id']}: 0 rows mended since" in " ".join(out.getvalue().split())
    assert run(["-A", "shop_again:app", "show", str(made["task_id"])], stdout=out) == 0
    assert f"corrects rows of Task {parent}" in " ".join(out.getvalue().split())
