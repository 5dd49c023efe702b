"""The schema's version: reads it, migrates it, and refuses another version or an unsupported server.

Alembic is imported only to change the schema, not to compare versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from asynctask.database.engine import Database
from asynctask.database.tables import metadata
from asynctask.errors import ConfigError, LedgerUnavailable, SchemaOutdated

if TYPE_CHECKING:
    from alembic.config import Config as AlembicConfig

OLDEST: Final = {"postgresql": (12,), "mariadb": (10, 6)}
"""The oldest supported servers: they have SKIP LOCKED, and MariaDB has atomic DDL and RETURNING."""

_HEAD: Final = "0028"
_MERGED: Final = {"0003": "0002"}
"""Revisions whose migration is part of a later one, each with the revision from which that starts. 0.1.0 is at 0003, which
set the fillfactor of ``events`` on PostgreSQL; 0016 sets it, too."""

_UNRELEASED: Final = frozenset(f"{number:04}" for number in range(4, 16))
"""Revisions between 0.1.0 and 0016, which were in checkouts only."""

_VERSION_TABLE: Final = "alembic_version"
# All columns, because the table of another program may have others.
_VERSION: Final = sa.select(sa.text("*")).select_from(sa.table(_VERSION_TABLE))
_STAMP: Final = sa.update(sa.table(_VERSION_TABLE, sa.column("version_num")))
_LOCK_KEY: Final = 7_276_410_358_002_177
"""The advisory lock for changes of a PostgreSQL schema: an arbitrary number, the same in every version."""

_LOCK_S: Final = 60
_OWN_DATABASE: Final = "give asynctask a database of its own, and run `asynctask db upgrade` on it"
_UNMISTAKABLE: Final = frozenset({"events", "task_tallies"})
"""Tables that every revision has; an interrupted downgrade leaves one of them."""


def migrations_folder() -> Path:
    """The folder of the migrations: in the installed package, or in a checkout beside it."""
    package = Path(str(resources.files("asynctask")))
    for folder in (package / "_migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise SchemaOutdated("the migrations are not installed with the package; install asynctask from its wheel")


def _config() -> AlembicConfig:
    from alembic.config import Config as AlembicConfig

    config = AlembicConfig()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    return config


def head() -> str:
    """The revision that this version needs: the newest migration."""
    return _HEAD


def current(database: Database) -> str | None:
    """The revision of the database; None if it has none.

    Raises :class:`ConfigError` for a server that is too old, :class:`SchemaOutdated` for the tables of another program.
    """
    check_server(database)
    with database.read() as connection:
        return _revision(connection, database)


def _revision(connection: Connection, database: Database) -> str | None:
    """The revision, only if :mod:`migrations` wrote it: databases of other programs may have Alembic's table, too, and
    revisions of the same names."""
    names = set(sa.inspect(connection).get_table_names())
    ours = sorted(names & set(metadata.tables))
    if _VERSION_TABLE not in names:  # an interrupted migration has left one
        if ours:
            raise SchemaOutdated(
                f"the database {_shown(database)} has tables of its own named {', '.join(ours)}: {_OWN_DATABASE}"
            )
        return None
    found = connection.execute(_VERSION).mappings().all()
    revisions = [each.get("version_num") for each in found]
    if len(revisions) > 1 or None in revisions or (revisions and names.isdisjoint(_UNMISTAKABLE)):
        raise SchemaOutdated(
            f"the database {_shown(database)} has a table {_VERSION_TABLE} of another program: {_OWN_DATABASE}"
        )
    return str(revisions[0]) if revisions else None


def check_server(database: Database) -> None:
    """Raises :class:`ConfigError` for a server that is not supported, or has a wrong setting that no session can change."""
    if database.is_sqlite:
        return
    try:
        with database.read() as connection:
            found, fault = _version(connection), _fault(connection)
    except exc.InvalidRequestError as error:  # the dialect's check of the first connection
        if "MariaDB" not in str(error):
            raise
        raise ConfigError(
            "the server behind mysql:// is MySQL, which is not supported; use MariaDB 10.6 or later, or PostgreSQL"
        ) from error
    oldest = OLDEST[database.dialect]
    if found < oldest:
        name = {"postgresql": "PostgreSQL", "mariadb": "MariaDB"}[database.dialect]
        said, needed = ".".join(map(str, found)), ".".join(map(str, oldest))
        raise ConfigError(f"the server is {name} {said}, and {name} {needed} or later is needed: upgrade the server")
    if fault:
        raise ConfigError(fault)


def _fault(connection: Connection) -> str:
    """A setting of the server under which the program cannot work, with the remedy; empty if there is none."""
    if connection.dialect.name == "mariadb":
        row = connection.exec_driver_sql("SELECT @@log_bin, @@binlog_format").one()
        if row[0] and row[1] == "STATEMENT":
            return "the server's binlog_format is STATEMENT, which refuses READ COMMITTED: set it to MIXED or ROW"
        return ""
    encoding, place = connection.exec_driver_sql("SELECT current_setting('server_encoding'), current_schema()").one()
    if encoding != "UTF8":
        return f"the encoding of the database is {encoding}: make one with CREATE DATABASE ... ENCODING 'UTF8'"
    if place is None:
        return (
            "no schema of the search_path exists, so there is no place for tables: CREATE SCHEMA, or"
            " ALTER ROLE ... SET search_path = public"
        )
    return ""


def _version(connection: Connection) -> tuple[int, ...]:
    return tuple(part for part in connection.dialect.server_version_info or () if isinstance(part, int))


def upgrade(database: Database, revision: str = "head") -> str | None:
    """Upgrades the database to ``revision`` and returns its revision afterwards.

    Concurrent upgrades wait for each other. On MariaDB, where DDL cannot be rolled back, an interrupted upgrade continues
    when it is run again. Raises :class:`LedgerUnavailable`, :class:`ConfigError` (server too old) and
    :class:`SchemaOutdated` (tables of another program).
    """
    from alembic import command

    return _migrate(database, command.upgrade, revision)


def downgrade(database: Database, revision: str) -> str | None:
    """Downgrades the database to ``revision`` (``base``: empty) and returns its revision afterwards."""
    from alembic import command

    return _migrate(database, command.downgrade, revision)


def _migrate(database: Database, move: Callable[[AlembicConfig, str], None], revision: str) -> str | None:
    check_server(database)
    config = _config()
    with database.write(marked=False) as connection, _exclusive(connection):
        at = _revision(connection, database)
        _refuse_unknown(at, database)
        if at in _MERGED:
            connection.execute(_STAMP.values(version_num=_MERGED[at]))
        config.attributes["connection"] = connection
        move(config, revision)
    return current(database)


@contextmanager
def _exclusive(connection: Connection) -> Iterator[None]:
    """Excludes other schema changes during the block; on SQLite the write transaction does so."""
    if connection.dialect.name == "postgresql":
        # Bound to the transaction, not the session: works behind a pooler, and is released however the process ends.
        connection.exec_driver_sql("SET LOCAL statement_timeout = 0")  # altering a large table takes a long time
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK_KEY})")
        yield
    elif connection.dialect.name == "mariadb":
        with _named_lock(connection), _repeatable_ddl(connection):
            yield
    else:
        yield


@contextmanager
def _named_lock(connection: Connection) -> Iterator[None]:
    # Altering a large table takes a long time; before that, it waits for the metadata lock, for a limited time.
    driver: Any = connection.connection.driver_connection
    timeout, driver._read_timeout = driver._read_timeout, None
    connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {_LOCK_S}, max_statement_time = 0")
    name = "CONCAT('asynctask.', MD5(DATABASE()))"
    if connection.exec_driver_sql(f"SELECT GET_LOCK({name}, {_LOCK_S})").scalar() != 1:
        raise LedgerUnavailable(f"another process has been changing the schema for {_LOCK_S} s; try again when it is done")
    try:
        yield
    finally:
        if not connection.invalidated:
            driver._read_timeout = timeout
            connection.exec_driver_sql("SET SESSION lock_wait_timeout = DEFAULT, max_statement_time = DEFAULT")
            connection.exec_driver_sql(f"SELECT RELEASE_LOCK({name})")


_REPEATABLE: Final = (
    ("CREATE TABLE ", "CREATE TABLE IF NOT EXISTS "),
    ("CREATE INDEX ", "CREATE INDEX IF NOT EXISTS "),
    ("CREATE UNIQUE INDEX ", "CREATE UNIQUE INDEX IF NOT EXISTS "),
    ("DROP TABLE ", "DROP TABLE IF EXISTS "),
    ("DROP INDEX ", "DROP INDEX IF EXISTS "),
    (" ADD COLUMN ", " ADD COLUMN IF NOT EXISTS "),
    (" DROP COLUMN ", " DROP COLUMN IF EXISTS "),
)


@contextmanager
def _repeatable_ddl(connection: Connection) -> Iterator[None]:
    """Makes DDL repeatable: MariaDB commits each statement at once, so an interrupted migration is run again."""

    def rewrite(_c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool) -> tuple[str, Any]:
        return _made_repeatable(statement), parameters

    sa.event.listen(connection, "before_cursor_execute", rewrite, retval=True)
    try:
        yield
    finally:
        sa.event.remove(connection, "before_cursor_execute", rewrite)


def _made_repeatable(statement: str) -> str:
    text = statement.lstrip()
    if not text.startswith(("CREATE ", "DROP ", "ALTER TABLE ")):
        return statement
    for plain, repeatable in _REPEATABLE:
        if repeatable not in text and (text.startswith(plain) or (text.startswith("ALTER TABLE ") and plain[0] == " ")):
            text = text.replace(plain, repeatable)
    return text


def _refuse_unknown(at: str | None, database: Database) -> None:
    """Raises :class:`SchemaOutdated` for a revision from which no migration leads to that of this version."""
    from alembic.script import ScriptDirectory

    if at in _UNRELEASED:
        raise SchemaOutdated(
            f"the database {_shown(database)} is at schema {at}, which only checkouts between 0.1.0 and 0016 had:"
            " run `asynctask db upgrade` of two of them (`git checkout`: docs/reference/databases.md says which), after"
            " which this version takes it, or use a new database"
        )
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()} | set(_MERGED)
    if at is not None and at not in known:
        raise SchemaOutdated(
            f"the database {_shown(database)} is at schema {at[:64]}, which this version does not know: install the newer"
            f" asynctask (or, if that is another program's schema, {_OWN_DATABASE})"
        )


def _shown(database: Database) -> str:
    # Without the query, which may contain a password, too.
    return database.url.set(query={}).render_as_string(hide_password=True)


def check(database: Database) -> None:
    """Raises :class:`SchemaOutdated`, with the command to run, unless the schema has the required version."""
    at, needed = current(database), head()
    if at == needed:
        return
    _refuse_unknown(at, database)
    stop = "" if at is None or processes_go_on(at) else "stop every process that runs, then "
    raise SchemaOutdated(
        f"the database {_shown(database)} is at schema {at or 'none'}, this version needs {needed}: {stop}run"
        " `asynctask db upgrade` (with the same ASYNCTASK_DATABASE_URL or --database-url)"
    )


def processes_go_on(at: str) -> bool:
    """Whether processes that were started with schema ``at`` may go on during and after an upgrade from it: each migration
    says so by ``processes_go_on = True``."""
    from alembic.script import ScriptDirectory

    steps = ScriptDirectory.from_config(_config()).iterate_revisions(head(), _MERGED.get(at, at))
    return all(getattr(step.module, "processes_go_on", False) for step in steps)


def ensure(database: Database) -> None:
    """As :func:`check`, but creates the schema in an empty SQLite file, so that the first start needs no command."""
    if database.is_sqlite and current(database) is None:
        with database.read() as connection:
            empty = not sa.inspect(connection).get_table_names()
        if empty:
            upgrade(database)
    check(database)
