"""How often each worker ran, failed, and how long it took, in the keys that Sidekiq's metrics page reads.

The page of version 7 and the one of version 8 read different keys of the same facts, and neither the other's: both are
written.

=====================  ========================  ======================  ==============================================
what                   version 7                 version 8               data
=====================  ========================  ======================  ==============================================
a minute, 8 h          ``j|YYYYMMDD|H:M``        ``j|YYMMDD|H:MM``       hash: ``NAME|p`` runs, ``NAME|f`` failures,
                                                                         ``NAME|ms`` milliseconds of the others
ten minutes, 3 days                              ``j|YYMMDD|H:M``        the same; the minute's key less its last digit
histogram, 8 h         ``NAME-DD-HH:M``          ``h|NAME-D-H:M``        26 counters of 16 bits
=====================  ========================  ======================  ==============================================
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

__all__ = ["BOUNDS", "Figures", "Metrics", "commands", "day"]

BOUNDS: Final = (
    20, 30, 45, 65, 100, 150, 225, 335, 500, 750, 1_100, 1_700, 2_500, 3_800, 5_750, 8_500, 13_000, 20_000, 30_000, 45_000,
    65_000, 100_000, 150_000, 225_000, 335_000,
)  # fmt: skip
"""Milliseconds below which a job belongs into each counter of a histogram; there is one more for the rest."""

MAX_FIGURES: Final = 5_000
"""Pairs of worker and minute that are kept while they cannot be sent; the oldest are let go."""

_SHORT_S: Final = 8 * 3600
_LONG_S: Final = 3 * 24 * 3600
_MAX_NAME: Final = 255

Command = tuple[str | int, ...]


@dataclass(slots=True)
class Figures:
    """What jobs of one worker came to in one minute."""

    runs: int = 0
    failures: int = 0
    ms: int = 0
    histogram: dict[int, int] = field(default_factory=dict)

    def add(self, seconds: float, failed: bool) -> None:
        """Counts a job; how long a failed one took says nothing."""
        self.runs += 1
        if failed:
            self.failures += 1
            return
        ms = int(seconds * 1000 + 0.5)
        self.ms += ms
        counter = bisect_right(BOUNDS, ms)
        self.histogram[counter] = self.histogram.get(counter, 0) + 1

    def merge(self, other: Figures) -> None:
        """Adds another's counts."""
        self.runs += other.runs
        self.failures += other.failures
        self.ms += other.ms
        for counter, by in other.histogram.items():
            self.histogram[counter] = self.histogram.get(counter, 0) + by


class Metrics:
    """Figures by minute (of the epoch) and worker, bounded. Not for several threads at once."""

    def __init__(self) -> None:
        self._figures: dict[tuple[int, str], Figures] = {}

    def add(self, minute: int, ended: Iterable[tuple[str, float, bool]]) -> None:
        """Counts jobs of a minute: name, seconds and whether it raised of each. A name that the page could not read is left
        out."""
        known: dict[str, Figures] = {}
        for name, seconds, failed in ended:
            figures = known.get(name)
            if figures is None:
                figures = known[name] = self._of(minute, name)
            figures.add(seconds, failed)
        self._bound()

    def _of(self, minute: int, name: str) -> Figures:
        """Figures that are kept, or some that are thrown away."""
        if not name or len(name) > _MAX_NAME or "|" in name or not name.isprintable():
            return Figures()
        return self._figures.setdefault((minute, name), Figures())

    def take(self) -> dict[tuple[int, str], Figures]:
        """Everything, for whoever sends it."""
        taken, self._figures = self._figures, {}
        return taken

    def put_back(self, taken: Mapping[tuple[int, str], Figures]) -> None:
        """It could not be sent."""
        since, self._figures = self._figures, dict(taken)
        for key, figures in since.items():
            self._figures.setdefault(key, Figures()).merge(figures)
        self._bound()

    def _bound(self) -> None:
        while len(self._figures) > MAX_FIGURES:
            del self._figures[next(iter(self._figures))]


def day(seconds: int) -> str:
    """The day in UTC, as the names of counters have it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")


def commands(minute: int, figures: Mapping[str, Figures]) -> Iterator[Command]:
    """The commands that write the figures of a minute, by worker; keys are without the namespace."""
    at = datetime.fromtimestamp(minute * 60, UTC)
    eight = f"j|{at:%y%m%d}|{at.hour}:{at:%M}"
    hashes = {f"j|{at:%Y%m%d}|{at.hour}:{at.minute}": _SHORT_S, eight: _SHORT_S, eight[:-1]: _LONG_S}
    for key, keep_s in hashes.items():
        for name, each in figures.items():
            for field_name, by in (("p", each.runs), ("f", each.failures), ("ms", each.ms)):
                if by:
                    yield "HINCRBY", key, f"{name}|{field_name}", by
        yield "EXPIRE", key, keep_s
    for name, each in figures.items():
        if each.histogram:
            words = [word for n, by in sorted(each.histogram.items()) for word in ("INCRBY", "u16", f"#{n}", by)]
            histograms = (f"{name}-{at:%d-%H}:{at.minute}", f"h|{name}-{at.day}-{at.hour}:{at.minute}")
            for key in histograms:
                yield ("BITFIELD", key, "OVERFLOW", "SAT", *words)
                yield "EXPIRE", key, _SHORT_S
