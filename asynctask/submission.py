"""Submitting: what a list may say of itself, and what becomes of it in its first second."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from asynctask.errors import AsyncTaskError, Conflict, InputError, Problem
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import dumps, loads
from asynctask.ledger.progress import first_progress
from asynctask.ledger.tasks import GroupSubmit, NewTask, NewWhole, SplitLost, Whole
from asynctask.lists.dry_run import Checker, DryRun, check_rows
from asynctask.lists.items import Accepted, ItemShape, Refused
from asynctask.lists.problems import fault, kept_problems, refusal
from asynctask.lists.readers import RawRow
from asynctask.lists.rows import all_good, checked, encoding_option, open_list
from asynctask.lists.split import WHOLE_S, Splitter, Tally, WholeList
from asynctask.lists.uploads import ITEMS, StoredFile, is_workbook, items_body
from asynctask.logs import get_logger
from asynctask.messages import is_storable
from asynctask.task import Services, TaskHandle
from asynctask.worker import Worker

if TYPE_CHECKING:
    from asynctask.lists.options import Options

__all__ = ["INLINE_BYTES", "Submission", "Submitter", "check_unique"]

INLINE_BYTES = 1_000_000
"""Lists up to this size are split in a thread of the process that took them, larger ones in a child process."""

KEPT_PROBLEMS = 1_000

SLOW_S = 60.0
"""For so long after a list whose validation took its time, lists of that worker are validated beside their answer."""


@dataclass(frozen=True, slots=True)
class Submission:
    """What became of a list: its Task; whether it was made now (False: the same Idempotency-Key and list before); the
    problems of refused rows, None while the validation goes on."""

    task: TaskHandle
    created: bool
    problems: tuple[Problem, ...] | None
    progress: dict[str, Any] | None = None
    """The progress object where it is known without being asked for: nothing has happened to the Task yet."""


def unique_fields(names: Sequence[str], shape: ItemShape) -> tuple[str, ...]:
    """The fields that the ``names`` in ``unique`` mean.

    Raises :class:`InputError` for a name that is no field of the item.
    """
    found: dict[str, None] = {}
    for name in names:
        field = shape.field_of(name)
        if field is None:
            params = {"name": repr(name[:80]), "fields": ", ".join(shape.field_names)}
            problem = fault(None, "unique", "invalid_option", "option.unique", params, name[:200])
            raise InputError(f"option 'unique': {problem.message}", code="invalid_options", errors=[problem])
        found[field] = None
    return tuple(found)


def check_unique(worker: Worker) -> None:
    """Raises :class:`InputError` where a worker's own ``unique`` names what is no field of its items."""
    if isinstance(worker.shape, ItemShape):
        unique_fields(worker.unique, worker.shape)


class Submitter:
    """Takes lists. ``split_elsewhere`` splits a Task in another process, or returns False where it cannot."""

    def __init__(
        self,
        services: Services,
        splitter: Splitter,
        *,
        lease_s: float,
        split_elsewhere: Callable[[int], bool],
        checker: Checker,
    ) -> None:
        self._services = services
        self._ledger = services.ledger
        self._splitter = splitter
        self._lease_s = lease_s
        self._split_elsewhere = split_elsewhere
        self._checker = checker
        self._limits = services.limits
        self._group = GroupSubmit(services.ledger)
        self._slow: dict[str, float] = {}  # workers whose validation is slow, and until when that is believed
        self._log = get_logger("asynctask.submit")

    # -- items of a program

    def submit(self, worker: Worker, items: Iterable[Any], given: Mapping[str, Any]) -> TaskHandle | DryRun:
        """Splits items in the caller's thread; jobs of the first slices run meanwhile. A dry run writes nothing.

        A strict list is gone through before anything of it is written: what its rows say waits in a temporary file.
        """
        options = _checked(given)
        shape = self._shape(worker)
        unique = unique_fields(_unique(worker, options), shape)
        digest = None
        if options.idempotency_key is not None and not options.dry_run:
            items = list(items)  # a key stands for the list as a whole
            digest = _digest(worker, options, _body(items))
        planned = _length(items)

        def rows() -> Iterator[Accepted | Refused]:
            return checked(lambda after: (RawRow(i, item) for i, item in enumerate(items, after + 1)), shape, None, unique)

        if options.dry_run:
            return replace(check_rows(rows(), self._limits.max_rows), strict=options.strict)
        if isinstance(items, Collection) and self._splitter.may_fit(len(items), None):
            whole = self._gather(worker, rows, strict=options.strict)
            if whole is not None and not whole.refused:
                made = self._write_whole(self._new(worker, options, digest=digest), whole)
                if not made.created and (reason := self._broken(made.task_id)) is not None:
                    raise _broke_off(made.task_id, reason)
                return self._handle(worker, made.task_id)
        if not options.strict:
            return self._hand_in(worker, options, rows(), digest, planned)
        with all_good(rows(), self._limits.max_rows) as (total, good):
            return self._hand_in(worker, options, good, digest, total)

    def _hand_in(
        self,
        worker: Worker,
        options: Options,
        rows: Iterable[Accepted | Refused],
        digest: str | None,
        planned: int | None,
    ) -> TaskHandle:
        task_id, created = task_rows.create(
            self._ledger, self._new(worker, options, digest=digest, planned=planned), lease_s=self._lease_s
        )
        if created:
            try:
                self._splitter.split_items(task_id, rows)
            except SplitLost as lost:
                if lost.reason != "cancelled":  # items were left over: a caller who is not told would think them safe
                    raise Conflict(
                        f"Task {task_id} did not take every item: {lost.reason}; hand in the rest anew"
                    ) from lost
                self._log.info("split_ended", task_id=task_id, reason=lost.reason)
            self._services.dispatch_now()
        elif (reason := self._broken(task_id)) is not None:
            raise _broke_off(task_id, reason)
        return self._handle(worker, task_id)

    def _broken(self, task_id: int) -> str | None:
        with self._ledger.database.read() as connection:
            task = task_rows.get(connection, task_id)
        return str(task["split_reason"]) if task["split_state"] == "failed" else None

    # -- lists that fit one slice

    def _gather(
        self, worker: Worker, rows: Callable[[], Iterable[Accepted | Refused]], *, strict: bool
    ) -> WholeList | None:
        """A list that may be written with its Task; None where it has to be split."""
        begun = self._services.clock.monotonic()
        if begun < self._slow.get(worker.name, 0.0):
            return None
        whole = self._splitter.gather(rows(), strict=strict)
        ended = self._services.clock.monotonic()
        if ended - begun > WHOLE_S:  # a model that asks others, say: the next ones are validated while their answer waits
            self._slow[worker.name] = ended + SLOW_S
        return whole

    def _write_whole(self, new: NewTask, whole: WholeList) -> Whole:
        """One transaction, after which the Task is there with all its items, or nothing of it is."""
        mine = self._services.dispatcher.soon
        made = self._group.create(
            NewWhole(
                new, whole.items, whole.rejects, whole.total, whole.cursor, refused=whole.refused, tell=not mine
            )
        )  # fmt: skip
        if mine and made.created and whole.items:
            self._services.dispatch_soon()
        return made

    def _answer_whole(self, worker: Worker, made: Whole, whole: WholeList) -> Submission:
        handle = self._handle(worker, made.task_id)
        if made.row is None:
            return Submission(handle, False, self._problems(made.task_id))
        if (error := refusal(self._ledger, made.task_id) if not whole.items else None) is not None:
            raise error
        known = None if made.row["session"] is not None else first_progress(made.row)
        return Submission(handle, True, tuple(whole.problems), known)

    def submit_items(
        self, worker: Worker, items: Sequence[Any], given: Mapping[str, Any], *, wait_s: float = 1.0
    ) -> Submission:
        """Makes a Task of JSON items, as :meth:`submit_stored` does; only those that have to be split are stored."""
        body = items_body(items)
        options = _checked(given)
        if not options.dry_run and isinstance(items, list) and self._splitter.may_fit(len(items), len(body)):
            shape = self._shape(worker)
            unique = unique_fields(_unique(worker, options), shape)
            whole = self._gather(
                worker,
                lambda: checked(lambda after: (RawRow(i, item) for i, item in enumerate(items, 1)), shape, None, unique),
                strict=options.strict,
            )
            if whole is not None:
                digest = None
                if options.idempotency_key is not None:
                    digest = _digest(worker, options, _told(hashlib.sha256(body).hexdigest(), None, None, None))
                made = self._write_whole(self._new(worker, options, digest=digest, origin=ITEMS), whole)
                return self._answer_whole(worker, made, whole)
        return self.submit_stored(worker, self._services.uploads.store_body(body), given, wait_s=wait_s)

    # -- stored lists

    def submit_stored(
        self,
        worker: Worker,
        stored: StoredFile,
        given: Mapping[str, Any],
        *,
        sheet: str | None = None,
        columns: Mapping[str, str] | None = None,
        encoding: str | None = None,
        wait_s: float = 1.0,
        check: Callable[[StoredFile], None] = lambda stored: None,
    ) -> Submission:
        """Makes a Task of a stored list and waits up to ``wait_s`` seconds for its validation.

        Raises :class:`InputError` with every problem where the list as a whole cannot be taken, or no row of it.
        """
        kept = False
        try:
            options = _checked(given)
            if options.dry_run:
                raise InputError("a stored list is dry-run by check_file, which answers what it would come to")
            source = self._source(worker, stored, options, sheet, columns, encoding)
            check(stored)
            digest = _digest(worker, options, _told(stored.sha256, sheet, columns, source.get("encoding")))
            name = stored.filename[:255]
            title = options.title or (name if stored.named else "")
            new = self._new(worker, options, digest=digest, source=source, origin=name, title=title)
            whole = self._gather_stored(worker, stored, source, strict=options.strict)
            if whole is not None:
                made = self._write_whole(new, whole)
                kept = made.created
                return self._answer_whole(worker, made, whole)
            task_id, created = task_rows.create(self._ledger, new, lease_s=self._lease_s)
            kept = created
        finally:
            if not kept:
                self._services.uploads.discard(stored)
        if not created:
            return Submission(self._handle(worker, task_id), False, self._problems(task_id))
        ended = self._start_split(worker, task_id, stored.size, wait_s)
        if not ended:
            return Submission(self._handle(worker, task_id), True, None)
        return self._answer(worker, task_id)

    def _gather_stored(
        self, worker: Worker, stored: StoredFile, source: Mapping[str, Any], *, strict: bool
    ) -> WholeList | None:
        # A small workbook may unpack to a large one, and is read by nobody who answers others.
        if not self._splitter.may_fit(None, stored.size) or is_workbook(stored.path):
            return None

        shape = self._shape(worker, source["columns"])
        try:
            with open_list(self._services.uploads, self._limits, source, shape) as opened:
                rows = opened.planned
                if rows is None:  # of text: a list that is not taken here should not be gone through for nothing
                    rows = stored.path.read_bytes().count(b"\n") - 1
                if not self._splitter.may_fit(rows, None):
                    return None
                unique = source.get("unique") or ()
                return self._gather(worker, lambda: opened.checked(unique=unique), strict=strict)
        except InputError:  # the split meets it again, and keeps what it says
            return None

    def check_stored(
        self,
        worker: Worker,
        stored: StoredFile,
        given: Mapping[str, Any],
        *,
        sheet: str | None = None,
        columns: Mapping[str, str] | None = None,
        encoding: str | None = None,
    ) -> DryRun:
        """What a stored list would come to. Nothing is written, and the list is removed.

        Raises :class:`InputError` where the list as a whole could not be taken, :class:`Unavailable` where it takes longer
        than ``dry_run_s``.
        """
        try:
            options = _checked(given)
            source = self._source(worker, stored, options, sheet, columns, encoding)
            shape = self._shape(worker, columns)
            found = self._checker.check(source, worker.name, shape, large=stored.size > INLINE_BYTES)
            return replace(found, strict=options.strict)
        finally:
            self._services.uploads.discard(stored)

    def check_for_parent(self, worker: Worker, source: Mapping[str, Any]) -> bytes:
        """What a child answers that was started to check a list: see :class:`Checker`."""
        return self._checker.answer(source, self._shape(worker, source.get("columns")))

    def _source(
        self,
        worker: Worker,
        stored: StoredFile,
        options: Options,
        sheet: str | None,
        columns: Mapping[str, str] | None,
        encoding: str | None,
    ) -> dict[str, Any]:
        """What is kept of a stored list, so that any process can split it. Raises :class:`InputError`."""
        for name, text in [
            ("sheet", sheet or ""),
            *(("columns", text) for pair in (columns or {}).items() for text in pair),
        ]:
            if not is_storable(text):
                raise InputError(f"{name}: {text[:100]!r} holds a NUL or half a character (a lone surrogate): take it out")
        shape = self._shape(worker, columns)  # a column that maps to no field is found before anything is written
        source: dict[str, Any] = {
            "name": stored.name, "filename": stored.filename, "sheet": sheet, "columns": dict(columns or {}),
            "items": stored.is_items,
        }  # fmt: skip
        if unique := unique_fields(_unique(worker, options), shape):
            source["unique"] = list(unique)
        if encoding is not None:
            source["encoding"] = encoding_option(encoding)
        if options.strict:
            source["strict"] = True
        return source

    def _start_split(self, worker: Worker, task_id: int, size: int, wait_s: float) -> bool:
        if size <= INLINE_BYTES or not self._split_elsewhere(task_id):
            thread = threading.Thread(target=self.take_up, args=(worker, task_id), name=f"split-{task_id}", daemon=True)
            thread.start()
            thread.join(wait_s)
            return not thread.is_alive()
        clock, pause = self._services.clock, threading.Event()
        until = clock.monotonic() + wait_s
        while clock.monotonic() < until:
            if self._split_state(task_id) != "splitting":
                return True
            pause.wait(0.05)
        return False

    def _split_state(self, task_id: int) -> str:
        with self._ledger.database.read() as connection:
            return str(task_rows.get(connection, task_id)["split_state"])

    def take_up(self, worker: Worker, task_id: int, of: str | None = None) -> Tally | None:
        """Splits a Task whose split this process holds or may take. None where somebody else has it."""
        task = task_rows.claim_split(self._ledger, task_id, lease_s=self._lease_s, of=of)
        if task is None or task["split_source"] is None:
            return None
        try:
            return self._splitter.split_source(
                task_id, loads(task["split_source"]), lambda columns: self._shape(worker, columns),
                after=task["split_cursor"], created=task["created_jobs"],
            )  # fmt: skip
        except SplitLost as lost:
            self._log.info("split_ended", task_id=task_id, reason=lost.reason)
        except AsyncTaskError as error:  # the lease runs out and somebody takes it up again
            self._log.warning("split_put_off", task_id=task_id, error=str(error))
        except Exception as error:
            self._log.exception("split_failed", task_id=task_id)
            task_rows.fail_split(self._ledger, task_id, f"internal_error: {type(error).__name__}")
        return None

    def _answer(self, worker: Worker, task_id: int) -> Submission:
        self._services.dispatch_now()
        error = refusal(self._ledger, task_id)
        if error is not None:
            task_rows.refuse_submission(self._ledger, task_id)
            raise error
        return Submission(self._handle(worker, task_id), True, self._problems(task_id))

    def _problems(self, task_id: int) -> tuple[Problem, ...]:
        return kept_problems(self._ledger, task_id, KEPT_PROBLEMS)

    def _new(self, worker: Worker, options: Options, **more: Any) -> NewTask:
        return NewTask(
            worker_name=worker.name,
            queue=options.queue or worker.queue,
            priority=worker.priority if options.priority is None else options.priority,
            title=more.pop("title", options.title),
            owner=options.owner,
            session=options.session,
            parallel=options.parallel,
            idempotency_key=options.idempotency_key,
            body_digest=more.pop("digest"),
            options={"retry": worker.max_retries},
            **more,
        )

    def _handle(self, worker: Worker, task_id: int) -> TaskHandle:
        return TaskHandle(self._services, task_id, self._shape(worker))

    def _shape(self, worker: Worker, columns: Mapping[str, str] | None = None) -> ItemShape:
        if not columns and isinstance(worker.shape, ItemShape):
            return worker.shape
        return ItemShape(worker.model, columns, self._limits.max_item_bytes)


def _checked(given: Mapping[str, Any]) -> Options:
    from asynctask.lists.options import check_options  # a worker process takes no list, and need not load pydantic

    return check_options(given)


def _unique(worker: Worker, options: Options) -> tuple[str, ...]:
    return worker.unique if options.unique is None else options.unique


def _digest(worker: Worker, options: Options, body: bytes) -> str:
    """What an Idempotency-Key stands for: the worker, the options and the list itself."""
    silent = [name for name, nothing in (("unique", None), ("strict", False)) if getattr(options, name) == nothing]
    told = options.model_dump(exclude={"idempotency_key", "dry_run", *silent}, mode="json")
    said = dumps({"worker": worker.name, **told})
    return hashlib.sha256(said.encode() + b"\0" + body).hexdigest()


def _told(sha256: str, sheet: str | None, columns: Mapping[str, str] | None, encoding: str | None) -> bytes:
    """What a stored list says, and how it is to be read."""
    said = f"{sha256}:{sheet}:{sorted((columns or {}).items())}"
    return (said if encoding is None else f"{said}:{encoding}").encode()  # keys of an earlier version stay what they were


def _broke_off(task_id: int, reason: str) -> Conflict:
    return Conflict(f"this key was used for Task {task_id}, which broke off ({reason}); use a new key")


def _body(items: Sequence[Any]) -> bytes:
    """A program's items as bytes. Also of what is no item: it is refused row by row later, with its row."""
    try:
        return orjson.dumps(items, default=_said)
    except TypeError:  # a number of more than 64 bits, half a character
        try:
            return json.dumps(items, default=_said).encode()
        except (TypeError, ValueError) as error:
            raise InputError(f"the items cannot be kept as JSON: {error}", code="not_json") from error


def _said(value: Any) -> Any:
    """What an item says, the same in every process: its fields, or its text."""
    dump = getattr(value, "model_dump", None)
    return dump(mode="json") if callable(dump) else str(value)


def _length(items: Iterable[Any]) -> int | None:
    try:
        return len(items)  # type: ignore[arg-type]
    except TypeError:
        return None
