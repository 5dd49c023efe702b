"""Registered processes, their leases and figures, and the recovery of a dead process's jobs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from asynctask.clock import micros
from asynctask.core.states import Reason, Status
from asynctask.core.transitions import Row, Transition, give_back, held_elsewhere, is_foreign, recover, working
from asynctask.database.batches import for_update
from asynctask.database.engine import Database, Reading, database_now, read_time
from asynctask.database.notify import notify
from asynctask.database.retrying import repeatable
from asynctask.database.tables import as_dict, events, loans, places, processes, tasks
from asynctask.errors import ConfigError
from asynctask.ledger import lending
from asynctask.ledger.base import BATCH, Ledger, chunks, dumps, each_free, loads
from asynctask.ledger.events import UNHELD, Change, EventRecord, Failure, Note, apply, read_events
from asynctask.ledger.standalone import is_job_id

_p, _e, _t, _l, _n = processes.c, events.c, tasks.c, loans.c, places.c

LOST = "LOST"
"""The signal of a process that was declared dead."""


def engine_identity(engine: str, host: str, pid: int, nonce: str) -> str:
    """The identity of a process of an attached engine, with the engine as its prefix."""
    return f"{engine[:8]}@{host[:30].replace('@', '_')}:{pid}:{nonce}"


def is_engine(identity: str) -> bool:
    """Whether a process belongs to an attached engine, by its identity, also after the end of its registration."""
    return "@" in identity


def engine_of(identity: str) -> str | None:
    """The engine in an identity made by :func:`engine_identity`."""
    return identity.partition("@")[0] if is_engine(identity) else None


FORGETFUL: Final = ("huey",)
"""Engines that deliver no job twice: the ledger sends the lone jobs of their dead processes again."""


@dataclass(frozen=True, slots=True)
class Host:
    """This process's machine, as far as needed to determine whether another process on it is alive."""

    name: str
    boot_id: str  # of the boot and the pid namespace, within which a pid is meaningful

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
        """Start time of process ``pid`` of this machine, in kernel ticks; None if there is none or it is a zombie."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else int(fields[19])

    def knows_dead(self, process: Mapping[str, Any]) -> bool:
        """Whether a registered process ran on this machine, where its pid is visible, and has ended."""
        return self._sees(process) and self.started(int(process["pid"])) != int(process["pid_started"])

    def knows_alive(self, process: Mapping[str, Any]) -> bool:
        """Whether a registered process runs on this machine, where its pid is visible; its lease is then irrelevant."""
        return self._sees(process) and self.started(int(process["pid"])) == int(process["pid_started"])

    def _sees(self, process: Mapping[str, Any]) -> bool:
        """Whether the pid is visible here: containers may share a host's name and boot, but not its pids."""
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
            ledger.database.forget_marks(connection)
            notify(connection)  # other processes must know this one before it can die
            now_read = _now_if_due(connection, ledger)
            connection.execute(processes.insert().values(values))  # last: the lease runs from here
    except exc.IntegrityError:
        raise ConfigError(
            "this application already runs a worker or services in this process; give the other an AsyncTask of its own"
        ) from None
    ledger.time.answered(now_read, lease_s=lease_s)


@repeatable
def beat(ledger: Ledger, *, lease_s: float, **values: Any) -> str | None:
    """Heartbeat: renews this process's lease, updates its columns, and reads the database's time if due.

    Returns the signal stored for this process (``TSTP``, ``TERM``), or :data:`LOST` if another process declared it dead:
    then it must begin no more jobs under this identity.
    """
    # Unmarked: if the answer to its commit is lost, a renewal may be repeated.
    with ledger.database.write(marked=False) as connection:
        if renewed := _beat(connection, ledger, lease_s, values, _p.signal.is_(None)):
            left, now = None, _now_if_due(connection, ledger)
    if not renewed:
        # Marked: this consumes the signal, so a repeat after a lost answer would not find it.
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
    """Writes a renewal with the database's time after all locks are held, so that it is not outdated after a wait."""
    now = database_now(ledger.database.dialect)
    renewed = {**values, "beat_at": now, "lease_until": now + micros(lease_s), "held_at": None}
    own = processes.update().where(_p.identity == ledger.identity, where)
    return connection.execute(own.values(renewed)).rowcount == 1


def _now_if_due(connection: Connection, ledger: Ledger) -> Reading | None:
    """The database's time if it is due to be read again, else None."""
    return read_time(connection, ledger.clock) if ledger.time.is_old() else None


BEATEN_S: Final = 1.5
"""Seconds: a process with a heartbeat of its own that is no older is not held."""


@repeatable
def renew(database: Database, identities: Mapping[str, Sequence[int]], *, lease_s: float) -> None:
    """Renews the leases of living processes whose interpreters are held, on behalf of their supervisor, and notes that they
    are held: other processes take over the jobs that these have not begun (:func:`stalled`). ``identities``: each process
    with the Events whose jobs it began last, as far as its supervisor knows.

    A process that was declared dead stays dead. Raises LedgerUnavailable.
    """
    may_live = sa.or_(_p.signal.is_(None), _p.signal != LOST)
    with database.write(marked=False) as connection:
        now = database_now(database.dialect)
        # A process with a recent heartbeat runs again, although its supervisor does not know it yet.
        held = sa.case((_p.beat_at < now - micros(BEATEN_S), sa.func.coalesce(_p.held_at, now)), else_=_p.held_at)
        for identity, begun in sorted(identities.items()):
            values = {"lease_until": now + micros(lease_s), "held_at": held, "held_jobs": dumps(list(begun))}
            connection.execute(processes.update().where(_p.identity == identity, may_live).values(values))


@repeatable
def signal(ledger: Ledger, identity: str, name: str) -> bool:
    """Stores a signal (``TSTP`` quiet, ``TERM`` stop) for a process, which obeys at its next heartbeat. False if the
    process is unknown."""
    with ledger.database.write() as connection:
        there = (_p.identity == identity) & sa.or_(_p.signal.is_(None), _p.signal != LOST)  # LOST must not be replaced
        return connection.execute(processes.update().where(there).values(signal=name)).rowcount == 1


class Sightings:
    """Since when this process has seen the leases of other processes unchanged.

    The time of a renewal is set before its commit, which may wait for a lock or a disk: the lease may have expired when the
    renewal becomes visible, although its process is alive. So an expired lease counts only after it was seen unrenewed for
    the duration of a lease.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._seen: Mapping[str, tuple[int, int]] = {}  # identity -> the end of its lease, since when (boot clock)

    def note(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Takes note of all registered processes, as just read."""
        at, before = self._ledger.clock.boottime(), self._seen
        seen: dict[str, tuple[int, int]] = {}
        for process in found:
            identity, until = str(process["identity"]), int(process["lease_until"])
            known = before.get(identity)
            seen[identity] = known if known is not None and known[0] == until else (until, at)
        self._seen = seen

    def has_ended(self, process: Mapping[str, Any]) -> bool:
        """Whether a process has not renewed its expired lease for the duration of a lease, as seen by this process."""
        seen = self._seen.get(str(process["identity"]))
        if seen is None or seen[0] != process["lease_until"] or seen[0] > self._ledger.now():
            return False
        return self._ledger.time.may_judge(seen[1])


@repeatable
def condemn(ledger: Ledger, host: Host, identity: str, sightings: Sightings) -> bool:
    """Declares a process dead if :func:`is_dead`, so that it can no longer renew its lease. Returns False if it is alive.

    Call it before the recovery of the process's jobs: otherwise a process that continues between recovery and
    :func:`forget` would run under an identity that no process watches.
    """
    with ledger.database.write() as connection:
        found = connection.execute(
            for_update(connection, sa.select(processes).where(_p.identity == identity))
        ).one_or_none()
        if found is None:
            return True  # not registered; it may still hold copies
        if not is_dead(host, as_dict(found), sightings):
            return False
        connection.execute(processes.update().where(_p.identity == identity).values(lease_until=0, signal=LOST))
    return True


@repeatable
def give_up(ledger: Ledger) -> None:
    """Ends this process's work under its identity; other processes recover its remaining jobs at once."""
    with ledger.database.write() as connection:
        own = processes.update().where(_p.identity == ledger.identity)
        connection.execute(own.values(lease_until=0, signal=LOST))
        notify(connection)


@repeatable
def leave(ledger: Ledger) -> None:
    """Removes this process, which ends normally; if it still holds jobs, other processes recover these at once."""
    with ledger.database.write() as connection:
        own = _p.identity == ledger.identity
        held = (c.process == ledger.identity for c in (_e, _l, _n))
        if any(connection.execute(sa.select(sa.literal(1)).where(which).limit(1)).first() for which in held):
            connection.execute(processes.update().where(own).values(lease_until=0, signal=LOST))
            notify(connection)
        else:
            connection.execute(processes.delete().where(own))


def unknown_workers(connection: Connection) -> set[str]:
    """Processes that Events, loans or places name, and that are not registered."""
    found: set[str] = set()
    for column in (_e.process, _l.process, _n.process):
        named = sa.select(column).where(column.is_not(None), ~sa.exists().where(_p.identity == column)).distinct()
        found |= {str(name) for name in connection.execute(named).scalars()}
    return {name for name in found if not lending.is_queue_holder(name)}


@repeatable
def forget(ledger: Ledger, identity: str, *, dead: bool = False) -> None:
    """Removes a process that ended normally, or (``dead``) one whose jobs have been recovered.

    For a dead one, its leases of splits end, too, so that other processes take these over at once. A process that ended
    normally may still split lists: a program that contained a worker continues to submit items.
    """
    if dead:
        _end_splits(ledger, identity)
    with ledger.database.write() as connection:
        connection.execute(processes.delete().where(_p.identity == identity))


def _end_splits(ledger: Ledger, identity: str) -> None:
    """Ends the leases of a process's splits. Skips locked Tasks, whose leases expire by themselves, usually earlier."""
    its = (_t.split_by == identity) & _t.finished_at.is_(None)
    with ledger.database.read() as connection:
        found = [int(i) for i in connection.execute(sa.select(_t.id).where(its)).scalars()]

    def act(connection: Connection, free: list[int]) -> None:
        connection.execute(tasks.update().where(_t.id.in_(free), its).values(split_until=0))

    each_free(ledger, found, act)


# -- registered processes


def list_processes(connection: Connection) -> list[dict[str, Any]]:
    """The columns of every registered process."""
    return [as_dict(row) for row in connection.execute(sa.select(processes).order_by(_p.started_at, _p.identity))]


# Without `info`, which is only displayed, because the dispatcher queries often.
_PERFORMING = sa.select(*(column for column in _p if column.key != "info")).where(
    _p.concurrency > 0, _p.lease_until > sa.bindparam("now")
)


def performing(connection: Connection, now: int) -> list[dict[str, Any]]:
    """The columns of processes with a valid lease that perform jobs: workers, and those of attached engines."""
    return [as_dict(row) for row in connection.execute(_PERFORMING, {"now": now})]


def is_dead(host: Host, process: Mapping[str, Any], sightings: Sightings) -> bool:
    """Whether a registered process is dead: on this machine by its pid, at once; elsewhere by its lease
    (:meth:`Sightings.has_ended`).
    """
    if process["signal"] == LOST:
        return True  # declared dead, by another process or itself; the recovery may be unfinished
    if host.knows_alive(process):
        return False
    return host.knows_dead(process) or sightings.has_ended(process)


# -- recovery


def recover_events(ledger: Ledger, identity: str, copies: Sequence[tuple[str, int]] = ()) -> list[Change]:
    """Recovers the Events of a dead process: those that name it, those of its loans, and those whose copies it held. Its
    loans and places end.

    ``copies``: (job id, attempt) as a foreign queue lists them; attempt 0 is a foreign job, which may have got an Event
    when it was fetched. Idempotent, because the attempt rises.
    """
    applied: list[Change] = []
    attempts = dict(sorted(copies))  # of two copies of a job, the later attempt

    def make(connection: Connection, part: Sequence[int]) -> list[Change]:
        begun = (_e.process == identity) & (_e.status == str(Status.WORKING))
        at_work = {record.id: record.row for record in read_events(connection, begun)}
        return [_recovery(ledger, event_id, identity, attempts, at_work) for event_id in part]

    for part in _events_of(ledger, identity, [jid for jid in attempts if is_job_id(jid)]):
        applied += lending.change(ledger, partial(make, part=part))
    applied += _end_its_loans(ledger, identity, partial(_recovery, ledger, identity=None))
    _end_places(ledger, identity)
    return applied


def recover_job(ledger: Ledger, event_id: int) -> None:
    """Recovers one Event held by this process, which records for others, after the process that performed the job died."""
    lending.change(ledger, lambda connection: [_recovery(ledger, event_id, ledger.identity)])


def stalled(connection: Connection) -> list[str]:
    """The identities of worker processes of the own runtime whose interpreters are held, by their supervisors' reports. An
    old heartbeat is no proof, because the database may not have answered."""
    found = sa.select(_p.identity).where(_p.concurrency > 0, _p.held_at.is_not(None), _p.signal.is_(None))
    held = [str(identity) for identity in connection.execute(found.order_by(_p.identity)).scalars()]
    return [identity for identity in held if not is_engine(identity)]


def take_unbegun(ledger: Ledger, identity: str) -> list[Change]:
    """Makes the jobs of a stalled process that are not known to run due again, under a new attempt, and reduces its places
    to its running jobs. Jobs that its supervisor knows to have begun are recorded as ``working``. Jobs that it had ended
    and not recorded, and short jobs that it had begun, run again. Returns the changes."""
    with ledger.database.read() as connection:
        begun = frozenset(loads(connection.scalar(sa.select(_p.held_jobs).where(_p.identity == identity))) or ())
    its = partial(take, ledger, identity=identity, begun=begun)
    applied = _end_its_loans(ledger, identity, partial(its, process=None))
    with ledger.database.read() as connection:
        claimed = sa.select(_e.id).where(_e.process == identity, _e.status == str(Status.ENQUEUE)).order_by(_e.id)
        found = connection.execute(claimed).scalars().all()

    def make(_: Connection, part: Sequence[int]) -> list[Change]:
        return [its(i, process=identity) for i in part]

    for part in chunks(found):
        applied += lending.change(ledger, partial(make, part=part))
    _shrink_places(ledger, identity)
    return applied


def take(
    ledger: Ledger, event_id: int, *, process: str | None, identity: str | None = None, begun: Collection[int] = ()
) -> Change:
    """Takes a row from its holder, by a loan (``process`` None) or by ``process``: it is due again, under a new attempt.

    The job may run at the old holder: the next process records ``working`` before it begins, and a job in ``working`` is
    not taken again. Jobs that ``identity`` has ``begun`` are recorded as ``working`` instead.
    """

    def decide(record: EventRecord) -> Transition | None:
        row = record.row
        if row.due_at is not None or row.process != process:
            return None
        if row.status is not Status.ENQUEUE and (row.status is not Status.WORKING or process is not None or is_begun):
            return None
        if is_begun:
            return working(row, identity)
        transition = give_back(row, record.task_state, now=ledger.now())
        return transition._replace(after=transition.after._replace(watched=True))

    is_begun = event_id in begun
    notes = [Note("working", ledger.catalogue("working"), process=identity)] if is_begun else []
    return Change(event_id, decide, notes=notes)


@repeatable
def _shrink_places(ledger: Ledger, identity: str) -> None:
    running = sa.select(_e.task_id, sa.func.count()).where(_e.process == identity, _e.status == str(Status.WORKING))
    with ledger.database.write() as connection:
        runs = {i: int(n) for i, n in connection.execute(running.group_by(_e.task_id)).all()}
        had = connection.execute(sa.select(_n.task_id, _n.n).where(_n.process == identity).order_by(_n.task_id)).all()
        for task_id, n in had:
            own, left = (_n.task_id == task_id) & (_n.process == identity), runs.get(task_id, 0)
            if not left:
                connection.execute(places.delete().where(own))
            elif left < n:
                connection.execute(places.update().where(own).values(n=left))
        notify(connection)


def _end_its_loans(ledger: Ledger, identity: str, make: Callable[[int], Change]) -> list[Change]:
    """Ends the loans of a process, each together with the changes of its Events."""
    with ledger.database.read() as connection:
        its = sa.select(_l.id).where(_l.process == identity).order_by(_l.id)
        found = [int(i) for i in connection.execute(its).scalars()]
    return [change for loan_id in found for change in end_whole(ledger, identity, loan_id, make)]


def end_whole(ledger: Ledger, identity: str | None, loan_id: int, make: Callable[[int], Change]) -> list[Change]:
    """Ends a loan part by part, see :func:`_end_part`, and announces the changes."""
    applied, is_left = list[Change](), True
    while is_left:
        changes, is_left = _end_part(ledger, identity, loan_id, make)
        applied += changes
    lending.announce(ledger, applied)
    return applied


@repeatable
def _end_part(
    ledger: Ledger, identity: str | None, loan_id: int, make: Callable[[int], Change]
) -> tuple[list[Change], bool]:
    """Ends the next part of a loan: deletes or shortens it, in the transaction of the part's Events. Returns the changes,
    and whether a rest is left. ``identity`` None: a free loan."""
    with ledger.database.write() as connection:
        its = _l.process.is_(None) if identity is None else _l.process == identity
        # Lock the loan before its Events: a holder that gives it back meanwhile waits, and then does not find it.
        locked = for_update(connection, sa.select(_l.task_id, _l.low, _l.high).where(_l.id == loan_id, its))
        loan = connection.execute(locked).one_or_none()
        if loan is None:
            return [], False
        held = (
            sa.select(_e.id, _e.seq)
            .where(_e.task_id == loan.task_id, _e.seq >= loan.low, _e.seq < loan.high)
            .where(UNHELD)
            .order_by(_e.seq)
            .limit(BATCH)
        )
        found = connection.execute(held).all()
        applied = apply(connection, ledger, [make(int(i)) for i, _ in found])
        is_left = len(found) == BATCH
        if is_left:
            connection.execute(loans.update().where(_l.id == loan_id).values(low=int(found[-1].seq) + 1))
        else:
            connection.execute(loans.delete().where(_l.id == loan_id))
    return applied, is_left


@repeatable
def _end_places(ledger: Ledger, identity: str) -> None:
    with ledger.database.write() as connection:
        connection.execute(places.delete().where(_n.process == identity))
        notify(connection)


def _events_of(ledger: Ledger, identity: str, jids: Sequence[str]) -> list[list[int]]:
    """Ids of Events per transaction. Those in ``working`` come first and together, because their recovery depends on each
    other."""
    held: set[int] = set()
    with ledger.database.read() as connection:
        for start in range(0, len(jids), 1000):
            part = jids[start : start + 1000]
            held.update(int(i) for (i,) in connection.execute(sa.select(_e.id).where(_e.job_id.in_(part))))
        at_work = {int(i) for (i,) in connection.execute(sa.select(_e.id).where(_e.process == identity))}
    rest = sorted(held - at_work)
    parts = [sorted(at_work), *(rest[i : i + 1000] for i in range(0, len(rest), 1000))]
    return [part for part in parts if part]


def _recovery(
    ledger: Ledger,
    event_id: int,
    identity: str | None,
    attempts: Mapping[str, int] = MappingProxyType({}),
    at_work: Mapping[int, Row] = MappingProxyType({}),
) -> Change:
    """The recovery of an Event that a dead process held: by ``identity``, or as a copy of one of these ``attempts``;
    ``identity`` None: by a loan, without a write. ``at_work``: the rows that were ``working`` in that process."""

    def decide(record: EventRecord) -> Transition | None:
        row = record.row
        attempt = attempts.get(record.job_id)
        own = attempt == row.attempt or is_foreign(row, attempt, record.task_id)
        if row.process != identity and not (own and row.process is None):
            return None
        transition = _recovered(ledger, change, record, [other for id_, other in at_work.items() if id_ != event_id])
        if transition is not None and record.is_lone and engine_of(identity or "") not in (None, *FORGETFUL):
            transition = held_elsewhere(transition)  # the engine redelivers lone jobs of a dead process by itself
        return transition

    change = Change(event_id, decide)
    return change


def _recovered(ledger: Ledger, change: Change, record: EventRecord, beside: Sequence[Row]) -> Transition | None:
    """The recovery's transition; sets its messages and its failure in ``change``."""
    row = record.row
    transition = recover(row, record.task_state, now=ledger.now(), beside=beside)
    if transition is not None:
        change.notes = _notes(ledger, transition)
        if transition.after.n_error > row.n_error:
            change.failure = Failure("poison", ledger.catalogue("poison", str(transition.after.deaths or row.deaths + 1)))
    return transition


def _notes(ledger: Ledger, transition: Transition) -> list[Note]:
    say = ledger.catalogue
    if transition.reason is Reason.CANCELLED or transition.before is None or transition.before.status is not Status.WORKING:
        return []  # no message about a lost worker, because the job may never have begun
    lost = [Note("error", say("worker_lost"))]
    if transition.reason is Reason.POISON:
        return [*lost, Note("error", say("poison", str(transition.after.deaths)))]
    return [*lost, Note("enqueue", say("retry"))]
