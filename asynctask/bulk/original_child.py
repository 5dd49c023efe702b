"""A child process that reads a workbook and keeps its rows beside it: workbooks take memory that a server must not lose.

It is told what to do by one line of JSON on its standard input, which its parent leaves open: the child ends with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import orjson

from asynctask.bulk.original_formats import percents_of
from asynctask.bulk.original_rows import keep_rows
from asynctask.bulk.readers import Limits, open_source
from asynctask.errors import InputError, Unavailable

__all__ = ["keep", "main"]

_POLL_S: Final = 0.05
_LONGEST_S: Final = 600.0
_SMALL: Final = 100_000
_SMALL_UNZIPPED: Final = 16_000_000


def keep(
    path: Path,
    filename: str,
    target: Path,
    *,
    sheet: str | None,
    limits: Limits,
    expect: Collection[str],
    alive: Callable[[], None],
) -> None:
    """Keeps the rows of the workbook ``path`` as ``target``: here if it is small in every way, else in a child process.

    ``alive`` is called again and again while the child works; what it raises ends the child. The other arguments are those
    of :func:`~asynctask.bulk.readers.open_source`. Raises :class:`InputError` where the workbook cannot be read,
    :class:`Unavailable` where no child can be started or it takes more than ten minutes.
    """
    if path.stat().st_size <= _SMALL:
        narrow = replace(limits, max_unzipped_bytes=min(limits.max_unzipped_bytes, _SMALL_UNZIPPED))
        try:
            _convert(path, filename, target, sheet, narrow, expect)
            return
        except InputError:
            pass  # too much for this process, or for any: the child says which
    said = {
        "path": str(path), "filename": filename, "target": str(target), "sheet": sheet, "limits": asdict(limits),
        "expect": sorted(expect),
    }  # fmt: skip
    _run(orjson.dumps(said) + b"\n", alive)


def _convert(path: Path, filename: str, target: Path, sheet: str | None, limits: Limits, expect: Collection[str]) -> None:
    with open_source(path, filename, sheet=sheet, limits=limits, expect=expect) as source:
        keep_rows(source, percents_of(path, limits, source.format, source.sheet_name), target)


def _run(order: bytes, alive: Callable[[], None]) -> None:
    argv = [sys.executable, "-m", "asynctask.bulk.original_child"]
    try:
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        raise Unavailable(f"no process can be started to read the list: {error.strerror}") from error
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            _hand_over(child.stdin, order)
            _wait(child, alive)
            answer = child.stdout.read(65_536)
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0:
        raise InputError(f"the list cannot be read again (its reader ended with {child.returncode})", code="damaged_file")
    said = orjson.loads(answer)
    if not said["ok"]:
        raise InputError(said["message"], code=said["code"])


def _hand_over(stream: Any, order: bytes) -> None:
    try:
        stream.write(order)
        stream.flush()
    except BrokenPipeError:
        pass  # it is gone already: its exit code says so


def _wait(child: subprocess.Popen[bytes], alive: Callable[[], None]) -> None:
    left = _LONGEST_S
    while True:
        try:
            child.wait(_POLL_S)
            return
        except subprocess.TimeoutExpired:
            alive()
            left -= _POLL_S
            if left <= 0:
                raise Unavailable(f"reading the list again took more than {_LONGEST_S:g} s") from None


def main() -> int:
    """The child: obeys one line of standard input, answers with one of standard output. Returns the exit code."""
    order = orjson.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()
    try:
        _convert(
            Path(order["path"]), order["filename"], Path(order["target"]), order["sheet"],
            Limits(**order["limits"]), order["expect"],
        )  # fmt: skip
        answer: dict[str, Any] = {"ok": True}
    except InputError as error:
        answer = {"ok": False, "code": error.code, "message": str(error)}
    sys.stdout.buffer.write(orjson.dumps(answer))
    sys.stdout.flush()
    return 0


def _end_with_parent() -> None:
    # Not the buffered stream: its lock would be held by this thread when the process ends.
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
