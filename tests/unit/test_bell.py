"""The bell of SQLite: it is looked at as seldom as those who wait for it can bear, and every ring is heard."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asynctask.database.engine import Database
from asynctask.database.notify import Signals, SqliteChannel
from asynctask.testing import wait_for


def ring(bell: SqliteChannel) -> None:
    assert bell.send is not None
    bell.send(None)


class Looks:
    """In the place of the event that ends the looking: notes the pause before each look, and rings before some."""

    def __init__(self, looks: int, ringer: SqliteChannel, rings_before: set[int]) -> None:
        self.pauses: list[float] = []
        self._looks, self._ringer, self._rings_before = looks, ringer, rings_before

    def wait(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        if len(self.pauses) in self._rings_before:
            ring(self._ringer)
        return len(self.pauses) > self._looks


def looked(folder: Path, *, hurried: bool, looks: int, rings_before: set[int]) -> tuple[list[float], int]:
    """The pauses between looks, and how many rings were heard."""
    bell, ringer = SqliteChannel(folder / "a.bell"), SqliteChannel(folder / "a.bell")
    if hurried:
        bell.expect_jobs()
    seen = Looks(looks, ringer, rings_before)
    bell._ended = seen  # type: ignore[assignment]
    _, *rings = list(bell.receive())  # what was rung before the first is not known
    bell.close()
    ringer.close()
    return seen.pauses, len(rings)


def test_while_rings_come_jobs_are_looked_for_every_10_ms_and_after_a_silence_every_20(tmp_path: Path) -> None:
    pauses, rings = looked(tmp_path, hurried=True, looks=400, rings_before={1, 150})
    assert rings == 2
    silent_from = pauses.index(0.02)
    assert sum(pauses[:silent_from]) == pytest.approx(1.0, abs=0.03)
    assert set(pauses[silent_from:150]) == {0.02}
    assert set(pauses[150:250]) == {0.01}, "a ring makes it look sooner again"
    assert set(pauses[260:]) == {0.02}


def test_where_nobody_waits_for_jobs_it_is_looked_at_every_50_ms(tmp_path: Path) -> None:
    pauses, rings = looked(tmp_path, hurried=False, looks=100, rings_before={7})
    assert (set(pauses), rings) == ({0.05}, 1)


def test_no_two_rings_are_equal_whoever_rings(tmp_path: Path) -> None:
    """Two containers that share a folder may have the same process id, descriptor and number of rings. Before, their rings
    were equal, so the second one was not heard."""
    rung = set()
    for _ in range(3):  # one after the other, each gets the same descriptor
        bell = SqliteChannel(tmp_path / "a.bell")
        for _ in range(2):
            ring(bell)
            rung.add((tmp_path / "a.bell").read_bytes())
        bell.close()
        (tmp_path / "a.bell").unlink()
    assert len(rung) == 6
    assert {len(each) for each in rung} == {8}


def test_a_ring_during_or_after_the_end_writes_to_no_other_file(tmp_path: Path) -> None:
    """Before, if the end came between the opening of the file and the writing, the ring overwrote whichever file another
    thread had opened meanwhile."""
    other = tmp_path / "other"
    opened: list[int] = []
    other.write_bytes(b"a database's header")

    class Ends:
        """In the place of the lock: once it is free, another thread ends the bell, and opens a file."""

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            if not opened:
                opened.append(-1)  # close() takes the lock, too
                bell.close()
                opened.append(os.open(other, os.O_RDWR))

    bell = SqliteChannel(tmp_path / "a.bell")
    bell._lock = Ends()  # type: ignore[assignment]
    ring(bell)
    assert (tmp_path / "a.bell").stat().st_size == 8
    (tmp_path / "a.bell").unlink()
    ring(bell)
    os.close(opened[-1])
    assert other.read_bytes() == b"a database's header"
    assert not (tmp_path / "a.bell").exists(), "it is not opened again: nobody would close it"


@contextmanager
def signals_of(path: Path) -> Iterator[Signals]:
    database = Database(f"sqlite:///{path}")
    signals = Signals(database)
    try:
        yield signals
    finally:
        signals.close()
        database.close()


def check_hears(signals: Signals, bell: Path) -> None:
    """The rings of another application are heard, and nothing polls until then."""
    waker, ringer = signals.waker(), SqliteChannel(bell)
    waker.wait(0.0)
    wait_for(lambda: signals.reliable, "rings are heard again")
    for _ in range(2):  # one wait may be ended by the beginning of the thread
        ring(ringer)
        assert waker.wait(60.0)
        assert waker.signalled
    ringer.close()


def test_after_a_file_that_could_not_be_opened_rings_are_heard_again(tmp_path: Path) -> None:
    """Before, it polled once a second until the process ended."""
    bell = tmp_path / "a.db.bell"
    bell.mkdir()
    with signals_of(tmp_path / "a.db") as signals:
        signals.waker().wait(0.0)
        wait_for(lambda: not signals.reliable, "it is not opened")
        bell.rmdir()
        check_hears(signals, bell)


def test_where_the_system_refuses_a_thread_who_waits_polls_and_the_next_wait_tries_again(tmp_path: Path) -> None:
    """Before, the error ended the thread that waited, such as maintenance; no signal was heard any more, and close()
    raised."""
    with signals_of(tmp_path / "a.db") as signals:
        usual = threading.stack_size(1 << 50)  # more than a process has addresses, so no thread can be started
        try:
            assert signals.waker().wait(60.0), "it polls"
            assert not signals.reliable
        finally:
            threading.stack_size(usual)
        check_hears(signals, tmp_path / "a.db.bell")


def test_the_rings_of_several_applications_of_one_process_are_heard(tmp_path: Path) -> None:
    """Before, the first ring of an application could be that of another one, which had been heard."""
    bell = SqliteChannel(tmp_path / "a.bell")
    ringers: list[SqliteChannel] = []

    class Rings:
        """In the place of the event: before each look another application rings; half of them after one has ended."""

        def wait(self, seconds: float) -> bool:
            if len(ringers) % 2:
                ringers[-1].close()
            ringers.append(SqliteChannel(tmp_path / "a.bell"))
            ring(ringers[-1])
            return len(ringers) > 20

    bell._ended = Rings()  # type: ignore[assignment]
    _, *rings = list(bell.receive())
    for each in (bell, *ringers):
        each.close()
    assert len(rings) == 20
