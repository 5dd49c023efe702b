"""What a worker pushes: a job's arguments in the places of its function's parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from asynctask import CurrentJob
from asynctask.wire.payload import When
from asynctask.worker import Worker, describe


class Pushed:
    """Notes what is pushed."""

    def __init__(self) -> None:
        self.args: list[Sequence[Any]] = []
        self.at: When | None = None

    def push(
        self, worker: Worker, args: Iterable[Sequence[Any]], *, at: When | None = None, options: Mapping[str, Any]
    ) -> list[str | None]:
        self.args, self.at = [tuple(each) for each in args], at
        return ["jid"]


def mail(to: str, subject: str = "Hello", body: str = "", *, urgent: bool = False) -> None: ...


class Import:
    def perform(self, item: str, sheet: int = 1) -> None: ...


def worker_of(target: Any, pushed: Pushed) -> Worker:
    name, function, _, _ = describe(target)
    return Worker(name, function, pusher=pushed)


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "travels"),
    [
        (mail, ("you",), {}, ("you",)),
        (mail, (), {"to": "you"}, ("you", "Hello", "")),
        (mail, ("you",), {"body": "Bye"}, ("you", "Hello", "Bye")),
        (Import, (), {"item": "A"}, ("A", 1)),
        (Import, ("A",), {"sheet": 2}, ("A", 2)),
        (lambda *numbers: None, (1, 2, 3), {}, (1, 2, 3)),
    ],
)
def test_arguments_by_name_travel_in_their_places(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], travels: tuple[Any, ...]
) -> None:
    pushed = Pushed()
    worker = worker_of(target, pushed)
    assert worker.perform_async(*args, **kwargs) == "jid"
    assert pushed.args == [travels]
    worker.perform_in(60, *args, **kwargs)
    assert (pushed.args, pushed.at) == ([travels], 60)
    worker.perform_at(2_000_000_000, *args, **kwargs)
    assert (pushed.args, pushed.at) == ([travels], 2_000_000_000)


@pytest.mark.parametrize("kwargs", [{"urgent": True}, {"colour": "red"}])
def test_what_has_no_place_is_refused_before_anything_is_pushed(kwargs: dict[str, Any]) -> None:
    pushed = Pushed()
    with pytest.raises(TypeError, match=next(iter(kwargs))):
        worker_of(mail, pushed).perform_async("you", **kwargs)
    assert pushed.args == []


def test_a_job_has_its_arguments() -> None:
    assert CurrentJob("a", payload={"class": "mail", "args": ["you", {"n": 1}]}).args == ("you", {"n": 1})
    assert CurrentJob("a").args == ()


class Pair:
    def perform(self, item: str, seller: str) -> None: ...


class Called:
    def __call__(self, item: str) -> None: ...


def named(item: str, *, seller: str) -> None: ...


def injecting(function: Any) -> Any:
    @functools.wraps(function)
    def call(item: str) -> Any:
        return function(item, "a session")

    return call


def of_a_coroutine(function: Any) -> Any:
    """As Dramatiq wraps an ``async def`` actor."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> None: ...

    return call


@injecting
def given_a_session(item: str, session: str) -> None: ...


@of_a_coroutine
async def waits_for_two(item: str, seller: str) -> None: ...


@pytest.mark.parametrize(
    ("target", "fits"),
    [
        (mail, {1, 2, 3}),
        (Import, {1, 2}),
        (Pair, {2}),
        (Called(), {1}),
        (functools.partial(mail, "you"), {0, 1, 2}),
        (named, set()),
        (given_a_session, {1}),
        (waits_for_two, {2}),
        (lambda: None, {0}),
        (lambda *numbers: None, {0, 1, 2, 3}),
    ],
)
def test_a_worker_knows_with_how_many_arguments_it_can_be_called(target: Any, fits: set[int]) -> None:
    worker = worker_of(target, Pushed())
    assert {count for count in range(4) if worker.unfit_for(count) is None} == fits


def test_it_names_its_parameters_where_it_cannot() -> None:
    assert worker_of(named, Pushed()).unfit_for(1) == "(item, *, seller)"
