"""Texts of an Event that people read: the messages of the middleware in the shipped languages, and the mask of secrets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

KEEP_FIRST: Final = 10
KEEP_LAST: Final = 90
MAX_MESSAGE: Final = 10_000
"""Largest number of characters of one message."""

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
