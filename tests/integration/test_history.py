"""The history: its sums are those of the Events, under several processes and after a kill; steps, samples and the purge."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.borrowing import borrow
from support.world import World, mixed, numbers

from asynctask import AsyncTask
from asynctask.clock import SECOND, from_datetime
from asynctask.core.transitions import POISON_DEATHS
from asynctask.errors import InputError, LedgerUnavailable
from asynctask.figures import MOST_ROWS, OTHERS, Minutes
from asynctask.ledger import history, processes
from asynctask.ledger.history import BOUNDS_S, MINUTE, History, HistorySeries
from asynctask.testing import drain, wait_for

ENDS = ("finish", "failed", "error", "retried")
NOON = datetime(2026, 1, 5, 12, tzinfo=UTC)


def sums(found: History) -> dict[Any, tuple[int, ...]]:
    """The counts of each series over its span."""
    totals = {each["name"]: each["total"] for each in found["series"]}
    return {name: (total["finish"], total["failed"], total["error"], total["retried"]) for name, total in totals.items()}


def only(found: History) -> HistorySeries:
    (series,) = found["series"]
    return series


def recorded(world: World) -> tuple[int, ...]:
    """The items of all Events by outcome, and the retries."""
    found = world.sql("SELECT SUM(n_finish), SUM(n_failed), SUM(n_error), SUM(retries) FROM events")
    return tuple(int(each) for each in found[0])


def insert(world: World, at: datetime, queue: str, worker: str, **columns: int) -> None:
    values = {"at": from_datetime(at), "queue": queue, "worker_name": worker, **columns}
    marks = ", ".join("?" * len(values))
    world.sql(f"INSERT INTO history ({', '.join(values)}) VALUES ({marks})", *values.values())


# -- the sums


def test_the_sums_of_several_processes_are_those_of_the_events_even_after_a_kill(world: World) -> None:
    app = world.app()
    workers = [world.cli("kill_app", "worker", "-c", "4") for _ in range(2)]
    lists = [
        app.submit("note", mixed(210)),
        app.submit("note", mixed(50), chunk_size=10),
        app.submit("shaky", numbers(20), on_complete="told"),
        app.submit("shaky", numbers(3, breaks=9)),
    ]
    for task in lists:
        task.wait(120)
    app.workers["plain"].perform_async({"n": 1})
    wait_for(lambda: world.shop.performed("plain").total() == 1, "an untracked job has run")
    wait_for(lambda: not world.one("SELECT COUNT(*) FROM events WHERE worker_name = 'plain'"), "its row is deleted")
    wait_for(lambda: sums(app.history())[None] == recorded(world), "every process has written what it counted")
    assert recorded(world)[3] == 20 + 3 * 2
    by_worker = sums(app.history(by="worker"))
    assert by_worker == {
        name: tuple(map(int, counts))
        for name, *counts in world.sql(
            "SELECT COALESCE(e.worker_name, t.worker_name), SUM(n_finish), SUM(n_failed), SUM(n_error), SUM(retries)"
            " FROM events e LEFT JOIN tasks t ON t.id = e.task_id GROUP BY 1"
        )
    }
    assert by_worker.keys() == {"note", "shaky", "told"}, "no untracked job is counted"
    assert sums(app.history(by="queue"))["callbacks"] == (1, 0, 0, 0)
    assert sums(app.history(queue="default", worker="shaky", by="queue")) == {"default": by_worker["shaky"]}

    gated = app.submit("gated", numbers(8))
    wait_for(lambda: world.shop.performed("began").total() == 8, "both processes are at work")
    os.kill(workers[0].pid, signal.SIGKILL)
    world.open_gate()
    assert gated.wait(120)["counts"]["finish"] == 8
    wait_for(lambda: sums(app.history())[None] == recorded(world), "what was written before a kill stays")
    workers[1].terminate()


@pytest.mark.one_database(reason="the counts come from the transition, whose write is tested on each")
def test_an_item_whose_processes_died_counts_as_an_error_of_its_minute(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(2))
    borrow(app.ledger, task.id)
    world.sql("UPDATE events SET status = 'working', process = 'doomed', deaths = ? WHERE seq = 0", POISON_DEATHS - 1)
    processes.recover_events(app.ledger, "doomed")
    assert task.progress()["counts"]["error"] == 1
    history.write(app.ledger)
    assert sums(app.history(by="worker")) == {"note": (0, 0, 1, 0)}


@pytest.mark.one_database(reason="what a process has in memory is the same on each")
def test_a_killed_process_loses_what_it_counted_since_its_last_heartbeats_at_most(world: World) -> None:
    app = world.app()
    victim, other = (world.cli("kill_app", "worker", "-c", "2") for _ in range(2))
    task = app.submit("order", [{"n": n, "kind": "ok"} for n in range(1_500)])

    def beat_at() -> int:
        return next((int(each["beat_at"]) for each in app.processes() if each["pid"] == victim.pid), 0)

    wait_for(lambda: only(app.history())["total"]["finish"] > 0, "one has written some")
    beats = [wait_for(beat_at, "it beats")]
    while len(beats) < 3:  # what it counted before the first is written after the second at the latest
        beats.append(wait_for(lambda: max(beat_at(), beats[-1]) - beats[-1], "it beats again") + beats[-1])
    kept = world.one("SELECT COUNT(*) FROM events WHERE finished_at < ?", beats[0])
    victim.kill()
    task.wait(120)
    other.terminate()
    other.wait()
    assert kept <= only(app.history())["total"]["finish"] <= 1_500


def test_what_drain_performs_is_in_the_history_with_its_run_times(world: World) -> None:
    app = world.app()
    app.submit("order", [{"n": n, "kind": "ok"} for n in range(20)])
    app.submit("note", numbers(20))
    drain(app)
    slow, fast = (only(app.history(worker=name))["total"] for name in ("order", "note"))
    assert slow["p50_s"] is not None
    assert slow["p95_s"] is not None
    assert fast["p50_s"] is not None
    assert 0.004 <= slow["p50_s"] <= slow["p95_s"]
    assert fast["p50_s"] < slow["p50_s"]


@pytest.mark.one_database(reason="the ledger is away before any database is asked")
def test_counts_that_cannot_be_written_are_kept_for_the_next_heartbeat(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = world.app()
    ledger, key = app.ledger, (app.ledger.now() // MINUTE * MINUTE, "default", "note")
    ledger.minutes.add({key: [2, 1] + [0] * 37})
    with monkeypatch.context() as patched:
        patched.setattr(ledger.database, "write", refuse)
        with pytest.raises(LedgerUnavailable):
            history.write(ledger)
    ledger.minutes.add({key: [1, 0] + [0] * 37})
    history.write(ledger)
    history.write(ledger)
    assert sums(app.history()) == {None: (3, 1, 0, 0)}


def refuse(**_: Any) -> Any:
    raise LedgerUnavailable("it is away")


def test_more_workers_than_are_told_apart_are_summed() -> None:
    minutes = Minutes()
    for n in range(MOST_ROWS + 3):
        minutes.add({(0, "default", f"worker {n}"): [1]})
    rows = minutes.take()
    assert len(rows) == MOST_ROWS + 1
    assert rows[0, OTHERS, OTHERS] == [3]
    assert minutes.take() == {}


# -- steps and series


def test_a_series_has_the_sums_of_its_steps_and_nothing_where_nothing_was(world: World) -> None:
    app = world.app()
    insert(world, NOON, "default", "note", finish=3, took_10=2, took_15=1)
    insert(world, NOON + timedelta(minutes=1), "default", "note", finish=1, error=1, took_15=2)
    insert(world, NOON + timedelta(minutes=7), "other", "shaky", failed=2, retried=4)
    insert(world, NOON, "", "", waiting=9, running=4, processes=2)
    insert(world, NOON, "default", "", waiting=9)
    insert(world, NOON + timedelta(minutes=1), "", "", waiting=0)
    insert(world, NOON - timedelta(minutes=1), "default", "note", finish=100)
    insert(world, NOON + timedelta(minutes=10), "default", "note", finish=100)
    end = NOON + timedelta(minutes=10)

    minutes = app.history(NOON, end)
    assert (minutes["since"], minutes["until"]) == ("2026-01-05T12:00:00.000Z", "2026-01-05T12:10:00.000Z")
    assert (minutes["step_s"], minutes["by"], minutes["left_off"]) == (60, None, 0)
    assert (minutes["running"], minutes["processes"]) == ([4, *[None] * 9], [2, *[None] * 9])
    one = only(minutes)
    assert one["finish"] == [3, 1, *[0] * 8]
    assert one["failed"] == [0] * 7 + [2, 0, 0]
    assert one["waiting"] == [9, 0, *[None] * 8]
    assert one["p50_s"] == [0.079, 0.79, *[None] * 8]
    assert (one["total"]["p50_s"], one["total"]["p95_s"]) == (0.79, 0.79)

    five = app.history(NOON + timedelta(seconds=30), end - timedelta(seconds=30), step="5m", by="queue")
    assert five["until"] == minutes["until"], "whole steps are shown"
    assert [(each["name"], each["finish"], each["waiting"]) for each in five["series"]] == [
        ("other", [0, 0], [0, None]),
        ("default", [4, 0], [9, None]),
    ]
    assert only(app.history(NOON, end, queue="default"))["waiting"][:3] == [9, 0, None]
    assert only(app.history(NOON, end, worker="note"))["waiting"] == [None] * 10
    assert only(app.history(NOON, end, worker="nobody"))["total"]["finish"] == 0
    assert app.history(NOON - timedelta(days=1), NOON - timedelta(hours=1), by="queue")["series"] == []


@pytest.mark.one_database(reason="a span is decided before the database is asked")
def test_steps_are_of_equal_length_where_clocks_change_and_an_answer_is_bounded(world: World) -> None:
    app = world.app()
    # In most of Europe, 2026-03-29 has 23 hours.
    found = app.history(datetime.fromisoformat("2026-03-29T00:00+01:00"), datetime.fromisoformat("2026-03-30T00:00+02:00"))
    assert (found["since"], found["until"], found["step_s"]) == (
        "2026-03-28T23:00:00.000Z",
        "2026-03-29T22:00:00.000Z",
        300,
    )
    assert len(only(found)["finish"]) == 23 * 12
    assert app.history(NOON - timedelta(minutes=500), NOON)["step_s"] == 60
    assert app.history(NOON - timedelta(minutes=501), NOON)["step_s"] == 300
    assert app.history(NOON - timedelta(days=7), NOON)["step_s"] == 3_600
    assert len(only(app.history())["finish"]) == 60
    bad: list[tuple[dict[str, Any], str]] = [
        ({"since": NOON - timedelta(hours=9), "until": NOON, "step": "1m"}, "longer step"),
        ({"since": NOON - timedelta(days=21), "until": NOON}, "later since"),
        ({"since": NOON, "until": NOON}, "before until"),
        ({"since": NOON.replace(tzinfo=None)}, "without a zone"),
        ({"step": "2m"}, "1m, 5m, 1h"),
        ({"by": "owner"}, "queue or worker"),
    ]
    for arguments, words in bad:
        with pytest.raises(InputError, match=words) as refused:
            app.history(**arguments)
        assert refused.value.errors[0].column in arguments


def test_the_busiest_series_are_shown_and_the_others_counted(world: World) -> None:
    app = world.app()
    for n in range(45):
        insert(world, NOON, f"q{n:02}", "note", finish=n + 1)
    found = app.history(NOON - timedelta(minutes=400), NOON + timedelta(minutes=1), by="queue")
    assert [each["name"] for each in found["series"]] == [f"q{n:02}" for n in range(44, 44 - 10_000 // 401, -1)]
    assert found["left_off"] == 45 - len(found["series"])


@pytest.mark.one_database(reason="no database takes part")
def test_a_quantile_is_known_within_a_quarter(world: World) -> None:
    for seconds in (0.002, 0.03, 0.5, 1.05, 7.7, 61.0, 1_800.0):
        took = [0] * 35
        took[next(i for i, bound in enumerate(BOUNDS_S) if seconds <= bound)] = 100
        for share in (0.5, 0.95):
            found = history._quantile([0, 0, 0, 0, *took], share)
            assert found is not None
            assert seconds / 1.3 <= found <= seconds * 1.3


# -- samples and the purge


def test_maintenance_samples_what_waits_and_removes_what_is_old(world: World) -> None:
    app: AsyncTask = world.app(history_days=1.0)
    now = app.ledger.now()
    insert(world, datetime.fromtimestamp(now / SECOND, UTC) - timedelta(hours=25), "default", "note", finish=1)
    insert(world, datetime.fromtimestamp(now / SECOND, UTC) - timedelta(hours=23), "default", "note", finish=2)
    app.submit("note", numbers(7))
    app.start_services()
    found = wait_for(
        lambda: [each for each in app.history(by="queue")["series"] if 7 in each["waiting"]], "a sample was taken"
    )
    assert [each["name"] for each in found] == ["default"]
    assert {0} <= {*app.history()["running"]} & {*app.history()["processes"]}, "this process performs nothing"
    wait_for(lambda: world.sql("SELECT finish FROM history WHERE finish > 0") == [(2,)], "what is old is removed")
    drain(app)
    app.operations.keep_history(86_400)
    assert 0 in [each for each in only(app.history(queue="default"))["waiting"] if each is not None]
