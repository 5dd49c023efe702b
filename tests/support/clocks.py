"""A clock that moves when it is told to."""

from __future__ import annotations

__all__ = ["SettableClock"]


class SettableClock:
    """Stands still between two changes of ``seconds``."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> int:
        """Microseconds."""
        return int(self.seconds * 1_000_000)

    def monotonic(self) -> float:
        """Seconds."""
        return self.seconds

    def boottime(self) -> int:
        """Microseconds."""
        return self.now()
