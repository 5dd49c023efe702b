"""A small shop on Celery that knows nothing of AsyncTask: ``celery -A celery_shop worker``."""

import os
from pathlib import Path
from typing import Any

from celery import Celery

celery = Celery("shop", broker=os.environ.get("SHOP_BROKER", "redis://localhost:6379/0"))
celery.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True)


class SoldOutError(Exception):
    """Nothing is left of a product."""


@celery.task(name="enroll", autoretry_for=(ConnectionError,), max_retries=3, default_retry_delay=1)
def enroll(product: dict[str, Any]) -> None:
    """Enrols a product: ``{"sku": ..., "stock": ...}``."""
    if int(product["stock"]) == 0:
        raise SoldOutError(f"{product['sku']} is sold out")
    with Path(os.environ.get("SHOP_BOOK", "enrolled.txt")).open("a") as book:
        book.write(f"{product['sku']}\n")
