"""/api/tasks: hand in a list, watch it, turn its knobs."""

from __future__ import annotations

from typing import Any, Final

from apiflask import APIBlueprint
from flask import Response

from asynctask.errors import InputError, NotBuilt, Problem
from webapi.answers import ErrorGroups, EventPage, LogEntries, Progress, Submitted, TaskPage
from webapi.caching import progress_response
from webapi.context import asynctask_app, find_progress, find_task, who
from webapi.incoming import EventQuery, Knobs, NoQuery, OneTaskQuery, RawQuery, RetryQuery, TaskQuery
from webapi.json_body import json_response
from webapi.language import reader_locale
from webapi.links import TASKS, page_links, with_links
from webapi.reading import current_request
from webapi.submissions import answer, submit

__all__ = ["blueprint"]

blueprint: Final = APIBlueprint("tasks", __name__, url_prefix=TASKS, tag="Tasks")


@blueprint.post("")
@blueprint.input(RawQuery, location="query", arg_name="query")
@blueprint.output(Submitted, status_code=202, description="Accepted: the Task and the rows refused so far")
@blueprint.doc(operation_id="submitTask", responses=[400, 403, 413, 415, 503, 504])
def create(query: RawQuery) -> Response:
    """Hand in a list

    As JSON, as a form with a file, or as a raw body of rows with the options in the query. Answers as soon as the Task is
    in the ledger; rows that the validation refused within a second are in `errors`. The same Idempotency-Key with the same
    body gives the first Task again, with another body 422. `dry_run` only tells what the list would come to.
    """
    return answer(submit(asynctask_app(), current_request(), query))


@blueprint.get("")
@blueprint.input(TaskQuery, location="query", arg_name="query")
@blueprint.output(TaskPage)
@blueprint.doc(operation_id="listTasks", responses=[503])
def index(query: TaskQuery) -> Response:
    """List Tasks, newest first

    `links.next` leads to the next page and is null on the last one.
    """
    found = asynctask_app().tasks(
        ids=[int(i) for i in query.ids.split(",")] if query.ids else None,
        state=query.state,
        worker=query.worker,
        owner=query.owner,
        after=query.after,
        limit=query.limit,
    )
    after = found[-1]["task_id"] if len(found) == query.limit else None
    response = json_response({"tasks": [with_links(each) for each in found], "links": page_links(after)})
    response.headers["Cache-Control"] = "no-cache"
    return response


@blueprint.get("/<int:task_id>")
@blueprint.input(OneTaskQuery, location="query", arg_name="query")
@blueprint.output(Progress)
@blueprint.doc(operation_id="getTask", responses={304: "Unchanged since the ETag in If-None-Match", 503: "Unavailable"})
def show(task_id: int, query: OneTaskQuery) -> Response:
    """How far a Task is

    Ask again after `poll_after_ms` with the ETag in `If-None-Match`: 304 says that nothing changed.
    """
    for option in ("wait", "version"):
        if getattr(query, option) is not None:
            raise NotBuilt(option)
    found = find_progress(task_id, errors=query.include == "errors")
    if found.get("refusal") is not None:
        found["refusal"] = find_task(task_id).refusal_object(reader_locale())
    return progress_response(with_links(found))


@blueprint.patch("/<int:task_id>")
@blueprint.input(Knobs, location="json", arg_name="knobs")
@blueprint.output(Progress)
@blueprint.doc(operation_id="updateTask", responses=[400, 403, 409, 413, 415, 503])
def update(task_id: int, knobs: Knobs) -> Response:
    """Turn a Task's knobs while it runs

    What starts from now on follows them within a second; what runs already goes on.
    """
    changes = knobs.model_dump(exclude_unset=True)
    if not changes:
        names = ", ".join(("parallel", "priority", "title"))
        fault = Problem(None, None, "missing", f"give at least one of {names}")
        raise InputError(f"there is nothing to change; {fault.message}", code="invalid_knob", errors=[fault])
    task = find_task(task_id)
    task.update(who=who(), **changes)
    return progress_response(with_links(task.progress()))


@blueprint.get("/<int:task_id>/events")
@blueprint.input(EventQuery, location="query", arg_name="query")
@blueprint.output(EventPage)
@blueprint.doc(operation_id="listEvents", responses=[503])
def events(task_id: int, query: EventQuery) -> Response:
    """The Events of a Task: one per job, with its params and messages

    `links.next` leads to the next page and is null on the last one.
    """
    found = find_task(task_id).events(status=_statuses(query.status), after=query.after, limit=query.limit)
    after = found[-1]["id"] if len(found) == query.limit else None
    return json_response({"events": found, "links": page_links(after)})


@blueprint.get("/<int:task_id>/errors")
@blueprint.input(NoQuery, location="query", arg_name="query")
@blueprint.output(ErrorGroups)
@blueprint.doc(operation_id="listErrorGroups", responses=[503])
def errors(task_id: int, query: NoQuery) -> Response:
    """Failures grouped by message, with their number and some rows"""
    return json_response({"errors": find_task(task_id).error_groups()})


@blueprint.get("/<int:task_id>/log")
@blueprint.input(NoQuery, location="query", arg_name="query")
@blueprint.output(LogEntries)
@blueprint.doc(operation_id="getLog", responses=[503])
def log(task_id: int, query: NoQuery) -> Response:
    """Who changed what, and when"""
    return json_response({"log": find_task(task_id).log()})


@blueprint.post("/<int:task_id>/pause")
@blueprint.input(NoQuery, location="query", arg_name="query")
@blueprint.output(Progress)
@blueprint.doc(operation_id="pauseTask", responses=[403, 409, 503])
def pause(task_id: int, query: NoQuery) -> Response:
    """Start nothing new until resumed

    What runs goes on. Pausing a paused Task changes nothing.
    """
    return _controlled(task_id, "pause")


@blueprint.post("/<int:task_id>/resume")
@blueprint.input(NoQuery, location="query", arg_name="query")
@blueprint.output(Progress)
@blueprint.doc(operation_id="resumeTask", responses=[403, 409, 503])
def resume(task_id: int, query: NoQuery) -> Response:
    """Go on after a pause"""
    return _controlled(task_id, "resume")


@blueprint.post("/<int:task_id>/cancel")
@blueprint.input(NoQuery, location="query", arg_name="query")
@blueprint.output(Progress)
@blueprint.doc(operation_id="cancelTask", responses=[403, 409, 503])
def cancel(task_id: int, query: NoQuery) -> Response:
    """Start nothing new, for good

    What runs keeps its own outcome; what waits becomes `cancelled`.
    """
    return _controlled(task_id, "cancel")


@blueprint.post("/<int:task_id>/retry")
@blueprint.input(RetryQuery, location="query", arg_name="query")
@blueprint.output(Progress)
@blueprint.doc(operation_id="retryTask", responses=[403, 409, 503])
def retry(task_id: int, query: RetryQuery) -> Response:
    """Run the failed items again, in a new generation

    Where no item has one of the statuses, nothing changes.
    """
    return _controlled(task_id, "retry", status=_statuses(query.status))


def _controlled(task_id: int, verb: str, **how: Any) -> Response:
    task = find_task(task_id)
    getattr(task, verb)(who=who(), **how)
    return progress_response(with_links(task.progress()))


def _statuses(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.split(","))) if text else ()
