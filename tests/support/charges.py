"""An item whose model changes, hides and shows its values in other forms than it is given them."""

from __future__ import annotations

import datetime as dt
from typing import Any
from uuid import UUID, uuid4

from pydantic import BaseModel, Field, SecretStr, field_serializer, field_validator

GIVEN: dict[str, Any] = {"price": 10, "password": "hunter2", "day": "2026-03-05", "note": "kept"}
SHOWN = {**GIVEN, "password": "**********"}
CHARGED = {"kind": "Charge", "cents": 1000, "opened": True, "day": "2026-03-05", "note": "kept"}


class Charge(BaseModel):
    """A price in whole units becomes cents, once."""

    price: int
    password: SecretStr
    day: dt.date
    note: str = Field("", exclude=True)
    ref: UUID = Field(default_factory=uuid4)

    @field_validator("price")
    @classmethod
    def in_cents(cls, value: int) -> int:
        return value * 100

    @field_serializer("day")
    def as_people_write_it(self, value: dt.date) -> str:
        return value.strftime("%d/%m/%Y")


def charge(item: Any) -> dict[str, Any]:
    """What a worker got."""
    return {
        "kind": type(item).__name__,
        "cents": item.price,
        "opened": item.password.get_secret_value() == GIVEN["password"],
        "day": item.day.isoformat(),
        "note": item.note,
    }


def check_events(events: list[dict[str, Any]]) -> None:
    """That the worker got the item as it was given, and that people see it so, but for the secret."""
    assert [event["result"] for event in events] == [CHARGED] * len(events)
    for event in events:
        params = dict(event["params"])
        UUID(params.pop("ref"))
        assert params == SHOWN
    assert GIVEN["password"] not in str(events)


def check_lone(event: dict[str, Any]) -> None:
    """That people see no secret of a job that an engine's own program sent, whose arguments nobody validates."""
    assert event["params"] == [SHOWN]
    assert GIVEN["password"] not in str(event)
