"""The page: a form to submit a list, and a page for each Task. webapi/static fetches what changes."""

from __future__ import annotations

from typing import Final

from apiflask import APIBlueprint
from flask import current_app, render_template, url_for
from flask.typing import ResponseReturnValue

from asynctask.errors import NotFound
from asynctask.lists.readers import FORMATS
from webapi.context import TASK_PAGES, asynctask_app, find_task
from webapi.workers import describe

__all__ = ["blueprint"]

blueprint: Final = APIBlueprint("pages", __name__, enable_openapi=False)


@blueprint.get("/")
def home() -> ResponseReturnValue:
    """The form and the recent Tasks."""
    app = asynctask_app()
    suffixes = [suffix for each in FORMATS.values() for suffix in each.suffixes]
    return render_template(
        "home.html",
        workers=describe(app),
        max_file_bytes=app.config.max_file_bytes,
        formats=list(FORMATS),
        suffixes=suffixes,
    )


@blueprint.get(f"{TASK_PAGES}/<int:task_id>")
def task(task_id: int) -> ResponseReturnValue:
    """One Task."""
    try:
        title = find_task(task_id).progress()["title"]
    except NotFound:
        return render_template("missing.html", task_id=task_id), 404
    return render_template("task.html", task_id=task_id, title=title)


@blueprint.get("/docs")
def docs() -> ResponseReturnValue:
    """The OpenAPI document, for people; without anything from other sites."""
    return render_template("docs.html", spec=current_app.spec, spec_url=url_for("openapi.spec"))  # type: ignore[attr-defined]
