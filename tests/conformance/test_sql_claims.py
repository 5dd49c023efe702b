"""Claims of many processes from the table of the SQL broker: nothing twice, nothing lost, nothing that grows with it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.broker_suite import a_copy
from support.clocks import SettableClock
from support.databases import Databases, Store
from support.forked import Program
from support.servers import unmet

from asynctask.brokers.base import Copy
from asynctask.brokers.sql import dialects
from asynctask.brokers.sql.broker import SqlBroker
from asynctask.brokers.sql.copies import FIRST, LAST, Heads, Range, ordinary
from asynctask.brokers.sql.dialects import look_statement
from asynctask.database import schema
from asynctask.database.engine import Database
from asynctask.database.tables import jobs
from asynctask.errors import BrokerUnavailable
from asynctask.testing import wait_for
from asynctask.testing.servers import MissingServer
from benchmarks.servers import MariaServer, PgBouncer, PostgresServer

CLAIMER = Path(__file__).resolve().parents[1] / "support" / "claimer.py"


@pytest.fixture
def database(store: Store) -> Iterator[Database]:
    made = Database(store.url)
    if made.is_sqlite:
        schema.ensure(made)
    yield made
    made.close()


@pytest.fixture
def broker(database: Database) -> Iterator[SqlBroker]:
    made = SqlBroker(database)
    yield made
    made.close()


def claimers(url: str, count: int, batch: int) -> Counter[str]:
    """How often each job was claimed by so many processes at once."""
    found: Counter[str] = Counter()
    with ExitStack() as files:
        said = [files.enter_context(tempfile.TemporaryFile()) for _ in range(count)]
        started = [
            Program([str(CLAIMER), url, f"p{n}", str(batch)], cwd=CLAIMER.parent, env=os.environ, output=output)
            for n, output in enumerate(said)
        ]
        for process, output in zip(started, said, strict=True):
            assert process.wait(120) == 0
            output.seek(0)
            for line in output.read().decode().splitlines():
                if line.startswith("took"):  # others are of the log
                    found.update(line.split()[1:])
    return found


# -- processes


def test_processes_that_claim_at_once_get_every_copy_exactly_once(store: Store, broker: SqlBroker) -> None:
    broker.push([a_copy(n, task_id=n % 7) for n in range(1_500)])
    found = claimers(store.url, 6, 7)
    assert found == Counter({a_copy(n).jid: 1 for n in range(1_500)})
    assert broker.holders() == set()
    assert broker.queues() == {}


def test_a_claim_whose_process_is_killed_before_the_commit_takes_nothing(store: Store, broker: SqlBroker) -> None:
    broker.push([a_copy(n) for n in range(30)])
    with subprocess.Popen(
        [sys.executable, str(CLAIMER), store.url, "dead", "1", "hold"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert "holds\n" in iter(process.stdout.readline, "")
            if store.kind != "sqlite":  # elsewhere it stands in nobody's way
                taken = [int(copy.jid, 16) for copy in broker.exchange("p", [], ["default"], 5)]
                assert taken, "what others have in their hands is passed over"
                assert min(taken) >= 10
        finally:
            process.kill()
    wait_for(lambda: (broker.exchange("p", [], ["default"], 30), len(broker.held_by("p")) == 30)[1], "all are back")
    assert broker.holders() == {"p"}


def test_a_process_that_was_killed_after_its_claim_keeps_its_list_for_recovery(store: Store, broker: SqlBroker) -> None:
    broker.push([a_copy(n) for n in range(3)])
    taken = broker.exchange("dead", [], ["default"], 2)
    broker.put_back("dead", [copy for copy in broker.held_by("dead") if copy.jid == taken[1].jid])
    assert [copy.jid for copy in broker.exchange("p", [], ["default"], 5)] == [a_copy(1).jid, a_copy(2).jid]
    assert broker.holders() == {"dead", "p"}


@pytest.mark.databases("postgresql")
def test_many_processes_share_a_few_connections_of_a_pooler(store: Store, broker: SqlBroker, databases: Databases) -> None:
    broker.push([a_copy(n) for n in range(800)])
    server: Any = databases.templates("postgresql").server
    try:
        with PgBouncer(server, pool_size=3) as pooler:
            found = claimers(pooler.url(store.url.rpartition("/")[2]), 8, 5)
    except MissingServer as error:
        unmet(str(error))
    assert found == Counter({a_copy(n).jid: 1 for n in range(800)})


def enter_all(url: str, crowd: ExitStack, count: int) -> None:
    """So many processes' worth of pools, each with one connection that it keeps."""
    for _ in range(count):
        database = Database(url, pool_size=1)
        crowd.callback(database.close)
        SqlBroker(database).queues()


@pytest.mark.databases("postgresql", "mariadb")
def test_a_server_without_a_connection_left_is_said_to_be_away_and_nothing_is_lost(
    databases: Databases, store: Store
) -> None:
    kind = {"postgresql": PostgresServer, "mariadb": MariaServer}[store.kind]
    name = "max_connections" if store.kind == "postgresql" else "max-connections"
    with kind(settings={name: "12"}) as server:
        url = server.create("crowded")
        with closing(Database(url)) as database, closing(SqlBroker(database)) as broker:
            schema.upgrade(database)
            broker.push([a_copy(0)])
            with ExitStack() as crowd, pytest.raises(BrokerUnavailable):
                enter_all(url, crowd, 14)
            assert [copy.key for copy in broker.exchange("p", [], ["default"], 1)] == [a_copy(0).key]


def test_one_call_uses_one_connection_and_gives_it_back(database: Database, broker: SqlBroker) -> None:
    most: list[int] = []
    pool: Any = database.engine.pool
    sa.event.listen(database.engine, "checkout", lambda *_: most.append(pool.checkedout()))
    broker.push([a_copy(n) for n in range(50)])
    done: Sequence[Copy] = []
    for _ in range(5):
        done = broker.exchange("p", done, ["default", "other"], 7)
    assert max(most) == 1
    assert pool.checkedout() == 0


# -- statements and plans


def count_statements(database: Database) -> list[str]:
    seen: list[str] = []
    sa.event.listen(database.engine, "before_cursor_execute", lambda *a: seen.append(" ".join(a[2].split())))
    return seen


def test_the_number_of_statements_does_not_grow_with_the_number_of_copies(database: Database, broker: SqlBroker) -> None:
    broker.push([a_copy(10_000)])  # what a connection asks once, it has asked
    broker.drop("p", broker.exchange("p", [], ["default"], 1))
    seen = count_statements(database)
    counts = []
    for size in (10, 900):
        broker.push([a_copy(n, task_id=5) for n in range(size)])
        done = broker.exchange("p", [], ["default"], size // 2)
        broker.exchange("p", done, ["default"], 1)
        broker.put_back("p", broker.held_by("p"))
        broker.drop("p", broker.exchange("p", [], ["default"], 1_000))
        counts.append(len(seen))
        seen.clear()
    assert counts[0] == counts[1]


@pytest.mark.databases("postgresql")
def test_an_exchange_on_postgresql_is_one_statement(database: Database, broker: SqlBroker) -> None:
    broker.push([a_copy(n) for n in range(10)])
    seen = count_statements(database)
    done = broker.exchange("p", [], ["other", "default"], 4)
    assert len(broker.exchange("p", done, ["other", "default"], 4)) == 4
    assert len(seen) == 2


def fill(database: Database, count: int) -> None:
    """So many waiting copies of 100 Tasks, from the database's own numbers."""
    waits = ordinary(240)
    columns = "INSERT INTO jobs (jid, attempt, queue, priority, task_id, deaths, payload, waits)"
    numbers = {
        "sqlite": f"WITH RECURSIVE s (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM s WHERE i < {count})"
        f" SELECT 'j' || i, 1, 'default', 240, i % 100, 0, '{{}}', {waits} FROM s",
        "postgresql": f"SELECT 'j' || i, 1, 'default', 240, i %% 100, 0, '{{}}', {waits}"
        f" FROM generate_series(1, {count}) AS s (i)",
        "mariadb": f"SELECT CONCAT('j', seq), 1, 'default', 240, seq %% 100, 0, '{{}}', {waits} FROM seq_1_to_{count}",
    }[database.dialect]
    with database.write() as connection:
        connection.exec_driver_sql(f"{columns} {numbers}")


def analyze(database: Database) -> None:
    with database.write(marked=False) if database.is_sqlite else database.read() as connection:
        connection.exec_driver_sql("ANALYZE TABLE jobs" if database.dialect == "mariadb" else "ANALYZE")


@pytest.mark.databases("postgresql")
@pytest.mark.parametrize("statistics", ["none", "of an empty table", "good"])
def test_a_claim_on_postgresql_reads_what_it_takes_and_no_more(
    database: Database, broker: SqlBroker, statistics: str
) -> None:
    for _ in range(10):  # so that a plan is kept from the time when it was empty
        broker.exchange("p", [], ["default"], 5)
    if statistics == "of an empty table":
        with database.read() as connection:
            connection.exec_driver_sql("VACUUM ANALYZE jobs")
        for _ in range(10):
            broker.exchange("p", [], ["default"], 5)
    fill(database, 30_000)
    if statistics == "good":
        analyze(database)
    with database.read() as connection:
        connection.exec_driver_sql("SET track_functions = 'all'")
    done = broker.exchange("p", [], ["default"], 5)
    before = scans(database)
    for _ in range(20):
        done = broker.exchange("p", done, ["default"], 5)
        assert len(done) == 5
    wait_for(lambda: scans(database)["idx_scan"] > before["idx_scan"], "the server tells what it counted")
    after = scans(database)
    assert after["seq_scan"] == before["seq_scan"], "no claim reads the table"
    read = after["idx_tup_fetch"] - before["idx_tup_fetch"]
    assert read <= 20 * 5 * 12, f"{read} rows were fetched for 100 copies"


def scans(database: Database) -> dict[str, int]:
    with database.read() as connection:
        connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
        row = connection.exec_driver_sql("SELECT * FROM pg_stat_user_tables WHERE relname = 'jobs'").mappings().one()
        return {name: int(row[name]) for name in ("seq_scan", "idx_scan", "idx_tup_fetch")}


@pytest.mark.databases("mariadb")
@pytest.mark.parametrize("statistics", ["of an empty table", "good"])
def test_a_claim_on_mariadb_reads_what_it_takes_and_no_more(database: Database, broker: SqlBroker, statistics: str) -> None:
    analyze(database)
    fill(database, 30_000)
    if statistics == "good":
        analyze(database)
    for ranges in (
        [Range("default", FIRST, 0, LAST)],
        [Range("default", FIRST, 0, 481), Range("default", 481, 5_000, LAST)],
    ):
        statement, values = look_statement(ranges)
        with database.read() as connection:
            plan = connection.exec_driver_sql(f"EXPLAIN {statement}", tuple(values)).mappings().one()
            assert (plan["type"], plan["key"]) == ("range", "ix_jobs_waiting")
            assert "filesort" not in plan["Extra"]
    taken: list[Copy] = []
    with database.read() as connection:  # the pool gives the same connection to the broker: the counters are the session's
        connection.exec_driver_sql("FLUSH STATUS")
    for _ in range(10):
        taken = broker.exchange("p", taken, ["default"], 5)
        assert len(taken) == 5
    with database.read() as connection:
        rows = connection.exec_driver_sql("SHOW SESSION STATUS").all()
        found = {str(name): int(value) for name, value in rows if str(name).startswith(("Handler_read", "Sort_rows"))}
    assert found["Handler_read_next"] + found["Handler_read_key"] < 10 * 5 * 20
    assert found["Handler_read_rnd_next"] < 1_000, "but for the list of counters"
    assert found["Sort_rows"] == 0


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("statistics", ["none", "of an empty table", "good"])
def test_a_claim_on_sqlite_goes_along_the_index(database: Database, statistics: str) -> None:
    if statistics != "none":
        analyze(database)
    fill(database, 5_000)
    if statistics == "good":
        analyze(database)
    waiting = sa.select(jobs.c.id).where(jobs.c.queue == "q", jobs.c.waits.is_not(None)).order_by(jobs.c.waits, jobs.c.id)
    with database.read() as connection:
        text = str(waiting.limit(5).compile(connection, compile_kwargs={"literal_binds": True}))
        plan = " ".join(str(row) for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}"))
    assert "ix_jobs_waiting (queue=?" in plan
    assert "B-TREE" not in plan, "it would sort"


@pytest.mark.databases("postgresql", "mariadb")
def test_what_was_consumed_under_an_old_snapshot_is_not_walked_over_again(database: Database) -> None:
    clock = SettableClock()
    with closing(SqlBroker(database, clock=clock)) as broker, database.snapshot() as old:
        old.exec_driver_sql("SELECT count(*) FROM jobs").all()
        fill(database, 3_000)
        done: Sequence[Copy] = []
        for _ in range(25):
            done = broker.exchange("p", done, ["default"], 100)
            clock.seconds += 0.3
        ranges, whole = broker._heads.ranges(["default"])
        behind = [each for each in ranges if each.waits == ordinary(240)]
        assert not whole or behind == []
        clock.seconds += 0.1
        last = max(copy.handle for copy in done)
        first = min(copy.handle for copy in done)
        places = [each.id for each in broker._heads.ranges(["default"])[0] if each.waits == ordinary(240)]
        assert places
        assert first - 400 <= places[0] <= last
        broker.put_back("p", done[:3])
        assert [copy.jid for copy in broker.exchange("p", [], ["default"], 3)] == [copy.jid for copy in done[:3]]


@pytest.mark.databases("mariadb", reason="elsewhere no ring is lost")
def test_who_looks_because_a_ring_may_have_been_lost_did_not_come_too_late(broker: SqlBroker) -> None:
    """Before, each of those looks that found nothing put off the answer to the next ring, by up to 150 ms."""

    def look() -> float:
        assert broker.exchange("p", [], ["default"], 1) == []
        wait_for(lambda: broker.wait(0.5), "it is time to look")
        return broker._quiet_until

    wait_for(lambda: look() > 0.0, "it has heard that it can hear now, and found nothing")
    after_a_ring = broker._quiet_until
    assert [look() for _ in range(3)] == [after_a_ring] * 3


@pytest.mark.databases("mariadb", reason="the others give the rows themselves")
def test_copies_that_are_large_come_one_by_one(broker: SqlBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    real = dialects._results

    def counted(*args: Any) -> list[list[Any]]:
        found = real(*args)
        rows.append(len(found[0]))
        return found

    monkeypatch.setattr(dialects, "_results", counted)
    broker.push([a_copy(n) for n in range(12)])
    taken = broker.exchange("p", [], ["default"], 6)
    monkeypatch.setattr(dialects, "_PACKED_BYTES", 10)
    taken += broker.exchange("p", [], ["default"], 6)
    assert [copy.key for copy in taken] == [a_copy(n).key for n in range(12)]
    assert rows == [1, 6]


# -- the heads


def heads() -> tuple[Heads, SettableClock]:
    clock = SettableClock()
    return Heads(clock.monotonic), clock


def test_the_first_look_is_at_the_whole_queue_and_so_is_one_every_few_seconds() -> None:
    found, clock = heads()
    assert found.ranges(["q"]) == ([Range("q", FIRST, 0, LAST)], frozenset({"q"}))
    found.record_claim(["q"], [("q", 481, 10)], dry=(), cost_s=0.001)
    assert found.ranges(["q"])[1] == set()
    clock.seconds += 6
    assert found.ranges(["q"]) == ([Range("q", FIRST, 0, LAST)], frozenset({"q"}))
    found.record_claim(["q"], [], dry=(), cost_s=1.0)
    clock.seconds += 60
    assert found.ranges(["q"])[1] == set(), "a dear look is a rare look"


def test_a_place_follows_what_was_claimed_half_a_second_ago() -> None:
    found, clock = heads()
    found.ranges(["q"])
    for claimed in (10, 20, 30):
        found.record_claim((), [("q", 481, claimed)], dry=(), cost_s=0)
        assert found.ranges(["q"])[0] == [Range("q", FIRST, 0, LAST)], "a push that is not committed yet may lie before it"
    clock.seconds += 0.6
    assert found.ranges(["q"])[0] == [Range("q", FIRST, 0, 481), Range("q", 481, 10, LAST)]
    found.record_claim((), [("q", 479, 50), ("q", 480, 51), ("q", 481, 60)], dry=(), cost_s=0)
    clock.seconds += 0.6
    assert found.ranges(["q"])[0] == [Range("q", FIRST, 0, 479), Range("q", 479, 50, 481), Range("q", 481, 60, LAST)]


def test_a_place_goes_back_to_what_was_left_behind_it() -> None:
    found, clock = heads()
    found.ranges(["q"])
    found.record_claim((), [("q", 481, 100)], dry=(), cost_s=0)
    clock.seconds += 0.6
    assert found.ranges(["q"])[0][-1] == Range("q", 481, 100, LAST)
    found.record_claim((), [("q", 481, 40)], dry=(), cost_s=0)
    assert found.ranges(["q"])[0][-1] == Range("q", 481, 40, LAST)


def test_a_dry_queue_is_soon_looked_at_as_a_whole() -> None:
    found, clock = heads()
    found.ranges(["q", "r"])
    found.record_claim((), [("q", 481, 100)], dry=["q", "r"], cost_s=0.0001)
    clock.seconds += 0.3
    assert found.ranges(["q", "r"])[1] == {"q", "r"}


def test_no_more_places_are_kept_than_there_are_priorities_in_use() -> None:
    found, clock = heads()
    found.ranges(["q"])
    found.record_claim((), [("q", 2 * n + 1, n + 1) for n in range(100)], dry=(), cost_s=0)
    clock.seconds += 0.6
    assert len(found.ranges(["q"])[0]) == 17


def test_claimers_that_met_nobody_begin_at_the_head_and_others_come_back_to_it() -> None:
    found, _ = heads()
    assert found.spread == 0
    found.record_spread(0, 10)
    assert found.spread == 0
    found.record_spread(40, 10)
    assert found.spread == 36
    while found.spread:
        found.record_spread(found.spread, 10)
