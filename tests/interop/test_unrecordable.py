"""Jobs of other programs for tracked workers of which no Event can be made as they are: each ends where it is seen."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from support.databases import Store
from support.redis_world import RedisWorld

from asynctask import AsyncTask
from asynctask.arrivals import MAX_OPTIONS, MAX_PARAMS
from asynctask.errors import InputError, NotFound
from asynctask.testing import wait_for

# what is pushed, on top of a sound job -> what its Event says
IN_AN_EVENT: dict[str, tuple[dict[str, Any], str]] = {
    "an integer beyond 64 bits": ({"args": [2**70]}, "Integer exceeds 64-bit range): [1180591620717411303424]"),
    "one deep inside": ({"args": [{"a": [{"b": -(2**70)}]}]}, "Integer exceeds 64-bit range"),
    "a class too long": ({"class": "x" * 300, "use_task_event": True}, "its worker has 300 characters"),
    "a class with NUL": ({"class": "x\0", "use_task_event": True}, "its worker holds a character"),
    "a queue too long": ({"queue": "q" * 300}, "its queue has 300 characters"),
    "arguments of megabytes": ({"args": ["x" * MAX_PARAMS]}, f"have {MAX_PARAMS + 4:,} bytes"),
    "members of megabytes": ({"args": [5], "note": "x" * MAX_OPTIONS}, "the members beside its arguments have 1,000,"),
}
# ... and of which not even that can be made: among the dead
AMONG_THE_DEAD: dict[str, dict[str, Any]] = {
    "a jid with NUL": {"jid": "a\0b" + "c" * 20},
    "a jid with NUL in an envelope": {"jid": "a", "asynctask": {"jid": "a\0b", "attempt": 1}},
}
SOUND = {"class": "work", "queue": "default", "retry": 3}


@pytest.fixture
def app(world: RedisWorld, store: Store) -> AsyncTask:
    made = world.app(database_url=store.url)
    made.ensure_schema()
    return made


def ended_in_error(app: AsyncTask, jid: str) -> bool:
    return bool(status(app, jid) == "error")


def status(app: AsyncTask, jid: str) -> Any:
    try:
        return app.event(jid)["status"]
    except NotFound:
        return None


def test_each_ends_where_it_is_seen_and_none_costs_its_neighbours(world: RedisWorld, app: AsyncTask) -> None:
    ran: list[Any] = []
    app.worker(name="work")(lambda n: ran.append(n))
    jids, queues = {}, {"default"}
    for n, (what, (members, _)) in enumerate(IN_AN_EVENT.items()):
        jids[what] = f"e{n:023x}"
        job = {**SOUND, "args": [n], "jid": jids[what], **members}
        queues.add(job["queue"])
        world.push_text(json.dumps(job), job["queue"])
        world.push("work", f"beside {n}")
    for members in AMONG_THE_DEAD.values():
        world.push_text(json.dumps({**SOUND, "args": [0], **members}))
        world.push("work", "beside it")
    sound = ["0", *(f"beside {n}" for n in range(len(IN_AN_EVENT))), *["beside it"] * len(AMONG_THE_DEAD)]
    with world.working(app, *queues):
        for what, jid in jids.items():
            wait_for(partial(ended_in_error, app, jid), f"{what} ends in error")
        wait_for(lambda: len(world.members("dead")) == 1, "what can have no Event is among the dead")
        wait_for(lambda: world.fetched() == 0, "nothing is left in the process's list")
        wait_for(lambda: len(ran) == len(sound), "every job that is sound has run")
    for what, jid in jids.items():
        event = app.event(jid)
        assert IN_AN_EVENT[what][1] in event["messages"][-1]["message"], what
        assert event["problem"] == "discarded"
    (dead,) = map(json.loads, world.members("dead"))
    assert dead["jid"] == AMONG_THE_DEAD["a jid with NUL"]["jid"]
    assert (dead["error_class"], "jid" in dead["error_message"]) == ("NotRecordable", True)
    assert [each["error_class"] for each in app.operations.listed("dead")["entries"] if not each["tracked"]] == [
        "NotRecordable"
    ]
    assert sorted(map(str, ran)) == sorted(sound)


@pytest.mark.databases("mariadb")
def test_a_lot_of_large_ones_are_recorded_in_statements_that_each_database_takes(world: RedisWorld, app: AsyncTask) -> None:
    ran: list[int] = []
    app.worker(name="work")(lambda text: ran.append(len(text)))
    for n in range(24):
        world.push("work", '"' * 999_000 + str(n))
    with world.working(app):
        wait_for(lambda: len(ran) == 24, "all ran")
        wait_for(lambda: world.fetched() == 0, "and are recorded")
    assert app.operations.listed("dead")["total"] == 0


@pytest.mark.databases("sqlite")
def test_one_whose_arguments_were_not_kept_is_not_run_without_them(world: RedisWorld, app: AsyncTask) -> None:
    app.worker(name="work")(lambda n=0: None)
    world.push_text(json.dumps({**SOUND, "args": [2**70], "jid": "a" * 24}))
    with world.working(app):
        wait_for(lambda: status(app, "a" * 24) == "error", "it ends in error")
    result = app.operations.act("dead", "restart", ["a" * 24])
    assert (result.done, "arguments were not kept" in str(result.skipped["a" * 24])) == (0, True)
    assert app.operations.act_on_all("dead", "restart").done == 0
    assert status(app, "a" * 24) == "error"


@pytest.mark.databases("sqlite")
def test_a_copy_with_an_attempt_that_the_ledger_does_not_know_is_dropped_unrun(world: RedisWorld, app: AsyncTask) -> None:
    """Of another ledger on the same Redis, or of a ledger that was restored. It ran as a lone job."""
    ran: list[int] = []
    app.worker(name="work")(lambda n: ran.append(n))
    envelope = {"jid": "b" * 24, "attempt": 3}
    world.push_text(json.dumps({**SOUND, "args": [1], "jid": "b" * 24, "asynctask": envelope}, separators=(",", ":")))
    world.push_text(json.dumps({**SOUND, "args": [2], "jid": "c" * 24}))
    with world.working(app):
        wait_for(lambda: ran == [2], "the job behind it runs")
        wait_for(lambda: world.fetched() == 0, "both are acknowledged")
    with pytest.raises(NotFound):
        app.event("b" * 24)


@pytest.mark.one_database(reason="it is refused before a database is asked")
@pytest.mark.parametrize("job_id", ["a\0b", "a\ud800", "x" * 65, ""])
def test_a_text_that_is_no_job_id_is_refused(app: AsyncTask, job_id: str) -> None:
    with pytest.raises(InputError, match="a job id has 1 to 64 characters"):
        app.record(job_id, "working", message="...")
