"""Traces: a job is in the trace of the request that submitted its list, whatever performs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.world import World

from asynctask import AsyncTask, NormalException, current_job
from asynctask.errors import ConfigError, InputError
from asynctask.integrations.opentelemetry import instrument
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="a trace is a part of the context, which has tests on each database")


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> Iterator[TracerProvider]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider
    provider.shutdown()


@pytest.fixture
def app(world: World, provider: TracerProvider) -> AsyncTask:
    app = world.app()
    instrument(app, tracer_provider=provider)

    @app.worker(retry=0)
    def enroll(item: dict[str, Any]) -> None:
        if item["sku"] == "B":
            raise NormalException("sold out")
        if item["sku"] == "C":
            raise ValueError("a bug")

    @app.worker
    def archive(progress: dict[str, Any]) -> None:
        pass

    @app.worker(use_task_event=False, retry=False)
    def ping() -> None:
        pass

    return app


def named(exporter: InMemorySpanExporter, name: str) -> Sequence[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


@pytest.mark.parametrize("broker_kind", ["sql", "redis"])
def test_rows_and_callbacks_are_in_the_trace_of_the_submission(
    world: World, app: AsyncTask, exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    with world.working(app):
        with provider.get_tracer("shop").start_as_current_span("request") as request:
            task = app.submit("enroll", [{"sku": "A"}, {"sku": "B"}, {"sku": "C"}], on_complete="archive")
        wait_for(lambda: task.progress()["done"], "the Task is done")
        wait_for(lambda: named(exporter, "process archive"), "the span of the callback has ended")
    (submit,) = named(exporter, "submit")
    rows = sorted(named(exporter, "process enroll"), key=lambda span: str((span.attributes or {})["asynctask.row"]))
    (callback,) = named(exporter, "process archive")
    assert submit.parent is not None
    assert submit.parent.span_id == request.get_span_context().span_id
    sent = {id_of(span): span for span in named(exporter, "dispatch enroll")}
    assert len(sent) == 3
    for span in (*rows, callback):
        assert span.parent is not None
        parent = span.parent if span is callback else sent.pop(span.parent.span_id).parent
        assert parent is not None
        assert parent.span_id == id_of(submit)
        assert span.attributes is not None
        assert span.attributes.items() >= {"asynctask.task_id": task.id, "messaging.system": "asynctask"}.items()
    assert [(span.attributes or {})["asynctask.row"] for span in rows] == [1, 2, 3]
    assert [span.status.is_ok for span in rows] == [True, True, False]
    assert rows[2].status.description == "ValueError: a bug"
    assert [event.name for event in rows[2].events] == ["exception"]


@pytest.mark.parametrize("broker_kind", ["sql", "redis"])
def test_an_untracked_job_is_in_the_trace_of_its_push(world: World, app: AsyncTask, exporter: InMemorySpanExporter) -> None:
    with world.working(app):
        app.workers["ping"].perform_async()
        wait_for(lambda: named(exporter, "process ping"), "the job has run")
    (sent,), (done,) = named(exporter, "send ping"), named(exporter, "process ping")
    assert done.parent is not None
    assert done.parent.span_id == id_of(sent)


def test_what_is_carried_is_no_part_of_what_a_key_identifies_and_the_submission_has_the_last_word(world: World) -> None:
    app, languages = world.app(), iter(["ja", "zh", "en"])
    seen: list[dict[str, Any]] = []

    @app.worker
    def enroll(item: dict[str, Any]) -> None:
        seen.append(current_job().context)

    @app.carry
    def language() -> dict[str, Any]:
        return {"language": next(languages), "seller": 1}

    with world.working(app):
        first = app.submit("enroll", [{"sku": "A"}], context={"seller": 7}, idempotency_key="k")
        again = app.submit("enroll", [{"sku": "A"}], context={"seller": 7}, idempotency_key="k")
        wait_for(lambda: first.progress()["done"], "the Task is done")
    assert (again.id, again.created, first.context) == (first.id, False, {"language": "ja", "seller": 7})
    assert seen == [first.context]


def test_a_carrier_is_a_plain_function_that_returns_json(world: World) -> None:
    app = world.app()

    async def later() -> dict[str, Any]:
        return {}

    with pytest.raises(ConfigError, match="a carrier"):
        app.carry(later)  # type: ignore[arg-type]
    app.carry(lambda: {"trace": object()})
    with pytest.raises(InputError, match="must be JSON"):
        app.submit("note", [{"n": 1}])
    assert app.tasks() == []
