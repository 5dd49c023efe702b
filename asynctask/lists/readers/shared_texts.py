"""A workbook's shared strings, kept as encoded bytes: a million of them in little more memory than their text."""

from __future__ import annotations

import re
import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import IO, Final

from asynctask.errors import TooLarge
from asynctask.lists.readers.base import over_limit, trimmed
from asynctask.lists.readers.workbook import Package, damaged, parse_xml

NAMES: Final[Mapping[str, str]] = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'"}
_REFERENCE: Final = re.compile(r"&(?:#x([0-9A-Fa-f]{1,6})|#([0-9]{1,7})|([A-Za-z]{1,8}));|&")
_ESCAPE: Final = re.compile(r"_x([0-9A-Fa-f]{4})_")
# What repeats possessively is an atomic group; json.py says why.
_ITEM: Final = re.compile(
    rb'<si>(?:<t(?: xml:space="preserve")?>([^<]*+)</t>(?><rPh [^>]*+><t[^>]*+>[^<]*+</t></rPh>)*+(?:<phoneticPr[^>]*+>)?'
    rb"|<t ?/>)</si>"
)
_OPENED: Final = re.compile(rb"<si[ />]")
_CLOSED: Final = b"</si>"
_MAX_TEXTS: Final = 16_777_216
_MAX_TEXT_BYTES: Final = 8_388_608
_IN_MEMORY: Final = 67_108_864
_KNOWN_BYTES: Final = 64
_RARE: Final = 16
_KNOWN: Final = 65_536


def clean(raw: bytes) -> str | None:
    """A text from XML, its references and Excel's ``_x000D_`` escapes resolved, stripped; None if empty."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise damaged("a text in it is not UTF-8") from None
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "&" in text:
        text = _REFERENCE.sub(_resolved, text)
    if "_x" in text:
        text = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)
        # Join surrogate pairs; replace lone surrogates.
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return trimmed(text) or None


def escaped(text: str) -> bytes:
    """Input for :func:`clean` from a text that an XML parser has resolved."""
    return text.replace("&", "&amp;").encode("utf-8", "replace")


def canonical(head: bytes) -> bool:
    """Whether a part begins as XML in UTF-8, so that its bytes can be matched directly."""
    head = head.removeprefix(b"\xef\xbb\xbf")
    if not head.startswith(b"<"):
        return False
    if head.startswith(b"<?xml"):
        declared = re.search(rb"""encoding\s*=\s*["']([^"']*)""", head[: head.find(b"?>")])
        return declared is None or declared[1].lower() in {b"utf-8", b"us-ascii"}
    return b"\0" not in head[:4]


def _resolved(match: re.Match[str]) -> str:
    hexadecimal, decimal, name = match.groups()
    code = int(hexadecimal, 16) if hexadecimal else int(decimal) if decimal else -1
    if name in NAMES:
        return NAMES[name]
    if not 0 < code < 0x110000 or 0xD800 <= code < 0xE000:
        raise damaged("a text in it has a reference to nothing")
    return chr(code)


def _is_blank(raw: bytes) -> bool:
    return not raw or ((raw[0] in b" \t\r\n&_" or raw[0] > 127) and clean(raw) is None)


class Texts:
    """A growing list of texts; ``blank``: one of them is empty or only spaces. Close it."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._file: IO[bytes] | None = None
        self._ends = array("Q", [0])
        self.known: dict[bytes, str | None] = {}
        self.blank = False

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, raw: Sequence[bytes]) -> None:
        """Adds texts, as :func:`clean` takes them. Beyond 64 MiB they go to a temporary file."""
        if len(self) + len(raw) > _MAX_TEXTS:
            raise TooLarge(f"the workbook has more than {_MAX_TEXTS:,} texts; split it into several")
        self._data += b"".join(raw)
        self._ends.extend(islice(accumulate(map(len, raw), initial=self._ends[-1]), 1, None))
        if len(self._data) > _IN_MEMORY:
            self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
            self._file.write(self._data)
            self._data.clear()
        if not self.blank:
            self.blank = any(map(_is_blank, raw))

    def get(self, number: bytes) -> str | None:
        """The text with a number, as written in a cell. Raises InputError for an unknown number.

        Recently read short texts are cached in ``known``.
        """
        if not (number.isdigit() and len(number) <= 9 and int(number) < len(self)):
            raise damaged("a cell points at a text that the workbook does not have")
        start, end = self._ends[int(number)], self._ends[int(number) + 1]
        text = clean(self._bytes(start, end))
        if end - start <= _KNOWN_BYTES:
            if len(self.known) >= _KNOWN:
                self.known.clear()
            self.known[number] = text
        return text

    def close(self) -> None:
        """Closes the file; idempotent."""
        if self._file is not None:
            self._file.close()

    def _bytes(self, start: int, end: int) -> bytes:
        if self._file is None:
            return bytes(self._data[start:end])
        if self._data:
            self._file.seek(0, 2)
            self._file.write(self._data)
            self._data.clear()
        self._file.seek(start)
        return self._file.read(end - start)


class TextParser:
    """Handlers for an XML parser that join the runs of rich text, without phonetic readings."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._size = 0
        self._inside = self._reading = False

    def start(self, tag: str) -> None:
        if tag == "t":
            self._inside = not self._reading
        elif tag == "rPh":
            self._reading = True

    def end(self, tag: str) -> None:
        if tag == "t":
            self._inside = False
        elif tag == "rPh":
            self._reading = False

    def text(self, data: str) -> None:
        if self._inside:
            self._size += len(data)
            if self._size > _MAX_TEXT_BYTES:
                raise TooLarge(f"a text of the workbook has more than {_MAX_TEXT_BYTES:,} characters; shorten it")
            self._parts.append(data)

    def take(self) -> str:
        """Returns the text and begins the next."""
        text = "".join(self._parts)
        self._parts.clear()
        self._size = 0
        return text


def load_texts(package: Package, part: str | None) -> Texts:
    """The shared strings of a workbook; empty without such a part."""
    texts = Texts()
    if part is None or part.lower() not in package.parts:
        return texts
    try:
        if _load_canonical(package, part, texts):
            return texts
        texts.close()
        texts = Texts()
        _load_any(package.chunks(part), part, texts)
    except BaseException:
        texts.close()
        raise
    return texts


def _load_canonical(package: Package, part: str, texts: Texts) -> bool:
    """By regular expressions, four times as fast as a parser; False if the XML is not in the usual form."""
    rest, first = b"", True
    for chunk in package.chunks(part):
        if first and not canonical(chunk):
            return False
        rest += chunk
        if b"<!" in rest:
            return False
        if first:
            start = _OPENED.search(rest)
            if start is None:
                return False
            rest, first = rest[start.start() :], False
        end = rest.rfind(_CLOSED)
        if end >= 0:
            _add_items(rest[: end + 5], texts)
            rest = rest[end + 5 :]
        if len(rest) > _MAX_TEXT_BYTES:
            raise _long_text(package)
    return not _OPENED.search(rest)


def _add_items(data: bytes, texts: Texts) -> None:
    found = _ITEM.findall(data)
    if len(found) == len(_OPENED.findall(data)):
        texts.add(found)
        return
    pieces = data.split(_CLOSED)[:-1]
    if len(found) * _RARE < len(pieces) * (_RARE - 1):
        # Making a parser costs more than parsing a text: many unusual texts share one parser.
        _load_any(iter([b"<sst>", data, b"</sst>"]), "sharedStrings", texts)
        return
    for piece in pieces:
        match = _ITEM.fullmatch(piece.strip() + _CLOSED)
        if match:
            texts.add([match[1] or b""])
        else:
            _load_any(iter([b"<sst>", piece, _CLOSED, b"</sst>"]), "sharedStrings", texts)


def _load_any(chunks: Iterator[bytes], part: str, texts: Texts) -> None:
    parser = TextParser()

    def start(tag: str, _: Mapping[str, str]) -> None:
        parser.start(tag.rpartition(":")[2])

    def end(tag: str) -> None:
        tag = tag.rpartition(":")[2]
        parser.end(tag)
        if tag == "si":
            texts.add([escaped(parser.take())])

    parse_xml(chunks, part, start, end, parser.text)


def _long_text(package: Package) -> TooLarge:
    limit = package.limits.max_cell_chars
    return over_limit(f"a text of the workbook has more than {_MAX_TEXT_BYTES:,} bytes", "max_cell_chars", limit)
