"""Exports: shards become parts, and one file when the Task closes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.world import World

from asynctask import AsyncTask, NormalException
from asynctask.errors import Conflict, InputError
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


def declare(app: AsyncTask) -> None:
    @app.export(columns=["n", "text"], retry=0)
    def table(shard: dict[str, Any]) -> Iterator[Any]:
        if shard.get("refuse"):
            raise NormalException("no")
        for n in range(shard["from"], shard["to"]):
            yield {"text": f"row {n}", "n": n} if n % 2 else (n, "=1+1")


SHARDS = [{"from": 0, "to": 3}, {"from": 3, "to": 3}, {"from": 3, "to": 5}]


@pytest.mark.each_database(reason="the merge's result is read by a statement of each one's own")
def test_an_export_is_one_file_in_the_order_of_its_shards(world: World) -> None:
    app = world.app()
    declare(app)
    task = app.submit_export("table", SHARDS)
    with pytest.raises(Conflict, match="has no result"):
        app.result(task.id)
    with world.working(app):
        wait_for(lambda: task.progress()["done"], "the export is done")
    path, manifest = app.result(task.id)
    body = path.read_bytes()
    assert body.decode("utf-8-sig") == "n,text\r\n0,'=1+1\r\n1,row 1\r\n2,'=1+1\r\n3,row 3\r\n4,'=1+1\r\n"
    assert task.progress()["result"] == {
        "rows": 5, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest(), "format": "csv", "partial": False,
    }  # fmt: skip
    assert (manifest["shards"], manifest["missing_shards"], manifest["columns"]) == (3, [], ["n", "text"])
    assert sorted(each.name for each in path.parent.iterdir()) == ["manifest-1.json", "result-1.csv"]
    assert app.doctor() == []
    assert app.purge(0).files == 1
    assert not path.parent.exists()


def test_failed_shards_leave_a_partial_file_and_their_retry_completes_it(world: World) -> None:
    app = world.app()
    fixed = Path(world.folder / "fixed")

    @app.export(columns=["n"], retry=0)
    def some(shard: int) -> Iterator[Any]:
        if shard == 1 and not fixed.exists():
            raise NormalException("no")
        yield [shard]

    with world.working(app):
        task = app.submit_export("some", [0, 1, 2], on_complete={"worker": "told", "args": ["on_complete"]})
        wait_for(lambda: task.progress()["done"], "the export is done")
        path, manifest = app.result(task.id)
        assert path.read_text("utf-8-sig").split() == ["n", "0", "2"]
        assert manifest["partial"]
        assert len(manifest["missing_shards"]) == 1
        fixed.touch()
        task.retry()
        wait_for(lambda: task.progress()["done"], "the rest is done")
    path, manifest = app.result(task.id)
    assert path.read_text("utf-8-sig").split() == ["n", "0", "1", "2"]
    assert not manifest["partial"]
    assert app.doctor() == []


def test_what_is_no_export_is_refused(world: World) -> None:
    app = world.app()
    declare(app)
    with pytest.raises(InputError, match="is no export"):
        app.submit_export("note", [1])
    with pytest.raises(InputError, match="is none of"):
        app.submit_export("table", [1], format="doc")
    with pytest.raises(InputError, match="use submit_export"):
        app.submit("table", [1])
