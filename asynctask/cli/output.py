"""What the commands write: one JSON document with ``--json``, else text for people; errors on stderr with how to mend."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any, Final

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asynctask.errors import AsyncTaskError, Problem, SchemaOutdated, Unavailable

__all__ = [
    "DETACHED",
    "FAILURES",
    "INTERNAL",
    "OK",
    "UNAVAILABLE",
    "USAGE",
    "Output",
    "clean",
    "count",
    "exit_code",
    "number",
]

OK: Final = 0
FAILURES: Final = 1
USAGE: Final = 2
UNAVAILABLE: Final = 3
INTERNAL: Final = 70  # EX_SOFTWARE: a bug of ours
DETACHED: Final = 130  # Ctrl-C, as shells have it

_SHOWN_PROBLEMS: Final = 10
# Text that turns the rest of a line around: a title could make a command's output say what it does not.
_TURNING: Final = frozenset("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
STYLES: Final = {
    "finish": "green",
    "finished": "green",
    "failed": "yellow",
    "error": "red",
    "rejected": "yellow",
    "cancelled": "magenta",
    "paused": "magenta",
    "running": "cyan",
    "working": "cyan",
}


def clean(value: Any, *, longest: int | None = None) -> str:
    """A value as text for one line of a terminal: what could steer the terminal is written out as an escape.

    Arguments: ``longest``, the most characters to keep. None becomes the empty text.
    """
    text = "" if value is None else str(value)
    if longest is not None and len(text) > longest:
        text = text[: longest - 1] + "…"
    if text.isprintable() and not _TURNING.intersection(text):
        return text
    return "".join(_shown(c) for c in text)


def _shown(character: str) -> str:
    if character in "\n\r\t":
        return " "
    unsafe = character in _TURNING or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
    return character.encode("unicode_escape").decode() if unsafe else character


def number(value: int | float) -> str:
    """A count for people: 10,000."""
    return f"{value:,}"


def count(value: int, noun: str) -> str:
    """Things for people: 1 row, 10,000 rows."""
    return f"{number(value)} {noun}{'' if value == 1 else 's'}"


def exit_code(error: BaseException) -> int:
    """The exit code that an error ends the command with."""
    return UNAVAILABLE if isinstance(error, Unavailable | SchemaOutdated) else USAGE


class Output:
    """Where one call of the program writes.

    Arguments: ``stdout`` and ``stderr``, by default the process's own at the time of the call. ``json``: a document
    instead of text. A terminal is given tables and colours, anything else plain lines.
    """

    def __init__(self, stdout: IO[str] | None = None, stderr: IO[str] | None = None, *, json: bool = False) -> None:
        self.json = json
        self._stdout = stdout or sys.stdout
        self._stderr = stderr or sys.stderr
        self.console = Console(file=self._stdout, highlight=False, markup=False, emoji=False)

    @property
    def terminal(self) -> bool:
        """Whether a person is looking on."""
        return not self.json and self.console.is_terminal

    def document(self, value: Any) -> None:
        """Writes the one JSON document of a command; nothing without ``--json``."""
        if self.json:
            self._stdout.write(json.dumps(value, ensure_ascii=False, indent=2, default=str) + "\n")
            self._stdout.flush()

    def line(self, text: str = "", *, style: str = "") -> None:
        """Writes a line for people; nothing with ``--json``. What came from outside has to be cleaned by the caller."""
        if self.json:
            return
        if self.console.is_terminal:
            self.console.print(Text(text, style=style), soft_wrap=True)
        else:
            self._stdout.write(text + "\n")
        self._stdout.flush()

    def table(self, headers: Sequence[str], rows: Iterable[Sequence[Any]], *, longest: int = 200, wraps: str = "") -> None:
        """Writes rows under headers: a rich table on a terminal, else columns of plain text.

        ``wraps`` names the one column whose cells may take several lines of a terminal; by default all may.
        """
        if self.json:
            return
        cells = [[clean(cell, longest=longest) for cell in row] for row in rows]
        if self.console.is_terminal:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
            for header in headers:
                table.add_column(header, no_wrap=bool(wraps) and header != wraps)
            for row in cells:
                table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
            self.console.print(table)
        else:
            self._plain([list(headers), *cells])
        self._stdout.flush()

    def _plain(self, lines: list[list[str]]) -> None:
        # Cells, not characters: a Chinese character is two wide.
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True))
            self._stdout.write("  ".join(padded).rstrip() + "\n")

    def fields(self, values: Mapping[str, Any]) -> None:
        """Writes names and values, one a line; those that are None are left out."""
        width = max(map(len, values), default=0)
        for name, value in values.items():
            if value is not None:
                self.line(f"{name:<{width}}  {clean(value)}")

    def problems(self, problems: Sequence[Problem]) -> None:
        """Writes what is wrong with the rows of an input; the first few, and how many more there are."""
        rows = [(p.row, p.column, p.code, p.message, p.value) for p in problems[:_SHOWN_PROBLEMS]]
        if rows:
            self.table(("row", "column", "code", "message", "value"), rows, longest=80)
        if len(problems) > len(rows):
            self.line(f"... and {number(len(problems) - len(rows))} more")

    def note(self, text: str) -> None:
        """Writes a line beside the result, to stderr; nothing with ``--json``."""
        if not self.json:
            self._stderr.write(text + "\n")
            self._stderr.flush()

    def error(self, error: Exception) -> int:
        """Writes an error to stderr and returns the exit code that it means."""
        code = getattr(error, "code", None) if isinstance(error, AsyncTaskError) else "usage"
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        problems: Sequence[Problem] = getattr(error, "errors", ())
        suggested: Sequence[Mapping[str, Any]] = getattr(error, "suggestions", ())
        if self.json:
            found = {"code": code, "message": message, "errors": [p.as_dict() for p in problems]}
            if suggested:
                found["suggestions"] = list(suggested)
            self._stderr.write(json.dumps({"error": found}, ensure_ascii=False, default=str) + "\n")
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
