"""What a database says when it cannot, in the words of this program; and what is right to do again."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, ParamSpec, TypeVar

from sqlalchemy import exc
from sqlalchemy.engine import Connection

from asynctask.errors import InputError, LedgerUnavailable, TooLarge

__all__ = [
    "LOCKED",
    "LockTimeout",
    "OutcomeUnknown",
    "TransactionConflict",
    "code_of",
    "is_lost",
    "is_read_only",
    "repeatable",
    "translated",
]

# What a transaction fails with because of another one: the same again is right.
# PostgreSQL: serialization failure, deadlock. MariaDB: deadlock, deadlock over the counter of AUTO_INCREMENT, row changed.
_CONFLICTS: Final = frozenset({"40001", "40P01", 1213, 1467, 1020})
LOCKED: Final = 1205
"""MariaDB's code for a lock that was not had in time."""
# PostgreSQL: over a limit of the program. MariaDB: a packet over max_allowed_packet.
_TOO_LARGE: Final = frozenset({"54000", 1153})
_NOT_HAD: Final = frozenset({"55P03", LOCKED})
_READ_ONLY: Final = frozenset({"25006", 1290, 1792, 1836})
"""What a session says that may read only: a standby's, or one that was told so by a setting. MariaDB: by an option of the
server, by one of the session, by its mode."""
_TOO_MANY: Final = frozenset({"53300", 1040, 1203})
# PostgreSQL's driver tells no code of a connection that was refused.
_TOO_MANY_SAID: Final = ("too many clients", "too many connections", "connection slots are reserved")

_TRIES: Final = 8

P = ParamSpec("P")
T = TypeVar("T")


class TransactionConflict(LedgerUnavailable):
    """A transaction that is certainly undone, though the database answers: the same again may well succeed."""

    code = "transaction_conflict"


class LockTimeout(TransactionConflict):
    """Somebody else held a row for as long as a transaction waits for one: it is undone."""

    code = "lock_timeout"


class OutcomeUnknown(LedgerUnavailable):
    """The answer to a commit was lost, and the database could not be asked for a minute: it may stand or not."""

    code = "outcome_unknown"


def repeatable(function: Callable[P, T]) -> Callable[P, T]:
    """Has a function run again, up to 8 times, where its transaction was undone for the sake of another.

    The function must do nothing outside its transactions before they end, and each of those must bear to come again. It
    does not run again after a :class:`LockTimeout`: it has waited for long, and would wait for as long each time.
    """

    @functools.wraps(function)
    def again(*args: P.args, **kwargs: P.kwargs) -> T:
        for tried in range(1, _TRIES):
            try:
                return function(*args, **kwargs)
            except LockTimeout:
                raise
            except TransactionConflict:
                threading.Event().wait(0.005 * 2 ** (tried - 1))  # the other one needs a moment to end
        return function(*args, **kwargs)

    return again


@contextmanager
def translated(password: str | None, *, undone: bool = False) -> Iterator[None]:
    """Errors of the driver in the words of this program, without the ``password``.

    ``undone``: what was begun can be begun again, so a conflict is a :class:`TransactionConflict`. A value that a database
    cannot store (a NUL, half a character, a number out of range) is an :class:`InputError`.
    """
    try:
        yield
    except (UnicodeEncodeError, OverflowError) as error:  # the driver, before anything is sent
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
        if isinstance(error, exc.IntegrityError | exc.ProgrammingError | exc.NotSupportedError):
            raise
        said = _said(error, password)
        if isinstance(error, exc.DataError):
            raise _unstorable(said) from error
        code = code_of(error)
        if code in _TOO_LARGE:
            raise TooLarge(f"the database does not take so much in one statement: {said}") from error
        if code in _TOO_MANY or any(words in said for words in _TOO_MANY_SAID):
            raise LedgerUnavailable(
                f"the database has no connection left: raise its max_connections or lower database_connections ({said})"
            ) from error
        if undone and code in _NOT_HAD:
            raise LockTimeout(
                f"somebody else holds a row that is needed, and did not let go of it in time: {said}"
            ) from error
        if undone and (code in _CONFLICTS or error.connection_invalidated):
            raise TransactionConflict(f"the transaction was undone: {said}") from error
        raise LedgerUnavailable(f"the database does not answer: {said}") from error


def _unstorable(said: str) -> InputError:
    return InputError(f"the database cannot store a value that was given: {said}", code="unstorable")


def _said(error: exc.DBAPIError, password: str | None) -> str:
    text = " ".join(str(error.orig or error).split())[:500]
    return text.replace(password, "***") if password else text


def code_of(error: exc.DBAPIError) -> Any:
    """The server's own code: five characters on PostgreSQL, a number on MariaDB."""
    return _code(error.orig)


def _code(error: BaseException | None) -> Any:
    said = error.args[0] if error is not None and error.args else None
    return said if isinstance(said, int) else getattr(error, "sqlstate", None)


def is_read_only(error: BaseException | None) -> bool:
    """Whether an error of the driver says that its session may only read.

    The session is given up then. A connection keeps the setting that it began with, and its server may be a primary no
    more: a new one is what tells whether that is over.
    """
    return _code(error) in _READ_ONLY


def is_lost(connection: Connection, error: BaseException) -> bool:
    """Whether a connection is of no more use after this error of its driver: for errors that do not pass SQLAlchemy."""
    driver: Any = connection.connection.driver_connection
    return bool(connection.dialect.is_disconnect(error, driver, None)) or is_read_only(error)  # type: ignore[arg-type]
