"""Group commit: the outcomes of all threads of a process go to the ledger together, one transaction a flush."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from asynctask.bookkeeping import Row, Turn, cancel, ending, give_back, held_elsewhere, outcome, take_over, working
from asynctask.errors import Unavailable
from asynctask.ledger import ready
from asynctask.ledger.base import Ledger
from asynctask.ledger.closer import Closer
from asynctask.ledger.conflicts import TransactionConflict, repeatable
from asynctask.ledger.transitions import Applied, Change, End, EventRecord, Failure, Note, SeenNoMore, apply
from asynctask.logs import get_logger
from asynctask.states import OPEN, Reason, State, Status

__all__ = ["Outcome", "Recorder"]

LINGER_S = 0.005
"""While other jobs run, an outcome waits so long for theirs. A commit costs about a fifth of it, and holds the lock."""

LONGEST_LINGER_S = 0.1
"""It waits longer, but no longer than this, while there is enough to do that does not wait for it: see
:meth:`Recorder._linger`."""

_LINGERS = 9
"""So many times as long as the last flush took: so flushing takes a tenth of the time, whatever a commit costs."""

_MAX_BATCH = 500
_READS = 100
"""Flushes that read every Event first, after one was not as it was at Begin: jobs of which something is recorded while they
run come in storms, too."""

_RETRY_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)


@dataclass(slots=True)
class Outcome:
    """What is to be recorded of one attempt of one Event.

    ``status`` and ``reason`` name the edge; ``retry_at`` (microseconds) turns an error into another attempt.
    ``then`` is called once the transaction is committed, with whether the compare-and-set was won: only then may the
    job's copy be acknowledged. ``elsewhere``: another engine keeps the job's copies. They carry no fence, so whatever
    attempt the open Event is at is the one meant, and a next attempt waits in that engine's queue, not in the ledger.
    ``seen``: the Event as it stood at Begin, if it was untouched: the first try to record the end of it goes by that.
    ``awaited``: something may wait for it to be recorded: the job itself, before it begins, or its Task, which starts no
    more jobs than a number at a time.
    """

    event_id: int
    attempt: int
    status: Status
    reason: Reason
    notes: list[Note] = field(default_factory=list)
    retry_at: int | None = None
    failure: Failure | None = None
    result: str | None = None
    started_at: int | None = None
    then: Callable[[bool], None] | None = None
    elsewhere: bool = False
    seen: EventRecord | None = None
    awaited: bool = False


class Recorder:
    """The group commit of one process.

    :meth:`put` never blocks on the database. A thread flushes what has come together while the flush before it was being
    committed, and, while other jobs run, for some milliseconds more; so a lone outcome is written at once and a storm is
    written hundreds at a time. ``busy_for``: None while no job runs, else for how many seconds there is something to do
    that does not wait for an outcome. While the ledger does not answer, outcomes wait in memory and :attr:`healthy` is
    false: then the runtime begins nothing new. ``on_due`` is told when something that came of the outcomes may be
    dispatched (microseconds; the past: now).
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        busy_for: Callable[[], float | None] = lambda: None,
        on_due: Callable[[int], None] = lambda at: None,
    ) -> None:
        self._ledger = ledger
        self._busy_for = busy_for
        self._on_due = on_due
        self._pending: list[Outcome] = []
        self._condition = threading.Condition()
        self._stopping = False
        self._flushing = False
        self._reads = 0
        self._closer = Closer(ledger, on_due)
        self._awaited = False  # one of those that wait is awaited
        self._flush_s = 0.0  # how long the last flush took
        self._thread: threading.Thread | None = None
        self._log = get_logger("asynctask.recorder")
        self.healthy = True
        self.recorded = 0

    def start(self) -> None:
        """Starts the flushing thread."""
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def put(self, outcomes: Sequence[Outcome]) -> None:
        """Hands over outcomes; they are committed soon, and each one's ``then`` is called after that."""
        with self._condition:
            self._pending.extend(outcomes)
            # The flusher is told of the first and of a full batch; being woken for each would cost more than the flush.
            if len(self._pending) == len(outcomes) or len(self._pending) >= _MAX_BATCH:
                self._condition.notify_all()
            if not self._awaited:
                for each in outcomes:
                    if each.awaited:
                        self._awaited = True
                        self._condition.notify_all()
                        break

    @property
    def waiting(self) -> int:
        """Outcomes that are not committed yet."""
        with self._condition:
            return len(self._pending) + int(self._flushing)

    def drain(self, timeout: float) -> bool:
        """Waits until everything handed over is committed; False if that did not happen in time."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._pending and not self._flushing, timeout)

    def stop(self, timeout: float) -> bool:
        """Commits what is there and ends. Returns False if the ledger did not take everything in time."""
        drained = self.drain(timeout)
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
        return drained

    def _run(self) -> None:
        tries = 0
        while True:
            batch = self._take()
            if batch is None:
                self._closer.look()
                return
            try:
                begun = self._ledger.clock.monotonic()
                if batch:
                    self._flush_all(batch)
                    self._flush_s = self._ledger.clock.monotonic() - begun
                    tries, self.healthy = 0, True
                else:
                    self._closer.look_in_time()
            except Unavailable as error:
                self.healthy = False
                self._log.warning("ledger_away", error=str(error), outcomes=len(batch), tried=tries + 1)
                self._give_back(batch)
                if self._pause(_RETRY_S[min(tries, len(_RETRY_S) - 1)]):
                    return
                tries += 1

    def _flush_all(self, batch: Sequence[Outcome]) -> None:
        """Flushes a batch; where the ledger takes all but one of them, that one must not hold up the others for ever."""
        try:
            self.flush(batch)
        except Unavailable:
            raise
        except Exception:
            self._log.exception("flush_failed", outcomes=len(batch))
            for each in batch:
                self._flush_one(each)

    def _flush_one(self, each: Outcome) -> None:
        try:
            self.flush([each])
        except Unavailable:
            raise
        except Exception as error:
            if each.status is Status.WORKING:  # it did not begin, as far as the ledger goes; whoever waits must not hang
                if each.then is not None:
                    each.then(False)
                return
            # What it came to cannot be written as it is: that it ended, and that this is unknown, can.
            text = self._ledger.catalogue("discarded", f"its outcome could not be recorded ({type(error).__name__})")
            failure = Failure("unrecordable", text)
            ended = Outcome(
                each.event_id, each.attempt, Status.ERROR, Reason.DISCARDED, [Note("error", text)], None, failure
            )
            ended.then, ended.elsewhere = each.then, each.elsewhere
            self._flush_last_word(ended)

    def _flush_last_word(self, ended: Outcome) -> None:
        try:
            self.flush([ended])
        except Unavailable:
            raise
        except Exception:
            # Its row takes nothing at all. It stays unacknowledged, shown in the log; the thread goes on for the others.
            self._log.exception("outcome_not_recorded", event_id=ended.event_id, attempt=ended.attempt)

    def _take(self) -> list[Outcome] | None:
        """The next batch; an empty one where it is time to look whether Tasks are over, None at the end."""
        with self._condition:
            self._flushing = False
            self._condition.notify_all()
            if not self._condition.wait_for(lambda: self._pending or self._stopping, self._closer.until_look()):
                return []
            if not self._pending:
                return None
            if linger_s := self._linger():
                # Other jobs run and will end soon: one transaction for all of them instead of one each.
                self._condition.wait_for(lambda: self._awaited or self._is_enough(), linger_s - LINGER_S)
                self._condition.wait_for(self._is_enough, LINGER_S)
            batch, self._pending = self._pending[:_MAX_BATCH], self._pending[_MAX_BATCH:]
            self._awaited = self._awaited and any(each.awaited for each in self._pending)
            self._flushing = True
            return batch

    def _is_enough(self) -> bool:
        return len(self._pending) >= _MAX_BATCH or self._stopping

    def _linger(self) -> float:
        """For how long an outcome waits for others, in seconds; 0, or :data:`LINGER_S` and more.

        An idle thread may wait for what comes of it. So it is long only while there is more to do than it lasts.
        """
        busy_for = self._busy_for()
        if busy_for is None:
            return 0.0
        return max(LINGER_S, min(LONGEST_LINGER_S, _LINGERS * self._flush_s, 0.75 * busy_for))

    def _give_back(self, batch: list[Outcome]) -> None:
        with self._condition:
            self._pending[:0] = batch
            self._flushing = False

    def _pause(self, seconds: float) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self._stopping, seconds)

    def flush(self, batch: Sequence[Outcome]) -> None:
        """Commits a batch, then tells each outcome. Looks whether Tasks are over, unless that was done just now and will be
        done again in a moment. Raises LedgerUnavailable."""
        for wave in _waves(batch):
            ends, applied = self._record(wave)
            self.recorded += len(wave)
            lost = {each.change.event_id for each in applied if each.turn is None}
            for outcome_ in wave:
                if outcome_.then is not None:
                    outcome_.then(outcome_.event_id not in lost)
            of_ends = {end.record.task_id for end in ends}
            self.announce(applied, of_ends)
            self._closer.ended(of_ends | {each.record.task_id for each in applied if _ended(each) and each.record})
        if not self._pending and self._busy_for() is None:
            self._closer.look()
        else:
            self._closer.look_in_time()  # else with a later flush, or when it is time

    def _record(self, wave: Sequence[Outcome]) -> tuple[list[End], list[Applied]]:
        """What was taken as it had been seen, and what came of the others."""
        if self._reads == 0:
            try:
                return _record_once(self._ledger, wave)
            except SeenNoMore:
                self._reads = _READS
            except TransactionConflict:
                pass
        else:
            self._reads -= 1
            _forget_seen(wave)
        return _record(self._ledger, wave)

    def announce(self, applied: Sequence[Applied], ended: Iterable[int | None] = ()) -> None:
        """Tells whoever dispatches what committed changes, and ends of jobs of the Tasks ``ended``, left to dispatch."""
        if (at := ready.announce(self._ledger, applied, ended)) is not None:
            self._on_due(at)


def _record_once(ledger: Ledger, wave: Sequence[Outcome]) -> tuple[list[End], list[Applied]]:
    ends = [
        End(seen, ending(seen.row, each.status, each.reason), each.notes, each.failure, each.result, each.started_at)
        for each in wave
        if (seen := each.seen) is not None
    ]
    changes = [_change(ledger, each) for each in wave if each.seen is None] if len(ends) < len(wave) else []
    _forget_seen(wave)  # whatever comes of this try, another one reads them: it may have been written and not answered
    with ledger.database.write() as connection:
        return ends, apply(connection, ledger, changes, ends)


_record = repeatable(_record_once)


def _forget_seen(wave: Sequence[Outcome]) -> None:
    for each in wave:
        each.seen = None


def _waves(batch: Sequence[Outcome]) -> list[list[Outcome]]:
    """Outcomes in transactions such that no Event stands in one transaction twice; nearly always a single one."""
    if len({each.event_id for each in batch}) == len(batch):
        return [list(batch)]
    waves: list[list[Outcome]] = []
    turns: dict[int, int] = {}
    for each in batch:
        turn = turns.get(each.event_id, 0)
        turns[each.event_id] = turn + 1
        if turn == len(waves):
            waves.append([])
        waves[turn].append(each)
    return waves


def _ended(applied: Applied) -> bool:
    return applied.turn is not None and applied.turn.after.status not in OPEN


def _change(ledger: Ledger, each: Outcome) -> Change:
    values: dict[str, Any] = {}
    if each.result is not None:
        values["result"] = each.result
    if each.started_at is not None:
        values["started_at"] = each.started_at
    told = {Reason.CANCELLED: Note("cancelled", ledger.catalogue("cancelled"))} if _may_cancel(each) else None

    def decide(record: EventRecord) -> Turn | None:
        row = record.row
        if row.status not in (Status.ENQUEUE, Status.WORKING) or (row.attempt != each.attempt and not each.elsewhere):
            return None
        if record.started_at is not None:
            values.pop("started_at", None)
        turn = _turn(ledger, row, record.task_state, each)
        return held_elsewhere(turn) if turn is not None and each.elsewhere else turn

    return Change(each.event_id, decide, each.notes, each.failure, values, told)


def _may_cancel(each: Outcome) -> bool:
    """Whether its Task's cancel may be what comes of it: of what would run again, or did not run."""
    return (
        each.status in (Status.ENQUEUE, Status.CANCELLED) or each.retry_at is not None or each.reason is Reason.INTERRUPTED
    )


def _turn(ledger: Ledger, row: Row, state: str | None, each: Outcome) -> Turn | None:
    if each.status is Status.WORKING:
        if each.elsewhere and row.status is Status.WORKING:
            return take_over(row, ledger.identity)
        return working(row, ledger.identity) if row.status is Status.ENQUEUE else None
    if each.status is Status.CANCELLED:
        return cancel(row)
    if each.reason is Reason.GIVEN_BACK:
        return cancel(row) if state == State.CANCELLED else give_back(row, now=ledger.now())
    waits_again = each.retry_at is not None or each.reason is Reason.INTERRUPTED
    if waits_again and state == State.CANCELLED:
        return cancel(row)  # nothing of a cancelled Task starts again; what happened stands in the messages
    return outcome(row, each.status, each.reason, retry_at=each.retry_at, now=ledger.now())
