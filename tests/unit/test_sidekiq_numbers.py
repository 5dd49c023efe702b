"""Numbers that Ruby's json writes in two ways, by its age: what came keeps its text, new times have one in both."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drawn import examples
from support.ruby_floats import newer, older

from asynctask.brokers.admin import Entry, pushed_again
from asynctask.brokers.base import Copy, SetEntry
from asynctask.clock import SECOND, micros
from asynctask.sidekiq.copies import buried
from asynctask.sidekiq.envelope import sealed_for_set
from asynctask.sidekiq.payload import dump, parse, write_time
from asynctask.sidekiq.sharing import after_failure

OWN = [
    "1e+15", "1.0e+15", "1.234567890123456e+15", "1e+300", "1.0e+300", "0.00001", "1.0e-05", "0.0000001", "1.0e-07",
    "1e-10", "1.5e-10", "-0.0", "1e+8", "8.811702216063932e+5", "2.5e-4", "1768972899.3817241", "383536.49686200003",
    "1180591620717411300000.0", "100000000000000.0", "36893488147419103232", "-1.0e+16", "1000000000000000.0",
]  # fmt: skip
"""Texts that a Ruby writes, of json 2.6, 2.11 or 2.21."""

NOW = 1_763_800_001_250_000


def a_text(number: str) -> str:
    return f'{{"class":"w","args":[{number}],"x":{{"y":{number}}},"jid":"j","queue":"default","created_at":{number}}}'


@pytest.mark.parametrize("number", OWN)
def test_a_number_that_ruby_wrote_keeps_its_text_wherever_a_job_is_written_again(number: str) -> None:
    text = a_text(number)
    copy = Copy("j", 0, "default", text)
    entry = Entry("5.0-j", copy, 5, text)
    kept = f'"args":[{number}],"x":{{"y":{number}}},"jid":"j","queue":"default","created_at":{number}'
    for again in (
        sealed_for_set(copy),
        after_failure(copy, ValueError(), NOW).payload,
        buried(copy, NOW, "E", "m").payload,
        pushed_again("retry", entry, NOW).payload,
        sealed_for_set(after_failure(copy, ValueError(), NOW)),
    ):
        assert kept in again
    assert SetEntry(copy, 5).copy.payload == text


@pytest.mark.parametrize(
    ("number", "said"),
    [
        ("1.50", "1.5"),
        ("1E5", "100000.0"),
        ("1e5", "100000.0"),
        ("1e20", "1.0e+20"),
        ("1e-05", "1.0e-05"),
        ("-0", "0"),
        ("0.1000000000000000055511151231257827", "0.1"),
    ],
)
def test_a_text_that_no_ruby_writes_becomes_what_ruby_would_write(number: str, said: str) -> None:
    assert dump(parse(f'{{"a":[{number},1e+15]}}', keep_numbers=True)) == f'{{"a":[{said},1e+15]}}'


@settings(max_examples=examples(150, 500))
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_what_either_ruby_wrote_is_written_again_as_it_was(number: float) -> None:
    for text in (older(number), newer(number)):
        assert float(text) == number
        assert dump(parse(f'{{"a":{text}}}', keep_numbers=True)) == f'{{"a":{text}}}'
        assert dump(parse(f'{{"a":[null,{{"b":{text}}}]}}', keep_numbers=True)) == f'{{"a":[null,{{"b":{text}}}]}}'


def test_a_new_time_has_one_text_in_every_ruby() -> None:
    drawn = random.Random(5)
    for _ in range(3_000):
        at = drawn.randrange(1_100_000_000 * SECOND, 4_200_000_000 * SECOND)
        written = write_time(at)
        assert micros(written) == at
        assert older(written) == newer(written) == repr(written)
    plain = 1_768_972_899_381_724 / SECOND
    assert (older(plain), newer(plain)) == ("1768972899.381724", "1768972899.3817241"), "what it is there for"


def test_a_new_float_in_the_common_range_has_one_text_but_for_its_last_digits() -> None:
    for number in (0.0, -0.0, 0.1, 1e-4, 999999999999999.9, 123456789012345.0, 1.5, -2.75e10):
        assert dump({"a": number}) == f'{{"a":{older(number)}}}' == f'{{"a":{newer(number)}}}'
