"""The bookkeeping core under interleavings, crashes and lost answers: see `bookkeeping_model` for the world it lives in.

A failure of `test_a_random_life_keeps_every_promise` names its seed: `walk(seed)` of `bookkeeping_invariants` replays it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import bookkeeping_invariants
import pytest
from bookkeeping_invariants import IDLE, PATH, TROUBLE, UNTIL_DONE, advance, check, drain, walk
from bookkeeping_model import QUEUE, Copy, Process, Task, World
from bookkeeping_steps import STEPS, can, do
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from support.drawn import examples

from asynctask.core import transitions as core
from asynctask.core.states import State, Status
from asynctask.core.transitions import BLOCKED, OUTSIDE, Delta

# -- Interleavings -------------------------------------------------------------------------------------------------------

PICK, VARIANT = st.integers(0, 7), st.integers(0, 5)


class LifeOfTheWorld(RuleBasedStateMachine):
    """One rule per step that gets work on (added below), all invariants after each, and the fair end at teardown."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.whole = True

    def take(self, name: str, pick: int, k: int) -> None:
        self.whole = False  # a broken world is not drained: that would hide what broke it
        advance(self.world, name, pick, k)
        self.whole = True

    @initialize(kind=st.integers(0, 23), rows=VARIANT)
    def a_task_and_a_worker(self, kind: int, rows: int) -> None:
        self.take("submit", 0, kind)
        self.take("submit_slice", 1, rows)
        self.take("start_process", 0, 0)

    @rule(name=st.sampled_from(IDLE), pick=PICK, k=VARIANT)
    def time_goes_by(self, name: str, pick: int, k: int) -> None:
        self.take(name, pick, k)

    @rule(name=st.sampled_from(TROUBLE), pick=PICK, k=VARIANT)
    def trouble_comes(self, name: str, pick: int, k: int) -> None:
        """Deaths, losses and people: one rule for all, or most lives would be over before their work began."""
        self.take(name, pick, k)

    @rule(times=st.integers(1, 3), k=VARIANT)
    def goes_on_undisturbed(self, times: int, k: int) -> None:
        """What ordinary running does, so that lives get far: each step of the fair schedule once."""
        for name in ("check_read", "check_act", "ask_places", "lease_places", *UNTIL_DONE) * times:
            self.take(name, 0, k)

    @invariant()
    def keeps_its_promises(self) -> None:
        if self.whole:
            check(self.world)

    def teardown(self) -> None:
        if self.whole:
            drain(self.world)


def _rule(name: str) -> Callable[..., None]:
    def take(self: LifeOfTheWorld, pick: int, k: int) -> None:
        self.take(name, pick, k)

    take.__name__ = name
    ruled: Callable[..., None] = precondition(lambda self: can(self.world, name))(rule(pick=PICK, k=VARIANT)(take))
    return ruled


for _name in PATH:
    setattr(LifeOfTheWorld, _name, _rule(_name))

PROFILE = settings(
    max_examples=examples(12, 400),
    stateful_step_count=60,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],  # that says something of a busy machine, not of the model
)


def test_every_interleaving_keeps_every_promise() -> None:
    run_state_machine_as_test(LifeOfTheWorld, settings=PROFILE)


HARD_LIVES = (139, 1042, 1063, 1093, 1152)
"""In them a round is given back, an engine begins before the hand-over, an answer is lost, a program outside goes back."""


@pytest.mark.parametrize("seed", [*range(examples(12, 250)), *HARD_LIVES])
def test_a_known_life_keeps_every_promise(seed: int) -> None:
    walk(seed)


def test_a_random_life_keeps_every_promise() -> None:
    for seed in random.SystemRandom().sample(range(10**9), examples(8, 100)):
        print(f"walk({seed})")  # shown when it fails
        walk(seed)


# -- The classic traps ---------------------------------------------------------------------------------------------------

KINDS = ("plain", "rounds", "foreign", "keys", "session")


class Story(World):
    """A world told step by step. Every step must be possible and is followed by every check."""

    def tell(self, *names: str, k: int = 0, pick: int = 0) -> None:
        for name in names:
            assert advance(self, name, pick, k), f"{name} cannot happen here"

    def by(self, who: Process | Task | tuple[object, ...], *names: str, k: int = 0) -> None:
        """The same, of the choices that begin with this process, Task or pair."""
        for name in names:
            options = list(STEPS[name].choices(self))
            found = [n for n, each in enumerate(options) if each is who or is_of(each, who)]
            assert found, f"{name} cannot happen there"
            self.tell(name, k=k, pick=found[0])

    def task_of(self, rows: int, parallel: int | None = None, kind: str = "plain") -> Task:
        """A sealed, running Task of jobs of one item each."""
        self.tell("submit", k={2: 0, 1: 1, 3: 2, None: 3}[parallel] + 4 * KINDS.index(kind))
        task = self.tasks[-1]
        self.by(task, "submit_slice", k=rows - 1)
        self.by(task, "seal")
        for seq, row in enumerate(task.stored):
            task.counts.add(core.difference(row, row._replace(items=1)))
            task.stored[seq] = row._replace(items=1)
        return task

    def process(self) -> Process:
        self.tell("start_process")
        return self.processes[-1]

    def lease(self, process: Process) -> None:
        self.by(process, "ask_places", "lease_places")

    def ready(self, process: Process, count: int = 1, k: int | None = None) -> None:
        """A process borrows, reads what it got, and begins so many."""
        self.by(process, "borrow", k=count - 1 if k is None else k)
        if any(part.left is None for part in process.parts.values()):
            self.by(process, "read_range")
        for _ in range(count):
            self.by(process, "begin")

    def recover(self, process: Process) -> None:
        for name in ("recover_loan", "recover_rows"):
            while any(each is process or is_of(each, process) for each in STEPS[name].choices(self)):
                self.by(process, name)
        self.by(process, "recover_end")

    def close_all(self) -> None:
        self.tell("close_look", "close", "call_back")


def is_of(choice: object, who: object) -> bool:
    if isinstance(who, tuple):
        return isinstance(choice, tuple) and all(a is b or a == b for a, b in zip(choice, who, strict=False))
    return isinstance(choice, tuple) and choice[0] is who


CHECK = ("check_read", "check_act")
RECORD = ("flush", "announce")
TO_QUEUE = ("borrow_for_queue", "read_range", "push", "hand_over")
BEGIN = ("fetch", "begin_read", "begin_act")


# The six ways in which the prototype of the lending broke; each is told with what keeps it from happening here.


def tell_of_a_dead_holder_whose_row_another_runs_again() -> None:
    w = Story()
    task, a, b = w.task_of(3), w.process(), w.process()
    w.ready(a, 3)
    w.tell("finish", k=1)  # the first raised, and waits for its retry
    w.by(a, *RECORD)
    w.tell("tick", k=1)
    w.by(b, "borrow", "begin")
    assert task.row(0).process == b.name
    w.by(a, "kill")
    w.recover(a)
    assert (task.row(0).process, task.row(0).attempt) == (b.name, 2), "it lies in the dead one's loan, and is another's"
    assert [row.attempt for row in task.rows()[1:]] == [2, 2]
    drain(w)


def tell_of_a_condemned_process_that_gives_back() -> None:
    w = Story()
    task, a = w.task_of(4), w.process()
    w.ready(a, 1, k=3)
    w.by(a, "check_read")
    w.by(a, "check_act", k=3)  # it is about to return what it has not begun
    w.by(a, "stall")
    w.recover(a)
    w.by(a, "return_part")
    assert task.loans == [], "what recovery made due is not free as well"
    assert [row.due_at for row in task.rows()] == [w.now] * 4
    drain(w)


def tell_of_a_row_that_is_due_and_in_a_free_loan() -> None:
    w = Story()
    task, a, b, c = w.task_of(4), w.process(), w.process(), w.process()
    w.by(a, "borrow", k=3)
    w.by(a, "read_range", "check_read")
    w.by(a, "check_act", k=3)
    w.by(a, "return_part", "announce")
    w.tell("stop_job", pick=2)
    w.tell("start_job")
    assert (task.row(2).due_at, task.loans[0].process) == (w.now, None)
    w.by(b, "borrow", k=3)
    w.by(b, "read_range")
    assert sorted(b.line) == [Copy(1, 0, 1), Copy(1, 1, 1), Copy(1, 2, 3)], "claimed once, and three of the range"
    if can(w, "borrow"):
        w.by(c, "borrow", k=3)
        w.by(c, "read_range")
    assert not set(b.line) & set(c.line)
    drain(w)


def tell_of_a_limit_that_was_lowered_while_its_jobs_run() -> None:
    w = Story()
    task, a, b = w.task_of(4, parallel=3), w.process(), w.process()
    w.by(a, "borrow", k=2)
    w.by(a, "read_range")
    w.lease(a)
    for _ in range(3):
        w.by(a, "begin")
    w.by(task, "set_parallel", k=0)  # one
    w.tell("tick", k=3)
    w.by(a, *CHECK)
    w.lease(a)
    assert task.places == {a.name: 3}, "what runs keeps its places"
    w.by(task, "set_parallel", k=2)  # three
    b.limits[task.id] = 3
    w.lease(b)
    assert task.places.get(b.name, 0) == 0
    drain(w)


def tell_of_two_processes_whose_limit_was_lowered() -> None:
    w = Story()
    task, a, b = w.task_of(4, parallel=2), w.process(), w.process()
    for process in (a, b):
        w.by(process, "borrow", k=1)
        w.by(process, "read_range")
    w.lease(b)
    w.by(a, "ask_places", k=1)  # one is enough
    w.by(a, "lease_places")
    w.lease(b)
    assert task.places == {a.name: 1, b.name: 1}
    w.by(b, "begin")
    w.by(task, "set_parallel", k=0)  # one
    w.tell("tick")
    for process in (a, b):
        w.by(process, *CHECK)
        w.lease(process)
    assert task.places == {a.name: 0, b.name: 1}, "whoever runs nothing gives up, and does not vanish: it knows the limit"
    drain(w)


def tell_of_two_holders_of_which_one_has_the_only_place() -> None:
    w = Story()
    task, a, b = w.task_of(2, parallel=1), w.process(), w.process()
    for process in (a, b):
        w.by(process, "borrow")
        w.by(process, "read_range")
    w.lease(b)  # nothing, for the other performs without places, as far as it knows
    w.lease(a)
    assert task.places == {a.name: 1, b.name: 0}
    w.by(a, "begin", "finish", *RECORD)
    w.lease(a)
    w.by(b, *CHECK)
    w.lease(b)
    assert task.places.get(b.name) == 1, "the row of no places does not keep the other from the one that is free"
    drain(w)


def tell_of_a_loan_of_rows_that_ended() -> None:
    w = Story()
    task, a = w.task_of(2), w.process()
    w.tell("cancel_job", "cancel_job")
    w.by(a, "borrow", k=1)
    w.by(a, "read_range")
    assert (a.line, len(task.loans)) == ([], 1)
    w.by(a, "flush")
    assert task.loans == []
    drain(w)


def tell_of_a_row_that_ended_between_the_borrow_and_its_read() -> None:
    w = Story()
    task, a = w.task_of(3), w.process()
    w.by(a, "borrow", k=2)
    w.tell("record_outside", pick=1, k=2)
    w.by(a, "read_range")
    assert a.line == [Copy(1, 0, 1), Copy(1, 2, 1)], "the range is read after the commit of the borrow"
    assert task.row(1).status is Status.FINISH
    drain(w)


# Others


def tell_of_a_borrow_whose_answer_was_lost() -> None:
    w = Story()
    task, a = w.task_of(2), w.process()
    w.by(a, "borrow", k=5)
    assert (a.parts, task.loans[0].process) == ({}, a.name)
    w.by(a, *CHECK, "return_part", "announce")
    assert task.loans[0].process is None
    drain(w)


def tell_of_a_claim_whose_answer_was_lost() -> None:
    w = Story()
    a = w.process()
    w.tell("submit_slice")
    w.by(a, "borrow", k=4)
    assert (a.claims, w.tasks[0].row(0).process) == (set(), a.name)
    w.by(a, *CHECK, *RECORD)
    assert (w.tasks[0].row(0).process, w.tasks[0].row(0).due_at) == (None, w.now)
    drain(w)


def tell_of_a_give_back_that_was_done_twice() -> None:
    w = Story()
    task, a = w.task_of(4), w.process()
    w.ready(a, 2, k=3)
    w.by(a, "check_read")
    w.by(a, "check_act", k=3)
    w.by(a, "return_part", k=1)
    w.by(a, *CHECK)
    assert [(loan.low, loan.high, loan.process) for loan in task.loans] == [(0, 2, a.name), (2, 4, None)]
    assert a.running == [Copy(1, 0, 1), Copy(1, 1, 1)], "the head of the loan is kept"
    drain(w)


def tell_of_a_flush_between_the_check_and_the_give_back() -> None:
    w = Story()
    task, a = w.task_of(3), w.process()
    w.ready(a, 1, k=2)
    w.by(a, "finish", "check_read")
    w.by(a, "check_act", k=3)
    w.by(a, "flush")
    assert len(task.loans) == 1, "the tail counts until it is given back"
    w.by(a, "return_part")
    w.by(a, "flush")
    assert [(loan.low, loan.high, loan.process) for loan in task.loans] == [(1, 3, None)]
    drain(w)


def tell_of_a_free_loan_that_is_larger_than_what_is_wanted() -> None:
    w = Story()
    task, a, b = w.task_of(4), w.process(), w.process()
    w.by(a, "borrow", k=3)
    w.by(a, "kill")
    w.by(a, "recover_loan", k=1)
    assert (task.loans[0].low, task.row(0).due_at) == (1, w.now), "recovered in parts"
    w.recover(a)
    w.by(b, "borrow", k=3)
    assert task.row(0).process == b.name
    drain(w)


def tell_of_a_process_that_leaves_a_part_behind() -> None:
    w = Story()
    task, a, b = w.task_of(4), w.process(), w.process()
    w.ready(a, 1, k=3)
    w.by(a, "shut_down", "flush", "leave")
    assert [(loan.low, loan.high, loan.process) for loan in task.loans] == [(0, 4, None)]
    assert task.row(0).due_at == w.now
    w.by(a, "announce")
    w.by(b, "borrow", k=1)
    w.by(b, "read_range")
    assert sorted((loan.low, loan.high, loan.process) for loan in task.loans) == [(0, 1, b.name), (1, 4, None)]
    assert b.line == [Copy(1, 0, 2)], "claimed as due; the range that has it as well gives it to nobody again"
    drain(w)


def tell_of_a_give_back_that_nobody_settled() -> None:
    w = Story()
    task, a = w.task_of(3), w.process()
    w.ready(a, 1, k=2)
    w.tell("finish", k=1)
    w.by(a, *RECORD)
    w.by(a, "check_read")
    w.by(a, "check_act", k=3)
    w.by(a, "return_part", "kill")
    assert task.hints.ready is None, "its retry is due later, and the index knows of nothing else"
    w.tell("repair")
    assert task.hints.ready is not None
    drain(w)


def tell_of_a_late_writer() -> None:
    w = Story()
    task, a, b = w.task_of(1), w.process(), w.process()
    w.ready(a)
    w.by(a, "stall")
    w.recover(a)
    w.tell("finish", k=2)  # the first process says failed, and has not flushed it yet
    w.by(b, "borrow", "begin", "record_working", "finish", "flush")
    w.by(a, "flush")
    assert (task.row(0).status, task.counts.failed) == (Status.FINISH, 0)
    drain(w)


def tell_of_a_recovery_done_twice() -> None:
    w = Story()
    task, a = w.task_of(2), w.process()
    w.ready(a, 2)
    w.tell("record_working")
    w.by(a, "kill")
    w.by(a, "recover_rows", "recover_loan")
    assert not can(w, "recover_rows"), "a second one finds nothing"
    assert [(r.attempt, r.deaths, r.due_at, r.watched) for r in task.rows()] == [(2, 1, w.now, True), (2, 0, w.now, True)]
    drain(w)


def tell_of_a_recovery_that_broke_off_halfway() -> None:
    w = Story()
    task, a, b = w.task_of(3), w.process(), w.process()
    w.by(a, "borrow", k=2)
    w.by(a, "kill")
    w.by(a, "recover_loan", k=1)
    w.by(b, "borrow")
    assert [row.process for row in task.rows()] == [b.name, None, None]
    w.recover(a)
    assert [row.attempt for row in task.rows()] == [2, 2, 2]
    drain(w)


def tell_of_a_borrow_that_commits_after_the_recovery() -> None:
    w = Story()
    task, a = w.task_of(1), w.process()
    w.by(a, "kill")
    w.recover(a)
    w.by(a, "late_borrow")
    assert task.loans[0].process == a.name
    w.by(a, "recover_loan")
    assert (task.loans, task.row(0).due_at) == ([], w.now)
    drain(w)


def tell_of_a_process_struck_off_after_it_came_back() -> None:
    w = Story()
    task, a = w.task_of(1), w.process()
    w.by(a, "stall")
    w.recover(a)
    w.by(a, "borrow", "read_range", "beat", "leave", "announce")
    assert task.loans[0].process is None
    drain(w)


def tell_of_a_held_interpreter() -> None:
    w = Story()
    task, a, b = w.task_of(4, parallel=3), w.process(), w.process()
    w.by(a, "borrow", k=3)
    w.by(a, "read_range")
    w.lease(a)
    w.by(a, "begin", "begin", "record_working", "stall")
    w.tell("tick", k=3)
    w.by(a, "take_held")
    assert [(row.attempt, row.process) for row in task.rows()] == [(1, a.name), (2, None), (2, None), (2, None)]
    assert task.places == {a.name: 1}
    w.by(a, "beat")
    w.by(b, "borrow", k=3)
    w.lease(b)
    w.by(b, "begin", "begin")
    assert not any(each[0] is a for each in STEPS["begin"].choices(w)), "what it knew is too old"
    w.by(a, *CHECK)
    assert (a.line, a.places) == ([], {task.id: 1})
    drain(w)


def tell_of_a_limit_where_there_was_none() -> None:
    w = Story()
    task, a, b = w.task_of(4), w.process(), w.process()
    w.ready(a, 2, k=1)
    w.by(b, "borrow")
    w.by(b, "read_range")
    w.by(task, "set_parallel", k=2)  # three
    w.by(b, *CHECK)
    w.lease(b)
    assert task.places == {b.name: 0}, "somebody performs jobs without places"
    w.by(a, *CHECK)
    w.lease(a)
    w.lease(b)
    assert task.places == {a.name: 2, b.name: 1}
    drain(w)


def tell_of_a_limit_where_another_runs_what_it_claimed() -> None:
    w = Story()
    task, a, b = w.task_of(4), w.process(), w.process()
    w.ready(a, 2, k=1)
    w.tell("finish", k=1)
    w.tell("finish", k=1)
    w.by(a, *RECORD)
    w.tell("tick", k=1)
    w.by(a, "borrow", k=1)
    w.by(a, "begin", "begin")
    assert not any(loan.process == a.name for loan in task.loans), "its jobs are claims; no loan names it"
    w.by(b, "borrow")
    w.by(b, "read_range")
    w.by(task, "set_parallel", k=1)  # two
    w.by(b, *CHECK)
    w.lease(b)
    assert task.places == {b.name: 0}
    drain(w)


def tell_of_a_limit_that_was_lifted_and_set_again() -> None:
    w = Story()
    task, a, b = w.task_of(4, parallel=1), w.process(), w.process()
    w.by(a, "borrow", k=2)
    w.by(a, "read_range")
    w.lease(a)
    w.by(task, "set_parallel", k=3)  # none
    w.by(a, *CHECK)
    w.by(a, "begin")
    assert not any(each[0] is a for each in STEPS["begin"].choices(w)), "its row of one place still stands"
    w.lease(a)
    assert task.places == {}
    w.by(a, "begin", "begin")
    w.by(task, "set_parallel", k=2)  # three
    w.by(b, "borrow")
    w.by(b, "read_range")
    w.lease(b)
    assert task.places == {b.name: 0}
    drain(w)


def tell_of_a_lease_of_places_under_way() -> None:
    w = Story()
    task, a = w.task_of(4, parallel=3), w.process()
    w.by(a, "borrow", k=2)
    w.by(a, "read_range")
    w.lease(a)
    w.by(a, "begin")
    w.by(task, "set_parallel", k=1)  # two
    w.by(a, "ask_places")
    assert not any(each[0] is a for each in STEPS["begin"].choices(w)), "until the answer nothing more begins"
    w.by(a, "lease_places", k=1)  # the answer is lost
    assert (task.places, a.places) == ({a.name: 2}, {task.id: 1})
    assert not any(each[0] is a for each in STEPS["begin"].choices(w)), "it has two, and knows of one"
    drain(w)


def tell_of_a_pause_and_a_resume() -> None:
    w = Story()
    task, a = w.task_of(4), w.process()
    w.ready(a, 1, k=3)
    w.by(task, "pause")
    w.by(a, *CHECK, "return_part", "announce")
    assert [(loan.low, loan.high, loan.process) for loan in task.loans] == [(0, 1, a.name), (1, 4, None)]
    assert [row.attempt for row in task.rows()] == [1] * 4, "no Event is written"
    assert not can(w, "borrow")
    w.by(task, "resume")
    w.by(a, "borrow", k=3)
    drain(w)


def tell_of_a_pause_that_nobody_checked() -> None:
    w = Story()
    task, a = w.task_of(2), w.process()
    w.by(a, "borrow", k=1)
    w.by(a, "read_range")
    w.by(task, "pause")
    w.tell("tick", k=1)
    assert not can(w, "begin"), "what it knows is too old"
    drain(w)


def tell_of_a_cancel_that_the_holder_carries_out() -> None:
    w = Story()
    task, a = w.task_of(4), w.process()
    w.ready(a, 1, k=2)
    w.by(task, "cancel")
    w.by(task, "change_rows", k=5)
    assert [row.status for row in task.rows()] == [Status.ENQUEUE] * 3 + [Status.CANCELLED]
    w.by(a, *CHECK)
    w.tell("finish")
    w.by(a, *RECORD)
    assert [row.status for row in task.rows()] == [Status.FINISH] + [Status.CANCELLED] * 3
    assert task.loans == []
    w.tell("close_look", "close")
    drain(w)


def tell_of_a_part_given_back_after_its_cancel_went_by() -> None:
    w = Story()
    task, a = w.task_of(2), w.process()
    w.by(a, "borrow", k=1)
    w.by(a, "read_range")
    w.by(task, "pause")
    w.by(a, *CHECK)
    w.by(task, "cancel", "change_rows", "change_rows")
    assert task.row(0).status is Status.ENQUEUE, "its process may be about to begin it"
    w.by(a, "return_part")
    w.by(task, "cancel_again", "change_rows", "change_rows")
    w.tell("close_look", "close")
    drain(w)


def tell_of_a_job_interrupted_after_its_cancel_went_by() -> None:
    w = Story()
    task, a = w.task_of(1), w.process()
    w.ready(a)
    w.by(task, "cancel", "change_rows")
    w.by(a, "shut_down", "flush")
    assert task.row(0).due_at == w.now
    w.by(task, "cancel_again", "change_rows")
    w.tell("close_look", "close")
    assert task.row(0).status is Status.CANCELLED
    drain(w)


def tell_of_a_stop_of_a_row_on_loan() -> None:
    w = Story()
    task, a = w.task_of(2), w.process()
    w.ready(a, 1, k=1)
    w.tell("stop_job", pick=1)
    assert (task.row(1).status, task.row(1).stopping, task.loans[0].asked) == (Status.ENQUEUE, True, True)
    assert not can(w, "cancel_job"), "a delete of what a process holds is refused"
    w.by(a, *CHECK, "flush")
    assert task.row(1).status is Status.STOPPED
    drain(w)


def tell_of_a_stopped_row_that_the_pointer_had_not_reached() -> None:
    w = Story()
    task, a = w.task_of(2), w.process()
    w.tell("stop_job", pick=1)
    w.tell("start_job")
    assert task.row(1).due_at is None
    w.ready(a, 2)
    assert a.running == [Copy(1, 0, 1), Copy(1, 1, 3)]
    drain(w)


def tell_of_a_program_outside_that_takes_a_job_and_gives_it_back() -> None:
    w = Story()
    task, a = w.task_of(2), w.process()
    w.tell("record_outside")
    assert task.row(0).process == OUTSIDE
    w.by(a, "borrow", k=1)
    w.by(a, "read_range")
    assert a.line == [Copy(1, 1, 1)]
    w.by(a, "begin", "finish", *RECORD)
    assert task.loans == []
    w.tell("end_outside", k=1)
    assert (task.row(0).due_at, task.row(0).attempt) == (w.now, 2), "its loan is over: only a mark can lead to it"
    drain(w)


def tell_of_a_job_on_loan_that_was_recorded_from_outside() -> None:
    w = Story()
    task, a, b = w.task_of(2), w.process(), w.process()
    w.by(a, "borrow", k=1)
    w.by(a, "read_range")
    w.tell("record_outside", pick=1)
    assert (task.row(1).status, task.row(1).process) == (Status.WORKING, None)
    w.by(a, "check_read")
    w.by(a, "check_act", k=3)
    w.by(a, "return_part", "announce")
    w.by(b, "borrow", k=1)
    w.by(b, "read_range")
    assert b.line == [Copy(1, 0, 1), Copy(1, 1, 1)], "whoever has the loan has it"
    drain(w)


def tell_of_a_retry_that_waits_and_is_recorded_from_outside() -> None:
    w = Story()
    task, a = w.task_of(2), w.process()
    w.ready(a, 2)
    w.tell("finish", k=1)
    w.by(a, *RECORD)
    w.tell("record_outside")
    assert task.row(0).process == OUTSIDE, "it lies in a loan, and is not the holder's any more"
    w.by(a, "finish", *RECORD)
    w.tell("end_outside", k=1)
    drain(w)


def tell_of_an_explicit_retry_within_a_loan() -> None:
    w = Story()
    task, a, b = w.task_of(2), w.process(), w.process()
    w.ready(a, 2)
    w.tell("finish", k=3)
    w.by(a, *RECORD)
    w.by(task, "retry", "change_rows", "change_rows")
    assert (task.row(0).due_at, len(task.loans)) == (w.now, 1)
    w.by(b, "borrow", "begin")
    w.by(a, "kill")
    w.recover(a)
    assert (task.row(0).process, task.row(0).attempt) == (b.name, 2)
    drain(w)
    assert list(task.closes) == [2]


def tell_of_a_close_that_races_a_retry() -> None:
    w = Story()
    task, a = w.task_of(1), w.process()
    w.ready(a)
    w.tell("finish", k=2)
    w.by(a, *RECORD)
    w.tell("close_look", "retry", "close")
    assert task.closes == {}
    assert not core.may_close(State.RUNNING, True, True, Delta()), "while rows are being turned nothing closes"
    assert not can(w, "close_look")
    drain(w)
    assert task.closes == {2: 1}


def tell_of_a_job_that_kills_its_processes() -> None:
    w = Story()
    task = w.task_of(1)
    for death in range(core.POISON_DEATHS):
        process = w.process()
        w.by(process, "borrow")
        if process.parts:
            w.by(process, "read_range")
        w.by(process, "begin")
        assert bool(process.pending) == (death > 0), "a watched one is recorded as working before it is performed"
        w.by(process, "record_working", "kill")
        w.recover(process)
    assert (task.row(0).status, task.row(0).deaths) == (Status.ERROR, core.POISON_DEATHS)
    drain(w)


def tell_of_jobs_that_were_only_held_by_a_dead_process() -> None:
    w = Story()
    task, a = w.task_of(3), w.process()
    w.ready(a, 1, k=2)
    w.by(a, "record_working", "kill")
    w.recover(a)
    assert [(row.deaths, row.watched) for row in task.rows()] == [(1, True), (0, True), (0, True)]
    assert [core.is_suspect(row) for row in task.rows()] == [True, False, False], "of thousands on loan one ran"
    drain(w)


def tell_of_a_suspect_that_dies_beside_a_fresh_job() -> None:
    w = Story()
    task, a = w.task_of(2), w.process()
    w.ready(a, 1, k=1)
    w.by(a, "record_working", "kill")
    w.recover(a)
    for again in range(1, 2 * core.POISON_DEATHS):
        process = w.process()
        w.ready(process, 2)
        w.by(process, "record_working", "record_working", "kill")
        w.recover(process)
        assert [row.deaths for row in task.rows()] == [again + 1, 0], "the suspect takes the blame"
    assert [row.status for row in task.rows()] == [Status.ERROR, Status.ENQUEUE]
    drain(w)


def tell_of_a_watched_job_whose_row_moved_on() -> None:
    w = Story()
    task, a, b = w.task_of(1), w.process(), w.process()
    w.by(a, "borrow")
    w.by(a, "kill")
    w.recover(a)
    w.by(b, "borrow", "begin")
    w.tell("record_outside", k=2)
    w.by(b, "drop_watched")
    assert (b.running, task.row(0).status) == ([], Status.FINISH)
    drain(w)


def tell_of_a_round_of_which_one_waited_for_a_thread() -> None:
    w = Story()
    task, a = w.task_of(4, parallel=2, kind="rounds"), w.process()
    w.by(a, "borrow", "read_range")
    assert len(a.line) == 2, "a round takes what the limit allows"
    w.lease(a)
    w.by(a, "begin", "finish")
    w.tell("tick", k=3)
    w.by(a, *RECORD)
    w.by(a, *CHECK)
    w.lease(a)
    assert task.hints.ready is None
    assert not can(w, "borrow"), "the second waits in the process"
    w.by(a, "begin", "record_working")
    w.settle(task)
    assert not can(w, "borrow"), "it began just now"
    drain(w)


def tell_of_a_round_that_was_given_back() -> None:
    w = Story()
    task, a = w.task_of(2, parallel=1, kind="rounds"), w.process()
    w.by(a, "borrow", "read_range", "shut_down", "leave", "announce")
    w.tell("tick", k=5)
    w.by(w.process(), "borrow")
    assert task.loans[0].process == w.processes[-1].name, "nobody holds it, so nothing of that round may begin yet"
    drain(w)


def tell_of_jobs_with_one_key() -> None:
    w = Story()
    task, a, b = w.task_of(4, kind="keys"), w.process(), w.process()
    w.by(a, "borrow", k=3)
    w.by(a, "read_range")
    assert [copy.seq for copy in a.line] == [0, 1]
    assert [row.due_at for row in task.rows()] == [None, None, BLOCKED, BLOCKED]
    assert not can(w, "borrow")
    w.by(a, "begin", "finish")
    w.by(a, "flush", "kill")
    w.tell("repair_line")
    assert task.row(2).due_at == w.now, "its turn has come, though whoever ended the one before it died"
    w.by(b, "borrow")
    drain(w)


def tell_of_a_process_that_died_before_it_saw_whose_turn_it_is() -> None:
    """Its loan has rows that must wait for others: they are due, and whoever claims them looks."""
    w = Story()
    task, a, b = w.task_of(4, kind="keys"), w.process(), w.process()
    w.by(a, "borrow", k=3)
    w.by(a, "kill")
    w.recover(a)
    w.by(b, "borrow", k=3)
    assert [row.process for row in task.rows()] == [b.name, b.name, None, None]
    assert [row.due_at for row in task.rows()] == [None, None, BLOCKED, BLOCKED]
    drain(w)


def tell_of_a_session_that_passes_on() -> None:
    w = Story()
    first, second, a = w.task_of(1, kind="session"), w.task_of(1, kind="session"), w.process()
    assert (first.hints.ready, second.hints.ready) == (1, None)
    w.ready(a)
    assert not can(w, "borrow")
    w.by(a, "finish", *RECORD)
    w.close_all()
    assert second.hints.ready == 1
    drain(w)


# The foreign queue


def tell_of_a_dispatcher_that_died_before_its_push() -> None:
    w = Story()
    task = w.task_of(2, kind="foreign")
    w.tell("start_dispatcher")
    dispatcher = w.processes[-1]
    w.by(dispatcher, "borrow_for_queue", k=1)
    w.by(dispatcher, "kill")
    w.recover(dispatcher)
    assert [(row.attempt, row.due_at) for row in task.rows()] == [(2, w.now)] * 2
    drain(w)


def tell_of_a_dispatcher_that_died_between_push_and_hand_over() -> None:
    w = Story()
    task = w.task_of(1, kind="foreign")
    w.tell("start_dispatcher")
    dispatcher = w.processes[-1]
    w.by(dispatcher, "borrow_for_queue", "read_range", "push", "kill")
    w.recover(dispatcher)
    w.tell("start_dispatcher", "borrow_for_queue", "push", "hand_over", "start_worker")
    assert set(w.broker.held) == {Copy(1, 0, 1), Copy(1, 0, 2)}
    w.tell("fetch", k=1)
    w.tell("begin_read", "begin_act", "begin_act")
    assert w.processes[-1].pending == [Copy(1, 0, 2)], "the copy of the first attempt is fenced"
    assert task.row(0).process == QUEUE
    drain(w)


def tell_of_a_push_that_lands_twice() -> None:
    w = Story()
    task = w.task_of(1, kind="foreign")
    w.tell("start_dispatcher", "borrow_for_queue", "read_range")
    w.tell("push", k=2)
    w.tell("hand_over", "start_worker", "start_worker", "fetch", "deliver")
    assert not can(w, "fetch"), "the queue holds one copy of an attempt, the second push does nothing"
    w.tell("begin_read", "begin_act", "finish", "flush", "ack")
    w.broker.push([Copy(1, 0, 1)])
    w.tell(*BEGIN)
    assert (task.row(0).status, [p.running for p in w.processes]) == (Status.FINISH, [[], [], []])
    w.tell("trim")
    assert task.loans == []
    drain(w)
    assert w.ghosts.recorded == {Copy(1, 0, 1)}


def tell_of_a_queue_that_lost_what_it_had() -> None:
    w = Story()
    task = w.task_of(1, kind="foreign")
    look = ("look_read", "look_ask", "look_write")
    w.tell("start_dispatcher", *TO_QUEUE, "start_worker", "queue_lost", *look)
    assert task.row(0).attempt == 1, "one look may be too early"
    w.tell(*look)
    assert (task.row(0).attempt, task.row(0).due_at) == (2, w.now)
    w.tell("borrow_for_queue", "push", "hand_over", *BEGIN)
    drain(w)
    assert w.ghosts.recorded == {Copy(1, 0, 2)}


def tell_of_a_queue_lost_while_a_recorded_job_runs() -> None:
    w = Story()
    task = w.task_of(1, kind="foreign")
    w.tell("start_dispatcher", "borrow_for_queue", "read_range")
    w.tell("push", k=2)
    w.tell("hand_over", "start_worker", *BEGIN, "record_working", "queue_lost", "look_read")
    assert w.look.flying == (), "what is recorded as working is not looked for"
    assert core.redispatch(task.row(0), task.state, now=w.now) is None
    w.tell("deliver", "start_worker")
    w.by(w.processes[-1], *BEGIN)
    assert w.processes[-1].running == [], "a second copy of the attempt must not begin beside the first"
    w.tell("finish", "flush", "ack")
    assert (task.row(0).status, task.row(0).attempt) == (Status.FINISH, 1)
    drain(w)


def tell_of_a_limited_queue() -> None:
    w = Story()
    task = w.task_of(4, parallel=2, kind="foreign")
    w.tell("start_dispatcher", *TO_QUEUE, "start_worker", *BEGIN, "record_working")
    w.tell("borrow_for_queue", k=3)
    assert task.next_seq == 2, "whatever is wanted"
    w.tell("read_range", "push", "hand_over")
    assert not can(w, "borrow_for_queue")
    w.tell("finish", k=1)
    w.tell("flush", "ack", "announce", "tick", "tick", "borrow_for_queue", "push", "hand_over", *BEGIN, *BEGIN)
    w.tell("record_working", "record_working", "trim")
    assert not can(w, "borrow_for_queue"), "a retry is claimed; it works, and no loan of the queue has it"
    drain(w)


def tell_of_a_pause_of_what_a_queue_holds() -> None:
    w = Story()
    task = w.task_of(2, kind="foreign")
    w.tell("start_dispatcher", "borrow_for_queue", k=1)
    w.tell("read_range", "push", "hand_over", "start_worker", "pause", *BEGIN, "flush", "withdraw", "give_back_rows")
    assert [(row.attempt, row.due_at) for row in task.rows()] == [(2, w.now)] * 2
    assert not can(w, "borrow_for_queue")
    w.tell("trim", "resume")
    drain(w)


def tell_of_a_pauser_that_died_with_the_copies() -> None:
    w = Story()
    task = w.task_of(1, kind="foreign")
    look = ("look_read", "look_ask", "look_write")
    w.tell("start_dispatcher", *TO_QUEUE, "pause", "withdraw", "withdrawer_dies", *look, *look)
    assert task.row(0).due_at == w.now
    drain(w)


def tell_of_a_worker_of_the_engine_that_died_with_a_copy() -> None:
    w = Story()
    task = w.task_of(1, kind="foreign")
    w.tell("start_dispatcher", "borrow_for_queue", "read_range")
    w.tell("push", k=2)
    w.tell("network_loses", "hand_over", "start_worker", "fetch")
    w.by(w.processes[-1], "kill")
    w.tell("redeliver", "start_worker", "fetch", "begin_read", "begin_act")
    assert w.processes[-1].pending == [Copy(1, 0, 1)], "its worker may have died of it"
    assert task.row(0).watched
    drain(w)


TALES = [value for name, value in list(globals().items()) if name.startswith("tell_of_")]


@pytest.mark.parametrize("tale", TALES, ids=lambda tale: tale.__name__.removeprefix("tell_of_"))
def test_a_classic_trap_does_no_harm(tale: Callable[[], None]) -> None:
    tale()


def test_no_step_of_the_model_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[str] = set()

    def noting(world: World, name: str, pick: int = 0, k: int = 0) -> bool:
        happened = do(world, name, pick, k)
        taken.update([name] if happened else [])
        return happened

    monkeypatch.setattr(bookkeeping_invariants, "do", noting)
    for tale in TALES:
        tale()
    for seed in range(10):
        walk(seed)
    assert taken == set(STEPS)
