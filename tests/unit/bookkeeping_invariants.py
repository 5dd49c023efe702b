"""What must hold after every step of the model, and the fair schedule that must bring every world to its end.

I1 ``parallel`` is never exceeded; I2 no open Event is unreachable; I3 counts equal rows; I4 one close per generation, and a
terminal row changes by an explicit retry only; I5 nothing is acknowledged before its outcome is recorded, once; I6 ``done``
never falls in a sealed generation; I7: the jobs of two rounds of a Task start an interval apart; fence: an attempt is
dispatched once. I4, I5 and the fence are asserted where the step
happens, in the model itself; the rest here.
"""

from __future__ import annotations

import random

from bookkeeping_fates import lost
from bookkeeping_model import Copy, Life, Process, Task, World
from bookkeeping_steps import STEPS, can, do

from asynctask.core.states import OPEN, TERMINAL, State, Status
from asynctask.core.transitions import Delta, Row


def advance(world: World, name: str, pick: int = 0, k: int = 0) -> bool:
    """Takes a step and checks every invariant. False where the step cannot be taken now."""
    taken = do(world, name, pick, k)
    check(world)
    return taken


def check(world: World) -> None:
    """Asserts every invariant that can be seen in a state."""
    for task in world.tasks:
        check_counts(task)
        if not task.alone:
            check_room(world, task)
            check_generation(world, task)
            check_rounds(world, task)
        for seq, row in enumerate(task.rows()):
            assert (row.process is not None) == (row.status is Status.WORKING or lent(row)), (
                f"a process is named by what is at work, or lent to it: {row}"
            )
            if row.status in OPEN:
                assert reachable(world, task, seq, row), f"I2: nobody will find {world.copy(task, seq)}: {row}"
    check_live(world)


# What flies and how a row counts is said here in other words: asking the core would repeat its mistakes.


def lent(row: Row) -> bool:
    return row.status is Status.ENQUEUE and row.process is not None


def flies(row: Row) -> bool:
    return row.status in (Status.ENQUEUE, Status.WORKING) and row.reserved and row.due_at is None and not lent(row)


def check_counts(task: Task) -> None:
    rows = task.rows()
    expected = Delta(jobs=len(rows), dispatched=task.counts.dispatched, returned=task.counts.returned)
    for row in rows:
        names = {"f": "finish", "x": "failed", "e": "error", "c": "cancelled"}
        own = [names.get(mark) for mark in row.marks] if row.marks is not None else [None] * row.items
        for name in own:
            setattr(expected, name or row.status, getattr(expected, name or row.status) + 1)
        if row.status in OPEN and row.due_at is not None and row.retries:
            expected.retrying += own.count(None)
    assert task.counts == expected, f"I3: counts {task.counts} but rows {expected}"
    flying = sum(flies(row) for row in rows)
    assert task.flying == flying, f"I3: dispatched - returned is {task.flying}, {flying} rows are in flight"
    if not task.alone:
        assert all(seq < task.next_seq for seq, row in enumerate(rows) if row.due_at is not None), (
            "due ahead of the pointer"
        )


def in_places(world: World, task: Task) -> int:
    """What flies, without what began in a place that the ledger gave away meanwhile, as a person stopped the job there: the
    process could not know, and borrows no more for it."""
    begun = [copy for copy in world.ghosts.handed if copy.task == task.id and world.row(copy).attempt == copy.attempt]
    return task.flying - sum(flies(world.row(copy)) and is_overdrawn(world, copy) for copy in begun)


def is_overdrawn(world: World, copy: Copy) -> bool:
    """Whether it, or one that it follows, began in the place of an attempt that had no place any more."""
    before = world.ghosts.handed.get(copy)
    return before is not None and (before not in world.ghosts.recorded or is_overdrawn(world, before))


def check_room(world: World, task: Task) -> None:
    """I1: what flies stays under ``parallel``; where that was lowered, it only falls."""
    cap, flying = world.ghosts.cap.get(task.id, task.parallel), in_places(world, task)
    if cap is not None and task.parallel is not None:
        assert flying <= cap, f"I1: {flying} in flight, at most {cap} may be"
        world.ghosts.cap[task.id] = max(task.parallel, flying)


def check_generation(world: World, task: Task) -> None:
    done = task.counts.finish + task.counts.failed + task.counts.error + task.counts.cancelled
    generation, flying, sealed, before = world.ghosts.was.get(task.id, (0, 0, False, 0))
    if sealed and task.sealed and generation == task.generation:
        assert done >= before, f"I6: done fell from {before} to {done} in generation {generation}"
    now_flying = in_places(world, task)
    if now_flying > flying:
        assert task.state in (State.SPLITTING, State.RUNNING), f"a Task that is {task.state} started jobs"
    world.ghosts.was[task.id] = (task.generation, now_flying, task.sealed, done)
    assert all(count == 1 for count in task.closes.values()), f"I4: closed twice: {task.closes}"
    if task.closed:
        assert task.sealed, "I4: closed before it was sealed"
        assert task.turning is None, (
            "I4: closed while rows are turned: nobody turns a closed Task, no retry is accepted again"
        )
        assert all(row.status in TERMINAL for row in task.stored), "I4: an open row in a closed generation"


def check_rounds(world: World, task: Task) -> None:
    """I7: of two rounds, by the starts of the attempts that count: not of one whose process was taken for dead before the
    ledger knew of it, nor of a second copy in a broker that lost its memory."""
    ghosts, before = world.ghosts, None
    for copies in ghosts.rounds.get(task.id, []):
        count = [copy for copy in copies if copy in ghosts.recorded or copy == world.copy(task, copy.seq)]
        starts = [ghosts.began[copy] for copy in count if copy in ghosts.began and copy not in ghosts.forgotten]
        if starts and before is not None:
            assert min(starts) - before >= task.interval, f"I7: a round began {min(starts) - before} after the one before"
        before = max(starts, default=before)


def check_live(world: World) -> None:
    """I1: at most one live copy of an attempt, and it is in flight, so that live copies are under the room as well."""
    live: set[Copy] = set()
    for process in world.active():
        for copy in process.running:
            row = world.row(copy)
            if copy.attempt != row.attempt or row.status not in OPEN:
                continue  # fenced: whatever it comes to is dropped
            if lent(row):
                assert has_place(world, process, copy), f"I1: {copy} runs, and nothing of its Task has ended that flew"
                continue
            assert flies(row), f"I1: {copy} runs, its row is not in flight: {row}"
            # Only a broker that lost its memory under an unrecorded run lets a second copy of the same attempt begin.
            assert copy not in live or copy in world.ghosts.forgotten, f"I1: {copy} runs twice"
            live.add(copy)


def has_place(world: World, process: Process, copy: Copy) -> bool:
    """Whether as many attempts of its Task have ended here, and fly by the ledger, as there are lent ones that run.

    An attempt that the ledger took from this process under its hands (a person stopped the job, or it was given back)
    counts, too: the process handed its place on before it could know.
    """
    ended = [c for c, _ in process.buffer if c.task == copy.task]
    begun = [c for c in process.running if c.task == copy.task and lent(world.row(c))]
    return len(begun) <= sum(world.row(c).attempt != c.attempt or flies(world.row(c)) for c in ended)


def reachable(world: World, task: Task, seq: int, row: Row) -> bool:
    """I2: somebody will come by this open row and move it on."""
    copy = world.copy(task, seq)
    if lent(row):
        assert row.process is not None
        return will_move(world, row.process, copy)
    if not flies(row):
        if row.due_at is not None or row.status is Status.STOPPED:
            return True
        return seq >= task.next_seq and task.state not in (State.FINALIZING, State.FINISHED, State.REJECTED)
    holder = world.broker.held.get(copy)
    if row.status is Status.ENQUEUE:  # held by nobody: the look for lost copies finds it
        return holder is None or will_move(world, holder, copy)
    assert row.process is not None
    return will_move(world, row.process, copy)


def will_move(world: World, name: str, copy: Copy) -> bool:
    process = world.named(name)
    if process in lost(world):
        return True
    known = process.has(copy) or copy in process.batch or any(copy == c for c, _, _ in process.read)
    return process.runs_on and (known or copy in process.settled)


# -- The end of every world ----------------------------------------------------------------------------------------------

ONCE = ("tick", "beat", "look_read", "look_ask", "look_write", "recover_list")
UNTIL_DONE = (
    "seal", "resume", "start_job", "cancel_again", "turn_some", "recover_turn", "recover_drop", "give_back", "deliver",
    "take_again", "reserve", "push", "confirm", "begin_read", "begin_act", "drop_watched", "record_working", "finish",
    "flush", "ack", "close_look", "close", "call_back",
)  # fmt: skip


def drain(world: World, rounds: int = 60) -> None:
    """A fair schedule without deaths: everything that can move is moved. Then every promise must have come true."""
    for _ in range(rounds):
        drain_round(world)
        if over(world):
            break
    assert over(world), f"I2: it never ends: {[(t.state, t.turning, t.rows()) for t in world.tasks]}"
    check_end(world)


def advance_if(world: World, name: str, choice: object) -> None:
    options = STEPS[name].choices(world)
    if choice in options:
        advance(world, name, list(options).index(choice))


def drain_round(world: World) -> None:
    for name in ONCE:
        advance(world, name)
    for process in [p for p in world.processes if p.life is Life.LEAVING]:
        advance_if(world, "shut_down", process)
        if not (process.running or process.buffer or process.settled):
            advance_if(world, "kill", process)
    if not any(p.life is Life.ALIVE and not p.forgotten for p in world.processes):
        advance(world, "start_process")
    for process in [p for p in world.processes if p.life is Life.ALIVE and not p.forgotten]:
        advance_if(world, "fetch", process)
    for name in UNTIL_DONE:
        for _ in range(200):
            if not advance(world, name):
                break
        else:
            raise AssertionError(f"{name} never ends")


def over(world: World) -> bool:
    return all(
        all(row.status in TERMINAL for row in task.stored)
        and (task.alone or task.closed or task.state is State.REJECTED)
        and task.state is not State.FINALIZING
        for task in world.tasks
    )


def check_end(world: World) -> None:
    for task in world.tasks:
        counts = task.counts
        total = sum(row.items for row in task.stored)
        assert counts.finish + counts.failed + counts.error + counts.cancelled == total, "done is not the total"
        assert task.flying == 0, "something still flies"
        if not task.alone and task.state is not State.REJECTED:
            assert task.closes.get(task.generation) == 1, f"generation {task.generation} closed {task.closes}"


# -- Random walks --------------------------------------------------------------------------------------------------------

IDLE = ("tick", "look_read", "look_ask", "look_write", "beat", "start_process", "submit", "deliver")
TROUBLE = tuple(sorted(set(STEPS) - set(UNTIL_DONE) - set(IDLE) - {"submit_slice", "fetch", "lend", "hand_on"}))
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


def walk(seed: int, steps: int = 150) -> None:
    """One random life of a world and its end; raises AssertionError where a promise is broken."""
    choose, world = random.Random(seed), World()
    trouble = choose.choice((0.03, 0.1, 0.25))
    for name, pick, k in (
        ("submit", 0, choose.randrange(4)),
        ("submit_slice", 1, choose.randrange(4)),
        ("start_process", 0, 0),
    ):
        advance(world, name, pick, k)
    for _ in range(steps):
        name = any_step(world, choose, trouble)
        advance(world, name, choose.randrange(8), choose.choice((0, 0, 0, 1, 2, 3, 5)))
    drain(world)
