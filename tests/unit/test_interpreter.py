"""What a worker process changes of its interpreter, unless somebody has decided on it; on every release of Python."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from asynctask.runtime.process import collect_seldom

FRESH = subprocess.run(
    [sys.executable, "-c", "import gc; print(*gc.get_threshold())"],
    capture_output=True,
    text=True,
    check=True,
).stdout.split()
THRESHOLDS = tuple(map(int, FRESH))

PROBE = """
import gc
{before}
from asynctask.runtime.process import collect_seldom
frozen = gc.get_freeze_count()  # 3.12 starts with some
collect_seldom()
print(gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > frozen)
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", f"True {(50_000, *THRESHOLDS[1:])} True"),
        ("gc.set_threshold(1234, 5, 6)", "True (1234, 5,"),
        ("gc.disable()", f"False {THRESHOLDS} False"),
    ],
)
def test_the_collector_is_left_as_somebody_has_set_it(before: str, after: str) -> None:
    said = subprocess.run(  # a process of its own: what is frozen stays so
        [sys.executable, "-c", PROBE.format(before=before)], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert said.startswith(after)
    assert said.endswith("True" if not before else "False")


@pytest.mark.parametrize("thresholds", [(700, 10, 10), (2000, 10, 10), (2000, 10, 0)])
def test_the_collector_runs_seldom_whatever_this_release_starts_with(
    monkeypatch: pytest.MonkeyPatch, thresholds: tuple[int, ...]
) -> None:
    before = gc.get_threshold()
    set_to: list[tuple[int, ...]] = []
    monkeypatch.setattr(gc, "get_threshold", lambda: thresholds)
    monkeypatch.setattr(gc, "set_threshold", lambda *given: set_to.append(given))
    monkeypatch.setattr(gc, "freeze", lambda: None)
    collect_seldom()
    monkeypatch.undo()
    assert set_to == [(50_000, *thresholds[1:])]
    assert gc.get_threshold() == before
