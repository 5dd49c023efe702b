"""Logging through structlog, as the process has configured it; and the lines that the application logs by :mod:`logging`.

A line that cannot be written (a full disk, a closed stream) is dropped. Most lines come from a thread that handles a
failure and must continue: if logging a warning ended the heartbeat, a living process would be declared dead.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

import structlog

from asynctask.clock import Clock, SystemClock
from asynctask.config import ENV_PREFIX, LOG_FORMATS, LOG_LEVELS
from asynctask.job import running_job

MAX_STACK: Final = 20_000
"""Largest number of characters of a stack; the end, with the error, is kept."""


MAX_KINDS: Final = 1_000
"""Number of kinds of errors above which a logger forgets which ones it has written with a stack."""

REPEAT_S: Final = 10.0
"""Seconds between two lines about an action that is retried until it succeeds."""

_C1_AND_BIDI: Final = "\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff"
_UNSAFE: Final = re.compile(f"[\\x00-\\x1f{_C1_AND_BIDI}]")
_UNSAFE_IN_JSON: Final = re.compile(f"[{_C1_AND_BIDI}]")


def escaped(text: str, *, is_json: bool = False) -> str:
    """A text in which control characters (C0, DEL, C1), bidirectional controls, line and paragraph separators and lone
    surrogates are escaped, such as ``\\x1b``: they could control a terminal, begin a line or change the reading order.

    ``is_json``: the text is a JSON document; the escapes are JSON's, and line breaks, its layout, are kept.
    """
    if is_json:
        return _UNSAFE_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Logger:
    """The methods of a structlog logger that this package calls; none of them raises.

    The texts of a line are :func:`escaped` before any renderer, because paths, names and error messages may be untrusted.
    """

    __slots__ = ("_log", "_monotonic", "_raised", "_repeats")

    def __init__(self, name: str, clock: Clock | None = None) -> None:
        self._log: Final = structlog.get_logger(name)
        self._monotonic = (clock or SystemClock()).monotonic
        self._raised: dict[tuple[str, ...], int] = {}  # kind -> how often
        self._repeats: dict[tuple[str, ...], tuple[float, int]] = {}  # -> when written last, and lines left out since

    def debug(self, event: str, **values: Any) -> None:
        """An event that helps to find a fault."""
        self._say("debug", event, values)

    def info(self, event: str, **values: Any) -> None:
        """An event that people may want to follow."""
        self._say("info", event, values)

    def warning(self, event: str, **values: Any) -> None:
        """A problem that is retried or resolves itself."""
        self._say("warning", event, values)

    def retrying(self, event: str, **values: Any) -> None:
        """A :meth:`warning` for each attempt of an action that is retried until it succeeds. Writes the first line, then
        one in ten seconds, with the number of lines left out as ``repeats``. Attempts of one action have the same ``event``
        and equal ``values``, except ``error``; the number of different actions must be small."""
        now = self._monotonic()
        about = event, *(str(value) for name, value in values.items() if name != "error")
        written_at, left_out = self._repeats.get(about, (-REPEAT_S, 0))
        if now - written_at < REPEAT_S:
            self._repeats[about] = written_at, left_out + 1
            return
        self._repeats[about] = now, 0
        is_same = left_out and now - written_at < 2 * REPEAT_S  # not an earlier outage
        self._say("warning", event, {**values, "repeats": left_out} if is_same else values)

    def error(self, event: str, **values: Any) -> None:
        """A problem that needs attention."""
        self._say("error", event, values)

    def exception(self, event: str, **values: Any) -> None:
        """As :meth:`error`, with the stack of the handled exception.

        The stack is plain text: structlog's default rendering on a console takes longer than many jobs, and shows the
        values of variables.
        """
        self._say("error", event, {"stack": traceback.format_exc()[-MAX_STACK:].rstrip(), **values})

    def raised(self, event: str, why: BaseException, kind: tuple[str, ...], /, *, is_retried: bool, **values: Any) -> None:
        """An error of a job. Writes the stack of the first one of a ``kind``, as a warning; of each later one only
        ``values`` and how many ``times`` there were, as information if it is retried."""
        if len(self._raised) > MAX_KINDS:
            self._raised.clear()
        times = self._raised[kind] = self._raised.get(kind, 0) + 1
        if times == 1:
            self._say("warning", event, {**values, "stack": stack_of(why)})
        else:
            self._say("info" if is_retried else "warning", event, {**values, "times": times})

    def _say(self, method: str, event: str, values: dict[str, Any]) -> None:
        try:
            getattr(self._log, method)(event, **_escape(self._log, method, values))
        except Exception:  # it cannot be reported anywhere
            return


def stack_of(error: BaseException) -> str:
    """The stack of an exception as plain text."""
    text = "".join(traceback.format_exception(error))[-MAX_STACK:].rstrip()
    return text.encode("utf-8", "backslashreplace").decode()


def get_logger(name: str) -> Logger:
    """The logger of this name; it follows later configuration of structlog."""
    return Logger(name)


def open_missing_streams() -> None:
    """Opens ``/dev/null`` in place of each standard stream that the process was started without (``>&-`` in a shell, some
    supervisors).

    Call it before any other file is opened: a file with the descriptor of a missing stream, such as the database, would
    receive the text written to that stream. Child processes inherit the opened streams.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is that of the stream
        os.set_inheritable(opened, opened == number)
        stream = open(opened, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the process
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _escape(_logger: Any, _method: str, values: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor of structlog: escapes the texts of a line."""
    for name, value in values.items():
        if isinstance(value, str):
            values[name] = escaped_stack(value) if name in ("stack", "exception") else escaped(value)
    return values


def escaped_stack(text: str) -> str:
    """A stack with all lines but the first indented, so that no exception message looks like a line of the log."""
    first, *others = map(escaped, text.split("\n"))
    return "\n".join([first, *(line if line.startswith(" ") else f"  {line}" for line in others)])


def add_job(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor of structlog: adds ``job_id``, ``task_id``, ``worker`` and ``attempt`` of the job that logs the line, if
    one does."""
    job = running_job()
    if job is not None:
        task_id = job.task_id if job.task is None else job.task.id  # a callback has that of the Task that calls it
        found = {"job_id": job.job_id, "task_id": task_id, "worker": job.worker, "attempt": job.attempt}
        line.update({name: value for name, value in found.items() if value and name not in line})
    return line


class JobFilter(logging.Filter):
    """A filter for handlers of :mod:`logging`: gives each record ``job_id``, ``task_id``, ``worker`` and ``attempt`` of the
    job that logs it, each ``-`` if there is none, for formats such as ``%(job_id)s``. It lets every record pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        vars(record).update({"job_id": "-", "task_id": "-", "worker": "-", "attempt": "-", **add_job(None, "", {})})
        return True


class _Stderr(structlog.WriteLoggerFactory):
    """Writes to stderr, and shows that the configuration of structlog is still the one made here."""


def log_to_stderr(level: str = "info", form: str = "auto") -> None:
    """Logs to stderr, because stdout is for the command's output.

    ``level``: one of :data:`~asynctask.config.LOG_LEVELS`; ``form``: ``console``, readable lines, ``json``, one object a
    line, or ``auto``, which is ``console`` on a terminal and ``json`` elsewhere. Lines of a job have its ids.

    Warnings and errors that libraries log by :mod:`logging` are written there, too, in the same form, unless the
    application configures :mod:`logging`. If the application has configured structlog meanwhile, that stays.
    """
    if structlog.is_configured() and not isinstance(structlog.get_config()["logger_factory"], _Stderr):
        return
    number = logging.getLevelNamesMapping()[level.upper()]
    is_json = form == "json" or (form == "auto" and not sys.stderr.isatty())
    common: list[Any] = [
        structlog.contextvars.merge_contextvars,
        add_job,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    # Not structlog's default rendering of an exception, which is slow and shows the arguments of jobs.
    rendered: list[Any] = (
        [structlog.processors.JSONRenderer()]
        if is_json
        else [_escape, structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    )
    structlog.configure(
        processors=[*common, *rendered],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=_Stderr(file=sys.stderr),
    )
    # The handler that logging uses while nobody has configured one: an application that does so later has its own alone.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=[structlog.stdlib.add_logger_name, *common],
                processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendered],
            )
        )


def log_application(level: str) -> None:
    """Writes the lines of this ``level`` and above that the application logs by :mod:`logging` to stderr, not only
    warnings, unless the application has configured :mod:`logging`. For processes that run the application's code."""
    root, number = logging.getLogger(), logging.getLevelNamesMapping()[level.upper()]
    if root.handlers or logging.lastResort is None:
        return
    logging.lastResort.setLevel(number)
    root.setLevel(number)


def style_in(environ: Mapping[str, str]) -> tuple[str, str]:
    """Level and form of :func:`log_to_stderr` in environment variables, for lines before the settings are read, and of
    processes that do not read them. Invalid ones count as missing."""
    level, form = (environ.get(f"{ENV_PREFIX}LOG_{name}", "") for name in ("LEVEL", "FORMAT"))
    return level if level in LOG_LEVELS else "info", form if form in LOG_FORMATS else "auto"
