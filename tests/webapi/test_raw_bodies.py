"""Lists as raw bodies: rows as they stand, options in the query, the charset that the sender says."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from support.webshop import Client, client_of

from asynctask import AsyncTask
from asynctask.lists.readers.encodings import known_encoding

NDJSON = b'{"sku": "A", "quantity": 2}\n\n{"sku": "B"}\n{"sku": "C", "quantity": "many"}\n'


def post(client: Client, body: bytes, kind: str = "text/csv", query: str = "worker=enroll", **headers: str) -> Any:
    return client.post(f"/api/tasks?{query}", data=body, content_type=kind, headers=headers)


def params(client: Client, answer: Any) -> list[Any]:
    assert answer.status_code == 202, answer.json
    return [event["params"] for event in client.get(answer.json["links"]["events"]).json["events"]]


def test_csv_becomes_a_task_with_the_options_of_the_query(client: Client) -> None:
    query = "worker=enroll&title=%C3%89t%C3%A9&parallel=3&interval=0.5&tolerated_failures=5%25&priority=120&owner=ann"
    query += "&unique=sku"
    answer = post(client, b"sku,Quantity\nA,1\nB,2\nA,3\n", query=query)
    assert answer.status_code == 202, answer.json
    assert (answer.json["title"], answer.json["owner"]) == ("Été", "ann")
    assert (answer.json["control"]["parallel"], answer.json["control"]["priority"]) == (3, 120)
    assert (answer.json["control"]["interval"], answer.json["control"]["tolerated_failures"]) == (0.5, "5%")
    assert [(e["row"], e["code"]) for e in answer.json["errors"]] == [(4, "duplicate_in_upload")]
    assert answer.headers["Location"] == answer.json["links"]["self"]


def test_tabs_between_cells_and_columns_that_mean_a_field(client: Client) -> None:
    columns = json.dumps({"Artikel-Nr.": "sku"})
    answer = post(
        client, b"Artikel-Nr.\tQuantity\nA,1\t5\n", "text/tab-separated-values", f"worker=enroll&columns={columns}"
    )
    assert params(client, answer) == [{"sku": "A,1", "quantity": 5}]


@pytest.mark.parametrize("kind", ["application/x-ndjson", "application/ndjson", "application/jsonl"])
def test_ndjson_is_one_object_a_line_and_rows_are_lines(client: Client, kind: str) -> None:
    answer = post(client, NDJSON, kind)
    assert [item["sku"] for item in params(client, answer)] == ["A", "B"]
    assert [(e["row"], e["column"], e["code"]) for e in answer.json["errors"]] == [(4, "quantity", "wrong_type")]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("application/jsonl", "body.ndjson"), ("text/csv", "body.csv"), ("text/tab-separated-values", "body.tsv")],
)
def test_the_name_says_to_the_readers_what_the_content_type_said(
    app: AsyncTask, client: Client, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    names: list[str] = []
    store = app.uploads.store

    def remember(stream: Any, filename: str, **limits: Any) -> Any:
        names.append(filename)
        return store(stream, filename, **limits)

    monkeypatch.setattr(app.uploads, "store", remember)
    post(client, b"sku\nA\n", kind)
    assert names == [name]


@pytest.mark.parametrize(
    ("charset", "text"),
    [("utf-8", "Café 你好"), ("UTF-16", "Café 你好"), ("utf-16le", "你好"), ("gb18030", "你好，限时"), ("GBK", "你好"),
     ("big5", "你好"), ("Shift_JIS", "テスト①"), ("euc-jp", "テスト"), ("euc-kr", "안녕"), ("iso-8859-1", "Café"),
     ("windows-1252", "10 €"), ('"utf-8"', "Café")],
)  # fmt: skip
def test_the_charset_of_the_content_type_is_obeyed(client: Client, charset: str, text: str) -> None:
    codec = known_encoding(charset)
    answer = post(client, f"sku,note\nA,{text}\n".encode(codec), f"text/csv; charset={charset}")
    assert params(client, answer)[0]["note"] == text


def test_a_charset_that_is_none_or_not_the_bodys_is_refused(app: AsyncTask, client: Client) -> None:
    for charset in ("klingon", "idna", "unicode_escape", "utf-7", "base64", "rot13"):
        answer = post(client, b"sku\nA\n", f"text/csv; charset={charset}")
        assert (answer.status_code, answer.json["code"]) == (415, "unsupported_media_type")
        assert "gb18030" in answer.json["detail"]
    assert list((Path(app.config.data_dir) / "uploads").glob("*")) == []
    answer = post(client, b"sku,note\nA,\xff\xff\n", "text/csv; charset=gb18030")
    assert (answer.status_code, answer.json["code"]) == (422, "encoding")
    assert "byte 12" in answer.json["detail"]
    answer = post(client, b"sku\nA\n", "text/csv; charset=utf-16")  # without a byte order mark
    assert (answer.status_code, answer.json["code"]) == (422, "encoding")


@pytest.mark.parametrize(
    ("query", "column", "code"),
    [
        ("", "worker", "missing"),
        ("worker=enroll&titel=x", "titel", "unknown_option"),
        ("worker=enroll&parallel=many", "parallel", "wrong_type"),
        ("worker=enroll&title=a&title=b", "title", "duplicate"),
        ("worker=enrol", "worker", "unknown_worker"),
        ("worker=enroll&columns=[1]", "columns", "wrong_type"),
        ("worker=enroll&columns={", "columns", "invalid_json"),
        ("worker=enroll&unique=skew", "unique", "invalid_option"),
        ("worker=enroll&dry_run=perhaps", "dry_run", "wrong_type"),
    ],
)
def test_a_wrong_option_in_the_query_is_named(client: Client, query: str, column: str, code: str) -> None:
    answer = post(client, b"sku\nA\n", query=query)
    assert answer.status_code == 422, answer.json
    assert [(e["column"], e["code"]) for e in answer.json["errors"]] == [(column, code)]
    if column == "titel":
        assert answer.json["errors"][0]["message"] == "is not known; did you mean 'title'?"


def test_other_bodies_have_their_options_within_and_a_query_is_refused(client: Client, form: Any) -> None:
    body = {"worker": "enroll", "items": [{"sku": "A"}]}
    answer = client.post("/api/tasks?dry_run=true", json=body)
    assert (answer.status_code, answer.json["errors"][0]["column"]) == (422, "dry_run")
    assert client.post("/api/tasks?worker=enroll", **form("sku\nA\n")).status_code == 422
    assert client.get("/api/tasks").json["tasks"] == []


def test_the_same_key_and_body_again_is_the_first_task_again(client: Client) -> None:
    first, second = (post(client, b"sku\nA\n", **{"Idempotency-Key": "k"}) for _ in range(2))
    assert first.json["task_id"] == second.json["task_id"]
    other = post(client, b"sku\nA\n", query="worker=enroll&strict=true", **{"Idempotency-Key": "k"})
    assert (other.status_code, other.json["code"]) == (422, "idempotency_key_reused")


@pytest.mark.parametrize("body", [b"", b"\n\n"])
def test_an_empty_body_is_refused(client: Client, body: bytes) -> None:
    answer = post(client, body)
    assert (answer.status_code, answer.json["code"]) == (415, "empty_file")


def test_a_body_that_was_cut_off_is_refused(client: Client) -> None:
    for terminated in (True, False):
        answer = client.post(
            "/api/tasks?worker=enroll",
            data=b"sku\nA\n",
            content_type="text/csv",
            environ_overrides={"CONTENT_LENGTH": "20", **({"wsgi.input_terminated": True} if terminated else {})},
        )
        assert (answer.status_code, answer.json["code"]) == (400, "malformed_body"), answer.json
    assert client.get("/api/tasks").json["tasks"] == []


@pytest.mark.parametrize("kind", ["text/csv", "application/json", "multipart/form-data; boundary=edge"])
def test_a_chunked_body_that_the_server_does_not_pass_on_is_not_taken_for_empty(client: Client, kind: str) -> None:
    """a2wsgi neither counts the bytes of a body without a length nor says that its stream ends."""
    query = "?worker=enroll" if kind == "text/csv" else ""
    answer = client.post(
        f"/api/tasks{query}",
        content_type=kind,
        headers={"Transfer-Encoding": "chunked"},
        environ_overrides={"wsgi.input": io.BytesIO(b"sku\nA\n"), "CONTENT_LENGTH": "", "wsgi.input_terminated": False},
    )
    assert (answer.status_code, answer.json["code"]) == (400, "malformed_body"), answer.json
    assert "Content-Length" in answer.json["detail"]


def test_a_body_is_taken_up_to_the_limit_and_one_byte_more_is_refused(make_app: Any) -> None:
    app = make_app(max_file_bytes=2_000)
    client = client_of(app)
    start = b"sku,note\nA,"
    assert post(client, start + b"x" * (2_000 - len(start))).status_code == 202
    for length in (2_001, 500_000):
        answer = post(client, start + b"x" * (length - len(start)))
        assert (answer.status_code, answer.json["code"]) == (413, "too_large"), answer.json
        assert "ASYNCTASK_MAX_FILE_BYTES" in answer.json["detail"]
