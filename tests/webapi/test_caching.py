"""What clients keep: files for a year under a name of their content, lists by their ETags; and what is compressed."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from contextlib import ExitStack, closing
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.clocks import SettableClock
from support.serving import Shop
from support.webshop import Client, client_of

from asynctask import AsyncTask
from webapi.caching import fingerprint_of

GZIP = {"Accept-Encoding": "gzip, deflate, br"}


def test_the_files_of_a_page_are_kept_for_a_year_under_a_name_of_their_content(client: Client) -> None:
    places = re.findall(r'(?:src|href)="(/static/[^"]+)"', client.get("/").text)
    assert len(places) >= 4
    for place in places:
        answer = client.get(place)
        assert (answer.status_code, answer.headers["Cache-Control"]) == (200, "public, max-age=31536000, immutable")
    home = next(place for place in places if place.endswith("/home.js"))
    folder = home.removesuffix("home.js")
    for name in re.findall(r'from "\./([\w/]+\.js)"', client.get(home).text):
        assert client.get(f"{folder}{name}").cache_control.immutable, "a module and what it imports are of one version"
    for other in ("/static/home.js", "/static/0123456789ab/home.js"):  # of a page that an older process has sent
        answer = client.get(other)
        assert (answer.status_code, answer.text, answer.headers["Cache-Control"]) == (
            200,
            client.get(home).text,
            "no-cache",
        )
    for missing in (
        "/static/0123456789ab/nope.js",
        "/static/client/nope.js",
        "/static/..%2f__init__.py",
        "/static/",
    ):
        assert client.get(missing).status_code == 404


def test_another_content_has_another_name(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text("1")
    (tmp_path / "b.js").write_text("2")
    first = fingerprint_of(tmp_path)
    assert fingerprint_of(tmp_path) == first
    (tmp_path / "b.js").write_text("3")
    assert fingerprint_of(tmp_path) != first
    (tmp_path / "b.js").rename(tmp_path / "c.js")
    assert re.fullmatch("[0-9a-f]{12}", fingerprint_of(tmp_path))


def test_a_list_that_has_not_changed_is_not_sent_again(app: AsyncTask, client: Client) -> None:
    task = app.submit("anything", [1])
    for path in ("/api/tasks?limit=5", f"/api/tasks/{task.id}/events", "/api/workers", "/openapi.json"):
        first = client.get(path)
        again = client.get(path, headers={"If-None-Match": first.headers["ETag"]})
        assert (again.status_code, again.data, again.headers["ETag"]) == (304, b"", first.headers["ETag"]), path
    tag = client.get("/api/tasks").headers["ETag"]
    task.pause()
    assert client.get("/api/tasks", headers={"If-None-Match": tag}).status_code == 200
    assert "ETag" not in client.get("/healthz").headers


def test_queues_in_which_jobs_wait_are_not_sent_again_for_a_part_of_a_second(make_app: Callable[..., AsyncTask]) -> None:
    """Failed while the age of the oldest job was given as exactly as it is known."""
    clock = SettableClock()
    app = make_app(clock=clock)
    app.submit("anything", [1])
    client, tag = client_of(app), ""
    for later, oldest_s in ((0.3, 0), (0.9, 0), (59.5, 59), (75, 70), (79, 70), (7_300, 7_260), (7_310, 7_260)):
        clock.seconds = 100 + later
        answer = client.get("/api/queues")
        assert answer.json["queues"][0]["oldest_s"] == oldest_s
        assert (client.get("/api/queues", headers={"If-None-Match": tag}).status_code == 304) == (later in (0.9, 79, 7_310))
        tag = answer.headers["ETag"]


@pytest.mark.parametrize("path", ["/", "/static/words.js", "/static/app.css", "/openapi.json", "/metrics"])
def test_texts_are_compressed_for_who_takes_that(client: Client, path: str) -> None:
    plain = client.get(path)
    assert "Content-Encoding" not in plain.headers
    assert "Accept-Encoding" in plain.headers["Vary"]
    packed = client.get(path, headers=GZIP)
    assert packed.headers["Content-Encoding"] == "gzip"
    if path != "/metrics":  # its figures move
        assert gzip.decompress(packed.data) == plain.data
    assert int(packed.headers["Content-Length"]) == len(packed.data) < len(plain.data)
    assert client.head(path, headers=GZIP).headers["Content-Encoding"] == "gzip"
    if tag := packed.headers.get("ETag"):
        assert tag.startswith("W/"), "it stands for both forms"
        assert client.get(path, headers={**GZIP, "If-None-Match": tag}).status_code == 304
    for refused in ("gzip;q=0", "identity", "br"):
        assert "Content-Encoding" not in client.get(path, headers={"Accept-Encoding": refused}).headers


def test_neither_a_part_nor_a_short_answer_nor_that_of_a_change_is_compressed(app: AsyncTask, client: Client) -> None:
    task = app.submit("anything", [{"text": "x" * 5_000}])
    part = client.get("/static/app.css", headers={**GZIP, "Range": "bytes=0-2999"})
    assert (part.status_code, len(part.data), part.headers.get("Content-Encoding")) == (206, 3_000, None)
    for answer in (
        client.get("/healthz", headers=GZIP),
        client.post(f"/api/tasks/{task.id}/pause", headers=GZIP),
        client.get("/api/tasks/99", headers=GZIP),
        client.get(f"/api/tasks/{task.id}/report.csv?rows=all", headers=GZIP),
    ):
        assert "Content-Encoding" not in answer.headers


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_learns_nothing_from_the_length(app: AsyncTask, client: Client, site: str) -> None:
    """Taken out: the look at Sec-Fetch-Site."""
    app.submit("anything", [1], title="secret-title" * 10)
    for path in ("/api/tasks?limit=3", "/?worker=secret-title"):
        assert "Content-Encoding" not in client.get(path, headers={**GZIP, "Sec-Fetch-Site": site}).headers
        own = client.get(path, headers={**GZIP, "Sec-Fetch-Site": "same-origin"})
        assert own.headers["Content-Encoding"] == "gzip"


def test_a_real_server_sends_a_long_poll_whole_and_a_stream_as_it_comes(tmp_path: Path) -> None:
    """Taken out: the Content-Encoding that the front drops from the answer of a long poll, which it makes itself."""
    with Shop(tmp_path).web() as (_, said), ExitStack() as stack:
        place = urlsplit(said["url"])

        def ask(method: str, path: str, body: str | None = None, **headers: str) -> HTTPConnection:
            connection = stack.enter_context(closing(HTTPConnection(place.hostname or "", place.port, timeout=60)))
            connection.request(method, path, body, {"Content-Type": "application/json", **GZIP, **headers})
            return connection

        def read(connection: HTTPConnection) -> tuple[HTTPResponse, bytes]:
            answer = stack.enter_context(closing(connection.getresponse()))
            return answer, answer.read()

        items = json.dumps({"worker": "gated", "title": "t" * 250, "items": [{"sku": "A", "quantity": 9}]})
        _, made = read(ask("POST", "/api/tasks", items))
        url = f"/api/tasks/{json.loads(made)['task_id']}"
        seen, text = read(ask("GET", url))
        assert (seen.headers["Content-Encoding"], json.loads(gzip.decompress(text))["worker"]) == ("gzip", "gated")
        poll = ask("GET", f"{url}?wait=50", **{"If-None-Match": seen.headers["ETag"]})
        stream = stack.enter_context(closing(ask("GET", f"{url}/stream").getresponse()))
        assert (stream.headers["Content-Encoding"], stream.readline()) == (None, b"retry: 2000\n")
        assert read(ask("POST", f"{url}/pause"))[0].status == 200
        polled, text = read(poll)
        assert (polled.headers["Content-Encoding"], json.loads(text)["state"]) == (None, "paused")
