"""Only the server's own names are answered to, and only trusted proxies may say whom a request is from and for."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.serving import Shop, answers
from support.webshop import Client, client_of

from asynctask import AsyncTask
from asynctask.cli.serve import served_at, warn_if_open
from asynctask.config import Config
from asynctask.errors import ConfigError
from asynctask.testing import wait_for
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


@pytest.mark.parametrize("path", ["/api/tasks", "/", "/healthz", "/openapi.json", "/static/app.css", "/nope"])
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
                connection.request("GET", "/healthz", headers={"Host": host})
                found[host] = connection.getresponse().status
    assert found == {"evil.example": 421, "tasks.example": 200, place.netloc: 200}


# -- Behind a proxy -----------------------------------------------------------------------------------------------------

OWN_PAGE = {"Host": "127.0.0.1:8000", "Origin": "https://tasks.example"}
"""What a proxy that writes another Host makes of a request of the own page, in a browser without Sec-Fetch-Site."""
SAID = {"X-Forwarded-Host": "tasks.example", "X-Forwarded-Proto": "https", "X-Forwarded-For": "203.0.113.5"}


@pytest.fixture
def behind(make_app: MakeApp) -> Callable[..., Any]:
    """Posts as a proxy does; returns the status, and who the log says it was."""

    def post(headers: dict[str, str], proxy: str = "127.0.0.1", **settings: Any) -> tuple[int, str | None]:
        app = make_app(**{"allowed_hosts": "tasks.example", "trusted_proxies": "127.0.0.1 10.0.0.0/8", **settings})
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
