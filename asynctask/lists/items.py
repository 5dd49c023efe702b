"""Rows to items: binds headers to fields, converts cells, and reports every problem of a row at once.

What is kept of an item is its input, as JSON: the values that were given, cells converted to the types of their fields. A
worker's model is built from it by :meth:`ItemShape.revive`, once for each attempt, so that its validators, serializers and
defaults act as they would on a call with these values. A row is accepted if the same call builds the model here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, cast, get_args, get_origin, get_type_hints, is_typeddict

import orjson

from asynctask.errors import InputError, Problem
from asynctask.ledger.base import NewItem, dumps
from asynctask.ledger.search import MAX_FIELD, MAX_FIELDS, SearchValue, values_of
from asynctask.lists.coerce import (
    Coercer,
    Notation,
    Unclear,
    allows_none,
    by_model,
    coercer_for,
    is_number,
    kind_of,
    kinds_of,
    members,
    own_syntax,
    text_of_cell,
)
from asynctask.lists.problems import fault, from_pydantic, in_order, refused_with
from asynctask.lists.readers.base import CellError, Formatted, RawRow, normalise, report_block, shorten
from asynctask.lists.written_cells import field_json, fields_of, item_text, jsonable, plain_json, secret_json, storable
from asynctask.messages import MASK, SECRET, is_storable, masked
from asynctask.worker import Worker, is_model

if TYPE_CHECKING:
    import pydantic
    from pydantic.fields import FieldInfo

MIXED: Final = "*"
"""The worker's name of a Task whose jobs name their own."""

_NUL: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
"""A NUL character in JSON, which not every database can store in text."""
_SHOWN: Final = 20
"""Columns named in a message, unless more are required."""
_TAKES_BLANK: Final = (None, coercer_for(str, sheet=False))
"""Coercers that keep an empty text of JSON as it is; any other treats it as a missing value."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A rejected row: its problems, and its original cells, JSON-ready, with secrets masked. ``number``: of the row that
    it corrects, from the row-number column of a report."""

    row: int
    problems: tuple[Problem, ...]
    values: dict[str, Any]
    number: int | None = None

    def error(self, what: str) -> InputError:
        """The error for an item that is alone: ``what`` it means, and every problem."""
        said = "; ".join(f"{each.column}: {each.message}" if each.column else each.message for each in self.problems)
        return InputError(f"{what}: {said}", code="invalid_item", errors=self.problems)


@dataclass(frozen=True, slots=True)
class _Column:
    header: str
    field: str
    coerce: Coercer | None
    keeps_none: bool
    """Whether an empty cell reaches the model as None: the field is required and nullable."""

    def take(self, value: Any, key: str, row: int, shown: str, data: dict[str, Any], problems: list[Problem]) -> None:
        """Adds a value to ``data`` under ``key``, converted; or its problem, of the column that is ``shown`` to people."""
        try:
            data[key] = value if self.coerce is None else self.coerce(value)
        except Unclear as error:
            problems.append(fault(row, shown, error.code, error.text, error.params, _shortened(jsonable(value))))


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

    @property
    def headers(self) -> dict[str, str]:
        """Field -> header."""
        return {column.field: column.header for column in self.columns}


class UnfitItem(ValueError):
    """An item does not fit the model of its worker, which may have changed since. The message has no values, so that
    such rows are one group of errors."""


class ItemShape:
    """The form of a worker's items; built once per worker.

    Arguments: ``model``, the worker's pydantic model, None for any dict; ``columns``, header -> field name, for headers
    that are not names of the model, empty for a column that is not used; ``max_item_bytes``, the largest item as JSON;
    ``search``, the fields by whose values a search finds an item.
    Raises :class:`InputError` ``unknown_column`` if ``columns`` names a field that the model does not have.

    ``unfit``: why no input of the model can be kept, so that no list can have it; None if it can. ``field_names``: the
    fields of the model, empty without one. ``secrets``: those that are secrets or hold one; ``secret_names``: the names of
    their columns, normalised. ``mapped``: the headers that the sender mapped to fields.
    """

    def __init__(
        self,
        model: type[pydantic.BaseModel] | None,
        columns: Mapping[str, str] | None = None,
        max_item_bytes: int = 65_536,
        search: Sequence[str] = (),
    ) -> None:
        self.model, self._max_bytes = model, max_item_bytes
        self._columns = {header: field for header, field in (columns or {}).items() if field}
        self._unused = frozenset(normalise(header) for header, field in (columns or {}).items() if not field)
        self.mapped = tuple(self._columns)
        self.unfit = None if model is None else unfit_model(model)
        self._fields: dict[str, FieldInfo] = dict(model.model_fields) if model else {}
        self.field_names = tuple(self._fields)
        self.secrets = frozenset(name for name, info in self._fields.items() if holds_secret(info.annotation))
        unknown = sorted(set(self._columns.values()) - set(self._fields)) if model else []
        if unknown:
            raise InputError(
                f"columns: {', '.join(unknown)} is no field of the item; its fields: {', '.join(self._fields)}",
                code="unknown_column",
            )
        self._names = {name: names_of(name, info) for name, info in self._fields.items()}
        self.expected: frozenset[str] = frozenset(
            [*(columns or {}), *(each for names in self._names.values() for each in names)]
        )
        self.search = tuple(dict.fromkeys((isinstance(name, str) and self.field_of(name)) or name for name in search))
        self._own_syntax = own_syntax(model) if model else frozenset()
        self._json_columns = self._plan_json()
        keys = {field: {field, *aliases(info, whole=False)} for field, info in self._fields.items()}
        self._secret_keys = frozenset[str]().union(*(keys[field] for field in self.secrets))
        mapped = [header for header, field in self._columns.items() if field in self.secrets]
        named = [name for field in self.secrets for name in self._names[field]]
        self.secret_names = frozenset(normalise(name) for name in (*mapped, *named, *self._secret_keys))
        self._drawn = [name for name, info in self._fields.items() if info.default_factory not in _SAME]
        self._keys = frozenset[str]().union(*keys.values()) if model is not None and _reads_fields_only(model) else None

    def wanted(self) -> str:
        """The columns of a suitable sheet, for a message: one name each, all required ones first."""
        needed = [self._title(field) for field, info in self._fields.items() if info.is_required()]
        others = [self._title(field) for field, info in self._fields.items() if not info.is_required()]
        room = max(0, _SHOWN - len(needed))
        return ", ".join(needed + others[:room]) + (", …" if len(others) > room else "")

    def by_name(self, headers: Iterable[str]) -> dict[str, str]:
        """Header -> field, for each header that is a name of a field."""
        fields = {normalise(name): field for field, names in reversed(self._names.items()) for name in names}
        return {header: fields[name] for header in headers if (name := normalise(header)) in fields}

    def names(self) -> dict[str, list[str]]:
        """Field -> the names that its column may have, its title for people first; empty without a model."""
        return {field: list(dict.fromkeys([self._title(field), *names])) for field, names in self._names.items()}

    @property
    def required(self) -> list[str]:
        """The fields that each item must have."""
        return [field for field, info in self._fields.items() if info.is_required()]

    def bind(self, headers: Sequence[str], notation: Callable[[str], Notation] | None = None) -> Binding:
        """Matches headers with fields. Names are compared normalised; unknown headers are ignored. ``notation`` gives that
        of the column of numbers under a header; by default decimals have points.

        Raises :class:`InputError`: ``missing_columns`` if a required field has no column, ``unknown_column`` if
        ``columns`` names an absent header, ``duplicate_column`` if two columns match one field.
        """
        ignored = report_block(headers) | {header for header in headers if normalise(header) in self._unused}
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
        made = (self._column(header, field, sheet=True, notation=notation) for field, header in by_field.items())
        return Binding(tuple(made), ignored)

    def validate(self, row: RawRow, binding: Binding | None, compared: Collection[str] = ()) -> NewItem | Rejected:
        """Converts a row to an item, or refuses it with all its problems. ``binding`` is None for JSON; ``compared`` names
        the fields whose values the item carries, as the model has them."""
        values = self.values(row)
        if self.model is None and binding is None and not row.problems:
            return self._plain(row, values, None, compared)  # any JSON value: a number, a text, a list
        if not isinstance(values, Mapping):
            problem = fault(row.number, None, "not_an_object", "not_an_object", value=shorten(jsonable(values)))
            return Rejected(row.number, (problem,), {"value": jsonable(values)})
        if row.problems:
            return self.refused(row, row.problems, binding)
        if self.model is None:
            return self._plain(row, values, binding, compared)
        if binding is not None:
            data, problems = _take_cells(row.number, values, binding.columns)
        elif isinstance(row.values, self.model):
            return self._instance(row, row.values, compared)
        else:
            data, problems = self._take_json(row.number, values)
        return self._by_model(row, data, problems, binding, compared)

    def refused(self, row: RawRow, problems: Iterable[Problem], binding: Binding | None) -> Rejected:
        """A row refused with these problems; its secrets are shown nowhere."""
        values = self.values(row)
        if not isinstance(values, Mapping):
            return Rejected(row.number, tuple(problems), {"value": jsonable(values)})
        if not self.secrets:
            return Rejected(row.number, in_order(tuple(problems), values), jsonable(values))
        # Also what is meant as one, in another spelling than JSON has it or in a column that another one replaces.
        hidden = self._secret_keys | {key for key in values if normalise(str(key)) in self.secret_names}
        within = tuple(f"{key}." for key in hidden)
        cells = {key: MASK if key in hidden and each is not None else each for key, each in values.items()}
        texts = sorted(_texts([each for key, each in values.items() if key in hidden]) - {MASK}, key=len, reverse=True)
        shown = [
            replace(_without(problem, texts), value=MASK)
            if problem.value is not None and (problem.column in hidden or str(problem.column).startswith(within))
            else _without(problem, texts)
            for problem in problems
        ]
        return Rejected(row.number, in_order(shown, values), jsonable(cells))

    def field_of(self, name: str) -> str | None:
        """The field for a name: its own, else a title or alias in any spelling; None for an unknown one.

        Without a model every name is a key.
        """
        if self.model is None or name in self._fields:
            return name
        wanted = normalise(name)
        return next((field for field, names in self._names.items() if wanted in map(normalise, names)), None)

    def check_search(self) -> None:
        """Raises :class:`InputError` if ``search`` has a name that is no field, or a field that no search may show."""
        if len(self.search) > MAX_FIELDS:
            raise InputError(f"search names {len(self.search)} fields, the most is {MAX_FIELDS}")
        for name in self.search:
            if not isinstance(name, str) or not 0 < len(name) <= MAX_FIELD or not is_storable(name):
                raise InputError(f"search: {name!r:.80} must be the name of a field, of at most {MAX_FIELD} characters")
            if self.model is not None and name not in self._fields:
                raise InputError(f"search: {name!r} is no field of the item; its fields: {', '.join(self._fields)}")
            if name in self.secrets:
                raise InputError(f"search: {name!r} holds a secret, and what is found is shown; choose another field")

    def indexed(self, item: Any) -> list[SearchValue]:
        """What a search finds an item by: an instance of the model, or an object as a program sends it. A value without
        JSON is not found."""
        found: dict[str, Any] = {}
        for field in self.search if self.model is not None or isinstance(item, Mapping) else ():
            if isinstance(item, Mapping):
                keys = (each for each in (field, *self._names.get(field, ())) if each in item)
                value = item.get(next(keys, field))
            else:
                value = getattr(item, field, None)
            if not isinstance(value, str | int | float | Decimal | None):
                try:
                    value = orjson.loads(item_text(value, field_json))
                except (TypeError, ValueError):
                    value = None
            found[field] = value
        return values_of(found)

    def values(self, row: RawRow) -> Any:
        """The values of a row before conversion."""
        values = row.values
        return fields_of(values) if type(values) is not dict and is_model(type(values)) else values

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

        hidden: dict[str, Any] = {}
        if self.secrets and isinstance(params, Mapping):
            hidden = {key: params[key][SECRET] for key in self._secret_keys if _is_kept(params.get(key))}
            params = {**params, **hidden}
        try:
            return self._build(orjson.dumps(params))
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=False, include_input=False)
            said = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in faults)
            for text in _texts(list(hidden.values())):
                said = said.replace(text, MASK)
            raise UnfitItem(f"the item does not fit {self.model.__name__}: {said}") from None

    def preview(self, row: NewItem) -> Any:
        """An accepted item as the worker gets it, JSON-ready: of a model, as it shows itself."""
        if self.model is None:
            return masked(row.values)
        try:
            return self.revive(row.values).model_dump(mode="json", round_trip=True, warnings=False)
        except Exception:  # a serializer of the model that refuses the value, or an answer that changes
            return masked(row.values)

    def conceal(self, params: Any) -> Any:
        """An item that another program sent, JSON-ready, as it is kept: its secrets are marked."""
        if not self.secrets or not isinstance(params, Mapping):
            return params
        return {
            key: {SECRET: each} if key in self._secret_keys and each is not None and not _is_kept(each) else each
            for key, each in params.items()
        }

    def _build(self, body: bytes) -> Any:
        """The model of an input: the one call that builds it, when it is accepted and when it is performed."""
        assert self.model is not None
        return self.model.model_validate_json(body, by_alias=True, by_name=True)

    def _by_model(
        self,
        row: RawRow,
        data: dict[str, Any],
        problems: list[Problem],
        binding: Binding | None,
        compared: Collection[str],
    ) -> NewItem | Rejected:
        from pydantic import ValidationError  # with a model, pydantic is loaded already

        kept, item = b"", cast("Any", None)
        problems += [
            fault(row.number, self._users_name(key, self.values(row), binding), "masked_secret", "masked_secret")
            for key in self._secret_keys & data.keys()
            if _is_masked(data[key])
        ]
        try:
            body, kept = self._kept(data)
            item = self._build(body)
            problems += self._changed_instances(row, data, item) if binding is None else []
        except TypeError as error:
            problems += self._no_json(row, data, error, binding)
        except ValidationError as error:
            problems += self._problems(row, error, binding, {problem.column for problem in problems})
        except Exception as error:
            # An exception in a validator of the model refuses this row only, not the list.
            words = shorten(jsonable(f"{type(error).__name__}: {error}"))
            problems.append(fault(row.number, None, "invalid", "unchecked", {"words": words}))
        if problems:
            return self.refused(row, problems, binding)
        given = getattr(item, "model_fields_set", self._drawn)  # a validator of the model may return anything
        if drawn := {name: getattr(item, name) for name in self._drawn if name not in given}:
            kept = self._with_drawn(data, drawn) or kept
        values = {name: getattr(item, name, None) for name in compared}
        try:
            said = orjson.loads(item_text(values, secret_json)) if values else None
            return self._stored(row, kept, binding, said, item)
        except TypeError as error:
            return self.refused(row, self._no_json(row, values, error, binding), binding)

    def _with_drawn(self, data: Mapping[str, Any], drawn: Mapping[str, Any]) -> bytes | None:
        """The text to keep of an input with what default factories made for it, so that every attempt has the same ids and
        times; None if the model does not take these values for its own."""
        try:
            body, kept = self._kept({**data, **drawn})
            again = self._build(body)
        except Exception:  # of a type without JSON, or a validator that refuses it
            return None
        return kept if all(getattr(again, name) == each for name, each in drawn.items()) else None

    def _kept(self, data: Mapping[str, Any]) -> tuple[bytes, bytes]:
        """The JSON text of an input from which the model is built, and the one that is kept, in which secrets are marked.
        Raises TypeError."""
        body = item_text(data, secret_json if self.secrets else field_json)
        hidden = self._secret_keys & data.keys()
        if not hidden:
            return body, body
        item_text({key: each for key, each in data.items() if key not in hidden}, field_json)  # no secret is elsewhere
        marked = {key: {SECRET: each} if key in hidden and each is not None else each for key, each in data.items()}
        return body, item_text(marked, secret_json)

    def _instance(self, row: RawRow, given: Any, compared: Collection[str]) -> NewItem | Rejected:
        """Accepts an instance of the model by an input that builds an equal one.

        That is its values that were set, else also its other ones, and where a value is read in another form than it has
        (``Json``, ``Base64Bytes``) that form.
        """
        every = fields_of(given)
        if self._keys is not None:  # of a subclass, what the model reads
            every = {name: each for name, each in every.items() if name in self._fields}
        names = given.model_fields_set | (given.__pydantic_extra__ or {}).keys()
        data, wrong = {name: each for name, each in every.items() if name in names}, set[str]()
        for attempt in range(2):
            wrong = self._differing(every, data)
            if not wrong:
                return self._by_model(row, data, [], None, compared)
            if attempt == 0:
                try:
                    written = given.model_dump(mode="json", round_trip=True, include=wrong, warnings=False)
                except Exception:  # bytes that are no text, or a serializer of the model
                    break
                data |= {name: written.get(name, every[name]) if name in data else every[name] for name in wrong}
        assert self.model is not None
        params = {"model": self.model.__name__, "fields": ", ".join(sorted(wrong))}
        return self.refused(row, [fault(row.number, min(wrong), "invalid", "instance", params)], None)

    def _changed_instances(self, row: RawRow, data: Mapping[str, Any], item: Any) -> Iterable[Problem]:
        """The problems of values that hold instances which their own validators have changed again."""
        for key, value in data.items():
            if _is_json(value) or key not in self._json_columns:
                continue
            built = getattr(item, self._json_columns[key].field, None)
            for kind, names in _changed(value, built):
                params = {"model": kind.__name__, "fields": ", ".join(sorted(names))}
                yield fault(row.number, key, "invalid", "instance", params)

    def _differing(self, every: Mapping[str, Any], data: Mapping[str, Any]) -> set[str]:
        """The names of an instance's values, ``every``, that another one built of ``data`` does not have."""
        from pydantic import ValidationError  # with a model, pydantic is loaded already

        try:
            built = fields_of(self._build(self._kept(data)[0]))
        except ValidationError as error:
            first = {str(each["loc"][0]) for each in error.errors(include_url=False) if each["loc"]}
            fields = {self._json_columns[name].field for name in first if name in self._json_columns}
            return fields & every.keys() or set(every)
        except Exception:
            return set(every)
        return {name for name, each in every.items() if name not in built or built[name] != each}

    def _plain(self, row: RawRow, values: Any, binding: Binding | None, compared: Collection[str]) -> NewItem | Rejected:
        given = values
        if binding is not None:
            renamed = binding.fields
            kept = {
                key: value.number if type(value) is Formatted else value
                for key, value in values.items()
                if key not in binding.ignored
            }
            problems = [_cell_error(row.number, key, value) for key, value in kept.items() if isinstance(value, CellError)]
            if problems:
                return self.refused(row, problems, binding)
            given = {renamed.get(key, key): value for key, value in kept.items()}
        try:
            body = item_text(given, plain_json)
        except TypeError as error:
            parts = given if isinstance(given, Mapping) else {}
            return self.refused(row, self._no_json(row, parts, error, binding), binding)
        found = {name: given.get(name) for name in compared} if isinstance(given, Mapping) else {}
        return self._stored(row, body, binding, orjson.loads(item_text(found, plain_json)) if found else None, given)

    def _no_json(
        self, row: RawRow, data: Mapping[Any, Any], error: TypeError, binding: Binding | None
    ) -> Iterable[Problem]:
        """The problem of a row with a value that is no JSON, under the name of its column, if that is found."""
        default = plain_json if self.model is None else secret_json if self.secrets else field_json
        for key, value in data.items():
            try:
                item_text({key: value}, default)
            except TypeError as found:
                name = self._users_name(str(key), self.values(row), binding)
                return [fault(row.number, storable(name), "invalid", "not_json", {"words": shorten(str(found))})]
        return [fault(row.number, None, "invalid", "not_json", {"words": shorten(str(error))})]

    def _stored(
        self, row: RawRow, body: bytes, binding: Binding | None, compared: Mapping[str, Any] | None, item: Any
    ) -> NewItem | Rejected:
        """The item of this JSON text, or its refusal if the ledger cannot keep it."""
        if len(body) > self._max_bytes:
            params = {"size": len(body), "limit": self._max_bytes}
            problem = fault(row.number, None, "item_too_large", "item_too_large", params)
        elif _NUL.search(body):
            problem = fault(row.number, None, "invalid", "nul")
        else:
            return NewItem(body.decode(), row.number, compared=compared, search=self.indexed(item) if self.search else ())
        return self.refused(row, [problem], binding)

    def _problems(
        self, row: RawRow, error: pydantic.ValidationError, binding: Binding | None, known: set[str | None]
    ) -> Iterable[Problem]:
        values = self.values(row)
        for each in error.errors(include_url=False):
            loc = [str(part) for part in each["loc"]]
            first = self._users_name(loc[0], values, binding) if loc else None
            if first is not None and first in known:
                continue
            column = ".".join([first, *loc[1:]]) if first is not None else None
            given = values.get(first, each["input"]) if first is not None and len(loc) == 1 else each["input"]
            problem = from_pydantic(row.number, column, each, _shortened(jsonable(given)) if loc else None)
            yield replace(problem, value=None) if problem.code == "missing" else problem

    def _take_json(self, number: int, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        data: dict[str, Any] = {}
        problems: list[Problem] = []
        for key, value in values.items():
            column = self._json_columns.get(key)
            if column is None:
                if self._keys is None or key in self._keys:
                    data[str(key)] = value
                continue
            blank = isinstance(value, str) and not value.strip() and column.coerce not in _TAKES_BLANK
            if value is None or (blank and column.keeps_none):
                data[key] = None
            if value is None or blank:
                continue
            column.take(value, key, number, str(key), data, problems)
        return data, problems

    def _plan_json(self) -> dict[str, _Column]:
        plan = {}
        for field, info in self._fields.items():
            column = self._column("", field, sheet=False)
            plan.update(dict.fromkeys([field, *aliases(info)], column))
        return plan

    def _column(
        self, header: str, field: str, *, sheet: bool, notation: Callable[[str], Notation] | None = None
    ) -> _Column:
        info = self._fields[field]
        nullable = info.is_required() and allows_none(info.annotation)
        own = field in self._own_syntax and (is_number(info.annotation) or kind_of(info.annotation) not in (None, str))
        written = notation(header) if notation is not None and not own and is_number(info.annotation) else None
        annotation = str if field in self.secrets and is_secret_text(info.annotation) else info.annotation
        coerce = coercer_for(annotation, sheet=sheet, notation=written)
        if coerce is not None and not own and kind_of(annotation) is float:
            coerce = _as_float(coerce)
        return _Column(header, field, by_model(coerce, info.annotation) if own and coerce is not None else coerce, nullable)

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
            raise refused_with(problems)
        return by_field

    def _refuse_missing(self, by_field: Mapping[str, str], headers: Sequence[str]) -> None:
        missing = [field for field in self.required if field not in by_field]
        if not missing:
            return
        problems = [
            fault(None, self._title(f), "missing_columns", "column.missing", {"field": f, "names": either(self._names[f])})
            for f in missing
        ]
        params = {"columns": ", ".join(self._title(f) for f in missing), "headers": listed(headers)}
        raise InputError(
            f"the sheet has no column for {params['columns']}; its columns are: {params['headers']}."
            " Add the columns to the sheet, or rename yours; a program can map them with the option columns",
            code="missing_columns",
            errors=problems,
            text="list.missing_columns_named",
            params=params,
        )

    def _title(self, field: str) -> str:
        info = self._fields[field]
        return info.title or next(iter(aliases(info)), field)

    def _users_name(self, key: str, values: Mapping[str, Any], binding: Binding | None) -> str:
        """The user's name for the field that the model reports as ``key``."""
        column = self._json_columns.get(key)
        if column is None:
            return key
        if binding is not None:
            return binding.headers.get(column.field) or self._title(column.field)
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

    def validate(self, row: RawRow, binding: Binding | None, compared: Collection[str] = ()) -> NewItem | Rejected:
        """The item as its worker's shape takes it, or all problems of the row. It carries the key of its worker, too."""
        values = row.values
        if not isinstance(values, Mapping) or values.keys() != {"worker", "item"} or row.problems:
            problem = fault(row.number, None, "not_a_job", "not_a_job", value=shorten(jsonable(values)))
            return Rejected(row.number, row.problems or (problem,), {"value": jsonable(values)})
        worker = self._worker(values["worker"])
        if worker is None or not isinstance(worker.shape, ItemShape):
            name = jsonable(values["worker"])
            problem = fault(row.number, "worker", "unknown_worker", "option.worker", value=shorten(name))
            return Rejected(row.number, (problem,), {"worker": name})
        if worker.rate is not None or (takes := self._unfit_for_an_item(worker)) is not None:
            # The limit of a Task is that of its worker, and this Task has several.
            rated = worker.rate is not None
            text, params = ("option.worker_rate", {}) if rated else ("option.worker_arguments", {"takes": takes})
            problem = fault(row.number, "worker", "invalid_worker", text, params, worker.name)
            return Rejected(row.number, (problem,), {"worker": worker.name})
        compared = [*compared, worker.key] if worker.key is not None else compared
        found = worker.shape.validate(replace(row, values=values["item"]), None, compared)
        if isinstance(found, Rejected):
            return replace(found, values={"worker": worker.name, **found.values})
        return replace(found, worker_name=worker.name, options=dumps({"retry": worker.max_retries}))

    def refused(self, row: RawRow, problems: Iterable[Problem], binding: Binding | None) -> Rejected:
        """A row refused with these problems, as its worker's shape shows it."""
        worker = self._worker(row.values["worker"])
        if worker is None or not isinstance(worker.shape, ItemShape):
            return super().refused(row, problems, binding)
        found = worker.shape.refused(replace(row, values=row.values["item"]), problems, None)
        return replace(found, values={"worker": worker.name, **found.values})

    def _worker(self, name: Any) -> Worker | None:
        return self._find(name) if isinstance(name, str) else None

    def preview(self, row: NewItem) -> Any:
        worker = self._worker(row.worker_name)
        found = None if worker is None else worker.shape
        return found.preview(row) if isinstance(found, ItemShape) else masked(row.values)

    def key_field(self, item: NewItem) -> str | None:
        """The field that is the key of the worker of an accepted item; None without one."""
        worker = self._worker(item.worker_name)
        return None if worker is None else worker.key


def _as_float(coerce: Coercer) -> Coercer:
    """``coerce`` with a number that was a text as JSON's number, as people see it."""

    def convert(value: Any) -> Any:
        found = coerce(value)
        return float(found) if isinstance(found, str) else found

    return convert


def _take_cells(
    number: int, values: Mapping[str, Any], columns: tuple[_Column, ...]
) -> tuple[dict[str, Any], list[Problem]]:
    """Cells of a row become values for the fields of their columns, with every problem of the row."""
    data: dict[str, Any] = {}
    problems: list[Problem] = []
    for column in columns:
        value = values.get(column.header)
        if type(value) is Formatted and column.coerce is not text_of_cell:
            value = value.number
        if value is None:
            if column.keeps_none:
                data[column.field] = None
        elif isinstance(value, CellError):
            problems.append(_cell_error(number, column.header, value))
        else:
            column.take(value, column.field, number, column.header, data, problems)
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


def aliases(info: FieldInfo, *, whole: bool = True) -> list[str]:
    """The alternative names under which a field is read from an object; with ``whole=False`` also those of the objects in
    which it may lie."""
    from pydantic import AliasChoices, AliasPath  # with a model, pydantic is loaded already

    found: list[str] = []
    choices = info.validation_alias
    for each in choices.choices if isinstance(choices, AliasChoices) else [choices, info.alias]:
        name = each.path[0] if isinstance(each, AliasPath) and (len(each.path) == 1 or not whole) else each
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


# -- what a model's fields hold

_SAME: Final = (None, list, dict, set, frozenset, tuple, str, int, float, bool)
"""Default factories that make the same each time, and none."""


def holds_secret(annotation: Any, seen: frozenset[Any] = frozenset()) -> bool:
    """Whether values of an annotation are secrets of pydantic, or hold one at any depth."""
    for each in members(annotation):
        if _is_secret(each):
            return True
        inner = [part for part in get_args(each) if not isinstance(part, list)]  # a list: parameters of a callable
        if isinstance(each, type) and each not in seen:
            seen |= {each}
            inner += _annotations(each)
        if any(holds_secret(part, seen) for part in inner):
            return True
    return False


def _leaves(value: Any) -> Iterator[Any]:
    """What the value of a field holds at any depth, apart from what holds others; secrets are revealed."""
    value = secret_json(value) if callable(getattr(value, "get_secret_value", None)) else value
    if is_model(type(value)):
        value = fields_of(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from _leaves(each)
    else:
        yield value.decode(errors="replace") if isinstance(value, bytes) else value


def _is_masked(value: Any) -> bool:
    """Whether the value of a field that holds secrets shows the mask in place of one, at any depth."""
    return any(isinstance(each, str) and each.strip() == MASK for each in _leaves(value))


_TOLD: Final = 3
"""Characters from which a text of a secret is looked for in messages."""


def _texts(value: Any) -> set[str]:
    """The texts and numbers in the value of a field that holds secrets, as a message may have them."""
    return {str(each) for each in _leaves(value) if not isinstance(each, bool | None) and len(str(each)) >= _TOLD}


def _without(problem: Problem, texts: Iterable[str]) -> Problem:
    """A problem that does not tell these texts: a validator may have said what it was given."""
    message, params = problem.message, dict(problem.params)
    for text in texts:
        message = message.replace(text, MASK)
        params = {name: each.replace(text, MASK) if isinstance(each, str) else each for name, each in params.items()}
    return (
        problem
        if message == problem.message and params == problem.params
        else replace(problem, message=message, params=params)
    )


_SCALARS: Final = frozenset({str, int, float, bool, type(None), datetime, date, Decimal})


def _is_json(value: Any) -> bool:
    """Whether a value holds no instance of a class, as that of a parsed text."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is dict:
        value = value.values()
    elif kind is not list:
        return False
    return all(map(_is_json, value))


def _changed(given: Any, built: Any) -> Iterable[tuple[type, set[str]]]:
    """The class and the changed fields of each instance in ``given`` that its class makes another one of when it is built
    of its own values, as it was for ``built``."""
    kind = type(built)
    if is_model(kind) or is_dataclass(built):
        if isinstance(given, kind):
            names = _unlike(vars(given), vars(built))
            if names and (not (again := _built_again(given, kind)) or _unlike(vars(given), again)):
                yield kind, names
        elif isinstance(given, Mapping):
            for key in given.keys() & vars(built).keys():
                yield from _changed(given[key], vars(built)[key])
    elif isinstance(given, Mapping) and isinstance(built, Mapping):
        for key in given.keys() & built.keys():
            yield from _changed(given[key], built[key])
    elif isinstance(given, list | tuple) and isinstance(built, list | tuple):
        for each, made in zip(given, built, strict=False):
            yield from _changed(each, made)


def _unlike(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> set[str]:
    return {name for name, each in theirs.items() if name not in mine or mine[name] != each}


def _built_again(given: Any, kind: type) -> Mapping[str, Any] | None:
    """The values of an instance that is built of those of another one; None if they build none."""
    from pydantic import TypeAdapter  # with a model, pydantic is loaded already

    try:
        return vars(TypeAdapter(kind).validate_json(item_text(given, secret_json), by_alias=True, by_name=True))
    except Exception:  # of a validator, or a value without JSON
        return None


def is_secret_text(annotation: Any) -> bool:
    """Whether an annotation is ``SecretStr`` or ``SecretBytes``, or one of them or None."""
    from pydantic import SecretBytes, SecretStr  # with a model, pydantic is loaded already

    return all(isinstance(each, type) and issubclass(each, SecretStr | SecretBytes) for each in kinds_of(annotation))


def _is_secret(annotation: Any) -> bool:
    from pydantic import Secret, SecretBytes, SecretStr  # with a model, pydantic is loaded already

    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, Secret | SecretBytes | SecretStr)


def _annotations(kind: type) -> list[Any]:
    """The annotations of the fields of a model, a dataclass, a TypedDict or a NamedTuple."""
    if is_model(kind):
        return [info.annotation for info in kind.model_fields.values()]
    if not (is_dataclass(kind) or is_typeddict(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))):
        return []
    try:
        return list(get_type_hints(kind, include_extras=True).values())
    except NameError:  # an annotation that exists for type checkers only
        return []


_NO_JSON: Final = frozenset({"is-instance", "is-subclass", "callable"})
_AROUND: Final[Mapping[str, str]] = {
    "function-after": "schema", "custom-error": "schema", "definitions": "schema", "model": "schema",
    "dataclass": "schema", "json-or-python": "json_schema", "lax-or-strict": "lax_schema", "list": "items_schema",
    "set": "items_schema", "frozenset": "items_schema", "dict": "values_schema",
}  # fmt: skip
"""Kinds of pydantic's core schema that read JSON as the one inside reads it."""


def unfit_model(model: type[pydantic.BaseModel]) -> str | None:
    """Why no input of a model can be kept as JSON, a required field of a type that JSON does not build; None if one can."""
    if not model.__pydantic_complete__ and model.model_rebuild(raise_errors=False) is not True:
        return f"{model.__name__} names a type that is not defined yet; define it before the worker"
    if holds_secret(_unnamed(model)):
        return f"{model.__name__} holds secrets under names that no field has, where they cannot be hidden; declare fields"
    schema: Any = model.__pydantic_core_schema__
    known = {each["ref"]: each for each in schema.get("definitions", ())}
    field = _unread(schema, known, frozenset())
    if field is None:
        return None
    return (
        f"{model.__name__}: no JSON builds a value for the field {field or '(root)'}, which is required; give it a type"
        " that JSON has, a validator that makes the value of such a one, or a default"
    )


def _unnamed(model: type[pydantic.BaseModel]) -> Any:
    """The annotation of the values of a model that have no field of their own."""
    if model.__pydantic_root_model__:
        return model.model_fields["root"].annotation
    try:
        return get_type_hints(model, include_extras=True).get("__pydantic_extra__")
    except NameError:  # an annotation that exists for type checkers only
        return None


def _reads_fields_only(model: type[pydantic.BaseModel]) -> bool:
    """Whether the keys of an input that are no field's mean nothing to the model: it ignores them, and no validator sees
    the whole input."""
    if model.model_config.get("extra", "ignore") != "ignore" or not model.__pydantic_complete__:
        return False
    schema: Any = model.__pydantic_core_schema__
    known = {each["ref"]: each for each in schema.get("definitions", ())}
    while schema["type"] in ("definitions", "definition-ref", "function-after", "model"):
        if schema["type"] == "model" and schema.get("custom_init"):
            return False
        schema = known[schema["schema_ref"]] if schema["type"] == "definition-ref" else schema["schema"]
    return bool(schema["type"] == "model-fields")


def _unread(schema: Mapping[str, Any], known: Mapping[str, Any], seen: frozenset[str]) -> str | None:
    """The name of a required field that no JSON builds, dotted; empty if the schema itself is such; None for one that can
    be read."""
    kind = schema["type"]
    if kind in _NO_JSON:
        return ""
    if kind == "definition-ref":
        ref = schema["schema_ref"]
        return None if ref in seen or ref not in known else _unread(known[ref], known, seen | {ref})
    if kind in _AROUND:
        return _unread(schema[_AROUND[kind]], known, seen) if _AROUND[kind] in schema else None
    if kind in ("union", "tagged-union"):
        choices = schema["choices"].values() if isinstance(schema["choices"], dict) else schema["choices"]
        found = [_unread(each[0] if isinstance(each, tuple) else each, known, seen) for each in choices]
        return None if None in found else next(iter(found), None)
    if kind not in ("model-fields", "typed-dict", "dataclass-args"):
        return None
    parts = schema["fields"]
    named = parts.items() if isinstance(parts, dict) else ((each["name"], each) for each in parts)
    for name, part in named:
        inner = _unread(part["schema"], known, seen)
        if inner is not None and part.get("required", True):
            return f"{name}.{inner}".rstrip(".")
    return None


def _is_kept(value: Any) -> bool:
    """Whether a value is a secret as it is kept."""
    return isinstance(value, Mapping) and value.keys() == {SECRET}
