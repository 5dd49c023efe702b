"""Tokens: who may use the web server, and who only reads."""

from __future__ import annotations

import base64
from collections.abc import Callable

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
