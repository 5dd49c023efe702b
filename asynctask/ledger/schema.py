"""The schema's version: look at it, bring it up to date, refuse to work on another."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config as AlembicConfig
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from asynctask.errors import SchemaOutdated
from asynctask.ledger.database import Database

__all__ = ["check", "current", "ensure", "head", "migrations_folder", "upgrade"]


def migrations_folder() -> Path:
    """Where the migrations are: inside the installed package, or beside it in a checkout."""
    package = Path(str(resources.files("asynctask")))
    for folder in (package / "_migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise SchemaOutdated("the migrations are not installed with the package; install asynctask from its wheel")


def _config() -> AlembicConfig:
    config = AlembicConfig()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    return config


def head() -> str:
    """The revision that this version of the program needs."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    assert revision is not None
    return revision


def current(database: Database) -> str | None:
    """The revision that the database is at, None where it has none."""
    with database.read() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def upgrade(database: Database, revision: str = "head") -> str | None:
    """Brings the database to ``revision`` and returns the revision it is at then."""
    config = _config()
    with database.write() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    return current(database)


def downgrade(database: Database, revision: str) -> str | None:
    """Takes the database back to ``revision`` (``base``: nothing left) and returns the revision it is at then."""
    config = _config()
    with database.write() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, revision)
    return current(database)


def check(database: Database) -> None:
    """Raises :class:`SchemaOutdated`, with the command to run, unless the schema is the one that is needed."""
    at, needed = current(database), head()
    if at == needed:
        return
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    shown = database.url.render_as_string(hide_password=True)
    if at is not None and at not in known:
        raise SchemaOutdated(
            f"the database {shown} is at schema {at}, which this version does not know: install the newer asynctask"
        )
    raise SchemaOutdated(
        f"the database {shown} is at schema {at or 'none'}, this version needs {needed}: run `asynctask db upgrade`"
        " (with the same ASYNCTASK_DATABASE_URL or --database-url)"
    )


def ensure(database: Database) -> None:
    """Like :func:`check`, but an empty SQLite file is given the schema: the first start needs no command."""
    if database.is_sqlite and current(database) is None:
        with database.read() as connection:
            empty = not sa.inspect(connection).get_table_names()
        if empty:
            upgrade(database)
    check(database)
