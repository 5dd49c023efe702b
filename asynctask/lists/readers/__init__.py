"""Reads lists of every known format through one function, :func:`open_source`."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asynctask.lists.readers.base import CellError, Limits, OpenOptions, RawRow, Source, normalise, over_limit

__all__ = [
    "FORMATS",
    "CellError",
    "Format",
    "Limits",
    "RawRow",
    "Source",
    "normalise",
    "open_source",
    "readable",
    "sheet_names",
]


_CHARSET: Final = re.compile(r";\s*charset\s*=\s*\"?([^\s;\"]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Format:
    """A readable format: ``title`` for people, ``suffixes`` for file dialogs."""

    title: str
    suffixes: tuple[str, ...]


FORMATS: Final[dict[str, Format]] = {
    "xlsx": Format("Excel workbooks", (".xlsx", ".xlsm")),
    "xls": Format("old Excel workbooks", (".xls",)),
    "ods": Format("OpenDocument spreadsheets", (".ods",)),
    "csv": Format("CSV text", (".csv", ".txt")),
    "tsv": Format("tab-separated text", (".tsv", ".tab")),
    "json": Format("JSON lists", (".json",)),
    "ndjson": Format("JSON lines", (".ndjson", ".jsonl")),
}
"""The formats; their openers are in :mod:`asynctask.lists.readers.opening`."""


def readable() -> str:
    """The readable formats, as the end of a message."""
    each = (f"{known.title} ({', '.join(known.suffixes)})" for known in FORMATS.values())
    return "what can be read: " + ", ".join(each)


def open_source(
    path: Path,
    filename: str,
    *,
    sheet: str | None = None,
    limits: Limits,
    expect: Collection[str] = (),
    media_type: str | None = None,
    encoding: str | None = None,
) -> Source:
    """Opens a list. Close the result, or use it in a ``with``.

    Arguments: ``path``, the file; ``filename``, the name it was sent under (a tie-breaker, never a path); ``sheet``, the
    sheet of a workbook, by default the first visible one with rows; ``limits``; ``expect``, names that a header may have,
    which tell the header row from titles above it; ``media_type``, as sent (``text/csv; charset=gbk``), a tie-breaker with
    precedence over the name; ``encoding`` of a text, by default the charset of the media type, else detected.

    Raises :class:`UnsupportedFormat` (415) for an unreadable format, :class:`TooLarge` (413) beyond a limit,
    :class:`InputError` (422) for any other fault. docs/reference/sheets.md lists the codes.
    """
    from asynctask.lists.readers.opening import OPENERS, sniff  # loads every reader; many processes read no list

    size = path.stat().st_size
    if size > limits.max_file_bytes:
        raise over_limit(f"the file has {size:,} bytes", "max_file_bytes", limits.max_file_bytes)
    name = sniff(path, filename, limits, readable(), media_type)
    if encoding is None and (charset := _CHARSET.search(media_type or "")):
        encoding = charset[1]
    return OPENERS[name](path, OpenOptions(sheet, limits, frozenset(expect), encoding))


def sheet_names(path: Path, filename: str, limits: Limits) -> list[str]:
    """The visible sheets of a workbook, in order; empty for a file without sheets.

    Arguments and errors as of :func:`open_source`.
    """
    from asynctask.lists.readers.opening import SHEETS, sniff

    sheets = SHEETS.get(sniff(path, filename, limits, readable()))
    return sheets(path, limits) if sheets is not None else []
