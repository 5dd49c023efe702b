"""The OpenAPI document: completes what APIFlask collects from the routes."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, cast
from urllib.parse import quote

from apiflask import APIBlueprint, APIFlask
from flask import Response, current_app, request

from asynctask.app import AsyncTask
from asynctask.exports.rows import FORMATS as EXPORTED
from asynctask.lists.options import NAME_SCHEMA, NAMES, NUL_FREE, CommonOptions
from asynctask.lists.readers.opening import FORMATS
from asynctask.worker import Worker
from webapi.context import json_response, json_text
from webapi.problems import MEDIA_TYPE
from webapi.shapes import (
    DryRunResult,
    FileSubmission,
    FileToAdd,
    FileToPreview,
    JobsSubmission,
    JsonSubmission,
    NewItems,
    ProblemDetails,
)
from webapi.tasks import KEY_PATTERN, RAW

_METHODS: Final = frozenset({"get", "post", "put", "patch", "delete"})
_REF: Final = "#/components/schemas/{model}"
_NO_NUL: Final = {"pattern": NUL_FREE}
_SHEETS: Final = (
    "text/csv",
    "text/tab-separated-values",
    "application/x-ndjson",
    "application/json",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
    "application/vnd.ms-excel",
    "application/vnd.oasis.opendocument.spreadsheet",
)
COMMON_RESPONSES: Final = {
    "400": "The request cannot be read",
    "403": "The user lacks the right, or the request is a page's of another site",
    "408": "The request came too slowly",
    "413": "The body is too long",
    "414": "The first line of the request is too long",
    "421": "The server does not answer to this host name (`allowed_hosts`)",
    "431": "The headers are too long",
    "503": "Come again after `Retry-After`",
}
"""Responses possible for any request."""

_KEYS: Final = {"keys": ["6b0ad8056e2128031f041299"]}
_BODIES: Final[Mapping[str, Any]] = {
    "addItems": {"items": [{"sku": "A-1"}]},
    "changeRate": {"rate": "5/s"},
    "changeSchedule": {"enabled": False},
    "linkTask": {"rights": ["read"], "expires_in": 86_400},
    "recordJob": {"status": "finish", "message": "enrolled"},
    "recordJobs": {"records": [{"job_id": "6b0ad8056e2128031f041299", "status": "finish", "message": "enrolled"}]},
    "updateTask": {"parallel": 8, "interval": 0.5},
}
"""Examples of bodies, by the id of the operation; a submission's is of the application's own workers."""

_NAMED: Final = {"processes": "host:4711:5f0c9a", "queues": "default", "rates": "partner-api", "schedules": "nightly"}
"""Examples of names, by what is named."""

_PROBLEM: Final = {MEDIA_TYPE: {"schema": {"$ref": _REF.format(model="ProblemDetails")}}}


_DOCUMENT: Final = "asynctask.document"

blueprint: Final = APIBlueprint("openapi", __name__, enable_openapi=False)


def document() -> dict[str, Any]:
    """The document of the current application, generated once; its ``servers`` name the path of this request."""
    extensions = current_app.extensions
    if _DOCUMENT not in extensions:
        extensions[_DOCUMENT] = cast(APIFlask, current_app).spec
    return {**extensions[_DOCUMENT], "servers": [{"url": request.script_root or "/"}]}


@blueprint.get("/openapi.json")
def spec() -> Response:
    """The document, for programs."""
    return json_response(document())


def register(flask_app: APIFlask, app: AsyncTask) -> None:
    """Completes the document of ``flask_app``, which serves ``app``, when it is generated, and serves it."""
    flask_app.register_blueprint(blueprint)
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
    for model in (
        ProblemDetails, JsonSubmission, JobsSubmission, NewItems, FileSubmission, FileToAdd, FileToPreview, DryRunResult,
    ):  # fmt: skip
        schema = model.model_json_schema(ref_template=_REF)
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    for name in ("JsonSubmission", "JobsSubmission", "FileSubmission"):
        _name_callbacks(app, schemas[name]["properties"])
    schemas["FileSubmission"] = _with_file(schemas["FileSubmission"], "worker")
    schemas.update({name: _with_file(schemas[name]) for name in ("FileToAdd", "FileToPreview")})
    if _takes_lists(app):
        worker = schemas["FileSubmission"]["properties"]["worker"]
        schemas["FileSubmission"]["properties"]["worker"] = {
            "type": "string", "enum": sorted(_takes_lists(app)), "description": worker["description"]
        }  # fmt: skip
        schemas["JsonSubmission"] = _for_each_worker(app, schemas)
    spec["tags"] = list({each["name"]: each for each in spec.get("tags", ())}.values())
    bodies = {**_BODIES, **_submissions(app)}
    for path, operations in spec["paths"].items():
        for method, operation in operations.items():
            if method in _METHODS:
                _complete_operation(path, method, operation)
                _add_examples(app, path, operation, bodies)
    if app.config.tokens:
        schemes = {name: {"type": "http", "scheme": name} for name in ("bearer", "basic")}
        spec["components"]["securitySchemes"] = schemes
        spec["security"] = [{name: []} for name in schemes]
    if app.config.link_secret:
        schemes = spec["components"].setdefault("securitySchemes", {})
        schemes["link"] = {"type": "apiKey", "in": "query", "name": "link", "description": "A link to one Task."}
    _take_forms(app, spec["paths"])
    submit = spec["paths"]["/api/tasks"]["post"]
    submit["requestBody"] = _submission_body(bodies["submitTask"])
    for each in submit["parameters"]:
        _name_callbacks(app, {each["name"]: each["schema"]})
    for each in (submit, spec["paths"]["/api/exports"]["post"]):
        each["responses"]["200"] = {
            "description": "Of a dry run: the result that the list would have",
            "content": {"application/json": {"schema": {"$ref": _REF.format(model="DryRunResult")}}},
        }
        each.setdefault("parameters", []).append(_idempotency_key())
    add = spec["paths"]["/api/tasks/{task_id}/items"]["post"]
    add["requestBody"] = _addition_body(bodies["addItems"])
    add["parameters"].append(_idempotency_key())
    result = spec["paths"]["/api/tasks/{task_id}/result"]["get"]["responses"]["200"]
    (file,) = result["content"].values()
    result["content"] = {each.media: file for each in EXPORTED.values()}
    return spec


def _takes_lists(app: AsyncTask) -> dict[str, Worker]:
    """The workers for which lists may be submitted; exports get shards instead."""
    workers = app.workers
    return {name: workers[name] for name in app.list_workers()}


def _name_callbacks(app: AsyncTask, properties: dict[str, Any]) -> None:
    """Says which workers a callback may have."""
    alone = {"enum": app.callback_workers()}
    with_args = {"enum": sorted(name for name, worker in app.workers.items() if worker.use_task_event)}
    for option in {name for name in CommonOptions.model_fields if name.startswith("on_")} & properties.keys():
        for kind in properties[option]["anyOf"]:
            if kind["type"] == "string":
                kind.update(alone)
            elif kind["type"] == "object":
                kind["properties"] = {**kind["properties"], "worker": {"type": "string", **with_args}}


def _for_each_worker(app: AsyncTask, schemas: dict[str, Any]) -> dict[str, Any]:
    """The schema of JSON submissions: for each worker at least one valid item; with ``strict``, only valid items.

    Items are read like cells of a sheet, so some values outside of the schema are accepted too: the text "5" for a
    number, or a number for a text.
    """
    plain, jobs = schemas["JsonSubmission"], []
    found = []
    for number, (name, worker) in enumerate(sorted(_takes_lists(app).items())):
        item = _item_schema(worker, f"Item{number}", schemas)
        fields = worker.json_schema()
        names, listed = _names(sorted(fields.get("properties", ()) if fields else ()))
        properties = {
            **plain["properties"],
            "worker": {"const": name, "type": "string", "description": plain["properties"]["worker"]["description"]},
            "items": {
                "type": "array",
                "minItems": 1,
                "maxItems": app.config.max_rows,
                "contains": item,
                "description": "The items. Those that the worker does not take are refused, and the others go on.",
            },
            "key": {"anyOf": [names, {"type": "null"}], "description": plain["properties"]["key"]["description"]},
            "unique": {
                "anyOf": [{"type": "array", "items": names, "maxItems": 20}, listed, {"type": "null"}],
                "description": plain["properties"]["unique"]["description"],
            },
        }
        found += _some_all_or_none({**plain, "title": name, "properties": properties}, "items", item)
        job = {"worker": {"const": name, "type": "string"}, "item": item}
        jobs.append({"type": "object", "properties": job, "required": ["worker", "item"], "additionalProperties": False})
    mixed = schemas["JobsSubmission"]
    one, several = _names([])
    unique = {"anyOf": [{"type": "array", "items": one, "maxItems": 20}, several, {"type": "null"}]}
    properties = {
        **mixed["properties"],
        "unique": unique,
        "chunk_size": {"enum": [1, None], "description": "Jobs for several workers have one item each."},
        "jobs": {**mixed["properties"]["jobs"], "minItems": 1, "maxItems": app.config.max_rows},
    }
    named = {"anyOf": jobs}
    properties["jobs"]["contains"] = named
    found += _some_all_or_none({**mixed, "properties": properties}, "jobs", named)
    return {"anyOf": found, "title": "JsonSubmission", "description": plain["description"]}


def _some_all_or_none(schema: dict[str, Any], name: str, one: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas of a list of which some entries are good, of one of which all are, as ``strict`` wants, and of the first
    list of an open Task, which may have none."""
    properties = schema["properties"]
    some_good = {**properties, "strict": {"enum": [False, None]}}
    all_good = {**properties, "strict": {"type": ["boolean", "null"]}, name: {**properties[name], "items": one}}
    none = {**some_good, "open": {"const": True}, name: {"type": "array", "maxItems": 0}}
    return [
        {**schema, "properties": some_good},
        {**schema, "properties": all_good},
        {**schema, "properties": none, "required": [*schema["required"], "open"]},
    ]


def _names(known: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schemas of one field name and of several in one text; of any names if none are ``known``."""
    if not known:
        return NAME_SCHEMA, {"type": "string", "minLength": 1, "pattern": NAMES}
    one = "|".join(map(re.escape, known))
    return {"enum": known}, {"type": "string", "pattern": f"^({one})(,({one})){{0,19}}$"}


def _item_schema(worker: Any, prefix: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """The schema of ``worker``'s items; adds schemas that it refers to to ``schemas``, with ``prefix`` in their names."""
    if worker.model is None:
        return {"type": ["object", "array", "string", "number", "boolean", "null"]}
    schema = worker.model.model_json_schema(ref_template=_REF.format(model=prefix + ".{model}"))
    for name, part in schema.pop("$defs", {}).items():
        schemas[f"{prefix}.{name}"] = _without_nul(part)
    return cast(dict[str, Any], _without_nul(schema))


def _without_nul(schema: Any) -> Any:
    """The schema with NUL excluded from unrestricted texts: no database accepts it."""
    if isinstance(schema, list):
        return [_without_nul(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _without_nul(part) for name, part in schema.items()}
    if schema.get("type") == "string" and not {"pattern", "format", "enum", "const"} & set(schema):
        found.update(_NO_NUL)
    return found


def _with_file(schema: dict[str, Any], *required: str) -> dict[str, Any]:
    properties = {name: _without_null(field) for name, field in schema["properties"].items()}
    properties["file"] = {
        "type": "string",
        "format": "binary",
        "description": (
            f"The list: {', '.join(FORMATS)}, with the columns of the worker's template. Any other kind of file is refused"
            " with 415; one that cannot be read, or of which no row is taken, with 422."
        ),
    }
    return {**schema, "properties": properties, "required": [*required, "file"]}


def _without_null(field: dict[str, Any]) -> dict[str, Any]:
    """A form field's schema without null, which a form cannot send."""
    kinds = [kind for kind in field.get("anyOf", ()) if kind != {"type": "null"}]
    if len(kinds) != 1:
        return field
    return {**{name: part for name, part in field.items() if name not in ("anyOf", "default")}, **kinds[0]}


def _addition_body(example: dict[str, Any]) -> dict[str, Any]:
    items = {"schema": {"$ref": _REF.format(model="NewItems")}, "example": example}
    return {"required": True, "content": {"application/json": items, **_form("FileToAdd")}}


def _submission_body(example: dict[str, Any]) -> dict[str, Any]:
    return {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": _REF.format(model="JsonSubmission")}, "example": example},
            **_form("FileSubmission"),
            **{
                kind: {
                    "schema": {
                        "type": "string",
                        "minLength": 1,
                        "description": "The rows as they stand. The options are in the query, `worker` is required there.",
                    }
                }
                for kind in RAW
            },
        },
    }


_FORM: Final = "multipart/form-data"


def _take_forms(app: AsyncTask, paths: dict[str, Any]) -> None:
    """Describes the bodies of the operations that take nothing but a form with a file."""
    file = {"file": "@list.xlsx"}
    of_worker = {"worker": next(iter(sorted(_takes_lists(app))), "enroll"), **file}
    for path, form, example in (
        ("/api/lists/preview", "FileToPreview", file),
        ("/api/lists/marked.xlsx", "FileSubmission", of_worker),
    ):
        body = {_FORM: {**_form(form)[_FORM], "example": example}}
        paths[path]["post"]["requestBody"] = {"required": True, "content": body}


def _form(model: str) -> dict[str, Any]:
    """The content of a form with a file."""
    schema, encoding = {"$ref": _REF.format(model=model)}, {"file": {"contentType": ", ".join(_SHEETS)}}
    return {_FORM: {"schema": schema, "encoding": encoding}}


def _idempotency_key() -> dict[str, Any]:
    return {
        "in": "header",
        "name": "Idempotency-Key",
        "required": False,
        "description": "A key of your choice: the same request with the same key makes one Task, or adds its items, once.",
        "schema": {"type": "string", "pattern": KEY_PATTERN},
    }


def _submissions(app: AsyncTask) -> dict[str, Any]:
    """Examples of submissions to the first worker that takes them; of any name if there is none."""
    workers, lists = app.workers, _takes_lists(app)
    name = next(iter(sorted(lists)), "enroll")
    item = _item_example(lists[name].json_schema() if name in lists else None)
    shards = next((each for each in sorted(workers) if each not in lists and workers[each].columns), "listing")
    return {
        "submitTask": {"worker": name, "items": [item]},
        "createJob": {"worker": name, "item": item},
        "submitExport": {"worker": shards, "shards": ["DE", "FR"]},
    }


def _item_example(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """An item with the fields that a worker requires, or its first two."""
    fields: Mapping[str, Any] = (schema or {}).get("properties", {"sku": {"type": "string"}})
    required = (schema or {}).get("required") or list(fields)[:2]
    return {name: _value_example(fields[name]) for name in required if name in fields}


def _value_example(field: Mapping[str, Any]) -> Any:
    known = [*field.get("examples", ()), *field.get("enum", ())]
    if known or "default" in field or "const" in field:
        return known[0] if known else field.get("const", field.get("default"))
    kind = next((each for each in field.get("anyOf", ()) if each.get("type") != "null"), field)
    least = max(1, math.ceil(kind.get("minimum", 1)))
    by_type = {"integer": least, "number": float(least), "boolean": True, "array": [], "object": {}}
    by_format = {"date": "2026-12-01", "date-time": "2026-12-01T08:00:00Z"}
    return by_type.get(str(kind.get("type")), by_format.get(str(kind.get("format")), "A-1"))


def _add_examples(app: AsyncTask, path: str, operation: dict[str, Any], bodies: Mapping[str, Any]) -> None:
    """Gives an operation an example of what has to be sent."""
    of = path.split("/")[2:3]
    examples = {"task_id": 7, "job_id": _KEYS["keys"][0], "template": "0cc175b9c0f1b6a831c399e269772661"}
    examples["name"] = next((_NAMED[each] for each in of if each in _NAMED), next(iter(sorted(app.workers)), "enroll"))
    for parameter in operation["parameters"]:
        if parameter.get("required"):
            known = examples.get(parameter["name"])
            parameter["example"] = _value_example(parameter["schema"]) if known is None else known
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None:
        body["example"] = bodies.get(operation["operationId"], _KEYS)


def curl(url: str, method: str, operation: Mapping[str, Any], *, token: bool) -> str:
    """A command that calls an operation with its examples. ``url``: of its path; ``token``: the server wants one."""
    asked = []
    for parameter in operation["parameters"]:
        if "example" in parameter and parameter["in"] == "path":
            url = url.replace(f"{{{parameter['name']}}}", quote(str(parameter["example"]), safe=":"))
        elif "example" in parameter:
            asked.append(f"{parameter['name']}={quote(str(parameter['example']))}")
    words = ["curl", *(["-X", method.upper()] if method not in ("get", "post") else [])]
    media = next(iter(operation["responses"].get("200", {}).get("content", {"application/json": {}})))
    words += {"text/event-stream": ["-N"], "application/json": [], "text/plain": []}.get(media, ["-OJ"])
    words.append(shlex.quote(url + ("?" + "&".join(asked) if asked else "")))
    if token:
        words.append('-H "Authorization: Bearer $SECRET"')
    content = operation.get("requestBody", {}).get("content", {})
    if "application/json" in content:
        text = json_text(content["application/json"]["example"]).decode()
        words += ["-H 'Content-Type: application/json'", "-d", shlex.quote(text)]
    elif content:
        words += (f"-F {shlex.quote(f'{name}={value}')}" for name, value in content[_FORM]["example"].items())
    elif method == "post":
        words.insert(1, "-X POST")
    return " ".join(words)


def _complete_operation(path: str, method: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    if operation.get("parameters") or "requestBody" in operation or path == "/api/tasks" or "/lists/" in path:
        responses.setdefault("422", {"description": "Something in the request is wrong; `errors` says what"})
    if "{" in path:
        responses.setdefault("404", {"description": "There is no such thing"})
    if method == "get" and "application/json" in responses.get("200", {}).get("content", {}):
        responses.setdefault("304", {"description": "Unchanged since the ETag in If-None-Match"})
    if "requestBody" in operation:
        operation["requestBody"]["required"] = True
        responses.setdefault("415", {"description": "Unsupported Media Type"})
    for status, description in COMMON_RESPONSES.items():
        responses.setdefault(status, {"description": description})
    for status, response in responses.items():
        if status.startswith(("4", "5")):
            response["content"] = _PROBLEM
        elif status == "304":
            response.pop("content", None)
    for parameter in operation.setdefault("parameters", []):
        if parameter["in"] == "path" and parameter["name"] == "task_id":
            parameter["schema"] = {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}
