"""How a list of each format is opened, and which sheets it has: every reader, loaded by whoever opens a list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from asynctask.lists.readers.base import Limits, OpenOptions, Source
from asynctask.lists.readers.csv import open_csv, open_tsv
from asynctask.lists.readers.detect import sniff
from asynctask.lists.readers.json import open_json, open_ndjson
from asynctask.lists.readers.ods import ods_sheets, open_ods
from asynctask.lists.readers.xls import open_xls, xls_sheets
from asynctask.lists.readers.xlsx import open_xlsx, xlsx_sheets

__all__ = ["OPENERS", "SHEETS", "sniff"]

OPENERS: Final[Mapping[str, Callable[[Path, OpenOptions], Source]]] = {
    "xlsx": open_xlsx,
    "xls": open_xls,
    "ods": open_ods,
    "csv": open_csv,
    "tsv": open_tsv,
    "json": open_json,
    "ndjson": open_ndjson,
}
"""A reader for each of :data:`asynctask.lists.readers.FORMATS`."""

SHEETS: Final[Mapping[str, Callable[[Path, Limits], list[str]]]] = {
    "xlsx": xlsx_sheets, "xls": xls_sheets, "ods": ods_sheets,
}  # fmt: skip
"""The sheets of a workbook that can be seen, for the formats that have any."""
