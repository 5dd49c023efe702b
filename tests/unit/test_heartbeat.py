"""The heartbeat of a process: after a suspension nothing starts before it has beaten again."""

from __future__ import annotations

from pathlib import Path

from support.clocks import SettableClock

from asynctask.clock import micros
from asynctask.database import schema
from asynctask.database.engine import Database
from asynctask.ledger import processes
from asynctask.ledger.base import Ledger
from asynctask.runtime.process import Heartbeat

LEASE_S = 20.0


class Suspended(SettableClock):
    """A machine that sleeps: its monotonic clock stands still meanwhile, its boot clock does not."""

    slept_s = 0.0

    def boottime(self) -> int:
        return micros(self.seconds + self.slept_s)


def test_after_a_suspension_nothing_may_start_before_a_beat(tmp_path: Path) -> None:
    clock = Suspended()
    database = Database(f"sqlite:///{tmp_path}/a.db")
    schema.upgrade(database)
    ledger = Ledger(database, clock=clock, identity="sleeper")
    processes.register(ledger, processes.Host("h", ""), kind="worker", pid=1, lease_s=LEASE_S)
    heartbeat = Heartbeat(ledger, every_s=5.0, lease_s=LEASE_S)
    heartbeat.beat()
    assert heartbeat.fresh()
    clock.slept_s += LEASE_S
    assert not heartbeat.fresh()
    assert not ledger.time.may_judge(0), "nor is it for this process to say who is dead"
    heartbeat.beat()
    assert heartbeat.fresh()
    database.close()
