"""The OpenAPI document: what APIFlask collects from the routes, and what only we can know of them."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from apiflask import APIFlask

from asynctask.app import AsyncTask
from asynctask.bulk.readers import FORMATS
from webapi.answers import DryRunResult, ProblemDetails
from webapi.incoming import LATER, FileSubmission, JsonSubmission
from webapi.problems import MEDIA_TYPE
from webapi.submissions import KEY_PATTERN, RAW

__all__ = ["register"]

_METHODS: Final = frozenset({"get", "post", "put", "patch", "delete"})
_REF: Final = "#/components/schemas/{model}"
_PROBLEM: Final = {MEDIA_TYPE: {"schema": {"$ref": _REF.format(model="ProblemDetails")}}}


def register(flask_app: APIFlask, app: AsyncTask) -> None:
    """Completes the document of ``flask_app``, which serves ``app``, when it is made."""
    flask_app.config.update(
        AUTO_SERVERS=False,
        AUTO_VALIDATION_ERROR_RESPONSE=False,
        AUTO_404_RESPONSE=False,
        INFO={"description": "Hand in a list, and have every item accounted for."},
    )
    flask_app.spec_processor(partial(_complete, app))


def _complete(app: AsyncTask, spec: dict[str, Any] | str) -> dict[str, Any] | str:
    assert isinstance(spec, dict)
    schemas = spec.setdefault("components", {}).setdefault("schemas", {})
    for model in (ProblemDetails, JsonSubmission, FileSubmission, DryRunResult):
        schema = model.model_json_schema(ref_template=_REF)
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    schemas["FileSubmission"] = _with_file(schemas["FileSubmission"])
    for name in ("JsonSubmission", "FileSubmission"):
        if app.workers:
            schemas[name]["properties"]["worker"]["enum"] = sorted(app.workers)
    for schema in schemas.values():
        _drop_later(schema)
    for path, operations in spec["paths"].items():
        for method, operation in operations.items():
            if method in _METHODS:
                _complete_operation(path, operation)
    submit = spec["paths"]["/api/tasks"]["post"]
    submit["requestBody"] = _submission_body()
    submit["responses"]["200"] = {
        "description": "Of a dry run: what the list would come to",
        "content": {"application/json": {"schema": {"$ref": _REF.format(model="DryRunResult")}}},
    }
    submit["parameters"].append(_idempotency_key())
    return spec


def _drop_later(schema: dict[str, Any]) -> None:
    properties = schema.get("properties", {})
    for name in [name for name, field in properties.items() if LATER in field]:
        del properties[name]


def _with_file(schema: dict[str, Any]) -> dict[str, Any]:
    properties = dict(schema["properties"])
    # On the wire every field of a form is text; an object is its JSON.
    properties["columns"] = {"type": "string", "contentMediaType": "application/json", "title": "Columns"}
    properties["file"] = {"type": "string", "format": "binary", "description": f"The list: {', '.join(FORMATS)}."}
    return {**schema, "properties": properties, "required": ["worker", "file"]}


def _submission_body() -> dict[str, Any]:
    return {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": _REF.format(model="JsonSubmission")}},
            "multipart/form-data": {"schema": {"$ref": _REF.format(model="FileSubmission")}},
            **{
                kind: {"schema": {"type": "string", "description": "The rows as they stand; options in the query."}}
                for kind in RAW
            },
        },
    }


def _idempotency_key() -> dict[str, Any]:
    return {
        "in": "header",
        "name": "Idempotency-Key",
        "required": False,
        "description": "A key of your choice: the same request with the same key makes one Task only.",
        "schema": {"type": "string", "pattern": KEY_PATTERN},
    }


def _complete_operation(path: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    if operation.get("parameters") or "requestBody" in operation or path == "/api/tasks":
        responses.setdefault("422", {"description": "Something in the request is wrong; `errors` says what"})
    if "{" in path:
        responses.setdefault("404", {"description": "There is no such thing"})
    if "requestBody" in operation:
        operation["requestBody"]["required"] = True
    for status, response in responses.items():
        if status.startswith(("4", "5")):
            response["content"] = _PROBLEM
        elif status == "304":
            response.pop("content", None)
    operation["parameters"] = [p for p in operation.get("parameters", ()) if LATER not in p["schema"]]
    for parameter in operation["parameters"]:
        if parameter["in"] == "path" and parameter["name"] == "task_id":
            parameter["schema"] = {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}
