"""The steps of the model: everything that can happen to a `World`, one boundary to the outside at a time.

One step is one ledger transaction, one call to a queue, or one thing that befalls a process. Whoever drives the world
may take them in any order, so anything can die between any two. `choices` lists what a step can be applied to now; `k` is
a small number that picks between variants. Here: submit, borrow, perform, give back, as an own process does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bookkeeping_model import FRESH, QUEUE, TICK, Answer, Ask, Copy, Life, Loan, Part, Process, Return, Role, Task, World

from asynctask.core import readiness
from asynctask.core import transitions as core
from asynctask.core.states import OPEN, Reason, State, Status
from asynctask.core.transitions import BLOCKED, OUTSIDE, Row, Transition

BACKOFF, INTERVAL, STALLED = 2 * TICK, 4 * TICK, 2 * TICK
MAX_TASKS, MAX_ROWS, MAX_PROCESSES, MAX_GENERATIONS, MAX_RETRIES, THREADS = 3, 4, 3, 4, 2, 3
OUTCOMES = ("finish", "retry", "failed", "error", "timeout", "stopped", "discarded")
RUNNABLE = (Status.ENQUEUE, Status.WORKING)
STARTING = (State.SPLITTING, State.RUNNING)


class Step(NamedTuple):
    choices: Callable[[World], Sequence[Any]]
    run: Callable[[World, Any, int], None]


STEPS: dict[str, Step] = {}


def step(choices: Callable[[World], Sequence[Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks a function as a step that can be applied to each of ``choices`` (none: it cannot be taken now)."""

    def mark(run: Callable[..., None]) -> Callable[..., None]:
        STEPS[run.__name__] = Step(choices, run)
        return run

    return mark


def can(world: World, name: str) -> bool:
    return bool(STEPS[name].choices(world))


def do(world: World, name: str, pick: int = 0, k: int = 0) -> bool:
    """Takes one step on the ``pick``-th of its choices. False where it has none."""
    options = STEPS[name].choices(world)
    if not options:
        return False
    STEPS[name].run(world, options[pick % len(options)], k)
    return True


@step(lambda w: [w])
def tick(w: World, _: World, k: int) -> None:
    """Time goes on: due rows come up, what was read is no longer fresh."""
    w.now += TICK * (1 + k)


# -- Submit --------------------------------------------------------------------------------------------------------------


@step(lambda w: [w] if len(w.tasks) <= MAX_TASKS else [])
def submit(w: World, _: World, k: int) -> None:
    """A list is handed in: the Task is there, its rows follow in slices. ``k``: 0 to 3 its limit, and of each four: plain,
    in rounds, for a foreign queue, with keys, in a session, with a start time."""
    kind = k // 4
    task = Task(len(w.tasks), parallel=(2, 1, 3, None)[k % 4], interval=INTERVAL if kind == 1 else 0)
    task.foreign, task.keys, task.session = kind == 2, kind == 3, kind == 4
    task.start_at = w.now + INTERVAL if kind == 5 else 0
    w.tasks.append(task)
    w.ghosts.limits[task.id] = [(w.now, task.limit)]
    w.settle(task)


@step(lambda w: [t for t in w.tasks if (t.alone or t.splitting) and len(t.stored) < MAX_ROWS])
def submit_slice(w: World, task: Task, k: int) -> None:
    """One slice of rows; alone: one Event without a Task, due at once or later."""
    for _ in range(min(1 if task.alone else 1 + k, MAX_ROWS - len(task.stored))):
        due_at = w.now + k * TICK if task.alone else None
        row = Row(Status.ENQUEUE, due_at=due_at, reserved=task.alone, items=1 + k % 2)
        task.counts.add(core.difference(None, row))
        task.stored.append(row)
    w.settle(task)


@step(lambda w: [t for t in w.open_tasks() if t.splitting])
def seal(w: World, task: Task, k: int) -> None:
    """Every row is in the ledger."""
    task.splitting, task.sealed = False, True
    if not task.stored and task.state in (State.SPLITTING, State.PAUSED):
        task.change_state(State.REJECTED, Reason.NOTHING_ACCEPTED)
    elif task.state is State.SPLITTING:
        task.change_state(State.RUNNING, Reason.SEALED)
    settle_session(w, task)


def settle_session(w: World, task: Task) -> None:
    """Settles a Task that has changed, and with it whoever may come after it in its session."""
    for each in w.tasks if task.session else [task]:
        w.settle(each)


# -- Borrow --------------------------------------------------------------------------------------------------------------


@step(lambda w: [w] if len([p for p in w.active(Role.OWN) if p.life is not Life.LEAVING]) < MAX_PROCESSES else [])
def start_process(w: World, _: World, k: int) -> None:
    w.born += 1
    w.processes.append(Process(f"p{w.born}"))


def is_picked(w: World, task: Task) -> bool:
    """What the index says: worth a borrow, whether or not anything can be had."""
    if task.alone:
        return bool(due(w, task))
    is_due = task.hints.due_next is not None and task.hints.due_next <= w.now
    return task.hints.ready is not None or (is_due and task.state in STARTING and w.in_session(task))


def due(w: World, task: Task) -> list[int]:
    return [
        s for s, r in enumerate(task.stored) if r.status is Status.ENQUEUE and r.due_at is not None and r.due_at <= w.now
    ]


def places_left(task: Task, process: Process) -> bool:
    limit = task.limit
    return limit is None or process.name in task.places or limit > sum(task.places.values())


@step(
    lambda w: [
        (p, t)
        for p in w.active(Role.OWN)
        if p.life in (Life.ALIVE, Life.STALLED) and p.answer is None
        for t in w.tasks
        if not t.foreign and is_picked(w, t) and places_left(t, p)
    ]
)
def borrow(w: World, where: tuple[Process, Task], k: int) -> None:
    """One transaction, and its answer. A stalled one had asked before it stalled: the ledger obeys late. ``k`` 4: the
    answer is lost, the ledger has the loan and the process does not."""
    process, task = where
    loans, claimed = lend(w, task, process.name, 1 + k % 4)
    if k >= 4:
        return
    got(w, process, task, loans, claimed)


def got(w: World, process: Process, task: Task, loans: list[Loan], claimed: list[Copy]) -> None:
    for loan in loans:
        process.parts[loan.id] = Part(task.id, loan.low, loan.high, w.now)
    process.claims.update(claimed)
    process.line += claimed
    process.since |= dict.fromkeys(claimed, w.now)
    if (loans or claimed) and not task.alone:
        process.limits[task.id] = task.limit  # as the borrow saw it under the lock


def room(wanted: int, limit: int | None, taken: int) -> int:
    """How many jobs of a Task may start now: ``wanted``, within its ``limit`` minus those that are ``taken``."""
    return max(0, wanted if limit is None else min(wanted, limit - taken))


def lend(w: World, task: Task, name: str, wanted: int) -> tuple[list[Loan], list[Copy]]:
    """One transaction: rows that are due, then free loans, then rows at the pointer."""
    if not task.alone and not readiness.may_start(task.state or "", w.in_session(task)):
        w.settle(task)
        return [], []
    if not task.alone and (w.opens(task) or 0) > w.now:
        w.settle(task)
        return [], []
    if task.interval:
        wanted = room(MAX_ROWS, task.limit, sum(task.places.values()))
    if task.foreign:
        held = [seq for seq, row in enumerate(task.rows()) if core.is_held(row, task.lent(seq))]
        wanted = room(wanted, task.limit, len(held))
    claimed = [claim(w, task, seq, name) for seq in with_turn(w, task, due(w, task))[: max(0, wanted)]]
    wanted -= len(claimed)
    loans: list[Loan] = []
    if not task.alone:
        loans, low = take_free(w, task, name, wanted), task.next_seq
        high = min(len(task.stored), low + max(0, wanted - sum(each.high - each.low for each in loans)))
        if high > low:
            loans.append(w.insert_loan(task, low, high, name))
            task.next_seq = high
    if task.interval and (loans or claimed):
        ranged = [seq for loan in loans for seq in range(loan.low, loan.high) if is_waiting(task.row(seq))]
        seqs = [copy.seq for copy in claimed] + ranged
        task.round_at, task.round_rows = w.now, seqs
        copies, before = {w.copy(task, seq) for seq in seqs}, w.ghosts.rounds.get(task.id, [])
        w.ghosts.rounds[task.id] = [each - copies for each in before] + [copies]  # what was given back goes again
    w.settle(task)
    return loans, claimed


def claim(w: World, task: Task, seq: int, name: str) -> Copy:
    w.write(task, seq, core.claim(task.row(seq), name))
    return w.copy(task, seq)


def is_waiting(row: Row) -> bool:
    """Whether it is its loan's: one that was recorded as working from outside before somebody began it is, too."""
    return row.status in RUNNABLE and row.due_at is None and row.process is None


def is_in_range(row: Row) -> bool:
    """Whether who reads a range gets it."""
    return is_waiting(row)


def line_of(task: Task, seq: int) -> tuple[int, int]:
    return (task.id, seq % 2)


def first_of(task: Task, line: tuple[int, int]) -> int | None:
    """The first of a line: in the order of the list, then of their retries by users."""
    rows = [s for s, r in enumerate(task.stored) if r.status in OPEN and line_of(task, s) == line]
    return min(rows, key=lambda seq: (task.again.get(seq, 0), seq), default=None)


def with_turn(w: World, task: Task, seqs: list[int]) -> list[int]:
    """Of these rows, which may go, those whose turn it is; the others wait for theirs."""
    if not task.keys:
        return seqs
    going: list[int] = []
    for seq in seqs:
        first = first_of(task, line_of(task, seq))
        assert first is not None
        if readiness.has_turn(seq, task.again.get(seq, 0), first, 0 if task.splitting else None):
            going.append(seq)
        else:  # blocking changes neither status nor counts
            task.stored[seq] = task.stored[seq]._replace(due_at=w.now + BACKOFF if first == seq else BLOCKED)
    return going


def take_free(w: World, task: Task, name: str, count: int) -> list[Loan]:
    found: list[Loan] = []
    for loan in sorted((each for each in task.loans if each.process is None), key=lambda each: each.low):
        if count <= 0:
            break
        cut = min(loan.high, loan.low + count)
        if cut < loan.high:
            found.append(w.insert_loan(task, loan.low, cut, name))
            loan.low = cut
        else:
            loan.process, loan.asked = name, False
            found.append(loan)
        count -= cut - found[-1].low
    return found


@step(
    lambda w: [(p, i) for p in w.active() if p.life is not Life.LEAVING for i, part in p.parts.items() if part.left is None]
)
def read_range(w: World, where: tuple[Process, int], k: int) -> None:
    """The rows of a loan, read after its commit; of those with a key, the ones whose turn it is not leave it before."""
    process, key = where
    part = process.parts[key]
    task = w.tasks[part.task]
    seqs = [seq for seq in range(part.low, part.high) if is_in_range(task.row(seq))]
    if task.keys:
        process.frees |= {line_of(task, seq) for seq in seqs}
    seqs = with_turn(w, task, seqs)
    part.left = set(seqs)
    copies = [w.copy(task, seq) for seq in seqs]
    process.line += copies
    process.since |= dict.fromkeys(copies, part.at)


# -- Perform -------------------------------------------------------------------------------------------------------------


def may_begin(w: World, process: Process, copy: Copy) -> bool:
    """Whether a thread takes it: by what the process knows, fresh enough, within its places."""
    if process.life is not Life.ALIVE or len(process.running) + len(process.pending) >= THREADS:
        return False
    if w.now - max(process.since.get(copy, process.checked), process.checked) > FRESH:
        return False
    if w.tasks[copy.task].alone:
        return True
    most = permits(process, copy.task)
    return most is None or process.running_of(copy.task) < most


def permits(process: Process, task_id: int) -> int | None:
    """How many jobs of a Task its threads may run, None for any number."""
    if process.ask is not None and process.ask.task == task_id:
        return process.ask.running
    if process.limits.get(task_id, 0) is None and task_id not in process.places:
        return None
    return process.places.get(task_id, 0)


@step(lambda w: [(p, c) for p in w.active(Role.OWN) for c in p.line if may_begin(w, p, c)])
def begin(w: World, where: tuple[Process, Copy], k: int) -> None:
    """A thread takes the job; nothing is asked, for nobody else has it."""
    process, copy = where
    process.line.remove(copy)
    row = w.row(copy)
    if row.watched and w.current(copy):
        process.pending.append(copy)
        return
    process.running.append(copy)
    note_begin(w, process, copy)


def note_begin(w: World, process: Process, copy: Copy) -> None:
    process.began[copy] = w.now
    if w.current(copy):
        w.ghosts.began[copy] = w.now


def unrecorded(w: World, process: Process) -> list[Copy]:
    """What it runs or is about to run, and the ledger does not say so."""
    running = [c for c in process.running if w.row(c).status is Status.ENQUEUE or w.row(c).process is None]
    return [c for c in process.pending + running if w.current(c)]


@step(lambda w: [(p, c) for p in w.active() for c in unrecorded(w, p)])
def record_working(w: World, where: tuple[Process, Copy], k: int) -> None:
    """The job outlasts a flush, or is watched: ``working`` is written, by compare-and-set. A watched one runs only then, if
    its Task may start jobs at that time yet."""
    process, copy = where
    task = w.tasks[copy.task]
    if copy in process.pending:
        process.pending.remove(copy)
        if not (task.alone or (task.state in STARTING and w.in_session(task))):
            process.buffer.append((copy, "give_back"))
            return
        process.running.append(copy)
        note_begin(w, process, copy)
    turn = core.working if w.row(copy).status is Status.ENQUEUE else core.take_over
    w.write(task, copy.seq, turn(w.row(copy), process.name))
    w.note_start(process, copy)


@step(lambda w: [(p, c) for p in w.active() for c in p.pending if not w.current(c)])
def drop_watched(w: World, where: tuple[Process, Copy], k: int) -> None:
    """The ``working`` of a watched job lost: its row has moved on, it is not performed."""
    process, copy = where
    process.pending.remove(copy)
    process.over(copy)
    if process.role is Role.ENGINE:
        w.ghosts.dropped.add(copy)
        process.settled.append(copy)


@step(lambda w: [(p, c) for p in w.active() for c in p.running])
def finish(w: World, where: tuple[Process, Copy], k: int) -> None:
    """An attempt ends; its outcome waits in the process's memory for the next flush."""
    process, copy = where
    process.running.remove(copy)
    process.buffer.append((copy, OUTCOMES[k % len(OUTCOMES)]))


def ended_parts(process: Process) -> list[int]:
    return [key for key, part in process.parts.items() if part.left is not None and not part.left]


@step(lambda w: [p for p in w.active() if p.buffer or ended_parts(p)])
def flush(w: World, process: Process, k: int) -> None:
    """A group commit: every outcome whose attempt is still its row's, with the counts, and the end of the loans of which
    nothing is left; the losers are dropped."""
    for copy, kind in process.buffer:
        task, row = w.tasks[copy.task], w.row(copy)
        process.over(copy)
        if w.current(copy):
            assert copy not in w.ghosts.recorded, f"I5: a second outcome of {copy}"
            w.ghosts.recorded.add(copy)
            w.write(task, copy.seq, turn_of(row, kind, w.now, task.state))
            w.note_start(process, copy)
            process.owes.add(copy.task)
            if task.keys:
                process.frees.add(line_of(task, copy.seq))
        if process.role is Role.ENGINE:
            process.settled.append(copy)
    process.buffer = []
    for key in ended_parts(process):
        task = w.tasks[process.parts.pop(key).task]
        task.loans = [each for each in task.loans if (each.id, each.process) != (key, process.name)]


@step(lambda w: [p for p in w.active() if p.owes or p.frees])
def announce(w: World, process: Process, k: int) -> None:
    """After the commit: lines go on, hints are settled."""
    for line in process.frees:
        free_line(w, line)
    for task_id in process.owes:
        w.settle(w.tasks[task_id])
    process.frees, process.owes = set(), set()


def free_line(w: World, line: tuple[int, int]) -> bool:
    """The first of a line is due if it waits for its turn."""
    task = w.tasks[line[0]]
    seq = first_of(task, line)
    if seq is None or task.stored[seq].due_at != BLOCKED:
        return False
    task.stored[seq] = task.stored[seq]._replace(due_at=w.now)
    w.settle(task)
    return True


def turn_of(row: Row, kind: str, now: int, state: State | None) -> Transition:
    """The turn of a buffered outcome, made from the row as it stands at the flush."""
    if kind == "give_back":
        return core.give_back(row, state, now=now)
    if kind == "cancel":
        return core.cancel(row)
    if kind == "stopped":
        return core.stop(row)
    if kind == "interrupted":
        return core.outcome(row, Status.ENQUEUE, Reason.INTERRUPTED, now=now)
    if kind == "retry" and row.retries < MAX_RETRIES:
        return core.outcome(row, Status.ERROR, Reason.RAISED, retry_at=now + BACKOFF)
    status, reason = {
        "finish": (Status.FINISH, Reason.RETURNED),
        "failed": (Status.FAILED, Reason.REFUSED),
        "retry": (Status.ERROR, Reason.RAISED),
        "error": (Status.ERROR, Reason.RAISED),
        "timeout": (Status.ERROR, Reason.TIMEOUT),
        "discarded": (Status.ERROR, Reason.DISCARDED),
    }[kind]
    return core.outcome(row, status, reason)


# -- The check, and what follows from it ---------------------------------------------------------------------------------


def may_check(process: Process) -> bool:
    """A dispatcher checks between two batches, for what an answer that was lost gave it."""
    busy = process.answer is not None or bool(process.returns)
    if process.role is Role.DISPATCHER:
        busy = busy or bool(process.parts or process.claims)
    return process.life is Life.ALIVE and not busy


@step(lambda w: [p for p in w.active(Role.OWN, Role.DISPATCHER) if may_check(p)])
def check_read(w: World, process: Process, k: int) -> None:
    """One statement: the own loans, and of each Task what may keep its jobs from beginning."""
    own = {loan.id: Loan(**vars(loan)) for task in w.tasks for loan in task.loans if loan.process == process.name}
    ids = {each.task for each in own.values()} | {copy.task for copy in process.copies} | set(process.limits)
    tasks = {
        t.id: (t.state, w.in_session(t), t.limit, t.places.get(process.name))
        for t in w.tasks
        if t.id in ids and not t.alone
    }
    process.answer = Answer(w.now, own, own_claims(w, process), tasks)


def own_claims(w: World, process: Process) -> list[Copy]:
    return [c for c in w.jobs(*RUNNABLE) if w.row(c).process == process.name]


@step(lambda w: [p for p in w.active() if p.life is Life.ALIVE and p.answer is not None])
def check_act(w: World, process: Process, k: int) -> None:
    """Acts on what was read, however much has happened since. ``k`` 3: it returns what it has not begun all the same, for
    others could begin it sooner."""
    answer, process.answer = process.answer, None
    assert answer is not None
    process.checked = max(process.checked, answer.at)
    for key in [key for key in process.parts if key not in answer.loans]:
        process.drop([c for c in process.line if process.part_of(c) is process.parts[key]])
        del process.parts[key]  # recovered: what runs is fenced
    for key, loan in answer.loans.items():
        if key not in process.parts:  # the answer of its borrow was lost
            process.returns.append(Return(key, loan.task, loan.low, loan.low, loan.high))
    lost = [c for c in answer.claims if not process.knows(c) and w.current(c)]
    process.buffer += [(c, "give_back") for c in lost]
    for task_id, (state, in_session, limit, places) in answer.tasks.items():
        process.limits[task_id] = limit
        if places is None:
            process.places.pop(task_id, None)
        elif task_id in process.places:
            process.places[task_id] = min(places, process.places[task_id])
        else:
            process.places[task_id] = min(places, process.running_of(task_id))
        if state is State.CANCELLED:
            hand_in(process, task_id, "cancel")
        elif k == 3 or not (in_session and state in STARTING):
            return_tails(process, task_id)
            claimed = [c for c in process.line if c.task == task_id and c in process.claims]
            process.line = [c for c in process.line if c not in claimed]
            process.buffer += [(c, "give_back") for c in claimed]
    asked = [key for key, loan in answer.loans.items() if loan.asked and key in process.parts]
    let_go_of_stopped(w, process, asked)
    for task_id in [t for t in process.limits if not any(c.task == t for c in process.copies)]:
        if not any(part.task == task_id for part in process.parts.values()) and task_id not in process.places:
            del process.limits[task_id]


def hand_in(process: Process, task_id: int, kind: str) -> None:
    """What it has not begun of a Task is over; the ledger hears of it with the next flush."""
    mine = [c for c in process.line + process.pending if c.task == task_id]
    process.line = [c for c in process.line if c not in mine]
    process.pending = [c for c in process.pending if c not in mine]
    process.buffer += [(c, kind) for c in mine]


def let_go_of_stopped(w: World, process: Process, asked: list[int]) -> None:
    """Those of its jobs that a person stopped: claimed ones, and those of the loans of which it was asked."""
    for copy in [*process.line, *process.pending]:
        part = process.part_of(copy)
        looked = part is None or any(process.parts[key] is part for key in asked)
        if looked and w.current(copy) and w.row(copy).stopping:
            (process.line if copy in process.line else process.pending).remove(copy)
            process.buffer.append((copy, "stopped"))


def return_tails(process: Process, task_id: int) -> None:
    """Decides to give back, of each loan of a Task, the rows after the last one that it has begun or that is over."""
    for key, part in process.parts.items():
        if part.task != task_id or part.left is None or any(r.loan == key for r in process.returns):
            continue
        tail = [c for c in process.line if process.part_of(c) is part]
        busy = part.left - {c.seq for c in tail}
        seq = max(busy, default=part.low - 1) + 1
        tail = [c for c in tail if c.seq >= seq]
        if tail:
            seq = seq if busy else part.low
            process.returns.append(Return(key, task_id, seq, part.low, part.high))
            let_go(process, tail)


def let_go(process: Process, tail: list[Copy]) -> None:
    """They count as left of their loan until the answer."""
    process.line = [c for c in process.line if c not in tail]


@step(lambda w: [(p, r) for p in w.active() for r in p.returns])
def return_part(w: World, where: tuple[Process, Return], k: int) -> None:
    """One transaction, a compare-and-set on the loan: what one has not begun is a free loan. ``k`` odd: the answer is lost,
    and it is done again, in vain."""
    process, part = where
    for _ in range(1 + k % 2):
        give_back_range(w, process.name, part)
    process.returns.remove(part)
    process.owes.add(part.task)
    if part.seq <= part.low:
        process.parts.pop(part.loan, None)
    elif part.loan in process.parts:  # the head stays, whatever the answer was
        process.parts[part.loan].high = part.seq
        process.parts[part.loan].left = {seq for seq in process.parts[part.loan].left or () if seq < part.seq}


def is_unchanged(loan: Loan, name: str, part: Return) -> bool:
    """The compare of the compare-and-set."""
    return (loan.id, loan.process, loan.high) == (part.loan, name, part.high)


def give_back_range(w: World, name: str, part: Return) -> bool:
    task = w.tasks[part.task]
    own = [each for each in task.loans if is_unchanged(each, name, part)]
    for loan in own:
        if part.seq <= loan.low:
            loan.process, loan.asked = None, False
        else:
            loan.high = part.seq
            w.insert_loan(task, part.seq, part.high, None)
    return bool(own)


# -- Places --------------------------------------------------------------------------------------------------------------


def limited(process: Process) -> list[int]:
    """The Tasks of which it knows a limit, or has places."""
    return sorted({t for t, limit in process.limits.items() if limit is not None} | set(process.places))


@step(
    lambda w: [
        (p, t)
        for p in w.active(Role.OWN)
        if p.life is Life.ALIVE and p.ask is None and p.answer is None
        for t in limited(p)
    ]
)
def ask_places(w: World, where: tuple[Process, int], k: int) -> None:
    """It asks for as many places as it can use, or fewer; until the answer nothing more begins than runs now."""
    process, task_id = where
    running = process.running_of(task_id)
    waiting = sum(c.task == task_id for c in process.line)
    process.ask = Ask(task_id, max(0, min(THREADS, running + waiting) - k % 2), running)
    if task_id in process.places:
        process.places[task_id] = running
    elif process.limits.get(task_id, 0) is None:
        process.limits[task_id] = 0


@step(lambda w: [p for p in w.active(Role.OWN) if p.life is not Life.LEAVING and p.ask is not None])
def lease_places(w: World, process: Process, k: int) -> None:
    """One transaction, and its answer. A process that holds anything of a Task with a limit has a row, if only of 0: so
    the others see that it knows. ``k`` odd: the answer is lost."""
    ask, process.ask = process.ask, None
    assert ask is not None
    task = w.tasks[ask.task]
    rows = dict(task.places)
    rows.pop(process.name, None)
    if task.limit is None:
        task.places.pop(process.name, None)
    else:
        is_open = holders_of(task) - {None, QUEUE, OUTSIDE, process.name} <= rows.keys()
        want = ask.want if readiness.may_start(task.state or "", w.in_session(task)) else 0
        n = readiness.granted(want, ask.running, task.limit, sum(rows.values()), is_open=is_open)
        task.places[process.name] = n
        if not (n or keeps_row(process, task)):
            del task.places[process.name]
    if k % 2:
        return
    process.limits[task.id] = task.limit
    if process.name in task.places:
        process.places[task.id] = task.places[process.name]
    else:
        process.places.pop(task.id, None)


def holders_of(task: Task) -> set[str | None]:
    """Whoever may perform jobs of a Task: by its loans, and by what is claimed or at work."""
    return {loan.process for loan in task.loans} | {row.process for row in task.stored}


def keeps_row(process: Process, task: Task) -> bool:
    """Whether a row of no places stays: it says that its process knows of the limit."""
    has = any(part.task == task.id for part in process.parts.values()) or any(c.task == task.id for c in process.claims)
    return has or any(c.task == task.id for c in process.copies)
