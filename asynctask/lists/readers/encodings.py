"""In which encoding a text is: proved by decoding all of it, and where several would do, by what makes sense.

A wrong guess would fill a ledger with characters that nobody wrote, so what is not clear is refused.
"""

from __future__ import annotations

import codecs
import difflib
import re
import unicodedata
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from asynctask.errors import InputError
from asynctask.lists.readers.base import normalise
from asynctask.lists.readers.characters import COMMON_HAN

__all__ = ["BOM", "decoded", "encoding_names", "head_text", "known_encoding", "prove_encoding"]

BOM: Final = b"\xef\xbb\xbf"
_CHUNK: Final = 1 << 20
_SAMPLE: Final = 20_000
_NAMES: Final = {
    "utf-8-sig": "utf-8 utf8 utf-8-sig ascii us-ascii",
    "utf-16": "utf-16 utf16 ucs-2 unicode",
    "utf-16-le": "utf-16-le utf-16le",
    "utf-16-be": "utf-16-be utf-16be",
    "gb18030": "gb18030 gbk gb2312 gb-2312 cp936 936 ms936 euc-cn x-gbk",
    "cp932": "cp932 932 ms932 windows-31j shift-jis shiftjis sjis x-sjis ms-kanji",
    "euc_jp": "euc-jp eucjp x-euc-jp",
    "big5hkscs": "big5 big5-hkscs big5hkscs cp950 950 x-big5",
    "cp949": "cp949 949 euc-kr euckr ks-c-5601-1987 uhc windows-949",
    "cp1250": "cp1250 windows-1250",
    "cp1251": "cp1251 windows-1251",
    "cp1252": "cp1252 windows-1252 iso-8859-1 latin-1 latin1",
    "iso8859_15": "iso-8859-15 iso8859-15 latin-9",
    "iso8859_2": "iso-8859-2 iso8859-2 latin-2",
    "cp1253": "cp1253 windows-1253 iso-8859-7 greek",
    "cp1254": "cp1254 windows-1254 iso-8859-9 latin-5",
    "cp1255": "cp1255 windows-1255",
    "cp1256": "cp1256 windows-1256",
    "cp1257": "cp1257 windows-1257",
    "cp1258": "cp1258 windows-1258",
    "cp874": "cp874 windows-874 tis-620 iso-8859-11",
    "koi8_r": "koi8-r koi8r",
    "mac_roman": "mac-roman macroman macintosh",
    "utf-32": "utf-32 utf32 ucs-4",
    "utf-32-le": "utf-32-le utf-32le",
    "utf-32-be": "utf-32-be utf-32be",
}
_CODECS: Final = {name: codec for codec, names in _NAMES.items() for name in names.split()}
_OFFERED: Final = "utf-8, utf-16, gb18030, cp932, euc-jp, big5, cp949, cp1252"
_HOW: Final = "save it as 'CSV UTF-8', or say which encoding it is in with the option encoding"
_CONTROLS: Final = re.compile("[\x00-\x08\x0e-\x1f\ufffe\uffff\ue000-\uf8ff]")
_SECOND_CONTROLS: Final = re.compile("[\x80-\x9f]")
_EAST_ASIAN: Final = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff61-\uff9f\U00020000-\U0003ffff"
_LONE: Final = re.compile(f"(?<=[A-Za-z])[{_EAST_ASIAN}](?![{_EAST_ASIAN}])")
_BEHIND: Final = re.compile(f"(?<=[A-Za-z])[{_EAST_ASIAN}]{{2,4}}(?![{_EAST_ASIAN}])")
_WORDS: Final = re.compile(f"[{_EAST_ASIAN}]{{2,}}")
_FEW: Final = 20
"""How many words of several East Asian characters one lone character behind a Latin letter needs beside it."""
_CONTROL_BYTES: Final = bytes({*range(1, 9), *range(14, 32)})
_SOUND: Final = 0.5
"""What a reading has to score at least."""
_CLEARLY: Final = 0.05
"""By how much the better of two readings has to be better."""
_OFTEN: Final = 0.25
"""How many of the Chinese characters have to be common ones where the same bytes are also Korean or Japanese."""
_MOSTLY: Final = 0.75
"""The same, where those bytes are nothing but Korean syllables: Chinese text of some length never is."""
_SYLLABLES: Final = 0.9
_MARKED: Final = 0.08
"""How many half-width kana are sound marks or long vowels at least, where there is no other Japanese to tell by."""
_HALF: Final = re.compile("[ｦ-ﾟ]+")
_VOICED: Final = re.compile("(?<![ｳｶ-ﾄﾊ-ﾎ])ﾞ|(?<![ﾊ-ﾎ])ﾟ")


def known_encoding(name: str) -> str:
    """The codec of an encoding that somebody names. Raises :class:`InputError` ``encoding`` for one that is not known."""
    codec = _CODECS.get(name.strip().strip("\"'").lower().replace("_", "-"))
    if codec is None:
        raise InputError(f"no encoding {name[:40]!r} is known; give one of: {encoding_names(name)}", code="encoding")
    return codec


def encoding_names(near: str) -> str:
    """The encodings to offer to somebody who wrote ``near``: the nearest of all first, then those that are usual."""
    usual = _OFFERED.split(", ")
    found = difflib.get_close_matches(near[:40].strip().lower().replace("_", "-"), _CODECS, n=1)
    return ", ".join(dict.fromkeys([*found, *usual]))


def prove_encoding(path: Path, named: str | None = None, expect: Collection[str] = ()) -> str:
    """The codec that reads a text from its first to its last byte.

    Arguments: ``named``, the encoding as the sender names it, None to find it out; ``expect``, words that such a text may
    have, which settle what would be doubtful. Order: a byte order mark, UTF-8, UTF-16 without a mark, GB18030 and CP932.
    Raises :class:`InputError`: ``encoding`` with the line and byte of what cannot be read, ``nul_byte``.
    """
    with path.open("rb") as file:
        head = file.read(4)
    if named is not None:
        return _proved(path, known_encoding(named))
    if (wide := _utf32(path, head)) is not None:
        text = next(decoded(path, wide), "").removeprefix("\ufeff")
        raise InputError(
            f"the text is UTF-32, which is read only where it is named; {_HOW}", code="encoding",
            params={"suggestions": [{"encoding": wide, "cells": _first_cells(text)}]},
        )  # fmt: skip
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return _proved(path, "utf-16")
    first = _broken_at(path, "utf-8")
    nul = _first_nul(path)
    if nul is not None:
        codec = _bare_utf16(path, utf8=first is None)
        if codec is None:
            raise _nul_byte(path, nul)
        return codec
    if first is None:
        return "utf-8-sig"
    if head.startswith(BOM):
        raise _undecodable(path, first, "UTF-8")
    return _by_sense(path, first, expect)


def head_text(head: bytes) -> bytes:
    """The beginning of a file as UTF-8, as far as its encoding shows at once; else its bytes."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return head.decode("utf-16", "ignore").encode("utf-8", "ignore")
    if head[1:2] == b"\0" and head[3:4] == b"\0":
        return head.decode("utf-16-le", "ignore").encode("utf-8", "ignore")
    if head[:1] == b"\0" and head[2:3] == b"\0":
        return head.decode("utf-16-be", "ignore").encode("utf-8", "ignore")
    return head.removeprefix(BOM)


def decoded(path: Path, codec: str) -> Iterator[str]:
    """The text in pieces of a megabyte or less."""
    decoder = codecs.getincrementaldecoder(codec)()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield decoder.decode(chunk)
        yield decoder.decode(b"", True)


def _proved(path: Path, codec: str) -> str:
    fault = _broken_at(path, codec)
    if fault is not None:
        raise _undecodable(path, fault, codec.removesuffix("-sig").upper().replace("_", "-"))
    if codec.startswith(("utf-16", "utf-32")):
        if any("\0" in piece for piece in decoded(path, codec)):
            raise InputError(f"the text contains NUL characters: the file is damaged; {_HOW}", code="nul_byte")
    elif (nul := _first_nul(path)) is not None:
        raise _nul_byte(path, nul)
    return codec


def _utf32(path: Path, head: bytes) -> str | None:
    """The codec of a text in four bytes for each character, with a mark or without one; None where it is in another."""
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        codec = "utf-32"
    elif len(head) == 4 and head[0] and head[1:] == b"\0\0\0":
        codec = "utf-32-le"
    elif len(head) == 4 and head[3] and head[:3] == b"\0\0\0":
        codec = "utf-32-be"
    else:
        return None
    return codec if path.stat().st_size % 4 == 0 and _broken_at(path, codec) is None else None


def _first_cells(text: str) -> list[str]:
    return [cell.strip()[:80] for cell in re.split(r"[,;\t|\r\n]", text[:2_000]) if cell.strip()][:3]


def _broken_at(path: Path, codec: str) -> int | None:
    """The place of the first byte that a codec cannot read; None where it reads all."""
    decoder, place = codecs.getincrementaldecoder(codec)(), 0
    with path.open("rb") as file:
        while True:
            chunk = file.read(_CHUNK)
            held = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeError as error:
                return place + getattr(error, "start", 0) - held
            if not chunk:
                return None
            place += len(chunk)


def _first_nul(path: Path) -> int | None:
    place = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            if (nul := chunk.find(b"\0")) >= 0:
                return place + nul
            place += len(chunk)
    return None


def _line_of(path: Path, place: int) -> int:
    lines, left = 1, place
    with path.open("rb") as file:
        while left > 0 and (chunk := file.read(min(_CHUNK, left))):
            lines += chunk.count(b"\n")
            left -= len(chunk)
    return lines


def _undecodable(path: Path, place: int, name: str) -> InputError:
    return _doubtful(path, place, f"line {_line_of(path, place)} (byte {place + 1}) is not {name} text")


def _doubtful(path: Path, place: int, why: str) -> InputError:
    """The refusal of a text whose encoding nobody can be certain of, with the likely ones."""
    from asynctask.lists.readers.suggestions import suggestions  # hardly any list needs them

    found = suggestions(path, place)
    shown = ", ".join(each["encoding"] for each in found)
    return InputError(
        f"{why}; {_HOW}{f' (likely: {shown})' if shown else ''}", code="encoding",
        params={"suggestions": found} if found else None,
    )  # fmt: skip


def _nul_byte(path: Path, place: int) -> InputError:
    return InputError(
        f"line {_line_of(path, place)} (byte {place + 1}) contains a NUL byte: the file is damaged or no text;"
        " save it as 'CSV UTF-8'",
        code="nul_byte",
    )


def _bare_utf16(path: Path, *, utf8: bool) -> str | None:
    """UTF-16 without a byte order mark, where it is certain: nearly all of its NUL bytes stand on one side of the pairs."""
    size = path.stat().st_size
    sides = [0, 0]
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            for side in (0, 1):
                sides[side] += chunk[side::2].count(0)
            # The upper halves of Cyrillic letters, for instance, are valid UTF-8, but no text.
            utf8 = utf8 and len(chunk.translate(None, _CONTROL_BYTES)) == len(chunk)
    # A character such as 一 has a zero on the other side: few have.
    if size % 2 or 2 * min(sides) > max(sides) or (utf8 and max(sides) < size / 4):
        return None
    codec = "utf-16-le" if sides[1] > sides[0] else "utf-16-be"
    if _broken_at(path, codec) is not None:
        return None
    lines = 0
    for piece in decoded(path, codec):
        if _CONTROLS.search(piece):
            return None
        lines += piece.count("\n")
    return codec if lines else None


def _by_sense(path: Path, first: int, expect: Collection[str]) -> str:
    """GB18030 or CP932, if one of them reads all of the text and makes sense of it, and more than the other."""
    samples = {codec: _sample(path, codec) for codec in ("gb18030", "cp932") if _may_be(path, codec)}
    wanted = {name for name in map(normalise, expect) if not name.isascii()}
    named = [codec for codec, text in samples.items() if any(name in normalise(text) for name in wanted)]
    if len(named) == 1:
        return named[0]
    scores = {codec: _score(codec, text) for codec, text in samples.items()}
    ranked = sorted(scores, key=scores.__getitem__, reverse=True)
    best = ranked[0] if ranked else ""
    if not best or scores[best] < _SOUND or not _alone(path, best, samples[best]):
        raise _undecodable(path, first, "UTF-8")
    if len(ranked) > 1 and scores[best] - scores[ranked[1]] < _CLEARLY:
        raise _doubtful(
            path, first, f"the text is not UTF-8, and as GB18030 and as CP932 it makes equal sense (byte {first + 1})"
        )
    return best


def _may_be(path: Path, codec: str) -> bool:
    """Whether a codec reads all of a text, without what only a wrong reading has: control characters of the second set,
    which Windows has letters and signs for, and single East Asian characters right behind Latin letters (``It痴``) or some
    that have all swallowed a Latin letter (``rock創池oll``), unless words of several are many times as many."""
    lone = words = 0
    try:
        for piece in decoded(path, codec):
            if _SECOND_CONTROLS.search(piece):
                return False
            lone += len(_LONE.findall(piece)) + sum(_swallowed(run, codec) for run in _BEHIND.findall(piece))
            words += len(_WORDS.findall(piece))
    except UnicodeError:
        return False
    return lone * _FEW <= words


def _swallowed(run: str, codec: str) -> bool:
    """Whether the second byte of each character is a Latin letter."""
    data = run.encode(codec)
    return len(data) == 2 * len(run) and data[1::2].isalpha()


def _sample(path: Path, codec: str) -> str:
    """The lines that are not plain ASCII, as many as tell enough."""
    found: list[str] = []
    size = 0
    for piece in decoded(path, codec):
        for line in piece.splitlines():
            if not line.isascii():
                found.append(line[:_SAMPLE])
                size += len(found[-1])
        if size > _SAMPLE:
            break
    return "\n".join(found)[: 2 * _SAMPLE]


def _score(codec: str, text: str) -> float:
    """How much sense a reading makes, from 0 to 1: the mean over its characters beyond ASCII."""
    half = _half_width(text) if codec == "cp932" else 0.0
    weigh = _weigh_han if codec == "gb18030" else _weigh_japanese
    total = count = 0.0
    previous = " "
    for place, character in enumerate(text):
        if not character.isascii():
            count += 1
            following = text[place + 1 : place + 2] or " "
            lonely = previous.isascii() and following.isascii() and _accent(previous, character, following, codec)
            total += half if "｡" <= character <= "ﾟ" else -0.5 if lonely else weigh(character)
        previous = character
    return total / count if count else 0.0


def _accent(previous: str, character: str, following: str, codec: str) -> bool:
    """Whether one foreign character in or before a Latin word is an accented letter that was read wrong."""
    if not following.isalpha():
        return False
    # At the beginning of a word the accent has swallowed the letter behind it: Škoda.
    return previous.isalpha() or character.encode(codec, "ignore")[1:].isalpha()


def _weigh_han(character: str) -> float:
    if character in COMMON_HAN:
        return 1.0
    try:
        code = character.encode("gb2312")
    except UnicodeEncodeError:
        return -2.0 if unicodedata.category(character) == "Co" else 0.0
    row = code[0] - 0xA0
    return 0.8 if row <= 3 else 0.4 if row <= 15 else 0.7 if row <= 55 else 0.3


def _weigh_japanese(character: str) -> float:
    if unicodedata.category(character) == "Co":
        return -2.0
    code = character.encode("cp932", "ignore")
    if not code:
        return 0.0
    if "ぁ" <= character <= "ヿ":
        return 1.0
    if code[0] <= 0x82 or 0x88 <= code[0] < 0x98 or (code[0] == 0x98 and code[-1] <= 0x72):
        return 0.8
    return -0.2 if code[0] < 0xEB else 0.2


def _half_width(text: str) -> float:
    """What a half-width kana is worth: much, if they stand in words as the kana of words do; little, if at random."""
    runs = _HALF.findall(text)
    if not runs:
        return 0.0
    letters = sum(map(len, runs))
    single = sum(len(run) == 1 for run in runs)
    misplaced = sum(len(_VOICED.findall(run)) for run in runs)
    marks = sum(each in "ｰﾞﾟ" for run in runs for each in run)
    alone = not any("ぁ" <= each <= "ヿ" or "一" <= each <= "鿿" for each in text)
    if alone and (marks < 2 or marks < _MARKED * letters):
        return 0.0  # capitals with accents, Cyrillic and Thai are half-width kana too
    rare = sum(_weigh_japanese(each) < 0 for each in text if not each.isascii() and not "｡" <= each <= "ﾟ")
    return 0.9 if 4 * single < letters and 50 * misplaced < letters and 20 * rare < letters else 0.0


def _alone(path: Path, codec: str, text: str) -> bool:
    """Whether no other encoding explains the same bytes: Korean and Japanese of Unix read as Chinese, at random."""
    if not any(unicodedata.category(character) == "Lo" for character in text):
        return False
    if codec == "cp932":
        return _broken_at(path, "euc_jp") is not None or _score("cp932", _sample(path, "euc_jp")) < _SOUND
    han = [character for character in text if "一" <= character <= "鿿"]
    # Kana are the same bytes in Chinese and in Japanese of Unix.
    enough = _MOSTLY if _korean(path) or any("ぁ" <= character <= "ヿ" for character in text) else _OFTEN
    often = sum(character in COMMON_HAN for character in han) >= enough * len(han)
    return (bool(han) and often) or all(_broken_at(path, other) is not None for other in ("cp949", "euc_jp"))


def _korean(path: Path) -> bool:
    """Whether a text read as Korean is made of its syllables."""
    if _broken_at(path, "cp949") is not None:
        return False
    foreign = [character for character in _sample(path, "cp949") if not character.isascii()]
    return sum("가" <= character <= "힣" for character in foreign) >= _SYLLABLES * len(foreign)
