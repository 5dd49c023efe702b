"""The schema's version: read it, migrate it, refuse to work on another one, or on an unsupported server.

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
"""The oldest supported servers: with SKIP LOCKED, and on MariaDB atomic DDL and RETURNING."""

_HEAD: Final = "0013"
_VERSION_TABLE: Final = "alembic_version"
_VERSION: Final[sa.Select[Any]] = sa.select(sa.column("version_num")).select_from(sa.table(_VERSION_TABLE))
_LOCK_KEY: Final = 7_276_410_358_002_177
"""The advisory lock for changes of a PostgreSQL schema: an arbitrary number, the same in every version."""

_LOCK_S: Final = 60


def migrations_folder() -> Path:
    """The folder of the migrations: in the installed package, or beside it in a checkout."""
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
    """The revision of the database, None for none. Raises :class:`ConfigError` for a server too old."""
    check_server(database)
    with database.read() as connection:
        if not sa.inspect(connection).has_table(_VERSION_TABLE):
            return None
        return connection.execute(_VERSION).scalar()


def check_server(database: Database) -> None:
    """Raises :class:`ConfigError` for an unsupported server."""
    if database.is_sqlite:
        return
    try:
        with database.read() as connection:
            found, encoding = _version(connection), _encoding(connection)
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
    if encoding != "UTF8":
        raise ConfigError(f"the encoding of the database is {encoding}: make one with CREATE DATABASE ... ENCODING 'UTF8'")


def _encoding(connection: Connection) -> str:
    """The character set of the database; on MariaDB it is set per table."""
    if connection.dialect.name != "postgresql":
        return "UTF8"
    return str(connection.exec_driver_sql("SHOW server_encoding").scalar())


def _version(connection: Connection) -> tuple[int, ...]:
    return tuple(part for part in connection.dialect.server_version_info or () if isinstance(part, int))


def upgrade(database: Database, revision: str = "head") -> str | None:
    """Upgrades the database to ``revision`` and returns its revision afterwards.

    Concurrent processes wait for each other. On MariaDB, where DDL cannot be rolled back, an interrupted upgrade continues
    when it is run again.
    Raises :class:`LedgerUnavailable`, :class:`ConfigError` (server too old) and :class:`SchemaOutdated` (foreign tables).
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
        _refuse_foreign_tables(connection, database)
        config.attributes["connection"] = connection
        move(config, revision)
    return current(database)


@contextmanager
def _exclusive(connection: Connection) -> Iterator[None]:
    """Excludes other changes of the schema during the block. On SQLite the write transaction suffices."""
    if connection.dialect.name == "postgresql":
        # Bound to the transaction, not the session: works behind a pooler, and is released however the process ends.
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK_KEY})")
        yield
    elif connection.dialect.name == "mariadb":
        with _named_lock(connection), _repeatable_ddl(connection):
            yield
    else:
        yield


@contextmanager
def _named_lock(connection: Connection) -> Iterator[None]:
    # Altering a large table takes long and first waits for its metadata lock, for a limited time.
    driver: Any = connection.connection.driver_connection
    timeout, driver._read_timeout = driver._read_timeout, None
    connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {_LOCK_S}")
    name = "CONCAT('asynctask.', MD5(DATABASE()))"
    if connection.exec_driver_sql(f"SELECT GET_LOCK({name}, {_LOCK_S})").scalar() != 1:
        raise LedgerUnavailable(f"another process has been changing the schema for {_LOCK_S} s; try again when it is done")
    try:
        yield
    finally:
        if not connection.invalidated:
            driver._read_timeout = timeout
            connection.exec_driver_sql("SET SESSION lock_wait_timeout = DEFAULT")
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


def _refuse_foreign_tables(connection: Connection, database: Database) -> None:
    """Refuses tables with our names and no version table; an interrupted migration has left one."""
    names = set(sa.inspect(connection).get_table_names())
    foreign = sorted(names & set(metadata.tables))
    if foreign and _VERSION_TABLE not in names:
        raise SchemaOutdated(
            f"the database {_shown(database)} has tables of its own named {', '.join(foreign)}:"
            " give asynctask a database of its own"
        )


def _shown(database: Database) -> str:
    return database.url.render_as_string(hide_password=True)


def check(database: Database) -> None:
    """Raises :class:`SchemaOutdated`, with the command to run, unless the schema has the needed version."""
    at, needed = current(database), head()
    if at == needed:
        return
    from alembic.script import ScriptDirectory

    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    shown = _shown(database)
    if at is not None and at not in known:
        raise SchemaOutdated(
            f"the database {shown} is at schema {at}, which this version does not know: install the newer asynctask"
            " (or, if that is another program's schema, give asynctask a database of its own)"
        )
    raise SchemaOutdated(
        f"the database {shown} is at schema {at or 'none'}, this version needs {needed}: run `asynctask db upgrade`"
        " (with the same ASYNCTASK_DATABASE_URL or --database-url)"
    )


def ensure(database: Database) -> None:
    """:func:`check`, but creates the schema in an empty SQLite file: the first start needs no command."""
    if database.is_sqlite and current(database) is None:
        with database.read() as connection:
            empty = not sa.inspect(connection).get_table_names()
        if empty:
            upgrade(database)
    check(database)
