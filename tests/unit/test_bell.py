"""The bell of SQLite: it is looked at as seldom as those who wait for it can bear, and every ring is heard."""

from __future__ import annotations

from pathlib import Path

import pytest

from asynctask.database.notify import SqliteChannel


class Looks:
    """In the place of the event that ends the looking: notes the pause before each look, and rings before some."""

    def __init__(self, looks: int, ringer: SqliteChannel, rings_before: set[int]) -> None:
        self.pauses: list[float] = []
        self._looks, self._ringer, self._rings_before = looks, ringer, rings_before

    def wait(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        if len(self.pauses) in self._rings_before:
            assert self._ringer.send is not None
            self._ringer.send(None)
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


def test_the_rings_of_several_applications_of_one_process_are_heard(tmp_path: Path) -> None:
    """Taken out: the descriptor and the number that is there, from what a ring writes. The first ring of an application was
    that of another one, which had been heard."""
    bell = SqliteChannel(tmp_path / "a.bell")
    ringers: list[SqliteChannel] = []

    class Rings:
        """In the place of the event: before each look another application rings; half of them after one has ended."""

        def wait(self, seconds: float) -> bool:
            if len(ringers) % 2:
                ringers[-1].close()
            ringers.append(SqliteChannel(tmp_path / "a.bell"))
            assert ringers[-1].send is not None
            ringers[-1].send(None)
            return len(ringers) > 20

    bell._ended = Rings()  # type: ignore[assignment]
    _, *rings = list(bell.receive())
    for each in (bell, *ringers):
        each.close()
    assert len(rings) == 20
