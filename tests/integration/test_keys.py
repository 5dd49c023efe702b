"""Items with a key: equal ones run one after the other, in the order submitted, across all Tasks of their worker."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from support import borrowing
from support.borrowing import borrow
from support.costs import analyze, cost
from support.drawn import examples
from support.world import World

from asynctask import AsyncTask
from asynctask.core.states import Reason
from asynctask.core.transitions import BLOCKED
from asynctask.errors import Conflict, InputError
from asynctask.ledger import lending, sessions
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import NewItem
from asynctask.ledger.recorder import Kind
from asynctask.maintenance import Maintenance
from asynctask.task import TaskHandle
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


def items(*keys: Any, first: int = 0, **more: Any) -> list[dict[str, Any]]:
    """An item for each key, numbered from ``first`` on."""
    return [{"n": n, "serial": key, **more} for n, key in enumerate(keys, first)]


def lend(app: AsyncTask, task: TaskHandle, wanted: int = 100) -> list[Any]:
    return borrow(app.ledger, task.id, wanted)


def numbers_of(jobs: Iterable[Any]) -> list[int]:
    return [json.loads(job.params)["n"] for job in jobs]


def end(app: AsyncTask, *jobs: Any, kind: Kind = Kind.FINISH, **more: Any) -> None:
    borrowing.end(app.ledger, *jobs, kind=kind, **more)


def run_out(app: AsyncTask, *tasks: TaskHandle) -> list[list[int]]:
    """The numbers of the jobs that went together, until no more come."""
    waves = []
    while jobs := [job for task in tasks for job in lend(app, task)]:
        waves.append(numbers_of(jobs))
        end(app, *jobs)
    return waves


def places(world: World) -> int:
    return int(world.one("SELECT COUNT(*) FROM key_positions"))


def blocked(world: World) -> int:
    return int(world.one("SELECT COUNT(*) FROM events WHERE due_at = ?", BLOCKED))


# -- one borrow after the other, in the ledger


@pytest.mark.each_database(reason="each has statements of its own for lines")
def test_equal_keys_of_two_tasks_go_in_the_order_submitted(world: World) -> None:
    """Taken out: any condition of a turn, the place in the order of the Tasks, the lines that go on after an end."""
    app = world.app()
    first = app.submit("note", items("a", "b", "a", 7, "a"), key="serial")
    second = app.submit("note", items("a", "7", " b ", 7.0, "c", first=10), key="serial")
    assert first.progress()["control"] | {"key": "serial"} == first.progress()["control"]
    later = lend(app, second)
    assert numbers_of(later) == [14], "its other keys wait for the first Task"
    soon = lend(app, first, 2)
    assert numbers_of(soon) == [0, 1]
    rest = lend(app, first)
    assert numbers_of(rest) == [3]
    assert lend(app, first) == []
    assert blocked(world) == 6
    waiting = app.event(world.one("SELECT job_id FROM events WHERE due_at = ? ORDER BY id LIMIT 1", BLOCKED))
    assert (waiting["waits_for"], waiting["due_at"]) == ("key", None)
    end(app, *later, *soon, *rest)
    assert run_out(app, second, first) == [[11, 12, 2], [13, 4], [10]]
    assert places(world) == blocked(world) == 0
    world.check_promises(app, [first.id, second.id], 10)


def test_jobs_of_one_key_far_from_each_other_do_not_keep_the_others_waiting(world: World) -> None:
    """Taken out: the further steps of the pointer within one borrow."""
    app = world.app()
    task = app.submit("note", items(*["a"] * 600, *range(20)), key="serial")
    jobs = lend(app, task, 5)
    assert numbers_of(jobs) == [0, 600, 601, 602, 603]
    assert numbers_of(lend(app, task, 4)) == [604, 605, 606, 607], "no more than wanted"


def test_a_retry_keeps_those_behind_waiting_and_an_explicit_one_comes_last(world: World) -> None:
    """Taken out: the place that a job keeps between its attempts, the last place of one that runs again."""
    app = world.app()
    task = app.submit("shaky", items("a", "a"), key="serial")
    (job,) = lend(app, task)
    end(app, job, kind=Kind.RETRY, retry_at=app.ledger.now() + 3_600_000_000)
    assert lend(app, task) == []
    world.sql("UPDATE events SET due_at = 1 WHERE due_at < ?", BLOCKED)
    world.sql("UPDATE tasks SET due_next = 1")
    (again,) = lend(app, task)
    assert (again.event_id, again.attempt) == (job.event_id, 2)
    end(app, again, kind=Kind.RAISED)
    second = app.submit("shaky", items("a", first=5), key="serial")
    task.retry()
    assert run_out(app, task, second) == [[1], [5], [0]]
    world.check_promises(app, [second.id], 1)


def test_a_job_that_runs_again_waits_for_a_list_that_is_still_split(world: World) -> None:
    """The next rows of the list come before the last place. Taken out: the list that is split, in `has_turn`."""
    app = world.app()
    task = app.submit("shaky", items("a"), key="serial")
    new = task_rows.NewTask("shaky", "default", 1, throttle=task_rows.Throttle(key_field="serial"))
    split = task_rows.create(app.ledger, [task_rows.First(new)], lease_s=60)[0].task_id
    end(app, *lend(app, task), kind=Kind.RAISED)
    task.retry()
    assert lend(app, task) == []
    assert blocked(world) == 0, "nothing would let it go on"
    row = [NewItem('{"n":1,"serial":"a"}', 1, key="serial\0a")]
    task_rows.add_slice(app.ledger, split, row, [], after=0, cursor=1, lease_s=60)
    (first,) = lend(app, app.task(split))
    task_rows.end_split(app.ledger, split, Reason.SEALED)
    due = "SELECT due_next FROM tasks WHERE id = ?"
    wait_for(lambda: world.one(due, task.id) <= app.ledger.now(), "it is looked at again", timeout=2)
    assert lend(app, task) == []
    end(app, first)
    assert numbers_of(lend(app, task)) == [0]


def test_jobs_that_run_again_one_after_the_other_keep_that_order(world: World) -> None:
    """Taken out: the places after the last one of the line."""
    app = world.app()
    task = app.submit("shaky", items(*"aaa"), key="serial")
    for _ in range(3):
        end(app, *lend(app, task), kind=Kind.RAISED)
    second, first, third = (jid for (jid,) in world.sql("SELECT job_id FROM events ORDER BY id"))
    app.operations.act_on_job(first, "restart")
    (job,) = lend(app, task)
    for again in (third, second):
        app.operations.act_on_job(again, "restart")
        assert lend(app, task) == [], "the first one is at work"
    end(app, job)
    assert run_out(app, task) == [[2], [0]]


@pytest.mark.each_database(reason="each locks in its own way")
def test_an_earlier_list_that_is_still_split_keeps_later_ones_waiting(world: World) -> None:
    """Its next slices come before them. Taken out: the look for such a Task."""
    app = world.app()
    new = task_rows.NewTask("note", "default", 1, throttle=task_rows.Throttle(key_field="serial"))
    split = task_rows.create(app.ledger, [task_rows.First(new)], lease_s=60)[0].task_id
    later = app.submit("note", items("a", first=10), key="serial")
    other = app.submit("order", [{"n": 20, "kind": "a"}], key="kind")
    assert lend(app, later) == []
    assert numbers_of(lend(app, other)) == [20], "of another worker"
    row = [NewItem('{"n":0,"serial":"a"}', 1, key="serial\0a")]
    task_rows.add_slice(app.ledger, split, row, [], after=0, cursor=1, lease_s=60)
    task_rows.end_split(app.ledger, split, Reason.SEALED)
    due = "SELECT due_next FROM tasks WHERE id = ?"
    wait_for(lambda: world.one(due, later.id) <= app.ledger.now(), "it is looked at again", timeout=2)
    assert run_out(app, later, app.task(split)) == [[0], [10]]


def test_the_split_of_a_dead_process_keeps_later_lists_waiting_until_another_takes_it_over(world: World) -> None:
    """Taken out: the lease that has ended."""
    app = world.app()
    new = task_rows.NewTask("note", "default", 1, throttle=task_rows.Throttle(key_field="serial"))
    split = task_rows.create(app.ledger, [task_rows.First(new)], lease_s=60)[0].task_id
    later = app.submit("note", items("a", first=10), key="serial")
    world.sql("UPDATE tasks SET split_until = 0 WHERE id = ?", split)  # as when its process is recovered
    assert lend(app, later) == []


@pytest.mark.databases("postgresql", "mariadb", reason="SQLite has one writer")
@pytest.mark.each_database(reason="each locks in its own way")
def test_a_job_that_is_deleted_while_it_asks_keeps_no_place(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep its line for ever. Taken out: the status, in the claim."""
    app, other = world.app(), world.app()
    task = app.submit("shaky", items("a", "a"), key="serial")
    end(app, *lend(app, task), kind=Kind.RAISED)
    end(app, *lend(app, task), kind=Kind.RAISED)
    task.retry()
    (gone, *_) = [jid for (jid,) in world.sql("SELECT job_id FROM events ORDER BY id")]
    turns, deletes = sessions.turns, list[threading.Thread]()

    def delete() -> None:
        with suppress(Conflict):  # it was lent before
            other.operations.act_on_job(gone, "delete")

    def while_it_is_deleted(*args: Any) -> Any:
        if not deletes:
            deletes.append(threading.Thread(target=delete))
            deletes[0].start()
            wait_for(lambda: not deletes[0].is_alive() or waits_for_a_lock(world), "it waits, or has deleted", every=0.25)
        return turns(*args)

    monkeypatch.setattr(sessions, "turns", while_it_is_deleted)
    jobs = lend(app, task)
    deletes[0].join(60)
    end(app, *jobs)
    run_out(app, task)
    assert places(world) == blocked(world) == 0


@pytest.mark.databases("postgresql", "mariadb", reason="SQLite has one writer")
@pytest.mark.each_database(reason="each locks in its own way")
def test_a_job_that_is_started_while_it_is_passed_asks_for_its_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken out: the lock of what the pointer passes."""
    app, other = world.app(), world.app()
    task = app.submit("note", items(*"aaaaaaaaaa"), key="serial")
    stopped = world.one("SELECT job_id FROM events WHERE seq = 8")
    app.stop_job(stopped)
    (job,) = lend(app, task, 1)
    turns, starts = sessions.turns, list[threading.Thread]()

    def while_it_is_started(asking: Any, before: Any) -> Any:
        if len(asking) > 3 and not starts:  # the rows after those at the pointer
            starts.append(threading.Thread(target=other.start_job, args=(stopped,)))
            starts[0].start()
            wait_for(lambda: not starts[0].is_alive() or waits_for_a_lock(world), "it waits, or has started", every=0.25)
        return turns(asking, before)

    monkeypatch.setattr(sessions, "turns", while_it_is_started)
    assert lend(app, task, 3) == []
    starts[0].join(60)
    assert lend(app, task, 3) == []
    end(app, job)
    assert numbers_of(lend(app, task)) == [1]


def waits_for_a_lock(world: World) -> bool:
    if world.store.kind == "mariadb":
        trx = "information_schema.innodb_trx JOIN information_schema.processlist ON id = trx_mysql_thread_id"
        return bool(world.one(f"SELECT COUNT(*) FROM {trx} WHERE db = DATABASE() AND trx_state = 'LOCK WAIT'"))
    waiting = "datname = current_database() AND wait_event_type = 'Lock'"
    return bool(world.one(f"SELECT COUNT(*) FROM pg_stat_activity WHERE {waiting}"))


@pytest.mark.parametrize("by", ["cancel", "delete", "recorded"])
def test_what_ends_without_a_worker_lets_its_line_go_on(world: World, by: str) -> None:
    """Taken out: the announcement of cancelled rows."""
    app = world.app()
    first = app.submit("note", items("a", "a"), key="serial")
    second = app.submit("note", items("a", first=10), key="serial")
    assert lend(app, second) == []
    first.pause()
    assert lend(app, second) == [], "a paused Task keeps its place in the line"
    if by == "cancel":
        first.cancel()
    else:
        first.resume()
        (job,) = lend(app, first)
        held = world.one("SELECT job_id FROM events WHERE due_at = ? AND task_id = ?", BLOCKED, first.id)
        with pytest.raises(Conflict, match="its key"):
            app.operations.act_on_job(held, "restart")
        app.operations.act_on_job(held, "delete")
        if by == "delete":
            end(app, job)
        else:
            app.record(job.job_id, "finish")
    assert numbers_of(lend(app, second)) == [10]


def test_a_stopped_job_starts_again_only_in_its_turn(world: World) -> None:
    """Whatever makes a job due, the borrow looks whether its turn has come. Taken out: that look."""
    app = world.app()
    task = app.submit("note", items("a", "a"), key="serial")
    (job,) = lend(app, task)
    world.sql("UPDATE events SET due_at = 1 WHERE due_at = ?", BLOCKED)
    world.sql("UPDATE tasks SET due_next = 1")
    assert lend(app, task) == []
    assert blocked(world) == 1
    end(app, job)
    assert numbers_of(lend(app, task)) == [1]


def test_a_task_leaves_its_session_while_its_jobs_wait_for_their_keys(world: World) -> None:
    """Else the Task that they wait for might wait for the session. Taken out: blocked jobs among those that only wait."""
    app = world.app()
    first = app.submit("note", items("a"), key="serial")
    held = app.submit("note", items("a", first=10), key="serial", session="s")
    other = app.submit("note", items("b", first=20), key="serial", session="s")
    (job,) = lend(app, first)
    assert lend(app, held) == []
    assert numbers_of(lend(app, other)) == [20]
    end(app, job)
    lending.rejoin(app.ledger)
    assert world.one("SELECT session_waits FROM tasks WHERE id = ?", held.id) is not None, "it joined the line again"


def test_maintenance_lets_lines_go_on_that_a_dead_process_left(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It died between the commit of an end and that of the next turn. Taken out: the repair, the look who is first in
    it."""
    app = world.app()
    task = app.submit("note", items(*"aabbcc"), key="serial")
    jobs = lend(app, task)
    with monkeypatch.context() as patched:
        patched.setattr(sessions, "free", lambda ledger, lines: set())
        end(app, *jobs[:2])
    assert lend(app, task) == []
    maintenance(app).find_lost()
    assert numbers_of(lend(app, task)) == [1, 3], "the third line is held"


def maintenance(app: AsyncTask) -> Maintenance:
    return app.maintenance(app.ledger)


@pytest.mark.each_database(reason="each locks in its own way")
@pytest.mark.databases(
    "postgresql", reason="SQLite has one writer, and MariaDB locks more rows than it changes in a tiny table"
)
def test_a_job_whose_key_comes_free_while_it_is_passed_goes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends the holder does not see yet that it waits. Taken out: the look after the reservation."""
    app, other = world.app(), world.app()
    task = app.submit("note", items("a", "a", "b"), key="serial")
    (job,) = lend(app, task, 1)
    postpone = sessions.postpone

    def ended_meanwhile(*args: Any) -> None:
        postpone(*args)
        end(other, job)

    with monkeypatch.context() as patched:
        patched.setattr(sessions, "postpone", ended_meanwhile)
        assert numbers_of(lend(app, task)) == [2]
    assert numbers_of(lend(app, task)) == [1]


def test_no_job_is_passed_while_enough_of_its_task_go(world: World) -> None:
    """To pass one costs more than all the rest. Taken out: the end of the pass, the look at the row at the pointer."""
    app = world.app()
    task = app.submit("note", items(*"abcabcdefg"), key="serial")
    jobs = lend(app, task, 3)
    assert numbers_of(jobs) == [0, 1, 2]
    assert blocked(world) == 0
    assert numbers_of(lend(app, task, 3)) == [6, 7, 8]
    assert blocked(world) == 3
    end(app, jobs[0])
    assert numbers_of(lend(app, task, 2)) == [3, 9]


def test_an_end_writes_only_if_the_next_of_its_line_waits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commit takes it out of its line. Taken out: that, the read before the write."""
    app = world.app()
    task = app.submit("note", items("a", "b", "a"), key="serial")
    jobs = lend(app, task, 2)
    with monkeypatch.context() as patched:
        patched.setattr(sessions, "_unblock", lambda ledger, event_ids: pytest.fail("nothing waits"))
        end(app, *jobs)
    assert places(world) == 1
    assert numbers_of(lend(app, task)) == [2]


def test_what_ended_before_its_turn_is_passed_though_enough_of_its_task_wait_for_a_thread(world: World) -> None:
    """It waits for no turn. Taken out: the look whether the row at the pointer asks for one, before the read and after."""
    app = world.app()
    task = app.submit("note", items(*"abcdefg"), key="serial")
    assert numbers_of(lend(app, task, 3)) == [0, 1, 2]
    gone = app.submit("note", items(*"hijkl", first=10), key="serial")
    assert numbers_of(lend(app, gone, 2)) == [10, 11]
    for ended, seq in ((task, 3), (task, 4), (gone, 3)):
        app.record(world.one("SELECT job_id FROM events WHERE task_id = ? AND seq = ?", ended.id, seq), "finish")
    assert numbers_of([*lend(app, task, 2), *lend(app, task, 1)]) == [5, 6]
    assert numbers_of([*lend(app, gone, 2), *lend(app, gone, 1)]) == [12, 14]


def test_a_stopped_job_that_was_never_dispatched_keeps_one_place_of_its_key_and_no_more(world: World) -> None:
    """Taken out: the places of those that do not ask."""
    app = world.app()
    task = app.submit("note", items(*"aab"), key="serial")
    stopped = world.one("SELECT job_id FROM events WHERE seq = 0")
    app.stop_job(stopped)
    assert numbers_of(lend(app, task)) == [2]
    assert lend(app, task) == []
    app.start_job(stopped)
    assert run_out(app, task) == [[0], [1]]


@pytest.mark.each_database(reason="each plans it in its own way")
def test_the_look_who_is_next_reads_a_few_rows_of_each_line(world: World) -> None:
    """Of a list of 20,000 that was submitted before it was performed, MariaDB read the index to its end for each job: its
    statistics were of an empty table. Taken out: the index that it is told to take."""
    app = world.app()
    app.ensure_schema()
    database, most = app.ledger.database, 0
    analyze(database)
    task = app.submit("note", items(*[n % 100 for n in range(2_000)]), key="serial")
    lines = {int(line) for (line,) in world.sql("SELECT DISTINCT line FROM key_positions")}
    while jobs := lend(app, task):
        most = max(most, cost(database, lambda connection: sessions._blocked_first(connection, lines)))
        end(app, *jobs)
    assert len(lines) == 100
    assert most < 100 * len(lines)


# -- what has a key


@pytest.mark.databases("sqlite", reason="it asks no database")
def test_serial_numbers_lie_side_by_side_in_the_index_of_lines() -> None:
    """Else each insertion in a large one is of another page. Taken out: the part of the digest that they share."""
    lines = {sessions.line_of("note", f"serial\0SN{n:08d}") for n in range(10_000)}
    assert len(lines) == 10_000
    assert len({line >> 24 for line in lines}) == 100
    assert sessions.line_of("note", "serial\0SN1") != sessions.line_of("other", "serial\0SN1")


def test_a_row_without_a_key_is_refused_and_the_others_go_on(world: World) -> None:
    app = world.app()
    wrong: list[Any] = [None, "", " ", True, [1], {"a": 1}, "x" * 256]
    task = app.submit("note", [*items("a", *wrong), {"n": 9}], key="serial")
    rejects = task.rejects()
    assert [(each["errors"][0]["column"], each["errors"][0]["code"]) for each in rejects] == [
        *[("serial", "missing")] * 3,
        *[("serial", "bad_key")] * 4,
        ("serial", "missing"),
    ]
    assert task.progress()["counts"]["total"] == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [({"key": ""}, "key"), ({"key_limit": 1}, "key_limit"), ({"key": "n", "key_limit": 2}, "key_limit")],
)
def test_an_option_that_cannot_be_is_refused(world: World, options: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError) as refused:
        world.app().submit("note", items("a"), **options)
    assert [each.column for each in refused.value.errors] == [named]


def test_a_model_must_have_the_field(world: World) -> None:
    with pytest.raises(InputError, match="no field of the item"):
        world.app().submit("order", [{"n": 1, "kind": "a"}], key="serial")


def test_mixed_jobs_have_the_keys_of_their_workers(world: World) -> None:
    app = world.app()

    @app.worker(key="serial")
    def command(item: dict[str, Any]) -> None:
        pass

    alone = app.submit(command, items("a"))
    mixed = app.submit_jobs([("command", each) for each in items("a", first=1)] + [("note", {"n": 2})])
    assert mixed.progress()["control"]["key"] == "*"
    assert numbers_of(lend(app, mixed)) == [2]
    assert run_out(app, alone, mixed) == [[0], [1]]


# -- with real workers


def check_order(world: World) -> None:
    """Of each key one ran at a time, and they began in the order of their numbers."""
    running: dict[str, set[str]] = defaultdict(set)
    last: dict[str, int] = defaultdict(lambda: -1)
    for verb, key, n, *_ in world.shop.lines():
        if verb == "began":
            running[key].add(n)
            assert len(running[key]) == 1, (key, n)
            assert int(n) >= last[key], (key, n, last[key])
            last[key] = int(n)
        elif verb == "ended":
            running[key].discard(n)


def keyed(world: World, **more: Any) -> AsyncTask:
    """An application whose worker says when it began and ended a key."""
    app = world.app(**more)

    @app.worker(key="serial", retry=2, retry_in=lambda count, error, job: 0.05)
    def command(item: dict[str, Any]) -> None:
        world.shop.note("began", item["serial"], item["n"])
        threading.Event().wait(random.random() / 500)
        world.shop.note("ended", item["serial"], item["n"])
        if item.get("bug"):
            raise ValueError("a bug")

    return app


@pytest.mark.each_database(reason="dispatchers and recorders of two processes meet in the lines")
def test_two_processes_keep_the_order_over_many_tasks(world: World) -> None:
    app, other = keyed(world), keyed(world)
    tasks, n = [], 0
    for number in range(examples(3, 6)):
        keys = [f"k{n % 13}" for n in range(40)]
        random.Random(number).shuffle(keys)
        found = items(*keys, first=n)
        for each in found:
            each["bug"] = each["n"] % 17 == 0
        tasks.append(app.submit("command", found, parallel=5 if number == 2 else None))
        n += len(found)
    with world.working(app), world.working(other):
        for task in tasks:
            assert task.wait(120)["done"]
    check_order(world)
    assert places(world) == blocked(world) == 0
    world.check_promises(app, [task.id for task in tasks], n)


@pytest.mark.databases("postgresql", "mariadb", reason="SQLite has one writer")
@pytest.mark.each_database(reason="each locks in its own way")
def test_no_two_of_a_line_are_lent_at_once_whoever_borrows_ends_retries_and_submits(world: World) -> None:
    """No lock is over all lines. Taken out: what is blocked after a borrow at the pointer, the lock in `_move_in_lines`."""
    first = world.app()
    tasks = [first.submit("shaky", items(*[n % 3 for n in range(12)]), key="serial") for _ in range(3)]
    held: dict[str, int] = {}
    wrong, lock, rounds = list[str](), threading.Lock(), examples(25, 200)

    def act(app: AsyncTask, number: int) -> None:
        chance = random.Random(number)
        for _ in range(rounds):
            mine = app.task(chance.choice(tasks).id)
            if chance.random() < 0.1:
                with suppress(Conflict):  # rows of the last one are turned yet
                    mine.retry()
            if chance.random() < 0.05:
                tasks.append(app.submit("shaky", items(*[n % 3 for n in range(6)]), key="serial"))
            jobs = lend(app, mine, chance.randrange(1, 4))
            with lock:
                for job in jobs:
                    key = json.loads(job.params)["serial"]
                    if key in held:
                        wrong.append(f"{job.event_id} beside {held[key]}")
                    held[key] = job.event_id
            for job in jobs:
                with lock:
                    del held[json.loads(job.params)["serial"]]
                end(app, job, kind=chance.choice([Kind.FINISH, Kind.RAISED]))

    apps = [world.app() for _ in range(4)]
    threads = [threading.Thread(target=act, args=(app, number)) for number, app in enumerate(apps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    run_out(first, *tasks)
    assert places(world) == blocked(world) == 0


def test_the_order_holds_while_workers_are_killed(world: World) -> None:
    app = keyed(world)
    lists = examples(2, 3)
    tasks = [app.submit("command", items(*[f"k{n % 20}" for n in range(100)], first=at * 100)) for at in range(lists)]
    workers = [world.cli("key_app", "worker", "-c", "4") for _ in range(2)]
    chance = random.Random(1)
    for kills in range(1, examples(3, 5)):
        wait_for(partial(has_gone_on, world, 40 * kills), "they go on", 60)
        workers.pop(chance.randrange(len(workers))).send_signal(signal.SIGKILL)
        workers.append(world.cli("key_app", "worker", "-c", "4"))
    for task in tasks:
        assert task.wait(120)["done"]
    check_deaths_order(world)
    wait_for(lambda: places(world) == 0, "every line is left", 60)
    world.check_promises(app, [task.id for task in tasks], 100 * lists)


def has_gone_on(world: World, lines: int) -> bool:
    return len(world.shop.lines()) > lines


def check_deaths_order(world: World) -> None:
    """As :func:`check_order`; what a killed process began has not ended, and begins again before any other of its key."""
    last: dict[str, int] = defaultdict(lambda: -1)
    for verb, key, n, *_ in world.shop.lines():
        if verb == "began":
            assert int(n) >= last[key], (key, n, last[key])
            last[key] = int(n)
