"""Uploaded lists on disk: kept in ``data_dir`` until their Task is purged, so that a split can be taken up again."""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from asynctask.clock import Ids
from asynctask.errors import InputError, TooLarge, Unavailable
from asynctask.messages import clean

__all__ = ["KEPT_ROWS", "StoredFile", "Uploads"]

KEPT_ROWS = ".rows"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A list on disk: ``name`` within the folder, the ``filename`` it was sent under, its size and SHA-256.

    ``named``: somebody gave the file its name, so it says what the list is.
    """

    name: str
    path: Path
    filename: str
    size: int
    sha256: str
    named: bool = True


class Uploads:
    """The folder of uploads. Arguments: ``data_dir``; ``max_bytes`` of one file; ``ids`` for the names."""

    def __init__(self, data_dir: Path, max_bytes: int, ids: Ids) -> None:
        self._folder = data_dir / "uploads"
        self._max_bytes = max_bytes
        self._ids = ids

    def store(self, stream: IO[bytes], filename: str, *, limit: int | None = None, named: bool = True) -> StoredFile:
        """Writes a stream to disk, in constant memory, and returns only when it is really there.

        ``named``: ``filename`` is the user's; False where it only says of which format the list is.

        Raises :class:`TooLarge` beyond ``limit`` (default: the configured one); whatever the stream raises when it
        breaks off is passed on, and nothing stays behind.
        """
        limit = self._max_bytes if limit is None else limit
        name = self._ids.jid()
        path = self._make_folder() / name
        digest, size = hashlib.sha256(), 0
        try:
            with path.open("xb") as out:
                while chunk := stream.read(_CHUNK):
                    size += len(chunk)
                    if size > limit:
                        raise TooLarge(
                            f"the file has more than {limit:,} bytes (max_file_bytes); split the list, or have the operator"
                            " raise ASYNCTASK_MAX_FILE_BYTES"
                        )
                    digest.update(chunk)
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())
            _sync_folder(path.parent)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise Unavailable(f"the upload could not be written to {self._folder}: {error.strerror}") from error
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return StoredFile(name, path, clean(filename), size, digest.hexdigest(), named)

    def store_items(self, items: Any) -> StoredFile:
        """Writes a list of JSON items to disk, as an upload of its own. Raises :class:`InputError` for what is no JSON."""
        try:
            body = orjson.dumps(items)
        except TypeError as error:
            raise _not_json(items, error) from error
        return self.store(io.BytesIO(body), "items.json", limit=len(body), named=False)

    def find(self, name: str) -> Path:
        """The path of a stored list. Raises :class:`InputError` where it is gone, or the name is none of ours."""
        if not name.isalnum():
            raise InputError(f"{name!r} is no stored upload")
        path = self._folder / name
        if not path.is_file():
            raise InputError(
                f"the uploaded file is not in {self._folder} any more; is data_dir the same folder for every process?",
                code="upload_missing",
            )
        return path

    def kept_rows(self, name: str) -> Path:
        """Where the rows of a stored workbook are kept once they were read for a report; they go when it goes."""
        return self._folder / f"{name}{KEPT_ROWS}"

    def discard(self, stored: StoredFile) -> None:
        """Removes a list that became no Task, with what was made of it."""
        stored.path.unlink(missing_ok=True)
        self.kept_rows(stored.name).unlink(missing_ok=True)

    def _make_folder(self) -> Path:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unavailable(f"data_dir cannot be written: {self._folder}: {error.strerror}") from error
        return self._folder


def _not_json(items: Any, error: TypeError) -> InputError:
    """Says which item it is; a list of several faults names the first."""
    for position, item in enumerate(items if isinstance(items, list) else (), start=1):
        try:
            orjson.dumps(item)
        except TypeError as found:
            return InputError(f"item {position} cannot be kept as JSON: {_mended(found)}", code="not_json")
    return InputError(f"the items cannot be kept as JSON: {_mended(error)}", code="not_json")


def _mended(error: TypeError) -> str:
    return f"{error}; write numbers of more than 64 bits in double quotes" if "64-bit" in str(error) else str(error)


def _sync_folder(folder: Path) -> None:
    """The name of a new file is safe only with its folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
