"""An application attached to Celery, and the tasks that the tests need."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import kombu
from celery import Celery, Task, group
from celery.exceptions import Ignore, Reject
from pydantic import BaseModel, Field
from support.charges import Charge, charge
from support.engine_suite import act
from support.world import Shop, settings

from asynctask import AsyncTask, NormalException, current_job
from asynctask.errors import IdInUse
from asynctask.integrations.celery import attach
from asynctask.testing import wait_for


class Product(BaseModel):
    """A row of a list of products."""

    sku: str
    quantity: int = Field(default=1, ge=1)


class SoldOutError(Exception):
    """A refusal of code that knows nothing of asynctask."""


def build(broker_url: str, prefix: str, folder: Path, **more: Any) -> tuple[Celery, AsyncTask]:
    """Celery on ``broker_url`` with queues of its own there, and the application attached to it."""
    celery = Celery("shop", broker=broker_url, backend=os.environ.get("TEST_BACKEND"), set_as_current=False)
    celery.conf.update(
        task_default_queue=f"{prefix}-default",
        broker_transport_options={"global_keyprefix": f"{prefix}:", "visibility_timeout": 5},
        worker_prefetch_multiplier=1,
        broker_connection_retry_on_startup=True,
        worker_hijack_root_logger=False,
        task_ignore_result=True,
        **({"result_backend": broker_url} if broker_url.startswith("redis") else {}),
        result_backend_transport_options={"global_keyprefix": f"{prefix}:"},
    )
    if "TEST_TOPICS" in os.environ:
        of_kombu: Any = kombu
        topics, queue = of_kombu.Exchange(f"{prefix}-topics", type="topic"), of_kombu.Queue
        celery.conf.update(
            task_default_exchange=topics.name,
            task_default_exchange_type="topic",
            task_queues=[
                queue(f"{prefix}-default", topics, routing_key="default"),
                queue(f"{prefix}-orders", topics, routing_key="orders.*"),
            ],
        )
    app = AsyncTask(**settings(folder, **more))
    attach(celery, app, late_ack="TEST_EARLY_ACK" not in os.environ)
    declare(celery, folder)
    return celery, app


def declare(celery: Any, folder: Path) -> None:
    shop = Shop(folder)
    task: Any = partial(celery.task, shared=False)  # not one of every other application, too

    @task(name="enroll")
    def enroll(item: Product) -> dict[str, Any]:
        """Enrols a product."""
        shop.note("did", item.sku, current_job().attempt)
        current_job().message(f"{item.quantity} in stock")
        if item.sku.startswith("bad"):
            raise NormalException("seller is not qualified")
        return {"enrolled": item.sku}

    @task(name="charge")
    def charged(item: Charge) -> dict[str, Any]:
        return charge(item)

    @task(name="lone")
    def lone(sku: str, quantity: int = 1) -> dict[str, Any]:
        shop.note("did", sku, current_job().attempt)
        current_job().message(f"{quantity} of {sku} in stock")
        return {"enrolled": sku}

    @task(name="refuse", autoretry_for=(Exception,), retry_backoff=False, failed_on=(SoldOutError,))
    def refuse(kind: str) -> None:
        shop.note("did", kind)
        raise NormalException("seller is not qualified") if kind == "normal" else SoldOutError("sold out")

    @task(name="shaky", bind=True, max_retries=2, default_retry_delay=0)
    def shaky(self: Any, breaks: int) -> str:
        shop.note("did", current_job().attempt, self.request.retries)
        if current_job().attempt <= breaks:
            raise self.retry(exc=ValueError(f"not yet, at {current_job().attempt}"))
        return "through"

    @task(name="silent", bind=True, max_retries=1, default_retry_delay=0)
    def silent(self: Any, number: int) -> str:
        if not self.request.retries:
            self.retry(throw=False)
        return "through"

    @task(name="parent", bind=True)
    def parent(self: Any, child: str) -> None:
        """Passes the headers of its own message on, as for a trace."""
        own = {name: value for name, value in vars(self.request).items() if name.startswith("asynctask")}
        celery.send_task("lone", (child,), task_id=child, headers=own)

    @task(name="auto", autoretry_for=(ValueError,), max_retries=2, default_retry_delay=0)
    def auto(breaks: int) -> str:
        if current_job().attempt <= breaks:
            raise ValueError(f"not yet, at {current_job().attempt}")
        return "through"

    @task(name="act", autoretry_for=(Exception,), max_retries=2, default_retry_delay=0, retry_backoff=False)
    def act_lone(item: dict[str, Any]) -> Any:
        return act(folder, item)

    @task(name="later")
    async def later(number: int) -> None:
        shop.note("did", number)

    @task(name="patient", autoretry_for=(ValueError,), default_retry_delay=3_600)
    def patient(number: int) -> None:
        raise ValueError("not for an hour")

    @task(name="gated")
    def gated(number: int) -> int:
        shop.note("began", number, os.getpid())
        wait_for((folder / "gate").exists, "the gate opens", 120, every=0.01)
        shop.note("did", number)
        return number

    @task(name="endless", time_limit=1, soft_time_limit=None)
    def endless() -> None:
        wait_for(lambda: False, "never", 60, every=0.01)

    @task(name="soft", soft_time_limit=1, time_limit=30)
    def soft() -> None:
        wait_for(lambda: False, "never", 60, every=0.01)

    @task(name="deadly")
    def deadly(number: int) -> None:
        """Ends its process at once."""
        shop.note("began", number)
        os._exit(9)

    class Hooked(Task):  # type: ignore[misc]
        """A base class with hooks of its own: the item names the one that fails."""

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            if not self.request.is_eager:
                shop.note("before_start", args[0]["at"], current_job().job_id == task_id)
            fail_at("before_start", args[0])

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            fail_at("before", args[0])
            result = super().__call__(*args, **kwargs)
            fail_at("after", args[0])
            return result

        def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
            shop.note("on_success", args[0]["at"])
            fail_at("on_success", args[0])

        def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
            shop.note("on_failure", args[0]["at"])

    def fail_at(place: str, item: dict[str, Any]) -> None:
        if item["at"] == place:
            raise ValueError(f"at {place}")
        if item["at"] == f"{place}_refused":
            raise SoldOutError(f"sold out at {place}")

    @task(name="hooked", base=Hooked, failed_on=(SoldOutError,))
    def hooked(item: dict[str, Any]) -> str:
        shop.note("did", item["at"])
        fail_at("run", item)
        return "through"

    @task(name="opaque", ignore_result=False)
    def opaque(item: dict[str, Any]) -> Any:
        """Its result cannot be encoded."""
        shop.note("did", "opaque")
        return object()

    @task(name="limited", rate_limit="1/h")
    def limited(item: Any) -> None: ...

    @task(name="pair")
    def pair(item: Any, seller: str) -> None:
        """Is not called with one item."""

    @task(name="named")
    def named(item: Any, *, seller: str) -> None:
        """The same."""

    @task(name="unseen", use_task_event=False)
    def unseen(number: int) -> None:
        shop.note("unseen", number)

    @task(name="noted")
    def noted(value: Any = None) -> Any:
        shop.note("noted", value)
        return value

    declare_again(task, shop)


def declare_again(task: Any, shop: Shop) -> None:
    """Tasks that ask for another run of their own job. Each takes an item."""

    def tries(name: str) -> int:
        """Notes one, and returns how many there were."""
        shop.note(name)
        return shop.lines().count([name])

    @task(name="replaced", bind=True)
    def replaced(self: Any, item: dict[str, Any]) -> None:
        shop.note("replaced")
        noted, quiet, breaks = (self.app.tasks[name] for name in ("noted", "quiet", "breaks"))
        steps = {
            "task": noted.s(7),
            "untracked": quiet.s(7),
            "chain": noted.s(7) | noted.s(),
            "untracked chain": noted.s(7) | quiet.s(),
            "group": group(noted.s(7), noted.s(8)),
            "broken chain": breaks.s(7) | noted.s(),
            "late broken chain": self.app.tasks["breaks_late"].s(7) | noted.s(),
            "broken": breaks.s(7),
        }
        raise self.replace(steps[item["by"]])

    @task(name="quiet", use_task_event=False)
    def quiet(number: int) -> int:
        shop.note("noted", number)
        return number

    @task(name="breaks_late", use_task_event=False)
    def breaks_late(number: int) -> None:
        wait_for((shop.folder / "gate").exists, "the gate opens", 120, every=0.01)
        raise ValueError("no")

    @task(name="breaks", use_task_event=False)
    def breaks(number: int) -> None:
        raise ValueError("no")

    @task(name="paged", bind=True, max_retries=5)
    def paged(self: Any, item: dict[str, Any], page: int = 0) -> list[int]:
        shop.note("page", item["n"], page)
        if item["n"] < 2:
            raise self.retry(args=[{**item, "n": item["n"] + 1}], kwargs={"page": page + 10}, countdown=0)
        return [item["n"], page]

    @task(name="recharged", bind=True, max_retries=5)
    def recharged(self: Any, item: Charge, page: int = 0) -> Any:
        if page < 2:
            raise self.retry(args=[item, page + 1], countdown=0)
        return charge(Charge(**item) if isinstance(item, dict) else item)

    @task(name="moved", bind=True, max_retries=2)
    def moved(self: Any, item: dict[str, Any]) -> str:
        if not self.request.retries:
            raise self.retry(queue=item["to"], countdown=0)
        return str(self.request.delivery_info["routing_key"])

    @task(name="put_back")
    def put_back(item: dict[str, Any]) -> str:
        if tries("put_back") < 3:
            raise Reject("not yet", requeue=True)
        return "done"

    @task(name="ignored", bind=True)
    def ignored(self: Any, item: dict[str, Any]) -> None:
        if state := item.get("state"):
            self.update_state(state=state, meta={"exc_type": "ValueError", "exc_message": ["no"], "exc_module": "builtins"})
        raise Ignore

    @task(name="resent", bind=True)
    def resent(self: Any, item: dict[str, Any]) -> int:
        if item["n"] < 3:
            shop.note("resent", item["n"])
            self.apply_async(({**item, "n": item["n"] + 1},), task_id=self.request.id, countdown=0.1)
            return -1
        return int(item["n"])

    @task(name="hot", bind=True)
    def hot(self: Any, item: dict[str, Any]) -> int:
        """Sends itself again without a delay."""
        if (count := tries("hot")) < 13:
            self.apply_async((item,), task_id=self.request.id)
        return count

    @task(name="borrower", bind=True)
    def borrower(self: Any, item: dict[str, Any]) -> str:
        """Sends a job under the id of another one."""
        try:
            self.app.tasks["noted"].apply_async(("taken",), task_id=item["id"])
        except IdInUse as error:
            return str(error)
        return "sent"
