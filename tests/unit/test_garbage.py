"""A worker process looks for garbage seldom, unless somebody has decided how often."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import gc
{before}
from asynctask.runtime.garbage import look_seldom
look_seldom()
print(gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0)
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "True (50000, 10, 10) True"),
        ("gc.set_threshold(1234, 5, 6)", "True (1234, 5, 6) False"),
        ("gc.disable()", "False (700, 10, 10) False"),
    ],
)
def test_the_collector_is_left_as_somebody_has_set_it(before: str, after: str) -> None:
    said = subprocess.run(  # a process of its own: what is frozen stays so
        [sys.executable, "-c", PROBE.format(before=before)], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == after
