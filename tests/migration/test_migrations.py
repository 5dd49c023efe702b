"""The schema: models and migrations say the same, both ways work, and the program works on no other."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from asynctask import AsyncTask
from asynctask.errors import SchemaOutdated
from asynctask.ledger import schema
from asynctask.ledger.database import Database
from asynctask.ledger.models import metadata


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(f"sqlite:///{tmp_path}/a.db")
    yield made
    made.close()


def sql_of(database: Database) -> dict[str, str]:
    """What the database says of every table and index, in its own words."""
    with database.read() as connection:
        found = connection.execute(sa.text("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))
        return {str(name): " ".join(str(text).split()) for name, text in found.all()}


def folder_sql(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return sorted(str(row[0]) for row in connection.execute("SELECT name FROM sqlite_master"))


def application(tmp_path: Path) -> AsyncTask:
    return AsyncTask(environ={}, database_url=f"sqlite:///{tmp_path}/a.db", data_dir=str(tmp_path / "data"))


def test_the_models_are_the_migrated_schema(database: Database) -> None:
    schema.upgrade(database)
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def columns_of(database: Database) -> dict[str, list[tuple[object, ...]]]:
    """Name, type, whether NULL is allowed, default and place in the key of every column, by table."""
    with database.read() as connection:
        return {
            table: [tuple(row)[1:] for row in connection.execute(sa.text(f"PRAGMA table_info({table})")).all()]
            for table in metadata.tables
        }


def test_defaults_and_partial_indexes_are_those_of_the_models_too(database: Database, tmp_path: Path) -> None:
    """Alembic's comparison does not look at the condition of an index, and takes an empty default for a change."""
    schema.upgrade(database)
    migrated = sql_of(database)
    plain = Database(f"sqlite:///{tmp_path}/models.db")
    with plain.write() as connection:
        metadata.create_all(connection)
    made = sql_of(plain)
    assert columns_of(database) == columns_of(plain)
    plain.close()
    indexes = {name for name in made if made[name].startswith("CREATE INDEX")}
    assert indexes == {name for name in migrated if migrated[name].startswith("CREATE INDEX")}
    for name in indexes:
        assert migrated[name].replace('"', "") == made[name].replace('"', "")
    assert set(made) | {"alembic_version"} == set(migrated)


def test_no_index_names_the_status(database: Database) -> None:
    for table in metadata.tables.values():
        for index in table.indexes:
            assert "status" not in [column.name for column in index.columns], index.name


def test_up_down_and_up_again_end_where_they_began(database: Database) -> None:
    assert schema.current(database) is None
    assert schema.upgrade(database) == schema.head()
    first = sql_of(database)
    assert schema.downgrade(database, "base") is None
    assert set(sql_of(database)) <= {"alembic_version", "sqlite_sequence"}
    assert schema.upgrade(database) == schema.head()
    assert sql_of(database) == first
    assert schema.upgrade(database) == schema.head(), "again changes nothing"


def test_an_empty_sqlite_file_is_set_up_at_first_use(tmp_path: Path) -> None:
    app = application(tmp_path)
    assert not (tmp_path / "a.db").exists(), "nothing is made before it is used"
    app.ensure_schema()
    assert app.tasks() == []
    app.close()
    assert "events" in folder_sql(tmp_path / "a.db")


@pytest.mark.parametrize("round_number", range(5))
def test_several_that_find_an_empty_file_at_once_set_it_up_together(tmp_path: Path, round_number: int) -> None:
    apps = [application(tmp_path) for _ in range(4)]
    start, failed = threading.Barrier(4), []

    def begin(app: AsyncTask) -> None:
        start.wait()
        try:
            app.ensure_schema()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=begin, args=(app,)) for app in apps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    for app in apps:
        assert app.tasks() == []
        app.close()


def test_a_file_with_other_tables_is_not_touched_and_the_command_is_named(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "a.db")) as connection, connection:
        connection.execute("CREATE TABLE theirs (id INTEGER)")
    app = application(tmp_path)
    with pytest.raises(SchemaOutdated, match=r"at schema none.*run `asynctask db upgrade`"):
        app.ensure_schema()
    app.close()
    assert folder_sql(tmp_path / "a.db") == ["theirs"]


@pytest.mark.parametrize(
    ("revision", "says"), [("9999", "does not know: install the newer asynctask"), ("", "run `asynctask db upgrade`")]
)
def test_another_schema_is_refused_with_what_to_do(tmp_path: Path, revision: str, says: str) -> None:
    application(tmp_path).ensure_schema()
    with closing(sqlite3.connect(tmp_path / "a.db")) as connection, connection:
        connection.execute("DELETE FROM alembic_version")
        if revision:
            connection.execute("INSERT INTO alembic_version VALUES (?)", (revision,))
    app = application(tmp_path)
    for use in (app.ensure_schema, app.tasks, lambda: app.task(1), lambda: app.launcher()):
        with pytest.raises(SchemaOutdated, match=says):
            use()
    app.close()
    assert SchemaOutdated.code == "schema_outdated"


def test_a_password_is_not_shown_in_the_refusal(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "url", sa.make_url("postgresql://somebody:secret@host/db"))
    with pytest.raises(SchemaOutdated) as refused:
        schema.check(database)
    assert "secret" not in str(refused.value)
    assert "host/db" in str(refused.value)
