"""The rows of a workbook kept beside it, typed and compact: written once, streamed for every report.

A gzip of JSON lines. The first says what the columns are; then each row is ``[number, [cell, ...]]``, with its cells as in
:mod:`asynctask.lists.cells`. Only this module reads and writes it.
"""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson

from asynctask.errors import InputError
from asynctask.lists.cells import packed, unpacked
from asynctask.lists.original_formats import Percents
from asynctask.lists.readers.base import Source, column_letters
from asynctask.lists.report_cells import Percent

__all__ = ["KeptRows", "all_columns", "keep_rows", "remove_drafts"]

_VERSION: Final = 1
_BATCH: Final = 500
_DAMAGED: Final = (OSError, EOFError, ValueError, KeyError, IndexError, TypeError)


class KeptRows:
    """The rows that :func:`keep_rows` wrote. Raises :class:`InputError` where the file is none of them.

    ``headers``: every column of the list in order, those without a header too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with gzip.open(path, "rb") as file:
                first = orjson.loads(file.readline())
            if first["version"] != _VERSION:
                raise ValueError("another version")
            self._cells: list[str] = first["cells"]
            self.headers: tuple[str, ...] = tuple(first["headers"])
        except _DAMAGED as error:
            raise InputError(f"{path.name} cannot be read: {error}", code="damaged_file") from error

    def rows(self) -> Generator[tuple[int, Mapping[str, Any]], None, None]:
        """Row number and cells by header, in order. Raises :class:`InputError` where the file is damaged."""
        names = self._cells
        try:
            with gzip.open(self._path, "rb") as file:
                file.readline()
                for line in file:
                    number, cells = orjson.loads(line)
                    yield (
                        number,
                        {
                            name: _decoded(cell) if type(cell) is dict else cell
                            for name, cell in zip(names, cells, strict=False)
                        },
                    )
        except _DAMAGED as error:
            raise InputError(f"{self._path.name} cannot be read: {error}", code="damaged_file") from error


def keep_rows(source: Source, percents: Percents, target: Path) -> None:
    """Writes the rows of an open list to ``target``, which is whole or not there. One caller at a time.

    Raises what the source raises, and OSError.
    """
    body, made = _drafts(target)
    with body.open("w+b") as rows:
        names = _write_rows(source, percents, rows)
        headers = all_columns(source, names)
        first = {"version": _VERSION, "cells": names, "headers": headers}
        with made.open("wb") as out:
            # The columns are known last and are wanted first: a gzip may be several, one behind the other.
            out.write(gzip.compress(orjson.dumps(first) + b"\n", 1))
            rows.seek(0)
            shutil.copyfileobj(rows, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
    made.replace(target)


def remove_drafts(target: Path) -> None:
    """Removes what somebody left who did not come to the end of :func:`keep_rows`."""
    for path in _drafts(target):
        path.unlink(missing_ok=True)


def _drafts(target: Path) -> tuple[Path, Path]:
    return target.with_suffix(".body"), target.with_suffix(".new")


def all_columns(source: Source, names: list[str]) -> list[str]:
    """Every column of a list in the order of the sheet; ``names`` are the keys of its rows, in any order."""
    headers, places = list(source.headers or ()), source.places or ()
    at = dict(zip(headers, places, strict=False))
    known = set(headers)
    for name in names:
        if name not in known:
            place = _place(name)
            if place is not None:
                at[name] = place
            headers.append(name)
    return sorted(headers, key=lambda name: at[name]) if len(at) == len(headers) else headers


def _place(name: str) -> int | None:
    """The column that a name such as "Column C" stands for; None for any other."""
    letters = name.removeprefix("Column ").rstrip("*")
    if not (name.startswith("Column ") and letters.isascii() and letters.isalpha() and len(letters) <= 3):
        return None
    place = 0
    for letter in letters:
        place = place * 26 + ord(letter) - 64
    return place - 1 if column_letters(place - 1) == letters else None


def _write_rows(source: Source, percents: Percents, out: BinaryIO) -> list[str]:
    """Writes the rows and returns the names of their cells."""
    index = {name: place for place, name in enumerate(source.headers or ())}
    columns = dict(zip(source.headers or (), source.places or (), strict=False))
    lines: list[bytes] = []
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1, mtime=0) as packed:
        for row in source.rows():
            cells: list[Any] = [None] * len(index)
            for name, value in row.values.items():
                if name not in index:
                    index[name], columns[name] = len(index), _place(name) or 0
                    cells.append(None)
                kind = type(value)
                if percents and (kind is int or kind is float):
                    pattern = percents.of(row.number, columns[name])
                    value = Percent(value, pattern) if pattern else value
                cells[index[name]] = _encoded(value)
            lines.append(orjson.dumps([row.number, cells]))
            if len(lines) >= _BATCH:
                packed.write(b"\n".join(lines) + b"\n")
                lines.clear()
        packed.write(b"".join(line + b"\n" for line in lines))
    return list(index)


def _encoded(value: Any) -> Any:
    kind = type(value)
    if value is None or kind is str or kind is int or kind is float or kind is bool:
        return value
    return {"p": [float(value), value.pattern]} if kind is Percent else packed(value)


def _decoded(value: dict[str, Any]) -> Any:
    return Percent(*value["p"]) if "p" in value else unpacked(value)
