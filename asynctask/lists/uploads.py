"""Uploaded lists on disk, in ``data_dir``: so that a split can be taken up again, and reports have the user's own columns.

A file that somebody sent is kept as long as its Task. JSON items are written to one only where they are too many for one
slice, and only until they are split: the Events hold them then.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import orjson

from asynctask.clock import Ids
from asynctask.errors import InputError, TooLarge, Unavailable
from asynctask.messages import clean

__all__ = ["ITEMS", "KEPT_ROWS", "StoredFile", "Uploads", "is_for_split_only", "items_body"]

ITEMS = "items.json"
"""What a list of JSON items is called."""

KEPT_ROWS = ".rows"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A list on disk: ``name`` within the folder, the ``filename`` it was sent under, its size and SHA-256.

    ``is_items``: it is no file that somebody sent, but JSON items that wait to be split. ``named``: somebody gave the file
    its name, so it says what the list is.
    """

    name: str
    path: Path
    filename: str
    size: int
    sha256: str
    is_items: bool = False
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
        return StoredFile(name, path, clean(filename), size, digest.hexdigest(), named=named)

    def store_items(self, items: Any) -> StoredFile:
        """Writes a list of JSON items to disk, as an upload of its own. Raises :class:`InputError` for what is no JSON."""
        return self.store_body(items_body(items))

    def store_body(self, body: bytes) -> StoredFile:
        """The same of what :func:`items_body` made of the items."""
        return replace(self.store(io.BytesIO(body), ITEMS, limit=len(body), named=False), is_items=True)

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
        self.remove(stored.name)

    def remove(self, name: str) -> None:
        """Removes a list by its name, with what was made of it; nothing where it is gone. Raises OSError."""
        if name.isalnum():
            (self._folder / name).unlink(missing_ok=True)
            self.kept_rows(name).unlink(missing_ok=True)

    def _make_folder(self) -> Path:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unavailable(f"data_dir cannot be written: {self._folder}: {error.strerror}") from error
        return self._folder


def is_for_split_only(source: Mapping[str, Any]) -> bool:
    """Whether a stored list (``split_source`` of its Task) is JSON items, which nobody needs once they are split.

    Earlier versions did not say so; there a list of the name that such items are given is one.
    """
    named = source.get("filename") == ITEMS and not any(source.get(each) for each in ("sheet", "columns", "encoding"))
    return bool(source.get("items", named))


def items_body(items: Any) -> bytes:
    """A list of JSON items as text. Raises :class:`InputError` for what is no JSON.

    An integer of more than 64 bits stands in it as it is: the row that has it is refused, and the others go on.
    """
    try:
        return orjson.dumps(items)
    except TypeError as error:
        if "64-bit" in str(error):
            return json.dumps(items).encode()
        raise _not_json(items, error) from error


def _not_json(items: Any, error: TypeError) -> InputError:
    """Says which item it is; a list of several faults names the first."""
    for position, item in enumerate(items if isinstance(items, list) else (), start=1):
        try:
            orjson.dumps(item)
        except TypeError as found:
            return InputError(f"item {position} cannot be kept as JSON: {found}", code="not_json")
    return InputError(f"the items cannot be kept as JSON: {error}", code="not_json")


def _sync_folder(folder: Path) -> None:
    """The name of a new file is safe only with its folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
