"""The conformance suite of engines: inherit it in a test class and override :meth:`EngineConformance.make_harness`.

.. code-block:: python

    class TestMyEngine(EngineConformance):
        def make_harness(self, folder: Path) -> EngineHarness:
            return MyHarness(folder)

The application of a harness has two workers, ``act`` and ``again``, both with the function :func:`act` of the folder, an
item and, when they are called back, the progress object; ``again`` is retried twice, at once. If the engine has the
capability ``exports``, a third one, ``cells``, is an export of :data:`COLUMNS` with the function :func:`cells` of the
folder and a shard, and is retried like ``again``. The application's own runtime passes the suite like any attached engine.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final, Protocol

from asynctask.app import AsyncTask
from asynctask.brokers.base import Copy
from asynctask.clock import SystemClock
from asynctask.dispatch.outbox import Router
from asynctask.errors import InputError, NormalException, NotFound
from asynctask.job import current_job
from asynctask.ledger.foreign import engine_of
from asynctask.sidekiq.copies import build
from asynctask.sidekiq.payload import dump
from asynctask.task import TaskHandle
from asynctask.testing import PATIENCE_S, wait_for

COLUMNS: Final = ("n", "text")
"""Of the export ``cells``."""


# -- what jobs do


def act(folder: Path, item: Mapping[str, Any], progress: Mapping[str, Any] | None = None) -> Any:
    """Notes in the folder that the item ``n`` began, then does what it says. Returns ``n``, and the counts of ``progress``.

    ``do``: ``finish``, ``refuse``, ``raise``, ``die``, which ends its process, or ``wait``, until there is a file ``gate``;
    ``know``, and return what the job knows of its list;
    ``walk``, so many ``steps``; ``exit`` with the ``code``; ``fork`` a process that ends as ``child`` says, and return
    its exit code; ``put_off`` the work by returning it ``as`` a generator, a map, or coroutines in a list. ``breaks``: at
    so many first attempts it raises.
    """
    job = current_job()
    _note(folder, "began", item["n"], job.attempt)
    job.message(f"item {item['n']}")
    if item.get("do") == "die":
        os._exit(9)
    if item.get("do") == "wait":
        wait_for((folder / "gate").exists, "the gate opens", every=0.01)
    if item.get("do") == "walk":
        _walk(folder, item)
    if item.get("do") == "exit":
        sys.exit(item["code"])
    if item.get("do") == "put_off":
        return put_off(partial(_note, folder, "did", item["n"], job.attempt), item["as"])
    if item.get("do") == "fork":
        pid = os.fork()
        if pid == 0:
            return _end_child(item["child"])
        return {"child": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}
    if item.get("do") == "refuse":
        raise NormalException("no such seller")
    if item.get("do") == "raise" or job.attempt <= item.get("breaks", 0):
        raise ValueError("broken")
    if item.get("do") == "know":
        its = None if job.task is None else [job.task.id, job.task.title, job.task.owner, job.task.worker]
        return {"owner": job.owner, "row": job.row, "context": job.context, "task": its}
    _note(folder, "did", item["n"], job.attempt)
    return {"n": item["n"]} if progress is None else {"n": item["n"], "counts": progress["counts"]}


def put_off(step: Callable[[], object], kind: str) -> Any:
    """The step as work that somebody else would have to perform."""

    async def later() -> None:
        step()

    if kind == "coroutine":
        return later()
    if kind == "coroutines":
        return [later()]
    return map(type(step).__call__, [step]) if kind == "map" else (step() for _ in "x")


def _end_child(how: str) -> str:
    if how == "exit":
        sys.exit(5)
    if how == "raise":
        raise ValueError("in the child")
    return "from the child"


def _walk(folder: Path, item: Mapping[str, Any]) -> None:
    """Steps from the saved place on; behind the step ``until`` it waits to be stopped, or for the ``gate``."""
    job = current_job()
    for step in range(job.state or 0, item["steps"]):
        if step == item["until"]:
            wait_for(lambda: job.should_stop() or (folder / "gate").exists(), "it is to stop", every=0.01)
        if job.should_stop():
            job.stop()
        _note(folder, "step", step, job.attempt)
        job.checkpoint(step + 1)
        job.progress(step + 1, item["steps"])


def cells(folder: Path, shard: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """The rows of a shard: ``count`` numbers from ``first`` on, each with a text. ``breaks``: at so many first attempts it
    raises half-way."""
    first, count = shard["first"], shard["count"]
    for n in range(first, first + count):
        if n == first + count // 2 and current_job().attempt <= shard.get("breaks", 0):
            raise ValueError("broken")
        yield n, f"row {n}, é"


def _note(folder: Path, *words: object) -> None:
    book = os.open(folder / "acts.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(book, (" ".join(map(str, words)) + "\n").encode())
    finally:
        os.close(book)


def half_a_second_later() -> None:
    """For so long a job that was fetched may begin as its Task was then; afterwards none does."""
    clock = SystemClock()
    until = clock.monotonic() + 0.5
    wait_for(lambda: clock.monotonic() > until, "half a second has passed")


def performed(folder: Path, verb: str = "began") -> list[int]:
    """The items that began, or that were done (``did``), in order; one that began twice is there twice."""
    book = folder / "acts.txt"
    lines = book.read_text().splitlines() if book.exists() else []
    return [int(n) for said, n, _ in map(str.split, lines) if said == verb]


# -- the suite


class EngineHarness(Protocol):
    """One engine with an application attached, its workers not yet started."""

    app: AsyncTask

    def send(self, worker: str, item: Mapping[str, Any]) -> str:
        """Sends a lone job, as programs of the engine do; returns its id."""
        ...

    def start(self, threads: int = 2) -> None:
        """Starts a worker that performs so many jobs at once; returns when it is registered in the ledger."""
        ...

    def stop(self) -> None:
        """Ends the worker in order, as on a deploy; returns when it has ended."""
        ...

    def kill(self) -> None:
        """Kills whatever performs jobs, with SIGKILL, and sees to it that something performs again."""
        ...

    def close(self) -> None:
        """Ends everything."""
        ...


class EngineConformance(ABC):
    """What an engine has to keep of the promises, a method each."""

    killed_items: ClassVar[int] = 600
    """How many items the list has whose workers are killed three times; the more, the longer it takes."""

    @abstractmethod
    def make_harness(self, folder: Path) -> EngineHarness:
        """A harness of its own for each test; ``folder`` is empty."""

    @contextmanager
    def harness(self) -> Iterator[tuple[EngineHarness, Path]]:
        """A harness and its folder."""
        with TemporaryDirectory(prefix="asynctask-engine-") as name:
            made = self.make_harness(Path(name))
            try:
                yield made, Path(name)
            finally:
                made.close()

    # -- one job

    def test_a_success_leaves_its_result_and_its_messages(self) -> None:
        with self.harness() as (engine, _):
            engine.start()
            (event,) = ended(engine.app.submit("act", [{"n": 1}]))
            assert (event["status"], event["result"], event["attempt"]) == ("finish", {"n": 1}, 1)
            assert [m["message"] for m in event["messages"]] == ["In progress", "item 1", "Done"]

    def test_a_refusal_is_failed_and_not_retried(self) -> None:
        with self.harness() as (engine, folder):
            engine.start()
            (event,) = ended(engine.app.submit("again", [{"n": 1, "do": "refuse"}]))
            assert (event["status"], event["messages"][-1]["message"]) == ("failed", "Failed: no such seller")
            assert performed(folder) == [1]

    def test_an_error_is_retried_and_its_retry_finishes_it(self) -> None:
        with self.harness() as (engine, folder):
            engine.start()
            task = engine.app.submit("again", [{"n": 1, "breaks": 1}])
            (event,) = ended(task)
            assert (event["status"], event["attempt"], event["retries"]) == ("finish", 2, 1)
            assert [m["status"] for m in event["messages"]] == [
                "working", "working", "error", "enqueue", "working", "working", "finish",
            ]  # fmt: skip
            assert performed(folder) == [1, 1]
            exact(engine.app, task, finish=1)

    def test_an_error_without_a_retry_left_is_an_error(self) -> None:
        with self.harness() as (engine, folder):
            engine.start()
            task = engine.app.submit("again", [{"n": 1, "do": "raise"}])
            (event,) = ended(task)
            assert (event["status"], event["messages"][-1]["message"]) == ("error", "Error: ValueError: broken")
            assert performed(folder) == [1, 1, 1]
            exact(engine.app, task, error=1)
            engine.stop()
            wait_for(lambda: in_history(engine.app, "again") == (1, 2), "its end and its retries are in the history")

    def test_the_last_error_is_kept_with_the_frames_of_the_function_and_its_process(self) -> None:
        with self.harness() as (engine, _):
            engine.start()
            task = engine.app.submit("again", [{"n": 1, "breaks": 1}])
            lone = engine.send("again", {"n": 2, "do": "raise"})
            for job_id in (ended(task)[0]["job_id"], ended_alone(engine.app, lone)["job_id"]):
                job = engine.app.event(job_id)
                error, frames = job["last_error"], [line for line in job["traceback"].split("\n") if line[:7] == "  File "]
                assert (error["code"], error["message"]) == ("raised", "ValueError: broken")
                assert error["process"] in {each["identity"] for each in engine.app.operations.processes()}
                assert error["process"] in {each.get("process") for each in job["messages"]}
                assert job["traceback"].endswith("\nValueError: broken")
                assert frames[-1].endswith(", in act")
                assert len(frames) <= 2, "the function that the engine knows, and this one"

    def test_the_hooks_hear_of_each_error_and_of_the_last(self) -> None:
        with self.harness() as (engine, folder):
            engine.start()
            task = engine.app.submit("again", [{"n": 1, "breaks": 1}, {"n": 2, "do": "refuse"}])
            (first, _), lone = ended(task), engine.send("again", {"n": 3, "do": "raise"})
            died = ended_alone(engine.app, lone)["job_id"]
            hooks = folder / "hooks"
            wait_for(lambda: '"death"' in hooks.read_text(), "the hooks are called")
            said = [tuple(json.loads(line)) for line in hooks.read_text().splitlines()]
            why = "ValueError: broken"
            assert [each for each in said if each[1] == first["job_id"]] == [("error", first["job_id"], 1, "retry", why)]
            assert [each[0] for each in said if each[1] == died] == ["error", "error", "error", "death"]
            assert [each[3] for each in said if each[1] == died] == ["retry", "retry", "dead", ""]
            assert {each[4] for each in said} == {why}

    def test_a_dead_job_that_a_person_restarts_runs_again(self) -> None:
        with self.harness() as (engine, folder):
            engine.start()
            task = engine.app.submit("act", [{"n": 1, "breaks": 1}])
            (event,) = ended(task)
            assert (event["status"], event["attempt"]) == ("error", 1)
            assert engine.app.operations.act("dead", "restart", [event["job_id"]]).done == 1
            (event,) = ended(task)
            assert (event["status"], event["attempt"], event["result"]) == ("finish", 2, {"n": 1})
            assert performed(folder) == [1, 1]
            exact(engine.app, task, finish=1)

    # -- lone jobs

    def test_a_lone_job_has_its_event_before_any_worker_runs(self) -> None:
        with self.harness() as (engine, folder):
            job_id = engine.send("act", {"n": 1})
            event: dict[str, Any] = {}
            with suppress(NotFound):
                event = engine.app.event(job_id)
            assert event, "it has no Event"
            assert (event["status"], event["params"], event["task_id"]) == ("enqueue", [{"n": 1}], None)
            engine.start()
            event = ended_alone(engine.app, job_id)
            assert (event["status"], event["result"], event["attempt"]) == ("finish", {"n": 1}, 1)
            assert [m["message"] for m in event["messages"]] == ["In progress", "item 1", "Done"]
            assert performed(folder) == [1]

    def test_a_lone_job_is_retried_as_its_engine_says(self) -> None:
        with self.harness() as (engine, folder):
            ways: Sequence[Mapping[str, Any]] = ({"breaks": 1}, {"do": "raise"}, {"do": "refuse"})
            sent = [engine.send("again", {"n": n, **how}) for n, how in enumerate(ways)]
            engine.start()
            events = [ended_alone(engine.app, job_id) for job_id in sent]
            assert [(event["status"], event["attempt"]) for event in events] == [("finish", 2), ("error", 3), ("failed", 1)]
            tries = ["working", "working", "error", "enqueue"]
            assert [[m["status"] for m in event["messages"]] for event in events] == [
                [*tries, "working", "working", "finish"],
                [*tries, *tries, "working", "working", "error"],
                ["working", "working", "failed"],
            ]
            assert sorted(performed(folder)) == [0, 0, 1, 1, 1, 2]

    def test_the_end_of_a_lone_job_is_that_of_its_function(self) -> None:
        with self.harness() as (engine, folder):
            ends: Sequence[tuple[dict[str, Any], str, str, Any]] = (
                ({"do": "exit", "code": 0}, "finish", "Done", None),
                ({"do": "exit", "code": 3}, "error", "Error: exit code 3", None),
                ({"do": "put_off", "as": "generator"}, "error", "work that nobody performs (generator)", None),
                ({"do": "fork", "child": "exit"}, "finish", "Done", {"child": 5}),
            )
            sent = [engine.send("again", {"n": n, **how}) for n, (how, *_) in enumerate(ends)]
            engine.start(1)
            for job_id, (_, status, text, result) in zip(sent, ends, strict=True):
                event = ended_alone(engine.app, job_id)
                assert (event["status"], event["result"], event["attempt"]) == (status, result, 1)
                assert text in event["messages"][-1]["message"]
            assert sorted(performed(folder)) == [0, 1, 2, 3], "none is retried"

    # -- ends

    def test_an_exit_ends_the_job_as_a_script_and_not_the_worker(self) -> None:
        with self.harness() as (engine, folder):
            engine.start(1)
            codes = (None, 0, 3, "no such sheet")
            task = engine.app.submit("again", [{"n": n, "do": "exit", "code": code} for n, code in enumerate(codes)])
            found = {event["params"]["n"]: event for event in ended(task)}
            assert {n: (e["status"], e["messages"][-1]["message"], e["problem"]) for n, e in found.items()} == {
                0: ("finish", "Done", None),
                1: ("finish", "Done", None),
                2: ("error", "Error: exit code 3", "exited"),
                3: ("error", "Error: exit code 1: no such sheet", "exited"),
            }
            assert sorted(performed(folder)) == [0, 1, 2, 3], "none is retried"
            exact(engine.app, task, finish=2, error=2)
            ended(engine.app.submit("act", [{"n": 4}]))
            assert performed(folder, "did") == [4], "the worker lives"

    def test_work_that_is_returned_and_not_performed_is_an_error(self) -> None:
        with self.harness() as (engine, folder):
            engine.start(1)
            kinds = ("generator", "map", "coroutines")
            task = engine.app.submit("again", [{"n": n, "do": "put_off", "as": kind} for n, kind in enumerate(kinds)])
            for event in ended(task):
                assert (event["status"], event["problem"], event["result"]) == ("error", "not_performed", None)
                assert "returned work that nobody performs" in event["messages"][-1]["message"]
            assert (sorted(performed(folder)), performed(folder, "did")) == ([0, 1, 2], [])
            exact(engine.app, task, error=3)

    def test_a_process_that_a_job_forks_ends_with_its_function(self) -> None:
        with self.harness() as (engine, folder):
            engine.start(1)
            ends = ("return", "exit", "raise")
            task = engine.app.submit("act", [{"n": n, "do": "fork", "child": how} for n, how in enumerate(ends)])
            found = {event["params"]["n"]: event for event in ended(task)}
            assert {n: (e["status"], e["result"], e["attempt"]) for n, e in found.items()} == {
                0: ("finish", {"child": 0}, 1),
                1: ("finish", {"child": 5}, 1),
                2: ("finish", {"child": 1}, 1),
            }
            assert sorted(performed(folder)) == [0, 1, 2]
            exact(engine.app, task, finish=3)

    # -- processes

    def test_a_worker_that_is_stopped_loses_nothing(self) -> None:
        with self.harness() as (engine, folder):
            engine.start(2)
            task = engine.app.submit("act", [{"n": n, "do": "wait"} for n in range(6)])
            wait_for(lambda: len(performed(folder)) == 2, "both threads have a job")
            (folder / "gate").touch()
            engine.stop()
            engine.start(2)
            ended(task)
            assert set(performed(folder, "did")) == set(range(6))
            exact(engine.app, task, finish=6)

    def test_jobs_of_a_killed_worker_run_again_and_count_once(self) -> None:
        with self.harness() as (engine, folder):
            engine.start(2)
            task = engine.app.submit("act", [{"n": n, "do": "wait"} for n in range(2)])
            wait_for(lambda: task.progress()["counts"]["working"] == 2, "both are known to have begun")
            engine.kill()
            wait_for(lambda: len(performed(folder)) > 2, "one of them begins again")
            (folder / "gate").touch()
            events = ended(task)
            assert {event["status"] for event in events} == {"finish"}
            assert "Worker lost" in [m["message"] for event in events for m in event["messages"]]
            exact(engine.app, task, finish=2)

    def test_a_list_is_exact_though_its_workers_are_killed_three_times(self) -> None:
        with self.harness() as (engine, folder):
            engine.start(2)
            count = self.killed_items
            patience_s = max(PATIENCE_S, float(count))
            task = engine.app.submit("act", [{"n": n} for n in range(count)])
            for part in (count // 12, count // 3, count * 2 // 3):
                wait_for(partial(is_past, task, part), f"more than {part} are done", patience_s, every=0.02)
                engine.kill()
            wait_for(partial(is_past, task, count - 1), "all are done", patience_s)
            ended(task)
            assert set(performed(folder, "did")) == set(range(count))
            exact(engine.app, task, finish=count)

    def test_a_job_that_is_delivered_twice_counts_once(self) -> None:
        with self.harness() as (engine, folder):
            engine.start(1)
            task = engine.app.submit("act", [{"n": n, "do": "wait"} for n in range(2)], parallel=1)
            wait_for(lambda: performed(folder), "one begins")
            first = min(task.events(), key=lambda event: event["id"])
            deliver_again(engine.app, first)
            (folder / "gate").touch()
            ended(task)
            exact(engine.app, task, finish=2)

    def test_a_job_that_is_over_is_not_performed_again(self) -> None:
        with self.harness() as (engine, folder):
            engine.start(1)
            task = engine.app.submit("act", [{"n": 1}])
            (event,) = ended(task)
            deliver_again(engine.app, event)
            ended(engine.app.submit("act", [{"n": 2}]))
            assert performed(folder) == [1, 2]
            exact(engine.app, task, finish=1)

    # -- control

    def test_a_list_without_a_worker_waits_and_can_be_cancelled(self) -> None:
        with self.harness() as (engine, folder):
            task = engine.app.submit("act", [{"n": n} for n in range(5)])
            engine.app.dispatcher.run_pass()
            assert task.progress()["control"]["in_flight"] == 0, "it waits in the ledger, and not in the engine"
            task.cancel()
            ended(task)
            engine.start()
            exact(engine.app, task, cancelled=5)
            assert performed(folder) == []

    def test_a_cancel_lets_those_that_began_end_and_begins_no_other(self) -> None:
        with self.harness() as (engine, folder):
            engine.start(2)
            task = engine.app.submit("act", [{"n": n, "do": "wait"} for n in range(20)])
            wait_for(lambda: len(performed(folder)) == 2, "both threads have a job")
            task.cancel()
            half_a_second_later()
            (folder / "gate").touch()
            ended(task)
            assert len(performed(folder)) == 2
            exact(engine.app, task, finish=2, cancelled=18)

    def test_a_paused_list_begins_nothing_until_it_is_resumed(self) -> None:
        with self.harness() as (engine, folder):
            engine.start(2)
            task = engine.app.submit("act", [{"n": n, "do": "wait"} for n in range(8)])
            wait_for(lambda: len(performed(folder)) == 2, "both threads have a job")
            task.pause()
            half_a_second_later()
            (folder / "gate").touch()
            wait_for(lambda: task.progress()["counts"]["finish"] == 2, "those that had begun end")
            wait_for(lambda: task.progress()["control"]["in_flight"] == 0, "the others are back in the ledger")
            assert len(performed(folder)) == 2
            task.resume()
            ended(task)
            exact(engine.app, task, finish=8)

    def test_no_more_jobs_run_at_once_than_parallel_says(self) -> None:
        with self.harness() as (engine, folder):
            engine.start(4)
            task = engine.app.submit("act", [{"n": n, "do": "wait"} for n in range(9)], parallel=2)
            wait_for(lambda: len(performed(folder)) == 2, "two begin")
            other = engine.app.submit("act", [{"n": n} for n in range(100, 110)])
            ended(other)
            assert [n for n in performed(folder) if n < 100] == performed(folder)[:2]
            (folder / "gate").touch()
            ended(task)
            exact(engine.app, task, finish=9)

    def test_no_more_jobs_start_in_an_interval_than_one_round_has(self) -> None:
        with self.harness() as (engine, _):
            engine.start(4)
            task = engine.app.submit("act", [{"n": n} for n in range(8)], parallel=2, interval=0.2)
            found = sorted(datetime.fromisoformat(event["started_at"]) for event in ended(task))
            gaps = [(later - first).total_seconds() for first, later in zip(found, found[2:], strict=False)]
            assert min(gaps) >= 0.199, gaps  # times are whole milliseconds
            exact(engine.app, task, finish=8)

    def test_a_list_of_which_too_many_items_fail_pauses_itself(self) -> None:
        with self.harness() as (engine, _):
            engine.start(2)
            task = engine.app.submit("act", [{"n": n, "do": "refuse"} for n in range(9)], parallel=1, tolerated_failures=2)
            wait_for(lambda: task.progress()["state_reason"] == "too_many_failures", "it pauses itself")
            wait_for(lambda: task.progress()["control"]["in_flight"] == 0, "nothing runs")
            assert 3 <= task.progress()["counts"]["failed"] <= 4, "one may have gone out before the pause"
            task.update(tolerated_failures=None)
            ended(task)
            exact(engine.app, task, failed=9)

    def test_the_smaller_priority_runs_first(self) -> None:
        with self.harness() as (engine, folder):
            late = engine.app.submit("act", [{"n": n} for n in range(5)], priority=300)
            soon = engine.app.submit("act", [{"n": n} for n in range(10, 15)], priority=100)
            engine.start(1)
            ended(late)
            ended(soon)
            assert performed(folder) == [*range(10, 15), *range(5)]

    def test_lists_of_one_session_run_one_after_the_other(self) -> None:
        with self.harness() as (engine, folder):
            engine.start(4)
            first = engine.app.submit("act", [{"n": n, "do": "wait"} for n in range(2)], session="user:1")
            second = engine.app.submit("act", [{"n": n} for n in range(10, 12)], session="user:1")
            wait_for(lambda: len(performed(folder)) == 2, "the first one runs")
            (folder / "gate").touch()
            ended(second)
            assert set(performed(folder)[:2]) == {0, 1}
            exact(engine.app, first, finish=2)
            exact(engine.app, second, finish=2)

    def test_items_of_one_key_run_one_after_the_other_over_two_lists(self) -> None:
        with self.harness() as (engine, folder):
            engine.start(4)
            first = engine.app.submit("act", [{"n": 0, "do": "wait", "of": "a"}, {"n": 1, "of": "b"}], key="of")
            wait_for(lambda: len(performed(folder)) == 2, "both keys run")
            second = engine.app.submit("act", [{"n": n, "of": "ab"[n % 2]} for n in range(10, 14)], key="of")
            wait_for(lambda: {11, 13} <= set(performed(folder)), "the key that is free goes on")
            assert not {10, 12} & set(performed(folder)), "the other waits"
            (folder / "gate").touch()
            ended(first)
            ended(second)
            order = performed(folder)
            assert [n for n in order if n % 2 == 0] == [0, 10, 12]
            assert [n for n in order if n % 2] == [1, 11, 13]
            exact(engine.app, second, finish=4)

    # -- places

    def test_a_running_job_that_is_stopped_keeps_its_place_and_goes_on_when_it_is_started(self) -> None:
        with self.harness() as (engine, folder):
            engine.start()
            task = engine.app.submit("act", [{"n": 1, "do": "walk", "steps": 5, "until": 3}])
            (event,) = task.events()
            job_id = event["job_id"]
            wait_for(lambda: engine.app.event(job_id)["checkpoint"] == 3, "its place is saved while it runs")
            assert engine.app.event(job_id)["progress"] == {"done": 3, "total": 5, "percent": 60.0}
            assert engine.app.stop_job(job_id)["changed"]
            wait_for(lambda: engine.app.event(job_id)["status"] == "stopped", "it let go")
            assert task.progress()["state_reason"] == "stopped_jobs"
            (folder / "gate").touch()
            assert engine.app.start_job(job_id)["changed"]
            ended(task)
            assert performed(folder, "step") == [0, 1, 2, 3, 4]
            exact(engine.app, task, finish=1)

    def test_a_job_whose_worker_is_killed_goes_on_from_its_place(self) -> None:
        with self.harness() as (engine, folder):
            engine.start()
            task = engine.app.submit("act", [{"n": 1, "do": "walk", "steps": 5, "until": 3}])
            (event,) = task.events()
            wait_for(lambda: engine.app.event(event["job_id"])["checkpoint"] == 3, "its place is saved while it runs")
            engine.kill()
            (folder / "gate").touch()
            ended(task)
            assert performed(folder, "step") == [0, 1, 2, 3, 4]
            exact(engine.app, task, finish=1)

    # -- callbacks

    def test_the_callbacks_of_an_outcome_are_called_once_and_counted_nowhere(self) -> None:
        with self.harness() as (engine, folder):
            engine.start()
            task = engine.app.submit(
                "act",
                [{"n": 1}, {"n": 2, "do": "refuse"}],
                on_complete={"worker": "again", "args": [{"n": 100, "breaks": 1}]},
                on_success={"worker": "act", "args": [{"n": 101}]},
                on_failure={"worker": "act", "args": [{"n": 102}]},
            )
            ended(task)
            assert sorted(performed(folder)) == [1, 2, 100, 100, 102]
            states = {each["name"]: each["status"] for each in task.progress()["callbacks"]}
            assert states == {"on_complete": "finish", "on_success": None, "on_failure": "finish"}
            event = engine.app.event(job_of(task, "on_complete"))
            assert (event["attempt"], event["task_id"], event["callback_of"]) == (2, None, task.id)
            assert (event["result"]["counts"]["finish"], event["result"]["counts"]["failed"]) == (1, 1)
            exact(engine.app, task, finish=1, failed=1)

    def test_a_job_and_a_callback_know_the_owner_and_the_context_of_their_list(self) -> None:
        with self.harness() as (engine, _):
            engine.start()
            context = {"seller": 7, "note": "é", "rates": [0.5]}
            items = [{"n": 1, "do": "know"}, {"n": 2, "do": "know", "breaks": 1}]
            last = {"worker": "act", "args": [{"n": 100, "do": "know"}]}
            task = engine.app.submit("again", items, owner="ann", title="Spring", context=context, on_complete=last)
            known = {"owner": "ann", "context": context, "task": [task.id, "Spring", "ann", "again"]}
            assert [each["result"] for each in ended(task)] == [{**known, "row": 1}, {**known, "row": 2}]
            assert engine.app.event(job_of(task, "on_complete"))["result"] == {**known, "row": None}
            lone = ended_alone(engine.app, engine.send("act", {"n": 3, "do": "know"}))
            assert lone["result"] == {"owner": "", "context": {}, "task": None, "row": None}
            exact(engine.app, task, finish=2)

    def test_a_callback_of_a_killed_worker_runs_again(self) -> None:
        with self.harness() as (engine, folder):
            engine.start()
            task = engine.app.submit("act", [{"n": 1}], on_success={"worker": "act", "args": [{"n": 100, "do": "wait"}]})
            wait_for(lambda: 100 in performed(folder), "the callback begins")
            wait_for(
                lambda: engine.app.event(job_of(task, "on_success"))["status"] == "working", "it is known to have begun"
            )
            assert (task.progress()["state"], task.progress()["done"]) == ("finalizing", False)
            engine.kill()
            wait_for(lambda: performed(folder).count(100) > 1, "it begins again")
            (folder / "gate").touch()
            ended(task)
            assert task.progress()["state_reason"] is None
            assert performed(folder, "did") == [1, 100]
            exact(engine.app, task, finish=1)

    # -- exports

    def test_an_export_has_every_cell_in_the_order_of_its_shards(self) -> None:
        with self.harness() as (engine, folder):
            if any(not each.capabilities.exports for each in engine.app.engines.values()):
                refused_export(engine.app)
                return
            engine.start()
            shards = [{"first": 0, "count": 700, "breaks": 1}, {"first": 700, "count": 0}, {"first": 700, "count": 300}]
            task = engine.app.submit_export("cells", shards, on_success={"worker": "act", "args": [{"n": 100}]})
            assert {event["attempt"] for event in ended(task)} == {1, 2}
            found = engine.app.result(task.id)
            with found.open() as body:
                rows = list(csv.reader(body.read().decode("utf-8-sig").splitlines()))
            assert rows == [list(COLUMNS), *([str(n), f"row {n}, é"] for n in range(1000))]
            assert (found.manifest["rows"], found.manifest["partial"]) == (1000, False)
            assert performed(folder, "did") == [100], "who is called back, once, finds the file"
            assert "asynctask.merge" not in engine.app.workers
            exact(engine.app, task, finish=3)


# -- facts


def refused_export(app: AsyncTask) -> None:
    """An export on an engine that has no such capability is refused with the reason."""
    reason = ""
    try:
        app.submit_export("act", [{}])
    except InputError as error:
        reason = str(error)
    assert "performs no merge" in reason


def job_of(task: TaskHandle, name: str) -> str:
    """The job id of a callback that was queued."""
    (job_id,) = (each["job_id"] for each in task.progress()["callbacks"] if each["name"] == name)
    return str(job_id)


def ended(task: TaskHandle) -> Sequence[dict[str, Any]]:
    """The Events of a Task once it is over, at most 1,000 of them."""
    wait_for(lambda: task.progress()["done"], f"Task {task.id} is over: {task.progress()['counts']}")
    return task.events(limit=1_000)


def ended_alone(app: AsyncTask, job_id: str) -> dict[str, Any]:
    """The Event of a lone job once it is over."""
    over = ("finish", "failed", "error", "cancelled")
    wait_for(lambda: app.event(job_id)["status"] in over, f"{job_id} is over: {app.event(job_id)['status']}")
    found: dict[str, Any] = app.event(job_id)
    return found


def deliver_again(app: AsyncTask, event: Mapping[str, Any]) -> None:
    """Puts a second copy of a job of a Task on its queue, with the attempt that its Event has."""
    job = build(event["worker_name"], [event["params"]], event["job_id"], event["queue"], 0, created_at=0)
    copy = Copy(event["job_id"], event["attempt"], event["queue"], dump(job), task_id=event["task_id"])
    Router(app.broker, app.engines, app.clock).push(engine_of(copy.queue), [copy])


def in_history(app: AsyncTask, worker: str) -> tuple[int, int]:
    """The errors and the retries of a worker in the last hour, if their run times are known, too."""
    total = app.history(worker=worker)["series"][0]["total"]
    return (0, 0) if total["p50_s"] is None else (total["error"], total["retried"])


def is_past(task: TaskHandle, count: int) -> bool:
    """Whether more than so many items are done."""
    return bool(task.progress()["progress"]["done"] > count)


def exact(app: AsyncTask, task: TaskHandle, **wanted: int) -> None:
    """The counts are these and no others, and equal what the rows say."""
    counts = task.progress()["counts"]
    assert {name: count for name, count in counts.items() if count and name != "total"} == wanted, counts
    assert app.doctor() == []
