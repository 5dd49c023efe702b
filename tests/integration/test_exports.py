"""Exports: shards become parts, and parts one file, whole or absent."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openpyxl
import orjson
import pytest

from asynctask import AsyncTask, NormalException
from asynctask.errors import Conflict, InputError, UnknownWorker
from asynctask.exports.run import MERGER
from asynctask.testing import wait_for


@pytest.fixture
def app(tmp_path: Path) -> Iterator[AsyncTask]:
    made = AsyncTask(database_url=f"sqlite:///{tmp_path}/a.db", data_dir=str(tmp_path / "data"), environ={})

    @made.export(columns=["n", "text"], retry=0)
    def numbers(shard: dict[str, Any]) -> Iterator[Any]:
        if shard.get("refuse") and not (tmp_path / "mended").exists():
            raise NormalException("refused")
        for n in range(shard["first"], shard["first"] + shard["count"]):
            yield {"n": n, "text": shard.get("text", f"row {n}")} if n % 2 else (n, shard.get("text", f"row {n}"))

    @made.worker(retry=0)
    def told(closed: dict[str, Any]) -> None:
        (tmp_path / "told").write_bytes(orjson.dumps(closed))

    yield made
    made.close()


def made(app: AsyncTask, shards: list[dict[str, Any]], **options: Any) -> tuple[int, dict[str, Any]]:
    launcher = app.launcher(concurrency=2, shutdown_s=5)
    task = app.submit_export("numbers", shards, **options)
    launcher.start()
    try:
        wait_for(lambda: task.progress()["done"], f"the export is done: {task.progress()}")
    finally:
        launcher.stop()
    return task.id, task.progress()


SHARDS = [{"first": 0, "count": 1500}, {"first": 1500, "count": 0}, {"first": 1500, "count": 700}]
WANTED = [[str(n), f"row {n}"] for n in range(2200)]


@pytest.mark.parametrize("form", ["csv", "csv.gz", "ndjson", "xlsx"])
def test_the_file_has_every_row_in_the_order_of_the_shards(app: AsyncTask, tmp_path: Path, form: str) -> None:
    task_id, progress = made(app, SHARDS, format=form, on_success="told")
    path, manifest = app.result(task_id)
    body = path.read_bytes()
    if form in ("csv", "csv.gz"):
        text = (gzip.decompress(body) if form == "csv.gz" else body).decode("utf-8-sig")
        rows = list(csv.reader(text.splitlines()))
    elif form == "ndjson":
        rows = [["n", "text"], *([str(each["n"]), each["text"]] for each in map(orjson.loads, body.splitlines()))]
    else:
        rows = [[str(cell) for cell in row] for row in openpyxl.load_workbook(path)["Rows"].values]
    assert rows == [["n", "text"], *WANTED]
    assert manifest["sha256"] == hashlib.sha256(body).hexdigest() == progress["result"]["sha256"]
    assert progress["result"] == {
        "rows": 2200, "bytes": len(body), "sha256": manifest["sha256"], "format": form, "partial": False,
    }  # fmt: skip
    assert orjson.loads((tmp_path / "told").read_bytes())["result"] == progress["result"]
    assert sorted(each.suffix for each in path.parent.iterdir()) == sorted([path.suffix, ".json"])
    assert app.doctor() == []


def test_a_partial_export_says_so_and_a_retry_makes_it_whole(app: AsyncTask, tmp_path: Path) -> None:
    task_id, progress = made(app, [*SHARDS, {"first": 2200, "count": 2, "refuse": True}])
    assert progress["result"]["partial"]
    assert app.result(task_id)[1]["missing_shards"] == [3]
    (tmp_path / "mended").touch()
    task = app.task(task_id)
    task.retry()
    with pytest.raises(Conflict, match="when the last shard has ended"):
        app.result(task_id)
    launcher = app.launcher(concurrency=2, shutdown_s=5)
    launcher.start()
    try:
        wait_for(lambda: task.progress()["done"], f"{task.progress()}")
    finally:
        launcher.stop()
    path, manifest = app.result(task_id)
    assert (manifest["rows"], manifest["partial"]) == (2202, False)
    assert app.purge(0).files == 1
    assert not path.parent.exists()


@pytest.mark.parametrize(("form", "text"), [("csv", "\ud800"), ("xlsx", "x" * 32_768), ("ndjson", "\ud800")])
def test_a_value_that_the_format_cannot_hold_is_named(app: AsyncTask, form: str, text: str) -> None:
    @app.export(columns=["n"], name="bad", retry=0)
    def bad(shard: Any) -> Iterator[Any]:
        yield [text]

    launcher = app.launcher(concurrency=1, shutdown_s=5)
    task = app.submit_export(bad, [1], format=form)
    launcher.start()
    try:
        wait_for(lambda: task.progress()["done"], f"{task.progress()}")
    finally:
        launcher.stop()
    (event,) = task.events()
    assert event["status"] == "failed"
    assert task.progress()["result"]["partial"]


def test_formulas_are_texts(app: AsyncTask) -> None:
    task_id, _ = made(app, [{"first": 1, "count": 1, "text": "=1+1"}])
    assert b"1,'=1+1\r\n" in app.result(task_id)[0].read_bytes()
    task_id, _ = made(app, [{"first": 1, "count": 1, "text": "=1+1"}], format="xlsx")
    (_, row) = openpyxl.load_workbook(app.result(task_id)[0])["Rows"].iter_rows()
    assert (row[1].value, row[1].data_type) in {("=1+1", "s"), ("=1+1", "f")}


def test_nobody_but_the_close_of_an_export_calls_the_merge(app: AsyncTask) -> None:
    said = {"export": "0" * 24, "format": "csv", "columns": ["n"]}
    for ask in (
        lambda: app.submit(MERGER, [said]),
        lambda: app.perform(MERGER, said, {"task_id": 1, "generation": 1}),
        lambda: app.submit("told", [{"a": 1}], on_complete=MERGER),
    ):
        with pytest.raises(UnknownWorker):
            ask()


def test_what_is_no_export_is_refused(app: AsyncTask) -> None:
    with pytest.raises(InputError, match="is no export"):
        app.submit_export("told", [1])
    with pytest.raises(InputError, match="format"):
        app.submit_export("numbers", [1], format="pdf")
    with pytest.raises(InputError, match="no items"):
        app.submit_export("numbers", [])
    with pytest.raises(Conflict, match="is no export"):
        app.result(app.submit("told", [{"a": 1}]).id)


def test_an_export_is_made_and_fetched_on_the_command_line(app: AsyncTask, tmp_path: Path) -> None:
    module = tmp_path / "shop_export.py"
    module.write_text(
        "import os\nfrom asynctask import AsyncTask\napp = AsyncTask()\n"
        "@app.export(columns=['n'])\ndef counted(shard):\n    yield from ([n] for n in range(shard))\n"
    )
    (tmp_path / "shards.json").write_text("[2, 1]")
    settings = {"ASYNCTASK_DATABASE_URL": f"sqlite:///{tmp_path}/b.db", "ASYNCTASK_DATA_DIR": str(tmp_path / "data")}
    run = partial(asynctask, tmp_path, {**os.environ, **settings, "PYTHONPATH": str(tmp_path)})
    made = run("-A", "shop_export:app", "export", "counted", "--shards", "shards.json", "--json")
    assert made.returncode == 0, made.stderr
    task_id = str(json.loads(made.stdout)["task_id"])
    early = run("result", task_id, "-o", "out.csv")
    assert (early.returncode, "no result" in early.stderr) == (2, True)
    worker = subprocess.Popen(
        [sys.executable, "-m", "asynctask", "-A", "shop_export:app", "worker", "-c", "1"],
        cwd=tmp_path, env={**os.environ, **settings, "PYTHONPATH": str(tmp_path)}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(lambda: run("result", task_id, "-o", "out.csv").returncode == 0, "the export is done", every=0.5)
    finally:
        worker.terminate()
        worker.wait(60)
    assert (tmp_path / "out.csv").read_bytes() == b"\xef\xbb\xbfn\r\n0\r\n1\r\n0\r\n"
    wrong = run("-A", "shop_export:app", "export", "counted", "--shards", "{}")
    assert (wrong.returncode, "cannot be read" in wrong.stderr) == (2, True)


def asynctask(folder: Path, environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "asynctask", *words]
    return subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False)


def test_a_full_disk_leaves_no_half_of_a_file_and_the_next_attempt_makes_it_whole(app: AsyncTask, tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    @app.export(columns=["text"], name="large", retry=3, retry_in=lambda count, error, job: 0.05)
    def large(shard: Any) -> Iterator[Any]:
        is_first = not (tmp_path / "tried").exists()
        (tmp_path / "tried").touch()
        if is_first:  # from here on no file of this process may grow beyond so many bytes
            resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, limit[1]))
        try:
            for _ in range(2_000):
                yield ["x" * 500]
        finally:
            if is_first:
                (tmp_path / "left").write_text(",".join(each.name for each in tmp_path.glob("data/exports/*/parts/*.part")))

    launcher = app.launcher(concurrency=1, shutdown_s=5)
    try:
        task = app.submit_export(large, [1])
        launcher.start()
        wait_for(lambda: (tmp_path / "left").exists(), "the first attempt broke off")
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        wait_for(lambda: task.progress()["done"], "the export is done")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        launcher.stop()
    assert (tmp_path / "left").read_text() == ""
    assert (task.progress()["counts"]["finish"], task.progress()["result"]["rows"]) == (1, 2_000)
    (event,) = task.events()
    assert any("is the disk full?" in each["message"] for each in event["messages"])
