"""All errors of the project: one root class, attributes for programs, messages that name the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from asynctask._version import DISTRIBUTION


def not_installed(what: str, extra: str) -> str:
    """The message for a missing library that an extra of this package installs."""
    return f"{what} is not installed: pip install '{DISTRIBUTION}[{extra}]'"


class AsyncTaskError(Exception):
    """Root of all errors. ``code`` is stable and for programs, the message for people."""

    code = "error"


class NormalException(AsyncTaskError):
    """Raised by job code to refuse the item for a business reason: the item is ``failed`` and never retried, and the job
    ends.

    Arguments: the message for people, and optionally a stable ``code`` for grouping.
    """

    code = "failed"

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of one cell, row or field.

    ``row`` is numbered as in the user's spreadsheet, from 1; for JSON items it is the 1-based position. ``message`` is for
    people. If ``text`` names a text of the catalogue (``asynctask/lists/texts``), the message can be rendered in every
    shipped language, with the values ``params`` (JSON-ready).
    """

    row: int | None
    column: str | None
    code: str
    message: str
    value: Any = None
    text: str = field(default="", compare=False)
    params: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """The problem as it is shown to people and programs."""
        return {
            "row": self.row,
            "column": self.column,
            "code": self.code,
            "message": self.message,
            "value": self.value,
        }


class InputError(AsyncTaskError):
    """Invalid input. ``status``: the HTTP status; ``errors``: the single problems; ``text`` and ``params`` as in
    :class:`Problem`.
    """

    code = "invalid_input"
    status = 422

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int | None = None,
        errors: Iterable[Problem] = (),
        text: str = "",
        params: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.text, self.params = text, dict(params or {})
        if code is not None:
            self.code = code
        if status is not None:
            self.status = status
        self.errors: Sequence[Problem] = tuple(errors)

    def as_json(self) -> dict[str, Any]:
        """The error for another process, JSON-ready; :meth:`from_json` is the inverse."""
        return {
            "message": str(self),
            "code": self.code,
            "status": self.status,
            "text": self.text,
            "params": self.params,
            "errors": [asdict(each) for each in self.errors],
        }

    @staticmethod
    def from_json(kept: Mapping[str, Any]) -> InputError:
        """The error described by :meth:`as_json`, without its class."""
        return InputError(**{**kept, "errors": [Problem(**each) for each in kept["errors"]]})

    @property
    def suggestions(self) -> Sequence[Mapping[str, Any]]:
        """For a text of uncertain encoding: the likely encodings, each with ``encoding`` and the first non-ASCII ``cells``
        as decoded by it."""
        return tuple(self.params.get("suggestions", ()))

    @property
    def sheets(self) -> Sequence[str]:
        """For a workbook whose sheet was refused: the names of its other sheets, first the one that has the columns."""
        return tuple(self.params.get("other_sheets", ()))


class TooLarge(InputError):
    """Input over a limit; the message names the limit, its value, and the setting that changes it."""

    code = "too_large"
    status = 413


class UnsupportedFormat(InputError):
    """A file in no readable format, or in another format than its name says."""

    code = "unsupported_format"
    status = 415


class UnknownWorker(InputError):
    """No worker of that name is registered. ``option``: the option that names it, if it is not the Task's own worker."""

    code = "unknown_worker"

    def __init__(self, name: str, known: Iterable[str], *, option: str = "") -> None:
        names = ", ".join(sorted(known)) or "none"
        text = f"no worker is registered as {name!r}; registered: {names}"
        problem = Problem(None, option, self.code, text, name[:200])
        super().__init__(f"option {option!r}: {text}" if option else text, errors=[problem] if option else ())
        self.name = name


class NotFound(AsyncTaskError):
    """No such Task, Event, worker or process."""

    code = "not_found"
    status = 404


class Conflict(AsyncTaskError):
    """The current state forbids the action; the message names the state and what is allowed."""

    code = "conflict"
    status = 409


class IdInUse(Conflict):
    """A job cannot be sent under an id that another job uses; the message names the id and where that job is."""

    code = "id_in_use"


class TransitionRefused(Conflict):
    """A transition that the state machine does not have."""

    code = "transition_refused"


class OtherEngine(Conflict):
    """The job belongs to the queue of another program, which alone can run it again."""

    code = "other_engine"

    def __init__(self, engine: str, action: str = "") -> None:
        """``action``: the refused action, if sending the job again would not have the same effect."""
        how = {
            "celery": "its task's delay()", "dramatiq": "its actor's send()", "rq": "its function's delay()",
            "huey": "a call of its task",
        }.get(engine, "its own means")  # fmt: skip
        mend = f"it cannot be {action} from here" if action else f"send it again by {how}"
        super().__init__(f"this job is one of {engine}, which keeps, retries and removes its jobs by itself: {mend}")
        self.engine = engine


class ConfigError(AsyncTaskError):
    """A setting is unknown, of the wrong type, or contradicts another."""

    code = "bad_config"


class NoLinks(ConfigError):
    """There is no secret to sign links with."""

    code = "no_link_secret"
    status = 409


class SchemaOutdated(AsyncTaskError):
    """The database's schema is not the one that this version needs; the message has the command that upgrades it."""

    code = "schema_outdated"


class Unavailable(AsyncTaskError):
    """A required server does not answer."""

    code = "unavailable"
    status = 503


class LedgerUnavailable(Unavailable):
    """The database does not answer."""

    code = "ledger_unavailable"


class BrokerUnavailable(Unavailable):
    """The broker does not answer."""

    code = "broker_unavailable"


class StorageUnavailable(Unavailable):
    """The bucket of exports does not answer."""

    code = "storage_unavailable"


class JobTimeout(BaseException):
    """Raised inside a job that exceeds its ``timeout``."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(seconds)
        self.seconds = seconds

    def __str__(self) -> str:
        return f"over its timeout of {self.seconds:g} s"


class JobInterrupted(BaseException):
    """Raised inside a job that still runs when its runtime must end."""


class FinalError(AsyncTaskError):
    """An error of a job that another attempt would not change: the job ends in ``error``, and is never retried."""

    code = "final"


class JobExit(FinalError):
    """Job code called ``sys.exit()`` with another code than 0 or None. ``exit_code``: as a shell would see it; for a
    multiple of 256, for which a shell sees 0, the number itself."""

    code = "exited"

    def __init__(self, exit_code: int, text: str = "") -> None:
        super().__init__(f"exit code {exit_code}{': ' if text else ''}{text}")
        self.exit_code = exit_code


class NotPerformed(FinalError):
    """Job code returned work that is still to be performed: a coroutine, a generator, a ``map``, a function."""

    code = "not_performed"


_MAX_CHAIN = 100


def carries(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether an exception is of this kind, was raised from one (``__cause__``) or while handling one (``__context__``), or
    is a group that contains one."""
    left, seen = [error], set[int]()
    while left and len(seen) < _MAX_CHAIN:
        each = left.pop()
        if isinstance(each, kind):
            return True
        if id(each) in seen:
            continue
        seen.add(id(each))
        left += [near for near in (each.__cause__, each.__context__) if near is not None]
        if isinstance(each, BaseExceptionGroup):
            left += each.exceptions
    return False
