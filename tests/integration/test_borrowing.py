"""Worker processes borrow from the ledger: limits, fairness, what is urgent, what goes back, and lost answers."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
from support.drawn import examples
from support.world import World, numbers

from asynctask.errors import LedgerUnavailable
from asynctask.job import CurrentJob
from asynctask.ledger import lending
from asynctask.middleware.tracker import Tracker
from asynctask.runtime import borrower
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")

HELD = "SELECT COUNT(*) FROM loans WHERE process IS NOT NULL"


def most_at_once(world: World) -> int:
    """How many jobs ran at the same time, at most, by their own clock."""
    steps = [
        (float(line[2]), 1 if line[0] == "began" else -1) for line in world.shop.lines() if line[0] in ("began", "ended")
    ]
    return max(itertools.accumulate(step for _, step in sorted(steps)))


def began(world: World, low: int = 0, high: int = 10**9) -> int:
    """How many items of a range have begun."""
    return sum(line[0] == "began" and low <= int(line[1]) < high for line in world.shop.lines())


# -- limits


@pytest.mark.each_database(reason="each borrows with statements of its own")
@pytest.mark.parametrize(("parallel", "processes"), [(1, 1), (3, 1), (1, 3), (2, 3)])
def test_no_more_jobs_of_a_task_run_than_it_allows_however_many_processes_work(
    world: World, parallel: int, processes: int
) -> None:
    """Taken out: the permits of the pool, or the sum of the others' places in `granted`."""
    app = world.app()
    with ExitStack() as stack:
        for each in [app, *(world.app() for _ in range(processes - 1))]:
            stack.enter_context(world.working(each, concurrency=4))
        task = app.submit("brief", numbers(60), parallel=parallel)
        assert task.wait(120)["counts"]["finish"] == 60
    assert most_at_once(world) <= parallel
    assert set(world.shop.performed("ended").values()) == {1}
    world.check_promises(app, [task.id], 60)


def test_the_limit_holds_over_processes_and_through_kills(world: World) -> None:
    app = world.app(lease_s=1.0, heartbeat_s=0.3)
    workers = [world.cli("kill_app", "worker", "-c", "3") for _ in range(2)]
    task = app.submit("brief", numbers(150), parallel=3)
    wait_for(lambda: began(world) > 20, "it runs")
    ((holder, *_),) = wait_for(lambda: world.sql("SELECT process FROM places WHERE n > 0 LIMIT 1"), "one has places")
    (victim,) = (each for each in workers if f":{each.pid}:" in holder)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    with world.working(app):
        assert task.wait(120)["counts"]["finish"] == 150
    assert set(world.shop.performed("ended")) == set(range(150))
    again = world.one("SELECT SUM(attempt - 1) FROM events WHERE task_id = ?", task.id)
    assert began(world) <= 150 + again, "only what was recovered runs again"
    world.check_promises(app, [task.id], 150)


def test_suspects_of_a_limited_task_take_its_places_too(world: World) -> None:
    """Taken out: the permits of suspects. One ran beside a job of another process."""
    app, other = world.app(), world.app()
    task = app.submit("brief", numbers(24), parallel=1)
    world.sql("UPDATE events SET watched = 1, deaths = 1, attempt = 2, due_at = 1 WHERE seq < 12")
    world.sql("UPDATE tasks SET next_seq = 12, due_next = 1")
    with world.working(app), world.working(other):
        assert task.wait(120)["counts"]["finish"] == 24
    assert most_at_once(world) == 1
    world.check_promises(app, [task.id], 24)


@pytest.mark.parametrize("processes", examples([2], [1, 2]))
def test_a_limit_that_comes_and_goes_while_jobs_run_starts_each_job_once(world: World, processes: int) -> None:
    """Taken out: that the line of those that wait for a place is emptied with the limit. They ran twice."""
    app = world.app()
    with ExitStack() as stack:
        for each in [app, *(world.app() for _ in range(processes - 1))]:
            stack.enter_context(world.working(each))
        task = app.submit("brief", numbers(400))
        for n, parallel in enumerate((2, None, 1, 3, None)):
            wait_for(lambda n=n: began(world) > 60 * (n + 1), "it goes on")  # type: ignore[misc]
            task.update(parallel=parallel)
        assert task.wait(120)["counts"]["finish"] == 400
    assert set(world.shop.performed("began").values()) == {1}
    assert world.sql("SELECT * FROM places") == []
    world.check_promises(app, [task.id], 400)


# -- who is served


def test_a_limited_task_does_not_keep_the_only_thread_from_others(world: World) -> None:
    app = world.app()
    with world.working(app, concurrency=1):
        first = app.submit("brief", numbers(3_000), parallel=1)
        wait_for(lambda: began(world) > 20, "it runs")
        second = app.submit("note", numbers(3))
        third = app.submit("note", numbers(3, 10), parallel=1)
        single = str(app.workers["note"].perform_async(numbers(1, 20)[0]))
        assert second.wait(120)["counts"]["finish"] == third.wait(120)["counts"]["finish"] == 3
        wait_for(lambda: app.event(single)["status"] == "finish", "so did a job without a Task")
        assert not first.progress()["done"]
        first.cancel()
        assert first.wait(120)["state"] == "cancelled"
    assert app.doctor() == []


@pytest.mark.one_of("processes", reason="each process counts for itself what it has served")
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("by_owner", [False, True])
def test_tasks_or_owners_of_one_priority_share_alike(world: World, processes: int, by_owner: bool) -> None:
    """Ann has two Tasks and Ben one. Taken out: the turns of `Shares.next`."""
    apps = [world.app(fair_by="owner" if by_owner else "task") for _ in range(processes)]
    app = apps[0]
    tasks = [app.submit("brief", numbers(1_500, 10_000 * n), owner=owner) for n, owner in enumerate(("ann", "ann", "ben"))]
    with ExitStack() as stack:
        for each in apps:
            stack.enter_context(world.working(each))
        wait_for(lambda: began(world) > 600, "they run")
        done = [began(world, 10_000 * n, 10_000 * n + 5_000) for n in range(3)]
        for task in tasks:
            task.cancel()
        for task in tasks:
            task.wait(120)
    wanted = [0.25, 0.25, 0.5] if by_owner else [1 / 3] * 3
    for count, share in zip(done, wanted, strict=True):
        assert abs(count / sum(done) - share) < 0.12, done


def test_the_queue_that_the_weights_draw_first_is_served_first(world: World) -> None:
    """Taken out: the place of the queue in the order of a borrow. The smaller priority went first, whatever was drawn."""
    app = world.app()
    rounds = []
    for _ in range(3):
        seen = len(world.shop.lines())
        usual = app.submit("brief", numbers(3), priority=120)
        drawn = app.submit("brief", numbers(3, 100), queue="callbacks", priority=340)
        launcher = app.launcher(concurrency=1, shutdown_s=5.0)
        launcher.borrower._picker._order = lambda: ("callbacks", "default")
        launcher.start()
        try:
            assert drawn.wait(120)["done"]
            assert usual.wait(120)["done"]
        finally:
            launcher.stop()
        first = next(line for line in world.shop.lines()[seen:] if line[0] == "began")
        rounds.append(int(first[1]) >= 100)
    assert sum(rounds) >= 2, "a borrow leaves a Task whose row another transaction holds just then"


@pytest.mark.parametrize("parallel", [None, 1])
def test_an_urgent_item_goes_before_a_backlog_of_any_length(world: World, parallel: int | None) -> None:
    """Taken out: that something urgent is borrowed while every thread is busy. It began when the backlog was over."""
    app = world.app()
    with world.working(app):
        backlog = app.submit("brief", numbers(5_000), priority=300)
        wait_for(lambda: began(world) > 40, "it runs")
        for n in range(5):
            before = began(world, 0, 5_000)
            app.submit("brief", numbers(1, 10_000 + n), priority=100, parallel=parallel).wait(120)
            assert began(world, 0, 5_000) - before <= 4 * 50, "one thread begins fifty in a second at most"
        backlog.cancel()
        backlog.wait(120)
    assert app.doctor() == []


def test_what_is_urgent_is_not_borrowed_again_and_again_while_no_thread_comes_free(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, calls, checks = world.app(), list[int](), list[int]()
    borrow, check = lending.borrow, lending.check

    def counting(*args: Any, **more: Any) -> Any:
        found = borrow(*args, **more)
        calls.append(found.count)
        return found

    def checking(*args: Any) -> Any:
        checks.append(1)
        return check(*args)

    monkeypatch.setattr(lending, "borrow", counting)
    monkeypatch.setattr(lending, "check", checking)
    with world.working(app, concurrency=2):
        long = app.submit("gated", numbers(20), priority=300)
        wait_for(lambda: began(world) == 2, "every thread is busy")
        urgent = app.submit("note", numbers(3, 100), priority=100)
        seen = len(checks)
        wait_for(lambda: len(checks) > seen + 3, "what it read ahead is back")
        before, seen = len(calls), len(checks)
        wait_for(lambda: len(checks) > seen + 5, "it checks on and on")
        assert len(calls) == before
        world.open_gate()
        assert urgent.wait(120)["done"]
        assert long.wait(120)["done"]
    world.check_promises(app, [long.id, urgent.id], 23)


# -- what goes back


def test_the_surplus_of_jobs_that_became_long_goes_to_a_process_that_is_idle(world: World) -> None:
    """Taken out: `_return_surplus`. The other process stood idle until the first had ended its long job."""
    app, other = world.app(), world.app()
    gate, who = threading.Event(), list[tuple[int, str]]()

    def perform(name: str) -> Any:
        def work(item: dict[str, Any]) -> None:
            who.append((item["n"], name))
            if item["n"] == 150:
                assert gate.wait(120)
            threading.Event().wait(0.001)

        return work

    app.worker(perform("first"), name="work", retry=0)
    other.worker(perform("second"), name="work", retry=0)
    with world.working(app, concurrency=1):
        task = app.submit("work", numbers(250))
        wait_for(lambda: (150, "first") in who, "it has met the long one")
        with world.working(other, concurrency=1):
            wait_for(lambda: task.progress()["counts"]["finish"] == 249, "all others ran elsewhere")
            assert (249, "second") in who
            gate.set()
            assert task.wait(120)["done"]
    assert set(Counter(n for n, _ in who).values()) == {1}
    world.check_promises(app, [task.id], 250)


@pytest.mark.parametrize("how", ["quiet", "stop"])
def test_a_process_that_ends_gives_back_all_that_it_has_not_begun_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    app, given = world.app(), list[int]()
    give_back = lending.give_back

    def counting(ledger: Any, parts: Any) -> Any:
        given.append(len(parts))
        return give_back(ledger, parts)

    with world.working(app, concurrency=2) as launcher:
        tasks = [app.submit("brief", numbers(2_000, 10_000 * n)) for n in range(3)]
        wait_for(lambda: began(world) > 100 and len(launcher.pool.jobs) > 10, "something lies ready")
        monkeypatch.setattr(lending, "give_back", counting)
        if how == "quiet":
            launcher.quiet()
            wait_for(lambda: world.one(HELD) == 0, "its loans are over")
        else:
            launcher.stop()
        assert len(given) == 1
        assert given[0] >= 1
    assert world.one(HELD) == 0
    # No Event was written, except of the one job each thread may have taken and not begun.
    assert world.one("SELECT COUNT(*) FROM events WHERE attempt > 1") <= 2
    assert app.doctor() == []
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize(("step", "is_alone"), [("borrowed", False), ("begin", True)])
def test_what_was_borrowed_and_does_not_lie_ready_yet_goes_back_too(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str, is_alone: bool
) -> None:
    """Taken out: that a quiet process lines it up first. Others got it only when the process had ended."""
    app, given, real, give_back = world.app(), list[int](), getattr(Tracker, step), lending.give_back

    def counting(ledger: Any, parts: Any) -> Any:
        given.append(len(parts))
        return give_back(ledger, parts)

    with world.working(app, concurrency=2) as launcher:

        def fails(*args: Any, **more: Any) -> Any:
            if not launcher.pool.is_quiet:
                raise LedgerUnavailable("away")
            return real(*args, **more)

        monkeypatch.setattr(Tracker, step, fails)
        monkeypatch.setattr(lending, "give_back", counting)
        task = app.submit("note", numbers(0 if is_alone else 20))
        alone = app.workers["note"].perform_bulk(numbers(5 * is_alone, 100))
        held = "SELECT COUNT(*) FROM events WHERE process IS NOT NULL" if is_alone else HELD
        wait_for(lambda: world.one(held) > 0, "they are borrowed")
        launcher.quiet()
        wait_for(lambda: world.one(held) == 0, "nothing is held")
        assert given == [1] * (not is_alone)
        with world.working(world.app()):
            assert task.wait(60)["done"]
            wait_for(lambda: all(app.event(str(jid))["status"] == "finish" for jid in alone), "those without a Task, too")
    assert set(world.shop.performed().values()) == {1}
    assert len(world.shop.performed()) == (5 if is_alone else 20)


def test_a_quiet_process_returns_the_places_of_jobs_that_end(world: World) -> None:
    """Others need not wait for its last job. Taken out: the check of a quiet process. It kept both places to its end."""
    app, other = world.app(), world.app()
    gates, who = [threading.Event() for _ in range(3)], list[tuple[int, str]]()

    def perform(name: str) -> Any:
        def work(item: dict[str, Any]) -> None:
            who.append((item["n"], name))
            assert gates[min(item["n"], 2)].wait(120)

        return work

    app.worker(perform("first"), name="work", retry=0)
    other.worker(perform("second"), name="work", retry=0)
    places = "SELECT n FROM places WHERE process = ?"
    loans = "SELECT COUNT(*) FROM loans WHERE process = ?"
    me = app.ledger.identity
    with world.working(app, concurrency=2) as launcher:
        task = app.submit("work", numbers(12), parallel=2)
        wait_for(lambda: len(who) == 2, "both places are taken")
        launcher.quiet()
        assert world.sql(places, me) == [(2,)], "what runs keeps them"
        with world.working(other, concurrency=2):
            gates[0].set()
            wait_for(lambda: world.sql(places, me) == [(1,)], "one has ended")
            wait_for(lambda: (2, "second") in who, "its place is the other's")
            assert world.sql(places, other.ledger.identity) == [(1,)]
            gates[1].set()
            wait_for(lambda: world.sql(places, me) == [], "it has no place any more")
            wait_for(lambda: world.one(loans, me) == 0, "its loan is over")
            wait_for(lambda: (3, "second") in who, "two run at the other")
            assert launcher.pool.is_quiet
            assert not task.progress()["done"]
            gates[2].set()
            assert task.wait(120)["counts"]["finish"] == 12
    assert sorted(n for n, name in who if name == "first") == [0, 1]
    assert set(Counter(n for n, _ in who).values()) == {1}
    world.check_promises(app, [task.id], 12)


def test_a_quiet_process_ends_a_loan_whose_last_outcome_did_not(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows so only after that commit. Taken out: the empty loans, in a step of a quiet process. The ledger lent it to
    the process until that ended."""
    app = world.app()
    mine = "SELECT COUNT(*) FROM loans WHERE process = ?"
    with world.working(app, concurrency=1) as launcher:
        task = app.submit("gated", numbers(5))
        wait_for(lambda: began(world) == 1, "the thread is taken")
        launcher.quiet()
        assert world.one(mine, app.ledger.identity) == 1
        monkeypatch.setattr(lending, "ending", lambda held: [])
        world.open_gate()
        wait_for(lambda: task.progress()["counts"]["finish"] == 1, "it has ended")
        wait_for(lambda: world.one(mine, app.ledger.identity) == 0, "its loan is over, too")
    monkeypatch.undo()
    with world.working(world.app()):
        assert task.wait(120)["counts"]["finish"] == 5
    assert set(world.shop.performed().values()) == {1}
    world.check_promises(app, [task.id], 5)


def test_a_queue_that_is_paused_gives_back_what_was_borrowed_of_it(world: World) -> None:
    """Taken out: the paused queues of a check."""
    app = world.app()
    with world.working(app) as launcher:
        task = app.submit("brief", numbers(2_000))
        wait_for(lambda: began(world) > 40, "it runs")
        app.operations.pause("default")
        wait_for(lambda: not launcher.pool.busy and world.one(HELD) == 0, "nothing runs, and nothing is held")
        count = began(world)
        assert app.submit("note", numbers(3), queue="callbacks").wait(120)["done"]
        assert began(world) == count
        app.operations.unpause("default")
        wait_for(lambda: began(world) > count + 20, "it goes on")
        task.cancel()
        assert task.wait(120)["state"] == "cancelled"
    assert app.doctor() == []


# -- answers that are lost


@pytest.mark.each_database(reason="each borrows with statements of its own")
@pytest.mark.parametrize(
    "step", ["_borrow", "_borrow_at_pointer", "_borrow_small", "_read_range", "_claim_due", "read_jobs"]
)
def test_what_was_lent_and_never_arrived_goes_back(world: World, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Taken out: loans or claims that the process does not know. They were lent to it for ever."""
    app = world.app()
    inner: Any = getattr(lending, step)
    lost: list[int] = []

    def losing(*args: Any) -> Any:
        found = inner(*args)
        if len(lost) < 2:
            lost.append(1)
            raise LedgerUnavailable("the answer is lost")
        return found

    monkeypatch.setattr(lending, step, losing)
    with world.working(app):
        task = app.submit("shaky", [{"n": n, "breaks": n % 2} for n in range(300)])
        singles = [str(app.workers["note"].perform_async(item)) for item in numbers(5, 1_000)]
        small = [app.submit("note", numbers(1, n)) for n in range(2_000, 2_008)]
        for each in (task, *small):
            assert each.wait(120)["counts"]["finish"] == (300 if each is task else 1)
        wait_for(lambda: {app.event(jid)["status"] for jid in singles} == {"finish"}, "so did the single ones")
    assert lost or (step == "_borrow_at_pointer" and world.store.kind == "sqlite")
    assert {n: count for n, count in world.shop.performed().items() if count != 1 + (n < 1_000 and n % 2)} == {}
    world.check_promises(app, [task.id, *(each.id for each in small)], 308)


def test_a_process_whose_checks_get_no_answer_begins_nothing_after_half_a_second(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken out: the age of the last answer, in `Pool._is_known`. All that was read ahead began."""
    monkeypatch.setattr(borrower, "AHEAD_S", 60.0)
    app, away = world.app(), threading.Event()
    check, borrow = lending.check, lending.borrow

    def failing(inner: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            if away.is_set():
                raise LedgerUnavailable("no answer")
            return inner(*args, **more)

        return call

    monkeypatch.setattr(lending, "check", failing(check))
    monkeypatch.setattr(lending, "borrow", failing(borrow))
    with world.working(app, concurrency=1) as launcher:
        monkeypatch.setattr(launcher.borrower._recheck, "_return_surplus", lambda now: None)
        task = app.submit("brief", numbers(300))
        wait_for(lambda: len(launcher.pool.jobs) > 200, "many lie ready")
        away.set()
        since = time.monotonic()
        wait_for(lambda: time.monotonic() > since + 2, "two seconds pass")
        count = began(world)
        assert sum(line[0] == "began" and float(line[2]) > since + 0.6 for line in world.shop.lines()) <= 1
        assert count < 300
        assert len(launcher.pool.jobs) > 100
        away.clear()
        assert task.wait(120)["counts"]["finish"] == 300
    assert set(world.shop.performed("began").values()) == {1}
    world.check_promises(app, [task.id], 300)


# -- what a borrowed job passes


def test_what_is_borrowed_passes_the_client_middleware(world: World) -> None:
    app = world.app()

    def odd_ones_only(worker: Any, job: CurrentJob, queue: str, call_next: Any) -> Any:
        return call_next() if job.payload["args"][0]["n"] % 2 else None

    app.client_middleware.add(odd_ones_only)
    with world.working(app):
        task = app.submit("brief", numbers(100), parallel=1)
        counts = task.wait(120)["counts"]
    assert (counts["finish"], counts["error"]) == (50, 50)
    assert world.sql("SELECT * FROM loans") == []
    world.check_promises(app, [task.id], 100)


def test_a_thread_that_dies_leaves_the_other_jobs_of_its_loan_to_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = world.app()
    with world.working(app) as launcher:
        perform, died = launcher.performer.perform, list[str]()

        def dying(execution: Any) -> None:
            if len(world.shop.lines()) > 20 and not died:
                died.append(execution.copy.jid)
                raise SystemError("this thread ends")
            perform(execution)

        monkeypatch.setattr(launcher.performer, "perform", dying)
        task = app.submit("brief", numbers(60), parallel=1)
        counts = task.wait(120)["counts"]
        wait_for(lambda: launcher.pool.busy == 0, "its place in the process is free")
    assert died
    assert counts["finish"] + counts["error"] == 60
    assert counts["error"] <= 1
    world.check_promises(app, [task.id], 60)
