"""Counts what somebody opens who follows one item through the code: ``python scripts/house.py``.

It reads the numbered steps of docs/internals.md. Each name in backticks there is a module, class, function or method.
Of a step it counts the files of these names, the lines of the functions and methods among them, and the lines of the whole
files. The table at the end of that page is its output.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("asynctask", "webapi")
PAGE = ROOT / "docs" / "internals.md"

ROWS = (
    ("fetch, run, finish", "45678"),
    ("the whole way of one item", "123456789"),
)


def modules() -> dict[str, Path]:
    """Every production module by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def sections(page: str) -> dict[str, str]:
    """The numbered steps of the page: number -> text."""
    parts = re.split(r"^### (\d)\. ", page, flags=re.MULTILINE)
    return {number: text.partition("\n## ")[0] for number, text in zip(parts[1::2], parts[2::2], strict=True)}


def resolved(name: str, known: dict[str, Path]) -> tuple[Path, list[str]] | None:
    """The file of a name of the page, and what is left of the name inside it."""
    for full in (name, f"asynctask.{name}"):
        parts = full.split(".")
        for cut in range(len(parts), 1, -1):
            path = known.get(".".join(parts[:cut]))
            if path is not None:
                return path, parts[cut:]
    return None


def lines_of(path: Path, inside: list[str]) -> int:
    """The lines of a function or method in a file; 0 for a module or a class as a whole."""
    node: ast.AST = ast.parse(path.read_text())
    for name in inside:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [each for each in ast.iter_child_nodes(node) if isinstance(each, kinds) and each.name == name]
        if not found:
            return 0
        node = found[-1]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return 0
    return (node.end_lineno or node.lineno) - node.lineno + 1


def counted(texts: list[str], known: dict[str, Path]) -> tuple[int, int, int, int]:
    """Files, functions, lines of these functions, lines of the files, for the names in some texts."""
    files: set[Path] = set()
    functions: dict[tuple[Path, str], int] = {}
    for name in {each for text in texts for each in re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)+)`", text)}:
        found = resolved(name, known)
        if found is not None:
            path, inside = found
            files.add(path)
            if lines := lines_of(path, inside):
                functions[path, ".".join(inside)] = lines
    whole = sum(len(path.read_text().splitlines()) for path in files)
    return len(files), len(functions), sum(functions.values()), whole


def main() -> int:
    """Prints the table."""
    known, steps = modules(), sections(PAGE.read_text())
    lines = sum(len(path.read_text().splitlines()) for path in known.values())
    print(f"{len(known)} modules, {lines:,} lines with comments and docstrings.\n")
    print("| way | files | functions named here | their lines | lines of the files |")
    print("|---|--:|--:|--:|--:|")
    for title, numbers in ROWS:
        print(f"| {title} |", " | ".join(f"{each:,}" for each in counted([steps[n] for n in numbers], known)), "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
