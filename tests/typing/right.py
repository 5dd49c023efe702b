"""What an application may write: type checkers find nothing wrong in it."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

from pydantic import BaseModel

from asynctask import AsyncTask, CurrentJob, NormalException, current_job
from asynctask.errors import Problem
from asynctask.job import CurrentJob as Job
from asynctask.lists.dry_run import DryRun
from asynctask.task import TaskHandle
from asynctask.testing import JobResult, drain, perform

app = AsyncTask(environ={}, database_url="sqlite:///typed.db")


class Product(BaseModel):
    sku: str
    quantity: int = 1


class Special(Product):
    discount: float = 0.1


@app.worker
def bare(item: Product) -> dict[str, str]:
    if not item.sku:
        raise NormalException("no sku")
    return {"sku": item.sku}


@app.worker()
def called(item: dict[str, Any]) -> None: ...


def seconds(count: int, error: BaseException, job: CurrentJob) -> float:
    return 2.0**count


@app.worker(queue="slow", retry=3, timeout=5.0, failed_on=(KeyError,), retry_in=seconds)
async def waits(item: Product) -> int:
    return item.quantity


@app.worker(use_task_event=False, tags=["mail"], retry_for=3600)
def mail(to: str, subject: str = "Hello", *, urgent: bool = False) -> bool:
    return urgent


class Import:
    def perform(self, item: Product) -> str:
        return item.sku


class Plain:
    def perform(self, number: int, /) -> float:
        return number / 2


# As a decorator of a class it does the same; mypy then goes on taking the name for the class.
importer = app.worker(name="import")(Import)
plain = app.worker(Plain)


@app.on("startup")
def begin() -> None: ...


product = Product(sku="A")
row: dict[str, object] = {"sku": "A"}

assert_type(bare(product), dict[str, str])
assert_type(called({"a": 1}), None)
assert_type(mail("you", urgent=True), bool)
assert_type(importer(product), str)
assert_type(plain(3), float)


async def awaited() -> None:
    pending: Awaitable[int] = waits(product)
    assert_type(await pending, int)


assert_type(bare.perform_async(product), str | None)
assert_type(bare.delay(product), str | None)
assert_type(bare.perform_async(item=product), str | None)
assert_type(mail.perform_in(60, "you"), str | None)
assert_type(mail.perform_in(timedelta(minutes=1), "you", "Good morning"), str | None)
assert_type(mail.perform_at(datetime.now(UTC), "you", subject="Good night"), str | None)
assert_type(waits.perform_async(product), str | None)
assert_type(importer.perform_async(product), str | None)
assert_type(plain.perform_async(3), str | None)
assert_type(bare.set(queue="low", retry=5).perform_async(product), str | None)
assert_type(bare.perform_bulk([product, product]), list[str | None])
assert_type(bare.set(wait=60)(product), dict[str, str])


def products() -> Iterator[Product]:
    yield product


assert_type(app.submit(bare, [product]), TaskHandle)
assert_type(app.submit(bare, products(), title="Spring", parallel=20), TaskHandle)
assert_type(app.submit(bare, [Special(sku="B")]), TaskHandle)
assert_type(app.submit(bare, [row]), TaskHandle)
assert_type(app.submit(bare, [{"sku": "A"}, {"sku": "B", "quantity": 2}]), TaskHandle)
assert_type(app.submit(bare, [{"sku": "A"}, product]), TaskHandle)
assert_type(app.submit(bare, [product], dry_run=True), DryRun)
assert_type(app.submit(bare.set(queue="low"), [product]), TaskHandle)
assert_type(app.submit(called, [{"sku": "A"}]), TaskHandle)
assert_type(app.submit(called, ({"n": n} for n in range(3))), TaskHandle)
assert_type(app.submit(waits, products()), TaskHandle)
assert_type(app.submit(importer, [product]), TaskHandle)
assert_type(app.submit(plain, range(3)), TaskHandle)
assert_type(app.submit("bare", [1, "two"]), TaskHandle)
assert_type(app.submit("bare", [1], dry_run=True), DryRun)
assert_type(app.check(bare, [product]), DryRun)
assert_type(bare.submit([product], title="Spring", chunk_size="auto"), TaskHandle)
assert_type(bare.submit([row], on_complete=called), TaskHandle)
assert_type(called.submit(({"n": n} for n in range(3)), parallel=2), TaskHandle)
assert_type(bare.set(queue="low").submit([product]), TaskHandle)
assert_type(app.submit_items("bare", [row], wait_s=2.0), TaskHandle)
assert_type(app.submit_jobs([(bare, product), ("called", {})], session="s"), TaskHandle)
task = app.submit(bare, [product])
assert_type(task.created, bool)
assert_type(task.problems, tuple[Problem, ...])
assert_type(task.state, str)
assert_type(task.counts["finish"], int)

assert_type(perform(called, {"sku": "A"}, owner="ann"), JobResult)
assert_type(perform(importer, product).messages, tuple[str, ...])
assert_type(drain(app, limit=100), dict[str, int])


def audit(worker: Any, job: Job, queue: str, call_next: Any) -> Any:
    assert_type(job.args, tuple[Any, ...])
    assert_type(current_job().args, tuple[Any, ...])
    assert_type(current_job().context, dict[str, Any])
    return call_next()


app.server_middleware.add(audit)
