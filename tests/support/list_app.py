"""An application with two workers whose items differ, for the page of a new list."""

from __future__ import annotations

from pydantic import BaseModel, Field

from asynctask import AsyncTask

app = AsyncTask()


class Product(BaseModel):
    sku: str = Field(max_length=40)
    quantity: int = Field(ge=1, le=100, title="Quantity")
    colour: str | None = None


class Budget(BaseModel):
    campaign: str
    amount: float


@app.worker(retry=0)
def enroll(item: Product) -> None:
    """Enrol a product in the promotion."""


@app.worker(retry=0)
def set_budget(item: Budget) -> None:
    """Set the budget of a campaign."""
