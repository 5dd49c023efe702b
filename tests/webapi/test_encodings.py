"""The option ``encoding``: who knows what a text is encoded in says so, and nothing is guessed at."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from support.webshop import Client

from asynctask import AsyncTask

Form = Callable[..., dict[str, Any]]
TEXT = "sku,note\nA,서울\nB,\n"
KOREAN = TEXT.encode("cp949")


def notes(client: Client, answer: Any) -> list[Any]:
    assert answer.status_code == 202, answer.json
    return [event["params"].get("note") for event in client.get(answer.json["links"]["events"]).json["events"]]


def raw(client: Client, body: bytes, query: str = "", kind: str = "text/csv", **headers: str) -> Any:
    return client.post(f"/api/tasks?worker=enroll{query}", data=body, content_type=kind, headers=headers)


@pytest.mark.parametrize("codec", ["cp949", "big5hkscs", "euc_jp", "iso8859_2", "iso8859_15", "utf-16-le"])
@pytest.mark.parametrize("way", ["form", "raw"])
def test_a_text_is_read_in_the_encoding_that_is_named(client: Client, form: Form, codec: str, way: str) -> None:
    word = {"cp949": "서울", "big5hkscs": "臺北", "euc_jp": "京都", "iso8859_2": "Łódź", "iso8859_15": "20 €"}.get(
        codec, "Äpfel"
    )
    body = f"sku,note\nA,{word}\n".encode(codec)
    if way == "form":
        answer = client.post("/api/tasks", **form(body, encoding=codec))
    else:
        answer = raw(client, body, f"&encoding={codec}")
    assert notes(client, answer) == [word]


def test_a_dry_run_and_the_report_read_it_in_that_encoding_too(client: Client, form: Form) -> None:
    dry = client.post("/api/tasks", **form(KOREAN, encoding="euc-kr", dry_run="true"))
    assert [item["note"] for item in dry.json["first_items"]] == ["서울", None]
    answer = client.post("/api/tasks", **form(KOREAN, encoding="euc-kr"))
    report = client.get(f"/api/tasks/{answer.json['task_id']}/report.csv?rows=all").data.decode("utf-8-sig")
    assert "A,서울" in report


@pytest.mark.parametrize("way", ["form", "raw"])
def test_an_encoding_that_is_not_known_is_refused_with_the_nearest_one(client: Client, form: Form, way: str) -> None:
    wrong = "shift-jist"
    answer = (
        client.post("/api/tasks", **form(KOREAN, encoding=wrong))
        if way == "form"
        else raw(client, KOREAN, f"&encoding={wrong}")
    )
    assert (answer.status_code, answer.json["code"]) == (422, "invalid_options")
    (fault,) = answer.json["errors"]
    assert fault["column"] == "encoding"
    assert "'shift-jist' is no encoding that is known; give one of: shift-jis, utf-8" in fault["message"]


def test_a_key_with_another_encoding_is_another_list(client: Client, form: Form) -> None:
    headers = {"Idempotency-Key": "k"}
    assert client.post("/api/tasks", **form(KOREAN, encoding="euc-kr"), headers=headers).status_code == 202
    again = client.post("/api/tasks", **form(KOREAN, encoding="cp949"), headers=headers)
    assert (again.status_code, again.headers["Idempotency-Replayed"]) == (202, "true"), "two names of one encoding"
    other = client.post("/api/tasks", **form(KOREAN, encoding="gb18030"), headers=headers)
    assert (other.status_code, other.json["code"]) == (422, "idempotency_key_reused")


def test_a_charset_that_is_sent_is_obeyed_even_if_it_is_utf_8(client: Client, app: AsyncTask) -> None:
    chinese = ("sku,note\n" + "A,商品名称和数量不能为空\n" * 20).encode("gb18030")
    assert raw(client, chinese).status_code == 202, "nothing is said, so it is found out"
    answer = raw(client, chinese, kind="text/csv; charset=utf-8")
    assert (answer.status_code, answer.json["code"]) == (422, "encoding")
    assert "line 2 (byte 12) is not UTF-8 text" in answer.json["detail"]
    assert notes(client, raw(client, TEXT.encode(), kind="text/csv; charset=utf-8")) == ["서울", None]


def test_an_encoding_and_a_charset_may_not_contradict_each_other(client: Client) -> None:
    assert notes(client, raw(client, KOREAN, "&encoding=cp949", "text/csv; charset=euc-kr")) == ["서울", None]
    answer = raw(client, KOREAN, "&encoding=gb18030", "text/csv; charset=euc-kr")
    assert (answer.status_code, answer.json["code"]) == (422, "invalid_options")
    assert "contradicts the charset euc-kr" in answer.json["detail"]


def test_the_option_is_described_for_files_and_raw_bodies(client: Client) -> None:
    operation = client.get("/openapi.json").json["paths"]["/api/tasks"]["post"]
    assert "encoding" in {each["name"] for each in operation["parameters"]}
    assert '"encoding"' in client.get("/openapi.json").text


def test_a_program_names_it_the_same_way(app: AsyncTask) -> None:
    stored = app.uploads.store(io.BytesIO(KOREAN), "list.csv")
    assert [item["note"] for item in app.check_file("enroll", stored, encoding="euc-kr").first_items] == ["서울", None]


def test_a_doubtful_text_is_refused_with_what_it_may_be_and_taken_with_one_of_them(client: Client, form: Form) -> None:
    body = "sku,note\nA,It’s urgent\nB,79 €\n".encode("cp1252")
    for more in ({}, {"dry_run": "true"}):
        answer = client.post("/api/tasks", **form(body, **more))
        assert (answer.status_code, answer.json["code"]) == (422, "encoding")
        assert answer.json["suggestions"][0] == {"encoding": "windows-1252", "cells": ["It’s urgent", "79 €"]}
    chosen = answer.json["suggestions"][0]["encoding"]
    assert notes(client, client.post("/api/tasks", **form(body, encoding=chosen))) == ["It’s urgent", "79 €"]
    assert "suggestions" not in client.post("/api/tasks", **form(b"")).json
