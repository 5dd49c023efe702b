"""Broken, cut and hostile requests at a real server: each is answered or refused, and the server goes on as before."""

from __future__ import annotations

import re
import selectors
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from support.drawn import examples
from support.forked import Program
from support.serving import ROOT, Shop, answers, children, get

from asynctask.clock import SystemClock
from asynctask.testing import PATIENCE_S, wait_for

TOGETHER = 25
"""Cases of one example, each on a connection of its own, all at once."""

UNSHRUNK = [Phase.explicit, Phase.reuse, Phase.generate]
"""A smaller seed is no smaller example."""

REPEATED = re.compile(rb"(.{1,20}?)\1{30,}", re.DOTALL)


class Front:
    """A running server: its address, its processes, its log."""

    def __init__(self, process: Program, url: str, log: Path) -> None:
        self.url = url.rstrip("/")
        place = urlsplit(self.url)
        self.place = (str(place.hostname), int(place.port or 0))
        self._process, self._log = process, log

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """After the block the same processes run, a poll is answered, and the log has no traceback."""
        wait_for(lambda: answers(f"{self.url}/readyz"), "the server to be ready")
        before, logged = self._family(), self._log.stat().st_size
        yield
        assert "tasks" in get(f"{self.url}/api/tasks?limit=1")
        assert before <= self._family(), self._since(logged)
        assert "Traceback" not in self._since(logged), self._since(logged)

    def _family(self) -> set[int]:
        return {self._process.pid, *children(self._process.pid)}

    def _since(self, offset: int) -> str:
        return self._log.read_bytes()[offset:].decode(errors="replace")


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    shop = Shop(tmp_path_factory.mktemp("shop"), trusted_proxies="127.0.0.1")  # whose headers are read, too
    with shop.web() as (process, said):
        found = Front(process, said["url"], shop.folder / "web.log")
        body = b'{"worker": "enroll", "items": [{"sku": "A"}]}'
        _, data = legal("POST", "/api/tasks", LIST, f"Content-Length: {len(body)}", body=body)
        (client,) = converse(found.place, [Case(data)])
        assert parse(client.came)[0].status == 202, client.came  # Task 1
        yield found


# -- clients


class Case(NamedTuple):
    """What one client sends: ``data``, in pieces that end at ``cuts``.

    ``resets``: it resets the connection after the last piece; otherwise it closes its half, and reads to the end.
    """

    data: bytes
    cuts: Sequence[int] = ()
    resets: bool = False

    def __repr__(self) -> str:
        """As it can be pasted into a test: what is repeated is written once."""
        parts, place = [], 0
        for match in REPEATED.finditer(self.data):
            parts += [repr(self.data[place : match.start()]), f"{match[1]!r} * {len(match[0]) // len(match[1])}"]
            place = match.end()
        data = " + ".join([*parts, repr(self.data[place:])])
        return f"Case({data}, {self.cuts!r}, {self.resets})"

    def pieces(self) -> list[bytes]:
        places = [0, *sorted({cut % len(self.data) for cut in self.cuts} - {0}), len(self.data)] if self.data else []
        return [self.data[start:end] for start, end in pairwise(places)]


class Client:
    """One connection of a case."""

    def __init__(self, place: tuple[str, int], case: Case) -> None:
        self.case = case
        self.came = b""
        self.cut_off = False
        """Whether the server reset the connection."""
        self.socket = socket.create_connection(place, timeout=PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self._left = case.pieces()

    def send(self) -> bool:
        """Sends one piece or a part of it; whether more are left."""
        try:
            if self._left:
                sent = self.socket.send(self._left[0])
                self._left[:1] = [rest] if (rest := self._left[0][sent:]) else []
            if not self._left and not self.case.resets:
                self.socket.shutdown(socket.SHUT_WR)
        except OSError:  # the server has closed the connection; its answer may still be here
            self._left = []
        return bool(self._left)

    def receive(self) -> bool:
        """Reads what came; whether more may come."""
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionError:
            self.cut_off = True
            return False
        self.came += data
        return bool(data)

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def converse(place: tuple[str, int], cases: Sequence[Case]) -> list[Client]:
    """Has all cases sent, one piece of each in turn, and their answers read, until every connection has ended."""
    clients = [Client(place, case) for case in cases]
    clock = SystemClock()
    until = clock.monotonic() + PATIENCE_S
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, client)
        while selector.get_map():
            left = until - clock.monotonic()
            assert left > 0, f"neither answered nor closed: {[key.data.case for key in selector.get_map().values()]}"
            for key, ready in selector.select(left):
                client = key.data
                goes_on = not ready & selectors.EVENT_READ or client.receive()
                if goes_on and ready & selectors.EVENT_WRITE and not client.send():
                    if client.case.resets:
                        client.reset()
                        goes_on = False
                    else:
                        selector.modify(client.socket, selectors.EVENT_READ, client)
                if not goes_on:
                    selector.unregister(client.socket)
                    client.socket.close()
    return clients


# -- answers


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def parse(data: bytes, methods: Sequence[str] = (), *, cut_off: bool = False) -> list[Answer]:
    """The answers in what came over one connection. Interim ones (1xx) are left out.

    ``methods``: of the requests, as far as they are known; an answer to HEAD has no body. ``cut_off``: the last may be
    incomplete.
    """
    found: list[Answer] = []
    while data:
        head, separator, data = data.partition(b"\r\n\r\n")
        if not separator and cut_off:
            break
        assert separator, f"the end is no answer: {head[:200]!r}"
        first, *lines = head.decode("latin-1").split("\r\n")
        match = re.fullmatch(r"HTTP/1\.1 ([1-5]\d\d)( .*)?", first)
        assert match, first
        status = int(match[1])
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        if status < 200:
            continue
        bodiless = status in (204, 304) or methods[len(found) : len(found) + 1] == ["HEAD"]
        body, data = (b"", data) if bodiless else _body(headers, data)
        if len(body) < int(headers.get("content-length", 0)) and not bodiless:
            assert cut_off, f"an answer ends after {len(body)} bytes: {head!r}"
            break
        found.append(Answer(status, headers, body))
    return found


def _body(headers: dict[str, str], data: bytes) -> tuple[bytes, bytes]:
    """The body, and what follows it."""
    if "content-length" in headers:
        length = int(headers["content-length"])
        return data[:length], data[length:]
    if headers.get("transfer-encoding") != "chunked":
        return data, b""
    body = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        body, end, data = body + data[:length], data[length : length + 2], data[length + 2 :]
        assert end == b"\r\n"
        if not length:
            return body, data


def check(client: Client) -> None:
    """Each answer is a success, a redirection, or a problem that tells the client its fault."""
    if client.case.resets:
        return
    if b"HEAD" in client.case.data.upper():  # where such an answer ends depends on how the broken requests are read
        assert client.came[:9] in (b"HTTP/1.1 ", b"")
        return
    for answer in parse(client.came, cut_off=client.cut_off):
        assert answer.status < 500 or answer.status in (501, 505), client.case
        if answer.status == 404 and answer.body.startswith(b"<!doctype html>"):
            continue  # a page of a Task, or of a job, that does not exist
        if answer.status >= 400:
            assert answer.headers["content-type"] == "application/problem+json", client.case
            assert answer.body.startswith(b'{"type":"urn:asynctask:problem:'), client.case


def attack(front: Front, cases: Sequence[Case]) -> None:
    with front.unharmed():
        clients = converse(front.place, cases)
    for client in clients:
        check(client)


# -- requests known to break servers


def door_lines() -> list[bytes]:
    """The requests of tests/data/door_lines.txt."""
    lines = (ROOT / "tests/data/door_lines.txt").read_text().splitlines()
    texts = [line.encode().decode("unicode_escape") for line in lines if not line.startswith("#")]
    return [
        re.sub(r"\{(.*?) x (\d+)\}", lambda match: match[1] * int(match[2]), text, flags=re.DOTALL).encode("latin-1")
        for text in texts
    ]


@pytest.mark.parametrize("data", door_lines(), ids=lambda data: repr(data[:60])[2:-1])
@pytest.mark.parametrize("resets", [False, True], ids=["reads", "resets"])
def test_a_request_known_to_break_servers_does_not_break_this_one(front: Front, data: bytes, resets: bool) -> None:
    attack(front, [Case(data, cuts, resets) for cuts in ((), range(0, len(data), 97))])


# -- requests that are broken at random

DRY_RUN = b'{"worker": "enroll", "items": [{"sku": "A"}, {"sku": "B", "quantity": 2}], "dry_run": true}'
FORM = b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.csv"\r\n\r\nsku\nA\n\r\n--B--\r\n'
CSV = b"sku,Quantity\nA,1\nB,2\n"
BODIES = [b"", b"x", DRY_RUN, DRY_RUN[:-9], CSV, FORM, b"\r\n\r\n", b"0\r\n\r\n", b"\xff\x00" * 40]
METHODS = ["GET", "POST", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "PRI", "G\tT", "\x80"]
TARGETS = [
    "/healthz", "/api/tasks", "/api/tasks?limit=1&after=1", "/api/tasks?worker=enroll&dry_run=true", "/api/tasks/999",
    "/api/jobs/records", "/", "/static/app.css", "/nowhere", "*", "//evil.example/", "/%00", "/%ff%", "/../..",
    "/api/tasks/1", "/api/tasks/1/events?limit=1&status=", "/api/tasks/1/report.csv", "/api/tasks/1/pause", "/api/queues",
    "/api/tasks/" + "9" * 5_000, "/tasks/1", "/jobs/x", "/api/workers/enroll/template.csv", "/api/exports", "/metrics",
    "/docs", "http://127.0.0.1/healthz", "http://[/", "x://[::1", "a:1", "http://\xe4/", "/?" + "a" * 33_000, "/a b", "",
]  # fmt: skip
VERSIONS = ["HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/0.9", "HTTP/1.10", "http/1.1", ""]
LINES = [
    "Content-Type: application/json", "Content-Type: text/csv; charset=utf-16", "Connection: close",
    "Connection: keep-alive", "Connection: upgrade", "Upgrade: websocket", "Upgrade: h2c", "Expect: 100-continue",
    "Expect: nothing", "Content-Length: 5", "Content-Length: -1", "Content-Length: 5, 5", "Content-Length: " + "9" * 4_301,
    "Transfer-Encoding: gzip", "Transfer-Encoding: chunked, chunked", "Transfer-Encoding:", "TE: trailers", "Host: b",
    "Host : a", " folded", "Cookie: \x80\xff", "X: " + "a" * 66_000, "No colon", ": no name", "Range: bytes=0-0,1-1,-",
    "If-None-Match: W/", "Idempotency-Key: " + "k" * 300, "Accept-Language: ;;q=x", "Accept-Encoding: gzip;q=nan",
    "X-Forwarded-For: [", "X-Forwarded-Host: a, [::1", "X-Forwarded-Proto: x", "X-Forwarded-Prefix: //a/../%00",
    'Forwarded: for="[;host="a\\;proto=,;=', "Origin: http://[", "Referer: http://[", "Authorization: Basic \xff",
    "Authorization: Bearer \xff", "Content-Encoding: br", "Content-Type: multipart/form-data",
    "Content-Type: multipart/form-data; boundary=B", "Content-Type: text/csv; charset=\xff", "Content-Type: ;=",
    "Last-Event-ID: \xff", "If-Modified-Since: 99", "Sec-Fetch-Site: \xff", "X-HTTP-Method-Override: \xff",
]  # fmt: skip
WORDS = [
    b"\r\n", b"\r", b"\n", b"\r\n\r\n", b"\0", b" ", b"\t", b":", b"\x80", b"%", b"\x7f", b"HTTP/1.1", b"0\r\n\r\n",
    b"ffffffff\r\n", b";", b";a=" + b"b" * 9_000, b"Transfer-Encoding: chunked\r\n", b"Content-Length: 3\r\n",
    b"Trailer: x\r\n", b"X: y\r\n" * 3_000, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01", b"+", b"-", b"0x", b"1" * 5_000,
]  # fmt: skip


def chunked(body: bytes, sizes: Sequence[int] = (7, 1), extension: bytes = b"", trailer: bytes = b"") -> bytes:
    """A body in chunks of ``sizes``, one after the other and again from the first."""
    out, place, number = b"", 0, 0
    while chunk := body[place : place + sizes[number % len(sizes)]]:
        out += b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk)
        place, number = place + len(chunk), number + 1
    return out + b"0\r\n" + trailer + b"\r\n"


def request(draw: Random) -> bytes:
    """A request, most often a legal one."""
    usual = draw.random() < 0.75
    method = draw.choice(METHODS[:2] if usual else METHODS)
    target = draw.choice(TARGETS[:8] if usual else TARGETS)
    version = "HTTP/1.1" if usual else draw.choice(VERSIONS)
    lines = ["Host: 127.0.0.1"] if usual or draw.random() < 0.5 else []
    if not usual or method == "POST":
        lines += draw.sample(LINES, draw.randint(0, 3))
    body = draw.choice(BODIES) if not usual or method == "POST" else b""
    match draw.choice(["length", "length", "chunked", "extended", "longer", "none"]) if body else "none":
        case "length":
            lines.append(f"Content-Length: {len(body)}")
        case "longer":
            lines.append(f"Content-Length: {len(body) + draw.randint(-2, 9)}")
        case "chunked":
            lines.append("Transfer-Encoding: chunked")
            body = chunked(body)
        case "extended":
            lines.append("Transfer-Encoding: chunked")
            body = chunked(body, (1,), b' ;a="b;\\"";c', b"X: y\r\n")
    return "\r\n".join([f"{method} {target} {version}", *lines, "", ""]).encode("latin-1") + body


def case_of(draw: Random) -> Case:
    """Some requests on one connection, with bytes changed, cut into packets."""
    data = bytearray(b"".join(request(draw) for _ in range(draw.randint(1, 3))))
    for _ in range(draw.randint(0, 4)):
        place = draw.randint(0, len(data))
        match draw.choice(["set", "insert", "insert", "drop", "again", "end"]):
            case "set":
                data[place : place + 1] = draw.randbytes(1)
            case "insert":
                data[place:place] = draw.choice(WORDS)
            case "drop":
                del data[place : place + draw.randint(1, 40)]
            case "again":
                data[place:place] = data[place : place + draw.randint(1, 40)]
            case "end":
                del data[max(place, 1) :]
    cuts = draw.choice([draw.choices(range(2_000), k=draw.randint(0, 6)), range(draw.randint(1, 300))])
    return Case(bytes(data), cuts, resets=draw.random() < 0.2)


@settings(max_examples=examples(2_000, 2_000_000) // TOGETHER, phases=UNSHRUNK)
@given(seed=st.integers(0, 2**63))
def test_broken_requests_are_answered_or_refused_and_harm_nobody(front: Front, seed: int) -> None:
    draw = Random(seed)  # to have hypothesis draw each part takes ten times as long as the server
    cases = [case_of(draw) for _ in range(TOGETHER)]
    try:
        attack(front, cases)
    except (AssertionError, OSError):
        for case in cases:  # tells which of them does it alone
            attack(front, [case])
        raise


# -- the same bytes in other packets


def legal(method: str, target: str, *lines: str, body: bytes = b"") -> tuple[str, bytes]:
    return method, "\r\n".join([f"{method} {target} HTTP/1.1", "Host: 127.0.0.1", *lines, "", ""]).encode() + body


LIST = "Content-Type: application/json"
CHUNKED = "Transfer-Encoding: chunked"
LEGAL = [
    legal("GET", "/healthz"),
    legal("HEAD", "/api/tasks"),
    legal("GET", "/nowhere"),
    legal("GET", "/?" + "a" * 9_000),
    legal("GET", "/static/app.css", "Range: bytes=1-300"),
    legal("DELETE", "/healthz"),
    legal("POST", "/api/tasks", LIST, f"Content-Length: {len(DRY_RUN)}", body=DRY_RUN),
    legal("POST", "/api/tasks", LIST, f"Content-Length: {len(DRY_RUN)}", "Expect: 100-continue", body=DRY_RUN),
    legal("POST", "/api/tasks", LIST, CHUNKED, body=chunked(DRY_RUN)),
    legal("POST", "/api/tasks", LIST, CHUNKED, body=chunked(DRY_RUN, (1,), b";a=b", b"X: y\r\n")),
    legal("POST", "/api/tasks", "Content-Length: 1", body=b"x"),
]
VARIES = {"date", "connection"}
"""Headers that differ between two answers to the same request: the second tells a client that closed its half early."""

Requests = Sequence[tuple[str, bytes]]


def answered(client: Client, asked: Requests) -> list[Answer]:
    """The answers to legal requests; an answer for each."""
    found = parse(client.came, [method for method, _ in asked])
    assert len(found) == len(asked), client
    assert not client.cut_off
    return [each._replace(headers={k: v for k, v in each.headers.items() if k not in VARIES}) for each in found]


@settings(max_examples=examples(25, 2_000))
@given(
    pairs=st.lists(st.lists(st.sampled_from(LEGAL), min_size=2, max_size=2), min_size=4, max_size=4),
    cuts=st.lists(st.integers(0, 20_000), max_size=12),
    step=st.integers(1, 50),
)
@example(pairs=[list(pair) for pair in zip(LEGAL, LEGAL[1:] + LEGAL[:1], strict=True)], cuts=[], step=1)
def test_what_two_requests_give_does_not_depend_on_their_packets(
    front: Front, pairs: list[Requests], cuts: list[int], step: int
) -> None:
    with front.unharmed():
        wholes = [b"".join(data for _, data in pair) for pair in pairs]
        splits: list[Sequence[int]] = [(), cuts, range(0, max(map(len, wholes)), step)]
        clients = iter(converse(front.place, [Case(whole, each) for whole in wholes for each in splits]))
        for pair in pairs:
            at_once, *others = (answered(next(clients), pair) for _ in splits)
            assert at_once[0].status < 500
            assert others == [at_once] * len(others)
