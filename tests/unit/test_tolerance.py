"""How many items of a Task may fail: what may be written, and when a Task is over it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynctask.core.transitions import Tolerance


@pytest.mark.parametrize(
    ("value", "expected", "text"),
    [
        (0, Tolerance(0), "0"),
        (10, Tolerance(10), "10"),
        ("10", Tolerance(10), "10"),
        ("5%", Tolerance(500, True), "5%"),
        (" 2.50 % ", Tolerance(250, True), "2.5%"),
        ("failed:10", Tolerance(10, status="failed"), "failed:10"),
        ("error:100%", Tolerance(10_000, True, "error"), "error:100%"),
    ],
)
def test_a_limit_is_a_count_or_a_share_of_both_statuses_or_one(value: object, expected: Tolerance, text: str) -> None:
    assert Tolerance.parse(value) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "value",
    [
        -1,
        10_000_000,
        True,
        None,
        2.5,
        "",
        "many",
        "5 of 9",
        "-1",
        "101%",
        "5.125%",
        "finish:5",
        "failed:",
        "٥",
        "1e3",
        "5%%",
    ],
)
def test_anything_else_is_refused_and_says_what_may_be_written(value: object) -> None:
    with pytest.raises(ValueError, match=r"count .* 10.* 5%.*failed:10"):
        Tolerance.parse(value)


LIMITS = st.one_of(
    st.builds(Tolerance, st.integers(0, 9_999_999), st.just(False), st.sampled_from((None, "failed", "error"))),
    st.builds(Tolerance, st.integers(0, 10_000), st.just(True), st.sampled_from((None, "failed", "error"))),
)
COUNTS = st.integers(0, 2_000_000)


@given(LIMITS)
def test_what_is_kept_is_read_again_and_fits_its_column(limit: Tolerance) -> None:
    assert Tolerance.parse(str(limit)) == limit
    assert len(str(limit)) <= 16


@given(LIMITS, COUNTS, COUNTS, COUNTS)
def test_a_task_is_over_its_limit_with_the_first_item_beyond_it(
    limit: Tolerance, failed: int, error: int, total: int
) -> None:
    left = limit.left(failed, error, total)
    assert left is not None
    bad = {None: failed + error, "failed": failed, "error": error}[limit.status]
    over = bad * 10_000 > limit.limit * total if limit.is_share else bad > limit.limit
    assert (left < 0) == over
    assert limit.left(failed, error, None) is (None if limit.is_share else left) or limit.left(failed, error, None) == left
