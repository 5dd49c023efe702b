"""Log lines: said as the process has configured it, and never the end of whoever says them."""

from __future__ import annotations

import io
from typing import Any

import structlog
from structlog.testing import capture_logs
from support.clocks import SettableClock

from asynctask.logs import Logger, get_logger


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
