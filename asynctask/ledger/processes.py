"""Processes and their leases, recovery of a dead process's jobs, and copies lost by a broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from asynctask.clock import micros
from asynctask.core.states import OPEN, Reason, Status
from asynctask.core.transitions import Row, Turn, held_elsewhere, in_flight, is_foreign, recover, redispatch
from asynctask.database.batches import for_update
from asynctask.database.engine import Database, database_now
from asynctask.database.notify import LEDGER, notify
from asynctask.database.retrying import repeatable
from asynctask.database.tables import as_dict, events, processes, task_tallies, tasks
from asynctask.errors import ConfigError
from asynctask.ledger import dispatchable
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, chunks, dumps, each_free, try_lock
from asynctask.ledger.events import Applied, Change, EventRecord, Failure, Note, apply, read_events
from asynctask.ledger.standalone import is_job_id

__all__ = [
    "Host",
    "advance_low",
    "beat",
    "dead_processes",
    "engine_identity",
    "engine_of",
    "flying_rows",
    "flying_tasks",
    "forget",
    "give_up",
    "is_dead",
    "is_engine",
    "list_processes",
    "living",
    "look_later",
    "lost_copies",
    "recover_events",
    "register",
    "renew",
    "signal",
    "to_look_at",
    "unknown_workers",
]

_p, _e, _t, _n = processes.c, events.c, tasks.c, task_tallies.c

LOST = "LOST"
"""The signal of a process that was declared dead."""


def engine_identity(engine: str, host: str, pid: int, nonce: str) -> str:
    """The identity of a process of an attached engine; its prefix names the engine whose queue holds its jobs."""
    return f"{engine[:8]}@{host[:30].replace('@', '_')}:{pid}:{nonce}"


def is_engine(identity: str) -> bool:
    """Whether a process belongs to an attached engine. Read from its name, which outlives its registration."""
    return "@" in identity


def engine_of(identity: str) -> str | None:
    """The engine in an identity made by :func:`engine_identity`."""
    return identity.partition("@")[0] if is_engine(identity) else None


@dataclass(frozen=True, slots=True)
class Host:
    """The machine of this process, as far as needed to tell whether another process on it lives."""

    name: str
    boot_id: str  # of the boot and the pid namespace: a pid is meaningful only within both

    @classmethod
    def local(cls, name: str) -> Host:
        """This machine, with ``name`` as its host name."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            boot = f"{boot[:36]}/{Path('/proc/self/ns/pid').readlink().name.strip('pid:[]')}"
        except OSError:
            boot = ""
        return cls(name, boot)

    def started(self, pid: int) -> int | None:
        """Start time of process ``pid`` of this machine, in kernel ticks; None if there is none, or a zombie."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else int(fields[19])

    def knows_dead(self, process: Mapping[str, Any]) -> bool:
        """Whether a registered process ran on this machine, where its pid is visible, and is gone."""
        return self._sees(process) and self.started(int(process["pid"])) != int(process["pid_started"])

    def knows_alive(self, process: Mapping[str, Any]) -> bool:
        """Whether a registered process runs on this machine, where its pid is visible; its lease is then irrelevant."""
        return self._sees(process) and self.started(int(process["pid"])) == int(process["pid_started"])

    def _sees(self, process: Mapping[str, Any]) -> bool:
        """Whether its pid is visible here: containers share a host's name and boot without seeing each other."""
        return bool(self.boot_id) and process["hostname"] == self.name and process["boot_id"] == self.boot_id


@repeatable
def register(
    ledger: Ledger,
    host: Host,
    *,
    kind: str,
    pid: int,
    lease_s: float,
    concurrency: int = 0,
    queues: Sequence[str] = (),
    info: Mapping[str, Any] | None = None,
) -> None:
    """Registers a process under the ledger's identity, with a lease of ``lease_s`` seconds.

    Raises :class:`ConfigError` if it is registered already.
    """
    now = database_now(ledger.database.dialect)
    values = {
        "identity": ledger.identity, "kind": kind, "hostname": host.name, "boot_id": host.boot_id, "pid": pid,
        "pid_started": host.started(pid) or 0, "started_at": now, "beat_at": now, "lease_until": now + micros(lease_s),
        "concurrency": concurrency, "queues": dumps(list(queues)), "info": dumps(dict(info or {})),
    }  # fmt: skip
    try:
        with ledger.database.write() as connection:
            connection.execute(processes.insert().values(values))
            ledger.time.answered(_now_if_due(connection, ledger), lease_s=lease_s)
            ledger.database.forget_marks(connection)
            notify(connection, LEDGER)  # others must know of it before it can die
    except exc.IntegrityError:
        raise ConfigError(
            "this application already runs a worker or services in this process; give the other an AsyncTask of its own"
        ) from None


@repeatable
def beat(ledger: Ledger, *, lease_s: float, **values: Any) -> str | None:
    """Heartbeat: renews this process's lease, updates its columns, and reads the database's time if due.

    Returns the signal left for it (``TSTP``, ``TERM``), or :data:`LOST` if another process declared it dead: then it must
    begin nothing more under this identity.
    """
    # Unmarked: repeating a renewal is correct if the answer to its commit is lost.
    with ledger.database.write(marked=False) as connection:
        if renewed := _beat(connection, ledger, lease_s, values, _p.signal.is_(None)):
            left, now = None, _now_if_due(connection, ledger)
    if not renewed:
        # Marked: a signal is consumed, so a repeat after a lost answer would not find it.
        with ledger.database.write() as connection:
            own = for_update(connection, sa.select(_p.signal).where(_p.identity == ledger.identity))
            found = connection.execute(own).one_or_none()
            if found is None or found[0] == LOST:
                return LOST
            _beat(connection, ledger, lease_s, {**values, "signal": None}, sa.true())
            left, now = found[0], _now_if_due(connection, ledger)
    ledger.time.answered(now, lease_s=lease_s)
    return left


def _beat(connection: Connection, ledger: Ledger, lease_s: float, values: Mapping[str, Any], where: Any) -> bool:
    """Stamped with the database's time after all locks are held: a renewal that waited must not be old when written."""
    now = database_now(ledger.database.dialect)
    renewed = {**values, "beat_at": now, "lease_until": now + micros(lease_s)}
    own = processes.update().where(_p.identity == ledger.identity, where)
    return connection.execute(own.values(renewed)).rowcount == 1


def _now_if_due(connection: Connection, ledger: Ledger) -> int | None:
    """The database's time if this process should read it again, else None."""
    if not ledger.time.is_old():
        return None
    return int(connection.execute(sa.select(database_now(ledger.database.dialect))).scalar_one())


@repeatable
def renew(database: Database, identities: Sequence[str], *, lease_s: float) -> None:
    """Renews the leases of processes that live but cannot renew themselves, on behalf of their supervisor.

    A process declared dead stays dead. Raises LedgerUnavailable.
    """
    living = _p.identity.in_(list(identities)) & sa.or_(_p.signal.is_(None), _p.signal != LOST)
    with database.write(marked=False) as connection:
        until = database_now(database.dialect) + micros(lease_s)
        connection.execute(processes.update().where(living).values(lease_until=until))


@repeatable
def signal(ledger: Ledger, identity: str, name: str) -> bool:
    """Leaves a signal (``TSTP`` quiet, ``TERM`` stop) for a process, which obeys at its next beat. False if unknown."""
    with ledger.database.write() as connection:
        there = (_p.identity == identity) & sa.or_(_p.signal.is_(None), _p.signal != LOST)  # LOST must not be replaced
        return connection.execute(processes.update().where(there).values(signal=name)).rowcount == 1


@repeatable
def condemn(ledger: Ledger, host: Host, identity: str) -> bool:
    """Declares a process dead if :func:`is_dead`, so that it cannot renew any more. Returns False if it lives.

    Must precede the recovery of its jobs: a process that came back between recovery and :func:`forget` would go on under a
    name that nobody watches.
    """
    with ledger.database.write() as connection:
        found = connection.execute(
            for_update(connection, sa.select(processes).where(_p.identity == identity))
        ).one_or_none()
        if found is None:
            return True  # no registration left; copies in its list may be
        if not is_dead(ledger, host, as_dict(found)):
            return False
        connection.execute(processes.update().where(_p.identity == identity).values(lease_until=0, signal=LOST))
    return True


@repeatable
def give_up(ledger: Ledger) -> None:
    """Ends this process's work under its identity; others recover the jobs that it still holds at once."""
    with ledger.database.write() as connection:
        own = processes.update().where(_p.identity == ledger.identity)
        connection.execute(own.values(lease_until=0, signal=LOST))
        notify(connection, LEDGER)


def unknown_workers(connection: Connection) -> set[str]:
    """Processes named by Events but registered nowhere."""
    named = sa.select(_e.process).where(_e.process.is_not(None)).distinct()
    return {str(i) for (i,) in connection.execute(named.where(~sa.exists().where(_p.identity == _e.process)))}


def forget(ledger: Ledger, identity: str, *, dead: bool = False) -> None:
    """Removes a process that ended in order, or (``dead``) one whose jobs have been recovered.

    For a dead one, its leases of splits and reservations end too, so others take them over at once. One that ended in order
    may live on in part: a program with a worker inside goes on submitting its items.
    """
    if dead:
        _end_leases(ledger, identity)
    _remove(ledger, identity)


@repeatable
def _remove(ledger: Ledger, identity: str) -> None:
    with ledger.database.write() as connection:
        connection.execute(processes.delete().where(_p.identity == identity))


def _end_leases(ledger: Ledger, identity: str) -> None:
    """Skips Tasks whose rows another transaction holds: those leases run out by themselves, usually earlier."""
    splits, dispatches = (_t.split_by == identity) & _t.finished_at.is_(None), _t.dispatch_by == identity
    with ledger.database.read() as connection:
        found = [int(i) for (i,) in connection.execute(sa.select(_t.id).where(splits | dispatches))]

    def act(connection: Connection, free: list[int]) -> None:
        connection.execute(tasks.update().where(_t.id.in_(free), splits).values(split_until=0))
        connection.execute(tasks.update().where(_t.id.in_(free), dispatches).values(dispatch_until=0))

    each_free(ledger, found, act)


def list_processes(connection: Connection) -> list[dict[str, Any]]:
    """The columns of every registered process."""
    return [as_dict(row) for row in connection.execute(sa.select(processes).order_by(_p.started_at, _p.identity))]


_LIVING = sa.select(processes).where(_p.kind == sa.bindparam("of"), _p.lease_until > sa.bindparam("now"))


def living(connection: Connection, now: int, kind: str = "worker") -> list[dict[str, Any]]:
    """Processes of a kind with a valid lease."""
    return [as_dict(row) for row in connection.execute(_LIVING, {"of": kind, "now": now})]


def is_dead(ledger: Ledger, host: Host, process: Mapping[str, Any]) -> bool:
    """Whether a registered process is gone.

    On this machine its pid tells, at once. Elsewhere only its lease tells, and only while
    :meth:`~asynctask.database.engine.DatabaseTime.may_judge` allows it.
    """
    if process["signal"] == LOST:
        return True  # declared dead, by another or itself; the recovery may be unfinished
    if host.knows_alive(process):
        return False
    return host.knows_dead(process) or (process["lease_until"] <= ledger.now() and ledger.time.may_judge())


def dead_processes(connection: Connection, ledger: Ledger, host: Host) -> list[str]:
    """Identities of registered processes that :func:`is_dead`."""
    return [str(process["identity"]) for process in list_processes(connection) if is_dead(ledger, host, process)]


def recover_events(ledger: Ledger, identity: str, copies: Sequence[tuple[str, int]]) -> list[Applied]:
    """Recovers the Events of a dead process: those whose copies it held, and those that name it.

    ``copies``: (job id, attempt) as the broker lists them; attempt 0 is a job of another program, which may have an Event
    since it was fetched. Idempotent, because the attempt rises.
    """
    applied: list[Applied] = []
    attempts = dict(sorted(copies))  # the later attempt of two copies of a job
    for ids in _events_of(ledger, identity, [jid for jid in attempts if is_job_id(jid)]):
        applied += _recover_part(ledger, identity, ids, attempts)
    dispatchable.announce(ledger, applied)
    return applied


@repeatable
def _recover_part(ledger: Ledger, identity: str, ids: Sequence[int], attempts: Mapping[str, int]) -> list[Applied]:
    with ledger.database.write() as connection:
        now = ledger.now()
        begun = (_e.process == identity) & (_e.status == str(Status.WORKING))
        at_work = {record.id: record.row for record in read_events(connection, begun)}
        changes = [_change(ledger, event_id, identity, attempts, at_work, now) for event_id in ids]
        return apply(connection, ledger, changes)


def _events_of(ledger: Ledger, identity: str, jids: Sequence[str]) -> list[list[int]]:
    """Ids per transaction. Those at work come first and together: the suspects among them depend on each other."""
    held: set[int] = set()
    with ledger.database.read() as connection:
        for start in range(0, len(jids), 1000):
            part = jids[start : start + 1000]
            held.update(int(i) for (i,) in connection.execute(sa.select(_e.id).where(_e.job_id.in_(part))))
        at_work = {int(i) for (i,) in connection.execute(sa.select(_e.id).where(_e.process == identity))}
    rest = sorted(held - at_work)
    parts = [sorted(at_work), *(rest[i : i + 1000] for i in range(0, len(rest), 1000))]
    return [part for part in parts if part]


def _change(
    ledger: Ledger, event_id: int, identity: str, attempts: Mapping[str, int], at_work: Mapping[int, Row], now: int
) -> Change:
    def decide(record: EventRecord) -> Turn | None:
        row = record.row
        attempt = attempts.get(record.job_id)
        own = attempt == row.attempt or is_foreign(row, attempt, record.task_id)
        held = own and row.process in (None, identity)
        if not held and row.process != identity:
            return None
        beside = [other for id_, other in at_work.items() if id_ != event_id]
        turn = recover(row, record.task_state, now=now, beside=beside)
        if turn is not None and is_engine(identity):
            turn = held_elsewhere(turn)  # the engine redelivers its dead process's jobs
        if turn is not None:
            change.notes = _notes(ledger, turn)
            if turn.reason is Reason.POISON:
                change.failure = Failure("poison", ledger.catalogue("poison", str(turn.after.deaths)))
        return turn

    change = Change(event_id, decide)
    return change


def _notes(ledger: Ledger, turn: Turn) -> list[Note]:
    say = ledger.catalogue
    if turn.reason is Reason.CANCELLED:
        return [Note("cancelled", say("cancelled"))]
    if turn.before is None or turn.before.status is not Status.WORKING:
        return []  # it may never have begun, so no message about a lost worker
    lost = [Note("error", say("worker_lost"))]
    if turn.reason is Reason.POISON:
        return [*lost, Note("error", say("poison", str(turn.after.deaths)))]
    return [*lost, Note("enqueue", say("retry"))]


# -- copies lost by a broker

_IN_FLIGHT = sa.func.coalesce(sa.func.sum(_n.dispatched - _n.returned), 0)


def to_look_at(connection: Connection, now: int, limit: int = 1_000) -> list[EventRecord]:
    """Events without a Task whose copy has been out so long that the broker should be asked whether it holds it."""
    return _read_by_ids(connection, sa.select(_e.id).where(_e.look_at <= now).order_by(_e.look_at, _e.id).limit(limit))


def _read_by_ids(connection: Connection, ids: Any) -> list[EventRecord]:
    found = connection.execute(ids).scalars().all()
    return [record for part in chunks(found, 1_000) for record in read_events(connection, _e.id.in_(part))]


@repeatable
def look_later(ledger: Ledger, event_ids: Sequence[int], *, look_again_s: float) -> None:
    """The broker holds them: postpones the next check."""
    if not event_ids:
        return
    with ledger.database.write() as connection:
        connection.execute(
            events.update()
            .where(_e.id.in_(list(event_ids)), _e.look_at.is_not(None))
            .values(look_at=ledger.now() + micros(look_again_s))
        )


def flying_tasks(connection: Connection) -> list[int]:
    """Tasks with jobs in flight."""
    statement = (
        sa.select(_t.id)
        .join(task_tallies, _n.task_id == _t.id)
        .where(_t.finished_at.is_(None))
        .group_by(_t.id)
        .having(_IN_FLIGHT > 0)
    )
    return [int(i) for (i,) in connection.execute(statement)]


@repeatable
def advance_low(ledger: Ledger, task_ids: Sequence[int]) -> None:
    """Moves each Task's low mark up to its first open row, so that later checks skip the terminal rows before it."""
    for task_id in task_ids:
        with ledger.database.write() as connection:
            task = try_lock(connection, ledger, task_id)
            # A retry in progress may reopen terminal rows, which would be skipped for ever.
            if task is None or task["turning"] is not None:
                continue
            behind = (_e.task_id == task_id) & (_e.seq >= task["low_seq"]) & (_e.seq < task["next_seq"])
            still_open = sa.select(_e.seq).where(behind, _e.status.in_([str(s) for s in OPEN])).order_by(_e.seq).limit(1)
            first = connection.execute(still_open).scalar()
            low = task["next_seq"] if first is None else first
            if low > task["low_seq"]:
                connection.execute(tasks.update().where(_t.id == task_id).values(low_seq=low))


def flying_rows(connection: Connection, task_id: int, limit: int = 10_000) -> list[EventRecord]:
    """Rows of a Task that should be in the broker or in a process and are not known to have begun."""
    task = task_rows.get(connection, task_id)
    condition = (
        (_e.task_id == task_id)
        & (_e.seq >= task["low_seq"])
        & (_e.seq < task["next_seq"])
        & (_e.status == Status.ENQUEUE)
        & _e.due_at.is_(None)
    )
    records = _read_by_ids(connection, sa.select(_e.id).where(condition).order_by(_e.seq).limit(limit))
    return [record for record in records if in_flight(record.row)]


def lost_copies(ledger: Ledger, lost: Sequence[tuple[int, int]]) -> list[Applied]:
    """Makes rows, (event id, attempt), that the broker did not hold on two checks wait in the ledger again."""
    applied = _lost_copies(ledger, lost)
    dispatchable.announce(ledger, applied)
    return applied


@repeatable
def _lost_copies(ledger: Ledger, lost: Sequence[tuple[int, int]]) -> list[Applied]:
    with ledger.database.write() as connection:
        now = ledger.now()
        changes = [
            Change(event_id, _redispatch_if(attempt, now), notes=[Note("enqueue", ledger.catalogue("redispatched"))])
            for event_id, attempt in lost
        ]
        return apply(connection, ledger, changes)


def _redispatch_if(attempt: int, now: int) -> Any:
    def decide(record: EventRecord) -> Any:
        if record.row.attempt != attempt:
            return None
        return redispatch(record.row, record.task_state or "", held=False, missed_before=True, now=now)

    return decide
