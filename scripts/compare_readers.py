"""Compares the readers of workbooks on a folder: ``python scripts/compare_readers.py FOLDER [--json]``.

Reads the visible sheets of each .xlsx, .xlsm, .xls and .ods file by AsyncTask's reader and by whichever of python-calamine,
openpyxl and odfpy is installed, in a child process each, with limits of processor time and memory.
Prints for each file and in sum: rows with a value, cells that differ from AsyncTask's, seconds of processor time (with the
start of Python), peak memory, failures. docs/reference/readers.md explains the figures.
"""

from __future__ import annotations

import argparse
import heapq
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import groupby, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".xlsx": "xlsx", ".xlsm": "xlsx", ".xls": "xls", ".ods": "ods"}
READERS = {  # name -> its module, the formats that it reads
    "asynctask": ("asynctask", {"xlsx", "xls", "ods"}),
    "calamine": ("python_calamine", {"xlsx", "xls", "ods"}),
    "openpyxl": ("openpyxl", {"xlsx"}),
    "odfpy": ("odf", {"ods"}),
}
Rows = Iterator[tuple[int, list[Any]]]


# -- the readers: names of visible sheets, and the rows of one, numbered from 1


def asynctask_sheets(path: Path) -> Iterator[tuple[str, Rows]]:
    from asynctask.errors import InputError
    from asynctask.lists.readers import Limits
    from asynctask.lists.readers.base import OpenOptions
    from asynctask.lists.readers.ods import ods_table
    from asynctask.lists.readers.opening import sheet_names
    from asynctask.lists.readers.xls import xls_table
    from asynctask.lists.readers.xlsx import xlsx_table

    open_table = {"xlsx": xlsx_table, "xls": xls_table, "ods": ods_table}[SUFFIXES[path.suffix.lower()]]
    limits = Limits(max_rows=1_048_576, max_columns=16_384, max_unzip_ratio=10_000)
    for name in sheet_names(path, path.name, limits):
        try:
            table = open_table(path, OpenOptions(name, limits, frozenset()))
        except InputError as error:
            if error.code == "empty_sheet":
                continue
            raise
        try:
            yield name, table.cells()
        finally:
            table.close()


def calamine_sheets(path: Path) -> Iterator[tuple[str, Rows]]:
    import python_calamine

    book = python_calamine.CalamineWorkbook.from_path(str(path))
    for sheet in book.sheets_metadata:
        if sheet.visible == python_calamine.SheetVisibleEnum.Visible:
            yield sheet.name, enumerate(book.get_sheet_by_name(sheet.name).to_python(skip_empty_area=False), 1)


def openpyxl_sheets(path: Path) -> Iterator[tuple[str, Rows]]:
    import openpyxl

    book = openpyxl.load_workbook(path, read_only=True, data_only=True)
    for sheet in book.worksheets:
        if sheet.sheet_state == "visible":
            sheet.reset_dimensions()  # what a file claims of its size is often wrong
            yield sheet.title, ((number, list(row)) for number, row in enumerate(sheet.iter_rows(values_only=True), 1))


def odfpy_sheets(path: Path) -> Iterator[tuple[str, Rows]]:
    from odf import opendocument, table, teletype
    from odf.namespaces import OFFICENS, TABLENS

    def value(cell: Any) -> Any:
        kind = cell.getAttrNS(OFFICENS, "value-type")
        if kind in ("float", "currency", "percentage"):
            return float(cell.getAttrNS(OFFICENS, "value"))
        if kind == "boolean":
            return cell.getAttrNS(OFFICENS, "boolean-value") == "true"
        if kind == "date":
            return datetime.fromisoformat(cell.getAttrNS(OFFICENS, "date-value"))
        return teletype.extractText(cell)

    def rows(sheet: Any) -> Rows:
        number = 1
        for row in sheet.getElementsByType(table.TableRow):
            cells: list[Any] = []
            for cell in row.getElementsByType(table.TableCell):
                found, times = value(cell), int(cell.getAttrNS(TABLENS, "number-columns-repeated") or 1)
                cells += [found] * (times if found not in (None, "") or times < 1_000 else 1)
            times = int(row.getAttrNS(TABLENS, "number-rows-repeated") or 1)
            if any(cell not in (None, "") for cell in cells):
                yield from ((number + n, cells) for n in range(times))
            number += times

    for sheet in opendocument.load(str(path)).spreadsheet.getElementsByType(table.Table):
        yield sheet.getAttrNS(TABLENS, "name"), rows(sheet)


SHEETS = {
    "asynctask": asynctask_sheets, "calamine": calamine_sheets, "openpyxl": openpyxl_sheets, "odfpy": odfpy_sheets,
}  # fmt: skip


def plain(value: Any) -> Any:
    """A cell as every reader means it: one kind of number, of day and of time; None for an empty one."""
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float | Decimal):
        return float(value)
    if isinstance(value, datetime) and value.time() == time():
        return value.date().isoformat()
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, time):
        value = timedelta(hours=value.hour, minutes=value.minute, seconds=value.second, microseconds=value.microsecond)
    return f"{value.total_seconds():.3f} s" if isinstance(value, timedelta) else str(value)


def read(reader: str, path: Path, target: Path) -> dict[str, Any]:
    """Writes the rows that have a value to ``target``, one JSON line each; what it cost."""
    rows, error = 0, None
    with target.open("w") as out:
        try:
            for name, found in SHEETS[reader](path):
                for number, cells in found:
                    values = [plain(cell) for cell in cells]
                    while values and values[-1] is None:
                        values.pop()
                    if values:
                        rows += 1
                        out.write(json.dumps([name, number, values]) + "\n")
        except Exception as failure:  # of any library, for any reason
            error = f"{type(failure).__name__}: {failure}"[:200]
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = round(used.ru_utime + used.ru_stime, 3)
    return {"rows": rows, "seconds": seconds, "memory_mb": used.ru_maxrss // 1024, "error": error}


# -- the comparison


def in_child(reader: str, path: Path, target: Path, limits: argparse.Namespace) -> dict[str, Any]:
    """The result of :func:`read` in a child process; one that was ended has only an ``error``."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (limits.seconds, limits.seconds))
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory_mb << 20, limits.memory_mb << 20))

    command = [sys.executable, str(Path(__file__).resolve()), "--read", reader, str(path), str(target)]
    try:
        child = subprocess.run(
            command, capture_output=True, timeout=4 * limits.seconds, preexec_fn=limited, check=False, cwd=ROOT
        )
        found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        found = {"rows": 0, "seconds": None, "memory_mb": None, "error": "ended by a limit or a crash"}
    return found


def differing(ours: Path, theirs: Path) -> int:
    """How many cells two readings differ in."""
    order: list[str] = []  # of the sheets, which both read in the order of the workbook
    for reading in (ours, theirs):
        at = 0
        for name in sheet_order(reading):
            if name not in order:
                order.insert(at, name)
            at = order.index(name) + 1
    count = 0
    rows = heapq.merge(numbered(ours, order), numbered(theirs, order), key=itemgetter(0))
    for _, found in groupby(rows, key=itemgetter(0)):
        (_, mine), *others = found
        count += sum(x != y for x, y in zip_longest(mine, others[0][1] if others else ()))
    return count


def sheet_order(reading: Path) -> list[str]:
    with reading.open() as lines:
        return [name for name, _ in groupby(json.loads(line)[0] for line in lines)]


def numbered(reading: Path, order: list[str]) -> Iterator[tuple[tuple[int, int], list[Any]]]:
    """The rows of a reading, each with the place of its sheet and its number."""
    with reading.open() as lines:
        for name, number, values in map(json.loads, lines):
            yield (order.index(name), number), values


def compare(path: Path, readers: list[str], limits: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Reader -> its result on one file."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for reader in readers:
            if SUFFIXES[path.suffix.lower()] in READERS[reader][1]:
                found[reader] = in_child(reader, path, Path(folder) / reader, limits)
        if found["asynctask"]["error"] is None:
            for reader in found:
                if reader != "asynctask" and found[reader]["error"] is None:
                    found[reader]["differ"] = differing(Path(folder) / "asynctask", Path(folder) / reader)
    return found


def summed(results: dict[str, dict[str, dict[str, Any]]], readers: list[str]) -> dict[str, dict[str, Any]]:
    """Reader -> sums over all files that it was given; of memory the largest."""
    sums = {}
    for reader in readers:
        mine = [found[reader] for found in results.values() if reader in found]
        sums[reader] = {
            "files": len(mine), "failures": sum(each["error"] is not None for each in mine),
            "rows": sum(each["rows"] for each in mine), "differ": sum(each.get("differ", 0) for each in mine),
            "seconds": round(sum(each["seconds"] or 0 for each in mine), 3),
            "memory_mb": max((each["memory_mb"] or 0 for each in mine), default=0),
        }  # fmt: skip
    return sums


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--read"]:
        sys.path.insert(0, str(ROOT))
        print(json.dumps(read(arguments[1], Path(arguments[2]), Path(arguments[3]))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=int, default=120, help="processor time of one reading")
    parser.add_argument("--memory-mb", type=int, default=2_048, help="address space of one reading")
    parser.add_argument("--json", action="store_true", help="one JSON document and nothing else")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    readers = [name for name, (module, _) in READERS.items() if importlib.util.find_spec(module) is not None]
    files = sorted(path for path in options.folder.resolve().rglob("*") if path.suffix.lower() in SUFFIXES)
    results = {str(path): compare(path, readers, options) for path in files}
    sums = summed(results, readers)
    if options.json:
        print(json.dumps({"files": results, "sums": sums}))
        return 0
    line = "{:<44.44} {:<10} {:>9} {:>8} {:>8} {:>6}  {}"
    print(line.format("file", "reader", "rows", "differ", "seconds", "MB", "failure"))
    for path, found in results.items():
        for reader, each in found.items():
            figures = [str(each.get(name, "-")) for name in ("rows", "differ", "seconds", "memory_mb")]
            print(line.format(Path(path).name, reader, *figures, each["error"] or ""))
    for reader, each in sums.items():
        figures = [str(each[name]) for name in ("rows", "differ", "seconds", "memory_mb")]
        print(line.format(f"all {each['files']} files", reader, *figures, f"{each['failures']} failed"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
