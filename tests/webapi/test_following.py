"""Long polls and streams: a client that follows a Task hears of each change, and keeps nobody else from the server."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.clocks import SettableClock
from support.serving import PATIENCE_S, Shop, get
from support.webshop import Client, client_of

from asynctask import AsyncTask
from asynctask.clock import SystemClock
from asynctask.errors import LedgerUnavailable, NotFound
from asynctask.ledger.progress import Changed
from asynctask.testing import wait_for
from webapi import create_app
from webapi.access import STREAM_S
from webapi.context import Slots, progress_tag
from webapi.front import FOLLOW, HEARTBEAT_S, LATEST, STREAM_START, TICK_S, Following, Notifier, Polls, credentials_of
from webapi.front import Sent as Known
from webapi.server import HttpServer

ANN, BOB = "ann-has-a-secret-of-her-own", "bob-has-a-secret-of-his-own"


class Sent(NamedTuple):
    """A Server-Sent Event."""

    id: str
    progress: dict[str, Any]


def events_of(answer: Any) -> Iterator[Sent]:
    """The events of a stream, as they come."""
    fields: dict[str, str] = {}
    for line in answer:
        text = line.decode().rstrip("\n")
        if text:
            name, _, value = text.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield Sent(fields["id"], json.loads(fields["data"]))
            fields = {}


def opened(url: str, **headers: str) -> Any:
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE_S)


def submit(url: str, *quantities: int) -> str:
    """The URL of a new Task of ``gated``."""
    body = json.dumps({"worker": "gated", "items": [{"sku": f"OK-{n}", "quantity": n} for n in quantities]}).encode()
    with opened_post(f"{url}/api/tasks", body) as answer:
        return f"{url}{json.load(answer)['links']['self']}"


def opened_post(url: str, body: bytes = b"") -> Any:
    asked = urllib.request.Request(url, body, {"Content-Type": "application/json"} if body else {}, method="POST")
    return urllib.request.urlopen(asked, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that performs nothing."""
    with Shop(tmp_path_factory.mktemp("shop")).web() as (_, said):
        yield said["url"]


# -- long polls


class Poll:
    """A request that waits, in a thread."""

    def __init__(self, app: AsyncTask, url: str, **headers: str) -> None:
        self.answer: Any = None
        client = client_of(app)

        def ask() -> None:
            self.answer = client.get(url, headers=headers)

        self._thread = threading.Thread(target=ask)
        self._thread.start()

    def ended(self) -> Any:
        self._thread.join(PATIENCE_S)
        assert self.answer is not None, "it was answered"
        return self.answer


@pytest.fixture
def looked(app: AsyncTask, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The Tasks whose progress was read, in order."""
    found: list[int] = []
    progress = app.progress

    def read(task_id: int, *args: Any, **more: Any) -> Any:
        found.append(task_id)
        return progress(task_id, *args, **more)

    monkeypatch.setattr(app, "progress", read)
    return found


@pytest.mark.parametrize("by_tag", [False, True])
def test_a_long_poll_is_answered_when_something_changes(app: AsyncTask, looked: list[int], by_tag: bool) -> None:
    task = app.submit("enroll", [{"sku": "A"}])
    url = f"/api/tasks/{task.id}"
    first = client_of(app).get(url)
    if by_tag:
        poll = Poll(app, f"{url}?wait=60", **{"If-None-Match": first.headers["ETag"]})
    else:
        poll = Poll(app, f"{url}?wait=60&version={first.json['version']}")
    wait_for(lambda: len(looked) > 3, "it looks for a change")
    task.pause()
    answer = poll.ended()
    assert (answer.status_code, answer.json["state"]) == (200, "paused")
    assert answer.json["version"] > first.json["version"]


def test_a_long_poll_without_a_change_ends_after_its_time(app: AsyncTask, client: Client, looked: list[int]) -> None:
    task = app.submit("enroll", [{"sku": "A"}])
    url = f"/api/tasks/{task.id}"
    first = client.get(url)
    answer = client.get(f"{url}?wait=0.3&version={first.json['version']}")
    assert (answer.status_code, answer.json["version"]) == (200, first.json["version"])
    assert "Asynctask-Held" not in answer.headers
    assert len(looked) > 2, "it looked again"
    answer = client.get(f"{url}?wait=0.3", headers={"If-None-Match": first.headers["ETag"]})
    assert answer.status_code == 304


def test_a_long_poll_that_has_nothing_to_wait_for_is_answered_at_once(
    app: AsyncTask, client: Client, ended: Callable[..., int], looked: list[int]
) -> None:
    task, done = app.submit("enroll", [{"sku": "A"}]), ended("B")
    version = client.get(f"/api/tasks/{task.id}").json["version"]
    last = client.get(f"/api/tasks/{done}").json["version"]
    looked.clear()
    assert client.get(f"/api/tasks/{task.id}?wait=60").status_code == 200
    assert client.get(f"/api/tasks/{task.id}?wait=60&version={version - 1}").json["version"] == version
    assert client.get(f"/api/tasks/{task.id}?version={version}").json["version"] == version
    assert client.get(f"/api/tasks/{done}?wait=60&version={last}").json["done"]
    assert client.get("/api/tasks/99?wait=60&version=1").status_code == 404
    assert looked == [task.id, task.id, task.id, done, 99], "each once"


@pytest.mark.parametrize("query", ["wait=61", "wait=-1", "wait=nan", "wait=soon", "wait=1&version=-1", "wait=1&version=x"])
def test_a_wait_that_cannot_be_is_refused(app: AsyncTask, client: Client, query: str) -> None:
    task = app.submit("enroll", [{"sku": "A"}])
    answer = client.get(f"/api/tasks/{task.id}?{query}")
    assert (answer.status_code, answer.json["code"]) == (422, "invalid_query_parameter")


def test_beyond_half_of_the_threads_a_long_poll_is_answered_at_once_and_a_stream_refused(
    make_app: Callable[..., AsyncTask],
) -> None:
    app = make_app(web_threads=1)
    task, client = app.submit("enroll", [{"sku": "A"}]), client_of(app)
    version = client.get(f"/api/tasks/{task.id}").json["version"]
    answer = client.get(f"/api/tasks/{task.id}?wait=60&version={version}")
    assert (answer.json["version"], answer.headers["Asynctask-Held"]) == (version, "no")
    answer = client.get(f"/api/tasks/{task.id}/stream")
    assert (answer.status_code, answer.json["code"]) == (503, "busy")
    assert answer.headers["Retry-After"] == "2"


def test_followers_and_downloads_together_leave_a_quarter_of_the_threads() -> None:
    slots = Slots.of_threads(8)
    assert [slots.take("follow") for _ in range(5)] == [True] * 4 + [False]
    assert [slots.take("report") for _ in range(3)] == [True, True, False]
    slots.give_back("follow")
    assert [slots.take("file") for _ in range(3)] == [True, False, False]
    assert [Slots.of_threads(1).take("report"), Slots.of_threads(1).take("follow")] == [True, False]


# -- streams


def test_a_stream_sends_each_change_until_the_task_is_done(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    with shop.worker(), shop.web() as (_, said):
        task = submit(said["url"], 1, 2, 3)
        with closing(opened(f"{task}/stream")) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert answer.headers["Cache-Control"] == "no-cache"
            events = events_of(answer)
            first = next(events)
            assert first.progress == get(task) | {
                name: first.progress[name]
                for name in ("counts", "version", "updated_at", "started_at", "progress", "control")
            }
            seen = [first]
            for step in (1, 2, 3):
                shop.open_gate(step)
                while seen[-1].progress["counts"]["finish"] < step:
                    seen.append(next(events))
            seen += events
        assert seen[-1].progress["done"]
        assert seen[-1].progress == get(task)
        assert [each.id for each in seen] == list(dict.fromkeys(each.id for each in seen)), "none twice"
        finished = [each.progress["counts"]["finish"] for each in seen]
        assert finished == sorted(finished)
        with closing(opened(f"{task}/stream", **{"Last-Event-ID": seen[-1].id})) as answer:
            assert (answer.status, answer.read()) == (204, b""), "a browser does not connect again"
        with closing(opened(f"{task}/stream", **{"Last-Event-ID": seen[0].id})) as answer:
            assert [each.progress["done"] for each in events_of(answer)] == [True]


def test_streams_and_long_polls_hold_none_of_the_servers_threads(tmp_path: Path) -> None:
    """Before, each held one: of 300 streams 4 were served."""
    with Shop(tmp_path).running("web", "--port", "0", "--web-threads", "1") as (_, said), ExitStack() as stack:
        task = submit(said["url"], 1)
        streams = [events_of(stack.enter_context(closing(opened(f"{task}/stream")))) for _ in range(40)]
        versions = {next(each).progress["version"] for each in streams}
        polls = ThreadPoolExecutor(20)
        waiting = [polls.submit(get, f"{task}?wait=60&version={max(versions)}") for _ in range(20)]
        assert get(task)["state"] == "running", "polls are answered"
        opened_post(f"{task}/pause").close()
        assert {next(each).progress["state"] for each in streams} == {"paused"}
        assert {each.result(PATIENCE_S)["state"] for each in waiting} == {"paused"}
        polls.shutdown()


@pytest.mark.parametrize("headers", [{}, {"If-None-Match": "known"}])
def test_a_long_poll_on_the_loop_has_the_answer_of_one_in_a_thread(web: str, headers: dict[str, str]) -> None:
    task = submit(web, 1)
    with opened(task) as first:
        tag, known = first.headers["ETag"], json.load(first)
    query = f"{task}?wait=60" if headers else f"{task}?wait=60&version={known['version']}"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(opened, query, **dict.fromkeys(headers, tag))
        opened_post(f"{task}/pause").close()
        with waiting.result(PATIENCE_S) as late, opened(task) as plain:
            assert json.load(late) == json.load(plain)
            ours, others = ({k: v for k, v in each.headers.items() if k.lower() != "date"} for each in (late, plain))
            assert {k.lower(): v for k, v in ours.items()} == {k.lower(): v for k, v in others.items()}


def test_a_long_poll_on_the_loop_ends_after_its_time_as_a_plain_one(web: str) -> None:
    task = submit(web, 1)
    with opened(task) as first:
        tag, known = first.headers["ETag"], json.load(first)
    with opened(f"{task}?wait=0.3&version={known['version']}") as answer:
        assert json.load(answer) == known
    with pytest.raises(urllib.error.HTTPError) as same:
        opened(f"{task}?wait=0.3", **{"If-None-Match": tag})
    same.value.close()
    assert same.value.code == 304
    assert get(f"{task}?wait=0.3&version={known['version']}&include=errors")["errors"] == []
    assert get(f"{task}?wait=0.3&version={known['version']}&include=context")["context"] == {}


def test_polls_that_find_nothing_new_have_the_answer_of_the_application(
    app: AsyncTask, client: Client, looked: list[int]
) -> None:
    task = app.submit("enroll", [{"sku": "A"}])
    other = app.submit("enroll", [{"sku": "B"}])
    path = f"/api/tasks/{task.id}"
    with served(app) as (server, _):
        place = f"http://127.0.0.1:{server._listener.getsockname()[1]}"

        def poll(tag: str) -> tuple[int, Any, dict[str, str]]:
            try:
                with opened(f"{place}{path}", **{"If-None-Match": tag}) as answer:
                    return answer.status, json.load(answer), headers_of(answer.headers)
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read(), headers_of(error.headers)

        def headers_of(found: Any) -> dict[str, str]:
            own = ("date", "content-length", "content-type", "connection")
            return {name.lower(): value for name, value in found.items() if name.lower() not in own}

        status, progress, headers = poll('W/"of nothing"')
        assert (status, progress) == (200, client.get(path).json)
        looked.clear()
        kept = [poll(tag) for tag in (headers["etag"], f'"other", {headers["etag"]}')]
        assert looked == [], "the application has not read it"
        plain = client.get(path, headers={"If-None-Match": headers["etag"]})
        assert {each[0] for each in kept} == {plain.status_code} == {304}
        assert all(each[1:] == (plain.data, headers_of(plain.headers)) for each in kept)
        assert poll(client.get(f"/api/tasks/{other.id}").headers["ETag"])[0] == 200
        task.pause()
        status, progress, headers = poll(headers["etag"])
        assert (status, progress["state"]) == (200, "paused")
        assert poll(headers["etag"])[0] == 304
        more = f"{place}{path}?include=errors"
        with opened(more, **{"If-None-Match": headers["etag"]}) as answer:
            assert json.load(answer)["errors"] == [], "another object has another tag"
        path = f"/api/tasks/{other.id + 1_000}"
        assert poll('"x"')[0] == 404


def test_nothing_is_read_for_a_poll_before_the_application_has_answered_its_client(
    make_app: Callable[..., AsyncTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, twenty clients without a token had 460 objects of 57 kB read in 4 s, by the reader of everybody's polls."""
    app = make_app(tokens=f"ann={ANN} bob:read@blue={BOB}", link_secret="a-secret-for-links-that-nobody-guesses")
    task = app.submit("enroll", [{"sku": "A"}])
    reads, progress, path = list[int](), app.progress, f"/api/tasks/{task.id}"

    def read(*args: Any, **more: Any) -> Any:
        reads.append(0)
        return progress(*args, **more)

    monkeypatch.setattr(app, "progress", read)

    def changed(known: Mapping[int, str | None]) -> dict[int, Changed]:
        reads.extend(known)
        return app.changed(known)

    with served(app, changed=changed) as (server, _):

        def poll(secret: str = "", query: str = "", **headers: str) -> tuple[int, set[int]]:
            """The status, and which Tasks were read before the application was called; 0: what it has read itself."""
            reads.clear()
            with closing(HTTPConnection("127.0.0.1", server._listener.getsockname()[1], timeout=PATIENCE_S)) as connection:
                given = {"Authorization": f"Bearer {secret}"} if secret else {}
                connection.request("GET", path + query, headers={**given, **headers})
                answer = connection.getresponse()
                answer.read()
                tags.append(answer.headers["ETag"])
            return answer.status, set(reads)

        tags: list[str] = []
        link = f"?link={app.link(task.id)}"
        strangers = ("", ""), ("wrong", ""), ("", link[:-1])
        assert [poll(*each) for each in strangers] == [(401, set()), (401, set()), (403, set())]
        assert poll(ANN) == (200, {0}), "the first is the application's"
        assert poll(ANN) == (200, {task.id})
        assert poll(ANN, **{"If-None-Match": tags[-1]}) == (304, {task.id})
        assert [poll(query=link)[1] & {task.id} for _ in range(2)] == [set(), {task.id}]
        assert [poll(*each) for each in strangers] == [(401, set()), (401, set()), (403, set())]
        assert poll(ANN, Cookie="a=b") == (200, {0}), "a client is known by all that it sends"
        assert poll(BOB) == poll(BOB) == (404, {0})
        path = "/api/tasks/999"
        assert [poll(ANN), poll(ANN)] == [(404, {0, 999}), (404, {0})]
    scope = {"client": ("127.0.0.1", 1), "headers": [(b"authorization", ANN.encode())], "query_string": link[1:].encode()}
    assert not [secret for secret in (ANN, link[6:]) if secret.encode() in credentials_of(scope)]


@contextmanager
def served(app: AsyncTask, **how: Any) -> Iterator[tuple[HttpServer, Callable[[str], socket.socket]]]:
    """A server in this process, and what sends a GET on a connection of its own."""
    listener = socket.create_server(("127.0.0.1", 0))
    flask_app = create_app(app, host="127.0.0.1", slots=Slots({"follow": 0}))
    given = {"threads": 2, "storage": 10**9, "clock": SystemClock(), "changed": app.changed, **how}
    server = HttpServer(flask_app.wsgi_app, listener, **given)
    thread = threading.Thread(target=server.run)
    thread.start()

    def ask(path: str) -> socket.socket:
        found = stack.enter_context(closing(socket.create_connection(listener.getsockname(), PATIENCE_S)))
        found.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return found

    try:
        with ExitStack() as stack:
            yield server, ask
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        listener.close()


def test_nothing_is_held_for_a_follower_that_has_gone(app: AsyncTask) -> None:
    """A long poll may wait a minute, and clients that come and go are not counted as connections."""
    task = app.submit("enroll", [{"sku": "A"}])
    url, version = f"/api/tasks/{task.id}", app.progress(task.id)["version"]
    with served(app) as (server, ask):
        for path in (f"{url}?wait=60&version={version}", f"{url}/stream"):
            clients = [ask(path) for _ in range(3)]
            wait_for(lambda: server._notifier.followers == 3, "they follow", PATIENCE_S)
            for each in clients:
                each.close()
            wait_for(lambda: not server.server_state.tasks, "nothing waits for them", HEARTBEAT_S / 2)
            assert (server._notifier.followers, server._notifier._followed) == (0, {})


def test_followers_leave_a_quarter_of_the_connections_to_others(app: AsyncTask) -> None:
    task = app.submit("enroll", [{"sku": "A"}])
    url, version = f"/api/tasks/{task.id}", app.progress(task.id)["version"]
    with served(app, most=16) as (server, ask):
        for _ in range(12):
            ask(f"{url}/stream").recv(1)
        wait_for(lambda: server._notifier.followers == 12, "they follow", PATIENCE_S)
        for path, status in ((f"{url}/stream", 503), (f"{url}?wait=60&version={version}", 200), ("/readyz", 200)):
            answer = ask(path).recv(4096)
            assert int(answer.split()[1]) == status
            assert (b"asynctask-held: no" in answer.lower()) is ("wait" in path)
        assert server._notifier.followers == 12


def test_a_stream_ends_with_the_server(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    with shop.web() as (process, said):
        task = submit(said["url"], 1)
        with closing(opened(f"{task}/stream")) as answer:
            events = events_of(answer)
            next(events)
            process.send_signal(signal.SIGTERM)
            assert list(events) == [], "it is whole, and ends before the server's time is up"
            assert process.wait(PATIENCE_S) == 0


def test_a_stream_ends_after_some_minutes_and_who_has_signed_out_opens_no_other(
    make_app: Callable[..., AsyncTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both servers. Before, an open stream went on until the Task was done, also after its user had signed out."""
    app, clock = make_app(tokens=f"ann={ANN}"), SettableClock()
    path, wanted, ann = (
        f"/api/tasks/{app.submit('anything', [1]).id}",
        list[Following](),
        {"Authorization": f"Bearer {ANN}"},
    )
    client_of(app).get(f"{path}/stream", headers=ann, environ_overrides={FOLLOW: wanted.append})
    assert 0.8 * STREAM_S <= wanted[0].lasts_s <= STREAM_S == 300
    monkeypatch.setattr("webapi.access.STREAM_S", 0.2)
    with served(app) as (server, _):

        def ask(how: str, where: str, body: str = "", **headers: str) -> tuple[int, str, Any]:
            with closing(HTTPConnection("127.0.0.1", server._listener.getsockname()[1], timeout=PATIENCE_S)) as connection:
                connection.request(how, where, body, headers)
                answer = connection.getresponse()
                return answer.status, answer.read().decode(), answer.headers

        form = f'--b\r\nContent-Disposition: form-data; name="token"\r\n\r\n{ANN}\r\n--b--\r\n'
        signed_in = ask("POST", "/login", form, **{"Content-Type": "multipart/form-data; boundary=b"})
        cookie = {"Cookie": signed_in[2]["Set-Cookie"].partition(";")[0]}
        status, events, _ = ask("GET", f"{path}/stream", **cookie)
        assert (status, events.count("data: "), '"done":false' in events) == (200, 1, True)
        _, _, known = events.partition("id: ")
        status, events, _ = ask("GET", f"{path}/stream", **cookie, **{"Last-Event-ID": known.partition("\n")[0]})
        assert (status, events.count("data: ")) == (200, 0), "nothing is repeated"
        assert ask("POST", "/logout", **cookie)[0] == 303
        assert ask("GET", f"{path}/stream", **cookie)[0] == 401
    app = make_app(tokens=f"ann={ANN}", clock=clock)
    path = f"/api/tasks/{app.submit('anything', [1]).id}"
    answer = client_of(app).get(f"{path}/stream", headers=ann, buffered=False)
    pieces = answer.iter_encoded()
    assert (next(pieces), b"data: " in next(pieces)) == (STREAM_START, True)
    clock.seconds += 1
    assert list(pieces) == []
    answer.close()


def test_a_stream_and_a_long_poll_end_when_their_task_is_removed(
    app: AsyncTask, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, progress = app.submit("enroll", [{"sku": "A"}]), app.progress
    version = progress(task.id)["version"]
    for path, left in ((f"/api/tasks/{task.id}/stream", 3), (f"/api/tasks/{task.id}?wait=60&version={version}", 2)):
        there = iter(range(left))

        def read(task_id: int, *args: Any, there: Iterator[int] = there) -> Any:
            if next(there, None) is None:
                raise NotFound(f"there is no Task {task_id}")
            return progress(task_id, *args)

        monkeypatch.setattr(app, "progress", read)
        answer = client.get(path)
        assert answer.status_code == (200 if "stream" in path else 404)
    assert client_of(app).get(f"/api/tasks/{task.id}/stream").status_code == 404


def test_a_stream_stays_open_while_the_database_is_away(
    app: AsyncTask, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webapi.tasks.HEARTBEAT_S", 0.0)
    task, progress = app.submit("enroll", [{"sku": "A"}]), app.progress
    answers = iter(("there", "there", "away", "away"))

    def read(task_id: int, *args: Any) -> Any:
        match next(answers, "back"):
            case "away":
                raise LedgerUnavailable("the database does not answer")
            case "back":
                task.cancel()
        return progress(task_id, *args)

    monkeypatch.setattr(app, "progress", read)
    answer = client.get(f"/api/tasks/{task.id}/stream")
    lines = answer.data.decode().split("\n\n")
    assert [line.partition(":")[0] for line in lines] == ["retry", "id", "", "", "id", ""]
    assert json.loads(lines[4].partition("data: ")[2])["state"] == "cancelled"


def test_head_says_what_a_stream_is_and_holds_nothing(app: AsyncTask, client: Client) -> None:
    task = app.submit("enroll", [{"sku": "A"}])
    answer = client.head(f"/api/tasks/{task.id}/stream")
    assert (answer.status_code, answer.mimetype, answer.data) == (200, "text/event-stream", b"")
    assert client.get("/api/tasks/99/stream").status_code == 404


def test_a_long_poll_of_what_others_were_just_told_reads_nothing(app: AsyncTask, client: Client, looked: list[int]) -> None:
    task, wanted = app.submit("enroll", [{"sku": "A"}]), list[Following]()
    known = app.tasks(ids=[task.id])[0]
    url, version = f"/api/tasks/{task.id}", known["version"]
    offer = {FOLLOW: wanted.append, LATEST: {task.id: known}.get}
    client.get(f"{url}?wait=60&version={version}", environ_base=offer)
    assert ([each.progress for each in wanted], looked) == ([known], [])
    wanted.clear()
    for query in (f"wait=60&version={version - 1}", f"version={version}", f"wait=60&version={version}&include=errors"):
        client.get(f"{url}?{query}", environ_base=offer)
    assert [each.is_own for each in wanted] == [True]
    assert looked == [task.id] * 3, "another client has another object, or wants more"


# -- the reader of a server's followers


class Ledger:
    """Tasks whose progress a test sets, read as :meth:`AsyncTask.changed` does."""

    def __init__(self) -> None:
        self.version: dict[int, int] = {1: 1}
        self.reads: list[list[int]] = []
        self.away = 0

    async def changed(self, known: Mapping[int, str | None]) -> dict[int, Changed]:
        self.reads.append(sorted(known))
        if self.away:
            self.away -= 1
            raise LedgerUnavailable("the database does not answer")
        found = {}
        for task_id, mark in known.items():
            if task_id not in self.version:
                found[task_id] = Changed(None, None)
            elif mark != str(self.version[task_id]):
                found[task_id] = Changed(str(self.version[task_id]), progress_of(task_id, self.version[task_id]))
        return found


def progress_of(task_id: int, version: int) -> dict[str, Any]:
    moves = {"done": False, "poll_after_ms": 1_000}
    return {"task_id": task_id, "generation": 1, "version": version, "callbacks": [], **moves}


async def until(fact: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not fact():
            await asyncio.sleep(0.01)


def test_one_read_serves_all_who_follow_a_task() -> None:
    async def follow_it() -> None:
        ledger = Ledger()
        notifier, made = Notifier(ledger.changed, most=1_000), list[int]()

        def once(progress: dict[str, Any], root: str) -> bytes:
            made.append(progress["version"])
            return f"{root} {progress['version']}".encode()

        async def follower() -> bytes:
            with notifier.follow(1) as followed:
                assert await followed.after(progress_of(1, 1), progress_tag(progress_of(1, 1)), PATIENCE_S)
                return followed.made(once, "/bulk")

        followers = [asyncio.create_task(follower()) for _ in range(200)]
        await until(lambda: len(ledger.reads) > 2)
        ledger.version[1] = 2
        assert await asyncio.gather(*followers) == [b"/bulk 2"] * 200
        assert made == [2]
        assert all(each == [1] for each in ledger.reads)
        count = len(ledger.reads)
        await asyncio.sleep(3 * TICK_S)
        assert len(ledger.reads) <= count + 1, "nobody follows, so nothing is read"

    asyncio.run(follow_it())


def test_a_follower_gets_nothing_older_than_what_was_read_for_it() -> None:
    async def follow_it() -> None:
        ledger = Ledger()
        notifier = Notifier(ledger.changed, most=1_000)
        with notifier.follow(1) as early:
            assert await early.after(progress_of(1, 0), None, PATIENCE_S)
            with notifier.follow(1) as followed:  # its own request has read version 3, which the reader does not know yet
                assert not await followed.after(progress_of(1, 3), progress_tag(progress_of(1, 3)), 0.01)
                ledger.version[1] = 4
                assert await followed.after(progress_of(1, 3), progress_tag(progress_of(1, 3)), PATIENCE_S)
                assert followed.progress == progress_of(1, 4)

    asyncio.run(follow_it())


@pytest.mark.parametrize("end", ["removed", "stopped"])
def test_followers_outlive_an_outage_and_hear_of_the_end(end: str) -> None:
    async def follow_it() -> None:
        ledger = Ledger()
        ledger.away = 2
        notifier = Notifier(ledger.changed, most=1_000)
        with notifier.follow(1) as followed:
            assert await followed.after(progress_of(1, 0), None, PATIENCE_S)
            assert len(ledger.reads) == 3
            waiting = asyncio.create_task(followed.after(progress_of(1, 1), followed.tag, PATIENCE_S))
            if end == "removed":
                del ledger.version[1]
            else:
                await notifier.stop()
            assert await waiting
            assert followed.ended

    asyncio.run(follow_it())


def test_the_tasks_and_clients_that_polled_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, one Task too many dropped what was known of all."""
    monkeypatch.setattr("webapi.front._KEPT_AT_MOST", 3)

    async def poll_it() -> None:
        ledger = Ledger()
        ledger.version = dict.fromkeys((1, 2, 3, 4), 1)
        polls = Polls(ledger.changed)

        async def kinds(*task_ids: int) -> list[type]:
            """Whether the mark alone is read, of a client that has the object."""
            tags = (f'W/"{progress_tag(progress_of(task_id, 1))}"'.encode() for task_id in task_ids)
            return [type(await polls.read(*each)) for each in zip(task_ids, tags, strict=True)]

        assert await kinds(1, 2, 3, 1) == [dict, dict, dict, Known]
        assert await kinds(4, 1, 3, 2) == [dict, Known, Known, dict], "2 was polled longest ago"
        for credentials, status in (
            (b"a", 200),
            (b"b", 304),
            (b"c", 200),
            (b"a", 304),
            (b"d", 200),
            (b"e", 401),
            (b"c", 404),
        ):
            polls.note(credentials, status)
        assert list(polls.admitted) == [b"a", b"d"]

    asyncio.run(poll_it())


def test_one_read_serves_all_polls_that_came_during_the_one_before() -> None:
    async def poll_it() -> None:
        ledger = Ledger()
        ledger.version[2] = 1
        polls, tags = Polls(ledger.changed), {each: f'W/"{progress_tag(progress_of(each, 1))}"'.encode() for each in (1, 2)}
        new = await asyncio.gather(*(polls.read(task_id, b"") for task_id in (1, 2, 3) * 50))
        assert new == [progress_of(1, 1), progress_of(2, 1), None] * 50
        assert ledger.reads == [[1, 2, 3]]
        same = await asyncio.gather(*(polls.read(task_id, tags[task_id]) for task_id in (1, 2) * 50))
        assert same == [Known(str(1), tags[task_id][3:-1].decode(), "1") for task_id in (1, 2)] * 50
        assert ledger.reads[1:] == [[1, 2]]
        asked = ((1, tags[1]), (1, b'"another"'), (2, tags[2]))
        has, has_not, other = await asyncio.gather(*(polls.read(*each) for each in asked))
        assert has == has_not == progress_of(1, 1), "the one that has it finds that out by its tag"
        assert other == same[1]
        ledger.version[1], ledger.away = 2, 1
        assert await polls.read(1, tags[1]) is None, "the application says what is wrong"
        assert await polls.read(1, tags[1]) == progress_of(1, 2)
        del ledger.version[1]
        assert await polls.read(1, tags[1]) is None

    asyncio.run(poll_it())
