"""The simulation in short: the real decisions hold their promises at more processes than a test could start."""

from __future__ import annotations

import pytest

from asynctask.dispatch.dispatcher import ACTIVE_S, HELP_S
from asynctask.ledger.leases import LEADER_LEASE_S
from benchmarks.simulated import QUEUE, Process, World
from benchmarks.simulation import parser, simulate


def small_world(processes: int, threads: int = 5, **options: float) -> World:
    world = World(7, work_s=1.0, round_trip_s=0.0005, background_share=options.get("share", 0.0), by_owner=False)
    for number in range(processes):
        process = Process(world, number, threads, lease_s=20.0, beat_s=5.0)
        world.processes[process.identity] = process
        process.start()
    return world


def test_the_promises_hold_at_forty_processes() -> None:
    options = parser().parse_args(["--processes", "40", "--tasks", "100", "--items", "1000000", "--seconds", "24"])
    report = simulate(options)
    assert report.broken == []
    jobs_a_second = report.table["starts a second"]
    assert jobs_a_second > 0.8 * 40 * 10 / options.work_s
    # Each job costs its reservation, its Begin, its `working` and its outcome, which share statements with others.
    assert report.table["statements per job"] < 11


def test_a_dead_leader_costs_no_more_than_its_lease_and_a_round() -> None:
    world = small_world(20)
    world.submit(1_000_000, priority=200)
    world.run(6.0)
    leader = world.lease[0]
    assert leader is not None
    world.processes[leader].kill()
    world.run(12.0)
    silent = [tenth for tenth in range(60, 110) if not world.starts[tenth]]
    assert len(silent) / 10 <= LEADER_LEASE_S + max(HELP_S, ACTIVE_S)
    assert world.lease[0] not in (None, leader)


def test_what_a_dead_process_held_runs_again() -> None:
    world = small_world(4)
    task = world.submit(60, priority=200, parallel=20)
    world.run(1.5)
    world.processes["p0"].kill()
    world.run(60.0)
    assert task.ended == 60
    assert task.most_running <= 20


def test_tasks_of_one_priority_share_alike_whatever_their_sizes() -> None:
    world = small_world(10)
    tasks = [world.submit(500_000 if number == 0 else 2_000, priority=200) for number in range(10)]
    world.run(20.0)
    starts = [task.starts for task in tasks]
    assert max(starts) <= 1.1 * min(starts)


def test_a_larger_priority_has_its_share() -> None:
    world = small_world(10, share=0.05)
    first, later = (world.submit(100_000, priority=priority) for priority in (200, 300))
    world.run(20.0)
    assert later.starts / (first.starts + later.starts) == pytest.approx(0.05, abs=0.02)


def test_rounds_are_not_sooner_than_their_interval() -> None:
    world = small_world(5)
    task = world.submit(1_000, priority=200, parallel=3, interval_s=2.0)
    world.run(20.0)
    begun = task.begun_of_round
    assert len(begun) >= 3 * 8
    assert all(later - earlier >= 1.9 for earlier, later in zip(begun, begun[3:], strict=False))


def test_nothing_costs_statements_where_nothing_waits() -> None:
    world = small_world(50)
    world.run(20.0)
    assert sum(world.statements[second] for second in range(10, 20)) / 10 <= 2 * 50
    assert world.waiting([QUEUE]) == {QUEUE: {}}
