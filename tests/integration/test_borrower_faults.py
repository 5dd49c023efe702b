"""What a process does with what it has borrowed when the ledger goes away, or something changes, between two steps."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from support.world import World, numbers

from asynctask.errors import LedgerUnavailable
from asynctask.ledger import lending, processes
from asynctask.runtime import borrower
from asynctask.runtime.borrower import IDLE_S
from asynctask.runtime.pool import StartGate
from asynctask.sidekiq.copies import tracked_copy
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="nothing in it is a database's own: those tests are of the ledger")


def _has(done: Sequence[int], count: int) -> bool:
    return len(done) == count


def test_a_new_task_begins_beside_one_whose_jobs_keep_every_thread_busy(world: World) -> None:
    app = world.app()
    done: list[str] = []

    @app.worker(retry=0)
    def short(item: dict[str, Any]) -> None:
        threading.Event().wait(0.005)
        done.append(item.get("of", "old"))

    with world.working(app):
        app.submit("short", numbers(6_000))
        wait_for(lambda: len(done) > 300, "the first Task keeps the threads busy", 60)
        app.submit("short", numbers(20, of="new"))
        wait_for(lambda: "new" in done, "the other one begins, too", 60)
        assert len(done) < 3_000


def test_what_waits_in_a_process_is_bounded_however_short_its_jobs_are(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads share one interpreter: by the durations of jobs that do nothing it had 13,000 waiting."""
    app, real, held = world.app(), lending.borrow, list[int]()

    def borrow(*args: Any, **how: Any) -> Any:
        waiting = len(launcher.pool.jobs)
        found = real(*args, **how)
        held.append(waiting + found.count)
        return found

    @app.worker(retry=0)
    def short(item: dict[str, Any]) -> None: ...

    monkeypatch.setattr(lending, "borrow", borrow)
    monkeypatch.setattr(borrower, "MOST", 50)
    with world.working(app) as launcher:
        assert app.submit("short", numbers(2_000)).wait(60)["done"]
    assert max(held) <= 50


def test_jobs_that_wait_for_a_place_keep_no_thread_idle(world: World) -> None:
    app = world.app()
    turns, short_done = threading.Semaphore(0), list[int]()

    @app.worker(retry=0)
    def long(item: dict[str, Any]) -> None:
        turns.acquire(timeout=60)

    @app.worker(retry=0)
    def short(item: dict[str, Any]) -> None:
        short_done.append(item["n"])

    with world.working(app, concurrency=10) as launcher:
        task = app.submit("long", numbers(15), parallel=5)
        wait_for(lambda: launcher.pool.busy == 5, "as many run as may")
        begun = launcher.pool.running()[0].began
        wait_for(lambda: app.clock.monotonic() - begun > 0.5, "they are known to be long")
        turns.release(5)
        wait_for(lambda: (launcher.pool.jobs.permits(task.id) or (0, 0, 0))[2] > 0, "others wait for their places", 30)
        for count in (20, 40, 60):
            app.submit("short", numbers(20, count))
            wait_for(partial(_has, short_done, count), "the other threads perform", 20)
        turns.release(10)
        assert task.wait(60)["done"]


@pytest.mark.parametrize("is_committed", [False, True])
def test_what_goes_back_while_the_ledger_is_away_is_performed_once(
    world: World, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    """Else it was out of the lines, and held by the process for as long as that lived."""
    real, times = lending.give_back, 0

    def fails(*args: Any) -> Any:
        nonlocal times
        times += 1
        if times > 2:
            return real(*args)
        if is_committed:
            real(*args)
        raise LedgerUnavailable("away")

    app, gate = world.app(), threading.Event()
    gate.set()

    @app.worker(retry=0)
    def short(item: dict[str, Any]) -> None:
        gate.wait(150)
        threading.Event().wait(0.005)
        world.shop.note("did", item["n"])

    with world.working(app) as launcher:
        task = app.submit("short", numbers(1_500))
        wait_for(lambda: len(world.shop.performed()) > 100, "it is known to be short, so many are borrowed")
        monkeypatch.setattr(lending, "give_back", fails)
        gate.clear()  # what lies ready stays there until the check: it would be performed before that
        wait_for(lambda: len(launcher.pool.jobs) or times, "some lie ready behind those that run")
        task.pause()
        wait_for(lambda: times > 2, "it is tried until the ledger answers")
        gate.set()
        task.resume()
        assert task.wait(60)["done"]
    assert set(world.shop.performed().values()) == {1}
    world.check_promises(app, [task.id], 1_500)


def test_a_process_that_goes_quiet_while_the_ledger_is_away_keeps_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job of it runs on for long; others perform the rest meanwhile."""
    real, times = lending.give_back, 0

    def fails(*args: Any) -> Any:
        nonlocal times
        times += 1
        if times <= 2:
            raise LedgerUnavailable("away")
        return real(*args)

    app, other, gate, done = world.app(), world.app(), threading.Event(), list[int]()

    def quick(item: dict[str, Any]) -> None:
        if item["n"] == 20:
            gate.wait(60)
        done.append(item["n"])

    for each in (app, other):
        each.worker(name="quick", retry=0)(quick)
    with world.working(app, concurrency=1) as launcher:
        task = app.submit("quick", numbers(300))
        wait_for(
            lambda: len(done) == 20 and launcher.pool.busy and len(launcher.pool.jobs), "one runs, others wait behind it"
        )
        monkeypatch.setattr(lending, "give_back", fails)
        launcher.quiet()
        with world.working(other):
            wait_for(lambda: _has(done, 299), "others perform the rest", 60)
            gate.set()
            assert task.wait(60)["counts"]["finish"] == 300
    assert sorted(done) == list(range(300))
    world.check_promises(app, [task.id], 300)


def test_a_job_that_cannot_be_made_ends_with_the_reason_and_those_beside_it_are_performed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = list[str]()

    def fails(job: lending.Job, now: int) -> Any:
        if job.seq == 3:
            raise RuntimeError("no such text")
        return tracked_copy(job, now)

    def counts(worker: Any, job: Any, queue: str, call_next: Any) -> Any:
        passed.append(job.job_id)
        return call_next()

    monkeypatch.setattr(borrower, "tracked_copy", fails)
    app = world.app()
    app.client_middleware.add(counts)
    with world.working(app):
        task = app.submit("note", numbers(20))
        assert task.wait(60)["done"]
    counted = task.progress()["counts"]
    assert (counted["finish"], counted["error"]) == (19, 1)
    (bad,) = world.sql("SELECT job_id FROM events WHERE status = 'error'")
    assert "it cannot be performed: RuntimeError: no such text" in app.event(bad[0])["messages"][-1]["message"]
    assert len(passed) == len(set(passed)) == 19, "the client middleware sees each of the others once"
    world.check_promises(app, [task.id], 20)


def test_what_was_taken_from_a_process_does_not_begin_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims, and jobs that threads have taken and that have not begun, are taken from a process that seemed stalled."""
    gate = threading.Event()
    monkeypatch.setattr(StartGate, "_waited_for_start", lambda self: gate.wait(60))
    app = world.app()
    with world.working(app) as launcher:
        alone = app.workers["note"].perform_bulk(numbers(2, 100))
        wait_for(lambda: len(launcher.pool.jobs.taken_unbegun()) == 2, "threads have taken those without a Task")
        task = app.submit("note", numbers(2))
        wait_for(lambda: len(launcher.pool.jobs.taken_unbegun()) == 4, "and those of a Task")
        old = launcher.pool.jobs.taken_unbegun()
        processes.take_unbegun(world.app().ledger, launcher.ledger.identity)
        wait_for(lambda: all(each.is_recalled for each in old), "the check recalls them")
        gate.set()
        assert task.wait(60)["done"]
        wait_for(lambda: all(app.event(str(jid))["status"] == "finish" for jid in alone), "those without a Task, too", 60)
    assert set(world.shop.performed().values()) == {1}
    assert {line[3] for line in world.shop.lines()} == {"2"}


def test_what_a_thread_has_taken_of_a_task_that_is_paused_does_not_begin(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a suspect to end, for example, and is in no line any more."""
    gate = threading.Event()
    monkeypatch.setattr(StartGate, "_waited_for_start", lambda self: gate.wait(60))
    app = world.app()
    with world.working(app) as launcher:
        task = app.submit("note", numbers(4))
        wait_for(lambda: len(launcher.pool.jobs.taken_unbegun()) == 4, "threads have taken them")
        old = launcher.pool.jobs.taken_unbegun()
        task.pause()
        wait_for(lambda: all(each.is_recalled for each in old), "the check recalls them")
        gate.set()
        wait_for(lambda: launcher.pool.busy == 0 and not launcher.pool.jobs.taken_unbegun(), "the threads let go")
        assert not world.shop.performed()
        task.resume()
        assert task.wait(60)["done"]
    world.check_promises(app, [task.id], 4)


def test_a_long_job_counts_once_for_the_failures_that_its_task_tolerates(world: World) -> None:
    """Else all that were lent with it counted until it ended."""
    app = world.app()
    done: list[int] = []

    @app.worker(retry=0)
    def uneven(item: dict[str, Any]) -> None:
        wait_for(lambda: item["n"] != 60 or (world.folder / "gate").exists(), "the gate opens", 120)
        done.append(item["n"])

    with world.working(app):
        task = app.submit("uneven", numbers(200), tolerated_failures=10)
        wait_for(lambda: len(done) == 199, "the others go on", 30)
        world.open_gate()
        assert task.wait(60)["done"]
    world.check_promises(app, [task.id], 200)


def test_items_of_an_unknown_worker_do_not_keep_known_ones_behind_them(world: World) -> None:
    """As during a deploy: put off for seconds, they came due again before those behind them were reached."""
    app, other = world.app(), world.app()

    @other.worker(retry=0)
    def strange(item: dict[str, Any]) -> None:
        """Known to the program that submits, not to the one that works."""

    task = other.submit_jobs([*(("strange", item) for item in numbers(2_000)), *(("note", item) for item in numbers(8))])
    with world.working(app):
        wait_for(lambda: len(world.shop.performed()) == 8, "the known ones are performed", 30)
        with world.working(other):
            assert task.wait(60)["done"]
    assert set(world.shop.performed().values()) == {1}
    world.check_promises(other, [task.id], 2_008)


def test_a_process_that_may_have_lost_an_answer_checks_soon_though_it_performs_nothing(world: World) -> None:
    """What it was lent had waited up to 10 s. Taken out: that it is unsure, in the pause of a step."""
    thread = world.app().launcher(concurrency=1).borrower
    thread.step()
    assert thread.step() == IDLE_S
    thread._is_unsure = True
    assert thread.step() <= lending.RECHECK_S


def test_what_a_job_held_when_it_raised_is_freed_with_it(world: World) -> None:
    """Else a file or a cursor stays open until the garbage collector runs. Taken out: the frame without a variable."""
    app, freed = world.app(), threading.Event()

    class Held:
        def __del__(self) -> None:
            freed.set()

    def work(item: dict[str, Any]) -> None:
        held = Held()
        raise ValueError(f"with {held} in hand")

    app.worker(work, name="work", retry=0)
    gc.disable()
    try:
        with world.working(app, concurrency=1):
            assert app.submit("work", numbers(1)).wait(120)["counts"]["error"] == 1
            wait_for(freed.is_set, "it is freed", timeout=20)
    finally:
        gc.enable()
