"""Detects the encoding of a text: proved by decoding all of it; among several possible ones, by plausibility of the result.

An unclear encoding is refused: a wrong guess would fill the ledger with garbled characters.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import re
import unicodedata
from collections.abc import Collection, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Final

from asynctask.errors import InputError
from asynctask.lists.readers.base import normalise

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
OFFERED: Final = ("utf-8", "utf-16", "gb18030", "cp932", "euc-jp", "big5", "cp949", "cp1252")
_REMEDY: Final = "save it as 'CSV UTF-8', or say which encoding it is in with the option encoding"
_CONTROLS: Final = re.compile("[\x00-\x08\x0e-\x1f\ufffe\uffff\ue000-\uf8ff]")
_SECOND_CONTROLS: Final = re.compile("[\x80-\x9f]")
_EAST_ASIAN: Final = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff61-\uff9f\U00020000-\U0003ffff"
_LONE_CHARACTER: Final = re.compile(f"(?<=[A-Za-z])[{_EAST_ASIAN}](?![{_EAST_ASIAN}])")
_AFTER_LATIN: Final = re.compile(f"(?<=[A-Za-z])[{_EAST_ASIAN}]{{2,4}}(?![{_EAST_ASIAN}])")
_WORDS: Final = re.compile(f"[{_EAST_ASIAN}]{{2,}}")
_WORDS_PER_LONE: Final = 20
"""Words of several East Asian characters needed for each lone character after a Latin letter."""
_CONTROL_BYTES: Final = bytes({*range(1, 9), *range(14, 32)})
_MIN_SCORE: Final = 0.5
"""The least score of an accepted reading."""
_MIN_LEAD: Final = 0.05
"""By how much the better of two readings must lead."""
_MIN_COMMON: Final = 0.25
"""The least share of common Chinese characters where the same bytes are valid Korean or Japanese too."""
_MIN_COMMON_KOREAN: Final = 0.75
"""The same where those bytes are all Korean syllables, as no longer Chinese text is."""
_MIN_SYLLABLES: Final = 0.9
_MIN_MARKS: Final = 0.08
"""The least share of sound marks and long vowels among half-width kana in a text without other Japanese."""
_HALF: Final = re.compile("[ｦ-ﾟ]+")
_VOICED: Final = re.compile("(?<![ｳｶ-ﾄﾊ-ﾎ])ﾞ|(?<![ﾊ-ﾎ])ﾟ")


def known_encoding(name: str) -> str:
    """The codec of an encoding's name. Raises :class:`InputError` ``encoding`` for an unknown one."""
    codec = _CODECS.get(name.strip().strip("\"'").lower().replace("_", "-"))
    if codec is None:
        raise InputError(f"no encoding {name[:40]!r} is known; give one of: {encoding_names(name)}", code="encoding")
    return codec


def encoding_names(near: str) -> str:
    """The encodings to offer instead of the unknown name ``near``: the nearest first, then the usual ones."""
    found = difflib.get_close_matches(near[:40].strip().lower().replace("_", "-"), _CODECS, n=1)
    return ", ".join(dict.fromkeys([*found, *OFFERED]))


def prove_encoding(path: Path, named: str | None = None, expect: Collection[str] = ()) -> str:
    """The codec that decodes the whole text.

    Arguments: ``named``, the encoding as the sender names it, None to detect it; ``expect``, words likely in the text, to
    settle doubtful cases. Order: byte order mark, UTF-8, UTF-16 without a mark, GB18030 and CP932.
    Raises :class:`InputError`: ``encoding`` with the line and byte that cannot be decoded, ``nul_byte``.
    """
    with path.open("rb") as file:
        head = file.read(4)
    if named is not None:
        return _proved(path, known_encoding(named))
    if (wide := _utf32(path, head)) is not None:
        text = next(decoded(path, wide), "").removeprefix("\ufeff")
        raise InputError(
            f"the text is UTF-32, which is read only where it is named; {_REMEDY}",
            code="encoding",
            params={"suggestions": [{"encoding": wide, "cells": _first_cells(text)}]},
        )
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
    return _by_plausibility(path, first, expect)


def head_text(head: bytes) -> bytes:
    """The beginning of a file as UTF-8 if it is visibly UTF-16 or UTF-8; else its bytes."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return head.decode("utf-16", "ignore").encode("utf-8", "ignore")
    if head[1:2] == b"\0" and head[3:4] == b"\0":
        return head.decode("utf-16-le", "ignore").encode("utf-8", "ignore")
    if head[:1] == b"\0" and head[2:3] == b"\0":
        return head.decode("utf-16-be", "ignore").encode("utf-8", "ignore")
    return head.removeprefix(BOM)


def decoded(path: Path, codec: str) -> Iterator[str]:
    """The text, streamed in pieces of at most 1 MiB of the file."""
    decoder = codecs.getincrementaldecoder(codec)()
    yield from map(decoder.decode, bytes_of(path))
    yield decoder.decode(b"", True)


def _proved(path: Path, codec: str) -> str:
    fault = _broken_at(path, codec)
    if fault is not None:
        raise _undecodable(path, fault, codec.removesuffix("-sig").upper().replace("_", "-"))
    if codec.startswith(("utf-16", "utf-32")):
        if any("\0" in piece for piece in decoded(path, codec)):
            raise InputError(f"the text contains NUL characters: the file is damaged; {_REMEDY}", code="nul_byte")
    elif (nul := _first_nul(path)) is not None:
        raise _nul_byte(path, nul)
    return codec


def _utf32(path: Path, head: bytes) -> str | None:
    """The codec of a UTF-32 text with or without a byte order mark; None for any other."""
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
    """The offset of the first byte that a codec cannot decode; None if it decodes all."""
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


def bytes_of(path: Path) -> Iterator[bytes]:
    """A file in pieces of at most 1 MiB."""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _first_nul(path: Path) -> int | None:
    place = 0
    for chunk in bytes_of(path):
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
    """The refusal of a text of unclear encoding, with the likely ones."""
    found = suggestions(path, place)
    shown = ", ".join(each["encoding"] for each in found)
    return InputError(
        f"{why}; {_REMEDY}{f' (likely: {shown})' if shown else ''}",
        code="encoding",
        params={"suggestions": found} if found else None,
    )


def _nul_byte(path: Path, place: int) -> InputError:
    return InputError(
        f"line {_line_of(path, place)} (byte {place + 1}) contains a NUL byte: the file is damaged or no text;"
        " save it as 'CSV UTF-8'",
        code="nul_byte",
    )


def _bare_utf16(path: Path, *, utf8: bool) -> str | None:
    """UTF-16 without a byte order mark, if certain: nearly all NUL bytes are on one side of the byte pairs."""
    size = path.stat().st_size
    sides = [0, 0]
    for chunk in bytes_of(path):
        for side in (0, 1):
            sides[side] += chunk[side::2].count(0)
        # The high bytes of Cyrillic letters, for instance, are valid UTF-8, but control characters.
        utf8 = utf8 and len(chunk.translate(None, _CONTROL_BYTES)) == len(chunk)
    # A few characters, 一 for instance, have their zero byte on the other side.
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


def _by_plausibility(path: Path, first: int, expect: Collection[str]) -> str:
    """GB18030 or CP932, if one decodes the whole text plausibly, and more so than the other."""
    samples = {codec: _sample(path, codec) for codec in ("gb18030", "cp932") if _may_be(path, codec)}
    wanted = {name for name in map(normalise, expect) if not name.isascii()}
    named = [codec for codec, text in samples.items() if any(name in normalise(text) for name in wanted)]
    if len(named) == 1:
        return named[0]
    scores = {codec: _score(codec, text) for codec, text in samples.items()}
    ranked = sorted(scores, key=scores.__getitem__, reverse=True)
    best = ranked[0] if ranked else ""
    if not best or scores[best] < _MIN_SCORE or not _unambiguous(path, best, samples[best]):
        raise _undecodable(path, first, "UTF-8")
    if len(ranked) > 1 and scores[best] - scores[ranked[1]] < _MIN_LEAD:
        raise _doubtful(
            path, first, f"the text is not UTF-8, and as GB18030 and as CP932 it makes equal sense (byte {first + 1})"
        )
    return best


def _may_be(path: Path, codec: str) -> bool:
    """Whether a codec decodes the whole text without signs of a wrong reading: C1 control characters, where Windows has
    letters and signs; single East Asian characters after Latin letters (``It痴``) and groups that have swallowed Latin
    letters (``rock創池oll``), unless East Asian words are many times as frequent."""
    lone = words = 0
    try:
        for piece in decoded(path, codec):
            if _SECOND_CONTROLS.search(piece):
                return False
            lone += len(_LONE_CHARACTER.findall(piece)) + sum(_swallowed(run, codec) for run in _AFTER_LATIN.findall(piece))
            words += len(_WORDS.findall(piece))
    except UnicodeError:
        return False
    return lone * _WORDS_PER_LONE <= words


def _swallowed(run: str, codec: str) -> bool:
    """Whether the second byte of each character is a Latin letter."""
    data = run.encode(codec)
    return len(data) == 2 * len(run) and data[1::2].isalpha()


def _sample(path: Path, codec: str) -> str:
    """A sample of the lines that are not ASCII."""
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
    """The plausibility of a reading from 0 to 1: the mean over its non-ASCII characters."""
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
    """Whether a lone foreign character in or before a Latin word is a misread accented letter."""
    if not following.isalpha():
        return False
    # At the start of a word the misread accent swallows the following letter: Škoda.
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
    """The weight of a half-width kana: high if they form words, low if they are scattered."""
    runs = _HALF.findall(text)
    if not runs:
        return 0.0
    letters = sum(map(len, runs))
    single = sum(len(run) == 1 for run in runs)
    misplaced = sum(len(_VOICED.findall(run)) for run in runs)
    marks = sum(each in "ｰﾞﾟ" for run in runs for each in run)
    alone = not any("ぁ" <= each <= "ヿ" or "一" <= each <= "鿿" for each in text)
    if alone and (marks < 2 or marks < _MIN_MARKS * letters):
        return 0.0  # accented capitals, Cyrillic and Thai decode to half-width kana too
    rare = sum(_weigh_japanese(each) < 0 for each in text if not each.isascii() and not "｡" <= each <= "ﾟ")
    return 0.9 if 4 * single < letters and 50 * misplaced < letters and 20 * rare < letters else 0.0


def _unambiguous(path: Path, codec: str, text: str) -> bool:
    """Whether no other encoding explains the bytes: EUC-KR and EUC-JP decode as random Chinese."""
    if not any(unicodedata.category(character) == "Lo" for character in text):
        return False
    if codec == "cp932":
        return _broken_at(path, "euc_jp") is not None or _score("cp932", _sample(path, "euc_jp")) < _MIN_SCORE
    han = [character for character in text if "一" <= character <= "鿿"]
    # Kana have the same bytes in GB18030 and EUC-JP.
    enough = _MIN_COMMON_KOREAN if _korean(path) or any("ぁ" <= character <= "ヿ" for character in text) else _MIN_COMMON
    often = sum(character in COMMON_HAN for character in han) >= enough * len(han)
    return (bool(han) and often) or all(_broken_at(path, other) is not None for other in ("cp949", "euc_jp"))


def _korean(path: Path) -> bool:
    """Whether the text, decoded as Korean, consists of its syllables."""
    if _broken_at(path, "cp949") is not None:
        return False
    foreign = [character for character in _sample(path, "cp949") if not character.isascii()]
    return sum("가" <= character <= "힣" for character in foreign) >= _MIN_SYLLABLES * len(foreign)


# -- suggestions for an unclear encoding

_CANDIDATES: Final = {
    "windows-1252": ("cp1252", 0.0), "gb18030": ("gb18030", 0.0), "cp932": ("cp932", 0.0), "cp949": ("cp949", 0.0),
    "big5": ("big5hkscs", 0.05), "windows-1251": ("cp1251", 0.05), "windows-1250": ("cp1250", 0.05),
    "windows-1253": ("cp1253", 0.05), "euc-jp": ("euc_jp", 0.1), "windows-1254": ("cp1254", 0.1),
    "windows-1255": ("cp1255", 0.1), "windows-1256": ("cp1256", 0.1), "windows-874": ("cp874", 0.1),
    "windows-1257": ("cp1257", 0.15), "windows-1258": ("cp1258", 0.2), "koi8-r": ("koi8_r", 0.2),
    "mac-roman": ("mac_roman", 0.3),
}  # fmt: skip
"""Name for the option ``encoding`` -> codec, and the lead that a rare encoding must have over the common ones."""
_SPAN: Final = 1 << 18
_PIECES: Final = 16
_CELLS: Final = 3
_SCORED: Final = 2_000
_OFFERED_AT_MOST: Final = 4
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
    """The likely encodings, best first: ``encoding``, a name for the option, and ``cells``, the first three non-ASCII cells
    decoded by it. ``place``: offset of the first byte that is not UTF-8."""
    data = _from_line(path, place)
    ranked = []
    for name, (codec, rare) in _CANDIDATES.items():
        text = _decoded(data, codec)
        if text is not None and not _BAD.search(text) and _decodes(path, codec):
            cells = list(islice(_cells(text), _CELLS))
            ranked.append((rare - _plausibility(text), name, [cell[:_LONGEST] for cell in cells]))
    found: list[dict[str, Any]] = []
    for score, name, cells in sorted(ranked):
        # Of several encodings that give the same cells, only the likeliest is offered.
        if cells and (score < 0 or not found) and all(cells != each["cells"] for each in found):
            found.append({"encoding": name, "cells": cells})
    return found[:_OFFERED_AT_MOST]


def _from_line(path: Path, place: int) -> bytes:
    """Whole lines, from the line of an offset on, up to :data:`_SPAN` bytes."""
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


def _decodes(path: Path, codec: str) -> bool:
    """Whether a codec decodes a text, or its first 16 MiB."""
    try:
        return not any(map(_BAD.search, islice(decoded(path, codec), _PIECES)))
    except UnicodeError:
        return False


def _cells(text: str) -> Iterator[str]:
    """The non-ASCII cells; of JSON, its strings and other tokens."""
    if text.lstrip()[:1] in ("{", "["):
        rows: Iterator[list[str]] = (re.split(r'[\[\]{},:"]', line) for line in text.splitlines())
    else:
        head = text[:65_536]
        rows = csv.reader(text.splitlines(), delimiter=max(",;\t|", key=head.count))
    try:
        yield from (cell.strip() for row in rows for cell in row if not cell.isascii())
    except csv.Error:
        return


def _plausibility(text: str) -> float:
    """The plausibility of a reading: the mean over its non-ASCII words and signs."""
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
        return -0.2 if not _consistent_case(word) else 0.9 if len(word) > 1 else 0.4
    if scripts <= {"latin", "han", "kana", "hangul"}:
        # 白色T恤 is a word, It痴 is not.
        within = len(foreign) == 1 and not (word[0].isupper() and word[-1] in foreign and len(word) == 2)
        return -0.8 if within else 0.5
    return -0.8


def _weigh_latin(word: str, foreign: int) -> float:
    if not _consistent_case(word) or any(letter in "ªºĿŀʼŉ" for letter in word):
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


def _consistent_case(word: str) -> bool:
    """Whether no capital follows a small letter."""
    return not any(a.islower() and b.isupper() for a, b in pairwise(word))


def _script(code: int) -> str:
    if code < 0x0250 or 0x1E00 <= code < 0x1F00:
        return "latin"
    return next((name for first, end, name in _SCRIPTS if first <= code < end), "other")


_WESTERN: Final = frozenset("àáâãäåæçèéêëìíîïñòóôõöøùúûüßœÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜŒ")
_OTHERS: Final = frozenset("ąćęłńśźżĄĆĘŁŃŚŹŻěščřžýůďťňĚŠČŘŽÝŮĎŤŇőűŐŰğışĞİŞăţşĂŢđĐļķģņēīūāąųėįĒĪŪĀĖĮŲư")
"""The accented letters of Western European languages, and of the other languages in Latin script."""


# -- common Chinese characters

COMMON_HAN: Final = frozenset(
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所然家种事成方多经么去法"
    "学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实日军者意无力它与长把机十民第公此已工使情明性知全三又关点正业外"
    "将两高间由问很最重并物手应战向头文体政美相见被利什二等产或新己制身果加西斯月话合回特代内信表化老给世位次度门任常先海通教儿原东声提立及"
    "比员解水名真论处走义各入几口认条平系气题活尔更别打女变四神总何电数安少报才结反受目太量再感建务做接必场件计管期市直德资命山金指克许统区保"
    "至队形社便空决治展马科司五基眼书非则听白却界达光放强即像难且权思王象完设式色路记南品住告类求据程北边死张该交规万取拉格望觉术领共确传师观"
    "清今切院让识候带导争运笔编号码称价型店铺订单客户址促销库存状态备注商购售货款费元退换质检验审核优惠券折扣店员姓男岁联邮箱省县村镇街楼室"
    "李刘陈杨黄赵吴周徐孙朱胡郭林罗郑梁谢宋唐韩冯邓曹彭曾萧田董潘袁蔡蒋余杜叶魏苏吕丁沈姚卢姜崔钟谭陆汪范石廖贾夏韦方白邹孟熊秦邱江尹薛闫段雷侯"
    "龙史陶黎贺顾毛郝龚邵钱严覃武戴莫孔伟芳娜敏静丽磊洋勇艳杰娟涛超秀霞刚桂英华玉兰红梅鹏辉京津沪渝广州深圳苏浙鲁豫鄂湘川贵云陕甘青宁藏新春夏秋冬"
    "红黄蓝绿黑白灰粉紫橙衣裤裙鞋帽包手机电脑耳机充电器食米面油盐茶酒果菜肉蛋奶水杯碗床桌椅柜灯纸书本袋盒箱瓶件套双条张台只块公斤克升米尺寸"
)
"""Most of the characters of Chinese lists; of those of a wrong reading at most a tenth are among them."""
