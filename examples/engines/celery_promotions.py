"""The shop of ``examples/promotions.py`` on Celery: what ``asynctask demo --engine celery`` runs.

Its three functions are tasks here, and retried by Celery's rules. Both examples must be importable (``PYTHONPATH``):

    celery -A celery_promotions:celery worker
    asynctask -A celery_promotions:app web
"""

import os
from collections.abc import Iterator
from typing import Any

import promotions
from celery import Celery

from asynctask import AsyncTask
from asynctask.integrations.celery import attach

celery = Celery("promotions", broker=os.environ.get("PROMOTIONS_BROKER", "redis://localhost:6379/0"))
celery.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True)
app = AsyncTask()
attach(celery, app)


@celery.task(name="enroll_product", autoretry_for=(ConnectionError,), max_retries=3, default_retry_delay=1)
def enroll_product(item: promotions.Product) -> dict[str, Any]:
    """Enrols one product in a promotion."""
    return promotions.enroll_product(item)


@celery.task(name="create_campaign")
def create_campaign(item: promotions.Campaign) -> dict[str, Any]:
    """Creates one campaign."""
    return promotions.create_campaign(item)


@celery.task(name="export_price_list", export_columns=promotions.PRICE_COLUMNS)
def export_price_list(shard: dict[str, int]) -> Iterator[tuple[Any, ...]]:
    """The rows of one shard."""
    return promotions.export_price_list(shard)
