"""How long a thread waits before it asks a server again that did not answer."""

from __future__ import annotations

from typing import Final

__all__ = ["LONGEST_S", "pause_s"]

LONGEST_S: Final = 5.0
"""Seconds, at most: so long after a server is back, everybody has noticed."""

_FIRST_S: Final = 0.2
_DOUBLINGS: Final = 10  # a day without an answer is some twenty thousand tries: 2 to that power is no float


def pause_s(tries: int) -> float:
    """Seconds before the next try when ``tries``, at least one, have failed: twice as many each time, and not for ever."""
    return min(_FIRST_S * (1 << min(tries - 1, _DOUBLINGS)), LONGEST_S)
