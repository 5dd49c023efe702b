"""Files that a command writes: the report of a Task, the empty sheet of a worker."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from asynctask.cli.options import TASK_ID, Command, Session, pass_session
from asynctask.cli.output import OK, count
from asynctask.errors import InputError, UnknownWorker

if TYPE_CHECKING:
    from asynctask.task import TaskHandle

__all__ = ["COMMANDS"]

ROWS: Final = ("failed", "succeeded", "unprocessed", "rejected", "all")
_SUFFIXES: Final = (".xlsx", ".csv")


@click.command("report", cls=Command)
@click.argument("task_id", type=TASK_ID)
@click.option(
    "-o", "--output", "path", required=True, type=click.Path(dir_okay=False, path_type=Path), help="FILE.xlsx or FILE.csv."
)
@click.option("--rows", type=click.Choice(ROWS), default="failed", show_default=True, help="Which rows to write.")
@pass_session
def report(session: Session, task_id: int, path: Path, rows: str) -> int:
    """Write the rows that did not succeed to a file.

    They have their original columns, what became of them and why: ready to be corrected and sent again.
    """
    suffix = _suffix(path)
    handle = session.existing().task(task_id)
    written = _write_report(handle, path, suffix, rows)
    session.out.document({"task_id": task_id, "rows": rows, "written": written, "path": str(path.resolve())})
    session.out.line(f"{path}: {count(written, 'row')} ({rows})")
    return OK


def _write_report(handle: TaskHandle, path: Path, suffix: str, rows: str) -> int:
    from asynctask.reports import files

    content = handle.report(rows)
    with closing(content.rows), _replacing(path, suffix) as temporary:
        if suffix == ".xlsx":
            return files.write_xlsx(temporary, content.headers, content.rows, locale=content.locale)
        with temporary.open("wb") as stream:
            return files.write_csv(stream, content.headers, content.rows, locale=content.locale)


@click.command("template", cls=Command)
@click.argument("worker")
@click.option(
    "-o", "--output", "path", required=True, type=click.Path(dir_okay=False, path_type=Path), help="FILE.xlsx or FILE.csv."
)
@pass_session
def template(session: Session, worker: str, path: Path) -> int:
    """Write an empty sheet for a worker, to be filled in and submitted.

    A workbook has formats, lists to choose from and a page of help (in the language of --locale); CSV has the header alone.
    """
    from asynctask.reports.template import make_template
    from asynctask.reports.template_files import template_csv, template_xlsx

    suffix = _suffix(path)
    app = session.app(required="a template shows what a worker of the application takes")
    if worker not in app.workers:
        raise UnknownWorker(worker, app.workers)
    found = make_template(app.workers[worker])
    with _replacing(path, suffix) as temporary:
        temporary.write_bytes(template_xlsx(found, app.config.locale) if suffix == ".xlsx" else template_csv(found))
    headers = [column.header for column in found.columns]
    session.out.document({"worker": worker, "columns": headers, "path": str(path.resolve())})
    session.out.line(f"{path}: {count(len(headers), 'column')} for {worker}")
    return OK


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise InputError(f"{path.name} ends in neither .xlsx nor .csv: the suffix decides what is written")
    return suffix


@contextmanager
def _replacing(path: Path, suffix: str) -> Iterator[Path]:
    """A file beside ``path`` that takes its place when all went well: a report is whole or not there."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=suffix, dir=path.parent)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


COMMANDS: Final = (report, template)
