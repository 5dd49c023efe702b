"""The map of the running system stays true: each name, file and thread in internals.md exists, and none is missing."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from asynctask.database.tables import metadata

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/explanation/internals.md").read_text()
DECISIONS = sorted((ROOT / "docs/explanation/decisions").glob("*.md"))

_DOTTED = re.compile(r"[a-z_]+(?:\.[A-Za-z_]+)+")
_FILE = re.compile(r"[\w/.-]+\.(?:py|md|toml)")


def quoted(text: str) -> list[str]:
    """What stands between backticks, outside blocks of code."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def in_blocks(text: str) -> list[str]:
    """Dotted names inside blocks of code."""
    return [name for block in re.findall(r"```(.*?)```", text, re.DOTALL) for name in _DOTTED.findall(block)]


def resolve(name: str) -> Any:
    """The object that a dotted name means; raises LookupError where there is none."""
    full = name if name.startswith("webapi.") else f"asynctask.{name}"
    parts = full.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                raise LookupError(f"{'.'.join(parts[:cut])} has no {'.'.join(parts[cut:])}")
            found = getattr(found, part)
        return found
    raise LookupError(f"there is no module {full}")


def is_column(name: str) -> bool:
    table, _, column = name.partition(".")
    return table in metadata.tables and column in metadata.tables[table].columns


NAMES = sorted(
    {name for name in quoted(PAGE) if _DOTTED.fullmatch(name) and not _FILE.fullmatch(name)} | set(in_blocks(PAGE))
)
PAGES = (ROOT / "docs/explanation/internals.md", *DECISIONS)
FILES = sorted({(page.name, name) for page in PAGES for name in quoted(page.read_text()) if _FILE.fullmatch(name)})


def test_every_name_in_the_map_exists() -> None:
    faults = []
    for name in NAMES:
        try:
            if not is_column(name) and resolve(name) is None:
                faults.append(f"{name} is None")
        except LookupError as error:
            faults.append(f"{name}: {error}")
    assert not faults, "\n".join(faults)


def test_every_file_that_is_named_exists() -> None:
    gone = [f"{page} names {name}, which is not there" for page, name in FILES if not (ROOT / name).is_file()]
    assert not gone, "\n".join(gone)


def test_the_map_names_enough_to_be_worth_a_test_and_a_wrong_name_would_be_found() -> None:
    assert len(NAMES) > 60
    for wrong in ("bulk.dispatcher.Dispatcher.walk", "ledger.nothing", "webapi.tasks.made"):
        with pytest.raises(LookupError):
            resolve(wrong)


def threads() -> set[str]:
    """The name of every thread that the sources start; of an f-string the part before its first value."""
    found = set()
    for path in (path for package in ("asynctask", "webapi") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            makes = ast.unparse(node.func)
            if makes in ("threading.Thread", "Thread", "ThreadPoolExecutor"):
                said = "thread_name_prefix" if makes == "ThreadPoolExecutor" else "name"
                name = next((word.value for word in node.keywords if word.arg == said), None)
                assert name is not None, f"{path.name}:{node.lineno} starts a thread without a name"
                first = name.values[0] if isinstance(name, ast.JoinedStr) else name
                assert isinstance(first, ast.Constant)
                found.add(str(first.value))
    return found


def test_the_table_of_threads_is_the_threads_that_there_are() -> None:
    table = PAGE.partition("| thread | in |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([a-z-]+)`", table, re.MULTILINE)) == threads()


def test_decisions_are_numbered_without_a_gap_and_tell_the_four_things() -> None:
    faults = []
    for number, path in enumerate(DECISIONS, 1):
        text = path.read_text()
        if not path.name.startswith(f"{number:04d}-") or not text.startswith(f"# {number}. "):
            faults.append(f"{path.name} is not numbered {number} in its name and its title")
        parts = ("Context.", "Choice.", "Price.", "How we would notice that it was wrong.")
        faults += [f"{path.name} does not tell its {part}" for part in parts if f"\n**{part}**" not in text]
        if f"(decisions/{path.name})" not in PAGE:
            faults.append(f"docs/explanation/internals.md does not link {path.name}")
    assert not faults, "\n".join(faults)


def house() -> Any:
    spec = importlib.util.spec_from_file_location("house", ROOT / "scripts" / "house.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_kernel_stays_what_one_person_can_hold_in_mind() -> None:
    counted = house()
    lines, numbers = counted.length(counted.kernel().values()), counted.numbers()
    large = {name: count for name, count in counted.fields().items() if count > 20}
    assert (lines <= 13_890, len(numbers) <= 90, large) == (True, True, {}), (lines, sorted(numbers))


def test_the_way_of_one_item_stays_short() -> None:
    counts, faults = house().counts(), []
    for row, files, lines in (("pick, borrow, perform, record", 8, 1_200), ("the whole way of one item", 20, None)):
        count = counts[row]
        if count.files > files or (lines is not None and count.with_calls > lines):
            faults.append(f"{row}: {count} is more than {files} files and {lines} lines")
        told = re.search(rf"^\| {row} \| (\d+) \|", PAGE, re.MULTILINE)
        if told is None or int(told[1]) != count.files:
            faults.append(f"{row}: run scripts/house.py and copy its table into docs/explanation/internals.md")
    assert not faults, "\n".join(faults)


def test_the_steps_name_what_decides_about_an_item() -> None:
    steps, faults = house().sections(PAGE), []
    for number, names in {
        "3": ("lending.pick", "Picker.borrow"),
        "4": ("lending.borrow", "Tracker.borrowed", "ReadyJobs.put"),
        "5": ("Performer.execute", "Performer.decide", "Performer.settle", "execution.decide", "Attempt.raised"),
        "6": ("Tracker.settle", "Recorder.flush", "events.apply", "transitions.difference", "events.move_counts"),
        "7": ("tasks.try_close",),
    }.items():
        faults += [f"step {number} does not name {name}" for name in names if f".{name}`" not in steps[number]]
    assert not faults, "\n".join(faults)


def test_a_job_is_at_most_eight_values_from_the_borrow_to_its_record() -> None:
    table = PAGE.split("## What a job is on its way", 1)[1].split("\n## ", 1)[0]
    values = re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE)
    assert (values[0], values[-1], len(values) <= 8) == ("ledger.lending.Job", "core.transitions.Transition", True), values
