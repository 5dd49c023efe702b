"""The records of an old Excel workbook (.xls, Excel 5 to 2003): what stands in its globals and in its cells."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from asynctask.errors import InputError, TooLarge, UnsupportedFormat
from asynctask.lists.readers.number_formats import BUILT_IN, NUMBER, classify
from asynctask.lists.readers.package import damaged
from asynctask.lists.readers.texts import Texts, escaped

__all__ = ["Globals", "Record", "XlsSheet", "characters", "read_globals", "records"]

BOF, EOF, CONTINUE = 0x0809, 0x000A, 0x003C
_SHEET, _CODEPAGE, _DATES, _FORMAT, _STYLE, _SST, _PASSWORD = 0x0085, 0x0042, 0x0022, 0x041E, 0x00E0, 0x00FC, 0x002F
_CODEPAGES: Final = {
    367: "ascii", 932: "cp932", 936: "gbk", 949: "cp949", 950: "cp950", 1200: "utf-16-le", 1361: "johab",
    10000: "mac_roman", 10001: "shift_jis", 10002: "big5", 10003: "euc_kr", 10006: "mac_greek", 10007: "mac_cyrillic",
    10008: "gb2312", 10029: "mac_latin2", 10079: "mac_iceland", 10081: "mac_turkish", 32768: "mac_roman", 32769: "cp1252",
    **{number: f"cp{number}" for number in (
        437, 720, 737, 775, 850, 852, 855, 857, 858, 860, 861, 862, 863, 864, 865, 866, 869, 874, *range(1250, 1259)
    )},
}  # fmt: skip
_VERSION_5, _VERSION_8 = 0x0500, 0x0600
_MAX_SHEETS: Final = 1_000
_MAX_STYLES: Final = 100_000


class Record(NamedTuple):
    """A record: its kind, and its data."""

    kind: int
    data: bytes


class XlsSheet(NamedTuple):
    """A table of the workbook: its name, where its records begin, whether it can be seen."""

    name: str
    at: int
    visible: bool


class Globals(NamedTuple):
    """What the cells need: see the classes of the same names. ``old`` is Excel 5 or 95, whose texts have a code page."""

    sheets: list[XlsSheet]
    texts: Texts
    kinds: list[str]
    epoch_1904: bool
    old: bool
    codec: str


def records(stream: io.BufferedReader, at: int = 0) -> Iterator[Record]:
    """The records from a place on, to the end of the stream."""
    stream.seek(at)
    while len(head := stream.read(4)) == 4:
        kind, size = struct.unpack("<HH", head)
        data = stream.read(size)
        if len(data) != size:
            raise damaged("a record of it is cut off")
        yield Record(kind, data)


def read_globals(stream: io.BufferedReader) -> Globals:
    """What stands before the sheets. Raises InputError for a workbook with a password, or one that is damaged."""
    reader = _Globals()
    try:
        found = records(stream)
        first = next(found, Record(0, b""))
        if first.kind != BOF or len(first.data) < 4:
            raise damaged("its first record is missing")
        (version,) = struct.unpack_from("<H", first.data)
        if version not in (_VERSION_5, _VERSION_8):
            raise UnsupportedFormat(
                "the workbook is older than Excel 5; open it in a spreadsheet program and save as .xlsx"
            )
        reader.old = version == _VERSION_5
        for record in found:
            if record.kind == EOF:
                return reader.result()
            reader.take(record)
        raise damaged("the end of its globals is missing")
    except (struct.error, IndexError, UnicodeDecodeError):
        reader.texts.close()
        raise damaged("a record of its globals is too short") from None
    except BaseException:
        reader.texts.close()
        raise


class _Globals:
    def __init__(self) -> None:
        self.texts = Texts()
        self.old = False
        self._codec = "cp1252"
        self._epoch_1904 = False
        self._formats: dict[int, str] = dict(BUILT_IN)
        self._styles: list[int] = []
        self._sheets: list[tuple[bytes, int, bool]] = []
        self._shared: _SharedTexts | None = None
        self._takers: dict[int, Callable[[bytes], None]] = {
            _SHEET: self._sheet, _CODEPAGE: self._codepage, _DATES: self._dates, _FORMAT: self._format,
            _STYLE: self._style, _PASSWORD: self._password, _SST: self._texts,
        }  # fmt: skip

    def take(self, record: Record) -> None:
        if record.kind == CONTINUE:
            if self._shared is not None:
                self._shared.feed(record.data)
            return
        self._shared = None
        taker = self._takers.get(record.kind)
        if taker is not None:
            taker(record.data)

    def result(self) -> Globals:
        sheets = [XlsSheet(self._name(name), at, visible) for name, at, visible in self._sheets]
        kinds = [self._formats.get(number, NUMBER) for number in self._styles]
        return Globals(sheets, self.texts, kinds, self._epoch_1904, self.old, self._codec)

    def _name(self, data: bytes) -> str:
        if self.old:
            return data[1 : 1 + data[0]].decode(self._codec, "replace")
        return characters(data, 2, data[0], data[1])

    def _sheet(self, data: bytes) -> None:
        at, state, kind = struct.unpack_from("<IBB", data)
        if kind == 0:
            if len(self._sheets) >= _MAX_SHEETS:
                raise TooLarge(f"the workbook has more than {_MAX_SHEETS:,} sheets; split it into several")
            self._sheets.append((data[6:], at, state & 3 == 0))

    def _codepage(self, data: bytes) -> None:
        number = struct.unpack_from("<H", data)[0]
        if self.old and number not in _CODEPAGES:  # later workbooks have Unicode, and only claim one
            raise InputError(
                f"the texts of the workbook are in code page {number}, which is not known; open it in a spreadsheet program"
                " and save as .xlsx",
                code="encoding",
            )
        self._codec = _CODEPAGES.get(number, "cp1252")

    def _dates(self, data: bytes) -> None:
        self._epoch_1904 = struct.unpack_from("<H", data)[0] == 1

    def _format(self, data: bytes) -> None:
        if self.old:
            number, size = struct.unpack_from("<HB", data)
            code = data[3 : 3 + size].decode(self._codec, "replace")
        else:
            number, size, flags = struct.unpack_from("<HHB", data)
            code = characters(data, 5, size, flags)
        self._formats[number] = classify(code)

    def _style(self, data: bytes) -> None:
        if len(self._styles) < _MAX_STYLES:
            self._styles.append(struct.unpack_from("<H", data, 2)[0])

    def _password(self, _: bytes) -> None:
        raise UnsupportedFormat(
            "the workbook is protected with a password; remove the password in the spreadsheet program, save it and"
            " upload it again",
            code="encrypted",
        )

    def _texts(self, data: bytes) -> None:
        self._shared = _SharedTexts(self.texts, struct.unpack_from("<I", data, 4)[0])
        self._shared.feed(data[8:])


class _SharedTexts:
    """The table of shared texts, whose record goes on in others: a text may break off anywhere and go on there."""

    def __init__(self, texts: Texts, count: int) -> None:
        self._texts, self._left = texts, count
        self._data, self._at = b"", 0
        self._parts: list[str] = []
        self._characters = self._skip = self._size = 0
        self._wide = False

    def feed(self, data: bytes) -> None:
        """The next record."""
        if self._characters:
            # Characters that go on in the next record begin with a new flag: one byte or two for each.
            self._wide, data = bool(data[0] & 1) if data else False, data[1:]
        self._data, self._at = self._data[self._at :] + data, 0
        while self._left and self._step():
            pass
        if self._left and len(self._data) - self._at > 64:
            raise damaged("its table of texts cannot be read")

    def _step(self) -> bool:
        if self._characters:
            return self._take_characters()
        if self._skip:
            taken = min(self._skip, len(self._data) - self._at)
            self._at += taken
            self._skip -= taken
            if self._skip or not taken:
                return False
        if self._parts:
            self._texts.add([_literal("".join(self._parts))])
            self._parts.clear()
            self._left -= 1
            return True
        self._take_whole()
        return bool(self._left) and self._begin()

    def _take_whole(self) -> None:
        """The texts at this place that are plain and end within the record, in one pass: nearly all are."""
        data, at, found = self._data, self._at, list[bytes]()
        end, left = len(data), self._left
        while len(found) < left and end - at >= 3:
            flags = data[at + 2]
            size = (data[at] | data[at + 1] << 8) << (flags & 1)
            if flags & 0x0C or at + 3 + size > end:
                break
            piece = data[at + 3 : at + 3 + size]
            found.append(_literal(piece.decode("utf-16-le", "replace") if flags & 1 else piece.decode("latin-1")))
            at += 3 + size
        self._at, self._left = at, left - len(found)
        self._texts.add(found)

    def _begin(self) -> bool:
        if len(self._data) - self._at < 3:
            return False
        count, flags = struct.unpack_from("<HB", self._data, self._at)
        runs, extra, size = 0, 0, 3
        if len(self._data) - self._at < 3 + 2 * bool(flags & 8) + 4 * bool(flags & 4):
            return False
        if flags & 8:
            (runs,) = struct.unpack_from("<H", self._data, self._at + size)
            size += 2
        if flags & 4:
            (extra,) = struct.unpack_from("<I", self._data, self._at + size)
            size += 4
        self._at += size
        self._characters, self._wide, self._skip = count, bool(flags & 1), 4 * runs + extra
        self._parts.append("")
        return True

    def _take_characters(self) -> bool:
        width = 2 if self._wide else 1
        count = min(self._characters, (len(self._data) - self._at) // width)
        piece = self._data[self._at : self._at + count * width]
        self._parts.append(piece.decode("utf-16-le", "replace") if self._wide else piece.decode("latin-1"))
        self._at += count * width
        self._characters -= count
        return not self._characters


def _literal(text: str) -> bytes:
    """A text of this table as :meth:`Texts.add` takes it: it knows no escapes, and what looks like one stands as it is."""
    return escaped(text.replace("_x", "_x005F_x")) if text else b""


def characters(data: bytes, at: int, count: int, flags: int) -> str:
    """Characters of one byte or, as the first bit of their flags says, of two."""
    if flags & 1:
        return data[at : at + 2 * count].decode("utf-16-le", "replace")
    return data[at : at + count].decode("latin-1")
