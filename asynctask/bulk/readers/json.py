"""JSON: an array of items, or an object with that array under ``items``. Parsed as a whole, so limited in size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import orjson

from asynctask.bulk.readers.base import OpenOptions, RawRow, over_limit
from asynctask.bulk.readers.detect import BOM
from asynctask.errors import InputError

__all__ = ["JsonSource", "check_depth", "open_json", "parse_json"]

_STRINGS: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_ONE_KIND: Final = bytes.maketrans(b"{}", b"[]")
_LONG: Final = re.compile(rb"(?<![\d.eE+])-?\d{19,}(?![\d.eE])")
_NOT_FINITE: Final = re.compile(rb"-?\b(?:NaN|Infinity)\b")
_INT64, _UINT64 = -(2**63), 2**64 - 1


class JsonSource:
    """A parsed list; see :class:`~asynctask.bulk.readers.base.Source`."""

    format = "json"
    headers: tuple[str, ...] | None = None

    def __init__(self, items: list[Any]) -> None:
        self._items = items
        self.planned: int | None = len(items)

    def rows(self, after: int = 0) -> Iterator[RawRow]:
        """See :meth:`Source.rows`."""
        for number in range(max(after, 0), len(self._items)):
            yield RawRow(number + 1, self._items[number])

    def close(self) -> None:
        """See :meth:`Source.close`."""
        self._items = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_json(path: Path, options: OpenOptions) -> JsonSource:
    """Open a JSON file. Raises :class:`InputError`: ``invalid_json``, ``too_deep``, ``encoding``, ``too_large``."""
    data = parse_json(path.read_bytes(), options.limits.max_json_depth)
    if isinstance(data, dict) and isinstance(data.get("items"), list):
        data = data["items"]
    if not isinstance(data, list):
        raise InputError(
            'the JSON is no list of items; send [{...}, {...}] or {"items": [{...}, {...}]}', code="invalid_json"
        )
    if len(data) > options.limits.max_rows:
        raise over_limit(f"the list has {len(data):,} items", "max_rows", options.limits.max_rows)
    return JsonSource(data)


def parse_json(body: bytes, max_depth: int) -> Any:
    """Parse a JSON text. Raises :class:`InputError`, with line and column where the text is broken."""
    body = body.removeprefix(BOM)
    try:
        body.decode()
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"the JSON is not UTF-8: line {line}, byte {error.start + 1}; save it as UTF-8", code="encoding"
        ) from None
    bare = _STRINGS.sub(b"", body)
    check_depth(bare, max_depth)
    _refuse_long_integers(bare)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _invalid(body, bare, error) from None


def check_depth(bare: bytes, max_depth: int) -> None:
    """Raise :class:`InputError` ``too_deep`` if a JSON text, its strings taken out, nests deeper than ``max_depth``.

    Every round takes away the innermost pairs: as many rounds as levels, no recursion.
    """
    brackets = bare.translate(_ONE_KIND, _NO_BRACKETS)
    for _ in range(max_depth):
        if not brackets:
            return
        fewer = brackets.replace(b"[]", b"")
        if len(fewer) == len(brackets):
            break
        brackets = fewer
    # What is left is too deep, or its pairs do not match and then opens more than it closes somewhere.
    depth = deepest = 0
    for bracket in brackets[: 4 * max_depth + 4]:
        depth += 1 if bracket == 0x5B else -1
        deepest = max(deepest, depth)
    if deepest > max_depth or b"[]" in brackets:
        raise InputError(
            f"the JSON nests deeper than {max_depth} levels (max_json_depth); send flatter items,"
            " or have the operator raise ASYNCTASK_MAX_JSON_DEPTH",
            code="too_deep",
        )


def _refuse_long_integers(bare: bytes) -> None:
    for match in _LONG.finditer(bare):
        text = match.group().decode()
        if len(text) > 21 or not _INT64 <= int(text) <= _UINT64:
            raise InputError(
                f"the number {text[:40]} is too long to be kept exactly; write it in double quotes", code="invalid_json"
            )


def _invalid(body: bytes, bare: bytes, error: orjson.JSONDecodeError) -> InputError:
    where = f"line {error.lineno}, column {error.colno}"
    if _NOT_FINITE.search(bare):
        return InputError(f"NaN and Infinity are no JSON ({where}); write null instead", code="invalid_json")
    if error.pos >= len(body.decode().rstrip()):
        return InputError(f"the JSON ends in the middle ({where}): it was cut off; send it whole", code="invalid_json")
    if body.lstrip().startswith(b"{") and error.colno == 1:
        return InputError(
            f"after the first object comes another ({where}); put them in one list: [{{...}}, {{...}}]",
            code="invalid_json",
        )
    return InputError(f"the JSON is broken at {where}: {error.msg}; mend it and send it again", code="invalid_json")
