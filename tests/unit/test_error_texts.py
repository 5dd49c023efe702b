"""What the messages of similar errors have in common, and the traceback that an Event keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, SecretStr

from asynctask import AsyncTask
from asynctask.integrations.base import Performed
from asynctask.job import CurrentJob, awaited_in_this_process, in_this_process
from asynctask.ledger.events import Failure, group_of
from asynctask.lists.items import ItemShape
from asynctask.messages import MASK, MAX_TEMPLATE, MAX_TRACEBACK, SECRET, secrets_in, template_of, traceback_of
from asynctask.middleware.tracker import NO_TICKET


@pytest.mark.parametrize(
    ("message", "template"),
    [
        ("user 123 not found", "user ‹n› not found"),
        ("user 124 not found", "user ‹n› not found"),
        ("took 3.5 s at 10.0.0.1:8000, not 1,000", "took ‹n› s at ‹n›, not ‹n›"),
        ("KeyError: 'sku'", "KeyError: ‹text›"),
        ("can't open 'a b' or \"c\" or `d`", "can't open ‹text› or ‹text› or ‹text›"),
        ("order 550e8400-e29b-41d4-a716-446655440000", "order ‹id›"),
        ("<Shop object at 0x7f3a2b>", "<Shop object at ‹id›>"),
        ("cus_9s6XKzkNRiz8i3, commit 9f8a7b", "cus_‹id›, commit ‹id›"),
        ("utf8: seller is not qualified", "utf‹n›: seller is not qualified"),
        ("it isn't, it wasn't", "it isn't, it wasn't"),
        ("'one line\nanother'", "'one line\nanother'"),
        ("", ""),
    ],
)
def test_what_varies_has_a_placeholder(message: str, template: str) -> None:
    assert template_of(message) == template


TEXTS = st.text() | st.text(alphabet="ab9f-'\"` \n›‹.,:0x_zé٣", max_size=60)


@given(TEXTS)
@example("'a 'b' c'")
@example("5'x'")
@example("g9aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee")
def test_the_template_of_a_template_is_the_same_and_bounded(message: str) -> None:
    template = template_of(message)
    assert template_of(template) == template
    assert len(template) <= MAX_TEMPLATE


@pytest.mark.parametrize("part", ["'", "a'", "' ", "9a", "a", "aaaaaaaa-", "1.", "`\"'", "1 "])
def test_a_message_of_any_length_costs_what_its_beginning_costs(part: str) -> None:
    """The steps of a regular expression are not counted anywhere: an exponential one would not end."""
    assert template_of(part * 5_000) == template_of((part * 5_000)[:2_000])


@given(TEXTS, TEXTS)
def test_groups_of_different_codes_or_statuses_are_never_one(first: str, second: str) -> None:
    kinds = [("failed", "failed"), ("failed", "error"), ("raised", "error"), ("sold_out", "failed"), ("timeout", "error")]
    digests = [{group_of(Failure(code, message), status) for message in (first, second)} for code, status in kinds]
    assert len(set.union(*digests)) == sum(map(len, digests))
    assert (len(digests[0]) == 1) is (template_of(first) == template_of(second))
    assert len(digests[3]) == 1, "a code of its own"


# -- tracebacks


def worker(item: dict[str, Any]) -> int:
    return int(item["n"]) + len(item["name"])


def raised(call: Callable[[], Any]) -> BaseException:
    try:
        in_this_process(call)
    except BaseException as error:
        return error
    raise AssertionError("it did not raise")


def kept(call: Callable[[], Any], args: Any = None) -> str:
    found = traceback_of(raised(call), args)
    assert found is not None
    return found


def test_a_traceback_begins_with_the_frame_of_the_worker_and_has_no_values_of_variables() -> None:
    text = kept(lambda: worker({"n": "4711x"}))
    assert text.startswith("Traceback (most recent call last):\n")
    assert "job.py" not in text
    assert text.endswith("ValueError: invalid literal for int() with base 10: '4711x'")
    item: dict[str, Any] = {"n": 1, "name": 5, "other": "hunter" + "2"}
    assert item["other"] not in kept(lambda: worker(item)).replace(__file__, "")


def test_that_of_a_coroutine_has_no_frames_of_the_event_loop() -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise ValueError("in a coroutine")

    async def perform() -> None:
        await awaited_in_this_process(work())

    text = kept(lambda: asyncio.run(perform()))
    assert "asyncio" not in text.replace("test_error_texts", "")
    assert "in work" in text


def test_an_error_without_a_frame_of_the_application_has_none() -> None:
    assert traceback_of(ValueError("made, not raised")) is None
    assert traceback_of(raised(lambda: in_this_process(int, "x"))) is None


def test_it_names_the_errors_that_led_to_it() -> None:
    def work() -> None:
        try:
            worker({"n": 1})
        except KeyError as error:
            raise RuntimeError("the item is wrong") from error

    text = kept(work)
    assert text.index("KeyError: 'name'") < text.index("direct cause") < text.index("RuntimeError: the item is wrong")


def deep(levels: int) -> None:
    if levels:
        deeper(levels - 1)
    raise ValueError("at the bottom" + "!" * 100_000)


def deeper(levels: int) -> None:
    deep(levels)


def test_of_a_long_one_the_last_frames_and_both_ends_of_the_message_are_kept() -> None:
    text = kept(lambda: deep(300))
    assert len(text.encode()) <= MAX_TRACEBACK
    assert "in deep" in text.rpartition("bytes are left out ...")[0].rpartition("bytes are left out ...")[2]
    assert "ValueError: at the bottom!" in text
    assert text.endswith("!")


def test_secrets_of_the_item_are_masked() -> None:
    secret = "hunter2"

    def work() -> None:
        raise ValueError(f"refused: {secret} of ann")

    args = [{"user": "ann", "password": {SECRET: "hunter2"}, "pin": {SECRET: [12]}}]
    assert secrets_in(args) == {"hunter2"}, "shorter texts are parts of most others"
    assert f"refused: {MASK} of ann" in kept(work, args)
    assert secret not in kept(work, args)


def test_a_secret_is_masked_as_python_quotes_it_and_in_each_of_its_lines() -> None:
    """A key of several lines, in the message of a KeyError and of an error within a group."""
    secret = "-- key --\nfirst\\'\"line\nsecond line"

    def quoted() -> None:
        raise KeyError(secret)

    def grouped() -> None:
        raise ExceptionGroup("several", [ValueError(secret)])

    for work in (quoted, grouped):
        text = kept(work, [{"key": {SECRET: secret}}])
        assert MASK in text
        assert not any(part in text for part in ("first", "second line"))


class Login(BaseModel):
    user: str
    password: SecretStr


def test_secrets_in_the_message_of_an_attached_engine_are_masked_too() -> None:
    """Their arguments arrive without the marks of an Event."""
    app = AsyncTask(environ={})
    app.worker(name="log_in")(lambda login: None)
    worker = replace(app.workers["log_in"], model=Login, shape=ItemShape(Login))
    for args in ([{"user": "ann", "password": "hunter2"}], 5):
        job = CurrentJob("a", payload={"args": args, "kwargs": {}})
        current = Performed(NO_TICKET, job=job, worker=worker, performer=None, message=None)
        error = raised(lambda: deep_secret("hunter" + "2"))
        current.raised(error)
        assert current.result is not None
        assert current.result.traceback is None, "it may be no error to its engine"
        current.raised(error, error)
        assert str(current.result.traceback).endswith(f"ValueError: refused: {MASK if args != 5 else 'hunter2'}")


def deep_secret(text: str) -> None:
    raise ValueError(f"refused: {text}")


class Broken(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Halves(Exception):
    def __str__(self) -> str:
        return "half \ud800, and \0"


def test_an_exception_that_cannot_be_shown_does_not_prevent_its_record() -> None:
    def broken() -> None:
        raise Broken

    def halves() -> None:
        raise Halves

    assert "Broken" in kept(broken)
    assert kept(halves).encode()
    assert "\0" not in kept(halves)


def test_a_group_shows_its_exceptions() -> None:
    def work() -> None:
        raise ExceptionGroup("two", [ValueError("one"), KeyError("other")])

    assert {"ValueError: one" in kept(work), "KeyError: 'other'" in kept(work)} == {True}


def test_arguments_that_contain_themselves_are_searched_once() -> None:
    args: list[Any] = [{SECRET: "hunter2"}]
    args.append(args)
    assert secrets_in(args) == {"hunter2"}
