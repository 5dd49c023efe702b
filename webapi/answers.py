"""The shapes of what goes out, for the OpenAPI document; answers are not checked against them while they are given."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from webapi.incoming import StateName, StatusName

__all__ = [
    "CellFault",
    "Control",
    "Counts",
    "Done",
    "DryRunResult",
    "ErrorGroup",
    "ErrorGroups",
    "Event",
    "EventPage",
    "Fault",
    "Health",
    "ItemField",
    "Links",
    "LogEntries",
    "LogEntry",
    "PageLinks",
    "ProblemDetails",
    "Progress",
    "Refusal",
    "RejectedPage",
    "RejectedRow",
    "Split",
    "Submitted",
    "TaskPage",
    "TopError",
    "WorkerInfo",
    "Workers",
]


class _Out(BaseModel):
    model_config = ConfigDict(extra="forbid")


Time = Annotated[str, Field(description="RFC 3339, UTC", json_schema_extra={"format": "date-time"})]


class Fault(_Out):
    """One thing wrong with one cell, row or field."""

    row: int | None
    column: str | None
    code: str
    message: str
    value: JsonValue


class Suggestion(BaseModel):
    """An encoding that a text may be in."""

    encoding: str = Field(description="As the option `encoding` takes it.")
    cells: list[str] = Field(description="The first three cells that are not plain ASCII, as they would read.")


class ProblemDetails(BaseModel):
    """RFC 9457."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    errors: list[Fault]
    suggestions: list[Suggestion] = Field(
        default_factory=list, description="Only with the code `encoding`: likely ones, the likeliest first."
    )


class Split(_Out):
    state: str
    reason: str | None
    planned: int | None
    created: int
    rejected: int


class Counts(_Out):
    """Items by status; they sum to ``total``."""

    total: int
    enqueue: int
    working: int
    stopped: int
    finish: int
    failed: int
    error: int
    cancelled: int


class Done(_Out):
    done: int
    remaining: int
    percent: float | None
    rate_per_s: float | None
    eta_s: float | None


class Control(_Out):
    parallel: int | None
    in_flight: int
    interval: float
    priority: int
    session: str | None
    tolerated_failures: int | float | str | None


class TopError(_Out):
    message: str
    status: str
    count: int
    sample_job_id: str | None


class Links(_Out):
    self: str
    events: str
    errors: str
    report: str
    ui: str


class Event(_Out):
    """The record of one job."""

    id: int
    job_id: str
    task_id: int | None
    worker_name: str | None
    worker: str | None = Field(description="The same as worker_name, by the name of earlier releases.")
    queue: str | None
    status: StatusName
    attempt: int
    retries: int
    row: int | None
    params: JsonValue
    added_messages: list[dict[str, JsonValue]]
    messages: list[dict[str, JsonValue]] = Field(description="The same as added_messages, by the name of earlier releases.")
    result: JsonValue
    problem: str | None
    due_at: Time | None
    created_at: Time | None
    started_at: Time | None
    finished_at: Time | None
    process: str | None


class Refusal(_Out):
    """Why a list was refused as a whole, or every row of it."""

    code: str
    message: str
    errors: list[Fault] = Field(description="The first 20.")


class Progress(_Out):
    """How far a Task is."""

    task_id: int
    title: str
    worker: str
    owner: str | None
    state: StateName
    state_reason: str | None
    done: bool
    split: Split
    counts: Counts
    retrying: int
    next_retry_at: Time | None
    jobs: int
    progress: Done
    control: Control
    top_errors: list[TopError]
    resubmit_of: int | None
    generation: int
    version: int
    poll_after_ms: int
    created_at: Time
    started_at: Time | None
    updated_at: Time
    finished_at: Time | None
    links: Links
    errors: list[Event] | None = Field(None, description="With include=errors: the first 20 failures.")
    refusal: Refusal | None = Field(None, description="With include=errors: why a rejected list was refused.")


class Submitted(Progress):
    """The progress object, with the rows that were refused where they are known already."""

    errors: list[Fault] | None = None  # type: ignore[assignment]


class DryRunResult(_Out):
    """What a list would come to; nothing was written."""

    dry_run: Literal[True]
    accepted: int
    rejected: int
    errors: list[Fault] = Field(description="The first 1,000.")
    errors_truncated: bool
    first_items: list[JsonValue] = Field(description="Up to five items as the worker would be given them.")


class PageLinks(_Out):
    self: str
    next: str | None


class TaskPage(_Out):
    tasks: list[Progress]
    links: PageLinks


class EventPage(_Out):
    events: list[Event]
    links: PageLinks


class ErrorGroup(_Out):
    message: str
    status: str
    count: int
    sample_job_id: str | None
    sample_rows: list[int]


class ErrorGroups(_Out):
    errors: list[ErrorGroup]


class CellFault(_Out):
    column: str | None
    code: str
    message: str
    value: JsonValue


class RejectedRow(_Out):
    """A row that the validation refused."""

    row: int
    errors: list[CellFault]
    cells: JsonValue


class RejectedPage(_Out):
    rejected: list[RejectedRow]
    links: PageLinks


class LogEntry(_Out):
    at: Time
    who: str
    action: str
    detail: JsonValue


class LogEntries(_Out):
    log: list[LogEntry]


class ItemField(_Out):
    """A field of a worker's item."""

    name: str
    title: str
    required: bool
    description: str | None


class WorkerInfo(_Out):
    name: str
    doc: str
    queue: str
    retry: int | bool
    priority: int
    timeout: float | None
    fields: list[ItemField]
    headers: list[str] = Field(description="Every header that a sheet may use for them.")
    item_schema: dict[str, JsonValue] | None = Field(description="JSON Schema of an item; null where any object will do.")


class Workers(_Out):
    workers: list[WorkerInfo]


class Health(_Out):
    status: Literal["ok"]
