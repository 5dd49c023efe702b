"""The audit of the long attack sees each break of a promise in a book that was made for it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest

from asynctask import AsyncTask
from asynctask.core.states import Status
from asynctask.core.transitions import MARKS, OPEN_MARK
from benchmarks import chaos_audit as audits
from benchmarks.chaos_arena import Arena, Death
from benchmarks.chaos_audit import Audit, Book, Expected, Item, Performance
from benchmarks.chaos_corrections import Corrected
from benchmarks.chaos_faults import Fault, Knob


def book_of(*found: Performance) -> Book:
    """A book with these performances."""
    book = Book.__new__(Book)
    book.performances = sorted(found, key=lambda each: each.begin)
    book.of_task, book.of_item = defaultdict(list), defaultdict(list)
    for each in book.performances:
        book.of_task[each.task_id].append(each)
        book.of_item[each.job_id, each.n].append(each)
    return book


def performed(n: int, begin: float, end: float, *, task: int = 1, pid: int = 7, stray: bool = False) -> Performance:
    return Performance(pid, task, n, f"job-{n}", 1, begin, end, "finish", stray)


def limits(task: Expected, *found: Performance, knobs: Sequence[Knob] = ()) -> tuple[int, int, int]:
    """Starts over ``parallel``, those beside a stopped process, rounds too soon."""
    result = Audit()
    audits._limits(result, [task], book_of(*found), knobs)
    names = (
        "starts over `parallel`",
        "starts over `parallel` beside a stopped process that had been given up",
        "rounds sooner than their interval",
    )
    over, beside, sooner = (result.table[name] for name in names)
    return over, beside, sooner


def test_a_start_over_the_limit_is_seen_and_one_beside_a_stopped_process_is_told_apart() -> None:
    task = Expected(1, range(3), parallel=1)
    assert limits(task, performed(0, 0, 1), performed(1, 1, 2)) == (0, 0, 0)
    assert limits(task, performed(0, 0, 1), performed(1, 0.9, 2)) == (1, 0, 0)
    assert limits(task, performed(0, 0, 9, stray=True), performed(1, 5, 6)) == (0, 1, 0)


@pytest.mark.parametrize(("at", "over"), [(10.5, 0), (12.5, 1)])
def test_a_lowered_limit_has_a_second_to_show(at: float, over: int) -> None:
    task, knob = Expected(1, range(3), parallel=2), Knob(1, 10.0, 10.1, 1)
    found = limits(task, performed(0, 9, 20), performed(1, at, 20), knobs=[knob])
    assert found[0] == over


def test_a_round_that_is_too_soon_is_seen() -> None:
    task = Expected(1, range(4), parallel=2, interval=1.0)
    on_time = [performed(0, 0, 0.1), performed(1, 0.1, 0.2), performed(2, 1.1, 1.2), performed(3, 1.2, 1.3)]
    assert limits(task, *on_time) == (0, 0, 0)
    assert limits(task, *on_time[:2], performed(2, 0.5, 0.6))[2] == 1


@pytest.mark.parametrize(
    ("second", "wrong"), [((2, 1.0, 2.0), 0), ((2, 0.5, 2.0), 1), ((-2, 1.0, 2.0), 1), ((1, 0.5, 2.0), 0)]
)
def test_two_of_one_key_at_once_or_out_of_order_are_seen(second: tuple[int, float, float], wrong: int) -> None:
    result = Audit()
    audits._orders(result, [Expected(1, range(4), keys=2)], book_of(performed(0, 0.0, 1.0), performed(*second)))
    assert result.table["key order broken"] == wrong


@pytest.mark.parametrize(("begin", "wrong"), [(1.0, 0), (0.5, 1)])
def test_a_task_that_does_not_wait_for_its_session_is_seen(begin: float, wrong: int) -> None:
    both = [Expected(1, range(1), session="s"), Expected(2, range(1, 2), session="s")]
    result = Audit()
    audits._orders(result, both, book_of(performed(0, 0.0, 1.0), performed(1, begin, 2.0, task=2)))
    assert result.table["session order broken"] == wrong


@pytest.mark.parametrize(("done", "total", "wrong"), [((1, 2), 3, 0), ((2, 1), 3, 1), ((2, 4), 3, 1)])
def test_progress_that_falls_or_goes_over_is_seen(tmp_path: Path, done: Sequence[int], total: int, wrong: int) -> None:
    def said(count: int) -> str:
        counts = {"total": total, "finish": count, "enqueue": total - count}
        return json.dumps({"id": 1, "generation": 1, "done": count, "counts": counts, "percent": 1.0})

    (tmp_path / "7").write_text("".join(f"P {said(count)}\n" for count in done))
    assert len(audits._progress(tmp_path)) == wrong


def reasons(book: Book, log: Sequence[Fault], deaths: Sequence[Death] = ()) -> dict[str, int]:
    """Why items were performed again, and how often; "" for no reason."""
    result = Audit()
    audits._beyond(result, book, log, deaths)
    without = result.table["performances without a reason"]
    assert without == len(result.broken)
    return {**result.table["performances beyond the first"], **({"": without} if without else {})}


def test_each_performance_beyond_the_first_has_its_reason() -> None:
    cut = Fault("connections cut", 1.0, 1.1, "", 3)
    deaths = [Death(7, 5.0, -9, "worker killed")]
    killed, again = performed(0, 4.0, 5.0), performed(0, 6.0, 7.0, pid=8)
    killed.outcome = ""
    assert reasons(book_of(killed, again), [cut], deaths) == {"worker killed": 1}
    early, soon = performed(0, 1.0, 2.0), performed(0, 3.0, 4.0, pid=8)
    assert reasons(book_of(early, soon), [], deaths) == {"": 1}, "its process died later"
    first, second = performed(1, 0.5, 0.9, pid=9), performed(1, 1.5, 1.6, pid=9)
    assert reasons(book_of(first, second), [cut], deaths) == {"connections cut": 1}
    assert reasons(book_of(first, second), [], deaths) == {"": 1}
    late = [Death(9, 60.0, -9, "worker killed")]
    assert reasons(book_of(first, performed(1, 61.0, 62.0)), [], late) == {"": 1}, "it was recorded long before"


@pytest.mark.parametrize(
    ("outcome", "what", "at", "reason"),
    [
        ("failed", "Task 1", 1.0, "a person retried it"),
        ("failed", "Task 2", 1.0, ""),
        ("failed", "Task 1", 3.5, ""),
        ("finish", "Task 1", 1.0, ""),
    ],
)
def test_what_failed_is_performed_again_by_a_person_only(outcome: str, what: str, at: float, reason: str) -> None:
    first, again = performed(0, 0.0, 0.5, pid=9), performed(0, 3.0, 4.0, pid=9)
    first.outcome = outcome
    retry = Fault("task retried", at, at + 0.1, what, 2)
    assert reasons(book_of(first, again), [retry]) == {reason: 1}


def test_an_end_is_read_from_the_book_and_a_death_ends_what_is_open(tmp_path: Path) -> None:
    (tmp_path / "7").write_text("B 1.0 1 5 a 1\nB 2.0 1 6 b 1\nE 1.5 1 5 a 1 finish\nF 1.6 99\n")
    book = book_of()
    book.callbacks, book.forks = Counter(), {}
    book._read(tmp_path / "7", 3.0, 1.2)
    assert [(each.n, each.end, each.outcome, each.stray) for each in book.performances] == [
        (5, 1.5, "finish", True),
        (6, 3.0, "", True),
    ]
    assert book.forks == {7: 1}


def item(n: int, status: str = "finish", *, task: int = 1) -> Item:
    return Item(9, "job-9", task, n, status, 1)


def in_slice(n: int, outcome: str) -> Performance:
    return Performance(7, 1, n, "job-9", 1, n, n + 0.5, outcome)


@pytest.mark.parametrize(
    ("second", "outcome", "lost", "open_ones"),
    [("finish", "finish", 0, 0), ("finish", "failed", 1, 0), ("enqueue", "", 0, 1), ("error", None, 1, 0)],
)
def test_an_item_of_a_slice_is_held_against_its_own_performance(
    second: str, outcome: str | None, lost: int, open_ones: int
) -> None:
    """``outcome``: of the performance of the second item, None if there was none."""
    performances = [in_slice(0, "finish"), *([] if outcome is None else [in_slice(1, outcome)])]
    result = Audit()
    audits._items(result, [Expected(1, range(2))], [item(0), item(1, second)], book_of(*performances))
    assert (result.table["items lost"], result.table["open items"]) == (lost, open_ones)


@pytest.mark.parametrize(
    ("was", "became", "generation", "wrong"),
    [(".f", "ff", 1, 0), ("f.", "e.", 1, 1), ("e.", "..", 1, 1), ("e.", "..", 2, 0), ("f.", "..", 2, 1), ("fe", "", 2, 1)],
)
def test_an_item_of_a_slice_that_comes_to_two_things_is_seen(was: str, became: str, generation: int, wrong: int) -> None:
    letters = {"f": MARKS[Status.FINISH], "e": MARKS[Status.ERROR], ".": OPEN_MARK}
    before, after = ("".join(letters[each] for each in text) for text in (was, became))
    assert len(list(audits._changed(9, before, after, generation))) == wrong


class Told:
    """An application whose Task 1 says that so many of its rows were mended."""

    def __init__(self, mended: int) -> None:
        self._mended = mended

    def task(self, task_id: int) -> Told:
        assert task_id == 1
        return self

    def progress(self) -> dict[str, int]:
        return {"mended": self._mended}


@pytest.mark.parametrize(
    ("more", "mended", "wrong"),
    [
        ([item(1, "failed", task=3)], 1, 0),
        ([], 1, 1),  # item 1 is in no list
        ([item(1, "failed", task=2), item(1, "failed", task=3)], 1, 1),
        ([item(1, "failed", task=3), item(5, task=3)], 2, 1),  # it was not sent
        ([item(1, "failed", task=3)], 2, 1),
        ([item(1, "failed", task=3), item(0)], 1, 1),  # item 0 succeeded in both
    ],
)
def test_a_corrected_row_that_is_not_taken_once_is_seen(more: list[Item], mended: int, wrong: int) -> None:
    result = Audit()
    made = [Corrected(1, frozenset((0, 1)), (2, 3))]
    audits._corrected(result, cast(AsyncTask, Told(mended)), [item(0, task=2), *more], made)
    assert result.table["corrected rows not taken once"] == wrong


@pytest.mark.parametrize(("code", "again"), [(3, 1), (1, 0), (None, 0)])
def test_a_web_server_that_found_no_database_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, again: int
) -> None:
    """One that ends in any other way is missed by whoever needs it, and the run is void."""
    arena = Arena(tmp_path, "sqlite", 1.0, 2.0)
    started = []

    def spawn(*words: str, **environ: str) -> Mock:
        started.append(words)
        return Mock(**{"poll.return_value": code})

    monkeypatch.setattr(arena, "spawn", spawn)
    arena.start_web()
    arena._keep_web()
    assert (len(started) - 1, arena.webs_put_off) == (again, again)
    arena.web = None
    arena.close()
