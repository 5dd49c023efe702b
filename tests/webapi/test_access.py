"""Who may do what: the right that each route needs, and that another owner's Tasks do not exist for a user of one owner."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask, Request, abort, redirect, session
from support.webshop import as_user, calls, client_of, said
from support.world import World, numbers
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client as WsgiClient

from asynctask import AsyncTask
from asynctask.access import RIGHTS
from asynctask.config import Config, settings, shown
from asynctask.errors import ConfigError
from webapi import User, create_app
from webapi.access import OWN, PUBLIC, right_for
from webapi.security import FILES, OPEN

SECRETS = {name: f"{name}-has-a-secret-of-its-own" for name in ("shop", "rival", "reader", "chief", "drop")}
TOKENS = (
    f"shop@blue={SECRETS['shop']} rival@red={SECRETS['rival']} reader:read@blue={SECRETS['reader']}"
    f" chief={SECRETS['chief']} drop:submit@blue={SECRETS['drop']}"
)


def login(name: str) -> dict[str, dict[str, str]]:
    return {"headers": {"Authorization": f"Bearer {SECRETS[name]}"}}


@pytest.fixture
def guarded(make_app: Callable[..., AsyncTask]) -> AsyncTask:
    return make_app(tokens=TOKENS)


# -- all routes


def test_every_route_hides_the_tasks_and_jobs_of_another_owner(guarded: AsyncTask) -> None:
    """Taken out: the look at the owner in ``_admit``."""
    task = guarded.submit("anything", [1], owner="red")
    (event,) = task.events()
    before, client = task.progress(), client_of(guarded)
    walked = 0
    for endpoint, method, path in calls(guarded, task_id=task.id, job_id=event["job_id"]):
        if str(task.id) not in path.split("/") and event["job_id"] not in path:
            continue
        walked += 1
        answer = client.open(path, method=method, json={}, **login("shop"))
        expected = (403, "forbidden") if right_for(endpoint, method) == "operate" else (404, "not_found")
        if endpoint.startswith("pages."):
            expected = (404, "")
        assert said(answer) == expected, (method, path)
        if expected[0] == 404:
            other = path.replace(f"/{task.id}", "/999").replace(event["job_id"], "none")
            missing = client.open(other, method=method, json={}, **login("shop"))
            text = missing.text.replace("999", str(task.id)).replace("none", event["job_id"])
            assert text == answer.text.replace("none", event["job_id"]), f"{method} {path} tells that there is one"
    assert walked >= 25
    assert task.progress() == before
    assert not [entry for entry in task.log() if "shop" in entry["who"]]


def test_every_route_that_is_of_no_task_is_refused_to_a_user_of_one_owner_unless_it_is_known_to_show_nothing(
    guarded: AsyncTask,
) -> None:
    client = client_of(guarded)
    for endpoint, method, path in calls(guarded, task_id=1, job_id="none"):
        if "/1" in path or "/none" in path or endpoint in OPEN:
            continue
        answer = client.open(path, method=method, json={}, **login("shop"))
        if endpoint in OWN | PUBLIC:
            assert answer.status_code in (200, 404, 422), (method, path)  # 404: a template of no worker
        else:
            assert said(answer) == (403, "forbidden"), (method, path)


@pytest.mark.parametrize("right", RIGHTS)
def test_every_route_refuses_a_user_without_its_right_whatever_the_request_names(app: AsyncTask, right: str) -> None:
    others = frozenset(RIGHTS) - {right, "operate"}
    client = as_user(app, User("ann", rights=others))
    task = app.submit("anything", [1])
    (event,) = task.events()
    for task_id, job_id in ((task.id, event["job_id"]), (999, "none")):
        for endpoint, method, path in calls(app, task_id=task_id, job_id=job_id):
            if right_for(endpoint, method) == right and endpoint not in PUBLIC:
                answer = client.open(path, method=method, json={})
                assert said(answer) == (403, "forbidden"), (method, path)
                assert right in answer.json["detail"]
    assert not app.progress(task.id)["done"]


def test_a_user_who_only_reads_is_told_so_by_every_route_that_changes_something(app: AsyncTask) -> None:
    client = as_user(app, User("eve", rights={"read"}))
    for endpoint, method, path in calls(app, task_id=1, job_id="none"):
        if method != "GET" and endpoint not in OPEN:
            assert said(client.open(path, method=method, json={})) == (403, "read_only"), (method, path)


def test_every_route_but_the_probes_and_the_files_of_the_page_answers_nobody_with_401(
    app: AsyncTask, guarded: AsyncTask
) -> None:
    for client, asks in ((as_user(app, None), False), (client_of(guarded), True)):
        for endpoint, method, path in calls(app, task_id=1, job_id="none"):
            answer = client.open(path, method=method, json={})
            if endpoint in ("health.healthz", "health.readyz", *FILES):
                assert answer.status_code == 200
            elif endpoint in OPEN:
                assert answer.status_code != 401, "it is how somebody becomes known"
            else:
                assert said(answer) == (401, "unauthorized"), (method, path)
                ways = {way.partition(" ")[0] for way in answer.headers.getlist("WWW-Authenticate")}
                assert ways == ({"Basic", "Bearer"} if asks else {"Bearer"}), "a browser asks only where there are tokens"


def test_no_shared_cache_keeps_an_answer_for_somebody_else(guarded: AsyncTask) -> None:
    """It may know users by a cookie, and so take the answer for everybody's. Taken out: the header of each answer."""
    task = guarded.submit("anything", [1], owner="blue")
    (event,) = task.events()
    walked = 0
    for endpoint, method, path in calls(guarded, task_id=task.id, job_id=event["job_id"]):
        if method == "GET" and endpoint not in FILES | {"tasks.stream"}:
            answer = client_of(guarded).get(path, **login("chief"))
            walked += 1
            assert answer.cache_control.no_store or answer.cache_control.no_cache, path
    assert walked >= 30


def test_a_route_that_nobody_declared_needs_the_right_to_operate() -> None:
    assert right_for("tasks.brand_new", "POST") == "operate"
    assert right_for("tasks.brand_new", "GET") == "read"
    assert "tasks.brand_new" not in OWN | PUBLIC


# -- what a user of one owner has


@pytest.mark.each_database(reason="owners are compared by each one")
def test_a_list_of_tasks_has_those_of_the_users_owner_only(world: World) -> None:
    app = world.app()
    ours = app.submit("note", numbers(1), owner="blue").id
    for owner in ("red", "Blue", "blue2", None):
        app.submit("note", numbers(1), owner=owner)
    client = as_user(app, User("ann", "blue"))

    def listed(query: str) -> list[int]:
        return [each["task_id"] for each in client.get(f"/api/tasks{query}").json["tasks"]]

    assert listed("") == listed("?owner=blue") == listed("?ids=1,2,3,4,5") == [ours]
    assert listed("?owner=red") == listed("?owner=Blue") == listed("?ids=2,3") == []
    assert len(as_user(app, User("chief")).get("/api/tasks").json["tasks"]) == 5
    statuses = [client.get(f"/api/tasks/{task_id}").status_code for task_id in range(ours, ours + 5)]
    assert statuses == [200, 404, 404, 404, 404]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("tasks", {"json": {"worker": "anything", "items": [{"n": 1}]}}),
        ("tasks", {"json": {"worker": "anything", "items": [{"n": n} for n in range(1_500)]}}),
        ("tasks", {"json": {"jobs": [{"worker": "anything", "item": {"n": 1}}]}}),
        ("tasks", {"data": {"worker": "anything", "file": (b"n\n1\n", "list.csv")}}),
        ("tasks?worker=anything", {"data": b"n\n1\n", "content_type": "text/csv"}),
        ("exports", {"json": {"worker": "rows", "shards": [1]}}),
    ],
    ids=["items", "a list that is split", "jobs", "form", "raw", "export"],
)
def test_a_submission_is_of_the_users_owner_and_its_log_names_the_user(
    guarded: AsyncTask, path: str, body: dict[str, Any]
) -> None:
    @guarded.export(columns=["n"])
    def rows(shard: int) -> list[list[int]]:
        return [[shard]]

    def send(owner: str | None) -> Any:
        where, sent = path, dict(body)
        form, said_owner = sent.get("data"), {} if owner is None else {"owner": owner}
        if isinstance(form, dict):
            content, name = form["file"]
            sent["data"] = {**form, **said_owner, "file": (io.BytesIO(content), name)}
        elif "json" in sent:
            sent["json"] = {**sent["json"], **said_owner}
        elif owner is not None:
            where += f"&owner={owner}"
        return client_of(guarded).post(f"/api/{where}", **sent, **login("shop"))

    for owner in (None, "blue"):
        answer = send(owner)
        assert (answer.status_code, answer.json["owner"]) == (202, "blue"), answer.json
        log = guarded.task(answer.json["task_id"]).log()
        assert [each["who"] for each in log if each["action"] == "submitted"] == ["shop (web 127.0.0.1)"]
    refused = send("red")
    assert (refused.status_code, refused.json["errors"][0]["column"]) == (422, "owner")
    assert guarded.tasks(owner="red") == []


def test_a_correction_of_another_owners_task_is_one_of_no_task(guarded: AsyncTask) -> None:
    task = guarded.submit("anything", [1], owner="red")

    def correct(number: int) -> Any:
        form = {"worker": "anything", "resubmit_of": str(number), "file": (io.BytesIO(b"row,n\n1,1\n"), "list.csv")}
        return client_of(guarded).post("/api/tasks", data=form, **login("shop"))

    of_another, of_none = correct(task.id), correct(999)
    assert of_another.status_code == of_none.status_code == 422
    assert of_another.json["detail"] == of_none.json["detail"].replace("999", str(task.id))


def test_a_parent_of_another_owner_is_no_task(guarded: AsyncTask) -> None:
    task = guarded.submit("anything", [1], owner="red")
    client = client_of(guarded)

    def below(number: int) -> Any:
        return client.post("/api/tasks", json={"worker": "anything", "items": [1], "parent": number}, **login("shop"))

    of_another, of_none = below(task.id), below(999)
    assert of_another.status_code == of_none.status_code == 422
    assert of_another.json["detail"] == of_none.json["detail"].replace("999", str(task.id))
    assert task.progress()["children"] is None
    assert client.get(f"/api/tasks?parent={task.id}", **login("shop")).json["tasks"] == []
    own = guarded.submit("anything", [1], owner="blue")
    assert (below(own.id).status_code, below(own.id).json["parent"]) == (202, own.id)


def test_an_idempotency_key_of_another_owner_is_another_key(guarded: AsyncTask) -> None:
    client, body = client_of(guarded), {"worker": "anything", "items": [1]}
    made = []
    for name in ("shop", "rival", "shop"):
        headers = {**login(name)["headers"], "Idempotency-Key": "monday"}
        made.append(client.post("/api/tasks", json=body, headers=headers).json["task_id"])
    assert made[0] == made[2] != made[1]


def test_who_submits_only_gets_an_answer_and_sees_nothing_else(guarded: AsyncTask) -> None:
    client = client_of(guarded)
    made = client.post("/api/tasks", json={"worker": "anything", "items": [1]}, **login("drop"))
    assert (made.status_code, made.json["owner"]) == (202, "blue")
    assert said(client.get(made.json["links"]["self"], **login("drop"))) == (403, "forbidden")


def test_a_user_of_one_owner_works_with_the_jobs_of_its_tasks_and_with_no_others(guarded: AsyncTask) -> None:
    client = client_of(guarded)
    task = guarded.submit("anything", [1], owner="blue", on_complete="anything")
    (event,) = task.events()
    lone = guarded.perform("anything", {"n": 1})
    assert client.get(f"/api/jobs/{event['job_id']}", **login("shop")).json["task_id"] == task.id
    assert said(client.get(f"/api/jobs/{lone}", **login("shop"))) == (404, "not_found")
    assert said(client.post(f"/api/jobs/{lone}/delete", **login("shop"))) == (404, "not_found")
    alone = client.post("/api/jobs", json={"worker": "anything", "item": {}}, **login("shop"))
    assert said(alone) == (403, "forbidden")
    assert "submit a list of one item" in alone.json["detail"]
    assert client.post(f"/api/jobs/{event['job_id']}/delete", **login("shop")).json["status"] == "cancelled"
    assert {each["who"] for each in task.log()} >= {"shop (web 127.0.0.1)"}
    launcher = guarded.launcher(concurrency=1)
    launcher.start()
    try:
        assert task.wait(timeout=120)["done"]
    finally:
        launcher.stop()
    (called,) = task.progress()["callbacks"]
    assert client.get(f"/api/jobs/{called['job_id']}", **login("shop")).json["callback_of"] == task.id
    assert said(client.get(f"/api/jobs/{called['job_id']}", **login("rival"))) == (404, "not_found")


@pytest.mark.parametrize(
    ("user", "form", "buttons", "jobs"),
    [
        (User("chief"), True, True, True),
        (User("ann", "blue"), True, True, False),
        (User("eve", "blue", {"read"}), False, False, False),
        (User("bob", "blue", {"read", "submit"}), True, False, False),
        (User("tim", "blue", {"read", "control"}), False, True, False),
    ],
    ids=lambda value: value.name if isinstance(value, User) else "",
)
def test_pages_offer_what_their_reader_may_do(app: AsyncTask, user: User, form: bool, buttons: bool, jobs: bool) -> None:
    task = app.submit("anything", [1], owner="blue")
    (event,) = task.events()
    client = as_user(app, user)
    home, page, job = (client.get(path).text for path in ("/", f"/tasks/{task.id}", f"/jobs/{event['job_id']}"))
    assert ('href="/new"' in home, 'id="correct"' in page) == (form, form)
    assert client.get("/new").status_code == (200 if form else 403)
    assert ('data-verb="cancel"' in page, 'id="knobs"' in page, 'data-verb="kill"' in job) == (buttons,) * 3
    assert ("data-may-control" in page) is buttons
    assert {'href="/jobs"' in text for text in (home, page, job)} == {jobs}
    assert ('href="/jobs"' in client.get("/jobs/none").text) is jobs


# -- tokens


def test_a_token_has_rights_and_an_owner() -> None:
    found = {token.user.name: token.user for token in Config(tokens=TOKENS).access()}
    assert found["shop"] == User("shop", "blue", {"read", "submit", "control"})
    assert found["reader"] == User("reader", "blue", {"read"})
    assert found["chief"] == User("chief", None, {"operate"})
    assert all(found["chief"].may(right) for right in RIGHTS)
    (several,) = Config(tokens=f"x:read,control@a:b/c@d={'s' * 16}").access()
    assert several.user == User("x", "a:b/c@d", {"read", "control"})
    assert shown("tokens", f"x:read@blue={'s' * 16}") == "x:read@blue=***"
    assert {each.shown for each in settings(Config(), {}) if each.name == "allow_unprotected"} == {False}


@pytest.mark.parametrize(
    "entry", ["x:=", "x:reads=", "x:read,=", "x@=", "x:operate@blue=", "x:read:submit=", "x:READ=", "x:read;submit="]
)
def test_a_token_with_rights_or_an_owner_that_cannot_be_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="read, submit, control, operate"):
        Config(tokens=entry + "s" * 16)


@pytest.mark.parametrize(
    "given",
    [
        {"name": ""}, {"name": "a\nb"}, {"name": "x" * 201}, {"name": 7}, {"owner": ""}, {"owner": 7}, {"owner": "a\0"},
        {"rights": "read"}, {"rights": {"write"}}, {"owner": "blue", "rights": {"operate"}}, {"owner": "x" * 256},
        {"owner": " blue"},
    ],
)  # fmt: skip
def test_a_user_that_cannot_be_is_none(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"user's (name|owner|rights)|operate"):
        User(**{"name": "ann", **given})


# -- in another application


@pytest.fixture
def host(app: AsyncTask) -> WsgiClient:
    """A shop with a login of its own, which has the server at /bulk."""
    shop = Flask("shop")
    shop.secret_key = "not in production"

    @shop.get("/login/<name>")
    def log_in(name: str) -> str:
        session["name"] = name
        return ""

    def authorize(request: Request) -> User | None:
        with shop.request_context(request.environ):
            name = session.get("name")
        if name is None and request.path.startswith("/tasks"):
            abort(redirect("/login"))
        return None if name is None else User(name, owner=f"shop of {name}")

    shop.wsgi_app = DispatcherMiddleware(  # type: ignore[method-assign]
        shop.wsgi_app, {"/bulk": create_app(app, authorize=authorize)}
    )
    return WsgiClient(shop)


def test_the_login_of_another_application_decides(app: AsyncTask, host: WsgiClient) -> None:
    assert host.get("/bulk/api/tasks").status_code == 401
    moved = host.get("/bulk/tasks/1")
    assert (moved.status_code, moved.headers["Location"]) == (302, "/login")
    host.get("/login/ann")
    made: Any = host.post("/bulk/api/tasks", json={"worker": "anything", "items": [1]}).json
    assert made["owner"] == "shop of ann"
    assert [each["who"] for each in app.task(made["task_id"]).log() if each["who"]] == ["ann (web unknown)"]
    assert host.get(made["links"]["ui"]).status_code == 200
    host.get("/login/bob")
    assert host.get(made["links"]["self"]).status_code == 404
    stranger = host.post("/bulk/api/tasks", json={}, headers={"Origin": "https://evil.example"})
    assert (stranger.status_code, (stranger.json or {})["code"]) == (403, "cross_site")


@pytest.mark.parametrize("wrong", [True, "ann", {"name": "ann"}, object()])
def test_an_authorize_that_returns_no_user_lets_nobody_in(app: AsyncTask, wrong: Any) -> None:
    assert client_of(app, authorize=lambda _: wrong).get("/api/tasks").status_code == 500


def test_an_authorize_that_raises_lets_nobody_in(app: AsyncTask) -> None:
    def broken(_: Request) -> User | None:
        raise KeyError("a bug of the host")

    answer = client_of(app, authorize=broken).get("/api/tasks")
    assert said(answer) == (500, "internal_error")
    assert "a bug of the host" not in answer.text


def test_tokens_are_known_beside_authorize(guarded: AsyncTask) -> None:
    client = client_of(guarded, authorize=lambda request: User("ann", "red") if "X-Ann" in request.headers else None)
    task = guarded.submit("anything", [1], owner="red")
    assert (
        client.get(f"/api/tasks/{task.id}", headers={"X-Ann": "1", "Authorization": "Bearer ann's own"}).status_code == 200
    )
    assert client.get(f"/api/tasks/{task.id}", **login("chief")).status_code == 200
    assert client.get(f"/api/tasks/{task.id}", **login("shop")).status_code == 404
    assert client.get(f"/api/tasks/{task.id}").status_code == 401


# -- without a login

HERE = {"environ_overrides": {"REMOTE_ADDR": "127.0.0.1"}}


@pytest.mark.parametrize(
    "how",
    [
        {"environ_overrides": {"REMOTE_ADDR": "203.0.113.5"}},
        {"environ_overrides": {"REMOTE_ADDR": "172.17.0.1"}},
        {"environ_overrides": {"REMOTE_ADDR": ""}},
        {**HERE, "headers": {"Host": "tasks.example"}},
        {**HERE, "headers": {"X-Forwarded-For": "203.0.113.5"}},
        {**HERE, "headers": {"Forwarded": "for=203.0.113.5"}},
        {**HERE, "headers": {"X-Real-IP": "127.0.0.1"}},
        {**HERE, "headers": {"X-Forwarded-Proto": "https"}},
        {**HERE, "headers": {"X-Forwarded-Host": "shop.example"}},
        {**HERE, "headers": {"Via": "1.1 shop"}},
    ],
    ids=[
        "another machine",
        "a container",
        "a Unix socket",
        "another name",
        "a proxy",
        "a proxy by RFC 7239",
        "nginx",
        "only its scheme",
        "only its name",
        "a gateway",
    ],
)
def test_without_a_login_it_answers_only_to_this_machine(make_app: Callable[..., AsyncTask], how: dict[str, Any]) -> None:
    """Taken out: ``_refuse_elsewhere``."""
    app = make_app(allowed_hosts="tasks.example")
    for path in ("/", "/api/tasks", "/metrics", "/nowhere"):
        answer = client_of(app).get(path, **how)
        assert said(answer) == (403, "unprotected"), path
        assert all(way in answer.json["detail"] for way in ("authorize", "tokens", "allow_unprotected"))
    assert client_of(app).get("/readyz", **how).status_code == 200
    assert client_of(app, allow_unprotected=True).get("/api/tasks", **how).status_code == 200
    stated = make_app(allowed_hosts="tasks.example", allow_unprotected=True)
    assert client_of(stated).get("/api/tasks", **how).status_code == 200


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "127.8.8.8", "::ffff:127.0.0.1"])
def test_without_a_login_it_answers_to_this_machine(app: AsyncTask, address: str) -> None:
    for name in ("localhost:5000", "127.0.0.1", "[::1]:80", "shop.localhost"):
        answer = client_of(app).get("/api/tasks", headers={"Host": name}, environ_overrides={"REMOTE_ADDR": address})
        assert answer.status_code == 200, name


@pytest.mark.parametrize(
    ("rights", "status"),
    [({"read", "submit"}, 200), ({"read", "control"}, 403), ({"read"}, 403)],
    ids=["submits", "controls", "reads"],
)
def test_adding_and_sealing_need_the_right_to_submit(app: AsyncTask, rights: set[str], status: int) -> None:
    task = app.submit("anything", [1], owner="blue", open=True)
    other = app.submit("anything", [1], owner="red", open=True)
    client = create_app(app, authorize=lambda request: User("bob", "blue", rights)).test_client()
    assert client.post(f"/api/tasks/{task.id}/items", json={"items": [2]}).status_code == status
    assert client.post(f"/api/tasks/{task.id}/seal").status_code == status
    for act in ("items", "seal"):
        body = {"items": [2]} if act == "items" else None
        assert client.post(f"/api/tasks/{other.id}/{act}", json=body).status_code == (404 if status == 200 else 403)
    assert task.progress()["split"]["state"] == ("sealed" if status == 200 else "open")
    if status == 200:
        assert {each["who"] for each in task.log() if each["action"] in ("added", "sealed")} == {"bob (web 127.0.0.1)"}
