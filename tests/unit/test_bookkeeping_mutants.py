"""The model bites: with one decision of the bookkeeping core changed at a time, it must complain."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from bookkeeping_invariants import walk
from bookkeeping_model import Broker, Copy
from bookkeeping_steps import STEPS
from test_bookkeeping_model import TALES

from asynctask.core import transitions as core
from asynctask.core.states import OPEN, TERMINAL, State, Status
from asynctask.core.transitions import Begin, Delta, Row, Turn, begin, may_close, room

REAL: dict[str, Any] = {name: value for name, value in vars(core).items() if callable(value)}


def changed(name: str, **changes: Any) -> Callable[..., Any]:
    """The real decision, with fields of the row it leads to put back or changed (a function is given the row before)."""

    def decide(row: Row, *args: Any, **options: Any) -> Turn | None:
        turn: Turn | None = REAL[name](row, *args, **options)
        if turn is None:
            return None
        values = {field: value(row, turn.after) if callable(value) else value for field, value in changes.items()}
        return turn._replace(after=turn.after._replace(**values))

    return decide


def same_attempt(before: Row, after: Row) -> int:
    return after.attempt if after.status in TERMINAL else before.attempt


def begin_whatever_attempt(row: Row, attempt: int | None, state: str | None) -> Begin:
    return begin(row, row.attempt, state)


def begin_although_paused(row: Row, attempt: int | None, state: str | None) -> Begin:
    return begin(row, attempt, State.RUNNING if state == State.PAUSED else state)


def begin_although_cancelled(row: Row, attempt: int | None, state: str | None) -> Begin:
    return begin(row, attempt, State.RUNNING if state == State.CANCELLED else state)


def begin_although_at_work(row: Row, attempt: int | None, state: str | None) -> Begin:
    return begin(row._replace(process=None), attempt, state)


def room_without_flight(state: str, parallel: int | None, flying: int, wanted: int) -> int:
    return room(state, parallel, 0, wanted)


def difference_without_returned(before: Row | None, after: Row) -> Delta:
    delta: Delta = REAL["difference"](before, after)
    delta.returned = 0
    return delta


def difference_without_dispatched(before: Row | None, after: Row) -> Delta:
    delta: Delta = REAL["difference"](before, after)
    delta.dispatched = 0
    return delta


def close_while_turning(state: str, sealed: bool, turning: bool, counts: Delta) -> bool:
    return may_close(state, sealed, False, counts)


def close_unsealed(state: str, sealed: bool, turning: bool, counts: Delta) -> bool:
    return may_close(state, True, False, counts)


def recover_in_place(row: Row, state: str | None, **options: Any) -> Turn | None:
    turn: Turn | None = REAL["recover"](row, state, **options)
    return turn._replace(after=turn.after._replace(due_at=None)) if turn is not None else None


def recover_blames_everybody(row: Row, state: str | None, *, beside: Any, **options: Any) -> Turn | None:
    turn: Turn | None = REAL["recover"](row, state, **options)
    return turn


def redispatch_at_work(row: Row, state: str | None, *, held: bool, missed_before: bool, now: int) -> Turn | None:
    fresh = row._replace(status=Status.ENQUEUE, process=None) if row.status is Status.WORKING else row
    turn: Turn | None = REAL["redispatch"](fresh, state, held=held, missed_before=missed_before, now=now)
    return None if turn is None else turn._replace(before=row)


def next_round_by_reservations(began: int | None, started: int | None, unbegun: int, interval: int, now: int) -> int:
    at: int = REAL["next_round"](began, None, unbegun, interval, now)
    return at


def next_round_without_patience(began: int | None, started: int | None, unbegun: int, interval: int, now: int) -> int:
    at: int = REAL["next_round"](began, started, 0, interval, now)
    return at


def push_twice(self: Broker, copies: list[Copy]) -> None:
    self.held.update(dict.fromkeys(copies))


MUTANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "begin ignores attempt": (core, "begin", begin_whatever_attempt),
    "begin ignores a pause": (core, "begin", begin_although_paused),
    "begin ignores a cancel": (core, "begin", begin_although_cancelled),
    "begin ignores who is working": (core, "begin", begin_although_at_work),
    "give_back keeps the attempt": (core, "give_back", changed("give_back", attempt=same_attempt)),
    "outcome keeps the attempt of a retry": (core, "outcome", changed("outcome", attempt=same_attempt)),
    "recover keeps the attempt": (core, "recover", changed("recover", attempt=same_attempt)),
    "recover forgets due_at": (core, "recover", recover_in_place),
    "recover counts no deaths": (core, "recover", changed("recover", deaths=0)),
    "recover blames everybody": (core, "recover", recover_blames_everybody),
    "recover watches nobody": (core, "recover", changed("recover", watched=False)),
    "redispatch keeps the attempt": (core, "redispatch", changed("redispatch", attempt=same_attempt)),
    "at_rest takes what is lent": (core, "at_rest", lambda row: row.status in OPEN and not core.in_flight(row)),
    "in_flight counts what is lent": (core, "in_flight", lambda row: REAL["in_flight"](row._replace(process=None))),
    "lend names no process": (core, "lend", changed("lend", process=None)),
    "redispatch takes what is at work": (core, "redispatch", redispatch_at_work),
    "explicit_retry keeps the attempt": (core, "explicit_retry", changed("explicit_retry", attempt=lambda b, _: b.attempt)),
    "explicit_retry forgets due_at": (core, "explicit_retry", changed("explicit_retry", due_at=None)),
    "start forgets due_at": (core, "start", changed("start", due_at=None)),
    "start lets the pointer and the clock both dispatch": (core, "start", changed("start", due_at=0)),
    "working names no process": (core, "working", changed("working", process=None)),
    "outcome leaves the process": (core, "outcome", changed("outcome", process=lambda b, _: b.process)),
    "release_due leaves due_at": (core, "release_due", changed("release_due", due_at=lambda b, _: b.due_at)),
    "may_close ignores turning": (core, "may_close", close_while_turning),
    "may_close ignores an open generation": (core, "may_close", close_unsealed),
    "room ignores what is in flight": (core, "room", room_without_flight),
    "difference forgets returned": (core, "difference", difference_without_returned),
    "difference forgets dispatched": (core, "difference", difference_without_dispatched),
    "a cancel turns what is in flight": (core, "at_rest", lambda row: row.status in OPEN),
    "next_round ignores when jobs start": (core, "next_round", next_round_by_reservations),
    "next_round does not wait for jobs to start": (core, "next_round", next_round_without_patience),
    "push is not idempotent": (Broker, "push", push_twice),
}

BY_TALE_ALONE = {
    "recover forgets due_at",
    "recover counts no deaths",
    "recover blames everybody",
    "recover watches nobody",
    "redispatch takes what is at work",
    "a cancel turns what is in flight",
}
"""These break no invariant: a job runs later, or once more, or is fenced, and every promise still comes true in the end.
What they break is behaviour, which a tale states outright."""

NEEDED = {
    "a cancel passes once only": "cancel_again",
    "nobody looks for lost copies": "look_write",
    "nobody recovers": "recover_turn",
}
"""Steps that the code around the core must take. `take_again` is none: without it the look finds the same rows, later."""

LIVES = 250

FOUND_BY = {
    "begin ignores attempt": 11,
    "begin ignores a pause": 13,
    "begin ignores a cancel": 1,
    "begin ignores who is working": 133,
    "give_back keeps the attempt": 2,
    "outcome keeps the attempt of a retry": 8,
    "at_rest takes what is lent": 133,
    "in_flight counts what is lent": 3,
    "lend names no process": 3,
    "start forgets due_at": 4,
    "start lets the pointer and the clock both dispatch": 3,
    "may_close ignores turning": 5,
    "may_close ignores an open generation": 2,
    "next_round ignores when jobs start": 47,
    "next_round does not wait for jobs to start": 133,
    "push is not idempotent": 22,
    "a cancel passes once only": 6,
    "nobody recovers": 3,
}
"""The first life that each of them breaks, where it is not the very first: it is looked at before all others. When the
model changes, another life may be the one; the search finds it, and says which."""


@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in BY_TALE_ALONE])
def test_an_invariant_is_broken_when(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    assert first_broken_life(name) is not None, f"no life is broken though {name}: the invariants prove nothing about it"


@pytest.mark.parametrize("name", sorted(BY_TALE_ALONE))
def test_a_tale_fails_when(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    assert any(map(fails, TALES)), f"every tale is told as before though {name}"


@pytest.mark.parametrize("name", NEEDED)
def test_some_life_never_ends_when(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # By lives only: a tale that takes the missing step would fail whether or not the step is needed.
    monkeypatch.setitem(STEPS, NEEDED[name], STEPS[NEEDED[name]]._replace(choices=lambda world: []))
    assert first_broken_life(name) is not None


def first_broken_life(name: str) -> int | None:
    found = next((seed for seed in (FOUND_BY.get(name, 0), *range(LIVES)) if fails(partial(walk, seed))), None)
    print(f"{name}: {found}")  # what FOUND_BY should say
    return found


def fails(life: Callable[[], None]) -> bool:
    """Whether a check fails. Any other exception is the mutant's own mistake, and no proof."""
    try:
        life()
    except AssertionError:
        return True
    return False
