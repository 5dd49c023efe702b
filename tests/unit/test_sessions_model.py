"""Sessions under random submits, outcomes, retries, pauses and cancels, on a real ledger: the steps of a process that
borrows without its threads, a clock that only the test moves, and no repair by maintenance."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from support.drawn import examples

from asynctask.clock import SECOND
from asynctask.core.states import Reason
from asynctask.database import schema
from asynctask.database.engine import Database
from asynctask.errors import Conflict
from asynctask.ledger import control, lending, sessions
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, NewItem
from asynctask.ledger.lending import Job
from asynctask.ledger.recorder import Kind, Outcome, Recorder
from asynctask.ledger.tasks import NewTask, Throttle, try_close
from asynctask.runtime.loans import OwnClaim, OwnLoan, OwnLoans

SESSIONS = ("a", "b", "c", None)
PICK = st.integers(0, 7)
_TEMPLATE: list[Path] = []
_SHM = Path("/dev/shm")
MEMORY = str(_SHM) if _SHM.is_dir() else None  # nobody pulls the plug here: commits need not reach a disk


class Hands:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.at = 1_000_000 * SECOND

    def now(self) -> int:
        self.at += 1
        return self.at

    def monotonic(self) -> float:
        return self.at / SECOND

    def boottime(self) -> int:
        return self.at


def template() -> Path:
    if not _TEMPLATE:
        path = Path(tempfile.mkdtemp(prefix="sessions-", dir=MEMORY)) / "template.db"
        database = Database(f"sqlite:///{path}")
        schema.upgrade(database)
        database.close()
        _TEMPLATE.append(path)
    return _TEMPLATE[0]


class ReadyJobs(RuleBasedStateMachine):
    """Some Tasks in three lines, and some without a session."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="lines-", dir=MEMORY))
        shutil.copy(template(), self.folder / "a.db")
        self.clock = Hands()
        self.ledger = Ledger(Database(f"sqlite:///{self.folder}/a.db"), clock=self.clock)
        self.recorder = Recorder(self.ledger)
        self.tasks: list[int] = []
        self.loans = OwnLoans()
        self.flying: list[tuple[Job, OwnLoan | OwnClaim]] = []
        self.order: list[tuple[int, dict[str, Any]]] = []

    @initialize(sessions=st.lists(st.sampled_from(SESSIONS), min_size=4, max_size=8), count=st.integers(1, 3))
    def some_wait_already(self, sessions: list[str | None], count: int) -> None:
        for session in sessions:
            self.submit(session, count, 1, 1)

    # -- looking

    def rows(self) -> list[dict[str, Any]]:
        with self.ledger.database.read() as connection:
            return [task_rows.get(connection, task_id) for task_id in self.tasks]

    def one(self, pick: int, wanted: Callable[[dict[str, Any]], bool]) -> int | None:
        found = [row["id"] for row in self.rows() if wanted(row)]
        return found[pick % len(found)] if found else None

    # -- people

    @rule(session=st.sampled_from(SESSIONS), count=st.integers(0, 3), priority=st.sampled_from((1, 1, 2)), parallel=PICK)
    def submit(self, session: str | None, count: int, priority: int, parallel: int) -> None:
        new = NewTask("w", "default", priority, session=session, throttle=Throttle(1 if parallel > 5 else None))
        task_id = task_rows.create(self.ledger, [task_rows.First(new)], lease_s=1e6)[0].task_id
        self.tasks.append(task_id)
        if count:
            items = [NewItem("{}", n) for n in range(count)]
            task_rows.add_slice(self.ledger, task_id, items, [], after=0, cursor=count, lease_s=1e6)
        if parallel % 2:
            task_rows.end_split(self.ledger, task_id, Reason.SEALED)

    @rule(pick=PICK)
    def seal(self, pick: int) -> None:
        task_id = self.one(pick, lambda row: row["split_state"] == "splitting")
        if task_id is not None:
            task_rows.end_split(self.ledger, task_id, Reason.SEALED)
            try_close(self.ledger, task_id)

    @rule(pick=PICK)
    def pause(self, pick: int) -> None:
        task_id = self.one(pick, lambda row: row["state"] in ("splitting", "running"))
        if task_id is not None:
            control.pause(self.ledger, task_id)

    @rule(pick=PICK)
    def resume(self, pick: int) -> None:
        task_id = self.one(pick, lambda row: row["state"] == "paused")
        if task_id is not None:
            control.resume(self.ledger, task_id)

    @rule(pick=PICK, priority=st.integers(1, 3))
    def change_priority(self, pick: int, priority: int) -> None:
        task_id = self.one(pick, lambda row: row["finished_at"] is None)
        if task_id is not None:
            control.update(self.ledger, task_id, {"priority": priority})

    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        task_id = self.one(pick, lambda row: row["state"] in ("splitting", "running", "paused"))
        if task_id is not None:
            control.cancel_task(self.ledger, task_id)
            self.turn(task_id)
            try_close(self.ledger, task_id)

    @rule(pick=PICK)
    def retry(self, pick: int) -> None:
        task_id = self.one(pick, lambda row: row["state"] in ("running", "finished"))
        if task_id is not None:
            try:
                control.retry(self.ledger, task_id)
            except Conflict:
                return
            self.turn(task_id)
            try_close(self.ledger, task_id)

    def turn(self, task_id: int) -> None:
        while control.change_rows(self.ledger, task_id):
            pass

    # -- a process that borrows

    @rule(count=st.integers(1, 4))
    def borrow(self, count: int) -> None:
        ledger = self.ledger
        lending.rejoin(ledger)
        with ledger.database.read() as connection:
            found = lending.pick(connection, ledger, ["default"])
        assert [each.priority for each in found] == sorted(each.priority for each in found)
        for each in found:
            borrowed = lending.borrow(ledger, each, count)
            for loan, jobs in borrowed.loans:
                own = self.loans.add(loan, len(jobs))
                self.flying += [(job, own) for job in jobs]
            self.flying += [(job, self.loans.claim(job.event_id, job.attempt)) for job in borrowed.claimed]
        lending.end_empty(ledger, self.loans.take_empty())

    @rule(fate=st.sampled_from(("finish", "error", "again")))
    def all_end(self, fate: str) -> None:
        while self.flying:
            self.outcome(0, fate)

    @rule(pick=PICK, fate=st.sampled_from(("finish", "finish", "error", "again", "back")))
    def outcome(self, pick: int, fate: str) -> None:
        if not self.flying:
            return
        job, own = self.flying.pop(pick % len(self.flying))
        fates = {
            "finish": Kind.FINISH,
            "error": Kind.RAISED,
            "again": Kind.RETRY,
            "back": Kind.GIVEN_BACK,
        }
        retry_at = self.clock.now() + 60 * SECOND if fate == "again" else None
        self.recorder.flush([Outcome(job.event_id, job.attempt, fates[fate], retry_at=retry_at, loan=own)])

    @rule(seconds=st.sampled_from((1, 61)))
    def time_passes(self, seconds: int) -> None:
        self.clock.at += seconds * SECOND

    # -- what must hold

    @invariant()
    def no_two_of_a_session_have_jobs_out_and_nobody_waits_for_nobody(self) -> None:
        rows = {row["id"]: row for row in self.rows()}
        out: dict[str, set[int | None]] = {}
        for job, _ in self.flying:
            key = rows[job.task_id]["session_key"]
            if key is not None:
                out.setdefault(key, set()).add(job.task_id)
        assert all(len(tasks) == 1 for tasks in out.values()), out
        for row in rows.values():
            if row["session_key"] is None:
                continue
            holder = [each for each in rows.values() if each["session_holder"] == row["session_key"]]
            assert len(holder) <= 1
            assert row["session_waits"] is None or holder, "somebody stands in line and nobody holds the session"
            assert row["finished_at"] is None or row["session_holder"] is None
            if out.get(row["session_key"]):
                assert [each["id"] for each in holder] == list(out[row["session_key"]])

    @invariant()
    def whoever_took_a_session_came_first(self) -> None:
        now = {row["id"]: row for row in self.rows()}
        before = dict(self.order)
        for task_id, row in now.items():
            took = row["session_holder"] is not None and task_id in before and before[task_id]["session_holder"] is None
            if took and before[task_id]["session_waits"] is not None:
                place = (before[task_id]["session_waits"], before[task_id]["session_position"], task_id)
                for other, was in before.items():
                    stands = now[other]["session_waits"] is not None and was["session_waits"] is not None
                    if other != task_id and was["session_key"] == row["session_key"] and stands:
                        moved = now[other]["priority"] != was["priority"] or row["priority"] != before[task_id]["priority"]
                        assert moved or place < (was["session_waits"], was["session_position"], other)
        self.order = list(now.items())

    def teardown(self) -> None:
        """Left to itself, everything comes to its end: nobody starves."""
        try:
            for row in self.rows():
                if row["state"] == "paused":
                    control.resume(self.ledger, row["id"])
                if row["split_state"] == "splitting":
                    task_rows.end_split(self.ledger, row["id"], Reason.SEALED)
                    try_close(self.ledger, row["id"])  # as whoever seals it does: all of it may be over already
            for _ in range(40 * (1 + len(self.tasks))):
                if all(row["finished_at"] is not None for row in self.rows()):
                    break
                self.clock.at += 61 * SECOND
                self.borrow(4)
                while self.flying:
                    self.outcome(0, "finish")
                    self.no_two_of_a_session_have_jobs_out_and_nobody_waits_for_nobody()
            left = [row for row in self.rows() if row["finished_at"] is None]
            assert not left, [(row["id"], row["state"], row["ready"], row["session_waits"]) for row in left]
        finally:
            self.ledger.database.close()
            shutil.rmtree(self.folder)


def test_tasks_of_a_session_go_one_after_the_other_and_none_starves_whatever_happens() -> None:
    busy = [HealthCheck.too_slow]  # that says something of a busy machine, not of sessions
    profile = settings(max_examples=examples(6, 12), stateful_step_count=30, suppress_health_check=busy)
    run_state_machine_as_test(ReadyJobs, settings=profile)
    shutil.rmtree(_TEMPLATE.pop().parent)


def test_sessions_of_different_owners_are_different() -> None:
    assert sessions.key_of("ann", "import") != sessions.key_of("bob", "import")
    assert sessions.key_of("a", "bc") != sessions.key_of("ab", "c")
    assert sessions.key_of("ann", "import") == sessions.key_of("ann", "import")
    assert sessions.key_of("ann", None) is None
