"""A job's payload has the bytes that Ruby gives it, and nothing is read that Ruby could not read."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.drawn import examples
from support.payloads import EDGES, TEXTS, VALUES
from support.redis_ruby import RubyJson

from asynctask.errors import InputError
from asynctask.sidekiq.payload import (
    MAX_BYTES,
    Malformed,
    build,
    check,
    decode_backtrace,
    dump,
    dump_any,
    encode_backtrace,
    normalise,
    parse,
    read_time,
    retries,
    write_time,
)

NOW = 1_763_700_000_123_456
JID = "0" * 20 + "abcd"

JOBS = st.dictionaries(TEXTS, VALUES, max_size=6)


@pytest.fixture(scope="module")
def ruby() -> Iterator[RubyJson]:
    with RubyJson() as process:
        yield process


def nested(depth: int) -> str:
    """A payload that nests so deep: the object is the first level."""
    return '{"args":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


# -- text


@settings(max_examples=examples(100, 300))
@given(JOBS)
@example({"a": EDGES})
def test_what_is_written_is_read_and_written_again_without_a_change(job: dict[str, Any]) -> None:
    text = dump(job)
    again = parse(text)
    assert dump(again) == text
    assert again == job
    assert list(again) == list(job)
    assert [type(value) for value in again.values()] == [type(value) for value in job.values()]


@settings(max_examples=examples(80, 200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JOBS)
@example({"a": EDGES})
def test_ruby_writes_the_same_bytes(ruby: RubyJson, job: dict[str, Any]) -> None:
    text = dump(job)
    assert ruby.echo(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "nul", "{", '{"a":1,}', '{"a":01}', '{"a":1.}', '{"a":.5}', '{"a":+1}', '{"a":-}', '{"a":NaN}',
        '{"a":Infinity}', '{"a":-Infinity}', '{"a":"\x01"}', '{"a":"\t"}', '{"a":"\\u12"}', '{"a":"\\ud800"}', '{"a":1}x',
        '{"a":1}\x00', '{"a":1}\x0c', '\ufeff{"a":1}', "{'a':1}", '{a:1}', nested(101),
    ],
)  # fmt: skip
def test_what_ruby_refuses_is_refused(ruby: RubyJson, text: str) -> None:
    assert ruby.echo(text) is None
    with pytest.raises(Malformed):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1e400}',  # Ruby reads infinity, and cannot write it
        '{"a":"\\udc00"}',  # half a character, which Ruby reads and cannot write
        '{"a":"\\ud800\\u0041"}',  # which Ruby reads as another character
        '{"a":"\\q"}',
        '{"n":12345678901234567890,"a":"\\ud800"}',
        '{"n":12345678901234567890,"a":1e400}',
        '{"n":12345678901234567890,"a":NaN}',
        '{"a":' + "9" * 5_000 + "}",
        "[1]",
        "5",
        '"text"',
        "null",
        "[" * 100_000,
        nested(200),
        nested(2_000),
    ],
)
def test_what_ruby_could_not_write_again_or_would_lose_is_refused(text: str) -> None:
    with pytest.raises(Malformed):
        parse(text)


@pytest.mark.parametrize("raw", [b'{"a":"\xff"}', b'{"a":"\xed\xa0\x80"}', b"\xff\xfe{\x00}\x00"])
def test_bytes_that_are_no_utf8_are_refused(raw: bytes) -> None:
    with pytest.raises(Malformed):
        parse(raw)


@pytest.mark.parametrize(
    "text", [' {"a" : [ -0, -0.0, 1E5, 1.50, "\\u00e4\\/\\ud83d\\ude00" ] }\n', '{"a":1,"b":2,"a":3}', nested(100), "{}"]
)
def test_what_ruby_reads_is_read_alike(ruby: RubyJson, text: str) -> None:
    assert dump(parse(text)) == ruby.echo(text)
    assert parse(text.encode()) == parse(text)


def test_a_payload_over_the_limit_is_refused_and_one_at_it_is_not() -> None:
    text = '{"a":"' + "x" * (MAX_BYTES - 8) + '"}'
    assert len(text) == MAX_BYTES
    parse(text)
    with pytest.raises(Malformed, match="the most is"):
        parse(text + " ")
    with pytest.raises(Malformed, match="the most is 10"):
        parse(b'{"a":12345}', max_bytes=10)


class Number(int):
    """An int that is none."""


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, "\ud800", {"a": "x\udfff"}, b"x", {1, 2}, object(), datetime(2026, 1, 1, tzinfo=UTC), [math.nan]],
)
def test_what_json_does_not_have_is_not_written(value: Any) -> None:
    with pytest.raises(Malformed):
        dump({"a": value})


def test_nothing_is_written_that_nests_deeper_than_ruby_reads() -> None:
    value: list[Any] = []
    for _ in range(98):
        value = [value]
    dump({"args": value})
    with pytest.raises(Malformed, match="deeper than 100"):
        dump({"args": [value]})
    for _ in range(3_000):
        value = [value]
    with pytest.raises(Malformed, match="deeper than 100"):
        dump({"args": value})


def test_a_long_text_full_of_brackets_is_not_deep() -> None:
    job = {"args": ["[" * 1_000 + "{" * 1_000]}
    assert parse(dump(job)) == job


# -- arguments


@pytest.mark.parametrize(
    ("args", "place"),
    [
        ([Number(1)], "args[0]"),
        ([(1, 2)], "args[0]"),
        ([1, {"a": [datetime(2026, 1, 1, tzinfo=UTC)]}], "args[1].a[0]"),
        ([{1: 2}], "args[0]"),
        ([{"a": Decimal(1)}], "args[0].a"),
        ([math.nan], "args[0]"),
        ([{"a": b"x"}], "args[0].a"),
    ],
)
def test_arguments_that_would_not_come_back_as_they_went_are_refused_by_place(args: list[Any], place: str) -> None:
    with pytest.raises(InputError) as caught:
        check(args)
    assert [problem.column for problem in caught.value.errors] == [place]
    assert place in str(caught.value)


@given(st.lists(VALUES, max_size=4))
def test_plain_arguments_are_taken(args: list[Any]) -> None:
    check(args)


# -- a job


def test_a_job_is_built_with_its_members_in_rubys_order_and_times_in_float_seconds() -> None:
    job = build("Hard", [1], jid=JID, created_at=NOW, enqueued_at=NOW, retry=5, queue="low", tags=["a"])
    assert dump(job) == (
        '{"retry":5,"queue":"low","class":"Hard","args":[1],"tags":["a"],"jid":"00000000000000000000abcd",'
        '"created_at":1763700000.123456,"enqueued_at":1763700000.123456}'
    )


def test_a_job_gets_what_it_does_not_bring_and_keeps_what_it_brings() -> None:
    job, due = normalise({"class": "Hard", "args": (1, 2)}, jid=JID, now=NOW)
    assert job == {
        "retry": True,
        "queue": "default",
        "class": "Hard",
        "args": [1, 2],
        "jid": JID,
        "created_at": 1763700000.123456,
    }
    assert due is None
    own = {"class": "H", "args": [], "jid": "x", "created_at": 5.0, "queue": "low", "retry": False, "pool": 1, "foo": [1]}
    job, due = normalise({**own, "at": 1763800000.5, "client_class": "C", "retry_for": 60.9}, jid=JID, now=NOW)
    assert job == {**{name: own[name] for name in own if name != "pool"}, "retry_for": 60}
    assert due == 1_763_800_000_500_000


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("text", "a mapping with 'class' and 'args'"),
        ({"class": "H"}, "a mapping with 'class' and 'args'"),
        ({"args": [], "at": "x"}, "a mapping with 'class' and 'args'"),
        ({"class": 5, "args": "x"}, "'args' must be a list"),
        ({"class": 5, "args": [], "at": "x"}, "'class' must be"),
        ({"class": "", "args": []}, "'class' must be"),
        ({"class": "H", "args": [], "at": "x", "tags": "x"}, "'at' must be"),
        ({"class": "H", "args": [], "at": True}, "'at' must be"),
        ({"class": "H", "args": [], "at": math.nan}, "'at' must be"),
        ({"class": "H", "args": [], "tags": "x", "retry_for": 2e9}, "'tags' must be"),
        ({"class": "H", "args": [], "retry_for": 1_000_000_001, "queue": ""}, "'retry_for' must be"),
        ({"class": "H", "args": [object()], "queue": ""}, "the name of a queue"),
        ({"class": "H", "args": [], "queue": None}, "the name of a queue"),
        ({"class": "H", "args": [], "queue": "a,b"}, "cannot be a queue"),
        ({"class": "H", "args": [], "queue": "a\nb"}, "cannot be a queue"),
        ({"class": "H", "args": [], "queue": "sq|x"}, "private lists"),
        ({"class": "H", "args": [object()]}, "native JSON types"),
    ],
)
def test_a_job_is_checked_in_sidekiqs_order(item: Any, said: str) -> None:
    with pytest.raises(InputError) as caught:
        normalise(item, jid=JID, now=NOW)
    assert said in str(caught.value)


# -- times, retries, backtraces


@pytest.mark.parametrize(
    ("value", "micros"),
    [
        (1763700000.123456, NOW),
        (1763700000123, 1_763_700_000_123_000),
        (1763700000, 1_763_700_000_000_000),
        (100_000_000_000, 100_000_000_000_000),
        (99_999_999_999, 99_999_999_999_000_000),
        (0, 0),
        ("1763700000", None),
        (None, None),
        (True, None),
        (math.nan, None),
        (math.inf, None),
        (10**400, None),
        ([1], None),
    ],
)
def test_times_are_read_as_seconds_or_milliseconds_and_nothing_else_is_a_time(value: Any, micros: int | None) -> None:
    assert read_time(value) == micros


@given(st.integers(0, 4_000_000_000_000_000))
def test_a_time_that_was_written_is_read_to_the_microsecond(at: int) -> None:
    assert read_time(write_time(at)) == at
    assert read_time(parse(dump({"at": write_time(at)}))["at"]) == at


@pytest.mark.parametrize(
    ("value", "count"),
    [(True, 25), (3, 3), (0, 0), (-1, 0), (False, None), (None, None), ("5", 25), (2.5, 25), ("", 25), ([], 25), ({}, 25)],
)
def test_only_false_and_null_mean_no_retry(value: Any, count: int | None) -> None:
    assert retries(value) == count


def test_the_default_number_of_retries_is_the_readers() -> None:
    assert retries(True, 7) == 7


@given(st.lists(TEXTS, max_size=8))
def test_a_backtrace_comes_back(lines: list[str]) -> None:
    packed = encode_backtrace(lines)
    assert "\n" not in packed
    assert decode_backtrace(packed) == lines
    assert decode_backtrace(base64.encodebytes(base64.b64decode(packed)).decode()) == lines


@pytest.mark.parametrize(
    "value",
    [
        None,
        5,
        "",
        "no base64!",
        base64.b64encode(b"no zlib").decode(),
        base64.b64encode(zlib.compress(b"no json")).decode(),
        base64.b64encode(zlib.compress(b'"text"')).decode(),
    ],
)
def test_a_backtrace_that_cannot_be_read_is_none_at_all(value: Any) -> None:
    assert decode_backtrace(value) == []


def test_a_backtrace_that_unpacks_to_a_hundred_megabytes_is_none_at_all() -> None:
    assert decode_backtrace(base64.b64encode(zlib.compress(b" " * 100_000_000)).decode()) == []


def test_a_backtrace_that_is_a_list_is_read_too() -> None:
    assert decode_backtrace(["a", "b"]) == ["a", "b"]


def test_a_long_integer_that_looks_like_a_float_elsewhere_stays_whole() -> None:
    text = '{"a":18446744073709551616,"b":-9223372036854775809,"c":1}'
    assert dump(parse(text)) == text
    assert dump_any([10**30]) == "[" + "1" + "0" * 30 + "]"
