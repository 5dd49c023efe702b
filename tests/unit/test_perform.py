"""asynctask.testing.perform: one job alone, with the outcome that a worker process would record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from asynctask import AsyncTask, NormalException, current_job
from asynctask.errors import ConfigError, InputError, JobExit
from asynctask.job import CurrentJob
from asynctask.testing import ItemResult, perform
from asynctask.worker import Worker


class Product(BaseModel):
    sku: str
    price: float = 0.0


@pytest.fixture
def app(tmp_path: Path) -> AsyncTask:
    """Its database cannot be reached: no test here may need it."""
    return AsyncTask(environ={}, database_url="postgresql://localhost:1/nothing", data_dir=str(tmp_path / "data"))


@pytest.fixture
def enroll(app: AsyncTask) -> Worker[..., Any]:
    @app.worker(retry=2, retry_in=lambda n, error, job: 60 * (n + 1), timeout=0.000001)
    def enroll(item: Product) -> dict[str, Any]:
        job = current_job()
        job.message(f"for {job.owner or 'nobody'}")
        if item.sku == "refused":
            raise NormalException("the seller is not qualified")
        if item.sku == "bug":
            job.checkpoint({"at": 7})
            raise ZeroDivisionError("a bug")
        return {"price": item.price, "row": job.row, "context": job.context, "state": job.state, "attempt": job.attempt}

    return enroll


def test_what_the_job_returns_and_what_it_knows(enroll: Worker[..., Any]) -> None:
    """Its timeout of a microsecond is off. The item is converted as one of a list."""
    done = perform(
        enroll, {"sku": "A-1", "price": "9.50"}, owner="ann", context={"seller": 3}, state={"at": 2}, row=5, attempt=2
    )
    assert (done.status, done.error, done.retry_in, done.items) == ("finish", None, None, ())
    assert done.result == {"price": 9.5, "row": 5, "context": {"seller": 3}, "state": {"at": 2}, "attempt": 2}
    assert done.messages == ("In progress", "for ann", "Done")
    assert done.checkpoint == {"at": 2}
    assert perform(enroll, Product(sku="A-1")).status == "finish"


def test_a_refusal_is_failed_and_its_exception_is_kept(enroll: Worker[..., Any]) -> None:
    done = perform(enroll, {"sku": "refused"})
    assert (done.status, done.result, done.retry_in) == ("failed", None, None)
    assert isinstance(done.error, NormalException)
    assert done.messages[-1] == "Failed: the seller is not qualified"


def test_an_error_is_retried_until_no_retry_is_left(enroll: Worker[..., Any]) -> None:
    found = [perform(enroll, {"sku": "bug"}, attempt=attempt) for attempt in (1, 2, 3)]
    assert [(each.status, each.retry_in) for each in found] == [("retry", 60.0), ("retry", 120.0), ("error", None)]
    assert all(isinstance(each.error, ZeroDivisionError) and each.checkpoint == {"at": 7} for each in found)
    assert found[0].messages[-2:] == ("Error: ZeroDivisionError: a bug", "Waiting for retry")


def test_an_item_that_a_list_would_not_accept_is_rejected(enroll: Worker[..., Any]) -> None:
    done = perform(enroll, {"sku": "A-1", "price": "cheap"})
    assert isinstance(done.error, InputError)
    assert (done.status, [(each.column, each.code) for each in done.error.errors]) == (
        "rejected",
        [("price", "wrong_type")],
    )


def test_a_job_that_stops_between_two_steps_continues_from_its_checkpoint(app: AsyncTask) -> None:
    @app.worker
    def long(item: dict[str, Any]) -> None:
        current_job().checkpoint(3)
        current_job().stop()

    done = perform(long, {})
    assert (done.status, done.checkpoint) == ("interrupted", 3)


def test_an_iterable_continues_behind_its_cursor(app: AsyncTask) -> None:
    seen: list[int] = []

    @app.worker
    class Import(app.Iterable):  # type: ignore[name-defined,misc]
        def items(self, cursor: Any, item: dict[str, Any]) -> Any:
            return ((n, n) for n in range((cursor or 0) + 1, item["last"] + 1))

        def each(self, n: int) -> None:
            seen.append(n)

    done = perform(app.workers["Import"], {"last": 4}, state={"cursor": 2, "items": 2})
    assert (seen, done.result, done.checkpoint) == ([3, 4], {"items": 4}, {"cursor": 4, "items": 4})


def test_each_item_of_a_batch_has_an_outcome(app: AsyncTask) -> None:
    @app.worker(batch=True)
    def enroll_all(items: list[dict[str, Any]]) -> list[Any]:
        current_job().fail(1, "not qualified", code="seller")
        current_job().error(2, "the shop is away")
        return [item["n"] for item in items]

    done = perform(enroll_all, [{"n": n} for n in range(4)])
    assert done.status == "retry"
    assert done.items == (
        ItemResult("finish", 0),
        ItemResult("failed", None, "not qualified", "seller"),
        ItemResult("retry", None, "the shop is away", "raised"),
        ItemResult("finish", 3),
    )
    assert done.result == [0, None, None, 3]
    wrongs: list[Any] = [{"n": 1}, []]
    for wrong in wrongs:
        with pytest.raises(InputError, match="give a list of items, not "):
            perform(enroll_all, wrong)


def test_a_batch_that_raises_keeps_the_exception(app: AsyncTask) -> None:
    @app.worker(batch=True, retry=0)
    def enroll_all(items: list[Any]) -> None:
        raise ZeroDivisionError("a bug")

    done = perform(enroll_all, [1, 2])
    assert (done.status, [each.status for each in done.items]) == ("error", ["error", "error"])
    assert isinstance(done.error, ZeroDivisionError)


def test_the_middleware_and_the_hooks_of_the_application_run(app: AsyncTask) -> None:
    said: list[Any] = []

    def around(worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        said.append((worker.name, queue, job.args))
        return call_next()

    app.server_middleware.add(around)

    @app.on("error")
    def note(error: BaseException, context: dict[str, Any]) -> None:
        said.append(type(error))

    @app.worker(queue="low", retry=0, retries_exhausted=lambda job, error: said.append("exhausted"))
    def broken(item: dict[str, Any]) -> None:
        raise ZeroDivisionError

    assert perform(broken, {"n": 1}).status == "error"
    assert said == [("broken", "low", ({"n": 1},)), ZeroDivisionError, "exhausted"]
    assert len(app.server_middleware) == 1


def test_coroutines_exits_and_untracked_jobs(app: AsyncTask) -> None:
    @app.worker
    async def slow(item: dict[str, Any]) -> str:
        return current_job().job_id

    @app.worker(retry=0)
    def leaves(item: dict[str, Any]) -> None:
        raise SystemExit(3)

    @app.worker(use_task_event=False, retry=1)
    def untracked(n: int) -> int:
        return 10 // n

    assert len(perform(slow, {}).result) == 24
    assert isinstance(perform(leaves, {}).error, JobExit)
    assert (perform(untracked, 5).result, perform(untracked, 0).status) == (2, "retry")
    assert perform(untracked, 0, attempt=2).status == "error"


def test_the_person_who_runs_the_tests_may_end_them(app: AsyncTask) -> None:
    @app.worker
    def slow(item: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perform(slow, {})


def test_an_error_that_a_middleware_caught_is_none(app: AsyncTask) -> None:
    def second_try(worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        try:
            return call_next()
        except ZeroDivisionError:
            return call_next()

    app.server_middleware.add(second_try)
    tries: list[int] = []

    @app.worker
    def flaky(item: dict[str, Any]) -> int:
        tries.append(1)
        return 6 // (len(tries) - 1)

    done = perform(flaky, {})
    assert (done.status, done.result, done.error) == ("finish", 6, None)


def test_an_export_is_called_for_its_rows(app: AsyncTask) -> None:
    @app.export(columns=["sku"])
    def rows(shard: dict[str, Any]) -> Any:
        yield ["A-1"]

    assert list(rows({})) == [["A-1"]]
    with pytest.raises(ConfigError, match="is an export: call it with a shard"):
        perform(rows, {})


def test_what_is_no_worker_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"what @app\.worker returns"):
        perform(print, {})  # type: ignore[arg-type]
