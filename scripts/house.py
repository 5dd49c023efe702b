"""Counts what somebody opens who follows one item through the code, and what the kernel is: ``python scripts/house.py``.

It reads the page internals.md: its numbered steps, and the part "Beside the way". Each name in backticks there is a module,
class, function or method. Of a row it counts the files of these names, the functions and methods among them with their
lines, the lines of these together with the functions of the same files that they call, directly or not, and the lines of
the whole files. What stands beside the way is not followed from a step. The table in that page is its output.

The kernel is what must be understood together: :data:`KERNEL`, without what only reads or mends, :data:`NOT_KERNEL`.
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
PAGE = ROOT / "docs/explanation/internals.md"

BESIDE = "beside the way"
ROWS = {
    "pick, borrow, perform, record": "3456",
    "the whole way of one item": "1234567",
}

KERNEL = ("core", "ledger", "dispatch", "runtime", "middleware", "maintenance")
NOT_KERNEL = {
    "asynctask.middleware.contrib",
    *(
        f"asynctask.ledger.{name}"
        for name in (
            "queries", "progress", "doctor", "purge", "corrections", "children", "schedules", "rates", "additions",
            "history",
        )
    ),
}  # fmt: skip

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
    return Count(len(files), len(functions), sum(map(lines_of, functions)), sum(map(lines_of, opened)), length(files))


def counts() -> dict[str, Count]:
    """Every row of the table."""
    steps = sections(PAGE.read_text())
    rows = {title: counted([steps[n] for n in numbers], steps[BESIDE]) for title, numbers in ROWS.items()}
    return rows | {BESIDE: counted([steps[BESIDE]])}


def kernel() -> dict[str, Path]:
    """The modules of the kernel by their dotted names."""
    chosen = {name: path for name, path in modules().items() if name.split(".")[1:2] and name.split(".")[1] in KERNEL}
    return {name: path for name, path in chosen.items() if name not in NOT_KERNEL}


def fields() -> dict[str, int]:
    """Every class of the kernel, and how many fields it has: those that it declares, and those that it sets on itself."""
    found = {}
    for name, path in kernel().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[f"{name}.{node.name}"] = len({*declared(node), *set_on_itself(node)})
    return found


def declared(node: ast.ClassDef) -> Iterator[str]:
    """The fields in the body of a class, but for those of all of its instances."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            kind = ast.unparse(each.annotation)
            if not kind.startswith(("ClassVar", "Final")):
                yield each.target.id


def set_on_itself(node: ast.ClassDef) -> Iterator[str]:
    """The attributes that the methods of a class set on their object."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            yield each.attr


def numbers() -> dict[str, str]:
    """The numbers that the modules of the kernel name, and their values as they are written, but for the bounds of what is
    accepted or kept (``MAX_...``)."""
    found = {}
    for name, path in kernel().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.AnnAssign | ast.Assign) and node.value is not None and is_number(node.value):
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                if not ast.unparse(target).lstrip("_").startswith("MAX_"):
                    found[f"{name}.{ast.unparse(target)}"] = ast.unparse(node.value)
    return found


def is_number(node: ast.expr) -> bool:
    """Whether an expression is a number, or made of numbers and names."""
    parts = [each for each in ast.walk(node) if isinstance(each, ast.expr)]
    if not all(isinstance(each, ast.Constant | ast.BinOp | ast.UnaryOp | ast.Name | ast.Tuple) for each in parts):
        return False
    values = [each.value for each in parts if isinstance(each, ast.Constant)]
    return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def length(paths: Iterable[Path]) -> int:
    """The lines of files, with comments and docstrings."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def main() -> int:
    """Prints the table."""
    most, largest = max((most, name) for name, most in fields().items())
    print(f"{len(modules())} modules, {length(modules().values()):,} lines with comments and docstrings;")
    print(f"of these the kernel: {len(kernel())} modules, {length(kernel().values()):,} lines, {len(numbers())} numbers;")
    print(f"its largest class is {largest}, with {most} fields.\n")
    print("| way | files | functions named here | their lines | with what they call there | lines of the files |")
    print("|---|--:|--:|--:|--:|--:|")
    for title, count in counts().items():
        print(f"| {title} |", " | ".join(f"{each:,}" for each in count), "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
