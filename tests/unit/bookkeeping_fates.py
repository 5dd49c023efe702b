"""What befalls the world of the model: deaths and recovery, people's controls, closing. See `bookkeeping_steps`."""

from __future__ import annotations

from bookkeeping_model import QUEUE, Copy, Life, Loan, Process, Role, Task, World
from bookkeeping_steps import (
    MAX_GENERATIONS,
    RUNNABLE,
    STALLED,
    STARTING,
    first_of,
    free_line,
    is_picked,
    lend,
    settle_session,
    step,
)

from asynctask.core import transitions as core
from asynctask.core.states import OPEN, PROBLEM, TERMINAL, Reason, State, Status
from asynctask.core.transitions import BLOCKED, OUTSIDE, Transition

# -- Deaths and recovery -------------------------------------------------------------------------------------------------


@step(lambda w: w.active())
def kill(w: World, process: Process, k: int) -> None:
    """kill -9: everything it knew is gone, its loans and copies stay under its name."""
    process.forget()


@step(lambda w: [p for p in w.processes if p.life is Life.ALIVE])
def stall(w: World, process: Process, k: int) -> None:
    """Its lease runs out while it lives."""
    process.life, process.stalled_at = Life.STALLED, w.now


@step(lambda w: [p for p in w.processes if p.life is Life.STALLED or (p.life is Life.ALIVE and p.forgotten)])
def beat(w: World, process: Process, k: int) -> None:
    """It renews its lease and goes on, unless it was declared dead and struck off: then it begins nothing more."""
    if process.forgotten:
        shut(process)
    else:
        process.life = Life.ALIVE


@step(lambda w: [p for p in w.processes if p.life is Life.ALIVE and p.copies])
def shut_down(w: World, process: Process, k: int) -> None:
    """In order: what it has not begun goes back, what runs is interrupted and waits again."""
    for copy in [*process.line, *(copy for copy, _, _ in process.read)] if process.role is Role.ENGINE else []:
        if w.broker.held.get(copy) == process.name:
            w.broker.held[copy] = None
    shut(process)


def shut(process: Process) -> None:
    process.life = Life.LEAVING
    back = [*process.pending, *(c for c in process.line if c in process.claims)]
    process.buffer += [(copy, "give_back") for copy in back]
    process.buffer += [(copy, "interrupted") for copy in process.running]
    process.line, process.read, process.pending, process.running = [], [], [], []
    process.answer, process.ask, process.returns, process.pushed = None, None, [], False


@step(lambda w: [p for p in w.processes if p.life is Life.LEAVING and not p.buffer and has_left(w, p)])
def leave(w: World, process: Process, k: int) -> None:
    """One transaction frees its loans and places."""
    for task in w.tasks:
        for loan in task.loans:
            if loan.process == process.name:
                loan.process, loan.asked = None, False
                process.owes.add(task.id)
        task.places.pop(process.name, None)
    process.parts, process.places = {}, {}


def has_left(w: World, process: Process) -> bool:
    return any(process.name in t.places or any(each.process == process.name for each in t.loans) for t in w.tasks)


@step(lambda w: [(p, t) for p in w.processes if p.role is Role.OWN and not p.runs_on for t in w.tasks if late(w, t)])
def late_borrow(w: World, where: tuple[Process, Task], k: int) -> None:
    """A borrow that a dead process had sent commits now, perhaps after its recovery."""
    process, task = where
    lend(w, task, process.name, 1 + k)


def late(w: World, task: Task) -> bool:
    return not task.foreign and is_picked(w, task)


def named(w: World) -> set[str | None]:
    rows = {row.process for task in w.tasks for row in task.stored}
    return rows | {loan.process for task in w.tasks for loan in task.loans} | {p for t in w.tasks for p in t.places}


def lost(w: World) -> list[Process]:
    """Processes to recover: registered with a lease that ended, or not registered though a loan or row names them."""
    names = named(w)
    return [p for p in w.processes if (p.name in names if p.forgotten else p.life in (Life.DEAD, Life.STALLED))]


@step(lambda w: [(p, t, each) for p in lost(w) for t in w.tasks for each in t.loans if each.process == p.name])
def recover_loan(w: World, where: tuple[Process, Task, Loan], k: int) -> None:
    """One transaction: the rows of a loan that it holds yet wait again, and the loan goes; ``k`` 1: a part of it."""
    process, task, loan = where
    high = loan.low + 1 if k == 1 and loan.high - loan.low > 1 else loan.high
    for seq in range(loan.low, high):
        row = task.row(seq)
        if is_of_loan(row) and core.is_held(row, task.lent(seq)):
            w.write(task, seq, core.recover(row, task.state, now=w.now, beside=beside(w, process, task, seq)))
    if high < loan.high:
        loan.low = high
    else:
        task.loans.remove(loan)
    w.settle(task)


def is_of_loan(row: core.Row) -> bool:
    """Whether a row in a loan's range is the borrower's: one that names a process is that one's."""
    return row.process is None


@step(lambda w: [p for p in lost(w) if any(row.process == p.name for t in w.tasks for row in t.stored)])
def recover_rows(w: World, process: Process, k: int) -> None:
    """One transaction: the rows that name it."""
    at_work = {w.copy(t, s): beside(w, process, t, s) for t in w.tasks for s in range(len(t.stored))}
    for task in w.tasks:
        for seq, row in enumerate(task.rows()):
            if row.process == process.name:
                turn = core.recover(row, task.state, now=w.now, beside=at_work[w.copy(task, seq)])
                w.write(task, seq, turn)
                w.settle(task)


def beside(w: World, process: Process, task: Task, seq: int) -> list[core.Row]:
    """The other rows at work in a process."""
    return [
        row
        for t in w.tasks
        for s, row in enumerate(t.rows())
        if (t, s) != (task, seq) and row.process == process.name and row.status is Status.WORKING
    ]


@step(lambda w: [p for p in lost(w) if p.name not in loans_and_rows(w)])
def recover_end(w: World, process: Process, k: int) -> None:
    """Its places go; it is struck off, even if it came back meanwhile."""
    for task in w.tasks:
        task.places.pop(process.name, None)
    process.forgotten = True


def loans_and_rows(w: World) -> set[str | None]:
    return {row.process for t in w.tasks for row in t.stored} | {each.process for t in w.tasks for each in t.loans}


@step(lambda w: [p for p in w.active(Role.OWN) if p.life is Life.STALLED and w.now - p.stalled_at >= STALLED])
def take_held(w: World, process: Process, k: int) -> None:
    """Its interpreter is held, its lease is not over: what it has not begun, as far as the ledger knows, is taken from it,
    and its places beyond what runs."""
    for task in w.tasks:
        for seq, row in enumerate(task.rows()):
            mine = (row.process or w.borrower(task, seq)) == process.name and core.is_held(row, task.lent(seq))
            if mine and (row.status is Status.ENQUEUE or row.process is None):
                w.write(task, seq, core.give_back(row, task.state, now=w.now))
        task.loans = [each for each in task.loans if each.process != process.name]
        if process.name in task.places:
            task.places[process.name] = sum(row.process == process.name for row in task.stored)
        w.settle(task)


@step(lambda w: [t for t in w.tasks if unsettled(w, t)])
def repair(w: World, task: Task, k: int) -> None:
    """Maintenance finds hints that nobody settled, because a process ended before it did."""
    w.settle(task)


def unsettled(w: World, task: Task) -> bool:
    """What one query finds, of a Task and its rows."""
    if task.alone or task.state not in STARTING or not w.in_session(task) or task.hints.ready is not None:
        return False
    dues = [row.due_at for row in task.stored if row.due_at is not None and row.due_at != BLOCKED]
    due_next = task.hints.due_next
    if due_next is None:
        return bool(dues) or task.waits
    return not task.interval and due_next > task.start_at and (task.waits or any(due < due_next for due in dues))


@step(lambda w: [(t.id, n) for t in w.tasks if t.keys for n in (0, 1) if is_stuck(t, (t.id, n))])
def repair_line(w: World, line: tuple[int, int], k: int) -> None:
    """Maintenance finds lines whose first row waits for others."""
    free_line(w, line)


def is_stuck(task: Task, line: tuple[int, int]) -> bool:
    first = first_of(task, line)
    return first is not None and task.stored[first].due_at == BLOCKED


# -- Control -------------------------------------------------------------------------------------------------------------


@step(lambda w: w.open_tasks(*STARTING))
def pause(w: World, task: Task, k: int) -> None:
    task.change_state(State.PAUSED, Reason.PAUSED)
    w.settle(task)


@step(lambda w: w.open_tasks(State.PAUSED))
def resume(w: World, task: Task, k: int) -> None:
    task.change_state(State.SPLITTING if task.splitting else State.RUNNING, Reason.RESUMED)
    w.settle(task)


@step(lambda w: w.open_tasks(*STARTING, State.PAUSED))
def set_parallel(w: World, task: Task, k: int) -> None:
    """A person turns the knob; what runs already runs on."""
    task.parallel = (1, 2, 3, None)[k % 4]
    w.ghosts.limits[task.id].append((w.now, task.limit))


@step(lambda w: w.open_tasks(*STARTING, State.PAUSED))
def cancel(w: World, task: Task, k: int) -> None:
    """The state first, so that nothing new starts; the rows are turned afterwards."""
    task.change_state(State.CANCELLED, Reason.CANCELLED)
    task.splitting, task.sealed, task.turning, task.cursor = False, True, "cancel", 0
    settle_session(w, task)


def rests(task: Task) -> bool:
    return any(core.at_rest(row, task.lent(seq)) for seq, row in enumerate(task.rows()))


@step(lambda w: [t for t in w.open_tasks(State.CANCELLED) if not t.turning and not t.closed and rests(t)])
def cancel_again(w: World, task: Task, k: int) -> None:
    """Maintenance finds rows of a cancelled Task that came to rest after the pass went by: another pass."""
    task.turning, task.cursor = "cancel", 0


@step(lambda w: [t for t in w.open_tasks(State.RUNNING, State.FINISHED, State.CANCELLED) if may_retry(t)])
def retry(w: World, task: Task, k: int) -> None:
    """An explicit retry opens a new generation, unsealed until the chosen rows are turned."""
    task.change_state(State.RUNNING, Reason.RETRIED)
    task.generation, task.sealed, task.closed = task.generation + 1, False, False
    task.turning, task.cursor = "retry", 0
    task.statuses = PROBLEM if k == 0 else PROBLEM | {Status.CANCELLED}
    settle_session(w, task)


def may_retry(task: Task) -> bool:
    over = task.state is not State.CANCELLED or task.closed
    return over and task.turning is None and task.generation < MAX_GENERATIONS and len(task.stored) > 0


@step(lambda w: [t for t in w.tasks if t.turning and not t.closed])
def change_rows(w: World, task: Task, k: int) -> None:
    """The next slice of rows of a cancel or a retry; after the last one the retried generation is sealed."""
    end = min(len(task.stored), task.cursor + 1 + k)
    for seq in range(task.cursor, end):
        row = task.row(seq)
        if task.turning == "retry" and row.status in task.statuses:
            w.write(task, seq, core.explicit_retry(row, now=w.now))
        elif task.turning == "cancel" and core.at_rest(row, task.lent(seq)):
            w.write(task, seq, core.cancel(row))
    task.cursor = end
    if end == len(task.stored):
        if task.turning == "cancel":
            task.next_seq = end
        task.turning, task.sealed = None, True
    w.settle(task)


def by_person(w: World, copy: Copy, turn: Transition | None) -> None:
    task = w.tasks[copy.task]
    w.write(task, copy.seq, turn)
    w.settle(task)


@step(lambda w: w.jobs(*RUNNABLE))
def stop_job(w: World, copy: Copy, k: int) -> None:
    """Where it is at rest; else its holder is told, and lets go of it later, or dies."""
    task = w.tasks[copy.task]
    by_person(w, copy, core.ask_stop(w.row(copy), task.lent(copy.seq)))
    for loan in task.loans:
        if loan.process is not None and loan.covers(copy.seq):
            loan.asked = True


@step(lambda w: w.jobs(Status.STOPPED))
def start_job(w: World, copy: Copy, k: int) -> None:
    by_person(w, copy, core.start(w.row(copy), now=w.now))


@step(lambda w: [c for c in w.jobs(Status.ENQUEUE, Status.STOPPED) if core.at_rest(w.row(c), w.tasks[c.task].lent(c.seq))])
def cancel_job(w: World, copy: Copy, k: int) -> None:
    """A person deletes one job that nobody holds."""
    by_person(w, copy, core.cancel(w.row(copy)))


@step(
    lambda w: [c for c in w.jobs(*PROBLEM, Status.CANCELLED) if w.tasks[c.task].alone and c.attempt < 4 * MAX_GENERATIONS]
)
def retry_job(w: World, copy: Copy, k: int) -> None:
    """A person restarts a job without a Task."""
    by_person(w, copy, core.explicit_retry(w.row(copy), now=w.now))


@step(lambda w: w.jobs(*RUNNABLE))
def record_outside(w: World, copy: Copy, k: int) -> None:
    """A program outside records a status."""
    row, task = w.row(copy), w.tasks[copy.task]
    wanted = (Status.WORKING, Status.ENQUEUE, Status.FINISH, Status.FAILED)[k % 4]
    by_person(w, copy, core.recorded(row, wanted, on_loan=task.lent(copy.seq), now=w.now))


@step(lambda w: [c for c in w.jobs(Status.WORKING) if performed_outside(w, c)])
def end_outside(w: World, copy: Copy, k: int) -> None:
    """Who records from outside that a job works says at last how it went, or that it did not."""
    by_person(w, copy, core.recorded(w.row(copy), (Status.FINISH, Status.ENQUEUE)[k % 2], on_loan=True, now=w.now))


def performed_outside(w: World, copy: Copy) -> bool:
    row = w.row(copy)
    return (row.process or w.borrower(w.tasks[copy.task], copy.seq)) in (OUTSIDE, QUEUE)


# -- Close ---------------------------------------------------------------------------------------------------------------


def ready(task: Task) -> bool:
    return not task.closed and core.may_close(task.state or "", task.sealed, task.turning is not None, task.counts)


@step(lambda w: [t for t in w.open_tasks() if ready(t) and len(w.closings) < 3])
def close_look(w: World, task: Task, k: int) -> None:
    """The counts say that nothing is open, and so do the rows. Two processes may find that out at once."""
    if not any(row.status in OPEN for row in task.stored):
        w.closings.append((task.id, task.generation))


@step(lambda w: w.closings)
def close(w: World, closing: tuple[int, int], k: int) -> None:
    """A compare-and-set on the generation closes it."""
    w.closings.remove(closing)
    task, generation = w.tasks[closing[0]], closing[1]
    if task.generation != generation or not ready(task):
        return
    assert all(row.status in TERMINAL for row in task.stored), "I4: closed with an open row"
    task.closed = True
    task.closes[generation] = task.closes.get(generation, 0) + 1
    if task.state is not State.CANCELLED:
        task.change_state(State.FINALIZING, Reason.CLOSED)
    settle_session(w, task)


@step(lambda w: w.open_tasks(State.FINALIZING))
def call_back(w: World, task: Task, k: int) -> None:
    task.change_state(State.FINISHED, Reason.CALLED_BACK)
