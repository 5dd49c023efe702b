"""Traces by OpenTelemetry: the job of a list is in the trace of the request that submitted the list.

The trace travels as ``traceparent`` (W3C Trace Context) in the ``context`` of the Task, so it reaches jobs and callbacks on
every engine; the dispatch of a job, and the push of an untracked one, put theirs into the payload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from asynctask._version import __version__
from asynctask.job import CurrentJob
from asynctask.middleware.chain import Chain
from asynctask.worker import Worker

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_SYSTEM: Final = "asynctask"


class Traced(Protocol):
    """What an application has for :func:`instrument`."""

    client_middleware: Chain
    server_middleware: Chain

    def carry(self, function: Callable[[], Mapping[str, Any]]) -> Any: ...


def instrument(app: Traced, *, tracer_provider: TracerProvider | None = None) -> None:
    """Makes spans of submissions, of the dispatches of their jobs, of the pushes of untracked jobs, and of jobs.

    Call it once, where the application is made. ``tracer_provider``: by default the global one. Spans have the attributes
    of OpenTelemetry's conventions for messaging, and ``asynctask.task_id``, ``asynctask.attempt`` and ``asynctask.row``.
    An exception of a job is recorded in its span; what the business refuses is no error.
    """
    tracer = trace.get_tracer("asynctask", __version__, tracer_provider)

    def submit() -> Mapping[str, Any]:
        carrier: dict[str, str] = {}
        with tracer.start_as_current_span("submit", kind=SpanKind.PRODUCER, attributes={"messaging.system": _SYSTEM}):
            _PROPAGATOR.inject(carrier)
        return carrier

    def push(worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        if job.task is None and worker.use_task_event:
            return call_next()
        verb, parent = ("send", None) if job.task is None else ("dispatch", _sent(job.context))
        with tracer.start_as_current_span(f"{verb} {worker.name}", parent, SpanKind.PRODUCER, _about(job, queue)):
            _PROPAGATOR.inject(job.payload)
            return call_next()

    def perform(worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        parent = _sent({**job.context, **job.payload})
        with tracer.start_as_current_span(
            f"process {worker.name}", parent, SpanKind.CONSUMER, _about(job, queue), set_status_on_exception=False
        ) as span:
            try:
                return call_next()
            except BaseException as error:
                span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}"[:500])
                raise

    app.carry(submit)
    app.client_middleware.add(push)
    app.server_middleware.prepend(perform)


def _sent(values: Mapping[str, Any]) -> Context:
    """The trace in a context or a payload."""
    return _PROPAGATOR.extract({name: values[name] for name in _PROPAGATOR.fields if isinstance(values.get(name), str)})


def _about(job: CurrentJob, queue: str) -> dict[str, Any]:
    task = job.task_id if job.task is None else job.task.id
    found = {
        "messaging.system": _SYSTEM,
        "messaging.destination.name": queue,
        "messaging.message.id": job.job_id,
        "asynctask.task_id": task,
        "asynctask.attempt": job.attempt,
        "asynctask.row": job.row,
    }
    return {name: value for name, value in found.items() if value is not None}
