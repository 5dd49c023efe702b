"""Output of the commands: one JSON document with ``--json``, else text; errors and remedies go to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import TracebackType
from typing import IO, Any, Final, Self, TypeVar

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asynctask.errors import AsyncTaskError, Problem, SchemaOutdated, Unavailable
from asynctask.logs import escaped

OK: Final = 0
FAILURES: Final = 1
USAGE: Final = 2
UNAVAILABLE: Final = 3
INTERNAL: Final = 70  # EX_SOFTWARE: a bug in AsyncTask
DETACHED: Final = 130  # Ctrl-C, as in shells

_SHOWN_PROBLEMS: Final = 10
_BLANKS: Final = str.maketrans("\n\r\t", "   ")
STYLES: Final = {
    "finish": "green",
    "failed": "yellow",
    "error": "red",
    "rejected": "yellow",
    "cancelled": "magenta",
    "paused": "magenta",
    "running": "cyan",
    "working": "cyan",
}


def clean(value: Any, *, longest: int | None = None) -> str:
    """A value as text for one line of a terminal; line breaks become blanks, and other control characters are
    :func:`~asynctask.logs.escaped`.

    Arguments: ``longest``, the most characters to keep. None becomes the empty text.
    """
    text = "" if value is None else str(value)
    if longest is not None and len(text) > longest:
        text = text[: longest - 1] + "…"
    return escaped(text.translate(_BLANKS))


def number(value: int | float) -> str:
    """A number for people: 10,000."""
    return f"{value:,}"


def count(value: int, noun: str) -> str:
    """A count with its noun: 1 row, 10,000 rows."""
    return f"{number(value)} {noun}{'' if value == 1 else 's'}"


def exit_code(error: BaseException) -> int:
    """The exit code of a command that ends with this error."""
    return UNAVAILABLE if isinstance(error, Unavailable | SchemaOutdated) else USAGE


Column = str | int | Callable[[Any], Any]


def said_by(group: Mapping[str, Any]) -> str:
    """What the failures of a group have in common; the message of a single one."""
    return str(group["message"] if group["count"] == 1 else group["template"])


COUNTED: Final[Mapping[str, Column]] = {"count": lambda row: number(row["count"]), "status": "status", "message": said_by}
"""The columns of grouped failures."""


class Output:
    """The output of one call of the program.

    Arguments: ``stdout`` and ``stderr``, by default the process's at the time of the call. ``json``: a document instead of
    text. A terminal gets tables and colours, anything else plain lines.
    """

    def __init__(self, stdout: IO[str] | None = None, stderr: IO[str] | None = None, *, json: bool = False) -> None:
        self.json = json
        self._stdout = stdout or sys.stdout
        self._stderr = stderr or sys.stderr
        self.console = Console(file=self._stdout, highlight=False, markup=False, emoji=False)

    @property
    def terminal(self) -> bool:
        """Whether the output is for a person at a terminal."""
        return not self.json and self.console.is_terminal

    def document(self, value: Any) -> None:
        """Writes the JSON document of a command; nothing without ``--json``."""
        if self.json:
            self._stdout.write(escaped(json.dumps(value, ensure_ascii=False, indent=2, default=str), is_json=True) + "\n")
            self._stdout.flush()

    def line(self, text: str = "", *, style: str = "") -> None:
        """Writes a line of text; nothing with ``--json``. The caller cleans untrusted text."""
        if self.json:
            return
        if self.console.is_terminal:
            self.console.print(Text(text, style=style), soft_wrap=True)
        else:
            self._stdout.write(text + "\n")
        self._stdout.flush()

    def table(
        self, columns: Mapping[str, Column], rows: Iterable[Any], *, longest: int = 200, wraps: str = "", nothing: str = ""
    ) -> None:
        """Writes rows under the headers of their columns: a rich table on a terminal, else columns of plain text.

        ``columns``: under each header a member of the row, or what a function makes of it; ``wraps`` names the only column
        whose cells may wrap on a terminal, by default all may; ``nothing``: the line that stands for a table without rows.
        """
        if self.json:
            return
        shown, headers = columns.values(), list(columns)
        cells = [[clean(it(row) if callable(it) else row[it], longest=longest) for it in shown] for row in rows]
        if nothing and not cells:
            self.line(nothing)
            return
        if self.console.is_terminal:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
            for header in headers:
                table.add_column(header, no_wrap=bool(wraps) and header != wraps)
            for row in cells:
                table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
            self.console.print(table)
        else:
            self._plain([headers, *cells])
        self._stdout.flush()

    def _plain(self, lines: list[list[str]]) -> None:
        # Terminal cells, not characters: a Chinese character is two wide.
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True))
            self._stdout.write("  ".join(padded).rstrip() + "\n")

    def fields(self, values: Mapping[str, Any]) -> None:
        """Writes names and values, one a line, without those that are None."""
        width = max(map(len, values), default=0)
        for name, value in values.items():
            if value is not None:
                self.line(f"{name:<{width}}  {clean(value)}")

    def problems(self, problems: Sequence[Problem]) -> None:
        """Writes the first problems of an input's rows, and the number of the others."""
        rows = problems[:_SHOWN_PROBLEMS]
        if rows:
            names = ("row", "column", "code", "message", "value")
            self.table({name: attrgetter(name) for name in names}, rows, longest=80)
        if len(problems) > len(rows):
            self.line(f"... and {number(len(problems) - len(rows))} more")

    def note(self, text: str) -> None:
        """Writes a line to stderr; nothing with ``--json``."""
        if not self.json:
            self._stderr.write(text + "\n")
            self._stderr.flush()

    def error(self, error: Exception) -> int:
        """Writes an error to stderr and returns its exit code."""
        code = getattr(error, "code", None) if isinstance(error, AsyncTaskError) else "usage"
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        problems: Sequence[Problem] = getattr(error, "errors", ())
        suggested: Sequence[Mapping[str, Any]] = getattr(error, "suggestions", ())
        if self.json:
            found = {"code": code, "message": message, "errors": [p.as_dict() for p in problems]}
            if suggested:
                found["suggestions"] = list(suggested)
            if sheets := getattr(error, "sheets", ()):
                found["sheets"] = list(sheets)
            text = json.dumps({"error": found}, ensure_ascii=False, default=str)
            self._stderr.write(escaped(text, is_json=True) + "\n")
        else:
            self._stderr.write(f"error: {clean(message)}\n")
            for problem in problems[:_SHOWN_PROBLEMS]:
                self._stderr.write(f"  {clean(_located(problem))}\n")
            if len(problems) > _SHOWN_PROBLEMS:
                self._stderr.write(f"  ... and {number(len(problems) - _SHOWN_PROBLEMS)} more\n")
            if suggested:
                self._stderr.write("It may be one of these; send it again with the one that reads right:\n")
            for each in suggested:
                cells = ", ".join(clean(cell, longest=40) for cell in each["cells"])
                self._stderr.write(f"  --encoding {each['encoding']:<12}  {cells}\n")
        self._stderr.flush()
        return exit_code(error)


def _located(problem: Problem) -> str:
    where = [f"row {problem.row}"] if problem.row is not None else []
    where += [str(problem.column)] if problem.column else []
    value = "" if problem.value is None else f" ({clean(problem.value, longest=80)!r})"
    return f"{', '.join(where)}: {problem.message}{value}" if where else problem.message + value


# -- progress: bars on a terminal, elsewhere a line every two seconds

STATUSES: Final = ("finish", "failed", "error", "cancelled", "working", "enqueue", "stopped")
_LINE_EVERY_S: Final = 2.0
_REDRAW_EVERY_S: Final = 0.1
_BAR_WIDTH: Final = 46


def duration(seconds: float | None) -> str:
    """Seconds for people: 12 s, 3 min 5 s, 2 h 10 min; empty for None."""
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
    """A Task by id, worker and title."""
    title = clean(progress["title"], longest=60)
    return f"Task {progress['task_id']} · {clean(progress['worker'])}" + (f" · {title}" if title else "")


def summary(progress: Mapping[str, Any]) -> Text:
    """The counts by status, without zeros."""
    counts, rejected = progress["counts"], progress["split"]["rejected"]
    parts = [(name, counts[name]) for name in STATUSES if counts[name]]
    parts += [("rejected", rejected)] if rejected else []
    parts += [("waiting for a retry", progress["retrying"])] if progress.get("retrying") else []
    styled = [Text(f"{name} {number(count)}", style=STYLES.get(name, "")) for name, count in parts]
    return Text(" · ").join(styled) if styled else Text("nothing yet")


def state_of(progress: Mapping[str, Any]) -> str:
    """The state, and why it is so; the whole reason of a rejected list is a line of its own. Of a Task that ended without a
    success that is said, so that it does not look like one; of one that has not begun, its start time."""
    reason = (progress["state_reason"] or "").partition(": ")[0]
    if not reason and _fell_short(progress) and not progress["counts"]["finish"]:
        reason = "nothing succeeded"
    if not reason and progress["state"] in ("splitting", "running", "paused"):
        start = None if progress["started_at"] else progress["control"]["start_at"]
        reason = "" if start is None else f"not before {start[:16].replace('T', ' ')}"
    return clean(progress["state"]) + (f" ({clean(reason)})" if reason else "")


def _fell_short(progress: Mapping[str, Any]) -> bool:
    """Whether a Task finished with rows that did not succeed."""
    return progress["state"] == "finished" and any(progress["counts"][kind] for kind in ("failed", "error"))


def style_of(progress: Mapping[str, Any]) -> str:
    """The colour of a Task: that of its state, and of one that finished by what came of its rows."""
    if _fell_short(progress):
        return STYLES["failed" if progress["counts"]["finish"] else "error"]
    return STYLES.get("finish" if progress["state"] == "finished" else progress["state"], "")


def pace(progress: Mapping[str, Any]) -> str:
    """Percent, state, rate and remaining time, as far as known."""
    figures = progress["progress"]
    percent = "" if figures["percent"] is None else f"{figures['percent']:.2f} %"
    rate = f"{figures['rate_per_s']:,.0f}/s" if figures["rate_per_s"] and not progress["done"] else ""
    left = duration(figures["eta_s"]) if not progress["done"] else ""
    return "  ".join(part for part in (percent, state_of(progress), rate, f"{left} left" if left else "") if part)


class _Drawn:
    """Base of what is redrawn on a terminal while a block runs, and printed as lines elsewhere; a context manager."""

    def __init__(self, out: Output, monotonic: Callable[[], float], *, transient: bool = False) -> None:
        self._out = out
        self._monotonic = monotonic
        self._live = Live(console=out.console, auto_refresh=False, transient=transient) if out.terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()


class Bars(_Drawn):
    """A progress bar for each watched Task; a context manager.

    Arguments: ``monotonic``, a clock in seconds, limits how often a line is written without a terminal.
    """

    def __init__(self, out: Output, monotonic: Callable[[], float]) -> None:
        super().__init__(out, monotonic)
        self._seen: dict[int, Mapping[str, Any]] = {}
        self._notes: dict[int, str] = {}
        self._printed: dict[int, tuple[float, str, str]] = {}

    def show(self, progress: Mapping[str, Any], note: str = "") -> None:
        """Shows a Task as it is, with a note as of :meth:`note`."""
        key = progress["task_id"]
        self._seen[key] = progress
        if not note:
            self._notes.pop(key, None)
        self._redraw(key)
        if note:
            self.note(key, note)

    def note(self, task_id: int, text: str) -> None:
        """Shows a note under a Task's bar, such as why it does not move, until the next :meth:`show`."""
        if self._notes.get(task_id) != text:
            self._notes[task_id] = text
            if self._live is None:
                self._out.note(text)
            else:
                self._redraw(task_id)

    def _redraw(self, key: int) -> None:
        if self._live is not None:
            self._live.update(Group(*(self._render(each) for each in self._seen)), refresh=True)
        elif self._due(key):
            progress = self._seen[key]
            self._out.line(f"{headline(progress)}: {pace(progress)}: {summary(progress).plain}")

    def _due(self, key: int) -> bool:
        progress, now = self._seen[key], self._monotonic()
        printed_at, state, text = self._printed.get(key, (float("-inf"), "", ""))
        line = pace(progress) + summary(progress).plain
        if progress["state"] == state and not progress["done"] and now - printed_at < _LINE_EVERY_S:
            return False
        self._printed[key] = (now, progress["state"], line)
        return line != text

    def _render(self, key: int) -> RenderableType:
        progress = self._seen[key]
        percent = progress["progress"]["percent"]
        bar = ProgressBar(
            total=None if percent is None and not progress["done"] else 100,
            completed=percent or 0,
            width=min(_BAR_WIDTH, max(10, self._out.console.width - 34)),
            animation_time=self._monotonic(),
        )
        line = Table.grid(padding=(0, 2))
        line.add_row(bar, Text(pace(progress), style=style_of(progress)))
        parts: list[RenderableType] = [Text(headline(progress), style="bold", overflow="ellipsis", no_wrap=True), line]
        parts.append(summary(progress))
        if key in self._notes:
            parts.append(Text(self._notes[key], style="yellow"))
        return Group(*parts)


Row = TypeVar("Row")


class RowsWritten(_Drawn):
    """The progress of writing a file of rows: one changing line on a terminal, elsewhere a line every two seconds (none for
    a faster file); a context manager.

    Arguments: ``monotonic``, a clock in seconds; ``what``, the file; ``total``, the rows that are expected.
    """

    def __init__(self, out: Output, monotonic: Callable[[], float], what: str, total: int) -> None:
        super().__init__(out, monotonic, transient=True)
        self._what, self._total, self._written = what, total, 0
        self._shown_at = monotonic()

    def counted(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows, each counted when the next one is asked for."""
        for row in rows:
            yield row
            self._written += 1
            self.show()

    def show(self) -> None:
        """Updates the line unless it was updated just now. Call it often, also before the first row."""
        now = self._monotonic()
        if now - self._shown_at < (_LINE_EVERY_S if self._live is None else _REDRAW_EVERY_S):
            return
        self._shown_at = now
        done = f"{number(self._written)} of {count(self._total, 'row')}" if self._written else "the list is read"
        if self._live is None:
            self._out.line(f"{self._what}: {done}")
        else:
            self._live.update(Text(f"{self._what}: {done}"), refresh=True)
