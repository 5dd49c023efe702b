"""Settings of a worker's interpreter: the thresholds of the garbage collector, and the switch interval of threads."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import Final

SELDOM: Final = 50_000
"""Allocations between collections. A process holds some thousand jobs at a time, of a few dozen short-lived objects each.
With CPython's own threshold these alone trigger full collections repeatedly: a third of the processor time."""

OFTEN_S: Final = 0.00005
"""Switch interval while jobs take their time. With CPython's 5 ms, a job of one millisecond would wait that long for the
interpreter whenever outcomes are written or jobs are read."""

MOST_THREADS: Final = 10
"""With more threads the default interval stays: a thread that waits for the interpreter wakes up once per interval. With
100 threads and :data:`OFTEN_S` these wake-ups take more processor time than the jobs."""

QUICK_S: Final = 0.0003
"""Shorter jobs come by ten thousands per second; frequent thread switches then cost more than they gain."""

_ASK: Final = "import gc, json, sys; print(json.dumps([gc.get_threshold(), sys.getswitchinterval()]))"
_ANSWER_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Defaults:
    """The defaults of an interpreter of this version: the collector's thresholds, and the switch interval in seconds."""

    thresholds: tuple[int, ...]
    switch_s: float


@cache
def defaults() -> Defaults | None:
    """Reads the defaults from a fresh interpreter, since releases differ: 700 objects up to 3.12, 2,000 from 3.13 on. None
    if that fails.

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
        thresholds, switch_s = json.loads(said.stdout)
        return Defaults(tuple(thresholds), switch_s)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def collect_seldom() -> None:
    """Reduces garbage collections, in a process whose only purpose is to perform jobs, after its start.

    Objects that exist now stay as long as the process and are not examined again. Memory is freed as before: the collector
    handles reference cycles only. Changes nothing if thresholds were set, or the collector was turned off.
    """
    found = defaults()
    if found is None or not gc.isenabled() or gc.get_threshold() != found.thresholds:
        return
    gc.collect()
    gc.freeze()
    gc.set_threshold(SELDOM, *found.thresholds[1:])


class Switching:
    """The switch interval of a process whose only purpose is to perform jobs in ``threads``, by their durations.

    Changes nothing if the application has set an interval, and with more than :data:`MOST_THREADS`.
    """

    def __init__(self, threads: int) -> None:
        found = defaults()
        self._default_s = sys.getswitchinterval()
        self._is_ours = threads <= MOST_THREADS and found is not None and found.switch_s == self._default_s
        self._now = self._default_s
        self._jobs = 0
        self._quick = 0

    def follow(self, jobs: int, quick: int) -> None:
        """Adapts to ``jobs`` performed in all, ``quick`` of them within :data:`QUICK_S`.

        The duration of most jobs decides, not the average: of no-op jobs a few wait for the interpreter, the longer the
        more threads there are.
        """
        done, were_quick = jobs - self._jobs, quick - self._quick
        if done <= 0:
            return
        self._jobs, self._quick = jobs, quick
        self._set(self._default_s if were_quick * 2 > done else OFTEN_S)

    def end(self) -> None:
        """Restores the interval."""
        self._set(self._default_s)

    def _set(self, wanted: float) -> None:
        if self._is_ours and wanted != self._now:
            sys.setswitchinterval(wanted)
            self._now = wanted
