"""An application attached to a Dramatiq broker, and the actors that the tests need."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import AsyncIO, CurrentMessage, TimeLimit
from pydantic import BaseModel, Field
from support.charges import Charge, charge
from support.engine_suite import act
from support.world import Shop, settings

from asynctask import AsyncTask, NormalException, current_job
from asynctask.integrations.dramatiq import attach
from asynctask.testing import wait_for


class Product(BaseModel):
    """A row of a list of products."""

    sku: str
    quantity: int = Field(default=1, ge=1)


class SoldOutError(Exception):
    """A refusal of code that knows nothing of asynctask."""


def redis_broker(url: str, namespace: str) -> RedisBroker:
    """A broker that finds a dead worker's messages within two seconds, and looks for them at every command."""
    return RedisBroker(
        url=url,
        namespace=namespace,
        heartbeat_timeout=2_000,
        maintenance_chance=1_000_000,
        middleware=[TimeLimit(interval=50), *(m for m in RedisBroker(url=url).middleware if not isinstance(m, TimeLimit))],
    )


def build(broker: dramatiq.Broker, folder: Path, actors: Sequence[str] | None = None, **more: Any) -> AsyncTask:
    """The application, attached to ``broker``, with its actors declared there."""
    app = AsyncTask(**settings(folder, **more))
    broker.add_middleware(AsyncIO())
    broker.add_middleware(CurrentMessage())
    attach(broker, app, actors=actors)
    declare(broker, folder)
    return app


def declare(broker: dramatiq.Broker, folder: Path) -> None:
    shop = Shop(folder)

    @dramatiq.actor(broker=broker, max_retries=0)
    def enroll(sku: str, quantity: int = 1) -> dict[str, Any]:
        shop.note("did", sku, current_job().attempt)
        current_job().message(f"{quantity} of {sku} in stock")
        return {"enrolled": sku}

    @dramatiq.actor(broker=broker, max_retries=5, min_backoff=10, failed_on=(SoldOutError,))
    def refuse(kind: str) -> None:
        shop.note("did", kind)
        raise NormalException("seller is not qualified") if kind == "normal" else SoldOutError("sold out")

    @dramatiq.actor(broker=broker, max_retries=2, min_backoff=10, max_backoff=20)
    def shaky(breaks: int) -> str:
        shop.note("did", current_job().attempt)
        if current_job().attempt <= breaks:
            raise ValueError(f"not yet, at {current_job().attempt}")
        return "through"

    @dramatiq.actor(broker=broker, max_retries=2, min_backoff=10, max_backoff=20, actor_name="act")
    def act_lone(item: dict[str, Any]) -> Any:
        return act(folder, item)

    @dramatiq.actor(broker=broker, max_retries=0, time_limit=200)
    def slow() -> None:
        wait_for(lambda: False, "never", 60, every=0.01)

    # The pause is longer than the second in which a worker thread that was told to end may still take a message.
    @dramatiq.actor(broker=broker, max_retries=1, min_backoff=4_000, notify_shutdown=True)
    def gated(number: int) -> int:
        shop.note("began", number, current_job().attempt)
        wait_for((folder / "gate").exists, "the gate opens", 120, every=0.01)
        shop.note("did", number, current_job().attempt)
        return number

    @dramatiq.actor(broker=broker, max_retries=0)
    def deadly(number: int) -> None:
        """Ends its process at once, unless the number is 0."""
        shop.note("began", number)
        if number:
            os._exit(9)

    @dramatiq.actor(broker=broker, max_retries=0)
    async def later(number: int) -> int:
        current_job().message("from the event loop")
        return number

    @dramatiq.actor(broker=broker, max_retries=0, use_task_event=False)
    def unseen(number: int) -> None:
        shop.note("unseen", number)

    @dramatiq.actor(broker=broker, max_retries=0)
    def heard(*words: Any) -> None:
        shop.note("heard", *words)

    @dramatiq.actor(broker=broker)
    def unsent(value: str) -> None:
        own = CurrentMessage.get_current_message()
        assert own is not None
        with suppress(TypeError):  # the broker cannot encode it
            broker.enqueue(own.copy(args=({value},)))

    @dramatiq.actor(broker=broker)
    def recharged(item: Charge, page: int = 0) -> Any:
        own = CurrentMessage.get_current_message()
        assert own is not None
        if page < 2:
            broker.enqueue(own.copy(args=(item, page + 1)))
        return charge(Charge(**item) if isinstance(item, dict) else item)

    @dramatiq.actor(broker=broker, actor_name="charge")
    def charged(item: Charge) -> dict[str, Any]:
        return charge(item)

    @dramatiq.actor(broker=broker, max_retries=0)
    def enroll_item(item: Product) -> dict[str, Any]:
        shop.note("did", item.sku, current_job().attempt)
        if item.sku.startswith("bad"):
            raise NormalException("seller is not qualified")
        return {"enrolled": item.sku}

    @dramatiq.actor(broker=broker, max_retries=2, min_backoff=10, max_backoff=20)
    def polled(item: dict[str, Any]) -> int:
        """Puts its own message back, or sends one with other arguments under its id, until it was tried three times."""
        shop.note("polled", item["n"])
        tries = len([line for line in shop.lines() if line[0] == "polled"])
        if tries >= 3:
            if item.get("fails") and tries < 5:
                raise ValueError("at the end")
            return int(item["n"])
        own = CurrentMessage.get_current_message()
        assert own is not None
        if item["how"] == "changed":
            changed = ({**item, "n": item["n"] + 1},)
            broker.enqueue(polled.message_with_options(args=changed).copy(message_id=own.message_id), delay=10)
        else:
            broker.enqueue(own, delay=10 if item["how"] == "later" else None)
        return -1
