"""/api/tasks/ID/report.csv and .xlsx, and /rejected: the rows of a Task with their results."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import ExitStack
from itertools import chain
from typing import Final
from urllib.parse import quote

from flask import Response, request

from asynctask.reports.files import iter_csv, iter_xlsx
from asynctask.task import TaskHandle
from webapi.context import (
    TASKS,
    JsonPage,
    client_check,
    find_task,
    json_response,
    page_links,
    reader_locale,
    set_language,
    slot,
    until_gone,
)
from webapi.shapes import BINARY, RejectedPage, RejectedQuery, ReportQuery, Routes, row_numbers

# -- files as answers

CSV: Final = "text/csv"
XLSX: Final = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"

_LONGEST: Final = 80
# Invalid in file names, path separators, and bidirectional controls that make a name read as another.
_UNSAFE: Final = re.compile(r'[\x00-\x1f\x7f-\x9f/\\:*?"<>|\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]')
_NOT_PLAIN: Final = re.compile(r"[^A-Za-z0-9._-]+")


def no_content(mimetype: str) -> Response:
    """The answer to HEAD: no file is made, so there is no Content-Length."""
    return Response(iter(()), mimetype=mimetype)


def attachment(response: Response, plain: str, title: str = "") -> Response:
    """Makes an answer a download. ``plain`` is its file name, extended by ``title`` for clients that read RFC 8187."""
    name = " ".join(_UNSAFE.sub(" ", title).split())[:_LONGEST].strip(". ")
    full = quote(f"{name} - {plain}" if name else _UNSAFE.sub("_", plain), safe="")
    response.headers["Content-Disposition"] = (
        f"attachment; filename=\"{_NOT_PLAIN.sub('_', plain)}\"; filename*=UTF-8''{full}"
    )
    response.headers["Cache-Control"] = "no-store"
    return response


# -- routes

blueprint: Final = Routes("reports", __name__, url_prefix=TASKS, tag="Reports")


@blueprint.serve("GET /<int:task_id>/report.csv", "getCsvReport", BINARY, query=ReportQuery, media=CSV)
def csv(task_id: int, query: ReportQuery) -> Response:
    """The report as CSV: the original columns, then row, status, error, attempts, result

    It can be corrected and submitted again. Texts that a spreadsheet would take for a formula begin with an apostrophe.
    """
    return _report(task_id, query, "csv", iter_csv, CSV)


@blueprint.serve("GET /<int:task_id>/report.xlsx", "getXlsxReport", BINARY, query=ReportQuery, media=XLSX)
def xlsx(task_id: int, query: ReportQuery) -> Response:
    """The report as a workbook, with the cells that were refused marked

    It can be corrected and handed in again.
    """
    return _report(task_id, query, "xlsx", iter_xlsx, XLSX)


@blueprint.serve("GET /<int:task_id>/rejected", "listRejected", RejectedPage, query=RejectedQuery)
def rejected(task_id: int, query: RejectedQuery) -> Response:
    """The rows that the validation refused, with all problems of each

    `links.next` leads to the next page and is null on the last one. A page ends early, after at least one
    row, at about 8 MB.
    """
    locale, page = reader_locale(), JsonPage(query.limit, lambda row: int(row["row"]))
    found = find_task(task_id).rejects(query.after or 0, query.limit, locale, take=page)
    response = json_response({"rejected": found, "links": page_links(page.after)})
    set_language(response, locale)
    return response


def _report(
    task_id: int, query: ReportQuery, ending: str, pieces: Callable[..., Generator[bytes, None, None]], mimetype: str
) -> Response:
    task = find_task(task_id)
    title = task.progress()["title"]
    response = no_content(mimetype) if request.method == "HEAD" else _streamed(task, query, pieces, mimetype)
    set_language(response, reader_locale())
    rows = "chosen" if query.only_rows else query.rows
    return attachment(response, f"task-{task_id}-{rows}.{ending}", title)


def _streamed(
    task: TaskHandle, query: ReportQuery, pieces: Callable[..., Generator[bytes, None, None]], mimetype: str
) -> Response:
    """The report in the reader's language, sent while it is made."""
    with ExitStack() as stack:
        stack.enter_context(slot("report"))
        report = task.report(query.rows, reader_locale(), client_check(), only_rows=row_numbers(query.only_rows))
        # It holds the original list until it is closed, even if its rows are not read to the end.
        stack.callback(report.close)
        chunks = pieces(report.headers, report.rows, locale=report.locale)
        stack.callback(chunks.close)
        # Made before the answer begins: an immediate error is an error answer, not half a file.
        first = next(chunks, b"")
        response = Response(until_gone(chain((first,), chunks)), mimetype=mimetype)
        response.call_on_close(stack.pop_all().close)
    return response
