"""Commands for operators: queues, history, retries, scheduled, dead, processes, schedules, rates, db, doctor, purge,
config, middleware."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import click

from asynctask.cli.options import Command, Group, Session, file_options, next_page, pass_session, who
from asynctask.cli.output import FAILURES, OK, Column, clean, count, number, said_by
from asynctask.cli.tasks import seconds_of
from asynctask.clock import SECOND, read_rfc3339
from asynctask.config import settings
from asynctask.database import schema
from asynctask.database.engine import Database, missing_file
from asynctask.errors import SchemaOutdated, UnknownWorker
from asynctask.ledger.history import STEPS, HistorySeries, Step
from asynctask.ledger.purge import ENDED, Purged
from asynctask.ledger.queries import SCANNED
from asynctask.middleware.tracker import TaskEventMiddleware
from asynctask.operations import (
    ACTIONS,
    FAILING,
    LISTS,
    MAX_TARGET_S,
    MIN_TARGET_S,
    TARGET_S,
    Action,
    ActionOutcome,
    Signalled,
)
from asynctask.worker import Worker

if TYPE_CHECKING:
    from asynctask.app import AsyncTask

_AGE: Final = re.compile(r"(\d{1,6})([dhms])")
_SECONDS: Final = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_TELL_S: Final = 2.0
_AFTER: Final = click.IntRange(0)
_LIMIT: Final = click.IntRange(1, 1_000)


class Listing(Group):
    """A group whose default command is ``list``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Inserts ``list`` before flags without a command."""
        flags = not args or args[0].startswith("-")
        if flags and not any(each in self.commands or each in ("-h", "--help") for each in args):
            args = ["list", *args]
        return super().parse_args(ctx, args)


def sure(session: Session, yes: bool, what: str) -> None:
    """Asks for confirmation of a deletion. Raises :class:`click.UsageError` without a terminal."""
    if yes:
        return
    if session.out.json or not sys.stdin.isatty():
        raise click.UsageError(f"{what} cannot be undone: say --yes if you mean it")
    click.confirm(f"{what[0].upper()}{what[1:]} cannot be undone. Go on?", abort=True, err=True)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _yes(command: _Function) -> _Function:
    return click.option("--yes", is_flag=True, help="Do not ask for confirmation.")(command)


def _page_options(command: _Function) -> _Function:
    command = click.option("--limit", type=_LIMIT, default=20, show_default=True, help="At most this many entries.")(
        command
    )
    return click.option("--after", type=_AFTER, default=0, help="Entries to skip, as the previous page says.")(command)


def _print_next(session: Session, found: Mapping[str, Any]) -> None:
    session.out.line(f"{number(found['total'])} in all.")
    if found["next"] is not None:
        session.out.line(f"The next: {next_page(found['next'])}")


def _short_time(text: Any) -> str:
    return str(text or "")[:19].replace("T", " ")


# -- queues

queues: Final = Listing("queues", help="Show queues and their jobs; pause and clear queues, delete jobs.")


@queues.command("list")
@click.option(
    "--target-s",
    type=click.FloatRange(MIN_TARGET_S, MAX_TARGET_S),
    default=TARGET_S,
    show_default=True,
    help="Seconds within which the wanted processes would finish the waiting jobs.",
)
@pass_session
def list_queues(session: Session, target_s: float) -> int:
    """List queues: how much waits, for how long, how many processes work them, and how many are wanted.

    Tracked jobs wait in the ledger, untracked ones there or in Redis ("in queue"). No process works a queue marked
    unattended, and the processes of a queue lack the workers of its jobs of others.
    """
    found = session.existing().operations.queues(target_s=target_s)
    session.out.document({"queues": found})
    session.out.table(_QUEUES, found, longest=60, nothing="No queue is there.")
    return OK


def _marks(queue: Mapping[str, Any]) -> str:
    marks = [word for word in ("paused", "unattended") if queue[word]]
    if queue["jobs_of_others"]:
        marks.append(f"{number(queue['jobs_of_others'])} jobs of others ({', '.join(queue['other_workers'])})")
    return ", ".join(marks)


_QUEUES: Final[Mapping[str, Column]] = {
    "queue": "name",
    "waiting": lambda queue: number(queue["waiting"]),
    "seconds": lambda queue: "" if queue["oldest_s"] is None else f"{queue['oldest_s']:.1f}",
    "in queue": lambda queue: number(queue["length"]),
    "processes": "processes",
    "wanted": "workers_wanted",
    "next worker": "next_worker",
    "": _marks,
}


@queues.command("jobs")
@click.argument("queue")
@click.option("--newest", is_flag=True, help="Begin with the last one pushed.")
@_page_options
@pass_session
def list_jobs(session: Session, queue: str, newest: bool, limit: int, after: int) -> int:
    """List the jobs of a queue, those next to run first."""
    found = session.existing().operations.jobs(queue, after=after, limit=limit, newest=newest)
    session.out.document(found)
    session.out.table(_QUEUED, found["jobs"], longest=60)
    _print_next(session, found)
    return OK


# -- history

_WIDTH: Final = 60
"""Bars of a sparkline."""

_BARS: Final = "▁▂▃▄▅▆▇█"


@click.command("history", cls=Command)
@click.option(
    "--since", default="1h", show_default=True, help="An age (7d, 12h, 30m, 45s) or a time (2026-11-21T05:00:00Z)."
)
@click.option("--until", help="The same; by default now.")
@click.option("--step", type=click.Choice(list(STEPS)), help="Of a point; by default the shortest with at most 500 points.")
@click.option("--queue", help="Only this queue.")
@click.option("--worker", help="Only this worker.")
@click.option("--by", type=click.Choice(["queue", "worker"]), default="queue", show_default=True, help="What has a line.")
@pass_session
def show_history(
    session: Session,
    since: str | None,
    until: str | None,
    step: Step | None,
    queue: str | None,
    worker: str | None,
    by: Literal["queue", "worker"],
) -> int:
    """Show what ended in the last hour, or in another span: the items by outcome, retries, and the run times.

    The bars show when they ended. "waiting" is the last known number of waiting jobs.
    """
    app = session.existing()
    begin, end = (_moment(app, name, text) for name, text in (("since", since), ("until", until)))
    found = app.history(begin, end, step=step, queue=queue, worker=worker, by=by)
    session.out.document(found)
    columns: dict[str, Column] = {by: "name", "ended": _bars, **{name: _of_total(name) for name in _COUNTED}}
    columns |= {"half within": _seconds("p50_s"), "95 % within": _seconds("p95_s")}
    columns |= {"waiting": _last_waiting} if by == "queue" and worker is None else {}
    session.out.line(f"{_short_time(found['since'])} to {_short_time(found['until'])} UTC:")
    session.out.table(columns, found["series"], longest=_WIDTH, nothing="Nothing has ended, and nothing waited.")
    if found["left_off"]:
        session.out.line(f"{number(found['left_off'])} more: choose a longer --step, or a --queue or --worker.")
    return OK


_COUNTED: Final = ("finish", "failed", "error", "retried")


def _moment(app: AsyncTask, name: str, text: str | None) -> datetime | None:
    """The time that an age or a time means."""
    if text is None:
        return None
    try:
        if found := _AGE.fullmatch(text.strip()):
            now = datetime.fromtimestamp(app.clock.now() / SECOND, UTC)
            return now - timedelta(seconds=int(found[1]) * _SECONDS[found[2]])
        return read_rfc3339(text.strip())
    except (ValueError, OverflowError):
        shown = clean(text, longest=40)
        raise click.BadParameter(
            f"{shown!r} is neither an age, such as 12h, nor a time, such as 2026-11-21T05:00:00Z", param_hint=f"--{name}"
        ) from None


def _bars(series: HistorySeries) -> str:
    """How many items ended in each part of the span."""
    ended = [sum(each) for each in zip(series["finish"], series["failed"], series["error"], strict=True)]
    size = -(-len(ended) // _WIDTH)
    parts = [sum(ended[place : place + size]) for place in range(0, len(ended), size)]
    most = max(parts) or 1
    return "".join(_BARS[-(-part * (len(_BARS) - 1) // most)] for part in parts)


def _of_total(name: str) -> Column:
    return lambda series: number(series["total"][name])


def _seconds(name: str) -> Column:
    return lambda series: "" if series["total"][name] is None else f"{series['total'][name]:g} s"


def _last_waiting(series: HistorySeries) -> str:
    known = [each for each in series["waiting"] if each is not None]
    return number(known[-1]) if known else ""


# -- retries, scheduled, dead


def _shown(entry: Mapping[str, Any]) -> str:
    if entry["raw"] is not None:
        return str(entry["raw"])
    return "(long)" if entry["args_cut"] else str(entry["args"])


_QUEUED: Final[Mapping[str, Column]] = {
    "key": "key", "worker": "worker", "task": "task_id", "pushed": lambda job: _short_time(job["enqueued_at"]),
    "arguments": _shown,
}  # fmt: skip
_ENTRIES: Final[Mapping[str, Column]] = {
    "key": "key", "worker": "worker", "queue": "queue", "task": "task_id", "retries": "retries",
    "at": lambda entry: _short_time(entry["at"]), "arguments": _shown, "error": "error",
}  # fmt: skip


def _list_group(name: str) -> Listing:
    its = LISTS[name]
    group = Listing(name, help=f"Show {its.jobs}; restart or delete them.")

    @group.command("list", help=f"List {its.jobs}, {its.first} first.")
    @_page_options
    @pass_session
    def listed(session: Session, limit: int, after: int) -> int:
        found = session.existing().operations.listed(name, after=after, limit=limit)
        session.out.document(found)
        if found["entries"]:
            session.out.table(_ENTRIES, found["entries"], longest=60)
        _print_next(session, found)
        return OK

    @group.command("search", help=f"Find {its.jobs} that contain a text (case-sensitive).")
    @click.argument("text")
    @click.option("--limit", type=_LIMIT, default=20, show_default=True, help="At most this many entries.")
    @pass_session
    def search(session: Session, text: str, limit: int) -> int:
        found = session.existing().operations.search(name, text, limit=limit)
        session.out.document(found)
        session.out.table(_ENTRIES, found["entries"], longest=60, nothing="Nothing is found.")
        if not found["complete"]:
            session.out.line("There may be more: search for more letters, or raise --limit.")
        return OK

    if name in FAILING:
        _add_templates(group, name)
    return group


def _add_templates(group: Listing, name: str) -> None:
    @group.command("templates", help=f"Group {LISTS[name].jobs} by the templates of their errors, of all Tasks.")
    @pass_session
    def templates(session: Session) -> int:
        found = session.existing().operations.templates(name)
        session.out.document(found)
        session.out.table(_TEMPLATES, found["templates"], longest=60)
        session.out.line(f"{count(found['jobs'], 'job')} of {count(len(found['templates']), 'template')}.")
        if not found["complete"]:
            session.out.line("There may be more: only the newest are grouped.")
        return OK


def _some(names: Sequence[Any], total: int) -> str:
    return ", ".join(map(str, names[:3])) + (f" and {number(total - 3)} more" if total > 3 else "")


_TEMPLATES: Final[Mapping[str, Column]] = {
    "template": "id",
    "jobs": lambda each: number(each["count"]),
    "last hour": lambda each: number(each["hours"][-1]),
    "first": lambda each: _short_time(each["first_at"]),
    "last": lambda each: _short_time(each["last_at"]),
    "tasks": lambda each: _some(each["tasks"], each["task_count"]),
    "workers": lambda each: ", ".join(each["workers"]),
    "error": said_by,
}


# -- processes

processes: Final = Listing("processes", help="Show running processes; make worker processes take no more jobs, or stop.")


def _standing(process: Mapping[str, Any]) -> str:
    if process["held_s"] is not None:
        return f"held: no answer for {process['held_s']:.0f} s"
    return "quiet" if process["quiet"] else "" if process["alive"] else "lost"


_PROCESSES: Final[Mapping[str, Column]] = {
    "process": "identity",
    "kind": "kind",
    "busy": lambda process: f"{process['busy']}/{process['concurrency']}",
    "memory": lambda process: "" if process["rss"] is None else f"{process['rss'] / 1_048_576:.0f} MB",
    "version": "version",
    "started": lambda process: _short_time(process["started_at"]),
    "queues": lambda process: ", ".join(process["queues"]),
    "": _standing,
}


@processes.command("list")
@click.option("--check", is_flag=True, help="A probe: exit code 1 unless a worker process of this machine answers.")
@pass_session
def list_processes(session: Session, check: bool) -> int:
    """List running processes; with Redis also those of Sidekiq."""
    app = session.existing()
    found = app.operations.processes()
    session.out.document({"processes": found})
    session.out.table(_PROCESSES, found, longest=60, nothing="No process is there.")
    here = [each for each in found if each["concurrency"] and each["hostname"] == app.host.name]
    return FAILURES if check and not any(each["alive"] and each["held_s"] is None for each in here) else OK


# -- what people do about it


def _refuse_unclear(of: str, keys: Sequence[str], everything: bool, template: str | None, first: int | None) -> None:
    if [bool(keys), everything, template is not None].count(True) != 1:
        raise click.UsageError(f"name the jobs by their keys, or say --all{' or --template' if of in FAILING else ''}")
    if first is not None and template is None:
        raise click.UsageError("--first goes with --template")


def _jobs_of(of: str, template: str | None) -> str:
    return LISTS[of].jobs if template is None else f"{LISTS[of].jobs}, of the template {clean(template)}"


def _tell(session: Session, action: Action, of: str, answer: Any) -> int:
    session.out.document(answer)
    if action.answer is ActionOutcome:
        session.out.line(f"{count(answer['done'], 'job')} {action.done}.")
        if answer["skipped"]:
            session.out.table({"key": "key", "not done, because": "reason"}, answer["skipped"])
            return FAILURES
    elif action.answer is Signalled:
        session.out.line(f"{clean(of)} is told to {action.done}, at its next heartbeat.")
    elif answer["changed"]:
        session.out.line(f"{clean(of)} is {action.done}.")
    else:
        session.out.line(f"Nothing to do: {clean(of)} is {action.done} already.")
    return OK


def _action_command(action: Action) -> Command:
    of_list = action.on in LISTS

    def act(
        session: Session,
        of: str = action.on,
        keys: tuple[str, ...] = (),
        everything: bool = False,
        yes: bool = False,
        template: str | None = None,
        first: int | None = None,
    ) -> int:
        if of_list:
            _refuse_unclear(of, keys, everything, template, first)
        if action.asks and (everything or template or not of_list):
            sure(session, yes, action.asks.format(_jobs_of(of, template) if of_list else clean(of)))
        operations = session.existing().operations
        if template is None:
            answer = action.call(operations, of, keys or None, who())
        else:
            answer = operations.act_on_template(of, action.name, template, first=first, who=who()).as_dict()
        return _tell(session, action, of, answer)

    params: list[click.Parameter] = []
    if not of_list:
        params.append(click.Argument(["of"], metavar={"queues": "QUEUE", "processes": "IDENTITY"}[action.on]))
    if action.takes_keys:
        metavar = "[KEY]..." if of_list else "KEY..."
        params.append(click.Argument(["keys"], nargs=-1, required=not of_list, metavar=metavar))
    if of_list:
        params.append(click.Option(["--all", "everything"], is_flag=True, help="All of the list, as it is now."))
    if action.on in FAILING:
        params.append(click.Option(["--template"], metavar="ID", help="Those of a template, as `templates` lists them."))
        params.append(click.Option(["--first"], type=click.IntRange(1, SCANNED), help="At most so many of a template."))
    if of_list or action.asks:
        params.append(click.Option(["--yes"], is_flag=True, help="Do not ask for confirmation."))
    title = action.title.format(LISTS[action.on].jobs if of_list else "")
    about = f"{title}. {action.more}".strip()
    return Command(action.name, params=params, callback=pass_session(act), help=about)


GROUPS: Final = {"queues": queues, **{name: _list_group(name) for name in LISTS}, "processes": processes}

for _action in ACTIONS:
    if _action.on in GROUPS:
        GROUPS[_action.on].add_command(_action_command(_action))


# -- schedules

schedules: Final = Listing("schedules", help="Show schedules of periodic tasks; run, switch or remove one.")


@schedules.command("list")
@pass_session
def list_schedules(session: Session) -> int:
    """List schedules: when each ticks next, its last Task, and how many ticks were skipped and why the last one was.

    No running process declares a schedule marked "not declared".
    """
    found = session.existing().schedules.all()
    session.out.document({"schedules": found})
    session.out.table(_SCHEDULES, found, longest=60, nothing="No schedule is there.")
    return OK


def _interval(schedule: Mapping[str, Any]) -> str:
    text = str(schedule["schedule"])
    return f"{text} s" if " " not in text and text[0].isdigit() else f"{text} ({schedule['timezone']})"


def _marks_of(schedule: Mapping[str, Any]) -> str:
    marks = [] if schedule["enabled"] else ["off"]
    marks += [] if schedule["declared"] else ["not declared"]
    if schedule["skipped"]:
        marks.append(f"{number(schedule['skipped'])} skipped ({schedule['skip_reason']})")
    return ", ".join([*marks, *([str(schedule["error"])] if schedule["error"] else [])])


_SCHEDULES: Final[Mapping[str, Column]] = {
    "schedule": "name",
    "worker": "worker",
    "every": _interval,
    "next": lambda schedule: _short_time(schedule["next_at"]),
    "last": lambda schedule: _short_time(schedule["last_at"]),
    "task": "last_task_id",
    "": _marks_of,
}


@schedules.command("run")
@click.argument("name")
@pass_session
def run_schedule(session: Session, name: str) -> int:
    """Submit a Task of a schedule now; its next tick stays."""
    session.app(required="schedules are declared in an application")
    handle = session.existing().schedules.run(name, who=who())
    session.out.document({"name": name, "task_id": handle.id})
    session.out.line(f"Task {handle.id} is submitted. To follow it: asynctask watch {handle.id}")
    return OK


def _switch(session: Session, name: str, enabled: bool) -> int:
    found = session.existing().schedules
    changed, word = found.switch(name, enabled), "on" if enabled else "off"
    session.out.document({**found.find(name), "changed": changed})
    session.out.line(
        f"{clean(name)} is switched {word}." if changed else f"Nothing to do: {clean(name)} is {word} already."
    )
    return OK


@schedules.command("off")
@click.argument("name")
@pass_session
def switch_off(session: Session, name: str) -> int:
    """Switch a schedule off, until it is switched on; open Tasks of it go on."""
    return _switch(session, name, False)


@schedules.command("on")
@click.argument("name")
@pass_session
def switch_on(session: Session, name: str) -> int:
    """Switch a schedule on again. Ticks while it was off are not made up for."""
    return _switch(session, name, True)


@schedules.command("remove")
@click.argument("name")
@pass_session
def remove_schedule(session: Session, name: str) -> int:
    """Remove a schedule that no process declares any more; its Tasks stay."""
    session.existing().schedules.remove(name)
    session.out.document({"name": name, "removed": True})
    session.out.line(f"{clean(name)} is removed.")
    return OK


# -- rate limits

rates: Final = Listing("rates", help="Show the rate limits of workers; set a rate.")


@rates.command("list")
@pass_session
def list_rates(session: Session) -> int:
    """List the rate limits: the rate, that in the code, the workers, and when a limit permits the next start."""
    found = session.existing().rates.all()
    session.out.document({"rates": found})
    session.out.table(_RATES, found, longest=60, nothing="No worker has a rate limit.")
    return OK


_RATES: Final[Mapping[str, Column]] = {
    "limit": "name",
    "rate": "rate",
    "in the code": "declared",
    "workers": lambda limit: ", ".join(limit["workers"]),
    "next start": lambda limit: _short_time(limit["next_at"]) or "now",
}


@rates.command("set")
@click.argument("name")
@click.argument("rate")
@pass_session
def set_rate(session: Session, name: str, rate: str) -> int:
    """Set the RATE of a limit, such as 5/s, 300/min, 1000/h or 0.5/s, in all processes at once.

    It stays until the code declares another rate than it does now.
    """
    found = session.existing().rates.set(name, rate)
    session.out.document(found)
    session.out.line(f"{clean(name)} permits {found['rate']}.")
    return OK


# -- db, doctor, config, middleware


@contextmanager
def _database(session: Session) -> Iterator[Database]:
    """The database alone: an application refuses one with another schema."""
    config = session.app().config if session.target else session.config()[0]
    database = Database(config.database_url, pool_size=config.database_connections)
    try:
        yield database
    finally:
        database.close()


db = Group("db", help="The database's schema.")


@click.command("upgrade", cls=Command)
@pass_session
def upgrade(session: Session) -> int:
    """Upgrade the schema; the data is kept."""
    with _database(session) as database:
        before = schema.current(database)
        after = schema.upgrade(database)
    go_on = before is None or schema.processes_go_on(before)
    session.out.document({"from": before, "to": after, "changed": before != after, "processes_go_on": go_on})
    session.out.line(f"the schema is at {after}" + ("" if before == after else f" (it was at {before or 'none'})"))
    if not go_on:
        session.out.line("Processes that were started before do not know it: stop those that still run.")
    return OK


@click.command("check", cls=Command)
@pass_session
def check(session: Session) -> int:
    """Check whether the schema is the one that this version needs.

    Exit code 3 if it is not.
    """
    with _database(session) as database:
        if (path := missing_file(database.absolute_url)) is not None:  # a look makes none
            raise SchemaOutdated(
                f"there is no database {path}: run `asynctask db upgrade` to make it, or name another with --database-url"
                " (ASYNCTASK_DATABASE_URL)"
            )
        schema.check(database)
    session.out.document({"at": schema.head(), "ok": True})
    session.out.line(f"the schema is at {schema.head()}, as this version needs it")
    return OK


db.add_command(upgrade)
db.add_command(check)


@click.command("doctor", cls=Command)
@click.option("--repair", is_flag=True, help="Repair what is found.")
@pass_session
def doctor(session: Session, repair: bool) -> int:
    """Check that all counts equal their rows, and that every open row is held once or can be reached.

    Exit code 1 if a finding remains.
    """
    findings = session.existing().doctor(repair=repair, who=who())
    rows = [
        {"task_id": each.task_id, "code": each.code, "message": each.message, "repaired": each.repaired}
        for each in findings
    ]
    session.out.document({"findings": rows})
    columns: dict[str, Column] = {"task": "task_id", "code": "code", "finding": "message"}
    columns["repaired"] = lambda row: "yes" if row["repaired"] else "no"
    session.out.table(columns, rows, nothing="Nothing is wrong: every count equals its rows.")
    if all(row["repaired"] for row in rows):
        return OK
    if not repair:
        session.out.line("To repair it: asynctask doctor --repair")
    return FAILURES


def _age(_context: click.Context, _option: click.Parameter, text: str) -> float:
    """The seconds of ``90d``, ``12h``, ``30m`` or ``45s``."""
    found = _AGE.fullmatch(text.strip())
    if found is None:
        raise click.BadParameter(f"{clean(text, longest=40)!r} is no age: write a number with d, h, m or s, e.g. 90d")
    return int(found[1]) * _SECONDS[found[2]]


@click.command("purge", cls=Command)
@click.option("--older-than", "age", required=True, callback=_age, help="Only what ended longer ago: 90d, 12h, 30m, 45s.")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([state.value for state in ENDED]),
    help="Only Tasks in this state; repeatable.",
)
@click.option("--owner", help="Only Tasks of this owner.")
@click.option("--dry-run", is_flag=True, help="Only count.")
@_yes
@pass_session
def purge(session: Session, age: float, states: tuple[str, ...], owner: str | None, dry_run: bool, yes: bool) -> int:
    """Remove Tasks that ended long ago, with their rows, reports and uploaded files.

    Without --state and --owner, jobs without a Task are removed, too. Files are removed from --data-dir of this machine. An
    interrupted purge is continued by the next.
    """
    app = session.existing()
    if not dry_run:
        sure(session, yes, "purging")
    told = app.clock.monotonic()

    def tell(removed: Purged) -> None:
        nonlocal told
        if app.clock.monotonic() - told >= _TELL_S:
            told = app.clock.monotonic()
            session.out.note(f"removed so far: {_amount(removed)}")

    found = app.purge(age, states=states, owner=owner, dry_run=dry_run, on_slice=tell)
    session.out.document({**found.as_json(), "dry_run": dry_run})
    session.out.line(f"{'Would remove' if dry_run else 'Removed'}: {_amount(found)}.")
    return OK


def _amount(found: Purged) -> str:
    return (
        f"{count(found.tasks, 'Task')} ({count(found.events, 'item')}, {count(found.rejects, 'rejected row')},"
        f" {count(found.files, 'file')}), {count(found.jobs, 'job')} without a Task"
    )


@click.command("config", cls=Command)
@file_options
@pass_session
def config(session: Session, config_file: str | None, environment: str | None) -> int:
    """Print every setting with its origin.

    The origin is default, environment, flag, file (of -C), or argument (the application's code).
    """
    session.take_file(config_file, environment)
    if session.target:
        app = session.app()
        found = settings(app.config, app.origins)
        # Flags reach an application through the environment, which is not where the user wrote them.
        found = [replace(each, origin=session.origin(each.name) or each.origin) for each in found]
    else:
        found = settings(*session.config())
    rows = [{"name": s.name, "value": s.shown, "origin": s.origin, "env": s.env, "help": s.help} for s in found]
    session.out.document({"settings": rows})
    session.out.table({"setting": "name", "value": "value", "origin": "origin", "environment": "env"}, rows)
    return OK


middleware = Group("middleware", help="The middleware of the application.")


@click.command("list", cls=Command)
@pass_session
def list_middleware(session: Session) -> int:
    """Print the chains around a push and around a job, outermost first."""
    app = session.app(required="the chains belong to an application")
    # The runtime puts the recording middleware nearest to the job.
    server = [*app.server_middleware.names(), TaskEventMiddleware.__qualname__]
    chains = {"client": app.client_middleware.names(), "server": server}
    session.out.document(chains)
    rows = [(side, n, name) for side, names in chains.items() for n, name in enumerate(names, start=1)]
    session.out.table({"side": 0, "order": 1, "middleware": 2}, rows)
    return OK


middleware.add_command(list_middleware)


@click.command("workers", cls=Command)
@click.argument("name", required=False)
@pass_session
def workers(session: Session, name: str | None) -> int:
    """Show the workers of the application, or one with the fields of its items.

    Retries and time limits of an engine's worker are options of that engine.
    """
    registered = session.app(required="workers belong to an application").workers
    if name is not None and name not in registered:
        raise UnknownWorker(name, registered)
    if name is not None:
        session.out.document(registered[name].as_dict())
        _print_worker(session, registered[name])
        return OK
    found = [registered[each] for each in sorted(registered)]
    session.out.document({"workers": [each.as_dict() for each in found]})
    rows = [{"worker": w.name, **_options_of(w), "items": _items_of(w), "about": w.doc} for w in found]
    columns = ("worker", "engine", "queue", "retries", "priority", "timeout", "rate", "items", "about")
    session.out.table({c: c for c in columns}, rows, longest=60, nothing="The application has no workers.")
    return OK


def _options_of(worker: Worker) -> dict[str, str]:
    theirs = "" if worker.engine is None else "the engine's"
    return {
        "engine": worker.engine or "",
        "queue": worker.queue,
        "retries": theirs or str(worker.max_retries),
        "priority": str(worker.priority),
        "timeout": theirs or seconds_of(worker.timeout or 0),
        "rate": "" if worker.rate is None else worker.rate + (f" ({worker.limit})" if worker.limit else ""),
    }


def _items_of(worker: Worker) -> str:
    """The fields of its items, optional ones in brackets."""
    if worker.model is None:
        return "any"
    return ", ".join(each["name"] if each["required"] else f"[{each['name']}]" for each in worker.as_dict()["fields"])


def _print_worker(session: Session, worker: Worker) -> None:
    session.out.line(clean(worker.name) + (f": {clean(worker.doc)}" if worker.doc else ""), style="bold")
    session.out.fields({name: value or None for name, value in _options_of(worker).items()})
    session.out.line()
    if worker.model is None:
        session.out.line("An item is any object.")
        return
    columns: dict[str, Column] = {"field": "name", "column of a sheet": "title"}
    columns |= {"required": lambda field: "yes" if field["required"] else "no", "about": "description"}
    session.out.table(columns, worker.as_dict()["fields"])


COMMANDS: Final[tuple[click.Command, ...]] = (
    *GROUPS.values(),
    show_history,
    schedules,
    rates,
    db,
    doctor,
    purge,
    config,
    middleware,
    workers,
)
