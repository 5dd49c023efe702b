"""The same shop, tracked: ``dramatiq dramatiq_tracked:broker`` and ``asynctask -A dramatiq_tracked:app web``."""

from dramatiq_shop import broker

from asynctask import AsyncTask
from asynctask.integrations.dramatiq import attach

__all__ = ["app", "broker"]

app = AsyncTask()
attach(broker, app)
