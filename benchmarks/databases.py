"""Where a benchmark's database comes from: a file or a server that is named, or a private server of the run's own.

Whatever it is, each run begins with a fresh database, and it is gone when the run is over.
"""

from __future__ import annotations

import argparse
import re
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine.url import URL, make_url

from asynctask.clock import SystemIds
from asynctask.database import schema
from asynctask.database.engine import Database
from asynctask.testing.servers import MissingServer
from benchmarks.servers import SERVERS

__all__ = ["KINDS", "NotHere", "Refused", "Source", "shown", "source"]

KINDS = ("sqlite", *SERVERS)
PREFIX = "asynctask_bench_"
"""How databases that are made on a server are called; one that stayed behind after a kill -9 can be dropped."""

_SIDE_FILES = ("", "-wal", "-shm", ".lock", ".bell")
_DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "mariadb": "mysql+pymysql"}
# What decides whether a commit is on the disk when it is answered, and the value that production has.
_DURABLE: dict[str, dict[str, str]] = {
    "sqlite": {"journal_mode": "wal", "synchronous": "2"},  # 2 is FULL
    "postgresql": {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"},
    "mariadb": {"innodb_flush_log_at_trx_commit": "1", "innodb_doublewrite": "ON"},
}


class Refused(Exception):
    """The command was asked for what it cannot measure."""


class NotHere(Refused):
    """The program of a server is not installed on this machine."""


class Source(Protocol):
    """Makes databases."""

    kind: str
    """One of :data:`KINDS`."""

    def fresh(self, folder: Path) -> AbstractContextManager[str]:
        """The URL of an empty database with the schema; it is removed at the end of the block. ``folder``: where a file
        may lie. Raises :class:`Refused`."""
        ...

    def facts(self) -> dict[str, Any]:
        """Database, version and what a commit is worth there, for ``settings``."""
        ...


class SqliteSource:
    """A file. ``path`` None: one in the run's own folder."""

    kind = "sqlite"

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @contextmanager
    def fresh(self, folder: Path) -> Iterator[str]:
        path = self._path or folder / "ledger.db"
        if path.exists():
            raise Refused(f"--database-url: {path} is there already; a benchmark begins with a new file and removes it")
        if not path.parent.is_dir():
            raise Refused(f"--database-url: there is no folder {path.parent}; make it first")
        try:
            yield _set_up(f"sqlite:///{path}")
        finally:
            for suffix in _SIDE_FILES:
                path.with_name(path.name + suffix).unlink(missing_ok=True)

    def facts(self) -> dict[str, Any]:
        wanted = _DURABLE[self.kind]
        with tempfile.TemporaryDirectory(prefix="asynctask-benchmark-") as folder:
            found = _pragmas(f"sqlite:///{folder}/facts.db", wanted)
        version = f"SQLite {sqlite3.sqlite_version}"
        return {"database": version, "durability": found, "as_in_production": found == wanted}


def _pragmas(url: str, names: Iterable[str]) -> dict[str, str]:
    """Asked on a connection of the product's own: what it sets is what is measured."""
    with closing(Database(url)) as database, database.read() as connection:
        return {name: str(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()) for name in names}


class ServerSource:
    """A PostgreSQL or MariaDB server. ``url`` may name a database of it, which is only connected to."""

    def __init__(self, url: URL) -> None:
        self.kind = "postgresql" if url.get_backend_name() == "postgresql" else "mariadb"
        self._url = url

    @contextmanager
    def fresh(self, folder: Path) -> Iterator[str]:
        name = PREFIX + SystemIds().nonce()
        more = "" if self.kind == "postgresql" else " CHARACTER SET utf8mb4"
        self._execute(f"CREATE DATABASE {name}{more}")
        try:
            yield _set_up(self._url.set(database=name).render_as_string(hide_password=False))
        finally:
            force = " WITH (FORCE)" if self.kind == "postgresql" else ""
            self._execute(f"DROP DATABASE IF EXISTS {name}{force}")

    def facts(self) -> dict[str, Any]:
        version = str(self._execute("SELECT version()")[0][0])
        wanted = _DURABLE[self.kind]
        if self.kind == "postgresql":
            found = {name: str(self._execute(f"SHOW {name}")[0][0]) for name in wanted}
            version = " ".join(version.split()[:2])
        else:
            found = {name: str(self._execute(f"SHOW GLOBAL VARIABLES LIKE '{name}'")[0][1]) for name in wanted}
            version = f"MariaDB {version.partition('-')[0]}" if "MariaDB" in version else f"MySQL {version}"
        return {"database": version, "durability": found, "as_in_production": found == wanted}

    def _execute(self, statement: str) -> list[tuple[Any, ...]]:
        database = self._url.database or ("postgres" if self.kind == "postgresql" else "")
        url = self._url.set(database=database, drivername=_DRIVERS[self._url.get_backend_name()])
        engine = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                result = connection.exec_driver_sql(statement)
                return [tuple(row) for row in result] if result.returns_rows else []
        except (exc.OperationalError, exc.ProgrammingError) as error:
            where = self._url.render_as_string(hide_password=True)
            raise Refused(f"{where}: {error.orig}; does the server answer, and may this user CREATE DATABASE?") from error


def _set_up(url: str) -> str:
    with closing(Database(url)) as database:
        schema.upgrade(database)
    return url


@contextmanager
def source(options: argparse.Namespace) -> Iterator[Source]:
    """What ``--database-url`` or ``--server`` asks for; a server that is started ends with the block. Raises
    :class:`Refused`, :class:`NotHere`."""
    if options.database_url is not None:
        if options.server is not None:
            raise Refused("give either --database-url or --server: the one names a database, the other starts a server")
        yield _named(options.database_url)
    elif options.server in (None, "sqlite"):
        yield SqliteSource(None)
    else:
        try:
            server = SERVERS[options.server](durable=True)
        except MissingServer as error:
            raise NotHere(str(error)) from error
        with _started(server) as started:
            yield ServerSource(make_url(started.url("" if options.server == "mariadb" else "postgres")))


@contextmanager
def _started(server: Any) -> Iterator[Any]:
    try:
        server.start()
        yield server
    except MissingServer as error:
        raise NotHere(str(error)) from error
    finally:
        server.remove()


def _named(url: str) -> Source:
    scheme = url.partition("://")[0]
    if scheme == "sqlite" and url.startswith("sqlite:///") and url != "sqlite:///":
        return SqliteSource(Path(url.removeprefix("sqlite:///").partition("?")[0]).absolute())
    if scheme not in _DRIVERS:
        raise Refused(
            f"--database-url {scheme}://...: write sqlite:///path/of/a/new/file.db, postgresql://user@host/database or"
            " mysql://user@host/; or let --server start one"
        )
    try:
        return ServerSource(make_url(url))
    except (exc.ArgumentError, ValueError):
        raise Refused(f"--database-url {scheme}://...: this is no URL; e.g. {scheme}://user:password@127.0.0.1/") from None


def shown(text: str) -> str:
    """A URL, or a word with one in it, without its password."""
    return re.sub(r"([?&]password=)[^&\s]*", r"\1***", re.sub(r"(://[^/:@\s]*):\S*@", r"\1:***@", text))
