"""Periodic tasks through their public door: one Task for each tick, whatever runs, dies or is switched off."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from support.drawn import examples
from support.world import World, numbers

from asynctask.cli.root import run as run_cli
from asynctask.clock import SECOND, rfc3339
from asynctask.errors import ConfigError, Conflict, NotFound
from asynctask.ledger.schedules import GONE_S, LATE_S, LOOK_S, SEEN_S
from asynctask.testing import wait_for
from webapi import create_app

HOUR = 3_600 * SECOND


pytestmark = pytest.mark.one_database(reason="which ticks have a Task is decided above the database")


def seconds_of(world: World, name: str = "seconds") -> list[int]:
    """The ticks of which there is a Task, in seconds, in order."""
    keys = world.sql("SELECT idempotency_key FROM tasks WHERE idempotency_key LIKE ?", f"schedule|{name}|2%")
    return sorted(int(datetime.fromisoformat(key.rpartition("|")[2]).timestamp()) for (key,) in keys)


def next_of(world: World, name: str) -> int:
    """The next tick of a schedule, in microseconds."""
    return int(world.one("SELECT next_at FROM schedules WHERE name = ?", name))


class Hourly:
    """An application that declares a schedule of each hour, and the time, which only this moves. ``made``: the ticks whose
    items were made."""

    def __init__(self, world: World, **options: Any) -> None:
        self.world, self.made = world, list[datetime]()
        self.app = world.app()
        self.app.every(3_600, "note", name="hourly", items=self.items, **options)
        self.now = self.app.ledger.now()
        self.app.schedules.register(self.now)
        self.first = next_of(world, "hourly")

    def items(self, tick: datetime) -> Iterable[dict[str, Any]]:
        self.made.append(tick)
        return numbers(1, len(self.made))

    def pass_to(self, hours: float, seconds: float = 0) -> None:
        """A look so long after the first tick."""
        self.app.schedules.tick(self.first + int(hours * HOUR) + int(seconds * SECOND))

    @property
    def hours(self) -> list[int]:
        """The ticks with a Task, counted from the first."""
        return [round((each - self.first / SECOND) / 3_600) for each in seconds_of(self.world, "hourly")]

    @property
    def shown(self) -> dict[str, Any]:
        return dict(self.app.schedules.find("hourly"))


# -- one Task for each tick


@pytest.mark.each_database(reason="each locks in its own way")
def test_several_processes_of_which_one_is_killed_make_one_task_of_each_tick(world: World) -> None:
    app = world.app()
    children = [world.cli("schedule_app", "worker", "-c", "2") for _ in range(3)]
    wait_for(lambda: len(app.processes()) == 3, f"they run: {world.said()}")
    wait_for(lambda: len(seconds_of(world)) >= 3, "it ticks")
    children[0].kill()
    known = len(seconds_of(world))
    wait_for(lambda: len(seconds_of(world)) >= known + 3, "it ticks on")
    found = seconds_of(world)
    assert found == list(range(found[0], found[0] + len(found)))
    wait_for(lambda: {task["state"] for task in app.tasks(limit=1_000)} == {"finished"}, "all are performed", every=0.01)
    (schedule,) = app.schedules.all()
    assert (schedule["skipped"], schedule["error"], schedule["declared"]) == (0, None, True)


@pytest.mark.each_database(reason="each commits and rolls back in its own way")
@pytest.mark.parametrize(
    "point",
    ["before:submitted:2", "after:submitted:2", *examples([], ["before:submitted:1", "before:moved:1", "after:moved:2"])],
)
def test_a_process_that_dies_between_submission_and_move_leaves_one_task_of_each_tick(world: World, point: str) -> None:
    app = world.app()
    child = world.cli("schedule_app", "worker", "-c", "1", CRASH_AT=point)
    assert child.wait(120) == -signal.SIGKILL, world.said()
    died = seconds_of(world)
    world.cli("schedule_app", "worker", "-c", "1")
    wait_for(lambda: len(seconds_of(world)) >= len(died) + 3, f"it ticks on: {world.said()}")
    found = seconds_of(world)
    assert found[: len(died)] == died
    assert found == list(range(found[0], found[0] + len(found))), "no tick is lost"
    assert app.schedules.find("seconds")["skipped"] == 0


@pytest.mark.each_database(reason="keys are unique in SQL")
def test_a_tick_that_two_processes_submit_with_different_items_has_one_task(world: World) -> None:
    one, other = Hourly(world), Hourly(world)
    one.made.append(datetime.now(UTC))  # so that it makes another list
    # Both look before either has submitted.
    make = one.app.schedules.declared["hourly"].items
    assert make is not None

    def while_the_other_submits(tick: datetime) -> Iterable[dict[str, Any]]:
        other.pass_to(0)
        return make(tick)

    declared = replace(one.app.schedules.declared["hourly"], items=while_the_other_submits)
    one.app.schedules.declared["hourly"] = declared
    one.pass_to(0)
    assert (one.hours, one.shown["skipped"], one.shown["error"]) == ([0], 0, None)
    (task,) = one.app.tasks()
    assert one.shown["last_task_id"] == task["task_id"]


# -- missed ticks


def test_missed_ticks_are_skipped_by_default_and_counted(world: World) -> None:
    hourly = Hourly(world, overlap=True)
    hourly.pass_to(0, LATE_S)
    assert hourly.hours == [0], "late by little is on time"
    hourly.pass_to(3, LATE_S + 1)
    assert hourly.hours == [0]
    assert (hourly.shown["skipped"], hourly.shown["skip_reason"]) == (3, "missed")
    assert hourly.shown["skipped_at"] == rfc3339(hourly.first + 3 * HOUR)
    hourly.pass_to(4)
    assert hourly.hours == [0, 4]


def test_a_tick_that_waits_for_the_items_of_another_one_is_not_missed(world: World) -> None:
    hourly = Hourly(world)
    hourly.app.schedules.tick(hourly.first + 600 * SECOND, since=hourly.first - SECOND)
    assert (hourly.hours, hourly.shown["skipped"]) == ([0], 0)


def test_missed_ticks_are_made_up_for_once(world: World) -> None:
    hourly = Hourly(world, missed="once", overlap=True)
    hourly.pass_to(3, 1_800)
    assert (hourly.hours, hourly.shown["skipped"]) == ([3], 3)
    assert hourly.shown["skipped_at"] == rfc3339(hourly.first + 2 * HOUR)
    hourly.pass_to(3, 1_900)
    hourly.pass_to(4)
    assert hourly.hours == [3, 4]


def test_all_missed_ticks_are_made_up_for_one_after_the_other(world: World) -> None:
    hourly = Hourly(world, missed="all")
    hourly.pass_to(3, 1_800)
    assert (hourly.hours, hourly.shown["skipped"]) == ([0, 1, 2, 3], 0)
    assert [round(each.timestamp() - hourly.made[0].timestamp()) for each in hourly.made] == [0, 3_600, 7_200, 10_800]
    sessions = {task["control"]["session"] for task in hourly.app.tasks()}
    assert sessions == {"schedule:hourly"}, "they do not overlap"


def test_ticks_while_it_is_switched_off_are_not_made_up_for(world: World) -> None:
    hourly = Hourly(world, missed="all")
    assert hourly.app.schedules.switch("hourly", False)
    assert not hourly.app.schedules.switch("hourly", False)
    hourly.pass_to(2)
    assert (hourly.hours, hourly.shown["next_at"], hourly.shown["enabled"]) == ([], None, False)
    assert hourly.app.schedules.switch("hourly", True)
    hourly.first = next_of(world, "hourly")
    hourly.pass_to(0)
    assert (hourly.hours, hourly.shown["skipped"]) == ([0], 0)


# -- overlap


def test_a_tick_is_skipped_while_the_task_before_is_open(world: World) -> None:
    hourly = Hourly(world)
    hourly.pass_to(0)
    hourly.pass_to(1)
    assert hourly.hours == [0]
    assert (hourly.shown["skipped"], hourly.shown["skip_reason"]) == (1, "overlap")
    assert hourly.shown["skipped_at"] == rfc3339(hourly.first + HOUR)
    with pytest.raises(Conflict, match="is open"):
        hourly.app.schedules.run("hourly")
    with world.working(hourly.app):
        hourly.app.task(hourly.shown["last_task_id"]).wait(60)
    hourly.pass_to(2)
    assert hourly.hours == [0, 2]


def test_a_tick_submits_while_the_task_before_is_open_if_they_may_overlap(world: World) -> None:
    hourly = Hourly(world, overlap=True)
    hourly.pass_to(0)
    hourly.pass_to(1)
    assert (hourly.hours, hourly.shown["skipped"]) == ([0, 1], 0)


def test_a_task_that_was_run_by_hand_counts_as_the_one_before(world: World) -> None:
    hourly = Hourly(world)
    handle = hourly.app.schedules.run("hourly", who="ann")
    assert hourly.shown["last_task_id"] == handle.id
    assert {each["who"] for each in handle.log() if each["action"] == "submitted"} == {"ann"}
    hourly.pass_to(0)
    assert (hourly.hours, hourly.shown["skip_reason"]) == ([], "overlap")


# -- what fails


def test_items_that_cannot_be_made_are_tried_again_and_the_error_is_shown(world: World) -> None:
    app, broken = world.app(), [True]

    def items(tick: datetime) -> list[dict[str, Any]]:
        if broken:
            raise LookupError("no products")
        return numbers(1)

    app.every(3_600, "note", name="broken", items=items)
    app.every(3_600, "note", name="well", items=lambda tick: numbers(1))
    now = app.ledger.now()
    app.schedules.register(now)
    due = next_of(world, "broken")
    assert app.schedules.tick(due + SECOND) == due + SECOND + int(LOOK_S) * SECOND
    assert "LookupError: no products" in str(app.schedules.find("broken")["error"])
    assert app.schedules.find("well")["last_task_id"] is not None, "the other one ticks"
    with pytest.raises(Conflict, match="no products"):
        app.schedules.run("broken")
    broken.clear()
    app.schedules.tick(due + 2 * SECOND)
    assert (app.schedules.find("broken")["error"], len(seconds_of(world, "broken"))) == (None, 1)


def test_a_list_that_is_refused_is_not_sent_again_and_again(world: World) -> None:
    app = world.app()
    app.every(3_600, "order", name="orders", items=lambda tick: [{"n": "none"}])
    app.every(3_600, "note", name="nothing", items=lambda tick: [])
    app.schedules.register(app.ledger.now())
    due = next_of(world, "orders")
    app.schedules.tick(due)
    app.schedules.tick(due + SECOND)
    found = app.schedules.find("orders")
    assert (found["skipped"], found["skip_reason"], found["last_task_id"]) == (1, "refused", None)
    assert "InputError" in str(found["error"])
    assert app.schedules.find("nothing")["skip_reason"] == "empty"


# -- declarations


@pytest.mark.each_database(reason="rows are changed by statements of their own")
def test_another_declaration_takes_effect_at_the_next_start(world: World) -> None:
    hourly = Hourly(world)
    other = world.app()
    other.every("0 2 * * *", "note", name="hourly", timezone="Asia/Shanghai", missed="once", items=lambda tick: numbers(1))
    other.schedules.register(hourly.now)
    found = other.schedules.find("hourly")
    assert (found["schedule"], found["timezone"], found["missed"]) == ("0 2 * * *", "Asia/Shanghai", "once")
    assert str(found["next_at"])[11:] == "18:00:00.000Z"
    hourly.pass_to(0)
    assert hourly.hours == [], "a process with the former one does not tick any more"
    hourly.pass_to(0, GONE_S + 1)
    assert hourly.shown["schedule"] == "3600", "unless it alone is left"


@pytest.mark.each_database(reason="rows are deleted by statements of their own")
def test_a_schedule_that_nobody_declares_is_shown_as_such_and_can_be_removed(world: World) -> None:
    hourly = Hourly(world)
    assert hourly.shown["declared"]
    with pytest.raises(Conflict, match="declares the schedule"):
        hourly.app.schedules.remove("hourly")
    world.sql("UPDATE schedules SET seen_at = seen_at - ?", int(GONE_S + 1) * SECOND)
    assert not hourly.shown["declared"]
    other = world.app()
    with pytest.raises(Conflict, match="does not declare"):
        other.schedules.run("hourly")
    other.schedules.remove("hourly")
    for call in (
        other.schedules.find,
        other.schedules.remove,
        other.schedules.run,
        lambda name: other.schedules.switch(name, True),
    ):
        with pytest.raises(NotFound):
            call("hourly")
    hourly.app.schedules.tick(hourly.now)
    assert hourly.shown["declared"], "who declares it makes it again"


def test_who_declares_a_schedule_says_so_from_time_to_time(world: World) -> None:
    hourly = Hourly(world)
    seen = "SELECT seen_at FROM schedules"
    hourly.app.schedules.tick(hourly.now + int(SEEN_S - 1) * SECOND)
    assert world.one(seen) == hourly.now
    hourly.app.schedules.tick(hourly.now + int(SEEN_S + 1) * SECOND)
    assert world.one(seen) == hourly.now + int(SEEN_S + 1) * SECOND


def test_each_order_of_decorators_and_a_worker_without_parameters(world: World) -> None:
    app = world.app()

    @app.every("@daily")
    @app.worker(retry=0)
    def above() -> None:
        world.shop.note("did", 1)

    @app.worker(retry=0)
    @app.every("@daily")
    def below() -> None:
        world.shop.note("did", 2)

    @app.every("@daily", title="Each day", priority=5)
    @app.worker(retry=0, name="own")
    async def tick(item: dict[str, Any]) -> None:
        world.shop.note("did", 3, item["tick"])

    @app.worker(retry=0)
    @app.every("@daily")
    class Classy:
        def perform(self) -> None:
            world.shop.note("did", 4)

    assert app.every("@daily", above, name="again") is app.workers["above"]
    assert list(app.schedules.declared) == ["above", "below", "own", "Classy", "again"]
    with world.working(app):
        for name in app.schedules.declared:
            app.schedules.run(name).wait(60)
        above()
        assert app.workers["below"].perform_async() is not None
        wait_for(lambda: world.shop.performed() == {1: 3, 2: 2, 3: 1, 4: 1}, "each is performed")
    (own,) = [task for task in app.tasks() if task["worker"] == "own"]
    assert (own["title"], own["control"]["priority"]) == ("Each day", 5)


def test_what_cannot_tick_is_refused_when_it_is_declared(world: World) -> None:
    app = world.app()
    refused: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((60, "note"), {"missed": "most"}, "missed is one of"),
        ((60, "note"), {"items": [1]}, "a function of the tick"),
        ((60, "note"), {"items": lambda: []}, "a function of the tick"),
        ((60, "note"), {"paralel": 3}, "parallel"),
        ((60, "note"), {"idempotency_key": "k"}, "leave out idempotency_key"),
        ((60, "note"), {"name": "a/b"}, "without |"),
        ((60, "plain"), {}, "not tracked"),
        ((60, app.worker(lambda a, b: None, name="two")), {}, "called with one item"),
        ((60, app.worker(lambda: None, name="none")), {"items": lambda tick: []}, "called with one item"),
        ((60, "note"), {"timezone": "Shanghai"}, "Asia/Shanghai"),
    ]
    for args, options, said in refused:
        with pytest.raises(ConfigError, match=said):
            app.every(*args, **options)
    app.every(60, "note")
    with pytest.raises(ConfigError, match="two schedules"):
        app.every(90, "note")

    @app.every(60)
    def nobody(item: Any) -> None: ...

    with pytest.raises(ConfigError, match="which is no worker"):
        app.launcher()
    app = world.app()
    app.every(60, "below")
    app.worker(lambda: None, name="below")
    assert list(app.schedules.declared) == ["below"]
    app.every(60, "nope")
    with pytest.raises(ConfigError, match="no worker is registered as 'nope'"):
        app.launcher()


# -- over HTTP and on the command line


def test_schedules_over_http(world: World) -> None:
    hourly = Hourly(world)
    client = create_app(hourly.app).test_client()
    (shown,) = json_of(client.get("/api/schedules"))["schedules"]
    assert shown == hourly.shown
    made = client.post("/api/schedules/hourly/run")
    assert (made.status_code, made.headers["Location"]) == (202, f"/api/tasks/{json_of(made)['task_id']}")
    assert client.post("/api/schedules/hourly/run").status_code == 409
    off = client.patch("/api/schedules/hourly", json={"enabled": False})
    assert (off.status_code, json_of(off)["enabled"], json_of(off)["next_at"]) == (200, False, None)
    assert json_of(client.patch("/api/schedules/hourly", json={"enabled": True}))["next_at"] is not None
    assert client.patch("/api/schedules/hourly", json={"enabled": "maybe"}).status_code == 422
    for call in (client.post("/api/schedules/x/run"), client.patch("/api/schedules/x", json={"enabled": True})):
        assert (call.status_code, json_of(call)["code"]) == (404, "not_found")
    key = {"Idempotency-Key": f"schedule|hourly|{hourly.shown['next_at']}"}
    taken = client.post("/api/tasks", json={"worker": "note", "items": numbers(1)}, headers=key)
    assert (taken.status_code, json_of(taken)["code"]) == (400, "invalid_key"), "nobody takes a tick away"


def json_of(response: Any) -> dict[str, Any]:
    found: dict[str, Any] = response.json
    return found


def test_schedules_on_the_command_line(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hourly = Hourly(world, overlap=True)
    monkeypatch.setenv("ASYNCTASK_DATABASE_URL", world.store.url)

    def said(*words: str, code: int = 0) -> str:
        assert run_cli(["schedules", *words]) == code
        captured = capsys.readouterr()
        return captured.out + captured.err

    assert "hourly" in said()
    assert "3600 s" in said("list")
    assert "switched off" in said("off", "hourly")
    assert "off already" in said("off", "hourly")
    assert not hourly.shown["enabled"]
    assert "off" in said("list")
    assert "switched on" in said("on", "hourly")
    assert "declared in an application" in said("run", "hourly", code=2)
    assert "declares the schedule" in said("remove", "hourly", code=2)
    assert "no schedule" in said("on", "minutely", code=2)
    world.sql("UPDATE schedules SET seen_at = 1")
    assert "not declared" in said("list")
    assert "removed" in said("remove", "hourly")
    assert "No schedule" in said("list")
