"""What operators ask for: db, doctor, config, middleware."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import click

from asynctask.cli.options import Command, Group, Session, file_options, pass_session
from asynctask.cli.output import FAILURES, OK, clean
from asynctask.config import settings
from asynctask.database import schema
from asynctask.database.engine import Database
from asynctask.middleware.task_event import TaskEventMiddleware

__all__ = ["COMMANDS"]


@contextmanager
def _database(session: Session) -> Iterator[Database]:
    """The database alone: an application refuses to look at one whose schema is not its own."""
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
    """Bring the schema up to date; what is there is kept."""
    with _database(session) as database:
        before = schema.current(database)
        after = schema.upgrade(database)
    session.out.document({"from": before, "to": after, "changed": before != after})
    session.out.line(f"the schema is at {after}" + ("" if before == after else f" (it was at {before or 'none'})"))
    return OK


@click.command("check", cls=Command)
@pass_session
def check(session: Session) -> int:
    """Say whether the schema is the one that is needed.

    Exit code 3 if it is not.
    """
    with _database(session) as database:
        schema.check(database)
    session.out.document({"at": schema.head(), "ok": True})
    session.out.line(f"the schema is at {schema.head()}, as this version needs it")
    return OK


db.add_command(upgrade)
db.add_command(check)


@click.command("doctor", cls=Command)
@click.option("--repair", is_flag=True, help="Put right what is found.")
@pass_session
def doctor(session: Session, repair: bool) -> int:
    """Prove that all counts equal what the rows say.

    Exit code 1 for a finding that stays.
    """
    findings = session.existing().doctor(repair=repair)
    rows = [(each.task_id, each.code, each.message, each.repaired) for each in findings]
    session.out.document(
        {"findings": [dict(zip(("task_id", "code", "message", "repaired"), row, strict=True)) for row in rows]}
    )
    if not rows:
        session.out.line("Nothing is wrong: every count equals its rows.")
        return OK
    session.out.table(("task", "code", "finding", "repaired"), [(*row[:3], "yes" if row[3] else "no") for row in rows])
    if all(row[3] for row in rows):
        return OK
    if not repair:
        session.out.line("To put it right: asynctask doctor --repair")
    return FAILURES


@click.command("config", cls=Command)
@file_options
@pass_session
def config(session: Session, config_file: str | None, environment: str | None) -> int:
    """Print every setting with its origin.

    That is default, environment, flag, file (of -C), or argument (the application's own code).
    """
    session.take_file(config_file, environment)
    if session.target:
        app = session.app()
        found = settings(app.config, app.origins)
        # The flags reach an application through the environment, which is not where the person wrote them.
        found = [replace(each, origin=session.origin(each.name) or each.origin) for each in found]
    else:
        found = settings(*session.config())
    session.out.document(
        {"settings": [{"name": s.name, "value": s.shown, "origin": s.origin, "env": s.env, "help": s.help} for s in found]}
    )
    session.out.table(("setting", "value", "origin", "environment"), [(s.name, s.shown, s.origin, s.env) for s in found])
    return OK


middleware = Group("middleware", help="What wraps the jobs of the application.")


@click.command("list", cls=Command)
@pass_session
def list_middleware(session: Session) -> int:
    """Print the chains around a push and around a performance, outermost first."""
    app = session.app(required="the chains belong to an application")
    # The runtime puts the one that records nearest to the job, whatever else is there.
    server = [*app.server_middleware.names(), TaskEventMiddleware.__qualname__]
    chains = {"client": app.client_middleware.names(), "server": server}
    session.out.document(chains)
    session.out.table(
        ("side", "order", "middleware"),
        [(side, n, clean(name)) for side, names in chains.items() for n, name in enumerate(names, start=1)],
    )
    return OK


middleware.add_command(list_middleware)

COMMANDS: Final = (db, doctor, config, middleware)
