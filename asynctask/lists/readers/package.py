"""The zip around a workbook, distrusted: sizes are proved by inflating, before anything else opens the file."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final, Self
from xml.parsers import expat

from asynctask.errors import TooLarge, UnsupportedFormat
from asynctask.lists.readers.base import Limits, over_limit

__all__ = ["Package", "damaged", "feed", "parse_xml"]

_CHUNK: Final = 1 << 18
_MAX_PARTS: Final = 10_000
_ENTRY, _END, _LOCAL = b"PK\x01\x02", b"PK\x05\x06", b"PK\x03\x04"
_END_REACH: Final = 22 + 0xFFFF
_MAX_DEPTH: Final = 256
_MAX_MARKUP: Final = 2_097_152
_SMALL: Final = 1_048_576
"""Up to this inflated size no ratio is looked at: a small sheet of equal rows is legitimately very compressible."""


def damaged(why: str) -> UnsupportedFormat:
    """The error for a workbook that is broken or cut off."""
    return UnsupportedFormat(
        f"the workbook is damaged: {why}; open it in a spreadsheet program, save it again and upload that",
        code="damaged_file",
    )


class Package:
    """The parts of a workbook: a context manager. Raises InputError for anything but a sound, bounded zip.

    ``parts`` maps the lower-cased name of each part to its entry: part names do not differ by case alone.
    """

    def __init__(self, path: Path, limits: Limits) -> None:
        self.limits = limits
        self._file: BinaryIO = path.open("rb")
        try:
            _check_directory(self._file)
            self.parts = self._entries()
            self._check_totals(path.stat().st_size)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def chunks(self, name: str) -> Iterator[bytes]:
        """The inflated bytes of a part, some KB at a time.

        Raises InputError when the part is missing, encrypted, cut off, or not of the size that the directory claims.
        """
        info = self.parts.get(name.lower())
        if info is None:
            raise damaged(f"its part {name!r} is missing")
        if info.flag_bits & 0x1:
            raise UnsupportedFormat("the workbook is encrypted; remove the password and upload it again", code="encrypted")
        size = check = 0
        for chunk in _inflate(self._file, info):
            size += len(chunk)
            check = zlib.crc32(chunk, check)
            if size > info.file_size:
                raise TooLarge(
                    f"part {name!r} is larger than the {info.file_size:,} bytes that the file claims", code="zip_bomb"
                )
            yield chunk
        if size != info.file_size:
            raise damaged(f"part {name!r} is cut off")
        if check != info.CRC:
            raise damaged(f"part {name!r} is not what was written")

    def parse(self, name: str, attach: Callable[[expat.XMLParserType], None]) -> None:
        """Send a part through an XML parser that ``attach`` has given its handlers. Raises InputError if it is no XML."""
        parse_xml(self.chunks(name), attach, name)

    def _entries(self) -> Mapping[str, zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(self._file) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OSError, struct.error) as error:
            raise damaged(f"the zip cannot be read ({error})") from None
        # Some programs for Windows write its separators.
        parts = {info.filename.lower().replace("\\", "/"): info for info in infos}
        if len(parts) != len(infos):
            raise damaged("two parts have the same name")
        return MappingProxyType(parts)

    def _check_totals(self, file_bytes: int) -> None:
        limits = self.limits
        total = sum(info.file_size for info in self.parts.values())
        if total > limits.max_unzipped_bytes:
            raise over_limit(f"the workbook unzips to {total:,} bytes", "max_unzipped_bytes", limits.max_unzipped_bytes)
        # Entries may share their bytes: what counts is the file, never the sum of the compressed sizes.
        if total > _SMALL and total > limits.max_unzip_ratio * file_bytes:
            what = f"the workbook unzips to {total // max(file_bytes, 1):,} times its size"
            raise over_limit(what, "max_unzip_ratio", limits.max_unzip_ratio)


def parse_xml(chunks: Iterator[bytes], attach: Callable[[expat.XMLParserType], None], name: str) -> None:
    """Parse XML piece by piece; ``attach`` gives the parser its handlers. See :func:`feed` for what is refused."""
    for _ in feed(chunks, attach, name):
        pass


def feed(chunks: Iterator[bytes], attach: Callable[[expat.XMLParserType], None], name: str) -> Iterator[None]:
    """Parse XML piece by piece, and stop after each piece, so that what was found can be handed on.

    A document type is refused (no part of a workbook has one, and entities hide there), and so is what would make the
    parser keep everything: elements within elements without end, and one tag or comment of megabytes.
    """
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = _refuse_doctype
    attach(parser)
    _limit_depth(parser)
    fed = 0
    try:
        for chunk in chunks:
            parser.Parse(chunk, False)
            fed += len(chunk)
            # Text is handed on as it comes; what stays with the parser is one unfinished piece of markup.
            if fed - parser.CurrentByteIndex > _MAX_MARKUP:
                raise damaged(f"part {name!r} has a tag or comment of more than {_MAX_MARKUP:,} bytes")
            yield
        parser.Parse(b"", True)
        yield
    except (expat.ExpatError, LookupError, ValueError) as error:
        # The latter two: it says that it is in an encoding that the parser does not know.
        raise damaged(f"part {name!r} is no sound XML ({error})") from None


def _limit_depth(parser: expat.XMLParserType) -> None:
    """Put a count of open elements around the handlers of a parser."""
    start: Any = parser.StartElementHandler
    end, depth = parser.EndElementHandler, 0

    def opened(tag: str, attrs: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _MAX_DEPTH:
            raise damaged(f"its XML nests deeper than {_MAX_DEPTH} levels")
        if start is not None:
            start(tag, attrs)

    def closed(tag: str) -> None:
        nonlocal depth
        depth -= 1
        if end is not None:
            end(tag)

    parser.StartElementHandler, parser.EndElementHandler = opened, closed


def _refuse_doctype(*_: object) -> None:
    raise damaged("a part declares a document type")


def _check_directory(file: BinaryIO) -> None:
    """Two readers must not see two different directories in one file, nor one of millions of entries."""
    size = file.seek(0, 2)
    file.seek(max(0, size - _END_REACH))
    if (ends := file.read().count(_END)) != 1:
        raise damaged("the end of the zip is missing, it was cut off" if not ends else "the zip has two ends")
    file.seek(0)
    entries, rest = 0, b""
    while chunk := file.read(_CHUNK):
        entries += (rest + chunk).count(_ENTRY)
        rest = chunk[-3:]
    if entries > _MAX_PARTS:
        raise TooLarge(f"the workbook has {entries:,} parts; {_MAX_PARTS:,} are the most that is read", code="zip_bomb")


def _inflate(file: BinaryIO, info: zipfile.ZipInfo) -> Iterator[bytes]:
    """The bytes of an entry, to the end of its stream: zipfile would stop at the size that the entry claims."""
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise damaged(f"part {info.filename!r} is compressed in an unusual way")
    if not 0 <= info.header_offset <= file.seek(0, 2):
        raise damaged(f"part {info.filename!r} is not where the directory says")
    file.seek(info.header_offset)
    head = file.read(30)
    if len(head) != 30 or head[:4] != _LOCAL:
        raise damaged(f"part {info.filename!r} is not where the directory says")
    place = info.header_offset + 30 + sum(struct.unpack("<HH", head[26:30]))
    left = info.compress_size
    engine = zlib.decompressobj(-15) if info.compress_type == zipfile.ZIP_DEFLATED else None
    while left > 0:
        # The file is shared by everyone who reads a part: no one relies on where it stands.
        file.seek(place)
        data = file.read(min(_CHUNK, left))
        if not data:
            raise damaged(f"part {info.filename!r} is cut off")
        place, left = place + len(data), left - len(data)
        yield from (_unpack(engine, data, info.filename) if engine else (data,))
    if engine is not None and not engine.eof:
        raise damaged(f"part {info.filename!r} is cut off")


def _unpack(engine: zlib._Decompress, data: bytes, name: str) -> Iterator[bytes]:
    while not engine.eof:
        try:
            piece = engine.decompress(data, _CHUNK)
        except zlib.error as error:
            raise damaged(f"part {name!r} cannot be inflated ({error})") from None
        data = engine.unconsumed_tail
        if piece:
            yield piece
        if not data and len(piece) < _CHUNK:
            return
