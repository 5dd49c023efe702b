"""Priorities: which Task's jobs go first. Smaller runs first; any integer is legal."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Priority"]


class Priority(IntEnum):
    """Names for the usual cases.

    ``ADMIN_*``: someone acts and waits for it. ``USER_*``: crowds of end users. ``SYSTEM_*``: upkeep, when idle.
    """

    ADMIN_HIGH = 120
    USER_HIGH = 140
    SYSTEM_HIGH = 160
    ADMIN_MID = 220
    USER_MID = 240
    SYSTEM_MID = 260
    ADMIN_LOW = 320
    USER_LOW = 340
    SYSTEM_LOW = 360
