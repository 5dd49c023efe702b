"""Log lines: said as the process has configured it, and never the end of whoever says them."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs
from support.clocks import SettableClock

from asynctask.logs import Logger, get_logger, log_to_stderr


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
    lines = [line for line in stderr.getvalue().splitlines() if line.startswith("{")]
    assert [json.loads(line)["event"] for line in lines] == ["login_failed", "theirs", "failed", "failed"]
    assert "\\x1b[31m\\x9b2J\\x7f\\u202e" in json.loads(lines[0])["path"]
