"""An application attached to Huey, and the tasks that the tests need; run as a module that Huey's consumer loads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huey import PriorityRedisHuey, RedisHuey, SqliteHuey
from huey.exceptions import CancelExecution, RetryTask
from pydantic import BaseModel
from support.world import DATABASE, MARK, Shop, settings

from asynctask import AsyncTask, NormalException, current_job
from asynctask.integrations.huey import attach
from asynctask.testing import wait_for

REDIS, NAME, KIND = "TEST_REDIS", "TEST_NAME", "TEST_KIND"


class Product(BaseModel):
    """A row of a list of products."""

    sku: str


class SoldOutError(Exception):
    """A refusal of code that knows nothing of asynctask."""


def make(folder: Path, environ: Mapping[str, str]) -> Any:
    """Huey with its queue in that Redis, or in a file of the folder; its application and its tasks."""
    made: Any
    if environ[KIND] == "sqlite":
        made = SqliteHuey(environ[NAME], filename=str(folder / "huey.db"))
    else:
        made = {"redis": RedisHuey, "priority": PriorityRedisHuey}[environ[KIND]](environ[NAME], url=environ[REDIS])
    app, shop = AsyncTask(**settings(folder, database_url=environ[DATABASE])), Shop(folder)
    attach(made, app)

    @made.pre_execute()
    def unlucky(task: Any) -> None:
        if task.args == (13,):
            raise CancelExecution

    @made.task()
    def double(n: int) -> int:
        return 2 * n

    @made.task(rate="10/s", limit="shop-api")
    def call(item: Any) -> None:
        pass

    @made.task(context=True)
    def own_id(n: int, task: Any) -> str:
        assert task.id == current_job().job_id
        return str(task.id)

    @made.task()
    def pair(sku: str, count: int = 1) -> str:
        return f"{sku}{count}"

    @made.task()
    def note(value: Any = None) -> None:
        shop.note("note", value)

    @made.task(use_task_event=False)
    def untracked(n: int) -> None:
        shop.note("untracked", n)

    @made.task(failed_on=(SoldOutError,), retries=3)
    def refuse(kind: str) -> None:
        raise NormalException("seller is not qualified") if kind == "normal" else SoldOutError("sold out")

    @made.task(retries=2)
    def shaky(breaks: int) -> int:
        if current_job().attempt <= breaks:
            raise ValueError("not yet")
        return breaks

    @made.task()
    def asking(delay_s: float) -> str:
        if current_job().attempt == 1:
            raise RetryTask(delay=delay_s)
        return "through"

    @made.task()
    def deadly(n: int) -> int:
        shop.note("began", n)
        wait_for((folder / "gate").exists, "the gate opens", 120, every=0.01)
        return n

    @made.task(timeout=1)
    def endless() -> None:
        wait_for(lambda: False, "never", 60, every=0.01)

    @made.task(failed_on=(SoldOutError,))
    def enroll(item: Product) -> dict[str, Any]:
        """Enrols a product."""
        if item.sku == "bad":
            raise SoldOutError("sold out")
        return {"enrolled": item.sku}

    @made.task(context=True)
    def passing(item: dict[str, Any], task: Any) -> str:
        return str(double(2, **{name: value for name, value in task.kwargs.items() if name != "task"}).id)

    return SimpleNamespace(
        huey=made, app=app, double=double, own_id=own_id, pair=pair, note=note, untracked=untracked, refuse=refuse,
        shaky=shaky, asking=asking, deadly=deadly, endless=endless, enroll=enroll, passing=passing,
    )  # fmt: skip


if NAME in os.environ:  # in a consumer
    huey = make(Path(os.environ[MARK]), os.environ).huey
