"""Only the server's own names are answered to, and only trusted proxies may say whom a request is from and for."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from flask import Flask
from support.serving import Shop, answers
from support.webshop import Client, client_of
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client as WerkzeugClient

from asynctask import AsyncTask
from asynctask.cli.serve import served_at, warn_if_open
from asynctask.config import WEB_PATHS, Config
from asynctask.errors import ConfigError
from asynctask.testing import wait_for
from webapi import create_app
from webapi.security import AllowedHosts

MakeApp = Callable[..., AsyncTask]
LOCAL = ["localhost", "localhost:8000", "LOCALHOST.", "shop.localhost", "127.0.0.1", "127.8.9.1:80", "[::1]:8000"]
FOREIGN = ["evil.example", "evil.example:8000",
           "localhost.evil.example", "127.0.0.1.evil.example", "a@localhost", "[::1].evil.example",
           "localhost:8000:1", "localhost:x", "[evil]", "/", "127.0.0.1#", "localhost evil"]  # fmt: skip


@pytest.mark.parametrize(
    ("allowed", "bound", "passed", "refused"),
    [
        ("", "127.0.0.1", LOCAL, [*FOREIGN, "192.0.2.7", "[2001:db8::1]"]),
        ("", "0.0.0.0", [*LOCAL, "192.0.2.7:80", "[2001:db8::1]", socket.gethostname()], FOREIGN),
        ("", "192.0.2.7", [*LOCAL, "192.0.2.7:80"], [*FOREIGN, "192.0.2.8"]),
        ("", "tasks.internal", [*LOCAL, "tasks.internal", "Tasks.Internal:80"], [*FOREIGN, "a.tasks.internal"]),
        ("a.example b.example", "0.0.0.0", [*LOCAL, "a.example", "B.example.:443"], [*FOREIGN, "192.0.2.7", "x.a.example"]),
        (".a.example", "::", [*LOCAL, "a.example", "x.y.a.example"], [*FOREIGN, "xa.example", "a.example.evil.example"]),
        ("*", "127.0.0.1", [*LOCAL, *FOREIGN], []),
    ],
)
def test_which_names_are_the_servers_own(allowed: str, bound: str, passed: list[str], refused: list[str]) -> None:
    hosts = AllowedHosts(allowed, bound)
    assert [host for host in passed if not hosts.knows(host)] == []
    assert [host for host in refused if hosts.knows(host)] == []


@pytest.mark.parametrize("path", ["/api/tasks", "/", "/metrics", "/openapi.json", "/static/app.css", "/nope"])
def test_a_name_that_is_rebound_to_this_machine_reads_nothing(client: Client, path: str) -> None:
    answer = client.get(path, headers={"Host": "evil.example:8000", "Sec-Fetch-Site": "same-origin"})
    assert (answer.status_code, answer.mimetype, answer.json["code"]) == (421, "application/problem+json", "unknown_host")
    assert "allowed_hosts" in answer.json["detail"]


def test_a_name_that_is_rebound_to_this_machine_changes_nothing(app: AsyncTask, client: Client) -> None:
    task = app.submit("enroll", [{"sku": "A"}])
    headers = {"Host": "evil.example", "Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"}
    assert client.post(f"/api/tasks/{task.id}/cancel", headers=headers).status_code == 421
    assert task.progress()["state"] == "running"


def test_a_real_server_minds_its_names_too(tmp_path: Path) -> None:
    with Shop(tmp_path, allowed_hosts="tasks.example").web() as (_, said):
        wait_for(lambda: answers(said["url"] + "/readyz"), "the server to be ready")
        place = urlsplit(said["url"])
        found = {}
        for host in ("evil.example", "tasks.example", place.netloc):
            with closing(HTTPConnection(str(place.hostname), place.port, timeout=60)) as connection:
                for path in ("/docs", "/healthz", "/readyz"):
                    connection.request("GET", path, headers={"Host": host})
                    answer = connection.getresponse()
                    answer.read()
                    found[host, path] = answer.status
    assert {where: status for where, status in found.items() if status != 200} == {("evil.example", "/docs"): 421}


def test_a_probe_answers_by_the_address_of_a_pod(client: Client) -> None:
    """The orchestrator knows no other name. Taken out: the exception of probes. It restarted the server for ever."""
    for path in ("/healthz", "/readyz"):
        assert client.get(path, headers={"Host": "10.42.0.17:8000"}).json["status"] == "ok"
    assert client.get("/healthz/", headers={"Host": "10.42.0.17:8000"}).status_code == 421


# -- Behind a proxy -----------------------------------------------------------------------------------------------------

OWN_PAGE = {"Host": "127.0.0.1:8000", "Origin": "https://tasks.example"}
"""What a proxy that writes another Host makes of a request of the own page, in a browser without Sec-Fetch-Site."""
SAID = {"X-Forwarded-Host": "tasks.example", "X-Forwarded-Proto": "https", "X-Forwarded-For": "203.0.113.5"}


@pytest.fixture
def behind(make_app: MakeApp) -> Callable[..., Any]:
    """Posts as a proxy does; returns the status, and who the log says it was."""

    def post(headers: dict[str, str], proxy: str = "127.0.0.1", **settings: Any) -> tuple[int, str | None]:
        proxies = {"trusted_proxies": "127.0.0.1 10.0.0.0/8", "allow_unprotected": True}
        app = make_app(**{"allowed_hosts": "tasks.example", **proxies, **settings})
        task = app.submit("enroll", [{"sku": "A"}])
        answer = client_of(app).post(
            f"/api/tasks/{task.id}/pause", headers=headers, environ_overrides={"REMOTE_ADDR": proxy}
        )
        log = [entry["who"] for entry in task.log() if entry["who"].startswith("web ")]
        return answer.status_code, log[0] if log else None

    return post


def test_the_own_page_works_behind_a_trusted_proxy_that_writes_another_host(behind: Callable[..., Any]) -> None:
    assert behind({**OWN_PAGE, **SAID}) == (200, "web 203.0.113.5")
    forwarded = {**OWN_PAGE, "Forwarded": "for=203.0.113.5;host=tasks.example;proto=https"}
    assert behind(forwarded, proxy_headers="forwarded") == (200, "web 203.0.113.5")
    assert (
        behind({"Forwarded": 'for="[2001:db8::7]:4711";host="tasks.example"'}, proxy_headers="forwarded")[1]
        == "web 2001:db8::7"
    )


@pytest.mark.parametrize(
    ("headers", "how", "expected"),
    [
        ({**OWN_PAGE, **SAID}, {"trusted_proxies": ""}, (403, None)),
        ({**OWN_PAGE, **SAID}, {"proxy": "192.0.2.9"}, (403, None)),
        ({**OWN_PAGE, **SAID}, {"proxy_headers": "forwarded"}, (403, None)),
        ({**OWN_PAGE, "Forwarded": "host=tasks.example"}, {}, (403, None)),
        ({**SAID, "X-Forwarded-Host": "evil.example"}, {}, (421, None)),
        ({**OWN_PAGE, **SAID, "Origin": "https://evil.example"}, {}, (403, None)),
        ({**SAID, "Host": "localhost"}, {"proxy": "192.0.2.9"}, (200, "web 192.0.2.9")),
    ],
)
def test_nobody_else_may_say_whom_a_request_is_for(
    behind: Callable[..., Any], headers: dict[str, str], how: dict[str, Any], expected: tuple[int, str | None]
) -> None:
    assert behind(headers, **how) == expected


@pytest.mark.parametrize(
    ("chain", "client"),
    [
        ("203.0.113.5", "203.0.113.5"),
        ("192.0.2.66, 203.0.113.5", "203.0.113.5"),
        ("192.0.2.66, 203.0.113.5, 10.1.1.1", "203.0.113.5"),
        ("nonsense, 10.1.1.1", "10.1.1.1"),
        ("nonsense", "127.0.0.1"),
    ],
)
def test_the_client_is_the_first_that_no_trusted_proxy_is(behind: Callable[..., Any], chain: str, client: str) -> None:
    assert behind({**SAID, "X-Forwarded-For": chain}) == (200, f"web {client}")


@pytest.mark.parametrize(
    "settings", [{"trusted_proxies": "nginx"}, {"trusted_proxies": "10.0.0.1/8"}, {"proxy_headers": "x"}]
)
def test_a_proxy_that_is_no_address_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"write|proxy_headers"):
        Config(**settings)


# -- Under a path -------------------------------------------------------------------------------------------------------

NAMES = {"X-Forwarded-Prefix": "/bulk"}
PLACES = re.compile(r'(?:href|src|action|data-api|data-page|data-job|data-tasks|data-jobs|data-queues)="(/[^"]*)"')


class Leaving(WerkzeugClient):
    """A proxy that leaves the path, and reads every answer to its end."""

    headers: ClassVar[dict[str, str]] = {}

    def open(self, path: str, **options: Any) -> Any:  # type: ignore[override]
        options |= {"headers": self.headers, "environ_overrides": {"REMOTE_ADDR": "127.0.0.1"}}
        return super().open(path, buffered=True, **options)


class Stripping(Leaving):
    """One that removes it from every request."""

    def open(self, path: str, **options: Any) -> Any:  # type: ignore[override]
        return super().open(path.removeprefix("/bulk") or "/", **options)


class Naming(Stripping):
    """One that removes it and says so."""

    headers = NAMES


class LeavingAndNaming(Leaving):
    """One that says so and leaves it."""

    headers = NAMES


def mounted(app: AsyncTask) -> Any:
    """In another application."""
    host = Flask("host")
    host.wsgi_app = DispatcherMiddleware(host.wsgi_app, {"/bulk": create_app(app)})  # type: ignore[method-assign]
    return Leaving(host.wsgi_app)


TRUSTING = {"trusted_proxies": "127.0.0.1"}
UNDER: dict[str, tuple[dict[str, Any], Callable[[AsyncTask], Any]]] = {
    "in another application": ({}, mounted),
    "by the setting": ({"base_path": "/bulk"}, lambda app: Leaving(create_app(app).wsgi_app)),
    "by the setting, stripped": ({"base_path": "/bulk"}, lambda app: Stripping(create_app(app).wsgi_app)),
    "named by the proxy": (TRUSTING, lambda app: Naming(create_app(app).wsgi_app)),
    "named and left by the proxy": (TRUSTING, lambda app: LeavingAndNaming(create_app(app).wsgi_app)),
    "by both": ({"base_path": "/old", **TRUSTING}, lambda app: Naming(create_app(app).wsgi_app)),
}


@pytest.mark.parametrize("how", UNDER)
def test_under_a_path_every_link_of_an_answer_has_it(make_app: MakeApp, how: str) -> None:
    """Taken out: Prefixed, or the root in `instance` and `servers`."""
    settings, make = UNDER[how]
    app = make_app(**settings)
    at = make(app)
    for _ in range(2):
        made = at.post("/bulk/api/tasks", json={"worker": "enroll", "items": [{"sku": "A"}]})
        assert made.status_code == 202
    task_id = made.json["task_id"]
    assert made.headers["Location"] == f"/bulk/api/tasks/{task_id}"
    assert {link.partition(f"/{task_id}")[0] for link in made.json["links"].values()} == {"/bulk/api/tasks", "/bulk/tasks"}
    page = at.get("/bulk/api/tasks?limit=1").json["links"]
    assert page == {"self": "/bulk/api/tasks?limit=1", "next": f"/bulk/api/tasks?limit=1&after={task_id}"}
    assert [each["task_id"] for each in at.get(page["next"]).json["tasks"]] == [task_id - 1]
    assert at.get(f"/bulk/api/tasks/{task_id}/events").json["links"]["self"] == f"/bulk/api/tasks/{task_id}/events"
    missing = at.get("/bulk/api/nope?a=1")
    assert (missing.status_code, missing.json["instance"]) == (404, "/bulk/api/nope?a=1")
    assert "/bulk/docs" in missing.json["detail"]
    assert at.get("/bulk/openapi.json").json["servers"] == [{"url": "/bulk"}]
    for path in ("/bulk/", f"/bulk/tasks/{task_id}", "/bulk/jobs", "/bulk/docs", "/bulk/tasks/99"):
        places = PLACES.findall(at.get(path).text)
        assert len(places) > 5
        assert [place for place in places if not place.startswith("/bulk/")] == []
    assert "<code>/bulk/api/tasks</code>" in at.get("/bulk/docs").text
    assert at.get("/bulk/static/app.css").status_code == 200
    assert urlsplit(at.get("/bulk").headers.get("Location", "/bulk/")).path == "/bulk/"


def test_a_link_of_a_stream_and_of_a_single_job_has_the_path_too(make_app: MakeApp) -> None:
    app = make_app(base_path="/bulk")
    at: Any = Leaving(create_app(app).wsgi_app)
    task = app.submit("enroll", [{"sku": "A"}])
    task.cancel()
    assert task.wait(120)["done"]
    assert f'"self":"/bulk/api/tasks/{task.id}"' in at.get(f"/bulk/api/tasks/{task.id}/stream").text
    job = at.post("/bulk/api/jobs", json={"worker": "anything", "args": [{}]})
    assert job.headers["Location"] == f"/bulk/api/jobs/{job.json['job_id']}"
    assert at.get(job.headers["Location"]).status_code == 200


def test_without_a_path_nothing_is_before_the_links(client: Client) -> None:
    assert client.get("/openapi.json").json["servers"] == [{"url": "/"}]
    assert client.get("/api/tasks", headers=NAMES).json["links"]["self"] == "/api/tasks", "nobody trusts this client"


@pytest.mark.parametrize(
    ("settings", "proxy"),
    [({}, "127.0.0.1"), ({"trusted_proxies": "10.0.0.0/8"}, "127.0.0.1"),
     ({"trusted_proxies": "127.0.0.1", "proxy_headers": "forwarded"}, "127.0.0.1")],
)  # fmt: skip
def test_a_path_that_nobody_trusted_names_is_passed_over(make_app: MakeApp, settings: dict[str, Any], proxy: str) -> None:
    at = client_of(make_app(**settings))
    answer = at.get("/api/tasks", headers=NAMES, environ_overrides={"REMOTE_ADDR": proxy})
    assert answer.json["links"]["self"] == "/api/tasks"


HOSTILE = [
    "//evil.example", "https://evil.example", "/bulk\r\nSet-Cookie: a=b", '/a"onload="x', "/a/../b", "/..", "/.", "/a//b",
    "bulk", "/bulk?x", "/bulk#x", "/a b", "/%2e%2e", "/\\evil", "/é", "/" + "a" * 300, "/<script>", "/a\x00",
]  # fmt: skip


@pytest.mark.parametrize("prefix", HOSTILE)
def test_a_hostile_path_is_refused(make_app: MakeApp, prefix: str) -> None:
    at = client_of(make_app(trusted_proxies="127.0.0.1"))
    for path in ("/", "/api/tasks", "/nope"):
        answer = at.get(path, environ_overrides={"HTTP_X_FORWARDED_PREFIX": prefix})
        assert (answer.status_code, answer.json["code"]) == (400, "invalid_prefix")
        assert "Set-Cookie" not in answer.headers
        assert prefix not in answer.json["instance"]


@pytest.mark.parametrize("prefix", [*HOSTILE, "/", "/bulk/", "/api", "/tasks/x", "/static"])
def test_a_setting_that_is_no_path_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match=r"write a path such as /bulk"):
        Config(base_path=prefix)


@pytest.mark.parametrize(("given", "found"), [("/bulk/", "/bulk"), ("/a, /tools/bulk", "/tools/bulk"), ("/", ""), ("", "")])
def test_the_last_of_several_paths_is_taken(make_app: MakeApp, given: str, found: str) -> None:
    at = client_of(make_app(trusted_proxies="127.0.0.1"))
    links = at.get("/api/tasks", headers={"X-Forwarded-Prefix": given}).json["links"]
    assert links["self"] == f"{found}/api/tasks"


def test_a_path_that_is_also_one_of_the_application_is_stripped_by_its_proxy(make_app: MakeApp) -> None:
    at = client_of(make_app(trusted_proxies="127.0.0.1"))
    answer = at.get("/api/tasks", headers={"X-Forwarded-Prefix": "/api"})
    assert answer.json["links"]["self"] == "/api/api/tasks"


def test_a_path_that_the_server_knows_already_is_not_doubled(make_app: MakeApp) -> None:
    at = client_of(make_app(trusted_proxies="127.0.0.1", base_path="/bulk"))
    for mounted_at, expected in (("/bulk", "/bulk"), ("/bulk/shop", "/bulk/shop"), ("/bulky", "/bulk/bulky")):
        answer = at.get("/api/tasks", headers=NAMES, environ_overrides={"SCRIPT_NAME": mounted_at})
        assert answer.json["links"]["self"] == f"{expected}/api/tasks"


def test_the_servers_own_paths_are_those_that_a_setting_may_not_begin_with(app: AsyncTask) -> None:
    rules = {rule.rule.split("/")[1] for rule in create_app(app).url_map.iter_rules()}
    assert rules - {""} == WEB_PATHS


def test_a_real_server_takes_a_large_file_under_a_path(tmp_path: Path) -> None:
    """Taken out: the look for a path before /api/tasks. The file was refused by its head, as too long for JSON."""
    body = b"sku\n" + b"".join(b"S-%d\n" % n for n in range(1000))
    with Shop(tmp_path, base_path="/bulk", max_body_bytes="1024").web() as (_, said):
        wait_for(lambda: answers(said["url"] + "/readyz"), "the server to be ready")
        place = urlsplit(said["url"])
        with closing(HTTPConnection(str(place.hostname), place.port, timeout=120)) as connection:
            connection.request("POST", "/bulk/api/tasks?worker=enroll", body, {"Content-Type": "text/csv"})
            answer = connection.getresponse()
            assert answer.status == 202
            assert str(answer.headers["Location"]).startswith("/bulk/api/tasks/")


# -- Open to others -----------------------------------------------------------------------------------------------------


@pytest.fixture
def open_shop(tmp_path: Path) -> Iterator[tuple[Shop, dict[str, Any]]]:
    shop = Shop(tmp_path)
    with shop.running("web", "--host", "0.0.0.0", "--port", "0") as (_, said):
        yield shop, said


def test_a_server_that_is_open_to_others_says_so_loudly(open_shop: tuple[Shop, dict[str, Any]]) -> None:
    shop, said = open_shop
    log = wait_for(lambda: (shop.folder / "web.log").read_text(), "the warning")
    assert f"WARNING: 0.0.0.0:{said['port']} is open to other machines" in log
    assert (said["host"], said["url"]) == ("0.0.0.0", f"http://127.0.0.1:{said['port']}")
    assert answers(said["url"] + "/readyz")


def test_the_address_that_is_printed_is_the_one_that_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert served_at("127.0.0.1", 8000) == "http://127.0.0.1:8000"
    assert served_at("::1", 8000) == "http://[::1]:8000"
    assert served_at("0.0.0.0", 8000).endswith("and port 8000 of every other address of this machine")
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        warn_if_open(host, 8000, has_tokens=False)
    assert capsys.readouterr().err == ""
    for host in ("0.0.0.0", "::", "192.0.2.7", "tasks.internal"):
        warn_if_open(host, 8000, has_tokens=False)
        assert "needs no token" in capsys.readouterr().err
        warn_if_open(host, 8000, has_tokens=True)
        assert "unencrypted" in capsys.readouterr().err
