"""A list that was rejected says why for as long as its Task is there; and a list is called by the name of its file."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support.webshop import Client, build_app

from asynctask import AsyncTask
from asynctask.cli.options import Session
from asynctask.cli.output import Output
from asynctask.cli.root import run
from asynctask.cli.submit import _print_submission
from asynctask.errors import InputError
from asynctask.lists.readers.opening import FORMATS

Form = Callable[..., dict[str, Any]]


def newest(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/api/tasks?limit=1").json["tasks"][0]
    return found


def test_a_list_without_a_needed_column_keeps_what_was_wrong(client: Client, form: Form) -> None:
    refused = client.post("/api/tasks", **form("quantity,note\n1,x\n", "spring.csv"))
    assert refused.status_code == 422
    assert [fault["column"] for fault in refused.json["errors"]] == ["sku"]
    seen = newest(client)
    assert (seen["state"], seen["title"]) == ("rejected", "spring.csv")
    assert seen["progress"]["percent"] is None, "of nothing there is no share"
    assert "no column for sku" in seen["split"]["reason"]
    assert "refusal" not in client.get(seen["links"]["self"]).json, "a poll stays one statement"
    told = client.get(f"{seen['links']['self']}?include=errors").json["refusal"]
    assert told["code"] == refused.json["code"] == "missing_columns"
    assert told["message"] == refused.json["detail"]
    assert told["errors"] == refused.json["errors"]
    japanese = {"Accept-Language": "ja"}
    other = client.get(f"{seen['links']['self']}?include=errors", headers=japanese).json["refusal"]
    assert other["message"] != told["message"]
    again = client.post("/api/tasks", headers=japanese, **form("quantity,note\n1,x\n", "spring.csv"))
    assert (other["message"], other["errors"]) == (again.json["detail"], again.json["errors"])


def test_rows_of_which_none_could_be_taken_are_told_too(client: Client, form: Form) -> None:
    client.post("/api/tasks", **form("sku,quantity\nA,500\nB,x\n"))
    seen = newest(client)
    assert (seen["split"]["rejected"], seen["progress"]["percent"]) == (2, None)
    told = client.get(f"{seen['links']['self']}?include=errors").json["refusal"]
    assert told["code"] == "all_rejected"
    assert [(fault["row"], fault["column"]) for fault in told["errors"]] == [(2, "quantity"), (3, "quantity")]


def test_a_task_that_was_not_rejected_has_no_refusal(client: Client, form: Form) -> None:
    client.post("/api/tasks", **form("sku\nA\n"))
    assert client.get(f"{newest(client)['links']['self']}?include=errors").json["refusal"] is None


def test_the_command_line_says_why_a_list_was_rejected(client: Client, form: Form, app: Any) -> None:
    client.post("/api/tasks", **form("quantity,note\n1,x\n"))
    task_id = newest(client)["task_id"]
    for command in ("show", "watch"):
        out = io.StringIO()
        run([command, str(task_id), "--database-url", app.config.database_url], stdout=out, stderr=out)
        assert "The list was rejected: the sheet has no column for sku" in out.getvalue(), command
        assert re.search(r"^ *sku +missing_columns", out.getvalue(), re.MULTILINE), command
        assert "100" not in out.getvalue().splitlines()[0] + out.getvalue().splitlines()[1], command


def test_a_submission_that_is_refused_late_is_told_as_one_that_is_refused_at_once(
    app: AsyncTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "submit_file", partial(app.submit_file, wait_s=0.0))
    submission = app.submit_file("enroll", app.uploads.store(io.BytesIO(b"quantity,note\n1,x\n"), "a.csv"))
    out, err = io.StringIO(), io.StringIO()
    session = Session(Output(out, err), {})
    monkeypatch.setattr(session, "app", lambda **_: app)
    with pytest.raises(InputError, match="no column for sku"):
        _print_submission(session, submission)
    assert out.getvalue() == ""


def test_an_upload_without_a_title_is_called_by_its_file_name(client: Client, form: Form, tmp_path: Any) -> None:
    client.post("/api/tasks", **form("sku\nA\n", "Spring sale.csv"))
    assert newest(client)["title"] == "Spring sale.csv"
    assert '<h1 id="task-title" dir="auto">Spring sale.csv</h1>' in client.get(newest(client)["links"]["ui"]).text
    client.post("/api/tasks", **form("sku\nA\n", "Spring sale.csv", title="Summer"))
    assert newest(client)["title"] == "Summer"
    # What nobody has given a name has none.
    client.post("/api/tasks?worker=enroll", data="sku\nA\n", content_type="text/csv")
    assert newest(client)["title"] == ""
    client.post("/api/tasks", json={"worker": "enroll", "items": [{"sku": "A"}]})
    assert newest(client)["title"] == ""


def test_a_file_of_a_program_is_called_by_its_name_and_a_key_stands_for_the_same_list(tmp_path: Any) -> None:
    app = build_app(tmp_path)
    first = app.submit_file("enroll", app.uploads.store(io.BytesIO(b"sku\nA\n"), "a.csv"), idempotency_key="k")
    again = app.submit_file("enroll", app.uploads.store(io.BytesIO(b"sku\nA\n"), "b.csv"), idempotency_key="k")
    assert (again.created, again.id) == (False, first.id)
    assert app.progress(first.id)["title"] == "a.csv"
    app.close()


def test_the_picker_offers_every_format_that_is_read(client: Client) -> None:
    page = client.get("/new").text
    accepted = re.search(r'<input id="file"[^>]* accept="([^"]*)"', page)
    assert accepted is not None
    assert accepted[1].split(",") == [suffix for known in FORMATS.values() for suffix in known.suffixes]
    assert "xlsx, xls, ods, csv, tsv, json or ndjson, at most" in page
