"""Counts what somebody opens who follows one item through the code: ``python scripts/house.py``.

It reads docs/internals.md: its numbered steps, and the part "Beside the way". Each name in backticks there is a module,
class, function or method. Of a row it counts the files of these names, the functions and methods among them with their
lines, the lines of these together with the functions of the same files that they call, directly or not, and the lines of
the whole files. What stands beside the way is not followed from a step. The table in that page is its output.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("asynctask", "webapi")
PAGE = ROOT / "docs" / "internals.md"

BESIDE = "beside the way"
ROWS = {
    "pick, borrow, perform, record": "3456",
    "the whole way of one item": "1234567",
}

Function = tuple[Path, str]


class Count(NamedTuple):
    """The columns of a row."""

    files: int
    functions: int
    lines: int
    with_calls: int
    whole: int


@cache
def modules() -> dict[str, Path]:
    """Every production module by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def sections(page: str) -> dict[str, str]:
    """The numbered steps of the page, number -> text, and what stands beside the way."""
    parts = re.split(r"^### (\d)\. ", page, flags=re.MULTILINE)
    found = {number: text.partition("\n## ")[0] for number, text in zip(parts[1::2], parts[2::2], strict=True)}
    found[BESIDE] = page.partition("\n## Beside the way\n")[2].partition("\n## ")[0]
    return found


def resolved(name: str) -> tuple[Path, str] | None:
    """The file of a name of the page, and what is left of the name inside it."""
    known = modules()
    for full in (name, f"asynctask.{name}"):
        parts = full.split(".")
        for cut in range(len(parts), 1, -1):
            path = known.get(".".join(parts[:cut]))
            if path is not None:
                return path, ".".join(parts[cut:])
    return None


@cache
def functions_of(path: Path) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of a module and the methods of its classes, by name."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}": method for method in methods}
    return found


def lines_of(function: Function) -> int:
    """The lines of a function, its docstring among them."""
    node = functions_of(function[0])[function[1]]
    return (node.end_lineno or node.lineno) - node.lineno + 1


def mentioned(function: Function) -> Iterator[str]:
    """What a function may call in its file: the functions that it names, and the members of its own object."""
    path, name = function
    owner = name.rpartition(".")[0]
    for node in ast.walk(functions_of(path)[name]):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield f"{owner}.{node.attr}"


def followed(start: Iterable[Function], without: Iterable[Function] = ()) -> set[Function]:
    """These functions, and those of their files that they call, but for those ``without``."""
    start = set(start)
    found: set[Function] = set()
    left, skipped = list(start), set(without) - start
    while left:
        function = left.pop()
        if function in found or function in skipped or function[1] not in functions_of(function[0]):
            continue
        found.add(function)
        left += [(function[0], name) for name in mentioned(function)]
    return found


def named(texts: Iterable[str]) -> set[tuple[Path, str]]:
    """The files and what inside them the texts name."""
    names = {name for text in texts for name in re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)+)`", text)}
    return {found for name in names if (found := resolved(name)) is not None}


def counted(texts: Iterable[str], beside: str = "") -> Count:
    """Counts the names in some texts of the page; ``beside``: what is not followed from them."""
    found = named(texts)
    files = {path for path, _ in found}
    functions = {each for each in found if each[1] in functions_of(each[0])}
    opened = followed(functions, named([beside]))
    whole = sum(len(path.read_text().splitlines()) for path in files)
    return Count(len(files), len(functions), sum(map(lines_of, functions)), sum(map(lines_of, opened)), whole)


def counts() -> dict[str, Count]:
    """Every row of the table."""
    steps = sections(PAGE.read_text())
    rows = {title: counted([steps[n] for n in numbers], steps[BESIDE]) for title, numbers in ROWS.items()}
    return rows | {BESIDE: counted([steps[BESIDE]])}


def main() -> int:
    """Prints the table."""
    lines = sum(len(path.read_text().splitlines()) for path in modules().values())
    print(f"{len(modules())} modules, {lines:,} lines with comments and docstrings.\n")
    print("| way | files | functions named here | their lines | with what they call there | lines of the files |")
    print("|---|--:|--:|--:|--:|--:|")
    for title, count in counts().items():
        print(f"| {title} |", " | ".join(f"{each:,}" for each in count), "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
