"""A small shop on Dramatiq that knows nothing of AsyncTask: ``dramatiq dramatiq_shop``."""

import os
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker

broker = RedisBroker(url=os.environ.get("SHOP_BROKER", "redis://localhost:6379/0"))
dramatiq.set_broker(broker)


class SoldOutError(Exception):
    """Nothing is left of a product."""


@dramatiq.actor(max_retries=3, throws=SoldOutError)
def enroll(product: dict[str, Any]) -> None:
    """Enrols a product: ``{"sku": ..., "stock": ...}``."""
    if int(product["stock"]) == 0:
        raise SoldOutError(f"{product['sku']} is sold out")
    with Path(os.environ.get("SHOP_BOOK", "enrolled.txt")).open("a") as book:
        book.write(f"{product['sku']}\n")
