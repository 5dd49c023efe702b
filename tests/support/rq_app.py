"""An application attached to RQ, and the functions that the tests need.

RQ imports a function by its path, so they stand in the module, as those of its users do; the environment says whose they
are. :func:`load` makes the module anew, for each test.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import rq
from pydantic import BaseModel, Field
from redis import Redis
from rq import Retry
from rq.decorators import job
from rq.job import get_current_job
from support.charges import Charge, charge
from support.engine_suite import act
from support.world import DATABASE, MARK, Shop, settings

from asynctask import AsyncTask, NormalException, current_job
from asynctask.integrations.rq import attach
from asynctask.testing import wait_for

REDIS = "TEST_REDIS"
NAMESPACE = "TEST_NAMESPACE"


def load(patch: pytest.MonkeyPatch, redis_url: str, namespace: str, folder: Path, database_url: str) -> ModuleType:
    """This module for a test: with its queues in that Redis, its ledger and its folder."""
    for name, value in ((REDIS, redis_url), (NAMESPACE, namespace), (MARK, str(folder)), (DATABASE, database_url)):
        patch.setenv(name, value)
    spec = importlib.util.spec_from_file_location("support.rq_app", __file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, "support.rq_app", module)
    spec.loader.exec_module(module)
    return module


class Product(BaseModel):
    """A row of a list of products."""

    sku: str
    quantity: int = Field(default=1, ge=1)


class SoldOutError(Exception):
    """A refusal of code that knows nothing of asynctask."""


if NAMESPACE in os.environ:
    folder = Path(os.environ[MARK])
    shop = Shop(folder)
    queue = f"{os.environ[NAMESPACE]}-default"
    redis = Redis.from_url(os.environ[REDIS])
    app = AsyncTask(**settings(folder))
    engine = attach(redis, app, serializer="json")

    @engine.job(queue)
    def enroll(item: Product) -> dict[str, Any]:
        """Enrols a product."""
        shop.note("did", item.sku, current_job().attempt)
        current_job().message(f"{item.quantity} in stock")
        if item.sku.startswith("bad"):
            raise NormalException("seller is not qualified")
        return {"enrolled": item.sku}

    @engine.job(queue)
    def recharged(item: Charge, page: int = 0) -> Any:
        own = get_current_job()
        assert own is not None
        if page < 2:
            engine.queue(queue).enqueue_call(recharged, args=(item, page + 1), job_id=own.id)
        return charge(Charge(**item) if isinstance(item, dict) else item)

    @engine.job(queue, name="charge")
    def charged(item: Charge) -> dict[str, Any]:
        return charge(item)

    @engine.job(queue)
    def lone(sku: str, quantity: int = 1) -> dict[str, Any]:
        shop.note("did", sku, current_job().attempt)
        current_job().message(f"{quantity} of {sku} in stock")
        return {"enrolled": sku}

    @engine.job(queue, failed_on=(SoldOutError,), retry=Retry(max=3))
    def refuse(kind: str) -> None:
        shop.note("did", kind)
        raise NormalException("seller is not qualified") if kind == "normal" else SoldOutError("sold out")

    @engine.job(queue, retry=Retry(max=2))
    def shaky(breaks: int) -> str:
        shop.note("did", current_job().attempt)
        if current_job().attempt <= breaks:
            raise ValueError(f"not yet, at {current_job().attempt}")
        return "through"

    @engine.job(queue, name="act", retry=Retry(max=2))
    def act_lone(item: dict[str, Any]) -> Any:
        return act(folder, item)

    @engine.job(queue, retry=Retry(max=1, interval=3_600))
    def patient() -> None:
        raise ValueError("try me in an hour")

    def told_success(rq_job: Any, connection: Any, result: Any) -> None:
        shop.note("success", result)

    def told_failure(rq_job: Any, connection: Any, kind: Any, error: Any, trace: Any) -> None:
        shop.note("failure", error)

    @engine.job(queue, on_success=rq.Callback(told_success), on_failure=rq.Callback(told_failure))
    def telling(number: int) -> int:
        if number < 0:
            raise ValueError("negative")
        return number

    @engine.job(queue)
    def opaque(number: int) -> Any:
        """Its result is no JSON; RQ stores that it cannot store it."""
        return {(1, 2): 3}

    def unable(rq_job: Any, connection: Any, result: Any) -> None:
        raise ValueError("in on_success")

    @engine.job(queue, on_success=rq.Callback(unable))
    def praised(number: int) -> int:
        return number

    @engine.job(queue)
    def pair(item: Any, seller: str) -> None:
        """Is not called with one item."""

    @engine.job(queue)
    def asking(breaks: int) -> Any:
        """Asks for another try by what it returns."""
        return Retry(max=2) if current_job().attempt <= breaks else "through"

    @engine.job(queue, retry=Retry(max=1))
    def gated(number: int) -> int:
        shop.note("began", number, os.getpid())
        wait_for((folder / "gate").exists, "the gate opens", 120, every=0.01)
        shop.note("did", number)
        return number

    @engine.job(queue)
    def stopping() -> bool:
        shop.note("began", os.getpid())
        wait_for(current_job().should_stop, "its worker stops", 60, every=0.01)
        return True

    @engine.job(queue)
    def deadly(deaths: int) -> int:
        """Ends its process at once, as often as it is told."""
        shop.note("began", deaths)
        if len([line for line in shop.lines() if line == ["began", str(deaths)]]) <= deaths:
            os._exit(9)
        return deaths

    @engine.job(queue, timeout=1)
    def endless() -> None:
        wait_for(lambda: False, "never", 60, every=0.01)

    @job(rq.Queue(queue, connection=redis, serializer="json"), connection=redis)
    def unseen(number: int) -> None:
        shop.note("unseen", number)

    @engine.job(queue)
    def noted(value: Any = None) -> Any:
        shop.note("noted", value)
        return value

    @engine.job(queue)
    def survived() -> None:
        """Its process is killed, while one that it has forked lives on until the gate opens."""
        if os.fork() == 0:
            try:
                wait_for((folder / "gate").exists, "the gate opens", every=0.01)
            finally:
                os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    @engine.job(queue)
    def frozen() -> int:
        """How many objects the garbage collector leaves alone here."""
        return gc.get_freeze_count()

    @engine.job(queue)
    def connected() -> bool:
        """Whether the version of redis-py was looked up before there was a work-horse."""
        current = get_current_job()
        assert current is not None
        pool: Any = current.connection.connection_pool
        return "driver_info" in pool.connection_kwargs

    @engine.job(queue)
    async def later(value: str) -> str:
        current_job().message("not yet")
        return value

    @engine.job(queue, retry=Retry(max=1))
    def polled(item: dict[str, Any]) -> int:
        """Sends itself again under its id, until it was tried three times."""
        shop.note("polled", item["n"])
        if (tries := len([line for line in shop.lines() if line[0] == "polled"])) >= 3:
            if item.get("fails") and tries == 3:
                raise ValueError("at the end")
            return int(item["n"])
        own = get_current_job()
        assert own is not None
        to: Any = engine.queue(queue)
        if "plain" in item["how"]:
            to = rq.Queue(queue, connection=redis, serializer="json")
        if "same" in item["how"]:
            to.enqueue_job(own)
        elif "soon" in item["how"]:
            to.enqueue_in(timedelta(milliseconds=10), polled, {**item, "n": item["n"] + 1}, job_id=own.id)
        else:
            to.enqueue_call(polled, args=({**item, "n": item["n"] + 1},), job_id=own.id, retry=Retry(max=1))
        return -1
