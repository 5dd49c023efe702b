"""The tasks of the project, which ``autodiscover_tasks()`` finds."""

from typing import Any

from celery import shared_task


class SoldOutError(Exception):
    """Nothing is left of a product: a business refusal."""


@shared_task(failed_on=(SoldOutError,))
def enroll(product: dict[str, Any]) -> None:
    """Enrols a product: ``{"sku": ..., "stock": ...}``."""
    from django_shop.models import Product  # Django's applications are ready when a task runs

    if int(product["stock"]) == 0:
        raise SoldOutError(f"{product['sku']} is sold out")
    Product.objects.create(sku=product["sku"])
