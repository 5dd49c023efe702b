"""The web server before Flask: what comes over a connection, in which pieces and how slowly, and what is answered to it."""

from __future__ import annotations

import gc
import hashlib
import json
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

import webapi.server
from asynctask.clock import SystemClock
from asynctask.testing import wait_for
from webapi.context import BODY_LIMIT, GONE, HEAD_ONLY
from webapi.server import LINGER_S, MAX_HEADERS, MAX_PIPELINED, Connection, HttpServer

PATIENCE_S = 60.0
LARGE = 30_000_000
LIMIT = 100_000
PIECE = bytes(range(256)) * 256


class Clock(SystemClock):
    """A clock that a test puts forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
    """What the path says: an echo, something large, a bug."""
    path = environ["PATH_INFO"]
    if path == "/gone":
        wait_for(environ[GONE], "its client has gone", PATIENCE_S)
        start_response("404 Not Found", [])
        return [b""]
    if HEAD_ONLY in environ and int(environ.get("CONTENT_LENGTH") or 0) <= LIMIT:
        environ[BODY_LIMIT] = LIMIT
        start_response("204 No Content", [])
        return [b""]
    if path in ("/large", "/result", "/report.csv"):
        start_response("200 OK", [("Content-Type", "application/octet-stream")])
        return iter([PIECE] * (LARGE // len(PIECE)))
    if path == "/bug":
        raise RuntimeError("a secret")
    length = int(environ.get("CONTENT_LENGTH") or 0)
    if length > LIMIT:
        start_response("413 Too Large", [("Content-Length", "0")])
        return [b""]
    body = environ["wsgi.input"].read()
    found = {"path": path, "query": environ["QUERY_STRING"], "length": length, "body": body.decode()}
    said = json.dumps({**found, "host": environ.get("HTTP_HOST"), "note": environ.get("HTTP_X_NOTE")}).encode()
    start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(said)))])
    return [said]


class Server:
    def __init__(self, **how: Any) -> None:
        self.clock = Clock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.place = self.listener.getsockname()
        settings = {"threads": 1, "storage": 10**9, "clock": self.clock, **how}
        self.loop = HttpServer(settings.pop("application", application), self.listener, **settings)
        self.thread = threading.Thread(target=self.loop.run, name="loop")
        self.thread.start()

    def connect(self) -> Talk:
        return Talk(self.place)

    def close(self) -> None:
        self.loop.stop()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


class Talk:
    """A connection that sends what it is told to, and reads answers one by one."""

    def __init__(self, place: tuple[str, int]) -> None:
        self.socket = socket.create_connection(place, timeout=PATIENCE_S)
        self.came = self.socket.makefile("rb")

    def send(self, data: bytes) -> Talk:
        self.socket.sendall(data)
        return self

    def get(self, path: str = "/x") -> Talk:
        return self.send(f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())

    def head(self) -> tuple[int, dict[str, str]]:
        status = int(self.came.readline().split()[1])
        headers = {}
        while (line := self.came.readline().strip()) != b"":
            name, _, value = line.decode().partition(": ")
            headers[name.lower()] = value
        return status, headers

    def answer(self) -> tuple[int, dict[str, str], Any]:
        status, headers = self.head()
        body = self.came.read(int(headers["content-length"]))
        return status, headers, json.loads(body) if body else None

    @property
    def ended(self) -> bool:
        """Waits for the end of the connection, with nothing before it."""
        return self.came.read(1) == b""

    def close(self) -> None:
        self.came.close()
        self.socket.close()


@contextmanager
def serving(**how: Any) -> Iterator[Server]:
    server = Server(**how)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.fixture
def talk(server: Server) -> Iterator[Talk]:
    with closing(server.connect()) as found:
        yield found


def post(body: bytes, *lines: str) -> bytes:
    return "\r\n".join(["POST /x?a=1 HTTP/1.1", "Host: here", *lines, "", ""]).encode() + body


@pytest.mark.parametrize(
    "request_bytes",
    [
        post(b"hello", "Content-Length: 5"),
        post(b"2\r\nhe\r\n3;a=b\r\nllo\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
        post(b"2\r\nhe\r\n3\r\nllo\r\n0\r\nX: y\r\n\r\n", "Transfer-Encoding: chunked"),
    ],
)
def test_a_request_is_the_same_in_whatever_pieces_it_comes(talk: Talk, request_bytes: bytes) -> None:
    expected = {"path": "/x", "query": "a=1", "length": 5, "body": "hello", "host": "here", "note": None}
    for size in (1, 7, len(request_bytes)):
        for start in range(0, len(request_bytes), size):
            talk.send(request_bytes[start : start + size])
        assert talk.answer()[::2] == (200, expected)


def test_several_requests_on_one_connection_are_answered_in_order(talk: Talk) -> None:
    talk.send(post(b"one", "Content-Length: 3") + post(b"two!", "Content-Length: 4")).get("/three")
    assert [talk.answer()[2]["body"] for _ in range(3)] == ["one", "two!", ""]


def test_a_client_that_asks_first_is_told_to_go_on(talk: Talk) -> None:
    talk.send(post(b"", "Content-Length: 5", "Expect: 100-continue"))
    assert talk.head()[0] == 100
    assert talk.send(b"hello").answer()[2]["body"] == "hello"


def test_an_answer_without_a_length_comes_in_chunks_and_the_connection_stays(talk: Talk) -> None:
    status, headers = talk.get("/large").head()
    assert (status, headers["transfer-encoding"]) == (200, "chunked")
    total = 0
    while size := int(talk.came.readline(), 16):
        total += len(talk.came.read(size + 2)) - 2
    talk.came.readline()
    assert total == LARGE // len(PIECE) * len(PIECE)
    assert talk.get().answer()[0] == 200


def test_head_has_no_body_and_http_1_0_ends_with_its_connection(server: Server) -> None:
    with closing(server.connect()) as talk:
        status, headers = talk.send(b"HEAD /large HTTP/1.1\r\nHost: here\r\n\r\n").head()
        assert (status, "transfer-encoding" in headers) == (200, False)
        assert talk.get().answer()[0] == 200
    with closing(server.connect()) as talk:
        assert talk.send(b"GET /x HTTP/1.0\r\n\r\n").answer()[0] == 200
        assert talk.ended


@pytest.mark.parametrize("path", ["/large", "/result", "/report.csv"])
def test_an_answer_without_a_length_ends_with_its_connection_in_http_1_0(talk: Talk, path: str) -> None:
    """nginx asks in HTTP/1.0 unless it is told otherwise."""
    status, headers = talk.send(f"GET {path} HTTP/1.0\r\n\r\n".encode()).head()
    assert (status, headers["connection"], "transfer-encoding" in headers) == (200, "close", False)
    assert hashlib.sha256(talk.came.read()).digest() == hashlib.sha256(PIECE * (LARGE // len(PIECE))).digest()


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: here\r\n\r\n", 414, "uri_too_long"),
        (b"GET /" + b"a" * 400_000, 414, "uri_too_long"),
        (b"GET /x HTTP/1.1\r\nHost: here\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /x HTTP/1.1\r\n" + b"a" * 70_000, 431, "headers_too_large"),
        (b"GET /x HTTP/1.1\r\nHost: here\r\n" + b"X: y\r\n" * 20_000, 431, "headers_too_large"),
        (b"GET /x HTTP/1.1\r\nHost: here\r\n" + b"X:\r\n" * MAX_HEADERS + b"\r\n", 431, "headers_too_large"),
        (post(b"0\r\n" + b"X:\r\n" * (MAX_HEADERS + 1) + b"\r\n", "Transfer-Encoding: chunked"), 400, "malformed_request"),
        (post(b"1;" + b"x" * 90_000, "Transfer-Encoding: chunked"), 400, "malformed_request"),
        (post(b"0\r\nX: " + b"x" * 90_000, "Transfer-Encoding: chunked"), 400, "malformed_request"),
        (post(b"0\r\n" + b"X: y\r\n" * 20_000, "Transfer-Encoding: chunked"), 400, "malformed_request"),
        (b"GET /x HTTP/2.0\r\nHost: here\r\n\r\n", 505, "http_version_not_supported"),
        (b"GET /x\r\n\r\n", 505, "http_version_not_supported"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400, "malformed_request"),
        (b"GET /x HTTP/1.1\r\nno header\r\n\r\n", 400, "malformed_request"),
        (b"GET /x HTTP/1.1\r\n\r\n", 400, "malformed_request"),
        (b"GET /x HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "malformed_request"),
        (b"GET x HTTP/1.1\r\nHost: here\r\n\r\n", 400, "malformed_request"),
        (post(b"", "Content-Length: x"), 400, "malformed_request"),
        (post(b"", "Content-Length: 5", "Content-Length: 6"), 400, "malformed_request"),
        (post(b"", "Content-Length: 5", "Transfer-Encoding: chunked"), 400, "malformed_request"),
        (b"POST /x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "malformed_request"),
        (post(b"x\r\n", "Transfer-Encoding: chunked"), 400, "malformed_request"),
        (post(b"1" * 10_000, "Transfer-Encoding: chunked"), 400, "malformed_request"),
        (post(b"", "Transfer-Encoding: gzip"), 400, "malformed_request"),
    ],
)
def test_what_the_server_itself_refuses_is_a_problem_too(talk: Talk, data: bytes, status: int, code: str) -> None:
    found, headers, body = talk.send(data).answer()
    assert (found, headers["content-type"], headers["connection"]) == (status, "application/problem+json", "close")
    assert (body["status"], body["code"], body["type"]) == (status, code, f"urn:asynctask:problem:{code}")
    assert set(body) == {"type", "title", "status", "detail", "instance", "code", "errors"}
    assert isinstance(body["instance"], str)
    assert talk.ended


def test_a_bug_under_the_application_is_a_problem_without_its_words(talk: Talk) -> None:
    status, _, body = talk.get("/bug").answer()
    assert (status, body["code"]) == (500, "internal_error")
    assert "secret" not in str(body)


def test_a_body_that_is_too_long_is_refused_by_its_head(talk: Talk) -> None:
    assert talk.send(post(b"", "Content-Length: 10000000000")).answer()[0] == 413
    assert talk.ended


def test_a_chunked_body_is_refused_as_soon_as_it_is_too_long(talk: Talk) -> None:
    chunk = b"%x\r\n%b\r\n" % (len(PIECE), PIECE)
    assert talk.send(post(chunk * 2, "Transfer-Encoding: chunked")).answer()[0] == 413


@pytest.mark.parametrize(
    "target", ["http://[/", "x://[", "http://[abc]/", "http://here:80/x", "//evil.example/%2e%2e", "/%00", "*", "here:80"]
)
@pytest.mark.parametrize("method", ["GET", "OPTIONS", "CONNECT"])
def test_no_target_ends_anything_but_its_own_connection(server: Server, method: str, target: str) -> None:
    with closing(server.connect()) as hostile, closing(server.connect()) as other:
        hostile.send(f"{method} {target} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
        assert hostile.head()[0] in (200, 400)
        assert other.get().answer()[0] == 200


@pytest.mark.parametrize(
    "lines",
    [
        ["Content-Length: " + "9" * 4_301],
        ["Content-Length: -1"],
        ["Content-Length: +1"],
        ["Transfer-Encoding: chunked, chunked"],
        ["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"],
        ["Transfer-Encoding:"],
        ["Transfer-Encoding:", "Content-Length: 3"],
        ["Transfer-Encoding: identity"],
        ["Transfer-Encoding: \x0bchunked"],
    ],
)
def test_a_length_that_two_programs_could_read_in_two_ways_is_refused(server: Server, lines: list[str]) -> None:
    with closing(server.connect()) as hostile, closing(server.connect()) as other:
        status, _, body = hostile.send(post(b"abc", *lines)).answer()
        assert (status, body["code"]) == (400, "malformed_request")
        assert hostile.ended
        assert other.get().answer()[0] == 200


def test_a_trailer_is_no_header(talk: Talk) -> None:
    """A proxy that removes X-Forwarded-For from heads lets it through in a trailer."""
    talk.send(post(b"1\r\nx\r\n0\r\nX-Note: trailer\r\n\r\n", "Transfer-Encoding: chunked"))
    assert talk.answer()[2]["note"] is None
    talk.send(post(b"x", "Content-Length: 1", "X-Note: header", "X_Note: disguised"))
    assert talk.answer()[2]["note"] == "header"


def test_a_target_with_a_host_takes_the_place_of_the_header(talk: Talk) -> None:
    talk.send(b"GET http://there:81/x?a=1 HTTP/1.1\r\nHost: here\r\n\r\n")
    assert talk.answer()[2] | {"length": 0} == {
        "path": "/x", "query": "a=1", "length": 0, "body": "", "host": "there:81", "note": None
    }  # fmt: skip


@pytest.mark.parametrize("size", [1, 60, 1_000])
@pytest.mark.parametrize(
    ("framing", "body"),
    [
        ("Content-Length: 3", b"one"),
        ("Transfer-Encoding: chunked", b"1\r\no\r\n2\r\nne\r\n0\r\n\r\n"),
        ("Content-Length: 0", b""),
        ("X-Note: none", b""),
    ],
)
def test_a_client_that_offers_another_protocol_is_answered_in_this_one(
    talk: Talk, framing: str, body: bytes, size: int
) -> None:
    """Java's HTTP client does so with each request, and so does curl --http2; the parser takes the body for HTTP/2."""
    data = post(body, framing, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AA") * 3
    for start in range(0, len(data), size):
        talk.send(data[start : start + size])
    assert [talk.answer()[2]["body"] for _ in range(3)] == ["one" if body else ""] * 3


def test_a_client_of_http_1_0_is_not_told_to_go_on(talk: Talk) -> None:
    talk.send(b"POST /x HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\nhello")
    assert talk.answer()[2]["body"] == "hello"


def test_garbage_after_a_request_does_not_take_its_answer(talk: Talk) -> None:
    talk.send(post(b"one", "Content-Length: 3") + b"\x16\x03\x01 no request\r\n\r\n")
    assert talk.answer()[2]["body"] == "one"
    assert talk.answer()[0] == 400
    assert talk.ended


def test_a_client_that_has_closed_its_side_gets_its_answers(talk: Talk) -> None:
    talk.send(post(b"one", "Content-Length: 3") + post(b"two", "Content-Length: 3"))
    talk.socket.shutdown(socket.SHUT_WR)
    assert [talk.answer()[2]["body"] for _ in range(2)] == ["one", "two"]
    assert talk.ended


@pytest.mark.parametrize("path", ["/large", "/result", "/report.csv"])
def test_a_client_that_has_closed_its_side_gets_a_large_answer_whole(talk: Talk, path: str) -> None:
    talk.get(path).socket.shutdown(socket.SHUT_WR)
    assert talk.head()[0] == 200
    came = talk.came.read()
    assert len(came) > LARGE // len(PIECE) * len(PIECE)
    assert came.endswith(b"\r\n0\r\n\r\n")


class Holds:
    """The application; a thread that answers ``/hold`` waits until it is ``free``."""

    def __init__(self) -> None:
        self.held, self.free = threading.Event(), threading.Event()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ["PATH_INFO"] == "/hold":
            self.held.set()
            self.free.wait(PATIENCE_S)
        return application(environ, start_response)


def test_a_refused_client_is_not_told_to_go_on() -> None:
    holds = Holds()
    with serving(application=holds) as server, capture_logs() as logs, ExitStack() as stack:
        holder, talk = (stack.enter_context(closing(server.connect())) for _ in range(2))
        holder.get("/hold")
        assert holds.held.wait(PATIENCE_S)
        talk.send(post(b"", "Content-Length: 5", "Expect: 100-continue")).socket.shutdown(socket.SHUT_WR)
        assert talk.answer()[2]["code"] == "malformed_body"
        holds.free.set()  # the body is asked for only now
        assert talk.ended
        assert [holder.answer()[0], holder.get().answer()[0]] == [200, 200]
    assert logs == []


def test_a_client_that_resets_right_after_its_answer_is_no_bug(
    server: Server, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    linger, reset = Connection._linger, threading.Event()

    def reset_first(connection: Connection) -> None:
        talk.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        talk.close()
        reset.set()
        linger(connection)

    monkeypatch.setattr(Connection, "_linger", reset_first)
    with capture_logs() as logs:
        talk.send(post(b"", "Content-Length: 1000000000"))
        assert reset.wait(PATIENCE_S)
        wait_for(lambda: not server.loop.server_state.connections, "the connection to be closed")
    assert logs == []


def test_other_requests_do_not_queue_behind_long_polls() -> None:
    holds = Holds()
    with serving(application=holds, threads=2) as server, ExitStack() as stack:
        *polls, talk = (stack.enter_context(closing(server.connect())) for _ in range(6))
        for each in polls:
            each.get("/hold?wait=20")
        assert holds.held.wait(PATIENCE_S)
        assert talk.get().answer()[0] == 200
        holds.free.set()
        assert [each.answer()[0] for each in polls] == [200] * len(polls)


def test_a_bucket_that_does_not_answer_holds_half_of_the_threads() -> None:
    opened, answers = threading.Event(), threading.Event()

    def waiting(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ["PATH_INFO"] != "/result":
            return application(environ, start_response)
        start_response("200 OK", [("Content-Length", "1")])
        return piece()

    def piece() -> Iterator[bytes]:
        opened.set()
        assert answers.wait(PATIENCE_S)
        yield b"x"

    with serving(application=waiting, threads=2) as server, ExitStack() as stack:
        *files, talk = (stack.enter_context(closing(server.connect())) for _ in range(6))
        for each in files:
            each.get("/result")
        assert opened.wait(PATIENCE_S)
        assert talk.get().answer()[0] == 200
        answers.set()
        assert [each.head()[0] for each in files] == [200] * len(files)


def test_a_client_that_sends_requests_without_end_is_refused(talk: Talk) -> None:
    talk.send(b"GET /x HTTP/1.1\r\nHost: here\r\n\r\n" * 200)
    statuses = list[int]()
    while not statuses or statuses[-1] == 200:
        statuses.append(talk.answer()[0])
    assert statuses[-1] == 400
    assert len(statuses) > MAX_PIPELINED, "those that were taken are answered"
    assert talk.ended


def test_a_tiny_chunk_costs_no_more_than_its_bytes(talk: Talk) -> None:
    body = b"x" * 50_000
    talk.send(post(b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n", "Transfer-Encoding: chunked"))
    assert talk.answer()[2]["length"] == len(body)


def test_a_connection_that_takes_turns_is_not_read_beyond_what_the_application_takes(server: Server) -> None:
    gate, body = threading.Event(), b"x" * 95_000
    server.loop._threads.submit(gate.wait, PATIENCE_S)  # the only thread
    chunks = b"".join(b"28\r\n%b\r\n" % body[at : at + 40] for at in range(0, len(body), 40))
    with closing(server.connect()) as talk:
        talk.send(post(chunks + b"0\r\n\r\n", "Transfer-Encoding: chunked"))
        try:
            # This thread may see a connection whose loop has not given it its flow yet.
            full = lambda: [c for c in server.loop._open() if getattr(c.flow, "read_paused", False)]  # noqa: E731
            (connection,) = wait_for(full, "uvicorn keeps no more of the body")
            wait_for(lambda: not server.loop._slowed, "its turn has come")
            assert not connection.transport.is_reading()
        finally:
            gate.set()
        assert talk.answer()[2]["length"] == len(body)


def test_a_client_that_is_gone_already_does_not_pass_for_one_of_a_unix_socket() -> None:
    """Such a client has no address either, and may be a trusted proxy."""
    seen = list[str]()

    def noting(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        seen.append(environ["REMOTE_ADDR"])
        return application(environ, start_response)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as gone:
            gone.sendall(b"GET /x HTTP/1.1\r\nHost: here\r\n\r\n")
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
        server = HttpServer(noting, listener, threads=1, storage=10**9, clock=SystemClock())
        thread = threading.Thread(target=server.run)
        with closing(Talk(listener.getsockname())) as talk:
            thread.start()
            assert talk.get().answer()[0] == 200
        server.stop()
        thread.join(PATIENCE_S)
    assert seen == ["127.0.0.1"]


def test_a_connection_that_was_closed_takes_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webapi.server, "TURN_S", 3_600.0)  # the test gives the turn
    tiny, turned = post(b"1\r\nx\r\n" * 300, "Transfer-Encoding: chunked"), threading.Event()
    with serving(most=3) as server, ExitStack() as stack:
        slowed = server.loop._slowed
        for number in range(1, 4):
            stack.enter_context(closing(server.connect())).send(tiny)
            wait_for(lambda: len(slowed) == number, "it waits for its turn")  # noqa: B023
        for _ in range(2):
            stack.enter_context(closing(server.connect()))
        *closed, last = slowed
        wait_for(lambda: all(each.gone for each in closed), "they made room")
        loop = server.loop._watch.get_loop()
        loop.call_soon_threadsafe(server.loop._next_turn)
        loop.call_soon_threadsafe(turned.set)
        assert turned.wait(PATIENCE_S)
        assert last.transport.is_reading()


# -- The access log -----------------------------------------------------------------------------------------------------


def logged(talks: Callable[[Server], None], **how: Any) -> list[tuple[Any, ...]]:
    """The lines of the requests of ``talks``, once the server has ended."""
    with capture_logs() as lines:
        with serving(**{"access_log": True, **how}) as server:
            talks(server)
        found = [each for each in lines if each["event"] == "request"]
    assert all(each["log_level"] == "info" and each["seconds"] >= 0 for each in found)
    assert {(each["address"], each["name"]) for each in found} <= {("127.0.0.1", None)}
    return [(each["method"], each["path"], each["status"]) for each in found]


def test_each_request_is_a_line_of_the_access_log_without_its_query() -> None:
    def talks(server: Server) -> None:
        with closing(server.connect()) as talk:
            talk.get("/x?token=secret").send(post(b"hello", "Content-Length: 5")).get("/%1b[31m" + "a" * 600).get("/bug")
            assert [talk.answer()[0] for _ in range(4)] == [200, 200, 200, 500]

    assert logged(talks) == [
        ("GET", "/x", 200), ("POST", "/x", 200), ("GET", "/\\x1b[31m" + "a" * 494, 200), ("GET", "/bug", 500),
    ]  # fmt: skip
    assert logged(talks, access_log=False) == []


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"\x16\x03\x01 no request\r\n\r\n", (None, None, 400)),
        (b"GET /x HTTP/1.1\r\nHost: here\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", (None, None, 431)),
        (b"GET /" + b"a" * 400_000, (None, None, 414)),
        (b"GET /x HTTP/1.1\r\n\r\n", ("GET", "/x", 400)),
        (post(b"x\r\n", "Transfer-Encoding: chunked"), ("POST", "/x", 400)),
        (post(b"", "Content-Length: 200000"), ("POST", "/x", 413)),
    ],
)
def test_what_the_server_itself_refuses_is_one_line_too(data: bytes, line: tuple[Any, ...]) -> None:
    def talks(server: Server) -> None:
        with closing(server.connect()) as talk:
            assert talk.send(data).answer()[0] == line[2]

    assert logged(talks) == [line]


def test_a_body_that_is_late_or_cut_off_is_one_line_with_the_status_that_its_client_got() -> None:
    def talks(server: Server) -> None:
        with closing(server.connect()) as drips:
            drips.send(post(b"", "Content-Length: 500", "Expect: 100-continue"))
            assert drips.head()[0] == 100
            server.clock.ahead += 100
            assert drips.answer()[0] == 408
        with closing(server.connect()) as cut, closing(server.connect()) as behind:
            cut.send(post(b"he", "Content-Length: 5")).socket.shutdown(socket.SHUT_WR)
            assert cut.answer()[0] == 400
            behind.get("/first").send(post(b"he", "Content-Length: 5")).socket.shutdown(socket.SHUT_WR)
            assert [behind.answer()[0] for _ in range(2)] == [200, 400]

    assert sorted(logged(talks)) == [("GET", "/first", 200), ("POST", "/x", 400), ("POST", "/x", 400), ("POST", "/x", 408)]


def test_a_client_that_goes_before_its_answer_is_a_line_without_a_status() -> None:
    def talks(server: Server) -> None:
        with closing(server.connect()) as goes:
            goes.send(post(b"", "Content-Length: 5", "Expect: 100-continue"))
            assert goes.head()[0] == 100
            goes.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    assert logged(talks) == [("POST", "/x", None)]


# -- Clients that go away ------------------------------------------------------------------------------------------------


def broken(talk: Talk) -> None:
    """Ends a connection without a farewell, as a crash of the client does."""
    talk.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    talk.close()


def only_connection(server: Server) -> Connection:
    (found,) = server.loop.server_state.connections
    assert isinstance(found, Connection)
    return found


def test_nothing_is_kept_of_a_connection_that_broke_after_an_answer(server: Server) -> None:
    talk = server.connect()
    assert talk.get().answer()[0] == 200
    kept = weakref.ref(only_connection(server))
    broken(talk)
    wait_for(lambda: gc.collect() >= 0 and kept() is None, "it is forgotten", PATIENCE_S)


def test_a_refusal_of_a_client_that_has_gone_is_no_bug(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with capture_logs() as lines, closing(server.connect()) as talk:
        talk.send(b"HEAD /gone HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\n\r\nhello")
        wait_for(lambda: server.loop.server_state.tasks, "it is asked", PATIENCE_S)
        broken(talk)
        wait_for(lambda: not server.loop.server_state.tasks, "it is answered", PATIENCE_S)
    assert (lines, caplog.records) == ([], [])


def test_a_client_that_has_closed_its_side_is_not_waited_for_after_a_refusal(server: Server, talk: Talk) -> None:
    talk.send(post(b"he", "Content-Length: 5"))
    talk.socket.shutdown(socket.SHUT_WR)
    assert talk.answer()[2]["code"] == "malformed_body"
    wait_for(lambda: not server.loop.server_state.connections, "its descriptor is free", LINGER_S / 2)


def test_an_answer_to_a_client_that_has_gone_is_not_written_to_the_log(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """The second request tells uvicorn nothing of the first when the connection is lost."""
    talk = server.connect().get("/large").get("/x")
    assert talk.head()[0] == 200
    broken(talk)
    wait_for(lambda: not server.loop.server_state.tasks, "the answer is given up", PATIENCE_S)
    assert caplog.records == []


def test_a_request_is_not_performed_whose_client_went_before_its_turn(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise clients that come and go fill the queue of the threads without being counted as connections."""
    first, second = server.connect().get("/gone"), server.connect()
    wait_for(lambda: server.loop._threads._work_queue.qsize() == 0, "the only thread is taken", PATIENCE_S)
    second.get("/bug")
    wait_for(lambda: server.loop._threads._work_queue.qsize() == 1, "it waits", PATIENCE_S)
    broken(second)
    wait_for(lambda: len(server.loop.server_state.connections) == 1, "the server knows", PATIENCE_S)
    with capture_logs() as lines:
        broken(first)
        wait_for(lambda: not server.loop.server_state.tasks, "both are over", PATIENCE_S)
    assert lines == []


def test_a_body_of_tiny_chunks_waits_until_it_is_wanted() -> None:
    """Here behind another request of its connection, which may take hours: a stream."""
    done = threading.Event()

    def pour(talk: Talk) -> None:
        with suppress(OSError):
            while not done.is_set():
                talk.send(b"1\r\nx\r\n" * 10_000)

    with serving(threads=2) as server, closing(server.connect()) as talk, closing(server.connect()) as other:
        talk.send(b"GET /gone HTTP/1.1\r\nHost: here\r\n\r\n" + post(b"1\r\nx\r\n" * 10_000, "Transfer-Encoding: chunked"))
        wait_for(lambda: [each for each in server.loop._open() if each.received], "it is read", PATIENCE_S)
        (found,) = (each for each in server.loop._open() if each.received)
        pouring = threading.Thread(target=pour, args=[talk])
        pouring.start()
        try:
            # Both would take turns.
            other.send(post(b"1\r\nx\r\n" * 90_000 + b"0\r\n\r\n", "Transfer-Encoding: chunked"))
            assert other.answer()[2]["length"] == 90_000
            assert found.received < 200_000
        finally:
            done.set()
            talk.socket.shutdown(socket.SHUT_RDWR)
            server.loop._give_up()
            pouring.join(PATIENCE_S)


# -- Slow clients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/large", "/result", "/report.csv"])
def test_no_thread_waits_for_a_client_that_does_not_read(server: Server, path: str) -> None:
    """There is only one thread, and what waits for the first client is far more than sockets hold."""
    with closing(server.connect()) as slow, closing(server.connect()) as other:
        status, _ = slow.get(path).head()
        assert status == 200
        assert other.get().answer()[0] == 200
        digest, expected = hashlib.sha256(), hashlib.sha256()
        while size := int(slow.came.readline(), 16):
            digest.update(slow.came.read(size + 2)[:-2])
        for _ in range(LARGE // len(PIECE)):
            expected.update(PIECE)
        assert digest.digest() == expected.digest()


def test_a_request_that_drips_is_refused_when_its_time_is_over(server: Server) -> None:
    with closing(server.connect()) as drips, closing(server.connect()) as silent:
        drips.send(post(b"", "Content-Length: 500", "Expect: 100-continue"))
        assert drips.head()[0] == 100
        assert silent.get().answer()[0] == 200
        server.clock.ahead += 50
        drips.send(b"x")
        server.clock.ahead += 15
        status, _, body = drips.answer()
        assert (status, body["code"]) == (408, "request_timeout")
        server.clock.ahead += 100
        assert silent.ended


def test_an_upload_that_gets_on_has_its_time(server: Server) -> None:
    with closing(server.connect()) as slow, closing(server.connect()) as drips:
        for each, size in ((slow, 50_000), (drips, 50)):
            each.send(post(b"x" * size, "Content-Length: 60000", "Expect: 100-continue"))
            assert each.head()[0] == 100
        server.clock.ahead += 70
        assert drips.answer()[0] == 408, "so the loop has looked at both"
        assert slow.send(b"x" * 10_000).answer()[0] == 200


def test_a_client_that_takes_nothing_of_its_answer_is_given_up(server: Server) -> None:
    with closing(server.connect()) as slow, closing(server.connect()) as other:
        slow.get("/large").head()
        assert other.get().answer()[0] == 200, "so the large answer has been written"
        for _ in range(2):  # the first time the loop finds that bytes wait, the second time that they have waited too long
            with closing(server.connect()) as drips:
                assert drips.send(post(b"", "Content-Length: 5", "Expect: 100-continue")).head()[0] == 100
                server.clock.ahead += 100_000
                assert drips.answer()[0] == 408, "so the loop has looked at both"
        try:
            rest = len(slow.came.read())
        except ConnectionError:
            rest = 0
        assert rest < LARGE


def test_where_connections_are_many_the_one_that_says_nothing_makes_room() -> None:
    with serving(most=20) as server:
        silent = [server.connect() for _ in range(60)]
        for _ in range(3):
            with closing(server.connect()) as talk:
                assert talk.get().answer()[0] == 200
        assert silent[0].ended
        for each in silent:
            each.close()


def test_each_of_many_connections_that_come_at_once_makes_room() -> None:
    gate = threading.Event()
    with serving(most=20) as server, ExitStack() as stack:
        with closing(server.connect()) as talk:
            assert talk.get().answer()[0] == 200
        server.loop._watch.get_loop().call_soon_threadsafe(gate.wait, PATIENCE_S)
        for _ in range(60):
            stack.enter_context(closing(server.connect()))
        gate.set()
        with closing(server.connect()) as last:
            assert last.get().answer()[0] == 200
            wait_for(lambda: len(server.loop.server_state.connections) == 20, "one went for each beyond the limit", 10)


def test_large_bodies_are_refused_while_too_much_is_kept() -> None:
    with serving(storage=60_000) as server, closing(server.connect()) as first, closing(server.connect()) as second:
        first.send(post(b"x" * 65_000, "Content-Length: 66000", "Expect: 100-continue"))
        assert first.head()[0] == 100
        second.send(post(b"x" * 66_000, "Content-Length: 90000"))
        status, headers, body = second.answer()
        assert (status, body["code"], headers["retry-after"]) == (503, "busy", "2")
        assert first.send(b"x" * 1_000).answer()[0] in (200, 503)
        with closing(server.connect()) as third:
            assert third.send(post(b"hello", "Content-Length: 5")).answer()[0] == 200


def test_a_stop_ends_what_is_idle_and_waits_for_what_has_begun(server: Server) -> None:
    with closing(server.connect()) as idle, closing(server.connect()) as begun:
        assert idle.get().answer()[0] == 200
        begun.send(post(b"", "Content-Length: 5", "Expect: 100-continue"))
        assert begun.head()[0] == 100
        server.loop.stop()
        assert idle.ended
        status, headers, body = begun.send(b"hello").answer()
        assert (status, headers["connection"], body["body"]) == (200, "close", "hello")
