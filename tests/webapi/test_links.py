"""Signed links to single Tasks, and pages of other origins that use the API."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from structlog.testing import capture_logs
from support.clocks import SettableClock
from support.serving import Shop, answers
from support.webshop import Client, as_user, calls, client_of, said
from support.world import World, numbers

from asynctask import AsyncTask, InputError
from asynctask.access import LINKABLE, MAX_LINK_S, Link, User, read_link, sign
from asynctask.cli.root import run
from asynctask.config import Config, settings, shown
from asynctask.errors import ConfigError, NoLinks, NotFound
from asynctask.testing import wait_for
from webapi.access import right_for
from webapi.security import FILES, OPEN

SECRET = "a-secret-for-links-that-nobody-guesses"
DAY = 86_400
ANN = {"Authorization": "Bearer ann-has-a-secret-of-her-own"}


@pytest.fixture
def app(make_app: Callable[..., AsyncTask]) -> AsyncTask:
    return make_app(link_secret=SECRET, tokens="ann=ann-has-a-secret-of-her-own")


@pytest.fixture
def client(app: AsyncTask) -> Client:
    return client_of(app)


# -- the text


def test_a_link_is_read_as_it_was_signed() -> None:
    for link in (Link(7, frozenset({"read"}), 1_800_000_000), Link(2**63 - 1, LINKABLE, 1)):
        assert read_link(sign(link, SECRET), SECRET) == link


@pytest.mark.parametrize("place", range(0, 63, 3))
def test_a_link_with_another_character_is_none(place: int) -> None:
    text = sign(Link(7, LINKABLE, 1_800_000_000), SECRET)
    for other in ("0", "A", "r", ".", "8", "\u0661"):
        if place < len(text) and text[place] != other:
            assert read_link(text[:place] + other + text[place + 1 :], SECRET) is None
    assert read_link(text + "A", SECRET) is read_link(text[:-1], SECRET) is read_link(" " + text, SECRET) is None


def test_a_link_of_another_secret_is_none() -> None:
    text = sign(Link(7, LINKABLE, 1_800_000_000), SECRET)
    assert read_link(text, SECRET + "x") is None
    assert read_link(sign(Link(7, LINKABLE, 1_800_000_000), ""), "") is None, "no secret is no secret to sign with"


# -- making one


@pytest.mark.each_database(reason="the log is written by each one")
def test_a_link_names_its_task_its_rights_and_its_end_and_the_log_names_its_maker(world: World) -> None:
    app = world.app(link_secret=SECRET)
    task = app.submit("note", numbers(1))
    version = task.progress()["version"]
    read, control = app.link(task.id), app.link(task.id, {"read", "control"}, 60, who="ann")
    assert task.progress()["version"] == version + 2, "who follows the Task reads its log again"
    now = app.clock.now() // 1_000_000
    for text, rights, seconds in ((read, {"read"}, DAY), (control, LINKABLE, 60)):
        found = read_link(text, SECRET)
        assert found is not None
        assert (found.task_id, found.rights) == (task.id, rights)
        assert abs(found.expires_at - now - seconds) <= 60
    made = [(each["who"], each["detail"]["rights"]) for each in task.log() if each["action"] == "linked"]
    assert made == [("ann", ["control", "read"]), ("", ["read"])]
    assert all(text not in json.dumps(task.log()) for text in (read, control))


def test_a_link_that_cannot_be_is_not_made(app: AsyncTask, make_app: Callable[..., AsyncTask]) -> None:
    task = app.submit("anything", [1])
    for rights in (("control",), ("submit",), ("read", "operate"), (), "reads"):
        with pytest.raises(InputError, match="read, or read and control"):
            app.link(task.id, rights)
    for seconds in (0, -1, MAX_LINK_S + 1, float("nan"), float("inf")):
        with pytest.raises(InputError, match="seconds"):
            app.link(task.id, expires_in=seconds)
    with pytest.raises(NotFound):
        app.link(999)
    other = make_app()
    number = other.submit("anything", [1]).id
    with pytest.raises(NoLinks, match=r"link_secret.*token_urlsafe"):
        other.link(number)
    refused = client_of(other).post(f"/api/tasks/{number}/links", json={})
    assert said(refused) == (409, "no_link_secret")
    assert "token_urlsafe" in refused.json["detail"]


def test_a_link_is_made_over_http_by_who_controls_the_task_with_rights_that_the_maker_has(app: AsyncTask) -> None:
    task = app.submit("anything", [1], owner="blue")
    path = f"/api/tasks/{task.id}/links"
    made = as_user(app, User("ann", "blue")).post(path, json={"rights": ["read", "control"], "expires_in": 60})
    assert (made.status_code, made.json["rights"], made.headers["Cache-Control"]) == (201, ["control", "read"], "no-store")
    assert made.json["links"]["stream"] == f"/api/tasks/{task.id}/stream?link={made.json['link']}"
    assert client_of(app).get(made.json["links"]["self"]).json["task_id"] == task.id
    assert [each["who"] for each in task.log() if each["action"] == "linked"] == ["ann (web 127.0.0.1)"]
    assert said(as_user(app, User("bob", "red")).post(path, json={})) == (404, "not_found")
    assert said(as_user(app, User("eve", rights={"read"})).post(path, json={})) == (403, "read_only")
    assert said(as_user(app, User("tim", rights={"control"})).post(path, json={})) == (403, "forbidden")
    wrong: dict[str, Any]
    for wrong in ({"rights": []}, {"rights": ["operate"]}, {"expires_in": 0}, {"expires_in": "60"}, {"task_id": 7}):
        assert as_user(app, User("ann")).post(path, json=wrong).status_code == 422, wrong
    assert as_user(app, User("ann")).post(path, json={"rights": ["control"]}).json["code"] == "invalid_link"


def test_the_command_prints_the_url_of_the_page(app: AsyncTask, monkeypatch: pytest.MonkeyPatch) -> None:
    task = app.submit("anything", [1])

    def call(*argv: str, **more: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patched:
            patched.setenv("ASYNCTASK_DATABASE_URL", app.config.database_url)
            patched.setenv("ASYNCTASK_LINK_SECRET", SECRET)
            for name, value in more.items():
                patched.setenv(name, value)
            code = run(["link", *argv], stdout=out, stderr=err)
        return code, out.getvalue().strip(), err.getvalue()

    code, page, err = call(str(task.id), "--base-path", "/bulk")
    start, _, text = page.partition("?link=")
    assert (code, start, err) == (0, f"http://127.0.0.1:8000/bulk/tasks/{task.id}", "")
    assert client_of(app).get(f"/tasks/{task.id}?link={text}").status_code == 200
    code, document, _ = call(str(task.id), "--control", "--expires-in", "60", "--url", "https://shop.example/x/", "--json")
    printed = json.loads(document)
    found = read_link(printed["link"], SECRET)
    assert (code, printed["url"]) == (0, f"https://shop.example/x/tasks/{task.id}?link={printed['link']}")
    assert found is not None
    assert found.rights == LINKABLE
    assert "(command line)" in task.log()[0]["who"]
    for argv, more in (
        (["999"], {}), ([str(task.id)], {"ASYNCTASK_LINK_SECRET": ""}), ([str(task.id), "--expires-in", "0"], {}),
        ([str(task.id)], {"ASYNCTASK_HOST": "unix:/run/x.sock"}), ([str(task.id)], {"ASYNCTASK_PORT": "0"}),
    ):  # fmt: skip
        code, out, err = call(*argv, **more)
        assert (code, out) == (2, ""), (argv, more, err)


# -- using one


def test_a_link_opens_its_task_and_nothing_else(app: AsyncTask, client: Client) -> None:
    """Taken out: the look at the Task in ``_admit``."""
    own, other = app.submit("anything", [1]), app.submit("anything", [1])
    (event,), (strange,) = own.events(), other.events()
    text = app.link(own.id, LINKABLE)
    before = other.progress()
    for task, job in ((own, event), (other, strange)):
        for endpoint, method, path in calls(app, task_id=task.id, job_id=job["job_id"]):
            if (task is own and (method != "GET" or endpoint == "tasks.stream")) or endpoint in OPEN - FILES:
                continue
            named = str(task.id) in path.split("/") or job["job_id"] in path
            answer = client.open(f"{path}?link={text}", method=method, json={})
            if endpoint in ("static", "pages.client", "health.healthz", "health.readyz"):
                assert answer.status_code == 200
            elif not named or right_for(endpoint, method) in ("operate", "submit"):
                assert said(answer) == (403, "forbidden"), (method, path)
            elif task is other:
                assert answer.status_code == 404, (method, path)
            else:
                assert answer.status_code == (409 if endpoint == "tasks.result" else 200), (method, path)
    assert other.progress() == before


def test_a_link_to_read_changes_nothing_and_one_to_control_does(app: AsyncTask, client: Client) -> None:
    task = app.submit("anything", [1])
    read, control = app.link(task.id), app.link(task.id, LINKABLE)
    for verb in ("pause", "cancel", "links"):
        assert said(client.post(f"/api/tasks/{task.id}/{verb}?link={read}", json={})) == (403, "read_only")
    assert said(client.post(f"/api/tasks/{task.id}/links?link={control}", json={})) == (403, "forbidden")
    assert client.post(f"/api/tasks/{task.id}/pause?link={control}").json["state"] == "paused"
    (entry,) = [each for each in task.log() if each["action"] == "paused"]
    assert entry["who"].startswith("link until 20")
    assert client.patch(f"/api/tasks/{task.id}?link={control}", json={"title": "x"}).json["title"] == "x"


def test_a_link_shows_no_traceback_and_no_names(app: AsyncTask, client: Client, ended: Callable[..., int]) -> None:
    task = app.task(ended("BUG-1"))
    (event,) = task.events()
    assert client.patch(f"/api/tasks/{task.id}", json={"title": "x"}, headers=ANN).status_code == 200
    job, log = f"/api/jobs/{event['job_id']}", f"/api/tasks/{task.id}/log"
    assert "in enroll" in client.get(job, headers=ANN).json["traceback"]
    assert client.get(log, headers=ANN).json["log"][0]["who"].startswith("ann ")
    link = f"?link={app.link(task.id, LINKABLE)}"
    shown = client.get(job + link).json
    assert (shown["traceback"], shown["messages"][-1]["message"]) == (None, event["messages"][-1]["message"])
    assert {each["who"] for each in client.get(log + link).json["log"]} == {""}


def test_a_link_works_beside_other_parameters_and_is_in_no_answer(app: AsyncTask, client: Client) -> None:
    task = app.submit("anything", list(range(5)))
    text = app.link(task.id)
    page = client.get(f"/api/tasks/{task.id}/events?limit=2&link={text}&status=enqueue")
    assert (page.status_code, len(page.json["events"])) == (200, 2)
    missing = client.get(f"/api/tasks/999?link={text}")
    unknown = client.get(f"/api/tasks/{task.id}?link={text}&nope=1")
    assert (missing.status_code, unknown.status_code) == (404, 422)
    assert unknown.json["instance"] == f"/api/tasks/{task.id}?nope=1"
    assert all(text not in answer.text for answer in (page, missing, unknown))
    for page_of in (f"/tasks/{task.id}", f"/jobs/{task.events()[0]['job_id']}"):
        shown_page = client.get(f"{page_of}?link={text}").text
        assert "data-verb" not in shown_page
        assert 'href="/"' not in shown_page


@pytest.mark.parametrize("text", ["", "nonsense", "7.r.1.x", "%ff", "x" * 5_000, "{own}&link={own}", "{other}"])
def test_a_link_that_is_none_is_refused_and_opens_no_login(app: AsyncTask, client: Client, text: str) -> None:
    task = app.submit("anything", [1])
    own = app.link(task.id)
    text = text.format(own=own, other=sign(Link(task.id, LINKABLE, 2**33), SECRET[::-1]))
    answer = client.get(f"/api/tasks/{task.id}?link={text}")
    assert said(answer) == (403, "invalid_link")
    assert "WWW-Authenticate" not in answer.headers
    assert own not in answer.text


def test_a_link_ends_and_the_polls_of_its_page_are_no_guesses(make_app: Callable[..., AsyncTask]) -> None:
    clock = SettableClock()
    app = make_app(link_secret=SECRET, clock=clock)
    task, client = app.submit("anything", [1]), client_of(app)
    link = read_link(app.link(task.id, expires_in=60), SECRET)
    assert link is not None
    now = clock.now() // 1_000_000
    for expires_at, status in ((now + 1, 200), (now, 403), (now - 1, 403)):
        text = sign(link._replace(expires_at=expires_at), SECRET)
        assert {client.get(f"/api/tasks/{task.id}?link={text}").status_code for _ in range(20)} == {status}


def test_guesses_of_links_are_slowed_down_with_those_of_tokens_and_not_logged_themselves(
    app: AsyncTask, client: Client
) -> None:
    task = app.submit("anything", [1])
    known, new = app.link(task.id), app.link(task.id, expires_in=60)
    url = f"/api/tasks/{task.id}"
    assert client.get(f"{url}?link={known}").status_code == 200
    codes: list[int] = []
    with capture_logs() as lines:
        while 429 not in codes:
            guess = sign(Link(task.id, LINKABLE, 2**33 + len(codes)), SECRET[::-1])
            codes.append(client.get(f"{url}?link={guess}").status_code)
            assert len(codes) < 1_000
    assert codes[:10] == [403] * 10
    assert {(each["event"], each["name"], each["path"]) for each in lines} == {("login_failed", "link", url)}
    assert "link=" not in str(lines)
    assert client.get(f"{url}?link={known}").status_code == 200, "it was valid from here before"
    refused = [
        client.get(f"{url}?link={new}"),
        client.get(url, headers={"Authorization": "Bearer ann-has-a-secret-of-her-own"}),
    ]
    assert {each.status_code for each in refused} <= {200, 429}, "one a second may be looked at"


def test_a_link_opens_a_server_without_a_login_from_elsewhere(make_app: Callable[..., AsyncTask]) -> None:
    app = make_app(link_secret=SECRET)
    task, elsewhere = app.submit("anything", [1]), {"environ_overrides": {"REMOTE_ADDR": "203.0.113.5"}}
    client, url = client_of(app), f"/api/tasks/{task.id}"
    assert said(client.get(url, **elsewhere)) == (403, "unprotected")
    assert client.get(f"{url}?link={app.link(task.id)}", **elsewhere).status_code == 200
    assert said(client.get(f"/api/tasks?link={app.link(task.id)}")) == (403, "forbidden"), "it is no more than the link"


def test_a_real_server_streams_and_polls_by_a_link_that_its_logs_do_not_have(tmp_path: Path) -> None:
    shop = Shop(tmp_path, tokens="ann=ann-has-a-secret-of-her-own", link_secret=SECRET, access_log=True)
    with shop.web() as (_, web), closing(AsyncTask(environ=shop.environ)) as app:
        app.worker(name="gated", retry=0)(lambda item: None)
        wait_for(lambda: answers(web["url"] + "/readyz"), "the server to be ready")
        task = app.submit("gated", [{"sku": "A"}], start_at="2999-01-01T00:00:00Z")
        text, place = app.link(task.id, LINKABLE), urlsplit(web["url"])
        with (
            closing(HTTPConnection(str(place.hostname), place.port, timeout=60)) as streams,
            closing(HTTPConnection(str(place.hostname), place.port, timeout=60)) as other,
        ):

            def ask(method: str, path: str) -> tuple[int, Any]:
                other.request(method, f"/api/tasks/{task.id}{path}{'&' if '?' in path else '?'}link={text}")
                answer = other.getresponse()
                return answer.status, json.loads(answer.read())

            streams.request("GET", f"/api/tasks/{task.id}/stream?link={text}")
            stream = streams.getresponse()
            assert (stream.status, stream.getheader("Content-Type")) == (200, "text/event-stream; charset=utf-8")
            status, progress = ask("GET", "")
            assert status == 200
            status, waited = ask("GET", f"?wait=0.2&version={progress['version']}")
            assert (status, waited["version"]) == (200, progress["version"])
            assert ask("POST", "/cancel")[1]["state"] == "cancelled"
            assert b'"state":"cancelled"' in stream.read()
            assert ask("POST", "/records")[0] == 404
    log = (tmp_path / "web.log").read_text()
    assert f'"path": "/api/tasks/{task.id}/stream"' in log
    assert '"name": "link until ' in log
    assert text not in log
    assert text.rpartition(".")[2] not in log


def test_a_stream_ends_with_the_link_that_opened_it(tmp_path: Path, make_app: Callable[..., AsyncTask]) -> None:
    """In both servers. Taken out: the end; the stream went on until the Task was done."""
    (folder := tmp_path / "real").mkdir()
    shop = Shop(folder, link_secret=SECRET)
    with shop.web() as (_, web), closing(AsyncTask(environ=shop.environ)) as app:
        app.worker(name="gated", retry=0)(lambda item: None)
        wait_for(lambda: answers(web["url"] + "/readyz"), "the server to be ready")
        task, place = app.submit("gated", [{"sku": "A"}], paused=True), urlsplit(web["url"])
        for seconds in (1, 5, 40):  # a slow machine may need more until the request is there
            with closing(HTTPConnection(str(place.hostname), place.port, timeout=100)) as connection:
                connection.request("GET", f"/api/tasks/{task.id}/stream?link={app.link(task.id, expires_in=seconds)}")
                stream = connection.getresponse()
                if stream.status == 200:
                    assert stream.read().count(b"data: ") == 1
                    break
        assert stream.status == 200
        assert not task.progress()["done"]
    clock = SettableClock()
    app = make_app(link_secret=SECRET, clock=clock)
    task = app.submit("anything", [1])
    text = sign(Link(task.id, LINKABLE, int(clock.seconds) + 2), SECRET)
    answer = client_of(app).get(f"/api/tasks/{task.id}/stream?link={text}", buffered=False)
    pieces = answer.iter_encoded()
    assert (next(pieces)[:6], b"data: " in next(pieces)) == (b"retry:", True)
    clock.seconds += 60
    assert list(pieces) == []
    answer.close()


# -- settings


@pytest.mark.parametrize("secret", ["short", "x" * 31, "x" * 257, "with a space " * 4, "\u00fc" * 40])
def test_a_secret_for_links_that_cannot_be_is_refused_without_showing_it(secret: str) -> None:
    with pytest.raises(ConfigError, match=r"link_secret.*token_urlsafe") as refused:
        Config(link_secret=secret)
    assert secret not in str(refused.value)
    config = Config(link_secret=SECRET)
    assert SECRET not in repr(config)
    assert (
        {each.shown for each in settings(config, {}) if each.name == "link_secret"}
        == {"***"}
        == {shown("link_secret", "x")}
    )
    with pytest.raises(ConfigError, match="not int"):
        Config(link_secret=123456789)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "origin",
    ["*", "null", "shop.example", "https://shop.example/", "https://Shop.example", "ftp://shop.example",
     "https://*.shop.example", "https://a@shop.example", "https://shop.example:", "https://shop.example:123456", "https://"],
)  # fmt: skip
def test_an_origin_that_cannot_be_is_refused_with_what_to_write(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed_origins.*https://shop\.example"):
        Config(allowed_origins=f"https://good.example {origin}")


def test_origins_are_those_that_browsers_send() -> None:
    config = Config(allowed_origins="https://a.example:443 http://b.example:80 http://localhost:5173 http://[::1]:8080")
    assert config.origins() == {
        "https://a.example", "http://b.example", "http://localhost:5173", "http://[::1]:8080"
    }  # fmt: skip
    assert replace(config, allowed_origins="").origins() == frozenset()


# -- pages of other origins

SHOP, EVIL = "https://shop.example", "https://evil.example"


@pytest.fixture
def open_to_shop(make_app: Callable[..., AsyncTask]) -> Client:
    return client_of(make_app(allowed_origins=f"{SHOP} http://localhost:5173", tokens="ann=ann-has-a-secret-of-her-own"))


def test_a_preflight_of_an_allowed_origin_is_answered_without_a_login(open_to_shop: Client) -> None:
    asks = {"Access-Control-Request-Method": "PATCH", "Access-Control-Request-Headers": "authorization,content-type"}
    for path in ("/api/tasks", "/api/tasks/7", "/api/tasks/7/pause"):
        answer = open_to_shop.options(path, headers={"Origin": SHOP, **asks})
        assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (204, SHOP)
        assert {"GET", "POST", "PATCH"} <= set(answer.headers["Access-Control-Allow-Methods"].split(", "))
        allowed = answer.headers["Access-Control-Allow-Headers"].lower()
        assert all(name in allowed for name in ("authorization", "content-type", "idempotency-key", "if-none-match"))
        assert "Origin" in answer.headers["Vary"]
        for origin in (EVIL, "null", "https://shop.example.evil.example", f"{SHOP}:444"):
            refused = open_to_shop.options(path, headers={"Origin": origin, **asks})
            assert refused.status_code == 401
            assert "Access-Control-Allow-Origin" not in refused.headers
            assert "Origin" in refused.headers["Vary"]


def test_a_page_of_an_allowed_origin_reads_and_changes_and_one_of_another_does_not(open_to_shop: Client) -> None:
    ann = {"Authorization": "Bearer ann-has-a-secret-of-her-own"}
    body = {"worker": "anything", "items": [1]}
    for origin, site in ((SHOP, "cross-site"), (SHOP, "same-site"), ("http://localhost:5173", "cross-site")):
        from_page = {"Origin": origin, "Sec-Fetch-Site": site}
        made = open_to_shop.post("/api/tasks", json=body, headers={**ann, **from_page})
        assert (made.status_code, made.headers["Access-Control-Allow-Origin"]) == (202, origin)
        assert {"Location", "ETag", "Retry-After"} <= set(made.headers["Access-Control-Expose-Headers"].split(", "))
        read = open_to_shop.get(made.json["links"]["self"], headers={**ann, **from_page})
        assert (read.status_code, read.headers["Access-Control-Allow-Origin"]) == (200, origin)
        stranger = open_to_shop.get("/api/tasks", headers=from_page)
        assert (stranger.status_code, stranger.headers["Access-Control-Allow-Origin"]) == (401, origin)
    for origin in (EVIL, "null", f"{SHOP}.evil.example"):
        from_page = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
        assert said(open_to_shop.post("/api/tasks", json=body, headers={**ann, **from_page})) == (403, "cross_site")
        assert "Access-Control-Allow-Origin" not in open_to_shop.get("/api/tasks", headers={**ann, **from_page}).headers
    assert "Access-Control-Allow-Origin" not in open_to_shop.get("/api/tasks", headers=ann).headers


def test_without_allowed_origins_no_answer_speaks_of_them(app: AsyncTask, client: Client) -> None:
    preflight = {"Origin": SHOP, "Access-Control-Request-Method": "POST"}
    for answer in (client.options("/api/tasks", headers=preflight), client.get("/api/tasks", headers={"Origin": SHOP})):
        assert not [name for name, _ in answer.headers if name.startswith("Access-Control")]
