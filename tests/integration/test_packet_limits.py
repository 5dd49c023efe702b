"""MariaDB hangs up on a statement over its max_allowed_packet: none is sent, and what is in several is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.borrowing import borrow
from support.databases import Databases
from support.world import World

from asynctask.arrivals import ArrivalTracker
from asynctask.database.batches import sendable
from asynctask.errors import TooLarge
from asynctask.ledger.recorder import Recorder
from asynctask.ledger.standalone import Arrival
from asynctask.middleware.tracker import Attempt
from asynctask.testing import wait_for

PACKET = 1 << 20
QUOTES = "'" * 40_000
"""Twice as much once the driver has written it into a statement."""

pytestmark = pytest.mark.databases("mariadb", reason="the others take a gigabyte at once")


@pytest.fixture
def narrow(fragile: Databases, database_kind: str, tmp_path: Path) -> Iterator[World]:
    """A ledger on a server that takes packets of a megabyte."""
    store = fragile.fresh(database_kind, tmp_path)
    server = fragile.templates(database_kind).server
    ((before,),) = server.execute("SELECT @@GLOBAL.max_allowed_packet")
    server.execute(f"SET GLOBAL max_allowed_packet = {PACKET}")
    found = World(tmp_path, store)
    yield found
    found.close()
    store.close()
    server.execute(f"SET GLOBAL max_allowed_packet = {before}")


def test_a_flush_larger_than_a_packet_is_written_in_several_statements_and_said(narrow: World) -> None:
    """One result alone is larger, and is left out with the reason."""
    app = narrow.app()
    recorder = Recorder(app.ledger)
    tracker = ArrivalTracker(app.ledger, recorder)
    task = app.submit("note", [{"n": n} for n in range(30)])
    jobs = borrow(app.ledger, task.id)
    for number, ticket in enumerate(tracker.arrive([Arrival(job.job_id, job.attempt, "note", "default") for job in jobs])):
        attempt = Attempt(ticket)
        tracker.start(attempt)
        attempt.finish(QUOTES if number else "x" * PACKET, limit=10 * PACKET)
        tracker.settle(attempt)
    with capture_logs() as logs:
        recorder.start()
        wait_for(lambda: recorder.waiting == 0, "everything is recorded")
        assert recorder.stop(10)
    first, *others = task.events()
    assert [event["result"] for event in others] == [QUOTES] * 29
    assert (first["status"], first["result"]) == ("finish", None)
    assert "max_allowed_packet" in first["messages"][1]["message"]
    said = next(entry for entry in logs if entry["event"] == "batch_split")
    assert said["max_allowed_packet"] == PACKET
    assert said["bytes"] > PACKET
    assert task.progress()["done"]


def test_items_larger_than_a_packet_together_are_taken_pushed_and_performed(narrow: World) -> None:
    app = narrow.app()
    with narrow.working(app):
        task = app.submit("note", [{"n": n, "pad": QUOTES} for n in range(60)])
        assert task.wait(120)["done"]
    assert task.progress()["counts"]["finish"] == 60


def test_what_is_sent_fits_to_the_byte(narrow: World) -> None:
    def length(rows: list[list[Any]]) -> list[int]:
        with narrow.app().ledger.database.read() as connection:
            texts = list(sendable(connection, rows))
            for text in texts:
                assert connection.exec_driver_sql("SELECT LENGTH(%s)", (text,)).scalar() == len(text)
        return [len(text) + text.count("'") for text in texts]

    assert len(length([[n, QUOTES] for n in range(13)])) == 2
    assert max(length([[n, "'" * 700] for n in range(2_000)])) < PACKET
    length([["'" * (PACKET // 2 - 9_000)]])
    with pytest.raises(TooLarge, match="max_allowed_packet"):
        length([["'" * (PACKET // 2)]])
