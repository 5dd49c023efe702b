"""Every limit of bodies and items at its edge: what is just within is taken, one more is refused with the limit's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support.sheets import rows_xml, sheet_xml, xlsx
from support.webshop import Client, client_of

from asynctask import AsyncTask
from asynctask.config import Config
from asynctask.lists.options import MAX_FIELD_FAULTS
from asynctask.testing import wait_for

Make = Callable[..., AsyncTask]


def of_rows(client: Client, *items: Any, **options: Any) -> Any:
    return client.post("/api/tasks", json={"worker": "anything", "items": list(items), **options})


def test_max_body_bytes(make_app: Make) -> None:
    client = client_of(make_app(max_body_bytes=2_000))

    def post(length: int) -> Any:
        start, end = '{"worker": "anything", "items": [{"x": "', '"}]}'
        body = start + "y" * (length - len(start) - len(end)) + end
        return client.post("/api/tasks", data=body, content_type="application/json")

    assert post(2_000).status_code == 202
    answer = post(2_001)
    assert (answer.status_code, answer.json["code"]) == (413, "too_large")
    assert "ASYNCTASK_MAX_BODY_BYTES" in answer.json["detail"]


def test_an_item_with_a_number_of_more_than_64_bits_is_refused_and_the_others_go_on(make_app: Make) -> None:
    client = client_of(make_app())
    assert of_rows(client, {"x": 2**64 - 1}).status_code == 202
    answer = of_rows(client, {"x": 1}, {"x": 2**64})
    assert (answer.status_code, answer.json["counts"]["total"]) == (202, 1)
    assert [(each["row"], "64-bit" in each["message"]) for each in answer.json["errors"]] == [(2, True)]
    assert of_rows(client, {"x": 2**64}).status_code == 422


def test_in_a_list_that_is_split_such_an_item_is_refused_by_its_row_too(make_app: Make) -> None:
    client = client_of(make_app())
    answer = of_rows(client, {"x": 2**64}, *[{"x": n} for n in range(3_000)])
    assert answer.status_code == 202
    url = f"/api/tasks/{answer.json['task_id']}"
    wait_for(lambda: client.get(url).json["split"]["state"] == "sealed", "the list is split")
    assert client.get(url).json["counts"]["total"] == 3_000
    (refused,) = client.get(f"{url}/rejected").json["rejected"]
    assert refused["row"] == 1
    assert "double quotes" in str(refused)


def test_max_file_bytes(make_app: Make, form: Any) -> None:
    client = client_of(make_app(max_file_bytes=2_000))
    start = "sku,note\nA,"
    assert client.post("/api/tasks", **form(start + "x" * (2_000 - len(start)))).status_code == 202
    answer = client.post("/api/tasks", **form(start + "x" * (2_001 - len(start))))
    assert (answer.status_code, answer.json["code"]) == (413, "too_large")
    assert "ASYNCTASK_MAX_FILE_BYTES" in answer.json["detail"]


@pytest.mark.parametrize("worker", ["anything", "enroll"])
def test_max_item_bytes(make_app: Make, worker: str, form: Any) -> None:
    client = client_of(make_app(max_item_bytes=200))

    def post(length: int, columns: dict[str, str] | None = None) -> Any:
        empty = {"sku": "A", "quantity": 1, "note": ""}
        room = length - len(json.dumps(empty, separators=(",", ":")))
        header, more = "sku,quantity,note", {}
        if columns:
            header, more = header.replace("note", "Bemerkung"), {"columns": json.dumps(columns)}
        if worker == "anything":
            return of_rows(client, {**empty, "note": "x" * room})
        return client.post("/api/tasks", **form(f"{header}\nA,1,{'x' * room}\n", **more))

    for columns in (None, {"Bemerkung": "note"}):
        assert post(200, columns).status_code == 202
        answer = post(201, columns)
        assert (answer.status_code, answer.json["code"]) == (422, "all_rejected")
        assert [(e["row"] in (1, 2), e["code"]) for e in answer.json["errors"]] == [(True, "item_too_large")]
        assert "201 bytes as JSON, over the limit of 200 (max_item_bytes)" in answer.json["errors"][0]["message"]


def test_max_json_depth(make_app: Make) -> None:
    client = client_of(make_app(max_json_depth=5))
    assert of_rows(client, {"a": [{}]}).status_code == 202, "the body, the list, the item and two more"
    answer = of_rows(client, {"a": [{"b": []}]})
    assert (answer.status_code, answer.json["code"]) == (422, "too_deep")
    assert "ASYNCTASK_MAX_JSON_DEPTH" in answer.json["detail"]


def test_max_rows_of_a_json_list(make_app: Make) -> None:
    client = client_of(make_app(max_rows=3))
    for options in ({}, {"strict": True}, {"dry_run": True}):
        assert of_rows(client, 1, 2, 3, **options).status_code in (200, 202)
        answer = of_rows(client, 1, 2, 3, 4, **options)
        assert (answer.status_code, answer.json["code"]) == (413, "too_many_rows")
        assert answer.json["detail"].startswith("more than 3 items (max_rows)")
        assert "ASYNCTASK_MAX_ROWS" in answer.json["detail"]
    assert len(client.get("/api/tasks").json["tasks"]) == 2


@pytest.mark.parametrize("options", [{}, {"strict": "true"}, {"dry_run": "true"}, {"unique": "sku"}])
def test_max_rows_of_a_file(make_app: Make, form: Any, options: dict[str, str]) -> None:
    client = client_of(make_app(max_rows=3))
    assert client.post("/api/tasks", **form("sku\nA\nB\nC\n", **options)).status_code in (200, 202)
    answer = client.post("/api/tasks", **form("sku\nA\nB\nC\nD\n", **options))
    assert (answer.status_code, answer.json["code"]) == (413, "too_large")
    assert "ASYNCTASK_MAX_ROWS" in answer.json["detail"]
    tasks = client.get("/api/tasks").json["tasks"]
    assert [task["counts"]["total"] for task in tasks] == ([] if "dry_run" in options else [0, 3])


def test_split_cpu_s_and_split_memory(make_app: Make, form: Any, tmp_path: Path) -> None:
    rows = rows_xml([["sku"]]) + "<x:row><x:c><x:v>1</x:v></x:c></x:row>" * 150_000  # no pattern knows such rows
    slow = xlsx(tmp_path / "slow", sheet_xml(rows)).read_bytes()
    strings = "<sst>" + f"<si><t>{'x' * 1_000_000}</t></si>" * 40 + "</sst>"
    large = xlsx(tmp_path / "large", sheet_xml(rows_xml([["sku"], ["A"]])), strings=strings).read_bytes()
    for book, setting, limit in ((slow, "split_cpu_s", 1), (large, "split_memory", 33_554_432)):
        app = make_app(max_unzip_ratio=100_000, dry_run_s=300, **{setting: limit})
        client = client_of(app)
        answer = client.post("/api/tasks", **form(book, "list.xlsx", dry_run="true"))
        assert (answer.status_code, answer.json["code"]) == (422, "too_costly")
        assert f"({setting})" in answer.json["detail"]
        assert f"ASYNCTASK_{setting.upper()}" in answer.json["detail"]
        answer = client.post("/api/tasks", **form(book, "list.xlsx"))
        if answer.status_code == 422:
            assert answer.json["code"] == "too_costly"
        else:  # it was still read when the answer was due
            task = app.task(answer.json["task_id"])
            assert task.wait(120)["state"] == "rejected"
        reasons = [task["split"]["reason"] for task in client.get("/api/tasks").json["tasks"]]
        assert [reason.partition(":")[0] for reason in reasons] == ["too_costly"] * len(reasons)
        good = xlsx(tmp_path / "good", sheet_xml(rows_xml([["sku"], ["A"]]))).read_bytes()
        assert client.post("/api/tasks", **form(good, "list.xlsx")).json["counts"]["total"] == 1


def test_every_limit_is_a_setting_that_can_be_looked_up() -> None:
    limits = {each.name for each in fields(Config) if each.name.startswith("max_")}
    assert {"max_body_bytes", "max_file_bytes", "max_item_bytes", "max_json_depth", "max_rows"} <= limits


def test_a_body_of_unknown_fields_is_refused_without_a_look_at_each(client: Client) -> None:
    answer = client.post("/api/tasks", json={"worker": "anything", "items": [1], **{f"{n}": 1 for n in range(20_000)}})
    assert (answer.status_code, answer.json["code"]) == (422, "invalid_option")
    assert "(and 19999 more)" in answer.json["detail"]
    assert len(answer.json["errors"]) == MAX_FIELD_FAULTS
