"""Reads JSON lists (an array, or an object with the array under ``items``) and JSON lines: streaming, constant memory."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import orjson

from asynctask.errors import InputError, Problem, TooLarge
from asynctask.lists.readers.base import Limits, OpenOptions, RawRow, Source, over_limit
from asynctask.lists.readers.encodings import BOM, bytes_of, decoded, prove_encoding

_SHOWN: Final = 200
_KEY_SHOWN: Final = 80
# A group that repeats possessively (``*+``) is atomic (``(?>``): before Python 3.11.5 such a repeat otherwise goes on from
# where its last turn failed, instead of where it began (gh-106052).
_INSIDE: Final = rb'[^"\\]*+(?>\\.[^"\\]*+)*+'
_STRINGS: Final = re.compile(rb'"%b"?' % _INSIDE, re.DOTALL)
"""Strings, and the rest of the text from one without an end: looking for its end from each quote would be quadratic."""
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_ONE_KIND: Final = bytes.maketrans(b"{}", b"[]")
_DIGITS: Final = re.compile(rb"[0-9]{19}")
_LONG: Final = re.compile(rb"(?<![\d.eE+])-?\d{19,}(?![\d.eE])")
_NOT_FINITE: Final = re.compile(rb"-?\b(?:NaN|Infinity)\b")
_INT64, _UINT64 = -(2**63), 2**64 - 1
_BLANK: Final = bytes(each if each == 0x0A else 0x20 for each in range(256))

T = TypeVar("T")


class JsonSource(Source):
    """Items of a JSON text, whose file is open only while they are read."""

    def __init__(self, name: str, items: Callable[[], Iterator[RawRow]], planned: int | None) -> None:
        self.format, self._items, self.planned = name, items, planned

    def rows(self, after: int = 0) -> Iterator[RawRow]:
        """See :meth:`Source.rows`."""
        return (row for row in self._items() if row.number > after)


def open_json(path: Path, options: OpenOptions) -> JsonSource:
    """Opens a JSON file. The whole of it is parsed once first, so that a broken one is refused before any item is used,
    unless only its beginning is wanted (``options.header`` is 0).

    Raises :class:`InputError`: ``invalid_json``, ``too_deep``, ``encoding``, ``nul_byte``, ``too_large``.
    """
    limits, codec = options.limits, prove_encoding(path, options.encoding, options.expect)

    def items() -> Iterator[RawRow]:
        for number, piece in enumerate(items_of(_utf8(path, codec), limits), 1):
            yield _item(number, piece, limits)

    if options.header == 0:
        return JsonSource("json", items, None)
    count = 0
    for count, _ in enumerate(items(), 1):
        if count > limits.max_rows:
            raise over_limit("the list has more items", "max_rows", limits.max_rows)
    return JsonSource("json", items, count)


def open_ndjson(path: Path, options: OpenOptions) -> JsonSource:
    """Opens JSON lines: each line is an item, numbered by the line. A broken line is a rejected row.

    Raises :class:`InputError`: ``encoding``, ``nul_byte``, ``too_large``.
    """
    limits, codec = options.limits, prove_encoding(path, options.encoding, options.expect)
    count = 0
    for count, _ in enumerate(_lines(path, codec, limits), 1):
        if count > limits.max_rows:
            raise over_limit("the file has more lines", "max_rows", limits.max_rows)

    def items() -> Iterator[RawRow]:
        for number, line, size in _lines(path, codec, limits):
            yield _line_item(number, line, size, limits)

    return JsonSource("ndjson", items, count)


def check_depth(text: bytes, max_depth: int) -> None:
    """Raises :class:`InputError` ``too_deep`` if a JSON text nests deeper than ``max_depth``.

    Each round removes the innermost pairs: at most ``max_depth`` rounds, no recursion.
    """
    if text.count(b"[") + text.count(b"{") <= max_depth:
        return
    brackets = _STRINGS.sub(b"", text).translate(_ONE_KIND, _NO_BRACKETS)
    for _ in range(max_depth):
        if not brackets:
            return
        fewer = brackets.replace(b"[]", b"")
        if len(fewer) == len(brackets):
            break
        brackets = fewer
    # The rest is too deep, or its brackets do not match and open more than they close somewhere.
    depth = deepest = 0
    for bracket in brackets[: 4 * max_depth + 4]:
        depth += 1 if bracket == 0x5B else -1
        deepest = max(deepest, depth)
    if deepest > max_depth or b"[]" in brackets:
        raise _too_deep(max_depth)


MOST_VALUES: Final = 500_000
"""Values of a JSON text that is held as objects, which take up to 110 bytes each."""


def values_in(text: bytes) -> int:
    """How many values (numbers, texts, lists and objects) a JSON text has, at most: commas and brackets in texts count."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def check_values(text: bytes) -> None:
    """Raises :class:`TooLarge` if a JSON text has more than :data:`MOST_VALUES` values."""
    if values_in(text) > MOST_VALUES and values_in(_STRINGS.sub(b"", text)) > MOST_VALUES:
        raise TooLarge(
            f"the JSON has more than {MOST_VALUES:,} values (numbers, texts, lists and objects); send fewer at once. Only a"
            " list of items may have more of them"
        )


def cut_lists(
    body: bytes, names: Collection[str], limits: Limits, keep: Callable[[Iterator[Piece]], T]
) -> tuple[bytes, dict[str, T]]:
    """Cuts the lists with these names out of a JSON object: the object with blanks for their items, so that every other
    character keeps its place, and what ``keep`` makes of the items of each.

    A text that is no object, or not up to its end, comes back as it is from there on: for a parser to refuse. Raises
    :class:`InputError` ``invalid_json`` for a broken list.
    """
    text = _Text(iter((body,)), len(body), limits.max_json_depth)
    kept: dict[str, T] = {}
    rest, end = [], 0
    if text.next() != b"{":
        return body, kept
    text.skip()
    while text.next() == b'"':
        key = text.value(1).raw or b""
        text.take(b":", 1)
        name = key[1:-1].decode("utf-8", "replace")
        if name in names and text.next() == b"[":
            begin = text.place + 1
            rest.append(body[end:begin])
            kept[name] = keep(_list(text, 2))
            end = text.place - 1
            rest.append(body[begin:end].translate(_BLANK))
        else:
            text.value(1)
        if text.next() != b",":
            break
        text.skip()
    rest.append(body[end:])
    return b"".join(rest), kept


def _utf8(path: Path, codec: str) -> Iterator[bytes]:
    """The text as UTF-8, streamed, without a byte order mark."""
    if codec != "utf-8-sig":
        for number, piece in enumerate(decoded(path, codec)):
            yield (piece if number else piece.removeprefix("\ufeff")).encode() or b" "
        return
    for number, chunk in enumerate(bytes_of(path)):
        yield (chunk if number else chunk.removeprefix(BOM)) or b" "


def _lines(path: Path, codec: str, limits: Limits) -> Iterator[tuple[int, bytes, int]]:
    """Number, UTF-8 text and size of each line that is not blank. A too large line is cut."""
    most = 16 * limits.max_item_bytes
    number, rest, size = 1, b"", 0
    for chunk in _utf8(path, codec):
        *whole, last = chunk.split(b"\n")
        for line in whole:
            size += len(line)
            text = (rest + line).strip() if size <= most else rest or line[:most]
            if text:
                yield number, text, size
            number, rest, size = number + 1, b"", 0
        size += len(last)
        rest = rest + last if size <= most else (rest + last)[:_SHOWN]
    if text := rest.strip():
        yield number, text, size


class _LongInteger(InputError):
    """An integer beyond 64 bits: valid JSON, but not storable exactly."""


def _item(number: int, piece: Piece, limits: Limits) -> RawRow:
    if piece.raw is None:
        return _refused(number, b"", _item_too_large(number, piece.size, limits))
    try:
        return RawRow(number, _parsed(piece.raw, piece.line, piece.column))
    except (_LongInteger, DoubledKey) as error:
        return _refused(number, piece.raw, _problem(number, error, piece.raw))


def _line_item(number: int, line: bytes, size: int, limits: Limits) -> RawRow:
    if size > 16 * limits.max_item_bytes:
        return _refused(number, line, _item_too_large(number, size, limits))
    try:
        check_depth(line, limits.max_json_depth)
        return RawRow(number, _parsed(line, number, 1))
    except InputError as error:
        return _refused(number, line, _problem(number, error, line))


def _problem(number: int, error: InputError, raw: bytes) -> Problem:
    text = error.code if error.code == DoubledKey.code else ""
    return Problem(number, None, error.code, str(error), _beginning(raw), text, error.params)


def _item_too_large(number: int, size: int, limits: Limits) -> Problem:
    limit = limits.max_item_bytes
    text = (
        f"the item has {size:,} bytes as JSON, over the limit of {limit:,} (max_item_bytes); shorten it, or have the"
        " operator raise ASYNCTASK_MAX_ITEM_BYTES"
    )
    return Problem(number, None, "item_too_large", text, None, "item_too_large", {"size": size, "limit": limit})


def _refused(number: int, raw: bytes, problem: Problem) -> RawRow:
    return RawRow(number, {"value": _beginning(raw)} if raw else {}, (problem,))


def _beginning(raw: bytes) -> str:
    text = raw[:_SHOWN].decode("utf-8", "ignore")
    return text if len(raw) <= _SHOWN else text + "…"


def _parsed(raw: bytes, line: int, column: int) -> Any:
    """The value of a JSON text that begins at this line and column of the file."""
    if _DIGITS.search(raw):
        _refuse_long_integers(_STRINGS.sub(b"", raw))
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _invalid(raw, error, line, column) from None
    if (key := doubled_key(raw, found)) is not None:
        raise DoubledKey(key)
    return found


class DoubledKey(InputError):
    """An object has a key twice; every JSON parser would drop another of the two values."""

    code = "duplicate_key"

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} is given twice in one object; keep one of them", params={"key": key})


def doubled_key(raw: bytes, found: Any) -> str | None:
    """The first key that an object within a sound JSON text has twice; None without one. ``found``: its value."""
    colons, keys = raw.count(b":"), _keys(found)
    if colons == keys or _STRINGS.sub(b"", raw).count(b":") == keys:
        return None
    doubled: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) < len(pairs):
            doubled.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)

    json.loads(raw, object_pairs_hook=once)
    return next((key.encode("utf-8", "replace").decode()[:_KEY_SHOWN] for key in doubled), None)


def _keys(found: Any) -> int:
    """How many keys the objects within a value have."""
    if type(found) is dict:
        return len(found) + sum(_keys(each) for each in found.values() if type(each) in (dict, list))
    return sum(_keys(each) for each in found if type(each) in (dict, list)) if type(found) is list else 0


def _refuse_long_integers(bare: bytes) -> None:
    for match in _LONG.finditer(bare):
        text = match.group().decode()
        if len(text) > 21 or not _INT64 <= int(text) <= _UINT64:
            raise _LongInteger(
                f"the number {text[:40]} is too long to be kept exactly; write it in double quotes", code="invalid_json"
            )


def _invalid(raw: bytes, error: orjson.JSONDecodeError, line: int, column: int) -> InputError:
    where = f"line {line + error.lineno - 1}, column {error.colno + (column - 1 if error.lineno == 1 else 0)}"
    if _NOT_FINITE.search(_STRINGS.sub(b"", raw)):
        return InputError(f"NaN and Infinity are no JSON ({where}); write null instead", code="invalid_json")
    if error.pos >= len(raw.decode().rstrip()):
        return InputError(f"the JSON ends in the middle ({where}): it was cut off; send it whole", code="invalid_json")
    if raw.lstrip().startswith(b"{") and error.colno == 1:
        return InputError(
            f"after the first object comes another ({where}); put them in one list: [{{...}}, {{...}}]",
            code="invalid_json",
        )
    return InputError(f"the JSON is broken at {where}: {error.msg}; mend it and send it again", code="invalid_json")


# -- items in a JSON text, found by counting brackets

_SPACE: Final = re.compile(rb"[ \t\r\n]*+")
_BETWEEN: Final = rb'[^"\[\]{}]*+(?>"%b"[^"\[\]{}]*+)*+' % _INSIDE
_RUN: Final = re.compile(_BETWEEN, re.DOTALL)
"""Up to the next bracket, or to an unfinished string."""
_FLAT: Final = re.compile(rb"[ \t\r\n]*+(\{%b\})[ \t\r\n]*+," % _BETWEEN, re.DOTALL)
_IN_STRING: Final = re.compile(_INSIDE, re.DOTALL)
_PLAIN: Final = re.compile(rb'[^ \t\r\n,:\[\]{}"]*+')
_OPEN, _QUOTE = frozenset(b"[{"), ord('"')


class Piece(NamedTuple):
    """The JSON of an item, at ``line`` and ``column`` from 1. ``raw`` is None beyond the limit; ``size`` is in bytes."""

    raw: bytes | None
    size: int
    line: int
    column: int


def items_of(chunks: Iterator[bytes], limits: Limits) -> Iterator[Piece]:
    """The items of ``[...]``, or of the list under ``items`` in ``{"items": [...]}``, one by one.

    Arguments: the text in UTF-8, in pieces; the limits. An item of more than 16 times ``max_item_bytes`` has no ``raw``.
    Raises :class:`InputError`: ``invalid_json`` with line and column, ``too_deep``.
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


def _too_deep(most: int) -> InputError:
    """The error for too deep nesting."""
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
    """A text read piece by piece; only the current item is kept in memory."""

    def __init__(self, chunks: Iterator[bytes], most_bytes: int, most_depth: int) -> None:
        self._chunks, self._most_bytes, self._most_depth = chunks, most_bytes, most_depth
        self._data, self._at = b"", 0
        self._start, self._dropped = -1, 0
        self._mark, self._line, self._column = 0, 1, 1

    def next(self) -> bytes:
        """The next character that is no space; empty at the end."""
        while True:
            space = _SPACE.match(self._data, self._at)
            self._at = space.end() if space is not None else self._at
            if self._at < len(self._data):
                return self._data[self._at : self._at + 1]
            if not self._more():
                return b""

    @property
    def place(self) -> int:
        """The offset in a text of one piece."""
        return self._at

    def skip(self) -> None:
        self._at += 1

    def take(self, wanted: bytes, depth: int) -> None:
        found = self.next()
        if not found:
            raise self.cut_off()
        if found != wanted:
            raise self.broken(f"the JSON is broken: {wanted.decode()!r} is missing")
        if depth > self._most_depth:
            raise _too_deep(self._most_depth)
        self._at += 1

    def flat(self, depth: int) -> Piece | None:
        """The next item, if it is an object of plain values, followed by a comma, in the buffer; a fast path."""
        match = _FLAT.match(self._data, self._at)
        if match is None or match.end(1) - match.start(1) > self._most_bytes or depth >= self._most_depth:
            return None
        line, column = self._where(match.start(1))
        self._at = match.end()
        return Piece(match[1], len(match[1]), line, column)

    def value(self, depth: int) -> Piece:
        """The next value, within ``depth`` brackets."""
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
        """The error for this position."""
        line, column = self._where(self._at)
        return InputError(f"{what} (line {line}, column {column})", code="invalid_json")

    def cut_off(self) -> InputError:
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
                    raise _too_deep(self._most_depth)
            else:
                depth -= 1
                if depth == outer:
                    return

    def _pass_string(self) -> None:
        """Advances from within a string to behind its end."""
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
        """Reads on; drops what was consumed, and a value that is too large already."""
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
        """Line and column of an offset in the buffer; offsets must not decrease."""
        lines = self._data.count(b"\n", self._mark, place)
        if lines:
            self._line, self._column = self._line + lines, place - self._data.rfind(b"\n", self._mark, place)
        else:
            self._column += place - self._mark
        self._mark = place
        return self._line, self._column
