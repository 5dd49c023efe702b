"""The statements that write many rows at once, as text: one for each kind of database, table and set of columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

__all__ = [
    "Form",
    "insert_mariadb",
    "insert_sqlite",
    "json_each",
    "json_table",
    "update_each",
    "update_mariadb",
    "update_postgresql",
    "update_sqlite",
]

_COLLATION: Final = "utf8mb4_nopad_bin"


class Form(NamedTuple):
    """What an UPDATE is made of beside its values: the names of columns, and a condition."""

    guard: tuple[str, ...]
    written: tuple[str, ...]
    same: tuple[str, ...]
    where: str

    def condition(self, guards: Iterable[str]) -> str:
        """All of these comparisons, and the condition."""
        return " AND ".join([*guards, *([f"({self.where})"] if self.where else [])]) or "TRUE"


# -- SQLite


def json_each(count: int) -> str:
    """SQLite's table ``d`` of columns ``d0``, ``d1``, ... out of one JSON array of arrays, the statement's parameter."""
    made = ", ".join(f"json_extract(value, '$[{i}]') AS d{i}" for i in range(count))
    return f"(SELECT {made} FROM json_each(?)) AS d"  # noqa: S608 - nothing but numbers


@cache
def update_sqlite(table: sa.Table, form: Form) -> str:
    """The UPDATE of all rows of one text: ``same`` come first, then the text of the guard and what is written."""
    guard = form.guard
    sets = ", ".join(
        [
            *(f'"{name}" = ?' for name in form.same),
            *(f'"{name}" = d.d{i}' for i, name in enumerate(form.written, len(guard))),
        ]
    )
    where = form.condition(f'{table.name}."{name}" = d.d{i}' for i, name in enumerate(guard))
    return f"UPDATE {table.name} SET {sets} FROM {json_each(len(guard) + len(form.written))} WHERE {where}"  # noqa: S608


@cache
def update_each(table: sa.Table, form: Form) -> str:
    """The UPDATE of one row by its key, on SQLite, for a list of values: ``same``, what is written, the guard."""
    sets = ", ".join(f'"{name}" = ?' for name in (*form.same, *form.written))
    where = form.condition(f'"{name}" = ?' for name in form.guard)
    return f"UPDATE {table.name} SET {sets} WHERE {where}"  # noqa: S608 - names of our own tables


@cache
def insert_sqlite(table: sa.Table, columns: tuple[str, ...]) -> str:
    """The INSERT of all rows of one text."""
    names = ", ".join(f'"{name}"' for name in columns)
    return f"INSERT INTO {table.name} ({names}) SELECT * FROM {json_each(len(columns))}"  # noqa: S608


# -- PostgreSQL

_POSTGRESQL_TYPES: Final = ((sa.BigInteger, "bigint"), (sa.Integer, "integer"), (sa.Float, "double precision"))
_MARIADB_TYPES: Final = ((sa.BigInteger, "BIGINT"), (sa.Integer, "INT"), (sa.Float, "DOUBLE"))


def _type(column: sa.Column[Any], known: Sequence[tuple[Any, str]], text: str) -> str:
    return next((name for kind, name in known if isinstance(column.type, kind)), text)


@cache
def update_postgresql(table: sa.Table, form: Form) -> str:
    """The UPDATE of all rows of one text, as objects of ``b_NAME`` and ``v_NAME``: ``same`` come first, then the text."""
    columns = [(f"b_{name}", table.c[name]) for name in form.guard]
    columns += [(f"v_{name}", table.c[name]) for name in form.written]
    made = ", ".join(f"{name} {_type(column, _POSTGRESQL_TYPES, 'text')}" for name, column in columns)
    sets = ", ".join([*(f'"{name}" = %s' for name in form.same), *(f'"{name}" = d.v_{name}' for name in form.written)])
    where = form.condition(f'{table.name}."{name}" = d.b_{name}' for name in form.guard)
    return f"UPDATE {table.name} SET {sets} FROM json_to_recordset(%s::json) AS d({made}) WHERE {where}"  # noqa: S608


# -- MariaDB


def json_table(columns: Sequence[sa.Column[Any]]) -> str:
    """MariaDB's table ``d`` of columns ``d0``, ``d1``, ... out of one JSON array of arrays, the statement's parameter."""
    text = f"LONGTEXT CHARACTER SET utf8mb4 COLLATE {_COLLATION}"
    made = ", ".join(f"d{i} {_type(column, _MARIADB_TYPES, text)} PATH '$[{i}]'" for i, column in enumerate(columns))
    return f"JSON_TABLE(%s, '$[*]' COLUMNS ({made})) AS d"


@cache
def update_mariadb(table: sa.Table, form: Form) -> str:
    """The UPDATE of all rows of one text: it comes first, of the guard and what is written, then ``same``."""
    guard = form.guard
    columns = [table.c[name] for name in (*guard, *form.written)]
    sets = ", ".join(
        [
            *(f"t.`{name}` = %s" for name in form.same),
            *(f"t.`{name}` = d.d{i}" for i, name in enumerate(form.written, len(guard))),
        ]
    )
    on = f"t.`{guard[0]}` = d.d0"
    where = form.condition(f"t.`{name}` = d.d{i}" for i, name in enumerate(guard) if i)
    # The rows that are given come first: each is one look at the key.
    return f"UPDATE {json_table(columns)} STRAIGHT_JOIN {table.name} AS t ON {on} SET {sets} WHERE {where}"  # noqa: S608


@cache
def insert_mariadb(table: sa.Table, columns: tuple[str, ...]) -> str:
    """The INSERT of all rows of one text."""
    names = ", ".join(f"`{name}`" for name in columns)
    picked = ", ".join(f"d{i}" for i in range(len(columns)))
    source = json_table([table.c[name] for name in columns])
    return f"INSERT INTO {table.name} ({names}) SELECT {picked} FROM {source}"  # noqa: S608 - names of our own tables
