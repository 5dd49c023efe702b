"""Django's settings, as few as the example needs."""

import os

SECRET_KEY = "an example"  # noqa: S105
INSTALLED_APPS = ["django_shop"]
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ.get("SHOP_DATABASE", "shop.sqlite3")},
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True

CELERY_BROKER_URL = os.environ.get("SHOP_BROKER", "redis://localhost:6379/0")
CELERY_TASK_IGNORE_RESULT = True
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
