"""Clients that send or read slowly, on purpose or not: how long the polls of others take beside them.

    python -m benchmarks.slow_clients [-n CONNECTIONS] [--readers R] [--chunkers C] [--seconds S] [--server KIND] [--json]

A real web server, and eight clients that poll it, each poll on a connection of its own: for S seconds alone, and as long
beside each of three loads. ``stalled``: ``-n`` connections with nothing, half a head, half a body or half a chunk; all but
the silent ones send a byte every five seconds. ``chunks``: C clients that send one JSON body after the other in chunks of
one byte. ``readers``: R clients that read a large answer at 2 KB/s: every second the file of an export, the others a page
of Events. ``ours`` is the slowest of all polls beside a load, the peer the slowest alone; ``ratio`` is ours to peer: less
is better. A server may refuse a slow client or close its connection; ``settings`` tell how many got what.

A quick look takes -n 50 --readers 30 --chunkers 2 --seconds 2.
"""

from __future__ import annotations

import argparse
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from asynctask import AsyncTask
from benchmarks import common
from benchmarks.children import Job, await_address, build, child
from benchmarks.common import Result
from benchmarks.memory import server_peak_mb
from benchmarks.polling import figures, many_connections, polled

__all__ = ["main"]

MOST_CLIENTS = 1_900
ROWS = 400_000
"""Of the export; its file has 25 MB."""

EVENTS = 1_000
DRIP_S = 5.0
READ_BYTES, READ_S = 1_000, 0.5
BODY_BYTES = 20_000
_PATIENCE_S = 120.0

_HEAD = "Host: 127.0.0.1\r\nContent-Type: application/json\r\n"
_BEGINNINGS = (
    "",
    "GET /api/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ",
    f"POST /api/tasks HTTP/1.1\r\n{_HEAD}Content-Length: 90000\r\n\r\n ",
    f"POST /api/tasks HTTP/1.1\r\n{_HEAD}Transfer-Encoding: chunked\r\n\r\n9000\r\n ",
)
Place = tuple[str, int]
Answers = Counter[str]


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = common.arguments(__doc__, n=500)
    parser.add_argument("--readers", type=int, default=300, help="clients that read slowly (default 300)")
    parser.add_argument("--chunkers", type=int, default=8, help="clients that send chunks of a byte (default 8)")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each load (default 20)")
    return common.run(parser, argv, measure)


def measure(options: argparse.Namespace) -> Result:
    """Polls alone, then beside each load."""
    if not 1 <= max(options.n, options.readers, options.chunkers) <= MOST_CLIENTS or options.seconds <= 0:
        raise common.Refused(f"-n, --readers and --chunkers must be at most {MOST_CLIENTS:,}, and --seconds more than 0")
    many_connections(max(options.n, options.readers))
    waited: dict[str, list[float]] = {}
    peaks: dict[str, float] = {}
    answers = Answers()
    with common.place(options) as place, closing(build(place, Job())) as app:
        app.ensure_schema()
        paths = _large_answers(app)
        with child("web", place) as web:
            address = await_address(web)
            where = str(urlsplit(address).hostname), int(urlsplit(address).port or 0)
            loads: dict[str, Callable[[], Any]] = {
                "alone": ExitStack,
                "stalled": lambda: _stalled(where, options.n, answers),
                "chunks": lambda: _chunks(where, options.chunkers, answers),
                "readers": lambda: _readers(where, options.readers, paths, answers),
            }
            for name, load in loads.items():
                with load(), polled(address, ["/api/tasks", paths[1].partition("/events")[0], "/healthz"]) as waited[name]:
                    threading.Event().wait(options.seconds)
                peaks[name] = server_peak_mb(web.pid)
    settings: dict[str, Any] = {
        **common.setting(options),
        "stalled": options.n,
        "chunkers": options.chunkers,
        "readers": options.readers,
        "seconds": options.seconds,
        **{key: value for name, values in waited.items() for key, value in figures(name, values).items()},
        "answers": dict(sorted(answers.items())),
        "web_peak_mb_after": peaks,
        "ours_is": "the slowest poll beside a load",
        "peer": "the slowest poll alone",
        "ratio_is": "ours to peer: less is better",
    }
    ours, peer = max(max(waited[name]) for name in waited if name != "alone"), max(waited["alone"])
    return Result("slow_clients", options.n, ours, peer, ours / peer, "ms", settings)


def _large_answers(app: AsyncTask) -> tuple[str, str]:
    """Paths of the file of an export, and of a page of Events."""

    @app.export(columns=["n", "title"], name="rows", retry=0)
    def rows(shard: list[int]) -> Iterator[list[Any]]:
        for n in range(*shard):
            yield [n, f"Promotion of the spring, number {n:024}"]

    listed = app.submit("job", ({"n": n, "title": f"Promotion of the spring, number {n:0200}"} for n in range(EVENTS)))
    exported = app.submit_export("rows", [[0, ROWS]], format="csv")
    launcher = app.launcher(concurrency=2, shutdown_s=5)
    launcher.start()
    try:
        for task in (listed, exported):
            task.wait(timeout=_PATIENCE_S)
    finally:
        launcher.stop()
    return f"/api/tasks/{exported.id}/result", f"/api/tasks/{listed.id}/events?limit={EVENTS}"


# -- loads; each ends with its block


@contextmanager
def _running(*loops: Callable[[threading.Event], None]) -> Iterator[None]:
    """Calls each in a thread of its own, with the event that ends it."""
    over = threading.Event()
    threads = [threading.Thread(target=loop, args=(over,), name="slow client") for loop in loops]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextmanager
def _stalled(place: Place, count: int, answers: Answers) -> Iterator[None]:
    with ExitStack() as stack:
        dripping = []
        for number in range(count):
            each = stack.enter_context(socket.create_connection(place, timeout=_PATIENCE_S))
            if beginning := _BEGINNINGS[number % len(_BEGINNINGS)]:
                each.sendall(beginning.encode())
                dripping.append(each)

        def drip(over: threading.Event) -> None:
            while not over.wait(DRIP_S):
                for each in list(dripping):
                    try:
                        each.sendall(b" ")
                    except OSError:
                        dripping.remove(each)
                        answers["stalled: closed"] += 1

        with _running(drip):
            yield


@contextmanager
def _chunks(place: Place, count: int, answers: Answers) -> Iterator[None]:
    text = b'{"worker": "job", "items": [{"n": 1}], "dry_run": true'
    body = b"".join(b"1\r\n%c\r\n" % each for each in text.ljust(BODY_BYTES) + b"}") + b"0\r\n\r\n"
    head = f"POST /api/tasks HTTP/1.1\r\n{_HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()

    def send(over: threading.Event) -> None:
        while not over.is_set():
            with socket.create_connection(place, timeout=_PATIENCE_S) as client:
                try:
                    client.sendall(head + body)
                    answers[f"chunks: {_status(client.recv(1_000))}"] += 1
                except OSError as error:
                    answers[f"chunks: {type(error).__name__}"] += 1

    with _running(*[send] * count):
        yield


@contextmanager
def _readers(place: Place, count: int, paths: Sequence[str], answers: Answers) -> Iterator[None]:
    with ExitStack() as stack:
        reading = []
        for number in range(count):
            each = stack.enter_context(socket.socket())
            each.settimeout(_PATIENCE_S)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            each.connect(place)
            path = paths[number % len(paths)]
            each.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            # Its answer has begun: what is measured is not how long making it takes.
            answers[f"readers: {path.rpartition('/')[2].partition('?')[0]} {_status(each.recv(READ_BYTES))}"] += 1
            reading.append(each)

        def read(over: threading.Event) -> None:
            while not over.wait(READ_S):
                for each in list(reading):
                    try:
                        data = each.recv(READ_BYTES)
                    except OSError:
                        data = b""
                    if not data:
                        reading.remove(each)
                        answers["readers: ended"] += 1

        with _running(read):
            yield


def _status(head: bytes) -> str:
    return head.partition(b"\r\n")[0].decode()[9:12] or "closed"


if __name__ == "__main__":
    sys.exit(main())
