"""Arguments go to and come from Rails in ActiveJob's own forms."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from support.redis_ruby import ruby_program
from support.servers import missing

from asynctask.errors import InputError
from asynctask.sidekiq.activejob import (
    OLD_WRAPPER,
    WRAPPER,
    GlobalId,
    ModuleName,
    RubyRange,
    Symbol,
    decode_arguments,
    encode_arguments,
    is_wrapped,
    unwrap,
    wrap,
)

S = "ActiveJob::Serializers::"
AT = datetime(2026, 1, 2, 3, 4, 5, 123456, tzinfo=UTC)
BERLIN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=1)))

# What Rails 6.1 writes, and what it is here; both ways.
ALIKE: list[tuple[Any, Any]] = [
    (None, None),
    (True, True),
    (5, 5),
    (1.5, 1.5),
    ("x", "x"),
    ([1, [2]], [1, [2]]),
    ({"a": 1}, {"a": 1, "_aj_symbol_keys": []}),
    (Symbol("sym"), {"_aj_serialized": f"{S}SymbolSerializer", "value": "sym"}),
    (ModuleName("String"), {"_aj_serialized": f"{S}ModuleSerializer", "value": "String"}),
    (date(2026, 1, 2), {"_aj_serialized": f"{S}DateSerializer", "value": "2026-01-02"}),
    (AT, {"_aj_serialized": f"{S}TimeSerializer", "value": "2026-01-02T03:04:05.123456000Z"}),
    (BERLIN, {"_aj_serialized": f"{S}TimeSerializer", "value": "2026-01-02T03:04:05.000000000+01:00"}),
    (GlobalId("gid://app/User/1"), {"_aj_globalid": "gid://app/User/1"}),
    (
        timedelta(seconds=90),
        {
            "_aj_serialized": f"{S}DurationSerializer",
            "value": 90,
            "parts": [[{"_aj_serialized": f"{S}SymbolSerializer", "value": "seconds"}, 90]],
        },
    ),
    (Decimal("1.50"), {"_aj_serialized": f"{S}BigDecimalSerializer", "value": "1.50"}),
    (RubyRange(1, 5, True), {"_aj_serialized": f"{S}RangeSerializer", "begin": 1, "end": 5, "exclude_end": True}),
]


@pytest.mark.parametrize(("value", "encoded"), ALIKE)
def test_a_value_goes_and_comes_back(value: Any, encoded: Any) -> None:
    assert encode_arguments([value]) == [encoded]
    assert decode_arguments([encoded]) == ([value], {})
    assert type(decode_arguments([encoded])[0][0]) is type(value)


@pytest.mark.parametrize(
    ("encoded", "value"),
    [
        ({"a": 1, "b": 2, "_aj_symbol_keys": ["a"]}, {"a": 1, "b": 2}),
        ({"a": 1, "_aj_hash_with_indifferent_access": True}, {"a": 1}),
        ({"_aj_serialized": f"{S}DateTimeSerializer", "value": "2026-01-02T03:04:05.123456000+00:00"}, AT),
        (
            {
                "_aj_serialized": f"{S}TimeWithZoneSerializer",
                "value": "2026-01-02T03:04:05.000000000+01:00",
                "time_zone": "Europe/Berlin",
            },
            BERLIN,
        ),
        (
            {
                "_aj_serialized": f"{S}DurationSerializer",
                "value": 3900,
                "parts": [[{"_aj_serialized": f"{S}SymbolSerializer", "value": "hours"}, 1], ["minutes", 5]],
            },
            timedelta(hours=1, minutes=5),
        ),
    ],
)
def test_other_forms_of_rails_are_read_too(encoded: Any, value: Any) -> None:
    assert decode_arguments([encoded]) == ([value], {})


def test_a_symbol_as_a_key_is_one_in_ruby() -> None:
    encoded = encode_arguments([{Symbol("a"): {"b": {Symbol("c"): 1}}, "d": 2}])
    inner = {"c": 1, "_aj_symbol_keys": ["c"]}
    assert encoded == [{"a": {"b": inner, "_aj_symbol_keys": []}, "d": 2, "_aj_symbol_keys": ["a"]}]
    assert decode_arguments(encoded) == ([{"a": {"b": {"c": 1}}, "d": 2}], {})


@pytest.mark.parametrize(
    ("at", "written"),
    [
        (datetime(987, 1, 2, 3, 4, 5, 6, tzinfo=UTC), "0987-01-02T03:04:05.000006000Z"),
        (
            datetime(1880, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(minutes=53, seconds=28))),
            "1880-01-02T02:10:37.000000000Z",
        ),
        (datetime(2026, 1, 2, tzinfo=timezone(-timedelta(hours=3, minutes=30))), "2026-01-02T00:00:00.000000000-03:30"),
    ],
)
def test_a_time_of_any_year_and_zone_keeps_its_moment(at: datetime, written: str) -> None:
    (encoded,) = encode_arguments([at])
    assert encoded["value"] == written
    assert decode_arguments([encoded]) == ([at], {})


def test_keyword_arguments_travel_last_and_come_back_as_such() -> None:
    encoded = encode_arguments([1], {"a": 2, "b": {"c": 3}})
    assert encoded == [1, {"a": 2, "b": {"c": 3, "_aj_symbol_keys": []}, "_aj_ruby2_keywords": ["a", "b"]}]
    assert decode_arguments(encoded) == ([1], {"a": 2, "b": {"c": 3}})


@pytest.mark.parametrize(
    "value",
    [{"_aj_globalid": 1}, {1: 2}, object(), b"x", {1}, float("nan"), datetime(2026, 1, 1), {"_aj_serialized": "x"}],  # noqa: DTZ001
)
def test_what_has_no_form_there_is_refused(value: Any) -> None:
    with pytest.raises(InputError):
        encode_arguments([value])


@pytest.mark.parametrize(
    "encoded",
    [
        "text",
        [{"_aj_globalid": "gid://a/B/1", "x": 1}],
        [{"_aj_globalid": 5}],
        [{"_aj_serialized": "My::Own::Serializer", "value": 1}],
        [{"_aj_serialized": f"{S}DateSerializer", "value": "no date"}],
        [{"_aj_serialized": f"{S}DateSerializer"}],
        [{"_aj_serialized": f"{S}SymbolSerializer", "value": ["x"]}],
        [{"_aj_serialized": f"{S}BigDecimalSerializer", "value": "one"}],
        [{"_aj_serialized": f"{S}DurationSerializer", "value": 1, "parts": [["aeons", 1]]}],
        [{"_aj_serialized": f"{S}DurationSerializer", "value": 1e300}],
        [{"_aj_serialized": f"{S}TimeSerializer", "value": "2026-01-02T03:04:05"}],
    ],
)
def test_a_broken_form_is_refused(encoded: Any) -> None:
    with pytest.raises(InputError):
        decode_arguments(encoded)


def test_deep_nesting_is_refused_both_ways() -> None:
    value: list[Any] = []
    for _ in range(500):
        value = [value]
    with pytest.raises(InputError, match="deeper"):
        encode_arguments(value)
    with pytest.raises(InputError, match="deeper"):
        decode_arguments(value)


def test_a_wrapped_job_is_unwrapped() -> None:
    job = wrap("Mail::Job", [1, Symbol("x")], {"a": 2}, job_id="u-1", enqueued_at="2026-01-02T03:04:05Z", queue="low")
    assert is_wrapped(job)
    assert is_wrapped({"class": WRAPPER})
    assert not is_wrapped({"class": "Hard"})
    assert (job["class"], job["wrapped"], job["queue"]) == (OLD_WRAPPER, "Mail::Job", "low")
    inner = unwrap(job)
    assert (inner.job_class, inner.job_id, inner.arguments, inner.keywords) == ("Mail::Job", "u-1", (1, "x"), {"a": 2})


@pytest.mark.parametrize("args", [None, [], [5], [{}], [{"job_class": 5}], [{"job_class": "A", "arguments": 5}]])
def test_a_wrapper_around_nothing_is_refused(args: Any) -> None:
    with pytest.raises(InputError):
        unwrap({"class": OLD_WRAPPER, "args": args})


def test_rails_reads_what_is_written_and_what_rails_writes_is_read() -> None:
    values = [value for value, _ in ALIKE if not isinstance(value, GlobalId | Decimal | RubyRange)]
    script = """
        require "json"; require "active_job"; require "active_support/all"; require "active_job/base"
        require "active_job/arguments"
        read = ActiveJob::Arguments.deserialize(JSON.parse(STDIN.read))
        last = read.pop
        raise "no keyword: #{last}" unless last == {a: 2}
        puts JSON.generate(ActiveJob::Arguments.serialize(read))
    """
    done = subprocess.run(
        [ruby_program(), "-W0", "-e", script],
        input=json.dumps(encode_arguments(values, {"a": 2})),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if "cannot load such file" in done.stderr:
        missing("activejob", "ruby-activejob")
    assert done.returncode == 0, done.stderr
    assert decode_arguments(json.loads(done.stdout)) == (values, {})
