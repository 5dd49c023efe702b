"""Reads the OLE container of an old Office file, untrusted: a small file system of sectors and chains."""

from __future__ import annotations

import io
import struct
import sys
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple, Self

from asynctask.lists.readers.workbook import damaged

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["OLE", "OleFile"]

OLE: Final = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_HEADER: Final = 512
_FREE_FROM: Final = 0xFFFFFFFA
"""Numbers from here on are no sectors: end of chain, free space, or part of the allocation table."""
_MAX_ENTRIES: Final = 10_000
_SMALL_SECTOR: Final = 64


class _Entry(NamedTuple):
    start: int
    size: int


class OleFile:
    """The streams of a container: a context manager. Raises InputError for a damaged one.

    ``streams`` maps the lower-cased name of each stream, in any folder, to its entry.
    """

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("rb")
        try:
            self._read_header(path.stat().st_size)
        except struct.error:
            self._file.close()
            raise damaged("it is cut off") from None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def open(self, name: str) -> io.BufferedReader:
        """A stream, readable and seekable."""
        entry = self.streams[name.lower()]
        if entry.size < self._cutoff:
            chain = _chain(self._small_map, entry.start)
            places = [self._small_place(sector) for sector in chain]
            return _buffered(self._file, places, _SMALL_SECTOR, entry.size)
        places = [self._place(sector) for sector in _chain(self._map, entry.start)]
        return _buffered(self._file, places, self._sector, entry.size)

    def _read_header(self, size: int) -> None:
        header = self._file.read(_HEADER)
        if header[:8] != OLE:
            raise damaged("its beginning is not that of an Office file")
        (shift,) = struct.unpack_from("<H", header, 30)
        if shift not in (9, 12):
            raise damaged("its sectors are of no size that exists")
        self._shift: int = shift
        self._sector: int = 1 << self._shift
        self._size = size
        directory, self._cutoff, small, extra = (struct.unpack_from("<I", header, at)[0] for at in (48, 56, 60, 68))
        self._map = self._read_map(list(struct.unpack_from("<109I", header, 76)), extra)
        chain = _chain(self._map, small)
        if len(chain) > size // (16 * self._sector) + 2:
            raise damaged("its map of small sectors is larger than itself")
        self._small_map = _words(b"".join(map(self._read, chain)))
        self._small_places: list[int] = []
        self.streams = self._read_directory(directory)

    def _read_map(self, sectors: list[int], extra: int) -> array[int]:
        """The allocation table: the next sector of each. Its own sectors are listed in the header and a chain of lists."""
        most = self._size // self._sector + 1
        while extra < _FREE_FROM:
            words = _words(self._read(extra))
            sectors += words[:-1]
            extra = words[-1]
            if len(sectors) > most + 1_200:
                raise damaged("its map goes round in a circle")
        found = array("I")
        for sector in sectors:
            if sector < _FREE_FROM:
                found += _words(self._read(sector))
            if len(found) > most + 2 * self._sector:
                break
        return found

    def _read_directory(self, start: int) -> Mapping[str, _Entry]:
        found: dict[str, _Entry] = {}
        data = b"".join(map(self._read, _chain(self._map, start)[: _MAX_ENTRIES // 4]))
        for at in range(0, len(data) - 127, 128):
            length, kind = struct.unpack_from("<HB", data, at + 64)
            first, size = struct.unpack_from("<II", data, at + 116)
            if kind == 5:
                self._small_places = [self._place(sector) for sector in _chain(self._map, first)] if size else []
            elif kind == 2 and 2 <= length <= 64:
                name = data[at : at + length - 2].decode("utf-16-le", "replace").lower()
                found.setdefault(name, _Entry(first, size))
        return found

    def _place(self, sector: int) -> int:
        return (sector + 1) << self._shift

    def _small_place(self, sector: int) -> int:
        block, rest = divmod(sector * _SMALL_SECTOR, self._sector)
        if block >= len(self._small_places):
            raise damaged("a stream of it ends nowhere")
        return self._small_places[block] + rest

    def _read(self, sector: int) -> bytes:
        self._file.seek(self._place(sector))
        # Beyond the end of the file counts as free, as in other programs: a chain into it is broken.
        return self._file.read(self._sector).ljust(self._sector, b"\xff")


class _Stream(io.RawIOBase):
    """A stream assembled from pieces of a file."""

    def __init__(self, file: BinaryIO, places: list[int], piece: int, size: int) -> None:
        self._file, self._places, self._piece = file, places, piece
        self._size, self._at = min(size, len(places) * piece), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        base: int = (0, self._at, self._size)[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view) and self._at < self._size:
            index, skip = divmod(self._at, self._piece)
            run = 1
            # Read adjacent pieces at once.
            while index + run < len(self._places) and self._places[index + run] == self._places[index] + run * self._piece:
                run += 1
                if run * self._piece >= len(view) - done + skip:
                    break
            length = min(run * self._piece - skip, len(view) - done, self._size - self._at)
            self._file.seek(self._places[index] + skip)
            data = self._file.read(length)
            if not data:
                break
            view[done : done + len(data)] = data
            done, self._at = done + len(data), self._at + len(data)
        return done


def _buffered(file: BinaryIO, places: list[int], piece: int, size: int) -> io.BufferedReader:
    return io.BufferedReader(_Stream(file, places, piece, size), 1 << 16)


def _chain(sectors: array[int], start: int) -> list[int]:
    found: list[int] = []
    while start < _FREE_FROM:
        if start >= len(sectors) or len(found) > len(sectors):
            raise damaged("a chain of its sectors leads nowhere or in a circle")
        found.append(start)
        start = sectors[start]
    return found


def _words(data: bytes) -> array[int]:
    words = array("I", data[: len(data) // 4 * 4])
    if sys.byteorder == "big":
        words.byteswap()
    return words
