"""Submission of a list: checks its options, and has it written at once or split."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson

from asynctask.clock import from_datetime
from asynctask.core.states import Reason
from asynctask.core.transitions import CALLBACKS, MERGE
from asynctask.errors import AsyncTaskError, Conflict, InputError, NotFound, Problem, TooLarge, Unavailable
from asynctask.job import context_of, context_text, running_job
from asynctask.ledger import additions, children, queries
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, NewItem, Reject, dumps, loads
from asynctask.ledger.progress import first_progress
from asynctask.ledger.queries import other_language
from asynctask.ledger.tasks import First, Made, NewCallback, NewTask, SplitLost, Throttle
from asynctask.lists.dry_run import KEPT_PROBLEMS, Checker, DryRun, Marking, check_rows
from asynctask.lists.items import MIXED, ItemShape, Rejected
from asynctask.lists.problems import fault, kept_problems, problems_of, refusal, stored
from asynctask.lists.readers import RawRow
from asynctask.lists.rows import MAX_KEY, ListSource, Names, all_good, checked, open_list, refused_option, too_many_items
from asynctask.lists.split import WHOLE_S, Splitter, noted
from asynctask.lists.uploads import ITEMS, JsonItems, StoredFile, is_workbook, items_body
from asynctask.lists.written_cells import secret_json
from asynctask.logs import get_logger
from asynctask.task import Addition, Services, TaskHandle
from asynctask.worker import Worker

if TYPE_CHECKING:
    from asynctask.lists.options import SubmitOptions  # imports pydantic, which a worker process may not need

INLINE_BYTES = 1_000_000
"""Largest list, in bytes, that is split in a thread of the process that accepted it; larger ones use a child process."""

MOST_ROWS: Final = 1_000
"""Most rows of one transaction of the group commit; a list with as many is written alone."""

_AS_GIVEN: Final = ("session", "idempotency_key", "resubmit_of", "parent", "who")
"""Options that the Task's row has under their own names."""

MOST_ADDED: Final = 10_000
MAX_ADDED_BYTES: Final = 4_000_000
"""Most items of one addition to an open Task, and most bytes of them: it is one transaction."""

SLOW_S = 60.0
"""Seconds after a slow validation for which lists of that worker are not validated before the response."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A submitted list for a worker, with its options.

    ``worker``: a worker, its name, or a task or an actor of an attached engine; None for JSON jobs that name their own
    (``{"worker": name, "item": ...}``). ``listed``: items, or a stored file, to be read by ``source``. ``form``: the items
    are shards, whose rows become a file in this format. ``is_kept``: the items are JSON, and their split survives this
    process; other items are consumed in the caller's thread. ``wait_s``: seconds to wait for the validation of a list that
    another thread or process splits. ``marking``: the copy that a dry run of a file writes; ``alive``: called during one,
    which ends with an exception that it raises.
    """

    worker: Any
    listed: Iterable[Any] | JsonItems | StoredFile
    options: SubmitOptions
    source: ListSource = field(default_factory=ListSource)
    form: str | None = None
    is_kept: bool = False
    wait_s: float = 1.0
    marking: Marking | None = None
    alive: Callable[[], None] = lambda: None


@dataclass(slots=True)
class _Waiting:
    first: First
    made: Made | None = None
    error: BaseException | None = None


class GroupSubmit:
    """The group commit of submissions: the next commit writes all that arrived during the last one.

    Each caller waits for its own Task, and gets the result of that Task.
    """

    def __init__(self, ledger: Ledger, *, lease_s: float) -> None:
        self._ledger = ledger
        self._lease_s = lease_s
        self._waiting: list[_Waiting] = []
        self._lock = threading.Lock()
        self._commit_lock = threading.Lock()

    def create(self, first: First) -> Made:
        """Creates a Task with its first slice; result and errors as in :func:`asynctask.ledger.tasks.create`."""
        own = _Waiting(first)
        with self._lock:
            self._waiting.append(own)
        with self._commit_lock:
            if own.made is None and own.error is None:
                with self._lock:
                    taken, self._waiting = self._waiting, []
                self._write(taken)  # its own is among them
        if own.error is not None:
            raise own.error
        assert own.made is not None
        return own.made

    def _write(self, taken: list[_Waiting]) -> None:
        while taken:
            count = rows = 0
            for each in taken:
                # A Task that corrects another one locks that Task, so it is written alone.
                corrects = each.first.new.resubmit_of is not None
                rows += MOST_ROWS if corrects else len(each.first.items) + len(each.first.rejects)
                if count and rows > MOST_ROWS:
                    break
                count += 1
            self._write_batch(taken[:count])
            del taken[:count]

    def _write_batch(self, batch: list[_Waiting]) -> None:
        try:
            found = task_rows.create(self._ledger, [each.first for each in batch], lease_s=self._lease_s)
            for each, made in zip(batch, found, strict=True):
                each.made = made
        except BaseException as error:
            if len(batch) == 1 or isinstance(error, Unavailable):
                for each in batch:
                    each.error = error
                return
            for each in batch:  # one of them is at fault: write each alone
                self._write_batch([each])


Carrier = Callable[[], Mapping[str, Any]]
"""Returns members for the context of the Task that its thread submits."""


class Submitter:
    """Accepts lists. ``split_elsewhere`` splits a Task in another process, or returns False if it cannot."""

    def __init__(
        self,
        services: Services,
        splitter: Splitter,
        *,
        lease_s: float,
        split_elsewhere: Callable[[int], bool],
        checker: Checker,
        carriers: Sequence[Carrier] = (),
    ) -> None:
        self._services = services
        self._ledger = services.ledger
        self._splitter = splitter
        self._lease_s = lease_s
        self._split_elsewhere = split_elsewhere
        self._checker = checker
        self._carriers = carriers
        self._limits = services.limits
        self._group = GroupSubmit(services.ledger, lease_s=lease_s)
        self._slow: dict[str, float] = {}  # worker -> until when its validation is assumed to be slow
        self._log = get_logger("asynctask.submit")

    # -- submitting a list, step 1 of docs/explanation/internals.md

    def submit(self, worker: Worker, given: Submission, callbacks: Sequence[NewCallback] = ()) -> TaskHandle | DryRun:
        """Creates a Task from a list; a dry run writes nothing. ``callbacks``: those of the options, or of the worker.

        Raises :class:`InputError` with every problem if a list of JSON items or a file, or every row of it, is refused, and
        for a strict list with a rejected row; the exceptions of a program's iterable; for a dry run :class:`Unavailable` if
        it takes longer than ``dry_run_s``.
        """
        given = replace(given, options=self._under_parent(given.options))
        if isinstance(given.listed, StoredFile):
            return self._submit_stored(worker, given.listed, given, callbacks)
        _refuse_items(given.options)
        way = self._submit_json if given.is_kept else self._submit_iterable
        return way(worker, given.listed, given, callbacks)

    def _submit_iterable(
        self, worker: Worker, items: Iterable[Any], given: Submission, callbacks: Sequence[NewCallback]
    ) -> TaskHandle | DryRun:
        """Submits a program's items. A strict list is validated before any row is written; its rows wait in a temporary
        file."""
        options, digest = given.options, None
        strict = bool(options.strict)
        unique, key = self._unique(worker, options), self._key(worker, options)
        if options.idempotency_key is not None and not options.dry_run:
            items = list(items)  # the idempotency key identifies the whole list
            digest = _digest(worker, options, _program_body(items), callbacks)
        rows = self._rows(worker, items, unique, key)
        if options.dry_run:
            return check_rows(rows, self._shape(worker), self._limits.max_rows, strict=strict)
        new = self._new_task(worker, options, digest, callbacks, planned=len(items) if isinstance(items, Sized) else None)
        with ExitStack() as stack:
            if strict:
                total, rows = stack.enter_context(all_good(rows, self._limits.max_rows))
                new = replace(new, planned=total)
            first, made = self._splitter.split_items(new, rows, self._group.create)
        if not made.created and (task := task_rows.read(self._ledger, made.task_id)).split_state == "failed":
            raise Conflict(f"this key was used for Task {task.id}, which broke off ({task.split_reason}); use a new key")
        return self._handle(worker, made, first, is_over=True)

    def _submit_json(
        self, worker: Worker, items: Any, given: Submission, callbacks: Sequence[NewCallback]
    ) -> TaskHandle | DryRun:
        """Submits JSON items. Items that must be split are stored like an uploaded file."""
        options = given.options
        body = items.text if isinstance(items, JsonItems) else items_body(items)
        if len(items) > self._limits.max_rows:
            raise too_many_items(self._limits.max_rows)
        if not options.dry_run and isinstance(items, list) and self._splitter.may_fit(len(items), len(body)):
            rows = self._rows(worker, items, self._unique(worker, options), self._key(worker, options))
            digest = _digest(worker, options, _stored_body(hashlib.sha256(body).hexdigest(), ListSource()), callbacks)
            new = self._new_task(worker, options, digest, callbacks, origin=ITEMS, planned=len(items))
            names = Names("items", {})
            whole = self._gather(new, noted(rows, names), names, strict=bool(options.strict))
            if whole is not None:
                return self._taken(worker, self._group.create(whole), whole)
        return self._submit_stored(worker, self._services.uploads.store_body(body), given, callbacks)

    def _submit_stored(
        self, worker: Worker, stored: StoredFile, given: Submission, callbacks: Sequence[NewCallback]
    ) -> TaskHandle | DryRun:
        kept = False
        try:
            options, source = self._correcting(worker, stored, given.options, given.source)
            source = self._bound(worker, stored, source, options)
            if options.dry_run:
                shape = self._shape(worker, source.columns)
                large = stored.size > INLINE_BYTES and worker.name != MIXED
                marking, alive = given.marking, given.alive
                return self._checker.check(source, worker.name, shape, large=large, marking=marking, alive=alive)
            new = self._new_task(
                worker,
                options,
                _digest(worker, options, _stored_body(stored.sha256, source), callbacks),
                callbacks,
                title=stored.title,
                origin=stored.filename[:255],
                source=source.as_json(),
            )
            first = self._gather_stored(worker, new, stored, source) or First(new)
            made = self._group.create(first)
            kept = made.created
        finally:
            if not kept:
                self._services.uploads.remove(stored.name)
        is_over = not (made.created and first.more) or self._start_split(worker, made.task_id, stored.size, given.wait_s)
        return self._taken(worker, made, first, is_over=is_over)

    # -- building the Task

    def _under_parent(self, options: SubmitOptions) -> SubmitOptions:
        """The options with the ``parent`` of the new Task, by default the Task of the job that submits it here, and with
        the owner of that Task by default. Raises :class:`InputError` for a Task that does not exist."""
        parent, job = options.parent, running_job()
        if parent is None and job is not None and job.task_id is not None:
            with self._ledger.database.read() as connection:  # the job may be one of another application
                parent = job.task_id if children.is_of_task(connection, job.task_id, job.job_id) else None
        if not parent:
            return options if parent is None else options.model_copy(update={"parent": None})
        try:
            with self._ledger.database.read() as connection:
                owner = task_rows.get(connection, parent)["owner"] or None
        except NotFound:
            raise refused_option("parent", "option.parent", {"task": parent}, parent) from None
        owner = owner if options.owner is None and options.resubmit_of is None else options.owner
        return options.model_copy(update={"parent": parent, "owner": owner})

    def _correcting(
        self, worker: Worker, stored: StoredFile, options: SubmitOptions, source: ListSource
    ) -> tuple[SubmitOptions, ListSource]:
        """The options and source of a list that corrects a Task: with that Task's owner, and by default its context and its
        columns.

        Raises :class:`InputError` for another worker or owner, and for a Task that has no rows to correct.
        """
        task_id = options.resubmit_of
        if task_id is None:
            return options, source
        try:
            with self._ledger.database.read() as connection:
                task = task_rows.get(connection, task_id)
        except NotFound:
            raise refused_option("resubmit_of", "option.resubmit_task", {"task": task_id}, task_id) from None
        if task["worker_name"] != worker.name:
            params = {"task": task_id, "worker": task["worker_name"]}
            raise refused_option("resubmit_of", "option.resubmit_worker", params, task_id)
        if options.owner is not None and options.owner != task["owner"]:
            raise refused_option("resubmit_of", "option.resubmit_owner", {"task": task_id}, task_id)
        if task["state_reason"] == Reason.ROWS_REJECTED:
            raise refused_option("resubmit_of", "option.resubmit_strict", {"task": task_id}, task_id)
        columns = source.columns or (loads(task["split_source"]) or {}).get("columns") or {}
        context = task["context"] if options.context is None else options.context
        options = options.model_copy(update={"owner": task["owner"] or None, "context": context})
        return options, replace(source, columns=columns, resubmit_of=task_id)

    def _bound(self, worker: Worker, stored: StoredFile, source: ListSource, options: SubmitOptions) -> ListSource:
        """The source of this list for this worker. Raises :class:`InputError` for a name that is not a field of its
        items."""
        unique = self._unique(worker, options, source.columns)
        return replace(
            source,
            unique=unique,
            key=self._key(worker, options, source.columns),
            strict=bool(options.strict),
            name=stored.name,
            filename=stored.filename,
            items=stored.is_items,
            masked=tuple(sorted(self._shape(worker, source.columns).secret_names)),
        )

    def _new_task(
        self,
        worker: Worker,
        options: SubmitOptions,
        digest: str | None,
        callbacks: Sequence[NewCallback],
        *,
        title: str = "",
        source: dict[str, Any] | None = None,
        **known: Any,
    ) -> NewTask:
        _refuse_whole_lists(options)
        self._check_chunks(worker, options)
        return NewTask(
            worker_name=worker.name,
            queue=worker.queue_for(options.queue),
            priority=worker.priority if options.priority is None else options.priority,
            title=options.title or title,
            owner=options.owner or "",
            throttle=Throttle(
                options.parallel,
                options.interval or 0.0,
                options.tolerated_failures,
                None if options.start_at is None else from_datetime(options.start_at),
                bool(options.paused),
                self._key(worker, options, (source or {}).get("columns")) or worker.key,
            ),
            body_digest=digest,
            options={"retry": worker.max_retries},
            source=source,
            callbacks=callbacks,
            chunk_size=1 if options.chunk_size is None else options.chunk_size,
            context=self._carried(options.context),
            additions=self._additions(worker, options, (source or {}).get("columns")),
            **{name: getattr(options, name) for name in _AS_GIVEN},
            **known,
        )

    def _carried(self, context: str | None) -> str | None:
        """The context of a submission with what the carriers add to it. Raises :class:`InputError` if that is too much."""
        found: dict[str, Any] = {}
        for carrier in self._carriers:
            found |= carrier()
        return context_text({**found, **context_of(context)}) if found else context

    def _additions(self, worker: Worker, options: SubmitOptions, columns: Mapping[str, str] | None) -> str | None:
        """What an open Task keeps for its additions, as JSON text; None for any other."""
        if not options.open:
            return None
        limit_s = options.open_limit_s or additions.DEFAULT_LIMIT_S
        return dumps({"limit_s": limit_s, "unique": list(self._unique(worker, options, columns))})

    # -- adding to an open Task

    def add(
        self,
        worker: Worker,
        task_id: int,
        listed: Sequence[Any] | StoredFile,
        source: ListSource,
        key: str | None,
        who: str,
    ) -> Addition:
        """Validates the items, or the rows of a stored file, and adds them to an open Task in one transaction.

        Raises :class:`Conflict` if the Task takes none; :class:`InputError` for more than :data:`MOST_ADDED` items, for a
        file that is refused as a whole, and for an idempotency key of another addition.
        """
        with self._ledger.database.read() as connection:
            task = task_rows.get(connection, task_id)
        unique = (loads(task["additions"]) or {"unique": ()})["unique"]
        field = None if task["key_field"] in (None, MIXED) else task["key_field"]
        if isinstance(listed, StoredFile):
            said = replace(source, name=listed.name, filename=listed.filename, unique=tuple(unique), key=field)
            with open_list(self._services.uploads, self._limits, said, self._shape(worker, said.columns)) as opened:
                rows = _few(opened.checked())
            body = _stored_body(listed.sha256, said)
        else:
            rows = _few(self._rows(worker, listed, unique, field))
            body = b"" if key is None else _program_body(listed)
        names = Names("items", {})
        for row in rows:
            names.add(row.values)

        def headers(known: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
            if known is None or (new := names.as_json()) is None:
                return None
            both = Names("items", known)
            both.add(dict.fromkeys(new.get("items", ())))
            return None if (found := both.as_json()) is None else {**known, **found}

        new = additions.NewRows(len(rows), partial(_numbered, rows), headers, key, hashlib.sha256(body).hexdigest(), who)
        added = additions.add(self._ledger, task_id, new, max_rows=self._limits.max_rows)
        kept = queries.rejects(self._ledger.database, task_id, after=added.first_row - 1, limit=added.rejected)
        problems = problems_of(kept, self._ledger.catalogue.locale) if added.rejected else ()
        return Addition(added.first_row, added.accepted, added.rejected, problems[:KEPT_PROBLEMS], added.replayed)

    def _check_chunks(self, worker: Worker, options: SubmitOptions) -> None:
        """Raises :class:`InputError` if jobs of several items are not possible."""
        if options.chunk_size in (None, 1):
            return
        why = (
            "jobs for several workers have one item each" if worker.name == MIXED
            else f"{worker.engine} performs jobs of one item" if worker.engine is not None
            else "an iterable goes through many elements in a job of its own" if worker.is_iterable
            else "items that have a key run one by one" if (options.key or worker.key) is not None
            else "corrected rows are taken one by one" if options.resubmit_of is not None
            else self._why_not_in_slices(worker.queue_for(options.queue))
        )  # fmt: skip
        if why is not None:
            problem = Problem(None, "chunk_size", "invalid_option", why, options.chunk_size)
            raise InputError(f"option 'chunk_size': {why}; leave it out", code="invalid_options", errors=[problem])

    def _why_not_in_slices(self, queue: str) -> str | None:
        """Why a queue accepts no slices; None if it does. The declaration of a worker does not contain its language, so
        this depends on the processes that work the queue now. If a process in another language starts later, its first
        record ends the slice in ``error``."""
        with self._ledger.database.read() as connection:
            process = other_language(connection, queue, self._ledger.now())
        return process and f"{process} works the queue {queue!r}, and workers in another language perform jobs of one item"

    def _unique(self, worker: Worker, options: SubmitOptions, columns: Mapping[str, str] | None = None) -> tuple[str, ...]:
        names = worker.unique if options.unique is None else options.unique
        return _fields("unique", names, self._shape(worker, columns))

    def _key(self, worker: Worker, options: SubmitOptions, columns: Mapping[str, str] | None = None) -> str | None:
        """The key field of all items, None without one; mixed jobs may each have that of their worker. Raises
        :class:`InputError` for a name that is not a field."""
        name = options.key or (None if worker.name == MIXED else worker.key)
        return None if name is None else _key_field(name, self._shape(worker, columns))

    def _shape(self, worker: Worker, columns: Mapping[str, str] | None = None) -> ItemShape:
        if not columns and isinstance(worker.shape, ItemShape):
            return worker.shape
        return ItemShape(worker.model, columns, self._limits.max_item_bytes, worker.search)

    def _rows(
        self, worker: Worker, items: Iterable[Any], unique: tuple[str, ...], key: str | None
    ) -> Iterator[NewItem | Rejected]:
        numbered = lambda _after: (RawRow(number, item) for number, item in enumerate(items, 1))  # noqa: E731
        return checked(numbered, self._shape(worker), None, unique, key=key)

    # -- lists that are one slice

    def _gather(self, new: NewTask, rows: Iterable[NewItem | Rejected], names: Names, *, strict: bool) -> First | None:
        """The Task with its whole list; None if the list must be split."""
        begun = self._services.clock.monotonic()
        if begun < self._slow.get(new.worker_name, 0.0):
            return None
        whole = self._splitter.gather(new, rows, names, strict=strict)
        ended = self._services.clock.monotonic()
        if (
            ended - begun > WHOLE_S
        ):  # for example a model that calls a service: the next lists get their response before the validation
            self._slow[new.worker_name] = ended + SLOW_S
        return whole

    def _gather_stored(self, worker: Worker, new: NewTask, stored: StoredFile, source: ListSource) -> First | None:
        # A small workbook may unpack to a large one, so processes that serve requests do not read it.
        # A list that takes rows of another Task is split, because its slices lock that Task.
        if not self._splitter.may_fit(None, stored.size) or is_workbook(stored.path) or source.resubmit_of is not None:
            return None
        shape = self._shape(worker, source.columns)
        try:
            with open_list(self._services.uploads, self._limits, source, shape) as opened:
                rows = opened.planned
                if rows is None:  # checked on the text, so that a list that does not fit is not validated twice
                    rows = stored.path.read_bytes().count(b"\n") - 1
                if not self._splitter.may_fit(rows, None):
                    return None
                names = Names("items" if source.items else "list", {})
                checked_rows = noted(opened.checked(), names) if source.items else opened.checked(0, names)
                return self._gather(replace(new, planned=rows), checked_rows, names, strict=source.strict)
        except InputError:  # the split raises it again, and records it
            return None

    # -- lists that are split elsewhere

    def _start_split(self, worker: Worker, task_id: int, size: int, wait_s: float) -> bool:
        """Starts the split in a thread or in a child process; returns whether it ended within ``wait_s`` seconds."""
        if size <= INLINE_BYTES or not self._split_elsewhere(task_id):
            thread = threading.Thread(target=self.run_split, args=(worker, task_id), name=f"split-{task_id}", daemon=True)
            thread.start()
            thread.join(wait_s)
            return not thread.is_alive()
        clock, pause = self._services.clock, threading.Event()
        until = clock.monotonic() + wait_s
        while clock.monotonic() < until:
            if task_rows.read(self._ledger, task_id).split_state != "splitting":
                return True
            pause.wait(0.05)
        return False

    def run_split(self, worker: Worker, task_id: int, of: str | None = None) -> None:
        """Splits a Task whose split this process holds or may take; does nothing if another process holds it. ``of``: the
        process that hands the split over."""
        task = task_rows.claim_split(self._ledger, task_id, lease_s=self._lease_s, of=of)
        if task is None or task.source is None:
            return
        try:
            self._splitter.split_source(
                task_id,
                ListSource.from_json(task.source),
                lambda columns: self._shape(worker, columns),
                after=task.split_cursor,
                created=task.created,
                chunk_size=task.chunk_size,
                planned=task.planned,
            )
        except SplitLost as lost:
            self._log.info("split_ended", task_id=task_id, reason=lost.reason)
        except AsyncTaskError as error:  # the lease expires and another process resumes it
            self._log.warning("split_put_off", task_id=task_id, error=str(error))
        except Exception as error:
            self._log.exception("split_failed", task_id=task_id)
            why = f"internal_error: {type(error).__name__}"
            task_rows.end_split(self._ledger, task_id, Reason.SPLIT_FAILED, why=why)

    def check_for_parent(self, worker: Worker, kept: Mapping[str, Any], marking: Sequence[str] | None) -> bytes:
        """The response of a child process that checks a list: see :class:`Checker`."""
        source = ListSource.from_json(kept)
        return self._checker.answer(source, self._shape(worker, source.columns), marking)

    # -- responses

    def _taken(self, worker: Worker, made: Made, first: First, *, is_over: bool = True) -> TaskHandle:
        """The handle of a Task; ``is_over``: the list is validated. Raises :class:`InputError` if no row was accepted."""
        if made.created and is_over and not first.items and (error := refusal(self._ledger, made.task_id)) is not None:
            if first.more:
                task_rows.refuse_submission(self._ledger, made.task_id)
            raise error
        return self._handle(worker, made, first, is_over=is_over)

    def _handle(self, worker: Worker, made: Made, first: First, *, is_over: bool) -> TaskHandle:
        if made.row is not None and not first.more:
            problems = problems_of(first.rejects, self._ledger.catalogue.locale)[:KEPT_PROBLEMS]
            progress = first_progress(made.row)
        else:
            problems = kept_problems(self._ledger, made.task_id, KEPT_PROBLEMS) if is_over else ()
            progress = None
        return TaskHandle(
            self._services,
            made.task_id,
            self._shape(worker),
            created=made.created,
            problems=problems,
            first_progress=progress,
        )


def _few(rows: Iterable[NewItem | Rejected]) -> list[NewItem | Rejected]:
    """The rows of an addition. Raises :class:`TooLarge` if they are too many, or too large, for one transaction."""
    taken, size = list[NewItem | Rejected](), 0
    for row in rows:
        taken.append(row)
        size += len(row.params) if isinstance(row, NewItem) else 0
        if len(taken) > MOST_ADDED or size > MAX_ADDED_BYTES:
            raise TooLarge(
                f"an addition has at most {MOST_ADDED:,} items of {MAX_ADDED_BYTES:,} bytes together: add them in parts",
                code="too_many_rows",
            )
    return taken


def _numbered(rows: Iterable[NewItem | Rejected], after: int) -> tuple[list[NewItem], list[Reject]]:
    """The rows of an addition, as items and rejected rows of a Task that has rows up to ``after``."""
    items, rejects = list[NewItem](), list[Reject]()
    for row in rows:
        number = after + row.row
        if isinstance(row, NewItem):
            items.append(replace(row, row=number))
        else:
            rejects.append(Reject(number, [stored(_moved(each, after)) for each in row.problems], row.values))
    return items, rejects


def _moved(problem: Problem, by: int) -> Problem:
    """The problem of a row of an addition; that of a duplicate names another row of it."""
    if problem.code != "duplicate_in_upload":
        return problem
    params = {**problem.params, "first": problem.params["first"] + by}
    return fault(None, problem.column, problem.code, problem.text, params, problem.value)


def _refuse_whole_lists(options: SubmitOptions) -> None:
    """Raises :class:`InputError` if an open Task has an option that needs the whole list, or a limit without being open."""
    if not options.open and options.open_limit_s is not None:
        raise refused_option("open_limit_s", "option.only_open", {}, options.open_limit_s)
    chunk_size = None if options.chunk_size == 1 else options.chunk_size
    whole = {"strict": options.strict or None, "resubmit_of": options.resubmit_of, "chunk_size": chunk_size}
    for name, value in whole.items():
        if options.open and value is not None:
            raise refused_option(name, "option.not_open", {"name": name}, value)


def _refuse_items(options: SubmitOptions) -> None:
    """Raises :class:`InputError` if a list that is not a file corrects a Task: its items have no row numbers."""
    if options.resubmit_of is not None:
        raise refused_option("resubmit_of", "option.resubmit_items", {}, options.resubmit_of)


def _fields(option: str, names: Sequence[str], shape: ItemShape) -> tuple[str, ...]:
    """The fields that an option names. Raises :class:`InputError` for a name that is not a field of the item."""
    found: dict[str, None] = {}
    for name in names:
        field = shape.field_of(name)
        if field is None:
            params = {"name": repr(name[:80]), "fields": ", ".join(shape.field_names)}
            raise refused_option(option, "option.unique", params, name[:200])
        found[field] = None
    return tuple(found)


def check_fields(worker: Worker) -> None:
    """Raises :class:`InputError` if a worker's own ``unique`` or ``key`` contains a name that is not a field of its
    items."""
    if isinstance(worker.shape, ItemShape) and worker.shape.unfit is not None and worker.engine is None:
        raise InputError(worker.shape.unfit, code="unfit_model")
    if worker.key is not None and not 0 < len(worker.key) <= MAX_KEY:
        raise InputError(f"key must be the name of a field, of at most {MAX_KEY} characters")
    if isinstance(worker.shape, ItemShape):
        _fields("unique", worker.unique, worker.shape)
        worker.shape.check_search()
        if worker.key is not None:
            _key_field(worker.key, worker.shape)


def _key_field(name: str, shape: ItemShape) -> str:
    """The field of a key. Raises :class:`InputError` for a secret, because keys are shown to people."""
    (field,) = _fields("key", [name], shape)
    if field in shape.secrets:
        raise refused_option("key", "option.secret_key", {"name": repr(name[:80])}, name[:200])
    return field


def _digest(worker: Worker, options: SubmitOptions, body: bytes, callbacks: Sequence[NewCallback]) -> str:
    """The digest of the worker, the options and the list, which an Idempotency-Key identifies. It must stay the same across
    versions."""
    said: dict[str, Any] = {
        "worker": worker.name, "title": options.title or "", "parallel": options.parallel, "priority": options.priority,
        "queue": options.queue, "owner": options.owner or "", "session": options.session,
    }  # fmt: skip
    later = {
        "interval": options.interval or None,
        "tolerated_failures": options.tolerated_failures,
        "start_at": None if options.start_at is None else from_datetime(options.start_at),
        "paused": options.paused or None,
        "unique": None if options.unique is None else list(options.unique),
        "strict": options.strict or None,
        "key": options.key,
        "resubmit_of": options.resubmit_of,
        "chunk_size": None if options.chunk_size == 1 else options.chunk_size,
        "context": options.context,
        "open": options.open or None,
        "open_limit_s": options.open_limit_s,
    }
    said |= {name: value for name, value in later.items() if value is not None}
    for name in CALLBACKS:
        if given := [[each.worker, *each.args] for each in getattr(options, name)]:
            said[name] = given if len(given) > 1 else given[0]
    for each in callbacks:
        if each.name == MERGE:  # the id of an export is new each time
            said["export"] = [each.args[0]["format"], each.args[0]["columns"]]
    return hashlib.sha256(dumps(said).encode() + b"\0" + body).hexdigest()


def _stored_body(sha256: str, source: ListSource) -> bytes:
    """The body for :func:`_digest` of a stored list and the options for reading it."""
    said = f"{sha256}:{source.sheet}:{sorted(source.columns.items())}"
    said = said if source.encoding is None else f"{said}:{source.encoding}"
    return (said if source.header_row is None else f"{said}:header_row={source.header_row}").encode()


def _program_body(items: Sequence[Any]) -> bytes:
    """The body for :func:`_digest` of a program's items. Invalid items are refused later, with their row."""
    try:
        return orjson.dumps(items, default=_said)
    except TypeError:  # a number of more than 64 bits, a lone surrogate
        try:
            return json.dumps(items, default=_said).encode()
        except (TypeError, ValueError) as error:
            raise InputError(f"the items cannot be kept as JSON: {error}", code="not_json") from error


def _said(value: Any) -> Any:
    """A value that JSON lacks, in a form that is the same in every process: its fields, the secret itself, or its text."""
    try:
        return secret_json(value)
    except (TypeError, ValueError):
        return str(value)
