"""The model bites: with one decision of the core, or one rule of the lending, changed at a time, it must complain."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import bookkeeping_fates
import bookkeeping_steps
import pytest
from bookkeeping_invariants import walk
from bookkeeping_model import Broker, Copy, Loan, Process, Return, Task, World
from bookkeeping_steps import STARTING, STEPS
from test_bookkeeping_model import TALES

from asynctask.core import readiness
from asynctask.core import transitions as core
from asynctask.core.readiness import Gate, Hints
from asynctask.core.states import OPEN, TERMINAL, State, Status
from asynctask.core.transitions import Begin, Delta, Row, Transition, begin, may_close

pytestmark = pytest.mark.full(reason="it proves the model, not the program")

REAL: dict[str, Any] = {
    name: value for module in (core, readiness) for name, value in vars(module).items() if callable(value)
}


ROOM = bookkeeping_steps.room


def changed(name: str, **changes: Any) -> Callable[..., Any]:
    """The real decision, with fields of the row it leads to put back or changed (a function is given the row before)."""

    def decide(row: Row, *args: Any, **options: Any) -> Transition | None:
        turn: Transition | None = REAL[name](row, *args, **options)
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


def held_by_a_mark_alone(row: Row, on_loan: bool) -> bool:
    return bool(REAL["is_held"](row, False))


def held_by_a_loan_alone(row: Row, on_loan: bool) -> bool:
    return bool(REAL["is_held"](row._replace(process=None), on_loan))


def held_although_due(row: Row, on_loan: bool) -> bool:
    return bool(REAL["is_held"](row._replace(due_at=None), on_loan))


def held_where_it_works(row: Row, on_loan: bool) -> bool:
    return row.status is Status.WORKING or bool(REAL["is_held"](row, on_loan))


def stop_what_is_held(row: Row, on_loan: bool) -> Transition | None:
    return core.stop(row) if row.status in (Status.ENQUEUE, Status.WORKING) else None


def close_while_turning(state: str, sealed: bool, turning: bool, counts: Delta) -> bool:
    return may_close(state, sealed, False, counts)


def close_unsealed(state: str, sealed: bool, turning: bool, counts: Delta) -> bool:
    return may_close(state, True, False, counts)


def recover_in_place(row: Row, state: str | None, **options: Any) -> Transition | None:
    turn: Transition | None = REAL["recover"](row, state, **options)
    return turn._replace(after=turn.after._replace(due_at=None)) if turn is not None else None


def recover_blames_everybody(row: Row, state: str | None, *, beside: Any = (), **options: Any) -> Transition | None:
    turn: Transition | None = REAL["recover"](row, state, **options)
    return turn


def redispatch_at_work(row: Row, state: str | None, *, now: int) -> Transition | None:
    fresh = row._replace(status=Status.ENQUEUE, process=None) if row.status is Status.WORKING else row
    turn: Transition | None = REAL["redispatch"](fresh, state, now=now)
    return None if turn is None else turn._replace(before=row)


def next_round_by_borrows(began: int | None, started: int | None, unbegun: int, interval: int, now: int) -> int:
    at: int = REAL["next_round"](began, None, unbegun, interval, now)
    return at


def next_round_without_patience(began: int | None, started: int | None, unbegun: int, interval: int, now: int) -> int:
    at: int = REAL["next_round"](began, started, 0, interval, now)
    return at


def room_whatever_is_taken(wanted: int, limit: int | None, taken: int) -> int:
    return ROOM(wanted, limit, 0)


def granted_below_what_runs(want: int, running: int, limit: int, others: int, *, is_open: bool) -> int:
    return int(REAL["granted"](want, 0, limit, others, is_open=is_open))


def granted_beside_others(want: int, running: int, limit: int, others: int, *, is_open: bool) -> int:
    return int(REAL["granted"](want, running, limit, 0, is_open=is_open))


def granted_to_strangers(want: int, running: int, limit: int, others: int, *, is_open: bool) -> int:
    return int(REAL["granted"](want, running, limit, others, is_open=True))


def hints_without_due(gate: Gate, now: int) -> Hints:
    return Hints(REAL["hints"](gate, now).ready, gate.opens)


def hints_without_waiting(gate: Gate, now: int) -> Hints:
    return Hints(None, REAL["hints"](gate, now).due_next)


def hints_without_rounds(gate: Gate, now: int) -> Hints:
    hints: Hints = REAL["hints"](gate, now)
    return hints if gate.opens is None or gate.opens <= now else Hints(None, gate.due)


def push_twice(self: Broker, copies: list[Copy]) -> None:
    self.held.update(dict.fromkeys(copies))


CORE: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "begin ignores attempt": (core, "begin", begin_whatever_attempt),
    "begin ignores a pause": (core, "begin", begin_although_paused),
    "begin ignores a cancel": (core, "begin", begin_although_cancelled),
    "begin ignores who is working": (core, "begin", begin_although_at_work),
    "is_held ignores loans": (core, "is_held", held_by_a_mark_alone),
    "is_held ignores claims": (core, "is_held", held_by_a_loan_alone),
    "is_held ignores due_at": (core, "is_held", held_although_due),
    "is_held takes whatever works": (core, "is_held", held_where_it_works),
    "a cancel turns what is held": (core, "at_rest", lambda row, on_loan: row.status in OPEN),
    "ask_stop stops what is held": (core, "ask_stop", stop_what_is_held),
    "claim names no process": (core, "claim", changed("claim", process=None)),
    "claim leaves due_at": (core, "claim", changed("claim", due_at=lambda b, _: b.due_at)),
    "give_back keeps the attempt": (core, "give_back", changed("give_back", attempt=same_attempt)),
    "outcome keeps the attempt of a retry": (core, "outcome", changed("outcome", attempt=same_attempt)),
    "outcome leaves the process": (core, "outcome", changed("outcome", process=lambda b, _: b.process)),
    "recover keeps the attempt": (core, "recover", changed("recover", attempt=same_attempt)),
    "recover forgets due_at": (core, "recover", recover_in_place),
    "recover counts no deaths": (core, "recover", changed("recover", deaths=0)),
    "recover blames everybody": (core, "recover", recover_blames_everybody),
    "recover watches nobody": (core, "recover", changed("recover", watched=False)),
    "whatever is watched is suspect": (core, "is_suspect", lambda row: row.watched or row.deaths > 0),
    "redispatch keeps the attempt": (core, "redispatch", changed("redispatch", attempt=same_attempt)),
    "redispatch takes what is at work": (core, "redispatch", redispatch_at_work),
    "explicit_retry keeps the attempt": (core, "explicit_retry", changed("explicit_retry", attempt=lambda b, _: b.attempt)),
    "explicit_retry forgets due_at": (core, "explicit_retry", changed("explicit_retry", due_at=None)),
    "start forgets due_at": (core, "start", changed("start", due_at=None)),
    "start lets the pointer and the clock both begin": (core, "start", changed("start", due_at=0)),
    "working names no process": (core, "working", changed("working", process=None)),
    "recorded names nobody": (core, "recorded", changed("recorded", process=lambda b, _: b.process)),
    "recorded does not mark what goes back": (core, "recorded", changed("recorded", due_at=None)),
    "may_close ignores turning": (core, "may_close", close_while_turning),
    "may_close ignores an open generation": (core, "may_close", close_unsealed),
    "next_round ignores when jobs start": (core, "next_round", next_round_by_borrows),
    "next_round does not wait for jobs to start": (core, "next_round", next_round_without_patience),
    "room ignores what is taken": (bookkeeping_steps, "room", room_whatever_is_taken),
    "granted ignores what runs": (readiness, "granted", granted_below_what_runs),
    "granted ignores others": (readiness, "granted", granted_beside_others),
    "granted ignores who has no places": (readiness, "granted", granted_to_strangers),
    "hints forget what is due": (readiness, "hints", hints_without_due),
    "hints forget what waits": (readiness, "hints", hints_without_waiting),
    "hints forget the next round": (readiness, "hints", hints_without_rounds),
    "may_start ignores sessions": (readiness, "may_start", lambda state, in_session=True: state in STARTING),
    "has_turn ignores who is first": (readiness, "has_turn", lambda event_id, place, first, before: True),
    "may_start ignores the state": (readiness, "may_start", lambda state, in_session=True: in_session),
    "push is not idempotent": (Broker, "push", push_twice),
}


# What the code around the core must do: each of these is how a prototype, or a first draft, did it.


def recovers_whatever_is_in_the_range(row: Row) -> bool:
    return True


def gives_back_what_it_lost(w: World, name: str, part: Return) -> bool:
    w.insert_loan(w.tasks[part.task], part.seq, part.high, None)
    return True


def reads_marked_rows(row: Row) -> bool:
    return row.status is Status.ENQUEUE


def reads_what_the_borrow_saw(row: Row) -> bool:
    return row.due_at is None and row.process is None


def reads_only_what_is_enqueued(row: Row) -> bool:
    return row.status is Status.ENQUEUE and row.due_at is None and row.process is None


def ends_no_empty_loan(process: Process) -> list[int]:
    over = {(c.task, c.seq) for c, _ in process.buffer}
    ended = [key for key, part in process.parts.items() if part.left is not None and not part.left]
    return [key for key in ended if any((process.parts[key].task, s) in over for s in range(process.parts[key].low, 99))]


def holders_by_loans(task: Task) -> set[str | None]:
    return {loan.process for loan in task.loans}


def permits_by_the_last_answer(process: Process, task_id: int) -> int | None:
    limit = process.limits.get(task_id, 0)
    return None if limit is None else max(process.places.get(task_id, 0), process.ask.want if process.ask else 0)


def permits_although_its_row_stands(process: Process, task_id: int) -> int | None:
    return None if process.limits.get(task_id, 0) is None else process.places.get(task_id, 0)


def drops_before_the_answer(process: Process, tail: list[Copy]) -> None:
    process.drop(tail)


def counts_what_was_given_back(self: World, task: Task) -> int:
    rows = [task.row(seq) for seq in task.round_rows]
    unbegun = sum(row.status is Status.ENQUEUE and row.due_at is None for row in rows)
    started = max((task.started[seq] for seq in task.round_rows if seq in task.started), default=None)
    return core.next_round(task.round_at, started, unbegun, task.interval, self.now)


def repairs_what_has_no_hint(w: World, task: Task) -> bool:
    return task.hints == (None, None) and task.state in STARTING and w.in_session(task) and task.waits


def compares_the_id_alone(loan: Loan, name: str, part: Return) -> bool:
    return loan.id == part.loan


AROUND: dict[str, tuple[Any, str, Any]] = {
    "recovery takes whatever is in the range": (bookkeeping_fates, "is_of_loan", recovers_whatever_is_in_the_range),
    "a give-back does not compare": (bookkeeping_steps, "give_back_range", gives_back_what_it_lost),
    "a give-back compares the id alone": (bookkeeping_steps, "is_unchanged", compares_the_id_alone),
    "a range is read with what is marked": (bookkeeping_steps, "is_in_range", reads_marked_rows),
    "a range is read before the commit": (bookkeeping_steps, "is_in_range", reads_what_the_borrow_saw),
    "a range is read by enqueue alone": (bookkeeping_steps, "is_in_range", reads_only_what_is_enqueued),
    "a loan of rows that ended stays": (bookkeeping_steps, "ended_parts", ends_no_empty_loan),
    "claims hold no place": (bookkeeping_steps, "holders_of", holders_by_loans),
    "a row of no places goes": (bookkeeping_steps, "keeps_row", lambda process, task: False),
    "jobs begin while places are asked for": (bookkeeping_steps, "permits", permits_by_the_last_answer),
    "jobs begin without limit beside a row of places": (bookkeeping_steps, "permits", permits_although_its_row_stands),
    "a check does not look for claims": (bookkeeping_steps, "own_claims", lambda w, process: []),
    "a loan may end before its give-back is answered": (bookkeeping_steps, "let_go", drops_before_the_answer),
    "a round waits for what was given back": (World, "round_opens", counts_what_was_given_back),
    "repair looks for Tasks without a hint alone": (bookkeeping_fates, "unsettled", repairs_what_has_no_hint),
    "nothing that was read gets old": (bookkeeping_steps, "FRESH", 10**12),
}

MUTANTS = CORE | AROUND

BY_TALE = {
    "begin ignores a pause",
    "begin ignores who is working",
    "recover counts no deaths",
    "recover blames everybody",
    "recover watches nobody",
    "whatever is watched is suspect",
    "redispatch keeps the attempt",
    "redispatch takes what is at work",
    "room ignores what is taken",
    "granted ignores what runs",
    "granted ignores who has no places",
    "may_start ignores sessions",
    "may_start ignores the state",
    "push is not idempotent",
    *(AROUND.keys() - {"a give-back does not compare", "a loan of rows that ended stays", "a row of no places goes"}),
}
"""What a tale tells outright: some of these break no invariant (a job runs later, or once more, or is fenced, and every
promise still comes true in the end), the others one that a random life seldom comes near."""

NEEDED = {
    "a cancel passes once only": "cancel_again",
    "nobody looks for lost copies": "look_write",
    "nobody recovers loans": "recover_loan",
    "nobody recovers claims": "recover_rows",
    "nobody checks": "check_act",
}
"""Steps that the code around the core must take."""

LIVES = 250

KINDS = {
    "begin ignores attempt": range(8, 12),
    "begin ignores a cancel": range(8, 12),
    "nobody looks for lost copies": range(8, 12),
    "granted ignores others": range(3),
    "next_round ignores when jobs start": range(4, 8),
    "next_round does not wait for jobs to start": range(4, 8),
}
"""Which Tasks the lives have that show it, as `submit` numbers them; else all kinds."""

FOUND_BY = {
    "a cancel passes once only": 9,
    "a cancel turns what is held": 4,
    "a give-back does not compare": 1,
    "a loan of rows that ended stays": 3,
    "a row of no places goes": 25,
    "ask_stop stops what is held": 14,
    "begin ignores a cancel": 3,
    "begin ignores attempt": 89,
    "explicit_retry keeps the attempt": 1,
    "give_back keeps the attempt": 1,
    "granted ignores others": 49,
    "hints forget the next round": 3,
    "hints forget what is due": 1,
    "hints forget what waits": 1,
    "is_held ignores claims": 28,
    "is_held ignores loans": 1,
    "is_held takes whatever works": 22,
    "next_round does not wait for jobs to start": 1,
    "next_round ignores when jobs start": 9,
    "nobody checks": 1,
    "nobody looks for lost copies": 12,
    "nobody recovers loans": 1,
    "outcome keeps the attempt of a retry": 2,
    "recorded does not mark what goes back": 5,
    "start lets the pointer and the clock both begin": 1,
}
"""The first life that each of them breaks, where it is not the very first: it is looked at before all others. When the
model changes, another life may be the one; the search finds it, and says which."""


@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in BY_TALE])
def test_an_invariant_is_broken_when(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    assert first_broken_life(name) is not None, f"no life is broken though {name}: the invariants prove nothing about it"


@pytest.mark.parametrize("name", sorted(BY_TALE))
def test_a_tale_fails_when(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    assert any(map(fails, TALES)), f"every tale is told as before though {name}"


@pytest.mark.parametrize("name", NEEDED)
def test_some_life_never_ends_when(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # By lives only: a tale that takes the missing step would fail whether or not the step is needed.
    monkeypatch.setitem(STEPS, NEEDED[name], STEPS[NEEDED[name]]._replace(choices=lambda world: []))
    assert first_broken_life(name) is not None


def first_broken_life(name: str) -> int | None:
    life = partial(walk, kinds=KINDS.get(name, range(20)))
    found = next((seed for seed in (FOUND_BY.get(name, 0), *range(LIVES)) if fails(partial(life, seed))), None)
    print(f"{name}: {found}")  # what FOUND_BY should say
    return found


def fails(life: Callable[[], None]) -> bool:
    """Whether a check fails. Any other exception is the mutant's own mistake, and no proof."""
    try:
        life()
    except AssertionError:
        return True
    return False
