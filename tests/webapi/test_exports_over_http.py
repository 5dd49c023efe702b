"""POST /api/exports and GET /api/tasks/ID/result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from support.webshop import Client, client_of

from asynctask import AsyncTask
from asynctask.testing import wait_for

WHOLE = b"\xef\xbb\xbfn\r\n1\r\n2\r\n"


@pytest.fixture
def result_url(app: AsyncTask, client: Client, working: Callable[[], AbstractContextManager[None]]) -> str:
    """The file of an export that is done: :data:`WHOLE`."""

    @app.export(columns=["n"])
    def numbers(shard: int) -> Iterator[list[int]]:
        yield [shard]

    made = client.post("/api/exports", json={"worker": "numbers", "shards": [1, 2]})
    with working():
        wait_for(lambda: app.progress(made.json["task_id"])["done"], "the export is done")
    return str(made.json["links"]["result"])


@pytest.mark.parametrize(
    "ignored", ["rows=0-5", "bytes", "bytes=", "bytes=5-2", "bytes=a-b", "bytes 0-5", "bytes=0-1,4-5", "5", ""]
)
def test_a_range_that_is_none_of_bytes_is_ignored(client: Client, result_url: str, ignored: str) -> None:
    answer = client.get(result_url, headers={"Range": ignored})
    assert (answer.status_code, answer.data) == (200, WHOLE)
    assert "Content-Range" not in answer.headers


def test_a_range_that_the_file_has_not_is_refused(client: Client, result_url: str) -> None:
    answer = client.get(result_url, headers={"Range": f"bytes={len(WHOLE)}-"})
    assert (answer.status_code, answer.headers["Content-Range"]) == (416, f"bytes */{len(WHOLE)}")
    assert client.get(result_url, headers={"Range": "bytes=-3"}).data == b"2\r\n"
    head = client.head(result_url, headers={"Range": "bytes=0-1"})
    assert (head.status_code, head.content_length) == (200, len(WHOLE))


def test_a_result_holds_a_slot_until_it_is_sent(app: AsyncTask, result_url: str) -> None:
    client = client_of(app, threads=2)
    for headers in ({}, {"Range": "bytes=0-3"}, {"Range": "bytes=99-"}, {"If-None-Match": "*"}):
        client.get(result_url, headers=headers)  # each gives its slot back
    held = client.get(result_url, buffered=False)
    busy = client.get(result_url)
    assert (busy.status_code, busy.json["code"]) == (503, "busy")
    assert int(busy.headers["Retry-After"]) > 0
    assert client.head(result_url).status_code == 200, "a file is not sent"
    held.close()
    assert client.get(result_url).data == WHOLE


def test_an_export_is_made_and_fetched_in_ranges(
    app: AsyncTask, client: Client, working: Callable[[], AbstractContextManager[None]]
) -> None:
    @app.export(columns=["n"])
    def numbers(shard: int) -> Iterator[list[int]]:
        yield [shard]

    made = client.post("/api/exports", json={"worker": "numbers", "shards": [1, 2]})
    assert made.status_code == 202, made.text
    url = made.json["links"]["result"]
    assert made.json["result"] is None
    early = client.get(url)
    assert (early.status_code, early.json["code"]) == (409, "conflict")
    assert client.get("/api/tasks/999/result").status_code == 404
    with working():
        wait_for(lambda: app.progress(made.json["task_id"])["done"], "the export is done")
    whole = client.get(url)
    assert whole.data == b"\xef\xbb\xbfn\r\n1\r\n2\r\n"
    assert whole.headers["Content-Disposition"].startswith("attachment; filename=")
    part = client.get(url, headers={"Range": "bytes=3-5"})
    assert (part.status_code, part.data) == (206, b"n\r\n")
    assert client.get(url, headers={"If-None-Match": whole.headers["ETag"]}).status_code == 304
    asked = {"worker": "numbers", "shards": [1], "dry_run": True}
    tried = client.post("/api/exports", json=asked)
    assert (tried.status_code, tried.json["accepted"], tried.json["dry_run"]) == (200, 1, True)
    keyed = [client.post("/api/exports", json=asked | {"dry_run": False}, headers={"Idempotency-Key": "k"}) for _ in "ab"]
    assert keyed[0].json["task_id"] == keyed[1].json["task_id"]
    assert keyed[1].headers["Idempotency-Replayed"] == "true"
    other = asked | {"dry_run": False, "format": "xlsx"}
    assert client.post("/api/exports", json=other, headers={"Idempotency-Key": "k"}).status_code == 422
    wrong = client.post("/api/exports", json={"worker": "numbers", "shards": [1], "format": "doc"})
    assert wrong.status_code == 422
