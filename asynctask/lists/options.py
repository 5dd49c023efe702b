"""The options of a submission: one model for Python, the command line and HTTP."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import ErrorDetails

from asynctask.clock import from_datetime, read_rfc3339
from asynctask.core.transitions import MAX_INTERVAL_S, Tolerance
from asynctask.errors import InputError, Problem
from asynctask.iterable import AUTO, MAX_CHUNK
from asynctask.job import MAX_CONTEXT, context_text
from asynctask.lists.problems import fault, from_pydantic
from asynctask.worker import MAX_PRIORITY, MOST_CALLBACKS, as_callbacks

MAX_OPEN_S: Final = 366 * 86_400
"""Most seconds for which an open Task waits for an addition."""

NUL_FREE: Final = r"^[^\x00]*$"
NOT_BLANK: Final = r"^[^\x00]*[^\x00\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000][^\x00]*$"
"""For the API's document: a text with more than blanks, which are stripped. Dialects differ in what ``\\s`` matches."""

NAMES: Final = r"^[^\x00,]{0,255}(,[^\x00,]{0,255}){0,19}$"
"""For the API's document: up to 20 names in one text, with commas between."""


INTERVAL: Final = (
    "Seconds from round to round; a round starts at most `parallel` jobs, one if that is null. 0: without rounds, each as"
    " soon as there is room."
)

KEY: Final = (
    "A field of the items: those with an equal value run one after the other, in the order submitted, across all Tasks of"
    " the worker."
)

CHUNK: Final = (
    f"Items of one job, at most {MAX_CHUNK:,}; `auto`: 1 up to 10,000 items, then so that there are about 10,000 jobs."
)

TOLERATED: Final = (
    "Items that may end `failed` or `error`; one more, and the Task pauses itself. A count (10) or a share of all items"
    " (`5%`), or of one status (`failed:10`, `error:5%`); null for no limit."
)


CONTEXT: Final = (
    f"Constants for all jobs and callbacks of the Task: an object of at most {MAX_CONTEXT:,} bytes as JSON. Plain text: no"
    " place for secrets."
)

OPEN: Final = (
    "More items may be added: the Task does not end before it is sealed. Not with `strict`, `resubmit_of` or `chunk_size`."
)
OPEN_LIMIT: Final = "Seconds without an addition after which an open Task is sealed; default: 86,400."
START: Final = "Nothing begins before this time; null: at once."
RESUBMIT: Final = (
    "The Task whose report this file is, corrected: its rows take the place of those that failed, by the row-number column."
    " Not with JSON items, which have no such column."
)
PARENT: Final = (
    "The Task of which this one is a child: it waits for this one, and hands pause, resume, cancel and priority down. By"
    " default the Task of the job that submits; 0 for none."
)


def _without_nul(text: str) -> str:
    # PostgreSQL text cannot contain NUL, so no database takes it. pydantic itself refuses lone surrogates.
    if "\0" in text:
        raise ValueError("holds a NUL character: take it out")
    return text


def whole_number(value: Any) -> Any:
    """JSON has one type of number: 20.0 is 20."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _tolerated(value: Any) -> str:
    return str(Tolerance.parse(whole_number(value)))


def _names(value: Any) -> Any:
    # A form, a query and a flag give one text: names separated by commas.
    if isinstance(value, str):
        return tuple(filter(None, map(str.strip, value.split(","))))
    return tuple(value) if isinstance(value, list) else value


NAME_SCHEMA: Final[dict[str, Any]] = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": NOT_BLANK}
"""The schema of one name."""


def listed_or_text(*kinds: str) -> WithJsonSchema:
    """How the API's document describes ``unique``, which is sent as one or more of ``text`` and ``list``."""
    schemas: dict[str, Any] = {
        "text": {"type": "string", "minLength": 1, "maxLength": 5_200, "pattern": NAMES},
        "list": {"type": "array", "items": NAME_SCHEMA},
    }
    return WithJsonSchema({"anyOf": [*(schemas[kind] for kind in kinds), {"type": "null"}]})


Title = Annotated[
    str,
    StringConstraints(strip_whitespace=True, max_length=255),
    AfterValidator(_without_nul),
    Field(json_schema_extra={"pattern": NUL_FREE}),
]
NotBlank = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=255),
    AfterValidator(_without_nul),
    Field(json_schema_extra={"pattern": NOT_BLANK}),
]
QueueName = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=1, max_length=255, pattern=r"^[A-Za-z0-9_:.\-]+$")
]
Parallel = Annotated[int, Field(ge=1, le=100_000), BeforeValidator(whole_number)]


def _chunk_size(value: Any) -> Any:
    if value == "auto":
        return AUTO
    if value in (0, "0"):
        raise ValueError("must be at least 1, or auto")
    return whole_number(value)


ChunkSize = Annotated[
    int,
    Field(ge=0, le=MAX_CHUNK),
    BeforeValidator(_chunk_size),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_CHUNK}, {"const": "auto"}]}),
]


def _start_at(value: Any) -> datetime:
    if not isinstance(value, datetime):
        return read_rfc3339(value if isinstance(value, str) else "")
    from_datetime(value)  # only an aware one has a time
    return value


StartAt = Annotated[datetime, BeforeValidator(_start_at), WithJsonSchema({"type": "string", "format": "date-time"})]
"""An aware datetime, or a text of RFC 3339."""

TaskId = Annotated[int, Field(ge=1, le=2**63 - 1), BeforeValidator(whole_number)]
ParentId = Annotated[int, Field(ge=0, le=2**63 - 1), BeforeValidator(whole_number)]
OpenLimit = Annotated[float, Field(ge=1, le=MAX_OPEN_S, allow_inf_nan=False)]
Interval = Annotated[float, Field(ge=0, le=MAX_INTERVAL_S, allow_inf_nan=False)]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), BeforeValidator(whole_number)]
Tolerated = Annotated[
    str,
    BeforeValidator(_tolerated),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": 9_999_999},
                {"type": "string", "pattern": r"^((failed|error):)?([0-9]{1,7}|(100|[0-9]{1,2}(\.[0-9]{1,2})?)%)$"},
            ]
        }
    ),
]
_CALLED: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"worker": NAME_SCHEMA, "args": {"type": "array", "items": {}}},
    "required": ["worker"],
    "additionalProperties": False,
}
_TOLD: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"url": {"type": "string", "maxLength": 2_000, "pattern": "^https?://"}},
    "required": ["url"],
    "additionalProperties": False,
}
_ONE: Final[list[dict[str, Any]]] = [NAME_SCHEMA, _CALLED, _TOLD]
_SEVERAL: Final[dict[str, Any]] = {"type": "array", "items": {"anyOf": _ONE}, "maxItems": MOST_CALLBACKS}
_as_callbacks = PlainValidator(lambda said: () if said is None else as_callbacks(said))
CallbackOption = Annotated[Any, _as_callbacks, WithJsonSchema({"anyOf": [*_ONE, _SEVERAL, {"type": "null"}]})]
"""A tuple of :class:`~asynctask.worker.Callback`."""

CallbackText = Annotated[
    Any, _as_callbacks, WithJsonSchema({"anyOf": [{**NAME_SCHEMA, "maxLength": 10_000}, {"type": "null"}]})
]
"""The same in a query or a form: a name, or the object as JSON."""


def _context(value: Any) -> str | None:
    try:
        return None if value is None else context_text(value)
    except InputError as error:
        raise ValueError(str(error).removeprefix("the context ")) from None


ContextOption = Annotated[Any, PlainValidator(_context), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})]
"""Validated to JSON text: the context is kept, compared and given to jobs as the text of one object."""

Unique = Annotated[Annotated[tuple[NotBlank, ...], Field(max_length=20)] | None, BeforeValidator(_names)]


class CommonOptions(BaseModel):
    """The options of a submission beside its worker and its items. Omitted ones have the worker's default."""

    model_config = ConfigDict(extra="forbid")

    title: Title | None = Field(None, description="A name that people will read.")
    parallel: Parallel | None = Field(None, description="Jobs that may run at once; null for no limit.")
    interval: Interval | None = Field(None, description=INTERVAL)
    priority: Priority | None = Field(None, description="Smaller runs first.")
    tolerated_failures: Tolerated | None = Field(None, description=TOLERATED)
    start_at: StartAt | None = Field(None, description=START)
    paused: bool | None = Field(None, description="Nothing starts before somebody resumes the Task.")
    open: bool | None = Field(None, description=OPEN)
    open_limit_s: OpenLimit | None = Field(None, description=OPEN_LIMIT)
    queue: QueueName | None = Field(None, description="Another queue than the worker's own.")
    owner: Title | None = Field(None, description="Whose Task it is; Idempotency-Key is unique per owner.")
    session: NotBlank | None = Field(None, description="Tasks of one session, of one owner, run one after the other.")
    key: NotBlank | None = Field(None, description=KEY)
    chunk_size: ChunkSize | None = Field(None, description=CHUNK)
    resubmit_of: TaskId | None = Field(None, description=RESUBMIT)
    parent: ParentId | None = Field(None, description=PARENT)
    context: ContextOption = Field(None, description=CONTEXT)
    dry_run: bool | None = Field(None, description="Only validate; nothing is written.")
    strict: bool | None = Field(None, description="One rejected row refuses the list as a whole.")
    unique: Annotated[Unique, listed_or_text("text", "list")] = Field(
        None, description="Fields in which no two rows may be the same; as text, with commas between."
    )

    on_complete: CallbackOption = Field(
        (),
        description='A worker to call when the last item has ended, {"worker": name, "args": [...]}, {"url": "https://..."},'
        " or a list of these.",
    )
    on_success: CallbackOption = Field((), description="The same, if no item failed or was cancelled.")
    on_failure: CallbackOption = Field((), description="The same, if any item failed or was cancelled.")

    def with_request(self, key: str | None, who: str) -> SubmitOptions:
        """These options, without what a body adds to them, and with the ``idempotency_key`` and the requester."""
        shared = {name: getattr(self, name) for name in CommonOptions.model_fields}
        return SubmitOptions.model_construct(**shared, idempotency_key=key, who=who)


class SubmitOptions(CommonOptions):
    """The validated options of a submission. Of HTTP, no body can set these two: the key is in a header, and the server
    names the requester."""

    idempotency_key: NotBlank | None = None
    who: Title = Field("", description="Who submits it, for the Task's log.")


def check_options(given: Mapping[str, Any]) -> SubmitOptions:
    """The validated options.

    Raises :class:`InputError` that names each invalid one.
    """
    try:
        return SubmitOptions.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise refused(error, SubmitOptions.model_fields, "option", "invalid_options", "invalid_option") from None


MAX_FIELD_FAULTS: Final = 1_000
"""Faulty fields in one error. A body may have 500,000 unknown ones, and for each the nearest known name is looked up."""


def refused(
    error: ValidationError, known: Collection[str], what: str, code: str, fault_code: str | None = None
) -> InputError:
    """pydantic's errors as one :class:`InputError` that names the fields, :data:`MAX_FIELD_FAULTS` at most.

    ``known``: the fields there are; ``what`` one of them is called; ``fault_code``: of each that is known, by default
    pydantic's as of :data:`~asynctask.lists.problems.CODES`.
    """
    found = error.errors(include_url=False)
    problems = [_field_fault(each, known, fault_code) for each in found[:MAX_FIELD_FAULTS]]
    first, more = problems[0], f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    subject = f"{what} {first.column!r}" if first.column else "the body"
    return InputError(f"{subject} {first.message}{more}", code=code, errors=problems)


def _field_fault(error: ErrorDetails, known: Collection[str], fault_code: str | None) -> Problem:
    # In a union the last parts of the location name the alternative, not a place in the data.
    field = ".".join(str(part) for part in error["loc"] if part not in ("int", "str", "float"))
    value = None if error["type"] == "missing" else _shown(error["input"])
    if error["type"] != "extra_forbidden":
        found = from_pydantic(None, field or None, error, value)
        return found if fault_code is None else replace(found, code=fault_code)
    if near := difflib.get_close_matches(field, known, n=1):
        return fault(None, field, "unknown_option", "option.near", {"near": repr(near[0])}, value)
    return fault(None, field, "unknown_option", "option.known", {"names": ", ".join(sorted(known))}, value)


def _shown(value: Any) -> Any:
    if isinstance(value, bool | int | float | None):
        return value if not isinstance(value, int) or abs(value) < 2**53 else str(value)[:200]
    try:
        text = (
            value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False, separators=(",", ":"))
        )
    except (TypeError, ValueError):  # a program may give anything
        text = str(value)
    return text if len(text) <= 200 else text[:199] + "…"


# -- the knobs of a Task that runs


class Knobs(BaseModel):
    """The knobs of a running Task; at least one."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"minProperties": 1})

    parallel: Parallel | None = Field(None, description="Jobs that may run at once; null for no limit.")
    interval: Interval = Field(0.0, description=INTERVAL)
    priority: Priority = Field(0, description="Smaller runs first.")
    tolerated_failures: Tolerated | None = Field(None, description=TOLERATED)
    start_at: StartAt | None = Field(None, description=START)
    title: Title = Field("", description="A name that people will read.")


def checked_knobs(changes: Mapping[str, Any], *, as_text: bool = False) -> dict[str, Any]:
    """These changes of a Task's :class:`Knobs`. ``as_text``: a value may be the text of a number.

    Raises :class:`InputError` for an unknown knob or an invalid value.
    """
    if not changes:
        problem = Problem(None, None, "missing", f"give at least one of {', '.join(Knobs.model_fields)}")
        raise InputError(f"there is nothing to change; {problem.message}", code="invalid_knob", errors=[problem])
    try:
        return Knobs.model_validate(changes, strict=not as_text).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise refused(error, Knobs.model_fields, "knob", "invalid_knob") from None
