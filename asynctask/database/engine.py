"""Connections and transactions: one place that knows how each database wants to be talked to.

A commit whose answer is lost is looked up, never guessed. PostgreSQL can be asked what became of a transaction. MariaDB
cannot: there every write transaction leaves a number in the row of its connection (table ``write_marks``), and that row
tells. So a write either stands when :meth:`Database.write` ends, or it raises and nothing of it stands.
"""

from __future__ import annotations

import fcntl
import os
import select
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.engine import Connection, Engine, ExceptionContext
from sqlalchemy.engine.url import URL, make_url

from asynctask.clock import SECOND, Clock, Ids, SystemIds, micros
from asynctask.database.retrying import (
    LOCKED,
    OutcomeUnknown,
    TransactionConflict,
    code_of,
    is_lost,
    is_read_only,
    translated,
)
from asynctask.errors import ConfigError, LedgerUnavailable, not_installed

__all__ = ["Database", "DatabaseTime", "WriteLock", "connect_sqlite", "database_now", "missing_file", "read_now"]

_DRIVERS: Final = {"postgresql": "postgresql+psycopg", "mysql": "mariadb+pymysql", "mariadb": "mariadb+pymysql"}
_EXTRAS: Final = {"postgresql": "postgresql", "mariadb": "mysql"}

_LOCK_S: Final = 20
_IDLE_S: Final = 60
_LOOK_UP_S: Final = 60.0
_KEPT_OPEN: Final = 3
_LONGEST_LIST: Final = 16_000_000


@dataclass(slots=True)
class _Mark:
    """By what a transaction is found again: its id and process on PostgreSQL, its row and number on MariaDB."""

    number: int
    process: int
    owner: str = ""


class Database:
    """The database behind a ledger.

    Arguments: ``url`` as SQLAlchemy takes it; ``postgresql://`` and ``mysql://`` mean psycopg 3 and PyMySQL. ``pool_size``
    is the most connections that one process opens at a time. ``ids`` names its connections.
    Raises :class:`ConfigError` for a URL that cannot work.
    """

    def __init__(self, url: str, *, pool_size: int = 10, ids: Ids | None = None) -> None:
        self.url = _normal(url)
        self.dialect = self.url.get_backend_name()
        self.is_sqlite = self.dialect == "sqlite"
        self.pooler: bool | None = None
        """PostgreSQL: whether a pooler stands between (PgBouncer, pgcat); None before the first connection."""
        self._ids = ids or SystemIds()
        self._password = None if self.url.password is None else str(self.url.password)
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
            lock = self._lock
            event.listen(engine, "connect", lambda connection, _record: connect_sqlite(lock, connection))
            event.listen(engine, "begin", _sqlite_begin)
            return engine
        kept = min(_KEPT_OPEN, pool_size)
        try:
            # Statements stand alone unless write() or snapshot() begins a transaction: no BEGIN and ROLLBACK for a look.
            engine = sa.create_engine(
                self.url,
                pool_size=kept,
                max_overflow=pool_size - kept,
                pool_use_lifo=True,
                isolation_level="AUTOCOMMIT",
                skip_autocommit_rollback=True,
                connect_args=_CONNECT_ARGS[self.dialect],
            )
        except ImportError:
            raise ConfigError(not_installed(f"the driver of {self.dialect}", _EXTRAS[self.dialect])) from None
        if self.dialect == "mariadb":
            event.listen(engine, "do_connect", _dial_mariadb)
        event.listen(engine, "connect", self._connect_postgresql if self.dialect == "postgresql" else _connect_mariadb)
        event.listen(engine, "checkout", _refuse_hung_up)
        event.listen(engine, "handle_error", _give_up_read_only)
        return engine

    def _connect_postgresql(self, connection: Any, _record: Any) -> None:
        # A pooler answers for a server process of its own making: then no state may be kept in a session.
        process, isolation = connection.execute(_WHO, prepare=False).fetchone()
        self.pooler = process != connection.info.backend_pid
        if self.pooler:
            connection.prepare_threshold = None
        elif isolation != "read committed":  # statements that stand alone would fail with what this program never asked for
            connection.execute("SET default_transaction_isolation = 'read committed'", prepare=False)

    def behind_pooler(self) -> bool:
        """Whether a pooler stands between: then LISTEN and advisory locks of a session do not work."""
        if self.dialect == "postgresql" and self.pooler is None:
            with self.read():
                pass
        return bool(self.pooler)

    # -- transactions

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection to read with. Raises :class:`LedgerUnavailable`.

        On SQLite what it reads stands together; elsewhere each statement sees what is committed when it begins.
        """
        with translated(self._password), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A connection whose statements all see the same moment, on every database. Raises :class:`LedgerUnavailable`.

        Keep it short: while it lasts, a server keeps every row version that it might still ask for.
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

        Keep it short (50 ms). On SQLite the transaction is IMMEDIATE and behind the blocking lock, so what it reads cannot
        change under it; elsewhere it is READ COMMITTED. ``marked`` off: it is not looked up when its answer is lost, as
        befits what makes the tables themselves.

        Raises :class:`TransactionConflict` where it was undone and may be tried again (see :func:`repeatable`),
        :class:`OutcomeUnknown`, and :class:`LedgerUnavailable`.
        """
        if self._lock is not None:
            # The connection is taken before the lock: who holds the lock never waits for a connection.
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
                    self._leave(connection, mark)
            except BaseException:
                _roll_back(connection)
                raise
            self._commit(connection, mark, marked)

    def _begin(self, connection: Connection) -> _Mark:
        if self.dialect == "mariadb":
            connection.exec_driver_sql("START TRANSACTION")
            info = connection.info
            owner = info.setdefault("asynctask_owner", self._ids.jids(1)[0])
            info["asynctask_number"] = info.get("asynctask_number", 0) + 1
            return _Mark(info["asynctask_number"], connection.connection.driver_connection.thread_id(), owner)  # type: ignore[union-attr]
        # One round trip. A prepared statement could not hold more than one, so it goes to the driver itself.
        with _through(connection):
            cursor = connection.connection.driver_connection.execute(_BEGIN, prepare=False)  # type: ignore[union-attr]
            while cursor.nextset():
                pass
            number, process = cursor.fetchone()
        return _Mark(int(number), int(process))

    def _leave(self, connection: Connection, mark: _Mark) -> None:
        if self.dialect == "mariadb":
            connection.exec_driver_sql(_LEAVE_MARK, (mark.owner, mark.number))

    def _commit(self, connection: Connection, mark: _Mark, marked: bool) -> None:
        try:
            connection.exec_driver_sql("COMMIT")
        except exc.DBAPIError as error:
            if not error.connection_invalidated or is_read_only(error.orig):  # the server answered, and the answer was no
                _roll_back(connection)
                raise
            if not marked:
                raise
            if not self._landed(mark):
                raise TransactionConflict("the connection was lost before the commit; nothing of it stands") from error

    def _landed(self, mark: _Mark) -> bool:
        """Whether a transaction stands whose commit was not answered. Raises :class:`OutcomeUnknown`."""
        look = self._landed_postgresql if self.dialect == "postgresql" else self._landed_mariadb
        pause, waited, last = threading.Event(), 0.0, ""
        while waited < _LOOK_UP_S:
            try:
                if (stands := look(mark)) is not None:
                    return stands
            except LedgerUnavailable as error:
                last = str(error)
            pause.wait(0.1)
            waited += 0.1
        raise OutcomeUnknown(f"the answer to a commit was lost, and for {_LOOK_UP_S:g} s there was no asking: {last}")

    def _landed_postgresql(self, mark: _Mark) -> bool | None:
        with self.read() as connection:
            status = connection.exec_driver_sql("SELECT txid_status(%s)", (mark.number,)).scalar()
            if status == "in progress":  # its process has not noticed yet that nobody listens; it would hold its locks
                connection.exec_driver_sql("SELECT pg_terminate_backend(%s)", (mark.process,))
        return None if status == "in progress" else status == "committed"

    def _landed_mariadb(self, mark: _Mark) -> bool | None:
        with self.read() as connection:
            connection.exec_driver_sql("START TRANSACTION")
            try:  # the lock is had only when the transaction in question has ended, one way or the other
                found = connection.exec_driver_sql(_FIND_MARK, (mark.owner,)).scalar()
            except exc.DBAPIError as error:
                if code_of(error) != LOCKED:
                    raise
                # Its thread has not noticed yet that nobody listens. Only who is seen to hold the lock is ended: after a
                # restart of the server the same number is another's.
                with suppress(exc.DBAPIError):
                    connection.exec_driver_sql(f"KILL {mark.process:d}")
                return None
            finally:
                _roll_back(connection)
        return found is not None and int(found) >= mark.number

    def forget_marks(self, connection: Connection) -> None:
        """Removes what connections of days gone by have left, in the caller's transaction."""
        if self.dialect == "mariadb":
            connection.exec_driver_sql("DELETE FROM write_marks WHERE at < UNIX_TIMESTAMP() - 172800")

    @property
    def absolute_url(self) -> str:
        """Its URL, with the password, for another process that may run in another folder."""
        url = self.url if self.path is None else self.url.set(database=str(self.path.absolute()))
        return url.render_as_string(hide_password=False)

    def close(self) -> None:
        """Closes every connection."""
        self.engine.dispose()
        if self._lock is not None:
            self._lock.close()


_WHO: Final = "SELECT pg_backend_pid(), current_setting('default_transaction_isolation')"
_BEGIN: Final = (
    f"BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '{_LOCK_S}s';"
    f" SET LOCAL idle_in_transaction_session_timeout = '{_IDLE_S}s'; SELECT txid_current(), pg_backend_pid()"
)
_LEAVE_MARK: Final = (
    "INSERT INTO write_marks (owner, number, at) VALUES (%s, %s, UNIX_TIMESTAMP())"
    " ON DUPLICATE KEY UPDATE number = VALUES(number), at = VALUES(at)"
)
_FIND_MARK: Final = "SELECT number FROM write_marks WHERE owner = %s FOR UPDATE WAIT 1"

_NO_GREETING: Final = 2013
"""What PyMySQL says of a connection that was lost, also before anything was asked."""
_ANSWER_S: Final = 300
"""How long a statement may take on MariaDB. A greeting comes at once or never, so ``read_timeout`` is short until then."""
_CONNECT_ARGS: Final[dict[str, dict[str, Any]]] = {
    # A server that vanished without a word is noticed within half a minute, not after the system's two hours.
    "postgresql": {
        "connect_timeout": 10, "keepalives_idle": 15, "keepalives_interval": 5, "keepalives_count": 3,
        "tcp_user_timeout": 30_000, "application_name": "asynctask",
    },
    "mariadb": {"connect_timeout": 10, "read_timeout": 10, "write_timeout": 60, "charset": "utf8mb4"},
}  # fmt: skip


def _dial_mariadb(dialect: Any, _record: Any, arguments: Any, options: Any) -> Any:
    try:
        return dialect.connect(*arguments, **options)
    except (dialect.loaded_dbapi.OperationalError, dialect.loaded_dbapi.InternalError) as error:
        if isinstance(error, dialect.loaded_dbapi.OperationalError) and error.args[:1] != (_NO_GREETING,):
            raise
        said = f"no greeting as of MariaDB came; is this a MariaDB port? ({error.args[-1]})"
        raise dialect.loaded_dbapi.OperationalError(_NO_GREETING, said) from error


def _connect_mariadb(connection: Any, _record: Any) -> None:
    connection._read_timeout = _ANSWER_S
    # Nothing is taken over from the server's own defaults: strictness, isolation and the wait for locks are ours to say.
    # A list of ids that is cut off in the middle of one would name another row. Where a backslash is no escape the driver
    # has only quotes to double in a text: else it takes milliseconds for the JSON of 500 rows, and no other thread runs.
    with connection.cursor() as cursor:
        cursor.execute(
            "SET SESSION sql_mode ="
            " 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION,ERROR_FOR_DIVISION_BY_ZERO,NO_BACKSLASH_ESCAPES',"
            f" innodb_lock_wait_timeout = {_LOCK_S}, group_concat_max_len = {_LONGEST_LIST}, time_zone = '+00:00'"
        )
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")


def _refuse_hung_up(connection: Any, _record: Any, _proxy: Any) -> None:
    """A connection on which something waits to be read though nothing was asked has been hung up: another is made.

    It costs no question to the server, unlike a ping.
    """
    pgconn = getattr(connection, "pgconn", None)
    try:
        descriptor = pgconn.socket if pgconn is not None else connection._sock.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        hung_up = bool(poll.poll(0))
    except Exception:  # it has no socket any more
        hung_up = True
    if hung_up:
        raise exc.DisconnectionError("the server has hung up")


def _give_up_read_only(context: ExceptionContext) -> None:
    """A session that may only read is taken for a lost connection, and the pool's others with it."""
    if is_read_only(context.original_exception):
        context.is_disconnect = True


@contextmanager
def _through(connection: Connection) -> Iterator[None]:
    """Errors of the driver itself as SQLAlchemy would tell them."""
    error_class: Any = connection.dialect.loaded_dbapi.Error
    try:
        yield
    except error_class as error:
        lost = is_lost(connection, error)
        if lost:
            connection.invalidate(error)
        raise exc.OperationalError("BEGIN", None, error, connection_invalidated=lost) from error
    except BaseException:  # broken off in the middle: nobody may use it after that
        connection.invalidate()
        raise


def _roll_back(connection: Connection) -> None:
    if connection.invalidated:
        return
    try:
        connection.exec_driver_sql("ROLLBACK")
    except Exception:  # whatever is wrong with it, it must not go back to the pool with a transaction open
        connection.invalidate()


def missing_file(url: str) -> Path | None:
    """The file of an SQLite database that does not exist yet; None where it does, and for a server.

    Raises :class:`ConfigError` for a URL that cannot work.
    """
    parsed = _normal(url)
    if parsed.get_backend_name() != "sqlite":
        return None
    path = Path(str(parsed.database)).absolute()
    return None if path.exists() else path


def _normal(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (exc.ArgumentError, ValueError):  # ValueError, with parts of a password in it, for a port that is no number
        raise ConfigError(
            "database_url is no database URL; write sqlite:///asynctask.db or postgresql://user:password@host:5432/name,"
            " with %40 for @, %3A for : and %2F for / in a password"
        ) from None
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


# -- What a connection to SQLite needs, and the lock that its writers queue at.


class WriteLock:
    """A blocking lock between all threads of all processes that write one SQLite file.

    SQLite's own ``busy_timeout`` polls with growing pauses: under load a writer can starve for seconds while others
    come and go. A blocking lock on a side file queues writers instead, first come, first served.

    The lock belongs to the open file, of which a forked child has a descriptor too: it would outlive a process that is
    killed while it writes. So a child closes its descriptor as soon as it is forked, and opens the file anew if it writes.
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
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        except BaseException:
            self._thread.release()
            raise

    def release(self) -> None:
        assert self._fd is not None
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._thread.release()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def leave_to_parent(self) -> None:
        """In a forked child: the lock stays the parent's alone, whichever of its threads holds it."""
        self._thread = threading.Lock()
        self.close()


def _leave_to_parent(lock: WriteLock | None) -> None:
    if lock is not None:
        lock.leave_to_parent()


def connect_sqlite(lock: WriteLock, dbapi_connection: Any) -> None:
    """Sets up a new connection of the driver; ``lock`` is the one of its file."""
    # The driver's own transaction handling is off: BEGIN is emitted below, IMMEDIATE for writers.
    dbapi_connection.isolation_level = None
    cursor = dbapi_connection.cursor()
    cursor.execute("PRAGMA busy_timeout=30000")
    if cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        # The switch does not wait for others: of two that make it at once, one would fail with "locked".
        lock.acquire()
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        finally:
            lock.release()
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA cache_size=-65536")
    cursor.execute("PRAGMA temp_store=MEMORY")
    cursor.close()


# -- The database's clock: the one clock that all processes of a ledger share.

_JUMP: Final = SECOND
"""Microseconds by which the database's clock and ours may come apart between two answers before that counts as a step."""

_ASK: Final = 15 * SECOND
"""Microseconds between two questions for the time: good clocks come apart by less than a millisecond in them."""

_NOW: Final = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)",
    # Not now(): that is when the transaction began, however long it has waited for a lock since.
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)",
    # Not NOW(6), for the same reason. Each connection is in UTC: another time zone may have an hour twice.
    "mariadb": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', SYSDATE(6))",
}


def database_now(dialect: str) -> sa.ColumnElement[Any]:
    """The database's clock as an expression of SQL: microseconds since 1970-01-01 UTC, once its statement has its locks."""
    return sa.literal_column(_NOW[dialect], sa.BigInteger())


def read_now(database: Database) -> int:
    """What time the database has it: microseconds since 1970-01-01 UTC. Raises LedgerUnavailable."""
    with database.read() as connection:
        return int(connection.execute(sa.select(database_now(database.dialect))).scalar_one())


class DatabaseTime:
    """The database's clock as one process reads it.

    Leases and due times are written by one host and judged by another, and hosts disagree about the time. So the database
    is asked with each heartbeat; between two answers the machine's boot clock carries the time on, which neither a step of
    the wall clock nor a suspension stops. Before the first answer it is the machine's wall clock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset: int | None = None
        self._asked_at = -_ASK
        self._answered_at: int | None = None  # the last heartbeat, on the boot clock
        self._steady_since = 0
        self._lease = 0

    def now(self) -> int:
        """Microseconds since 1970-01-01 UTC."""
        return self._clock.now() if self._offset is None else self._offset + self._clock.boottime()

    def set(self, now: int) -> None:
        """The database says that it is ``now`` (microseconds)."""
        self._asked_at = self._clock.boottime()
        self._offset = now - self._asked_at

    def is_old(self) -> bool:
        """Whether it is time to ask the database again."""
        return self._clock.boottime() - self._asked_at >= _ASK

    def answered(self, now: int | None, *, lease_s: float) -> None:
        """The database took a heartbeat of this process, for a lease of ``lease_s`` seconds; ``now`` (microseconds): and
        said what time it is.

        A gap of more than half a lease since the heartbeat before, or a step of the database's clock, is an interruption.
        """
        at = self._clock.boottime()
        before = self._offset
        if now is not None:
            self.set(now)
        stepped = before is not None and self._offset is not None and abs(self._offset - before) > _JUMP
        if self._answered_at is None or at - self._answered_at > micros(lease_s / 2) or stepped:
            self._steady_since = at
        self._answered_at, self._lease = at, micros(lease_s)

    def may_judge(self) -> bool:
        """Whether this process may take the end of another's lease for its death.

        Only if it has itself had answers for a full lease without an interruption: a database that was away, or a machine
        that was suspended, kept the others from renewing theirs as well.
        """
        at = self._clock.boottime()
        if self._answered_at is None or at - self._answered_at > self._lease // 2:
            return False
        return at - self._steady_since >= self._lease
