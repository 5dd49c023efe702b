"""When schedules tick: pure functions of times, with clocks that are set forward and back."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asynctask.clock import SECOND, from_datetime
from asynctask.errors import ConfigError
from asynctask.ledger.schedules import MAX_TICKS, Ticks, chosen

BERLIN = "Europe/Berlin"
ZONES = ("UTC", BERLIN, "America/New_York", "Asia/Shanghai", "Australia/Lord_Howe", "America/Sao_Paulo")
TIMES = st.integers(1_420_070_400 * SECOND, 2_208_988_800 * SECOND)  # 2015 to 2040
FIELDS = st.tuples(
    st.sampled_from(["*", "0", "30", "*/20", "5,45"]),
    st.sampled_from(["*", "1", "2", "3", "0", "*/2", "1-3", "23"]),
    st.sampled_from(["*", "1", "29", "L"]),
    st.sampled_from(["*", "2", "3,10"]),
    st.sampled_from(["*", "0", "MON-FRI"]),
).filter(lambda fields: not (fields[2] == "29" and fields[3] == "2"))


def at(text: str) -> int:
    return from_datetime(datetime.fromisoformat(text))


def local(ticks: Ticks, start: str, count: int) -> list[str]:
    return [ticks.local(tick).isoformat() for tick in islice(ticks.after(at(start)), count)]


@given(FIELDS, st.sampled_from(ZONES), TIMES)
@example(("5,45", "2", "*", "*", "*"), BERLIN, at("2026-10-25T02:30:00+01:00"))  # between two ticks, after the change
def test_ticks_rise_and_each_is_the_one_after_any_time_since_the_last(fields: Any, zone: str, start: int) -> None:
    ticks = Ticks(" ".join(fields), zone)
    found = list(islice(ticks.after(start), 8))
    assert all(a < b for a, b in pairwise([start, *found]))
    for last, tick in pairwise(found):
        assert {next(ticks.after(each)) for each in (last, (last + tick) // 2, tick - 1)} == {tick}


@given(st.sampled_from(ZONES), st.integers(0, 23), st.integers(0, 59), st.dates(date(2015, 1, 4), date(2040, 1, 1)))
@example(BERLIN, 2, 30, date(2026, 3, 29))
@example(BERLIN, 2, 30, date(2026, 10, 25))
def test_a_fixed_time_ticks_once_on_each_day(zone: str, hour: int, minute: int, day: date) -> None:
    ticks = Ticks(f"{minute} {hour} * * *", zone)
    noon = from_datetime(datetime(day.year, day.month, day.day, 12, tzinfo=UTC) - timedelta(days=3))
    found = [ticks.local(tick) for tick in islice(ticks.after(noon), 6)]
    assert [b - a for a, b in pairwise(each.date() for each in found)] == [timedelta(days=1)] * 5
    for each in found:
        assert (each.hour, each.minute) >= (hour, minute), "in a gap, right after it"


def test_a_fixed_time_in_the_gap_ticks_after_it_and_in_the_doubled_hour_once() -> None:
    ticks = Ticks("30 2 * * *", BERLIN)
    assert local(ticks, "2026-03-28T12:00:00+01:00", 2) == ["2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00+02:00"]
    assert local(ticks, "2026-10-24T12:00:00+02:00", 2) == ["2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"]


def test_each_hour_is_each_hour_of_real_time() -> None:
    for start in ("2026-03-28T12:00:00+01:00", "2026-10-24T12:00:00+02:00"):
        found = list(islice(Ticks("@hourly", BERLIN).after(at(start)), 30))
        assert {b - a for a, b in pairwise(found)} == {3_600 * SECOND}


def test_a_day_in_shanghai() -> None:
    ticks = Ticks("0 2 * * *", "Asia/Shanghai")
    assert local(ticks, "2026-11-28T00:00:00+00:00", 1) == ["2026-11-29T02:00:00+08:00"]


@given(st.integers(1, 10_000), TIMES, st.integers(0, 5_000 * SECOND))
def test_due_ticks_of_an_interval_are_those_that_follow_each_other(step: int, first: int, later: int) -> None:
    ticks, now = Ticks(step), first + later
    found = ticks.due(first, now)
    every = range(first, now + 1, step * SECOND)
    assert (list(found.ticks), found.total) == (list(every[-MAX_TICKS:]), len(every))
    assert found.following == every[-1] + step * SECOND > now


@given(FIELDS, st.sampled_from(ZONES), TIMES, st.integers(0, 400_000))
def test_due_ticks_of_an_expression_are_those_that_follow_each_other(
    fields: Any, zone: str, start: int, later_s: int
) -> None:
    ticks = Ticks(" ".join(fields), zone)
    first = next(ticks.after(start))
    now = first + later_s * SECOND
    found, every = ticks.due(first, now), [first]
    for tick in ticks.after(first):
        if tick > now:
            break
        every.append(tick)
    assert (list(found.ticks), found.total, found.following) == (every[-MAX_TICKS:], len(every), tick)


def test_which_missed_ticks_are_made_up_for() -> None:
    ticks, first, hour = Ticks(3_600), 10**15, 3_600 * SECOND
    one = ticks.due(first, first + SECOND)
    assert [list(chosen(each, one, first)) for each in ("skip", "once", "all")] == [[first]] * 3
    late = ticks.due(first, first + 3 * hour + SECOND)
    assert chosen("skip", late, first + 3 * hour + 1) == []
    assert chosen("skip", late, first + 2 * hour) == [first + 3 * hour]
    assert chosen("once", late, first + 4 * hour) == [first + 3 * hour]
    assert chosen("all", late, first + 4 * hour) == [first + n * hour for n in range(4)]
    assert len(chosen("all", ticks.due(first, first + 2_000 * hour), first)) == MAX_TICKS


@pytest.mark.parametrize(
    "schedule",
    [
        "", "0 2 * *", "0 2 * * * *", "61 * * * *", "0 0 30 2 *", "tomorrow", "@often", "* * */20 * 1L",
        0, 0.5, -1, float("nan"), float("inf"), True, 10**9, timedelta(0), None,
    ],
    ids=str,
)  # fmt: skip
def test_a_schedule_that_never_ticks_is_refused_with_what_to_write(schedule: Any) -> None:
    with pytest.raises(ConfigError, match="schedule"):
        Ticks(schedule)


@pytest.mark.parametrize("zone", ["Asia/Shanghia", "", "../UTC", "/etc/passwd", "Asia", "a\0b", None], ids=str)
def test_an_unknown_zone_is_refused(zone: Any) -> None:
    with pytest.raises(ConfigError, match="such as Asia/Shanghai"):
        Ticks("@daily", zone)


@pytest.mark.parametrize("schedule", [1, 90, 1.5, 2_592_000, timedelta(hours=6), "@daily", " 0  2 * * mon-fri "], ids=str)
def test_what_is_kept_of_a_schedule_ticks_at_the_same_times(schedule: Any) -> None:
    ticks = Ticks(schedule, BERLIN)
    again = Ticks.of_row({"schedule": ticks.text, "timezone": BERLIN})
    start = at("2026-03-28T12:00:00+01:00")
    assert list(islice(again.after(start), 5)) == list(islice(ticks.after(start), 5))
