"""What an empty sheet for a worker has to have: its columns, what may stand in them, and an example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, Final, get_args

import pydantic
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError
from pydantic.fields import FieldInfo

from asynctask.errors import Conflict, InputError
from asynctask.lists.items import ItemShape
from asynctask.worker import Worker

__all__ = ["Column", "NoTemplate", "Template", "make_template"]

_MAX_COLUMNS: Final = 16_384
_DAY: Final = date(2026, 3, 5)
_CLOCK: Final = time(14, 30)
_FORMATS: Final = {"date": "date", "date-time": "datetime", "time": "time", "duration": "duration"}
_KINDS: Final = {"integer": "integer", "number": "number", "boolean": "boolean", "array": "list", "object": "object"}
_LIMITS: Final = (
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern",
)  # fmt: skip


class NoTemplate(Conflict):
    """The worker says nothing about its items, so nobody can say what an empty sheet would need."""

    code = "no_template"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a template.

    ``header``: its name in the sheet, which the reader knows; ``field``: that of the item. ``kind``: ``text``, ``integer``,
    ``number``, ``boolean``, ``date``, ``datetime``, ``time``, ``duration``, ``choice``, ``list``, ``object`` or ``any``.
    ``choices``: the values of a ``choice``. ``limits``: those of JSON Schema's words for limits that the field has.
    ``default`` and ``example`` are None where there is none.
    """

    header: str
    field: str
    kind: str
    required: bool
    choices: tuple[Any, ...]
    limits: Mapping[str, Any]
    description: str
    default: Any
    example: Any


@dataclass(frozen=True, slots=True)
class Template:
    """An empty sheet for the worker of this name; ``doc`` is what the worker says of itself."""

    worker: str
    doc: str
    columns: tuple[Column, ...]


def make_template(worker: Worker) -> Template:
    """The template of a worker. Raises :class:`NoTemplate` (409) where its items have no model."""
    model = worker.model
    if model is None or not model.model_fields:
        raise NoTemplate(
            f"worker {worker.name!r} takes any row, so there are no columns that a template could name;"
            " upload a sheet with headers of your own, or have its items described by a pydantic model"
        )
    if len(model.model_fields) > _MAX_COLUMNS:
        raise NoTemplate(f"the items of worker {worker.name!r} have more fields than a sheet can have columns")
    headers = _headers(model, worker.shape if isinstance(worker.shape, ItemShape) else ItemShape(model))
    schema = _schema(model)
    example = _model_example(schema)
    columns = tuple(_column(name, info, headers[name], schema, example) for name, info in model.model_fields.items())
    return Template(worker.name, worker.doc, columns)


def _headers(model: type[pydantic.BaseModel], shape: ItemShape) -> dict[str, str]:
    """Field -> header: what people would call it, as long as the reader is not in doubt which field is meant."""
    wanted = {name: _title(name, info) for name, info in model.model_fields.items()}
    try:
        if shape.bind(list(wanted.values())).fields == {header: name for name, header in wanted.items()}:
            return wanted
    except InputError:
        pass
    return {name: name for name in model.model_fields}


def _title(name: str, info: FieldInfo) -> str:
    choices = info.validation_alias
    aliases = choices.choices if isinstance(choices, pydantic.AliasChoices) else [choices, info.alias]
    found = [info.title, *(each for each in aliases if isinstance(each, str)), name]
    return next(" ".join(each.split()) for each in found if each and each.strip())


def _schema(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    try:
        return model.model_json_schema(by_alias=False)
    except (PydanticInvalidForJsonSchema, PydanticUserError):
        return {}  # a type of the application's own: its column takes anything


def _model_example(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """An example of a whole item, by field name or alias."""
    examples = schema.get("examples")
    found = examples[0] if isinstance(examples, list) and examples else schema.get("example")
    return found if isinstance(found, Mapping) else {}


def _column(name: str, info: FieldInfo, header: str, schema: Mapping[str, Any], example: Mapping[str, Any]) -> Column:
    flat = _flat(schema.get("properties", {}).get(name, {}), schema.get("$defs", {}), decimal=_is_decimal(info.annotation))
    kind, choices = _kind(flat)
    limits = {key: _plain(flat[key]) for key in _LIMITS if flat.get(key) is not None}
    given = example.get(name, example.get(header))
    if given is None:
        given = next((each for each in flat.get("examples") or () if each is not None), None)
    default = flat.get("default")
    if given is None:
        given = default if default is not None else _made_up(kind, choices, limits)
    description = " ".join(str(flat.get("description") or info.description or "").split())
    return Column(
        header, name, kind, info.is_required(), choices, limits, description, _typed(kind, default), _typed(kind, given)
    )


def _plain(limit: Any) -> Any:
    """1000.0 as 1000."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit


def _is_decimal(annotation: Any) -> bool:
    """Whether it is a Decimal, which JSON Schema takes for a number or a text."""
    kinds = set(_leaves(annotation))
    return any(issubclass(kind, Decimal) for kind in kinds) and str not in kinds


def _leaves(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for each in get_args(annotation):
        yield from _leaves(each)


def _flat(schema: Mapping[str, Any], definitions: Mapping[str, Any], *, decimal: bool) -> dict[str, Any]:
    """A field's schema with references followed and "or null" taken off; what stands outside goes before."""
    flat = dict(schema)
    for _ in range(8):
        inner: Any = None
        if "$ref" in flat:
            inner = definitions.get(str(flat.pop("$ref")).rpartition("/")[2], {})
        elif len(flat.get("allOf") or ()) == 1:
            (inner,) = flat.pop("allOf")
        elif "anyOf" in flat or "oneOf" in flat:
            members = [each for each in flat.pop("anyOf", None) or flat.pop("oneOf") if each.get("type") != "null"]
            inner = _one_of(members, decimal=decimal)
        if inner is None:
            return flat
        flat = {**inner, **flat}
    return flat


def _one_of(members: list[Any], *, decimal: bool) -> Any:
    """The one alternative that matters; an empty schema where several do."""
    if decimal:
        members = [each for each in members if each.get("type") == "number"] or members
    return members[0] if len(members) == 1 else {}


def _kind(flat: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]]:
    choices = [flat["const"]] if "const" in flat else list(flat.get("enum") or ())
    plain = tuple(each for each in choices if isinstance(each, str | int | float) and not isinstance(each, bool))
    if plain and len(plain) == len([each for each in choices if each is not None]):
        return "choice", plain
    kind = flat.get("type")
    if kind == "string":
        return _FORMATS.get(str(flat.get("format")), "text"), ()
    return _KINDS.get(str(kind), "any"), ()


def _made_up(kind: str, choices: tuple[Any, ...], limits: Mapping[str, Any]) -> Any:
    """A value that fits as far as the limits tell; None where only the application knows one."""
    if kind == "choice":
        return choices[0]
    if kind in ("integer", "number"):
        return next(_numbers(limits), None)
    if kind == "text":
        if "pattern" in limits:
            return None
        return "text".ljust(int(limits.get("minLength", 0)), "x")[: int(limits.get("maxLength", 100))] or None
    return {"boolean": True, "date": _DAY, "datetime": datetime.combine(_DAY, _CLOCK), "time": _CLOCK}.get(kind)


def _numbers(limits: Mapping[str, Any]) -> Iterator[Any]:
    low = limits.get("minimum", limits.get("exclusiveMinimum"))
    high = limits.get("maximum", limits.get("exclusiveMaximum"))
    step = limits.get("multipleOf") or 1
    for value in (step, 1, low, high, None if low is None else low + step, None if high is None else high - step):
        if value is None or value < limits.get("minimum", value) or value > limits.get("maximum", value):
            continue
        if value == limits.get("exclusiveMinimum") or value == limits.get("exclusiveMaximum"):
            continue
        if (low is None or value >= low) and (high is None or value <= high) and not value % step:
            yield value


def _typed(kind: str, value: Any) -> Any:
    """A value of the schema, where dates are text, as one of its kind."""
    if not isinstance(value, str):
        return value
    try:
        if kind == "date":
            return date.fromisoformat(value)
        if kind == "datetime":
            moment = datetime.fromisoformat(value)
            return moment if moment.tzinfo is None else value
        if kind == "time":
            return time.fromisoformat(value)
    except ValueError:
        pass
    return value
