"""The rule of :class:`Running`: no heartbeat, check or stop misses a job at work or counts it twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from support.clocks import SettableClock

from asynctask import AsyncTask
from asynctask.arrivals import ArrivalTracker
from asynctask.brokers.base import Copy
from asynctask.core.transitions import Begin
from asynctask.integrations.base import EngineProcess
from asynctask.job import CurrentJob
from asynctask.ledger.recorder import Kind, Outcome, Recorder
from asynctask.ledger.standalone import Arrival
from asynctask.middleware.tracker import Attempt, Running, Ticket
from asynctask.runtime.execution import Execution
from asynctask.runtime.pool import Isolation
from asynctask.testing import wait_for

WAIT_S = 120.0


def fresh(*, is_suspect: bool = False) -> Execution:
    ticket = Ticket.made(Begin.RUN, "j", event_id=1, deaths=int(is_suspect))
    return Execution(ticket, job=CurrentJob("j"), copy=Copy("j", 1, "default", "{}"), payload={}, worker=None)


@pytest.fixture
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncTask]:
    made = AsyncTask(database_url=f"sqlite:///{tmp_path_factory.mktemp('running')}/ledger.db")
    made.ensure_schema()
    yield made
    made.close()


# -- once


def test_a_job_counts_once_however_often_it_is_added_and_removed() -> None:
    running, one, two = Running[object](SettableClock().monotonic), object(), object()
    for job in (one, two, one):
        running.add(job)
    assert (len(running), running.all()) == (2, [one, two])
    assert [running.remove(one), running.remove(one)] == [True, False]
    assert running.all() == [two]


def test_what_follows_the_end_of_a_job_follows_it_once_whoever_removes_it() -> None:
    running, jobs = Running[object](SettableClock().monotonic), [object() for _ in range(200)]
    for job in jobs:
        running.add(job)
    removed: list[bool] = []
    together = threading.Barrier(4)

    def remove() -> None:
        together.wait(WAIT_S)
        removed.extend([running.remove(job) for job in jobs])

    threads = [threading.Thread(target=remove, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert (removed.count(True), len(running)) == (200, 0)


def test_a_reader_has_a_copy_that_nobody_changes() -> None:
    running, one, two = Running[object](SettableClock().monotonic), object(), object()
    running.add(one)
    seen = running.all()
    running.add(two)
    running.remove(one)
    assert (seen, running.all()) == ([one], [two])


def test_the_time_counts_in_which_at_least_one_job_is_at_work_also_if_one_comes_as_the_last_one_leaves() -> None:
    now, one, two, comes = [0.0], object(), object(), list[object]()

    def clock() -> float:
        while comes:
            running.add(comes.pop())
        return now[0]

    running = Running[object](clock)
    running.add(one)
    now[0], comes[:] = 2.0, [two]
    running.remove(one)
    now[0] = 5.0
    assert (running.all(), running.busy_s) == ([two], 5.0)
    running.remove(two)
    now[0] = 9.0
    assert running.busy_s == 5.0
    running.add(one)
    now[0] = 10.0
    assert running.busy_s == 6.0


def test_a_heartbeat_counts_a_job_once_that_a_middleware_calls_twice(app: AsyncTask) -> None:
    process = EngineProcess(app, "celery", concurrency=2)
    attempt = Attempt(process.begin(Arrival("job", None, "note", "celery/default")))
    for _ in range(2):
        process.tracker.start(attempt)
    assert process.facts()["busy"] == 1
    process.tracker.settle(attempt)
    assert process.facts()["busy"] == 0


# -- record, then remove


class Watched(Recorder):
    """Says at each outcome which jobs were at work when it had it."""

    def __init__(self, app: AsyncTask) -> None:
        super().__init__(app.ledger)
        self.at_work: Callable[[], Sequence[Attempt]] = list
        self.seen: list[tuple[Kind, int]] = []

    def put(self, outcomes: Sequence[Outcome]) -> None:
        super().put(outcomes)
        self.seen += [(each.kind, len(self.at_work())) for each in outcomes]


def test_a_job_is_at_work_until_the_recorder_has_its_outcome(app: AsyncTask) -> None:
    recorder = Watched(app)
    tracker = ArrivalTracker(app.ledger, recorder)
    recorder.at_work = tracker.running.all
    ended, released = map(Attempt, tracker.arrive([Arrival(name, None, "note", "q") for name in ("a", "b")]))
    for attempt in (ended, released):
        tracker.start(attempt)
    tracker.settle(ended)
    tracker.release(released)
    assert recorder.seen == [(Kind.FINISH, 2), (Kind.GIVEN_BACK, 1)]
    assert tracker.running.all() == []


def test_who_asks_for_jobs_first_and_for_outcomes_then_sees_each_job_in_one_of_them(app: AsyncTask) -> None:
    recorder = Recorder(app.ledger)  # nothing is committed: what it has, it keeps
    tracker = ArrivalTracker(app.ledger, recorder)
    attempts = [Attempt(each) for each in tracker.arrive([Arrival(f"{n}", None, "note", "q") for n in range(300)])]
    begun, missed, over = 0, list[tuple[int, int]](), threading.Event()

    def ask() -> None:
        while not over.is_set():
            least = begun
            at_work = len(tracker.running)
            recorded = recorder.waiting
            if at_work + recorded < least:
                missed.append((at_work + recorded, least))

    asks = threading.Thread(target=ask, daemon=True)
    asks.start()
    for attempt in attempts:
        tracker.start(attempt)
        begun += 1
        tracker.settle(attempt)
    over.set()
    asks.join(WAIT_S)
    assert missed == []


def test_a_process_that_ends_does_not_leave_while_an_outcome_waits(app: AsyncTask, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job ends after the recorder has: nothing records it, so its process must not take its name off the list."""
    process = EngineProcess(app, "celery", concurrency=2)
    attempt = Attempt(process.begin(Arrival("job", None, "note", "celery/default")))
    process.start()
    process.tracker.start(attempt)
    stop, left = process.recorder.stop, list[bool]()

    def ends_late(timeout: float) -> bool:
        drained = stop(timeout)
        process.tracker.settle(attempt)
        return drained

    monkeypatch.setattr(process.recorder, "stop", ends_late)
    monkeypatch.setattr(process, "leave", lambda *, empty: left.append(empty))
    process.stop()
    assert left == [False]


def test_a_worker_that_ends_does_not_leave_while_the_outcome_of_a_late_job_waits(
    app: AsyncTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, late, left = app.launcher(concurrency=1), fresh(), list[bool]()
    stop, isolation = launcher.recorder.stop, launcher.pool._isolation
    launcher.start()
    isolation.enter(late, lambda: False)

    def ends_late(timeout: float) -> bool:
        drained = stop(timeout)
        launcher.tracker.settle(late)
        isolation.leave(late)
        return drained

    monkeypatch.setattr(launcher.pool, "wait_idle", lambda timeout: True)
    monkeypatch.setattr(launcher.recorder, "stop", ends_late)
    monkeypatch.setattr(launcher, "leave", lambda *, empty: left.append(empty))
    launcher.stop()
    assert left == [False]


# -- add, then ask


class Hooked(Running[Execution]):
    """Calls ``meanwhile`` before somebody adds a job, or reads how many there are: once."""

    def __init__(self, *, on_add: Callable[[], None] | None = None, on_read: Callable[[], None] | None = None) -> None:
        super().__init__(SettableClock().monotonic)
        self.on_add, self.on_read = on_add, on_read

    def add(self, job: Execution) -> None:
        hook, self.on_add = self.on_add, None
        if hook is not None:
            hook()
        super().add(job)

    def __len__(self) -> int:
        hook, self.on_read = self.on_read, None
        if hook is not None:
            hook()
        return super().__len__()


def enters(isolation: Isolation, job: Execution, give_up: threading.Event) -> threading.Thread:
    """A thread in which a job enters, and runs if it may."""
    thread = threading.Thread(target=isolation.enter, args=(job, give_up.is_set), daemon=True)
    thread.start()
    return thread


def test_a_job_that_comes_while_a_suspect_takes_its_turn_sees_that() -> None:
    """The suspect finds nobody, just before the job is added: so the job has to ask after that."""
    isolation, give_up, one, suspect = Isolation(SettableClock(), 4), threading.Event(), fresh(), fresh(is_suspect=True)

    def suspect_comes() -> None:
        enters(isolation, suspect, give_up).join(WAIT_S)

    isolation._running = Hooked(on_add=suspect_comes)
    entering = enters(isolation, one, give_up)
    wait_for(lambda: isolation._waiting, "the job waits")
    assert isolation.running() == [suspect]
    isolation.leave(suspect)
    entering.join(WAIT_S)
    assert isolation.running() == [one]


def test_a_suspect_that_takes_its_turn_while_a_job_comes_is_seen() -> None:
    """The job comes just before the suspect reads who runs: so the suspect has to say before that that it is its turn."""
    isolation, give_up, one, suspect = Isolation(SettableClock(), 4), threading.Event(), fresh(), fresh(is_suspect=True)
    came: list[bool] = []

    def job_comes() -> None:
        isolation._running.add(one)
        came.append(isolation._closed_at is None)
        if not came[0]:
            isolation._running.remove(one)

    isolation._running = Hooked(on_read=job_comes)
    enters(isolation, suspect, give_up).join(WAIT_S)
    assert (came, isolation.running()) == ([False], [suspect])
