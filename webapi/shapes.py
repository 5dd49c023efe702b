"""Schemas of requests, which are validated against them, and of responses, for the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from functools import cache, reduce, wraps
from operator import or_
from types import GenericAlias, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    Self,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)  # fmt: skip

from apiflask import APIBlueprint, FileSchema
from flask import Response, request
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    WrapValidator,
    create_model,
)

from asynctask import clock, operations, task
from asynctask.access import MAX_LINK_S
from asynctask.clock import from_datetime, read_rfc3339
from asynctask.core.states import Status
from asynctask.errors import InputError
from asynctask.integrations import remote
from asynctask.integrations.remote import JobRecord, Reporter
from asynctask.ledger import queries
from asynctask.ledger.search import MAX_TEXT
from asynctask.lists import options
from asynctask.lists.options import (
    NUL_FREE,
    CallbackText,
    CommonOptions,
    ContextOption,
    QueueName,
    StartAt,
    Unique,
    listed_or_text,
    refused,
    whole_number,
)
from asynctask.lists.problems import fault
from asynctask.lists.rows import MAX_HEADER_ROW
from asynctask.lists.uploads import JsonItems
from asynctask.reports.report import ListColumn
from asynctask.worker import JOB_ID
from webapi.context import asynctask_app, parse_json

Name = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=NUL_FREE)]
_COLUMNS = (
    'Which header means which field, as JSON: {"Artikel-Nr.": "sku", "Note": ""}; "" leaves a column out, the rest is found'
    " by name."
)
_HEADER_ROW = "The row with the names of the columns; default: found by the names that it has."
HeaderRow = Annotated[int, Field(ge=1, le=MAX_HEADER_ROW)]
_ENCODING = "What a text is encoded in: utf-8, gb18030, cp932...; default: its charset, else found out."

MAX_WAIT_S: Final = 60
"""The longest long poll, in seconds."""

Id = Annotated[int, Field(ge=1, le=2**63 - 1)]
EventPlace = Annotated[str, Field(pattern=r"^[0-9]{1,19}(\.[0-9]{1,19})?$")]
StateName = Literal["splitting", "running", "paused", "finalizing", "finished", "cancelled", "rejected"]
RowsName = Literal["failed", "succeeded", "unprocessed", "rejected", "all"]


class _Listed:
    """Up to ``most`` texts of the pattern ``one`` with commas between; a better message than a pattern gives says that they
    must be ``such``."""

    def __init__(self, one: str, most: int, such: str) -> None:
        self._one, self._most, self._such = re.compile(one), most, such
        self.schema = {"pattern": f"^({one})(,({one})){{0,{most - 1}}}$"}

    def __call__(self, text: str) -> str:
        chosen = text.split(",")
        if wrong := [each for each in chosen if self._one.fullmatch(each) is None]:
            raise ValueError(f"must be {self._such}, with commas between; not {wrong[0]!r}")
        if len(chosen) > self._most:
            raise ValueError(f"must name at most {self._most}, not {len(chosen)}")
        return text


_IDS = _Listed("[0-9]{1,18}", 200, "Task ids")
_ROWS = _Listed("[1-9][0-9]{0,17}", task.MOST_ROWS, "numbers of rows")
_ANY = _Listed("|".join(Status), len(Status), f"of {', '.join(Status)}")
_OVER = _Listed("failed|error|cancelled", 3, "of failed, error, cancelled")
Ids = Annotated[str, AfterValidator(_IDS), Field(json_schema_extra=_IDS.schema)]
Statuses = Annotated[str, AfterValidator(_ANY), Field(json_schema_extra=_ANY.schema)]
RetryStatuses = Annotated[str, AfterValidator(_OVER), Field(json_schema_extra=_OVER.schema)]
RowNumbers = Annotated[str, AfterValidator(_ROWS), Field(json_schema_extra=_ROWS.schema)]
SearchText = Annotated[str, Field(min_length=1, max_length=200, pattern=NUL_FREE)]
FailureMessage = Annotated[str, Field(max_length=10_000, pattern=NUL_FREE)]
RetryLimit = Annotated[int, Field(ge=1, le=2**31)]


def row_numbers(text: str | None) -> list[int] | None:
    """The numbers of rows that a query names; None without any."""
    return None if text is None else [int(each) for each in text.split(",")]


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
            raise refused(error, cls.model_fields, cls.what, f"invalid_{cls.what.replace(' ', '_')}") from None


class _Query(_In):
    """Query parameters: text that is read as what the field says."""

    model_config = ConfigDict(strict=False)
    what: ClassVar[str] = "query parameter"


class NoQuery(_Query):
    """No parameters."""


BINARY: Final = FileSchema(type="string", format="binary")
TEXT: Final = FileSchema(type="string")
View = TypeVar("View", bound=Callable[..., Response])


def _without_body(view: View) -> View:
    """Refuses a body that the view would not read: what it asks for must not be ignored."""

    @wraps(view)
    def refusing(**given: Any) -> Response:
        if request.get_data(cache=False).strip() not in (b"", b"{}"):
            text = "this request takes no body: leave it out, and write the options in the query, if there are any"
            raise InputError(text, code="unexpected_body")
        return view(**given)

    return cast(View, refusing)


class Routes(APIBlueprint):
    """Routes, each declared once with what it reads and answers: the validation and the API's document are made of that."""

    def serve(
        self,
        call: str,
        operation_id: str,
        answer: Any,
        *,
        query: type[_In] = NoQuery,
        body: type[_In] | None = None,
        status: int = 200,
        description: str | None = None,
        media: str = "application/json",
        responses: Any = (),
        endpoint: str | None = None,
        more: str | None = None,
        reads_body: bool = False,
        **doc: Any,
    ) -> Callable[[View], View]:
        """Serves a view. ``call``: method and path; ``query``, ``body``: what the view gets as an argument of that name,
        validated (neither: a query is refused); ``answer``, ``status``, ``description``, ``media``: of its usual answer;
        ``responses``: others that not every route has; ``more``, ``doc``: of the document, else of the docstring;
        ``reads_body``: the view reads the body itself (without it and ``body``, one is refused)."""
        method, _, path = call.partition(" ")

        def declare(view: View) -> View:
            @wraps(view)
            def without_query(**in_path: Any) -> Response:
                NoQuery.model_validate(request.args.to_dict())
                return view(**in_path)

            made: Any = view
            if body is not None:
                made = self.input(body, arg_name="body")(view)
            else:
                made = without_query if query is NoQuery else self.input(query, location="query", arg_name="query")(view)
                made = made if method == "GET" or reads_body else _without_body(made)
            made = self.output(answer, status, description, content_type=media)(made)
            made = self.doc(operation_id=operation_id, responses=responses or None, description=more, **doc)(made)
            self.route(path, methods=[method], endpoint=endpoint)(made)
            return view

        return declare


class TaskQuery(_Query):
    """Which Tasks to list."""

    ids: Ids | None = Field(None, description="Task ids with commas between, at most 200; the other filters apply too.")
    group: Literal["running", "attention", "finished"] | None = Field(
        None,
        description="Only Tasks that are not done, that need a person (of the last 10,000, and of those not done), or that"
        " are done.",
    )
    since: StartAt | None = Field(None, description="Only Tasks submitted at this time or later.")
    state: StateName | None = Field(None, description="Only Tasks in this state.")
    worker: Name | None = Field(None, description="Only Tasks of this worker.")
    owner: Name | None = Field(None, description="Only Tasks of this owner.")
    parent: Id | None = Field(None, description="Only children of this Task.")
    after: Id | None = Field(None, description="The last task_id of the page before.")
    limit: int = Field(50, ge=1, le=200, description="Tasks on a page.")


class OneTaskQuery(_Query):
    """What to add to the progress object, and whether to wait for another one."""

    include: Literal["errors", "context"] | None = Field(
        None, description="`errors` adds the first 20 failures; `context` the constants of its jobs."
    )
    wait: float = Field(
        0,
        ge=0,
        le=MAX_WAIT_S,
        description="Seconds to wait for a version other than `version`, or other than If-None-Match.",
    )
    version: int | None = Field(None, ge=0, le=2**63 - 1, description="The version that the client has.")


class EventQuery(_Query):
    """Which Events of a Task to list."""

    status: Statuses | None = Field(None, description="Statuses with commas between; default: all.")
    after: EventPlace | None = Field(
        None, description="The last id of the page before; within a job of several items with a point and the row."
    )
    text: SearchText | None = Field(None, description="Only items whose JSON contains this text, in any case.")
    limit: int = Field(100, ge=1, le=1000, description="Events on a page.")


class JobsQuery(_Query):
    """Which jobs to list."""

    worker: Name | None = Field(None, description="Of this worker only.")
    status: Statuses | None = Field(None, description="Statuses with commas between; default: all.")
    resumable: bool = Field(False, description="The stopped jobs instead, those of Tasks too.")
    after: Id | None = Field(None, description="The last id of the page before.")
    limit: int = Field(100, ge=1, le=1000, description="Jobs on a page.")


class SearchQuery(_Query):
    """What to search for."""

    q: str = Field(
        min_length=1,
        max_length=MAX_TEXT,
        pattern=NUL_FREE,
        description="The value of a field, without regard to case; with * at its end, the values that begin so.",
    )
    field: Name | None = Field(None, description="Of this field only.")
    worker: Name | None = Field(None, description="Of this worker only.")
    owner: Name | None = Field(None, description="Of this owner's Tasks only.")
    after: str | None = Field(None, max_length=200, description="The last place of the page before.")
    limit: int = Field(50, ge=1, le=1000, description="Jobs on a page.")


class NewJob(_In):
    """A job to make: `args` or `item`."""

    worker: Name = Field(description="The worker's name; GET /api/workers lists them.")
    args: list[JsonValue] | None = Field(None, max_length=100, description="Its arguments, by position.")
    item: JsonValue = Field(None, description="Its one argument, as the worker's JSON Schema says.")
    job_id: str | None = Field(None, pattern=f"^{JOB_ID}$", description="Its id; without it, a new one.")


class RetryQuery(_Query):
    """Which items run again."""

    status: RetryStatuses | None = Field(
        None, description="Statuses with commas between, of failed, error, cancelled; default: failed,error."
    )
    message: FailureMessage | None = Field(
        None, description="Only failures of the group with this `message` or `template`, as in `/errors` and `top_errors`."
    )
    limit: RetryLimit | None = Field(None, description="At most this many items, in the order of the list.")
    only_rows: RowNumbers | None = Field(
        None, description="Only rows with these numbers, with commas between, at most 200."
    )


class ReportQuery(_Query):
    """Which rows a report holds."""

    rows: RowsName = Field("failed", description="`failed`: what to correct, that is failed, error and rejected rows.")
    only_rows: RowNumbers | None = Field(
        None, description="Of these, only rows with these numbers, with commas between, at most 200."
    )


class RejectedQuery(_Query):
    """Which rejected rows to list."""

    after: Id | None = Field(None, description="The last row of the page before.")
    limit: int = Field(100, ge=1, le=1000, description="Rows on a page.")


class Options(_In, CommonOptions):
    """The options of a submission beside its worker and its items. Omitted ones have the worker's default."""

    what: ClassVar[str] = "option"


def _without(*options: str) -> ConfigDict:
    """For the API's document: this body has not these options. They are refused with the reason, so they are fields."""

    def drop(schema: dict[str, Any]) -> None:
        for name in options:
            del schema["properties"][name]

    return ConfigDict(json_schema_extra=drop)


def _columns(text: Any) -> Any:
    try:
        return parse_json(str(text).encode(), max_depth=asynctask_app().config.max_json_depth)
    except InputError as error:
        problem = fault(None, "columns", "invalid_json", "option.columns", {"words": str(error)}, str(text)[:200])
        raise InputError(f"option 'columns' {problem.message}", code="invalid_option", errors=[problem]) from None


Columns = Annotated[
    dict[str, str], BeforeValidator(_columns), WithJsonSchema({"type": "string", "contentMediaType": "application/json"})
]
"""An object as JSON: in a form and in a query every field is text."""


def _context(text: Any) -> Any:
    try:
        return parse_json(str(text).encode(), max_depth=asynctask_app().config.max_json_depth)
    except InputError as error:
        raise ValueError(f"must be a JSON object: {error}") from None


ContextText = Annotated[
    ContextOption, BeforeValidator(_context), WithJsonSchema({"type": "string", "contentMediaType": "application/json"})
]
"""The same for the context."""


def _long_or_checked(value: Any, check: Callable[[Any], Any]) -> Any:
    return value if isinstance(value, JsonItems) else check(value)


Items = Annotated[list[Any], Field(min_length=1), WrapValidator(_long_or_checked)]
"""A list, which is :class:`JsonItems` if it is long."""


def _some_unless_open(value: Any, check: Callable[[Any], Any], info: ValidationInfo) -> Any:
    return value if value == [] and info.data.get("open") else _long_or_checked(value, check)


FirstItems = Annotated[
    list[Any],
    Field(min_length=1, json_schema_extra=lambda schema: schema.update(minItems=0)),
    WrapValidator(_some_unless_open),
]
"""The same of a submission: it may be empty with the option ``open``, which is validated before."""


class JsonSubmission(Options):
    """A list of items as JSON."""

    model_config = _without("resubmit_of")

    worker: Name = Field(description="The worker's name; GET /api/workers lists them.")
    items: FirstItems = Field(description="The items, each as the worker's JSON Schema says. None only with `open`.")


class JobsSubmission(Options):
    """A list of jobs for several workers as JSON: one Task."""

    model_config = _without("resubmit_of")

    jobs: FirstItems = Field(
        description="Each names its worker and has an item as its JSON Schema says. None only with `open`."
    )


class ExportSubmission(Options):
    """An export: shards for a worker that yields rows."""

    model_config = _without("chunk_size", "resubmit_of")

    worker: Name = Field(description="The name of an export; GET /api/workers lists the workers.")
    shards: Items = Field(description="What each job of the export gets; any JSON.")
    format: Literal["csv", "csv.gz", "ndjson", "xlsx", "parquet"] = Field("csv", description="The format of the file.")


class FileToPreview(_In):
    """A file to look at: the fields of the form beside the file."""

    model_config = ConfigDict(strict=False)
    what: ClassVar[str] = "option"

    sheet: Name | None = Field(None, description="The worksheet; default: of those with rows, the one that fits a worker.")
    columns: Columns | None = Field(
        None, description="A mapping that is to be used: sheet and header are found by its headers."
    )
    encoding: Name | None = Field(None, description=_ENCODING)
    header_row: HeaderRow | None = Field(None, description=_HEADER_ROW)


class FileToAdd(_In):
    """A file whose rows are added to an open Task: the fields of the form beside the file."""

    model_config = ConfigDict(strict=False)
    what: ClassVar[str] = "option"

    sheet: Name | None = Field(None, description="The worksheet; default: the first visible one with rows.")
    columns: Columns | None = Field(None, description=_COLUMNS)
    encoding: Name | None = Field(None, description=_ENCODING)
    header_row: HeaderRow | None = Field(None, description=_HEADER_ROW)


class FileSubmission(Options):
    """A list of items as a file: the fields of the form beside the file."""

    model_config = ConfigDict(strict=False)

    worker: Name = Field(description="The worker's name; GET /api/workers lists them.")
    sheet: Name | None = Field(None, description="The worksheet; default: the first visible one with rows.")
    columns: Columns | None = Field(None, description=_COLUMNS)
    encoding: Name | None = Field(None, description=_ENCODING)
    header_row: HeaderRow | None = Field(None, description=_HEADER_ROW)
    context: ContextText = Field(None, description=options.CONTEXT)


class RawQuery(Options):
    """The options of a raw body; `worker` is required with one. Other bodies contain their options."""

    model_config = ConfigDict(strict=False)
    what: ClassVar[str] = "query parameter"

    unique: Annotated[Unique, listed_or_text("text")] = Field(
        None, description="Fields in which no two rows may be the same, with commas between."
    )
    on_complete: CallbackText = Field((), description="A worker to call when the last item has ended.")
    on_success: CallbackText = Field((), description="The same, if no item failed or was cancelled.")
    on_failure: CallbackText = Field((), description="The same, if any item failed or was cancelled.")
    worker: Name | None = Field(None, description="The worker's name; GET /api/workers lists them.")
    columns: Columns | None = Field(None, description=_COLUMNS)
    encoding: Name | None = Field(None, description=_ENCODING)
    header_row: HeaderRow | None = Field(None, description=_HEADER_ROW)
    context: ContextText = Field(None, description=options.CONTEXT)


class NewItems(_In):
    """Items to add to an open Task."""

    items: Items = Field(description="The items, each as the worker's JSON Schema says.")


class Knobs(_In, options.Knobs):
    """The knobs of a running Task; at least one."""

    what: ClassVar[str] = "knob"


class NewLink(_In):
    """A link to a Task to make."""

    rights: list[Literal["read", "control"]] = Field(
        ["read"], min_length=1, max_length=2, description="`read`, or `read` and `control`."
    )
    expires_in: int = Field(86_400, ge=1, le=MAX_LINK_S, description="Seconds for which it is valid.")


# -- responses: documented only, not validated at run time


# -- records of workers in another language


def _micros(text: Any) -> int:
    return from_datetime(read_rfc3339(text if isinstance(text, str) else ""))


Moment = Annotated[
    int, BeforeValidator(_micros), WithJsonSchema({"type": "string", "maxLength": 40, "format": "date-time"})
]
"""Microseconds."""

Threads = Annotated[int, Field(ge=0, le=10_000), BeforeValidator(whole_number)]
JobId = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=NUL_FREE)]


class Record(_In):
    """The record of a worker in another language about a job."""

    model_config = ConfigDict(str_max_length=None)  # arguments and results may hold longer texts

    status: Literal["working", "finish", "failed", "error", "interrupted"] = Field(
        description="It began; returned; was refused for a business reason; raised; was under way at a shutdown."
    )
    message: str = Field("", max_length=10_000, description="The reason, or what people are to read.")
    attempt: Annotated[int, Field(ge=1, le=2**31 - 1), BeforeValidator(whole_number)] | None = Field(
        None, description="The attempt that the job carries; null: its own engine keeps the job."
    )
    will_retry: bool = Field(False, description="After an `error`: another attempt follows.")
    retry_at: Moment | None = Field(None, description="When it follows, for a job that carries its attempt; null: at once.")
    worker: Name | None = Field(
        None, description="For its Event, if it has none: one that is registered, or of the process."
    )
    queue: QueueName = Field("default", description="For its Event, if it has none.")
    args: list[JsonValue] | None = Field(None, description="For its Event, if it has none: shown to people.")
    started_at: Moment | None = Field(
        None, description="When this attempt began; it tells a record that is sent again from one of another attempt."
    )
    result: JsonValue = Field(None, description="What a job that returned leaves.")

    def record(self, job_id: str) -> JobRecord:
        """The record of this job."""
        return JobRecord(**{**dict(self), "job_id": job_id})


class BatchRecord(Record):
    """The record of a worker in another language about one of its jobs."""

    job_id: JobId


class ReporterInfo(_In):
    """The process that sends the records; its lease is renewed by each request."""

    engine: str = Field(pattern="^[a-z]{1,8}$", max_length=8, description="What runs it: `sidekiq`.")
    name: str = Field(pattern="^[A-Za-z0-9_.:-]{1,55}$", max_length=55, description="Its own: HOST:PID:NONCE.")
    concurrency: Threads = Field(0, description="Jobs that it performs at once.")
    queues: list[QueueName] = Field(default_factory=list, max_length=100, description="The queues that it works.")
    busy: Threads = Field(0, description="Jobs that it performs now.")
    quiet: bool = Field(False, description="It takes no more jobs.")
    ended: bool = Field(False, description="It performs nothing any more; jobs that it left are given to others.")


class RecordBatch(_In):
    """Records in the order in which things happened."""

    records: list[BatchRecord] = Field(max_length=1_000)
    process: ReporterInfo | None = Field(None, description="Null: nobody notices when a worker dies.")

    def reporter(self) -> Reporter | None:
        """The process, as the application knows it."""
        return None if self.process is None else Reporter(**dict(self.process))


class _Out(BaseModel):
    model_config = ConfigDict(extra="forbid")


Time = Annotated[str, Field(description="RFC 3339, UTC", json_schema_extra={"format": "date-time"})]


@cache
def described(declared: Any) -> Any:
    """The schema of an object that the application declares as a TypedDict or a dataclass."""
    fields: dict[str, Any] = {}
    for field, hint in get_type_hints(declared, include_extras=True).items():
        text = hint.__metadata__[0] if get_origin(hint) is Annotated and hint != clock.Time else None
        fields[field] = (_schema(hint.__origin__), Field(description=text)) if text else (_schema(hint), ...)
    return create_model(declared.__name__, __base__=_Out, __doc__=declared.__doc__, **fields)


def _schema(hint: Any) -> Any:
    """The type of a field, with the schemas of the TypedDicts in it and the values of an enumeration."""
    if hint == clock.Time:
        return Time
    if is_typeddict(hint):
        return described(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return Literal[tuple(str(each) for each in hint)]
    if get_origin(hint) is UnionType or get_origin(hint) is Union:
        return reduce(or_, map(_schema, get_args(hint)))
    return _list_of(_schema(get_args(hint)[0])) if get_origin(hint) is list else JsonValue if hint is Any else hint


def _list_of(schema: Any) -> Any:
    return GenericAlias(list, (schema,))


class CellFault(_Out):
    """One thing wrong with a cell."""

    column: str | None
    code: str
    message: str
    value: JsonValue


class Fault(CellFault):
    """One thing wrong with one cell, row or field."""

    row: int | None


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
    sheets: list[str] = Field(
        default_factory=list,
        description="Of a workbook rejected for the sheet that was read: the others, as the option `sheet` takes them.",
    )


class Links(_Out):
    self: str
    events: str
    errors: str
    report: str
    result: str
    stream: str
    ui: str


class Linked(_Out):
    """A link to a Task."""

    link: str = Field(description="The text of the link: the parameter `link` of the Task's URLs.")
    rights: list[Literal["read", "control"]]
    expires_at: Time
    links: Links = Field(description="URLs of the Task with it.")


ListedEvent = described(task.ListedEvent)


class Refusal(_Out):
    """Why a list was rejected as a whole, or every row of it."""

    code: str
    message: str
    errors: list[Fault] = Field(description="The first 20.")


Progress = create_model(
    "Progress",
    __base__=described(task.Progress),
    __doc__=task.Progress.__doc__,
    links=(Links, ...),
    errors=(_list_of(ListedEvent) | None, Field(None, description="With include=errors: the first 20 failures.")),
    refusal=(Refusal | None, Field(None, description="With include=errors: why a list was rejected.")),
    context=(dict[str, JsonValue] | None, Field(None, description="With include=context: the constants of its jobs.")),
)


class Added(_Out):
    """What was added to an open Task."""

    first_row: int = Field(description="The number of the first of these rows in the Task.")
    accepted: int
    rejected: int
    errors: list[Fault] = Field(description="The problems of the first rejected rows.")


Submitted = create_model(
    "Submitted",
    __base__=Progress,
    __doc__="The progress object, with the rows that were rejected where they are known already.",
    errors=(list[Fault] | None, None),
)


class DryRunResult(_Out):
    """The result that a list would have; nothing was written."""

    dry_run: Literal[True]
    accepted: int
    rejected: int
    errors: list[Fault] = Field(description="The first 1,000.")
    errors_truncated: bool
    first_items: list[JsonValue] = Field(
        description="Up to five items as the worker would be given them, with secrets masked."
    )


class ItemField(_Out):
    """A field of a worker's item."""

    name: str
    title: str
    required: bool
    description: str | None


class ListRow(_Out):
    """A row of a list that may be its header."""

    row: int
    cells: list[str] = Field(description="The first cells that are not empty.")


class PreviewColumn(_Out):
    """A column of a list."""

    header: str
    letters: str = Field(description="Its place in the sheet, as C; empty for JSON.")
    samples: list[str] = Field(description="The first three different cells that are not empty, shortened.")


class HeaderError(_Out):
    """Why the row cannot be the header."""

    code: str
    message: str


class WorkerFit(_Out):
    """How the columns of a list fit a worker."""

    worker: str
    doc: str
    fields: list[ItemField] = Field(description="Empty for a worker that takes any columns.")
    matched: dict[str, str] = Field(description="Header -> field, for headers that are names of fields.")
    columns: dict[str, str] = Field(description="A proposal for the option `columns`.")
    remembered: int | None = Field(description="The Task that the proposal comes from; null: it is by similar names.")
    missing: list[str] = Field(description="Required fields that no column has, with the proposal.")


class ListPreview(_Out):
    """What the beginning of a list shows; nothing was validated or written."""

    format: str
    sheets: list[str] = Field(description="The visible sheets of a workbook.")
    sheet: str | None
    encoding: str | None = Field(description="Of a text.")
    header_row: int | None = Field(description="Null for JSON.")
    first_rows: list[ListRow]
    columns: list[PreviewColumn]
    error: HeaderError | None = Field(description="Then there are no columns; another row may be the header.")
    workers: list[WorkerFit] = Field(description="Those that take lists, the best first.")
    suggested: str | None = Field(description="The first of them, if it fits and no other fits as well.")


class PageLinks(_Out):
    self: str
    next: str | None


def rows_of(name: str, rows: str, row: Any, **more: Any) -> Any:
    """The schema of an answer with ``rows`` of a declared kind, and ``more`` members beside them."""
    return create_model(name, __base__=_Out, **{rows: _list_of(row)}, **more)


TaskPage = rows_of("TaskPage", "tasks", Progress, links=PageLinks)
EventPage = rows_of("EventPage", "events", ListedEvent, links=PageLinks)
JobsPage = rows_of("JobsPage", "jobs", ListedEvent, links=PageLinks)
SearchPage = rows_of("SearchPage", "events", described(queries.FoundEvent), links=PageLinks)


RecordResult = create_model("RecordResult", __base__=described(remote.Recorded), __doc__="The result of a record.")


class RecordResults(_Out):
    """The result of each record, in order."""

    results: _list_of(RecordResult)  # type: ignore[valid-type]
    signal: Literal["quiet", "stop"] | None = Field(description="What the process is to do.")


class ErrorGroup(_Out):
    template: str = Field(description="What the messages of the group have in common, with placeholders such as ‹n›.")
    message: str = Field(description="One of these messages.")
    status: str
    count: int
    sample_job_id: str | None
    sample_rows: list[int]


ErrorGroups = rows_of("ErrorGroups", "errors", ErrorGroup)


class RejectedRow(_Out):
    """A row that the validation rejected."""

    row: int
    errors: list[CellFault]
    cells: JsonValue


RejectedPage = rows_of("RejectedPage", "rejected", RejectedRow, links=PageLinks)


class LogEntry(_Out):
    at: Time
    who: str
    action: str
    detail: JsonValue


LogEntries = rows_of("LogEntries", "log", LogEntry)
ListColumns = rows_of("ListColumns", "columns", described(ListColumn))
WaitReasons = rows_of("WaitReasons", "reasons", described(operations.WaitReason))


class WorkerInfo(_Out):
    name: str
    doc: str
    queue: str
    engine: str | None = Field(description="The attached engine that performs it; null: this application's own workers.")
    retry: int | bool | None = Field(description="Null: the engine's own options decide.")
    priority: int
    timeout: float | None = Field(description="Seconds; null: none, or that of the engine.")
    rate: str | None = Field(description="The rate in the code at which jobs of its Tasks may start; null: no limit.")
    limit: str | None = Field(description="The name of its rate limit.")
    search: list[str] = Field(description="The fields by whose values a search finds its jobs.")
    fields: list[ItemField]
    headers: list[str] = Field(description="Every header that a sheet may use for them.")
    item_schema: dict[str, JsonValue] | None = Field(description="JSON Schema of an item; null where any object will do.")


Workers = rows_of("Workers", "workers", WorkerInfo)


class Health(_Out):
    status: Literal["ok"]
