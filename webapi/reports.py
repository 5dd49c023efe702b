"""/api/tasks/ID/report.csv and .xlsx: the rows of a Task with what became of each."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import quote

from apiflask import APIBlueprint, FileSchema
from flask import Response

from asynctask.bulk.report import Report
from asynctask.bulk.report_files import ReportRow, iter_csv, write_xlsx
from asynctask.handle import TaskHandle
from webapi.answers import RejectedPage
from webapi.current import find_task
from webapi.incoming import RejectedQuery, ReportQuery
from webapi.links import TASKS, page_links
from webapi.wire import json_response

__all__ = ["blueprint"]

_CHUNK: Final = 65_536

CSV: Final = "text/csv"
XLSX: Final = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"

# What no file system takes, what is a path, and what turns the direction of text so that a name reads as another one.
_UNSAFE: Final = re.compile(r'[\x00-\x1f\x7f-\x9f/\\:*?"<>|\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]')

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
    report = task.report(rows=query.rows)
    chunks = _csv_chunks(report)
    # The first is made now: what fails at once is an error answer, not half a file.
    first = next(chunks, b"")
    response = Response(chain((first,), chunks), mimetype=CSV)
    response.call_on_close(chunks.close)
    _name(response, task, query.rows, "csv")
    return response


@blueprint.get("/<int:task_id>/report.xlsx")
@blueprint.input(ReportQuery, location="query", arg_name="query")
@blueprint.output(FileSchema(type="string", format="binary"), content_type=XLSX)
@blueprint.doc(operation_id="getXlsxReport", responses=[503])
def xlsx(task_id: int, query: ReportQuery) -> Response:
    """The report as a workbook, with the cells that were refused marked

    It can be corrected and handed in again.
    """
    task = find_task(task_id)
    report = task.report(rows=query.rows)
    with tempfile.TemporaryDirectory(prefix="asynctask-report-") as folder:
        path = Path(folder) / "report.xlsx"
        with _closed_after(report.rows) as rows:
            write_xlsx(path, report.headers, rows)
        # The file is open when its folder goes: it is there until it has been sent, whatever happens then.
        file = path.open("rb")
    response = Response(_content(file), mimetype=XLSX)
    response.call_on_close(file.close)
    response.content_length = os.fstat(file.fileno()).st_size
    _name(response, task, query.rows, "xlsx")
    return response


@blueprint.get("/<int:task_id>/rejected")
@blueprint.input(RejectedQuery, location="query", arg_name="query")
@blueprint.output(RejectedPage)
@blueprint.doc(operation_id="listRejected", responses=[503])
def rejected(task_id: int, query: RejectedQuery) -> Response:
    """The rows that the validation refused, with everything that is wrong in each

    `links.next` leads to the next page and is null on the last one.
    """
    found = find_task(task_id).rejects(after=query.after or 0, limit=query.limit)
    after = found[-1]["row"] if len(found) == query.limit else None
    return json_response({"rejected": found, "links": page_links(after)})


def _content(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _csv_chunks(report: Report) -> Generator[bytes, None, None]:
    with _closed_after(report.rows) as rows:
        yield from iter_csv(report.headers, rows)


@contextmanager
def _closed_after(rows: Iterator[ReportRow]) -> Iterator[Iterator[ReportRow]]:
    """The rows hold a connection and the original file until they are closed, also where nobody reads them to the end."""
    try:
        yield rows
    finally:
        if isinstance(rows, Generator):
            rows.close()


def _name(response: Response, task: TaskHandle, rows: str, suffix: str) -> None:
    """The name of the file: plain for every program, and with the Task's title for those that read RFC 8187."""
    plain = f"task-{task.id}-{rows}.{suffix}"
    title = _UNSAFE.sub(" ", task.progress()["title"])
    title = " ".join(title.split())[:80].strip(". ")
    name = quote(f"{title} - {plain}" if title else plain, safe="")
    response.headers["Content-Disposition"] = f"attachment; filename=\"{plain}\"; filename*=UTF-8''{name}"
    response.headers["Cache-Control"] = "no-store"
