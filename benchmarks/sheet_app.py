"""The application that takes the sheet: a module of its own, for the child that splits loads it by its name."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

from pydantic import BaseModel

from asynctask import AsyncTask

__all__ = ["Order", "app"]

app = AsyncTask(app="benchmarks.sheet_app:app")


class Order(BaseModel):
    """One row."""

    order_no: str
    title: str
    quantity: int
    price: Decimal
    day: date
    express: bool
    note: str


def order(item: Order) -> None:
    """A job that does nothing."""


app.worker(order, retry=0)
