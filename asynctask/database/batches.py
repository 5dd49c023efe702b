"""Many rows in one statement, as each database takes them fastest.

Each is given the rows as one JSON text and makes a table of it (``json_to_recordset``, ``JSON_TABLE``, ``json_each``): one
parameter, whatever the number of rows, so the statement stays the same and its plan is kept. New Events go to PostgreSQL by
COPY.

Many rows come back from MariaDB as JSON too: its driver is written in Python, and takes each value of each row apart. From
SQLite they do where they are small: its driver lets go of the interpreter for each row, read or written, and asks for it
again. In a thread that is alone this costs nothing, among others it costs more than the row.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Final, NamedTuple

import orjson
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from asynctask.database.retrying import is_lost
from asynctask.errors import TooLarge
from asynctask.logs import get_logger

__all__ = [
    "Form",
    "among",
    "among_given",
    "fetch",
    "fetch_made",
    "fetch_small",
    "for_update",
    "given",
    "has_statistics",
    "insert",
    "insert_mariadb",
    "insert_sqlite",
    "json_each",
    "json_list",
    "json_rows",
    "json_table",
    "locked",
    "packed",
    "sendable",
    "texts",
    "update",
    "update_each",
    "update_mariadb",
    "update_postgresql",
    "update_sqlite",
]

MAX_BYTES: Final = 4_000_000
"""Of one batch as JSON: a fourth of what MariaDB takes in one packet as it is delivered."""

_STATEMENT_BYTES: Final = 16_384
"""Left in a packet for the statement around a text."""

LONGEST_TEXT: Final = 16_000_000
"""Bytes of many rows that come as one text."""

_STATISTICS: Final = "SELECT 1 FROM sqlite_master WHERE name = 'sqlite_stat1'"
_ENCODED_AT_ONCE: Final = 64
_ALL: Final = 2**31 - 1
_AS_IT_IS: Final = sa.types.NullType()

_log = get_logger("asynctask.database")


def for_update(connection: Connection, statement: Any) -> Any:
    """The statement with its rows locked until the transaction ends; on SQLite the transaction itself keeps others out."""
    return statement if connection.dialect.name == "sqlite" else statement.with_for_update()


def among(connection: Connection, column: Any, values: Collection[Any]) -> Any:
    """The condition that ``column`` is one of ``values``, numbers or texts: one parameter, so that the statement stays the
    same. One for each value would be put into its text each time, which costs more than the look-up."""
    dialect = connection.dialect.name
    if dialect == "mariadb" and not values:
        return sa.false()
    return _among(dialect, column, lambda kind: sa.bindparam(None, given(dialect, values), type_=kind))


def among_given(dialect: str, column: Any, name: str) -> Any:
    """The same for a statement that is made once: its parameter ``name`` is what :func:`given` makes of the values."""
    return _among(dialect, column, lambda kind: sa.bindparam(name, type_=kind))


def given(dialect: str, values: Collection[Any]) -> Any:
    """Values for :func:`among_given`; on MariaDB at least one."""
    if dialect == "postgresql":
        return _array_text(values)
    return orjson.dumps(list(values)).decode() if dialect == "sqlite" else tuple(values)


def _array_text(values: Collection[Any]) -> str:
    """Numbers or texts as PostgreSQL writes an array: the driver would look at each of them in Python."""
    if all(type(value) is int for value in values):
        return "{" + ",".join(map(str, values)) + "}"
    text = '","'.join(values)
    if "\\" in text or text.count('"') != 2 * (len(values) - 1):
        text = '","'.join([value.replace("\\", "\\\\").replace('"', '\\"') for value in values])
    return '{"' + text + '"}'


def _among(dialect: str, column: Any, parameter: Callable[[Any], Any]) -> Any:
    if dialect == "postgresql":
        from sqlalchemy.dialects.postgresql import ARRAY  # loaded where that is the database

        item = sa.BigInteger() if isinstance(column.type, sa.Integer) else sa.Text()
        return column == sa.any_(sa.cast(parameter(_Untyped()), ARRAY(item)))
    if dialect == "sqlite":
        return column.in_(sa.select(sa.func.json_each(parameter(sa.Text())).table_valued("value").c.value))
    return column.op("IN", is_comparison=True)(parameter(_AS_IT_IS))  # the driver writes it out


def fetch(connection: Connection, statement: Any) -> Sequence[Sequence[Any]]:
    """The rows of a SELECT of numbers and texts, however many."""
    if connection.dialect.name in ("sqlite", "postgresql"):
        return connection.execute(statement).all()
    return json_rows(connection.execute(packed(statement, connection.dialect.name)).scalars())


def fetch_made(
    connection: Connection, statement: Any, values: Mapping[str, Any], *, lock: bool = False
) -> Sequence[Sequence[Any]]:
    """The same of a SELECT that is made once, with the values of its parameters. ``lock``: see :func:`for_update`."""
    dialect = connection.dialect.name
    found = connection.execute(_readable(dialect, statement, lock), values)
    return found.all() if dialect in ("sqlite", "postgresql") else json_rows(found.scalars())


def fetch_small(
    connection: Connection, statement: Any, values: Mapping[str, Any], *, lock: bool = False
) -> Sequence[Sequence[Any]]:
    """The same where all rows together are most often small, a megabyte or so: MariaDB and SQLite give them as one text.

    In any order, whatever the statement says of it.
    """
    dialect = connection.dialect.name
    if dialect == "postgresql":
        return fetch_made(connection, statement, values, lock=lock)
    one = _one_of_sqlite if dialect == "sqlite" else _one
    found = _whole(*one(connection, _in_one(dialect, statement, lock), values))
    return fetch_made(connection, statement, values, lock=lock) if found is None else found


def _one(connection: Connection, statement: Any, values: Mapping[str, Any]) -> Sequence[Any]:
    return connection.execute(statement, values).one()


def _one_of_sqlite(connection: Connection, statement: Any, values: Mapping[str, Any]) -> Sequence[Any]:
    """The count and the text; no text where it would be longer than :data:`LONGEST_TEXT`, for nothing else stops it."""
    driver: Any = connection.connection.driver_connection
    before = driver.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_TEXT)
    try:
        return _one(connection, statement, values)
    except exc.DBAPIError as error:
        if getattr(error.orig, "sqlite_errorcode", None) != sqlite3.SQLITE_TOOBIG:
            raise
        return -1, None
    finally:
        driver.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, before)


def _whole(count: int, text: str | None) -> list[Any] | None:
    """The list of ``count`` values that MariaDB gave as one text; None where some are missing.

    It cuts off what is longer than it may be, and closes the list all the same.
    """
    with suppress(orjson.JSONDecodeError):
        found = [] if text is None else list(orjson.loads(text))
        return found if len(found) == count else None
    return None


@cache
def _in_one(dialect: str, statement: Any, lock: bool) -> Any:
    row = sa.func.json_array(*statement.selected_columns)
    both = (sa.func.count(), _collected(dialect, row))
    whole = statement.order_by(None).with_only_columns(*both, maintain_column_froms=True)
    return whole.with_for_update() if lock and dialect != "sqlite" else whole


def _collected(dialect: str, value: Any) -> Any:
    return sa.func.json_group_array(value) if dialect == "sqlite" else sa.func.json_arrayagg(value)


@cache
def _readable(dialect: str, statement: Any, lock: bool) -> Any:
    if lock and dialect != "sqlite":
        statement = statement.with_for_update()
    return statement if dialect in ("sqlite", "postgresql") else packed(statement, dialect)


def packed(statement: Any, dialect: str) -> Any:
    """A SELECT of numbers and texts for PostgreSQL or MariaDB: each row is one JSON array, for :func:`json_rows`."""
    columns = statement.selected_columns
    if dialect == "postgresql":
        row: Any = sa.cast(sa.func.json_build_array(*columns), sa.Text)
    else:
        row = sa.func.json_array(*columns)
    return statement.with_only_columns(row, maintain_column_froms=True)


def json_list(dialect: str, columns: Sequence[Any]) -> Any:
    """A SELECT of one value: the JSON text of a list of rows, each an array; null where there are none."""
    if dialect == "postgresql":
        return sa.select(sa.cast(sa.func.json_agg(sa.func.json_build_array(*columns)), sa.Text))
    return sa.select(_collected(dialect, sa.func.json_array(*columns)))


def locked(connection: Connection, statement: Any) -> Sequence[Any]:
    """The values of a SELECT of one column, its rows locked until the transaction ends."""
    statement = for_update(connection, statement)
    if connection.dialect.name in ("sqlite", "postgresql"):
        return connection.execute(statement).scalars().all()
    inner = statement.limit(_ALL).subquery()  # the limit keeps it a statement of its own, which locks
    count, text = connection.execute(sa.select(sa.func.count(), sa.func.json_arrayagg(inner.c[0]))).one()
    found = _whole(count, text)
    return connection.execute(statement).scalars().all() if found is None else found


def json_rows(texts: Iterable[str]) -> list[list[Any]]:
    """Rows that came as a JSON array each."""
    return [orjson.loads(text) for text in texts]


def update(
    connection: Connection,
    table: sa.Table,
    guard: Sequence[str],
    written: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    *,
    same: Mapping[str, Any] | None = None,
    where: str = "",
) -> int:
    """Sets the columns ``written`` to ``v_NAME`` where the columns ``guard`` are ``b_NAME``, for each row of values.

    The first of ``guard`` is the key. ``same``: columns that are set to one value in every row. ``where``: a condition
    on the table's columns that holds for all of them, SQL of our own. Returns how many rows were found.
    """
    if not rows:
        return 0
    form = Form(tuple(guard), tuple(written), tuple(same or ()), where)
    fixed = tuple((same or {}).values())
    if connection.dialect.name == "postgresql":
        statement = update_postgresql(table, form)
        return sum(int(connection.exec_driver_sql(statement, (*fixed, text)).rowcount) for text in texts(rows))
    if connection.dialect.name == "sqlite" and has_statistics(connection):
        names = (*(f"v_{name}" for name in written), *(f"b_{name}" for name in guard))
        values = [fixed + tuple([row[name] for name in names]) for row in rows]
        return int(connection.exec_driver_sql(update_each(table, form), values).rowcount)
    names = (*(f"b_{name}" for name in guard), *(f"v_{name}" for name in written))
    parts = sendable(connection, [[row[name] for name in names] for row in rows])
    if connection.dialect.name == "sqlite":
        statement = update_sqlite(table, form)
        return sum(int(connection.exec_driver_sql(statement, (*fixed, text)).rowcount) for text in parts)
    statement = update_mariadb(table, form)
    return sum(int(connection.exec_driver_sql(statement, (text, *fixed)).rowcount) for text in parts)


def insert(connection: Connection, table: sa.Table, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Inserts rows of values in the order of ``columns``."""
    if not rows:
        return
    name = connection.dialect.name
    if name == "postgresql":
        _copy(connection, table.name, columns, rows)
        return
    insert_texts = insert_mariadb if name == "mariadb" else insert_sqlite
    for text in sendable(connection, rows):
        connection.exec_driver_sql(insert_texts(table, tuple(columns)), (text,))


def has_statistics(connection: Connection) -> bool:
    """Whether somebody has had SQLite count what is in its tables (``ANALYZE``).

    It never counts again by itself. Of a table that was short then it thinks that to go through it costs nothing, and would
    read the batch once for each of the table's rows. So rows are changed one by one then, each by its key.
    """
    return connection.exec_driver_sql(_STATISTICS).first() is not None


def texts(rows: Sequence[Any], largest: int = MAX_BYTES, size_of: Callable[[bytes], int] = len) -> Iterator[str]:
    """Rows, lists or mappings, as JSON arrays of at most ``largest`` bytes each by ``size_of``; of more only where a single
    row has more."""
    parts: list[bytes] = []
    size = 0
    for part in _encoded(rows, largest, size_of):
        length = size_of(part) + 1
        if parts and size + length > largest:
            yield (b"[" + b",".join(parts) + b"]").decode()
            parts, size = [], 0
        parts.append(part)
        size += length
    yield (b"[" + b",".join(parts) + b"]").decode()


def sendable(connection: Connection, rows: Sequence[Any]) -> Iterator[str]:
    """:func:`texts` that this server takes as a parameter.

    MariaDB hangs up on a packet over ``max_allowed_packet``, which looks like a lost connection; so none is sent. Raises
    :class:`TooLarge` for a single row that does not fit.
    """
    if connection.dialect.name != "mariadb":
        yield from texts(rows)
        return
    packet = _packet(connection)
    room = packet - min(_STATEMENT_BYTES, packet // 2)
    parts = list(texts(rows, min(MAX_BYTES, room), _sent_size))
    sizes = [_sent_size(part.encode()) for part in parts]
    if max(sizes) > room:
        raise TooLarge(
            f"a row of {max(sizes):,} bytes is over the database's max_allowed_packet ({packet:,} bytes); raise it"
        )
    if len(parts) > 1 and room < MAX_BYTES and not connection.info.get("asynctask_packet_told"):
        connection.info["asynctask_packet_told"] = True
        _log.warning("batch_split", bytes=sum(sizes), statements=len(parts), max_allowed_packet=packet)
    yield from parts


def _packet(connection: Connection) -> int:
    """The server's ``max_allowed_packet`` in bytes; it never changes while a connection lasts."""
    known = connection.info.get("asynctask_packet")
    if known is None:
        known = connection.info["asynctask_packet"] = int(
            connection.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one()
        )
    return int(known)


def _sent_size(part: bytes) -> int:
    """The bytes of a text in a statement of MariaDB's driver, which doubles each quote."""
    return len(part) + part.count(b"'")


def _encoded(rows: Sequence[Any], largest: int, size_of: Callable[[bytes], int]) -> Iterator[bytes]:
    """Rows as JSON with commas between, some at once: one call for each of them would cost more than the encoding."""
    for start in range(0, len(rows), _ENCODED_AT_ONCE):
        some = rows[start : start + _ENCODED_AT_ONCE]
        part = orjson.dumps(some)[1:-1]
        if size_of(part) <= largest:
            yield part
        else:
            yield from (orjson.dumps(row) for row in some)


class _Untyped(sa.types.UserDefinedType[str]):
    """A text that the server takes as whatever it is cast to: it reads an array once, before it plans.

    A text that is cast from a type of its own is read as the statement runs. The planner cannot count what is in it, and
    where it goes through a table it compares each row with one value after the other: 0.7 s for 1,000 among 10,000 rows.
    """

    cache_ok = True


def _copy(connection: Connection, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    names = ", ".join(f'"{name}"' for name in columns)
    statement = f"COPY {table} ({names}) FROM STDIN"
    driver: Any = connection.connection.driver_connection
    error_class: Any = connection.dialect.loaded_dbapi.Error
    try:
        with driver.cursor() as cursor, cursor.copy(statement) as copy:
            for row in rows:
                copy.write_row(row)
    except error_class as error:  # told as SQLAlchemy tells the errors of every other statement
        lost = is_lost(connection, error)
        if lost:
            connection.invalidate(error)
        raise exc.DBAPIError.instance(
            statement, None, error, error_class, connection_invalidated=lost, dialect=connection.dialect
        ) from error


# -- The statements that write many rows at once, as text: one for each kind of database, table and set of columns.

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
