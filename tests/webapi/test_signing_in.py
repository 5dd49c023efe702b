"""People who sign in with a token: the form, the session of the browser, and the pages of errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.webshop import Client, client_of, said

from asynctask import AsyncTask
from asynctask.access import read_session, sign_session
from webapi.security import SESSION, SESSION_S, _digest

ANN, EVE = "ann-has-a-secret-of-her-own", "eve-reads-with-this.secret"
BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
FORM = {"content_type": "multipart/form-data", "headers": BROWSER}


@pytest.fixture
def guarded(make_app: Callable[..., AsyncTask]) -> AsyncTask:
    return make_app(tokens=f"ann={ANN} eve:read={EVE}")


def sign_in(client: Client, secret: str, after: str = "", **more: Any) -> Any:
    return client.post("/login", data={"token": secret, "after": after}, **{**FORM, **more})


def test_a_person_signs_in_with_a_token_works_and_signs_out(guarded: AsyncTask) -> None:
    client, task = client_of(guarded), guarded.submit("anything", [1])
    page = f"/tasks/{task.id}?tab=rows&q=a%26b"
    asked = client.get(page, headers=BROWSER)
    assert asked.status_code == 401
    assert asked.headers.getlist("WWW-Authenticate") == ["Bearer"], "the page asks, and the browser does not"
    assert f'name="after" value="{page.replace("&", "&amp;")}"' in asked.text
    assert "<nav" not in asked.text

    assert "A token is needed." in sign_in(client, " ").text
    wrong = sign_in(client, "no-token-of-this-server", page)
    assert (wrong.status_code, "This token is not known." in wrong.text, SESSION in str(wrong.headers)) == (
        401,
        True,
        False,
    )
    assert page.replace("&", "&amp;") in wrong.text, "the place is not forgotten"

    answer = sign_in(client, f" {ANN}\n", page)
    assert (answer.status_code, answer.headers["Location"]) == (303, page)
    cookie = answer.headers["Set-Cookie"]
    assert {each.strip() for each in cookie.split(";")[1:]} >= {
        "HttpOnly",
        "SameSite=Lax",
        "Path=/",
        f"Max-Age={SESSION_S}",
    }
    assert ANN not in cookie
    shown = client.get(page, headers=BROWSER)
    assert (shown.status_code, ">ann</span>" in shown.text, "Sign out" in shown.text) == (200, True, True)
    assert client.post(f"/api/tasks/{task.id}/pause").json["state"] == "paused"
    assert [entry["who"] for entry in task.log() if entry["action"] == "paused"] == ["ann (web 127.0.0.1)"]

    out = client.post("/logout", headers=BROWSER)
    assert (out.status_code, out.headers["Location"]) == (303, "/login")
    assert client.get(page, headers=BROWSER).status_code == 401
    assert client.get("/login", headers=BROWSER).status_code == 200


def test_a_session_has_the_rights_of_its_token_and_a_token_in_the_request_goes_before_it(guarded: AsyncTask) -> None:
    client, task = client_of(guarded), guarded.submit("anything", [1])
    sign_in(client, EVE)
    assert said(client.post(f"/api/tasks/{task.id}/pause")) == (403, "read_only")
    bearer = {"Authorization": f"Bearer {ANN}"}
    assert client.post(f"/api/tasks/{task.id}/pause", headers=bearer).status_code == 200
    assert said(client.get("/api/tasks", headers={"Authorization": "Bearer wrong-and-long-enough"}))[0] == 401


@pytest.mark.parametrize(
    "after",
    ["//evil.example", "https://evil.example/", "/\\evil.example", "\\\\evil.example", "/\t/evil.example", "evil.example",
     "javascript:alert(1)", "/x\r\nSet-Cookie: a=b", "", " /x"],
)  # fmt: skip
def test_signing_in_leads_to_no_other_site(guarded: AsyncTask, after: str) -> None:
    answer = sign_in(client_of(guarded), ANN, after)
    assert (answer.status_code, answer.headers["Location"]) == (303, "/")


def test_a_page_of_another_site_signs_nobody_in_or_out_and_uses_no_session(guarded: AsyncTask) -> None:
    client, task = client_of(guarded), guarded.submit("anything", [1])
    elsewhere = {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"}
    assert said(sign_in(client, ANN, headers=elsewhere)) == (403, "cross_site")
    sign_in(client, ANN)
    for path in ("/logout", f"/api/tasks/{task.id}/cancel"):
        assert said(client.post(path, headers=elsewhere)) == (403, "cross_site")
    assert client.get("/api/tasks").status_code == 200, "she is signed in still"


def test_a_session_ends_in_time_with_its_token_and_when_it_is_forged(make_app: Callable[..., AsyncTask]) -> None:
    """Taken out: the comparison with the end; the key that is made of the token."""
    app = make_app(tokens=f"ann={ANN}")
    now = app.clock.now() // 1_000_000
    good = sign_session(now + 60, _digest(ANN))
    forged = [
        "",
        "x",
        f"{now + 999}.{good.partition('.')[2]}",
        sign_session(now + 60, _digest(EVE)),
        sign_session(now + 60, b""),
    ]
    for text in (good, sign_session(now - 1, _digest(ANN)), *forged):
        client = client_of(app)
        client.set_cookie(SESSION, text)
        answer = client.get("/api/tasks")
        assert answer.status_code == (200 if text == good else 401), text
        assert (f"{SESSION}=;" in answer.headers.get("Set-Cookie", "")) is (text != good), "the browser forgets it"


def test_sessions_and_tokens_are_guessed_no_faster_in_the_form_than_anywhere(guarded: AsyncTask) -> None:
    client = client_of(guarded)
    for n in range(5):
        assert sign_in(client, f"wrong-and-long-enough-{n}").status_code == 401
        client.set_cookie(SESSION, f"99999999999.{n:043d}")
        assert client.get("/api/tasks").status_code == 401
    answer = sign_in(client, ANN)
    assert (answer.status_code, answer.headers["Retry-After"], "Try again in 1 s" in answer.text) == (429, "1", True)


def test_an_ended_session_is_no_guess(make_app: Callable[..., AsyncTask]) -> None:
    client = client_of(make_app(tokens=f"ann={ANN}"))
    for n in range(20):
        client.set_cookie(SESSION, sign_session(1_000 + n, _digest(ANN)))
        assert client.get("/api/tasks").status_code == 401
    assert sign_in(client, ANN).status_code == 303


def test_the_cookie_is_of_the_servers_own_path_and_of_tls_where_there_is_some(make_app: Callable[..., AsyncTask]) -> None:
    app = make_app(tokens=f"ann={ANN}", trusted_proxies="127.0.0.1")
    proxied = {"X-Forwarded-Proto": "https", "X-Forwarded-Prefix": "/bulk", "Sec-Fetch-Site": "same-origin"}
    answer = sign_in(client_of(app), ANN, "/bulk/jobs", headers=proxied)
    assert answer.headers["Location"] == "/bulk/jobs"
    assert {each.strip() for each in answer.headers["Set-Cookie"].split(";")} >= {"Secure", "Path=/bulk"}
    assert sign_in(client_of(app), ANN, "/jobs", headers=proxied).headers["Location"] == "/bulk/"


def test_a_server_without_tokens_has_no_form(app: AsyncTask, client: Client) -> None:
    for answer in (client.get("/login", headers=BROWSER), sign_in(client, ANN)):
        assert answer.status_code == 404
    hosted = client_of(app, authorize=lambda _: None)
    answer = hosted.get("/", headers=BROWSER)
    assert (
        answer.status_code,
        "Log in to the application" in answer.text,
        "<form" in answer.text.partition("<footer")[0],
    ) == (
        401,
        True,
        False,
    )


def test_a_long_form_is_refused_before_it_is_read(guarded: AsyncTask) -> None:
    answer = client_of(guarded).post("/login", data={"token": "x" * 70_000}, content_type="multipart/form-data")
    assert answer.status_code == 413


def test_a_browser_gets_a_page_for_an_error_and_a_program_a_problem(client: Client) -> None:
    for path, status in (("/nowhere/<script>alert(1)</script>", 404), ("/api/tasks/99", 404), ("/api/tasks?limit=x", 422)):
        page = client.get(path, headers=BROWSER)
        assert (page.status_code, page.mimetype, page.cache_control.no_store) == (status, "text/html", True)
        assert "<h1>" in page.text
        assert "<script>alert" not in page.text
        for accept in ("*/*", "application/json", "application/json, text/html", "text/html;q=0.5, application/json", ""):
            answer = client.get(path, headers={"Accept": accept})
            assert (answer.status_code, answer.mimetype) == (status, "application/problem+json"), accept


def test_a_session_is_read_with_the_key_that_signed_it() -> None:
    text = sign_session(7, b"two")
    assert read_session(text, [b"one", b"two"]) == (7, b"two")
    assert read_session(text, [b"one"]) is None
