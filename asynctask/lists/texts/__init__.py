"""What a refusal says, in every language that ships: one text for each key, with its parameters in braces.

The keys of pydantic's errors are its own error types, those of whole lists begin with ``list.``, those of options with
``option.``; all others are this project's own findings in a row. Every language has every key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from asynctask.lists.texts.en import TEXTS as EN
from asynctask.lists.texts.ja import TEXTS as JA
from asynctask.lists.texts.zh_cn import TEXTS as ZH_CN

__all__ = ["TEXTS"]

TEXTS: Final[Mapping[str, Mapping[str, str]]] = {"en": EN, "zh_CN": ZH_CN, "ja": JA}
"""Locale -> key -> text."""
