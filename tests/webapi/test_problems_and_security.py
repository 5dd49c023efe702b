"""Errors of every kind are problem+json; nothing from outside becomes markup; other sites change nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask import Response
from support.webshop import Client, client_of

import webapi
from asynctask import AsyncTask
from asynctask.errors import LedgerUnavailable

STATIC = Path(webapi.__file__).parent / "static"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("GET", "/api/nope", 404, "not_found"),
        ("GET", "/api/tasks/x", 404, "not_found"),
        ("GET", "/static/nope.js", 404, "not_found"),
        ("GET", "/static/../server.py", 404, "not_found"),
        ("DELETE", "/api/tasks", 405, "method_not_allowed"),
        ("POST", "/healthz", 405, "method_not_allowed"),
        ("PATCH", "/api/tasks/1", 415, "unsupported_media_type"),
        ("POST", "/api/tasks", 415, "unsupported_media_type"),
    ],
)
def test_every_error_is_a_problem(client: Client, method: str, path: str, status: int, code: str) -> None:
    answer = client.open(path, method=method)
    assert (answer.status_code, answer.mimetype) == (status, "application/problem+json")
    body = answer.json
    assert set(body) == {"type", "title", "status", "detail", "instance", "code", "errors"}
    assert (body["status"], body["code"], body["type"]) == (status, code, f"urn:asynctask:problem:{code}")
    assert body["title"]
    assert body["detail"]
    if status == 405:
        assert answer.headers["Allow"]


def test_a_bug_is_500_without_a_word_of_what_is_inside(app: AsyncTask, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(app)

    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("secret password")

    monkeypatch.setattr(app, "tasks", broken)
    answer = client.get("/api/tasks")
    assert (answer.status_code, answer.json["code"]) == (500, "internal_error")
    assert b"secret" not in answer.data
    assert client.get("/healthz").status_code == 200


def test_a_database_that_is_away_is_503_with_retry_after(app: AsyncTask, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(app)

    def away(*_: Any, **__: Any) -> None:
        raise LedgerUnavailable("the database does not answer")

    monkeypatch.setattr(app, "tasks", away)
    for path in ("/api/tasks", "/readyz"):
        answer = client.get(path)
        assert (answer.status_code, answer.json["code"]) == (503, "ledger_unavailable")
        assert answer.headers["Retry-After"]
    assert client.get("/healthz").status_code == 200


def test_an_old_schema_is_503_with_the_command_that_mends_it(tmp_path: Path) -> None:
    import sqlite3

    database = tmp_path / "old.db"
    connection = sqlite3.connect(database)
    connection.execute("CREATE TABLE tasks (id INTEGER)")
    connection.close()
    client = client_of(AsyncTask(environ={}, database_url=f"sqlite:///{database}", data_dir=str(tmp_path)))
    for path in ("/readyz", "/api/tasks"):
        answer = client.get(path)
        assert (answer.status_code, answer.json["code"]) == (503, "schema_outdated")
        assert "asynctask db upgrade" in answer.json["detail"]


def test_several_applications_live_in_one_process(make_app: Callable[..., AsyncTask]) -> None:
    clients = [client_of(make_app(max_body_bytes=limit)) for limit in (1_024, 4_096)]
    body = {"worker": "anything", "items": [{"x": "y" * 2_000}]}
    assert [c.post("/api/tasks", json=body).status_code for c in clients] == [413, 202]
    assert [len(c.get("/api/tasks").json["tasks"]) for c in clients] == [0, 1]


# -- Other sites --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://other.localhost"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "anything-new"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://localhost:8001"},
        {"Origin": "null"},
        {"Origin": "http://["},
    ],
)
def test_a_page_of_another_site_changes_nothing(app: AsyncTask, client: Client, headers: dict[str, str]) -> None:
    task = app.submit("enroll", [{"sku": "A"}])
    answers = [
        client.post(f"/api/tasks/{task.id}/pause", headers=headers),
        client.patch(f"/api/tasks/{task.id}", json={"parallel": 1}, headers=headers),
        client.post("/api/tasks", json={"worker": "enroll", "items": [{"sku": "B"}]}, headers=headers),
    ]
    assert [(a.status_code, a.json["code"]) for a in answers] == [(403, "cross_site")] * 3
    told = ("X-Forwarded-Host", "X-Forwarded-Proto", "trusted_proxies")
    assert [name for name in told if name not in answers[0].json["detail"]] == []
    assert task.progress()["state"] == "running"
    assert len(app.tasks()) == 1
    assert client.get(f"/api/tasks/{task.id}", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://localhost"},
        {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost"},
    ],
)
def test_programs_and_the_own_page_may_change_things(app: AsyncTask, client: Client, headers: dict[str, str]) -> None:
    task = app.submit("enroll", [{"sku": "A"}])
    assert client.post(f"/api/tasks/{task.id}/pause", headers=headers).status_code == 200


# -- Markup -------------------------------------------------------------------------------------------------------------

EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'`{{7*7}}"


def pages(client: Client, task_id: int) -> list[Response]:
    return [client.get(path) for path in ("/", f"/tasks/{task_id}", "/docs", "/tasks/999999", "/jobs", "/jobs/<b>")]


def test_nothing_that_users_send_becomes_markup(app: AsyncTask, client: Client, form: Callable[..., Any]) -> None:
    filename = f"{EVIL}.csv".replace("/", "-")
    answer = client.post(
        "/api/tasks", **form('sku,note\nA,"' + EVIL.replace('"', '""') + '"\n', filename=filename, title=EVIL)
    )
    assert answer.status_code == 202, answer.json
    for page in pages(client, answer.json["task_id"]):
        text = page.get_data(as_text=True)
        assert "<script>alert" not in text
        assert "<img" not in text
        assert "49" not in re.sub(r"\d{3,}", "", text.partition("<main")[2].partition("<h1")[2][:200])
    assert answer.json["title"] == EVIL, "the API hands it back as it was, as JSON"
    assert answer.mimetype == "application/json"


def test_a_path_is_escaped_in_the_error_that_names_it(client: Client) -> None:
    answer = client.get("/<script>alert(1)</script>")
    assert answer.mimetype == "application/problem+json"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_worker_docs_are_escaped(app: AsyncTask) -> None:
    def evil(item: dict[str, Any]) -> None: ...

    evil.__doc__ = EVIL
    app.worker(evil)
    text = client_of(app).get("/new").get_data(as_text=True)
    assert "alert(1)" in text
    assert "<script>alert" not in text


def test_every_answer_carries_the_headers_that_keep_browsers_out_of_trouble(app: AsyncTask, client: Client) -> None:
    task = app.submit("enroll", [{"sku": "A"}])
    paths = [
        "/",
        f"/tasks/{task.id}",
        "/docs",
        "/openapi.json",
        "/static/app.css",
        "/api/tasks",
        "/nope",
        "/healthz",
        f"/api/tasks/{task.id}/report.csv",
    ]
    for path in paths:
        headers = client.get(path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "same-origin"


def test_the_pages_hold_to_their_own_policy(app: AsyncTask, client: Client) -> None:
    task = app.submit("enroll", [{"sku": "A"}])
    for page in pages(client, task.id):
        text = page.get_data(as_text=True)
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text)
        assert not re.search(r"<script(?![^>]*\bsrc=)", text)
        assert not re.search(r"""(?:src|href|action)=["'](?:https?:)?//""", text), "nothing comes from other sites"


def test_the_scripts_put_data_in_as_text_only() -> None:
    scripts = {path.name: path.read_text() for path in STATIC.glob("*.js")}
    assert len(scripts) >= 4
    for name, text in scripts.items():
        code = re.sub(r"//.*", "", text)
        found = re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc", code)
        assert not found, (name, found)


def test_every_block_of_the_style_is_closed() -> None:
    """What follows an open one is part of it to a browser: rules of all screens become those of phones."""
    text = re.sub(r"/\*.*?\*/", "", (STATIC / "app.css").read_text(), flags=re.DOTALL)
    depth = 0
    for mark in re.findall(r"@media|[{}]", text):
        assert mark != "@media" or depth == 0, "a block before it is open"
        depth += {"{": 1, "}": -1}.get(mark, 0)
    assert depth == 0


def test_the_page_of_a_task_that_is_not_there_says_so(client: Client) -> None:
    answer = client.get("/tasks/77")
    assert (answer.status_code, answer.mimetype) == (404, "text/html")
    assert "There is no Task <bdi>77</bdi>" in answer.get_data(as_text=True)


def test_the_page_of_a_job_that_is_not_there_says_so(client: Client) -> None:
    answer = client.get("/jobs/%3Cscript%3E")
    assert (answer.status_code, answer.mimetype) == (404, "text/html")
    assert "There is no job <bdi>&lt;script&gt;</bdi>" in answer.get_data(as_text=True)


def options_of_worker(text: str) -> list[str]:
    return re.findall('<option value="([^"]*)">', text.partition('<select id="worker"')[2].partition("</select>")[0])


def test_the_form_offers_only_workers_that_take_lists(app: AsyncTask) -> None:
    app.worker(use_task_event=False, name="a-lone-call")(lambda item: None)
    app.export(columns=["sku"], name="an-export")(lambda shard: [])
    text = client_of(app).get("/new").text
    options = re.search('<select id="worker".*?</select>', text)
    assert options is not None
    assert re.findall('<option value="([^"]*)">', options[0]) == ["", "anything", "enroll"]


def test_the_form_shows_each_worker_with_its_columns(client: Client) -> None:
    text = client.get("/new").get_data(as_text=True)
    assert "<bdi>enroll</bdi>" in text
    assert 'href="/api/workers/enroll/template.xlsx"' in text
    assert "Quantity" in text
    assert "required" in text
