"""The gate of a rate limit: never over the rate in any window, and never closed for good."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynctask.clock import SECOND
from asynctask.core.readiness import RATE_AHEAD, permitted, rate_opens, taken
from asynctask.ledger.rates import every

between = st.sampled_from([10, 1_000, 50_000, 142_858, 200_000, SECOND, 3_600_000, 60 * SECOND])
steps = st.lists(st.tuples(st.integers(0, 2 * SECOND), st.integers(0, 200_000), st.integers(0, 40)), max_size=40)


@given(between, steps)
def test_takers_never_start_more_than_the_rate_permits_in_any_window(
    spacing: int, taking: list[tuple[int, int, int]]
) -> None:
    """Each step: the time that passes, by how much the taker's clock is behind the latest one, how many it wants."""
    now, free_at, starts = 10**15, 0, list[int]()
    for passes, behind, wants in taking:
        now += passes
        count = min(wants, permitted(free_at, spacing, now - behind))
        assert (count == 0) == (wants == 0 or rate_opens(free_at, spacing, now - behind) > now - behind)
        if count:
            free_at = taken(free_at, spacing, now - behind, count)
            starts += [now - behind] * count
    starts.sort()
    for first, since in enumerate(starts):
        for last in range(first, len(starts)):
            assert (last - first) * spacing <= starts[last] - since + RATE_AHEAD + 200_000


@given(between, st.integers(1, 40), st.integers(0, 10 * SECOND))
def test_a_limit_opens_when_it_says_and_not_before(spacing: int, wants: int, later: int) -> None:
    now = 10**15
    count = min(wants, permitted(0, spacing, now))
    assert count >= 1
    free_at = taken(0, spacing, now, count)
    opens = rate_opens(free_at, spacing, now)
    assert opens <= now + spacing
    assert permitted(free_at, spacing, opens) >= 1
    if opens > now:
        assert permitted(free_at, spacing, opens - 1) == 0
    assert permitted(free_at, spacing, opens + later) >= 1


def test_who_takes_late_loses_nothing() -> None:
    spacing, free_at, now, count = 200_000, 0, 10**15, 0
    began = now
    while now < began + 60 * SECOND:
        now = rate_opens(free_at, spacing, now) + RATE_AHEAD - 1_000
        taking = permitted(free_at, spacing, now)
        free_at, count = taken(free_at, spacing, now, taking), count + taking
    assert 300 <= count <= 302


@pytest.mark.parametrize("spacing", [10, 200_000, 3_600_000])
def test_a_clock_that_was_set_back_and_a_higher_rate_do_not_close_a_limit(spacing: int) -> None:
    now = 10**15
    assert permitted(now + 3_600 * SECOND, spacing, now) >= 1
    assert rate_opens(now + 3_600 * SECOND, spacing, now) == now


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        ("5/s", 200_000),
        ("300/min", 200_000),
        ("1000/h", 3_600_000),
        ("0.5/s", 2_000_000),
        ("7/s", 142_858),
        ("3/h", 1_200_000_000),
    ],
)
def test_forms_of_a_rate(rate: str, expected: int) -> None:
    assert every(rate) == expected
