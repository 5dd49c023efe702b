"""The pure part of slices: marks, counts, params."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asynctask.core import transitions as core
from asynctask.core.states import Reason, Status
from asynctask.core.transitions import MARKS, Row
from asynctask.iterable import AUTO, Slice, chunk_of, item_statuses, pack, unpack

ANY = st.text(alphabet="fxec.r", min_size=2, max_size=30)


def running(marks: str) -> Row:
    return Row(Status.WORKING, reserved=True, process="p", items=len(marks))._replace(**core.marked(marks))


@given(ANY, st.data())
def test_an_outcome_stands_and_the_counts_are_those_of_the_marks(marks: str, data: st.DataObject) -> None:
    row = running(marks)
    news = data.draw(st.text(alphabet="fxec.r", min_size=len(marks), max_size=len(marks)))
    after = core.stepped(row, news)
    assert core.stepped(after, news) == after, "written twice, it changes nothing"
    for old, new in zip(marks, core.marks_of(after), strict=True):
        assert new == old if old in "fxec" else True
    delta = core.difference(row, after)
    assert sum(getattr(delta, name) for name in core.COUNTED) == 0, "no item is lost and none is made"
    for status, letter in MARKS.items():
        assert getattr(core.difference(None, after), status) == core.marks_of(after).count(letter)


@given(ANY, st.sampled_from(["cancel", "error", "finish", "poison", "retry"]))
@example("ff", "error")
@example("ff", "cancel")  # its process died after the last item and before the end
@example("ff", "poison")
def test_a_slice_ends_as_its_worst_item(marks: str, how: str) -> None:
    row = running(marks)
    if how == "retry":
        after = core.outcome(row, Status.ERROR, Reason.RAISED, retry_at=5).after
        assert after.marks == marks.replace("r", "."), "only what raised, and what had no turn, is open"
        return
    if how == "poison":
        found = core.recover(row._replace(deaths=core.POISON_DEATHS - 1), "running", now=1)
        assert found is not None
        if marks.count(".") > 1:
            assert found.after.status is Status.ENQUEUE, "the item it died under ended, no other"
            return
        turn = found
    elif how == "cancel":
        turn = core.cancel(row)
    else:
        turn = core.outcome(
            row, Status.ERROR if how == "error" else Status.FINISH, Reason.RAISED if how == "error" else Reason.RETURNED
        )  # fmt: skip
    assert set(core.marks_of(turn.after)) <= set("fxec")
    order = "excf"
    worst = min(core.marks_of(turn.after), key=order.index)
    assert MARKS[turn.after.status] == worst
    if turn.after.status is not Status.FINISH:
        again = core.explicit_retry(turn.after, now=1).after
        assert again.n_finish == turn.after.n_finish
        assert set(core.marks_of(again)) <= set("f.")


@given(st.lists(st.integers(1, 1_000), min_size=1, unique=True).map(sorted))
def test_each_item_keeps_its_row(rows: list[int]) -> None:
    assert unpack(json.loads(pack(rows, [str(row) for row in rows]))) == (rows, rows)


@pytest.mark.parametrize("params", [None, 3, {}, {"rows": [[1, 2]], "items": [1]}, {"rows": 3, "items": []}])
def test_what_is_no_slice_is_refused(params: object) -> None:
    with pytest.raises(ValueError, match=r"slice|params"):
        unpack(params)


def test_poison_ends_one_item() -> None:
    row = running("f..")._replace(deaths=core.POISON_DEATHS - 1)
    turn = core.recover(row, None, now=1)
    assert turn is not None
    assert (turn.after.status, turn.after.marks, turn.after.deaths) == (Status.ENQUEUE, "fe.", 0)


@pytest.mark.parametrize(
    ("planned", "created", "size"),
    [(1, 0, 1), (10_000, 0, 1), (10_001, 0, 2), (500_000, 9, 50), (10**9, 0, 1_000), (None, 0, 1), (None, 500_000, 100)],
)
def test_auto_makes_about_10_000_jobs(planned: int | None, created: int, size: int) -> None:
    assert chunk_of(AUTO, planned, created) == size
    assert chunk_of(7, planned, created) == 7


def test_an_attempt_takes_up_what_is_open_and_tells_what_it_came_to() -> None:
    part = Slice({"rows": [[3, 4]], "items": "abcd"}, "f..x", '{"3":1}', limit=20)
    assert part.left == [1, 2]
    part.finish(1, "2")
    part.fail(1, "late", "does not count")
    part.error(2, "raised", "bug", 5)
    news = part.take()
    assert (news.marks, news.results, part.waits, part.delay) == ("ffrx", '{"3":1,"4":2}', 1, 5)
    assert news.failures[2].row == 5
    assert item_statuses(news.marks, 4, "enqueue") == ["finish", "finish", "enqueue", "failed"]
