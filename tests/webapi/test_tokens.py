"""Tokens: who may use the web server, and who only reads."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import pytest
from support.webshop import Client, client_of

from asynctask import AsyncTask
from asynctask.config import Config, Token, load, settings
from asynctask.errors import ConfigError

ANN, EVE = "ann-has-a-secret-of-her-own", "eve-reads-with-this.secret"
TOKENS = f"ann={ANN} eve:read={EVE}"


def basic(name: str, secret: str) -> str:
    return f"Basic {base64.b64encode(f'{name}:{secret}'.encode()).decode()}"


@pytest.fixture
def guarded(make_app: Callable[..., AsyncTask]) -> tuple[AsyncTask, Client]:
    app = make_app(tokens=TOKENS)
    return app, client_of(app)


@pytest.mark.parametrize(
    "authorization",
    [
        None, "", "Bearer", "Bearer wrong-and-long-enough", f"Bearer {ANN}x", f"Bearer {ANN.upper()}", f"Token {ANN}", ANN,
        basic("ann", EVE), basic("eve", ANN), basic("", ANN), basic("ann", ""), "Basic not-base64",
    ],
)  # fmt: skip
def test_without_a_valid_token_nothing_is_answered_but_probes(
    guarded: tuple[AsyncTask, Client], authorization: str | None
) -> None:
    app, client = guarded
    task = app.submit("anything", [1])
    headers = {} if authorization is None else {"Authorization": authorization}
    paths = (
        "/",
        "/api/tasks",
        f"/api/tasks/{task.id}",
        f"/api/tasks/{task.id}/stream",
        "/metrics",
        "/docs",
        "/openapi.json",
    )
    for path in (*paths, "/static/task.js", "/nowhere"):
        answer = client.get(path, headers=headers)
        assert (answer.status_code, answer.json["code"]) == (401, "unauthorized"), path
        assert answer.headers["WWW-Authenticate"].startswith('Basic realm="AsyncTask"')
    assert client.post(f"/api/tasks/{task.id}/cancel", headers=headers).status_code == 401
    assert not app.progress(task.id)["done"]
    assert [client.get(path, headers=headers).status_code for path in ("/healthz", "/readyz")] == [200, 200]


def test_a_browser_asks_for_a_secret_once_and_not_with_each_poll_of_a_page_whose_token_ended(
    guarded: tuple[AsyncTask, Client],
) -> None:
    old = {"Authorization": basic("ann", "was-valid-until-the-restart")}
    poll, opened = {"Sec-Fetch-Dest": "empty"}, {"Sec-Fetch-Dest": "document"}
    for headers, asks in ((poll, True), (opened, True), ({**old, **opened}, True), (old, True), ({**old, **poll}, False)):
        answer = guarded[1].get("/api/tasks", headers=headers)
        assert answer.status_code == 401
        ways = [way.partition(" ")[0] for way in answer.headers.getlist("WWW-Authenticate")]
        assert ways == (["Basic", "Bearer"] if asks else ["Bearer"])


@pytest.mark.parametrize("authorization", [f"Bearer {ANN}", basic("ann", ANN)])
def test_a_token_opens_everything_and_its_name_is_in_the_log(guarded: tuple[AsyncTask, Client], authorization: str) -> None:
    app, client = guarded
    task, headers = app.submit("anything", [1]), {"Authorization": authorization}
    assert client.get("/", headers=headers).status_code == 200
    assert client.post(f"/api/tasks/{task.id}/pause", headers=headers).json["state"] == "paused"
    assert [entry["who"] for entry in task.log() if entry["action"] == "paused"] == ["ann (web 127.0.0.1)"]


def test_a_token_for_reading_changes_nothing(guarded: tuple[AsyncTask, Client]) -> None:
    app, client = guarded
    task = app.submit("anything", [1])
    for authorization in (f"Bearer {EVE}", basic("eve", EVE)):
        headers = {"Authorization": authorization}
        assert client.get(f"/api/tasks/{task.id}", headers=headers).status_code == 200
        for method, path in (("post", "cancel"), ("patch", "")):
            answer = getattr(client, method)(
                f"/api/tasks/{task.id}/{path}".rstrip("/"), json={"parallel": 1}, headers=headers
            )
            assert (answer.status_code, answer.json["code"]) == (403, "read_only")
    assert app.progress(task.id)["state"] == "running"


def test_the_document_names_the_ways_to_log_in_where_there_are_tokens(
    guarded: tuple[AsyncTask, Client], client: Client
) -> None:
    document = guarded[1].get("/openapi.json", headers={"Authorization": f"Bearer {ANN}"}).json
    assert document["components"]["securitySchemes"].keys() == {"bearer", "basic"}
    assert document["security"] == [{"bearer": []}, {"basic": []}]
    assert "security" not in client.get("/openapi.json").json


@pytest.mark.parametrize(
    "tokens",
    [
        "ann",
        "ann=",
        "ann=short",
        f"ann:write={ANN}",
        f"a/b={ANN}",
        f"={ANN}",
        f"ann={ANN} ann:read={EVE}",
        f"ann={'x' * 257}",
        f"ann={ANN} bob={ANN}",
        f"ann={ANN}/",
    ],
)
def test_tokens_that_cannot_be_are_refused_without_showing_them(tokens: str) -> None:
    with pytest.raises(ConfigError, match=r"tokens: entry [12] is wrong") as refused:
        Config(tokens=tokens)
    assert ANN not in str(refused.value)
    assert EVE not in str(refused.value)


def test_secrets_are_shown_nowhere() -> None:
    with pytest.raises(ConfigError) as refused:
        Config(tokens=[f"ann={ANN}"])  # type: ignore[arg-type]
    assert str(refused.value) == "tokens must be str, not list"
    with pytest.raises(ConfigError) as refused:
        Config(tokens=[f"ann={ANN}"])  # type: ignore[arg-type]
    assert str(refused.value) == "tokens must be str, not list"
    config, origins = load({}, {"ASYNCTASK_TOKENS": TOKENS})
    assert config.access() == [Token("ann", ANN, False), Token("eve", EVE, True)]
    (shown,) = [each.shown for each in settings(config, origins) if each.name == "tokens"]
    assert shown == "ann=*** eve:read=***"
    assert ANN not in repr(config)


FORGED = "eve (web 10.9.9.9)"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("tasks", {"json": {"worker": "anything", "items": [{"n": 1}], "owner": FORGED}}),
        ("tasks", {"json": {"worker": "anything", "items": [{"n": n} for n in range(1_500)], "owner": FORGED}}),
        ("tasks", {"json": {"jobs": [{"worker": "anything", "item": {"n": 1}}], "owner": FORGED}}),
        ("tasks", {"data": {"worker": "anything", "owner": FORGED, "file": (b"n\n1\n", "list.csv")}}),
        (f"tasks?worker=anything&owner={FORGED}", {"data": b"n\n1\n", "content_type": "text/csv"}),
        ("exports", {"json": {"worker": "rows", "shards": [1], "owner": FORGED}}),
    ],
    ids=["items", "a list that is split", "jobs", "form", "raw", "export"],
)
def test_the_log_of_a_submission_names_the_token_and_not_the_owner_that_the_client_wrote(
    guarded: tuple[AsyncTask, Client], path: str, body: dict[str, Any]
) -> None:
    app, client = guarded

    @app.export(columns=["n"])
    def rows(shard: int) -> list[list[int]]:
        return [[shard]]

    if isinstance(form := body.get("data"), dict):
        content, name = form["file"]
        body = {"data": {**form, "file": (io.BytesIO(content), name)}}
    answer = client.post(f"/api/{path}", headers={"Authorization": f"Bearer {ANN}"}, **body)
    assert answer.status_code == 202, answer.json
    assert answer.json["owner"] == FORGED
    (entry,) = [each for each in app.task(answer.json["task_id"]).log() if each["action"] == "submitted"]
    assert (entry["who"], entry["detail"]["owner"]) == ("ann (web 127.0.0.1)", FORGED)
    assert all(FORGED not in each["who"] for each in app.task(answer.json["task_id"]).log())


def test_a_corrected_list_is_logged_with_its_own_requester(guarded: tuple[AsyncTask, Client]) -> None:
    app, client = guarded
    headers = {"Authorization": f"Bearer {ANN}"}
    first = app.submit("enroll", [{"sku": "NO-1"}], owner=FORGED, who="a program")
    launcher = app.launcher(concurrency=1)
    launcher.start()
    try:
        assert first.wait(timeout=120)["done"]
    finally:
        launcher.stop()
    report = client.get(f"/api/tasks/{first.id}/report.csv", headers=headers).data.replace(b"NO-1", b"OK-1")
    form = {"worker": "enroll", "resubmit_of": str(first.id), "file": (io.BytesIO(report), "report.csv")}
    answer = client.post("/api/tasks", headers=headers, data=form)
    assert (answer.status_code, answer.json["owner"]) == (202, FORGED), answer.json
    said = [[e["who"] for e in app.task(i).log() if e["action"] == "submitted"] for i in (first.id, answer.json["task_id"])]
    assert said == [["a program"], ["ann (web 127.0.0.1)"]]


@pytest.mark.parametrize("field", ["who", "requester"])
def test_a_body_cannot_name_its_requester(guarded: tuple[AsyncTask, Client], field: str) -> None:
    app, client = guarded
    headers = {"Authorization": f"Bearer {ANN}"}
    body = {"worker": "anything", "items": [{"n": 1}], field: FORGED}
    answer = client.post("/api/tasks", headers=headers, json=body)
    assert (answer.status_code, field in answer.json["detail"]) == (422, True)
    query = {"path": f"/api/tasks?worker=anything&{field}=x", "data": b"n\n1\n", "content_type": "text/csv"}
    assert client.post(**query, headers=headers).status_code == 422
    assert app.tasks() == []
