"""Dry runs and strict lists over HTTP: everything is checked, and what is not to be written is not."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from support.webshop import Client, client_of

from asynctask import AsyncTask
from asynctask.errors import Unavailable
from asynctask.lists import dry_run
from webapi import create_app
from webapi.context import GONE, Slots

Form = Callable[..., dict[str, Any]]
SHEET = "sku,Quantity\nA,1\nB,many\nA,3\n,4\n"


def stored(app: AsyncTask) -> list[Path]:
    folder = Path(app.config.data_dir) / "uploads"
    return list(folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("kind", ["form", "json", "raw"])
def test_a_dry_run_says_what_the_list_would_come_to_and_writes_nothing(
    app: AsyncTask, client: Client, form: Form, kind: str
) -> None:
    headers = {"Idempotency-Key": "k"}
    rows = [{"sku": "A", "quantity": 1}, {"sku": "B", "quantity": "many"}, {"sku": "A", "quantity": 3}, {"quantity": 4}]
    if kind == "form":
        answer = client.post("/api/tasks", **form(SHEET, dry_run="true", unique="sku"), headers=headers)
    elif kind == "raw":
        query = "/api/tasks?worker=enroll&dry_run=true&unique=sku"
        answer = client.post(query, data=SHEET, content_type="text/csv", headers=headers)
    else:
        body = {"worker": "enroll", "items": rows, "dry_run": True, "unique": ["sku"]}
        answer = client.post("/api/tasks", json=body, headers=headers)
    first = 1 if kind == "json" else 2
    quantity = "quantity" if kind == "json" else "Quantity"
    assert answer.status_code == 200, answer.json
    assert "Location" not in answer.headers
    assert answer.json == {
        "dry_run": True, "accepted": 1, "rejected": 3, "errors_truncated": False,
        "errors": [
            {"row": first + 1, "column": quantity, "code": "wrong_type", "value": "many",
             "message": "must be a number, such as 1200 or 12.5"},
            {"row": first + 2, "column": "sku", "code": "duplicate_in_upload", "value": "A",
             "message": f"is the same as in row {first}; change it, or delete one of the two rows"},
            {"row": first + 3, "column": "sku", "code": "missing", "value": None, "message": "is required; fill it in"},
        ],
        "first_items": [{"sku": "A", "quantity": 1, "note": None}],
    }  # fmt: skip
    assert client.get("/api/tasks").json["tasks"] == []
    assert stored(app) == []
    real = client.post("/api/tasks", json={"worker": "enroll", "items": rows}, headers=headers)
    assert real.status_code == 202, "the key was not used up"


def test_a_dry_run_shows_the_first_thousand_faults_and_says_that_there_are_more(client: Client) -> None:
    body: dict[str, Any] = {"worker": "enroll", "items": [{"sku": "A", "quantity": 0}] * 1_001, "dry_run": True}
    answer = client.post("/api/tasks", json=body)
    assert (answer.json["rejected"], len(answer.json["errors"]), answer.json["errors_truncated"]) == (1_001, 1_000, True)
    body["items"] = body["items"][:1_000]
    assert client.post("/api/tasks", json=body).json["errors_truncated"] is False


@pytest.mark.parametrize(
    ("content", "fields", "code", "status"),
    [
        ("Quantity\n1\n", {}, "missing_columns", 422),
        ("sku\n", {}, "no_items", 422),
        ("", {}, "empty_file", 415),
        ("sku\nA\n", {"unique": "skew"}, "invalid_options", 422),
        ("sku\nA\n", {"columns": '{"x": "sku"}'}, "unknown_column", 422),
    ],
)
def test_what_would_refuse_the_list_refuses_its_dry_run(
    app: AsyncTask, client: Client, form: Form, content: str, fields: dict[str, str], code: str, status: int
) -> None:
    answer = client.post("/api/tasks", **form(content, dry_run="1", **fields))
    assert (answer.status_code, answer.json["code"]) == (status, code), answer.json
    assert stored(app) == []


def test_a_dry_run_that_takes_too_long_is_ended_with_the_name_of_the_setting(
    make_app: Callable[..., AsyncTask], form: Form
) -> None:
    app = make_app(dry_run_s=0.1)
    client = client_of(app)
    answer = client.post("/api/tasks", **form("sku\n" + "A\n" * 60_000, dry_run="true"))
    assert (answer.status_code, answer.json["code"]) == (504, "dry_run_timeout")
    assert "ASYNCTASK_DRY_RUN_S" in answer.json["detail"]
    assert stored(app) == []


# -- large lists, in a child


MODULE = """
import os
from pathlib import Path

from support.webshop import build_app

app = build_app(Path(os.environ["FOLDER"]))
"""


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_app: Callable[..., AsyncTask]) -> AsyncTask:
    """An application whose lists are all large, and that a child can load by its name."""
    monkeypatch.setattr("asynctask.submission.INLINE_BYTES", 10)
    folder = tmp_path / "child"
    folder.mkdir()
    (folder / "childshop.py").write_text(MODULE)
    tests = Path(__file__).resolve().parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tests}:{tests.parent}")
    app = make_app(app=f"{folder / 'childshop.py'}:app")
    monkeypatch.setenv("FOLDER", str(Path(app.config.data_dir).parent))
    return app


def test_a_large_list_is_dry_run_in_a_child_with_the_same_answer(large: AsyncTask, form: Form) -> None:
    client = client_of(large)
    answer = client.post("/api/tasks", **form(SHEET, dry_run="true", unique="sku"), headers={"Accept-Language": "ja"})
    assert answer.status_code == 200, answer.json
    assert (answer.json["accepted"], answer.json["rejected"]) == (1, 3)
    assert answer.json["errors"][1]["message"] == "2 行目と同じ値です。変更するか、どちらかの行を削除してください"
    assert answer.json["first_items"] == [{"sku": "A", "quantity": 1, "note": None}]
    refused = client.post("/api/tasks", **form("Quantity,x\n1,1\n", dry_run="true"), headers={"Accept-Language": "zh-CN"})
    assert (refused.status_code, refused.json["code"]) == (422, "missing_columns")
    assert refused.json["detail"].startswith("表中缺少这些列：sku")
    assert stored(large) == []


def test_a_child_that_hangs_is_killed_and_one_that_dies_is_told(
    large: AsyncTask, form: Form, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = client_of(large)
    (tmp_path / "child/childshop.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setattr(large._made().submitter._checker, "_seconds", 0.5)
    answer = client.post("/api/tasks", **form(SHEET, dry_run="true"))
    assert (answer.status_code, answer.json["code"]) == (504, "dry_run_timeout")
    (tmp_path / "child/childshop.py").write_text("import os\nos._exit(9)\n")
    monkeypatch.setattr(large._made().submitter._checker, "_seconds", 20.0)
    answer = client.post("/api/tasks", **form(SHEET, dry_run="true"))
    assert (answer.status_code, answer.json["code"]) == (503, "unavailable")
    assert "memory" in answer.json["detail"]
    assert stored(large) == []


def test_a_check_ends_when_its_client_has_gone(large: AsyncTask, form: Form, tmp_path: Path) -> None:
    (tmp_path / "child/childshop.py").write_text("import threading\nthreading.Event().wait()\n")
    for path in ("/api/tasks", "/api/lists/marked.xlsx"):
        answer = client_of(large).post(path, **form(SHEET, dry_run="true"), environ_overrides={GONE: lambda: True})
        assert answer.status_code == 400, "it would be 504 after dry_run_s"
    assert stored(large) == []


def test_a_large_list_is_marked_in_a_child(large: AsyncTask, form: Form) -> None:
    answer = client_of(large).post("/api/lists/marked.xlsx", **form(SHEET, unique="sku"))
    assert answer.status_code == 200, answer.json
    rows = openpyxl.load_workbook(io.BytesIO(answer.data)).worksheets[0].iter_rows(min_row=2, values_only=True)
    assert [row[:4] for row in rows] == [
        ("A", "1", 2, "accepted"),
        ("B", "many", 3, "rejected"),
        ("A", "3", 4, "rejected"),
        (None, "4", 5, "rejected"),
    ]
    assert stored(large) == []


def test_checks_of_files_are_as_many_at_once_as_reports(make_app: Callable[..., AsyncTask], form: Form) -> None:
    app = make_app()
    client = create_app(app, slots=Slots({"report": 0, "file": 1, "follow": 1})).test_client()
    for path in ("/api/tasks", "/api/lists/marked.xlsx"):
        answer = client.post(path, **form(SHEET, dry_run="true"))
        assert (answer.status_code, (answer.json or {})["code"]) == (503, "busy")
    assert stored(app) == []
    assert client.post("/api/tasks", **form(SHEET)).status_code == 202, "a submission is no check"


def test_where_no_child_can_be_had_the_list_is_checked_here(app: AsyncTask, form: Form, monkeypatch: Any) -> None:
    monkeypatch.setattr("asynctask.submission.INLINE_BYTES", 10)
    assert client_of(app).post("/api/tasks", **form(SHEET, dry_run="true")).json["rejected"] == 2
    with pytest.raises(Unavailable):
        dry_run._from_json(b"")


# -- strict


def test_a_strict_dry_run_with_a_refused_row_would_take_none(client: Client, form: Form) -> None:
    answer = client.post("/api/tasks", **form(SHEET, strict="true", dry_run="true"))
    assert (answer.status_code, answer.json["accepted"], answer.json["rejected"]) == (200, 0, 2)
    good = client.post("/api/tasks", **form("sku\nA\nB\n", strict="true", dry_run="true"))
    assert (good.json["accepted"], good.json["rejected"]) == (2, 0)


def test_a_strict_list_with_bad_rows_is_answered_422_with_all_of_them(client: Client, form: Form) -> None:
    answer = client.post("/api/tasks", **form(SHEET, strict="true"))
    assert (answer.status_code, answer.json["code"]) == (422, "rows_rejected"), answer.json
    assert [(e["row"], e["column"]) for e in answer.json["errors"]] == [(3, "Quantity"), (5, "sku")]
    assert answer.json["detail"].startswith("2 of 4 rows are rejected, so none was accepted (strict)")
    (task,) = client.get("/api/tasks").json["tasks"]
    assert (task["state"], task["state_reason"], task["counts"]["total"]) == ("rejected", "rows_rejected", 0)


def test_a_strict_list_whose_validation_goes_on_is_answered_202_and_ends_rejected(
    make_app: Callable[..., AsyncTask],
) -> None:
    app = make_app(submit_wait_s=0)
    client = client_of(app)
    items = [{"sku": f"S{n}", "quantity": 0 if n == 19_999 else 1} for n in range(20_000)]
    body = {"worker": "enroll", "items": items, "strict": True}
    headers = {"Idempotency-Key": "k"}
    answer = client.post("/api/tasks", json=body, headers=headers)
    assert answer.status_code == 202, answer.json
    task = app.task(answer.json["task_id"])
    assert task.wait(120)["done"]
    seen = client.get(answer.headers["Location"]).json
    assert (seen["state"], seen["state_reason"]) == ("rejected", "rows_rejected")
    assert seen["split"] == {
        "state": "sealed",
        "reason": None,
        "planned": 20_000,
        "created": 0,
        "rejected": 1,
        "open_until": None,
    }
    (row,) = client.get(f"/api/tasks/{task.id}/rejected").json["rejected"]
    assert (row["row"], row["errors"][0]["code"]) == (20_000, "too_small")
    report = client.get(f"/api/tasks/{task.id}/report.csv?rows=rejected").get_data(as_text=True)
    assert report.count("\r\n") == 2
    again = client.post("/api/tasks", json=body, headers=headers)
    assert (again.status_code, again.json["code"]) == (422, "rows_rejected"), "the same list again is refused as it was"


def test_a_strict_list_without_a_fault_is_taken(client: Client, form: Form) -> None:
    answer = client.post("/api/tasks", **form("sku\nA\nB\n", strict="true", unique="sku"))
    assert answer.status_code == 202, answer.json
    assert answer.json["counts"]["total"] == 2


def test_false_and_null_ask_for_nothing(client: Client, form: Form) -> None:
    assert client.post("/api/tasks", **form("sku\nA\nA\n,\n", strict="false", dry_run="0")).status_code == 202
    body = {"worker": "enroll", "items": [{"sku": "A"}], "strict": None, "dry_run": None, "unique": None}
    assert client.post("/api/tasks", json=body).status_code == 202
    assert client.post("/api/tasks", json={**body, "unique": []}).status_code == 202
