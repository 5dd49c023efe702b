"""The options of a submission and their validation."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from asynctask.errors import InputError, NotBuilt, Problem
from asynctask.lists.problems import fault, from_pydantic

__all__ = ["Options", "check_options"]

# Options of a later version, with the value that has no effect; any other value is refused, never ignored.
_LATER: Mapping[str, Any] = {
    "interval": 0, "chunk_size": 1, "tolerated_failures": None, "on_complete": None, "resubmit_of": None,
}  # fmt: skip
_NOTHING = {"", "0", "0.0", "1", "false", "null"}


class Options(BaseModel):
    """The validated options of a submission."""

    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)

    title: Annotated[str, Field(max_length=255)] = ""
    parallel: Annotated[int, Field(ge=1, le=100_000)] | None = None
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] | None = None
    queue: Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9_:.\-]+$")] | None = None
    owner: Annotated[str, Field(max_length=255)] = ""
    session: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    idempotency_key: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    unique: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=255)], ...], Field(max_length=20)] | None = None
    strict: bool = False
    dry_run: bool = False

    @field_validator("unique", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        # A form, a query and a flag give one text: names separated by commas.
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value

    @field_validator("title", "owner", "session", "idempotency_key")
    @classmethod
    def _storable(cls, value: str | None) -> str | None:
        # PostgreSQL text cannot contain NUL, so no database takes it. The model itself refuses lone surrogates.
        if value is not None and "\0" in value:
            raise ValueError("holds a NUL character: take it out")
        return value


def check_options(given: Mapping[str, Any]) -> Options:
    """The validated options.

    Raises :class:`InputError` that names each invalid one, :class:`NotBuilt` for one of a later version.
    """
    options = dict(given)
    for name, nothing in _LATER.items():
        value = options.pop(name, None)
        if value is None or value == nothing:
            continue
        if not (isinstance(value, str) and value.lower() in _NOTHING and value.lower() == str(nothing).lower()):
            raise NotBuilt(name)
    try:
        return Options.model_validate({k: v for k, v in options.items() if v is not None})
    except ValidationError as error:
        problems = [_option_problem(each) for each in error.errors()]
        text = "; ".join(f"{p.column}: {p.message}" for p in problems)
        raise InputError(f"options: {text}", code="invalid_options", errors=problems) from None


def _option_problem(error: Any) -> Problem:
    name = str(error["loc"][0]) if error["loc"] else ""
    value = str(error.get("input"))[:200]
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, Options.model_fields, n=1)
        if near:
            return fault(None, name, "unknown_option", "option.near", {"near": near[0]}, value)
        return fault(None, name, "unknown_option", "option.known", {"names": ", ".join(Options.model_fields)}, value)
    return replace(from_pydantic(None, name, error, value), code="invalid_option")
