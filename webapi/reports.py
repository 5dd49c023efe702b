"""/api/tasks/ID/report.csv and .xlsx: the rows of a Task with what became of each."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Final

from apiflask import APIBlueprint, FileSchema
from flask import Response, request

from asynctask.reports.files import iter_csv, write_xlsx
from asynctask.reports.report import Report
from asynctask.task import TaskHandle
from webapi.answers import RejectedPage
from webapi.context import find_task
from webapi.downloads import CSV, XLSX, attachment, client_check, content, no_content, slot, until_gone
from webapi.incoming import RejectedQuery, ReportQuery
from webapi.json_body import json_response
from webapi.language import reader_locale, say_language
from webapi.links import TASKS, page_links

__all__ = ["blueprint"]

blueprint: Final = APIBlueprint("reports", __name__, url_prefix=TASKS, tag="Reports")


@blueprint.get("/<int:task_id>/report.csv")
@blueprint.input(ReportQuery, location="query", arg_name="query")
@blueprint.output(FileSchema(type="string", format="binary"), content_type=CSV)
@blueprint.doc(operation_id="getCsvReport", responses=[503])
def csv(task_id: int, query: ReportQuery) -> Response:
    """The report as CSV: the original columns, then row, status, error, attempts, result

    It can be corrected and handed in again. Texts that a spreadsheet would take for a formula begin with an apostrophe.
    """
    task = find_task(task_id)
    title = task.progress()["title"]
    if request.method == "HEAD":
        return _named(no_content(CSV), f"task-{task_id}-{query.rows}.csv", title)
    with ExitStack() as stack:
        report = _made(task, query.rows, stack)
        chunks = iter_csv(report.headers, report.rows, locale=report.locale)
        # The first is made now: what fails at once is an error answer, not half a file.
        first = next(chunks, b"")
        response = Response(until_gone(chain((first,), chunks)), mimetype=CSV)
        response.call_on_close(stack.pop_all().close)
    return _named(response, f"task-{task_id}-{query.rows}.csv", title)


@blueprint.get("/<int:task_id>/report.xlsx")
@blueprint.input(ReportQuery, location="query", arg_name="query")
@blueprint.output(FileSchema(type="string", format="binary"), content_type=XLSX)
@blueprint.doc(operation_id="getXlsxReport", responses=[503])
def xlsx(task_id: int, query: ReportQuery) -> Response:
    """The report as a workbook, with the cells that were refused marked

    It can be corrected and handed in again.
    """
    task = find_task(task_id)
    title = task.progress()["title"]
    if request.method == "HEAD":
        return _named(no_content(XLSX), f"task-{task_id}-{query.rows}.xlsx", title)
    with ExitStack() as stack:
        report = _made(task, query.rows, stack)
        with tempfile.TemporaryDirectory(prefix="asynctask-report-") as folder:
            path = Path(folder) / "report.xlsx"
            write_xlsx(path, report.headers, report.rows, locale=report.locale)
            # The file is open when its folder goes: it is there until it has been sent, whatever happens then.
            file = stack.enter_context(path.open("rb"))
        response = Response(content(file), mimetype=XLSX)
        response.content_length = os.fstat(file.fileno()).st_size
        response.call_on_close(stack.pop_all().close)
    return _named(response, f"task-{task_id}-{query.rows}.xlsx", title)


@blueprint.get("/<int:task_id>/rejected")
@blueprint.input(RejectedQuery, location="query", arg_name="query")
@blueprint.output(RejectedPage)
@blueprint.doc(operation_id="listRejected", responses=[503])
def rejected(task_id: int, query: RejectedQuery) -> Response:
    """The rows that the validation refused, with everything that is wrong in each

    `links.next` leads to the next page and is null on the last one.
    """
    locale = reader_locale()
    found = find_task(task_id).rejects(after=query.after or 0, limit=query.limit, locale=locale)
    after = found[-1]["row"] if len(found) == query.limit else None
    response = json_response({"rejected": found, "links": page_links(after)})
    say_language(response, locale)
    return response


def _made(task: TaskHandle, rows: str, stack: ExitStack) -> Report:
    """The report, in the reader's language; ``stack`` lets go of all that it holds."""
    stack.enter_context(slot())
    report = task.report(rows, reader_locale(), client_check())
    # The rows hold the original file until they are closed, also where nobody reads them to the end.
    stack.callback(report.rows.close)
    return report


def _named(response: Response, plain: str, title: str) -> Response:
    say_language(response, reader_locale())
    return attachment(response, plain, title)
