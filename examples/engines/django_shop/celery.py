"""The project's Celery application: ``celery -A django_shop worker``, ``asynctask -A django_shop.celery:tracked web``."""

import os

from celery import Celery

from asynctask import AsyncTask
from asynctask.integrations.celery import attach

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "django_shop.settings")

app = Celery("django_shop")  # `app`, as Celery's command and Django projects have it
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()

tracked = AsyncTask()
attach(app, tracked)
