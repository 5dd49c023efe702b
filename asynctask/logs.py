"""Where this package's log lines go: to structlog, as the process has configured it.

A line that cannot be written (a full disk, a closed stream) is let go. Most lines are said by a thread that has just met
trouble and must go on: a heartbeat that ended because its warning could not be written would have a living process declared
dead.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any, Final

import structlog

MAX_STACK: Final = 20_000
"""Characters of a stack; the end of it, where the error is."""


class Logger:
    """The methods of a structlog logger that this package calls; none of them raises."""

    __slots__ = ("_log",)

    def __init__(self, name: str) -> None:
        self._log: Final = structlog.get_logger(name)

    def info(self, event: str, **values: Any) -> None:
        """Something that people may want to follow."""
        self._say("info", event, values)

    def warning(self, event: str, **values: Any) -> None:
        """Something that mends itself, or is put off."""
        self._say("warning", event, values)

    def error(self, event: str, **values: Any) -> None:
        """Something that somebody should look at."""
        self._say("error", event, values)

    def exception(self, event: str, **values: Any) -> None:
        """The same, with the stack of the exception that is being handled.

        It is a text of our own: the view that structlog gives a console by default takes longer than many a job, and shows
        the values of every variable.
        """
        self._say("error", event, {"stack": traceback.format_exc()[-MAX_STACK:].rstrip(), **values})

    def _say(self, method: str, event: str, values: dict[str, Any]) -> None:
        try:
            getattr(self._log, method)(event, **values)
        except Exception:  # there is nowhere to say so
            return


def get_logger(name: str) -> Logger:
    """The logger of this name; what is configured in structlog later holds for it too."""
    return Logger(name)


def log_to_stderr() -> None:
    """Sends what the process logs to stderr, for stdout is the command's: lines for people on a terminal, else JSON."""
    people = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if people else [structlog.processors.format_exc_info]),
            # Not the default view of an exception: it is slow, and shows what the arguments of a job were.
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
            if people
            else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
