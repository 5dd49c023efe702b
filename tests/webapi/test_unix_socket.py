"""The web server on a Unix socket: whose file it is, who may connect, and whom a request is from."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from support.forked import run_program
from support.serving import PATIENCE_S, ROOT, Shop, children

from asynctask.config import Config
from asynctask.errors import ConfigError, Unavailable
from asynctask.testing import wait_for
from webapi.server import _listen_unix


class UnixConnection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(str(self._path))


@pytest.fixture
def path() -> Iterator[Path]:
    """In a folder whose name is short, as that of a socket must be."""
    folder = tempfile.mkdtemp()
    yield Path(folder, "web.sock")
    shutil.rmtree(folder)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def ask(path: Path, target: str = "/healthz", method: str = "GET", body: Any = None, **headers: str) -> tuple[int, Any]:
    with closing(UnixConnection(path)) as connection:
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection.request(method, target, headers=headers, body=None if body is None else json.dumps(body))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def answers(path: Path) -> bool:
    try:
        return ask(path)[0] == 200
    except OSError:
        return False


def web(shop: Shop, path: Path, *flags: str) -> Any:
    return shop.running("web", "--host", f"unix:{path}", *flags)


def refused(shop: Shop, command: str, path: Path) -> tuple[int, str]:
    """What a second server says and its exit code."""
    application = f"{ROOT / 'tests/support/shop.py'}:app"
    words = ["asynctask", "-A", application, command, "--host", f"unix:{path}"]
    done = run_program(words, cwd=shop.folder, env=shop.environ, timeout=PATIENCE_S)
    return done.returncode, str(done.stderr)


def test_a_server_on_a_unix_socket_says_where_and_answers_to_loopback_names_alone(shop: Shop, path: Path) -> None:
    with web(shop, path) as (process, said):
        assert said == {"url": f"unix:{path}", "host": f"unix:{path}", "port": None, "pid": process.pid}
        assert ask(path, "/readyz") == (200, {"status": "ok"})
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert [ask(path, "/api/tasks", Host=host)[0] for host in ("localhost", "127.0.0.1:80", "evil.example")] == [
            200,
            200,
            421,
        ]
        assert ask(path, "/api/tasks", Host=f"unix:{path}")[0] == 421
    assert not path.exists()
    assert "WARNING" not in (shop.folder / "web.log").read_text()


def test_a_server_on_a_unix_socket_answers_to_its_allowed_hosts(tmp_path: Path, path: Path) -> None:
    with web(Shop(tmp_path, allowed_hosts="tasks.example"), path):
        wait_for(lambda: answers(path), "an answer")
        assert ask(path, "/api/tasks", Host="tasks.example")[0] == 200
        with closing(UnixConnection(path)) as old:  # HTTP/1.0 without a Host
            old.connect()
            old.sock.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert old.sock.makefile("rb").readline().split()[1] == b"200"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_mode_of_the_file_does_not_depend_on_the_umask(path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with _listen_unix(str(path)):
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
            assert os.umask(umask) == umask
    finally:
        os.umask(before)


def test_the_file_of_a_dead_server_is_replaced_and_that_of_a_live_one_is_not(shop: Shop, path: Path) -> None:
    with web(shop, path) as (process, _):
        wait_for(lambda: answers(path), "an answer")
        for command in ("web", "up"):
            code, said = refused(shop, command, path)
            assert (code, f"unix:{path}: a server listens there already" in said) == (3, True), said
        assert answers(path)
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: not answers(path), "the end of the server")
        assert path.exists()
    with web(shop, path):
        wait_for(lambda: answers(path), "an answer")
    assert not path.exists()


@pytest.mark.parametrize("command", ["web", "up"])
def test_a_path_that_cannot_be_had_is_said_and_nothing_is_lost(shop: Shop, path: Path, command: str) -> None:
    path.write_text("kept")
    for place, reason in (
        (path, "something else is there"),
        (path / "web.sock", "Not a directory"),
        (path.parent / "none" / "web.sock", "does not exist"),
    ):
        code, said = refused(shop, command, place)
        assert (code, f"unix:{place}: " in said, reason in said) == (3, True, True), said
    assert path.read_text() == "kept"


def test_the_file_stays_when_the_serving_process_dies(shop: Shop, path: Path) -> None:
    with web(shop, path) as (process, _):
        (child,) = wait_for(lambda: children(process.pid), "the process that answers")
        wait_for(lambda: answers(path), "an answer")
        os.kill(child, signal.SIGTERM)  # in order, through the code after its fork
        wait_for(lambda: children(process.pid) not in ([], [child]), "another process")
        wait_for(lambda: answers(path), "an answer")
    assert not path.exists()


def test_a_stop_leaves_the_file_of_another_server(tmp_path: Path, path: Path) -> None:
    first, second = Shop(tmp_path), Shop(tmp_path)
    with web(second, path) as (process, _):
        path.rename(path.with_suffix(".old"))
        with web(first, path):
            wait_for(lambda: answers(path), "an answer")
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
            assert answers(path)


def test_up_waits_until_the_socket_takes_connections_and_ends_in_order(shop: Shop, path: Path) -> None:
    with shop.running("up", "--host", f"unix:{path}", "--port", "1", "--access-log") as (process, said):
        assert (said["url"], said["host"], said["port"], said["pid"]) == (f"unix:{path}", f"unix:{path}", None, process.pid)
        assert ask(path) == (200, {"status": "ok"})
        wait_for(lambda: '"event": "request"' in (shop.folder / "up.log").read_text(), "the line of the request")
    assert not path.exists()
    assert "WARNING" not in (shop.folder / "up.log").read_text()


PROXY = {"X_Forwarded_For": "203.0.113.5", "X_Forwarded_Host": "tasks.example", "X_Forwarded_Prefix": "/bulk"}


@pytest.mark.parametrize(
    ("trusted", "prefix", "address"),
    [("unix", "/bulk", "203.0.113.5"), ("10.0.0.1 unix", "/bulk", "203.0.113.5"), ("127.0.0.1", "", ""), ("", "", "")],
)
def test_only_a_named_unix_socket_is_a_trusted_proxy(
    tmp_path: Path, path: Path, trusted: str, prefix: str, address: str
) -> None:
    shop = Shop(tmp_path, trusted_proxies=trusted, allowed_hosts="tasks.example", access_log=True)
    with web(shop, path):
        assert wait_for(lambda: answers(path), "an answer")
        status, body = ask(path, "/api/tasks?worker=enroll", **PROXY)
        assert (status, body["links"]["self"]) == (200, f"{prefix}/api/tasks?worker=enroll")
        assert ask(path, "/api/tasks", **{**PROXY, "X_Forwarded_Host": "evil.example"})[0] == (421 if address else 200)
    lines = [json.loads(line) for line in (tmp_path / "web.log").read_text().splitlines() if '"request"' in line]
    assert [each["address"] for each in lines if each["path"] == "/api/tasks"] == [address] * 2
    assert {each["address"] for each in lines if each["path"] == "/healthz"} == {""}


def test_the_address_behind_a_trusted_socket_is_in_the_log_of_a_task(tmp_path: Path, path: Path) -> None:
    with web(Shop(tmp_path, trusted_proxies="unix", allowed_hosts="tasks.example"), path):
        made = {"worker": "enroll", "items": [{"sku": "A"}]}
        wait_for(lambda: answers(path), "an answer")
        status, task = ask(path, "/api/tasks", "POST", made)
        assert status == 202
        assert ask(path, f"{task['links']['self']}/pause", "POST", {}, **PROXY)[0] == 200
        _, log = ask(path, f"{task['links']['self']}/log")
    assert [each["who"] for each in log["log"] if each["who"].startswith("web 203")] == ["web 203.0.113.5"]


@pytest.mark.parametrize(
    "host",
    ["unix:", "unix:run/web.sock", "unix:@web", "unix:web.sock", "unix:/a\0b", "unix:/" + "a" * 100, "unix:/" + "é" * 50],
)
def test_a_host_that_is_no_path_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"write unix: and an absolute path of at most 100 bytes"):
        Config(host=host)
    assert Config(host="unix:/" + "a" * 99).host


def test_the_demo_needs_an_address(tmp_path: Path) -> None:
    words = ["asynctask", "demo", "--dir", str(tmp_path / "demo"), "--host", "unix:/web.sock"]
    done = run_program(words, cwd=tmp_path, env={"PATH": os.environ["PATH"]}, timeout=PATIENCE_S)
    assert (done.returncode, "the demo's page needs an address" in done.stderr) == (2, True), done.stderr


def test_the_longest_path_can_be_bound(path: Path) -> None:
    longest = path.with_name("a" * (100 - len(str(path.parent)) - 1))
    with _listen_unix(str(longest)), pytest.raises(Unavailable, match="already"):
        _listen_unix(str(longest))
    assert len(str(longest)) == 100
