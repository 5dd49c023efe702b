"""Shared by the workbook readers: both containers (zip package, OLE), the plan of an Excel workbook, formats, dates."""

from __future__ import annotations

import math
import operator
import posixpath
import re
import struct
import sys
import unicodedata
import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final, NamedTuple, Self
from urllib.parse import unquote
from xml.parsers import expat

from asynctask.errors import InputError, TooLarge, UnsupportedFormat
from asynctask.lists.readers.base import CellError, Formatted, Limits, Percent, column_index, over_limit

# -- zip package
#
# Untrusted: every size is verified by inflating.

_CHUNK: Final = 1 << 18
_MAX_PARTS: Final = 10_000
_ENTRY, _END, _LOCAL = b"PK\x01\x02", b"PK\x05\x06", b"PK\x03\x04"
_END_REACH: Final = 22 + 0xFFFF
_MAX_DEPTH: Final = 256
_MAX_MARKUP: Final = 2_097_152
_MAX_PLAN_BYTES: Final = 67_108_864
_SMALL: Final = 1_048_576
"""Inflated bytes up to which no ratio is checked: a small sheet of equal rows compresses that well legitimately."""


Start = Callable[[str, Mapping[str, str]], None]
End = Callable[[str], None]


def damaged(why: str) -> UnsupportedFormat:
    """The error for a broken or truncated workbook."""
    return UnsupportedFormat(
        f"the workbook is damaged: {why}; open it in a spreadsheet program, save it again and upload that",
        code="damaged_file",
    )


def encrypted() -> UnsupportedFormat:
    """The error for an encrypted workbook."""
    return UnsupportedFormat(
        "the workbook is encrypted with a password; remove the password in the spreadsheet program, save it and upload it"
        " again",
        code="encrypted",
    )


class Package:
    """The parts of a workbook: a context manager. Raises InputError for anything but a sound, bounded zip.

    ``parts`` maps the lower-cased name of each part to its entry: part names are case-insensitive.
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
        """The inflated bytes of a part, streamed.

        Raises InputError for a missing, encrypted, truncated or corrupt part, or a size other than the directory claims.
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

    def parse(self, name: str, start: Start, end: End | None = None) -> None:
        """Parses a part as XML. Raises InputError if it is no XML, or larger than a plan of a workbook."""
        info = self.parts.get(name.lower())
        if info is not None and info.file_size > _MAX_PLAN_BYTES:
            raise TooLarge(f"part {name!r} of the workbook has {info.file_size:,} bytes; remove unused styles and sheets")
        parse_xml(self.chunks(name), name, start, end)

    def _entries(self) -> Mapping[str, zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(self._file) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OSError, struct.error) as error:
            raise damaged(f"the zip cannot be read ({error})") from None
        # Some programs for Windows write backslashes.
        parts = {info.filename.lower().replace("\\", "/"): info for info in infos}
        if len(parts) != len(infos):
            raise damaged("two parts have the same name")
        return MappingProxyType(parts)

    def _check_totals(self, file_bytes: int) -> None:
        limits = self.limits
        total = sum(info.file_size for info in self.parts.values())
        if total > limits.max_unzipped_bytes:
            raise over_limit(f"the workbook unzips to {total:,} bytes", "max_unzipped_bytes", limits.max_unzipped_bytes)
        # Entries may share bytes, so the ratio is to the file's size, not to the sum of compressed sizes.
        if total > _SMALL and total > limits.max_unzip_ratio * file_bytes:
            what = f"the workbook unzips to {total // max(file_bytes, 1):,} times its size"
            raise over_limit(what, "max_unzip_ratio", limits.max_unzip_ratio)


def parse_xml(
    chunks: Iterator[bytes], name: str, start: Start, end: End | None = None, text: Callable[[str], None] | None = None
) -> None:
    """Parses XML. See :func:`feed` for what is refused."""
    for _ in feed(chunks, name, start, end, text):
        pass


def feed(
    chunks: Iterator[bytes], name: str, start: Start, end: End | None = None, text: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Parses XML and yields after each chunk, so that the caller can hand on what was found.

    ``start`` gets the name and the attributes of each element, ``end`` its name, ``text`` the texts. Refused: a document
    type (no part of a workbook has one, and it allows entities), and what would grow the parser's memory without bound:
    deep nesting, and a tag or comment of more than 2 MiB.
    """
    parser = expat.ParserCreate()
    parser.buffer_text = True
    depth = fed = 0

    def opened(tag: str, attrs: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _MAX_DEPTH:
            raise damaged(f"its XML nests deeper than {_MAX_DEPTH} levels")
        start(tag, attrs)

    def closed(tag: str) -> None:
        nonlocal depth
        depth -= 1
        if end is not None:
            end(tag)

    parser.StartDoctypeDeclHandler = _refuse_doctype
    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = opened, closed, text
    try:
        for chunk in chunks:
            parser.Parse(chunk, False)
            fed += len(chunk)
            # The parser passes text on at once and keeps one unfinished tag or comment.
            if fed - parser.CurrentByteIndex > _MAX_MARKUP:
                raise damaged(f"part {name!r} has a tag or comment of more than {_MAX_MARKUP:,} bytes")
            yield
        parser.Parse(b"", True)
        yield
    except (expat.ExpatError, LookupError, ValueError) as error:
        # LookupError, ValueError: an unknown encoding.
        raise damaged(f"part {name!r} is no sound XML ({error})") from None


def _refuse_doctype(*_: object) -> None:
    raise damaged("a part declares a document type")


def _check_directory(file: BinaryIO) -> None:
    """Refuses a zip with two directories, which readers could see differently, or with too many entries."""
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
    """The bytes of an entry to the end of its stream; zipfile would stop at the claimed size."""
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
        # Several readers share the file object, so its position is set before each read.
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


# -- plan of an Excel workbook

NO_VALUE: Final = "(a formula without a saved value)"
"""Shown for a formula without a saved value."""
MAX_SHEETS: Final = 1_000
MAX_STYLES: Final = 100_000
_TRUE: Final = frozenset({"1", "true", "on"})


class SheetPart(NamedTuple):
    """A sheet of the workbook: its name, its part in the package, and whether it is visible."""

    name: str
    part: str
    visible: bool = True


class Workbook(NamedTuple):
    """The plan. ``sheets``: worksheets only, no charts or macros, in the workbook's order. An absent part is None."""

    sheets: tuple[SheetPart, ...]
    epoch_1904: bool
    texts_part: str | None
    styles_part: str | None


def office_document(package: Package) -> str:
    """The name of the package's main part."""
    if "_rels/.rels" in package.parts:
        for kind, target in _relations(package, "").values():
            if kind == "officeDocument":
                return target
    return "xl/workbook.xml"


def read_workbook(package: Package) -> Workbook:
    """Reads the plan. Raises InputError for a contradictory workbook."""
    main = office_document(package)
    related = _relations(package, main)
    found: list[tuple[str, str, bool]] = []
    epoch_1904, prefix = False, ""

    def start(tag: str, attrs: Mapping[str, str]) -> None:
        nonlocal epoch_1904, prefix
        if _local(tag) == "workbook":
            prefix = tag.removesuffix("workbook")
        # Extensions have elements of the same names, with other prefixes.
        tag = tag.removeprefix(prefix)
        if tag == "sheet":
            if len(found) >= MAX_SHEETS:
                raise TooLarge(f"the workbook has more than {MAX_SHEETS:,} sheets; split it into several")
            relation = next((value for key, value in attrs.items() if _local(key) == "id" and ":" in key), "")
            found.append((attrs.get("name", ""), relation, attrs.get("state", "visible") == "visible"))
        elif tag == "workbookPr":
            epoch_1904 = attrs.get("date1904", "").lower() in _TRUE

    package.parse(main, start)
    if len({name for name, _, _ in found}) != len(found):
        raise damaged("two sheets have the same name")
    sheets = []
    for name, relation, visible in found:
        kind, target = related.get(relation, ("worksheet", ""))
        if kind == "worksheet":
            sheets.append(SheetPart(name, target, visible))
    parts = {kind: target for kind, target in related.values() if kind in ("sharedStrings", "styles")}
    return Workbook(tuple(sheets), epoch_1904, parts.get("sharedStrings"), parts.get("styles"))


def sheet_kinds(package: Package, part: str | None, *, percents: bool = False) -> Mapping[bytes, str]:
    """The kind of number of each cell style, by the style's number; plain numbers are left out. With ``percents``, a style
    that shows percentages has a kind too: its number format behind a ``%``."""
    if part is None or part.lower() not in package.parts:
        return {}
    codes, styles = {**BUILT_IN, **(_PERCENTS if percents else {})}, list[int]()
    inside = ""

    def start(tag: str, attrs: Mapping[str, str]) -> None:
        nonlocal inside
        tag = _local(tag)
        if tag in ("numFmts", "cellXfs"):
            inside = tag
        elif tag == "numFmt" and inside == "numFmts" and len(codes) < MAX_STYLES:
            code = attrs.get("formatCode", "")
            kind = kind_of_format(code)
            is_number = kind[:1] in ("", "#")
            codes[_whole(attrs.get("numFmtId", ""))] = (percents and is_number and _percent(code)) or kind
        elif tag == "xf" and inside == "cellXfs" and len(styles) < MAX_STYLES:
            styles.append(_whole(attrs.get("numFmtId", "0")))

    def end(tag: str) -> None:
        nonlocal inside
        if _local(tag) == inside:
            inside = ""

    package.parse(part, start, end)
    kinds = {b"%d" % number: codes.get(code, NUMBER) for number, code in enumerate(styles)}
    kinds[b""] = kinds.get(b"0", NUMBER)
    return {number: kind for number, kind in kinds.items() if kind}


Totals = Mapping[int, tuple[tuple[int, int], ...]]
"""Of the totals rows of a sheet's tables: row -> first and last column of each, 0 is A."""
_AREA: Final = re.compile(r"\$?([A-Z]{1,3})\$?([1-9][0-9]{0,6})(?::\$?([A-Z]{1,3})\$?([1-9][0-9]{0,6}))?")


def totals_rows(package: Package, sheet: str) -> Totals:
    """The totals rows that the tables of a sheet end with: a sum is no item."""
    found: dict[int, tuple[tuple[int, int], ...]] = {}

    def start(tag: str, attrs: Mapping[str, str]) -> None:
        area = _AREA.fullmatch(attrs.get("ref", "")) if _local(tag) == "table" else None
        if area is None or area[3] is None:
            return
        left, top, right, bottom = (
            column_index(area[1].encode()),
            int(area[2]),
            column_index(area[3].encode()),
            int(area[4]),
        )
        count = _whole(attrs.get("totalsRowCount", "0"))
        for row in range(max(top + 1, bottom - min(count, MAX_SHEETS) + 1), bottom + 1):
            found[row] = (*found.get(row, ()), (left, right))

    if _relations_of(sheet).lower() not in package.parts:
        return found
    tables = [target for kind, target in _relations(package, sheet).values() if kind == "table"]
    for part in tables[:MAX_SHEETS]:
        if part.lower() in package.parts:
            package.parse(part, start)
    return found


def choose_sheet(wanted: str, names: list[str]) -> int:
    """The index of a sheet, by its exact name or else ignoring case. Raises InputError ``unknown_sheet`` that lists all."""
    for compare in (str, lambda text: text.strip().casefold()):
        for place, name in enumerate(names):
            if compare(name) == compare(wanted):
                return place
    listed = names[:50]
    raise InputError(
        f"the workbook has no sheet {wanted!r}; its sheets: {', '.join(map(repr, listed)) or 'none'}",
        code="unknown_sheet",
        params={"other_sheets": listed},
    )


def _relations(package: Package, part: str) -> dict[str, tuple[str, str]]:
    """The relations of a part: id -> last word of the type, name of the other part."""
    folder = posixpath.dirname(part)
    found: dict[str, tuple[str, str]] = {}

    def start(tag: str, attrs: Mapping[str, str]) -> None:
        if _local(tag) == "Relationship" and attrs.get("TargetMode") != "External" and len(found) < MAX_STYLES:
            target = attrs.get("Target", "").replace("\\", "/")
            target = target[1:] if target.startswith("/") else posixpath.join(folder, target)
            target = posixpath.normpath(target) if target else ""
            if unquote(target).lower() in package.parts and target.lower() not in package.parts:
                target = unquote(target)
            found[attrs.get("Id", "")] = (attrs.get("Type", "").rpartition("/")[2], target)

    package.parse(_relations_of(part), start)
    return found


def _relations_of(part: str) -> str:
    folder, name = posixpath.split(part)
    return posixpath.join(folder, "_rels", f"{name}.rels")


def _local(name: str) -> str:
    return name.rpartition(":")[2]


def _whole(text: str) -> int:
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0


def empty_sheet(name: str | None) -> InputError:
    """The error for a workbook without a row in the named sheet, or in any visible one."""
    what = f"sheet {name!r} is empty" if name is not None else "no visible sheet of the workbook has a row"
    return InputError(
        f"{what}; put the data under a row with the names of the columns",
        code="empty_sheet",
        params=None if name is None else {"sheet": name},
    )


# -- number formats and dates
#
# Spreadsheets store dates and times as numbers of days; only the cell's number format tells them apart.

# ruff: noqa: DTZ901 - the times of a sheet have no zone

NUMBER: Final = ""
DATE: Final = "date"
MOMENT: Final = "moment"
TIME: Final = "time"
DURATION: Final = "duration"

BUILT_IN: Final[dict[int, str]] = {
    **dict.fromkeys([14, 15, 16, 17], DATE),
    **dict.fromkeys([18, 19, 20, 21, 45, 47], TIME),
    22: MOMENT,
    46: DURATION,
    # Date formats of East Asian versions of Excel; 32 to 35, 55 and 56 are times.
    **dict.fromkeys([27, 28, 29, 30, 31, 36, 50, 51, 52, 53, 54, 57, 58], DATE),
    **dict.fromkeys([32, 33, 34, 35, 55, 56], TIME),
    **dict.fromkeys([2, 7, 8, 39, 40, 43, 44], "#0.00"),
    4: "##,##0.00",
}
"""The formats identified by number, without a format code."""

PERCENT: Final = "0.00%"
"""The number format of a percentage whose own is unknown or unusual."""
_PERCENTS: Final = {9: "%0%", 10: f"%{PERCENT}"}
_PLAIN_PERCENT: Final = re.compile(r"[#0?,. ]{1,40}%")

_ELAPSED: Final = re.compile(r"h+|m+|s+", re.IGNORECASE)
_CONDITION: Final = re.compile(
    r"\[ *(<=|>=|<>|<|>|=) *([+-]?[0-9]{1,15}(?:\.[0-9]{0,15})?(?:E[+-]?[0-9]{1,2})?) *\]", re.IGNORECASE
)
_COMPARE: Final[dict[str, Callable[[float, float], bool]]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq, "<>": operator.ne,
}  # fmt: skip
_EXACT: Final = 2**53
_INT64: Final = 2**63
_DAY_MS: Final = 86_400_000
_EPOCH_1900, _EPOCH_1904 = date(1899, 12, 30), date(1904, 1, 1)
_LAST_DAY: Final = 2_958_465
_LEAP_BUG: Final = 60
"""Excel counts a 29 February 1900, which does not exist: days before it are off by one."""


def classify(code: str) -> str:
    """The kind that a number format shows: :data:`NUMBER`, :data:`DATE`, :data:`MOMENT` (both), :data:`TIME` or
    :data:`DURATION`.

    Where that depends on the number (``[<1]h:mm;yyyy-mm-dd``), it is the format behind a ``[``, for :func:`from_serial`.
    """
    sections = _sections(code)
    kinds = {each.kind for each in sections}
    if not any(each.test for each in sections):
        return sections[0].kind
    return kinds.pop() if len(kinds) == 1 else f"[{code}"


def kind_of_format(code: str) -> str:
    """The kind of a number format: as of :func:`classify`, or for one that adds digits or text to a number, the format
    itself behind a ``#``."""
    kind = classify(code)
    return f"#{code}" if kind == NUMBER and _adds(code) else kind


def _kind_of_letters(letters: str) -> str:
    """The kind that one part of a number format shows, by what it has apart from literal text and brackets."""
    if letters.strip() in {"general", "standard", "@"}:
        return NUMBER
    days = any(letter in letters for letter in "dy") or ("g" in letters and "e" in letters and "general" not in letters)
    hours = any(letter in letters for letter in "hs")
    if days:
        return MOMENT if hours else DATE
    if hours:
        return TIME
    return DATE if "m" in letters else NUMBER


def _percent(code: str) -> str:
    """The kind of a format of numbers: that of percentages if it has a percent sign that is no literal text."""
    if not any("%" in each.letters for each in _sections(code)):
        return NUMBER
    return f"%{code if _PLAIN_PERCENT.fullmatch(code) else PERCENT}"


def plain_number(text: bytes) -> Any:
    """A number of a workbook: an int if whole, else a float.

    Beyond 2**53 only 15 digits are kept, as spreadsheets do. Beyond the range of a double it is the error ``#NUM!``.
    Raises ValueError for a text that is no number.
    """
    if len(text) <= 15 and text.isdigit():
        return int(text)
    if b"_" in text:
        raise ValueError("no number")
    return tidy(float(text))


def tidy(value: float) -> Any:
    """A double as an int, float or error; see :func:`plain_number`."""
    if not math.isfinite(value):
        return CellError("#NUM!")
    if not value.is_integer():
        return value
    if -_EXACT < value < _EXACT:
        return int(value)
    digits = f"{value:.14e}"
    if abs(value) >= _INT64:
        return float(digits)
    mantissa, _, exponent = digits.partition("e")
    return int(mantissa.replace(".", "")) * 10 ** (int(exponent) - 14)


def from_serial(value: Any, kind: str, *, epoch_1904: bool) -> Any:
    """The date or time of a number of days, or the percentage, under a format of ``kind``.

    A whole number is a date (a datetime if the format shows a time), one with a fraction a datetime, one below 1 a time;
    a format of elapsed time gives a timedelta. A number outside the calendar stays a number.
    """
    if kind[:1] == "[" and isinstance(value, int | float):
        kind = _kind_of(value, kind[1:])
        if kind == NUMBER:
            return value
    if type(value) is int and kind == DATE and _LEAP_BUG < value <= _LAST_DAY and not epoch_1904:
        return _EPOCH_1900 + timedelta(value)
    if not isinstance(value, int | float):
        return value
    if kind[:1] == "%":
        return Percent(value, kind[1:])
    if kind[:1] == "#":
        return formatted(value, kind[1:])
    try:
        milliseconds = round(value * _DAY_MS)
        if kind == DURATION:
            return timedelta(milliseconds=milliseconds)
        days, rest = divmod(milliseconds, _DAY_MS)
        if value < 0 or days > _LAST_DAY:
            return value
        clock = (datetime.min + timedelta(milliseconds=rest)).time()
        if value < 1 and (kind != DATE or value > 0) and not (epoch_1904 and kind in (DATE, MOMENT)):
            return clock
        day = _day(days, epoch_1904)
    except (OverflowError, ValueError):
        return value
    if day is None:
        return value
    return day if not rest and kind == DATE else datetime.combine(day, clock)


def _kind_of(value: float, code: str) -> str:
    """The kind that a conditional format shows for a number; the first part's if no condition holds."""
    sections = _sections(code)
    tests = [each.test for each in sections]
    if len(tests) == 3 and tests[1] is None:
        tests[1] = ("<", 0.0)  # spreadsheets' default where a third part is for the rest
    return next((each.kind for each, test in zip(sections, tests, strict=True) if _holds(test, value)), sections[0].kind)


def _holds(test: tuple[str, float] | None, value: float) -> bool:
    return test is None or _COMPARE[test[0]](value, test[1])


def _day(days: int, epoch_1904: bool) -> date | None:
    if epoch_1904:
        return _EPOCH_1904 + timedelta(days)
    if days > _LEAP_BUG:
        return _EPOCH_1900 + timedelta(days)
    return _EPOCH_1900 + timedelta(days + 1) if 0 < days < _LEAP_BUG else None


# -- numbers as they are shown: what a field of text gets
#
# A format may pad a number with zeros or put text into it (00000, 000-000, "SKU-"0000): then what is shown is the text. One
# that only rounds, groups thousands or names a currency leaves the digits as they are; decimals are at least those shown.

_LONGEST_FORMAT: Final = 255
_LONGEST_READ: Final = 1_000
_LONG: Final = 1e15
"""Numbers from here on have more digits than a spreadsheet keeps."""
_PART: Final = re.compile(
    r'"(?P<quoted>[^"]*)"?|\\(?P<escaped>.)|(?P<space>_).|(?P<fill>\*).|\[(?P<bracket>[^\[\]]*)\]'
    r"|(?P<general>General|Standard|@)|(?P<place>[0#?])|(?P<other>.)",
    re.IGNORECASE | re.DOTALL,
)
_SILENT: Final = re.compile(
    r"black|blue|cyan|green|magenta|red|white|yellow|colou?r ?[0-9]{1,2}|\$-[0-9A-F]*|(?:[<>]=?|=|<>) *[-+.0-9E]+ *",
    re.IGNORECASE,
)
_OTHERWISE: Final = re.compile(r"[%/]|E[+-]", re.IGNORECASE)
_CURRENCY: Final = re.compile(r"[A-Z]{3}|kr\.?|Kč|zł|Ft|lei|Rs\.?|R\$|Fr\.?|S/\.?|руб\.?|р\.|лв\.?|[元円원]|RM|Rp\.?")
_UNSAID: Final = frozenset(" ()+-\xa0")
"""Signs around a number that say nothing but its sign."""


class _Section(NamedTuple):
    """One part of a number format: the text ``before`` the number and ``after`` it, its places of ``whole`` digits (``0``,
    ``#``, ``?``) with the texts between them, None for a number in general form; decimals, the ``least`` and ``most``.

    ``plain``: the number is shown by its own digits, apart from ``least``. ``told``: what is shown can be said. ``test``:
    its condition. ``letters``: what it has apart from literal text and brackets. ``kind``: as of :func:`classify`.
    """

    before: str
    whole: tuple[str, ...] | None
    least: int
    most: int
    after: str
    plain: bool
    told: bool
    test: tuple[str, float] | None
    letters: str
    kind: str


def formatted(value: float, code: str) -> Any:
    """A number under a format: a :class:`Formatted` if it is shown with other digits or with text, else the number."""
    if abs(value) >= _LONG:
        return value
    plain = str(value) if isinstance(value, int) else format(value, ".15g")
    least = _least(code)
    text = _shown(value, plain, code) if least is None else _padded(plain, least)
    return value if text == plain else Formatted(value, code if code.isprintable() else "", text)


def _adds(code: str) -> bool:
    """Whether a format may show a number by more than its digits."""
    return len(code) <= _LONGEST_FORMAT and any(not each.plain or each.least for each in _sections(code))


@lru_cache(maxsize=1_000)
def _least(code: str) -> int | None:
    """The decimals that a format shows at least, for any number; None for one that adds anything else."""
    sections = _sections(code)
    same = all(each.plain and each.least == sections[0].least for each in sections)
    return sections[0].least if same else None


def _padded(plain: str, least: int) -> str:
    if "e" in plain or not least:
        return plain
    whole, _, decimals = plain.partition(".")
    return f"{whole}.{decimals.ljust(least, '0')}"


def _shown(value: float, plain: str, code: str) -> str | None:
    """What a number looks like, ``plain`` without a format; None where that cannot be said."""
    sections = _sections(code)
    conditional, sign = any(each.test for each in sections), "-" if value < 0 else ""
    if conditional:
        chosen = next((each for each in sections if _holds(each.test, value)), sections[0])
    else:
        at = 1 if value < 0 and len(sections) > 1 else 2 if value == 0 and len(sections) > 2 else 0
        chosen, sign = sections[at], "" if at else sign
    if chosen.plain:
        return _padded(plain, chosen.least)
    decimals = plain.partition(".")[2]
    if "e" in plain or not chosen.told or len(decimals) > chosen.most or (conditional and sign):
        return None
    return (sign + _filled(plain.removeprefix("-"), chosen)).strip()


def _filled(digits: str, section: _Section) -> str:
    """The texts of a section and digits in their places, from the right; the first place takes all that are left."""
    if section.whole is None:
        return section.before + digits + section.after
    whole, _, decimals = digits.partition(".")
    left, shown = list(whole.lstrip("0")), list[str]()
    first = next((at for at, part in enumerate(section.whole) if part in _PLACES), -1)
    for at in range(len(section.whole) - 1, -1, -1):
        part = section.whole[at]
        if part not in _PLACES:
            shown.append(part)
        elif at == first and left:
            shown.append("".join(left))
        else:
            shown.append(left.pop() if left else _PLACES[part])
    decimals = decimals.ljust(section.least, "0")
    return section.before + "".join(reversed(shown)) + ("." + decimals if decimals else "") + section.after


_PLACES: Final = {"0": "0", "#": "", "?": " "}


@lru_cache(maxsize=1_000)
def _sections(code: str) -> tuple[_Section, ...]:
    """The parts of a number format that are for numbers: at most three; the fourth is for text."""
    parts: list[list[re.Match[str]]] = [[]]
    for found in _PART.finditer(code[:_LONGEST_READ]):
        if found["other"] == ";":
            parts.append([])
        else:
            parts[-1].append(found)
    return tuple(map(_section, parts[:3]))


def _section(found: list[re.Match[str]]) -> _Section:
    kinds = [each.lastgroup for each in found]
    others = "".join(each["other"] or "" for each in found)
    letters = "".join(each[0] for each in found if each.lastgroup in ("general", "place", "other")).lower()
    places = [at for at, kind in enumerate(kinds) if kind == "place"]
    general = kinds.count("general")
    dots = [at for at in range(len(found)) if found[at]["other"] == "." and places]
    dot = dots[0] if dots else len(found)
    first = min([*places, dot]) if places else kinds.index("general") if general else len(found)
    last = max([*places, *dots]) if places else first
    whole = [at for at in places if at < dot]
    commas = [at for at in range(len(found)) if found[at]["other"] == "," and first <= at]
    inner = [
        text if kinds[at] != "place" else found[at][0]
        for at in range(first, whole[-1] + 1 if whole else first)
        if (text := _said(found[at])) or kinds[at] == "place"
    ]
    before = "".join(map(_said, found[:first]))
    after = "".join(_said(each) for each in found[last + 1 :])
    least, most = (sum(found[at][0] in kept for at in places if at > dot) for kept in ("0", "0#?"))
    brackets = [each["bracket"] for each in found if each["bracket"] is not None]
    words = any(map(_without_currency, (before, after)))
    shaped = sum(part == "0" for part in inner) > 1 or any(part not in _PLACES for part in inner)
    otherwise = _OTHERWISE.search(others) is not None and bool(places)
    plain = not shaped and not words
    unknown = any(each.isascii() and each.isalpha() for each in others)  # no text: aaaa is a weekday in Japan
    odd = unknown or bool(commas) or general + len(dots) > 1 or any(not _SILENT.fullmatch(each) for each in brackets)
    if otherwise:
        plain, least = True, 0
    if commas and commas[-1] > (whole[-1] if whole else -1):
        least = 0  # shown in thousands
    test = next((match for each in brackets if (match := _CONDITION.fullmatch(f"[{each}]"))), None)
    empty = not places and not general
    return _Section(
        before, None if general else tuple(inner), least, 15 if general else most, after,
        plain or not before + after + "".join(inner), not odd and not (empty and not words),
        (test[1], float(test[2])) if test else None, letters,
        DURATION if any(map(_ELAPSED.fullmatch, brackets)) else _kind_of_letters(letters),
    )  # fmt: skip


def _without_currency(text: str) -> str:
    """A text beside a number without a currency, which is no part of a text: a currency is a number."""
    left = "".join(each for each in text if each not in _UNSAID and unicodedata.category(each) != "Sc")
    return "" if _CURRENCY.fullmatch(left) else left


def _said(part: re.Match[str]) -> str:
    """The text that a piece of a number format shows; letters without quotes are none."""
    if part["space"]:
        return " "
    other = part["other"] or ""
    return (
        part["quoted"] or part["escaped"] or ("" if other in {".", ","} or (other.isascii() and other.isalpha()) else other)
    )


def shown_format(value: float, text: str) -> str:
    """The number format under which a number looks like ``text``; empty for one that adds no digit and no text to it."""
    sign, shown = ("-", text[1:]) if text[:1] in {"-", "−"} else ("", text)
    plain = format(abs(value), ".15g")
    whole, _, decimals = plain.partition(".")
    digits = "".join(filter(_is_digit, shown))
    more = len(digits) - len(whole + decimals)
    if digits == whole + decimals + "0" * more and _DECIMALS.search(shown[-(more + len(decimals) + 1) :]):
        return "0." + "0" * (more + len(decimals)) if more > 0 else ""
    if decimals or "e" in plain or len(text) > _LONGEST_FORMAT // 4 or (digits == whole and _GROUPS.fullmatch(shown)):
        return ""
    left, parts = list(whole), list[str]()
    for each in reversed(shown):
        if left and each == left[-1]:
            left.pop()
            parts.append("0")
        elif not left and each == "0":
            parts.append("0")
        else:
            parts.append('\\"' if each == '"' else f'"{each}"')
    code = "".join(reversed(parts)).replace('""', "")
    return "" if left or _shown(value, sign + plain, code) != text else code


_DECIMALS: Final = re.compile(r"^[.,][0-9]+$")
_GROUPS: Final = re.compile(r"[0-9]{1,3}(?:([.,'’ \xa0\u202f])[0-9]{3})(?:\1[0-9]{3})*")


def _is_digit(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def from_iso(text: str, kind: str = DATE) -> Any:
    """The date, datetime or time of an ISO 8601 text; the text itself if it is none.

    Midnight under a format without a time is a date.
    """
    text = text.strip()
    try:
        if text[:1] == "T" or ":" in text[:6]:
            return time.fromisoformat(text.removeprefix("T")).replace(tzinfo=None)
        if len(text) <= 10:
            return date.fromisoformat(text)
        moment = datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        return text or None
    return moment.date() if kind == DATE and moment.time() == time() else moment


# -- OLE, the container of old Office files, untrusted: a small file system of sectors and chains

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

    def read(self, name: str) -> bytes:
        """The content of a stream."""
        entry = self.streams[name]
        if entry.size >= self._cutoff:
            return b"".join(map(self._read, _chain(self._map, entry.start)))[: entry.size]
        return b"".join(map(self._read_small, _chain(self._small_map, entry.start)))[: entry.size]

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

    def _read_small(self, sector: int) -> bytes:
        block, rest = divmod(sector * _SMALL_SECTOR, self._sector)
        if block >= len(self._small_places):
            raise damaged("a stream of it ends nowhere")
        self._file.seek(self._small_places[block] + rest)
        return self._file.read(_SMALL_SECTOR)

    def _read(self, sector: int) -> bytes:
        self._file.seek(self._place(sector))
        # Beyond the end of the file counts as free, as in other programs: a chain into it is broken.
        return self._file.read(self._sector).ljust(self._sector, b"\xff")


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
