"""Templates: an empty sheet for a worker, with its columns, their limits and an example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from itertools import zip_longest
from typing import Any, Final

import pydantic
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError
from pydantic.fields import FieldInfo
from xlsxwriter.utility import xl_range_formula

from asynctask.errors import Conflict, InputError
from asynctask.lists.coerce import kinds_of
from asynctask.lists.items import ItemShape, names_of
from asynctask.lists.options import whole_number
from asynctask.lists.problems import texts
from asynctask.lists.workbook_writer import Cell, Sheet, iter_workbook
from asynctask.lists.written_cells import SHEET_COLUMNS, SHEET_ROWS, csv_cell, csv_text, cut
from asynctask.worker import Worker

_DAY: Final = date(2026, 3, 5)
_CLOCK: Final = time(14, 30)
_FORMATS: Final = {"date": "date", "date-time": "datetime", "time": "time", "duration": "duration"}
_KINDS: Final = {"integer": "integer", "number": "number", "boolean": "boolean", "array": "list", "object": "object"}
_LIMITS: Final = (
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern",
)  # fmt: skip


class NoTemplate(Conflict):
    """The worker declares no model of its items, so their columns are unknown."""

    code = "no_template"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a template.

    ``header``: its name in the sheet, known to the reader; ``field``: of the item. ``kind``: ``text``, ``integer``,
    ``number``, ``boolean``, ``date``, ``datetime``, ``time``, ``duration``, ``choice``, ``list``, ``object`` or ``any``.
    ``choices``: the values of a ``choice``. ``limits``: the field's limits by JSON Schema's keywords. ``default`` and
    ``example`` may be None.
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
    """An empty sheet for a worker; ``doc`` is the worker's description."""

    worker: str
    doc: str
    columns: tuple[Column, ...]


def make_template(worker: Worker) -> Template:
    """The template of a worker. Raises :class:`NoTemplate` (409) if its items have no model."""
    model = worker.model
    if model is None or not model.model_fields:
        raise NoTemplate(
            f"worker {worker.name!r} takes any row, so there are no columns that a template could name;"
            " upload a sheet with headers of your own, or have its items described by a pydantic model"
        )
    if len(model.model_fields) > SHEET_COLUMNS:
        raise NoTemplate(f"the items of worker {worker.name!r} have more fields than a sheet can have columns")
    headers = _headers(model, worker.shape if isinstance(worker.shape, ItemShape) else ItemShape(model))
    schema = _schema(model)
    example = _model_example(schema)
    columns = tuple(_column(name, info, headers[name], schema, example) for name, info in model.model_fields.items())
    return Template(worker.name, worker.doc, columns)


def _headers(model: type[pydantic.BaseModel], shape: ItemShape) -> dict[str, str]:
    """Field -> header: titles, unless the reader could not tell their fields apart."""
    names = {name: names_of(name, info) for name, info in model.model_fields.items()}
    wanted = {name: next(" ".join(each.split()) for each in found if each.strip()) for name, found in names.items()}
    try:
        if shape.bind(list(wanted.values())).fields == {header: name for name, header in wanted.items()}:
            return wanted
    except InputError:
        pass
    return {name: name for name in model.model_fields}


def _schema(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    try:
        return model.model_json_schema(by_alias=False)
    except (PydanticInvalidForJsonSchema, PydanticUserError):
        return {}  # a type of the application: its column takes any value


def _model_example(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model's example of an item, by field name or alias."""
    examples = schema.get("examples")
    found = examples[0] if isinstance(examples, list) and examples else schema.get("example")
    return found if isinstance(found, Mapping) else {}


def _column(name: str, info: FieldInfo, header: str, schema: Mapping[str, Any], example: Mapping[str, Any]) -> Column:
    flat = _flat(schema.get("properties", {}).get(name, {}), schema.get("$defs", {}), decimal=_is_decimal(info.annotation))
    kind, choices = _kind(flat)
    limits = {key: whole_number(flat[key]) for key in _LIMITS if flat.get(key) is not None}
    given = example.get(name, example.get(header))
    if given is None:
        given = next((each for each in flat.get("examples") or () if each is not None), None)
    default = flat.get("default")
    if given is None:
        given = default if default is not None else _invented(kind, choices, limits)
    description = " ".join(str(flat.get("description") or info.description or "").split())
    return Column(
        header, name, kind, info.is_required(), choices, limits, description, _typed(kind, default), _typed(kind, given)
    )


def _is_decimal(annotation: Any) -> bool:
    """Whether a type is a Decimal, in JSON Schema a number or a text."""
    kinds = kinds_of(annotation)
    plain = str not in kinds and all(isinstance(kind, type) for kind in kinds)
    return plain and any(issubclass(kind, Decimal) for kind in kinds)


def _flat(schema: Mapping[str, Any], definitions: Mapping[str, Any], *, decimal: bool) -> dict[str, Any]:
    """A field's schema, its references resolved and "or null" removed; outer keywords take precedence."""
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
    """The only relevant alternative; an empty schema if there are several."""
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


def _invented(kind: str, choices: tuple[Any, ...], limits: Mapping[str, Any]) -> Any:
    """An example within the limits; None if only the application can know one."""
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
    """A value of the schema, where dates are text, in its own type."""
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


# -- files

_EXACT: Final = 10**15
"""Numbers from here on may lose digits in a spreadsheet, which keeps 15; they are text."""
_CELL_FORMATS: Final = {
    "text": "@", "choice": "@", "integer": "0", "date": "yyyy-mm-dd", "datetime": "yyyy-mm-dd hh:mm", "time": "hh:mm:ss",
    "duration": "[h]:mm:ss",
}  # fmt: skip
_LISTS: Final = "Lists"
_MAX_INLINE: Final = 255
_MAX_CHOICES: Final = 100_000
_MAX_MESSAGE: Final = 255
_MAX_COMMENT: Final = 2_000
_SHOWN_CHOICES: Final = 20


def template_csv(template: Template) -> bytes:
    """The header row as CSV in UTF-8 with a byte order mark."""
    return ("\ufeff" + csv_text([[csv_cell(column.header) for column in template.columns]])).encode()


def template_xlsx(template: Template, locale: str = "en") -> bytes:
    """The workbook, with help in en, zh_CN or ja; in English for any other locale.

    The first sheet has the header row only, so that an upload contains only the user's rows.
    """
    words = {key.removeprefix("template."): text for key, text in texts(locale).items()}
    return b"".join(iter_workbook(_Book(template, words).sheets()))


_HEADER: Final = {"bold": True, "border": 1, "text_wrap": True, "valign": "top"}
_REQUIRED: Final = {**_HEADER, "bg_color": "#1F4E79", "font_color": "#FFFFFF"}
_OPTIONAL: Final = {**_HEADER, "bg_color": "#DDEBF7"}
_BOLD: Final = {"bold": True, "font_size": 14}
_WRAPPED: Final = {"text_wrap": True, "valign": "top"}


def _header(column: Column) -> Cell:
    return Cell(column.header, _REQUIRED if column.required else _OPTIONAL)


class _Book:
    def __init__(self, template: Template, words: Mapping[str, str]) -> None:
        self._template, self._words = template, words
        self._lists: list[tuple[Any, ...]] = []
        """The columns of the hidden sheet."""
        self._rules = list(map(self._rule_of, template.columns))

    def sheets(self) -> Iterator[Sheet]:
        columns = self._template.columns
        formats = [_pattern(column) for column in columns]
        widths = [
            (min(max(len(column.header) + 4, 14), 60), {"num_format": pattern} if pattern else {})
            for column, pattern in zip(columns, formats, strict=True)
        ]
        yield Sheet(self._words["rows"], [list(map(_header, columns))], widths, self._furnish)
        yield Sheet(self._words["help"], self._help_rows(), [(28, {}), *[(22, {})] * 6])
        if self._lists:
            yield Sheet(_LISTS, zip_longest(*self._lists), (), lambda made, _: made.hide())

    def _furnish(self, sheet: Any, _: int) -> None:
        sheet.freeze_panes(1, 0)
        for index, (column, rule) in enumerate(zip(self._template.columns, self._rules, strict=True)):
            sheet.write_comment(0, index, cut(self._comment(column))[:_MAX_COMMENT], {"x_scale": 2, "y_scale": 1.5})
            if rule:
                sheet.data_validation(1, index, SHEET_ROWS, index, dict(rule))

    def _comment(self, column: Column) -> str:
        must = self._words["required" if column.required else "optional"]
        return "\n".join(part for part in (column.description, self._limits(column), must) if part)

    def _limits(self, column: Column) -> str:
        return ", ".join([self._words[column.kind], *_limits(column, self._words)])

    def _rule_of(self, column: Column) -> dict[str, Any]:
        rule = self._rule(column)
        text = cut(f"{column.header}: {self._limits(column)}")[:_MAX_MESSAGE]
        return {"error_title": self._words["refused"][:32], "error_message": text} | rule if rule else {}

    def _rule(self, column: Column) -> dict[str, Any]:
        """The data validation of a column: it refuses only what the reader would refuse too."""
        limits = column.limits
        if column.kind == "boolean":
            return {"validate": "list", "source": [self._words["yes"], self._words["no"]]}
        if column.kind == "choice" and len(column.choices) <= _MAX_CHOICES:
            return {"validate": "list", "source": self._source(column.choices)}
        if column.kind in ("integer", "number") and _pattern(column) != "@":
            return self._number_rule(column)
        if column.kind == "text":
            lengths = {"minimum": limits.get("minLength"), "maximum": limits.get("maxLength")}
            return {"validate": "length", **bound} if (bound := _bound(lengths, whole=True)) else {}
        return {}

    def _number_rule(self, column: Column) -> dict[str, Any]:
        whole = column.kind == "integer"
        bound = _bound(column.limits, whole=whole)
        if bound or not whole:
            return {"validate": "integer" if whole else "decimal", **bound} if bound else {}
        # Without limits it may be a long number, an id for instance, whose digits only a text cell keeps.
        return {
            "validate": "integer",
            "criteria": "between",
            "minimum": 1 - _EXACT,
            "maximum": _EXACT - 1,
            "error_type": "warning",
            "error_message": self._words["too_long"][:_MAX_MESSAGE],
        }

    def _source(self, choices: tuple[Any, ...]) -> Any:
        """The values themselves if they fit the rule's 255 characters; else a range on a hidden sheet."""
        texts = [str(each) for each in choices]
        plain = all(text == text.strip() and text and not set(text) & set(',"\n') for text in texts)
        if plain and not texts[0].startswith("=") and len(",".join(texts)) <= _MAX_INLINE:
            return texts
        self._lists.append(choices)
        column = len(self._lists) - 1
        return "=" + xl_range_formula(_LISTS, 0, column, len(choices) - 1, column)

    def _help_rows(self) -> Iterator[list[Any]]:
        words, template = self._words, self._template
        yield [Cell(words["title"].format(worker=template.worker), _BOLD)]
        yield [" ".join(template.doc.split())]
        yield [words["hint"]]
        yield []
        names = ("column", "required", "type", "allowed", "default", "example", "description")
        yield [Cell(words[name], _OPTIONAL) for name in names]
        yield from map(self._help_row, template.columns)
        yield []
        yield [Cell(words["examples"], _BOLD)]
        yield list(map(_header, template.columns))
        yield [self._value(column, column.example) for column in template.columns]

    def _help_row(self, column: Column) -> list[Any]:
        words = self._words
        said = (
            column.header,
            words["yes" if column.required else "no"],
            words[column.kind],
            ", ".join(_limits(column, words)),
        )
        values = [self._value(column, column.default), self._value(column, column.example)]
        return [*(Cell(text, _WRAPPED) for text in said), *values, Cell(column.description, _WRAPPED)]

    def _value(self, column: Column, value: Any) -> Cell:
        pattern = _CELL_FORMATS.get(column.kind)
        shown = self._words["yes" if value else "no"] if isinstance(value, bool) else value
        return Cell(shown, {"num_format": pattern, "valign": "top", "align": "left"} if pattern else {})


def _pattern(column: Column) -> str:
    """The number format of a column; text for values that would be changed as numbers."""
    if column.kind == "choice":
        return "@" if all(isinstance(each, str) for each in column.choices) else ""
    if column.kind == "integer":
        ends = [column.limits.get(name, 0) for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")]
        return "@" if any(abs(end) >= _EXACT for end in ends) else "0"
    return _CELL_FORMATS.get(column.kind, "")


def _bound(limits: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    """Limits as a rule of a spreadsheet; empty without limits."""
    low, high = limits.get("minimum"), limits.get("maximum")
    over, under = limits.get("exclusiveMinimum"), limits.get("exclusiveMaximum")
    if whole:
        low, over = (over + 1, None) if over is not None and low is None else (low, None)
        high, under = (under - 1, None) if under is not None and high is None else (high, None)
    bottom, top = (over if low is None else low), (under if high is None else high)
    if bottom is not None and top is not None:
        return {"criteria": "between", "minimum": bottom, "maximum": top} if bottom <= top else {}
    if bottom is not None:
        return {"criteria": ">=" if low is not None else ">", "value": bottom}
    if top is not None:
        return {"criteria": "<=" if high is not None else "<", "value": top}
    return {}


def _limits(column: Column, words: Mapping[str, str]) -> Iterator[str]:
    """The limits of a column, in words."""
    limits = column.limits
    if column.choices:
        hidden = len(column.choices) - _SHOWN_CHOICES
        yield ", ".join(map(str, column.choices[:_SHOWN_CHOICES]))
        if hidden > 0:
            yield words["more"].format(count=hidden)
    yield from _range(limits.get("minimum"), limits.get("maximum"), words, "")
    if "exclusiveMinimum" in limits:
        yield words["more_than"].format(low=limits["exclusiveMinimum"])
    if "exclusiveMaximum" in limits:
        yield words["less_than"].format(high=limits["exclusiveMaximum"])
    yield from _range(limits.get("minLength"), limits.get("maxLength"), words, "length_")
    if "multipleOf" in limits:
        yield words["multiple"].format(step=limits["multipleOf"])
    if "pattern" in limits:
        yield words["pattern"].replace("{pattern}", str(limits["pattern"]))


def _range(low: Any, high: Any, words: Mapping[str, str], prefix: str) -> Iterator[str]:
    if low is not None and high is not None:
        yield words[prefix + "between"].format(low=low, high=high)
    elif low is not None:
        yield words[prefix + "at_least"].format(low=low)
    elif high is not None:
        yield words[prefix + "at_most"].format(high=high)
