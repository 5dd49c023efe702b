"""Where an export lies: a folder of its own in ``data_dir`` or in a bucket, with a part for each shard, then the result.

Every file is there whole or not at all: in a folder it is written under a temporary name, synced and renamed; to a bucket
it is uploaded when it is whole. Names are made of a random id and of numbers, of nothing that a user said. The end of the
module has what writes there: the worker of a shard, and the job that merges.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import urlsplit

import orjson

from asynctask.clock import Ids
from asynctask.config import Config
from asynctask.errors import AsyncTaskError, ConfigError, Conflict, InputError, NotFound, Unavailable, not_installed
from asynctask.exports.rows import FORMATS, Format, Part, checked
from asynctask.job import current_job
from asynctask.ledger import queries
from asynctask.ledger.base import Ledger

__all__ = [
    "MERGER",
    "Bucket",
    "Export",
    "ExportFiles",
    "Folder",
    "PartsMissing",
    "ResultFile",
    "Store",
    "check_columns",
    "check_format",
    "merge",
    "result_of",
    "store_of",
    "write_shard",
]

_HEAD: Final = 64
"""Bytes before the body of a part: what it holds, as JSON with blanks after."""

_BLOCK: Final = 4 << 20
"""What is read of a bucket at once."""

_OURS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
"""What a write to the folder may end with."""


class PartsMissing(AsyncTaskError):
    """Shards ended well whose parts are not there."""

    code = "parts_missing"


# -- the contract, and its two implementations


class Store(ABC):
    """Where files are kept. A name has slashes, as in ``ID/parts/3.part``.

    Every method raises :class:`Unavailable` where the place cannot be reached or written.
    """

    @abstractmethod
    def written(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """A stream to write, seek and read, whose content is the file of that name, in the place of an earlier one, when
        the block ends; nothing changes where it raises."""

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """A stream to read, which can seek. Raises FileNotFoundError."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of a file. Raises FileNotFoundError."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """What lies in a folder, without the folder's name; leftovers of a killed process begin with a dot."""

    @abstractmethod
    def remove(self, name: str) -> bool:
        """Removes a file, or a folder with all that it holds; False where there is none."""

    @abstractmethod
    def location(self, name: str) -> str:
        """The path or URL, for people."""

    @abstractmethod
    def scratch(self, folder: str) -> Path:
        """A folder of this machine for temporary files."""

    @abstractmethod
    def check(self) -> None:
        """Raises :class:`Unavailable` where a library is missing."""


class Folder(Store):
    """A folder that all processes share."""

    def __init__(self, root: Path, ids: Ids) -> None:
        self._root = root
        self._ids = ids

    @contextmanager
    def written(self, name: str) -> Iterator[IO[bytes]]:
        path = self._root / name
        temporary = path.with_name(f".{self._ids.jid()}.tmp")
        try:
            with _writing(self._root):
                path.parent.mkdir(parents=True, exist_ok=True)
                with temporary.open("x+b") as out:
                    yield out
                    out.flush()
                    os.fsync(out.fileno())
                temporary.replace(path)
                descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        finally:
            temporary.unlink(missing_ok=True)

    def open(self, name: str) -> IO[bytes]:
        return (self._root / name).open("rb")

    def size(self, name: str) -> int:
        return (self._root / name).stat().st_size

    def names(self, folder: str) -> list[str]:
        return [path.name for path in (self._root / folder).iterdir()]

    def remove(self, name: str) -> bool:
        path = self._root / name
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        except FileNotFoundError:
            return False
        return True

    def location(self, name: str) -> str:
        return str(self._root / name)

    def scratch(self, folder: str) -> Path:
        return self._root / folder

    def check(self) -> None:
        """The standard library is enough."""


class Bucket(Store):
    """A bucket that fsspec reaches. Arguments: its URL, perhaps with a prefix; a folder of this machine, for temporary
    files.

    A file is written in the folder, under no name, so that a killed process leaves nothing, and uploaded when it is whole.
    """

    def __init__(self, url: str, scratch: Path) -> None:
        self._url = url.rstrip("/")
        self._scratch = scratch

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
            self._scratch.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._scratch) as out:
                yield out
                out.flush()
                out.seek(0)
                try:
                    with self._reached() as (files, root):
                        files.put_file(f"/dev/fd/{out.fileno()}", f"{root}/{name}")
                except FileNotFoundError as error:
                    raise Unavailable(f"the export could not be written: {error}; is there such a bucket?") from error

    def open(self, name: str) -> IO[bytes]:
        with self._reached() as (files, root):
            found: IO[bytes] = files.open(f"{root}/{name}", "rb", block_size=_BLOCK, cache_type="readahead")
            return found

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
        return f"{self._url}/{name}"

    def scratch(self, folder: str) -> Path:
        self._scratch.mkdir(parents=True, exist_ok=True)
        return self._scratch

    @contextmanager
    def _reached(self) -> Iterator[tuple[Any, str]]:
        """The file system, and the path of the URL in it. What a library of a bucket raises is anything."""
        self.check()
        import fsspec

        try:
            # Another process's files would be missing in a list that this one has kept.
            files, root = fsspec.url_to_fs(self._url, use_listings_cache=False)
            yield files, root
        except FileNotFoundError:
            raise
        except Exception as error:
            where = urlsplit(self._url)
            raise Unavailable(
                f"exports are kept in {where.scheme}://{where.hostname or ''}{where.path}, which cannot be used:"
                f" {type(error).__name__}: {error}"[:500]
            ) from error


def store_of(config: Config, ids: Ids) -> Store:
    """Where an application keeps its exports."""
    folder = Path(config.data_dir) / "exports"
    return Bucket(config.results_url, folder) if config.results_url else Folder(folder, ids)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raises :class:`Unavailable` where files cannot be written to a folder of this machine."""
    try:
        yield
    except OSError as error:
        if error.errno not in _OURS:  # of the function that yields the rows
            raise
        raise Unavailable(f"the export could not be written in {folder}: {error.strerror}; is the disk full?") from error


# -- the files of an export


@dataclass(frozen=True, slots=True)
class ResultFile:
    """The file of an export: its path or URL as ``location``, its ``manifest``, and ``open()``, which gives a stream of
    bytes that can seek."""

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
        """Writes the part of a shard, in the place of an earlier attempt's; ``write`` returns its rows."""
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
        self, export: str, generation: int, numbers: Sequence[int], form: Format, columns: Sequence[str], **said: Any
    ) -> dict[str, Any]:
        """Makes the result of a generation of these shards' parts, and returns its manifest; the second time, the first's.

        ``said``: what else stands in the manifest. The parts of a whole export are removed, those of a partial one kept
        for a retry of its other shards. Raises :class:`PartsMissing`, OSError.
        """
        made = self._manifest(_checked(export), generation)
        if made is None:
            parts = [self._part(export, number) for number in numbers]
            name = f"result-{generation}.{form.suffix}"
            with self._store.written(f"{export}/{name}") as out:
                form.merge(out, parts, columns, self._store.scratch(export))
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
        """The file of a generation. Raises :class:`NotFound` where it is not there."""
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
        """Removes what the result of this generation makes superfluous, and what a merge left whose process died."""
        for name in self._store.names(export):
            number = name.partition(".")[0].partition("-")[2]
            is_old = number.isdecimal() and int(number) < generation
            if name.startswith(".") or is_old or (name == "parts" and not keep_parts):
                self._store.remove(f"{export}/{name}")


def _checked(export: str) -> str:
    if not export.isalnum():
        raise Conflict(f"{export[:80]!r} is no export")
    return export


# -- performing an export: the worker that writes one shard's part, and the job that merges the parts when the Task closes

MERGER: Final = "asynctask.merge"
"""The name of the worker that merges."""

_CHECK_EVERY: Final = 1_000


@dataclass(frozen=True, slots=True)
class Export:
    """What :meth:`asynctask.AsyncTask.export` declared: the columns, and the function that yields a shard's rows."""

    columns: tuple[str, ...]
    rows: Callable[[Any], Iterable[Any]]


def check_columns(columns: Any) -> tuple[str, ...]:
    """The columns of a declaration. Raises :class:`ConfigError`."""
    found = () if isinstance(columns, str) else tuple(columns)
    if not found or not all(isinstance(name, str) and 0 < len(name) <= 255 for name in found):
        raise ConfigError("columns must be names of 1 to 255 characters, one at least")
    if len(set(found)) < len(found):
        raise ConfigError("columns must not have two of one name")
    return found


def check_format(name: Any, columns: Sequence[str]) -> str:
    """The format of a submission. Raises :class:`InputError`."""
    if not isinstance(name, str) or name not in FORMATS:
        raise InputError(f"format {str(name)[:80]!r} is none of {', '.join(FORMATS)}", code="invalid_format")
    FORMATS[name].check(columns)
    return name


def write_shard(ledger: Ledger, files: ExportFiles, export: Export, shard: Any) -> dict[str, int]:
    """Writes the part of the current job's shard; what it returns is the Event's result."""
    job = current_job()
    with ledger.database.read() as connection:
        number, said = queries.shard_of(connection, job.job_id)
    if number is None or said is None:
        raise Conflict("a shard is exported as a job of a Task: use submit_export")
    form = FORMATS[said["format"]]
    rows = checked(_stoppable(export.rows(shard)), export.columns)
    return files.write_part(said["export"], number, lambda out: form.write_part(out, rows, export.columns))


def _stoppable(rows: Iterable[Any]) -> Iterator[Any]:
    """The rows, until the job is to let go: the next attempt begins the shard anew."""
    job = current_job()
    for number, row in enumerate(rows, 1):
        yield row
        if number % _CHECK_EVERY == 0 and job.should_stop():
            job.stop()


def merge(ledger: Ledger, files: ExportFiles, said: Mapping[str, Any], progress: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the parts of the shards that ended well; what it returns is the manifest without what is long."""
    with ledger.database.read() as connection:
        done, missing = queries.shards(connection, int(progress["task_id"]))
    columns: Sequence[str] = said["columns"]
    made = files.merge(
        said["export"], int(progress["generation"]), done, FORMATS[said["format"]], columns,
        task_id=progress["task_id"], format=said["format"], shards=len(done) + len(missing), missing_shards=missing,
        partial=bool(missing) or progress["split"]["state"] == "failed" or progress["state"] == "cancelled",
    )  # fmt: skip
    return {name: made[name] for name in ("rows", "bytes", "sha256", "format", "partial", "shards")} | {
        "missing_shards": len(missing)
    }


def result_of(ledger: Ledger, files: ExportFiles, task_id: int, progress: Mapping[str, Any]) -> ResultFile:
    """The file of a Task's result. Raises :class:`Conflict` with the reason where there is none yet,
    :class:`NotFound` where it is gone."""
    with ledger.database.read() as connection:
        said = queries.export_of(connection, task_id)
    if said is None:
        raise Conflict(f"Task {task_id} is no export, so it has no result")
    if progress["result"] is None:
        why = "its merge failed" if progress["done"] else "it is made when the last shard has ended"
        raise Conflict(f"Task {task_id} is {progress['state']} and has no result: {why}")
    return files.result(said["export"], int(progress["generation"]))
