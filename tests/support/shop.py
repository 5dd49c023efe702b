"""An application for tests that start real processes: what its jobs do is decided from outside, by the file GATE."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, Field

from asynctask import AsyncTask, NormalException

app = AsyncTask()


class Product(BaseModel):
    sku: str = Field(max_length=40)
    quantity: int = Field(1, ge=1, le=100, title="Quantity")


@app.worker(retry=0, search=["sku", "quantity"])
def enroll(item: Product) -> dict[str, str]:
    """Enrol a product in the promotion. A SKU that begins with NO is refused, one that begins with BUG breaks, and one that
    begins with JSON breaks in a library."""
    if item.sku.startswith("NO"):
        raise NormalException("seller is not qualified")
    if item.sku.startswith("BUG"):
        raise RuntimeError(f"cannot read {item.sku}")
    if item.sku.startswith("JSON"):
        json.loads(item.sku)
    return {"enrolled": item.sku}


@app.worker(retry=0, rate="1000/s")
def gated(item: Product) -> None:
    """Do it once the gate is as far as this product's quantity."""
    gate, pause = Path(os.environ["GATE"]), threading.Event()
    while int(gate.read_text() or 0) < item.quantity:
        pause.wait(0.02)
    if item.sku.startswith("NO"):
        raise NormalException("seller is not qualified")


@app.export(columns=["sku"], retry=0)
def listed(shard: object) -> Iterator[list[str]]:
    """One row for a shard; one that begins with BUG breaks."""
    if str(shard).startswith("BUG"):
        raise RuntimeError(f"cannot read {shard}")
    yield [str(shard)[:100]]
