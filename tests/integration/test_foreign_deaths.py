"""A tracked job that another program pushed, and that kills its process before anything of it is written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.untracked import broker_of
from support.world import World

from asynctask.brokers.base import DEAD, Copy
from asynctask.core.transitions import POISON_DEATHS
from asynctask.testing import wait_for

pytestmark = [
    pytest.mark.one_database("what recovery does with a copy is the same on each database"),
    pytest.mark.parametrize("broker_kind", ["redis"]),
]
JID = "f" * 24


def test_it_runs_again_under_its_event_until_that_is_poison(world: World) -> None:
    app = world.app()
    broker = broker_of(app)
    job: dict[str, Any] = {
        "class": "deadly",
        "args": [{"n": 1, "deaths": 99}],
        "jid": JID,
        "queue": "default",
        "retry": True,
    }
    broker.push([Copy(JID, 0, "default", json.dumps(job))])
    world.cli("kill_app", "worker", "-c", "1", "-p", "2")

    def over() -> bool:
        return world.sql("SELECT status FROM events WHERE job_id = ?", JID) == [("error",)]

    wait_for(over, f"its Event ends; the workers said: {world.said()[-2000:]}")
    event = app.event(JID)
    assert world.shop.performed("began")[1] == 1 + POISON_DEATHS, (
        "of the first run nothing was written: it is watched since"
    )
    assert event["params"] == job["args"]
    assert event["messages"][-1]["message"] == "Worker lost 3 times; given up"
    assert event["problem"] == "poison"
    wait_for(lambda: not any(map(broker.held_by, broker.holders())), "no process holds it any more")
    assert broker.queues() == {}
    assert broker.members(DEAD, 10) == []
    assert len(world.sql("SELECT id FROM events")) == 1


def test_another_tasks_job_of_that_id_and_a_job_with_an_older_copy_are_left_to_their_own_copies(world: World) -> None:
    """A copy without a fence speaks for the Event that was made of it, and for no other."""
    app = world.app()
    broker = broker_of(app)
    task = app.submit("note", [{"n": 1}])
    ((jid,),) = world.sql("SELECT job_id FROM events")
    text = json.dumps({"class": "plain", "args": [{"n": 2}], "jid": jid, "queue": "apart"})
    broker.push([Copy(jid, 0, "apart", text)])
    assert broker.exchange("gone:1:x", [], ["apart"], 1)
    app.start_services()
    wait_for(lambda: broker.queues().get("apart"), "the copy went back to its queue")
    assert world.sql("SELECT attempt, status FROM events") == [(1, "enqueue")]
    assert task.progress()["counts"]["enqueue"] == 1
