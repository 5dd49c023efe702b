"""What a worker pushes: a job's arguments in the places of its function's parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import pytest
from pydantic import BaseModel

from asynctask import AsyncTask, CurrentJob
from asynctask.errors import ConfigError
from asynctask.sidekiq.payload import When
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

    def submit(self, worker: Any, items: Any, **options: Any) -> Any:
        raise NotImplementedError


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


# -- what can be a worker


class Sheet(BaseModel):
    path: str


async def read(item: Sheet) -> None: ...


class Reader:
    """Reads."""

    async def __call__(self, item: Sheet) -> None: ...

    def method(self, item: Sheet) -> None: ...


class Static:
    @staticmethod
    def perform(item: Sheet) -> None: ...


class OfClass:
    @classmethod
    def perform(cls, item: Sheet) -> None: ...


class Called:
    perform = Reader()


class Rows:
    def __call__(self, shard: Any) -> Iterable[Any]:
        return []


@pytest.mark.parametrize(
    ("target", "name", "is_async"),
    [
        (partial(read), "read", True),
        (partial(partial(read)), "read", True),
        (Reader(), "", True),
        (partial(Reader()), "", True),
        (Reader().method, "method", False),
        (Static, "Static", False),
        (OfClass, "OfClass", False),
        (Called, "Called", True),
    ],
)
def test_whatever_can_be_called_can_be_a_worker_with_the_form_of_its_item(target: Any, name: str, is_async: bool) -> None:
    found, function, whether_async, model = describe(target)
    assert (found, whether_async, model) == (name, is_async, Sheet)
    pushed = Pushed()
    assert Worker(name or "w", function, pusher=pushed).perform_async(item="a")
    assert pushed.args == [("a",)]


@pytest.mark.parametrize("target", [Reader(), partial(Reader())])
def test_an_object_has_no_name_so_one_must_be_given(target: Any) -> None:
    app = AsyncTask(database_url="sqlite://", environ={})
    with pytest.raises(ConfigError, match="has no name of its own: give the worker one with name="):
        app.worker(target)
    with pytest.raises(ConfigError, match="has no name of its own"):
        app.export(columns=["path"])(Rows())
    worker = app.worker(name="read")(target)
    assert (worker.name, worker.is_async) == ("read", True)


@pytest.mark.parametrize("target", [max, partial(max), classmethod(cast(Any, read)), 5, type(None)])
def test_what_cannot_be_called_with_an_item_is_refused(target: Any) -> None:
    app = AsyncTask(database_url="sqlite://", environ={})
    with pytest.raises(ConfigError):
        app.worker(name="w")(target)


@pytest.mark.parametrize("name", ["each", "on_start", "on_resume", "on_stop", "on_complete", "total"])
def test_a_method_of_an_iterable_that_a_call_would_not_perform_is_refused(name: str) -> None:
    async def later(self: Any, *args: Any) -> None: ...

    def steps(self: Any, *args: Any) -> Iterable[int]:
        yield 1

    app = AsyncTask(database_url="sqlite://", environ={})
    for method in (later, steps):
        methods = {"items": lambda self, cursor, item: [], "each": lambda self, item: None, name: method}
        with pytest.raises(ConfigError, match=f"{name} must be a plain method"):
            app.worker(type("Walk", (app.Iterable,), methods))


# -- with how many arguments


class Pair:
    def perform(self, item: str, seller: str) -> None: ...


class CalledObject:
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
        (CalledObject(), {1}),
        (partial(mail, "you"), {0, 1, 2}),
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
