"""The database's clock as a process reads it, and when it may take another's lease for what it says."""

from __future__ import annotations

from support.clocks import SettableClock

from asynctask.clock import SECOND, micros
from asynctask.database.engine import DatabaseTime, Reading

LEASE_S = 20.0
EVERY_S = 5.0


class Machine(SettableClock):
    """Its wall clock may be set; its boot clock goes on."""

    wrong_by = 0

    def now(self) -> int:
        return micros(self.seconds) + self.wrong_by

    def boottime(self) -> int:
        return micros(self.seconds)


class Process:
    """Beats as a heartbeat does, against a database whose clock is its own."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.time = DatabaseTime(self.machine)
        self.ahead = 1_000 * SECOND  # of the database's clock

    def database_now(self) -> int:
        return micros(self.machine.seconds) + self.ahead

    def beat(self) -> None:
        self.time.answered(self.database_now() if self.time.is_old() else None, lease_s=LEASE_S)

    def beats(self, seconds: float) -> None:
        """Beats in time, for so long."""
        until = self.machine.seconds + seconds
        while self.machine.seconds < until:
            self.beat()
            self.machine.seconds += EVERY_S

    def is_away(self, seconds: float) -> None:
        """No beat gets through, for so long."""
        self.machine.seconds += seconds


def test_before_the_first_answer_it_is_the_machines_wall_clock() -> None:
    process = Process()
    assert process.time.now() == process.machine.now()
    assert not process.time.may_judge(0)


def test_between_two_answers_a_step_of_the_wall_clock_changes_nothing() -> None:
    process = Process()
    process.beat()
    process.machine.wrong_by = -3_600 * SECOND
    process.machine.seconds += 3
    assert process.time.now() == process.database_now()


def test_the_database_is_asked_again_every_fifteen_seconds() -> None:
    process = Process()
    process.beat()
    process.ahead += 40_000  # it has drifted
    process.machine.seconds += 14
    assert not process.time.is_old()
    process.machine.seconds += 1
    process.beat()
    assert process.time.now() == process.database_now()


def test_a_slow_answer_does_not_move_a_clock_that_it_agrees_with() -> None:
    process = Process()

    def reads(before_s: float, after_s: float) -> None:
        asked = process.machine.boottime()
        process.machine.seconds += before_s
        now = process.database_now()
        process.machine.seconds += after_s
        answered = process.machine.boottime()
        process.machine.seconds += 3.0  # the commit
        process.time.set(Reading(now, asked, answered))

    reads(0.5, 0.1)
    assert process.time.now() == process.database_now() + 200_000, "the middle is as good as any"
    reads(0.0, 0.01)
    assert 0 <= process.time.now() - process.database_now() <= 10_000, "a fast answer says more"
    known = process.time.now() - process.database_now()
    reads(0.0, 2.0)
    assert process.time.now() - process.database_now() == known


def test_a_process_may_judge_after_a_lease_of_answers_and_not_before() -> None:
    process = Process()
    process.beats(LEASE_S - EVERY_S)
    assert not process.time.may_judge(0)
    process.beats(EVERY_S)
    assert process.time.may_judge(0)


def test_the_end_of_a_lease_counts_once_it_was_seen_for_a_lease() -> None:
    process = Process()
    process.beats(60)
    seen = process.machine.boottime()
    assert process.time.may_judge(0)
    assert not process.time.may_judge(seen)
    process.beats(LEASE_S - EVERY_S)
    assert not process.time.may_judge(seen)
    process.beats(EVERY_S)
    assert process.time.may_judge(seen)


def test_after_an_outage_it_may_judge_only_when_everybody_has_had_time_to_renew() -> None:
    process = Process()
    process.beats(60)
    process.is_away(LEASE_S / 2 + 1)
    assert not process.time.may_judge(0), "its own last answer is too old"
    process.beats(LEASE_S - EVERY_S)
    assert not process.time.may_judge(0)
    process.beats(EVERY_S)
    assert process.time.may_judge(0)


def test_one_late_beat_is_no_outage() -> None:
    process = Process()
    process.beats(60)
    process.is_away(LEASE_S / 2 - EVERY_S)
    process.beat()
    assert process.time.may_judge(0)


def test_a_step_of_the_databases_own_clock_counts_as_an_outage() -> None:
    for step in (3_600, -3_600):
        process = Process()
        process.beats(60)
        process.ahead += step * SECOND
        assert process.time.now() != process.database_now(), "until it asks again it goes by the clock that it knows"
        process.beat()
        assert process.time.now() == process.database_now()
        assert not process.time.may_judge(0)
        process.beats(LEASE_S)
        assert process.time.may_judge(0)
