"""The common interface of the readers: values, limits, and names of columns."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from asynctask.errors import InputError, Problem, TooLarge

# -- columns that a report adds: one table for writing and for recognising them

COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "en": ("row", "status", "error", "attempts", "result"),
    "zh_CN": ("行号", "状态", "错误", "尝试次数", "结果"),
    "ja": ("行番号", "状態", "エラー", "試行回数", "結果"),
}
"""Row number, status, error, attempts and result, in this order, by locale."""

SUFFIX: Final[Mapping[str, str]] = {"en": " (report)", "zh_CN": " (报告)", "ja": " (レポート)"}
"""Appended to a name that an original column has too. Compared, so in NFKC and folded case."""


def of_locale(locale: str) -> str:
    """``locale`` if its names are shipped, else ``en``."""
    return locale if locale in COLUMNS else "en"


# -- interface

_BLOCK: Final = len(COLUMNS["en"])


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a reader, with the names, meanings and defaults of the configuration.

    ``split_cpu_s`` and ``split_memory`` apply to the process that reads a workbook. ``max_empty_rows``: a text ends after
    so many consecutive empty rows, as many as the largest spreadsheet has.
    """

    max_file_bytes: int = 209_715_200
    max_unzipped_bytes: int = 1_073_741_824
    max_unzip_ratio: int = 200
    max_rows: int = 1_000_000
    max_columns: int = 1_000
    max_cell_chars: int = 32_767
    max_item_bytes: int = 65_536
    max_json_depth: int = 32
    split_cpu_s: int = 300
    split_memory: int = 536_870_912
    max_empty_rows: int = 1_048_576


@dataclass(frozen=True, slots=True)
class CellError:
    """A cell that shows an error; ``text`` is the error shown, ``#N/A`` for instance."""

    text: str

    def __str__(self) -> str:
        return self.text


class Percent(float):
    """A number displayed as a percentage; ``pattern`` is its number format."""

    pattern: str

    def __new__(cls, value: float, pattern: str) -> Percent:
        made = super().__new__(cls, value)
        made.pattern = pattern
        return made


class Formatted(float):
    """A number that its format shows otherwise: 1234 as 01234. ``text`` is what is shown, for a field of text; None where
    that cannot be said. ``code`` is the number format."""

    code: str
    text: str | None

    def __new__(cls, value: float, code: str, text: str | None) -> Formatted:
        made = super().__new__(cls, value)
        made.code, made.text = code, text
        return made

    @property
    def number(self) -> int | float:
        """The number alone, for every other field."""
        return int(self) if self.is_integer() else float(self)

    def __str__(self) -> str:
        return str(self.number) if self.text is None else self.text


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row before validation.

    ``number``: the row as the spreadsheet numbers it, from 1; for JSON the position from 1.
    ``values``: of a sheet, header -> cell (None if empty); of JSON, the parsed element.
    ``problems``: faults found before validation by a model.
    """

    number: int
    values: Any
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """The options of an opener.

    ``expect``: names that a header may have; empty if the worker declares no items. ``encoding``: of a text, as its sender
    names it. ``report``: the list was accepted before, and is read again for a report. Then a sheet (.xlsx, .ods) is not
    checked before its first row, ``planned`` may be None, and numbers that it shows as percentages are :class:`Percent`.
    ``header``: the row of the header, None to find it; 0 where only the beginning is wanted, whatever the header is.
    """

    sheet: str | None
    limits: Limits
    expect: frozenset[str]
    encoding: str | None = None
    report: bool = False
    header: int | None = None


class Source:
    """An open list: a context manager; ``rows`` may be called repeatedly.

    ``format``: its name in the registry. ``headers``: the names of the columns in order, None for JSON; ``places``: their
    columns in the sheet, 0 is A. ``sheet_name``: None for a file without sheets. ``delimiter``: that of a text, else
    None. ``planned``: the number of rows, None if unknown without reading them.
    """

    format = ""
    delimiter: str | None = None
    headers: tuple[str, ...] | None = None
    places: tuple[int, ...] | None = None
    sheet_name: str | None = None
    planned: int | None = None

    def rows(self, after: int = 0) -> Iterator[RawRow]:
        """The rows with a number greater than ``after``, in order.

        Raises :class:`InputError` (:class:`TooLarge` beyond a limit) where the rest of the list cannot be read.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Closes the file; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_INVISIBLE: Final = "\ufeff\u200b\u2060\u00ad\u180e\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters without width that programs leave at the ends of copied texts: byte order mark, zero-width space, word joiner,
soft hyphen, marks of direction. Joiners are not among them: within emoji and Indic words they are seen."""
_SPACES: Final = (
    " \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028"
    "\u2029\u202f\u205f\u3000"
)
_ENDS: Final = _SPACES + _INVISIBLE
_NOTHING: Final = dict.fromkeys(map(ord, _INVISIBLE))


def trimmed(text: str) -> str:
    """A text of a cell without spaces and invisible characters at its ends."""
    text = text.strip()
    return text if text.isascii() else text.strip(_ENDS)


def normalise(name: str) -> str:
    """A header in the form in which names are compared: NFKC, case folded, spaces collapsed and stripped, no invisible
    characters."""
    if not name.isascii():
        name = unicodedata.normalize("NFKC", name.translate(_NOTHING))
    return " ".join(name.casefold().split())


def column_letters(index: int) -> str:
    """The letters of a column; ``index`` 0 is A, 26 is AA."""
    letters = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        letters = chr(65 + rest) + letters
    return letters


def column_index(letters: bytes) -> int:
    """The column of its capital letters; A is 0."""
    column = 0
    for letter in letters:
        column = column * 26 + letter - 64
    return column - 1


def over_limit(what: str, setting: str, value: int) -> TooLarge:
    """The error beyond a limit, with its value and its setting."""
    return TooLarge(
        f"{what}, over the limit of {value:,} ({setting});"
        f" send less at once, or have the operator raise ASYNCTASK_{setting.upper()}"
    )


def put(row: list[Any], column: int, value: Any, number: int, limits: Limits, repeat: int = 1) -> None:
    """Puts a value into the cells of a row from a column on; 0 is A. Raises :class:`TooLarge` for a cell beyond
    ``max_columns``, or a text of more than ``max_cell_chars``."""
    last = column + repeat - 1
    if last >= limits.max_columns:
        what = f"row {number} has a cell in column {column_letters(last)}, which is column {last + 1:,}"
        raise over_limit(what, "max_columns", limits.max_columns)
    if type(value) is str and len(value) > limits.max_cell_chars:
        raise too_long(number, value, limits)
    if column < len(row):
        row[column] = value
    else:
        row.extend([None] * (column - len(row)))
        row.extend([value] * repeat)


def too_long(row: int, text: str, limits: Limits) -> TooLarge:
    """The error for a text of more than ``max_cell_chars``."""
    return over_limit(f"a cell of row {row} has {len(text):,} characters", "max_cell_chars", limits.max_cell_chars)


_COSTS: Final = {
    "split_cpu_s": "{:,} s of processor time",
    "split_memory": "{:,} bytes of memory",
}


def too_costly(setting: str, limits: Limits) -> InputError:
    """The error for a workbook that exceeds ``split_cpu_s`` or ``split_memory``."""
    most = _COSTS[setting].format(getattr(limits, setting))
    return InputError(
        f"reading the workbook takes more than {most} ({setting}); save it as CSV or split it into several, or have the"
        f" operator raise ASYNCTASK_{setting.upper()}",
        code="too_costly",
    )


def shorten(value: Any, length: int = 200) -> Any:
    """``value``; a text longer than ``length`` characters is cut with an ellipsis."""
    if isinstance(value, str) and len(value) > length:
        return value[: length - 1] + "…"
    return value


def report_block(headers: Collection[str]) -> frozenset[str]:
    """The columns that a report added to these headers; ignoring them allows a corrected report to be uploaded as it is.

    They are the five of :data:`COLUMNS` in any language, adjacent and in order, with or without a suffix.
    """
    names = list(headers)
    return frozenset(name for start in _blocks(names) for name in names[start : start + _BLOCK])


def row_number_header(headers: Sequence[str], used: Collection[str] = ()) -> str | None:
    """The column with the row numbers of a report: the first of the last block of its columns, or else one of that name
    that is no column in ``used``. None without one."""
    if starts := _blocks(headers):
        return headers[starts[-1]]
    numbers = {block[0] for block in COLUMNS.values()}
    return next((name for name in headers if _without_suffix(name) in numbers and name not in used), None)


def _blocks(headers: Sequence[str]) -> list[int]:
    """Where the columns of reports begin among these."""
    plain, known = [_without_suffix(name) for name in headers], set(COLUMNS.values())
    return [start for start in range(len(plain)) if tuple(plain[start : start + _BLOCK]) in known]


def _without_suffix(name: str) -> str:
    name = normalise(name)
    for suffix in SUFFIX.values():
        name = name.removesuffix(suffix)
    return name
