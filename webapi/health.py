"""/healthz and /readyz: liveness and readiness."""

from __future__ import annotations

import logging
from typing import Final

from apiflask import APIBlueprint
from flask import Response

from asynctask.errors import BrokerUnavailable, SchemaOutdated, Unavailable
from webapi.context import asynctask_app
from webapi.json_body import json_response
from webapi.problems import problem_response, public_message
from webapi.shapes import Health, NoQuery

__all__ = ["blueprint"]

_log = logging.getLogger(__name__)

blueprint: Final = APIBlueprint("health", __name__, tag="Health")


@blueprint.get("/healthz")
@blueprint.input(NoQuery, location="query", arg_name="query")
@blueprint.output(Health)
@blueprint.doc(operation_id="healthz")
def healthz(query: NoQuery) -> Response:
    """The process lives"""
    return json_response({"status": "ok"}, cache="no-store")


@blueprint.get("/readyz")
@blueprint.input(NoQuery, location="query", arg_name="query")
@blueprint.output(Health)
@blueprint.doc(operation_id="readyz", responses=[503])
def readyz(query: NoQuery) -> Response:
    """The database answers, its schema is the one that is needed, and what is handed in can be kept"""
    try:
        asynctask_app().ensure_schema()
        asynctask_app().tasks(limit=1)
        asynctask_app().check_ready()
    except (SchemaOutdated, Unavailable) as error:
        code = "unavailable" if isinstance(error, BrokerUnavailable) else error.code
        _log.error("not ready: %s", error)
        return problem_response(503, public_message(error), code=code, headers={"Retry-After": "2"})
    return json_response({"status": "ok"}, cache="no-store")
