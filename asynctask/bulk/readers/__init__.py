"""Reading lists: one registry of formats, one way to open a file of any of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asynctask.bulk.readers.base import (
    CellError,
    Limits,
    OpenOptions,
    RawRow,
    Source,
    normalise,
    over_limit,
)
from asynctask.bulk.readers.csv import open_csv
from asynctask.bulk.readers.detect import sniff
from asynctask.bulk.readers.json import open_json, parse_json
from asynctask.bulk.readers.xlsx import open_xlsx

__all__ = [
    "FORMATS",
    "CellError",
    "Format",
    "Limits",
    "RawRow",
    "Source",
    "normalise",
    "open_source",
    "parse_json",
    "readable",
]


@dataclass(frozen=True, slots=True)
class Format:
    """A format that can be read: ``title`` for people, ``suffixes`` for file dialogs, ``open`` for the file."""

    title: str
    suffixes: tuple[str, ...]
    open: Callable[[Path, OpenOptions], Source]


FORMATS: Final[dict[str, Format]] = {
    "xlsx": Format("Excel workbooks", (".xlsx", ".xlsm"), open_xlsx),
    "csv": Format("CSV text in UTF-8", (".csv", ".txt"), open_csv),
    "json": Format("JSON lists", (".json",), open_json),
}


def readable() -> str:
    """What can be read, as the end of a message."""
    each = (f"{known.title} ({', '.join(known.suffixes)})" for known in FORMATS.values())
    return "what can be read: " + ", ".join(each)


def open_source(
    path: Path, filename: str, *, sheet: str | None = None, limits: Limits, expect: Collection[str] = ()
) -> Source:
    """Open a list. Close what is returned, or use it in a ``with``.

    Arguments: ``path``, the file; ``filename``, the name it was sent under (a tie-breaker, never a path); ``sheet``, the
    sheet of a workbook, by default the first visible one with rows; ``limits``, bytes and counts that are taken at most;
    ``expect``, names that a header of this list may have, which tell the header row from titles over it.

    Raises :class:`UnsupportedFormat` (415) for what cannot be read, :class:`TooLarge` (413) for what is over a limit,
    :class:`InputError` (422) for what is not in order. docs/sheets.md lists the codes.
    """
    size = path.stat().st_size
    if size > limits.max_file_bytes:
        raise over_limit(f"the file has {size:,} bytes", "max_file_bytes", limits.max_file_bytes)
    name = sniff(path, filename, limits, readable())
    return FORMATS[name].open(path, OpenOptions(sheet, limits, frozenset(expect)))
