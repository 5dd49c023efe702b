"""The shop of ``examples/promotions.py`` on RQ: what ``asynctask demo --engine rq`` runs.

Its three functions are jobs here, and retried by RQ's rules. Both examples must be importable (``PYTHONPATH``):

    rq worker -c rq_promotions -S json -w asynctask.integrations.rq.TrackedWorker
    asynctask -A rq_promotions:app web
"""

import os
from collections.abc import Iterator
from typing import Any

import promotions
from redis import Redis
from rq import Retry

from asynctask import AsyncTask
from asynctask.integrations.rq import attach

app = AsyncTask()
rq = attach(Redis.from_url(os.environ.get("PROMOTIONS_BROKER", "redis://localhost:6379/0")), app, serializer="json")


@rq.job("default", retry=Retry(max=3, interval=1))
def enroll_product(item: promotions.Product) -> dict[str, Any]:
    """Enrols one product in a promotion."""
    return promotions.enroll_product(item)


@rq.job("default")
def create_campaign(item: promotions.Campaign) -> dict[str, Any]:
    """Creates one campaign."""
    return promotions.create_campaign(item)


@rq.job("default", retry=Retry(max=3), export_columns=promotions.PRICE_COLUMNS)
def export_price_list(shard: dict[str, int]) -> Iterator[tuple[Any, ...]]:
    """The rows of one shard."""
    return promotions.export_price_list(shard)
