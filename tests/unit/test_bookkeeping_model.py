"""The bookkeeping core under interleavings, crashes and lost brokers: see `bookkeeping_model` for the world it lives in.

A failure of `test_a_random_life_keeps_every_promise` names its seed: `walk(seed)` of `bookkeeping_invariants` replays it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import bookkeeping_invariants
import pytest
from bookkeeping_invariants import IDLE, PATH, TROUBLE, UNTIL_DONE, advance, check, drain, walk
from bookkeeping_model import Copy, Task, World
from bookkeeping_steps import STEPS, can, do
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from support.drawn import examples

from asynctask.core import transitions as core
from asynctask.core.states import State, Status
from asynctask.core.transitions import Delta

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

    @initialize(parallel=VARIANT, rows=VARIANT)
    def a_task_and_a_worker(self, parallel: int, rows: int) -> None:
        self.take("submit", 0, parallel)
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
        for name in (*UNTIL_DONE, "fetch") * times:
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

PROFILE = settings(max_examples=examples(12, 400), stateful_step_count=60, derandomize=True, database=None)


def test_every_interleaving_keeps_every_promise() -> None:
    run_state_machine_as_test(LifeOfTheWorld, settings=PROFILE)


HARD_LIVES = (577613796, 811526827, 452089005, 504585801, 186128651, 755846735)
"""In them a person stops a job, or the ledger takes one back, whose place has been handed on."""


@pytest.mark.parametrize("seed", [*range(examples(12, 250)), *HARD_LIVES])
def test_a_known_life_keeps_every_promise(seed: int) -> None:
    walk(seed)


def test_a_random_life_keeps_every_promise() -> None:
    for seed in random.SystemRandom().sample(range(10**9), examples(8, 100)):
        print(f"walk({seed})")  # shown when it fails
        walk(seed)


# -- The classic traps ---------------------------------------------------------------------------------------------------


class Story(World):
    """A world told step by step. Every step must be possible and is followed by every check."""

    def tell(self, *names: str, k: int = 0, pick: int = 0) -> None:
        for name in names:
            assert advance(self, name, pick, k), f"{name} cannot happen here"

    def task_of(self, rows: int, parallel: int | None = 2) -> Task:
        """A sealed, running Task."""
        self.tell("submit", k={2: 0, 1: 1, 3: 2, None: 3}[parallel])
        advance(self, "submit_slice", len(self.tasks) - 1, rows - 1)
        self.tell("seal")
        return self.tasks[-1]

    def single(self, task: Task) -> None:
        """Makes its jobs such of one item each."""
        for seq, row in enumerate(task.stored):
            task.counts.add(core.difference(row, row._replace(items=1)))
            task.stored[seq] = row._replace(items=1)

    def close_all(self) -> None:
        self.tell("close_look", "close", "call_back")


DISPATCH = ("reserve", "push", "confirm")
BEGIN = ("fetch", "begin_read", "begin_act")
RECORD = ("flush", "ack")


def tell_of_a_duplicate_push() -> None:
    w = Story()
    row = w.task_of(1).row
    w.tell("reserve", "start_process")
    w.tell("push", k=2)
    w.tell("confirm", *BEGIN, "finish", *RECORD)
    w.tell("deliver", *BEGIN)
    assert row(0).status is Status.FINISH
    assert w.processes[0].running == []
    drain(w)
    assert w.ghosts.recorded == {Copy(1, 0, 1)}


def tell_of_a_duplicate_push_while_it_runs() -> None:
    w = Story()
    w.task_of(1, parallel=1)
    w.tell("reserve", "start_process", "start_process")
    w.tell("push", k=2)
    w.tell(*BEGIN, "deliver")
    assert not can(w, "fetch"), "the broker holds one copy of an attempt, the second push does nothing"
    drain(w)


def tell_of_a_recovery_done_twice() -> None:
    w = Story()
    task = w.task_of(1)
    w.tell(*DISPATCH, "start_process", *BEGIN, "record_working", "kill", "recover_list", "recover_list")
    w.tell("recover_turn", "recover_turn", "recover_drop", "recover_drop")
    row = task.row(0)
    assert (row.attempt, row.deaths, row.due_at, row.watched) == (2, 1, w.now, True)
    w.tell("reserve")
    assert [b.copies for d in w.dispatchers for b in d.batches] == [[Copy(1, 0, 2)]]
    drain(w)


def tell_of_a_recovery_that_broke_off_halfway() -> None:
    w = Story()
    task = w.task_of(1)
    w.tell(*DISPATCH, "start_process", "fetch", "kill", "recover_list", "recover_turn", "stop_recovery")
    w.tell(*DISPATCH, "recover_list", "recover_turn", "recover_drop")
    assert task.row(0).attempt == 2
    assert Copy(1, 0, 2) in w.broker.held
    drain(w)


def tell_of_a_late_writer() -> None:
    w = Story()
    task = w.task_of(1, parallel=1)
    w.tell(*DISPATCH, "start_process", *BEGIN, "stall", "recover_list", "recover_turn", "recover_drop", *DISPATCH)
    w.tell("finish", k=2)  # the first process says failed, and has not flushed it yet
    w.tell("start_process")
    w.tell("fetch", pick=1)  # by the second process
    w.tell("begin_read", "begin_act", "record_working", "finish")
    w.tell("flush", pick=1)
    assert task.row(0).status is Status.FINISH
    w.tell("flush")
    assert task.row(0).status is Status.FINISH
    assert task.counts.failed == 0
    drain(w)


def tell_of_a_retry_while_an_old_copy_is_in_the_network() -> None:
    w = Story()
    task = w.task_of(1)
    w.tell("reserve")
    w.tell("push", k=1)
    w.tell("confirm", "look_read", "look_ask", "look_write")
    assert task.row(0).attempt == 1, "one look may be too early"
    w.tell("look_read", "look_ask", "look_write")
    assert task.row(0).attempt == 2
    w.tell(*DISPATCH, "start_process", *BEGIN)
    w.tell("finish", k=3)
    w.tell(*RECORD)
    w.close_all()
    w.tell("retry", "turn_some", "deliver", *BEGIN)
    assert w.processes[0].running == [], "the copy of the first attempt is fenced"
    assert task.row(0).attempt == 3
    drain(w)
    assert task.closes == {1: 1, 2: 1}


def tell_of_a_pause_that_races_a_reservation() -> None:
    w = Story()
    task = w.task_of(2)
    w.tell("reserve", k=1)
    w.tell("pause", "push", "confirm", "start_process", *BEGIN, *RECORD)
    assert w.processes[0].running == []
    assert (task.flying, task.row(0).attempt, task.row(0).due_at) == (1, 2, w.now)
    w.tell("withdraw", "give_back")
    assert task.flying == 0
    assert not can(w, "reserve")
    w.tell("resume", "reserve")
    drain(w)


def tell_of_a_pauser_that_died_with_the_copies() -> None:
    w = Story()
    task = w.task_of(2)
    w.tell("reserve", k=1)
    w.tell("push", "confirm", "pause", "withdraw", "withdrawer_dies")
    w.tell("look_read", "look_ask", "look_write", "look_read", "look_ask", "look_write")
    assert [row.due_at for row in task.rows()] == [w.now, w.now]
    drain(w)


def tell_of_a_cancel_that_races_a_push() -> None:
    w = Story()
    task = w.task_of(3, parallel=1)
    w.tell("reserve", "cancel")
    w.tell("turn_some", k=5)
    assert [row.status for row in task.rows()] == [Status.ENQUEUE, Status.CANCELLED, Status.CANCELLED]
    w.tell("push", "start_process", *BEGIN, *RECORD)
    assert task.counts.cancelled == sum(row.items for row in task.stored)
    w.tell("close_look", "close")
    assert (task.state, task.closes) == (State.CANCELLED, {1: 1})
    drain(w)


def tell_of_a_job_interrupted_after_its_cancel_went_by() -> None:
    w = Story()
    task = w.task_of(1)
    w.tell(*DISPATCH, "start_process", *BEGIN, "cancel", "turn_some", "shut_down", *RECORD)
    assert task.row(0).due_at == w.now
    w.tell("cancel_again", "turn_some", "close_look", "close")
    assert task.row(0).status is Status.CANCELLED
    drain(w)


def tell_of_redis_lost_while_a_recorded_job_runs() -> None:
    w = Story()
    task = w.task_of(1)
    w.tell("reserve", "start_process")
    w.tell("push", k=2)
    w.tell("confirm", *BEGIN, "record_working", "redis_lost", "look_read", "look_read")
    assert w.look.flying == (), "what is recorded as working is not looked for"
    assert core.redispatch(task.row(0), task.state, held=False, missed_before=True, now=w.now) is None
    w.tell("deliver", "start_process", "fetch", "begin_read", "begin_act")
    assert w.processes[1].running == [], "a second copy of the attempt must not begin beside the first"
    w.tell("finish", *RECORD)
    assert (task.row(0).status, task.row(0).attempt) == (Status.FINISH, 1)
    drain(w)


def tell_of_redis_lost_while_an_unrecorded_job_runs() -> None:
    w = Story()
    task = w.task_of(1, parallel=1)
    look = ("look_read", "look_ask", "look_write")
    w.tell(*DISPATCH, "start_process", *BEGIN, "redis_lost", *look, *look, *DISPATCH)
    assert task.row(0).attempt == 2
    w.tell("finish", "flush")
    assert task.row(0).status is Status.ENQUEUE, "the fenced run loses; the attempt that was dispatched instead counts"
    drain(w)
    assert w.ghosts.recorded == {Copy(1, 0, 2)}


def tell_of_a_generation_retried_while_a_stale_copy_is_around() -> None:
    w = Story()
    task = w.task_of(1)
    w.tell("reserve")
    w.tell("push", k=2)
    w.tell("cancel", "withdraw", "give_back", "turn_some", "close_look", "close")
    w.tell("retry", k=1)
    w.tell("turn_some", *DISPATCH[:2], "deliver", "start_process")
    assert set(w.broker.held) == {Copy(1, 0, 1), Copy(1, 0, 3)}
    w.tell("fetch", k=1)
    w.tell("begin_read", "begin_act", "begin_act")
    assert w.processes[0].running == [Copy(1, 0, 3)]
    drain(w)
    assert task.closes == {1: 1, 2: 1}


def tell_of_a_close_that_races_a_retry() -> None:
    w = Story()
    task = w.task_of(1)
    w.tell(*DISPATCH, "start_process", *BEGIN)
    w.tell("finish", k=2)
    w.tell(*RECORD, "close_look", "retry", "close")
    assert task.closes == {}
    assert not core.may_close(State.RUNNING, True, True, Delta()), "while rows are being turned nothing closes"
    assert not can(w, "close_look")
    drain(w)
    assert task.closes == {2: 1}


def tell_of_a_job_that_kills_its_processes() -> None:
    w = Story()
    task = w.task_of(1)
    for _ in range(core.POISON_DEATHS):
        w.tell(*DISPATCH, "start_process", *BEGIN, "record_working", "kill")
        w.tell("recover_list", "recover_turn", "recover_drop")
    assert (task.row(0).status, task.row(0).deaths) == (Status.ERROR, core.POISON_DEATHS)
    drain(w)


def tell_of_a_suspect_that_dies_beside_a_fresh_job() -> None:
    w = Story()
    task = w.task_of(2, parallel=2)
    w.single(task)
    w.tell("reserve", "push", "confirm", "start_process", *BEGIN, "kill", "recover_list", "recover_turn", "recover_drop")
    suspect, fresh = sorted((row.watched, seq) for seq, row in enumerate(task.rows()))[::-1]
    assert (suspect[0], fresh[0]) == (True, False), "the process had one of them"
    for again in range(2 * core.POISON_DEATHS):
        advance(w, "reserve", 0, 1)
        advance(w, "push")
        advance(w, "confirm")
        w.tell("start_process")
        w.tell("fetch", k=1)
        w.tell("begin_read", "begin_act", "begin_act", "record_working", "record_working", "kill")
        w.tell("recover_list", "recover_turn", "recover_drop")
        deaths = [task.row(seq).deaths for _, seq in (suspect, fresh)]
        assert deaths == [again + 1, 0 if again == 0 else again], "a suspect alone takes the blame; of two each does"
    ended, spared = task.row(suspect[1]), task.row(fresh[1])
    assert (ended.status, spared.status) == (Status.ERROR, Status.ENQUEUE), "its first death was not counted"
    drain(w)


def tell_of_jobs_that_follow_each_other_in_one_place() -> None:
    w = Story()
    task = w.task_of(4, parallel=1)
    w.tell(*DISPATCH, "start_process", *BEGIN, "lend", k=0)
    assert (task.flying, task.next_seq) == (1, 2)
    w.tell("hand_on")
    w.tell("start_process", "flush")
    assert (task.row(0).status, task.row(1).status, task.flying) == (Status.FINISH, Status.WORKING, 1)
    assert not can(w, "reserve"), "its place is taken"
    w.tell("finish", "flush")
    assert task.flying == 0
    drain(w)


def tell_of_a_lent_job_that_is_over_before_it_is_known_to_have_begun() -> None:
    w = Story()
    task = w.task_of(3, parallel=1)
    w.tell(*DISPATCH, "start_process", *BEGIN)
    w.tell("lend", k=1)
    w.tell("hand_on", "hand_on", "cancel", "turn_some", "turn_some", "turn_some")
    assert [row.status for row in task.rows()] == [Status.ENQUEUE] * 3, "each of them may be running"
    w.tell("flush")
    assert [str(row.status) for row in task.rows()] == ["finish", "finish", "working"]
    drain(w)


def tell_of_a_process_that_dies_with_what_was_lent_to_it() -> None:
    w = Story()
    task = w.task_of(3, parallel=1)
    w.tell(*DISPATCH, "start_process", *BEGIN)
    w.tell("lend", k=1)
    w.tell("hand_on", "kill", "recover_list", "recover_turn", "recover_drop")
    assert [(row.attempt, row.due_at, row.process) for row in task.rows()] == [(2, w.now, None)] * 3
    assert task.flying == 0
    drain(w)


def tell_of_a_dispatcher_that_died_before_its_push() -> None:
    w = Story()
    w.task_of(2)
    w.tell("reserve", k=1)
    w.tell("dispatcher_dies")
    assert not can(w, "take_again"), "its lease still runs"
    w.tell("tick", k=3)
    w.tell("take_again", "push", "confirm")
    assert set(w.broker.held) == {Copy(1, 0, 1), Copy(1, 1, 1)}
    drain(w)


def tell_of_a_stopped_row_that_the_pointer_had_not_reached() -> None:
    w = Story()
    task = w.task_of(2, parallel=1)
    w.tell("stop_job", pick=1)
    w.tell("start_job", *DISPATCH)
    assert (task.row(1).due_at, task.flying) == (None, 1)
    drain(w)
    assert task.counts.dispatched == 2


def tell_of_a_watched_job_whose_row_moved_on() -> None:
    w = Story()
    task = w.task_of(1)
    w.tell(*DISPATCH, "start_process", "fetch", "kill", "recover_list", "recover_turn", "recover_drop", *DISPATCH)
    w.tell("start_process", *BEGIN)
    assert w.processes[1].pending == [Copy(1, 0, 2)], "it is recorded as working before it is performed"
    w.tell("cancel_job", "drop_watched", "ack")
    assert (w.processes[1].running, task.row(0).status) == ([], Status.CANCELLED)
    drain(w)


def tell_of_a_process_struck_off_after_it_came_back() -> None:
    w = Story()
    task = w.task_of(1)
    w.tell("start_process", "stall", "recover_list", "recover_turn", "beat", *DISPATCH, *BEGIN, "record_working")
    w.tell("recover_drop", "redis_lost", "kill")
    assert task.row(0).status is Status.WORKING, "neither the register nor the broker knows its process any more"
    drain(w)


def tell_of_a_round_whose_second_job_waited_for_a_worker() -> None:
    w = Story()
    w.tell("submit", k=4)
    advance(w, "submit_slice", 1, 2)
    w.tell("seal", *DISPATCH)
    task = w.tasks[-1]
    assert task.flying == 2, "a round takes what parallel allows"
    w.tell("start_process", *BEGIN, "finish", "flush", "tick", "tick", "tick", "tick")
    assert not can(w, "reserve"), "the second waits in the queue"
    w.tell(*BEGIN, "record_working")
    assert not can(w, "reserve"), "it began just now"
    w.tell("tick", "tick", "tick", "tick", "reserve")
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
    for seed in range(20):
        walk(seed)
    assert taken == set(STEPS)
