"""/api/workers and /api/jobs: the registered workers and their templates, and a single job."""

from __future__ import annotations

from typing import Any, Final

from apiflask import APIBlueprint, FileSchema
from flask import Response

from asynctask.app import AsyncTask
from asynctask.errors import NotFound
from asynctask.reports.templates import Template, make_template, template_csv, template_xlsx
from webapi.context import asynctask_app, reader_locale, set_language
from webapi.json_body import json_response
from webapi.reports import CSV, XLSX, attachment
from webapi.shapes import Event, NoQuery, Workers

__all__ = ["blueprint", "describe"]

blueprint: Final = APIBlueprint("workers", __name__, url_prefix="/api", tag="Workers")


@blueprint.get("/workers")
@blueprint.input(NoQuery, location="query", arg_name="query")
@blueprint.output(Workers)
@blueprint.doc(operation_id="listWorkers")
def index(query: NoQuery) -> Response:
    """The registered workers, with what an item of each must be"""
    return json_response({"workers": describe(asynctask_app())})


@blueprint.get("/workers/<name>/template.xlsx")
@blueprint.input(NoQuery, location="query", arg_name="query")
@blueprint.output(FileSchema(type="string", format="binary"), content_type=XLSX)
@blueprint.doc(operation_id="getXlsxTemplate", responses=[409])
def template_as_xlsx(name: str, query: NoQuery) -> Response:
    """An empty sheet for a worker, to fill in and hand in

    It has a column for each field of an item, with formats, lists to choose from and limits, and a page of help.
    """
    locale = reader_locale()
    response = Response(template_xlsx(_template(name), locale), mimetype=XLSX)
    set_language(response, locale)
    return attachment(response, f"{name}-template.xlsx")


@blueprint.get("/workers/<name>/template.csv")
@blueprint.input(NoQuery, location="query", arg_name="query")
@blueprint.output(FileSchema(type="string", format="binary"), content_type=CSV)
@blueprint.doc(operation_id="getCsvTemplate", responses=[409])
def template_as_csv(name: str, query: NoQuery) -> Response:
    """The header row of an empty sheet for a worker"""
    return attachment(Response(template_csv(_template(name)), mimetype=CSV), f"{name}-template.csv")


def _template(name: str) -> Template:
    workers = asynctask_app().workers
    if name not in workers:
        known = ", ".join(sorted(workers)) or "none"
        raise NotFound(f"no worker is registered as {name[:255]!r}; registered: {known}")
    return make_template(workers[name])


@blueprint.get("/jobs/<job_id>")
@blueprint.input(NoQuery, location="query", arg_name="query")
@blueprint.output(Event)
@blueprint.doc(operation_id="getJob", responses=[503])
def job(job_id: str, query: NoQuery) -> Response:
    """The life of one job: its Event"""
    return json_response(asynctask_app().event(job_id))


def describe(app: AsyncTask) -> list[dict[str, Any]]:
    """Every worker with its item's fields in order, the headers accepted in a sheet, and the JSON Schema."""
    found = []
    for name, worker in sorted(app.workers.items()):
        schema = worker.json_schema()
        found.append(
            {
                "name": name,
                "doc": worker.doc or "",
                "queue": worker.queue,
                "retry": worker.retry,
                "priority": worker.priority,
                "timeout": worker.timeout,
                "fields": _fields(schema, worker.shape.expected if worker.shape else frozenset()),
                "headers": sorted(worker.shape.expected) if worker.shape else [],
                "item_schema": schema,
            }
        )
    return found


def _fields(schema: dict[str, Any] | None, headers: frozenset[str]) -> list[dict[str, Any]]:
    if schema is None:
        return []
    required = set(schema.get("required", ()))
    return [
        {
            "name": name,
            # A title that pydantic derives from the name is not accepted as a header.
            "title": field["title"] if field.get("title") in headers else name,
            "required": name in required,
            "description": field.get("description"),
        }
        for name, field in schema.get("properties", {}).items()
    ]
