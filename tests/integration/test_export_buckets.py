"""Exports in a bucket, on an S3 that the tests start."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.export_app import ROWS, add_export
from support.servers import unmet
from support.world import World

from asynctask.errors import ConfigError, Conflict, StorageUnavailable, Unavailable
from asynctask.exports.files import Bucket
from asynctask.testing import wait_for

pytestmark = pytest.mark.databases("sqlite", reason="where files go has nothing to do with the ledger's database")
URL = "s3://shop/exports"
LEASE = {"ASYNCTASK_LEASE_S": "1.0", "ASYNCTASK_HEARTBEAT_S": "0.3"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    if importlib.util.find_spec("s3fs") is None or importlib.util.find_spec("moto") is None:
        unmet("s3fs or moto is not installed: pip install s3fs moto flask-cors")
    from moto.server import ThreadedMotoServer

    made = ThreadedMotoServer(port=0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    yield f"http://{host}:{port}"
    made.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file system in which the bucket is, empty."""
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    found = s3fs.S3FileSystem(use_listings_cache=False)
    if not found.exists("shop"):
        found.mkdir("shop")
    if names := found.find("shop"):
        found.rm(names)
    return found


def left(bucket: Any) -> list[str]:
    return sorted(name.removeprefix("shop/exports/").partition("/")[2] for name in bucket.find("shop"))


def test_an_export_whose_workers_die_is_whole_or_absent_in_a_bucket_and_purged(world: World, bucket: Any) -> None:
    app = world.app(lease_s=1.0, heartbeat_s=0.3, results_url=URL)
    add_export(app, world.folder)
    task = app.submit_export("numbers", [0, 1, 2])
    settings = {**LEASE, "ASYNCTASK_RESULTS_URL": URL}
    worker = world.cli("export_app", "worker", "-c", "1", **settings)
    wait_for(lambda: (world.folder / "in-shard").exists(), "a shard is half written", 60)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    assert "parts/1.part" not in left(bucket)
    (world.folder / "shard-gate").touch()
    worker = world.cli("export_app", "worker", "-c", "1", **settings)
    wait_for(lambda: (world.folder / "in-merge").exists(), "the merge is half done", 60)
    assert left(bucket) == ["parts/0.part", "parts/1.part", "parts/2.part"]
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    with pytest.raises(Conflict, match="no result"):
        app.result(task.id)
    with world.working(app):
        task.wait(timeout=120)
    found = app.result(task.id)
    with found.open() as body:
        content = body.read()
    assert content == b"\xef\xbb\xbf" + b"".join(b"%s\r\n" % n for n in [b"n", *(b"%d" % n for n in range(3 * ROWS))])
    assert found.manifest["sha256"] == hashlib.sha256(content).hexdigest() == task.progress()["result"]["sha256"]
    assert found.location.startswith(f"{URL}/")
    assert left(bucket) == ["manifest-1.json", "result-1.csv"], "nothing lingers"
    assert list((world.folder / "data/exports").iterdir()) == [], "nothing lingers on the machines"
    assert app.purge(0).files == 1
    assert left(bucket) == []


def test_a_result_in_a_bucket_is_fetched_in_ranges(world: World, bucket: Any) -> None:
    import webapi

    app = world.app(results_url=URL)

    @app.export(columns=["n"], name="counted")
    def counted(shard: int) -> Iterator[list[int]]:
        yield [shard]

    task = app.submit_export(counted, [1, 2], format="xlsx")
    with world.working(app):
        task.wait(timeout=60)
    with app.result(task.id).open() as body:
        content = body.read()
    client = webapi.create_app(app).test_client()
    url = f"/api/tasks/{task.id}/result"
    assert client.get(url).data == content
    part = client.get(url, headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.data) == (206, content[10:20])
    assert part.headers["Content-Range"] == f"bytes 10-19/{len(content)}"
    assert client.get(url, headers={"Range": f"bytes={len(content)}-"}).status_code == 416


def test_a_bucket_that_is_not_there_is_named_by_the_shard(world: World, bucket: Any) -> None:
    app = world.app(results_url="s3://none")

    @app.export(columns=["n"], name="counted", retry=0)
    def counted(shard: int) -> Iterator[list[int]]:
        yield [shard]

    task = app.submit_export(counted, [1])
    with world.working(app):
        wait_for(lambda: task.events()[0]["status"] == "error", "the shard has ended")
    (event,) = task.events()
    assert "is there such a bucket?" in event["added_messages"][-1]["message"]


def test_no_secret_of_a_bucket_reaches_the_ledger_an_answer_or_the_log(world: World, bucket: Any) -> None:
    """s3fs takes all before the slash for the bucket's name, and shows it in its error."""
    import webapi

    app = world.app(results_url="s3://GEHEIMKEY:GE%2FHEIM@shop/exports")

    @app.export(columns=["n"], name="counted", retry=0)
    def counted(shard: int) -> Iterator[list[int]]:
        yield [shard]

    with capture_logs() as lines:
        task = app.submit_export(counted, [1])
        with world.working(app):
            wait_for(lambda: task.events()[0]["status"] == "error", "the shard has ended")
        (event,) = task.events()
        with pytest.raises(StorageUnavailable) as refused:
            app.export_files.remove("abc")
    said = event["added_messages"][-1]["message"]
    assert "s3://***@shop/exports, which cannot be used (" in said
    assert "the log has the reason" in said
    assert "Invalid bucket name" in str([line for line in lines if line["event"] == "bucket_unavailable"])
    shown = [lines, event, task.progress(), refused.value, app.config]
    answers = [
        webapi.create_app(app).test_client().get(f"/api/tasks/{task.id}{path}") for path in ("", "/events", "/result")
    ]
    for each in (*map(str, shown), repr(app.config), *(answer.text for answer in answers)):
        assert "GEHEIM" not in each
        assert "HEIM@" not in each


def test_a_bucket_that_goes_away_is_a_plain_503_and_its_reason_is_in_the_log(
    world: World, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs
    from moto.server import ThreadedMotoServer

    import webapi

    away = ThreadedMotoServer(port=0, verbose=False)
    away.start()
    host, port = away.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("elsewhere")
    app = world.app(results_url="s3://elsewhere/exports")

    @app.export(columns=["n"], name="counted")
    def counted(shard: int) -> Iterator[list[int]]:
        yield [shard]

    task = app.submit_export(counted, [1])
    with world.working(app):
        task.wait(timeout=60)
    with app.result(task.id).open() as body, capture_logs() as lines:
        away.stop()
        with pytest.raises(StorageUnavailable, match=r"which cannot be used .*the log has the reason"):
            body.read()
        answer = webapi.create_app(app).test_client().get(f"/api/tasks/{task.id}/result")
    said = json.loads(answer.text)
    assert (answer.status_code, said["code"]) == (503, "storage_unavailable")
    assert said["detail"] == "the storage of exports does not answer; try again"
    assert str(port) in lines[0]["error"]
    assert str(port) not in answer.text


def test_what_is_no_bucket_or_lacks_its_library_is_refused(
    world: World, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for url in ("file:///tmp/x", "https://a/b", "/tmp/x"):
        with pytest.raises(ConfigError, match="results_url"):
            world.app(results_url=url)
    with pytest.raises(Unavailable, match="nosuch"):
        Bucket("nosuch://a", world.folder).check()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    app = world.app(results_url=URL)
    add_export(app, world.folder)
    with pytest.raises(Unavailable, match=r"pip install 'asynctask-ledger\[buckets\]'"):
        app.submit_export("numbers", [1])
