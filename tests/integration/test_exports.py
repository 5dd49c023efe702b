"""Exports: shards become parts, and parts one file, whole or absent."""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib.util
import json
import os
import resource
import subprocess
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import openpyxl
import orjson
import pytest
from support.databases import migrated_file
from support.forked import Program, run_program
from support.servers import unmet

from asynctask import AsyncTask, NormalException
from asynctask.errors import Conflict, InputError, UnknownWorker
from asynctask.exports.run import MERGER
from asynctask.testing import wait_for


@pytest.fixture
def app(tmp_path: Path) -> Iterator[AsyncTask]:
    migrated_file(tmp_path / "a.db")
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


def fetched(app: AsyncTask, task_id: int) -> tuple[Path, dict[str, Any]]:
    found = app.result(task_id)
    return Path(found.location), found.manifest


def read_parquet(path: Path) -> list[dict[str, Any]]:
    if importlib.util.find_spec("pyarrow") is None:
        unmet("pyarrow is not installed: pip install pyarrow")
    import pyarrow.parquet as pq

    found: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return found


SHARDS = [{"first": 0, "count": 1500}, {"first": 1500, "count": 0}, {"first": 1500, "count": 700}]
WANTED = [[str(n), f"row {n}"] for n in range(2200)]


@pytest.mark.parametrize("form", ["csv", "csv.gz", "ndjson", "xlsx", "parquet"])
def test_the_file_has_every_row_in_the_order_of_the_shards(app: AsyncTask, tmp_path: Path, form: str) -> None:
    task_id, progress = made(app, SHARDS, format=form, on_success="told")
    path, manifest = fetched(app, task_id)
    body = path.read_bytes()
    if form in ("csv", "csv.gz"):
        text = (gzip.decompress(body) if form == "csv.gz" else body).decode("utf-8-sig")
        rows = list(csv.reader(text.splitlines()))
    elif form == "ndjson":
        rows = [["n", "text"], *([str(each["n"]), each["text"]] for each in map(orjson.loads, body.splitlines()))]
    elif form == "parquet":
        found = read_parquet(path)
        rows = [["n", "text"], *([str(each["n"]), each["text"]] for each in found)]
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
    assert app.result(task_id).manifest["missing_shards"] == [3]
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
    path, manifest = fetched(app, task_id)
    assert (manifest["rows"], manifest["partial"]) == (2202, False)
    assert app.purge(0, dry_run=True).files == 1
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


def test_parquet_keeps_types_and_a_column_has_one_in_all_shards(app: AsyncTask) -> None:
    day, moment = date(2026, 3, 5), datetime(2026, 3, 5, 12, 30, tzinfo=UTC)
    unfit = {"large": 2**63, "fine": Decimal("0.0123456789"), "object": object(), "zone": time(1, tzinfo=UTC)}
    values: list[list[Any]] = [
        [None, None, Decimal("1.5"), day, moment, True, {"a": [1]}, timedelta(seconds=90), b"\xff", None],
        [7, "é", Decimal("1234567.123456789"), day, moment, False, [1], None, b"", None],
        [None, "b", None, None, None, None, None, None, None, None],
    ]
    columns = [f"c{at}" for at in range(10)]

    @app.export(columns=columns, name="typed", retry=0)
    def typed(shard: list[int]) -> Iterator[Any]:
        for at in shard:
            yield from [values[at]] * 1_000  # a batch each

    @app.export(columns=["c"], name="loose", retry=0)
    def loose(shard: list[Any]) -> Iterator[Any]:
        yield from ([unfit[each["unfit"]] if isinstance(each, dict) else each] for each in shard)

    launcher = app.launcher(concurrency=1, shutdown_s=5)
    task = app.submit_export(typed, [[0, 1], [2]], format="parquet")
    in_one = app.submit_export(loose, [[1, None, "a"]], format="parquet")
    between = app.submit_export(loose, [[1], [None], ["a"]], format="parquet")
    too_large = app.submit_export(loose, [[{"unfit": each}] for each in unfit], format="parquet")
    launcher.start()
    try:
        wait_for(lambda: task.progress()["done"] and in_one.progress()["done"], f"{task.progress()}")
        wait_for(lambda: between.progress()["done"] and too_large.progress()["done"], f"{between.progress()}")
    finally:
        launcher.stop()
    found = read_parquet(Path(app.result(task.id).location))
    texts = {(1, "c6"): "[1]", (0, "c6"): '{"a":[1]}', (0, "c7"): 90.0}
    for at, row in enumerate(values):
        wanted = {name: texts.get((at, name), value) for name, value in zip(columns, row, strict=True)}
        assert found[at * 1_000 : (at + 1) * 1_000] == [wanted] * 1_000
    assert in_one.progress()["counts"]["failed"] == 1
    assert "row 3 of the shard, column 'c': a text after a whole number" in str(in_one.events()[0]["added_messages"])
    assert between.progress()["result"] is None
    with pytest.raises(Conflict, match="its merge failed"):
        app.result(between.id)
    assert too_large.progress()["counts"]["failed"] == 4


def test_a_workbook_has_a_sheet_more_for_what_one_cannot_hold(app: AsyncTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynctask.lists.workbook_writer.SHEET_ROWS", 1_000)
    task_id, _ = made(app, SHARDS, format="xlsx")
    book = openpyxl.load_workbook(app.result(task_id).location)
    assert book.sheetnames == ["Rows", "Rows 2", "Rows 3"]
    rows = [[str(cell) for cell in row] for sheet in book for row in list(sheet.values)[1:]]
    assert rows == WANTED
    empty, _ = made(app, [{"first": 0, "count": 0}], format="xlsx")
    assert [list(sheet.values) for sheet in openpyxl.load_workbook(app.result(empty).location)] == [[("n", "text")]]


def test_only_a_workbook_is_limited_in_its_columns(app: AsyncTask) -> None:
    columns = [f"c{n}" for n in range(16_385)]

    @app.export(columns=columns, name="wide", retry=0)
    def wide(shard: Any) -> Iterator[Any]:
        yield range(16_385)

    with pytest.raises(InputError, match="at most 16,384 columns"):
        app.submit_export(wide, [1], format="xlsx")
    launcher = app.launcher(concurrency=1, shutdown_s=5)
    task = app.submit_export(wide, [1])
    launcher.start()
    try:
        wait_for(lambda: task.progress()["done"], f"{task.progress()}")
    finally:
        launcher.stop()
    assert Path(app.result(task.id).location).read_text("utf-8-sig").split("\n")[1] == ",".join(map(str, range(16_385)))


def test_what_parquet_needs_is_named_where_it_is_missing(app: AsyncTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'asynctask-ledger\[parquet\]'"):
        app.submit_export("numbers", SHARDS, format="parquet")


def test_the_same_key_gives_the_same_export_and_a_dry_run_makes_none(app: AsyncTask) -> None:
    found = app.submit_export("numbers", SHARDS, dry_run=True)
    assert (found.accepted, found.rejected, app.tasks()) == (3, 0, [])
    with pytest.raises(InputError, match="format"):
        app.submit_export("numbers", SHARDS, format="pdf", dry_run=True)
    first = app.submit_export("numbers", SHARDS, idempotency_key="a")
    assert app.submit_export("numbers", SHARDS, idempotency_key="a").id == first.id
    for shards, form in ((SHARDS, "xlsx"), (SHARDS[:2], "csv")):
        with pytest.raises(InputError):
            app.submit_export("numbers", shards, format=form, idempotency_key="a")


def test_formulas_are_texts(app: AsyncTask) -> None:
    task_id, _ = made(app, [{"first": 1, "count": 1, "text": "=1+1"}])
    assert b"1,'=1+1\r\n" in Path(app.result(task_id).location).read_bytes()
    task_id, _ = made(app, [{"first": 1, "count": 1, "text": "=1+1"}], format="xlsx")
    (_, row) = openpyxl.load_workbook(Path(app.result(task_id).location))["Rows"].iter_rows()
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
    with pytest.raises(InputError, match="leave out chunk_size"):
        app.submit_export("numbers", SHARDS, chunk_size=2)
    with pytest.raises(InputError, match="leave out resubmit_of"):
        app.submit_export("numbers", SHARDS, resubmit_of=2)
    with pytest.raises(InputError, match="no items"):
        app.submit_export("numbers", [])
    with pytest.raises(Conflict, match="is no export"):
        app.result(app.submit("told", [{"a": 1}]).id)


def test_an_export_is_made_and_fetched_on_the_command_line(app: AsyncTask, tmp_path: Path) -> None:
    module = tmp_path / "shop_export.py"
    module.write_text(
        "import os\nfrom asynctask import AsyncTask\napp = AsyncTask()\n"
        "@app.export(columns=['n'])\ndef counted(shard):\n    yield from ([n] for n in range(shard))\n"
        "@app.worker\ndef told(progress):\n    pass\n"
    )
    (tmp_path / "shards.json").write_text("[2, 1]")
    settings = {"ASYNCTASK_DATABASE_URL": f"sqlite:///{tmp_path}/b.db", "ASYNCTASK_DATA_DIR": str(tmp_path / "data")}
    run = partial(asynctask, tmp_path, {**os.environ, **settings, "PYTHONPATH": str(tmp_path)})
    command = ("-A", "shop_export:app", "export", "counted", "--shards", "shards.json", "--json")
    tried = run(*command, "--dry-run")
    assert (tried.returncode, json.loads(tried.stdout)["accepted"]) == (0, 2), tried.stderr
    made, again = (run(*command, "--idempotency-key", "k") for _ in "ab")
    assert made.returncode == 0, made.stderr
    task_id = str(json.loads(made.stdout)["task_id"])
    assert (task_id, str(json.loads(again.stdout)["task_id"])) == ("1", task_id), "the dry run made none, the key one"
    options = ("--owner", "ann", "--queue", "night", "--priority", "ADMIN_HIGH", "--session", "s", "--parallel", "2")
    above = str(json.loads(run(*command).stdout)["task_id"])
    timed = ("--start-at", "2999-01-01T00:00:00Z", "--paused", "--parent", above, "--on-complete", "told")
    held = json.loads(run(*command, *options, *timed).stdout)
    control = {name: held["control"][name] for name in ("parallel", "priority", "session", "start_at")}
    assert control == {"parallel": 2, "priority": 120, "session": "s", "start_at": "2999-01-01T00:00:00.000Z"}
    assert (held["owner"], held["state"], held["parent"]) == ("ann", "paused", int(above))
    assert [each["name"] for each in held["callbacks"]] == ["merge", "on_complete"]
    refused = run(*command, "--chunk-size", "2")
    assert (refused.returncode, "No such option" in refused.stderr) == (2, True)
    other = run(*command, "--idempotency-key", "k", "--format", "xlsx")
    assert (other.returncode, "idempotency" in other.stderr.lower()) == (2, True), other.stderr
    early = run("result", task_id, "-o", "out.csv")
    assert (early.returncode, "no result" in early.stderr) == (2, True)
    with (tmp_path / "worker.log").open("wb") as log:
        words = ("-m", "asynctask", "-A", "shop_export:app", "worker", "-c", "1")
        worker = Program(words, cwd=tmp_path, env={**os.environ, **settings, "PYTHONPATH": str(tmp_path)}, output=log)
    try:
        wait_for(lambda: run("result", task_id, "-o", "out.csv").returncode == 0, "the export is done", every=0.5)
    finally:
        worker.terminate()
        worker.wait(60)
    assert (tmp_path / "out.csv").read_bytes() == b"\xef\xbb\xbfn\r\n0\r\n1\r\n0\r\n"
    wrong = run("-A", "shop_export:app", "export", "counted", "--shards", "{}")
    assert (wrong.returncode, "cannot be read" in wrong.stderr) == (2, True)


def asynctask(folder: Path, environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return run_program(["asynctask", *words], cwd=folder, env=environ, timeout=120)


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
