"""Where an export lies: a folder of its own in ``data_dir``, with a part for each shard and then the result.

Every file is written under a temporary name, synced and renamed, so a name never stands for half a file. Names are made of
a random id and of numbers, of nothing that a user said.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import orjson

from asynctask.clock import Ids
from asynctask.errors import AsyncTaskError, Conflict, NotFound, Unavailable
from asynctask.exports.rows import Format, Part

__all__ = ["ExportFiles", "PartsMissing"]

_HEAD: Final = 64
"""Bytes before the body of a part: what it holds, as JSON with blanks after."""

_CHUNK: Final = 1 << 20
_OURS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
"""What a write to the folder may end with."""


class PartsMissing(AsyncTaskError):
    """Shards ended well whose parts are not there."""

    code = "parts_missing"


class ExportFiles:
    """The folder of exports in ``data_dir``."""

    def __init__(self, data_dir: Path, ids: Ids) -> None:
        self._root = data_dir / "exports"
        self._ids = ids

    # -- parts

    def write_part(self, export: str, number: int, write: Callable[[IO[bytes]], int]) -> dict[str, int]:
        """Writes the part of a shard, in the place of an earlier attempt's; ``write`` returns its rows."""
        with self._written(self._folder(export) / "parts" / f"{number}.part") as out:
            out.write(b" " * _HEAD)
            rows = write(out)
            size = out.tell()
            out.seek(0)
            out.write(orjson.dumps({"rows": rows, "size": size}).ljust(_HEAD - 1) + b"\n")
        return {"rows": rows, "bytes": size - _HEAD}

    def _part(self, export: str, number: int) -> Part:
        path = self._folder(export) / "parts" / f"{number}.part"
        try:
            with path.open("rb") as body:
                head = orjson.loads(body.read(_HEAD))
            whole = path.stat().st_size == head["size"]
        except (FileNotFoundError, ValueError, KeyError):
            whole = False
        if not whole:
            raise PartsMissing(
                f"the part of shard {number} is not in {path.parent}: is data_dir the same folder for every process?"
            )
        return Part(path, _HEAD, int(head["rows"]))

    # -- the result

    def merge(
        self, export: str, generation: int, numbers: Sequence[int], form: Format, columns: Sequence[str], **said: Any
    ) -> dict[str, Any]:
        """Makes the result of a generation of these shards' parts, and returns its manifest; the second time, the first's.

        ``said``: what else stands in the manifest. The parts of a whole export are removed, those of a partial one kept
        for a retry of its other shards. Raises :class:`PartsMissing`, OSError.
        """
        folder = self._folder(export)
        made = self._manifest(export, generation)
        if made is None:
            parts = [self._part(export, number) for number in numbers]
            path = folder / f"result-{generation}.{form.suffix}"
            with self._written(path) as out:
                form.merge(out, parts, columns, folder)
                out.flush()
                size, digest = _measured(Path(out.name))
            made = {
                **said, "columns": list(columns), "rows": sum(part.rows for part in parts), "bytes": size, "sha256": digest,
                "file": path.name, "generation": generation,
            }  # fmt: skip
            with self._written(folder / f"manifest-{generation}.json") as out:
                out.write(orjson.dumps(made, option=orjson.OPT_INDENT_2))
        self._tidy(folder, generation, keep_parts=bool(made["partial"]))
        return made

    def result(self, export: str, generation: int) -> tuple[Path, dict[str, Any]]:
        """The file of a generation and its manifest. Raises :class:`NotFound` where it is not in this ``data_dir``."""
        made = self._manifest(export, generation)
        if made is None:
            raise NotFound("the result is not in data_dir any more; is it the same folder for every process?")
        return self._folder(export) / str(made["file"]), made

    def remove(self, export: str) -> bool:
        """Removes everything of an export; False where there is nothing. Raises OSError."""
        folder = self._folder(export)
        if not folder.exists():
            return False
        shutil.rmtree(folder)
        return True

    def _manifest(self, export: str, generation: int) -> dict[str, Any] | None:
        folder = self._folder(export)
        try:
            made: dict[str, Any] = orjson.loads((folder / f"manifest-{generation}.json").read_bytes())
            return made if (folder / made["file"]).stat().st_size == made["bytes"] else None
        except FileNotFoundError:
            return None

    def _tidy(self, folder: Path, generation: int, *, keep_parts: bool) -> None:
        """Removes what the result of this generation makes superfluous."""
        if not keep_parts:
            shutil.rmtree(folder / "parts", ignore_errors=True)
        for path in folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)  # of a merge whose process died
        for path in folder.iterdir():
            number = path.stem.partition(".")[0].partition("-")[2]
            if number.isdecimal() and int(number) < generation:
                path.unlink(missing_ok=True)

    def _folder(self, export: str) -> Path:
        if not export.isalnum():
            raise Conflict(f"{export[:80]!r} is no export")
        return self._root / export

    @contextmanager
    def _written(self, path: Path) -> Iterator[IO[bytes]]:
        """A file that appears whole, or not at all. Raises :class:`Unavailable` where it cannot be written."""
        temporary = path.with_name(f".{self._ids.jid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
            temporary.replace(path)
            descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno not in _OURS:  # of the function that yields the rows
                raise
            raise Unavailable(
                f"the export could not be written in {self._root}: {error.strerror}; is the disk full?"
            ) from error
        finally:
            temporary.unlink(missing_ok=True)


def _measured(path: Path) -> tuple[int, str]:
    digest = hashlib.sha256()
    with path.open("rb") as body:
        while chunk := body.read(_CHUNK):
            digest.update(chunk)
    return path.stat().st_size, digest.hexdigest()
