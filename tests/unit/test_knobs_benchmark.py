"""What ``benchmarks.knobs`` reads from the jobs' book."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.knobs import Episode, Start, first_start, judge, read_book
from benchmarks.processes import Unaccounted


def episode(knob: str, limit: int = 0) -> Episode:
    return Episode("fast", knob, 1, 10.0, 20.0, limit)


def starts(*times: float, beside: int = 0) -> list[Start]:
    return [Start(at, beside) for at in times]


def test_a_start_after_a_pause_is_late_after_a_second() -> None:
    assert judge(episode("pause"), starts(9.0, 10.5)) == (0.5, 0)
    assert judge(episode("pause"), starts(9.0, 11.5, 21.0)) == (1.5, 1)


def test_a_lower_parallel_is_held_against_the_jobs_beside() -> None:
    assert judge(episode("parallel lower", 1), starts(10.5, 13.0)) == (0.0, 0)
    assert judge(episode("parallel lower", 1), starts(12.0, beside=1)) == (2.0, 1)


def test_rounds_under_a_new_interval() -> None:
    assert judge(episode("interval set", 2), starts(9.8, 9.9, 12.0, 12.0, 14.0, 14.0)) == (0.0, 0)
    assert judge(episode("interval set", 2), starts(11.5, 12.0, 12.5))[1] == 1


def test_what_allows_more_shows_with_the_first_such_start() -> None:
    assert judge(episode("parallel higher", 3), [Start(10.2, 1), Start(10.75, 3)]) == (0.75, 0)
    with pytest.raises(Unaccounted, match="never showed"):
        judge(episode("resume"), starts(9.0))
    while_it_was_accepted = replace(episode("resume"), asked=9.5)
    assert judge(while_it_was_accepted, starts(9.0, 9.8, 19.0)) == (0.0, 0), (
        "the threads took their jobs before it returned"
    )


def test_a_task_that_became_more_urgent_is_late_with_each_start_of_the_one_behind_it() -> None:
    behind = starts(9.5, 10.8, 11.2, 13.0, 21.0)
    assert judge(episode("more urgent"), starts(12.5), behind) == (2.5, 2)
    assert judge(episode("more urgent"), starts(12.5), starts(9.5, 10.8)) == (2.5, 0)


def test_until_a_thread_came_free_no_task_could_show_a_change() -> None:
    assert first_start(episode("more urgent"), starts(9.0, 12.5, 13.0)) == 2.5


def test_the_book_says_how_many_run_beside(tmp_path: Path) -> None:
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "1").write_text("B 1.0 7\nE 3.0 7\n")
    (tmp_path / "book" / "2").write_text("B 2.0 7\nE 2.5 7\nB 3.0 7\nE 4.0 7\n")
    assert read_book(tmp_path) == {7: [Start(1.0, 0), Start(2.0, 1), Start(3.0, 0)]}
