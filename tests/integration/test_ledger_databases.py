"""What the ledger owes to the ways of each database: locks, conflicts, look-ups, batches."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import sqlalchemy as sa
from support.borrowing import borrow, hand_over
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.database import batches
from asynctask.database.engine import Database, _Mark
from asynctask.database.retrying import OutcomeUnknown, TransactionConflict, repeatable
from asynctask.database.tables import events, task_samples, task_tallies, tasks, write_marks
from asynctask.errors import LedgerUnavailable
from asynctask.integrations.remote import JobRecord, Reporter
from asynctask.ledger import lending, sessions
from asynctask.ledger.events import COUNTS, Failure, lock_events, total_counts
from asynctask.ledger.progress import progress
from asynctask.ledger.recorder import Kind, Outcome, Recorder
from asynctask.ledger.standalone import Arrival, enqueue, record
from asynctask.testing import wait_for

SERVERS = pytest.mark.databases("postgresql", "mariadb", reason="SQLite has one writer and no connection to lose")


def test_rows_of_every_kind_of_text_come_back_as_they_were_written(world: World) -> None:
    app = world.app()
    texts = [
        "plain",
        "tab\tnew\nline\rreturn",
        'quote " and \\ backslash',
        "\\N",
        "名前 😀",
        "",
        " ends with blanks  ",
        "\u2028",
        "a" * 60_000,
    ]
    rows = [(f"{i:024x}", 1, i, "enqueue", text, i, i, 7) for i, text in enumerate(texts)]
    columns = ("job_id", "task_id", "seq", "status", "params", "first_row", "last_row", "created_at")
    with app.ledger.database.write() as connection:
        batches.insert(connection, events, columns, rows)
    with app.ledger.database.write() as connection:
        changed = [
            {"b_id": i, "b_attempt": 1, "v_added_messages": text, "v_result": None, "v_due_at": None}
            for i, text in connection.execute(sa.select(events.c.id, events.c.params))
        ]
        written = ("added_messages", "result", "due_at")
        assert batches.update(connection, events, ("id", "attempt"), written, changed) == len(texts)
        assert batches.update(connection, events, ("id", "attempt"), written, [{**changed[0], "b_attempt": 2}]) == 0
        assert batches.update(connection, events, ("id", "attempt"), written, []) == 0
        found = connection.execute(sa.select(events.c.params, events.c.added_messages).order_by(events.c.seq)).all()
    assert [tuple(row) for row in found] == [(text, text) for text in texts]


def test_a_batch_larger_than_a_packet_goes_in_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_BYTES", 1_000)
    app = world.app()
    rows = [(f"{i:024x}", 1, i, "enqueue", "x" * 400, i, i, 7) for i in range(10)]
    columns = ("job_id", "task_id", "seq", "status", "params", "first_row", "last_row", "created_at")
    with app.ledger.database.write() as connection:
        batches.insert(connection, events, columns, rows)
        ids = connection.execute(sa.select(events.c.id)).scalars().all()
        assert batches.update(connection, events, ("id",), ("params",), [{"b_id": i, "v_params": "y"} for i in ids]) == 10


@SERVERS
def test_a_loan_that_is_made_while_its_task_is_waited_for_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`app.record` looks whether somebody holds a row only once it has the lock of its Task.

    Taken out: that lock. A row that it made due was in a loan that was borrowed meanwhile, too.
    """
    app, other = world.app(), world.app()
    task = app.submit("note", numbers(10))
    (job_id,) = (row["job_id"] for row in task.events(limit=1))
    lending_, recorded = threading.Event(), threading.Event()
    original = lending._Borrow._insert_loan

    def slow(*args: Any) -> Any:
        found = original(*args)  # nobody else sees the loan yet
        lending_.set()
        wait_for(lambda: waits_for_lock(world), "the other one waits for the row")
        return found

    def recording() -> None:
        lending_.wait(120)
        record(other.ledger, job_id, "working", "")
        record(other.ledger, job_id, "enqueue", "")
        recorded.set()

    monkeypatch.setattr(lending._Borrow, "_insert_loan", slow)
    thread = threading.Thread(target=recording)
    thread.start()
    assert len(borrow(app.ledger, task.id)) == 10
    thread.join(120)
    assert recorded.is_set()
    assert world.one("SELECT due_at FROM events WHERE job_id = ?", job_id) is None, "its holder performs it"
    assert {finding.code for finding in app.doctor()} == {"holders"}, "this process is registered nowhere"


def waits_for_lock(world: World) -> bool:
    if world.store.kind == "postgresql":
        return bool(
            world.one(
                "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
        )
    return bool(world.one("SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"))


@SERVERS
def test_a_deadlock_is_tried_again_and_counts_once(world: World) -> None:
    app = world.app()
    first, second = (app.submit("note", numbers(1)).id for _ in range(2))
    met, tries = threading.Barrier(2), []

    @repeatable
    def crossed(one: int, two: int) -> None:
        tries.append(one)
        with app.ledger.database.write() as connection:
            for place, task_id in enumerate((one, two)):
                raised = tasks.update().where(tasks.c.id == task_id).values(split_tries=tasks.c.split_tries + 1)
                connection.execute(raised)
                if place == 0 and len(tries) <= 2:
                    met.wait(120)

    threads = [threading.Thread(target=crossed, args=pair) for pair in ((first, second), (second, first))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(tries) > 2
    assert world.sql("SELECT split_tries FROM tasks ORDER BY id") == [(2,), (2,)]


@SERVERS
@pytest.mark.parametrize("sent", [True, False])
def test_a_commit_whose_answer_is_lost_is_looked_up(world: World, sent: bool) -> None:
    """Taken out: `_is_committed` (it guessed either way): one of the two cases came out wrong."""
    app = world.app()
    database = app.ledger.database
    with database.engine.connect() as connection:
        connection.execute(sa.select(1))
    lost: list[str] = []

    def lose(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement == "COMMIT" and not lost:
            lost.append(statement)
            driver = cursor.connection
            if sent:
                cursor.execute("COMMIT")
            hang_up(driver)

    sa.event.listen(database.engine, "before_cursor_execute", lose)
    try:
        if sent:
            with database.write() as connection:
                connection.execute(write_marks.insert().values(owner="me", number=1, at=1))
        else:
            with pytest.raises(TransactionConflict), database.write() as connection:
                connection.execute(write_marks.insert().values(owner="me", number=1, at=1))
    finally:
        sa.event.remove(database.engine, "before_cursor_execute", lose)
    assert lost
    assert world.one("SELECT COUNT(*) FROM write_marks WHERE owner = ?", "me") == int(sent)


@SERVERS
def test_a_lock_that_is_not_had_in_time_is_a_conflict(world: World) -> None:
    """Taken out: the codes of MariaDB by number (its driver also has an SQL state, which says nothing here)."""
    app = world.app()
    task_id = app.submit("note", numbers(1)).id
    raised = tasks.update().where(tasks.c.id == task_id).values(split_tries=1)
    short = {"postgresql": "SET LOCAL lock_timeout = '50ms'", "mariadb": "SET innodb_lock_wait_timeout = 1"}

    def wait_briefly() -> None:
        with app.ledger.database.write() as connection:
            connection.exec_driver_sql(short[world.store.kind])
            connection.execute(raised)

    with app.ledger.database.write() as holder:
        holder.execute(raised)
        with pytest.raises(TransactionConflict):
            wait_briefly()


@pytest.mark.databases("mariadb", reason="only there a row is what tells")
def test_a_transaction_that_still_runs_behind_a_lost_connection_is_ended_before_it_is_judged(world: World) -> None:
    """Taken out: the KILL. The server kept the transaction, and with it the locks, until it noticed by itself."""
    database = world.app().ledger.database
    with database.read() as holder:
        holder.exec_driver_sql("START TRANSACTION")
        holder.exec_driver_sql("INSERT INTO write_marks (owner, number, at) VALUES ('it', 5, 1)")
        driver: Any = holder.connection.driver_connection
        mark = _Mark(5, driver.thread_id(), "it")
        assert database._is_committed(mark) is False
        holder.invalidate()
    assert world.one("SELECT COUNT(*) FROM write_marks WHERE owner = ?", "it") == 0


@SERVERS
def test_a_connection_that_breaks_while_it_is_used_leaves_no_traceback_in_the_log(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    database = world.app().ledger.database
    for way in (database.read, database.snapshot, lambda: database.write(marked=False)):
        with suppress(LedgerUnavailable), way() as connection:
            driver: Any = connection.connection.driver_connection
            if world.store.kind == "postgresql":
                world.sql(f"SELECT pg_terminate_backend({driver.info.backend_pid:d})")
            else:
                world.sql(f"KILL {driver.thread_id():d}")
            connection.exec_driver_sql("SELECT 1")
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


def hang_up(driver: Any) -> None:
    """The network goes away under a connection: this end notices, the server does not yet."""
    descriptor = driver.pgconn.socket if hasattr(driver, "pgconn") else driver._sock.fileno()
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        copy.shutdown(socket.SHUT_RDWR)


def test_counts_are_moved_by_many_processes_at_once_and_none_is_lost(world: World) -> None:
    apps = [world.app() for _ in range(3)]
    task = apps[0].submit("note", numbers(60))
    ids = [row["job_id"] for row in task.events(limit=100)]

    def record_some(app: AsyncTask, mine: list[str]) -> None:
        for job_id in mine:
            record(app.ledger, job_id, "finish", "")

    threads = [threading.Thread(target=record_some, args=(app, ids[i::3])) for i, app in enumerate(apps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    with apps[0].ledger.database.read() as connection:
        assert total_counts(connection, task.id).finish == 60
    assert apps[0].doctor() == []


def test_the_same_job_announced_by_two_processes_at_once_is_one_event(world: World) -> None:
    apps = [world.app() for _ in range(4)]
    start = threading.Barrier(4)

    def announce(app: AsyncTask) -> None:
        start.wait(120)
        enqueue(app.ledger, [Arrival(f"job-{i}", 1, "note", "default", [{"n": i}]) for i in range(50)])

    threads = [threading.Thread(target=announce, args=(app,)) for app in apps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert world.one("SELECT COUNT(*) FROM events") == 50


def test_the_rate_of_a_task_is_measured_from_its_own_samples(world: World) -> None:
    """Taken out: the link of the inner look to its Task. The oldest sample of any Task was taken for each, and a Task that
    had none at that moment had no rate of its own."""
    app = world.app()
    now = app.ledger.now()
    rates = {}
    for seconds, sampled in ((20, 0), (10, 3)):
        task = app.submit("note", numbers(10))
        borrow(app.ledger, task.id)
        for row in task.events(limit=8):
            record(app.ledger, row["job_id"], "finish", "")
        with app.ledger.database.write() as connection:
            connection.execute(
                task_samples.insert().values(task_id=task.id, at=now - seconds * 1_000_000, done=sampled, problems=0)
            )
        rates[task.id] = round((8 - sampled) / seconds, 1)
    with app.ledger.database.read() as connection:
        found = progress(connection, list(rates), now)
    assert {each["task_id"]: each["progress"]["rate_per_s"] for each in found} == rates
    assert [each["task_id"] for each in found] == sorted(rates, reverse=True)


def test_a_paused_task_has_no_remaining_time(world: World) -> None:
    """It grew with the pause: the rows that had ended were divided by all the time since the start."""
    app = world.app()
    task = app.submit("note", numbers(4))
    (job,) = borrow(app.ledger, task.id, 1)
    record(app.ledger, job.job_id, "finish", "")
    assert task.progress()["progress"]["eta_s"] is not None
    task.pause()
    assert task.progress()["progress"]["eta_s"] is None
    task.resume()


def test_the_most_frequent_failures_come_first_with_their_texts(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(30))
    borrow(app.ledger, task.id)
    refused = [
        Outcome(row["id"], 1, Kind.FAILED, failure=Failure("failed", f"reason {'abcdefg'[min(i % 8, 6)]}"))
        for i, row in enumerate(task.events(limit=30))
    ]
    Recorder(app.ledger).flush(refused)
    with app.ledger.database.read() as connection:
        (found,) = progress(connection, [task.id], app.ledger.now())
    groups = [(each["message"], each["count"]) for each in found["top_errors"]]
    assert len(groups) == 5
    assert groups[0] == ("reason g", 6)
    assert [count for _, count in groups] == sorted((count for _, count in groups), reverse=True)


@SERVERS
def test_events_that_are_read_for_a_change_are_locked(world: World) -> None:
    """Taken out: the limit that keeps the locking SELECT a statement of its own on MariaDB, or FOR UPDATE anywhere."""
    app = world.app()
    app.submit("note", numbers(3))
    ids = [int(row[0]) for row in world.sql("SELECT id FROM events ORDER BY id")]
    with app.ledger.database.write() as connection:
        assert list(lock_events(connection, events.c.id.in_(ids[:2]))) == ids[:2]
        with app.ledger.database.read() as other:
            free = other.execute(sa.select(events.c.id).order_by(events.c.id).with_for_update(skip_locked=True)).scalars()
            assert free.all() == ids[2:]


@SERVERS
def test_events_with_a_key_are_locked_while_they_are_read(world: World) -> None:
    """Taken out: FOR UPDATE, of the statement that gives MariaDB's rows as one text or of the other."""
    app = world.app()
    task = app.submit("note", numbers(9))
    with app.ledger.database.write() as connection:
        found, _ = sessions.read_turns(connection, task.id, 2, 6, lock=True)
        ids = {event_id for _, event_id in found}
        assert len(ids) == 4
        with app.ledger.database.read() as other:
            free = other.execute(sa.select(events.c.id).with_for_update(skip_locked=True)).scalars().all()
            assert ids.isdisjoint(free)
            assert free


def test_one_of_many_values_is_looked_up_by_the_index_whatever_they_hold(world: World) -> None:
    app = world.app()
    app.submit("note", numbers(3))
    jids = [str(row[0]) for row in world.sql("SELECT job_id FROM events ORDER BY id")]
    odd = ["'", '"', "\\", "%s", "x') OR ('1'='1", "日本", ""]
    with app.ledger.database.read() as connection:
        asked = batches.among(connection, events.c.job_id, [*jids[:2], *odd])
        found = sa.select(events.c.job_id).where(asked)
        assert sorted(row[0] for row in batches.fetch(connection, found)) == sorted(jids[:2])
        none = batches.among(connection, events.c.id, [])
        assert list(batches.fetch(connection, sa.select(events.c.id).where(none))) == []


@pytest.mark.databases("postgresql", reason="only its planner looks into an array")
def test_the_planner_knows_which_values_are_asked_for(world: World) -> None:
    """Before, they came as a text of a type of its own, which was read as the statement ran. Where a table is gone
    through, as one of 10,000 rows is, each row was compared with one value after the other."""
    app = world.app()
    app.submit("note", numbers(3))
    for column, values, kind in ((events.c.id, range(1, 200), "bigint"), (events.c.job_id, map(str, range(200)), "text")):
        with app.ledger.database.snapshot() as connection:
            asked = sa.select(events.c.seq).where(batches.among(connection, column, list(values)))
            made = asked.compile(connection)
            connection.exec_driver_sql("SET LOCAL enable_indexscan = off")
            connection.exec_driver_sql("SET LOCAL enable_bitmapscan = off")
            plan = connection.exec_driver_sql(f"EXPLAIN {made}", made.params).scalars().all()
            assert re.search(rf"Filter: .* = ANY \('{{.*}}'::{kind}\[\]\)", "\n".join(plan)), plan


def in_order(rows: Any) -> list[Any]:
    return sorted(rows)


@pytest.mark.databases("mariadb", reason="the others give the rows themselves")
def test_rows_that_are_too_long_for_one_text_come_one_by_one(world: World) -> None:
    """Taken out: the second look, or the count. Half a text is no JSON, or one with rows missing."""
    app = world.app()
    app.submit("note", numbers(20))
    statement = sa.select(events.c.id, events.c.job_id).where(events.c.seq < sa.bindparam("below"))
    with app.ledger.database.read() as connection:
        whole = batches.fetch_small(connection, statement, {"below": 20})
        assert len(whole) == 20
        assert batches.fetch_small(connection, statement, {"below": 0}) == []
        before = connection.exec_driver_sql("SELECT @@group_concat_max_len").scalar()
        try:
            # Wherever it is cut off: the server closes the list, so that between two rows nothing looks wrong.
            for length in range(100, 300):
                connection.exec_driver_sql(f"SET SESSION group_concat_max_len = {length}")
                assert in_order(batches.fetch_small(connection, statement, {"below": 20})) == in_order(whole)
            assert in_order(batches.fetch_small(connection, statement, {"below": 20}, lock=True)) == in_order(whole)
        finally:
            connection.exec_driver_sql(f"SET SESSION group_concat_max_len = {int(before or 0)}")


@contextmanager
def row_by_row(app: AsyncTask) -> Iterator[list[str]]:
    """The statements that an application has its driver repeat for each row, by their first two words; not those of the
    history, which are of a heartbeat and not of a batch of jobs: a row for each worker and minute."""
    seen: list[str] = []

    def executed(_connection: Any, _cursor: Any, statement: str, _given: Any, _context: Any, executemany: bool) -> None:
        if executemany and not statement.startswith("INSERT INTO history "):
            seen.append(" ".join(statement.split()[:2]))

    sa.event.listen(app.ledger.database.engine, "before_cursor_execute", executed)
    try:
        yield seen
    finally:
        sa.event.remove(app.ledger.database.engine, "before_cursor_execute", executed)


@pytest.mark.databases("sqlite", reason="its driver alone lets go of the interpreter at each row")
def test_no_batch_is_written_row_by_row(world: World) -> None:
    """Among other threads that costs more than the row: a worker process that did nothing else was a fifth slower."""
    app = world.app()
    with row_by_row(app) as seen, world.working(app):
        task = app.submit("note", numbers(300))
        assert task.wait(120)["done"]
    assert task.progress()["counts"]["finish"] == 300
    assert seen == []


@pytest.mark.databases("sqlite", reason="the others count again by themselves")
def test_where_somebody_had_the_tables_counted_rows_are_changed_by_their_key(world: World) -> None:
    """Of a table that was short then SQLite thinks for ever that it may be gone through with each batch."""
    app = world.app()
    first = app.submit("note", numbers(3))
    world.sql("ANALYZE")
    with row_by_row(app) as seen, world.working(app):
        task = app.submit("note", numbers(300))
        assert task.wait(120)["done"]
        assert first.wait(120)["done"]
    assert task.progress()["counts"]["finish"] == 300
    assert "UPDATE events" in seen


@pytest.mark.databases("sqlite", reason="elsewhere the server cuts it off")
def test_rows_that_are_too_long_for_one_text_come_row_by_row(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what may be written is as long as before."""
    app = world.app()
    app.submit("note", [{"n": n, "text": "x" * 1_000} for n in range(20)])
    statement = sa.select(events.c.id, events.c.params).where(events.c.seq < sa.bindparam("below"))
    with app.ledger.database.read() as connection:
        whole = batches.fetch_small(connection, statement, {"below": 20})
        monkeypatch.setattr(batches, "LONGEST_TEXT", 5_000)
        found = batches.fetch_small(connection, statement, {"below": 20})
        assert sorted(map(tuple, found)) == sorted(map(tuple, whole))
        assert len(found) == 20
        assert connection.exec_driver_sql("SELECT length(printf('%.*c', 1000000, 'x'))").scalar() == 1_000_000
    with pytest.raises(LedgerUnavailable, match="no such column"), app.ledger.database.read() as connection:
        batches.fetch_small(connection, sa.select(sa.column("absent")).select_from(events), {})


@SERVERS
def test_a_wrong_password_and_a_missing_server_are_told_without_the_password(world: World) -> None:
    url = world.store.url.replace("@", ":geheim@") if ":geheim@" not in world.store.url else world.store.url
    database = Database(url.replace("127.0.0.1:", "127.0.0.1:1"))
    with pytest.raises(LedgerUnavailable) as caught, database.read() as connection:
        connection.execute(sa.select(1))
    assert "geheim" not in str(caught.value)
    assert not isinstance(caught.value, OutcomeUnknown | TransactionConflict)
    database.close()


def test_tallies_name_every_column_that_they_move() -> None:
    assert set(COUNTS) <= set(task_tallies.c.keys())


def test_records_of_another_language_count_once_though_they_come_several_times_at_once(world: World) -> None:
    """Taken out: `doubtful` of their outcomes: each of several at once raised the attempt of a lone job."""
    app = world.app()
    reporter = Reporter("sidekiq", "host:7:abc", concurrency=100, queues=["default"])
    app.record_all([], reporter)
    task = app.submit("note", numbers(40))
    assert len(hand_over(app.ledger, task.id)) == 40
    jobs = [event["job_id"] for event in task.events()]
    lone = [f"lone-{n}" for n in range(10)]
    ends: list[dict[str, Any]] = [
        {"status": "finish"}, {"status": "failed"}, {"status": "error"}, {"status": "interrupted"},
        {"status": "error", "will_retry": True, "retry_at": 2**52},
    ]  # fmt: skip
    began: list[JobRecord] = [JobRecord(job, "working", attempt=1) for job in jobs]
    began += [JobRecord(job, "working", worker="note", started_at=7) for job in lone]
    over = [JobRecord(job, attempt=1, message="m", **ends[n % 5]) for n, job in enumerate(jobs)]
    over += [JobRecord(job, message="m", worker="note", started_at=7, **ends[n % 5]) for n, job in enumerate(lone)]
    for records in (began, over):
        met = threading.Barrier(4)

        def send(batch: list[JobRecord] = records, met: threading.Barrier = met) -> None:
            met.wait(120)
            app.record_all(batch, reporter)

        threads = [threading.Thread(target=send) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    counts = task.progress()["counts"]
    assert [counts[name] for name in ("finish", "failed", "error", "enqueue", "working")] == [8, 8, 8, 16, 0]
    found = [app.event(job) for job in (*jobs, *lone)]
    assert [event["attempt"] for event in found] == [1, 1, 1, 2, 2] * 10
    assert [len(event["messages"]) for event in found] == [3, 2, 2, 4, 3] * 10
    assert app.doctor() == []
