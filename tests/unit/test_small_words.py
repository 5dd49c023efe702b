"""Details of what people are told: signs, examples, numbers of things, and the order of what is wrong."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from typing import Any

import pytest
from pydantic import BaseModel, Field, TypeAdapter

from asynctask.cli.tasks import _knob
from asynctask.errors import InputError
from asynctask.lists.coerce import Unclear, coercer_for, span_text
from asynctask.lists.items import ItemShape, Rejected
from asynctask.lists.options import checked_knobs
from asynctask.lists.problems import say
from asynctask.lists.readers import RawRow
from asynctask.lists.written_cells import csv_cell


@pytest.mark.parametrize(
    "span", [timedelta(hours=-1.5), timedelta(days=-2, microseconds=5), timedelta(days=40), timedelta(0)]
)
def test_a_duration_of_a_report_comes_back_as_it_was(span: timedelta) -> None:
    coerce = coercer_for(timedelta, sheet=True)
    assert coerce is not None
    assert TypeAdapter(timedelta).validate_python(coerce(csv_cell(span))) == span


def test_a_negative_duration_is_written_as_spreadsheets_do() -> None:
    assert span_text(timedelta(hours=-1, minutes=-30)) == csv_cell(-timedelta(minutes=90)) == "-1:30:00"


@pytest.mark.parametrize("kind", [int, float])
def test_a_percentage_in_words_is_told_what_to_write(kind: Any) -> None:
    coerce = coercer_for(kind, sheet=True)
    assert coerce is not None
    for text in ("25%", "12.5 %", "２５％"):
        with pytest.raises(Unclear, match="percent"):
            coerce(text)
    assert "0.25" in str(say("percent", {}, "en"))


@pytest.mark.parametrize(("kind", "example"), [(date, "2026-03-05"), (datetime, "2026-03-05 14:30")])
@pytest.mark.parametrize("value", ["soon", 7, "3/4/2026"])
def test_a_date_and_time_is_told_an_example_with_a_time(kind: Any, example: str, value: Any) -> None:
    coerce = coercer_for(kind, sheet=True)
    assert coerce is not None
    with pytest.raises(Unclear) as caught:
        coerce(value)
    for locale in ("en", "zh_CN", "ja"):
        text = str(say(caught.value.text, {}, locale))
        assert example in text
        assert ("14:30" in text) == (kind is datetime)


def test_of_one_thing_english_speaks_in_the_singular() -> None:
    assert say("string_too_short", {"min_length": 1}, "en") == "must have at least 1 character"
    assert say("too_short", {"min_length": 1}, "en") == "must have at least 1 entry"
    assert say("string_too_short", {"min_length": 11}, "en") == "must have at least 11 characters"
    assert str(say("list.rows_rejected", {"rejected": 1, "total": 3}, "en")).startswith("1 of 3 rows is rejected")
    assert str(say("list.rows_rejected", {"rejected": 2, "total": 3}, "en")).startswith("2 of 3 rows are rejected")
    assert say("value_error", {"words": "1 rows"}, "en") == "1 rows", "what others say is theirs"


class Order(BaseModel):
    quantity: int
    sku: str = Field(max_length=3)
    price: float = Field(gt=0)
    note: str


def test_what_is_wrong_with_a_row_stands_in_the_order_of_its_columns() -> None:
    shape = ItemShape(Order)
    binding = shape.bind(["price", "sku", "quantity", "note"])
    found = shape.validate(RawRow(2, {"price": -1, "sku": "ABCD", "quantity": "many", "note": None}), binding)
    assert isinstance(found, Rejected)
    assert [problem.column for problem in found.problems] == ["price", "sku", "quantity", "note"]


def test_only_knobs_that_turn_are_offered() -> None:
    with pytest.raises(InputError, match=r"there are interval, parallel, priority, start_at, title, tolerated_failures$"):
        checked_knobs({"foo": "1"})
    said = dict(map(_knob, ("parallel=none", "interval=0.5", "tolerated_failures=5%", "priority=ADMIN_HIGH")))
    found = checked_knobs(said, as_text=True)
    assert found == {"parallel": None, "interval": 0.5, "tolerated_failures": "5%", "priority": 120}
