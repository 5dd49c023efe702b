"""A worker process changes threads often while its jobs take their time, and as CPython does while they are short."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from asynctask.runtime.switching import AS_DELIVERED_S, OFTEN_S, Switching


@pytest.fixture(autouse=True)
def interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(AS_DELIVERED_S)
    yield
    sys.setswitchinterval(before)


def test_the_interval_follows_what_most_jobs_take() -> None:
    switching = Switching()
    switching.follow(0, 0)
    assert sys.getswitchinterval() == pytest.approx(AS_DELIVERED_S), "nothing is known yet"
    switching.follow(10, 0)
    assert sys.getswitchinterval() == pytest.approx(OFTEN_S)
    switching.follow(10, 0)
    assert sys.getswitchinterval() == pytest.approx(OFTEN_S), "no job ended, so nothing is known that is new"
    switching.follow(10_010, 9_000)
    assert sys.getswitchinterval() == pytest.approx(AS_DELIVERED_S), "nine of ten were quick, those before left out"
    switching.follow(10_020, 9_005)
    assert sys.getswitchinterval() == pytest.approx(OFTEN_S)


def test_at_the_end_the_interval_is_what_it_was() -> None:
    switching = Switching()
    switching.follow(10, 0)
    switching.end()
    assert sys.getswitchinterval() == pytest.approx(AS_DELIVERED_S)


def test_an_interval_that_somebody_has_set_is_left() -> None:
    sys.setswitchinterval(0.001)
    switching = Switching()
    switching.follow(10, 0)
    assert sys.getswitchinterval() == pytest.approx(0.001)
    switching.end()
    assert sys.getswitchinterval() == pytest.approx(0.001)
