"""``submit`` and ``watch``: submit a file, follow a Task."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from asynctask.cli.options import TASK_ID, Command, Session, pass_session, who
from asynctask.cli.output import (
    COUNTED,
    DETACHED,
    FAILURES,
    OK,
    UNAVAILABLE,
    USAGE,
    Bars,
    clean,
    count,
    headline,
    number,
    pace,
)
from asynctask.clock import SystemClock
from asynctask.errors import InputError, Problem, Unavailable, UnknownWorker
from asynctask.worker import Priority

if TYPE_CHECKING:
    from asynctask.app import AsyncTask
    from asynctask.lists.dry_run import DryRun
    from asynctask.task import TaskHandle

_POLL_S: Final = 0.25
_AWAY_S: Final = 120.0  # a database that is away for longer is reported
_STILL_S: Final = 5.0  # without a change, after which a watched Task is told why
_SHOWN_ERRORS: Final = 10
_SHOWN_REASONS: Final = 3

F = TypeVar("F", bound=Callable[..., Any])


def outcome(progress: Mapping[str, Any]) -> int:
    """The exit code of a done Task: 0 only if every row was accepted and finished, and no callback failed."""
    counts, split = progress["counts"], progress["split"]
    whole = split["state"] == "sealed" and not split["rejected"] and progress["state_reason"] != "callback_failed"
    return OK if whole and counts["finish"] == counts["total"] and progress["state"] == "finished" else FAILURES


def priority_value(text: str) -> int:
    """A priority by number or name (``ADMIN_HIGH``). Raises :class:`InputError`."""
    try:
        return int(text)
    except ValueError:
        name = text.strip().upper().replace("-", "_")
        if name in Priority.__members__:
            return int(Priority[name])
    names = ", ".join(Priority.__members__)
    raise InputError(f"priority {text!r} is neither a whole number nor one of {names}", code="invalid_option")


def follow(session: Session, handle: TaskHandle, timeout: float | None = None) -> dict[str, Any]:
    """Shows a Task until it is done, or for ``timeout`` seconds, and returns its last progress; waits while the database is
    away, up to 120 s.

    Raises :class:`LedgerUnavailable` after that, or at the timeout if the database is away then; KeyboardInterrupt at
    Ctrl-C.
    """
    clock, pause = SystemClock(), Event()
    until = math.inf if timeout is None else clock.monotonic() + timeout
    lost_at: float | None = None
    counts: Mapping[str, int] = {}
    asked_at, reason = 0.0, ""
    with Bars(session.out, clock.monotonic) as bars:
        while True:
            try:
                progress = handle.progress()
            except Unavailable as error:
                lost_at = clock.monotonic() if lost_at is None else lost_at
                if clock.monotonic() - lost_at > _AWAY_S or clock.monotonic() >= until:
                    raise
                bars.note(handle.id, f"connection lost, trying again ({clean(error, longest=100)})")
                pause.wait(min(1.0, max(0.0, until - clock.monotonic())))
                continue
            lost_at = None
            if progress["counts"] != counts:
                counts, asked_at, reason = progress["counts"], clock.monotonic(), ""
            elif clock.monotonic() - asked_at >= _STILL_S:
                asked_at, reason = clock.monotonic(), why_still(session.app(), handle.id)
            bars.show(progress, reason)
            if progress["done"] or (left := until - clock.monotonic()) <= 0:
                return progress
            pause.wait(min(_POLL_S, progress["poll_after_ms"] / 1000, left))


def why_still(app: AsyncTask, task_id: int) -> str:
    """Why no row of a Task begins, and how to mend it, in one line; empty if nothing keeps it."""
    try:
        reasons = app.operations.wait_reasons(task_id)
    except Unavailable as error:
        return clean(error, longest=200)
    return "; ".join(f"{clean(each.message, longest=300)}: {clean(each.mend)}" for each in reasons[:_SHOWN_REASONS])


def _watch(session: Session, handle: TaskHandle, timeout: float | None) -> int:
    again = f"To watch it again: asynctask watch {handle.id}"
    try:
        progress = follow(session, handle, timeout)
    except KeyboardInterrupt:
        session.out.note(f"\nTask {handle.id} goes on. {again}")
        return DETACHED
    session.out.document(progress)
    if not progress["done"]:
        session.out.note(f"Not done after {timeout:g} s: {pace(progress)}. {again}")
        return UNAVAILABLE
    if not session.out.json:
        _print_outcome(session, handle, progress)
    return outcome(progress)


def _print_outcome(session: Session, handle: TaskHandle, progress: Mapping[str, Any]) -> None:
    if progress["state"] == "rejected":
        print_refusal(session, handle)
        return
    if progress["split"]["state"] == "failed":
        session.out.line(_split_failure(progress), style="red")
    errors = progress["top_errors"][:_SHOWN_ERRORS]
    if errors:
        session.out.line()
        session.out.table(COUNTED, errors)
    task_id = progress["task_id"]
    if progress["state_reason"] == "callback_failed":
        session.out.line(f"A callback failed. To run it again: asynctask callbacks {task_id}", style="red")
    elif outcome(progress) != OK:
        session.out.line(f"The rows to correct: asynctask report {task_id} -o failed.xlsx")


def print_refusal(session: Session, handle: TaskHandle) -> None:
    """Prints why a list was rejected, and the problems of its first rows; nothing for a Task that was not rejected."""
    if (found := handle.refusal()) is None:
        return
    from asynctask.lists.problems import localised

    error = localised(found, session.app().config.locale)
    session.out.line(f"The list was rejected: {clean(error)}", style="red")
    session.out.problems(error.errors)


def _split_failure(progress: Mapping[str, Any]) -> str:
    return f"The list could not be read to its end: {clean(progress['split'].get('reason'))}"


def _seconds(_context: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise click.BadParameter("write a number of seconds, 0 or more; leave it out for no limit")
    return value


def _timeout_option(function: F) -> F:
    return click.option(
        "--timeout",
        type=float,
        metavar="SECONDS",
        callback=_seconds,
        help="Stop watching after so many seconds, with exit code 3; the Task goes on.",
    )(function)


def _refuse_alone(timeout: float | None, look_on: bool) -> None:
    if timeout is not None and not look_on:
        raise click.UsageError("--timeout limits how long --watch watches: give both, or neither")


@click.command("watch", cls=Command)
@click.argument("task_id", type=TASK_ID)
@_timeout_option
@pass_session
def watch(session: Session, task_id: int, timeout: float | None) -> int:
    """Show a Task until it is done. Ctrl-C leaves it running."""
    return _watch(session, session.existing().task(task_id), timeout)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(made := dict(pairs)) < len(pairs):
        raise ValueError("an object has a key twice; keep one of them")
    return made


def _columns(_context: click.Context, _option: click.Parameter, pairs: Sequence[str]) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for pair in pairs:
        header, equals, field = pair.rpartition("=")  # a header may have the sign, a field has none
        if not equals or not header.strip():
            raise click.BadParameter(f"{pair!r} is not HEADER=FIELD; write the header of the sheet, =, and the field")
        if header in found:
            raise click.BadParameter(f"the header {header!r} is given twice; keep one of them")
        found[header] = field.strip()
    return found or None


def _reading_options(function: F) -> F:
    """The options that say how a file is read."""
    for option in (
        click.option("--encoding", help="Encoding of a text, such as gb18030 or cp932; by default it is detected."),
        click.option(
            "--column",
            "columns",
            multiple=True,
            metavar="HEADER=FIELD",
            callback=_columns,
            help="The field of a header that is not its name; HEADER= leaves the column out. May be repeated.",
        ),
        click.option("--header-row", type=int, help="The row with the headers; by default it is found."),
        click.option("--sheet", help="The sheet of a workbook; by default the first that is visible and has rows."),
    ):
        function = option(function)
    return function


def _context(_context: click.Context, _option: click.Parameter, text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f'no JSON ({error}); write an object such as {{"seller": 7}}') from None


def _task_options(function: F) -> F:
    """The options of a Task that a file and the shards of an export have alike."""
    for option in reversed(_TASK_OPTIONS):
        function = option(function)
    return function


_TASK_OPTIONS: Final = (
    click.option("--title", help="Display name; of a file by default its name."),
    click.option("--parallel", type=click.IntRange(min=1), help="The most jobs that run at once."),
    click.option(
        "--interval", type=click.FloatRange(min=0), help="Seconds from round to round of --parallel jobs (or of one)."
    ),
    click.option("--tolerated-failures", help="Pause after more failures: 10, 5%, failed:10 or error:5%."),
    click.option("--priority", help="Smaller runs first: a number or a name such as ADMIN_HIGH."),
    click.option("--start-at", help="Nothing begins before this time, such as 2026-12-01T08:00:00+01:00."),
    click.option("--paused", is_flag=True, default=None, help="Nothing starts before asynctask resume."),
    click.option("--queue", help="Another queue than the worker's own."),
    click.option("--owner", help="Whose Task it is: sessions and idempotency keys are per owner."),
    click.option("--session", "line", help="Tasks of one session run one after the other."),
    click.option("--key", help="Field whose equal values run one after the other, across all Tasks of the worker."),
    click.option("--context", callback=_context, metavar="JSON", help='Constants for all jobs: {"seller": 7}. No secrets.'),
    click.option(
        "--on-complete",
        help='A worker to call when the last job has ended: NAME or {"worker": NAME, "args": [...]}; or a webhook:'
        ' {"url": "https://..."}; or a JSON list of several.',
    ),
    click.option("--on-success", help="The same, if nothing failed or was cancelled."),
    click.option("--on-failure", help="The same, if anything failed or was cancelled."),
    click.option("--idempotency-key", help="Repeated submissions of the same key and list are one Task."),
    click.option("--unique", help="Fields in which no two rows may be equal, separated by commas."),
    click.option("--parent", type=TASK_ID, help="The new Task is a child of this one, which waits for it."),
    click.option("--strict", is_flag=True, help="One rejected row rejects the whole list."),
)


def _given(options: Mapping[str, Any], priority: str | None, line: str | None) -> dict[str, Any]:
    """The options of a submission, of the flags that were given."""
    given = {**options, "priority": None if priority is None else priority_value(priority), "session": line}
    return {name: value for name, value in given.items() if value is not None}


@click.command("submit", cls=Command)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True, path_type=Path))
@click.option("--worker", required=True, help="The worker that performs the rows.")
@click.option("--watch", "look_on", is_flag=True, help="Show it until it is done.")
@_timeout_option
@_reading_options
@_task_options
@click.option("--open", is_flag=True, default=None, help="asynctask add adds more rows, until asynctask seal.")
@click.option("--open-limit-s", type=float, metavar="SECONDS", help="Seal it after so long without an addition (86,400).")
@click.option("--chunk-size", help="Rows of one job, or auto: 1 up to 10,000 rows, then about 10,000 jobs.")
@click.option("--resubmit-of", type=TASK_ID, help="FILE is the corrected report of this Task: run its failed rows again.")
@click.option("--dry-run", is_flag=True, help="Only validate and report; nothing is written.")
@click.option(
    "--marked",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --dry-run: write the list to this workbook (.xlsx), with the cells marked that would be rejected.",
)
@pass_session
def submit(
    session: Session,
    /,
    file: Path,
    worker: str,
    look_on: bool,
    timeout: float | None,
    priority: str | None,
    line: str | None,
    dry_run: bool,
    marked: Path | None,
    **options: Any,
) -> int:
    """Submit a file of rows to a worker; - reads it from the standard input."""
    _refuse_alone(timeout, look_on)
    if marked is not None and not dry_run:
        raise click.UsageError("--marked is written by --dry-run: give both, or neither")
    app = session.app(required="submit needs the worker's code to validate the rows")
    given = _given(options, priority, line)
    is_input = str(file) == "-"
    name = os.fsencode(file.name).decode("utf-8", "replace")  # a name in another encoding is half text to Python
    given.setdefault("title", "standard input" if is_input else name)
    with nullcontext(sys.stdin.buffer) if is_input else file.open("rb") as stream:
        stored = app.uploads.store(stream, name, named=not is_input)
    try:
        if dry_run:
            return _print_dry_run(session, app.check_file(worker, stored, marked=marked, **given), app.config.locale)
        handle = app.submit_file(worker, stored, who=who(), **given)
    except InputError as error:
        from asynctask.lists.problems import localised

        raise localised(error, app.config.locale) from None
    if not look_on:
        return _print_submission(session, handle)
    session.out.problems(handle.problems)
    return _watch(session, handle, timeout)


@click.command("add", cls=Command)
@click.argument("task_id", type=TASK_ID)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True, path_type=Path))
@_reading_options
@click.option("--idempotency-key", help="The rows are added once, however often the command is repeated with this key.")
@pass_session
def add(session: Session, /, task_id: int, file: Path, **options: Any) -> int:
    """Add a file of rows to an open Task; - reads it from the standard input.

    At most 10,000 rows. Exit code 1 if any of them was rejected.
    """
    app = session.app(required="add needs the worker's code to validate the rows")
    with nullcontext(sys.stdin.buffer) if str(file) == "-" else file.open("rb") as stream:
        stored = app.uploads.store(stream, os.fsencode(file.name).decode("utf-8", "replace"), named=str(file) != "-")
    try:
        found = app.add_file(task_id, stored, who=who(), **options)
    except InputError as error:
        from asynctask.lists.problems import localised

        raise localised(error, app.config.locale) from None
    counts = {"first_row": found.first_row, "accepted": found.accepted, "rejected": found.rejected}
    session.out.document({**counts, "replayed": found.replayed, "errors": [each.as_dict() for each in found.problems]})
    before = " before" if found.replayed else ""
    session.out.line(f"Task {task_id}: {count(found.accepted, 'row')} added{before}, from row {found.first_row:,} on")
    if not found.rejected:
        return OK
    session.out.line(f"{count(found.rejected, 'row')} {'was' if found.rejected == 1 else 'were'} rejected:")
    session.out.problems(found.problems)
    return FAILURES


def _print_dry_run(session: Session, found: DryRun, locale: str, item: str = "row") -> int:
    """Prints the result of a dry run; 0 if every item would be accepted, 1 if some, 2 if none."""
    from asynctask.lists.problems import render

    out = session.out
    out.document(found.as_dict(locale))
    total = found.accepted + found.rejected
    taken = found.taken
    out.line(f"{number(taken)} of {count(total, item)} would be accepted; nothing was written")
    if found.rejected:
        out.line(f"{count(found.rejected, item)} would be rejected:")
        out.problems([replace(problem, message=render(problem, locale)) for problem in found.problems])
    return OK if not found.rejected else FAILURES if taken else USAGE


@click.command("export", cls=Command)
@click.argument("worker")
@click.option(
    "--shards", required=True, metavar="JSON", help="A list of shards as JSON, or the name of a file that holds one."
)
@click.option("--format", "form", default="csv", show_default=True, help="csv, csv.gz, ndjson, xlsx or parquet.")
@_task_options
@click.option("--dry-run", is_flag=True, help="Only check shards, format and options; nothing is written.")
@click.option("--watch", "look_on", is_flag=True, help="Show it until it is done, with a bar for the shards.")
@_timeout_option
@pass_session
def export(
    session: Session,
    /,
    worker: str,
    shards: str,
    form: str,
    look_on: bool,
    timeout: float | None,
    priority: str | None,
    line: str | None,
    dry_run: bool,
    **options: Any,
) -> int:
    """Export rows to one file, shard by shard.

    `asynctask result ID -o FILE` fetches the file once it is done.
    """
    _refuse_alone(timeout, look_on)
    app = session.app(required="export needs the worker's code")
    given = _given(options, priority, line)
    if dry_run:
        found = app.submit_export(worker, _listed(shards), format=form, dry_run=True, **given)
        return _print_dry_run(session, found, app.config.locale, "shard")
    handle = app.submit_export(worker, _listed(shards), format=form, who=who(), **given)
    if look_on:
        return _watch(session, handle, timeout)
    progress = handle.progress()
    session.out.document(progress)
    session.out.line(f"{headline(progress)}: {count(progress['counts']['total'], 'shard')} to export")
    return OK


def _listed(shards: str) -> list[Any]:
    """The shards of the command line. Raises :class:`InputError`."""
    text = shards if shards.lstrip().startswith("[") else _text_of(Path(shards))
    try:
        found = json.loads(text, object_pairs_hook=_each_once)
    except ValueError as error:
        raise InputError(f"--shards is no JSON: {error}", code="invalid_option") from None
    if not isinstance(found, list):
        raise InputError("--shards must be a list: each of its elements is one shard", code="invalid_option")
    return found


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--shards: {path} cannot be read: {error}", code="invalid_option") from None


@click.command("check-list", cls=Command, hidden=True)
@click.argument("answer", type=click.Path(dir_okay=False, path_type=Path))
@pass_session
def check_list(session: Session, answer: Path) -> int:
    """Check a stored list for the parent process, which names the list on stdin."""
    app = session.app(required="a list is checked by the application that took it")
    found = app.check_for_parent(json.load(sys.stdin))
    unfinished = answer.with_suffix(".part")
    unfinished.write_bytes(found)
    unfinished.replace(answer)
    return OK


def _print_submission(session: Session, handle: TaskHandle) -> int:
    """Waits until the list is split (a short one by a thread of this process) and prints the rejected rows."""
    out, pause = session.out, Event()
    while (progress := handle.progress())["split"]["state"] == "splitting" and not progress["done"]:
        pause.wait(_POLL_S)
    if (refused := handle.refusal()) is not None:  # the same error as when it is known at once
        from asynctask.lists.problems import localised

        raise localised(refused, session.app().config.locale)
    rejected, total = progress["split"]["rejected"], progress["counts"]["total"]
    problems = handle.problems
    if rejected and not problems:  # the validation went on
        problems = tuple(Problem(row["row"], **fault) for row in handle.rejects() for fault in row["errors"])
    found = [problem.as_dict() for problem in problems]
    out.document({**progress, "created": handle.created, "errors": found})
    out.line(f"{headline(progress)}: {count(total, 'row')} {'taken' if handle.created else 'taken before'}")
    if rejected:
        out.line(f"{count(rejected, 'row')} {'was' if rejected == 1 else 'were'} rejected and will not be performed:")
        out.problems(problems)
    if progress["split"]["state"] == "failed":
        out.line(_split_failure(progress), style="red")
        return FAILURES
    if not progress["done"] and (reason := why_still(session.app(), handle.id)):
        out.line(f"Nothing of it begins yet. {reason}")
    out.line(f"To watch it: asynctask watch {handle.id}")
    return OK


@click.command("perform", cls=Command)
@click.argument("worker")
@click.option("--args", "text", metavar="JSON", default="[]", show_default=True, help="The list of its arguments as JSON.")
@click.option("--in", "seconds", type=click.FloatRange(min=0), default=0, help="Start it so many seconds later.")
@pass_session
def perform(session: Session, worker: str, text: str, seconds: float) -> int:
    """Send one job to a worker, as worker.perform_async does; prints its id."""
    try:
        args = json.loads(text, object_pairs_hook=_each_once)
    except ValueError as error:
        raise click.BadParameter(f'--args is no JSON ({error}); write \'[{{"sku": "A-1"}}]\'') from None
    if not isinstance(args, list):
        raise click.BadParameter("--args must be a list: a job with one argument has a list of one")
    app = session.app(required="perform needs the worker's code")
    if (found := app.workers.get(worker)) is None:
        raise UnknownWorker(worker, app.workers)
    if (takes := found.unfit_for(len(args))) is not None:
        raise click.BadParameter(f"--args has {count(len(args), 'argument')}, and worker {worker!r} takes {takes}")
    try:
        job_id = found.perform_in(seconds, *args) if seconds else found.perform_async(*args)
    except TypeError as error:
        raise click.BadParameter(f"--args: {error}") from None
    session.out.document({"job_id": job_id})
    session.out.line("A client middleware stopped it" if job_id is None else f"Sent as {job_id}")
    return OK


COMMANDS: Final = (submit, add, export, perform, watch, check_list)
