"""The OpenAPI document says what the API does: schemathesis calls every operation by it and checks every answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from flask.testing import FlaskClient
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from support.webshop import build_app, client_of

from asynctask import AsyncTask
from webapi import create_app

DOCS = Path(__file__).resolve().parents[2] / "docs/http.md"

OPERATIONS = [
    "POST /api/tasks", "GET /api/tasks", "GET /api/tasks/{task_id}", "PATCH /api/tasks/{task_id}",
    "GET /api/tasks/{task_id}/events", "GET /api/tasks/{task_id}/errors", "GET /api/tasks/{task_id}/log",
    "POST /api/tasks/{task_id}/pause", "POST /api/tasks/{task_id}/resume", "POST /api/tasks/{task_id}/cancel",
    "POST /api/tasks/{task_id}/retry", "GET /api/tasks/{task_id}/rejected", "GET /api/tasks/{task_id}/report.csv",
    "GET /api/tasks/{task_id}/report.xlsx", "GET /api/workers", "GET /api/workers/{name}/template.xlsx",
    "GET /api/workers/{name}/template.csv", "GET /api/jobs/{job_id}", "GET /healthz", "GET /readyz",
    "GET /api/queues", "GET /api/queues/{name}/jobs", "POST /api/queues/{name}/delete", "POST /api/queues/{name}/clear",
    "POST /api/queues/{name}/pause", "POST /api/queues/{name}/unpause", "GET /api/retries", "GET /api/retries/search",
    "POST /api/retries/restart", "POST /api/retries/restart-all", "POST /api/retries/kill",
    "POST /api/retries/kill-all", "POST /api/retries/delete", "POST /api/retries/delete-all", "GET /api/scheduled",
    "GET /api/scheduled/search", "POST /api/scheduled/restart", "POST /api/scheduled/restart-all",
    "POST /api/scheduled/kill", "POST /api/scheduled/kill-all", "POST /api/scheduled/delete",
    "POST /api/scheduled/delete-all", "GET /api/dead", "GET /api/dead/search", "POST /api/dead/restart",
    "POST /api/dead/restart-all", "POST /api/dead/delete", "POST /api/dead/delete-all", "GET /api/processes",
    "POST /api/processes/{name}/quiet", "POST /api/processes/{name}/stop",
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
    return schemathesis.openapi.from_wsgi("/openapi.json", create_app(app))


@pytest.fixture
def operation(schema: Any, request: pytest.FixtureRequest) -> Any:
    method, path = request.param.split(" ")
    return schema[path][method]


def exercise(operation: Any, *modes: GenerationMode, answers: set[int]) -> None:
    for mode in modes:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=15, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        def check(case: Any) -> None:
            # A real id now and then, or nothing but 404 would ever be seen.
            if "task_id" in (case.path_parameters or {}) and isinstance(case.path_parameters["task_id"], int):
                case.path_parameters["task_id"] = case.path_parameters["task_id"] % 3 + 1
            response = case.call()
            answers.add(response.status_code)
            # A list may be refused for what its worker says of an item, which is not in the document.
            known = [positive_data_acceptance] if operation.label == "POST /api/tasks" else []
            case.validate_response(response, excluded_checks=known)

        check()


def test_every_operation_is_in_the_document(schema: Any) -> None:
    found = {op.ok().label for op in schema.get_all_operations()}
    assert found == set(OPERATIONS)


@pytest.mark.parametrize("operation", OPERATIONS, indirect=True)
def test_what_the_document_allows_is_answered_as_it_says(operation: Any) -> None:
    answers: set[int] = set()
    exercise(operation, GenerationMode.POSITIVE, answers=answers)
    assert not {status for status in answers if status >= 500}


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o.startswith(("POST /api/tasks", "PATCH"))], indirect=True)
def test_what_the_document_forbids_is_refused_as_it_says(operation: Any) -> None:
    answers: set[int] = set()
    exercise(operation, GenerationMode.NEGATIVE, answers=answers)
    assert not {status for status in answers if status >= 500}


def test_every_route_is_told_about_in_the_docs(app: AsyncTask) -> None:
    text = DOCS.read_text()
    for rule in create_app(app).url_map.iter_rules():
        path = rule.rule.replace("<int:task_id>", "{task_id}").replace("<job_id>", "{job_id}").replace("<name>", "{name}")
        path = path.replace("<path:filename>", "{filename}")
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}:
            assert f"### `{method} {path}`\n" in text, f"docs/http.md needs a section: ### `{method} {path}`"


def test_the_document_is_shown_to_people_too(app: AsyncTask) -> None:
    client: FlaskClient = client_of(app)
    text = client.get("/docs").get_data(as_text=True)
    for label in OPERATIONS:
        path = label.partition(" ")[2]
        assert f"<code>{path}</code>" in text
    assert client.get("/openapi.json").json["openapi"].startswith("3.")
