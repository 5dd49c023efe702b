"""Dispatcher and maintenance at the size of a large installation, on a virtual clock, in one process.

    python -m benchmarks.simulation [--processes P] [--tasks T] [--items I] [--seconds S] [--work-s W] [--seed N] [--json]

The real decisions (which Tasks share, how many jobs go, who leads, when the next round is) over a ledger and a broker that
are values in memory; see :mod:`benchmarks.simulated`. Of the Tasks 1 % have half of all items, 20 % a ``parallel``, 1 % an
interval, and 10 % a larger priority than the others. Lists of 10 come in while all of that waits, knobs are turned, and the
leader of the dispatching is killed, then that of the maintenance. It prints how the Tasks share, how soon a knob shows, the
statements a second, and what the dead leaders cost. Nothing is slowed down by a database that is busy: every statement
takes ``--round-trip-ms``. What the statements are is the result, not whether a server stands them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from asynctask.clock import SystemClock
from asynctask.database.tables import events
from benchmarks.children import Job, await_worker, build, child
from benchmarks.common import Place
from benchmarks.databases import SqliteSource
from benchmarks.simulated import QUEUE, Process, Task, World

__all__ = ["Report", "main", "parser", "simulate"]

URGENT, USUAL, LARGER = 100, 200, 300
LEASE_S: Final = 20.0
_BEAT_S: Final = 5.0
_SMALL: Final = 10


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 1 where a promise was broken."""
    options = parser().parse_args(argv)
    begun = SystemClock().monotonic()
    if options.real and (options.processes > 8 or options.items > 500_000):
        print("--real: at most 8 processes and 500,000 items", file=sys.stderr)
        return 2
    report = simulate(options)
    report.table["seconds to simulate it"] = round(SystemClock().monotonic() - begun, 1)
    if options.real:
        report.table["for real"] = real(options)
    for name, value in report.table.items():
        print(f"  {name}: {value}")
    for line in report.broken:
        print(f"BROKEN  {line}")
    if options.json:
        settings = {**vars(options), "table": report.table, "broken": report.broken}
        print(json.dumps({"name": "simulation", "n": options.items, "ours": len(report.broken), "peer": None, "ratio": None,
                          "unit": "broken", "settings": settings}))  # fmt: skip
    return int(bool(report.broken))


def parser() -> argparse.ArgumentParser:
    """Its options."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--processes", type=int, default=1_000, help="worker processes (default 1000)")
    words.add_argument("--threads", type=int, default=10, help="of each process (default 10)")
    words.add_argument("--tasks", type=int, default=10_000, help="Tasks (default 10000)")
    words.add_argument("--items", type=int, default=100_000_000, help="of all Tasks (default 100 million)")
    words.add_argument("--seconds", type=float, default=40.0, metavar="S", help="virtual seconds (default 40)")
    words.add_argument("--work-s", type=float, default=1.0, metavar="W", help="of a job, on average (default and least 1)")
    words.add_argument("--round-trip-ms", type=float, default=0.5, help="of a statement (default 0.5)")
    words.add_argument("--seed", type=int, default=1, help="of everything that is drawn (default 1)")
    words.add_argument("--real", action="store_true", help="also for real, on SQLite: few processes and Tasks")
    words.add_argument("--json", action="store_true", help="make the last line one JSON object")
    return words


@dataclass
class Report:
    """What was seen: ``table`` for people, ``broken`` what must not be."""

    table: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def need(self, holds: bool, what: str) -> None:
        """A promise."""
        if not holds:
            self.broken.append(what)


@dataclass
class _Knob:
    """A turned knob: the Task is observed from ``at``; ``limit`` is the smaller ``parallel``."""

    name: str
    task: Task
    at: float
    limit: int = 0

    def shown_s(self) -> float | None:
        """Seconds until the starts showed it: the last start that it forbids, or the first that only it allows."""
        starts = [(at - self.at, beside) for at, beside in self.task.starts_of or []]
        if self.name == "pause":
            return max((at for at, _ in starts), default=0.0)
        if self.name == "parallel lower":
            return max((at for at, beside in starts if beside >= self.limit), default=0.0)
        return next((at for at, beside in starts if beside >= self.limit), None)


def simulate(options: Any) -> Report:
    """One run of the world."""
    world = World(
        options.seed, work_s=max(1.0, options.work_s), round_trip_s=options.round_trip_ms / 1e3, background_share=0.05,
        by_owner=False,
    )  # fmt: skip
    sizes = [world.submit(**each) for each in _lists(world.draw, options.tasks, options.items)]
    for number in range(options.processes):
        process = Process(world, number, options.threads, lease_s=LEASE_S, beat_s=_BEAT_S)
        world.processes[process.identity] = process
        process.start()
    quarter = options.seconds / 4
    world.run(quarter)
    small = [world.submit(_SMALL, priority=USUAL) for _ in range(20)]
    world.processes[next(iter(world.processes))].dispatcher.nudge()
    knobs = _turn(world)
    world.run(2 * quarter)
    deaths = [("dispatch", _kill(world, world.lease[0]))]
    world.run(3 * quarter)
    deaths.append(("maintenance", _kill(world, world.maintainer)))
    killed_at = world.clock.monotonic()
    world.run(4 * quarter)
    taken_over = world.clock.monotonic()
    while world.maintainer == deaths[-1][1] and world.clock.monotonic() < killed_at + 2 * LEASE_S:
        world.run(world.clock.monotonic() + 1.0)
        taken_over = world.clock.monotonic()
    report = Report()
    _report_shares(report, world, sizes, small, options.processes * options.threads)
    _report_knobs(report, knobs)
    _report_statements(report, world, quarter)
    _report_deaths(report, world, 2 * quarter, deaths)
    report.table["maintenance has another leader within, s"] = round(taken_over - killed_at, 1)
    return report


def _lists(draw: random.Random, tasks: int, items: int) -> list[dict[str, Any]]:
    """How many items each list has, and its knobs."""
    large = max(1, tasks // 100)
    return [
        {
            "count": max(1, items // 2 // large if number < large else items // 2 // max(1, tasks - large)),
            "priority": LARGER if number % 10 == 7 else USUAL,
            "parallel": draw.randint(4, 20) if number % 5 == 4 else None,
            "interval_s": 2.0 if number % 100 == 99 else 0.0,
        }
        for number in range(tasks)
    ]


def _turn(world: World) -> list[_Knob]:
    """Five Tasks for each knob, in moments that follow each other."""
    waiting = [task for task in world.tasks.values() if task.left > 1_000 and task.columns["interval_s"] == 0]
    limited = [task for task in waiting if (task.columns["parallel"] or 0) >= 4]
    plain = [task for task in waiting if task.columns["parallel"] is None and task.columns["priority"] == USUAL]
    world.draw.shuffle(limited)
    world.draw.shuffle(plain)
    knobs: list[_Knob] = []
    sources = {"pause": plain, "parallel lower": limited, "parallel higher": limited, "priority": plain}
    for _ in range(5):
        for task in limited[-2:]:  # they have as many threads as they may use
            world.turn(task, priority=URGENT)
        world.run(world.clock.monotonic() + 2.0 + world.draw.uniform(0.2, 0.8))
        turned = [_turned(world, name, source.pop()) for name, source in sources.items() if source]
        world.run(world.clock.monotonic() + 1.0)
        for knob in turned:
            world.turn(knob.task, priority=USUAL)  # else some take every thread until they are over
        knobs += turned
    return knobs


def _turned(world: World, name: str, task: Task) -> _Knob:
    parallel = task.columns["parallel"] or 0
    changes: dict[str, dict[str, Any]] = {
        "pause": {"state": "paused"},
        "parallel lower": {"parallel": 1},
        "parallel higher": {"parallel": 2 * parallel},
        "priority": {"priority": URGENT},
    }
    limit = {"parallel lower": 1, "parallel higher": parallel}.get(name, 0)
    task.starts_of = []
    task.most_running = task.running
    world.turn(task, **changes[name])
    world.draw.choice(list(world.processes.values())).dispatcher.nudge()
    return _Knob(name, task, world.clock.monotonic(), limit)


def _kill(world: World, identity: str | None) -> str | None:
    if identity is not None and identity in world.processes:
        world.processes[identity].kill()
    return identity


# -- the same for real


def real(options: argparse.Namespace) -> dict[str, Any]:
    """The same lists on worker processes over SQLite, undisturbed, for as many seconds as the jobs start evenly."""
    with tempfile.TemporaryDirectory(prefix="asynctask-benchmark-") as name:
        folder = Path(name)
        with SqliteSource(None).fresh(folder) as url, ExitStack() as stack:
            place, job = Place(folder, url), Job(None, 1e3 * max(1.0, options.work_s))
            app = stack.enter_context(closing(build(place, job)))
            ids = []
            for each in _lists(random.Random(options.seed), options.tasks, options.items):
                count, interval_s = each.pop("count"), each.pop("interval_s")
                ids.append(app.submit("job", ({"n": i} for i in range(count)), interval=interval_s, **each).id)
            for number in range(options.processes):
                worker = stack.enter_context(child("worker", place, "-c", str(options.threads), *job.words()))
                await_worker(app, worker, number + 1)
            threading.Event().wait(options.seconds)
            started = sa.select(events.c.task_id, sa.func.count()).where(events.c.started_at.is_not(None))
            with app.ledger.database.read() as connection:
                counts: dict[int, int] = dict(connection.execute(started.group_by(events.c.task_id)).tuples().all())
            for task_id in ids:
                app.task(task_id).pause()
    plain = _lists(random.Random(options.seed), options.tasks, options.items)
    shares = sorted(
        counts.get(task_id, 0)
        for task_id, each in zip(ids, plain, strict=True)
        if each["priority"] == USUAL and each["parallel"] is None
    )
    larger = sum(counts.get(i, 0) for i, each in zip(ids, plain, strict=True) if each["priority"] == LARGER)
    total = sum(counts.values())
    return {
        "starts": total,
        "starts a second": round(total / options.seconds),
        "of a Task without a limit (least, median, most)": (shares[0], statistics.median(shares), shares[-1]),
        "share of the larger priority": round(larger / max(1, total), 3),
    }


# -- the report


def _report_shares(report: Report, world: World, tasks: Sequence[Task], small: Sequence[Task], threads: int) -> None:
    usual = [t for t in tasks if t.columns["priority"] == USUAL and t.columns["parallel"] is None and not t.starts_of]
    usual = [t for t in usual if t.columns["interval_s"] == 0 and t.columns["state"] == "running"]
    starts = sorted(t.starts for t in usual)
    largest = max(usual, key=lambda t: t.columns["created_jobs"])
    all_starts = sum(t.starts for t in tasks)
    report.table["starts"] = all_starts
    report.table["starts a second"] = round(all_starts / world.clock.monotonic())
    report.table["starts of a Task without a limit (least, median, most)"] = (
        starts[0], statistics.median(starts), starts[-1]
    )  # fmt: skip
    report.table["starts of the largest such Task, items"] = (largest.starts, largest.columns["created_jobs"])
    report.table["share of the larger priority"] = round(
        sum(t.starts for t in tasks if t.columns["priority"] == LARGER) / max(1, all_starts), 3
    )
    over = [t.over_at - t.submitted for t in small if t.over_at is not None]
    report.table["lists of 10 beside these: over, seconds (median, most)"] = (
        f"{len(over)} of {len(small)}", *((round(statistics.median(over), 2), round(max(over), 2)) if over else ())
    )  # fmt: skip
    report.need(starts[0] > 0, "a Task of the usual priority never started")
    report.table["jobs in the broker (most, at the end)"] = world.most_waiting, sum(world.waiting([QUEUE])[QUEUE].values())
    report.need(
        world.most_waiting <= 2 * threads,
        f"{world.most_waiting} jobs in the broker, for {threads} threads",
    )
    for task in tasks:
        parallel = task.columns["parallel"]
        report.need(
            parallel is None or task.starts_of is not None or task.most_running <= parallel,
            f"Task {task.id}: {task.most_running} jobs at a time under a parallel of {parallel}",
        )


def _report_knobs(report: Report, knobs: Sequence[_Knob]) -> None:
    for name in dict.fromkeys(knob.name for knob in knobs):
        shown = [knob.shown_s() for knob in knobs if knob.name == name]
        known = [each for each in shown if each is not None]
        report.table[f"{name} shows, of"] = f"{len(known)} of {len(shown)}"
        if known:
            most = max(known)
            report.table[f"{name} shows, seconds (median, most)"] = (round(statistics.median(known), 3), round(most, 3))


def _report_statements(report: Report, world: World, since: float) -> None:
    at = world.clock.monotonic()
    seconds = [world.statements[second] for second in range(int(since), int(at) - 1)]
    starts = sum(world.starts.values())
    report.table["statements a second (median, most)"] = (round(statistics.median(seconds)), max(seconds))
    report.table["write transactions a second"] = round(world.transactions / at)
    report.table["statements per job"] = round(sum(world.statements.values()) / max(1, starts), 2)
    report.table["operations a second"] = {name: round(count / at, 1) for name, count in world.operations.most_common()}
    report.table["rows of processes read a second"] = round(sum(world.rows.values()) / at)


def _report_deaths(report: Report, world: World, at: float, deaths: Sequence[tuple[str, str | None]]) -> None:
    tenths = [world.starts[tenth] for tenth in range(int(at * 10), int((at + 5) * 10))]
    before = [world.starts[tenth] for tenth in range(int((at - 2) * 10), int(at * 10))]
    usual = statistics.median(before)
    low = [tenth for tenth, count in enumerate(tenths) if count < usual / 2]
    report.table["tenths of a second under half the starts, after the leader of the dispatching died"] = len(low)
    report.need(len(low) <= 12, "the starts were halved for longer than the lease of the leader and a round")
    for duty, identity in deaths:
        recovered = world.recovered_at.get(identity or "")
        report.table[f"jobs of the dead leader ({duty}) are taken back after, s"] = (
            "not within the run" if recovered is None else round(recovered - at * (1 if duty == "dispatch" else 1.5), 1)
        )


if __name__ == "__main__":
    sys.exit(main())
