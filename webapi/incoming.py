"""The shapes of what comes in: queries, bodies, forms. Whatever does not fit is refused with what is wrong."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
)

from webapi.problems import from_validation

__all__ = [
    "LATER",
    "NOT_BLANK",
    "EventQuery",
    "FileSubmission",
    "JsonSubmission",
    "Knobs",
    "NoQuery",
    "OneTaskQuery",
    "Options",
    "RawQuery",
    "RejectedQuery",
    "ReportQuery",
    "RetryQuery",
    "TaskQuery",
]

# PostgreSQL has no text with NUL in it, so none is taken anywhere.
Title = Annotated[str, StringConstraints(max_length=255, pattern=r"^[^\x00]*$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^\x00]*$")]
# Blanks around it are taken off, so something else must be there. Named one by one: dialects differ in what \s is.
NOT_BLANK = r"^[^\x00]*[^\x00\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000][^\x00]*$"
NotBlank = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=NOT_BLANK)]
QueueName = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9_:.\-]+$")]
Names = Annotated[str, StringConstraints(min_length=1, max_length=5_200, pattern=r"^[^\x00]*$")]
LATER = "x-later"
"""Marks what is left out of the document."""

_ENCODING = "What a text is encoded in: utf-8, gb18030, cp932...; default: its charset, else found out."

Id = Annotated[int, Field(ge=1, le=2**63 - 1)]
StatusName = Literal["enqueue", "working", "stopped", "finish", "failed", "error", "cancelled"]
StateName = Literal["splitting", "running", "paused", "finalizing", "finished", "cancelled", "rejected"]
RowsName = Literal["failed", "succeeded", "unprocessed", "rejected", "all"]


class _Listed:
    """Text that holds some of ``names`` with commas between; its check says better than a pattern what is wrong."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __call__(self, text: str) -> str:
        chosen = text.split(",")
        if wrong := [each for each in chosen if each not in self._names]:
            raise ValueError(f"must be of {', '.join(self._names)}, with commas between; not {wrong[0]!r}")
        if len(chosen) > len(self._names):
            raise ValueError(f"must name at most {len(self._names)}, each once")
        return text

    def schema(self, schema: dict[str, Any]) -> None:
        one = "|".join(self._names)
        schema["pattern"] = f"^({one})(,({one})){{0,{len(self._names) - 1}}}$"


class _Ids:
    """Task ids with commas between."""

    def __call__(self, text: str) -> str:
        chosen = text.split(",")
        if not all(each.isascii() and each.isdecimal() and len(each) < 19 for each in chosen):
            raise ValueError("must be Task ids with commas between: 7,8,9")
        if len(chosen) > 200:
            raise ValueError(f"must name at most 200 Tasks, not {len(chosen)}; ask for them in several requests")
        return text

    def schema(self, schema: dict[str, Any]) -> None:
        schema["pattern"] = "^[0-9]{1,18}(,[0-9]{1,18}){0,199}$"


_IDS = _Ids()
_ANY = _Listed("enqueue", "working", "stopped", "finish", "failed", "error", "cancelled")
_OVER = _Listed("failed", "error", "cancelled")
Ids = Annotated[str, AfterValidator(_IDS), Field(json_schema_extra=_IDS.schema)]
Statuses = Annotated[str, AfterValidator(_ANY), Field(json_schema_extra=_ANY.schema)]
RetryStatuses = Annotated[str, AfterValidator(_OVER), Field(json_schema_extra=_OVER.schema)]


def _later(default: Any) -> Any:
    """A field that this version knows only in order to refuse it; it stands in no document."""
    return Field(default, json_schema_extra={LATER: True})


def _whole(value: Any) -> Any:
    # JSON knows one kind of number: 20.0 is 20.
    return int(value) if isinstance(value, float) and value.is_integer() else value


Parallel = Annotated[int, Field(ge=1, le=100_000), BeforeValidator(_whole)]
Priority = Annotated[int, Field(ge=-1_000_000, le=1_000_000), BeforeValidator(_whole)]


class _In(BaseModel):
    """Unknown fields are refused with the nearest known one. ``what`` names a field in messages."""

    model_config = ConfigDict(extra="forbid", strict=True, str_max_length=10_000)
    what: ClassVar[str] = "field"

    @classmethod
    def model_validate(cls, obj: Any, **how: Any) -> Self:
        """As pydantic's; raises :class:`asynctask.errors.InputError` with every fault at once."""
        try:
            return super().model_validate(obj, **how)
        except ValidationError as error:
            raise from_validation(error, list(cls.model_fields), cls.what) from None


class _Query(_In):
    """Query parameters: text that is read as what the field says."""

    model_config = ConfigDict(strict=False)
    what: ClassVar[str] = "query parameter"


class NoQuery(_Query):
    """No parameters."""


class TaskQuery(_Query):
    """Which Tasks to list."""

    ids: Ids | None = Field(None, description="Task ids with commas between, at most 200; the other filters apply too.")
    state: StateName | None = Field(None, description="Only Tasks in this state.")
    worker: Name | None = Field(None, description="Only Tasks of this worker.")
    owner: Name | None = Field(None, description="Only Tasks of this owner.")
    after: Id | None = Field(None, description="The last task_id of the page before.")
    limit: int = Field(50, ge=1, le=200, description="Tasks on a page.")


class OneTaskQuery(_Query):
    """What to add to the progress object."""

    include: Literal["errors"] | None = Field(None, description="`errors` adds the first 20 failures.")
    wait: float | None = _later(None)
    version: int | None = _later(None)


class EventQuery(_Query):
    """Which Events of a Task to list."""

    status: Statuses | None = Field(None, description="Statuses with commas between; default: all.")
    after: Id | None = Field(None, description="The last id of the page before.")
    limit: int = Field(100, ge=1, le=1000, description="Events on a page.")


class RetryQuery(_Query):
    """Which items run again."""

    status: RetryStatuses | None = Field(
        None, description="Statuses with commas between, of failed, error, cancelled; default: failed,error."
    )


class ReportQuery(_Query):
    """Which rows a report holds."""

    rows: RowsName = Field("failed", description="`failed`: what to correct, that is failed, error and rejected rows.")


class RejectedQuery(_Query):
    """Which rejected rows to list."""

    after: Id | None = Field(None, description="The last row of the page before.")
    limit: int = Field(100, ge=1, le=1000, description="Rows on a page.")


class Options(_In):
    """What a submission may say beside its worker and its items. What is left out keeps the worker's default."""

    what: ClassVar[str] = "option"

    title: Title | None = Field(None, description="A name that people will read.")
    parallel: Parallel | None = Field(None, description="Jobs that may run at once; null for no limit.")
    priority: Priority | None = Field(None, description="Smaller runs first.")
    queue: QueueName | None = Field(None, description="Another queue than the worker's own.")
    owner: Title | None = Field(None, description="Whose Task it is; Idempotency-Key is unique per owner.")
    session: NotBlank | None = Field(None, description="Tasks of one session, of one owner, run one after the other.")
    interval: float | None = _later(None)
    chunk_size: int | None = _later(None)
    tolerated_failures: int | float | str | None = _later(None)
    on_complete: JsonValue = _later(None)
    resubmit_of: int | None = _later(None)
    dry_run: bool | None = Field(None, description="Only tell what the list would come to; nothing is written.")
    strict: bool | None = Field(None, description="One refused row refuses the list as a whole.")
    unique: Names | list[NotBlank] | None = Field(
        None, description="Fields in which no two rows may be the same; as text, with commas between."
    )


class JsonSubmission(Options):
    """A list of items as JSON."""

    worker: Name = Field(description="The worker's name; GET /api/workers lists them.")
    items: list[Any] = Field(min_length=1, description="The items, each as the worker's JSON Schema says.")


class FileSubmission(Options):
    """A list of items as a file: the fields of the form beside the file."""

    model_config = ConfigDict(strict=False)

    worker: Name = Field(description="The worker's name; GET /api/workers lists them.")
    sheet: Name | None = Field(None, description="The worksheet; default: the first visible one with rows.")
    columns: dict[str, str] | None = Field(
        None, description='Which header means which field, as JSON: {"Artikel-Nr.": "sku"}; the rest is found by name.'
    )
    encoding: Name | None = Field(None, description=_ENCODING)


class RawQuery(Options):
    """The options of a raw body; `worker` is required with one. Another body has its options within."""

    model_config = ConfigDict(strict=False)
    what: ClassVar[str] = "query parameter"

    unique: Names | None = Field(None, description="Fields in which no two rows may be the same, with commas between.")
    worker: Name | None = Field(None, description="The worker's name; GET /api/workers lists them.")
    columns: Annotated[str, Field(max_length=10_000)] | None = Field(
        None, description='Which header means which field, as JSON: {"Artikel-Nr.": "sku"}; the rest is found by name.'
    )
    encoding: Name | None = Field(None, description=_ENCODING)


class Knobs(_In):
    """The knobs of a running Task; at least one."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})
    what: ClassVar[str] = "knob"

    title: Title = Field("", description="A name that people will read.")
    parallel: Parallel | None = Field(None, description="Jobs that may run at once; null for no limit.")
    priority: Priority = Field(0, description="Smaller runs first.")
    interval: float = _later(0.0)
    tolerated_failures: int | float | str | None = _later(None)
