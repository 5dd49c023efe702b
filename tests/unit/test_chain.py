"""Chains of middleware: their order, the operations on it, and what a middleware may do to a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asynctask.job import CurrentJob
from asynctask.middleware.chain import Chain
from asynctask.worker import Worker

WORKER = Worker("enrol", lambda: None)


def first(worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
    return ["first", *call_next()]


def second(worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
    return ["second", *call_next()]


class Third:
    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def __call__(self, worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        return ["third", *call_next()]


def chain(*middleware: Any) -> Chain:
    made = Chain()
    for each in middleware:
        made.add(each)
    return made


def order(of: Chain) -> list[str]:
    return list(of.invoke(WORKER, CurrentJob("1" * 24), "default", list))


def test_an_empty_chain_just_calls_the_job() -> None:
    assert Chain().invoke(WORKER, CurrentJob("1" * 24), "default", lambda: 42) == 42


def test_what_is_added_first_stands_farthest_from_the_job() -> None:
    assert order(chain(first, second, Third)) == ["first", "second", "third"]
    assert chain(first, second, Third).names() == ["first", "second", "Third"]


def test_prepend_puts_it_farthest_from_the_job() -> None:
    made = chain(first)
    made.prepend(second)
    assert order(made) == ["second", "first"]


def test_insert_before_and_after_name_their_neighbour() -> None:
    made = chain(first, second)
    made.insert_before(second, Third)
    assert order(made) == ["first", "third", "second"]
    made.insert_after(second, Third)
    assert order(made) == ["first", "second", "third"]
    made.insert_after(first, Third)
    assert order(made) == ["first", "third", "second"]


def test_a_neighbour_that_is_not_there_means_the_end_that_is_nearest_to_it() -> None:
    before, after = chain(first), chain(first)
    before.insert_before(second, Third)
    after.insert_after(second, Third)
    assert (order(before), order(after)) == (["third", "first"], ["first", "third"])


@pytest.mark.parametrize("operation", ["add", "prepend"])
def test_adding_what_is_there_moves_it(operation: str) -> None:
    made = chain(first, second, Third)
    getattr(made, operation)(second)
    assert sorted(order(made)) == ["first", "second", "third"]
    assert order(made)[-1 if operation == "add" else 0] == "second"


def test_removing_takes_it_out_and_removing_it_again_does_nothing() -> None:
    made = chain(first, second)
    made.remove(first)
    made.remove(first)
    assert (order(made), len(made)) == (["second"], 1)


def test_exists_knows_functions_classes_and_instances() -> None:
    made = chain(first, Third())
    assert made.exists(first)
    assert made.exists(Third)
    assert not made.exists(second)
    made.remove(Third)
    assert not made.exists(Third)


def test_clear_takes_everything_out() -> None:
    made = chain(first, second)
    made.clear()
    assert list(made) == []


def test_a_class_is_made_anew_for_each_job_and_an_instance_is_not() -> None:
    Third.made = 0
    of_class, of_instance = chain(Third), chain(Third())
    for _ in range(3):
        order(of_class)
        order(of_instance)
    assert Third.made == 4


def test_a_middleware_sees_the_worker_the_job_and_the_queue_and_may_answer_by_itself() -> None:
    seen: list[Any] = []

    def answering(worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        seen.extend([worker, job, queue])
        return "instead"

    job = CurrentJob("1" * 24)
    assert chain(answering).invoke(WORKER, job, "low", lambda: seen.append("performed")) == "instead"
    assert seen == [WORKER, job, "low"]


def test_a_chain_that_is_changed_while_a_job_runs_stays_as_it_was_for_that_job() -> None:
    made = Chain()

    def changing(worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        made.remove(first)
        return ["changing", *call_next()]

    made.add(changing)
    made.add(first)
    assert order(made) == ["changing", "first"]
    assert order(made) == ["changing"]
