"""Progress as it moves: bars on a terminal, now and then a line elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asynctask.cli.output import STYLES, Output, clean, number

__all__ = ["Bars", "duration", "headline", "summary"]

STATUSES: Final = ("finish", "failed", "error", "cancelled", "working", "enqueue", "stopped")
_LINE_EVERY_S: Final = 2.0
_BAR_WIDTH: Final = 46


def duration(seconds: float | None) -> str:
    """Seconds as people say them: 12 s, 3 min 5 s, 2 h 10 min; nothing for None."""
    if seconds is None:
        return ""
    if 0 < seconds < 1:
        return "under 1 s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def headline(progress: Mapping[str, Any]) -> str:
    """Which Task it is."""
    title = clean(progress["title"], longest=60)
    return f"Task {progress['task_id']} · {clean(progress['worker'])}" + (f" · {title}" if title else "")


def summary(progress: Mapping[str, Any]) -> Text:
    """The counts by status; those that are 0 are left out."""
    counts, rejected = progress["counts"], progress["split"]["rejected"]
    parts = [(name, counts[name]) for name in STATUSES if counts[name]]
    parts += [("rejected", rejected)] if rejected else []
    parts += [("waiting for a retry", progress["retrying"])] if progress.get("retrying") else []
    styled = [Text(f"{name} {number(count)}", style=STYLES.get(name, "")) for name, count in parts]
    return Text(" · ").join(styled) if styled else Text("nothing yet")


def pace(progress: Mapping[str, Any]) -> str:
    """How far, how fast and how long still, as far as that is known."""
    figures = progress["progress"]
    percent = "" if figures["percent"] is None else f"{figures['percent']:.2f} %"
    rate = f"{figures['rate_per_s']:,.0f}/s" if figures["rate_per_s"] and not progress["done"] else ""
    left = duration(figures["eta_s"]) if not progress["done"] else ""
    reason = (progress["state_reason"] or "").partition(": ")[0]  # a rejected list's whole reason is a line of its own
    state = clean(progress["state"]) + (f" ({clean(reason)})" if reason else "")
    return "  ".join(part for part in (percent, state, rate, f"{left} left" if left else "") if part)


class Bars:
    """One bar for each Task that is watched, as a context manager.

    Arguments: ``monotonic``, seconds of a clock, decides how often a line is written where no terminal is.
    """

    def __init__(self, out: Output, monotonic: Callable[[], float]) -> None:
        self._out = out
        self._monotonic = monotonic
        self._seen: dict[int, Mapping[str, Any]] = {}
        self._notes: dict[int, str] = {}
        self._said: dict[int, tuple[float, str, str]] = {}
        self._live = Live(console=out.console, auto_refresh=False) if out.terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, progress: Mapping[str, Any]) -> None:
        """Shows a Task as it is now."""
        key = progress["task_id"]
        self._seen[key] = progress
        self._notes.pop(key, None)
        self._redraw(key)

    def note(self, task_id: int, text: str) -> None:
        """Says under a Task's bar why it does not move, until it is shown the next time."""
        if self._notes.get(task_id) != text:
            self._notes[task_id] = text
            if self._live is None:
                self._out.note(text)
            else:
                self._redraw(task_id)

    def _redraw(self, key: int) -> None:
        if self._live is not None:
            self._live.update(Group(*(self._drawn(each) for each in self._seen)), refresh=True)
        elif self._due(key):
            progress = self._seen[key]
            self._out.line(f"{headline(progress)}: {pace(progress)}: {summary(progress).plain}")

    def _due(self, key: int) -> bool:
        progress, now = self._seen[key], self._monotonic()
        said_at, state, text = self._said.get(key, (float("-inf"), "", ""))
        line = pace(progress) + summary(progress).plain
        if progress["state"] == state and not progress["done"] and now - said_at < _LINE_EVERY_S:
            return False
        self._said[key] = (now, progress["state"], line)
        return line != text

    def _drawn(self, key: int) -> RenderableType:
        progress = self._seen[key]
        percent = progress["progress"]["percent"]
        bar = ProgressBar(
            total=None if percent is None and not progress["done"] else 100,
            completed=percent or 0,
            width=min(_BAR_WIDTH, max(10, self._out.console.width - 34)),
            animation_time=self._monotonic(),
        )
        line = Table.grid(padding=(0, 2))
        line.add_row(bar, Text(pace(progress), style=STYLES.get(progress["state"], "")))
        parts: list[RenderableType] = [Text(headline(progress), style="bold", overflow="ellipsis", no_wrap=True), line]
        parts.append(summary(progress))
        if key in self._notes:
            parts.append(Text(self._notes[key], style="yellow"))
        return Group(*parts)
