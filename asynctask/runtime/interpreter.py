"""How often a worker's interpreter collects garbage."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from functools import cache
from typing import Final

SELDOM: Final = 50_000
"""Allocations between collections. A process holds some thousand jobs at a time, of a few dozen short-lived objects each.
With CPython's own threshold these alone trigger full collections repeatedly: a third of the processor time."""

_ASK: Final = "import gc, json; print(json.dumps(gc.get_threshold()))"
_ANSWER_S: Final = 30.0


@cache
def defaults() -> tuple[int, ...] | None:
    """The collector's thresholds in a fresh interpreter, since releases differ: 700 objects up to 3.12, 2,000 from 3.13 on.
    None if that fails.

    They tell a setting of the application from an unchanged one.
    """
    if not sys.executable:  # Python is embedded in another program
        return None
    try:
        # -I and -S: ignores the environment and a sitecustomize of the machine.
        said = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=_ANSWER_S,
            cwd=os.sep,
        )
        return tuple(json.loads(said.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def collect_seldom() -> None:
    """Reduces garbage collections, in a process whose only purpose is to perform jobs, after its start.

    Objects that exist now stay as long as the process and are not examined again. Memory is freed as before: the collector
    handles reference cycles only. Changes nothing if thresholds were set, or the collector was turned off.
    """
    found = defaults()
    if found is None or not gc.isenabled() or gc.get_threshold() != found:
        return
    gc.collect()
    gc.freeze()
    gc.set_threshold(SELDOM, *found[1:])
