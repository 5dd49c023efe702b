"""Rows that repeat an earlier one: what counts as the same, which row is named, and how much memory it takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from asynctask.errors import InputError
from asynctask.ledger.base import NewItem
from asynctask.lists.items import ItemShape, Rejected
from asynctask.lists.problems import render
from asynctask.lists.readers import RawRow
from asynctask.lists.rows import FirstRows, checked, refuse_absent


class Item(BaseModel):
    sku: str = Field(title="Article", alias="SKU")
    region: str | None = None
    price: Decimal = Decimal(1)
    at: datetime | None = None
    count: int = 0


SHAPE = ItemShape(Item)
HEADERS = ("Article", "region", "price", "at", "count")


def outcome(rows: Sequence[dict[str, Any]], *unique: str, sheet: bool = True, after: int = 0) -> dict[int, int]:
    """Row -> the first row that it repeats, of every refused one."""
    binding = SHAPE.bind(HEADERS) if sheet else None
    raws = [RawRow(number, dict.fromkeys(HEADERS) | row if sheet else row) for number, row in enumerate(rows, 2)]
    found = checked(lambda n: (raw for raw in raws if raw.number > n), SHAPE, binding, unique, after)
    refused = [row for row in found if isinstance(row, Rejected)]
    assert all(problem.code == "duplicate_in_upload" for row in refused for problem in row.problems), refused
    return {row.row: row.problems[0].params["first"] for row in refused}


def test_the_second_and_every_later_row_names_the_first() -> None:
    assert outcome([{"Article": "a"}, {"Article": "b"}, {"Article": "a"}, {"Article": "a"}], "sku") == {4: 2, 5: 2}


def test_several_fields_are_compared_together() -> None:
    rows = [{"Article": "a", "region": "x"}, {"Article": "a", "region": "y"}, {"Article": "a", "region": "x"}]
    assert outcome(rows, "sku", "region") == {4: 2}
    glued = [{"Article": "ab", "region": "c"}, {"Article": "a", "region": "bc"}]
    assert outcome(glued, "sku", "region") == {}


def test_values_are_compared_as_the_worker_would_be_given_them() -> None:
    assert outcome([{"Article": "a", "count": "1,200"}, {"Article": "b", "count": 1200}], "count") == {3: 2}
    assert outcome([{"Article": "a", "price": "1.0"}, {"Article": "b", "price": "1.00"}], "price") == {3: 2}
    east = datetime(2026, 3, 5, 14, 30, tzinfo=timezone(timedelta(hours=8)))
    same = east.astimezone(UTC)
    assert outcome([{"Article": "a", "at": east}, {"Article": "b", "at": same}], "at") == {3: 2}
    assert outcome([{"Article": 123}, {"Article": "123"}], "sku") == {3: 2}
    assert outcome([{"Article": "a"}, {"Article": "A"}, {"Article": "a "}], "sku") == {}


def test_a_row_without_a_value_is_not_compared_and_a_default_is_none() -> None:
    assert outcome([{"Article": "a"}, {"Article": "b"}], "region") == {}
    assert outcome([{"Article": "a"}, {"Article": "b"}], "price") == {}, "both have the default"
    assert outcome([{"Article": "a", "price": 1}, {"Article": "b", "price": 1}], "price") == {3: 2}
    json: list[dict[str, Any]] = [
        {"SKU": "a"},
        {"sku": "b", "count": " "},
        {"sku": "c", "count": 0},
        {"sku": "d", "count": "0"},
    ]
    assert outcome(json, "count", sheet=False) == {5: 4}
    assert outcome([{"SKU": "a"}, {"sku": "a"}], "sku", sheet=False) == {3: 2}


def test_a_row_that_is_refused_for_another_reason_takes_nothing_from_a_later_one() -> None:
    shape, binding = SHAPE, SHAPE.bind(HEADERS)
    raws = [RawRow(2, {"Article": "a", "count": "many"}), RawRow(3, {"Article": "a", "count": 1})]
    first, second = checked(lambda _: iter(raws), shape, binding, ["sku"])
    assert isinstance(first, Rejected)
    assert isinstance(second, NewItem)


def test_the_problem_names_column_value_and_the_first_row() -> None:
    raws = [RawRow(n, {"Article": "a", "region": "x"}) for n in (2, 7)]
    _, second = checked(lambda _: iter(raws), SHAPE, SHAPE.bind(HEADERS), ["sku", "region"])
    assert isinstance(second, Rejected)
    (problem,) = second.problems
    assert (problem.row, problem.column, problem.code, problem.value) == (7, "Article", "duplicate_in_upload", "a")
    assert problem.message == (
        "'Article', 'region' together are the same as in row 2; change one, or delete one of the two rows"
    )
    assert render(problem, "zh_CN") == "'Article'、'region' 的组合与第 2 行相同，请修改，或删除其中一行"
    assert second.values == {"Article": "a", "region": "x"}


def test_items_of_a_program_may_be_models_or_anything_without_a_model() -> None:
    models = [RawRow(n, Item(SKU="a", count=n)) for n in (1, 2)]
    rows = list(checked(lambda _: iter(models), SHAPE, None, ["sku"]))
    assert [type(row) for row in rows] == [NewItem, Rejected]
    plain = [RawRow(1, {"k": 1}), RawRow(2, {"k": "1"}), RawRow(3, {"k": 1}), RawRow(4, 7), RawRow(5, 7), RawRow(6, {})]
    kinds = [type(row) for row in checked(lambda _: iter(plain), ItemShape(None), None, ["k"])]
    assert kinds == [NewItem, NewItem, Rejected, NewItem, NewItem, NewItem]


def test_without_a_model_a_column_that_the_sheet_does_not_have_is_refused() -> None:
    shape = ItemShape(None, {"Artikel": "sku"})
    binding = shape.bind(["Artikel", "n"])
    refuse_absent(["sku", "n"], ["Artikel", "n"], binding, shape)
    with pytest.raises(InputError, match="no column 'Artikel'") as caught:
        refuse_absent(["Artikel"], ["Artikel", "n"], binding, shape)
    assert caught.value.code == "unknown_column"


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(0, 60))
def test_from_wherever_a_split_is_taken_up_the_same_rows_are_refused(keys: list[int], after: int) -> None:
    rows = [{"Article": str(key)} for key in keys]
    whole = outcome(rows, "sku")
    assert outcome(rows, "sku", after=after) == {row: first for row, first in whole.items() if row > after}
    first: dict[int, int] = {}
    assert whole == {n: first[key] for n, key in enumerate(keys, 2) if first.setdefault(key, n) != n}


@given(st.lists(st.binary(max_size=3)))
def test_first_rows_is_a_dict_that_keeps_the_first(keys: list[bytes]) -> None:
    mine = FirstRows()
    model: dict[bytes, int] = {}
    for row, key in enumerate(keys, 1):
        assert mine.put(key, row) == model.setdefault(key, row)
    assert len(mine) == len(model)


def test_thirty_thousand_rows_take_a_few_megabytes_and_none_is_lost_on_the_way() -> None:
    tracemalloc.start()
    try:
        rows = FirstRows()
        assert all(rows.put(b"%d" % n, n) == n for n in range(1, 30_001))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3_500_000, "60 bytes a row, and the table that it grew from"
    assert all(rows.put(b"%d" % n, 7) == n for n in range(1, 30_001, 97))
