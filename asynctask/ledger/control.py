"""Control of a Task: pause, resume, cancel, retry, and its knobs. No function here needs a running worker."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.clock import from_datetime, rfc3339
from asynctask.core.states import GROWING, OPEN, Reason, State, Status
from asynctask.core.transitions import Transition, at_rest, cancel, explicit_retry
from asynctask.database.notify import notify
from asynctask.database.retrying import repeatable
from asynctask.database.tables import as_dict, events, item_errors, loans, task_errors, tasks
from asynctask.errors import Conflict, InputError
from asynctask.iterable import indexes_of
from asynctask.ledger import children, corrections, hints, lending, progress
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, chunks, dumps, loads, try_lock
from asynctask.ledger.events import IN_LOAN, UNHELD, Change, EventRecord, Note, apply, read_events, rows_of, with_ended_rows
from asynctask.messages import is_storable

_t, _e, _x, _g, _l = tasks.c, events.c, item_errors.c, task_errors.c, loans.c
SLICE = 10_000
"""Largest number of rows that one transaction updates; fewer on SQLite, where it holds the only write lock."""

_SQLITE_SLICE = 500
"""Largest number of rows that one transaction updates on SQLite."""

_ENDED = ("failed", "error", "cancelled")
_COLUMNS = {"interval": "interval_s"}
"""Columns of knobs whose name differs."""


@repeatable
def pause(ledger: Ledger, task_id: int, *, who: str = "") -> bool:
    """Pauses a Task: no job starts until it is resumed; running jobs continue. Idempotent; returns whether it was changed.

    Raises :class:`Conflict` if the Task has ended.
    """
    with ledger.database.write() as connection:
        task = task_rows.lock(connection, task_id)
        if task["state"] == State.PAUSED:
            return False
        if task["state"] not in (State.SPLITTING, State.RUNNING):
            raise Conflict(f"Task {task_id} is {task['state']}; only a splitting or running Task can be paused")
        _pause(connection, ledger, task, None, None, who)
    return True


def _pause(
    connection: Connection, ledger: Ledger, task: dict[str, Any], why: str | None, detail: dict[str, Any] | None, who: str
) -> None:
    down = _down(task, "pause")
    task_rows.change_state(connection, ledger, task, State.PAUSED, Reason.PAUSED, state_reason=why, **down)
    task_rows.log(connection, ledger, task["id"], "paused", detail, who)


@repeatable
def resume(ledger: Ledger, task_id: int, *, who: str = "") -> bool:
    """Resumes a paused Task, which starts jobs again. Idempotent; returns whether it was changed.

    Raises :class:`Conflict` if the Task has ended, or if more items failed than it tolerates: it would pause itself again.
    """
    with ledger.database.write() as connection:
        task = task_rows.lock(connection, task_id)
        if task["state"] in (State.SPLITTING, State.RUNNING):
            return False
        if task["state"] != State.PAUSED:
            raise Conflict(f"Task {task_id} is {task['state']}; only a paused Task can be resumed")
        left = task_rows.tolerated_left(connection, task)
        if left is not None and left < 0:
            raise Conflict(
                f"more items of Task {task_id} failed than its tolerated_failures ({task['tolerated_failures']}) allows;"
                " raise that, or set no limit (null; on the command line, none), and the Task goes on; or retry the items"
            )
        _resume(connection, ledger, task, None, who)
    return True


def _resume(connection: Connection, ledger: Ledger, task: dict[str, Any], detail: dict[str, Any] | None, who: str) -> None:
    state = State.SPLITTING if task["split_state"] in GROWING else State.RUNNING
    down = _down(task, "resume")
    task_rows.change_state(connection, ledger, task, state, Reason.RESUMED, state_reason=None, **down)
    progress.measure_anew(connection, task["id"], ledger.now())
    task_rows.log(connection, ledger, task["id"], "resumed", detail, who)


@repeatable
def cancel_task(ledger: Ledger, task_id: int, *, who: str = "") -> bool:
    """Cancels a Task: its state changes at once, so no job starts; :func:`change_rows` cancels its rows afterwards.

    Idempotent; raises :class:`Conflict` if the Task is finished, finalizing or rejected.
    """
    with ledger.database.write() as connection:
        task = task_rows.lock(connection, task_id)
        if task["state"] == State.CANCELLED:
            return False
        if task["state"] not in (State.SPLITTING, State.RUNNING, State.PAUSED):
            raise Conflict(f"Task {task_id} is {task['state']} already; there is nothing left to cancel")
        _cancel(connection, ledger, task, None, who)
    return True


def _cancel(connection: Connection, ledger: Ledger, task: dict[str, Any], detail: dict[str, Any] | None, who: str) -> None:
    values: dict[str, Any] = {"turning": "cancel", "turn_cursor": -1, "state_reason": None, "generation_sealed": 1}
    if task["split_state"] in GROWING:
        values |= {"split_state": "cancelled", "split_by": None, "split_until": None}
    values |= _down(task, "cancel")
    task_rows.change_state(connection, ledger, task, State.CANCELLED, Reason.CANCELLED, **values)
    task_rows.log(connection, ledger, task["id"], "cancelled", detail, who)


@repeatable
def retry(
    ledger: Ledger,
    task_id: int,
    statuses: Collection[str] = (),
    *,
    message: str | None = None,
    limit: int | None = None,
    only_rows: Collection[int] | None = None,
    who: str = "",
) -> bool:
    """Opens a new generation that runs the selected terminal rows again; :func:`change_rows` reopens them afterwards. Of a
    slice, only the selected items run again.

    ``statuses``: some of ``failed``, ``error``, ``cancelled``; default the first two. ``message``: only failures of
    its groups; ``limit``: at most this many rows, in the order of the list; ``only_rows``: only rows with these numbers.
    Leaves out rows that a corrected list took. Returns False if there is no such row. Raises :class:`Conflict` if the
    state forbids it or all such rows were taken, :class:`InputError` for a status that cannot be retried or a bad limit.
    """
    chosen = tuple(statuses) or (str(Status.FAILED), str(Status.ERROR))
    wrong = set(chosen) - {Status.FAILED, Status.ERROR, Status.CANCELLED}
    if wrong:
        raise InputError(f"cannot retry items that are {', '.join(sorted(wrong))}; choose of failed, error, cancelled")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise InputError(f"limit must be a number of rows, at least 1, not {limit!r}", code="invalid_option")
    with ledger.database.write() as connection:
        task = task_rows.lock(connection, task_id)
        task_rows.check_reopenable(task)  # raises Conflict even if there is no such row
        digests = None if message is None else _groups_with(connection, task_id, message)
        rows = None if only_rows is None else sorted(only_rows)
        only = {"digests": digests, "left": limit, "rows": rows}
        taken = corrections.count_taken(connection, task_id)
        if connection.execute(_to_reopen(task_id, chosen, only, but_taken=taken > 0).limit(1)).first() is None:
            if taken and connection.execute(_to_reopen(task_id, chosen, only).limit(1)).first() is not None:
                raise Conflict(f"the rows of Task {task_id} to retry were corrected and sent again: retry those Tasks")
            return False
        turning = {"turning": "retry", "turn_statuses": ",".join(chosen), "turn_cursor": -1, "turn_chosen": dumps(only)}
        task_rows.open_generation(connection, ledger, task, generation_sealed=0, going_down=None, **turning)
        said = {"statuses": list(chosen), "message": message, "limit": limit, "rows": rows, "sent_again": taken or None}
        detail = {name: value for name, value in said.items() if value is not None}
        task_rows.log(connection, ledger, task_id, "retried", detail, who)
    return True


def _groups_with(connection: Connection, task_id: int, message: str) -> list[str]:
    """The digests of the Task's failure groups that show this message, or to whose template it belongs."""
    if not is_storable(message):
        return []
    shows = (_g.message == message) | _g.digest.in_(progress.groups_of(message))
    found = sa.select(_g.digest).where(_g.task_id == task_id, shows).distinct().order_by(_g.digest)
    return [str(digest) for (digest,) in connection.execute(found)]


def _to_reopen(
    task_id: int,
    statuses: Collection[str],
    only: Mapping[str, Any],
    after: int = -1,
    *,
    but_taken: bool = False,
) -> Any:
    """A query for the next slice of jobs to reopen, as (id, seq, number of items), in their order: those with an item that
    a retry selects (``only``: as ``turn_chosen``). ``but_taken``: without jobs whose only item a corrected list took."""
    has_one = sa.or_(sa.false(), *(_e[f"n_{status}"] > 0 for status in statuses if status in _ENDED))
    of_slice = (_e["items"] > 1) & _e.status.in_(_ENDED) & has_one
    found = sa.select(_e.id, _e.seq, _e["items"]).where(_e.task_id == task_id, _e.seq > after).order_by(_e.seq)
    found = found.where(_e.status.in_(statuses) | of_slice if set(statuses) & set(_ENDED) else _e.status.in_(statuses))
    if but_taken:
        found = found.where((_e["items"] > 1) | corrections.not_taken(task_id))
    if (rows := only.get("rows")) is not None:
        found = found.where(with_ended_rows(rows, statuses))
    if (digests := only["digests"]) is not None:
        found = found.where(sa.exists().where(_x.event_id == _e.id, _x.digest.in_(digests), _x.status.in_(statuses)))
    return found


@repeatable
def update(ledger: Ledger, task_id: int, changes: dict[str, Any], *, who: str = "") -> dict[str, Any]:
    """Sets knobs, as :func:`asynctask.lists.options.checked_knobs` returns them. Returns the Task's columns before the
    change. Resumes a Task that paused itself if its failures are tolerated now.

    Raises :class:`Conflict` if the Task has ended, and for the start time of one that has started.
    """
    values = {_COLUMNS.get(name, name): value for name, value in changes.items()}
    if (start := changes.get("start_at")) is not None:
        values["start_at"] = from_datetime(start)
    with ledger.database.write() as connection:
        task = task_rows.lock(connection, task_id)
        if task["finished_at"] is not None and set(values) != {"title"}:
            raise Conflict(f"Task {task_id} is {task['state']}; its knobs do nothing any more")
        if "start_at" in values and task["started_at"] is not None:
            raise Conflict(f"Task {task_id} has started: to hold the rest of it, pause it")
        _update(connection, ledger, task, changes, values, {}, who)
    return task


def _update(
    connection: Connection,
    ledger: Ledger,
    task: dict[str, Any],
    changes: Mapping[str, Any],
    values: Mapping[str, Any],
    detail: Mapping[str, Any],
    who: str,
) -> None:
    moved = {**values, "updated_at": ledger.now(), **(_down(task, "priority") if "priority" in values else {})}
    if task["session_waits"] is not None and "priority" in values:
        moved["session_waits"] = values["priority"]
    now = {**task, **moved}
    if task["finished_at"] is None:
        hints.settle(connection, ledger, now, **moved, version=_t.version + 1)
    else:
        connection.execute(tasks.update().where(_t.id == task["id"]).values(**moved, version=_t.version + 1))
    if task["finished_at"] is None and {"parallel", "interval_s"} & set(values):
        progress.measure_anew(connection, task["id"], ledger.now())
    if task["finished_at"] is None and {"parallel", "interval_s", "priority", "start_at"} & set(values):
        notify(connection)
    both = {name: [task[_COLUMNS.get(name, name)], value] for name, value in changes.items()}  # old and new value
    if "start_at" in both:
        both["start_at"] = [rfc3339(task["start_at"]), rfc3339(values["start_at"])]
    task_rows.log(connection, ledger, task["id"], "changed", {**both, **detail}, who)
    paused_itself = task["state"] == State.PAUSED and task["state_reason"] == Reason.TOO_MANY_FAILURES
    if paused_itself and "tolerated_failures" in values:
        left = task_rows.tolerated_left(connection, now)
        if left is None or left >= 0:
            _resume(connection, ledger, now, {"tolerated_failures": now["tolerated_failures"]}, who)


# -- what goes down to the Tasks below a Task: the last pause, resume or cancel, and the priority
#
# ``tasks.going_down`` names it, in the transaction that acts on the Task itself; whoever does it next finds it there.

_AT_ONCE: Final = 100
"""Most Tasks to which one transaction hands an act down."""

_ACTIVE: Final = tuple(str(state) for state in (State.SPLITTING, State.RUNNING, State.PAUSED))


def _down(task: Mapping[str, Any], act: str) -> dict[str, str]:
    """The column of a Task that hands this act down. A later pause, resume or cancel replaces an earlier one."""
    if not task["children"]:
        return {}
    others = [each for each in (task["going_down"] or "").split() if (each == "priority") != (act == "priority")]
    return {"going_down": " ".join([*others, act])}


def handing_down(connection: Connection) -> list[int]:
    """The ids of Tasks with an act that goes down still."""
    found = sa.select(_t.id).where(_t.finished_at.is_(None), _t.going_down.is_not(None)).order_by(_t.id)
    return [int(i) for (i,) in connection.execute(found)]


@repeatable
def hand_down(ledger: Ledger, task_id: int) -> list[dict[str, Any]] | None:
    """Hands the acts of a Task down to the next of its children that they concern; returns these (their columns), None at
    the end. Any process may call it at any time: a child that an act was handed down to is no longer concerned."""
    with ledger.database.read() as connection:
        if not task_rows.get(connection, task_id)["going_down"]:
            return None
    with ledger.database.write() as connection:
        task = task_rows.lock(connection, task_id)  # before its children, whose ids are larger
        for act in (task["going_down"] or "").split():
            concerned = (
                {
                    "cancel": _t.state.in_(_ACTIVE),
                    "pause": _t.state.in_(_ACTIVE) & (_t.state != str(State.PAUSED)),
                    "resume": (_t.state == str(State.PAUSED)) & (_t.state_reason == children.HELD),
                    "priority": _t.priority != task["priority"],
                }[act]
                & (_t.parent == task_id)
                & _t.finished_at.is_(None)
            )
            ids = connection.scalars(sa.select(_t.id).where(concerned).order_by(_t.id).limit(_AT_ONCE)).all()
            locked = sa.select(tasks).where(_t.id.in_(ids), concerned).order_by(_t.id).with_for_update()
            found = [as_dict(row) for row in connection.execute(locked)] if ids else []
            for child in found:
                _take_down(connection, ledger, child, act, task)
            if ids:
                return found
        connection.execute(tasks.update().where(_t.id == task_id).values(going_down=None))
    return None


def _take_down(connection: Connection, ledger: Ledger, child: dict[str, Any], act: str, parent: Mapping[str, Any]) -> None:
    detail = {"with_task": parent["id"]}
    if act == "cancel":
        _cancel(connection, ledger, child, detail, "")
    elif act == "pause":
        _pause(connection, ledger, child, children.HELD, detail, "")
    elif act == "resume":
        _resume(connection, ledger, child, detail, "")
    else:
        values = {"priority": parent["priority"]}
        _update(connection, ledger, child, values, values, detail, "")


# -- cancelling and reopening rows in slices


def changing_tasks(connection: Connection) -> list[tuple[int, str]]:
    """Tasks with rows left to update, as (id, action), where the action is ``cancel`` or ``retry``."""
    statement = sa.select(_t.id, _t.turning).where(_t.finished_at.is_(None), sa.or_(_t.turning.is_not(None), _WAS_FREED))
    return [(int(i), str(turning or "cancel")) for i, turning in connection.execute(statement.order_by(_t.id))]


_WAS_FREED: Final = (
    (_t.state == str(State.CANCELLED))
    & _t.closed_at.is_(None)
    & sa.exists().where(_l.task_id == _t.id, _l.process.is_(None))
)
"""Cancelled Tasks with a free loan: its holder gave it back during the update of the rows, or later."""


def change_rows(ledger: Ledger, task_id: int) -> bool | None:
    """Updates the next slice of rows of a cancel or retry. Returns whether rows are left; None if another transaction holds
    the Task's row. Any process may call it at any time, because the cursor moves in the transaction of the rows.
    """
    more, applied = _change_rows(ledger, task_id)
    if any(each.record is not None and each.record.line is not None for each in applied):
        lending.announce(ledger, applied)  # later jobs of their keys may start
    return more


@repeatable
def _change_rows(ledger: Ledger, task_id: int) -> tuple[bool | None, list[Change]]:
    with ledger.database.write() as connection:
        task = try_lock(connection, ledger, task_id)
        if task is None:
            return None, []
        if task["turning"] is None:
            if not connection.scalar(sa.select(_t.id).where(_t.id == task_id, _WAS_FREED)):
                return False, []
            task |= {"turning": "cancel", "turn_cursor": -1}
        size = _SQLITE_SLICE if ledger.database.is_sqlite else SLICE
        wanted = [str(s) for s in OPEN] if task["turning"] == "cancel" else task["turn_statuses"].split(",")
        only = loads(task["turn_chosen"]) or {"digests": None, "left": None}
        left = size + 1 if only["left"] is None else only["left"]
        is_retry = task["turning"] == "retry"
        but_taken = is_retry and corrections.any_taken(connection, task_id)
        statement = _to_reopen(task_id, wanted, only, task["turn_cursor"], but_taken=but_taken)
        found = [(int(i), int(seq), int(items)) for i, seq, items in connection.execute(statement.limit(min(size, left)))]
        slices: dict[int, list[int]] = {}
        last, whole = found[-1][1] if found else -1, len(found) == size
        if is_retry and any(items > 1 for _, _, items in found):
            slices = _chosen_items(connection, found, wanted, only, left, task_id if but_taken else None)
            found = [each for each in found if each[2] == 1 or slices.get(each[0])]
        lent = lending.lent_ranges(connection, task_id)
        applied = apply(connection, ledger, [_row_change(ledger, task, i, slices.get(i), lent) for i, *_ in found])
        left -= sum(len(slices[i]) if items > 1 and i in slices else 1 for i, _, items in found)
        more = whole and left > 0
        values: dict[str, Any] = {"turn_cursor": last} if more else _change_end(task)
        if more and only["left"] is not None:
            values["turn_chosen"] = dumps({**only, "left": left})
        if not more and not is_retry:
            connection.execute(loans.delete().where(_l.task_id == task_id, _l.process.is_(None), ~_WAITS))
        hints.settle(connection, ledger, {**task, **values}, **values)
    return more, applied


def _change_end(task: dict[str, Any]) -> dict[str, Any]:
    done: dict[str, Any] = {"turning": None, "turn_statuses": None, "turn_chosen": None}
    if task["turning"] == "cancel":
        # All rows are terminal or held now. If the pointer did not move, a later retry would pass them twice.
        return {**done, "next_seq": task["created_jobs"]}
    return {**done, "generation_sealed": 1}


_WAITS: Final = sa.exists().where(*IN_LOAN, UNHELD)
"""Whether a row waits in a free loan: the update left the row to its holder, which gave it back afterwards."""


def _chosen_items(
    connection: Connection,
    found: Sequence[tuple[int, int, int]],
    statuses: Collection[str],
    only: dict[str, Any],
    left: int,
    task_id: int | None,
) -> dict[int, list[int]]:
    """The indexes of the items that a retry reopens, by slice: at most ``left`` items of all these jobs, in their order.

    ``task_id``: the Task, if lists that correct it have taken rows of it, which are left out.
    """
    ids = [i for i, _, items in found if items > 1]
    named: dict[int, set[int | None]] = {}
    if only["digests"] is not None:
        entries = sa.select(_x.event_id, _x.row).where(_x.event_id.in_(ids), _x.digest.in_(only["digests"]))
        for event_id, row in connection.execute(entries):
            named.setdefault(int(event_id), set()).add(row)
    chosen: dict[int, list[int]] = {}
    records = {record.id: record for record in read_events(connection, _e.id.in_(ids))}
    for event_id, _, items in found:
        if left <= 0 or items == 1:
            left -= 1
            continue
        record = records[event_id]
        indexes = indexes_of(record.row, statuses)
        numbers = only.get("rows")
        is_whole = only["digests"] is None and numbers is None and task_id is None
        rows = () if is_whole else rows_of(connection, record)
        if numbers is not None:
            indexes = [index for index in indexes if rows[index] in numbers]
        if only["digests"] is not None:
            indexes = [index for index in indexes if rows[index] in named.get(event_id, ())]
        if task_id is not None and record.first_row is not None and record.last_row is not None:
            taken = corrections.taken_between(connection, task_id, record.first_row, record.last_row)
            indexes = [index for index in indexes if rows[index] not in taken]
        chosen[event_id] = indexes[:left]
        left -= len(chosen[event_id])
    return chosen


def _row_change(
    ledger: Ledger,
    task: dict[str, Any],
    event_id: int,
    indexes: Collection[int] | None,
    lent: Sequence[tuple[int, int]],
) -> Change:
    if task["turning"] == "cancel":

        def cancel_at_rest(record: EventRecord) -> Transition | None:
            """Leaves a held row to its process, which cancels it or records its outcome."""
            return cancel(record.row) if at_rest(record.row, lending.is_lent(lent, record.seq)) else None

        return Change(event_id, cancel_at_rest)
    chosen = frozenset(task["turn_statuses"].split(","))
    now = ledger.now()

    def reopen(record: EventRecord) -> Transition | None:
        if indexes is None:
            return explicit_retry(record.row, now=now) if record.row.status in chosen else None
        return explicit_retry(record.row, now=now, chosen=frozenset(indexes)) if record.row.status in _ENDED else None

    return Change(event_id, reopen, notes=[Note("enqueue", ledger.catalogue("retried"))])


def give_back_copies(ledger: Ledger, copies: Sequence[tuple[str, int]]) -> None:
    """Makes rows wait again, or cancels them with their Task, whose copies (job id, attempt) were removed from a foreign
    queue before they ran."""
    attempts = dict(copies)
    for part in chunks(list(attempts)):
        with ledger.database.read() as connection:
            found = connection.execute(sa.select(_e.id, _e.job_id).where(_e.job_id.in_(part))).all()
        lending.unclaim(ledger, {int(event_id): attempts[job_id] for event_id, job_id in found})
