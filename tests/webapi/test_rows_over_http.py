"""Rows of a Task over HTTP: the columns of its list, rows by their text and by their numbers."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr
from support.webshop import Client, said

from asynctask import AsyncTask


class Login(BaseModel):
    name: str
    password: SecretStr


Form = Callable[..., dict[str, Any]]
SHEET = "Colour,Artikel-Nr.,Quantity\nred,A,1\nblue,NO-1,2\ngreen,B,many\nblack,BUG-1,3\nblack,NO-2,4\n"


def test_the_columns_of_a_list_are_those_of_its_sheet_in_its_order(
    app: AsyncTask, client: Client, form: Form, working: Callable[[], Any], ended: Callable[..., int]
) -> None:
    mapped = client.post("/api/tasks", **form(SHEET, columns='{"Artikel-Nr.": "sku"}')).json["task_id"]
    plain = client.post("/api/tasks", **form(SHEET, worker="anything", columns='{"Artikel-Nr.": "sku"}')).json["task_id"]
    with working():
        for each in (mapped, plain):
            app.task(each).wait(120)

    def columns(task: int) -> list[tuple[str, str]]:
        return [(each["name"], each["header"]) for each in client.get(f"/api/tasks/{task}/columns").json["columns"]]

    assert columns(mapped) == [("sku", "Artikel-Nr."), ("quantity", "Quantity")]
    assert columns(plain) == [("Colour", "Colour"), ("sku", "Artikel-Nr."), ("Quantity", "Quantity")]
    assert columns(ended("A")) == [("sku", "sku"), ("note", "note")]
    assert said(client.get("/api/tasks/99/columns")) == (404, "not_found")


def test_rows_are_chosen_by_their_numbers_for_a_report_and_a_retry(
    app: AsyncTask, client: Client, form: Form, working: Callable[[], Any]
) -> None:
    task = client.post("/api/tasks", **form(SHEET, columns='{"Artikel-Nr.": "sku"}')).json["task_id"]
    with working():
        app.task(task).wait(120)
    path = f"/api/tasks/{task}"
    for kind, rows in (("all", ["red", "green", "black"]), ("failed", ["green", "black"]), ("succeeded", ["red"])):
        text = client.get(f"{path}/report.csv?rows={kind}&only_rows=6,2,4,77").text.removeprefix("\ufeff")
        assert [row["Colour"] for row in csv.DictReader(io.StringIO(text))] == rows
    assert "-chosen.xlsx" in client.get(f"{path}/report.xlsx?only_rows=4").headers["Content-Disposition"]
    assert client.post(f"{path}/retry?only_rows=2").json["generation"] == 1
    assert client.post(f"{path}/retry?only_rows=2,6").json["counts"]["failed"] == 1
    for body in ({"status": ["finish"]}, {"status": "failed"}, [1]):
        assert said(client.post(f"{path}/retry", json=body)) == (422, "unexpected_body")
        assert said(client.post(f"{path}/cancel", json=body)) == (422, "unexpected_body")
    assert client.post(f"{path}/cancel", json={}).status_code == 200
    many = ",".join(map(str, range(1, 202)))
    for call, query in (
        (client.post, "retry?only_rows=0"),
        (client.post, "retry?only_rows="),
        (client.post, f"retry?only_rows={many}"),
        (client.get, "report.csv?only_rows=A"),
        (client.get, f"report.csv?only_rows={'9' * 19}"),
    ):
        answer = call(f"{path}/{query}")
        assert said(answer) == (422, "invalid_query_parameter"), query
        assert answer.json["errors"][0]["column"] == "only_rows"


def test_rows_are_found_page_by_page_by_their_text_and_a_secret_is_not(
    app: AsyncTask, client: Client, ended: Callable[..., int]
) -> None:
    @app.worker(retry=0)
    def log_in(item: Login) -> None:
        """Takes a secret."""

    def found(task: int, text: str, **more: Any) -> list[Any]:
        answer = client.get(f"/api/tasks/{task}/events", query_string={"text": text, **more})
        return [answer.json["links"]["next"], *(each["params"] for each in answer.json["events"])]

    task = app.submit("log_in", [{"name": name, "password": f"hunter{n}"} for n, name in enumerate(("Ann", "Bob"))]).id
    assert [each["name"] for each in found(task, "ann")[1:]] == ["Ann"]
    assert found(task, "hunter") == [None]
    task = ended("A-1", "NO-2", "A-3", "A-4", "B-5")
    following, *first = found(task, "a-", limit=2)
    assert [each["sku"] for each in first] == ["A-1", "A-3"]
    assert [each["params"]["sku"] for each in client.get(following).json["events"]] == ["A-4"]
    assert found(task, "A-", status="failed") == [None]
    for text in ("", "x" * 201, "a\0b"):
        assert said(client.get(f"/api/tasks/{task}/events", query_string={"text": text})) == (
            422,
            "invalid_query_parameter",
        )


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_a_job_names_the_failed_ones_beside_it(ended: Callable[..., int], client: Client, chunk_size: int) -> None:
    skus = ("A", "B", "C", "NO-4", "D", "E", "F", "G", "H", "BUG-10", "I", "J")
    task = ended(*skus, chunk_size=chunk_size)
    events = client.get(f"/api/tasks/{task}/events").json["events"]
    of = {each["params"]["sku"]: each["job_id"] for each in events}

    def beside(sku: str) -> tuple[str | None, str | None]:
        found = client.get(f"/api/jobs/{of[sku]}").json
        return found["previous_failed"], found["next_failed"]

    assert beside("A") == (None, of["NO-4"])
    assert beside("NO-4") == (None, of["BUG-10"])
    assert beside("G") == (of["NO-4"], of["BUG-10"])
    assert beside("BUG-10") == (of["NO-4"], None)
    lone = client.post("/api/jobs", json={"worker": "enroll", "item": {"sku": "NO-1"}}).json
    assert (lone["previous_failed"], lone["next_failed"]) == (None, None)
