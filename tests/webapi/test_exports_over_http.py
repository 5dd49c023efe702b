"""POST /api/exports and GET /api/tasks/ID/result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from support.webshop import Client

from asynctask import AsyncTask
from asynctask.testing import wait_for


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
