"""What people may call the fields of an item, how names are shown to them, and what no field can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from asynctask.lists.readers.base import shorten

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

__all__ = ["aliases", "either", "has_nul", "listed", "names_of"]

_SHOWN: Final = 50


def aliases(info: FieldInfo) -> list[str]:
    """The names, beside its own, under which a field is taken from an object."""
    from pydantic import AliasChoices, AliasPath  # the field is there, so pydantic is

    found: list[str] = []
    choices = info.validation_alias
    for each in choices.choices if isinstance(choices, AliasChoices) else [choices, info.alias]:
        name = each.path[0] if isinstance(each, AliasPath) and len(each.path) == 1 else each
        if isinstance(name, str) and name not in found:
            found.append(name)
    return found


def names_of(field: str, info: FieldInfo) -> list[str]:
    """Every name that a header may have for a field: title, aliases, its own."""
    return list(dict.fromkeys([*([info.title] if info.title else []), *aliases(info), field]))


def either(names: Sequence[str]) -> str:
    """Names to choose from, for a message."""
    return " or ".join(map(repr, names))


def listed(headers: Sequence[str]) -> str:
    """The columns that there are, for a message: the first fifty."""
    shown = ", ".join(shorten(header, 40) for header in headers[:_SHOWN]) or "none"
    return shown + (", …" if len(headers) > _SHOWN else "")


def has_nul(value: Any) -> bool:
    """Whether a NUL character stands anywhere in a value: no database of all keeps it in text."""
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, Mapping):
        return any(has_nul(key) or has_nul(each) for key, each in value.items())
    return isinstance(value, list | tuple) and any(map(has_nul, value))
