"""A list, open, with each of its rows held against the worker's model and the rules of the submission."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from asynctask.errors import InputError, TooLarge
from asynctask.lists.items import Accepted, Binding, ItemShape, Refused
from asynctask.lists.problems import fault, say
from asynctask.lists.readers import Limits, RawRow, Source
from asynctask.lists.refused_sheet import SMALL_FILE, explained
from asynctask.lists.unique import Twins, refuse_absent
from asynctask.lists.uploads import Uploads
from asynctask.lists.workbooks import list_file

__all__ = ["OpenList", "checked", "encoding_option", "open_list", "too_many_items"]


@dataclass(frozen=True, slots=True)
class OpenList:
    """A stored list with the worker's shape bound to its columns. ``planned`` as of a Source."""

    source: Source
    shape: ItemShape
    binding: Binding | None

    @property
    def planned(self) -> int | None:
        return self.source.planned

    def checked(self, after: int = 0, *, unique: Sequence[str] = ()) -> Iterator[Accepted | Refused]:
        """See :func:`checked`."""
        if self.binding is not None and self.source.headers is not None:
            refuse_absent(unique, self.source.headers, self.binding, self.shape)
        return checked(self.source.rows, self.shape, self.binding, unique, after)


@contextmanager
def open_list(
    uploads: Uploads,
    limits: Limits,
    source: Mapping[str, Any],
    shape: ItemShape,
    alive: Callable[[], None] = lambda: None,
) -> Iterator[OpenList]:
    """Opens a stored list. ``source`` is what its submission kept: ``name``, ``filename``, ``sheet``,
    ``encoding``. ``alive`` as of :func:`~asynctask.lists.workbooks.list_file`.

    Raises :class:`InputError` where the list as a whole cannot be taken.
    """
    path, filename = uploads.find(str(source["name"])), str(source["filename"])
    small = path.stat().st_size <= SMALL_FILE
    with list_file(path, filename, limits, encoding=source.get("encoding"), alive=alive) as file:
        try:
            opened = file.open(source.get("sheet"), shape.expected)
        except InputError as error:
            raise explained(error, error.params.get("sheet"), file, shape, small=small) from None
        with opened:
            try:
                binding = shape.bind(opened.headers) if opened.headers is not None else None
            except InputError as error:
                raise explained(error, opened.sheet_name, file, shape, small=small) from None
            yield OpenList(opened, shape, binding)


def checked(
    rows: Callable[[int], Iterator[RawRow]],
    shape: ItemShape,
    binding: Binding | None,
    unique: Sequence[str] = (),
    after: int = 0,
) -> Iterator[Accepted | Refused]:
    """The rows after ``after``, each held against the worker's model and, where ``unique`` names fields, the rows before.

    ``rows(n)`` gives the rows after the n-th. With ``unique`` they are read from the first one on, also where a split is
    taken up in the middle: what came before ``after`` counts as it did when it was split.
    """
    if not unique:
        for raw in rows(after):
            yield shape.validate(raw, binding)
        return
    twins = Twins(unique, shape, binding)
    for raw in rows(0):
        outcome = shape.validate(raw, binding)
        if isinstance(outcome, Accepted):
            outcome = twins.refuse_second(raw, outcome)
        if raw.number > after:
            yield outcome


def encoding_option(name: str) -> str:
    """The codec that the option ``encoding`` means. Raises :class:`InputError` that offers the nearest ones."""
    from asynctask.lists.readers.encodings import encoding_names, known_encoding  # its tables are large

    try:
        return known_encoding(name)
    except InputError:
        params = {"name": repr(name[:40]), "names": encoding_names(name)}
        problem = fault(None, "encoding", "invalid_option", "option.encoding", params, name[:200])
        raise InputError(f"option 'encoding': {problem.message}", code="invalid_options", errors=[problem]) from None


def too_many_items(limit: int) -> TooLarge:
    """The error for a list of more than ``limit`` rows."""
    message = say("list.too_many_items", {"limit": limit}, "en")
    return TooLarge(str(message), code="too_many_rows", text="list.too_many_items", params={"limit": limit})
