"""What a read costs a database, counted and not timed: steps of SQLite's machine, pages of PostgreSQL, rows of MariaDB."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.database.engine import Database

_BOUNDARIES = ("BEGIN", "START", "COMMIT", "ROLLBACK", "SET ")


@contextmanager
def statements(database: Database) -> Iterator[list[tuple[str, Any]]]:
    """Every statement of this thread while the block runs, with its parameters; not what begins and ends transactions."""
    me = threading.get_ident()
    seen: list[tuple[str, Any]] = []

    def executed(connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        if threading.get_ident() == me and not statement.startswith(_BOUNDARIES):
            seen.append((statement, parameters))

    sa.event.listen(database.engine, "before_cursor_execute", executed)
    try:
        yield seen
    finally:
        sa.event.remove(database.engine, "before_cursor_execute", executed)


def cost(database: Database, read: Callable[[Connection], object]) -> int:
    """How much work a read is. It is made twice: the first time prepares the statement."""
    measure = {"sqlite": _sqlite_steps, "postgresql": _pages, "mariadb": _rows_read}[database.dialect]
    with database.snapshot() as connection:
        read(connection)
    with database.snapshot() as connection:
        return measure(database, connection, read)


def _sqlite_steps(database: Database, connection: Connection, read: Callable[[Connection], object]) -> int:
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    driver: Any = connection.connection.driver_connection
    driver.set_progress_handler(step, 1)
    try:
        read(connection)
    finally:
        driver.set_progress_handler(None, 0)
    return steps


def _pages(database: Database, connection: Connection, read: Callable[[Connection], object]) -> int:
    with statements(database) as seen:
        read(connection)
    found = 0
    for statement, parameters in seen:
        told: Any = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters).scalar()
        plan = (json.loads(told) if isinstance(told, str) else told)[0]["Plan"]
        found += plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    return int(found)


def _rows_read(database: Database, connection: Connection, read: Callable[[Connection], object]) -> int:
    def so_far() -> int:
        rows = connection.exec_driver_sql("SHOW SESSION STATUS LIKE 'Handler_read%%'").all()
        return sum(int(value) for _, value in rows)

    # Asking costs some itself: what it costs is taken off.
    first, second = so_far(), so_far()
    read(connection)
    return so_far() - second - (second - first)


def plan(database: Database, statement: str, parameters: Any) -> list[str]:
    """The plan of a statement, a line for each step, in the words of the database."""
    words = {"sqlite": "EXPLAIN QUERY PLAN", "postgresql": "EXPLAIN", "mariadb": "EXPLAIN"}[database.dialect]
    with database.read() as connection:
        rows = connection.exec_driver_sql(f"{words} {statement}", parameters).mappings().all()
    if database.dialect == "sqlite":
        return [str(row["detail"]) for row in rows]
    if database.dialect == "postgresql":
        return [str(next(iter(row.values()))) for row in rows]
    return [f"{row['table']} {row['type']} {row['key']} {row['Extra']}" for row in rows]


def scans(steps: list[str], *tables: str) -> list[str]:
    """The steps of a plan that read one of these tables from its beginning to its end."""
    found = []
    for step in steps:
        whole = step.startswith("SCAN") or "Seq Scan on" in step or step.split()[1:2] in (["ALL"], ["index"])
        if whole and any(table in step.split() for table in tables):
            found.append(step)
    return found


def analyze(database: Database) -> None:
    """Has the database look at what its tables hold, as it does by itself some time after they grew."""
    tables = {
        "sqlite": [""],
        "postgresql": [""],
        "mariadb": ["TABLE events", "TABLE tasks", "TABLE task_tallies", "TABLE jobs"],
    }
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in tables[database.dialect]:
            connection.exec_driver_sql(f"ANALYZE {table}").close()
