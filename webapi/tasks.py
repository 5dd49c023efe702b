"""/api/tasks: submit a list, follow it, change it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeVar

from flask import Response, request, stream_with_context
from werkzeug.datastructures import FileStorage, MultiDict
from werkzeug.wsgi import FileWrapper

from asynctask.access import User, read_link
from asynctask.app import AsyncTask
from asynctask.clock import SECOND, rfc3339
from asynctask.errors import BrokerUnavailable, InputError, NotFound, Unavailable
from asynctask.exports.rows import FORMATS
from asynctask.ledger.schedules import KEYS
from asynctask.lists.dry_run import DryRun
from asynctask.lists.options import CommonOptions, SubmitOptions
from asynctask.lists.problems import fault
from asynctask.lists.rows import ListSource, encoding_option
from asynctask.lists.uploads import StoredFile
from asynctask.submission import Submission
from asynctask.task import VERBS, Addition, TaskHandle, Verb, event_cursor
from webapi.access import Forbidden, current_user, of_user, stream_lasts_s
from webapi.context import (
    TASKS,
    Busy,
    JsonPage,
    asynctask_app,
    client_check,
    find_progress,
    find_task,
    json_response,
    page_links,
    progress_links,
    progress_response,
    progress_tag,
    reader_locale,
    retry_after,
    set_language,
    slot,
    task_url,
    unchanged_response,
    until_gone,
    who,
    with_links,
)
from webapi.front import (
    FOLLOW,
    HEARTBEAT_S,
    LATEST,
    POLLED,
    STREAM_HEARTBEAT,
    STREAM_START,
    TICK_S,
    Following,
    Sent,
    stream_event,
)
from webapi.problems import MAX_ERRORS, MalformedBody, did_you_mean, problem_objects, public_message
from webapi.reading import FORM, JSON, ApiRequest, current_request
from webapi.shapes import (
    BINARY,
    TEXT,
    Added,
    ErrorGroups,
    EventPage,
    EventQuery,
    ExportSubmission,
    FileSubmission,
    FileToAdd,
    FileToPreview,
    JobsSubmission,
    JsonSubmission,
    Knobs,
    Linked,
    ListColumns,
    LogEntries,
    NewItems,
    NewLink,
    NoQuery,
    OneTaskQuery,
    Progress,
    RawQuery,
    RetryQuery,
    Routes,
    Submitted,
    TaskPage,
    TaskQuery,
    WaitReasons,
    row_numbers,
)

EVENT_STREAM: Final = "text/event-stream"

blueprint: Final = Routes("tasks", __name__, url_prefix=TASKS, tag="Tasks")


@blueprint.serve(
    "POST",
    "submitTask",
    Submitted,
    query=RawQuery,
    status=202,
    description="Accepted: the Task and the rows rejected so far",
    responses=[415, 504],
    reads_body=True,
)
def create(query: RawQuery) -> Response:
    """Submit a list

    As JSON (items of one worker, or jobs that name their own), as a form with a file, or as a raw body of rows with the
    options in the query. Responds once the Task is in the ledger; rows that the validation rejected within a second are in
    `errors`. The same Idempotency-Key with the same body returns the first Task, with another body 422. `dry_run` only
    validates the list.
    """
    app = asynctask_app()
    given = submission(app, current_request(), query)
    with _checking(app, given):
        return answer(app.hand_in(given))


@contextmanager
def _checking(app: AsyncTask, given: Submission) -> Iterator[None]:
    """Holds a slot while a file is only checked, which may take as long as a report. Raises :class:`Busy`."""
    with ExitStack() as stack:
        if given.options.dry_run and isinstance(given.listed, StoredFile):
            try:
                stack.enter_context(slot("report"))
            except Busy:
                app.uploads.remove(given.listed.name)
                raise
        yield


exports: Final = Routes("exports", __name__, url_prefix="/api/exports", tag="Tasks")


@exports.serve(
    "POST",
    "submitExport",
    Submitted,
    body=ExportSubmission,
    status=202,
    description="Accepted: the Task of the shards",
    responses=[504],
)
def export(body: ExportSubmission) -> Response:
    """Submit an export

    Each shard is a job that yields rows; when the last has ended they are one file, at `links.result`. The same
    Idempotency-Key with the same body returns the first Task; `dry_run` only validates shards and options.
    """
    app = asynctask_app()
    _refuse_unknown(app, body.worker)
    options, wait_s = _options(body, _idempotency_key(current_request())), app.config.submit_wait_s
    given = Submission(body.worker, body.shards, options, form=body.format, is_kept=True, wait_s=wait_s)
    return answer(app.hand_in(given))


@blueprint.serve(
    "GET /<int:task_id>/result",
    "getResult",
    BINARY,
    media="application/octet-stream",
    responses={206: "The ranges asked for", 304: "Unchanged", 409: "Conflict", 416: "No such range"},
)
def result(task_id: int) -> Response:
    """The file of an export

    Supports `Range` (one range of bytes) and `If-None-Match`. 409 has the reason if there is none: the export is not done,
    or its merge failed. 503 if as many files are sent as may be at once.
    """
    task = find_task(task_id)
    found = asynctask_app().result(task.id)
    made = found.manifest
    name = f"export-{task_id}.{made['format']}"
    with ExitStack() as stack:
        body: Iterable[bytes] = ()
        if request.method != "HEAD":
            stack.enter_context(slot("file"))
            body = FileWrapper(stack.enter_context(found.open()), 1 << 16)
        response = Response(body, mimetype=FORMATS[made["format"]].media)
        response.content_length = made["bytes"]
        response.set_etag(made["sha256"])
        response.make_conditional(_with_one_range(request.environ), accept_ranges=True, complete_length=made["bytes"])
        response.call_on_close(stack.pop_all().close)
    response.headers["Content-Disposition"] = f'attachment; filename="{name}"'
    response.headers["Cache-Control"] = "no-cache"
    return response


def _with_one_range(environ: dict[str, Any]) -> dict[str, Any]:
    """The request without a ``Range`` that is to be ignored (RFC 9110, 14.2): of another method or unit, malformed, or of
    several ranges. werkzeug refuses these."""
    asked = request.range
    if request.method == "GET" and asked is not None and asked.units == "bytes" and len(asked.ranges) == 1:
        return environ
    return {name: value for name, value in environ.items() if name != "HTTP_RANGE"}


@blueprint.serve("GET", "listTasks", TaskPage, query=TaskQuery)
def index(query: TaskQuery) -> Response:
    """List Tasks, newest first

    `links.next` leads to the next page and is null on the last one.
    """
    page, user = JsonPage(query.limit, lambda task: int(task["task_id"])), current_user()
    found = asynctask_app().tasks(
        ids=_ids(query, user),
        group=query.group,
        since=query.since,
        state=query.state,
        worker=query.worker,
        owner=query.owner if user.owner is None else user.owner,
        parent=query.parent,
        after=query.after,
        limit=query.limit,
        take=lambda tasks: page(map(with_links, tasks)),
    )
    return json_response({"tasks": found, "links": page_links(page.after)}, cache="no-cache")


def _ids(query: TaskQuery, user: User) -> list[int] | None:
    """The ids asked for; none where the owner asked for is not the user's."""
    if user.owner is not None and query.owner not in (None, user.owner):
        return []
    return [int(i) for i in query.ids.split(",")] if query.ids else None


@blueprint.serve(
    "GET /<int:task_id>",
    "getTask",
    Progress,
    query=OneTaskQuery,
    responses={304: "Unchanged since the ETag in If-None-Match"},
)
def show(task_id: int, query: OneTaskQuery) -> Response:
    """The progress of a Task

    Poll after `poll_after_ms` with the ETag in `If-None-Match`: 304 means unchanged. With `wait`, the answer comes when the
    Task has a version other than the client's, or after so many seconds.
    """
    polled = None if query.wait or query.include else request.environ.get(POLLED)
    if isinstance(polled, Sent):
        return unchanged_response(polled.tag, polled.retry_after)
    found, held = polled or _latest(task_id, query) or find_progress(task_id, query.include), True
    if query.wait and _is_known(found, query) and not found["done"]:
        if FOLLOW not in request.environ:
            found, held = _another(found, query)
        elif (follow := request.environ[FOLLOW]) is not None:
            plain = {name: value for name, value in found.items() if name != query.include}
            is_own = query.include is not None
            follow(Following(task_id, request.script_root, plain, progress_tag(plain), query.wait, is_own))
            return progress_response(with_links(found), conditional=False)
    if found.get("refusal") is not None:  # the Task is done, and the object has a language, which its version does not tell
        found["refusal"] = find_task(task_id).refusal_object(locale := reader_locale())
        response = json_response(with_links(found), cache="no-cache")  # caching tags it by its content
        set_language(response, locale)
        return response
    response = progress_response(with_links(found))
    if not held:
        response.headers["Asynctask-Held"] = "no"
    return response


def _latest(task_id: int, query: OneTaskQuery) -> dict[str, Any] | None:
    """The progress object that the server has read for others, if this client has the same one, and so only waits."""
    if not query.wait or query.include is not None or LATEST not in request.environ:
        return None
    found: dict[str, Any] | None = request.environ[LATEST](task_id)
    return found if found is not None and _is_known(found, query) else None


def _another(found: dict[str, Any], query: OneTaskQuery) -> tuple[dict[str, Any], bool]:
    """The progress object once it differs from the one that the client has; ``found``, or a later one, after ``wait``
    seconds, and if it is the last. At once, with False, if too many requests wait. Holds the thread."""
    monotonic, pause, gone = asynctask_app().clock.monotonic, threading.Event(), client_check()
    until = monotonic() + query.wait
    with suppress(Busy), slot("follow"):
        while _is_known(found, query) and not found["done"] and (left := until - monotonic()) > 0:
            pause.wait(min(TICK_S, left))
            gone()
            found = find_progress(found["task_id"], query.include)
        return found, True
    return found, False


def _is_known(progress: dict[str, Any], query: OneTaskQuery) -> bool:
    """Whether the client has this progress object."""
    if query.version is not None:
        return bool(progress["version"] == query.version)
    return request.if_none_match.contains_weak(progress_tag(progress))


@blueprint.serve(
    "GET /<int:task_id>/stream",
    "streamTask",
    TEXT,
    media=EVENT_STREAM,
    responses={204: "Done, and the client has the last object: do not connect again"},
)
def stream(task_id: int) -> Response:
    """The progress of a Task as Server-Sent Events

    Each event is the progress object, sent when it changes, at most four times a second. The stream ends when the Task is
    done, when the link that opened it expires, and after five minutes at the latest. `Last-Event-ID` continues without
    repeating what the client has. 503 if as many clients follow Tasks as may.
    """
    found = find_progress(task_id)
    known = request.headers.get("Last-Event-ID")
    if found["done"] and known == progress_tag(found):
        return Response(status=204)
    with ExitStack() as stack:
        events: Iterator[bytes] = iter(())
        follow = request.environ.get(FOLLOW)
        if follow is not None and request.method != "HEAD":
            follow(Following(task_id, request.script_root, found, known, lasts_s=stream_lasts_s()))
        elif request.method != "HEAD":
            stack.enter_context(slot("follow"))
            events = _events(asynctask_app(), task_id, known, stream_lasts_s())
        # The slot is held, and the request's context exists, until the last byte is sent.
        response = Response(stream_with_context(until_gone(events)), mimetype=EVENT_STREAM)
        response.call_on_close(stack.pop_all().close)
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"  # nginx would keep events until a buffer is full
    return response


def _events(app: AsyncTask, task_id: int, known: str | None, lasts_s: float) -> Iterator[bytes]:
    """Server-Sent Events until the Task is done, ``lasts_s`` at most, from a server that holds a thread for each stream.
    While the database is away the stream stays open: a browser does not connect again after an answer of 503."""
    monotonic, pause, gone, root = app.clock.monotonic, threading.Event(), client_check(), request.script_root
    sent_at = monotonic()
    until = sent_at + lasts_s
    yield STREAM_START
    while monotonic() < until:
        progress = None
        try:
            progress = app.progress(task_id)
        except NotFound:  # it was removed
            return
        except Unavailable:
            pass
        if progress is not None and (tag := progress_tag(progress)) != known:
            known, sent_at = tag, monotonic()
            yield stream_event(progress, root)
        elif monotonic() - sent_at >= HEARTBEAT_S:
            sent_at = monotonic()
            yield STREAM_HEARTBEAT
        if progress is not None and progress["done"]:
            return
        pause.wait(TICK_S)
        gone()


@blueprint.serve("PATCH /<int:task_id>", "updateTask", Progress, body=Knobs, responses=[409])
def update(task_id: int, body: Knobs) -> Response:
    """Change a Task's knobs while it runs

    New starts follow them within a second; running jobs continue.
    """
    return progress_response(with_links(find_task(task_id).update(who=who(), **body.model_dump(exclude_unset=True))))


@blueprint.serve("GET /<int:task_id>/events", "listEvents", EventPage, query=EventQuery)
def events(task_id: int, query: EventQuery) -> Response:
    """The Events of a Task: one per item, with its params and messages

    `links.next` leads to the next page and is null on the last one. A page ends early, after at least one Event, at about
    8 MB.
    """
    page = JsonPage(query.limit, event_cursor)
    found = find_task(task_id).events(_statuses(query.status), query.after, query.limit, text=query.text, take=page)
    return json_response({"events": found, "links": page_links(page.after)})


@blueprint.serve("GET /<int:task_id>/columns", "listColumns", ListColumns)
def columns(task_id: int) -> Response:
    """The columns of a Task's list, in its order

    Those known so far, while the list is read. Empty if they are too many to be kept.
    """
    return json_response({"columns": find_task(task_id).columns()})


@blueprint.serve("GET /<int:task_id>/errors", "listErrorGroups", ErrorGroups)
def errors(task_id: int) -> Response:
    """Failures grouped by message, with their number and some rows"""
    return json_response({"errors": find_task(task_id).error_groups()})


@blueprint.serve("GET /<int:task_id>/log", "getLog", LogEntries)
def log(task_id: int) -> Response:
    """Who changed what, and when

    The last 1,000 entries, or those of about 8 MB.
    """
    # A link may be in a mail to a customer.
    hidden = {} if current_user().task_id is None else {"who": ""}
    return json_response({"log": find_task(task_id).log(take=lambda rows: JsonPage()({**row, **hidden} for row in rows))})


@blueprint.serve("POST /<int:task_id>/links", "linkTask", Linked, body=NewLink, status=201, responses=[409])
def link(task_id: int, body: NewLink) -> Response:
    """Make a link to a Task, for somebody without a login

    It is signed, and carries `read`, or `read` and `control`, until it expires. Its text is the parameter `link` of the
    Task's page and of its URLs in the API. 409 `no_link_secret` if the server has no secret for links.
    """
    user = current_user()
    if user.task_id is not None or not all(map(user.may, body.rights)):
        raise Forbidden("a link carries no right that its maker lacks, and opens no way to another link")
    text = asynctask_app().link(task_id, body.rights, body.expires_in, who=who())
    found = read_link(text, asynctask_app().config.link_secret)
    assert found is not None
    links = {name: f"{url}?link={text}" for name, url in progress_links(task_id).items()}
    made = {"link": text, "rights": sorted(found.rights), "expires_at": rfc3339(found.expires_at * SECOND), "links": links}
    return json_response(made, 201, cache="no-store")


@blueprint.serve("GET /<int:task_id>/waiting", "listWaitReasons", WaitReasons)
def waiting(task_id: int) -> Response:
    """Why no row of a Task begins

    Empty while a row runs, and if nothing keeps the next one from its worker. Ask it for a Task that does not move.
    """
    reasons = [asdict(each) for each in asynctask_app().operations.wait_reasons(find_task(task_id).id)]
    for each in reasons:
        if each["code"] == "broker_away":  # it names the address, which only the log and the command line have
            each["message"] = public_message(BrokerUnavailable())
    return json_response({"reasons": reasons}, cache="no-store")


@blueprint.serve("POST /<int:task_id>/items", "addItems", Added, responses=[409, 413, 415], reads_body=True)
def add(task_id: int) -> Response:
    """Add items to an open Task

    In one transaction: at most 10,000 items, or rows of a file, sent as a form. Rejected ones are in `errors`. The same
    Idempotency-Key with the same items adds them once, with others 422. 409 if the Task was not submitted with `open`, is
    sealed, or is cancelled.
    """
    locale = reader_locale()
    found = _add(asynctask_app(), current_request(), find_task(task_id).id)
    answer = {"first_row": found.first_row, "accepted": found.accepted, "rejected": found.rejected}
    response = json_response({**answer, "errors": problem_objects(found.problems[:MAX_ERRORS], locale)}, cache="no-store")
    if found.problems:
        set_language(response, locale)
    if found.replayed:
        response.headers["Idempotency-Replayed"] = "true"
    return response


def _serve_verb(verb: Verb, operation_id: str, query: type[RetryQuery | NoQuery] = NoQuery) -> None:
    @blueprint.serve(
        f"POST /<int:task_id>/{verb.name}",
        operation_id,
        Progress,
        query=query,
        responses=[409],
        endpoint=verb.name,
        summary=verb.title,
        more=verb.more,
    )
    def act(task_id: int, query: RetryQuery | None = None) -> Response:
        how: dict[str, Any] = {}
        if query is not None:
            how = {**query.model_dump(), "status": _statuses(query.status), "only_rows": row_numbers(query.only_rows)}
        task = find_task(task_id)
        verb.call(task, who=who(), **how)
        return progress_response(with_links(task.progress()))


for _name, _verb in VERBS.items():
    _serve_verb(
        _verb, "runCallbacks" if _name == "callbacks" else f"{_name}Task", RetryQuery if _name == "retry" else NoQuery
    )


def _statuses(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.split(","))) if text else ()


# -- POST /api/tasks: JSON body, form with a file, or raw body

RAW: Final = {
    "application/x-ndjson": "body.ndjson",
    "application/ndjson": "body.ndjson",
    "application/jsonl": "body.ndjson",
    "text/csv": "body.csv",
    "text/tab-separated-values": "body.tsv",
}
"""Media types of raw bodies, with the file name from which the readers take the format."""

KEY_PATTERN: Final = "^[!-~]([ -~]{0,253}[!-~])?$"


def submission(app: AsyncTask, incoming: ApiRequest, query: RawQuery) -> Submission:
    """What the request hands in. Raises :class:`InputError` (4xx) that names the field, row or column."""
    incoming.require(JSON, FORM, *RAW)
    key = _idempotency_key(incoming)
    if incoming.mimetype in RAW:
        return _from_raw(app, incoming, query, key)
    if incoming.args:
        # The options of these bodies are in the body: one in the query must not be ignored.
        NoQuery.model_validate(incoming.args.to_dict())
    if incoming.mimetype == JSON:
        return _from_json(app, incoming, key)
    return from_file(app, incoming, key)


def answer(found: TaskHandle | DryRun) -> Response:
    """202 with the progress object and the rows rejected so far; 422 with all of them if none was accepted; 200 with the
    result of a dry run."""
    locale = reader_locale()
    if isinstance(found, DryRun):
        response = json_response(found.as_dict(locale), cache="no-store")
        set_language(response, locale)
        return response
    if found.first_progress is None and (error := found.refusal()) is not None:
        # A replayed key whose first answer was this error.
        raise error
    progress = with_links(found.first_progress or found.progress())
    url = task_url(found.id)
    if found.problems:
        progress["errors"] = problem_objects(found.problems[:MAX_ERRORS], locale)
    response = json_response(progress, 202, cache="no-store")
    if found.problems:
        set_language(response, locale)
    response.headers["Location"] = url
    response.headers["Retry-After"] = retry_after(progress)
    if not found.created:
        response.headers["Idempotency-Replayed"] = "true"
    return response


def _from_json(app: AsyncTask, incoming: ApiRequest, key: str | None) -> Submission:
    body = incoming.get_json()
    if not isinstance(body, dict):
        raise InputError('the body must be a JSON object: {"worker": ..., "items": [...]}', code="wrong_type")
    if "jobs" in body:
        mixed = JobsSubmission.model_validate(body)
        options = _options(mixed, key)
        return Submission(None, mixed.jobs, options, is_kept=True, wait_s=app.config.submit_wait_s)
    given = JsonSubmission.model_validate(body)
    _refuse_unknown(app, given.worker)
    options = _options(given, key)
    return Submission(given.worker, given.items, options, is_kept=True, wait_s=app.config.submit_wait_s)


def from_file(app: AsyncTask, incoming: ApiRequest, key: str | None = None) -> Submission:
    """What a form with a file submits. Raises :class:`InputError` (4xx)."""
    given, file = form_with_file(incoming, FileSubmission)
    # Before the possibly large file is stored.
    _refuse_unknown(app, given.worker)
    source, options = ListSource.checked(given.sheet, given.columns, given.encoding, given.header_row), _options(given, key)
    return Submission(
        given.worker, store(app, file), options, source, wait_s=app.config.submit_wait_s, alive=client_check()
    )


def _add(app: AsyncTask, incoming: ApiRequest, task_id: int) -> Addition:
    """Adds what the request has. Raises :class:`InputError` (4xx), :class:`Conflict`."""
    incoming.require(JSON, FORM)
    key = _idempotency_key(incoming)
    if incoming.mimetype == JSON:
        items = NewItems.model_validate(incoming.get_json()).items
        return app.add_items(task_id, items, idempotency_key=key, who=who())
    given, file = form_with_file(incoming, FileToAdd)
    options = given.model_dump()
    return app.add_file(task_id, store(app, file), idempotency_key=key, who=who(), **options)


Form = TypeVar("Form", FileSubmission, FileToAdd, FileToPreview)


def form_with_file(incoming: ApiRequest, schema: type[Form]) -> tuple[Form, FileStorage]:
    """The fields of a form, validated, and its one file."""
    incoming.load_form()
    file = _the_file(incoming)
    _refuse_twice(incoming.form, "option", "invalid_option")
    # An empty form field counts as not given.
    said = {name: text for name, text in incoming.form.items() if text != "" or name == "worker"}
    return schema.model_validate(said), file


def store(app: AsyncTask, file: FileStorage) -> StoredFile:
    """Stores the file of a form."""
    return app.uploads.store(file.stream, _name_of(file), limit=app.config.max_file_bytes)


def _from_raw(app: AsyncTask, incoming: ApiRequest, query: RawQuery, key: str | None) -> Submission:
    _refuse_twice(incoming.args, "query parameter", "invalid_query_parameter")
    if query.worker is None:
        problem = fault(None, "worker", "missing", "missing")
        raise InputError("query parameter 'worker' is required", code="invalid_query_parameter", errors=[problem])
    _refuse_unknown(app, query.worker)
    body, encoding = incoming.raw_body(*RAW), query.encoding
    if (charset := incoming.charset()) is not None:
        if encoding is not None and encoding_option(encoding) != charset:
            said = {"charset": incoming.mimetype_params["charset"][:40]}
            problem = fault(None, "encoding", "invalid_option", "option.charset", said, encoding[:200])
            raise InputError(f"option 'encoding' {problem.message}", code="invalid_options", errors=[problem])
        encoding = charset
    source = ListSource.checked(None, query.columns, encoding, query.header_row)
    stored = app.uploads.store(body, RAW[incoming.mimetype], limit=app.config.max_file_bytes, named=False)
    options, wait_s = _options(query, key), app.config.submit_wait_s
    return Submission(query.worker, stored, options, source, wait_s=wait_s, alive=client_check())


def _options(given: CommonOptions, key: str | None) -> SubmitOptions:
    return of_user(given.with_request(key, who()))


def _refuse_unknown(app: AsyncTask, worker: str) -> None:
    if worker not in app.workers:
        raise InputError(
            f"no worker is registered as {worker!r}{did_you_mean(worker, app.workers)}",
            code="unknown_worker",
            errors=[fault(None, "worker", "unknown_worker", "option.worker", None, worker)],
        )


def _the_file(incoming: ApiRequest) -> FileStorage:
    names = [name for name, _ in incoming.files.items(multi=True)]
    if names != ["file"]:
        if "file" in incoming.form:
            found = "a field `file` without a filename"
        else:
            found = ", ".join(repr(name) for name in names) or "none"
        raise InputError(
            f"send exactly one file, in the field `file`; found: {found}",
            code="missing_file",
            errors=[fault(None, "file", "missing", "option.file")],
        )
    return incoming.files["file"]


def _name_of(file: FileStorage) -> str:
    """The name of an uploaded file; without an extension it gets that of its Content-Type, for the readers' detection."""
    name = file.filename or ""
    return name if "." in name or file.mimetype not in RAW else name + Path(RAW[file.mimetype]).suffix


def _refuse_twice(fields: MultiDict[str, str], what: str, code: str) -> None:
    for name, values in fields.lists():
        if len(values) > 1:
            problem = fault(None, name, "duplicate", "option.twice")
            raise InputError(f"{what} {name!r} {problem.message}", code=code, errors=[problem])


def _idempotency_key(incoming: ApiRequest) -> str | None:
    key = incoming.headers.get("Idempotency-Key")
    if key is None:
        return None
    if not re.fullmatch(KEY_PATTERN, key):
        raise MalformedBody("Idempotency-Key must be 1 to 255 characters of ASCII, a UUID for instance", code="invalid_key")
    if key.startswith(KEYS):
        raise MalformedBody(
            f"Idempotency-Key: those that begin with {KEYS} are of schedules; use another", code="invalid_key"
        )
    return key
