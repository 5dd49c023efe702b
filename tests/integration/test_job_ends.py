"""How the code of a job may end, and that its Event says what happened: work that is returned instead of performed,
``sys.exit()``, other exceptions of the system's kind, and processes that the job forks; each in a job of its own, in a
list, in slices and in a batch, on the own runtime. The suite of engines has the same for the others."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import gc
import os
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, cast

import click
import pytest
from support.world import World

from asynctask import AsyncTask, current_job
from asynctask.errors import ConfigError
from asynctask.iterable import Iterable
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")

PERFORMED: Counter[str] = Counter()
SHAPES = ("lone", "list", "slice", "batch")


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    """What is never awaited ends here: the collector would warn within another test."""
    PERFORMED.clear()
    yield
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


def at_once(*_: Any) -> float:
    return 0.01


def ended(
    world: World, app: AsyncTask, targets: Mapping[str, Callable[..., Any]], shape: str, **options: Any
) -> dict[str, dict[str, Any]]:
    """The Event of a job of each target, by its name, in one of the shapes and once it is over, with ``said``, its last
    message. An item is ``"x"``; in a slice it has a neighbour, performed by the same function."""
    found = {}
    for name, target in targets.items():
        function = functools.partial(first_of, target) if shape == "batch" else target
        given = {"retry": 2, "retry_in": at_once, "batch": shape == "batch", **options}
        found[name] = app.worker(name=name, **given)(function)
    with world.working(app):
        if shape == "lone":
            job_ids = {name: str(worker.perform_async("x")) for name, worker in found.items()}
            for job_id in job_ids.values():
                wait_for(lambda: app.event(job_id)["status"] in ("finish", "failed", "error"), "it ends")  # noqa: B023
            events = {name: app.event(job_id) for name, job_id in job_ids.items()}
            return {name: {**event, "said": event["messages"][-1]["message"]} for name, event in events.items()}
        items = ["x", "x"] if shape == "slice" else ["x"]
        tasks = {name: app.submit(worker, items, chunk_size=len(items)) for name, worker in found.items()}
        for task in tasks.values():
            assert task.wait(60)["done"]
    assert app.doctor() == []
    return {
        name: {**event, "said": event["added_messages"][-1]["message"]}
        for name, task in tasks.items()
        for event in task.events()[:1]
    }


def first_of(target: Callable[..., Any], items: list[Any]) -> Any:
    return target(items[0])


def ends_of(events: Mapping[str, Mapping[str, Any]], *names: str) -> dict[str, Any]:
    """These members of the Events, by name."""
    return {name: tuple(event[each] for each in names) for name, event in events.items()}


# -- work that is returned


async def later(item: Any) -> str:
    await asyncio.sleep(0)
    PERFORMED["later"] += 1
    return f"{item} is through"


def ordinary(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that knows nothing of coroutines."""

    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


class Later:
    async def __call__(self, item: Any) -> str:
        return await later(item)

    async def method(self, item: Any) -> str:
        return await later(item)


async def twice(item: Any) -> Coroutine[Any, Any, str]:
    return later(item)  # an await is missing


async def as_task(item: Any) -> asyncio.Task[str]:
    return asyncio.get_running_loop().create_task(later(item))


class Awaitable:
    def __init__(self, item: Any) -> None:
        self._item = item

    def __await__(self) -> Any:
        return later(self._item).__await__()


@functools.singledispatch
def dispatched(item: Any) -> Any:
    raise TypeError


@dispatched.register
async def _(item: str) -> str:
    return await later(item)


POOL = concurrent.futures.ThreadPoolExecutor(1)

AWAITED: dict[str, Callable[..., Any]] = {
    "async function": later,
    "decorated": ordinary(later),
    "partial": functools.partial(later),
    "partial of a decorated one": functools.partial(ordinary(later)),
    "object": Later(),
    "method": Later().method,
    "lambda": lambda item: later(item),
    "awaitable": lambda item: Awaitable(item),
    "twice": twice,
    "task": as_task,
    "single dispatch": dispatched,
    "future of a thread": lambda item: POOL.submit(asyncio.run, later(item)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_can_be_awaited_is_awaited(world: World, shape: str) -> None:
    events = ended(world, world.app(), AWAITED, shape)
    assert ends_of(events, "status", "retries", "said") == dict.fromkeys(AWAITED, ("finish", 0, "Done"))
    assert PERFORMED["later"] == len(AWAITED) * (2 if shape == "slice" else 1)
    if shape in ("lone", "list"):
        assert ends_of(events, "result") == dict.fromkeys(AWAITED, ("x is through",))


def test_what_a_plain_function_returns_to_be_awaited_has_the_rest_of_its_time(world: World) -> None:
    async def too_long(item: Any) -> None:
        await asyncio.sleep(60)

    event = ended(world, world.app(), {"slow": ordinary(too_long)}, "list", retry=0, timeout=0.3)["slow"]
    assert (event["status"], event["problem"], event["said"]) == ("error", "timeout", "Timed out")


def steps(item: Any) -> Iterator[str]:
    PERFORMED["step"] += 1
    yield item


async def steps_later(item: Any) -> AsyncIterator[str]:
    PERFORMED["step"] += 1
    yield item


PUT_OFF: dict[str, Callable[..., Any]] = {
    "generator function": steps,
    "async generator function": steps_later,
    "generator": lambda item: steps(item),
    "generator of an async function": ordinary(steps),
    "map": lambda item: map(steps, [item]),
    "filter": lambda item: filter(steps, [item]),
    "context manager": contextlib.contextmanager(steps),
    "async context manager": contextlib.asynccontextmanager(steps_later),
    "a decorator that lacks its parentheses": lambda item: ordinary(item),
    "method": lambda item: Later().method,
    "partial": lambda item: functools.partial(steps, item),
    "functions in a list": lambda item: [lambda: steps(item)],
    "coroutines in a list": lambda item: [later(item)],
    "coroutines in a dict": lambda item: {"all": [[later(item)]]},
    "coroutines in a set": lambda item: [{later(item)}],
}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("shape", SHAPES)
def test_work_that_nobody_performs_is_one_error_and_not_a_success(world: World, shape: str) -> None:
    targets = dict(PUT_OFF)
    if shape == "batch":  # of which only a list has results
        del targets["coroutines in a dict"]
    events = ended(world, world.app(), targets, shape)
    assert ends_of(events, "status", "retries", "result") == dict.fromkeys(targets, ("error", 0, None))
    for name, event in events.items():
        assert "returned work that nobody performs" in str(event["messages" if shape == "lone" else "added_messages"]), name
    if shape != "slice":
        assert ends_of(events, "problem") == dict.fromkeys(targets, ("not_performed",))
    assert PERFORMED == {}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_elements_of_an_iterable_that_are_not_performed_are_an_error(world: World) -> None:
    app = world.app()

    @app.worker(retry=2, retry_in=at_once)
    class Walk(Iterable):
        def items(self, cursor: Any, *args: Any) -> Iterator[tuple[Any, Any]]:
            yield from ((n, n) for n in range(3))

        each = staticmethod(ordinary(later))

    with world.working(app):
        task = app.submit("Walk", [{"n": 1}])
        task.wait(60)
    (event,) = task.events()
    assert (event["status"], event["problem"], event["retries"]) == ("error", "not_performed", 0)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_middleware_that_puts_the_job_off_is_an_error(world: World) -> None:
    app = world.app()

    async def middleware(worker: Any, job: Any, queue: str, call_next: Callable[[], Any]) -> Any:
        return call_next()

    with pytest.raises(ConfigError, match="plain function, not an async function"):
        app.server_middleware.add(middleware)
    app.server_middleware.add(ordinary(middleware))
    event = ended(world, app, {"job": lambda item: PERFORMED.update(["did"])}, "list")["job"]
    assert (event["status"], event["problem"], PERFORMED["did"]) == ("error", "not_performed", 0)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_retry_policy_that_is_put_off_is_refused_or_the_default_applies(world: World) -> None:
    async def later_policy(*args: Any) -> float:
        return 0.01

    app, policy = world.app(), cast(Any, later_policy)
    for option in ("retry_in", "retries_exhausted"):
        with pytest.raises(ConfigError, match=f"{option} is called in a plain thread"):
            app.worker(name="w", **{option: policy})(lambda item: None)
    with pytest.raises(ConfigError, match="a check is called in a plain thread"):
        app.worker(name="w", checks=[policy])(lambda item: None)
    for name in ("startup", "error", "death", "task_finished"):
        with pytest.raises(ConfigError, match=f"hook of {name}"):
            app.on(name)(policy)
    misfits: list[tuple[str, Any]] = [
        ("error", lambda: 1),
        ("death", lambda job: 1),
        ("startup", lambda app: 1),
        ("quiet", 5),
    ]
    for name, misfit in misfits:
        with pytest.raises(ConfigError, match=f"a hook of {name} is called with"):
            app.on(name)(misfit)
    worker = app.worker(name="bug", retry=1, retry_in=ordinary(policy))(lambda item: 1 // 0)
    with world.working(app):
        job_id = str(worker.perform_async("x"))
        wait_for(lambda: app.event(job_id)["retries"] == 1, "it waits for its retry")
        event = app.event(job_id)
    assert event["status"] == "enqueue"
    assert event["due_at"] is not None, "15 seconds later, as without a policy"


# -- sys.exit() and its like


def leaving(code: Any) -> Callable[[Any], None]:
    def leave(item: Any) -> None:
        PERFORMED["did"] += 1
        sys.exit(code)

    return leave


async def leave_later(item: Any) -> None:
    await asyncio.sleep(0)
    leaving(3)(item)


async def leave_in_a_task(item: Any) -> None:
    await asyncio.gather(leave_later(item))


@click.command()
@click.argument("sku")
def command(sku: str) -> None:
    PERFORMED["did"] += 1


WELL: dict[str, Callable[..., Any]] = {
    "None": leaving(None),
    "0": leaving(0),
    "False": leaving(False),
    "a command of click": lambda item: command(["A-1"]),
}

BADLY: dict[str, tuple[Callable[..., Any], str]] = {
    "3": (leaving(3), "exit code 3"),
    "-1": (leaving(-1), "exit code 255"),
    "256": (leaving(256), "exit code 256"),
    "a text": (leaving("no such sheet"), "exit code 1: no such sheet"),
    "async": (leave_later, "exit code 3"),
    "a task of an async one": (leave_in_a_task, "exit code 3"),
    "decorated": (ordinary(leave_later), "exit code 3"),
    "a command of click": (lambda item: command([]), "exit code 2"),
}


@pytest.mark.one_of("shape", reason="an exit with a code is tried in every shape")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_job_that_exits_well_is_finished(world: World, shape: str) -> None:
    events = ended(world, world.app(), WELL, shape)
    assert ends_of(events, "status", "retries", "said") == dict.fromkeys(WELL, ("finish", 0, "Done"))
    assert PERFORMED["did"] == len(WELL) * (2 if shape == "slice" else 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_job_that_exits_with_a_code_is_one_error_that_names_it(world: World, shape: str) -> None:
    events = ended(world, world.app(), {name: target for name, (target, _) in BADLY.items()}, shape)
    if shape == "slice":
        assert ends_of(events, "status", "retries", "said") == {n: ("error", 0, says) for n, (_, says) in BADLY.items()}
        return
    assert ends_of(events, "status", "retries", "problem", "said") == {
        name: ("error", 0, "exited", f"Error: {says}") for name, (_, says) in BADLY.items()
    }


def test_coroutines_of_other_jobs_outlive_an_exit_in_a_task_of_a_job(world: World) -> None:
    app, inside = world.app(), threading.Event()
    gate: asyncio.Event | None = None
    loop: asyncio.AbstractEventLoop | None = None

    @app.worker(retry=0)
    async def wait(item: Any) -> str:
        nonlocal gate, loop
        gate, loop = asyncio.Event(), asyncio.get_running_loop()
        inside.set()
        await gate.wait()
        return "through"

    app.worker(name="leave", retry=0)(leave_in_a_task)
    with world.working(app, concurrency=2):
        waiting = app.submit("wait", ["x"])
        assert inside.wait(60)
        leaving = app.submit("leave", ["x"])
        leaving.wait(60)
        assert loop is not None
        assert gate is not None
        loop.call_soon_threadsafe(gate.set)
        waiting.wait(60)
    assert [task.events()[0]["status"] for task in (leaving, waiting)] == ["error", "finish"]
    assert waiting.events()[0]["result"] == "through"


@pytest.mark.one_of("shape", reason="an exit with a code is tried in every shape")
@pytest.mark.parametrize("shape", SHAPES)
def test_an_exit_can_be_a_refusal_of_the_business(world: World, shape: str) -> None:
    event = ended(world, world.app(), {"leave": leaving(2)}, shape, failed_on=(SystemExit,))["leave"]
    assert (event["status"], event["retries"]) == ("failed", 0)
    assert "exit code 2" in event["said"]


@pytest.mark.parametrize("shape", ["lone", "list", "slice"])
def test_an_exit_while_the_runtime_ends_the_job_is_an_interruption(world: World, shape: str) -> None:
    """Also with the code 0: the job was cut off, however it puts that."""
    app, inside = world.app(), threading.Event()

    def cut_off(item: Any) -> None:
        if current_job().attempt > 1:
            return
        inside.set()
        try:
            wait_for(lambda: False, "never", 60, every=0.005)
        finally:
            sys.exit(0)

    worker = app.worker(name="cut_off", retry=0)(cut_off)
    with world.working(app, shutdown_s=0.0):
        if shape == "lone":
            job_id = str(worker.perform_async("x"))
        else:
            task = app.submit(worker, ["x", "x"], chunk_size=2 if shape == "slice" else 1, parallel=1)
            job_id = task.events()[0]["job_id"]
        assert inside.wait(60)
    event = app.event(job_id)
    assert (event["status"], event["retries"]) == ("enqueue", 0)
    assert "Interrupted" in [m["message"] for m in event["messages"]]


SYSTEMS = {
    "KeyboardInterrupt": KeyboardInterrupt(),
    "GeneratorExit": GeneratorExit(),
    "CancelledError": asyncio.CancelledError(),
    "StopIteration": StopIteration(),
}


def breaking(error: BaseException) -> Callable[[Any], None]:
    def broken(item: Any) -> None:
        PERFORMED["did"] += 1
        raise error

    return broken


def breaking_later(error: BaseException) -> Callable[[Any], Coroutine[Any, Any, None]]:
    async def broken(item: Any) -> None:
        breaking(error)(item)

    return broken


@pytest.mark.one_of("shape", reason="an exit with a code is tried in every shape")
@pytest.mark.parametrize("shape", SHAPES)
def test_an_exception_of_the_systems_kind_is_an_error_like_any(world: World, shape: str) -> None:
    targets: dict[str, Callable[..., Any]] = {name: breaking(error) for name, error in SYSTEMS.items()}
    targets |= {f"{name} later": breaking_later(error) for name, error in SYSTEMS.items()}
    del targets["StopIteration later"]  # Python makes a RuntimeError of it
    events = ended(world, world.app(), targets, shape, retry=1)
    assert ends_of(events, "status", "retries") == dict.fromkeys(targets, ("error", 1))
    for name, event in events.items():
        assert event["said"].removeprefix("Error: ") == name.partition(" ")[0]
    assert PERFORMED["did"] == 2 * len(targets) * (2 if shape == "slice" else 1)


def test_an_untracked_job_that_exits_is_performed_or_dead_and_not_retried(world: World) -> None:
    app = world.app()
    good = app.worker(name="good", use_task_event=False)(leaving(0))
    bad = app.worker(name="bad", use_task_event=False, retry=5)(leaving(4))
    with world.working(app):
        good.perform_async("x")
        bad.perform_async("x")
        wait_for(lambda: app.operations.listed("dead")["entries"], "the bad one is dead")
    (entry,) = app.operations.listed("dead")["entries"]
    assert "exit code 4" in str(entry)
    assert PERFORMED["did"] == 2
    assert app.operations.listed("retries")["entries"] == []


# -- processes that a job forks


def forks(end: Callable[[], Any]) -> Callable[[Any], dict[str, int]]:
    def fork(item: Any) -> dict[str, int]:
        pid = os.fork()
        if pid == 0:
            return end()  # type: ignore[no-any-return]
        return {"child": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}

    return fork


def breaks() -> None:
    raise ValueError("in the child")


ENDS: dict[str, tuple[Callable[[], Any], int]] = {
    "returns": (lambda: "from the child", 0),
    "exits": (sys.exit, 0),
    "exits with a code": (lambda: sys.exit(7), 7),
    "exits with a text": (lambda: sys.exit("no"), 1),
    "raises": (breaks, 1),
    "is killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), -9),
}


def later_too(function: Callable[[Any], Any]) -> Callable[[Any], Coroutine[Any, Any, Any]]:
    async def made(item: Any) -> Any:
        await asyncio.sleep(0)
        return function(item)

    return made


@pytest.mark.parametrize("shape", ["lone", "list"])
@pytest.mark.each_database(reason="a child has its parent's connections, which each database has in its own way")
def test_a_forked_process_ends_with_the_function_and_the_job_is_its_parents(world: World, shape: str) -> None:
    targets: dict[str, Callable[..., Any]] = {name: forks(end) for name, (end, _) in ENDS.items()}
    targets |= {f"{name} later": later_too(forks(end)) for name, (end, _) in ENDS.items()}
    events = ended(world, world.app(), targets, shape)
    assert ends_of(events, "status", "retries", "result") == {
        name: ("finish", 0, {"child": ENDS[name.removesuffix(" later")][1]}) for name in targets
    }


def test_a_forked_process_does_not_go_on_in_the_event_loop(world: World) -> None:
    async def fork_and_wait(item: Any) -> Any:
        pid = os.fork()
        if pid == 0:
            await asyncio.sleep(0)
            os._exit(9)
        return {"child": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}

    event = ended(world, world.app(), {"fork": fork_and_wait}, "list")["fork"]
    assert (event["status"], event["result"]) == ("finish", {"child": 1})


def test_a_forked_process_goes_through_no_further_elements(world: World) -> None:
    """Neither those of a slice, nor of an iterable, nor the rows of an export."""
    app = world.app()
    fork = forks(lambda: None)
    book = world.folder / "elements"

    def note(n: int) -> None:
        with book.open("a") as out:
            out.write(f"{n}\n")
        fork(n)

    @app.worker(retry=0)
    class Walk(Iterable):
        def items(self, cursor: Any, *args: Any) -> Iterator[tuple[Any, Any]]:
            for n in range(3):
                fork(n)
                yield n, n

        def each(self, item: Any) -> None:
            note(item)

    @app.export(columns=["n"], name="rows", retry=0)
    def rows(shard: Any) -> Iterator[tuple[int]]:
        for n in range(3):
            fork(n)
            yield (n,)

    app.worker(name="one", retry=0)(note)
    with world.working(app):
        tasks = [app.submit("one", [0, 1, 2], chunk_size=3), app.submit("Walk", [{}]), app.submit_export("rows", [1])]
        for task in tasks:
            assert task.wait(60)["done"]
    assert [task.progress()["counts"]["finish"] for task in tasks] == [3, 1, 1]
    assert sorted(book.read_text().split()) == ["0", "0", "1", "1", "2", "2"]
    with app.result(tasks[2].id).open() as body:
        assert body.read().decode("utf-8-sig").split() == ["n", "0", "1", "2"]
