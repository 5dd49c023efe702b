"""Texts of an Event that people read: the messages of the middleware in the shipped languages, what the messages of similar
errors have in common, tracebacks, and the mask of secrets."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

KEEP_FIRST: Final = 10
KEEP_LAST: Final = 90
MAX_MESSAGE: Final = 10_000
"""Largest number of characters of one message."""

MAX_ERROR: Final = 1_000
"""Largest number of characters that ``events.last_error`` has of a message."""

SECRET: Final = "$secret"  # noqa: S105 - the name of a member
"""The only member of the object that marks a secret in a stored item: ``{"$secret": value}``."""
MASK: Final = "**********"
"""The display of a secret, whatever its length; the same as pydantic's."""

CATALOGUE: Final[Mapping[str, Mapping[str, str]]] = {
    "en": {
        "working": "In progress",
        "finish": "Done",
        "failed": "Failed: {0}",
        "error": "Error: {0}",
        "retry": "Waiting for retry",
        "interrupted": "Interrupted",
        "timeout": "Timed out",
        "stopped": "Stopped",
        "worker_lost": "Worker lost",
        "poison": "Worker lost {0} times; given up",
        "cancelled": "Cancelled",
        "given_back": "Taken back from the queue",
        "redispatched": "Lost by the queue; dispatched again",
        "retried": "Retried",
        "sent_again": "Sent again",
        "ignored": "Ignored: {0}",
        "resumed": "Started again",
        "discarded": "Given up: {0}",
        "not_kept": "The result was not kept: {0}",
    },
    "zh_CN": {
        "working": "处理中",
        "finish": "已经完成",
        "failed": "发生错误: {0}",
        "error": "发生致命错误: {0}",
        "retry": "等待重试",
        "interrupted": "被中断",
        "timeout": "超时",
        "stopped": "已停止",
        "worker_lost": "工作进程丢失",
        "poison": "工作进程丢失 {0} 次，已放弃",
        "cancelled": "已取消",
        "given_back": "已从队列取回",
        "redispatched": "队列丢失，重新派发",
        "retried": "已重试",
        "sent_again": "已再次发送",
        "ignored": "已忽略: {0}",
        "resumed": "重新开始",
        "discarded": "已放弃: {0}",
        "not_kept": "结果未保存: {0}",
    },
    "ja": {
        "working": "処理中",
        "finish": "完了しました",
        "failed": "失敗: {0}",
        "error": "エラー: {0}",
        "retry": "再試行待ち",
        "interrupted": "中断されました",
        "timeout": "タイムアウトしました",
        "stopped": "停止しました",
        "worker_lost": "ワーカーが失われました",
        "poison": "ワーカーが{0}回失われたため打ち切りました",
        "cancelled": "取り消されました",
        "given_back": "キューから戻されました",
        "redispatched": "キューで失われたため再送しました",
        "retried": "再実行します",
        "sent_again": "再送信されました",
        "ignored": "無視: {0}",
        "resumed": "再開しました",
        "discarded": "打ち切り: {0}",
        "not_kept": "結果は保存されませんでした: {0}",
    },
}


class Catalogue:
    """The messages of one locale. Raises KeyError for an unknown locale."""

    def __init__(self, locale: str = "en") -> None:
        self._texts = CATALOGUE[locale]
        self._alone = {key: clean(text.replace("{0}", "")) for key, text in self._texts.items()}
        self.locale = locale

    def __call__(self, key: str, text: str = "") -> str:
        """The message for ``key`` with ``text`` inserted, at most ``MAX_MESSAGE`` characters."""
        if not text:
            return self._alone[key]
        # Not str.format, because the text is untrusted and may contain braces.
        return clean(self._texts[key].replace("{0}", text))


def clean(text: str) -> str:
    """Text that every database stores: no lone surrogates, no NUL, at most ``MAX_MESSAGE`` characters.

    An error message may contain anything, and must not prevent its own recording.
    """
    return text[:MAX_MESSAGE].encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def is_storable(text: str) -> bool:
    """Whether every database stores this text: it has no lone surrogate and no NUL."""
    if "\0" in text:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def append(messages: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Appends messages, and keeps the first 10 and the last 90; an entry ``{"dropped": n}`` between counts the others."""
    merged = [*messages, *new]
    gap = next((i for i, m in enumerate(merged) if "dropped" in m), None)
    dropped = int(merged.pop(gap)["dropped"]) if gap is not None else 0
    excess = len(merged) - KEEP_FIRST - KEEP_LAST
    if excess > 0:
        del merged[KEEP_FIRST : KEEP_FIRST + excess]
        dropped += excess
    if dropped:
        merged.insert(KEEP_FIRST, {"dropped": dropped})
    return merged


def revealed(item: Any) -> Any:
    """An item as its sender sent it, with each marked secret replaced by its value."""
    if not isinstance(item, dict):
        return item
    return {key: each[SECRET] if isinstance(each, dict) and each.keys() == {SECRET} else each for key, each in item.items()}


def masked(value: Any) -> Any:
    """A parsed JSON value for display, with :data:`MASK` in place of each secret. Changes lists and objects in place."""
    holder = {"": value}
    left: list[Any] = [holder]  # no recursion, because values of other programs may be nested deeply
    while left:
        part = left.pop()
        for place, each in list(part.items() if isinstance(part, dict) else enumerate(part)):
            if isinstance(each, dict) and each.keys() == {SECRET}:
                part[place] = MASK
            elif isinstance(each, dict | list):
                left.append(each)
    return holder[""]


def secrets_in(value: Any) -> set[str]:
    """The texts and numbers in the marked secrets of a parsed JSON value, as other texts may repeat them: each line, and as
    Python quotes them. Shorter ones than three characters are left out, because they are parts of most texts."""
    forms = (form for text in _hidden_texts(value) for form in (*text.splitlines(), repr(text)[1:-1]))
    return {form for form in forms if len(form) >= _LEAST_SECRET}


_LEAST_SECRET: Final = 3


def _hidden_texts(value: Any) -> Iterator[str]:
    left: list[tuple[Any, bool]] = [(value, False)]  # no recursion, because values may be nested deeply
    seen: set[tuple[int, bool]] = set()  # arguments that an engine unpickled may contain themselves
    while left:
        part, hidden = left.pop()
        if not isinstance(part, Mapping | list | tuple):
            if hidden and part is not None and not isinstance(part, bool):
                yield str(part)
        elif (id(part), hidden) not in seen:
            seen.add((id(part), hidden))
            if isinstance(part, Mapping):
                hidden, part = hidden or part.keys() == {SECRET}, list(part.values())
            left += [(each, hidden) for each in part]


def text_of(error: BaseException) -> str:
    """The text of an error, cleaned for storage."""
    try:
        return clean(str(error))
    except Exception:  # the __str__ of the job's exception raised
        return f"({clean(type(error).__name__)} without a readable text)"


# -- what the messages of similar errors have in common

_SEEN: Final = 2_000
"""Number of characters at the beginning of a message that decide on its template."""

MAX_TEMPLATE: Final = 1_000

# Each alternative runs in linear time: a quoted part ends at the next quote, and the other two have no choice.
_QUOTED: Final = r"""(?<![\w›])(?:'[^'\n]*'|"[^"\n]*"|`[^`\n]*`)"""  # not the apostrophe in "can't"
_UUID: Final = r"(?=[a-fA-F-]{0,35}[0-9])[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_PART: Final = re.compile(rf"{_QUOTED}|{_UUID}|[^\W_]+")
_DIGITS: Final = re.compile(r"\d+")
_HEX: Final = re.compile(r"0[xX][0-9a-fA-F]+|[0-9a-fA-F]{6,}")
_NUMBERS: Final = re.compile(r"‹n›(?:[.,:]‹n›)+")


def template_of(message: str) -> str:
    """A message with placeholders for what varies between occurrences of one error: ``‹text›`` for a quoted part, ``‹id›``
    for a UUID and other mixtures of letters and digits, ``‹n›`` for a number. At most :data:`MAX_TEMPLATE` characters, made
    of the first 2,000; the template of a template is the same."""
    found = _NUMBERS.sub("‹n›", _PART.sub(_placeholder, message[:_SEEN]))
    return found[:MAX_TEMPLATE]


def _placeholder(found: re.Match[str]) -> str:
    part = found[0]
    if part[0] in "'\"`":
        return "‹text›"
    runs = len(_DIGITS.findall(part))
    if not runs or part.isdecimal():
        return "‹n›" if runs else part
    # One run of digits is a name with a number, as in "utf8"; several are random, as in "9s6XKzkNRiz8i3".
    is_id = "-" in part or _HEX.fullmatch(part) or (runs > 2 and len(part) >= 10)
    return "‹id›" if is_id else _DIGITS.sub("‹n›", part)


# -- tracebacks

MAX_TRACEBACK: Final = 4_096
"""Largest number of bytes of a traceback."""

_HEAD: Final = 1_024
"""Number of bytes at the beginning that are kept of a longer traceback; also the largest number of its message."""

_MAX_FRAMES: Final = 64
"""Number of frames that are read of each exception, the last ones."""

_OWN: Final = Path(__file__).parent
_CALLER: Final = str(_OWN / "job.py")
_CALLS: Final = ("in_this_process", "awaited_in_this_process")
"""The functions of :mod:`asynctask.job` that call code of the application."""

_LIBRARY: Final = Path(os.__file__).parent
_FRAMEWORKS: Final = tuple(f"{path}{os.sep}" for path in (_OWN, _LIBRARY / "asyncio", _LIBRARY / "concurrent"))
_ENGINES: Final = re.compile(r"[\\/](?:site|dist)-packages[\\/](?:celery|billiard|kombu|dramatiq|rq|huey)[\\/]")


def traceback_of(error: BaseException, args: Any = None) -> str | None:
    """The traceback of an error from the first frame of the application on, at most :data:`MAX_TRACEBACK` bytes; None if
    there is none. It has no values of variables, and :data:`MASK` in place of the marked secrets of the job's ``args``.

    Of a long one, the middle is left out. Never raises, because an error must not prevent its own recording.
    """
    try:
        told = traceback.TracebackException(
            type(error), error, error.__traceback__, limit=-_MAX_FRAMES, compact=True, capture_locals=False
        )
        if not _keep_own(told):
            return None
        text, message = "".join(told.format()), "".join(told.format_exception_only())
        for secret in sorted(secrets_in(args), key=len, reverse=True):
            text, message = text.replace(secret, MASK), message.replace(secret, MASK)
    except Exception:  # methods of the exception or of an argument may raise anything
        return None
    if text.endswith(message):  # an ExceptionGroup ends with its exceptions
        text = text.removesuffix(message) + _without_middle(message, _HEAD, _HEAD // 2)
    return _without_middle(text, MAX_TRACEBACK, _HEAD).rstrip()


def _keep_own(told: traceback.TracebackException) -> bool:
    """Removes the frames of the frameworks around the application's code from an exception and those that led to it.
    Whether any frame is left."""
    left, is_any = [told], False
    while left:
        each = left.pop()
        frames, start = list(each.stack), 0
        for after, frame in enumerate(frames, start=1):
            if frame.filename == _CALLER and frame.name in _CALLS:
                start = after
        while start < len(frames) and _is_framework(frames[start].filename):
            start += 1
        each.stack = traceback.StackSummary.from_list(frames[start:])
        is_any = is_any or start < len(frames)
        left += [other for other in (each.__cause__, each.__context__, *(each.exceptions or ())) if other is not None]
    return is_any


def _is_framework(path: str) -> bool:
    return path.startswith(_FRAMEWORKS) or _ENGINES.search(path) is not None


def _without_middle(text: str, most: int, head: int) -> str:
    """A text that every database stores, of at most ``most`` bytes: of a longer one, the first ``head`` and the last
    bytes."""
    raw = text.replace("\0", "\ufffd").encode("utf-8", "replace")
    if len(raw) <= most:
        return raw.decode()
    mark = f"\n... {len(raw) - most:,} bytes are left out ...\n".encode()
    return (raw[:head] + mark + raw[head + len(mark) - most :]).decode(errors="ignore")
