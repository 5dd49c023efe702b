"""The two jobs of an export: a shard writes its part, and the merge, between close and callbacks, makes the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from asynctask.core.states import State
from asynctask.errors import InputError, NormalException
from asynctask.exports.files import ExportFiles, without
from asynctask.exports.rows import FORMATS, MAX_SHEET_COLUMNS, checked
from asynctask.job import CurrentJob, current_job
from asynctask.task import MAX_PAGE, TaskHandle

__all__ = ["MERGER", "check_columns", "check_format", "merger", "shard_writer", "shards_as_items"]

MERGER: Final = "asynctask.merge"
"""The worker of the merges."""

_EVERY: Final = 1_000
_UNFINISHED: Final = ("failed", "error", "cancelled")


class Exporting(Protocol):
    """What the jobs ask of the application."""

    @property
    def exports(self) -> ExportFiles: ...

    def task(self, task_id: int) -> TaskHandle: ...


def check_columns(columns: Sequence[str]) -> tuple[str, ...]:
    """The columns of a declaration. Raises ValueError that says what is wrong."""
    names = tuple(columns) if not isinstance(columns, str) else ()
    if not names or not all(isinstance(name, str) and name.strip() and "\0" not in name for name in names):
        raise ValueError("columns must be a list of names, at least one")
    if len(set(names)) != len(names):
        raise ValueError("no two columns may have the same name")
    return names


def check_format(name: Any, columns: Sequence[str]) -> None:
    """Raises :class:`InputError` for a format that is none, or cannot hold so many columns."""
    if not isinstance(name, str) or name not in FORMATS:
        raise InputError(f"format {str(name)[:80]!r} is none; choose of {', '.join(FORMATS)}", code="invalid_option")
    if name == "xlsx" and len(columns) > MAX_SHEET_COLUMNS:
        raise InputError(
            f"a sheet has at most {MAX_SHEET_COLUMNS:,} columns, the export has {len(columns):,}: choose csv",
            code="invalid_option",
        )


def shards_as_items(shards: Iterable[Any], export: str, form: str) -> list[dict[str, Any]]:
    """The items of an export's Task. Raises :class:`InputError` without a shard."""
    items = [{"number": n, "shard": shard, "export": export, "format": form} for n, shard in enumerate(shards)]
    if not items:
        raise InputError("an export needs at least one shard", code="no_items")
    return items


def shard_writer(
    app: Exporting, function: Callable[[Any], Iterable[Any]], columns: Sequence[str]
) -> Callable[[dict[str, Any]], Any]:
    """The worker's function: writes the rows of one shard to its part."""

    def write_shard(item: dict[str, Any]) -> dict[str, int]:
        if item.keys() != {"number", "shard", "export", "format"}:
            raise NormalException("this worker makes exports: hand its shards in with submit_export")
        form, job = FORMATS[item["format"]], current_job()
        rows = _stoppable(checked(function(item["shard"]), columns), job)
        return app.exports.write_part(item["export"], int(item["number"]), lambda out: form.write_part(out, rows, columns))

    write_shard.__doc__ = function.__doc__
    return write_shard


def _stoppable(rows: Iterable[Sequence[Any]], job: CurrentJob) -> Iterator[Sequence[Any]]:
    for number, row in enumerate(rows):
        if number % _EVERY == 0 and job.should_stop():
            job.stop()
        yield row


def merger(app: Exporting) -> Callable[..., Any]:
    """The function of the worker :data:`MERGER`; it gets what the submission said, and the progress object."""

    def merge(order: Mapping[str, Any], closed: Mapping[str, Any]) -> dict[str, Any]:
        """Makes the file of an export."""
        task = app.task(int(closed["task_id"]))
        missing = _unfinished(task)
        said = {
            "format": order["format"],
            "shards": order["shards"],
            "missing_shards": sorted(missing),
            "partial": bool(missing) or closed["state"] == State.CANCELLED,
        }
        numbers = without(int(order["shards"]), missing)
        made = app.exports.merge(
            order["export"], int(closed["generation"]), numbers, FORMATS[order["format"]], order["columns"], **said
        )
        return {name: made[name] for name in ("rows", "bytes", "sha256", "format", "partial")}

    return merge


def _unfinished(task: TaskHandle) -> set[int]:
    """The numbers of the shards that ended otherwise than well."""
    found: set[int] = set()
    after = None
    while page := task.events(status=_UNFINISHED, after=after, limit=MAX_PAGE):
        found.update(int(each["params"]["number"]) for each in page)
        after = page[-1]["id"]
    return found
