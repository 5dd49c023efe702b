"""The web API and its page; :func:`create_app` makes it for an application."""

from __future__ import annotations

from typing import Any, Final

from apiflask import APIBlueprint, APIFlask
from flask import render_template, request, url_for
from flask.typing import ResponseReturnValue

from asynctask._version import __version__
from asynctask.access import User
from asynctask.app import AsyncTask
from asynctask.errors import NotFound
from asynctask.lists.readers.opening import FORMATS
from webapi import access, openapi, operations, problems, reading, reports, security, tasks, workers
from webapi.context import (
    EXTENSION,
    TASK_PAGES,
    Slots,
    asynctask_app,
    find_progress,
    reader_locale,
    register_slots,
    tag,
)

__all__ = ["User", "create_app"]


def create_app(
    app: AsyncTask,
    *,
    authorize: security.Authorize | None = None,
    allow_unprotected: bool | None = None,
    host: str | None = None,
    slots: Slots | None = None,
) -> APIFlask:
    """A Flask application that serves ``app``. Several can share a process.

    ``authorize``: called with each request (a ``flask.Request``, whose body may not have been received yet), returns the
    :class:`User` that it is from, or None for nobody; the users of ``app.config.tokens`` are known beside these. Without
    either, it answers only to this machine, unless ``allow_unprotected`` (by default ``app.config.allow_unprotected``).
    ``host``: the address or name that it is served at, by default ``app.config.host``. It also answers to the names of
    ``app.config.allowed_hosts`` and to loopback names (:class:`webapi.security.AllowedHosts`). ``slots``: how many
    requests may take long at a time, by default those of a server that holds a thread for each
    of its ``app.config.web_threads`` (:meth:`webapi.context.Slots.of_threads`).

    It starts nothing: call ``app.start_services()`` in the process that answers, see :mod:`webapi.server`.
    """
    flask_app = APIFlask("webapi", title="AsyncTask", version=__version__, docs_path=None, spec_path=None)
    flask_app.extensions[EXTENSION] = app
    reading.register(flask_app, app)
    problems.register(flask_app)
    security.register_hosts(flask_app, app.config, app.config.host if host is None else host)
    if allow_unprotected is None:
        allow_unprotected = app.config.allow_unprotected
    origins = app.config.origins()
    security.register_origins(flask_app, origins)
    security.register_users(flask_app, app.config, authorize, allow_unprotected=allow_unprotected)
    security.register(flask_app, origins)
    access.register(flask_app)
    openapi.register(flask_app, app)
    register_slots(flask_app, slots or Slots.of_threads(app.config.web_threads))
    reading.register_heads(flask_app)
    workers.register(flask_app)
    for each in (tasks, reports, workers, operations):
        flask_app.register_blueprint(each.blueprint)
    flask_app.register_blueprint(tasks.exports)
    flask_app.register_blueprint(operations.health)
    flask_app.register_blueprint(pages)
    return flask_app


# -- the pages: a form to submit a list, a page for each Task, the single jobs; webapi/static fetches what changes

pages: Final = APIBlueprint("pages", __name__, enable_openapi=False)


@pages.context_processor
def _of_reader() -> dict[str, Any]:
    """What each page depends on: the language of the reader's messages, and what the reader may do."""
    user = access.current_user()
    return {
        "locale": tag(reader_locale()),
        "may_submit": user.may("submit"),
        "may_control": user.may("control"),
        "may_operate": user.may("operate"),
        "sees_all": user.sees_all,
        "may_list": user.task_id is None,
    }


@pages.errorhandler(NotFound)
def missing(_: Exception) -> ResponseReturnValue:
    """The page of a Task or a job that does not exist, or not for the reader."""
    named = request.view_args or {}
    if "job_id" in named:
        kind, name, every = "job", named["job_id"][:64], url_for("pages.jobs")
    else:
        kind, name, every = "Task", named.get("task_id"), url_for("pages.home")
    return render_template("missing.html", kind=kind, name=name, all_url=every), 404


@pages.get("/")
def home() -> ResponseReturnValue:
    """The form and the recent Tasks."""
    app = asynctask_app()
    suffixes = [suffix for each in FORMATS.values() for suffix in each.suffixes]
    takes_lists = app.list_workers()
    return render_template(
        "home.html",
        workers=[each for each in workers.registered(app) if each["name"] in takes_lists],
        max_file_bytes=app.config.max_file_bytes,
        formats=list(FORMATS),
        suffixes=suffixes,
    )


@pages.get(f"{TASK_PAGES}/<int:task_id>")
def task(task_id: int) -> ResponseReturnValue:
    """One Task."""
    progress = find_progress(task_id)
    worker = progress["worker"]
    takes_lists = worker in asynctask_app().list_workers()
    return render_template("task.html", task_id=task_id, title=progress["title"], worker=worker, takes_lists=takes_lists)


@pages.get("/jobs")
def jobs() -> ResponseReturnValue:
    """The jobs without a Task, and the queues."""
    return render_template("jobs.html", workers=sorted(asynctask_app().workers))


@pages.get("/jobs/<job:job_id>")
def job(job_id: str) -> ResponseReturnValue:
    """One job."""
    return render_template("job.html", job_id=job_id, worker=asynctask_app().event(job_id)["worker_name"])


@pages.get("/docs")
def docs() -> ResponseReturnValue:
    """The OpenAPI document, for people; without anything from other sites."""
    found = openapi.document()
    paths = {request.script_root + path: operations for path, operations in found["paths"].items()}
    return render_template("docs.html", spec={**found, "paths": paths}, spec_url=url_for("openapi.spec"))
