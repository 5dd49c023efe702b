"""Connections, transactions and the clock of each kind of database.

If the answer to a commit is lost, the outcome is looked up, never guessed. PostgreSQL knows the status of a transaction. On
MariaDB every write transaction writes a number into its connection's row of ``write_marks``, which is compared. So a write
is committed when :meth:`Database.write` ends, or it raises and nothing is written; the one exception is
:class:`OutcomeUnknown`.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import ssl
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.engine import Connection, Engine, ExceptionContext
from sqlalchemy.engine.url import URL, make_url

from asynctask.clock import SECOND, Clock, Ids, SystemIds, micros
from asynctask.database.retrying import (
    LOCKED,
    OutcomeUnknown,
    TransactionConflict,
    by_driver,
    code_of,
    is_read_only,
    translated,
)
from asynctask.errors import ConfigError, LedgerUnavailable, not_installed

_DRIVERS: Final = {"postgresql": "postgresql+psycopg", "mysql": "mariadb+pymysql", "mariadb": "mariadb+pymysql"}
_EXTRAS: Final = {"postgresql": "postgresql", "mariadb": "mysql"}

_LOCK_S: Final = 20
_IDLE_S: Final = 60
_MAX_LOOKUP_S: Final = 60.0
_GROUP_CONCAT_BYTES: Final = 16_000_000

COLLATION: Final = "utf8mb4_nopad_bin"
"""The collation on MariaDB: texts are compared byte for byte, as on other databases."""


@dataclass(slots=True)
class _Mark:
    """Identifies a transaction: on PostgreSQL by its id and process, on MariaDB by its row and number."""

    number: int
    process: int
    owner: str = ""


class Database:
    """The database behind a ledger.

    Arguments: ``url`` as for SQLAlchemy, with psycopg 3 and PyMySQL for ``postgresql://`` and ``mysql://``; ``pool_size``,
    the largest number of connections of one process. Raises :class:`ConfigError` for an invalid URL.
    """

    def __init__(self, url: str, *, pool_size: int = 10, ids: Ids | None = None) -> None:
        self.url = _normal(url)
        self.dialect = self.url.get_backend_name()
        self.is_sqlite = self.dialect == "sqlite"
        self.pooler: bool | None = None
        """PostgreSQL: whether connections go through a pooler (PgBouncer, pgcat); None before the first one."""
        self._ids = ids or SystemIds()
        self._password = password_of(self.url)
        self._lock: WriteLock | None = None
        self.path: Path | None = None
        if self.is_sqlite:
            self.path = Path(str(self.url.database))
            self._lock = WriteLock(self.path.with_name(self.path.name + ".lock"))
        self.engine = self._engine(pool_size)
        self._writer = self.engine.execution_options(asynctask_write=True)

    # -- engines

    def _engine(self, pool_size: int) -> Engine:
        if self.is_sqlite:
            assert self.path is not None
            assert self._lock is not None
            if not self.path.parent.is_dir():
                raise ConfigError(f"the folder of the SQLite database does not exist: {self.path.parent}")
            engine = sa.create_engine(
                self.url, pool_size=pool_size, max_overflow=50, connect_args={"timeout": 30, "check_same_thread": False}
            )
            lock, path = self._lock, self.path
            event.listen(engine, "do_connect", lambda *_: make_private_file(path))
            event.listen(engine, "connect", lambda connection, _record: connect_sqlite(lock, connection))
            event.listen(engine, "begin", _sqlite_begin)
            return engine
        try:
            # Autocommit unless write() or snapshot() begins a transaction: saves BEGIN and ROLLBACK around a query.
            engine = sa.create_engine(
                self.url,
                pool_size=pool_size,  # all are kept: overflow connections would be opened and closed per transaction
                max_overflow=0,
                pool_use_lifo=True,
                isolation_level="AUTOCOMMIT",
                skip_autocommit_rollback=True,
                connect_args=_CONNECT_ARGS[self.dialect],
            )
        except ImportError:
            raise ConfigError(not_installed(f"the driver of {self.dialect}", _EXTRAS[self.dialect])) from None
        # Not "connect": SQLAlchemy would read the server's defaults before it (and quote names by its sql_mode); and the
        # connection that listens for signals uses only "do_connect", too.
        event.listen(engine, "do_connect", self._open_postgresql if self.dialect == "postgresql" else _open_mariadb)
        event.listen(engine, "checkout", _refuse_closed)
        event.listen(engine, "handle_error", _discard_read_only)
        return engine

    def _open_postgresql(self, dialect: Any, _record: Any, arguments: Any, options: Any) -> Any:
        with _options_checked(dialect, self._password):
            connection = dialect.connect(*arguments, **options)
        with _closed_on_error(connection):
            connection.autocommit = True
            # A pooler reports its own process id; behind it, no state may be kept in the session.
            (process,) = connection.execute("SELECT pg_backend_pid()", prepare=False).fetchone()
            self.pooler = process != connection.info.backend_pid
            if self.pooler:
                connection.prepare_threshold = None
            else:
                connection.execute(_SET_POSTGRESQL, prepare=False)
        return connection

    def behind_pooler(self) -> bool:
        """Whether connections go through a pooler, where LISTEN and session-level advisory locks do not work."""
        if self.dialect == "postgresql" and self.pooler is None:
            with self.read():
                pass
        return bool(self.pooler)

    # -- transactions

    @contextmanager
    def read(self, *, once: bool = False) -> Iterator[Connection]:
        """A connection to read with. Raises :class:`LedgerUnavailable`.

        On SQLite all its reads see one snapshot; on servers each statement sees what is committed when it begins. ``once``:
        this is part of a large sequential read, which SQLite's cache must not keep.
        """
        with translated(self._password), self.engine.connect() as connection:
            yield connection
            if once and self.is_sqlite:  # otherwise each connection used keeps a full cache
                connection.exec_driver_sql("PRAGMA shrink_memory")

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A connection whose statements see one snapshot, on every database. Raises :class:`LedgerUnavailable`.

        Keep it short: the server keeps all row versions that the snapshot can see.
        """
        if self.is_sqlite:
            with self.read() as connection:
                yield connection
            return
        with translated(self._password), self.engine.connect() as connection:
            if self.dialect == "postgresql":
                connection.exec_driver_sql("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            else:
                connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                connection.exec_driver_sql("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
            try:
                yield connection
            finally:
                _roll_back(connection)

    @contextmanager
    def write(self, *, marked: bool = True) -> Iterator[Connection]:
        """A connection in a write transaction, committed at the end.

        Keep it short (50 ms). On SQLite the transaction is IMMEDIATE and takes the blocking lock first, so its reads cannot
        become stale; on servers it is READ COMMITTED. ``marked`` false: if the answer to the commit is lost, its outcome is
        not looked up; for idempotent writes, and for those that create the tables.

        Raises :class:`TransactionConflict` if it was rolled back and may be repeated (see :func:`repeatable`),
        :class:`OutcomeUnknown`, and :class:`LedgerUnavailable`.
        """
        if self._lock is not None:
            # The connection before the lock, so that the holder of the lock never waits for a connection.
            with translated(self._password), self._writer.connect() as connection:
                self._lock.acquire()
                try:
                    with connection.begin():
                        yield connection
                finally:
                    self._lock.release()
            return
        with translated(self._password, undone=True), self.engine.connect() as connection:
            mark = self._begin(connection)
            try:
                yield connection
                if marked:
                    self._write_mark(connection, mark)
            except BaseException:
                _roll_back(connection)
                raise
            self._commit(connection, mark, marked)

    @contextmanager
    def write_alone(self) -> Iterator[Connection]:
        """A connection for one statement that is a transaction of its own and may be repeated, without the round trips of
        BEGIN and COMMIT. Raises :class:`TransactionConflict` and :class:`LedgerUnavailable`.
        """
        if self.is_sqlite:
            with self.write() as connection:
                yield connection
            return
        with translated(self._password, undone=True), self.engine.connect() as connection:
            yield connection

    def _begin(self, connection: Connection) -> _Mark:
        if self.dialect == "mariadb":
            connection.exec_driver_sql("START TRANSACTION")
            info = connection.info
            owner = info.setdefault("asynctask_owner", self._ids.jids(1)[0])
            info["asynctask_number"] = info.get("asynctask_number", 0) + 1
            return _Mark(info["asynctask_number"], connection.connection.driver_connection.thread_id(), owner)  # type: ignore[union-attr]
        # One round trip by the driver itself, because a prepared statement cannot contain several commands.
        with by_driver(connection, "BEGIN") as driver:
            cursor = driver.execute(_BEGIN, prepare=False)
            while cursor.nextset():
                pass
            number, process = cursor.fetchone()
        return _Mark(int(number), int(process))

    def _write_mark(self, connection: Connection, mark: _Mark) -> None:
        if self.dialect == "mariadb":
            connection.exec_driver_sql(_WRITE_MARK, (mark.owner, mark.number))

    def _commit(self, connection: Connection, mark: _Mark, marked: bool) -> None:
        try:
            connection.exec_driver_sql("COMMIT")
        except exc.DBAPIError as error:
            if not error.connection_invalidated or is_read_only(error.orig):  # the server answered: not committed
                _roll_back(connection)
                raise
            if not marked:
                raise
            if not self._is_committed(mark):
                raise TransactionConflict("the connection was lost before the commit; nothing of it stands") from error

    def _is_committed(self, mark: _Mark) -> bool:
        """Whether a transaction is committed whose commit was not answered. Raises :class:`OutcomeUnknown`."""
        lookup = self._is_committed_postgresql if self.dialect == "postgresql" else self._is_committed_mariadb
        pause, waited, last = threading.Event(), 0.0, ""
        while waited < _MAX_LOOKUP_S:
            try:
                if (committed := lookup(mark)) is not None:
                    return committed
            except LedgerUnavailable as error:
                last = str(error)
            pause.wait(0.1)
            waited += 0.1
        raise OutcomeUnknown(f"the answer to a commit was lost, and for {_MAX_LOOKUP_S:g} s there was no asking: {last}")

    def _is_committed_postgresql(self, mark: _Mark) -> bool | None:
        with self.read() as connection:
            status = connection.exec_driver_sql("SELECT txid_status(%s)", (mark.number,)).scalar()
            if status == "in progress":  # its backend has not noticed the lost connection, and still holds its locks
                connection.exec_driver_sql("SELECT pg_terminate_backend(%s)", (mark.process,))
        return None if status == "in progress" else status == "committed"

    def _is_committed_mariadb(self, mark: _Mark) -> bool | None:
        with self.read() as connection:
            connection.exec_driver_sql("START TRANSACTION")
            try:  # the lock is granted only after that transaction has ended
                found = connection.exec_driver_sql(_FIND_MARK, (mark.owner,)).scalar()
            except exc.DBAPIError as error:
                if code_of(error) != LOCKED:
                    raise
                # Its thread has not noticed the lost connection. Kill the thread only while it holds the lock: after a
                # restart of the server, its number may be another thread's.
                with suppress(exc.DBAPIError):
                    connection.exec_driver_sql(f"KILL {mark.process:d}")
                return None
            finally:
                _roll_back(connection)
        return found is not None and int(found) >= mark.number

    def forget_marks(self, connection: Connection) -> None:
        """Deletes marks older than two days, in the caller's transaction.

        Deletes by key: a search by age would wait for every open transaction, each of which holds its own mark.
        """
        if self.dialect == "mariadb" and (old := connection.exec_driver_sql(_OLD_MARKS).scalars().all()):
            connection.execute(_FORGET_MARKS, {"owners": old})

    @property
    def absolute_url(self) -> str:
        """The database's URL, with the password, for a process in another folder."""
        url = self.url if self.path is None else self.url.set(database=str(self.path.absolute()))
        return url.render_as_string(hide_password=False)

    def close(self) -> None:
        """Closes every connection."""
        self.engine.dispose()
        if self._lock is not None:
            self._lock.close()


# Settings that must not depend on the defaults of the server, the database or the role. The client's encoding is an
# argument of the connection (_CONNECT_ARGS), because a pooler passes that on.
_SET_POSTGRESQL: Final = (
    "SET default_transaction_isolation = 'read committed'; SET standard_conforming_strings = on; SET extra_float_digits = 1"
)
# group_concat_max_len: a truncated list of ids would name another row.
# NO_BACKSLASH_ESCAPES: the driver only doubles quotes; otherwise it takes milliseconds for the JSON of 500 rows, and no
# other thread runs meanwhile.
_SET_MARIADB: Final = (
    "SET SESSION sql_mode ="
    " 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION,ERROR_FOR_DIVISION_BY_ZERO,NO_BACKSLASH_ESCAPES',"
    f" innodb_lock_wait_timeout = {_LOCK_S}, group_concat_max_len = {_GROUP_CONCAT_BYTES}, time_zone = '+00:00',"
    # Other values would truncate results, refuse statements, chain transactions, or create tables without transactions.
    " sql_select_limit = 18446744073709551615, sql_big_selects = 1, sql_safe_updates = 0, sql_auto_is_null = 0,"
    " completion_type = 'NO_CHAIN', unique_checks = 1, default_storage_engine = 'InnoDB', innodb_strict_mode = 1,"
    f" collation_connection = '{COLLATION}'"
)
_BEGIN: Final = (
    f"BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '{_LOCK_S}s';"
    f" SET LOCAL idle_in_transaction_session_timeout = '{_IDLE_S}s'; SELECT txid_current(), pg_backend_pid()"
)
_WRITE_MARK: Final = (
    "INSERT INTO write_marks (owner, number, at) VALUES (%s, %s, UNIX_TIMESTAMP())"
    " ON DUPLICATE KEY UPDATE number = VALUES(number), at = VALUES(at)"
)
_OLD_MARKS: Final = "SELECT owner FROM write_marks WHERE at < UNIX_TIMESTAMP() - 172800 LIMIT 1000"
_FORGET_MARKS: Final = sa.text(
    "DELETE FROM write_marks WHERE owner IN :owners AND at < UNIX_TIMESTAMP() - 172800"
).bindparams(sa.bindparam("owners", expanding=True))
_FIND_MARK: Final = "SELECT number FROM write_marks WHERE owner = %s FOR UPDATE WAIT 1"

_NO_GREETING: Final = 2013
"""PyMySQL's code for a lost connection, also during the handshake."""
_ANSWER_S: Final = 300
"""Longest time of a statement on MariaDB, in seconds. During the handshake ``read_timeout`` is shorter."""
_CONNECT_ARGS: Final[dict[str, dict[str, Any]]] = {
    # A server that has vanished is detected within half a minute, instead of the system's two hours.
    "postgresql": {
        "connect_timeout": 10, "keepalives_idle": 15, "keepalives_interval": 5, "keepalives_count": 3,
        "tcp_user_timeout": 30_000, "application_name": "asynctask", "client_encoding": "utf8",
    },
    "mariadb": {"connect_timeout": 10, "read_timeout": 10, "write_timeout": 60, "charset": "utf8mb4"},
}  # fmt: skip


@cache
def _quick_to_open(connection: Any) -> Any:
    """A class of PyMySQL's connections that loads the system's certificates (35 ms of CPU time) only to verify the server.
    Without TLS options in the URL it encrypts if the server supports that, and verifies nothing."""

    class Connection(connection):  # type: ignore[misc]
        def _create_ssl_ctx(self, sslp: Any) -> Any:
            if sslp:
                return super()._create_ssl_ctx(sslp)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return context

    return Connection


@contextmanager
def _closed_on_error(connection: Any) -> Iterator[None]:
    """Closes a connection of the driver that could not be set up, because nothing else will."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            connection.close()
        raise


@contextmanager
def _options_checked(dialect: Any, password: str | None) -> Iterator[None]:
    """Raises :class:`ConfigError` if the driver refuses options of the URL before it connects."""
    try:
        yield
    except (TypeError, ValueError, dialect.loaded_dbapi.ProgrammingError) as error:
        text = " ".join(str(error).removeprefix("Connection.__init__() ").split())[:200]
        text = text.replace(password, "***") if password else text
        raise ConfigError(f"database_url: the driver refuses an option in its query: {text}") from None


def _open_mariadb(dialect: Any, _record: Any, arguments: Any, options: Any) -> Any:
    try:
        with _options_checked(dialect, None):
            connection = _quick_to_open(dialect.loaded_dbapi.connections.Connection)(*arguments, **options)
    except (dialect.loaded_dbapi.OperationalError, dialect.loaded_dbapi.InternalError) as error:
        if isinstance(error, dialect.loaded_dbapi.OperationalError) and error.args[:1] != (_NO_GREETING,):
            raise
        message = f"no greeting as of MariaDB came; is this a MariaDB port? ({error.args[-1]})"
        raise dialect.loaded_dbapi.OperationalError(_NO_GREETING, message) from error
    with _closed_on_error(connection), connection.cursor() as cursor:
        connection._read_timeout = _ANSWER_S
        cursor.execute(_SET_MARIADB)
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
    return connection


def _refuse_closed(connection: Any, _record: Any, _proxy: Any) -> None:
    """Discards a pooled connection that is readable without a pending query: the server has closed it. Unlike a ping, this
    needs no round trip.
    """
    pgconn = getattr(connection, "pgconn", None)
    try:
        descriptor = pgconn.socket if pgconn is not None else connection._sock.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        closed = bool(poll.poll(0))
    except Exception:  # no socket
        closed = True
    if closed:
        raise exc.DisconnectionError("the server has hung up")


def _discard_read_only(context: ExceptionContext) -> None:
    """Treats a read-only session as a lost connection, so that the pool discards its other connections, too."""
    if is_read_only(context.original_exception):
        context.is_disconnect = True


def _roll_back(connection: Connection) -> None:
    if connection.invalidated:
        return
    try:
        connection.exec_driver_sql("ROLLBACK")
    except Exception:  # must not return to the pool with an open transaction
        connection.invalidate()


def missing_file(url: str) -> Path | None:
    """The file of an SQLite database if it does not exist yet; None if it exists, and for a server.

    Raises :class:`ConfigError` for an invalid URL.
    """
    parsed = _normal(url)
    if parsed.get_backend_name() != "sqlite":
        return None
    path = Path(str(parsed.database)).absolute()
    return None if path.exists() else path


_HOSTS: Final = re.compile(
    r"(?P<before>(?:postgres(?:ql)?(?:\+psycopg)?|mysql|mariadb)://(?:[^/?#]*@)?)(?P<hosts>[^@/?#]*,[^@/?#]*)(?P<rest>[/?].*)?"
)
"""A URL with several hosts, as libpq accepts it."""
_HOST: Final = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.%-]+)(?::(?P<port>[0-9]{1,5}))?")


def _with_hosts(url: str) -> URL:
    """The URL with several hosts moved to the query, where SQLAlchemy accepts them. Raises ArgumentError and ValueError."""
    several = _HOSTS.fullmatch(url)
    if several is None:
        return make_url(url)
    if not url.startswith("postgres"):
        raise ConfigError("database_url: MariaDB's driver connects to one host only; name the one of its load balancer")
    found = [_HOST.fullmatch(each) for each in several["hosts"].split(",")]
    parsed = make_url(several["before"] + (several["rest"] or ""))
    if None in found or {"host", "port"} & parsed.query.keys():
        raise ValueError("hosts")
    hosts = [(each["name"].strip("[]"), each["port"] or "5432") for each in found if each is not None]
    names, ports = zip(*hosts, strict=True)
    return parsed.update_query_dict({"host": ",".join(names), "port": ",".join(ports)})


def password_of(url: URL) -> str | None:
    """The password, which no message may show; both drivers accept it in the query, too."""
    found = url.password or next((url.query[name] for name in ("password", "passwd") if name in url.query), None)
    return None if found is None else str(found)


def _normal(url: str) -> URL:
    try:
        parsed = _with_hosts(url)
    except (exc.ArgumentError, ValueError):  # ValueError (bad port) contains parts of the password
        raise ConfigError(
            "database_url is no database URL; write sqlite:///asynctask.db or postgresql://user:password@host:5432/name"
            " (several hosts: postgresql://user:password@one:5432,two:5432/name), with %40 for @, %3A for : and"
            " %2F for / in a password"
        ) from None
    if parsed.drivername == "postgres":  # as libpq and hosting services write it
        parsed = parsed.set(drivername="postgresql")
    if parsed.drivername in _DRIVERS:
        parsed = parsed.set(drivername=_DRIVERS[parsed.drivername])
    backend = parsed.get_backend_name()
    if backend not in ("sqlite", *_DRIVERS):
        raise ConfigError(f"database_url: {backend} is not supported; choose sqlite://, postgresql:// or mysql://")
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite", *_DRIVERS.values()):
        raise ConfigError(f"database_url: write {backend}:// without a driver; psycopg 3 and PyMySQL are used")
    if backend == "sqlite" and (not parsed.database or parsed.database == ":memory:"):
        raise ConfigError("an in-memory SQLite database cannot be shared between threads and processes: give a file")
    return parsed


def _sqlite_begin(connection: Connection) -> None:
    write = connection.get_execution_options().get("asynctask_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


# -- SQLite: set-up of connections, and the writers' lock


def make_private_file(path: Path) -> None:
    """Creates a missing database file with mode 0600; SQLite would use the umask. The files beside it get the same mode,
    from SQLite or from this program. An existing file is not changed."""
    with suppress(OSError):  # SQLite reports what is wrong with the path
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


class WriteLock:
    """A blocking lock between all threads of all processes that write one SQLite file.

    SQLite's own ``busy_timeout`` polls with growing pauses, so that under load a writer can starve for seconds. A blocking
    lock on a side file queues the writers, first come, first served.

    The lock belongs to the open file. A forked child inherits its descriptor, so the lock would outlive a killed writer:
    therefore a child closes its descriptor right after the fork, and opens the file again when it writes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = threading.Lock()
        self._fd: int | None = None
        me = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _leave_to_parent(me()))

    def acquire(self) -> None:
        self._thread.acquire()
        try:
            if self._fd is None:
                self._fd = self._open()
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        except BaseException:
            self._thread.release()
            raise

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LedgerUnavailable(
                f"the SQLite database cannot be written ({error.strerror}: {self._path}): let this user write its folder"
                " and every file in it that begins with its name"
            ) from error

    def release(self) -> None:
        assert self._fd is not None
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._thread.release()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def leave_to_parent(self) -> None:
        """In a forked child: leaves the lock to the parent, whichever of the parent's threads holds it."""
        self._thread = threading.Lock()
        self.close()


def _leave_to_parent(lock: WriteLock | None) -> None:
    if lock is not None:
        lock.leave_to_parent()


def connect_sqlite(lock: WriteLock, dbapi_connection: Any) -> None:
    """Sets up a new connection of the driver; ``lock`` is that of its file."""
    # Turns off the driver's own transactions: _sqlite_begin emits BEGIN, IMMEDIATE for writers.
    dbapi_connection.isolation_level = None
    cursor = dbapi_connection.cursor()
    cursor.execute("PRAGMA busy_timeout=30000")
    if cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        # The switch does not wait for locks: of two at the same time, one would fail with "locked", so take the lock.
        lock.acquire()
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        finally:
            lock.release()
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA cache_size=-65536")
    # 32 MB instead of 4: a page that several transactions change is then written to the file once, and an index of digests
    # (keys) changes different pages with each job.
    cursor.execute("PRAGMA wal_autocheckpoint=8000")
    cursor.execute("PRAGMA temp_store=MEMORY")
    cursor.close()


# -- the database's clock, shared by all processes of a ledger

_STEP: Final = SECOND
"""Microseconds by which the database's clock and the boot clock may diverge between two reads; more counts as a step."""

_READ_EVERY: Final = 15 * SECOND
"""Microseconds between two reads of the database's time, in which good clocks diverge by less than a millisecond."""

_NOW: Final = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)",
    # Not now(), which is the start of the transaction, before any wait for a lock.
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)",
    # Not NOW(6), for the same reason. Connections use UTC, because other time zones repeat an hour.
    "mariadb": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', SYSDATE(6))",
}


def database_now(dialect: str) -> sa.ColumnElement[Any]:
    """The database's time in SQL, microseconds since 1970-01-01 UTC, evaluated after the statement has its locks."""
    return sa.literal_column(_NOW[dialect], sa.BigInteger())


class Reading(NamedTuple):
    """The database's time, and when, on the boot clock, the query was sent and answered (all in microseconds)."""

    now: int
    asked: int
    answered: int


def read_time(connection: Connection, clock: Clock) -> Reading:
    """Reads the database's time."""
    asked = clock.boottime()
    now = int(connection.execute(sa.select(database_now(connection.dialect.name))).scalar_one())
    return Reading(now, asked, clock.boottime())


class DatabaseTime:
    """The database's clock in one process.

    One host writes leases and due times, another judges them, and the clocks of hosts differ. So heartbeats read the
    database's time, and the boot clock extrapolates it: that clock neither stops during a suspension nor steps with the
    wall clock. Before the first read, the time is that of the machine's wall clock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset: int | None = None
        self._asked_at = -_READ_EVERY
        self._answered_at: int | None = None  # last heartbeat, on the boot clock
        self._steady_since = 0
        self._lease = 0

    def now(self) -> int:
        """Microseconds since 1970-01-01 UTC."""
        return self._clock.now() if self._offset is None else self._offset + self._clock.boottime()

    def set(self, now: int | Reading) -> None:
        """Sets the time to ``now`` (microseconds), just read from the database.

        A :class:`Reading` is exact up to its duration. If the time known before lies within that range, it is kept: so a
        slow answer, or a slow commit after it, does not make the clocks of two processes differ.
        """
        self._asked_at = self._clock.boottime()
        if not isinstance(now, Reading):
            self._offset = now - self._asked_at
            return
        least, most = now.now - now.answered, now.now - now.asked
        self._offset = (least + most) // 2 if self._offset is None else min(max(self._offset, least), most)

    def is_old(self) -> bool:
        """Whether the database's time is due to be read again."""
        return self._clock.boottime() - self._asked_at >= _READ_EVERY

    def answered(self, now: int | Reading | None, *, lease_s: float) -> None:
        """Notes that the database accepted a heartbeat with a lease of ``lease_s`` seconds, and the time ``now``
        (microseconds) if it was read. A gap of more than half a lease since the last heartbeat, or a step of the database's
        clock, counts as an interruption.
        """
        at = self._clock.boottime()
        before = self._offset
        if now is not None:
            self.set(now)
        stepped = before is not None and self._offset is not None and abs(self._offset - before) > _STEP
        if self._answered_at is None or at - self._answered_at > micros(lease_s / 2) or stepped:
            self._steady_since = at
        self._answered_at, self._lease = at, micros(lease_s)

    def may_judge(self, since: int) -> bool:
        """Whether this process may treat another process's expired lease, seen unrenewed ``since`` then (boot clock), as
        its death: only after heartbeats of its own for a full lease from then on, without an interruption. An unavailable
        database or a suspended machine would have kept other processes from renewing theirs, too.
        """
        at = self._clock.boottime()
        if self._answered_at is None or at - self._answered_at > self._lease // 2:
            return False
        return at - max(self._steady_since, since) >= self._lease
