"""Exports: a Task whose items are shards of rows, merged into one file when it closes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement
    from sqlalchemy.engine import Connection, Engine

__all__ = ["key_ranges"]


def key_ranges(
    bind: Connection | Engine, column: ColumnElement[Any], *where: ColumnElement[bool], shards: int = 20
) -> list[dict[str, Any]]:
    """The shards of a table: ranges of a key, in its order, with about the same number of rows each.

    Arguments: ``bind``, the database; ``column``, a key of whole numbers or texts, preferably indexed; ``where``, which
    rows; at most this many ``shards``. Each is ``{"from": ..., "to": ...}``, the first and the last key, for
    ``column.between(shard["from"], shard["to"])``. All rows of one key are in one shard, rows without a key in none. The
    database computes them in one statement. Raises ValueError for other keys, or for less than one shard.
    """
    import sqlalchemy as sa

    if shards < 1:
        raise ValueError(f"shards must be 1 or more, not {shards}")
    keys = sa.select(column.label("k"), sa.func.count().label("n")).where(column.is_not(None), *where).group_by(column)
    found = keys.subquery()
    whole = sa.BigInteger()  # PostgreSQL would divide the sums as decimals
    upto = sa.cast(sa.func.sum(found.c.n).over(order_by=found.c.k), whole)
    total = sa.cast(sa.func.sum(found.c.n).over(), whole)
    tiles = sa.select(found.c.k, ((upto - 1) * shards // total).label("tile")).subquery()
    first = sa.func.min(tiles.c.k)
    ranges = sa.select(first, sa.func.max(tiles.c.k)).group_by(tiles.c.tile).order_by(tiles.c.tile)
    if isinstance(bind, sa.engine.Engine):
        with bind.connect() as connection:
            rows = connection.execute(ranges).all()
    else:
        rows = bind.execute(ranges).all()
    if wrong := [key for key, _ in rows if not isinstance(key, int | str)]:
        raise ValueError(f"a key must be a whole number or a text, not a {type(wrong[0]).__name__}")
    return [{"from": low, "to": high} for low, high in rows]
