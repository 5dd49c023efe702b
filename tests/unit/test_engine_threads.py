"""What the threads of an engine's process ask the ledger together, and ahead of time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.clocks import SettableClock

from asynctask.core.transitions import Begin
from asynctask.errors import InputError, LedgerUnavailable
from asynctask.integrations.base import EARLY_S, EarlyTickets, Together
from asynctask.ledger.standalone import Arrival
from asynctask.middleware.tracker import Ticket
from asynctask.testing import wait_for


class Gated:
    """A function of many arguments that waits for its gate, and says what it was called with."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.gate = threading.Event()
        self.raises: BaseException | None = None

    def __call__(self, arguments: Sequence[Any]) -> Sequence[Any]:
        self.calls.append(list(arguments))
        assert self.gate.wait(60)
        raised, self.raises = self.raises, None
        if raised is not None:
            raise raised
        if "bad" in arguments:
            raise InputError("a bad one")
        return [f"of {each}" for each in arguments]


def called(together: Together, *arguments: str) -> tuple[list[threading.Thread], dict[str, Any]]:
    found: dict[str, Any] = {}

    def call(argument: str) -> None:
        try:
            found[argument] = together(argument)
        except BaseException as error:
            found[argument] = error

    threads = [threading.Thread(target=call, args=(each,)) for each in arguments]
    for thread in threads:
        thread.start()
    return threads, found


def begun(function: Gated, *others: str) -> tuple[Together, list[threading.Thread], dict[str, Any]]:
    """One call under way, and others that wait for its end."""
    together = Together(function)
    first, found = called(together, "first")
    wait_for(lambda: function.calls, "the first is under way")
    rest, found_too = called(together, *others)
    wait_for(lambda: len(together._waiting) == len(others), "the others wait")
    function.gate.set()
    for thread in first + rest:
        thread.join(60)
    return together, rest, {**found, **found_too}


def test_those_that_come_while_a_call_is_under_way_share_the_next() -> None:
    function = Gated()
    _, _, found = begun(function, "a", "b", "c")
    assert function.calls[0] == ["first"]
    assert sorted(function.calls[1]) == ["a", "b", "c"]
    assert len(function.calls) == 2
    assert found == {each: f"of {each}" for each in ("first", "a", "b", "c")}


def test_a_bad_one_among_them_fails_alone() -> None:
    _, _, found = begun(Gated(), "a", "bad", "c")
    assert isinstance(found.pop("bad"), InputError)
    assert found == {each: f"of {each}" for each in ("first", "a", "c")}


def test_without_the_ledger_all_fail_with_one_question() -> None:
    function = Gated()
    function.raises = LedgerUnavailable("away")
    _, _, found = begun(function)
    assert isinstance(found["first"], LedgerUnavailable)
    assert len(function.calls) == 1


def test_a_thread_that_is_interrupted_while_it_asks_leaves_the_others_to_another() -> None:
    class Interrupted(BaseException):
        pass

    function = Gated()
    together = Together(function)
    threads, found = called(together, "first")
    wait_for(lambda: function.calls, "the first is under way")
    more, found_too = called(together, "a", "b")
    wait_for(lambda: len(together._waiting) == 2, "the others wait")
    function.raises = Interrupted()
    function.gate.set()
    for thread in threads + more:
        thread.join(60)
    assert isinstance(found["first"], Interrupted)
    assert found_too == {"a": "of a", "b": "of b"}


def ticket(arrival: Arrival) -> Ticket:
    return Ticket.made(Begin.RUN if arrival.attempt == 2 else Begin.DROP, arrival.job_id, event_id=1, task_id=7, attempt=2)


@pytest.fixture
def early() -> Any:
    clock = SettableClock()
    tickets = EarlyTickets(lambda arrivals: [ticket(each) for each in arrivals], clock)
    yield tickets, clock
    tickets.stop()


def arrival(attempt: int | None, job_id: str = "a job") -> Arrival:
    return Arrival(job_id, attempt, "w", "q")


def noting() -> tuple[list[list[str]], Callable[[Sequence[Arrival]], list[Ticket]]]:
    """A request for tickets, and the ids of the jobs that each request was for."""
    asked: list[list[str]] = []

    def begin(arrivals: Sequence[Arrival]) -> list[Ticket]:
        asked.append([each.job_id for each in arrivals])
        return [ticket(each) for each in arrivals]

    return asked, begin


def test_while_enough_tickets_are_there_those_of_further_jobs_are_asked_for_together() -> None:
    asked, begin = noting()
    tickets = EarlyTickets(begin, SettableClock(), enough=2)
    for name in "ab":
        tickets.expect(arrival(2, name))
        asked_for(tickets)
    for name in "cde":
        tickets.expect(arrival(2, name))
    assert tickets.take(arrival(2, "a")) is not None, "one of two is left"
    wait_for(lambda: len(asked) == 3, "the others are asked for, and nobody waits")
    asked_for(tickets)
    assert (asked, tickets._ready) == ([["a"], ["b"], ["c", "d", "e"]], 4)
    tickets.forget("c", 2)
    assert tickets._ready == 3
    for name in "fg":
        tickets.expect(arrival(2, name))
    assert tickets.take(arrival(2, "f")) is not None, "a thread waits for it"
    assert asked[3:] == [["f", "g"]]
    tickets.stop()


def test_a_job_of_which_nothing_is_known_yet_has_no_ticket() -> None:
    tickets = EarlyTickets(lambda arrivals: [None for _ in arrivals], SettableClock())
    tickets.expect(arrival(2))
    assert tickets.take(arrival(2)) is None
    tickets.stop()


def asked_for(tickets: EarlyTickets) -> None:
    wait_for(lambda: all(each.done for each in tickets._early.values()), "all are asked for")


def test_two_copies_of_a_job_have_each_its_own_ticket(early: Any) -> None:
    tickets, _ = early
    tickets.expect(arrival(1))
    tickets.expect(arrival(2))
    asked_for(tickets)
    assert tickets.take(arrival(1)).verdict is Begin.DROP
    assert tickets.take(arrival(2)).verdict is Begin.RUN
    assert tickets.take(arrival(2)) is None


def test_a_ticket_that_has_grown_old_is_asked_for_anew(early: Any) -> None:
    tickets, clock = early
    tickets.expect(arrival(2))
    asked_for(tickets)
    clock.seconds += EARLY_S + 0.01
    assert tickets.take(arrival(2)) is None


def test_a_ticket_from_before_another_copy_ended_is_void(early: Any) -> None:
    tickets, _ = early
    tickets.expect(arrival(None))
    tickets.forget("a job", None)
    assert tickets.take(arrival(None)) is None
