"""Text bodies of another charset than UTF-8, made UTF-8 while they are read."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from io import RawIOBase
from typing import Final

from asynctask.errors import InputError

__all__ = ["CHARSETS", "Transcoded"]

_CHUNK: Final = 65_536

CHARSETS: Final[Mapping[str, str | None]] = {
    "utf-8": None,
    "us-ascii": None,
    "utf-16": "utf-16",
    "utf-16le": "utf-16-le",
    "utf-16be": "utf-16-be",
    "gb18030": "gb18030",
    "gbk": "gb18030",
    "gb2312": "gb18030",
    "big5": "big5hkscs",
    "shift-jis": "cp932",
    "windows-31j": "cp932",
    "euc-jp": "euc_jp",
    "euc-kr": "cp949",
    "iso-8859-1": "cp1252",
    "iso-8859-15": "iso8859_15",
    "windows-1252": "cp1252",
}
"""Charset of a Content-Type -> Python's codec, the superset that people mean by it; None where nothing is to be done."""


class Transcoded(RawIOBase):
    """A stream of text in one codec, as UTF-8. Reading raises :class:`InputError` ``encoding`` where it is not of it."""

    def __init__(self, source: RawIOBase, codec: str) -> None:
        self._source = source
        self._codec = codec
        self._decoder = codecs.getincrementaldecoder(codec)()
        self._seen = 0
        self._ended = False

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        """The next piece, of about ``size`` bytes or all; empty at the end."""
        if size is None or size < 0:
            return b"".join(iter(lambda: self.read(_CHUNK), b""))
        while not self._ended:
            piece = self._source.read(min(size, _CHUNK)) or b""
            self._ended = not piece
            try:
                text = self._decoder.decode(piece, final=self._ended)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"the body is not {self._codec} text near byte {self._seen + error.start + 1}; send it as UTF-8, or"
                    " with the charset that it has",
                    code="encoding",
                ) from None
            self._seen += len(piece)
            if text:
                return text.encode("utf-8", "strict")
        return b""
