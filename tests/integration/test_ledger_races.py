"""What two processes do to each other where no write lock keeps them apart: PostgreSQL and MariaDB."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from support import borrowing
from support.borrowing import Lent, borrow
from support.world import World

from asynctask.clock import SystemClock
from asynctask.core.states import Reason, State
from asynctask.database.engine import Database
from asynctask.database.retrying import TransactionConflict
from asynctask.errors import ConfigError
from asynctask.ledger import base, doctor, lending, processes, recorder, sessions
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, NewItem
from asynctask.ledger.recorder import Kind
from asynctask.ledger.tasks import NewTask, Throttle
from asynctask.testing import wait_for

pytestmark = pytest.mark.databases("postgresql", "mariadb", reason="on SQLite a write transaction excludes all others")

_DAY = 86_400_000_000
_WAITS = {
    "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
    "mariadb": "SELECT count(*) FROM information_schema.innodb_trx JOIN information_schema.processlist"
    " ON id = trx_mysql_thread_id WHERE db = DATABASE() AND trx_state = 'LOCK WAIT'",
}


class Later(SystemClock):
    """A clock that can be put forward (``ahead``, microseconds)."""

    ahead = 0

    def now(self) -> int:
        return super().now() + self.ahead


def flying(ledger: Ledger, count: int, session: str | None = None) -> tuple[int, list[Lent]]:
    """A Task of so many jobs that are all lent."""
    register(ledger)
    task_id = waiting(ledger, count, session)
    return task_id, borrow(ledger, task_id, count)


def register(ledger: Ledger) -> None:
    """This is a process in the ledger, so the doctor knows who holds its loans."""
    try:
        processes.register(ledger, processes.Host("h", ""), kind="worker", pid=1, lease_s=600)
    except ConfigError:
        return


def waiting(ledger: Ledger, count: int, session: str | None = None) -> int:
    """A sealed Task of so many jobs."""
    new = NewTask(worker_name="note", queue="default", priority=0, session=session)
    task_id = task_rows.create(ledger, [task_rows.First(new)], lease_s=60)[0].task_id
    items = [NewItem("{}", n) for n in range(1, count + 1)]
    task_rows.add_slice(ledger, task_id, items, [], after=0, cursor=count, lease_s=60)
    task_rows.end_split(ledger, task_id, Reason.SEALED)
    return task_id


def records(ledger: Ledger, job: Lent, retry_at: int | None = None) -> list[Any]:
    kind = Kind.RETRY if retry_at else Kind.FINISH
    outcomes = [borrowing.outcome(job, kind, retry_at=retry_at)]
    recorder.write(ledger, outcomes)
    assert job.by is not None
    job.by.ended()
    return outcomes


def task(ledger: Ledger, task_id: int) -> dict[str, Any]:
    with ledger.database.read() as connection:
        return task_rows.get(connection, task_id)


def in_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def wait_for_a_lock(world: World, reason: str) -> None:
    """Waits until somebody waits for a lock; asked seldom, for MariaDB shows what it showed a tenth of a second ago."""
    wait_for(lambda: world.sql(_WAITS[world.store.kind])[0][0] > 0, reason, every=0.25)


def test_the_doctor_mends_counts_while_outcomes_are_recorded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = world.app().ledger
    other = Ledger(ledger.database, identity="other")
    task_id, jobs = flying(ledger, 3)
    world.sql("UPDATE task_tallies SET finish = finish + 1")
    left = list(jobs)
    count = doctor._count

    def and_a_job_ends(*args: Any) -> Any:
        counted = count(*args)
        if left:
            records(other, left.pop())
        return counted

    monkeypatch.setattr(doctor, "_count", and_a_job_ends)
    (mended,) = doctor.examine(ledger, repair=True, task_ids=[task_id])
    assert mended.repaired
    left.clear()
    assert doctor.examine(ledger, task_ids=[task_id]) == []


def test_a_count_that_two_doctors_found_wrong_is_mended_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = world.app().ledger
    task_id, _ = flying(ledger, 3)
    world.sql("UPDATE task_tallies SET finish = finish + 1")
    count, others = doctor._count, [1]

    def while_another_mends_it(*args: Any) -> Any:
        counted = count(*args)
        if others:
            others.clear()
            doctor.examine(ledger, repair=True, task_ids=[task_id])
        return counted

    monkeypatch.setattr(doctor, "_count", while_another_mends_it)
    doctor.examine(ledger, repair=True, task_ids=[task_id])
    assert doctor.examine(ledger, task_ids=[task_id]) == []


def test_a_retry_whose_recorder_died_before_it_told_anybody_is_found_before_a_later_one_is_due(world: World) -> None:
    ledger = world.app().ledger
    task_id, (first, second) = flying(ledger, 2)
    lending.announce(ledger, records(ledger, first, ledger.now() + _DAY))
    records(ledger, second, ledger.now() + 1)  # and then its process is gone
    assert doctor.mend(ledger) == 1
    assert [job.event_id for job in borrow(ledger, task_id, 5)] == [second.event_id]
    assert doctor.mend(ledger) == 0, "the later one has its hint"


def test_a_task_that_is_paused_while_it_joins_its_session_again_does_not_take_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "PATIENCE_S", 20.0)
    clock = Later()
    ledger = Ledger(world.app().ledger.database, clock=clock)
    task_id, (job,) = flying(ledger, 1, "s")
    lending.announce(ledger, records(ledger, job, ledger.now() + _DAY))
    assert task(ledger, task_id)["session_holder"] is None, "it stands aside"
    clock.ahead = 2 * _DAY
    with ledger.database.write() as connection:
        row = task_rows.lock(connection, task_id)
        task_rows.change_state(connection, ledger, row, State.PAUSED, Reason.PAUSED, state_reason=None)
        joining = in_thread(lambda: lending.rejoin(ledger))
        if world.store.kind == "sqlite":
            wait_for_a_lock(world, "who joins waits for who pauses")
        else:
            joining.join(120)
            assert not joining.is_alive(), "it waits for nobody's row, and comes again"
    joining.join(120)
    lending.rejoin(ledger)
    paused = task(ledger, task_id)
    assert (paused["session_holder"], paused["session_waits"], paused["ready"]) == (None, None, None)


def test_a_deadlock_while_a_session_passes_on_is_told_as_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PATIENCE_S", 20.0)
    ledger = world.app().ledger
    first, second, large = waiting(ledger, 1, "s"), waiting(ledger, 1, "s"), waiting(ledger, 500)
    locked, mine = threading.Event(), threading.Event()

    def other() -> None:
        with ledger.database.write() as connection:
            # It is not the one that is undone: that is on MariaDB who changed fewer rows, on PostgreSQL who looks.
            if world.store.kind == "postgresql":
                connection.exec_driver_sql("SET LOCAL deadlock_timeout = '120s'")
            connection.exec_driver_sql(f"UPDATE events SET retries = retries + 1 WHERE task_id = {large:d}")
            connection.exec_driver_sql(f"UPDATE tasks SET version = version + 1 WHERE id = {second:d}")
            locked.set()
            assert mine.wait(120)
            connection.exec_driver_sql(f"UPDATE tasks SET version = version + 1 WHERE id = {first:d}")

    thread = in_thread(other)
    assert locked.wait(120)

    def release() -> None:
        with ledger.database.write() as connection:
            row = task_rows.lock(connection, first)
            mine.set()
            wait_for_a_lock(world, "the other waits for this one")
            sessions.release(connection, ledger, row)

    with pytest.raises(TransactionConflict):
        release()
    thread.join(120)


def test_a_signal_is_obeyed_though_the_answer_to_the_beat_that_took_it_is_lost(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(world.app().ledger.database, identity="me")
    processes.register(ledger, processes.Host("h", ""), kind="worker", pid=1, lease_s=60)
    assert processes.signal(ledger, "me", "TERM")
    commit, lost = Database._commit, [1]

    def loses_its_answer(self: Database, connection: Any, mark: Any, marked: bool) -> None:
        taken = connection.exec_driver_sql("SELECT COUNT(*) FROM processes AS p WHERE p.signal IS NULL").scalar()
        if taken and lost:
            lost.clear()
            connection.exec_driver_sql("COMMIT")
            connection.connection.driver_connection.close()
        commit(self, connection, mark, marked)

    monkeypatch.setattr(Database, "_commit", loses_its_answer)
    assert processes.beat(ledger, lease_s=60) == "TERM"
    assert not lost


@pytest.mark.databases("postgresql", reason="MariaDB is told its isolation for all statements")
def test_claims_do_not_fail_where_the_server_would_have_everything_serializable(world: World) -> None:
    (name,) = world.sql("SELECT current_database()")[0]
    world.sql(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    database = Database(world.store.url)
    try:
        with database.read() as connection:
            assert connection.exec_driver_sql("SHOW transaction_isolation").scalar() == "read committed"
    finally:
        database.close()


@pytest.mark.parametrize("whole", [False, True], ids=["split", "whole"])
def test_tasks_with_keys_are_committed_in_the_order_of_their_ids(
    world: World, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """One with a smaller id would come before what another has dispatched. Taken out: the lock, of either way to make
    Tasks."""
    app, other = world.app(), world.app()
    item, made, second, log = {"serial": "a"}, list[int](), list[threading.Thread](), task_rows._log_rows

    def make() -> None:
        if whole:
            made.append(other.submit("note", [item], key="serial").id)
        else:
            new = NewTask("note", "default", 1, throttle=Throttle(key_field="serial"))
            made.append(task_rows.create(other.ledger, [task_rows.First(new)], lease_s=60)[0].task_id)

    def while_another_is_made(*args: Any) -> Any:
        if not second:
            second.append(in_thread(make))
            wait_for_a_lock(world, "the second waits until the first is committed")
            assert not made
        return log(*args)

    app.submit("note", [item], key="serial")
    monkeypatch.setattr(task_rows, "_log_rows", while_another_is_made)
    first = app.submit("note", [item], key="serial")
    second[0].join(60)
    assert made == [first.id + 1]
