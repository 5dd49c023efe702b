"""The databases' own drivers, with nothing above them: what the peers are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from asynctask.database.engine import Database
from benchmarks.common import Place

__all__ = ["DRIVERS", "LOADS", "Raw", "raw"]

LOADS = {
    "sqlite": "sqlite3, executemany",
    "postgresql": "psycopg, COPY",
    "mariadb": "PyMySQL, INSERT of many rows",
}
"""How :meth:`Raw.load` puts rows into a table, in words."""

DRIVERS = {"sqlite": "sqlite3", "postgresql": "psycopg", "mariadb": "PyMySQL"}


class Raw:
    """One connection of a driver. Outside :meth:`load` each statement commits by itself."""

    def __init__(self, kind: str, connection: Any) -> None:
        self.kind = kind
        self._connection = connection
        self._cursor = connection.cursor()

    def sql(self, statement: str) -> str:
        """A statement with ``?`` for its parameters, as the driver takes it."""
        return statement if self.kind == "sqlite" else statement.replace("?", "%s")

    def execute(self, statement: str, parameters: Sequence[Any] = ()) -> None:
        """Runs one statement, written as :meth:`sql` gives it."""
        self._cursor.execute(statement, parameters)

    def rows(self, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """What a query finds; ``?`` for its parameters."""
        self._cursor.execute(self.sql(statement), parameters)
        return list(self._cursor.fetchall())

    def load(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Puts rows into a table in one transaction, in the fastest way that the driver has without a file."""
        names = ", ".join(columns)
        if self.kind == "postgresql":
            with self._cursor.copy(f"COPY {table} ({names}) FROM STDIN") as copy:
                for row in rows:
                    copy.write_row(row)
            return
        statement = self.sql(f"INSERT INTO {table} ({names}) VALUES ({', '.join('?' * len(columns))})")
        self.execute("BEGIN IMMEDIATE" if self.kind == "sqlite" else "BEGIN")
        self._cursor.executemany(statement, rows)
        self.execute("COMMIT")


@contextmanager
def raw(place: Place) -> Iterator[Raw]:
    """A connection to the place's database, opened by the product: its pragmas and its character set are the same."""
    with closing(Database(place.database_url)) as database, closing(database.engine.raw_connection()) as pooled:
        connection: Any = pooled.driver_connection
        if place.kind == "postgresql":
            connection.rollback()
            connection.autocommit = True
        elif place.kind == "mariadb":
            connection.autocommit(True)
        try:
            yield Raw(place.kind, connection)
        finally:
            if place.kind == "postgresql":
                connection.autocommit = False  # as the pool gave it
