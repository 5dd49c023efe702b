"""docs/reference/python.md is one program: its blocks run in order beside a worker, and what they say comes true."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asynctask import AsyncTask
from asynctask.errors import InputError
from asynctask.testing import PATIENCE_S, wait_for

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/python.md"


class Shop:
    """The program of the page: ``names`` are its global names, ``step`` runs the block of a section."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "shop"}

    def step(self, section: str) -> None:
        text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        exec(compile(block, f"{PAGE}: {section}", "exec"), self.names)

    def __getattr__(self, name: str) -> Any:
        return self.names[name]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ASYNCTASK_")]:
        monkeypatch.delenv(name)
    (tmp_path / "products.csv").write_text("Article,seller\nD-1,Nordwind\n,Nordwind\n")
    found = Shop()
    found.step("Declaring workers")
    yield found
    found.app.close()


def test_the_page_is_a_program_that_does_what_it_says(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app: AsyncTask = shop.app
    launcher = app.launcher(concurrency=2)
    launcher.start()
    try:
        work_through(shop, app, tmp_path, capsys)
    finally:
        launcher.stop()
    without_worker(shop, app)  # a process has a worker or the services of a web process


def work_through(shop: Shop, app: AsyncTask, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shop.step("Submitting lists")
    assert (shop.checked.accepted, shop.checked.rejected) == (2, 1)
    assert [(each.row, each.column, each.code) for each in shop.task.problems] == [(3, "sku", "missing")]
    uploaded = shop.uploaded
    assert (uploaded.created, uploaded.wait(timeout=PATIENCE_S)["title"]) == (True, "products.csv")
    assert [each["row"] for each in uploaded.rejects()] == [3]

    shop.step("Following")
    found = shop.found
    assert (found["done"], found["counts"]["finish"], found["counts"]["failed"]) == (True, 1, 1)
    assert found["split"]["rejected"] == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "2 Failed: the seller is not qualified"
    assert said[1].startswith("3 [{'column': 'sku', 'code': 'missing'")
    assert found["top_errors"][0]["message"] == "the seller is not qualified"
    assert [row.number for row in shop.task.report().rows] == [2, 3]
    assert (folder / "failed.xlsx").stat().st_size > 0
    (group,) = shop.task.error_groups()
    assert (group["message"], group["status"], group["count"]) == ("the seller is not qualified", "failed", 1)

    shop.step("Steering")
    assert [entry["action"] for entry in shop.later.log() if entry["who"] == "ann"] == ["cancelled", "paused"]
    assert shop.later.progress()["control"]["parallel"] == 5
    again = shop.task.wait(timeout=60)
    assert (again["done"], again["generation"], again["counts"]["failed"]) == (True, 2, 1)

    shop.step("Inside a job")
    shop.step("Single jobs")
    wait_for(lambda: app.event(shop.job_id)["status"] in ("finish", "failed", "error"), "the job ends")
    event = app.event(shop.job_id)
    assert (event["status"], event["result"]) == ("finish", {"steps": 3})
    assert f"attempt 1 of {shop.job_id} is through" in [each["message"] for each in event["messages"]]
    wait_for(lambda: len(app.jobs(worker="price_all", status="enqueue")) == 3, "only the later ones wait")


def without_worker(shop: Shop, app: AsyncTask) -> None:
    shop.step("In your Flask application")
    shop.flask_app.secret_key = "of the tests"  # an application with a login has one
    shop.start()
    client = shop.flask_app.test_client()
    with client.session_transaction() as cookie:
        cookie["name"] = "ann"
    sheet = {"file": (io.BytesIO(b"sku,seller\nE-1,Nordwind\n"), "more.csv")}
    answer = client.post("/promotions", data=sheet)
    assert answer.status_code == 202
    task_id = answer.get_json()["task_id"]
    assert shop.flask_app.test_client().get(f"/bulk/api/tasks/{task_id}").status_code == 401
    assert client.get(f"/bulk/api/tasks/{task_id}").get_json()["owner"] == "ann"
    assert client.get("/bulk/").status_code == 200
    assert [each["kind"] for each in app.processes()] == ["web"]

    shop.step("Operations")
    assert [reason.code for reason in app.operations.wait_reasons(shop.waiting.id)] == ["no_process"]
    assert [queue["waiting"] for queue in app.operations.queues() if queue["name"] == "night"] == [2]
    assert app.operations.listed("scheduled")["total"] == 0


def test_refused_rows_are_returned_or_raised_as_the_table_says(shop: Shop) -> None:
    app: AsyncTask = shop.app
    good, bad = {"sku": "A"}, {"seller": "Nordwind"}

    def states() -> list[str]:
        return [each["state"] for each in reversed(app.tasks())]

    def store(*skus: str) -> Any:
        rows = "".join(f"{sku},Nordwind\n" for sku in skus)
        return app.uploads.store(io.BytesIO(f"sku,seller\n{rows}".encode()), "a.csv")

    # submit and submit_jobs
    assert [each["row"] for each in app.submit("enroll_product", [good, bad]).rejects()] == [2]
    for lists in ([bad], []):
        handle = app.submit("enroll_product", lists)
        error = handle.refusal()
        assert error is not None
        assert error.code == ("all_rejected" if lists else "no_items")
    assert app.submit_jobs([("enroll_product", bad)]).progress()["state"] == "rejected"
    assert app.submit("enroll_product", [good]).refusal() is None
    before = states()
    with pytest.raises(InputError) as strict:
        app.submit("enroll_product", [good, bad], strict=True)
    assert strict.value.code == "rows_rejected"
    assert states() == before

    def broken() -> Iterator[dict[str, str]]:
        yield good
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        app.submit("enroll_product", broken())
    assert app.tasks()[0]["split"]["state"] == "failed"

    # submit_items, submit_file and submit_export
    found = app.submit_file("enroll_product", store("A", ""), wait_s=PATIENCE_S)
    assert [each.row for each in found.problems] == [3]
    refused: dict[str, list[Any]] = {
        "all_rejected": [
            lambda: app.submit_file("enroll_product", store(""), wait_s=PATIENCE_S),
            lambda: app.submit_items("enroll_product", [bad], wait_s=PATIENCE_S),
        ],
        "no_items": [
            lambda: app.submit_items("enroll_product", [], wait_s=PATIENCE_S),
            lambda: app.submit_export(app.export(columns=["n"])(rows_of), []),
        ],
        "rows_rejected": [
            lambda: app.submit_file("enroll_product", store("A", ""), strict=True, wait_s=PATIENCE_S),
            lambda: app.submit_items("enroll_product", [good, bad], strict=True, wait_s=PATIENCE_S),
        ],
        "damaged_file": [
            lambda: app.submit_file(
                "enroll_product", app.uploads.store(io.BytesIO(b"PK\3\4"), "a.xlsx"), wait_s=PATIENCE_S
            ),
        ],
    }
    for code, submits in refused.items():
        for submit in submits:
            count = len(app.tasks())
            with pytest.raises(InputError) as error_of_list:
                submit()
            assert error_of_list.value.code == code
            assert len(app.tasks()) == count + 1
            assert app.tasks()[0]["state"] == "rejected"
    first = app.submit("enroll_product", [good], idempotency_key="k")
    assert app.submit("enroll_product", [good], idempotency_key="k").id == first.id
    with pytest.raises(InputError) as reused:
        app.submit("enroll_product", [{"sku": "B"}], idempotency_key="k")
    assert reused.value.code == "idempotency_key_reused"


def rows_of(shard: Any) -> Iterator[list[int]]:
    yield [shard]
