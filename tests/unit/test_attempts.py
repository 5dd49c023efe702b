"""One attempt of a job in a process: what is a fact does not change, what changes only goes on, and one thread ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import FrozenInstanceError, fields
from typing import Any, cast

import pytest

from asynctask import AsyncTask
from asynctask.arrivals import ArrivalTracker
from asynctask.brokers.base import Copy
from asynctask.core.states import EVENT_EDGES, Status, Who
from asynctask.core.transitions import Begin, Row, Transition, outcome
from asynctask.job import CurrentJob
from asynctask.ledger.recorder import Kind, Outcome, Recorder, Stage, forget_read
from asynctask.ledger.standalone import Arrival
from asynctask.middleware.tracker import Attempt, AttemptLost, Phase, Result, Ticket, Tracker
from asynctask.runtime.execution import Execution, Settler

WAIT_S = 120.0


class Kept(Recorder):
    """Keeps what it is handed."""

    def __init__(self, app: AsyncTask) -> None:
        super().__init__(app.ledger)
        self.taken: list[Outcome] = []

    def put(self, outcomes: Sequence[Outcome]) -> None:
        self.taken += outcomes


@pytest.fixture
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    app = AsyncTask(database_url=f"sqlite:///{tmp_path_factory.mktemp('attempts')}/ledger.db")
    app.ensure_schema()
    yield Kept(app)
    app.close()


def started(kept: Kept) -> tuple[Tracker, Attempt]:
    tracker = ArrivalTracker(kept._ledger, kept)
    (ticket,) = tracker.arrive([Arrival("a", None, "note", "q")])
    attempt = Attempt(ticket)
    tracker.start(attempt)
    return tracker, attempt


# -- facts


@pytest.mark.parametrize("fact", [Ticket.made(Begin.RUN, "a"), Result(Kind.FINISH)])
def test_what_the_ledger_said_and_what_came_of_a_job_cannot_be_changed(fact: Any) -> None:
    for each in fields(fact):
        with pytest.raises(FrozenInstanceError):
            setattr(fact, each.name, None)


@pytest.mark.parametrize("kind", Kind)
def test_each_kind_of_outcome_is_an_edge_that_a_worker_may_take(kind: Kind) -> None:
    edges = [each for each in EVENT_EDGES if (each.target, each.reason) == (kind.status, kind.reason)]
    assert any(Who.WORKER in each.who for each in edges)


@pytest.mark.parametrize("kind", Kind)
def test_an_outcome_takes_the_edge_of_its_kind(kept: Kept, kind: Kind) -> None:
    row = Row(Status.ENQUEUE, reserved=True)
    made = Outcome(1, 1, kind, retry_at=5 if kind is Kind.RETRY else None)
    turn = made._transition(kept._ledger, row, "running")
    assert turn is not None
    assert (turn.after.status, turn.reason) == (kind.status, kind.reason)
    waits = turn.after.due_at is not None
    assert waits == (kind in (Kind.RETRY, Kind.INTERRUPTED, Kind.GIVEN_BACK)) == kind.may_wait


@pytest.mark.parametrize("kind", [each for each in Kind if each.may_wait])
def test_what_would_wait_again_is_cancelled_with_its_task(kept: Kept, kind: Kind) -> None:
    turn = Outcome(1, 1, kind, retry_at=5)._transition(kept._ledger, Row(Status.ENQUEUE, reserved=True), "cancelled")
    assert turn is not None
    assert turn.after.status is Status.CANCELLED


def test_an_end_is_the_outcome_of_the_transition_function() -> None:
    row = Row(Status.WORKING, 3, reserved=True, process="p")
    for kind in (Kind.FINISH, Kind.FAILED, Kind.RAISED, Kind.TIMEOUT, Kind.DISCARDED):
        turn = outcome(row, kind.status, kind.reason)
        assert isinstance(turn, Transition)
        assert (turn.after.status, turn.reason, turn.after.process) == (kind.status, kind.reason, None)


# -- what changes only goes on


@pytest.mark.parametrize("stage", Stage)
def test_the_next_try_of_a_record_reads_and_forgets_no_doubt(stage: Stage) -> None:
    made = Outcome(1, 1, Kind.FINISH, stage=stage)
    forget_read([made])
    assert made.stage == max(stage, Stage.READ)


def test_an_attempt_that_is_settled_stays_so_whatever_comes_of_its_working(kept: Kept) -> None:
    tracker, attempt = started(kept)
    tracker.note_long(-1.0)
    assert attempt.phase is Phase.NOTED
    (working,) = kept.taken
    tracker.settle(attempt)
    assert working.then is not None
    working.then(False)
    assert attempt.is_settled


def test_an_attempt_whose_working_was_lost_is_obsolete(kept: Kept) -> None:
    tracker, attempt = started(kept)
    tracker.note_long(-1.0)
    assert kept.taken[0].then is not None
    kept.taken[0].then(False)
    assert (attempt.phase, attempt.is_lost) == (Phase.LOST, True)


def test_an_attempt_that_was_settled_without_its_thread_does_not_begin_any_more(kept: Kept) -> None:
    """Its thread was in a middleware when it was given up."""
    tracker = ArrivalTracker(kept._ledger, kept)
    (ticket,) = tracker.arrive([Arrival("a", None, "note", "q")])
    attempt = Attempt(ticket)
    tracker.settle(attempt)
    with pytest.raises(AttemptLost):
        tracker.start(attempt)
    assert tracker.running.all() == []


def test_an_outcome_of_which_nothing_can_be_made_leaves_the_attempt_to_be_settled(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, attempt = started(kept)
    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "outcome", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tracker.settle(attempt)
    assert tracker.running.all() == [attempt]
    tracker.settle(attempt)
    assert [each.kind for each in kept.taken] == [Kind.FINISH]


# -- one thread settles it


def execution() -> Execution:
    copy = Copy("j", 1, "default", "{}")
    return Execution(Ticket.made(Begin.RUN, "j"), job=CurrentJob("j"), copy=copy, payload={}, worker=None)


def test_the_first_thread_that_claims_a_job_settles_it_and_may_claim_it_again() -> None:
    job = execution()
    assert [job.claim(), job.claim(), job.give_up_thread(), job.abandoned] == [True, True, False, False]
    other = execution()
    assert [other.give_up_thread(), other.claim(), other.give_up_thread(), other.abandoned] == [True, False, False, True]


def test_others_may_give_a_thread_up_while_it_is_inside_the_function_again() -> None:
    job = execution()
    assert job.claim()
    job.waive()
    assert [job.give_up_thread(), job.claim()] == [True, False]
    job.waive()  # what a thread does that was given up
    assert job.settler is Settler.ANOTHER


class Contended:
    """A lock that another thread has had just before: ``settler`` is whom that made the settler."""

    def __init__(self, job: Execution, settler: Settler) -> None:
        self._job, self._settler = job, settler

    def __enter__(self) -> None:
        self._job.settler = self._settler

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("first", "claims"), [(Settler.ITS_THREAD, Execution.give_up_thread), (Settler.ANOTHER, Execution.claim)]
)
def test_a_thread_that_waited_for_another_that_claimed_the_job_leaves_it_alone(
    first: Settler, claims: Callable[[Execution], bool]
) -> None:
    job = execution()
    job.lock = cast(threading.Lock, Contended(job, first))
    assert (claims(job), job.settler) == (False, first)


def test_of_two_threads_that_claim_a_job_at_the_same_time_one_settles_it() -> None:
    jobs = [execution() for _ in range(500)]
    together, won = threading.Barrier(2), dict[str, list[bool]]()

    def claims(name: str, how: Callable[[Execution], bool]) -> None:
        together.wait(WAIT_S)
        won[name] = [how(job) for job in jobs]

    threads = [
        threading.Thread(target=claims, args=("its own", Execution.claim), daemon=True),
        threading.Thread(target=claims, args=("another", Execution.give_up_thread), daemon=True),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert [a != b for a, b in zip(won["its own"], won["another"], strict=True)] == [True] * 500
