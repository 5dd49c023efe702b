"""What a database says of its own tables: to compare two schemas that came about differently."""

from __future__ import annotations

import re
from typing import Any

import sqlalchemy as sa

from asynctask.database.engine import Database


def described(database: Database) -> dict[str, list[str]]:
    """Every table with its columns, and every index, in the words of the database; what has no order is sorted."""
    return {"sqlite": _sqlite, "postgresql": _postgresql, "mariadb": _mariadb}[database.dialect](database)


def _rows(database: Database, statement: str) -> list[tuple[Any, ...]]:
    with database.read() as connection:
        return [tuple(row) for row in connection.execute(sa.text(statement)).all()]


def _sqlite(database: Database) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for kind, name, sql in _rows(database, "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL"):
        if kind == "table":
            columns = _rows(database, f"PRAGMA table_info({name})")
            found[str(name)] = sorted(str(column[1:]) for column in columns)
        else:
            found[str(name)] = [" ".join(str(sql).replace('"', "").split())]
    for table in [name for name in found if not name.startswith("ix_")]:
        for _, name, unique, origin, partial in _rows(database, f"PRAGMA index_list({table})"):
            names = [str(row[2]) for row in _rows(database, f"PRAGMA index_info('{name}')")]
            found[f"{table}({','.join(names)})"] = [f"{unique} {origin} {partial}"]
    return found


def _postgresql(database: Database) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for table, *said in _rows(
        database,
        "SELECT table_name, column_name, data_type, character_maximum_length, is_nullable, column_default"
        " FROM information_schema.columns WHERE table_schema = 'public'",
    ):
        found.setdefault(str(table), []).append(str(said))
    for name, said in _rows(database, "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'"):
        found[str(name)] = [str(said)]
    for name, said in _rows(database, "SELECT relname, reloptions::text FROM pg_class WHERE reloptions IS NOT NULL"):
        found.setdefault(str(name), []).append(str(said))
    return {name: sorted(lines) for name, lines in found.items()}


def _mariadb(database: Database) -> dict[str, list[str]]:
    found = {}
    for (table,) in _rows(database, "SHOW TABLES"):
        ((_, said),) = _rows(database, f"SHOW CREATE TABLE {table}")
        lines = [line.strip().rstrip(",") for line in str(said).splitlines()]
        found[str(table)] = sorted(re.sub(r" AUTO_INCREMENT=\d+", "", line) for line in lines)
    return found
