"""A small Django project on Celery, tracked. Its programs know its Celery application, so ``shared_task`` finds it."""

from django_shop.celery import app as celery_app

__all__ = ["celery_app"]
