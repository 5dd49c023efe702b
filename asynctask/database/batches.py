"""Statements over many rows, in the fastest form of each database.

Rows are sent as one JSON text, which the database turns into a table (``json_to_recordset``, ``JSON_TABLE``,
``json_each``): one parameter for any number of rows keeps the statement, and its plan, the same. New Events are sent to
PostgreSQL by COPY.

Many rows are fetched from MariaDB as JSON, too, because its driver parses each value in Python; small rows also from
SQLite, whose driver releases and reacquires the interpreter lock for each row, which among several threads costs more than
the row.
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

from asynctask.database.engine import COLLATION, Database
from asynctask.database.retrying import by_driver
from asynctask.errors import TooLarge
from asynctask.logs import get_logger

MAX_BYTES: Final = 4_000_000
"""Largest size of one batch as JSON: a quarter of MariaDB's default packet."""

_STATEMENT_BYTES: Final = 16_384
"""Bytes of a packet that are reserved for the statement around a text."""

LONGEST_TEXT: Final = 16_000_000
"""Most bytes of rows that are fetched as one text."""

WIDE_LENGTH: Final = 2_000_000
"""Most characters (MariaDB: bytes) of wide rows that one statement fetches; a longer row is fetched alone."""

MEASURED: Final = 100
"""Number of wide rows whose lengths one statement queries, for which the database reads each row whole."""

_STATISTICS: Final = "SELECT 1 FROM sqlite_master WHERE name = 'sqlite_stat1'"
_ENCODE_BATCH: Final = 64
_ALL: Final = 2**31 - 1
_AS_IT_IS: Final = sa.types.NullType()

_log = get_logger("asynctask.database")


def for_update(connection: Connection, statement: Any) -> Any:
    """The statement with its rows locked until the transaction ends; on SQLite the transaction excludes other writers."""
    return statement if connection.dialect.name == "sqlite" else statement.with_for_update()


def among(connection: Connection, column: Any, values: Collection[Any]) -> Any:
    """The condition that ``column`` is one of ``values``, numbers or texts, as one parameter: with a parameter per value
    the statement would change, and rendering it costs more than the lookup."""
    dialect = connection.dialect.name
    if dialect == "mariadb" and not values:
        return sa.false()
    return _among(dialect, column, lambda kind: sa.bindparam(None, given(dialect, values), type_=kind))


def among_given(dialect: str, column: Any, name: str) -> Any:
    """:func:`among` for a statement built once: its parameter ``name`` takes the result of :func:`given`."""
    return _among(dialect, column, lambda kind: sa.bindparam(name, type_=kind))


def given(dialect: str, values: Collection[Any]) -> Any:
    """Values for :func:`among_given`; on MariaDB at least one."""
    if dialect == "postgresql":
        return _array_text(values)
    return orjson.dumps(list(values)).decode() if dialect == "sqlite" else tuple(values)


class ByValues:
    """A statement on the rows whose ``column`` is one of some values, built once for each database.

    ``build`` makes the statement from that condition. ``skip_locked``: the statement is a SELECT that locks its rows until
    the transaction ends, and skips locked ones (False: waits for them); None: it locks no rows.
    """

    def __init__(self, column: Any, build: Callable[[Any], Any], *, skip_locked: bool | None = None) -> None:
        self._column = column
        self._build = build
        self._skip_locked = skip_locked
        self._built: dict[str, Any] = {}

    def _of(self, dialect: str) -> Any:
        if (statement := self._built.get(dialect)) is None:
            statement = self._build(among_given(dialect, self._column, "ids"))
            if self._skip_locked is not None and dialect != "sqlite":  # there the transaction excludes other writers
                statement = statement.with_for_update(skip_locked=self._skip_locked)
            self._built[dialect] = statement
        return statement

    def execute(self, connection: Connection, values: Collection[Any], **more: Any) -> sa.CursorResult[Any]:
        """Executes the statement for these values, at least one; ``more``: its other parameters."""
        dialect = connection.dialect.name
        return connection.execute(self._of(dialect), {"ids": given(dialect, values), **more})

    def fetch(self, connection: Connection, values: Collection[Any]) -> Sequence[Sequence[Any]]:
        """The statement's rows, as from :func:`fetch_small`."""
        dialect = connection.dialect.name
        return fetch_small(connection, self._of(dialect), {"ids": given(dialect, values)})


def _array_text(values: Collection[Any]) -> str:
    """A PostgreSQL array literal; the driver would format each value in Python."""
    if all(type(value) is int for value in values):
        return "{" + ",".join(map(str, values)) + "}"
    text = '","'.join(values)
    if "\\" in text or text.count('"') != 2 * (len(values) - 1):
        text = '","'.join([value.replace("\\", "\\\\").replace('"', '\\"') for value in values])
    return '{"' + text + '"}'


def _among(dialect: str, column: Any, parameter: Callable[[Any], Any]) -> Any:
    if dialect == "postgresql":
        from sqlalchemy.dialects.postgresql import ARRAY  # imported for this database only

        item = sa.BigInteger() if isinstance(column.type, sa.Integer) else sa.Text()
        return column == sa.any_(sa.cast(parameter(_Untyped()), ARRAY(item)))
    if dialect == "sqlite":
        return column.in_(sa.select(sa.func.json_each(parameter(sa.Text())).table_valued("value").c.value))
    return column.op("IN", is_comparison=True)(parameter(_AS_IT_IS))  # the driver renders it


def fetch(connection: Connection, statement: Any) -> Sequence[Sequence[Any]]:
    """The rows of a SELECT of numbers and texts, any number of them."""
    if connection.dialect.name in ("sqlite", "postgresql"):
        return connection.execute(statement).all()
    return json_rows(connection.execute(packed(statement, connection.dialect.name)).scalars())


def fetch_wide(
    database: Database,
    statement: Any,
    key: Any,
    texts: Sequence[Any],
    keys: Sequence[int],
    *,
    measured: int = MEASURED,
) -> Iterator[dict[str, Any]]:
    """The rows of ``statement`` whose column ``key`` has these values, in the order of ``keys``, fetched as they are
    consumed, so that few are in memory at a time, however long they are.

    ``texts``: the columns that may be long; ``measured``: for how many rows the lengths are queried at once. No connection
    is held between two rows. Rows that were deleted meanwhile are left out. Raises LedgerUnavailable.
    """
    length = sum((sa.func.coalesce(sa.func.length(column), 0) for column in texts), sa.literal(0))
    lengths = statement.with_only_columns(key, length, maintain_column_froms=True)
    for start in range(0, len(keys), measured):
        some = keys[start : start + measured]
        with database.read(once=True) as connection:
            sizes = {found: int(size) for found, size in connection.execute(lengths.where(among(connection, key, some)))}
        for part in _wide_parts([each for each in some if each in sizes], sizes):
            with database.read(once=True) as connection:
                found = connection.execute(statement.where(among(connection, key, part))).mappings()
                rows = {row[key.name]: dict(row) for row in found}
            yield from (rows[each] for each in part if each in rows)


def _wide_parts(keys: Sequence[int], sizes: Mapping[int, int]) -> Iterator[list[int]]:
    """The keys in parts whose rows have at most :data:`WIDE_LENGTH`, or in parts of one key."""
    part: list[int] = []
    total = 0
    for key in keys:
        if part and total + sizes[key] > WIDE_LENGTH:
            yield part
            part, total = [], 0
        part.append(key)
        total += sizes[key]
    if part:
        yield part


def fetch_prepared(
    connection: Connection, statement: Any, values: Mapping[str, Any], *, lock: bool = False
) -> Sequence[Sequence[Any]]:
    """As :func:`fetch`, for a SELECT built once, with its parameters. ``lock``: see :func:`for_update`."""
    dialect = connection.dialect.name
    found = connection.execute(_readable(dialect, statement, lock), values)
    return found.all() if dialect in ("sqlite", "postgresql") else json_rows(found.scalars())


def fetch_small(
    connection: Connection, statement: Any, values: Mapping[str, Any], *, lock: bool = False
) -> Sequence[Sequence[Any]]:
    """As :func:`fetch_prepared`, for rows that are usually small in total (about a megabyte): MariaDB and SQLite send them
    as one text. The order is undefined, even with ORDER BY.
    """
    dialect = connection.dialect.name
    if dialect == "postgresql":
        return fetch_prepared(connection, statement, values, lock=lock)
    one = _one_limited if dialect == "sqlite" else _one
    found = _complete(*one(connection, _as_one_text(dialect, statement, lock), values))
    return fetch_prepared(connection, statement, values, lock=lock) if found is None else found


def _one(connection: Connection, statement: Any, values: Mapping[str, Any]) -> Sequence[Any]:
    return connection.execute(statement, values).one()


def _one_limited(connection: Connection, statement: Any, values: Mapping[str, Any]) -> Sequence[Any]:
    """The number of rows and the text; (-1, None) for a text over :data:`LONGEST_TEXT`, which SQLite does not limit
    itself."""
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


def _complete(count: int, text: str | None) -> list[Any] | None:
    """The ``count`` values of a JSON text from MariaDB; None if some are missing: the server truncates a long text and
    closes its list.
    """
    with suppress(orjson.JSONDecodeError):
        found = [] if text is None else list(orjson.loads(text))
        return found if len(found) == count else None
    return None


@cache
def _as_one_text(dialect: str, statement: Any, lock: bool) -> Any:
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
    """A SELECT of numbers and texts on PostgreSQL or MariaDB with each row as a JSON array, for :func:`json_rows`."""
    columns = statement.selected_columns
    if dialect == "postgresql":
        row: Any = sa.cast(sa.func.json_build_array(*columns), sa.Text)
    else:
        row = sa.func.json_array(*columns)
    return statement.with_only_columns(row, maintain_column_froms=True)


def json_list(dialect: str, columns: Sequence[Any]) -> Any:
    """A SELECT of one value: the JSON text of a list of rows, each an array; null without rows."""
    if dialect == "postgresql":
        return sa.select(sa.cast(sa.func.json_agg(sa.func.json_build_array(*columns)), sa.Text))
    return sa.select(_collected(dialect, sa.func.json_array(*columns)))


def locked(connection: Connection, statement: Any) -> Sequence[Any]:
    """The values of a SELECT of one column, with the rows locked until the transaction ends."""
    statement = for_update(connection, statement)
    if connection.dialect.name in ("sqlite", "postgresql"):
        return connection.execute(statement).scalars().all()
    inner = statement.limit(_ALL).subquery()  # the limit keeps the optimizer from merging it, so that it locks alone
    count, text = connection.execute(sa.select(sa.func.count(), sa.func.json_arrayagg(inner.c[0]))).one()
    found = _complete(count, text)
    return connection.execute(statement).scalars().all() if found is None else found


def json_rows(texts: Iterable[str]) -> list[list[Any]]:
    """Rows that were fetched as one JSON array each."""
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
    """For each of ``rows``: sets the columns ``written`` to ``v_NAME`` where the columns ``guard`` equal ``b_NAME``.

    ``guard`` begins with the key. ``same``: columns set to one value in all rows. ``where``: a constant SQL condition on
    the table's columns. Returns the number of rows matched.
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
    """Whether SQLite has statistics of its tables (``ANALYZE``).

    SQLite never updates them automatically. For a table that was short at that time it plans a scan, which reads the batch
    once per row of the table. So with statistics, rows are changed one by one, by key.
    """
    return connection.exec_driver_sql(_STATISTICS).first() is not None


def texts(rows: Sequence[Any], largest: int = MAX_BYTES, size_of: Callable[[bytes], int] = len) -> Iterator[str]:
    """Rows, lists or mappings, as JSON arrays of at most ``largest`` bytes each, as ``size_of`` measures them; a larger row
    is in an array alone."""
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
    """The :func:`texts` of rows, small enough for the server. Raises :class:`TooLarge` for a single row that does not fit:
    MariaDB closes the connection on a packet over ``max_allowed_packet``, so none is sent.
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
    """The server's ``max_allowed_packet`` in bytes; constant during a connection."""
    known = connection.info.get("asynctask_packet")
    if known is None:
        known = connection.info["asynctask_packet"] = int(
            connection.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one()
        )
    return int(known)


def _sent_size(part: bytes) -> int:
    """The bytes of a text in a statement of MariaDB's driver, which doubles quotes."""
    return len(part) + part.count(b"'")


def _encoded(rows: Sequence[Any], largest: int, size_of: Callable[[bytes], int]) -> Iterator[bytes]:
    """Rows as JSON separated by commas, in batches: a call per row would cost more than the encoding."""
    for start in range(0, len(rows), _ENCODE_BATCH):
        batch = rows[start : start + _ENCODE_BATCH]
        part = orjson.dumps(batch)[1:-1]
        if size_of(part) <= largest:
            yield part
        else:
            yield from (orjson.dumps(row) for row in batch)


class _Untyped(sa.types.UserDefinedType[str]):
    """A text without a type, which the server parses as an array once, before it plans.

    A typed text is cast during execution: the planner cannot estimate its length, and a table scan compares each row with
    one value after the other, which takes 0.7 s for 1,000 values among 10,000 rows.
    """

    cache_ok = True


def _copy(connection: Connection, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    names = ", ".join(f'"{name}"' for name in columns)
    statement = f"COPY {table} ({names}) FROM STDIN"
    with by_driver(connection, statement) as driver, driver.cursor() as cursor, cursor.copy(statement) as copy:
        for row in rows:
            copy.write_row(row)


# -- bulk statements as text, for each database, table and set of columns


class Form(NamedTuple):
    """The variable parts of an UPDATE besides its values: names of columns, and a condition."""

    guard: tuple[str, ...]
    written: tuple[str, ...]
    same: tuple[str, ...]
    where: str

    def condition(self, guards: Iterable[str]) -> str:
        """The comparisons and the condition, joined by AND."""
        return " AND ".join([*guards, *([f"({self.where})"] if self.where else [])]) or "TRUE"


# -- SQLite


def json_each(count: int) -> str:
    """SQLite's table ``d`` of columns ``d0``, ``d1``, ... from the parameter, a JSON array of arrays."""
    columns_sql = ", ".join(f"json_extract(value, '$[{i}]') AS d{i}" for i in range(count))
    return f"(SELECT {columns_sql} FROM json_each(?)) AS d"  # noqa: S608 - nothing but numbers


@cache
def update_sqlite(table: sa.Table, form: Form) -> str:
    """The UPDATE of all rows in a text. Parameters: ``same``, then the text of the guard and ``written``."""
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
    """The UPDATE of one row by key on SQLite, for executemany. Parameters: ``same``, ``written``, the guard."""
    sets = ", ".join(f'"{name}" = ?' for name in (*form.same, *form.written))
    where = form.condition(f'"{name}" = ?' for name in form.guard)
    return f"UPDATE {table.name} SET {sets} WHERE {where}"  # noqa: S608 - names of our own tables


@cache
def insert_sqlite(table: sa.Table, columns: tuple[str, ...]) -> str:
    """The INSERT of all rows in a text."""
    names = ", ".join(f'"{name}"' for name in columns)
    return f"INSERT INTO {table.name} ({names}) SELECT * FROM {json_each(len(columns))}"  # noqa: S608


# -- PostgreSQL

_POSTGRESQL_TYPES: Final = ((sa.BigInteger, "bigint"), (sa.Integer, "integer"), (sa.Float, "double precision"))
_MARIADB_TYPES: Final = ((sa.BigInteger, "BIGINT"), (sa.Integer, "INT"), (sa.Float, "DOUBLE"))


def _type(column: sa.Column[Any], known: Sequence[tuple[Any, str]], text: str) -> str:
    return next((name for kind, name in known if isinstance(column.type, kind)), text)


@cache
def update_postgresql(table: sa.Table, form: Form) -> str:
    """The UPDATE of all rows in a text, objects of ``b_NAME`` and ``v_NAME``. Parameters: ``same``, then the text."""
    columns = [(f"b_{name}", table.c[name]) for name in form.guard]
    columns += [(f"v_{name}", table.c[name]) for name in form.written]
    columns_sql = ", ".join(f"{name} {_type(column, _POSTGRESQL_TYPES, 'text')}" for name, column in columns)
    sets = ", ".join([*(f'"{name}" = %s' for name in form.same), *(f'"{name}" = d.v_{name}' for name in form.written)])
    where = form.condition(f'{table.name}."{name}" = d.b_{name}' for name in form.guard)
    return f"UPDATE {table.name} SET {sets} FROM json_to_recordset(%s::json) AS d({columns_sql}) WHERE {where}"  # noqa: S608


# -- MariaDB


def json_table(columns: Sequence[sa.Column[Any]]) -> str:
    """MariaDB's table ``d`` of columns ``d0``, ``d1``, ... from the parameter, a JSON array of arrays."""
    text = f"LONGTEXT CHARACTER SET utf8mb4 COLLATE {COLLATION}"
    columns_sql = ", ".join(f"d{i} {_type(column, _MARIADB_TYPES, text)} PATH '$[{i}]'" for i, column in enumerate(columns))
    return f"JSON_TABLE(%s, '$[*]' COLUMNS ({columns_sql})) AS d"


@cache
def update_mariadb(table: sa.Table, form: Form) -> str:
    """The UPDATE of all rows in a text. Parameters: the text of the guard and ``written``, then ``same``."""
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
    # The given rows first, so that each is one lookup by key.
    return f"UPDATE {json_table(columns)} STRAIGHT_JOIN {table.name} AS t ON {on} SET {sets} WHERE {where}"  # noqa: S608


@cache
def insert_mariadb(table: sa.Table, columns: tuple[str, ...]) -> str:
    """The INSERT of all rows in a text."""
    names = ", ".join(f"`{name}`" for name in columns)
    picked = ", ".join(f"d{i}" for i in range(len(columns)))
    source = json_table([table.c[name] for name in columns])
    return f"INSERT INTO {table.name} ({names}) SELECT {picked} FROM {source}"  # noqa: S608 - names of our own tables


# -- rows that may exist already


def insert_or_add(
    dialect: str, table: sa.Table, keys: tuple[str, ...], added: tuple[str, ...], replaced: tuple[str, ...] = ()
) -> Any:
    """An INSERT that, on a conflict of ``keys``, adds to the columns ``added`` and sets ``replaced``."""
    into = _insert_of(dialect)(table)
    if dialect == "mariadb":
        sums: dict[str, Any] = {c: table.c[c] + into.inserted[c] for c in added}
        return into.on_duplicate_key_update({**sums, **{c: into.inserted[c] for c in replaced}})
    sums = {c: table.c[c] + into.excluded[c] for c in added}
    return into.on_conflict_do_update(index_elements=list(keys), set_={**sums, **{c: into.excluded[c] for c in replaced}})


def insert_new(
    connection: Connection, table: sa.Table, key: str, rows: Sequence[Mapping[str, Any]], returned: tuple[str, ...]
) -> Sequence[Sequence[Any]]:
    """Inserts rows of equal columns, except those whose ``key`` exists. Returns the columns ``returned`` of the inserted
    rows; on MariaDB also of the existing ones."""
    dialect = connection.dialect.name
    if dialect != "postgresql":
        return connection.execute(_insert_new(dialect, table, key, returned), [dict(row) for row in rows]).all()
    statement, found = _insert_new_postgresql(table, key, tuple(rows[0]), returned), list[Sequence[Any]]()
    for text in texts(rows):
        with by_driver(connection, statement) as driver:  # for a single row, SQLAlchemy would take half of the time
            found += driver.execute(statement, (text,)).fetchall()
    return found


@cache
def _insert_new_postgresql(table: sa.Table, key: str, columns: tuple[str, ...], returned: tuple[str, ...]) -> str:
    names, back = ", ".join(columns), ", ".join(returned)
    typed = ", ".join(f"{name} {_type(table.c[name], _POSTGRESQL_TYPES, 'text')}" for name in columns)
    source = f"SELECT {names} FROM json_to_recordset(%s::json) AS d({typed})"  # noqa: S608 - names of our own tables
    return f"INSERT INTO {table.name} ({names}) {source} ON CONFLICT ({key}) DO NOTHING RETURNING {back}"


@cache
def _insert_new(dialect: str, table: sa.Table, key: str, returned: tuple[str, ...]) -> Any:
    into = _insert_of(dialect)(table).returning(*(table.c[name] for name in returned))
    if dialect == "mariadb":  # INSERT IGNORE would also hide other errors
        return into.on_duplicate_key_update({key: table.c[key]})
    return into.on_conflict_do_nothing(index_elements=[key])


def _insert_of(name: str) -> Any:
    """The INSERT of a dialect, imported only for the database in use."""
    if name == "mariadb":
        from sqlalchemy.dialects.mysql import insert
    elif name == "sqlite":
        from sqlalchemy.dialects.sqlite import insert  # type: ignore[assignment]
    else:
        from sqlalchemy.dialects.postgresql import insert  # type: ignore[assignment]
    return insert
