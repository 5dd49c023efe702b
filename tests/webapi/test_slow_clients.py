"""Hundreds of clients that send nothing, or a byte a second, beside a real server: nobody else notices."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from support.serving import Shop, answers

from asynctask.testing import wait_for

CLIENTS = 500
ROUNDS = 5
ANSWER_S = 1.0
"""What each poll is promised, whatever others do."""

BEGINNINGS = (
    b"",
    b"GET /api/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ",
    b"POST /api/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 90000\r\n\r\n ",
    b"POST /api/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/csv\r\nContent-Length: 90000\r\n\r\nsku\r\n",
    b"POST /api/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n9000\r\n",
)


@contextmanager
def slow_clients(host: str, port: int) -> Iterator[None]:
    """So many connections; all but the silent ones send a byte a second until the block ends."""
    over = threading.Event()
    found = [socket.create_connection((host, port), timeout=60) for _ in range(CLIENTS)]
    dripping = []
    for number, each in enumerate(found):
        if beginning := BEGINNINGS[number % len(BEGINNINGS)]:
            each.sendall(beginning)
            dripping.append(each)

    def drip() -> None:
        while not over.wait(1.0):
            for each in dripping:
                each.sendall(b" ")

    thread = threading.Thread(target=drip, name="drip")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for each in found:
            each.close()


def test_500_clients_that_send_nothing_or_a_byte_a_second_keep_nobody_out(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * CLIENTS), hard))
    with Shop(tmp_path).web() as (_, said):
        url = said["url"].rstrip("/")
        wait_for(lambda: answers(f"{url}/readyz"), "the server to be ready")
        place = urlsplit(url)
        assert place.hostname is not None
        assert place.port is not None
        with slow_clients(place.hostname, place.port):
            for _ in range(ROUNDS):
                for path in ("/healthz", "/api/tasks", "/readyz", "/"):
                    with closing(HTTPConnection(place.hostname, place.port, timeout=ANSWER_S)) as connection:
                        connection.request("GET", path)
                        assert connection.getresponse().status == 200
