"""Whose death it is when a process dies with several jobs at work."""

from __future__ import annotations

import pytest

from asynctask.core.states import Reason, Status
from asynctask.core.transitions import POISON_DEATHS, Row, recover

FRESH = Row(Status.WORKING, reserved=True, process="p")
WATCHED = FRESH._replace(watched=True)
DIED = WATCHED._replace(deaths=1)


@pytest.mark.parametrize(
    ("row", "beside", "deaths"),
    [
        (FRESH, [], 1),
        (FRESH, [FRESH, FRESH], 1),
        (FRESH, [FRESH, WATCHED], 1),
        (FRESH, [DIED], 0),
        (WATCHED, [FRESH], 1),
        (WATCHED, [WATCHED], 1),
        (DIED, [], 2),
        (DIED, [FRESH, WATCHED], 2),
        (FRESH._replace(status=Status.ENQUEUE, process=None), [FRESH], 0),
    ],
)
def test_a_death_counts_for_the_suspects_and_where_there_are_none_for_all(row: Row, beside: list[Row], deaths: int) -> None:
    turn = recover(row, None, now=7, beside=beside)
    assert turn is not None
    after = turn.after
    assert (after.status, after.deaths, after.watched, after.due_at) == (Status.ENQUEUE, deaths, True, 7)


@pytest.mark.parametrize(("beside", "limit"), [([], POISON_DEATHS), ([FRESH], 2 * POISON_DEATHS)])
def test_a_job_that_died_beside_others_ends_as_poison_later(beside: list[Row], limit: int) -> None:
    for deaths in range(1, limit + 1):
        turn = recover(DIED._replace(deaths=deaths - 1), None, now=0, beside=beside)
        assert turn is not None
        assert turn.after.deaths == deaths
        assert turn.reason is (Reason.POISON if deaths == limit else Reason.WORKER_LOST)


def test_many_deaths_beside_others_end_nothing_that_had_not_begun() -> None:
    row = DIED._replace(status=Status.ENQUEUE, process=None, deaths=2 * POISON_DEATHS - 1)
    turn = recover(row, None, now=0)
    assert turn is not None
    assert (turn.reason, turn.after.deaths) == (Reason.WORKER_LOST, row.deaths)
