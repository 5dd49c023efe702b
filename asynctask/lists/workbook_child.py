"""The child process that reads a workbook under kernel limits of time and memory.

It takes orders as lines of JSON on standard input and answers with lines of JSON. It needs no application and ends with its
parent. :mod:`asynctask.lists.uploads` is the other side.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import select
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import orjson

from asynctask._version import __version__
from asynctask.errors import InputError
from asynctask.lists.readers.base import Limits, RawRow, Source, too_costly
from asynctask.lists.readers.opening import open_source, read_head, sheet_names
from asynctask.lists.written_cells import dump

ANOTHER_VERSION: Final = 3
"""The exit code of a child whose code has another version than its parent's: it was replaced meanwhile."""
_BATCH_BYTES: Final = 262_144
_FIRST_BATCH, _BATCH = 100, 1_000
_PARENT_S: Final = 5.0
_SPARE: Final = 16_777_216
"""Bytes beyond the memory limit, for the answer that reports it."""


def main() -> int:
    """Obeys the lines of standard input one by one; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a service manager signals all processes; this one ends with its parent
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_orders, args=(lines,), name="lifeline", daemon=True).start()
    order = orjson.loads(lines.get())
    if order["version"] != __version__:
        return ANOTHER_VERSION
    limits = Limits(**order["limits"])
    _set_limits(limits)
    child = _Child(Path(order["path"]), order["filename"], limits)
    _send({"ready": True})
    while True:
        command = orjson.loads(lines.get())
        try:
            child.obey(command)
        except InputError as error:
            _send({"error": error.as_json()})
        except MemoryError:
            child.forget()
            _send({"error": too_costly("split_memory", limits).as_json()})


class _Child:
    """Obeys orders. The list opened last stays open."""

    def __init__(self, path: Path, filename: str, limits: Limits) -> None:
        self._path, self._filename, self._limits = path, filename, limits
        self._opened: tuple[Any, Source] | None = None

    def obey(self, order: Mapping[str, Any]) -> None:
        """Executes one order. Raises :class:`InputError`."""
        if order["do"] == "sheets":
            _send({"sheets": sheet_names(self._path, self._filename, self._limits)})
            return
        if order["do"] == "head":
            head = read_head(self._path, self._filename, sheet=order["sheet"], limits=self._limits, expect=order["expect"])
            _send({"head": list(head)})
            return
        source = self._open({name: order[name] for name in ("sheet", "expect", "unzipped", "report", "header")})
        if order["do"] == "rows":
            _send_rows(source, order["after"])
        attributes = {"headers": source.headers, "places": source.places, "sheet": source.sheet_name}
        _send({"format": source.format, "planned": source.planned, **attributes})

    def forget(self) -> None:
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None

    def _open(self, asked: Mapping[str, Any]) -> Source:
        if self._opened is not None and self._opened[0] == asked:
            return self._opened[1]
        self.forget()
        limits, least = self._limits, asked["unzipped"]
        if least is not None:
            limits = replace(limits, max_unzipped_bytes=min(limits.max_unzipped_bytes, least))
        options = {name: asked[name] for name in ("sheet", "expect", "report", "header")}
        source = open_source(self._path, self._filename, limits=limits, **options)
        self._opened = (asked, source)
        return source


def _send_rows(source: Source, after: int) -> None:
    """Sends batches of rows as ``[number, cells in the order of the headers, {cells without a header by name}]``."""
    width = len(source.headers or ())
    batch: list[bytes] = []
    size, most = 0, _FIRST_BATCH
    for row in source.rows(after):
        batch.append(dump(_as_list(row, width)))
        size += len(batch[-1])
        if len(batch) >= most or size >= _BATCH_BYTES:
            _write(b'{"rows":[' + b",".join(batch) + b"]}\n")
            batch.clear()
            size, most = 0, _BATCH
    _write(b'{"rows":[' + b",".join(batch) + b"]}\n")


def _as_list(row: RawRow, width: int) -> list[Any]:
    cells: dict[str, Any] = row.values
    if len(cells) == width:
        return [row.number, list(cells.values())]
    every: Iterator[tuple[str, Any]] = iter(cells.items())
    return [row.number, [value for _, value in islice(every, width)], dict(every)]


def _send(what: Mapping[str, Any]) -> None:
    _write(dump(what) + b"\n")


def _write(line: bytes) -> None:
    view = memoryview(line)
    while view:
        view = view[os.write(1, view) :]


def _set_limits(limits: Limits) -> None:
    """Sets this process's limits, those that the system supports."""
    _set_limit(resource.RLIMIT_CORE, 0, 0)
    _set_limit(resource.RLIMIT_CPU, limits.split_cpu_s, limits.split_cpu_s + 1)
    most = _address_space() + limits.split_memory
    _set_limit(resource.RLIMIT_AS, most, most + _SPARE)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123 - no path of ours
        file.write("1000")  # when the machine runs out of memory, kill this process first


def _set_limit(kind: int, soft: int, hard: int) -> None:
    most = resource.getrlimit(kind)[1]
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (soft, hard))


def _address_space() -> int:
    """The interpreter's own address space, in bytes."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _read_orders(lines: queue.SimpleQueue[bytes]) -> None:
    """Reads the orders; ends this process with its parent."""
    parent, rest = os.getppid(), b""
    while True:
        if not select.select([0], [], [], _PARENT_S)[0]:
            if os.getppid() != parent:
                os._exit(1)  # the parent is gone, but another process has inherited the other end of the pipe
            continue
        piece = os.read(0, 65_536)
        if not piece:
            os._exit(1)
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            lines.put(line)


if __name__ == "__main__":
    sys.exit(main())
