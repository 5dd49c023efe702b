"""The pages: a form to submit a list, a page for each Task, the single jobs. ``webapi/static`` fetches what changes."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any, Final, NamedTuple

from apiflask import APIBlueprint
from flask import Response, redirect, render_template, request, url_for
from flask.typing import ResponseReturnValue

from asynctask._version import __version__
from asynctask.access import User
from asynctask.errors import NotFound
from asynctask.ledger.search import MAX_TEXT
from asynctask.lists.readers.opening import FORMATS
from webapi import access, openapi, workers
from webapi.context import TASK_PAGES, asynctask_app, find_progress, reader_locale, tag
from webapi.problems import problem_response

blueprint: Final = APIBlueprint("pages", __name__, enable_openapi=False)


class Entry(NamedTuple):
    """An entry of the navigation. ``pages``: the endpoints that it marks as current; the first is its target."""

    name: str
    pages: tuple[str, ...]


NAVIGATION: Final = (
    Entry("Tasks", ("pages.home", "pages.task")),
    Entry("Jobs", ("pages.jobs", "pages.job")),
    Entry("Search", ("pages.search",)),
    Entry("API", ("pages.docs",)),
)


def _entries(user: User) -> list[Entry]:
    """The entries whose pages the user may see."""
    return [] if user.task_id is not None else [each for each in NAVIGATION if access.may_see(user, each.pages[0])]


@blueprint.context_processor
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
        "navigation": _entries(user),
    }


@blueprint.errorhandler(NotFound)
def missing(_: Exception) -> ResponseReturnValue:
    """The page of a Task or a job that does not exist, or not for the reader."""
    named = request.view_args or {}
    if "job_id" in named:
        kind, name, every = "job", named["job_id"][:64], url_for("pages.jobs")
    else:
        kind, name, every = "Task", named.get("task_id"), url_for("pages.home")
    return render_template("missing.html", kind=kind, name=name, all_url=every), 404


@blueprint.get("/")
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


@blueprint.get(f"{TASK_PAGES}/<int:task_id>")
def task(task_id: int) -> ResponseReturnValue:
    """One Task."""
    progress = find_progress(task_id)
    worker = progress["worker"]
    takes_lists = worker in asynctask_app().list_workers()
    return render_template("task.html", task_id=task_id, title=progress["title"], worker=worker, takes_lists=takes_lists)


@blueprint.get("/jobs")
def jobs() -> ResponseReturnValue:
    """The jobs without a Task, and the queues."""
    return render_template("jobs.html", workers=sorted(asynctask_app().workers))


@blueprint.get("/jobs/<job:job_id>")
def job(job_id: str) -> ResponseReturnValue:
    """One job."""
    return render_template("job.html", job_id=job_id, worker=asynctask_app().event(job_id)["worker_name"])


@blueprint.get("/search")
def search() -> ResponseReturnValue:
    """What happened to an item."""
    searched = {name: worker.search for name, worker in asynctask_app().workers.items() if worker.search}
    return render_template(
        "search.html",
        **{name: request.args.get(name, "")[:MAX_TEXT] for name in ("q", "field", "worker")},
        workers=sorted(searched),
        fields=sorted(set().union(*searched.values())),
        longest=MAX_TEXT,
    )


@blueprint.get("/docs")
def docs() -> ResponseReturnValue:
    """The OpenAPI document, for people; without anything from other sites."""
    found = openapi.document()
    paths = {request.script_root + path: operations for path, operations in found["paths"].items()}
    return render_template("docs.html", spec={**found, "paths": paths}, spec_url=url_for("openapi.spec"))


CLIENT: Final = Path(__file__).parent / "static" / "client" / "asynctask.js"
_FOR_EVERY_PAGE: Final = {"Access-Control-Allow-Origin": "*", "Cross-Origin-Resource-Policy": "cross-origin"}


@blueprint.get("/client/<version>/asynctask.js")
def client(version: str) -> ResponseReturnValue:
    """The module for frontends, to be kept for a year. Another version leads to the one of this server, so that pages which
    name an earlier one go on after an upgrade."""
    here = url_for("pages.client", version=__version__)
    if version != __version__:
        if version.partition(".")[0] != __version__.partition(".")[0]:
            detail = f"this server has another version of asynctask.js: load {here}"
            return problem_response(404, detail, code="not_found", headers=_FOR_EVERY_PAGE)
        led = redirect(here)
        led.headers.update(_FOR_EVERY_PAGE)
        led.headers["Cache-Control"] = "public, max-age=300"
        return led
    response = Response(CLIENT.read_bytes(), mimetype="text/javascript", headers=_FOR_EVERY_PAGE)
    response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
    response.vary.add("Accept-Encoding")
    if request.accept_encodings["gzip"]:
        response.set_data(gzip.compress(response.get_data(), mtime=0))
        response.headers["Content-Encoding"] = "gzip"
    return response
