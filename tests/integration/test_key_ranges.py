"""Shards from the keys of a table, on each database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from support.world import World

from asynctask.exports import key_ranges

ROWS = sa.Table(
    "exported_rows",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("sku", sa.String(20)),
    sa.Column("price", sa.Numeric(8, 2)),
)
COUNT = 997


@pytest.fixture
def connection(world: World) -> Iterator[sa.Connection]:
    with world.app().ledger.database.engine.connect() as found:
        ROWS.create(found)
        # Ids with gaps, texts of which each third is one of a few, and some without.
        rows = [{"id": n * n, "sku": None if n % 10 == 0 else f"S{n % 3 and n}", "price": n / 4} for n in range(COUNT)]
        found.execute(ROWS.insert(), rows)
        yield found


@pytest.mark.parametrize("name", ["id", "sku"])
def test_every_row_is_in_one_shard_and_the_shards_are_even(connection: sa.Connection, name: str) -> None:
    column = ROWS.c[name]
    shards = key_ranges(connection, column, shards=20)
    parts = [in_range(connection, column, shard) for shard in shards]
    found = [row for part in parts for row in part]
    assert len(found) == len(set(found)) == connection.scalar(sa.select(sa.func.count(column)))
    if name == "id":
        assert (len(shards), {len(part) for part in parts}) == (20, {49, 50})
        assert found == sorted(found)
    else:
        assert 10 < len(shards) <= 20
        assert sorted(map(len, parts))[-1] < 400, "a third of the rows has one key"


def in_range(connection: sa.Connection, column: Any, shard: dict[str, Any]) -> list[int]:
    chosen = sa.select(ROWS.c.id).where(column.between(shard["from"], shard["to"])).order_by(column, ROWS.c.id)
    return list(connection.scalars(chosen))


def test_only_some_rows_or_none_or_fewer_than_shards(connection: sa.Connection) -> None:
    assert key_ranges(connection, ROWS.c.id, ROWS.c.id < 0) == []
    assert key_ranges(connection, ROWS.c.id, ROWS.c.id < 5, shards=20) == [
        {"from": 0, "to": 0}, {"from": 1, "to": 1}, {"from": 4, "to": 4},
    ]  # fmt: skip
    assert len(key_ranges(connection, ROWS.c.id, ROWS.c.id < 10_000, ROWS.c.id > 100, shards=3)) == 3


def test_keys_that_no_shard_can_hold_are_refused(connection: sa.Connection) -> None:
    with pytest.raises(ValueError, match="whole number or a text"):
        key_ranges(connection, ROWS.c.price)
    with pytest.raises(ValueError, match="1 or more"):
        key_ranges(connection, ROWS.c.id, shards=0)
