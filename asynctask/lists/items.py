"""Rows to items: binds headers to fields, converts cells, and reports every problem of a row at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import orjson

from asynctask.errors import InputError, Problem
from asynctask.ledger.base import NewItem, dumps
from asynctask.lists.coerce import Coercer, Unclear, allows_none, coercer_for, kind_of
from asynctask.lists.problems import fault, from_pydantic, in_order
from asynctask.lists.readers.base import CellError, RawRow, normalise, report_block, shorten
from asynctask.lists.written_cells import item_json, jsonable
from asynctask.worker import Worker, is_model

if TYPE_CHECKING:
    import pydantic
    from pydantic.fields import FieldInfo

MIXED: Final = "*"
"""The worker's name of a Task whose jobs name their own."""

_SHOWN: Final = 20
"""Columns named in a message, unless more are required."""
_SCALARS: Final = frozenset((str, int, bool, type(None)))  # need no conversion to JSON; most items hold nothing else
_TAKES_BLANK: Final = (None, coercer_for(str, sheet=False))
"""Coercers that keep an empty text of JSON as it is; any other treats it as a missing value."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused row: all its problems, and its original cells, JSON-ready. ``number``: of the row that it corrects, from
    the row-number column of a report."""

    row: int
    problems: tuple[Problem, ...]
    values: dict[str, Any]
    number: int | None = None


@dataclass(frozen=True, slots=True)
class _Column:
    header: str
    field: str
    coerce: Coercer | None
    keeps_none: bool
    """Whether an empty cell reaches the model as None: the field is required and nullable."""


@dataclass(frozen=True, slots=True)
class Binding:
    """The fields of a sheet's headers; made once per sheet by :meth:`ItemShape.bind`.

    ``columns`` is empty for a worker without a model: every header except ``ignored`` is then a key of the item.
    """

    columns: tuple[_Column, ...]
    ignored: frozenset[str]

    @property
    def fields(self) -> dict[str, str]:
        """Header -> field."""
        return {column.header: column.field for column in self.columns}


class UnfitItem(ValueError):
    """An item does not fit the model of its worker, which may have changed since. The message has no values, so that
    such rows are one group of errors."""


class ItemShape:
    """The form of a worker's items; built once per worker.

    Arguments: ``model``, the worker's pydantic model, None for any dict; ``columns``, header -> field name, for headers
    that are not names of the model; ``max_item_bytes``, the largest item as JSON.
    Raises :class:`InputError` ``unknown_column`` if ``columns`` names a field that the model does not have.
    """

    def __init__(
        self,
        model: type[pydantic.BaseModel] | None,
        columns: Mapping[str, str] | None = None,
        max_item_bytes: int = 65_536,
    ) -> None:
        self.model, self._max_bytes = model, max_item_bytes
        self._columns = dict(columns or {})
        self._fields: dict[str, FieldInfo] = dict(model.model_fields) if model else {}
        unknown = sorted(set(self._columns.values()) - set(self._fields)) if model else []
        if unknown:
            raise InputError(
                f"columns: {', '.join(unknown)} is no field of the item; its fields: {', '.join(self._fields)}",
                code="unknown_column",
            )
        self._names = {name: names_of(name, info) for name, info in self._fields.items()}
        self.expected: frozenset[str] = frozenset(
            [*self._columns, *(each for names in self._names.values() for each in names)]
        )
        self._json_columns = self._plan_json()

    @property
    def mapped(self) -> tuple[str, ...]:
        """The headers that the sender mapped to fields."""
        return tuple(self._columns)

    def wanted(self) -> str:
        """The columns of a suitable sheet, for a message: one name each, all required ones first."""
        needed = [self._title(field) for field, info in self._fields.items() if info.is_required()]
        others = [self._title(field) for field, info in self._fields.items() if not info.is_required()]
        room = max(0, _SHOWN - len(needed))
        return ", ".join(needed + others[:room]) + (", …" if len(others) > room else "")

    def bind(self, headers: Sequence[str]) -> Binding:
        """Matches headers with fields. Names are compared normalised; unknown headers are ignored.

        Raises :class:`InputError`: ``missing_columns`` if a required field has no column, ``unknown_column`` if
        ``columns`` names an absent header, ``duplicate_column`` if two columns match one field.
        """
        ignored = report_block(headers)
        usable = [header for header in headers if header not in ignored]
        present = {normalise(header): header for header in usable}
        absent = sorted(header for header in self._columns if normalise(header) not in present)
        if absent:
            raise InputError(
                f"columns: the sheet has no column {', '.join(map(repr, absent))}; it has: {listed(usable)}",
                code="unknown_column",
            )
        if self.model is None:
            renamed = {normalise(header): field for header, field in self._columns.items()}
            columns = [_Column(h, renamed[normalise(h)], None, True) for h in usable if normalise(h) in renamed]
            return Binding(tuple(columns), ignored)
        by_field = self._match(present)
        self._refuse_missing(by_field, usable)
        made = (self._column(header, field, sheet=True) for field, header in by_field.items())
        return Binding(tuple(made), ignored)

    def validate(self, row: RawRow, binding: Binding | None) -> NewItem | Refused:
        """Converts a row to an item, or refuses it with all its problems. ``binding`` is None for JSON."""
        values = self.values(row)
        if self.model is None and binding is None and not isinstance(values, Mapping) and not row.problems:
            return self._scalar(row.number, values)
        if not isinstance(values, Mapping):
            problem = fault(row.number, None, "not_an_object", "not_an_object", value=shorten(jsonable(values)))
            return Refused(row.number, (problem,), {"value": jsonable(values)})
        if row.problems:
            return Refused(row.number, row.problems, jsonable(values))
        if self.model is None:
            return self._plain(row.number, values, binding)
        if binding is not None:
            data, problems = _take_cells(row.number, values, binding.columns)
        else:
            data, problems = self._take_json(row.number, values)
        return self._by_model(row.number, values, data, problems, binding)

    @property
    def field_names(self) -> tuple[str, ...]:
        """The fields of the model; empty without one."""
        return tuple(self._fields)

    def field_of(self, name: str) -> str | None:
        """The field for a name: its own, else a title or alias in any spelling; None for an unknown one.

        Without a model every name is a key.
        """
        if self.model is None or name in self._fields:
            return name
        wanted = normalise(name)
        return next((field for field, names in self._names.items() if wanted in map(normalise, names)), None)

    def values(self, row: RawRow) -> Any:
        """The values of a row before conversion."""
        values = row.values
        return values.model_dump(round_trip=True) if type(values) is not dict and is_model(type(values)) else values

    def kind(self, field: str) -> Any:
        """The type of a field, as of :func:`~asynctask.lists.coerce.kind_of`; None without a model."""
        info = self._fields.get(field)
        return None if info is None else kind_of(info.annotation)

    def is_given(self, row: RawRow, field: str, value: Any, binding: Binding | None) -> bool:
        """Whether ``value`` of a field comes from the row itself and is no default."""
        if self.model is None:
            return True
        if is_model(type(row.values)):
            return field in row.values.model_fields_set
        if binding is not None:
            return any(row.values.get(column.header) is not None for column in binding.columns if column.field == field)
        given = [
            row.values[key] for key, column in self._json_columns.items() if column.field == field and key in row.values
        ]
        return any(
            isinstance(value, str) or not isinstance(each, str) or each.strip() for each in given if each is not None
        )

    def revive(self, params: dict[str, Any]) -> Any:
        """The argument of the worker's function: the model made of an accepted item, or the dict without a model.

        Raises :class:`UnfitItem` if the model refuses the item, because it has changed since for example.
        """
        if self.model is None:
            return params
        from pydantic import ValidationError  # with a model, pydantic is loaded already

        try:
            return self.model.model_validate_json(orjson.dumps(params), by_alias=True, by_name=True)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=False, include_input=False)
            said = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in faults)
            raise UnfitItem(f"the item does not fit {self.model.__name__}: {said}") from None

    def _by_model(
        self,
        number: int,
        values: Mapping[str, Any],
        data: dict[str, Any],
        problems: list[Problem],
        binding: Binding | None,
    ) -> NewItem | Refused:
        from pydantic import ValidationError  # with a model, pydantic is loaded already

        assert self.model is not None
        try:
            item = self.model.model_validate(data, by_alias=True, by_name=True).model_dump(mode="json", round_trip=True)
        except ValidationError as error:
            found = self._problems(number, error, values, binding, {problem.column for problem in problems})
            problems.extend(found)
        except Exception as error:
            # An exception in a validator of the model refuses this row only, not the list.
            words = shorten(jsonable(f"{type(error).__name__}: {error}"))
            problems.append(fault(number, None, "invalid", "unchecked", {"words": words}))
        if problems:
            return Refused(number, in_order(problems, values), jsonable(values))
        return self._stored(number, item, values)

    def _scalar(self, number: int, value: Any) -> NewItem | Refused:
        """Without a model an item is any JSON value: a number, a text, a list."""
        try:
            item = item_json(value)
        except TypeError as error:
            return self._no_json(number, None, error, {"value": value})
        return self._stored(number, item, {"value": item})

    def _plain(self, number: int, values: Mapping[str, Any], binding: Binding | None) -> NewItem | Refused:
        if binding is None and _SCALARS.issuperset(map(type, values.values())) and {str}.issuperset(map(type, values)):
            return self._stored(number, values, values)
        ignored = binding.ignored if binding else frozenset()
        renamed = binding.fields if binding else {}
        kept = {key: value for key, value in values.items() if key not in ignored}
        problems = [_cell_error(number, key, value) for key, value in kept.items() if isinstance(value, CellError)]
        if problems:
            return Refused(number, tuple(problems), jsonable(values))
        given: dict[str, Any] = {}
        for key, value in kept.items():
            try:
                given |= item_json({renamed.get(key, key): value})
            except TypeError as error:
                return self._no_json(number, key, error, values)
        return self._stored(number, given, values)

    def _no_json(self, number: int, key: Any, error: TypeError, values: Mapping[str, Any]) -> Refused:
        column = None if key is None else str(key)
        problem = fault(number, column, "invalid", "not_json", {"words": shorten(str(error))})
        return Refused(number, (problem,), jsonable(values))

    def _stored(self, number: int, item: Any, values: Any) -> NewItem | Refused:
        """The item as JSON text, or its refusal with the row's ``values`` if the ledger cannot keep it."""
        try:
            body = orjson.dumps(item)
        except TypeError as error:
            problem = fault(number, None, "invalid", "not_json", {"words": shorten(str(error))})
        else:
            if len(body) > self._max_bytes:
                params = {"size": len(body), "limit": self._max_bytes}
                problem = fault(number, None, "item_too_large", "item_too_large", params)
            elif b"\\u0000" in body and has_nul(item):
                problem = fault(number, None, "invalid", "nul")
            else:
                return NewItem(body.decode(), number)
        return Refused(number, (problem,), jsonable(values))

    def _problems(
        self,
        number: int,
        error: pydantic.ValidationError,
        values: Mapping[str, Any],
        binding: Binding | None,
        known: set[str | None],
    ) -> Iterable[Problem]:
        headers = {column.field: column.header for column in binding.columns} if binding else None
        for each in error.errors(include_url=False):
            loc = [str(part) for part in each["loc"]]
            first = self._users_name(loc[0], values, headers) if loc else None
            if first is not None and first in known:
                continue
            column = ".".join([first, *loc[1:]]) if first is not None else None
            given = values.get(first, each["input"]) if first is not None and len(loc) == 1 else each["input"]
            problem = from_pydantic(number, column, each, _shortened(jsonable(given)) if loc else None)
            yield replace(problem, value=None) if problem.code == "missing" else problem

    def _take_json(self, number: int, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        data: dict[str, Any] = {}
        problems: list[Problem] = []
        for key, value in values.items():
            column = self._json_columns.get(key)
            if column is None:
                data[str(key)] = value
                continue
            blank = isinstance(value, str) and not value.strip() and column.coerce not in _TAKES_BLANK
            if value is None or (blank and column.keeps_none):
                data[key] = None
            if value is None or blank:
                continue
            try:
                data[key] = column.coerce(value) if column.coerce else value
            except Unclear as error:
                problems.append(fault(number, str(key), error.code, error.text, None, _shortened(jsonable(value))))
        return data, problems

    def _plan_json(self) -> dict[str, _Column]:
        plan = {}
        for field, info in self._fields.items():
            column = self._column("", field, sheet=False)
            plan.update(dict.fromkeys([field, *aliases(info)], column))
        return plan

    def _column(self, header: str, field: str, *, sheet: bool) -> _Column:
        info = self._fields[field]
        nullable = info.is_required() and allows_none(info.annotation)
        return _Column(header, field, coercer_for(info.annotation, sheet=sheet), nullable)

    def _match(self, present: Mapping[str, str]) -> dict[str, str]:
        """Field -> header. ``columns`` takes precedence over the names of the model."""
        mapped = {field: present[normalise(header)] for header, field in self._columns.items()}
        used = set(mapped.values())
        by_field: dict[str, str] = {}
        problems = []
        for field, names in self._names.items():
            if field in mapped:
                by_field[field] = mapped[field]
                continue
            keys = dict.fromkeys(normalise(name) for name in names)
            found = [present[key] for key in keys if key in present and present[key] not in used]
            if len(found) > 1:
                names_found = " and ".join(repr(shorten(each, 80)) for each in found)
                params = {"headers": names_found, "field": field}
                problems.append(fault(None, found[1], "duplicate_column", "column.twice", params))
            if found:
                by_field[field] = found[0]
                used.add(found[0])
        if problems:
            first = problems[0]
            raise InputError(
                "; ".join(p.message for p in problems),
                code="duplicate_column",
                errors=problems,
                text=first.text,
                params=first.params,
            )
        return by_field

    def _refuse_missing(self, by_field: Mapping[str, str], headers: Sequence[str]) -> None:
        missing = [f for f, info in self._fields.items() if info.is_required() and f not in by_field]
        if not missing:
            return
        problems = [
            fault(None, self._title(f), "missing_columns", "column.missing", {"field": f, "names": either(self._names[f])})
            for f in missing
        ]
        params = {"columns": ", ".join(self._title(f) for f in missing), "headers": listed(headers)}
        raise InputError(
            f"the sheet has no column for {params['columns']}; its columns are: {params['headers']}."
            " Add the columns, or map yours with the option columns",
            code="missing_columns",
            errors=problems,
            text="list.missing_columns_named",
            params=params,
        )

    def _title(self, field: str) -> str:
        info = self._fields[field]
        return info.title or next(iter(aliases(info)), field)

    def _users_name(self, key: str, values: Mapping[str, Any], headers: Mapping[str, str] | None) -> str:
        """The user's name for the field that the model reports as ``key``."""
        column = self._json_columns.get(key)
        if column is None:
            return key
        if headers is not None:
            return headers.get(column.field) or self._title(column.field)
        return next((str(each) for each in values if self._json_columns.get(each) is column), key)


class MixedShape(ItemShape):
    """The form of jobs that name their workers, ``{"worker": name, "item": ...}``: each item has that of its worker.

    ``find`` gives a worker by its name; None where there is none, or where the Task cannot hold its jobs.
    """

    def __init__(self, find: Callable[[str], Worker | None], max_item_bytes: int = 65_536) -> None:
        super().__init__(None, max_item_bytes=max_item_bytes)
        self._find = find
        self._unfit: dict[str, str | None] = {}

    def _unfit_for_an_item(self, worker: Worker) -> str | None:
        """The parameters of a worker that cannot be called with one item; None of one that can."""
        if worker.name not in self._unfit:
            self._unfit[worker.name] = worker.unfit_for(1)
        return self._unfit[worker.name]

    def validate(self, row: RawRow, binding: Binding | None) -> NewItem | Refused:
        """The item as its worker's shape takes it, or all problems of the row."""
        values = row.values
        if not isinstance(values, Mapping) or values.keys() != {"worker", "item"} or row.problems:
            problem = fault(row.number, None, "not_a_job", "not_a_job", value=shorten(jsonable(values)))
            return Refused(row.number, row.problems or (problem,), {"value": jsonable(values)})
        name = values["worker"]
        worker = self._find(name) if isinstance(name, str) else None
        if worker is None or not isinstance(worker.shape, ItemShape):
            problem = fault(row.number, "worker", "unknown_worker", "option.worker", value=shorten(jsonable(name)))
            return Refused(row.number, (problem,), {"worker": jsonable(name)})
        if (takes := self._unfit_for_an_item(worker)) is not None:
            problem = fault(row.number, "worker", "invalid_worker", "option.worker_arguments", {"takes": takes}, name)
            return Refused(row.number, (problem,), {"worker": name})
        found = worker.shape.validate(replace(row, values=values["item"]), None)
        if isinstance(found, Refused):
            return replace(found, values={"worker": name, **found.values})
        return replace(found, worker_name=name, options=dumps({"retry": worker.max_retries}))

    def key_field(self, item: NewItem) -> str | None:
        """The field that is the key of the worker of an accepted item; None without one."""
        worker = self._find(item.worker_name) if item.worker_name is not None else None
        return None if worker is None else worker.key


def _take_cells(
    number: int, values: Mapping[str, Any], columns: tuple[_Column, ...]
) -> tuple[dict[str, Any], list[Problem]]:
    """Cells of a row become values for the fields of their columns, with every problem of the row."""
    data: dict[str, Any] = {}
    problems: list[Problem] = []
    for column in columns:
        value = values.get(column.header)
        if value is None:
            if column.keeps_none:
                data[column.field] = None
        elif isinstance(value, CellError):
            problems.append(_cell_error(number, column.header, value))
        elif column.coerce is None:
            data[column.field] = value
        else:
            try:
                data[column.field] = column.coerce(value)
            except Unclear as error:
                problems.append(fault(number, column.header, error.code, error.text, None, _shortened(jsonable(value))))
    return data, problems


def _cell_error(number: int, header: str, value: CellError) -> Problem:
    shown = shorten(value.text)
    return fault(number, header, "cell_error", "cell_error", {"shown": shown}, shown)


def _shortened(value: Any) -> Any:
    """A value for a message, shortened."""
    if isinstance(value, Mapping | list):
        return shorten(orjson.dumps(value).decode())
    return shorten(value)


# -- names of fields

_NAMES_SHOWN: Final = 50


def aliases(info: FieldInfo) -> list[str]:
    """The alternative names under which a field is read from an object."""
    from pydantic import AliasChoices, AliasPath  # with a model, pydantic is loaded already

    found: list[str] = []
    choices = info.validation_alias
    for each in choices.choices if isinstance(choices, AliasChoices) else [choices, info.alias]:
        name = each.path[0] if isinstance(each, AliasPath) and len(each.path) == 1 else each
        if isinstance(name, str) and name not in found:
            found.append(name)
    return found


def names_of(field: str, info: FieldInfo) -> list[str]:
    """The names that a header may have for a field: title, aliases, its own."""
    return list(dict.fromkeys([*([info.title] if info.title else []), *aliases(info), field]))


def either(names: Sequence[str]) -> str:
    """Names to choose from, for a message."""
    return " or ".join(map(repr, names))


def listed(headers: Sequence[str]) -> str:
    """The present columns, for a message: the first 50."""
    shown = ", ".join(shorten(header, 40) for header in headers[:_NAMES_SHOWN]) or "none"
    return shown + (", …" if len(headers) > _NAMES_SHOWN else "")


def has_nul(value: Any) -> bool:
    """Whether a value contains a NUL character, which not every database can store in text."""
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, Mapping):
        return any(has_nul(key) or has_nul(each) for key, each in value.items())
    return isinstance(value, list | tuple) and any(map(has_nul, value))
