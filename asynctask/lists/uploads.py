"""Lists on disk, in ``data_dir``: for resuming a split, and for reports in the user's own columns.

An uploaded file is kept as long as its Task. JSON items are stored only if they are more than one slice, and only until
they are split: the Events hold them then.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self

import orjson

from asynctask._version import __version__
from asynctask.clock import Ids
from asynctask.errors import InputError, TooLarge, Unavailable
from asynctask.lists.readers import Limits, RawRow, Source
from asynctask.lists.readers.base import too_costly
from asynctask.lists.readers.json import items_of
from asynctask.lists.written_cells import item_text, plain_json, unpacked
from asynctask.messages import clean

if TYPE_CHECKING:
    from asynctask.lists.readers.opening import Head

ITEMS = "items.json"
"""The file name of a list of JSON items."""

_CHUNK = 1 << 20


def make_private_folder(folder: Path) -> None:
    """Makes a folder of ``data_dir`` and those above it, for this user alone (0700); existing ones stay as they are. Raises
    OSError."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)


def open_privately(path: str, flags: int) -> int:
    """An ``opener`` of :func:`open`: the file that it makes is for this user alone (0600), whatever the umask allows."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A list on disk: ``name`` within the folder, the ``filename`` it was sent under, its size and SHA-256.

    ``is_items``: JSON items that wait to be split, not an uploaded file. ``named``: the file name is the user's, so it
    says what the list is.
    """

    name: str
    path: Path
    filename: str
    size: int
    sha256: str
    is_items: bool = False
    named: bool = True

    @property
    def title(self) -> str:
        """The title of its Task, if no other is given."""
        return self.filename if self.named else ""


class Uploads:
    """The folder of uploads. Arguments: ``data_dir``; ``max_bytes`` of one file; ``ids`` for file names."""

    def __init__(self, data_dir: Path, max_bytes: int, ids: Ids) -> None:
        self.data_dir = data_dir
        self._folder = data_dir / "uploads"
        self._max_bytes = max_bytes
        self._ids = ids

    def store(self, stream: IO[bytes], filename: str, *, limit: int | None = None, named: bool = True) -> StoredFile:
        """Writes a stream to disk in constant memory, and syncs it (fsync) before it returns.

        ``named``: ``filename`` is the user's; False where it only gives the format.

        Raises :class:`TooLarge` beyond ``limit`` (default: the configured one), and what the stream raises; after an error
        no file remains.
        """
        limit = self._max_bytes if limit is None else limit
        name = self._ids.jid()
        path = self._make_folder() / name
        digest, size = hashlib.sha256(), 0
        try:
            with open(path, "xb", opener=open_privately) as out:
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
            sync_folder(path.parent)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise Unavailable(f"the upload could not be written to {self._folder}: {error.strerror}") from error
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return StoredFile(name, path, clean(filename), size, digest.hexdigest(), named=named)

    def store_body(self, body: bytes) -> StoredFile:
        """Stores the result of :func:`items_body`."""
        return replace(self.store(io.BytesIO(body), ITEMS, limit=len(body), named=False), is_items=True)

    @contextmanager
    def removing_refused(self, listed: object) -> Iterator[None]:
        """Removes a list, if it is a stored one, should the block raise :class:`InputError`."""
        try:
            yield
        except InputError:
            if isinstance(listed, StoredFile):
                self.remove(listed.name)
            raise

    def find(self, name: str) -> Path:
        """The path of a stored list. Raises :class:`InputError` for a missing file or an invalid name."""
        if not name.isalnum():
            raise InputError(f"{name!r} is no stored upload")
        path = self._folder / name
        if not path.is_file():
            raise InputError(
                f"the uploaded file is not in {self._folder} any more; is data_dir the same folder for every process?",
                code="upload_missing",
            )
        return path

    def remove(self, name: str) -> bool:
        """Removes a list by its name. Returns False for a missing one. Raises OSError."""
        if not name.isalnum():
            return False
        (self._folder / f"{name}.rows").unlink(missing_ok=True)  # an earlier version cached the rows of a workbook
        try:
            (self._folder / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def _make_folder(self) -> Path:
        try:
            make_private_folder(self._folder)
        except OSError as error:
            raise Unavailable(f"data_dir cannot be written: {self._folder}: {error.strerror}") from error
        return self._folder


class JsonItems:
    """A list of JSON items as :func:`items_body` writes it: as Python's objects it takes up to 24 times as much memory.

    Arguments: the ``text``; the ``count`` of its items; ``limits``, of which it takes those of an item.
    """

    __slots__ = ("_count", "_limits", "text")

    def __init__(self, text: bytes, count: int, limits: Limits) -> None:
        self.text, self._count, self._limits = text, count, limits

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        """The items one by one; None for one far above ``max_item_bytes``, which will be refused."""
        for piece in items_of(iter((self.text,)), self._limits):
            yield None if piece.raw is None else json.loads(piece.raw)

    def __repr__(self) -> str:
        return f"<{self._count:,} items>"


def items_body(items: Any) -> bytes:
    """A list of JSON items as text. Raises :class:`InputError` ``not_json``.

    An integer of more than 64 bits is written as it is: only its row is refused later.
    """
    try:
        return item_text(items, plain_json)
    except TypeError as error:
        if "64-bit" in str(error):
            return json.dumps(items).encode()
        raise _not_json(items, error) from error


def _not_json(items: Any, error: TypeError) -> InputError:
    """Names the first faulty item."""
    for position, item in enumerate(items if isinstance(items, list) else (), start=1):
        try:
            item_text(item, plain_json)
        except TypeError as found:
            return InputError(f"item {position} cannot be kept as JSON: {found}", code="not_json")
    return InputError(f"the items cannot be kept as JSON: {error}", code="not_json")


def sync_folder(folder: Path) -> None:
    """The directory entry of a new file is durable only once its folder is synced."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- reading an upload: texts here, workbooks in a child process
#
# The cost of reading a text is bounded by its size. A workbook is compressed, refers from part to part and repeats cells
# by number, so its cost is unbounded: only a child process under kernel limits parses one.

_MAGIC: Final = (b"PK\x03\x04", b"PK\x05\x06", b"\xd0\xcf\x11\xe0")
_POLL_MS: Final = 50
_PIPE_CHUNK: Final = 1 << 18
_ANOTHER_VERSION: Final = 3  # as in workbook_child, which loads every reader
_START: Final = "import sys; sys.path[:] = sys.argv[1:]; from asynctask.lists.workbook_child import main; sys.exit(main())"
"""The child imports from this process's paths, regardless of its working directory and environment."""
_CHILD_ENVIRON: Final = re.compile(r"PATH|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|DYLD_\w+")
"""What a child needs of the environment: the libraries of its interpreter, the time zone and the language."""


class ListFile:
    """An uploaded list: a context manager that opens its sheets. This one is a text, which has none."""

    def __init__(self, path: Path, filename: str, limits: Limits, encoding: str | None = None) -> None:
        self._path, self._filename, self._limits, self._encoding = path, filename, limits, encoding

    def open(
        self,
        sheet: str | None,
        expect: Collection[str],
        *,
        header: int | None = None,
        unzipped: int | None = None,
        report: bool = False,
    ) -> Source:
        """The named sheet, else the first visible one with rows; arguments and errors as of
        :func:`~asynctask.lists.readers.opening.open_source`. ``unzipped``: a lower limit on the workbook's unzipped
        bytes."""
        from asynctask.lists.readers.opening import open_source  # loads every reader; many processes read no list

        return open_source(
            self._path,
            self._filename,
            sheet=sheet,
            encoding=self._encoding,
            limits=self._limits,
            expect=expect,
            header=header,
        )

    def head(self, sheet: str | None, expect: Collection[str]) -> Head:
        """The beginning of the sheet that :meth:`open` would open. Errors as of that."""
        from asynctask.lists.readers.opening import read_head  # as above

        return read_head(self._path, self._filename, limits=self._limits, expect=expect, encoding=self._encoding)

    def sheets(self) -> list[str]:
        """The visible sheets in the workbook's order; empty for a text."""
        return []

    def close(self) -> None:
        """Ends what reads the list; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def list_file(
    path: Path, filename: str, limits: Limits, *, encoding: str | None = None, alive: Callable[[], None] = lambda: None
) -> ListFile:
    """The list in a file of any format. Arguments as of :func:`~asynctask.lists.readers.opening.open_source`; ``alive`` is
    called every 50 ms while a child is silent, and an exception it raises ends the child."""
    if is_workbook(path):
        return UploadedWorkbook(path, filename, limits, alive=alive)
    return ListFile(path, filename, limits, encoding)


def is_workbook(path: Path) -> bool:
    """Whether a file begins with the signature of a workbook; the child determines the format."""
    with path.open("rb") as file:
        return file.read(4) in _MAGIC


class _Died(Exception):
    """The child ended for a reason other than a limit; the order may be repeated."""


class UploadedWorkbook(ListFile):
    """A workbook, read by a child process under ``split_cpu_s`` and ``split_memory``.

    The limits cover all orders to one child. A killed child is started once more. Raises :class:`InputError`
    ``too_costly`` beyond a limit and ``reader_died`` after a second kill, :class:`Unavailable` where no child starts.
    """

    def __init__(self, path: Path, filename: str, limits: Limits, *, alive: Callable[[], None] = lambda: None) -> None:
        super().__init__(path, filename, limits)
        self._alive = alive
        self._child: subprocess.Popen[bytes] | None = None
        self._rest = bytearray()
        self._pending: object = None
        """The order whose answers are still unread."""
        self._deaths = 0

    def open(
        self,
        sheet: str | None,
        expect: Collection[str],
        *,
        header: int | None = None,
        unzipped: int | None = None,
        report: bool = False,
    ) -> Source:
        """See :class:`ListFile`."""
        order = {"sheet": sheet, "expect": sorted(expect), "header": header, "unzipped": unzipped, "report": report}
        return _Sheet(self, order, self._answer({**order, "do": "open"}))

    def head(self, sheet: str | None, expect: Collection[str]) -> Head:
        """See :class:`ListFile`."""
        from asynctask.lists.readers.opening import Head  # as above

        order = {"do": "head", "sheet": sheet, "expect": sorted(expect)}
        form, found, encoding, rows = self._answer(order)["head"]
        cells = [(number, [unpacked(cell) if type(cell) is dict else cell for cell in row]) for number, row in rows]
        return Head(form, found, encoding, cells)

    def sheets(self) -> list[str]:
        """See :class:`ListFile`."""
        return list(self._answer({"do": "sheets"})["sheets"])

    def close(self) -> None:
        """Ends the child; idempotent."""
        child, self._child = self._child, None
        self._pending = None
        self._rest.clear()
        if child is not None:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                with suppress(BrokenPipeError):  # the child ended before it read an order
                    stream and stream.close()

    def stream(self, order: Mapping[str, Any], after: int) -> Iterator[list[Any]]:
        """The rows after the row ``after``, as the child sends them."""
        while True:
            with suppress(_Died):
                for answer in self._answers({**order, "do": "rows", "after": after}):
                    for row in answer.get("rows", ()):
                        yield row
                        after = row[0]
                return

    def _answer(self, order: Mapping[str, Any]) -> dict[str, Any]:
        while True:
            with suppress(_Died):
                (answer,) = self._answers(order)
                return answer

    def _answers(self, order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """All answers of the child to an order. Raises :class:`_Died` where the order may be repeated."""
        if self._pending is not None:  # an earlier order's rows were left unread
            self.close()
        if self._child is None:
            self._start()
        pending = self._pending = object()
        self._send(order)
        while True:
            if self._pending is not pending:
                raise RuntimeError("the rows were requested again; these end here")
            line = self._read_line()
            if not line:
                self._explain_exit()
                raise _Died
            answer: dict[str, Any] = orjson.loads(line)
            if "rows" not in answer:
                self._pending = None
            if "error" in answer:
                raise InputError.from_json(answer["error"])
            yield answer
            if "rows" not in answer:
                return

    # -- the child

    def _start(self) -> None:
        argv = [sys.executable, "-I", "-c", _START, *map(os.path.abspath, sys.path)]
        # Not this process's own: a workbook could take over its reader, and there would find tokens and passwords.
        environ = {name: value for name, value in os.environ.items() if _CHILD_ENVIRON.fullmatch(name)}
        environ["MALLOC_ARENA_MAX"] = "1"  # one arena: its memory is limited, its threads are few
        try:
            child = self._child = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, start_new_session=True
            )
        except OSError as error:
            raise Unavailable(f"no process can be started to read the workbook: {error.strerror}") from error
        order = {
            "version": __version__, "path": str(self._path.absolute()), "filename": self._filename,
            "limits": asdict(self._limits),
        }  # fmt: skip
        self._send(order)
        if not self._read_line():
            code = child.wait()
            self.close()
            reason = (
                "AsyncTask was replaced since this process started" if code == _ANOTHER_VERSION else f"exit code {code}"
            )
            raise Unavailable(f"the process that reads the workbook did not start ({reason}); restart this one")

    def _send(self, order: Mapping[str, Any]) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # the child is gone; reading its answer finds that out
            self._child.stdin.write(orjson.dumps(order) + b"\n")
            self._child.stdin.flush()

    def _read_line(self) -> bytes:
        """The next line of the child; empty at its end."""
        assert self._child is not None
        assert self._child.stdout is not None
        output, searched = self._child.stdout.fileno(), 0
        poll = select.poll()
        poll.register(output, select.POLLIN)
        while (end := self._rest.find(b"\n", searched)) < 0:
            searched = len(self._rest)
            while not poll.poll(_POLL_MS):
                self._alive()
            piece = os.read(output, _PIPE_CHUNK)
            if not piece:
                return b""
            self._rest += piece
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        return line

    def _explain_exit(self) -> None:
        """Raises the reason of a child's end if it is certain: exceeded processor time, or a second death."""
        assert self._child is not None
        code = self._child.wait()
        self.close()
        if code == -signal.SIGXCPU:
            raise too_costly("split_cpu_s", self._limits)
        self._deaths += 1
        if self._deaths > 1:
            raise InputError(
                f"the process that read the workbook was ended twice (exit code {code}), by the system for lack of memory"
                " perhaps; split the workbook into several, or save it as CSV",
                code="reader_died",
            )


class _Sheet(Source):
    """A sheet of a workbook; ``answer`` has its attributes."""

    def __init__(self, workbook: UploadedWorkbook, order: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        self._workbook, self._order = workbook, order
        self.format, self.sheet_name, self.planned = answer["format"], answer["sheet"], answer["planned"]
        self.headers, self.places = tuple(answer["headers"]), tuple(answer["places"])

    def rows(self, after: int = 0) -> Iterator[RawRow]:
        """See :meth:`Source.rows`."""
        for number, cells, *others in self._workbook.stream(self._order, after):
            values: dict[str, Any] = dict(zip(self.headers or (), cells, strict=True))
            if others:
                values.update(others[0])
            if dict in map(type, values.values()):
                values = {name: unpacked(cell) if type(cell) is dict else cell for name, cell in values.items()}
            yield RawRow(number, values)

    def close(self) -> None:
        """See :meth:`Source.close`."""
        self._workbook.close()
