"""Untracked jobs, put where an application keeps them: in Redis, or without it in rows of the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import sqlalchemy as sa

from asynctask import AsyncTask
from asynctask.brokers.base import DEAD, SCHEDULE, Broker, Copy, SetEntry
from asynctask.clock import rfc3339
from asynctask.database.tables import events
from asynctask.ledger.standalone import Arrival, enqueue
from asynctask.sidekiq.copies import untracked_options


def broker_of(app: AsyncTask) -> Broker:
    """The broker of an application with Redis."""
    assert app.broker is not None
    return app.broker


def push(app: AsyncTask, copies: Sequence[Copy]) -> None:
    """Untracked jobs that wait in their queues from now on."""
    if app.broker is not None:
        app.broker.push(copies)
    else:
        enqueue(app.ledger, [_arrival(copy) for copy in copies], due_at=app.ledger.now())


def hold(app: AsyncTask, set_name: str, held: Sequence[SetEntry]) -> None:
    """Untracked jobs that wait for a time, or are dead, as their payloads say."""
    if app.broker is not None:
        app.broker.hold(set_name, held)
        return
    for each in held:
        job = orjson.loads(each.copy.payload)
        enqueue(app.ledger, [_arrival(each.copy)], due_at=each.at)
        values: dict[str, Any] = {"retries": 0 if set_name == SCHEDULE else job.get("retry_count", 0) + 1}
        if (why := job.get("error_message")) is not None:
            said = {"at": rfc3339(each.at), "status": "error", "message": why, "attempt": 1}
            values["added_messages"] = orjson.dumps([said]).decode()
        if set_name == DEAD:
            values |= {"status": "error", "due_at": None, "finished_at": each.at}
            values["problem"] = job.get("error_class", "raised")
        with app.ledger.database.write() as connection:
            connection.execute(sa.update(events).where(events.c.job_id == each.copy.jid).values(values))


def dead(app: AsyncTask) -> list[str]:
    """The ids of the dead untracked jobs, by the time of their deaths."""
    if app.broker is not None:
        return [held.copy.jid for held in app.broker.members(DEAD, 1_000)]
    its = (events.c["items"] == 0) & (events.c.status == "error")
    with app.ledger.database.read() as connection:
        found = sa.select(events.c.job_id).where(its).order_by(events.c.finished_at, events.c.id)
        return [str(jid) for jid in connection.execute(found).scalars()]


def _arrival(copy: Copy) -> Arrival:
    job = orjson.loads(copy.payload)
    members = {name: value for name, value in job.items() if name not in ("class", "args", "jid", "queue", "created_at")}
    options = untracked_options(
        {name: value for name, value in members.items() if not name.startswith("error_")}, copy.priority
    )
    return Arrival(copy.jid, 1, job["class"], copy.queue, job["args"], options, is_tracked=False)
