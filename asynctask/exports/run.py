"""Performing an export: the worker that writes one shard's part, and the job that merges the parts when the Task closes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from asynctask.errors import ConfigError, Conflict, InputError
from asynctask.exports.files import ExportFiles, ResultFile
from asynctask.exports.rows import FORMATS, checked
from asynctask.job import current_job, steps_in_this_process
from asynctask.ledger import queries
from asynctask.ledger.base import Ledger

MERGER: Final = "asynctask.merge"
"""The name of the worker that merges, on the own runtime and on every engine. Nobody can submit to it."""

_CHECK_EVERY: Final = 1_000


class Exporting(Protocol):
    """The parts of an application that an export needs, accessed in the performing process."""

    @property
    def ledger(self) -> Ledger: ...

    @property
    def export_files(self) -> ExportFiles: ...


def check_columns(columns: Any, function: Callable[..., Any]) -> tuple[str, ...]:
    """The columns of a declaration of ``function``, which yields the rows. Raises :class:`ConfigError`."""
    plain = inspect.unwrap(function)
    if inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain):
        raise ConfigError(
            f"{getattr(plain, '__qualname__', plain)} cannot be an export, which is a plain function, not an async one"
        )
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


def write_shard(app: Exporting, columns: Sequence[str], rows_of: Callable[[], Iterable[Any]]) -> dict[str, int]:
    """Writes the part of the current job's shard; the return value is the Event's result.

    ``rows_of`` yields the rows of the shard. Raises :class:`Conflict` in a job that is not part of an export.
    """
    job = current_job()
    with app.ledger.database.read() as connection:
        number, said = queries.shard_of(connection, job.job_id)
    if number is None or said is None:
        raise Conflict("a shard is exported as a job of a Task: use submit_export")
    form = FORMATS[said["format"]]
    rows = checked(_stoppable(rows_of()), columns)
    return app.export_files.write_part(said["export"], number, lambda out: form.write_part(out, rows, columns))


def _stoppable(rows: Iterable[Any]) -> Iterator[Any]:
    """The rows, until the job should stop: the next attempt begins the shard again."""
    job = current_job()
    for number, row in enumerate(steps_in_this_process(rows), 1):
        yield row
        if number % _CHECK_EVERY == 0 and job.should_stop():
            job.stop()


def merge(app: Exporting, progress: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the parts of the shards that ended well; returns the manifest without its long members.

    ``progress`` is that of the Task as it closed. Raises :class:`Conflict` in a job that is not the merge of that Task.
    """
    with app.ledger.database.read() as connection:
        said = queries.merge_of(connection, current_job().job_id, int(progress["task_id"]))
        if said is None:
            raise Conflict("an export is merged when its Task closes, and by nobody else")
        done, missing = queries.shards(connection, int(progress["task_id"]))
    columns: Sequence[str] = said["columns"]
    made = app.export_files.merge(
        said["export"], int(progress["generation"]), done, FORMATS[said["format"]], columns,
        task_id=progress["task_id"], format=said["format"], shards=len(done) + len(missing), missing_shards=missing,
        partial=bool(missing) or progress["split"]["state"] == "failed" or progress["state"] == "cancelled",
    )  # fmt: skip
    return {name: made[name] for name in ("rows", "bytes", "sha256", "format", "partial", "shards")} | {
        "missing_shards": len(missing)
    }


def result_of(app: Exporting, task_id: int, progress: Mapping[str, Any]) -> ResultFile:
    """The file of a Task's result. Raises :class:`Conflict` with the reason if there is none yet, :class:`NotFound` if it
    is gone."""
    with app.ledger.database.read() as connection:
        said = queries.export_of(connection, task_id)
    if said is None:
        raise Conflict(f"Task {task_id} is no export, so it has no result")
    if progress["result"] is None:
        why = "its merge failed" if progress["done"] else "it is made when the last shard has ended"
        raise Conflict(f"Task {task_id} is {progress['state']} and has no result: {why}")
    return app.export_files.result(said["export"], int(progress["generation"]))
