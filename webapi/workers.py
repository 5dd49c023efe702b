"""/api/workers, /api/jobs and /api/records: the registered workers and their templates, single jobs, and what workers in
other languages record of them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final
from urllib.parse import quote

from apiflask import APIFlask
from flask import Response, url_for
from werkzeug.routing import BaseConverter

from asynctask.app import AsyncTask
from asynctask.errors import InputError, NotFound
from asynctask.ledger.standalone import is_job_id
from asynctask.operations import Event
from asynctask.reports.templates import Template, make_template, template_csv, template_xlsx
from webapi.access import current_user
from webapi.context import JsonPage, asynctask_app, json_response, page_links, reader_locale, set_language
from webapi.reports import CSV, XLSX, attachment
from webapi.shapes import (
    BINARY,
    JobsPage,
    JobsQuery,
    NewJob,
    Record,
    RecordBatch,
    RecordResult,
    RecordResults,
    Routes,
    SearchPage,
    SearchQuery,
    Workers,
    described,
)

blueprint: Final = Routes("workers", __name__, url_prefix="/api", tag="Workers")


class _JobId(BaseConverter):
    """A job's id in a path. An engine's may hold slashes, which a client sends as `%2F` and every server decodes; so what
    stands before the verb, the last segment, is the id."""

    regex = "(?s:.+?)"
    part_isolating = False

    def to_url(self, value: str) -> str:
        return quote(value, safe="")


def register(flask_app: APIFlask) -> None:
    """Makes ``flask_app`` take every id of a job in a path."""
    flask_app.url_map.converters["job"] = _JobId
    flask_app.url_map.merge_slashes = False  # merging them would name another job


@blueprint.serve("GET /workers", "listWorkers", Workers)
def index() -> Response:
    """The registered workers, with the form of their items"""
    return json_response({"workers": registered(asynctask_app())})


@blueprint.serve("GET /workers/<name>/template.xlsx", "getXlsxTemplate", BINARY, media=XLSX, responses=[409])
def template_as_xlsx(name: str) -> Response:
    """An empty sheet for a worker, to be filled in and submitted

    It has a column for each field of an item, with formats, lists to choose from and limits, and a page of help.
    """
    locale = reader_locale()
    response = Response(template_xlsx(_template(name), locale), mimetype=XLSX)
    set_language(response, locale)
    return attachment(response, f"{name}-template.xlsx")


@blueprint.serve("GET /workers/<name>/template.csv", "getCsvTemplate", BINARY, media=CSV, responses=[409])
def template_as_csv(name: str) -> Response:
    """The header row of an empty sheet for a worker"""
    return attachment(Response(template_csv(_template(name)), mimetype=CSV), f"{name}-template.csv")


def _template(name: str) -> Template:
    workers = asynctask_app().workers
    if name not in workers:
        known = ", ".join(sorted(workers)) or "none"
        raise NotFound(f"no worker is registered as {name[:255]!r}; registered: {known}")
    return make_template(workers[name])


@blueprint.serve("GET /jobs", "listJobs", JobsPage, query=JobsQuery)
def jobs(query: JobsQuery) -> Response:
    """The jobs without a Task, newest first: those sent one by one; or those that are stopped

    `links.next` leads to the next page and is null on the last one. A page ends early, after at least one
    job, at about 8 MB.
    """
    page = JsonPage(query.limit, lambda job: int(job["id"]))
    statuses = query.status.split(",") if query.status else ()
    found = asynctask_app().jobs(
        worker=query.worker,
        status=statuses,
        resumable=query.resumable,
        after=query.after,
        limit=query.limit,
        take=page,
    )
    return json_response({"jobs": found, "links": page_links(page.after)})


@blueprint.serve("GET /search", "search", SearchPage, query=SearchQuery)
def search(query: SearchQuery) -> Response:
    """What happened to an item: the jobs that have a value, of all Tasks and without one, newest first

    A worker names the fields that are searched (`search` of GET /api/workers). `links.next` leads to the next page and is
    null on the last one; a page may be short before it.
    """
    user, page = current_user(), JsonPage(cursor=lambda job: str(job["place"]))
    if user.owner is not None and query.owner not in (None, user.owner):
        return json_response({"events": [], "links": page_links(None)})
    found = asynctask_app().search(
        query.q,
        field=query.field,
        worker=query.worker,
        owner=query.owner if user.owner is None else user.owner,
        after=query.after,
        limit=query.limit,
        take=page,
    )
    return json_response({"events": found.events, "links": page_links(page.after or found.after)})


@blueprint.serve("POST /jobs", "createJob", described(Event), body=NewJob, status=202, responses=[409])
def create_job(body: NewJob) -> Response:
    """Create one tracked job, without a Task

    It is committed before the response. Under the `job_id` of a job without a Task that has ended, that job runs again,
    with the new arguments; under that of one that has not ended, or of a job of a Task, the answer is 409.
    """
    app = asynctask_app()
    job_id = app.perform(body.worker, *_arguments(body), job_id=body.job_id)
    response = json_response(app.operations.job(job_id), 202)
    response.headers["Location"] = url_for("workers.job", job_id=job_id)
    return response


def _arguments(body: NewJob) -> list[Any]:
    """Raises :class:`InputError` for a body with both or neither; an item may be null."""
    has_item = "item" in body.model_fields_set
    if has_item == (body.args is not None):
        raise InputError("a job has its arguments as args, or its one argument as item: give one of them", code="bad_job")
    return [body.item] if has_item else list(body.args or ())


@blueprint.serve("GET /jobs/<job:job_id>", "getJob", described(Event))
def job(job_id: str) -> Response:
    """One job: its Event

    `actions` says which of restart, kill, delete, stop and start apply to it now.
    """
    found = asynctask_app().operations.job(job_id)
    if current_user().task_id is not None:  # a link, which may be in a mail to a customer
        found["traceback"] = None
    return json_response(found)


@blueprint.serve("POST /records", "recordJobs", RecordResults, body=RecordBatch, responses=[409])
def record_jobs(body: RecordBatch) -> Response:
    """Record what a worker in another language did with its jobs

    All of it is committed before the response. A repeated request counts once.
    """
    records = [each.record(each.job_id) for each in body.records]
    results, signal = asynctask_app().record_all(records, body.reporter())
    return json_response({"results": [asdict(each) for each in results], "signal": signal})


@blueprint.serve("POST /jobs/<job:job_id>/record", "recordJob", RecordResult, body=Record, responses=[409])
def record_job(job_id: str, body: Record) -> Response:
    """Record what a worker in another language did with a job

    404 if the job is unknown and no `worker` is named; 422 `no_attempt` if the ledger keeps the job and the record names no
    attempt; 409 `other_attempt` if it names another than the current one; 409 `held_elsewhere` if nobody else than the
    application can have the job.
    """
    if not is_job_id(job_id):
        raise NotFound("there is no job of such an id")
    (result,), _ = asynctask_app().record_all([body.record(job_id)])
    if result.status is None:
        raise NotFound(f"there is no job {job_id!r}; name its worker to have an Event made")
    if (error := result.refusal()) is not None:
        raise error
    return json_response(asdict(result))


def registered(app: AsyncTask) -> list[dict[str, Any]]:
    """The registered workers, by name."""
    return [app.workers[name].as_dict() for name in sorted(app.workers)]
