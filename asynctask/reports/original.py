"""The list that a Task was made of, read again for its reports: every column as it was, in constant memory.

Text is read again from the upload itself. A workbook is read once, by a child process that keeps its rows beside it.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from asynctask.errors import InputError
from asynctask.lists.original_rows import KeptRows, all_columns, remove_drafts
from asynctask.lists.readers import Limits, Source, open_source
from asynctask.lists.uploads import Uploads
from asynctask.lists.workbooks import Workbook, is_workbook
from asynctask.logs import get_logger

__all__ = ["Original", "open_original"]

_MAX_NAMES: Final = 16_384
_EVERY: Final = 1_000


class Original(Protocol):
    """The list again. ``headers``: all its columns in order, those without a header too ("Column C")."""

    headers: tuple[str, ...]

    def rows(self) -> Generator[tuple[int, Mapping[str, Any]], None, None]:
        """Row number and cells by header, in order. Raises :class:`InputError` where the rest cannot be read."""
        ...


def open_original(
    uploads: Uploads,
    source: Mapping[str, Any],
    limits: Limits,
    expect: Collection[str],
    alive: Callable[[], None] = lambda: None,
) -> Original | None:
    """The list that ``source`` of a Task names; None where it is gone or cannot be read.

    Arguments: ``limits`` and ``expect`` as of :func:`~asynctask.lists.readers.open_source`; ``alive`` is called now and
    then while this takes long, and what it raises ends it. Raises :class:`Unavailable` where no child can be started.
    """
    try:
        path = uploads.find(str(source["name"]))
        if is_workbook(path):
            return _kept(uploads, path, source, limits, expect, alive)
        return _Text(path, source, limits, expect, alive)
    except (InputError, OSError) as error:
        get_logger("asynctask.report").warning("original_unreadable", name=source.get("name"), error=str(error))
        return None


class _Text:
    """A list of text: gone through once for the names of its columns, and again for its rows."""

    def __init__(
        self,
        path: Path,
        source: Mapping[str, Any],
        limits: Limits,
        expect: Collection[str],
        alive: Callable[[], None],
    ) -> None:
        self._path, self._source, self._limits, self._expect = path, source, limits, expect
        names: dict[str, None] = {}
        with self._open() as opened:
            for number, values in _cells(opened, quiet=True):
                if number % _EVERY == 0:
                    alive()
                if values.keys() - names.keys() and len(names) < _MAX_NAMES:
                    names.update(dict.fromkeys(values))
            self.headers: tuple[str, ...] = tuple(all_columns(opened, list(names)))

    def rows(self) -> Generator[tuple[int, Mapping[str, Any]], None, None]:
        with self._open() as opened:
            yield from _cells(opened)

    def _open(self) -> Source:
        return open_source(
            self._path,
            str(self._source["filename"]),
            sheet=self._source.get("sheet"),
            encoding=self._source.get("encoding"),
            limits=self._limits,
            expect=self._expect,
        )


def _cells(opened: Source, *, quiet: bool = False) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """With ``quiet`` a list that is broken in the middle ends there."""
    try:
        for row in opened.rows():
            yield row.number, row.values if isinstance(row.values, Mapping) else {"value": row.values}
    except InputError:
        if not quiet:
            raise


def _kept(
    uploads: Uploads,
    path: Path,
    source: Mapping[str, Any],
    limits: Limits,
    expect: Collection[str],
    alive: Callable[[], None],
) -> KeptRows:
    target = uploads.kept_rows(path.name)
    if (found := _readable(target)) is not None:
        return found
    # One at a time on a machine: each takes what a workbook takes, and who waits finds the work done.
    with _alone(path.with_name(".reading"), alive):
        if (found := _readable(target)) is None:
            remove_drafts(target)  # of a child that was killed
            try:
                with Workbook(path, str(source["filename"]), limits, alive=alive) as workbook:
                    workbook.keep(target, source.get("sheet"), expect)
            finally:
                remove_drafts(target)
            found = KeptRows(target)
    return found


def _readable(target: Path) -> KeptRows | None:
    try:
        return KeptRows(target)
    except InputError:
        return None


@contextmanager
def _alone(lock: Path, alive: Callable[[], None]) -> Iterator[None]:
    """Holds a lock between processes, which the death of its holder gives back."""
    pause = threading.Event()
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                alive()
                pause.wait(0.05)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the open file too
        os.close(descriptor)
