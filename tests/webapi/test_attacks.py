"""What an attacker tries against every route: changes from another site with somebody's session, false links, others' ids,
others' sessions, other pages around ours, and secrets in answers."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urljoin, urlsplit

import pytest
from support.webshop import Client, as_user, calls, client_of, said

from asynctask import AsyncTask
from asynctask.access import LINKABLE, Link, sign, sign_session
from webapi import User
from webapi.security import FILES, OPEN, SESSION, _digest

LINK_SECRET, WEBHOOK_SECRET = (
    "signs-the-links-of-this-server-" * 2,
    "whsec_" + base64.b64encode(b"signs-the-webhooks-of-this-server").decode(),
)
SECRETS = {name: f"{name}-has-a-secret-of-its-own" for name in ("chief", "shop", "rival")}
PAGE = {"Accept": "text/html,*/*;q=0.8"}
PROBES = frozenset({"health.healthz", "health.readyz"})


@pytest.fixture
def guarded(make_app: Callable[..., AsyncTask]) -> AsyncTask:
    return make_app(
        tokens=f"chief={SECRETS['chief']} shop@blue={SECRETS['shop']} rival@red={SECRETS['rival']}",
        link_secret=LINK_SECRET,
        webhook_secret=WEBHOOK_SECRET,
        webhook_url="https://hooks.example.com/in/a-secret-place",
    )


def signed_in(app: AsyncTask, name: str) -> Client:
    """A browser whose user has signed in."""
    client = client_of(app)
    answer = client.post("/login", data={"token": SECRETS[name]}, content_type="multipart/form-data")
    assert answer.status_code == 303
    return client


def routes(app: AsyncTask, task: Any) -> Iterator[tuple[str, str, str]]:
    """Every route, with the ids of this Task and its first job."""
    yield from calls(app, task_id=task.id, job_id=task.events()[0]["job_id"])


# -- another site


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://sub.localhost", "Sec-Fetch-Site": "same-site"},
    ],
    ids=["an older browser", "a sandboxed frame", "a form without Origin", "another name of the site"],
)
def test_no_route_changes_anything_for_a_page_of_another_site_that_has_the_session(
    guarded: AsyncTask, elsewhere: dict[str, str]
) -> None:
    """Taken out: ``_refuse_other_sites``."""
    task, client = guarded.submit("anything", [1]), signed_in(guarded, "chief")
    before, walked = task.progress(), 0
    for _, method, path in routes(guarded, task):
        if method == "GET":
            continue
        bodies: tuple[dict[str, Any], ...] = (
            {"json": {}},
            {"data": {"a": "b"}},
            {"data": "{}", "content_type": "text/plain"},
        )
        for sent in bodies:
            answer = client.open(path, method=method, headers=elsewhere, **sent)
            assert said(answer) == (403, "cross_site"), (method, path)
            assert "Set-Cookie" not in answer.headers
            walked += 1
    assert walked >= 3 * 50
    assert task.progress() == before
    assert client.get("/api/tasks").status_code == 200, "nobody signed her out"


def test_no_route_that_a_link_or_an_image_can_open_changes_anything(guarded: AsyncTask) -> None:
    """A browser sends the session with a GET of another site."""
    task, client = guarded.submit("anything", [1]), signed_in(guarded, "chief")
    before, log, dead = task.progress(), task.log(), guarded.operations.dead()
    for endpoint, method, path in routes(guarded, task):
        if method == "GET" and endpoint not in {"tasks.stream", *FILES}:
            for header in ("X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"):
                client.get(f"{path}?_method=POST", headers={header: "POST", "Sec-Fetch-Site": "cross-site"})
    assert (task.progress(), task.log(), guarded.operations.dead()) == (before, log, dead)
    assert len(guarded.tasks()) == 1


def test_no_page_of_another_site_shows_one_of_this_in_a_frame(guarded: AsyncTask) -> None:
    """Taken out: the headers of every answer; those of errors, redirects and "not modified", too."""
    task, client = guarded.submit("anything", [1]), signed_in(guarded, "chief")
    answers = [client.get(path, headers=PAGE) for path in ("/nowhere", "/tasks/999", "/jobs/none", "/api/tasks?limit=x")]
    answers += [client_of(guarded).get("/", headers=PAGE), client.post("/logout"), signed_in(guarded, "chief").get("/")]
    client = signed_in(guarded, "chief")
    tag = client.get("/api/tasks").headers["ETag"]
    answers.append(client.get("/api/tasks", headers={"If-None-Match": tag}))
    for endpoint, method, path in routes(guarded, task):
        if method == "GET" and endpoint != "tasks.stream":
            answers.append(client.get(path, headers=PAGE))
    assert {answer.status_code for answer in answers} >= {200, 303, 304, 401, 404, 422}
    for answer in answers:
        headers, path = answer.headers, answer.request.path
        assert headers.getlist("X-Frame-Options") == ["DENY"], path
        (policy,) = headers.getlist("Content-Security-Policy")
        assert {"default-src 'self'", "frame-ancestors 'none'", "form-action 'self'", "base-uri 'none'"} <= set(
            policy.split("; ")
        )
        assert headers["X-Content-Type-Options"] == "nosniff", path
        foreign = path.startswith("/client/")
        assert headers["Cross-Origin-Resource-Policy"] == ("cross-origin" if foreign else "same-origin"), path
        assert ("Access-Control-Allow-Origin" in headers) is foreign, path


# -- links


@pytest.mark.parametrize("kind", ["expired", "forged", "of more rights", "of another Task", "of a session"])
def test_no_route_takes_a_link_that_is_none(guarded: AsyncTask, kind: str) -> None:
    """Taken out: the comparison with the end, and that of the signature."""
    task, other = guarded.submit("anything", [1]), guarded.submit("anything", [1])
    now = guarded.clock.now() // 1_000_000
    good = sign(Link(task.id, frozenset({"read"}), now + 600), LINK_SECRET)
    text = {
        "expired": sign(Link(task.id, LINKABLE, now), LINK_SECRET),
        "forged": sign(Link(task.id, LINKABLE, now + 600), LINK_SECRET[1:]),
        "of more rights": good.replace(".r.", ".rc."),
        "of another Task": good.replace(f"{task.id}.", f"{other.id}.", 1),
        "of a session": sign_session(now + 600, LINK_SECRET.encode()),
    }[kind]
    walked, client = 0, client_of(guarded)
    before = (task.progress(), other.progress())
    for each in (task, other):
        for endpoint, method, path in routes(guarded, each):
            if endpoint in OPEN | PROBES:
                continue
            # Each address may guess ten times.
            address = {"REMOTE_ADDR": f"198.51.{walked // 250}.{walked % 250}"}
            answer = client.open(f"{path}?link={text}", method=method, json={}, environ_overrides=address)
            assert said(answer) == (403, "invalid_link"), (method, path)
            assert text not in answer.text
            walked += 1
        if kind != "of another Task":
            break
    assert walked >= 80
    assert (task.progress(), other.progress()) == before


# -- another owner


def test_no_query_and_no_body_reaches_the_tasks_of_another_owner(guarded: AsyncTask) -> None:
    """Ids in the path are walked in test_access. Taken out: the owner that lists, searches and options are held to."""

    @guarded.worker(search=["sku"])
    def checked(item: dict[str, Any]) -> None:
        """Look at it."""

    red = guarded.submit("checked", [{"sku": "SKU-1"}, {"sku": "SKU-2"}], owner="red", title="Of the rival")
    own = guarded.submit("checked", [{"sku": "SKU-3"}], owner="blue")
    client, chief = signed_in(guarded, "shop"), signed_in(guarded, "chief")
    stranger = red.events()[0]["job_id"]
    for query in (f"ids={red.id}", f"parent={red.id}", "owner=red", "state=running&owner=red", f"ids={own.id},{red.id}"):
        answer = client.get(f"/api/tasks?{query}")
        assert answer.status_code == 200, query
        assert [each["task_id"] for each in answer.json["tasks"] if each["task_id"] != own.id] == [], query
    for query in ("q=SKU-1", "q=SKU*", "q=SKU-1&owner=red", "q=SKU-1&worker=checked", "q=SKU-1&field=sku"):
        found = client.get(f"/api/search?{query}")
        assert found.status_code == 200, query
        assert "Of the rival" not in found.text
        assert red.id not in {each["task_id"] for each in found.json["events"]}, query
    assert len(chief.get("/api/search?q=SKU-1").json["events"]) == 1
    assert client.get(f"/api/tasks/{own.id}/events?after={stranger}").status_code in (200, 422)
    assert "SKU-1" not in client.get(f"/api/tasks/{own.id}/events?after={stranger}").text
    for field in ("resubmit_of", "parent"):
        body = {"worker": "checked", "items": [{"sku": "X"}], field: red.id}
        nobody = {**body, field: 999}
        refused, missing = client.post("/api/tasks", json=body), client.post("/api/tasks", json=nobody)
        assert (refused.status_code, refused.json["code"]) == (422, missing.json["code"])
        assert refused.text.replace(str(red.id), "999") == missing.text.replace(str(red.id), "999"), field
    for page in ("/", "/?owner=red", "/search?q=SKU-1"):
        assert "Of the rival" not in client.get(page, headers=PAGE).text


def test_a_tag_of_one_user_keeps_no_answer_from_another_and_shows_none(guarded: AsyncTask) -> None:
    task = guarded.submit("anything", [1], owner="blue")
    own, rival, chief = (signed_in(guarded, name) for name in ("shop", "rival", "chief"))
    tagged = 0
    for endpoint, method, path in routes(guarded, task):
        if method != "GET" or endpoint in FILES | {"tasks.stream"}:
            continue
        tag = own.get(path).headers.get("ETag")
        if tag is None:
            continue
        tagged += 1
        asked = {"If-None-Match": tag}
        answer, plain = rival.get(path, headers=asked), rival.get(path)
        if answer.status_code == 304:
            assert plain.data == own.get(path).data, f"{path} is not the same to both"
        else:
            assert answer.status_code == plain.status_code, path
        assert chief.get(path).cache_control.public is not True
    assert tagged >= 8
    assert rival.get("/api/tasks", headers={"If-None-Match": own.get("/api/tasks").headers["ETag"]}).json["tasks"] == []


# -- sessions


def test_a_session_of_before_the_login_is_worth_nothing_after_it(guarded: AsyncTask) -> None:
    """Somebody put a cookie into the browser, and waits for its user to sign in."""
    now = guarded.clock.now() // 1_000_000
    rivals = sign_session(now + 600, _digest(SECRETS["rival"]))
    for planted in ("chosen-by-the-attacker", f"{now + 600}.{'A' * 43}", rivals):
        client = client_of(guarded)
        client.set_cookie(SESSION, planted)
        answer = client.post("/login", data={"token": SECRETS["chief"]}, content_type="multipart/form-data")
        assert answer.status_code == 303
        assert planted not in answer.headers["Set-Cookie"]
        assert client.get("/api/queues").status_code == 200
        attacker = client_of(guarded)
        attacker.set_cookie(SESSION, planted)
        assert attacker.get("/api/queues").status_code == (403 if planted == rivals else 401)


def test_a_copy_of_a_session_ends_when_its_user_signs_out(guarded: AsyncTask) -> None:
    """Taken out: the look at the sessions that have ended."""
    client = signed_in(guarded, "chief")
    cookie = client.get_cookie(SESSION)
    assert cookie is not None
    assert client.post("/logout").status_code == 303
    client.set_cookie(SESSION, cookie.value)
    for _ in range(20):
        assert client.get("/api/tasks").status_code == 401
    # It was no guess, and a login within the same second is another session.
    answer = client.post("/login", data={"token": SECRETS["chief"]}, content_type="multipart/form-data")
    assert answer.status_code == 303
    assert client.get("/api/tasks").status_code == 200


def test_guesses_in_the_form_are_slowed_down_and_one_that_is_right_tells_nothing_then(guarded: AsyncTask) -> None:
    client = client_of(guarded)

    def send(secret: str) -> Any:
        return client.post("/login", data={"token": secret}, content_type="multipart/form-data", headers=PAGE)

    assert {send(f"a-guess-of-somebody-{n:03d}").status_code for n in range(10)} == {401}
    for secret in ("another-guess-of-somebody", SECRETS["chief"]):
        answer = send(secret)
        assert (answer.status_code, "Set-Cookie" in answer.headers) == (429, False)
        assert int(answer.headers["Retry-After"]) >= 1
    assert client.get("/api/tasks", headers={"Authorization": f"Bearer {SECRETS['chief']}"}).status_code == 429


PLACES = [
    "//evil.example", "///evil.example", "/\\evil.example", "\\\\evil.example", "\\/evil.example", "https:evil.example",
    "https://evil.example", "HTTPS://evil.example", "javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,evil",
    "/%09/evil.example", "/\t/evil.example", "/\n/evil.example", "/%2f/evil.example", "%2f%2fevil.example",
    "/.//evil.example", "/..//evil.example", "/@evil.example", "@evil.example", ".evil.example", "//evil.example/tasks",
    "//evil.example%2f@localhost/", "http://localhost@evil.example", "/\u200b/evil.example", "/\x00/evil.example",
    "\x01//evil.example", "//localhost:80@evil.example", "/tasks\r\nLocation: //evil.example", "/\u2028/evil.example",
]  # fmt: skip


def test_signing_in_leads_to_this_site_whatever_the_form_asks_for(guarded: AsyncTask) -> None:
    """Taken out: ``_is_path``. A browser reads a backslash as a slash, and drops tabs and line ends."""
    client = client_of(guarded)
    for after in PLACES:
        form = {"token": SECRETS["chief"], "after": after}
        answer = client.post("/login", data=form, content_type="multipart/form-data")
        (place,) = answer.headers.getlist("Location")
        assert answer.status_code == 303
        as_browser = re.sub(r"[\t\r\n]", "", place).replace("\\", "/")
        found = urlsplit(urljoin("http://localhost/login", as_browser))
        assert (found.scheme, found.netloc) == ("http", "localhost"), place
        assert "evil" not in client.get("/login", query_string={"after": after, "next": after}).text


# -- secrets


def test_no_answer_has_a_secret_of_the_server(guarded: AsyncTask) -> None:
    task, client = guarded.submit("anything", [1], owner="blue"), client_of(guarded)
    login = {"Authorization": f"Bearer {SECRETS['chief']}"}
    hidden = [*SECRETS.values(), LINK_SECRET, WEBHOOK_SECRET, "a-secret-place", str(guarded.config.data_dir)]
    walked = 0
    for endpoint, method, path in routes(guarded, task):
        if endpoint == "tasks.stream" or endpoint in FILES:
            continue
        for headers in (login, {**login, **PAGE}):
            sent: dict[str, Any] = {} if method == "GET" else {"json": {"nonsense": 1}}
            answer = client.open(path, method=method, headers=headers, **sent)
            text = answer.data.decode("latin-1") + str(answer.headers)
            assert [secret for secret in hidden if secret in text] == [], (method, path)
            assert "Traceback (most recent" not in text, (method, path)
            assert answer.status_code < 500, (method, path)
            walked += 1
    assert walked >= 150


def test_a_user_who_may_see_nothing_is_told_of_nothing_by_the_frame_of_a_page(app: AsyncTask) -> None:
    """A page of an error has the navigation, with numbers, only for who may see them."""
    nobody, own = as_user(app, None), as_user(app, User("ann", "blue"))
    for client in (nobody, own):
        for path in ("/failures", "/queues", "/workers", "/schedules", "/jobs", "/nowhere"):
            page = client.get(path, headers=PAGE)
            assert page.status_code in (401, 403, 404), path
            assert 'href="/failures"' not in page.text, path
