"""The shop of ``examples/promotions.py`` on Dramatiq: what ``asynctask demo --engine dramatiq`` runs.

Its three functions are actors here, and retried by Dramatiq's rules. Both examples must be importable (``PYTHONPATH``):

    dramatiq dramatiq_promotions:broker
    asynctask -A dramatiq_promotions:app web
"""

import os
from collections.abc import Iterator
from typing import Any

import dramatiq
import promotions
from dramatiq.brokers.redis import RedisBroker

from asynctask import AsyncTask
from asynctask.integrations.dramatiq import attach

broker = RedisBroker(url=os.environ.get("PROMOTIONS_BROKER", "redis://localhost:6379/0"))
app = AsyncTask()
attach(broker, app)
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=3, min_backoff=200)
def enroll_product(item: promotions.Product) -> dict[str, Any]:
    """Enrols one product in a promotion."""
    return promotions.enroll_product(item)


@dramatiq.actor(max_retries=3)
def create_campaign(item: promotions.Campaign) -> dict[str, Any]:
    """Creates one campaign."""
    return promotions.create_campaign(item)


@dramatiq.actor(max_retries=3, export_columns=promotions.PRICE_COLUMNS)
def export_price_list(shard: dict[str, int]) -> Iterator[tuple[Any, ...]]:
    """The rows of one shard."""
    return promotions.export_price_list(shard)
