"""The web server as a process of its own, spoken to over sockets."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.serving import PATIENCE_S, Shop, answers, children, get

from asynctask import AsyncTask
from asynctask.errors import Unavailable
from asynctask.testing import wait_for
from webapi.server import serve

LIST = json.dumps({"worker": "enroll", "items": [{"sku": "A"}]}).encode()


class Talk:
    """A connection that sends what it is told to and reads the answer."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self.host = place.netloc
        self._socket = socket.create_connection((place.hostname, place.port), timeout=PATIENCE_S)

    def head(self, *lines: str, path: str = "/api/tasks") -> None:
        self.send("\r\n".join([f"POST {path} HTTP/1.1", f"Host: {self.host}", *lines, "", ""]).encode())

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def end(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def answer(self) -> tuple[int, dict[str, Any]]:
        with self._socket, self._socket.makefile("rb") as stream:
            status = int(stream.readline().split()[1])
            length = 0
            while line := stream.readline().strip():
                name, _, value = line.decode().partition(":")
                length = int(value) if name.lower() == "content-length" else length
            return status, json.loads(stream.read(length))


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path, max_file_bytes=100_000_000)


@pytest.fixture
def web(shop: Shop) -> Iterator[tuple[Any, str]]:
    with shop.web() as (process, said):
        yield process, said["url"].rstrip("/")


def tasks(url: str) -> list[dict[str, Any]]:
    return list(get(f"{url}/api/tasks")["tasks"])


def sockets(pid: int) -> list[str]:
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(fd.readlink()))
    return [link for link in found if link.startswith("socket:")]


def test_port_0_takes_a_free_one_and_says_which(web: tuple[Any, str]) -> None:
    _, url = web
    assert urlsplit(url).port != 0
    assert get(f"{url}/healthz") == {"status": "ok"}
    assert get(f"{url}/readyz") == {"status": "ok"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_the_requests_at_hand_end(web: tuple[Any, str], number: int) -> None:
    process, url = web
    talk = Talk(url)
    talk.head("Content-Type: application/json", f"Content-Length: {len(LIST)}")
    talk.send(LIST[:10])
    # A second request has been answered, so the first one is in a thread: connections are taken in order.
    assert answers(f"{url}/healthz")
    for pid in [*children(process.pid), process.pid] if number == signal.SIGINT else [process.pid]:
        os.kill(pid, number)  # Ctrl-C reaches them all
    wait_for(lambda: not sockets(process.pid), "the server to stop listening")
    talk.send(LIST[10:])
    status, body = talk.answer()
    assert (status, body["worker"]) == (202, "enroll")
    assert process.wait(PATIENCE_S) == 0


def test_a_client_that_sends_far_too_much_gets_to_read_why(web: tuple[Any, str]) -> None:
    _, url = web
    size, piece = 180_000_000, b"x" * 1_000_000
    talk = Talk(url)
    talk.head("Content-Type: text/csv", f"Content-Length: {size}", path="/api/tasks?worker=enroll")
    for _ in range(size // len(piece)):  # most clients read no answer before they have sent everything
        talk.send(piece)
    status, body = talk.answer()
    assert (status, body["code"]) == (413, "too_large")


def test_the_server_is_started_anew_when_its_process_dies(web: tuple[Any, str]) -> None:
    process, url = web
    (child,) = wait_for(lambda: children(process.pid), "the process that answers")
    os.kill(child, signal.SIGKILL)
    wait_for(lambda: children(process.pid) not in ([], [child]), "another process")
    wait_for(lambda: answers(f"{url}/readyz"), "an answer")
    assert child not in children(process.pid)


def test_nothing_is_left_behind_when_it_stops(shop: Shop) -> None:
    with shop.web() as (process, said):
        assert answers(said["url"].rstrip("/") + "/readyz")
        family = [process.pid, *children(process.pid)]
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]
    app = AsyncTask(environ={}, database_url=shop.environ["ASYNCTASK_DATABASE_URL"])
    assert app.processes() == []
    app.close()


@pytest.mark.parametrize(
    ("lines", "body"),
    [
        (("Content-Type: application/json", f"Content-Length: {len(LIST)}"), LIST[:-10]),
        (
            ("Content-Type: multipart/form-data; boundary=B", "Content-Length: 500"),
            b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.csv"\r\n\r\nsku\nA\n',
        ),
        (("Content-Type: application/json", "Transfer-Encoding: chunked"), b"%x\r\n%s\r\n" % (20, LIST[:20])),
    ],
)
def test_a_body_cut_off_in_the_middle_is_refused_and_makes_no_task(
    web: tuple[Any, str], lines: tuple[str, ...], body: bytes
) -> None:
    _, url = web
    talk = Talk(url)
    talk.head(*lines)
    talk.send(body)
    talk.end()
    status, problem = talk.answer()
    assert (status, problem["code"]) == (400, "malformed_body")
    assert tasks(url) == []
    talk = Talk(url)
    talk.head("Content-Type: application/json", f"Content-Length: {len(LIST)}")
    talk.send(LIST)
    assert talk.answer()[0] == 202


def form_of(size: int, worker: str = "enroll") -> tuple[bytes, bytes]:
    head = (
        f'--B\r\nContent-Disposition: form-data; name="worker"\r\n\r\n{worker}\r\n'
        '--B\r\nContent-Disposition: form-data; name="file"; filename="a.csv"\r\n\r\nsku\n'
    ).encode()
    return head, b"A" * size + b"\r\n--B--\r\n"


def test_a_client_that_sends_too_much_gets_to_read_why(tmp_path: Path) -> None:
    with Shop(tmp_path, max_file_bytes=10_000, max_body_bytes=10_000).web() as (_, said):
        url = said["url"].rstrip("/")
        head, rest = form_of(5_000_000)
        for lines, body in (
            (("Content-Type: multipart/form-data; boundary=B",), head + rest),
            (("Content-Type: application/json",), b" " * 5_000_000),
        ):
            talk = Talk(url)
            talk.head(*lines, f"Content-Length: {len(body)}")
            talk.send(body)
            status, problem = talk.answer()
            assert (status, problem["code"]) == (413, "too_large")
            assert "10,000" in problem["detail"]


def test_a_large_file_is_never_held_in_memory(web: tuple[Any, str]) -> None:
    process, url = web
    (child,) = wait_for(lambda: children(process.pid), "the process that answers")

    def peak_kb() -> int:
        status = Path(f"/proc/{child}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0])

    assert answers(f"{url}/api/workers")
    before = peak_kb()
    head, rest = form_of(80_000_000, worker="nobody")
    talk = Talk(url)
    talk.head("Content-Type: multipart/form-data; boundary=B", f"Content-Length: {len(head) + len(rest)}")
    talk.send(head)
    talk.send(rest)
    assert talk.answer()[0] == 422
    assert peak_kb() - before < 30_000


def test_an_address_that_is_taken_is_said_so(make_app: Callable[..., AsyncTask]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"127.0.0.1:{port}.*another port"):
            serve(make_app(), host="127.0.0.1", port=port, threads=1)
    with pytest.raises(Unavailable, match="another host"):
        serve(make_app(), host="no.such.host.invalid", port=0, threads=1)


PARENT = """
import os, socket, sys, time
import structlog
from webapi import server

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))

def child(beat):
    print(os.getpid(), flush=True)
    {child}

server.HELD_S = {held}
server._Parent(child, socket.create_server(("127.0.0.1", 0)), time.monotonic).run(lambda: None)
"""


def test_a_process_whose_loop_stands_still_is_killed_and_started_anew() -> None:
    script = PARENT.format(child="beat(); time.sleep(600)", held=0.5)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        first, second = process.stdout.readline(), process.stdout.readline()
        assert first != second
        assert not Path(f"/proc/{int(first)}").exists()
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        assert not Path(f"/proc/{int(second)}").exists()


def test_a_process_that_cannot_start_is_not_tried_for_ever() -> None:
    script = PARENT.format(child="raise RuntimeError('no such table')", held=60)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert found.returncode != 0
    assert len(found.stdout.split()) == 1
    assert "no such table" in found.stderr
    assert "does not start" in found.stderr
