"""The storage of exports: a folder of each in ``data_dir`` or in a bucket, with a part for each shard, then the result.

Every file is whole or absent: in a folder it is written under a temporary name, synced and renamed; to a bucket it is
uploaded when complete. Names consist of a random id and numbers, not of user input.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import urlsplit

import orjson

from asynctask.clock import Ids
from asynctask.config import Config, masked_url, without_secrets
from asynctask.errors import AsyncTaskError, Conflict, NotFound, StorageUnavailable, Unavailable, not_installed
from asynctask.exports.rows import ExportFormat, Part
from asynctask.lists.uploads import make_private_folder, open_privately, sync_folder
from asynctask.logs import get_logger

_HEAD: Final = 64
"""Bytes before the body of a part: its description as JSON, padded with blanks."""

_BLOCK: Final = 4 << 20
"""Bytes read from a bucket at once."""

_BUFFER: Final = 1 << 16
"""Bytes that are copied at once from what was read of a bucket."""

_OURS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
"""Errors of a write to the folder that concern its file system."""


class PartsMissing(AsyncTaskError):
    """Shards ended well, and their parts are missing."""

    code = "parts_missing"


# -- the two stores; what their methods do is told of the first


class Folder:
    """A folder that all processes share. A name of a file has slashes, as in ``ID/parts/3.part``.

    Every method raises :class:`Unavailable` if the storage cannot be reached or written.
    """

    def __init__(self, root: Path, ids: Ids) -> None:
        self._root = root
        self._ids = ids

    @contextmanager
    def written(self, name: str) -> Iterator[IO[bytes]]:
        """A stream to write, seek and read. When the block ends, its content replaces the file of that name; nothing
        changes if the block raises."""
        path = self._root / name
        temporary = path.with_name(f".{self._ids.jid()}.tmp")
        try:
            with _writing(self._root):
                make_private_folder(path.parent)
                with open(temporary, "x+b", opener=open_privately) as out:
                    yield out
                    out.flush()
                    os.fsync(out.fileno())
                temporary.replace(path)
                sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)

    def open(self, name: str) -> IO[bytes]:
        """A seekable stream to read. Raises FileNotFoundError."""
        return (self._root / name).open("rb")

    def size(self, name: str) -> int:
        """Bytes of a file. Raises FileNotFoundError."""
        return (self._root / name).stat().st_size

    def names(self, folder: str) -> list[str]:
        """The names in a folder, without its own; leftovers of a killed process begin with a dot."""
        return [path.name for path in (self._root / folder).iterdir()]

    def remove(self, name: str) -> bool:
        """Removes a file, or a folder with its content; False if there is none."""
        path = self._root / name
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        except FileNotFoundError:
            return False
        return True

    def location(self, name: str) -> str:
        """The path or URL, for people: without secrets."""
        return str(self._root / name)

    def check(self) -> None:
        """Raises :class:`Unavailable` if a library is missing."""


class Bucket:
    """A bucket that fsspec reaches. Arguments: its URL, optionally with a prefix; a folder of this machine, for temporary
    files.

    A file is written in the folder, unnamed, so that a killed process leaves nothing, and uploaded when complete. The URL
    and what the bucket's library says may hold secrets: an error has neither.
    """

    def __init__(self, url: str, scratch: Path) -> None:
        self._url = url.rstrip("/")
        self._shown = masked_url(self._url)
        self._scratch = scratch
        self._log = get_logger("asynctask.exports")

    def check(self) -> None:
        if importlib.util.find_spec("fsspec") is None:
            raise Unavailable(f"results_url: {not_installed('fsspec', 'buckets')}")
        import fsspec

        scheme = urlsplit(self._url).scheme
        try:
            fsspec.get_filesystem_class(scheme)
        except ValueError as error:
            raise Unavailable(f"results_url: {error}") from None
        except ImportError as error:
            wanted = not_installed("s3fs", "buckets") if scheme in ("s3", "s3a") else str(error)
            raise Unavailable(f"results_url: {wanted}") from None

    @contextmanager
    def written(self, name: str) -> Iterator[IO[bytes]]:
        with _writing(self._scratch):
            make_private_folder(self._scratch)
            with tempfile.TemporaryFile(dir=self._scratch) as out:
                yield out
                out.flush()
                out.seek(0)
                try:
                    with self._reached() as (files, root):
                        files.put_file(f"/dev/fd/{out.fileno()}", f"{root}/{name}")
                except FileNotFoundError:
                    raise StorageUnavailable(
                        f"the export could not be written to {self._shown}: is there such a bucket?"
                    ) from None

    def open(self, name: str) -> IO[bytes]:
        with self._reached() as (files, root):
            found = files.open(f"{root}/{name}", "rb", block_size=_BLOCK, cache_type="readahead")
            return io.BufferedReader(_Remote(found, self._translated), _BUFFER)

    def size(self, name: str) -> int:
        with self._reached() as (files, root):
            return int(files.info(f"{root}/{name}")["size"])

    def names(self, folder: str) -> list[str]:
        with self._reached() as (files, root):
            return [str(path).rpartition("/")[2] for path in files.ls(f"{root}/{folder}", detail=False)]

    def remove(self, name: str) -> bool:
        try:
            with self._reached() as (files, root):
                files.rm(f"{root}/{name}", recursive=True)
        except FileNotFoundError:
            return False
        return True

    def location(self, name: str) -> str:
        return f"{self._shown}/{name}"

    @contextmanager
    def _reached(self) -> Iterator[tuple[Any, str]]:
        """The file system, and the path of the URL in it."""
        self.check()
        import fsspec

        with self._translated():
            # A cached listing would lack the files of other processes.
            files, root = fsspec.url_to_fs(self._url, use_listings_cache=False)
            yield files, root

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Converts errors of the bucket's library, which may raise anything; the log has what it says."""
        try:
            yield
        except (FileNotFoundError, Unavailable):
            raise
        except Exception as error:
            said = without_secrets(f"{type(error).__name__}: {error}", self._url)
            self._log.error("bucket_unavailable", bucket=self._shown, error=said[:1000])
            raise StorageUnavailable(
                f"exports are kept in {self._shown}, which cannot be used ({type(error).__name__}); the log has the reason"
            ) from None


class _Remote(io.RawIOBase):
    """A file of a bucket, opened to read, whose library raises only what ``translated`` lets pass."""

    def __init__(self, file: IO[bytes], translated: Callable[[], AbstractContextManager[None]]) -> None:
        self._file = file
        self._translated = translated

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._translated():
            read = self._file.read(len(buffer))
        buffer[: len(read)] = read
        return len(read)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


Store = Folder | Bucket


def store_of(config: Config, ids: Ids) -> Store:
    """Where an application keeps its exports."""
    folder = Path(config.data_dir) / "exports"
    return Bucket(config.results_url, folder) if config.results_url else Folder(folder, ids)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raises :class:`Unavailable` if files cannot be written to a folder of this machine."""
    try:
        yield
    except OSError as error:
        if error.errno not in _OURS:  # of the function that yields the rows
            raise
        raise Unavailable(f"the export could not be written in {folder}: {error.strerror}; is the disk full?") from error


# -- the files of an export


@dataclass(frozen=True, slots=True)
class ResultFile:
    """The file of an export: its path or URL as ``location``, its ``manifest``, and ``open()``, which returns a seekable
    stream of bytes."""

    location: str
    manifest: dict[str, Any]
    open: Callable[[], IO[bytes]]


class ExportFiles:
    """The files of all exports."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.check = store.check

    # -- parts

    def write_part(self, export: str, number: int, write: Callable[[IO[bytes]], int]) -> dict[str, int]:
        """Writes the part of a shard, replacing that of an earlier attempt; ``write`` returns its rows."""
        with self._store.written(f"{_checked(export)}/parts/{number}.part") as out:
            out.write(b" " * _HEAD)
            rows = write(out)
            size = out.tell()
            out.seek(0)
            out.write(orjson.dumps({"rows": rows, "size": size}).ljust(_HEAD - 1) + b"\n")
        return {"rows": rows, "bytes": size - _HEAD}

    def _part(self, export: str, number: int) -> Part:
        name = f"{export}/parts/{number}.part"
        try:
            with self._store.open(name) as body:
                head = orjson.loads(body.read(_HEAD))
            whole = self._store.size(name) == head["size"]
        except (FileNotFoundError, ValueError, KeyError):
            whole = False
        if not whole:
            raise PartsMissing(
                f"the part of shard {number} is not at {self._store.location(name)}: have all processes the same"
                " results_url, or without one the same folder as data_dir?"
            )

        def body_of() -> IO[bytes]:
            body = self._store.open(name)
            body.seek(_HEAD)
            return body

        return Part(body_of, int(head["rows"]))

    # -- the result

    def merge(
        self, export: str, generation: int, numbers: Sequence[int], form: ExportFormat, columns: Sequence[str], **said: Any
    ) -> dict[str, Any]:
        """Merges the parts of these shards into the result of a generation, and returns its manifest; if repeated, the
        first one.

        ``said``: further members of the manifest. The parts of a whole export are removed, those of a partial one kept for
        a retry of its other shards. Raises :class:`PartsMissing`, OSError.
        """
        made = self._manifest(_checked(export), generation)
        if made is None:
            parts = [self._part(export, number) for number in numbers]
            name = f"result-{generation}.{form.suffix}"
            with self._store.written(f"{export}/{name}") as out:
                form.merge(out, parts, columns)
                out.seek(0)
                digest = hashlib.file_digest(out, "sha256").hexdigest()  # type: ignore[arg-type]
                size = out.tell()
            made = {
                **said, "columns": list(columns), "rows": sum(part.rows for part in parts), "bytes": size, "sha256": digest,
                "file": name, "generation": generation,
            }  # fmt: skip
            with self._store.written(f"{export}/manifest-{generation}.json") as out:
                out.write(orjson.dumps(made, option=orjson.OPT_INDENT_2))
        self._tidy(export, generation, keep_parts=bool(made["partial"]))
        return made

    def result(self, export: str, generation: int) -> ResultFile:
        """The file of a generation. Raises :class:`NotFound` if it is missing."""
        made = self._manifest(_checked(export), generation)
        if made is None:
            raise NotFound(
                "the result is not there any more; have all processes the same results_url, or without one the same"
                " folder as data_dir?"
            )
        name = f"{export}/{made['file']}"
        return ResultFile(self._store.location(name), made, lambda: self._store.open(name))

    def remove(self, export: str) -> bool:
        """Removes everything of an export; False where there is nothing. Raises OSError, :class:`Unavailable`."""
        return self._store.remove(_checked(export))

    def _manifest(self, export: str, generation: int) -> dict[str, Any] | None:
        try:
            with self._store.open(f"{export}/manifest-{generation}.json") as body:
                made: dict[str, Any] = orjson.loads(body.read())
            return made if self._store.size(f"{export}/{made['file']}") == made["bytes"] else None
        except FileNotFoundError:
            return None

    def _tidy(self, export: str, generation: int, *, keep_parts: bool) -> None:
        """Removes what the result of this generation makes superfluous, and leftovers of a killed merge."""
        for name in self._store.names(export):
            number = name.partition(".")[0].partition("-")[2]
            is_old = number.isdecimal() and int(number) < generation
            if name.startswith(".") or is_old or (name == "parts" and not keep_parts):
                self._store.remove(f"{export}/{name}")


def _checked(export: str) -> str:
    if not export.isalnum():
        raise Conflict(f"{export[:80]!r} is no export")
    return export
