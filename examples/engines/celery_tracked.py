"""The same shop, tracked: ``celery -A celery_tracked:celery worker`` and ``asynctask -A celery_tracked:app web``."""

from celery_shop import celery

from asynctask import AsyncTask
from asynctask.integrations.celery import attach

__all__ = ["app", "celery"]

app = AsyncTask()
attach(celery, app)
