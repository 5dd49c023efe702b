"""Performing an export: the worker that writes one shard's part, and the job that merges the parts when the Task closes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from asynctask.errors import ConfigError, Conflict, InputError
from asynctask.exports.files import ExportFiles, ResultFile
from asynctask.exports.rows import FORMATS, checked
from asynctask.job import current_job
from asynctask.ledger import queries
from asynctask.ledger.base import Ledger

__all__ = ["MERGER", "Export", "check_columns", "check_format", "merge", "result_of", "write_shard"]

MERGER: Final = "asynctask.merge"
"""The name of the worker that merges."""

_CHECK_EVERY: Final = 1_000


@dataclass(frozen=True, slots=True)
class Export:
    """What :meth:`asynctask.AsyncTask.export` declared: the columns, and the function that yields a shard's rows."""

    columns: tuple[str, ...]
    rows: Callable[[Any], Iterable[Any]]


def check_columns(columns: Any) -> tuple[str, ...]:
    """The columns of a declaration. Raises :class:`ConfigError`."""
    found = () if isinstance(columns, str) else tuple(columns)
    if not found or not all(isinstance(name, str) and 0 < len(name) <= 255 for name in found):
        raise ConfigError("columns must be names of 1 to 255 characters, one at least")
    if len(set(found)) < len(found):
        raise ConfigError("columns must not have two of one name")
    return found


def check_format(name: Any, columns: Sequence[str]) -> str:
    """The format of a submission. Raises :class:`InputError`."""
    if not isinstance(name, str) or name not in FORMATS:
        raise InputError(f"format {str(name)[:80]!r} is none of {', '.join(FORMATS)}", code="invalid_format")
    FORMATS[name].check(columns)
    return name


def write_shard(ledger: Ledger, files: ExportFiles, export: Export, shard: Any) -> dict[str, int]:
    """Writes the part of the current job's shard; what it returns is the Event's result."""
    job = current_job()
    with ledger.database.read() as connection:
        number, said = queries.shard_of(connection, job.job_id)
    if number is None or said is None:
        raise Conflict("a shard is exported as a job of a Task: use submit_export")
    form = FORMATS[said["format"]]
    rows = checked(_stoppable(export.rows(shard)), export.columns)
    return files.write_part(said["export"], number, lambda out: form.write_part(out, rows, export.columns))


def _stoppable(rows: Iterable[Any]) -> Iterator[Any]:
    """The rows, until the job is to let go: the next attempt begins the shard anew."""
    job = current_job()
    for number, row in enumerate(rows, 1):
        yield row
        if number % _CHECK_EVERY == 0 and job.should_stop():
            job.stop()


def merge(ledger: Ledger, files: ExportFiles, said: Mapping[str, Any], progress: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the parts of the shards that ended well; what it returns is the manifest without what is long."""
    with ledger.database.read() as connection:
        done, missing = queries.shards(connection, int(progress["task_id"]))
    columns: Sequence[str] = said["columns"]
    made = files.merge(
        said["export"], int(progress["generation"]), done, FORMATS[said["format"]], columns,
        task_id=progress["task_id"], format=said["format"], shards=len(done) + len(missing), missing_shards=missing,
        partial=bool(missing) or progress["split"]["state"] == "failed" or progress["state"] == "cancelled",
    )  # fmt: skip
    return {name: made[name] for name in ("rows", "bytes", "sha256", "format", "partial", "shards")} | {
        "missing_shards": len(missing)
    }


def result_of(ledger: Ledger, files: ExportFiles, task_id: int, progress: Mapping[str, Any]) -> ResultFile:
    """The file of a Task's result. Raises :class:`Conflict` with the reason where there is none yet,
    :class:`NotFound` where it is gone."""
    with ledger.database.read() as connection:
        said = queries.export_of(connection, task_id)
    if said is None:
        raise Conflict(f"Task {task_id} is no export, so it has no result")
    if progress["result"] is None:
        why = "its merge failed" if progress["done"] else "it is made when the last shard has ended"
        raise Conflict(f"Task {task_id} is {progress['state']} and has no result: {why}")
    return files.result(said["export"], int(progress["generation"]))
