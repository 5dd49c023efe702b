"""How often a worker process has Python look for garbage."""

from __future__ import annotations

import gc
from typing import Final

__all__ = ["AS_DELIVERED", "SELDOM", "look_seldom"]

AS_DELIVERED: Final = (700, 10, 10)
"""CPython's own thresholds."""

SELDOM: Final = (50_000, 10, 10)
"""A process holds some thousand jobs at a time, each of a few dozen objects, that live for a fraction of a second. By
CPython's thresholds that alone has every object of the program looked at again and again: a third of the processor."""


def look_seldom() -> None:
    """For a process whose only purpose is to perform jobs, once it is up.

    What is there now stays as long as the process, and is not looked at any more. Memory is freed as before: the collector
    is for circles of objects only. Nothing is changed where somebody has set thresholds, or has turned the collector off.
    """
    if not gc.isenabled() or gc.get_threshold() != AS_DELIVERED:
        return
    gc.collect()
    gc.freeze()
    gc.set_threshold(*SELDOM)
