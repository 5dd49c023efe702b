"""Untracked jobs of workers that no process has: they wait in Redis or in the ledger, and hold up nothing."""

from __future__ import annotations

import json
import secrets

import pytest
from support.untracked import push
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.brokers.base import Copy
from asynctask.ledger import processes
from asynctask.testing import wait_for


def push_theirs(app: AsyncTask, count: int, name: str = "Theirs", queue: str = "default") -> list[str]:
    """Pushes untracked jobs of a worker that no application here has; returns their ids."""
    jids = [secrets.token_hex(12) for _ in range(count)]
    push(
        app,
        [
            Copy(jid, 0, queue, json.dumps({"class": name, "args": [n], "jid": jid, "queue": queue, "retry": True}))
            for n, jid in enumerate(jids)
        ],
    )
    return jids


def left(app: AsyncTask) -> int:
    """How many jobs of the queue ``default`` are left to others."""
    return sum(each["jobs_of_others"] for each in app.operations.queues() if each["name"] == "default")


@pytest.mark.parametrize("broker_kind", ["sql", "redis"])
def test_lists_and_jobs_go_on_beside_jobs_of_workers_that_nobody_has(world: World) -> None:
    """Before, six of them were more than the threads could use soon: the dispatcher left every list in the ledger."""
    app = world.app()
    theirs = set(push_theirs(app, 40))
    with world.working(app, concurrency=2):
        wait_for(lambda: left(app) == 40, "they are left to others")
        task, lone = app.submit("note", numbers(3)), str(app.workers["note"].perform_async({"n": 7, "kind": "plain"}))
        wait_for(lambda: task.progress()["done"] and app.event(lone)["status"] == "finish", "ours are done")
        theirs |= set(push_theirs(app, 10))
        wait_for(lambda: left(app) == 50, "those that came later are left, too")
        (queue,) = (each for each in app.operations.queues() if each["name"] == "default")
        facts = {name: queue[name] for name in ("length", "waiting", "workers_wanted", "other_workers")}
        assert facts == {"length": 50, "waiting": 0, "workers_wanted": 0, "other_workers": ["Theirs"]}
    assert {each["job_id"] for each in app.operations.jobs("default")["jobs"]} == theirs


@pytest.mark.parametrize("broker_kind", ["sql", "redis"])
def test_a_process_that_has_the_worker_takes_what_others_left(world: World) -> None:
    """Of another release, say: beside the process that left them, and with jobs that it leaves itself."""
    old, new = world.app(), world.app()
    ran: list[int] = []
    new.worker(name="Theirs", use_task_event=False)(ran.append)
    push_theirs(old, 7, "Nobodys")
    with world.working(old, concurrency=2):
        push_theirs(old, 5)
        wait_for(lambda: left(old) == 12, "the old one has left them")
        with world.working(new, concurrency=2):
            wait_for(lambda: sorted(ran) == list(range(5)), "the new one has them")
            push_theirs(old, 3)
            wait_for(lambda: len(ran) == 8, "also those that come later, whichever process meets them first")
        assert left(old) == 7


@pytest.mark.parametrize("broker_kind", ["sql", "redis"])
def test_a_list_that_does_not_begin_beside_them_says_so(world: World) -> None:
    app = world.app()
    here = {"concurrency": 1, "queues": ["default"], "info": {"workers": ["note"]}}
    processes.register(app.ledger, app.host, kind="worker", pid=1, lease_s=600, **here)  # type: ignore[arg-type]
    push_theirs(app, 6)
    if app.broker is not None:
        app.broker.defer("p", app.broker.exchange("p", [], ["default"], 9), ())
        app.broker.exchange("p", [], ["default"], 9)
    task = app.submit("note", numbers(1))
    (reason,) = app.operations.wait_reasons(task.id)
    assert reason.code == "jobs_of_others"
    assert reason.message == "In the queue default wait jobs that its processes do not perform: 6, for Theirs (6)"
    app.operations.clear_queue("default")
    assert app.operations.wait_reasons(task.id) == []
