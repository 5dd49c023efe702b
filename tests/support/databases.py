"""The databases that a test's ledger can live in: a file, or an empty database of its own on a shared private server.

Each comes migrated, and watched from inside: triggers note every change of a status that ends or reopens an Event,
and every close, so that a test can say how often an outcome was recorded, whatever the program says of itself.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
import pymysql
from pymysql.constants import CLIENT
from support.servers import unmet

from asynctask.database import schema
from asynctask.database.engine import Database
from asynctask.testing.servers import MissingServer
from benchmarks.servers import SERVERS, SqlServer

KINDS = ("sqlite", *SERVERS)
"""Every database that a test of the ledger runs on, unless it is marked otherwise."""

TEMPLATE = "asynctask_template"
_TERMINAL = "('finish', 'failed', 'error', 'cancelled')"
_ENDED = f"(OLD.status IN {_TERMINAL} OR NEW.status IN {_TERMINAL})"
_CLOSED = "OLD.closed_at IS NULL AND NEW.closed_at IS NOT NULL"
_NOTE_STATUS = "INSERT INTO seen_status VALUES (NEW.id, NEW.task_id, OLD.status, NEW.status, NEW.attempt);"
_NOTE_CLOSE = "INSERT INTO seen_close VALUES (NEW.id, NEW.generation);"
_VERSION = "SELECT version_num FROM alembic_version"
_TABLES = (
    (
        "CREATE TABLE IF NOT EXISTS seen_status"
        " (event_id BIGINT, task_id BIGINT, was VARCHAR(9), became VARCHAR(9), attempt INTEGER)"
    ),
    "CREATE TABLE IF NOT EXISTS seen_close (task_id BIGINT, generation BIGINT)",
)
WATCH: dict[str, tuple[str, ...]] = {
    "sqlite": (
        (
            f"CREATE TRIGGER IF NOT EXISTS watch_status AFTER UPDATE OF status ON events"
            f" WHEN OLD.status <> NEW.status AND {_ENDED} BEGIN {_NOTE_STATUS} END"
        ),
        (
            f"CREATE TRIGGER IF NOT EXISTS watch_close AFTER UPDATE OF closed_at ON tasks"
            f" WHEN {_CLOSED} BEGIN {_NOTE_CLOSE} END"
        ),
    ),
    "postgresql": (
        f"CREATE FUNCTION note_status() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {_NOTE_STATUS} RETURN NULL; END$$",
        f"CREATE FUNCTION note_close() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {_NOTE_CLOSE} RETURN NULL; END$$",
        (
            f"CREATE TRIGGER watch_status AFTER UPDATE OF status ON events FOR EACH ROW"
            f" WHEN (OLD.status <> NEW.status AND {_ENDED}) EXECUTE FUNCTION note_status()"
        ),
        (
            f"CREATE TRIGGER watch_close AFTER UPDATE OF closed_at ON tasks FOR EACH ROW"
            f" WHEN ({_CLOSED}) EXECUTE FUNCTION note_close()"
        ),
    ),
    "mariadb": (
        (
            f"CREATE TRIGGER watch_status AFTER UPDATE ON events FOR EACH ROW"
            f" BEGIN IF OLD.status <> NEW.status AND {_ENDED} THEN {_NOTE_STATUS} END IF; END"
        ),
        f"CREATE TRIGGER watch_close AFTER UPDATE ON tasks FOR EACH ROW BEGIN IF {_CLOSED} THEN {_NOTE_CLOSE} END IF; END",
    ),
}
_LOCK = {
    "sqlite": ("BEGIN IMMEDIATE",),
    "postgresql": ("BEGIN", "LOCK TABLE events IN EXCLUSIVE MODE"),
    "mariadb": ("SET innodb_lock_wait_timeout = 20", "START TRANSACTION", "SELECT id FROM events FOR UPDATE"),
}


class Store:
    """A database of one test. Arguments: its ``kind`` and ``url``, ``connect`` for a look from outside, ``remove``."""

    def __init__(self, kind: str, url: str, connect: Callable[[], Any], remove: Callable[[], None]) -> None:
        self.kind = kind
        self.url = url
        self._connect, self._remove = connect, remove
        self._connection: Any = None
        self._lock = threading.Lock()

    def sql(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of a statement, which is a transaction of its own; ``?`` stands for each of the values."""
        with self._lock:
            try:
                return self._run(statement, values)
            except BaseException:
                self.forget()
                raise

    def _run(self, statement: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        if self._connection is None:
            self._connection = self._connect()
        if self.kind == "sqlite":
            rows = self._connection.execute(statement, values).fetchall()
            self.forget()  # a file that the test copies or damages is not held open
            return [tuple(row) for row in rows]
        if values:
            statement = statement.replace("%", "%%").replace("?", "%s")
        with self._connection.cursor() as cursor:
            cursor.execute(statement, tuple(values) or None)
            rows = cursor.fetchall() if cursor.description else []
        return [tuple(int(v) if isinstance(v, Decimal) and v == v.to_integral() else v for v in row) for row in rows]

    def forget(self) -> None:
        """Connects anew for the next question: the server was away."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):
                connection.close()

    @contextmanager
    def locked(self) -> Iterator[Any]:
        """No Event can be written by anybody else while the block runs; a function is given that asks from within."""
        connection = self._connect()
        cursor = connection.cursor()
        try:
            for statement in _LOCK[self.kind]:
                cursor.execute(statement)
            cursor.fetchall() if cursor.description else None

            def ask(statement: str) -> list[tuple[Any, ...]]:
                cursor.execute(statement)
                return [tuple(row) for row in cursor.fetchall()]

            yield ask
            cursor.execute("COMMIT")
        finally:
            cursor.close()
            connection.close()

    def watch(self) -> None:
        """Puts the triggers into a file that was made without them; servers' databases come with them."""
        if self.kind == "sqlite":
            for statement in (*_TABLES, *WATCH["sqlite"]):
                self.sql(statement)

    def close(self) -> None:
        """Removes it."""
        with self._lock:
            self.forget()
        self._remove()


def sqlite_store(folder: Path) -> Store:
    """A file ``a.db`` in a folder; it is made by whoever uses it first."""
    path = folder / "a.db"
    return Store(
        "sqlite", f"sqlite:///{path}", lambda: sqlite3.connect(path, timeout=120, isolation_level=None), lambda: None
    )


def connect(server: SqlServer, name: str, **more: Any) -> Any:
    """A driver's own connection to a database of a server, in autocommit."""
    if server.dialect == "postgresql":
        return psycopg.connect(server.url(name), autocommit=True, **more)
    mode = "SET sql_mode = CONCAT(@@sql_mode, ',ANSI_QUOTES,STRICT_ALL_TABLES'), lock_wait_timeout = 20"
    options = {"user": "root", "database": name, "charset": "utf8mb4", "init_command": mode, "ssl_disabled": True, **more}
    return pymysql.connect(host="127.0.0.1", port=server.port, autocommit=True, **options)


@dataclass(frozen=True)
class _Words:
    """How a server is asked: not to wait long, who else is connected, what there is beside rows, its tables, and for the
    statements that have its numbers begin anew."""

    patience: str
    others: str
    shape: str
    tables: str
    numbers: str


_WORDS = {
    "postgresql": _Words(
        "SET lock_timeout = '2s'",
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
        (
            "SELECT (SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace),"
            " (SELECT count(*) FROM pg_trigger WHERE tgenabled = 'O'), (SELECT count(*) FROM pg_proc),"
            " (SELECT count(*) FROM pg_attribute WHERE attrelid > 16383 AND NOT attisdropped),"
            # What ANALYZE has noted would choose the plans of the next test.
            " (SELECT count(*) FROM pg_statistic WHERE starelid > 16383),"
            " (SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'"
            " AND reltuples >= 0),"
            # So would the places of very many rows that are no more.
            " (SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'"
            " AND pg_relation_size(oid) > 1000000),"
            " (SELECT count(*) FROM pg_db_role_setting AS s JOIN pg_database AS d ON d.oid = s.setdatabase"
            " WHERE d.datname = current_database())"
        ),
        "SELECT tablename FROM pg_tables WHERE schemaname = 'public'",
        (
            "SELECT format('ALTER SEQUENCE %I RESTART', sequencename) FROM pg_sequences"
            " WHERE schemaname = 'public' AND last_value IS NOT NULL"
        ),
    ),
    "mariadb": _Words(
        "SET lock_wait_timeout = 2, innodb_lock_wait_timeout = 2",
        "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()",
        (
            "SELECT (SELECT COUNT(*) FROM information_schema.columns WHERE table_schema = DATABASE()),"
            " (SELECT COUNT(*) FROM information_schema.statistics WHERE table_schema = DATABASE()),"
            " (SELECT COUNT(*) FROM information_schema.triggers WHERE trigger_schema = DATABASE())"
        ),
        "SHOW TABLES",
        (
            "SELECT CONCAT('ALTER TABLE ', table_name, ' AUTO_INCREMENT = 1') FROM information_schema.tables"
            " WHERE table_schema = DATABASE() AND auto_increment > 1"
        ),
    ),
}


class Templates:
    """Empty databases of one server, each with the migrated schema and the triggers. ``server`` has been started.

    A database that a test is done with is emptied and given to another one, if it is as it was made and nobody is
    connected to it any more: to make one and to drop it takes longer than most tests.
    """

    def __init__(self, server: SqlServer) -> None:
        self.server = server
        self._free: list[str] = []
        self._shape: object = None
        self._numbers = itertools.count(1)
        self._made = False
        self._script = ""

    def empty(self) -> Store:
        """A new one without even a schema."""
        name = self._name()
        self.server.create(name)
        return self._store(name)

    def _name(self) -> str:
        return f"test_{os.getpid()}_{next(self._numbers)}"

    def _store(self, name: str, remove: Callable[[str], None] | None = None) -> Store:
        server = self.server
        away = remove or server.drop
        return Store(server.dialect, server.url(name), lambda: connect(server, name), lambda: away(name))

    def fresh(self) -> Store:
        """One as good as new."""
        if not self._made:
            self._make()
            self._made = True
        if self._free:
            return self._store(self._free.pop(), self._give_back)
        name, server = self._name(), self.server
        if server.dialect == "postgresql":
            server.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
        else:
            server.create(name)
            with closing(connect(server, name, client_flag=CLIENT.MULTI_STATEMENTS)) as connection:
                self._run_script(connection)
        return self._store(name, self._give_back)

    def _give_back(self, name: str) -> None:
        with suppress(Exception):
            if self._emptied(name):
                self._free.append(name)
                return
        self.server.drop(name)

    def _emptied(self, name: str) -> bool:
        """Whether it is as good as new now."""
        words = _WORDS[self.server.dialect]
        with closing(connect(self.server, name)) as connection, connection.cursor() as cursor:

            def rows(statement: str) -> list[tuple[Any, ...]]:
                cursor.execute(statement)
                return [tuple(row) for row in cursor.fetchall()]

            cursor.execute(words.patience)
            if rows(words.others) or rows(words.shape) != self._shape or rows(_VERSION) != [(schema.head(),)]:
                return False
            tables = [str(row[0]) for row in rows(words.tables) if row[0] != "alembic_version"]
            looks = " UNION ALL ".join(f"(SELECT '{table}' FROM {table} LIMIT 1)" for table in tables)
            for (table,) in rows(looks):
                cursor.execute(f"DELETE FROM {table}")
            for (statement,) in rows(words.numbers):
                cursor.execute(statement)
        return True

    def _run_script(self, connection: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute(self._script)
            while cursor.nextset():
                pass

    def _make(self) -> None:
        database = Database(self.server.create(TEMPLATE))
        schema.upgrade(database)
        database.close()
        with closing(connect(self.server, TEMPLATE)) as connection, connection.cursor() as cursor:
            for statement in (*_TABLES, *WATCH[self.server.dialect]):
                cursor.execute(statement)
            if self.server.dialect == "mariadb":
                self._script = _ddl(cursor)
            cursor.execute(_WORDS[self.server.dialect].shape)
            self._shape = [tuple(row) for row in cursor.fetchall()]


def _ddl(cursor: Any) -> str:
    """Everything that a MariaDB database holds, in its own words: it has no templates to copy."""
    cursor.execute("SHOW TABLES")
    tables = [str(row[0]) for row in cursor.fetchall()]
    statements = []
    for table in tables:
        cursor.execute(f"SHOW CREATE TABLE {table}")
        statements.append(str(cursor.fetchone()[1]))
    statements.append(f"INSERT INTO alembic_version VALUES ('{schema.head()}')")
    return ";\n".join([*statements, *WATCH["mariadb"]])


@cache
def _migrated() -> bytes:
    with tempfile.TemporaryDirectory(prefix="asynctask-sqlite-") as folder:
        made = sqlite_store(Path(folder))
        database = Database(made.url)
        schema.upgrade(database)
        database.close()
        return (Path(folder) / "a.db").read_bytes()


def migrated_file(path: Path) -> None:
    """Makes a SQLite file with the migrated schema: once for all tests, each would migrate its own otherwise."""
    path.touch(0o600)  # as AsyncTask makes it
    path.write_bytes(_migrated())


_SETTINGS: dict[str, dict[str, str]] = {
    # Statistics made in the middle of a test, on a machine that is slow enough for that, change its plans.
    "postgresql": {"autovacuum": "off"},
    "mariadb": {},
}


MODES = ("", "ANSI_QUOTES", "ANSI", "ORACLE", "MSSQL", "NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT,NO_UNSIGNED_SUBTRACTION")
"""Of MariaDB: what its servers are set to, by people who come from another database."""

UNUSUAL = {
    "postgresql": {
        "client_encoding": "LATIN1",
        "standard_conforming_strings": "off",
        "extra_float_digits": "-15",
        "array_nulls": "off",
        "transform_null_equals": "on",
        "bytea_output": "escape",
        "DateStyle": "German",
        "IntervalStyle": "sql_standard",
        "timezone": "Pacific/Kiritimati",
        "default_transaction_isolation": "serializable",
        "default_transaction_deferrable": "on",
        "search_path": '"$user", public, pg_catalog',
        "enable_indexscan": "off",
    },
    "mariadb": {
        "autocommit": "0",
        "completion_type": "'CHAIN'",
        "sql_select_limit": "1",
        "sql_safe_updates": "1",
        "sql_auto_is_null": "1",
        "max_join_size": "1",
        "tx_isolation": "'SERIALIZABLE'",
        "time_zone": "'-11:00'",
        "group_concat_max_len": "16",
        "innodb_strict_mode": "0",
        "innodb_lock_wait_timeout": "1",
        "unique_checks": "0",
        "default_storage_engine": "'MyISAM'",
        "div_precision_increment": "0",
        "character_set_server": "'latin1'",
        "collation_connection": "'latin1_german1_ci'",
    },
}
"""Defaults of a server that change what a statement means, or whether it is done."""


@contextmanager
def defaults(server: SqlServer, name: str, settings: Mapping[str, str]) -> Iterator[None]:
    """New connections begin with these settings: on PostgreSQL those to one database, on MariaDB all."""
    if server.dialect == "postgresql":
        for key, value in settings.items():
            server.execute(f"ALTER DATABASE {name} SET {key} = {value if key == 'search_path' else repr(value)}")
        yield
        server.execute(f"ALTER DATABASE {name} RESET ALL")
        return
    with closing(connect(server, name)) as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT {', '.join(f'@@GLOBAL.{key}' for key in settings)}")
        before = cursor.fetchone()
        try:
            for key, value in settings.items():
                cursor.execute(f"SET GLOBAL {key} = {value}")
            yield
        finally:
            for key, value in zip(settings, before, strict=True):
                cursor.execute(f"SET GLOBAL {key} = %s", (value,))


class Databases:
    """The servers of a whole run, started when a test first needs one. ``close`` ends them."""

    def __init__(self) -> None:
        self._templates: dict[str, Templates] = {}

    def templates(self, dialect: str) -> Templates:
        """Of the shared server of a dialect. Skips or fails the test where its program is not installed."""
        if dialect not in self._templates:
            server = SERVERS[dialect](settings=_SETTINGS[dialect])
            try:
                server.start()
            except MissingServer as error:
                server.remove()
                unmet(str(error))
            self._templates[dialect] = Templates(server)
        return self._templates[dialect]

    def fresh(self, kind: str, folder: Path) -> Store:
        """A database for one test; ``folder`` is where a file goes."""
        if kind != "sqlite":
            return self.templates(kind).fresh()
        migrated_file(folder / "a.db")
        return sqlite_store(folder)

    def empty(self, kind: str, folder: Path) -> Store:
        """A database without any table."""
        return sqlite_store(folder) if kind == "sqlite" else self.templates(kind).empty()

    def close(self) -> None:
        """Ends every server that was started."""
        for templates in self._templates.values():
            templates.server.remove()
