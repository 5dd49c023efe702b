"""The lines of a pool: the order in which threads take jobs, and the places of Tasks with a limit."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from asynctask.runtime.pool import Durations, ReadyJobs


def job(
    name: str,
    priority: int = 240,
    task: int | None = None,
    rank: int = 0,
    is_suspect: bool = False,
    is_borrowed: bool = True,
) -> Any:
    return SimpleNamespace(
        name=name,
        rank=(rank, priority),
        task_id=task,
        permits=None,
        loan=None,
        seq=-1,
        is_suspect=is_suspect,
        is_borrowed=is_borrowed,
        is_over=False,
    )


def names(lines: ReadyJobs, count: int) -> list[str]:
    found: list[Any] = [lines.take() for _ in range(count)]
    return [each.name for each in found]


def test_the_smallest_priority_goes_first_and_within_it_who_came_first() -> None:
    lines = ReadyJobs()
    lines.put([job("a"), job("b", 120), job("c"), job("d", 120), job("e", 120, rank=-1)])
    assert names(lines, 5) == ["e", "b", "d", "a", "c"]


def test_a_share_of_the_jobs_is_of_the_later_lines() -> None:
    lines = ReadyJobs(share=0.25)
    lines.put([job(f"urgent{n}", 120) for n in range(8)] + [job(f"later{n}", 340) for n in range(8)])
    taken = names(lines, 8)
    assert taken.count("later0") + taken.count("later1") == 2
    assert [name for name in taken if name.startswith("urgent")] == [f"urgent{n}" for n in range(6)]


def test_a_task_with_a_limit_has_as_many_jobs_out_as_it_has_places() -> None:
    lines = ReadyJobs()
    lines.limit(7, 2)
    first = [job(f"t{n}", 120, task=7) for n in range(4)]
    lines.put([*first, job("other")])
    assert len(lines) == 5
    assert names(lines, 3) == ["t0", "t1", "other"]
    assert lines.permits(7) == (2, 2, 2)
    lines.release(first[0])
    lines.release(first[0])  # once
    assert lines.permits(7) == (2, 2, 1)
    assert names(lines, 1) == ["t2"]


def test_lowered_places_are_kept_by_the_jobs_that_run() -> None:
    lines = ReadyJobs()
    lines.limit(7, 3)
    jobs = [job(f"t{n}", task=7) for n in range(5)]
    lines.put(jobs)
    names(lines, 3)
    assert lines.lower(7, 1) == 3
    lines.limit(7, 1)
    for each in jobs[:2]:
        lines.release(each)
    assert lines.permits(7) == (1, 1, 2), "one runs, and no other begins beside it"
    lines.release(jobs[2])
    assert names(lines, 1) == ["t3"]


def test_a_limit_that_comes_later_counts_what_waits_and_what_runs() -> None:
    lines = ReadyJobs()
    running, waiting = job("runs", task=7), job("waits", task=7)
    lines.put([running])
    taken: Any = lines.take()
    assert taken is running
    lines.put([waiting])
    lines.limit(7, 2)
    assert lines.permits(7) == (2, 2, 0)
    lines.put([job("third", task=7), job("fourth", task=7)])
    assert lines.permits(7) == (2, 2, 2)
    lines.limit(7, None)
    assert (names(lines, 3), len(lines)) == (["waits", "third", "fourth"], 0)
    lines.release(running)
    assert len(lines) == 0, "each of them is there once"


def test_a_limit_does_not_count_a_job_whose_thread_has_let_it_go() -> None:
    lines, ended = ReadyJobs(), job("ended", task=7)
    lines.put([ended])
    taken: Any = lines.take()
    assert taken is ended
    lines.release(ended)
    lines.limit(7, 1)
    assert lines.permits(7) == (1, 0, 0)


def test_a_limit_that_comes_later_or_sinks_holds_back_what_no_thread_has_taken() -> None:
    lines = ReadyJobs()
    jobs = [job(f"t{n}", task=7) for n in range(6)]
    lines.put([*jobs[:3], job("other"), *jobs[3:]])
    assert names(lines, 1) == ["t0"]
    lines.limit(7, 3)
    assert lines.permits(7) == (3, 3, 3)
    assert lines.lower(7, 1) == 1
    assert names(lines, 1) == ["other"]
    assert (len(lines), lines.first_rank()) == (5, None)
    for each in jobs[:5]:
        lines.release(each)
        assert names(lines, 1) == [f"t{jobs.index(each) + 1}"], "in their order"


def test_suspects_have_a_line_of_their_own_and_take_a_place_of_their_task() -> None:
    lines = ReadyJobs()
    lines.limit(7, 1)
    first, second, third = (job(name, task=7, is_suspect=name != "c") for name in "abc")
    lines.put([first, second, third])
    assert (len(lines), lines.suspects, len(lines.unbegun())) == (1, 1, 3)
    suspect: Any = lines.take_suspect()
    assert suspect is first
    assert (lines.permits(7), lines.suspects) == ((1, 1, 2), 0)
    lines.release(first)
    suspect = lines.take_suspect()
    assert suspect is second
    assert [each.name for each in lines.drop(lambda each: True)] == ["c"]
    lines.end(0, of_suspects=1)
    assert lines.take_suspect() is None


def test_what_is_dropped_leaves_its_place_to_the_next() -> None:
    lines = ReadyJobs()
    lines.limit(7, 1)
    lines.put([job("a", task=7), job("b", task=7), job("c", task=8)])
    assert [each.name for each in lines.drop(lambda each: each.name == "a")] == ["a"]
    assert lines.ready_by_task() == {7: 1, 8: 1}
    assert names(lines, 2) == ["c", "b"]
    lines.put([job(str(n)) for n in range(4)])
    assert [each.name for each in lines.drop(lines.first(1))] == ["1", "2", "3"]


def test_after_the_end_what_comes_late_goes_to_no_thread_and_back_with_the_rest() -> None:
    """Taken out: the check of `ReadyJobs.take` for that. A thread took each, and gave it back by itself."""
    lines = ReadyJobs()
    lines.limit(7, 1)
    lines.put([job("a", task=7), job("b", task=7), job("c"), job("s", is_suspect=True)])
    lines.close()
    assert sorted(each.name for each in lines.drop(lambda each: True)) == ["a", "b", "c", "s"]
    assert (len(lines), lines.suspects, lines.permits(7)) == (0, 0, (1, 0, 0))
    lines.put([job("late", 1), job("place", 1, task=7), job("suspect", is_suspect=True)])
    lines.end(1, of_suspects=1)
    assert (lines.take(), lines.take_suspect()) == (None, None)
    assert [each.name for each in lines.drop(lambda each: True)] == ["suspect", "late", "place"]
    assert (len(lines), lines.suspects) == (0, 0)
    assert lines.drop(lambda each: True) == [], "each comes back once"


def test_a_changed_priority_moves_the_jobs_of_a_task_in_their_order() -> None:
    lines = ReadyJobs()
    lines.limit(9, 1)
    lines.put([job("x"), job("a", 340, task=7), job("b", 340, task=7), job("l", 340, task=9), job("m", 340, task=9)])
    lines.reorder(7, (0, 120))
    lines.reorder(9, (0, 130))
    assert lines.rank_of(7) == (0, 120)
    assert names(lines, 4) == ["a", "b", "l", "x"]
    assert lines.first_rank() is None
    assert lines.rank_of(9) == (0, 130), "the one that waits for a place moved, too"


def test_threads_wait_for_jobs_and_end_when_told() -> None:
    lines, taken = ReadyJobs(), list[Any]()

    def work() -> None:
        while (each := lines.take()) is not None:
            taken.append(each.name)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    lines.put([job(str(n)) for n in range(50)])
    lines.end(3)
    for thread in threads:
        thread.join(10)
    assert sorted(taken, key=int) == [str(n) for n in range(50)], "what is there is performed before the end"


def test_the_place_of_the_last_taken_job_of_a_loan_is_known() -> None:
    lines, loan = ReadyJobs(), SimpleNamespace(top=9)
    jobs = [job(f"s{n}") for n in (10, 11, 12)]
    for seq, each in enumerate(jobs, 10):
        each.loan, each.seq = loan, seq
    lines.put(jobs)
    names(lines, 2)
    assert loan.top == 11


def test_a_duration_is_known_once_a_job_has_ended_and_rises_while_one_runs() -> None:
    durations = Durations()
    durations.at_least(1, 5.0)
    assert not durations.knows(1)
    durations.note(1, 0.01)
    durations.at_least(1, 5.0)
    assert durations.of(1, 0.3) == 5.0
    assert durations.of(2, 0.3) == 0.3
