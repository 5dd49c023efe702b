"""Tokens: who may use the web server, and who only reads."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from structlog.testing import capture_logs
from support.clocks import SettableClock
from support.serving import Shop, answers
from support.webshop import Client, client_of
from werkzeug.datastructures import Authorization

from asynctask import AsyncTask
from asynctask.access import User
from asynctask.config import Config, Token, load, settings
from asynctask.errors import ConfigError
from asynctask.logs import get_logger
from asynctask.testing import wait_for
from webapi.security import Logins, TooManyAttempts, _digest, network_of

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
        "Basic n\xf6",
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
    for path in (*paths, "/nowhere"):
        answer = client.get(path, headers=headers)
        assert (answer.status_code, answer.json["code"]) == (401, "unauthorized"), path
        assert answer.headers["WWW-Authenticate"].startswith('Basic realm="AsyncTask"')
    assert client.post(f"/api/tasks/{task.id}/cancel", headers=headers).status_code == 401
    assert not app.progress(task.id)["done"]
    assert [client.get(path, headers=headers).status_code for path in ("/healthz", "/readyz")] == [200, 200]


def test_a_browser_asks_for_a_secret_where_something_is_opened_and_not_with_each_poll_of_a_page(
    guarded: tuple[AsyncTask, Client],
) -> None:
    old = {"Authorization": basic("ann", "was-valid-until-the-restart")}
    poll, opened = {"Sec-Fetch-Dest": "empty"}, {"Sec-Fetch-Dest": "document"}
    for headers, asks in ((poll, False), (opened, True), ({**old, **opened}, True), (old, True), ({**old, **poll}, False)):
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
    with pytest.raises(ConfigError, match=r"entry [12] is wrong.*to make one: python -c .*token_urlsafe") as refused:
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
    assert config.access() == [
        Token(User("ann", rights={"operate"}), ANN),
        Token(User("eve", rights={"read"}), EVE),
    ]
    (shown,) = [each.shown for each in settings(config, origins) if each.name == "tokens"]
    assert shown == "ann=*** eve:read=***"
    assert ANN not in repr(config)


# -- guessing


HERE, THERE = "192.0.2.1", "192.0.2.2"


class Door:
    """Logins with the tokens above, and a clock that stands."""

    def __init__(self) -> None:
        self.clock = SettableClock()
        known = [(token.user, _digest(token.secret)) for token in Config(tokens=TOKENS).access()]
        self.logins = Logins(known, self.clock.monotonic, get_logger("asynctask.web"))

    def tries(self, secret: str, address: str = HERE, name: str | None = None) -> str:
        """``ann``, ``refused``, or the seconds after which another secret is looked at."""
        given = (
            Authorization("bearer", token=secret)
            if name is None
            else Authorization("basic", {"username": name, "password": secret})
        )
        try:
            user = self.logins.user_of(given, address, "/api/tasks")
        except TooManyAttempts as error:
            return dict(error.headers)["Retry-After"]
        return "refused" if user is None else user.name


def test_an_address_guesses_ten_times_and_then_once_a_second_and_a_right_guess_tells_nothing() -> None:
    door = Door()
    assert [door.tries(f"guess-{n}") for n in range(11)] == ["refused"] * 10 + ["1"]
    assert door.tries(ANN) == "1", "it is not compared"
    door.clock.seconds += 1
    assert [door.tries("guess"), door.tries("guess")] == ["refused", "1"]
    door.clock.seconds += 1
    assert door.tries(ANN) == "ann"
    door.clock.seconds += 100
    assert [door.tries("guess") for _ in range(11)] == ["refused"] * 10 + ["1"], "the pause earned ten, not a hundred"


def test_who_guesses_locks_out_nobody_else_and_nobody_who_is_logged_in() -> None:
    door = Door()
    assert door.tries(ANN) == "ann"
    assert [door.tries("guess") for _ in range(12)] == ["refused"] * 10 + ["1"] * 2
    assert door.tries(ANN) == "ann", "it was valid from here before"
    assert [door.tries(ANN, name=name) for name in ("eve", "")] == ["refused"] * 2
    assert door.tries(EVE) == "1", "it was not"
    assert door.tries(EVE, THERE) == "eve"


def test_a_request_without_a_secret_is_no_attempt() -> None:
    door = Door()
    for given in (None, Authorization("digest", {"username": "ann"}), Authorization("bearer", token=""),
                  Authorization("basic", {"username": "ann", "password": ""})):  # fmt: skip
        assert [door.logins.user_of(given, HERE, "/") for _ in range(20)] == [None] * 20
    assert door.tries(ANN) == "ann"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:1", True), ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True), ("192.0.2.1", "192.0.2.2", False), ("fe80::1%eth0", "fe80::2%eth0", True),
        ("", "", True), ("unix:", "", False),
    ],
)  # fmt: skip
def test_an_ipv6_client_is_its_network(one: str, other: str, same: bool) -> None:
    assert (network_of(one) == network_of(other)) is same


def test_what_is_kept_of_addresses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Logins, "ADDRESSES", 20)
    door = Door()
    for n in range(100):
        assert door.tries(ANN, f"10.0.0.{n}") == "ann"
        assert door.tries("guess", f"10.0.1.{n}") == "refused"
    assert len(door.logins._failed) == len(door.logins._valid) == 20


def test_threads_together_get_no_more_guesses() -> None:
    door, found = Door(), list[str]()
    threads = [threading.Thread(target=lambda: found.extend(door.tries("guess") for _ in range(20))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found.count("refused"), len(found)) == (10, 160)


def test_failed_logins_are_logged_without_secrets_and_cannot_flood_the_log() -> None:
    door = Door()
    with capture_logs() as lines:
        for n in range(30):
            door.tries(f"guess-{n}-geheim", name="ann\r\nforged")
            door.clock.seconds += 0.5
        door.tries("guess-geheim", THERE)
        door.tries("guess-geheim", "192.0.2.3", name=ANN)
    assert [(each["address"], each["name"], each["attempts"]) for each in lines] == [
        (HERE, "ann\\r\\nforged", 1), (HERE, "ann\\r\\nforged", 20), (THERE, None, 1), ("192.0.2.3", "***", 1),
    ]  # fmt: skip
    assert {(each["event"], each["log_level"], each["path"]) for each in lines} == {
        ("login_failed", "warning", "/api/tasks")
    }
    assert "geheim" not in str(lines)
    with capture_logs() as lines:
        for n in range(1000):
            door.tries("guess", f"10.{n // 200}.0.{n % 200}")
    assert len(lines) <= 10


def test_guesses_over_http_are_answered_429_and_the_owner_goes_on(guarded: tuple[AsyncTask, Client]) -> None:
    client = guarded[1]
    there: dict[str, Any] = {"environ_base": {"REMOTE_ADDR": THERE}}
    ann, eve = ({"Authorization": f"Bearer {secret}"} for secret in (ANN, EVE))
    assert client.get("/api/tasks", headers=ann).status_code == 200
    codes, refused = guess(lambda n: client.get("/api/tasks", headers={"Authorization": basic("ann", f"guess-{n}")}))
    assert codes[:10] == [401] * 10
    assert (refused.json["code"], refused.headers["Retry-After"]) == ("too_many_attempts", "1")
    assert "WWW-Authenticate" not in refused.headers, "a browser would ask at once"
    assert client.get("/api/tasks", headers=ann).status_code == 200
    assert client.get("/api/tasks").status_code == 401
    assert client.get("/healthz").status_code == 200
    assert client.get("/api/tasks", headers=eve, **there).status_code == 200


def test_a_real_server_slows_down_and_logs_guesses_of_the_client_that_its_proxy_names(tmp_path: Path) -> None:
    with Shop(tmp_path, tokens=TOKENS, trusted_proxies="127.0.0.1").web() as (_, said):
        wait_for(lambda: answers(said["url"] + "/readyz"), "the server to be ready")

        def ask(secret: str, client: str) -> Any:
            place = urlsplit(said["url"])
            with closing(HTTPConnection(str(place.hostname), place.port, timeout=60)) as connection:
                headers = {"Authorization": f"Bearer {secret}", "X-Forwarded-For": client}
                connection.request("GET", "/api/%1b%5b31m", headers=headers)
                answer = connection.getresponse()
                answer.read()
            return answer

        codes, _ = guess(lambda n: ask(f"guess-{n}-geheim", HERE))
        assert codes[:10] == [401] * 10
        assert ask(ANN, THERE).status == 404
    log = (tmp_path / "web.log").read_text()
    lines = [json.loads(line) for line in log.splitlines() if "login_failed" in line]
    assert (lines[0]["address"], lines[0]["path"], lines[0]["attempts"]) == (HERE, "/api/\\x1b[31m", 1)
    assert "geheim" not in log


def test_a_real_server_logs_requests_with_the_client_and_the_token_and_a_stream_at_its_end(tmp_path: Path) -> None:
    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "web.log").read_text().splitlines() if '"request"' in line]

    with Shop(tmp_path, tokens=TOKENS, trusted_proxies="127.0.0.1", access_log=True).web() as (_, said):
        wait_for(lambda: answers(said["url"] + "/readyz"), "the server to be ready")
        place = urlsplit(said["url"])
        headers = {"Authorization": f"Bearer {ANN}", "X-Forwarded-For": HERE}
        with (
            closing(HTTPConnection(str(place.hostname), place.port, timeout=60)) as streams,
            closing(HTTPConnection(str(place.hostname), place.port, timeout=60)) as other,
        ):

            def ask(method: str, path: str, body: str | None = None, **more: str) -> Any:
                other.request(method, path, body, {**headers, "Content-Type": "application/json", **more})
                return json.loads(other.getresponse().read())

            task = ask("POST", "/api/tasks", json.dumps({"worker": "enroll", "items": [{"sku": "A"}]}))["task_id"]
            streams.request("GET", f"/api/tasks/{task}/stream", headers=headers)
            answer = streams.getresponse()
            assert answer.readline()
            ask("GET", "/api/tasks?secret=1", Authorization="Bearer geheim-geheim-geheim")
            wait_for(lambda: lines()[-1]["status"] == 401, "the line of the refused request")
            assert [each for each in lines() if each["path"].endswith("/stream")] == []
            ask("POST", f"/api/tasks/{task}/cancel", "{}")
            assert answer.read()
    found = [each for each in lines() if each["path"] != "/readyz"]
    assert {(each["path"], each["status"], each["name"]) for each in found} == {
        ("/api/tasks", 202, "ann"), ("/api/tasks", 401, None), (f"/api/tasks/{task}/cancel", 200, "ann"),
        (f"/api/tasks/{task}/stream", 200, "ann"),
    }  # fmt: skip
    assert {each["address"] for each in found} == {HERE}
    assert any(each["path"] == "/readyz" and each["address"] == "127.0.0.1" for each in lines())
    text = (tmp_path / "web.log").read_text()
    assert not [secret for secret in (ANN, "geheim", "secret=1") if secret in text]


def guess(ask: Callable[[int], Any]) -> tuple[list[int], Any]:
    """Guesses until an answer is 429: the statuses, and that answer."""
    codes: list[int] = []
    while 429 not in codes:
        answer = ask(len(codes))
        codes.append(answer.status if isinstance(answer, HTTPResponse) else answer.status_code)
        assert len(codes) < 1000
    return codes, answer


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
