"""The web API and its page; :func:`create_app` makes it for an application."""

from __future__ import annotations

from apiflask import APIFlask

from asynctask._version import __version__
from asynctask.app import AsyncTask
from webapi import health, openapi, operations, pages, problems, reading, reports, security, tasks, workers
from webapi.context import EXTENSION

__all__ = ["create_app"]


def create_app(app: AsyncTask, *, host: str | None = None) -> APIFlask:
    """A Flask application that serves ``app``. Several can share a process.

    ``host``: the address or name that it is served at, by default ``app.config.host``. It also answers to the names of
    ``app.config.allowed_hosts`` and to loopback names (:class:`webapi.security.AllowedHosts`).

    It starts nothing: call ``app.start_services()`` in the process that answers, see :mod:`webapi.server`.
    """
    flask_app = APIFlask("webapi", title="AsyncTask", version=__version__, docs_path=None)
    flask_app.extensions[EXTENSION] = app
    reading.register(flask_app, app)
    problems.register(flask_app)
    security.register_hosts(flask_app, app.config, app.config.host if host is None else host)
    security.register(flask_app)
    openapi.register(flask_app, app)
    reports.register(flask_app, app.config.web_threads)
    for each in (tasks, reports, workers, operations, health, pages):
        flask_app.register_blueprint(each.blueprint)
    return flask_app
