"""Webhooks: a receiver over HTTP gets each end of a Task once, signed, however often it was away."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.world import World, numbers

from asynctask import AsyncTask, webhooks
from asynctask.cli.root import run as run_cli
from asynctask.config import shown
from asynctask.errors import ConfigError, InputError, NormalException
from asynctask.job import CurrentJob, reset_current_job, set_current_job
from asynctask.task import TaskHandle
from asynctask.testing import wait_for
from asynctask.webhooks import is_public

pytestmark = pytest.mark.one_database(reason="webhooks are jobs, which are the same on each database")

KEY = b"k" * 32
SECRET = "whsec_" + base64.b64encode(KEY).decode()


class Receiver:
    """An HTTP server that keeps what it gets, and answers with ``statuses`` in turn, then with 204."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.statuses: list[int] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(receiver.statuses.pop(0) if receiver.statuses else 204)
                self.send_header("Location", receiver.url + "/elsewhere")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tries of a delivery follow each other without a pause."""
    monkeypatch.setattr(webhooks, "PAUSES_S", (0,) * len(webhooks.PAUSES_S))


def ended(task: TaskHandle) -> dict[str, Any]:
    wait_for(lambda: task.progress()["done"], f"Task {task.id} is done")
    return dict(task.progress())


def delivery(app: AsyncTask, status: str) -> dict[str, Any]:
    """The one delivery, once it has this status."""

    def found() -> list[dict[str, Any]]:
        listed = app.jobs(worker="asynctask.webhook", status=status)
        return [each for each in listed if each["job_id"].startswith("webhook-")]

    return wait_for(found, f"a delivery is {status}")[0]


@pytest.mark.each_database(reason="several callbacks of a kind are rows of each one's own")
def test_a_receiver_gets_the_end_of_a_task_signed_beside_other_callbacks(world: World, receiver: Receiver) -> None:
    """Taken out: the number in the name of a second callback, the URL of the settings."""
    app = world.app(webhook_secret=SECRET, webhook_private=True, webhook_url=receiver.url + "/all")
    with world.working(app):
        task = app.submit("note", numbers(3), on_complete=["told", {"url": receiver.url + "/one?x=1"}], on_success="told")
        progress = ended(task)
        wait_for(lambda: len(receiver.got) == 2, "both URLs have got it")
    assert [(each["name"], each["worker"], each["status"]) for each in progress["callbacks"]] == [
        ("on_complete", "told", "finish"),
        ("on_complete:2", "asynctask.webhook", "finish"),
        ("on_complete:3", "asynctask.webhook", "finish"),
        ("on_success", "told", "finish"),
    ]
    assert app.doctor() == []
    assert {path for path, _, _ in receiver.got} == {"/one?x=1", "/all"}
    for _, headers, body in receiver.got:
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        expected = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
        assert headers["webhook-signature"] == f"v1,{expected}"
        assert abs(int(headers["webhook-timestamp"]) - time.time()) < 300
        said = json.loads(body)
        assert (said["type"], said["data"]["task_id"], said["data"]["counts"]["finish"]) == ("task.finished", task.id, 3)


@pytest.mark.usefixtures("at_once")
def test_a_task_is_done_although_its_receiver_is_away_and_the_delivery_is_tried_again(
    world: World, receiver: Receiver
) -> None:
    """Taken out: the job of its own; the Task stayed ``finalizing``."""
    app = world.app(webhook_secret=SECRET, webhook_private=True)
    receiver.statuses[:] = [500, 302, 429]
    with world.working(app):
        task = app.submit("note", numbers(1), on_complete={"url": receiver.url})
        assert ended(task)["state_reason"] is None
        last = delivery(app, "finish")
    assert [path for path, _, _ in receiver.got] == ["/"] * 4, "a redirect is not followed"
    assert len({headers["webhook-id"] for _, headers, _ in receiver.got}) == 1, "the receiver can tell a repeat"
    assert (last["retries"], last["result"]) == (3, {"status": 204})


def test_a_callback_that_runs_twice_sends_one_delivery(world: World) -> None:
    """As after a death between the two. Taken out: the id of the delivery."""
    app = world.app(webhook_secret=SECRET)
    function = app.own_workers["asynctask.webhook"].function
    for _ in range(2):
        token = set_current_job(CurrentJob("abc"))
        assert function("https://a.example", {"task_id": 1}) == {"delivery": "webhook-abc"}
        reset_current_job(token)
    assert [each["job_id"] for each in app.jobs()] == ["webhook-abc"]


@pytest.mark.usefixtures("at_once")
def test_a_delivery_that_is_given_up_is_dead_and_can_be_sent_again(world: World, receiver: Receiver) -> None:
    app = world.app(webhook_secret=SECRET, webhook_private=True)
    receiver.statuses[:] = [503] * (len(webhooks.PAUSES_S) + 1)
    with world.working(app):
        ended(app.submit("note", numbers(1), on_complete={"url": receiver.url}))
        last = delivery(app, "error")
        assert "127.0.0.1 answered 503" in last["messages"][-1]["message"]
        assert app.operations.act("dead", "restart", [last["job_id"]]).done == 1
        delivery(app, "finish")


def test_a_receiver_that_is_gone_for_good_is_asked_once_and_again_by_a_person(
    world: World, receiver: Receiver, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = world.app(webhook_secret=SECRET, webhook_private=True)
    monkeypatch.setenv("ASYNCTASK_DATABASE_URL", world.store.url)

    def said(*words: str, code: int = 0) -> str:
        assert run_cli(words) == code
        captured = capsys.readouterr()
        return captured.out + captured.err

    receiver.statuses[:] = [410]
    with world.working(app):
        ended(app.submit("note", numbers(1), on_complete={"url": receiver.url}))
        job_id = delivery(app, "failed")["job_id"]
        assert len(receiver.got) == 1
        assert f"asynctask restart {job_id}" in said("job", job_id)
        assert "restart it to run it again" in said("start", job_id, code=2)
        assert "started again" in said("restart", job_id)
        delivery(app, "finish")
    assert len(receiver.got) == 2
    assert "only a job that ended in an error or was refused" in said("restart", job_id, code=2)
    assert "restart" not in said("job", job_id)


def test_no_request_goes_to_a_private_address(world: World, receiver: Receiver) -> None:
    """Taken out: the check of the address that a name has."""
    app = world.app(webhook_secret=SECRET)
    port = receiver.url.rpartition(":")[2]
    with world.working(app):
        ended(app.submit("note", numbers(1), on_complete={"url": f"http://localhost:{port}/"}))
        last = delivery(app, "failed")
    assert "private address" in last["messages"][-1]["message"]
    assert receiver.got == []


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1:248:1893:25c8:1946", True), ("127.0.0.1", False), ("10.1.2.3", False),
        ("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False), ("::1", False),
        ("::ffff:127.0.0.1", False), ("::ffff:93.184.216.34", True), ("fe80::1%eth0", False), ("fd00::1", False),
        ("64:ff9b::a00:1", False), ("64:ff9b::5db8:d822", True), ("2002:a00:1::", False), ("ff02::1", False),
        ("fec0::1", False), ("::127.0.0.1", False), ("::ffff:0:127.0.0.1", False), ("64:ff9b:1::a00:1", False),
    ],
)  # fmt: skip
def test_which_addresses_are_public(text: str, public: bool) -> None:
    assert is_public(text) is public


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a.example", "https://", "https://ann:secret@a.example", "https://a.example/\r\nX: y", "https://a.example:x",
        "https://a.example:99999", "https://a.example:0", "https://a.example/ü", "//a.example", "https://" + "a" * 2_000, 7,
    ],
)  # fmt: skip
def test_what_is_no_url_is_refused_before_anything_is_accepted(world: World, url: Any) -> None:
    app = world.app(webhook_secret=SECRET)
    with pytest.raises(InputError) as refused:
        app.submit("note", numbers(1), on_complete={"url": url})
    assert "on_complete" in str(refused.value)
    assert app.tasks() == []


def test_the_worker_of_webhooks_is_called_by_a_url_only(world: World) -> None:
    """By its name it got arguments that nobody had checked."""
    app = world.app(webhook_secret=SECRET)
    by_name: list[Any] = ["asynctask.webhook", {"worker": "asynctask.webhook", "args": ["ftp://a.example", {}]}]
    for callback in (*by_name, by_name, {"worker": " asynctask.webhook "}):
        with pytest.raises(InputError, match=r"on_complete.*called by a URL"):
            app.submit("note", numbers(1), on_complete=callback)
    assert app.tasks() == []


def test_the_url_of_the_settings_is_in_no_job_and_is_read_when_it_is_sent(world: World, receiver: Receiver) -> None:
    """It may hold a secret, and whoever sees a Task sees its callbacks."""
    settings = {"webhook_secret": SECRET, "webhook_private": True}
    app = world.app(**settings, webhook_url=receiver.url + "/services/secret-path")
    with world.working(app):
        ended(app.submit("note", numbers(1)))
        last = delivery(app, "finish")
    assert [path for path, _, _ in receiver.got] == ["/services/secret-path"]
    callback = app.event(last["job_id"].removeprefix("webhook-"))
    assert "secret-path" not in json.dumps([last, callback, app.tasks()])
    assert "secret-path" not in str(shown("webhook_url", app.config.webhook_url))
    function = world.app(**settings).own_workers["asynctask.webhook"].function
    with pytest.raises(NormalException, match="not set any more"):
        function("", {}, last["job_id"])


class Endless:
    """A server that answers each request with parts of a head that has no end, until its client leaves."""

    def __init__(self, part: bytes) -> None:
        self._part = part
        self.server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.server.getsockname()[1]}"
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        connection, _ = self.server.accept()
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 ")
            for _ in range(600):  # without a limit it ends here, with what is no answer
                connection.sendall(self._part)
                threading.Event().wait(0.02)


@pytest.mark.parametrize("part", [b"2", b"100 \r\n\r\nHTTP/1.1 "], ids=["a byte now and then", "100 again and again"])
def test_a_receiver_that_answers_without_an_end_is_given_up(
    world: World, part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken out: the limit. The time for each step begins again with each byte."""
    monkeypatch.setattr(webhooks, "LIMIT_S", 0.2)
    endless = Endless(part)
    config = world.app(webhook_secret=SECRET, webhook_private=True).config
    with endless.server, pytest.raises(webhooks.NotDelivered, match=r"no answer within 0\.2 s"):
        webhooks.deliver(config, world.app().clock, endless.url, "webhook-1", {})
    endless.thread.join(60)
    assert not endless.thread.is_alive()


def test_without_a_secret_there_are_no_webhooks(world: World) -> None:
    with pytest.raises(InputError, match=r"set webhook_secret.*to make one: python -c"):
        world.app().submit("note", numbers(1), on_success=[{"url": "https://a.example"}])
    for wrong in (
        {"webhook_secret": "whsec_c2hvcnQ="},
        {"webhook_secret": SECRET[6:]},
        {"webhook_url": "https://a.example"},
    ):
        with pytest.raises(ConfigError, match="webhook_secret: write whsec_"):
            world.app(**wrong)
    with pytest.raises(ConfigError, match="webhook_url must have a URL"):
        world.app(webhook_secret=SECRET, webhook_url="a.example")
    assert world.app(webhook_secret=SECRET).config.webhook_key() == KEY


def test_a_certificate_that_nobody_vouches_for_is_no_receiver(
    world: World, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "/CN=localhost", "subjectAltName=DNS:localhost"
    pair = [str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", pair[0], "-out", pair[1], "-days", "2"]
    subprocess.run([*make, "-subj", names[0], "-addext", names[1]], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair[1], pair[0])
    receiver.server.socket = context.wrap_socket(receiver.server.socket, server_side=True)
    config = world.app(webhook_secret=SECRET, webhook_private=True).config
    url, clock = receiver.url.replace("http://127.0.0.1", "https://localhost"), world.app().clock
    with pytest.raises(webhooks.NotDelivered, match="certificate verify failed"):
        webhooks.deliver(config, clock, url, "webhook-1", {})
    monkeypatch.setenv("SSL_CERT_FILE", pair[1])
    assert webhooks.deliver(config, clock, url, "webhook-1", {}) == 204
