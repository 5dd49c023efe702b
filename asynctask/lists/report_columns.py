"""The columns that a report adds to a list, by language: one table for writing them and for knowing them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["COLUMNS", "SUFFIX", "of_locale"]

COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "en": ("row", "status", "error", "attempts", "result"),
    "zh_CN": ("行号", "状态", "错误", "尝试次数", "结果"),
    "ja": ("行番号", "状態", "エラー", "試行回数", "結果"),
}
"""Row number, status, error, attempts and result, in this order, by locale."""

SUFFIX: Final[Mapping[str, str]] = {"en": " (report)", "zh_CN": " (报告)", "ja": " (レポート)"}
"""What stands behind a name that an original column has too. In NFKC and folded case: it is compared so."""


def of_locale(locale: str) -> str:
    """``locale`` if its names ship, else ``en``."""
    return locale if locale in COLUMNS else "en"
