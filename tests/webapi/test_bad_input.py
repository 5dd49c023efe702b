"""Whatever comes in, the answer is a clear 4xx that says where and how to mend it, and the next request works."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xlsxwriter
from support.webshop import Client, client_of

from asynctask import AsyncTask

Form = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def the_next_request_works(client: Client) -> Iterator[None]:
    yield
    answer = client.post("/api/tasks", json={"worker": "enroll", "items": [{"sku": "NEXT"}]})
    assert answer.status_code == 202, answer.json


def workbook(*rows: tuple[Any, ...]) -> bytes:
    out = io.BytesIO()
    book = xlsxwriter.Workbook(out, {"in_memory": True})
    sheet = book.add_worksheet("Items")
    for number, row in enumerate(rows):
        sheet.write_row(number, 0, row)
    book.close()
    return out.getvalue()


def bomb() -> bytes:
    """A workbook whose sheet inflates to 300 MB."""
    source, out = io.BytesIO(workbook(("sku",), ("A",))), io.BytesIO()
    with zipfile.ZipFile(source) as book, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for name in book.namelist():
            if name != "xl/worksheets/sheet1.xml":
                made.writestr(name, book.read(name))
                continue
            with made.open(name, "w") as sheet:
                for _ in range(300):
                    sheet.write(b" " * 1_000_000)
    return out.getvalue()


FILES: dict[str, tuple[bytes | Callable[[], bytes], str, str, str]] = {
    "empty": (b"", "list.csv", "empty_file", "empty"),
    "blank": (b" \n\n", "list.csv", "empty_file", "empty"),
    "no workbook": (b"\x89PNG\r\n\x1a\n" + b"\0" * 64, "list.xlsx", "unsupported_format", "xlsx"),
    "pdf": (b"%PDF-1.7 ...", "list.pdf", "unsupported_format", "csv"),
    "cut off workbook": (workbook(("sku",), ("A",))[:-200], "list.xlsx", "damaged_file", "again"),
    "zip bomb": (bomb, "list.xlsx", "too_large", "max_unzip"),
    "no header": (b"A,1\nB,2\n", "list.csv", "no_header", "sku"),
    "missing column": (b"name,Quantity\nA,1\n", "list.csv", "missing_columns", "sku"),
    "not UTF-8": ("sku\nCafé\n".encode("latin-1"), "list.csv", "encoding", "UTF-8"),
    "json cut off": (b'[{"sku": "A"}, {"sk', "list.json", "invalid_json", "line 1"),
    "header only": (b"sku,Quantity\n", "list.csv", "no_items", "row"),
}


STATUS = {"empty_file": 415, "unsupported_format": 415, "damaged_file": 415, "too_large": 413}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_taken_is_refused_with_what_to_do(client: Client, form: Form, name: str) -> None:
    content, filename, code, hint = FILES[name]
    answer = client.post("/api/tasks", **form(content() if callable(content) else content, filename))
    assert (answer.status_code, answer.json["code"]) == (STATUS.get(code, 422), code), answer.json
    assert answer.mimetype == "application/problem+json"
    assert hint.casefold() in answer.json["detail"].casefold()


def test_nothing_stays_on_disk_of_a_file_that_was_refused(app: AsyncTask, client: Client, form: Form) -> None:
    client.post("/api/tasks", **form("sku\nA\n", parallel="none"))
    client.post("/api/tasks", **form("sku\nA\n", worker="nobody"))
    uploads = app.uploads.store(io.BytesIO(b""), "probe").path
    assert [p.name for p in uploads.parent.iterdir()] == [uploads.name]


def test_a_file_over_the_limit_is_refused_with_the_limit_and_its_setting(
    make_app: Callable[..., AsyncTask], form: Form
) -> None:
    client = client_of(make_app(max_file_bytes=2_000))
    for size in (2_500, 3_000_000):  # within what a form may hold beside its file, and far beyond
        body = multipart(True).replace(b"A\nB\n", b"A\n" * (size // 2))
        answer = client.post("/api/tasks", data=body, content_type="multipart/form-data; boundary=B")
        assert answer.status_code == 413
        assert "2,000" in answer.json["detail"]
        assert "max_file_bytes" in answer.json["detail"]
    assert client.post("/api/tasks", **form("sku\nA\n")).status_code == 202


def test_a_json_body_over_the_limit_is_refused_with_the_limit_and_its_setting(make_app: Callable[..., AsyncTask]) -> None:
    client = client_of(make_app(max_body_bytes=2_000))

    def post(length: int) -> Any:
        start, end = '{"worker": "anything", "items": [{"x": "', '"}]}'
        body = start + "y" * (length - len(start) - len(end)) + end
        return client.post("/api/tasks", data=body, content_type="application/json")

    assert post(2_000).status_code == 202
    answer = post(2_001)
    assert answer.status_code == 413
    assert "2,000" in answer.json["detail"]
    assert "ASYNCTASK_MAX_BODY_BYTES" in answer.json["detail"]


def test_an_unknown_worker_is_refused_with_the_known_ones(client: Client, form: Form) -> None:
    answer = client.post("/api/tasks", json={"worker": "enrol", "items": [{"sku": "A"}]})
    assert (answer.status_code, answer.json["code"]) == (422, "unknown_worker")
    assert "enroll" in answer.json["detail"]
    answer = client.post("/api/tasks", **form("sku\nA\n", worker="enrol"))
    assert (answer.status_code, answer.json["code"]) == (422, "unknown_worker")
    assert "'enroll'" in answer.json["detail"]


def test_a_file_for_a_worker_that_takes_no_tasks_is_refused_and_removed(app: AsyncTask, form: Form) -> None:
    """Taken out: the removal in `AsyncTask.hand_in`; the file stays in data_dir for good."""

    @app.worker(use_task_event=False)
    def untracked(item: dict[str, Any]) -> None: ...

    answer = client_of(app).post("/api/tasks", **form("sku\nA\n", worker="untracked"))
    assert answer.status_code == 422
    assert "use_task_event" in answer.json["detail"]
    assert list(Path(app.config.data_dir).rglob("uploads/*")) == []


@pytest.mark.parametrize(
    ("option", "value"),
    [("parallel", "5"), ("parallel", True), ("parallel", 0), ("parallel", 1.5), ("parallel", 100_001), ("priority", "high"),
     ("title", 7), ("title", "x" * 256), ("title", "a\0b"), ("owner", []), ("queue", ""), ("queue", "a b"),
     ("worker", None), ("items", {}), ("items", []), ("items", "A"), ("interval", "often"), ("interval", -1),
     ("dry_run", "yes"), ("tolerated_failures", "5 of 9"), ("tolerated_failures", True)],
)  # fmt: skip
def test_an_option_of_the_wrong_type_is_named(client: Client, option: str, value: Any) -> None:
    answer = client.post("/api/tasks", json={"worker": "enroll", "items": [{"sku": "A"}], option: value})
    assert answer.status_code == 422, answer.json
    assert [e["column"] for e in answer.json["errors"]] == [option]
    assert option in answer.json["detail"]


def test_every_wrong_option_is_named_at_once(client: Client) -> None:
    body = {"worker": 3, "items": [1], "parallel": "x", "titel": "Spring"}
    answer = client.post("/api/tasks", json=body)
    assert answer.status_code == 422
    assert {e["column"]: e["code"] for e in answer.json["errors"]} == {
        "worker": "wrong_type",
        "parallel": "wrong_type",
        "titel": "unknown_option",
    }
    assert next(e["message"] for e in answer.json["errors"] if e["column"] == "titel") == (
        "is not known; did you mean 'title'?"
    )


def test_options_of_a_form_are_checked_too(client: Client, form: Form) -> None:
    for fields, column in (
        ({"parallel": "many"}, "parallel"),
        ({"parrallel": "3"}, "parrallel"),
        ({"columns": '{"a"'}, "columns"),
        ({"columns": "[1]"}, "columns"),
        ({"columns": '{"a": 1}'}, "columns.a"),
        ({"title": ["a", "b"]}, "title"),
    ):
        answer = client.post("/api/tasks", **form("sku\nA\n", **fields))
        assert answer.status_code == 422, (fields, answer.json)
        assert answer.json["errors"][0]["column"] == column


def test_a_form_needs_exactly_one_file(client: Client) -> None:
    multipart = {"content_type": "multipart/form-data"}
    two = [(io.BytesIO(b"sku\nA\n"), "a.csv"), (io.BytesIO(b"sku\nB\n"), "b.csv")]
    for data in (
        {"worker": "enroll"},
        {"worker": "enroll", "file": "sku\nA\n"},
        {"worker": "enroll", "file": two},
        {"worker": "enroll", "sheet": (io.BytesIO(b"x"), "x.csv")},
    ):
        answer = client.post("/api/tasks", data=data, **multipart)
        assert (answer.status_code, answer.json["code"]) == (422, "missing_file")
        assert answer.json["errors"][0]["column"] == "file"


def test_a_form_with_hundreds_of_fields_or_a_huge_one_is_refused(client: Client, form: Form) -> None:
    assert client.post("/api/tasks", **form("sku\nA\n", **{f"f{n}": "x" for n in range(200)})).status_code == 413
    answer = client.post("/api/tasks", **form("sku\nA\n", title="x" * 300_000))
    assert answer.status_code == 413
    assert "field" in answer.json["detail"]


@pytest.mark.parametrize(
    ("body", "status", "hint"),
    [
        (b"", 400, "line 1, column 1"),
        (b'{"worker": "enroll", "items": [{"sku":', 400, "cut off"),
        (b'{"worker": "enroll",\n "items": [oops]}', 400, "line 2, column 12"),
        (b'{"worker": "enroll", "items": [NaN]}', 400, "NaN"),
        (b'{"worker": "enroll", "items": [-Infinity]}', 400, "Infinity"),
        (b'{"worker": "enroll", "items": [1e999]}', 400, "1e999"),
        (b'{"worker": "enroll", "items": ["\\ud800"]}', 400, "surrogate"),
        (b'{"worker": "\xff"}', 400, "UTF-8"),
        (b'{"worker": "enroll", "items": [' + b"1" * 5_000 + b"]}", 400, "number"),
        (b"[" * 1_000_000, 422, "max_json_depth"),
        (b'{"a":' * 1_000_000, 422, "max_json_depth"),
        (b"[1, 2]", 422, "object"),
        (b"null", 422, "object"),
    ],
)
def test_json_that_cannot_be_taken_says_where_it_is_wrong(client: Client, body: bytes, status: int, hint: str) -> None:
    answer = client.post("/api/tasks", data=body, content_type="application/json")
    assert answer.status_code == status, answer.json
    assert hint in answer.json["detail"]


def test_deep_items_are_refused_but_brackets_within_text_do_not_count(client: Client) -> None:
    fine = {"worker": "anything", "items": [{"x": "[" * 200}]}
    assert client.post("/api/tasks", json=fine).status_code == 202
    deep: Any = "x"
    for _ in range(40):
        deep = [deep]
    answer = client.post("/api/tasks", json={"worker": "anything", "items": [{"x": deep}]})
    assert answer.status_code == 422
    assert "32" in answer.json["detail"]


def multipart(closing: bool) -> bytes:
    parts = (
        b'--B\r\nContent-Disposition: form-data; name="worker"\r\n\r\nenroll\r\n'
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.csv"\r\n\r\nsku\nA\nB\n'
    )
    return parts + (b"\r\n--B--\r\n" if closing else b"")


def test_a_form_that_was_cut_off_is_refused_and_makes_no_task(client: Client) -> None:
    kind = "multipart/form-data; boundary=B"
    assert client.post("/api/tasks", data=multipart(True), content_type=kind).status_code == 202
    for body in (multipart(False), multipart(True)[:-20], multipart(False)[:70], b""):
        answer = client.post("/api/tasks", data=body, content_type=kind)
        assert answer.status_code in (400, 422), answer.json
        assert answer.json["code"] in ("malformed_body", "missing_file")
    assert len(client.get("/api/tasks").json["tasks"]) == 1


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=B"])
def test_a_body_shorter_than_its_content_length_is_refused(client: Client, kind: str) -> None:
    body = multipart(True) if "form" in kind else json.dumps({"worker": "enroll", "items": [{"sku": "A"}]}).encode()
    for terminated in (True, False):  # a server may or may not end the stream itself
        answer = client.post(
            "/api/tasks",
            data=body,
            content_type=kind,
            environ_overrides={
                "CONTENT_LENGTH": str(len(body) + 10),
                **({"wsgi.input_terminated": True} if terminated else {}),
            },
        )
        assert (answer.status_code, answer.json["code"]) == (400, "malformed_body"), answer.json
        assert "cut off" in answer.json["detail"]
    assert client.get("/api/tasks").json["tasks"] == []


@pytest.mark.parametrize("kind", ["text/html", "application/x-www-form-urlencoded", "application/xml", ""])
def test_another_content_type_is_refused_with_the_accepted_ones(client: Client, kind: str) -> None:
    answer = client.post("/api/tasks", data=b"sku\nA\n", content_type=kind)
    assert answer.status_code == 415
    for accepted in ("application/json", "multipart/form-data", "application/x-ndjson", "text/csv"):
        assert accepted in answer.json["detail"]


def test_an_encoded_body_is_refused(client: Client) -> None:
    headers = {"Content-Encoding": "gzip"}
    answer = client.post("/api/tasks", data=b"x", content_type="application/json", headers=headers)
    assert answer.status_code == 415
    assert "gzip" in answer.json["detail"]


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb"])
def test_a_key_that_is_none_is_refused(client: Client, key: str) -> None:
    body = {"worker": "enroll", "items": [{"sku": "A"}]}
    answer = client.post("/api/tasks", json=body, headers={"Idempotency-Key": key})
    assert (answer.status_code, answer.json["code"]) == (400, "invalid_key")


def test_a_key_that_is_given_twice_is_refused_with_its_name(client: Client) -> None:
    for body in (
        b'{"worker": "enroll", "items": [{"sku": "A"}], "worker": "anything"}',
        b'{"worker": "enroll", "items": [{"sku": "A", "sku": "B"}]}',
    ):
        answer = client.post("/api/tasks", data=body, content_type="application/json")
        assert (answer.status_code, answer.json["code"]) == (400, "duplicate_key")
        assert ("'worker'" if b"anything" in body else "'sku'") in answer.json["detail"]


@pytest.mark.parametrize(
    ("said", "name"),
    [
        (b'filename="caf\xe9.csv"', "caf\ufffd.csv"),
        (b'filename="\x83\x65.csv"', "\ufffde.csv"),
        ('filename="café.csv"'.encode(), "café.csv"),
        (b"filename*=UTF-8''caf%C3%A9.csv", "café.csv"),
    ],
)
def test_the_name_of_a_file_may_be_in_any_encoding(client: Client, said: bytes, name: str) -> None:
    """Fails with werkzeug's own decoder of multipart forms."""
    body = multipart(True).replace(b'filename="a.csv"', said)
    answer = client.post("/api/tasks", data=body, content_type="multipart/form-data; boundary=B")
    assert answer.status_code == 202, answer.json
    assert (answer.json["title"], answer.json["counts"]["total"]) == (name, 2)
