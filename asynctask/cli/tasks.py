"""Commands to query and control Tasks and single jobs, and for their files."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from asynctask.cli.options import TASK_ID, Command, Session, next_page, pass_session, who
from asynctask.cli.output import (
    COUNTED,
    FAILURES,
    OK,
    Column,
    Output,
    RowsWritten,
    clean,
    count,
    headline,
    number,
    pace,
    said_by,
    state_of,
    summary,
)
from asynctask.cli.serve import address
from asynctask.cli.submit import print_refusal, priority_value, why_still
from asynctask.clock import SystemClock, read_rfc3339
from asynctask.config import socket_path
from asynctask.core.states import PROBLEM, State, Status
from asynctask.errors import InputError, UnknownWorker
from asynctask.ledger.progress import GROUPS
from asynctask.logs import escaped
from asynctask.operations import ACTIONS, Action, ToldEvent
from asynctask.task import VERBS, Verb, event_cursor

if TYPE_CHECKING:
    from asynctask.task import TaskHandle

_WIDE: Final = 120
"""Terminal columns that the full list of Tasks needs without breaking words."""
_ENDED: Final = ("finish", "failed", "error", "cancelled")
_FAILED: Final = tuple(sorted(status.value for status in PROBLEM))


@click.command("tasks", cls=Command)
@click.option("--group", type=click.Choice(GROUPS), help="Only Tasks that are not done, need a person, or are done.")
@click.option("--since", help="Only Tasks submitted at this time or later, such as 2026-12-01T08:00:00+01:00.")
@click.option("--state", type=click.Choice([state.value for state in State]), help="Only Tasks in this state.")
@click.option("--worker", help="Only Tasks of this worker.")
@click.option("--owner", help="Only Tasks of this owner.")
@click.option("--parent", type=TASK_ID, help="Only children of this Task.")
@click.option("--after", type=int, help="Continue after this Task, the last of the previous page.")
@click.option("--limit", type=click.IntRange(1, 200), default=20, show_default=True, help="At most this many Tasks.")
@pass_session
def tasks(session: Session, /, limit: int, since: str | None, **filters: Any) -> int:
    """List Tasks, newest first."""
    try:
        at = None if since is None else read_rfc3339(since)
    except ValueError as error:
        raise InputError(f"--since {error}", code="invalid_option") from None
    found = session.existing().tasks(limit=limit, since=at, **filters)
    session.out.document({"tasks": found})
    nothing = f"No Task found{_unknown(session, filters['worker'])}."
    if session.out.terminal and session.out.console.width < _WIDE:
        session.out.table(_NARROW, found, wraps="task", nothing=nothing)
    else:
        session.out.table(_COLUMNS, found, longest=40, nothing=nothing)
    if len(found) == limit:
        session.out.line(f"Older ones: {next_page(found[-1]['task_id'])}")
    return OK


def _counted(name: str) -> Column:
    return lambda task: number(task["counts"][name])


def _percent(task: Mapping[str, Any]) -> str:
    """The percent done, rounded down; empty while it is unknown."""
    percent = task["progress"]["percent"]
    return "" if percent is None else f"{percent:.2f}"


def _named(task: Mapping[str, Any]) -> str:
    """Worker and title, and why the Task is in its state."""
    title = f": {task['title']}" if task["title"] else ""
    return f"{task['worker']}{title}{state_of(task).removeprefix(str(task['state']))}"


_COLUMNS: Final[Mapping[str, Column]] = {
    "id": "task_id",
    "worker": "worker",
    "state": state_of,
    "percent": _percent,
    **{name: _counted(name) for name in ("total", *_ENDED)},
    "rejected": lambda task: number(task["split"]["rejected"]),
    "created": lambda task: str(task["created_at"])[:19].replace("T", " "),
    "title": "title",
}
_NARROW: Final[Mapping[str, Column]] = {
    "id": "task_id",
    "state": "state",
    "%": lambda task: _percent(task).partition(".")[0],
    "rows": _counted("total"),
    "not ok": lambda task: number(sum(task["counts"][name] for name in _ENDED[1:]) + task["split"]["rejected"]),
    "created": lambda task: str(task["created_at"])[5:16].replace("T", " "),
    "task": _named,
}
"""Those that fit 80 characters; the last wraps."""


def _unknown(session: Session, worker: str | None) -> str:
    """Says that the application has no worker of this name, if it has others."""
    app = session.app()
    if worker is None or not app.workers or worker in app.workers or worker in app.own_workers:
        return ""
    return f": {UnknownWorker(worker, app.workers)}"


@click.command("show", cls=Command)
@click.argument("task_id", type=TASK_ID)
@click.option("--failed", is_flag=True, help="Also the rows that ended failed or error, and their messages grouped.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="At most this many rows of --failed."
)
@click.option("--after", help="Continue after this row of --failed, as the previous page says.")
@pass_session
def show(session: Session, task_id: int, failed: bool, limit: int, after: str | None) -> int:
    """Show one Task as it is now."""
    handle = session.existing().task(task_id)
    progress = handle.progress()
    events = handle.events(_FAILED, after, limit) if failed else []
    if session.out.json:
        failures = {"error_groups": handle.error_groups(), "events": events} if failed else {}
        session.out.document({**progress, **failures, "refusal": handle.refusal_object(), "context": handle.context})
        return OK
    _print_task(session, progress, handle.context)
    print_refusal(session, handle)
    if reason := why_still(session.app(), task_id):
        session.out.line(clean(reason), style="yellow")
    if failed:
        _print_failures(session, progress, events, limit)
    return OK


def _print_task(session: Session, progress: Mapping[str, Any], context: Mapping[str, Any]) -> None:
    out, control, split = session.out, progress["control"], progress["split"]
    out.line(headline(progress), style="bold")
    out.line(f"{pace(progress)}: {summary(progress).plain}")
    out.line()
    planned = "an unknown number of rows" if split["planned"] is None else count(split["planned"], "row")
    out.fields(
        {
            "split": f"{split['state']}, {number(split['created'])} of {planned}",
            "parallel": control["parallel"] or "as many as the workers can",
            "interval": seconds_of(control["interval"]),
            "in flight": control["in_flight"],
            "priority": control["priority"],
            "tolerated failures": control["tolerated_failures"],
            "context": json.dumps(context, ensure_ascii=False) if context else None,
            "generation": progress["generation"],
            "created": progress["created_at"],
            "starts at": control["start_at"],
            "started": progress["started_at"],
            "finished": progress["finished_at"],
            "next retry": progress["next_retry_at"],
            "corrects rows of": progress["resubmit_of"] and f"Task {progress['resubmit_of']}",
            "corrected by": _corrected_by(progress),
            "child of": progress["parent"] and f"Task {progress['parent']}",
            "children": _children(progress),
        }
    )
    if progress["top_errors"]:
        out.line()
        out.table(COUNTED, progress["top_errors"])
    _print_retrying(out, progress)
    if progress["callbacks"]:
        out.line()
        columns = {"callback": "name", "worker": "worker", "status": "status", "job": "job_id"}
        out.table(columns, progress["callbacks"])


def _print_retrying(out: Output, progress: Mapping[str, Any]) -> None:
    if errors := progress["retrying_errors"]:
        out.line()
        out.line(f"{count(progress['retrying'], 'row')} {_verb(progress['retrying'])} for a retry. Their last errors:")
        out.table({"count": COUNTED["count"], "error": said_by, "job, for instance": "sample_job_id"}, errors)


def _verb(rows: int) -> str:
    return "waits" if rows == 1 else "wait"


def _corrected_by(progress: Mapping[str, Any]) -> str | None:
    if not progress["resubmitted_by"] and not progress["mended"]:
        return None
    named = ", ".join(f"Task {task_id}" for task_id in progress["resubmitted_by"]) or "Tasks that were removed"
    return f"{named}: {count(progress['mended'], 'row')} mended since"


def _children(progress: Mapping[str, Any]) -> str | None:
    if (below := progress["children"]) is None:
        return None
    counts = below["counts"]
    ended = ", ".join(f"{number(counts[name])} {name}" for name in _ENDED if counts[name])
    parts = (f"{count(below['count'], 'Task')}, {number(below['open'])} not done", count(counts["total"], "row"), ended)
    return f"{': '.join(part for part in parts if part)} (asynctask tasks --parent {progress['task_id']})"


def _print_failures(session: Session, progress: Mapping[str, Any], events: list[dict[str, Any]], limit: int) -> None:
    out = session.out
    out.line()
    nothing = "No row has failed." if progress["done"] else "No row has failed so far."
    out.table(_FAILURES, events, longest=100, nothing=nothing)
    if rejected := progress["split"]["rejected"]:
        out.line(f"{count(rejected, 'row')} more never became jobs (rejected): asynctask report {progress['task_id']}")
    if len(events) == limit:
        task_id = progress["task_id"]
        out.line(f"The next: {next_page(event_cursor(events[-1]))}")
        out.line(f"All of them: asynctask report {task_id} -o failed.xlsx")


def _last_message(event: Mapping[str, Any]) -> str:
    messages = event["messages"] or [{}]
    return str(messages[-1].get("message", ""))


_FAILURES: Final[Mapping[str, Column]] = {
    "job": "job_id", "row": "row", "status": "status", "attempt": "attempt", "message": _last_message, "item": "params",
}  # fmt: skip


def _knob(text: str) -> tuple[str, Any]:
    """The name and value of ``parallel=5``. Raises :class:`InputError`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{text!r} is no knob: write name=value, e.g. parallel=5", code="invalid_option")
    if name == "priority":
        return name, priority_value(value)
    nothing = ("none", "", "now") if name == "start_at" else ("none", "")
    return name, None if value.lower() in nothing and name != "title" else value


@click.command("set", cls=Command)
@click.argument("task_id", type=TASK_ID)
@click.argument("knobs", nargs=-1, required=True, metavar="NAME=VALUE...")
@pass_session
def set_knobs(session: Session, task_id: int, knobs: tuple[str, ...]) -> int:
    """Change the knobs of a Task while it runs.

    parallel=5 (or none), interval=1.5 (seconds from round to round, or 0), priority=120 (or ADMIN_HIGH),
    tolerated_failures=10 (or 5%, failed:10, error:5%, none), title=TEXT, start_at=2026-12-01T08:00:00+01:00 (or now).
    """
    from asynctask.lists.options import checked_knobs  # imports pydantic, which few commands need

    values = checked_knobs(dict(map(_knob, knobs)), as_text=True)
    progress = session.existing().task(task_id).update(who=who(), **values)
    session.out.document(progress)
    _print_control(session, progress)
    return OK


def _print_control(session: Session, progress: Mapping[str, Any]) -> None:
    control = progress["control"]
    parallel = control["parallel"] or "as many as the workers can"
    words = f"parallel {parallel}, interval {seconds_of(control['interval'])}, priority {control['priority']}"
    if (tolerated := control["tolerated_failures"]) is not None:
        words += f", tolerated failures {tolerated}"
    if (start := control["start_at"]) is not None:
        words += f", starts at {start}"
    session.out.line(f"{headline(progress)}: {words}")


def seconds_of(interval: float) -> str:
    """An interval as text."""
    return f"{interval:g} s" if interval else "none"


def _statuses(_context: click.Context, _option: click.Parameter, text: str) -> tuple[str, ...]:
    allowed = (Status.FAILED.value, Status.ERROR.value, Status.CANCELLED.value)
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    wrong = [part for part in found if part not in allowed]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r} cannot be retried; choose from {', '.join(allowed)}")
    return found


def _row_numbers(_context: click.Context, _option: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter("write numbers of rows with commas between: 5,8,13") from None


_RETRY_OPTIONS: Final = (
    click.Option(
        ["--status"], default="", callback=_statuses, help="Only rows with these statuses: failed,error,cancelled."
    ),
    click.Option(["--message"], help="Only failures of the group with this message."),
    click.Option(["--limit"], type=click.IntRange(1), help="At most this many rows, in the order of the list."),
    click.Option(["--only-rows"], callback=_row_numbers, help="Only rows with these numbers: 5,8,13; at most 200."),
)


def _verb_command(verb: Verb) -> Command:
    def act(session: Session, task_id: int, **how: Any) -> int:
        handle = session.existing().task(task_id)
        changed = verb.call(handle, who=who(), **how)
        progress = handle.progress()
        session.out.document({**progress, "changed": changed})
        words = verb.done if changed else f"nothing to do, it is {clean(progress['state'])}"
        session.out.line(f"{headline(progress)}: {words}: {summary(progress).plain}")
        return OK

    params = [click.Argument(["task_id"], type=TASK_ID), *(_RETRY_OPTIONS if verb.name == "retry" else ())]
    return Command(verb.name, params=params, callback=pass_session(act), help=f"{verb.title}.\n\n{verb.more}".strip())


# -- files: reports and templates

ROWS: Final = ("failed", "succeeded", "unprocessed", "rejected", "all")
_SUFFIXES: Final = (".xlsx", ".csv")
_output_option: Final = click.option(
    "-o", "--output", "path", required=True, type=click.Path(dir_okay=False, path_type=Path), help="FILE.xlsx or FILE.csv."
)


# -- single jobs


@click.command("jobs", cls=Command)
@click.option("--resumable", is_flag=True, help="The stopped jobs instead, those of Tasks too.")
@click.option("--worker", help="Only of this worker.")
@click.option("--status", default="", help="Only jobs with one of these statuses, separated by commas.")
@click.option("--after", type=click.IntRange(1), help="Continue after this id, as the previous page says.")
@click.option("--limit", type=click.IntRange(1, 1_000), default=20, show_default=True, help="At most this many entries.")
@pass_session
def jobs(session: Session, resumable: bool, worker: str | None, status: str, after: int | None, limit: int) -> int:
    """List the jobs without a Task, newest first, or those that are stopped."""
    statuses = tuple(part.strip() for part in status.split(",") if part.strip())
    found = session.existing().jobs(worker=worker, status=statuses, resumable=resumable, after=after, limit=limit)
    session.out.document({"jobs": found})
    nothing = ("No job is stopped" if resumable else "No job found") + f"{_unknown(session, worker)}."
    session.out.table(_JOBS, found, nothing=nothing)
    if len(found) == limit:
        session.out.line(f"The next: {next_page(found[-1]['id'])}")
    return OK


def _job_done(event: Mapping[str, Any]) -> str:
    """The reported progress of a job; empty without one."""
    done = event["progress"]
    if done is None:
        return ""
    return f"{done['done']:g}" if done["percent"] is None else f"{done['percent']:g} %"


_JOBS: Final[Mapping[str, Column]] = {
    "job": "job_id", "task": "task_id", "worker": "worker", "status": "status",
    "due": lambda event: str(event["due_at"] or "")[:19].replace("T", " "), "attempt": "attempt",
    "progress": _job_done, "message": _last_message,
}  # fmt: skip


@click.command("search", cls=Command)
@click.argument("text")
@click.option("--field", help="Only in this field of an item.")
@click.option("--worker", help="Only of this worker.")
@click.option("--owner", help="Only of this owner's Tasks.")
@click.option("--after", help="Continue after this place, as the previous page says.")
@click.option("--limit", type=click.IntRange(1, 1_000), default=20, show_default=True, help="At most this many entries.")
@pass_session
def search(session: Session, /, text: str, **filters: Any) -> int:
    """Find what happened to an item: jobs of all Tasks by the value of a field, newest first.

    TEXT is the whole value, without regard to case; with * at its end, the values that begin so. A worker names the fields
    that are searched, with its option search.
    """
    found = session.existing().search(text, **filters)
    session.out.document({"events": found.events, "after": found.after})
    nothing = f"Nothing found{_unknown(session, filters['worker'])}."
    if not any(each.search for each in session.app().workers.values()):
        nothing += " No worker names fields to search."
    session.out.table(_FOUND, found.events, longest=40, nothing=nothing)
    if found.after is not None:
        session.out.line(f"The next: {next_page(found.after)}")
    return OK


_FOUND: Final[Mapping[str, Column]] = {
    "value": "value", "field": "field", "task": "task_id", "title": "task_title", "row": "row", "worker": "worker",
    "status": "status", "message": _last_message, "job": "job_id",
}  # fmt: skip


_ATTEMPTS: Final[Mapping[str, Column]] = {"attempt": "attempt", "began": "at", "process": "process"}


@click.command("job", cls=Command)
@click.argument("job_id")
@pass_session
def job(session: Session, job_id: str) -> int:
    """Show one job: its record, and the traceback of its last error."""
    event = session.existing().operations.job(job_id)
    session.out.document(event)
    error = event["last_error"] or {}
    session.out.line(f"Job {clean(event['job_id'])} of {clean(event['worker'])}: {event['status']}", style="bold")
    session.out.fields(
        {
            "task": event["task_id"],
            "row": event["row"],
            "queue": event["queue"],
            "attempt": event["attempt"],
            "progress": _job_done(event) or None,
            "created": event["created_at"],
            "due": event["due_at"],
            "started": event["started_at"],
            "finished": event["finished_at"],
            "dismissed": "yes" if event["dismissed"] else None,
            "process": event["process"],
            "last message": _last_message(event),
            "last error": error.get("message"),
            "of process": error.get("process"),
            "failed before": event["previous_failed"],
            "failed next": event["next_failed"],
        }
    )
    if attempts := [each for each in event["messages"] if "process" in each]:
        session.out.line()
        session.out.table(_ATTEMPTS, attempts)
    if event["status"] in _FAILED and "restart" in event["actions"]:
        session.out.line(f"To run it again: asynctask restart {clean(event['job_id'])}")
    if event["traceback"] is not None:
        session.out.line()
        for line in event["traceback"].split("\n"):
            session.out.line(escaped(line))
    return OK


_JOB_VERBS: Final = ("stop", "start", "restart")
"""Those of one job that are commands of their own; the others are done to the list that the job is in."""


def _job_command(action: Action) -> Command:
    def tell(session: Session, job_id: str) -> int:
        event = action.call(session.existing().operations, job_id, None, who())
        session.out.document(event)
        done = _job_done(event)
        if action.answer is ToldEvent:
            words = clean(event["detail"]) if event["changed"] else f"nothing to do, {clean(event['detail'])}"
        else:
            words = action.done
        session.out.line(f"Job {event['job_id']}: {words}{f' (at {done})' if done else ''}.")
        return OK

    about = f"{action.title}. {action.more}"
    return Command(action.name, params=[click.Argument(["job_id"])], callback=pass_session(tell), help=about)


@click.command("link", cls=Command)
@click.argument("task_id", type=TASK_ID)
@click.option("--control", is_flag=True, help="Also to pause, resume, cancel and retry it, and to change its knobs.")
@click.option("--expires-in", type=float, default=86_400, show_default=True, help="Seconds for which it is valid.")
@click.option("--url", help="Where people reach the web server, with its prefix; default: its address on this machine.")
@pass_session
def link(session: Session, task_id: int, control: bool, expires_in: float, url: str | None) -> int:
    """Print a link to the page of one Task, for somebody without a login.

    It is signed with the setting link_secret.
    """
    app = session.existing()
    if url is None:
        host, port = session.setting(app.config, "host"), session.setting(app.config, "port")
        if socket_path(host) or not port:
            raise click.UsageError(
                "the web server has no address of its own in the settings: say where people reach it, --url"
            )
        url = address(host, port) + app.config.base_path
    text = app.link(task_id, ("read", "control") if control else ("read",), expires_in, who=who())
    page = f"{url.rstrip('/')}/tasks/{task_id}?link={text}"
    session.out.document({"task_id": task_id, "link": text, "url": page})
    session.out.line(clean(page))
    return OK


@click.command("report", cls=Command)
@click.argument("task_id", type=TASK_ID)
@_output_option
@click.option("--rows", type=click.Choice(ROWS), default="failed", show_default=True, help="Which rows to write.")
@click.option("--only-rows", callback=_row_numbers, help="Of these, only rows with these numbers: 5,8,13; at most 200.")
@pass_session
def report(session: Session, task_id: int, path: Path, rows: str, only_rows: tuple[int, ...] | None) -> int:
    """Write the rows that did not succeed to a file.

    Each has its original columns, its status and the reason, ready to be corrected and submitted again.
    """
    suffix = _suffix(path)
    handle = session.existing().task(task_id)
    written = _write_report(session.out, handle, path, suffix, {"rows": rows, "only_rows": only_rows})
    session.out.document({"task_id": task_id, "rows": rows, "written": written, "path": str(path.resolve())})
    session.out.line(f"{path}: {count(written, 'row')} ({rows})")
    return OK


def _write_report(out: Output, handle: TaskHandle, path: Path, suffix: str, which: Mapping[str, Any]) -> int:
    from asynctask.reports import files
    from asynctask.reports.report import rows_expected

    only = which["only_rows"]
    total = rows_expected(handle.progress(), which["rows"]) if only is None else len(only)
    with RowsWritten(out, SystemClock().monotonic, clean(path), total) as shown:
        content = handle.report(**which, alive=shown.show)
        counted = shown.counted(content.rows)
        with closing(content), _replace_atomically(path, suffix) as temporary:
            if suffix == ".xlsx":
                return files.write_xlsx(temporary, content.headers, counted, locale=content.locale)
            with temporary.open("wb") as stream:
                return files.write_csv(stream, content.headers, counted, locale=content.locale)


@click.command("result", cls=Command)
@click.argument("task_id", type=TASK_ID)
@_output_option
@pass_session
def result(session: Session, task_id: int, path: Path) -> int:
    """Write the file of a finished export.

    An existing file is replaced only when the new one is complete.
    """
    found = session.existing().result(task_id)
    manifest = found.manifest
    with _replace_atomically(path, path.suffix) as temporary, found.open() as body, temporary.open("wb") as out:
        shutil.copyfileobj(body, out, 1 << 20)
    session.out.document({**manifest, "task_id": task_id, "path": str(path.resolve())})
    missing = "; shards are missing in it" if manifest["partial"] else ""
    session.out.line(f"{path}: {count(manifest['rows'], 'row')} ({clean(manifest['format'])}){missing}")
    return FAILURES if manifest["partial"] else OK


@click.command("template", cls=Command)
@click.argument("worker")
@_output_option
@pass_session
def template(session: Session, worker: str, path: Path) -> int:
    """Write an empty sheet for a worker, to be filled in and submitted.

    A workbook has formats, lists to choose from and a page of help (in the language of --locale); CSV has the header alone.
    """
    from asynctask.reports.templates import make_template, template_csv, template_xlsx

    suffix = _suffix(path)
    app = session.app(required="a template shows what a worker of the application takes")
    if worker not in app.workers:
        raise UnknownWorker(worker, app.workers)
    found = make_template(app.workers[worker])
    with _replace_atomically(path, suffix) as temporary:
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
def _replace_atomically(path: Path, suffix: str) -> Iterator[Path]:
    """A temporary file that replaces ``path`` on success, so that a report is whole or absent."""
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


COMMANDS: Final = (
    tasks,
    show,
    set_knobs,
    *map(_verb_command, VERBS.values()),
    jobs,
    search,
    job,
    *(_job_command(action) for action in ACTIONS if action.on == "jobs" and action.name in _JOB_VERBS),
    link,
    report,
    result,
    template,
)
