"""Translation of the database drivers' errors to errors of this program, and repetition of transactions."""

from __future__ import annotations

import functools
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, ParamSpec, TypeVar

from sqlalchemy import exc
from sqlalchemy.engine import Connection

from asynctask.errors import AsyncTaskError, InputError, LedgerUnavailable, TooLarge

# Conflicts with another transaction, to be repeated.
# PostgreSQL: serialization failure, deadlock. MariaDB: deadlock, deadlock on the AUTO_INCREMENT counter, row changed.
_CONFLICTS: Final = frozenset({"40001", "40P01", 1213, 1467, 1020})
LOCKED: Final = 1205
"""MariaDB's code for a lock wait timeout."""
# PostgreSQL: program limit exceeded. MariaDB: a packet over max_allowed_packet.
_TOO_LARGE: Final = frozenset({"54000", 1153})
_LOCK_TIMEOUTS: Final = frozenset({"55P03", LOCKED})
_READ_ONLY: Final = frozenset({"25006", 1290, 1792, 1836})
"""Error codes of a read-only session, on a standby or by a setting. MariaDB: by an option of the server, of the session, or
by its mode."""
_TOO_MANY: Final = frozenset({"53300", 1040, 1203})
# Texts, because PostgreSQL's driver gives no code for a refused connection.
_TOO_MANY_TEXTS: Final = ("too many clients", "too many connections", "connection slots are reserved")

_DENIED: Final = frozenset({"42501", 1044, 1142, 1143, 1227})
"""Error codes for a missing privilege. MariaDB: for the database, a table, a column, an administrator's command."""

_OTHER_TABLES: Final = frozenset({"42P01", "42703", 1146, 1054})
"""Error codes for a table or a column that is not there."""
_OTHER_TABLES_TEXTS: Final = ("no such table", "no such column", "has no column named")

_SQLITE: Final = {
    sqlite3.SQLITE_NOTADB: "the file is no SQLite database: name another in database_url, or restore it from a backup",
    sqlite3.SQLITE_CORRUPT: "the SQLite file is damaged: restore it from a backup",
    sqlite3.SQLITE_CANTOPEN: "the SQLite file cannot be opened: let this user read and write it and its folder",
    sqlite3.SQLITE_READONLY: "the SQLite file cannot be written: let this user write it, its folder, and the files beside"
    " it whose names begin with its own",
    sqlite3.SQLITE_BUSY: "another program holds the lock of the SQLite file: let it end its transaction, or stop it",
    sqlite3.SQLITE_FULL: "the disk of the SQLite file is full: free some space",
}
"""What to do about SQLite's errors, by the low byte of their code."""

_TRIES: Final = 8

P = ParamSpec("P")
T = TypeVar("T")


class TransactionConflict(LedgerUnavailable):
    """A transaction was rolled back although the database answers: a repeat may succeed."""

    code = "transaction_conflict"


class LockTimeout(TransactionConflict):
    """A transaction was rolled back because another one held a row for longer than the lock timeout."""

    code = "lock_timeout"


class OutcomeUnknown(LedgerUnavailable):
    """The answer to a commit was lost, and its outcome could not be looked up for a minute: it may be committed or not."""

    code = "outcome_unknown"


def repeatable(function: Callable[P, T]) -> Callable[P, T]:
    """Makes a function repeat, up to 8 times, after a :class:`TransactionConflict`; not after a :class:`LockTimeout`,
    because each repeat could wait for as long again.

    The function must have no effects outside its transactions before these end, and each must be repeatable.
    """

    @functools.wraps(function)
    def repeat(*args: P.args, **kwargs: P.kwargs) -> T:
        for tried in range(1, _TRIES):
            try:
                return function(*args, **kwargs)
            except LockTimeout:
                raise
            except TransactionConflict:
                threading.Event().wait(0.005 * 2 ** (tried - 1))  # so that the other transaction can end
        return function(*args, **kwargs)

    return repeat


@contextmanager
def translated(password: str | None, *, undone: bool = False) -> Iterator[None]:
    """Converts errors of the driver, and removes the ``password`` from them.

    ``undone``: the block can be repeated, so a conflict raises :class:`TransactionConflict`. A value that a database cannot
    store (a NUL, a lone surrogate, a number out of range) raises :class:`InputError`.
    """
    try:
        yield
    except (UnicodeEncodeError, OverflowError) as error:  # by the driver, before it sends anything
        raise _unstorable(str(error)) from error
    except exc.TimeoutError as error:
        raise LedgerUnavailable(
            "every connection to the database that this process may open is in use (database_connections)"
        ) from error
    except exc.InvalidRequestError as error:
        if "connection is closed" not in str(error):
            raise
        raise LedgerUnavailable("the database hangs up as soon as it is connected to") from error
    except exc.DBAPIError as error:
        found = _of_driver(error, _text(error, password), undone=undone)
        if found is None:
            raise
        raise found from error


def _of_driver(error: exc.DBAPIError, text: str, *, undone: bool) -> AsyncTaskError | None:
    """The error to raise for an error of the driver; None to raise that itself."""
    code = code_of(error)
    if code in _DENIED:
        return LedgerUnavailable(
            f"the user of database_url lacks a right: {text}; let it own the database, or grant it all on its tables"
        )
    if code in _OTHER_TABLES or any(words in text for words in _OTHER_TABLES_TEXTS):
        return LedgerUnavailable(
            f"the database has another schema than this process was started with ({text}): restart it with the installed"
            " release; `asynctask db check` says which schema that needs"
        )
    if isinstance(error, exc.IntegrityError | exc.ProgrammingError | exc.NotSupportedError):
        return None
    if isinstance(error, exc.DataError):
        return _unstorable(text)
    if code in _TOO_LARGE:
        return TooLarge(f"the database does not take so much in one statement: {text}")
    if code in _TOO_MANY or any(words in text for words in _TOO_MANY_TEXTS):
        return LedgerUnavailable(
            f"the database has no connection left: raise its max_connections or lower database_connections ({text})"
        )
    if undone and code in _LOCK_TIMEOUTS:
        return LockTimeout(f"somebody else holds a row that is needed, and did not let go of it in time: {text}")
    if undone and (code in _CONFLICTS or error.connection_invalidated):
        return TransactionConflict(f"the transaction was undone: {text}")
    mend = _SQLITE.get((getattr(error.orig, "sqlite_errorcode", None) or 0) & 0xFF)
    return LedgerUnavailable(f"{mend} ({text})" if mend else f"the database does not answer: {text}")


def _unstorable(text: str) -> InputError:
    return InputError(f"the database cannot store a value that was given: {text}", code="unstorable")


def _text(error: exc.DBAPIError, password: str | None) -> str:
    text = " ".join(str(error.orig or error).split())[:500]
    return text.replace(password, "***") if password else text


def code_of(error: exc.DBAPIError) -> Any:
    """The server's error code: five characters on PostgreSQL, a number on MariaDB."""
    return _code(error.orig)


def _code(error: BaseException | None) -> Any:
    text = error.args[0] if error is not None and error.args else None
    return text if isinstance(text, int) else getattr(error, "sqlstate", None)


def is_read_only(error: BaseException | None) -> bool:
    """Whether an error of the driver means that its session is read-only.

    Such a session is discarded, because the setting is fixed for a connection, and its server may no longer be the primary.
    A new connection may be able to write again.
    """
    return _code(error) in _READ_ONLY


@contextmanager
def by_driver(connection: Connection, statement: str) -> Iterator[Any]:
    """The driver's own connection, for statements that SQLAlchemy cannot execute, or to which it adds more cost than they
    have. Raises the errors that SQLAlchemy would raise for this ``statement``."""
    driver: Any = connection.connection.driver_connection
    error_class: Any = connection.dialect.loaded_dbapi.Error
    try:
        yield driver
    except error_class as error:
        lost = bool(connection.dialect.is_disconnect(error, driver, None)) or is_read_only(error)
        if lost:
            connection.invalidate(error)
        raise exc.DBAPIError.instance(
            statement, None, error, error_class, connection_invalidated=lost, dialect=connection.dialect
        ) from error
    except BaseException:  # interrupted in the middle of the protocol: the connection is unusable
        connection.invalidate()
        raise
