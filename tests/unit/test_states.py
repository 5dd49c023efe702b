"""The tables of states: every edge that is not in them is refused, and the docs show exactly them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from asynctask.core.states import (
    EVENT_EDGES,
    OPEN,
    PROBLEM,
    TASK_EDGES,
    TERMINAL,
    Edge,
    Reason,
    State,
    Status,
    check_event,
    check_task,
)
from asynctask.errors import TransitionRefused

PAGE = Path(__file__).parents[2] / "docs/reference/states.md"
Check = Callable[[str | None, str, Reason], Edge]
MACHINES = pytest.mark.parametrize(
    ("edges", "names", "check"),
    [(EVENT_EDGES, Status, check_event), (TASK_EDGES, State, check_task)],
    ids=["Event", "Task"],
)


def pages() -> Any:
    spec = importlib.util.spec_from_file_location("states", PAGE.parents[2] / "scripts/states.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def every_step(names: type[Status] | type[State]) -> Iterator[tuple[str | None, str, Reason]]:
    return product([None, *names], names, Reason)


@MACHINES
def test_every_step_outside_the_table_is_refused(
    edges: tuple[Edge, ...], names: type[Status] | type[State], check: Check
) -> None:
    legal = {(edge.source, edge.target, edge.reason) for edge in edges}
    refused = [step for step in every_step(names) if step not in legal]
    assert len(refused) == (len(names) + 1) * len(names) * len(Reason) - len(edges)
    for step in refused:
        with pytest.raises(TransitionRefused, match="cannot go from"):
            check(*step)


@MACHINES
def test_every_edge_of_the_table_is_legal_and_says_who_and_why(
    edges: tuple[Edge, ...], names: type[Status] | type[State], check: Check
) -> None:
    for edge in edges:
        assert check(edge.source, edge.target, edge.reason) is edge
        assert edge.who
        assert edge.why.strip()


@MACHINES
def test_no_edge_stands_in_the_table_twice(
    edges: tuple[Edge, ...], names: type[Status] | type[State], check: Check
) -> None:
    assert len({(edge.source, edge.target, edge.reason) for edge in edges}) == len(edges)


@MACHINES
def test_every_state_can_be_reached(edges: tuple[Edge, ...], names: type[Status] | type[State], check: Check) -> None:
    reached: set[str | None] = {None}
    for _ in names:
        reached |= {edge.target for edge in edges if edge.source in reached}
    assert reached == {None, *names}


@pytest.mark.parametrize("status", sorted(TERMINAL))
def test_a_terminal_status_is_left_by_an_explicit_retry_or_another_send_under_its_id_alone(status: Status) -> None:
    out = {(edge.target, edge.reason) for edge in EVENT_EDGES if edge.source == status}
    retried = set() if status is Status.FINISH else {(Status.ENQUEUE, Reason.RETRIED)}
    assert out == {(Status.ENQUEUE, Reason.SENT_AGAIN)} | retried


def test_every_status_is_open_or_terminal_and_never_both() -> None:
    assert set(Status) == OPEN | TERMINAL
    assert not OPEN & TERMINAL
    assert PROBLEM < TERMINAL


def test_a_task_that_is_over_is_left_by_an_explicit_retry_of_its_items_or_callbacks_alone() -> None:
    open_states = {State.SPLITTING, State.RUNNING, State.PAUSED, State.FINALIZING}
    out = {(edge.source, edge.reason) for edge in TASK_EDGES if edge.source is not None and edge.source not in open_states}
    again = (State.FINISHED, Reason.CALLED_AGAIN)
    assert out == {(State.FINISHED, Reason.RETRIED), (State.CANCELLED, Reason.RETRIED), again}


@pytest.mark.parametrize(("name", "edges"), [("event", EVENT_EDGES), ("task", TASK_EDGES)])
def test_the_docs_show_the_diagram_and_the_table_between_their_markers(name: str, edges: tuple[Edge, ...]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    shown = text.split(f"<!-- {name}: begin -->")[1].split(f"<!-- {name}: end -->")[0]
    assert pages().diagram(edges) in shown
    assert pages().table(edges) in shown


def test_the_page_of_states_is_the_generated_one() -> None:
    again = "docs/reference/states.md is not what the table says; run: python scripts/states.py > docs/reference/states.md"
    assert PAGE.read_text(encoding="utf-8") == pages().page(), again
