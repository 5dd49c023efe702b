"""The index of the search over all Tasks: values of items, by which people find what became of one.

A worker names fields of its items (``search``). The values of an item are written with its Event, in the same transaction;
nothing changes them afterwards, and they are deleted with the Event. A row of ``search_values`` belongs to the Event of
``task_id`` and ``seq``; without a Task, ``seq`` is the Event's own id. ``row`` is set if the job has several items.

Values are compared in one form, :func:`normal`, which :data:`MAX_VALUE` bounds.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, NamedTuple, Self

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.database import batches
from asynctask.database.tables import events, search_values, tasks
from asynctask.errors import InputError
from asynctask.ledger.base import MAX_ID, PURGING
from asynctask.messages import is_storable

_s, _t, _e = search_values.c, tasks.c, events.c

MAX_FIELDS: Final = 5
"""Most fields that a worker may name."""

MAX_FIELD: Final = 100
"""Most characters of a field's name."""

MAX_VALUE: Final = 100
"""Most characters of a value that are kept and compared; the rest of a longer one is ignored."""

MAX_VALUES: Final = 20
"""Most values of one item, for instance of fields that are lists."""

MAX_TEXT: Final = 1_000
"""Most characters of a text to search for."""

_READ: Final = 2_000
"""Most characters of a value that are read, to bound the time that a long one takes."""

_EXPONENT: Final = 1_000
"""Exponents from which a number is not written in full."""

_LAST: Final = "\U0010ffff"
"""The last character, which no value begins with in practice."""

COLUMNS: Final = ("value", "field", "task_id", "seq", "row")

SearchValue = tuple[str, str, int | None]
"""A field of an item, its value in the form that is compared, and the item's row if its job has several items."""


# -- the form in which values are compared


def normal(text: str) -> str:
    """The form of a text that is compared: without differences of case, of width and of blanks, without invisible
    characters, and cut at :data:`MAX_VALUE`."""
    text = text.strip()[:_READ]
    if text.isascii():
        return " ".join(text.lower().split())[:MAX_VALUE].rstrip()
    text = "".join(each for each in unicodedata.normalize("NFKC", text) if unicodedata.category(each) != "Cf")
    return " ".join(unicodedata.normalize("NFKC", text.casefold()).split())[:MAX_VALUE].rstrip()


def values_of(item: Mapping[str, Any]) -> list[SearchValue]:
    """What an item is found by: ``item`` has its fields to search, JSON-ready. A list has a value for each text or number
    in it; an object, and what is empty, has none."""
    found: dict[SearchValue, None] = {}
    for field, value in item.items():
        for text in texts_of(value):
            found[(field, text, None)] = None
            if len(found) == MAX_VALUES:
                return list(found)
    return list(found)


def texts_of(value: Any) -> Iterator[str]:
    """The texts by which a value is found. A number is one without zeros at its end, so 7.0 is found as 7."""
    if isinstance(value, list | tuple):
        for each in value:
            if not isinstance(each, list | tuple):
                yield from texts_of(each)
        return
    if isinstance(value, bool):
        value = str(value)
    elif isinstance(value, int):
        value = str(value) if abs(value) < 10**MAX_VALUE else ""
    elif isinstance(value, float | Decimal):
        number = Decimal(repr(value)) if isinstance(value, float) else value
        value = f"{number.normalize():f}" if number.is_finite() and abs(number.adjusted()) < _EXPONENT else str(value)
    if isinstance(value, str) and (text := normal(value)):
        yield text


def as_given(params: Any, field: str, value: str) -> str:
    """A value as the item of a job has it: the text of which ``value`` is the form that is compared. ``value`` itself if
    the field has another name there."""
    args = params.get("args") if isinstance(params, Mapping) and params.keys() == {"args", "kwargs"} else params
    item = args[0] if isinstance(args, list) and args else args
    given = item.get(field) if isinstance(item, Mapping) else None
    for each in given if isinstance(given, list) else [given]:
        if value in texts_of(each):
            return str(each)[:MAX_VALUE]
    return value


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to search for: a value, or with ``begins`` all values that begin with it, in the form that is compared."""

    value: str
    begins: bool = False

    @classmethod
    def read(cls, text: str) -> Self:
        """What a person asks for; a ``*`` at the end stands for any rest. Raises :class:`InputError`."""
        if len(text) > MAX_TEXT or not is_storable(text):
            raise InputError(
                f"search: write at most {MAX_TEXT:,} characters, without a NUL or half a character (a lone surrogate)",
                code="invalid_search",
            )
        begins = text.rstrip().endswith("*")
        if not (value := normal(text.rstrip()[:-1] if begins else text)):
            raise InputError("search: write the value that a field has, or its beginning and *", code="invalid_search")
        return cls(value, begins)


class Place(NamedTuple):
    """A place in the order of the results: values from the last to the first, of one value the newest first."""

    id: int
    value: str

    @classmethod
    def first(cls, wanted: Wanted) -> Self:
        """The place before all results."""
        return cls(MAX_ID, wanted.value + _LAST if wanted.begins else wanted.value)

    @classmethod
    def read(cls, text: str, wanted: Wanted) -> Self:
        """The place that was written as text. Raises :class:`InputError` if it is none of this search."""
        number, _, value = text.partition(":")
        known = value.startswith(wanted.value) if wanted.begins else value == wanted.value
        if not (number.isascii() and number.isdecimal() and len(number) < 20 and known and is_storable(value)):
            raise InputError("after: give the place that the page before ended with", code="invalid_search")
        return cls(min(int(number), MAX_ID), value)

    def __str__(self) -> str:
        return f"{self.id}:{self.value}"


# -- writing and deleting


def add(connection: Connection, rows: Sequence[tuple[Any, ...]]) -> None:
    """Inserts values of new Events, as rows of :data:`COLUMNS`."""
    batches.insert(connection, search_values, COLUMNS, rows)


def add_alone(connection: Connection, found: Mapping[str, Sequence[SearchValue]]) -> None:
    """Inserts the values of new Events without a Task, job id -> values."""
    if found:
        ids = connection.execute(sa.select(_e.job_id, _e.id).where(batches.among(connection, _e.job_id, list(found))))
        add(connection, [(value, field, None, i, None) for job_id, i in ids for field, value, _ in found[job_id]])


def forget_alone(connection: Connection, event_ids: Collection[int]) -> None:
    """Deletes the values of these Events without a Task."""
    connection.execute(search_values.delete().where(_s.task_id.is_(None), batches.among(connection, _s.seq, event_ids)))


# -- reading


class Hit(NamedTuple):
    """A value that was found: its place, and the Event that has it, which is of the Task of this title, if of one."""

    place: Place
    field: str
    row: int | None
    event_id: int
    title: str | None


_ROW: Final = sa.select(_s.id, _s.value, _s.field, _s.task_id, _s.seq, _s.row)


def behind(connection: Connection, wanted: Wanted, place: Place, limit: int) -> list[Any]:
    """The next rows behind a place, at most ``limit``. Both queries are ranges of the index, read in its order."""
    same = _ROW.where(_s.value == place.value, _s.id < place.id).order_by(_s.id.desc()).limit(limit)
    found = list(connection.execute(same))
    if wanted.begins and len(found) < limit:
        others = _ROW.where(_s.value < place.value, _s.value >= wanted.value).order_by(_s.value.desc(), _s.id.desc())
        found += connection.execute(others.limit(limit - len(found)))
    return found


def visible(connection: Connection, rows: Sequence[Any], *, worker: str | None, owner: str | None) -> list[Hit]:
    """Those of these rows whose Event is still there, of this worker and of a Task of this owner, if given; in order."""
    found: dict[int, tuple[int, str | None]] = {}
    if of_task := [int(row.id) for row in rows if row.task_id is not None]:
        its = (
            sa.select(_s.id, _e.id, _t.title)
            .join_from(search_values, tasks, _t.id == _s.task_id)
            .join(events, (_e.task_id == _s.task_id) & (_e.seq == _s.seq))
            .where(batches.among(connection, _s.id, of_task), sa.func.coalesce(_t.turning, "") != PURGING)
        )
        if worker is not None:
            its = its.where(sa.func.coalesce(_e.worker_name, _t.worker_name) == worker)
        if owner is not None:
            its = its.where(_t.owner == owner)
        found = {int(i): (int(event_id), title) for i, event_id, title in connection.execute(its)}
    alone = {int(row.seq) for row in rows if row.task_id is None}
    if alone and owner is None:  # a job without a Task has no owner
        theirs = sa.select(_e.id).where(batches.among(connection, _e.id, alone), _e.task_id.is_(None))
        if worker is not None:
            theirs = theirs.where(_e.worker_name == worker)
        there = set(connection.execute(theirs).scalars())
        found |= {int(row.id): (int(row.seq), None) for row in rows if row.task_id is None and row.seq in there}
    return [Hit(Place(int(row.id), row.value), row.field, row.row, *found[row.id]) for row in rows if row.id in found]
