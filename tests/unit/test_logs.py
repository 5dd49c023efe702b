"""Log lines: said as the process has configured it, and never the end of whoever says them."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs
from support.clocks import SettableClock

from asynctask.job import CurrentJob, reset_current_job, set_current_job
from asynctask.logs import JobFilter, Logger, get_logger, log_application, log_to_stderr, style_in


def test_a_line_that_cannot_be_written_does_not_stop_the_thread_that_says_it() -> None:
    """Taken out: the catch of `Logger`. A heartbeat ended because its stream was closed, and a living process was taken
    for dead."""
    closed = io.StringIO()
    structlog.configure(logger_factory=structlog.WriteLoggerFactory(file=closed))
    closed.close()
    log: Any = get_logger("asynctask.test")
    said = [log.info("a"), log.warning("b", error="x"), log.error("c"), log.exception("d")]
    assert said == [None] * 4


def test_what_is_configured_later_holds_for_a_logger_that_was_made_before() -> None:
    log = get_logger("asynctask.test")
    with capture_logs() as lines:
        log.warning("put_off", tries=3)
        try:
            raise ValueError("x")
        except ValueError:
            log.exception("failed")
    assert lines[0] == {"event": "put_off", "tries": 3, "log_level": "warning"}
    assert (lines[1]["event"], lines[1]["log_level"]) == ("failed", "error")


def test_what_is_tried_again_and_again_is_written_once_in_ten_seconds() -> None:
    clock = SettableClock()
    log = Logger("asynctask.test", clock)
    with capture_logs() as lines:
        for _ in range(41):  # for 20 s
            log.retrying("ledger_away", error="refused")
            clock.seconds += 0.5
        log.retrying("ledger_away", engine="rq", error="another thing")
        clock.seconds += 86_400
        log.retrying("ledger_away", error="another outage")
    assert [(each["event"], each.get("repeats")) for each in lines] == [
        ("ledger_away", None), ("ledger_away", 19), ("ledger_away", 19), ("ledger_away", None), ("ledger_away", None),
    ]  # fmt: skip


def test_the_stack_of_an_exception_is_told_without_the_values_of_its_variables() -> None:
    secret = "geheim"
    with capture_logs() as lines:
        try:
            raise ValueError("x" * len(secret))
        except ValueError:
            get_logger("asynctask.test").exception("failed")
    stack = lines[0]["stack"]
    assert stack.startswith("Traceback")
    assert stack.endswith("ValueError: xxxxxx")
    assert secret not in stack


HOSTILE = "/x\r\n2026-11-27T00:00:00Z [error] forged\x1b[31m\x9b2J\x7f\u202etxt.exe\u2028forged"
COLOURS = re.compile(r"\x1b\[[0-9]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def say_hostile_lines() -> None:
    """One line each of ours, of a library's logger, of somebody's structlog, of a context; and two with stacks."""
    structlog.contextvars.bind_contextvars(job_id=HOSTILE)
    try:
        get_logger("asynctask.test").warning("login_failed", path=HOSTILE)
        structlog.get_logger().info("theirs", item=HOSTILE)
        logging.getLogger("some.library").warning("%s was asked for", HOSTILE)
        try:
            raise ValueError(HOSTILE)
        except ValueError as error:
            get_logger("asynctask.test").exception("failed", name=HOSTILE)
            logging.getLogger("some.library").error("failed", exc_info=error)
            structlog.get_logger().error("failed", exc_info=error)
    finally:
        structlog.contextvars.clear_contextvars()


def test_what_is_logged_cannot_steer_a_terminal_or_forge_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's, where a process has none
    log_to_stderr()
    say_hostile_lines()
    said = COLOURS.sub("", stderr.getvalue())
    assert "forged" in said
    assert [c for c in said if c != "\n" and not c.isprintable()] == []
    begun = [line for line in said.splitlines() if not line.startswith(" ")]
    assert len([line for line in begun if not line.startswith("Traceback")]) == 6
    assert not any(line.startswith("2026-11-27T00:00:00Z [error] forged") for line in said.splitlines())


def test_what_is_logged_as_json_is_one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log_to_stderr()
    say_hostile_lines()
    lines = [json.loads(line) for line in stderr.getvalue().splitlines()]
    asked = next(line["event"] for line in lines if "asked for" in line["event"])
    assert [line["event"] for line in lines] == ["login_failed", "theirs", asked, "failed", "failed", "failed"]
    assert "\\x1b[31m\\x9b2J\\x7f\\u202e" in lines[0]["path"]
    assert lines[2]["logger"] == "some.library"
    assert lines[4]["exception"].startswith("Traceback")


@contextmanager
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """The stderr of a process in which nobody has configured logging; in the test itself, where pytest's handlers are."""
    root, stderr = logging.getLogger(), io.StringIO()
    level = root.level
    structlog.reset_defaults()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stderr)
        patched.setattr(root, "handlers", [])
        yield stderr
    root.setLevel(level)
    assert logging.lastResort is not None
    logging.lastResort.setLevel(logging.WARNING)
    structlog.reset_defaults()


@contextmanager
def in_job(job: CurrentJob) -> Iterator[None]:
    token = set_current_job(job)
    try:
        yield
    finally:
        reset_current_job(token)


def test_lines_that_a_job_logs_have_its_ids_whatever_logs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with unconfigured(monkeypatch) as stderr:
        log_to_stderr("info", "json")
        logging.getLogger("shop").info("in a process that runs no jobs")
        log_application("info")
        with in_job(CurrentJob("abc", task_id=7, attempt=2, payload={"class": "enrol"})):
            logging.getLogger("shop").info("asked for %s", "A-1")
            structlog.get_logger().info("theirs", attempt="their own")
            get_logger("asynctask.test").debug("ours")
        logging.getLogger("shop").info("outside")
    first, second, third = (json.loads(line) for line in stderr.getvalue().splitlines())
    about = {"job_id": "abc", "task_id": 7, "worker": "enrol", "level": "info"}
    assert first.items() >= {**about, "event": "asked for A-1", "logger": "shop", "attempt": 2}.items()
    assert second.items() >= {**about, "event": "theirs", "attempt": "their own"}.items()
    assert third["event"] == "outside"
    assert not third.keys() & {"job_id", "task_id", "worker", "attempt"}


def test_what_the_application_has_configured_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, plain = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(plain)
    handler.addFilter(JobFilter())
    with unconfigured(monkeypatch) as stderr:
        log_to_stderr("info", "json")
        structlog.configure(logger_factory=structlog.WriteLoggerFactory(file=theirs))
        logging.basicConfig(
            format="%(job_id)s %(task_id)s %(worker)s %(attempt)s %(message)s", handlers=[handler], level="WARNING"
        )
        log_to_stderr("debug", "json")
        log_application("debug")
        with in_job(CurrentJob("abc", attempt=3)):
            logging.getLogger("shop").warning("late")
            logging.getLogger("shop").info("not wanted")
        logging.getLogger("shop").warning("outside")
        get_logger("asynctask.test").info("begun")
    assert plain.getvalue().splitlines() == ["abc - - 3 late", "- - - - outside"]
    assert "begun" in theirs.getvalue()
    assert stderr.getvalue() == ""


@pytest.mark.parametrize(
    ("environ", "style"),
    [
        ({}, ("info", "auto")),
        ({"ASYNCTASK_LOG_LEVEL": "debug", "ASYNCTASK_LOG_FORMAT": "console"}, ("debug", "console")),
        ({"ASYNCTASK_LOG_LEVEL": "loud", "ASYNCTASK_LOG_FORMAT": "\x1b"}, ("info", "auto")),
    ],
)
def test_before_the_settings_are_read_the_environment_says_how_to_log(
    environ: dict[str, str], style: tuple[str, str]
) -> None:
    assert style_in(environ) == style
