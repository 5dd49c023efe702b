"""Knobs turned while jobs wait: how soon the starts show it, and how many come too late under the old knob.

    python -m benchmarks.knobs [-n N] [--runs R] [--long S] [--loads LOAD,...] [--server KIND] [--redis] [--json]

Five Tasks of ``-n`` items wait for two worker processes of five threads each. In each load the pause, ``parallel``, the
interval and the priority are changed at drawn moments, each of a Task of its own, and put back. The loads: ``fast``, jobs
that do nothing; ``slow``, jobs of ``--long`` seconds, so that one starts about every second; ``turn``, jobs that do nothing
until just before the change, and take ``--long`` seconds from then on. The jobs keep a book of their own of when they begin
and end, which is compared with the moment at which the change was accepted. A start more than a second after it that only
the old knob allows is late; the figure is how many are, and it must be 0. Where a Task becomes more urgent, those of the
Task behind it are late. It shows with its own first start, which may wait for a thread where each has a job of ``--long``
seconds: the first start of any Task after the change is shown beside it.
"""

from __future__ import annotations

import argparse
import math
import mmap
import random
import statistics
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asynctask import AsyncTask, current_job
from asynctask.clock import SystemClock
from asynctask.errors import Conflict
from asynctask.task import TaskHandle
from asynctask.testing import wait_for
from benchmarks import common
from benchmarks.chaos_jobs import Book
from benchmarks.children import await_worker, child
from benchmarks.common import Place, Result, Unaccounted

__all__ = ["Episode", "Start", "build", "judge", "main"]

LOADS: Final = ("fast", "slow", "turn")
WORKERS: Final = 2
THREADS: Final = 5
IN_TIME_S: Final = 1.0
"""After a change is accepted; a start that only the old knob allows is late from then on."""

INTERVAL_S: Final = 2.0
URGENT, USUAL, LESS = 100, 200, 300
_EARLY_S: Final = 0.01
"""So much sooner than its interval a round may begin: threads differ in when they write their books."""

_clock = SystemClock()


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 1 where a start was late, too."""
    parser = common.arguments(__doc__, n=100_000)
    parser.add_argument("--runs", type=int, default=3, help="of each load (default 3)")
    parser.add_argument("--long", type=float, default=10.0, metavar="S", help="how long a long job takes (default 10)")
    parser.add_argument("--loads", type=_loads, default=LOADS, help=f"of {','.join(LOADS)} (default all)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default 1)")
    late: list[float] = []

    def measured(options: argparse.Namespace) -> Result:
        result = measure(options)
        late.append(result.ours)
        return result

    return common.run(parser, argv, measured) or int(any(late))


def _loads(text: str) -> tuple[str, ...]:
    loads = tuple(text.split(","))
    if unknown := set(loads) - set(LOADS):
        raise argparse.ArgumentTypeError(f"no such load: {', '.join(sorted(unknown))}; there are {', '.join(LOADS)}")
    return loads


# -- the jobs


class Speed:
    """How long a job takes from now on, for all processes: eight bytes of a file that all of them map."""

    def __init__(self, folder: Path) -> None:
        path = folder / "speed"
        if not path.exists():
            path.write_bytes(struct.pack("d", 0.0))
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 8)

    def get(self) -> float:
        """Seconds."""
        return float(struct.unpack("d", self._bytes[:])[0])

    def set(self, seconds: float) -> None:
        """Jobs that run end at once where it is 0."""
        self._bytes[:] = struct.pack("d", seconds)


def build(place: Place) -> AsyncTask:
    """The application: one worker, whose jobs write down when they begin and end."""
    # Without the share for larger priorities, which would start some of the less urgent Task at any time.
    app = place.app(background_share=0.0)
    (place.folder / "book").mkdir(exist_ok=True)
    book, speed = Book(place.folder), Speed(place.folder)

    @app.worker(name="job", retry=0)
    def perform(item: dict[str, Any]) -> None:
        task_id = current_job().task_id
        began = _clock.monotonic()
        book.note("B", began, task_id)
        while (left := began + speed.get() - _clock.monotonic()) > 0:
            time.sleep(min(left, 0.1))  # the job itself: nothing waits for it here
        book.note("E", _clock.monotonic(), task_id)

    return app


# -- what the book says


@dataclass(frozen=True, slots=True)
class Start:
    """A job began at ``at``; ``beside`` jobs of its Task were running."""

    at: float
    beside: int


@dataclass(frozen=True, slots=True)
class Episode:
    """A change of a Task's knob (``knob``: what changed), asked for at ``asked`` (0: at ``at``), accepted at ``at`` and
    observed until ``until``.

    ``limit``: the ``parallel`` that forbids what the other value allows, or that of the rounds, which are ``interval_s``
    apart. ``behind``: the Task that may start nothing more while this one waits, since the change.
    """

    load: str
    knob: str
    task_id: int
    at: float
    until: float
    limit: int = 0
    interval_s: float = INTERVAL_S
    behind: int = 0
    asked: float = 0.0


_STOPS = frozenset({"pause", "less urgent", "parallel lower", "interval set"})
"""Changes that forbid starts; the others allow more."""


def judge(episode: Episode, starts: Sequence[Start], behind: Sequence[Start] = ()) -> tuple[float, int]:
    """Seconds until the starts of a Task, in their order, show a change, and how many were late.

    A change that forbids starts shows with the last one that only the old knob allows; one that allows more shows with the
    first start of the new sort, which may come before the caller hears that it is accepted, and raises :class:`Unaccounted`
    if none comes. ``behind``: the starts of the Task that has to wait behind it since.
    """
    stops = episode.knob in _STOPS
    since = episode.at if stops else episode.asked or episode.at
    telling = [each.at for each in _telling(episode, starts) if since < each.at <= episode.until]
    if stops:
        shown = max(telling, default=episode.at) - episode.at
        return shown, sum(at - episode.at > IN_TIME_S for at in telling)
    if not telling:
        raise Unaccounted(f"{episode.load}: {episode.knob} never showed in {episode.until - episode.at:.1f} s")
    return max(0.0, telling[0] - episode.at), sum(episode.at + IN_TIME_S < each.at <= episode.until for each in behind)


def first_start(episode: Episode, starts: Iterable[Start]) -> float:
    """Seconds until the first start after a change, of whatever Task: until then no thread came free."""
    return min((each.at - episode.at for each in starts if episode.at < each.at <= episode.until), default=math.inf)


def _telling(episode: Episode, starts: Sequence[Start]) -> Iterator[Start]:
    """The starts that only one of the two values allows."""
    recent: deque[float] = deque()
    for start in starts:
        while recent and recent[0] <= start.at - episode.interval_s + _EARLY_S:
            recent.popleft()
        if episode.knob.startswith("parallel"):
            tells = start.beside >= episode.limit
        elif episode.knob.startswith("interval"):
            tells = len(recent) >= episode.limit
        else:
            tells = True
        recent.append(start.at)
        if tells:
            yield start
        elif episode.knob == "interval set" and start.at <= episode.at:
            recent.clear()


def read_book(folder: Path) -> dict[int, list[Start]]:
    """The starts of each Task, in their order."""
    lines = [line.split() for path in (folder / "book").iterdir() for line in path.read_text().splitlines()]
    starts: dict[int, list[Start]] = {}
    running: dict[int, int] = {}
    for kind, at, task in sorted(lines, key=lambda words: (float(words[1]), words[0] == "B")):
        task_id = int(task)
        if kind == "B":
            starts.setdefault(task_id, []).append(Start(float(at), running.get(task_id, 0)))
        running[task_id] = running.get(task_id, 0) + (1 if kind == "B" else -1)
    return starts


# -- a run


class Run:
    """One load on a fresh database: turns each knob and notes when each change was accepted."""

    def __init__(
        self, app: AsyncTask, load: str, long_s: float, draw: random.Random, speed: Speed, n: int, idle: Callable[[], bool]
    ) -> None:
        self._app = app
        self._idle = idle
        # Longer than the jobs take: else they keep the rounds apart, and the interval never shows.
        self._interval_s = 1.5 * long_s if load == "slow" else INTERVAL_S
        self._load = load
        self._long_s = long_s
        self._draw = draw
        self._speed = speed
        self._pause = threading.Event()
        self.episodes: list[Episode] = []
        # Each change has a Task of its own, for those that run fast are soon over.
        self.paused, self.limited, self.timed, self.first, self.other = (self._submit(n) for _ in range(5))

    def _submit(self, n: int) -> TaskHandle:
        task = self._app.submit("job", ({"n": i} for i in range(n)), title="knobs", priority=USUAL)
        task.pause()
        return task

    def perform(self) -> None:
        """All changes, each from jobs as the load has them."""
        if self._load == "slow":
            self._speed.set(self._long_s)
        task = self.paused
        self._settle(task.resume)
        self._turn("pause", task, task.pause)
        self._turn("resume", task, task.resume, begins=True)
        task.pause()
        task = self.limited
        self._settle(lambda: (task.update(parallel=THREADS), task.resume()))
        self._turn("parallel lower", task, lambda: task.update(parallel=1), limit=1)
        self._turn("parallel higher", task, lambda: task.update(parallel=THREADS), limit=1, begins=True)
        task.pause()
        timed = self.timed
        self._settle(lambda: (timed.update(parallel=2), timed.resume()))
        self._turn("interval set", timed, lambda: timed.update(interval=self._interval_s), limit=2)
        if self._load == "slow":
            # All of a pause between two rounds: at its end, the next one would take the places first.
            wait_for(lambda: not self._idle(), "a round runs", 5 * self._long_s)
            wait_for(self._idle, "the next round waits for its time", 5 * self._long_s)
        self._turn("interval off", timed, lambda: timed.update(interval=0.0), limit=2, begins=True)
        timed.pause()
        first, other = self.first, self.other
        self._settle(lambda: (first.update(priority=URGENT), first.resume(), other.update(priority=LESS), other.resume()))
        self._turn("less urgent", first, lambda: first.update(priority=LESS + 1))
        self._settle(lambda: other.update(priority=LESS + 2))
        self._turn("more urgent", other, lambda: other.update(priority=URGENT), begins=True, behind=first)

    def end(self) -> None:
        """Nothing begins any more. Raises :class:`Unaccounted` where a Task ran out of items."""
        try:
            for task in (self.paused, self.limited, self.timed, self.first, self.other):
                task.pause()
        except Conflict as error:
            raise Unaccounted(f"{error}: give a larger -n, or a shorter --long") from error

    def _settle(self, act: Callable[[], object]) -> None:
        """Another state to begin from."""
        act()
        self._wait(IN_TIME_S)

    def _turn(
        self,
        knob: str,
        task: TaskHandle,
        act: Callable[[], object],
        *,
        limit: int = 0,
        begins: bool = False,
        behind: TaskHandle | None = None,
    ) -> None:
        """One change. ``begins``: it shows when jobs begin that the old value forbade; ``behind``: as of an Episode."""
        self._wait(self._draw.uniform(0.3, 1.3))
        if self._load == "turn":
            self._speed.set(self._long_s)
            self._wait(self._draw.uniform(0.0, 0.5))
        asked = _clock.monotonic()
        act()
        at = _clock.monotonic()
        if begins and self._load == "turn":
            self._speed.set(0.0)  # the threads are taken by long jobs: they would show when these end
        quick = self._load == "fast" or (self._load == "turn" and begins)
        # Until the places of an interval would be taken a second time.
        long = (2.2 if knob == "interval set" else 1.2) * self._long_s
        self._wait(IN_TIME_S + (INTERVAL_S if quick else long))
        if self._load == "turn":
            self._speed.set(0.0)
        until = _clock.monotonic()
        of_behind = 0 if behind is None else behind.id
        self.episodes.append(Episode(self._load, knob, task.id, at, until, limit, self._interval_s, of_behind, asked))

    def _wait(self, seconds: float) -> None:
        self._pause.wait(seconds)


def _one_run(options: argparse.Namespace, load: str, draw: random.Random) -> list[tuple[Episode, float, int, float]]:
    with common.place(options) as place, closing(build(place)) as app, ExitStack() as stack:
        speed = Speed(place.folder)
        run = Run(app, load, options.long, draw, speed, options.n, lambda: not _running(place.folder))
        for number in range(WORKERS):
            process = stack.enter_context(child("worker", place, "-c", str(THREADS), "--knobs"))
            await_worker(app, process, number + 1)
        run.perform()
        run.end()
        speed.set(0.0)
        wait_for(lambda: not _running(place.folder), "no job runs", 60)
        if findings := app.doctor():
            raise Unaccounted("; ".join(f"{each.code}: {each.message}" for each in findings))
        starts = read_book(place.folder)
    every = [each for of_task in starts.values() for each in of_task]
    return [
        (each, *judge(each, starts.get(each.task_id, []), starts.get(each.behind, [])), first_start(each, every))
        for each in run.episodes
    ]


def _running(folder: Path) -> int:
    text = "".join(path.read_text() for path in (folder / "book").iterdir())
    return text.count("B ") - text.count("E ")


def measure(options: argparse.Namespace) -> Result:
    """Each load ``--runs`` times."""
    if options.runs < 1 or not 1 <= options.long <= 60 or options.n < 2_000:
        raise common.Refused("--runs must be at least 1, --long from 1 to 60, -n at least 2000")
    draw = random.Random(options.seed)
    found = [one for _ in range(options.runs) for load in options.loads for one in _one_run(options, load, draw)]
    shown: dict[tuple[str, str], list[float]] = {}
    first: dict[tuple[str, str], list[float]] = {}
    for episode, seconds, _, any_s in found:
        shown.setdefault((episode.load, episode.knob), []).append(seconds)
        if episode.behind:
            first.setdefault((episode.load, episode.knob), []).append(any_s)
    settings: dict[str, Any] = {**common.setting(options), "processes": WORKERS, "threads": THREADS, "seed": options.seed}
    for (load, knob), each in shown.items():
        settings[f"{load}: {knob}"] = f"median {statistics.median(each):.3f} s, at most {max(each):.3f} s"
        if freed := first.get((load, knob)):
            settings[f"{load}: {knob}"] += (
                f"; any start: median {statistics.median(freed):.3f} s, at most {max(freed):.3f} s"
            )
    for episode, _, late, _ in found:
        if late:
            name = f"LATE {episode.load}: {episode.knob}"
            settings[name] = settings.get(name, 0) + late
    late = sum(late for _, _, late, _ in found)
    settings["changes"] = len(found)
    return Result("knobs", options.n, late, None, None, "late starts", settings)


if __name__ == "__main__":
    sys.exit(main())
