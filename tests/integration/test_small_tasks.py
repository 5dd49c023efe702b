"""Lists that fit one slice: written with their Task in one transaction, dispatched and closed many at a time."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.costs import statements
from support.world import World, numbers

from asynctask import AsyncTask, submission
from asynctask.core.states import Reason, Status
from asynctask.database.engine import Database
from asynctask.errors import InputError, LedgerUnavailable
from asynctask.ledger import lending, tasks
from asynctask.ledger.base import NewItem, Reject
from asynctask.ledger.recorder import TaskCloser
from asynctask.ledger.tasks import First, NewTask
from asynctask.lists import split
from asynctask.lists.cleaning import Cleaning
from asynctask.lists.split import MAX_WHOLE_BYTES
from asynctask.submission import GroupSubmit
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


@contextmanager
def transactions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The threads that began a write transaction while the block ran."""
    real, seen = Database.write, []

    @contextmanager
    def write(self: Database, **how: Any) -> Iterator[Any]:
        seen.append(threading.current_thread().name)
        with real(self, **how) as connection:
            yield connection

    with monkeypatch.context() as patched:
        patched.setattr(Database, "write", write)
        yield seen


def uploads(app: AsyncTask) -> list[Path]:
    folder = Path(app.config.data_dir) / "uploads"
    return sorted(folder.iterdir()) if folder.exists() else []


def new_whole(*numbers: int, **more: Any) -> First:
    items = [NewItem(f'{{"n":{n}}}', row) for row, n in enumerate(numbers, 1)]
    new = NewTask("note", "default", 240, planned=len(items), **more)
    return First(new, items, cursor=len(items), more=False)


# -- submitting


@pytest.mark.parametrize("way", ["submit", "submit_items", "submit_file"])
def test_a_list_that_fits_one_slice_takes_one_transaction_of_the_callers_own_thread(
    world: World, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    app = world.app()
    body = "n,kind\n" + "".join(f"{n},ok\n" for n in range(5))
    submits: dict[str, Callable[[], Any]] = {
        "submit": lambda: app.submit("order", [{"n": n, "kind": "ok"} for n in range(5)]).id,
        "submit_items": lambda: app.submit_items("order", [{"n": n, "kind": "ok"} for n in range(5)]).id,
        "submit_file": lambda: app.submit_file("order", app.uploads.store(io.BytesIO(body.encode()), "a.csv")).id,
    }
    with transactions(monkeypatch) as seen:
        task_id = submits[way]()
    assert seen == [threading.current_thread().name]
    assert len(uploads(app)) == (1 if way == "submit_file" else 0), "only a file that somebody sent is kept"
    split = app.task(task_id).progress()["split"]
    whole = {"state": "sealed", "reason": None, "planned": 5, "created": 5, "rejected": 0, "open_until": None}
    assert split == whole
    assert [entry["action"] for entry in app.task(task_id).log()] == ["split sealed", "submitted"]
    with world.working(app):
        assert app.task(task_id).wait(20)["done"]
    world.check_promises(app, [task_id], 5)


@pytest.mark.parametrize("nothing", [None, 7])
def test_what_is_no_list_is_refused_before_anything_is_made(world: World, nothing: Any) -> None:
    """Without `_checked_items`, `submit` makes a rejected Task and then raises the TypeError of its split."""
    app = world.app()
    promotions = app.export(columns=["n"])(_rows)
    submits: tuple[Callable[[], Any], ...] = (
        lambda: app.submit("note", nothing),
        lambda: app.submit("note", nothing, strict=True, idempotency_key="k"),
        lambda: app.check("note", nothing),
        lambda: app.submit_jobs(nothing),
        lambda: app.submit_export(promotions, nothing),
    )
    for submit in submits:
        with pytest.raises(InputError, match=f"a list of items is needed.* not {nothing}$") as found:
            submit()
        assert (found.value.code, found.value.status) == ("wrong_type", 422)
    assert app.tasks() == []


def _rows(shard: Any) -> Iterator[list[int]]:
    yield [1]


def test_the_answer_says_what_asking_would(world: World) -> None:
    app = world.app()
    cases: tuple[tuple[list[Any], dict[str, Any]], ...] = (
        ([{"n": 1, "kind": "ok"}], {}),
        ([{"n": 1, "kind": "ok"}, {"n": "many", "kind": "ok"}], {"title": "T", "parallel": 3, "owner": "o", "priority": 7}),
    )
    for items, options in cases:
        found = app.submit_items("order", items, **options)
        assert found.first_progress is not None
        assert found.first_progress == found.progress()
    assert app.submit_items("order", [{"n": 1, "kind": "ok"}], session="s").first_progress is None, (
        "it may wait for its session"
    )


def test_one_item_more_than_a_slice_is_split_and_its_file_goes_with_the_split(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = world.app()
    monkeypatch.setattr(split, "SLICE", 10)
    with transactions(monkeypatch) as seen:
        assert app.submit_items("note", numbers(10)).progress()["split"]["created"] == 10
    assert len(seen) == 1
    found = app.submit_items("note", numbers(11), wait_s=20)
    assert found.progress()["split"] == {
        "state": "sealed",
        "reason": None,
        "planned": 11,
        "created": 11,
        "rejected": 0,
        "open_until": None,
    }
    assert uploads(app) == []
    assert world.one("SELECT split_source FROM tasks WHERE id = ?", found.id) is None
    long = {"n": 1, "text": "x" * (MAX_WHOLE_BYTES // 8)}
    assert app.submit_items("note", [long] * 9, wait_s=20).progress()["split"]["created"] == 9
    assert uploads(app) == []


def test_a_list_whose_validation_is_slow_is_answered_in_time_and_the_next_one_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = world.app()
    monkeypatch.setattr(split, "WHOLE_S", -1.0)
    monkeypatch.setattr(submission, "WHOLE_S", -1.0)
    gathered: list[bool] = []
    real = split.Splitter.gather

    def gather(self: split.Splitter, *args: Any, **how: Any) -> Any:
        gathered.append(True)
        return real(self, *args, **how)

    monkeypatch.setattr(split.Splitter, "gather", gather)
    ids = [app.submit_items("note", numbers(3), wait_s=20).id for _ in range(2)]
    assert len(gathered) == 1, "what is known to be slow is not tried"
    with world.working(app):
        for task_id in ids:
            assert app.task(task_id).wait(20)["done"]
    world.check_promises(app, ids, 6)


def test_a_model_that_breaks_is_told_as_before(world: World) -> None:
    app = world.app()
    stored = app.uploads.store(io.BytesIO(b"m,kind\n1,ok\n"), "a.csv")
    with pytest.raises(InputError) as caught:
        app.submit_file("order", stored, wait_s=20)
    assert caught.value.code == "missing_columns" or caught.value.errors
    (task,) = app.tasks()
    assert (task["state"], task["split"]["state"]) == ("rejected", "failed")


def test_a_strict_list_of_which_every_row_is_refused_says_so(world: World) -> None:
    app = world.app()
    with pytest.raises(InputError) as caught:
        app.submit_items("order", [{"n": "many", "kind": "x"}], strict=True, idempotency_key="k")
    assert caught.value.code == "rows_rejected"
    assert app.submit_items("order", [{"n": 1, "kind": "x"}], strict=True, idempotency_key="k").created


def test_sessions_go_one_after_the_other_also_in_one_transaction(world: World) -> None:
    app = world.app()
    group = GroupSubmit(app.ledger, lease_s=60)
    made = together(group, [new_whole(n, session="s") for n in range(3)])
    ids = sorted(each.task_id for each in made)
    held = world.sql("SELECT id FROM tasks WHERE session_holder IS NOT NULL AND ready IS NOT NULL")
    assert held == [(ids[0],)]
    with world.working(app):
        for task_id in ids:
            assert app.task(task_id).wait(20)["done"]
    world.check_promises(app, ids, 3)


# -- together


def together(group: GroupSubmit, wholes: list[First]) -> list[Any]:
    """Submits from a thread each, while an earlier transaction of the group goes on; what each got, an error too."""
    found: list[Any] = [None] * len(wholes)

    def submit(at: int) -> None:
        try:
            found[at] = group.create(wholes[at])
        except Exception as error:
            found[at] = error

    threads = [threading.Thread(target=submit, args=(at,)) for at in range(len(wholes))]
    with group._commit_lock:
        for thread in threads:
            thread.start()
        wait_for(lambda: len(group._waiting) == len(wholes), "all of them wait", 10)
    for thread in threads:
        thread.join()
    return found


@pytest.mark.each_database(reason="what is written for many at once is each one's own")
def test_what_comes_together_is_committed_together(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app = world.app()
    with transactions(monkeypatch) as seen:
        made = together(GroupSubmit(app.ledger, lease_s=60), [new_whole(n, n, owner=str(n)) for n in range(6)])
    assert len(seen) == 1
    for n, each in enumerate(made):
        assert each.created
        assert app.task(each.task_id).progress()["owner"] == str(n), "each is told of its own"
        params = "SELECT DISTINCT params FROM events WHERE task_id = ?"
        assert [text.replace(" ", "") for (text,) in world.sql(params, each.task_id)] == [f'{{"n":{n}}}']
    assert app.doctor() == []


def test_one_that_is_refused_does_not_take_the_others_along(world: World) -> None:
    app = world.app()
    first = GroupSubmit(app.ledger, lease_s=60).create(new_whole(1, idempotency_key="k", body_digest="a"))
    same, other, good, rejected = together(
        GroupSubmit(app.ledger, lease_s=60),
        [
            new_whole(1, idempotency_key="k", body_digest="a"),
            new_whole(1, idempotency_key="k", body_digest="b"),
            new_whole(2),
            replace(new_whole(idempotency_key="new"), rejects=[Reject(1, [{"code": "x"}], {"n": 1})], cursor=1),
        ],
    )
    assert (same.task_id, same.created) == (first.task_id, False)
    assert isinstance(other, InputError)
    assert other.code == "idempotency_key_reused"
    assert good.created
    assert app.task(rejected.task_id).progress()["state"] == "rejected"
    assert world.one("SELECT COUNT(*) FROM tasks WHERE idempotency_key = 'new'") == 0
    assert world.one("SELECT COUNT(*) FROM tasks") == 3
    assert app.doctor() == []


def test_a_ledger_that_is_away_is_told_to_each(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app = world.app()

    def away(*args: Any) -> Any:
        raise LedgerUnavailable("away")

    monkeypatch.setattr(tasks, "_insert", away)
    found = together(GroupSubmit(app.ledger, lease_s=60), [new_whole(1), new_whole(2)])
    assert [type(each) for each in found] == [LedgerUnavailable] * 2
    assert world.one("SELECT COUNT(*) FROM tasks") == 0


# -- closing


@pytest.mark.each_database(reason="what is written for many at once is each one's own")
def test_small_tasks_that_are_over_are_closed_together_and_no_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app = world.app()
    group = GroupSubmit(app.ledger, lease_s=60)
    over = [group.create(new_whole(n)).task_id for n in range(5)]
    open_, in_session = group.create(new_whole(1, 2)).task_id, group.create(new_whole(1, session="s")).task_id
    for task_id in [*over, in_session]:
        (job_id,) = world.sql("SELECT job_id FROM events WHERE task_id = ?", task_id)[0]
        assert app.record(job_id, Status.FINISH)
    assert not world.sql("SELECT id FROM tasks WHERE closed_at IS NOT NULL AND id = ?", open_)
    world.sql("UPDATE tasks SET state = 'running', closed_at = NULL, finished_at = NULL WHERE session_key IS NULL")
    world.sql("DELETE FROM task_log WHERE action = 'closed'")
    closer = TaskCloser(app.ledger, lambda at: None)
    closer.ended([*over, open_, in_session])
    with transactions(monkeypatch) as seen:
        closer.check()
    assert len(seen) <= 2, "one for all that are small, one for the one that holds a session"
    states = dict(world.sql("SELECT id, state FROM tasks"))
    assert states == {**dict.fromkeys(over, "finished"), open_: "running", in_session: "finished"}
    assert tasks.close_small(app.ledger, [*over, open_]) == []
    assert Reason.CLOSED in [Reason(entry["action"]) for entry in app.task(over[0]).log() if entry["action"] == "closed"]


def test_one_that_cannot_be_closed_leaves_the_others_their_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any) -> Any:
        raise RuntimeError("a row that cannot be read")

    monkeypatch.setattr("asynctask.ledger.recorder.close_small", failing)
    app = world.app()
    task_id = GroupSubmit(app.ledger, lease_s=60).create(new_whole(1)).task_id
    with world.working(app):
        assert app.task(task_id).wait(20)["done"]


# -- stored lists that nobody needs


def test_stored_items_whose_split_is_over_are_removed_and_nothing_else_is(world: World) -> None:
    app = world.app()

    def stored(name: str) -> int:
        return app.submit_file("note", app.uploads.store(io.BytesIO(b'[{"n":1}]'), name), wait_s=20).id

    sent, old, splitting = stored("items.json"), stored("items.json"), stored("items.json")
    sheet = app.submit_file("note", app.uploads.store(io.BytesIO(b"n\n1\n"), "a.csv"), wait_s=20).id
    for task_id in (old, splitting):  # as an earlier version would have stored JSON items
        source = world.one("SELECT split_source FROM tasks WHERE id = ?", task_id)
        assert '"items"' in source
        world.sql("UPDATE tasks SET split_source = ? WHERE id = ?", source.replace('"items"', '"kept"'), task_id)
    world.sql("UPDATE tasks SET split_state = 'splitting' WHERE id = ?", splitting)
    maintenance = Cleaning(app.ledger, app.uploads)
    assert maintenance.clear_uploads() == 1
    kept = {i for (i,) in world.sql("SELECT id FROM tasks WHERE split_source IS NOT NULL")}
    assert kept == {sent, splitting, sheet}
    assert len(uploads(app)) == 3
    world.sql("UPDATE tasks SET split_state = 'sealed' WHERE id = ?", splitting)
    assert maintenance.clear_uploads() == 1, "it looks again at what was still being split"
    assert (len(uploads(app)), maintenance.clear_uploads()) == (2, 0)


@pytest.mark.each_database(reason="each locks and inserts in its own way")
def test_small_tasks_are_borrowed_whole_in_one_transaction_and_what_has_changed_is_left(world: World) -> None:
    """Taken out: any condition of the query, the look at free loans, or the hint of what is lent."""
    app = world.app()
    small = [app.submit("note", numbers(count, first)) for count, first in ((1, 0), (3, 10), (20, 20), (2, 50), (2, 60))]
    large = app.submit("note", numbers(21, 100))
    ledger = app.ledger
    with ledger.database.read() as connection:
        offers = {each.task_id: each for each in lending.pick(connection, ledger, ["default"])}
    assert [lending.is_small(offers[task.id]) for task in (*small, large)] == [True] * 5 + [False]
    paused, shared = small[3:]
    paused.pause()
    (loan,) = (loan for loan, _ in lending.borrow(ledger, offers[shared.id], 1).loans)
    lending.give_back(ledger, [(loan, loan.low)])
    with statements(ledger.database) as seen:
        found = lending.borrow_small(ledger, [offers[task.id] for task in small])
    assert {i: [job.seq for _, jobs in each.loans for job in jobs] for i, each in found.items()} == {
        small[0].id: [0], small[1].id: [0, 1, 2], small[2].id: [*range(20)]
    }  # fmt: skip
    assert len([one for one, _ in seen if one.startswith(("INSERT INTO loans", "UPDATE tasks"))]) == 2
    hints = "SELECT id FROM tasks WHERE ready IS NOT NULL ORDER BY id"
    assert world.sql(hints) == [(shared.id,), (large.id,)]
    paused.resume()
    assert lending.borrow_small(ledger, [offers[small[0].id], offers[paused.id]]).keys() == {paused.id}
    assert lending.leave(ledger) == {*found, paused.id}
    with world.working(app):
        for task in (*small, large):
            assert task.wait(120)["done"]
    world.check_promises(app, [task.id for task in (*small, large)], 49)


def test_an_owner_with_many_small_tasks_does_not_come_before_others(world: World) -> None:
    """With ``fair_by=owner`` each has its turn, one Task after the other."""
    app = world.app(fair_by="owner")
    many = [app.submit("note", numbers(1, n), owner="many") for n in range(40)]
    one = app.submit("note", numbers(1, 100), owner="one")
    with world.working(app, concurrency=1):
        for task in (*many, one):
            assert task.wait(120)["done"]
    order = [item for (item,) in world.sql("SELECT task_id FROM events ORDER BY started_at, id")]
    assert order.index(one.id) < 10
