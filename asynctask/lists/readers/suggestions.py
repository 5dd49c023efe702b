"""Which encodings a text may be in that no one can be certain of: each with some of its cells as they would read."""

from __future__ import annotations

import csv
import re
import unicodedata
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Final

from asynctask.lists.readers.characters import COMMON_HAN

__all__ = ["suggestions"]

_CANDIDATES: Final = {
    "windows-1252": ("cp1252", 0.0), "gb18030": ("gb18030", 0.0), "cp932": ("cp932", 0.0), "cp949": ("cp949", 0.0),
    "big5": ("big5hkscs", 0.05), "windows-1251": ("cp1251", 0.05), "windows-1250": ("cp1250", 0.05),
    "windows-1253": ("cp1253", 0.05), "euc-jp": ("euc_jp", 0.1), "windows-1254": ("cp1254", 0.1),
    "windows-1255": ("cp1255", 0.1), "windows-1256": ("cp1256", 0.1), "windows-874": ("cp874", 0.1),
    "windows-1257": ("cp1257", 0.15), "windows-1258": ("cp1258", 0.2), "koi8-r": ("koi8_r", 0.2),
    "mac-roman": ("mac_roman", 0.3),
}  # fmt: skip
"""Names as the option takes them: the codec, and how much better than the common ones a rarer one has to read."""
_SPAN: Final = 1 << 18
_PIECES: Final = 16
_CELLS: Final = 3
_SCORED: Final = 2_000
_OFFERED: Final = 4
_LONGEST: Final = 80
_BAD: Final = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ue000-\uf8ff\ufffd]")
_WORD: Final = re.compile(r"[^\W\d_]+")
_SIGN: Final = re.compile(r"(?<=(.))([^\w\s\x00-\x7f])(?=(.))", re.DOTALL)
_USUAL: Final = frozenset("‘’“”‚„–—…•€£¥§©®™°«»¿¡·×²³½¼¾ªº、。，！？（）：；「」『』【】・ー《》％\u00a0\u3000№")
_SCRIPTS: Final = (
    (0x0370, 0x0400, "greek"), (0x0400, 0x0530, "cyrillic"), (0x0590, 0x0600, "hebrew"), (0x0600, 0x0700, "arabic"),
    (0x0E00, 0x0E80, "thai"), (0x3040, 0x3100, "kana"), (0xAC00, 0xD7B0, "hangul"), (0x3400, 0xA000, "han"),
    (0x20000, 0x32000, "han"),
)  # fmt: skip


def suggestions(path: Path, place: int) -> list[dict[str, Any]]:
    """The likely encodings of a text, the likeliest first: ``encoding``, a name that the option takes, and ``cells``, the
    first three cells that are not plain ASCII as they would read. ``place`` is that of the first byte that is not UTF-8."""
    data = _from_line(path, place)
    ranked = []
    for name, (codec, rare) in _CANDIDATES.items():
        text = _decoded(data, codec)
        if text is not None and not _BAD.search(text) and _reads(path, codec):
            cells = list(islice(_cells(text), _CELLS))
            ranked.append((rare - _sense(text), name, [cell[:_LONGEST] for cell in cells]))
    found: list[dict[str, Any]] = []
    for score, name, cells in sorted(ranked):
        # Several encodings often read the same: the likeliest one stands for them.
        if cells and (score < 0 or not found) and all(cells != each["cells"] for each in found):
            found.append({"encoding": name, "cells": cells})
    return found[:_OFFERED]


def _from_line(path: Path, place: int) -> bytes:
    """The text from the line of a place on, as much as tells enough, in whole lines."""
    begin = max(0, place - _SPAN)
    with path.open("rb") as file:
        file.seek(begin)
        before = file.read(place - begin)
        at = max(before.rfind(b"\n"), before.rfind(b"\r")) + 1
        data = before[at:] + file.read(_SPAN)
        whole = not file.read(1)
    return data if whole else data[: data.rfind(b"\n") + 1] or data


def _decoded(data: bytes, codec: str) -> str | None:
    try:
        return data.decode(codec)
    except UnicodeDecodeError:
        return None


def _reads(path: Path, codec: str) -> bool:
    """Whether a codec reads a text, or the first megabytes of a very long one."""
    from asynctask.lists.readers.encodings import decoded

    try:
        return not any(map(_BAD.search, islice(decoded(path, codec), _PIECES)))
    except UnicodeError:
        return False


def _cells(text: str) -> Iterator[str]:
    """The cells that are not plain ASCII; of JSON, its texts and what else stands between its marks."""
    if text.lstrip()[:1] in ("{", "["):
        rows: Iterator[list[str]] = (re.split(r'[\[\]{},:"]', line) for line in text.splitlines())
    else:
        first = text[:65_536]
        rows = csv.reader(text.splitlines(), delimiter=max(",;\t|", key=first.count))
    try:
        yield from (cell.strip() for row in rows for cell in row if not cell.isascii())
    except csv.Error:
        return


def _sense(text: str) -> float:
    """How much sense a reading makes: the mean over its words and signs that are not plain ASCII."""
    foreign = "\n".join(islice((line for line in text.splitlines() if not line.isascii()), _SCORED))[: 10 * _SCORED]
    scores = [_weigh_word(word) for word in _WORD.findall(foreign) if not word.isascii()]
    scores += [_weigh_sign(*found) for found in _SIGN.findall(f"\n{foreign}\n")]
    return sum(scores) / len(scores) if scores else 0.0


def _weigh_sign(before: str, sign: str, after: str) -> float:
    if unicodedata.category(sign) in {"Mn", "Mc", "Nd"}:
        return 0.5
    if sign not in _USUAL or (sign not in "’·・" and before.isalpha() and after.isalpha()):
        return -0.7
    return 1.0 if sign in "’“”–€…" else 0.7


def _weigh_word(word: str) -> float:
    scripts = {_script(ord(letter)) for letter in word}
    foreign = [letter for letter in word if not letter.isascii()]
    if scripts == {"latin"}:
        return _weigh_latin(word, len(foreign))
    if scripts <= {"han", "kana", "hangul"}:
        return sum(map(_weigh_east_asian, word)) / len(word) - 0.3 * (len(word) == 1)
    if len(scripts) == 1 and "other" not in scripts:
        return -0.2 if not _steady(word) else 0.9 if len(word) > 1 else 0.4
    if scripts <= {"latin", "han", "kana", "hangul"}:
        # 白色T恤 is a word, It痴 is none.
        within = len(foreign) == 1 and not (word[0].isupper() and word[-1] in foreign and len(word) == 2)
        return -0.8 if within else 0.5
    return -0.8


def _weigh_latin(word: str, foreign: int) -> float:
    if not _steady(word) or any(letter in "ªºĿŀʼŉ" for letter in word):
        return -0.5
    weights = [1.0 if letter in _WESTERN else 0.9 if letter in _OTHERS else 0.3 for letter in word if not letter.isascii()]
    return sum(weights) / foreign - 1.2 * (foreign > 3 and 4 * foreign > 3 * len(word))


def _weigh_east_asian(letter: str) -> float:
    if letter in COMMON_HAN or "ぁ" <= letter <= "ヺ":
        return 1.0
    if "가" <= letter <= "힣":
        return 0.9 if _in(letter, "euc_kr") else 0.2
    return 0.6 if _in(letter, "gb2312") or _in(letter, "big5") or _in(letter, "euc_jp") else -0.3


def _in(letter: str, codec: str) -> bool:
    try:
        letter.encode(codec)
    except UnicodeEncodeError:
        return False
    return True


def _steady(word: str) -> bool:
    """Whether no capital stands behind a small letter."""
    return not any(a.islower() and b.isupper() for a, b in pairwise(word))


def _script(code: int) -> str:
    if code < 0x0250 or 0x1E00 <= code < 0x1F00:
        return "latin"
    return next((name for first, end, name in _SCRIPTS if first <= code < end), "other")


_WESTERN: Final = frozenset("àáâãäåæçèéêëìíîïñòóôõöøùúûüßœÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜŒ")
_OTHERS: Final = frozenset("ąćęłńśźżĄĆĘŁŃŚŹŻěščřžýůďťňĚŠČŘŽÝŮĎŤŇőűŐŰğışĞİŞăţşĂŢđĐļķģņēīūāąųėįĒĪŪĀĖĮŲư")
"""The accented letters of the languages of the west of Europe, and of its others, in which most Latin text is."""
