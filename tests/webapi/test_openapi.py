"""The OpenAPI document says what the API does, and what it refuses; `test_schemathesis.py` tries the whole of it."""

from __future__ import annotations

import html
import io
import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema_rs
import pytest
import schemathesis
from support.webshop import Client, build_app, client_of, form_of

from asynctask import AsyncTask
from asynctask.errors import InputError
from asynctask.lists.options import NOT_BLANK, check_options
from webapi import create_app

DOCS = Path(__file__).resolve().parents[2] / "docs/reference/http.md"

STREAM = "GET /api/tasks/{task_id}/stream"
OPERATIONS = [
    "POST /api/lists/preview", "POST /api/lists/marked.xlsx", "POST /api/tasks", "GET /api/tasks",
    "GET /api/tasks/{task_id}", "PATCH /api/tasks/{task_id}",
    "GET /api/tasks/{task_id}/events", "GET /api/tasks/{task_id}/errors", "GET /api/tasks/{task_id}/log",
    "GET /api/tasks/{task_id}/waiting", STREAM, "POST /api/tasks/{task_id}/links",
    "POST /api/tasks/{task_id}/pause", "POST /api/tasks/{task_id}/resume", "POST /api/tasks/{task_id}/cancel",
    "POST /api/tasks/{task_id}/callbacks", "POST /api/exports", "GET /api/tasks/{task_id}/result",
    "POST /api/tasks/{task_id}/items", "POST /api/tasks/{task_id}/seal", "POST /api/tasks/{task_id}/retry",
    "GET /api/tasks/{task_id}/columns", "GET /api/tasks/{task_id}/rejected", "GET /api/tasks/{task_id}/report.csv",
    "GET /api/tasks/{task_id}/report.xlsx", "GET /api/workers", "GET /api/workers/{name}/template.xlsx",
    "GET /api/workers/{name}/template.csv", "GET /api/jobs", "POST /api/jobs", "GET /api/jobs/{job_id}", "GET /api/search",
    "GET /healthz", "GET /readyz", "GET /metrics", "POST /api/records", "POST /api/jobs/{job_id}/record",
    "POST /api/jobs/{job_id}/restart",
    "POST /api/jobs/{job_id}/kill", "POST /api/jobs/{job_id}/delete", "POST /api/jobs/{job_id}/dismiss",
    "POST /api/jobs/{job_id}/stop", "POST /api/jobs/{job_id}/start",
    "GET /api/queues", "GET /api/queues/{name}/jobs", "POST /api/queues/{name}/delete", "POST /api/queues/{name}/clear",
    "POST /api/queues/{name}/pause", "POST /api/queues/{name}/unpause", "GET /api/retries", "GET /api/retries/search",
    "POST /api/retries/restart", "POST /api/retries/restart-all", "POST /api/retries/kill",
    "POST /api/retries/kill-all", "POST /api/retries/delete", "POST /api/retries/delete-all", "GET /api/scheduled",
    "GET /api/scheduled/search", "POST /api/scheduled/restart", "POST /api/scheduled/restart-all",
    "POST /api/scheduled/kill", "POST /api/scheduled/kill-all", "POST /api/scheduled/delete",
    "POST /api/scheduled/delete-all", "GET /api/dead", "GET /api/dead/search", "POST /api/dead/restart",
    "POST /api/dead/restart-all", "POST /api/dead/delete", "POST /api/dead/delete-all",
    "POST /api/dead/dismiss", "POST /api/dead/dismiss-all", "GET /api/processes",
    "GET /api/retries/templates", "POST /api/retries/templates/{template}/restart",
    "POST /api/retries/templates/{template}/kill", "POST /api/retries/templates/{template}/delete",
    "GET /api/dead/templates", "POST /api/dead/templates/{template}/restart",
    "POST /api/dead/templates/{template}/delete", "POST /api/dead/templates/{template}/dismiss",
    "POST /api/processes/{name}/quiet", "POST /api/processes/{name}/stop", "GET /api/schedules",
    "POST /api/schedules/{name}/run", "PATCH /api/schedules/{name}",
    "GET /api/history", "GET /api/rates", "PATCH /api/rates/{name}",
]  # fmt: skip


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncTask]:
    app = build_app(tmp_path_factory.mktemp("openapi"))
    task = app.submit("enroll", [{"sku": "A"}, {"sku": "NO-1"}, {"sku": "BUG-1"}, {"sku": 5.5}])
    launcher = app.launcher(concurrency=1, shutdown_s=5)
    launcher.start()
    assert task.wait(timeout=120)["done"]
    launcher.stop()
    app.submit("enroll", [{"sku": "B"}], title="waits")
    yield app
    app.close()


@pytest.fixture(scope="module")
def schema(app: AsyncTask) -> Any:
    return schemathesis.openapi.from_wsgi("/openapi.json", create_app(app, allow_unprotected=True))


@pytest.fixture(scope="module")
def client(app: AsyncTask) -> Client:
    return client_of(app)


@pytest.fixture(scope="module")
def spec(client: Client) -> Any:
    """The document."""
    return client.get("/openapi.json").json


@pytest.fixture(scope="module")
def submission(spec: Any) -> Any:
    """What the document says of a list as JSON."""
    return jsonschema_rs.validator_for({**spec, "$ref": "#/components/schemas/JsonSubmission"})


def test_every_operation_is_in_the_document(schema: Any) -> None:
    found = {op.ok().label for op in schema.get_all_operations()}
    assert found == set(OPERATIONS) - {STREAM}, "schemathesis.toml leaves that one out"


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        ({"worker": "enroll", "items": [{"sku": "A"}]}, True),
        ({"worker": "enroll", "items": [None, {"sku": "A"}]}, True),
        ({"worker": "enroll", "items": [{"sku": "A", "quantity": 2}], "unique": ["sku"], "strict": True}, True),
        ({"worker": "enroll", "items": [{"sku": "A", "note": None}], "unique": "sku,note"}, True),
        ({"worker": "anything", "items": [None]}, True),
        ({"worker": "anything", "items": [{"a": 1}, 5, "x"], "unique": "a,b", "queue": "Low_1.x:y-z"}, True),
        ({"worker": "enroll", "items": [None]}, False),
        ({"worker": "enroll", "items": [{}, 5, {"sku": None}]}, False),
        ({"worker": "enroll", "items": [{"sku": "A", "quantity": 101}]}, False),
        ({"worker": "enroll", "items": [{"sku": "x" * 21}]}, False),
        ({"worker": "enroll", "items": [{"sku": "A\0"}]}, False),
        ({"worker": "enroll", "items": [None, {"sku": "A"}], "strict": True}, False),
        ({"worker": "enroll", "items": [{"sku": "A"}], "unique": ["colour"]}, False),
        ({"worker": "enroll", "items": [{"sku": "A"}], "queue": "a b"}, False),
        ({"worker": "enroll", "items": [{"sku": "A"}], "resubmit_of": 1}, False),
        ({"worker": "anything", "items": []}, False),
        ({"worker": "nobody", "items": [{"sku": "A"}]}, False),
        ({"jobs": [{"worker": "enroll", "item": {"sku": "A"}}, {"worker": "anything", "item": 5}], "strict": True}, True),
        ({"jobs": [None, {"worker": "nobody", "item": 1}, {"worker": "enroll", "item": {"sku": "A"}}]}, True),
        ({"jobs": [None, {"worker": "enroll", "item": {"sku": "A"}}], "strict": True}, False),
        ({"jobs": [{"worker": "enroll", "item": 5}]}, False),
        ({"jobs": [{"worker": "anything", "item": 5, "args": []}]}, False),
        ({"jobs": [{"worker": "anything", "item": 5}], "worker": "anything"}, False),
        ({"jobs": [{"worker": "anything", "item": {"a": 1}}], "unique": "a," + "b" * 256}, False),
        ({"jobs": [{"worker": "anything", "item": 5}], "resubmit_of": 1}, False),
        ({"jobs": []}, False),
        ({"worker": "anything", "items": [1], "on_complete": "enroll", "on_failure": {"worker": "enroll"}}, True),
        ({"worker": "anything", "items": [1], "on_complete": "nobody"}, False),
        ({"jobs": [{"worker": "anything", "item": 5}], "on_success": {"worker": "nobody", "args": [1]}}, False),
    ],
)
def test_the_document_says_which_lists_are_taken(client: Client, submission: Any, body: dict[str, Any], fits: bool) -> None:
    assert submission.is_valid(body) is fits
    answer = client.post("/api/tasks", json={**body, "dry_run": True})
    assert (answer.status_code == 200 and answer.json["accepted"] > 0) is fits


def test_the_document_says_that_an_export_has_neither_chunks_nor_corrections(tmp_path: Path) -> None:
    app = build_app(tmp_path)
    app.export(columns=["n"], name="numbers")(lambda shard: [[shard]])
    client = client_of(app)
    spec = client.get("/openapi.json").json
    document = jsonschema_rs.validator_for({**spec, "$ref": "#/components/schemas/ExportSubmission"})
    for more, fits in (({}, True), ({"chunk_size": 2}, False), ({"resubmit_of": 1}, False)):
        body = {"worker": "numbers", "shards": [1], "dry_run": True, **more}
        assert document.is_valid(body) is fits, more
        answer = client.post("/api/exports", json=body)
        assert (answer.status_code == 200) is fits, answer.text
        assert fits or f"leave out {next(iter(more))}" in answer.text, "the reason is said"
    app.close()


def test_the_document_says_which_texts_are_blank() -> None:
    """Blanks around a text are taken off; schemathesis found a session of one vertical tab."""
    document = jsonschema_rs.validator_for({"type": "string", "pattern": NOT_BLANK})
    blanks = {chr(i) for i in range(0x3100) if not document.is_valid(chr(i))}
    assert {"\0", " ", "\t", "\v", "\u3000"} <= blanks
    for text in (*blanks, *(f"{blank}a{blank}" for blank in blanks if blank != "\0"), *map(chr, range(1, 0x3100))):
        try:
            check_options({"session": text, "unique": [text]})
        except InputError:
            assert not document.is_valid(text), repr(text)
        else:
            assert document.is_valid(text), repr(text)
            assert re.search(NOT_BLANK, text)


def test_the_document_says_which_files_are_taken(client: Client, spec: Any) -> None:
    content = spec["paths"]["/api/tasks"]["post"]["requestBody"]["content"]
    kinds = content["multipart/form-data"]["encoding"]["file"]["contentType"].split(", ")
    assert "image/jpeg" not in kinds
    assert client.post("/api/tasks", **form_of(b"\xff\xd8\xff\xe0\0\x10JFIF", filename="photo.jpg")).status_code == 415
    files = {
        "text/csv": ("a.csv", b"sku\nA\n"),
        "text/tab-separated-values": ("a.tsv", b"sku\tQuantity\nA\t1\n"),
        "application/x-ndjson": ("a.ndjson", b'{"sku": "A"}\n'),
        "application/json": ("a.json", b'[{"sku": "A"}]'),
    }
    assert set(files) < set(kinds)
    for name, data in files.values():
        assert client.post("/api/tasks", **form_of(data, filename=name)).status_code == 202
    # One line of NDJSON could be JSON that is no list, but for what the sender says that it is.
    part = (io.BytesIO(b'{"sku": "A"}\n'), "file", "application/x-ndjson")
    assert client.post("/api/tasks", data={"worker": "enroll", "file": part}).status_code == 202


def test_every_operation_tells_what_the_server_itself_may_answer(spec: Any) -> None:
    for operations in spec["paths"].values():
        for operation in operations.values():
            for status in ("400", "408", "413", "414", "421", "431", "503"):
                assert list(operation["responses"][status]["content"]) == ["application/problem+json"]


def test_every_route_is_told_about_in_the_docs(app: AsyncTask) -> None:
    text = DOCS.read_text()
    for rule in create_app(app).url_map.iter_rules():
        path = (
            rule.rule.replace("<int:task_id>", "{task_id}").replace("<job:job_id>", "{job_id}").replace("<name>", "{name}")
        )
        path = path.replace("<path:filename>", "{filename}").replace("<version>", "{version}")
        path = path.replace("<template>", "{template}").replace("<string(length=12):fingerprint>", "{fingerprint}")
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}:
            assert f"### `{method} {path}`\n" in text, f"docs/reference/http.md needs a section: ### `{method} {path}`"


def test_the_document_is_shown_to_people_too(client: Client, spec: Any) -> None:
    text = client.get("/docs").get_data(as_text=True)
    for label in OPERATIONS:
        path = label.partition(" ")[2]
        assert f"<code>{path}</code>" in text
    assert spec["openapi"].startswith("3.")


def test_every_operation_has_an_example_that_fits_and_a_command_that_sends_it(client: Client, spec: Any) -> None:
    shown, commands = client.get("/docs").text, {}
    for text in re.findall(r'<pre class="example"[^>]*>(.*?)</pre>', shown, re.DOTALL):
        words = shlex.split(html.unescape(text))
        method = "POST" if "-d" in words or "-F" in words else words[words.index("-X") + 1] if "-X" in words else "GET"
        place = next(urlsplit(word) for word in words if word.startswith("http://localhost"))
        commands[method if "PATCH" not in words else "PATCH", place.path] = words
    for path, operations in spec["paths"].items():
        for method, operation in operations.items():
            named = {each["name"]: each["example"] for each in operation["parameters"] if each["required"]}
            words = commands[method.upper(), path.format(**named)]
            content = operation.get("requestBody", {}).get("content", {})
            if "application/json" not in content:
                fields = [word for before, word in pairwise(words) if before == "-F"]
                assert fields == [
                    f"{k}={v}" for k, v in content.get("multipart/form-data", {"example": {}})["example"].items()
                ]
            else:
                content = content["application/json"]
                sent = json.loads(words[words.index("-d") + 1])
                assert sent == content["example"]
                assert jsonschema_rs.validator_for({**spec, **content["schema"]}).is_valid(sent), (path, sent)
    answer = client.post(
        "/api/tasks", json=spec["paths"]["/api/tasks"]["post"]["requestBody"]["content"]["application/json"]["example"]
    )
    assert (answer.status_code, answer.json["split"]["rejected"]) == (202, 0)
    for tag in ("Tasks", "Reports", "Workers", "Operations", "Health"):
        assert f'id="{tag}"' in shown
    assert len(set(re.findall(' id="([^"]+)"', shown))) == len(re.findall(' id="([^"]+)"', shown))
