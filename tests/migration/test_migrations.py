"""The schema: models and migrations say the same, both ways work, and the program works on no other."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from pydantic import BaseModel
from support.databases import MODES, UNUSUAL, Databases, Store, defaults
from support.drawn import examples
from support.schemas import described

from asynctask import AsyncTask, current_job
from asynctask.core.transitions import BLOCKED
from asynctask.database import schema
from asynctask.database.engine import Database
from asynctask.database.tables import full_metadata, metadata
from asynctask.errors import ConfigError, LedgerUnavailable, SchemaOutdated
from asynctask.testing import wait_for
from benchmarks.servers import MariaServer


@pytest.fixture
def empty(databases: Databases, database_kind: str, tmp_path: Path) -> Iterator[Store]:
    """A database without any table, of each kind."""
    found = databases.empty(database_kind, tmp_path)
    yield found
    found.close()


@pytest.fixture
def another(databases: Databases, database_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """One more."""
    found = databases.empty(database_kind, tmp_path_factory.mktemp("another"))
    yield found
    found.close()


@pytest.fixture
def database(empty: Store) -> Iterator[Database]:
    made = Database(empty.url)
    yield made
    made.close()


@pytest.fixture
def app(empty: Store, tmp_path: Path) -> Iterator[Callable[[], AsyncTask]]:
    """Makes an application on the empty database."""
    made: list[AsyncTask] = []

    def make() -> AsyncTask:
        made.append(AsyncTask(environ={}, database_url=empty.url, data_dir=str(tmp_path / "data")))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def heads() -> dict[str, dict[str, list[str]]]:
    """For each kind what a database says of itself that was upgraded at once from nothing, see ``at_head``."""
    return {}


@pytest.fixture
def at_head(
    heads: dict[str, dict[str, list[str]]],
    databases: Databases,
    database_kind: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[str]]:
    """The same for the kind of the test."""
    if database_kind not in heads:
        store = databases.empty(database_kind, tmp_path_factory.mktemp("head"))
        with closing(Database(store.url)) as plain:
            schema.upgrade(plain)
            heads[database_kind] = described(plain)
        store.close()
    return heads[database_kind]


def tables(database: Database) -> set[str]:
    with database.read() as connection:
        return set(sa.inspect(connection).get_table_names())


def set_version(store: Store, revision: str) -> None:
    store.sql("DELETE FROM alembic_version")
    if revision:
        store.sql("INSERT INTO alembic_version VALUES (?)", [revision])


def test_the_models_are_the_migrated_schema(database: Database) -> None:
    schema.upgrade(database)
    # An empty default is told by SQLite and MariaDB in a way that alembic takes for a change: see the test below.
    options: dict[str, Any] = {"compare_type": True, "compare_server_default": database.dialect == "postgresql"}
    # Alembic does not know of an index that some databases do not have; the test below does.
    options["include_object"] = lambda found, *_: (
        not (isinstance(found, sa.Index) and found._ddl_if and database.dialect not in (found._ddl_if.dialect or ""))
    )
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts=options), full_metadata()) == []


def test_types_defaults_and_conditions_of_indexes_are_those_of_the_models_too(
    database: Database, at_head: dict[str, list[str]]
) -> None:
    """Alembic's comparison does not look at the condition of an index, and takes an empty default for a change."""
    with database.write(marked=False) as connection:
        full_metadata().create_all(connection)
    assert {name: said for name, said in at_head.items() if "alembic" not in name} == described(database)


def test_the_revision_that_is_needed_is_the_newest_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(schema.migrations_folder()))
    assert ScriptDirectory.from_config(config).get_current_head() == schema.head()


@pytest.mark.databases("postgresql", "mariadb", reason="a file has no defaults of its own")
def test_the_schema_is_the_same_whatever_the_defaults_of_the_server(
    databases: Databases, database: Database, empty: Store, at_head: dict[str, list[str]]
) -> None:
    name, server = str(database.url.database), databases.templates(empty.kind).server
    # On MariaDB in each mode, too: SQLAlchemy quoted names by the server's, and no statement was understood.
    for more in [{"sql_mode": f"'{mode}'"} for mode in MODES] if empty.kind == "mariadb" else [{}]:
        with defaults(server, name, {**UNUSUAL[empty.kind], **more}), closing(Database(empty.url)) as unusual:
            assert schema.upgrade(unusual) == schema.head()
            assert schema.downgrade(unusual, "base") is None
            assert schema.upgrade(unusual) == schema.head()
    assert described(database) == at_head


@pytest.mark.databases("postgresql", reason="on MariaDB the wait for its lock has a limit of its own")
def test_the_servers_limit_of_a_statement_is_not_one_of_an_upgrade(
    databases: Databases, database: Database, empty: Store
) -> None:
    """Altering a large table takes long. Taken out: the upgrade's own setting."""
    name, server = str(database.url.database), databases.templates(empty.kind).server
    waits = (
        f"SELECT 1 FROM pg_stat_activity WHERE datname = '{name}' AND wait_event = 'advisory'"
        " AND clock_timestamp() - query_start > '3s'"
    )
    with defaults(server, name, {"statement_timeout": "2s"}), closing(empty._connect()) as other:
        other.execute(f"SELECT pg_advisory_lock({schema._LOCK_KEY})")
        with ThreadPoolExecutor(1) as pool:
            upgraded = pool.submit(schema.upgrade, database)
            wait_for(lambda: upgraded.done() or server.execute(waits), "it waits for longer than that")
            other.execute(f"SELECT pg_advisory_unlock({schema._LOCK_KEY})")
            assert upgraded.result() == schema.head()


@pytest.mark.databases("postgresql", reason="only its tables stand in a schema")
def test_a_user_without_a_place_for_tables_is_told_so(databases: Databases, database: Database, empty: Store) -> None:
    name, server = str(database.url.database), databases.templates(empty.kind).server
    with (
        defaults(server, name, {"search_path": "nowhere"}),
        pytest.raises(ConfigError, match=r"CREATE SCHEMA.*search_path"),
    ):
        schema.upgrade(database)


@pytest.mark.databases("mariadb", reason="only there a setting of replication forbids an isolation")
def test_a_log_of_statements_is_refused_with_what_to_set(tmp_path: Path) -> None:
    with MariaServer(settings={"log-bin": "on", "binlog-format": "STATEMENT"}) as server:
        database = Database(server.create("logged"))
        with pytest.raises(ConfigError, match=r"binlog_format is STATEMENT.*MIXED or ROW"):
            schema.upgrade(database)
        server.execute("SET GLOBAL binlog_format = 'MIXED'")
        database.close()
        with closing(Database(server.url("logged"))) as mended:
            assert schema.upgrade(mended) == schema.head()


@pytest.mark.one_database(reason="what is refused is decided above the database")
def test_a_newer_schema_is_left_alone_by_an_upgrade_too(database: Database, empty: Store) -> None:
    """Taken out: the look at the revision before Alembic's. The command ended with a traceback."""
    schema.upgrade(database)
    set_version(empty, "9999")
    for act in (schema.upgrade, schema.check):
        with pytest.raises(SchemaOutdated, match=r"at schema 9999.*install the newer asynctask"):
            act(database)
    assert empty.sql("SELECT version_num FROM alembic_version") == [("9999",)]


@pytest.mark.parametrize(
    "statements",
    [
        [
            "CREATE TABLE alembic_version (version_num VARCHAR(32))",
            f"INSERT INTO alembic_version VALUES ('{schema.head()}')",
        ],
        ["CREATE TABLE alembic_version (version VARCHAR(32))", "INSERT INTO alembic_version VALUES ('0001')"],
        [
            "CREATE TABLE alembic_version (version_num VARCHAR(32))",
            "INSERT INTO alembic_version VALUES ('a')",
            "INSERT INTO alembic_version VALUES ('b')",
        ],
    ],
    ids=["a revision of our name", "another column", "two revisions"],
)
def test_the_versions_of_another_program_are_not_taken_for_ours(
    database: Database, empty: Store, statements: list[str]
) -> None:
    for statement in statements:
        empty.sql(statement)
    for act in (schema.upgrade, schema.check, schema.ensure):
        with pytest.raises(SchemaOutdated, match=r"another program: give asynctask a database of its own"):
            act(database)
    assert tables(database) == {"alembic_version"}


def test_no_index_names_the_status() -> None:
    for table in metadata.tables.values():
        for index in table.indexes:
            assert "status" not in [column.name for column in index.columns], index.name


def test_up_down_and_up_again_end_where_they_began(database: Database, at_head: dict[str, list[str]]) -> None:
    assert schema.current(database) is None
    assert schema.upgrade(database) == schema.head()
    assert schema.downgrade(database, "base") is None
    assert tables(database) <= {"alembic_version", "sqlite_sequence"}
    assert schema.upgrade(database) == schema.head()
    assert described(database) == at_head
    assert schema.upgrade(database) == schema.head(), "again changes nothing"
    assert described(database) == at_head


def revisions() -> list[str]:
    script = ScriptDirectory.from_config(schema._config())
    return [each.revision for each in reversed(list(script.walk_revisions()))]


@pytest.mark.databases("sqlite", reason="it reads the migrations alone")
def test_revisions_follow_each_other_up_to_the_one_that_the_code_expects() -> None:
    found = revisions()
    assert (found, found[-1]) == (sorted(found), schema.head())


def test_every_single_step_can_be_taken_back_and_again(database: Database) -> None:
    before = "base"
    for revision in revisions():
        assert schema.upgrade(database, revision) == revision
        said = described(database)
        assert schema.downgrade(database, before) == (None if before == "base" else before)
        assert schema.upgrade(database, revision) == revision
        assert described(database) == said
        before = revision


# -- from 0.1.0

ROWS = Path(__file__).parents[1] / "data" / "rows_of_0_1_0.json"
"""Every row that 0.1.0 had in its SQLite file while it worked: Tasks, single jobs and untracked ones, running, waiting in a
queue or for a retry, done, and lists being split. Columns that are NULL are left out; times are a day earlier."""


def install(database: Database, empty: Store) -> None:
    """An empty database becomes that of an installation of 0.1.0, whose process has died."""
    schema.upgrade(database, "0002")
    with database.write(marked=False) as connection:
        for name, rows in json.loads(ROWS.read_text()).items():
            for row in rows:
                connection.execute(sa.table(name, *map(sa.column, row)).insert(), row)
            if database.dialect == "postgresql" and "id" in rows[0]:
                connection.exec_driver_sql(
                    f"SELECT setval(pg_get_serial_sequence('{name}', 'id'), (SELECT MAX(id) FROM {name}))"
                )
        if database.dialect == "postgresql":
            connection.exec_driver_sql("ALTER TABLE events SET (fillfactor = 35)")
    set_version(empty, "0003")


class Order(BaseModel):
    """A row of the list that was being split."""

    n: int


CHANGES = ("CREATE", "ALTER", "DROP", "UPDATE", "DELETE")
"""How the statements of a migration begin, those that change rows among them."""


def installed(url: str, data_dir: Path) -> tuple[AsyncTask, list[str]]:
    """The application of that installation in this version, and the ids of the jobs that it performs."""
    app = AsyncTask(environ={}, database_url=url, data_dir=str(data_dir), lease_s=2.0, heartbeat_s=0.5)
    ran: list[str] = []

    def act(item: dict[str, Any]) -> dict[str, Any]:
        ran.append(current_job().job_id)
        return item

    app.worker(act, name="price", retry=0)
    app.worker(act, name="shaky", retry=3)
    app.worker(act, name="plain", retry=1, use_task_event=False)

    @app.worker(retry=0)
    def order(item: Order) -> None:
        ran.append(current_job().job_id)

    return app, ran


def is_empty(store: Store, rows: str) -> bool:
    return store.sql(f"SELECT COUNT(*) FROM {rows}") == [(0,)]


def write(database: Database, statement: str, *values: Any) -> None:
    """One statement; ``?`` stands for each of the values."""
    with database.write(marked=False) as connection:
        connection.exec_driver_sql(statement.replace("?", "%s") if database.dialect != "sqlite" else statement, values)


def read(database: Database, wanted: str, table: str) -> list[tuple[Any, ...]]:
    """These columns of every row, by the first of them."""
    with database.read() as connection:
        return [tuple(row) for row in connection.exec_driver_sql(f"SELECT {wanted} FROM {table} ORDER BY 1")]


def state_of(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    """What the upgrade decides: of times, whether there is one."""
    wanted = {
        "events": "job_id, status, attempt, process, due_at IS NULL, items",
        "tasks": "id, state, ready, due_next IS NULL, next_seq",
    }
    with database.read() as connection:
        return {
            name: [tuple(row) for row in connection.exec_driver_sql(f"SELECT {said} FROM {name} ORDER BY 1, 2")]
            for name, said in wanted.items()
        }


def test_an_installation_of_0_1_0_has_the_schema_of_the_models_after_the_upgrade(
    database: Database, empty: Store, at_head: dict[str, list[str]]
) -> None:
    install(database, empty)
    with pytest.raises(SchemaOutdated, match=r"at schema 0003.*run `asynctask db upgrade`"):
        schema.check(database)
    assert schema.upgrade(database) == schema.head()
    assert described(database) == at_head


def test_what_0_1_0_left_goes_on_after_the_upgrade(database: Database, empty: Store, tmp_path: Path) -> None:
    """Every job that had not ended runs, and once. Taken out: the statement that makes rows due, or that drops copies."""
    install(database, empty)
    schema.upgrade(database)
    app, ran = installed(empty.url, tmp_path / "data")
    ((source,),) = empty.sql("SELECT split_source FROM tasks WHERE state = 'splitting' AND split_source IS NOT NULL")
    path = tmp_path / "data" / "uploads" / json.loads(source)["name"]
    path.parent.mkdir(parents=True)
    path.write_text("n\n1\n2\n3\n")
    cancelled = "SELECT job_id FROM events JOIN tasks ON tasks.id = task_id WHERE state = 'cancelled'"
    left = empty.sql(f"SELECT job_id FROM events WHERE finished_at IS NULL AND job_id NOT IN ({cancelled})")
    assert app.doctor() == []
    for (task_id,) in empty.sql("SELECT id FROM tasks WHERE state = 'paused'"):
        app.task(task_id).resume()
    launcher = app.launcher(concurrency=4, queues={"default": 1, "cold": 1})
    launcher.start()
    try:
        for open_ in ("tasks WHERE finished_at IS NULL", "events WHERE finished_at IS NULL"):
            wait_for(partial(is_empty, empty, open_), f"the end of {open_}")
    finally:
        launcher.stop()
    split = empty.sql("SELECT job_id FROM events JOIN tasks ON tasks.id = task_id WHERE split_source = ?", [source])
    assert len(split) == 3
    assert sorted(ran) == sorted(job_id for (job_id,) in [*left, *split])
    found = dict(empty.sql("SELECT status, COUNT(*) FROM events GROUP BY status"))
    assert found == {"finish": 8 + len(ran) - 3, "failed": 2, "error": 3, "cancelled": 7}, "3 were not tracked"
    assert app.doctor() == []
    app.close()


def test_an_upgrade_from_0_1_0_that_broke_off_at_any_statement_can_be_run_again(
    database: Database, empty: Store, another: Store
) -> None:
    """Taken out: the look whether ``look_at`` is gone (MariaDB commits each change of a table by itself)."""
    with closing(Database(another.url)) as whole:
        install(whole, another)
        statements = counted(whole, CHANGES)
        schema.upgrade(whole)
        shape, rows, number = described(whole), state_of(whole), len(statements)
    assert number > 30
    for at in examples((number // 2, number), range(1, number + 1)):
        install(database, empty)
        mend = breaks(database, at, CHANGES)
        with pytest.raises(RuntimeError):
            schema.upgrade(database)
        mend()
        assert schema.current(database) != schema.head(), statements[at - 1]
        assert schema.upgrade(database) == schema.head()
        assert (described(database), state_of(database)) == (shape, rows), statements[at - 1]
        schema.downgrade(database, "base")


def test_what_was_in_a_queue_waits_in_the_ledger_after_the_upgrade_and_what_is_lent_after_the_way_back(
    database: Database,
) -> None:
    """Of rows in every state. Taken out: any of the statements that make rows due, or count what runs."""
    schema.upgrade(database, "0002")
    columns = (
        "(id, worker_name, queue, state, priority, split_state, created_at, updated_at, next_seq, created_jobs, ready)"
    )
    events = "(id, job_id, task_id, seq, status, created_at, attempt, due_at, process, look_at)"
    of_task = [  # beyond the pointer are the last two
        ("enqueue", 1, None, None), ("enqueue", 2, 77, None), ("enqueue", 1, None, "p"), ("working", 1, None, "p"),
        ("stopped", 1, None, None), ("finish", 1, None, None), ("failed", 1, None, None), ("error", 3, None, None),
        ("cancelled", 1, None, None), ("enqueue", 1, None, None), ("stopped", 1, None, None),
    ]  # fmt: skip
    alone = [
        ("enqueue", 1, 77, None, None), ("enqueue", 1, None, None, 5), ("finish", 1, None, None, None),
        ("enqueue", 1, None, None, None), ("working", 1, None, "p", None),
    ]  # fmt: skip

    sql, rows = partial(write, database), partial(read, database)

    for task_id, state, ready in ((1, "running", None), (2, "paused", None), (3, "finished", None)):
        sql(f"INSERT INTO tasks {columns} VALUES (?, 'w', 'q', ?, 5, 'sealed', 0, 0, 9, 11, ?)", task_id, state, ready)
        sql("INSERT INTO task_tallies (task_id, slot, dispatched, returned) VALUES (?, 2, 9, 3)", task_id)
    sql("UPDATE tasks SET finished_at = 1, next_seq = 11 WHERE id = 3")
    marks = ", ".join("?" * 10)
    for n, (status, attempt, due, process) in enumerate(of_task):
        sql(f"INSERT INTO events {events} VALUES ({marks})", n + 1, f"j{n}", 1, n, status, 0, attempt, due, process, None)
    for n, (status, attempt, due, process, look) in enumerate(alone, 20):
        sql(f"INSERT INTO events {events} VALUES ({marks})", n, f"j{n}", None, None, status, 0, attempt, due, process, look)
    sql("INSERT INTO jobs (jid, attempt, queue, priority, payload) VALUES ('j0', 1, 'q', 5, '{}')")

    schema.upgrade(database)
    soon = [
        (i, attempt, due if due in (None, 77, BLOCKED) else "now")
        for i, attempt, due in rows("id, attempt, due_at", "events")
    ]
    was = {n + 1: (attempt, due) for n, (_, attempt, due, _) in enumerate(of_task)}
    was |= {n: (attempt, due) for n, (_, attempt, due, _, _) in enumerate(alone, 20)}
    expected = {**was, 1: (2, "now"), 3: (2, "now"), 21: (2, "now")}
    assert soon == [(i, *expected[i]) for i in sorted(expected)]
    assert [i for i, process in rows("id, process", "events") if process] == [4, 24], "of those that run alone"
    assert rows("id, ready, due_next", "tasks") == [(1, 5, 77), (2, None, None), (3, None, None)]
    sql("INSERT INTO loans (task_id, low, high, process, at) VALUES (1, 9, 11, 'p', 1)")
    sql("UPDATE tasks SET next_seq = 11 WHERE id = 1")
    sql(f"UPDATE events SET due_at = {BLOCKED} WHERE id = 3")
    now = events.replace(", look_at", "")
    sql(f"INSERT INTO events {now} VALUES (30, 'j30', NULL, NULL, 'enqueue', 0, 1, NULL, 'queue/celery')")
    schema.downgrade(database, "0002")
    found = {i: (attempt, due) for i, attempt, due in rows("id, attempt, due_at", "events")}
    for i in (10, 30):
        assert found[i][0] == 2, "lone jobs that a holder has wait, too"
        assert found[i][1] is not None
    assert found[3][1] < BLOCKED, "0.1.0 has no lines, so nothing waits for its turn in one"
    assert {i: found[i] for i in found if i not in (1, 3, 10, 21, 30)} == {
        i: was[i] for i in was if i not in (1, 3, 10, 21)
    }
    assert rows("id, ready, due_next", "tasks") == [(1, None, 77), (2, None, None), (3, None, None)]
    assert rows("task_id, dispatched, returned", "task_tallies") == [(1, 1, 0), (2, 0, 0), (3, 0, 0)]
    assert schema.upgrade(database) == schema.head()


def test_untracked_jobs_in_every_state_wait_in_the_ledger_after_the_upgrade_and_in_their_table_after_the_way_back(
    database: Database,
) -> None:
    """Taken out: any of the states."""
    schema.upgrade(database, "0002")
    created, failed, later = 1_700_000_000_000_000, 1_700_000_100_000_000, 4_000_000_000_000_000

    sql, rows = partial(write, database), partial(read, database)

    def put(jid: str, payload: str = "", **columns: Any) -> None:
        plain = {"class": "Mail", "args": [jid, {"ä": 2**70}], "queue": "q", "jid": jid, "created_at": created / 10**6}
        text = payload or json.dumps({"retry": 3, **plain, "tags": ["x"], **columns.pop("more", {})})
        values = {"jid": jid, "attempt": 0, "queue": "q", "priority": 7, "payload": text, **columns}
        sql(f"INSERT INTO jobs ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})", *values.values())

    raised = {"retry_count": 1, "failed_at": failed / 10**6, "error_class": "ValueError", "error_message": "boom"}
    put("a-waits", waits=15)
    put("b-held", process="gone", deaths=1)
    put("c-later", held_in="schedule", run_at=later)
    put("d-again", held_in="retry", run_at=later, more=raised)
    put("e-dead", held_in="dead", run_at=failed, more=raised)
    put("f-aside", waits=2**61)
    put("g-no-job", payload="no job", waits=15)
    put("h-known", process="gone")
    sql(
        "INSERT INTO events (job_id, worker_name, queue, status, created_at, process) VALUES ('h-known', 'Mail', 'q',"
        " 'working', 0, 'gone')"
    )

    schema.upgrade(database)
    assert "jobs" not in tables(database)
    found = rows("job_id, items, status, attempt, retries, watched, deaths, due_at, problem, finished_at", "events")
    waits = {row[0]: (row[7] if row[7] in (None, later) else "now") for row in found}
    assert [(*row[:7], waits[row[0]], *row[8:]) for row in found] == [
        ("a-waits", 0, "enqueue", 1, 0, 0, 0, "now", None, None),
        ("b-held", 0, "enqueue", 1, 0, 1, 1, "now", None, None),
        ("c-later", 0, "enqueue", 1, 0, 0, 0, later, None, None),
        ("d-again", 0, "enqueue", 3, 2, 0, 0, later, None, None),
        ("e-dead", 0, "error", 3, 2, 0, 0, None, "ValueError", failed),
        ("f-aside", 0, "enqueue", 1, 0, 0, 0, "now", None, None),
        ("g-no-job", 0, "error", 1, 0, 0, 0, None, "discarded", found[6][9]),
        ("h-known", 1, "enqueue", 2, 0, 1, 0, "now", None, None),
    ]
    told = {jid: json.loads(said)[0]["message"] for jid, said in rows("job_id, added_messages", "events") if said}
    assert told == {"d-again": "ValueError: boom", "e-dead": "ValueError: boom", "g-no-job": "this is no job: no job"}
    jid, name, params, options, made, started = rows(
        "job_id, worker_name, params, options, created_at, started_at", "events"
    )[3]
    assert (jid, name, json.loads(params), made, started) == (
        "d-again", "Mail", ["d-again", {"ä": 2**70}], created, failed
    )  # fmt: skip
    assert options.startswith('{"priority":7,'), "the borrow reads its beginning"
    assert json.loads(options)["members"] == {"retry": 3, "tags": ["x"]}

    schema.downgrade(database, "0002")
    assert rows("job_id, items", "events") == [("h-known", 1)]
    assert rows("jid, attempt, priority, held_in, waits", "jobs") == [
        ("a-waits", 0, 7, None, 15), ("b-held", 0, 7, None, 15), ("c-later", 0, 7, "schedule", None),
        ("d-again", 0, 7, "retry", None), ("e-dead", 0, 7, "dead", None), ("f-aside", 0, 7, None, 15),
        ("g-no-job", 0, 7, "dead", None),
    ]  # fmt: skip
    payload = json.loads(rows("jid, payload", "jobs")[3][1])
    assert (payload["retry_count"], payload["failed_at"], payload["tags"]) == (1, failed / 10**6, ["x"])
    assert (payload["class"], payload["args"]) == ("Mail", ["d-again", {"ä": 2**70}])


HINTS: tuple[tuple[dict[str, Any], int | None, int | None], ...] = (
    ({"state": "running", "parallel": 1}, 5, 77),
    ({"state": "running", "interval_s": 60}, 5, 77),
    ({"state": "running", "session_key": "k", "session_holder": "k"}, 5, 77),
    ({"state": "running", "session_key": "l", "session_waits": 5}, None, 77),
    ({"state": "splitting"}, 5, 77),
    ({"state": "running", "next_seq": 3, "ready": 5}, None, 77),
    ({"state": "paused", "ready": 5}, None, 77),
    ({"state": "cancelled", "ready": 5, "due_next": 77}, None, None),
    ({"state": "finished", "finished_at": 1}, None, None),
)
"""What a Task has, and whether it is ready then, and when something of it is due."""


@pytest.mark.one_database(reason="one statement, of which no database has its own form")
def test_the_hints_of_a_task_are_what_the_program_would_say(database: Database) -> None:
    """Taken out: any condition of the statement. A Task that 0.1.0 held back by its ``parallel`` was not borrowed from."""
    schema.upgrade(database, "0002")
    task = {
        "worker_name": "w", "queue": "q", "priority": 5, "split_state": "sealed", "created_at": 0, "updated_at": 0,
        "next_seq": 2, "created_jobs": 3,
    }  # fmt: skip
    event = {"status": "enqueue", "created_at": 0}
    with database.write(marked=False) as connection:
        for number, (values, *_) in enumerate(HINTS, 1):
            row = {"id": number, **task, **values}
            connection.execute(sa.table("tasks", *map(sa.column, row)).insert(), row)
            for n, due in enumerate((77, 78, None)):
                row = {**event, "task_id": number, "job_id": f"j{number}-{n}", "seq": n, "due_at": due}
                connection.execute(sa.table("events", *map(sa.column, row)).insert(), row)
    schema.upgrade(database)
    with database.read() as connection:
        found = connection.exec_driver_sql("SELECT ready, due_next FROM tasks ORDER BY id").all()
    assert [*zip([values for values, *_ in HINTS], map(tuple, found), strict=True)] == [
        (values, (ready, due_next)) for values, ready, due_next in HINTS
    ]


@pytest.mark.one_database(reason="what is refused is decided above the database")
@pytest.mark.parametrize("revision", examples(["0004", "0015"], [f"{number:04}" for number in range(4, 16)]))
def test_a_schema_of_a_checkout_since_0_1_0_is_left_alone_and_the_way_is_named(
    database: Database, empty: Store, revision: str
) -> None:
    """Taken out: the names of those revisions. It was said to be newer."""
    schema.upgrade(database)
    set_version(empty, revision)
    for act in (schema.upgrade, schema.check, schema.ensure):
        with pytest.raises(
            SchemaOutdated, match=rf"at schema {revision}, which only checkouts.*git checkout.*a new database"
        ):
            act(database)
    assert empty.sql("SELECT version_num FROM alembic_version") == [(revision,)]


@pytest.mark.databases("sqlite", reason="on a server a person says when tables are made")
def test_an_empty_sqlite_file_is_set_up_at_first_use(app: Callable[[], AsyncTask], empty: Store, tmp_path: Path) -> None:
    made = app()
    assert not (tmp_path / "a.db").exists(), "nothing is made before it is used"
    made.ensure_schema()
    assert made.tasks() == []
    assert empty.sql("SELECT COUNT(*) FROM events") == [(0,)]


@pytest.mark.databases("postgresql", "mariadb", reason="an empty file is set up at first use")
def test_an_empty_database_of_a_server_is_left_alone_and_the_command_is_named(
    app: Callable[[], AsyncTask], database: Database
) -> None:
    with pytest.raises(SchemaOutdated, match=r"at schema none.*run `asynctask db upgrade`"):
        app().ensure_schema()
    assert tables(database) == set()


def test_a_process_under_which_the_schema_is_changed_says_so_on_each_database(
    app: Callable[[], AsyncTask], database: Database, empty: Store
) -> None:
    """Without the codes of such errors (``_OTHER_TABLES``) it says on SQLite that the database does not answer, and raises
    the driver's error on the others."""
    schema.upgrade(database)
    made = app()
    note = made.worker(name="note")(lambda item: None)
    assert note.submit([{"n": 1}]).counts["enqueue"] == 1
    schema.downgrade(database, "0016")
    with pytest.raises(LedgerUnavailable, match=r"another schema than this process was started with.*asynctask db check"):
        note.submit([{"n": 2}])
    empty.sql("DROP TABLE tasks")
    with pytest.raises(LedgerUnavailable, match="another schema"):
        made.tasks()


@pytest.mark.parametrize(("at", "goes_on"), [("0016", False), ("0017", False), ("0018", True)])
def test_who_must_stop_every_process_before_an_upgrade_is_told_to(database: Database, at: str, goes_on: bool) -> None:
    schema.upgrade(database, at)
    assert schema.processes_go_on(at) == goes_on
    with pytest.raises(SchemaOutdated, match="run `asynctask db upgrade`") as refused:
        schema.check(database)
    assert ("stop every process that runs, then run" in str(refused.value)) == (not goes_on)


def race(count: int, act: Callable[[int], object]) -> list[Exception]:
    """What so many threads that begin at once fail with."""
    start, failed = threading.Barrier(count), []

    def begin(number: int) -> None:
        start.wait()
        try:
            act(number)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


@pytest.mark.databases("sqlite", reason="on a server a person says when tables are made")
@pytest.mark.parametrize("round_number", range(examples(2, 5)))
def test_several_that_find_an_empty_file_at_once_set_it_up_together(
    app: Callable[[], AsyncTask], round_number: int
) -> None:
    apps = [app() for _ in range(4)]
    assert race(4, lambda number: apps[number].ensure_schema()) == []
    for each in apps:
        assert each.tasks() == []


@pytest.mark.parametrize("round_number", range(examples(1, 3)))
def test_of_upgrades_at_once_one_works_and_the_others_wait(empty: Store, database: Database, round_number: int) -> None:
    """Taken out: the advisory lock. On both servers the others failed with tables that were there already."""
    several = [Database(empty.url) for _ in range(4)]
    assert race(4, lambda number: schema.upgrade(several[number])) == []
    for each in several:
        each.close()
    assert schema.current(database) == schema.head()
    schema.check(database)


def counted(database: Database, kinds: tuple[str, ...]) -> list[str]:
    """The statements of these kinds, as they come."""
    found: list[str] = []

    def executed(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.lstrip().startswith(kinds):
            found.append(statement)

    sa.event.listen(database.engine, "before_cursor_execute", executed)
    return found


def breaks(database: Database, at: int, kinds: tuple[str, ...] = ("CREATE", "ALTER", "DROP")) -> Callable[[], None]:
    """Has the ``at``-th statement of these kinds fail on every connection from now on; returns what ends that."""
    left = at

    def executed(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        nonlocal left
        left -= statement.lstrip().startswith(kinds)
        if left == 0:
            raise RuntimeError("the process ends here")

    sa.event.listen(database.engine, "before_cursor_execute", executed)
    return lambda: sa.event.remove(database.engine, "before_cursor_execute", executed)


@pytest.mark.parametrize("at", examples([9], [2, 9, 30]))
def test_an_upgrade_that_broke_off_can_be_run_again(database: Database, at_head: dict[str, list[str]], at: int) -> None:
    """Where the schema cannot be changed in a transaction (MariaDB), what is there already is passed over."""
    mend = breaks(database, at)
    with pytest.raises(RuntimeError):
        schema.upgrade(database)
    mend()
    if database.dialect != "mariadb":
        assert tables(database) == set(), "all or nothing"
    with pytest.raises(SchemaOutdated, match="db upgrade"):
        schema.check(database)
    assert schema.upgrade(database) == schema.head()
    assert described(database) == at_head


@pytest.mark.parametrize("at", examples([9], [2, 9, 20, 30, 40]))
def test_a_downgrade_that_broke_off_can_be_run_again(database: Database, at: int) -> None:
    schema.upgrade(database)
    mend = breaks(database, at)
    with pytest.raises(RuntimeError):
        schema.downgrade(database, "base")
    mend()
    assert schema.downgrade(database, "base") is None
    assert tables(database) <= {"alembic_version", "sqlite_sequence"}


@pytest.mark.one_database(reason="what is refused is decided above the database")
def test_a_database_with_other_tables_is_not_touched_and_the_command_is_named(
    app: Callable[[], AsyncTask], empty: Store, database: Database
) -> None:
    empty.sql("CREATE TABLE theirs (id INTEGER)")
    with pytest.raises(SchemaOutdated, match=r"at schema none.*run `asynctask db upgrade`"):
        app().ensure_schema()
    assert tables(database) == {"theirs"}
    assert schema.upgrade(database) == schema.head(), "a person may say so"


def test_tables_of_others_with_our_names_are_not_taken_over(empty: Store, database: Database) -> None:
    """Taken out: the look for them. On MariaDB the upgrade passed over the table and failed at its index."""
    empty.sql("CREATE TABLE tasks (id INTEGER, what INTEGER)")
    with pytest.raises(SchemaOutdated, match=r"tables of its own named tasks.*a database of its own"):
        schema.upgrade(database)
    assert tables(database) == {"tasks"}


@pytest.mark.parametrize(
    ("revision", "says"),
    [
        ("9999", "does not know: install the newer asynctask"),
        ("", "run `asynctask db upgrade`"),
        ("0001", r"at schema 0001.*run `asynctask db upgrade`"),
        ("0003", r"at schema 0003.*run `asynctask db upgrade`"),
        ("0013", r"at schema 0013, which only checkouts"),
    ],
)
def test_another_schema_is_refused_with_what_to_do(store: Store, tmp_path: Path, revision: str, says: str) -> None:
    set_version(store, revision)
    other = AsyncTask(environ={}, database_url=store.url, data_dir=str(tmp_path / "data"))
    for use in (other.ensure_schema, other.tasks, lambda: other.task(1), lambda: other.launcher()):
        with pytest.raises(SchemaOutdated, match=says):
            use()
    other.close()
    assert SchemaOutdated.code == "schema_outdated"


@pytest.mark.databases("sqlite", reason="about the text alone")
def test_a_password_is_not_shown_in_the_refusal(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "url", sa.make_url("postgresql://somebody:secret@host/db"))
    with pytest.raises(SchemaOutdated) as refused:
        schema.check(database)
    assert "secret" not in str(refused.value)
    assert "host/db" in str(refused.value)
