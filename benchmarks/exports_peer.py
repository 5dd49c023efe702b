"""The peer of the benchmark of exports: a loop that writes the rows of the table, and nothing else."""

from __future__ import annotations

import csv
import gzip
import io
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.exports_app import COLUMNS, rows_between


def main(argv: list[str]) -> int:
    """Arguments: the format, the SQLite file, the number of rows, the file to write."""
    form, source, n, path = argv[0], Path(argv[1]), int(argv[2]), Path(argv[3])
    _WRITERS[form](path, rows_between(source, 0, n))
    return 0


def _csv(path: Path, rows: Iterable[tuple[Any, ...]]) -> None:
    with path.open("w", encoding="utf-8-sig", newline="") as out:
        csv.writer(out).writerows([COLUMNS])
        csv.writer(out).writerows(rows)


def _csv_gz(path: Path, rows: Iterable[tuple[Any, ...]]) -> None:
    with gzip.open(path, "wb", 6) as packed, io.TextIOWrapper(packed, "utf-8-sig", newline="") as out:
        csv.writer(out).writerows([COLUMNS])
        csv.writer(out).writerows(rows)


def _ndjson(path: Path, rows: Iterable[tuple[Any, ...]]) -> None:
    import orjson

    with path.open("wb") as out:
        for row in rows:
            out.write(orjson.dumps(dict(zip(COLUMNS, row, strict=True)), option=orjson.OPT_APPEND_NEWLINE))


def _xlsx(path: Path, rows: Iterable[tuple[Any, ...]]) -> None:
    import xlsxwriter

    book = xlsxwriter.Workbook(path, {"constant_memory": True})
    sheet = book.add_worksheet()
    sheet.write_row(0, 0, COLUMNS)
    for number, row in enumerate(rows, 1):
        sheet.write_row(number, 0, row)
    book.close()


def _parquet(path: Path, rows: Iterable[tuple[Any, ...]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = (pa.int64(), pa.string(), pa.string(), pa.string(), pa.string(), pa.float64(), pa.int64())
    schema = pa.schema(list(zip(COLUMNS, types, strict=True)))
    with pq.ParquetWriter(path, schema) as writer:
        rest = iter(rows)
        while group := list(islice(rest, 65_536)):
            writer.write_table(pa.table(list(map(list, zip(*group, strict=True))), schema=schema))


_WRITERS = {"csv": _csv, "csv.gz": _csv_gz, "ndjson": _ndjson, "xlsx": _xlsx, "parquet": _parquet}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
