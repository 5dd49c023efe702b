"""What a run of ``benchmarks.chaos`` came to: the book of the jobs held against the ledger."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from asynctask import AsyncTask
from asynctask.core.states import TERMINAL, Status
from asynctask.core.transitions import MARKS
from asynctask.database.tables import events, key_positions, loans, places, task_callbacks, tasks
from asynctask.iterable import item_statuses, unpack
from benchmarks.chaos_arena import UNAVAILABLE, Arena, Death
from benchmarks.chaos_corrections import Corrected
from benchmarks.chaos_faults import PEOPLE, Fault, Faults, Knob

__all__ = ["Audit", "Expected", "audit"]

GRACE_S = 1.0
"""A changed knob shows in the starts within this time."""

BLUR_S = 0.01
"""The book notes a begin a little after the program has decided on it."""

UNRECORDED_S = 30.0
"""An outcome that is older than this when its process dies is in the ledger: no fault keeps a database away for longer."""

SHOWN = 5


@dataclass(frozen=True)
class Expected:
    """One submitted Task: the numbers of its items, and what has to hold for it."""

    task_id: int
    numbers: Collection[int]
    parallel: int | None = None
    interval: float = 0.0
    keys: int = 0
    session: str = ""


@dataclass(frozen=True)
class Item:
    """One item as the ledger has it: the ``n`` that its job was given, and what it came to or where it is."""

    event_id: int
    job_id: str
    task_id: int
    n: int
    status: str
    attempt: int


@dataclass
class Performance:
    """One item performed once. ``end``: as noted, or when its process was seen alive last."""

    pid: int
    task_id: int
    n: int
    job_id: str
    attempt: int
    begin: float
    end: float = float("inf")
    outcome: str = ""
    stray: bool = False
    """Its process was stopped past its lease under it, or after it: the ledger had given it up."""


@dataclass
class Audit:
    """The table at the end. ``broken``: what a promise says against it; empty where all held."""

    table: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def put(self, name: str, found: Sequence[str]) -> None:
        """A line of the table that has to be 0."""
        self.table[name] = len(found)
        self.broken += [f"{name}: {each}" for each in found[:SHOWN]]
        if len(found) > SHOWN:
            self.broken.append(f"{name}: ... {len(found)} in all")


def audit(arena: Arena, app: AsyncTask, faults: Faults, expected: Sequence[Expected]) -> Audit:
    """Everything at once; the worker processes have ended."""
    result = Audit()
    book = Book(arena, faults.log)
    items = _read_items(app)
    expected = [*expected, *_taken(items, faults.corrections.tasks)]
    _items(result, expected, items, book)
    _corrected(result, app, items, faults.corrections.made)
    result.put("outcomes recorded twice", [*_recorded_twice(app), *_marked_twice(app)])
    _beyond(result, book, faults.log, arena.deaths)
    result.put("counts against rows", _counts(app, expected, items))
    result.put("closes and callbacks not one per generation", _closes(app, expected))
    _limits(result, expected, book, faults.knobs)
    _orders(result, expected, book)
    result.put("progress that fell or went over", _progress(arena.book))
    _condemned(result, arena, faults.log)
    _lingering(result, arena, app)
    attempts = list({item.event_id: item.attempt for item in items}.values())
    result.table["slices"] = sum(count > 1 for count in Counter(item.event_id for item in items).values())
    result.table["attempts"] = {"most": max(attempts, default=0), "rows over 10": sum(each > 10 for each in attempts)}
    result.table["performances"] = len(book.performances)
    return result


# -- the book


class Book:
    """What the processes wrote down."""

    def __init__(self, arena: Arena, log: Sequence[Fault]) -> None:
        self.performances: list[Performance] = []
        self.callbacks: Counter[tuple[int, int, str]] = Counter()
        self.forks: dict[int, int] = {}
        ended = {death.pid: death.at for death in arena.deaths}
        stopped = {fault.pid: fault.at for fault in log if fault.kind == "worker stopped past its lease" and fault.pid}
        for path in arena.book.iterdir():
            self._read(path, ended.get(int(path.name), float("inf")), stopped.get(int(path.name)))
        self.performances.sort(key=lambda each: each.begin)
        self.of_task: dict[int, list[Performance]] = defaultdict(list)
        self.of_item: dict[tuple[str, int], list[Performance]] = defaultdict(list)
        for each in self.performances:
            self.of_task[each.task_id].append(each)
            self.of_item[each.job_id, each.n].append(each)

    def _read(self, path: Path, ended: float, stopped: float | None) -> None:
        open_ones: dict[tuple[str, str], Performance] = {}
        pid = int(path.name)
        for line in path.read_text().splitlines():
            verb, *words = line.split(" ")
            if verb == "B":
                at, task_id, n, job_id, attempt = words
                each = Performance(pid, int(task_id), int(n), job_id, int(attempt), float(at), ended)
                open_ones[job_id, attempt] = each
                self.performances.append(each)
            elif verb == "E":
                each = open_ones[words[3], words[4]]
                each.end, each.outcome = float(words[0]), words[5]
            elif verb == "C":
                self.callbacks[int(words[1]), int(words[2]), words[3]] += 1
            elif verb == "F":
                self.forks[pid] = self.forks.get(pid, 0) + 1
        if stopped is not None:
            for each in self.performances:
                each.stray |= each.pid == pid and each.end > stopped


# -- items


def _read_items(app: AsyncTask) -> list[Item]:
    _e = events.c
    columns = (_e.id, _e.job_id, _e.task_id, _e.status, _e.attempt, _e.params, _e["items"].label("size"), _e.marks)
    found = []
    with app.ledger.database.read() as connection:
        for row in connection.execute(sa.select(*columns).where(_e.task_id.is_not(None))):
            params = json.loads(row.params)
            carried = unpack(params)[1] if row.size > 1 else [params]
            for each, status in zip(carried, item_statuses(row.marks, row.size, row.status), strict=True):
                n = int(each["n"] if isinstance(each, dict) else each[0]["n"])
                found.append(Item(row.id, row.job_id, row.task_id, n, str(status), row.attempt))
    return found


def _taken(items: Sequence[Item], task_ids: Collection[int]) -> list[Expected]:
    """The corrected lists, with what they took: whether that is right is a question to :func:`_corrected`."""
    found: dict[int, list[int]] = {task_id: [] for task_id in task_ids}
    for item in items:
        if item.task_id in found:
            found[item.task_id].append(item.n)
    return [Expected(task_id, numbers) for task_id, numbers in found.items()]


def _items(result: Audit, expected: Sequence[Expected], items: Sequence[Item], book: Book) -> None:
    of_task: dict[int, list[Item]] = defaultdict(list)
    for item in items:
        of_task[item.task_id].append(item)
    lost, open_ones = [], []
    for each in expected:
        found = Counter(item.n for item in of_task[each.task_id])
        lost += [f"Task {each.task_id} has no item {n}" for n in each.numbers if not found[n]]
        lost += [f"Task {each.task_id} has item {n} {count} times" for n, count in found.items() if count > 1]
        for item in of_task[each.task_id]:
            said = f"item {item.n} of Event {item.event_id} of Task {each.task_id} is {item.status}"
            performed = book.of_item.get((item.job_id, item.n), [])
            if item.status not in TERMINAL:
                open_ones.append(f"{said}, attempt {item.attempt}")
            elif item.status != "cancelled" and not performed:
                lost.append(f"{said} and was never performed")
            elif item.status == "finish" and not any(one.outcome == "finish" for one in performed):
                lost.append(f"{said} and no performance finished")
    result.table["items"] = sum(len(each.numbers) for each in expected)
    result.put("items lost", lost)
    result.put("open items", open_ones)
    result.table["outcomes"] = dict(Counter(item.status for item in items))


def _corrected(result: Audit, app: AsyncTask, items: Sequence[Item], made: Sequence[Corrected]) -> None:
    """Each row that was sent is in one of the lists that it was sent with, and none succeeded twice."""
    numbers: dict[int, Counter[int]] = defaultdict(Counter)
    finished: dict[int, int] = Counter(item.task_id for item in items if item.status == "finish")
    for item in items:
        numbers[item.task_id][item.n] += 1
    wrong: list[str] = []
    below: dict[int, list[int]] = defaultdict(list)
    for each in made:
        took = sum((numbers[task_id] for task_id in each.tasks), Counter[int]())
        wrong += [f"item {n} of Task {each.of_task} was taken {took[n]} times" for n in each.numbers if took[n] != 1]
        wrong += [f"item {n} of Task {each.of_task} was taken and not sent" for n in took.keys() - each.numbers]
        below[each.of_task] += each.tasks

    def mended(task_id: int) -> int:
        return sum(finished[under] + mended(under) for under in below[task_id])

    for task_id in list(below):
        if (said := app.task(task_id).progress()["mended"]) != (count := mended(task_id)):
            wrong.append(f"Task {task_id} says that {said} rows were mended, and {count} were")
    twice = Counter(item.n for item in items if item.status == "finish")
    wrong += [f"item {n} succeeded in {count} lists" for n, count in twice.items() if count > 1]
    result.put("corrected rows not taken once", wrong)
    result.table["rows corrected"] = sum(len(each.numbers) for each in made)


def _recorded_twice(app: AsyncTask) -> list[str]:
    names = ", ".join(f"'{status}'" for status in TERMINAL)
    ended = f"CASE WHEN became IN ({names}) THEN 1 ELSE 0 END"
    began = f"CASE WHEN was IN ({names}) THEN 1 ELSE 0 END"
    statement = (
        f"SELECT event_id, SUM({ended}), SUM({began}), SUM(({ended}) * ({began})) FROM chaos_seen GROUP BY event_id"
        f" HAVING SUM({ended}) - SUM({began}) <> 1 OR SUM(({ended}) * ({began})) > 0"
    )
    with app.ledger.database.read() as connection:
        found = connection.execute(sa.text(statement)).all()
    return [f"Event {row[0]} ended {row[1]} times and was opened {row[2]} times" for row in found]


def _marked_twice(app: AsyncTask) -> list[str]:
    statement = sa.text(
        "SELECT m.event_id, m.was, m.became, t.generation FROM chaos_marks m"
        " JOIN events e ON e.id = m.event_id JOIN tasks t ON t.id = e.task_id"
    )
    with app.ledger.database.read() as connection:
        found = connection.execute(statement).all()
    return [wrong for event_id, was, became, generation in found for wrong in _changed(event_id, was, became, generation)]


def _changed(event_id: int, was: str, became: str, generation: int) -> Iterable[str]:
    """Items of a slice that came to something, and then to something else; a retry opens those that did not finish."""
    final, done = set(MARKS.values()), MARKS[Status.FINISH]
    for place, old in enumerate(was):
        new = became[place : place + 1]
        if old in final and new != old and (new in final or old == done or generation == 1):
            yield f"item {place} of Event {event_id} came to {old!r} and then to {new!r}"


# -- performances beyond the first


def _beyond(result: Audit, book: Book, log: Sequence[Fault], deaths: Sequence[Death]) -> None:
    killed = {death.pid: death for death in deaths}
    why: dict[str, list[str]] = defaultdict(list)
    for found in book.of_item.values():
        for first, again in pairwise(found):
            said = f"item {first.n} of Task {first.task_id}, {first.outcome} at {first.end:.3f}, began at {again.begin:.3f}"
            why[_reason(first, again, killed, log)].append(said)
    result.put("performances without a reason", why.pop("", []))
    result.table["performances beyond the first"] = {reason: len(why[reason]) for reason in sorted(why)}


def _reason(first: Performance, again: Performance, killed: dict[int, Death], log: Sequence[Fault]) -> str:
    """Why an item was performed again; "" for no reason."""
    if first.outcome == "failed" and any(_retried(fault, first, again) for fault in log):
        return "a person retried it"
    death = killed.get(first.pid)
    # What had ended and was not recorded yet is lost with its process, too. A stopped one is given up before it ends.
    lost = death is not None and death.at <= again.begin and first.end > death.at - UNRECORDED_S
    if first.stray or (lost and first.outcome != "error"):
        return (death.by if death is not None else "") or "worker died by itself"
    if first.outcome == "error":
        return "its error was retried"
    faults = [fault for fault in log if fault.hit and fault.kind not in PEOPLE]
    near = [fault for fault in faults if fault.at < again.begin and fault.until + GRACE_S > first.begin]
    return near[-1].kind if near else ""


def _retried(fault: Fault, first: Performance, again: Performance) -> bool:
    of_it = fault.kind == "task retried" and fault.what == f"Task {first.task_id}"
    return of_it and first.end <= fault.until and fault.at <= again.begin


# -- Tasks


def _counts(app: AsyncTask, expected: Sequence[Expected], items: Sequence[Item]) -> list[str]:
    rows: dict[int, Counter[str]] = defaultdict(Counter)
    for item in items:
        rows[item.task_id][item.status] += 1
    wrong = [f"{each.code}: {each.message}" for each in app.doctor()]
    for each in expected:
        counts = app.task(each.task_id).progress()["counts"]
        total = counts.pop("total")
        said = {status: count for status, count in counts.items() if count}
        if said != rows[each.task_id] or total != len(each.numbers):
            wrong.append(f"Task {each.task_id} says {said} of {total}, its rows {dict(rows[each.task_id])}")
    return wrong


def _closes(app: AsyncTask, expected: Sequence[Expected]) -> list[str]:
    _e, _b = events.c, task_callbacks.c
    with app.ledger.database.read() as connection:
        generations = dict(connection.execute(sa.select(tasks.c.id, tasks.c.generation)).tuples().all())
        queued = Counter(connection.execute(sa.select(_b.task_id)).scalars())
        told = connection.execute(sa.select(_e.callback_of, _e.status).where(_e.callback_of.is_not(None))).tuples().all()
    ended = Counter(task_id for task_id, status in told if status == "finish")
    made = Counter(task_id for task_id, _ in told)
    wrong = []
    for each in expected:
        generation = generations[each.task_id]
        log = app.task(each.task_id).log()
        closed = sorted(entry["detail"]["generation"] for entry in log if entry["action"] == "closed")
        if closed != list(range(1, generation + 1)):
            wrong.append(f"Task {each.task_id} of {generation} generations closed {closed}")
        found = (queued[each.task_id], made[each.task_id], ended[each.task_id])
        if found != (generation,) * 3:
            wrong.append(f"Task {each.task_id} of {generation} generations has callbacks (queued, made, finished) {found}")
    return wrong


# -- knobs


def _limits(result: Audit, expected: Sequence[Expected], book: Book, knobs: Sequence[Knob]) -> None:
    over, beside, sooner = [], 0, []
    for each in expected:
        found = book.of_task[each.task_id]
        if each.parallel is not None and not each.interval:
            of_task = [knob for knob in knobs if knob.task_id == each.task_id]
            healthy = _over(each, [one for one in found if not one.stray], of_task)
            over += healthy
            beside += max(0, len(_over(each, found, of_task)) - len(healthy))
        if each.interval:
            sooner += _sooner(each, [one for one in found if not one.stray])
    result.put("starts over `parallel`", over)
    result.table["starts over `parallel` beside a stopped process that had been given up"] = beside
    result.put("rounds sooner than their interval", sooner)


def _over(task: Expected, found: Sequence[Performance], knobs: Sequence[Knob]) -> list[str]:
    moves = sorted([(one.begin, 1) for one in found] + [(one.end, -1) for one in found])
    live, over = 0, []
    for at, move in moves:
        live += move
        if move > 0 and live > (permitted := _permitted(task, knobs, at)):
            over.append(f"Task {task.task_id}: {live} performed at {at:.3f}, {permitted} allowed")
    return over


def _permitted(task: Expected, knobs: Sequence[Knob], at: float) -> int:
    """The largest value that was in force within the grace before."""
    assert task.parallel is not None
    values = [(float("-inf"), task.parallel), *((knob.at, knob.parallel) for knob in knobs)]
    ends = [*(knob.until + GRACE_S for knob in knobs), float("inf")]
    return max(value for (begin, value), end in zip(values, ends, strict=True) if begin <= at <= end)


def _sooner(task: Expected, found: Sequence[Performance]) -> list[str]:
    assert task.parallel is not None
    wrong = []
    for first, later in zip(found, found[task.parallel :], strict=False):
        if later.begin - first.begin < task.interval - BLUR_S:
            pids = f"pids {first.pid}, {later.pid}; attempts {first.attempt}, {later.attempt}"
            wrong.append(f"Task {task.task_id}: {later.begin - first.begin:.3f} s after, at {first.begin:.3f} ({pids})")
    return wrong


def _orders(result: Audit, expected: Sequence[Expected], book: Book) -> None:
    keys: list[str] = []
    sessions: dict[str, list[Expected]] = defaultdict(list)
    for each in expected:
        if each.keys:
            keys += _key_order(each, book)
        if each.session:
            sessions[each.session].append(each)
    result.put("key order broken", keys)
    wrong = []
    for session, of_session in sessions.items():
        before = float("-inf")
        for each in of_session:
            found = [one for one in book.of_task[each.task_id] if not one.stray]
            if found and found[0].begin < before:
                wrong.append(f"session {session}: Task {each.task_id} began before the one before it had ended")
            before = max([before, *(one.end for one in found)])
    result.put("session order broken", wrong)


def _key_order(task: Expected, book: Book) -> Iterable[str]:
    lines: dict[int, list[Performance]] = defaultdict(list)
    for one in book.of_task[task.task_id]:
        if not one.stray:
            lines[one.n % task.keys].append(one)
    for key, found in lines.items():
        for first, later in pairwise(found):
            if later.begin < first.end or later.n < first.n:
                yield f"key {key}: item {later.n} began at {later.begin:.3f}, item {first.n} ended at {first.end:.3f}"


# -- the rest


def _progress(book: Path) -> list[str]:
    wrong = []
    before: dict[tuple[int, int], int] = {}
    for path in book.iterdir():
        for line in path.read_text().splitlines():
            if not line.startswith("P "):
                continue
            said = json.loads(line[2:])
            which = (said["id"], said["generation"])
            counts = dict(said["counts"])
            total = counts.pop("total")
            if said["done"] < before.get(which, 0):
                wrong.append(f"Task {which[0]}: done fell from {before[which]} to {said['done']}")
            if sum(counts.values()) != total or said["done"] > total or (said["percent"] or 0) > 100:
                wrong.append(f"Task {which[0]}: {counts} of {total}, {said['percent']} %")
            before[which] = said["done"]
    return wrong


def _condemned(result: Audit, arena: Arena, log: Sequence[Fault]) -> None:
    victims = {fault.pid for fault in log if fault.kind in ("worker killed", "worker stopped past its lease")}
    lines = arena.said("*.log")
    unforeseen = [death for death in arena.deaths if death.pid not in victims]
    # A process that finds no server when it starts says so and ends with 3: it was no worker yet.
    put_off = [d for d in unforeseen if d.code == UNAVAILABLE and not any(f":{d.pid}:" in line for line in lines)]
    wrong = [f"worker {d.pid} ended with {d.code} at {d.at:.3f}" for d in unforeseen if d not in put_off]
    healthy = {pid for slot in arena.slots for pid in slot.pids} - victims
    for line in lines:
        if "declared_dead" in line or "process_recovered" in line:
            wrong += [line[:300] for pid in healthy if f":{pid}:" in line]
    result.put("healthy workers condemned", wrong)
    result.table["starts put off, a server was away"] = len(put_off) + arena.webs_put_off


def _lingering(result: Audit, arena: Arena, app: AsyncTask) -> None:
    _t = tasks.c
    with app.ledger.database.read() as connection:

        def count(column: Any, where: Any) -> int:
            return int(connection.execute(sa.select(sa.func.count(column)).where(where)).scalar_one())

        found = {
            "untracked jobs": count(events.c.id, (events.c["items"] == 0) & (events.c.status != "error")),
            "loans": count(loans.c.id, sa.true()),
            "places of processes": count(places.c.task_id, sa.true()),
            "hints of Tasks that are over": count(_t.id, _t.ready.is_not(None) | _t.due_next.is_not(None)),
            "split leases": count(_t.id, _t.split_by.is_not(None)),
            "sessions held": count(_t.id, _t.session_holder.is_not(None)),
            "positions in lines of keys": count(key_positions.c.event_id, sa.true()),
            "Events of a process": count(events.c.id, events.c.process.is_not(None)),
        }
    if arena.redis is not None:
        with arena.redis.client() as client:
            waiting = [key for key in client.scan_iter("*") if client.type(key) == "list"]
            found["queue entries"] += sum(int(str(client.llen(key))) for key in waiting)
    result.put("lingering", [f"{count} {name}" for name, count in found.items() if count])
    data = arena.folder / "data"
    result.table["files in data_dir"] = sum(path.is_file() for path in data.rglob("*"))
