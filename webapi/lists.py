"""/api/lists: a look at a list before it is submitted, and the list with the cells marked that would be rejected."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from flask import Response
from werkzeug.wsgi import FileWrapper

from asynctask.lists.dry_run import Marking
from webapi.access import current_user
from webapi.context import asynctask_app, client_check, json_response, reader_locale, set_language, slot
from webapi.reading import current_request
from webapi.reports import XLSX, attachment
from webapi.shapes import BINARY, FileToPreview, ListPreview, Routes
from webapi.tasks import form_with_file, from_file, store

blueprint: Final = Routes("lists", __name__, url_prefix="/api/lists", tag="Tasks")


@blueprint.serve("POST /preview", "previewList", ListPreview, responses=[415], reads_body=True)
def preview() -> Response:
    """Look at a list before it is submitted

    Reads the beginning of a file, sent as a form: its sheets, its header, its columns with sample cells, and how they fit
    each worker that takes lists. Nothing is validated, and nothing is kept.
    """
    app = asynctask_app()
    given, file = form_with_file(current_request(), FileToPreview)
    found = app.preview_file(
        store(app, file),
        sheet=given.sheet,
        columns=given.columns,
        encoding=given.encoding,
        header_row=given.header_row,
        owner=current_user().owner or "",
        alive=client_check(),
    )
    response = json_response(found.as_dict(locale := reader_locale()), cache="no-store")
    set_language(response, locale)
    return response


@blueprint.serve("POST /marked.xlsx", "markList", BINARY, media=XLSX, responses=[415, 504], reads_body=True)
def marked() -> Response:
    """The list as a workbook, with the cells marked that would be rejected

    Takes the form of a submission and validates it as a dry run does. Each row has its status, `accepted` or `rejected`,
    and the reason; the workbook can be corrected and submitted. 503 if as many reports are made as may be at once.
    """
    app, locale = asynctask_app(), reader_locale()
    with ExitStack() as stack:
        with slot("report"), TemporaryDirectory(prefix="asynctask-marked-") as folder:
            path = Path(folder) / "marked.xlsx"
            given = from_file(app, current_request())
            options = given.options.model_copy(update={"dry_run": True})
            app.hand_in(replace(given, options=options, marking=Marking(str(path), locale)))
            body = stack.enter_context(path.open("rb"))
            size = path.stat().st_size
        response = Response(FileWrapper(body), mimetype=XLSX)
        response.content_length = size
        response.call_on_close(stack.pop_all().close)
    set_language(response, locale)
    return attachment(response, "marked.xlsx")
