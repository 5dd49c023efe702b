"""What travels with a copy in its payload: written by hand where its names are plain, and the same as by the encoder."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from asynctask.brokers.base import Copy
from asynctask.sidekiq.envelope import opened, sealed

PLAIN = st.text("abcXYZ0189_.:-", min_size=1, max_size=64)
ANY = st.text(
    st.characters(codec="utf-8", categories=["L", "N", "P", "S"], exclude_characters='"\\{}'), min_size=1, max_size=64
)


@given(
    jid=PLAIN | ANY,
    queue=PLAIN | ANY,
    attempt=st.integers(1, 2**31 - 1),
    priority=st.integers(-(2**31) + 1, 2**31 - 1),
    task_id=st.none() | st.integers(0, 2**63 - 1),
    args=st.lists(st.integers() | st.text(st.characters(codec="utf-8"))),
)
def test_a_copy_comes_back_as_it_went(
    jid: str, queue: str, attempt: int, priority: int, task_id: int | None, args: list[int | str]
) -> None:
    payload = json.dumps({"class": "Note", "args": args})
    copy = Copy(jid, attempt, queue, payload, priority, task_id)
    text = sealed(copy)
    assert opened(text.encode(), queue) == copy
    members = {"jid": jid, "attempt": attempt, "task_id": task_id, "priority": priority or None}
    expected = {name: value for name, value in members.items() if value is not None}
    assert text.startswith(payload[:-1])
    assert list(json.loads(text)["asynctask"].items()) == list(expected.items()), "in this order, and nothing else"
