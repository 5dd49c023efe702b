"""The web API and its page; :func:`create_app` makes it for an application."""

from __future__ import annotations

from typing import Any, Final

from apiflask import APIFlask

from asynctask._version import __version__
from asynctask.access import User
from asynctask.app import AsyncTask
from webapi import access, caching, openapi, operations, pages, problems, reading, reports, security, tasks, workers
from webapi.context import EXTENSION, Slots, register_slots

__all__ = ["User", "create_app"]

_NO_FILES: Final[Any] = {"static_folder": None}
"""Flask serves no files by itself (:mod:`webapi.caching` does); APIFlask does not declare that it may be told so."""


def create_app(
    app: AsyncTask,
    *,
    authorize: security.Authorize | None = None,
    allow_unprotected: bool | None = None,
    host: str | None = None,
    slots: Slots | None = None,
) -> APIFlask:
    """A Flask application that serves ``app``. Several can share a process.

    ``authorize``: called with each request (a ``flask.Request``, whose body may not have been received yet), returns the
    :class:`User` that it is from, or None for nobody; the users of ``app.config.tokens`` are known beside these. Without
    either, it answers only to this machine, unless ``allow_unprotected`` (by default ``app.config.allow_unprotected``).
    ``host``: the address or name that it is served at, by default ``app.config.host``. It also answers to the names of
    ``app.config.allowed_hosts`` and to loopback names (:class:`webapi.security.AllowedHosts`). ``slots``: how many
    requests may take long at a time, by default those of a server that holds a thread for each
    of its ``app.config.web_threads`` (:meth:`webapi.context.Slots.of_threads`).

    It starts nothing: call ``app.start_services()`` in the process that answers, see :mod:`webapi.server`.
    """
    flask_app = APIFlask("webapi", title="AsyncTask", version=__version__, docs_path=None, spec_path=None, **_NO_FILES)
    flask_app.extensions[EXTENSION] = app
    caching.register(flask_app)
    reading.register(flask_app, app)
    problems.register(flask_app)
    security.register_hosts(flask_app, app.config, app.config.host if host is None else host)
    if allow_unprotected is None:
        allow_unprotected = app.config.allow_unprotected
    origins = app.config.origins()
    security.register_origins(flask_app, origins)
    security.register_users(flask_app, app.config, authorize, allow_unprotected=allow_unprotected)
    security.register(flask_app, origins)
    access.register(flask_app)
    openapi.register(flask_app, app)
    register_slots(flask_app, slots or Slots.of_threads(app.config.web_threads))
    reading.register_heads(flask_app)
    workers.register(flask_app)
    for each in (tasks, reports, workers, operations, pages):
        flask_app.register_blueprint(each.blueprint)
    flask_app.register_blueprint(tasks.exports)
    flask_app.register_blueprint(operations.health)
    return flask_app
