"""For another WSGI server: ``gunicorn --worker-class gthread --threads 8 'webapi.wsgi:load()'``."""

from __future__ import annotations

import atexit
import importlib
import os
from collections.abc import Mapping

from apiflask import APIFlask

from asynctask.app import AsyncTask
from asynctask.errors import ConfigError
from webapi import create_app

VARIABLE = "ASYNCTASK_APP"


def load(environ: Mapping[str, str] | None = None) -> APIFlask:
    """Serves the application named by ``ASYNCTASK_APP`` (``module:attribute``) and starts its services.

    Call it in the process that answers requests, after any fork (no ``--preload``): threads do not survive a fork.
    Raises :class:`ConfigError` if the variable is missing or names no AsyncTask.
    """
    app = _find((os.environ if environ is None else environ).get(VARIABLE, ""))
    app.ensure_schema()
    app.start_services()
    atexit.register(app.stop_services)
    return create_app(app)


def _find(target: str) -> AsyncTask:
    module, _, attribute = target.partition(":")
    if not module or not attribute:
        raise ConfigError(f"{VARIABLE} must be module:attribute, shop.tasks:app for instance, not {target!r}")
    found = getattr(importlib.import_module(module), attribute, None)
    if not isinstance(found, AsyncTask):
        raise ConfigError(f"{VARIABLE}: {attribute!r} of module {module!r} is no AsyncTask")
    return found
