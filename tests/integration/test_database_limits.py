"""What a database refuses: it is said in words that help, nothing is lost by it, and all goes on by itself afterwards."""

from __future__ import annotations

import os
import resource
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url
from support.borrowing import borrow
from support.databases import MODES, UNUSUAL, Databases, Store, Templates, connect, defaults
from support.faults import patiently
from support.world import World, mixed, numbers

from asynctask import AsyncTask
from asynctask.core.states import Reason, Status
from asynctask.core.transitions import outcome
from asynctask.database import batches, schema
from asynctask.database.engine import Database
from asynctask.database.notify import MariadbChannel, PostgresqlChannel
from asynctask.database.retrying import repeatable
from asynctask.database.tables import events
from asynctask.errors import ConfigError, LedgerUnavailable, Unavailable
from asynctask.ledger import doctor, processes
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.events import Change, apply
from asynctask.lists import split
from asynctask.testing import wait_for
from asynctask.testing.servers import free_port
from benchmarks.servers import SERVERS, MariaServer, SqlServer

SERVERS_ONLY = pytest.mark.databases("postgresql", "mariadb", reason="a file refuses nothing of the kind")


def name_of(store: Store) -> str:
    return str(make_url(store.url).database)


def as_user(store: Store, user: str, password: str | None = None) -> str:
    """The URL of a database for another user."""
    return make_url(store.url).set(username=user, password=password).render_as_string(hide_password=False)


@pytest.fixture
def server(databases: Databases, store: Store) -> SqlServer:
    return databases.templates(store.kind).server


@pytest.fixture
def ordinary(server: SqlServer, store: Store) -> Iterator[str]:
    """A user without any power beyond the database of the test."""
    user, database = f"u_{name_of(store)}"[-32:], name_of(store)
    if store.kind == "postgresql":
        server.execute(f"CREATE ROLE {user} LOGIN")
        server.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {user}", database)
        server.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {user}", database)
    else:
        server.execute(f"CREATE USER {user}@localhost")
        server.execute(f"GRANT ALL ON {database}.* TO {user}@localhost")
    yield user
    if store.kind == "mariadb":
        server.execute(f"DROP USER {user}@localhost")


# -- transactions that lose against others


@contextmanager
def heavy(store: Store, server: SqlServer) -> Iterator[Any]:
    """A transaction that no database chooses as the victim of a deadlock."""
    with closing(connect(server, name_of(store))) as connection, closing(connection.cursor()) as cursor:
        if store.kind == "postgresql":
            cursor.execute("SET deadlock_timeout = '600s'")
        cursor.execute("BEGIN")
        for n in range(200):
            cursor.execute("INSERT INTO task_samples (task_id, at) VALUES (99, %s)", (n,))
        yield cursor
        cursor.execute("COMMIT")


def waits_for_a_lock(server: SqlServer) -> bool:
    if server.dialect == "postgresql":
        return bool(
            server.execute(
                "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND position('events' IN query) > 0"
            )
        )
    return bool(server.execute("SELECT 1 FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"))


@SERVERS_ONLY
def test_the_victim_of_a_deadlock_does_it_again_and_nothing_is_doubled(
    world: World, store: Store, server: SqlServer
) -> None:
    """Taken out: `repeatable`. The outcome was refused with a conflict."""
    app = world.app()
    task = app.submit("note", numbers(2))
    processes.register(app.ledger, app.host, kind="worker", pid=os.getpid(), lease_s=600)
    assert len(borrow(app.ledger, task.id)) == 2
    one, two = (int(event["id"]) for event in task.events())
    tries, done = [], []

    @repeatable
    def finish() -> None:
        tries.append(1)
        with app.ledger.database.write() as connection:
            apply(connection, app.ledger, [Change(one, lambda r: outcome(r.row, Status.FINISH, Reason.RETURNED))])
            apply(connection, app.ledger, [Change(two, lambda r: outcome(r.row, Status.FINISH, Reason.RETURNED))])
        done.append(1)

    writer = threading.Thread(target=finish)
    with heavy(store, server) as other:
        other.execute(f"SELECT id FROM events WHERE id = {two} FOR UPDATE")
        writer.start()
        wait_for(lambda: waits_for_a_lock(server), "it has the first and waits for the second")
        other.execute(f"SELECT id FROM events WHERE id = {one} FOR UPDATE")  # had only because the writer gave way
    writer.join(120)
    assert done == [1]
    assert len(tries) > 1
    assert task.progress()["counts"]["finish"] == 2
    assert world.one("SELECT COUNT(*) FROM seen_status") == 2
    assert app.doctor() == []


CHAOS = {
    "postgresql": (
        "CREATE SEQUENCE strikes",
        (
            "CREATE FUNCTION strike() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN IF nextval('strikes') % {every} = 0 THEN"
            " RAISE EXCEPTION 'could not serialize access' USING ERRCODE = '40001'; END IF; RETURN NULL; END$$"
        ),
        "CREATE TRIGGER strike_{table}_{verb} AFTER {verb} ON {table} FOR EACH STATEMENT EXECUTE FUNCTION strike()",
    ),
    "mariadb": (
        "CREATE SEQUENCE strikes ENGINE=InnoDB",
        (
            "CREATE PROCEDURE strike() BEGIN IF NEXTVAL(strikes) % {every} = 0 THEN"
            " SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'Deadlock found'; END IF; END"
        ),
        "CREATE TRIGGER strike_{table}_{verb} BEFORE {verb} ON {table} FOR EACH ROW CALL strike()",
    ),
}


@SERVERS_ONLY
def test_transactions_that_the_database_undoes_at_random_are_made_again_until_all_is_done(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in so many writes fails as those do that lost against another, wherever it is on the way of an item."""
    monkeypatch.setattr(split, "SLICE", 200)  # MariaDB strikes at rows: a larger slice would never come through
    app = world.app()
    make, routine, trigger = CHAOS[world.store.kind]
    world.sql(make)
    world.sql(routine.format(every=11 if world.store.kind == "postgresql" else 401))
    for table in ("tasks", "events", "task_tallies", "loans"):
        for verb in ("INSERT", "UPDATE"):
            world.sql(trigger.format(table=table, verb=verb))
    with world.working(app):
        taken = patiently(lambda: app.submit_items("note", mixed(600), idempotency_key="once"), "it is taken")
        task_id = int(taken.id)
        patiently(lambda: app.task(task_id).progress()["done"], "it is over")
    words = "SELECT nextval('strikes')" if world.store.kind == "postgresql" else "SELECT NEXTVAL(strikes)"
    assert world.one(words) > (33 if world.store.kind == "postgresql" else 802), "it struck several times"
    world.check_promises(app, [task_id], 600)


@pytest.mark.databases("mariadb")
def test_a_deadlock_over_the_counter_of_a_table_is_one_more_try(world: World) -> None:
    """Many that push insert many rows at once; MariaDB tells of it in words of its own."""
    app = world.app()
    loose = app.worker(name="loose", use_task_event=False)(lambda n: None)
    world.sql("CREATE SEQUENCE strikes ENGINE=InnoDB")
    world.sql(
        "CREATE TRIGGER strike BEFORE INSERT ON events FOR EACH ROW BEGIN IF NEXTVAL(strikes) = 1 THEN"
        " SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1467, MESSAGE_TEXT = 'Failed to read auto-increment value'; END IF; END"
    )
    assert loose.perform_async(1)
    assert world.one("SELECT NEXTVAL(strikes)") == 3, "it struck once, and was tried again"
    assert world.one("SELECT COUNT(*) FROM events") == 1


@SERVERS_ONLY
def test_what_the_server_takes_for_its_default_isolation_does_not_matter(
    world: World, server: SqlServer, store: Store
) -> None:
    if store.kind == "postgresql":
        server.execute(f"ALTER DATABASE {name_of(store)} SET default_transaction_isolation = 'serializable'")
    else:
        server.execute("SET GLOBAL tx_isolation = 'SERIALIZABLE'")
        server.execute("SET GLOBAL sql_mode = ''")
    try:
        app = world.app()
        with app.ledger.database.write() as connection:
            words = "SHOW transaction_isolation" if store.kind == "postgresql" else "SELECT @@tx_isolation"
            assert str(connection.exec_driver_sql(words).scalar()).lower().replace("-", " ") == "read committed"
            if store.kind == "mariadb":
                assert "STRICT_ALL_TABLES" in str(connection.exec_driver_sql("SELECT @@sql_mode").scalar())
        with world.working(app):
            task = app.submit("note", mixed(300))
            assert task.wait(120)["done"]
        world.check_promises(app, [task.id], 300)
    finally:
        if store.kind == "mariadb":
            server.execute("SET GLOBAL tx_isolation = 'REPEATABLE-READ'")
            server.execute("SET GLOBAL sql_mode = DEFAULT")


@pytest.mark.databases("mariadb", reason="the others have no such modes")
@pytest.mark.parametrize("mode", MODES)
def test_in_whatever_mode_the_server_is_all_is_done(world: World, server: SqlServer, store: Store, mode: str) -> None:
    """Taken out: the session is set up before SQLAlchemy asks for the mode. It quoted names by the server's."""
    store.sql("SELECT 1")  # the look from outside is connected
    with defaults(server, name_of(store), {"sql_mode": f"'{mode}'"}):
        app = world.app()
        with world.working(app):
            alone = str(app.workers["note"].perform_async(HOSTILE))
            task = app.submit("note", mixed(70))
            assert task.wait(120)["done"]
            wait_for(lambda: app.event(alone)["status"] == "finish", "the single job is done")
        assert app.event(alone)["params"] == [HOSTILE]
        world.check_promises(app, [task.id], 70)


HOSTILE = {"n": 1, "words": 'x\\y\'z "q" 😀 || -- %s', "n²": 1.0000000000000002}


@SERVERS_ONLY
def test_with_whatever_defaults_a_connection_begins_all_is_done(world: World, server: SqlServer, store: Store) -> None:
    """Taken out: the settings of a new connection. PostgreSQL refused the text, MariaDB cut lists of rows short, chained
    transactions or refused to update."""
    store.sql("SELECT 1")
    with defaults(server, name_of(store), UNUSUAL[store.kind]):
        app = world.app()
        with app.ledger.database.read() as connection:
            number = "0.1::float8 + 0.2::float8" if store.kind == "postgresql" else "0.1e0 + 0.2e0"
            assert connection.exec_driver_sql(f"SELECT {number}").scalar() == 0.1 + 0.2
        with world.working(app):
            alone = str(app.workers["note"].perform_async(HOSTILE))
            task = app.submit("note", mixed(300), title="😀 it's")
            assert task.wait(120)["done"]
            wait_for(lambda: app.event(alone)["status"] == "finish", "the single job is done")
        assert app.event(alone)["params"] == [HOSTILE]
        assert task.progress()["title"] == "😀 it's"
        assert len(task.events(limit=100)) == 100
        assert app.doctor() == []
        world.check_promises(app, [task.id], 300)


@SERVERS_ONLY
def test_what_waits_for_signals_is_set_up_like_every_other_connection(
    world: World, server: SqlServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken out: the set-up as a part of opening. The connection beside the pool had the server's defaults."""
    asked = "SHOW default_transaction_isolation" if store.kind == "postgresql" else "SELECT @@completion_type"
    found: list[object] = []
    channel = MariadbChannel if store.kind == "mariadb" else PostgresqlChannel
    connected = channel._connect

    def connect_and_ask(self: Any) -> Any:
        connection = connected(self)
        found.append(connection.exec_driver_sql(asked).scalar())
        return connection

    monkeypatch.setattr(channel, "_connect", connect_and_ask)
    with defaults(server, name_of(store), UNUSUAL[store.kind]):
        app = world.app()
        with world.working(app):
            wait_for(lambda: found, "it waits")
    assert found[0] == ("read committed" if store.kind == "postgresql" else "NO_CHAIN")


@SERVERS_ONLY
def test_a_right_that_is_missing_is_said_with_what_to_grant(server: SqlServer, store: Store) -> None:
    user = f"no_{name_of(store)}"[-32:]
    server.execute(f"CREATE ROLE {user} LOGIN" if store.kind == "postgresql" else f"CREATE USER {user}@localhost")
    if store.kind == "mariadb":
        server.execute(f"GRANT SELECT ON {name_of(store)}.alembic_version TO {user}@localhost")
    with (
        closing(Database(as_user(store, user))) as database,
        pytest.raises(LedgerUnavailable, match=r"lacks a right: .*denied.*grant"),
        database.write(marked=False) as connection,
    ):
        connection.exec_driver_sql("UPDATE tasks SET title = 'x'")
    if store.kind == "mariadb":
        server.execute(f"DROP USER {user}@localhost")


# -- connections


SEVERAL_HOSTS = [
    "postgres://postgres@{0},{1}/{2}?target_session_attrs=read-write",
    "postgresql://postgres@/{2}?host={0}&host={1}",
]


@pytest.mark.databases("postgresql", reason="MariaDB's driver takes one host")
@pytest.mark.parametrize("form", SEVERAL_HOSTS)
def test_of_several_hosts_the_one_that_answers_is_used(world: World, server: SqlServer, store: Store, form: str) -> None:
    places = (f"127.0.0.1:{free_port()}", f"127.0.0.1:{server.port}", name_of(store))
    app = world.app(database_url=form.format(*places))
    with world.working(app):
        task = app.submit("note", mixed(20))
        assert task.wait(120)["done"]
    world.check_promises(app, [task.id], 20)


@SERVERS_ONLY
def test_a_process_whose_connections_are_all_in_use_says_which_setting_that_is(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(store.url, pool_size=1)
    monkeypatch.setattr(database.engine.pool, "_timeout", 0.05)
    with database.read(), pytest.raises(LedgerUnavailable, match="database_connections"), database.read():
        pass
    with database.read() as connection:
        assert connection.execute(sa.text("SELECT 1")).scalar() == 1, "given back, it serves the next"
    database.close()


@pytest.mark.databases("mariadb", reason="its driver prepares for TLS with every connection")
def test_a_connection_that_verifies_no_server_reads_no_certificates(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("35 ms of processor time")

    monkeypatch.setattr(ssl, "create_default_context", read)
    with closing(Database(store.url)) as database, database.read() as connection:
        assert connection.execute(sa.text("SELECT 1")).scalar() == 1
    # One that is to be verified does read them.
    with (
        closing(Database(f"{store.url}?ssl_check_hostname=true")) as verifying,
        pytest.raises(AssertionError, match="35 ms"),
        verifying.read(),
    ):
        """The connection is opened here."""


@SERVERS_ONLY
def test_threads_that_read_at_once_do_not_open_a_connection_for_each_read(store: Store) -> None:
    database, statement = Database(store.url, pool_size=6), sa.text(_SESSION[store.kind])
    together, seen = threading.Barrier(6), set()

    def read() -> None:
        for _ in range(20):
            together.wait(60)
            with database.read() as connection:
                seen.add(connection.execute(statement).scalar())

    with ThreadPoolExecutor(6) as pool:
        for each in [pool.submit(read) for _ in range(6)]:
            each.result()
    assert len(seen) <= 6
    database.close()


@pytest.fixture
def full(fragile: Databases, database_kind: str, tmp_path: Path) -> Iterator[tuple[SqlServer, Store]]:
    """A server with few connections for ordinary users."""
    store = fragile.fresh(database_kind, tmp_path)
    yield fragile.templates(database_kind).server, store
    store.close()


@SERVERS_ONLY
def test_a_server_without_a_free_connection_is_told_from_one_that_is_away(full: tuple[SqlServer, Store]) -> None:
    server, store = full
    user = f"few_{name_of(store)}"[-32:]
    with ExitStack() as held:
        if store.kind == "postgresql":
            server.execute(f"CREATE ROLE {user} LOGIN CONNECTION LIMIT 1")
            held.enter_context(closing(connect(server, name_of(store), user=user)))
        else:
            server.execute(f"CREATE USER {user}@localhost")
            server.execute(f"GRANT ALL ON {name_of(store)}.* TO {user}@localhost")
            server.execute("SET GLOBAL max_connections = 10")
            held.callback(lambda: connect_and_set(server, name_of(store)))
            for _ in range(10):
                held.enter_context(closing(connect(server, name_of(store))))
        database = Database(as_user(store, user))
        with (
            pytest.raises(LedgerUnavailable, match=r"no connection left: raise its max_connections or lower"),
            database.read(),
        ):
            pass
        database.close()


def connect_and_set(server: SqlServer, name: str) -> None:
    server.execute("SET GLOBAL max_connections = 400")


@SERVERS_ONLY
def test_a_wrong_password_is_said_without_it(full: tuple[SqlServer, Store]) -> None:
    server, store = full
    user = f"pw_{name_of(store)}"[-32:]
    if store.kind == "postgresql":
        server.execute(f"CREATE ROLE {user} LOGIN PASSWORD 'right-one'")
        rules = server.folder / "data" / "pg_hba.conf"
        rules.write_text(f"host all {user} 127.0.0.1/32 scram-sha-256\n{rules.read_text()}")
        server.execute("SELECT pg_reload_conf()")
    else:
        server.execute(f"CREATE USER {user}@localhost IDENTIFIED BY 'right-one'")

    def said() -> str:
        database = Database(as_user(store, user, "wr0ng-secret"))
        try:
            schema.check(database)
        except LedgerUnavailable as error:
            return str(error)
        finally:
            database.close()
        return ""

    text = wait_for(said, "the rule holds")  # it is read by the server a moment later
    assert user in text
    assert "wr0ng-secret" not in text


@SERVERS_ONLY
def test_so_many_processes_hold_no_more_connections_than_is_documented(
    world: World, server: SqlServer, store: Store
) -> None:
    """Each of so many application processes at work, with everything that a worker has."""
    apps = [world.app(database_connections=4) for _ in range(3)]
    most = 0
    with ExitStack() as stack:
        for app in apps:
            stack.enter_context(world.working(app))
        task = apps[0].submit("note", mixed(600))
        while not task.progress()["done"]:
            most = max(most, sessions(server, store))
    # One more each for whoever waits for signals, one for the look of this test.
    assert most <= 3 * (4 + 1) + 1
    world.check_promises(apps[0], [task.id], 600)


def sessions(server: SqlServer, store: Store) -> int:
    if store.kind == "postgresql":
        found = server.execute(f"SELECT COUNT(*) FROM pg_stat_activity WHERE datname = '{name_of(store)}'")
    else:
        found = server.execute(f"SELECT COUNT(*) FROM information_schema.processlist WHERE db = '{name_of(store)}'")
    return int(found[0][0])


# -- a server that does not do what it is asked


@SERVERS_ONLY
def test_a_statement_that_takes_longer_than_the_server_allows_is_said(server: SqlServer, store: Store) -> None:
    database = Database(store.url)
    words = {
        "postgresql": ("SET statement_timeout = 20", "SELECT pg_sleep(30)"),
        "mariadb": (
            "SET SESSION max_statement_time = 0.02",
            "SELECT COUNT(*) FROM seq_1_to_1000000 a, seq_1_to_1000000 b WHERE a.seq > b.seq",
        ),
    }
    patience, slow = words[store.kind]

    def ask() -> None:
        with database.read() as connection:
            connection.exec_driver_sql(patience)
            connection.exec_driver_sql(slow)

    with pytest.raises(LedgerUnavailable, match=r"timeout|max_statement_time"):
        ask()
    database.close()


@SERVERS_ONLY
def test_a_server_that_became_read_only_delays_what_is_written_and_loses_none(
    world: World, server: SqlServer, store: Store, ordinary: str
) -> None:
    """As a primary does that was made a standby."""
    database = name_of(store)

    def read_only(on: bool) -> None:
        if store.kind == "postgresql":
            server.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = {'on' if on else 'off'}")
            server.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{ordinary}'")
        else:
            server.execute(f"SET GLOBAL read_only = {int(on)}")

    app = world.app(database_url=as_user(store, ordinary))
    with world.working(app):
        task = app.submit("gated", numbers(20))
        wait_for(lambda: len(world.shop.performed("began")) == 4, "jobs run")
        read_only(True)
        try:
            world.open_gate()
            wait_for(lambda: len(world.shop.performed()) >= 4, "they come to their end")
            with pytest.raises(Unavailable, match=r"read.only"):
                app.submit("note", numbers(1))
            assert patiently(task.progress, "it can still be read")["counts"]["finish"] == 0
        finally:
            read_only(False)
        patiently(lambda: task.progress()["done"], "it goes on")
    world.check_promises(app, [task.id], 20)


@SERVERS_ONLY
def test_sessions_that_began_read_only_are_given_up_and_the_program_heals(
    world: World, server: SqlServer, store: Store, ordinary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken out: `handle_error`. Connections of the pool kept the setting, and with them the program."""
    monkeypatch.setattr(doctor, "FRESH_S", 0.0)
    app = world.app(database_url=as_user(store, ordinary))
    database = app.ledger.database
    if store.kind == "postgresql":
        server.execute(f"ALTER ROLE {ordinary} SET default_transaction_read_only = on")
        database.engine.dispose()
    with ExitStack() as stack:  # the pool is full of sessions that may only read
        for _ in range(3):
            connection = stack.enter_context(database.read())
            if store.kind == "mariadb":
                connection.exec_driver_sql("SET SESSION TRANSACTION READ ONLY")
    if store.kind == "postgresql":
        for act in (app.check_ready, lambda: app.submit("note", numbers(1))):
            with pytest.raises(Unavailable, match=r"takes no write|read.only"):
                act()
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(database.read())
        server.execute(f"ALTER ROLE {ordinary} SET default_transaction_read_only = off")
    app.check_ready()
    with world.working(app):
        task = app.submit("note", numbers(3))
        assert task.wait(120)["done"]
    world.check_promises(app, [task.id], 3)


@pytest.mark.databases("postgresql", reason="only there a batch is copied by the driver itself")
def test_a_copy_in_a_session_that_began_read_only_gives_it_up(store: Store) -> None:
    database = Database(store.url)
    with database.read() as connection:
        connection.exec_driver_sql("SET default_transaction_read_only = on")
    row = (f"{1:024x}", 1, 0, "enqueue", "{}", 1, 1, 7)
    columns = ("job_id", "task_id", "seq", "status", "params", "first_row", "last_row", "created_at")

    @repeatable
    def copy() -> None:
        with database.write() as connection:
            batches.insert(connection, events, columns, [row])

    copy()
    assert store.sql("SELECT COUNT(*) FROM events") == [(1,)]
    database.close()


@pytest.mark.databases("mariadb", reason="only there a commit is refused because of it")
def test_a_commit_that_a_read_only_server_refuses_does_not_stand(
    store: Store, server: SqlServer, ordinary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks then what became of it: the server has said so."""
    database = Database(as_user(store, ordinary))
    monkeypatch.setattr(Database, "_is_committed", lambda self, mark: pytest.fail("it was asked"))
    commit = Database._commit

    def read_only_before(self: Database, *args: Any) -> None:
        server.execute("SET GLOBAL read_only = 1")
        commit(self, *args)

    def write() -> None:
        with database.write() as connection:
            connection.exec_driver_sql("INSERT INTO task_samples (task_id, at) VALUES (1, 1)")

    monkeypatch.setattr(Database, "_commit", read_only_before)
    try:
        with pytest.raises(LedgerUnavailable, match=r"read.only"):
            write()
    finally:
        server.execute("SET GLOBAL read_only = 0")
    assert store.sql("SELECT * FROM task_samples") == []
    database.close()


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """No file may grow beyond that, here and in processes that are started now: the same error as from a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def large(count: int) -> list[dict[str, Any]]:
    """Items that no compression makes smaller."""
    return [{"n": n, "pad": os.urandom(2_000).hex()} for n in range(1_000, 1_000 + count)]


def fill(app: AsyncTask) -> None:
    for _ in range(200):
        app.submit("note", large(500), priority=10**6)


_SESSION = {"postgresql": "SELECT pg_backend_pid()", "mariadb": "SELECT CONNECTION_ID()"}
SMALL_LOG = {"postgresql": {}, "mariadb": {"innodb-log-file-size": "8M", "innodb-data-file-path": "ibdata1:12M:autoextend"}}


@SERVERS_ONLY
def test_tables_that_cannot_grow_cost_no_item(databases: Databases, tmp_path: Path, database_kind: str) -> None:
    """The server finds no more room; when there is some again, it is started anew. MariaDB ends itself by then."""
    databases.templates(database_kind)  # skips where there is none
    with SERVERS[database_kind](settings=SMALL_LOG[database_kind]) as server:
        store = Templates(server).fresh()
        world = World(tmp_path, store)
        try:
            app = world.app()
            server.stop()
            with files_at_most(17 << 20):  # a piece of PostgreSQL's log is made as a whole, and a little smaller
                server.start()
            with world.working(app):
                task = patiently(lambda: app.submit("gated", numbers(30)), "there is room for a few")
                wait_for(lambda: len(world.shop.performed("began")) == 4, "jobs run")
                with pytest.raises(Unavailable, match=r"could not (extend|write)|connect"):
                    fill(app)
                world.open_gate()
                server.stop()
                server.start()
                patiently(lambda: task.progress()["done"], "it goes on")
            world.check_promises(app, [task.id], 30)
        finally:
            world.close()
            store.close()


@pytest.mark.databases("sqlite", reason="the file is written by this process itself")
def test_a_file_that_cannot_grow_costs_no_item(world: World, tmp_path: Path) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit("gated", numbers(30))
        wait_for(lambda: len(world.shop.performed("began")) == 4, "jobs run")
        size = max(path.stat().st_size for path in tmp_path.glob("a.db*"))
        with files_at_most(size):
            with pytest.raises(Unavailable, match=r"full|disk I/O"):
                fill(app)
            world.open_gate()
            wait_for(lambda: len(world.shop.performed()) >= 4, "they come to their end")
        patiently(lambda: task.progress()["done"], "it goes on")
    world.check_promises(app, [task.id], 30)


# -- servers that are refused


class Pretender(MariaServer):
    """A server that is asked by the driver alone, which does not mind what it calls itself."""

    def execute(self, statement: str, database: str | None = None) -> list[tuple[Any, ...]]:
        try:
            with closing(connect(self, database or "")) as connection, closing(connection.cursor()) as cursor:
                cursor.execute(statement)
                return list(cursor.fetchall()) if cursor.description else []
        except pymysql.err.OperationalError as error:
            raise sa.exc.OperationalError(statement, None, error) from error


@pytest.mark.databases("mariadb", reason="the only server that can be told to call itself another")
@pytest.mark.parametrize(
    ("version", "says"), [("8.0.36", "is MySQL, which is not supported"), ("10.5.8-MariaDB", "10.6 or later is needed")]
)
def test_a_server_that_is_too_old_or_another_is_refused(
    databases: Databases, database_kind: str, version: str, says: str
) -> None:
    databases.templates(database_kind)  # skips where there is none
    with Pretender(settings={"version": version}) as server:
        database = Database(server.create("a"))
        for act in (schema.check, schema.upgrade):
            with pytest.raises(ConfigError, match=says):
                act(database)
        database.close()


@pytest.mark.databases("postgresql", reason="MariaDB is told another version itself")
def test_an_old_postgresql_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(store.url)
    monkeypatch.setattr(schema, "_version", lambda connection: (11, 22))
    with pytest.raises(ConfigError, match=r"PostgreSQL 11\.22, and PostgreSQL 12 or later is needed"):
        schema.check(database)
    database.close()


@pytest.mark.databases("postgresql", reason="on MariaDB the tables say what text they hold")
def test_a_database_that_cannot_hold_every_text_is_refused(server: SqlServer, store: Store) -> None:
    name = f"latin_{name_of(store)}"
    server.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    database = Database(server.url(name))
    with pytest.raises(ConfigError, match="encoding of the database is LATIN1"):
        schema.upgrade(database)
    database.close()


def test_names_that_differ_in_a_letters_case_or_a_space_are_different(world: World) -> None:
    app = world.app()
    keys = ["a", "A", "a ", "á", "ａ"]
    new = [task_rows.NewTask("note", "default", 240, owner=one, idempotency_key=two) for one in keys for two in keys]
    ids = {task_rows.create(app.ledger, [task_rows.First(each)], lease_s=60)[0].task_id for each in new}
    assert len(ids) == len(new)
    assert [task_rows.create(app.ledger, [task_rows.First(each)], lease_s=60)[0].created for each in new] == [False] * len(
        new
    )


@pytest.mark.databases("sqlite", reason="the settings of a server are its administrator's")
def test_what_sqlite_commits_is_on_the_disk_when_a_machine_dies(world: World) -> None:
    with world.app().ledger.database.write() as connection:
        settings = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("synchronous", "journal_mode")]
    assert settings == [2, "wal"], "each commit waits for the disk"
