"""What must hold after every step of the model, and the fair schedule that must bring every world to its end.

I1 ``parallel`` is never exceeded; I2 no open Event is unreachable; I3 counts equal rows; I4 one close per generation, and a
terminal row changes by an explicit retry only; I5 an outcome is recorded once, and a foreign queue acknowledged after it;
I6 ``done`` never falls in a sealed generation; I7 rounds of a Task start an interval apart, nothing before its start time;
I8 nobody has a job that the ledger gave to another, and loans of a Task do not overlap; I9 a knob acts while what was read
is fresh; I10 no Task that could start something is missed by the hints. I4 and I5 are asserted where the step happens, in
the model itself.

What is held and how a row counts is said here in other words: asking the core would repeat its mistakes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from bookkeeping_fates import lost, unsettled
from bookkeeping_foreign import dispatchers
from bookkeeping_model import FRESH, QUEUE, Copy, Life, Process, Role, Task, World
from bookkeeping_steps import STEPS, can, do, line_of

from asynctask.core.states import OPEN, TERMINAL, State, Status
from asynctask.core.transitions import BLOCKED, OUTSIDE, Delta, Row

SECOND = 1_000_000


def advance(world: World, name: str, pick: int = 0, k: int = 0) -> bool:
    """Takes a step and checks every invariant. False where the step cannot be taken now."""
    running = {p.name: list(p.running) for p in world.active()}
    taken = do(world, name, pick, k)
    if taken:
        check(world)
        for process in world.active():
            for copy in process.running:
                if copy not in running.get(process.name, []):
                    check_begin(world, process, copy)
    return taken


def check(world: World) -> None:
    """Asserts every invariant that can be seen in a state."""
    for task in world.tasks:
        check_counts(task)
        if not task.alone:
            check_loans(task)
            check_generation(world, task)
            check_rounds(world, task)
            check_hints(world, task)
        for seq, row in enumerate(task.rows()):
            if row.status in OPEN:
                assert reachable(world, task, seq, row), f"I2: nobody will find {world.copy(task, seq)}: {row}"
            else:
                assert row.process is None, f"a process is named by what is over: {row}"
    check_holders(world)


def holder(task: Task, seq: int, row: Row) -> str | None:
    """Who has an open row by the ledger: whoever it names, or whoever has the range in which it lies unmarked."""
    if row.status not in ("enqueue", "working") or row.due_at is not None:
        return None
    if row.process is not None:
        return row.process
    return next((loan.process for loan in task.loans if loan.low <= seq < loan.high and loan.process), None)


def check_counts(task: Task) -> None:
    rows = task.rows()
    expected = Delta(jobs=len(rows))
    for row in rows:
        names = {"f": "finish", "x": "failed", "e": "error", "c": "cancelled"}
        own = [names.get(mark) for mark in row.marks] if row.marks is not None else [None] * row.items
        for name in own:
            setattr(expected, name or row.status, getattr(expected, name or row.status) + 1)
        if row.status in OPEN and row.due_at is not None and row.retries:
            expected.retrying += own.count(None)
    assert task.counts == expected, f"I3: counts {task.counts} but rows {expected}"
    if not task.alone:
        assert all(seq < task.next_seq for seq, row in enumerate(rows) if row.due_at is not None), (
            "due ahead of the pointer"
        )


def check_loans(task: Task) -> None:
    """I8, of the ranges."""
    ranges = sorted((loan.low, loan.high) for loan in task.loans)
    assert all(low < high <= task.next_seq for low, high in ranges), f"I8: a loan of nothing, or ahead: {ranges}"
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges)), f"I8: loans overlap: {ranges}"


def check_holders(world: World) -> None:
    """I8: whatever an own process has not lost to a higher attempt is its own by the ledger, so nobody else's."""
    seen: dict[Copy, str] = {}
    for process in world.active(Role.OWN, Role.DISPATCHER):
        for copy in process.copies:
            task, row = world.tasks[copy.task], world.row(copy)
            if row.attempt != copy.attempt or row.status not in OPEN or process.pushed:
                continue  # fenced: whatever it comes to is dropped; pushed: the queue's, though the ledger does not say so
            assert copy not in seen, f"I8: {process.name} and {seen[copy]} both have {copy}"
            seen[copy] = process.name
            has = holder(task, copy.seq, row)
            assert has == process.name, f"I8: {process.name} has {copy}, which is {has}'s by the ledger: {row}"
    lines: dict[tuple[int, int], Copy] = {}
    twice: set[Copy] = set()
    for process in world.active():
        for copy in process.running:
            if process.role is Role.ENGINE and counts(world, copy):
                assert copy not in twice or copy in world.ghosts.doubled, f"I8: {copy} runs twice, and no engine lost it"
                twice.add(copy)
            if world.tasks[copy.task].keys and counts(world, copy):
                line = line_of(world.tasks[copy.task], copy.seq)
                assert lines.setdefault(line, copy) == copy, f"I8: {copy} runs beside {lines[line]}, of the same key"


def counts(world: World, copy: Copy) -> bool:
    """Whether what runs as this attempt would be recorded."""
    row = world.row(copy)
    return row.attempt == copy.attempt and row.status in ("enqueue", "working")


def check_begin(world: World, process: Process, copy: Copy) -> None:
    """I1 and I9, of a job that has just begun."""
    task = world.tasks[copy.task]
    if task.alone or not counts(world, copy):
        return
    running = {c for p in world.active() for c in p.running if c.task == copy.task and counts(world, c)}
    limits = world.ghosts.limits[task.id]
    since = world.now - FRESH if process.role is Role.OWN else -1
    last = max(n for n, (at, _) in enumerate(limits) if n == 0 or at < since)
    most = [limit for _, limit in limits[last:]] if process.role is Role.OWN else [limit for _, limit in limits]
    assert None in most or len(running) <= max(n for n in most if n is not None), f"I1: {running} run, {most} may"
    if process.role is Role.OWN:
        barred = world.ghosts.barred.get(task.id, world.now)
        assert world.now - barred <= FRESH, f"I9: {copy} began while its Task is {task.state}"


def check_generation(world: World, task: Task) -> None:
    done = task.counts.finish + task.counts.failed + task.counts.error + task.counts.cancelled
    generation, sealed, before = world.ghosts.was.get(task.id, (0, False, 0))
    if sealed and task.sealed and generation == task.generation:
        assert done >= before, f"I6: done fell from {before} to {done} in generation {generation}"
    world.ghosts.was[task.id] = (task.generation, task.sealed, done)
    if task.state in (State.SPLITTING, State.RUNNING) and world.in_session(task):
        world.ghosts.barred.pop(task.id, None)
    else:
        world.ghosts.barred.setdefault(task.id, world.now)
    assert all(count == 1 for count in task.closes.values()), f"I4: closed twice: {task.closes}"
    if task.closed:
        assert task.sealed, "I4: closed before it was sealed"
        assert task.turning is None, (
            "I4: closed while rows are turned: nobody turns a closed Task, no retry is accepted again"
        )
        assert all(row.status in TERMINAL for row in task.stored), "I4: an open row in a closed generation"


def check_rounds(world: World, task: Task) -> None:
    """I7: of two rounds, by the starts of the attempts that count: not of one whose process was taken for dead before the
    ledger knew of it."""
    ghosts, before = world.ghosts, None
    for copy, at in ghosts.began.items():
        assert copy.task != task.id or at >= task.start_at, f"I7: {copy} began at {at}, before {task.start_at}"
    for copies in ghosts.rounds.get(task.id, []):
        count = [copy for copy in copies if copy in ghosts.recorded or copy == world.copy(task, copy.seq)]
        starts = [ghosts.began[copy] for copy in count if copy in ghosts.began]
        if starts and before is not None:
            assert min(starts) - before >= task.interval, f"I7: a round began {min(starts) - before} after the one before"
        before = max(starts, default=before)


def check_hints(world: World, task: Task) -> None:
    """I10: of a Task that may start, the index says when; or somebody who lives is about to say it, or maintenance finds
    that nobody does."""
    if task.state not in (State.SPLITTING, State.RUNNING) or not world.in_session(task):
        return
    dues = [row.due_at for row in task.stored if row.due_at is not None and row.due_at != BLOCKED]
    if not dues and not task.waits:
        return
    first = world.now if task.waits else max(world.now, min(dues))
    if task.interval:  # while a job of its last round waits for a thread, it is asked again within a second
        first += task.interval + SECOND
    first = max(first, task.start_at)
    ready, due_next = task.hints
    known = ready is not None or (due_next is not None and due_next <= first)
    owed = any(task.id in process.owes for process in world.active())
    assert known or owed or unsettled(world, task), f"I10: {task.hints} at {world.now}, it could start at {first}"


def reachable(world: World, task: Task, seq: int, row: Row) -> bool:
    """I2: somebody will come by this open row and move it on."""
    if row.due_at is not None or row.status is Status.STOPPED:
        return True
    has = holder(task, seq, row)
    if has in (QUEUE, OUTSIDE):  # lost by the queue: the look finds it; at work outside: that program ends it
        return True
    if has is not None:
        return will_move(world, has, task, seq)
    waits = seq >= task.next_seq or any(loan.low <= seq < loan.high for loan in task.loans)
    if task.state is State.CANCELLED:
        return True  # another pass of the cancel
    return not task.alone and waits and task.state not in (State.FINALIZING, State.FINISHED, State.REJECTED)


def will_move(world: World, name: str, task: Task, seq: int) -> bool:
    process, copy = world.named(name), world.copy(task, seq)
    if process in lost(world):
        return True
    if not process.runs_on:
        return False
    part = next((p for p in process.parts.values() if p.task == task.id and p.low <= seq < p.high), None)
    unread = part is not None and part.left is None
    returned = any(r.task == task.id and r.seq <= seq < r.high for r in process.returns)
    if process.role is not Role.ENGINE and (part is None or task.row(seq).process == name):
        return True  # the answer of the borrow was lost: the next check returns what the process does not know
    if process.life is Life.LEAVING:
        return True  # it frees all its loans before it ends
    return process.knows(copy) or unread or returned


# -- The end of every world ----------------------------------------------------------------------------------------------

ONCE = ("tick", "beat", "look_read", "look_ask", "look_write")
EACH = ("check_read", "check_act", "ask_places", "trim")
UNTIL_DONE = (
    "seal", "resume", "start_job", "cancel_again", "change_rows", "recover_loan", "recover_rows", "recover_end", "repair",
    "repair_line", "give_back_rows", "return_part", "deliver", "redeliver", "borrow", "borrow_for_queue", "read_range",
    "push", "hand_over", "fetch", "begin_read", "begin_act", "begin", "drop_watched", "record_working", "finish", "flush",
    "announce", "ack", "end_outside", "close_look", "close", "call_back",
)  # fmt: skip


def drain(world: World, rounds: int = 60) -> None:
    """A fair schedule without deaths: everything that can move is moved. Then every promise must have come true."""
    for _ in range(rounds):
        drain_round(world)
        if over(world):
            break
    assert over(world), f"I2: it never ends: {[(t.state, t.turning, t.hints, t.loans, t.rows()) for t in world.tasks]}"
    drain_round(world)
    check_end(world)


def advance_if(world: World, name: str, choice: object) -> None:
    options = STEPS[name].choices(world)
    if choice in options:
        advance(world, name, list(options).index(choice))


def drain_round(world: World) -> None:
    for name in ONCE:
        advance(world, name)
    while can(world, "beat"):
        advance(world, "beat")
    for process in [p for p in world.processes if p.life is Life.LEAVING]:
        for name in ("flush", "announce", "leave", "announce"):
            advance_if(world, name, process)
        if not (process.buffer or process.settled):
            advance_if(world, "kill", process)
    if not any(p.life is Life.ALIVE and not p.forgotten for p in world.active(Role.OWN)):
        advance(world, "start_process")
    if not [d for d in dispatchers(world) if d.life is Life.ALIVE]:
        advance(world, "start_dispatcher")
    if not any(p.life is Life.ALIVE for p in world.active(Role.ENGINE)):
        advance(world, "start_worker")
    for name in EACH:
        for choice in list(STEPS[name].choices(world)):
            answer_asks(world)
            advance_if(world, name, choice)
    answer_asks(world)
    for name in UNTIL_DONE:
        for _ in range(200):
            if not advance(world, name):
                break
        else:
            raise AssertionError(f"{name} never ends")


def answer_asks(world: World) -> None:
    while advance(world, "lease_places"):
        pass


def over(world: World) -> bool:
    return all(
        all(row.status in TERMINAL for row in task.stored)
        and (task.alone or task.closed or task.state is State.REJECTED)
        and task.state is not State.FINALIZING
        for task in world.tasks
    )


def check_end(world: World) -> None:
    for task in world.tasks:
        assert not any(loan.process for loan in task.loans), f"loans of nothing stay: {task.loans}"
        counts = task.counts
        total = sum(row.items for row in task.stored)
        assert counts.finish + counts.failed + counts.error + counts.cancelled == total, "done is not the total"
        if not task.alone and task.state is not State.REJECTED:
            assert task.closes.get(task.generation) == 1, f"generation {task.generation} closed {task.closes}"


# -- Random walks --------------------------------------------------------------------------------------------------------

IDLE = ("tick", "look_read", "look_ask", "look_write", "beat", "start_process", "submit", "deliver", "trim")
CHECKS = ("check_read", "check_act", "ask_places", "lease_places")
TROUBLE = tuple(sorted(set(STEPS) - set(UNTIL_DONE) - set(IDLE) - set(CHECKS) - {"submit_slice"} | {"redeliver"}))
PATH = tuple(sorted(set(STEPS) - set(IDLE) - set(TROUBLE)))


def any_step(world: World, choose: random.Random, trouble: float) -> str:
    """A step that can be taken: mostly one that gets the work on, for else no life gets far enough to be in trouble."""
    stuck = not any(can(world, name) for name in PATH)
    while True:
        dice = choose.random()
        name = choose.choice(TROUBLE if dice < trouble else IDLE if stuck or dice < trouble + 0.15 else PATH)
        empty = name == "seal" and not any(task.stored for task in world.open_tasks())
        if can(world, name) and not (empty and dice < 0.98):
            return name


def walk(seed: int, steps: int = 150, kinds: Sequence[int] = range(24)) -> None:
    """One random life of a world and its end; raises AssertionError where a promise is broken. ``kinds``: of its Tasks, as
    `submit` numbers them."""
    choose, world = random.Random(seed), World()
    trouble = choose.choice((0.03, 0.1, 0.25))
    for name, pick, k in (
        ("submit", 0, choose.choice(kinds)),
        ("submit_slice", 1, choose.randrange(4)),
        ("start_process", 0, 0),
    ):
        advance(world, name, pick, k)
    for _ in range(steps):
        name = any_step(world, choose, trouble)
        k = choose.choice(kinds) if name == "submit" else choose.choice((0, 0, 0, 1, 2, 3, 4, 5))
        advance(world, name, choose.randrange(8), k)
    drain(world)
