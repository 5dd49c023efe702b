"""Slices are written in their order, each while the next is gathered, and none after one that could not be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import pytest

from asynctask.lists.split import Writing
from asynctask.testing import wait_for


class Gone(Exception):
    """The ledger is away."""


def add_all(write: Callable[[int], None], things: Iterable[int], *, ahead: bool) -> None:
    with Writing(write, ahead=ahead) as writing:
        for thing in things:
            writing.add(thing)


def test_one_is_written_while_the_next_is_gathered_and_all_in_their_order() -> None:
    gate, begun, written = threading.Event(), threading.Event(), []

    def write(thing: int) -> None:
        if thing == 2:
            begun.set()
            assert gate.wait(120)
        written.append(thing)

    with Writing(write, ahead=True) as writing:
        writing.add(1)
        assert written == [1]
        writing.add(2)
        assert begun.wait(120)
        assert written == [1], "the caller went on while the second is being written"
        gate.set()
        for thing in range(3, 20):
            writing.add(thing)
    assert written == list(range(1, 20))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("split-writer")]


def test_without_a_thread_each_is_written_where_it_is_added() -> None:
    threads: list[threading.Thread] = []

    def note(thing: None) -> None:
        threads.append(threading.current_thread())

    with Writing(note, ahead=False) as writing:
        writing.add(None)
        writing.add(None)
    assert threads == [threading.current_thread()] * 2


@pytest.mark.parametrize("ahead", [True, False])
def test_nothing_is_written_after_what_could_not_be(ahead: bool) -> None:
    tried: list[int] = []

    def write(thing: int) -> None:
        tried.append(thing)
        if thing == 2:
            raise Gone

    with pytest.raises(Gone):
        add_all(write, (1, 2, 3), ahead=ahead)
    assert tried == [1, 2]


def fail_after_the_first(thing: int) -> None:
    if thing > 1:
        raise Gone


def test_the_last_that_could_not_be_written_is_told_at_the_end() -> None:
    with pytest.raises(Gone):
        add_all(fail_after_the_first, (1, 2), ahead=True)


def test_what_could_not_be_written_goes_before_what_ended_the_gathering() -> None:
    def gathered() -> Iterator[int]:
        yield from (1, 2)
        raise ValueError("a bad list")

    with pytest.raises(Gone) as raised:
        add_all(fail_after_the_first, gathered(), ahead=True)
    assert isinstance(raised.value.__context__, ValueError)


def test_an_end_of_the_program_waits_for_what_is_being_written_and_stays_what_it_is() -> None:
    gate, written = threading.Event(), []

    def write(thing: int) -> None:
        if thing > 1:
            assert gate.wait(120)
        written.append(thing)
        fail_after_the_first(thing)

    def leave() -> None:
        with Writing(write, ahead=True) as writing:
            writing.add(1)
            writing.add(2)
            opener.start()
            raise KeyboardInterrupt

    opener = threading.Thread(target=gate.set)
    with pytest.raises(KeyboardInterrupt):
        leave()
    assert written == [1, 2]
    wait_for(lambda: not opener.is_alive(), "the opener has ended")
