"""A small shop on RQ, tracked: with the ``job`` of the attached engine instead of RQ's ``@job``.

``rq worker -c rq_tracked -S json -w asynctask.integrations.rq.TrackedWorker`` and ``asynctask -A rq_tracked:app web``.
"""

import os
from pathlib import Path
from typing import Any

from redis import Redis

from asynctask import AsyncTask
from asynctask.integrations.rq import attach

REDIS_URL = os.environ.get("SHOP_BROKER", "redis://localhost:6379/0")
app = AsyncTask()
rq = attach(Redis.from_url(REDIS_URL), app, serializer="json")


class SoldOutError(Exception):
    """Nothing is left of a product."""


@rq.job("default")
def enroll(product: dict[str, Any]) -> None:
    """Enrols a product: ``{"sku": ..., "stock": ...}``."""
    if int(product["stock"]) == 0:
        raise SoldOutError(f"{product['sku']} is sold out")
    with Path(os.environ.get("SHOP_BOOK", "enrolled.txt")).open("a") as book:
        book.write(f"{product['sku']}\n")
