"""The peer of ``sheet``: a process that reads the file and does nothing with it.

    python -m benchmarks.reading FILE

Its last line is one JSON object: rows, seconds, the peak of its memory in MB.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

from asynctask.clock import SystemClock
from benchmarks.memory import peak_kb

__all__ = ["READERS", "main"]

READERS = {"csv": "csv.reader", "xlsx": "python-calamine, iter_rows", "ndjson": "json.loads of each line"}


def _csv(path: Path) -> int:
    with path.open(encoding="utf-8", newline="") as file:
        return sum(1 for _ in csv.reader(file)) - 1


def _ndjson(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if json.loads(line))


def _xlsx(path: Path) -> int:
    from python_calamine import CalamineWorkbook

    with CalamineWorkbook.from_path(path) as book:
        return sum(1 for _ in book.get_sheet_by_index(0).iter_rows()) - 1


def main(argv: list[str] | None = None) -> int:
    """The command."""
    path = Path((sys.argv[1:] if argv is None else argv)[0])
    clock = SystemClock()
    begun = clock.monotonic()
    rows = {"csv": _csv, "xlsx": _xlsx, "ndjson": _ndjson}[path.suffix[1:]](path)
    seconds = clock.monotonic() - begun
    print(json.dumps({"rows": rows, "seconds": seconds, "peak_mb": round((peak_kb("self") or 0) / 1024, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
