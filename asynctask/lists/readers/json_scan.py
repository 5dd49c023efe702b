"""Finding the items of a JSON text without reading it as a whole: brackets are counted, and each item is cut out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from asynctask.errors import InputError
from asynctask.lists.readers.base import Limits

__all__ = ["Piece", "items_of", "too_deep"]

_SPACE: Final = re.compile(rb"[ \t\r\n]*+")
_RUN: Final = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
"""Everything up to the next bracket, or to a string that is not at its end yet."""
_FLAT: Final = re.compile(rb'[ \t\r\n]*+(\{(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+\})[ \t\r\n]*+,', re.DOTALL)
_IN_STRING: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_PLAIN: Final = re.compile(rb'[^ \t\r\n,:\[\]{}"]*+')
_OPEN, _QUOTE = frozenset(b"[{"), ord('"')


class Piece:
    """An item as it is written: ``raw`` is None where it is larger than any item may be, ``size`` what it has then.

    ``line``, ``column``: where it begins, from 1.
    """

    __slots__ = ("column", "line", "raw", "size")

    def __init__(self, raw: bytes | None, size: int, line: int, column: int) -> None:
        self.raw, self.size, self.line, self.column = raw, size, line, column


def items_of(chunks: Iterator[bytes], limits: Limits) -> Iterator[Piece]:
    """The items of ``[...]``, or of the list under ``items`` in ``{"items": [...]}``, one after the other.

    Arguments: the text in UTF-8, in pieces; the limits. An item of more than 16 times ``max_item_bytes`` is passed over.
    Raises :class:`InputError`: ``invalid_json`` with the line and column, ``too_deep``.
    """
    text = _Text(chunks, 16 * limits.max_item_bytes, limits.max_json_depth)
    first = text.next()
    if first == b"[":
        yield from _list(text, 1)
    elif first == b"{":
        yield from _wrapped(text)
    else:
        yield text.value(0)
        raise _no_list()
    if text.next():
        what = "after the first object comes another" if first + text.next() == b"{{" else "after the list comes more"
        raise text.broken(f"{what}; put everything in one list: [{{...}}, {{...}}]")


def too_deep(most: int) -> InputError:
    """The error for a text that nests too deep."""
    return InputError(
        f"the JSON nests deeper than {most} levels (max_json_depth); send flatter items,"
        " or have the operator raise ASYNCTASK_MAX_JSON_DEPTH",
        code="too_deep",
    )


def _no_list() -> InputError:
    return InputError('the JSON is no list of items; send [{...}, {...}] or {"items": [{...}, {...}]}', code="invalid_json")


def _list(text: _Text, depth: int) -> Iterator[Piece]:
    text.take(b"[", depth)
    if text.next() == b"]":
        text.skip()
        return
    while True:
        while (piece := text.flat(depth)) is not None:
            yield piece
        yield text.value(depth)
        if text.next() == b"]":
            text.skip()
            return
        text.take(b",", depth)


def _wrapped(text: _Text) -> Iterator[Piece]:
    text.take(b"{", 1)
    found = False
    if text.next() == b"}":
        raise _no_list()
    while True:
        if text.next() != b'"':
            raise text.broken("the JSON is broken: a key in double quotes is missing")
        key = text.value(1).raw
        text.take(b":", 1)
        if key == b'"items"' and text.next() == b"[":
            if found:
                raise text.broken('"items" is there twice; keep one list')
            found = True
            yield from _list(text, 2)
        else:
            text.value(1)
        if text.next() == b"}":
            text.skip()
            break
        text.take(b",", 1)
    if not found:
        raise _no_list()


class _Text:
    """A text that is read piece by piece; only the item at hand is kept."""

    def __init__(self, chunks: Iterator[bytes], most_bytes: int, most_depth: int) -> None:
        self._chunks, self._most_bytes, self._most_depth = chunks, most_bytes, most_depth
        self._data, self._at = b"", 0
        self._start, self._dropped = -1, 0
        self._mark, self._line, self._column = 0, 1, 1

    def next(self) -> bytes:
        """The next character that is no space; nothing at the end."""
        while True:
            space = _SPACE.match(self._data, self._at)
            self._at = space.end() if space is not None else self._at
            if self._at < len(self._data):
                return self._data[self._at : self._at + 1]
            if not self._more():
                return b""

    def skip(self) -> None:
        """Over the character that ``next`` gave."""
        self._at += 1

    def take(self, wanted: bytes, depth: int) -> None:
        """Over this character, which must come next."""
        found = self.next()
        if not found:
            raise self.cut_off()
        if found != wanted:
            raise self.broken(f"the JSON is broken: {wanted.decode()!r} is missing")
        if depth > self._most_depth:
            raise too_deep(self._most_depth)
        self._at += 1

    def flat(self, depth: int) -> Piece | None:
        """Over the next item and the comma behind it at once, if that is an object of plain values and at hand already."""
        match = _FLAT.match(self._data, self._at)
        if match is None or match.end(1) - match.start(1) > self._most_bytes or depth >= self._most_depth:
            return None
        line, column = self._where(match.start(1))
        self._at = match.end()
        return Piece(match[1], len(match[1]), line, column)

    def value(self, depth: int) -> Piece:
        """Over the next value, inside of ``depth`` brackets."""
        first = self.next()
        if not first:
            raise self.cut_off()
        line, column = self._where(self._at)
        self._start, self._dropped = self._at, 0
        if first[0] in _OPEN:
            self._pass_brackets(depth)
        elif first[0] == _QUOTE:
            self._at += 1
            self._pass_string()
        else:
            self._pass_plain()
        size = self._dropped + self._at - self._start
        raw = self._data[self._start : self._at] if size <= self._most_bytes else None
        self._start = -1
        return Piece(raw, size, line, column)

    def broken(self, what: str) -> InputError:
        """The error for this place."""
        line, column = self._where(self._at)
        return InputError(f"{what} (line {line}, column {column})", code="invalid_json")

    def cut_off(self) -> InputError:
        """The error for a text that ends here, and should not."""
        return self.broken("the JSON ends in the middle: it was cut off; send it whole")

    def _pass_brackets(self, depth: int) -> None:
        outer = depth
        while True:
            run = _RUN.match(self._data, self._at)
            self._at = run.end() if run is not None else self._at
            if self._at == len(self._data):
                self._need_more()
                continue
            found = self._data[self._at]
            self._at += 1
            if found == _QUOTE:
                self._pass_string()
            elif found in _OPEN:
                depth += 1
                if depth > self._most_depth:
                    raise too_deep(self._most_depth)
            else:
                depth -= 1
                if depth == outer:
                    return

    def _pass_string(self) -> None:
        """To behind the end of a string, from within it."""
        while True:
            run = _IN_STRING.match(self._data, self._at)
            self._at = run.end() if run is not None else self._at
            if self._at < len(self._data) and self._data[self._at] == _QUOTE:
                self._at += 1
                return
            self._need_more()

    def _pass_plain(self) -> None:
        while True:
            run = _PLAIN.match(self._data, self._at)
            self._at = run.end() if run is not None else self._at
            if self._at < len(self._data) or not self._more():
                break
        if self._at == self._start and not self._dropped:
            raise self.broken("the JSON is broken: a value is missing")

    def _need_more(self) -> None:
        if not self._more():
            raise self.cut_off()

    def _more(self) -> bool:
        """Read on. What is done with is let go of, and so is a value that is too large already."""
        chunk = next(self._chunks, b"")
        if not chunk:
            return False
        keep = self._at if self._start < 0 else self._start
        if self._start >= 0 and self._at - self._start > self._most_bytes:
            self._dropped += self._at - self._start
            keep = self._at
        if self._start >= 0:
            self._start = 0
        self._where(keep)
        self._data, self._at, self._mark = self._data[keep:] + chunk, self._at - keep, 0
        return True

    def _where(self, place: int) -> tuple[int, int]:
        """Line and column of a place in the data at hand, which is never before one that was asked for earlier."""
        lines = self._data.count(b"\n", self._mark, place)
        if lines:
            self._line, self._column = self._line + lines, place - self._data.rfind(b"\n", self._mark, place)
        else:
            self._column += place - self._mark
        self._mark = place
        return self._line, self._column
